"""promote_matmul_precision: fp32 matrix products and attention on bf16 matrix units, fp32 everywhere else.

Answers tensor_core_idle. Each labelled product takes its operands in bf16 and accumulates in fp32 inside the
matrix unit; its result is cast back, so that softmax, normalisation, residual sums and every other pointwise chain
are computed in fp32. Casts are placed at the joint stage, where Inductor fuses an activation's cast into its producer,
so that it is stored in bf16, and freezing folds a weight's cast away. A value that goes from one product to the next
through views alone stays in bf16: bf16 -> fp32 -> bf16 is the identity; and a pool between products reads bf16.
Attention on CUDA goes to the kernel that torch itself picks for bf16 (flash or cuDNN), which was not on offer for fp32;
where that gives its result other strides, the one that is there takes bf16.

before                                   after
    y = addmm(bias, x, w)                    y16 = addmm(bf16(bias), bf16(x), bf16(w));  y = fp32(y16)
    return mm(x, w)                          return mm.dtype(bf16(x), bf16(w), fp32)                      on CUDA
    return addmm(bias, x, w)                 return mm.dtype([bf16(x) | 1], [bf16(w); bf16(bias); 0], fp32)

The last line is for results as wide as K or wider, of which fp32 is then written once and never read.

With gradients, the products of the backward are promoted as those of the forward are, and activations that only
products read are kept for it in bf16. A gradient that is a product itself is the fp32 accumulator on CUDA.

Refuses products that are not fp32, and anything but precision "bf16" (or a numeric error budget).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from fxopt.labels import Axis
from fxopt.precision import Precision
from fxopt.registry import Candidate, GraphPass, Pass, PassContext, Stage
from passes.bf16_casts import CAST, REARRANGING, SPLITS, dtype_of, move_before_pools, narrow, narrow_mask
from passes.views import strided_alike

aten = torch.ops.aten

#: matrix-product operators, and the positions of their tensor operands
OPERANDS: dict[Any, tuple[int, ...]] = {
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.addmm.default: (0, 1, 2),
    aten.baddbmm.default: (0, 1, 2),
    aten.convolution.default: (0, 1, 2),
    aten._scaled_dot_product_efficient_attention.default: (0, 1, 2, 3),
    aten._scaled_dot_product_flash_attention_for_cpu.default: (0, 1, 2),
    # the gradients of those that are not products themselves
    aten.convolution_backward.default: (0, 1, 2),
    aten._scaled_dot_product_efficient_attention_backward.default: (0, 1, 2, 3, 4, 5),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (0, 1, 2, 3, 4),
}
#: positions of outputs that stay fp32 by the operator's own contract (log-sum-exp of the softmax)
_FP32_OUTPUTS: dict[Any, set[int]] = {
    aten._scaled_dot_product_efficient_attention.default: {1},
    aten._scaled_dot_product_flash_attention_for_cpu.default: {1},
}
#: position of an operand that is added to the scores and may hold float32's least number as a mask
_MASK: dict[Any, int] = {
    aten.baddbmm.default: 0,
    aten.addmm.default: 0,
    aten._scaled_dot_product_efficient_attention.default: 3,
    aten._scaled_dot_product_efficient_attention_backward.default: 4,
}
_EFFICIENT_ATTENTION: Any = aten._scaled_dot_product_efficient_attention.default
_FUSED_ATTENTION: set[Any] = {
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    _EFFICIENT_ATTENTION,
}
#: products that can give their fp32 accumulator as it is, on CUDA alone (`addmm.dtype`, which Inductor does not tune,
#: is left out)
_FP32_RESULT: dict[Any, Any] = {
    aten.mm.default: aten.mm.dtype,
    aten.addmm.default: aten.mm.dtype,
    aten.bmm.default: aten.bmm.dtype,
    aten.baddbmm.default: aten.bmm.dtype,
}


@dataclass(frozen=True)
class PromoteMatmulPrecision(GraphPass):
    """fp32 matrix products and attention on bf16 matrix units, fp32 everywhere else."""

    name: ClassVar[str] = "promote_matmul_precision"
    answers: ClassVar[frozenset[Axis]] = frozenset({Axis.TENSOR_CORE_IDLE})
    stage: ClassVar[Stage] = Stage.JOINT
    precision: ClassVar[Precision] = Precision.BF16
    after: ClassVar[tuple[str, ...]] = ("freeze_weights",)
    enables: ClassVar[tuple[str, ...]] = ("gemm_epilogue",)
    gradients: ClassVar[bool] = True
    conflicts: ClassVar[tuple[str, ...]] = (
        "split_precision_gemm",
        "split_precision_attention",
        "split_precision_conv",
    )

    #: on CUDA, matrix products give fp32 to whatever takes fp32, and not only to the graph's outputs
    fp32_outputs: bool = False

    def variants(self, context: PassContext) -> Sequence[Pass]:
        """Both ways: fp32 spares a result its rounding to bf16, and takes twice the memory traffic."""
        return (self, replace(self, fp32_outputs=not self.fp32_outputs)) if context.device.type == "cuda" else (self,)

    def applicable(self, context: PassContext) -> str:
        if "bfloat16" not in context.matrix_units:
            return f"{context.device} has no bf16 matrix units"
        if context.budget.max_rel_l2 is not None and context.budget.max_rel_l2 < 1e-3:
            return "bf16 products are off by more than the error asked for"
        return ""

    def candidates(self, graph: fx.Graph, context: PassContext) -> Iterable[Candidate]:
        for node in graph.nodes:
            target: Any = node.target
            if target not in OPERANDS:
                continue
            if not context.answers(node, self.answers):
                yield Candidate(node.name, "not labelled tensor_core_idle")
                continue
            operands = [node.args[i] for i in OPERANDS[target] if i < len(node.args)]
            dtypes = {dtype_of(operand) for operand in operands if isinstance(operand, fx.Node)}
            if dtypes != {torch.float32}:
                found = ", ".join(sorted(str(d).replace("torch.", "") for d in dtypes))
                yield Candidate(node.name, f"operands are {found}, not float32")
            else:
                yield Candidate(node.name)

    def rewrite(self, graph: fx.Graph, node: fx.Node, context: PassContext) -> None:
        if node.target is _EFFICIENT_ATTENTION and self._dispatch_attention(graph, node):
            return
        if context.device.type == "cuda" and node.target in _FP32_RESULT and self._gives_fp32(node, context):
            _give_fp32(graph, node)
            return
        if context.device.type == "cuda" and node.target is aten.convolution.default and node.args[2] is not None:
            _add_bias_in_fp32(graph, node)
        args: list[Any] = list(node.args)
        target: Any = node.target
        with graph.inserting_before(node):
            for i in OPERANDS[target]:
                if i < len(args) and isinstance(args[i], fx.Node):
                    args[i] = narrow_mask(graph, args[i]) if i == _MASK.get(target) else narrow(graph, args[i])
            product = graph.call_function(target, tuple(args), dict(node.kwargs))
            fp32_outputs = _FP32_OUTPUTS.get(target, set())
            if not isinstance(node.meta["val"], torch.Tensor):
                for user in list(node.users):
                    index: Any = user.args[1]
                    if user.target is not operator.getitem:
                        raise RuntimeError(f"{node.name}: unexpected use {user.name} of a tuple of outputs")
                    part = graph.call_function(operator.getitem, (product, index))
                    if index not in fp32_outputs and dtype_of(user) == torch.float32:
                        part = graph.call_function(CAST, (part, torch.float32))
                    user.replace_all_uses_with(part)
                    graph.erase_node(user)
            else:
                node.replace_all_uses_with(graph.call_function(CAST, (product, torch.float32)))
        graph.erase_node(node)

    def finish(self, graph: fx.Graph, context: PassContext) -> None:
        move_before_pools(graph)

    def _gives_fp32(self, node: fx.Node, context: PassContext) -> bool:
        """Whether a product gives fp32: to the graph's outputs, which are fp32; elsewhere as the option says, unless
        all that comes of it is rounded for another product after pointwise work, which reads bf16 as well.
        """
        if _is_output(node):
            return True
        return self.fp32_outputs and not self._is_rounded(node, context, set())

    def _is_rounded(self, node: fx.Node, context: PassContext, seen: set[fx.Node]) -> bool:
        if node in seen:
            return True
        seen.add(node)
        for user in node.users:
            target: Any = user.target
            if target in OPERANDS:
                rounded = context.answers(user, self.answers)
            elif target is CAST:
                rounded = user.args[1] == torch.bfloat16
            else:
                rounded = _is_elementwise(target) and self._is_rounded(user, context, seen)
            if not rounded:
                return False
        return bool(node.users)

    def _dispatch_attention(self, graph: fx.Graph, node: fx.Node) -> bool:
        """Replace fp32's only fused attention by the one that torch picks for bf16; False where they are not alike."""
        arguments = dict(zip(("q", "k", "v", "bias", "log_sum_exp", "dropout", "causal"), node.args, strict=False))
        causal, bias = bool(arguments.get("causal", False)), arguments["bias"]
        takes_only_output = all(u.target is operator.getitem and u.args[1] == 0 for u in node.users)
        if not takes_only_output or arguments.get("dropout", 0.0) or (causal and bias is not None):
            return False
        operands: list[Any] = [arguments[name] for name in "qkv"] + ([bias] if bias is not None else [])
        picked = _bf16_attention([operand.meta["val"] for operand in operands], causal, node.kwargs.get("scale"))
        if picked is None:
            return False
        (made,) = picked.output_node().all_input_nodes
        if not all(strided_alike(made.meta["val"], user.meta["val"]) for user in node.users):
            return False  # the graph may give them on to its caller
        with graph.inserting_before(node):
            inputs = (n for n in picked.nodes if n.op == "placeholder")
            narrowed = [narrow(graph, operand) for operand in operands[:3]]
            narrowed += [narrow_mask(graph, operand) for operand in operands[3:]]
            values = dict(zip(inputs, narrowed, strict=True))
            result: Any = graph.graph_copy(picked, values)
            wide = graph.call_function(CAST, (result, torch.float32))
        for user in list(node.users):
            user.replace_all_uses_with(wide)
            graph.erase_node(user)
        graph.erase_node(node)
        return True


