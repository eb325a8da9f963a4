"""What the nodes of a graph do besides computing: the memory that values lie in, what is written, what is drawn.

Aliasing is followed through view operators by the alias annotations of their schemas, so that it is known for graphs
without fake values too.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["Effects", "analyse", "draws", "memory", "writes_to"]

Memory = Mapping[fx.Node, frozenset[str]]

_UNSAFE_VIEW: Any = torch.ops.aten._unsafe_view.default  # shares memory, and its schema does not say so
_GIVEN = ("placeholder", "get_attr")
#: Operators that look at a tensor's sizes, type and device alone.
_SHAPES = frozenset(
    {"sym_size", "sym_stride", "sym_numel", "sym_storage_offset", "empty_like", "zeros_like", "ones_like", "full_like"}
    | {"rand_like", "randn_like", "randint_like"}
)
_LOOKUP_SEED = "inductor_lookup_seed"  # how Inductor takes one of the seeds that it draws all at once


@dataclass(frozen=True)
class Effects:
    """The effects of one graph.

    memory: names of the memory that each node's value lies in: an input's name, "self.x" of an attribute, and the name
        of the node that allocated it for the rest ("node[1]" for one of several results).
    acts: nodes that write to memory or have another side effect, in order; targets: what each of them writes to, where
        memory that is neither an input nor an attribute is "#k", first written by the k-th of `acts`.
    draws: nodes that draw random numbers, in order.
    depends: what a node's value depends on, through any number of nodes: ("draw", k) for the k-th of `draws`,
        ("seed", i) for one of Inductor's seeds, and ("read", memory, n) for memory that the graph writes to, as it was
        after n of these writes. The output node has an entry for each of the values returned.
    """

    memory: Memory
    acts: list[fx.Node]
    targets: list[frozenset[str]]
    draws: list[fx.Node]
    depends: Mapping[fx.Node, frozenset[tuple[Any, ...]]]
    returned: list[frozenset[tuple[Any, ...]]]


def analyse(graph: fx.Graph) -> Effects:
    """The effects of `graph`, which is not changed."""
    where = memory(graph)
    given = {f"self.{n.target}" if n.op == "get_attr" else n.name for n in graph.nodes if n.op in _GIVEN}
    acts: list[fx.Node] = []
    targets: list[frozenset[str]] = []
    names: dict[str, str] = {}  # of memory that the graph writes to: the same in two graphs that do the same
    for node in graph.nodes:
        if node.op != "call_function" or not _acts(node):
            continue
        written = frozenset().union(*(where[argument] for argument in writes_to(node)))
        for place in written:
            names.setdefault(place, place if place in given else f"#{len(acts)}")
        acts.append(node)
        targets.append(frozenset(names[place] for place in written))
    drawing = [node for node in graph.nodes if node.op == "call_function" and draws(node)]
    depends, returned = _dependence(graph, where, dict(zip(acts, targets, strict=True)), names, drawing)
    return Effects(where, acts, targets, drawing, depends, returned)


def memory(graph: fx.Graph) -> Memory:
    """The memory that each node's value lies in; see `Effects`."""
    found: dict[fx.Node, frozenset[str]] = {}
    parts: dict[fx.Node, list[frozenset[str]]] = {}  # of operators that return several tensors
    for node in graph.nodes:
        if node.op == "get_attr":
            found[node] = frozenset({f"self.{node.target}"})
        elif node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            source, index = node.args
            several = parts.get(source)
            if several is not None and isinstance(index, int) and index < len(several):
                found[node] = several[index]
            elif found[source] == {source.name}:  # a fresh list: each of its tensors is memory of its own
                found[node] = frozenset({f"{source.name}[{index}]"})
            else:
                found[node] = found[source]
        else:
            results = _results(node, found)
            if len(results) > 1:
                parts[node] = [r or frozenset({f"{node.name}[{i}]"}) for i, r in enumerate(results)]
            found[node] = frozenset().union(*results) or frozenset({node.name})
    return found


def _results(node: fx.Node, found: Memory) -> list[frozenset[str]]:
    """For each result of an operator the memory of the arguments that it is a view of; empty for fresh memory."""
    if node.target is _UNSAFE_VIEW:
        return [found[node.all_input_nodes[0]]]
    schema = getattr(node.target, "_schema", None)
    if schema is None or node.op != "call_function":
        return [frozenset()]
    results = []
    for result in schema.returns:
        alias = result.alias_info
        places: frozenset[str] = frozenset()
        for argument, value in _bound(node, schema):
            info = argument.alias_info
            # A list of views ("Tensor(a)[]") does not name the set that its tensors belong to.
            if alias is None or info is None or (alias.before_set and not alias.before_set & info.before_set):
                continue
            for source in _nodes(value):
                if not _copied(node, source):
                    places |= found[source]
        results.append(places)
    return results or [frozenset()]


