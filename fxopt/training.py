"""A graph with gradients: forward and backward as one function of its inputs, which can be measured and verified.

The gradients that a user asks for depend on what happens outside of the graph, so cotangents are drawn: random, fixed,
one for each output that has a gradient. They follow the graph's own inputs as arguments, and fresh inputs bring fresh
ones. Nothing of the user's is touched: the parameters are aliases of the memory, without the hooks that DDP or an
optimizer put on the user's own, and gradients are returned, never accumulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Gradients", "aliases", "cotangents", "differentiable", "needed", "refusal"]


def needed(inputs: Sequence[Any]) -> tuple[int, ...]:
    """Positions of the inputs whose gradients are asked for; none in a graph without gradients."""
    if not torch.is_grad_enabled():
        return ()
    return tuple(i for i, value in enumerate(inputs) if isinstance(value, torch.Tensor) and value.requires_grad)


def aliases(inputs: Sequence[Any]) -> list[Any]:
    """The inputs as leaves of their own in the same memory: no hook and no `grad` of the user's is theirs."""
    return [
        value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value
        for value in inputs
    ]


@dataclass(frozen=True)
class Gradients:
    """Which gradients a graph has.

    inputs: positions of the inputs whose gradients are taken. outputs: positions of the outputs that lead to them, one
    cotangent each. arguments: how many inputs the graph has, after which the cotangents come.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    arguments: int

    def of(self, fn: Callable[..., Any]) -> Callable[..., list[Any]]:
        """`fn` (inputs -> outputs) as (inputs, cotangents) -> (outputs, then gradients by input; None where no output
        depends on it). What the backward needs is freed before it returns.
        """

        def step(*arguments: Any) -> list[Any]:
            given = list(arguments[: self.arguments])
            for position in self.inputs:
                value = given[position]
                if not (value.requires_grad and value.is_leaf):
                    given[position] = value.detach().requires_grad_()
            with torch.enable_grad():
                outputs = list(fn(*given))
            pairs = [
                (outputs[position], cotangent)
                for position, cotangent in zip(self.outputs, arguments[self.arguments :], strict=True)
                if outputs[position].requires_grad
            ]
            leaves = [given[position] for position in self.inputs]
            found: Sequence[Any] = [None] * len(leaves)
            if pairs:
                found = torch.autograd.grad([y for y, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True)
            return [*outputs, *found]

        return step

    def describe(self) -> str:
        """Of how many inputs and outputs, in words."""
        return f"gradients of {len(self.inputs)} inputs, by random cotangents of {len(self.outputs)} outputs"


def differentiable(outputs: Sequence[Any]) -> tuple[int, ...]:
    """Positions of the outputs that a backward can start from."""
    return tuple(i for i, value in enumerate(outputs) if isinstance(value, torch.Tensor) and value.requires_grad)


def cotangents(outputs: Sequence[torch.Tensor], seed: int = 0) -> list[torch.Tensor]:
    """A random cotangent like each of `outputs`, of about norm 1: 16-bit gradients then neither overflow nor vanish.
    Deterministic in `seed`; torch's own generators are not touched.
    """
    made = []
    for number, output in enumerate(outputs):
        generator = torch.Generator(device=output.device).manual_seed(seed * 1_000_003 + number)
        wide = torch.complex64 if output.is_complex() else torch.float32
        drawn = torch.randn(output.shape, generator=generator, device=output.device, dtype=wide)
        if drawn.numel() == 1:  # a loss, of which the gradient is never 0
            drawn = drawn.abs() + 0.5
        made.append((drawn / math.sqrt(max(drawn.numel(), 1))).to(output.dtype))
    return made


def refusal(inputs: Sequence[Any], mutated: Collection[int], cuda_graphs: bool) -> str:
    """Why a graph with gradients is not measured, "" if it is."""
    if cuda_graphs:
        return "gradients are on, and CUDA graphs were asked for: a replay that is measured must not hold activations"
    written = [i for i in needed(inputs) if i in mutated]
    if written:
        return f"gradients are on, and the graph writes to input {written[0]}, of which one is asked for"
    if any(isinstance(value, torch.Tensor) and value.layout is not torch.strided for value in inputs):
        return "gradients are on, and an input is sparse"
    return ""
