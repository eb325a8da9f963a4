"""What a report and a diff show of themselves in a notebook, and the frame to query there: nodes with their limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fxopt.report.subject import parts
from fxopt.report.terminal import scientific
from profiler_core.notebook import ROWS, profile_html, shown, table
from profiler_core.quantities import duration

if TYPE_CHECKING:
    import pandas as pd

    from fxopt.labels import Label
    from fxopt.report.diff import Diff
    from fxopt.report.model import GraphReport, Report
    from profiler_core.profiles import Profile

LABEL_COLUMNS = {
    "axis": "object",  # of the label with the largest headroom; "" where no rule fired
    "headroom_ns": "float64",  # of that label, per call; 0 where there is none
    "confidence": "object",
    "axes": "object",  # tuple of all axes, the largest headroom first
}


def labelled_nodes(profile: Profile, labels: Sequence[Label]) -> pd.DataFrame:
    """`profile.nodes` with the columns of LABEL_COLUMNS: what limits the kernels of each node."""
    ranked = sorted((label for label in labels if label.nodes), key=lambda label: -label.headroom_ns)
    held: dict[str, list[Label]] = {}
    for label in ranked:
        for name in label.nodes:
            held.setdefault(name, []).append(label)
    columns = ("node", "target", "kind", "launches")
    found = []
    for node, target, kind, launches in zip(*(profile.nodes[name] for name in columns), strict=True):
        # The label of a kernel outside of the graphs names the operator, which is the target of such a node.
        mine = held.get(node, []) or (held.get(target, []) if kind == "operator" else [])
        found.append([label for label in mine if label.scope == "kernel" or label.launch in launches])
    nodes = profile.nodes.copy()
    nodes["axis"] = [mine[0].axis.value if mine else "" for mine in found]
    nodes["headroom_ns"] = [mine[0].headroom_ns if mine else 0.0 for mine in found]
    nodes["confidence"] = [mine[0].confidence if mine else "" for mine in found]
    axes = nodes["axis"].astype(object)
    axes[:] = [tuple(dict.fromkeys(label.axis.value for label in mine)) for mine in found]
    nodes["axes"] = axes
    return nodes.astype({name: dtype for name, dtype in LABEL_COLUMNS.items()})


def nodes_of(report: Report) -> pd.DataFrame:
    """The labelled nodes of all graphs that were measured, with the number of the graph in `part`."""
    import pandas as pd

    from profiler_core.profiles import NODE_COLUMNS, frame

    held = [
        labelled_nodes(part.profile, part.labels).assign(part=number)
        for number, part in enumerate(parts(report), 1)
        if part.profile is not None
    ]
    if not held:
        return frame([], {**NODE_COLUMNS, **LABEL_COLUMNS, "part": "int64"})
    return held[0] if len(held) == 1 else pd.concat(held, ignore_index=True)


def report_html(report: Report) -> str:
    blocks = [f"<p>{shown(message, 400)}</p>" for message in report.messages]
    if not report.graphs:
        blocks.append("<p>No graph reached fxopt: the model ran as it is, and nothing was measured or changed.</p>")
    for number, graph in enumerate(report.graphs, 1):
        blocks.append(f"<p><b>Graph {number} of {len(report.graphs)}: {_decision(graph)}</b></p>{_graph(graph)}")
    blocks += [
        f"<p>Left to eager by Dynamo: {shown(m.name)} ({shown(m.type)}), {duration(m.time_ns)}</p>"
        for m in report.eager_modules
    ]
    return f"<div>{''.join(blocks)}</div>"


def _decision(graph: GraphReport) -> str:
    if graph.decision != "candidate":
        return "Inductor's own code is kept"
    kept = ", ".join(f"<code>{shown(name)}</code>" for name in graph.passes)
    speed = ""
    if graph.ratio is not None:
        speed = f", {graph.ratio.ratio:.2f}x the speed of Inductor's ({graph.ratio.low:.2f} to {graph.ratio.high:.2f})"
    return f"kept {kept}{speed}"


def _graph(graph: GraphReport) -> str:
    blocks = []
    rows = [
        ["wall time a call", duration(graph.baseline_wall_ns), duration(graph.kept_wall_ns)],
        ["kernel time a call", duration(graph.baseline_kernel_ns), duration(graph.kept_kernel_ns)],
    ]
    if graph.verdict is not None:
        errors = (graph.verdict.baseline_rel_l2, graph.verdict.rel_l2)
        rows.append(["relative L2 error against fp64", *map(scientific, errors)])
    if graph.baseline_wall_ns is not None or graph.verdict is not None:
        blocks.append(table(("", "Inductor", "kept"), rows, 0))
    axes: dict[str, list[float]] = {}
    for label in graph.labels:
        axes.setdefault(label.axis.value, []).append(label.headroom_ns)
    if axes:
        ranked = sorted(axes.items(), key=lambda item: -sum(item[1]))
        limits = [[duration(sum(held)), f"<code>{axis}</code>", str(len(held))] for axis, held in ranked]
        blocks.append(table(("could save up to", "what limits it", "places"), limits, 1))
    if graph.profile is not None:
        blocks.append(profile_html(graph.profile))
    blocks += [f"<p>{shown(message, 400)}</p>" for message in graph.messages]
    return "".join(blocks)


def diff_html(diff: Diff) -> str:
    from fxopt.report.terminal_diff import change, named, summary, told

    blocks = [f"<p><b>{shown(summary(diff), 400)}</b></p>"]
    blocks += [f"<p>{shown(line, 400)}</p>" for line in (*told(diff), *diff.notes)]
    for name in ("lines", "kernels"):
        data = diff.tables[name]
        rows = [
            [
                duration(row["before_ns"]),
                duration(row["after_ns"]),
                change(row["before_ns"], row["after_ns"]),
                shown(named(name, row, 80)),
            ]
            for row in data[data["change_ns"] != 0].head(ROWS).to_dict("records")
        ]
        if rows:
            blocks.append(table(("before", "after", "change", name), rows, 3))
    return f"<div>{''.join(blocks)}</div>"
