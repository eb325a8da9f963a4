from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from compiled_graphs import Mlp, compile_with_provenance

from profiler_core.aggregate import apportion, weights
from profiler_core.attribute.cpu_kernels import cpu_kernels
from profiler_core.attribute.engine import attribute
from profiler_core.attribute.fusion_map import operator_name
from profiler_core.collect import kineto
from profiler_core.collect.chrome_trace import parse, read
from profiler_core.collect.inductor import Launch, NodeInfo, Provenance, instrumented
from profiler_core.collect.kineto import ProfilerError, kernel_time, measure
from profiler_core.collect.wrapper_source import generated_kernels, launch_sites
from profiler_core.environment import environment
from profiler_core.profiles import Profile
from profiler_core.trace import COMPILED_GRAPH_PREFIX, RANGE_COLUMNS, Kernel, Op, Trace, TraceError, table

CPU = torch.device("cpu")


# --- real traces of an H200 --------------------------------------------------------------------------------


def added(trace: Trace, ranges: list[Op]) -> Trace:
    """The trace with further ranges, all of them on the thread that launched."""
    import pandas as pd

    process = int(trace.ranges["process"].iloc[0]) if len(trace.ranges) else 0
    columns = {
        "name": [op.name for op in ranges],
        "process": [process] * len(ranges),
        "thread": [op.thread for op in ranges],
        "start_ns": [op.start_ns for op in ranges],
        "end_ns": [op.end_ns for op in ranges],
    }
    more = table(columns, RANGE_COLUMNS, "start_ns")
    both = pd.concat([more, trace.ranges]).sort_values("start_ns", kind="stable", ignore_index=True)
    return replace(trace, ranges=both)


def with_iterations(trace: Trace) -> Trace:
    """The captures were taken without our iteration ranges; each call of the compiled graph stands for one."""
    rows = trace.ranges[trace.ranges["category"] != "device"]
    calls = rows[rows["name"].str.startswith(COMPILED_GRAPH_PREFIX)]
    ranges = [
        Op(f"fxopt::iteration#{i}", call.thread, call.start_ns, call.end_ns)
        for i, call in enumerate(calls.itertuples())
    ]
    return replace(added(trace, ranges), iterations=len(ranges))


def capture(shared: Path, name: str) -> Trace:
    return with_iterations(read(shared / "captures" / name / "kineto.trace.json.gz"))


def h200_provenance(shared: Path) -> Provenance:
    """Launches and nodes from the TORCH_TRACE log of the compile behind h200_graph and h200_block."""
    path = shared / "captures" / "h200_graph" / "torch_trace.log.gz"
    if not path.is_file():
        pytest.skip(f"needs the recorded log {path}")
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    mapping = next(json.loads(line) for line in lines if line.startswith('\t{"preToPost"'))["cppCodeToPost"]
    start = next(i for i, line in enumerate(lines) if '"inductor_output_code"' in line) + 1
    stop = next(i for i in range(start, len(lines)) if not lines[i].startswith("\t"))
    source = "\n".join(line[1:] for line in lines[start:stop])
    generated = generated_kernels(source)
    launches = tuple(
        Launch(site.kernel, site.handle, tuple(mapping[site.key]), site.kernel not in generated)
        for site in launch_sites(source)
    )
    nodes = {n: NodeInfo(n, "call_function", f"aten.{n}") for names in mapping.values() for n in names}
    return Provenance("2.0", launches, nodes, source)


def with_ranges(trace: Trace, provenance: Provenance) -> Trace:
    """The launch ranges that instrumented code leaves, put around the operators of each iteration in order."""
    names = {operator_name(launch) for launch in provenance.launches}
    extra = []
    rows = list(trace.ranges.itertuples())
    for window in [row for row in rows if row.name.startswith("fxopt::iteration#")]:
        inside = [row for row in rows if row.name in names and window.start_ns <= row.start_ns < window.end_ns]
        outer: list = []
        for row in inside:
            if not outer or row.start_ns >= outer[-1].end_ns:
                outer.append(row)
        assert len(outer) == len(provenance.launches)
        extra += [
            Op(f"fxopt::{launch.key}", row.thread, row.start_ns - 1, row.end_ns + 1)
            for row, launch in zip(outer, provenance.launches, strict=True)
        ]
    return added(trace, extra)


