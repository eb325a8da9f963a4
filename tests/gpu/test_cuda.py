"""fxopt on an NVIDIA GPU: attribution through correlation, CUDA graphs with outputs that keep, bf16 that pays."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxopt
from fxopt.labels import Axis
from fxopt.tuner import FxoptWarning
from fxopt.verify import parse_precision
from passes.cuda_graphs import CudaGraphs, GraphReplay

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


class Block(nn.Module):
    def __init__(self, width: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.heads = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(x)))


@pytest.fixture
def model(fresh_dynamo: None) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).eval().to(DEVICE)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(8, 64, 256, device=DEVICE)


def error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return ((result.double() - exact.double()).norm() / exact.double().norm()).item()


def test_every_kernel_is_attributed_and_time_is_conserved(model, x):
    with torch.no_grad():
        fn = torch.compile(model, backend="profile_guided", options={"disable": ["cuda_graphs"]})
        assert error(fn(x), model(x)) < 1e-5
    graph = fxopt.last_report().graphs[0]
    assert graph.source == "tuned", graph.messages
    profile = graph.profile
    assert profile.attributed_ns + profile.unattributed_ns == profile.total_ns > 0
    assert profile.attributed_share >= 0.99, profile.unattributed()
    assert set(profile.kernels["method"]) == {"correlation"}
    assert (profile.kernels["registers"] > 0).all()
    axes = {label.axis for label in graph.labels}
    assert {Axis.LAUNCH_BOUND, Axis.TENSOR_CORE_IDLE} <= axes


def test_a_launch_bound_model_is_graphed_and_its_outputs_keep(model, x):
    with torch.no_grad():
        fn = torch.compile(model, backend="profile_guided")
        expected = [model(x), model(2 * x)]
        first = fn(x)
        kept = first.clone()
        second = fn(2 * x)
        graph = fxopt.last_report().graphs[0]
        assert graph.passes == ["cuda_graphs"], [(c.name, c.reason) for c in graph.candidates]
        assert graph.output_copies == 1
        assert torch.equal(first, kept), "the next call must not write into an earlier result"
        assert error(first, expected[0]) < 1e-5 and error(second, expected[1]) < 1e-5
    assert graph.ratio.faster


def test_a_replay_owns_the_workspaces_of_its_library_calls():
    """Whoever clears PyTorch's cuBLAS workspaces (reduce-overhead does) must not free memory under a captured graph."""
    a, b = torch.randn(64, 8192, device=DEVICE), torch.randn(8192, 64, device=DEVICE)  # a split-K product

    def product(x, y):
        return torch.mm(x, y)

    product(a, b)
    replay = GraphReplay(product, static=frozenset({1}), device=DEVICE, warmup=2)
    expected = replay(a, b)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    filled = [torch.full((1 << 20,), float("nan"), device=DEVICE) for _ in range(64)]
    assert torch.equal(replay(a, b), expected)
    torch.cuda.synchronize()
    assert all(torch.isnan(tensor).all() for tensor in filled), "the replay wrote into memory of others"


def test_weights_that_move_are_captured_anew(model, x):
    with torch.no_grad():
        fn = torch.compile(model, backend="profile_guided")
        fn(x)
        model[0].up.weight = nn.Parameter(torch.randn_like(model[0].up.weight))
        assert error(fn(x), model(x)) < 1e-5
        model[1].down.bias.add_(1)
        assert error(fn(x), model(x)) < 1e-5


def test_bf16_through_optimize_is_verified_and_keeps_no_cast_of_a_weight(model, x):
    fast = fxopt.optimize(model, (x,), precision="bf16")
    graph = fast.report.graphs[0]
    assert graph.passes == ["freeze_weights", "promote_matmul_precision", "cuda_graphs"], [
        (c.name, c.reason) for c in graph.candidates
    ]
    with torch.no_grad():
        exact = model.double()(x.double())
        model.float()
    assert 1e-5 < error(fast(x), exact) < graph.verdict.limit
    again = fxopt.optimize(model, (x,), precision="bf16")
    assert again.report.graphs[0].source == "plan"
    assert error(again(x), exact) < graph.verdict.limit


def test_nothing_of_tf32_or_of_the_random_state_changes(model, x):
    flags = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    state = torch.cuda.get_rng_state()
    with torch.no_grad():
        torch.compile(model, backend="profile_guided")(x)
    assert flags == (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_a_users_reduce_overhead_is_the_baseline_to_beat(model, x):
    with torch.no_grad():
        fn = torch.compile(model, backend="profile_guided", mode="reduce-overhead")
        for _ in range(3):
            assert error(fn(x), model(x)) < 1e-5
    graph = fxopt.last_report().graphs[0]
    assert graph.source == "tuned", graph.messages
    assert graph.profile.attributed_share >= 0.99, "measured without CUDA graphs"


def test_a_graph_that_cannot_be_replayed_is_refused():
    class Compiled:
        mutated = frozenset({0})

    from fxopt.registry import PassContext

    context = PassContext(device=DEVICE, budget=parse_precision("fp32"))
    tensor = torch.ones(2, device=DEVICE)
    assert "writes to inputs" in CudaGraphs().refuse(Compiled, [tensor], context)
    Compiled.mutated = frozenset()
    assert "is on cpu" in CudaGraphs().refuse(Compiled, [torch.ones(2)], context)
    assert CudaGraphs().refuse(Compiled, [tensor], context) == ""


def test_replay_follows_scalars_streams_and_pass_through_outputs():
    def fn(a, b, scale):
        return [a * scale + b, a, None]

    replay = GraphReplay(fn, static=frozenset({1}), device=DEVICE, warmup=1)
    a, b = torch.randn(64, device=DEVICE), torch.randn(64, device=DEVICE)
    out = replay(a, b, 2.0)
    assert torch.allclose(out[0], a * 2 + b) and out[1] is a and out[2] is None
    assert replay.output_copies == 1
    assert torch.allclose(replay(a, b, 3.0)[0], a * 3 + b)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        other = replay(-a, b, 3.0)[0]
    stream.synchronize()
    assert torch.allclose(other, b - a * 3)


def test_another_profiler_is_named(model, x):
    """CUPTI serves one client at a time: under torch.profiler, measuring cannot work, and the model still runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]), torch.no_grad():
        fn = torch.compile(model, backend="profile_guided")
        with pytest.warns(FxoptWarning, match="plain Inductor"):
            result = fn(x)
    assert error(result, model(x).detach()) < 1e-5
