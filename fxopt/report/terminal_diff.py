"""What changed between two reports or profiles, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fxopt.report.printing import cells, heading, say, shorten, table
from fxopt.report.terminal import TOP, place, scientific
from profiler_core.quantities import duration

if TYPE_CHECKING:
    from rich.console import Console

    from fxopt.report.diff import Diff, Totals

HEADINGS = {
    "lines": "By source line",
    "groups": "By group of nodes in one kernel",
    "kernels": "By kernel",
    "families": "By kind of kernel",
}


def render_diff(diff: Diff, console: Console) -> None:
    say(console, summary(diff), "bold")
    for line in told(diff):
        say(console, line, indent=2)
    for note in diff.notes:
        say(console, f"! {shorten(note, 400)}", indent=2)
    for name, title in HEADINGS.items():
        _table(diff, name, title, console)
    if len(diff.labels):
        heading(console, "What limits it")
        for line in label_lines(diff):
            say(console, line, indent=2)
    if len(diff.environment):
        heading(console, "The environments differ")
        for row in diff.environment.to_dict("records"):
            say(
                console,
                f"{row['name']}: {shorten(str(row['before']), 60)}, then {shorten(str(row['after']), 60)}",
                indent=2,
            )


def summary(diff: Diff) -> str:
    """One sentence: the time of a call before and after."""
    before, after = diff.before, diff.after
    for what, old, new in (
        ("wall time of the kept code", before.kept_wall_ns, after.kept_wall_ns),
        ("wall time", before.wall_ns, after.wall_ns),
        ("kernel time", before.kernel_ns, after.kernel_ns),
    ):
        if old == old and new == new:
            return f"A call: {duration(old)} before, {duration(new)} after ({change(old, new)}), {what}"
    return "What a call takes was not measured on both sides"


def told(diff: Diff) -> list[str]:
    """The totals of both sides, and each graph's decision where it changed."""
    lines = []
    for name, side in (("before", diff.before), ("after", diff.after)):
        if side.kernel_ns == side.kernel_ns:
            lines.append(f"{name}: {_totals(side)}")
    for row in diff.graphs.to_dict("records"):
        old, new = (_kept(row, side) for side in ("before", "after"))
        times = change(row["before_kept_ns"], row["after_kept_ns"])
        lines.append(
            f"graph {row['graph']}: {old}" + (f", then {new}" if new != old else " in both") + f"; wall {times}"
        )
        errors = [row["before_error"], row["after_error"]]
        if any(error == error for error in errors) and errors[0] != errors[1]:
            first, second = (scientific(error if error == error else None) for error in errors)
            lines.append(f"graph {row['graph']}: relative L2 error {first}, then {second}")
    return lines


def _totals(side: Totals) -> str:
    spread = (
        f" ({duration(side.kernel_low)} to {duration(side.kernel_high)})" if side.kernel_low < side.kernel_high else ""
    )
    text = f"kernels {duration(side.kernel_ns)}{spread}"
    if side.kernels:
        text += f" in {side.kernels:.4g} launches"
    return text + (f", wall {duration(side.wall_ns)}" if side.wall_ns == side.wall_ns else "")


def _kept(row: Any, side: str) -> str:
    if not row[f"{side}_decision"]:
        return "no such graph"
    return "+".join(row[f"{side}_passes"]) or "Inductor's own code"


def change(before: float, after: float) -> str:
    """``-12.3 %``, ``x2.40`` above a doubling, "new" and "gone" where one side has nothing."""
    if before != before or after != after:
        return "-"
    if not before or not after:
        return "the same" if before == after else "gone" if before else "new"
    ratio = after / before
    return f"x{ratio:.2f}" if ratio >= 2 else f"{100 * (ratio - 1):+.1f} %"


def named(name: str, row: Any, width: int) -> str:
    """What a row of a table is about."""
    if name == "lines":
        source = " ".join(str(row["source"]).split()) or ("(no source line known)" if not row["file"] else "")
        at = f"{place(str(row['file']), int(row['line']), 24)} " if row["file"] else ""
        return at + shorten(source, max(12, width - len(at)))
    if name in ("groups", "nodes"):
        held = (row["nodes"],) if isinstance(row.get("nodes"), str) else row.get("nodes") or (row.get("node"),)
        return shorten(", ".join(map(str, filter(None, held))) or "(no node known)", width)
    if name == "families":
        return str(row["family"]) or "(unknown)"
    return shorten(str(row[next(iter(row))]) or "(none)", width)


def _table(diff: Diff, name: str, title: str, console: Console) -> None:
    data = diff.tables[name]
    moved = data[data["change_ns"] != 0]
    if moved.empty:
        return
    heading(console, f"{title}, the largest changes first")
    rows, unsure = table("before", "after", "change", "", "", numbers=3), False
    for row in moved.head(TOP).to_dict("records"):
        sure = "" if row["clear"] or not (row["before_ns"] and row["after_ns"]) else "~"
        unsure |= bool(sure)
        times = duration(row["before_ns"]), duration(row["after_ns"]), change(row["before_ns"], row["after_ns"])
        rows.add_row(*cells(*times, sure, named(name, row, max(30, console.width - 34))))
    console.print(rows)
    if len(moved) > TOP:
        rest = moved.iloc[TOP:]
        say(console, f"and {len(rest)} more, {_signed(rest['change_ns'].sum())} together", indent=2)
    if unsure:
        say(console, "~ no more than the calls of either side differ by, or measured once", indent=2)


def _signed(ns: float) -> str:
    return f"{'-' if ns < 0 else '+'}{duration(abs(ns))}"


def label_lines(diff: Diff) -> list[str]:
    """Labels that are gone and new, and how many stay."""
    lines = []
    for word, column in (("gone", "before_ns"), ("new", "after_ns")):
        rows = diff.labels[diff.labels["change"] == word]
        for row in rows.head(TOP).to_dict("records"):
            where = shorten(", ".join(row["where"]), 50) or "the graph"
            lines.append(f"{word}: {row['axis']} on {where}, up to {duration(row[column])} a call")
        if len(rows) > TOP:
            lines.append(f"{word}: {len(rows) - TOP} more")
    stays = int((diff.labels["change"] == "stays").sum())
    return [*lines, f"{stays} stay{'s' if stays == 1 else ''}"] if stays else lines
