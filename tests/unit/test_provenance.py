from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from compiled_graphs import Compiled, Counter, Mlp, Renamed, compile_with_provenance

from fxopt import session
from profiler_core.collect.inductor import (
    Launch,
    NodeInfo,
    Provenance,
    ProvenanceFormatError,
    ProvenanceMissing,
    from_compiled,
    instrumented,
    module_path,
    tracked,
    user_frame,
)
from profiler_core.collect.ownership import GraphView, Listed, own
from profiler_core.collect.provenance import relocate
from profiler_core.collect.wrapper_source import RANGE_GLOBAL, launch_sites, with_ranges


@pytest.mark.parametrize(
    ("spelling", "path"),
    [
        ("L['self']", ""),
        ("L['self'].h.0.attn.c_attn", "h.0.attn.c_attn"),
        ("L['self']._modules['h']._modules['0'].attn", "h.0.attn"),
        ("L['self'].layers[0].proj", "layers.0.proj"),
        ('G["net"].l1', "l1"),
        ("L['fn'].model.h.3", "model.h.3"),
        ("fn.model.h.3", "model.h.3"),
        ("L['fn'].__closure__[1].cell_contents.l1", "l1"),
        ("getattr(L['self'].h, '0').mlp", "h.0.mlp"),
        ("getattr(getattr(L['self'].h, '0').mlp, 'act')", "h.0.mlp.act"),
        ("L['self']._orig_mod.l1", "l1"),
    ],
)
def test_module_paths_lose_the_spelling_of_dynamo(spelling: str, path: str) -> None:
    assert module_path(spelling) == path


def test_the_user_frame_is_the_last_of_the_stack_trace() -> None:
    trace = (
        '  File "/a/model.py", line 12, in forward\n    return self.block(x)\n'
        '  File "/a/block.py", line 34, in forward\n    return self.lin(x)\n           ^^^^^^^^\n'
    )
    assert user_frame(trace) == ("/a/block.py", 34, "return self.lin(x)")
    assert user_frame(None) == ("", 0, "")
    own = f'  File "{session.__file__}", line 3, in forward\n    return call(*args)\n'
    assert user_frame(own) == ("", 0, ""), "what called the model is no source of its"
    assert user_frame(trace + own) == ("/a/block.py", 34, "return self.lin(x)")
    assert user_frame('  File "/a/b.py", line 1, in f') == ("/a/b.py", 1, "")


# --- rewriting the wrapper ---------------------------------------------------------------------------------

WRAPPER = """
class Runner:
    def call(self, args):
        a, = args
        args.clear()
        with guard(0):
            set_device(0)
            buf0 = empty()
            # Topologically Sorted Source Nodes: [x], Original ATen: [aten.x]
            # [Provenance debug handles] triton_poi_fused_0:1
            stream0 = get_raw_stream(0)
            triton_poi_fused_0.run(a, buf0, stream=stream0)
            del a
            # [Provenance debug handles] torch.ops.aten.sort.default:2
            buf1 = torch.ops.aten.sort.default(buf0)
            buf2 = buf1[0]; del buf1  # reuse
            # [Provenance debug handles] strange_kernel:3
            launch("strange", buf2)
            buf3 = finish(buf2)
            del buf2
        return (buf3, )
"""


def run_rewritten(source: str) -> tuple[list[str], object]:
    """Run ``Runner.call`` with ranges over stubs that log what happens, in order."""
    log: list[str] = []

    class Range:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            log.append(f"<{self.name}")

        def __exit__(self, *_: object) -> None:
            log.append(f"{self.name}>")

    def record(name: str, result: object = None):
        def call(*_: object, **__: object) -> object:
            log.append(name)
            return result

        return call

    namespace = {
        RANGE_GLOBAL: Range,
        "guard": lambda _: Range("guard"),
        "set_device": record("set_device"),
        "empty": record("empty", "buffer"),
        "get_raw_stream": record("stream"),
        "triton_poi_fused_0": SimpleNamespace(run=record("triton")),
        "torch": SimpleNamespace(
            ops=SimpleNamespace(aten=SimpleNamespace(sort=SimpleNamespace(default=record("sort", ["sorted"]))))
        ),
        "launch": record("launch"),
        "finish": record("finish", "result"),
    }
    (rewritten,) = with_ranges(source, "wrapper.py")
    exec(source, namespace)
    runner = namespace["Runner"]
    runner.call.__code__ = rewritten.code  # type: ignore[attr-defined]
    return log, runner().call(["a"])  # type: ignore[operator]


