"""TF32 and bf16 on an NVIDIA GPU: in the compiled graph alone, from the product itself, and settings as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F

import fxopt
from fxopt import registry, testing
from fxopt.build import Builder
from fxopt.torch_api import dynamo
from fxopt.verify import parse_precision
from passes.cuda_graphs import CudaGraphs
from passes.promote_matmul_precision import PromoteMatmulPrecision
from passes.tf32_matmul import Tf32Matmul

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
backends: Any = torch.backends
UNITS = frozenset({"tf32", "bfloat16", "float16"})


def error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return ((result.double() - exact.double()).norm() / exact.double().norm()).item()


def settings() -> list[Any]:
    newer = (backends, backends.cuda.matmul, backends.cudnn, backends.cudnn.conv, backends.cudnn.rnn)
    older = torch.get_float32_matmul_precision(), backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32
    return [*(setting.fp32_precision for setting in newer), *older]


@pytest.fixture(autouse=True)
def fp32(fresh_dynamo: None):
    """Convolutions in fp32 as well, which torch gives TF32 by default."""
    torch.manual_seed(0)
    backends.cudnn.allow_tf32 = False
    yield
    backends.cudnn.allow_tf32 = True


def built(fn, *inputs, passes, precision="bf16"):
    """What the passes make of the graph of `fn`, every node of which they are told to answer."""
    labels = testing.labels(testing.capture(fn, *inputs), "tensor_core_idle", "launch_bound")
    kept: list[Any] = []

    def backend(gm, flat):
        context = testing.context(
            labels=labels, device=DEVICE, precision=precision, matrix_units=UNITS, static=dynamo.static_inputs(gm, flat)
        )
        build = Builder(gm, flat, {}, context).build(registry.order(passes))
        assert build.errors == [] and build.effective, build.reports
        kept.append(build)
        return build.fn

    with torch.no_grad():
        compiled = torch.compile(fn, backend=backend)
        compiled(*inputs)
    return compiled, kept[0]


def convolution(x, w):
    return F.conv2d(x, w, padding=1)


CASES = {
    "matmul": (torch.mm, [(256, 512), (512, 256)]),
    "bmm": (torch.bmm, [(4, 256, 512), (4, 512, 256)]),
    "convolution": (convolution, [(8, 64, 32, 32), (64, 64, 3, 3)]),
}


@pytest.mark.parametrize("passes", [[Tf32Matmul()], [Tf32Matmul(), CudaGraphs()]], ids=["plain", "CUDA graph"])
@pytest.mark.parametrize("case", CASES)
def test_tf32_is_used_in_the_graph_and_nowhere_else(case, passes):
    op, shapes = CASES[case]

    def fn(*args):
        return op(*args) + 1

    args = [torch.randn(shape, device=DEVICE) for shape in shapes]
    exact, before = fn(*[arg.double() for arg in args]), settings()
    compiled, _ = built(fn, *args, passes=passes, precision="tf32")
    for _ in range(4):
        # TF32 has 11 significant bits: unit roundoff 2^-11 = 4.9e-4.
        assert 5e-5 < error(compiled(*args), exact) < 2e-3
        assert settings() == before
        assert error(fn(*args), exact) < 5e-6, "uncompiled beside it, in fp32"


def test_other_compiled_code_is_not_compiled_again():
    counter = CompileCounter()
    beside = torch.compile(lambda a: a @ a + 1, backend=counter)
    a = torch.randn(64, 64, device=DEVICE)
    compiled, _ = built(lambda a: a @ a, a, passes=[Tf32Matmul()], precision="tf32")
    for _ in range(3):
        beside(a)
        compiled(a)
    assert counter.frame_count == 1


def test_the_profiler_runs_inside():
    """It reads the older setting for each operator, which raises where only the newer one is on."""
    a = torch.randn(64, 64, device=DEVICE)
    compiled, _ = built(lambda a: a @ a, a, passes=[Tf32Matmul()], precision="tf32")
    with torch.profiler.profile() as profile:
        compiled(a)
    assert any("mm" in event.key for event in profile.key_averages())


class Wide(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(256, 512)
        self.out = nn.Linear(512, 4096, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(F.gelu(self.up(x)))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("wide", [True, False], ids=["fp32 outputs", "bf16 between"])
def test_the_last_product_writes_the_fp32_result_itself(bias, wide):
    model = Wide(bias).eval().to(DEVICE)
    x = torch.randn(1024, 256, device=DEVICE)
    compiled, build = built(model, x, passes=[PromoteMatmulPrecision(fp32_outputs=wide)])
    targets = [str(n.target) for n in build.compiled.post_grad.graph.nodes if "mm" in str(n.target)]
    assert targets[-1] == "aten.mm.dtype" and len(targets) == 2
    with torch.no_grad():
        got, exact = compiled(x), model.double()(x.double())
    assert got.dtype == torch.float32
    assert 1e-4 < error(got, exact) < parse_precision("bf16").limit(0.0)


@pytest.mark.parametrize("wide", [True, False], ids=["fp32 outputs", "bf16 between"])
def test_attention_written_out_and_a_residual_run_either_way(wide):
    def fn(x, q, k, v):
        scores = torch.softmax((x @ q) @ (x @ k).transpose(-1, -2) / 16, -1)
        return F.layer_norm(x + scores @ (x @ v), (256,))

    x = torch.randn(4, 128, 256, device=DEVICE)
    weights = [torch.randn(256, 256, device=DEVICE) / 16 for _ in range(3)]
    compiled, _ = built(fn, x, *weights, passes=[PromoteMatmulPrecision(fp32_outputs=wide)])
    exact = fn(x.double(), *[weight.double() for weight in weights])
    assert 1e-5 < error(compiled(x, *weights), exact) < parse_precision("bf16").limit(0.0)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64)
        self.second, self.head = nn.Conv2d(64, 64, 3, padding=1), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(torch.relu(self.norm(self.first(x))), 2)
        return self.head(torch.relu(self.second(x)).mean((2, 3)))


def test_a_pool_between_convolutions_stores_bf16():
    model, x = ConvNet().eval().to(DEVICE), torch.randn(16, 3, 64, 64, device=DEVICE)
    compiled, build = built(model, x, passes=[PromoteMatmulPrecision()])
    pool = next(n for n in build.compiled.post_grad.graph.nodes if "max_pool" in str(n.target))
    assert pool.args[0].meta["val"].dtype == torch.bfloat16
    with torch.no_grad():
        got, exact = compiled(x), model.double()(x.double())
    assert 1e-5 < error(got, exact) < parse_precision("bf16").limit(0.0)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_optimize_stays_within_the_class_and_leaves_the_settings_alone(precision):
    model, x = Wide(True).eval().to(DEVICE), torch.randn(2048, 256, device=DEVICE)
    before = settings()
    passes = ["freeze_weights", "tf32_matmul", *(["promote_matmul_precision"] if precision == "bf16" else [])]
    fast = fxopt.optimize(model, (x,), precision=precision, passes=passes)
    graph = fast.report.graphs[0]
    assert graph.source == "tuned", graph.messages
    assert set(passes[1:]) & set(graph.passes), [(c.name, c.reason) for c in graph.candidates]
    got = fast(x)
    assert settings() == before
    with torch.no_grad():
        exact = model.double()(x.double())
    assert error(got, exact) < parse_precision(precision).limit(0.0)
