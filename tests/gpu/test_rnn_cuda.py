"""rnn_redispatch on a GPU: cuDNN's bits in one graph, TF32 and half in the layer alone, captured in a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fxopt
from fxopt import registry, rnn
from passes.cuda_graphs import GraphReplay
from passes.kernels import launch, tiling
from passes.rnn_redispatch import RnnRedispatch
from passes.split_rnn import split_lstm

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], width: int = 256) -> None:
        super().__init__()
        self.layer = kind(width, width, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]


@pytest.fixture(autouse=True)
def _fp32(fresh_dynamo: None) -> Iterator[None]:
    """Full fp32 in cuDNN, as the comparisons have it."""
    torch.manual_seed(0)
    registry.register(RnnRedispatch)
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(8, 64, 256, device=DEVICE)


def operator(layer: nn.RNNBase, x: torch.Tensor, compute: str = "", flat: torch.Tensor | None = None) -> Any:
    mode = layer.mode.lower()
    state = torch.zeros(2, x.size(0), layer.hidden_size, device=DEVICE, dtype=x.dtype)
    weights = [w.detach() for w in layer._flat_weights]
    return rnn.RNN(x, [state, state] if mode == "lstm" else [state], weights, flat, mode, True, 2, False, True, compute)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_the_operator_is_cudnns_call(kind, x):
    layer = kind(256, 256, 2, batch_first=True).to(DEVICE).eval()
    with torch.no_grad():
        out, *_ = operator(layer, x)
        expected = layer(x)[0]
    assert torch.equal(out, expected) and out.stride() == expected.stride()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_packed_weights_are_read_by_cudnn_where_they_lie(kind, x, recwarn):
    layer = kind(256, 256, 2, batch_first=True).to(DEVICE).eval()
    weights = [w.detach().clone() for w in layer._flat_weights]  # each in memory of its own
    flat = rnn.PACK(weights, torch.float32, layer.mode.lower(), True, 2, False)
    with torch.no_grad():
        assert torch.equal(operator(layer, x, flat=flat)[0], layer(x)[0])
        half = rnn.PACK(weights, torch.float16, layer.mode.lower(), True, 2, False)
        error = (operator(layer, x.half(), flat=half)[0].float() - layer(x)[0]).norm() / layer(x)[0].norm()
    assert 0 < error < 1e-2
    assert not [w for w in recwarn if "contiguous chunk" in str(w.message)], "cuDNN would copy them on every call"


def test_tf32_is_in_the_call_alone(x):
    layer = nn.LSTM(256, 256, 2, batch_first=True).to(DEVICE).eval()
    with torch.no_grad():
        exact = layer(x)[0]
        fast = operator(layer, x, "tf32")[0]
        assert 1e-6 < (fast - exact).norm() / exact.norm() < 1e-2
        assert torch.equal(layer(x)[0], exact), "the next call is fp32 again"


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_fp32_is_captured_with_cudnns_bits(kind, x):
    model = Recurrent(kind).to(DEVICE).eval()
    fast = fxopt.optimize(model, (x,), passes=["cuda_graphs"])
    (graph,) = fast.report.graphs
    assert graph.passes == ["cuda_graphs"], [(c.name, c.outcome, c.reason) for c in graph.candidates]
    with torch.no_grad():
        assert torch.equal(fast(x), model(x))
        other = torch.randn_like(x)
        kept = fast(x)
        assert torch.equal(fast(other), model(other)) and torch.equal(kept, model(x))
    assert any("% of the kernel time" in message for message in graph.messages)
    assert graph.speedup > 1


@pytest.mark.parametrize(
    ("precision", "ways", "tolerance"), [("tf32", ["tf32"], 4e-3), ("bf16", ["tf32", "fp16", "bf16"], 3.2e-2)]
)
def test_a_lower_class_is_used_and_verified(precision, ways, tolerance):
    """Of a layer whose products take its time; one of 256 waits for its steps in any precision, and may stay."""
    model = Recurrent(nn.LSTM, 1024).to(DEVICE).eval()
    x = torch.randn(128, 32, 1024, device=DEVICE)
    fast = fxopt.optimize(model, (x,), precision=precision, passes=["rnn_redispatch", "freeze_weights", "cuda_graphs"])
    (graph,) = fast.report.graphs
    outcomes = [(c.name, c.outcome, c.reason) for c in graph.candidates]
    for way in ways:
        tried = [c for c in graph.candidates if c.options.get("rnn_redispatch") == {"compute": way}]
        assert any(c.verdict and c.verdict.ok and c.paired for c in tried), (way, outcomes)
    assert "rnn_redispatch" in graph.passes, outcomes
    with torch.no_grad():
        exact = model(x)
        assert 0 < (fast(x) - exact).norm() / exact.norm() < tolerance
    assert not torch.backends.cudnn.allow_tf32
    assert graph.kept_kernel_ns < graph.baseline_kernel_ns


def test_changed_weights_are_seen_in_a_captured_graph(x):
    model = Recurrent(nn.LSTM).to(DEVICE).eval()
    fast = fxopt.optimize(model, (x,), passes=["rnn_redispatch", "cuda_graphs"])  # split products, if they were faster
    with torch.no_grad():
        model.layer.weight_hh_l0.mul_(1.5)
        torch.testing.assert_close(fast(x), model(x), rtol=0, atol=2e-6)
        fast.load_state_dict(Recurrent(nn.LSTM).to(DEVICE).state_dict())
        torch.testing.assert_close(fast(x), model(x), rtol=0, atol=2e-6)


@pytest.mark.parametrize("mode", ["LSTM", "GRU"])
def test_weights_without_biases_are_packed_as_cudnn_wants_them(mode):
    layer = getattr(nn, mode)(48, 32, 2, bias=False, bidirectional=True).to(DEVICE).eval()
    x = torch.randn(5, 3, 48, device=DEVICE)
    states = [torch.randn(4, 3, 32, device=DEVICE) for _ in range(2 if mode == "LSTM" else 1)]
    weights, ops = list(layer._flat_weights), torch.ops.fxopt
    with torch.no_grad():
        flat = ops.rnn_pack([w.clone() for w in weights], torch.float32, mode.lower(), False, 2, True)
        found = ops.rnn(x, states, weights, flat, mode.lower(), False, 2, True, False, "")
        own, states = layer(x, tuple(states) if mode == "LSTM" else states[0])
    assert torch.equal(found[0], own)
    assert torch.equal(found[1], states[0] if mode == "LSTM" else states)


# ---------------------------------------------------------------- split products


def split_of(layer: nn.LSTM, x: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    weights = [w.detach() for w in layer._flat_weights]
    product = tiling.Product(x.size(0) * x.size(1), 4 * layer.hidden_size, x.size(2), bias=layer.bias)
    tile = tiling.choices_in(None).tile(product, x.device)[0]
    return split_lstm(x, state, weights, layer.bias, layer.num_layers, layer.batch_first, tile, constant=True)


@pytest.fixture(params=["one launch", "a launch a step"])
def launches(request, monkeypatch):
    """All steps in one launch, where this device holds the weights, or a launch for each."""
    if request.param == "a launch a step":
        monkeypatch.setattr(launch, "has_hopper", lambda device: False)
    return request.param


@pytest.mark.parametrize(
    ("batch", "steps", "width", "layers"),
    [
        (32, 128, 512, 2),
        (8, 64, 256, 2),
        (128, 16, 1024, 1),
        (3, 5, 48, 3),
        (70, 4, 80, 1),
        (2, 3, 64, 5),
        (64, 9, 512, 1),
        (100, 7, 256, 1),
        (1, 1, 64, 2),
    ],
)
def test_an_lstm_in_split_products_is_at_most_4_times_as_far_off_as_cudnn(batch, steps, width, layers, launches):
    layer = nn.LSTM(width, width, layers, batch_first=True).to(DEVICE).eval()
    x = torch.randn(batch, steps, width, device=DEVICE)
    state = tuple(torch.randn(layers, batch, width, device=DEVICE) for _ in range(2))
    with torch.no_grad():
        found, (own, own_states) = split_of(layer, x, state), layer(x, state)
        again = split_of(layer, x, state)
        exact, exact_states = layer.double()(x.double(), tuple(s.double() for s in state))
    assert all(map(torch.equal, found, again))
    for mine, theirs, right in zip(found, (own, *own_states), (exact, *exact_states), strict=True):
        error, reference = ((t.double() - right).norm() / right.norm() for t in (mine, theirs))
        assert error <= max(4 * reference, 2.0**-21), (error, reference)
        assert mine.stride() == theirs.stride()


def test_what_planes_cannot_hold_is_where_cudnn_has_it(launches):
    layer = nn.LSTM(64, 64, 2, batch_first=True).to(DEVICE).eval()
    x = torch.randn(6, 9, 64, device=DEVICE)
    x[0, 3, 5], x[1, 2, 7], x[2, 0, 0] = float("inf"), float("nan"), 1e30
    state = tuple(torch.randn(2, 6, 64, device=DEVICE) for _ in range(2))
    with torch.no_grad():
        layer.weight_hh_l0[70, 3] = 1e20
        layer.weight_hh_l1[5, 9] = 1e-30
        found, (own, own_states) = split_of(layer, x, state), layer(x, state)
    for mine, theirs in zip(found, (own, *own_states), strict=True):
        assert torch.equal(mine.isnan(), theirs.isnan())
        finite = theirs.isfinite()
        assert (mine - theirs)[finite].abs().max() <= 1e-4  # a saturated gate turns on the last bit of its sum


def test_steps_replay_in_a_graph(launches):
    layer = nn.LSTM(256, 256, 2, batch_first=True).to(DEVICE).eval()
    state = tuple(torch.zeros(2, 8, 256, device=DEVICE) for _ in range(2))
    inputs = [torch.randn(8, 32, 256, device=DEVICE) for _ in range(3)]
    with torch.no_grad():
        replay = GraphReplay(lambda x: split_of(layer, x, state), static=frozenset(), device=DEVICE, warmup=2)
        for x in inputs:
            assert all(map(torch.equal, replay(x), split_of(layer, x, state)))


def test_a_model_with_it_is_verified_and_timed(x, monkeypatch):
    monkeypatch.setattr(RnnRedispatch, "variants", lambda self, context: [RnnRedispatch("split")])
    model = Recurrent(nn.LSTM).to(DEVICE).eval()
    fast = fxopt.optimize(model, (x,), passes=["rnn_redispatch", "freeze_weights", "cuda_graphs"])
    (graph,) = fast.report.graphs
    outcomes = [(c.name, c.outcome, c.reason) for c in graph.candidates]
    tried = [c for c in graph.candidates if c.options.get("rnn_redispatch") == {"compute": "split"}]
    assert any(c.verdict and c.verdict.ok and c.paired for c in tried), outcomes
    with torch.no_grad():
        own = model(x)
        assert (fast(x) - own).norm() / own.norm() < 1e-6
