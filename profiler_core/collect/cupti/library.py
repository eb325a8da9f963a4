"""libcupti through ctypes: which copy to load, the parameter structs of the calls used here, and its errors by name.

Layouts follow cupti_range_profiler.h, cupti_profiler_host.h, cupti_profiler_target.h and cupti_target.h of CUDA 13.0;
a test compiles those headers and compares. Every struct begins with its own size, by which newer libraries know which
fields the caller has.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable
from ctypes import POINTER, c_char_p, c_double, c_int, c_size_t, c_uint8, c_uint16, c_uint32, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from profiler_core.collect.conflicts import ProfilerError


class CountersError(ProfilerError):
    """Hardware counters cannot be read; the message says why and what would help."""


class CountersUnavailable(CountersError):
    """Not on this machine: no library, no supported device, a device shared in a way that forbids it."""


class CountersNotPermitted(CountersError):
    """The driver keeps counters from this user."""


class CountersBusy(CountersError):
    """Another tool holds the counters."""


class UnknownMetric(CountersError):
    """The chip has no metric of this name."""


class CuptiError(CountersError):
    """A CUPTI call failed for a reason that has no class of its own; ``code`` is its CUptiResult."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Params(ctypes.Structure):
    """Base of the parameter structs. ``size()`` is CUPTI_PROFILER_STRUCT_SIZE: up to the end of the last field,
    without the padding that sizeof counts.
    """

    @classmethod
    def size(cls) -> int:
        last = getattr(cls, cls._fields_[-1][0])
        return int(last.offset + last.size)


def _params(struct: str, *fields: tuple[str, Any]) -> type[Params]:
    return type(struct, (Params,), {"_fields_": [("structSize", c_size_t), ("pPriv", c_void_p), *fields]})


_NAMES = POINTER(c_char_p)
_OBJECT = ("pRangeProfilerObject", c_void_p)
_HOST = ("pHostObject", c_void_p)
_CONFIG = (("configImageSize", c_size_t), ("pConfigImage", c_void_p))
_DATA = (("pCounterDataImage", c_void_p), ("counterDataImageSize", c_size_t))
_METRICS = (("ppMetricNames", _NAMES), ("numMetrics", c_size_t))

