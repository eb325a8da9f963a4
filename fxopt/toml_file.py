"""TOML files, with errors that name the file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def read(path: Path) -> dict[str, Any]:
    """The file as data. ValueError names it, and the place of what is no TOML."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
