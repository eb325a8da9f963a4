"""What changed between two reports or profiles: time by node, group, kernel, family, line and module; labels; the rest.

Only Inductor's own code (the baseline of a report) is attributed to nodes, so the tables compare that; the code that
was kept is compared as a whole, in the totals and by graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from fxopt.report.model import Report
from fxopt.report.subject import Part, parts

if TYPE_CHECKING:
    import pandas as pd

    from fxopt.labels import Label
    from profiler_core.profiles import Profile

__all__ = ["TABLES", "Diff", "Totals", "diff"]

TIMES = {
    "before_ns": "float64",  # per call: the mean of the measured calls, as in Profile.nodes
    "after_ns": "float64",
    "change_ns": "float64",  # after - before
    "ratio": "float64",  # after / before; NaN where there was nothing before
    "clear": "bool",  # no call of one side took as long as any of the other; never where there was one call
}
TABLES: dict[str, dict[str, str]] = {
    "nodes": {"node": "object", "target": "object", "module_path": "object", "file": "object", "line": "int64"},
    "groups": {"nodes": "object", "module_path": "object", "file": "object", "line": "int64"},
    "kernels": {"name": "object"},
    "families": {"family": "object"},
    "lines": {"file": "object", "line": "int64", "source": "object"},
    "modules": {"module_path": "object"},
}
"""Table -> its columns before those of TIMES. Rows are sorted by the size of the change. "" names the time of kernels
without nodes. Line numbers are those after; a line is known by its file's name and its text, so that it is found again
where lines above it were added."""


@dataclass(frozen=True)
class Totals:
    """One side, per call, in ns: kernel_ns is the median over the calls of Inductor's own code, from kernel_low to
    kernel_high; kept_* of the code that was kept. The sum over the graphs; NaN where it was not measured.
    """

    graphs: int = 0
    kernels: float = 0.0
    kernel_ns: float = math.nan
    kernel_low: float = math.nan
    kernel_high: float = math.nan
    wall_ns: float = math.nan
    kept_kernel_ns: float = math.nan
    kept_wall_ns: float = math.nan
    attributed_share: float = math.nan


@dataclass(frozen=True)
class Diff:
    """before, after: the totals. tables: by name (TABLES), each with the columns of TIMES too.

    graphs: a row for each graph of either report: graph, compile_id, and of both sides decision, passes, baseline_ns,
    kept_ns (wall time per call) and error (relative L2). labels: change ("gone", "new", "stays"), axis, scope, where
    (nodes), before_ns, after_ns (headroom). environment: name, before, after of what differs. notes: what makes the two
    hard to compare.
    """

    before: Totals
    after: Totals
    tables: dict[str, pd.DataFrame]
    graphs: pd.DataFrame
    labels: pd.DataFrame
    environment: pd.DataFrame
    notes: tuple[str, ...] = field(default=())

    def __getattr__(self, name: str) -> pd.DataFrame:
        """The tables by their names: `diff.nodes`, `diff.kernels`."""
        if name in TABLES:
            return self.tables[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}; its tables are {', '.join(TABLES)}")

    def _repr_html_(self) -> str:
        from fxopt.report.notebook import diff_html

        return diff_html(self)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data: totals, and the tables as lists of rows."""
        from dataclasses import asdict

        from profiler_core.files import plain

        def rows(table: pd.DataFrame) -> list[Any]:
            return [plain(row) for row in table.to_dict("records")]

        return {
            "before": plain(asdict(self.before)),
            "after": plain(asdict(self.after)),
            "notes": list(self.notes),
            **{name: rows(getattr(self, name)) for name in (*TABLES, "graphs", "labels", "environment")},
        }


