"""Casts to bf16 in a graph: one a value, none where the value is bf16 already, and made before a value is stored.

A cast is no work by itself, for Inductor fuses it into what stands beside it; what counts is the type in which a value
goes through memory between two kernels. Rounding keeps the order of numbers, so a cast commutes exactly with operators
that only rearrange or choose among them, and can move in front of those that make Inductor store their operand.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from passes.views import VIEWS

aten = torch.ops.aten
CAST = torch.ops.prims.convert_element_type.default

#: operators that only rearrange one tensor (operand 0), so that a cast commutes with them exactly
REARRANGING: frozenset[Any] = VIEWS | {aten.clone.default}
SPLITS: frozenset[Any] = frozenset(
    {aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.chunk.default}
)
#: names of operators that choose among the elements of operand 0 by their order, and give (values, indices); by name,
#: since Inductor makes the second one known when it is first imported
_POOLS = frozenset({"aten.max_pool2d_with_indices.default", "prims._low_memory_max_pool_with_offsets.default"})
#: operators in front of which a cast may move, for it rounds no more elements there than behind them; pools as well
_MOVABLE = {aten.relu.default} | REARRANGING - {aten.slice.Tensor, aten.select.int}


def dtype_of(node: Any) -> torch.dtype | None:
    """The element type of a node's tensor; None for what is no tensor, or has no value yet."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.dtype if isinstance(value, torch.Tensor) else None


def narrow(graph: fx.Graph, value: Any) -> fx.Node:
    """`value` in bf16: its bf16 origin seen through the same views where there is one, else a cast (one a value)."""
    for found in (_origin(graph, value), _narrowed(graph, value)):
        if found is not None:
            return found
    return graph.call_function(CAST, (value, torch.bfloat16))


def _narrowed(graph: fx.Graph, value: Any) -> fx.Node | None:
    """The cast that is there already, of `value` or of what it is a view of: a gradient is transposed for one of the
    two products that read it, and a weight for the backward.
    """
    for user in value.users:
        if _is_narrowing(user) and _comes_before(user, graph):
            return user
    if value.target in VIEWS and isinstance(value.args[0], fx.Node):
        source = _narrowed(graph, value.args[0])
        if source is not None:
            return graph.call_function(value.target, (source, *value.args[1:]), value.kwargs)
    return None


def narrow_mask(graph: fx.Graph, value: Any) -> fx.Node:
    """`value` in bf16, finite numbers kept finite: float32's least would become -inf, and a row of those is NaN."""
    if value.meta["val"].dim() < 2 and value.op in ("placeholder", "get_attr"):
        return narrow(graph, value)  # a bias
    bound = torch.finfo(torch.bfloat16).max
    for low in value.users:  # one clamp a mask, whatever the number of layers that add it
        if low.target is not aten.clamp_min.default or low.args[1] != -bound:
            continue
        for chosen in (user for high in low.users for user in high.users):
            for cast in chosen.users:
                if chosen.target is aten.where.self and cast.target is CAST and _comes_before(cast, graph):
                    return cast
    # Not aten.clamp: Inductor decomposes that before the joint graph, and has no lowering for one that comes later.
    clamped = graph.call_function(aten.clamp_min.default, (value, -bound))
    clamped = graph.call_function(aten.clamp_max.default, (clamped, bound))
    finite = graph.call_function(aten.where.self, (graph.call_function(aten.isinf.default, (value,)), value, clamped))
    return graph.call_function(CAST, (finite, torch.bfloat16))


def move_before_pools(graph: fx.Graph) -> None:
    """Move each cast to bf16 in front of the pools whose result it rounds: they then read what is stored in bf16.

    A pool stays in fp32 where somebody else wants its result in fp32.
    """
    for cast in [node for node in graph.nodes if _is_narrowing(node)]:
        chain = _chain(cast)
        while chain and not _is_pool(chain[-1]):
            chain.pop()
        if not chain:
            continue
        with graph.inserting_before(cast):
            value: Any = narrow(graph, chain[-1].args[0])
            for node in reversed(chain):
                value = graph.call_function(node.target, (value, *node.args[1:]), dict(node.kwargs))
                if _is_pool(node):
                    value = graph.call_function(operator.getitem, (value, 0))
        cast.replace_all_uses_with(value)
        graph.erase_node(cast)


def _chain(cast: fx.Node) -> list[Any]:
    """The operators that a cast may move in front of, from the nearest on; nobody else reads their results."""
    found: list[Any] = []
    value: Any = cast.args[0]
    while isinstance(value, fx.Node) and len(value.users) == 1:
        if value.target is operator.getitem and value.args[1] == 0:
            values, value = value, value.args[0]
            if not _is_pool(value) or any(user.users for user in value.users if user is not values):
                break
        elif value.target not in _MOVABLE:
            break
        found.append(value)
        value = value.args[0]
    return found


def _is_pool(node: fx.Node) -> bool:
    return str(node.target) in _POOLS


def _is_narrowing(node: fx.Node) -> bool:
    return node.target is CAST and node.args[1] == torch.bfloat16


def _comes_before(node: fx.Node, graph: fx.Graph) -> bool:
    """Whether `node` is already computed at the insertion point."""
    point = getattr(graph._insert, "__self__", None)
    return point is not None and node < point


def _origin(graph: fx.Graph, value: Any) -> Any:
    """The bf16 tensor that `value` merely widens and views, viewed the same way; None if it is computed in fp32."""
    if value.target is CAST and value.args[1] == torch.float32:
        source = value.args[0]
        # A product of the pass that widens its result has no value yet.
        narrow = isinstance(source, fx.Node) and ("val" not in source.meta or dtype_of(source) == torch.bfloat16)
        return source if narrow else None
    if value.target in REARRANGING and isinstance(value.args[0], fx.Node):
        source = _origin(graph, value.args[0])
        return None if source is None else graph.call_function(value.target, (source, *value.args[1:]), value.kwargs)
    if value.target is operator.getitem and getattr(value.args[0], "target", None) in SPLITS:
        split = value.args[0]
        source = _origin(graph, split.args[0])
        if source is None:
            return None
        parts = graph.call_function(split.target, (source, *split.args[1:]), split.kwargs)
        return graph.call_function(operator.getitem, (parts, value.args[1]))
    return None
