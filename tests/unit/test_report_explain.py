"""Everything known of a node, found by its name or by what leads to it."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import made_reports
import pytest
from made_profiles import T, build, kernel, node

from fxopt.labels import Axis
from fxopt.registry import PassReport
from fxopt.report.explain import KERNEL_COLUMNS, UnknownNode, explain
from fxopt.report.model import Report
from profiler_core import load
from profiler_core.counters import COUNTERS
from profiler_core.profiles import Profile


def a_profile(**environment: Any) -> Profile:
    """A product, and two nodes in one fused kernel, of which one takes little."""
    fused = {"fused_with": ("mul",), "estimate": True, "group_time_ns": 120.0, "launches": ("triton_add:2",)}
    nodes = [
        node("mm", time_ns=900.0, group_time_ns=900.0, share=0.88, source="y = x @ w", bytes=900.0),
        node("add", time_ns=119.0, share=0.116, line=13, **fused),
        node("mul", time_ns=1.0, share=0.001, line=13, **{**fused, "fused_with": ("add",)}),
        node("view", time_ns=0.0, share=0.0, kernels=0, launches=(), line=14),
    ]
    rows = []
    for call in range(2):
        rows.append(kernel("gemm", T + call, 900, iteration=call))
        rows.append(
            kernel("triton_add", T + 50 + call, 120, iteration=call, nodes=("add", "mul"), launch="triton_add:2")
        )
    profile = build(rows, nodes)
    profile.launches = (
        dataclasses.replace(profile.launches[0], flops=1800.0, bytes=900.0),
        dataclasses.replace(profile.launches[0], kernel="triton_add", handle=2, nodes=("add", "mul"), flops=None),
    )
    profile.environment.update({"device_type": "cuda", **environment})
    return profile


def a_report(**changes: Any) -> Report:
    graph = made_reports.graph(a_profile())
    graph.labels = [
        made_reports.label(Axis.MEMORY_BOUND, 300.0),
        made_reports.label(Axis.TENSOR_CORE_IDLE, 500.0),
        dataclasses.replace(made_reports.label(nodes=("add", "mul"), headroom=50.0), launch="triton_add:2"),
        made_reports.label(Axis.LAUNCH_BOUND, 200.0, ()),
    ]
    for name, value in changes.items():
        setattr(graph, name, value)
    return Report([graph])


def test_a_node_has_its_place_its_time_its_kernels_and_its_rates() -> None:
    found = explain(a_report(), "mm")
    assert (found.node, found.file, found.line, found.source) == ("mm", "/home/alice/net/model.py", 12, "y = x @ w")
    assert (found.time_ns, found.share, found.rank, found.count) == (900.0, 0.88, 1, 3)
    assert list(found.kernels.columns) == list(KERNEL_COLUMNS)
    (row,) = found.kernels.to_dict("records")
    assert (row["name"], row["kernels"], row["time_ns"], row["registers"]) == ("gemm", 1.0, 900.0, 32)
    assert found.flop_rate == pytest.approx(2e9) and found.byte_rate == pytest.approx(1e9)
    assert found.ceilings is not None and found.ceilings.device == "NVIDIA H200"
    assert math.isnan(explain(a_report(), "add").flop_rate)


def test_its_labels_are_those_of_its_kernels_and_of_the_graph() -> None:
    found = explain(a_report(), "mm")
    assert [label.axis for label in found.labels] == [Axis.TENSOR_CORE_IDLE, Axis.MEMORY_BOUND]
    assert [label.axis for label in found.graph_labels] == [Axis.LAUNCH_BOUND]
    # of a fused kernel, whichever of its nodes is asked for
    assert [label.headroom_ns for label in explain(a_report(), "mul").labels] == [50.0]


def test_a_launch_of_that_name_in_another_graph_is_not_meant() -> None:
    report = a_report()
    report.graphs[0].labels = [dataclasses.replace(made_reports.label(), nodes=("mm_7", "mm_8"))]
    assert explain(report, "mm").labels == ()


def test_the_lines_around_it_come_with_it() -> None:
    report = a_report()
    profile = report.graphs[0].profile
    assert profile is not None
    profile.sources = {"/home/alice/net/model.py": {n: f"line {n}" for n in range(1, 30)}}
    assert list(explain(report, "mm").context) == [9, 10, 11, 12, 13, 14, 15]


def test_what_passes_refused_at_it_is_told_once_and_what_was_kept_first() -> None:
    report = a_report()
    early, kept = report.graphs[0].candidates
    early.reports = [
        PassReport("pad_matmul", "joint", refused=(("mm", "its sizes are aligned"), ("other", "x"))),
        PassReport("tf32_matmul", "joint", refused=(("pre_mm", "symbolic sizes"),)),
    ]
    kept.reports = [PassReport("tf32_matmul", "joint", refused=(("pre_mm", "symbolic sizes"),))]
    assert [(t.pass_name, t.did, t.reason, t.outcome) for t in explain(report, "mm").tried] == [
        ("tf32_matmul", "refused", "symbolic sizes", "kept"),
        ("pad_matmul", "refused", "its sizes are aligned", "rejected"),
    ]


def test_counters_have_their_units_and_meaning() -> None:
    profile = a_profile()
    assert explain(Report([made_reports.graph(profile)]), "mm").counters == ()
    profile.kernels["counters"] = "measured"
    profile.kernels["dram_throughput"] = 55.5
    profile.kernels["l2_hit_rate"] = math.nan
    found = explain(Report([made_reports.graph(profile)]), "mm").counters
    (reading,) = [one for one in found if one.name not in ("registers", "shared_memory")]  # which every launch has
    known = {counter.key: counter for counter in COUNTERS}
    assert (reading.name, reading.value, reading.unit) == ("dram_throughput", 55.5, "%")
    assert reading.meaning == known["dram_throughput"].meaning


def test_the_next_steps_name_what_answers_each_limit_and_what_came_of_it() -> None:
    report = a_report(
        out_of_reach=["promote_matmul_precision: needs precision='bf16', and 'fp32' was asked for; it would answer"]
    )
    report.graphs[0].candidates[0].subject = "split_precision_gemm"
    report.graphs[0].candidates[0].reason = "not shown to be faster"
    text = "\n".join(explain(report, "mm").next_steps)
    assert "tensor_core_idle, up to 500 ns a call: " in text and "launch_bound, up to 200 ns" in text
    assert "In the kept code: tf32_matmul." in text
    assert "split_precision_gemm was rejected: not shown to be faster." in text
    assert "promote_matmul_precision is out of reach: needs precision='bf16'" in text
    assert 'with counters="full" more rules can be asked' in text


def test_of_a_bare_profile_the_passes_that_answer_are_offered(plan_dir: Path) -> None:
    profile = a_profile(device_name="a device of which nothing is kept")
    found = explain(profile, "mm")
    assert found.ceilings is None and any("lacks" in line for line in found.missing)
    assert any(step.startswith("No rule fired") for step in found.next_steps)
    profile.wall_ns = 1e6
    assert any("fxopt.optimize(model, inputs) tries them" in step for step in explain(profile, "mm").next_steps)


def test_a_node_that_takes_little_says_where_to_look_instead() -> None:
    steps = explain(a_report(), "mul").next_steps
    assert steps[0].startswith("It takes 0.1% of the kernel time") and "The longest node is mm, with 88%" in steps[0]
    assert "Its time is a share of a fused kernel" in steps[1] and "(120 ns a call)" in steps[1]
    assert explain(a_report(), "view").next_steps[0].startswith("No kernel time is spent on it")


@pytest.mark.parametrize(
    "name, node_name, others",
    [
        ("add", "add", ()),
        ("add (0/0)", "add", ()),
        ("gemm", "mm", ()),  # a kernel
        ("triton_add:2", "add", ("mul (0/0)",)),  # a launch
        ("triton_add", "add", ("mul (0/0)",)),
        ("model.py:13", "add", ("mul (0/0)",)),  # a line
        ("net/model.py:12", "mm", ()),
    ],
)
def test_a_node_is_found_by_its_name_or_by_what_leads_to_it(name: str, node_name: str, others: Any) -> None:
    found = explain(a_report(), name)
    assert found.node == node_name and found.others == others


def test_of_several_graphs_the_longest_node_is_told_and_the_others_named() -> None:
    report = Report([*a_report().graphs, *a_report(compile_id="1/0").graphs])
    assert report.graphs[1].profile is not None
    report.graphs[1].profile.nodes["graph"] = ""  # a profile of one graph need not name it
    report.graphs[1].profile.kernels["graph"] = ""
    report.graphs[1].profile.nodes.loc[0, "time_ns"] = 2000.0
    found = explain(report, "mm")
    assert found.time_ns == 2000.0 and found.part == "graph 2 of 2" and found.others == ("mm (0/0)",)
    assert explain(report, "mm (0/0)").time_ns == 900.0 and explain(report, "mm (1/0)").time_ns == 2000.0


def test_an_unknown_name_gets_those_like_it() -> None:
    with pytest.raises(UnknownNode) as raised:
        explain(a_report(), "vieww")
    assert str(raised.value) == "no node is named 'vieww'; did you mean 'view'?"
    with pytest.raises(KeyError, match=r"the ones that take most time are mm, add, mul, view"):
        explain(a_report(), "\0" * 5000)
    for name in ("model.py:99", "odel.py:12", "", ":12"):
        with pytest.raises(UnknownNode):
            explain(a_report(), name)
    with pytest.raises(UnknownNode, match="the report holds no profile"):
        explain(a_report(profile=None), "mm")


def test_an_explanation_is_json_whatever_the_names_are() -> None:
    report = made_reports.hostile()
    for name in report.graphs[0].profile.nodes["node"]:  # type: ignore[union-attr]
        json.dumps(explain(report, name).to_json(), allow_nan=False)


def test_every_node_of_a_real_trace_can_be_explained(shared: Path, plan_dir: Path) -> None:
    folder = shared / "captures" / "h200_dynamic"
    if not folder.is_dir():
        pytest.skip(f"there is no {folder}")
    profile = load(folder / "kineto.trace.json.gz", folder / "torch_trace.log.gz")
    rows = profile.nodes.to_dict("records")
    for row in rows[:: max(1, len(rows) // 12)]:
        found = explain(profile, f"{row['node']} ({row['graph']})")
        assert (found.time_ns, found.graph) == (row["time_ns"], row["graph"])
        assert found.kernels["time_ns"].sum() == pytest.approx(row["group_time_ns"])
