"""What every terminal form is printed with. Names from elsewhere are cleaned here, and never read as markup.

A name such as ``extern_kernels[red]`` prints as it is, and one with control characters as their escapes: those could
move the cursor, turn the line around, or end it.
"""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING, Any

from profiler_core.quantities import glued

if TYPE_CHECKING:
    from rich.console import Console

_LONGEST = 2000
_GLUE = "\ue000"  # of a private area, so that `clean` leaves none
_UNSEEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def clean(text: str, keep: str = "") -> str:
    """`text` on one line, what cannot be seen (control characters, directions, lone surrogates) as escapes; but not the
    characters of `keep`.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c in keep or unicodedata.category(c) not in _UNSEEN else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def shorten(text: str, width: int) -> str:
    """A name cleaned, and of a long one the middle cut out: kernels share their beginnings, and differ at the end."""
    return _cut(clean(text), width)


def _cut(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    if width <= 3:
        return text[:width]
    head = (width - 3 + 1) // 2
    tail = width - 3 - head
    return f"{text[:head]}...{text[len(text) - tail :] if tail else ''}"


def say(console: Console, text: str, style: str = "", indent: int = 0) -> None:
    """A paragraph, wrapped to the width; of one that somebody's endless name is in, beginning and end."""
    from rich.text import Text

    # rich breaks lines at every space there is, so that a number and its unit are held together by no space at all.
    told = Text(glued(_cut(clean(text, "\n"), _LONGEST), _GLUE))
    for line in told.wrap(console, max(1, console.width - indent)):
        shown = " " * indent + line.plain.rstrip().replace(_GLUE, " ")
        console.print(Text(shown, style=style), no_wrap=True, crop=False, overflow="ignore")


def heading(console: Console, text: str) -> None:
    console.print()
    say(console, text, "bold")


def table(*columns: str, numbers: int) -> Any:
    """A plain table whose first `numbers` columns are right-aligned numbers."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1), show_edge=False)
    for index, column in enumerate(columns):
        made.add_column(Text(column), justify="right" if index < numbers else "left", no_wrap=True)
    return made


def cells(*texts: str) -> list[Any]:
    from rich.text import Text

    return [Text(clean(text)) for text in texts]
