"""Modules that Dynamo leaves to eager: which they are, and their time."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest
import torch
from torch import nn

from fxopt import eager_modules
from fxopt.report.model import EagerModule, Report


class Slow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    @torch._dynamo.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
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


@pytest.fixture(autouse=True)
def _fresh(fresh_dynamo: None) -> None:
    torch.manual_seed(0)


def test_the_outermost_module_in_eager_is_listed_with_its_time():
    session, x = Session(Model().eval()), torch.randn(2, 4)
    session(x)
    (found,) = eager_modules.measure(session, (x,), {})
    assert (found.name, found.type) == ("slow", "Slow"), "not the linear layer inside it, nor those that are compiled"
    assert found.time_ns >= 0.02e9 and 0 < found.share <= 1


def test_a_module_whose_code_dynamo_replaced_is_not_listed():
    session, x = Session(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()), torch.randn(2, 4)
    session(x)
    assert eager_modules.measure(session, (), {"input": x}) == []


def test_a_frame_that_dynamo_gives_up_is_listed_by_its_parts():
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 8), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.lstm(x)[0])

    session, x = Session(Recurrent().eval()), torch.randn(3, 2, 4)
    session(x)
    found = {(m.name, m.type) for m in eager_modules.measure(session, (x,), {})}
    assert found == {("lstm", "LSTM"), ("head", "Linear")}, "for the sake of the LSTM, no graph was made at all"


def test_measuring_leaves_buffers_inputs_random_state_and_profiler_alone():
    model, x = Model().eval(), torch.randn(2, 4)
    session = Session(model)
    session(x)
    seen: list[str] = []

    def outer(frame: Any, event: str, argument: Any) -> None:
        seen.append(event)

    before, state = x.clone(), torch.random.get_rng_state()
    sys.setprofile(outer)
    try:
        eager_modules.measure(session, (x,), {})
        assert sys.getprofile() is outer
    finally:
        sys.setprofile(None)
    assert model.slow.calls == 1 and torch.equal(x, before)
    assert torch.equal(torch.random.get_rng_state(), state)


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
