"""CUDA libraries' memory that PyTorch keeps, through its private API. Tested with torch 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def cublas_workspaces_of_a_capture() -> Iterator[None]:
    """Around the capture of a CUDA graph: cuBLAS's workspaces come from the graph's own pool.

    PyTorch keeps a workspace for each stream. One that was allocated before the capture is recorded in the graph, but
    does not belong to it: whoever clears the workspaces (``mode="reduce-overhead"`` does, each time it records) frees
    it under the graph, whose replays then read and write memory that is somebody else's, or nobody's. Cleared before
    the capture, it is allocated anew from the graph's pool, which lives as long as the graph; cleared after it, no
    other code is given memory of that pool.
    """
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is None:  # a build without CUDA
        yield
        return
    clear()
    try:
        yield
    finally:
        clear()
