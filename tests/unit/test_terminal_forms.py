"""Profiles, diffs and explanations as text: they fit 80 columns, need no colour, and no name harms them."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_profiles
import made_reports
import pytest
from rich.cells import cell_len
from rich.console import Console
from test_report_diff import AFTER, BEFORE
from test_report_explain import a_report

from fxopt.report import terminal
from fxopt.report.diff import diff
from fxopt.report.explain import explain
from fxopt.report.model import Report
from fxopt.report.printing import clean, shorten
from profiler_core import load


def text_of(render: Callable[..., None], *given: Any, width: int = 80, **console: Any) -> str:
    out = io.StringIO()
    render(*given, Console(file=out, width=width, highlight=False, **console))
    return out.getvalue()


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture(autouse=True)
def no_ceilings(plan_dir: Path) -> None:
    """Labels rest on nothing that this machine keeps."""


def hostile_forms() -> list[tuple[Callable[..., None], Any]]:
    report = made_reports.hostile()
    profile = report.graphs[0].profile
    names = profile.nodes["node"].tolist()  # type: ignore[union-attr]
    return [
        (terminal.render, report),
        (terminal.render_profile, profile),
        (terminal.render_diff, diff(report, made_reports.full())),
        (terminal.render_diff, diff(made_reports.full(), report)),
        *((terminal.render_explanation, explain(report, name)) for name in (names[0], names[1], names[-1])),
    ]


def test_hostile_names_move_no_cursor_and_break_no_line() -> None:
    for render, subject in hostile_forms():
        text = text_of(render, subject)
        text.encode("utf-8")
        assert not re.search(
            r"[^\n\x20-\x7e\xa0-\u200a\u2010-\u2027\u202f-\u205f\u2070-\uffff\U00010000-\U0010ffff]", text
        )
        assert max(map(cell_len, text.splitlines())) <= 80
        assert len(text) < 60_000


@pytest.mark.parametrize("width", [80, 120])
def test_every_form_fits_its_width_and_needs_no_colour(width: int) -> None:
    for render, subject in (
        (terminal.render, made_reports.full()),
        (terminal.render_profile, made_profiles.two_calls()),
        (terminal.render_diff, diff(BEFORE, AFTER)),
        (terminal.render_diff, diff(made_reports.full(), BEFORE)),
        (terminal.render_explanation, explain(a_report(), "mm")),
    ):
        plain = text_of(render, subject, width=width)
        assert "\x1b" not in plain and max(map(len, plain.splitlines())) <= width
        coloured = text_of(render, subject, width=width, force_terminal=True, color_system="truecolor")
        assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain


def test_a_profile_says_how_long_where_and_what_limits_it() -> None:
    text = words(text_of(terminal.render_profile, made_profiles.two_calls()))
    assert "Profile of 2 measured calls on NVIDIA H200: 4 kernels" in text
    assert "99.9% is attributed (99.9% to FX nodes, 0.0% to operators outside of graphs)" in text
    assert "1.50 us" not in text and "Kernels time share a call kernel kind" in text
    assert "No rule fired." in text and "no ceilings of NVIDIA H200 are kept on this machine" in text
    assert "could not be asked of everything (" in text
    assert text.endswith("Notes - a note")


def test_labels_that_are_given_are_shown_in_place_of_the_rules() -> None:
    text = words(text_of(terminal.render_profile, made_profiles.two_calls(), **{})) and text_of(
        lambda profile, console: terminal.render_profile(profile, console, [made_reports.label()]),
        made_profiles.two_calls(),
    )
    assert "memory_bound: 1 kernel(s), could save up to 1.50 ms a call." in words(text) and "No rule" not in text


def test_a_profile_without_a_kernel_says_so() -> None:
    assert "No kernel ran in the measured calls." in text_of(terminal.render_profile, made_profiles.build([]))


def test_eager_operators_are_shown_with_the_lines_that_call_them(shared: Path) -> None:
    file = shared / "captures" / "h200_block" / "kineto.trace.json.gz"
    if not file.is_file():
        pytest.skip(f"there is no {file}")
    text = words(text_of(terminal.render_profile, load(file)))
    assert "Where the time goes: by operator (244 us of kernels in a call)" in text
    assert "133 us 54.5 % aten::mm" in text


def test_a_diff_says_what_changed_and_what_is_within_the_noise() -> None:
    text = text_of(terminal.render_diff, diff(BEFORE, AFTER))
    assert words(text).startswith("A call: 1.13 us before, 625 ns after (-44.7 %), kernel time")
    assert re.search(r"1\.01 us +505 ns +-50\.0 % +mm\b", text)
    assert re.search(r"110 ns +115 ns +\+4\.5 % +~ +add\b", text)
    assert re.search(r"1\.01 us +0 ns +gone +gemm\b", text) and re.search(r"0 ns +505 ns +new +gemm_2\b", text)
    assert "~ no more than the calls of either side differ by, or measured once" in text


def test_a_diff_of_reports_tells_decisions_labels_and_environment() -> None:
    before, after = made_reports.full(), made_reports.full()
    after.graphs[0].decision, after.graphs[0].labels, after.graphs[0].kept_wall_ns = "baseline", [], 3e6
    after.graphs[0].profile.environment["torch"] = "2.13"  # type: ignore[union-attr]
    text = words(text_of(terminal.render_diff, diff(before, after)))
    assert text.startswith("A call: 2.00 ms before, 3.00 ms after (+50.0 %), wall time of the kept code")
    assert "graph 1: tf32_matmul, then Inductor's own code; wall +50.0 %" in text
    assert "gone: memory_bound on mm, up to 1.50 ms a call" in text and "gone: launch_bound on the graph" in text
    assert "torch: None, then 2.13" in text


def test_equal_sides_make_a_short_diff() -> None:
    text = words(text_of(terminal.render_diff, diff(BEFORE, BEFORE)))
    assert "(+0.0 %)" in text and "largest changes" not in text


def test_an_explanation_shows_the_line_the_kernels_the_limits_and_what_to_do() -> None:
    report = a_report()
    profile = report.graphs[0].profile
    assert profile is not None
    profile.sources = {"/home/alice/net/model.py": {11: "# before", 12: "y = x @ w", 13: "z = y[red]"}}
    text = text_of(terminal.render_explanation, explain(report, "mm"))
    assert ">   12  y = x @ w\n    13  z = y[red]" in text
    told = words(text)
    assert (
        "mm: aten.mm.default Node of graph 0/0: 900 ns a call, 88.0% of the kernel time, the longest of 3 nodes."
        in told
    )
    assert "its kernels reach 2.00 GFLOP/s (0.0005 % of the fastest products measured) and 1.00 GB/s" in told
    assert "900 ns 1 gemm 2x1x1 of 128, 32 registers" in told
    assert "tensor_core_idle: could save up to 500 ns a call, confidence high" in told
    assert "launch_bound: the whole graph: could save up to 200 ns" in told
    assert "What to do next - tensor_core_idle" in told
    assert "One kernel with: mul; all together 120 ns a call." in words(
        text_of(terminal.render_explanation, explain(report, "add"))
    )


def test_many_rules_that_lack_something_take_one_sentence() -> None:
    lines = [f"rule r{i} did not fire on 3 groups (a: b, c, d): lacks x, y{i % 2}" for i in range(20)]
    found = terminal.lacking(["no hardware counters: refused", *lines])
    assert found[0] == "no hardware counters: refused"
    assert found[1].startswith("20 rules could not be asked of everything (r0, r1,") and found[1].endswith("x, y0, y1")
    assert terminal.lacking([]) == []
    assert Report([made_reports.graph()])


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("plain [red] name", "plain [red] name"),
        ("ünï", "ünï"),
        ("a\nb\x1b[31m", "a\\nb\\x1b[31m"),
        ("\u202eabc\u2066", "\\u202eabc\\u2066"),
        ("k\ud800", "k\\ud800"),
        ("\u2028", "\\u2028"),
    ],
)
def test_what_cannot_be_seen_is_escaped(name: str, shown: str) -> None:
    assert clean(name) == shown
    assert len(shorten(name * 900, 30)) == 30
