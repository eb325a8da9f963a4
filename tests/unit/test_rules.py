"""Each rule fires where its condition holds, not just beside it, and says what it lacked."""

from __future__ import annotations

import json
import math
import re
import string
from pathlib import Path
from typing import Any

import pytest
from made_profiles import empty

from fxopt import fingerprints, identity
from fxopt.labels import Axis, Label
from fxopt.metrics import DERIVED
from fxopt.rule_table import RULES
from fxopt.rules import LabelReport, UnknownThreshold, describe, label, thresholds
from profiler_core.collect.provenance import Launch
from profiler_core.profiles import KERNEL_COLUMNS, NODE_COLUMNS, Profile, frame
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

# A kernel of which every counter is known and no rule has anything to say.
QUIET = {
    "dram_throughput": 45.0, "l2_throughput": 45.0, "sm_throughput": 45.0, "tensor_active": 0.0,
    "dram_read_bytes": 600.0, "dram_write_bytes": 400.0, "l2_hit_rate": 50.0, "achieved_occupancy": 80.0,
    "eligible_warps": 2.0, "issue_active": 50.0, "warp_latency": 10.0, "instructions": 1e6, "local_load_bytes": 0.0,
    "threads_per_instruction": 32.0,
}  # fmt: skip
LAUNCH = {
    "theoretical_occupancy": 100.0, "occupancy_limiter": "warps", "waves_per_sm": 4.0, "grid": (528, 1, 1),
    "block": (256, 1, 1), "registers": 32, "shared_memory": 0, "family": "pointwise", "precision": "",
}  # fmt: skip


def group(
    time_ns: float = 10_000,
    flops: float | None = 50_000,
    moved: float | None = 1_000,
    *,
    target: str = "aten.mul.Tensor",
    dtype: str | None = "float32",
    name: str = "k:1",
    targets: tuple[str, ...] = (),
    counters: bool = False,
    outside: bool = False,
    **measured: Any,
) -> dict[str, Any]:
    """One launch of one kernel; `targets` are its nodes', a product or pointwise operator and a view by default."""
    mine = targets or (target, "aten.view.default")
    nodes = tuple(f"{'node' if i == 0 else 'view' if i == 1 else f'n{i}'}_{name}" for i in range(len(mine)))
    return {"time_ns": time_ns, "flops": flops, "bytes": moved, "dtype": dtype, "name": name, "targets": mine,
            "nodes": nodes, "outside": outside, "counted": {**QUIET, **measured} if counters else measured}  # fmt: skip


def profile(
    *rows: dict[str, Any],
    wall_ns: float = math.nan,
    device: str = "cuda",
    kernel_ns: float | None = None,
    **environment: Any,
) -> Profile:
    kernels, nodes, launches = [], [], []
    listed = list(rows)
    if kernel_ns is not None:
        listed.append(group(kernel_ns, None, None, name="filler:9"))
    for place, row in enumerate(listed):
        kernel, handle = row["name"].rsplit(":", 1)
        made = empty(KERNEL_COLUMNS) | LAUNCH | {
            "name": kernel, "kind": "kernel", "device": device, "start_ns": 1_000_000 * place,
            "duration_ns": int(row["time_ns"]), "iteration": 0, "operator": row.get("operator", ""), "evidence": (),
            "spans": (), "launch": "" if row["outside"] else row["name"], "method": "correlation", "opaque": False,
            "nodes": row["nodes"],
        }  # fmt: skip
        made |= {key: value for key, value in row["counted"].items() if key in made}
        made["top_operator"] = made["operator"]
        kernels.append({**made, "extra": {k: v for k, v in row["counted"].items() if k not in made}})
        if row["outside"]:
            continue
        launches.append(Launch(kernel, int(handle), row["nodes"], False, row["flops"], row["bytes"], ""))
        for node, target in zip(row["nodes"], row["targets"], strict=True):
            nodes.append(empty(NODE_COLUMNS) | {"node": node, "kind": "node", "target": target,
                         "dtype": row["dtype"], "shape": (1,), "pre_grad": (), "fused_with": (), "launches": (),
                         "bytes": 1.0})  # fmt: skip
    table = frame([{k: v for k, v in row.items() if k != "extra"} for row in kernels], KERNEL_COLUMNS)
    keys = sorted({key for row in kernels for key in row["extra"]})
    for key in keys:
        table[key] = [row["extra"].get(key, math.nan) for row in kernels]
    if keys:
        table["counters"] = ["measured" if row["extra"] else "" for row in kernels]
    where = {"device_type": device, "sm_count": 132, "capability": [9, 0], **environment}
    return Profile(table, frame(nodes, NODE_COLUMNS), where, 1, wall_ns, tuple(launches))


