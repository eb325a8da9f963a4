"""A report's data in the form that the page reads: columns of numbers, and of numbers that stand for texts.

Texts stand in one list, each once. A column of texts holds their positions, one of lists of texts the positions of the
lists in `lists`, and one of numbers holds numbers, null where the value is missing. The scripts undo this (base.js).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from fxopt.report.model import to_plain
from fxopt.report.page.words import kind_of

if TYPE_CHECKING:
    import pandas as pd

    from fxopt.report.model import GraphReport
    from profiler_core.profiles import Profile

DIGITS = 6
"""Significant digits of numbers that are no whole ones: more than any clock or counter has."""
KERNEL_TEXTS = (
    "name", "kind", "device", "operator", "graph", "launch", "method", "confidence", "reason", "family", "precision",
    "occupancy_limiter", "work",
)  # fmt: skip
KERNEL_NUMBERS = (
    "process", "stream", "iteration", "thread", "start_ns", "duration_ns", "launch_ns", "registers", "shared_memory",
    "theoretical_occupancy", "waves_per_sm",
)  # fmt: skip
NODE_TEXTS = (
    "graph", "node", "kind", "target", "dtype", "module_path", "module_class", "file", "source", "layer_class",
)  # fmt: skip
NODE_NUMBERS = ("line", "kernels", "time_ns", "group_time_ns", "share", "flops", "bytes")
GROUP_TEXTS = ("graph", "launch", "kernel", "dtype", "file", "module_path")
GROUP_NUMBERS = ("line", "time_ns", "share", "kernels", "flops", "bytes")


class Texts:
    """Texts and lists of texts, each once."""

    def __init__(self) -> None:
        self._texts: dict[str, int] = {}
        self._lists: dict[tuple[int, ...], int] = {}

    def text(self, value: Any) -> int:
        """The position of a text; what is missing is the empty one."""
        return self._texts.setdefault("" if _missing(value) else str(value), len(self._texts))

    def list(self, values: Any) -> int:
        """The position of a list of texts; what is no list is the empty one."""
        items = values if isinstance(values, (tuple, list)) else ()
        return self._lists.setdefault(tuple(self.text(item) for item in items), len(self._lists))

    def to_json(self) -> dict[str, Any]:
        return {"texts": list(self._texts), "lists": [list(item) for item in self._lists]}


def number(value: Any) -> int | float | None:
    """A number that JSON holds, None for one that is missing or infinite."""
    if _missing(value):
        return None
    value = float(value)
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() else float(f"{value:.{DIGITS}g}")


def columns(
    table: pd.DataFrame, texts: Texts, words: Sequence[str], numbers: Sequence[str], lists: Sequence[str] = ()
) -> dict[str, Any]:
    """The columns of a frame that it has, by kind."""
    return {
        "rows": len(table),
        "texts": {name: [texts.text(v) for v in table[name].tolist()] for name in words if name in table},
        "numbers": {name: [number(v) for v in table[name].tolist()] for name in numbers if name in table},
        "lists": {name: [texts.list(v) for v in table[name].tolist()] for name in lists if name in table},
    }


def profile_data(profile: Profile, texts: Texts) -> dict[str, Any]:
    """What the page shows of a profile: kernels of the measured calls, nodes, launches, and what both add up to."""
    from profiler_core.counters import COUNTERS
    from profiler_core.grouping import with_node_counters

    counters = [counter.key for counter in COUNTERS if counter.key in profile.kernels]
    counted = "counters" in profile.kernels
    window = profile.window
    kernels = window.assign(grid=window["grid"].map(_extent), block=window["block"].map(_extent))
    origin = int(window["start_ns"].min()) if len(window) else 0
    for name in ("start_ns", "launch_ns"):  # whole ns since 1970 are past what a float holds
        kernels[name] = [None if _missing(value) else int(value) - origin for value in kernels[name].tolist()]
    kernels["work"] = [kind_of(*both) for both in zip(window["family"], window["operator"], strict=True)]
    measured = ("counters",) if counted else ()
    nodes = with_node_counters(profile) if counted else profile.nodes
    nodes = nodes.assign(shape=nodes["shape"].map(_extent))
    extra = (*counters, "counter_coverage")
    return {
        "kernels": columns(
            kernels,
            texts,
            (*KERNEL_TEXTS, "grid", "block", *measured),
            (*KERNEL_NUMBERS, *(name for name in counters if name not in KERNEL_NUMBERS)),
            ("nodes", "evidence"),
        )
        | {"opaque": [int(bool(value)) for value in window["opaque"].tolist()]},
        "nodes": columns(
            nodes, texts, (*NODE_TEXTS, "shape"), (*NODE_NUMBERS, *extra), ("pre_grad", "fused_with", "launches")
        )
        | {"estimate": [int(bool(value)) for value in nodes["estimate"].tolist()]},
        "groups": columns(profile.groups(), texts, GROUP_TEXTS, (*GROUP_NUMBERS, *extra), ("nodes",)),
        "unattributed": columns(profile.unattributed(), texts, ("name", "reason"), ("kernels", "time_ns")),
        "counters": [
            {"key": c.key, "unit": c.unit, "axis": c.axis, "meaning": c.meaning, "aggregation": c.aggregation}
            for c in COUNTERS
            if counted and c.key in counters
        ],
        "iterations": profile.iterations,
        "wall_ns": number(profile.wall_ns),
        "kernel_ns": number(profile.kernel_ns) if len(window) else 0,
        "total_ns": profile.total_ns,
        "attributed_ns": profile.attributed_ns,
        "unattributed_ns": profile.unattributed_ns,
        "outside_ns": profile.outside_ns,
        "environment": to_plain(profile.environment),
        "notes": list(profile.notes),
    }


def graph_data(graph: GraphReport) -> dict[str, Any]:
    """A graph's fields as plain data, but for its profile, which goes in as columns."""
    import dataclasses

    fields = to_plain(dataclasses.replace(graph, profile=None))
    return {**fields, "passes": graph.passes, "speedup": number(graph.speedup)}


def _missing(value: Any) -> bool:
    """None, NaN, and pandas' NA, which equals nothing."""
    if value is None:
        return True
    if isinstance(value, (str, tuple, list)):
        return False
    try:
        return bool(value != value)
    except TypeError:  # pandas.NA has no truth
        return True


def _extent(value: Any) -> str:
    """``(2, 3)`` as ``2 x 3``."""
    return " × ".join(str(item) for item in value) if isinstance(value, Iterable) and not isinstance(value, str) else ""
