"""Whatever a trace and the provenance beside it hold: nothing raises, and no nanosecond is lost or counted twice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from profiler_core.attribute.engine import attribute
from profiler_core.collect.provenance import Launch, NodeInfo, Provenance
from profiler_core.profiles import Profile
from profiler_core.trace import Kernel, Op, Trace

END = 60  # small, so that ranges meet, nest, overlap and coincide
RANGES = (
    "aten::mm",
    "aten::add",
    "aten::_cudnn_rnn",
    "nccl:all_reduce",
    "triton_poi_fused_a_0",
    "cpp_fused_a_0",
    "fxopt::extern_kernels.mm:1",
    "fxopt::triton_poi_fused_a_0:2",
    "fxopt::triton_poi_fused_a_0:2@0/1",
    "fxopt::triton_poi_fused_gone_9:9",
    "## Call CompiledFxGraph k0 ##",
    "## Call CompiledFxGraph k1 ##",
    "## Call CompiledFxGraph other ##",
    "autograd::engine::evaluate_function: MmBackward0",
    "nn.Module: Linear_0",
)
KERNELS = ("gemm", "triton_poi_fused_a_0", "triton_poi_fused_b_1", "fmha_cutlassF_f32", "ncclDevKernel_AllReduce", "")
KEYS = (("extern_kernels.mm", 1), ("triton_poi_fused_a_0", 2), ("triton_poi_fused_b_1", 3), ("cpp_fused_a_0", 4))
NODES = ("mm", "view", "add", "unknown")

small = st.integers(0, END)
few = st.integers(0, 6)


def rows_of(draw: st.DrawFn, columns: dict[str, st.SearchStrategy[Any]], most: int) -> dict[str, list[Any]]:
    """A table: columns of one length."""
    count = draw(st.integers(0, most))
    return {name: draw(st.lists(values, min_size=count, max_size=count)) for name, values in columns.items()}


def ended(table: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """``length`` made into ``end_ns``."""
    length = table.pop("length")
    return {**table, "end_ns": [start + n for start, n in zip(table["start_ns"], length, strict=True)]}


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    ranges = ended(
        rows_of(
            draw,
            {
                "name": st.sampled_from(RANGES),
                "category": st.sampled_from(["op", "op", "op", "annotation", "span", "device"]),
                "thread": st.integers(1, 2),
                "process": st.integers(0, 1),
                "start_ns": small,
                "length": st.sampled_from([0, 1, 5, 20, END]),
                "external_id": few,
            },
            14,
        )
    )
    windows = draw(st.lists(st.tuples(st.sampled_from(["fxopt::iteration#", "ProfilerStep#"]), few), max_size=4))
    step = END // max(len(windows), 1)
    for at, (prefix, number) in enumerate(windows):
        row = (f"{prefix}{number}", "annotation", 1, 0, at * step, 0, (at + 1) * step)
        names = ("name", "category", "thread", "process", "start_ns", "external_id", "end_ns")
        for name, value in zip(names, row, strict=True):
            ranges[name].append(value)
    calls = ended(
        rows_of(
            draw,
            {
                "name": st.sampled_from(["cudaLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "hipGraphLaunch"]),
                "thread": st.integers(1, 2),
                "process": st.integers(0, 1),
                "start_ns": small,
                "length": few,
                "correlation": few,
                "external_id": few,
            },
            8,
        )
    )
    kernels = rows_of(
        draw,
        {
            "name": st.sampled_from(KERNELS),
            "kind": st.sampled_from(["kernel", "kernel", "kernel", "memcpy", "memset"]),
            "process": st.integers(0, 1),
            "device": st.integers(-1, 1),
            "stream": st.integers(-1, 1),
            "start_ns": small,
            "duration_ns": st.integers(0, 10**12 + 7),
            "correlation": few,
            "external_id": few,
            "graph": st.sampled_from([0, 0, 1]),
            "graph_node": st.sampled_from([0, 0, 1, 2]),
            "grid_x": few,
            "grid_y": few,
            "block_x": few,
            "registers": st.integers(-1, 255),
            "shared_static": st.integers(-1, 9),
            "shared_dynamic": st.integers(-1, 9),
        },
        10,
    )
    captures = rows_of(
        draw,
        {
            "thread": st.integers(1, 2),
            "process": st.integers(0, 1),
            "time_ns": small,
            "graph": st.sampled_from([0, 1]),
            "graph_node": st.integers(0, 2),
            "original_graph": st.sampled_from([0, 1]),
            "original_node": st.integers(0, 2),
        },
        3,
    )
    return Trace.build(
        kernels=kernels,
        calls=calls,
        ranges=ranges,
        captures=captures,
        device_type=draw(st.sampled_from(["cuda", "cuda", "cpu"])),
        meta={"source": draw(st.sampled_from(["kineto", "nsys"]))},
    )


@st.composite
def programs(draw: st.DrawFn) -> Trace:
    """A trace as a program would leave it: operators and launch ranges in calls of graphs, each of which launches
    kernels, on two threads and in several iterations; some launches and kernels are lost.
    """
    ops: list[Op] = []
    kernels: list[Kernel] = []
    step = st.tuples(
        st.sampled_from(["", "## Call CompiledFxGraph k0 ##", "## Call CompiledFxGraph k1 ##"]),
        st.lists(st.sampled_from(RANGES[:9]), min_size=1, max_size=2),
        st.integers(1, 2),
        st.sampled_from(["cudaLaunchKernel", "cudaLaunchKernel", "cudaGraphLaunch"]),
        st.lists(st.sampled_from(KERNELS), max_size=3),
        st.sampled_from(["kept", "kept", "kept", "launch lost", "kernels lost"]),
    )
    calls = draw(st.lists(st.lists(step, max_size=4), min_size=1, max_size=4))
    for number, steps in enumerate(calls):
        start = 1000 * number
        ops.append(Op(f"fxopt::iteration#{number}", 1, start, start + 900))
        for place, (call, around, thread, api, names, fate) in enumerate(steps):
            at, correlation = start + 100 * place, 10 * number + place + 1
            nested = [call, *around] if call else around
            ops += [Op(name, thread, at + i, at + 90 - i) for i, name in enumerate(nested)]
            if fate != "launch lost":
                ops.append(Op(api, thread, at + 20, at + 22, correlation, "cuda_runtime"))
            if fate != "kernels lost":
                first = at + draw(st.sampled_from([30, 5000]))
                kernels += [Kernel(name, 0, 7, first + i, 11 + i, correlation) for i, name in enumerate(names)]
    return Trace.of(ops, kernels, iterations=len(calls), device_type=draw(st.sampled_from(["cuda", "cuda", "cpu"])))


@st.composite
def provenances(draw: st.DrawFn) -> Provenance:
    chosen = draw(st.lists(st.sampled_from(KEYS), unique=True, max_size=4))
    named = st.lists(st.sampled_from(NODES), unique=True, max_size=3)
    launches = tuple(
        Launch(kernel, handle, tuple(draw(named)), kernel.startswith("extern")) for kernel, handle in chosen
    )
    size = st.one_of(st.none(), st.just(0.0), st.floats(0, 1e12))
    nodes = {name: NodeInfo(name, "call_function", f"aten.{name}", bytes=draw(size)) for name in NODES[:-1]}
    tag, key = draw(st.sampled_from(["", "0/0", "0/1"])), draw(st.sampled_from(["", "k0", "k1"]))
    return Provenance("2.0", launches, nodes, "", tag, key)


anything = st.one_of(traces(), programs())
whatever = given(anything, st.lists(provenances(), max_size=3), st.booleans())
effort = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@effort
@whatever
def test_time_is_conserved_to_the_nanosecond(trace: Trace, graphs: Sequence[Provenance], eager: bool) -> None:
    profile = attribute(trace, graphs, eager_nodes=eager)
    assert profile.attributed_ns + profile.unattributed_ns == profile.total_ns
    assert int(profile.nodes["window_ns"].sum()) == profile.attributed_ns
    assert int(profile.unattributed()["time_ns"].sum()) == profile.unattributed_ns
    assert profile.total_ns + profile.outside_ns == int(profile.kernels["duration_ns"].sum())
    if trace.device_type == "cuda":  # no kernel is dropped, and none is added
        assert list(profile.kernels["duration_ns"]) == list(trace.kernels["duration_ns"])
    assert profile.iterations >= 1 and profile.kernels["iteration"].min() >= -1 if len(profile.kernels) else True
    assert profile.window["iteration"].nunique() <= profile.iterations
    assert math.isnan(profile.kernel_ns) is False


@effort
@whatever
def test_every_kernel_says_how_its_nodes_are_known_or_why_not(
    trace: Trace, graphs: Sequence[Provenance], eager: bool
) -> None:
    profile = attribute(trace, graphs, eager_nodes=eager)
    known = {(row.graph, row.node) for row in profile.nodes.itertuples()}
    keys = {(launch.graph, launch.key) for launch in profile.launches}
    assert len(known) == len(profile.nodes)  # (graph, node) names one row
    for row in profile.kernels.itertuples():
        unknown = row.method == "none"
        assert unknown == (row.nodes == ()) == (row.confidence == "none")
        assert row.reason if unknown else row.method in ("correlation", "enclosure", "fusion_map")
        if row.method in ("correlation", "enclosure"):
            assert row.reason == "" and row.confidence in ("high", "medium")
        if row.method == "fusion_map":  # names and order never make sure, and the ground is given
            assert row.reason and row.confidence == "medium"
        if row.launch:
            assert (row.graph, row.launch) in keys
        elif not unknown:
            assert row.nodes == (row.top_operator,)
        assert unknown or any((row.graph, node) in known for node in row.nodes) or row.iteration < 0
        assert (row.operator == "") == (row.top_operator == "") == (row.operator_method == "none")


@effort
@whatever
def test_what_a_profile_is_summed_up_by_sums_to_the_total(
    trace: Trace, graphs: Sequence[Provenance], eager: bool
) -> None:
    profile = attribute(trace, graphs, eager_nodes=eager)
    rows = len(profile.window)
    for column in (*profile.kernels.columns, "node", "target", "module_path", "module_class", "file", "line"):
        table = profile.by(column)
        assert table["time_ns"].sum() * profile.iterations == pytest.approx(profile.total_ns, abs=1e-3)
        assert table["kernels"].sum() * profile.iterations == pytest.approx(rows)
        assert table["share"].sum() == pytest.approx(1.0 if profile.total_ns else 0.0)
        assert table[column].map(repr).is_unique


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@whatever
def test_a_profile_is_the_same_after_its_file(
    tmp_path_factory: pytest.TempPathFactory, trace: Trace, graphs: Sequence[Provenance], eager: bool
) -> None:
    import pandas as pd

    profile = attribute(trace, graphs, eager_nodes=eager)
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    profile.save(path)
    loaded = Profile.load(path)
    pd.testing.assert_frame_equal(loaded.kernels, profile.kernels)
    pd.testing.assert_frame_equal(loaded.nodes, profile.nodes)
    assert (loaded.launches, loaded.notes, loaded.iterations) == (profile.launches, profile.notes, profile.iterations)


@effort
@given(anything, st.lists(provenances(), max_size=2))
def test_attribution_leaves_its_trace_as_it_was(trace: Trace, graphs: Sequence[Provenance]) -> None:
    import pandas as pd

    tables = [getattr(trace, name).copy(deep=True) for name in ("kernels", "calls", "ranges", "captures")]
    first = attribute(trace, graphs, eager_nodes=True)
    for table, name in zip(tables, ("kernels", "calls", "ranges", "captures"), strict=True):
        pd.testing.assert_frame_equal(table, getattr(trace, name))
    pd.testing.assert_frame_equal(attribute(trace, graphs, eager_nodes=True).kernels, first.kernels)


# --- nothing, or next to nothing ---------------------------------------------------------------------------


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
@pytest.mark.parametrize("eager", [True, False])
def test_an_empty_trace_is_an_empty_profile(device_type: str, eager: bool, tmp_path: Path) -> None:
    profile = attribute(Trace.build(device_type=device_type), (), eager_nodes=eager)
    assert (len(profile.kernels), len(profile.nodes), profile.total_ns) == (0, 0, 0)
    assert math.isnan(profile.attributed_share)
    for column in ("operator", "line", "layer_class" if "layer_class" in profile.nodes else "name"):
        assert len(profile.by(column)) == 0
    profile.save(tmp_path / "p.json")
    assert len(Profile.load(tmp_path / "p.json").kernels) == 0


def test_a_trace_of_copies_alone_attributes_them_to_the_operators_that_copied() -> None:
    ops = (Op("aten::copy_", 1, 0, 50), Op("cudaMemcpyAsync", 1, 10, 20, 1, "cuda_runtime"))
    trace = Trace.of(ops, (Kernel("Memcpy HtoD", 0, 7, 30, 9, 1), Kernel("Memcpy DtoH", 0, 7, 60, 4, 2)))
    trace.kernels["kind"] = "memcpy"
    profile = attribute(trace, eager_nodes=True)
    assert (profile.total_ns, profile.attributed_ns) == (13, 9)
    assert list(profile.kernels["nodes"]) == [("aten::copy_",), ()]
    assert "no launch" in profile.kernels["reason"][1]


def test_a_range_of_no_length_holds_no_launch() -> None:
    ops = (
        Op("aten::mm", 1, 10, 10),  # begins with the launch, and is over
        Op("aten::add", 1, 5, 30),
        Op("cudaLaunchKernel", 1, 10, 12, 1, "cuda_runtime"),
    )
    profile = attribute(Trace.of(ops, (Kernel("k", 0, 7, 40, 9, 1),)), eager_nodes=True)
    assert list(profile.kernels["operator"]) == ["aten::add"]


def test_a_launch_whose_nodes_the_graph_does_not_have_is_unattributed() -> None:
    """Its time would be attributed, and stand at no node."""
    ops = (Op("fxopt::extern_kernels.mm:1", 1, 0, 50), Op("cudaLaunchKernel", 1, 10, 12, 1, "cuda_runtime"))
    graph = Provenance("2.0", (Launch("extern_kernels.mm", 1, ("elsewhere",), True),), {}, "")
    profile = attribute(Trace.of(ops, (Kernel("gemm", 0, 7, 40, 9, 1),)), graph)
    assert (profile.attributed_ns, profile.unattributed_ns) == (0, 9)
    assert profile.kernels["reason"][0] == "Inductor's mapping names no FX node for extern_kernels.mm:1"


def test_an_operator_around_a_graph_is_that_of_kernels_which_have_none_inside() -> None:
    ops = (
        Op("mylib::layer", 1, 0, 100),
        Op("## Call CompiledFxGraph k ##", 1, 10, 90),
        Op("a part of it", 1, 15, 80, category="user_annotation"),
        Op("cudaLaunchKernel", 1, 20, 22, 1, "cuda_runtime"),
    )
    row = attribute(Trace.of(ops, (Kernel("k", 0, 7, 200, 9, 1),)), eager_nodes=True).kernels.iloc[0]
    assert (row["operator"], row["top_operator"]) == ("mylib::layer", "mylib::layer")
    assert (row["method"], row["nodes"]) == ("none", ())  # it is in a graph, of which nothing is known


def test_an_annotation_with_a_librarys_name_makes_no_other_kernel_opaque() -> None:
    ops = (
        Op("nccl:all_reduce", 1, 0, 10, category="user_annotation"),
        Op("fxopt::cpp_fused_add_0:1", 1, 20, 50),
        Op("aten::mkldnn_rnn_layer", 1, 60, 90),
    )
    kernels = attribute(Trace.of(ops, (), device_type="cpu"), eager_nodes=True).kernels
    assert kernels.set_index("name")["opaque"].to_dict() == {"cpp_fused_add_0": False, "aten::mkldnn_rnn_layer": True}
