"""Writes to folded weights that torch counts nowhere."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from fxopt import samples
from fxopt.frozen import FrozenCode, StaleWeights
from fxopt.samples import Samples, look_again


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def weights(count: int = 40) -> list[torch.Tensor]:
    return [torch.nn.Parameter(torch.randn(5, 7)) for _ in range(count)]


def test_what_is_written_to_all_weights_is_seen_at_once(clock: list[float]) -> None:
    held = weights()
    watch = Samples(held)
    assert not watch.changed()
    for weight in held:
        weight.data.mul_(0.999)
    assert watch.changed()


@pytest.mark.parametrize("way", ["a second later", "after training"])
def test_what_is_written_to_one_weight_is_seen_before_long(clock: list[float], way: str) -> None:
    held = weights()
    for position in range(len(held)):
        watch = Samples(held)
        held[position].data.add_(1)
        clock[0] += samples.INTERVAL if way == "a second later" else 0
        if way == "after training":
            look_again()
        assert watch.changed(), position


def test_all_samples_are_not_compared_on_every_call(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Samples(weights())
    compared: list[int] = []
    monkeypatch.setattr(watch, "_read", lambda: compared.append(1) or watch._before)
    for _ in range(64):
        clock[0] += samples.INTERVAL / 32
        assert not watch.changed()
    assert len(compared) == 2
    look_again()
    assert not watch.changed() and not watch.changed()
    assert len(compared) == 3


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(0, 3),
        torch.full((3, 3), float("nan")),
        torch.tensor(2.5),
        torch.randn(4, 6).t(),
        torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        torch.randn(8, 8)[::2, 1:3],
        torch.randn(4).expand(3, 4),
        torch.arange(6),
        torch.tensor([True, False]),
        torch.randn(3, dtype=torch.complex64),
        torch.randn(3, 3).bfloat16(),
        torch.randn(9, 9).to_sparse(),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)} {tensor.dtype} {tensor.layout}",
)
def test_any_tensor_is_taken_and_none_changes_by_itself(tensor: torch.Tensor) -> None:
    watch = Samples([tensor, torch.randn(3)])
    look_again()
    assert not watch.changed()


def test_samples_are_of_the_weights_own_memory() -> None:
    held: list[Any] = [torch.randn(4, 6).t(), torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)]
    for weight in held:
        watch = Samples([weight])
        weight.data.add_(1)
        look_again()
        assert watch.changed()


def test_folded_code_refuses_to_run_with_other_numbers() -> None:
    held = weights(4)
    code = FrozenCode(lambda x: x, [0], dict(enumerate(held, 1)))
    unchecked = FrozenCode(lambda x: x, [0], dict(enumerate(held, 1)), check_contents=False)
    assert code(3, *held) == 3
    for weight in held:
        weight.data.add_(1)
    with pytest.raises(StaleWeights, match=r"unseen by torch"):
        code(3, *held)
    assert unchecked(3, *held) == 3
