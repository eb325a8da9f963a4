"""The manager runs a pass only if a trial of it holds every invariant, and counts what it really did."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fxopt.labels import Axis, Label
from fxopt.manager import SlotPass, _random, run_pass
from fxopt.registry import Candidate, GraphPass, PassContext, Stage
from fxopt.torch_api.inductor import CustomGraphPass
from fxopt.verify import Precision, parse_precision
from passes.promote_matmul_precision import PromoteMatmulPrecision

aten = torch.ops.aten
CONTEXT = PassContext(device=torch.device("cpu"), budget=parse_precision("bf16"), matrix_units=frozenset({"bfloat16"}))


def trace(fn, *args):
    """The functional aten graph of `fn`, with fake values on every node, as AOTAutograd would hand it over."""
    return make_fx(fn, tracing_mode="fake")(*args)


@dataclass(frozen=True)
class Relu(GraphPass):
    """relu(x) -> clamp_min(x, 0): right."""

    name: ClassVar[str] = "relu"
    answers: ClassVar[frozenset[Axis]] = frozenset({Axis.MEMORY_BOUND})
    stage: ClassVar[Stage] = Stage.JOINT
    precision: ClassVar[Precision] = Precision.FP32

    def candidates(self, graph, context):
        for node in graph.nodes:
            if node.target is aten.relu.default:
                yield Candidate(node.name)
            elif node.target is aten.tanh.default:
                yield Candidate(node.name, "not a relu")

    def rewrite(self, graph, node, context):
        with graph.inserting_before(node):
            new = self.replacement(graph, node)
        node.replace_all_uses_with(new)
        graph.erase_node(node)

    def replacement(self, graph, node):
        return graph.call_function(aten.clamp_min.default, (node.args[0], 0))


def mutant(**methods):
    return dataclass(frozen=True)(type("Mutant", (Relu,), {"name": "mutant", **methods}))()


@pytest.fixture
def graph():
    gm = trace(lambda x: torch.tanh(torch.relu(x)) + 1, torch.randn(4, 8))
    return gm.graph


def text(graph):
    return [str(n.target) for n in graph.nodes if n.op == "call_function"]


def test_a_right_pass_is_applied_counted_and_given_values_and_provenance(graph):
    node = next(n for n in graph.nodes if n.target is aten.relu.default)
    node.meta["stack_trace"] = "here"
    report = run_pass(Relu(), graph, CONTEXT)
    assert (report.matched, report.rewritten, report.changed, report.error) == (1, 1, True, "")
    assert report.refused == (("tanh", "not a relu"),)
    assert text(graph) == ["aten.clamp_min.default", "aten.tanh.default", "aten.add.Tensor"]
    new = next(n for n in graph.nodes if n.target is aten.clamp_min.default)
    assert new.meta["val"].shape == (4, 8)
    assert new.meta["stack_trace"] == "here"


def boom(self, graph, node, context):
    with graph.inserting_before(node):
        graph.call_function(aten.sin.default, (node.args[0],))
    raise ValueError("half-way")


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ({"rewrite": boom}, "half-way"),
        ({"rewrite": lambda self, graph, node, context: None}, "the graph is as it was"),
        (
            {"replacement": lambda self, g, n: g.call_function(aten.to.dtype, (n.args[0], torch.bfloat16))},
            "output 0.*dtype torch.float32 became torch.bfloat16",
        ),
        (
            {"replacement": lambda self, g, n: g.call_function(aten.sum.dim_IntList, (n.args[0], [0]))},
            "output 0.*shape .*4, 8.* became .*8",
        ),
        (
            {"replacement": lambda self, g, n: g.call_function(aten.mm.default, (n.args[0], n.args[0]))},
            "cannot be evaluated",
        ),
        (
            {"replacement": lambda self, g, n: g.call_function(aten.rand_like.default, (n.args[0],))},
            "draws random numbers",
        ),
        (
            {"replacement": lambda self, g, n: g.call_function(aten.relu_.default, (n.args[0],))},
            "writes to memory",
        ),
        ({"ensures": lambda self, graph, context: 1 / 0}, "ZeroDivisionError"),
        ({"candidates": lambda self, graph, context: [Candidate("gone")]}, "gone is not in the graph"),
    ],
    ids=["raises", "claims", "dtype", "shape", "invalid", "random", "mutates", "ensures", "stale name"],
)
def test_a_pass_that_breaks_something_is_undone_and_says_what(graph, methods, message):
    before = str(graph)
    report = run_pass(mutant(**methods), graph, CONTEXT)
    assert str(graph) == before
    assert not report.changed and report.rewritten == 0
    assert report.error and __import__("re").search(message, report.error), report.error


@pytest.mark.parametrize(("dropout", "draws"), [(0.0, False), (0.1, True)])
def test_attention_draws_random_numbers_only_for_its_dropout(dropout, draws):
    graph = torch.fx.Graph()
    q = graph.placeholder("q")
    node = graph.call_function(aten._scaled_dot_product_cudnn_attention.default, (q, q, q, None, False, dropout))
    assert _random(node) is draws
    default = graph.call_function(aten._scaled_dot_product_efficient_attention.default, (q, q, q, None, False))
    assert not _random(default)
    assert _random(graph.call_function(aten.rand_like.default, (q,)))


def test_a_pass_that_changes_an_outputs_stride_is_undone():
    gm = trace(lambda x: torch.relu(x), torch.randn(4, 8))

    def transposed(self, g, n):
        t = g.call_function(aten.permute.default, (n.args[0], [1, 0]))
        c = g.call_function(aten.clone.default, (t,), {"memory_format": torch.contiguous_format})
        return g.call_function(aten.permute.default, (c, [1, 0]))

    before = str(gm.graph)
    report = run_pass(mutant(replacement=transposed), gm.graph, CONTEXT)
    assert "stride (8, 1) became (1, 4)" in report.error
    assert str(gm.graph) == before


def test_a_pass_that_writes_an_operator_which_inductor_has_decomposed_by_then_is_undone(graph):
    """It would only fail when the candidate is compiled, and there without a word on who wrote it."""

    def clamped(self, g, n):
        return g.call_function(aten.clamp.default, (n.args[0], 0, None))

    before = str(graph)
    report = run_pass(mutant(replacement=clamped), graph, CONTEXT)
    assert "clamp_default: aten.clamp.default is decomposed before this stage" in report.error
    assert str(graph) == before


def test_names_inputs_and_output_meta_survive_a_rewrite(graph):
    names = [n.name for n in graph.nodes]
    output = graph.output_node()
    output.meta["user_visible_output_idxs"] = [0]
    assert run_pass(Relu(), graph, CONTEXT).changed
    after = [n.name for n in graph.nodes]
    assert [n for n in names if n != "relu"] == [n for n in after if n != "clamp_min_default"]
    assert graph.output_node().meta["user_visible_output_idxs"] == [0]
    graph.lint()
    x = torch.randn(4, 8)
    torch.testing.assert_close(torch.fx.GraphModule({}, graph)(x), torch.tanh(torch.relu(x)) + 1)


class Installed(CustomGraphPass):
    def __init__(self, identity):
        self.identity, self.calls = identity, 0

    def __call__(self, graph):
        self.calls += 1

    def uuid(self):
        return self.identity


def test_a_users_pass_in_the_slot_runs_first_and_is_part_of_the_uuid(graph):
    mine = Installed("user-1")
    slot = SlotPass([Relu()], CONTEXT, Stage.JOINT, mine)
    slot(graph)
    assert mine.calls == 1 and slot.ran and slot.reports[0].rewritten == 1
    assert slot.uuid() != SlotPass([Relu()], CONTEXT, Stage.JOINT, Installed("user-2")).uuid()
    assert SlotPass([Relu()], CONTEXT, Stage.JOINT, lambda graph: None).uuid() is None
    assert SlotPass([Relu()], CONTEXT, Stage.JOINT, [mine, mine]).uuid() != slot.uuid()


def test_the_uuid_follows_labels_device_options_and_order():
    label = Label(Axis.MEMORY_BOUND, "group", ("relu",), "k:1", (), "high", 1.0, "why")
    uuids = {
        SlotPass(passes, context, Stage.JOINT).uuid()
        for passes, context in [
            ([Relu()], CONTEXT),
            ([Relu()], replace(CONTEXT, labels=(label,))),
            ([Relu()], replace(CONTEXT, device=torch.device("cuda", 0))),
            ([Relu()], replace(CONTEXT, budget=parse_precision("fp32"))),
            ([Relu(), PromoteMatmulPrecision()], CONTEXT),
            ([PromoteMatmulPrecision(), Relu()], CONTEXT),
        ]
    }
    assert len(uuids) == 6
