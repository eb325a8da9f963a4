"""Cases in which other profilers have been reported to attribute time wrongly, or to lose it without a word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from test_attribution import added, capture, h200_provenance, with_iterations

import profiler_core
from profiler_core.attribute.engine import attribute
from profiler_core.collect import torch_trace
from profiler_core.collect.chrome_trace import read
from profiler_core.collect.provenance import Launch, NodeInfo, Provenance
from profiler_core.names import same_kernel
from profiler_core.profiles import Profile
from profiler_core.range_names import graph_call_of
from profiler_core.trace import Kernel, Op, Trace


def launch(correlation: int, at: int, thread: int = 1, api: str = "cudaLaunchKernel") -> Op:
    return Op(api, thread, at, at + 2, correlation, "cuda_runtime")


def provenance_of(*launches: Launch, graph: str = "", key: str = "", **bytes_of: float) -> Provenance:
    names = dict.fromkeys(name for item in launches for name in item.nodes)
    nodes = {name: NodeInfo(name, "call_function", f"aten.{name}", bytes=bytes_of.get(name)) for name in names}
    return Provenance("2.0", launches, nodes, "", graph, key)


def conserved(profile: Profile) -> bool:
    return (
        profile.attributed_ns + profile.unattributed_ns == profile.total_ns
        and int(profile.nodes["window_ns"].sum()) == profile.attributed_ns
        and profile.by("node")["time_ns"].sum() * profile.iterations == pytest.approx(profile.total_ns, abs=1e-3)
    )


# --- ids ---------------------------------------------------------------------------------------------------


def crossed(external: Sequence[int]) -> Trace:
    """Four operators with ids 1 to 4, each of which launches one kernel with the correlation id of another operator;
    ``external`` are the kernels' External ids.
    """
    ops, kernels = [], []
    for i, (correlation, claimed) in enumerate(zip((2, 3, 4, 1), external, strict=True)):
        ops += [Op(f"aten::op{i + 1}", 1, 100 * i, 100 * i + 50, external_id=i + 1), launch(correlation, 100 * i + 10)]
        kernels.append(Kernel("k", 0, 7, 1000 + 10 * i, 5, correlation, external_id=claimed))
    return Trace.of(ops, kernels)


def test_a_correlation_id_that_is_another_operators_external_id_leads_to_no_other_operator() -> None:
    right = ["aten::op1", "aten::op2", "aten::op3", "aten::op4"]
    sound = attribute(crossed((1, 2, 3, 4)), eager_nodes=True).kernels
    assert list(sound["operator"]) == right and set(sound["operator_method"]) == {"correlation"}
    # a tool that wrote correlation ids where the External ids belong: each names an operator, and a wrong one
    false = attribute(crossed((2, 3, 4, 1)), eager_nodes=True)
    assert list(false.kernels["operator"]) == right
    assert set(false.kernels["operator_method"]) == {"enclosure"}
    assert set(false.kernels["confidence"]) == {"medium"}
    assert false.kernels["evidence"][0] == ("by the other path its launch lies in 'aten::op2'",)
    assert any("equal correlation ids" in note for note in false.notes)


def test_kernels_without_a_launch_are_given_to_no_operator(shared: Path) -> None:
    profile = profiler_core.load(shared / "corpus" / "kineto" / "tl_h100_qwen_kernels_without_launch.json.gz")
    lost = profile.kernels[(profile.kernels["method"] == "none") & (profile.kernels["kind"] == "kernel")]
    assert (len(lost), int((profile.kernels["kind"] == "kernel").sum())) == (436, 1465)
    assert set(lost["operator"]) == {""} and set(lost["nodes"]) == {()}
    assert set(lost["reason"]) == {"no launch with its correlation id is in the trace"}
    assert conserved(profile) and profile.unattributed_ns > 0


# --- CUDA graphs -------------------------------------------------------------------------------------------


COUNT = 1000
LIBRARY = "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_cublas"


def replay(names: Sequence[str]) -> Trace:
    """One call that launches one CUDA graph in an operator's range; its kernels have the launch's ids and no others."""
    ops = [
        Op("fxopt::iteration#0", 1, 0, 1000),
        Op("aten::nearby", 1, 5, 8, external_id=9),
        launch(7, 10, api="cudaGraphLaunch"),
        Op("aten::add", 1, 20, 30, external_id=10),
    ]
    kernels = [Kernel(name, 0, 7, 100 + 10 * i, 1 + i % 7, 7) for i, name in enumerate(names)]
    return Trace.of(ops, kernels, iterations=1)


def thousand() -> tuple[list[str], Provenance]:
    names = [f"triton_poi_fused_add_{i % 9}" if i % 2 else LIBRARY for i in range(COUNT)]
    kernels = [name if i % 2 else "extern_kernels.mm" for i, name in enumerate(names)]
    launches = [Launch(kernel, i, (f"n{i}",), i % 2 == 0) for i, kernel in enumerate(kernels)]
    return names, provenance_of(*launches)


def test_a_graph_launch_of_a_thousand_kernels_is_split_kernel_by_kernel() -> None:
    names, provenance = thousand()
    profile = attribute(replay(names), provenance, eager_nodes=True)
    assert list(profile.kernels["launch"]) == [item.key for item in provenance.launches]
    assert list(profile.nodes["window_ns"]) == list(profile.kernels["duration_ns"])
    assert profile.attributed_share == 1.0 and conserved(profile)
    # one launch for all of them, which stands as the operator once
    assert profile.kernels["launch_ns"].nunique() == profile.kernels["correlation"].nunique() == 1
    (row,) = profile.by("operator").to_dict("records")
    assert (row["operator"], row["kernels"], row["share"]) == ("cudaGraphLaunch", COUNT, 1.0)


def test_a_replay_of_unknown_code_is_one_bucket_with_its_share() -> None:
    names, _ = thousand()
    trace = replay(names)
    ordinary = Kernel("elementwise", 0, 7, 20_000, 1000, 8)
    more = Trace.of([launch(8, 22)], [ordinary])
    trace = replace(
        trace,
        kernels=pd.concat([trace.kernels, more.kernels], ignore_index=True),
        calls=pd.concat([trace.calls, more.calls], ignore_index=True),
    )
    profile = attribute(trace, eager_nodes=True)
    buckets = profile.by("operator").set_index("operator")
    replayed = int(trace.kernels["duration_ns"][:COUNT].sum())
    assert buckets.loc["cudaGraphLaunch", "share"] == replayed / (replayed + 1000)
    assert set(buckets.index) == {"cudaGraphLaunch", "aten::add"}  # and nothing is with aten::nearby
    assert (profile.attributed_ns, profile.unattributed_ns) == (1000, replayed)
    assert conserved(profile)


def test_a_graph_level_capture_asks_for_node_level(shared: Path) -> None:
    profile = profiler_core.load(shared / "captures" / "h200_graph" / "nsys_graph_level.sqlite")
    (note,) = [text for text in profile.notes if "--cuda-graph-trace=node" in text]
    assert note.startswith("partial: ") and "5 replays" in note and "611 us" in note


# --- a window that is not whole ----------------------------------------------------------------------------


def calls_of(names: Sequence[Sequence[str]]) -> Trace:
    """Calls that each launch the kernels of these names, one operator each."""
    ops, kernels = [], []
    for call, ran in enumerate(names):
        t = 1000 * call
        ops.append(Op(f"fxopt::iteration#{call}", 1, t, t + 900))
        for i, name in enumerate(ran):
            ops += [Op(f"aten::{name}", 1, t + 10 * i, t + 10 * i + 9), launch(t + i + 1, t + 10 * i + 3)]
            kernels.append(Kernel(name, 0, 7, t + 500 + 10 * i, 7, t + i + 1))
    return Trace.of(ops, kernels, iterations=len(names), wall_ns=(900.0,) * len(names))


def test_a_first_call_that_lost_kernels_is_left_out_and_named() -> None:
    whole = ["mm", "add", "mm", "relu"]
    profile = attribute(calls_of([whole[2:], whole, whole]), eager_nodes=True)
    assert profile.iterations == 2 and profile.total_ns == 2 * 4 * 7
    assert profile.outside_ns == 2 * 7  # kept, and counted apart
    (note,) = [text for text in profile.notes if "left out" in text]
    assert note.startswith("call 0 is left out of the window: 2 of the 4 kernels")
    assert profile.by("operator").set_index("operator").loc["aten::mm", "time_ns"] == 14.0


def test_a_call_without_any_kernel_is_left_out_as_well() -> None:
    profile = attribute(calls_of([[], ["mm", "add"], ["mm", "add"]]), eager_nodes=True)
    assert profile.iterations == 2 and profile.kernel_ns == 14.0
    assert any("call 0 is left out" in note for note in profile.notes)


def test_of_two_calls_that_differ_neither_is_left_out_but_it_is_said() -> None:
    profile = attribute(calls_of([["mm"], ["mm", "add"]]), eager_nodes=True)
    assert profile.iterations == 2 and profile.total_ns == 21
    assert any("did not run the same kernels: from 1 to 2" in note for note in profile.notes)


def test_a_call_that_ran_something_else_is_no_short_one() -> None:
    profile = attribute(calls_of([["mm", "other"], ["mm", "add"], ["mm", "add"]]), eager_nodes=True)
    assert profile.iterations == 3 and not any("left out" in note for note in profile.notes)


# --- fusion ------------------------------------------------------------------------------------------------


def test_time_is_conserved_where_a_fused_kernel_lists_too_much_and_a_node_is_computed_twice() -> None:
    """The first kernel's comment lists a view and the product whose result it only reads; ``exp`` was cheaper to
    compute again in the second kernel than to store.
    """
    graph = provenance_of(
        Launch("extern_kernels.mm", 1, ("mm",), True),
        Launch("triton_poi_fused_add_exp_mm_view_0", 2, ("mm", "view", "add", "exp"), False),
        Launch("triton_red_fused_exp_sum_1", 3, ("exp", "sum"), False),
        mm=7.0,
        view=0.0,
        add=3.0,
        exp=3.0,
        sum=1.0,
    )
    durations = (1009, 101, 103)
    ops, kernels = [Op("fxopt::iteration#0", 1, 0, 1000)], []
    for i, (item, duration) in enumerate(zip(graph.launches, durations, strict=True)):
        ops += [Op(f"fxopt::{item.key}", 1, 100 * i, 100 * i + 50), launch(i + 1, 100 * i + 10)]
        kernels.append(Kernel(item.kernel, 0, 7, 2000 + 2000 * i, duration, i + 1))
    profile = attribute(Trace.of(ops, kernels, iterations=1), graph)
    nodes = profile.nodes.set_index("node")
    assert int(nodes["window_ns"].sum()) == sum(durations) and conserved(profile)
    assert nodes.loc["view", "window_ns"] == 0
    assert list(nodes.loc["exp", "launches"]) == [item.key for item in graph.launches[1:]]
    assert nodes.loc["exp", "group_time_ns"] == 204  # both kernels
    assert nodes.loc["exp", "estimate"] and nodes.loc["exp", "fused_with"] == ("mm", "add", "sum")
    by_node = profile.by("node").set_index("node")["time_ns"]
    assert by_node.sum() == pytest.approx(sum(durations))
    assert by_node["exp"] == pytest.approx(101 * 3 / 13 + 103 * 3 / 4)


# --- threads -----------------------------------------------------------------------------------------------


def test_a_backward_launched_from_autograds_thread_is_in_the_window_and_has_its_operators() -> None:
    forward = provenance_of(Launch("extern_kernels.mm", 1, ("mm",), True), graph="0/0", key="kf")
    backward = provenance_of(Launch("extern_kernels.mm", 1, ("mm_1",), True), graph="0/0 backward", key="kb")
    ops = [
        Op("fxopt::iteration#0", 1, 0, 1000),
        Op("## Call CompiledFxGraph kf ##", 1, 10, 90),
        Op("aten::mm", 1, 20, 40),
        launch(1, 25),
        Op("autograd::engine::evaluate_function: CompiledFunctionBackward", 2, 200, 400),
        Op("CompiledFunctionBackward", 2, 210, 390),
        Op("## Call CompiledFxGraph kb ##", 2, 220, 380),
        Op("aten::mm", 2, 230, 250),
        launch(2, 235, thread=2),
        Op("aten::waiting", 1, 200, 400),  # what the thread that called backward() does meanwhile
        Op("autograd::engine::evaluate_function: AccumulateGrad", 2, 410, 450),
        Op("aten::add_", 2, 415, 440),
        launch(3, 420, thread=2),
    ]
    kernels = [Kernel("gemm", 0, 7, 500 + 100 * i, 10 + i, i) for i in (1, 2, 3)]
    trace = Trace.of(ops, kernels, iterations=1)
    profile = attribute(trace, [forward, backward], eager_nodes=True)
    assert list(profile.kernels["iteration"]) == [0, 0, 0]
    assert list(profile.kernels["graph"]) == ["0/0", "0/0 backward", ""]
    assert list(profile.kernels["nodes"]) == [("mm",), ("mm_1",), ("aten::add_",)]
    assert list(profile.kernels["thread"]) == [1, 2, 2]
    assert profile.attributed_share == 1.0 and conserved(profile)


# --- dynamic shapes ----------------------------------------------------------------------------------------


def test_two_compiles_with_the_same_kernel_names_are_kept_apart(shared: Path) -> None:
    folder = shared / "captures" / "h200_dynamic"
    file = folder / "kineto.trace.json.gz"
    profile = profiler_core.load(file, folder / "torch_trace.log.gz")
    kernels = profile.kernels
    assert kernels.groupby("graph").size().to_dict() == {"0/0": 42, "0/1": 46}
    one, other = (set(rows["name"]) for _, rows in kernels.groupby("graph"))
    assert len([name for name in one & other if name.startswith("triton_")]) >= 3
    # The annotations around the calls name the compile by Inductor's key, which is the log's.
    calls = read(file).ranges
    calls = calls[(calls["category"] != "device") & calls["name"].map(lambda name: bool(graph_call_of(name)))]
    keys = {p.graph: p.cache_key for p in torch_trace.read(folder / "torch_trace.log.gz")}
    for row in kernels.itertuples():
        (around,) = calls[(calls["start_ns"] <= row.launch_ns) & (row.launch_ns < calls["end_ns"])]["name"]
        assert graph_call_of(around) == keys[row.graph]
    assert conserved(profile)


# --- black boxes -------------------------------------------------------------------------------------------


def test_an_lstm_outside_of_every_graph_is_one_opaque_node_with_its_full_time() -> None:
    ops = [
        Op("aten::lstm", 1, 0, 500, external_id=1),
        Op("aten::_cudnn_rnn", 1, 10, 490, external_id=2),
        *(launch(i, 20 + 10 * i) for i in range(1, 6)),
        Op("aten::add", 1, 600, 650, external_id=3),
        launch(6, 610),
    ]
    names = ("cudnn::rnn::persist", "ampere_sgemm_32x32_tn", "cudnn::rnn::persist", "gemvx", "elementwise_kernel")
    kernels = [Kernel(n, 0, 7, 1000 + 100 * i, 60 + i, i, external_id=2) for i, n in enumerate(names, 1)]
    kernels.append(Kernel("add_kernel", 0, 7, 2000, 10, 6, external_id=3))
    profile = attribute(Trace.of(ops, kernels), eager_nodes=True)
    nodes = profile.nodes.set_index("node")
    assert nodes.loc["aten::lstm", "window_ns"] == 61 + 62 + 63 + 64 + 65
    assert (nodes.loc["aten::lstm", "kind"], nodes.loc["aten::lstm", "opaque"]) == ("operator", True)
    assert set(profile.kernels["operator"]) == {"aten::_cudnn_rnn", "aten::add"}
    assert profile.attributed_share == 1.0 and conserved(profile)


def test_an_lstm_that_torch_compile_leaves_alone_is_one_opaque_node(tmp_path: Path, fresh_dynamo: None) -> None:
    model = torch.compile(torch.nn.LSTM(8, 16, num_layers=2).eval())
    x = torch.randn(5, 3, 8)
    with torch.no_grad():
        profile = profiler_core.profile(
            model, x, iterations=2, warmup=1, counters="none", clocks="off", store=tmp_path / "provenance"
        )
    assert profile.launches == ()  # no graph
    lstm = profile.nodes.set_index("target").loc["aten::lstm"]
    assert (lstm["kind"], lstm["opaque"], lstm["kernels"]) == ("operator", True, 1)
    mine = profile.kernels[profile.kernels["name"] == "aten::lstm"]
    assert lstm["window_ns"] == int(mine["duration_ns"].sum()) > 0
    assert profile.attributed_share == 1.0 and conserved(profile)


def test_collectives_are_opaque_and_belong_to_the_operator_that_asked_for_them() -> None:
    ops = [
        Op("c10d::allreduce_", 1, 0, 100, external_id=1),
        Op("record_param_comms", 1, 10, 90, external_id=2),
        launch(1, 20, api="cudaLaunchKernelExC"),
        Op("_c10d_functional::all_gather_into_tensor", 1, 200, 300, external_id=3),
        launch(2, 220, api="cudaLaunchKernelExC"),
    ]
    kernels = [
        Kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 0, 20, 500, 70, 1),
        Kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 0, 20, 600, 30, 2),
    ]
    profile = attribute(Trace.of(ops, kernels), eager_nodes=True)
    assert set(profile.kernels["family"]) == {"collective"} and profile.kernels["opaque"].all()
    assert profile.opaque_share == 1.0
    nodes = profile.nodes.set_index("node")
    assert nodes.loc["c10d::allreduce_", "window_ns"] == 70 and nodes["opaque"].all()
    assert nodes.loc["_c10d_functional::all_gather_into_tensor", "window_ns"] == 30


# --- one launch of a capture perturbed ---------------------------------------------------------------------


def claimed(trace: Trace, provenance: Provenance) -> dict[int, str]:
    """The launch that each kernel is attributed to, by the kernel's start, "" for none."""
    kernels = attribute(trace, provenance).kernels
    return dict(zip(kernels["start_ns"].tolist(), kernels["launch"], strict=True))


