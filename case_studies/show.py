"""Shared by the case studies: table, compile budget, the result in words, and all of it as JSON."""

from __future__ import annotations

import datetime
import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from case_studies.runner import BASE, Row, Stopwatch
from fxopt.report.terminal import duration, scientific, seconds

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA_VERSION = 1
WIDE = 0.2
"""A 95 % interval of a speedup that is wider than this share of it is pointed out below the table."""


def tabulate(rows: Sequence[Row], device: torch.device, *, title: str = "", base: str = BASE) -> Table:
    """The rows as a rich table of at most 80 columns; a row that was skipped or failed says why, below the
    table.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    what = "kernels" if device.type == "cuda" else "ops"
    notes = [
        f"x: times as fast as {base}. rel. error: relative L2 against the fp64 model.",
        "compile: build and first call, with the compile caches as they were.",
    ]
    if device.type == "cpu":
        notes.append("kernel, ops: top-level operators and Inductor's C++ kernels, from torch.profiler.")
    for note in dict.fromkeys(row.kernel_note for row in rows if row.kernel_note):
        names = ", ".join(row.name for row in rows if row.kernel_note == note)
        notes.append(f"kernel of {names}: {note}")
    for row in rows:
        spread = (row.wall_speedup_high or 0.0) - (row.wall_speedup_low or 0.0)
        if row.wall_speedup and spread > WIDE * row.wall_speedup:
            low, high = row.wall_speedup_low, row.wall_speedup_high
            notes.append(f"{row.name}: wall x is uncertain, {low:.2f} to {high:.2f} (95 %)")
    notes += [f"{row.name}: {row.status}, {row.why}" for row in rows if row.why or row.status != "measured"]
    table = Table(
        title=Text(title) if title else None,
        caption=Text("\n".join(notes)),
        caption_justify="left",
        title_justify="left",
        box=box.SIMPLE,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("variant", overflow="fold", min_width=17)
    for column in ("kernel", "wall", "rel. error", "kernel x", "wall x", "compile", what):
        table.add_column(column, justify="right", no_wrap=len(column) < 9)
    for row in rows:
        if row.status != "measured":
            table.add_row(Text(row.name), Text(row.status), *("-",) * 6)
            continue
        table.add_row(
            Text(row.name),
            duration(row.kernel_ns),
            duration(row.wall_ns),
            scientific(row.rel_l2),
            "-" if row.kernel_speedup is None else f"{row.kernel_speedup:.2f}",
            "-" if row.wall_speedup is None else f"{row.wall_speedup:.2f}",
            "-" if row.compile_seconds is None else f"{row.compile_seconds:.{int(row.compile_seconds < 9.95)}f} s",
            "-" if row.kernels is None else str(row.kernels),
        )
    return table


def budget(watch: Stopwatch, report: Any) -> dict[str, float]:
    """Seconds by phase, with fxopt's own phases in the place of its sum."""
    phases: dict[str, float] = {}
    for name, value in watch.seconds.items():
        if name != "fxopt" or report is None:
            phases[name] = value
            continue
        inner: dict[str, float] = {}
        for graph in report.graphs:
            for phase, spent in graph.seconds.items():
                key = f"fxopt: {phase.replace('_', ' ')}"
                inner[key] = inner.get(key, 0.0) + spent
        phases.update(inner)
        phases["fxopt: everything else"] = max(0.0, value - sum(inner.values()))
    return phases


def budget_table(phases: Mapping[str, float], total: float) -> Table:
    """Seconds by phase and in all; time in no phase is listed, so that the rows add up to the total."""
    from rich import box
    from rich.table import Table

    table = Table(title="Compile budget", title_justify="left", box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("phase")
    table.add_column("time", justify="right")
    for name, value in phases.items():
        table.add_row(name, seconds(value))
    table.add_row("everything else", seconds(max(0.0, total - sum(phases.values()))))
    table.add_row("total", seconds(total), style="bold")
    return table


def conclude(rows: Sequence[Row], name: str, workload: str, report: Any, *, base: str = BASE) -> str:
    """The result of row `name` in plain words, ``fxopt fp32 runs ...``; no better than the rows say."""
    by_name = {row.name: row for row in rows}
    ours, baseline = by_name[name], by_name.get(base)
    if ours.status != "measured":
        return f"{name} {ours.status}: {ours.why}"
    low, high = ours.wall_speedup_low, ours.wall_speedup_high
    if baseline is None or ours.wall_speedup is None or low is None or high is None:
        return f"{name} takes {duration(ours.wall_ns)} a call; there is no {base} row to compare it with."
    if low > 1.0:
        verdict = f"{ours.wall_speedup:.2f} times as fast as default {base}"
    elif high < 1.0:
        verdict = f"slower than default {base} ({ours.wall_speedup:.2f} times its speed)"
    else:
        verdict = f"as fast as default {base}, within the noise"
    text = (
        f"{name} runs {workload} in {duration(ours.wall_ns)} a call, {verdict} "
        f"(95 % interval {low:.2f} to {high:.2f}), at a relative error of {scientific(ours.rel_l2)} "
        f"against fp64 ({base}: {scientific(baseline.rel_l2)})"
    )
    graphs = getattr(report, "graphs", None) or []
    if graphs and all(graph.decision == "baseline" for graph in graphs):
        text += "; it kept plain Inductor, as nothing it tried was both right and faster"
    others = [row for row in rows if row.name not in (name, base) and row.wall_ns is not None]
    if others:
        fastest = min(others, key=lambda row: row.wall_ns or 0.0)
        text += (
            f"; the fastest of the others is {fastest.name}, {duration(fastest.wall_ns)} "
            f"at an error of {scientific(fastest.rel_l2)}"
        )
    return text + "."


def console() -> Any:
    """A rich console of 80 to 100 columns; plain text where the output is no terminal."""
    from rich.console import Console

    screen = Console(highlight=False)
    screen.width = min(max(screen.width, 80), 100)
    return screen


def environment_line(environment: Mapping[str, Any]) -> str:
    """What of the environment a reader compares first, in one line."""
    named = {"device_name": "", "sm_count": "SMs ", "threads": "CPU threads ", "platform": ""}
    named |= {name: f"{name} " for name in ("torch", "cuda", "triton", "driver", "python")}
    words = [f"{label}{environment[key]}" for key, label in named.items() if environment.get(key)]
    return ", ".join(words)


def command_line(module: str) -> str:
    """How this run was started, to be repeated: ``python -m case_studies.gpt2 --device cpu``."""
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write the result with schema version and date, rows as mappings; not-a-number becomes null, as JSON
    has none.

    OSError with the path where it cannot be written.
    """
    content = {"schema_version": SCHEMA_VERSION, "date": now(), **document}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_plain(content), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _plain(value: Any) -> Any:
    if isinstance(value, Row):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int, bool)):
        return value
    return str(value)
