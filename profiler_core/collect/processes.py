"""Runs another program to its end, with what it started, and keeps the last of what it prints."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_KEPT = 64 * 1024  # bytes


@dataclass(frozen=True)
class Ended:
    """``status`` as the shell tells it (negative: the signal that ended it), ``said`` the end of its output, ``late``
    whether it was ended because its time was up.
    """

    status: int
    said: str
    late: bool


def run(command: Sequence[str], *, environment: Mapping[str, str] | None = None, timeout: float | None = None) -> Ended:
    """Run ``command`` without input. On a timeout (seconds), and on whatever is raised here meanwhile, its whole
    process group is killed. Raises OSError where it cannot be run.
    """
    with tempfile.TemporaryFile() as printed:  # not a pipe: a process left behind would hold it open
        # A session of its own, so that what it started can be ended with it.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        late = False
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        printed.seek(max(printed.seek(0, os.SEEK_END) - _KEPT, 0))
        said = printed.read().decode("utf-8", "replace")
    return Ended(process.returncode, said, late)
