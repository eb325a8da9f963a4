"""What is read off a graph about memory, writes and random draws is what happens when the graph runs."""

from __future__ import annotations

import copy
from operator import getitem
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from fxopt import effects, invariants

aten = torch.ops.aten
SIZE = 3  # every value is SIZE x SIZE, so that any operator takes any value

VIEWS = [
    (aten.alias.default, ()),
    (aten.t.default, ()),
    (aten.permute.default, ([1, 0],)),
    (aten.view.default, ([SIZE, SIZE],)),
    (aten.reshape.default, ([SIZE, SIZE],)),
    (aten.contiguous.default, ()),
    (aten.expand.default, ([SIZE, SIZE],)),
    (aten.as_strided.default, ([SIZE, SIZE], [SIZE, 1])),
    (aten._unsafe_view.default, ([SIZE, SIZE],)),
    (torch.ops.prims.view_of.default, ()),
]
FRESH = [
    (aten.sin.default, ()),
    (aten.clone.default, ()),
    (aten.view_copy.default, ([SIZE, SIZE],)),
    (torch.ops.prims.convert_element_type.default, (torch.float32,)),
]


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SIZE, SIZE, generator=generator) for _ in range(2)]


class Recording(fx.Interpreter):
    """Keeps every value that a graph computes."""

    def run_node(self, n: fx.Node) -> Any:
        self.values = getattr(self, "values", {})
        self.values[n] = value = super().run_node(n)
        return value


def executed(graph: fx.Graph) -> tuple[dict[fx.Node, Any], list[torch.Tensor], Any]:
    """Values by node, the inputs after the run, and the output; the random state is the same each time."""
    inputs = tensors()
    interpreter = Recording(fx.GraphModule({}, graph), graph=graph)
    torch.manual_seed(0)
    output = interpreter.run(*inputs)
    return interpreter.values, inputs, output


@st.composite
def graphs(draw: Any, writes: bool = True) -> fx.Graph:
    """Views, copies, writes, splits and random draws over two inputs, in any order."""
    graph = fx.Graph()
    values = [graph.placeholder(name) for name in ("x", "y")]
    kinds = ["view", "fresh", "add", "split", "draw", "draw"] + ["write", "copy", "write"] * writes
    for kind in draw(st.lists(st.sampled_from(kinds), min_size=3, max_size=12)):
        a, b = (draw(st.sampled_from(values)) for _ in range(2))
        if kind in ("view", "fresh"):
            target, arguments = draw(st.sampled_from(VIEWS if kind == "view" else FRESH))
            if target in (aten.view.default, aten._unsafe_view.default):
                # Of a dense value; a transposed one has no such view.
                a = graph.call_function(aten.clone.default, (a,), {"memory_format": torch.contiguous_format})
            values.append(graph.call_function(target, (a, *arguments)))
        elif kind == "add":
            values.append(graph.call_function(aten.add.Tensor, (a, b)))
        elif kind == "draw":
            values.append(graph.call_function(aten.rand_like.default, (a,)))
        elif kind == "write":
            values.append(graph.call_function(aten.mul_.Tensor, (a, 1.5)))
        elif kind == "copy":
            fresh = graph.call_function(aten.sin.default, (b,))  # torch refuses to copy what overlaps
            values.append(graph.call_function(aten.copy_.default, (a, fresh)))
        else:
            both = graph.call_function(aten.stack.default, ([a, b],))
            source = draw(st.sampled_from([both, a]))
            if source is both:
                parts = graph.call_function(aten.unbind.int, (both,))
                values.append(graph.call_function(getitem, (parts, 1)))
            else:
                found = graph.call_function(aten.max.dim, (a, 1, True))
                values.append(graph.call_function(aten.add.Tensor, (graph.call_function(getitem, (found, 0)), b)))
    graph.output(tuple(values[-3:]))
    return graph


def with_values(graph: fx.Graph) -> fx.Graph:
    for node, value in executed(graph)[0].items():
        node.meta["val"] = value
    return graph


settings.register_profile("effects", deadline=None, suppress_health_check=[HealthCheck.too_slow])
LONG = settings(settings.get_profile("effects"), max_examples=200)


