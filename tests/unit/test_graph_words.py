"""What tells a person which graph a plan is of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxopt import identity
from fxopt.torch_api import dynamo

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).relu()


def words(subject: Any, *inputs: Any) -> dict[str, Any]:
    """As a backend finds them."""
    found: list[dict[str, Any]] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        found.append(identity.in_words(gm, inputs, dynamo.static_inputs(gm, inputs), "bf16"))
        return gm.forward

    with torch.no_grad():
        torch.compile(subject, backend=backend)(*inputs)
    return found[0]


def test_a_model_is_named_by_its_class_and_place_and_its_weights_are_no_inputs() -> None:
    line = Block.forward.__code__.co_firstlineno
    assert words(Block(), torch.ones(2, 8)) == {
        "of": f"Block (test_graph_words.py:{line})",
        "inputs": ["float32[2, 8]"],
        "operators": 2,
        "precision": "bf16",
    }


def test_a_function_is_named_and_so_is_a_model_of_torchs_own() -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.relu() @ y.float()

    found = words(step, torch.ones(4, 8), torch.ones(8, 2, dtype=torch.int64))
    assert found["of"] == f"step (test_graph_words.py:{step.__code__.co_firstlineno})"
    assert found["inputs"] == ["float32[4, 8]", "int64[8, 2]"]
    assert words(torch.nn.Linear(8, 8), torch.ones(2, 8))["of"] == "Linear"


def test_outside_of_dynamo_nothing_is_told() -> None:
    gm = torch.fx.symbolic_trace(lambda x: x + 1)
    assert dynamo.compiled_from(gm) == ""
