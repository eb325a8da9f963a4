"""Clocks and throttle reasons of a GPU, read through NVML. Reads only: no clock is ever set here."""

from __future__ import annotations

from contextlib import suppress
from statistics import median
from types import TracebackType
from typing import Any

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
_HARMLESS = {"gpu_idle", "applications_clocks_setting"}


def throttle_reasons(mask: int) -> tuple[str, ...]:
    """Names of the bits of an NVML clocks-event-reasons mask; a bit without a name is given in hex."""
    names = [name for bit, name in THROTTLE_BITS.items() if mask & bit]
    rest = mask & ~sum(THROTTLE_BITS)
    return (*names, hex(rest)) if rest else tuple(names)


def driver_version() -> str | None:
    """The NVIDIA driver's version, None where NVML cannot be used."""
    library = _nvml()
    if library is None:
        return None
    try:
        version = library.nvmlSystemGetDriverVersion()
    except library.NVMLError:
        return None
    finally:
        _shutdown(library)
    return version.decode() if isinstance(version, bytes) else str(version)


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


class ClockMonitor:
    """Samples a GPU's clocks at moments that the caller picks.

    >>> with ClockMonitor(torch.device("cuda")) as monitor:   # doctest: +SKIP
    ...     monitor.sample(); run(); monitor.sample()
    >>> monitor.summary()["sm_mhz_min"]                       # doctest: +SKIP

    On a CPU, and where NVML cannot be used, there are no samples and :meth:`summary` says why.
    """

    def __init__(self, device: Any):
        self.device = device
        self.unavailable = ""
        self._library: Any = None
        self._handle: Any = None
        self._sm: list[int] = []
        self._memory: list[int] = []
        self._masks: list[int] = []

    def __enter__(self) -> ClockMonitor:
        kind = getattr(self.device, "type", str(self.device).partition(":")[0])
        if kind != "cuda":
            self.unavailable = f"no clocks are read on a {kind} device"
            return self
        self._library = _nvml()
        if self._library is None:
            self.unavailable = "NVML cannot be loaded"
            return self
        try:
            self._handle = _device_handle(self._library, self.device)
        except self._library.NVMLError as error:
            self.unavailable = f"NVML does not know {self.device}: {error}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._library is not None:
            _shutdown(self._library)
        self._library = self._handle = None

    def sample(self) -> None:
        """Read the clocks once (some tens of microseconds). What the device does not report is left out."""
        if self._handle is None:
            return
        library, handle = self._library, self._handle
        reads = (
            (self._sm, lambda: library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM)),
            (self._memory, lambda: library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_MEM)),
            (self._masks, lambda: _reasons(library, handle)),
        )
        for values, read in reads:
            try:
                values.append(int(read()))
            except library.NVMLError as error:
                self.unavailable = f"NVML refused a reading: {error}"

    def summary(self) -> dict[str, Any]:
        """Medians and extremes over the samples: clocks in MHz, ``spread`` = (max - min) / max of the SM
        clock.

        ``throttled`` holds the reasons seen, without idling and clocks that the application asked for.
        Without samples: ``{"samples": 0}`` and ``unavailable``, the reason.
        """
        found: dict[str, Any] = {"samples": len(self._sm)}
        if self.unavailable:
            found["unavailable"] = self.unavailable
        if self._sm:
            low, high = min(self._sm), max(self._sm)
            found.update(sm_mhz=median(self._sm), sm_mhz_min=low, sm_mhz_max=high)
            found["spread"] = (high - low) / high if high else 0.0
            found["memory_mhz"] = median(self._memory) if self._memory else None
            seen = {reason for mask in self._masks for reason in throttle_reasons(mask)}
            found["throttled"] = sorted(seen - _HARMLESS)
        return found


def _nvml() -> Any:
    """pynvml, initialised; None where the package, the library or the driver is missing. Pair with
    :func:`_shutdown`.
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


def _shutdown(library: Any) -> None:
    with suppress(library.NVMLError):
        library.nvmlShutdown()


def _reasons(library: Any, handle: Any) -> int:
    # Renamed in driver 535: an older pynvml, or an older driver under a newer pynvml, knows only the old name.
    read = getattr(library, "nvmlDeviceGetCurrentClocksEventReasons", None)
    if read is not None:
        with suppress(library.NVMLError_FunctionNotFound):
            return int(read(handle))
    return int(library.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


def _device_handle(library: Any, device: Any) -> Any:
    """By UUID where torch tells it: NVML counts all GPUs of the machine, torch only those made visible to
    the process.
    """
    import torch

    index = getattr(device, "index", None)
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
