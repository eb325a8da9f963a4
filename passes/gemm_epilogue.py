"""gemm_epilogue: a 16-bit product with a bias and its activation in one library call, instead of a kernel more.

Answers the labels of the kernel that goes away (memory_bound, l2_bound, latency_bound, wave_starved, divergent,
launch_bound) and of the product that does its work (tensor_core_idle, compute_bound). torch has an operator for it,
which on CUDA has cuBLASLt add the bias and apply relu or GELU to the accumulator before it is stored.

before                                        after
    y = addmm(bias, x, w)                         z = _addmm_activation(bias, x, w, use_gelu=True)
    z = 0.5 * y * (1 + tanh(0.798 * (y + 0.0447 * y ** 3)))

The sum is then never rounded to 16 bits before the activation: the result is at least as accurate. What an activation
is in a graph, decomposed and with casts to float32 and back, is told by what it computes: its operators are evaluated
at sample points and compared with relu, and with both forms of GELU. On CUDA the library's GELU is the tanh form; the
exact one (approximate="none") differs from it by 5e-4 at most, and becomes it under precision "bf16" alone. The
operator on a CPU computes the exact form, and in kernels of its own: the pass is for CUDA.

The pass comes at the post-grad stage: after bf16_graph and promote_matmul_precision, whose 16-bit products it takes,
after Inductor has padded products, and before Inductor looks at what is left of addmm. Refuses other types, factors, a
bias that is no row, a sum that others read too, a GELU that goes on in another type, symbolic sizes, and sizes of 1,
for which torch does not call cuBLASLt (isInputCompliesAddmmCudaLt in aten/src/ATen/native/cuda/Blas.cpp).
"""

from __future__ import annotations

import functools
import math
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxopt.labels import Axis
from fxopt.precision import Precision
from fxopt.registry import Candidate, GraphPass, PassContext, Stage
from fxopt.torch_api.dynamo import outside_tracing

aten = torch.ops.aten
CAST: Any = torch.ops.prims.convert_element_type.default
#: views of a matrix that leave its columns whole as long as the last size stays
_RESHAPES: frozenset[Any] = frozenset({aten.view.default, aten.reshape.default, aten._unsafe_view.default})
#: views of a dense tensor that are dense: what a pointwise operator makes of one is laid out like it
_VIEWS: frozenset[Any] = _RESHAPES | {
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
}
#: what the operators of an activation compute of numbers
_MEANINGS: dict[Any, Callable[..., float]] = {
    aten.add.Tensor: operator.add,
    aten.sub.Tensor: operator.sub,
    aten.mul.Tensor: operator.mul,
    aten.div.Tensor: operator.truediv,
    aten.pow.Tensor_Scalar: math.pow,
    aten.tanh.default: math.tanh,
    aten.erf.default: math.erf,
    aten.relu.default: lambda x: max(x, 0.0),
}
_SAMPLES = [*(i / 8 for i in range(-96, 97)), -1000.0, 1000.0]
#: the activations, by what gelu's `approximate` is for them ("" for relu)
_ACTIVATIONS: dict[str, Callable[[float], float]] = {
    "": lambda x: max(x, 0.0),
    "tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "none": lambda x: 0.5 * x * (1 + math.erf(x * math.sqrt(0.5))),
}
#: distance within which two functions are the same: models write sqrt(2 / pi) with ten digits
_TOLERANCE = 1e-8
#: relative L2 error of GELU's tanh form, of numbers that are normally distributed with variance 1
_TANH_ERROR = 2e-4


@dataclass(frozen=True)
class _Sum:
    """bias + x @ weight. node: what gives it; seen: the same as its readers have it; views: those on the way there."""

    node: fx.Node
    seen: fx.Node
    bias: Any
    x: Any
    weight: Any
    views: tuple[fx.Node, ...]

    @property
    def bias_is_row(self) -> bool:
        columns, value = self.weight.meta["val"].shape[1], self.bias.meta["val"]
        return tuple(value.shape) == (columns,) and value.is_contiguous() and value.dtype == self.x.meta["val"].dtype


@dataclass(frozen=True)
class _Activation:
    """What alone reads a sum: `gelu` is a key of _ACTIVATIONS, `nodes` the operators, of which `result` is the last."""

    gelu: str
    nodes: tuple[fx.Node, ...]
    result: fx.Node


