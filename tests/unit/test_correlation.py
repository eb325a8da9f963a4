from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from profiler_core.attribute.correlation import (
    LAUNCHED_LATER,
    NO_ID,
    NO_LAUNCH,
    OUTSIDE,
    SEVERAL_LAUNCHES,
    Links,
    device_annotation,
    is_operator,
    link,
    operators,
)
from profiler_core.attribute.enclosure import enclosing_by_tree
from profiler_core.collect import nsys
from profiler_core.collect.chrome_trace import read
from profiler_core.trace import Trace

MAIN, AUTOGRAD = 1, 2


def op(name: str, start: int, end: int, **rest: Any) -> dict[str, Any]:
    return {"name": name, "start_ns": start, "end_ns": end, "category": "op", "thread": MAIN, **rest}


def annotation(name: str, start: int, end: int, **rest: Any) -> dict[str, Any]:
    return op(name, start, end, **{"category": "annotation", **rest})


def call(correlation: int, start: int, name: str = "cudaLaunchKernel", **rest: Any) -> dict[str, Any]:
    end = rest.pop("end", start + 2)
    row = {"name": name, "correlation": correlation, "start_ns": start, "end_ns": end, "thread": MAIN}
    return {**row, **rest}


def kernel(correlation: int, start: int, external_id: int = 0, **rest: Any) -> dict[str, Any]:
    row = {"name": "kernel", "correlation": correlation, "start_ns": start, "duration_ns": 5, "device": 0, "stream": 7}
    return {**row, "external_id": external_id, **rest}


def trace(*, ranges: list[dict[str, Any]], calls: list[dict[str, Any]], kernels: list[dict[str, Any]]) -> Trace:
    defaults = {"process": 0, "external_id": 0, "device": -1, "stream": -1}

    def columns(rows: list[dict[str, Any]], without: tuple[str, ...] = ()) -> dict[str, list[Any]]:
        names = {name for row in rows for name in row}
        return {name: [row.get(name, defaults.get(name)) for row in rows] for name in names - set(without)}

    return Trace.build(ranges=columns(ranges), calls=columns(calls), kernels=columns(kernels))


def names(recorded: Trace, links: Links) -> list[str]:
    """The name of the range of each kernel, "" where it has none."""
    return [recorded.ranges["name"][row] if row >= 0 else "" for row in links.range]


# ---- the two paths


def test_a_launch_belongs_to_the_innermost_range_of_its_thread() -> None:
    recorded = trace(
        ranges=[op("aten::linear", 0, 100), op("aten::mm", 10, 50), op("aten::add", 10, 50, thread=AUTOGRAD)],
        calls=[call(3, 20), call(4, 60), call(5, 20, thread=AUTOGRAD)],
        kernels=[kernel(3, 200), kernel(4, 210), kernel(5, 220)],
    )
    links = link(recorded)
    assert names(recorded, links) == ["aten::mm", "aten::linear", "aten::add"]
    assert set(links.method) == {"enclosure"}
    assert links.external_ids == "absent"
    assert links.agrees.tolist() == [-1, -1, -1]


def test_ids_that_nesting_confirms_decide() -> None:
    recorded = trace(
        ranges=[op("aten::linear", 0, 100, external_id=11), op("aten::mm", 10, 50, external_id=12)],
        calls=[call(3, 20), call(4, 60)],
        kernels=[kernel(3, 200, external_id=12), kernel(4, 210, external_id=11)],
    )
    links = link(recorded)
    assert links.external_ids == "trusted"
    assert names(recorded, links) == ["aten::mm", "aten::linear"]
    assert set(links.method) == {"correlation"}
    assert links.agrees.tolist() == [1, 1]
    assert links.other.tolist() == [-1, -1]