@LONG
@given(graph=graphs(writes=False))
def test_values_share_memory_where_the_graph_says_so_and_only_there(graph):
    where = effects.memory(with_values(graph))
    values, _, _ = executed(graph)
    leaves = [node for node in graph.nodes if isinstance(values.get(node), torch.Tensor) and node.op != "output"]
    for a in leaves:
        for b in leaves:
            really = StorageWeakRef(values[a].untyped_storage()) == StorageWeakRef(values[b].untyped_storage())
            assert bool(where[a] & where[b]) == really, (a, b, where[a], where[b])


@LONG
@given(graph=graphs(), data=st.data())
def test_moving_a_node_to_where_it_computes_something_else_is_found(graph, data):
    moved = copy.deepcopy(graph)
    nodes = [n for n in moved.nodes if n.op == "call_function"]
    node = data.draw(st.sampled_from(nodes))
    place = data.draw(st.sampled_from(nodes))
    assume(node is not place)
    place.append(node)
    try:
        moved.lint()
    except RuntimeError:  # before what it needs, or after what needs it
        assume(False)
    before, after = executed(graph), executed(moved)
    differs = [not torch.equal(a, b) for a, b in zip([*before[1], *before[2]], [*after[1], *after[2]], strict=True)]
    if any(differs):
        with pytest.raises(invariants.InvariantError, match=r"^(mutation|rng): "):
            invariants.check(graph, moved)


@LONG
@given(graph=graphs())
def test_a_copy_of_a_graph_breaks_no_rule(graph):
    invariants.check(graph, copy.deepcopy(graph))
    effects_of = effects.analyse(graph)
    assert len(effects_of.acts) == sum(n.target in (aten.mul_.Tensor, aten.copy_.default) for n in graph.nodes)
    assert len(effects_of.draws) == sum(n.target is aten.rand_like.default for n in graph.nodes)


def test_an_operator_that_returns_several_views_and_fresh_results_is_followed_by_result():
    graph = fx.Graph()
    x, out, more = (graph.placeholder(name) for name in ("x", "out", "more"))
    found = graph.call_function(aten.max.dim_max, (x, 0), {"max": out, "max_values": more})
    first, second = (graph.call_function(getitem, (found, i)) for i in (0, 1))
    both = graph.call_function(aten.max.dim, (x, 0))
    third, fourth = (graph.call_function(getitem, (both, i)) for i in (0, 1))
    graph.output((first, second, third, fourth))
    where = effects.memory(graph)
    assert [where[n] for n in (first, second)] == [{"out"}, {"more"}]
    assert [where[n] for n in (third, fourth)] == [{"max_dim[0]"}, {"max_dim[1]"}]
    assert effects.writes_to(found) == [out, more]


def test_a_list_of_tensors_that_is_written_to_is_written_to_in_each():
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    graph.call_function(aten._foreach_add_.Scalar, ([x, y], 1.0))
    graph.output((x,))
    assert effects.analyse(graph).targets == [{"x", "y"}]


@pytest.mark.parametrize("operator", [aten.rand_like.default, aten.zeros_like.default], ids=str)
def test_an_operator_that_looks_at_a_tensors_form_alone_may_cross_a_write(operator):
    graph = fx.Graph()
    x = graph.placeholder("x")
    like = graph.call_function(operator, (x,))
    write = graph.call_function(aten.mul_.Tensor, (x, 1.5))
    graph.output((like, write))
    moved = copy.deepcopy(graph)
    like, write = (n for n in moved.nodes if n.op == "call_function")
    write.append(like)
    invariants.check(graph, moved)


def test_without_values_an_operator_that_may_copy_counts_as_both_a_view_and_a_read():
    graph = fx.Graph()
    x = graph.placeholder("x")
    flat = graph.call_function(aten.reshape.default, (x, [9]))
    write = graph.call_function(aten.mul_.Tensor, (x, 1.5))
    graph.output((flat, write))
    assert effects.memory(graph)[flat] == {"x"}
    moved = copy.deepcopy(graph)
    flat, write = (n for n in moved.nodes if n.op == "call_function")
    write.append(flat)
    with pytest.raises(invariants.InvariantError, match="mutation: reshape_default: it read x after 0 writes"):
        invariants.check(graph, moved)
