"""Random small graphs: what the strategy makes, and that every built-in pass leaves 500 of them equivalent.

Interpreted, without compiling; and ten each compiled. A pass that is registered by fxopt itself is tested because it is
registered; what makes it rewrite something stands in PASSES.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, find, settings
from random_graph_helpers import (
    activated_product,
    built_in,
    cast_twice,
    copied_back,
    for_all,
    masked_attention,
    odd_product,
    plane_convolution,
    projections,
    recurrent,
    wide_convolution,
    wide_product,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import passes.cuda_graphs
from fxopt import effects, invariants, registry, testing, verify
from fxopt.build import Builder
from fxopt.labels import Axis
from fxopt.registry import Candidate, GraphPass, Pass, PassContext, RuntimePass, Stage
from fxopt.testing.drafting import LIMIT
from fxopt.torch_api import dynamo
from fxopt.torch_api.inductor import lowers
from fxopt.torch_api.tracing import with_sources
from fxopt.verify import Precision, parse_precision
from passes.bf16_graph import Bf16Graph
from passes.cuda_graphs import CudaGraphs
from passes.cudnn_algorithm import CudnnAlgorithm
from passes.freeze_weights import FreezeWeights
from passes.gemm_epilogue import GemmEpilogue
from passes.inductor_options import InductorOptions
from passes.onednn_linear import OnednnLinear, _mkl_linear
from passes.pad_matmul import PadMatmul
from passes.promote_matmul_precision import OPERANDS, PromoteMatmulPrecision
from passes.rnn_redispatch import RnnRedispatch
from passes.split_precision_conv import SplitPrecisionConv
from passes.split_precision_gemm import SplitPrecisionGemm
from passes.tf32_matmul import Tf32Matmul

aten: Any = torch.ops.aten


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Operators on a dozen numbers spend their time waiting for threads, on a busy machine all of it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def nodes(graph: testing.RandomGraph, op: str = "call_function") -> list[torch.fx.Node]:
    return [node for node in graph.module.graph.nodes if node.op == op]


def targets(graph: testing.RandomGraph) -> list[str]:
    return [str(node.target) for node in nodes(graph)]


# ---------------------------------------------------------------- the strategy


def test_every_family_and_every_feature_appears():
    families: Counter[str] = Counter()
    features: Counter[str] = Counter()

    def look(graph: testing.RandomGraph) -> None:
        inputs = nodes(graph, "placeholder")
        tensors = [n.meta["val"] for n in inputs if isinstance(n.meta["val"], torch.Tensor)]
        (outputs,) = graph.module.graph.output_node().args
        families.update(set(graph.families))
        features.update(
            name
            for name, present in {
                "symbolic sizes": graph.dynamic,
                "several symbols": sum(isinstance(n.meta["val"], torch.SymInt) for n in inputs) > 1,
                "a write into an input": "aten.copy_.default" in targets(graph),
                "several outputs": len(outputs) > 1,
                "an output twice": len(set(outputs)) < len(outputs),
                "an input returned": any(o.op == "placeholder" for o in outputs),
                "a view of an input returned": any(
                    o.target in (aten.permute.default, aten.view.default, aten.slice.Tensor, aten.select.int)
                    and o.args[0].op == "placeholder"
                    for o in outputs
                ),
                "an unused value": any(not n.users for n in nodes(graph)),
                "an unused input": any(not n.users for n in inputs),
                "parameters": bool(graph.static),
                "other inputs than parameters": len(graph.static) < len(inputs),
                "constants": bool(nodes(graph, "get_attr")),
                "several results of a node": any(str(t).endswith("getitem>") for t in targets(graph)),
                "strided inputs": any(not x.is_contiguous() for x in tensors if not graph.dynamic),
                "an input inside a buffer": any(x.storage_offset() for x in tensors if not graph.dynamic),
                **{str(dtype): any(x.dtype == dtype for x in tensors) for dtype in DTYPES},
            }.items()
            if present
        )

    for_all(testing.graphs(), 400, look)
    assert set(families) == set(testing.FAMILIES)
    rare = {name: count for name, count in families.items() if count < 15}
    assert not rare
    assert len(features) == 15 + len(DTYPES), features
    assert min(features.values()) >= 4, features


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool)


def test_every_graph_is_one_that_inductor_could_hand_to_a_pass():
    def look(graph: testing.RandomGraph) -> None:
        graph.module.graph.lint()
        for node in nodes(graph):
            schema = getattr(node.target, "_schema", None)
            assert schema is None or not schema.is_mutable or node.target is aten.copy_.default
            assert schema is None or lowers(node.target), node.target
            assert "val" in node.meta
        writes = [n for n in nodes(graph) if n.target is aten.copy_.default]
        assert nodes(graph)[len(nodes(graph)) - len(writes) :] == writes, "writes come last"
        assert all(n.args[0].op == "placeholder" for n in writes)
        _repropagates(graph)

    for_all(testing.graphs(), 200, look)


def _repropagates(graph: testing.RandomGraph) -> None:
    """The graph keeps the rules for passes against itself, and values computed anew are those on its nodes."""
    again = copy.deepcopy(graph.module.graph)
    again.owning_module = graph.module
    invariants.check(graph.module.graph, again)
    assert testing.text(again) == testing.text(graph.module)


def test_inputs_are_as_their_fake_values_say_and_outputs_are_finite_and_small():
    def look(graph: testing.RandomGraph) -> None:
        sizes = []
        for seed in (0, 1):
            inputs = graph.inputs(seed)
            for node, value in zip(nodes(graph, "placeholder"), inputs, strict=True):
                fake = node.meta["val"]
                if isinstance(value, int):
                    sizes.append(value)
                    continue
                assert value.dtype == fake.dtype and value.dim() == fake.dim()
                if not graph.dynamic:
                    assert (value.shape, value.stride()) == (fake.shape, fake.stride())
                    assert value.storage_offset() == fake.storage_offset()
                if value.is_floating_point():
                    assert value.abs().max() <= 1
            with torch.no_grad():
                outputs = graph.module(*verify.clone_inputs(inputs, ()))
            for node, value in zip(graph.module.graph.output_node().args[0], outputs, strict=True):
                assert value.dtype == node.meta["val"].dtype
                if not graph.dynamic:
                    assert (value.shape, value.stride()) == (node.meta["val"].shape, node.meta["val"].stride())
                if value.is_floating_point():
                    assert value.isfinite().all() and value.abs().max() <= 1.1 * LIMIT
        assert bool(sizes) == graph.dynamic
        assert not sizes or sizes[0] < sizes[len(sizes) // 2], "the second set of inputs is larger"

    for_all(testing.graphs(), 200, look)


def test_inputs_are_the_same_for_a_seed_and_parameters_for_every_seed():
    def look(graph: testing.RandomGraph) -> None:
        first, again, other = graph.inputs(0), graph.inputs(0), graph.inputs(2)
        for position, (a, b, c) in enumerate(zip(first, again, other, strict=True)):
            if position in graph.static:
                assert a is b is c
            elif isinstance(a, torch.Tensor):
                assert torch.equal(a, b) and a is not b

    for_all(testing.graphs(), 30, look)


def test_comparisons_and_indices_do_not_depend_on_the_precision():
    """Integers that a graph computes are the same in its own types and in fp64, or they could never be compared."""

    def look(graph: testing.RandomGraph) -> None:
        inputs = graph.inputs(0)
        true = verify.reference(graph.module, inputs)
        assert true.below_fp64 == 0 and true.note == "", true.note
        for a, b in zip(graph.module(*inputs), true.outputs, strict=True):
            if not a.is_floating_point():
                assert torch.equal(a, b)

    for_all(testing.graphs(["comparison", "cast", "reduction"], exclude=("random",)), 200, look)


def test_a_graph_reads_as_its_text():
    def look(graph: testing.RandomGraph) -> None:
        lines = repr(graph).splitlines()
        assert lines[:-1] == testing.text(graph.module).splitlines() and lines[-1].startswith("parameters: ")

    for_all(testing.graphs(), 20, look)


@pytest.mark.parametrize(("target", "most"), [("aten.cat.default", 1), ("aten.copy_.default", 2)])
def test_graphs_shrink_to_little_more_than_what_is_looked_for(target, most):
    quiet = settings(
        max_examples=500, database=None, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
    )
    graph = find(testing.graphs(), lambda graph: target in targets(graph), settings=quiet)
    assert len(nodes(graph)) <= most, graph
    assert len(nodes(graph, "placeholder")) <= 3, graph


def test_half_of_the_operators_are_those_asked_for_or_an_authors_own():
    def doubled(d: testing.Draft) -> testing.Value:
        """x + x, which no family makes under this name."""
        x = d.floating()
        return d.call(aten.add.Tensor, x, x, bound=2 * x.bound)

    seen: Counter[str] = Counter()
    for_all(testing.graphs([doubled, "matmul"]), 100, lambda graph: seen.update(graph.families))
    assert seen["doubled"] + seen["matmul"] > 0.35 * seen.total()
    assert seen["doubled"] > 50 and seen["view"] > 5


def test_what_is_excluded_does_not_appear_and_sizes_are_symbolic_where_asked():
    def look(graph: testing.RandomGraph) -> None:
        assert graph.dynamic
        assert not {"random", "convolution"} & set(graph.families)
        assert "aten.copy_.default" not in targets(graph)
        assert len(nodes(graph)) <= 20

    strategy = testing.graphs(dynamic=True, exclude=("random", "convolution", "write"), max_nodes=6)
    for_all(strategy, 60, look)
    double = testing.graphs(dtypes=[torch.float64], exclude=("cast", "random"))
    for_all(double, 60, lambda graph: _only(graph, torch.float64))
    with pytest.raises(ValueError, match="no family of operators is named matmull; known: unary, binary"):
        testing.graphs(["matmull"])


def _only(graph: testing.RandomGraph, dtype: torch.dtype) -> None:
    values = [node.meta["val"] for node in nodes(graph, "placeholder")]
    assert {v.dtype for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()} <= {dtype}


# ---------------------------------------------------------------- built-in passes, interpreted


@dataclass(frozen=True)
class Bias:
    """What makes a pass rewrite something: graphs, the pass itself on this machine, and in which share it must.

    within: what it runs in. quick: how many graphs a quick run looks at, of those 500 that every pass is held to.
    """

    graphs: Callable[[], Any]
    share: float
    make: Callable[[], Pass] | None = None
    within: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    quick: int = 200


def packed_linear(d: testing.Draft) -> testing.Value:
    """A linear layer with a constant weight, as Inductor's freezing packs it for MKL."""
    x = d.operand([d.choice((2, 3, 5)), d.choice((4, 8))], torch.float32)
    rows, features = (int(size) for size in x.val.shape)
    generator = torch.Generator().manual_seed(d.number(100))
    dense = torch.rand(d.choice((2, 3, 8)), features, generator=generator) * 2 - 1
    packed = d.constant(torch.ops.mkl._mkl_reorder_linear_weight(dense, rows), bound=1)
    weight = d.constant(dense, bound=1)
    bias = d.operand([dense.shape[0]], torch.float32) if d.number(2) else None
    return d.call(_mkl_linear()[1], x, packed, weight, bias, rows, bound=features * x.bound + 1)


