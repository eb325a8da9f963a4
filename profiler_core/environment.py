"""What a measurement ran on: hardware and versions, and nothing about the person or the machine's owner."""

from __future__ import annotations

import datetime
import os
import platform
from importlib import metadata
from typing import Any

_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8")


def environment(device: Any) -> dict[str, Any]:
    """Device, driver, versions and date as JSON-able values; None where a value cannot be had.

    ``device`` is a ``torch.device`` or a string. Holds no environment variable, host name, user name or path.
    """
    import torch

    device = torch.device(device)
    name, flags = cpu()
    found: dict[str, Any] = {
        "device_type": device.type,
        "device_name": name,
        "cpu": name,
        "cpu_flags": flags,
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version("triton", "pytorch-triton", "triton-windows"),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    if device.type == "cuda" and torch.cuda.is_available():
        from profiler_core.clocks import driver_version, sample

        properties = torch.cuda.get_device_properties(device)
        found.update(
            device_name=properties.name,
            capability=[properties.major, properties.minor],
            sm_count=properties.multi_processor_count,
            memory_bytes=properties.total_memory,
            driver=driver_version(),
            clocks=sample(device),
            allow_tf32=_tf32(torch.backends.cuda.matmul),
            cudnn_allow_tf32=_tf32(torch.backends.cudnn),
        )
    return found


def _tf32(settings: Any) -> bool | None:
    """Whether float32 products may run in TF32; None where torch's old and new switches contradict each other."""
    try:
        return bool(settings.allow_tf32)
    except RuntimeError:
        precision = getattr(settings, "fp32_precision", None)
        return None if precision is None else precision == "tf32"


def cpu() -> tuple[str, list[str]]:
    """The CPU's model name, and which of the vector and matrix extensions that matter here it has."""
    name = ""
    flags: list[str] = []
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                field, _, value = line.partition(":")
                if field.strip() == "model name" and not name:
                    name = value.strip()
                elif field.strip() in ("flags", "Features") and not flags:
                    have = set(value.split())
                    flags = [flag for flag in _CPU_FLAGS if flag in have]
    except OSError:
        pass
    return name or platform.processor() or platform.machine(), flags


def _version(*distributions: str) -> str | None:
    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None