# Function -> its only argument. The class carries the name of the C struct.
CALLS: dict[str, type[Params]] = {
    "cuptiProfilerInitialize": _params("CUpti_Profiler_Initialize_Params"),
    "cuptiProfilerDeInitialize": _params("CUpti_Profiler_DeInitialize_Params"),
    "cuptiDeviceGetChipName": _params(
        "CUpti_Device_GetChipName_Params", ("deviceIndex", c_size_t), ("pChipName", c_char_p)
    ),
    "cuptiProfilerDeviceSupported": _params(
        "CUpti_Profiler_DeviceSupported_Params",
        ("cuDevice", c_int),
        *((level, c_int) for level in ("isSupported", "architecture", "sli", "vGpu", "confidentialCompute", "cmp")),
        ("wsl", c_int),
        ("api", c_int),
    ),
    "cuptiProfilerGetCounterAvailability": _params(
        "CUpti_Profiler_GetCounterAvailability_Params",
        ("ctx", c_void_p),
        ("counterAvailabilityImageSize", c_size_t),
        ("pCounterAvailabilityImage", c_void_p),
    ),
    "cuptiProfilerHostGetSupportedChips": _params(
        "CUpti_Profiler_Host_GetSupportedChips_Params", ("numChips", c_size_t), ("ppChipNames", _NAMES)
    ),
    "cuptiProfilerHostInitialize": _params(
        "CUpti_Profiler_Host_Initialize_Params",
        ("profilerType", c_int),
        ("pChipName", c_char_p),
        ("pCounterAvailabilityImage", c_void_p),
        _HOST,
    ),
    "cuptiProfilerHostDeinitialize": _params("CUpti_Profiler_Host_Deinitialize_Params", _HOST),
    "cuptiProfilerHostGetBaseMetrics": _params(
        "CUpti_Profiler_Host_GetBaseMetrics_Params", _HOST, ("metricType", c_int), *_METRICS
    ),
    "cuptiProfilerHostConfigAddMetrics": _params("CUpti_Profiler_Host_ConfigAddMetrics_Params", _HOST, *_METRICS),
    "cuptiProfilerHostGetConfigImageSize": _params("CUpti_Profiler_Host_GetConfigImageSize_Params", _HOST, _CONFIG[0]),
    "cuptiProfilerHostGetConfigImage": _params("CUpti_Profiler_Host_GetConfigImage_Params", _HOST, *_CONFIG),
    "cuptiProfilerHostGetNumOfPasses": _params(
        "CUpti_Profiler_Host_GetNumOfPasses_Params", *_CONFIG, ("numOfPasses", c_size_t)
    ),
    "cuptiProfilerHostEvaluateToGpuValues": _params(
        "CUpti_Profiler_Host_EvaluateToGpuValues_Params",
        _HOST,
        *_DATA,
        ("rangeIndex", c_size_t),
        *_METRICS,
        ("pMetricValues", POINTER(c_double)),
    ),
    "cuptiRangeProfilerEnable": _params("CUpti_RangeProfiler_Enable_Params", ("ctx", c_void_p), _OBJECT),
    "cuptiRangeProfilerDisable": _params("CUpti_RangeProfiler_Disable_Params", _OBJECT),
    "cuptiRangeProfilerGetCounterDataSize": _params(
        "CUpti_RangeProfiler_GetCounterDataSize_Params",
        _OBJECT,
        ("pMetricNames", _NAMES),
        ("numMetrics", c_size_t),
        ("maxNumOfRanges", c_size_t),
        ("maxNumRangeTreeNodes", c_uint32),
        ("counterDataSize", c_size_t),
    ),
    "cuptiRangeProfilerCounterDataImageInitialize": _params(
        "CUpti_RangeProfiler_CounterDataImage_Initialize_Params",
        _OBJECT,
        ("counterDataSize", c_size_t),
        ("pCounterData", c_void_p),
    ),
    "cuptiRangeProfilerSetConfig": _params(
        "CUpti_RangeProfiler_SetConfig_Params",
        _OBJECT,
        ("configSize", c_size_t),
        ("pConfig", c_void_p),
        ("counterDataImageSize", c_size_t),
        ("pCounterDataImage", c_void_p),
        ("range", c_int),
        ("replayMode", c_int),
        ("maxRangesPerPass", c_size_t),
        ("numNestingLevels", c_uint16),
        ("minNestingLevel", c_uint16),
        ("passIndex", c_size_t),
        ("targetNestingLevel", c_uint16),
    ),
    "cuptiRangeProfilerStart": _params("CUpti_RangeProfiler_Start_Params", _OBJECT),
    "cuptiRangeProfilerStop": _params(
        "CUpti_RangeProfiler_Stop_Params",
        _OBJECT,
        ("passIndex", c_size_t),
        ("targetNestingLevel", c_size_t),
        ("isAllPassSubmitted", c_uint8),
    ),
    "cuptiRangeProfilerDecodeData": _params(
        "CUpti_RangeProfiler_DecodeData_Params", _OBJECT, ("numOfRangeDropped", c_size_t)
    ),
    "cuptiRangeProfilerGetCounterDataInfo": _params(
        "CUpti_RangeProfiler_GetCounterDataInfo_Params", *_DATA, ("numTotalRanges", c_size_t)
    ),
}


class Library:
    """A loaded libcupti. ``call`` fills in the struct of a function, calls it and raises what it reports."""

    def __init__(self, path: str) -> None:
        try:
            self._dll = ctypes.CDLL(path)
        except OSError as error:
            raise CountersUnavailable(f"{path} cannot be loaded as libcupti: {error}") from error
        self.path = path

    def call(self, function: str, **fields: Any) -> Any:
        """Returns the struct as the function left it. Raises :class:`CountersError`."""
        try:
            entry = getattr(self._dll, function)
        except AttributeError:
            raise CountersUnavailable(
                f"{self.path} has no {function}: counters need the CUPTI of CUDA 12.6 or newer, which torch brings "
                "in the nvidia-cuda-cupti package"
            ) from None
        params = CALLS[function](**fields)
        params.structSize = type(params).size()
        code = entry(ctypes.byref(params))
        if code:
            raise _error(function, code, self._describe(code))
        return params

    def _describe(self, code: int) -> str:
        name = c_char_p()
        known = self._dll.cuptiGetResultString(c_int(code), ctypes.byref(name)) == 0
        return (name.value or b"").decode() if known and name.value else f"CUptiResult {code}"


def bytes_pointer(buffer: Any) -> c_void_p:
    """The address of a ctypes buffer, which the caller keeps alive."""
    return ctypes.cast(buffer, c_void_p)


def names_array(names: Iterable[str]) -> Any:
    """A ``const char*[]``."""
    encoded = [name.encode() for name in names]
    return (c_char_p * len(encoded))(*encoded)