@dataclass(frozen=True)
class RnnInBf16(RnnRedispatch):
    """The pass in the precision that a CPU has to offer."""

    precision: ClassVar[Precision] = Precision.BF16
    compute: str = "bf16"


@dataclass(frozen=True)
class Tf32OnCpu(Tf32Matmul):
    """The pass on the CPU, where the settings are switched all the same."""

    devices: ClassVar[tuple[str, ...]] = ("cpu",)


@dataclass(frozen=True)
class AlgorithmOnCpu(CudnnAlgorithm):
    """The pass on the CPU, where the code runs in a thread of its own all the same."""

    devices: ClassVar[tuple[str, ...]] = ("cpu",)


@dataclass(frozen=True)
class SplitConvOnCpu(SplitPrecisionConv):
    """The pass on the CPU, where its operator has the kernel's arithmetic in torch."""

    devices: ClassVar[tuple[str, ...]] = ("cpu",)


@dataclass(frozen=True)
class PadOnCpu(PadMatmul):
    """The pass on the CPU, and for small sizes."""

    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    least: int = 2


@dataclass(frozen=True)
class EpilogueOnCpu(GemmEpilogue):
    """The pass on the CPU, where its operator computes the exact GELU, of the class bf16."""

    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    precision: ClassVar[Precision] = Precision.BF16


