"""The inputs that candidates are measured on: copies, whatever the graph writes to, and alike for every candidate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fxopt.options import Options
from fxopt.tuner import Tuner


def _tuner(tmp_path: Path, fn: Any, *inputs: Any) -> Tuner:
    made: list[Tuner] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        made.append(Tuner(gm, example_inputs, Options(plan_dir=tmp_path, verify_inputs=2), {}))
        return gm.forward

    torch.compile(fn, backend=backend)(*inputs)
    return made[0]


def _count(x: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    counter.add_(1)
    return x[counter]


def test_no_set_shares_memory_with_what_the_graph_writes_to(tmp_path: Path, fresh_dynamo: None) -> None:
    tuner = _tuner(tmp_path, _count, torch.randn(9), torch.zeros(2, dtype=torch.long))
    (counter,) = (i for i, value in enumerate(tuner.real) if value.dtype == torch.long)
    tuner._share(frozenset({counter}))
    addresses = [inputs[counter].data_ptr() for inputs in (tuner.real, *tuner._input_sets())]
    assert len(set(addresses)) == len(addresses)


def test_every_set_starts_from_the_callers_state_again(tmp_path: Path, fresh_dynamo: None) -> None:
    tuner = _tuner(tmp_path, _count, torch.randn(9), torch.zeros(2, dtype=torch.long))
    (counter,) = (i for i, value in enumerate(tuner.real) if value.dtype == torch.long)
    tuner._share(frozenset({counter}))
    before = tuner.real[counter].clone()
    sets = tuner._input_sets()
    for inputs in sets:
        tuner.gm(*inputs)
    with tuner._running():
        assert all(torch.equal(inputs[counter], before) for inputs in sets)
    assert torch.equal(tuner.real[counter], before)
