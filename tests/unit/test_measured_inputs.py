"""The inputs that candidates are measured on: copies, whatever the graph writes to, and alike for every candidate."""

from __future__ import annotations

from typing import Any

import torch

from fxopt.calls import Calls


def _calls(fn: Any, *inputs: Any) -> Calls:
    """The calls of a graph that writes to its integers."""
    made: list[Calls] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        written = frozenset(i for i, value in enumerate(example_inputs) if value.dtype == torch.long)
        cpu = torch.device("cpu")
        own = [value.clone() for value in example_inputs]  # the call goes on when this returns
        made.append(Calls(gm, own, static=frozenset(), mutated=written, wanted=(), device=cpu, count=2))
        return gm.forward

    torch.compile(fn, backend=backend)(*inputs)
    return made[0]


def _count(counter: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    counter.add_(1)
    return x[counter]


def test_no_set_shares_memory_with_what_the_graph_writes_to(fresh_dynamo: None) -> None:
    calls = _calls(_count, torch.zeros(2, dtype=torch.long), torch.randn(9))
    addresses = [inputs[0].data_ptr() for inputs in (calls.real, *calls.input_sets(calls.gm))]
    assert len(addresses) == 4 == len(set(addresses))


def test_every_set_starts_from_the_callers_state_again(fresh_dynamo: None) -> None:
    calls = _calls(_count, torch.zeros(2, dtype=torch.long), torch.randn(9))
    before = calls.real[0].clone()
    sets = calls.input_sets(calls.gm)
    for inputs in sets:
        calls.gm(*inputs)
        assert not torch.equal(inputs[0], before)
    with calls.running():
        assert all(torch.equal(inputs[0], before) for inputs in sets)
    assert torch.equal(calls.real[0], before)


def test_parameters_in_the_memory_of_a_written_input_are_copied_with_it() -> None:
    pool, weight = torch.randn(4, 6), torch.randn(6)
    real = [pool[:2], weight, pool[3], pool[2]]
    gm = torch.fx.symbolic_trace(lambda keys, weight, slot, values: (slot.add_(1), keys + weight + values))
    cpu = torch.device("cpu")
    calls = Calls(
        gm, real, static=frozenset({0, 1, 3}), mutated=frozenset({2}), wanted=(), device=cpu, count=1
    )
    before = pool.clone()
    assert calls.held == {1}
    for inputs in calls.input_sets(gm):
        gm(*inputs)
        assert len({inputs[i].untyped_storage().data_ptr() for i in (0, 2, 3)}) == 1, "as the caller's lie"
        assert inputs[1] is weight
    assert torch.equal(pool, before)
