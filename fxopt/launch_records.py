"""What the kernels of a launch, or of an operator outside of the graphs, were launched with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from profiler_core import counters

if TYPE_CHECKING:
    import pandas as pd

    from profiler_core.profiles import Profile

_COUNTERS = [counter.key for counter in counters.COUNTERS]
_COLUMNS = (
    "name",
    "duration_ns",
    "family",
    "precision",
    "registers",
    "shared_memory",
    "theoretical_occupancy",
    "occupancy_limiter",
    "waves_per_sm",
    "grid",
    "block",
    "opaque",
    "operator",
    "top_operator",
)
# Families of kernels whose work is known from the operator, whoever wrote them, or which are no library's.
_KNOWN_WORK = frozenset(
    {"gemm", "gemv", "blas", "convolution", "attention", "pointwise", "reduction", "layout", "memcpy", "memset"}
    | {"custom", "operator"}
)


class LaunchRecords:
    """Of several kernels of a launch the longest tells; shares are of their time."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        window = profile.window
        inside = (window["launch"] != "").to_numpy()
        self._launches = {key: _record(rows) for key, rows in _grouped(window[inside], "graph", "launch")}
        outside = window[~inside & (window["kind"] == "kernel").to_numpy()]
        nodes = profile.nodes[(profile.nodes["kind"] == "operator") & profile.nodes["bytes"].notna()]
        self._modelled = {str(row["node"]): row for row in nodes.to_dict("records")}
        names = [str(found[0]) if found else "" for found in outside["nodes"]]
        # What is modelled of an operator is the work of all its kernels together, at one place of the program.
        known = [name in self._modelled for name in names]
        node = [name if is_known else "" for name, is_known in zip(names, known, strict=True)]
        kernel = ["" if is_known else name for name, is_known in zip(outside["name"], known, strict=True)]
        owner = [n or operator for n, operator in zip(node, outside["top_operator"], strict=True)]
        self._outside = outside.assign(owner=owner, one_kernel=kernel)

    def launch(self, graph: str, launch: str) -> dict[str, Any]:
        return self._launches.get((graph, launch), {})

    def outside(self) -> list[dict[str, Any]]:
        """A row a node whose work is modelled, else one a kernel's name and operator, longest first, in the form of
        ``Profile.groups()``.
        """
        counted = self._counters()
        found: list[dict[str, Any]] = []
        for (owner, name), rows in _grouped(self._outside, "owner", "one_kernel"):
            row: dict[str, Any] = {
                "scope": "kernel",
                "launch": name or max(rows, key=lambda row: row["duration_ns"])["name"],
                "nodes": (owner,) if owner else (),
                "time_ns": sum(row["duration_ns"] for row in rows) / self._profile.iterations,
                **_record(rows),
            }
            if not name:
                node = self._modelled[owner]
                row |= {key: node[key] for key in ("target", "flops", "bytes", "dtype")}
            found.append({**row, **counted.get((owner, name), {})})
        return sorted(found, key=lambda row: -row["time_ns"])

    def _counters(self) -> dict[tuple[str, str], dict[str, float]]:
        """The counters of each row of ``outside``, per call."""
        rows = self._outside
        present = [key for key in _COUNTERS if key in rows]
        if "counters" not in rows or not present or not len(rows):
            return {}
        keys = list(zip(rows["owner"], rows["one_kernel"], strict=True))
        times = rows["duration_ns"].to_numpy(dtype="float64")
        table = counters.aggregate(rows[present].astype("float64"), times, keys)
        sums = [c.key for c in counters.COUNTERS if c.aggregation == "sum" and c.key in table]
        table[sums] /= self._profile.iterations
        return {key: dict(zip(present, values, strict=True)) for key, *values in table[present].itertuples()}


def _grouped(rows: pd.DataFrame, *keys: str) -> Iterator[tuple[tuple[str, str], list[dict[str, Any]]]]:
    """The rows of each pair of values, in order of first appearance; plain values, since pandas takes 1 ms a group."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    columns = [rows[name].tolist() for name in (*keys, *_COLUMNS)]
    for one, other, *values in zip(*columns, strict=True):
        found.setdefault((one, other), []).append(dict(zip(_COLUMNS, values, strict=True)))
    yield from found.items()


def _record(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    import pandas as pd

    from profiler_core.families import opaque_operator

    time = sum(row["duration_ns"] for row in rows)
    longest = max(rows, key=lambda row: row["duration_ns"])

    def share(chosen: Callable[[Mapping[str, Any]], bool]) -> float:
        return sum(row["duration_ns"] for row in rows if chosen(row)) / time if time else 0.0

    def product(value: Any) -> float | None:
        return float(math.prod(value)) if isinstance(value, tuple) else None

    def number(name: str) -> float | None:
        value = longest[name]
        return None if pd.isna(value) else float(value)

    hidden = any(opaque_operator(str(longest[name])) for name in ("operator", "top_operator"))
    return {
        "family": longest["family"],
        "precision": longest["precision"],
        "registers": number("registers"),
        "shared_memory": number("shared_memory"),
        "theoretical_occupancy": number("theoretical_occupancy"),
        "occupancy_limiter": longest["occupancy_limiter"],
        "waves_per_sm": number("waves_per_sm"),
        "blocks": product(longest["grid"]),
        "threads_per_block": product(longest["block"]),
        "opaque_share": share(lambda row: bool(row["opaque"])),
        "layout_share": share(lambda row: row["family"] == "layout"),
        "black_box": hidden or bool(longest["opaque"] and longest["family"] not in _KNOWN_WORK),
    }
