"""Clocks and throttle reasons of a GPU, read through NVML. Reads only: clocks are set in clock_lock.py alone.

Three policies: "monitor" samples the clocks while the measured code runs, "lock" also holds them at one frequency
(:mod:`profiler_core.clock_lock`), "off" leaves NVML alone.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from statistics import median
from types import TracebackType
from typing import Any, TypeVar

INTERVAL = 0.05
"""Seconds between the samples of a monitor. NVML's own readings of clocks change no faster than every few ms."""

DRIFT = 0.02
"""A run is said to have drifted where the SM or memory clock moved by more than this share of its maximum. The time of
a kernel that is bound by its SMs goes with 1 / clock. SM clocks move in steps of 15 MHz (0.8 % of an H200's 1980 MHz,
as NVML lists them), so that one or two steps are tolerated."""

Result = TypeVar("Result")

# NVML's nvmlClocksEventReason* bits (nvml.h). Idle and a clock that the application asked for are no
# throttling.
THROTTLE_BITS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
_IDLE = 0x1
_HARMLESS = {"gpu_idle", "applications_clocks_setting"}


def throttle_reasons(mask: int) -> tuple[str, ...]:
    """Names of the bits of an NVML clocks-event-reasons mask; a bit without a name is given in hex."""
    names = [name for bit, name in THROTTLE_BITS.items() if mask & bit]
    rest = mask & ~sum(THROTTLE_BITS)
    return (*names, hex(rest)) if rest else tuple(names)


def driver_version() -> str | None:
    """The NVIDIA driver's version, None where NVML cannot be used."""
    library = open_nvml()
    if library is None:
        return None
    try:
        version = library.nvmlSystemGetDriverVersion()
    except library.NVMLError:
        return None
    finally:
        close_nvml(library)
    return version.decode() if isinstance(version, bytes) else str(version)


def clock_settings(device: Any) -> dict[str, int | None]:
    """What a CUDA device's clocks are set to, as far as NVML tells anybody: the SM and memory clock that applications
    ask for (MHz) and the enforced power limit (mW). None for what it does not tell; empty where NVML cannot be used.
    """
    library = open_nvml()
    if library is None:
        return {}
    try:
        handle = device_handle(library, device)
        return {
            "sm_mhz": _asked(lambda: library.nvmlDeviceGetApplicationsClock(handle, library.NVML_CLOCK_SM)),
            "memory_mhz": _asked(lambda: library.nvmlDeviceGetApplicationsClock(handle, library.NVML_CLOCK_MEM)),
            "power_limit_mw": _asked(lambda: library.nvmlDeviceGetEnforcedPowerLimit(handle)),
        }
    except Exception:  # whatever NVML has against the device: other measurements say it better
        return {}
    finally:
        close_nvml(library)


def _asked(read: Callable[[], int]) -> int | None:
    try:
        return int(read())
    except Exception:  # not every device has every setting
        return None


def sample(device: Any) -> dict[str, Any]:
    """SM and memory clock (MHz) and throttle reasons of a CUDA device now; empty where NVML cannot be
    used.
    """
    with ClockMonitor(device) as monitor:
        monitor.sample()
    summary = monitor.summary()
    if not summary.get("samples"):
        return {}
    return {
        "sm_mhz": summary["sm_mhz"],
        "memory_mhz": summary["memory_mhz"],
        "throttled": summary["throttled"],
    }


@contextmanager
def under(policy: str, device: Any, *, interval: float | None = INTERVAL) -> Iterator[ClockMonitor]:
    """Run the body under a clock policy: "monitor", "lock" (see :func:`profiler_core.clock_lock.lock` for what it
    raises) or "off". Yields the monitor; under "off" it has no samples and says so.
    """
    if policy not in ("monitor", "lock", "off"):
        raise ValueError(f"clocks={policy!r}: expected 'monitor', 'lock' or 'off'")
    held: Any = nullcontext()
    if policy == "lock":
        from profiler_core.clock_lock import lock

        held = lock(device)
    monitor = ClockMonitor(device, interval)
    if policy == "off":
        monitor.unavailable = "clocks are not monitored (clocks='off')"
        yield monitor
        return
    with held, monitor:
        yield monitor


