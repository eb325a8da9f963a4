"""The report as text: fits 80 columns, reads the same without colour, in a pipe or on a terminal.

Nothing here computes a result; every number comes from the report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from fxopt.report.measurements import OF_PROFILE, doubts, kernel_origin, out_of_time, wall_origin
from fxopt.report.next_step import next_step
from fxopt.report.printing import cells as _cells
from fxopt.report.printing import heading as _heading
from fxopt.report.printing import say as _say
from fxopt.report.printing import shorten
from fxopt.report.printing import table as _table
from profiler_core.quantities import duration, quantity, three_digits

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from fxopt.ablation import AblationRow
    from fxopt.labels import Label
    from fxopt.report.diff import Diff
    from fxopt.report.explain import Explanation
    from fxopt.report.model import CandidateReport, GraphReport, Report
    from fxopt.report.subject import Part
    from profiler_core.profiles import Profile

TOP = 10
"""Rows shown of each ranking; the profile in the report holds all of them."""
LABELS_PER_AXIS = 3
"""Labels shown in full for one axis: 48 GEMMs of 12 identical layers get 48 labels that say the same."""


MOST_MISSING = 4
"""Sentences about rules that could not be asked; where there are more, one says it for all."""


def seconds(value: float | None) -> str:
    """A time given in seconds, as `duration` spells it."""
    return duration(None if value is None else 1e9 * value)


def size(count: float) -> str:
    """A number of bytes in MiB or GiB."""
    mib = count / 2**20
    return f"{three_digits(mib)} MiB" if mib < 1000 else f"{three_digits(mib / 1024)} GiB"


def place(file: str, line: int, width: int = 40) -> str:
    """``modeling_gpt2.py:123``: the file's own name and the line; ``-`` where no user frame is known."""
    return shorten(f"{PurePath(file).name}:{line}", width) if file else "-"


def scientific(value: float | None) -> str:
    """An error: two digits and an exponent; ``-`` where it was not measured."""
    return "-" if value is None else f"{value:.1e}"


def render(report: Report, console: Console) -> None:
    """Print `report` (fxopt.report.model.Report) on a rich console.

    Says so loudly when the model gave no graph at all, since everything then ran as if fxopt were not there.
    """
    if report.comparison is not None:
        from fxopt.report.comparison import text

        for line in text(report.comparison).splitlines():
            _say(console, line)
        console.print()
    if not report.graphs:
        _say(
            console,
            "No graph reached fxopt: the model ran as it is, and nothing was measured or changed.",
            "bold",
        )
        _say(
            console,
            "TorchDynamo leaves some modules (nn.LSTM, nn.GRU, nn.RNN) to eager mode, and graph breaks or "
            "disabled regions can hide the rest; TORCH_LOGS=graph_breaks shows where.",
        )
    for index, graph in enumerate(report.graphs):
        if index:
            console.print()
        _graph(graph, index, len(report.graphs), console)
    for module in getattr(report, "eager_modules", None) or ():
        time = f"{duration(module.time_ns)}, {module.share:.0%} of a call"
        _say(console, f"Left to eager by Dynamo: {module.name} ({module.type}), {time}")
    for message in getattr(report, "messages", None) or ():
        _say(console, f"! {message}")


def render_profile(profile: Profile, console: Console, labels: Sequence[Label] | None = None) -> None:
    """Print a profile: where the time goes and what limits it, by `labels`, else by those that the rules give."""
    from fxopt.report.terminal_profile import render_profile

    render_profile(profile, console, labels)


def render_diff(diff: Diff, console: Console) -> None:
    """Print what changed between two reports or profiles (fxopt.report.diff.Diff)."""
    from fxopt.report.terminal_diff import render_diff

    render_diff(diff, console)


def render_explanation(explanation: Explanation, console: Console) -> None:
    """Print what is known of a node (fxopt.report.explain.Explanation)."""
    from fxopt.report.terminal_explanation import render_explanation

    render_explanation(explanation, console)


