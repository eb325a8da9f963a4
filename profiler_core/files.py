"""Files that another process may read while they are written, and what JSON can hold."""

from __future__ import annotations

import errno
import math
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any


def write_atomically(path: Path, text: str) -> None:
    """Write `text` so that a reader finds the old file or the whole new one; the folder is made. Raises OSError.

    What is no file (/dev/null, /dev/stdout, a pipe) is written into, and not replaced by one.
    """
    if _is_stream(path):
        path.write_text(text, encoding="utf-8")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name[:200]}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        # 0o666 less the umask, as for any file: a folder may be shared by a group.
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def why_not_written(path: Path) -> str:
    """Why the file cannot be written, found out by writing one; "" where it can. Leaves nothing behind.

    What a file system refuses shows in no permission (/proc takes none of root's files), so that asking tells nothing.
    """
    if os.path.exists(path) and not os.access(path, os.W_OK):
        return os.strerror(errno.EACCES)
    if _is_stream(path):
        return ""
    there = os.path.lexists(path)  # then it is replaced by one that is written beside it
    probe = path.with_name(f".{path.name[:200]}.{os.getpid()}.{secrets.token_hex(4)}.tmp") if there else path
    return _refusal(lambda: os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)), probe.unlink)


def why_no_folder(path: Path) -> str:
    """Why no file can be made in the folder, which need not be there yet; "" where one can. Leaves nothing behind."""
    path = path.absolute()
    if os.path.isdir(path):
        return why_not_written(path / f".{os.getpid()}.{secrets.token_hex(4)}.tmp")
    above = next(folder for folder in path.parents if os.path.exists(folder))
    probe = path if above == path.parent else path.parents[len(path.parts) - len(above.parts) - 2]
    return _refusal(probe.mkdir, probe.rmdir)


def _refusal(make: Callable[[], object], remove: Callable[[], object]) -> str:
    try:
        make()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        return getattr(error, "strerror", None) or str(error)
    with suppress(OSError):
        remove()
    return ""


def _is_stream(path: Path) -> bool:
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)  # Path's own may raise


def plain(value: Any) -> Any:
    """A value as JSON holds it: text without lone surrogates; NaN, NA and infinities as null; what JSON has no word for
    (a path, a date) as text.
    """
    if isinstance(value, str):
        if value.isascii():
            return str(value)
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item) for item in value), key=str)
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if hasattr(value, "tolist"):  # numpy
        return plain(value.tolist())
    return None if str(value) in ("<NA>", "NaT") else plain(str(value))  # of pandas, which is not imported for it
