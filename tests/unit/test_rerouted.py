"""A program's models go to the backend without a change of the program, and torch is as before afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxopt import rerouted as rerouting
from fxopt.rerouted import rerouted


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(x))


@pytest.fixture
def handed_over(monkeypatch, fresh_dynamo) -> list[dict]:
    """The options of each graph that reaches the backend, which is one that only notes them."""
    seen: list[dict] = []

    def noting(gm, inputs, *, options=None):
        seen.append(dict(options or {}))
        return gm.forward

    monkeypatch.setattr(rerouting, "BACKEND", noting)
    return seen


def test_a_model_that_is_not_compiled_is_compiled_in_place(handed_over):
    net, x = Net().eval(), torch.randn(2, 4)
    expected = net(x)
    original = torch.compile
    with rerouted({"pairs": 6}) as state:
        assert torch.equal(net(x), expected) and torch.equal(net(x), expected)
    assert handed_over == [{"pairs": 6}]
    assert [type(module) for module in state.modules] == [Net]  # the layer in it is not compiled by itself
    assert torch.compile is original and "_compiled_call_impl" not in net.__dict__
    net(x)
    assert len(handed_over) == 1


def test_a_loss_is_left_alone_and_a_sequence_of_layers_is_not(handed_over):
    model, loss = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.MSELoss()
    with rerouted({}) as state:
        loss(model(torch.randn(2, 4)), torch.zeros(2, 4))
    assert state.modules == [model]


class Chain(nn.Sequential):
    """A class of the program whose forward is torch's."""


@pytest.mark.parametrize("kind", [nn.Sequential, Chain])
def test_a_model_of_torchs_own_modules_is_one_graph(handed_over, kind):
    model, x = kind(nn.Linear(4, 8), nn.GELU(), nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4))), torch.randn(2, 4)
    expected = model(x)
    with rerouted({}):
        for _ in range(3):
            assert torch.allclose(model(x), expected)
    assert len(handed_over) == 1


def test_hooks_of_a_model_of_torchs_own_modules_are_called(handed_over):
    model, called = nn.Sequential(nn.Linear(4, 4)), []
    model.register_forward_hook(lambda *given: called.append(1))
    with rerouted({}):
        model(torch.randn(2, 4))
        model(torch.randn(2, 4))
    assert len(called) == 2


def test_modules_that_ran_before_the_program_compiles_are_let_go(handed_over):
    """They ran to warm up, say; the program knows what is to be compiled."""
    net, x = Net().eval(), torch.randn(2, 4)
    with rerouted({}) as state:
        net(x)
        compiled = torch.compile(net)
        assert "_compiled_call_impl" not in net.__dict__
        assert torch.equal(compiled(x), net(x))
    assert state.modules == [net] and state.compiled == 1


def test_what_the_program_compiles_goes_to_the_backend_with_its_own_options_below_ours(handed_over):
    x = torch.randn(2, 4)
    with rerouted({"pairs": 6}) as state:
        torch.compile(Net(), mode="reduce-overhead")(x)
        torch.compile(Net(), options={"max_autotune": True, "pairs": 8}, fullgraph=True)(x)
        torch.compile(backend="inductor")(lambda x: x + 1)(x)
    assert handed_over == [{"mode": "reduce-overhead", "pairs": 6}, {"max_autotune": True, "pairs": 6}, {"pairs": 6}]
    assert state.compiled == 3
    assert state.modules == []  # who compiles for themselves knows what to compile


def test_another_backend_was_chosen_and_stays(handed_over):
    with rerouted({}) as state:
        torch.compile(Net(), backend="eager")(torch.randn(2, 4))
    assert handed_over == [] and state.left == ["torch.compile(backend='eager') was left as it is"]


def test_an_error_of_the_program_undoes_it_too(handed_over):
    original = torch.compile, nn.Module.__call__
    net = Net()
    with pytest.raises(RuntimeError), rerouted({}):
        net(torch.randn(2, 5))
    assert (torch.compile, nn.Module.__call__) == original
    assert "_compiled_call_impl" not in net.__dict__
