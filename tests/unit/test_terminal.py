"""The terminal report: what it says, that it fits 80 columns, and that names are never read as markup."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

from fxopt.ablation import AblationRow, Timing
from fxopt.report import terminal
from fxopt.report.model import CandidateReport, GraphReport, Report

LONG = "triton_red_fused__to_copy_add_native_layer_norm_" + "view_" * 40 + "17"


def text_of(report: Report, width: int = 80, **console: Any) -> str:
    out = io.StringIO()
    terminal.render(report, Console(file=out, width=width, highlight=False, **console))
    return out.getvalue()


def words_of(report: Report) -> str:
    """The report with line breaks and indents folded, for sentences that wrap."""
    return " ".join(text_of(report).split())


def a_profile(**changes: Any) -> SimpleNamespace:
    groups = [
        dict(
            launch="g:1",
            kernel=LONG,
            nodes=("addmm_3",),
            time_ns=60_000.0,
            share=0.6,
            file="/x/gpt2.py",
            line=12,
        ),
        dict(launch="k:2", kernel="cpp_fused", nodes=("add_1", "mul_2", LONG), time_ns=30_000.0, share=0.3),
    ]
    base = dict(flops=1.0, bytes=1.0, dtype="float32", extern=True, file="", line=0, module_path="h.0.mlp.c_fc")
    base["graph"] = "0/0"
    nodes = [
        dict(
            node="addmm_3",
            file="/x/gpt2.py",
            line=12,
            source="x = self.c_fc[red](x)",
            time_ns=60_000.0,
            share=0.6,
        ),
        dict(
            node="addmm_9",
            file="/x/gpt2.py",
            line=12,
            source="x = self.c_fc[red](x)",
            time_ns=5_000.0,
            share=0.05,
        ),
        dict(node="add_1", file="/x/gpt2.py", line=40, source="y = x + 1", time_ns=30_000.0, share=0.3),
        dict(node="view", file="/x/gpt2.py", line=41, source="y.view(-1)", time_ns=0.0, share=0.0),
    ]
    frame = pd.DataFrame(nodes).assign(estimate=False)
    values: dict[str, Any] = dict(
        attributed_share=0.95, kernel_ns=100_000.0, wall_ns=120_000.0, iterations=5, unattributed_ns=25_000,
        total_ns=500_000,
        nodes=frame,
        groups=lambda: pd.DataFrame([{**base, **row} for row in groups]),
        unattributed=lambda: pd.DataFrame([dict(name=LONG, duration_ns=25_000)]),
    )  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


def a_verdict(**changes: Any) -> Any:
    values: dict[str, Any] = dict(
        ok=True, reason="", rel_l2=1.1e-6, max_abs=3e-5, baseline_rel_l2=1.0e-6, limit=4e-6,
        nan_agree=True, top1=None, checked=3,
    )  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


def a_ratio(ratio: float = 1.45, marked: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(ratio=ratio, low=ratio - 0.03, high=ratio + 0.03, pairs=30, noise=0.012, marked=marked)


def a_label(axis: str, headroom: float, **changes: Any) -> Any:
    evidence = SimpleNamespace(metric="share_of_roof", value=0.82, threshold=0.6, unit="1", source="measured")
    more = SimpleNamespace(metric="time", value=3e3, threshold=None, unit="ns", source="modelled")
    values = dict(
        axis=SimpleNamespace(value=axis), scope="group", nodes=("addmm_3",), launch="extern_kernels.addmm:3",
        evidence=(evidence, more), confidence="high", headroom_ns=headroom,
        why="the kernel runs near the roof", backward=False,
    )  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


def a_pass(name: str, **changes: Any) -> Any:
    values = dict(name=name, stage="joint", matched=5, rewritten=3, refused=(), changed=True, error="")
    return SimpleNamespace(**{**values, **changes})


def a_graph(**changes: Any) -> GraphReport:
    refused = (*((f"softmax_{i}", "its input is not a matrix") for i in range(12)), ("mm_7", "symbolic size"))
    kept: Any = CandidateReport(
        "freeze_weights", ["freeze_weights"], [a_pass("freeze_weights", refused=refused)],
        a_verdict(), a_ratio(), 70_000.0, "kept", "", 21.4,
    )  # fmt: skip
    failed: Any = CandidateReport(
        "promote[bf16]",
        ["promote"],
        [a_pass("promote", error="KeyError: 'val'")],
        outcome="failed",
        reason="raised",
    )
    memory = [a_label("memory_bound", 1e6 - i) for i in range(5)]
    values: dict[str, Any] = dict(
        key="0123456789abcdef", decision="candidate", source="tuned", profile=a_profile(),
        labels=[*memory, a_label("launch_bound", 2e6, scope="graph")],
        missing=["rule l2_bound did not fire: lacks metric l2_hit_rate"] * 2,
        candidates=[kept, failed], out_of_reach=["cuda_graphs: no CUDA device"],
        baseline_wall_ns=120e6, kept_wall_ns=83e6, baseline_kernel_ns=100e6, kept_kernel_ns=70e6,
        ratio=a_ratio(), verdict=a_verdict(), seconds={"baseline_compile": 47.2, "measuring": 3.0},
        plan_path="plans/0123.json", messages=["one weight is shared [bold]"], frozen=True,
        memory_bytes=3 * 2**29, calls_to_pay=1234.0,
    )  # fmt: skip
    return GraphReport(**{**values, **changes})


def test_seconds_become_minutes_only_when_they_are_many() -> None:
    assert [terminal.seconds(value) for value in (0.44, 47.2, 200.0, None)] == [
        "440 ms",
        "47.2 s",
        "3 min 20 s",
        "-",
    ]


@pytest.mark.parametrize("width", [1, 3, 4, 5, 10, 30])
def test_a_long_name_is_cut_in_the_middle_to_exactly_the_width(width: int) -> None:
    short = terminal.shorten(LONG, width)
    assert len(short) == width
    if width > 5:
        assert short.startswith("tri") and short.endswith("17") and "..." in short


def test_a_name_that_fits_is_left_alone() -> None:
    assert terminal.shorten("addmm", 5) == "addmm"


@pytest.mark.parametrize("width", [80, 100])
def test_the_whole_report_fits_the_width(width: int) -> None:
    lines = text_of(Report([a_graph(), a_graph()]), width).splitlines()
    assert max(len(line) for line in lines) <= width


def test_without_a_terminal_there_are_no_escape_codes() -> None:
    assert "\x1b" not in text_of(Report([a_graph()]))


def test_colour_carries_nothing_that_the_text_does_not() -> None:
    import re

    report = Report([a_graph()])
    coloured = text_of(report, force_terminal=True, color_system="truecolor")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert "\x1b" in coloured
    assert plain.split() == text_of(report).split()


def test_names_that_look_like_markup_print_as_they_are() -> None:
    text = words_of(Report([a_graph()]))
    assert "x = self.c_fc[red](x)" in text
    assert "promote[bf16]" in text
    assert "one weight is shared [bold]" in text


def test_the_decision_its_times_and_its_evidence_are_stated() -> None:
    text = words_of(Report([a_graph()]))
    assert "kept freeze_weights" in text
    assert "Wall a call: 83.0 ms (baseline 120 ms), both timed in turns" in text
    assert "Kernels a call: 70.0 ms (baseline 100 ms), " in text
    assert "1.45x the baseline's speed (95 % interval 1.42 to 1.48, 30 pairs, noise 1.2 %)" in text
    assert "relative L2 error 1.1e-06 against fp64 (baseline 1.0e-06, limit 4.0e-06)" in text
    assert "The weights are folded into the code" in text
    assert "holds 1.50 GiB more memory" in text
    assert "after 1,234 calls" in text
    assert "baseline compile 47.2 s, measuring 3.00 s; 50.2 s together" in text
    assert "cuda_graphs: no CUDA device" in text


def test_the_gap_to_the_floor_is_told_before_and_after() -> None:
    graph = a_graph(floor_ns=20e6, floor_flops=8.7e10, floor_bytes=3 * 2**29)
    says = "Floor by the roofline: 20.0 ms a call (87.0 GFLOP, 1.61 GB); gap to the floor: 5.00x before, 3.50x after."
    assert says in words_of(Report([graph]))
    assert "Floor" not in words_of(Report([a_graph()]))


def test_under_the_kernel_objective_the_kernels_ratio_is_told_too() -> None:
    assert "Kernel times, side by side: 2.00x" in words_of(Report([a_graph(kernel_ratio=a_ratio(2.0))]))


def test_a_candidate_says_what_it_could_save_and_what_memory_it_takes() -> None:
    candidate = CandidateReport(
        "split", ["split"], step="add", subject="split", headroom_ns=2e6, headroom_by_class={"A": 1.5e6, "": 5e5},
        memory_bytes=2**29, peak_bytes=2**28,
    )  # fmt: skip
    text = words_of(Report([a_graph(candidates=[candidate])]))
    assert "split could save up to 2.00 ms, in 1 class(es) of repeated layers" in text
    assert "holds 512 MiB more memory, 256 MiB during a call" in text
    assert "more memory" not in words_of(Report([a_graph(memory_bytes=0)]))


def test_the_ablation_shows_each_kept_pass_alone_and_removed_and_why_others_are_not_there() -> None:
    timing = Timing(7e4, kernel=a_ratio(2.41), wall=a_ratio(1.2))
    rows = [
        AblationRow("split_precision_gemm", alone=timing, removed=Timing(9e4, a_ratio(1.3), None)),
        AblationRow("freeze", reason="alone: freeze found nothing to do"),
        AblationRow("promote", outcome="rejected", reason="wrong: error above the limit"),
    ]
    text = words_of(Report([a_graph(ablation=rows)]))
    assert "1.20x (1.17-1.23) 2.41x (2.38-2.44) alone split_precision_gemm" in text
    assert "- 1.30x (1.27-1.33) in the set split_precision_gemm" in text
    assert "- freeze, kept: alone: freeze found nothing to do" in text
    assert "- promote, rejected: wrong: error above the limit" in text
    lines = text_of(Report([a_graph(ablation=rows)])).splitlines()
    assert max(map(len, lines)) <= 80


def test_a_wrong_result_is_called_wrong_with_the_reason() -> None:
    verdict = a_verdict(ok=False, reason="error 3e-2 above the limit", nan_agree=False, top1=0.5)
    text = words_of(Report([a_graph(verdict=verdict)]))
    assert "Numerics: WRONG" in text and "error 3e-2 above the limit" in text
    assert "NaN and Inf DIFFER" in text and "top-1 agreement 50.0 %" in text


def test_a_ratio_that_was_marked_says_so() -> None:
    assert "marked: clocks moved" in words_of(Report([a_graph(ratio=a_ratio(marked=("clocks moved",)))]))


@pytest.mark.parametrize(
    ("source", "says"),
    [("plan", "nothing was measured"), ("apply", "never measures"), ("fallback", "plain Inductor")],
)
def test_where_the_decision_comes_from_is_stated(source: str, says: str) -> None:
    graph = a_graph(source=source, decision="baseline", profile=None, labels=[], candidates=[])
    text = words_of(Report([graph]))
    assert says in text and "kept the baseline" in text


def test_refusals_are_grouped_by_reason_and_counted() -> None:
    text = words_of(Report([a_graph()]))
    assert "matched 5, rewritten 3, refused 13" in text
    assert text.count("its input is not a matrix") == 1
    assert "softmax_0, softmax_1 +10: its input is not a matrix" in text
    assert "refused mm_7: symbolic size" in text


def test_a_failing_pass_shows_its_error() -> None:
    text = words_of(Report([a_graph()]))
    assert "promote[bf16]: failed: raised" in text and "failed: KeyError: 'val'" in text


def test_labels_are_grouped_by_axis_largest_headroom_first_with_their_evidence() -> None:
    text = words_of(Report([a_graph()]))
    assert text.index("launch_bound: the graph, could save up to 2.00 ms") < text.index("memory_bound: 5 kernel(s)")
    assert "share_of_roof = 0.82 (threshold 0.6), measured; time = 3.00 us, modelled" in text
    assert "and 2 more" in text
    assert text.count("the kernel runs near the roof") == 2, "once an axis"
    assert "lacks metric l2_hit_rate (2 times)" in text


def test_a_source_line_that_runs_in_every_layer_is_one_row_with_the_sum() -> None:
    lines = terminal.by_source_line(a_profile().nodes)
    assert list(lines["line"]) == [12, 40], "the line without time is left out"
    assert list(lines["time_ns"]) == [65_000.0, 30_000.0]
    assert "65.0 us" in text_of(Report([a_graph()]))


def test_attribution_and_what_is_left_over_are_stated() -> None:
    text = words_of(Report([a_graph()]))
    assert "95.0 % of kernel time attributed to FX nodes" in text
    assert "Unattributed: 5.00 us a call" in text


def test_estimates_are_called_estimates() -> None:
    profile = a_profile()
    assert "an estimate" not in words_of(Report([a_graph(profile=profile)]))
    profile.nodes["estimate"] = True
    assert "an estimate" in words_of(Report([a_graph(profile=profile)]))


def test_a_model_without_a_graph_is_reported_loudly() -> None:
    text = words_of(Report([], ["the model was left to eager"]))
    assert "No graph reached fxopt" in text and "nn.LSTM" in text and "the model was left to eager" in text
