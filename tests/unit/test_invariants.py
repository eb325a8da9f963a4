"""Whatever a pass breaks is found, with the rule and the node, and undone; what a right pass does is let through."""

from __future__ import annotations

import math
import operator
import re
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxopt import effects, invariants
from fxopt.invariants import PROVENANCE_META, RULES
from fxopt.labels import Axis
from fxopt.manager import SlotPass, run_pass
from fxopt.registry import Candidate, GraphPass, PassContext, Stage
from fxopt.torch_api.inductor import lowers
from fxopt.verify import Precision, parse_precision

aten = torch.ops.aten
CONTEXT = PassContext(device=torch.device("cpu"), budget=parse_precision("bf16"))


def trace(fn, *args, mode="fake") -> fx.Graph:
    return make_fx(fn, tracing_mode=mode)(*args).graph


def find(graph: fx.Graph, target: Any, number: int = 0) -> fx.Node:
    return [node for node in graph.nodes if node.target is target][number]


@dataclass(frozen=True)
class Edit(GraphPass):
    """A pass whose one candidate is the first operator, and whose rewrite is `edit`."""

    name: ClassVar[str] = "edit"
    answers: ClassVar[frozenset[Axis]] = frozenset()
    stage: ClassVar[Stage] = Stage.JOINT
    precision: ClassVar[Precision] = Precision.FP32

    edit: Any = None

    def candidates(self, graph, context):
        return [Candidate(next(node.name for node in graph.nodes if node.op == "call_function"))]

    def rewrite(self, graph, node, context):
        self.edit(graph)


def everything(graph: fx.Graph) -> list[Any]:
    """Names, calls and meta of all nodes, and which objects hold the values."""
    return [
        (
            n.name,
            n.op,
            n.target,
            str(n.args),
            str(n.kwargs),
            {k: id(v) if k == "val" else repr(v) for k, v in n.meta.items()},
        )
        for n in graph.nodes
    ]


def undone(graph: fx.Graph, edit, rule: str, *words: str) -> None:
    """`edit` breaks `rule`: the report says so, with `words`, and the graph is what it was to the last bit."""
    before = everything(graph)
    report = run_pass(Edit(edit=edit), graph, CONTEXT)
    assert report.error.startswith(f"InvariantError: {rule}: "), report.error or "not found"
    for word in words:
        assert re.search(word, report.error), report.error
    assert everything(graph) == before
    assert (report.matched, report.rewritten, report.changed) == (1, 0, False)
    graph.lint()


def kept(graph: fx.Graph, edit) -> None:
    report = run_pass(Edit(edit=edit), graph, CONTEXT)
    assert (report.error, report.rewritten) == ("", 1)
    graph.lint()


def replace_with(node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    with node.graph.inserting_before(node):
        new = node.graph.call_function(target, args, kwargs)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
    return new


def set_output(graph: fx.Graph, index: int, value: Any) -> None:
    output = graph.output_node()
    leaves = list(effects.outputs(graph))
    leaves[index] = value
    output.args = (tuple(leaves) if len(leaves) > 1 else leaves[0],)


def after(node: fx.Node, target: Any, *args: Any) -> fx.Node:
    with node.graph.inserting_after(node):
        return node.graph.call_function(target, args)


# -- form, inputs, operators, values ----------------------------------------------------------------------------------


def test_a_value_computed_from_what_keeps_effects_in_order_is_undone():
    from torch._higher_order_ops.effects import with_effects

    graph = fx.Graph()
    x = graph.placeholder("x")
    token = graph.call_function(torch.ops.prims._make_token.default)
    check = torch.ops.aten._assert_async.msg
    done = graph.call_function(with_effects, (token, check, x, "not true"))
    last = graph.call_function(operator.getitem, (done, 0))
    graph.call_function(torch.ops.prims._sink_tokens.default, ([last],))
    graph.output((x,))

    def scaled(token: fx.Node) -> None:
        scaled = after(token, torch.ops.aten.mul.Tensor, token, 1.0)
        token.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)

    for position in (1, 3):
        undone(graph, lambda graph, n=position: scaled(list(graph.nodes)[n]), "mutation", "mul", "effects in order")


