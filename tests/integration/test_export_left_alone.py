"""torch.export, and with it AOTInductor: the original model is exported, and nothing is silently left out."""

from __future__ import annotations

import warnings

import pytest
import torch
from forced_passes import TORCHS_KERNELS, compiled, force, last, optimized, warned
from torch import nn


@pytest.fixture(autouse=True)
def _fresh(fresh_dynamo: None) -> None:
    torch.manual_seed(0)


def small() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).eval(), torch.randn(4, 8)


@pytest.mark.parametrize("strict", [False, True])
def test_an_optimised_model_is_exported_as_the_original_with_a_warning(monkeypatch, strict):
    force(monkeypatch, "freeze_weights")
    model, x = small()
    fast = optimized(model, (x,), **TORCHS_KERNELS)
    assert fast.report.graphs[0].frozen
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program = torch.export.export(fast, (x,), strict=strict)
    (said,) = warned(caught)
    assert "torch.export takes the original model" in said and ".model" in said
    assert set(program.state_dict) == {f"model.{name}" for name in model.state_dict()}
    assert len(fast.report.graphs) == 1, "the export has compiled nothing"
    calls = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert torch.ops.aten.linear.default in calls and torch.ops.aten.gelu.default in calls
    with torch.no_grad():
        torch.testing.assert_close(program.module()(x), model(x))
        torch.testing.assert_close(fast(x), model(x))


def test_a_model_compiled_with_the_backend_is_exported_without_it_as_torch_does(monkeypatch):
    force(monkeypatch, "causal_mask")
    model, x = small()
    run = compiled(model, dict(TORCHS_KERNELS))
    with torch.no_grad():
        run(x)
        before = last()
        program = torch.export.export(run, (x,))
        torch.testing.assert_close(program.module()(x), model(x))
    assert last() is before, "the backend was not asked"
