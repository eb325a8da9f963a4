"""Modules that Dynamo leaves to eager: which they are, and their time."""

from __future__ import annotations

import random
import sys
import time
from typing import Any

import pytest
import torch
from torch import nn

from fxopt import backend, eager_modules, session
from fxopt.report.model import EagerModule, Report


class Slow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.number = 0

    @torch._dynamo.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.number += 1
        time.sleep(0.02)
        return self.inner(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.slow = Slow()
        self.last = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.slow(self.first(x)).relu())


class Session(nn.Module):
    """As `fxopt.optimize` makes one, with a backend that compiles nothing."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.__dict__["compiled"] = torch.compile(model, backend="eager")

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["compiled"](*args, **kwargs)


def measure(made: nn.Module, *args: Any, **kwargs: Any) -> list[EagerModule]:
    return eager_modules.timed(made.model, lambda: made(*args, **kwargs), (args, kwargs))[1]


@pytest.fixture(autouse=True)
def _fresh(fresh_dynamo: None) -> None:
    torch.manual_seed(0)


def test_the_outermost_module_in_eager_is_listed_with_its_time():
    made, x = Session(Model().eval()), torch.randn(2, 4)
    made(x)
    (found,) = measure(made, x)
    assert (found.name, found.type) == ("slow", "Slow"), "not the linear layer inside it, nor those that are compiled"
    assert found.time_ns >= 0.02e9 and 0 < found.share <= 1


def test_a_module_whose_code_dynamo_replaced_is_not_listed():
    made, x = Session(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()), torch.randn(2, 4)
    made(x)
    assert measure(made, input=x) == []


def test_a_frame_that_dynamo_gives_up_is_listed_by_its_parts():
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 8), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.lstm(x)[0])

    made, x = Session(Recurrent().eval()), torch.randn(3, 2, 4)
    made(x)
    found = {(m.name, m.type) for m in measure(made, x)}
    assert found == {("lstm", "LSTM"), ("head", "Linear")}, "for the sake of the LSTM, no graph was made at all"


def optimized(monkeypatch: pytest.MonkeyPatch, model: nn.Module, x: torch.Tensor) -> nn.Module:
    """By fxopt.optimize, with a tuner that compiles nothing."""

    class Untouched:
        def __init__(self, gm: Any, *args: Any, **options: Any) -> None:
            self.run = lambda: gm.forward

    monkeypatch.setattr(backend, "Tuner", Untouched)
    return session.optimize(model, x)


def test_the_models_state_is_that_of_the_callers_calls(monkeypatch):
    class Counting(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return super().forward(x) + random.random() + torch.rand(())

    model, x = Counting().eval(), torch.zeros(2, 4)
    random.seed(0)
    torch.manual_seed(0)
    fast = optimized(monkeypatch, model, x)
    state = torch.random.get_rng_state(), random.getstate()
    assert (model.slow.number, model.slow.calls, x.max()) == (1, 1, 1) and not fast.report.eager_modules
    torch.manual_seed(0)
    torch.rand(())
    random.seed(0)
    random.random()
    assert torch.equal(torch.random.get_rng_state(), state[0]) and random.getstate() == state[1]
    for calls in (2, 3):
        fast(x)
        assert (model.slow.number, model.slow.calls, x.max()) == (calls, calls, calls)
    (found,) = fast.report.eager_modules
    assert found.name == "slow" and 0 < found.share < 1


def test_the_callers_profile_function_is_left_in_place_and_the_call_after_it_is_timed(monkeypatch):
    x = torch.randn(2, 4)
    fast = optimized(monkeypatch, Model().eval(), x)
    seen: list[str] = []

    def outer(frame: Any, event: str, argument: Any) -> None:
        seen.append(event)

    sys.setprofile(outer)
    try:
        fast(x)
        assert sys.getprofile() is outer
    finally:
        sys.setprofile(None)
    assert seen and not fast.report.eager_modules
    fast(x)
    assert fast.report.eager_modules and sys.getprofile() is None


def test_a_call_that_compiles_is_not_the_one_that_is_timed(monkeypatch):
    fast = optimized(monkeypatch, Model().eval(), torch.randn(2, 4))
    fast(torch.randn(3, 4))
    assert not fast.report.eager_modules
    fast(torch.randn(3, 4))
    assert fast.report.eager_modules


def test_the_report_shows_them():
    from io import StringIO

    from rich.console import Console

    from fxopt.report.terminal import render

    report = Report(eager_modules=[EagerModule("encoder.rnn", "LSTM", 1.5e6, 0.42)])
    text = StringIO()
    render(report, Console(file=text, width=100))
    assert "Left to eager by Dynamo: encoder.rnn (LSTM), 1.50 ms, 42% of a call" in text.getvalue()
    assert report.to_json()["eager_modules"] == [
        {"name": "encoder.rnn", "type": "LSTM", "time_ns": 1.5e6, "share": 0.42}
    ]
