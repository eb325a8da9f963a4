"""Graphs that write to tensors of their own, as an optimizer's step: they are left alone, and step once a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from forced_passes import TORCHS_KERNELS, always_faster, given_ceilings
from torch import nn

import fxopt
from fxopt.torch_api import dynamo
from fxopt.tuner import Tuner
from fxopt.warning import FxoptWarning

QUICK = {"pairs": 6, "iterations": 1, "warmup": 1, "verify_inputs": 1, **TORCHS_KERNELS}

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd, one by one": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "sgd of lists": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adam of lists": lambda p: torch.optim.Adam(p, foreach=True),
    "adamw, one by one": lambda p: torch.optim.AdamW(p, foreach=False),
    "adamw, fused": lambda p: torch.optim.AdamW(p, fused=True),
    "rmsprop": torch.optim.RMSprop,
}


@pytest.fixture(autouse=True)
def _quick(fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    given_ceilings(monkeypatch)
    always_faster(monkeypatch)


def trained(make: Callable[..., torch.optim.Optimizer], compiled: Callable[[Any], Any]) -> list[torch.Tensor]:
    """Parameters and the optimizer's state after three steps."""
    torch.manual_seed(0)
    model, x = nn.Linear(8, 8), torch.randn(5, 8)
    optimizer = make(model.parameters())
    step = compiled(lambda: optimizer.step())
    for _ in range(3):
        optimizer.zero_grad()
        model(x).pow(2).sum().backward()
        step()
    state = [v for p in model.parameters() for v in optimizer.state[p].values() if isinstance(v, torch.Tensor)]
    return [*(p.detach() for p in model.parameters()), *state]


@pytest.mark.parametrize("on_error", ["raise", "fallback"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_steps_once_whatever_was_measured(name, on_error):
    options = {**QUICK, "on_error": on_error, "fallback_by_default": "lists" not in name}  # which has none of these
    got = trained(OPTIMIZERS[name], lambda step: torch.compile(step, backend="profile_guided", options=options))
    torch.testing.assert_close(got, trained(OPTIMIZERS[name], lambda step: step), rtol=1e-4, atol=1e-5)


def test_the_report_says_why_nothing_was_measured():
    trained(OPTIMIZERS["sgd"], lambda step: torch.compile(step, backend="profile_guided", options=QUICK))
    graph = fxopt.last_report().graphs[-1]
    (message,) = graph.messages
    assert graph.source == "skipped" and graph.decision == "baseline" and not graph.candidates
    assert "writes to" in message and "params" in message


def test_a_failure_of_fxopt_costs_no_step(monkeypatch):
    """What is asked then is whether the graph itself runs."""
    monkeypatch.setattr(Tuner, "run", lambda self: 1 / 0)
    options = {**QUICK, "on_error": "fallback"}
    with pytest.warns(FxoptWarning, match="ZeroDivisionError"):
        got = trained(OPTIMIZERS["sgd"], lambda step: torch.compile(step, backend="profile_guided", options=options))
    torch.testing.assert_close(got, trained(OPTIMIZERS["sgd"], lambda step: step))


def test_what_dynamo_does_not_see_written_shows_when_it_is_compiled(monkeypatch):
    monkeypatch.setattr(dynamo, "written_attributes", lambda gm: [])
    options = {**QUICK, "on_error": "raise"}
    got = trained(OPTIMIZERS["sgd"], lambda step: torch.compile(step, backend="profile_guided", options=options))
    torch.testing.assert_close(got, trained(OPTIMIZERS["sgd"], lambda step: step))
    assert "writes to tensors of its own" in fxopt.last_report().graphs[-1].messages[0]
