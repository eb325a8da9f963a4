"""Graphs as text, for tests that read as before -> after."""

from __future__ import annotations

import operator
import re
from typing import Any

import torch
from torch import fx
from torch.fx.graph import dtype_abbrs

__all__ = ["is_contiguous", "text"]

_SYMBOL = re.compile(r"\b[su]\d+\b")
_SHOWN = 1  # elements of a constant whose value is shown


def text(graph: fx.Graph | fx.GraphModule) -> str:
    """One line a node, in order:

        x: f32[4, 8] = input
        w: f32[8, 2][1, 8] = constant
        half: f32[] = constant 0.5
        mm: f32[4, 2] = aten.mm.default(x, w)
        var_mean: (f32[4, 1], f32[4, 1]) = aten.var_mean.correction(x, [1], correction=0, keepdim=True)
        getitem: f32[4, 1] = var_mean[0]
        return mm, getitem

    A value is spelt as torch.fx spells it: dtype, shape, and in a second bracket the strides of a tensor that is not
    contiguous. Symbolic sizes are s0, s1, ... in the order in which they appear. Nothing else that differs between two
    runs or two versions of torch is in it, but the names of the nodes are the graph's own.
    """
    if isinstance(graph, fx.GraphModule):
        graph = graph.graph
    symbols: dict[str, str] = {}
    return "\n".join(_line(graph, node, symbols) for node in graph.nodes)


def _line(graph: fx.Graph, node: fx.Node, symbols: dict[str, str]) -> str:
    if node.op == "output":
        returned: Any = node.args[0]
        many = isinstance(returned, (tuple, list))
        return "return " + (", ".join(map(_argument, returned)) if many else _argument(returned))
    value = node.meta.get("val", node.meta.get("example_value"))
    if node.op == "get_attr" and value is None:
        value = _attribute(graph, node)
    kind = _value(value, symbols)
    return f"{node.name}{f': {kind}' if kind else ''} = {_made_by(graph, node)}"


def _made_by(graph: fx.Graph, node: fx.Node) -> str:
    if node.op == "placeholder":
        return "input"
    if node.op == "get_attr":
        tensor = _attribute(graph, node)
        small = isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and tensor.numel() <= _SHOWN
        return f"constant {tensor.tolist()}" if small and type(tensor) is torch.Tensor else "constant"
    if node.target is operator.getitem:
        return f"{_argument(node.args[0])}[{_argument(node.args[1])}]"
    arguments = [_argument(value) for value in node.args]
    arguments += [f"{key}={_argument(value)}" for key, value in node.kwargs.items()]
    if node.op == "call_method":
        return f"{arguments[0]}.{node.target}({', '.join(arguments[1:])})"
    return f"{_target(node.target)}({', '.join(arguments)})"


def _attribute(graph: fx.Graph, node: fx.Node) -> Any:
    try:
        return operator.attrgetter(str(node.target))(graph.owning_module)
    except AttributeError:
        return None


def _target(target: Any) -> str:
    if isinstance(target, str):
        return target
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(target).removeprefix("torch.ops.")
    module = getattr(target, "__module__", None) or ""
    name = getattr(target, "__name__", type(target).__name__)
    return name if module.startswith(("_operator", "builtins", "math")) or not module else f"{module}.{name}"


def _value(value: Any, symbols: dict[str, str]) -> str:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_mkldnn:
            return f"{dtype_abbrs[value.dtype]}[{', '.join(map(str, value.shape))}] {value.layout}"
        shape, strides = ([_size(n, symbols) for n in numbers] for numbers in (value.shape, value.stride()))
        spelt = f"{dtype_abbrs[value.dtype]}[{', '.join(shape)}]"
        return spelt if is_contiguous(value) else f"{spelt}[{', '.join(strides)}]"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_value(item, symbols) for item in value)})"
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return _size(value, symbols)
    return "" if value is None else type(value).__name__


def _size(value: Any, symbols: dict[str, str]) -> str:
    return _SYMBOL.sub(lambda found: symbols.setdefault(found[0], f"{found[0][0]}{len(symbols)}"), str(value))


def is_contiguous(tensor: torch.Tensor) -> bool:
    """Without asking a symbolic size anything, which would leave a guard."""
    expected: Any = 1
    for size, stride in reversed(list(zip(tensor.shape, tensor.stride(), strict=True))):
        if isinstance(size, int) and size == 1:
            continue
        if str(stride) != str(expected):
            return False
        expected = expected * size
    return True


def _argument(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        inner = ", ".join(map(_argument, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_argument(item)}" for key, item in value.items()) + "}"
    if isinstance(value, slice):
        return ":".join("" if part is None else _argument(part) for part in (value.start, value.stop, value.step))
    if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
        return str(value).removeprefix("torch.")
    if isinstance(value, torch.device):
        return str(value)
    return repr(value)
