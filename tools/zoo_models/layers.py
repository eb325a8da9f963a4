"""Modules that do more than compute: hooks, parametrizations, tied weights, checkpoints, other precisions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from zoo_models.registry import BF16, Made, model


def batches(*sizes: int, width: int = 16) -> list[tuple[torch.Tensor]]:
    return [(torch.randn(size, width),) for size in sizes]


def mlp(width: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, width))


@model("perceptron; trained, and a last batch that is smaller", under=("no_grad", "grad"), session=True, autotuned=True)
def perceptron() -> Made:
    return mlp(), batches(8, 8, 3)


@model("perceptron compiled with dynamic=True, four sizes of batch", dynamic=True)
def dynamic_batch() -> Made:
    return mlp(), batches(8, 3, 1, 12)


class Tied(nn.Module):
    """Embedding and output share one matrix, and a block is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.block, self.out = nn.Embedding(40, 16), mlp(), nn.Linear(16, 40, bias=False)
        self.out.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.block(self.block(self.words(ids))))


@model("tied weights, and a block that is used twice; trained", under=("no_grad", "grad"), session=True)
def tied() -> Made:
    return Tied(), [(torch.randint(0, 40, (2, 5)),) for _ in range(2)]


class Negated(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return -weight.tril()


@model("weight norm and a parametrization of one's own; trained", under=("no_grad", "grad"), session=True)
def parametrized() -> Made:
    fn = nn.Sequential(parametrizations.weight_norm(nn.Linear(16, 16)), nn.Tanh(), nn.Linear(16, 16))
    parametrize.register_parametrization(fn[2], "weight", Negated())
    return fn, batches(4, 4)


@model("spectral norm, whose power iteration writes to buffers in training", under=("no_grad", "grad"))
def spectral() -> Made:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(16, 16)), nn.ReLU(), nn.Linear(16, 4)), batches(4, 4)


class Hooked(nn.Module):
    """Hooks before, after and on the gradient, one of which counts and one of which replaces the output."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.seen = mlp(), 0
        self.body.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        self.body[0].register_forward_hook(self._count)
        self.body[3].register_forward_hook(lambda module, args, output: output + args[0].mean())

    def _count(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.seen += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


@model("forward hooks that change input and output, and that count calls", under=("no_grad", "grad"))
def hooks() -> Made:
    return Hooked(), batches(4, 4, 4)


@model("activation checkpointing; trained", under=("no_grad", "grad"))
def checkpointed() -> Made:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(mlp() for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = x + checkpoint(block, x, use_reentrant=False)
            return x

    return Checkpointed(), batches(4, 4)


class StraightThrough(torch.autograd.Function):
    """Rounds; its gradient is passed on where it is small."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 1)


@model("a custom autograd function: rounding with a straight-through gradient", under=("no_grad", "grad"))
def custom_function() -> Made:
    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.leave = nn.Linear(16, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.leave(StraightThrough.apply(self.enter(x)))

    return Quantized(), batches(4, 4)


@model("attention and perceptron in bf16; trained", under=("no_grad", "grad"), tolerance=BF16)
def block_bf16() -> Made:
    fn = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True).to(torch.bfloat16)
    return fn, [(torch.randn(2, 6, 16, dtype=torch.bfloat16),) for _ in range(2)]


@model("autocast to bf16 inside, fp32 around it; trained", under=("no_grad", "grad"), tolerance=BF16)
def autocast() -> Made:
    class Autocast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.high = mlp(), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            with torch.autocast("cpu", torch.bfloat16):
                inner = self.low(x)
            return self.high(inner.float()), inner

    return Autocast(), batches(4, 4)


@model("fp64 throughout", tolerance=1e-13, under=("no_grad", "grad"))
def double() -> Made:
    return mlp().double(), [(x.double(),) for (x,) in batches(4, 4)]


@model("LoRA: a matrix without gradient, and a correction that is trained", under=("no_grad", "grad"))
def lora() -> Made:
    class Lora(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(16, 16)
            self.base.requires_grad_(False)
            self.a, self.b = nn.Parameter(torch.randn(16, 2) * 0.1), nn.Parameter(torch.randn(2, 16) * 0.1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu(self.base(x) + x @ self.a @ self.b)

    return Lora(), batches(4, 4)


@model("modules whose forward takes keyword arguments, options and None", under=("inference_mode",))
def optional_arguments() -> Made:
    from zoo_models.registry import Call

    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(
            self, x: torch.Tensor, *, mask: torch.Tensor | None = None, scale: float = 1.0, mode: str = "plain"
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            y = self.layer(x) * scale
            y = y if mask is None else y.masked_fill(mask, 0.0)
            return (y.relu() if mode == "relu" else y), mask

    x = torch.randn(4, 16)
    settings: list[dict[str, Any]] = [{}, {"mask": x > 1, "mode": "relu"}, {"scale": 0.5}]
    return Optional(), [Call((x,), kwargs) for kwargs in settings]
