"""promote_matmul_precision: the graph before, the graph after, the numbers, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from fxopt.labels import Axis, Label
from fxopt.manager import run_pass
from fxopt.registry import PassContext
from fxopt.verify import parse_precision
from passes import promote_matmul_precision
from passes.promote_matmul_precision import OPERANDS, PromoteMatmulPrecision

aten = torch.ops.aten
CAST = torch.ops.prims.convert_element_type.default


def trace(fn, *args):
    return make_fx(fn, tracing_mode="fake")(*args)


def products(graph):
    return [n for n in graph.nodes if n.target in OPERANDS]


def context(graph, names=None):
    chosen = tuple(n.name for n in products(graph)) if names is None else tuple(names)
    label = Label(Axis.TENSOR_CORE_IDLE, "group", chosen, "k:1", (), "high", 1.0, "why")
    return PassContext(
        device=torch.device("cpu"),
        budget=parse_precision("bf16"),
        labels=(label,),
        matrix_units=frozenset({"bfloat16"}),
    )


def promote(gm, **kwargs):
    return run_pass(PromoteMatmulPrecision(), gm.graph, context(gm.graph, **kwargs))


def casts(graph, dtype):
    return [n for n in graph.nodes if n.target is CAST and n.args[1] == dtype]


def text(graph):
    def spell(arg):
        return arg.name if isinstance(arg, torch.fx.Node) else str(arg).replace("torch.", "")

    return [
        f"{n.name} = {getattr(n.target, '__name__', n.target)}({', '.join(spell(a) for a in n.args)})"
        for n in graph.nodes
        if n.op == "call_function"
    ]


def test_mm_before_and_after():
    gm = trace(lambda a, b: torch.mm(a, b), torch.randn(4, 8), torch.randn(8, 2))
    assert text(gm.graph) == ["mm = mm.default(a_1, b_1)"]
    report = promote(gm)
    assert (report.matched, report.rewritten, report.error) == (1, 1, "")
    assert text(gm.graph) == [
        "convert_element_type_default = convert_element_type.default(a_1, bfloat16)",
        "convert_element_type_default_1 = convert_element_type.default(b_1, bfloat16)",
        "mm_default = mm.default(convert_element_type_default, convert_element_type_default_1)",
        "convert_element_type_default_2 = convert_element_type.default(mm_default, float32)",
    ]


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (lambda a, b: torch.mm(a, b), [(5, 64), (64, 7)]),
        (lambda c, a, b: torch.addmm(c, a, b), [(7,), (5, 64), (64, 7)]),
        (lambda a, b: torch.bmm(a, b), [(3, 5, 64), (3, 64, 7)]),
        (lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5, alpha=2.0), [(3, 5, 7), (3, 5, 64), (3, 64, 7)]),
        (lambda x, w, b: F.conv2d(x, w, b, padding=1), [(2, 4, 8, 8), (6, 4, 3, 3), (6,)]),
        (lambda x, w: F.conv2d(x, w, stride=2), [(2, 4, 8, 8), (6, 4, 3, 3)]),
        (lambda a, b: torch.mm(a.t(), b), [(64, 5), (64, 7)]),
        (lambda a, b: torch.mm(a.expand(4, 64), b), [(1, 64), (64, 7)]),
    ],
    ids=["mm", "addmm", "bmm", "baddbmm", "conv bias", "conv", "transposed", "expanded"],
)
def test_numbers_are_those_of_bf16_operands(fn, shapes):
    args = [torch.randn(shape) for shape in shapes]
    gm = trace(fn, *args)
    report = promote(gm)
    assert report.rewritten == 1 and not report.error
    result, exact = torch.fx.GraphModule(gm, gm.graph)(*args), fn(*[a.double() for a in args])
    error = ((result.double() - exact).norm() / exact.norm()).item()
    assert result.dtype == torch.float32
    # bf16 has 8 significant bits: unit roundoff 2^-8, so a product of two rounded operands errs by about that.
    assert 1e-4 < error < 2**-6


def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_attention_takes_bf16_and_gives_fp32():
    args = [torch.randn(2, 4, 16, 32) for _ in range(3)]
    gm = trace(attention, *args)
    report = promote(gm)
    assert report.rewritten == 1 and not report.error
    node = products(gm.graph)[0]
    assert {a.meta["val"].dtype for a in node.args[:3]} == {torch.bfloat16}
    torch.testing.assert_close(torch.fx.GraphModule(gm, gm.graph)(*args), attention(*args), atol=3e-2, rtol=3e-2)


def test_a_value_stays_bf16_from_product_to_product_through_views():
    def qkv_attention(x, w):
        q, k, v = torch.mm(x, w).view(2, 16, 3, 4, 32).permute(2, 0, 3, 1, 4).unbind(0)
        return attention(q, k, v)

    gm = trace(qkv_attention, torch.randn(32, 128), torch.randn(128, 384))
    assert promote(gm).rewritten == 2
    assert len(casts(gm.graph, torch.bfloat16)) == 2, "only x and w are cast; q, k and v are already bf16"
    assert len(casts(gm.graph, torch.float32)) == 1


def test_pointwise_work_between_products_stays_fp32():
    gm = trace(lambda x, w, u: torch.mm(F.gelu(torch.mm(x, w)), u), *[torch.randn(16, 16) for _ in range(3)])
    assert promote(gm).rewritten == 2
    gelu = next(n for n in gm.graph.nodes if n.target is aten.gelu.default)
    assert gelu.meta["val"].dtype == torch.float32


def test_an_operand_used_twice_is_cast_once():
    gm = trace(lambda x, w, u: torch.mm(x, w) + torch.mm(x, u), *[torch.randn(16, 16) for _ in range(3)])
    assert promote(gm).rewritten == 2
    assert len(casts(gm.graph, torch.bfloat16)) == 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_are_refused(dtype):
    gm = trace(lambda a, b: torch.mm(a, b), torch.randn(4, 8, dtype=dtype), torch.randn(8, 2, dtype=dtype))
    report = promote(gm)
    assert report.matched == 0 and not report.changed
    assert report.refused[0][1] == f"operands are {str(dtype)[6:]}, not float32"


def test_unlabelled_products_are_left_alone():
    gm = trace(lambda x, w, u: torch.mm(torch.mm(x, w), u), *[torch.randn(16, 16) for _ in range(3)])
    report = promote(gm, names=["mm_1"])
    assert (report.matched, report.rewritten) == (1, 1)
    assert report.refused == (("mm", "not labelled tensor_core_idle"),)
    assert {n.meta["val"].dtype for n in products(gm.graph)} == {torch.float32, torch.bfloat16}


def test_a_node_that_inductor_renamed_is_found_by_its_origin():
    gm = trace(lambda a, b: torch.mm(a, b), torch.randn(4, 8), torch.randn(8, 2))

    class Source:
        name = "linear"

    products(gm.graph)[0].meta["from_node"] = [Source()]
    base = context(gm.graph, names=["mm_default"])
    assert run_pass(PromoteMatmulPrecision(), gm.graph, base).matched == 0
    assert run_pass(PromoteMatmulPrecision(), gm.graph, replace(base, origins={"mm_default": ("linear",)})).matched == 1


def test_it_needs_matrix_units():
    base = PassContext(device=torch.device("cpu"), budget=parse_precision("bf16"))
    assert "no bf16 matrix units" in PromoteMatmulPrecision().applicable(base)
    units = replace(base, matrix_units=frozenset({"bfloat16"}))
    assert PromoteMatmulPrecision().applicable(units) == ""
    assert PromoteMatmulPrecision().applicable(replace(units, grad=True)) == "" and PromoteMatmulPrecision.gradients


def test_a_mask_of_float32s_least_number_does_not_become_infinite():
    """Rounded to bf16 it would be -inf, and the softmax of a row of those is NaN."""

    def masked(mask, q, k):
        return torch.softmax(torch.baddbmm(mask, q, k), -1) + torch.softmax(torch.baddbmm(mask, k, q), -1)

    mask = torch.zeros(2, 16, 16)
    mask[0, 3] = torch.finfo(torch.float32).min
    mask[1, 2, :4] = float("-inf")
    args = mask, torch.randn(2, 16, 16), torch.randn(2, 16, 16)
    gm = trace(masked, *args)
    assert promote(gm).rewritten == 2
    result = torch.fx.GraphModule(gm, gm.graph)(*args)
    assert torch.isfinite(result).all()
    torch.testing.assert_close(result, masked(*args), atol=5e-2, rtol=5e-2)
    assert sum(n.target is aten.clamp_min.default for n in gm.graph.nodes) == 1


def test_forward_and_backward_of_attention_are_promoted_together_on_cuda():
    """In one graph, as the joint stage has them; the weight's gradient is the fp32 accumulator, and the transposed
    gradient is not rounded a second time.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    attend, back = aten._scaled_dot_product_efficient_attention, aten._scaled_dot_product_efficient_attention_backward

    def step(x, w, g):
        q = aten.mm(x.view(128, 64), aten.permute(w, [1, 0])).view(2, 64, 4, 16).permute(0, 2, 1, 3)
        out, lse, seed, offset = attend(q, q, q, None, True, 0.0, True)
        grads = back(g, q, q, q, None, out, lse, seed, offset, 0.0, [True, True, True, False], True)
        d = (grads[0] + grads[1] + grads[2]).permute(0, 2, 1, 3).reshape(128, 64)
        return out, aten.mm(d, w), aten.mm(aten.permute(d, [1, 0]), x.view(128, 64))

    with FakeTensorMode():
        args = [torch.empty(shape, device="cuda") for shape in ((2, 64, 64), (64, 64), (2, 4, 64, 16))]
        gm = make_fx(step)(*args)
    names = [n.name for n in gm.graph.nodes if n.op == "call_function"]
    given = replace(context(gm.graph, names=names), device=torch.device("cuda"), grad=True)
    report = run_pass(PromoteMatmulPrecision(), gm.graph, given)
    assert (report.error, report.rewritten) == ("", 5)
    tuples = [n for n in gm.graph.nodes if n.target in (attend.default, back.default)]
    assert [n.meta["val"][0].dtype for n in tuples] == [torch.bfloat16] * 2
    assert all(n.args[i].meta["val"].dtype == torch.bfloat16 for n in tuples for i in (0, 1, 2))
    *_, dx, dw = gm.graph.output_node().args[0]
    assert dx.target is dw.target is aten.mm.dtype
    assert dw.args[0].target is aten.permute.default and dw.args[0].args[0] is dx.args[0], "one cast, seen both ways"


