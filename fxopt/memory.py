"""What a candidate costs in memory, and how much it may."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxopt.build import Build


def extra_bytes(build: Build, inputs: Sequence[Any]) -> int:
    """Bytes of the constants that the code holds beyond the caller's own tensors, which it may hold as well, and of
    what is around it (`held_bytes`: a CUDA graph's fixed inputs and outputs).

    What torch counts as allocated before and after does not tell: to capture a graph ends a library's workspace.
    """
    own = {_address(value) for value in inputs if isinstance(value, torch.Tensor) and not value.is_mkldnn}
    shared = {
        _address(value): value.untyped_storage().nbytes()
        for value in build.compiled.constants.values()
        if not value.is_mkldnn and _address(value) in own
    }
    around: int = getattr(build.fn, "held_bytes", 0)
    return build.memory_bytes - sum(shared.values()) + around


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def allocated(device: torch.device) -> int:
    """Bytes of live tensors on a CUDA device, garbage collected; 0 elsewhere, where nobody counts them."""
    if device.type != "cuda":
        return 0
    gc.collect()  # compiled code is full of cycles
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


def peak_bytes(call: Callable[[], Any], device: torch.device) -> int | None:
    """Bytes allocated during one call of `call` beyond those that were before it; None where it is not CUDA.

    The call before that, which may set things up for good (a library's workspace, a CUDA graph), does not count.
    """
    if device.type != "cuda":
        return None
    call()
    before = allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return max(0, torch.cuda.max_memory_allocated(device) - before)


def limit_bytes(limit: int | str | None, device: torch.device) -> int | None:
    """The option `memory_limit` in bytes: a share is one of the device's memory, on a CPU of the machine's."""
    if not isinstance(limit, str):
        return limit
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    else:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(total * float(limit.rstrip("%")) / 100)
