"""torch.profiler around a stretch of a running program, which begins and ends wherever the program stands."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from profiler_core.collect import chrome_trace
from profiler_core.collect.conflicts import ProfilerError, active_profiler
from profiler_core.collect.kineto import profiler_range
from profiler_core.trace import ITERATION_PREFIX, RANGE_COLUMNS, Trace, TraceError, table

# Ranges without length: where a call begins, and where it has returned. Calls need not lie inside one another as the
# program's own ranges do, so that no range of the profiler's could be put around one.
_BEGINS, _RETURNED, _ENDS = "program call begins", "program call returned", "program calls end"


class Window:
    """One stretch. :meth:`begin` numbers the calls in it; :attr:`calls` is how many have begun."""

    def __init__(self, *, early: bool = False) -> None:
        """Starts the profiler. ``early``: before the program has used a GPU, which it may do later. Raises
        :class:`ProfilerError` where another profiler is at work in this process.
        """
        if torch.autograd.profiler._is_profiler_enabled:
            raise ProfilerError("the program uses torch.profiler itself: run it without, or load the trace it writes")
        # To ask whether there is one would settle which GPUs the program sees, before it says so.
        self.on_gpu = torch.cuda.is_available() if early else torch.cuda.is_initialized()
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.on_gpu:
            tool = active_profiler()
            if tool is not None:
                raise ProfilerError(f"the program runs under {tool}, which alone may profile the GPU: start it without")
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            torch.cuda.synchronize()
        threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=not self.on_gpu)
        self._profiler: Any = torch.profiler.profile(
            activities=activities, acc_events=True, experimental_config=threads, record_shapes=True
        )
        self._profiler.__enter__()
        self.calls = 0
        self._open = False  # whether the last call has begun and not returned
        self._text = ""

    @property
    def completed(self) -> int:
        return self.calls - self._open

    @property
    def usable(self) -> bool:
        """Whether a trace was taken: a profiler of the program's own may have ended this one."""
        return bool(self._text)

    def begin(self) -> None:
        """The next call begins here, and the one before has ended."""
        self._mark(_BEGINS)
        self.calls += 1
        self._open = True

    def returned(self) -> None:
        """The call has returned; what follows until the next one begins is still its own, unless none begins."""
        self._mark(_RETURNED)
        self._open = False

    def stop(self, *, complete: bool) -> None:
        """Stops the profiler. ``complete``: the next call is about to begin here; otherwise the last one ends where it
        returned.
        """
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        if complete:
            self._mark(_ENDS)
        if self.on_gpu:
            torch.cuda.synchronize()
        if not torch.autograd.profiler._is_profiler_enabled:
            # A profiler of the program's has ended this one with itself; to export what is left crashes the process.
            return
        profiler.__exit__(None, None, None)
        handle, path = tempfile.mkstemp(suffix=".json")
        os.close(handle)
        try:
            profiler.export_chrome_trace(path)
            with open(path, encoding="utf-8", errors="replace") as file:
                self._text = file.read()
        finally:
            with suppress(OSError):
                os.unlink(path)

    def trace(self) -> Trace:
        """What was seen, with a range ``fxopt::iteration#N`` for each call that was completed. Raises
        :class:`ProfilerError` where nothing of use was.
        """
        if not self._text:
            raise ProfilerError("the program ran a profiler of its own meanwhile, which ended this one")
        try:
            trace = chrome_trace.parse(self._text)
        except TraceError as error:
            raise ProfilerError(f"torch.profiler left no usable trace: {error}") from error
        device = "cuda" if len(trace.kernels) else "cpu"
        return replace(_with_calls(trace), device_type=device, meta={**trace.meta, "all_threads": not self.on_gpu})

    @staticmethod
    def _mark(name: str) -> None:
        with profiler_range(name):
            pass


def _with_calls(trace: Trace) -> Trace:
    """The marks replaced by ranges from the beginning of a call to that of the next."""
    ranges = trace.ranges
    marks = ranges[ranges["name"].isin((_BEGINS, _RETURNED, _ENDS))]
    begins = marks.loc[marks["name"] == _BEGINS, "start_ns"].tolist()
    ends = marks.loc[marks["name"] == _ENDS, "start_ns"].tolist()
    if begins and not ends:
        ends = marks.loc[(marks["name"] == _RETURNED) & (marks["start_ns"] > begins[-1]), "end_ns"].tolist()[-1:]
    bounds = [*begins, *ends]
    if len(bounds) < 2:
        raise ProfilerError("no call was completed while the profiler was on")
    # What follows the last call is no part of it: on a CPU an operator is of the call that had begun last.
    kept = ranges[~ranges["name"].isin((_BEGINS, _RETURNED, _ENDS)) & (ranges["start_ns"] < bounds[-1])]
    columns = {name: kept[name].tolist() for name in RANGE_COLUMNS}
    process = int(marks["process"].iloc[0])
    for number, (start, end) in enumerate(pairwise(bounds)):
        row = {"name": f"{ITERATION_PREFIX}{number}", "category": "annotation", "process": process, "thread": -1}
        row |= {"start_ns": start, "end_ns": end}
        for name, (_, default) in RANGE_COLUMNS.items():
            columns[name].append(row.get(name, default))
    return replace(trace, ranges=table(columns, RANGE_COLUMNS, "start_ns"), iterations=len(bounds) - 1, notes=())
