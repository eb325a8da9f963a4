"""What a report says of its times: where each comes from, where two contradict each other, what the limit cut off."""

from __future__ import annotations

import dataclasses
import io

import made_reports
import pytest
from rich.console import Console

from fxopt.report import markdown, terminal
from fxopt.report.measurements import contradiction, doubts, out_of_time
from fxopt.report.model import GraphReport, Report
from fxopt.report.page import words
from profiler_core.quantities import duration


def forms(graph: GraphReport) -> dict[str, str]:
    """What each form says of the graph, as words with single spaces; of the page, its first screen."""
    console = Console(file=io.StringIO(), width=80, color_system=None)
    terminal.render(Report([graph]), console)
    page = words.summary(graph.profile, graph.labels, graph)
    rows = [row["note"] for answer in page["answers"] for row in answer["rows"]]
    told = {
        "terminal": console.file.getvalue(),  # type: ignore[attr-defined]
        "markdown": markdown.render(Report([graph])).replace("\\_", "_").replace("\\`", "`"),
        "page": " ".join([page["detail"], *page["alerts"], *rows, *(answer["answer"] for answer in page["answers"])]),
    }
    return {name: " ".join(text.split()) for name, text in told.items()}


@pytest.fixture
def graph() -> GraphReport:
    """The profile and the comparison agree: a call takes 3 ms, its kernels 2.5 ms."""
    made = made_reports.graph()
    assert made.profile is not None
    kernels = made.profile.kernels
    kernels["duration_ns"] = (kernels["duration_ns"] * (2.5e6 / made.profile.kernel_ns)).astype("int64")
    made.profile = dataclasses.replace(made.profile, wall_ns=3e6, kernels=kernels)
    return made


def test_beside_each_time_stands_where_it_comes_from(graph: GraphReport) -> None:
    for name, text in forms(graph).items():
        assert "both timed in turns, at the end of tuning" in text, name
        assert "from the profile before any change" in text, name
    graph.kernel_ratio = None
    assert all("each from a recording of its own" in text for text in forms(graph).values())
    graph.decision, graph.ratio = "baseline", None
    assert all("timed in turns" not in text for text in forms(graph).values())


def test_two_measurements_of_one_thing_that_differ_are_told_with_a_remedy(graph: GraphReport) -> None:
    assert contradiction(graph) == ""
    assert graph.ratio is not None and graph.profile is not None
    graph.profile = dataclasses.replace(graph.profile, wall_ns=3e6 * (1 + 0.9 * graph.ratio.noise))
    assert contradiction(graph) == ""  # within the noise
    graph.profile = dataclasses.replace(graph.profile, wall_ns=9e6)
    said = contradiction(graph)
    assert said.count(".") == said.replace(". ", "").count(".") and "9.00 ms in the profile and 3.00 ms" in said
    assert "kernels" not in said
    for name, text in forms(graph).items():
        assert "9.00 ms in the profile and 3.00 ms in the comparison" in text.replace("\xa0", " "), name
        assert "quiet machine" in text and "fxopt bench" in text, name


def test_times_that_do_not_fit_their_ratio_are_told() -> None:
    found = made_reports.comparison()
    assert found.doubt == ""
    found.times["eager"] = 9e6
    assert "eager and Inductor took 9.00 ms and 3.00 ms" in found.doubt and "quiet" in found.doubt


def test_calls_that_did_not_take_equally_long_are_told(graph: GraphReport) -> None:
    assert doubts(graph) == []
    assert graph.profile is not None
    graph.profile = dataclasses.replace(graph.profile, iterations=3)  # in one of which nothing ran
    (said,) = [line for line in doubts(graph) if "did not take equally long" in line]
    assert duration(graph.profile.total_ns / graph.profile.iterations) in said
    assert all("did not take equally long" in text for text in forms(graph).values())


def test_a_time_limit_that_cut_tuning_short_is_told_at_once(graph: GraphReport) -> None:
    assert out_of_time(graph) == ""
    graph.out_of_reach += [f"pass_{i}: not tried, the time limit of 30 s is spent" for i in range(6)]
    for name, text in forms(graph).items():
        said = text.replace("\xa0", " ")
        assert (
            "The time limit of 30 s was spent before pass_0, pass_1, pass_2, pass_3 and 2 more could be tried" in said
        )
        assert "--time-limit" in said and "time_limit" in said and "Tuning took 6.00 s." in said, name
    text = forms(graph)["terminal"]
    assert text.index("The time limit") < text.index("Where the time goes")
    graph.source = "plan"  # which the next run would follow, whatever its limit
    assert f"raises it, once `fxopt plans remove {graph.key[:12]}` has removed the plan." in out_of_time(graph)
    assert "Tuning took" not in out_of_time(graph)
    graph.source, graph.candidates, graph.decision, graph.ratio = "tuned", [], "baseline", None
    assert "before anything was tried (next: pass_0" in out_of_time(graph)
    assert "No rewrite applies" not in forms(graph)["page"]


def test_how_long_tuning_took_is_told_in_any_case(graph: GraphReport) -> None:
    assert "Decided by: measuring in this process, in 6.00 s." in forms(graph)["terminal"]
    assert "Tuning took 6.00 s." in forms(graph)["page"]
