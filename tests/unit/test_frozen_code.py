"""Code with weights folded in: it runs while the weights are what was folded, wherever they stand among the inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from fxopt.frozen import FrozenCode, StaleWeights, picker

#: kept and folded positions: neighbours, one, none, and mixed as Dynamo lists them by their first use
LAYOUTS = [([0], [1, 2, 3]), ([3], [0, 1, 2]), ([1], [0]), ([], [0, 1]), ([2, 4], [0, 1, 3]), ([4, 0], [1, 2, 3])]


def folded(kept: Sequence[int], positions: Sequence[int], **options: Any) -> tuple[FrozenCode, list[Any]]:
    """The code gives its inputs back, and the inputs of a call."""
    inputs: list[Any] = [f"input {i}" for i in range(len(kept) + len(positions))]
    for i in positions:
        inputs[i] = nn.Parameter(torch.randn(3, 4))
    return FrozenCode(lambda *args: args, kept, {i: inputs[i] for i in positions}, **options), inputs


@pytest.mark.parametrize(("kept", "positions"), LAYOUTS)
def test_the_code_gets_the_inputs_that_were_kept_in_their_order(kept: list[int], positions: list[int]) -> None:
    code, inputs = folded(kept, positions)
    assert code(*inputs) == tuple(f"input {i}" for i in kept)


@pytest.mark.parametrize(("kept", "positions"), LAYOUTS)
def test_another_weight_at_any_position_is_refused(kept: list[int], positions: list[int]) -> None:
    code, inputs = folded(kept, positions)
    unchecked = FrozenCode(lambda *args: args, kept, {i: inputs[i] for i in positions}, check_contents=False)
    for i in positions:
        other = [*inputs]
        other[i] = nn.Parameter(inputs[i].detach())  # of the same numbers, in the same memory
        for refusing in (code, unchecked):
            with pytest.raises(StaleWeights, match="other weights"):
                refusing(*other)
    assert code(*inputs) == unchecked(*inputs)


def write(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.zero_()


def move(weight: nn.Parameter) -> None:
    weight.data = weight.data.clone()


def take_a_gradient(weight: nn.Parameter) -> None:
    weight.grad = torch.ones_like(weight)


CHANGES: list[Callable[[nn.Parameter], None]] = [write, move, take_a_gradient]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("kept", "positions"), LAYOUTS)
def test_a_change_of_any_weight_is_noticed(
    kept: list[int], positions: list[int], change: Callable[[nn.Parameter], None]
) -> None:
    for i in positions:
        code, inputs = folded(kept, positions)
        unchecked = FrozenCode(lambda *args: args, kept, {i: inputs[i] for i in positions}, check_contents=False)
        change(inputs[i])
        with pytest.raises(StaleWeights, match=r"have changed$"):
            code(*inputs)
        assert unchecked(*inputs) == tuple(f"input {i}" for i in kept)


@pytest.mark.parametrize(
    "change",
    [lambda g: g.add_(1), lambda g: None],
    ids=["written to, as a backward that accumulates does", "taken away, as zero_grad does"],
)
def test_a_gradient_that_was_there_is_watched(change: Callable[[torch.Tensor], Any]) -> None:
    _, inputs = folded([0], [1, 2])
    inputs[2].grad = torch.ones(3, 4)
    code = FrozenCode(lambda *args: args, [0], {1: inputs[1], 2: inputs[2]})
    assert code(*inputs) == ("input 0",)
    inputs[2].grad = change(inputs[2].grad)
    with pytest.raises(StaleWeights, match=r"have changed$"):
        code(*inputs)


@pytest.mark.parametrize("positions", [[], [0], [3], [1, 2], [0, 2], [2, 1], [1, 3, 2], [0, 1, 2, 3]])
def test_a_picker_takes_these_in_this_order(positions: list[int]) -> None:
    assert picker(positions)(("a", "b", "c", "d")) == tuple("abcd"[i] for i in positions)
