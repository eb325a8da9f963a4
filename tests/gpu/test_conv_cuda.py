"""Convolutions on an NVIDIA GPU: split fp32 products, cuDNN's search, and the flags that stay as they were."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled_graphs import dynamo_graph
from torch import nn

from fxopt import testing
from fxopt.labels import Axis
from fxopt.manager import SlotPass
from fxopt.registry import Stage
from fxopt.torch_api import inductor
from passes.channels_last import ChannelsLast
from passes.cuda_graphs import CudaGraphs
from passes.cudnn_algorithm import CudnnAlgorithm, Searched
from passes.freeze_weights import FreezeWeights
from passes.split_precision_conv import SplitPrecisionConv, split_rows

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
CONVOLUTION = torch.ops.aten.convolution.default


def error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return ((result.double() - exact).norm() / exact.norm()).item()


@pytest.fixture(autouse=True)
def fp32():
    """cuDNN's convolutions are TF32 unless told otherwise."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=False, allow_tf32=False):
        yield


@pytest.mark.parametrize(
    ("x", "w", "geometry"),
    [
        ((16, 64, 32, 32), (64, 64, 3, 3), {"padding": 1}),
        ((4, 256, 16, 16), (256, 256, 3, 3), {"padding": 1}),
        ((3, 48, 17, 13), (40, 48, 3, 2), {"padding": (1, 0), "stride": (2, 1)}),
        ((2, 32, 19, 19), (24, 32, 3, 3), {"dilation": 2, "padding": 2}),
        ((16, 128, 28, 28), (256, 128, 1, 1), {}),
    ],
)
def test_a_split_convolution_is_as_accurate_as_fp32(x, w, geometry):
    torch.manual_seed(0)
    inputs = [torch.randn(x, device=DEVICE), torch.randn(w, device=DEVICE), torch.randn(w[0], device=DEVICE)]

    def conv(x, w, b):
        return F.conv2d(x, w, b, **geometry)

    exact = conv(*(t.double() for t in inputs))
    for terms, limit in ((3, 4 * error(conv(*inputs), exact)), (1, 1e-3)):
        p = SplitPrecisionConv(terms)
        result = testing.run(p, testing.capture(conv, *inputs), precision="tf32" if terms == 1 else None)
        if terms == 1 and not result.changed:  # in its class cuDNN may be the faster one
            assert all("cuDNN takes" in why for _, why in result.report.refused), str(result)
            continue
        assert result.changed, str(result)
        (out,) = result.fn(*inputs)
        assert out.stride() == conv(*inputs).stride()
        assert error(out, exact) <= limit, terms


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 1e-42, 3e38])
def test_what_no_plane_can_hold_is_computed_in_fp32(bad):
    torch.manual_seed(0)
    x, w = torch.randn(2, 32, 16, 16, device=DEVICE), torch.randn(32, 32, 3, 3, device=DEVICE) * 0.1
    x[1, 3, 5, 5], x[0, :, 0, 0] = bad, torch.logspace(-20, 10, 32, device=DEVICE)
    (out,) = testing.run(SplitPrecisionConv(), testing.capture(F.conv2d, x, w)).fn(x, w)
    own = F.conv2d(x, w)
    assert torch.equal(out.isnan(), own.isnan()) and torch.equal(out.isinf(), own.isinf())
    finite = own.isfinite()
    bound = F.conv2d(x.double().abs(), w.double().abs())[finite]
    assert ((out - own)[finite].abs() <= 1e-5 * bound).all()


