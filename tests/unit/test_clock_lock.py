"""No test here touches a real clock: all run in processes that load a stand-in for NVML, which logs the calls."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("pynvml")

HERE = Path(__file__).parent
# torch is not needed to lock a clock, and takes seconds to import.
PRELUDE = """
import ctypes, os, signal, sys, types
ctypes.CDLL("libnvidia-ml.so.1").stub_marker  # never the real library
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits that it is ignored
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and one under nohup that this is
no = lambda: False
sys.modules["torch"] = types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=no, is_initialized=no))
from profiler_core.clock_lock import *
from profiler_core import clock_lock
lock = clock_lock.lock
"""
LOCK_ONE = ["set_sm 1950 1950", "reset_sm"]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler to build a stand-in for libnvidia-ml.so.1")
    folder = tmp_path_factory.mktemp("nvml")
    command = [compiler, "-shared", "-fPIC", "-o", str(folder / "libnvidia-ml.so.1"), str(HERE / "nvml_stub.c")]
    subprocess.run(command, check=True)
    return folder


class Machine:
    """A machine with the stand-in: runs scripts, and knows what they asked of NVML."""

    def __init__(self, library: Path, folder: Path):
        self.log = folder / "nvml.log"
        self.log.touch()
        self.environment = {
            **os.environ,
            "LD_LIBRARY_PATH": str(library),
            "NVML_STUB_LOG": str(self.log),
            "PYTHONPATH": str(HERE.parents[1]),
            "TMPDIR": str(folder),
        }

    def start(self, script: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", PRELUDE + script],
            env={**self.environment, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, script: str, **environment: str) -> tuple[int, str, str]:
        """Exit status, output and errors, once the script and its guardian have ended."""
        process = self.start(script, **environment)
        output, errors = process.communicate(timeout=120)  # the guardian holds the error pipe to its end
        return process.returncode, output, errors

    def calls(self) -> list[str]:
        """What was set and reset, in order, whoever did it."""
        return [call for _, call in self.entries() if call.split("_")[0] in ("set", "reset")]

    def entries(self) -> list[tuple[int, str]]:
        lines = [line.split(" ", 1) for line in self.log.read_text().splitlines()]
        return [(int(pid), call) for pid, call in lines]


@pytest.fixture
def machine(library: Path, tmp_path: Path) -> Machine:
    return Machine(library, tmp_path)


# -- always undone ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("pass", 0),
        ("raise KeyError('in the measured function')", 1),
        ("sys.exit(5)", 5),
        ("os._exit(6)", 6),
        ("os.abort()", -6),
        ("os.kill(os.getpid(), signal.SIGTERM)", -15),
        ("os.killpg(0, signal.SIGINT); signal.pause()", -2),  # as Ctrl-C does: to the whole group
        ("os.killpg(0, signal.SIGHUP); signal.pause()", -1),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9),
    ],
)
def test_the_lock_is_undone_however_the_process_ends(machine: Machine, end: str, status: int) -> None:
    found, output, _ = machine.run(f"with lock('cuda:0') as held: print(held.sm_mhz, flush=True); {end}")
    assert (found, output) == (status, "1950\n")
    assert machine.calls() == LOCK_ONE


def test_a_lock_that_is_never_left_is_undone_at_the_end_of_the_interpreter(machine: Machine) -> None:
    assert machine.run("kept = lock('cuda:0'); kept.__enter__()")[0] == 0
    assert machine.calls() == LOCK_ONE


def test_the_guardian_runs_before_a_clock_is_locked(machine: Machine) -> None:
    machine.run("with lock('cuda:0'): pass")
    entries = machine.entries()
    locker = next(pid for pid, call in entries if call.startswith("set_sm"))
    before = entries[: entries.index((locker, "set_sm 1950 1950"))]
    assert [call for pid, call in before if pid != locker] == ["init"]


@pytest.mark.parametrize("executable", ["/nonexistent/python", shutil.which("true") or "/bin/true"])
def test_without_a_guardian_nothing_is_locked(machine: Machine, executable: str) -> None:
    script = f"sys.executable = {executable!r}\nwith lock('cuda:0'): print('locked')"
    status, output, errors = machine.run(script)
    assert status == 1 and output == ""
    assert "ClockLockError: the clocks are not locked" in errors
    assert machine.calls() == []


def test_a_killed_guardian_does_not_keep_the_clocks_locked(machine: Machine) -> None:
    status, _, errors = machine.run(
        "real = clock_lock._start_guardian\n"
        "def start(uuid):\n"
        "    global guardian\n"
        "    guardian = real(uuid)\n"
        "    return guardian\n"
        "clock_lock._start_guardian = start\n"
        "with lock('cuda:0'): guardian.process.kill(); guardian.process.wait()"
    )
    assert (status, errors) == (0, "")
    assert machine.calls() == LOCK_ONE


def test_a_forked_child_that_leaves_the_block_does_not_undo_its_parents_lock(machine: Machine) -> None:
    status, output, _ = machine.run(
        "with lock('cuda:0'):\n"
        "    child = os.fork()\n"
        "    if child:\n"
        "        assert os.waitpid(child, 0)[1] == 0\n"
        "        print('reset_sm' in open(os.environ['NVML_STUB_LOG']).read())"
    )
    assert (status, output) == (0, "False\n")
    assert machine.calls() == LOCK_ONE


def test_a_child_that_outlives_its_killed_parent_does_not_keep_the_lock(machine: Machine) -> None:
    process = machine.start(
        "with lock('cuda:0'):\n"
        "    if os.fork(): os.kill(os.getpid(), signal.SIGKILL)\n"
        "    print(os.getpid(), flush=True); sys.stdin.read(); os._exit(0)"
    )
    assert process.stdout is not None
    process.stdout.readline()  # the child lives, and holds the pipe to the guardian
    assert process.wait() == -9
    while machine.calls() != LOCK_ONE:
        time.sleep(0.05)
    process.communicate("")


# -- one lock at a time -----------------------------------------------------------------------------------------------


def test_a_lock_inside_a_lock_is_refused_and_leaves_the_outer_one(machine: Machine) -> None:
    status, output, _ = machine.run(
        "with lock('cuda:0'):\n"
        "    try:\n"
        "        with lock('cuda:0', 'max'): print('locked twice')\n"
        "    except ClocksBusy as error: print(error)"
    )
    assert status == 0 and "an enclosing lock of this one" in output and "locked twice" not in output
    assert machine.calls() == LOCK_ONE


def test_two_processes_do_not_lock_the_same_gpu(machine: Machine) -> None:
    first = machine.start("with lock('cuda:0'): print('locked', flush=True); sys.stdin.read()")
    assert first.stdout is not None and first.stdout.readline() == "locked\n"
    status, _, errors = machine.run("with lock('cuda:0', 'max'): pass")
    assert status == 1 and "ClocksBusy: the clocks of GPU GPU-stub are locked already" in errors
    assert machine.calls() == LOCK_ONE[:1]  # nothing was reset under the first
    first.communicate("")
    assert machine.run("with lock('cuda:0', 'max'): pass")[0] == 0
    assert machine.calls() == [*LOCK_ONE, "set_sm 1980 1980", "reset_sm"]


# -- refused ----------------------------------------------------------------------------------------------------------


def test_without_the_right_the_error_has_the_commands_of_an_administrator(machine: Machine) -> None:
    status, output, errors = machine.run(
        "try:\n"
        "    with lock('cuda:0', 1960, 3201): print('locked')\n"
        "except ClockPermissionError as error: print(error)",
        NVML_STUB_SET_SM="4",
        NVML_STUB_RESET="4",
    )
    assert (status, errors) == (0, "")
    assert output.splitlines() == [
        "no right to lock the clocks of GPU GPU-stub. An administrator can, with",
        "    sudo nvidia-smi -i GPU-stub --lock-gpu-clocks=1965,1965",
        "    sudo nvidia-smi -i GPU-stub --lock-memory-clocks=3201,3201",
        "and undo it with",
        "    sudo nvidia-smi -i GPU-stub --reset-gpu-clocks && sudo nvidia-smi -i GPU-stub --reset-memory-clocks",
    ]


@pytest.mark.parametrize("how", ["device", "mode"])
def test_a_mig_instance_is_refused_by_name(machine: Machine, how: str) -> None:
    status, _, errors = machine.run("with lock('cuda:0'): print('locked')", NVML_STUB_MIG=how)
    assert status == 1 and "ClocksUnsupported: cuda:0 is a MIG instance" in errors
    assert machine.calls() == []


def test_a_device_without_lockable_clocks_is_refused(machine: Machine) -> None:
    status, _, errors = machine.run("with lock('cuda:0'): print('locked')", NVML_STUB_SET_SM="3")
    assert status == 1 and "ClocksUnsupported: GPU GPU-stub does not let its clocks be locked" in errors


def test_where_the_memory_clock_is_refused_the_sm_clock_is_unlocked_again(machine: Machine) -> None:
    status, _, errors = machine.run("with lock('cuda:0', 'max', 3000): pass", NVML_STUB_SET_MEMORY="3")
    assert status == 1 and "ClocksUnsupported" in errors
    assert machine.calls() == ["set_sm 1980 1980", "set_memory 3201 3201", "reset_sm", "reset_memory"]


def test_an_unknown_device_and_a_machine_without_nvml_are_said(machine: Machine) -> None:
    assert "ClocksUnsupported: the clocks of cuda:3 cannot be locked" in machine.run("with lock('cuda:3'): pass")[2]
    errors = machine.run(
        "import pynvml\n"
        "def gone(): raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)\n"
        "pynvml.nvmlInit = gone\n"
        "with lock('cuda:0'): pass"
    )[2]
    assert "ClocksUnsupported: the clocks cannot be locked: NVML cannot be loaded" in errors
    assert machine.calls() == []


def test_a_reset_that_fails_is_tried_by_the_guardian_and_then_said_with_the_command(machine: Machine) -> None:
    status, _, errors = machine.run("with lock('cuda:0'): pass", NVML_STUB_RESET="999")
    assert status == 0
    assert "RuntimeWarning" in errors and "sudo nvidia-smi -i GPU-stub --reset-gpu-clocks" in errors
    assert machine.calls() == [*LOCK_ONE, "reset_sm"]
    assert len({pid for pid, call in machine.entries() if call == "reset_sm"}) == 2


# -- what is locked ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "calls"),
    [
        ("'base'", ["set_sm 1950 1950", "reset_sm"]),
        ("'max'", ["set_sm 1980 1980", "reset_sm"]),
        ("1970", ["set_sm 1965 1965", "reset_sm"]),
        ("None, 1600", ["set_memory 1593 1593", "reset_memory"]),
        # SM clocks are those supported at the memory clock
        ("'max', 1600", ["set_sm 1200 1200", "set_memory 1593 1593", "reset_sm", "reset_memory"]),
    ],
)
def test_a_supported_frequency_is_chosen_and_only_what_was_locked_is_reset(
    machine: Machine, asked: str, calls: list[str]
) -> None:
    assert machine.run(f"with lock('cuda:0', {asked}): pass")[0] == 0
    assert machine.calls() == calls


@pytest.mark.parametrize("asked", ["None", "'turbo'"])
def test_nothing_to_lock_and_unknown_words_are_refused(machine: Machine, asked: str) -> None:
    status, _, errors = machine.run(f"with lock('cuda:0', {asked}): pass")
    assert status == 1 and "ValueError" in errors
    assert machine.calls() == []


def test_importing_the_module_asks_nothing_of_nvml(machine: Machine) -> None:
    assert machine.run("")[0] == 0
    assert machine.entries() == []