@pytest.fixture
def plain() -> fx.Graph:
    return trace(lambda x, y: torch.relu(x).matmul(y), torch.randn(4, 8), torch.randn(8, 8))


def test_a_graph_in_the_wrong_order_is_undone(plain):
    def edit(graph):
        find(graph, aten.mm.default).append(find(graph, aten.relu.default))

    undone(plain, edit, "lint", "graph", "Argument 'relu' of Node 'mm' was used before")


def test_an_input_that_is_gone_or_new_is_undone(plain):
    def renamed(graph):
        first = next(iter(graph.nodes))
        with graph.inserting_before(first):
            first.replace_all_uses_with(graph.placeholder("other"))
        graph.erase_node(first)

    undone(plain, renamed, "inputs", "x_1, y_1 became other, y_1")

    def added(graph):
        with graph.inserting_before(next(iter(graph.nodes))):
            graph.placeholder("more")

    undone(plain, added, "inputs", "more")


def test_an_operator_that_is_decomposed_by_then_is_undone(plain):
    undone(
        plain,
        lambda g: replace_with(find(g, aten.relu.default), aten.clamp.default, next(iter(g.nodes)), 0, None),
        "lowering",
        r"clamp_default: aten\.clamp\.default is decomposed",
    )


def doubled(x):
    return x * 2


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (torch.sin, r"sin is no operator that Inductor compiles; .*such as torch\.ops\.aten\.sin\.default"),
        (torch.nn.functional.silu, "silu: silu is no operator"),
        (doubled, "doubled: doubled is no operator"),
        (lambda x: x * 2, "<lambda> is no operator"),
        (aten.clamp, r"clamp: aten\.clamp is no operator"),
    ],
    ids=["torch function", "functional", "function", "lambda", "packet without a lowering"],
)
def test_a_new_call_of_what_is_no_operator_is_undone(plain, target, words):
    undone(
        plain,
        lambda g: replace_with(find(g, aten.relu.default), target, next(iter(g.nodes))),
        "lowering",
        words,
    )


def test_a_new_call_of_a_method_or_module_is_undone(plain):
    def method(graph):
        relu = find(graph, aten.relu.default)
        with graph.inserting_before(relu):
            relu.replace_all_uses_with(graph.call_method("relu", relu.args))

    def module(graph):
        relu = find(graph, aten.relu.default)
        graph.owning_module.add_module("act", torch.nn.ReLU())
        with graph.inserting_before(relu):
            relu.replace_all_uses_with(graph.call_module("act", relu.args))

    undone(plain, method, "lowering", r"relu_1: Inductor does not compile a call_method \(relu\); write graph\.call_f")
    undone(plain, module, "lowering", r"act: Inductor does not compile a call_module \(act\)")
    assert not hasattr(plain.owning_module, "act")


def test_calls_that_are_no_operators_are_let_through_where_they_were_before():
    graph = fx.symbolic_trace(lambda x: torch.sin(x).relu() + 1).graph

    def again(graph):
        relu = next(n for n in graph.nodes if n.op == "call_method")
        with graph.inserting_before(relu):
            new = graph.call_method("relu", (graph.call_function(torch.sin, relu.args[0].args),))
            new = graph.call_function(aten.neg.default, (new,))
        relu.replace_all_uses_with(new)

    kept(graph, again)


@pytest.mark.parametrize(
    "target",
    [aten.sin, aten.mm.default, torch.ops.higher_order.cond, operator.getitem, operator.mul, math.floor, torch.sym_max],
    ids=lambda target: getattr(target, "__name__", str(target)),
)
def test_operators_their_packets_and_arithmetic_on_sizes_are_what_inductor_compiles(target):
    assert lowers(target)


