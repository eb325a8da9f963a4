"""What a compiler may get wrong: mutation, aliasing, views, random numbers, NaN, empty tensors, kinds of output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from zoo_models.registry import OWN_STREAM, Made, model


def vectors(*sizes: int) -> list[tuple[torch.Tensor]]:
    return [(torch.randn(size, 16),) for size in sizes]


class Between(nn.Module):
    """A layer on each side of something that Dynamo cannot trace."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.notes = nn.Linear(16, 16), nn.Linear(16, 16), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        torch._dynamo.graph_break()
        if x.sum().item() > 60:
            x = x / 2
        self.notes += 1
        return self.second(x)


@model("graph breaks: one asked for, one by .item(); trained", under=("no_grad", "grad"))
def graph_breaks() -> Made:
    return Between(), [(torch.randn(4, 16),), (torch.randn(4, 16) * 5,)]


@model("batch norm in training mode without gradients: buffers and a counter are written")
def batch_norm_training() -> Made:
    class Always(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU())

        def train(self, mode: bool = True) -> Always:
            return super().train(True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    return Always(), vectors(6, 6, 6)


class Counting(nn.Module):
    """A moving average and a counter in buffers, and a counter that is a Python number."""

    mean: torch.Tensor
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.calls_python = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.calls_python += 1
        self.mean.lerp_(x.mean(0), 1.0 / self.calls)
        return (x - self.mean) * self.calls_python


@model("a moving average and counters, one a tensor and one a Python number", session=True)
def counters() -> Made:
    return Counting(), vectors(4, 4, 4, 4)


@model("inputs written in place, through a view and a slice")
def mutated_inputs() -> Made:
    def write(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1).mul_(2)
        y.t()[1:3].zero_()
        y.diagonal().add_(1)
        return x @ y

    x = torch.randn(4, 4)
    return write, [(x, torch.randn(4, 4)), (x, torch.randn(4, 4)), (torch.randn(4, 4), torch.randn(4, 4))]


@model("the same tensor as two inputs, one of them written; and overlapping views")
def aliased_inputs() -> Made:
    def write(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.mul_(2)
        return a + b

    base, apart = torch.randn(6), torch.randn(6)
    return write, [(base, base), (base[:4], base[2:]), (apart, torch.randn(6))]


@model("views as outputs: of an input, of each other, an input itself, and a written one")
def views() -> Made:
    def look(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = y + 1
        y.mul_(3)
        return x.view(-1)[2:], x.t(), x, z, z[0], y.view(2, -1), x.detach()

    return look, [(torch.randn(4, 4), torch.randn(4, 4)) for _ in range(2)]


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        noise = torch.rand(x.shape[0], 16)
        return F.dropout(self.layer(x), 0.3, training=True) + noise, torch.randint(0, 9, (4,)), torch.randperm(5)


@model(
    "dropout, torch.rand, randint and randperm in forward, on Inductor's own random stream",
    under=("no_grad", "grad"),
    reason=OWN_STREAM,
)
def random_numbers() -> Made:
    return Noisy(), vectors(4, 4, 4)


@model(
    "the same on eager's random stream: every number and the state afterwards as eager's",
    under=("no_grad", "grad"),
    inductor={"fallback_random": True},
)
def random_numbers_eager() -> Made:
    return Noisy(), vectors(4, 4, 4)


@model("a seed that is set inside forward, and a draw after it", reason=OWN_STREAM)
def seeded() -> Made:
    class Seeded(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.manual_seed(3)
            return x + torch.randn(x.shape)

    return Seeded(), vectors(4, 4)


@model(
    "torch.where around NaN and Inf, in values and gradients",
    under=("no_grad", "grad"),
    reason="clamp_min(-0.0, 0) is -0.0 in eager and 0.0 in Inductor's code, and the reciprocal has its sign",
)
def not_a_number() -> Made:
    class Guarded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.linspace(-1, 1, 16))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            y = x * self.scale
            root = torch.where(y > 0, y.sqrt(), torch.zeros_like(y))
            return root, torch.nan_to_num(1 / y.clamp_min(0)), y.log().nansum(-1)

    x = torch.randn(4, 16)
    x[0, 0], x[1, 1], x[2, 2] = float("nan"), float("inf"), 0.0
    return Guarded(), [(x,), (x.flip(0),)]


@model("complex numbers: FFT, a complex weight, and a complex output", under=("no_grad", "grad"))
def complex_numbers() -> Made:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(9, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            spectrum = torch.fft.rfft(x) * self.weight
            return torch.fft.irfft(spectrum, n=16), spectrum

    return Spectral(), vectors(4, 4)


@model("integers in and out: histogram, sort, argmax, bits")
def integers() -> Made:
    def count(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        histogram = torch.zeros(10, dtype=torch.long).scatter_add_(0, x.flatten(), torch.ones_like(x.flatten()))
        values, order = torch.sort(x, dim=-1, descending=True, stable=True)
        return histogram, values, order, x.to(torch.uint8) << 1, (x // 3) % 2 == 0, x.float().mean(-1).argmax()

    return count, [(torch.randint(0, 10, (4, 6)),) for _ in range(2)]


@model("empty tensors: a batch of none, and a sum over nothing")
def empty() -> Made:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            y = self.layer(x)
            return y, y.sum(0), torch.cat([y, y.new_ones(2, 4)]).mean(0)

    return Empty(), vectors(0, 0, 3)


@dataclass
class Found:
    """An output of a kind of its own."""

    score: torch.Tensor
    name: str


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@model("nested outputs: dict, dataclass, named tuple, list, None, numbers and strings", under=("no_grad", "grad"))
def nested_outputs() -> Made:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            y = self.layer(x)
            pair = Pair(*y.chunk(2, -1))
            return {"found": Found(y.mean(-1), "mean"), "pair": pair, "rest": [None, 3, x.shape[0], (y, "last")]}

    return Nested(), vectors(4, 4)


@model("inputs in containers, one of them changed in place by Python")
def containers() -> Made:
    def gather(parts: dict[str, list[torch.Tensor]], scale: float) -> list[torch.Tensor]:
        parts["seen"].append(parts["x"][0] * scale)
        return [*parts["seen"], sum(parts["x"], torch.zeros(4))]

    return gather, [({"x": [torch.randn(4), torch.randn(4)], "seen": [torch.randn(4)]}, s) for s in (1.0, 2.0, 2.0)]


@model("not contiguous: transposed, expanded, strided and offset inputs")
def strided() -> Made:
    class Strided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.layer(x), x.transpose(-1, -2) * 2

    base = torch.randn(20, 20)
    inputs = [base.t()[:6, :8], base[1:17:2, ::2][:6, :8], torch.randn(1, 8).expand(6, 8), torch.randn(8, 6).t()]
    return Strided(), [(x,) for x in inputs]


@model("a state that a closure holds and writes to, and a global read through it")
def closure() -> Made:
    total = torch.zeros(16)

    def add(x: torch.Tensor) -> torch.Tensor:
        total.add_(x.sum(0))
        return x / (1 + total.abs())

    return add, vectors(4, 4, 4), {"total": total}


@model("a function that raises for some inputs, and goes on afterwards")
def raising() -> Made:
    layer = nn.Linear(16, 4)

    def check(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 2:
            raise ValueError("two rows are one too few")
        return layer(x)

    return check, vectors(4, 2, 4)