def changes(before: dict[int, str], after: dict[int, str], concerned: set[int]) -> int:
    """How many kernels other than ``concerned`` lost their launch; none may have got another."""
    lost = 0
    for start, key in after.items():
        if start in concerned:
            continue
        assert key in (before[start], ""), f"the kernel at {start} went from {before[start]} to {key}"
        lost += key != before[start]
    return lost


def operators_of(trace: Trace, provenance: Provenance) -> tuple[list[int], list[set[int]]]:
    """Rows of the ranges that stand for launches, and for each the kernels (by start) launched inside."""
    kernels = attribute(trace, provenance).kernels
    rows = trace.ranges[trace.ranges["category"] == "op"]
    found, inside = [], []
    for name in dict.fromkeys(kernels["top_operator"]):
        for row in rows[rows["name"] == name].itertuples():
            at = (kernels["launch_ns"] >= row.start_ns) & (kernels["launch_ns"] < row.end_ns)
            if at.any():
                found.append(row.Index)
                inside.append(set(kernels.loc[at, "start_ns"].tolist()))
    order = sorted(range(len(found)), key=lambda i: found[i])
    return [found[i] for i in order], [inside[i] for i in order]


@pytest.mark.parametrize("change", ["dropped", "duplicated", "swapped"])
def test_perturbing_one_operator_changes_the_launch_of_its_kernels_alone(shared: Path, change: str) -> None:
    provenance, trace = h200_provenance(shared), capture(shared, "h200_block")
    before = claimed(trace, provenance)
    rows, inside = operators_of(trace, provenance)
    assert len(rows) == 34 and set(before.values()) == {item.key for item in provenance.launches}
    lost = {}
    for n, row in enumerate(rows):
        ranges, concerned = trace.ranges, inside[n]
        name = ranges["name"][row]
        if change == "dropped":
            ranges = ranges.drop(index=row).reset_index(drop=True)
        elif change == "duplicated":  # again right after itself
            at = int(ranges["end_ns"][row])
            again = Op(name, int(ranges["thread"][row]), at, at + 1)
            ranges = added(trace, [again]).ranges
        elif n + 1 == len(rows) or ranges["name"][rows[n + 1]] == name:
            continue
        else:
            ranges = ranges.copy()
            ranges.loc[[row, rows[n + 1]], "name"] = [ranges["name"][rows[n + 1]], name]
            concerned = concerned | inside[n + 1]
        lost[n] = changes(before, claimed(replace(trace, ranges=ranges), provenance), concerned)
    # An operator that is there twice may be either, and its equal neighbours with it: aten::mm next to aten::mm does
    # not occur here, so that nothing else is in doubt.
    assert set(lost.values()) == {0} and len(lost) >= 30


