"""Outputs of folded code are the caller's own, as those of plain torch.compile are: written to, they change no later
call, and none changes another.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from forced_passes import TORCHS_KERNELS, force, optimized, rewritten
from torch import nn


@pytest.fixture(autouse=True)
def _fresh(fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    force(monkeypatch, "freeze_weights")


class Weights(nn.Module):
    """A layer, and what is made of weights alone: numbers, casts, slices, and views with and without gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.scale = nn.Parameter(torch.zeros(()))
        self.register_buffer("table", torch.arange(32.0).view(8, 4))

    def forward(self, x: torch.Tensor) -> Any:
        doubled, product = self.weight * 2, self.weight @ self.weight
        made = (self.scale.exp(), self.weight.double(), self.weight.t().contiguous(), self.table.clone())
        views = (product[1:], doubled.t(), (self.table + 1)[:, ::2], (self.table[0] * 3).expand(2, 4))
        return self.layer(x), torch.arange(3), *made, *views


class WeightsAlone(nn.Module):
    """Nothing is left to compute in a call."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(3))

    def forward(self) -> Any:
        return self.scale.exp(), self.scale.exp()


@pytest.mark.parametrize("model, inputs", [(Weights(), (torch.randn(2, 4),)), (WeightsAlone(), ())])
@pytest.mark.parametrize("patches", [TORCHS_KERNELS, {}], ids=["torch's kernels", "Inductor's"])
@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
def test_what_is_written_to_an_output_changes_no_later_call(model, inputs, patches, inference):
    model.eval()
    with torch.no_grad():
        plain = model(*inputs)
    with torch.inference_mode(inference):
        fast = optimized(model, inputs, **patches)
        for _ in range(3):
            outputs = fast(*inputs)
            for got, expected in zip(outputs, plain, strict=True):
                torch.testing.assert_close(got, expected)
                assert got.stride() == expected.stride()
            for got in outputs:
                (got if 0 not in got.stride() else got[:1]).mul_(3)
    with torch.no_grad():
        assert all(map(torch.equal, model(*inputs), plain)), "the weights themselves were written to"


def test_what_the_next_graph_writes_after_a_graph_break_changes_no_later_call():
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start = nn.Parameter(torch.zeros(1, 4))
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.start.expand(3, 4) * 1.0 + self.layer.bias
            y = self.layer(x)
            torch._dynamo.graph_break()
            h += y
            return h

    model, x = Broken().eval(), torch.randn(3, 4)
    fast = optimized(model, (x,), **TORCHS_KERNELS)
    for _ in range(3):
        torch.testing.assert_close(fast(x), model(x).detach())


class Twice(nn.Module):
    """Equal values that are two tensors, of which freezing makes one beside a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.convolution = nn.Conv1d(3, 3, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return x.sin(), x.sin(), self.layer(x).relu(), self.layer(x).relu(), self.convolution(x[None])


@pytest.mark.parametrize("patches", [TORCHS_KERNELS, {}], ids=["torch's kernels", "Inductor's"])
def test_equal_outputs_are_tensors_of_their_own(patches):
    model, x = Twice().eval(), torch.randn(3, 4)
    fast = optimized(model, (x,), **patches)
    assert rewritten(fast.report.graphs[0])["freeze_weights"]
    with torch.no_grad():
        expected = model(x)
    for _ in range(3):
        got = fast(x)
        torch.testing.assert_close(got, expected)
        got[0].zero_()
        got[2].zero_()
        torch.testing.assert_close((got[1], got[3]), (expected[1], expected[3]))


class Viewed(nn.Module):
    """Views beside what they are views of, computed in the call and made of weights alone; of one, the view alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: torch.Tensor) -> Any:
        z, made = self.layer(x).relu(), self.weight * 2
        return z, z[1:], made, made[1:], made.t(), (self.weight * 3)[1:]


def test_views_of_outputs_stay_views():
    model, x = Viewed().eval(), torch.randn(3, 4)
    fast = optimized(model, (x,), **TORCHS_KERNELS)
    with torch.no_grad():
        expected = model(x)
    for _ in range(3):
        got = fast(x)
        torch.testing.assert_close(got, expected)
        got[0].fill_(5)
        got[2].fill_(7)
        assert got[1].eq(5).all() and got[3].eq(7).all() and got[4].eq(7).all()
        torch.testing.assert_close(got[5], expected[5])
        got[5].zero_()


def test_an_output_in_a_callers_input_stays_there():
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(4))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            x.add_(self.scale.exp())
            return x[1:], y[0], self.scale.exp()

    both = torch.zeros(6, 4)
    fast = optimized(Writing().eval(), (torch.zeros(3, 4), torch.zeros(3, 4)), **TORCHS_KERNELS)
    for x, y in ((torch.zeros(3, 4), torch.zeros(3, 4)), (both[:3], both[3:])):
        first, second, made = fast(x, y)
        first.fill_(5)
        second.fill_(7)
        made.zero_()
        assert x[0].eq(1).all() and x[1:].eq(5).all() and y[0].eq(7).all() and not y[1:].any()