@dataclass(frozen=True)
class SplitGemmOnCpu(SplitPrecisionGemm):
    """The pass on the CPU, where its operator has the kernel's arithmetic in torch."""

    devices: ClassVar[tuple[str, ...]] = ("cpu",)


@dataclass(frozen=True)
class GraphsOnCpu(CudaGraphs):
    """The pass on the CPU, where a stand-in captures and replays."""

    devices: ClassVar[tuple[str, ...]] = ("cpu",)


PASSES = {
    "causal_mask": Bias(lambda: testing.graphs([masked_attention], dynamic=False, max_nodes=8), 0.3),
    "merge_projections": Bias(lambda: testing.graphs([projections], dynamic=False, max_nodes=8), 0.4),
    "freeze_weights": Bias(lambda: testing.graphs(), 0.5),
    # Every value is rounded, so nothing may be decided by one.
    "bf16_graph": Bias(
        lambda: testing.graphs(
            ["matmul"],
            dynamic=False,
            exclude=("comparison", "where", "indexing", "cast", "unary", "random", "write"),
            dtypes=[torch.float32],
        ),
        0.6,
    ),
    "promote_matmul_precision": Bias(lambda: testing.graphs(["matmul", "convolution", "attention"]), 0.6),
    "onednn_linear": Bias(lambda: testing.graphs([packed_linear], dynamic=False, max_nodes=8), 0.8),
    "split_precision_gemm": Bias(
        lambda: testing.graphs([wide_product], dynamic=False, max_nodes=8), 0.6, make=SplitGemmOnCpu, quick=80
    ),
    "cuda_graphs": Bias(lambda: testing.graphs(exclude=("random",)), 0.5, make=GraphsOnCpu),
    "inductor_options": Bias(lambda: testing.graphs(), 0.9, make=lambda: InductorOptions("max_autotune_gemm")),
    "pad_matmul": Bias(lambda: testing.graphs([odd_product], dynamic=False), 0.5, make=PadOnCpu),
    "gemm_epilogue": Bias(
        lambda: testing.graphs([activated_product], dynamic=False, max_nodes=8), 0.5, make=EpilogueOnCpu, quick=80
    ),
    "remove_redundant_casts_and_copies": Bias(
        lambda: testing.graphs([cast_twice, copied_back], dynamic=False, dtypes=[torch.float32]), 0.6
    ),
    "rnn_redispatch": Bias(lambda: testing.graphs([recurrent], dynamic=False, max_nodes=8), 0.6, make=RnnInBf16),
    "tf32_matmul": Bias(lambda: testing.graphs(["matmul"]), 0.5, make=Tf32OnCpu),
    "cudnn_algorithm": Bias(
        lambda: testing.graphs(["convolution"], dynamic=False, max_nodes=8), 0.5, make=AlgorithmOnCpu
    ),
    "channels_last": Bias(
        lambda: testing.graphs([plane_convolution], dynamic=False, max_nodes=8),
        0.5,
        within=lambda: torch._inductor.config.patch(layout_optimization=False),
    ),
    "split_precision_conv": Bias(
        lambda: testing.graphs([wide_convolution], dynamic=False, max_nodes=4), 0.5, make=SplitConvOnCpu, quick=80
    ),
}
#: for operators that exist on a GPU alone: tests/gpu has them
ON_A_GPU = {"attention_backend", "split_precision_attention"}