def conserved(profile: Profile) -> bool:
    return (
        profile.attributed_ns + profile.unattributed_ns == profile.total_ns
        and int(profile.nodes["window_ns"].sum()) == profile.attributed_ns
    )


def test_a_capture_is_read_to_the_nanosecond(shared: Path) -> None:
    trace = capture(shared, "h200_block")
    assert (trace.device_type, trace.iterations, len(trace.kernels)) == ("cuda", 2, 42)
    first = attribute(trace).kernels.iloc[0]
    assert first["name"] == "triton_per_fused_native_layer_norm_0"
    assert (first["start_ns"], first["duration_ns"]) == (5114342771701398, 1760)
    assert (first["device"], first["stream"], first["correlation"]) == ("cuda:0", 7, 12)
    assert (first["grid"], first["block"]) == ((512, 1, 1), (64, 1, 1))
    assert (first["registers"], first["shared_memory"]) == (27, 8)


def test_annotations_projected_onto_the_device_are_not_kernels(shared: Path) -> None:
    assert not capture(shared, "h200_sdpa").kernels["name"].str.startswith("##").any()
    assert len(capture(shared, "h200_sdpa").kernels) == 22


def test_launch_ranges_attribute_every_kernel_by_correlation(shared: Path) -> None:
    provenance = h200_provenance(shared)
    profile = attribute(with_ranges(capture(shared, "h200_block"), provenance), provenance, {})
    assert set(profile.kernels["method"]) == {"correlation"}
    assert set(profile.kernels["confidence"]) == {"high"}
    assert profile.attributed_share == 1.0 and conserved(profile)
    by_launch = profile.kernels.groupby("launch")["name"].unique()
    for launch in provenance.launches:
        if not launch.extern:  # a generated kernel bears its launch's name
            assert list(by_launch[launch.key]) == [launch.kernel]
    assert list(profile.kernels.groupby("iteration").size()) == [21, 21]


def test_names_in_order_attribute_every_kernel_where_there_are_no_ranges(shared: Path) -> None:
    provenance = h200_provenance(shared)
    trace = capture(shared, "h200_block")
    by_name = attribute(trace, provenance, {})
    by_range = attribute(with_ranges(trace, provenance), provenance, {})
    assert set(by_name.kernels["method"]) == {"fusion_map"}
    assert set(by_name.kernels["confidence"]) == {"medium"}
    assert list(by_name.kernels["launch"]) == list(by_range.kernels["launch"])


def test_where_the_sequences_differ_what_every_best_alignment_has_is_attributed(shared: Path) -> None:
    provenance = h200_provenance(shared)
    launches = tuple(x for x in provenance.launches if x.key != "triton_poi_fused_addmm_gelu_view_2:15")
    profile = attribute(capture(shared, "h200_block"), replace(provenance, launches=launches), {})
    whole = attribute(capture(shared, "h200_block"), provenance, {})
    same = profile.kernels["launch"] == whole.kernels["launch"]
    missing = whole.kernels["launch"] == "triton_poi_fused_addmm_gelu_view_2:15"
    assert list(same) == list(~missing)  # no neighbour is shifted onto the launch that is not there
    assert set(profile.kernels.loc[missing, "method"]) == {"none"}
    assert "no launch is certain" in profile.kernels.loc[missing, "reason"].iloc[0]
    assert conserved(profile)


def test_an_operator_that_is_no_launch_does_not_disturb_the_sequence(shared: Path) -> None:
    provenance = h200_provenance(shared)
    shorter = replace(provenance, launches=provenance.launches[:-1])
    profile = attribute(capture(shared, "h200_block"), shorter, {})
    reasons = profile.unattributed()
    assert set(reasons["name"]) == {"triton_poi_fused_add_addmm_view_4"}
    assert "no launch of this graph is named" in reasons["reason"][0]


