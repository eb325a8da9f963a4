"""Runs a function under torch.profiler and reads what it saw."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from profiler_core.collect import chrome_trace, conflicts
from profiler_core.collect.conflicts import ProfilerError
from profiler_core.trace import COMPILED_GRAPH_PREFIX, ITERATION_PREFIX, Trace, TraceError

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class KernelTime:
    """``kernel_ns`` and ``wall_ns`` are medians per call; ``kernels`` is the number of kernels per call.

    ``by_name``: of each kernel (launches, ns) per call, a mean and a median over the calls; what takes longest first.
    """

    kernel_ns: float
    kernels: int
    wall_ns: float
    note: str = ""
    by_name: dict[str, tuple[float, float]] = field(default_factory=dict)


def measure(
    fn: Callable[[], Any], *, iterations: int, warmup: int, device: torch.device, shapes: bool = False
) -> Trace:
    """Call ``fn`` ``warmup`` times, then time ``iterations`` calls without and ``iterations`` calls with
    the profiler.

    One more call runs under a profiler that is thrown away: the first use of the profiler in a process is
    slow. On the CPU the trace is of all threads. ``shapes``: record what operators are given, from which their work can
    be modelled; some 0.2 us an operator. Raises :class:`ProfilerError` where ``device`` is CUDA and the trace
    holds no device activity, and where a profiler runs already or ``fn`` uses one;
    :class:`~profiler_core.collect.conflicts.ProfilerConflict` where ``device`` is CUDA
    and the process runs under another profiler (nsys, ncu).
    """
    from profiler_core.attribute import windows

    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations}")
    if torch.autograd.profiler._is_profiler_enabled:
        raise ProfilerError("torch.profiler is already active in this process: profile outside of it")
    if device.type == "cuda":
        conflicts.refuse("torch.profiler")
    for _ in range(warmup):
        fn()
    wall = _wall(fn, iterations, device)
    _profiled(fn, 1, device, shapes)
    try:
        trace = chrome_trace.parse(_profiled(fn, iterations, device, shapes), wall_ns=wall)
    except TraceError as error:
        raise ProfilerError(f"torch.profiler left no usable trace: {error}") from error
    if device.type == "cuda" and trace.kernels.empty:
        raise ProfilerError(
            "torch.profiler saw no activity on the GPU. Another CUPTI client (nsys, ncu, DCGM profiling, a second "
            "profiler in this process: CUPTI_ERROR_MULTIPLE_SUBSCRIBERS) may hold the device, or the function "
            "launched nothing: end the other profiler and run again"
        )
    found = len(windows.find(trace).number)  # without ranges of such a name that the function itself has
    if found != iterations:
        raise ProfilerError(f"the trace holds {found} of {iterations} iterations: too many events were dropped")
    meta = {**trace.meta, "all_threads": device.type == "cpu"}
    # Without notes: they are what a reader would say of someone else's file.
    return replace(trace, device_type=device.type, iterations=iterations, meta=meta, notes=())


def kernel_time(fn: Callable[[], Any], *, iterations: int = 5, warmup: int = 2, device: torch.device) -> KernelTime:
    """Kernel time of one call of any function, compiled or eager.

    On CUDA the sum of the durations of kernels, memcpys and memsets. On the CPU that of the top-level
    operators; a graph compiled by Inductor has C++ kernels that are no operators, so such a graph counts as
    a whole, including the Python time of its wrapper code, unless its launches have ranges
    (:func:`profiler_core.collect.inductor.instrumented`). ``note`` says so.
    """
    from profiler_core.attribute.cpu_kernels import cpu_kernels

    trace = measure(fn, iterations=iterations, warmup=warmup, device=device)
    kernels = _device_kernels(trace) if device.type == "cuda" else cpu_kernels(trace, whole_graphs=True)
    kernels = kernels[kernels["iteration"] >= 0]
    total = kernels.groupby("iteration")["duration_ns"].sum().reindex(range(iterations), fill_value=0)
    whole = kernels["name"].str.startswith(COMPILED_GRAPH_PREFIX).any()
    note = "a compiled graph counts as one kernel, with the Python time of its wrapper code" if whole else ""
    calls = kernels.pivot_table("duration_ns", "name", "iteration", aggfunc="sum", fill_value=0)
    each = calls.reindex(columns=range(iterations), fill_value=0).median(axis="columns").sort_values(ascending=False)
    launches = kernels.groupby("name").size() / iterations
    by_name = {str(name): (float(launches[name]), float(ns)) for name, ns in each.items()}
    wall_ns = float(median(trace.wall_ns))
    return KernelTime(float(total.median()), round(len(kernels) / iterations), wall_ns, note, by_name)


def _device_kernels(trace: Trace) -> pd.DataFrame:
    """The kernels, each with the iteration in which it was launched, on whatever thread (-1: in none)."""
    from profiler_core.attribute import windows
    from profiler_core.attribute.rows import rows_of

    launch_ns, start_ns = rows_of(trace).launch_ns, trace.kernels["start_ns"].to_numpy()
    return trace.kernels.assign(iteration=windows.find(trace).of(launch_ns, start_ns))


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


def _profiled(fn: Callable[[], Any], iterations: int, device: torch.device, shapes: bool) -> str:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize(device)
    # By default the profiler records the thread that started it, and on the CPU nothing else tells of the others.
    threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=device.type == "cpu")
    own = "the function uses torch.profiler itself: profile it without"
    options: dict[str, Any] = {"acc_events": True, "experimental_config": threads, "record_shapes": shapes}
    try:
        with torch.profiler.profile(activities=activities, **options) as profiler:
            for i in range(iterations):
                with profiler_range(f"{ITERATION_PREFIX}{i}"):
                    fn()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)  # so that an iteration's kernels end before the next begins
            # A profiler inside has ended this one with itself; to export what is left crashes the process.
            if not torch.autograd.profiler._is_profiler_enabled:
                raise ProfilerError(own)
    except RuntimeError as error:
        if "Can't disable Kineto profiler" in str(error):  # torch 2.11, on leaving
            raise ProfilerError(own) from error
        raise
    handle, path = tempfile.mkstemp(suffix=".json")
    os.close(handle)
    try:
        profiler.export_chrome_trace(path)
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    finally:
        os.unlink(path)


def profiler_range(name: str) -> Any:
    """A context manager that the profiler sees as an operator, not as an annotation: annotations are projected onto the
    device as if they were activity there.
    """
    fast = getattr(torch._C._profiler, "_RecordFunctionFast", None)
    return torch.profiler.record_function(name) if fast is None else fast(name)
