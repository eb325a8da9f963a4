"""Kernels of a CUDA graph's replay: told apart by where they were recorded, or by the wrapper's order."""

from __future__ import annotations

import pytest

from profiler_core.attribute.engine import attribute
from profiler_core.attribute.graph_replay import captured_at, claims_by_order, is_graph_launch
from profiler_core.collect.provenance import Launch, NodeInfo, Provenance
from profiler_core.trace import Trace

GEMM = "ampere_sgemm_64x64_tn"
SPLIT = "void cublasLt::splitKreduce_kernel<32, 16, int, float>(cublasLt::cublasSplitKParams<float>)"
FMHA = "fmha_cutlassF_f32_aligned_64x64_rf_sm80"


def provenance_of(*kernels: str) -> Provenance:
    launches = tuple(
        Launch(name, n, (f"n{n}",), not name.startswith("triton_")) for n, name in enumerate(kernels, start=1)
    )
    nodes = {node: NodeInfo(node, "call_function", "t") for launch in launches for node in launch.nodes}
    return Provenance("2.0", launches, nodes, "")


BLOCK = provenance_of(
    "triton_poi_a", "extern_kernels.mm", "triton_poi_b", "extern_kernels.addmm", "triton_poi_a", "triton_poi_c"
)
REPLAYED = ["triton_poi_a", GEMM, SPLIT, "triton_poi_b", GEMM, "triton_poi_a", "triton_poi_c"]
RIGHT = [
    "triton_poi_a:1",
    "extern_kernels.mm:2",
    "extern_kernels.mm:2",
    "triton_poi_b:3",
    "extern_kernels.addmm:4",
    "triton_poi_a:5",
    "triton_poi_c:6",
]


def claimed(names: list[str], provenance: Provenance = BLOCK) -> list[str]:
    claims = claims_by_order(names, provenance)
    assert len(claims) == len(names) and all(claim.reason for claim in claims)
    return [claim.launch for claim in claims]


@pytest.mark.parametrize(
    ("api", "whole"),
    [
        ("cudaGraphLaunch", True),
        ("cudaGraphLaunch_v10000", True),
        ("cuGraphLaunch_ptsz", True),
        ("hipGraphLaunch", True),
        ("cudaLaunchKernel", False),
        ("cudaGraphInstantiate", False),
    ],
)
def test_what_launches_a_whole_graph(api: str, whole: bool) -> None:
    assert is_graph_launch(api) is whole


def test_a_replay_in_the_wrappers_order_is_claimed_kernel_by_kernel() -> None:
    assert claimed(REPLAYED) == RIGHT


def test_runs_of_library_kernels_are_told_apart_by_their_families() -> None:
    provenance = provenance_of(
        "triton_poi_a", "extern_kernels.mm", "torch.ops.aten._scaled_dot_product_efficient_attention.default",
        "extern_kernels.addmm", "triton_poi_b",
    )  # fmt: skip
    keys = [launch.key for launch in provenance.launches]
    names = ["triton_poi_a", GEMM, GEMM, FMHA, GEMM, "triton_poi_b"]
    assert claimed(names, provenance) == [keys[0], keys[1], keys[1], keys[2], keys[3], keys[4]]


def test_two_products_side_by_side_with_three_kernels_stay_unclaimed() -> None:
    provenance = provenance_of("triton_poi_a", "extern_kernels.mm", "extern_kernels.mm", "triton_poi_b")
    assert claimed(["triton_poi_a", GEMM, GEMM, GEMM, "triton_poi_b"], provenance) == [
        "triton_poi_a:1", "", "", "", "triton_poi_b:4",
    ]  # fmt: skip
    # as many kernels as products: one each
    assert claimed(["triton_poi_a", GEMM, GEMM, "triton_poi_b"], provenance) == [x.key for x in provenance.launches]


def test_a_replay_of_other_code_is_not_claimed() -> None:
    assert claimed([GEMM, GEMM]) == ["", ""]
    assert claimed(["triton_poi_zzz", GEMM, "triton_poi_c"]) == ["", "", "triton_poi_c:6"]
    assert claimed(["triton_poi_zzz", GEMM, "triton_poi_yyy"]) == [""] * 3
    one = provenance_of("triton_poi_a", "triton_poi_b", "extern_kernels.mm", "triton_poi_c")
    assert claimed([GEMM, "triton_poi_c"], one) == ["", "triton_poi_c:4"]  # its name alone says so
    assert claimed([]) == []


