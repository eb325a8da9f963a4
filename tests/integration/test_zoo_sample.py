"""Some models of tools/zoo.py: whatever a caller can see is as in eager, with candidates tried and with them in use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fxopt import registry

TOOLS = Path(__file__).resolve().parents[2] / "tools"
#: with gradients there is nothing to tune, and one of the models is enough
SAMPLE = [
    ("batch_norm_training", "no_grad"),
    ("closure", "no_grad"),
    ("complex_numbers", "no_grad"),
    ("kv_cache_argument", "no_grad"),
    ("nested_outputs", "no_grad"),
    ("random_numbers_eager", "no_grad"),
    ("views", "no_grad"),
    ("parametrized", "grad"),
]


@pytest.fixture(scope="module")
def zoo() -> Iterator[Any]:
    sys.path.insert(0, str(TOOLS))
    try:
        import zoo
        import zoo_models
        import zoo_observe
        import zoo_passes

        registry.register(zoo_passes.Rearrange)
        yield SimpleNamespace(check_under=zoo.check_under, observe=zoo_observe, models=zoo_models.MODELS)
    finally:
        registry.unregister("rearrange")
        sys.path.remove(str(TOOLS))


@pytest.mark.parametrize(("name", "under"), SAMPLE)
def test_whatever_a_caller_can_see_is_as_in_eager(
    zoo: Any, name: str, under: str, tmp_path: Path, fresh_dynamo: None
) -> None:
    model = replace(zoo.models[name], session=False)  # fxopt.optimize has tests of its own
    runs = list(zoo.check_under(model, under, tmp_path / name / under))
    assert [(r["variant"], r["status"], r["differences"], r["warnings"]) for r in runs] == [
        (r["variant"], "same", [], []) for r in runs
    ]
    graphs = [graph for one_run in runs for graph in one_run["graphs"]]
    assert graphs and not any(graph["wrong"] for graph in graphs)
    if under != "grad":
        assert {graph["source"] for graph in graphs} >= {"tuned", "plan"}


def _off_by_a_little(fn: Callable[..., Any], call: Any) -> Callable[..., Any]:
    return lambda *args: fn(*args) * (1 + 1e-4)


def _writing_to_a_copy(fn: Callable[..., Any], call: Any) -> Callable[..., Any]:
    return lambda *args: fn(*(arg.clone() for arg in args))


def _drawing_once_more(fn: Callable[..., Any], call: Any) -> Callable[..., Any]:
    def drawing(*args: Any) -> Any:
        torch.rand(1)
        return fn(*args)

    return drawing


def _returning_copies(fn: Callable[..., Any], call: Any) -> Callable[..., Any]:
    return lambda *args: tuple(value.clone() for value in fn(*args))


def _calling_twice(fn: Callable[..., Any], call: Any) -> Callable[..., Any]:
    def twice(*args: Any) -> Any:
        fn(*args)
        return fn(*args)

    return twice


@pytest.mark.parametrize(
    ("name", "under", "wrong", "seen"),
    [
        ("perceptron", "no_grad", _off_by_a_little, "output"),
        ("perceptron", "grad", _off_by_a_little, "gradient.0.weight"),
        ("mutated_inputs", "no_grad", _writing_to_a_copy, "input.0.0"),
        ("random_numbers", "no_grad", _drawing_once_more, "random state"),
        ("views", "no_grad", _returning_copies, "output.1"),
        ("counters", "no_grad", _calling_twice, "weight.calls"),
        ("counters", "no_grad", _calling_twice, "attribute..calls_python"),
    ],
)
def test_a_fault_is_seen(zoo: Any, name: str, under: str, wrong: Callable[..., Any], seen: str) -> None:
    model = zoo.models[name]
    right = zoo.observe.observe(model, under, lambda fn, call: fn)
    again = zoo.observe.observe(model, under, lambda fn, call: fn)
    assert zoo.observe.differences(right, again, 0.0) == ([], 0.0)
    found, _ = zoo.observe.differences(right, zoo.observe.observe(model, under, wrong), model.tolerance)
    assert seen in {difference.name for difference in found}


def test_only_what_plain_inductor_does_as_well_is_explained(zoo: Any) -> None:
    made, close = zoo.observe.Difference(0, "output", "off", 1e-3), zoo.observe.Difference(0, "output", "off", 5e-4)
    other, far = zoo.observe.Difference(1, "output", "off", 1e-3), zoo.observe.Difference(0, "output", "off", 1e-5)
    reasons = [
        zoo.observe.explain([made], plain, apart)[0]["why"]
        for plain, apart in (([], [made]), ([made], []), ([close], [made]), ([far], [made]), ([other], [made]))
    ]
    assert reasons == ["", "plain Inductor differs the same way", "rounding: plain Inductor is off by 0.0005", "", ""]