@dataclass(frozen=True)
class GemmEpilogue(GraphPass):
    """16-bit products with a bias and a relu or GELU as one library call, without a kernel for the activation."""

    name: ClassVar[str] = "gemm_epilogue"
    answers: ClassVar[frozenset[Axis]] = frozenset(
        {
            Axis.MEMORY_BOUND,
            Axis.L2_BOUND,
            Axis.LATENCY_BOUND,
            Axis.WAVE_STARVED,
            Axis.DIVERGENT,
            Axis.LAUNCH_BOUND,
            Axis.TENSOR_CORE_IDLE,
            Axis.COMPUTE_BOUND,
        }
    )
    stage: ClassVar[Stage] = Stage.POST_GRAD
    precision: ClassVar[Precision] = Precision.FP32
    after: ClassVar[tuple[str, ...]] = ("pad_matmul",)
    devices: ClassVar[tuple[str, ...]] = ("cuda",)

    def applicable(self, context: PassContext) -> str:
        if os.environ.get("DISABLE_ADDMM_CUDA_LT") == "1":
            return "DISABLE_ADDMM_CUDA_LT=1 keeps torch from calling cuBLASLt"
        return ""

    def candidates(self, graph: fx.Graph, context: PassContext) -> Iterable[Candidate]:
        for node in graph.nodes:
            found = _sum(node)
            if found is None:
                continue
            x, weight = found.x.meta["val"], found.weight.meta["val"]
            if x.dtype not in (torch.bfloat16, torch.float16):
                yield Candidate(node.name, f"operands are {x.dtype}: cuBLASLt's epilogue is used for 16-bit types")
            elif (activation := _activation(found.seen)) is None:
                yield Candidate(node.name, "no relu or GELU is all that reads its sum")
            elif not all(isinstance(size, int) for size in (*x.shape, *weight.shape)):
                yield Candidate(node.name, "its sizes are symbolic")
            elif any(node.kwargs.get(factor, 1) != 1 for factor in ("beta", "alpha")):
                yield Candidate(node.name, "beta or alpha is not 1")
            elif not found.bias_is_row:
                yield Candidate(node.name, "its bias is no row of N numbers of the operands' type")
            elif min(*x.shape, *weight.shape) < 2:
                yield Candidate(node.name, "M, K or N is less than 2, for which torch does not call cuBLASLt")
            elif activation.gelu == "none" and not context.budget.allows(Precision.BF16, _TANH_ERROR):
                yield Candidate(node.name, "its GELU is the exact one; the library's tanh form needs precision 'bf16'")
            elif activation.gelu and _goes_on_wide(activation.result, x.dtype):
                yield Candidate(node.name, "its GELU is read in another type, for which the library would round it")
            elif not activation.gelu and not _keeps_nan(x.device, x.dtype):
                yield Candidate(node.name, "the library's relu makes numbers of NaN here")
            elif not self._answers(context, (node, found.node, *activation.nodes)):
                yield Candidate(node.name, "neither it nor its activation is labelled with what this answers")
            else:
                yield Candidate(node.name)

    def rewrite(self, graph: fx.Graph, node: fx.Node, context: PassContext) -> None:
        found = _sum(node)
        activation = _activation(found.seen) if found is not None else None
        assert found is not None and activation is not None
        call: Any = aten._addmm_activation.default
        dtype, result = found.x.meta["val"].dtype, activation.result
        with graph.inserting_before(found.node):
            value = graph.call_function(
                call, (found.bias, found.x, found.weight), {"use_gelu": True} if activation.gelu else {}
            )
        with graph.inserting_before(result):
            value = _viewed(graph, value, found.views)
            if result.meta["val"].dtype == dtype:
                result.replace_all_uses_with(value)
                return
            narrowed, _ = _readers(result, dtype)
            wide = graph.call_function(CAST, (value, result.meta["val"].dtype))
        for cast, views in narrowed:
            with graph.inserting_before(cast):
                cast.replace_all_uses_with(_viewed(graph, value, views))
        result.replace_all_uses_with(wide)

    def _answers(self, context: PassContext, nodes: Iterable[fx.Node]) -> bool:
        launches = any(label.axis is Axis.LAUNCH_BOUND for label in context.labels)  # a label of the whole graph
        return launches or any(context.answers(node, self.answers) for node in nodes)


