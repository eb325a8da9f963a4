"""LSTM layers in split fp32: input products of all steps at once, and one kernel, or one a step, for the rest.

The library's fp32 LSTM multiplies on fp32 units, in several launches a step. Here the first layer's products with the
input are one `fxopt::split_gemm`; all that is left, in all layers, is `fxopt::lstm_steps`: one launch where a Hopper
chip holds the weights (`passes.kernels.lstm_persistent`), else one a step (`passes.kernels.lstm_steps`). Both are as
accurate as fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fxopt import rnn
from passes.kernels import tiling
from passes.kernels.launch import Tile
from passes.kernels.tiling import Product
from passes.split_products import block_of, joined, split

__all__ = ["STEPS", "product", "refusal", "rewrite", "split_lstm"]

_MOST = 2**31 - 1

torch.library.define(
    "fxopt::lstm_steps",
    "(Tensor first, Tensor pre, Tensor? bias, Tensor cell, Tensor[] below, Tensor[] weight)"
    " -> (Tensor, Tensor, Tensor)",
)
STEPS: Any = torch.ops.fxopt.lstm_steps.default
_States = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@torch.library.impl("fxopt::lstm_steps", "Meta")
def _(first: Any, pre: Any, bias: Any, cell: Any, below: Any, weight: Any) -> _States:
    return pre.new_empty(*pre.shape[:2], cell.shape[-1]), cell.new_empty(cell.shape), cell.new_empty(cell.shape)


@torch.library.impl("fxopt::lstm_steps", "CPU")
def _(first: Any, pre: Any, bias: Any, cell: Any, below: Any, weight: Any) -> _States:
    own, others = joined(*weight), joined(*below) if below else None
    last, cells, inputs = [], [], pre
    for layer in range(len(cell)):
        if layer:
            assert others is not None
            inputs = inputs @ others[layer - 1].mT
        c, states = cell[layer], list[torch.Tensor]()
        for step in range(pre.shape[0]):
            if step:
                gates = inputs[step] + states[-1] @ own[layer].mT
                gates = gates + bias[layer - 1] if layer else gates
            else:
                gates = first[layer] + inputs[0] if layer else first[0]
            i, f, g, o = gates.chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            states.append(o.sigmoid() * c.tanh())
        inputs = torch.stack(states)
        last.append(states[-1])
        cells.append(c)
    return inputs, torch.stack(last), torch.stack(cells)


@torch.library.impl("fxopt::lstm_steps", "CUDA")
def _(first: Any, pre: Any, bias: Any, cell: Any, below: Any, weight: Any) -> _States:
    from passes.kernels import launch, lstm_steps

    given = (first, pre, bias, cell, tuple(below) or None, tuple(weight))
    if launch.has_hopper(pre.device):
        from passes.kernels import lstm_persistent

        found = lstm_persistent.launch(*given)
        if found is not None:
            return found
    return lstm_steps.launch(*given)


def refusal(args: Sequence[Any]) -> str:
    """Why a layer, by the arguments of `fxopt::rnn` as nodes, cannot be computed so; "" where it can."""
    input, hx, weights, _, mode, has_biases, _, bidirectional, _ = args
    if mode != "lstm":
        return f"it is no LSTM ({mode})"
    if bidirectional:
        return "it is bidirectional"
    if rnn.projects(args):
        return "it projects its hidden state"
    values = [rnn.value(node) for node in (input, *hx, *weights)]
    if any(not isinstance(v, torch.Tensor) or v.dtype != torch.float32 for v in values):
        return "its tensors are not all float32"
    shape = values[0].shape
    if len(shape) != 3 or not all(isinstance(size, int) for size in shape):
        return "its sizes are symbolic, or it has no batch"
    hidden, inputs = values[1].shape[-1], [value.shape[-1] for value in values[3 :: 4 if has_biases else 2]]
    if hidden % 16 or min(inputs) < 16 or not shape[0] * shape[1]:
        return f"{hidden} units and {min(inputs)} inputs do not fill a matrix unit's tiles"
    batch = max(shape[:2])  # whichever of the two it is
    if 4 * hidden * max(hidden, batch) > _MOST:
        return f"{hidden} units and a batch of {batch} are more than the kernel's 32-bit offsets reach"
    return ""


def product(args: Sequence[Any]) -> Product:
    """The product of all steps with the input, of a layer that `refusal` does not refuse."""
    input, hx, weights, _, _, has_biases, *_ = args
    shape, hidden = rnn.value(input).shape, rnn.value(hx[0]).shape[-1]
    k = rnn.value(weights[0]).shape[-1]
    return Product(shape[0] * shape[1], 4 * hidden, k, block=block_of(k), bias=has_biases)


def split_lstm(
    input: torch.Tensor,
    hx: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    batch_first: bool,
    tile: Tile,
    constant: bool,
) -> list[torch.Tensor]:
    """Output, last hidden state and last cell state, as `fxopt::rnn` gives them. To be traced.

    input [batch, steps, inputs] (`batch_first`) or [steps, batch, inputs]; hx two of [layers, batch, hidden]; weights
    as `nn.LSTM` has them. tile: of `split_gemm`. constant: whether the weights are about to be folded.
    """
    x = input.transpose(0, 1) if batch_first else input
    length, batch, _ = x.shape
    of_a_layer = 4 if has_biases else 2
    of_layers = [weights[layer * of_a_layer : (layer + 1) * of_a_layer] for layer in range(num_layers)]
    added = [None if len(of) == 2 else of[2] + of[3] for of in of_layers]
    pre = _product(x.reshape(length * batch, -1), of_layers[0][0], added[0], tile, constant).view(length, batch, -1)
    first, bias, below = [], None, list[torch.Tensor]()
    for layer, (_, w_hh, *_) in enumerate(of_layers):
        # The state that a caller gives may be any number, which one scale for all does not hold.
        state = hx[0][layer] @ w_hh.mT
        begun = added[layer] if layer else pre[0]
        first.append(state if begun is None else begun + state)
    if num_layers > 1:
        zeros = pre.new_zeros(pre.shape[-1])
        bias = torch.stack([zeros if one is None else one for one in added[1:]])
        below = _stacked([of[0] for of in of_layers[1:]], constant)
    out, hidden, cells = torch.ops.fxopt.lstm_steps(
        torch.stack(first), pre, bias, hx[1], below, _stacked([of[1] for of in of_layers], constant)
    )
    return [out.transpose(0, 1) if batch_first else out, hidden, cells]


def _stacked(weights: Sequence[torch.Tensor], constant: bool) -> list[torch.Tensor]:
    """Planes and scales of equal matrices, in three tensors."""
    return [torch.stack(parts) for parts in zip(*(_split(weight, constant) for weight in weights), strict=True)]


def _split(weight: torch.Tensor, constant: bool) -> Sequence[torch.Tensor]:
    # One operator where it is run once, when the graph is folded; graph code for Inductor to fuse where it is not.
    return torch.ops.fxopt.split_weight(weight.mT, "columns") if constant else split(weight)


def _product(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: Tile, constant: bool
) -> torch.Tensor:
    parts = split(rows.contiguous(), block_of(rows.shape[-1]))
    inside = bias if tile[3] <= 1 else None
    result = torch.ops.fxopt.split_gemm(*parts, *_split(weight, constant), inside, list(tile))
    if tile[3] > 1:
        result = result.sum(-3)
        return result if bias is None else result + bias
    return result


def rewrite(node: fx.Node, folder: Path | None, constant: bool) -> fx.Node:
    """Put `split_lstm` in the place of a recurrent layer of Dynamo's graph that `refusal` does not refuse.

    folder: where the tiles measured on this device are kept.
    """
    args = rnn.arguments(node)
    input, hx, weights, _, mode, has_biases, num_layers, _, batch_first = args
    tile = tiling.choices_in(folder).tile(product(args), rnn.value(input).device)[0]
    given = (input, hx, weights, has_biases, num_layers, batch_first, tile, constant)
    with node.graph.inserting_before(node):
        new = node.graph.create_node("call_function", split_lstm, given, name=mode)
    rnn.inherit(new, node)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
    return new