@pytest.mark.parametrize("name", ["h200_block", "h200_graph"])
@pytest.mark.parametrize("change", ["dropped", "duplicated", "swapped"])
def test_perturbing_one_kernel_changes_its_own_launch_alone(shared: Path, name: str, change: str) -> None:
    """Kernel by kernel, and replayed by a CUDA graph, where the order of the kernels is all there is to go by."""
    provenance, trace = h200_provenance(shared), capture(shared, name)
    before = claimed(trace, provenance)
    replayed = set(trace.kernels["start_ns"][trace.kernels["correlation"].duplicated(keep=False)])
    launches = [item.key for item in provenance.launches]
    for at in range(len(trace.kernels)):
        kernels = trace.kernels.copy()
        start = int(kernels["start_ns"][at])
        concerned = {start}
        if change == "dropped":
            kernels = kernels.drop(index=at).reset_index(drop=True)
        elif change == "duplicated":
            again = kernels.loc[[at]].assign(start_ns=start + 1)
            kernels = pd.concat([kernels.iloc[: at + 1], again, kernels.iloc[at + 1 :]], ignore_index=True)
            concerned = {start, start + 1}
        elif at + 1 == len(kernels) or same_kernel(kernels["name"][at], kernels["name"][at + 1]):
            continue
        else:
            kernels.loc[[at, at + 1], "name"] = kernels["name"][[at + 1, at]].to_numpy()
            concerned = {start, int(kernels["start_ns"][at + 1])}
        after = claimed(replace(trace, kernels=kernels), provenance)
        doubtful = changes(before, after, concerned)
        if concerned & replayed:
            # A library kernel of a replay is known by the generated kernels around it. Where one of these is in doubt,
            # so may be the library kernels on both of its sides, as far as the next generated ones.
            changed = {at for at in before.keys() & after.keys() - concerned if before[at] != after[at]}
            places = sorted(launches.index(before[at]) for at in changed)
            assert all(before[at].startswith(("extern_kernels.", "torch.ops.")) for at in changed)
            assert not places or places[-1] - places[0] <= 4
        else:
            assert not doubtful


