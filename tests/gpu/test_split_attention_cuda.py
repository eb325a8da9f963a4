"""Attention on an NVIDIA GPU: the split kernel beside torch's efficient one, against fp64; and backends by choice."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled_graphs import dynamo_graph
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fxopt import testing
from fxopt.manager import SlotPass
from fxopt.registry import PassContext, Stage
from fxopt.torch_api import inductor
from fxopt.torch_api.attention import BACKENDS
from passes.attention_backend import AttentionBackend
from passes.split_precision_attention import SplitPrecisionAttention
from passes.split_products import joined
from passes.split_products import split as planes_of

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
aten: Any = torch.ops.aten


def qkv(b: int, h: int, q_len: int, kv_len: int, d: int) -> list[torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    return [
        torch.randn(b, n, h, d, device=DEVICE, generator=generator).transpose(1, 2) for n in (q_len, kv_len, kv_len)
    ]


def efficient(q, k, v, bias=None, causal=False) -> torch.Tensor:
    return aten._scaled_dot_product_efficient_attention(q, k, v, bias, False, 0.0, causal)[0]


def split(q, k, v, bias=None, causal=False) -> torch.Tensor:
    return torch.ops.fxopt.split_attention(q, k, v, bias, q.shape[-1] ** -0.5, causal)


def exact(q, k, v, bias=None, causal=False) -> torch.Tensor:
    scores = q.double() @ k.double().transpose(-1, -2) * q.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias.double()
    if causal:
        hidden = ~torch.ones(scores.shape[-2:], dtype=torch.bool, device=DEVICE).tril()
        scores = scores.masked_fill(hidden, -math.inf)
    top = scores.amax(-1, keepdim=True)
    p = torch.exp(scores - torch.where(top == -math.inf, 0.0, top))
    total = p.sum(-1, keepdim=True)
    return (p @ v.double()) / torch.where(total == 0, 1.0, total)


def in_fp32(q, k, v) -> torch.Tensor:
    """Plain fp32, one operation after the other; no TF32, unless torch is told."""
    return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1) @ v


def rel(y: torch.Tensor, true: torch.Tensor) -> float:
    return ((y.double() - true).norm() / true.norm()).item()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        (8, 8, 512, 512, 64),
        (4, 12, 128, 128, 64),
        (1, 2, 300, 300, 16),
        (2, 3, 77, 130, 32),
        (1, 2, 130, 77, 48),
        (1, 4, 1, 1000, 64),
        (2, 2, 257, 257, 80),
        (1, 2, 1024, 4096, 128),
    ],
    ids=str,
)
def test_it_is_at_most_4_times_as_far_off_as_efficient_attention(shape, causal):
    q, k, v = qkv(*shape)
    true = exact(q, k, v, causal=causal)
    result = split(q, k, v, causal=causal)
    assert rel(result, true) <= 4 * rel(efficient(q, k, v, causal=causal), true)
    assert result.stride() == efficient(q, k, v, causal=causal).stride()


def test_a_bias_and_rows_without_keys():
    q, k, v = qkv(2, 4, 128, 192, 64)
    bias = torch.randn(2, 1, 128, 192, device=DEVICE)
    bias[:, :, 5] = -math.inf
    bias[:, :, 6, :100] = -math.inf
    bias[:, :, 7] = torch.finfo(torch.float32).min
    bias = bias.expand(2, 4, 128, 192)
    result, theirs = split(q, k, v, bias), efficient(q, k, v, bias)
    # float32's least number times log2(e) is -inf to both kernels.
    assert torch.equal((result == 0).all(-1), (theirs == 0).all(-1)) and (result[:, :, 5] == 0).all()
    rows = [i for i in range(128) if i != 7]
    true = exact(q, k, v, bias)[:, :, rows]
    assert rel(result[:, :, rows], true) <= 4 * rel(theirs[:, :, rows], true)


@pytest.mark.parametrize(
    ("which", "value"),
    [
        *(("q", math.inf), ("q", math.nan), ("k", -math.inf), ("k", math.nan), ("v", math.inf), ("v", math.nan)),
        *(("k", 3e38), ("v", 3e38), ("v", 1e-15), ("v", 1e-40)),
    ],
)
def test_what_cannot_be_split_gives_what_fp32_gives(which, value):
    """NaN and Inf where both of torch's ways have them.

    Efficient attention splits fp32 into parts too, TF32 ones, without looking for Inf, whose low part is Inf - Inf: NaN
    where an Inf in a key or a value gives Inf, or no weight, in plain fp32.
    """
    operands = dict(zip("qkv", qkv(1, 3, 200, 200, 64), strict=True))
    operands[which][0, 1, 150, 3] = value
    result, theirs, plain = split(**operands), efficient(**operands), in_fp32(**operands)
    agreed = (theirs.isnan() == plain.isnan()) & (theirs.isinf() == plain.isinf())
    assert agreed[:, ::2].all() and (agreed.all() or math.isinf(value))
    assert torch.equal(result.isnan() & agreed, plain.isnan() & agreed)
    assert torch.equal(result.isinf() & agreed, plain.isinf() & agreed)
    finite = agreed & plain.isfinite()
    torch.testing.assert_close(result[finite], theirs[finite], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_rows_over_twelve_orders_of_magnitude(which):
    operands = dict(zip("qkv", qkv(2, 4, 256, 256, 64), strict=True))
    generator = torch.Generator(DEVICE).manual_seed(1)
    operands[which] *= 10.0 ** (12 * torch.rand(1, 1, 256, 1, device=DEVICE, generator=generator) - 6)
    true = exact(**operands)
    assert rel(split(**operands), true) <= 4 * rel(efficient(**operands), true)


def test_weights_far_below_one_are_not_lost():
    """The key that has nearly all the weight has no value: what is left are the others' small weights."""
    q, k, v = qkv(1, 2, 128, 128, 64)
    q[:] = q[:, :, :1]
    k[:, :, 0] = 6 * q[:, :, 0]
    v[:, :, 0] = 0
    true = exact(q, k, v)
    assert rel(split(q, k, v), true) <= 4 * rel(efficient(q, k, v), true)


