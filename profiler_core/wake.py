"""A GPU with nothing to do lowers its clocks, and takes a while to raise them again."""

from __future__ import annotations

import time

import torch

#: seconds of work after which an idle GPU runs at the clocks that it keeps under load; an H200 idles at 345 MHz of 1980
RAMP = 0.25


def wake(device: torch.device, seconds: float = RAMP) -> None:
    """Keeps the GPU busy until its clocks are up; does nothing on other devices.

    Called before the first call of code that was just compiled: Inductor times its kernels' variants in that call, one
    after the other, and on a GPU that slept while the compiler worked the one that is timed last looks fastest.
    """
    if device.type != "cuda":
        return
    work = torch.zeros(1 << 24, device=device)  # 64 MiB: past the caches, and no library's workspace is made for it
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        for _ in range(50):
            work.add_(1.0)
        torch.cuda.synchronize(device)
