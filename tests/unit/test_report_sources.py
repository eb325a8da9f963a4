"""Reports and profiles go to files and come back, and a file that is none says what it is and what to do."""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import made_profiles
import made_reports
import pandas as pd
import pytest

from fxopt.plan import Plan, PlanStore
from fxopt.report import sources
from fxopt.report.model import GraphReport, Report, to_plain
from fxopt.report.restore import RestoreError, restore
from fxopt.report.sources import ReportFileError
from profiler_core.profiles import Profile

ROOT = Path(__file__).resolve().parents[2]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, pd.DataFrame):
        pd.testing.assert_frame_equal(a, b)
        return True
    if dataclasses.is_dataclass(a):
        pairs = [(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a)]
        return type(a) is type(b) and all(same(x, y) for x, y in pairs)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, float) and math.isnan(a):
        return isinstance(b, float) and math.isnan(b)
    return type(a) is type(b) and a == b


def unset(value: Any, place: str = "") -> Iterator[str]:
    """Fields in which a round trip could lose something unseen, for they hold nothing."""
    if dataclasses.is_dataclass(value) and not isinstance(value, Profile):
        for item in dataclasses.fields(value):
            held = getattr(value, item.name)
            if held is None or held == "" or held == [] or held == {} or held == ():
                yield f"{place}.{item.name}"
            yield from unset(held, f"{place}.{item.name}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from unset(item, f"{place}[{index}]")


def test_everything_in_a_report_comes_back_from_its_file(tmp_path: Path) -> None:
    report = dataclasses.replace(made_reports.full(), comparison=made_reports.comparison())
    # a threshold that is absent, and a label of the whole graph, are values too
    known = ("threshold", ".labels[1].nodes", ".labels[1].launch", ".labels[0].nodes", ".labels[0].launch")
    assert [place for place in unset(report) if not place.endswith(known)] == []
    sources.write(report, tmp_path / "new" / "report.json")
    again = sources.read(tmp_path / "new" / "report.json")
    assert isinstance(again, Report)
    # infinities are no numbers of JSON's: of a counter one is missing when it comes back
    kernels = report.graphs[0].profile.kernels  # type: ignore[union-attr]
    kernels["dram_read_bytes"] = kernels["dram_read_bytes"].replace(math.inf, math.nan)
    assert same(report, again)
    assert again.to_json() == report.to_json()


def test_a_report_of_nothing_comes_back(tmp_path: Path) -> None:
    for report in (Report(), Report([GraphReport(messages=["failed"])])):
        sources.write(report, tmp_path / "r.json")
        assert same(report, sources.read(tmp_path / "r.json"))


def test_a_number_that_json_cannot_hold_comes_back_as_nan(tmp_path: Path) -> None:
    report = made_reports.full()
    report.graphs[0].ratio = dataclasses.replace(made_reports.paired(), high=math.inf)
    report.graphs[0].verdict = dataclasses.replace(made_reports.verdict(), rel_l2=math.nan)
    sources.write(report, tmp_path / "r.json")
    (graph,) = sources.read(tmp_path / "r.json").graphs  # type: ignore[union-attr]
    assert math.isnan(graph.ratio.high) and math.isnan(graph.verdict.rel_l2) and graph.ratio.low == 1.4


@pytest.mark.parametrize("packed", [False, True])
def test_a_profile_is_read_from_json(tmp_path: Path, packed: bool) -> None:
    path, profile = tmp_path / "p.json", made_profiles.two_calls()
    sources.write(profile, path)
    if packed:
        path.write_bytes(gzip.compress(path.read_bytes()))
    again = sources.read(path)
    assert isinstance(again, Profile) and again.total_ns == profile.total_ns


def test_a_profile_is_read_from_its_parquet_folder(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    made_profiles.two_calls().to_parquet(tmp_path / "p")
    assert isinstance(sources.read(tmp_path / "p"), Profile)
    (tmp_path / "p" / "profile.json").write_text("{")
    with pytest.raises(ReportFileError, match=r"profile\.json: .*export the profile again"):
        sources.read(tmp_path / "p")


def a_plan() -> Plan:
    graph = made_reports.graph()
    return Plan(
        key=graph.key,
        decision="candidate",
        freeze=True,
        reports=[to_plain(entry) for entry in graph.candidates],
        verdict=to_plain(graph.verdict),
        paired=to_plain(graph.ratio),
        labels=[label.to_json() for label in graph.labels],
        profile={"kernel_ns": 2.5e6, "wall_ns": 3e6, "kept_kernel_ns": 1.25e6, "kept_wall_ns": 2e6, "floor_ns": 5e5},
        out_of_reach=graph.out_of_reach,
        tuning_seconds=6.0,
        calls_to_pay=1234.5,
        memory_bytes=graph.memory_bytes,
        ablation=to_plain(graph.ablation),
    )


def test_a_plan_tells_all_that_it_holds(tmp_path: Path) -> None:
    path, whole = PlanStore(tmp_path).save(a_plan()), made_reports.graph()
    for entry in whole.candidates:  # the graphs before and after each pass are the report's alone
        entry.reports = [dataclasses.replace(report, change="") for report in entry.reports]
    (graph,) = sources.read(path).graphs  # type: ignore[union-attr]
    held = (
        "key", "decision", "labels", "candidates", "out_of_reach", "ratio", "verdict", "frozen", "memory_bytes",
        "calls_to_pay", "ablation", "baseline_wall_ns", "kept_wall_ns", "baseline_kernel_ns", "kept_kernel_ns",
        "gap_to_floor", "passes",
    )  # fmt: skip
    for name in held:
        assert same(getattr(graph, name), getattr(whole, name)), name
    assert graph.source == "plan" and graph.profile is None and graph.plan_path == str(path)


@pytest.mark.parametrize(
    "change, place",
    [
        (lambda d: d.update(schema_version=1), r"schema_version: expected 2, got 1"),
        (lambda d: d.update(graphs={}), r"graphs: expected a list, got \{\}"),
        (lambda d: d["graphs"][0].update(decision=3), r"graphs\[0\]\.decision: expected a text, got 3"),
        (lambda d: d["graphs"][0]["ratio"].pop("low"), r"graphs\[0\]\.ratio\.low: is missing"),
        (lambda d: d["graphs"][0]["ratio"].update(pairs=True), r"ratio\.pairs: expected an integer, got True"),
        (lambda d: d["graphs"][0]["ratio"].update(low="1"), r"ratio\.low: expected a number, got '1'"),
        (lambda d: d["graphs"][0]["ratio"].update(low=10**400), r"ratio\.low: expected a number"),
        (lambda d: d["graphs"][0]["labels"][0].update(axis="slow"), r"labels\[0\]: label: field 'axis' is 'slow'"),
        (lambda d: d["graphs"][0]["ceilings"].pop("device"), r"ceilings: field 'device'"),
        (lambda d: d["graphs"][0]["profile"].pop("nodes"), r"profile: nodes: KeyError"),
        (lambda d: d["graphs"][0]["seconds"].update(x=[]), r"seconds\.x: expected a number, got \[\]"),
        (lambda d: d["graphs"][0]["candidates"][0]["reports"][0].update(refused=[["a"]]), r"expected 2 values, got 1"),
        (lambda d: d["graphs"][0]["ablation"][0]["alone"].update(wall=3), r"wall: expected an object, got 3"),
    ],
)
def test_a_report_that_is_not_one_names_the_file_the_place_and_the_remedy(
    tmp_path: Path, change: Any, place: str
) -> None:
    data = json.loads(json.dumps(made_reports.full().to_json()))
    change(data)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ReportFileError, match=rf"bad\.json: .*{place}.*; write it again"):
        sources.read(path)


def test_fields_of_a_later_version_are_left_out() -> None:
    data = made_reports.full().to_json()
    data["graphs"][0]["mood"] = "good"
    assert same(Report.from_json(data).graphs[0].ratio, made_reports.paired())


@pytest.mark.parametrize(
    "content, said",
    [
        (b"", "the file is empty"),
        (b" \n", "the file is empty"),
        (b'{"schema_version": 2, "graphs": [{"key"', r"line 1, column \d+: the file is cut short"),
        (b'{"schema_version": 2,, "graphs": []}', r"line 1, column \d+: not JSON"),
        (gzip.compress(b'{"a": 1}' * 99, mtime=0)[:-20], "cut short or damaged"),
        (b"[1, 2]", "JSON objects, and this is a list"),
        (b'"text"', "JSON objects, and this is a str"),
        (b"{}", "holds nothing"),
        (b'{"rows": [], "date": 1}', "its JSON object holds 'rows', 'date'"),
        (b'{"traceEvents": []}', r"a trace of torch\.profiler, no report: `fxopt load"),
        (b'[{"ph": "X", "name": "a"}]', r"a trace of torch\.profiler, no report"),
        (b"SQLite format 3\0" + b"\0" * 100, "a recording of nsys, no report: `fxopt load"),
        (b'"ID","Process ID"\n', "counters of ncu, no report"),
        (b"<!DOCTYPE html><html></html>", "an HTML page, which a browser opens; give the JSON"),
        (b"\x80\x02}q\x00.", "not JSON"),
        (b"# A page\n", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"key": "k", "decision": "baseline"}', "holds no plan"),
        (b'{"schema_version": 99, "key": "k", "decision": "baseline"}', "upgrade fxopt"),
        (b'{"schema_version": 99, "kernels": 1, "nodes": 1}', "schema_version: expected 2, got 99; write it again"),
    ],
)
def test_another_file_says_what_it_is_and_what_to_use(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "given"
    path.write_bytes(content)
    with pytest.raises(ReportFileError, match=said) as raised:
        sources.read(path)
    assert str(path) in str(raised.value)


def test_a_path_that_leads_nowhere_says_so(tmp_path: Path) -> None:
    with pytest.raises(ReportFileError, match="there is no such file"):
        sources.read(tmp_path / "none.json")
    with pytest.raises(ReportFileError, match="a folder; give the file in it"):
        sources.read(tmp_path)
    with pytest.raises(ReportFileError, match="cannot be read"):
        sources.read("nul\0.json")


@pytest.mark.parametrize("made", [made_reports.hostile, lambda: made_profiles.build([])], ids=["hostile", "empty"])
def test_hostile_names_come_back_as_they_were_but_for_what_json_cannot_hold(tmp_path: Path, made: Any) -> None:
    sources.write(made(), tmp_path / "h.json")
    again = sources.read(tmp_path / "h.json")
    assert again.to_json() == json.loads((tmp_path / "h.json").read_text())


def test_the_reports_in_the_results_are_told_from_other_files() -> None:
    found = sorted((ROOT / "results").rglob("*.json"))
    assert found
    for path in found:
        try:
            sources.read(path)
        except ReportFileError as error:
            assert "its JSON object holds" in str(error) or "JSON objects, and this is" in str(error)


def test_restoring_says_where() -> None:
    assert restore(dict[str, list[float]], {"a": [1, None]}, "x")["a"][0] == 1.0
    with pytest.raises(RestoreError, match=r"x\.a\[1\]: expected a number, got 'b'"):
        restore(dict[str, list[float]], {"a": [1, "b"]}, "x")
