"""The pull request comment: short, its tables whole, and nothing in it that a name from elsewhere put there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import made_profiles
import made_reports
import pytest
from test_report_diff import AFTER, BEFORE

from fxopt.report.diff import diff
from fxopt.report.markdown import MOST_GRAPHS, code, escape, render
from fxopt.report.model import GraphReport, Report

MOST = 65_536  # characters of a comment on GitHub


@pytest.fixture(autouse=True)
def no_ceilings(plan_dir: Path) -> None:
    """Labels rest on nothing that this machine keeps."""


def outside_code(line: str) -> str:
    """The line without its code spans, as CommonMark finds them."""
    return re.sub(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", "", line)


def checked(text: str) -> str:
    """`text`, whose tables have as many cells in each row as in the head and which holds no tag but its own folds."""
    head: int | None = None
    for line in text.splitlines():
        assert line.replace("\xa0", "").isprintable()  # which holds a number and its unit together
        cells = len(re.findall(r"(?<!\\)\|", line))
        if line.startswith("| "):
            head = cells if head is None else head
            assert cells == head, line
        else:
            head = None
        bare = outside_code(line)
        for tag in ("<details>", "<summary>", "</summary>", "</details>"):
            bare = bare.replace(tag, "")
        assert not re.search(r"[<>@]|\]\(|://", bare), line
    assert text.count("<details>") == text.count("</details>") and text.endswith("\n") and len(text) < MOST
    text.encode("utf-8")
    return text


def subjects(report: Report) -> list[Any]:
    return [report, report.graphs[0].profile, diff(report, made_reports.full()), diff(made_reports.full(), report)]


@pytest.mark.parametrize("index", range(4))
def test_names_from_elsewhere_break_no_table_and_name_nobody(index: int) -> None:
    text = checked(render(subjects(made_reports.hostile())[index]))
    assert "alert(1)" in text  # told, as text


@pytest.mark.parametrize("index", range(4))
def test_every_form_has_whole_tables(index: int) -> None:
    checked(render(subjects(made_reports.full())[index]))


def test_a_report_begins_with_what_was_gained_at_what_error() -> None:
    text = render(made_reports.full()).replace("\xa0", " ")
    assert text.startswith("### fxopt: 1.50x (1.40 to 1.60) Inductor's speed\n")
    assert "| wall time a call, both timed in turns, at the end of tuning | 3.00 ms | 2.00 ms | -33.3 % |" in text
    assert "| relative L2 error against fp64 | 9.0e-07 | 1.0e-06 | limit 4.0e-06 |" in text
    assert "Kept passes: `tf32_matmul`." in text and "30 interleaved pairs" in text
    assert "<details><summary>What limits it: memory_bound, launch_bound</summary>\n\n| limit |" in text
    assert "| `pad_matmul[limit=2]` | rejected | faster |" in text


def test_a_report_of_nothing_and_one_of_many_graphs() -> None:
    assert "no graph reached it" in checked(render(Report()))
    text = checked(render(Report([made_reports.graph() for _ in range(20)])))
    assert text.count("### fxopt, graph") == MOST_GRAPHS and f"and {20 - MOST_GRAPHS} more graphs" in text
    assert "Inductor's own code is kept" in checked(render(Report([GraphReport(messages=["x | y"])])))


def test_a_profile_tells_lines_kernels_and_limits() -> None:
    text = checked(render(made_profiles.two_calls()))
    assert text.startswith("### fxopt: profile on `NVIDIA H200`\n")
    assert "| 1.00\xa0us | 50.0% | 1 | `gemm` |" in text
    assert "<details><summary>Environment</summary>" in text and "- a note" in text
    assert "No kernel ran" in checked(render(made_profiles.build([])))


def test_a_diff_shows_lines_first_and_folds_the_rest() -> None:
    text = checked(render(diff(BEFORE, AFTER))).replace("\xa0", " ")
    assert text.startswith("### fxopt: A call: 1.13 us before, 625 ns after (-44.7 %), kernel time\n")
    assert "| 1.01 us | 0 ns | gone | `gemm` |" in text and "| 110 ns | 115 ns | +4.5 % ~ | `pointwise` |" in text
    assert text.index("model.py:12") < text.index("<details>")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("gemm", "`gemm`"),
        ("a|b", r"`a\|b`"),
        ("a`b", "`` a`b ``"),
        ("``", "``` `` ```"),
        ("", ""),
        (" ", ""),
        ("a\nb", r"`a\nb`"),
        ("@someone <b>", "`@someone <b>`"),
    ],
)
def test_a_name_is_a_code_span(name: str, shown: str) -> None:
    assert code(name) == shown


def test_a_sentence_has_its_marks_escaped() -> None:
    assert escape("*a* [x](http://y) <b>@me|`") == r"\*a\* \[x\](http&#58;//y) &lt;b&gt;&#64;me\|\`"
    assert len(escape("x" * 5000)) == 400
