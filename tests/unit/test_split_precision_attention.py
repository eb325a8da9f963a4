"""split_precision_attention: the graph before, the graph after, the numbers, and what it refuses.

The graphs are those of CUDA tensors, made of fake ones; the rewritten ones run on the CPU, where the operator has an
implementation too.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from fxopt import testing
from fxopt.torch_api.tracing import fake_mode
from passes.split_precision_attention import SplitPrecisionAttention

aten: Any = torch.ops.aten
SHAPE = (2, 4, 48, 64)


def graph(
    *shapes: tuple[int, ...],
    device: str = "cuda",
    dtype: torch.dtype = torch.float32,
    outputs: Any = lambda o: o[0],
    **options: Any,
) -> torch.fx.GraphModule:
    """Efficient attention of inputs of these shapes: q, k, v and perhaps a bias; those of a projection's views."""
    options = {"dropout_p": 0.0, "is_causal": False, "scale": None} | options

    def attention(*operands: Any) -> Any:
        q, k, v, bias = (*operands, None)[:4]
        dropout, causal, scale = options["dropout_p"], options["is_causal"], options["scale"]
        return outputs(aten._scaled_dot_product_efficient_attention(q, k, v, bias, False, dropout, causal, scale=scale))

    with fake_mode(False):
        made = [
            torch.empty(shape[0], shape[2], shape[1], shape[3], device=device, dtype=dtype).transpose(1, 2)
            for shape in shapes
        ]
        return make_fx(attention)(*made)


def split(gm: torch.fx.GraphModule, **context: Any) -> testing.Result:
    p = SplitPrecisionAttention()
    labels = testing.labels(gm, *p.answers)
    return testing.run(p, gm, context=testing.context(p, **{"device": "cuda", "labels": labels} | context))


@pytest.fixture
def with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if Triton were there: rewriting a graph does not need it."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: name == "triton" or find(name, *rest))


pytestmark = pytest.mark.usefixtures("with_triton")


def test_before_and_after():
    result = split(graph(SHAPE, SHAPE, SHAPE, is_causal=True))
    assert (result.report.matched, result.report.rewritten, result.report.error) == (1, 1, "")
    assert "_scaled_dot_product_efficient_attention" in result.before
    (node,) = [n for n in result.module.graph.nodes if n.op == "call_function"]
    assert node.target is torch.ops.fxopt.split_attention.default
    assert node.args[3:] == (None, 0.125, True)
    assert node.meta["val"].stride() == (48 * 256, 64, 256, 1), "as the operator that was there"


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"scale": 0.3}, {"biased": True}, {"keys": 70}, {"keys": 30, "is_causal": True}],
    ids=str,
)
def test_the_numbers(options):
    """The rewritten graph against attention in fp64, at most 4 times as far off as attention in fp32."""
    keys = options.pop("keys", SHAPE[2])
    biased = options.pop("biased", False)
    shapes = [SHAPE, (2, 4, keys, 64), (2, 4, keys, 64), *([(2, 4, SHAPE[2], keys)] if biased else [])]
    result = split(graph(*shapes, **options))
    assert result.changed, result
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]

    def plain(dtype: torch.dtype) -> torch.Tensor:
        q, k, v, *bias = (x.to(dtype) for x in inputs)
        scores = q @ k.transpose(-1, -2) * options.get("scale", 0.125) + (bias[0] if bias else 0)
        if options.get("is_causal"):
            scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
        return torch.softmax(scores, -1) @ v

    def error(y: torch.Tensor) -> float:
        return ((y.double() - plain(torch.float64)).norm() / plain(torch.float64).norm()).item()

    assert error(result.module(*inputs)) <= 4 * error(plain(torch.float32))


def test_the_unsplit_product_would_be_found_too_inaccurate():
    """What fp16 alone gives: the bound of the test above tells the two apart."""
    q, k, v = (torch.randn(SHAPE) for _ in range(3))
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    half = F.scaled_dot_product_attention(q.half(), k.half(), v.half()).double()
    ours = torch.ops.fxopt.split_attention(q, k, v, None, 0.125, False).double()
    assert (half - exact).norm() > 300 * (ours - exact).norm()


