"""The lock under which measurements on a GPU take turns."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from profiler_core import exclusive

GPU = torch.device("cuda", 0)

HOLDER = """
import sys, torch
from profiler_core import exclusive
exclusive._identity = lambda device: "gpu-of-this-test"
exclusive.tempfile.tempdir = sys.argv[1]
with exclusive.measuring(torch.device("cuda", 0)) as held:
    print(held, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def its_own_place(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(exclusive, "_identity", lambda device: "gpu-of-this-test")
    monkeypatch.setattr(exclusive.tempfile, "tempdir", str(tmp_path))


def test_another_process_waits_for_its_turn_and_a_killed_one_gives_it_up(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "True\n"
        with exclusive.measuring(GPU, patience=0.2) as held:
            assert not held, "the other one has it"
    finally:
        holder.kill()
        holder.wait()
    with exclusive.measuring(GPU, patience=30) as held:
        assert held


def test_threads_take_turns_too():
    seen: list[bool] = []

    def other() -> None:
        with exclusive.measuring(GPU, patience=0.2) as held:
            seen.append(held)

    with exclusive.measuring(GPU) as held:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert held and seen == [False]


def test_who_gives_a_turn_up_comes_after_whoever_waits():
    order: list[str] = []
    waiting = threading.Event()

    def other() -> None:
        waiting.set()
        with exclusive.measuring(GPU, patience=30):
            order.append("other")
            time.sleep(0.2)

    thread = threading.Thread(target=other)
    with exclusive.measuring(GPU):
        thread.start()
        waiting.wait()
        time.sleep(0.5)
        order.append("first")
    with exclusive.measuring(GPU, patience=30):
        order.append("again")
    thread.join()
    assert order == ["first", "other", "again"]


def test_whoever_is_next_and_does_not_come_is_not_waited_for(monkeypatch, tmp_path):
    monkeypatch.setattr(exclusive, "_NEXT", 0.2)
    from filelock import FileLock

    with FileLock(exclusive._path(GPU).with_suffix(".next")):  # as of a process that was stopped
        began = time.monotonic()
        with exclusive.measuring(GPU, patience=30) as held:
            assert held and time.monotonic() - began < 10


def test_the_wait_for_a_turn_is_counted_for_the_thread_that_waits():
    counts: list[float] = []

    def other() -> None:
        with exclusive.measuring(GPU, patience=30):
            time.sleep(0.2)  # what is done in a turn is no waiting
        counts.append(exclusive.waited())

    thread = threading.Thread(target=other)
    before = exclusive.waited()
    with exclusive.measuring(GPU), exclusive.measuring(GPU):
        thread.start()
        time.sleep(1.0)
        began = exclusive.waited()
    thread.join()
    assert counts[0] > 0.5 and began - before < 0.5


def test_a_measurement_inside_another_does_not_wait_for_it():
    with exclusive.measuring(GPU) as outer, exclusive.measuring(GPU, patience=0.2) as inner:
        assert outer and inner


def test_it_goes_on_where_no_lock_file_can_be_made(monkeypatch):
    monkeypatch.setattr(exclusive, "_path", lambda device: Path("/dev/null/nowhere"))
    with exclusive.measuring(GPU) as held:
        assert not held


def test_an_error_inside_is_the_callers():
    with pytest.raises(OSError, match="own"), exclusive.measuring(GPU):
        raise OSError("its own")


def test_a_cpu_is_not_held():
    with exclusive.measuring(torch.device("cpu")) as held:
        assert not held


def test_a_phase_of_a_report_has_no_time_in_it_that_was_spent_waiting(monkeypatch):
    from fxopt.report import model

    clock = {"now": 0.0, "waited": 0.0}
    monkeypatch.setattr(time, "perf_counter", lambda: clock["now"])
    monkeypatch.setattr(exclusive, "waited", lambda: clock["waited"])

    def spend(working: float, waiting: float) -> None:
        clock["now"] += working + waiting
        clock["waited"] += waiting

    report = model.GraphReport(key="")
    for _ in range(2):
        with model.phase(report, "outer"):
            spend(1, 10)
            with model.phase(report, "inner"):
                spend(2, 20)
    with model.phase(report, "alone"):
        spend(4, 0)
    assert report.seconds == {"outer": 6, "inner": 4, "alone": 4, model.WAITING: 60}
