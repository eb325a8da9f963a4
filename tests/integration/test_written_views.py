"""Arguments that a graph writes to and that lie in the memory of the model's own parameters and buffers: tuning writes
to no parameter and no buffer, and every call reads what was written.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from forced_passes import TORCHS_KERNELS, always_faster, force, given_ceilings, last, optimized
from torch import nn

from fxopt import registry
from fxopt.testing.stand_ins import DoubledNegation

QUICK = {"pairs": 6, "iterations": 1, "warmup": 1, "verify_inputs": 1, "on_error": "raise", **TORCHS_KERNELS}


class Pool(nn.Module):
    """Buffers in one memory, of which the last rows are nobody's, and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        pool = torch.arange(24.0).view(6, 4) / 24
        self.register_buffer("keys", pool[:2])
        self.register_buffer("values", pool[2:4])
        self.layer = nn.Linear(4, 4)

    def slots(self) -> torch.Tensor:
        return self.keys.as_strided((6, 4), (4, 1), 0)


class After(Pool):
    def forward(self, x: torch.Tensor, slot: torch.Tensor) -> Any:
        slot.add_(1)
        return self.layer(x), x @ self.keys.t() + self.values.sum()


class Before(Pool):
    def forward(self, x: torch.Tensor, slot: torch.Tensor) -> Any:
        y = x @ self.keys.t()
        slot.add_(1)
        return self.layer(x), y + slot.sum(), -self.values


class Both(Pool):
    def forward(self, x: torch.Tensor, slot: torch.Tensor) -> Any:
        self.keys.mul_(2)
        slot.add_(1)
        return self.layer(x), x @ self.keys.t(), -self.values


#: which row of the pool is written to; None: one of its own
ORDERS: list[tuple[int | None, ...]] = [(0, None, 0, 3), (None, 0, None, 3), (5, 5, 0), (3, 0)]


def slot(model: Pool, row: int | None) -> torch.Tensor:
    return torch.zeros(4) if row is None else model.slots()[row]


def follow(fast: Callable[..., Any], model: Pool, order: tuple[int | None, ...]) -> None:
    """Each call gives what eager's gives, and leaves what eager's leaves."""
    x, plain = torch.randn(3, 4), copy.deepcopy(model)
    with torch.no_grad():
        for row in order:
            mine, theirs = slot(model, row), slot(plain, row)
            torch.testing.assert_close(fast(x, mine), plain(x, theirs))
            assert torch.equal(mine, theirs) and torch.equal(model.slots(), plain.slots())


@pytest.fixture
def _tuned(fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    given_ceilings(monkeypatch)
    always_faster(monkeypatch)
    torch.manual_seed(0)
    registry.register(DoubledNegation)
    yield
    registry.unregister(DoubledNegation.name)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("cls", [After, Before, Both])
def test_tuning_writes_to_no_buffer_and_calls_are_right_in_any_order(_tuned, cls, order):
    model = cls().eval()
    options = {**QUICK, "passes": ["doubled_negation"]}
    follow(torch.compile(model, backend="profile_guided", options=options), model, order)


def test_memory_beside_the_written_elements_is_no_reason_not_to_measure(_tuned):
    model = Before().eval()
    options = {**QUICK, "passes": ["doubled_negation"]}
    follow(torch.compile(model, backend="profile_guided", options=options), model, (5, 4))
    assert last().source == "tuned" and last().passes == ["doubled_negation"]


def test_written_inputs_are_known_where_torch_compiles_one_for_several_in_one_memory(_tuned):
    """As it does where sizes are symbolic, so that nobody knows whether they overlap."""

    def scale(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.mul_(2)
        return a + b

    run = torch.compile(scale, backend="profile_guided", options=QUICK)
    apart, together = (torch.ones(4), torch.ones(4)), torch.arange(8.0)
    for a, b in (apart, (together[::2], together[1::2])):
        expected = scale(a.clone(), b)
        with torch.no_grad():
            assert torch.equal(run(a, b), expected)
    assert together.tolist() == [0, 1, 4, 3, 8, 5, 12, 7] and last().source == "tuned"


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("cls", [After, Before, Both])
def test_what_is_written_into_a_folded_buffer_is_read_at_once(fresh_dynamo, monkeypatch, cls, order):
    force(monkeypatch, "freeze_weights")
    torch.manual_seed(0)
    model = cls().eval()
    fast = optimized(model, (torch.randn(3, 4), torch.zeros(4)), **TORCHS_KERNELS)
    assert fast.report.graphs[0].frozen
    follow(fast, model, order)