@pytest.mark.parametrize("change", ["dropped", "duplicated"])
def test_perturbing_one_launch_call_changes_its_own_kernel_alone(shared: Path, change: str) -> None:
    provenance, trace = h200_provenance(shared), capture(shared, "h200_block")
    # without External ids, which would name the operator although the launch is gone
    trace = replace(trace, kernels=trace.kernels.assign(external_id=0), calls=trace.calls.assign(external_id=0))
    before = claimed(trace, provenance)
    of_kernels = trace.calls[trace.calls["correlation"].isin(trace.kernels["correlation"])]
    assert len(of_kernels) == 42
    for row in of_kernels.itertuples():
        (start,) = trace.kernels["start_ns"][trace.kernels["correlation"] == row.correlation]
        calls = trace.calls.drop(index=row.Index).reset_index(drop=True)
        if change == "duplicated":
            calls = pd.concat([trace.calls.loc[: row.Index], trace.calls.loc[row.Index :]], ignore_index=True)
        after = claimed(replace(trace, calls=calls), provenance)
        assert changes(before, after, {int(start)}) == 0
        assert after[int(start)] in ("", before[int(start)])


def test_a_capture_of_more_calls_than_one_annotation_is_split_by_its_sequence(shared: Path) -> None:
    """Without annotations and iterations all operators are one sequence: the wrapper's, several times over."""
    provenance = h200_provenance(shared)
    trace = with_iterations(read(shared / "captures" / "h200_block" / "kineto.trace.json.gz"))
    expected = claimed(trace, provenance)
    bare = trace.ranges["name"].str.startswith(("## Call", "fxopt::iteration#"))
    trace = replace(trace, ranges=trace.ranges[~bare].reset_index(drop=True))
    assert claimed(trace, provenance) == expected
    rows, inside = operators_of(trace, provenance)
    for row, concerned in zip(rows, inside, strict=True):
        ranges = trace.ranges.drop(index=row).reset_index(drop=True)
        assert changes(expected, claimed(replace(trace, ranges=ranges), provenance), concerned) == 0