def test_what_cannot_be_split_is_computed_in_fp32():
    q, k, v = (torch.randn(1, 2, 20, 16) for _ in range(3))
    k[0, 1, 3, 3] = math.inf
    v[0, 0, 4, 5] = math.nan
    ours = torch.ops.fxopt.split_attention(q, k, v, None, 0.25, False)
    fp32 = torch.softmax(q @ k.transpose(-1, -2) * 0.25, -1) @ v
    assert torch.equal(ours.isnan(), fp32.isnan()) and fp32.isnan().any()
    torch.testing.assert_close(ours, fp32, equal_nan=True)


def test_a_row_of_which_everything_is_masked_is_zero():
    q, k, v = (torch.randn(1, 2, 20, 16) for _ in range(3))
    bias = torch.zeros(1, 1, 20, 20)
    bias[..., 3, :] = -math.inf
    ours = torch.ops.fxopt.split_attention(q, k, v, bias, 0.25, False)
    assert (ours[:, :, 3] == 0).all() and (ours[:, :, 2] != 0).all()


def test_no_queries_and_no_keys():
    q, k = torch.randn(1, 2, 5, 16), torch.randn(1, 2, 0, 16)
    assert torch.equal(torch.ops.fxopt.split_attention(q, k, k, None, 0.25, False), torch.zeros(1, 2, 5, 16))
    assert torch.ops.fxopt.split_attention(k, q, q, None, 0.25, False).shape == (1, 2, 0, 16)


def test_the_operator_keeps_what_torch_asks_of_operators():
    q, k, v = (torch.randn(1, 2, 20, 16) for _ in range(3))
    torch.library.opcheck(
        torch.ops.fxopt.split_attention.default,
        (q, k, v, None, 0.25, True),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_inductor_calls_it_with_whatever_strides_come(fresh_dynamo):
    def attention(x: torch.Tensor) -> torch.Tensor:
        q, k, v = (x * 2).view(2, 20, 3, 4, 16).permute(2, 0, 3, 1, 4).unbind(0)
        return torch.ops.fxopt.split_attention(q, k, v, None, 0.25, True).transpose(1, 2).view(2, 20, 64) + 1

    x = torch.randn(2, 20, 192)
    torch.testing.assert_close(torch.compile(attention, fullgraph=True)(x), attention(x))


REFUSED = {
    "not labelled": ({"labels": ()}, {}, "not labelled"),
    "half": ({}, {"dtype": torch.float16}, "operands are float16, not float32"),
    "log-sum-exp": ({}, {"outputs": lambda o: (o[0], o[1])}, "log-sum-exp is used"),
    "dropout": ({}, {"dropout_p": 0.1}, "it has dropout"),
    "scale": ({}, {"scale": -1.0}, "its scale -1.0 is not between"),
    "no scale": ({}, {"scale": 0.0}, "its scale 0.0 is not between"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_left_alone(name):
    context, options, because = REFUSED[name]
    result = split(graph(SHAPE, SHAPE, SHAPE, **options), **context)
    assert not result.changed and not result.report.error
    assert because in result.report.refused[0][1]


@pytest.mark.parametrize("dims", [(256, 256), (64, 32)])
def test_head_dimensions_that_the_kernel_has_no_tiles_for_are_left_alone(dims):
    q, v = (2, 4, 48, dims[0]), (2, 4, 48, dims[1])
    result = split(graph(q, q, v))
    assert not result.changed
    assert result.report.refused[0][1] == f"head dimensions {dims[0]} and {dims[1]}: over 128, or not alike"


def test_the_cpu_is_left_alone():
    gm = graph(SHAPE, SHAPE, SHAPE, device="meta")
    assert split(gm).report.refused[0][1] == "it is not on CUDA"


def test_it_needs_fp16_matrix_units_no_gradients_and_triton(monkeypatch):
    p = SplitPrecisionAttention()
    assert p.applicable(testing.context(p, device="cuda")) == ""
    assert "no fp16 matrix units" in p.applicable(testing.context(p, device="cuda", matrix_units=frozenset()))
    assert "gradients" in p.applicable(testing.context(p, device="cuda", grad=True))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    assert p.applicable(testing.context(p, device="cuda")) == "Triton is not installed"
