"""The numerics gate: outputs share memory with one another, with inputs and with constants as the baseline's do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from fxopt.precision import parse_precision
from fxopt.verify import Verdict, verify

FP32 = parse_precision("fp32")


class Model(nn.Module):
    """Two equal values in memory of their own, a view of the first, what depends on weights alone, and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(6.0))

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.sin()
        return y, x.sin(), y[1:], weight * 2, self.table


X, WEIGHT = torch.randn(4, 6), torch.randn(6)
FOLDED = WEIGHT * 2


def check(candidate: Callable[..., Any], constants: tuple[torch.Tensor, ...] = (FOLDED,)) -> Verdict:
    gm = fx.symbolic_trace(Model())
    run = lambda *args: candidate(gm, *args)  # noqa: E731
    return verify(run, gm.forward, gm, [[X, WEIGHT]], {1}, FP32, constants=constants)


def changed(position: int, value: Callable[..., torch.Tensor]) -> Callable[..., list[torch.Tensor]]:
    def run(gm: Any, x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        outputs = list(gm.forward(x, weight))
        outputs[position] = value(outputs)
        return outputs

    return run


def test_what_shares_memory_as_in_the_baseline_passes():
    assert check(lambda gm, *args: gm.forward(*args)).ok
    assert check(changed(3, lambda outputs: FOLDED.clone())).ok
    assert check(changed(4, lambda outputs: outputs[4]), constants=(FOLDED,)).ok


MUTANTS: dict[str, tuple[Callable[..., Any], str]] = {
    "equal outputs in one memory": (changed(1, lambda outputs: outputs[0]), "outputs 0 and 1 share memory"),
    "a view of no output": (changed(2, lambda outputs: outputs[2].clone()), "outputs 0 and 2 share no memory"),
    "a constant": (changed(3, lambda outputs: FOLDED), "output 3: aliases a constant of the code"),
    "a view of a constant": (changed(3, lambda outputs: FOLDED[:]), "output 3: aliases a constant of the code"),
    "a copy of the graph's own": (changed(4, lambda outputs: outputs[4].clone()), "output 4: aliases no input"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_what_a_write_would_tell_apart_fails(name):
    candidate, words = MUTANTS[name]
    verdict = check(candidate)
    assert not verdict.ok and words in verdict.reason, verdict.reason


def test_a_constant_that_torch_made_of_a_number_of_the_program_may_be_copied():
    """The program makes it anew in each call."""
    gm = fx.symbolic_trace(Model())
    gm.register_buffer("_tensor_constant0", torch.tensor(0.5))
    with gm.graph.inserting_before(gm.graph.output_node()):
        constant = gm.graph.get_attr("_tensor_constant0")
    gm.graph.output_node().args = ((*gm.graph.output_node().args[0], constant),)
    gm.recompile()

    def copied(*args: torch.Tensor) -> list[torch.Tensor]:
        *others, constant = gm.forward(*args)
        return [*others, constant.clone()]

    assert verify(copied, gm.forward, gm, [[X, WEIGHT]], {1}, FP32).ok


def test_slices_of_one_memory_that_do_not_meet_are_as_good_as_tensors_of_their_own():
    def halves(gm: Any, x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        outputs = list(gm.forward(x, weight))
        both = torch.cat([outputs[0], outputs[1]])
        outputs[:3] = both[:4], both[4:], both[1:4]
        return outputs

    assert check(halves).ok


def test_gradients_may_be_one_tensor():
    from fxopt.training import Gradients

    gm = fx.symbolic_trace(Add())
    inputs = [X.clone().requires_grad_(), X.clone().requires_grad_(), torch.ones(4, 6)]
    step = Gradients((0, 1), (0,), 2)
    assert verify(step.of(gm.forward), step.of(Add()), gm, [inputs], set(), FP32, gradients=step).ok


class Add(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor]:
        return (a + b,)