def test_the_built_in_passes_are_found():
    assert set(built_in()) == set(PASSES) | ON_A_GPU, "say in PASSES what makes a new pass rewrite something"


@pytest.mark.parametrize("name", sorted(ON_A_GPU))
def test_a_pass_for_operators_of_a_gpu_leaves_those_of_a_cpu_alone(name):
    p = registry.discover()[name]()
    here = testing.context(p)

    def look(graph: testing.RandomGraph) -> None:
        assert not list(p.candidates(graph.module.graph, here))

    assert p.devices == ("cuda",)
    for_all(testing.graphs(["attention"]), 100, look)


@pytest.mark.parametrize("name", sorted(set(built_in()) - ON_A_GPU))
def test_a_built_in_pass_leaves_random_graphs_equivalent(name, monkeypatch):
    look_at_graphs(name, PASSES[name].quick, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(name for name, bias in PASSES.items() if bias.quick < 500))
def test_a_slow_pass_leaves_500_random_graphs_equivalent(name, monkeypatch):
    look_at_graphs(name, 500, monkeypatch)


def look_at_graphs(name, count, monkeypatch):
    bias = PASSES[name]
    p = bias.make() if bias.make is not None else registry.discover()[name]()
    if name == "onednn_linear" and p.applicable(testing.context(p)):
        pytest.skip(p.applicable(testing.context(p)))
    if name == "cuda_graphs":
        stand_in_for_cuda(monkeypatch)
    seen: Counter[bool] = Counter()

    def look(graph: testing.RandomGraph) -> None:
        seen[testing.equivalent(p, graph).changed] += 1

    with bias.within():
        for_all(bias.graphs(), count, look)
    assert seen.total() >= count
    assert seen[True] >= bias.share * seen.total(), seen


def test_promotion_reaches_every_operator_that_it_knows_on_the_cpu():
    rewritten: Counter[Any] = Counter()

    def look(graph: testing.RandomGraph) -> None:
        report = testing.equivalent(PromoteMatmulPrecision(), graph).report
        refused = {name for name, _ in report.refused}
        rewritten.update(n.target for n in nodes(graph) if n.target in OPERANDS and n.name not in refused)

    for_all(testing.graphs(["matmul", "convolution", "attention"]), 200, look)
    forward = {operator for operator in OPERANDS if "backward" not in str(operator)}  # no gradients are asked for here
    assert set(rewritten) == forward - {aten._scaled_dot_product_efficient_attention.default}


# ---------------------------------------------------------------- CUDA graphs without a card