def test_a_constant_that_the_pass_itself_writes_to_is_an_error():
    graph = trace(lambda x: torch.sin(x) + torch.tensor([1.0, 2.0]), torch.randn(2))
    name = next(n.target for n in graph.nodes if n.op == "get_attr")

    def zeroed(graph):
        getattr(graph.owning_module, name).zero_()
        replace_with(find(graph, aten.sin.default), aten.cos.default, next(iter(graph.nodes)))

    undone(graph, zeroed, "constants", f"{name}: the pass changed the constant {name} in place")


def test_a_call_that_the_values_do_not_admit_is_undone(plain):
    undone(
        plain,
        lambda g: replace_with(find(g, aten.mm.default), aten.mm.default, *[next(iter(g.nodes))] * 2),
        "values",
        r"mm_default: aten\.mm\.default cannot be evaluated",
    )


def test_a_value_is_recomputed_and_not_taken_from_the_pass(plain):
    def lies(graph):
        new = replace_with(find(graph, aten.relu.default), aten.clamp_min.default, next(iter(graph.nodes)), 0)
        new.meta["val"] = torch.empty(3)
        find(graph, aten.mm.default).meta["val"] = torch.empty(5)

    kept(plain, lies)
    assert find(plain, aten.clamp_min.default).meta["val"].shape == (4, 8)
    assert find(plain, aten.mm.default).meta["val"].shape == (4, 8)


# -- outputs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g, n: (torch.ops.prims.convert_element_type.default, n, torch.bfloat16), "dtype torch.float32 became"),
        (lambda g, n: (aten.sum.dim_IntList, n, [0]), r"shape \(4, 8\) became \(8,\)"),
        (
            lambda g, n: (aten.clone.default, after(n, aten.permute.default, n, [1, 0])),
            r"shape \(4, 8\) became \(8, 4\)",
        ),
    ],
    ids=["dtype", "shape", "transposed"],
)
def test_an_output_of_another_form_is_undone(plain, change, message):
    def edit(graph):
        node = find(graph, aten.mm.default)
        target, *args = change(graph, node)
        set_output(graph, 0, after(args[0], target, *args))

    undone(plain, edit, "outputs", r"output 0 \(\w+\): ", message)


def test_a_dropped_stride_of_an_output_is_undone():
    graph = trace(lambda x: torch.relu(x.t()), torch.randn(4, 8))

    def dense(graph):
        node = find(graph, aten.relu.default)
        copied = after(node, aten.clone.default, node)
        copied.kwargs = {"memory_format": torch.contiguous_format}
        set_output(graph, 0, copied)

    undone(graph, dense, "outputs", "output 0", r"stride \(1, 8\) became \(4, 1\)")


def test_the_number_and_the_kind_of_outputs_are_kept():
    graph = trace(lambda x: (torch.relu(x), None, 3), torch.randn(4))
    undone(graph, lambda g: set_output(g, 1, find(g, aten.relu.default)), "outputs", "output 1: None became relu")
    undone(graph, lambda g: set_output(g, 0, None), "outputs", "output 0: relu became None")
    undone(graph, lambda g: set_output(g, 2, 4), "outputs", "output 2: 3 became 4")

    def shorter(graph):
        graph.output_node().args = (effects.outputs(graph)[0],)

    undone(graph, shorter, "outputs", "3 outputs became 1")


# -- aliasing ---------------------------------------------------------------------------------------------------------


def test_a_clone_in_place_of_a_view_of_an_input_is_undone():
    graph = trace(lambda x: (torch.relu(x), x.view(8, 4)[1:]), torch.randn(4, 8))

    def cloned(graph):
        view = effects.outputs(graph)[1]
        set_output(graph, 1, after(view, aten.clone.default, view))

    undone(graph, cloned, "aliasing", r"output 1 \(clone_default\)", "it was a view of x_1, and is memory of its own")


