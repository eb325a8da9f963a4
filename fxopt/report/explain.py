"""All that is known of one node: where it comes from, what ran for it, what limits it, what was tried, what to do."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from fxopt import graph_text
from fxopt.report.model import GraphReport, Report
from fxopt.report.next_step import passes_for
from fxopt.report.printing import shorten
from fxopt.report.subject import Part, parts
from profiler_core.quantities import duration

if TYPE_CHECKING:
    import pandas as pd

    from fxopt.labels import Label
    from profiler_core.profiles import Profile
    from profiler_core.roofline import Ceilings

__all__ = ["Explanation", "Reading", "Tried", "UnknownNode", "explain"]

SMALL_SHARE = 0.01
"""Of the kernel time: below it, looking elsewhere first is advised."""
KERNEL_COLUMNS = {
    "name": "object",
    "launch": "object",
    "operator": "object",
    "kernels": "float64",  # per call
    "time_ns": "float64",  # per call, of the whole kernel
    "family": "object",
    "precision": "object",
    "grid": "object",
    "block": "object",
    "registers": "Int64",
    "shared_memory": "Int64",
    "theoretical_occupancy": "float64",
    "method": "object",
    "confidence": "object",
}


class UnknownNode(KeyError):
    """A name that no node has; the message has those like it."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class Reading:
    """A counter: its key, value, unit and meaning."""

    name: str
    value: float
    unit: str
    meaning: str


@dataclass(frozen=True)
class Tried:
    """What a pass did at the node: "rewrote" it (the graph has another in its place), "changed" it or what it reads, or
    "refused" it, and why; outcome is that of the candidate ("kept", ...).
    """

    pass_name: str
    did: str
    reason: str
    outcome: str


@dataclass(frozen=True)
class Explanation:
    """Of one node. Times in ns per call, as in `Profile.nodes`, whose columns the first fields are.

    part: the graph of a report ("graph 2 of 3"). rank, count: its place by time among the nodes that took any. context:
    line number -> text, around `line`. kernels: a row for each kernel that ran for it (KERNEL_COLUMNS). flop_rate,
    byte_rate: what its kernels reach, per second, from the modelled FLOPs and bytes of all their nodes, with the
    device's measured ceilings beside them (None: not known). labels: of its kernels, the largest headroom first;
    graph_labels: of the whole graph. missing: rules that could not be asked of it. tried: what passes did at it.
    next_steps: what to do, in sentences. others: further nodes of this name, or at this place, as `explain` takes them.
    """

    node: str
    graph: str
    kind: str
    target: str
    shape: tuple[int, ...] | None
    dtype: str
    module_path: str
    module_class: str
    file: str
    line: int
    source: str
    pre_grad: tuple[str, ...]
    time_ns: float
    share: float
    estimate: bool
    group_time_ns: float
    fused_with: tuple[str, ...]
    opaque: bool
    part: str
    rank: int
    count: int
    context: dict[int, str]
    kernels: pd.DataFrame
    counters: tuple[Reading, ...]
    flops: float
    bytes: float
    flop_rate: float
    byte_rate: float
    ceilings: Ceilings | None
    labels: tuple[Label, ...]
    graph_labels: tuple[Label, ...]
    missing: tuple[str, ...]
    tried: tuple[Tried, ...]
    next_steps: tuple[str, ...]
    others: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        from fxopt.report.model import to_plain
        from profiler_core.files import plain

        rows = [plain(row) for row in self.kernels.to_dict("records")]
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "kernels"}
        return {**{name: to_plain(value) for name, value in fields.items()}, "kernels": rows}


def explain(subject: Report | Profile, name: str) -> Explanation:
    """The node `name`: a node's name ("addmm_3"; "addmm_3 (0/1)" where several graphs have one), or what leads to the
    longest of its nodes: a source line ("model.py:12"), a kernel's name, a launch ("extern_kernels.addmm:3").

    Raises UnknownNode, with the names like it.
    """
    held = [part for part in parts(subject) if part.profile is not None]
    found = _find(held, name)
    if not found:
        raise UnknownNode(_unknown(held, name))
    (part, row), *rest = found
    others = tuple(_qualified(other, held, several=True) for other in rest)
    return _explain(part, row, others)