def _graph(graph: GraphReport, index: int, count: int, console: Console) -> None:
    _say(console, f"Graph {index + 1} of {count}, key {graph.key[:12]}: {_decision(graph)}", "bold")
    took = f", in {seconds(sum(graph.seconds.values()))}" if graph.source == "tuned" and graph.seconds else ""
    _say(console, f"Decided by: {_SOURCES.get(graph.source, graph.source)}{took}.", indent=2)
    if cut_short := out_of_time(graph):
        _say(console, f"! {cut_short}", "bold", indent=2)
    for line in _times(graph):
        _say(console, line, indent=2)
    for doubt in doubts(graph):
        _say(console, f"! {doubt}", indent=2)
    if graph.ratio is not None:
        _say(console, f"Paired: {_paired(graph.ratio)}.", indent=2)
    if graph.kernel_ratio is not None:
        _say(console, f"Kernel times, side by side: {_paired(graph.kernel_ratio)}.", indent=2)
    if graph.floor_ns:
        _say(console, _floor(graph), indent=2)
    if graph.verdict is not None:
        _say(console, f"Numerics: {_verdict(graph.verdict)}.", indent=2)
    if graph.frozen:
        _say(console, "The weights are folded into the code; after a change they are folded anew.", indent=2)
    if graph.output_copies:
        _say(
            console,
            f"{graph.output_copies} output(s) copied out of the CUDA graph's memory on each call.",
            indent=2,
        )
    if graph.memory_bytes:
        _say(console, f"The kept code holds {size(graph.memory_bytes)} more memory.", indent=2)
    if graph.calls_to_pay is not None:
        _say(console, f"Tuning has paid for itself after {graph.calls_to_pay:,.0f} calls.", indent=2)
    if graph.profile is not None:
        _profile(graph.profile, console, when=OF_PROFILE)
    if graph.profile is not None or graph.labels:
        _labels(graph, console)
    if graph.candidates:
        _heading(console, "What each candidate and pass did")
        for candidate in graph.candidates:
            _candidate(candidate, console)
    if graph.ablation:
        _ablation(graph.ablation, console)
    if graph.out_of_reach:
        _heading(console, "Out of reach here")
        for line in graph.out_of_reach:
            _say(console, f"- {line}", indent=2)
    for message in graph.messages:
        _say(console, f"! {message}", indent=2)
    if graph.seconds:
        spent = ", ".join(f"{name.replace('_', ' ')} {seconds(value)}" for name, value in graph.seconds.items())
        _say(console, f"Time spent: {spent}; {seconds(sum(graph.seconds.values()))} together.", indent=2)
    if graph.plan_path and graph.source in ("tuned", "plan"):
        _say(console, f"Plan: {graph.plan_path}", indent=2)


_SOURCES = {
    "tuned": "measuring in this process",
    "plan": "a plan on disk; nothing was measured in this process",
    "apply": "mode 'apply', which uses plans and never measures",
    "skipped": "nothing that fxopt measures (see the messages)",
    "fallback": "a failure on the way; plain Inductor runs (see the messages below)",
}


def _decision(graph: GraphReport) -> str:
    if graph.decision != "candidate":
        return "kept the baseline (plain Inductor)"
    kept = [c.name for c in graph.candidates if c.outcome == "kept"]
    return f"kept {kept[-1]}" if kept else "kept a candidate"


def _times(graph: GraphReport) -> list[str]:
    """The times of one call, each pair with where and when it was measured."""
    times = (
        ("Wall a call", graph.kept_wall_ns, graph.baseline_wall_ns, wall_origin(graph)),
        ("Kernels a call", graph.kept_kernel_ns, graph.baseline_kernel_ns, kernel_origin(graph)),
    )
    return [
        f"{what}: {duration(kept)} (baseline {duration(baseline)}), {origin}."
        for what, kept, baseline, origin in times
        if kept is not None
    ]


def _floor(graph: GraphReport) -> str:
    """What the device could do at best, and how far from that the kernels are."""
    text = f"Floor by the roofline: {duration(graph.floor_ns)} a call"
    if graph.floor_flops is not None and graph.floor_bytes is not None:
        text += f" ({quantity(graph.floor_flops, 'FLOP')}, {quantity(graph.floor_bytes, 'byte')})"
    if graph.gap_to_floor is not None:
        before, after = graph.gap_to_floor
        text += f"; gap to the floor: {three_digits(before)}x before, {three_digits(after)}x after"
    return f"{text}."