class StandInGraph:
    """Replays the operators that ran during the capture, into the memory that they wrote to then."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def pool(self) -> None: ...

    def replay(self) -> None:
        for function, args, kwargs, outputs in self.calls:
            again = function(*args, **kwargs)
            for kept, new in zip(tree_leaves(outputs), tree_leaves(again), strict=True):
                if isinstance(kept, torch.Tensor) and kept.untyped_storage()._cdata != new.untyped_storage()._cdata:
                    with torch.inference_mode(kept.is_inference()):  # a replay knows of no modes
                        kept.copy_(new)


class StandInCapture(TorchDispatchMode):
    def __init__(self, graph: StandInGraph, **given: Any) -> None:
        super().__init__()
        self.graph = graph
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.is_mutable:
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, torch.Tensor):
                    self.before.setdefault(value.untyped_storage()._cdata, (value, value.clone()))
        outputs = func(*args, **(kwargs or {}))
        self.graph.calls.append((func, args, kwargs or {}, outputs))
        return outputs

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for value, before in self.before.values():  # a capture only records
            value.copy_(before)


class StandInStream:
    def wait_stream(self, other: Any) -> None: ...


def stand_in_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda's graphs and streams for tensors on the CPU."""
    stream = StandInStream()
    for name, value in {
        "Stream": StandInStream,
        "current_stream": lambda device=None: stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "device": lambda device: contextlib.nullcontext(),
        "synchronize": lambda: None,
        "CUDAGraph": StandInGraph,
        "graph": StandInCapture,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(passes.cuda_graphs, "cublas_workspaces_of_a_capture", contextlib.nullcontext)
    monkeypatch.setattr(passes.cuda_graphs, "current_stream_address", lambda index: 0)


@pytest.mark.parametrize(
    "mistake", ["held outputs are written to", "inputs are not copied in", "inputs are returned as they were captured"]
)
def test_a_mistake_in_a_replay_is_found(mistake, monkeypatch):
    stand_in_for_cuda(monkeypatch)

    class Mistaken(passes.cuda_graphs._Captured):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            if mistake == "inputs are not copied in":
                self.inputs = []
            elif mistake == "inputs are returned as they were captured":
                self.inside = {}

        def free(self) -> bool:
            return mistake == "held outputs are written to" or super().free()

    monkeypatch.setattr(passes.cuda_graphs, "_Captured", Mistaken)
    if mistake == "held outputs are written to":
        fn = testing.run(GraphsOnCpu(), testing.capture(torch.relu, torch.randn(8))).fn
        first = fn(torch.randn(8))[0]
        kept = first.clone()
        fn(torch.randn(8))
        assert not torch.equal(first, kept), "what the numerics gate cannot see: an output overwritten by the next call"
        return
    with pytest.raises(AssertionError, match="cuda_graphs changes what this graph computes"):
        for_all(PASSES["cuda_graphs"].graphs(), 100, lambda graph: testing.equivalent(GraphsOnCpu(), graph))


def test_outputs_of_a_replay_stay_valid_in_the_next_call(monkeypatch):
    stand_in_for_cuda(monkeypatch)

    def look(graph: testing.RandomGraph) -> None:
        result = testing.run(GraphsOnCpu(), graph.module, inputs=graph.inputs())
        if not result.changed:
            return
        with torch.no_grad():
            outputs = result.fn(*graph.inputs(0))
            kept = [value.clone() for value in outputs]
            result.fn(*graph.inputs(2))
        assert all(torch.equal(a, b) for a, b in zip(outputs, kept, strict=True))

    for_all(PASSES["cuda_graphs"].graphs(), 50, look)


# ---------------------------------------------------------------- wrong passes


@dataclass(frozen=True)
class Rewrite(GraphPass):
    """a - alpha b -> a + (-alpha) b. Wrong ones are made of it."""

    target: ClassVar[Any] = aten.sub.Tensor
    name: ClassVar[str] = "rewrite"
    answers: ClassVar[frozenset[Axis]] = frozenset({Axis.MEMORY_BOUND})
    stage: ClassVar[Stage] = Stage.JOINT
    precision: ClassVar[Precision] = Precision.FP32

    def candidates(self, graph, context):
        return [Candidate(node.name) for node in graph.nodes if node.target is self.target]

    def rewrite(self, graph, node, context):
        with graph.inserting_before(node):
            node.replace_all_uses_with(self.replacement(graph, node))
        graph.erase_node(node)

    def replacement(self, graph, node):
        a, b = node.args
        return graph.call_function(aten.add.Tensor, (a, b), {"alpha": -node.kwargs.get("alpha", 1)})


def wrong(name: str, replacement: Callable[..., Any], target: Any = aten.sub.Tensor) -> GraphPass:
    fields = {"name": name, "replacement": replacement, "target": target}
    return dataclass(frozen=True)(type(name, (Rewrite,), fields))()


def rewritten_sub(graph, a, b):
    """a - b without aten.sub, so that the graph changes."""
    if isinstance(b, torch.fx.Node):
        b = graph.call_function(aten.neg.default, (b,))
    return graph.call_function(aten.add.Tensor, (a, b if isinstance(b, torch.fx.Node) else -b))


def one_of_its_terms(self, graph, node):
    return graph.call_function(aten.add.Tensor, (node.args[0], graph.call_function(aten.mul.Tensor, (node.args[1], 0))))


def swapped(self, graph, node):
    return graph.call_function(aten.neg.default, (rewritten_sub(graph, *node.args),))


def without_its_factor(self, graph, node):
    return rewritten_sub(graph, *node.args)  # forgets alpha


def row_major(self, graph, node):
    return graph.call_function(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})