def test_each_launch_gets_a_range_and_nothing_else_moves() -> None:
    log, result = run_rewritten(WRAPPER)
    assert result == ("result",)
    assert log == [
        "<guard",
        "set_device",
        "empty",
        "stream",
        "<fxopt::triton_poi_fused_0:1",
        "triton",
        "fxopt::triton_poi_fused_0:1>",
        "<fxopt::torch.ops.aten.sort.default:2",
        "sort",
        "fxopt::torch.ops.aten.sort.default:2>",
        # A launch in an unknown spelling: all up to the next one, without the releases.
        "<fxopt::strange_kernel:3",
        "launch",
        "finish",
        "fxopt::strange_kernel:3>",
        "guard>",
    ]


def test_functions_without_provenance_comments_are_left_alone() -> None:
    assert with_ranges("def call(args):\n    return args\n", "wrapper.py") == []


def test_partition_functions_and_older_module_level_wrappers_are_rewritten() -> None:
    source = (
        "def partition_0(args):\n    # [Provenance debug handles] extern_kernels.mm:4\n    extern_kernels.mm(args)\n"
        "def call(args):\n    # [Provenance debug handles] cpp_fused_0:5\n    cpp_fused_0(args)\n    return args\n"
    )
    found = [(r.owner, r.name, r.wrapped) for r in with_ranges(source, "wrapper.py")]
    assert found == [("", "partition_0", ("extern_kernels.mm:4",)), ("", "call", ("cpp_fused_0:5",))]
    assert [site.key for site in launch_sites(source)] == ["extern_kernels.mm:4", "cpp_fused_0:5"]


def test_comments_of_a_cpp_wrapper_are_read() -> None:
    assert [s.key for s in launch_sites("    // [Provenance debug handles] aoti_torch_cpu_addmm_out:7")] == [
        "aoti_torch_cpu_addmm_out:7"
    ]


# --- which nodes a launch computes -------------------------------------------------------------------------


def graph(*nodes: tuple[str, str, tuple[str, ...]], aliases: tuple[str, ...] = ()) -> GraphView:
    return GraphView({n: t for n, t, _ in nodes}, {n: i for n, _, i in nodes}, aliases)


CHAIN = graph(
    ("mm", "aten.mm.default", ()),
    ("view", "aten.reshape.default", ("mm",)),
    ("gelu", "aten.gelu.default", ("view",)),
    ("mm_1", "aten.mm.default", ("gelu",)),
    ("relu", "aten.relu.default", ("mm_1",)),
    aliases=("view",),
)


def test_a_library_operator_belongs_to_one_launch_however_often_it_is_listed() -> None:
    owned = own(
        [
            Listed("extern_kernels.mm", True, ("mm",)),
            Listed("cpp_fused_gelu_0", False, ("mm", "view", "gelu")),
            Listed("extern_kernels.mm", True, ("mm", "view", "gelu", "mm_1")),
            Listed("cpp_fused_relu_1", False, ("mm", "view", "gelu", "mm_1", "relu")),
        ],
        CHAIN,
    )
    assert [o.nodes for o in owned] == [("mm",), ("view", "gelu"), ("mm_1",), ("relu",)]
    assert not any(o.partial for o in owned)


def test_pointwise_operators_stay_in_every_kernel_that_computes_them_again() -> None:
    recomputed = graph(("a", "aten.add.Tensor", ()), ("b", "aten.mul.Tensor", ("a",)), ("c", "aten.sub.Tensor", ("a",)))
    owned = own([Listed("k0", False, ("a", "b")), Listed("k1", False, ("a", "c"))], recomputed)
    assert [o.nodes for o in owned] == [("a", "b"), ("a", "c")]


def test_a_layout_copy_before_a_convolution_is_partial_work_of_the_convolution() -> None:
    conv = graph(("relu", "aten.relu.default", ()), ("convolution", "aten.convolution.default", ("relu",)))
    owned = own(
        [
            Listed("triton_poi_fused_convolution_0", False, ("convolution",)),
            Listed("extern_kernels.convolution", True, ("relu", "convolution")),
        ],
        conv,
    )
    assert owned[0].nodes == ("convolution",) and owned[0].partial
    assert owned[1].nodes == ("convolution",) and not owned[1].partial


