"""Graphs that write to their inputs: what a candidate makes of other values there is verified, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from forced_passes import TORCHS_KERNELS, always_faster, given_ceilings, last
from torch import nn

from fxopt import registry
from fxopt.registry import Candidate
from fxopt.report.model import GraphReport
from fxopt.testing.stand_ins import DoubledNegation

aten = torch.ops.aten


class Averaging(nn.Module):
    """Takes a running mean away that is 0 at first, as those of normalisations and optimizers are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.mean.mul_(0.9).add_(0.1 * y.mean(0))
        return y - self.mean


class Cached(nn.Module):
    """Writes to the last place of a cache: a call from where the first one ends would write past its end."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("cache", torch.zeros(4, 16))
        self.register_buffer("place", torch.tensor([3]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache.index_copy_(0, self.place, self.layer(x).mean(0, keepdim=True))
        self.place.add_(1)
        return self.cache * 2


@dataclass(frozen=True)
class Forgetful(DoubledNegation):
    """What a graph multiplies of its inputs becomes 0, which it was where those are 0."""

    name: ClassVar[str] = "forgetful"

    def candidates(self, graph: Any, context: Any) -> Any:
        for node in graph.nodes:
            if node.target is aten.mul.Tensor and getattr(node.args[0], "op", "") == "placeholder":
                yield Candidate(node.name)

    def twin(self, graph: Any, node: Any) -> Any:
        return graph.call_function(aten.mul.Tensor, (node, 0.0))


@pytest.fixture
def tuned(fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., GraphReport]]:
    """Tunes a model with one pass by its first call, which gives what eager's gives and leaves what eager's leaves."""
    given_ceilings(monkeypatch)
    always_faster(monkeypatch)
    torch.manual_seed(0)
    for cls in (DoubledNegation, Forgetful):
        registry.register(cls)
    quick = {"pairs": 6, "iterations": 1, "warmup": 1, "verify_inputs": 1, "on_error": "raise", **TORCHS_KERNELS}

    def run(make: Callable[[], nn.Module], x: torch.Tensor, name: str) -> GraphReport:
        model, plain = make(), make()
        plain.load_state_dict(model.state_dict())
        with torch.no_grad():
            y = torch.compile(model, backend="profile_guided", options={**quick, "passes": [name]})(x)
            torch.testing.assert_close(y, plain(x))
        for ours, eagers in zip(model.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(ours, eagers)
        return last()

    yield run
    for cls in (DoubledNegation, Forgetful):
        registry.unregister(cls.name)


def test_a_candidate_that_ignores_what_a_buffer_holds_is_wrong_although_it_holds_0(tuned):
    (candidate,) = tuned(Averaging, torch.randn(8, 16), "forgetful").candidates
    assert candidate.reports[0].rewritten == 1
    assert candidate.outcome == "rejected" and candidate.reason.startswith("wrong: input set 1: ")


@pytest.mark.parametrize("make", [Averaging, Cached])
def test_a_right_candidate_is_kept(tuned, make):
    report = tuned(make, torch.randn(8, 16), "doubled_negation")
    assert report.passes == ["doubled_negation"] and report.verdict.checked == 2