def test_the_right_rewrite_passes():
    seen: Counter[bool] = Counter()
    strategy = testing.graphs([binary_sub], dtypes=[torch.float32])
    for_all(strategy, 200, lambda graph: seen.update([testing.equivalent(Rewrite(), graph).changed]))
    assert seen[True] > 100


def binary_sub(d: testing.Draft) -> testing.Value:
    """A subtraction, now and then with a factor and of two shapes."""
    a = d.floating(lambda v: v.dim > 0 and 1 not in v.shape)
    b = d.operand([1, *a.val.shape[1:]] if d.number(2) else a.val.shape, a.dtype)
    kwargs = {"alpha": 2} if d.number(3) == 2 else {}
    return d.call(aten.sub.Tensor, a, b, bound=a.bound + 2 * b.bound, **kwargs)


@pytest.mark.parametrize("replacement", [one_of_its_terms, swapped, without_its_factor])
def test_wrong_arithmetic_is_found_by_its_numbers(replacement):
    p = wrong(replacement.__name__, replacement)
    with pytest.raises(AssertionError, match=r"output \d+: relative L2 error|input \d+ after the call") as failure:
        for_all(testing.graphs([binary_sub], dtypes=[torch.float32]), 200, lambda g: testing.equivalent(p, g))
    assert f"{p.name} changes what this graph computes" in str(failure.value)
    assert "before:\n" in str(failure.value) and "after:\n" in str(failure.value)
    shown = str(failure.value).split("after:")[0]
    assert len(shown.splitlines()) <= 9, "the example has not been shrunk"


def found(p: Pass, strategy: Any, match: str, count: int = 300) -> None:
    with pytest.raises(AssertionError, match=match):
        for_all(strategy, count, lambda graph: testing.equivalent(p, graph))


def test_bf16_where_fp32_was_asked_for_is_found():
    class Promoted(PromoteMatmulPrecision):
        precision = Precision.FP32

    found(Promoted(), testing.graphs(["matmul"]), "relative L2 error")


def test_fp32_in_place_of_fp64_is_found_at_every_class():
    def narrowed(self, graph, node):
        cast = torch.ops.prims.convert_element_type.default
        product = [graph.call_function(cast, (x, torch.float32)) for x in node.args]
        return graph.call_function(cast, (graph.call_function(aten.mm.default, tuple(product)), torch.float64))

    strategy = testing.graphs(["matmul"], dtypes=[torch.float64], exclude=("random", "cast"))
    found(wrong("narrowed", narrowed, aten.mm.default), strategy, "relative L2 error")


def test_a_pass_that_is_undone_on_a_random_graph_has_failed():
    """Lost strides, another order of random numbers, a forgotten write: the framework undoes these by itself."""
    found(wrong("row_major", row_major, aten.sub.Tensor), testing.graphs(), "row_major was undone on this graph: .*")

    def another_generator(self, graph, node):
        return graph.call_function(aten.randn.default, node.args, dict(node.kwargs))

    found(wrong("other", another_generator, aten.rand.default), testing.graphs(["random"]), "draws random numbers")


@dataclass(frozen=True)
class Instead(RuntimePass):
    """Runs another function than the graph: what no invariant of the graph guards."""

    name: ClassVar[str] = "instead"
    answers: ClassVar[frozenset[Axis]] = frozenset({Axis.LAUNCH_BOUND})
    stage: ClassVar[Stage] = Stage.RUNTIME
    precision: ClassVar[Precision] = Precision.FP32
    instead: Callable[..., Any] = lambda fn, *args: fn(*args)

    def wrap(self, fn, inputs, compiled, context):
        return lambda *args: type(self).instead(fn, *args)


