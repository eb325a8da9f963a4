"""Profiles, reports and diffs in a notebook: they show themselves, run nothing, and their frames can be queried."""

from __future__ import annotations

import html.parser
from collections import deque
from typing import Any

import made_profiles
import made_reports
import pytest
from test_report_diff import AFTER, BEFORE
from test_report_explain import a_report

import fxopt
from fxopt import rules
from fxopt.report import model
from fxopt.report.diff import diff
from fxopt.report.model import Report
from fxopt.report.notebook import LABEL_COLUMNS, labelled_nodes
from profiler_core.profiles import NODE_COLUMNS

TAGS = {"div", "p", "b", "code", "table", "thead", "tbody", "tr", "th", "td"}


class Checked(html.parser.HTMLParser):
    """Refuses tags and attributes that nothing here writes, and counts what is left open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert tag in TAGS and all(name == "style" and value.startswith("text-align:") for name, value in attrs)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_each_shows_its_summary() -> None:
    words = " ".join(Checked(made_reports.full()._repr_html_()).words)
    assert "kept  tf32_matmul , 1.50x the speed of Inductor's (1.40 to 1.60)" in words
    assert "memory_bound" in words and "2.00 ms" in words and "lstm" in words
    words = " ".join(Checked(made_profiles.two_calls()._repr_html_()).words)
    assert "4 kernels in 2 calls" in words and "mm aten.mm.default h.0.attn model.py:12" in words
    words = " ".join(Checked(diff(BEFORE, AFTER)._repr_html_()).words)
    assert words.startswith("A call: 1.13 us before, 625 ns after") and "gemm_2" in words


def test_names_from_elsewhere_are_text() -> None:
    report = made_reports.hostile()
    for subject in (report, report.graphs[0].profile, diff(report, made_reports.full())):
        text = subject._repr_html_()  # type: ignore[union-attr]
        assert "alert(1)" in "".join(Checked(text).words)
        assert text.isprintable() and len(text) < 60_000


def test_nothing_measured_shows_itself_too() -> None:
    assert "No graph reached fxopt" in Report()._repr_html_()
    Checked(made_profiles.build([], [])._repr_html_())
    assert list(Report().nodes.columns) == [*NODE_COLUMNS, *LABEL_COLUMNS, "part"]


def test_the_last_report_is_what_a_cell_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "_recent", deque(made_reports.full().graphs))
    assert "1.50x" in fxopt.last_report()._repr_html_()


@pytest.mark.parametrize(
    "query, found",
    [
        ("axis == 'tensor_core_idle'", ["mm"]),
        ("axis == ''", ["view"]),
        ("headroom_ns > 100", ["mm"]),
        ("time_ns > 100 and module_class == ''", ["mm", "add"]),
        ("share > 0.5", ["mm"]),
        ("module_path == 'h.0.attn' and line == 13", ["add", "mul"]),
        ("target == 'aten.mm.default'", ["mm"]),
        ("file.str.endswith('model.py') and estimate", ["add", "mul"]),
        ("flops > 0 and dtype == 'float32'", ["mm", "add", "mul", "view"]),
        ("kind == 'node' and not estimate and opaque", ["mm", "view"]),
    ],
)
def test_nodes_are_queried_by_what_they_are_and_what_limits_them(query: str, found: list[str]) -> None:
    assert a_report().nodes.query(query)["node"].tolist() == found


def test_of_several_limits_the_one_that_could_save_most_is_the_axis() -> None:
    (row,) = a_report().nodes.query("node == 'mm'").to_dict("records")
    assert row["axes"] == ("tensor_core_idle", "memory_bound") and row["headroom_ns"] == 500.0
    assert {name: str(dtype) for name, dtype in a_report().nodes[list(LABEL_COLUMNS)].dtypes.items()} == LABEL_COLUMNS


def test_counters_are_columns_to_query() -> None:
    profile = made_profiles.two_calls()
    profile.nodes["dram_throughput"] = [70.0, 20.0]
    assert profile.nodes.query("dram_throughput > 60")["node"].tolist() == ["mm"]


def test_a_bare_profile_gets_its_limits_from_the_rules() -> None:
    profile = made_profiles.two_calls()
    nodes = labelled_nodes(profile, rules.label(profile, None).labels)
    assert nodes["axis"].tolist() == ["", ""] and "axis" not in profile.nodes


def test_several_graphs_are_one_frame() -> None:
    report = Report([*a_report().graphs, *made_reports.full().graphs])
    assert report.nodes.query("part == 2")["node"].tolist() == ["mm", "add"] and len(report.nodes) == 6
