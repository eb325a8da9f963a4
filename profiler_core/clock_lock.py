"""Locks the clocks of a GPU for the time of a measurement, on request only, and always undoes it.

It changes a setting of the machine that other users of the GPU see, and needs an administrator's right on most
machines.

Undone: at the end of the ``with`` block, also by an exception, Ctrl-C or ``sys.exit``; and by the guardian process
(:mod:`profiler_core.clock_guardian`), which is started first, when this process ends in any other way (a signal,
``os._exit``, SIGKILL, a crash). Not undone where this process and its guardian are killed together, as when a container
or a control group is: then ``nvidia-smi --reset-gpu-clocks`` or the next lock undoes it.

NVML does not tell whether clocks were locked before: the end of a lock also ends one that an administrator had set.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from profiler_core.clocks import close_nvml, device_handle, open_nvml

START_S = 30.0
"""Seconds that the guardian may take to start: it imports pynvml only, but a loaded file system can be slow."""


class ClockLockError(RuntimeError):
    """The clocks were not locked; the message says why and what to do."""


class ClockPermissionError(ClockLockError):
    """The driver lets only an administrator lock clocks; the message has the commands."""


class ClocksUnsupported(ClockLockError):
    """This device's clocks cannot be locked (a MIG instance, a vGPU, an older GPU), or NVML is missing."""


class ClocksBusy(ClockLockError):
    """Another process, or an enclosing ``with`` block of this one, has locked the clocks of this GPU."""


@dataclass(frozen=True)
class Locked:
    """What is locked, in MHz; None: left to the driver."""

    uuid: str
    sm_mhz: int | None
    memory_mhz: int | None


@contextmanager
def lock(
    device: Any, sm_mhz: int | Literal["base", "max"] | None = "base", memory_mhz: int | None = None
) -> Iterator[Locked]:
    """Hold the SM clock of a CUDA device, and with ``memory_mhz`` its memory clock, at one frequency.

    "base" is the frequency that the driver gives applications by default, which a GPU can hold under load; "max" the
    highest, at which it may throttle; a number is taken to the nearest frequency that the device supports; None leaves
    the SM clock alone. Yields what was locked.

    Raises :class:`ClockPermissionError`, :class:`ClocksUnsupported`, :class:`ClocksBusy` or another
    :class:`ClockLockError`; nothing is locked then.
    """
    library = open_nvml()
    if library is None:
        raise ClocksUnsupported("the clocks cannot be locked: NVML cannot be loaded (no NVIDIA driver, or no pynvml)")
    try:
        try:
            handle = device_handle(library, device)
            _refuse_mig(library, handle, device)
            uuid = _text(library.nvmlDeviceGetUUID(handle))
            wanted = _frequencies(library, handle, sm_mhz, memory_mhz)
        except library.NVMLError as error:
            raise ClocksUnsupported(f"the clocks of {device} cannot be locked: NVML says {error}") from error
        locked = Locked(uuid, *wanted)
        guardian = _start_guardian(uuid)
        try:
            _set(library, handle, locked, guardian)
            yield locked
        finally:
            _undo(library, handle, locked, guardian)
    finally:
        close_nvml(library)


def _set(library: Any, handle: Any, locked: Locked, guardian: _Guardian) -> None:
    try:
        if locked.sm_mhz is not None:
            guardian.announce("s")
            library.nvmlDeviceSetGpuLockedClocks(handle, locked.sm_mhz, locked.sm_mhz)
            guardian.in_force += "s"
        if locked.memory_mhz is not None:
            guardian.announce("m")
            library.nvmlDeviceSetMemoryLockedClocks(handle, locked.memory_mhz, locked.memory_mhz)
            guardian.in_force += "m"
    except library.NVMLError_NoPermission as error:
        raise ClockPermissionError(_permission(locked)) from error
    except library.NVMLError_NotSupported as error:
        raise ClocksUnsupported(
            f"GPU {locked.uuid} does not let its clocks be locked: a vGPU, a GPU before Volta, or (memory clocks) "
            "one that has no setting for them"
        ) from error
    except library.NVMLError as error:
        raise ClockLockError(f"locking the clocks of GPU {locked.uuid} failed: {error}") from error


def _undo(library: Any, handle: Any, locked: Locked, guardian: _Guardian) -> None:
    if os.getpid() != guardian.owner:  # a forked child leaves the block: the lock is its parent's
        return
    undone = True
    for kind, reset in (
        ("s", library.nvmlDeviceResetGpuLockedClocks),
        ("m", library.nvmlDeviceResetMemoryLockedClocks),
    ):
        if kind in guardian.announced:
            try:
                reset(handle)
            except library.NVMLError:
                # Where setting it was refused too, there is nothing to undo.
                undone = undone and kind not in guardian.in_force
    if guardian.end(undone=undone) != 0:
        warnings.warn(
            f"the clocks of GPU {locked.uuid} may still be locked; undo it with: {_reset_command(locked.uuid)}",
            RuntimeWarning,
            stacklevel=4,
        )