@pytest.mark.parametrize("alike", [True, False], ids=["strides alike", "other strides"])
def test_attention_of_fp32_becomes_the_one_that_torch_picks_for_bf16_on_cuda(monkeypatch, alike):
    """Its mask goes with it. What torch picks is given here: without a GPU there is no device to ask. One with other
    strides, which the graph would give on to its caller, is left alone, and fp32's own takes bf16.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    own, other = aten._scaled_dot_product_efficient_attention, aten._scaled_dot_product_cudnn_attention

    def picked(operands, causal, scale):
        def attend(q, k, v, bias):
            return other(q, k, v, bias, False, 0.0, causal, scale=scale)[0]

        with operands[0].fake_mode:
            return make_fx(attend)(*(value.to(torch.bfloat16) for value in operands)).graph

    monkeypatch.setattr(promote_matmul_precision, "_bf16_attention", picked)
    with FakeTensorMode():
        shape = (2, 64, 4, 16) if alike else (2, 4, 64, 16)
        args = [torch.empty(shape, device="cuda") for _ in range(3)]
        args = [head.transpose(1, 2) if alike else head for head in args]
        args.append(torch.empty(2, 4, 64, 64, device="cuda"))
        gm = make_fx(lambda q, k, v, bias: own(q, k, v, bias, False, 0.0, False)[0] + 1)(*args)
    gm.graph.eliminate_dead_code()
    names = [n.name for n in gm.graph.nodes if n.op == "call_function"]
    given = replace(context(gm.graph, names=names), device=torch.device("cuda"))
    report = run_pass(PromoteMatmulPrecision(), gm.graph, given)
    assert (report.error, report.rewritten) == ("", 1)
    (attend,) = gm.graph.find_nodes(op="call_function", target=(other if alike else own).default)
    assert [value.meta["val"].dtype for value in attend.args[:4]] == [torch.bfloat16] * 4
    (output,) = gm.graph.output_node().all_input_nodes
    assert output.meta["val"].dtype == torch.float32