def steady(
    run: Callable[[], Result], device: Any, repeats: int = 1, *, interval: float | None = INTERVAL
) -> tuple[Result, dict[str, Any]]:
    """The result of ``run()`` with the summary of the clocks meanwhile.

    A run whose clocks drifted is repeated, up to ``repeats`` times; what is returned is the last run, with
    ``summary["drifted"]`` True where that one drifted too, and the number of runs in ``summary["runs"]``.
    """
    for attempt in range(1, repeats + 2):
        with ClockMonitor(device, interval) as monitor:
            result = run()
        summary = {**monitor.summary(), "runs": attempt}
        if not summary.get("drifted"):
            break
    return result, summary


@dataclass(frozen=True)
class _Sample:
    """Readings at one moment; None where the device does not report one."""

    sm: int | None
    memory: int | None
    mask: int | None
    power: int | None
    temperature: int | None


class ClockMonitor:
    """Samples a GPU's clocks, at moments that the caller picks and, with ``interval`` (seconds), from a thread.

    >>> with ClockMonitor(torch.device("cuda")) as monitor:   # doctest: +SKIP
    ...     monitor.sample(); run(); monitor.sample()
    >>> monitor.summary()["sm_mhz_min"]                       # doctest: +SKIP

    On a CPU, and where NVML cannot be used, there are no samples and :meth:`summary` says why.
    """

    def __init__(self, device: Any, interval: float | None = None):
        self.device = device
        self.interval = interval
        self.unavailable = ""
        self._library: Any = None
        self._handle: Any = None
        self._samples: list[_Sample] = []
        self._others: int | None = None
        self._busy: int | None = None
        self._since = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> ClockMonitor:
        kind, _ = _parse(self.device)
        if kind != "cuda":
            self.unavailable = f"no clocks are read on a {kind} device"
            return self
        self._library = open_nvml()
        if self._library is None:
            self.unavailable = "NVML cannot be loaded"
            return self
        try:
            self._handle = device_handle(self._library, self.device)
        except self._library.NVMLError as error:
            self.unavailable = f"NVML does not know {self.device}: {error}"
            return self
        self._count_others()
        self._since = time.time_ns() // 1000
        if self.interval is not None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._watch, name="clock monitor", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None
        if self._handle is not None:
            self._count_others()
            self._count_busy()
        if self._library is not None:
            close_nvml(self._library)
        self._library = self._handle = None

    def _watch(self) -> None:
        assert self.interval is not None
        due = time.monotonic()
        while True:
            self.sample()
            due += self.interval
            if self._stop.wait(max(0.0, due - time.monotonic())):
                return

    def sample(self) -> None:
        """Read the clocks once (some tens of microseconds). What the device does not report is left out."""
        if self._handle is None:
            return
        library, handle = self._library, self._handle

        def read(function: Callable[..., Any], *arguments: Any, optional: bool = False) -> int | None:
            try:
                return int(function(handle, *arguments))
            except library.NVMLError as error:
                if not optional:
                    self.unavailable = f"NVML refused a reading: {error}"
                return None

        taken = _Sample(
            sm=read(library.nvmlDeviceGetClockInfo, library.NVML_CLOCK_SM),
            memory=read(library.nvmlDeviceGetClockInfo, library.NVML_CLOCK_MEM),
            mask=read(lambda _: _reasons(library, handle)),
            power=read(library.nvmlDeviceGetPowerUsage, optional=True),
            temperature=read(library.nvmlDeviceGetTemperature, library.NVML_TEMPERATURE_GPU, optional=True),
        )
        self._samples.append(taken)

    def summary(self) -> dict[str, Any]:
        """Medians and extremes over the samples: clocks in MHz, ``spread`` = (max - min) / max of the SM
        clock.

        ``throttled`` holds the reasons seen, without idling and clocks that the application asked for.
        ``sm_mhz_first`` and ``sm_mhz_last`` are of the samples during which the GPU was not idle (an idle GPU lowers
        its clocks, which says nothing about the run), ``drift`` is the larger of the spreads of SM and memory clock
        over those, and ``drifted`` whether it exceeds :data:`DRIFT`. ``power_w_max`` and ``temperature_c_max`` are
        there where the device reports them. ``other_processes`` is the largest number of other processes that had a
        context on the GPU when the monitor started and ended; it lacks those that the driver hides from a container.
        ``busy_processes`` is the number of those whose kernels ran meanwhile, as far as NVML sampled any (some times a
        second).
        Without samples: ``{"samples": 0}`` and ``unavailable``, the reason.
        """
        samples = list(self._samples)
        sm = [taken.sm for taken in samples if taken.sm is not None]
        memory = [taken.memory for taken in samples if taken.memory is not None]
        found: dict[str, Any] = {"samples": len(sm)}
        if self.unavailable:
            found["unavailable"] = self.unavailable
        if self._others is not None:
            found["other_processes"] = self._others
        if self._busy is not None:
            found["busy_processes"] = self._busy
        if not sm:
            return found
        found.update(sm_mhz=median(sm), sm_mhz_min=min(sm), sm_mhz_max=max(sm), spread=_spread(sm))
        found["memory_mhz"] = median(memory) if memory else None
        seen = {reason for taken in samples for reason in throttle_reasons(taken.mask or 0)}
        found["throttled"] = sorted(seen - _HARMLESS)
        busy = [taken for taken in samples if not (taken.mask or 0) & _IDLE]
        busy_sm = [taken.sm for taken in busy if taken.sm is not None]
        if busy_sm:
            found.update(sm_mhz_first=busy_sm[0], sm_mhz_last=busy_sm[-1])
        found["drift"] = max(_spread(busy_sm), _spread([t.memory for t in busy if t.memory is not None]))
        found["drifted"] = found["drift"] > DRIFT
        power = [taken.power for taken in samples if taken.power is not None]
        heat = [taken.temperature for taken in samples if taken.temperature is not None]
        if power:
            found["power_w_max"] = max(power) / 1000  # NVML gives milliwatts
        if heat:
            found["temperature_c_max"] = max(heat)
        return found

    def _count_busy(self) -> None:
        """Of the processes whose kernels NVML sampled on the GPU since the start, how many are others."""
        try:
            samples = self._library.nvmlDeviceGetProcessUtilization(self._handle, self._since)
        except self._library.NVMLError_NotFound:  # no sample, or none with work in it
            samples = []
        except self._library.NVMLError:
            return
        # Older drivers give samples from before as well.
        busy = {int(s.pid) for s in samples if s.smUtil > 0 and s.timeStamp >= self._since}
        others = len(busy - {os.getpid()})
        if others and os.getpid() not in busy and _has_context():
            # In a container NVML may give the host's process ids: one of them is this process.
            others -= 1
        self._busy = others

    def _count_others(self) -> None:
        try:
            running = {int(p.pid) for p in self._library.nvmlDeviceGetComputeRunningProcesses(self._handle)}
        except self._library.NVMLError:
            return
        others = len(running - {os.getpid()})
        if others and os.getpid() not in running and _has_context():
            # In a container NVML may give the host's process ids: one of them is this process.
            others -= 1
        self._others = max(others, self._others or 0)


