"""split_precision_gemm: fp32 matrix products on 16-bit tensor cores, as accurate as fp32.

Answers tensor_core_idle. The operands of each labelled product are split into 16-bit parts, and the parts multiplied on
the tensor cores (`passes.split_products`). What a product costs and how accurate it is depends on `method`:

    fp16x3   three products of scaled fp16 parts, summed in fp32 registers: a third of cuBLAS fp32's own error on
             normally distributed numbers, and NaN and Inf where fp32 has them. Class fp32
    bf16x3   three products of bf16 parts in one call of cuBLAS: 16 bits, an error of 5e-6. Error budgets from 1e-5 on,
             for those products where it measures faster; fp16x3 for the others
    fp16     one product of scaled fp16 operands: TF32's eleven bits at twice its rate. Classes tf32 and bf16

The split of an activation is one operator, which Inductor lowers as ordinary graph code and fuses into the activation's
producer; a frozen weight is split once, when it is folded. Products that share an operand share its split. One that
reads the result of split attention (`split_precision_attention`) has it written split. With gradients the products of
the backward are split as those of the forward are.

before                                   after (fp16x3)
    y = addmm(bias, x, w)                    x_hi, x_lo, x_scale = split(x);  w_hi, w_lo, w_scale = split(w^T)
                                             y = split_gemm(x_hi, x_lo, x_scale, w_hi, w_lo, w_scale, bias)

Refuses products that are not fp32, symbolic sizes, and products too small to fill a tensor core's tile.
"""

from __future__ import annotations

import importlib.util
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from fxopt.labels import Axis
from fxopt.precision import Precision
from fxopt.registry import PROVENANCE_META, Candidate, GraphPass, Pass, PassContext, Stage
from passes.kernels import launch, tiling
from passes.split_precision_attention import SPLIT_ATTENTION, SPLIT_ATTENTION_SPLIT
from passes.split_products import block_of, is_constant, parts_of
from profiler_core.quantities import duration

aten = torch.ops.aten

#: matrix-product operators: position of the left operand, and whether something is added
_LEFT: dict[Any, tuple[int, bool]] = {
    aten.mm.default: (0, False),
    aten.bmm.default: (0, False),
    aten.addmm.default: (1, True),
    aten.baddbmm.default: (1, True),
}
METHODS = ("fp16x3", "bf16x3", "fp16")
#: the loosest error that bf16x3 and fp16 are within on a whole model, by which a number as precision allows them
_BF16X3_ERROR, _FP16_ERROR = 1e-5, 5e-4
#: widths of an attention's heads that a kernel's steps along K divide
_HEADS = (64, 128)
#: operators whose result is the memory of their operand, seen in another way
_SAME_MEMORY = frozenset(
    {aten.view.default, aten._unsafe_view.default, aten.permute.default, aten.transpose.int, aten.unsqueeze.default,
     aten.squeeze.dim, aten.alias.default}
)  # fmt: skip
#: what a kernel that writes bf16 parts takes beside its memory traffic: 4.0 us for 512 x 768 on an H200
_PARTS_US = 1.6
#: below this many elements a side, a tensor core's tile is mostly padding
_LEAST = 16
#: CUDA's limit for the third dimension of a grid
_MOST_BATCH = 65535