def diff(before: Report | Profile, after: Report | Profile) -> Diff:
    """What changed from `before` to `after`."""
    sides = parts(before), parts(after)
    profiles = [[p.profile for p in side if p.profile is not None] for side in sides]
    tables = {name: _table(name, *profiles) for name in TABLES}
    environments = [_environment(found) for found in profiles]
    return Diff(
        before=_totals(sides[0]),
        after=_totals(sides[1]),
        tables=tables,
        graphs=_graphs(*sides),
        labels=_labels(*sides),
        environment=_differences(*environments),
        notes=tuple(_notes(before, after, profiles, environments)),
    )


# ---- totals ----


def _totals(side: Sequence[Part]) -> Totals:
    measured = [part.profile for part in side if part.profile is not None]
    graphs = [part.graph for part in side if part.graph is not None]

    def total(values: Sequence[float | None]) -> float:
        return sum(math.nan if value is None else value for value in values) if values else math.nan

    calls = [_calls(profile) for profile in measured]
    whole = sum(profile.total_ns / profile.iterations for profile in measured)
    known = sum(profile.attributed_ns / profile.iterations for profile in measured)
    return Totals(
        graphs=len(graphs),
        kernels=sum(len(profile.window) / profile.iterations for profile in measured),
        kernel_ns=total([graph.baseline_kernel_ns for graph in graphs] or [profile.kernel_ns for profile in measured]),
        kernel_low=total([min(found) for found in calls]),
        kernel_high=total([max(found) for found in calls]),
        wall_ns=total([graph.baseline_wall_ns for graph in graphs] or [profile.wall_ns for profile in measured]),
        kept_kernel_ns=total([graph.kept_kernel_ns for graph in graphs]),
        kept_wall_ns=total([graph.kept_wall_ns for graph in graphs]),
        attributed_share=known / whole if whole else math.nan,
    )


def _calls(profile: Profile) -> list[float]:
    """Kernel time of each measured call, ns."""
    found = profile.window.groupby("iteration")["duration_ns"].sum().astype(float).tolist()
    return found + [0.0] * (profile.iterations - len(found))


# ---- tables ----


def _table(name: str, before: Sequence[Profile], after: Sequence[Profile]) -> pd.DataFrame:
    """One of TABLES: both sides' times by the same keys."""
    from profiler_core.profiles import frame

    columns = TABLES[name]
    sides: list[dict[Any, _Time]] = []
    told: dict[Any, dict[str, Any]] = {}
    for profiles in (before, after):
        side: dict[Any, _Time] = {}
        for number, profile in enumerate(profiles):
            for key, row, times in _ROWS[name](profile):
                key = (number, key) if name in ("nodes", "groups") else key
                told[key] = row  # of the later side where both have it
                side[key] = side.get(key, _Time()).with_calls(times)
        sides.append(side)
    records = [{**row, **_compared(sides[0].get(key), sides[1].get(key))} for key, row in told.items()]
    records.sort(key=lambda row: -abs(row["change_ns"]))
    return frame(records, {**columns, **TIMES})


@dataclass(frozen=True)
class _Time:
    """Mean, least and most of the calls, ns, and the least number of calls: of one profile, or summed over several."""

    mean: float = 0.0
    low: float = 0.0
    high: float = 0.0
    calls: float = math.inf

    def with_calls(self, times: Sequence[float]) -> _Time:
        mean = self.mean + sum(times) / len(times)
        return _Time(mean, self.low + min(times), self.high + max(times), min(self.calls, len(times)))


def _compared(before: _Time | None, after: _Time | None) -> dict[str, Any]:
    old, new = before or _Time(), after or _Time()
    apart = old.high < new.low or new.high < old.low
    return {
        "before_ns": old.mean,
        "after_ns": new.mean,
        "change_ns": new.mean - old.mean,
        "ratio": new.mean / old.mean if old.mean else math.nan,
        "clear": apart and min(old.calls, new.calls) > 1,
    }


_Row = tuple[Any, dict[str, Any], list[float]]  # key, columns, time of each call