def _paired(paired: Any) -> str:
    text = (
        f"{paired.ratio:.2f}x the baseline's speed (95 % interval {paired.low:.2f} to {paired.high:.2f}, "
        f"{paired.pairs} pairs, noise {100 * paired.noise:.1f} %)"
    )
    return text + "".join(f"; marked: {mark}" for mark in paired.marked)


def _verdict(verdict: Any) -> str:
    text = (
        f"{'right' if verdict.ok else 'WRONG'}: relative L2 error {scientific(verdict.rel_l2)} against fp64 "
        f"(baseline {scientific(verdict.baseline_rel_l2)}, limit {scientific(verdict.limit)}), "
        f"largest error {scientific(verdict.max_abs)}, "
        f"NaN and Inf {'agree' if verdict.nan_agree else 'DIFFER'}"
    )
    if verdict.top1 is not None:
        text += f", top-1 agreement {100 * verdict.top1:.1f} %"
    text += f", {verdict.checked} input set(s)"
    return text + (f"; {verdict.reason}" if verdict.reason and not verdict.ok else "")


# ---- where the time goes ----


def _profile(profile: Any, console: Console, to: str = "FX nodes", when: str = "") -> None:
    when = when or f"of {profile.iterations} call{'s' * (profile.iterations != 1)}"
    of_wall = "" if profile.wall_ns != profile.wall_ns else f" of {duration(profile.wall_ns)}"
    _heading(
        console,
        f"Where the time goes: {100 * profile.attributed_share:.1f} % of kernel time attributed to {to} "
        f"({duration(profile.kernel_ns)} of kernels in a call{of_wall}, medians {when})",
    )
    groups = profile.groups().sort_values("time_ns", ascending=False)
    if groups["graph"].map(_is_backward).any():
        parts = groups.groupby(groups["graph"].map(_part))[["time_ns", "share"]].sum()
        shares = sorted(zip(parts.index, parts["time_ns"], parts["share"], strict=True), reverse=True)
        _say(console, "; ".join(f"{name} {duration(ns)}, {100 * share:.1f} %" for name, ns, share in shares), indent=2)
    # Both tables fill the width given, 80 columns at least: the middle column takes what the numbers leave.
    names = max(30, console.width - 46)
    table = _table("time", "share", "FX nodes of one kernel", "module", numbers=2)
    for row in groups.head(TOP).to_dict("records"):
        module = str(row["module_path"]) or place(str(row["file"]), int(row["line"]), 24)
        module = f"backward of {module}" if _is_backward(row["graph"]) else module
        table.add_row(
            *_cells(
                duration(row["time_ns"]),
                f"{100 * row['share']:.1f} %",
                shorten(_node_names(row["nodes"], names), names),
                shorten(module, 24),
            )
        )
    console.print(table)
    table = _table("time", "share", "source line", "at", numbers=2)
    for row in by_source_line(profile.nodes).head(TOP).to_dict("records"):
        at = place(str(row["file"]), int(row["line"]), 24)
        source = " ".join(str(row["source"]).split()) or "(no source line known)"
        table.add_row(*_cells(duration(row["time_ns"]), f"{100 * row['share']:.1f} %", shorten(source, names), at))
    console.print(table)
    if bool(profile.nodes["estimate"].any()):
        _say(console, "Lines that share a fused kernel: its time split by bytes moved, an estimate.", indent=2)
    unattributed = profile.unattributed()
    if profile.unattributed_ns > 0 and len(unattributed):
        per_call = profile.unattributed_ns / max(profile.iterations, 1)
        _say(console, f"Unattributed: {duration(per_call)} a call, in:", indent=2)
        for row in unattributed.head(5).to_dict("records"):
            _say(console, f"- {shorten(str(row['name']), 70)}", indent=4)


def _is_backward(graph: Any) -> bool:
    return "backward" in str(graph)


def _part(graph: Any) -> str:
    """What a graph of a profile with a backward is called."""
    return "backward" if _is_backward(graph) else "forward"