def test_the_second_step_of_a_reduction_is_partial_work() -> None:
    owned = own([Listed("red_0", False, ("mm",)), Listed("red_1", False, ("mm",))], CHAIN)
    assert [(o.nodes, o.partial) for o in owned] == [(("mm",), False), (("mm",), True)]


def test_a_copy_of_a_constant_is_partial_work_of_the_operators_that_use_it() -> None:
    g = graph(("conv", "aten.convolution.default", ("x", "weight")), ("relu", "aten.relu.default", ("conv",)))
    (copy,) = own([Listed("cpp_fused_0", False, ("weight",))], g)
    assert copy.nodes == ("conv",) and copy.partial


def test_lists_per_kernel_name_are_dealt_out_in_order() -> None:
    launches = [Listed("extern_kernels.mm", True, ("mm", "mm_1"))] * 2
    assert [o.nodes for o in own(launches, CHAIN, per_site=False)] == [("mm",), ("mm_1",)]


def test_the_version_less_form_keeps_recomputed_operators_in_both_kernels_and_products_in_one() -> None:
    g = graph(
        ("mm", "aten.mm.default", ()),
        ("a", "aten.add.Tensor", ("mm",)),
        ("b", "aten.mul.Tensor", ("a",)),
        ("c", "aten.sub.Tensor", ("a",)),
        ("mm_1", "aten.mm.default", ("c",)),
    )
    listed = [
        Listed("extern_kernels.mm", True, ("mm", "a", "c", "mm_1")),
        Listed("k0", False, ("mm", "a", "b")),
        Listed("k1", False, ("mm", "a", "c")),
        Listed("extern_kernels.mm", True, ("mm", "a", "c", "mm_1")),
    ]
    owned = own(listed, g, per_site=False)
    assert [o.nodes for o in owned] == [("mm",), ("a", "b"), ("a", "c"), ("mm_1",)]
    assert not any(o.partial for o in owned)


def test_a_copy_for_an_input_that_no_operator_uses_computes_nothing() -> None:
    assert own([Listed("cpp_fused_0", False, ())], CHAIN)[0].nodes == ()


def test_views_around_a_library_call_go_with_it() -> None:
    g = graph(
        ("add", "aten.add.Tensor", ()),
        ("permute", "aten.permute.default", ("add",)),
        ("sort", "aten.sort.default", ("permute",)),
        ("getitem", "getitem", ("sort",)),
        aliases=("permute", "getitem"),
    )
    listed = Listed("torch.ops.aten.sort.default", True, ("add", "permute", "sort", "getitem"))
    assert own([listed], g)[0].nodes == ("permute", "sort", "getitem")


# --- records on disk ---------------------------------------------------------------------------------------


def record() -> Provenance:
    node = NodeInfo(
        "mm", "call_function", "aten.mm.default", (2, 3), (3, 1), "float32", "cpu", ("a", "b"), "h.0", "Linear",
        "m.py", 3, "return x @ w", ("linear",), 12.0, 48.0,
    )  # fmt: skip
    view = NodeInfo("view", "call_function", "aten.view.default", file="m.py", line=3, module_path="h.0")
    launch = Launch("extern_kernels.mm", 1, ("mm",), True, 12.0, 48.0)
    return Provenance("2.0", (launch,), {"mm": node, "view": view}, "source")


def test_a_record_survives_json() -> None:
    assert Provenance.from_json(json.loads(json.dumps(record().to_json()))) == record()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda d: d.update(schema_version=99), "provenance.schema_version"),
        (lambda d: d.pop("launches"), "provenance.launches"),
        (lambda d: d["launches"][0].pop("handle"), "provenance.launches[0].handle"),
        (lambda d: d["launches"][0].update(handle="x"), "provenance.launches[0].handle"),
        (lambda d: d["nodes"][1].update(line=None), "provenance.nodes[1].line"),
        (lambda d: d.update(version=2.0), "provenance.version"),
    ],
)
def test_a_malformed_record_is_refused_by_the_name_of_its_field(change, field: str) -> None:
    data = record().to_json()
    change(data)
    with pytest.raises(ProvenanceFormatError, match=field.replace("[", r"\[").replace("]", r"\]")):
        Provenance.from_json(data)