# ---- finding it ----

_Found = tuple[Part, Mapping[str, Any]]


def _rows(held: Sequence[Part]) -> Iterator[_Found]:
    for part in held:
        assert part.profile is not None
        for row in part.profile.nodes.to_dict("records"):
            yield part, {str(key): value for key, value in row.items()}


def _find(held: Sequence[Part], name: str) -> list[_Found]:
    """The nodes that a name means, the longest first."""
    rows = sorted(_rows(held), key=lambda item: -item[1]["time_ns"])
    if found := [item for item in rows if name in (item[1]["node"], _qualified(item, held, several=True))]:
        return found
    place = re.fullmatch(r"(.+):(\d+)", name)
    if place and (
        found := [item for item in rows if item[1]["line"] == int(place[2]) and _ends(item[1]["file"], place[1])]
    ):
        return found
    if found := [item for item in rows if name in item[1]["launches"]]:
        return found
    ran = set()
    for part in held:
        assert part.profile is not None
        window = part.profile.window
        same = window[window["name"] == name]
        ran |= {
            (id(part), graph, node) for graph, nodes in zip(same["graph"], same["nodes"], strict=True) for node in nodes
        }
    return [item for item in rows if (id(item[0]), item[1]["graph"], item[1]["node"]) in ran]


def _ends(file: str, given: str) -> bool:
    """Whether a file's path ends with the one given, whole names each."""
    ends = PurePath(given).parts
    return bool(ends) and PurePath(file).parts[-len(ends) :] == ends


def _qualified(item: _Found, held: Sequence[Part], several: bool) -> str:
    part, row = item
    graph = row["graph"] or (part.graph.compile_id if part.graph is not None else "") or part.name
    return f"{row['node']} ({graph})" if several and graph else str(row["node"])


def _unknown(held: Sequence[Part], name: str) -> str:
    if not held:
        return f"no node {name[:80]!r}: the report holds no profile (it comes from a plan, or nothing was measured)"
    rows = sorted(_rows(held), key=lambda item: -item[1]["time_ns"])
    names = list(dict.fromkeys(str(row["node"]) for _, row in rows))
    near = difflib.get_close_matches(name, names, 3, 0.6)
    if near:
        return f"no node is named {name[:80]!r}; did you mean {' or '.join(repr(n[:80]) for n in near)}?"
    longest = ", ".join(n[:80] for n in names[:5])
    return (
        f"no node is named {name[:80]!r}; the ones that take most time are {longest} (all {len(names)}: fxopt report "
        "FILE --json)"
    )


# ---- telling it ----


def _explain(part: Part, row: Mapping[str, Any], others: tuple[str, ...]) -> Explanation:
    profile = part.profile
    assert profile is not None
    timed = profile.nodes[profile.nodes["time_ns"] > 0].sort_values("time_ns", ascending=False, kind="stable")
    mine = (timed["node"] == row["node"]) & (timed["graph"] == row["graph"])
    rank = int(mine.to_numpy().argmax()) + 1 if mine.any() else 0
    kernels = _kernels(profile, row)
    launches, ran = set(row["launches"]), set(kernels["name"])
    labels = sorted((label for label in part.labels if _of(label, row, launches, ran)), key=lambda x: -x.headroom_ns)
    wide = tuple(label for label in part.labels if label.scope == "graph")
    # A sentence names three groups at most, and may be about more.
    missing = tuple(line for line in part.missing if ", ...)" in line or any(launch in line for launch in launches))
    tried = _tried(part.graph, {str(row["node"]), *row["pre_grad"]})
    flop_rate, byte_rate = _rates(profile, row, launches)
    around = profile.source_lines().get(row["file"], {})
    line = int(row["line"])
    return Explanation(
        node=str(row["node"]),
        graph=str(row["graph"]),
        kind=str(row["kind"]),
        target=str(row["target"] or ""),
        shape=row["shape"],
        dtype=str(row["dtype"] or ""),
        module_path=str(row["module_path"] or ""),
        module_class=str(row["module_class"] or ""),
        file=str(row["file"] or ""),
        line=line,
        source=str(row["source"] or ""),
        pre_grad=tuple(row["pre_grad"]),
        time_ns=float(row["time_ns"]),
        share=float(row["share"]),
        estimate=bool(row["estimate"]),
        group_time_ns=float(row["group_time_ns"]),
        fused_with=tuple(row["fused_with"]),
        opaque=bool(row["opaque"]),
        part=part.name,
        rank=rank,
        count=len(timed),
        context={n: text for n, text in around.items() if abs(n - line) <= 3},
        kernels=kernels,
        counters=_counters(profile, row),
        flops=float(row["flops"]),
        bytes=float(row["bytes"]),
        flop_rate=flop_rate,
        byte_rate=byte_rate,
        ceilings=part.ceilings,
        labels=tuple(labels),
        graph_labels=wide,
        missing=missing,
        tried=tried,
        next_steps=tuple(_next(part, row, labels, wide, missing, timed.iloc[0] if len(timed) else None, rank)),
        others=others,
    )


