"""The steps of an LSTM layer: a product with the last hidden state in split fp32, the gates and the new state, a launch
a step.

A step's product is [batch, hidden] x [hidden, 4 hidden]: too small for a matrix unit to be what limits it. What the
library's fp32 kernels take is their launches, several a step, and reading the weights on fp32 units; here a program
reads the rows of a few units, all four gates of each, multiplies, and has all that it needs for their new state.

A hidden state is sigmoid times tanh, so that |h| <= 1 and one scale, 2^14, does for all: hi = fp16(h 2^14) and
lo = fp16((h 2^14 - hi) 2^11) hold h to 2^-22 of itself down to 2^-28, and to 2^-50 below that. The weights are split as
in `passes.split_products`; a row that is not held, with scale 0, is multiplied in IEEE fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from passes.kernels import direct
from passes.kernels.launch import multiprocessors
from passes.kernels.split_gemm import LOW, decoded

__all__ = ["Config", "choose", "kernel", "launch"]

SCALE = tl.constexpr(2.0**14)


@dataclass(frozen=True)
class Config:
    """Of a program: rows of the batch, units of the layer, elements of the product a step, and stages of its loads."""

    rows: int
    units: int
    depth: int
    stages: int = 4
    warps: int = 4


def choose(batch: int, hidden: int, programs: int) -> Config:
    """As few units a program as make no more than `programs`, one a multiprocessor: each reads its part of the weights.
    """
    rows = max(16, min(64, triton.next_power_of_2(batch)))
    blocks = triton.cdiv(batch, rows)
    units = next((u for u in (4, 8, 16) if blocks * triton.cdiv(hidden, u) <= programs), 16)
    depth = next(d for d in (64, 32, 16) if hidden % d == 0)
    # Of chips with matrix units, the smallest have 99 KiB of shared memory for a program.
    stage = (rows + 4 * units) * depth * 4
    return Config(rows, units, depth, max(2, min(4, 98304 // stage)))


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    """To some 3e-7 of itself: by exp, whose difference from 1 is too coarse near 0, where the series is used."""
    magnitude = tl.abs(x)
    decay = tl.exp(-2.0 * magnitude)
    far = (1.0 - decay) / (1.0 + decay)
    square = x * x
    # The Taylor series up to x^15; the next term is 9e-9 of x at 1/2.
    series = -0.0014558343870513183 * square + 0.003592128036572481
    series = series * square - 0.008863235529902197
    series = series * square + 0.021869488536155203
    series = series * square - 0.05396825396825397
    series = series * square + 0.13333333333333333
    series = series * square - 0.3333333333333333
    near = x + x * square * series
    return tl.where(magnitude < 0.5, near, tl.where(x < 0, -far, far))


@triton.jit(do_not_specialize=["step"])
def kernel(
    pre, out, planes, cell, w_high, w_low, w_scale, step, batch,
    HIDDEN: tl.constexpr, BM: tl.constexpr, UNITS: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Step `step` of a layer. pre [steps, batch, 4 HIDDEN] fp32, the gates without the hidden state's part; of step 0,
    the whole gates. out [steps, batch, HIDDEN] fp32. planes [2, 2, batch, HIDDEN] fp16: of each other step, the high
    and the low one. cell [batch, HIDDEN] fp32, written in place. w planes [4 HIDDEN, HIDDEN] fp16, w_scale [4 HIDDEN].

    Gates lie as in torch: input, forget, cell, output. Grid: cdiv(HIDDEN, UNITS) * cdiv(batch, BM).
    """
    across = tl.cdiv(HIDDEN, UNITS)
    unit = tl.program_id(0) % across * UNITS
    m = tl.program_id(0) // across * BM + tl.arange(0, BM)
    inside = (m < batch)[:, None]
    # Four gates of a unit beside each other.
    j = tl.arange(0, 4 * UNITS)
    there = unit + j // 4 < HIDDEN
    row = j % 4 * HIDDEN + unit + j // 4
    plane = batch * HIDDEN
    gates = tl.load(
        pre + (step.to(tl.int64) * batch + m)[:, None] * (4 * HIDDEN) + row[None, :],
        mask=inside & there[None, :], other=0.0,
    )  # fmt: skip
    if step > 0:
        scale = tl.load(w_scale + row, mask=there, other=1.0)
        if tl.min(scale, 0) != 0:
            high = planes + ((step - 1) & 1) * 2 * plane
            main = tl.zeros((BM, 4 * UNITS), dtype=tl.float32)
            rest = tl.zeros((BM, 4 * UNITS), dtype=tl.float32)
            for first in range(0, HIDDEN, BK):
                k = first + tl.arange(0, BK)
                of_h = m[:, None] * HIDDEN + k[None, :]
                of_w = row[None, :] * HIDDEN + k[:, None]
                hh = tl.load(high + of_h, mask=inside, other=0.0)
                hl = tl.load(high + plane + of_h, mask=inside, other=0.0)
                wh = tl.load(w_high + of_w, mask=there[None, :], other=0.0)
                wl = tl.load(w_low + of_w, mask=there[None, :], other=0.0)
                # As in `split_gemm`: a matrix unit's own long sum rounds towards zero.
                main += tl.dot(hh, wh, max_num_imprecise_acc=BK)
                rest = tl.dot(hl, wh, rest)
                rest = tl.dot(hh, wl, rest)
            gates += (main + rest * LOW) * (1.0 / scale)[None, :] * (1.0 / SCALE)
        else:
            last = out + (step - 1).to(tl.int64) * plane
            for first in range(0, HIDDEN, 16):
                k = first + tl.arange(0, 16)
                of_w = row[None, :] * HIDDEN + k[:, None]
                h = tl.load(last + m[:, None] * HIDDEN + k[None, :], mask=inside, other=0.0)
                w = decoded(
                    tl.load(w_high + of_w, mask=there[None, :], other=0.0),
                    tl.load(w_low + of_w, mask=there[None, :], other=0.0),
                    scale[None, :],
                )
                gates += tl.dot(h, w, input_precision="ieee", max_num_imprecise_acc=16)
    # j is (unit, two bits of the gate): the last bit tells input from forget, and cell from output.
    even, odd = tl.split(tl.reshape(gates, (BM, UNITS, 2, 2)))
    i, g = tl.split(even)
    f, o = tl.split(odd)
    units = unit + tl.arange(0, UNITS)
    at = m[:, None] * HIDDEN + units[None, :]
    mine = inside & (units < HIDDEN)[None, :]
    c = sigmoid(f) * tl.load(cell + at, mask=mine, other=0.0) + sigmoid(i) * tanh(g)
    h = sigmoid(o) * tanh(c)
    tl.store(cell + at, c, mask=mine)
    tl.store(out + step.to(tl.int64) * plane + at, h, mask=mine)
    y = h * SCALE
    hi = y.to(tl.float16)
    following = planes + (step & 1) * 2 * plane
    tl.store(following + at, hi, mask=mine)
    tl.store(following + plane + at, ((y - hi.to(tl.float32)) * 2048.0).to(tl.float16), mask=mine)


