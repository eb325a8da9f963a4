"""The manager runs a pass only if a trial of it holds every invariant, and counts what it really did."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fxopt import effects
from fxopt.bisect import Bisection
from fxopt.build import Builder
from fxopt.labels import Axis, Evidence, Label
from fxopt.manager import SlotPass, run_pass
from fxopt.registry import Candidate, ConfigPass, Configuration, GraphPass, PassContext, RuntimePass, Stage
from fxopt.torch_api import inductor
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
    assert (report.created, report.erased) == (1, 1) and report.seconds > 0
    assert text(graph) == ["aten.clamp_min.default", "aten.tanh.default", "aten.add.Tensor"]
    new = next(n for n in graph.nodes if n.target is aten.clamp_min.default)
    assert new.meta["val"].shape == (4, 8)
    assert new.meta["stack_trace"] == "here"


def test_a_rewrite_finds_values_on_what_an_earlier_one_made():
    graph = trace(lambda x: torch.relu(torch.relu(x)), torch.randn(4, 8)).graph
    seen = []

    def looks(self, g, n):
        seen.append((n.args[0].name, n.args[0].meta["val"].shape))
        return g.call_function(aten.clamp_min.default, (n.args[0], 0))

    assert run_pass(mutant(replacement=looks), graph, CONTEXT).error == ""
    assert seen == [("x_1", (4, 8)), ("clamp_min_default", (4, 8))]


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
    assert effects.draws(node) is draws
    default = graph.call_function(aten._scaled_dot_product_efficient_attention.default, (q, q, q, None, False))
    assert not effects.draws(default)
    assert effects.draws(graph.call_function(aten.rand_like.default, (q,)))


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


# -- what a pass may do while it is asked -----------------------------------------------------------------------------


def test_candidates_and_ensures_may_not_change_the_graph(graph):
    def mutes(self, graph, context):
        graph.erase_node(graph.output_node())

    def changes(self, graph, context):
        next(n for n in graph.nodes if n.target is aten.tanh.default).target = aten.sin.default
        return [Candidate("relu")]

    before = str(graph)
    for method, rewrites in (("candidates", changes), ("ensures", changes)):
        assert f"{method}() changed the graph" in run_pass(mutant(**{method: rewrites}), graph, CONTEXT).error
    assert "InvariantError: lint: graph: " in run_pass(mutant(finish=mutes), graph, CONTEXT).error
    assert str(graph) == before


@pytest.mark.parametrize("method", ["candidates", "rewrite", "finish", "ensures"])
def test_whatever_method_raises_it_is_reported_with_what_it_said(graph, method):
    def raises(self, *args):
        raise KeyError("what went wrong")

    before = str(graph)
    report = run_pass(mutant(**{method: raises}), graph, CONTEXT)
    at = r"rewriting \w+, " if method == "rewrite" else ""
    assert re.fullmatch(rf"KeyError: 'what went wrong' \({at}test_manager\.py:\d+\)", report.error), report.error
    assert not report.changed and str(graph) == before


def test_a_candidate_that_an_earlier_rewrite_took_away_is_refused_and_not_an_error():
    graph = trace(lambda x: torch.relu(torch.relu(x)), torch.randn(4, 8)).graph

    def both(self, graph, node, context):
        outer = next(iter(node.users))
        outer.replace_all_uses_with(node)
        graph.erase_node(outer)

    report = run_pass(mutant(rewrite=both), graph, CONTEXT)
    assert (report.matched, report.rewritten, report.error) == (1, 1, "")
    assert report.refused == (("relu_1", "an earlier rewrite of this pass took it away"),)
    assert text(graph) == ["aten.relu.default"]


def test_a_rewrite_that_only_moves_uses_counts():
    """Equal nodes become one; the other is dead, and removing it is the manager's business."""
    graph = trace(lambda x: torch.relu(x) + torch.relu(x), torch.randn(4, 8)).graph

    def first(self, graph, node, context):
        node.replace_all_uses_with(next(n for n in graph.nodes if n.target is aten.relu.default))

    last = {"candidates": lambda self, graph, context: [Candidate("relu_1")], "rewrite": first}
    report = run_pass(mutant(**last), graph, CONTEXT)
    assert (report.rewritten, report.created, report.erased, report.error) == (1, 0, 1, "")
    assert text(graph) == ["aten.relu.default", "aten.add.Tensor"]


