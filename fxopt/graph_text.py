"""FX graphs as lines to read, and what a pass changed in one as a unified diff.

A line a node: its name, what it holds, and the operator with its operands:

    addmm_1: float32[32, 64] = aten.addmm.default(arg4_1, view, permute_1)

A difference has lines that begin with " " (in both), "-" (before), "+" (after) and "@@ -8,5 +8,6 @@" (where the next
ones are). Of a short graph it holds every line, and so both graphs whole.
"""

from __future__ import annotations

import difflib
from typing import Any

import torch
from torch import fx

__all__ = ["change", "difference", "lines", "names", "shortened", "sides"]

SHORT_GRAPH = 120
"""Lines up to which a difference holds the whole graph."""
CONTEXT = 6
"""Unchanged lines around each change of a longer one."""
MOST_LINES = 800
"""Lines of a difference; the rest is counted."""
_LONGEST = 600


def change(before: fx.Graph, after: fx.Graph) -> str:
    """The difference between two graphs. A text for the reader: where one cannot be shown, it is empty."""
    try:
        return difference(lines(before), lines(after))
    except Exception:
        return ""


def lines(graph: fx.Graph) -> list[str]:
    """A line a node, in order."""
    return [_line(node)[:_LONGEST] for node in graph.nodes]


def difference(before: list[str], after: list[str]) -> str:
    """What leads from one graph's lines to another's; "" where they are equal."""
    if before == after:
        return ""
    context = len(before) + len(after) if max(len(before), len(after)) <= SHORT_GRAPH else CONTEXT
    found = list(difflib.unified_diff(before, after, n=context, lineterm=""))[2:]  # without the names of files
    return shortened("\n".join(found), MOST_LINES)


def shortened(change: str, most: int) -> str:
    """The first `most` lines of a difference, and a line that counts the others."""
    held = change.split("\n")
    if len(held) <= most + 1:  # with the line that counts: shortened before
        return change
    return "\n".join([*held[:most], f"@@ and {len(held) - most} more lines @@"])


def sides(change: str) -> tuple[list[str], list[str]]:
    """The lines before and after that a difference holds, those of "@@" in both."""
    held = change.split("\n") if change else []
    before = [line if line.startswith("@@") else line[1:] for line in held if not line.startswith("+")]
    after = [line if line.startswith("@@") else line[1:] for line in held if not line.startswith("-")]
    return before, after


def names(change: str) -> tuple[set[str], set[str]]:
    """Names of the nodes on the lines that are only before, and of those only after."""
    held = [line for line in change.split("\n") if not line.startswith(("@@", " "))]
    before, after = ({line[1:].partition(":")[0] for line in held if line.startswith(sign)} for sign in "-+")
    return before, after


def _line(node: fx.Node) -> str:
    if node.op == "output":
        return f"return {node.args[0]}"
    held = _value(node.meta.get("val"))
    name = f"{node.name}: {held}" if held else f"{node.name}:"
    if node.op == "placeholder":
        return name
    if node.op == "get_attr":
        return f"{name} = self.{node.target}"
    called = f"self.{node.target}" if node.op in ("call_module", "call_method") else _target(node.target)
    operands = [str(value) for value in node.args] + [f"{key}={value}" for key, value in node.kwargs.items()]
    return f"{name} = {called}({', '.join(operands)})"


def _target(target: Any) -> str:
    """ "aten.mm.default", "operator.getitem"."""
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(target)
    module = str(getattr(target, "__module__", "") or "").lstrip("_")
    name = str(getattr(target, "__name__", target))
    return f"{module}.{name}" if module and module != "builtins" else name


def _value(value: Any) -> str:
    """ "float32[2, 3]", with strides where they are not those of a dense tensor in order."""
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_value, value))})"
    if not isinstance(value, torch.Tensor):
        return "" if value is None else type(value).__name__
    shape = list(value.shape)
    text = f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"
    try:
        strides = list(value.stride())
    except RuntimeError:  # of a sparse or an opaque tensor
        return text
    # Nothing is asked of a symbolic size, for that would put a guard on it.
    if not all(type(number) is int for number in (*shape, *strides)) or strides == _dense(shape) or 0 in shape:
        return text
    return f"{text} strides [{', '.join(map(str, strides))}]"


def _dense(shape: list[int]) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return strides[::-1]
