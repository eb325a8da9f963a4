"""The steps of an LSTM: products with hidden states in split fp32, gates and new states, all layers in a launch.

A step's product is [batch, hidden] x [hidden, 4 hidden]: too small for a matrix unit to be what limits it. What the
library's fp32 kernels take are their launches, several a step, and reading the weights on fp32 units; here a program
reads the rows of a few units, all four gates of each, multiplies, and has all that it needs for their new state.

A layer is one step behind the one below it, whose new state is its input: launch d computes step d of the first layer,
d - 1 of the second, and so on, so that steps + layers - 1 launches do for all.

A hidden state is sigmoid times tanh, so that |h| <= 1 and one scale, 2^14, does for all: hi = fp16(h 2^14) and
lo = fp16((h 2^14 - hi) 2^11) hold h to 2^-22 of itself down to 2^-28, and to 2^-50 below that. The weights are split as
in `passes.split_products`; a row that is not held, with scale 0, is multiplied in IEEE fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from passes.kernels import direct
from passes.kernels.launch import multiprocessors
from passes.kernels.split_gemm import LOW, decoded

__all__ = ["Config", "choose", "kernel", "launch"]

SCALE = tl.constexpr(2.0**14)


@dataclass(frozen=True)
class Config:
    """Of a program: rows of the batch, units of the layer, elements of the product a step, and stages of its loads.

    early: whether a launch may begin before the one before it has ended, to wait for that on its multiprocessor
    (programmatic dependent launch, from compute capability 9.0 on).
    """

    rows: int
    units: int
    depth: int
    stages: int = 4
    warps: int = 4
    early: bool = False


def choose(batch: int, hidden: int, programs: int) -> Config:
    """As few units a program as make no more than `programs`, one a multiprocessor: each reads its part of the weights.

    Not fewer than 8, which on an H200 were as fast as 4 or up to 6 % faster
    (results/h200/split_lstm_configurations.json).
    """
    rows = max(16, min(64, triton.next_power_of_2(batch)))
    blocks = triton.cdiv(batch, rows)
    units = next((u for u in (8, 16) if blocks * triton.cdiv(hidden, u) <= programs), 16)
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


@triton.jit
def _times(
    gates, planes, plane, recent, w_high, w_low, w_scale, m, inside, row, there,
    HIDDEN: tl.constexpr, BM: tl.constexpr, UNITS: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """gates + h w^T: planes and `recent` hold h [batch, HIDDEN], the latter in fp32; w planes [4 HIDDEN, HIDDEN]."""
    scale = tl.load(w_scale + row, mask=there, other=1.0)
    if tl.min(scale, 0) != 0:
        main = tl.zeros((BM, 4 * UNITS), dtype=tl.float32)
        rest = tl.zeros((BM, 4 * UNITS), dtype=tl.float32)
        for first in range(0, HIDDEN, BK):
            k = first + tl.arange(0, BK)
            of_h = m[:, None] * HIDDEN + k[None, :]
            of_w = row[None, :] * HIDDEN + k[:, None]
            hh = tl.load(planes + of_h, mask=inside, other=0.0)
            hl = tl.load(planes + plane + of_h, mask=inside, other=0.0)
            wh = tl.load(w_high + of_w, mask=there[None, :], other=0.0)
            wl = tl.load(w_low + of_w, mask=there[None, :], other=0.0)
            # As in `split_gemm`: a matrix unit's own long sum rounds towards zero.
            main += tl.dot(hh, wh, max_num_imprecise_acc=BK)
            rest = tl.dot(hl, wh, rest)
            rest = tl.dot(hh, wl, rest)
        gates += (main + rest * LOW) * (1.0 / scale)[None, :] * (1.0 / SCALE)
    else:
        for first in range(0, HIDDEN, 16):
            k = first + tl.arange(0, 16)
            of_w = row[None, :] * HIDDEN + k[:, None]
            h = tl.load(recent + m[:, None] * HIDDEN + k[None, :], mask=inside, other=0.0)
            w = decoded(
                tl.load(w_high + of_w, mask=there[None, :], other=0.0),
                tl.load(w_low + of_w, mask=there[None, :], other=0.0),
                scale[None, :],
            )
            gates += tl.dot(h, w, input_precision="ieee", max_num_imprecise_acc=16)
    return gates


@triton.jit
def _step(
    first, pre, bias, out, planes, recent, cell, ih_high, ih_low, ih_scale, hh_high, hh_low, hh_scale,
    layer, step, batch,
    HIDDEN: tl.constexpr, LAYERS: tl.constexpr, BM: tl.constexpr, UNITS: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(HIDDEN, UNITS)
    unit = tl.program_id(0) % across * UNITS
    m = tl.program_id(0) // across * BM + tl.arange(0, BM)
    inside = (m < batch)[:, None]
    # Four gates of a unit beside each other.
    j = tl.arange(0, 4 * UNITS)
    there = unit + j // 4 < HIDDEN
    row = j % 4 * HIDDEN + unit + j // 4
    plane = batch * HIDDEN
    this, last = step & 1, (step - 1) & 1
    matrix = 4 * HIDDEN * HIDDEN
    of_gates = m[:, None] * (4 * HIDDEN) + row[None, :]
    known = inside & there[None, :]
    if step == 0:
        gates = tl.load(first + layer * (4 * plane) + of_gates, mask=known, other=0.0)
    elif layer == 0:
        gates = tl.load(pre + step.to(tl.int64) * (4 * plane) + of_gates, mask=known, other=0.0)
    else:
        added = tl.load(bias + (layer - 1) * (4 * HIDDEN) + row, mask=there, other=0.0)
        gates = tl.zeros((BM, 4 * UNITS), dtype=tl.float32) + added[None, :]
    if LAYERS > 1:  # noqa: SIM102 - by itself, so that a single layer has no code for it
        if layer > 0:
            below = (layer - 1) * 2 + this
            gates = _times(
                gates, planes + below * (2 * plane), plane, recent + below * plane,
                ih_high + (layer - 1) * matrix, ih_low + (layer - 1) * matrix, ih_scale + (layer - 1) * (4 * HIDDEN),
                m, inside, row, there, HIDDEN, BM, UNITS, BK,
            )  # fmt: skip
    if step > 0:
        own = layer * 2 + last
        gates = _times(
            gates, planes + own * (2 * plane), plane, recent + own * plane,
            hh_high + layer * matrix, hh_low + layer * matrix, hh_scale + layer * (4 * HIDDEN),
            m, inside, row, there, HIDDEN, BM, UNITS, BK,
        )  # fmt: skip
    # j is (unit, two bits of the gate): the last bit tells input from forget, and cell from output.
    even, odd = tl.split(tl.reshape(gates, (BM, UNITS, 2, 2)))
    i, g = tl.split(even)
    f, o = tl.split(odd)
    units = unit + tl.arange(0, UNITS)
    at = m[:, None] * HIDDEN + units[None, :]
    mine = inside & (units < HIDDEN)[None, :]
    of_cell = cell + layer * plane + at
    c = sigmoid(f) * tl.load(of_cell, mask=mine, other=0.0) + sigmoid(i) * tanh(g)
    h = sigmoid(o) * tanh(c)
    tl.store(of_cell, c, mask=mine)
    if layer == LAYERS - 1:
        tl.store(out + step.to(tl.int64) * plane + at, h, mask=mine)
    now = layer * 2 + this
    tl.store(recent + now * plane + at, h, mask=mine)
    y = h * SCALE
    hi = y.to(tl.float16)
    following = planes + now * (2 * plane)
    tl.store(following + at, hi, mask=mine)
    tl.store(following + plane + at, ((y - hi.to(tl.float32)) * 2048.0).to(tl.float16), mask=mine)


@triton.jit(do_not_specialize=["number", "steps"])
def kernel(
    first, pre, bias, out, planes, recent, cell, ih_high, ih_low, ih_scale, hh_high, hh_low, hh_scale,
    number, steps, batch,
    HIDDEN: tl.constexpr, LAYERS: tl.constexpr, BM: tl.constexpr, UNITS: tl.constexpr, BK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Launch `number`: of layer l, the step number - l.

    first [LAYERS, batch, 4 HIDDEN]: the gates of each layer's step 0 without what comes from below. pre [steps, batch,
    4 HIDDEN]: the first layer's without the hidden state's part; bias [LAYERS - 1, 4 HIDDEN], what others begin with.
    out [steps, batch, HIDDEN], the last layer's. Of each layer's last two steps, planes [LAYERS, 2, 2, batch, HIDDEN]
    fp16 and recent [LAYERS, 2, batch, HIDDEN]. cell [LAYERS, batch, HIDDEN], written in place. ih planes [LAYERS - 1,
    4 HIDDEN, HIDDEN] fp16 with scales [LAYERS - 1, 4 HIDDEN], and hh planes alike, for all layers. fp32 but planes.

    Gates lie as in torch: input, forget, cell, output. Grid: (cdiv(HIDDEN, UNITS) * cdiv(batch, BM), LAYERS).
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    layer = tl.program_id(1).to(tl.int64)
    step = number - tl.program_id(1)
    if (step >= 0) & (step < steps):
        _step(
            first, pre, bias, out, planes, recent, cell, ih_high, ih_low, ih_scale, hh_high, hh_low, hh_scale,
            layer, step, batch, HIDDEN, LAYERS, BM, UNITS, BK,
        )  # fmt: skip


Planes = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def launch(
    first: torch.Tensor,
    pre: torch.Tensor,
    bias: torch.Tensor | None,
    cell: torch.Tensor,
    below: Planes | None,
    weight: Planes,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(the last layer's hidden states [steps, batch, hidden], each layer's last hidden state and last cell state, both
    [layers, batch, hidden]), all fp32.

    first [layers, batch, 4 hidden]: the whole gates of the first step but for the product with the layer below. pre
    [steps, batch, 4 hidden]: the first layer's gates of all steps without the hidden state's part; its first is not
    read. bias [layers - 1, 4 hidden]: what the gates of the others begin with. cell [layers, batch, hidden]: before the
    first step, left as it is. below, weight: of the products with the layer below [layers - 1, 4 hidden, hidden] and
    with the hidden state [layers, ...], planes of fp16's bits and scales [.., 4 hidden, 1]. hidden: a multiple of 16.
    A single layer has neither bias nor below.
    """
    steps, batch, _ = pre.shape
    layers, _, hidden = cell.shape
    chosen = config or choose(batch, hidden, multiprocessors(pre.device))
    matrices = [*(weight if below is None else below), *weight]
    (ih_high, ih_low, ih_scale, *hh) = (part.contiguous() for part in matrices)
    first, pre = first.contiguous(), pre.contiguous()
    begun = pre if bias is None else bias.contiguous()
    cell = cell.clone(memory_format=torch.contiguous_format)
    out = pre.new_empty(steps, batch, hidden)
    planes = pre.new_empty(layers, 2, 2, batch, hidden, dtype=torch.float16)
    recent = pre.new_empty(layers, 2, batch, hidden)
    grid = (triton.cdiv(hidden, chosen.units) * triton.cdiv(batch, chosen.rows), layers)
    constants = (hidden, layers, chosen.rows, chosen.units, chosen.depth, chosen.early)
    bits = [part.view(torch.float16) for part in (ih_high, ih_low, hh[0], hh[1])]
    given = (first, pre, begun, out, planes, recent, cell, *bits[:2], ih_scale, *bits[2:], hh[2])
    # Without a layer below, what stands in its place is an operand already.
    operands = [None if layers == 1 and i in (2, 7, 8, 9) else tensor for i, tensor in enumerate(given)]
    addresses = [0 if operand is None else operand.data_ptr() for operand in operands]
    key = ("lstm_steps", out.get_device(), steps, batch, chosen, constants)
    ready = direct.known(key)
    with direct.on_device(out):
        for number in range(steps + layers - 1):
            if ready is None or not ready(addresses, number):
                parameters = (*given, number, steps, batch, *constants)
                options = {"launch_pdl": True} if chosen.early else {}
                compiled = kernel[grid](*parameters, num_warps=chosen.warps, num_stages=chosen.stages, **options)
                ready = direct.remember(key, compiled, grid, parameters, operands, varying=(len(given),))
    return out, recent[:, (steps - 1) % 2].clone(memory_format=torch.contiguous_format), cell