@dataclass(frozen=True)
class SplitPrecisionGemm(GraphPass):
    """fp32 matrix products on 16-bit tensor cores, as accurate as fp32."""

    name: ClassVar[str] = "split_precision_gemm"
    answers: ClassVar[frozenset[Axis]] = frozenset({Axis.TENSOR_CORE_IDLE})
    stage: ClassVar[Stage] = Stage.JOINT
    precision: ClassVar[Precision] = Precision.FP32
    after: ClassVar[tuple[str, ...]] = ("freeze_weights", "split_precision_attention")
    conflicts: ClassVar[tuple[str, ...]] = ("promote_matmul_precision",)
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    gradients: ClassVar[bool] = True

    #: how the operands are split: fp16x3, bf16x3 or fp16
    method: str = "fp16x3"

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method is {self.method!r}; it must be one of {', '.join(METHODS)}")

    def variants(self, context: PassContext) -> Sequence[Pass]:
        return [replace(self, method=method) for method in reversed(METHODS) if _allowed(method, context)]

    def applicable(self, context: PassContext) -> str:
        if "float16" not in context.matrix_units:
            return f"{context.device} has no fp16 matrix units"
        if context.device.type == "cuda" and importlib.util.find_spec("triton") is None:
            return "Triton is not installed, and the kernel is written in it"
        if not _allowed(self.method, context):
            return f"{self.method} is not within the precision asked for"
        return ""

    def candidates(self, graph: fx.Graph, context: PassContext) -> Iterable[Candidate]:
        for node in graph.nodes:
            if node.target not in _LEFT:
                continue
            left, _ = _LEFT[node.target]
            a, b = (node.args[i].meta["val"] for i in (left, left + 1))
            sizes = (*a.shape, b.shape[-1])
            if not context.answers(node, self.answers):
                yield Candidate(node.name, "not labelled tensor_core_idle")
            elif a.dtype != torch.float32 or node.meta["val"].dtype != torch.float32:
                yield Candidate(node.name, f"operands are {str(a.dtype).removeprefix('torch.')}, not float32")
            elif a.device.type != context.device.type:
                yield Candidate(node.name, f"operands are on {a.device.type}, the graph on {context.device.type}")
            elif not all(isinstance(size, int) for size in sizes):
                yield Candidate(node.name, "sizes are symbolic")
            elif a.dim() == 3 and a.shape[0] > _MOST_BATCH:
                yield Candidate(node.name, f"{a.shape[0]} products are more than a grid has room for")
            elif min(sizes[-3:]) < _LEAST:
                yield Candidate(node.name, f"a side has {min(sizes[-3:])} elements: most of a tile would be padding")
            elif node.kwargs.get("beta", 1) != 1 or node.kwargs.get("alpha", 1) != 1:
                yield Candidate(node.name, "beta or alpha is not 1")
            elif self.method == "fp16" and (faster := self._slower_than_tf32(node, context)):
                own, theirs = (duration(1e3 * us) for us in faster)
                yield Candidate(node.name, f"cuBLAS takes {theirs} in TF32, this kernel {own}")
            else:
                yield Candidate(node.name)

    def rewrite(self, graph: fx.Graph, node: fx.Node, context: PassContext) -> None:
        left, adds = _LEFT[node.target]
        a, b = node.args[left], node.args[left + 1]
        assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
        with graph.inserting_before(node):
            product = self._product(graph, node, a, b, context)
            if adds and node.args[0] not in product.all_input_nodes:
                product = graph.call_function(aten.add.Tensor, (product, node.args[0]))
        node.replace_all_uses_with(product)
        graph.erase_node(node)

    def _slower_than_tf32(self, node: fx.Node, context: PassContext) -> tuple[float, float] | None:
        """Microseconds of this kernel and of cuBLAS, where the latter is faster at the same accuracy. `tf32_matmul`
        then has the product: every budget that allows fp16 allows it.
        """
        device = node.meta["val"].device
        product, choices = self._measured(node, context)
        own, theirs = choices.tile(product, device)[1], choices.tf32(product, device)
        return (own, theirs) if 0 < theirs < own else None

    def _measured(self, node: fx.Node, context: PassContext) -> tuple[tiling.Product, tiling.Choices]:
        args: Any = node.args
        left, _ = _LEFT[node.target]
        a, b = (args[i].meta["val"] for i in (left, left + 1))
        m, k = a.shape[-2:]
        product = tiling.Product(
            m,
            b.shape[-1],
            k,
            batch=a.shape[0] if a.dim() == 3 else 1,
            terms=1 if self.method == "fp16" else 3,
            block=block_of(k) if self.method != "fp16" else 0,
            bias=_bias_of(node) is not None,
        )
        return product, tiling.choices_in(context.cache)

    def _product(self, graph: fx.Graph, node: fx.Node, a: fx.Node, b: fx.Node, context: PassContext) -> fx.Node:
        """The product, by this project's own kernel or by cuBLAS; a bias [N] may be in it."""
        bias = _bias_of(node)
        m, k = a.meta["val"].shape[-2:]
        product, choices = self._measured(node, context)
        attention = _attention_behind(a, node) if product.terms == 3 else None
        if attention is not None:
            product = replace(product, block=attention.meta["val"].shape[-1])
        device = a.meta["val"].device
        tile, took = choices.tile(product, device)
        if self.method == "bf16x3":
            # Writing the parts, in a kernel of their own, at what Inductor's concatenation reaches, against writing
            # planes.
            library = choices.library(product, device) + _PARTS_US + m * k * product.batch * 6 / 1e6
            if library <= took + m * k * product.batch * 4 / 3e6:
                return self._parts(graph, a, b)
        if product.terms == 3:
            rows = f"rows{product.block}"
            operands = _written_split(graph, attention) if attention is not None else parts_of(graph, a, rows)
            operands += parts_of(graph, b, "columns")
            target: Any = torch.ops.fxopt.split_gemm.default
        else:
            operands = parts_of(graph, a, "once")
            operands += parts_of(graph, b, "columns once")
            target = torch.ops.fxopt.scaled_gemm.default
        given: tuple[Any, ...] = (*operands, bias if tile[3] <= 1 else None, list(tile))
        if tile[3] == 0 and operands[0] is not None and not is_constant(a):
            given += _counts(graph, operands[0], launch.needed_counts(m, product.n, tile))
        result = graph.call_function(target, given)
        return result if tile[3] <= 1 else graph.call_function(aten.sum.dim_IntList, (result, [-3]))

    def _parts(self, graph: fx.Graph, a: fx.Node, b: fx.Node) -> fx.Node:
        """The product by cuBLAS, over a K three times as long."""
        (wide_a,) = parts_of(graph, a, "parts")
        (wide_b,) = parts_of(graph, b, "columns parts")
        turned = graph.call_function(aten.permute.default, (wide_b, [1, 0] if a.meta["val"].dim() == 2 else [0, 2, 1]))
        target: Any = aten.mm.dtype if a.meta["val"].dim() == 2 else aten.bmm.dtype
        return graph.call_function(target, (wide_a, turned, torch.float32))


