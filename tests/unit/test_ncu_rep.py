"""Reports of Nsight Compute.

No report can be made without a GPU and ncu. These tests stand in for the package ncu-report (2026.3.1) with a
module of the interface that it documents (load_report, IContext, IRange, IAction, IMetric); they show what is
made of it, not that NVIDIA's package behaves as it documents.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from profiler_core.collect.ncu import read
from profiler_core.counter_table import CounterError


class Metric(SimpleNamespace):
    def value(self) -> object:
        return self.content

    def unit(self) -> str:
        return self.printed_unit


class Action:
    NameBase_FUNCTION, NameBase_DEMANGLED, NameBase_MANGLED = 0, 1, 2
    WorkloadType_KERNEL, WorkloadType_RANGE, WorkloadType_CMDLIST, WorkloadType_GRAPH = 0, 1, 2, 3

    def __init__(self, name: str, metrics: dict[str, tuple[object, str]], workload: int = 0) -> None:
        self.function, self.metrics, self.workload = name, metrics, workload

    def name(self, base: int) -> str:
        return {self.NameBase_FUNCTION: self.function, self.NameBase_DEMANGLED: f"void {self.function}<4>(int)"}[base]

    def workload_type(self) -> int:
        return self.workload

    def metric_names(self) -> tuple[str, ...]:
        return tuple(self.metrics)

    def metric_by_name(self, name: str) -> Metric | None:
        found = self.metrics.get(name)
        return Metric(content=found[0], printed_unit=found[1]) if found else None


class Range:
    def __init__(self, *actions: Action) -> None:
        self.actions = actions

    def num_actions(self) -> int:
        return len(self.actions)

    def action_by_idx(self, index: int) -> Action:
        return self.actions[index]


class Context:
    def __init__(self, *ranges: Range) -> None:
        self.ranges = ranges

    def num_ranges(self) -> int:
        return len(self.ranges)

    def range_by_idx(self, index: int) -> Range:
        return self.ranges[index]


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes an ncu_report whose load_report gives what it is called with, and the path of a file to load."""

    def install(context: object) -> Path:
        def load_report(file_name: str) -> object:
            assert Path(file_name).is_file()
            if isinstance(context, Exception):
                raise context
            return context

        module = ModuleType("ncu_report")
        module.load_report = load_report  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "ncu_report", module)
        path = tmp_path / "x.ncu-rep"
        path.write_bytes(b"NVR\0")
        return path

    return install


SHAPE = {
    f"launch__{what}_dim_{axis}": (size, "")
    for what, sizes in (("grid", (8, 2, 1)), ("block", (128, 1, 1)))
    for axis, size in zip("xyz", sizes, strict=True)
}


def test_a_report_gives_a_row_an_action(report: Any) -> None:
    launch_metrics = {"launch__device_id": (1, ""), "launch__stream_id": (7, ""), "launch__context_id": (2, "")}
    first = Action(
        "k",
        {
            **SHAPE,
            **launch_metrics,
            "gpu__time_duration.sum": (2944, "ns"),
            "dram__bytes_read.sum.per_second": (1.5, "Gbyte/second"),
            "profiler__replayer_passes": (3, "pass"),
            "launch__func_cache_config": ("CachePreferNone", ""),
            "m__missing.sum": (None, ""),
        },
    )
    table = read(report(Context(Range(first, Action("l", {"gpu__time_duration.sum": (10, "ns")})))))
    assert table.rows["name"].tolist() == ["void k<4>(int)", "void l<4>(int)"]
    np.testing.assert_array_equal(table.rows["gpu__time_duration.sum"], [2944.0, 10.0])
    np.testing.assert_array_equal(table.rows["dram__bytes_read.sum.per_second"], [1.5e9, np.nan])
    assert np.isnan(table.rows["m__missing.sum"]).all()
    row = table.rows.iloc[0]
    assert (row.grid_x, row.grid_y, row.block_x, row.device, row.stream, row.context) == (8, 2, 128, 1, 7, 2)
    assert table.rows.iloc[1].grid_x == 0 and table.rows.iloc[1].device == -1
    assert table.units["dram__bytes_read.sum.per_second"] == "byte/s" and table.passes == 3
    assert table.notes == ()


def test_whole_graphs_and_several_ranges_in_a_report_are_noted(report: Any) -> None:
    graph = Action("graph", {"gpu__time_duration.sum": (1, "ns")}, Action.WorkloadType_GRAPH)
    table = read(report(Context(Range(graph), Range(Action("k", {"gpu__time_duration.sum": (2, "ns")})))))
    assert len(table.rows) == 2
    assert "1 rows measure a whole CUDA graph" in table.notes[0] and "--graph-profiling node" in table.notes[0]
    assert "2 ranges" in table.notes[1]


def test_a_report_without_kernels_or_that_cannot_be_read_is_an_error(report: Any) -> None:
    with pytest.raises(CounterError, match=r"x\.ncu-rep: no kernel in it"):
        read(report(Context(Range())))
    with pytest.raises(CounterError, match=r"(?s)x\.ncu-rep.*bad version.*pip install --upgrade ncu-report"):
        read(report(RuntimeError("bad version")))


def test_without_the_package_the_error_gives_both_ways_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ncu_report", None)
    with pytest.raises(CounterError, match=r"pip install ncu-report.*ncu --import .*x\.ncu-rep --csv --page raw"):
        read(tmp_path / "x.ncu-rep")


def test_a_report_that_is_not_there_is_named(tmp_path: Path, report: Any) -> None:
    report(Context())
    with pytest.raises(FileNotFoundError, match=r"absent\.ncu-rep"):
        read(tmp_path / "absent.ncu-rep")
