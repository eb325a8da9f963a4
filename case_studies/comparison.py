"""One workload of the comparison in this process: build all columns, check them against fp64, time them in turns.

`compare_workload` gives the rows and, apart from them, the evidence: fxopt's reports, clocks, seconds by phase.
"""

from __future__ import annotations

import copy
import math
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from case_studies import columns, floor, runner
from case_studies.columns import BASE, Column
from case_studies.runner import Built
from case_studies.workloads import COMPARED, build, more_inputs
from fxopt.measure import median_interval

INPUT_SETS = 2


@dataclass(frozen=True)
class How:
    """How to measure. rounds: of wall-time blocks. windows: profiled windows of `iterations` calls, for kernel time.

    time_limit: seconds for the workload; no column is begun after three quarters of it. column_limit: seconds for
    building one column, ABLATION times as many where its passes are ablated. tuning_limit: fxopt's own option
    `time_limit`. ablate: precisions, with commas, of which each kept pass is measured alone and taken away.
    """

    device: str
    small: bool = False
    rounds: int = 15
    windows: int = 6
    iterations: int = 3
    min_block_ns: float = 1e7
    time_limit: float = 300.0
    column_limit: float = 120.0
    tuning_limit: float = 60.0
    ablate: str = "fp32"

    @property
    def ablated(self) -> list[str]:
        return [text.strip() for text in self.ablate.split(",")]


#: An ablation compiles each kept pass alone and all but each: of six, twelve times what a column without it compiles
#: about four times.
ABLATION = 4
#: status of a row for which there was no time; a run that resumes measures its workload again
LATE = "out of time"
#: kernels that a column's evidence lists by name
KERNELS = 30


class ColumnTimeout(BaseException):
    """Building a column took too long. No Exception, so that nobody's fallback takes it for an error of theirs."""