def _spread(clocks: list[int]) -> float:
    high = max(clocks, default=0)
    return (high - min(clocks)) / high if high else 0.0


def _has_context() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def _parse(device: Any) -> tuple[str, int | None]:
    """Kind and index of a torch.device or its spelling ("cuda:1")."""
    if not isinstance(device, str):
        return device.type, device.index
    kind, _, index = device.partition(":")
    return kind, int(index) if index else None


def open_nvml() -> Any:
    """pynvml, initialised; None where the package, the library or the driver is missing. Pair with
    :func:`close_nvml`.
    """
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def close_nvml(library: Any) -> None:
    with suppress(library.NVMLError):
        library.nvmlShutdown()


def _reasons(library: Any, handle: Any) -> int:
    # Renamed in driver 535: an older pynvml, or an older driver under a newer pynvml, knows only the old name.
    read = getattr(library, "nvmlDeviceGetCurrentClocksEventReasons", None)
    if read is not None:
        with suppress(library.NVMLError_FunctionNotFound):
            return int(read(handle))
    return int(library.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


def device_handle(library: Any, device: Any) -> Any:
    """By UUID where torch tells it: NVML counts all GPUs of the machine, torch only those made visible to
    the process.
    """
    import torch

    _, index = _parse(device)
    if torch.cuda.is_available():
        index = torch.cuda.current_device() if index is None else index
        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
        if uuid is not None:
            text = str(uuid)
            try:
                return library.nvmlDeviceGetHandleByUUID(text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}")
            except library.NVMLError:
                pass
    return library.nvmlDeviceGetHandleByIndex(index or 0)