def _by(profile: Profile, column: str) -> list[tuple[Any, list[float]]]:
    from profiler_core.grouping import per_call

    times = per_call(profile, column)
    return list(zip(times.index, times.to_numpy().tolist(), strict=True))


def _plainly(column: str, name: str) -> Callable[[Profile], list[_Row]]:
    return lambda profile: [(str(key), {name: str(key)}, times) for key, times in _by(profile, column)]


def _nodes(profile: Profile) -> list[_Row]:
    wanted = ("target", "module_path", "file", "line")
    several = len(set(profile.nodes["graph"]) - {""}) > 1
    info = {}
    for row in profile.nodes.to_dict("records"):
        name = f"{row['node']} ({row['graph']})" if several and row["graph"] else row["node"]
        info[name] = {column: row[column] for column in wanted}
    unknown = {"target": "", "module_path": "", "file": "", "line": 0}
    return [(key, {"node": key, **info.get(key, unknown)}, times) for key, times in _by(profile, "node")]


def _groups(profile: Profile) -> list[_Row]:
    places = {row["nodes"]: row for row in profile.groups()[list(TABLES["groups"])].to_dict("records")}
    unknown = {"module_path": "", "file": "", "line": 0}
    return [(key, {**places.get(key, unknown), "nodes": key}, times) for key, times in _by(profile, "nodes")]


def _lines(profile: Profile) -> list[_Row]:
    """Lines by their file's name and their text, and by their order where a text comes several times."""
    places = sorted({(str(f), int(n)): str(s) for f, n, s in _places(profile)}.items())
    count: dict[tuple[str, str], int] = {}
    keys, rows = {}, {}
    for (file, line), source in places:
        text = " ".join(source.split()) or f"line {line}"
        same = (PurePath(file).name, text)
        count[same] = count.get(same, 0) + 1
        keys[f"{file}:{line}"] = (*same, count[same])
        rows[f"{file}:{line}"] = {"file": file, "line": line, "source": source}
    nowhere = {"file": "", "line": 0, "source": ""}
    return [(keys.get(key, key), rows.get(key, nowhere), times) for key, times in _by(profile, "line")]


def _places(profile: Profile) -> Any:
    nodes = profile.nodes[profile.nodes["file"] != ""]
    return zip(nodes["file"], nodes["line"], nodes["source"], strict=True)


_ROWS: dict[str, Callable[[Profile], list[_Row]]] = {
    "nodes": _nodes,
    "groups": _groups,
    "kernels": _plainly("name", "name"),
    "families": _plainly("family", "family"),
    "lines": _lines,
    "modules": _plainly("module_path", "module_path"),
}


# ---- graphs, labels, environment ----


def _graphs(before: Sequence[Part], after: Sequence[Part]) -> pd.DataFrame:
    from profiler_core.profiles import frame

    sides = [[part.graph for part in side if part.graph is not None] for side in (before, after)]
    columns = {"graph": "int64", "compile_id": "object"}
    of_side = {"decision": "object", "passes": "object"}
    of_side |= dict.fromkeys(("baseline_ns", "kept_ns", "error"), "float64")
    for side in ("before", "after"):
        columns |= {f"{side}_{name}": dtype for name, dtype in of_side.items()}
    records = []
    for number, pair in enumerate(zip_longest(*sides), 1):
        row: dict[str, Any] = {"graph": number, "compile_id": next(g.compile_id for g in pair[::-1] if g is not None)}
        for side, graph in zip(("before", "after"), pair, strict=True):
            values: tuple[Any, ...] = ("", (), None, None, None)
            if graph is not None:
                error = graph.verdict.rel_l2 if graph.verdict is not None else None
                values = (graph.decision, tuple(graph.passes), graph.baseline_wall_ns, graph.kept_wall_ns, error)
            row |= {f"{side}_{name}": value for name, value in zip(of_side, values, strict=True)}
        records.append(row)
    return frame(records, columns)