def by_source_line(nodes: pd.DataFrame) -> pd.DataFrame:
    """Time per call by source line: columns file, line, source, time_ns, share; largest first.

    `nodes` is `Profile.nodes`. A line that runs once a layer is one row here: the sum over the layers.
    """
    from profiler_core.profiles import frame

    timed = nodes[nodes["time_ns"] > 0]
    # Not by groupby: its index cannot hold every name (a lone surrogate).
    sums: dict[tuple[str, int, str], list[float]] = {}
    values = (timed[name].tolist() for name in ("file", "line", "source", "time_ns", "share"))
    for file, line, source, time, share in zip(*values, strict=True):
        held = sums.setdefault((file, line, source), [0.0, 0.0])
        held[0] += time
        held[1] += share
    columns = {"file": "object", "line": "int64", "source": "object", "time_ns": "float64", "share": "float64"}
    ranked = sorted(sums.items(), key=lambda item: -item[1][0])
    return frame([dict(zip(columns, (*place, *held), strict=True)) for place, held in ranked], columns)


def _node_names(nodes: Sequence[str], width: int) -> str:
    """As many node names as fit, the rest counted: ``add_3, mul_2 +4``."""
    shown = ""
    for index, name in enumerate(nodes):
        rest = len(nodes) - index - 1
        longer = f"{shown}, {name}" if shown else shorten(name, width)
        if shown and len(longer) + (len(f" +{rest}") if rest else 0) > width:
            return f"{shown} +{len(nodes) - index}"
        shown = longer
    return shown


# ---- labels ----


def _labels(graph: GraphReport | Part, console: Console) -> None:
    _heading(console, "What limits it")
    if graph.ceilings is not None:
        _say(console, _ceilings(graph.ceilings), indent=2)
    if not graph.labels:
        _say(console, "No rule fired.", indent=2)
    by_axis: dict[str, list[Any]] = {}
    for label in sorted(graph.labels, key=lambda label: -label.headroom_ns):
        by_axis.setdefault(_value(label.axis), []).append(label)
    for axis, labels in by_axis.items():
        headroom = sum(label.headroom_ns for label in labels)
        where = "the graph" if labels[0].scope == "graph" else f"{len(labels)} kernel(s)"
        _say(console, f"{axis}: {where}, could save up to {duration(headroom)} a call.", indent=2)
        for label in labels[:LABELS_PER_AXIS]:
            name = "graph" if label.scope == "graph" else _where(label)
            name += " (backward)" if label.backward else ""
            _say(console, f"- {name}, {duration(label.headroom_ns)}, confidence {label.confidence}", indent=4)
            if label is labels[0]:
                _say(console, label.why, indent=6)
            _say(console, "; ".join(evidence_text(evidence) for evidence in label.evidence), indent=6)
        if len(labels) > LABELS_PER_AXIS:
            _say(console, f"- and {len(labels) - LABELS_PER_AXIS} more", indent=4)
        if graph.profile is not None and not hasattr(graph, "candidates"):  # of a report the candidates tell
            _say(console, f"Next: {next_step(labels[0], graph.profile)}", indent=4)
    missing = Counter(graph.missing)
    if len(missing) > MOST_MISSING:
        missing = Counter(lacking(graph.missing))
    for line, count in missing.items():
        _say(console, f"- {line}" + (f" ({count} times)" if count > 1 else ""), indent=2)


def _where(label: Any) -> str:
    """A launch by its key; outside of the graphs the node, which several kernels of a name may belong to."""
    launch = label.launch if label.scope == "group" else ""
    return shorten(launch or _node_names(label.nodes, 44) or label.launch, 44)


def lacking(missing: Sequence[str]) -> list[str]:
    """Which rules could not be asked, and what they lack together, in one sentence; and what is about no rule."""
    lacked: dict[str, None] = {}
    rules: dict[str, None] = {}
    others = []
    for line in missing:
        rule, _, what = line.partition(" did not fire")
        _, found, needs = what.partition(": lacks ")
        if not found:
            others.append(line)
            continue
        rules[rule.removeprefix("rule ")] = None
        lacked.update(dict.fromkeys(needs.split(", ")))
    if rules:
        several = "s" if len(rules) > 1 else ""
        others.append(
            f"{len(rules)} rule{several} could not be asked of everything ({', '.join(rules)}), for want of "
            f"{', '.join(lacked)}"
        )
    return others


