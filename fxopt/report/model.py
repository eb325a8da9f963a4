"""What fxopt did to a model and why, as data: one GraphReport a graph that reached the backend."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

    from fxopt.ablation import AblationRow
    from fxopt.distributed import Agreement
    from fxopt.labels import Label
    from fxopt.measure import PairedResult
    from fxopt.registry import PassReport
    from fxopt.report.comparison import Comparison
    from fxopt.verify import Verdict
    from profiler_core.profiles import Profile
    from profiler_core.roofline import Ceilings

SCHEMA_VERSION = 2


@dataclass
class CandidateReport:
    """One candidate that was compiled: what it consists of, whether it is right, and whether it is faster.

    outcome: "kept" (part of the final code), "rejected" (right or wrong, not wanted), "failed" (could not be built).
    paired compares it with the best code at that time, kernel_ns is the sum of its kernel times per call; labels are
    those of the graph as a whole once it was measured again (shorter kernels may leave it bound by launches).
    step: "add" where `subject` is the pass that was added for this trial, "remove" where it was dropped from the best
    set; options: of each pass in it, and subject_options of that one. headroom_ns: what the labels that the subject
    answers say it could save, headroom_by_class: the same by class of repeated layer ("": outside of any).
    memory_bytes: that the code holds beyond Inductor's own (packed, cast or split weights; on CUDA whatever stays
    allocated after a call). peak_bytes: allocated beyond that during a call (CUDA; None elsewhere).
    """

    name: str
    passes: list[str]
    reports: list[PassReport] = field(default_factory=list)
    verdict: Verdict | None = None
    paired: PairedResult | None = None
    kernel_ns: float | None = None
    outcome: str = "failed"
    reason: str = ""
    compile_seconds: float = 0.0
    labels: list[Label] = field(default_factory=list)
    step: str = ""
    subject: str = ""
    subject_options: dict[str, Any] = field(default_factory=dict)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    headroom_ns: float = 0.0
    headroom_by_class: dict[str, float] = field(default_factory=dict)
    memory_bytes: int | None = None
    peak_bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data, without the graphs before and after each pass: those are the report's."""
        fields = {f.name: to_plain(getattr(self, f.name)) for f in dataclasses.fields(self)}
        return {**fields, "reports": [{**report, "change": ""} for report in fields["reports"]]}


@dataclass
class GraphReport:
    """The whole story of one graph.

    decision: "baseline" (Inductor's own code) or "candidate". source: "tuned" (measured now), "plan" (found on disk),
    "apply" (no plan, and measuring not allowed), "skipped" (nothing that fxopt measures: a graph that communicates,
    another device), "fallback" (something failed; `messages` says what).
    frozen: weights are held constant in the kept code.
    ceilings: of the device, measured; labels were drawn against them.
    Times are nanoseconds per call, medians; ratio compares baseline and kept code in pairs (>1: kept is faster), and
    kernel_ratio their kernel times, where the objective is the kernel time.
    floor_ns: the least time that the graph's floor_flops and floor_bytes take on this device (`fxopt.floor`).
    baseline_peak_bytes: allocated during a call of the baseline (CUDA; None elsewhere).
    ablation: what each pass is worth, where the option `ablate` asked for it.
    agreement: of the ranks of a distributed job (`fxopt.distributed`); None elsewhere.
    """

    key: str = ""
    decision: str = "baseline"
    source: str = "fallback"
    compile_id: str = ""
    profile: Profile | None = None
    ceilings: Ceilings | None = None
    labels: list[Label] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    candidates: list[CandidateReport] = field(default_factory=list)
    out_of_reach: list[str] = field(default_factory=list)
    baseline_wall_ns: float | None = None
    kept_wall_ns: float | None = None
    baseline_kernel_ns: float | None = None
    kept_kernel_ns: float | None = None
    ratio: PairedResult | None = None
    verdict: Verdict | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    plan_path: str = ""
    messages: list[str] = field(default_factory=list)
    frozen: bool = False
    output_copies: int | None = None
    memory_bytes: int | None = None
    calls_to_pay: float | None = None
    kernel_ratio: PairedResult | None = None
    floor_ns: float | None = None
    floor_flops: float | None = None
    floor_bytes: float | None = None
    baseline_peak_bytes: int | None = None
    ablation: list[AblationRow] = field(default_factory=list)
    agreement: Agreement | None = None

    @property
    def gap_to_floor(self) -> tuple[float, float] | None:
        """How many times the floor the kernels take, before (the baseline) and after (the kept code)."""
        if not self.floor_ns or self.baseline_kernel_ns is None or self.kept_kernel_ns is None:
            return None
        return self.baseline_kernel_ns / self.floor_ns, self.kept_kernel_ns / self.floor_ns

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data: the fields, and the gap to the floor. `changes` holds the graphs before and after each pass,
        equal ones once; of candidates that were not kept, their first lines.
        """
        others = [f.name for f in dataclasses.fields(self) if f.name != "profile"]
        fields = {name: to_plain(getattr(self, name)) for name in others}
        # Plain already, and by far the largest part.
        fields["profile"] = self.profile.to_json() if self.profile is not None else None
        changes: dict[str, str] = {}
        kept = [candidate.outcome == "kept" for candidate in self.candidates]
        for i in sorted(range(len(kept)), key=lambda i: not kept[i]):
            for held, report in zip(fields["candidates"][i]["reports"], self.candidates[i].reports, strict=True):
                held["change"] = _stored(changes, report.change, kept[i])
        texts = {key: text for text, key in changes.items()}
        return {**fields, "changes": texts, "gap_to_floor": to_plain(self.gap_to_floor)}

    @property
    def passes(self) -> list[str]:
        """Names of the passes in the kept code."""
        return list(self.candidates[-1].passes) if self.decision == "candidate" and self.candidates else []

    @property
    def speedup(self) -> float:
        """Wall time of the baseline over that of the kept code; 1.0 where the baseline is kept."""
        return self.ratio.ratio if self.ratio is not None and self.decision == "candidate" else 1.0


@dataclass(frozen=True)
class EagerModule:
    """A module that Dynamo leaves to eager: its time in one call of the model, and the share of the call's."""

    name: str
    type: str
    time_ns: float
    share: float