def instead(name: str, function: Callable[..., Any]) -> Pass:
    return dataclass(frozen=True)(type(name, (Instead,), {"name": name, "instead": staticmethod(function)}))()


def loses_strides(fn, *args):
    return tuple(value.contiguous() for value in fn(*args))


def in_another_layout(fn, *args):
    return tuple(v.t().contiguous().t() if v.dim() == 2 else v for v in fn(*args))


def copies_what_was_a_view(fn, *args):
    return tuple(torch.empty_strided(v.shape, v.stride(), dtype=v.dtype).copy_(v) for v in fn(*args))


def returns_one_buffer_twice(fn, *args):
    first, *rest = fn(*args)
    return (first, *(first if torch.equal(first, other) else other for other in rest))


def draws_once_more(fn, *args):
    outputs = fn(*args)
    torch.rand(1)
    return outputs


def draws_in_another_order(fn, *args):
    torch.rand(1)
    return fn(*args)


def forgets_the_writes(fn, *args):
    return fn(*[value.clone() if isinstance(value, torch.Tensor) else value for value in args])


def writes_what_it_only_reads(fn, *args):
    outputs = tuple(value.clone() for value in fn(*args))
    for value in args:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value.zero_()
    return outputs


def in_double(fn, *args):
    return tuple(v.double() for v in fn(*args))


def without_the_last(fn, *args):
    return fn(*args)[:-1]


def works_for_one_size(fn, *args):
    sizes = [value for value in args if isinstance(value, int)]
    if not sizes:
        return fn(*args)
    return tuple(v * 0 if v.is_floating_point() and sizes[0] > 6 else v for v in fn(*args))


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (loses_strides, r"strides|aliases no input, in the baseline it aliases"),
        (in_another_layout, r"output \d+: (strides|aliases)"),
        (copies_what_was_a_view, r"aliases no input, in the baseline it aliases input \d+|share no memory"),
        (draws_once_more, "the random generators are in another state"),
        (forgets_the_writes, r"input \d+ is left alone, the baseline writes it|aliases"),
        (writes_what_it_only_reads, r"input \d+ .* ?(is written|the call)"),
        (in_double, "dtype torch.float64, baseline"),
        (without_the_last, "outputs, baseline"),
        (works_for_one_size, "input set 1: output"),
    ],
)
def test_what_a_caller_can_see_of_a_call_is_compared(function, match):
    found(instead(function.__name__, function), testing.graphs(), match)


def test_other_random_numbers_are_found_by_the_values():
    strategy = testing.graphs(["random"], dynamic=False)
    found(instead("order", draws_in_another_order), strategy, r"output \d+: |random generators")


def test_outputs_that_come_to_share_memory_are_found():
    def one_buffer(d: testing.Draft) -> list[testing.Value]:
        x = d.floating()
        return [d.call(aten.relu.default, x, bound=x.bound, exact=True) for _ in range(2)]

    strategy = testing.graphs([one_buffer], max_nodes=4)
    expected = r"outputs \d+ and \d+ share memory, in the baseline they do not"
    found(instead("shares", returns_one_buffer_twice), strategy, expected)


def test_running_the_graph_itself_is_equivalent():
    found_any: Counter[bool] = Counter()
    p = instead("itself", lambda fn, *args: fn(*args))
    for_all(testing.graphs(), 200, lambda graph: found_any.update([testing.equivalent(p, graph).changed]))
    assert found_any[True] >= 200


def test_a_badly_conditioned_graph_is_held_to_what_its_own_rounding_does():
    """(x @ w) - y, where y is x @ w rounded: bf16 products are nothing but error there, and no pass is to blame."""
    x, w = torch.randn(4, 8), torch.randn(8, 4)
    y = (x @ w) * (1 + 2.0**-9)

    def cancels(x, w, y):
        return torch.mm(x, w) - y

    graph = testing.capture(cancels, x, w, y)
    result = testing.run(PromoteMatmulPrecision(), graph)
    budget = parse_precision("bf16")
    assert verify.verify(result.fn, graph, graph, [(x, w, y)], (), budget).ok is False
    assert testing.difference(graph, result.fn, [(x, w, y)], budget=budget) == ""
    # What is well conditioned is not excused, and neither is any wrong number at fp32.
    well = testing.capture(lambda x, w, y: torch.mm(x, w) + y, x, w, y)
    assert "relative L2" in testing.difference(well, lambda *a: (well(*a)[0] * 1.1,), [(x, w, y)], budget=budget)
    fp32 = parse_precision("fp32")
    assert "relative L2" in testing.difference(graph, lambda *a: (graph(*a)[0] * 1.1,), [(x, w, y)], budget=fp32)
    assert testing.difference(graph, graph, [(x, w, y)], budget=fp32) == ""


