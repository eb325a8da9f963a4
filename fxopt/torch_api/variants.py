"""How Inductor times the variants of its Triton kernels, to keep the fastest. Tested with torch 2.11 and 2.13.

A generated kernel comes in several block sizes, and its first call times each: an event, a launch, an event. Where a
launch takes the CPU longer than the kernel takes the GPU, that is the launch's time, whatever the variant: 33 to 44 us
for kernels of 3 to 13 (`tests/benchmarks/inductor_variants_gpu.py`). It also empties the L2 cache before each launch,
while in a model the kernel before has just left its result there. Here launches queue up behind a kernel that waits, so
that the GPU runs them back to back.

Inductor keeps what it found on disk, by the kernel's source: a kernel that a baseline has in common with a candidate
stays with the variant that was found first, whoever timed it.
"""

from __future__ import annotations

import functools
import logging
import statistics
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import torch
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime import triton_heuristics
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

log = logging.getLogger(__name__)

#: launches that are timed at once, and how often
LAUNCHES, ROUNDS = 40, 5
#: what the launches of a round may take the GPU; at least two are made
ROUND_MS = 4.0
#: a kernel for which Inductor finds more than this is not launched slower than it runs
LONG_MS = 0.3
#: cycles that the first launches wait for: 1 ms at 2 GHz
CYCLES = 2_000_000
#: how often the wait is made longer, twofold, where the launches took the CPU longer than it
LONGER = 4


#: the kernels whose variants are timed so; no attribute of theirs, which Inductor would write to its caches
_marked: weakref.WeakSet[CachingAutotuner] = weakref.WeakSet()
#: whether this thread compiles code whose kernels are to be marked, and whether it times a marked kernel
_compiling: ContextVar[bool] = ContextVar("_compiling", default=False)
_timing: ContextVar[bool] = ContextVar("_timing", default=False)


@contextmanager
def timed_back_to_back() -> Iterator[None]:
    """Around a compilation: kernels of code that this thread loads meanwhile will have their variants timed so.

    Kernels that were loaded before, such as a baseline's, stay as they are, also where the new code has them too.
    """
    _watch()
    token = _compiling.set(True)
    try:
        yield
    finally:
        _compiling.reset(token)


@functools.cache
def _watch() -> None:
    """For good, once: put in place and taken away around compilations in several threads, it could be left in place.

    The list of modules shows no code that was compiled without caches, for Inductor empties it then.
    """
    load, bench = PyCodeCache.load_by_key_path, CachingAutotuner.bench

    def load_and_mark(*args: Any, **kwargs: Any) -> ModuleType:
        before = list(PyCodeCache.modules) if _compiling.get() else None
        module = load(*args, **kwargs)
        if before is not None and not any(module is other for other in before):
            _mark(module, before)
        return module

    def bench_marked(kernel: CachingAutotuner, *args: Any, **kwargs: Any) -> float:
        return _bench(kernel, bench, *args, **kwargs)

    for owner, name, value in (
        (PyCodeCache, "load_by_key_path", staticmethod(functools.wraps(load)(load_and_mark))),
        (CachingAutotuner, "bench", functools.wraps(bench)(bench_marked)),
        (triton_heuristics, "benchmarker", _Benchmarker(triton_heuristics.benchmarker)),
    ):
        setattr(owner, name, value)


def _bench(kernel: CachingAutotuner, bench: Callable[..., float], *args: Any, **kwargs: Any) -> float:
    """Inductor's `bench` of a kernel, with the launches queued if it is marked."""
    token = _timing.set(kernel in _marked)
    try:
        return bench(kernel, *args, **kwargs)
    finally:
        _timing.reset(token)


def _mark(module: ModuleType, before: list[ModuleType]) -> None:
    """Its kernels that none of the modules `before` has."""
    old = {id(kernel) for other in before for kernel in _kernels(other)}
    _marked.update(k for k in _kernels(module) if id(k) not in old and k.device_props.type == "cuda")


def _kernels(module: ModuleType) -> list[CachingAutotuner]:
    return [value for value in list(vars(module).values()) if isinstance(value, CachingAutotuner)]


class _Benchmarker:
    """Inductor's benchmarker, but for short GPU kernels that are marked, which it runs once more."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def benchmark(self, fn: Callable[[], Any], *args: Any, **kwargs: Any) -> float:
        return _shorter(fn, self.inner.benchmark(fn, *args, **kwargs))

    def benchmark_gpu(self, fn: Callable[[], Any], *args: Any, **kwargs: Any) -> float:
        return _shorter(fn, self.inner.benchmark_gpu(fn, *args, **kwargs))


def _shorter(fn: Callable[[], Any], milliseconds: float) -> float:
    """`milliseconds`, which Inductor found for a call of `fn`, or what it takes back to back if that is less."""
    if not _timing.get() or not milliseconds <= LONG_MS:  # of infinity and NaN, too, there is nothing to time
        return milliseconds
    try:
        found = back_to_back(fn, milliseconds)
    except Exception as error:
        log.debug("the variant's launches could not be timed back to back: %s", error)
        return milliseconds
    return milliseconds if found is None else min(found, milliseconds)


def back_to_back(fn: Callable[[], Any], estimate: float) -> float | None:
    """Milliseconds that the GPU takes for what one call of `fn` launches on the current stream, the median of ROUNDS.

    estimate: about how long it takes, launch included. None where launches cannot be queued, because they wait for the
    GPU, say.
    """
    launches = max(2, min(LAUNCHES, int(ROUND_MS / max(estimate, 1e-6))))
    cycles, found = CYCLES, list[float]()
    start, first, last = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    while len(found) < ROUNDS:
        start.record()
        torch.cuda._sleep(cycles)
        began = time.perf_counter()
        first.record()
        for _ in range(launches):
            fn()
        last.record()
        queued = (time.perf_counter() - began) * 1e3
        last.synchronize()
        if queued < start.elapsed_time(first):
            found.append(first.elapsed_time(last) / launches)
        elif cycles < CYCLES << LONGER:
            cycles *= 2
        else:
            return None
    return statistics.median(found)