def test_a_replayed_cuda_graph_is_attributed_between_its_generated_kernels(shared: Path) -> None:
    provenance = h200_provenance(shared)
    profile = attribute(capture(shared, "h200_graph"), provenance, {})
    kernels = profile.kernels
    assert len(kernels) == 44 and conserved(profile)
    generated = kernels[kernels["name"].str.startswith("triton_")]
    assert set(generated["method"]) == {"fusion_map"}
    assert all(
        launch.startswith(name + ":") for name, launch in zip(generated["name"], generated["launch"], strict=True)
    )
    # The same code launched kernel by kernel says what is right, library kernels included.
    replayed = kernels[kernels["operator"] == "cudaGraphLaunch"]
    launched = attribute(capture(shared, "h200_block"), provenance, {}).kernels
    assert list(replayed["launch"]) == list(launched["launch"]) and (replayed["launch"] != "").all()
    # the copies of the inputs into the graph's memory belong to no node
    copies = kernels[kernels["operator"] == "aten::_foreach_copy_"]
    assert len(copies) == 2 and set(copies["method"]) == {"none"}


def test_kernels_of_eager_code_are_never_given_to_the_nearest_launch(shared: Path) -> None:
    provenance = h200_provenance(shared)
    profile = attribute(capture(shared, "h200_sdpa"), replace(provenance, launches=provenance.launches[1:2]), {})
    assert profile.attributed_ns == 0 and profile.total_ns > 0
    assert all(profile.kernels["reason"])


# --- small traces made by hand -----------------------------------------------------------------------------


def launch_provenance(*launches: Launch, **bytes_of: float) -> Provenance:
    names = {n for launch in launches for n in launch.nodes}
    nodes = {n: NodeInfo(n, "call_function", "aten.x", bytes=bytes_of.get(n)) for n in sorted(names)}
    return Provenance("2.0", launches, nodes, "")


MM = Launch("extern_kernels.mm", 1, ("mm",), True)


def device_trace(*extra_ops: Op, kernels: tuple[Kernel, ...]) -> Trace:
    ops = (Op("fxopt::iteration#0", 1, 0, 1000), Op("fxopt::extern_kernels.mm:1", 1, 100, 200), *extra_ops)
    return Trace.of(ops, kernels, iterations=1, wall_ns=(1000.0,))


def launched(correlation: int, at: int, thread: int = 1) -> Op:
    return Op("cudaLaunchKernel", thread, at, at + 5, correlation, "cuda_runtime")


def test_a_kernel_runs_for_the_range_its_launch_lies_in_however_late_it_runs() -> None:
    trace = device_trace(launched(7, 150), kernels=(Kernel("gemm", 0, 7, 900, 50, 7),))
    row = attribute(trace, launch_provenance(MM), {}).kernels.iloc[0]
    assert (row["method"], row["nodes"], row["launch_ns"]) == ("enclosure", ("mm",), 150)


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        (launched(7, 205), "launched outside"),  # just after the range
        (launched(7, 150, thread=2), "lies outside of every range"),  # at the same time on another thread
        (launched(8, 150), "no launch with its correlation id"),  # another kernel's launch
    ],
)
def test_a_kernel_outside_of_every_range_is_unattributed_with_a_reason(op: Op, reason: str) -> None:
    inside = launched(1, 120)
    kernels = (Kernel("gemm", 0, 7, 130, 10, 1), Kernel("stray", 0, 7, 160, 40, 7))
    profile = attribute(device_trace(inside, op, kernels=kernels), launch_provenance(MM), {})
    assert (profile.total_ns, profile.attributed_ns, profile.unattributed_ns) == (50, 10, 40)
    stray = profile.kernels.set_index("name").loc["stray"]
    assert (stray["method"], stray["confidence"], stray["nodes"]) == ("none", "none", ())
    assert reason in stray["reason"]


def test_copies_and_fills_on_the_device_count_as_kernels() -> None:
    event = {"ph": "X", "pid": 0, "tid": 7, "ts": 1.5, "dur": 2.25, "args": {"correlation": 3, "stream": 7}}
    trace = parse(
        {"traceEvents": [{**event, "cat": c, "name": c} for c in ("gpu_memcpy", "gpu_memset", "gpu_user_annotation")]}
    )
    assert [(k.name, k.kind, k.start_ns, k.duration_ns) for k in trace.kernels.itertuples()] == [
        ("gpu_memcpy", "memcpy", 1500, 2250),
        ("gpu_memset", "memset", 1500, 2250),
    ]


def test_a_file_that_is_no_trace_is_refused() -> None:
    with pytest.raises(TraceError, match="traceEvents"):
        parse({"events": []})


def test_a_launch_without_nodes_is_unattributed() -> None:
    trace = device_trace(launched(7, 150), kernels=(Kernel("gemm", 0, 7, 900, 50, 7),))
    row = attribute(trace, launch_provenance(replace(MM, nodes=())), {}).kernels.iloc[0]
    assert row["method"] == "none" and "names no FX node for extern_kernels.mm:1" in row["reason"]


