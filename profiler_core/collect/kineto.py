"""Runs a function under torch.profiler and reads its trace: CPU ops, launches, device activity,
iterations.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import pairwise
from statistics import median
from typing import Any

import torch

ITERATION_PREFIX = "fxopt::iteration#"
COMPILED_GRAPH_PREFIX = "## Call CompiledFxGraph"  # the annotation that Inductor puts around a compiled graph

_OP_CATEGORIES = {"cpu_op", "operator", "user_annotation", "cuda_runtime", "runtime", "cuda_driver", "driver"}
_DEVICE_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"}


class ProfilerError(RuntimeError):
    """torch.profiler gave no usable trace; the message says why and what to do."""


@dataclass(frozen=True)
class Op:
    """A CPU event. ``category`` is "cpu_op", "user_annotation", "cuda_runtime" or "cuda_driver";
    ``correlation`` links a runtime or driver call to the device activity it started (None for other
    events). Times are ns on the trace's clock.
    """

    name: str
    thread: int | str
    start_ns: int
    end_ns: int
    correlation: int | None = None
    category: str = "cpu_op"


@dataclass(frozen=True)
class Kernel:
    """A piece of device activity: a kernel, a memcpy or a memset. Times are ns; ``shared_memory`` is bytes
    per block.
    """

    name: str
    device: str
    stream: int | None
    start_ns: int
    duration_ns: int
    correlation: int | None = None
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    registers: int | None = None
    shared_memory: int | None = None


@dataclass(frozen=True)
class RawTrace:
    """What torch.profiler saw in one window of ``iterations`` calls.

    ``wall_ns`` holds one value per iteration and was measured in a loop of its own, without the profiler.
    ``device`` is "cpu" or "cuda": whose activity counts as kernels.
    """

    ops: tuple[Op, ...]
    kernels: tuple[Kernel, ...]
    iterations: int
    wall_ns: tuple[float, ...] = ()
    device: str = "cpu"
    notes: tuple[str, ...] = field(default=())

    @property
    def iteration_ranges(self) -> list[tuple[int, Op]]:
        """(iteration number, its range on the calling thread), in order of time."""
        found = [(int(op.name[len(ITERATION_PREFIX) :]), op) for op in self.ops if op.name.startswith(ITERATION_PREFIX)]
        return sorted(found, key=lambda pair: pair[1].start_ns)


@dataclass(frozen=True)
class KernelTime:
    """``kernel_ns`` and ``wall_ns`` are medians per call; ``kernels`` is the number of kernels per call."""

    kernel_ns: float
    kernels: int
    wall_ns: float
    note: str = ""


def parse_chrome_trace(trace: Any, *, wall_ns: Iterable[float] = ()) -> RawTrace:
    """Read a Chrome trace that torch.profiler exported (the parsed JSON object, or its text).

    Times in the file are microseconds with three decimals; from text they become integer ns without
    rounding through a float. Annotations that the profiler projects onto the device are not device activity
    and are left out.
    """
    data = json.loads(trace, parse_float=Decimal) if isinstance(trace, (str, bytes)) else trace
    events = data.get("traceEvents") if isinstance(data, dict) else None
    if not isinstance(events, list):
        raise ProfilerError("not a Chrome trace of torch.profiler: it has no list 'traceEvents'")
    ops: list[Op] = []
    kernels: list[Kernel] = []
    for event in events:
        if event.get("ph") != "X" or "dur" not in event:
            continue
        category = str(event.get("cat", "")).lower()
        start, duration = _ns(event["ts"]), _ns(event["dur"])
        args = event.get("args", {})
        correlation = args.get("correlation")
        if category in _DEVICE_CATEGORIES:
            kernels.append(
                Kernel(
                    name=str(event.get("name", "")),
                    device=f"cuda:{args.get('device', event.get('pid', 0))}",
                    stream=args.get("stream"),
                    start_ns=start,
                    duration_ns=duration,
                    correlation=correlation,
                    grid=_triple(args.get("grid")),
                    block=_triple(args.get("block")),
                    registers=args.get("registers per thread"),
                    shared_memory=args.get("shared memory"),
                )
            )
        elif category in _OP_CATEGORIES:
            thread = event.get("tid", 0)
            ops.append(Op(str(event.get("name", "")), thread, start, start + duration, correlation, category))
    kernels.sort(key=lambda kernel: (kernel.start_ns, kernel.correlation or 0))
    count = sum(op.name.startswith(ITERATION_PREFIX) for op in ops)
    return RawTrace(tuple(ops), tuple(kernels), count, tuple(wall_ns), "cuda" if kernels else "cpu")


def _ns(microseconds: Any) -> int:
    return int((Decimal(str(microseconds)) * 1000).to_integral_value())


def _triple(value: Any) -> tuple[int, int, int] | None:
    if isinstance(value, list) and len(value) == 3:
        return int(value[0]), int(value[1]), int(value[2])
    return None


def measure(fn: Callable[[], Any], *, iterations: int, warmup: int, device: torch.device) -> RawTrace:
    """Call ``fn`` ``warmup`` times, then time ``iterations`` calls without and ``iterations`` calls with
    the profiler.

    One more call runs under a profiler that is thrown away: the first use of the profiler in a process is
    slow. Raises :class:`ProfilerError` where ``device`` is CUDA and the trace holds no device activity, and
    where a profiler runs already.
    """
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations}")
    if torch.autograd.profiler._is_profiler_enabled:
        raise ProfilerError("torch.profiler is already active in this process: profile outside of it")
    for _ in range(warmup):
        fn()
    wall = _wall(fn, iterations, device)
    _profiled(fn, 1, device)
    trace = parse_chrome_trace(_profiled(fn, iterations, device), wall_ns=wall)
    if device.type == "cuda" and not trace.kernels:
        raise ProfilerError(
            "torch.profiler saw no activity on the GPU. Another CUPTI client (nsys, ncu, DCGM profiling, a second "
            "profiler in this process: CUPTI_ERROR_MULTIPLE_SUBSCRIBERS) may hold the device, or the function "
            "launched nothing: end the other profiler and run again"
        )
    if trace.iterations != iterations:
        raise ProfilerError(
            f"the trace holds {trace.iterations} of {iterations} iterations: too many events were dropped"
        )
    return RawTrace(trace.ops, trace.kernels, iterations, tuple(wall), device.type)


def kernel_time(fn: Callable[[], Any], *, iterations: int = 5, warmup: int = 2, device: torch.device) -> KernelTime:
    """Kernel time of one call of any function, compiled or eager.

    On CUDA the sum of the durations of kernels, memcpys and memsets. On the CPU that of the top-level
    operators; a graph compiled by Inductor has C++ kernels that are no operators, so such a graph counts as
    a whole, including the Python time of its wrapper code, unless its launches have ranges
    (:func:`profiler_core.collect.inductor.instrumented`). ``note`` says so.
    """
    from profiler_core.attribute.correlation import kernel_rows

    trace = measure(fn, iterations=iterations, warmup=warmup, device=device)
    total = dict.fromkeys(range(iterations), 0)
    count = 0
    rows = kernel_rows(trace, whole_graphs=True)
    for row in rows:
        if row.iteration in total:
            total[row.iteration] += row.kernel.duration_ns
            count += 1
    whole = any(row.kernel.name.startswith(COMPILED_GRAPH_PREFIX) for row in rows)
    note = "a compiled graph counts as one kernel, with the Python time of its wrapper code" if whole else ""
    return KernelTime(float(median(total.values())), round(count / iterations), float(median(trace.wall_ns)), note)


def _wall(fn: Callable[[], Any], iterations: int, device: torch.device) -> list[float]:
    """Wall time per call in ns: on CUDA between events of back-to-back calls, on the CPU by the clock."""
    if device.type == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in range(iterations + 1)]
        with torch.cuda.device(device):
            torch.cuda.synchronize(device)
            events[0].record()
            for event in events[1:]:
                fn()
                event.record()
            torch.cuda.synchronize(device)
        return [a.elapsed_time(b) * 1e6 for a, b in pairwise(events)]
    wall = []
    for _ in range(iterations):
        start = time.perf_counter_ns()
        fn()
        wall.append(float(time.perf_counter_ns() - start))
    return wall


def _profiled(fn: Callable[[], Any], iterations: int, device: torch.device) -> str:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        for i in range(iterations):
            with _range(f"{ITERATION_PREFIX}{i}"):
                fn()
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # so that an iteration's kernels end before the next begins
    handle, path = tempfile.mkstemp(suffix=".json")
    os.close(handle)
    try:
        profiler.export_chrome_trace(path)
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    finally:
        os.unlink(path)


def _range(name: str) -> Any:
    # As an operator, not as an annotation: annotations are projected onto the device as if they were
    # activity there.
    fast = getattr(torch._C._profiler, "_RecordFunctionFast", None)
    return torch.profiler.record_function(name) if fast is None else fast(name)
