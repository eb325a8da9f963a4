"""The text of the source lines that nodes came from, and of the lines around them, for readers who lack the files."""

from __future__ import annotations

import linecache
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

AROUND = 3
"""Lines kept above and below each one."""
MOST_LINES = 4_000
"""Lines kept of all files together."""
LONGEST = 400
_LARGEST_FILE = 4 << 20

SourceLines = dict[str, dict[int, str]]
"""File -> line number -> text, without its line end."""


def source_lines(places: Iterable[tuple[str, int, str]]) -> SourceLines:
    """The lines of ``places`` (file, line, source) and those around them, of files that are still what ran.

    A profile may come from anybody, and is handed on: of a file that it names nothing is taken unless it is Python
    source (a notebook's cell too) in which every one of these lines reads as the profile says.
    """
    wanted: dict[str, dict[int, str]] = {}
    for file, line, source in places:
        if line > 0 and source.strip():
            wanted.setdefault(file, {})[line] = source
    found: SourceLines = {}
    left = MOST_LINES
    for file, lines in wanted.items():
        text = _text(file)
        if not text or not all(line <= len(text) and _same(text[line - 1], held) for line, held in lines.items()):
            continue
        shown = sorted({n for line in lines for n in range(max(1, line - AROUND), min(len(text), line + AROUND) + 1)})
        if shown := shown[:left]:
            found[file] = {n: text[n - 1].rstrip()[:LONGEST] for n in shown}
            left -= len(shown)
    return found


def restored(data: Any) -> SourceLines | None:
    """What JSON made of source lines, whose numbers are texts there; None where there are none. Raises ValueError."""
    if data is None:
        return None
    if not isinstance(data, Mapping) or not all(isinstance(lines, Mapping) for lines in data.values()):
        raise ValueError(f"sources: expected objects of lines by file, got {data!r:.80}")
    return {str(file): {int(n): str(text) for n, text in lines.items()} for file, lines in data.items()}


def _text(file: str) -> list[str]:
    """The file's lines; none where it is no Python source or cannot be read."""
    cell = file in linecache.cache and linecache.cache[file][1] is None  # type: ignore[misc]  # no file: a notebook's
    if not cell and not file.endswith(".py"):
        return []
    with suppress(OSError, ValueError, SyntaxError):  # a name with a zero byte, a file that is not what it says
        if not cell and os.stat(file).st_size > _LARGEST_FILE:
            return []
        linecache.checkcache(file)
        return linecache.getlines(file)
    return linecache.getlines(file) if cell else []


def _same(line: str, source: str) -> bool:
    return " ".join(line.split()) == " ".join(source.split())