def test_a_range_that_the_provenance_does_not_know_is_unattributed() -> None:
    trace = device_trace(launched(7, 150), kernels=(Kernel("gemm", 0, 7, 900, 50, 7),))
    row = attribute(trace, launch_provenance(replace(MM, handle=2)), {}).kernels.iloc[0]
    assert row["method"] == "none" and "extern_kernels.mm:1 is not in" in row["reason"]


def cpu_trace(*ops: Op) -> Trace:
    window = Op("fxopt::iteration#0", 1, 0, 1000)
    return Trace.of((window, *ops), (), iterations=1, wall_ns=(1000.0,), device_type="cpu")


def test_cpu_kernels_are_the_operators_of_library_ranges_and_generated_ranges_as_a_whole() -> None:
    trace = cpu_trace(
        Op("## Call CompiledFxGraph abc ##", 1, 10, 900, category="user_annotation"),
        Op("fxopt::extern_kernels.mm:1", 1, 100, 200),
        Op("aten::mm", 1, 110, 190),
        Op("aten::resolve_conj", 1, 111, 112),
        Op("fxopt::cpp_fused_add_0:2", 1, 300, 400),
        Op("fxopt::extern_kernels.silent:3", 1, 500, 530),
        Op("aten::clone", 1, 600, 650),
        Op("aten::copy_", 1, 610, 640),
        Op("TorchDynamo Cache Lookup", 1, 700, 800),
        Op("aten::outside", 1, 1100, 1200),
        Op("aten::other_thread", 2, 100, 900),
    )
    rows = [(r.name, r.duration_ns, r.launch) for r in cpu_kernels(trace).itertuples()]
    assert rows == [
        ("aten::mm", 80, "extern_kernels.mm:1"),
        ("cpp_fused_add_0", 100, "cpp_fused_add_0:2"),
        ("extern_kernels.silent", 30, "extern_kernels.silent:3"),
        ("aten::clone", 50, ""),
    ]
    provenance = launch_provenance(
        MM, Launch("cpp_fused_add_0", 2, ("add",), False), Launch("extern_kernels.silent", 3, ("silent",), True)
    )
    profile = attribute(trace, provenance, {})
    assert (profile.total_ns, profile.attributed_ns, profile.unattributed_ns) == (260, 210, 50)
    assert list(profile.kernels["method"]) == ["enclosure"] * 3 + ["none"]
    assert profile.unattributed().iloc[0]["reason"].startswith("aten::clone ran outside of every launch")


def test_user_spans_that_overlap_are_all_kept_innermost_first() -> None:
    trace = Trace.build(
        kernels={"name": ["k", "k"], "start_ns": [500, 600], "duration_ns": [5, 5], "correlation": [1, 2]},
        calls={"name": ["cudaLaunchKernel"] * 2, "thread": [1, 1], "start_ns": [150, 250], "end_ns": [151, 251],
               "correlation": [1, 2]},
        ranges={"name": ["epoch", "load", "step"], "category": ["span"] * 3, "process": [0, 0, 9],
                "start_ns": [100, 120, 0], "end_ns": [300, 200, 900]},
    )  # fmt: skip
    assert list(attribute(trace).kernels["spans"]) == [("load", "epoch"), ("epoch",)]  # another process's is no one's


def test_of_thousands_of_spans_the_innermost_is_kept() -> None:
    count = 3000
    trace = Trace.build(
        kernels={"name": ["k"], "start_ns": [count + 50], "duration_ns": [5], "correlation": [1]},
        calls={"name": ["cudaLaunchKernel"], "thread": [1], "start_ns": [count + 10], "end_ns": [count + 11],
               "correlation": [1]},
        ranges={"name": [f"span {i}" for i in range(count)], "category": ["span"] * count,
                "start_ns": list(range(count)), "end_ns": [2 * count] * count},
    )  # fmt: skip
    assert list(attribute(trace).kernels["spans"]) == [(f"span {count - 1}",)]


