"""Measuring under torch.profiler: what comes back, and what is refused or noticed."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from profiler_core.attribute.cpu_kernels import cpu_kernels
from profiler_core.attribute.engine import attribute
from profiler_core.attribute.windows import find
from profiler_core.collect import kineto
from profiler_core.collect.kineto import ProfilerError, kernel_time, measure

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def event(category: str, name: str, ts: int, dur: int, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "pid": 9, "tid": tid, "args": args}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a recorded trace and wall times in the profiler's place."""

    def put(*events: dict[str, Any], wall: tuple[float, ...] = (1.0,)) -> None:
        monkeypatch.setattr(kineto, "_profiled", lambda *_: json.dumps({"traceEvents": events}))
        monkeypatch.setattr(kineto, "_wall", lambda *_: list(wall))
        monkeypatch.setattr(kineto.conflicts, "active_profiler", lambda: None)

    return put


def test_a_measurement_is_a_trace_of_the_asked_for_iterations() -> None:
    x = torch.ones(8, 8)
    calls: list[int] = []

    def fn() -> None:
        calls.append(1)
        torch.relu(x @ x)

    trace = measure(fn, iterations=3, warmup=2, device=CPU)
    assert trace.iterations == 3 and len(trace.wall_ns) == 3 and min(trace.wall_ns) > 0
    assert len(calls) == 2 + 3 + 1 + 3, "warm-up, wall time, a profile that is thrown away, the profile"
    assert (trace.device_type, trace.notes, trace.partial) == ("cpu", (), ())
    names = trace.ranges["name"].tolist()
    assert names.count("aten::mm") == names.count("aten::relu") == 3
    around = trace.ranges[trace.ranges["name"] == "fxopt::iteration#1"].iloc[0]
    mm = trace.ranges[trace.ranges["name"] == "aten::mm"].iloc[1]
    assert around["start_ns"] <= mm["start_ns"] <= mm["end_ns"] <= around["end_ns"]


def test_kernel_time_on_the_cpu_is_that_of_top_level_operators() -> None:
    x = torch.ones(8, 8)
    time = kernel_time(lambda: torch.relu(x @ x), iterations=3, warmup=1, device=CPU)
    assert time.kernels == 2 and time.kernel_ns > 0 and time.note == ""


def test_kernel_time_on_the_gpu_goes_by_the_call_that_launched(recorded: Any) -> None:
    launches = [(5, 1, 1), (105, 2, 2), (106, 3, 1), (250, 4, 1)]  # time, correlation id, thread; the last is outside
    recorded(
        *(event("cpu_op", f"fxopt::iteration#{i}", 100 * i, 90) for i in range(2)),
        *(event("cuda_runtime", "cudaLaunchKernel", ts, 1, tid, correlation=c) for ts, c, tid in launches),
        event("kernel", "a", 95, 10, device=0, stream=7, correlation=1),  # runs on while iteration 1 begins
        event("kernel", "b", 110, 20, device=0, stream=7, correlation=2),  # launched by another thread
        event("gpu_memcpy", "c", 130, 30, device=0, stream=7, correlation=3),
        event("kernel", "d", 260, 1000, device=0, stream=7, correlation=4),
        wall=(7.0, 9.0),
    )
    time = kernel_time(lambda: None, iterations=2, warmup=0, device=CUDA)
    assert time.kernel_ns == (10_000 + 50_000) / 2, "the median of both iterations"
    assert (time.kernels, time.wall_ns) == (2, 8.0)


def test_a_gpu_that_showed_no_activity_is_an_error_on_the_gpu_alone(recorded: Any) -> None:
    recorded(event("cpu_op", "fxopt::iteration#0", 1, 1))
    with pytest.raises(ProfilerError, match="CUPTI_ERROR_MULTIPLE_SUBSCRIBERS"):
        measure(lambda: None, iterations=1, warmup=0, device=CUDA)
    assert measure(lambda: None, iterations=1, warmup=0, device=CPU).kernels.empty


def test_dropped_iterations_and_empty_traces_are_errors(recorded: Any) -> None:
    recorded(event("cpu_op", "fxopt::iteration#0", 1, 1))
    with pytest.raises(ProfilerError, match="1 of 2 iterations"):
        measure(lambda: None, iterations=2, warmup=0, device=CPU)
    recorded()
    with pytest.raises(ProfilerError, match=r"no usable trace: .* holds no events"):
        measure(lambda: None, iterations=1, warmup=0, device=CPU)


def test_measuring_inside_another_profile_is_refused() -> None:
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True),
        pytest.raises(ProfilerError, match="already active"),
    ):
        measure(lambda: None, iterations=1, warmup=0, device=CPU)


def test_at_least_one_iteration_is_asked_for() -> None:
    with pytest.raises(ValueError, match="iterations"):
        measure(lambda: None, iterations=0, warmup=0, device=CPU)


NESTED = """
import torch
from profiler_core.collect.kineto import ProfilerError, measure

x, cpu = torch.ones(4, 4), torch.device("cpu")

def uses_a_profiler():
    with torch.profiler.profile():
        return x @ x

for times in (1, 2):
    try:
        measure(uses_a_profiler, iterations=times, warmup=1, device=cpu)
    except ProfilerError as error:
        print("refused:", error)
print("afterwards:", measure(lambda: x @ x, iterations=2, warmup=0, device=cpu).iterations)
"""


def test_a_function_that_uses_the_profiler_itself_is_refused_and_the_process_lives_on() -> None:
    done = subprocess.run([sys.executable, "-c", NESTED], capture_output=True, text=True)
    refused = "refused: the function uses torch.profiler itself: profile it without"
    said = [line for line in done.stdout.splitlines() if line.startswith(("refused", "afterwards"))]
    assert (done.returncode, said) == (0, [refused, refused, "afterwards: 2"]), done.stderr


def test_other_errors_of_the_function_pass_through_the_profiler() -> None:
    calls: list[int] = []

    def fails_when_profiled() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("of its own")

    with pytest.raises(RuntimeError, match="of its own") as raised:
        measure(fails_when_profiled, iterations=1, warmup=0, device=CPU)
    assert not isinstance(raised.value, ProfilerError)


def test_on_the_cpu_operators_of_other_threads_count_once_and_within_their_call() -> None:
    x = torch.ones(8, 8)
    with ThreadPoolExecutor(1) as pool:
        time = kernel_time(
            lambda: (torch.tanh(x), pool.submit(lambda: torch.relu(x @ x)).result()), iterations=3, warmup=1, device=CPU
        )
    assert time.kernels == 3 and time.kernel_ns > 0


@pytest.mark.parametrize("number", [0, 1, 7])
def test_ranges_of_the_function_that_are_named_like_iterations_are_none(number: int) -> None:
    x = torch.ones(8, 8)

    def fn() -> None:
        with torch.profiler.record_function(f"fxopt::iteration#{number}"):
            torch.relu(x @ x)

    trace = measure(fn, iterations=2, warmup=0, device=CPU)
    windows = find(trace)
    assert (trace.iterations, windows.count, windows.number.tolist()) == (2, 2, [0, 1])
    assert cpu_kernels(trace)["iteration"].tolist() == [0, 0, 1, 1]
    assert attribute(trace).iterations == 2