@dataclass
class Report:
    """All graphs of one model (a model with graph breaks has several); and, from `fxopt bench`, how it compares with
    eager and with Inductor.
    """

    graphs: list[GraphReport] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    eager_modules: list[EagerModule] = field(default_factory=list)
    comparison: Comparison | None = None

    @property
    def nodes(self) -> pd.DataFrame:
        """`Profile.nodes` of every graph that was measured, with what limits each node (`axis`, `headroom_ns`,
        `confidence`, `axes`) and the graph's number (`part`): `report.nodes.query("axis == 'memory_bound'")`.
        """
        from fxopt.report.notebook import nodes_of

        return nodes_of(self)

    def _repr_html_(self) -> str:
        from fxopt.report.notebook import report_html

        return report_html(self)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data. The profile appears as its own JSON form."""
        return {
            "schema_version": SCHEMA_VERSION,
            "messages": list(self.messages),
            "graphs": [graph.to_json() for graph in self.graphs],
            "eager_modules": to_plain(self.eager_modules),
            "comparison": to_plain(self.comparison),
        }

    @classmethod
    def from_json(cls, data: Any) -> Report:
        """The report that `to_json` wrote; a number that JSON could not hold is NaN, or None where that is allowed.

        Raises ValueError, naming the place, for what is no report of this version.
        """
        from fxopt.report.restore import RestoreError, restore_fields

        version = data.get("schema_version") if isinstance(data, dict) else None
        if version != SCHEMA_VERSION:
            raise RestoreError(f"schema_version: expected {SCHEMA_VERSION}, got {version!r:.80}")
        graphs = data.get("graphs")
        held = [_with_changes(graph) for graph in graphs] if isinstance(graphs, list) else graphs
        return restore_fields(cls, {**data, "graphs": held}, "", classes())


TRIED_LINES = 60
"""Lines that are written of what a pass changed in the graph of a candidate that was not kept."""


def _stored(changes: dict[str, str], change: str, whole: bool) -> str:
    """The key under which a change is in `changes`, where it is put unless it is there; "" for none."""
    from fxopt.graph_text import shortened

    if change and change not in changes and not whole:
        change = shortened(change, TRIED_LINES)
    return changes.setdefault(change, str(len(changes) + 1)) if change else ""


def _with_changes(graph: Any) -> Any:
    """A graph's data with the changes in place of their keys. What is not as written is for `restore` to refuse."""
    if not isinstance(graph, dict):
        return graph
    changes, candidates = graph.get("changes"), graph.get("candidates")
    if not (isinstance(changes, dict) and isinstance(candidates, list)):
        return graph

    def told(report: Any) -> Any:
        key = report.get("change") if isinstance(report, dict) else None
        return {**report, "change": changes.get(key, "")} if isinstance(key, str) else report

    def of(candidate: Any) -> Any:
        reports = candidate.get("reports") if isinstance(candidate, dict) else None
        return {**candidate, "reports": list(map(told, reports))} if isinstance(reports, list) else candidate

    return {**graph, "candidates": list(map(of, candidates))}


