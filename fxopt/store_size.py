"""The bound on what the plan directory may take: what was used longest ago goes first."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

#: folders under the store's root whose files may go: each is made anew when it is missed
FOLDERS = ("plans", "provenance", "reports", "measured")
#: after a cut the store may grow by this share before the next one
SLACK = 0.1


class _File(NamedTuple):
    used: int
    bytes: int
    path: Path


def shrink(root: Path, max_bytes: int, keep: Path) -> int:
    """Deletes the files used longest ago until the rest take `max_bytes` less a tenth; returns how many it deleted.

    keep: a file that stays. Nothing is done while the store is within its bound. The ceilings of a device, one small
    file each, stay too. What cannot be deleted stays, without an error: the bound is a courtesy to the disk.
    """
    found = sorted(_files(root))
    total = sum(file.bytes for file in found)
    if total <= max_bytes:
        return 0
    deleted = 0
    for file in found:
        if total <= max_bytes * (1 - SLACK):
            break
        if file.path == keep:
            continue
        with suppress(OSError):
            file.path.unlink()
            total -= file.bytes
            deleted += 1
    return deleted


def _files(root: Path) -> Iterator[_File]:
    for name in FOLDERS:
        for folder, _, files in os.walk(root / name):
            for file in files:
                if file.startswith("."):  # locks, and what somebody is writing
                    continue
                path = Path(folder, file)
                with suppress(OSError):  # gone meanwhile
                    status = path.stat()
                    yield _File(max(status.st_atime_ns, status.st_mtime_ns), status.st_size, path)
