"""What each path says about the launch that a kernel ran for: launch ranges, names in order, recorded order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from profiler_core.attribute.fusion_map import Claim, claims_by_operator, identify
from profiler_core.attribute.graph_replay import claims_by_order
from profiler_core.range_names import graph_call_of, launch_of

if TYPE_CHECKING:
    import numpy as np

    from profiler_core.attribute.rows import Rows
    from profiler_core.attribute.windows import Windows
    from profiler_core.collect.provenance import Provenance
    from profiler_core.trace import Trace


@dataclass
class Claims:
    """The claims of one path: per kernel a place in ``table`` of (graph number or -1, launch key, reason), or -1."""

    index: np.ndarray
    table: list[tuple[int, str, str]]


class _Table:
    """Claims, each once: thousands of kernels make the same."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, str, str]] = []
        self._places: dict[tuple[int, Claim], int] = {}

    def place(self, graph: int, claim: Claim) -> int:
        place = self._places.setdefault((graph, claim), len(self.rows))
        if place == len(self.rows):
            self.rows.append((graph if claim.launch else -1, claim.launch, claim.reason))
        return place


def same_code(a: Provenance, b: Provenance) -> bool:
    """Whether two compiles have the same launches of the same nodes, which were written in the same places."""
    return (a.cache_key, a.launches, a.nodes) == (b.cache_key, b.launches, b.nodes)


class Graphs:
    """The compiled graphs of a profile, found by what a trace says of a call: its key, or the kernels that it ran."""

    def __init__(self, provenances: Sequence[Provenance]):
        self.all = tuple(provenances)
        self.by_tag = {p.graph: n for n, p in enumerate(self.all)}
        self.by_key: dict[str, int] = {}  # -1: of several compiles that differ in more than name
        for n, p in enumerate(self.all):
            first = self.by_key.setdefault(p.cache_key, n)
            if first != n and not same_code(self.all[first], p):
                self.by_key[p.cache_key] = -1
        self.by_key.pop("", None)
        self.launches = [{launch.key for launch in p.launches} for p in self.all]

    def of_range(self, tag: str, call: int, key: str) -> int:
        """The graph of a launch range: by its tag, by the call around it, or the only one with such a launch."""
        if tag:
            return self.by_tag.get(tag, -1)
        if call >= 0:
            return call
        holding = [n for n, keys in enumerate(self.launches) if key in keys]
        if len(self.all) == 1:
            return 0
        return holding[0] if len(holding) == 1 else -1

    def of_call(self, annotation: str, names: Sequence[str]) -> int:
        """The graph of a call, by Inductor's key in its annotation, or by the names of what ran in it; -1 if neither
        says.
        """
        key = graph_call_of(annotation) if annotation else None
        if key and key in self.by_key:
            return self.by_key[key]
        # A graph whose key is known is none of the calls that have another.
        possible = [n for n, p in enumerate(self.all) if not (key and p.cache_key)]
        found = identify(names, [self.all[n] for n in possible])
        if found is not None:
            return possible[found]
        # The only graph, unless its key says that it is another: what does not fit its code will not be claimed.
        return 0 if len(self.all) == 1 and not self.by_key else -1


def by_range(rows: Rows, graphs: Graphs, call_graph: dict[int, int]) -> Claims:
    """Claims of the launch ranges ``fxopt::kernel:handle``; ``call_graph`` has the graph of each call range."""
    import numpy as np

    ranges = rows.ranges
    launch = ranges.at(ranges.launch, rows.range)
    index = np.full(len(rows), -1, dtype="int64")
    table = _Table()
    seen: dict[tuple[int, int], int] = {}
    held = np.flatnonzero(launch >= 0)
    codes = ranges.codes[launch[held]]
    calls = ranges.call[launch[held]]
    for i, code, call in zip(held.tolist(), codes.tolist(), calls.tolist(), strict=True):
        graph_of_call = call_graph.get(call, -1)
        place = seen.get((code, graph_of_call))
        if place is None:
            key, tag = launch_of(ranges.names[code])
            graph = graphs.of_range(tag, graph_of_call, key)
            reason = ""
            if graph < 0:
                reason = f"launch {key} is in a graph whose provenance is not known" + (f" ({tag})" if tag else "")
            elif key not in graphs.launches[graph]:
                reason = f"launch {key} is not in this graph's provenance"
            place = seen[code, graph_of_call] = table.place(graph, Claim("" if reason else key, reason))
        index[i] = place
    return Claims(index, table.rows)


