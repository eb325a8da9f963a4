"""A report made by hand, in which every field of every class holds something, for the tests of what reads reports."""

from __future__ import annotations

import dataclasses
import math

import made_profiles

from fxopt.ablation import AblationRow, Timing
from fxopt.distributed import Agreement
from fxopt.labels import Axis, Evidence, Label
from fxopt.measure import PairedResult
from fxopt.registry import PassReport
from fxopt.report.comparison import Comparison
from fxopt.report.model import CandidateReport, EagerModule, GraphReport, Report
from fxopt.verify import Verdict
from profiler_core.profiles import Profile
from profiler_core.roofline import Ceilings


def paired(ratio: float = 1.5) -> PairedResult:
    return PairedResult(
        ratio, ratio - 0.1, ratio + 0.1, 30, 3e6, 2e6, 0.01, {"sm_mhz": 1980, "drifted": False}, ("it moved",)
    )


def verdict() -> Verdict:
    return Verdict(True, "outputs of integers are equal", 1e-6, 3e-5, 9e-7, 4e-6, True, 0.995, 3)


def label(axis: Axis = Axis.MEMORY_BOUND, headroom: float = 1.5e6, nodes: tuple[str, ...] = ("mm",)) -> Label:
    return Label(
        axis,
        "group" if nodes else "graph",
        nodes,
        "extern_kernels.mm:1" if nodes else "",
        (
            Evidence("dram_throughput", 82.5, 60.0, "%", "measured"),
            Evidence("time_ns", 2_000_000.0, None, "ns", "measured"),
        ),
        "high",
        headroom,
        "device memory is busy for 82.5 % of the time",
        "CUDA C++ Best Practices Guide",
    )


def candidate(name: str = "tf32_matmul", outcome: str = "kept") -> CandidateReport:
    refused = (("mm_1", "its sizes are symbolic"),)
    report = PassReport(name, "joint", 2, 1, refused, True, "no error", 3, 1, 0.25, "-a\n+b")
    return CandidateReport(
        name=f"{name}[limit=2]",
        passes=[name],
        reports=[report],
        verdict=verdict(),
        paired=paired(),
        kernel_ns=1.25e6,
        outcome=outcome,
        reason="faster",
        compile_seconds=2.5,
        labels=[label(Axis.LAUNCH_BOUND, 2e5, ())],
        step="add",
        subject=name,
        subject_options={"limit": 2},
        options={name: {"limit": 2}},
        headroom_ns=1.5e6,
        headroom_by_class={"0": 1e6, "": 5e5},
        memory_bytes=1 << 20,
        peak_bytes=1 << 21,
    )


def graph(profile: Profile | None = None) -> GraphReport:
    if profile is None:
        profile = dataclasses.replace(made_profiles.two_calls(), sources={"/home/alice/net/model.py": {12: "x @ w"}})
    timing = Timing(1.5e6, paired(1.6), paired(1.4))
    return GraphReport(
        key="ab" * 32,
        decision="candidate",
        source="tuned",
        compile_id="0/0",
        profile=profile,
        ceilings=Ceilings("NVIDIA H200", 4e12, {"float32": 5e13, "tf32": 4e14}, "2026-01-01T00:00:00+00:00", {"n": 1}),
        labels=[label(), label(Axis.LAUNCH_BOUND, 1e5, ())],
        missing=["rule l2_bound did not fire: lacks l2_throughput"],
        candidates=[candidate("pad_matmul", "rejected"), candidate()],
        out_of_reach=["freeze_weights: weights may change"],
        baseline_wall_ns=3e6,
        kept_wall_ns=2e6,
        baseline_kernel_ns=2.5e6,
        kept_kernel_ns=1.25e6,
        ratio=paired(),
        verdict=verdict(),
        seconds={"compile baseline": 4.5, "compare": 1.5},
        plan_path="plans/abab.json",
        messages=["a message"],
        frozen=True,
        output_copies=1,
        memory_bytes=1 << 20,
        calls_to_pay=1234.5,
        kernel_ratio=paired(2.0),
        floor_ns=5e5,
        floor_flops=1e9,
        floor_bytes=1e6,
        baseline_peak_bytes=1 << 22,
        ablation=[AblationRow("tf32_matmul", {"limit": 2}, "reverted", timing, timing, "without it: no such code")],
        agreement=Agreement(1, 4, 2, "cd" * 32, "ranks 0, 1 measured"),
    )


def full() -> Report:
    return Report([graph()], ["a message of the whole"], [EagerModule("lstm", "LSTM", 1e6, 0.25)])


def comparison() -> Comparison:
    """Eager, Inductor, autocast and fxopt, where fxopt keeps a pass."""
    times = {"eager": 6e6, "Inductor": 3e6, "autocast": 2.5e6, "fxopt": 2e6}
    names = list(times)
    results = {
        (a, b): dataclasses.replace(paired(times[a] / times[b]), baseline_ns=times[a], candidate_ns=times[b])
        for i, a in enumerate(names)
        for b in names[i + 1 :]
    }
    return Comparison(times, results, ["tf32_matmul"], "cuda:0", 1e-6, ["a note"])


def hostile() -> Report:
    """Every text that can come from somebody else is one that could break a page, a table or a terminal."""
    texts = list(made_profiles.HOSTILE.values())
    bad = "".join(texts) + "[red]|`**<b>"
    kernels = [
        made_profiles.kernel(text, 10_000 * i, 1_000 + i, operator=text, nodes=(f"n{i}", bad), launch=f"{text}:1")
        for i, text in enumerate([*texts, bad], 1)
    ]
    nodes = [
        made_profiles.node(f"n{i}", source=text, module_path=text, target=text, file=text, module_class=text)
        for i, text in enumerate([*texts, bad], 1)
    ]
    made = made_profiles.build(kernels, [*nodes, made_profiles.node(bad, source=bad, file=bad)])
    made.environment["device_name"] = bad
    report = Report([graph(made)], [bad], [EagerModule(bad, bad, math.nan, 0.25)])
    (only,) = report.graphs
    only.messages, only.out_of_reach, only.missing, only.plan_path = [bad], [bad], [bad], bad
    only.labels = [Label(Axis.MEMORY_BOUND, "group", (bad, "n1"), bad, (), "high", 1.0, bad, bad)]
    for entry in only.candidates:
        entry.name = entry.reason = bad
        entry.reports = [PassReport(bad, "joint", 1, 0, ((bad, bad),), False, bad)]
    only.ablation = [AblationRow(bad, {}, "kept", Timing(1.0, paired(), paired()), None, bad)]
    return report