def test_locations_move_to_the_graph_at_hand() -> None:
    stored = record()
    stored = replace(stored, nodes={**stored.nodes, "view": stored.nodes["view"].at(stored.nodes["mm"].location)})
    moved = relocate(stored, {"mm": ("layer", "Linear", "other.py", 8, "y = lin(x)")})
    assert moved.nodes["mm"].location == ("layer", "Linear", "other.py", 8, "y = lin(x)")
    # not in the graph at hand, but it stood where mm stood
    assert moved.nodes["view"].location == moved.nodes["mm"].location
    assert relocate(stored, {}).nodes["view"].location == ("", "", "", 0, "")


# --- compiled graphs ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    from torch._inductor.utils import fresh_cache

    torch.manual_seed(0)
    with fresh_cache():
        yield


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory):
    return tmp_path_factory.mktemp("provenance")


@pytest.fixture(scope="module")
def mlp(cache: None, store) -> Compiled:
    return compile_with_provenance(Mlp().eval(), [torch.randn(8, 32)], store)


def targets(provenance: Provenance, launch: Launch) -> set[str]:
    return {provenance.nodes[name].target for name in launch.nodes}


def test_a_fresh_compile_tells_what_each_launch_computes_and_where_it_was_written(mlp: Compiled) -> None:
    provenance = mlp.provenance
    products = [x for x in provenance.launches if x.extern]
    assert [targets(provenance, x) for x in products] == [{"aten.addmm.default"}] * 2
    up = provenance.nodes[products[0].nodes[-1]]
    assert (up.module_path, up.module_class) == ("up", "Linear")
    assert up.file.endswith("compiled_graphs.py") and "self.up(x)" in up.source
    assert (up.shape, up.stride, up.dtype, up.device) == ((8, 64), (64, 1), "float32", "cpu")
    assert up.flops == 2 * 8 * 32 * 64 == products[0].flops
    generated = [x for x in provenance.launches if not x.extern]
    assert "aten.relu.default" in targets(provenance, generated[-1])
    assert {provenance.nodes[n].module_path for n in generated[0].nodes} == {"norm"}
    static = {n.name for n in provenance.nodes.values() if n.static}
    assert len(static) == 6  # weights and biases, not x


def test_what_a_pattern_put_in_has_the_lines_of_what_it_replaced_and_not_of_the_caller(cache: None) -> None:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.relu((q @ k.transpose(-2, -1) / 8).softmax(-1) @ v)

    class Caller:
        def forward(self) -> Compiled:  # a name that torch takes for the user's
            with torch.no_grad():
                return compile_with_provenance(attention, [torch.randn(2, 4, 16, 64) for _ in range(3)])

    nodes = Caller().forward().provenance.nodes.values()
    (fused,) = (node for node in nodes if "scaled_dot_product" in node.target)
    assert not fused.source or "softmax" in fused.source  # torch 2.11 says nothing


def test_the_record_of_a_fresh_compile_serves_a_cache_hit_with_the_locations_of_the_new_model(
    mlp: Compiled, store
) -> None:
    torch.manual_seed(0)
    hit = compile_with_provenance(Renamed().eval(), [torch.randn(8, 32)], store)
    if hit.graph._fx_graph_cache_key != mlp.graph._fx_graph_cache_key:
        pytest.skip("this torch gives the two models different cache keys")
    assert [x.key for x in hit.provenance.launches] == [x.key for x in mlp.provenance.launches]
    node = hit.provenance.nodes[hit.provenance.launches[0].nodes[-1]]
    assert node.module_path == "first" and "self.first(x)" in node.source


def test_without_record_and_post_grad_graph_provenance_is_missing(mlp: Compiled, tmp_path) -> None:
    with pytest.raises(ProvenanceMissing, match="force_disable_caches"):
        from_compiled(mlp.graph, None, tmp_path)
    bare = SimpleNamespace(inductor_provenance_mapping_str=None, source_code="", _fx_graph_cache_key=None)
    with pytest.raises(ProvenanceMissing, match="provenance_tracking_level"):
        from_compiled(bare, mlp.gm, None)


def test_a_damaged_record_is_made_again(mlp: Compiled, tmp_path) -> None:
    path = tmp_path / f"{mlp.graph._fx_graph_cache_key}.json"
    path.write_text("{")
    expected = replace(mlp.provenance, graph="")  # no compile is under way here
    assert from_compiled(mlp.graph, mlp.gm, tmp_path) == expected
    assert Provenance.from_json(json.loads(path.read_text())) == replace(expected, cache_key="")


