"""What tuning leaves in memory: the kept code, and nothing of what was tried beside it."""

from __future__ import annotations

import gc
import sys
import warnings

import pytest
import torch
from forced_passes import TORCHS_KERNELS, given_ceilings
from torch import nn

import fxopt
from fxopt import measure
from fxopt.measure import PairedResult

ROWS, COLUMNS = 613, 67


class Folded(nn.Module):
    """Its product's operand is no parameter, so that folding makes a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(ROWS, COLUMNS)), nn.Parameter(torch.randn(ROWS, COLUMNS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.sin(self.weight * self.scale).t()


def copies(model: Folded) -> int:
    """Tensors of the size of a weight that are not in the memory of one."""
    own = {parameter.data_ptr() for parameter in model.parameters()}
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecated objects that are asked for their class
        found = [value for value in gc.get_objects() if type(value) is torch.Tensor]
    return sum(value.numel() == ROWS * COLUMNS and value.data_ptr() not in own for value in found)


@pytest.mark.parametrize(("ratio", "frozen"), [(0.5, False), (2.0, True)], ids=["rejected", "kept"])
def test_folded_weights_go_with_the_code_that_held_them(monkeypatch, fresh_dynamo, ratio, frozen):
    timed = PairedResult(ratio, ratio, ratio, 6, 2e6, 1e6, 0.01, {}, ())
    given_ceilings(monkeypatch)
    monkeypatch.setattr(measure, "noise_floor", lambda *a, **k: 0.01)
    monkeypatch.setattr(measure, "compare", lambda *a, **k: timed)
    model, x = Folded().eval(), torch.randn(4, COLUMNS)
    modules = set(sys.modules)
    before = copies(model)
    fast = fxopt.optimize(model, x, passes=["freeze_weights"], pairs=6, **TORCHS_KERNELS)
    graph = fast.report.graphs[0]
    assert graph.frozen is frozen and len(graph.candidates) == 1, graph.messages
    assert (copies(model) > before) is frozen
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
    del fast
    torch._dynamo.reset()
    assert copies(model) == before
    left = [name for name in set(sys.modules) - modules if hasattr(sys.modules[name], "_frozen_param0")]
    assert left == []
