"""TOML files, with errors that name the file."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any


def read(path: Path) -> dict[str, Any]:
    """The file as data. ValueError names it, with the line of what is no TOML where that is known."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, byte {error.start}: this is not UTF-8 text, which TOML is") from error
    except tomllib.TOMLDecodeError as error:
        what, _, place = str(error).rstrip(")").rpartition(" (at ")
        raise ValueError(f"{path}, {place}: this is not TOML: {what}" if what else f"{path}: {error}") from error


def place(path: Path, name: str) -> str:
    """The file, and the line in it that gives "table.key" a value where one is found, in front of a message."""
    table = ""
    with suppress(OSError, UnicodeDecodeError):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if head := re.match(r"\s*\[([^\[\]]+)\]", line):
                table = _bare(head[1]) + "."
            elif (key := re.match(r"\s*([^=#]+?)\s*=", line)) and f"{name}.".startswith(f"{table}{_bare(key[1])}."):
                return f"{path}, line {number}: "
    return f"{path}: "


def _bare(key: str) -> str:
    """A key without quotes, and without the spaces that may stand around its dots."""
    return ".".join(part.strip().strip("\"'") for part in key.split("."))
