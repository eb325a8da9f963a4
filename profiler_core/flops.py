"""Floating-point operations of one FX node, by formula; ``profiler_core.cost`` says what is counted how."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import fx

from profiler_core.shapes import (
    argument,
    hint,
    name_of,
    numel,
    on_meta,
    operator_of,
    packet_name,
    target_name,
    tensors,
    value_on_meta,
)

__all__ = ["flops", "is_matrix_product"]

# Read from these only what is fetched; the table is the first argument.
GATHERS = {
    "aten.embedding",
    "aten.index",
    "aten._unsafe_index",
    "aten.gather",
    "aten.index_select",
    "aten.take",
}
# In-place scatters: name -> position of the source, whose size bounds what is written to the first argument.
SCATTERS_IN_PLACE = {
    "aten.index_put_": 2,
    "aten._index_put_impl_": 2,
    "aten.scatter_": 3,
    "aten.scatter_add_": 3,
    "aten.index_copy_": 3,
    "aten.index_add_": 3,
    "inductor._unsafe_index_put_": 2,
}


_MOVES = GATHERS | {
    "aten.clone",
    "aten.copy_",
    "aten.copy",
    "aten.cat",
    "aten.stack",
    "aten.constant_pad_nd",
    "aten.full",
    "aten.full_like",
    "aten.fill",
    "aten.fill_",
    "aten.zero_",
    "aten.zeros",
    "aten.zeros_like",
    "aten.ones",
    "aten.ones_like",
    "aten.new_zeros",
    "aten.new_ones",
    "aten.new_full",
    "aten.scalar_tensor",
    "aten.arange",
    "aten.repeat",
    "aten.reshape",
    "aten.flip",
    "aten.roll",
    "aten.lift_fresh_copy",
    "aten.slice_scatter",
    "aten.select_scatter",
    "aten.index_put",
    "aten._unsafe_index_put",
    "aten.scatter",
    "prims.iota",
    "prims.inductor_force_stride_order",
    "mkldnn._reorder_linear_weight",
    "mkldnn._reorder_convolution_weight",
}
_POINTWISE = {
    "aten._to_copy",
    "aten.native_dropout",
    "aten.bernoulli",
    "aten.bernoulli_",
    "aten.normal_",
    "aten.rand",
    "aten.rand_like",
    "aten.randn",
    "aten.randn_like",
    "aten.uniform_",
    "prims.inductor_random",
    "prims.inductor_seeds",
}
_REDUCTIONS = {
    "aten._softmax",
    "aten._log_softmax",
    "aten._softmax_backward_data",
    "aten._log_softmax_backward_data",
    "aten.native_layer_norm",
    "aten.native_layer_norm_backward",
    "aten.native_group_norm",
    "aten.native_group_norm_backward",
    "aten.native_batch_norm",
    "aten.native_batch_norm_backward",
    "aten._batch_norm_impl_index",
    "aten.cudnn_batch_norm",
    "aten._native_batch_norm_legit_no_training",
    "aten.cumsum",
    "aten.cumprod",
    "aten.avg_pool2d",
    "aten._adaptive_avg_pool2d",
    "aten.max_pool2d_with_indices",
    "prims._low_memory_max_pool_with_offsets",
}


_MATRIX_PRODUCTS = {
    "aten.mm",
    "aten.addmm",
    "aten._addmm_activation",
    "aten.bmm",
    "aten.baddbmm",
    "aten.addbmm",
    "aten.mv",
    "aten.addmv",
    "aten.matmul",
    "aten.linear",
    "aten.conv1d",
    "aten.conv2d",
    "aten.conv3d",
    "aten.conv_transpose1d",
    "aten.conv_transpose2d",
    "aten.conv_transpose3d",
    "aten.convolution",
    "aten._convolution",
    "aten.cudnn_convolution",
    "aten.convolution_overrideable",
    "aten.convolution_backward",
    "mkl._mkl_linear",
    "mkldnn._linear_pointwise",
    "mkldnn._convolution_pointwise",
    "mkldnn._convolution_pointwise_",
    "mkldnn._convolution_transpose_pointwise",
    "grouped_gemm_lowering",
    "aten._scaled_mm",
    "aten._int_mm",
    "aten._flash_attention_forward",
    "aten._efficient_attention_forward",
    "flex_attention",
}


def is_matrix_product(target: str) -> bool:
    """Whether a target's name (from ``target_name``) is a product, convolution, linear or attention."""
    packet = packet_name(target)
    return packet in _MATRIX_PRODUCTS or "scaled_dot_product" in packet