def _ceilings(ceilings: Any) -> str:
    rates = ", ".join(f"{name} {quantity(rate, 'FLOP/s')}" for name, rate in sorted(ceilings.flops_per_s.items()))
    return f"Measured ceilings of the device: copy {quantity(ceilings.copy_bytes_per_s, 'byte/s')}; products {rates}."


def evidence_text(evidence: Any) -> str:
    text = f"{evidence.metric.removesuffix('_ns')} = {quantity(evidence.value, evidence.unit)}"
    if evidence.threshold is not None:
        text += f" (threshold {quantity(evidence.threshold, evidence.unit)})"
    return f"{text}, {evidence.source}"


# ---- candidates and passes ----


def _candidate(candidate: CandidateReport, console: Console) -> None:
    reason = f": {candidate.reason}" if candidate.reason else ""
    _say(console, f"{candidate.name}: {candidate.outcome}{reason}", "bold", indent=2)
    if candidate.headroom_ns:
        repeated = len([name for name in candidate.headroom_by_class if name])
        where = f", in {repeated} class(es) of repeated layers" if repeated else ""
        _say(console, f"- {candidate.subject} could save up to {duration(candidate.headroom_ns)}{where}", indent=4)
    for report in candidate.reports:
        text = f"- pass {report.name} ({_value(report.stage)}): matched {report.matched}"
        text += f", rewritten {report.rewritten}"
        _say(console, text + (f", refused {len(report.refused)}" if report.refused else ""), indent=4)
        for why, targets in _refusals(report.refused):
            _say(console, f"refused {_node_names(targets, 30)}: {why}", indent=8)
        if report.error:
            _say(console, f"failed: {report.error}", indent=8)
    if candidate.verdict is not None:
        _say(console, f"- {_verdict(candidate.verdict)}", indent=4)
    if candidate.paired is not None:
        _say(console, f"- {_paired(candidate.paired)}", indent=4)
    if candidate.kernel_ns is not None:
        _say(console, f"- kernel sum {duration(candidate.kernel_ns)} a call", indent=4)
    if candidate.memory_bytes or candidate.peak_bytes:
        peak = f", {size(candidate.peak_bytes)} during a call" if candidate.peak_bytes is not None else ""
        _say(console, f"- holds {size(candidate.memory_bytes or 0)} more memory{peak}", indent=4)
    if candidate.compile_seconds:
        _say(console, f"- compiled in {seconds(candidate.compile_seconds)}", indent=4)


def _ablation(rows: Sequence[AblationRow], console: Console) -> None:
    """A table of the kept passes, and a line for each other one."""
    _heading(console, "What each pass is worth, measured alone over the baseline and by taking it away")
    table = _table("wall", "kernels", "", "pass", numbers=2)
    for row in rows:
        if row.outcome == "kept":
            for how, timing in (("alone", row.alone), ("in the set", row.removed)):
                name = shorten(row.name, max(24, console.width - 56))
                table.add_row(*_cells(_gain(timing, "wall"), _gain(timing, "kernel"), how, name))
    if table.row_count:
        console.print(table)
    for row in rows:
        if row.reason:
            _say(console, f"- {row.name}, {row.outcome}: {row.reason}", indent=2)


def _gain(timing: Any, what: str) -> str:
    """``2.41x (2.38-2.44)``"""
    paired = None if timing is None else getattr(timing, what)
    return "-" if paired is None else f"{paired.ratio:.2f}x ({paired.low:.2f}-{paired.high:.2f})"


def _refusals(refused: Iterable[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """Refused targets by reason, the most frequent reason first: twelve layers refuse for one reason."""
    by_reason: dict[str, list[str]] = {}
    for target, why in refused:
        by_reason.setdefault(why, []).append(target)
    return sorted(by_reason.items(), key=lambda item: -len(item[1]))


def _value(name: Any) -> str:
    """An enum member's value; anything else as it prints."""
    return str(getattr(name, "value", name))
