"""measured(): a plain loop, or the marks that a profiler outside waits for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import nvtx
import pytest
import torch

from profiler_core import measured
from profiler_core.marks import ACTIVE


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the tools would be told, in order."""
    said: list[str] = []

    @contextmanager
    def emit_nvtx(enabled: bool = True) -> Iterator[None]:
        said.append(f"operators {'on' if enabled else 'left alone'}")
        try:
            yield
        finally:
            said.append("operators off")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: said.append("wait"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: said.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: said.append("stop"))
    monkeypatch.setattr(torch.autograd.profiler, "emit_nvtx", emit_nvtx)
    monkeypatch.setattr(nvtx, "push_range", said.append)
    monkeypatch.setattr(nvtx, "pop_range", lambda: said.append("end"))
    return said


def test_elsewhere_the_loop_just_runs(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ACTIVE, raising=False)
    assert list(measured(3)) == [0, 1, 2] and list(measured()) == [0] and told == []


def test_elsewhere_nothing_is_imported() -> None:
    code = "import sys, profiler_core; list(profiler_core.measured(2)); print({'torch', 'nvtx'} & sys.modules.keys())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


@pytest.mark.parametrize(("active", "operators"), [("ranges", "operators on"), ("kernels", "operators left alone")])
def test_recording_starts_before_the_first_call_and_stops_after_the_last(told, monkeypatch, active, operators) -> None:
    monkeypatch.setenv(ACTIVE, active)
    for number in measured(2):
        told.append(f"call {number}")
    calls = [part for n in (0, 1) for part in (f"fxopt::iteration#{n}", f"call {n}", "wait", "end")]
    assert told == ["wait", "start", operators, *calls, "operators off", "stop"]


def test_it_stops_too_where_the_loop_is_left_or_its_body_fails(told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ACTIVE, "ranges")
    for _ in measured(5):
        break
    assert told[-4:] == ["wait", "end", "operators off", "stop"] and told.count("fxopt::iteration#0") == 1
    assert "fxopt::iteration#1" not in told
    told.clear()

    def program() -> None:
        for _ in measured(5):
            raise KeyError("in the model")

    with pytest.raises(KeyError, match="in the model"):
        program()
    assert told.count("stop") == told.count("end") == told.count("start") == 1


def test_a_loop_of_no_calls_leaves_an_empty_recording(told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ACTIVE, "ranges")
    assert list(measured(0)) == []
    assert told == ["wait", "start", "operators on", "operators off", "stop"]


def test_what_is_set_to_nothing_is_not_set(told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ACTIVE, "")
    assert list(measured(2)) == [0, 1] and told == []