def flops(node: fx.Node) -> float | None:
    """FLOPs of one call of a node, ``None`` where there is no formula.

    Raises:
        SizeUnknown: a shape is missing or a symbolic size has no hint.
    """
    target, wrapped = operator_of(node.target)
    name = packet_name(name_of(target))
    own = _OWN_FORMULAS.get(name)
    try:
        if name == "grouped_gemm_lowering":  # Inductor's fusion of several linears over one input
            return float(sum(2 * numel(out) * argument(node.args[0]).shape[-1] for out in node.meta["val"]))
        if own is not None:
            return float(own(node, wrapped))
        registered = _registered(target)
        if registered is not None:
            return float(registered(node))
    except (TypeError, ValueError, IndexError, AttributeError, AssertionError, RuntimeError):
        return None  # a form of the operator that its formula does not know
    if name in _MOVES or name in SCATTERS_IN_PLACE:
        return 0.0
    tags = target.tags if isinstance(target, torch._ops.OpOverload) else ()
    if name in _POINTWISE or torch.Tag.pointwise in tags:
        return float(max(numel(out) for out in tensors(node.meta["val"])))
    if name in _REDUCTIONS or torch.Tag.reduction in tags:
        return float(argument(node.args[0]).numel)
    return None


def _registered(target: Any) -> Callable[[fx.Node], float] | None:
    from torch.utils.flop_counter import flop_registry

    packet = target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target
    formula = flop_registry.get(packet)
    if formula is None:
        return None
    # The overloads with an ``out_dtype`` carry it in a place that the formulas take for another argument.
    typed = isinstance(target, torch._ops.OpOverload) and target._overloadname == "dtype"

    def count(node: fx.Node) -> float:
        args = [on_meta(arg) for arg in node.args]
        if typed:
            args = [arg for arg in args if isinstance(arg, torch.Tensor)]
        kwargs = {} if typed else {key: on_meta(value) for key, value in node.kwargs.items()}
        return float(formula(*args, **kwargs, out_val=value_on_meta(node.meta["val"])))

    return count


def _linear(node: fx.Node, wrapped: bool) -> float:
    """x[..., K] with a weight of any packing: every element of y sums K products, 2 * numel(y) * K."""
    return 2.0 * argument(node).numel * argument(node.args[0]).shape[-1]


def _convolution(node: fx.Node, wrapped: bool) -> float:
    """2 * numel(y) * (channels of x / groups) * kernel; the packed weight keeps its plain shape."""
    first = 0
    target = operator_of(node.target)[0]
    if not wrapped and isinstance(target, torch._ops.OpOverload) and target._overloadname == "binary":
        first = 1  # (x, other, weight, ...), or (other, x, weight, ...) in place
    in_place = target_name(node).startswith("mkldnn._convolution_pointwise_.")
    x = argument(node.args[1 if in_place and not wrapped else 0])
    kernel = prod(argument(node.args[1 + first]).shape[2 - len(x.shape) :])
    groups = hint(node.args[6 + first])
    return 2.0 * argument(node).numel * (x.shape[1] // groups) * kernel


def _transposed_convolution(node: fx.Node, wrapped: bool) -> float:
    """Each input element meets (channels of y / groups) * kernel weights."""
    x, y = argument(node.args[0]), argument(node)
    kernel = prod(argument(node.args[1]).shape[2 - len(x.shape) :])
    return 2.0 * x.numel * (y.shape[1] // hint(node.args[7])) * kernel


def _attention(node: fx.Node, wrapped: bool) -> float:
    """q[B, H, S, D], k[B, G, T, D], v[B, G, T, E]: 2*B*H*S*T*(D + E); the mask does not count."""
    q, k, v = (argument(arg) for arg in node.args[:3])
    return 2.0 * prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])


def _attention_backward(node: fx.Node, wrapped: bool) -> float:
    """(grad, q, k, v, ...): q k^T once more, and the gradients of the scores, q and k over D or E, of v over E."""
    q, k, v = (argument(arg) for arg in node.args[1:4])
    return 2.0 * prod(q.shape[:-1]) * k.shape[-2] * (3 * q.shape[-1] + 2 * v.shape[-1])


def _added_product(node: fx.Node, wrapped: bool) -> float:
    return 2.0 * argument(node).numel * argument(node.args[1]).shape[-1]


def _added_vector(node: fx.Node, wrapped: bool) -> float:
    return 2.0 * argument(node.args[1]).numel


_OWN_FORMULAS: dict[str, Callable[[fx.Node, bool], float]] = {
    "aten.linear": _linear,
    "mkl._mkl_linear": _linear,
    "mkldnn._linear_pointwise": _linear,
    "mkldnn._convolution_pointwise": _convolution,
    "mkldnn._convolution_pointwise_": _convolution,
    "mkldnn._convolution_transpose_pointwise": _transposed_convolution,
    "aten._scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten._scaled_dot_product_fused_attention_overrideable": _attention,
    "aten.scaled_dot_product_attention": _attention,
    "aten._int_mm": _linear,
    "aten._weight_int8pack_mm": _linear,
    "aten.mv": _linear,
    "aten.dot": _linear,
    "aten.addmv": _added_vector,
    "aten._addmm_activation": _added_product,
}