class Block(nn.Module):
    """Convolutions with batch normalisation and pooling, the first of three channels."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for channels, out in ((3, 64), (64, 64), (64, 128)):
            layers += [nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
        self.features = nn.Sequential(*layers, nn.MaxPool2d(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.features(x).mean((2, 3))


def compiled(model: nn.Module, x: torch.Tensor, p) -> tuple:
    """The frozen model compiled with one pass at the joint stage, its report, and its inputs."""
    gm, inputs = dynamo_graph(model, x)
    graph = testing.capture(model, x)
    nodes = [n.name for n in graph.graph.nodes if n.target is CONVOLUTION]
    labels = testing.labels(graph, Axis.TENSOR_CORE_IDLE, nodes=nodes)
    slot = SlotPass([p], testing.context(p, device="cuda:0", labels=labels), Stage.JOINT)
    owned = {id(t) for t in (*model.parameters(), *model.buffers())}
    frozen = frozenset(i for i, v in enumerate(inputs) if id(v) in owned)
    made = inductor.compile_graph(gm, inputs, patches={}, slots={"joint": slot}, freeze=frozen, caches=False)
    return made, slot.reports[0], inputs


def test_a_compiled_model_keeps_the_low_planes_and_splits_its_weights_beforehand(fresh_dynamo):
    torch.manual_seed(0)
    model, x = Block().eval().to(DEVICE), torch.randn(4, 3, 32, 32, device=DEVICE)
    with torch.no_grad():
        made, report, inputs = compiled(model, x, SplitPrecisionConv())
        own = model(x)
        (out,) = made.flat(inputs)(*inputs)
        exact = model.double()(x.double())
    assert report.rewritten == 2 and any("3 input channels" in why for _, why in report.refused), report
    splits = [n for n in made.post_grad.graph.nodes if n.target is torch.ops.fxopt.split_conv.default]
    assert len(splits) == 2 and all(a.op == "get_attr" for n in splits for a in n.args[3:6])
    assert error(out, exact) <= max(4 * error(own, exact), 9.5e-7)


def test_planes_made_by_inductor_are_those_made_eagerly(fresh_dynamo):
    """Elided casts would show here: the low plane would be zero."""
    torch.manual_seed(0)
    rows = torch.randn(4096, 128, device=DEVICE) * torch.logspace(-15, 20, 4096, device=DEVICE)[:, None]
    rows[7, 3], rows[9, 1], rows[11, 2] = float("inf"), float("nan"), 1e-38
    for terms in (3, 1):
        eager, made = split_rows(rows, terms), torch.compile(split_rows)(rows, terms)
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(eager, made, strict=True)), terms
        assert terms == 1 or eager[1].count_nonzero() > 0.9 * rows.numel()


def test_batch_normalisation_is_gone_from_frozen_code(fresh_dynamo):
    model, x = Block().eval().to(DEVICE), torch.randn(4, 3, 32, 32, device=DEVICE)
    patches = testing.run(FreezeWeights(), testing.capture(model, x)).configuration.patches
    with torch._inductor.config.patch(patches):
        folded = testing.capture(model, x, stage="post_grad", freeze=True)
    arithmetic = {torch.ops.aten.sub.Tensor, torch.ops.aten.mul.Tensor, torch.ops.aten.add.Tensor}
    assert not any(node.target in arithmetic for node in folded.graph.nodes), testing.text(folded)


def test_inductor_lays_out_an_inference_graph_itself():
    x, w = torch.randn(2, 16, 8, 8, device=DEVICE), torch.randn(16, 16, 3, 3, device=DEVICE)
    testing.refuses(ChannelsLast(), F.conv2d, x, w, because="Inductor puts the whole graph")


def test_a_search_leaves_the_flags_and_the_results_alone():
    torch.manual_seed(0)
    x, w = torch.randn(8, 64, 30, 30, device=DEVICE), torch.randn(64, 64, 3, 3, device=DEVICE)
    result = testing.run(CudnnAlgorithm(), testing.capture(F.conv2d, x, w))
    assert result.changed and isinstance(result.fn, Searched)
    exact = F.conv2d(x.double(), w.double())
    for _ in range(3):
        (out,) = result.fn(x, w)
        assert torch.backends.cudnn.benchmark is False and torch.backends.cudnn.allow_tf32 is False
        assert error(out, exact) < 1e-5


def test_a_search_can_be_captured_in_a_cuda_graph():
    x, w = torch.randn(8, 64, 30, 30, device=DEVICE), torch.randn(64, 64, 3, 3, device=DEVICE)
    graph = testing.capture(F.conv2d, x, w)
    context = testing.context(CudaGraphs(), device="cuda:0")
    searched = Searched(graph, DEVICE)
    replay: Any = CudaGraphs().wrap(searched, [x, w], SimpleNamespace(mutated=frozenset()), context)
    for _ in range(3):
        x.normal_()
        assert error(replay(x, w)[0], F.conv2d(x.double(), w.double())) < 1e-5
    assert replay.captures == 1
    assert torch.backends.cudnn.benchmark is False