def _labels(before: Sequence[Part], after: Sequence[Part]) -> pd.DataFrame:
    from profiler_core.profiles import frame

    columns = {"change": "object", "axis": "object", "scope": "object", "where": "object"}
    sides = [_keyed(before), _keyed(after)]
    records: list[dict[str, Any]] = []
    for key in dict.fromkeys((*sides[0], *sides[1])):
        old, new = (side.get(key) for side in sides)
        label = new or old
        assert label is not None
        records.append(
            {
                "change": "stays" if old and new else "new" if new else "gone",
                "axis": label.axis.value,
                "scope": label.scope,
                "where": label.nodes or ((label.launch,) if label.launch else ()),
                "before_ns": old.headroom_ns if old else 0.0,
                "after_ns": new.headroom_ns if new else 0.0,
            }
        )
    records.sort(key=lambda row: (row["change"] == "stays", -max(row["before_ns"], row["after_ns"])))
    return frame(records, {**columns, "before_ns": "float64", "after_ns": "float64"})


def _keyed(side: Sequence[Part]) -> dict[tuple[Any, ...], Label]:
    found: dict[tuple[Any, ...], Label] = {}
    for number, part in enumerate(side):
        for label in part.labels:
            where = (label.launch, label.nodes) if label.scope == "kernel" else label.nodes
            found.setdefault((number, label.axis.value, label.scope, where), label)
    return found


_NO_DIFFERENCE = ("date", "source", "tool")


def _environment(profiles: Sequence[Profile]) -> dict[str, Any]:
    """The first profile's environment, without what says when and how it was taken, by dotted names."""
    found: dict[str, Any] = {}

    def add(value: Any, name: str) -> None:
        if isinstance(value, Mapping):
            for key, item in value.items():
                add(item, f"{name}.{key}" if name else str(key))
        else:
            found[name] = tuple(value) if isinstance(value, list) else value

    for profile in profiles[:1]:
        add({key: value for key, value in profile.environment.items() if key not in _NO_DIFFERENCE}, "")
    return found


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> pd.DataFrame:
    from profiler_core.profiles import frame

    names = dict.fromkeys((*before, *after)) if before and after else {}
    records = [
        {"name": name, "before": before.get(name), "after": after.get(name)}
        for name in names
        if not _equal(before.get(name), after.get(name))
    ]
    return frame(records, {"name": "object", "before": "object", "after": "object"})


def _equal(a: Any, b: Any) -> bool:
    """Clocks, temperatures and watts never agree to the last digit; 2 % is what counts as a drifted clock."""
    numbers = [value for value in (a, b) if isinstance(value, float)]
    return math.isclose(a, b, rel_tol=0.02) if len(numbers) == 2 else bool(a == b)


def _notes(
    before: Report | Profile,
    after: Report | Profile,
    profiles: Sequence[Sequence[Profile]],
    environments: Sequence[Mapping[str, Any]],
) -> list[str]:
    notes = []
    devices = [found.get("device_name") or found.get("device_type") for found in environments]
    if all(environments) and devices[0] != devices[1]:
        notes.append(f"taken on different devices, {devices[0]} and {devices[1]}: times compare those, too")
    for name, held in zip(("before", "after"), profiles, strict=True):
        if not held:
            notes.append(f"nothing was measured {name}: there is no profile, so nothing is compared by node or kernel")
        if any(profile.iterations == 1 for profile in held):
            notes.append(f"one measured call {name}: how much it differs from call to call is not known")
        if any((profile.environment.get("clocks") or {}).get("drifted") for profile in held):
            notes.append(f"the clocks moved {name}: its times compare with no others")
    sides = [len(subject.graphs) if isinstance(subject, Report) else 1 for subject in (before, after)]
    if sides[0] != sides[1]:
        notes.append(f"{sides[0]} and {sides[1]} graphs: they are compared in their order")
    return notes