def many_operators(count: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Operators with ids 101, 102, ... that launch with correlation ids 1001, 1002, ... each."""
    ranges = [op(f"aten::op{i}", 100 * i, 100 * i + 50, external_id=101 + i) for i in range(count)]
    return ranges, [call(1001 + i, 100 * i + 10) for i in range(count)]


def test_a_single_disagreement_goes_to_trusted_ids_and_the_losing_range_is_kept() -> None:
    ranges, calls = many_operators(20)
    kernels = [kernel(1001 + i, 5000 + i, external_id=101 + i) for i in range(20)]
    kernels[4]["external_id"] = 101 + 9
    recorded = trace(ranges=ranges, calls=calls, kernels=kernels)
    links = link(recorded)
    assert names(recorded, links)[4] == "aten::op9"
    assert recorded.ranges["name"][links.other[4]] == "aten::op4"
    assert links.agrees.tolist() == [1] * 4 + [0] + [1] * 15
    assert any("different ranges for 1 of 20" in note for note in links.notes)


def test_ids_that_are_correlation_ids_are_not_believed_even_where_an_operator_has_that_id() -> None:
    """As in the traces of 2022-23: the correlation id of a launch is the id of some other operator."""
    ranges, calls = many_operators(20)
    for i, row in enumerate(ranges):
        row["external_id"] = 1001 + (i + 7) % 20
    recorded = trace(
        ranges=ranges,
        calls=[{**row, "external_id": row["correlation"]} for row in calls],
        kernels=[kernel(1001 + i, 5000 + i, external_id=1001 + i) for i in range(20)],
    )
    links = link(recorded)
    assert links.external_ids == "equal correlation ids"
    assert names(recorded, links) == [f"aten::op{i}" for i in range(20)]
    assert set(links.method) == {"enclosure"}
    assert links.agrees.tolist() == [0] * 20
    assert recorded.ranges["name"][links.other[0]] == "aten::op13"
    assert any("20 equal to the correlation id" in note for note in links.notes)


def test_ids_that_happen_to_equal_correlation_ids_are_believed_where_they_name_the_right_operators() -> None:
    ranges, _ = many_operators(20)
    recorded = trace(
        ranges=ranges,
        calls=[call(101 + i, 100 * i + 10) for i in range(20)],
        kernels=[kernel(101 + i, 5000 + i, external_id=101 + i) for i in range(20)],
    )
    assert link(recorded).external_ids == "trusted"


def test_ids_that_nesting_contradicts_are_not_believed() -> None:
    ranges, calls = many_operators(20)
    recorded = trace(
        ranges=ranges,
        calls=calls,
        kernels=[kernel(1001 + i, 5000 + i, external_id=101 + (i + 3) % 20) for i in range(20)],
    )
    links = link(recorded)
    assert links.external_ids == "contradicted by nesting"
    assert names(recorded, links) == [f"aten::op{i}" for i in range(20)]
    assert (links.other >= 0).all()


def test_ids_that_name_no_range_leave_nesting_to_decide() -> None:
    ranges, calls = many_operators(3)
    kernels = [kernel(1001 + i, 5000 + i, external_id=7 + i) for i in range(3)]
    links = link(trace(ranges=ranges, calls=calls, kernels=kernels))
    assert links.external_ids == "name no range"
    assert set(links.method) == {"enclosure"}


def test_the_id_on_the_launch_serves_where_the_kernel_has_none() -> None:
    ranges, calls = many_operators(3)
    calls = [{**row, "external_id": 101 + i} for i, row in enumerate(calls)]
    recorded = trace(ranges=ranges, calls=calls, kernels=[kernel(1001 + i, 5000 + i) for i in range(3)])
    links = link(recorded)
    assert links.external_ids == "trusted"
    assert set(links.method) == {"correlation"}
    assert names(recorded, links) == ["aten::op0", "aten::op1", "aten::op2"]


def test_a_trusted_id_names_the_range_of_a_kernel_whose_launch_is_missing() -> None:
    ranges, calls = many_operators(3)
    kernels = [kernel(1001 + i, 5000 + i, external_id=101 + i) for i in range(3)]
    recorded = trace(ranges=ranges, calls=calls[:2], kernels=kernels)
    links = link(recorded)
    assert links.call.tolist() == [0, 1, -1]
    assert names(recorded, links)[2] == "aten::op2"
    assert links.method[2] == "correlation"
    assert links.agrees[2] == -1
    assert links.reason[2] == ""


def test_an_annotation_inside_the_named_operator_is_no_disagreement() -> None:
    """Ids name operators; annotations have ids of their own."""
    recorded = trace(
        ranges=[op("aten::mm", 0, 100, external_id=5), annotation("fxopt::extern_kernels.mm:1", 10, 90, external_id=6)],
        calls=[call(3, 20)],
        kernels=[kernel(3, 200, external_id=5)],
    )
    links = link(recorded)
    assert names(recorded, links) == ["fxopt::extern_kernels.mm:1"]
    assert (links.method[0], links.agrees[0]) == ("correlation", 1)


def test_an_id_may_be_an_annotations() -> None:
    recorded = trace(
        ranges=[annotation("step", 0, 100, external_id=5), op("aten::mm", 10, 50, external_id=6)],
        calls=[call(3, 20), call(4, 70)],
        kernels=[kernel(3, 200, external_id=5), kernel(4, 210, external_id=5)],
    )
    links = link(recorded)
    assert names(recorded, links) == ["aten::mm", "step"]
    assert links.agrees.tolist() == [1, 1]


def test_an_operator_between_the_launch_and_the_named_one_is_a_disagreement() -> None:
    ranges, calls = many_operators(20)
    ranges.append(op("aten::inner", 5, 40, external_id=99))
    kernels = [kernel(1001 + i, 5000 + i, external_id=101 + i) for i in range(20)]
    recorded = trace(ranges=ranges, calls=calls, kernels=kernels)
    links = link(recorded)
    assert names(recorded, links)[0] == "aten::op0"
    assert recorded.ranges["name"][links.other[0]] == "aten::inner"
    assert links.agrees[0] == 0


def test_an_id_that_several_ranges_carry_is_not_used() -> None:
    ranges, calls = many_operators(2)
    ranges[1]["external_id"] = 101
    recorded = trace(ranges=ranges, calls=calls, kernels=[kernel(1002, 5000, external_id=101)])
    links = link(recorded)
    assert names(recorded, links) == ["aten::op1"]
    assert links.method[0] == "enclosure"
    assert any("carried by several ranges" in note for note in links.notes)


def test_spans_and_device_ranges_are_not_what_a_launch_lies_in() -> None:
    recorded = trace(
        ranges=[
            op("phase", 5, 100, category="span"),
            op("aten::mm", 0, 100),
            op("step", 6, 90, category="device", device=0, stream=7, thread=-1),
        ],
        calls=[call(3, 20)],
        kernels=[kernel(3, 200)],
    )
    links = link(recorded)
    assert names(recorded, links) == ["aten::mm"]
    assert links.parent.tolist() == [-1, -1, -1]


def test_a_backward_kernel_belongs_to_the_operator_on_autograds_thread() -> None:
    recorded = trace(
        ranges=[
            annotation("backward", 0, 1000),
            op("autograd::engine::evaluate_function: MmBackward0", 10, 500, thread=AUTOGRAD),
            op("MmBackward0", 20, 490, thread=AUTOGRAD),
            op("aten::mm", 30, 400, thread=AUTOGRAD),
        ],
        calls=[call(3, 40, thread=AUTOGRAD)],
        kernels=[kernel(3, 2000)],
    )
    links = link(recorded)
    assert names(recorded, links) == ["aten::mm"]
    inner, outer = operators(recorded, links)
    assert recorded.ranges["name"][inner[0]] == recorded.ranges["name"][outer[0]] == "aten::mm"


# ---- finding the launch


def test_a_graph_launch_covers_every_kernel_of_the_graph() -> None:
    recorded = trace(
        ranges=[op("Torch-Compiled Region: 0/0", 0, 100), op("aten::mm", 200, 300)],
        calls=[call(3, 20, "cudaGraphLaunch"), call(4, 210)],
        kernels=[*(kernel(3, 400 + i) for i in range(1000)), kernel(4, 5000)],
    )
    links = link(recorded)
    assert links.call.tolist() == [0] * 1000 + [1]
    assert names(recorded, links) == ["Torch-Compiled Region: 0/0"] * 1000 + ["aten::mm"]


def test_a_kernel_without_a_launch_is_not_given_to_the_nearest_operator() -> None:
    recorded = trace(
        ranges=[op("aten::mm", 0, 1000)], calls=[call(3, 20)], kernels=[kernel(9, 30), kernel(0, 40), kernel(3, 50)]
    )
    links = link(recorded)
    assert links.method.tolist() == ["none", "none", "enclosure"]
    assert links.reason.tolist() == [NO_LAUNCH, NO_ID, ""]
    assert links.range.tolist() == [-1, -1, 0]
    assert "2 of 3 kernels have no launch in the trace" in links.notes


def test_a_launch_outside_of_every_range_is_said_to_be() -> None:
    links = link(trace(ranges=[op("aten::mm", 0, 10)], calls=[call(3, 10)], kernels=[kernel(3, 50)]))
    assert links.call.tolist() == [0]
    assert (links.method[0], links.reason[0]) == ("none", OUTSIDE)


def test_processes_with_the_same_correlation_and_external_ids_are_kept_apart() -> None:
    recorded = trace(
        ranges=[op(f"aten::of{p}", 0, 100, external_id=5, process=p) for p in (1, 2)],
        calls=[call(3, 20, process=p) for p in (1, 2)],
        kernels=[kernel(3, 200 + p, external_id=5, process=p) for p in (1, 2, 3)],
    )
    links = link(recorded)
    assert names(recorded, links) == ["aten::of1", "aten::of2", ""]
    assert links.reason[2] == NO_LAUNCH


def test_of_nested_calls_with_one_correlation_id_the_inner_one_is_the_launch() -> None:
    recorded = trace(
        ranges=[op("aten::mm", 0, 100)],
        calls=[call(3, 20, end=60), call(3, 30, "cuLaunchKernel", end=50)],
        kernels=[kernel(3, 200)],
    )
    links = link(recorded)
    assert recorded.calls["name"][links.call[0]] == "cuLaunchKernel"


def test_a_call_that_launches_nothing_gives_way_to_one_that_does() -> None:
    recorded = trace(
        ranges=[op("aten::mm", 0, 100)],
        calls=[call(3, 20), call(3, 40, "cudaEventRecord"), call(3, 60, "cudaStreamSynchronize")],
        kernels=[kernel(3, 200)],
    )
    assert link(recorded).call.tolist() == [0]


def test_an_id_that_comes_again_belongs_to_the_last_launch_once_the_earlier_ones_have_had_their_kernels() -> None:
    recorded = trace(
        ranges=[op("aten::mm", 0, 1000)],
        calls=[call(3, 20), call(3, 220, "cudaGraphLaunch"), call(3, 420)],
        kernels=[kernel(3, 100), kernel(3, 300), kernel(3, 310), kernel(3, 500)],
    )
    assert link(recorded).call.tolist() == [0, 1, 1, 2]


def test_a_kernel_after_two_launches_of_its_id_is_not_guessed() -> None:
    recorded = trace(
        ranges=[op("aten::mm", 0, 1000)],
        calls=[call(3, 20), call(3, 220), call(3, 420)],
        kernels=[kernel(3, 300), kernel(3, 310), kernel(3, 500)],
    )
    links = link(recorded)
    assert links.call.tolist() == [-1, -1, -1]
    assert set(links.reason) == {SEVERAL_LAUNCHES}


def test_a_kernel_before_every_launch_of_its_id_has_none() -> None:
    recorded = trace(
        ranges=[op("aten::mm", 0, 1000)], calls=[call(3, 20), call(3, 220)], kernels=[kernel(3, 10), kernel(3, 30)]
    )
    links = link(recorded)
    assert links.call.tolist() == [-1, 0]
    assert links.reason.tolist() == [LAUNCHED_LATER, ""]


def test_kernels_that_start_before_their_launch_are_counted() -> None:
    recorded = trace(
        ranges=[op("aten::mm", 0, 1000)], calls=[call(3, 20), call(4, 30)], kernels=[kernel(3, 15), kernel(4, 40)]
    )
    links = link(recorded)
    assert links.call.tolist() == [0, 1]
    assert any(note.startswith("1 of 2 launched kernels start before their launch") for note in links.notes)


@pytest.mark.parametrize("given", ["ranges", "calls", "kernels", "nothing"])
def test_tables_may_be_empty(given: str) -> None:
    rows = {"ranges": [op("aten::mm", 0, 100)], "calls": [call(3, 20)], "kernels": [kernel(3, 200)]}
    recorded = trace(**{name: table if name == given else [] for name, table in rows.items()})  # type: ignore[arg-type]
    links = link(recorded)
    assert len(links.call) == len(recorded.kernels)
    assert len(links.parent) == len(recorded.ranges)
    assert links.method.tolist() == ["none"] * len(recorded.kernels)
    assert device_annotation(recorded).tolist() == [-1] * len(recorded.kernels)


# ---- annotations on the device, operators


def test_the_device_annotation_is_the_one_open_on_the_kernels_stream() -> None:
    on_device = {"category": "device", "thread": -1, "device": 0}
    recorded = trace(
        ranges=[
            op("step", 0, 100, stream=7, **on_device),
            op("block", 10, 50, stream=7, **on_device),
            op("other", 20, 60, stream=8, **on_device),
            op("cpu", 20, 60),
        ],
        calls=[],
        kernels=[kernel(1, 30), kernel(2, 31, stream=8), kernel(3, 70), kernel(4, 71, device=1), kernel(5, 100)],
    )
    rows = device_annotation(recorded)
    assert [recorded.ranges["name"][row] if row >= 0 else "" for row in rows] == ["block", "other", "step", "", ""]


@pytest.mark.parametrize(
    ("name", "category", "expected"),
    [
        ("aten::mm", "op", True),
        ("c10d::allreduce_", "op", True),
        ("my_lib::fused_op", "op", True),
        ("triton_poi_fused_add_0", "op", True),
        ("graph_0_cpp_fused_add_1", "op", True),
        ("aten::mm", "annotation", False),
        ("aten::mm", "span", False),
        ("aten::mm", "device", False),
        ("Torch-Compiled Region: 0/0", "op", False),
        ("## Call CompiledFxGraph abc ##", "op", False),
        ("TorchDynamo Cache Lookup", "op", False),
        ("ProfilerStep#3", "op", False),
        ("fxopt::extern_kernels.mm:3", "op", False),
        ("autograd::engine::evaluate_function: MmBackward0", "op", False),
        ("torch::autograd::AccumulateGrad", "op", False),
        ("MmBackward0", "op", False),
        ("", "op", False),
    ],
)
def test_operators_are_told_from_the_ranges_of_frameworks(name: str, category: str, expected: bool) -> None:
    assert is_operator(name, category) is expected


def test_the_innermost_and_outermost_operator_skip_what_is_none() -> None:
    recorded = trace(
        ranges=[
            annotation("step", 0, 100),
            op("Torch-Compiled Region: 0/0", 1, 99),
            op("aten::linear", 2, 90),
            annotation("mine", 3, 80),
            op("aten::addmm", 4, 70),
            annotation("fxopt::extern_kernels.addmm:1", 5, 60),
        ],
        calls=[call(1, 10), call(2, 75), call(3, 95)],
        kernels=[kernel(1, 200), kernel(2, 210), kernel(3, 220), kernel(4, 230)],
    )
    inner, outer = operators(recorded, link(recorded))
    found = [[recorded.ranges["name"][row] if row >= 0 else "" for row in rows] for rows in (inner, outer)]
    assert found == [["aten::addmm", "aten::linear", "", ""], ["aten::linear", "aten::linear", "", ""]]


# ---- real files


# What test_corpus_kineto.py counts of these files is what the verdicts rest on.
VERDICTS = {
    "hta_a100_alexnet_extid_is_correlation.json.gz": "equal correlation ids",
    "hta_a100_multi_stream_events.json.gz": "trusted",
    "hta_a100_triton_example.json.gz": "trusted",
    "hta_a100_simple_add_2023.json.gz": "equal correlation ids",
    "hta_gp100_gpu_user_annotation.json.gz": "equal correlation ids",
    "hta_hand_trimmed_missing_launches.json.gz": "equal correlation ids",
    "hta_large_integer_fields.json.gz": "absent",
    "hta_rank1_no_cpu_ops_extid0.json.gz": "name no range",
    "kineto_docs_h100_no_extid.json": "absent",
    "tl_b300_moe.json.gz": "trusted",
    "tl_h100_bert.json.gz": "trusted",
    "tl_h100_qwen_kernels_without_launch.json.gz": "trusted",
    "tl_mi300_sglang_hipgraph.json.gz": "trusted",
    "tl_mi300_torch_compile_triton.json.gz": "trusted",
}


@pytest.mark.parametrize("file", VERDICTS)
def test_whether_the_ids_of_a_recorded_trace_can_be_trusted(shared: Path, file: str) -> None:
    links = link(read(shared / "corpus" / "kineto" / file))
    assert links.external_ids == VERDICTS[file]
    assert all(bool(reason) == (row < 0) for reason, row in zip(links.reason, links.range, strict=True))


def test_the_largest_recorded_trace_is_linked_as_the_interval_tree_links_it(shared: Path) -> None:
    recorded = read(shared / "corpus" / "kineto" / "hta_v100_19370_kernels_54MB.json.gz")
    links = link(recorded)
    of_kernels = (recorded.kernels["kind"] == "kernel").to_numpy()
    assert int((links.call[of_kernels] >= 0).sum()) == int(of_kernels.sum()) == 19370
    assert links.external_ids == "equal correlation ids"
    ranges = recorded.ranges[recorded.ranges["category"].isin(["op", "annotation"])]
    launches = recorded.calls.iloc[links.call]
    by_tree = enclosing_by_tree(
        *(ranges[name].to_numpy() for name in ("start_ns", "end_ns", "thread")),
        launches["start_ns"].to_numpy(),
        launches["thread"].to_numpy(),
    )
    assert links.range.tolist() == np.append(ranges.index.to_numpy(), -1)[by_tree].tolist()


@pytest.mark.parametrize("capture", ["h200_sdpa", "h200_block", "h200_dynamic", "h200_graph"])
def test_ids_and_nesting_agree_on_every_kernel_of_the_captures(shared: Path, capture: str) -> None:
    recorded = read(shared / "captures" / capture / "kineto.trace.json.gz")
    links = link(recorded)
    assert len(links.call) > 0
    assert links.agrees.tolist() == [1] * len(links.call)
    assert set(links.method) == {"correlation"}


def test_two_graph_launches_cover_42_of_the_44_kernels_of_the_capture(shared: Path) -> None:
    recorded = read(shared / "captures" / "h200_graph" / "kineto.trace.json.gz")
    links = link(recorded)
    by_call = Counter(recorded.calls["name"].to_numpy()[links.call])
    assert by_call["cudaGraphLaunch"] == 42
    assert sorted(Counter(links.call.tolist()).values()) == [1, 1, 21, 21]


@pytest.mark.parametrize(
    ("file", "launched", "ranged", "operators"),
    [
        # By correlation id alone 3,579 kernels would have a launch, and 285 of them more than one.
        ("corpus/nsys/nsys2026.2_schema3.25.0_h100x2_mfu_after.sqlite", 3577, 3577, {"ncclGroupEnd": 60}),
        ("captures/h200_sdpa/nsys.sqlite", 56, 22, {"aten::mm": 16, "aten::_efficient_attention_forward": 2}),
    ],
)
def test_kernels_of_nsys_are_joined_by_process_and_correlation_id(
    shared: Path, file: str, launched: int, ranged: int, operators: dict[str, int]
) -> None:
    recorded = nsys.read(shared / file)
    links = link(recorded)
    of_kernels = (recorded.kernels["kind"] == "kernel").to_numpy()
    found = links.range[of_kernels]
    counted = Counter(recorded.ranges["name"].to_numpy()[found[found >= 0]])
    assert int((links.call[of_kernels] >= 0).sum()) == launched
    assert int((found >= 0).sum()) == ranged
    assert {name: counted[name] for name in operators} == operators
    assert set(links.reason[of_kernels & (links.range < 0)]) <= {NO_LAUNCH, OUTSIDE}