def test_the_version_less_mapping_is_understood(mlp: Compiled) -> None:
    mapping = json.loads(mlp.graph.inductor_provenance_mapping_str)
    by_name: dict[str, list[str]] = {}
    for key, names in mapping["cppCodeToPost"].items():
        by_name.setdefault(key.rpartition(":")[0], []).extend(names)
    old = SimpleNamespace(
        inductor_provenance_mapping_str=json.dumps({"cppCodeToPost": by_name, "postToPre": {}}),
        source_code=mlp.graph.source_code,
        fx_kwargs=mlp.graph.fx_kwargs,
    )
    provenance = from_compiled(old, mlp.gm, None)
    assert provenance.version == "1"
    assert [(x.key, x.nodes) for x in provenance.launches] == [(x.key, x.nodes) for x in mlp.provenance.launches]


def test_a_compile_is_named_by_its_id_and_its_calls_by_the_cache_key(mlp: Compiled) -> None:
    assert re.fullmatch(r"\d+/\d+", mlp.provenance.graph)
    with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        mlp.call(torch.randn(8, 32))
    key = mlp.provenance.cache_key
    assert key and f"## Call CompiledFxGraph {key} ##" in {event.name for event in profiler.events()}


def test_a_cache_filled_without_provenance_is_noticed_and_a_compile_past_it_has_it(cache: None) -> None:
    model, inputs = Counter(), [torch.randn(3, 4), torch.zeros(4, 4)]
    with pytest.raises(Exception, match=r"ProvenanceMissing.*provenance_tracking_level"):
        compile_with_provenance(model, inputs, trace__provenance_tracking_level=0)
    try:
        again = compile_with_provenance(model, inputs)
    except torch._dynamo.exc.BackendCompilerFailed as error:  # a torch whose cache keys leave the level out
        assert "ProvenanceMissing" in str(error) and "caches off" in str(error)
        again = compile_with_provenance(model, inputs, force_disable_caches=True)
    assert again.provenance.launches and all(launch.nodes for launch in again.provenance.launches)


