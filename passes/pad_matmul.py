"""pad_matmul: 16-bit matrix products whose K or N is no multiple of 8, padded with zeros where Inductor does not.

Answers memory_bound, compute_bound, tensor_core_idle and latency_bound. Tensor cores load 16-byte rows: 8 elements of a
16-bit type; with other sizes cuBLAS takes kernels that load element by element. Zeros in K add nothing to any sum, NaN
and Inf in the data included; columns of zeros in N are sliced off the result.

before                                        after
    y = mm(x[M, 770], w[770, 50257])              y = mm(pad(x)[M, 776], pad(w)[776, 50264])[:, :50257]

Inductor pads mm, addmm and bmm at the joint stage, after a benchmark of its own. This pass comes after that, so that an
unaligned product is one that Inductor left: it takes what it reckons memory-bound for no candidate, counts the padding
of a frozen weight as if it happened on every call, and does not know `mm.dtype` (16-bit operands, fp32 result) or
baddbmm. A weight that is constant is padded once, here. Refuses other types, aligned and symbolic sizes, sizes of 1,
and a constant that other nodes read too, for it would be held twice.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxopt.labels import Axis
from fxopt.precision import Precision
from fxopt.registry import Candidate, GraphPass, PassContext, Stage

aten = torch.ops.aten
#: elements of a 16-bit type in the 16 bytes that tensor-core kernels load at once
ALIGNMENT = 8


def _products() -> dict[Any, int]:
    """Operators, and the position of the first of their two matrices; what comes before it is added to the result."""
    found: dict[Any, int] = {
        aten.mm.default: 0,
        aten.bmm.default: 0,
        aten.addmm.default: 1,
        aten.baddbmm.default: 1,
    }
    for name, position in (("mm", 0), ("bmm", 0)):
        overload = getattr(getattr(aten, name), "dtype", None)
        if overload is not None:
            found[overload] = position
    return found


PRODUCTS = _products()


@dataclass(frozen=True)
class PadMatmul(GraphPass):
    """16-bit matrix products of unaligned sizes, padded with zeros where Inductor does not."""

    name: ClassVar[str] = "pad_matmul"
    answers: ClassVar[frozenset[Axis]] = frozenset(
        {Axis.MEMORY_BOUND, Axis.COMPUTE_BOUND, Axis.TENSOR_CORE_IDLE, Axis.LATENCY_BOUND}
    )
    stage: ClassVar[Stage] = Stage.POST_GRAD
    precision: ClassVar[Precision] = Precision.FP32
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    gradients: ClassVar[bool] = True

    #: least size of K and N that is padded; below it the padding costs more than it saves
    least: int = 64

    def candidates(self, graph: fx.Graph, context: PassContext) -> Iterable[Candidate]:
        for node in graph.nodes:
            if node.op != "call_function" or node.target not in PRODUCTS:
                continue
            a, b = _operands(node)
            if a.dtype not in (torch.float16, torch.bfloat16) or b.dtype != a.dtype:
                yield Candidate(node.name, f"operands are {a.dtype} and {b.dtype}: padding is for 16-bit types")
                continue
            sizes = (*a.shape, *b.shape)
            if not all(isinstance(size, int) for size in sizes):
                yield Candidate(node.name, "its sizes are symbolic")
            elif not any(_missing(a.shape[-1], b.shape[-1])):
                yield Candidate(node.name, f"K and N are multiples of {ALIGNMENT}")
            elif min(a.shape[-1], b.shape[-1]) < self.least or 0 in sizes:
                yield Candidate(node.name, f"K or N is smaller than {self.least}")
            elif not context.answers(node, self.answers):
                yield Candidate(node.name, "not labelled with what padding could answer")
            elif any(_is_shared(operand) for operand in _matrices(node)):
                yield Candidate(node.name, "a constant operand has other readers, and would be held twice")
            else:
                yield Candidate(node.name)

    def rewrite(self, graph: fx.Graph, node: fx.Node, context: PassContext) -> None:
        a, b = _matrices(node)
        columns = b.meta["val"].shape[-1]
        k, n = _missing(a.meta["val"].shape[-1], columns)
        args: list[Any] = list(node.args)
        first = PRODUCTS[node.target]
        with graph.inserting_before(node):
            args[first] = _padded(graph, a, last=k)
            args[first + 1] = _padded(graph, b, last=n, but_last=k)
            if first and _is_as_wide(args[0], columns):
                args[0] = _padded(graph, args[0], last=n)
            result = graph.call_function(node.target, tuple(args), dict(node.kwargs))  # type: ignore[arg-type]
            if n:
                result = graph.call_function(aten.slice.Tensor, (result, -1, 0, columns))
                if not all(map(_is_pointwise, node.users)):
                    # Others may promise the strides of what they read, or count on them. Inductor fuses this copy.
                    dense: Any = {"memory_format": torch.contiguous_format}
                    result = graph.call_function(aten.clone.default, (result,), dense)
        node.replace_all_uses_with(result)
        graph.erase_node(node)


def _matrices(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    first = PRODUCTS[node.target]
    return node.args[first], node.args[first + 1]  # type: ignore[return-value]


def _operands(node: fx.Node) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = _matrices(node)
    return a.meta["val"], b.meta["val"]


def _missing(k: int, n: int) -> tuple[int, int]:
    """Elements by which K and N fall short of the next multiple of the alignment."""
    return -k % ALIGNMENT, -n % ALIGNMENT


def _is_as_wide(bias: Any, columns: int) -> bool:
    shape = bias.meta["val"].shape
    return len(shape) > 0 and shape[-1] == columns


def _through_views(node: fx.Node) -> list[fx.Node]:
    """`node` and what it is a transpose of, up to a constant; empty if it is computed."""
    path = [node]
    while path[-1].target in (aten.permute.default, aten.t.default, aten.transpose.int):
        path.append(path[-1].args[0])  # type: ignore[arg-type]
    return path if path[-1].op == "get_attr" else []


def _is_shared(node: fx.Node) -> bool:
    return any(len(step.users) > 1 for step in _through_views(node))


def _constant(graph: fx.Graph, node: fx.Node) -> torch.Tensor | None:
    """The tensor that a constant, or a transpose of one, stands for; None for a computed one."""
    path = _through_views(node)
    if not path or graph.owning_module is None:
        return None
    value = operator.attrgetter(str(path[-1].target))(graph.owning_module)
    if not isinstance(value, torch.Tensor) or value.is_mkldnn:
        return None
    for step in reversed(path[:-1]):
        value = step.target(value, *step.args[1:])  # type: ignore[operator]
    return value.detach()


def _padded(graph: fx.Graph, node: fx.Node, last: int, but_last: int = 0) -> fx.Node:
    """`node` with zeros behind its last dimension and the one before; a constant is padded now, in its own layout."""
    if not last and not but_last:
        return node
    padding = [0, last, 0, but_last] if but_last else [0, last]
    value = _constant(graph, node)
    if value is None:
        return graph.call_function(aten.constant_pad_nd.default, (node, padding, 0.0))
    transposed = value.dim() > 1 and value.stride(-2) == 1 and value.stride(-1) != 1
    wide = torch.constant_pad_nd(value, padding, 0.0)
    if transposed:  # a weight that is read along K stays one
        wide = wide.transpose(-1, -2).contiguous().transpose(-1, -2)
    name = f"_fxopt_padded_{node.name}_{last}_{but_last}"
    graph.owning_module.register_buffer(name, wide)  # type: ignore[union-attr]
    held = graph.get_attr(name)
    fake = node.meta["val"].fake_mode
    held.meta["val"] = fake.from_tensor(wide, static_shapes=True)
    return held


def _is_pointwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())
