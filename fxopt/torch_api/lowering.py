"""Operators that Inductor compiles as the graph they stand for, so that it fuses what is in it with what is around it.

A graph pass that writes out what an operator does gives every later pass of torch's those nodes to look at, in each of
a model's layers. One operator is a node until Inductor makes loops of the graph.

Tested with torch 2.11 and 2.13.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx


def lowers_as(op: torch._ops.OpOverload, graph_of: Callable[..., fx.Graph]) -> None:
    """Have Inductor compile `op` as `graph_of(*arguments)`, whose placeholders are the operator's tensors, in order.

    graph_of: is given the call's arguments, with fake tensors; called once for each call that is compiled. Its nodes
    call operators that Inductor lowers itself. Code that was compiled before stays as it is.
    """
    from torch._inductor.lowering import lowerings, register_lowering
    from torch._inductor.virtualized import V

    def lowered(*args: Any) -> Any:
        node = V.graph.current_node
        graph = graph_of(*fx.map_arg(node.args, lambda of: of.meta["val"]))
        tensors = iter([arg for arg, of in zip(args, node.args, strict=True) if isinstance(of, fx.Node)])
        found: dict[fx.Node, Any] = {}
        for inner in graph.nodes:
            if inner.op == "placeholder":
                found[inner] = next(tensors)
            elif inner.op == "output":
                return list(fx.map_arg(inner.args[0], found.__getitem__))
            elif inner.target is operator.getitem:
                found[inner] = found[inner.args[0]][inner.args[1]]
            else:
                given = fx.map_arg(inner.args, found.__getitem__), fx.map_arg(inner.kwargs, found.__getitem__)
                with V.graph.set_current_node(inner):  # some lowerings look at its value
                    found[inner] = _reused(lowerings[inner.target](*given[0], **given[1]), len(inner.users))
        raise AssertionError("a graph without an output")

    register_lowering(op, type_promotion_kind=None)(lowered)


def _reused(value: Any, users: int) -> Any:
    """What Inductor does with a node's value after lowering it: store it where several read it and it is long."""
    from torch._inductor.ir import TensorBox

    if isinstance(value, TensorBox):
        value.mark_reuse(users)
        if value.has_exceeded_max_reads():
            value.realize_hint()
    return value
