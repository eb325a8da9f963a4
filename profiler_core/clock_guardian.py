"""Resets a GPU's locked clocks when the process that locked them is gone.

Run as a script, by :mod:`profiler_core.clock_lock`, before any clock is locked: ``clock_guardian.py UUID LOCK_FILE``.
It takes LOCK_FILE, so that two processes never lock one GPU, and says "ready" (or what is in the way) on its output.
Its input is a pipe from the locking process, which announces what it is about to lock ("s": SM clock, "m": memory
clock) and "d" when it has reset everything itself. When the pipe closes without that, or the parent has gone (a forked
child of it may keep the pipe open), what was announced is reset here. So a crash, ``os._exit`` and SIGKILL leave no
locked clock behind; only killing the guardian at the same moment does.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from typing import Any

POLL_S = 1.0


def main(uuid: str, lock_file: str, parent: int) -> int:
    # Ctrl-C and a terminal that closes reach the whole process group; this process ends with its pipe.
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    import pynvml
    from filelock import FileLock, Timeout

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        held = FileLock(lock_file, timeout=0)
        held.acquire()
    except Timeout:
        print("busy", flush=True)
        return 3
    except (pynvml.NVMLError, OSError) as error:
        print(f"failed: {error}", flush=True)
        return 2
    try:
        print("ready", flush=True)
        return _guard(pynvml, handle, parent)
    finally:
        held.release()


def _guard(pynvml: Any, handle: Any, parent: int) -> int:
    announced: set[str] = set()
    while True:
        readable, _, _ = select.select([0], [], [], POLL_S)
        received = os.read(0, 64).decode() if readable else ""
        announced.update(received)
        if "d" in announced:
            return 0
        if (readable and not received) or os.getppid() != parent:
            return _reset(pynvml, handle, announced)


def _reset(pynvml: Any, handle: Any, announced: set[str]) -> int:
    """0 where everything announced was reset, else 1."""
    failed = 0
    for kind, reset in (("s", "nvmlDeviceResetGpuLockedClocks"), ("m", "nvmlDeviceResetMemoryLockedClocks")):
        if kind in announced:
            try:
                getattr(pynvml, reset)(handle)
            except pynvml.NVMLError:
                failed = 1
    return failed


if __name__ == "__main__":
    # The script's own folder holds modules with the names of others' (profile).
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