def test_a_view_in_place_of_a_copy_is_undone():
    graph = trace(lambda x: (torch.relu(x), x.clone()), torch.randn(4, 8))
    undone(
        graph,
        lambda g: replace_with(find(g, aten.clone.default), aten.alias.default, next(iter(g.nodes))),
        "aliasing",
        r"output 1 \(alias_default\): it was memory of its own, and is a view of x_1",
    )
    undone(graph, lambda g: set_output(g, 1, next(iter(g.nodes))), "aliasing", "is a view of x_1")


def test_a_view_of_another_input_is_undone():
    graph = trace(lambda x, y: (torch.relu(x), y[0]), torch.randn(4, 8), torch.randn(4, 8))
    undone(
        graph,
        lambda g: setattr(find(g, aten.select.int), "args", (next(iter(g.nodes)), 0, 0)),
        "aliasing",
        "it was a view of y_1, and is a view of x_1",
    )


def test_another_part_of_the_same_input_is_undone():
    graph = trace(lambda x: (torch.relu(x), x[0]), torch.randn(4, 8))
    undone(
        graph,
        lambda g: setattr(find(g, aten.select.int), "args", (next(iter(g.nodes)), 0, 2)),
        "aliasing",
        "its offset in shared memory, 0, became 16",
    )


@pytest.mark.parametrize("parts", [False, True], ids=["views", "results of a split"])
def test_outputs_that_share_memory_go_on_doing_so(parts):
    def shared(x):
        y = torch.relu(x)
        return torch.split(y, 2) if parts else (y, y.view(8, 4))

    graph = trace(shared, torch.randn(4, 8))

    def apart(graph):
        last = effects.outputs(graph)[1]
        set_output(graph, 1, after(last, aten.clone.default, last))

    undone(graph, apart, "aliasing", r"output 1 \(clone_default\): it shared memory with output 0, and no longer does")


def test_equal_outputs_do_not_become_one():
    graph = trace(lambda x: (torch.relu(x), torch.relu(x)), torch.randn(4, 8))

    def merged(graph):
        first, second = (find(graph, aten.relu.default, i) for i in (0, 1))
        second.replace_all_uses_with(first)

    undone(graph, merged, "aliasing", "output 1.*it had memory of its own, and now shares it with output 0")


def test_a_reshape_that_copies_is_no_view():
    """reshape is annotated as a view, and is one only where strides allow it."""

    def fn(x):
        return torch.relu(x), x.t().clone(memory_format=torch.contiguous_format).view(-1)

    graph = trace(fn, torch.randn(4, 8))

    def reshaped(graph):
        view = effects.outputs(graph)[1]
        transposed = view.args[0].args[0]
        replace_with(view, aten.reshape.default, transposed, [-1])

    kept(graph, reshaped)
    flat = trace(lambda x: (torch.relu(x), x.clone().view(-1)), torch.randn(4, 8))
    undone(
        flat,
        lambda g: replace_with(effects.outputs(g)[1], aten.reshape.default, next(iter(g.nodes)), [-1]),
        "aliasing",
        "is a view of x_1",
    )


# -- writes -----------------------------------------------------------------------------------------------------------


def two_writes(x, y):
    a, b = x + 1, y * 2
    x.copy_(a)
    y.copy_(b)
    return torch.relu(b)


@pytest.fixture
def writing() -> fx.Graph:
    return trace(two_writes, torch.randn(4, 8), torch.randn(4, 8))


def test_a_deleted_write_is_undone(writing):
    undone(
        writing,
        lambda g: g.erase_node(find(g, aten.copy_.default)),
        "mutation",
        "copy_: ",
        "2 nodes became 1, and number 0 was aten.copy_.default on x_1, and is aten.copy_.default on y_1",
    )


