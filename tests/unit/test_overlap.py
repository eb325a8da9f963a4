"""Inputs that overlap in memory: which graphs are looked at, what counts as overlapping, and what then runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from fxopt.overlap import OverlapWatch, _in_use_elsewhere, _meet
from fxopt.torch_api.calls import storage_users
from fxopt.torch_api.dynamo import written_inputs


@pytest.fixture(autouse=True)
def _fresh(fresh_dynamo: None) -> None:
    torch.manual_seed(0)


def captured(fn: Callable[..., Any], *inputs: Any) -> tuple[fx.GraphModule, Sequence[Any]]:
    found: list[Any] = []

    def backend(gm: fx.GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
        found.append((gm, list(given)))
        return gm.forward

    with torch.no_grad():
        torch.compile(fn, backend=backend, fullgraph=True)(*inputs)
    return found[0]


def method(a, b):
    a.add_(1)
    return a + b


def through_a_view(a, b):
    a[:2].t().mul_(2)
    return a + b


def assignment(a, b):
    a[0] = b[1]
    return a + b


def augmented(a, b):
    a *= b
    return a + b


def out(a, b):
    torch.add(a, b, out=a)
    return a + b


def in_place_function(a, b):
    F.relu(a, inplace=True)
    return a + b


def list_of_tensors(a, b):
    torch._foreach_add_([a], 1.0)
    return a + b


def of_a_result(a, b):
    return F.relu(a * 2, inplace=True).add_(b)


def nothing(a, b):
    return a + b


WRITING = [method, through_a_view, assignment, augmented, out, in_place_function, list_of_tensors]


@pytest.mark.parametrize("fn", WRITING)
def test_a_write_to_an_input_is_found_however_it_is_spelled(fn):
    gm, inputs = captured(fn, torch.randn(4, 4), torch.randn(4, 4))
    (written,) = written_inputs(gm)
    names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    assert names[written] == "l_a_"
    assert OverlapWatch.of(gm, inputs) is not None


@pytest.mark.parametrize("fn", [of_a_result, nothing])
def test_a_graph_that_writes_to_no_input_is_not_looked_at(fn):
    gm, inputs = captured(fn, torch.randn(4, 4), torch.randn(4, 4))
    assert written_inputs(gm) == frozenset() and OverlapWatch.of(gm, inputs) is None


def test_a_graph_that_writes_to_its_own_buffers_is_not_looked_at():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(4))

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            return a + b + self.count

    assert OverlapWatch.of(*captured(Counting(), torch.randn(4), torch.randn(4))) is None


def test_one_tensor_alone_cannot_overlap():
    assert OverlapWatch.of(*captured(lambda a: a.add_(1), torch.randn(4))) is None


@pytest.mark.parametrize(
    ("make", "overlap"),
    [
        (lambda s: (s[:4], s[4:8]), False),
        (lambda s: (s[4:8], s[:4]), False),
        (lambda s: (s[:4], s[3:7]), True),
        (lambda s: (s[3:7], s[:4]), True),
        (lambda s: (s[:4], s[:4]), True),
        (lambda s: (s[:4], s[:4].clone()), False),
        (lambda s: (s[0:8:2], s[9:13]), False),
        (lambda s: (s[0:8:2], s[6:10]), True),
        (lambda s: (s[0:8:2], s[7:11]), False),
        (lambda s: (s[0:8:2], s[1:8:2]), False),
        (lambda s: (s[0:9:3], s[1:8:2]), True),
        (lambda s: s.view(2, 2, 4).unbind(1), False),  # a cache of keys and values in one tensor
        (lambda s: (s.view(4, 4)[:, :2], s.view(4, 4)[:, 2:]), False),
        (lambda s: (s.view(4, 4)[:, :3], s.view(4, 4)[:, 2:]), True),
        (lambda s: (s.view(4, 4).t(), s.view(4, 4)[3]), True),
        (lambda s: (s[:4].double(), s[:4]), False),
        (lambda s: (s[:4].view(torch.int32), s[2:6]), True),  # of another type in the same memory
        (lambda s: (s[:0], s[:4]), False),
    ],
)
def test_what_overlaps(make, overlap):
    watch = OverlapWatch.of(*captured(method, torch.randn(4), torch.randn(4)))
    assert watch.overlap(make(torch.arange(16.0))) is overlap


def test_inputs_that_are_only_read_may_overlap():
    def third(a, b, c):
        a.add_(1)
        return a + b + c

    watch = OverlapWatch.of(*captured(third, torch.randn(4), torch.randn(4), torch.randn(4)))
    s, apart = torch.arange(16.0), torch.arange(4.0)
    assert not watch.overlap((apart, s[:4], s[2:6]))
    assert watch.overlap((s[:4], s[2:6], s[3:7])) and watch.overlap((s[3:7], apart, s[:4]))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_the_arithmetic_agrees_with_a_list_of_all_addresses(data):
    def view() -> torch.Tensor:
        sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
        strides = data.draw(st.lists(st.integers(0, 9), min_size=len(sizes), max_size=len(sizes)))
        return whole.as_strided(sizes, strides, data.draw(st.integers(0, 30)))

    whole = torch.arange(200)
    x, y = view(), view()
    assert _meet(x, y) == bool(set(x.flatten().tolist()) & set(y.flatten().tolist()))


def test_overlapping_calls_run_the_captured_graph_and_others_the_code():
    gm, inputs = captured(method, torch.randn(4), torch.randn(4))
    code = lambda *args: ["the code"]  # noqa: E731
    run = OverlapWatch.of(gm, inputs).wrap(code)
    mine, theirs = torch.arange(8.0), torch.arange(8.0)
    assert run(torch.randn(4), torch.randn(4)) == ["the code"]
    assert torch.equal(run(mine[:4], mine[2:6])[0], method(theirs[:4], theirs[2:6]))
    assert torch.equal(mine, theirs)


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.Parameter(torch.zeros(4, 4))
        self.other = nn.Parameter(torch.zeros(4))

    def forward(self, slot: torch.Tensor) -> torch.Tensor:
        slot.add_(1)
        return self.pool.sum(0) + self.other + slot


def test_a_written_view_of_a_parameter_overlaps_with_it_wherever_that_is():
    model = Pooled()
    with torch.no_grad():
        gm, inputs = captured(model, torch.zeros(4))
    watch = OverlapWatch.of(gm, inputs)
    (written,) = written_inputs(gm)
    pool = next(i for i, value in enumerate(inputs) if value.shape == (4, 4))

    def overlaps(slot: torch.Tensor) -> bool:
        return watch.overlap([slot if i == written else value for i, value in enumerate(inputs)])

    model.other.data = torch.zeros(8)[:4]
    for _ in range(2):
        assert overlaps(model.pool.detach()[1]) and overlaps(model.pool.data[:, 2])
        assert not overlaps(torch.zeros(4)) and not overlaps(torch.zeros(8)[4:])
        assert not overlaps(model.other.data.as_strided((4,), (1,), 4)), "in the memory of a parameter, beside it"
        moved = torch.zeros(5, 4)
        inputs[pool].data = moved[:4]
        assert overlaps(moved[1]) and not overlaps(moved[4])


@pytest.mark.skipif(storage_users is None, reason="this torch does not say how many tensors hold a storage")
def test_a_tensor_that_nobody_shares_memory_with_costs_no_look_at_the_parameters():
    x = torch.zeros(4)
    for _ in range(2):
        assert not _in_use_elsewhere(x)
    view = x[1:]
    assert _in_use_elsewhere(x) and _in_use_elsewhere(view)