def test_what_an_undone_pass_hung_on_the_module_is_taken_off_again(graph):
    def registers(self, graph, node, context):
        graph.owning_module.register_buffer("_folded", torch.ones(3))
        graph.owning_module.weight = torch.nn.Parameter(torch.zeros(3))
        raise ValueError("too late")

    module = graph.owning_module
    module.weight = kept = torch.nn.Parameter(torch.ones(2))
    assert "too late" in run_pass(mutant(rewrite=registers), graph, CONTEXT).error
    assert module.weight is kept and not hasattr(module, "_folded")


def constant_graph():
    """relu(x) + a constant that the module holds."""
    return trace(lambda x: torch.relu(x) + torch.tensor([1.0, 2.0]), torch.randn(2)).graph


def test_an_undone_pass_leaves_no_attribute_of_any_kind_behind():
    graph = constant_graph()
    module = graph.owning_module
    module.add_module("inner", torch.nn.Linear(2, 2))
    module.kept, weight = "as it was", module.inner.weight
    constant = module._tensor_constant0

    def leaves(self, graph, node, context):
        module.table, module.kept = torch.ones(3), "changed"
        module._tensor_constant0 = torch.zeros(2)
        module.register_forward_hook(lambda *args: None)
        module.inner.weight = torch.nn.Parameter(torch.zeros(2, 2))
        module.inner.more = torch.ones(3)
        raise ValueError("too late")

    before = set(vars(module))
    report = run_pass(mutant(rewrite=leaves), graph, CONTEXT)
    assert report.error.startswith("ValueError: too late (rewriting ")
    assert set(vars(module)) == before and module.kept == "as it was" and not module._forward_hooks
    assert module._tensor_constant0 is constant
    assert module.inner.weight is weight and not hasattr(module.inner, "more")


@pytest.mark.parametrize("refuses", [False, True], ids=["raises", "has no candidate"])
def test_a_constant_that_was_written_to_in_place_is_reported_although_it_cannot_be_undone(refuses):
    graph = constant_graph()

    def writes(self, graph, *args):
        graph.owning_module._tensor_constant0.zero_()
        if not refuses:
            raise ValueError("too late")
        return []

    before = str(graph)
    report = run_pass(mutant(**{"candidates" if refuses else "rewrite": writes}), graph, CONTEXT)
    assert "the pass changed the constant _tensor_constant0 in place" in report.error
    assert report.error.startswith("InvariantError: constants: " if refuses else "ValueError: too late (rewriting ")
    assert "; constants: " in report.error or refuses
    assert str(graph) == before and not report.changed and report.rewritten == 0


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_undoes_the_pass_and_goes_on(graph, interrupt):
    def interrupted(self, graph, node, context):
        graph.owning_module.register_buffer("_folded", torch.ones(3))
        graph.erase_node(graph.output_node())
        raise interrupt

    before = str(graph)
    with pytest.raises(interrupt):
        run_pass(mutant(rewrite=interrupted), graph, CONTEXT)
    assert str(graph) == before and not hasattr(graph.owning_module, "_folded")


def test_what_an_accepted_pass_hung_on_the_module_stays(graph):
    def folded(self, g, n):
        g.owning_module.register_buffer("_zero", torch.zeros(()))
        return g.call_function(aten.maximum.default, (n.args[0], g.get_attr("_zero")))

    assert run_pass(mutant(replacement=folded), graph, CONTEXT).error == ""
    x = torch.randn(4, 8)
    torch.testing.assert_close(torch.fx.GraphModule(graph.owning_module, graph)(x), torch.tanh(torch.relu(x)) + 1)