def axes(report: LabelReport) -> list[str]:
    return [item.axis.value for item in report.labels]


def found(report: LabelReport, axis: Axis) -> Label:
    (item,) = (item for item in report.labels if item.axis is axis)
    return item


def value(item: Label, metric: str) -> float:
    (evidence,) = (e for e in item.evidence if e.metric == metric)
    return evidence.value


def counted(**measured: Any) -> LabelReport:
    return label(profile(group(counters=True, **measured)), GPU)


# --- the graph


def test_a_gap_between_wall_and_kernel_time_is_launch_bound() -> None:
    item = found(label(profile(wall_ns=100_000, kernel_ns=80_000), GPU), Axis.LAUNCH_BOUND)
    assert (item.scope, item.headroom_ns, item.confidence, item.launch) == ("graph", 20_000, "medium", "")
    assert value(item, "launch_gap") == pytest.approx(0.2)
    assert "20%" in item.why and "waits for the next launch" in item.why


@pytest.mark.parametrize("kernel_ns", [86_000.0, 100_000.0, 130_000.0])
def test_a_gap_at_or_under_the_threshold_is_not(kernel_ns: float) -> None:
    assert "launch_bound" not in axes(label(profile(wall_ns=100_000, kernel_ns=kernel_ns), GPU))


def test_on_a_cpu_the_same_gap_is_called_overhead() -> None:
    item = found(label(profile(wall_ns=100_000, kernel_ns=80_000, device="cpu"), CPU), Axis.LAUNCH_BOUND)
    assert "framework overhead" in item.why


def test_without_a_wall_time_the_graph_rule_says_so() -> None:
    report = label(profile(kernel_ns=50_000), GPU)
    assert "rule launch_bound did not fire: lacks wall_ns" in report.missing


# --- from durations and modelled work alone


def test_a_kernel_near_the_copy_rate_with_little_arithmetic_is_memory_bound() -> None:
    item = found(label(profile(group(10_000, 2_000, 7_000)), GPU), Axis.MEMORY_BOUND)
    assert item.headroom_ns == pytest.approx(10_000 - 200), "what remains is its arithmetic"
    assert (item.launch, item.scope, item.confidence) == ("k:1", "group", "medium")
    assert item.nodes == ("node_k:1", "view_k:1")
    assert value(item, "bandwidth_fraction") == pytest.approx(0.7)


def test_just_under_the_bandwidth_threshold_it_is_not() -> None:
    assert axes(label(profile(group(10_000, 2_000, 5_990)), GPU)) == []
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


def test_a_rate_above_the_ceiling_is_little_confidence() -> None:
    assert found(label(profile(group(5_000, 10, 7_000)), GPU), Axis.MEMORY_BOUND).confidence == "low"
    assert found(label(profile(group(7_000, 80_000, 1_000)), GPU), Axis.COMPUTE_BOUND).confidence == "low"


def test_a_copy_counts_no_arithmetic_and_is_still_memory_bound() -> None:
    assert axes(label(profile(group(10_000, 0.0, 9_000, dtype="int64")), GPU)) == ["memory_bound"]


def test_a_kernel_near_the_product_rate_above_the_ridge_is_compute_bound() -> None:
    item = found(label(profile(group(10_000, 80_000, 1_000)), GPU), Axis.COMPUTE_BOUND)
    assert item.headroom_ns == pytest.approx(9_000), "what remains is its traffic"
    assert item.confidence == "high"
    assert "80%" in item.why and "float32" in item.why


def test_just_under_the_rate_threshold_it_is_not_compute_bound() -> None:
    assert axes(label(profile(group(10_000, 39_900, 1_000)), GPU)) == []
    assert axes(label(profile(group(10_000, 40_000, 1_000)), GPU)) == ["compute_bound"]