def _is_elementwise(target: Any) -> bool:
    """Whether an operator takes each element by itself, and so sums up no rounding errors."""
    moves = target in REARRANGING or target in SPLITS or target is operator.getitem
    return moves or torch.Tag.pointwise in getattr(target, "tags", ())


def _is_output(node: fx.Node) -> bool:
    """Whether nothing takes a node's value but the graph's output, seen through views."""
    return bool(node.users) and all(
        user.op == "output" or (user.target in REARRANGING and _is_output(user)) for user in node.users
    )


def _give_fp32(graph: fx.Graph, node: fx.Node) -> None:
    """Replace a product by one of bf16 operands that gives fp32; what is added to it stays fp32."""
    *added, a, b = node.args
    alpha, beta = node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1)
    with graph.inserting_before(node):
        if _is_output(node) and _bias_fits(node):
            a, b = _with_bias_inside(graph, a, b, added.pop())
        else:
            a, b = narrow(graph, a), narrow(graph, b)
        result = graph.call_function(_FP32_RESULT[node.target], (a, b, torch.float32))
        if alpha != 1:
            result = graph.call_function(aten.mul.Tensor, (result, alpha))
        if added and beta != 0:
            term = added[0] if beta == 1 else graph.call_function(aten.mul.Tensor, (added[0], beta))
            result = graph.call_function(aten.add.Tensor, (result, term))
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _bias_fits(node: fx.Node) -> bool:
    """Whether `node` is x @ w + bias, and so wide that to add the bias afterwards would cost more than a longer sum."""
    if node.target is not aten.addmm.default or node.kwargs:
        return False
    operands: Any = node.args
    bias, w = (operands[i].meta["val"] for i in (0, 2))
    inner, wide = w.shape
    static = isinstance(inner, int) and isinstance(wide, int)
    return static and 1 < inner <= wide and bias.shape == (wide,)