def test_a_new_node_does_not_share_its_meta_with_the_node_that_it_was_taken_from():
    """Else the value that is found for the one would be taken for that of the other."""
    graph = trace(lambda x: (torch.relu(x) + 1, torch.tanh(x)), torch.randn(4, 8)).graph

    def narrowed(self, graph, node, context):
        (user,) = node.users
        with graph.inserting_after(node):
            new = graph.call_function(torch.ops.prims.convert_element_type.default, (node, torch.bfloat16))
        with graph.inserting_after(new):
            back = graph.call_function(torch.ops.prims.convert_element_type.default, (new, torch.float32))
        new.meta = back.meta = node.meta
        user.replace_input_with(node, back)

    assert run_pass(mutant(rewrite=narrowed), graph, CONTEXT).error == ""
    dtypes = {n.name: n.meta["val"].dtype for n in graph.nodes if n.op == "call_function"}
    assert dtypes.pop("convert_element_type_default") is torch.bfloat16
    assert set(dtypes.values()) == {torch.float32}
    assert len({id(n.meta) for n in graph.nodes}) == len(graph.nodes)


def named(graph, name):
    return next(n for n in graph.nodes if n.name == name)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda graph: Candidate(named(graph, "relu")), "candidates() gave Candidate(<Node relu>): give node.name"),
        (lambda graph: Candidate(named(graph, "relu"), "no"), "gave Candidate(<Node relu>): give node.name"),
        (lambda graph: Candidate(3), "candidates() gave Candidate(3): `target` is a name"),
        (lambda graph: Candidate("relu", True), "gave Candidate('relu', refused=True): `refused` is the reason"),
        (lambda graph: Candidate("relu", None), "gave Candidate('relu', refused=None): `refused` is the reason"),
        (lambda graph: named(graph, "relu"), "candidates() gave relu (Node): give a Candidate"),
        (lambda graph: "relu", "candidates() gave 'relu' (str): give a Candidate"),
    ],
    ids=["node", "refused node", "number", "true", "none", "bare node", "bare name"],
)
def test_what_is_no_candidate_is_an_error_that_says_what_to_give(graph, builder, given, message):
    before = str(graph)
    report = run_pass(mutant(candidates=lambda self, graph, context: [given(graph)]), graph, CONTEXT)
    assert report.error.startswith("InvariantError: ") and message in report.error
    assert str(graph) == before and not report.changed
    build = builder.build([altered(Frozen, candidates=lambda self, gm, inputs, context: [(0, given(gm.graph))])])
    assert message in build.reports[0].error and not build.reports[0].rewritten


def test_a_candidate_given_twice_is_rewritten_once(graph, builder):
    def negated(self, graph, node, context):
        with graph.inserting_before(node):
            inner = graph.call_function(aten.neg.default, node.args)
        node.args = (inner,)

    twice = [Candidate("relu"), Candidate("relu")]
    report = run_pass(mutant(candidates=lambda *args: twice, rewrite=negated), graph, CONTEXT)
    assert (report.matched, report.rewritten, report.created, report.error) == (1, 1, 1, "")
    build = builder.build([altered(Frozen, candidates=lambda *args: [(0, c) for c in twice])])
    assert (build.reports[0].matched, build.reports[0].rewritten) == (1, 1)


# -- where new nodes come from ----------------------------------------------------------------------------------------


def ancestry(node):
    """Names at the ends of the chains of `from_node`."""

    def ends(source):
        return {source.name} if not source.from_node else set().union(*map(ends, source.from_node))

    return set().union(*map(ends, node.meta.get("from_node", ())))