def test_far_above_its_roofline_it_waits_for_something_that_is_not_modelled() -> None:
    item = found(label(profile(group(10_000, 10_000, 1_990)), GPU), Axis.LATENCY_BOUND)
    assert (item.headroom_ns, item.confidence) == (pytest.approx(10_000 - 1_990), "low")
    assert axes(label(profile(group(10_000, 10_000, 2_010)), GPU)) == []


def test_few_warps_and_few_blocks_show_in_the_launch_alone() -> None:
    slow = {"flops": 10_000, "moved": 2_500}
    item = found(
        label(profile(group(**slow, theoretical_occupancy=12.5, occupancy_limiter="registers")), GPU),
        Axis.OCCUPANCY_LIMITED,
    )
    assert "registers" in item.why and item.headroom_ns == pytest.approx(10_000 - 2_500)
    item = found(label(profile(group(**slow, waves_per_sm=0.1, grid=(33, 1, 1))), GPU), Axis.WAVE_STARVED)
    assert value(item, "grid_efficiency") == pytest.approx(0.25)


# --- tensor cores


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
    item = found(label(profile(group(10_000, 80_000, 4_000, target="aten.bmm.default")), GPU), Axis.TENSOR_CORE_IDLE)
    assert item.headroom_ns == pytest.approx(6_000)


@pytest.mark.parametrize(
    "row",
    [
        product(dtype="bfloat16"),
        product(target="aten.mm.dtype"),
        product(target="aten.mul.Tensor"),
        product(flops=0.0),
        product(time_ns=1_000.0),
        product(counters=True, tensor_active=30.1),
    ],
    ids=["16-bit", "16-bit in, float32 out", "no product", "no FLOPs", "at the 16-bit ceiling", "at work"],
)
def test_tensor_cores_are_not_called_idle(row: dict[str, Any]) -> None:
    assert "tensor_core_idle" not in axes(label(profile(row), GPU))


def test_with_counters_the_tensor_cores_themselves_are_asked() -> None:
    for active in (0.2, 30.0):
        item = found(label(profile(product(counters=True, tensor_active=active)), GPU), Axis.TENSOR_CORE_IDLE)
        assert value(item, "tensor_active") == active


def test_a_product_outside_of_the_graphs_is_told_by_its_kernels_name() -> None:
    row = group(counters=True, outside=True, name="sgemm:0", family="gemm", precision="fp32", sm_throughput=70.0)
    item = found(label(profile(row), GPU), Axis.TENSOR_CORE_IDLE)
    assert (item.scope, item.launch) == ("kernel", "sgemm")
    assert item.headroom_ns == pytest.approx(10_000 * 7 / 8)
    row = group(counters=True, outside=True, name="h:0", family="gemm", precision="bf16", sm_throughput=70.0)
    assert "tensor_core_idle" not in axes(label(profile(row), GPU))


def test_a_product_of_16_bit_inputs_is_held_against_their_ceiling_whatever_its_output() -> None:
    item = found(label(profile(product(1_000, target="aten.mm.dtype")), GPU), Axis.COMPUTE_BOUND)
    assert value(item, "flop_ceiling") == 8e10


def test_beside_a_16_bit_product_only_the_float32_one_is_named() -> None:
    mixed = profile(product(targets=("aten.mm.default", "aten.mm.dtype")))
    low = {"tensor_core_idle_modelled.rate_ratio": 0.0}
    assert found(label(mixed, GPU, thresholds=low), Axis.TENSOR_CORE_IDLE).nodes == ("node_k:1",)


def test_a_device_without_faster_16_bit_units_has_none_to_leave_idle() -> None:
    slow = Ceilings("d", 1e9, {"float32": 1e10, "bfloat16": 1.05e10}, "", {})
    for ceilings in (CPU, slow):
        report = label(profile(product()), ceilings)
        assert "tensor_core_idle" not in axes(report)
    assert not [line for line in label(profile(product()), CPU).missing if "tensor_core_idle" in line]


def test_under_tf32_the_tensor_cores_are_in_use_and_the_report_says_so_once() -> None:
    for row in (product(), product(counters=True)):
        report = label(profile(row, allow_tf32=True), GPU)
        assert "tensor_core_idle" not in axes(report)
        (line,) = (line for line in report.missing if "tensor_core_idle" in line)
        assert "TF32 is on" in line