def by_names(
    trace: Trace, rows: Rows, windows: Windows, graphs: Graphs, ranged: set[int]
) -> tuple[Claims, dict[int, int]]:
    """Claims of the fusion map for operators in calls of compiled graphs, and the graph of each call range.

    A call is an annotation of Inductor's; in a trace without any, an iteration is taken for one. ``ranged``: graphs
    whose launches have ranges, in which an operator outside of all is known not to be a launch.
    """
    import numpy as np

    ranges = rows.ranges
    count = len(ranges.codes)
    top = np.flatnonzero(ranges.top_operator == np.arange(count))  # the outermost operators
    call = ranges.call[top]
    annotated = bool((ranges.call == np.arange(count)).any())
    start = trace.ranges["start_ns"].to_numpy()
    thread = trace.ranges["thread"].to_numpy()
    if annotated:
        top, call = top[call >= 0], call[call >= 0]
        instance = call
    else:
        instance = windows.of(start[top], start[top])
        # Only threads that launched something: another thread's operators would break the sequence.
        active = np.isin(thread[top], np.unique(rows.thread[rows.thread >= 0]))
        top, instance = top[(instance >= 0) & active], instance[(instance >= 0) & active]
    order = np.lexsort((start[top], instance))
    top, instance = top[order], instance[order]
    claimed = np.full(count + 1, -1, dtype="int64")
    table = _Table()
    call_graph: dict[int, int] = {}
    known: dict[tuple[str, tuple[str, ...]], tuple[int, list[Claim]]] = {}
    calls = np.split(top, np.flatnonzero(np.diff(instance)) + 1) if len(top) else []
    for members in calls:
        names = tuple(ranges.names[ranges.codes[members]].tolist())
        around = int(ranges.call[members[0]]) if annotated else -1
        annotation = ranges.names[ranges.codes[around]] if around >= 0 else ""
        if (annotation, names) not in known:
            graph = graphs.of_call(annotation, names)
            claims = claims_by_operator(names, graphs.all[graph]) if graph >= 0 else [Claim("", "")] * len(names)
            if graph in ranged:
                claims = [Claim("", "")] * len(names)
            known[annotation, names] = graph, claims
        graph, claims = known[annotation, names]
        if around >= 0:
            call_graph[around] = graph
        for row, claim in zip(members.tolist(), claims, strict=True):
            if claim.reason:
                claimed[row] = table.place(graph, claim)
    return Claims(claimed[ranges.at(ranges.top_operator, rows.range)], table.rows), call_graph


def graph_of_calls(rows: Rows, graphs: Graphs, call_graph: dict[int, int]) -> None:
    """Complete ``call_graph`` for calls in which no operator ran, by the key in their annotation."""
    import numpy as np

    ranges = rows.ranges
    for row in np.flatnonzero(ranges.call == np.arange(len(ranges.codes))).tolist():
        if row not in call_graph:
            call_graph[row] = graphs.of_call(ranges.names[ranges.codes[row]], ())


def by_replay(rows: Rows, graphs: Graphs, call_graph: dict[int, int]) -> Claims:
    """Claims for the kernels of replayed CUDA graphs by the order in which the wrapper launches them."""
    import numpy as np

    index = np.full(len(rows), -1, dtype="int64")
    table = _Table()
    known: dict[tuple[int, tuple[str, ...]], tuple[int, list[Claim]]] = {}
    members = np.flatnonzero(rows.replay & (rows.call >= 0))
    if not len(members) or not graphs.all:
        return Claims(index, table.rows)
    members = members[np.argsort(rows.call[members], kind="stable")]  # kernels are in order of start already
    device, stream = rows.kernels["device"].to_numpy(), rows.kernels["stream"].to_numpy()
    kernel_names = rows.kernels["name"].to_numpy()
    call_of = rows.ranges.at(rows.ranges.call, rows.range)
    for run in np.split(members, np.flatnonzero(np.diff(rows.call[members])) + 1):
        if len(np.unique(device[run])) > 1 or len(np.unique(stream[run])) > 1:
            claims, graph = [Claim("", "replayed on several streams, where order decides nothing")] * len(run), -1
        else:
            names = tuple(kernel_names[run].tolist())
            graph = call_graph.get(int(call_of[run[0]]), -1)
            if (graph, names) not in known:
                number = graph if graph >= 0 else graphs.of_call("", names)
                found = claims_by_order(names, graphs.all[number]) if number >= 0 else []
                known[graph, names] = number, found or [Claim("", "replayed from a graph of unknown code")] * len(names)
            graph, claims = known[graph, names]
        for i, claim in zip(run.tolist(), claims, strict=True):
            index[i] = table.place(graph, claim)
    return Claims(index, table.rows)