@pytest.mark.parametrize("level", [0, 1], ids=["without torch's observer", "under torch's observer"])
def test_every_node_that_a_pass_makes_says_from_which_it_was_made(graph, level):
    from torch.fx.traceback import NodeSource

    relu = next(n for n in graph.nodes if n.target is aten.relu.default)
    pre_grad = torch.fx.Graph().placeholder("pre_grad")
    relu.meta["from_node"] = [NodeSource(pre_grad)]

    def negated(self, g, n):
        inner = g.call_function(aten.neg.default, (n.args[0],))
        return g.call_function(aten.neg.default, (g.call_function(aten.clamp_max.default, (inner, 0)),))

    def tidies(self, graph, context):
        tanh = next(n for n in graph.nodes if n.target is aten.tanh.default)
        with graph.inserting_before(tanh):
            tanh.args = (graph.call_function(aten.alias.default, tanh.args),)

    with torch._inductor.config.patch({"trace.provenance_tracking_level": level}):
        assert run_pass(mutant(replacement=negated, finish=tidies), graph, CONTEXT).error == ""
    for node in graph.nodes:
        if node.name in ("neg_default", "clamp_max_default", "neg_default_1", "alias_default"):
            assert ancestry(node) == {"pre_grad"}, node
            assert [source.pass_name for source in node.meta["from_node"]] == ["mutant"]
    # So a later pass still finds the label on what has become of a node.
    label = Label(Axis.MEMORY_BOUND, "group", ("relu",), "k:1", (), "high", 1.0, "why")
    context = replace(CONTEXT, labels=(label,), origins={"relu": ("pre_grad",)})
    made = next(n for n in graph.nodes if n.name == "clamp_max_default")
    assert context.answers(made, {Axis.MEMORY_BOUND}) and not context.answers(made, {Axis.COMPUTE_BOUND})


def test_a_node_made_where_nothing_is_known_says_at_least_from_which(graph):
    """Others in the graph do say where they come from; a pass is not to blame that this one does not."""
    next(n for n in graph.nodes if n.target is aten.tanh.default).meta["stack_trace"] = "here"
    relu = next(n for n in graph.nodes if n.target is aten.relu.default)

    def ends(self, g, n):
        with g.inserting_before(next(iter(n.users))):  # next to nodes of which nothing is known either
            return g.call_function(aten.clamp_min.default, (n.args[0], 0))

    relu.meta = {"val": relu.meta["val"]}
    relu.prev.meta.pop("stack_trace", None)
    assert run_pass(mutant(replacement=ends), graph, CONTEXT).error == ""
    new = next(n for n in graph.nodes if n.target is aten.clamp_min.default)
    assert [source.name for source in new.meta["from_node"]] == ["relu"]


def test_torchs_own_switch_for_passes_is_kept(graph):
    before = str(graph)
    with torch._inductor.config.patch(disabled_passes="relu"):
        report = run_pass(Relu(), graph, CONTEXT)
    assert str(graph) == before
    assert report.refused == (("graph", "torch._inductor.config.disabled_passes names this pass"),)


def test_a_bisection_takes_candidates_one_by_one(graph):
    gm = trace(lambda x: torch.relu(x) + torch.relu(x + 1), torch.randn(4, 8))
    bisection = Bisection(1)
    report = run_pass(Relu(), gm.graph, CONTEXT, bisection=bisection)
    assert (report.matched, report.rewritten, report.error) == (1, 1, "")
    assert report.refused == (("relu_1", "bisect limit 1"),) and bisection.count == 2
    before = str(graph)
    report = run_pass(Relu(), graph, CONTEXT, bisection=bisection)
    assert (report.matched, report.rewritten, report.changed, report.error) == (0, 0, False, "")
    assert ("relu", "bisect limit 1") in report.refused and str(graph) == before


# -- the slot ---------------------------------------------------------------------------------------------------------


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


def test_a_users_pass_is_called_as_inductor_would_call_it(graph):
    """torch 2.13 tells some custom passes whether the graph is for inference."""
    told = []

    class Aware(inductor.InferenceAwareGraphPass):
        def __call__(self, graph, is_inference=None):
            told.append(is_inference)

        def uuid(self):
            return "aware"

    aware = inductor.InferenceAwareGraphPass is not CustomGraphPass
    slot = SlotPass([Relu()], CONTEXT, Stage.POST_GRAD, [Aware(), Installed("plain")])
    slot(graph, is_inference=True) if aware else slot(graph)
    assert told == [True if aware else None] and slot.reports[0].rewritten == 1


def test_what_a_pass_did_in_the_branches_of_a_condition_is_in_its_report(graph):
    """Inductor calls a slot for each graph inside the graph, too."""
    slot = SlotPass([Relu()], CONTEXT, Stage.JOINT)
    assert not slot.ran
    slot(graph)
    slot(trace(lambda x: torch.relu(x), torch.randn(4)).graph)
    slot(trace(lambda x: torch.tanh(x), torch.randn(4)).graph)
    (report,) = slot.reports
    assert (report.matched, report.rewritten, report.created, report.erased) == (2, 2, 2, 2)
    assert report.refused == (("tanh", "not a relu"),) * 2