def test_tf32_for_products_says_nothing_about_convolutions() -> None:
    conv = product(target="aten.convolution.default")
    assert "tensor_core_idle" in axes(label(profile(conv, allow_tf32=True), GPU))
    assert "tensor_core_idle" not in axes(label(profile(conv, cudnn_allow_tf32=True), GPU))


# --- from counters


def test_a_kernel_without_a_limit_has_no_label() -> None:
    assert counted() == LabelReport((), ("rule launch_bound did not fire: lacks wall_ns",))


@pytest.mark.parametrize(
    ("axis", "measured", "beside"),
    [
        ("memory_bound", {"dram_throughput": 60.0}, {"dram_throughput": 59.9}),
        ("memory_bound", {"dram_throughput": 90, "sm_throughput": 89}, {"dram_throughput": 90, "sm_throughput": 91}),
        ("l2_bound", {"l2_throughput": 50.0}, {"l2_throughput": 49.9}),
        ("l2_bound", {"l2_throughput": 61.0, "dram_throughput": 60.0}, {"l2_throughput": 60, "dram_throughput": 60}),
        ("compute_bound", {"sm_throughput": 60.0}, {"sm_throughput": 59.9}),
        ("compute_bound", {"tensor_active": 80.0}, {"tensor_active": 80.0, "dram_throughput": 80.0}),
        (
            "latency_bound",
            {"sm_throughput": 39.0, "dram_throughput": 5, "l2_throughput": 5, "eligible_warps": 0.9},
            {"sm_throughput": 39.0, "dram_throughput": 5, "l2_throughput": 5, "eligible_warps": 1.0},
        ),
        (
            "occupancy_limited",
            {"theoretical_occupancy": 50.0, "achieved_occupancy": 45.0, "eligible_warps": 1.0},
            {"theoretical_occupancy": 50.0, "achieved_occupancy": 25.0, "eligible_warps": 1.0},
        ),
        (
            "occupancy_limited",
            {"theoretical_occupancy": 25.0, "achieved_occupancy": 25.0, "eligible_warps": 1.0},
            {"theoretical_occupancy": 25.0, "achieved_occupancy": 25.0, "eligible_warps": 1.0, "tensor_active": 50.0},
        ),
        (
            "wave_starved",
            {"grid": (66, 1, 1), "waves_per_sm": 0.06, "issue_active": 90},
            {"grid": (132, 1, 1), "waves_per_sm": 0.12, "issue_active": 90},
        ),
        ("wave_starved", {"waves_per_sm": 1.1, "issue_active": 90}, {"waves_per_sm": 1.9, "issue_active": 90}),
        # a last wave that overlaps with the one before leaves no SM idle
        ("wave_starved", {"waves_per_sm": 1.1, "issue_active": 60}, {"waves_per_sm": 1.1, "issue_active": 50}),
        ("register_spill", {"local_load_bytes": 128 * 2.1e4}, {"local_load_bytes": 128 * 1.9e4}),
        ("divergent", {"threads_per_instruction": 24.0}, {"threads_per_instruction": 24.1}),
        ("excess_traffic", {"dram_read_bytes": 2e6}, {"dram_read_bytes": 9e5}),
    ],
)
def test_an_axis_is_given_where_its_condition_holds_and_not_beside_it(
    axis: str, measured: dict[str, Any], beside: dict[str, Any]
) -> None:
    assert axis in axes(counted(**measured))
    assert axis not in axes(counted(**beside))


@pytest.mark.parametrize(
    ("axis", "measured", "headroom"),
    [
        # the next busiest unit then limits
        (Axis.MEMORY_BOUND, {"dram_throughput": 90.0, "l2_throughput": 60.0}, 10_000 / 3),
        (Axis.L2_BOUND, {"l2_throughput": 90.0}, 5_000),
        (Axis.COMPUTE_BOUND, {"sm_throughput": 90.0}, 5_000),
        (Axis.WAVE_STARVED, {"grid": (33, 1, 1), "waves_per_sm": 0.1, "issue_active": 90.0}, 5_000),
        (Axis.DIVERGENT, {"threads_per_instruction": 8.0}, 7_500),
        # a store for each load
        (Axis.REGISTER_SPILL, {"local_load_bytes": 128 * 1e5}, 2_000),
        # a million bytes too many at one byte a nanosecond take longer than the kernel does
        (Axis.EXCESS_TRAFFIC, {"dram_read_bytes": 2e6}, 10_000),
    ],
)
def test_the_headroom_is_what_removing_the_limit_could_save(
    axis: Axis, measured: dict[str, Any], headroom: float
) -> None:
    assert found(counted(**measured), axis).headroom_ns == pytest.approx(headroom)