def test_where_on_the_device_a_lost_kernel_ran_is_evidence_and_no_claim() -> None:
    trace = Trace.build(
        kernels={"name": ["k"], "device": [0], "stream": [7], "start_ns": [500], "duration_ns": [5],
                 "correlation": [1]},
        ranges={"name": ["step"], "category": ["device"], "device": [0], "stream": [7], "start_ns": [400],
                "end_ns": [900]},
    )  # fmt: skip
    row = attribute(trace, eager_nodes=True).kernels.iloc[0]
    assert row["evidence"] == ("on its stream it ran within 'step'",)
    assert (row["method"], row["operator"], row["nodes"]) == ("none", "", ())


# --- shares ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("total", [0, 1, 7, 10**12 + 7])
@pytest.mark.parametrize("shares", [[1.0], [1.0, 1.0, 1.0], [0.0, 3.0, 1e-9], [0.0, 0.0], [1e18, 1.0, 7.0]])
def test_parts_of_a_time_sum_to_it_exactly(total: int, shares: list[float]) -> None:
    parts = apportion(total, shares)
    assert sum(parts) == total and min(parts) >= 0
    if sum(shares) > 0:
        assert all(abs(p - total * s / sum(shares)) <= 1 + total * 1e-15 for p, s in zip(parts, shares, strict=True))


def test_fused_nodes_share_time_by_the_bytes_each_would_move() -> None:
    fused = Launch("cpp_fused_0", 1, ("add", "view", "mul"), False)
    trace = cpu_trace(Op("fxopt::cpp_fused_0:1", 1, 0, 101))
    nodes = attribute(trace, launch_provenance(fused, add=300.0, view=0.0, mul=100.0), {}).nodes.set_index("node")
    assert list(nodes.loc[["add", "view", "mul"], "window_ns"]) == [76, 0, 25]
    assert nodes.loc["add", "estimate"] and nodes.loc["add", "fused_with"] == ("mul",)
    assert nodes.loc["mul", "group_time_ns"] == 101.0


def test_nodes_of_unknown_bytes_share_equally_but_views_get_nothing() -> None:
    nodes = [NodeInfo(n, "call_function", "t", bytes=b) for n, b in (("a", None), ("view", 0.0), ("b", 9.0))]
    assert weights(nodes) == [1.0, 0.0, 1.0]


def test_an_input_that_is_listed_with_a_node_takes_nothing_of_its_time() -> None:
    copied = Launch("triton_poi_fused_0", 1, ("arg0", "add"), False)
    nodes = {"arg0": NodeInfo("arg0", "placeholder", "arg0"), "add": NodeInfo("add", "call_function", "aten.add")}
    trace = cpu_trace(Op("fxopt::triton_poi_fused_0:1", 1, 0, 40))
    profile = attribute(trace, Provenance("2.0", (copied,), nodes, ""), {})
    assert profile.attributed_ns == 40 and conserved(profile)


def test_a_node_alone_in_its_kernel_is_no_estimate() -> None:
    trace = cpu_trace(Op("fxopt::extern_kernels.mm:1", 1, 0, 50))
    row = attribute(trace, launch_provenance(MM), {}).nodes.iloc[0]
    assert (row["time_ns"], row["estimate"], row["share"], row["kernels"]) == (50.0, False, 1.0, 1)


# --- live, on the CPU --------------------------------------------------------------------------------------


def test_a_compiled_model_is_attributed_to_at_least_99_percent_of_its_kernel_time() -> None:
    x = torch.randn(8, 32)
    compiled = compile_with_provenance(Mlp().eval(), [x])
    with torch.no_grad(), instrumented(compiled.graph, compiled.provenance):
        trace = measure(lambda: compiled.call(x), iterations=3, warmup=1, device=CPU)
    profile = attribute(trace, compiled.provenance, environment(CPU))
    assert profile.attributed_share >= 0.99 and conserved(profile)
    assert (profile.iterations, len(trace.wall_ns)) == (3, 3)
    assert 0 < profile.kernel_ns <= profile.total_ns
    groups = profile.groups()
    assert list(groups["launch"]) == [launch.key for launch in compiled.provenance.launches]
    assert list(groups["kernels"]) == [1] * len(groups)
    assert groups["share"].sum() == pytest.approx(profile.attributed_share)
    products = groups[groups["extern"]]
    assert list(products["module_path"]) == ["up", "down"]
    assert all(file.endswith("compiled_graphs.py") for file in products["file"])
    assert list(products["dtype"]) == ["float32"] * 2
    relu = profile.nodes[profile.nodes["target"] == "aten.relu.default"].iloc[0]
    assert relu["estimate"] and relu["time_ns"] <= relu["group_time_ns"]


