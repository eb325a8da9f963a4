"""Tracing without traces: fake values outside of a compilation, and Dynamo without a memory of one function.

Tested with torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch._dynamo.eval_frame
import torch._dynamo.exc
from torch import fx
from torch._dynamo.source import LocalSource
from torch._guards import tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

#: What Dynamo raises under `fullgraph=True` where it would break the graph.
GRAPH_BREAKS: tuple[type[Exception], ...] = (torch._dynamo.exc.Unsupported,)
#: What Dynamo makes of an error inside a backend; its `inner_exception` is that error.
BACKEND_FAILED: Any = torch._dynamo.exc.BackendCompilerFailed


def fake_mode(symbolic: bool) -> FakeTensorMode:
    """A mode of its own, with room for symbolic sizes where asked for."""
    return FakeTensorMode(shape_env=ShapeEnv() if symbolic else None)


def new_symbol(mode: FakeTensorMode, name: str, hint: int) -> Any:
    """A symbolic size, 2 or more, that is `hint` in the calls at hand."""
    env = mode.shape_env
    assert env is not None
    source = LocalSource(name)
    symbol = env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
    return env.create_symintnode(symbol, hint=hint, source=source)


def specialised(mode: FakeTensorMode) -> bool:
    """Whether a symbolic size has been taken for a number, or for another size."""
    env = mode.shape_env
    return env is not None and bool(env.replacements)


def symbols(value: Any) -> frozenset[str]:
    """Names of the symbols in a size."""
    return frozenset() if isinstance(value, int) else frozenset(map(str, value.node.expr.free_symbols))


def is_symbol(value: Any) -> bool:
    """Whether a size is one symbol and nothing else."""
    return not isinstance(value, int) and bool(value.node.expr.is_symbol)


def substituted(value: Any, sizes: Mapping[str, int]) -> int:
    """A size as a number, where its symbols stand for `sizes`."""
    if isinstance(value, int):
        return value
    expression = value.node.expr
    return int(expression.subs({symbol: sizes[str(symbol)] for symbol in expression.free_symbols}))


def source_names(gm: fx.GraphModule) -> list[str]:
    """How Dynamo reads each input of its graph, as a Python expression; "" where it does not say."""
    found = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            name = getattr(getattr(node, "_dynamo_source", None), "name", "")
            found.append(str(name() if callable(name) else name))  # a method in torch 2.11, a property since
    return found


def with_sources(graph: fx.Graph, names: Sequence[str]) -> None:
    """Give each placeholder the source that Dynamo would: a local variable of that name."""
    nodes = (node for node in graph.nodes if node.op == "placeholder")
    for node, name in zip(nodes, names, strict=True):
        node._dynamo_source = LocalSource(name)


@contextlib.contextmanager
def forgotten(backend: Callable[..., Any]) -> Iterator[None]:
    """Dynamo keeps every backend that it was given until it is reset; this one only within the block."""
    try:
        yield
    finally:
        kept = torch._dynamo.eval_frame.cached_backends
        for key, value in list(kept.items()):
            if backend in (value, getattr(value, "compiler_fn", None)):  # torch.compile wraps it
                del kept[key]


def graph_of(fn: Callable[..., Any], *values: torch.Tensor) -> fx.Graph:
    """The graph of `fn` on these fake values, in operators that Inductor still compiles after its decompositions."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    with tracing(None), values[0].fake_mode if isinstance(values[0], FakeTensor) else contextlib.nullcontext():
        return make_fx(fn, decomposition_table=select_decomp_table())(*values).graph
