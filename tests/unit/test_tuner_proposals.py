"""Proposals: headroom from labels, variants, needs, and what is out of reach."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fxopt.labels import Axis, Label
from fxopt.options import Options
from fxopt.proposals import Proposals, headroom
from fxopt.registry import GraphPass, PassContext, Stage
from fxopt.report.model import GraphReport
from fxopt.verify import Precision, parse_precision


def label(axis: Axis, ns: float, launch: str = "k:1", *nodes: str) -> Label:
    return Label(axis, "group", nodes, launch, (), "high", ns, "why")


def make(name: str, **members: Any) -> Any:
    given = {"answers": frozenset({Axis.MEMORY_BOUND}), "stage": Stage.JOINT, "precision": Precision.FP32, **members}
    return dataclass(frozen=True)(type(name, (GraphPass,), {"name": name, **given}))()


def proposals(*passes: Any, classes: Any = None, **options: Any) -> Proposals:
    context = PassContext(torch.device("cpu"), parse_precision("fp32"))
    return Proposals(passes, Options(**options), GraphReport(), context, classes or {})


MEMORY = label(Axis.MEMORY_BOUND, 5_000.0, "k:1", "mm_1")


def test_a_pass_is_proposed_for_its_labels_with_their_headroom_and_only_once():
    a, b = make("a"), make("b", answers=frozenset({Axis.LAUNCH_BOUND}))
    found = proposals(a, b)
    (first,) = found.answering([MEMORY])
    assert first.variants == (a,) and first.headroom_ns == 5_000.0
    assert [p.name for p in found.answering([MEMORY, label(Axis.LAUNCH_BOUND, 1.0, "")])] == ["b"]


def test_of_several_labels_of_one_kernel_the_largest_counts():
    labels = [label(Axis.MEMORY_BOUND, 5.0), label(Axis.CAST_TRAFFIC, 8.0), label(Axis.MEMORY_BOUND, 2.0, "k:2")]
    assert headroom(labels, {}) == {"": 10.0}


def test_headroom_is_told_by_class_of_repeated_layer():
    labels = [label(Axis.MEMORY_BOUND, 5.0, f"k:{i}", f"mm_{i}") for i in range(3)]
    assert headroom(labels, {"mm_0": "A", "mm_1": "A"}) == {"A": 10.0, "": 5.0}
    (found,) = proposals(make("a"), classes={"mm_1": "A"}).answering([MEMORY])
    assert found.by_class == {"A": 5_000.0}


def test_a_pass_of_a_class_that_was_not_asked_for_is_out_of_reach_with_the_headroom():
    found = proposals(make("a", precision=Precision.BF16))
    assert found.answering([MEMORY]) == []
    assert found.report.out_of_reach == [
        "a: needs precision='bf16', and 'fp32' was asked for; it would answer memory_bound on 1 nodes "
        "(headroom 5.00 us)"
    ]


@pytest.mark.parametrize("objective", ["wall", "kernel"])
def test_what_shortens_calls_alone_is_a_proposal_where_kernels_decide_as_well(objective):
    """Of two whose kernels take as long, the faster call wins: kernels of this project cost the CPU more to launch."""
    found = proposals(make("a", answers=frozenset({Axis.LAUNCH_BOUND})), objective=objective)
    assert [p.name for p in found.answering([label(Axis.LAUNCH_BOUND, 9_000.0, "")])] == ["a"]
    assert not found.report.out_of_reach


@pytest.mark.parametrize("given", [lambda self, context: 1 / 0, lambda self, context: ()], ids=["raises", "nothing"])
def test_a_pass_whose_variants_fail_is_out_of_reach(given):
    found = proposals(make("a", variants=given))
    assert found.answering([MEMORY]) == []
    assert found.report.out_of_reach[0].startswith("a: its variants() raised ")


def test_needs_are_followed_to_their_end_and_absent_ones_left_out():
    a, b, c = make("a", needs=("b", "gone")), make("b", needs=("c", "a")), make("c")
    assert {p.name for p in proposals(a, b, c).needs(a)} == {"b", "c"}


def test_a_pass_that_a_graph_does_not_concern_is_not_mentioned():
    found = proposals(make("a", concerns=lambda self, context: False, applicable=lambda self, context: "no"))
    assert found.answering([MEMORY]) == [] and found.report.out_of_reach == []
    raising = proposals(make("a", concerns=lambda self, context: 1 / 0))
    assert [p.name for p in raising.answering([MEMORY])] == ["a"]