def launch(
    first: torch.Tensor,
    pre: torch.Tensor,
    cell: torch.Tensor,
    weight: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(hidden states [steps, batch, hidden], last cell state [batch, hidden]) of a layer, all fp32.

    first [batch, 4 hidden]: the whole gates of the first step. pre [steps, batch, 4 hidden]: those of all steps without
    the hidden state's part; its first is not read. cell [batch, hidden]: before the first step, left as it is. weight:
    planes [4 hidden, hidden] of fp16's bits and scales [4 hidden, 1]. hidden: a multiple of 16.
    """
    steps, batch, _ = pre.shape
    hidden = cell.shape[-1]
    chosen = config or choose(batch, hidden, multiprocessors(pre.device))
    high, low, scale = (part.contiguous() for part in weight)
    first, pre = first.contiguous(), pre.contiguous()
    cell = cell.clone(memory_format=torch.contiguous_format)
    out = pre.new_empty(steps, batch, hidden)
    planes = pre.new_empty(2, 2, batch, hidden, dtype=torch.float16)
    grid = (triton.cdiv(hidden, chosen.units) * triton.cdiv(batch, chosen.rows),)
    constants = (hidden, chosen.rows, chosen.units, chosen.depth)
    bits = high.view(torch.float16), low.view(torch.float16)
    key = ("lstm_steps", out.get_device(), batch, chosen, constants)
    ready = direct.known(key)
    with direct.on_device(out):
        for step in range(steps):
            operands = (first if step == 0 else pre, out, planes, cell, *bits, scale)
            if ready is None or not ready([operand.data_ptr() for operand in operands], step):
                parameters = (*operands, step, batch, *constants)
                compiled = kernel[grid](*parameters, num_warps=chosen.warps, num_stages=chosen.stages)
                ready = direct.remember(key, compiled, grid, parameters, operands, varying=(len(operands),))
    return out, cell
