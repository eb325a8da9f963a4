"""gemm_epilogue on an NVIDIA GPU: cuBLASLt's own numbers, and the kernels that go away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled_graphs import dynamo_graph

from fxopt import testing
from fxopt.build import Builder
from fxopt.labels import Axis, Label
from passes.gemm_epilogue import GemmEpilogue

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
P = GemmEpilogue()
LAUNCHES = Label(Axis.LAUNCH_BOUND, "graph", (), "", (), "high", 1.0, "given by a test")


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "gelu_tanh": gelu_tanh,
    "gelu": F.gelu,
}


def rand(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(sum(shape))
    return torch.randn(shape, device=DEVICE, generator=generator).to(dtype)


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("sizes", [(512, 768, 3072), (37, 64, 24), (5, 7, 9), (4, 2, 8), (1000, 130, 66)], ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["w", "w.t()"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_call_is_as_accurate_as_product_and_activation_apart(
    name: str, dtype: torch.dtype, transposed: bool, sizes: tuple[int, int, int]
):
    m, k, n = sizes
    activation = ACTIVATIONS[name]
    x, bias = rand(m, k, dtype=dtype), rand(n, dtype=dtype)
    w = rand(n, k, dtype=dtype).t() if transposed else rand(k, n, dtype=dtype)

    def fn(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return activation(torch.addmm(bias, x, w / k**0.5))

    graph = testing.capture(fn, x, w, bias, stage="post_grad")
    result = testing.run(P, graph, precision="bf16")
    assert result.report.rewritten == 1, result
    inputs = graph.meta["example_inputs"]
    (found,), (apart,) = result.fn(*inputs), graph(*inputs)
    exact = activation(x.double() @ (w / k**0.5).double() + bias.double())
    assert found.stride() == apart.stride() and found.dtype == dtype
    # eps / 4 is more than a rounding in the mean, for a fast tanh; the exact GELU becomes the tanh form.
    allowed = error(apart, exact) + torch.finfo(dtype).eps / 4 + (5e-4 if name == "gelu" else 0)
    assert error(found, exact) <= allowed


def test_the_gelu_of_the_library_is_the_tanh_form():
    x = torch.linspace(-3, -2, 512, device=DEVICE).view(8, 64).half()  # where the forms differ most, and fp16 little
    zeros, ones = torch.zeros(64, device=DEVICE).half(), torch.eye(64, device=DEVICE).half()
    found = torch.ops.aten._addmm_activation(zeros, x, ones, use_gelu=True).double()
    exact, tanh = F.gelu(x.double()), gelu_tanh(x.double())
    assert (found - tanh).abs().mean() < (found - exact).abs().mean()


def kernels(fn: Callable[..., Any], arguments: list[Any]) -> list[str]:
    """Names of the kernels of one call."""
    fn(*arguments)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        fn(*arguments)
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_kernels_of_the_activations_are_gone(name: str, fresh_dynamo: None):
    activation = ACTIVATIONS[name]
    x, wide, narrow = (rand(*shape, dtype=torch.bfloat16) for shape in ((512, 768), (3072, 768), (768, 3072)))
    wide, narrow = wide / 768**0.5, narrow / 3072**0.5

    def mlp(x: torch.Tensor, wide: torch.Tensor, narrow: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = F.linear(activation(F.linear(x, wide, narrow[0])), narrow, wide[0])
        return x

    gm, arguments = dynamo_graph(mlp, x, wide, narrow)
    builder = Builder(gm, arguments, {}, testing.context(P, device=DEVICE, precision="bf16", labels=[LAUNCHES]))
    with torch.no_grad():
        apart, together = builder.build([]), builder.build([P])
        assert together.reports[0].rewritten == 2 and not together.errors
        before, after = (kernels(build.fn, arguments) for build in (apart, together))
        assert len([kernel for kernel in before if kernel.startswith("triton_")]) == 2, before
        assert not [kernel for kernel in after if kernel.startswith("triton_")], after
        assert len(after) <= len(before) - 2, (before, after)
        exact = mlp(x.double(), wide.double(), narrow.double())
        (found,), (own,) = together.fn(*arguments), apart.fn(*arguments)
    assert error(found, exact) <= 1.5 * error(own, exact) + (5e-4 if name == "gelu" else 0)
