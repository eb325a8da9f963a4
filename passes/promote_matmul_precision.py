"""promote_matmul_precision: fp32 matrix products and attention on bf16 matrix units, fp32 everywhere else.

Answers tensor_core_idle. Each labelled product takes its operands in bf16 and accumulates in fp32 inside the
matrix unit; its result is cast back, so that softmax, normalisation, residual sums and every other pointwise chain
stay in fp32. Casts are placed at the joint stage, where Inductor fuses an activation's cast into its producer and
freezing folds a weight's cast away. A value that goes from one product to the next through views alone stays in
bf16: bf16 -> fp32 -> bf16 is the identity. Attention on CUDA goes to the kernel that torch itself picks for bf16
(flash or cuDNN), which was not on offer for fp32.

before                                   after
    y = addmm(bias, x, w)                    y16 = addmm(bf16(bias), bf16(x), bf16(w));  y = fp32(y16)

Refuses products that are not fp32, and anything but precision "bf16" (or a numeric error budget).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxopt.labels import Axis
from fxopt.registry import Candidate, GraphPass, PassContext, Stage
from fxopt.verify import Precision

aten = torch.ops.aten
_CAST = torch.ops.prims.convert_element_type.default

#: matrix-product operators, and the positions of their tensor operands
OPERANDS: dict[Any, tuple[int, ...]] = {
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.addmm.default: (0, 1, 2),
    aten.baddbmm.default: (0, 1, 2),
    aten.convolution.default: (0, 1, 2),
    aten._scaled_dot_product_efficient_attention.default: (0, 1, 2, 3),
    aten._scaled_dot_product_flash_attention_for_cpu.default: (0, 1, 2),
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
}
_EFFICIENT_ATTENTION: Any = aten._scaled_dot_product_efficient_attention.default
_FUSED_ATTENTION: set[Any] = {
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    _EFFICIENT_ATTENTION,
}
#: operators that only rearrange one tensor (operand 0), so that a cast commutes with them exactly
VIEWS: frozenset[Any] = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.permute.default,
        aten.transpose.int,
        aten.t.default,
        aten.expand.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.slice.Tensor,
        aten.select.int,
        aten.alias.default,
        aten.clone.default,
    }
)
_SPLITS: set[Any] = {aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.chunk.default}


def _dtype(node: Any) -> torch.dtype | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.dtype if isinstance(value, torch.Tensor) else None


@dataclass(frozen=True)
class PromoteMatmulPrecision(GraphPass):
    """fp32 matrix products and attention on bf16 matrix units, fp32 everywhere else."""

    name: ClassVar[str] = "promote_matmul_precision"
    answers: ClassVar[frozenset[Axis]] = frozenset({Axis.TENSOR_CORE_IDLE})
    stage: ClassVar[Stage] = Stage.JOINT
    precision: ClassVar[Precision] = Precision.BF16
    after: ClassVar[tuple[str, ...]] = ("freeze_weights",)

    def applicable(self, context: PassContext) -> str:
        if "bfloat16" not in context.matrix_units:
            return f"{context.device} has no bf16 matrix units"
        if context.grad:
            return "gradients are on: this pass rewrites inference graphs only"
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
            dtypes = {_dtype(operand) for operand in operands if isinstance(operand, fx.Node)}
            if dtypes != {torch.float32}:
                found = ", ".join(sorted(str(d).replace("torch.", "") for d in dtypes))
                yield Candidate(node.name, f"operands are {found}, not float32")
            else:
                yield Candidate(node.name)

    def rewrite(self, graph: fx.Graph, node: fx.Node, context: PassContext) -> None:
        if node.target is _EFFICIENT_ATTENTION and self._dispatch_attention(graph, node):
            return
        args: list[Any] = list(node.args)
        target: Any = node.target
        with graph.inserting_before(node):
            for i in OPERANDS[target]:
                if i < len(args) and isinstance(args[i], fx.Node):
                    args[i] = _narrow_mask(graph, args[i]) if i == _MASK.get(target) else _narrow(graph, args[i])
            product = graph.call_function(target, tuple(args), dict(node.kwargs))
            fp32_outputs = _FP32_OUTPUTS.get(target, set())
            if not isinstance(node.meta["val"], torch.Tensor):
                for user in list(node.users):
                    index: Any = user.args[1]
                    if user.target is not operator.getitem:
                        raise RuntimeError(f"{node.name}: unexpected use {user.name} of a tuple of outputs")
                    part = graph.call_function(operator.getitem, (product, index))
                    if index not in fp32_outputs and _dtype(user) == torch.float32:
                        part = graph.call_function(_CAST, (part, torch.float32))
                    user.replace_all_uses_with(part)
                    graph.erase_node(user)
            else:
                node.replace_all_uses_with(graph.call_function(_CAST, (product, torch.float32)))
        graph.erase_node(node)

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
        with graph.inserting_before(node):
            inputs = (n for n in picked.nodes if n.op == "placeholder")
            narrow = [_narrow(graph, operand) for operand in operands[:3]]
            narrow += [_narrow_mask(graph, operand) for operand in operands[3:]]
            values = dict(zip(inputs, narrow, strict=True))
            result: Any = graph.graph_copy(picked, values)
            wide = graph.call_function(_CAST, (result, torch.float32))
        for user in list(node.users):
            user.replace_all_uses_with(wide)
            graph.erase_node(user)
        graph.erase_node(node)
        return True


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


def _narrow(graph: fx.Graph, value: Any) -> fx.Node:
    """`value` in bf16: its bf16 origin seen through the same views where there is one, else a cast (one a value)."""
    through = _origin(graph, value)
    if through is not None:
        return through
    for user in value.users:
        if user.target is _CAST and user.args[1] == torch.bfloat16 and _comes_before(user, graph):
            return user
    return graph.call_function(_CAST, (value, torch.bfloat16))


def _narrow_mask(graph: fx.Graph, value: Any) -> fx.Node:
    """`value` in bf16, finite numbers kept finite: float32's least would become -inf, and a row of those is NaN."""
    if value.meta["val"].dim() < 2 and value.op in ("placeholder", "get_attr"):
        return _narrow(graph, value)  # a bias
    bound = torch.finfo(torch.bfloat16).max
    for low in value.users:  # one clamp a mask, whatever the number of layers that add it
        if low.target is not aten.clamp_min.default or low.args[1] != -bound:
            continue
        for chosen in (user for high in low.users for user in high.users):
            for cast in chosen.users:
                if chosen.target is aten.where.self and cast.target is _CAST and _comes_before(cast, graph):
                    return cast
    # Not aten.clamp: Inductor decomposes that before the joint graph, and has no lowering for one that comes later.
    clamped = graph.call_function(aten.clamp_min.default, (value, -bound))
    clamped = graph.call_function(aten.clamp_max.default, (clamped, bound))
    finite = graph.call_function(aten.where.self, (graph.call_function(aten.isinf.default, (value,)), value, clamped))
    return graph.call_function(_CAST, (finite, torch.bfloat16))