def test_exchanged_writes_are_undone(writing):
    def exchanged(graph):
        first, second = (find(graph, aten.copy_.default, i) for i in (0, 1))
        second.append(first)

    undone(writing, exchanged, "mutation", "copy__1", "was aten.copy_.default on x_1, and is aten.copy_.default on y_1")


def test_a_write_to_something_else_is_undone(writing):
    def elsewhere(graph):
        copy, value = find(graph, aten.copy_.default), find(graph, aten.add.Tensor)
        copy.args = (value, value)

    undone(writing, elsewhere, "mutation", "on x_1, and is aten.copy_.default on #0")


def test_a_write_through_a_view_counts_as_one_to_the_input(writing):
    def through(graph):
        copy = find(graph, aten.copy_.default)
        with graph.inserting_before(copy):
            view = graph.call_function(aten.alias.default, (copy.args[0],))
        copy.args = (view, copy.args[1])

    kept(writing, through)


def test_a_new_write_is_undone(plain):
    undone(
        plain,
        lambda g: replace_with(find(g, aten.relu.default), aten.relu_.default, next(iter(g.nodes))),
        "mutation",
        "relu__default",
        "0 nodes became 1",
    )


@pytest.mark.parametrize("anew", [False, True], ids=["moved", "written anew"])
def test_a_read_moved_across_a_write_is_undone(anew):
    def fn(x):
        y = torch.relu(x)
        x.copy_(y * 2)
        return y + 1

    graph = trace(lambda x: (fn(x), torch.sigmoid(x)), torch.randn(4, 8))

    def late(graph):
        """relu is only needed by then, for the sum is given its own."""
        copy, relu, add = (find(graph, t) for t in (aten.copy_.default, aten.relu.default, aten.add.Tensor))
        if anew:
            with graph.inserting_after(copy):
                again = graph.call_function(aten.relu.default, relu.args)
            add.replace_input_with(relu, again)
        else:
            find(graph, aten.sigmoid.default).append(add)
            value = find(graph, aten.mul.Tensor)
            value.args = (value.args[0].args[0], 2)
            copy.append(relu)

    undone(graph, late, "mutation", "x_1 after 0 writes", "after (0 writes and )?1 write( |$)")


def test_a_read_moved_before_a_write_is_undone():
    def fn(x):
        x.copy_(torch.tanh(x))
        return torch.relu(x)

    graph = trace(fn, torch.randn(4, 8))

    def early(graph):
        find(graph, aten.copy_.default).prepend(find(graph, aten.relu.default))

    # What reads the memory by the copy's result cannot come before it; what reads the input can.
    relu = find(graph, aten.relu.default)
    relu.args = (next(iter(graph.nodes)),)
    undone(graph, early, "mutation", "relu", "read x_1 after 1 write to it, and now does after 0 writes")


def test_equal_reads_on_both_sides_of_a_write_do_not_become_one():
    def fn(x):
        old = torch.relu(x)
        x.add_(1)
        return old, torch.relu(x)

    graph = trace(fn, torch.randn(4, 8))
    new = find(graph, aten.relu.default, 1)
    new.args = (next(iter(graph.nodes)),)

    def merged(graph):
        first, second = (find(graph, aten.relu.default, i) for i in (0, 1))
        second.replace_all_uses_with(first)

    undone(graph, merged, "mutation", "output 1", "read x_1 after 1 write")


def test_another_effect_that_is_gone_is_undone():
    graph = trace(lambda x: torch.relu(x), torch.randn(4))
    node = find(graph, aten.relu.default)
    with graph.inserting_before(node):
        graph.call_function(aten._assert_async.msg, (next(iter(graph.nodes)), "why"))
    report = run_pass(
        Edit(edit=lambda g: g.erase_node(find(g, aten._assert_async.msg))),
        graph,
        CONTEXT,
    )
    assert "mutation: _assert_async_msg: " in report.error and "another effect" in report.error
    assert find(graph, aten._assert_async.msg)


# -- random numbers ---------------------------------------------------------------------------------------------------


