"""Recurrent models through `fxopt.optimize`: one graph, eager's bits, and everything a session promises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from forced_passes import TORCHS_KERNELS, always_faster
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import fxopt
from fxopt import registry, rnn
from fxopt.backend import Backend
from fxopt.report.model import GraphReport
from fxopt.torch_api.rnn import traced
from fxopt.warning import FxoptWarning
from passes.rnn_redispatch import RnnRedispatch
from profiler_core import roofline

#: few pairs: these tests are about what is decided and said, not about how fast anything is
QUICK = {"pairs": 6, "iterations": 2, "warmup": 1, "verify_inputs": 1, "passes": ["rnn_redispatch"], **TORCHS_KERNELS}


class Last(nn.Module):
    """A recurrent layer's output at every step, scaled."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.layer = kind(8, 16, num_layers=2, batch_first=True, **options)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0] * 2


class Packed(Last):
    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0])


@pytest.fixture(autouse=True)
def _registered(fresh_dynamo: None) -> None:
    torch.manual_seed(0)
    registry.register(RnnRedispatch)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 5, 8)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_model_is_one_graph_with_eagers_bits(kind, x):
    model = Last(kind, dropout=0.5).eval()
    fast = fxopt.optimize(model, (x,), **QUICK)
    (graph,) = fast.report.graphs
    with torch.no_grad():
        assert torch.equal(fast(x), model(x))
        other = torch.randn(3, 5, 8)
        assert torch.equal(fast(other), model(other))
    (said,) = [message for message in graph.messages if "structural fix" in message]
    assert "1 recurrent module(s)" in said and "% of the kernel time" in said
    assert not fast.report.eager_modules
    assert len(fast.report.graphs) == 1, "no second compilation"


def test_the_plan_is_found_the_second_time(x):
    model = Last(nn.GRU).eval()
    first = fxopt.optimize(model, (x,), **QUICK)
    torch._dynamo.reset()
    again = fxopt.optimize(model, (x,), **QUICK)
    assert (first.report.graphs[0].source, again.report.graphs[0].source) == ("tuned", "plan")
    with torch.no_grad():
        assert torch.equal(again(x), model(x))


def test_changed_weights_are_seen_and_training_is_the_models_own(x, monkeypatch):
    always_faster(monkeypatch)
    model, other = Last(nn.GRU).eval(), Last(nn.GRU).eval()
    fast = fxopt.optimize(model, (x,), **{**QUICK, "passes": ["rnn_redispatch", "freeze_weights"]})
    with torch.no_grad():  # to the last bit but for where constants lie in memory
        model.layer.weight_hh_l0.mul_(2)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-6, atol=1e-6)
        fast.load_state_dict(other.state_dict())
        torch.testing.assert_close(fast(x), other(x), rtol=1e-6, atol=1e-6)
        model.layer.bias_ih_l1 = nn.Parameter(torch.ones_like(model.layer.bias_ih_l1))
        torch.testing.assert_close(fast(x), model(x), rtol=1e-6, atol=1e-6)
    assert list(fast.state_dict()) == list(other.state_dict())
    fast.train()
    fast(x).sum().backward()
    assert model.layer.weight_hh_l0.grad is not None


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_half_precision_is_verified_and_counted(kind, x, monkeypatch):
    always_faster(monkeypatch)
    monkeypatch.setattr(roofline, "matrix_units", lambda device: {"bfloat16"})
    model = Last(kind).eval()
    fast = fxopt.optimize(model, (x,), precision="bf16", **QUICK)
    (graph,) = fast.report.graphs
    assert graph.passes == ["rnn_redispatch"], [(c.name, c.reason) for c in graph.candidates]
    assert graph.candidates[-1].reports[0].rewritten == 1
    assert 1e-4 < graph.verdict.rel_l2 < graph.verdict.limit
    assert fast(x).dtype == torch.float32


def test_a_packed_sequence_is_left_to_eager_and_listed_with_its_time(x):
    model, lengths = Packed(nn.LSTM).eval(), torch.tensor([5, 2, 4])
    fast = fxopt.optimize(model, (x, lengths), **QUICK)
    with torch.no_grad():
        torch.testing.assert_close(fast(x, lengths), model(x, lengths), rtol=1e-6, atol=1e-6)
    # In torch 2.11 Dynamo gives the whole frame up, and the linear layer with it.
    (module,) = [module for module in fast.report.eager_modules if module.type == "LSTM"]
    assert module.name == "layer"
    assert module.time_ns > 0 and 0 < module.share < 1


def test_a_layer_in_training_mode_is_left_to_eager_with_the_reason(x):
    model = Last(nn.GRU).eval()
    fast = fxopt.optimize(model, (x,), **QUICK)
    model.layer.train()
    with torch.no_grad():
        assert torch.equal(fast(x), model(x))
    graph = fast.report.graphs[-1]
    assert graph.source == "skipped" and "it is in training mode" in graph.messages[0]


def test_the_setting_of_the_process_is_as_it_was(x):
    fxopt.optimize(Last(nn.GRU).eval(), (x,), **QUICK)(x)
    assert torch._dynamo.config.allow_rnn is False


def test_a_layer_that_a_user_has_had_unrolled_is_sent_back(x, monkeypatch):
    always_faster(monkeypatch)
    model, reports = Last(nn.GRU).eval(), list[GraphReport]()
    compiled = torch.compile(model, backend=Backend(None, QUICK, on_report=reports.append))
    with torch.no_grad(), traced():
        got = compiled(x)
        assert torch.equal(got, model(x))
    (graph,) = reports
    assert graph.passes == ["rnn_redispatch"], [(c.name, c.reason) for c in graph.candidates]
    baseline = set(graph.profile.nodes["target"])
    assert str(rnn.RNN) not in baseline and any("mm" in target for target in baseline), "the baseline is unrolled"


def test_a_training_graph_stays_as_it_is(x):
    reports: list[GraphReport] = []
    model = Last(nn.GRU).eval()
    compiled = torch.compile(model, backend=Backend(None, QUICK, on_report=reports.append))
    with traced():
        compiled(x).sum().backward()
    assert model.layer.weight_hh_l0.grad is not None
    assert any("gradients are on" in line for line in reports[0].out_of_reach)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_batch_of_nothing_is_computed_as_eager_does(kind):
    # oneDNN's LSTM divides by the batch: the process ended.
    model = Last(kind).eval()
    empty = torch.zeros(0, 5, 8)
    fast = fxopt.optimize(model, (empty,), **QUICK)
    assert fast(empty).shape == (0, 5, 32 // 2)
    torch._dynamo.reset()
    fast = fxopt.optimize(model, (torch.randn(4, 5, 8),), **QUICK)
    for batch in (0, 3, 0):
        x = torch.randn(batch, 5, 8)
        with torch.no_grad():
            assert torch.equal(fast(x), model(x)), batch


def test_no_steps_are_the_error_that_they_are_in_eager():
    model = Last(nn.LSTM).eval()
    fast = fxopt.optimize(model, (torch.randn(4, 5, 8),), **QUICK)
    with torch.no_grad(), pytest.raises(RuntimeError, match="sequence length"):
        model(torch.zeros(4, 0, 8))
    with pytest.raises(RuntimeError, match="sequence length"), pytest.warns(FxoptWarning, match="own call fails"):
        fast(torch.zeros(4, 0, 8))