def test_without_ranges_only_what_names_decide_is_attributed() -> None:
    x = torch.randn(8, 32)
    compiled = compile_with_provenance(Mlp().eval(), [x])
    with torch.no_grad():
        trace = measure(lambda: compiled.call(x), iterations=1, warmup=1, device=CPU)
    profile = attribute(trace, compiled.provenance, {})
    # the generated kernels left no event, but the two products can only be the wrapper's two, in its order
    products = [launch.key for launch in compiled.provenance.launches if launch.extern]
    assert list(profile.kernels.loc[profile.kernels["method"] == "fusion_map", "launch"]) == products
    assert conserved(profile)


def test_kernel_time_of_eager_code_is_that_of_its_top_level_operators() -> None:
    x = torch.randn(64, 64)
    time = kernel_time(lambda: torch.relu(x @ x), iterations=3, warmup=1, device=CPU)
    assert time.kernels == 2 and time.kernel_ns > 0 and time.wall_ns > 0 and time.note == ""
    assert {name: launches for name, (launches, _) in time.by_name.items()} == {"aten::matmul": 1.0, "aten::relu": 1.0}
    taken = [ns for _, ns in time.by_name.values()]
    assert taken == sorted(taken, reverse=True) and time.kernel_ns * 0.2 < sum(taken) < time.kernel_ns * 5


def test_a_call_that_had_to_wait_does_not_show_in_the_time_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("a", 0, 10), ("b", 0, 4), ("a", 1, 9000), ("b", 1, 5), ("a", 2, 11), ("b", 2, 3), ("b", 2, 3), ("c", 2, 7)]
    kernels = pd.DataFrame(rows, columns=["name", "iteration", "duration_ns"])
    monkeypatch.setattr(kineto, "measure", lambda *given, **options: SimpleNamespace(wall_ns=[1.0]))
    monkeypatch.setattr("profiler_core.attribute.cpu_kernels.cpu_kernels", lambda trace, whole_graphs: kernels)
    time = kernel_time(lambda: None, iterations=3, device=CPU)
    assert time.by_name == {"a": (1.0, 11.0), "b": (pytest.approx(4 / 3), 5.0), "c": (pytest.approx(1 / 3), 0.0)}
    assert time.kernel_ns == 24.0
    kernels.drop(kernels.index, inplace=True)
    assert kernel_time(lambda: None, iterations=3, device=CPU).by_name == {}


def test_kernel_time_of_a_compiled_graph_says_that_it_counts_as_a_whole() -> None:
    x = torch.randn(8, 32)
    compiled = compile_with_provenance(Mlp().eval(), [x])
    with torch.no_grad():
        time = kernel_time(lambda: compiled.call(x), iterations=2, warmup=1, device=CPU)
        assert time.kernels == 1 and "as one kernel" in time.note
        with instrumented(compiled.graph, compiled.provenance):
            ranged = kernel_time(lambda: compiled.call(x), iterations=2, warmup=1, device=CPU)
    assert ranged.kernels == len(compiled.provenance.launches) and ranged.note == ""


def test_measuring_inside_another_profiler_is_refused() -> None:
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True),
        pytest.raises(ProfilerError, match="already active"),
    ):
        measure(lambda: None, iterations=1, warmup=0, device=CPU)


def test_a_cuda_trace_without_device_activity_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from profiler_core.collect import kineto

    empty = json.dumps({"traceEvents": [{"ph": "X", "name": "fxopt::iteration#0", "cat": "cpu_op", "ts": 1, "dur": 1}]})
    monkeypatch.setattr(kineto, "_profiled", lambda *_: empty)
    monkeypatch.setattr(kineto, "_wall", lambda *_: [1.0])
    with pytest.raises(ProfilerError, match="CUPTI_ERROR_MULTIPLE_SUBSCRIBERS"):
        measure(lambda: None, iterations=1, warmup=0, device=torch.device("cuda"))
    assert measure(lambda: None, iterations=1, warmup=0, device=CPU).kernels.empty


def test_at_least_one_iteration_is_asked_for() -> None:
    with pytest.raises(ValueError, match="iterations"):
        measure(lambda: None, iterations=0, warmup=0, device=CPU)