def test_an_occupancy_label_names_the_resource_that_runs_out() -> None:
    few = {"theoretical_occupancy": 25.0, "achieved_occupancy": 24.0, "eligible_warps": 0.5}
    for limiter in ("registers", "shared memory", "blocks"):
        assert limiter in found(counted(**few, occupancy_limiter=limiter), Axis.OCCUPANCY_LIMITED).why


def test_several_limits_of_one_kernel_are_ranked_by_what_they_cost() -> None:
    report = counted(sm_throughput=90.0, threads_per_instruction=8.0, local_load_bytes=128 * 1e5)
    assert axes(report) == ["divergent", "compute_bound", "register_spill"]
    assert [item.headroom_ns for item in report.labels] == sorted((i.headroom_ns for i in report.labels), reverse=True)


def test_counters_go_before_the_model() -> None:
    """Modelled as memory-bound, but the counters say that memory is not busy."""
    assert "memory_bound" in axes(label(profile(group(10_000, 2_000, 9_000)), GPU))
    assert "memory_bound" not in axes(label(profile(group(10_000, 2_000, 9_000, counters=True)), GPU))


# --- what could be left out


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (("aten.permute.default", "aten.clone.default"), ["layout_conversion"]),
        (("prims.rev.default",), ["layout_conversion"]),
        (("prims.convert_element_type.default",), ["cast_traffic"]),
        (("aten.view.default", "aten._to_copy.default"), ["cast_traffic"]),
        (("prims.convert_element_type.default", "aten.clone.default"), ["cast_traffic"]),
        (("aten.clone.default", "aten.mul.Tensor"), []),
        (("prims.convert_element_type.default", "aten.add.Tensor"), []),
        (("aten.view.default",), []),
    ],
)
def test_groups_that_only_move_or_cast_data_could_be_left_out(targets: tuple[str, ...], expected: list[str]) -> None:
    report = label(profile(group(10_000, 20_000, 3_000, targets=targets)), GPU)
    assert axes(report) == expected
    assert all(item.headroom_ns == 10_000 for item in report.labels)


def test_a_librarys_own_layout_kernels_are_conversions_too() -> None:
    report = label(profile(group(10_000, 20_000, 3_000, target="aten.convolution.default", family="layout")), GPU)
    assert "layout_conversion" in axes(report)


@pytest.mark.parametrize(
    ("fields", "opaque"),
    [
        ({"family": "rnn", "opaque": True}, True),
        ({"family": "fft", "opaque": True}, True),
        ({"family": "custom", "opaque": True}, False),
        ({"family": "gemm", "opaque": True}, False),
        ({"family": "pointwise", "opaque": False}, False),
    ],
)
def test_a_library_whose_work_the_graph_does_not_show_is_opaque(fields: dict[str, Any], opaque: bool) -> None:
    report = label(profile(group(10_000, None, None, outside=True, **fields)), GPU)
    assert ("opaque_library" in axes(report)) is opaque


def test_work_that_is_modelled_is_not_opaque() -> None:
    row = group(10_000, 50_000, 3_000, family="attention", opaque=True)
    assert "opaque_library" not in axes(label(profile(row), GPU))


# --- what rules lack, order, thresholds


def test_without_counters_each_rule_that_needs_them_says_which() -> None:
    missing = label(profile(group()), GPU).missing
    assert "rule divergent did not fire on 1 group (k:1): lacks threads_per_instruction" in missing
    assert any(line.startswith("rule l2_bound did not fire on 1 group (k:1): lacks l2_throughput") for line in missing)