def _copied(node: fx.Node, source: fx.Node) -> bool | None:
    """Whether an operator that copies only where it must (reshape, contiguous, to) has copied; None without values."""
    target: Any = node.target
    if not target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return False
    new, old = node.meta.get("val"), source.meta.get("val")
    if not isinstance(new, torch.Tensor) or not isinstance(old, torch.Tensor):
        return None
    return StorageWeakRef(new.untyped_storage()) != StorageWeakRef(old.untyped_storage())


def writes_to(node: fx.Node) -> list[fx.Node]:
    """The arguments of `node` that it writes to."""
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return [
            source
            for argument, value in _bound(node, schema)
            if argument.alias_info is not None and argument.alias_info.is_write
            for source in _nodes(value)
        ]
    # Which of its tensors a user's kernel writes to, only its source says.
    return node.all_input_nodes if "mutation" in str(node.target) else []


def is_token(node: fx.Node) -> bool:
    """Whether the value of `node` only keeps effects in order: a tensor to look at, but without numbers."""
    if node.target is operator.getitem:
        source, index = node.args
        return isinstance(source, fx.Node) and str(source.target) == "with_effects" and bool(index == 0)
    return str(node.target) == "prims._make_token.default"


def draws(node: fx.Node) -> bool:
    """Whether `node` draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    for argument, value in _bound(node, node.target._schema):  # type: ignore[union-attr]
        if argument.name == "dropout_p":  # attention is tagged for its dropout alone
            return bool(value != 0)
    return True


def _acts(node: fx.Node) -> bool:
    return bool(writes_to(node)) or node.is_impure(impure_random=False)


def _is_view(node: fx.Node, where: Memory) -> bool:
    """Whether `node` only looks at memory in another way, or takes one of several results, without reading a byte."""
    if node.target is operator.getitem:
        return True
    if node.op != "call_function" or writes_to(node):
        return False
    sources = frozenset().union(*(where[source] for source in node.all_input_nodes))
    return where[node] <= sources and all(_copied(node, source) is False for source in node.all_input_nodes)


def _dependence(
    graph: fx.Graph,
    where: Memory,
    acts: Mapping[fx.Node, frozenset[str]],
    names: Mapping[str, str],
    drawing: list[fx.Node],
) -> tuple[dict[fx.Node, frozenset[tuple[Any, ...]]], list[frozenset[tuple[Any, ...]]]]:
    leaves = outputs(graph)
    if not acts and not drawing:
        nothing: frozenset[tuple[Any, ...]] = frozenset()
        return dict.fromkeys(graph.nodes, nothing), [nothing] * len(leaves)
    number = {node: k for k, node in enumerate(drawing)}
    writes = dict.fromkeys(names.values(), 0)
    depends: dict[fx.Node, frozenset[tuple[Any, ...]]] = {}

    def read(source: fx.Node) -> frozenset[tuple[Any, ...]]:
        places = (names[place] for place in where[source] if place in names)
        return depends[source] | {("read", place, writes[place]) for place in places}

    for node in graph.nodes:
        if node.op == "output":
            break
        if _name(node) in _SHAPES:
            found: frozenset[tuple[Any, ...]] = frozenset()
        elif _is_view(node, where):
            found = frozenset().union(*(depends[source] for source in node.all_input_nodes))
        else:
            found = frozenset().union(*(read(source) for source in node.all_input_nodes))
        if node in number:
            found |= {("draw", number[node])}
        elif _name(node) == _LOOKUP_SEED:
            found |= {("seed", node.args[1])}
        depends[node] = found
        for place in acts.get(node, ()):
            writes[place] += 1
    return depends, [read(leaf) if isinstance(leaf, fx.Node) else frozenset() for leaf in leaves]


def _name(node: fx.Node) -> str:
    """The operator's name, without its namespace and overload."""
    return str(getattr(getattr(node.target, "overloadpacket", None), "__name__", ""))


def outputs(graph: fx.Graph) -> list[Any]:
    """What the graph returns, flat: nodes, and constants such as None."""
    return torch.utils._pytree.tree_leaves(graph.output_node().args)


def _bound(node: fx.Node, schema: Any) -> Iterator[tuple[Any, Any]]:
    """(argument of the schema, its value) of a call, defaults included."""
    position = 0
    for argument in schema.arguments:
        if not argument.kwarg_only and position < len(node.args):
            yield argument, node.args[position]
        else:
            yield argument, node.kwargs.get(argument.name, argument.default_value)
        position += not argument.kwarg_only


def _nodes(value: Any) -> list[fx.Node]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, fx.Node)]
