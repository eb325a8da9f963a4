"""What the examples print of a report: the decision, what limits the graph most, and what became of some passes.

A selection. `fxopt.report.terminal.render(report, rich.console.Console())` prints everything.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import torch

from fxopt.registry import discover

#: Seconds that an example may tune one graph. The default of fxopt is ten minutes, and more time finds more.
TIME_LIMIT = float(os.environ.get("FXOPT_TIME_LIMIT", 30))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def show(report: Any, *passes: str, labels: int = 3) -> None:
    """Prints, of every graph, the decision, the largest labels, and what each of `passes` did or why it did nothing."""
    for number, graph in enumerate(report.graphs, 1):
        kept = "kept " + "+".join(graph.passes) if graph.passes else "kept Inductor's own code"
        gain = f", {graph.speedup:.2f}x as fast" if graph.passes and graph.ratio else ""
        known = "; from a plan, nothing was measured" if graph.source == "plan" else ""
        print(f"graph {number} of {len(report.graphs)}: {kept}{gain}{known}")
        for label in sorted(graph.labels, key=lambda label: -label.headroom_ns)[:labels]:
            where = "the graph" if label.scope == "graph" else ", ".join(label.nodes[:2])
            print(f"  {label.axis.value}: {where}, could save up to {label.headroom_ns / 1e3:.0f} us a call")
        for name in passes:
            print(f"  {name}: {outcome(graph, name)}")
        for message in graph.messages:
            print(f"  note: {message}")
    for module in report.eager_modules:
        print(f"left to eager by Dynamo: {module.name} ({module.type}), {module.share:.0%} of a call")
    for message in report.messages:
        print(f"note: {message}")


def outcome(graph: Any, name: str) -> str:
    """What the pass `name` did, from the trial that got furthest with it, else why it was not used."""
    reports = [(trial, report) for trial in graph.candidates for report in trial.reports if report.name == name]
    if reports:
        trial, report = max(reports, key=lambda pair: (pair[0].outcome == "kept", pair[1].rewritten))
        why = Counter(why for _, why in report.refused).most_common(1)
        refused = f", {len(report.refused)} refused ({why[0][0]})" if why else ""
        fate = "kept" if name in graph.passes else trial.reason or trial.outcome
        return f"{report.matched} matched, {report.rewritten} rewritten{refused}; {fate}"
    for line in graph.out_of_reach:
        if line.startswith((f"{name}:", f"{name}[")):
            return line.partition(": ")[2]
    devices = discover()[name].devices
    if DEVICE not in devices:
        return f"not tried, it is for {' and '.join(devices)}"
    return "not tried, it answers none of this graph's labels"