@functools.cache
def _keeps_nan(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether relu in the library's epilogue leaves NaN what it is, as torch's own does: nobody documents it."""
    with outside_tracing(), torch.no_grad():
        x = torch.full((32, 32), math.nan, dtype=dtype, device=device)
        return bool(torch._addmm_activation(torch.zeros_like(x[0]), x, x).isnan().all())


def _sum(node: fx.Node) -> _Sum | None:
    """The sum that the product `node` is, or is alone read by; None where there is none."""
    if node.target is aten.addmm.default:
        bias, x, weight = node.args
        seen, views = _seen(node)
        return _Sum(node, seen, bias, x, weight, views)
    if node.target is not aten.mm.default:
        return None
    x, weight = node.args
    product, before = _seen(node, casts=False)
    columns = node.meta["val"].shape[1]
    if not all(view.target in _RESHAPES and view.meta["val"].shape[-1] == columns for view in before):
        return None
    add = next(iter(product.users), None)
    if add is None or len(product.users) > 1 or add.target is not aten.add.Tensor or add.kwargs:
        return None
    others = [operand for operand in add.args if operand is not product]
    if len(others) != 1 or not isinstance(others[0], fx.Node):
        return None
    seen, views = _seen(add)
    return _Sum(add, seen, others[0], x, weight, (*before, *views))


def _seen(node: fx.Node, casts: bool = True) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """`node` as those read it who do not only look at it in another way, or in another type; and the views between."""
    views: list[fx.Node] = []
    while len(node.users) == 1:
        (user,) = node.users
        if user.target in _VIEWS:
            views.append(user)
        elif not (casts and _is_float_cast(user)):
            break
        node = user
    return node, tuple(views)


def _is_float_cast(node: fx.Node) -> bool:
    return node.target is CAST and node.meta["val"].is_floating_point()


def _activation(source: fx.Node) -> _Activation | None:
    """The activation that alone reads `source`, in whatever operators; None where there is none.

    Grows the set of values that are computed of `source` and numbers alone, in order, until one of them is a known
    activation of it and is the only one that is read outside of the set.
    """
    values: dict[fx.Node, list[float]] = {source: _SAMPLES}
    while True:
        read = [node for node in values if any(user not in values for user in node.users)]
        if len(read) == 1 and read[0] is not source:
            for gelu, function in _ACTIVATIONS.items():
                if _equal(values[read[0]], [function(x) for x in _SAMPLES]):
                    return _Activation(gelu, tuple(values)[1:], read[0])
        for reader in sorted({user for node in values for user in node.users} - values.keys()):
            computed = _computed(reader, values)
            if computed is not None:
                values[reader] = computed
                break
        else:
            return None


def _computed(node: fx.Node, values: dict[fx.Node, list[float]]) -> list[float] | None:
    """What `node` is at the sample points, without rounding; None where it is not made of `values` and numbers."""
    if _is_float_cast(node):
        return values[node.args[0]]  # type: ignore[index]
    meaning = _MEANINGS.get(node.target)
    if meaning is None or node.kwargs:
        return None
    columns = []
    for operand in node.args:
        if isinstance(operand, fx.Node) and operand in values:
            columns.append(values[operand])
        elif isinstance(operand, (int, float)):
            columns.append([float(operand)] * len(_SAMPLES))
        else:
            return None
    try:
        return [meaning(*numbers) for numbers in zip(*columns, strict=True)]
    except (ArithmeticError, ValueError):  # not defined there
        return None


def _equal(found: Sequence[float], expected: Sequence[float]) -> bool:
    return all(abs(a - b) <= _TOLERANCE * max(1.0, abs(b)) for a, b in zip(found, expected, strict=True))


def _goes_on_wide(result: fx.Node, dtype: torch.dtype) -> bool:
    """Whether somebody reads an activation's result in another type than `dtype`."""
    return result.meta["val"].dtype != dtype and _readers(result, dtype)[1]


def _readers(result: fx.Node, dtype: torch.dtype) -> tuple[list[tuple[fx.Node, tuple[fx.Node, ...]]], bool]:
    """The casts of `result` to `dtype`, each with the views between, and whether anything else reads it."""
    casts, others = [], False
    pending: list[tuple[fx.Node, tuple[fx.Node, ...]]] = [(result, ())]
    while pending:
        node, views = pending.pop()
        for user in node.users:
            if user.target is CAST and user.args[1] == dtype:
                casts.append((user, views))
            elif user.target in _VIEWS:
                pending.append((user, (*views, user)))
            else:
                others = True
    return casts, others


def _viewed(graph: fx.Graph, value: fx.Node, views: Iterable[fx.Node]) -> fx.Node:
    for view in views:
        value = graph.call_function(view.target, (value, *view.args[1:]), dict(view.kwargs))  # type: ignore[arg-type]
    return value