# ---------------------------------------------------------------- compiled


@dataclass(frozen=True)
class EverythingLabelled(PassContext):
    """Names of nodes are not known before the graph is compiled."""

    def answers(self, node: torch.fx.Node, axes: Any) -> bool:
        return True


def compiled(model: torch.nn.Module, args: list[Any], passes: list[Pass], precision: str) -> list[Any]:
    """Compile with `passes`, compare with an fp64 run, and return their reports."""
    found: list[Any] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        static = dynamo.static_inputs(gm, inputs)
        written = dynamo_writes(gm)
        context = EverythingLabelled(
            device=torch.device("cpu"),
            budget=parse_precision(precision),
            matrix_units=frozenset({"bfloat16"}),
            static=static,
            mutated=written,
            session=True,
        )
        build = Builder(gm, inputs, {}, context, check_weights=False).build(passes)
        with dynamo.outside_tracing():
            verdict = verify.verify(build.fn, gm, gm, [list(inputs)], static, context.budget, logits=False)
        assert verdict.ok, f"{verdict.reason}\n{gm.graph}"
        found.extend(build.reports)
        return gm.forward

    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(*args)
    return found


def dynamo_writes(gm: torch.fx.GraphModule) -> frozenset[int]:
    position = {node: i for i, node in enumerate(dynamo.placeholders(gm))}
    return frozenset(position[n.args[0]] for n in gm.graph.nodes if "copy_" in str(n.target) and n.args[0] in position)


COMPILED = {
    "no pass": ([], "fp32", []),
    "freeze_weights": ([FreezeWeights()], "fp32", []),
    "onednn_linear": ([FreezeWeights(), OnednnLinear()], "fp32", ["linear"]),
    "promote_matmul_precision": ([PromoteMatmulPrecision()], "bf16", ["matmul"]),
    "bf16_graph": ([Bf16Graph()], "bf16", ["matmul"]),
}


@pytest.mark.parametrize("name", COMPILED)
def test_ten_random_graphs_are_as_right_when_compiled(name, fresh_dynamo):
    chosen, precision, operators = COMPILED[name]
    if name == "onednn_linear" and OnednnLinear().applicable(testing.context()):
        pytest.skip("this torch has no oneDNN or no MKL")
    strategy = testing.graphs(
        [frozen_linear if o == "linear" else o for o in operators],
        max_nodes=5,
        dynamic=False,
        exclude=("random",),
        dtypes=[torch.float32],
    ).filter(lambda graph: has_work_for(chosen, graph))
    rewritten: Counter[str] = Counter()

    def look(graph: testing.RandomGraph) -> None:
        torch._dynamo.reset()
        for report in compiled(*graph.model(), chosen, precision):
            assert not report.error, (report, graph)
            rewritten[report.name] += bool(report.rewritten)

    for_all(strategy, 10, look, shrink=False)
    assert all(rewritten[p.name] >= 5 for p in chosen), rewritten


def frozen_linear(d: testing.Draft) -> testing.Value:
    """A linear layer whose weight is a parameter, in the form that Inductor's freezing packs."""
    x = d.operand([d.choice((2, 3, 5)), d.choice((4, 8))], torch.float32)
    features = int(x.val.shape[1])
    weight = d.input([d.choice((2, 3, 8)), features], torch.float32, static=True)
    transposed = d.call(aten.permute.default, weight, [1, 0], bound=1, exact=True)
    bias = d.input([int(weight.val.shape[0])], torch.float32, static=True)
    return d.call(aten.addmm.default, bias, x, transposed, bound=features * x.bound + 1)


def has_work_for(chosen: list[Pass], graph: testing.RandomGraph) -> bool:
    """Whether the last pass rewrites something that an output depends on."""
    live = torch.fx.GraphModule(graph.module, copy.deepcopy(graph.module.graph))
    live.meta.update(graph.module.meta)
    live.graph.eliminate_dead_code()
    computed = [node for node in live.graph.nodes if node.op == "call_function"]
    memory = effects.memory(live.graph)
    held = {node.name for i, node in enumerate(dynamo.placeholders(live)) if i in graph.static}
    if any(memory[output] & held for output in live.graph.output_node().args[0]):
        return False  # Inductor does not hold constant what the graph returns a view of
    if not chosen or isinstance(chosen[-1], OnednnLinear):
        layers = [n for n in computed if n.target is aten.addmm.default]
        return len(computed) >= 3 and (not chosen or (bool(layers) and "frozen_linear" in graph.families))
    with_sources(live.graph, [node.name for node in dynamo.placeholders(live)])
    return len(computed) >= 3 and testing.run(chosen[-1], live, inputs=graph.inputs()).changed
