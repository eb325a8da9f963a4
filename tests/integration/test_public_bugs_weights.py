"""Publicly reported faults of constant weights and of casts, each with the outcome that is right.

Passes are forced on (`forced_passes`), so that each case meets the rewrites that could bring the fault back.
"""

from __future__ import annotations

import copy

import pytest
import torch
from forced_passes import EXACT, FOLDING, TORCHS_KERNELS, compiled, force, last, optimized, relative, rewritten
from torch import nn

from fxopt.warning import FxoptWarning

#: torch 2.11's code for CPUs does not follow emulate_precision_casts
EMULATES_ON_GPUS_ALONE = torch.__version__ < "2.12"


@pytest.fixture(autouse=True)
def _fresh(fresh_dynamo: None) -> None:
    torch.manual_seed(0)


# -- constant weights -------------------------------------------------------------------------------------------------


def test_freezing_asked_of_a_backend_is_not_in_effect_and_the_report_says_so():
    """`freezing` among a backend's options does nothing, as Dynamo has lifted the parameters by then; people measured
    its benefit all the same. Right: a changed weight is seen, and the report says that nothing is frozen, and why.
    """
    model, x = nn.Linear(8, 8).eval(), torch.randn(2, 8)
    run = compiled(model, {"freezing": True, "mode": "apply", **TORCHS_KERNELS})
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x))
        model.weight.mul_(2)
        torch.testing.assert_close(run(x), model(x))
    (message,) = [line for line in last().messages if "option freezing" in line]
    assert "not in effect" in message and "2 are left" in message and "fxopt.optimize" in message
    assert not last().frozen


def test_freezing_that_torch_has_in_effect_is_named_in_the_report():
    """With the process-wide flag torch does hold weights constant, and a change of them is not seen: torch's contract,
    not fxopt's. Right: the report says so.
    """
    model, x = nn.Linear(8, 8).eval(), torch.randn(2, 8)
    with torch._inductor.config.patch(freezing=True), torch.no_grad():
        torch.testing.assert_close(compiled(model, {"mode": "apply", **TORCHS_KERNELS})(x), model(x))
    (message,) = [line for line in last().messages if "config.freezing" in line]
    assert "torch holds them constant" in message


def test_freeze_is_refused_as_an_option_of_a_backend():
    """Right: the refusal names what can do it, and the model runs on plain Inductor."""
    model, x = nn.Linear(8, 8).eval(), torch.randn(2, 8)
    with torch.no_grad(), pytest.warns(FxoptWarning, match=r"'freeze' is not for torch.compile.*fxopt.optimize"):
        torch.testing.assert_close(compiled(model, {"freeze": True, "on_error": "fallback"})(x), model(x))


def normalised(channels: int = 8) -> nn.Sequential:
    """A convolution and a batch normalisation that does something, in evaluation mode."""
    model = nn.Sequential(nn.Conv2d(3, channels, 3), nn.BatchNorm2d(channels), nn.ReLU())
    statistics = model[1]
    statistics.running_mean.normal_()
    statistics.running_var.uniform_(0.5, 2)
    for parameter in statistics.parameters():
        nn.init.normal_(parameter)
    return model.eval()


def test_evaluation_training_and_evaluation_again_after_folding(monkeypatch):
    """Folded batch normalisation went on with the old statistics after training mode, which updates them without
    counting a version; and with the old weights after load_state_dict. Right: the next evaluation is the new model's.
    """
    force(monkeypatch, "freeze_weights")
    model, other, x = normalised(), normalised(), torch.randn(4, 3, 6, 6)
    fast = optimized(model, (x,), **TORCHS_KERNELS)
    assert rewritten(fast.report.graphs[0]) == {"freeze_weights": 6} and fast.report.graphs[0].frozen
    before = fast(x).clone()
    fast.train()
    with torch.no_grad():
        fast(x)  # no optimizer's step and no gradient: the statistics alone
    fast.eval()
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
        assert relative(fast(x), before) > 1e-3
    model[0].load_state_dict(other[0].state_dict())  # and not the statistics, whose counter would tell as well
    with torch.no_grad():
        for _ in range(2):  # the call that finds the change, and the next
            torch.testing.assert_close(fast(x), model(x))
    assert len(fast.report.graphs) == 3, "each change is one compilation"


class Bare(nn.Module):
    """A batch normalisation that is no module: nobody counts its updates."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.register_buffer("mean", torch.randn(8))
        self.register_buffer("variance", torch.rand(8) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return nn.functional.batch_norm(y, self.mean, self.variance, training=self.training)


def averaged(model: nn.Module) -> None:
    """How averaged weights are put in for an evaluation."""
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data * 0.9 + 0.01)


def retrained(model: nn.Module) -> None:
    model.train()
    with torch.no_grad():
        model(torch.randn(4, 3, 6, 6) + 3)
    model.eval()


@pytest.mark.parametrize("change", [averaged, retrained])
def test_what_is_written_past_torchs_counters_is_seen(monkeypatch, change):
    """Neither a write through `.data` nor statistics that a functional batch normalisation updates count a version.
    Right: the next call has the new numbers.
    """
    force(monkeypatch, "freeze_weights")
    model, x = Bare().eval(), torch.randn(4, 3, 6, 6)
    fast = optimized(model, (x,), **TORCHS_KERNELS)
    before = fast(x).clone()
    change(fast if change is retrained else model)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
        assert relative(fast(x), before) > 1e-3
    assert len(fast.report.graphs) == 2


def test_batch_normalisation_folded_into_a_bf16_convolution(monkeypatch):
    """Folded in bf16, the weights were rounded twice, and a channel of small variance lost its accuracy. Right: no
    worse than a small multiple of eager's own error against fp64.
    """
    force(monkeypatch, *FOLDING)
    model, x = normalised(32), torch.randn(4, 3, 8, 8).bfloat16()
    model[1].running_var.uniform_(1e-3, 2)
    model = model[:2].bfloat16().eval()
    with torch.no_grad():
        truth = copy.deepcopy(model).double()(x.double())
        fast = optimized(model, (x,), **TORCHS_KERNELS)
        assert fast.report.graphs[0].frozen
        assert relative(fast(x), truth) < 2 * relative(model(x), truth)


@pytest.mark.parametrize("emulate", [True, False])
def test_chains_of_casts_round_where_they_rounded(monkeypatch, emulate):
    """fp32 -> bf16 -> fp32 was taken for the identity, so that results had more digits than asked for, and what
    subtracts the rounded part had none. Inductor leaves such casts out unless `emulate_precision_casts` is set. Right:
    Inductor's bits, with it or without, whatever passes run; bf16 -> fp32 -> bf16 alone may go.
    """

    def chains(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rounded = x.bfloat16().float()
        narrow = (x * 2).bfloat16()
        return rounded, x - rounded, narrow.t().float(), x.half().float(), narrow.float().t().bfloat16()

    x = torch.randn(16, 16)
    options = {"emulate_precision_casts": emulate}
    with torch.no_grad():
        expected = torch.compile(chains, options=options)(x)
        assert not emulate or all(map(torch.equal, expected, chains(x))) or EMULATES_ON_GPUS_ALONE
        torch._dynamo.reset()
        force(monkeypatch, *EXACT)
        got = compiled(chains, options)(x)
    assert all(map(torch.equal, got, expected))
    assert rewritten(last())["remove_redundant_casts_and_copies"] == 1