def test_on_a_cpu_rules_of_a_gpu_are_not_missed() -> None:
    report = label(profile(group(), device="cpu"), CPU)
    assert report.missing == ("rule launch_bound did not fire: lacks wall_ns",)


@pytest.mark.parametrize(("lacking", "flops", "moved"), [("flops", None, 7_000), ("bytes", 2_000, None)])
def test_unknown_work_keeps_modelled_rules_from_firing_and_is_reported(
    lacking: str, flops: float | None, moved: float | None
) -> None:
    report = label(profile(group(10_000, flops, moved), device="cpu"), CPU)
    assert report.labels == ()
    for name in ("memory_bound_modelled", "compute_bound_modelled", "latency_bound_modelled"):
        assert f"rule {name} did not fire on 1 group (k:1): lacks {lacking}" in report.missing


def test_a_type_without_a_ceiling_is_reported() -> None:
    report = label(profile(group(10_000, 2_000, 7_000, dtype="float64"), device="cpu"), CPU)
    assert report.labels == ()
    assert "rule memory_bound_modelled did not fire on 1 group (k:1): lacks flop_ceiling" in report.missing


def test_groups_that_lack_the_same_metric_share_a_sentence() -> None:
    rows = [group(10, None, 10, name=f"k:{index}") for index in range(5)]
    missing = label(profile(*rows), GPU).missing
    assert any(line.startswith("rule divergent did not fire on 5 groups (k:0, k:1, k:2, ...): ") for line in missing)


def test_a_long_name_is_cut_in_that_sentence() -> None:
    missing = label(profile(group(name="x" * 5_000 + ":1")), GPU).missing
    assert missing and all(len(line) < 300 for line in missing)


def test_labels_come_by_headroom_the_largest_first() -> None:
    rows = [group(10_000, 10, 9_000, name="small:1"), group(20_000, 10, 13_000, name="large:2")]
    report = label(profile(*rows, wall_ns=40_000), GPU)
    assert [item.launch for item in report.labels] == ["large:2", "", "small:1"]


def test_every_threshold_is_overridden_by_name() -> None:
    for name, number in thresholds().items():
        assert thresholds({name: number / 2})[name] == number / 2
    row = group(10_000, 2_000, 5_000)
    assert axes(label(profile(row), GPU)) == []
    low = {"memory_bound_modelled.bandwidth_fraction": 0.5}
    assert axes(label(profile(row), GPU, thresholds=low)) == ["memory_bound"]
    quiet = {"memory_bound.dram_throughput": 40.0}
    assert axes(label(profile(group(counters=True)), GPU, thresholds=quiet)) == ["memory_bound"]


def test_the_evidence_names_the_threshold_that_was_used() -> None:
    low = {"memory_bound_modelled.bandwidth_fraction": 0.5}
    item = found(label(profile(group(10_000, 2_000, 7_000)), GPU, thresholds=low), Axis.MEMORY_BOUND)
    (fraction,) = (e for e in item.evidence if e.metric == "bandwidth_fraction")
    assert fraction.threshold == 0.5


def test_an_unknown_threshold_is_refused_with_those_like_it() -> None:
    with pytest.raises(UnknownThreshold, match=r"memory_bound\.dram.*memory_bound\.dram_throughput"):
        label(profile(), GPU, thresholds={"memory_bound.dram": 0.5})


@pytest.mark.parametrize("bad", [math.nan, "0.5", True, 10**400])
def test_a_threshold_is_a_finite_number(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"launch_bound\.launch_gap"):
        thresholds({"launch_bound.launch_gap": bad})


# --- the table


