"""Each rule fires where its condition holds, not just below it, and says what it lacked."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from fxopt.labels import Axis, Label
from fxopt.rules import RULES, LabelReport, UnknownThreshold, label, thresholds
from profiler_core.roofline import Ceilings

# One byte/ns to memory; ridges at 10 (float32), 80 (bfloat16) and 40 (tf32) FLOP/byte.
GPU = Ceilings(
    "test GPU",
    1e9,
    {"float32": 1e10, "tf32": 4e10, "bfloat16": 8e10, "float16": 8e10},
    "2026-01-01T00:00:00+00:00",
    {"last_level_cache_bytes": 1_000},
)
CPU = Ceilings("test CPU", 1e9, {"float32": 1e10}, "2026-01-01T00:00:00+00:00", {})


def group(
    time_ns: float,
    flops: float | None,
    moved: float | None,
    *,
    target: str = "aten.mul.Tensor",
    dtype: str | None = "float32",
    name: str = "k:1",
) -> dict[str, Any]:
    return {
        "launch": name,
        "kernel": name.split(":")[0],
        "nodes": (f"node_{name}", f"view_{name}"),
        "time_ns": time_ns,
        "share": 1.0,
        "flops": flops,
        "bytes": moved,
        "dtype": dtype,
        "extern": False,
        "file": "",
        "line": 0,
        "module_path": "",
        "target": target,
    }


def profile(
    *rows: dict[str, Any],
    wall_ns: float = 100.0,
    kernel_ns: float = 100.0,
    device: str = "cuda",
    **environment: Any,
) -> Any:
    columns = [key for key in group(1, 1, 1) if key != "target"]
    frame = pd.DataFrame([{key: row[key] for key in columns} for row in rows], columns=columns)
    frame[["flops", "bytes", "time_ns"]] = frame[["flops", "bytes", "time_ns"]].astype("float64")
    nodes = [
        {"node": node, "target": row["target"] if index == 0 else "aten.view.default", "dtype": row["dtype"]}
        for row in rows
        for index, node in enumerate(row["nodes"])
    ]
    return SimpleNamespace(
        groups=lambda: frame,
        nodes=pd.DataFrame(nodes, columns=["node", "target", "dtype"]),
        wall_ns=wall_ns,
        kernel_ns=kernel_ns,
        environment={"device_type": device, **environment},
    )


def axes(report: LabelReport) -> list[str]:
    return [item.axis.value for item in report.labels]


def found(report: LabelReport, axis: Axis) -> Label:
    (item,) = (item for item in report.labels if item.axis is axis)
    return item


def value(item: Label, metric: str) -> float:
    (evidence,) = (e for e in item.evidence if e.metric == metric)
    return evidence.value


# --- launch bound


def test_a_gap_between_wall_and_kernel_time_is_launch_bound() -> None:
    item = found(label(profile(wall_ns=100, kernel_ns=80), GPU), Axis.LAUNCH_BOUND)
    assert (item.scope, item.headroom_ns, item.confidence, item.launch) == ("graph", 20, "high", "")
    assert value(item, "launch_gap") == pytest.approx(0.2)
    assert "20%" in item.why and "waits for the next launch" in item.why


@pytest.mark.parametrize("kernel_ns", [86.0, 100.0, 130.0])
def test_a_gap_at_or_under_the_threshold_is_not(kernel_ns: float) -> None:
    assert label(profile(wall_ns=100, kernel_ns=kernel_ns), GPU) == LabelReport((), ())


def test_on_a_cpu_the_same_gap_is_overhead_of_low_confidence() -> None:
    item = found(label(profile(wall_ns=100, kernel_ns=80, device="cpu"), CPU), Axis.LAUNCH_BOUND)
    assert item.confidence == "low"
    assert "framework overhead" in item.why


def test_without_a_wall_time_the_graph_rule_says_so() -> None:
    report = label(profile(wall_ns=math.nan), GPU)
    assert report == LabelReport((), ("rule launch_bound did not fire: lacks metric wall_ns",))


# --- memory bound


def test_a_kernel_near_the_copy_rate_with_little_arithmetic_is_memory_bound() -> None:
    item = found(label(profile(group(10_000, 2_000, 7_000)), GPU), Axis.MEMORY_BOUND)
    assert item.headroom_ns == pytest.approx(3_000)
    assert item.launch == "k:1"
    assert item.nodes == ("node_k:1", "view_k:1")
    assert item.confidence == "medium"
    assert value(item, "bandwidth_fraction") == pytest.approx(0.7)


def test_just_under_the_bandwidth_threshold_it_is_not() -> None:
    assert label(profile(group(10_000, 2_000, 5_990)), GPU).labels == ()
    assert axes(label(profile(group(10_000, 2_000, 6_000)), GPU)) == ["memory_bound"]


def test_at_the_ridge_it_is_no_longer_memory_bound() -> None:
    assert "memory_bound" not in axes(label(profile(group(10_000, 70_000, 7_000)), GPU))
    assert "memory_bound" in axes(label(profile(group(10_000, 69_999, 7_000)), GPU))


def test_the_ridge_is_that_of_the_groups_own_type() -> None:
    work = (10_000, 20 * 7_000, 7_000)
    assert "memory_bound" not in axes(label(profile(group(*work)), GPU))
    assert "memory_bound" in axes(label(profile(group(*work, dtype="bfloat16")), GPU))


def test_data_that_fit_in_the_cache_lower_the_confidence() -> None:
    item = found(label(profile(group(1_000, 10, 900)), GPU), Axis.MEMORY_BOUND)
    assert item.confidence == "low"
    assert "last-level cache" in item.why
    assert value(item, "last_level_cache_bytes") == 1_000


def test_a_rate_above_the_ceiling_leaves_no_headroom_and_little_confidence() -> None:
    item = found(label(profile(group(5_000, 10, 7_000)), GPU), Axis.MEMORY_BOUND)
    assert (item.headroom_ns, item.confidence) == (0.0, "low")


def test_a_copy_counts_no_arithmetic_and_is_still_memory_bound() -> None:
    assert axes(label(profile(group(10_000, 0.0, 9_000, dtype="int64")), GPU)) == ["memory_bound"]


# --- compute bound


def test_a_kernel_near_the_product_rate_above_the_ridge_is_compute_bound() -> None:
    item = found(label(profile(group(10_000, 80_000, 1_000)), GPU), Axis.COMPUTE_BOUND)
    assert item.headroom_ns == pytest.approx(2_000)
    assert item.confidence == "high"
    assert "80%" in item.why and "float32" in item.why


def test_just_under_the_rate_threshold_it_is_not_compute_bound() -> None:
    assert label(profile(group(10_000, 39_900, 1_000)), GPU).labels == ()
    assert axes(label(profile(group(10_000, 40_000, 1_000)), GPU)) == ["compute_bound"]


def test_a_product_faster_than_the_ceiling_leaves_no_headroom_and_little_confidence() -> None:
    item = found(label(profile(group(7_000, 80_000, 1_000)), GPU), Axis.COMPUTE_BOUND)
    assert (item.headroom_ns, item.confidence) == (0.0, "low")


def test_the_headroom_of_compute_stops_at_the_memory_floor() -> None:
    low = {"compute_bound.flop_fraction": 0.0}
    item = found(label(profile(group(10_000, 20_000, 2_000)), GPU, thresholds=low), Axis.COMPUTE_BOUND)
    assert item.headroom_ns == pytest.approx(10_000 - 2_000)


# --- tensor cores idle


def product(time_ns: float = 10_000, flops: float | None = 80_000, **more: Any) -> dict[str, Any]:
    return group(time_ns, flops, 1_000, **{"target": "aten.mm.default", **more})


def test_a_float32_product_beside_16_bit_units_leaves_tensor_cores_idle() -> None:
    item = found(label(profile(product()), GPU), Axis.TENSOR_CORE_IDLE)
    assert item.nodes == ("node_k:1",)
    assert item.headroom_ns == pytest.approx(10_000 - 1_000)
    assert (value(item, "dtype_bits"), value(item, "flops")) == (32, 80_000)
    assert value(item, "narrow_ceiling") == 8e10
    assert value(item, "flop_rate") == pytest.approx(8e9)


def test_the_headroom_is_bounded_by_the_bytes_that_remain() -> None:
    item = found(
        label(profile(group(10_000, 80_000, 4_000, target="aten.bmm.default")), GPU), Axis.TENSOR_CORE_IDLE
    )
    assert item.headroom_ns == pytest.approx(6_000)


@pytest.mark.parametrize(
    "row",
    [
        product(dtype="bfloat16"),
        product(target="aten.mm.dtype"),
        product(target="aten.mul.Tensor"),
        product(flops=0.0),
        product(time_ns=1_000.0),
    ],
    ids=["16-bit", "16-bit in, float32 out", "no product", "no FLOPs", "at the 16-bit ceiling"],
)
def test_tensor_cores_are_not_called_idle(row: dict[str, Any]) -> None:
    assert "tensor_core_idle" not in axes(label(profile(row), GPU))


def test_a_product_of_16_bit_inputs_is_held_against_their_ceiling_whatever_its_output() -> None:
    item = found(label(profile(product(1_000, target="aten.mm.dtype")), GPU), Axis.COMPUTE_BOUND)
    assert value(item, "flop_ceiling") == 8e10


def test_beside_a_16_bit_product_only_the_float32_one_is_named() -> None:
    mixed = profile(product())
    mixed.nodes.loc[mixed.nodes["node"] == "view_k:1", "target"] = "aten.mm.dtype"
    low = {"tensor_core_idle.rate_ratio": 0.0}
    assert found(label(mixed, GPU, thresholds=low), Axis.TENSOR_CORE_IDLE).nodes == ("node_k:1",)


def test_a_device_without_faster_16_bit_units_has_none_to_leave_idle() -> None:
    slow = Ceilings("d", 1e9, {"float32": 1e10, "bfloat16": 1.05e10}, "", {})
    for ceilings in (CPU, slow):
        report = label(profile(product()), ceilings)
        assert "tensor_core_idle" not in axes(report)
        assert not [line for line in report.missing if "tensor_core_idle" in line]


def test_under_tf32_the_tensor_cores_are_in_use_and_the_report_says_so() -> None:
    report = label(profile(product(), allow_tf32=True), GPU)
    assert "tensor_core_idle" not in axes(report)
    (line,) = (line for line in report.missing if "tensor_core_idle" in line)
    assert "TF32 is on" in line


def test_tf32_for_products_says_nothing_about_convolutions() -> None:
    conv = product(target="aten.convolution.default")
    assert "tensor_core_idle" in axes(label(profile(conv, allow_tf32=True), GPU))
    assert "tensor_core_idle" not in axes(label(profile(conv, cudnn_allow_tf32=True), GPU))


# --- what rules lack, order, thresholds


@pytest.mark.parametrize(("lacking", "flops", "moved"), [("flops", None, 7_000), ("bytes", 2_000, None)])
def test_unknown_work_keeps_group_rules_from_firing_and_is_reported(
    lacking: str, flops: float | None, moved: float | None
) -> None:
    report = label(profile(group(10_000, flops, moved, target="aten.mm.default")), GPU)
    assert report.labels == ()
    assert set(report.missing) == {
        f"rule {rule.name} did not fire on 1 group (k:1): lacks metric {lacking}"
        for rule in RULES
        if rule.scope == "group"
    }


def test_a_type_without_a_ceiling_is_reported() -> None:
    report = label(profile(group(10_000, 2_000, 7_000, dtype="float64")), GPU)
    assert report.labels == ()
    assert "rule memory_bound did not fire on 1 group (k:1): lacks metric flop_ceiling" in report.missing


def test_groups_that_lack_the_same_metric_share_a_sentence() -> None:
    rows = [group(10, None, 10, name=f"k:{index}") for index in range(5)]
    report = label(profile(*rows), GPU)
    assert (
        "rule memory_bound did not fire on 5 groups (k:0, k:1, k:2, ...): lacks metric flops"
        in report.missing
    )


def test_labels_come_by_headroom_the_largest_first() -> None:
    rows = [group(10_000, 10, 9_000, name="small:1"), group(20_000, 10, 13_000, name="large:2")]
    report = label(profile(*rows, wall_ns=10_000, kernel_ns=8_000), GPU)
    assert [item.headroom_ns for item in report.labels] == pytest.approx([7_000, 2_000, 1_000])


def test_every_threshold_is_overridden_by_name() -> None:
    row = group(10_000, 2_000, 5_000)
    assert label(profile(row), GPU).labels == ()
    assert axes(label(profile(row), GPU, thresholds={"memory_bound.bandwidth_fraction": 0.5})) == [
        "memory_bound"
    ]
    assert axes(label(profile(row, kernel_ns=90), GPU, thresholds={"launch_bound.launch_gap": 0.05})) == [
        "launch_bound"
    ]


def test_the_evidence_names_the_threshold_that_was_used() -> None:
    report = label(
        profile(group(10_000, 2_000, 7_000)), GPU, thresholds={"memory_bound.bandwidth_fraction": 0.5}
    )
    (fraction,) = (e for e in report.labels[0].evidence if e.metric == "bandwidth_fraction")
    assert fraction.threshold == 0.5


def test_an_unknown_threshold_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownThreshold, match=r"memory_bound\.fraction.*memory_bound\.bandwidth_fraction"):
        label(profile(), GPU, thresholds={"memory_bound.fraction": 0.5})


@pytest.mark.parametrize("bad", [math.nan, "0.5", True])
def test_a_threshold_is_a_finite_number(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"launch_bound\.launch_gap"):
        thresholds({"launch_bound.launch_gap": bad})


def test_every_rule_says_why_in_one_sentence_and_has_a_reference() -> None:
    report = label(profile(product(), group(10_000, 10, 9_000, name="m:2"), wall_ns=100, kernel_ns=50), GPU)
    assert {item.axis for item in report.labels} == {rule.axis for rule in RULES}
    for item in report.labels:
        assert item.why.endswith(".") and "{" not in item.why and ". " not in item.why
        assert Label.from_json(item.to_json()) == item
    assert all(rule.reference for rule in RULES)
