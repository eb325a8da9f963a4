"""Models what an operator that a trace recorded with its inputs computes and moves.

The call is made once more without data: on tensors of device ``meta``, of the sizes, strides and types that the trace
has. What :mod:`profiler_core.cost` then says of it, as a node of an FX graph, is its cost. Nothing is guessed: a type
that the trace does not tell (that of the tensors of a list), an operator that is not PyTorch's own, or one whose
result depends on the data gives None.
"""

from __future__ import annotations

import ast
import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from profiler_core.cost import Cost, node_cost
from profiler_core.shapes import has_tensor, tensors
from profiler_core.trace import OperatorInputs

_TYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "c10::Half": torch.float16,
    "c10::BFloat16": torch.bfloat16,
    "bool": torch.bool,
    "int": torch.int32,
    "long int": torch.int64,
    "long": torch.int64,
    "short int": torch.int16,
    "short": torch.int16,
    "signed char": torch.int8,
    "unsigned char": torch.uint8,
    "c10::complex<float>": torch.complex64,
    "c10::complex<double>": torch.complex128,
    "c10::Float8_e4m3fn": torch.float8_e4m3fn,
    "c10::Float8_e5m2": torch.float8_e5m2,
}
# A copy to another device looks like none on ``meta``: the operators that they call tell.
_TOLD_BY_OTHERS = ("aten::to", "aten::_to_copy")


@dataclass(frozen=True)
class CallCost:
    """Modelled cost of one call. ``flops`` is None where there is no formula; ``dtype`` and ``shape`` are of the first
    result, None where there is none.
    """

    flops: float | None
    bytes: float | None
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] | None = None


def call_cost(name: str, inputs: OperatorInputs) -> CallCost | None:
    """Of a call of an operator ("aten::mm"), None where it cannot be modelled from its inputs alone."""
    if name in _TOLD_BY_OTHERS:
        return None
    found = []
    for overload in _overloads(name):
        given = _arguments(overload, inputs)
        if given is None:
            continue
        try:
            with warnings.catch_warnings(), torch.no_grad(), torch.device("meta"):
                warnings.simplefilter("ignore")
                found.append(_cost(overload, given))
        except Exception:  # of many kinds: what the operator's own code has against these arguments, or against meta
            continue
    # The trace does not name the overload: where several fit, they have to agree.
    return found[0] if found and all(cost == found[0] for cost in found) else None


def composite(name: str, inputs: OperatorInputs) -> bool:
    """Whether all that such a call does is done by the operators that it calls."""
    if name in _TOLD_BY_OTHERS:
        return True
    fitting = [o for o in _overloads(name) if len(o._schema.arguments) == len(inputs.types)]
    return bool(fitting) and all(
        torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CompositeImplicitAutograd")
        for overload in fitting
    )


def _overloads(name: str) -> list[torch._ops.OpOverload]:
    space, _, operator = name.partition("::")
    packet = getattr(torch.ops.aten, operator, None) if space == "aten" and operator.isidentifier() else None
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return []
    found = [getattr(packet, overload) for overload in packet.overloads()]
    # The dispatcher does not know those that are TorchScript's own.
    return [overload for overload in found if torch._C._dispatch_has_kernel(overload.name())]


# --- the call once more --------------------------------------------------------------------------------------


class _Refused(Exception):
    """The overload does not take what was recorded, or that does not say enough."""


def _arguments(overload: torch._ops.OpOverload, inputs: OperatorInputs) -> dict[str, Any] | None:
    """The arguments by name, None where they do not fit this overload."""
    schema = overload._schema.arguments
    if len(schema) != len(inputs.types):
        return None
    try:
        recorded = zip(inputs.types, inputs.dims, inputs.strides, inputs.values, strict=True)
        given = {a.name: _argument(a, *item) for a, item in zip(schema, recorded, strict=True)}
    except (_Refused, ValueError, TypeError, SyntaxError):
        return None
    # A number of Python's and a tensor without dimensions look alike, and promote integers differently.
    found = [value for value in given.values() if isinstance(value, torch.Tensor)]
    sized = [t.dtype for t in found if t.dim()]
    unclear = any(t.dtype == torch.float64 for t in found if not t.dim())
    integers = sized and not any(dtype.is_floating_point or dtype.is_complex for dtype in sized)
    return None if unclear and integers else given