def test_the_uuid_follows_all_that_a_pass_can_see():
    evidence = Evidence("bandwidth", 1.0, 0.5, "1", "measured")
    label = Label(Axis.MEMORY_BOUND, "group", ("relu",), "k:1", (evidence,), "high", 1.0, "why")
    seen = {
        "device": [torch.device("cuda", 0)],
        "budget": [parse_precision("fp32"), parse_precision(1e-3)],
        "labels": [
            (label,),
            (replace(label, axis=Axis.COMPUTE_BOUND),),
            (replace(label, nodes=("tanh",)),),
            (replace(label, headroom_ns=2.0),),
            (replace(label, confidence="low"),),
            (replace(label, why="another"),),
            (replace(label, evidence=(replace(evidence, threshold=0.6),)),),
            (replace(label, evidence=(replace(evidence, value=2.0),)),),
            (label, label),
        ],
        "origins": [{"relu": ("a",)}, {"relu": ("b",)}],
        "matrix_units": [frozenset(), frozenset({"bfloat16", "float16"})],
        "static": [frozenset({1})],
        "mutated": [frozenset({1})],
        "random": [("rand",)],
        "dynamic": [True],
        "session": [True],
        "grad": [True],
    }
    assert {*seen, "cache"} == {field.name for field in dataclasses.fields(PassContext)}
    contexts = [CONTEXT, *(replace(CONTEXT, **{name: value}) for name, values in seen.items() for value in values)]
    uuids = [SlotPass([Relu()], context, Stage.JOINT).uuid() for context in contexts]
    assert len(set(uuids)) == len(uuids)
    assert SlotPass([Relu()], replace(CONTEXT), Stage.JOINT).uuid() == uuids[0]
    # Code made with another measured choice is right as well, and processes with other folders share it.
    elsewhere = replace(CONTEXT, cache=Path("elsewhere"))
    assert SlotPass([Relu()], elsewhere, Stage.JOINT).uuid() == uuids[0]


def test_the_uuid_follows_the_passes_their_options_and_their_order():
    @dataclass(frozen=True)
    class Tunable(Relu):
        block: int = 4

    promote = PromoteMatmulPrecision()
    chains = [[Relu()], [promote], [Relu(), promote], [promote, Relu()], [Tunable(4)], [Tunable(8)], []]
    uuids = {SlotPass(chain, CONTEXT, Stage.JOINT).uuid() for chain in chains}
    assert len(uuids) == len(chains)
    assert SlotPass([Relu()], CONTEXT, Stage.POST_GRAD).uuid() not in uuids


# -- config and runtime passes ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Frozen(ConfigPass):
    name: ClassVar[str] = "frozen"
    stage: ClassVar[Stage] = Stage.CONFIG
    precision: ClassVar[Precision] = Precision.FP32

    def candidates(self, gm, inputs, context):
        return [(0, Candidate("x")), (1, Candidate("y", "written to"))]

    def configure(self, accepted, context):
        return Configuration(freeze=frozenset(accepted))

    def took_effect(self, compiled, accepted, context):
        return len(accepted)


@dataclass(frozen=True)
class Wrapped(RuntimePass):
    name: ClassVar[str] = "wrapped"
    stage: ClassVar[Stage] = Stage.RUNTIME
    precision: ClassVar[Precision] = Precision.FP32

    def wrap(self, fn, inputs, compiled, context):
        return lambda *args: fn(*args)


@pytest.fixture
def builder(graph, monkeypatch):
    """A builder that does not compile."""
    from fxopt.torch_api.dynamo import CompileScope

    def compiled(gm, inputs, **given):
        return inductor.Compiled(gm, None, None, None, 0, frozenset(), 0.0, frozenset(), CompileScope())

    monkeypatch.setattr(inductor, "compile_graph", compiled)
    return Builder(graph.owning_module, [torch.randn(4, 8)], {}, CONTEXT)