def classes() -> dict[str, Any]:
    """The classes that annotations above name, imported when a report is read."""
    from fxopt.ablation import AblationRow
    from fxopt.distributed import Agreement
    from fxopt.labels import Label
    from fxopt.measure import PairedResult
    from fxopt.registry import PassReport
    from fxopt.report.comparison import Comparison
    from fxopt.verify import Verdict
    from profiler_core.profiles import Profile
    from profiler_core.roofline import Ceilings

    found = (AblationRow, Agreement, Comparison, Label, PairedResult, PassReport, Verdict, Profile, Ceilings)
    return {item.__name__: item for item in found}


def to_plain(value: Any) -> Any:
    """Dataclasses, enums and tuples as JSON data; objects with `to_json` in their own form. NaN becomes null."""
    if hasattr(value, "to_json"):
        return to_plain(value.to_json())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    return str(value)


#: how many graphs' reports are kept: a long process must not grow
MOST_REMEMBERED = 64
#: reports of graphs compiled through torch.compile, the newest last
_recent: deque[GraphReport] = deque(maxlen=MOST_REMEMBERED)
#: the lists that `collect_reports` fills at present
_collecting: list[list[GraphReport]] = []


def remember(report: GraphReport) -> None:
    _recent.append(report)
    for found in list(_collecting):
        found.append(report)


@contextlib.contextmanager
def collect_reports() -> Iterator[list[GraphReport]]:
    """A list that gets the report of every graph that `profile_guided` compiles in the block, by whichever thread, and
    however many there are: ``with fxopt.collect_reports() as graphs: model(x)``.
    """
    found: list[GraphReport] = []
    _collecting.append(found)
    try:
        yield found
    finally:
        # by identity: two lists can be equal, and blocks of two threads need not end in the order they began in
        _collecting[:] = [other for other in _collecting if other is not found]


def recent_reports() -> list[GraphReport]:
    """Reports of the latest graphs that `profile_guided` compiled in this process, the newest last (64 at most)."""
    return list(_recent)


def full_report() -> Report:
    """One report over all graphs that `profile_guided` compiled in this process (the last 64), for a model with graph
    breaks has several. LookupError where there is none.
    """
    last_report()  # which says why there is none
    return Report(graphs=recent_reports())


def last_report() -> Report:
    """The newest graph's report. Raises LookupError where no graph has reached the backend."""
    if not _recent:
        raise LookupError(
            "no graph has reached the profile_guided backend in this process: either the model has not been called "
            "yet, or Dynamo left it to eager (an nn.LSTM does that); TORCH_LOGS=graph_breaks says where"
        )
    return Report(graphs=[_recent[-1]])


#: the phase of `GraphReport.seconds` in which other processes measured on the device
WAITING = "wait for the device"


@contextlib.contextmanager
def phase(report: GraphReport, name: str) -> Any:
    """Add the time of the enclosed block to `report.seconds[name]`; its errors are of that stage (`fxopt.stage`).

    What it waits until others have measured on the device is a phase of its own, or the reader would take a busy GPU
    for a slow measurement.
    """
    import time

    from fxopt.stage import stage
    from profiler_core import exclusive

    seconds = report.seconds
    started, before, known = time.perf_counter(), exclusive.waited(), seconds.get(WAITING, 0.0)
    try:
        with stage(name):
            yield
    finally:
        waited = exclusive.waited() - before
        if waited >= 0.001:  # to take a lock that is free is no waiting
            within = seconds.get(WAITING, 0.0) - known  # by phases inside this one
            seconds[WAITING] = known + max(waited, within)
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started - waited
