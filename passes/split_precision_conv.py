"""split_precision_conv: fp32 convolutions on fp16 tensor cores, at fp32's accuracy.

Answers tensor_core_idle and compute_bound on convolutions. Each fp32 operand becomes two fp16 planes, in channels-last
order, with a power of two for each pixel (over its channels) and each output channel; three fp16 products with fp32
sums give the convolution (Ootomo and Yokota, 2022). The split (`passes.split_products`) is graph code, so that an
activation's is fused into what produces it, and a frozen weight's is folded. What the planes cannot hold (infinities,
NaN, a row of very mixed sizes) is marked by the scale 0, and computed in fp32 by the kernel itself: no value of an
input has to be known beforehand.

before                                    after
    y = convolution(x, w, bias, ...)          xh, xl, xs = split of x's pixels
                                              wh, wl, ws = split of w's output channels
                                              y = fxopt.split_conv(xh, xl, xs, wh, wl, ws, bias, ...), in y's order

`terms` = 1 makes one product of operands rounded to fp16's 11 bits, which is TF32's accuracy at twice its rate.
Refuses groups, transposed and 3-d convolutions, input channels that are no multiple of 16, and gradients.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from fxopt.labels import Axis
from fxopt.precision import Precision
from fxopt.registry import Candidate, GraphPass, Pass, PassContext, Stage
from fxopt.torch_api.tracing import graph_of
from passes import split_products
from passes.kernels import tiling
from profiler_core.quantities import duration

aten = torch.ops.aten
#: weight of a low plane against its high one
_LOW = 2.0**-11


def split_rows(rows: torch.Tensor, terms: int = 3) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(high, low, scale) of fp32 `rows` along their last dimension, as `split_products` has them.

    high, low: fp16 bits as int16, of the rows' shape and contiguous; scale: a power of two a row, [..., 1]; 0 where
    high and low are the halves of a's own bits. With one term there is no low plane and no 0: what fp16 cannot hold at
    the row's scale is rounded as fp16 rounds it.
    """
    if terms == 1:
        value, scale = split_products.rounded_once(rows)
        return _contiguous(value.view(torch.int16)), None, _contiguous(scale)
    high, low, scale = split_products.split(rows)
    return _contiguous(high), _contiguous(low), _contiguous(scale)


def _contiguous(value: torch.Tensor) -> torch.Tensor:
    return aten.clone.default(value, memory_format=torch.contiguous_format)


def _out_size(size: int, window: int, stride: int, padding: int, dilation: int) -> int:
    return (size + 2 * padding - dilation * (window - 1) - 1) // stride + 1


