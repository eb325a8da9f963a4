"""torch.distributed: the key-value store of the default process group, and what the group says of itself.

The store is used rather than collectives: a collective of one rank waits for all others, in one order for all, and may
not be given up. Tested with torch 2.11 and 2.13.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

#: what a store raises whose server is gone; nothing where torch was built without distributed
STORE_FAILED: tuple[type[BaseException], ...] = (dist.DistError,) if dist.is_available() else ()


def default_group() -> Any:
    """The default process group, None where there is none, or one of a single rank or of pretended ranks."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    if dist.get_world_size() < 2 or dist.get_backend() == "fake":
        return None
    return dist.group.WORLD


def rank_and_size() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def store(prefix: str) -> Any:
    """The default group's store under a prefix; None where its backend has none (MPI)."""
    from torch.distributed import distributed_c10d

    base = distributed_c10d._get_default_store()
    return None if base is None else dist.PrefixStore(prefix, base)
