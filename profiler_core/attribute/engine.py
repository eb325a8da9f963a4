"""Attributes every kernel of a trace to the operator, the launch and the FX nodes that it ran for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

from profiler_core.attribute import windows as measured
from profiler_core.attribute.claims import Claims, Graphs, by_names, by_range, by_replay, graph_of_calls, same_code
from profiler_core.attribute.correlation import device_annotation
from profiler_core.attribute.eager_models import eager_models
from profiler_core.attribute.fusion_map import NOT_NAMED
from profiler_core.attribute.rows import Rows, rows_of
from profiler_core.collect.provenance import Provenance
from profiler_core.profile_tables import Place, kernel_frame, node_frame
from profiler_core.profiles import Profile
from profiler_core.range_names import launch_of

if TYPE_CHECKING:
    import numpy as np

    from profiler_core.trace import Trace


def attribute(
    trace: Trace,
    provenance: Provenance | Sequence[Provenance] = (),
    environment: dict[str, Any] | None = None,
    *,
    eager_nodes: bool = False,
    calls: int | None = None,
) -> Profile:
    """One row per kernel, each with the operator and the FX nodes it ran for, or the reason why they are not known.

    The operator is that of the range around the kernel's launch, which the trace's own ids name ("correlation") or
    thread and time ("enclosure"); both are asked, ids rank first where they can be trusted, and what the other path
    says instead is kept in ``evidence``. The FX nodes are those of its launch in generated code. In order of rank:

    - its launch lies in a range ``fxopt::kernel:handle``: by the path that found the range, confidence "high"
      ("medium" where the two paths disagree);
    - names and order agree with the wrapper code of the graph in whose call it was launched, or whose recording is
      being replayed (:mod:`profiler_core.attribute.fusion_map`, ``graph_replay``): "fusion_map", "medium";
    - with ``eager_nodes``, a kernel that was launched outside of every call of a compiled graph, or in one by an
      operator that none of its launches is named after, belongs to the outermost operator around it, which then
      stands among the nodes as one node of kind "operator", one for each module and source line whose ranges are around
      it; without any provenance, so does every kernel that has one. Its FLOPs and bytes are modelled where the trace
      recorded what operators were given;
    - otherwise "none", with a reason. The nearest operator is never taken.

    ``provenance`` holds the compiled graphs of the trace; kernels of calls of other graphs stay unattributed and say
    so. ``calls``: how many measured calls the window holds, in a trace that does not mark them; raises ValueError where
    its kernels are not that many times the same. Attributed and unattributed time sum to the total in integer
    nanoseconds.
    """
    provenances = _told_apart([provenance] if isinstance(provenance, Provenance) else provenance)
    rows = rows_of(trace)
    windows = measured.find(trace)
    iteration = windows.of(rows.launch_ns, rows.kernels["start_ns"].to_numpy())
    iteration, count, dropped = _without_short_calls(trace, rows, iteration, windows)
    if calls is not None and calls != count:
        iteration, count = _in_calls(rows, iteration, calls, count), calls
    graphs = Graphs(provenances)
    found = _Attributed.of(trace, rows, windows, graphs, eager_nodes)
    launches = tuple(replace(launch, graph=p.graph) for p in provenances for launch in p.launches)
    places: dict[str, Place] = {}
    kernels = kernel_frame(trace, rows, iteration, found, provenances, environment or {}, places)
    return Profile(
        kernels=kernels,
        nodes=node_frame(kernels, provenances, count, places, eager_models(trace, rows, kernels, count)),
        environment=dict(environment or {}),
        iterations=count,
        wall_ns=float(median(trace.wall_ns)) if trace.wall_ns else float("nan"),
        launches=launches,
        notes=(*trace.notes, *(f"partial: {what}" for what in trace.partial), *rows.notes, *dropped),
    )


def _in_calls(rows: Rows, iteration: np.ndarray, calls: int, marked: int) -> np.ndarray:
    """The window cut into equal calls."""
    import numpy as np

    if marked > 1:
        raise ValueError(f"calls={calls}: the trace marks {marked} calls itself")
    inside = np.flatnonzero(iteration >= 0)
    start = rows.kernels["start_ns"].to_numpy()[inside]
    launched = rows.launch_ns[inside]
    order = inside[np.argsort(np.where(launched >= 0, launched, start), kind="stable")]
    found = measured.equal_calls(rows.kernels["name"].to_numpy()[order].tolist(), calls) if calls > 0 else None
    if found is None:
        raise ValueError(
            f"calls={calls}: the {len(inside)} kernels of the window are not {calls} times the same sequence"
        )
    numbered = iteration.copy()
    numbered[order] = found
    return numbered


def _told_apart(provenances: Sequence[Provenance]) -> list[Provenance]:
    """Each compile once, and no two of one name: the "0/0" of two processes are two graphs, numbered here."""
    distinct: list[Provenance] = []
    for p in provenances:
        if not any(p.graph == q.graph and same_code(p, q) for q in distinct):
            distinct.append(p)
    names = Counter(p.graph for p in distinct)
    number: Counter[str] = Counter()
    for n, p in enumerate(distinct):
        if names[p.graph] > 1:
            number[p.graph] += 1
            distinct[n] = replace(p, graph=f"{p.graph} #{number[p.graph]}".strip())
    return distinct


def _without_short_calls(
    trace: Trace, rows: Rows, iteration: np.ndarray, windows: measured.Windows
) -> tuple[np.ndarray, int, tuple[str, ...]]:
    import numpy as np

    if trace.device_type == "cpu" or not len(windows.number):
        return iteration, windows.count, ()
    short = measured.short_calls(rows.kernels["name"].to_numpy(), iteration, windows.number.tolist())
    iteration = np.where(np.isin(iteration, list(short)), measured.OUTSIDE, iteration)
    notes = tuple(short.values())
    ran = [int((iteration == number).sum()) for number in windows.number.tolist() if number not in short]
    if min(ran) < max(ran):
        notes += (f"the calls did not run the same kernels: from {min(ran)} to {max(ran)} of them a call",)
    return iteration, len(ran), notes


class _Attributed:
    """What was decided for each kernel: parallel arrays over the rows."""

    def __init__(self, count: int):
        import numpy as np

        self.graph = np.full(count, -1, dtype="int64")  # number of the graph, -1 where none
        self.launch = np.full(count, "", dtype=object)
        self.method = np.full(count, "none", dtype=object)
        self.confidence = np.full(count, "none", dtype=object)
        self.reason = np.full(count, "", dtype=object)
        self.evidence = np.empty(count, dtype=object)
        self.evidence[:] = [()] * count
        self.eager = np.zeros(count, dtype=bool)  # its node is the outermost operator around it
        self.call = np.full(count, -1, dtype="int64")

    @classmethod
    def of(cls, trace: Trace, rows: Rows, windows: measured.Windows, graphs: Graphs, eager_nodes: bool) -> _Attributed:
        import numpy as np

        self = cls(len(rows))
        ranges = rows.ranges
        self.call = ranges.at(ranges.call, rows.range)
        call_graph: dict[int, int] = {}
        if graphs.all:
            ranged = _ranged(rows, graphs)
            names, call_graph = by_names(trace, rows, windows, graphs, ranged)
            graph_of_calls(rows, graphs, call_graph)
            # By rank: what stands first is taken, what follows becomes evidence.
            paths = [(by_range(rows, graphs, call_graph), ""), (names, "fusion_map")]
            paths.append((by_replay(rows, graphs, call_graph), "fusion_map"))
            for claims, method in paths:
                self._take(claims, method, rows, graphs)
        self._unattributed(rows, graphs, call_graph)
        if eager_nodes:
            top = ranges.at(ranges.top_operator, rows.range)
            foreign = np.array([reason.startswith(NOT_NAMED) for reason in self.reason], dtype=bool)
            foreign |= (self.call < 0) | (not graphs.all)
            self.eager = (self.method == "none") & foreign & (top >= 0) & ~rows.replay
            self.method[self.eager] = rows.method[self.eager]
            self.confidence[self.eager] = np.where(rows.other[self.eager] >= 0, "medium", "high")
            self.reason[self.eager] = ""
        differ = np.flatnonzero(rows.other >= 0)
        said = ranges.name(rows.other[differ])
        for i, name in zip(differ.tolist(), said.tolist(), strict=True):
            self._add_evidence(i, f"by the other path its launch lies in {name!r}")
        if trace.device_type != "cpu":
            # Time on the device says nothing of the launch, so this is no claim; it is where a reader would look next.
            around = np.where(rows.range < 0, device_annotation(trace), -1)
            lost = np.flatnonzero(around >= 0)
            for i, name in zip(lost.tolist(), ranges.name(around[lost]).tolist(), strict=True):
                self._add_evidence(i, f"on its stream it ran within {name!r}")
        return self

    def _take(self, claims: Claims, method: str, rows: Rows, graphs: Graphs) -> None:
        """Apply the claims of one path to the kernels that no higher-ranked path has claimed."""
        import numpy as np

        if not claims.table:
            return
        claimed = np.flatnonzero(claims.index >= 0)
        table = [_with_nodes(claim, graphs) for claim in claims.table]
        graph = np.array([claim[0] for claim in table], dtype="int64")[claims.index[claimed]]
        keys = np.array([claim[1] for claim in table], dtype=object)[claims.index[claimed]]
        reasons = np.array([claim[2] for claim in table], dtype=object)[claims.index[claimed]]
        free = self.method[claimed] == "none"
        holds = free & (graph >= 0)
        rows_held = claimed[holds]
        self.graph[rows_held], self.launch[rows_held] = graph[holds], keys[holds]
        self.method[rows_held] = method if method else rows.method[rows_held]
        agreed = np.where(rows.other[rows_held] >= 0, "medium", "high")
        self.confidence[rows_held] = "medium" if method else agreed
        self.reason[rows_held] = reasons[holds]
        # A path that knows why it cannot tell is worth a reason; the first to know speaks.
        silent = free & (graph < 0) & (self.reason[claimed] == "")
        self.reason[claimed[silent]] = reasons[silent]
        loses = ~free & (graph >= 0) & ((keys != self.launch[claimed]) | (graph != self.graph[claimed]))
        for i, key, why in zip(claimed[loses].tolist(), keys[loses], reasons[loses], strict=True):
            self._add_evidence(i, f"{method or 'its range'} claims {key}: {why}")

    def _add_evidence(self, row: int, text: str) -> None:
        self.evidence[row] = (*self.evidence[row], text)

    def _unattributed(self, rows: Rows, graphs: Graphs, call_graph: dict[int, int]) -> None:
        """Give a reason to every kernel without one."""
        import numpy as np

        ranges = rows.ranges
        left = np.flatnonzero((self.method == "none") & (self.reason == ""))
        if not len(left):
            return
        operator = ranges.name(ranges.at(ranges.top_operator, rows.range[left]))
        known = np.array([call_graph.get(row, -1) for row in self.call[left].tolist()], dtype="int64")
        unknown_graph = (self.call[left] >= 0) & (known < 0)
        text = np.where(
            operator != "",
            operator + " ran outside of every launch of the compiled graph",
            "launched outside of every operator and launch range",
        )
        if not graphs.all:
            text = np.where(operator != "", "no compiled graph's provenance was given", text)
        else:
            text = np.where(
                unknown_graph,
                "launched by a compiled graph whose provenance is not known, or that of more than one",
                text,
            )
        self.reason[left] = np.where(rows.reason[left] != "", rows.reason[left], text)


def _with_nodes(claim: tuple[int, str, str], graphs: Graphs) -> tuple[int, str, str]:
    """The claim, refused where Inductor's mapping gives its launch no node of the graph."""
    graph, key, _ = claim
    if graph >= 0:
        launch = graphs.all[graph].launch(key)
        nodes = graphs.all[graph].nodes
        known = [nodes[name] for name in launch.nodes if name in nodes] if launch else []
        if not any(node.op == "call_function" for node in known):
            return -1, "", f"Inductor's mapping names no FX node for {key}"
    return claim


def _ranged(rows: Rows, graphs: Graphs) -> set[int]:
    """Graphs whose launches have ranges in this trace."""
    found: set[int] = set()
    for name in rows.ranges.names:
        key, tag = launch_of(name)
        if key:
            graph = graphs.of_range(tag, -1, key)
            found |= {graph} if graph >= 0 else set(range(len(graphs.all)))
    return found