torch.library.define(
    "fxopt::split_conv",
    "(Tensor x_high, Tensor? x_low, Tensor x_scale, Tensor w_high, Tensor? w_low, Tensor w_scale, Tensor? bias,"
    " SymInt[] window, SymInt[] stride, SymInt[] padding, SymInt[] dilation) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def split_conv(
    x_high: torch.Tensor,
    x_low: torch.Tensor | None,
    x_scale: torch.Tensor,
    w_high: torch.Tensor,
    w_low: torch.Tensor | None,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None,
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> torch.Tensor:
    """2-d convolution of operands split by `split_rows`, fp32 [batch, out_height, out_width, outputs].

    x: [batch, height, width, channels], a scale a pixel; w: [outputs, window places times channels], a scale an output.
    All contiguous. This is the kernel's arithmetic on the CPU, for tests.
    """
    out = _empty(x_high, w_high, window, stride, padding, dilation)
    heights, widths = out.shape[1:3]
    outputs, channels = w_high.shape[0], x_high.shape[-1]
    border = (0, 0, padding[1], padding[1], padding[0], padding[0])
    pad = torch.nn.functional.pad
    high = pad(x_high.view(torch.float16).float(), border)
    low = high if x_low is None else pad(x_low.view(torch.float16).float(), border)
    scale = pad(x_scale, border, value=1.0)
    w = [(p if p is not None else w_high).view(torch.float16).float() for p in (w_high, w_low)]
    per_place = [p.reshape(outputs, -1, channels).permute(1, 2, 0) for p in w]
    total, exact = torch.zeros_like(out), torch.zeros_like(out)
    marked = (w_scale.reshape(-1) == 0).expand_as(out)
    fp32 = x_low is not None and w_low is not None and bool((x_scale == 0).any() or (w_scale == 0).any())
    if fp32:
        x_true = pad(split_products.joined(x_high, x_low, x_scale), border)  # type: ignore[arg-type]
        w_true = split_products.joined(w_high, w_low, w_scale).reshape(outputs, -1, channels).permute(1, 2, 0)  # type: ignore[arg-type]
    for place in range(window[0] * window[1]):
        top, left = place // window[1] * dilation[0], place % window[1] * dilation[1]
        rows = slice(top, top + (heights - 1) * stride[0] + 1, stride[0])
        cols = slice(left, left + (widths - 1) * stride[1] + 1, stride[1])
        xh, xl, s = (t[:, rows, cols] for t in (high, low, scale))
        wh, wl = (p[place] for p in per_place)
        part = xh @ wh if x_low is None else (xl @ wh + xh @ wl) * _LOW + xh @ wh
        total += part / torch.where(s == 0, 1.0, s)
        if fp32:
            exact += x_true[:, rows, cols] @ w_true[place]
            marked = marked | (s == 0)
    total = total / torch.where(w_scale == 0, 1.0, w_scale).reshape(-1)
    result = torch.where(marked, exact, total) if fp32 else total
    return result if bias is None else result + bias


torch.library.impl("fxopt::split_conv", "CPU", split_conv)


def _empty(
    x: torch.Tensor,
    w: torch.Tensor,
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> torch.Tensor:
    heights, widths = (_out_size(x.shape[1 + i], window[i], stride[i], padding[i], dilation[i]) for i in (0, 1))
    return x.new_empty((x.shape[0], heights, widths, w.shape[0]), dtype=torch.float32)


@torch.library.impl("fxopt::split_conv", "Meta")
def _(x_high, x_low, x_scale, w_high, w_low, w_scale, bias, window, stride, padding, dilation):
    return _empty(x_high, w_high, window, stride, padding, dilation)


@torch.library.impl("fxopt::split_conv", "CUDA")
def _(x_high, x_low, x_scale, w_high, w_low, w_scale, bias, window, stride, padding, dilation):
    from passes.kernels import split_conv as triton_kernel

    out = _empty(x_high, w_high, window, stride, padding, dilation)
    x, w = (x_high, x_low, x_scale), (w_high, w_low, w_scale)
    triton_kernel.launch(x, w, bias, out, window, stride, padding, dilation)
    return out


@dataclass(frozen=True)
class SplitPrecisionConv(GraphPass):
    """fp32 convolutions on fp16 tensor cores, at fp32's accuracy."""

    name: ClassVar[str] = "split_precision_conv"
    answers: ClassVar[frozenset[Axis]] = frozenset({Axis.TENSOR_CORE_IDLE, Axis.COMPUTE_BOUND})
    stage: ClassVar[Stage] = Stage.JOINT
    precision: ClassVar[Precision] = Precision.FP32
    after: ClassVar[tuple[str, ...]] = ("freeze_weights",)
    before: ClassVar[tuple[str, ...]] = ("channels_last", "promote_matmul_precision")
    conflicts: ClassVar[tuple[str, ...]] = ("promote_matmul_precision",)
    devices: ClassVar[tuple[str, ...]] = ("cuda",)

    #: fp16 products a convolution: 3 for fp32's accuracy, 1 for TF32's
    terms: int = 3

    def variants(self, context: PassContext) -> Sequence[Pass]:
        """One product first, where the budget may bear it: the measured error decides."""
        return (replace(self, terms=1), self) if context.budget.allows(Precision.TF32, 1e-3) else (self,)

    def applicable(self, context: PassContext) -> str:
        if "float16" not in context.matrix_units:
            return f"{context.device} has no fp16 matrix units"
        if context.device.type == "cuda" and importlib.util.find_spec("triton") is None:
            return "Triton is not installed, and the kernel is written in it"
        if context.grad:
            return "gradients are on: the kernel has no backward"
        if context.dynamic:
            return "sizes are symbolic: the kernel is chosen by size"
        if self.terms == 1 and not context.budget.allows(Precision.TF32):
            return "one product has TF32's accuracy, and fp32's was asked for"
        return ""

    def candidates(self, graph: fx.Graph, context: PassContext) -> Iterable[Candidate]:
        for node in graph.nodes:
            if node.target is not aten.convolution.default:
                continue
            args: Any = node.args
            x, w, bias, *_, transposed, _, groups = args
            operands = [v.meta.get("val") for v in (x, w, bias) if v is not None]
            out: Any = node.meta.get("val")
            if not context.answers(node, self.answers):
                yield Candidate(node.name, "not labelled tensor_core_idle or compute_bound")
            elif not all(isinstance(v, torch.Tensor) and v.layout is torch.strided for v in (*operands, out)):
                yield Candidate(node.name, "an operand is no plain tensor")
            elif transposed or out.dim() not in (3, 4):
                yield Candidate(node.name, "transposed, or over more than two dimensions")
            elif groups != 1:
                yield Candidate(node.name, f"it has {groups} groups")
            elif any(v.dtype != torch.float32 for v in operands):
                yield Candidate(node.name, "an operand is not float32")
            elif any(v.device.type not in self.devices or v.device != out.device for v in operands):
                yield Candidate(node.name, "an operand is not on the graph's device")
            elif operands[0].shape[1] % 16:
                yield Candidate(node.name, f"its {operands[0].shape[1]} input channels are no multiple of 16")
            elif any(not 0 < v.numel() < 2**31 for v in (*operands, out)):
                yield Candidate(node.name, "an operand is empty, or too large for offsets of 32 bits")
            elif self.terms == 1 and (faster := _slower_than_tf32(node, context)):
                own, theirs = (duration(1e3 * us) for us in faster)
                yield Candidate(node.name, f"cuDNN takes {theirs} in TF32, this kernel {own}")
            else:
                yield Candidate(node.name)

    def rewrite(self, graph: fx.Graph, node: fx.Node, context: PassContext) -> None:
        args: Any = node.args
        x, w, bias, *_ = args
        value = w.meta["val"]
        one = value.dim() == 3  # a 1-d convolution is a 2-d one of height 1
        window = [1, value.shape[2]] if one else list(value.shape[2:])
        stride, padding, dilation = _geometry(node)

        def pixels(x: torch.Tensor) -> Any:
            x = aten.unsqueeze.default(x, 2) if one else x
            return split_rows(aten.permute.default(x, [0, 2, 3, 1]), self.terms)

        def outputs(w: torch.Tensor) -> Any:
            w = aten.unsqueeze.default(w, 2) if one else w
            w = _contiguous(aten.permute.default(w, [0, 2, 3, 1]))
            return split_rows(aten.view.default(w, [w.shape[0], w[0].numel()]), self.terms)

        strides = node.meta["val"].stride()

        def ordered(y: torch.Tensor) -> Any:
            y = aten.permute.default(y, [0, 3, 1, 2])
            y = aten.squeeze.dim(y, 2) if one else y
            # In the strides that the graph's next nodes were traced with; Inductor makes no copy of it.
            return y if y.stride() == strides else _contiguous(y)

        with graph.inserting_before(node):
            planes = [
                *split_products.parts_of(graph, x, f"pixels of {self.terms}", pixels),
                *split_products.parts_of(graph, w, f"outputs of {self.terms}", outputs),
            ]
            target: Any = torch.ops.fxopt.split_conv.default
            operands = (*planes, bias)
            result = graph.call_function(target, (*operands, window, stride, padding, dilation))
            fakes = [None if operand is None else operand.meta["val"] for operand in operands]
            result.meta["val"] = target(*fakes, window, stride, padding, dilation)
            (y,) = _emit(graph, ordered, result)
        assert y is not None
        node.replace_all_uses_with(y)
        graph.erase_node(node)


def _geometry(node: fx.Node) -> list[list[int]]:
    """Stride, padding and dilation in two dimensions; a 1-d convolution is a 2-d one of height 1."""
    args: Any = node.args
    one = args[1].meta["val"].dim() == 3
    return [[fill, *list(g)] if one else _pair(g) for g, fill in zip(args[3:6], (1, 0, 1), strict=True)]


def _slower_than_tf32(node: fx.Node, context: PassContext) -> tuple[float, float] | None:
    """Microseconds of one product by this kernel and of cuDNN, where the latter is faster at the same accuracy.
    `tf32_matmul` then has the convolution: every budget that allows one product allows it.
    """
    args: Any = node.args
    x, w = (tuple(v.meta["val"].shape) for v in args[:2])
    if not all(isinstance(size, int) for size in (*x, *w)):
        return None
    if len(x) == 3:
        x, w = (*x[:2], 1, x[2]), (*w[:2], 1, w[2])
    stride, padding, dilation = ((a, b) for a, b in _geometry(node))
    choices = tiling.choices_in(context.cache)
    of = tiling.Convolution(x, w, stride, padding, dilation)
    own, theirs = choices.convolution(of, node.meta["val"].device)
    return (own, theirs) if 0 < theirs < own else None


def _pair(values: Any) -> list[int]:
    return list(values) * (2 if len(values) == 1 else 1)


def _emit(graph: fx.Graph, fn: Any, *nodes: fx.Node) -> list[fx.Node | None]:
    """The operators that `fn` calls, as nodes at the graph's insertion point; their results."""
    traced = graph_of(fn, *(node.meta["val"] for node in nodes))
    inputs = traced.find_nodes(op="placeholder")
    made: Any = graph.graph_copy(traced, dict(zip(inputs, nodes, strict=True)))
    return list(made) if isinstance(made, (list, tuple)) else [made]
