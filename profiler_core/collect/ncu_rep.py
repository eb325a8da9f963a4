"""Reads reports of Nsight Compute (.ncu-rep) through NVIDIA's own reader, the package ncu-report (no GPU needed)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiler_core.collect.ncu import frame, largest, some
from profiler_core.collect.ncu_text import DESCRIPTIONS, base_unit, remedy
from profiler_core.counter_table import CounterError, CounterTable

if TYPE_CHECKING:
    import numpy as np


def read_report(path: Path) -> CounterTable:
    """The launches of a report, in its order. A row that measures a whole CUDA graph or range is kept, and noted.

    Raises CounterError where the package is missing or cannot read the file, and FileNotFoundError.
    """
    try:
        import ncu_report  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise CounterError(
            f"{path}: reports are read through the package ncu-report, which cannot be imported ({error}). Install it "
            f"(pip install ncu-report), or print the report as CSV where ncu is: "
            f"ncu --import {path} --csv --page raw --print-units base > {path.stem}.csv"
        ) from error
    if not path.is_file():
        raise FileNotFoundError(f"there is no report {path}")
    try:
        context = ncu_report.load_report(str(path))
    except Exception as error:
        raise CounterError(
            f"{path}: the ncu-report package cannot read this report ({error}). It reads those of its own version "
            "and older ones: pip install --upgrade ncu-report"
        ) from error
    ranges = [context.range_by_idx(i) for i in range(context.num_ranges())]
    actions = [one.action_by_idx(i) for one in ranges for i in range(one.num_actions())]
    if not actions:
        raise CounterError(f"{path}: no kernel in it; it is no report, or: {remedy(['No kernels were profiled'])}")
    return _from_actions(path, actions, len(ranges))


def _from_actions(path: Path, actions: list[Any], ranges: int) -> CounterTable:
    import numpy as np

    launches: list[dict[str, Any]] = []
    columns: dict[str, np.ndarray] = {}
    units: dict[str, str] = {}
    texts: dict[str, None] = {}
    kinds: dict[str, int] = {}
    for row, action in enumerate(actions):
        launch: dict[str, Any] = {"name": action.name(action.NameBase_DEMANGLED), "id": row}
        for name in action.metric_names():
            metric = action.metric_by_name(name)
            value = metric.value()
            if isinstance(value, str):
                texts[name] = None
                continue
            base, factor = base_unit(metric.unit())
            units.setdefault(name, base)
            column = columns.setdefault(name, np.full(len(actions), np.nan))
            if value is not None:
                column[row] = value * factor
        launches.append(launch)
        if action.workload_type() != action.WorkloadType_KERNEL:
            kind = "CUDA graph" if action.workload_type() == action.WorkloadType_GRAPH else "range"
            kinds[kind] = kinds.get(kind, 0) + 1
    _fill_launches(launches, columns)
    notes = [
        f"{count} rows measure a whole {kind}, not a kernel, and match none"
        + (" (ncu --graph-profiling node measures each kernel of a graph)." if kind == "CUDA graph" else ".")
        for kind, count in kinds.items()
    ]
    asked = [name for name in texts if not name.startswith(DESCRIPTIONS)]
    if asked:
        notes.append(f"Left out, since they hold text: {some(asked)}.")
    if ranges > 1:
        notes.append(f"The report has {ranges} ranges of rows; each is in order, and they follow one another here.")
    passes = columns.get("profiler__replayer_passes")
    return CounterTable(
        rows=frame(launches, columns),
        units=units,
        passes=None if passes is None else largest(passes),
        path=str(path),
        notes=tuple(notes),
    )


def _fill_launches(launches: list[dict[str, Any]], columns: dict[str, np.ndarray]) -> None:
    """A report keeps a launch's shape and place among its metrics."""
    places = {"device": "launch__device_id", "stream": "launch__stream_id", "context": "launch__context_id"}
    for axis in "xyz":
        places[f"grid_{axis}"] = f"launch__grid_dim_{axis}"
        places[f"block_{axis}"] = f"launch__block_dim_{axis}"
    for name, metric in places.items():
        for launch, value in zip(launches, columns.get(metric, ()), strict=False):
            if value == value:  # not NaN
                launch[name] = int(value)
