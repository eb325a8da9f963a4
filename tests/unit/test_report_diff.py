"""What changed between two profiles or reports: by node, group, kernel, family, line and module, and what does not."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import made_profiles
import made_reports
import pandas as pd
import pytest
from made_profiles import T, build, kernel, node

from fxopt.labels import Axis
from fxopt.report.diff import TABLES, TIMES, diff
from fxopt.report.model import Report
from profiler_core import load
from profiler_core.grouping import by, per_call
from profiler_core.profiles import Profile


def calls(*rows: tuple[str, tuple[str, ...], tuple[int, ...]], nodes: Any = None, **environment: Any) -> Profile:
    """A profile of (kernel, nodes, duration in each call)."""
    kernels, start = [], T
    for name, members, durations in rows:
        for call, duration in enumerate(durations):
            start += 10_000
            kernels.append(kernel(name, start, duration, nodes=members, iteration=call, launch=f"{name}:1"))
    profile = build(kernels, nodes)
    profile.iterations = max(len(durations) for _, _, durations in rows)
    profile.environment.update(environment)
    return profile


BEFORE = calls(("gemm", ("mm",), (1000, 1010, 1020)), ("pointwise", ("add",), (100, 120, 110)))
AFTER = calls(("gemm_2", ("mm",), (500, 505, 510)), ("pointwise", ("add",), (105, 125, 115)))


@pytest.fixture(autouse=True)
def no_ceilings(plan_dir: Path) -> None:
    """Labels rest on nothing that this machine keeps."""


def rows(table: pd.DataFrame, *columns: str) -> list[tuple[Any, ...]]:
    return list(table[list(columns)].itertuples(index=False, name=None))


def test_nodes_are_compared_by_name_with_the_spread_of_the_calls() -> None:
    found = diff(BEFORE, AFTER)
    columns = ("node", "before_ns", "after_ns", "change_ns", "clear")
    assert rows(found.nodes, *columns) == [("mm", 1010, 505, -505, True), ("add", 110, 115, 5, False)]
    assert found.nodes["ratio"].tolist() == pytest.approx([0.5, 115 / 110])
    assert found.nodes.loc[0, "target"] == "aten.mm.default" and found.nodes.loc[0, "line"] == 12


def test_a_kernel_that_is_gone_and_one_that_is_new_are_rows_of_their_own() -> None:
    found = diff(BEFORE, AFTER)
    assert rows(found.kernels, "name", "before_ns", "after_ns", "clear") == [
        ("gemm", 1010, 0, True), ("gemm_2", 0, 505, True), ("pointwise", 110, 115, False),
    ]  # fmt: skip
    assert math.isnan(found.kernels.loc[1, "ratio"]) and found.kernels.loc[0, "ratio"] == 0


def test_one_call_is_no_evidence_of_a_change() -> None:
    found = diff(calls(("gemm", ("mm",), (1000,))), calls(("gemm", ("mm",), (10,))))
    assert not found.nodes["clear"].any()
    assert sum("one measured call" in note for note in found.notes) == 2


@pytest.mark.parametrize("table", TABLES)
def test_every_table_sums_to_the_whole_and_says_what_it_holds(table: str) -> None:
    loose = calls(("gemm", ("mm",), (1000, 1010)), ("unknown", (), (7, 9)))
    found = diff(BEFORE, loose)
    data = getattr(found, table)
    assert list(data.columns) == [*TABLES[table], *TIMES]
    assert data["before_ns"].sum() == pytest.approx(BEFORE.total_ns / 3)
    assert data["after_ns"].sum() == pytest.approx(loose.total_ns / 2)
    assert (data["change_ns"].abs().diff().dropna() <= 0).all()
    assert data["change_ns"].sum() == pytest.approx(loose.total_ns / 2 - BEFORE.total_ns / 3)


def test_a_profile_beside_itself_shows_no_change() -> None:
    found = diff(BEFORE, BEFORE)
    for table in TABLES:
        assert (getattr(found, table)["change_ns"] == 0).all() and not getattr(found, table)["clear"].any()
    assert set(found.labels["change"]) <= {"stays"} and found.environment.empty and found.notes == ()


def test_a_line_is_found_again_below_lines_that_were_added() -> None:
    def lines(first: int, folder: str) -> list[dict[str, Any]]:
        at = {"file": f"{folder}/model.py", "source": "x = self.fc(x)"}
        return [node("mm", line=first, **at), node("add", line=first + 2, **at)]

    old = calls(("gemm", ("mm",), (10, 10)), ("p", ("add",), (4, 4)), nodes=lines(12, "/home/a"))
    new = calls(("gemm", ("mm",), (20, 20)), ("p", ("add",), (4, 4)), nodes=lines(40, "/home/b"))
    found = diff(old, new)
    assert rows(found.lines, "file", "line", "before_ns", "after_ns") == [
        ("/home/b/model.py", 40, 10, 20), ("/home/b/model.py", 42, 4, 4),
    ]  # fmt: skip


def test_totals_are_medians_with_their_range() -> None:
    found = diff(BEFORE, AFTER)
    assert (found.before.kernel_ns, found.before.kernel_low, found.before.kernel_high) == (1130, 1100, 1130)
    assert found.after.kernel_ns == 625 and found.before.kernels == 2 and found.before.attributed_share == 1


def test_labels_are_gone_new_or_stay() -> None:
    before, after = made_reports.graph(), made_reports.graph()
    after.labels = [made_reports.label(headroom=1e6), made_reports.label(Axis.COMPUTE_BOUND, 3e6)]
    found = diff(Report([before]), Report([after]))
    assert rows(found.labels, "change", "axis", "where", "before_ns", "after_ns") == [
        ("new", "compute_bound", ("mm",), 0, 3e6),
        ("gone", "launch_bound", (), 1e5, 0),
        ("stays", "memory_bound", ("mm",), 1.5e6, 1e6),
    ]


def test_what_was_kept_is_compared_graph_by_graph() -> None:
    before, after = made_reports.full(), made_reports.full()
    after.graphs.append(dataclasses.replace(made_reports.graph(), compile_id="1/0"))
    after.graphs[0].decision = "baseline"
    after.graphs[0].verdict = None
    found = diff(before, after)
    first, second = found.graphs.to_dict("records")
    assert first["before_passes"] == ("tf32_matmul",) and first["after_passes"] == ()
    assert first["before_error"] == 1e-6 and math.isnan(first["after_error"])
    assert second["compile_id"] == "1/0" and second["before_decision"] == "" and math.isnan(second["before_kept_ns"])
    assert found.before.kept_wall_ns == 2e6 and found.after.kept_wall_ns == 4e6 and found.after.graphs == 2
    assert any("1 and 2 graphs" in note for note in found.notes)
    # nodes of one name in two graphs are two nodes
    assert found.nodes["node"].tolist().count("mm") == 2


def test_differences_of_the_environment_are_named() -> None:
    before = calls(("g", ("mm",), (1, 2)), torch="2.11", clocks={"sm": 1980.0, "power": [1]}, date="yesterday")
    after = calls(
        ("g", ("mm",), (1, 2)), torch="2.13", clocks={"sm": 1970.0, "power": [1]}, device_name="A100", date="x"
    )
    found = diff(before, after)
    assert rows(found.environment, "name", "before", "after") == [
        ("device_name", "NVIDIA H200", "A100"), ("torch", "2.11", "2.13"),
    ]  # fmt: skip
    assert any("taken on different devices" in note for note in found.notes)


def test_clocks_that_moved_and_a_missing_profile_are_said() -> None:
    moved = calls(("g", ("mm",), (1, 2)), clocks={"drifted": True})
    assert any(note.startswith("the clocks moved after") for note in diff(BEFORE, moved).notes)
    plan = Report([dataclasses.replace(made_reports.graph(), profile=None)])
    found = diff(plan, moved)
    assert any("nothing was measured before" in note for note in found.notes)
    assert found.nodes["before_ns"].sum() == 0 and found.before.kept_wall_ns == 2e6


def test_a_diff_is_json_whatever_the_names_are() -> None:
    for a, b in ((made_reports.hostile(), made_reports.full()), (made_profiles.build([]), made_reports.hostile())):
        found = diff(a, b)
        assert json.loads(json.dumps(found.to_json(), allow_nan=False))["nodes"]


def test_an_attribute_that_is_no_table_is_refused() -> None:
    with pytest.raises(AttributeError, match="its tables are nodes, groups"):
        _ = diff(BEFORE, AFTER).rows


@pytest.mark.parametrize("column", ["node", "line", "module_path", "name", "nodes", "family", "operator"])
def test_times_of_the_calls_are_those_of_the_sums(column: str) -> None:
    profile = made_profiles.two_calls()
    each, together = per_call(profile, column), by(profile, column)
    assert each.shape[1] == profile.iterations
    means = dict(zip(each.index, each.mean(axis=1), strict=True))
    assert {key: pytest.approx(time) for key, time in means.items()} == dict(
        zip(together[column], together["time_ns"], strict=True)
    )
    with pytest.raises(KeyError, match="no column 'x'"):
        per_call(profile, "x")


def test_calls_are_counted_by_what_was_measured() -> None:
    profile = calls(("g", ("mm",), (5, 7)))
    profile.kernels["iteration"] += 2  # a trace's ProfilerStep#2 and #3
    profile.iterations = 3  # and one in which nothing ran
    assert per_call(profile, "name").to_numpy().tolist() == [[5.0, 7.0, 0.0]]


def test_two_recordings_of_one_model_are_compared(shared: Path) -> None:
    folder = shared / "captures" / "h200_graph"
    if not folder.is_dir():
        pytest.skip(f"there is no {folder}")
    graph = load(folder / "kineto.trace.json.gz", folder / "torch_trace.log.gz")
    plain = load(shared / "captures" / "h200_block" / "kineto.trace.json.gz")
    found = diff(plain, graph)
    assert found.families["before_ns"].sum() == pytest.approx(plain.total_ns / plain.iterations)
    assert found.families["after_ns"].sum() == pytest.approx(graph.total_ns / graph.iterations)
    assert "gemm" in set(found.families["family"])