def _argument(argument: Any, kind: str, dims: tuple[Any, ...], strides: tuple[Any, ...], text: str) -> Any:
    expected = argument.type
    optional = isinstance(expected, torch.OptionalType)
    expected = expected.getElementType() if optional else expected
    takes = expected.kind()
    if kind in _TYPES:
        if takes != "TensorType":
            raise _Refused
        try:
            return torch.empty_strided(dims, strides, dtype=_TYPES[kind], device="meta")
        except RuntimeError as error:  # a sparse tensor, which has no strides; sizes that no tensor has
            raise _Refused from error
    if kind == "Scalar" and text:
        return _number(text, takes)
    if kind == "ScalarList" and text:
        if takes != "ListType" or expected.getElementType().kind() not in _NUMBERS:
            raise _Refused
        return ast.literal_eval(text)
    if kind:  # a list of tensors, whose types are not recorded; a type that is not known here
        raise _Refused
    if argument.has_default_value() and argument.default_value is not None:
        return argument.default_value
    if optional:
        return None
    if takes == "DeviceObjType":
        return torch.device("meta")
    raise _Refused


_NUMBERS = {"IntType": (int,), "FloatType": (float, int), "BoolType": (bool,), "NumberType": (bool, int, float)}


def _number(text: str, takes: str) -> Any:
    value = float(text) if text.strip("-") in ("inf", "nan") else ast.literal_eval(text)
    if type(value) not in _NUMBERS.get(takes, ()):
        raise _Refused
    return value


class _Seen(TorchDispatchMode):
    """Notes the operators that a call comes down to."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


def _cost(overload: torch._ops.OpOverload, given: dict[str, Any]) -> CallCost:
    named = {argument.name for argument in overload._schema.arguments if argument.kwarg_only}
    args = tuple(value for name, value in given.items() if name not in named)
    kwargs = {name: value for name, value in given.items() if name in named}
    if not has_tensor(list(given.values())) and "device" in kwargs:
        kwargs["device"] = torch.device("meta")
    with _Seen() as seen:
        result = overload(*args, **kwargs)
    first = next(iter(tensors(result)), None)
    told = (first.dtype, tuple(first.shape)) if first is not None else (None, None)
    inside = [node_cost(_node(*call)) for call in seen.calls]
    nothing = Cost(0.0, 0.0, 0.0)
    if all(cost == nothing for cost in inside):  # a view, or an input as it was
        return CallCost(0.0, 0.0, *told)
    whole = node_cost(_node(overload, args, kwargs, result))
    flops, moved = whole.flops, whole.bytes
    if whole == nothing:  # it may give a view, and has to copy here
        flops, moved = None, _total([cost.bytes for cost in inside])
    return CallCost(_total([cost.flops for cost in inside]) if flops is None else flops, moved, *told)


def _total(parts: list[float | None]) -> float | None:
    known = [part for part in parts if part is not None]
    return math.fsum(known) if len(known) == len(parts) else None


def _node(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> fx.Node:
    """The call as a node of an FX graph of its own."""
    graph = fx.Graph()
    inputs: dict[int, fx.Node] = {}

    def placed(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in inputs:
                inputs[id(value)] = graph.placeholder(f"input_{len(inputs)}")
                inputs[id(value)].meta["val"] = value
            return inputs[id(value)]
        if isinstance(value, (list, tuple)):
            return type(value)(placed(item) for item in value)
        return value

    node = graph.call_function(target, tuple(map(placed, args)), {name: placed(v) for name, v in kwargs.items()})
    node.meta["val"] = result
    return node