def compare_workload(
    name: str, wanted: Sequence[tuple[str, str]], how: How, plan_dir: Path
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(rows, evidence) of workload `name`, a row for each (precision, column) of `wanted`."""
    from profiler_core import exclusive, roofline
    from profiler_core.clocks import ClockMonitor
    from profiler_core.environment import environment

    watch = runner.Stopwatch()
    device = torch.device(how.device)
    trains = COMPARED[name].trains
    with watch.phase("model, fp64 reference, ceilings"):
        model, first = build(name, device, small=how.small)
        inputs = more_inputs(model, first, INPUT_SETS)
        expected = reference(model, inputs, trains=trains)
        work = floor.work(copy.deepcopy(model), inputs[0], trains=trains)
        ceilings = roofline.ceilings(device, plan_dir / "ceilings")
    made = columns.columns(
        model,
        inputs[0],
        device,
        wanted,
        trains=trains,
        plan_dir=plan_dir,
        tuning_limit=how.tuning_limit,
        ablated=how.ablated,
    )
    with ClockMonitor(device) as monitor:
        built = []
        for column in sorted(made, key=lambda c: c.slow):
            with watch.phase("fxopt" if column.objective else "other columns: compiling"):
                built.append(_build(name, column, inputs, expected, device, how, watch))
        del expected
        with watch.phase("measuring"), exclusive.measuring(device, patience=how.time_limit):
            _say(name, watch, f"measuring {sum(b.call is not None for b in built)} columns in turns")
            calls = runner.time_in_turns(
                built, inputs, device, rounds=how.rounds, min_block_ns=how.min_block_ns, monitor=monitor
            )
            kernels = _kernel_windows(built, inputs, device, how, monitor)
        clocks = monitor.summary()
    of_base = next((b for b in built if b.variant.name == f"{BASE} fp32"), None)
    by_name = {b.variant.name: b for b in built}
    rows, reports = [], {}
    for column in made:
        one = by_name[column.variant.name]
        row = _row(name, column, one, kernels, of_base)
        row["floor_us"] = round(floor.floor_ns(work, ceilings, column.precision) / 1e3, 3)
        row["calls_per_round"] = calls.get(column.variant.name)
        rows.append(row)
        if column.reports:
            reports[f"{column.name} {column.precision}"] = _without_profiles(column.reports[-1])
    by_kernel = {f"{c.name} {c.precision}": _by_kernel(kernels[c.variant.name]["by_name"]) for c in made}
    _say(name, watch, "done")
    evidence = {
        "workload": name,
        "environment": environment(device),
        "what": COMPARED[name].what + (" (small)" if how.small else ""),
        "input_sets": len(inputs),
        "work": work.__dict__,
        "ceilings": ceilings.to_json(),
        "clocks": clocks,
        "seconds": watch.seconds,
        "total_seconds": watch.total,
        "reports": reports,
        "kernels": {name: found for name, found in by_kernel.items() if found},
    }
    return rows, evidence


def tune_column(name: str, wanted: tuple[str, str], how: How, plan_dir: Path) -> dict[str, Any]:
    """Tunes one of fxopt's columns, whose plan is kept in `plan_dir`: its report, and how long it took."""
    from profiler_core import roofline

    watch = runner.Stopwatch()
    device = torch.device(how.device)
    trains = COMPARED[name].trains
    with watch.phase("model, ceilings"):
        model, first = build(name, device, small=how.small)
        (inputs,) = more_inputs(model, first, 1)
        roofline.ceilings(device, plan_dir / "ceilings")
    (column,) = columns.columns(
        model,
        inputs,
        device,
        [wanted],
        trains=trains,
        plan_dir=plan_dir,
        tuning_limit=how.tuning_limit,
        ablated=how.ablated,
    )
    _say(name, watch, f"{column.variant.name}: tuning")
    with watch.phase("fxopt"), column.variant.context(), torch.no_grad():
        column.variant.build()
    _say(name, watch, f"{column.variant.name}: tuned")
    return {"seconds": watch.seconds, "report": _without_profiles(column.reports[-1])}


def reference(model: torch.nn.Module, inputs: Sequence[Sequence[Any]], *, trains: bool) -> list[Any]:
    """What the model gives in fp64, for each set of inputs; of a training step, loss and gradients."""
    exact = copy.deepcopy(model).double()
    run: Callable[..., Any] = columns.TrainingStep(exact).check if trains else exact
    with torch.no_grad():
        return [run(*(x.double() if x.is_floating_point() else x for x in args)) for args in inputs]


def _build(
    name: str,
    column: Column,
    inputs: Sequence[Sequence[Any]],
    expected: Sequence[Any],
    device: torch.device,
    how: How,
    watch: runner.Stopwatch,
) -> Built:
    """The column, built and checked and called as it will be timed; one that cannot says why in its row."""
    variant = column.variant
    if variant.available and watch.total > 0.75 * how.time_limit:
        why = f"the workload's {how.time_limit:g} s were spent before it"
        _say(name, watch, f"{variant.name}: skipped, {why}")
        return Built(variant, runner.Row(variant.name, LATE, why))
    _say(name, watch, f"{variant.name}: " + ("building" if variant.available else f"skipped, {variant.why}"))
    limit = how.column_limit * (ABLATION if column.ablated else 1)
    left = min(limit, max(1.0, how.time_limit - watch.total))
    try:
        with _at_most(left):
            one = runner.build_variant(variant, inputs, expected, device)
            if one.call is not None:
                with variant.context(), torch.no_grad():
                    for args in (*inputs, *inputs):
                        one.call(*args)
                    if device.type == "cuda":
                        torch.cuda.synchronize(device)
    except ColumnTimeout:
        row = runner.Row(variant.name, LATE, f"not built within {left:.0f} s")
        return Built(variant, row)
    except Exception as error:  # as in build_variant: it ran once, and cannot be timed
        text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        return Built(variant, replace(one.row, status="failed", why=text))
    if one.row.status == "failed":
        _say(name, watch, f"{variant.name}: failed, {one.row.why}")
    return one


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """ColumnTimeout after so many seconds. By the alarm signal: compiling cannot be asked to stop."""

    def ring(*_: Any) -> None:
        raise ColumnTimeout

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _kernel_windows(
    built: Sequence[Built], inputs: Sequence[Sequence[Any]], device: torch.device, how: How, monitor: Any
) -> dict[str, Any]:
    """By name: kernel time of a call in each window (ns), kernels a call, what there is to say of it, and its kernels
    by name in each window. The order of the columns rotates from window to window.
    """
    from profiler_core.collect.kineto import kernel_time

    found: dict[str, dict[str, Any]] = {
        b.variant.name: {"ns": [], "kernels": None, "note": "", "by_name": []} for b in built
    }
    running = [b for b in built if b.call is not None]
    for number in range(how.windows):
        shift = number % max(len(running), 1)
        args = inputs[number % len(inputs)]
        for b in running[shift:] + running[:shift]:
            mine = found[b.variant.name]
            if mine["note"].startswith("no kernel time"):
                continue
            call = b.call
            assert call is not None
            try:
                with b.variant.context(), torch.no_grad():
                    seen = kernel_time(partial(call, *args), iterations=how.iterations, warmup=1, device=device)
            except Exception as error:  # a profiler that is refused costs the kernel times, not the study
                mine |= {"ns": [], "by_name": [], "note": f"no kernel time, {type(error).__name__}: {error}"[:300]}
                continue
            mine["ns"].append(seen.kernel_ns)
            mine["by_name"].append(seen.by_name)
            mine |= {"kernels": seen.kernels, "note": seen.note}
        monitor.sample()
    return found


def _by_kernel(windows: Sequence[dict[str, tuple[float, float]]]) -> list[list[Any]]:
    """(kernel, launches a call, us a call), medians over the windows, of the KERNELS that take longest; the others' sum
    is the last. Nothing where there are no windows.
    """
    names = dict.fromkeys(name for window in windows for name in window)
    found: list[list[Any]] = []
    for name in names:
        seen = [window.get(name, (0.0, 0.0)) for window in windows]
        launches, ns = (statistics.median(values) for values in zip(*seen, strict=True))
        found.append([name[:200], round(launches, 2), round(ns / 1e3, 3)])
    found.sort(key=lambda row: -row[2])
    rest = found[KERNELS:]
    others = [["others", round(sum(row[1] for row in rest), 2), round(sum(row[2] for row in rest), 3)]] if rest else []
    return [*found[:KERNELS], *others]


def _row(name: str, column: Column, one: Built, kernels: dict[str, Any], base: Built | None) -> dict[str, Any]:
    mine = kernels[one.variant.name]
    base_kernels = [] if base is None else kernels[base.variant.name]["ns"]
    kernel_ratio = paired_ratio(base_kernels, mine["ns"])
    wall_ratio = paired_ratio([] if base is None else base.walls_ns, one.walls_ns)
    graphs = list(column.reports[-1].graphs) if column.reports else []
    messages = list(column.reports[-1].messages) if column.reports else []
    error = one.row.rel_l2
    return {
        "workload": name,
        "precision": column.precision,
        "column": column.name,
        "status": one.row.status,
        "kernel_us": _median_us(mine["ns"]),
        "wall_us": _median_us(one.walls_ns),
        "kernel_interval": _interval_us(mine["ns"]),
        "wall_interval": _interval_us(one.walls_ns),
        "rel_l2_error": error if error is not None and math.isfinite(error) else None,
        "kernels": mine["kernels"],
        "kernel_ratio": kernel_ratio[0],
        "kernel_ratio_interval": kernel_ratio[1],
        "wall_ratio": wall_ratio[0],
        "wall_ratio_interval": wall_ratio[1],
        "compile_seconds": None if one.row.compile_seconds is None else round(one.row.compile_seconds, 2),
        "why": "; ".join(text for text in (one.row.why, mine["note"]) if text),
        "objective": column.objective or None,
        "passes": list(dict.fromkeys(p for graph in graphs for p in graph.passes)) if column.objective else None,
        "decision": _decision(graphs) if column.reports else None,
        "out_of_reach": [text for graph in graphs for text in graph.out_of_reach] if column.objective else None,
        "messages": [*messages, *(text for graph in graphs for text in graph.messages)] if column.objective else None,
        "memory_bytes": sum(graph.memory_bytes or 0 for graph in graphs) if column.objective else None,
        "kernel_samples_us": [round(ns / 1e3, 3) for ns in mine["ns"]],
        "wall_samples_us": [round(ns / 1e3, 3) for ns in one.walls_ns],
    }


def _decision(graphs: Sequence[Any]) -> str:
    if not graphs:
        return "no graph"
    return "candidate" if any(graph.decision == "candidate" for graph in graphs) else "baseline"


def paired_ratio(base: Sequence[float], mine: Sequence[float]) -> tuple[float | None, list[float] | None]:
    """(median, 95 % interval) of base / mine over the rounds that both were in; above 1 `mine` is faster. None where
    there is nothing to compare, and no interval below 6 rounds.
    """
    ratios = [b / m for b, m in zip(base, mine, strict=False) if m]
    if not ratios:
        return None, None
    try:
        low, high = median_interval(ratios)
    except ValueError:
        return round(statistics.median(ratios), 4), None
    return round(statistics.median(ratios), 4), [round(low, 4), round(high, 4)]


def _median_us(values_ns: Sequence[float]) -> float | None:
    return round(statistics.median(values_ns) / 1e3, 3) if values_ns else None


def _interval_us(values_ns: Sequence[float]) -> list[float] | None:
    """The 95 % interval of the median, in microseconds; below 6 values the extremes."""
    if not values_ns:
        return None
    try:
        low, high = median_interval(values_ns)
    except ValueError:
        low, high = min(values_ns), max(values_ns)
    return [round(low / 1e3, 3), round(high / 1e3, 3)]


def _without_profiles(report: Any) -> dict[str, Any]:
    """The report as data, without the kernel-by-kernel profile, which is most of its size."""
    data: dict[str, Any] = report.to_json()
    for graph in data["graphs"]:
        graph.pop("profile", None)
    return data


def _say(name: str, watch: runner.Stopwatch, what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {name} [{watch.total:6.1f} s] {what}", file=sys.stderr, flush=True)
