"""promote_matmul_precision on CUDA: fp32 from the product itself, where that pays.

Traced on fake tensors, which need no GPU, and run on the CPU by an interpreter that knows what `mm.dtype` means.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fxopt import testing
from passes.promote_matmul_precision import PromoteMatmulPrecision

aten = torch.ops.aten
CAST = torch.ops.prims.convert_element_type.default
P = PromoteMatmulPrecision
WIDE = P(fp32_outputs=True)


def on_cuda(fn, *shapes):
    with FakeTensorMode():
        return make_fx(fn)(*[torch.empty(shape, device="cuda") for shape in shapes])


def promoted(p, fn, *shapes, **kwargs):
    result = testing.run(p, on_cuda(fn, *shapes), **kwargs)
    assert result.report.error == "" and result.report.rewritten == result.report.matched > 0, str(result)
    return result


class OnCpu(torch.fx.Interpreter):
    """Runs a CUDA graph on the CPU, where a product of bf16 that gives fp32 is the product of the widened operands."""

    def call_function(self, target, args, kwargs):
        if target in (aten.mm.dtype, aten.bmm.dtype):
            a, b, dtype = args
            assert a.dtype == b.dtype == torch.bfloat16 and dtype == torch.float32
            return torch.matmul(a.float(), b.float())
        return super().call_function(target, args, kwargs)


def error(result, fn, *shapes):
    torch.manual_seed(0)
    args = [torch.randn(shape) for shape in shapes]
    got, exact = OnCpu(result.module).run(*args), fn(*[arg.double() for arg in args])
    assert got.dtype == torch.float32
    return ((got.double() - exact).norm() / exact.norm()).item()


def products(result):
    """(operator, type of the result) of each product, in order."""
    found = [n for n in result.module.graph.nodes if "mm" in str(n.target) or "convolution" in str(n.target)]
    return [(str(n.target), n.meta["val"].dtype) for n in found]


BF16, FP32 = torch.bfloat16, torch.float32


def test_a_result_that_leaves_the_graph_comes_in_fp32_from_the_product():
    result = promoted(P(), lambda x, w: torch.mm(x, w).view(2, 4, 32), (8, 16), (16, 32))
    assert result.after.splitlines()[2:] == [
        "convert_element_type_default: bf16[8, 16] = prims.convert_element_type.default(x_1, bfloat16)",
        "convert_element_type_default_1: bf16[16, 32] = prims.convert_element_type.default(w_1, bfloat16)",
        "mm_dtype: f32[8, 32] = aten.mm.dtype(convert_element_type_default, convert_element_type_default_1, float32)",
        "view: f32[2, 4, 32] = aten.view.default(mm_dtype, [2, 4, 32])",
        "return view",
    ]


LINEAR = (lambda x, w, b: torch.addmm(b, x, w.t())), ((8, 16), (64, 16), (64,))


def test_the_bias_of_a_wide_result_is_summed_up_inside_the_product():
    fn, shapes = LINEAR
    result = promoted(P(), fn, *shapes)
    assert products(result) == [("aten.mm.dtype", FP32)]
    assert "aten.add" not in result.after, "a sum of its own would read and write the whole result once more"
    product = next(n for n in result.module.graph.nodes if n.target is aten.mm.dtype)
    x, w = (operand.meta["val"] for operand in product.args[:2])
    assert (x.shape, w.shape) == ((8, 24), (24, 64)), "eight more, so that rows stay aligned to 16 bytes"
    assert w.stride() == (1, 24), "the layout of the linear layer's weight is kept"
    assert 1e-4 < error(result, fn, *shapes) < 2**-7


def test_a_weight_that_is_no_transpose_keeps_its_layout_as_well():
    shapes = (8, 16), (16, 64), (64,)
    result = promoted(P(), lambda x, w, b: torch.addmm(b, x, w), *shapes)
    product = next(n for n in result.module.graph.nodes if n.target is aten.mm.dtype)
    assert product.args[1].meta["val"].stride() == (64, 1)
    assert 1e-4 < error(result, lambda x, w, b: torch.addmm(b, x, w), *shapes) < 2**-7


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (lambda x, w, b: torch.addmm(b, x, w), [(8, 64), (64, 10), (10,)]),
        (lambda x, w, b: torch.addmm(b, x, w), [(8, 16), (16, 32), (8, 32)]),
        (lambda x, w, b: torch.addmm(b, x, w, beta=0.5), [(8, 16), (16, 32), (32,)]),
        (lambda x, w, b: torch.addmm(b, x, w), [(8, 16), (16, 32), ()]),
        (lambda x, w, b: torch.addmm(b, x, w), [(8, 16), (16, 32), (1,)]),
    ],
    ids=["narrow", "a matrix", "scaled", "a number", "one number for all"],
)
def test_what_else_is_added_is_added_in_fp32(fn, shapes):
    result = promoted(P(), fn, *shapes)
    assert products(result) == [("aten.mm.dtype", FP32)]
    assert sum(n.target is aten.add.Tensor for n in result.module.graph.nodes) == 1
    assert 1e-4 < error(result, fn, *shapes) < 2**-7


def test_scales_are_kept_and_a_zero_beta_takes_nothing_of_what_is_added():
    def fn(c, x, w):
        return torch.baddbmm(c, x, w, beta=0.0, alpha=2.0)

    shapes = (2, 8, 32), (2, 8, 16), (2, 16, 32)
    result = promoted(P(), fn, *shapes)
    assert products(result) == [("aten.bmm.dtype", FP32)]
    c, x, w = (torch.randn(shape) for shape in shapes)
    got = OnCpu(result.module).run(torch.full_like(c, torch.nan), x, w)
    torch.testing.assert_close(got, 2 * x @ w, atol=0.2, rtol=2e-2)


RESIDUAL = (lambda x, w: F.layer_norm(torch.mm(x, w) + x, (16,))), ((8, 16), (16, 16))
SCORES = (lambda q, k, v: torch.bmm(torch.softmax(torch.bmm(q, k), -1), v)), ((2, 8, 16), (2, 16, 8), (2, 8, 16))
FEED_FORWARD = (lambda x, w, v: torch.mm(F.silu(torch.mm(x, w)), v) * 2), ((8, 16), (16, 32), (32, 16))


@pytest.mark.parametrize(("fn", "shapes"), [RESIDUAL, SCORES], ids=["residual and norm", "softmax"])
def test_the_option_gives_fp32_to_what_sums_up(fn, shapes):
    narrow, wide = promoted(P(), fn, *shapes), promoted(WIDE, fn, *shapes)
    assert products(narrow)[0][1] == BF16
    assert products(wide)[0][1] == FP32
    assert error(wide, fn, *shapes) < error(narrow, fn, *shapes)


def test_the_option_keeps_bf16_through_pointwise_work_between_products():
    fn, shapes = FEED_FORWARD
    result = promoted(WIDE, fn, *shapes)
    assert products(result) == [("aten.mm.default", BF16), ("aten.mm.dtype", FP32)]
    silu = next(n for n in result.module.graph.nodes if n.target is aten.silu.default)
    assert silu.meta["val"].dtype == FP32, "computed in fp32, and stored in bf16"
    assert [user.meta["val"].dtype for user in silu.users] == [BF16]


def test_the_option_gives_fp32_where_one_of_the_users_is_not_promoted():
    fn, shapes = FEED_FORWARD
    graph = on_cuda(fn, *shapes)
    result = testing.run(WIDE, graph, labels={"mm": "tensor_core_idle"})
    assert products(result) == [("aten.mm.dtype", FP32), ("aten.mm.default", FP32)]


def test_the_bias_of_a_convolution_is_added_in_fp32():
    def fn(x, w, b):
        return F.conv2d(x, w, b, padding=1)

    shapes = (2, 8, 8, 8), (4, 8, 3, 3), (4,)
    result = promoted(P(), fn, *shapes)
    convolution = next(n for n in result.module.graph.nodes if n.target is aten.convolution.default)
    assert convolution.args[2] is None and convolution.meta["val"].dtype == BF16
    added = next(n for n in result.module.graph.nodes if n.target is aten.add.Tensor)
    assert [n.meta["val"].dtype for n in added.args] == [FP32, FP32]
    assert 1e-4 < error(result, fn, *shapes) < 2**-7


def test_both_ways_are_tried_on_cuda_and_the_cheaper_traffic_first():
    assert P().variants(testing.context(P, device="cuda")) == (P(), WIDE)
    assert WIDE.variants(testing.context(P, device="cuda")) == (WIDE, P())
    assert P().variants(testing.context(P)) == (P(),), "mm.dtype is for CUDA alone"


def test_on_a_cpu_the_option_changes_nothing():
    fn, shapes = RESIDUAL
    graph = testing.capture(fn, *[torch.randn(shape) for shape in shapes])
    assert testing.run(WIDE, graph).after == testing.run(P(), graph).after


def test_it_is_never_in_one_trial_with_passes_that_split_the_same_products():
    assert set(P.conflicts) == {"split_precision_gemm", "split_precision_attention", "split_precision_conv"}
