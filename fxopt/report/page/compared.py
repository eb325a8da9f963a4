"""A Diff's data for the page, and its first screen in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fxopt.report.page.data import Texts, columns, number
from fxopt.report.page.words import KINDS
from profiler_core.quantities import duration

if TYPE_CHECKING:
    import pandas as pd

    from fxopt.report.diff import Diff, Totals

SHOWN = 6


def diff_data(diff: Diff, texts: Texts) -> dict[str, Any]:
    """The tables as columns, totals, and the summary."""
    from fxopt.report.diff import TABLES

    return {
        "name": "Comparison",
        "summary": _summary(diff),
        "tables": {name: _columns(diff.tables[name], texts, TABLES[name]) for name in TABLES},
        "before": {key: number(value) for key, value in dataclasses.asdict(diff.before).items()},
        "after": {key: number(value) for key, value in dataclasses.asdict(diff.after).items()},
        "graphs": columns(
            diff.graphs,
            texts,
            ("compile_id", "before_decision", "after_decision"),
            ("graph", *(f"{side}_{of}" for side in ("before", "after") for of in ("baseline_ns", "kept_ns", "error"))),
            ("before_passes", "after_passes"),
        ),
        "labels": columns(diff.labels, texts, ("change", "axis", "scope"), ("before_ns", "after_ns"), ("where",)),
        "environment": [
            [_plain(row[name]) for name in ("name", "before", "after")] for row in diff.environment.to_dict("records")
        ],
        "notes": list(diff.notes),
    }


def _columns(table: pd.DataFrame, texts: Texts, keys: Mapping[str, str]) -> dict[str, Any]:
    words = tuple(name for name, kind in keys.items() if kind == "object" and name != "nodes")
    whole = tuple(name for name, kind in keys.items() if kind != "object")
    times = ("before_ns", "after_ns", "change_ns", "ratio")
    found = columns(table, texts, words, (*whole, *times), ("nodes",))
    return found | {"clear": [int(bool(value)) for value in table["clear"].tolist()]}


def _plain(value: Any) -> str:
    return ", ".join(str(item) for item in value) if isinstance(value, (tuple, list)) else str(value)


def _summary(diff: Diff) -> dict[str, Any]:
    before, after = _fastest(diff.before), _fastest(diff.after)
    what = before[1] if before[1] == after[1] else "time"
    headline = f"{duration(before[0])} became {duration(after[0])} a call."
    if before[0] > 0 and after[0] > 0:
        ratio = before[0] / after[0]
        if abs(ratio - 1) < 0.005:
            headline = f"A call takes the same time: {duration(before[0])} and {duration(after[0])}."
        else:
            how = f"{ratio:.2f} times as fast" if ratio > 1 else f"{1 / ratio:.2f} times as slow"
            headline = f"One call takes {duration(after[0])} instead of {duration(before[0])}: {how}."
    return {
        "headline": headline,
        "detail": f"By {what}. Two runs are compared that were not measured side by side, so no interval can be given.",
        "answers": [_totals(diff), _families(diff), _labels(diff)],
    }


def _fastest(side: Totals) -> tuple[float, str]:
    """The time of one call, and what it is: of the kept code where there is one."""
    for value, what in (
        (side.kept_wall_ns, "wall time of the code that runs"),
        (side.wall_ns, "wall time"),
        (side.kept_kernel_ns, "kernel time of the code that runs"),
    ):
        if value == value:
            return value, what
    return side.kernel_ns, "kernel time"


def _totals(diff: Diff) -> dict[str, Any]:
    rows = []
    own = ", torch.compile's own code" if diff.before.graphs or diff.after.graphs else ""
    named = {
        "kept_wall_ns": "whole call",
        "wall_ns": f"whole call{own}",
        "kept_kernel_ns": "kernels",
        "kernel_ns": f"kernels{own}",
    }
    for name, text in named.items():
        old, new = getattr(diff.before, name), getattr(diff.after, name)
        if old == old or new == new:
            rows.append(_row(text, f"{duration(old)} → {duration(new)}"))
    return {"question": "How long does one call take?", "answer": "Before and after.", "rows": rows}


def _families(diff: Diff) -> dict[str, Any]:
    table = diff.tables["families"].head(SHOWN).to_dict("records")
    rows = [
        _row(
            KINDS.get(row["family"], row["family"]),
            _signed(row["change_ns"]),
            "" if row["clear"] else "within what calls differ by",
        )
        for row in table
        if row["change_ns"]
    ]
    text = "Change of kernel time by kind of work." if rows else "No kind of work takes another time."
    return {"question": "Where did it change?", "answer": text, "rows": rows}


def _labels(diff: Diff) -> dict[str, Any]:
    counts = diff.labels["change"].value_counts().to_dict()
    gone, new = int(counts.get("gone", 0)), int(counts.get("new", 0))
    rows = [
        _row(
            f"{row['change']}: {row['axis'].replace('_', ' ')}",
            duration(max(row["before_ns"], row["after_ns"])),
            ", ".join(row["where"])[:160],
        )
        for row in diff.labels[diff.labels["change"] != "stays"].head(SHOWN).to_dict("records")
    ]
    return {"question": "What limits it now?", "answer": f"{gone} limits are gone, {new} are new.", "rows": rows}


def _row(text: str, value: str, note: str = "") -> dict[str, Any]:
    return {"text": text, "value": value, "share": None, "note": note, "source": ""}


def _signed(ns: float) -> str:
    return f"{'+' if ns > 0 else '−'}{duration(abs(ns))}"