def test_every_axis_has_a_rule_and_every_rule_a_reference_and_one_sentence() -> None:
    assert {rule.axis for rule in RULES} == set(Axis)
    assert len({rule.name for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.reference and rule.why.endswith(".") and ". " not in rule.why
        assert rule.stands_in == "" or rule.stands_in in {other.name for other in RULES}


def test_the_sentences_of_labels_are_filled_in_and_labels_survive_json() -> None:
    rows = [
        product(name="p:1"), group(10_000, 10, 9_000, name="m:2"),
        group(counters=True, name="c:3", sm_throughput=90.0, threads_per_instruction=8.0, local_load_bytes=1e8),
        group(counters=True, name="o:4", theoretical_occupancy=25.0, achieved_occupancy=25.0, eligible_warps=0.1),
        group(counters=True, name="w:5", grid=(1, 1, 1), waves_per_sm=0.01, issue_active=90.0),
        group(10, None, None, outside=True, name="r:6", family="rnn", opaque=True),
        group(targets=("aten.clone.default",), name="l:7"),
    ]  # fmt: skip
    report = label(profile(*rows, wall_ns=1e6), GPU)
    assert len({item.axis for item in report.labels}) >= 9
    for item in report.labels:
        assert item.why.endswith(".") and "{" not in item.why
        assert not re.search(r"(?<![\d.])\d{4,} |e\+\d", item.why), item.why  # raw ns, bytes or FLOPs
        assert item.reference
        assert Label.from_json(json.loads(json.dumps(item.to_json()))) == item


def test_times_and_sizes_come_into_sentences_with_their_units() -> None:
    launch = found(label(profile(group(10_000, 10, 9_000), wall_ns=1e6), GPU), Axis.LAUNCH_BOUND)
    assert "Kernels run for 10.0 us of the 1.00 ms that a call takes" in launch.why
    assert {item.metric: (item.value, item.unit) for item in launch.evidence}["wall_ns"] == (1e6, "ns")
    units = {item.name: item.unit for item in DERIVED} | {"time_ns": "ns", "bytes": "byte", "flops": "FLOP"}
    units |= {"wall_ns": "ns", "kernel_ns": "ns"}
    for rule in RULES:
        for _, name, form, _ in string.Formatter().parse(rule.why):
            if units.get(name or "") in ("ns", "byte", "byte/s", "FLOP", "FLOP/s"):
                assert form == "", f"{rule.name}: {name} is spelled by quantity"


def known(names: tuple[str, ...]) -> set[str]:
    """These metrics, and all that they are made of."""
    below = {item.name: item.needs for item in DERIVED}
    return set(names).union(*(known(below.get(name, ())) for name in names))


def test_whatever_a_sentence_says_is_known_where_the_rule_fires() -> None:
    """A field that the rule does not need may be missing, and would take all labels away."""
    facts = {"gap_is", "cached", "compute_dtype", "limiter", "library"}
    for rule in RULES:
        fields = {name for _, name, _, _ in string.Formatter().parse(rule.why) if name}
        assert fields <= known(rule.needs) | facts, rule.name


@pytest.mark.parametrize("lost", sorted(QUIET))
def test_a_counter_that_was_not_measured_costs_no_more_than_the_rules_that_need_it(lost: str) -> None:
    """A recording from elsewhere may hold any part of the counters."""
    loud = {"l2_throughput": 90.0, "local_load_bytes": 1e8, "threads_per_instruction": 8.0, "dram_read_bytes": 1e7}
    every = axes(counted(**loud))
    assert {"l2_bound", "register_spill", "divergent", "excess_traffic"} <= set(every)
    needs = {rule.name: known(rule.needs) for rule in RULES}
    assert {axis for axis in every if lost not in needs[axis]} <= set(axes(counted(**{**loud, lost: math.nan})))


def test_a_cast_of_unknown_size_is_labelled_as_well() -> None:
    row = group(10_000, None, None, targets=("prims.convert_element_type.default",))
    assert axes(label(profile(row), GPU)) == ["cast_traffic"]


def test_the_description_shows_thresholds_as_they_are_then() -> None:
    rows = {row["name"]: row for row in describe({"divergent.threads_per_instruction": 16.0})}
    assert list(rows) == [rule.name for rule in RULES]
    assert rows["divergent"]["condition"] == "threads_per_instruction <= 16"
    assert rows["memory_bound"]["condition"].startswith("dram_throughput >= 60 and dram_throughput >= arithmetic")
    json.dumps(list(rows.values()))


def test_an_edited_rule_is_another_set_of_rules(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fxopt import rule_table

    before = identity.rules_digest()
    edited = tmp_path / "rule_table.py"
    edited.write_bytes(Path(rule_table.__file__).read_bytes().replace(b"60.0", b"61.0"))
    monkeypatch.setattr(rule_table, "__file__", str(edited))
    monkeypatch.setattr(fingerprints, "_texts", {})  # as in the next process
    assert identity.rules_digest() != before
