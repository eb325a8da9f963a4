"""How many blocks of a kernel fit on an SM at once, what limits them, and how many waves a grid makes.

The rules are those of the CUDA occupancy calculator (cuda_occupancy.h in the toolkit; in ncu, the section Occupancy):
an SM holds as many blocks as its warps, its block slots, its registers and its shared memory allow, whichever runs out
first. Clusters, named barriers and tensor memory can limit a kernel further and are not looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike

WARP = 32  # threads
_SUBPARTITIONS = 4  # of an SM: each has a quarter of the registers, and a warp takes its own from one of them
_REGISTER_UNIT = 256  # registers are given to a warp in multiples of this
_SHARED_UNIT = 128  # bytes: likewise shared memory to a block
_SHARED_RESERVED = 1024  # bytes of each block that the driver takes, since compute capability 8.0
RESOURCES = ("warps", "blocks", "registers", "shared memory")


class UnknownCapability(ValueError):
    """The limits of this compute capability are not known."""


@dataclass(frozen=True)
class SmLimits:
    """What an SM holds at most. ``shared_memory`` is in bytes, with all of L1 that can be given to it."""

    warps: int
    blocks: int
    shared_memory: int
    registers: int = 65536


# CUDA C++ Programming Guide 13.0, "Technical Specifications per Compute Capability".
_LIMITS: dict[tuple[int, int], SmLimits] = {
    (8, 0): SmLimits(warps=64, blocks=32, shared_memory=164 << 10),
    (8, 6): SmLimits(warps=48, blocks=16, shared_memory=100 << 10),
    (8, 9): SmLimits(warps=48, blocks=24, shared_memory=100 << 10),
    (9, 0): SmLimits(warps=64, blocks=32, shared_memory=228 << 10),
    (10, 0): SmLimits(warps=64, blocks=32, shared_memory=228 << 10),
    (10, 3): SmLimits(warps=64, blocks=32, shared_memory=228 << 10),
    (12, 0): SmLimits(warps=48, blocks=24, shared_memory=100 << 10),
    (12, 1): SmLimits(warps=48, blocks=24, shared_memory=100 << 10),
}


@dataclass(frozen=True)
class Occupancy:
    """float64 and object arrays, a value a kernel; NaN and "" where the kernel's launch is not known.

    ``percent`` is the share of the SM's warps that the kernel can fill, 0 to 100; 0 where not one block fits.
    ``limits`` holds the blocks per SM that each of :data:`RESOURCES` allows, and ``limiter`` the one that allows least
    (the first of several).
    """

    percent: np.ndarray
    blocks_per_sm: np.ndarray
    limits: dict[str, np.ndarray]
    limiter: np.ndarray


def sm_limits(capability: tuple[int, int]) -> SmLimits:
    """Raises :class:`UnknownCapability`."""
    try:
        return _LIMITS[capability]
    except KeyError:
        known = ", ".join(f"{major}.{minor}" for major, minor in _LIMITS)
        raise UnknownCapability(
            f"the occupancy limits of compute capability {capability[0]}.{capability[1]} are not known (known: {known})"
        ) from None


def theoretical_occupancy(
    registers: ArrayLike,
    shared_memory: ArrayLike,
    block: ArrayLike,
    limits: SmLimits,
    configured: ArrayLike | None = None,
) -> Occupancy:
    """Occupancy of launches, all arguments broadcast together.

    Args:
        registers: per thread; below 0 where not known.
        shared_memory: bytes per block, static and dynamic, without the driver's share; below 0 where not known.
        block: threads per block; 0 where not known.
        configured: bytes of each SM that the driver made shared memory for this launch, where known (ncu's
            ``launch__shared_mem_config_size``); it may give less than ``limits`` allow, but not so little that it
            would be what limits a kernel.
    """
    import numpy as np

    registers, shared, block = np.broadcast_arrays(
        *(np.atleast_1d(np.asarray(values, dtype="float64")) for values in (registers, shared_memory, block))
    )
    known = (registers >= 0) & (shared >= 0) & (block > 0)
    warps = np.where(known, np.ceil(block / WARP), 1)
    per_warp = _round_up(np.where(known, registers, 0) * WARP, _REGISTER_UNIT)
    per_block = _round_up(np.where(known, shared, 0) + _SHARED_RESERVED, _SHARED_UNIT)
    quarter = limits.registers // _SUBPARTITIONS
    available = limits.shared_memory if configured is None else np.asarray(configured, dtype="float64")
    with np.errstate(divide="ignore"):
        fitting = {
            "warps": np.floor(limits.warps / warps),
            "blocks": np.full(warps.shape, float(limits.blocks)),
            # a kernel without registers is not limited by them
            "registers": np.floor(np.floor(quarter / per_warp) * _SUBPARTITIONS / warps),
            "shared memory": np.floor(available / per_block),
        }
    stacked = np.stack([fitting[resource] for resource in RESOURCES])
    blocks = stacked.min(axis=0)
    return Occupancy(
        percent=np.where(known, 100 * blocks * warps / limits.warps, np.nan),
        blocks_per_sm=np.where(known, blocks, np.nan),
        limits={resource: np.where(known, values, np.nan) for resource, values in fitting.items()},
        limiter=np.where(known, np.array(RESOURCES, dtype=object)[stacked.argmin(axis=0)], ""),
    )


def waves_per_sm(grid: ArrayLike, blocks_per_sm: ArrayLike, sm_count: int) -> np.ndarray:
    """Blocks launched (``grid``, the product of its three sizes) over those that fit on the device at once; float64.
    NaN where either is not known (0 or NaN). The last wave is full only where this is a whole number.
    """
    import numpy as np

    grid, blocks = np.asarray(grid, dtype="float64"), np.asarray(blocks_per_sm, dtype="float64")
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((grid > 0) & (blocks > 0), grid / (blocks * sm_count), np.nan)


def _round_up(values: np.ndarray, unit: int) -> np.ndarray:
    import numpy as np

    return np.ceil(values / unit) * unit