def two_draws(x):
    return x * torch.rand(4, 8), x + torch.rand(4, 8)


@pytest.fixture
def drawing() -> fx.Graph:
    return trace(two_draws, torch.randn(4, 8))


def test_two_draws_of_the_same_operator_in_another_order_are_undone(drawing):
    def exchanged(graph):
        find(graph, aten.mul.Tensor).prepend(find(graph, aten.rand.default, 1))
        find(graph, aten.mul.Tensor).prepend(find(graph, aten.rand.default, 0))

    undone(drawing, exchanged, "rng", "rand: it drew after rand_1|rand_1: it drew after rand,")


def test_draws_exchanged_between_their_users_are_undone(drawing):
    def exchanged(graph):
        first, second = (find(graph, aten.rand.default, i) for i in (0, 1))
        find(graph, aten.mul.Tensor).prepend(second)
        find(graph, aten.mul.Tensor).replace_input_with(first, second)
        find(graph, aten.add.Tensor).replace_input_with(second, first)

    undone(drawing, exchanged, "rng", "mul: it rested on the random draws rand, and now does on rand_1")


def test_draws_exchanged_by_new_nodes_are_undone(drawing):
    def exchanged(graph):
        x = next(iter(graph.nodes))
        first, second = (find(graph, aten.rand.default, i) for i in (0, 1))
        find(graph, aten.mul.Tensor).prepend(second)
        replace_with(find(graph, aten.mul.Tensor), aten.mul.Tensor, second, x)
        replace_with(find(graph, aten.add.Tensor), aten.add.Tensor, first, x)

    undone(drawing, exchanged, "rng", "output 0: it rested on the random draws rand, and now does on rand_1")


def test_a_draw_more_or_less_is_undone(drawing):
    def reused(graph):
        first, second = (find(graph, aten.rand.default, i) for i in (0, 1))
        second.replace_all_uses_with(first)
        graph.erase_node(second)

    undone(drawing, reused, "rng", "rand_1: .*2 nodes became 1")

    def more(graph):
        with graph.inserting_before(find(graph, aten.rand.default)):
            graph.call_function(aten.rand.default, ([4, 8],))

    undone(drawing, more, "rng", "rand_1: .*2 nodes became 3")


@pytest.mark.parametrize(
    ("target", "name", "args", "kwargs", "message"),
    [
        (aten.bernoulli.p, "bernoulli", lambda n: (n.args[0], 0.25), {}, r"its distribution .*0\.5.* became .*0\.25"),
        (aten.rand.default, "rand", lambda n: ([8],), {}, r"its distribution .*\[4, 8\].* became .*\[8\]"),
        (aten.rand.default, "rand", lambda n: n.args, {"dtype": torch.float64}, "its distribution .* became .*float64"),
    ],
    ids=["probability", "shape", "dtype"],
)
def test_a_draw_from_another_distribution_is_undone(target, name, args, kwargs, message):
    graph = trace(lambda x: (x + 1, torch.ops.aten.bernoulli.p(x, 0.5), torch.rand([4, 8])), torch.randn(4, 8))

    def edit(graph):
        node = find(graph, target)
        node.args, node.kwargs = args(node), {**node.kwargs, **kwargs}

    undone(graph, edit, "rng", f"{name}: ", message)


def test_a_draw_whose_shape_follows_another_tensor_is_undone():
    graph = trace(lambda x: (x + 1, torch.bernoulli(x).sum()), torch.rand(4, 8))

    def fewer(graph):
        draw = find(graph, aten.bernoulli.default)
        with graph.inserting_before(draw):
            part = graph.call_function(aten.select.int, (draw.args[0], 0, 0))
        draw.args = (part,)

    undone(graph, fewer, "rng", r"bernoulli: a random draw: shape \(4, 8\) became \(8,\)")


