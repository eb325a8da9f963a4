"""Counters of each kernel that a function launches, by CUPTI's range profiler in this process.

CUPTI counts one set of hardware counters at a time, so a kernel has to run once a pass. Under *application replay* the
function is called for each pass, and what it does must be the same each time; under *kernel replay* CUPTI itself runs
each kernel again after restoring the memory that it wrote, which costs much more and is right for any function.
Kernels run one after the other while counters are on, so their durations here are not those of a timed run.

The first call of a pass finds the caches as CUPTI left them. Where that matters (a model whose data are of L2's size),
``primed`` calls the function twice a pass and counts the second call, which takes twice the time: on an H200 the
attention block of case_studies then wrote 12 % more to DRAM than under ncu, and 15 % without.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from profiler_core.collect import conflicts
from profiler_core.collect.cupti import host
from profiler_core.collect.cupti.library import (
    CountersBusy,
    CountersError,
    CountersUnavailable,
    Library,
    bytes_pointer,
    load,
    names_array,
)
from profiler_core.counter_table import ROW_COLUMNS, CounterTable

if TYPE_CHECKING:
    import torch

Replay = Literal["application", "kernel"]

_AUTO_RANGE = 1  # CUPTI_AutoRange: a range around each kernel
_REPLAY: dict[Replay, int] = {"application": 1, "kernel": 2}  # CUpti_ProfilerReplayMode
_RANGE_PROFILING = 0  # CUPTI_PROFILER_RANGE_PROFILING
_SUPPORTED = 3  # CUPTI_PROFILER_CONFIGURATION_SUPPORTED
_LEVELS = {  # field of cuptiProfilerDeviceSupported -> what it means when it is not supported
    "architecture": "its compute capability is below 7.0",
    "sli": "SLI is on",
    "vGpu": "it is a virtual GPU without profiling (plugin parameter enable_profiling=1)",
    "confidentialCompute": "confidential computing is on",
    "cmp": "it is a mining processor",
    "wsl": "it is used through WSL without support for counters",
}
# Kernels to provide for where the caller does not know how many there are. Under kernel replay there is no second try.
_FIRST_GUESS: dict[Replay, int] = {"application": 512, "kernel": 4096}


@dataclass(frozen=True)
class Collection:
    """What was collected and what it cost.

    ``table`` has a row a kernel, in launch order; CUPTI gives no kernel names, so ``name`` is "". ``pass_seconds`` has
    a value per pass, with counters set up and read, of which ``call_seconds`` passed inside the function; under kernel
    replay all ``passes`` are in one call. ``reason`` says why this replay was chosen.
    """

    table: CounterTable
    passes: int
    replay: Replay
    reason: str
    setup_seconds: float
    pass_seconds: tuple[float, ...]
    call_seconds: tuple[float, ...]
    decode_seconds: float
    evaluate_seconds: float

    def cost(self) -> str:
        """One line for people."""
        calls = zip(self.pass_seconds, self.call_seconds, strict=True)
        return (
            f"{len(self.table.rows)} kernels, {len(self.table.metrics)} metrics, {self.passes} passes by {self.replay} "
            f"replay: set-up {self.setup_seconds:.3f} s, calls "
            + " + ".join(f"{whole:.3f} s (function {inside:.3f})" for whole, inside in calls)
            + f", decoding {self.decode_seconds:.3f} s, evaluation {self.evaluate_seconds:.3f} s"
        )


def collect(
    fn: Callable[[], object],
    metrics: Sequence[str],
    *,
    replay: Replay | Literal["auto"] = "auto",
    state: Sequence[torch.Tensor] = (),
    device: int | None = None,
    kernels: int | None = None,
    warmup: int = 1,
    gate: Gate | None = None,
    primed: bool = False,
    library: Library | None = None,
    driver: str = "libcuda.so.1",
) -> Collection:
    """Calls ``fn`` with counters on and returns the values of ``metrics`` (PerfWorks names) for each of its kernels.

    Args:
        fn: launches work on ``device``; called ``warmup`` times without counters, then once a pass (application
            replay, twice where ``primed``) or once (kernel replay).
        replay: "auto" calls ``fn`` once more beforehand and lets :func:`repeatable` decide.
        state: tensors that ``fn`` might change (parameters, buffers, inputs), for :func:`repeatable`.
        device: index of the CUDA device; None is the one of the context that is current after the warm-up.
            Kernels on other devices are not seen.
        kernels: how many kernels a call launches, where a timed run has told. It saves a second try where there are
            more than a guess provides for, and another number of ranges is noted.
        gate: only what ``fn`` launches inside the gate is measured; by kernel replay, which takes all passes at once.

    Raises :class:`CountersError`: :class:`CountersUnavailable`, :class:`CountersNotPermitted`,
    :class:`CountersBusy` or :class:`UnknownMetric` where one fits; what ``fn`` raises passes through. Either way
    profiling is off again. Raises :class:`~profiler_core.collect.conflicts.ProfilerConflict` under nsys or ncu.
    """
    conflicts.refuse("CUPTI counters")
    if _torch_profiler_runs():
        raise CountersBusy("torch.profiler is active in this process, and CUPTI serves one of the two: end it first")
    library, cuda = library or load(), _Driver(driver)  # before the function is called for nothing
    mode: Replay
    with _on(device):
        for _ in range(warmup):
            fn()
        if gate is not None:
            mode, reason = "kernel", "only a part of the launches is measured"
        elif replay == "auto":
            same, reason = repeatable(fn, state)
            mode = "application" if same else "kernel"
        else:
            mode, reason = replay, "asked for"
        # One more than there should be, so that being full tells that there were more.
        room, primed = (kernels + 1 if kernels else _FIRST_GUESS[mode]), primed and mode == "application"
        while True:
            session = Session(metrics, mode, 2 * room if primed else room, library, cuda, gate, primed=primed)
            result = session.collect(fn, reason, kernels)
            if session.full and mode == "application":
                room = max(2 * room, room + session.dropped)
            elif session.uneven:  # two calls launched an odd number of kernels: which are the second's?
                primed = False
            else:
                return result


def repeatable(fn: Callable[[], object], state: Sequence[torch.Tensor] = ()) -> tuple[bool, str]:
    """Whether another call of ``fn`` would do what one just did, and the reason, found by calling it once.

    It would not if the call moved a random number generator (of the CPU, or of the current CUDA device), changed a
    tensor of ``state`` in place, or left a gradient in one. A change that leaves no trace in a tensor's version
    (writes by a replayed CUDA graph, or through a pointer) is not seen.
    """
    import torch

    def randomness() -> list[torch.Tensor]:
        on_gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
        return [torch.get_rng_state(), *on_gpu]

    def marks() -> list[Any]:
        return [(_mark(tensor), tensor.grad is not None and _mark(tensor.grad)) for tensor in state]

    random_before, before = randomness(), marks()
    fn()
    random_after, after = randomness(), marks()
    if any(not torch.equal(a, b) for a, b in zip(random_before, random_after, strict=False)):
        return False, "it draws random numbers"
    for tensor, (data_before, grad_before), (data_after, grad_after) in zip(state, before, after, strict=True):
        where = f"a tensor of shape {tuple(tensor.shape)}"
        if _differ(data_before, data_after):
            return False, f"it changes {where} in place"
        if _differ(grad_before, grad_after):
            return False, f"it accumulates a gradient in {where}"
    return True, "one call changed neither a random number generator nor a tensor it was given"


def _mark(tensor: torch.Tensor) -> Any:
    """Something that differs after an in-place change."""
    if tensor.is_inference():  # has no version
        return tensor.clone()
    return id(tensor), tensor._version


def _differ(before: Any, after: Any) -> bool:
    import torch

    if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
        return not torch.equal(before, after)
    return bool(before != after)


def _torch_profiler_runs() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.autograd.profiler._is_profiler_enabled)


def _on(device: int | None) -> AbstractContextManager[Any]:
    if device is None:
        return nullcontext()
    import torch

    return torch.cuda.device(device)


class Gate:
    """Lets counters see a part of what a function launches.

    >>> gate = Gate(lambda name: name in wanted)                             # doctest: +SKIP
    >>> with inductor.instrumented(graph, provenance, ranges=gate.range):    # doctest: +SKIP
    ...     collection = collect(call, metrics, gate=gate)

    CUPTI's range profiler may be started and stopped many times within one configuration under kernel replay, and its
    ranges follow each other (seen on an H200; the header does not say). Both wait for the GPU.
    """

    def __init__(self, wanted: Callable[[str], bool]) -> None:
        self._wanted = wanted
        self._start: Callable[[], None] | None = None  # set while a session collects
        self._stop: Callable[[], None] | None = None
        self.opened = 0

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Open for the body where ``name`` is wanted and counters are being collected."""
        if self._start is None or self._stop is None or not self._wanted(name):
            yield
            return
        self.opened += 1
        self._start()
        try:
            yield
        finally:
            self._stop()


