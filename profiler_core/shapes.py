"""Sizes and operator names of an FX node, read without changing the graph that they come from.

Symbolic sizes become numbers by their hint. ``int(SymInt)`` or a comparison would add a guard, and so
specialise code that is only looked at.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx

__all__ = ["MISSING", "SizeUnknown", "Spec"]

MISSING = object()  # a node without ``meta["val"]``, told apart from one whose value is None


class SizeUnknown(Exception):
    """A size without a hint, or a node without a value."""


@dataclass(frozen=True)
class Spec:
    """Sizes of a tensor with symbols replaced by their hints; strides and offset count elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    itemsize: int
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return prod(self.shape)


def target_name(node: fx.Node) -> str:
    """Name of what a node calls, for example ``"aten.addmm.default"``.

    Inductor's pattern matcher replaces a fused CPU linear or convolution by a ``functools.partial`` over a
    local function; the operator that it lowers to sits in the function's closure and is what this returns.
    """
    return node.target if isinstance(node.target, str) else name_of(operator_of(node.target)[0])


def operator_of(target: Any) -> tuple[Any, bool]:
    """The operator behind a pattern-matcher ``partial`` and True, or the target itself and False."""
    if not isinstance(target, functools.partial):
        return target, False
    function = target.func
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells = dict(zip(names, getattr(function, "__closure__", None) or (), strict=False))
    found = {key: cell.cell_contents for key, cell in cells.items() if _is_operator(cell)}
    for key in ("computation_op", "fusion_op", "outplace_fusion_op"):
        if key in found:
            return found[key], True
    return next(iter(found.values()), function), True


def _is_operator(cell: Any) -> bool:
    try:
        return isinstance(cell.cell_contents, torch._ops.OpOverload)
    except ValueError:  # an empty cell
        return False


def name_of(target: Any) -> str:
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(target)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return target.name()
    return getattr(target, "__name__", None) or str(target)


def packet_name(target: str) -> str:
    """``"aten.mm.default"`` -> ``"aten.mm"``."""
    return ".".join(target.split(".")[:2])


def hint(size: Any) -> int:
    """A size as a number, without a guard: ``int(SymInt)`` would specialise the graph."""
    if isinstance(size, fx.Node):
        size = size.meta.get("val")
    if isinstance(size, torch.SymInt):
        hint = size.node.hint
        if hint is None:
            raise SizeUnknown
        return int(hint)
    if size is None:
        raise SizeUnknown
    return int(size)


def spec_of(value: Any) -> Spec:
    if not isinstance(value, torch.Tensor):
        raise SizeUnknown
    shape = tuple(hint(size) for size in value.shape)
    try:
        stride: tuple[int, ...] = tuple(hint(step) for step in value.stride())
        offset = hint(value.storage_offset())
    except (RuntimeError, NotImplementedError):  # opaque layouts have no strides: dense
        stride = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
        offset = 0
    return Spec(shape, stride, offset, value.dtype.itemsize, value.dtype)


def argument(arg: Any) -> Spec:
    return spec_of(arg.meta.get("val") if isinstance(arg, fx.Node) else arg)


def numel(value: torch.Tensor) -> int:
    return prod(hint(size) for size in value.shape)


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors(item)]
    return [value] if isinstance(value, torch.Tensor) else []


def has_tensor(value: Any) -> bool:
    return value is MISSING or bool(tensors(value))


def on_meta(arg: Any) -> Any:
    """An argument for a FLOP formula: tensors on ``meta`` with hinted sizes, symbols as numbers."""
    if isinstance(arg, fx.Node):
        return value_on_meta(arg.meta.get("val"))
    if isinstance(arg, (tuple, list)):
        return [on_meta(item) for item in arg]
    return hint(arg) if isinstance(arg, torch.SymInt) else arg


def value_on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        spec = spec_of(value)
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
    if isinstance(value, (tuple, list)):
        return [value_on_meta(item) for item in value]
    return hint(value) if isinstance(value, torch.SymInt) else value
