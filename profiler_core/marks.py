"""Marks the measured calls of a program for a profiler that watches it from outside."""

from __future__ import annotations

import os
from collections.abc import Iterator

ACTIVE = "PROFILER_CORE_RECORDING"
"""Set in the environment of a program by :func:`profiler_core.recording.record`: "ranges" for a tool that records
NVTX, "kernels" for one that only wants to know between which calls to measure."""


def measured(calls: int = 1) -> Iterator[int]:
    """Numbers 0 to ``calls`` - 1; what the body of the loop runs is a measured call.

    >>> for _ in profiler_core.measured(2):     # doctest: +SKIP
    ...     model(x)

    Under a recording, the profiler starts with the first call and stops after the last, operators are emitted as NVTX
    ranges meanwhile, and each call has a range of its own. Anywhere else the loop just runs. Put warm-up before it.
    """
    active = os.environ.get(ACTIVE)
    if not active:
        yield from range(calls)
        return
    import nvtx
    import torch

    from profiler_core.trace import ITERATION_PREFIX

    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    try:
        with torch.autograd.profiler.emit_nvtx(enabled=active == "ranges"):
            for number in range(calls):
                nvtx.push_range(f"{ITERATION_PREFIX}{number}")
                try:
                    yield number
                finally:
                    torch.cuda.synchronize()
                    nvtx.pop_range()
    finally:
        torch.cuda.profiler.stop()
