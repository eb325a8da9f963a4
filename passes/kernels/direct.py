"""Launching a Triton kernel again without binding its arguments anew. Triton's private interfaces are used here alone.

A launch through `kernel[grid](...)` looks at the type of every argument to find the compiled code. A tensor descriptor
costs it most: with four of them a launch takes longer on the CPU than a small product on the GPU. A caller who knows
that nothing but addresses has changed can hand the arguments to the code that the first launch compiled.

Tested with Triton 3.6; with any other every launch is an ordinary one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

_TESTED = "3.6."
_compiled: dict[Hashable, Any] = {}


@dataclass(slots=True)
class Descriptor:
    """What Triton's launcher reads of a tensor descriptor."""

    base: Any
    shape: Sequence[int]
    strides: Sequence[int]
    padding: str = "zero"


@functools.cache
def supported() -> bool:
    import triton

    return triton.__version__.startswith(_TESTED)


def launch(key: Hashable, grid: int, first: Callable[[], Any], arguments: Callable[[], Sequence[Any]]) -> None:
    """Run a kernel on `grid` programs in the current device's current stream.

    key: all that decides which code is compiled: device, constants, whatever integers and alignments Triton looks at.
    first: launches the ordinary way, and gives what that returns; called once a key. arguments: the values of all of
    the kernel's parameters, constants included, with a `Descriptor` for each tensor descriptor.
    """
    kernel = _compiled.get(key)
    if kernel is None:
        kernel = first()
        if supported():
            _compiled[key] = kernel
        return
    from triton import knobs
    from triton.runtime import driver

    values = arguments()
    stream = driver.active.get_current_stream(driver.active.get_current_device())
    kernel.run(
        grid, 1, 1, stream, kernel.function, kernel.packed_metadata,
        kernel.launch_metadata((grid,), stream, *values),
        knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *values,
    )  # fmt: skip