class Session:
    """One use of the range profiler, on the CUDA context that is current on this thread.

    ``ranges`` is how many kernels a pass has room for; ``dropped`` says afterwards how many had none, as far as CUPTI
    counts them, and ``full`` whether there may have been more than there was room for.
    """

    def __init__(
        self,
        metrics: Sequence[str],
        replay: Replay,
        ranges: int,
        library: Library,
        driver: _Driver,
        gate: Gate | None = None,
        *,
        primed: bool = False,
    ) -> None:
        self.metrics, self.replay, self.ranges = list(dict.fromkeys(metrics)), replay, ranges
        self.dropped, self.full, self.uneven = 0, False, False
        self._primed = primed  # the function is called twice a pass, and what the second call launches counts
        self._library, self._driver, self._gate = library, driver, gate
        self._cleanup = ExitStack()
        self._calls: list[tuple[float, float]] = []  # seconds: the whole pass, the function in it

    def collect(self, fn: Callable[[], object], reason: str, kernels: int | None) -> Collection:
        """Everything that :func:`collect` does once the replay is chosen."""
        try:
            begin = time.perf_counter()
            self._open()
            setup_seconds = time.perf_counter() - begin
            self._run(fn)
            result = self._result(reason, kernels, setup_seconds)
        except BaseException:
            with suppress(CountersError):  # what went wrong first is what to tell
                self._cleanup.close()
            raise
        self._cleanup.close()
        return result

    def _open(self) -> None:
        call, undo = self._library.call, self._cleanup.callback
        context, self._device = self._driver.context()
        call("cuptiProfilerInitialize")
        undo(call, "cuptiProfilerDeInitialize")
        self._check_supported()
        chip = call("cuptiDeviceGetChipName", deviceIndex=self._device).pChipName.decode()
        self._host = host.Host(chip, self._availability(context), self._library)
        undo(self._host.close)
        image = host.configure(self._host, self.metrics)
        self._config = ctypes.create_string_buffer(image, len(image))
        self.passes = host.image_passes(image, self._library)
        self._profiler = call("cuptiRangeProfilerEnable", ctx=context).pRangeProfilerObject
        undo(call, "cuptiRangeProfilerDisable", pRangeProfilerObject=self._profiler)
        size = call(
            "cuptiRangeProfilerGetCounterDataSize",
            pRangeProfilerObject=self._profiler,
            pMetricNames=names_array(self.metrics),
            numMetrics=len(self.metrics),
            maxNumOfRanges=self.ranges,
            maxNumRangeTreeNodes=self.ranges,
        ).counterDataSize
        self._data = (ctypes.c_uint8 * size)()
        call(
            "cuptiRangeProfilerCounterDataImageInitialize",
            pRangeProfilerObject=self._profiler,
            counterDataSize=size,
            pCounterData=bytes_pointer(self._data),
        )

    def _check_supported(self) -> None:
        found = self._library.call("cuptiProfilerDeviceSupported", cuDevice=self._device, api=_RANGE_PROFILING)
        if found.isSupported != _SUPPORTED:
            why = [text for field, text in _LEVELS.items() if getattr(found, field) != _SUPPORTED]
            raise CountersUnavailable(
                f"CUDA device {self._device} does not support the range profiler: {'; '.join(why) or 'no reason given'}"
            )

    def _availability(self, context: int) -> bytes:
        call = self._library.call
        size = call("cuptiProfilerGetCounterAvailability", ctx=context).counterAvailabilityImageSize
        image = ctypes.create_string_buffer(size)
        call(
            "cuptiProfilerGetCounterAvailability",
            ctx=context,
            counterAvailabilityImageSize=size,
            pCounterAvailabilityImage=bytes_pointer(image),
        )
        return image.raw

    def _run(self, fn: Callable[[], object]) -> None:
        """Calls ``fn`` until every pass is in: once a pass, under kernel replay once. Each call is synchronised."""
        self._driver.synchronize()
        if self._gate is not None:
            self._run_gated(fn, self._gate)
            return
        index, level, done = 0, 1, False
        while not done:
            if len(self._calls) == (1 if self.replay == "kernel" else self.passes):
                raise CountersError(f"CUPTI asks for more than the {self.passes} passes that it scheduled")
            begin = time.perf_counter()
            self._configure(index, level)
            self._library.call("cuptiRangeProfilerStart", pRangeProfilerObject=self._profiler)
            called = time.perf_counter()
            try:
                for _ in range(1 + self._primed):
                    fn()
                    self._driver.synchronize()
            except BaseException:
                with suppress(CountersError):
                    self._library.call("cuptiRangeProfilerStop", pRangeProfilerObject=self._profiler)
                raise
            returned = time.perf_counter()
            stopped = self._library.call("cuptiRangeProfilerStop", pRangeProfilerObject=self._profiler)
            index, level, done = stopped.passIndex, stopped.targetNestingLevel, bool(stopped.isAllPassSubmitted)
            self._calls.append((time.perf_counter() - begin, returned - called))

    def _run_gated(self, fn: Callable[[], object], gate: Gate) -> None:
        """Calls ``fn`` once; the gate starts and stops counting."""

        def start() -> None:
            self._driver.synchronize()  # what was launched before is not to be counted
            self._library.call("cuptiRangeProfilerStart", pRangeProfilerObject=self._profiler)

        def stop() -> None:
            self._driver.synchronize()
            self._library.call("cuptiRangeProfilerStop", pRangeProfilerObject=self._profiler)

        begin = time.perf_counter()
        self._configure(0, 1)
        gate._start, gate._stop = start, stop
        called = time.perf_counter()
        try:
            fn()
            self._driver.synchronize()
        finally:
            gate._start = gate._stop = None
        returned = time.perf_counter()
        self._calls.append((time.perf_counter() - begin, returned - called))

    def _configure(self, index: int, level: int) -> None:
        self._library.call(
            "cuptiRangeProfilerSetConfig",
            pRangeProfilerObject=self._profiler,
            configSize=len(self._config),
            pConfig=bytes_pointer(self._config),
            counterDataImageSize=len(self._data),
            pCounterDataImage=bytes_pointer(self._data),
            range=_AUTO_RANGE,
            replayMode=_REPLAY[self.replay],
            maxRangesPerPass=self.ranges,
            numNestingLevels=1,
            minNestingLevel=1,
            passIndex=index,
            targetNestingLevel=level,
        )

    def _result(self, reason: str, kernels: int | None, setup_seconds: float) -> Collection:
        """Decodes and evaluates."""
        begin = time.perf_counter()
        decoded = self._library.call("cuptiRangeProfilerDecodeData", pRangeProfilerObject=self._profiler)
        self.dropped = int(decoded.numOfRangeDropped)  # on an H200 it stayed 0 with 512 ranges for 700 kernels
        count = self._library.call(
            "cuptiRangeProfilerGetCounterDataInfo",
            pCounterDataImage=bytes_pointer(self._data),
            counterDataImageSize=len(self._data),
        ).numTotalRanges
        self.full = bool(self.dropped) or count >= self.ranges
        middle = time.perf_counter()
        self.uneven = self._primed and bool(count % 2)
        values = self._host.evaluate(self._data, self.metrics, range(count // 2 if self._primed else 0, count))
        end = time.perf_counter()
        return Collection(
            self._table(values, reason, kernels),
            self.passes,
            self.replay,
            reason,
            setup_seconds,
            tuple(whole for whole, _ in self._calls),
            tuple(inside for _, inside in self._calls),
            middle - begin,
            end - middle,
        )

    def _table(self, values: Any, reason: str, kernels: int | None) -> CounterTable:
        import numpy as np
        import pandas as pd

        count = len(values)
        columns = {name: np.full(count, default, dtype=dtype) for name, (dtype, default) in ROW_COLUMNS.items()}
        columns |= {"process": np.full(count, os.getpid()), "id": np.arange(count)}
        columns["device"] = np.full(count, self._device)
        columns |= {name: values[:, i] for i, name in enumerate(self.metrics)}
        notes = [f"{self.replay} replay: {reason}"]
        partial = []
        if self.full:
            more = f"{self.dropped} kernels or more" if self.dropped else "any kernels beyond these"
            partial.append(
                f"there was room for {self.ranges} ranges, and {more} have none; pass kernels= with their number"
            )
        elif kernels is not None and count != kernels:
            notes.append(
                f"{count} ranges for {kernels} kernels of a timed call: a CUDA graph that is launched as a whole may "
                "be one range, and kernels on other devices have none"
            )
        return CounterTable(
            pd.DataFrame(columns).astype({name: dtype for name, (dtype, _) in ROW_COLUMNS.items()}),
            source="cupti",
            replay=self.replay,
            passes=self.passes,
            notes=tuple(notes),
            partial=tuple(partial),
        )


class _Driver:
    """What is needed of the CUDA driver: the context that is current, and waiting for it."""

    def __init__(self, path: str) -> None:
        try:
            self._dll = ctypes.CDLL(path)
        except OSError as error:
            raise CountersUnavailable(f"there is no NVIDIA driver here: {error}") from error

    def context(self) -> tuple[int, int]:
        """Its address and the index of its device."""
        context, device = ctypes.c_void_p(), ctypes.c_int()
        self._check("cuCtxGetCurrent", ctypes.byref(context))
        if not context.value:
            raise CountersUnavailable(
                "no CUDA context is current on this thread: the function has to use the GPU from the thread that "
                "collects its counters"
            )
        self._check("cuCtxGetDevice", ctypes.byref(device))
        return context.value, device.value

    def synchronize(self) -> None:
        self._check("cuCtxSynchronize")

    def _check(self, function: str, *args: Any) -> None:
        code = getattr(self._dll, function)(*args)
        if code:
            raise CountersError(f"{function} failed with CUresult {code}; the GPU's last work may have failed")
