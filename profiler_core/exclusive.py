"""One measurement at a time on a GPU, whatever processes measure there: two that tune at once would time each other."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch

#: seconds to wait for a turn; whoever holds the lock longer than this hangs, or measures something very long
PATIENCE = 120.0
#: seconds to wait for being next; whoever is next for longer waits for something long, or was stopped
_NEXT = 5.0


_own = threading.local()


def waited() -> float:
    """Seconds that this thread has spent waiting for its turns so far."""
    seconds: float = getattr(_own, "seconds", 0.0)
    return seconds


@contextlib.contextmanager
def measuring(device: torch.device, patience: float = PATIENCE) -> Iterator[bool]:
    """Holds `device` against the measurements of other processes and threads; yields whether it does.

    Waits up to `patience` seconds for its turn, and goes on without it after that, or where no lock file can be made: a
    measurement that may be disturbed is better than none. Of those who wait one is next, and comes before whoever gives
    a turn up. May be nested. Nothing is held for a CPU, whose other load no lock keeps away. A lock ends with its
    process, however that ends.
    """
    if device.type != "cuda":
        yield False
        return
    try:
        path = _path(device)
    except OSError:
        yield False
        return
    with turn(path, patience) as held:
        yield held


@contextlib.contextmanager
def turn(path: Path, patience: float = PATIENCE) -> Iterator[bool]:
    """Holds the lock file `path`, as `measuring` does that of a device."""
    from filelock import FileLock, Timeout

    with contextlib.ExitStack() as stack:
        held = False
        began = time.monotonic()
        with contextlib.suppress(OSError, Timeout):
            lock = FileLock(path, is_singleton=True)
            with contextlib.ExitStack() as following:
                if not lock.is_locked:
                    # A lock goes to whoever asks first after it is free, which is likely its last holder. Who is next
                    # asks while it holds the second lock, for which the others wait; but not for ever.
                    with contextlib.suppress(Timeout):
                        second = FileLock(path.with_suffix(".next"))
                        following.enter_context(second.acquire(timeout=min(patience, _NEXT), poll_interval=0.01))
                left = max(0.0, patience - (time.monotonic() - began))
                stack.enter_context(lock.acquire(timeout=left, poll_interval=0.01))
            held = True
        _own.seconds = waited() + time.monotonic() - began
        yield held


def _path(device: torch.device) -> Path:
    user = os.getuid() if hasattr(os, "getuid") else "user"
    folder = Path(tempfile.gettempdir()) / f"fxopt-{user}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / f"measuring-{_identity(device)}.lock"


def _identity(device: torch.device) -> str:
    """The GPU's own name, which is the same in a process that sees it under another number."""
    properties = torch.cuda.get_device_properties(device)
    return str(getattr(properties, "uuid", device.index or 0))
