"""Passes: what one must declare, how they are found, and in which order they run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from fxopt import registry
from fxopt.registry import GraphPass, PassReport, RegistryError, Stage


def make(name: str, stage: Stage = Stage.JOINT, after: tuple[str, ...] = (), before: tuple[str, ...] = ()):
    namespace = {"name": name, "stage": stage, "after": after, "before": before, "__module__": __name__}
    return dataclass(frozen=True)(type(name, (GraphPass,), namespace))()


def names(passes):
    return [p.name for p in passes]


def test_stages_come_in_order_and_names_break_ties():
    passes = [make("z", Stage.CONFIG), make("b"), make("a"), make("r", Stage.RUNTIME)]
    assert names(registry.order(passes)) == ["z", "a", "b", "r"]


def test_constraints_are_kept():
    assert names(registry.order([make("a", after=("b",)), make("b"), make("c", before=("b",))])) == ["c", "b", "a"]


def test_a_constraint_on_an_absent_pass_is_no_constraint():
    assert names(registry.order([make("a", after=("missing",))])) == ["a"]


def test_a_cycle_is_named():
    with pytest.raises(RegistryError, match="cycle: a -> b -> a"):
        registry.order([make("a", after=("b",)), make("b", after=("a",)), make("c")])


def test_a_constraint_against_the_stages_is_refused():
    with pytest.raises(RegistryError, match=r"early .*must come after late"):
        registry.order([make("early", after=("late",)), make("late", Stage.RUNTIME)])


def test_a_pass_must_be_a_frozen_dataclass_with_a_name_and_a_stage():
    class Plain(GraphPass):
        name = "plain"
        stage = Stage.JOINT

    with pytest.raises(RegistryError, match="name"):
        registry.register(dataclass(frozen=True)(type("Nameless", (GraphPass,), {"stage": Stage.JOINT})))
    with pytest.raises(RegistryError, match="stage"):
        registry.register(dataclass(frozen=True)(type("Stageless", (GraphPass,), {"name": "stageless"})))
    with pytest.raises(RegistryError, match="frozen dataclass"):
        registry.register(type("NotAPass", (), {"name": "x"}))


def test_two_passes_of_one_name_are_refused():
    @dataclass(frozen=True)
    class One(GraphPass):
        name: ClassVar[str] = "same_name"
        stage: ClassVar[Stage] = Stage.JOINT

    @dataclass(frozen=True)
    class Two(GraphPass):
        name: ClassVar[str] = "same_name"
        stage: ClassVar[Stage] = Stage.JOINT

    registry.register(One)
    try:
        registry.register(One)
        with pytest.raises(RegistryError, match="two passes are named 'same_name'"):
            registry.register(Two)
    finally:
        registry.unregister("same_name")


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(RegistryError, match=r"no pass is named 'nope'.*cuda_graphs"):
        registry.select(["nope"], [])
    with pytest.raises(RegistryError, match="no pass is named 'nope'"):
        registry.select(None, ["nope"])


def test_the_built_in_passes_are_found_and_ordered():
    built_in = ["freeze_weights", "promote_matmul_precision", "onednn_linear", "cuda_graphs"]
    assert names(registry.select(None, [])) == built_in
    assert names(registry.select(None, ["cuda_graphs"])) == built_in[:-1]


def test_options_and_source_make_the_fingerprint():
    @dataclass(frozen=True)
    class Tunable(GraphPass):
        name: ClassVar[str] = "tunable"
        stage: ClassVar[Stage] = Stage.JOINT
        block: int = 4

    assert Tunable().fingerprint() == Tunable(4).fingerprint() != Tunable(8).fingerprint()
    assert Tunable(8).options() == {"block": 8}


def test_a_report_survives_json():
    report = PassReport("p", "joint", 3, 2, (("mm", "why"),), True, "")
    assert PassReport.from_json(report.to_json()) == report