def _with_bias_inside(graph: fx.Graph, x: Any, w: Any, bias: Any) -> tuple[fx.Node, fx.Node]:
    """Operands in bf16 whose product is x @ w + bias: [x | 1 ... 1] @ [w; bias; 0 ... 0].

    The product then gives the final fp32 result, where a kernel of its own would read and write all of it once more.
    Eight columns, so that rows stay aligned to 16 bytes, as cuBLAS's fast kernels want them.
    """
    is_transposed = w.meta["val"].stride(0) == 1  # a linear layer's weight, whose layout is kept
    w, row = narrow(graph, w), graph.call_function(aten.unsqueeze.default, (narrow(graph, bias), int(is_transposed)))
    if is_transposed:
        w = graph.call_function(aten.permute.default, (w, [1, 0]))
    w = graph.call_function(aten.cat.default, ([w, row], int(is_transposed)))
    w = graph.call_function(aten.constant_pad_nd.default, (w, [0, 7] if is_transposed else [0, 0, 0, 7], 0.0))
    if is_transposed:
        w = graph.call_function(aten.permute.default, (w, [1, 0]))
    return graph.call_function(aten.constant_pad_nd.default, (narrow(graph, x), [0, 8], 1.0)), w


def _add_bias_in_fp32(graph: fx.Graph, node: fx.Node) -> None:
    """Take a convolution's bias out of it, in fp32: on CUDA, Inductor adds it in a kernel of its own all the same."""
    bias: Any = node.args[2]
    channels = [1, -1, *[1] * (node.meta["val"].dim() - 2)]
    node.update_arg(2, None)
    with graph.inserting_after(node):
        spread = graph.call_function(aten.view.default, (bias, channels))
    with graph.inserting_after(spread):
        biased = graph.call_function(aten.add.Tensor, (node, spread))
    node.replace_all_uses_with(biased, delete_user_cb=lambda user: user is not biased)


def _bf16_attention(operands: list[Any], causal: bool, scale: Any) -> fx.Graph | None:
    """The operators that scaled_dot_product_attention becomes for these operands in bf16, or None.

    torch decides by device, shapes and strides, so it is asked, on fake tensors, rather than second-guessed.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    def attention(q: Any, k: Any, v: Any, bias: Any = None) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, bias, is_causal=causal, scale=scale)

    try:
        with operands[0].fake_mode:
            narrow = [torch.ops.prims.convert_element_type.default(value, torch.bfloat16) for value in operands]
            traced = make_fx(attention)(*narrow)
    except (
        Exception
    ):  # a torch without these kernels, or without a device to ask: the same operator in bf16 still works
        return None
    targets = {n.target for n in traced.graph.nodes if n.op == "call_function"}
    # The unfused form is no gain over the fused one that is there.
    return traced.graph if targets & _FUSED_ATTENTION else None
