"""split_precision_attention: fp32 attention on fp16 tensor cores, with fp32's accuracy.

Answers tensor_core_idle and compute_bound. On CUDA fp32 has one fused attention kernel, which forms each product from
TF32 ones at a fraction of fp16's rate. This pass calls `fxopt::split_attention` instead, whose Triton kernel forms both
products from operands split into two fp16 parts (`passes.kernels.split_attention` says how, and what becomes of values
that cannot be split).

before                                                  after
    (o, _, _, _) = efficient_attention(q, k, v, bias)       o = split_attention(q, k, v, bias, scale, causal)

Legal where only the result is used, without dropout, for float32 on CUDA, head dimensions alike and at most 128. Both
kernels put 0 in a row of which everything is masked, and lay the result out alike.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxopt.labels import Axis
from fxopt.precision import Precision
from fxopt.registry import Candidate, GraphPass, PassContext, Stage
from fxopt.torch_api.attention import BACKENDS, arguments, only_result_used
from passes.split_products import split

_BLOCK = 64  # keys a step of the reference
_LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class SplitPrecisionAttention(GraphPass):
    """fp32 attention on fp16 tensor cores, from operands split in two, as accurate as fp32."""

    name: ClassVar[str] = "split_precision_attention"
    answers: ClassVar[frozenset[Axis]] = frozenset({Axis.TENSOR_CORE_IDLE, Axis.COMPUTE_BOUND})
    stage: ClassVar[Stage] = Stage.JOINT
    precision: ClassVar[Precision] = Precision.FP32
    after: ClassVar[tuple[str, ...]] = ("causal_mask",)
    conflicts: ClassVar[tuple[str, ...]] = ("promote_matmul_precision",)
    devices: ClassVar[tuple[str, ...]] = ("cuda",)

    def applicable(self, context: PassContext) -> str:
        if "float16" not in context.matrix_units:
            return f"{context.device} has no fp16 matrix units"
        if context.grad:
            return "gradients are on: this pass rewrites inference graphs only"
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed"
        return ""

    def candidates(self, graph: fx.Graph, context: PassContext) -> Iterable[Candidate]:
        for node in graph.nodes:
            if node.target is not BACKENDS["efficient"]:
                continue
            given = arguments(node)
            q, v = (given[name].meta["val"] for name in ("query", "value"))
            scale = _scale(given)
            if not context.answers(node, self.answers):
                yield Candidate(node.name, "not labelled tensor_core_idle or compute_bound")
            elif q.dtype != torch.float32:
                found = str(q.dtype).replace("torch.", "")
                yield Candidate(node.name, f"operands are {found}, not float32")
            elif q.device.type != "cuda":
                yield Candidate(node.name, "it is not on CUDA")
            elif not only_result_used(node):
                yield Candidate(node.name, "its log-sum-exp is used, or the state of its dropout")
            elif given["dropout_p"]:
                yield Candidate(node.name, "it has dropout")
            elif not (isinstance(q.shape[-1], int) and q.shape[-1] == v.shape[-1] and q.shape[-1] <= 128):
                yield Candidate(node.name, f"head dimensions {q.shape[-1]} and {v.shape[-1]}: over 128, or not alike")
            elif not (isinstance(scale, (int, float)) and 2.0**-16 <= scale <= 2.0**16):
                yield Candidate(node.name, f"its scale {scale} is not between 2^-16 and 2^16")
            else:
                yield Candidate(node.name)

    def rewrite(self, graph: fx.Graph, node: fx.Node, context: PassContext) -> None:
        given = arguments(node)
        operands = [given[name] for name in ("query", "key", "value", "attn_bias")]
        with graph.inserting_before(node):
            result = graph.call_function(
                SPLIT_ATTENTION, (*operands, float(_scale(given)), bool(given["is_causal"]))
            )
        for user in list(node.users):
            user.replace_all_uses_with(result)
            graph.erase_node(user)
        graph.erase_node(node)


def _scale(given: dict[str, Any]) -> Any:
    head_dim = given["query"].meta["val"].shape[-1]
    return head_dim**-0.5 if given["scale"] is None and isinstance(head_dim, int) else given["scale"]


# ---------------------------------------------------------------- the operator

# Any layout of q, k, v and bias will do: Inductor need not copy.
torch.library.define(
    "fxopt::split_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor? bias, float scale, bool causal) -> Tensor",
    tags=(torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag),
)


# The same as split_products.split writes it: planes int16 [batch, q_len, heads, head_dim], scales [.., 1].
torch.library.define(
    "fxopt::split_attention_split",
    "(Tensor q, Tensor k, Tensor v, Tensor? bias, float scale, bool causal) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag),
)

#: what the rewritten graph calls
SPLIT_ATTENTION = torch.ops.fxopt.split_attention.default
SPLIT_ATTENTION_SPLIT = torch.ops.fxopt.split_attention_split.default


@torch.library.impl("fxopt::split_attention_split", "Meta")
def _fake_split(*given: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, heads, length, head_dim = given[0].shape
    hi, lo = (given[0].new_empty((batch, length, heads, head_dim), dtype=torch.int16) for _ in range(2))
    return hi, lo, given[0].new_empty(batch, length, heads, 1)


@torch.library.impl("fxopt::split_attention_split", "CUDA")
def _cuda_split(*given: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from passes.kernels.split_attention import attend_split

    return attend_split(*given)


@torch.library.impl("fxopt::split_attention_split", "CPU")
def _reference_split(*given: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return split(SPLIT_ATTENTION(*given).transpose(1, 2))


def _fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scale: float, causal: bool
) -> torch.Tensor:
    batch, heads, length, head_dim = q.shape
    return q.new_empty(batch, length, heads, head_dim).transpose(1, 2)


torch.library.impl("fxopt::split_attention", "Meta", _fake)


@torch.library.impl("fxopt::split_attention", "CUDA")
def _cuda(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scale: float, causal: bool
) -> torch.Tensor:
    from passes.kernels.split_attention import attend

    return attend(q, k, v, bias, scale, causal)


@torch.library.impl("fxopt::split_attention", "CPU")
def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scale: float, causal: bool
) -> torch.Tensor:
    """The kernel's arithmetic in plain torch, head by head instead of tile by tile; for tests, not for speed.

    q [batch, heads, q_len, head_dim], k and v [batch, heads, kv_len, head_dim], bias [batch, heads, q_len, kv_len],
    all fp32. Returns fp32 [batch, heads, q_len, head_dim], in the memory of [batch, q_len, heads, head_dim].
    """
    out = _fake(q, k, v, bias, scale, causal)
    if out.numel() == 0 or k.shape[2] == 0:
        return out.zero_()
    q_largest, k_largest = (_magnitude(x).amax((-2, -1), keepdim=True) for x in (q, k))
    held = (q_largest < 2.0**50) & (k_largest < 2.0**50) & (q_largest * k_largest <= 2.0**22 / (scale * q.shape[-1]))

    def weights(scores: torch.Tensor) -> torch.Tensor:
        scores = scores if bias is None else scores + bias
        if causal:
            visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
            scores = torch.where(visible, scores, -math.inf)
        scores = scores * _LOG2E
        top = torch.nan_to_num(scores.amax(-1, keepdim=True), neginf=0.0, nan=math.nan, posinf=math.inf)
        return torch.exp2(scores - top)

    q_parts, q_inverse = _split(q, (-2, -1), 127 - 40)
    k_parts, k_inverse = _split(k.transpose(-1, -2), (-2, -1), 127 - 40)
    split = weights(_product(q_parts, k_parts) * (q_inverse * scale * k_inverse))
    summed = torch.zeros_like(out)
    v_most = torch.zeros_like(v[:, :, :1])
    for start in range(0, k.shape[2], _BLOCK):
        values = v[:, :, start : start + _BLOCK]
        largest = _magnitude(values).amax(-2, keepdim=True)
        least = torch.where(values == 0, math.inf, values.abs()).amin(-2, keepdim=True)
        fits = (largest == 0) | ((largest >= 2.0**-98) & (largest < math.inf) & (least >= largest * 2.0**-28))
        held = held & fits.all(-1, keepdim=True)
        v_parts, v_inverse = _split(values, (-2,), 127 - 98)
        p = _planes(split[..., start : start + _BLOCK] * 2.0**14)
        summed = summed + _product(p, v_parts) * (v_inverse * 2.0**-14)
        v_most = torch.where(largest == 0, v_most, torch.maximum(v_most, v_inverse * 2.0**-14))
    seen = v_most * k.shape[2] * 8
    lost = ((summed.abs() < seen) | (seen == 0)).all(-1, keepdim=True) & (seen > 0).any(-1, keepdim=True)
    held = held & ~lost
    exact = weights((q @ k.transpose(-1, -2)) * scale)

    def divided(sums: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        total = by.sum(-1, keepdim=True)
        return sums / torch.where(total == 0, 1.0, total)

    return out.copy_(torch.where(held, divided(summed, split), divided(exact @ v, exact)))


def _magnitude(x: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(x.abs(), nan=math.inf, posinf=math.inf)


def _planes(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    hi = y.half().float()
    return hi, ((y - hi) * 2.0**11).half().float()


def _split(
    x: torch.Tensor, dims: tuple[int, ...], least: int
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The planes of x under one power of two for all of `dims`, and that power's inverse."""
    exponent = (_magnitude(x).amax(dims, keepdim=True).view(torch.int32) >> 23).clamp_min(least)
    scale, inverse = ((268 - exponent) << 23).view(torch.float32), ((exponent - 14) << 23).view(torch.float32)
    return _planes(x * scale), inverse


def _product(a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return a[0] @ b[0] + (a[1] @ b[0] + a[0] @ b[1]) * 2.0**-11