def _of(label: Label, row: Mapping[str, Any], launches: set[str], kernels: set[str]) -> bool:
    """Whether a label is of one of the node's kernels. Two graphs may have a launch of one name, with other nodes."""
    if label.scope == "graph":
        return False
    names = {str(row["node"]), str(row["target"]), *row["fused_with"]}
    return (label.launch in launches or label.launch in kernels) and bool(names & set(label.nodes) or not label.nodes)


def _kernels(profile: Profile, row: Mapping[str, Any]) -> pd.DataFrame:
    """A row a kernel and launch of the node, longest first."""
    import numpy as np

    from profiler_core.profiles import frame

    window = profile.window
    mine = [row["node"] in nodes for nodes in window["nodes"]]
    inside = window[np.array(mine, dtype=bool) & (window["graph"] == row["graph"]).to_numpy()]
    records = []
    keys = list(zip(inside["name"].tolist(), inside["launch"].tolist(), strict=True))
    for key in dict.fromkeys(keys):
        same = inside[np.array([other == key for other in keys])]
        first = same.iloc[0]
        records.append(
            {
                **{name: first[name] for name in KERNEL_COLUMNS if name in same},
                "kernels": len(same) / profile.iterations,
                "time_ns": float(same["duration_ns"].sum()) / profile.iterations,
            }
        )
    return frame(sorted(records, key=lambda record: -record["time_ns"]), KERNEL_COLUMNS)


def _counters(profile: Profile, row: Mapping[str, Any]) -> tuple[Reading, ...]:
    from profiler_core.counters import COUNTERS
    from profiler_core.grouping import with_node_counters

    if "counters" not in profile.kernels:
        return ()
    if not any(counter.key in row for counter in COUNTERS):
        nodes = with_node_counters(profile)
        row = nodes[(nodes["node"] == row["node"]) & (nodes["graph"] == row["graph"])].iloc[0].to_dict()
    known = ((counter, row[counter.key]) for counter in COUNTERS if counter.key in row)
    return tuple(Reading(c.key, float(v), c.unit, c.meaning) for c, v in known if isinstance(v, float) and v == v)


def _rates(profile: Profile, row: Mapping[str, Any], launches: set[str]) -> tuple[float, float]:
    """FLOP/s and byte/s of the launches that compute the node, or of an operator outside of the graphs: modelled
    work over measured time.
    """
    if row["kind"] == "operator" and row["time_ns"]:
        return row["flops"] / row["time_ns"] * 1e9, row["bytes"] / row["time_ns"] * 1e9
    groups = profile.groups()
    mine = groups[(groups["graph"] == row["graph"]) & groups["launch"].isin(list(launches)) & (groups["time_ns"] > 0)]
    time = float(mine["time_ns"].sum())
    if not time:
        return math.nan, math.nan
    flops, moved = (float(mine[name].sum(skipna=False)) for name in ("flops", "bytes"))
    return flops / time * 1e9, moved / time * 1e9