def _comes_before(node: fx.Node, graph: fx.Graph) -> bool:
    """Whether `node` is already computed at the insertion point."""
    point = getattr(graph._insert, "__self__", None)
    return point is not None and node < point


def _origin(graph: fx.Graph, value: Any) -> Any:
    """The bf16 tensor that `value` merely widens and views, viewed the same way; None if it is computed in fp32."""
    if value.target is _CAST and value.args[1] == torch.float32:
        source = value.args[0]
        is_cast_back = isinstance(source, fx.Node) and _is_narrow_product(source)
        return source if is_cast_back else None
    if value.target in VIEWS and isinstance(value.args[0], fx.Node):
        source = _origin(graph, value.args[0])
        return None if source is None else graph.call_function(value.target, (source, *value.args[1:]), value.kwargs)
    if value.target is operator.getitem and getattr(value.args[0], "target", None) in _SPLITS:
        split = value.args[0]
        source = _origin(graph, split.args[0])
        if source is None:
            return None
        parts = graph.call_function(split.target, (source, *split.args[1:]), split.kwargs)
        return graph.call_function(operator.getitem, (parts, value.args[1]))
    return None


def _is_narrow_product(node: Any) -> bool:
    """Whether `node` is bf16: known to be, or a product of this pass, which has no value yet."""
    if _dtype(node) is not None:
        return _dtype(node) == torch.bfloat16
    product = node.args[0] if node.target is operator.getitem else node
    return product.target in OPERANDS and "val" not in product.meta
