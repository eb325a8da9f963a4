"""All that is known of a node, as text: its place, its time, its kernels, its limits, what was tried, what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fxopt.report.printing import cells, clean, heading, say, shorten, table
from fxopt.report.terminal import evidence_text, lacking
from profiler_core.quantities import duration, quantity

if TYPE_CHECKING:
    from rich.console import Console

    from fxopt.report.explain import Explanation

MOST_NAMES = 8
"""Names listed of fused nodes, and of others that could be meant."""


def render_explanation(found: Explanation, console: Console) -> None:
    say(console, f"{shorten(found.node, 60)}: {shorten(found.target, 60) or 'an operator'}", "bold")
    for line in facts(found):
        say(console, line, indent=2)
    _source(found, console)
    if len(found.kernels):
        _kernels(found, console)
    if found.counters:
        heading(console, "Counters")
        rows = table("value", "counter", numbers=1)
        for reading in found.counters:
            rows.add_row(*cells(quantity(reading.value, reading.unit), reading.name))
        console.print(rows)
    _limits(found, console)
    if found.tried:
        heading(console, "What passes did at it")
        for item in found.tried:
            why = f": {shorten(item.reason, 200)}" if item.reason else ""
            say(console, f"- {item.pass_name} {item.did} it{why} (candidate {item.outcome})", indent=2)
    heading(console, "What to do next")
    for step in found.next_steps:
        say(console, f"- {step}", indent=2)
    if found.others:
        say(console, f"Also of this name or place: {some(found.others)}", indent=2)


def facts(found: Explanation) -> list[str]:
    """Its time, value, place in the model, and what it is fused with, a sentence each."""
    order = f", number {found.rank} by time of {found.count} nodes" if found.rank > 1 else ""
    order = f", the longest of {found.count} nodes" if found.rank == 1 else order
    where = f" ({found.part})" if found.part else ""
    graph = f" of graph {found.graph}{where}" if found.graph else where
    kind = "Operator outside of compiled graphs" if found.kind == "operator" else f"Node{graph}"
    estimate = "about " if found.estimate else ""
    lines = [f"{kind}: {estimate}{duration(found.time_ns)} a call, {found.share:.1%} of the kernel time{order}."]
    if found.dtype:
        size = "x".join("?" if n < 0 else str(n) for n in found.shape or ())
        lines.append(f"Value: {found.dtype}" + (f" {size}" if size else ""))
    if found.module_path or found.module_class:
        kind = f" ({found.module_class})" if found.module_class else ""
        lines.append(f"Module: {shorten(found.module_path, 60) or '(the model)'}{kind}")
    if found.pre_grad:
        lines.append(f"From: {some(found.pre_grad)}")
    if found.fused_with:
        lines.append(f"One kernel with: {some(found.fused_with)}; all together {duration(found.group_time_ns)} a call.")
    rates = []
    if found.flops == found.flops and found.flops:
        rates.append(quantity(found.flops, "FLOP"))
    if found.bytes == found.bytes and found.bytes:
        rates.append(quantity(found.bytes, "byte"))
    if rates:
        lines.append(f"Modelled work: {', '.join(rates)}{_reached(found)}.")
    return lines


def _reached(found: Explanation) -> str:
    """What its kernels reach, and of which ceiling."""
    parts = []
    if found.flop_rate == found.flop_rate and found.flop_rate:
        best = max(found.ceilings.flops_per_s.values(), default=0.0) if found.ceilings is not None else 0.0
        share = f" ({100 * found.flop_rate / best:.2g} % of the fastest products measured)" if best else ""
        parts.append(f"{quantity(found.flop_rate, 'FLOP/s')}{share}")
    if found.byte_rate == found.byte_rate and found.byte_rate:
        best = found.ceilings.copy_bytes_per_s if found.ceilings is not None else 0.0
        share = f" ({100 * found.byte_rate / best:.2g} % of a large copy)" if best else ""
        parts.append(f"{quantity(found.byte_rate, 'byte/s')}{share}")
    return f"; its kernels reach {' and '.join(parts)}" if parts else ""


def _source(found: Explanation, console: Console) -> None:
    from rich.text import Text

    if not found.file:
        return
    heading(console, f"{shorten(found.file, console.width - 12)}:{found.line}")
    lines = found.context or ({found.line: found.source} if found.source else {})
    for number, text in lines.items():
        mark = ">" if number == found.line else " "
        shown = Text(clean(f"{mark}{number:5}  {text}"), no_wrap=True, overflow="ellipsis")
        console.print(shown, style="bold" if mark == ">" else "", no_wrap=True, overflow="ellipsis")


def _kernels(found: Explanation, console: Console) -> None:
    heading(console, "Kernels that ran for it")
    rows = table("time", "a call", "kernel", "launched with", numbers=2)
    for row in found.kernels.to_dict("records"):
        name = shorten(str(row["name"]), max(24, console.width - 54))
        rows.add_row(*cells(duration(row["time_ns"]), f"{row['kernels']:.3g}", name, _launch(row)))
    console.print(rows)
    how = sorted({f"{row['method']}, confidence {row['confidence']}" for row in found.kernels.to_dict("records")})
    say(console, f"Found by {'; '.join(how)}.", indent=2)


def _launch(row: dict[Any, Any]) -> str:
    """``2x1x1 of 128, 32 registers``; "-" on a CPU."""
    if not isinstance(row["grid"], tuple) or not isinstance(row["block"], tuple):
        return "-"
    threads = 1
    for size in row["block"]:
        threads *= size
    registers = row["registers"]
    known = f", {registers} registers" if registers == registers and str(registers) != "<NA>" else ""
    return f"{'x'.join(map(str, row['grid']))} of {threads}{known}"


def _limits(found: Explanation, console: Console) -> None:
    heading(console, "What limits it")
    for label in (*found.labels, *found.graph_labels):
        whole = "the whole graph: " if label.scope == "graph" else ""
        up_to = f"could save up to {duration(label.headroom_ns)} a call, confidence {label.confidence}"
        say(console, f"{label.axis.value}: {whole}{up_to}", indent=2)
        say(console, shorten(label.why, 400), indent=4)
        say(console, "; ".join(map(evidence_text, label.evidence)), indent=4)
    if not found.labels and not found.graph_labels:
        say(console, "No rule fired.", indent=2)
    for line in lacking(found.missing):
        say(console, f"- {line}", indent=2)


def some(names: tuple[str, ...]) -> str:
    """The first names, shortened, and how many more there are."""
    shown = ", ".join(shorten(name, 40) for name in names[:MOST_NAMES])
    return shown + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")