def test_seeds_that_inductor_has_drawn_together_are_not_exchanged():
    from torch._inductor import inductor_prims as prims

    def fn(x):
        seeds = prims.seeds(2, x.device)
        one, other = (prims.random([4, 8], prims.lookup_seed(seeds, i), "rand") for i in (0, 1))
        return x * one, x + other

    graph = trace(fn, torch.randn(4, 8))

    def exchanged(graph):
        first, second = (find(graph, torch.ops.prims.inductor_lookup_seed.default, i) for i in (0, 1))
        first.args, second.args = (first.args[0], 1), (second.args[0], 0)

    undone(graph, exchanged, "rng", "rested on the random draws inductor_seeds.*seed 0, and now does on .*seed 1")


def test_batching_what_was_drawn_apart_is_right():
    graph = trace(two_draws, torch.randn(4, 8))

    def batched(graph):
        x = next(iter(graph.nodes))
        first, second = (find(graph, aten.rand.default, i) for i in (0, 1))
        mul = find(graph, aten.mul.Tensor)
        mul.prepend(second)
        with graph.inserting_before(mul):
            both = graph.call_function(aten.cat.default, ([first, second],))
            half = graph.call_function(aten.slice.Tensor, (both, 0, 0, 4))
        mul.args = (x, half)

    kept(graph, batched)


# -- provenance -------------------------------------------------------------------------------------------------------


def told(graph: fx.Graph) -> fx.Graph:
    for node in graph.nodes:
        if node.op == "call_function":
            node.meta["stack_trace"] = f"line of {node.name}"
    return graph


def test_stripped_provenance_is_undone(plain):
    def stripped(graph):
        for key in PROVENANCE_META:
            find(graph, aten.mm.default).meta.pop(key, None)
        find(graph, aten.relu.default).args = (
            after(next(iter(graph.nodes)), aten.neg.default, next(iter(graph.nodes))),
        )

    undone(told(plain), stripped, "provenance", "mm: nothing says where it comes from any more")


def test_a_new_node_without_provenance_breaks_the_rule(plain):
    """The manager fills it in; the rule does not rely on that."""
    import copy

    changed = copy.deepcopy(told(plain))
    replace_with(find(changed, aten.relu.default), aten.clamp_min.default, next(iter(changed.nodes)), 0)
    with pytest.raises(invariants.InvariantError, match="provenance: clamp_min_default"):
        invariants.check(plain, changed)
    find(changed, aten.clamp_min.default).meta["stack_trace"] = "here"
    invariants.check(plain, changed)


# -- what must be let through -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Commute(GraphPass):
    """a + b -> b + a, a * b -> b * a: right wherever it is done."""

    name: ClassVar[str] = "commute"
    answers: ClassVar[frozenset[Axis]] = frozenset()
    stage: ClassVar[Stage] = Stage.JOINT
    precision: ClassVar[Precision] = Precision.FP32

    def candidates(self, graph, context):
        for node in graph.nodes:
            if node.target in (aten.add.Tensor, aten.mul.Tensor) and all(isinstance(a, fx.Node) for a in node.args):
                yield Candidate(node.name)

    def rewrite(self, graph, node, context):
        a, b = node.args
        with graph.inserting_before(node):
            new = graph.call_function(node.target, (b, a))
        node.replace_all_uses_with(new)
        graph.erase_node(node)


@dataclass(frozen=True)
class CommuteLate(Commute):
    name: ClassVar[str] = "commute_late"
    stage: ClassVar[Stage] = Stage.POST_GRAD


class Norm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(x + x.abs()) * x


class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x):
        self.seen.add_(x.sum(0) + self.seen)
        return x * self.seen, self.seen


def branches(x):
    chosen = torch.cond(x.sum() > 0, lambda v: v + v.sin(), lambda v: v * v.cos(), (x,))
    return chosen + x, None


def data_dependent(x):
    picked = torch.nonzero(x)
    return picked + picked, x + x.abs()


def views(x):
    a, b = x.split(2)
    return a + b, x.t(), a, (x + x.abs()).view(-1)


