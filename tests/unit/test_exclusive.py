"""The lock under which measurements on a GPU take turns."""

from __future__ import annotations

import subprocess
import sys
import threading
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
