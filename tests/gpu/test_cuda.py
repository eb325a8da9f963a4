"""fxopt on an NVIDIA GPU: attribution through correlation, CUDA graphs with outputs that keep, bf16 that pays."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

import fxopt
from fxopt import testing
from fxopt.labels import Axis
from fxopt.torch_api import inductor
from fxopt.torch_api.calls import current_stream_address
from fxopt.tuner import FxoptWarning
from fxopt.verify import parse_precision
from passes.cuda_graphs import CudaGraphs, GraphReplay
from passes.inductor_options import CHOICES
from passes.pad_matmul import PadMatmul

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
GRAPHS = {"passes": ["cuda_graphs"]}  # all passes would take minutes, and keep what these tests are not about


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
        fn = torch.compile(model, backend="profile_guided", options={"passes": []})
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
        fn = torch.compile(model, backend="profile_guided", options=GRAPHS)
        expected = [model(x), model(2 * x)]
        first = fn(x)
        kept = first.clone()
        second = fn(2 * x)
        graph = fxopt.last_report().graphs[0]
        assert graph.passes == ["cuda_graphs"], [(c.name, c.reason) for c in graph.candidates]
        assert graph.output_copies == 0
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
        fn = torch.compile(model, backend="profile_guided", options=GRAPHS)
        fn(x)
        model[0].up.weight = nn.Parameter(torch.randn_like(model[0].up.weight))
        assert error(fn(x), model(x)) < 1e-5
        model[1].down.bias.add_(1)
        assert error(fn(x), model(x)) < 1e-5


def test_bf16_through_optimize_is_verified_and_keeps_no_cast_of_a_weight(model, x):
    passes = ["freeze_weights", "promote_matmul_precision", "cuda_graphs"]
    fast = fxopt.optimize(model, (x,), precision="bf16", passes=passes)
    graph = fast.report.graphs[0]
    assert graph.passes == passes, [(c.name, c.reason) for c in graph.candidates]
    with torch.no_grad():
        exact = model.double()(x.double())
        model.float()
    assert 1e-5 < error(fast(x), exact) < graph.verdict.limit
    again = fxopt.optimize(model, (x,), precision="bf16", passes=passes)
    assert again.report.graphs[0].source == "plan"
    assert error(again(x), exact) < graph.verdict.limit


def test_nothing_of_tf32_or_of_the_random_state_changes(model, x):
    flags = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    state = torch.cuda.get_rng_state()
    with torch.no_grad():
        torch.compile(model, backend="profile_guided", options=GRAPHS)(x)
    assert flags == (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_a_users_reduce_overhead_is_the_baseline_to_beat(model, x, monkeypatch):
    monkeypatch.setenv("FXOPT_PASSES", "cuda_graphs")  # torch.compile takes no options beside a mode
    with torch.no_grad():
        fn = torch.compile(model, backend="profile_guided", mode="reduce-overhead")
        for _ in range(3):
            assert error(fn(x), model(x)) < 1e-5
    graph = fxopt.last_report().graphs[0]
    assert graph.source == "tuned", graph.messages
    assert graph.profile.attributed_share >= 0.99, "measured without CUDA graphs"


def test_a_graph_that_cannot_be_replayed_is_refused():
    class Compiled:
        mutated = frozenset({0})  # what is written to is captured where it is

    from fxopt.registry import PassContext

    context = PassContext(device=DEVICE, budget=parse_precision("fp32"))
    tensor = torch.ones(2, device=DEVICE)
    assert "shares memory with input 0" in CudaGraphs().refuse(Compiled, [tensor, tensor[:1]], context)
    assert CudaGraphs().refuse(Compiled, [tensor, torch.ones(2, device=DEVICE)], context) == ""
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
    assert replay.output_copies == 0
    assert torch.allclose(replay(a, b, 3.0)[0], a * 3 + b)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        other = replay(-a, b, 3.0)[0]
    stream.synchronize()
    assert torch.allclose(other, b - a * 3)


def test_outputs_are_handed_out_where_they_lie_and_kept_while_they_are_held():
    weight = torch.randn(256, 256, device=DEVICE)
    replay = GraphReplay(lambda x, w: [torch.relu(x @ w), x + 1], static=frozenset({1}), device=DEVICE, warmup=2)
    inputs = [torch.randn(64, 256, device=DEVICE) for _ in range(6)]
    expected = [[torch.relu(x @ weight), x + 1] for x in inputs]
    homes = {tuple(out.data_ptr() for out in replay(x, weight)) for x in inputs}
    assert len(homes) == 1 and replay._twin is None
    kept = [replay(x, weight) for x in inputs]  # all of them held: another capture, whose outputs are copied out
    assert replay._twin is not None and replay.captures == 1
    again = [replay(x, weight)[0] for x in inputs]
    for found, wanted, second in zip(kept, expected, again, strict=True):
        assert all(map(torch.equal, found, wanted)) and torch.equal(second, wanted[0])
    del kept, again, found, second
    assert {tuple(out.data_ptr() for out in replay(x, weight)) for x in inputs} == homes


def test_a_held_output_outlives_its_graph():
    replay = GraphReplay(lambda x: [x * 2], static=frozenset(), device=DEVICE, warmup=1)
    out = replay(torch.ones(1 << 20, device=DEVICE))[0]
    del replay
    gc.collect()
    torch.cuda.empty_cache()
    filled = [torch.zeros(1 << 20, device=DEVICE) for _ in range(16)]
    torch.cuda.synchronize()
    assert (out == 2).all() and len(filled) == 16


def test_the_address_of_the_current_stream_is_torchs():
    for stream in (torch.cuda.default_stream(DEVICE), torch.cuda.Stream(DEVICE), torch.cuda.Stream(DEVICE)):
        with torch.cuda.stream(stream):
            addresses = {current_stream_address(0), current_stream_address(-1)}
            assert addresses == {stream.cuda_stream} == {torch.cuda.current_stream().cuda_stream}


class Decoder(nn.Module):
    """One decoding step with a static key-value cache, whose position is counted in a buffer."""

    def __init__(self, width: int = 64, length: int = 16) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("keys", torch.zeros(length, width))
        self.register_buffer("values", torch.zeros(length, width))
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        self.keys.index_copy_(0, self.position, k)
        self.values.index_copy_(0, self.position, v)
        self.position.add_(1)
        seen = torch.arange(self.keys.shape[0], device=x.device) < self.position
        scores = (q @ self.keys.T / 8).masked_fill(~seen, float("-inf"))
        return self.out(scores.softmax(-1) @ self.values)


def test_decoding_with_a_static_cache_is_graphed_and_changes_it_once_a_call(fresh_dynamo):
    torch.manual_seed(0)
    model = Decoder().eval().to(DEVICE)
    plain = copy.deepcopy(model)
    with torch.no_grad():
        fn = torch.compile(model, backend="profile_guided", options=GRAPHS)
        for step in range(16):  # a seventeenth would write outside of the cache
            x = torch.randn(1, 64, device=DEVICE)
            assert error(fn(x), plain(x)) < 1e-5, step
            assert torch.equal(model.position, plain.position)
            assert error(model.keys, plain.keys) < 1e-5
    graph = fxopt.last_report().graphs[0]
    assert graph.passes == ["cuda_graphs"], [(c.name, c.reason) for c in graph.candidates]


def test_a_replay_writes_to_the_cache_where_it_is_and_follows_one_that_moves():
    def step(cache, position, x):
        cache.index_copy_(0, position, x)
        position.add_(1)
        return [cache.sum(0)]

    replay = GraphReplay(step, static=frozenset(), written=frozenset({0, 1}), device=DEVICE, warmup=3)
    states = [(torch.zeros(4, 3, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)) for _ in range(2)]
    for n in range(4):  # a fifth write is out of range
        for cache, position in states:
            out = replay(cache, position, torch.full((1, 3), n + 1.0, device=DEVICE))[0]
            assert out.tolist() == [(n + 1) * (n + 2) / 2] * 3
    assert [position.item() for _, position in states] == [4, 4]
    assert replay.captures == 2


def test_inputs_and_outputs_of_one_type_are_copied_together():
    def fn(a, b, i, c):
        return [a + b, a - c, i + 1, (a > 0).to(torch.int64)]

    replay = GraphReplay(fn, static=frozenset(), device=DEVICE, warmup=1)
    for seed in range(3):
        torch.manual_seed(seed)
        a, b, c = (torch.randn(64, device=DEVICE) for _ in range(3))
        args = a, b, torch.arange(64, device=DEVICE) * seed, torch.cat([c, c])[::2]
        found = replay(*args)
        assert all(torch.equal(x, y) for x, y in zip(found, fn(*args), strict=True))
    kept = [value.clone() for value in found]
    replay(*(value * 0 for value in args))
    assert all(torch.equal(x, y) for x, y in zip(found, kept, strict=True))


@pytest.mark.parametrize("choose", ["max_autotune_pointwise", "coordinate_descent_tuning", "combo_kernels"])
def test_inductors_options_are_seen_in_the_code_that_they_change(choose, fresh_dynamo):
    def fn(x, y, z):  # Inductor combines the pointwise kernels, which are of different sizes
        return x.sin() * 2, y.cos().sum(-1), z.tanh()

    counts = []

    def backend(gm, inputs):
        for patches in ({}, CHOICES[choose].patches):
            compiled = inductor.compile_graph(gm, inputs, patches=patches, caches=False)
            counts.append(CHOICES[choose].count(compiled.graph.source_code))
        return compiled.fn

    given = torch.randn(1000, device=DEVICE), torch.randn(64, 128, device=DEVICE), torch.randn(77, device=DEVICE)
    with torch.no_grad():
        found = torch.compile(fn, backend=backend)(*given)
    assert counts[0] == 0 and counts[1] >= 1, counts
    assert all(error(a, b) < 1e-6 for a, b in zip(found, fn(*given), strict=True))


def test_a_padded_product_is_as_right_as_the_one_that_was_there():
    a = torch.randn(4, 770, device=DEVICE, dtype=torch.bfloat16)
    b = torch.randn(770, 1001, device=DEVICE, dtype=torch.bfloat16)
    graph = testing.capture(lambda a, b: (a @ b).relu(), a, b, stage="post_grad")
    result = testing.run(PadMatmul(), graph)
    assert result.report.rewritten == 1, result
    assert error(result.fn(a, b)[0], (a.double() @ b.double()).relu()) < 1e-2


def test_another_profiler_is_named(model, x):
    """CUPTI serves one client at a time: under torch.profiler, measuring cannot work, and the model still runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]), torch.no_grad():
        fn = torch.compile(model, backend="profile_guided", options=GRAPHS)
        with pytest.warns(FxoptWarning, match="plain Inductor"):
            result = fn(x)
    assert error(result, model(x).detach()) < 1e-5