def test_the_host_waits_for_nothing():
    q, k, v = qkv(1, 2, 128, 128, 64)
    expected = split(q, k, v)
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = split(q, k, v)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(result, expected)


def test_a_graph_of_it_replays():
    q, k, v = qkv(2, 4, 256, 256, 64)
    split(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = split(q, k, v)
    q.mul_(0.5)
    v[0, 0, 3, 3] = math.nan  # another loop of the kernel is taken in the replay
    graph.replay()
    assert torch.equal(result.isnan(), efficient(q, k, v).isnan())
    torch.testing.assert_close(result, split(q, k, v), rtol=0, atol=0, equal_nan=True)


@dataclass(frozen=True)
class EverythingLabelled(PassContext):
    """Names of nodes are not known before the graph is compiled."""

    def answers(self, node: torch.fx.Node, axes: Any) -> bool:
        return True


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(256, 768)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, width = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, 4, 64).permute(2, 0, 3, 1, 4).unbind(0)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return o.transpose(1, 2).reshape(b, n, width)


def compiled(model: nn.Module, x: torch.Tensor, p: Any) -> tuple[torch.Tensor, Any]:
    """The result of the model compiled with one pass, and the pass's report."""
    gm, inputs = dynamo_graph(model, x)
    slot = SlotPass([p], EverythingLabelled(**vars(testing.context(p, device="cuda:0"))), Stage.JOINT)
    made = inductor.compile_graph(gm, inputs, patches={}, slots={"joint": slot}, freeze=frozenset(), caches=False)
    return made.flat(inputs)(*inputs)[0], slot.reports[0]


def test_the_pass_in_a_compiled_model(fresh_dynamo):
    model = Attention().eval().to(DEVICE)
    x = torch.randn(4, 200, 256, device=DEVICE)
    with torch.no_grad(), sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        eager = model(x)
        result, report = compiled(model, x, SplitPrecisionAttention())
    assert report.rewritten == 1, report
    assert rel(result, eager.double()) < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_backend_in_a_compiled_model(backend, fresh_dynamo):
    """Torch's own choice is switched to another one than the pass is to make."""
    first = SDPBackend.FLASH_ATTENTION if backend != "flash" else SDPBackend.EFFICIENT_ATTENTION
    model = Attention().eval().to(DEVICE, torch.bfloat16)
    x = torch.randn(4, 200, 256, device=DEVICE, dtype=torch.bfloat16)
    with torch.no_grad():
        with sdpa_kernel(first):
            eager = model(x)
            graph = testing.capture(model, x)
        p = AttentionBackend(backend)
        labels = testing.labels(graph, *p.answers)
        result = testing.run(p, graph, context=testing.context(p, device="cuda", labels=labels))
        assert result.report.rewritten == 1, result
        (output,) = result.fn(*graph.meta["example_inputs"])
    torch.testing.assert_close(output, eager, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("causal", [False, True])
def test_written_split_it_is_what_split_makes_of_the_result(causal):
    q, k, v = (torch.randn(4, 128, 12, 64, device=DEVICE).transpose(1, 2) for _ in range(3))
    v[1, 3, :, :40] *= 2.0**-40  # a row of mixed scale is not held
    v[0, 0, 5, 7] = math.nan
    given = (q, k, v, None, 0.125, causal)
    expected = torch.ops.fxopt.split_attention(*given).transpose(1, 2).contiguous()
    written = torch.ops.fxopt.split_attention_split(*given)
    found = joined(*written)
    assert torch.equal(found.isnan(), expected.isnan()) and found.isnan().any()
    error = (found - expected).abs() / expected.abs().amax(-1, keepdim=True)
    assert error.nan_to_num(0.0).max() < 1e-6
    assert written[2].eq(0).any()
    # What lies halfway between two fp16 numbers may go to either: the planes differ, and what they hold does not.
    again = planes_of(found)
    assert torch.equal(written[2], again[2])
    assert torch.equal(joined(*again).nan_to_num(0.0), found.nan_to_num(0.0))
