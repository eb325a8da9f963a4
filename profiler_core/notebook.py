"""Light HTML for notebooks: tables and sentences without scripts or colours, which look like what is around them."""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from profiler_core.quantities import duration

if TYPE_CHECKING:
    from profiler_core.profiles import Profile

ROWS = 10
_LONGEST = 80


def shown(text: object, longest: int = _LONGEST) -> str:
    """A text as HTML: shortened in the middle, what cannot be seen (controls, directions) as escapes."""
    plain = "".join(
        c.encode("unicode_escape").decode("ascii") if unicodedata.category(c) in _UNSEEN else c for c in str(text)
    )
    if len(plain) > longest:
        plain = f"{plain[: longest // 2]}...{plain[-(longest - longest // 2 - 3) :]}"
    return html.escape(plain)


_UNSEEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def time(ns: float) -> str:
    """A time, as a cell."""
    return duration(ns)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: int) -> str:
    """A table, the first `numbers` columns on the right. Cells are HTML already."""

    def line(tag: str, cells: Sequence[str]) -> str:
        sides = ("right" if index < numbers else "left" for index in range(len(cells)))
        held = (f'<{tag} style="text-align:{side}">{c}</{tag}>' for side, c in zip(sides, cells, strict=True))
        return f"<tr>{''.join(held)}</tr>"

    return f"<table><thead>{line('th', head)}</thead><tbody>{''.join(line('td', row) for row in rows)}</tbody></table>"


def profile_html(profile: Profile) -> str:
    """What `Profile.__repr__` says, and the nodes that take most time."""
    lines = [f"<p>{shown(line, 400)}</p>" for line in repr(profile).split("\n") if not line.startswith("     ")]
    nodes = profile.nodes[profile.nodes["time_ns"] > 0].sort_values("time_ns", ascending=False, kind="stable")
    rows = []
    for row in nodes.head(ROWS).to_dict("records"):
        place = f"{str(row['file']).rpartition('/')[2]}:{row['line']}" if row["file"] else ""
        about = "~" if row["estimate"] else ""
        cells = (row["node"], row["target"], row["module_path"] or "", place)
        rows.append([about + time(row["time_ns"]), f"{row['share']:.1%}", *map(shown, cells)])
    if rows:
        lines.append(table(("time", "share", "node", "target", "module", "at"), rows, 2))
        left = len(nodes) - len(rows)
        more = f"{left} more nodes in <code>.nodes</code>. " if left > 0 else ""
        lines.append(f"<p>{more}Kernels are in <code>.kernels</code>; <code>.by(column)</code> sums them up.</p>")
    return f"<div>{''.join(lines)}</div>"
