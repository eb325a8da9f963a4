"""A profile summed up by what its kernels and nodes have in common."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from profiler_core.attribute.engine import attribute
from profiler_core.collect.provenance import Launch, NodeInfo, Provenance
from profiler_core.grouping import launch_counters
from profiler_core.profiles import Profile
from profiler_core.trace import Kernel, Op, Trace


def node(name: str, size: float | None, line: int, path: str, cls: str) -> NodeInfo:
    return NodeInfo(
        name, "call_function", f"aten.{name.split('_')[0]}", bytes=size, file="m.py", line=line, module_path=path,
        module_class=cls,
    )  # fmt: skip


GRAPH = Provenance(
    "2.0",
    (
        Launch("extern_kernels.mm", 1, ("mm",), True),
        Launch("triton_poi_fused_add_exp_0", 2, ("add", "view", "exp"), False),
        Launch("extern_kernels.mm", 3, ("mm_1",), True),
    ),
    {
        "mm": node("mm", 8.0, 10, "h.0.up", "Linear"),
        "add": node("add", 3.0, 11, "h.0.up", "Linear"),
        "view": node("view", 0.0, 12, "h.0", "Block"),
        "exp": node("exp", 1.0, 13, "h.0", "Block"),
        "mm_1": node("mm_1", 8.0, 10, "h.1.up", "Linear"),
    },
    "",
)
RAN = (
    ("fxopt::extern_kernels.mm:1", "aten::mm", "ampere_sgemm_64x64_tn", 100),
    ("fxopt::triton_poi_fused_add_exp_0:2", "triton_poi_fused_add_exp_0", "triton_poi_fused_add_exp_0", 40),
    ("fxopt::extern_kernels.mm:3", "aten::mm", "ampere_sgemm_64x64_tn", 60),
    ("somebody's", "aten::other", "ncclDevKernel_AllReduce_Sum_f32", 20),
)
CALLS = 2


@pytest.fixture
def profile() -> Profile:
    """Two calls of 220 ns each, and one copy of 10 ns without a launch in the second."""
    ops, kernels = [], []
    for call in range(CALLS):
        t = 10_000 * call
        ops.append(Op(f"fxopt::iteration#{call}", 1, t, t + 5_000))
        for i, (around, operator, name, duration) in enumerate(RAN):
            at = t + 100 * i
            ops += [Op(around, 1, at, at + 60), Op(operator, 1, at + 5, at + 50)]
            ops.append(Op("cudaLaunchKernel", 1, at + 10, at + 12, at + 1, "cuda_runtime"))
            kernels.append(Kernel(name, 0, 7, t + 1_000 + 200 * i, duration, at + 1))
    kernels.append(Kernel("Memcpy DtoH", 0, 7, 19_000, 10, 99_999))
    found = attribute(Trace.of(ops, kernels, iterations=CALLS), GRAPH)
    return replace(found, nodes=found.nodes.assign(layer_class=["A", "A", "A", "A", "A"]))


def times(profile: Profile, column: str) -> dict[object, float]:
    """Window times by value, ns."""
    table = profile.by(column)
    assert list(table["time_ns"]) == sorted(table["time_ns"], reverse=True)  # longest first
    assert table["time_ns"].sum() * CALLS == pytest.approx(profile.total_ns)
    assert table["share"].sum() == pytest.approx(1.0)
    assert table["kernels"].sum() * CALLS == pytest.approx(len(profile.window))
    return dict(zip(table[column], (table["time_ns"] * CALLS).round(6), strict=True))


def test_by_operator(profile: Profile) -> None:
    expected = {"aten::mm": 320, "triton_poi_fused_add_exp_0": 80, "aten::other": 40, "": 10}
    assert times(profile, "operator") == expected


def test_by_family(profile: Profile) -> None:
    assert times(profile, "family") == {"gemm": 320, "pointwise": 80, "collective": 40, "memcpy": 10}


def test_by_node_the_time_of_a_fused_kernel_is_shared_by_the_bytes_and_a_view_gets_none(profile: Profile) -> None:
    assert times(profile, "node") == {"mm": 200, "mm_1": 120, "add": 60, "exp": 20, "": 50}
    table = profile.by("node").set_index("node")
    assert (table.loc["add", "kernels"], table.loc["exp", "kernels"]) == (0.75, 0.25)
    window = profile.nodes.set_index("node")["window_ns"]
    assert {name: window[name] for name in ("mm", "mm_1", "add", "exp")} == {
        "mm": 200,
        "mm_1": 120,
        "add": 60,
        "exp": 20,
    }


def test_by_line_what_was_written_once_is_summed_over_the_layers(profile: Profile) -> None:
    assert times(profile, "line") == {"m.py:10": 320, "m.py:11": 60, "m.py:13": 20, "": 50}


def test_by_module(profile: Profile) -> None:
    assert times(profile, "module_path") == {"h.0.up": 260, "h.1.up": 120, "h.0": 20, "": 50}
    assert times(profile, "module_class") == {"Linear": 380, "Block": 20, "": 50}


def test_by_layer_class(profile: Profile) -> None:
    assert times(profile, "layer_class") == {"A": 400, "": 50}


def test_by_a_column_in_which_values_are_missing(profile: Profile) -> None:
    by_thread = times(profile, "thread")
    assert len(by_thread) == 2 and by_thread[1] == 440
    assert profile.by("grid")["grid"].isna().all()
    assert len(profile.by("waves_per_sm")) == 1  # not known of any
    assert times(profile, "opaque") == {True: 360, False: 90}
    assert times(profile, "nodes")[("add", "view", "exp")] == 80


def test_any_name_is_a_value(profile: Profile) -> None:
    profile.kernels["name"] = pd.Series([f"k\ud800{i % 2}" for i in range(len(profile.kernels))], dtype=object)
    assert set(times(profile, "name")) == {"k\ud8000", "k\ud8001"}
    assert times(profile, "stream") == {7: 450} and profile.by("stream")["stream"].dtype.kind == "i"


def test_lists_count_as_tuples(profile: Profile) -> None:
    profile.kernels["labels"] = [["a", ["b"]] if i % 2 else [] for i in range(len(profile.kernels))]
    assert set(times(profile, "labels")) == {("a", ("b",)), ()}


@pytest.mark.parametrize("value", [{"a"}, {"a": 1}, np.array([1]), ("a", {"b"})], ids=["set", "dict", "array", "inner"])
def test_what_cannot_be_compared_is_refused_with_its_column(profile: Profile, value: object) -> None:
    profile.kernels["labels"] = [value] * len(profile.kernels)
    with pytest.raises(ValueError, match=r"column 'labels': cannot group by a (set|dict|ndarray): make it a text"):
        profile.by("labels")


def test_several_columns_are_refused(profile: Profile) -> None:
    with pytest.raises(TypeError, match=r"by\(\) takes the name of one column, not a list"):
        profile.by(["name"])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["time_ns", "share", "kernels"])
def test_a_column_with_the_name_of_a_result_is_to_be_renamed(profile: Profile, name: str) -> None:
    profile.kernels[name] = 1
    with pytest.raises(ValueError, match=f"column '{name}' .*: rename it"):
        profile.by(name)
    assert times(profile, "family")["gemm"] == 320  # others do not mind it


def test_nodes_of_unknown_bytes_share_equally(profile: Profile) -> None:
    nodes = {**GRAPH.nodes, "add": node("add", None, 11, "h.0.up", "Linear")}
    trace = Trace.of(
        [Op("fxopt::triton_poi_fused_add_exp_0:2", 1, 0, 50), Op("cudaLaunchKernel", 1, 5, 6, 1, "cuda_runtime")],
        [Kernel("triton_poi_fused_add_exp_0", 0, 7, 100, 40, 1)],
    )
    by_node = attribute(trace, replace(GRAPH, nodes=nodes)).by("node").set_index("node")["time_ns"]
    assert by_node.to_dict() == {"add": 20.0, "exp": 20.0}


@pytest.mark.parametrize("column", ["nonsense", "layer_class", "time_ns"])
def test_an_unknown_column_is_refused_with_those_there_are(profile: Profile, column: str) -> None:
    profile = replace(profile, nodes=profile.nodes.drop(columns="layer_class"))
    with pytest.raises(KeyError) as error:
        profile.by(column)
    text = str(error.value)
    assert f"no column '{column}'" in text and "operator" in text and "module_path" in text
    assert "layer_class" not in text.replace(f"'{column}'", "")


def test_a_profile_without_kernels_has_no_groups() -> None:
    empty = attribute(Trace.build(), GRAPH)
    assert len(empty.by("operator")) == len(empty.by("node")) == len(empty.by("line")) == 0
    assert len(launch_counters(empty)) == 0


def test_the_same_node_name_in_two_graphs_is_two_nodes() -> None:
    first, second = replace(GRAPH, graph="0/0"), replace(GRAPH, graph="0/1")
    ops, kernels = [], []
    for i, tag in enumerate(("0/0", "0/1")):
        ops.append(Op(f"fxopt::extern_kernels.mm:1@{tag}", 1, 100 * i, 100 * i + 50))
        ops.append(Op("cudaLaunchKernel", 1, 100 * i + 10, 100 * i + 12, i + 1, "cuda_runtime"))
        kernels.append(Kernel("gemm", 0, 7, 1000 + 100 * i, 30 + i, i + 1))
    profile = attribute(Trace.of(ops, kernels), [first, second])
    ran = profile.nodes[profile.nodes["window_ns"] > 0]
    assert list(zip(ran["graph"], ran["node"], ran["window_ns"], strict=True)) == [("0/0", "mm", 30), ("0/1", "mm", 31)]
    assert profile.by("node").set_index("node")["time_ns"].to_dict() == {"mm (0/0)": 30.0, "mm (0/1)": 31.0}
    assert launch_counters(profile)["time_ns"].to_dict() == {
        ("0/0", "extern_kernels.mm:1"): 30.0,
        ("0/1", "extern_kernels.mm:1"): 31.0,
    }


def test_two_compiles_of_one_name_are_numbered_and_the_same_compile_twice_is_one() -> None:
    """The logs of two processes both begin with 0/0."""
    other = replace(GRAPH, launches=GRAPH.launches[:1], cache_key="other", graph="0/0")
    one = replace(GRAPH, cache_key="one", graph="0/0")
    ops = [
        Op("## Call CompiledFxGraph other ##", 1, 0, 90),
        Op("aten::mm", 1, 10, 50),
        Op("cudaLaunchKernel", 1, 20, 22, 1, "cuda_runtime"),
    ]
    trace = Trace.of(ops, [Kernel("gemm", 0, 7, 100, 33, 1)])
    profile = attribute(trace, [one, other, one])
    assert set(profile.nodes["graph"]) == {"0/0 #1", "0/0 #2"}
    assert (profile.kernels["graph"][0], int(profile.nodes["window_ns"].sum())) == ("0/0 #2", 33)
    assert set(attribute(trace, [other, other]).nodes["graph"]) == {"0/0"}


def test_of_two_compiles_with_one_key_neither_is_taken_unless_they_are_the_same() -> None:
    ops = [
        Op("## Call CompiledFxGraph k ##", 1, 0, 90),
        Op("aten::mm", 1, 10, 50),
        Op("cudaLaunchKernel", 1, 20, 22, 1, "cuda_runtime"),
    ]
    trace = Trace.of(ops, [Kernel("gemm", 0, 7, 100, 33, 1)])
    mm = replace(GRAPH, launches=GRAPH.launches[:1], cache_key="k", graph="0/0")
    elsewhere = replace(mm, graph="1/0", nodes={**mm.nodes, "mm": node("mm", 8.0, 99, "h.7", "Linear")})
    row = attribute(trace, [mm, elsewhere]).kernels.iloc[0]
    assert row["method"] == "none" and "more than one" in row["reason"]
    assert attribute(trace, [mm, replace(mm, graph="1/0")]).kernels.iloc[0]["graph"] == "0/0"


def test_a_graph_whose_key_is_known_is_not_a_call_with_another_key_whatever_ran_in_it() -> None:
    ops = [
        Op("## Call CompiledFxGraph unknown ##", 1, 0, 90),
        Op("triton_poi_fused_add_exp_0", 1, 10, 50),
        Op("cuLaunchKernel", 1, 20, 22, 1, "cuda_driver"),
    ]
    trace = Trace.of(ops, [Kernel("triton_poi_fused_add_exp_0", 0, 7, 100, 33, 1)])
    keyed = replace(GRAPH, cache_key="k", graph="0/0")
    unkeyed = replace(GRAPH, launches=GRAPH.launches[:1], graph="1/0")
    row = attribute(trace, [keyed, unkeyed]).kernels.iloc[0]
    assert row["method"] == "none" and "provenance is not known" in row["reason"]
    assert attribute(trace, [replace(keyed, cache_key=""), unkeyed]).kernels.iloc[0]["graph"] == "0/0"
