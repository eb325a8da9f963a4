"""split_precision_conv: the graph after, fp32's accuracy whatever the inputs hold, what is shared, folded and refused.

On the CPU, where the operator has the kernel's arithmetic in torch; the kernel itself is in test_split_conv_kernel.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from compiled_graphs import dynamo_graph
from torch import nn

from fxopt import testing
from fxopt.manager import SlotPass
from fxopt.precision import FP32_FLOOR, Precision
from fxopt.registry import Stage
from fxopt.torch_api import inductor
from fxopt.torch_api.inductor import lowers
from passes import split_precision_conv
from passes.kernels import tiling
from passes.split_precision_conv import SplitPrecisionConv, split_rows

SPLIT: Any = torch.ops.fxopt.split_conv.default
CONVOLUTION: Any = torch.ops.aten.convolution.default


@dataclass(frozen=True)
class OnCpu(SplitPrecisionConv):
    devices: ClassVar[tuple[str, ...]] = ("cpu",)


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def conv(x, w, b=None, **geometry):
    return F.conv2d(x, w, b, **geometry)


def targets(module) -> list[Any]:
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return ((result.double() - exact).norm() / exact.norm()).item()


def run(fn, *inputs: torch.Tensor, terms: int = 3) -> Any:
    return testing.run(OnCpu(terms), testing.capture(fn, *inputs), precision="tf32" if terms == 1 else None)


def output(result, *inputs: torch.Tensor) -> torch.Tensor:
    assert result.changed, str(result)
    (out,) = result.fn(*inputs)
    return out


# ---------------------------------------------------------------- the split


def decoded(high, low, scale):
    return (high.view(torch.float16).double() + low.view(torch.float16).double() / 2048) / scale.double()


def test_two_planes_hold_23_bits_of_every_element():
    rows = values(50, 300) * torch.logspace(-12, 20, 50)[:, None]
    high, low, scale = split_rows(rows)
    assert (scale > 0).all()
    assert ((decoded(high, low, scale) - rows).abs() <= rows.abs().double() * 2**-22).all()
    largest = rows.abs().amax(1, keepdim=True) * scale
    assert (largest >= 2**14).all() and (largest < 2**15).all()


def test_zeros_are_held_as_zeros():
    high, low, scale = split_rows(torch.tensor([[0.0, 0.0], [0.0, -3.0]]))
    assert torch.equal(decoded(high, low, scale), torch.tensor([[0.0, 0.0], [0.0, -3.0]]).double())


@pytest.mark.parametrize(
    "row", [[1.0, float("inf")], [float("nan"), 1.0], [1.0, 1e-9], [1e-20, 1e-20], [3e38, 1e38], [1e-40, 0.0]]
)
def test_a_row_that_planes_cannot_hold_keeps_its_own_bits(row):
    rows = torch.tensor([row, [1.0, 2.0]])
    high, low, scale = split_rows(rows)
    assert scale.flatten().tolist() == [0.0, 2.0**13]
    bits = (high[0].to(torch.int32) << 16) | (low[0].to(torch.int32) & 0xFFFF)
    assert torch.equal(bits, rows[0].view(torch.int32))


# ---------------------------------------------------------------- the graph


def test_a_convolution_becomes_a_split_one_of_two_split_operands():
    result = run(
        lambda x, w, b: torch.relu(conv(x, w, b, padding=1)), values(2, 16, 6, 5), values(8, 16, 3, 3), values(8)
    )
    called = targets(result.module)
    assert called.count(SPLIT) == 1 and CONVOLUTION not in called
    assert all(lowers(target) for target in called)
    (node,) = (n for n in result.module.graph.nodes if n.target is SPLIT)
    shapes = [(tuple(a.meta["val"].shape), a.meta["val"].dtype) for a in node.args[:6]]
    assert shapes == [
        ((2, 6, 5, 16), torch.int16),
        ((2, 6, 5, 16), torch.int16),
        ((2, 6, 5, 1), torch.float32),
        ((8, 144), torch.int16),
        ((8, 144), torch.int16),
        ((8, 1), torch.float32),
    ]
    assert all(a.meta["val"].is_contiguous() for a in node.args[:6])


@pytest.mark.parametrize(
    ("x", "w", "bias", "geometry"),
    [
        ((2, 32, 9, 8), (24, 32, 3, 3), True, {"padding": 1}),
        ((2, 16, 9, 8), (8, 16, 3, 2), False, {"stride": (2, 1), "padding": (0, 1)}),
        ((1, 16, 11, 9), (8, 16, 3, 3), True, {"dilation": (2, 3), "padding": 2}),
        ((3, 64, 5, 5), (40, 64, 1, 1), True, {}),
        ((2, 16, 7, 7), (1, 16, 5, 5), True, {"padding": "same"}),
    ],
)
def test_any_window_is_as_accurate_as_fp32(x, w, bias, geometry):
    inputs = [values(*x), values(*w, seed=1), *([values(w[0], seed=2)] if bias else [])]

    def fn(*tensors):
        return conv(*tensors, **geometry)

    exact = fn(*(t.double() for t in inputs))
    own = error(fn(*inputs), exact)
    out = output(run(fn, *inputs), *inputs)
    assert out.stride() == fn(*inputs).stride()
    assert error(out, exact) <= max(4 * own, FP32_FLOOR)
    coarse = error(output(run(fn, *inputs, terms=1), *inputs), exact)
    assert 1e-5 < coarse < 1e-3, "one product has 11 bits"


def test_a_1d_convolution_is_a_2d_one():
    x, w, b = values(2, 16, 30), values(8, 16, 3, seed=1), values(8, seed=2)

    def fn(x, w, b):
        return F.conv1d(x, w, b, stride=2, padding=1, dilation=2)

    exact = fn(x.double(), w.double(), b.double())
    out = output(run(fn, x, w, b), x, w, b)
    assert out.stride() == fn(x, w, b).stride()
    assert error(out, exact) <= max(4 * error(fn(x, w, b), exact), FP32_FLOOR)


def test_outputs_in_channels_last_stay_so():
    x = values(2, 16, 6, 5).to(memory_format=torch.channels_last)
    w = values(8, 16, 3, 3, seed=1)
    assert output(run(conv, x, w), x, w).stride() == conv(x, w).stride()


def test_a_value_that_two_convolutions_read_is_split_once():
    def fork(x, a, b):
        return conv(x, a) + conv(x, b)

    inputs = values(2, 16, 6, 5), values(8, 16, 3, 3, seed=1), values(8, 16, 3, 3, seed=2)
    result = run(fork, *inputs)
    one, two = (n for n in result.module.graph.nodes if n.target is SPLIT)
    assert one.args[:3] == two.args[:3] and one.args[3] is not two.args[3]
    exact = fork(*(t.double() for t in inputs))
    assert error(output(result, *inputs), exact) <= max(4 * error(fork(*inputs), exact), FP32_FLOOR)


# ---------------------------------------------------------------- inputs of every kind


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan"), 1e-42, 3e38])
def test_what_an_input_holds_at_run_time_comes_out_as_in_fp32(bad):
    x, w, b = values(2, 16, 8, 8), values(8, 16, 3, 3, seed=1) * 0.1, values(8, seed=2)
    result = run(lambda x, w, b: conv(x, w, b), x, w, b)
    x[1, 3, 4, 4] = bad
    out, own = output(result, x, w, b), conv(x, w, b)
    assert torch.equal(out.isnan(), own.isnan()) and torch.equal(out.isinf(), own.isinf())
    finite = own.isfinite()
    assert (out - own)[finite].abs().max() <= 1e-5 * own[finite].abs().max()


def test_pixels_and_weights_of_very_mixed_sizes_keep_their_accuracy():
    x = values(2, 32, 8, 8) * torch.logspace(-10, 10, 64).reshape(8, 8)
    w = values(16, 32, 3, 3, seed=1) * torch.logspace(-8, 8, 16).reshape(16, 1, 1, 1)
    x[0, 5] *= 1e-12
    w[3, 4] *= 1e-15
    out, exact = output(run(conv, x, w), x, w), conv(x.double(), w.double())
    bound = conv(x.double().abs(), w.double().abs())
    own = ((conv(x, w).double() - exact).abs() / bound).max()
    assert ((out.double() - exact).abs() / bound).max() <= max(4 * own, 2**-22)


# ---------------------------------------------------------------- compiled


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.silu(self.first(x))).relu()


def test_inductor_keeps_the_low_planes_and_folds_the_weights_split(fresh_dynamo):
    torch.manual_seed(0)
    model, x = Two().eval(), values(2, 16, 8, 8)
    gm, inputs = dynamo_graph(model, x)
    frozen = frozenset(i for i, v in enumerate(inputs) if isinstance(v, nn.Parameter))
    labels = testing.labels(testing.capture(model, x), "tensor_core_idle", nodes=["convolution", "convolution_1"])
    slot = SlotPass([OnCpu()], testing.context(OnCpu(), labels=labels), Stage.JOINT)
    with torch.no_grad():
        compiled = inductor.compile_graph(gm, inputs, patches={}, slots={"joint": slot}, freeze=frozen, caches=False)
    assert [report.rewritten for report in slot.reports] == [2], slot.reports
    splits = [n for n in compiled.post_grad.graph.nodes if n.target is SPLIT]
    assert len(splits) == 2
    assert all(a.op == "get_attr" for n in splits for a in n.args[3:6]), "a frozen weight is split while compiling"
    with torch.no_grad():
        (out,) = compiled.flat(inputs)(*inputs)
        own = model(x)
        exact = model.double()(x.double())
    assert error(out, exact) <= max(4 * error(own, exact), FP32_FLOOR)


# ---------------------------------------------------------------- what it refuses


@pytest.mark.parametrize(
    ("fn", "shapes", "because"),
    [
        (lambda x, w: F.conv2d(x, w, groups=2), ((1, 32, 5, 5), (8, 16, 3, 3)), "2 groups"),
        (lambda x, w: F.conv_transpose2d(x, w), ((1, 16, 5, 5), (16, 8, 3, 3)), "transposed"),
        (lambda x, w: F.conv3d(x, w), ((1, 16, 5, 5, 5), (8, 16, 3, 3, 3)), "more than two dimensions"),
        (lambda x, w: F.conv2d(x, w), ((1, 3, 5, 5), (8, 3, 3, 3)), "3 input channels"),
        (lambda x, w: F.conv2d(x.double(), w.double()), ((1, 16, 5, 5), (8, 16, 3, 3)), "not float32"),
        (lambda x, w: F.conv2d(x[:0], w), ((1, 16, 5, 5), (8, 16, 3, 3)), "empty"),
    ],
)
def test_what_is_left_alone(fn, shapes, because):
    testing.refuses(OnCpu(), fn, *(values(*shape) for shape in shapes), because=because)


def test_a_convolution_without_a_label_is_left_alone():
    testing.refuses(OnCpu(), conv, values(1, 16, 5, 5), values(8, 16, 3, 3), because="not labelled", labels=())


@pytest.mark.parametrize(
    ("fields", "because"),
    [
        ({"grad": True}, "no backward"),
        ({"dynamic": True}, "symbolic"),
        ({"matrix_units": frozenset()}, "no fp16 matrix units"),
    ],
)
def test_graphs_that_it_does_not_apply_to(fields, because):
    context = testing.context(OnCpu(), **fields)
    testing.refuses(OnCpu(), conv, values(1, 16, 5, 5), values(8, 16, 3, 3), because=because, context=context)


def test_one_product_is_not_for_fp32():
    testing.refuses(OnCpu(1), conv, values(1, 16, 5, 5), values(8, 16, 3, 3), because="TF32's accuracy")


def test_a_cpu_graph_is_not_for_it():
    testing.refuses(SplitPrecisionConv(), conv, values(1, 16, 5, 5), values(8, 16, 3, 3), because="for cuda")


@pytest.mark.parametrize(
    ("precision", "terms"), [("fp32", [3]), (1.5e-5, [3]), ("tf32", [1, 3]), ("bf16", [1, 3]), (1e-3, [1, 3])]
)
def test_one_product_is_offered_where_the_budget_may_bear_it(precision, terms):
    offered = SplitPrecisionConv().variants(testing.context(SplitPrecisionConv(), precision=precision))
    assert [p.terms for p in offered] == terms
    assert all(p.precision is Precision.FP32 for p in offered)


def test_inductor_hands_the_planes_over_as_the_kernel_reads_them(fresh_dynamo, monkeypatch):
    """Beside a depthwise convolution, where Inductor would rather have channels-last strides."""
    seen: list[bool] = []

    def spy(x, w, *geometry):
        if type(x) is torch.Tensor:
            seen.append(x.is_contiguous() and w.is_contiguous())
        return empty(x, w, *geometry)

    empty = split_precision_conv._empty
    monkeypatch.setattr(split_precision_conv, "_empty", spy)
    depthwise = [(nn.Conv2d(n, n, 3, padding=1, groups=n), nn.BatchNorm2d(n), nn.ReLU()) for n in (32, 64)]
    pointwise = [(nn.Conv2d(n, 96 - n, 1), nn.BatchNorm2d(96 - n), nn.ReLU()) for n in (32, 64)]
    model = nn.Sequential(*depthwise[0], *pointwise[0], *depthwise[1], *pointwise[1]).eval()
    x = values(2, 32, 12, 12)
    gm, inputs = dynamo_graph(model, x)
    labels = testing.labels(testing.capture(model, x), "tensor_core_idle")
    slot = SlotPass([OnCpu()], testing.context(OnCpu(), labels=labels), Stage.JOINT)
    with torch.no_grad():
        compiled = inductor.compile_graph(gm, inputs, patches={}, slots={"joint": slot}, caches=False)
        (out,) = compiled.flat(inputs)(*inputs)
        exact = model.double()(x.double())
    assert [report.rewritten for report in slot.reports] == [2], slot.reports
    assert seen == [True, True]
    assert error(out, exact) <= FP32_FLOOR


def test_a_convolution_that_cudnn_computes_faster_in_tf32_is_left_to_it(monkeypatch):
    """By one product, which has TF32's accuracy; times as a GPU would give them."""
    asked = []

    def convolution(self, of, device):
        asked.append(of)
        return (20.0, 10.0) if of.w[0] == 8 else (5.0, 10.0)

    monkeypatch.setattr(tiling.Choices, "convolution", convolution)

    def both(x, w, v):
        return F.conv2d(x, w, padding=1), F.conv2d(x, v, stride=2)

    graph = testing.capture(both, values(2, 16, 6, 6), values(8, 16, 3, 3), values(32, 16, 1, 1))
    labels = testing.labels(graph, "tensor_core_idle")
    context = testing.context(OnCpu(1), labels=labels, precision="tf32")
    found = [candidate.refused for candidate in OnCpu(1).candidates(graph.graph, context)]
    assert found == ["cuDNN takes 10.0 us in TF32, this kernel 20.0 us", ""]
    assert asked == [
        tiling.Convolution((2, 16, 6, 6), (8, 16, 3, 3), (1, 1), (1, 1), (1, 1)),
        tiling.Convolution((2, 16, 6, 6), (32, 16, 1, 1), (2, 2), (0, 0), (1, 1)),
    ]
    assert [candidate.refused for candidate in OnCpu(3).candidates(graph.graph, context)] == ["", ""]


@pytest.mark.parametrize("terms", [3, 1])
def test_the_operator_keeps_what_torch_asks_of_operators(terms):
    x = split_rows(values(2, 7, 6, 32), terms)
    w = split_rows(values(20, 3 * 2 * 32, seed=1), terms)
    torch.library.opcheck(
        SPLIT,
        (*x, *w, values(20, seed=2), [3, 2], [2, 1], [0, 1], [1, 2]),
        test_utils=("test_schema", "test_faketensor"),
    )