def altered(base, **methods):
    return dataclass(frozen=True)(type("Altered", (base,), methods))()


def test_a_build_reports_what_every_kind_of_pass_did(builder):
    build = builder.build([Frozen(), Wrapped()])
    assert [(r.matched, r.rewritten, r.changed, r.error) for r in build.reports] == [(1, 1, True, "")] * 2
    assert build.reports[0].refused == (("y", "written to"),)
    assert build.errors == [] and build.effective


@pytest.mark.parametrize(
    ("base", "method"),
    [
        (Frozen, "candidates"),
        (Frozen, "configure"),
        (Frozen, "took_effect"),
        (Wrapped, "refuse"),
        (Wrapped, "wrap"),
    ],
)
def test_a_config_or_runtime_pass_that_raises_is_reported(builder, base, method):
    def raises(self, *args):
        raise KeyError("what went wrong")

    build = builder.build([altered(base, **{method: raises})])
    assert build.reports[0].error == "KeyError: 'what went wrong'" and not build.reports[0].rewritten
    assert build.errors == [f"{base.name}: KeyError: 'what went wrong'"]


def test_a_configuration_that_is_not_in_effect_is_a_refusal_and_no_error(builder):
    build = builder.build([altered(Frozen, took_effect=lambda self, *args: 0)])
    (report,) = build.reports
    assert report.refused == (("graph", "asked for 1, not in effect in the compiled graph"), ("y", "written to"))
    assert (report.matched, report.rewritten, report.changed, report.error) == (0, 0, False, "")
    assert build.errors == [] and not build.effective


def test_the_callers_own_options_win_over_those_of_a_pass(builder, monkeypatch):
    compile_graph, given = inductor.compile_graph, []
    monkeypatch.setattr(inductor, "compile_graph", lambda *args, **more: given.append(more) or compile_graph(*args))
    asked = {"max_autotune": True, "combo_kernels": True}
    p = altered(Frozen, configure=lambda self, accepted, context: Configuration(patches=asked))
    replace(builder, patches={"max_autotune": False}).build([p])
    assert given[0]["patches"] == {"max_autotune": False, "combo_kernels": True}
    assert given[0]["capture"], "what a config pass did is counted in the code"


def test_code_is_compiled_inside_of_what_a_runtime_pass_holds_during_calls(builder, monkeypatch):
    compile_graph, seen, held = inductor.compile_graph, [], []

    @contextlib.contextmanager
    def holding(self):
        held.append("inside")
        yield
        held.clear()

    def compiled(*args, **given):
        seen.append(list(held))
        return compile_graph(*args)

    monkeypatch.setattr(inductor, "compile_graph", compiled)
    builder.build([altered(Wrapped, compiling=holding)])
    builder.build([Wrapped()])
    assert seen == [["inside"], []] and held == []


def test_a_stage_that_inductor_does_not_run_is_said_to_be_so(builder):
    build = builder.build([Relu()])
    assert build.reports[0].refused == (("graph", "Inductor did not run the stage joint on this graph"),)
    assert build.errors == [] and not build.effective


def test_a_limit_leaves_out_config_and_runtime_passes_whole(builder):
    build = replace(builder, bisection=Bisection(1)).build([Frozen(), Wrapped()])
    assert [(r.matched, r.rewritten) for r in build.reports] == [(1, 1), (0, 0)]
    assert build.reports[1].refused == (("graph", "bisect limit 1"),)
    assert build.errors == [] and build.effective


def test_copying_a_graph_that_holds_a_tree_of_inputs_shows_no_warning_of_torch(recwarn):
    gm = trace(lambda x: x.relu(), torch.randn(4))
    tree = torch.utils._pytree.tree_structure(((0,), {}))
    gm.graph.set_codegen(torch.fx.graph._PyTreeCodeGen(torch.fx.graph._PyTreeInfo(["x"], tree, None)))
    warnings.simplefilter("always")
    assert run_pass(Relu(), gm.graph, CONTEXT).rewritten == 1
    assert [str(w.message) for w in recwarn if "treespec" in str(w.message)] == []
