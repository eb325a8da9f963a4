"""How Inductor times the variants of its Triton kernels, to keep the fastest. Tested with torch 2.11 and 2.13.

A generated kernel comes in several block sizes, and its first call times each: an event, a launch, an event. Where a
launch takes the CPU longer than the kernel takes the GPU, that is the launch's time, whatever the variant: 19 to 26 us
for kernels of 6 to 13 (`tests/benchmarks/inductor_variants_gpu.py`). It also empties the L2 cache before each launch,
while in a model the kernel before has just left its result there. Here launches queue up behind a kernel that waits, so
that the GPU runs them back to back.
"""

from __future__ import annotations

import functools
import logging
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any, cast

import torch
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime import triton_heuristics

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


@contextmanager
def timed_back_to_back() -> Iterator[None]:
    """Around a compilation: kernels of code that this thread loads meanwhile will have their variants timed so.

    Code that was loaded before, such as a baseline's, stays as it is, also where the new code is equal to it.
    """
    _watch_loading()
    token = _compiling.set(True)
    try:
        yield
    finally:
        _compiling.reset(token)


_compiling: ContextVar[bool] = ContextVar("_compiling", default=False)


@functools.cache
def _watch_loading() -> None:
    """For good, once: put in place and taken away around compilations in several threads, it could be left in place.

    The list of modules shows no code that was compiled without caches, for Inductor empties it then.
    """
    load = PyCodeCache.load_by_key_path

    def load_and_mark(*args: Any, **kwargs: Any) -> ModuleType:
        before = {id(module) for module in PyCodeCache.modules} if _compiling.get() else None
        module = load(*args, **kwargs)
        if before is not None and id(module) not in before:
            _mark(module)
        return module

    cache: Any = PyCodeCache
    cache.load_by_key_path = staticmethod(functools.wraps(load)(load_and_mark))


def _mark(module: ModuleType) -> None:
    for kernel in list(vars(module).values()):
        if not isinstance(kernel, triton_heuristics.CachingAutotuner) or isinstance(kernel.bench, _Bench):
            continue
        if kernel.device_props.type == "cuda":
            kernel.__dict__["bench"] = _Bench(kernel.bench)  # of this kernel alone


class _Bench:
    """A kernel's method `bench`, under another way of timing. Refers to the kernel, which has a cycle with it then."""

    def __init__(self, bench: Callable[..., float]) -> None:
        self.bench = bench

    def __call__(self, *args: Any, **kwargs: Any) -> float:
        inner: Any = triton_heuristics.benchmarker
        if isinstance(inner, _Benchmarker):  # another thread's, such as autograd's in a backward
            inner = inner.inner
        triton_heuristics.benchmarker = cast(Any, _Benchmarker(inner))
        try:
            return self.bench(*args, **kwargs)
        finally:
            triton_heuristics.benchmarker = inner


class _Benchmarker:
    """Inductor's benchmarker, but for short GPU kernels, which it runs once more. Whatever it raises, it raises."""

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
    if not milliseconds <= LONG_MS:  # of infinity and NaN, too, there is nothing to time
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
    for _ in range(ROUNDS + LONGER):
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
        else:
            cycles *= 2
        if len(found) == ROUNDS:
            return statistics.median(found)
    return None