class _Guardian:
    """The guardian process, from this side of its pipe."""

    def __init__(self, process: subprocess.Popen[bytes]):
        self.process = process
        self.owner = os.getpid()
        self.announced = self.in_force = ""

    def announce(self, kind: str) -> None:
        assert self.process.stdin is not None
        try:
            os.write(self.process.stdin.fileno(), kind.encode())
        except BrokenPipeError as error:
            raise ClockLockError("the process that would reset the clocks has died: they are not locked") from error
        self.announced += kind

    def end(self, *, undone: bool) -> int:
        """Let it go, or, where ``undone`` is False, let it try; its exit status."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            if undone:
                os.write(self.process.stdin.fileno(), b"d")
        self.process.stdin.close()
        if self.process.stdout is not None:
            self.process.stdout.close()
        status = self.process.wait()
        return 0 if undone else status


def _start_guardian(uuid: str) -> _Guardian:
    lock_file = Path(tempfile.gettempdir()) / f"profiler_core-clocks-{uuid}.lock"
    script = Path(__file__).with_name("clock_guardian.py")
    try:
        process = subprocess.Popen(
            [sys.executable, str(script), uuid, str(lock_file), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise ClockLockError(f"the clocks are not locked: the process that would reset them: {error}") from error
    assert process.stdout is not None and process.stdin is not None
    readable, _, _ = select.select([process.stdout], [], [], START_S)
    answer = process.stdout.readline().decode(errors="replace").strip() if readable else "no answer"
    if answer == "ready":
        return _Guardian(process)
    process.kill()
    process.stdin.close()
    process.stdout.close()
    process.wait()
    if answer == "busy":
        raise ClocksBusy(
            f"the clocks of GPU {uuid} are locked already, by another process or an enclosing lock of this one "
            f"(it holds {lock_file})"
        )
    raise ClockLockError(
        f"the clocks are not locked, because the process that would reset them did not start: {answer or 'it ended'}"
    )


def _refuse_mig(library: Any, handle: Any, device: Any) -> None:
    mig = False
    with suppress(library.NVMLError):  # a driver without MIG
        mig = bool(library.nvmlDeviceIsMigDeviceHandle(handle))
    with suppress(library.NVMLError):
        mig = mig or library.nvmlDeviceGetMigMode(handle)[0] == library.NVML_DEVICE_MIG_ENABLE
    if mig:
        raise ClocksUnsupported(
            f"{device} is a MIG instance: its clock is the whole GPU's, which other instances use, and is not locked"
        )


def _frequencies(
    library: Any, handle: Any, sm_mhz: int | str | None, memory_mhz: int | None
) -> tuple[int | None, int | None]:
    """Supported frequencies for what was asked."""
    if sm_mhz is None and memory_mhz is None:
        raise ValueError("nothing to lock: give sm_mhz or memory_mhz")
    memory_clocks = list(library.nvmlDeviceGetSupportedMemoryClocks(handle))
    memory = None if memory_mhz is None else _nearest(memory_clocks, memory_mhz)
    if sm_mhz is None:
        return None, memory
    clocks = list(library.nvmlDeviceGetSupportedGraphicsClocks(handle, memory or max(memory_clocks, default=0)))
    if sm_mhz == "max":
        return max(clocks) if clocks else library.nvmlDeviceGetMaxClockInfo(handle, library.NVML_CLOCK_GRAPHICS), memory
    if sm_mhz == "base":
        sm_mhz = library.nvmlDeviceGetDefaultApplicationsClock(handle, library.NVML_CLOCK_GRAPHICS)
    if not isinstance(sm_mhz, int):
        raise ValueError(f"sm_mhz={sm_mhz!r}: expected MHz, 'base', 'max' or None")
    return _nearest(clocks, sm_mhz), memory


def _nearest(clocks: list[int], wanted: int) -> int:
    return min(clocks, key=lambda clock: (abs(clock - wanted), clock), default=wanted)


def _permission(locked: Locked) -> str:
    set_sm, set_memory = locked.sm_mhz, locked.memory_mhz
    options = [f"--lock-gpu-clocks={set_sm},{set_sm}"] if set_sm is not None else []
    options += [f"--lock-memory-clocks={set_memory},{set_memory}"] if set_memory is not None else []
    commands = "\n".join(f"    sudo nvidia-smi -i {locked.uuid} {option}" for option in options)
    return (
        f"no right to lock the clocks of GPU {locked.uuid}. An administrator can, with\n{commands}\n"
        f"and undo it with\n    {_reset_command(locked.uuid, memory=set_memory is not None)}"
    )


def _reset_command(uuid: str, *, memory: bool = False) -> str:
    command = f"sudo nvidia-smi -i {uuid} --reset-gpu-clocks"
    return f"{command} && sudo nvidia-smi -i {uuid} --reset-memory-clocks" if memory else command


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