def _tried(graph: GraphReport | None, names: set[str]) -> tuple[Tried, ...]:
    """What passes did at nodes of these names, each once, what was kept first."""
    found: dict[tuple[str, str, str], Tried] = {}
    for candidate in graph.candidates if graph is not None else ():
        for report in candidate.reports:
            told = [("refused", reason) for target, reason in report.refused if target in names]
            gone, made = graph_text.names(report.change)
            if names & (gone - made):
                told.append(("rewrote", ""))
            elif names & gone:
                told.append(("changed", "the node, or what it reads"))
            for did, reason in told:
                key = (report.name, did, reason)
                if key not in found or candidate.outcome == "kept":
                    found[key] = Tried(*key, candidate.outcome)
    return tuple(sorted(found.values(), key=lambda item: item.outcome != "kept"))


# ---- what to do ----


def _next(
    part: Part,
    row: Mapping[str, Any],
    labels: Sequence[Label],
    wide: Sequence[Label],
    missing: Sequence[str],
    longest: Any,
    rank: int,
) -> Iterator[str]:
    from fxopt.report.page.words import AXES

    profile = part.profile
    assert profile is not None
    if not row["time_ns"]:
        yield "No kernel time is spent on it: it moves nothing, or was folded or fused away."
        return
    if row["share"] < SMALL_SHARE and rank > 1:
        yield (
            f"It takes {row['share']:.1%} of the kernel time, so little can be gained here. The longest node is "
            f"{shorten(str(longest['node']), 60)}, with {longest['share']:.0%}."
        )
    if row["estimate"]:
        yield (
            f"Its time is a share of a fused kernel, by the bytes that each node would move: look at the kernel as a "
            f"whole ({duration(row['group_time_ns'])} a call), with the {len(row['fused_with'])} other nodes in it."
        )
    axes: dict[str, float] = {}
    for label in (*labels, *wide):
        axes[label.axis.value] = max(label.headroom_ns, axes.get(label.axis.value, 0.0))
    for axis, most in axes.items():
        what, answer = AXES[axis]
        yield f"{axis}, up to {duration(most)} a call: {what}. What answers it: {answer}."
    if axes:
        yield from _answering(axes, part.graph, str(profile.environment.get("device_type") or "cpu"))
    if not labels:
        yield "No rule fired for it: nothing that fxopt looks for limits it beyond doubt." + (
            " Some rules could not be asked, see above." if missing else ""
        )
    if "counters" not in profile.kernels and str(profile.environment.get("device_type")) == "cuda":
        yield 'The profile has no hardware counters; with counters="full" more rules can be asked.'


def _answering(axes: Collection[str], graph: GraphReport | None, device: str) -> Iterator[str]:
    """Which passes answer these axes, and what came of them."""
    known = list(passes_for(axes, device))
    if not known:
        yield "No pass of fxopt's answers that."
    elif graph is None or graph.source not in ("tuned", "plan"):
        yield f"Passes that answer that: {', '.join(known)}; fxopt.optimize(model, inputs) tries them."
    else:
        if kept := [name for name in known if name in graph.passes]:
            yield f"In the kept code: {', '.join(kept)}."
        reasons = [line.partition(": ")[::2] for line in graph.out_of_reach]
        told = {name.split("[")[0]: f"is out of reach: {reason}" for name, reason in reasons}
        tried = [c for c in graph.candidates if c.subject and c.outcome != "kept"]
        told |= {c.subject: f"was {c.outcome}: {c.reason}" for c in tried}
        for c in graph.candidates:  # several at once, which is how tuning begins
            for name in c.passes:
                told.setdefault(name, f"was tried with others only, in a candidate that was {c.outcome}: {c.reason}")
        idle = [name for name in known if name not in kept and _NOTHING in told.get(name, _NOTHING)]
        yield from (f"{name} {told[name]}." for name in known if name not in (*kept, *idle))
        if idle:
            yield f"Not tried, or without anything to do in this graph: {', '.join(idle)}."


_NOTHING = "found nothing to do"