@pytest.mark.parametrize("at", range(len(REPLAYED)))
def test_a_kernel_that_is_missing_shifts_no_other(at: int) -> None:
    found = claimed(REPLAYED[:at] + REPLAYED[at + 1 :])
    for key, right in zip(found, RIGHT[:at] + RIGHT[at + 1 :], strict=True):
        assert key in ("", right)
        if right.startswith("triton_"):  # the generated ones stay known
            assert key == right


@pytest.mark.parametrize("at", range(len(REPLAYED)))
def test_a_kernel_that_is_there_twice_shifts_no_other(at: int) -> None:
    found = claimed(REPLAYED[: at + 1] + REPLAYED[at:])
    for place, (key, right) in enumerate(zip(found, RIGHT[: at + 1] + RIGHT[at:], strict=True)):
        assert key in ("", right)
        if right.startswith("triton_") and place not in (at, at + 1):
            assert key == right


# --- recorded nodes ----------------------------------------------------------------------------------------


def recorded(**kernels: list[int]) -> Trace:
    """Two kernels of an executable graph 20, whose nodes are clones of graph 10's, which thread 1 recorded."""
    count = len(kernels["graph_node"])
    return Trace.build(
        kernels={
            "name": ["k"] * count,
            "start_ns": list(range(500, 500 + count)),
            "duration_ns": [5] * count,
            "correlation": [9] * count,
            "graph": [20] * count,
            **kernels,
        },
        calls={"name": ["cudaGraphLaunch"], "thread": [1], "start_ns": [400], "end_ns": [410], "correlation": [9]},
        captures={
            "thread": [1, 1, 1, 1],
            "time_ns": [15, 25, 90, 91],
            "graph": [10, 10, 20, 20],
            "graph_node": [1, 2, 101, 102],
            "original_graph": [0, 0, 10, 10],
            "original_node": [0, 0, 1, 2],
        },
        ranges={
            "name": ["aten::mm", "aten::add", "aten::nearby"],
            "thread": [1, 1, 1],
            "start_ns": [10, 20, 395],
            "end_ns": [19, 29, 450],
        },
    )


def test_a_replayed_node_is_followed_through_its_clone_to_the_recording() -> None:
    process, thread, time = captured_at(recorded(graph_node=[101, 102, 103]))
    assert time.tolist() == [15, 25, -1] and thread.tolist() == [1, 1, -1] and process.tolist() == [0, 0, 0]


def test_the_operator_is_the_one_that_recorded_the_kernel_and_not_the_one_around_the_replay() -> None:
    kernels = attribute(recorded(graph_node=[102, 101]), eager_nodes=True).kernels
    assert list(kernels["operator"]) == ["aten::add", "aten::mm"]
    assert set(kernels["operator_method"]) == {"correlation"}


def test_clones_that_lead_in_a_circle_end() -> None:
    trace = recorded(graph_node=[101])
    trace.captures.loc[:, ["graph", "graph_node", "original_graph", "original_node"]] = [
        (20, 101, 20, 102), (20, 102, 20, 101), (20, 1, 20, 1), (20, 2, 20, 2),
    ]  # fmt: skip
    assert captured_at(trace)[2].tolist() == [-1]


def test_on_several_streams_order_decides_nothing() -> None:
    trace = Trace.build(
        kernels={
            "name": REPLAYED,
            "start_ns": list(range(500, 507)),
            "duration_ns": [5] * 7,
            "correlation": [9] * 7,
            "stream": [7, 7, 7, 8, 7, 7, 7],
        },
        calls={"name": ["cudaGraphLaunch"], "thread": [1], "start_ns": [400], "end_ns": [410], "correlation": [9]},
    )
    kernels = attribute(trace, BLOCK).kernels
    assert set(kernels["method"]) == {"none"} and set(kernels["operator"]) == {"cudaGraphLaunch"}
    assert set(kernels["reason"]) == {"replayed on several streams, where order decides nothing"}