@pytest.fixture(scope="module")
def training(cache: None) -> list[Provenance]:
    """Provenance of the forward and the backward graphs of two models, the second compiled after the first ran."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    seen: list[Provenance] = []

    def inner(gm, example, **kwargs):
        with tracked():
            compiled = compile_fx_inner(gm, example, **kwargs)
        seen.append(from_compiled(compiled, gm, None))
        return compiled

    def backend(gm, example):
        return compile_fx(gm, example, inner_compile=inner, config_patches={"trace.provenance_tracking_level": 1})

    with torch._functorch.config.patch(enable_autograd_cache=False):
        for model, width in ((Mlp(), 32), (torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()), 8)):
            torch.compile(model, backend=backend)(torch.randn(8, width)).sum().backward()
    return seen


def test_a_backward_graph_has_its_own_provenance(training: list[Provenance]) -> None:
    names = [p.graph for p in training]
    assert names == [names[0], f"{names[0]} backward", names[2], f"{names[2]} backward"]
    for provenance in training:
        operators = {n.name for n in provenance.nodes.values() if n.target in ("aten.mm.default", "aten.addmm.default")}
        assert all(launch.nodes for launch in provenance.launches)
        calls = [x.nodes for x in provenance.launches if x.extern]
        assert {name for nodes in calls for name in nodes} >= operators and len(calls) == len(operators)


def test_a_backward_graph_compiled_without_tracking_is_refused_with_the_remedy() -> None:
    empty = SimpleNamespace(inductor_provenance_mapping_str='{"version": 2.0}', source_code="")
    with pytest.raises(ProvenanceMissing, match=r"tracked\(\)"):
        from_compiled(empty, None, None)


def ranges_of(call) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        call()
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    return [e.name for e in events if e.name.startswith("fxopt::")]


def expected_ranges(compiled: Compiled) -> list[str]:
    return [f"fxopt::{launch.key}" for launch in compiled.provenance.launches]


def test_ranges_appear_around_every_launch_while_instrumented_and_only_then(mlp: Compiled) -> None:
    x = torch.randn(8, 32)
    with torch.no_grad():
        before = mlp.call(x)
        with instrumented(mlp.graph, mlp.provenance) as note:
            assert note is None
            assert ranges_of(lambda: mlp.call(x)) == expected_ranges(mlp)
            assert torch.equal(mlp.call(x), before)
        assert ranges_of(lambda: mlp.call(x)) == []
        assert torch.equal(mlp.call(x), before)


def test_a_tag_tells_the_ranges_of_two_graphs_apart(mlp: Compiled) -> None:
    with torch.no_grad(), instrumented(mlp.graph, mlp.provenance, tag="0/1") as note:
        assert note is None
        names = ranges_of(lambda: mlp.call(torch.randn(8, 32)))
    assert names == [f"{name}@0/1" for name in expected_ranges(mlp)]


def test_the_wrapper_is_put_back_after_an_error(mlp: Compiled) -> None:
    with pytest.raises(KeyError), instrumented(mlp.graph, mlp.provenance):
        raise KeyError("in the measured function")
    with torch.no_grad():
        assert ranges_of(lambda: mlp.call(torch.randn(8, 32))) == []


def test_instrumenting_twice_is_undone_in_order(mlp: Compiled) -> None:
    x = torch.randn(8, 32)
    with torch.no_grad(), instrumented(mlp.graph, mlp.provenance):
        with instrumented(mlp.graph, mlp.provenance):
            assert ranges_of(lambda: mlp.call(x)) == expected_ranges(mlp)
        assert ranges_of(lambda: mlp.call(x)) == expected_ranges(mlp)


def test_ranges_appear_behind_a_wrapper_that_realigns_inputs(mlp: Compiled) -> None:
    from torch._inductor.compile_fx import align_inputs_from_check_idxs

    original, runner = mlp.graph.current_callable, mlp.graph.compiled_fn_runner
    try:
        mlp.graph.current_callable = align_inputs_from_check_idxs(original, [0], set())
        assert mlp.graph.current_callable is not original
        mlp.graph.compiled_fn_runner = None  # leaves only the wrapper to find the function by
        with torch.no_grad(), instrumented(mlp.graph, mlp.provenance) as note:
            assert note is None
            assert ranges_of(lambda: mlp.call(torch.randn(8, 32))) == expected_ranges(mlp)
    finally:
        mlp.graph.current_callable, mlp.graph.compiled_fn_runner = original, runner


def test_a_graph_without_python_wrapper_gives_a_note(mlp: Compiled) -> None:
    opaque = SimpleNamespace(current_callable=len, compiled_fn_runner=None)
    with instrumented(opaque, mlp.provenance) as note:
        assert note is not None and "C++ wrapper" in note


def test_a_source_that_is_not_the_loaded_one_gives_a_note(mlp: Compiled) -> None:
    shifted = replace(mlp.provenance, source_code="\n" + mlp.provenance.source_code)
    with instrumented(mlp.graph, shifted) as note:
        assert note is not None and "does not match" in note


def test_a_graph_that_changes_an_input_still_changes_it_once_per_call(cache: None) -> None:
    state = torch.zeros(4, 4)
    compiled = compile_with_provenance(Counter(), [torch.randn(2, 4), state])
    assert state[0, 0].item() == 1.0
    with torch.no_grad(), instrumented(compiled.graph, compiled.provenance) as note:
        assert note is None
        assert ranges_of(lambda: compiled.call(torch.randn(2, 4), state)) == expected_ranges(compiled)
    assert state[0, 0].item() == 2.0


def test_a_frozen_graph_has_constants_and_ranges(cache: None) -> None:
    x = torch.randn(8, 32)
    model = Mlp().eval()
    compiled = compile_with_provenance(model, [x], freezing=True)
    nodes = compiled.provenance.nodes.values()
    assert any(node.op == "get_attr" and node.static for node in nodes)
    assert [node.name for node in nodes if node.op == "placeholder"] and all(
        not node.static for node in nodes if node.op == "placeholder"
    )
    products = [launch for launch in compiled.provenance.launches if launch.extern]
    assert [launch.flops for launch in products] == [2 * 8 * 32 * 64] * 2
    with torch.no_grad(), instrumented(compiled.graph, compiled.provenance) as note:
        assert note is None
        assert ranges_of(lambda: compiled.call(x)) == expected_ranges(compiled)
        torch.testing.assert_close(compiled.call(x), model(x))


def test_the_branches_of_a_cond_are_part_of_its_graph() -> None:
    """Inductor compiles them into the same code, and maps their nodes by bare name."""

    class Choice(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda x: torch.sin(x) @ x, lambda x: torch.cos(x) + 1, (x,))

    compiled = compile_with_provenance(Choice(), [torch.ones(8, 8)])
    launched = {name for launch in compiled.provenance.launches for name in launch.nodes}
    assert {"sin", "mm", "cos"} <= launched
    assert compiled.provenance.nodes["mm"].target == "aten.mm.default"
