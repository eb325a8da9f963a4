"""fxopt.testing: the graph that a pass is given, one pass run on it, and what its author can assert of the result."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxopt import testing
from fxopt.labels import Axis
from fxopt.registry import Candidate, GraphPass, RuntimePass, Stage
from fxopt.torch_api import inductor
from fxopt.verify import Precision
from passes.cuda_graphs import CudaGraphs
from passes.freeze_weights import FreezeWeights
from passes.onednn_linear import OnednnLinear
from passes.promote_matmul_precision import PromoteMatmulPrecision

aten = torch.ops.aten


@dataclass(frozen=True)
class SubToAdd(GraphPass):
    """a - b -> a + -b, on floats of 32 bits."""

    name: ClassVar[str] = "sub_to_add"
    answers: ClassVar[frozenset[Axis]] = frozenset({Axis.MEMORY_BOUND, Axis.LATENCY_BOUND})
    stage: ClassVar[Stage] = Stage.JOINT
    precision: ClassVar[Precision] = Precision.FP32

    def candidates(self, graph, context):
        for node in graph.nodes:
            if node.target is aten.neg.default:
                yield Candidate(node.name, "a minus without a left side")
            elif node.target is not aten.sub.Tensor:
                continue
            elif not context.answers(node, self.answers):
                yield Candidate(node.name, "not labelled")
            elif node.meta["val"].dtype != torch.float32:
                yield Candidate(node.name, f"it computes in {node.meta['val'].dtype}, not float32")
            else:
                yield Candidate(node.name)

    def rewrite(self, graph, node, context):
        with graph.inserting_before(node):
            node.replace_all_uses_with(self.replacement(graph, *node.args))
        graph.erase_node(node)

    def replacement(self, graph, a, b):
        return graph.call_function(aten.add.Tensor, (a, graph.call_function(aten.neg.default, (b,))))


def mutant(replacement: Callable[..., Any], **fields: Any) -> GraphPass:
    """The pass with another replacement, which gets (self, graph, a, b)."""
    return dataclass(frozen=True)(type("Mutant", (SubToAdd,), {"replacement": replacement, **fields}))()


def difference(x, y):
    return torch.relu(x - y)


def pair(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, *shape, generator=generator)
    return x, y


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("scale", torch.full((4,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


# ---------------------------------------------------------------- capture and text


def test_a_captured_graph_reads_line_by_line():
    assert testing.text(testing.capture(Layer(), torch.randn(5, 8))) == (
        "p_linear_weight: f32[4, 8] = input\n"
        "p_linear_bias: f32[4] = input\n"
        "x: f32[5, 8] = input\n"
        "b_scale: f32[4] = input\n"
        "permute: f32[8, 4][1, 8] = aten.permute.default(p_linear_weight, [1, 0])\n"
        "addmm: f32[5, 4] = aten.addmm.default(p_linear_bias, x, permute)\n"
        "mul: f32[5, 4] = aten.mul.Tensor(addmm, b_scale)\n"
        "return mul"
    )


def test_symbolic_sizes_are_numbered_in_order_and_are_inputs_of_their_own():
    def fn(x, y):
        return x @ y, x.reshape(-1)

    assert testing.text(testing.capture(fn, torch.randn(5, 8), torch.randn(8, 3), dynamic=True)) == (
        "x_size_0: s0 = input\n"
        "x_size_1: s1 = input\n"
        "x: f32[s0, s1] = input\n"
        "y_size_1: s2 = input\n"
        "y: f32[s1, s2] = input\n"
        "mm: f32[s0, s2] = aten.mm.default(x, y)\n"
        "view: f32[s0*s1] = aten.view.default(x, [-1])\n"
        "return mm, view"
    )


def test_several_results_constants_writes_and_random_numbers_are_readable():
    def fn(x, halves):
        x.add_(halves["left"])
        variance, mean = torch.var_mean(x, 1)
        return variance + mean * torch.tensor(3.0), torch.rand(2, 3)

    given = torch.randn(4, 8), {"left": torch.randn(4, 8)}
    assert testing.text(testing.capture(fn, *given)) == (
        "x: f32[4, 8] = input\n"
        "halves_left: f32[4, 8] = input\n"
        "add: f32[4, 8] = aten.add.Tensor(x, halves_left)\n"
        "var_mean: (f32[4], f32[4]) = aten.var_mean.correction(add, [1], correction=1)\n"
        "getitem: f32[4] = var_mean[0]\n"
        "getitem_1: f32[4] = var_mean[1]\n"
        "_tensor_constant0: f32[] = constant 3.0\n"
        "lift_fresh_copy: f32[] = aten.lift_fresh_copy.default(_tensor_constant0)\n"
        "mul: f32[4] = aten.mul.Tensor(getitem_1, lift_fresh_copy)\n"
        "add_1: f32[4] = aten.add.Tensor(getitem, mul)\n"
        "rand: f32[2, 3] = aten.rand.default([2, 3], device=cpu, pin_memory=False)\n"
        "copy_: f32[4, 8] = aten.copy_.default(x, add)\n"
        "return add_1, rand"
    )


def test_a_graph_of_methods_and_plain_functions_is_readable_as_well():
    graph = torch.fx.symbolic_trace(lambda x: F.gelu(x.view(-1)) + 1).graph
    assert testing.text(graph).splitlines()[1:] == [
        "view = x.view(-1)",
        "gelu = torch._C._nn.gelu(view)",
        "add = add(gelu, 1)",
        "return add",
    ]


def test_at_the_post_grad_stage_inductors_own_passes_have_run():
    def fn(x):
        return (x + torch.rand(2, 3)).reshape(-1)

    joint, post_grad = (testing.text(testing.capture(fn, torch.randn(2, 3), stage=stage)) for stage in inductor.SLOTS)
    assert "aten.rand.default" in joint and "aten.view.default" in joint
    assert "prims.inductor_random.default" in post_grad and "aten.reshape.default" in post_grad


def test_frozen_parameters_are_folded_as_under_optimize():
    class Negated(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return x * -self.weight

    frozen = testing.capture(Negated(), torch.randn(2, 4), stage="post_grad", freeze=True)
    assert testing.text(frozen) == (
        "x: f32[2, 4] = input\nneg: f32[4] = constant\nmul: f32[2, 4] = aten.mul.Tensor(x, neg)\nreturn mul"
    )
    assert frozen(*frozen.meta["example_inputs"])[0].shape == (2, 4)


def test_a_capture_knows_its_inputs_and_which_are_parameters_and_runs_on_them():
    layer, x = Layer(), torch.randn(5, 8)
    graph = testing.capture(layer, x, dynamic=True)
    inputs = graph.meta["example_inputs"]
    assert len(inputs) == len([n for n in graph.graph.nodes if n.op == "placeholder"])
    assert {n.name for i, n in enumerate(graph.graph.nodes) if i in graph.meta["static_inputs"]} == {
        "p_linear_weight",
        "p_linear_bias",
        "b_scale",
    }
    torch.testing.assert_close(graph(*inputs)[0], layer(x))


def test_a_capture_is_what_a_pass_sees_in_a_compilation():
    seen = []

    class Recorder(inductor.CustomGraphPass):
        def __call__(self, graph):
            seen.append([(str(n.target), str(n.meta.get("val"))) for n in graph.nodes if n.op == "call_function"])
            raise RuntimeError("that was it")  # nothing more needs to be compiled

        def uuid(self):
            return None

    def fn(x, y):
        return torch.softmax(x @ y, -1).mean(0)

    given = torch.randn(4, 4), torch.randn(4, 4)
    for stage, slot in inductor.SLOTS.items():
        torch._dynamo.reset()
        patched = torch._inductor.config.patch({slot: Recorder(), "force_disable_caches": True})
        with torch.no_grad(), patched, pytest.raises(Exception, match="that was it"):
            torch.compile(fn)(*given)
        captured = testing.capture(fn, *given, stage=stage)
        mine = [(str(n.target), str(n.meta.get("val"))) for n in captured.graph.nodes if n.op == "call_function"]
        assert seen.pop() == mine
    torch._dynamo.reset()


def test_what_a_user_has_put_into_the_slot_has_run_before():
    class Doubles(inductor.CustomGraphPass):
        def __call__(self, graph):
            for node in graph.find_nodes(op="call_function", target=aten.relu.default):
                node.target = aten.neg.default

        def uuid(self):
            return "doubles"

    with torch._inductor.config.patch(joint_custom_pre_pass=Doubles()):
        captured = testing.capture(torch.relu, torch.randn(3))
    assert "aten.neg" in testing.text(captured) and "aten.relu" not in testing.text(captured)


def test_capturing_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    compilations = []

    def backend(gm, inputs):
        compilations.append(gm)
        return gm.forward

    def writes(x):
        return x.add_(torch.rand(3))

    torch._dynamo.reset()
    compiled, x = torch.compile(writes, backend=backend), torch.zeros(3)
    compiled(x.clone())
    before = (
        torch.get_rng_state().tolist(),
        inductor.config_fingerprint(),
        torch._dynamo.config.codegen_config(),
        len(torch._dynamo.eval_frame.cached_backends),
        torch.is_grad_enabled(),
        torch._guards.TracingContext.try_get(),
    )
    for stage in inductor.SLOTS:
        testing.capture(writes, x, stage=stage)
        testing.capture(writes, x, stage=stage, dynamic=True)
    after = (
        torch.get_rng_state().tolist(),
        inductor.config_fingerprint(),
        torch._dynamo.config.codegen_config(),
        len(torch._dynamo.eval_frame.cached_backends),
        torch.is_grad_enabled(),
        torch._guards.TracingContext.try_get(),
    )
    assert after == before
    assert torch.equal(x, torch.zeros(3)), "the function was run"
    compiled(x.clone())
    assert len(compilations) == 1, "a function that the user compiled was compiled again"
    assert not list(tmp_path.rglob("*.py")) and not list(tmp_path.rglob("*.so")), "code was generated"
    torch._dynamo.reset()


def test_parameters_that_require_gradients_are_captured_without_them():
    x = torch.randn(5, 8, requires_grad=True)
    assert testing.text(testing.capture(Layer(), x)).endswith("return mul")
    assert x.grad is None


def test_what_cannot_be_captured_is_refused_with_the_reason():
    def breaks(x):
        print(x.sum())
        return x + 1

    def constant(x):
        return 3

    with pytest.raises(testing.CaptureError, match=r"breaks gives more than one graph, because .*\n.*print"):
        testing.capture(breaks, torch.randn(3))
    with pytest.raises(testing.CaptureError, match="constant gives no graph"):
        testing.capture(constant, torch.randn(3))
    with pytest.raises(ValueError, match="stage='runtime': give one of 'joint', 'post_grad'"):
        testing.capture(torch.relu, torch.randn(3), stage="runtime")
    with pytest.raises(Exception, match="size"):
        testing.capture(torch.mm, torch.randn(3, 4), torch.randn(3, 4))


# ---------------------------------------------------------------- run


def test_a_run_reads_as_before_and_after():
    graph = testing.capture(difference, *pair(4, 8))
    result = testing.run(SubToAdd(), graph)
    report = result.report
    assert result.changed and report.changed and (report.name, report.stage) == ("sub_to_add", "joint")
    assert (report.matched, report.rewritten, report.refused, report.error) == (1, 1, (), "")
    assert result.before == testing.text(graph)
    assert result.before.splitlines()[2:] == [
        "sub: f32[4, 8] = aten.sub.Tensor(x, y)",
        "relu: f32[4, 8] = aten.relu.default(sub)",
        "return relu",
    ]
    assert result.after.splitlines()[2:] == [
        "neg_default: f32[4, 8] = aten.neg.default(y)",
        "add_tensor: f32[4, 8] = aten.add.Tensor(x, neg_default)",
        "relu: f32[4, 8] = aten.relu.default(add_tensor)",
        "return relu",
    ]
    shown = str(result)
    assert "before:\n  x: f32[4, 8] = input\n" in shown and "after:\n  x: f32[4, 8]" in shown
    assert shown.endswith("sub_to_add: 1 matched, 1 rewritten")
    x, y = pair(4, 8)
    torch.testing.assert_close(result.module(x, y)[0], difference(x, y))


def test_labels_are_everything_or_by_node_or_given():
    def two(x, y):
        return (x - y) - y

    graph = testing.capture(two, *pair(4))

    def rewritten(**given):
        report = testing.run(SubToAdd(), graph, **given).report
        return report.rewritten, report.refused

    assert rewritten() == (2, ())
    assert rewritten(labels={"sub": Axis.MEMORY_BOUND}) == (1, (("sub_1", "not labelled"),))
    assert rewritten(labels={"sub_1": ["launch_bound", "latency_bound"]})[0] == 1
    assert rewritten(labels={"sub": "compute_bound"})[0] == 0
    assert rewritten(labels=testing.labels(graph, "memory_bound", nodes=["sub"]))[0] == 1
    assert rewritten(labels=())[0] == 0
    with pytest.raises(ValueError, match="no node is named 'mul'; the graph is\nx: f32"):
        testing.run(SubToAdd(), graph, labels={"mul": "memory_bound"})
    with pytest.raises(ValueError, match="memory_bund"):
        testing.labels(graph, "memory_bund")


def test_the_context_follows_the_graph_and_can_be_given():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x):
            self.count.add_(1)
            return x - self.count * torch.rand(3)

    seen = {}

    def noting(self, graph, context):
        seen["context"] = context
        return ()

    noted = dataclass(frozen=True)(type("Noting", (SubToAdd,), {"candidates": noting}))()
    graph = testing.capture(Counter(), torch.randn(4, 3), dynamic=True)
    testing.run(noted, graph)
    found = seen["context"]
    names = [n.name for n in graph.graph.nodes if n.op == "placeholder"]
    assert [names[i] for i in found.static] == [names[i] for i in found.mutated] == ["b_count"]
    assert found.dynamic and found.random == ("rand",) and found.session and not found.grad
    assert found.device == torch.device("cpu") and found.budget.precision is Precision.FP32
    given = testing.context(SubToAdd(), session=False, precision="bf16", device="cuda:0")
    testing.run(noted, graph, context=testing.context(noted, session=False, precision="bf16"))
    assert not seen["context"].session and given.device == torch.device("cuda", 0)
    assert given.budget.precision is Precision.BF16
    assert testing.context(PromoteMatmulPrecision()).budget.precision is Precision.BF16
    with pytest.raises(TypeError, match="sesion"):
        testing.context(sesion=True)


def test_the_graph_itself_is_left_alone():
    graph = testing.capture(Layer(), torch.randn(5, 8))
    before, state = testing.text(graph), set(graph.state_dict())
    assert testing.run(PromoteMatmulPrecision(), graph).changed
    assert testing.run(FreezeWeights(), graph).changed
    assert testing.text(graph) == before and set(graph.state_dict()) == state


def test_what_rules_a_pass_out_is_a_refusal_of_the_graph():
    graph = testing.capture(Layer(), torch.randn(5, 8))

    def refused(p, **given):
        result = testing.run(p, graph, **given)
        assert not result.changed and result.after == result.before
        ((target, reason),) = result.report.refused
        assert target == "graph"
        return reason

    assert refused(PromoteMatmulPrecision(), precision="fp32") == "it needs precision='bf16', and 'fp32' was asked for"
    assert refused(CudaGraphs()) == "cuda_graphs is for cuda, and the graph is on cpu"
    assert "use fxopt.optimize" in refused(FreezeWeights(), context=testing.context(session=False))
    assert "no bf16 matrix units" in refused(
        PromoteMatmulPrecision(), context=testing.context(PromoteMatmulPrecision(), matrix_units=frozenset())
    )


def test_a_pass_that_raises_is_undone_and_the_result_says_so():
    def boom(self, graph, a, b):
        raise ValueError("half-way")

    result = testing.run(mutant(boom), testing.capture(difference, *pair(4)))
    assert not result.changed
    assert re.fullmatch(r"ValueError: half-way \(rewriting \w+, test_testing\.py:\d+\)", result.report.error)
    assert str(result).endswith(f"undone: {result.report.error}")

    @dataclass(frozen=True)
    class Raises(FreezeWeights):
        def configure(self, accepted, context):
            raise KeyError("which")

    assert testing.run(Raises(), testing.capture(Layer(), torch.randn(5, 8))).report.error == "KeyError: 'which'"


def test_a_config_pass_shows_the_frozen_graph_and_runs_on_all_inputs():
    layer, x = Layer(), torch.randn(5, 8)
    graph = testing.capture(layer, x)
    result = testing.run(FreezeWeights(), graph)
    assert result.report.rewritten == 3 and result.configuration.freeze == graph.meta["static_inputs"]
    assert result.after.splitlines()[0] == "_fxopt_frozen_0: f32[4, 8] = constant"
    assert [n.name for n in result.module.graph.nodes if n.op == "placeholder"] == ["x"]
    torch.testing.assert_close(result.fn(*graph.meta["example_inputs"])[0], layer(x))


def test_a_config_pass_needs_real_inputs():
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(lambda x: x + 1, tracing_mode="fake")(torch.randn(3))
    with pytest.raises(ValueError, match="freeze_weights looks at the inputs themselves: take the graph from capture"):
        testing.run(FreezeWeights(), graph)
    assert not testing.run(FreezeWeights(), graph, inputs=[torch.randn(3)]).changed


@dataclass(frozen=True)
class Twice(RuntimePass):
    """Runs the code, once more than needed."""

    name: ClassVar[str] = "twice"
    answers: ClassVar[frozenset[Axis]] = frozenset({Axis.LAUNCH_BOUND})
    stage: ClassVar[Stage] = Stage.RUNTIME
    precision: ClassVar[Precision] = Precision.FP32

    def refuse(self, compiled, inputs, context):
        return "it writes" if compiled.mutated else ""

    def wrap(self, fn, inputs, compiled, context):
        def twice(*args):
            fn(*args)
            return fn(*args)

        return twice


def test_a_runtime_pass_wraps_the_interpreted_graph():
    result = testing.run(Twice(), testing.capture(difference, *pair(4)))
    assert result.changed and result.before == result.after
    x, y = pair(4)
    torch.testing.assert_close(result.fn(x, y)[0], difference(x, y))
    testing.refuses(Twice(), lambda x: x.add_(1), torch.zeros(3), because="it writes")


def test_linear_layers_with_frozen_weights_go_to_onednn():
    if OnednnLinear().applicable(testing.context()):
        pytest.skip("this torch has no oneDNN or no MKL")
    graph = testing.capture(nn.Linear(8, 4), torch.randn(5, 8), stage="post_grad", freeze=True)
    result = testing.run(OnednnLinear(), graph)
    assert "mkl._mkl_linear(" in result.before and "mkldnn._linear_pointwise.default(" in result.after
    cases = testing.check(
        OnednnLinear(), nn.Linear(8, 4), torch.randn(5, 8), freeze=True, dynamic=(False,), layouts=("contiguous",)
    )
    assert [case.refused for case in cases] == [""]


# ---------------------------------------------------------------- check


def test_a_check_runs_over_dtypes_layouts_shapes_and_symbolic_sizes():
    cases = testing.check(
        SubToAdd(), difference, *pair(4, 6), dtypes=(torch.float32, torch.bfloat16), shapes=(pair(2, 3, 4), pair(5))
    )
    assert len(cases) == 2 * 2 * (3 + 3 + 2)  # a vector has no transpose
    assert "float32, sliced [2, 3, 4], [2, 3, 4], symbolic sizes" in {case.name for case in cases}
    assert {case.refused for case in cases if case.result.changed} == {""}
    assert {case.refused for case in cases if case.name.startswith("bfloat16")} == {
        "it computes in torch.bfloat16, not float32"
    }
    assert all(case.result.changed for case in cases if case.name.startswith("float32"))


def test_a_module_is_checked_in_other_dtypes_with_its_parameters():
    layer = Layer()
    cases = testing.check(
        PromoteMatmulPrecision(), layer, torch.randn(5, 8), dtypes=(torch.float32, torch.float64), dynamic=(False,)
    )
    assert [case.result.changed for case in cases] == [True] * 3 + [False] * 3
    assert layer.linear.weight.dtype == torch.float32


def first_term(self, graph, a, b):
    return a


def swapped(self, graph, a, b):
    return graph.call_function(aten.sub.Tensor, (b, graph.call_function(aten.mul.Tensor, (a, 1.0))))


def imprecise(self, graph, a, b):
    cast = torch.ops.prims.convert_element_type.default
    narrow = [graph.call_function(cast, (x, torch.bfloat16)) for x in (a, b)]
    return graph.call_function(cast, (graph.call_function(aten.sub.Tensor, tuple(narrow)), torch.float32))


def loses_infinity(self, graph, a, b):
    high = graph.call_function(aten.clamp_max.default, (graph.call_function(aten.sub.Tensor, (a, b)), 1e30))
    return graph.call_function(aten.clamp_min.default, (high, -1e30))


@pytest.mark.parametrize(
    ("replacement", "message"),
    [
        (first_term, "output 0: relative L2 error"),
        (swapped, "output 0: relative L2 error"),
        (imprecise, "output 0: relative L2 error"),
        (loses_infinity, "NaN or Inf in other places"),
    ],
)
def test_a_check_finds_wrong_numbers_and_shows_the_case(replacement, message):
    x, y = pair(4, 8)
    x[1, 2], x[3, 3], y[0, 0] = float("inf"), float("nan"), 1e38
    with pytest.raises(
        AssertionError, match=rf"sub_to_add changes what is computed \(contiguous .*{message}"
    ) as failure:
        testing.check(mutant(replacement), difference, x, y)
    assert "(contiguous [4, 8], [4, 8])" in str(failure.value)
    assert "before:\n" in str(failure.value) and "after:\n" in str(failure.value)


def test_a_check_passes_where_a_right_pass_meets_nan_and_infinity():
    x, y = pair(4, 8)
    x[1, 2], x[3, 3], y[0, 0] = float("inf"), float("nan"), float("-inf")
    assert len(testing.check(SubToAdd(), difference, x, y)) == 6


def test_a_check_finds_what_is_wrong_in_one_layout_alone():
    def of_contiguous(self, graph, a, b):
        """Reads the operand as if its rows lay one after the other."""
        flat = graph.call_function(aten.as_strided.default, (b, [4, 8], [8, 1]))
        return graph.call_function(aten.sub.Tensor, (a, graph.call_function(aten.mul.Tensor, (flat, 1.0))))

    p = mutant(of_contiguous)
    assert len(testing.check(p, difference, *pair(4, 8), layouts=("contiguous",), dynamic=(False,))) == 1
    for layout in ("transposed", "sliced"):
        with pytest.raises(AssertionError, match=rf"\({layout} \[4, 8\], \[4, 8\]\)"):
            testing.check(p, difference, *pair(4, 8), layouts=("contiguous", layout), dynamic=(False,))


def test_a_check_finds_what_is_wrong_at_another_size_of_a_graph_with_symbolic_ones():
    def first_four(self, graph, a, b):
        """Right as long as there are four rows."""
        mask = graph.call_function(
            torch.ops.prims.iota.default,
            (graph.call_function(aten.sym_size.int, (a, 0)),),
            {"start": 0, "step": 1, "dtype": torch.int64, "device": torch.device("cpu"), "requires_grad": False},
        )
        mask = graph.call_function(aten.unsqueeze.default, (graph.call_function(aten.lt.Scalar, (mask, 4)), 1))
        right = graph.call_function(aten.sub.Tensor, (a, graph.call_function(aten.mul.Tensor, (b, 1.0))))
        zero = graph.call_function(
            aten.full.default, ([], 0.0), {"dtype": torch.float32, "device": torch.device("cpu"), "pin_memory": False}
        )
        return graph.call_function(aten.where.self, (mask, right, zero))

    p = mutant(first_four)
    testing.check(p, difference, *pair(4, 8), dynamic=(False,))
    with pytest.raises(AssertionError, match=r"symbolic sizes.*input set 1"):
        testing.check(p, difference, *pair(4, 8))


def test_a_case_in_which_nothing_is_rewritten_is_a_failure_unless_it_was_refused_for_its_dtype():
    with pytest.raises(AssertionError, match=r"rewrote nothing \(contiguous \[4\]\).*\n.*before"):
        testing.check(SubToAdd(), torch.relu, torch.randn(4))
    with pytest.raises(AssertionError, match=r"rewrote nothing \(float64, contiguous"):  # one dtype, and it is refused
        testing.check(SubToAdd(), difference, *pair(4), dtypes=(torch.float64,))
    with pytest.raises(AssertionError, match=r"rewrote nothing \(bfloat16"):  # refused, but not for its dtype
        testing.check(
            SubToAdd(), difference, *pair(4), dtypes=(torch.bfloat16, torch.float32), labels={"relu": "memory_bound"}
        )
    cases = testing.check(SubToAdd(), torch.relu, torch.randn(4), must_rewrite=False)
    assert cases and not any(case.result.changed for case in cases)


def test_a_pass_that_is_undone_fails_its_check():
    def transposed(self, graph, a, b):
        return graph.call_function(aten.permute.default, (graph.call_function(aten.sub.Tensor, (a, b)), [1, 0]))

    with pytest.raises(AssertionError, match=r"sub_to_add was undone \(contiguous \[4, 4\], \[4, 4\]\)"):
        testing.check(mutant(transposed), lambda x, y: x - y, *pair(4, 4))


def test_layouts_are_what_they_say():
    x = torch.arange(24.0).reshape(2, 3, 4)
    for name, layout in testing.LAYOUTS.items():
        assert torch.equal(layout(x), x), name
        assert layout(torch.tensor(1.0)).shape == ()
    assert testing.LAYOUTS["transposed"](x).stride() == (12, 1, 3)
    sliced = testing.LAYOUTS["sliced"](x)
    assert sliced.stride() == (21, 7, 1) and sliced.storage_offset() == 2
    with pytest.raises(ValueError, match="no layout is named 'diagonal'; known: contiguous"):
        testing.check(SubToAdd(), difference, *pair(4), layouts=("diagonal",))


# ---------------------------------------------------------------- refuses


def test_a_refusal_is_asserted_by_its_reason():
    report = testing.refuses(SubToAdd(), torch.neg, torch.randn(4), because="without a left side")
    assert report.refused == (("neg", "a minus without a left side"),)
    double = pair(4)[0].double(), pair(4)[1].double()
    testing.refuses(SubToAdd(), difference, *double, because="float64, not float32")
    testing.refuses(SubToAdd(), difference, *pair(4), because="not labelled", labels=())
    testing.refuses(PromoteMatmulPrecision(), torch.mm, *pair(4, 4), because="precision='bf16'", precision="tf32")


@pytest.mark.parametrize(
    ("fn", "because", "message"),
    [
        (difference, "anything", "and rewrote it"),
        (torch.neg, "float64", "and gives other reasons"),
        (torch.relu, "float64", "and considers no node"),
    ],
)
def test_what_was_not_refused_for_that_reason_fails(fn, because, message):
    inputs = pair(4) if fn is difference else pair(4)[:1]
    with pytest.raises(AssertionError, match=f"expected to refuse this because of '{because}', {message}\nbefore:"):
        testing.refuses(SubToAdd(), fn, *inputs, because=because)


def test_a_pass_that_was_undone_has_not_refused():
    def boom(self, graph, a, b):
        raise ValueError("float64")

    with pytest.raises(AssertionError, match="and was undone"):
        testing.refuses(mutant(boom), difference, *pair(4), because="float64")


# ---------------------------------------------------------------- the package


def run_python(code: str) -> str:
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_imports_neither_torch_nor_hypothesis():
    code = "import sys, fxopt.testing; print([m for m in ('torch', 'hypothesis', 'pytest') if m in sys.modules])"
    assert run_python(code).strip() == "[]"


def test_without_hypothesis_everything_but_random_graphs_works():
    code = (
        "import sys; sys.modules['hypothesis'] = None\n"
        "from fxopt.testing import capture, check, equivalent, refuses, run, text\n"
        "import fxopt.testing\n"
        "try: fxopt.testing.graphs\n"
        "except ImportError as error: print(error)\n"
    )
    assert run_python(code).strip() == "fxopt.testing.graphs needs Hypothesis: pip install 'fxopt[testing]'"


def test_every_name_of_the_package_is_there():
    assert [name for name in dir(testing) if getattr(testing, name, None) is None] == []
    with pytest.raises(AttributeError, match="no attribute 'captur'"):
        testing.captur  # noqa: B018