# CUptiResult (cupti_result.h) -> what it means for somebody who wants counters, and what to do about it.
_BUSY = (
    "another tool holds the GPU's counters. Stop DCGM's profiling (`dcgmi profile --pause`, then `--resume`), nsys, "
    "ncu, or the torch.profiler that is running"
)
_MEANINGS: dict[int, tuple[type[CountersError], str]] = {
    9: (CountersBusy, _BUSY),  # HARDWARE
    17: (UnknownMetric, "the chip has no metric of that name"),  # INVALID_METRIC_NAME
    26: (CountersBusy, _BUSY),  # HARDWARE_BUSY
    27: (CountersUnavailable, "this device or driver does not support the range profiler"),  # NOT_SUPPORTED
    33: (CountersUnavailable, "counters are not available on this virtual GPU"),  # VIRTUALIZED_DEVICE_NOT_SUPPORTED
    35: (  # INSUFFICIENT_PRIVILEGES
        CountersNotPermitted,
        "the driver keeps counters from this user. An administrator allows them for everybody with `options nvidia "
        "NVreg_RestrictProfilingToAdminUsers=0` in /etc/modprobe.d/ and a reload of the driver; or run as root, or in "
        "a container with CAP_SYS_ADMIN (docker run --cap-add=SYS_ADMIN). "
        "See https://developer.nvidia.com/ERR_NVGPUCTRPERM",
    ),
    36: (CountersBusy, "CUPTI's event or metric API is in use in this process"),  # OLD_PROFILER_API_INITIALIZED
    38: (CountersUnavailable, "this device needs another profiling API"),  # LEGACY_PROFILER_NOT_SUPPORTED
    39: (CountersBusy, _BUSY),  # MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED
    40: (  # VIRTUALIZED_DEVICE_INSUFFICIENT_PRIVILEGES
        CountersNotPermitted,
        "this virtual GPU has profiling off; its administrator enables it (vGPU plugin parameter enable_profiling=1)",
    ),
    41: (CountersUnavailable, "confidential computing is on, which forbids counters"),
    42: (CountersUnavailable, "mining processors (CMP) have no counters"),
    43: (
        CountersUnavailable,
        "the device is a MIG instance, on which the range profiler does not work; use a whole GPU",
    ),
    44: (CountersUnavailable, "SLI is on, with which the range profiler does not work"),
    45: (CountersUnavailable, "this WSL set-up does not give counters; see the CUPTI release notes"),
    46: (CountersUnavailable, "this libcupti does not know the chip; a newer nvidia-cuda-cupti may"),
}


def _error(function: str, code: int, name: str) -> CountersError:
    kind, meaning = _MEANINGS.get(code, (None, ""))
    if kind is None:
        return CuptiError(f"{function} failed with {name} ({code})", code)
    return kind(f"{meaning} ({function}: {name}, {code})")


@cache
def load(path: str | None = None) -> Library:
    """The libcupti at ``path``, or the one that :func:`find` names."""
    return Library(path or find())


def find(maps: Path = Path("/proc/self/maps"), search: Iterable[str] | None = None) -> str:
    """The copy that this process has loaded already, else the one of the CUDA that torch was built for.

    A second copy beside torch's would see none of its contexts, and Triton brings one of its own for Proton, so that
    one never counts. ``search`` replaces sys.path. Raises :class:`CountersUnavailable` with the places looked at.
    """
    loaded = [line.split(maxsplit=5)[5].strip() for line in _lines(maps) if "/libcupti.so" in line]
    for path in loaded:
        if "/triton/" not in path:
            return path
    folders = [
        Path(root, *parts)
        for root in (sys.path if search is None else search)
        for parts in (("nvidia", "cu13", "lib"), ("nvidia", "cuda_cupti", "lib"), ("torch", "lib"))
    ]
    if search is None:
        folders += [
            Path(os.environ[name], "extras", "CUPTI", "lib64")
            for name in ("CUDA_HOME", "CUDA_PATH")
            if name in os.environ
        ]
    major = _cuda_major()
    for folder in folders:
        found = sorted(p for p in folder.glob("libcupti.so*") if not major or p.name.startswith(f"libcupti.so.{major}"))
        if found:
            return str(found[-1])
    looked = ", ".join(dict.fromkeys(str(folder) for folder in folders if folder.parent.is_dir())) or "no such folder"
    raise CountersUnavailable(
        f"libcupti{f'.so.{major}' if major else ''} is not loaded in this process and not found in {looked}; install "
        f"nvidia-cuda-cupti{f' for CUDA {major}' if major else ''} or set CUDA_HOME"
    )


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _cuda_major() -> str:
    """Of the CUDA that torch was built for; "" for a CPU build, which any libcupti serves."""
    torch = sys.modules.get("torch")
    version = getattr(getattr(torch, "version", None), "cuda", None)
    return str(version).partition(".")[0] if version else ""
