"""Which machine this is, so that a plan that came from another one is verified before it is trusted.

The key of a plan tells models of devices apart, not two devices of one model. Identifiers are kept as digests: a plan
may be passed on, and says nothing of whose machine made it.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch

from fxopt.plan import Machine

#: what systemd gives an installation, and what the kernel gives each boot (containers share their host's)
_SOURCES = ("/etc/machine-id", "/proc/sys/kernel/random/boot_id")


def machine(device: torch.device) -> Machine:
    """This machine: its host and, for a CUDA device, the GPUs that this process may use."""
    gpus = []
    if device.type == "cuda":
        for index in range(torch.cuda.device_count()):
            uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
            if uuid is not None:
                gpus.append(_digest(f"gpu {uuid}"))
    return Machine(host=_host(), gpus=sorted(gpus))


def known(mine: Machine, others: Iterable[Machine]) -> bool:
    """Whether `mine` is one of `others`: the same host and, where both name GPUs, at least one in common.

    Images of containers may carry one machine id to many hosts; no two GPUs have one UUID.
    """
    return any(
        other.host == mine.host and (not mine.gpus or not other.gpus or not set(mine.gpus).isdisjoint(other.gpus))
        for other in others
    )


@cache
def _host() -> str:
    for source in _SOURCES:
        try:
            text = Path(source).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            continue
        if text:
            return _digest(f"host {text}")
    return _digest(f"name {platform.node()}")


def _digest(text: str) -> str:
    return hashlib.sha256(f"fxopt {text}".encode()).hexdigest()[:16]