def dropped(x):
    return torch.nn.functional.dropout(x + x.abs()) * torch.nn.functional.dropout(x)


def looped(x):
    from torch._higher_order_ops import while_loop

    return while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, v + v.sin()), (torch.tensor(0), x))


def written_to(x):
    y = x + x.abs()
    x.mul_(2)
    return x + y


@pytest.mark.parametrize(
    ("model", "dynamic"),
    [
        pytest.param(Norm(), False, id="batch norm"),
        pytest.param(Counter(), True, id="buffer, dynamic"),
        pytest.param(branches, False, id="cond"),
        pytest.param(branches, True, id="cond, dynamic"),
        pytest.param(data_dependent, False, id="unbacked sizes"),
        pytest.param(views, True, id="views, dynamic"),
        pytest.param(dropped, False, id="dropout"),
        pytest.param(looped, False, id="while_loop"),
        pytest.param(written_to, True, id="written input, dynamic"),
    ],
)
def test_a_right_pass_is_let_through_on_what_inductor_really_hands_over(model, dynamic, fresh_dynamo):
    """Both slots, of a real compilation, and the numbers are the same."""

    def unknown(graph):
        """A user's own pass without a uuid, for which Inductor passes its caches by."""

    slots = [
        SlotPass([Commute()], CONTEXT, Stage.JOINT, unknown),
        SlotPass([CommuteLate()], CONTEXT, Stage.POST_GRAD, unknown),
    ]
    options = {"joint_custom_pre_pass": slots[0], "post_grad_custom_pre_pass": slots[1]}
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    state = {k: v.clone() for k, v in model.state_dict().items()} if isinstance(model, torch.nn.Module) else {}
    with (
        torch.no_grad(),
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
        torch._inductor.config.patch(fallback_random=True),
    ):
        torch.manual_seed(1)
        found = torch.compile(model, options=options, dynamic=dynamic, fullgraph=True)(x.clone())
        if state:
            model.load_state_dict(state)
        torch.manual_seed(1)
        expected = model(x.clone())
    for slot in slots:
        (report,) = slot.reports
        assert (report.error, report.rewritten) == ("", report.matched), report
    assert slots[0].reports[0].matched > 0
    torch.testing.assert_close(found, expected)


def test_a_graph_without_values_is_checked_for_what_can_be_told():
    graph = fx.symbolic_trace(lambda x, y: (torch.ops.aten.relu.default(x), torch.ops.aten.view.default(y, [-1]))).graph
    kept(graph, lambda g: replace_with(find(g, aten.relu.default), aten.clamp_min.default, next(iter(g.nodes)), 0))

    def cloned(graph):
        view = find(graph, aten.view.default)
        set_output(graph, 1, after(view, aten.clone.default, view))

    undone(graph, cloned, "aliasing", "it was a view of y, and is memory of its own")


def test_a_symbolic_size_is_compared_without_fixing_it():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    context = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    x = mode.from_tensor(torch.randn(6, 8), symbolic_context=context)
    with mode:
        graph = make_fx(lambda x: (torch.relu(x), x.shape[0]), tracing_mode="real")(x).graph
    guards = len(env.guards)
    kept(graph, lambda g: replace_with(find(g, aten.relu.default), aten.clamp_min.default, next(iter(g.nodes)), 0))
    undone(
        graph,
        lambda g: set_output(
            g, 0, after(find(g, aten.clamp_min.default), aten.sum.dim_IntList, find(g, aten.clamp_min.default), [1])
        ),
        "outputs",
        r"shape \(s\d+, 8\) became \(s\d+,\)",
    )
    assert len(env.guards) == guards


def test_every_rule_has_a_pass_that_breaks_it():
    import inspect
    import sys

    source = inspect.getsource(sys.modules[__name__])
    assert [rule for rule in RULES if not re.search(rf'undone\([^"]*"{rule}"', source)] == []