def _counts(graph: fx.Graph, like: fx.Node, size: int) -> tuple[fx.Node, int]:
    """The graph's zeros for programs to count in, and the first one that nobody has yet: one kernel makes them all."""
    size = math.ceil(size / 4) * 4  # so that each begins at an address that Triton takes for aligned
    zeros = graph.find_nodes(op="call_function", target=torch.ops.fxopt.zero_counts.default)
    if not zeros:
        return graph.call_function(torch.ops.fxopt.zero_counts.default, (like, size)), 0
    (node,) = zeros
    first: int = node.args[1]
    node.args = (node.args[0], first + size)
    return node, first


def _attention_behind(a: fx.Node, reader: fx.Node) -> fx.Node | None:
    """The split attention whose result, [batch, heads, length, head_dim], is the left operand [batch * length, heads *
    head_dim] as it lies in memory, if nobody else reads it and its heads can be blocks that share a scale.
    """
    node = a
    while set(node.users) <= {reader} and node.target is not SPLIT_ATTENTION:
        # These leave memory as it is, and so does a copy of what lies in order.
        if node.target not in _SAME_MEMORY and not (node.target is aten.clone.default and _in_order(node.args[0])):
            return None
        reader, node = node, node.args[0]  # type: ignore[assignment]
    value, heads = a.meta["val"], node.meta["val"]
    blocks = node.target is SPLIT_ATTENTION and heads.shape[-1] in _HEADS
    if not blocks or set(node.users) > {reader} or not _in_order(a) or value.dim() != 2:
        return None
    return node if value.shape == (heads.shape[0] * heads.shape[2], heads.shape[1] * heads.shape[3]) else None


def _in_order(node: Any) -> bool:
    value = node.meta["val"]
    return bool(value.is_contiguous()) and value.storage_offset() == 0


def _written_split(graph: fx.Graph, attention: fx.Node) -> list[fx.Node | None]:
    """The parts of an attention's result, a scale for each row of a head, from a kernel that writes them."""
    batch, heads, length, head_dim = attention.meta["val"].shape
    parts: list[fx.Node | None] = []
    with graph.inserting_before(attention):
        whole = graph.call_function(SPLIT_ATTENTION_SPLIT, attention.args)
        made = [whole]
        for i, width in enumerate((head_dim, head_dim, 1)):
            made.append(graph.call_function(operator.getitem, (whole, i)))
            made.append(graph.call_function(aten.view.default, (made[-1], [batch * length, heads, width])))
            parts.append(made[-1])
    for node in made:
        node.meta.update({key: attention.meta[key] for key in PROVENANCE_META if key in attention.meta})
    return parts


def _allowed(method: str, context: PassContext) -> bool:
    """Whether the precision asked for leaves room for the method's error."""
    budget = context.budget
    if method == "bf16x3":
        # For a number only: a class that allows TF32 has no use for what is slower and more accurate.
        return budget.max_rel_l2 is not None and budget.allows(Precision.TF32, _BF16X3_ERROR)
    return method == "fp16x3" or budget.allows(Precision.TF32, _FP16_ERROR)


def _bias_of(node: fx.Node) -> fx.Node | None:
    """What is added to the product, where the kernel can add it."""
    args: Any = node.args
    added = args[0] if len(args) > 2 else None
    if not isinstance(added, fx.Node):
        return None
    right = args[_LEFT[node.target][0] + 1]
    return added if _is_row(added.meta["val"], right.meta["val"].shape[-1]) else None


def _is_row(added: torch.Tensor, n: int) -> bool:
    """Whether the kernel can read it as N numbers beside each other; addmm takes one number and broadcast views too."""
    return tuple(added.shape) == (n,) and added.stride(0) == 1
