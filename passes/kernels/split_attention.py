"""The Triton kernels behind `fxopt::split_attention`: softmax(q k^T * scale + bias) v in fp32 on fp16 tensor cores.

Flash attention's loop over blocks of N keys with an online softmax. Each product is three tensor-core products of split
operands, a = (hi + lo * 2^-11) / s with s a power of two: the two small ones first, then hi @ hi on top of them. A
tensor core's accumulator rounds towards zero, so none lives longer than one block: what a block adds to the output is
taken over into fp32 registers.

Keys and values are read by every tile of queries, and Hopper's matrix instruction wants them in shared memory in 16
bits: `split_keys_and_values` writes their planes once. Queries are split by the tile that reads them, once. The scales:

- q: one for each tile of M queries; k: one for each block of N keys. What is too small against the largest of its tile
  for the planes is off by at most 2^-50 of that largest, so a score is off by 2^-22 of |q| |k|, as fp32 has it, plus
  2^-49 * D * max|q| * max|k|. Softmax forgives an absolute error: below 2^-27 nobody sees it. So the planes serve as
  long as scale * D * max|q| * max|k| <= 2^22, and rows of mixed magnitude need no scales of their own.
- v: one for each column of each block, which costs one multiplication of the sum that has to be taken over anyway. Its
  columns go to different outputs, and a weight may be zero where a column is largest, so a column of mixed scale, with
  more than one in 64 non-zero elements below 2^-28 of its largest, is more than the planes hold.
- softmax's weights are in [0, 1]; 2^14 is their scale. A weight is off by 2^-22 of itself or by 2^-50, so an output by
  2^-50 * kv_len * max|v| more than fp32's. That shows only where the keys with weight have next to no values; a row
  whose sums are below 2^24 times that in every column is computed anew.

A tile that meets values which cannot be held so (these bounds, Inf and NaN) takes another loop of the same kernel, in
IEEE fp32 from the original tensors. The device decides, tile by tile; the host never waits.

Where a product of split operands reads the result, it can be written as that product wants it: each head's part of a
row as two planes and a scale, for a tile of queries has all of them at hand.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from passes.kernels import direct
from passes.kernels.split_gemm import planes_of

LOG2E = tl.constexpr(1.4426950408889634)
LOW = tl.constexpr(2.0**-11)  # weight of the low plane
HIGH_ENOUGH = tl.constexpr(2.0**50)  # max|q| and max|k| stay below
LEAST_SCORE = tl.constexpr(127 - 40)  # biased exponent: nothing smaller than 2^-40 is scaled up all the way
LEAST_VALUE = tl.constexpr(127 - 98)  # the same for v, so that the inverse scale is a normal number
#: scale * D * max|q| * max|k| above which 2^-49 of it would show in a score
SCORES = 2.0**22


class Tiles(NamedTuple):
    """queries a program, keys a step, warps, stages of the pipeline."""

    m: int
    n: int
    warps: int
    stages: int


#: (head dimension, rounded up to a power of two; causal) -> tiles. (64, False) is the fastest of 27 on an H200 (torch
#: 2.11, Triton 3.6) for 8 x 8 heads of 512 queries and keys, by 3 % over 2 stages; 3 take 112 KiB of shared memory, of
#: which a multiprocessor has twice that. (64, True) follows it; the others were chosen by registers and shared memory.
TILES: dict[tuple[int, bool], Tiles] = {
    (16, False): Tiles(64, 64, 4, 3),
    (16, True): Tiles(64, 64, 4, 3),
    (32, False): Tiles(64, 64, 4, 3),
    (32, True): Tiles(64, 64, 4, 3),
    (64, False): Tiles(64, 64, 4, 3),
    (64, True): Tiles(64, 64, 4, 3),
    (128, False): Tiles(64, 32, 4, 2),
    (128, True): Tiles(64, 32, 4, 2),
}


@triton.jit
def _magnitude(x):
    """|x|, with Inf for NaN, which a maximum would lose."""
    return tl.where(tl.abs(x) < float("inf"), tl.abs(x), float("inf"))


@triton.jit
def _scales(largest, LEAST: tl.constexpr):
    """(s, 1/s): the power of two that brings `largest` into [2^14, 2^15), or less where it is below 2^(LEAST-127)."""
    exponent = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, LEAST)
    scale = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    return scale, ((exponent - 14) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _split(y):
    """Two fp16 parts: y = hi + lo * 2^-11 to 22 bits; |y| is below 2^15."""
    hi = y.to(tl.float16)
    return hi, ((y - hi.to(tl.float32)) * 2048.0).to(tl.float16)


@triton.jit
def split_keys_and_values(
    k, v, planes, bound, k_inverse, v_inverse, heads, kv_len, head_dim, blocks, plane,
    skb, skh, skn, skd, svb, svh, svn, svd,
    N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Writes the planes of one block of keys and values of one head. Grid: heads of the batch * blocks.

    planes: fp16 [4, batch * heads, blocks * N, D], k's high and low ones and v's, padded with zeros; plane: elements of
    one. bound, k_inverse: fp32 [batch * heads, blocks]; v_inverse: [batch * heads, blocks, D], with the weights' 2^-14.
    bound is the largest |k|, Inf where the planes do not hold the block.
    """
    at = tl.program_id(0).to(tl.int64)
    head = at // blocks
    block = at % blocks
    rows = block * N + tl.arange(0, N)
    cols = tl.arange(0, D)
    mask = (rows < kv_len)[:, None] & (cols < head_dim)[None, :]
    k += (head // heads) * skb + (head % heads) * skh
    v += (head // heads) * svb + (head % heads) * svh
    keys = tl.load(k + rows[:, None] * skn + cols[None, :] * skd, mask=mask, other=0.0)
    values = tl.load(v + rows[:, None] * svn + cols[None, :] * svd, mask=mask, other=0.0)
    planes += at * N * D + tl.arange(0, N)[:, None] * D + cols[None, :]

    k_largest = tl.max(tl.max(_magnitude(keys), 1), 0)
    k_scale, inverse = _scales(k_largest, LEAST_SCORE)
    hi, lo = _split(keys * k_scale)
    tl.store(planes, hi)
    tl.store(planes + plane, lo)
    tl.store(k_inverse + at, inverse)

    magnitude = _magnitude(values)
    largest = tl.max(magnitude, 0)
    small = tl.sum(((magnitude < largest[None, :] * 2.0**-28) & (magnitude != 0)).to(tl.int32), 0)
    held = (largest >= 2.0**-98) & (largest < float("inf")) & (small * 64 <= N)
    all_held = tl.min((held | (largest == 0)).to(tl.int32), 0)
    v_scale, inverse = _scales(largest, LEAST_VALUE)
    hi, lo = _split(values * v_scale[None, :])
    tl.store(planes + 2 * plane, hi)
    tl.store(planes + 3 * plane, lo)
    # 0 for a column of zeros, whose sums are 0 whatever they are multiplied by: it counts for nothing in _lost.
    tl.store(v_inverse + at * D + cols, tl.where(largest == 0, 0.0, inverse * 2.0**-14))
    tl.store(bound + at, tl.where(all_held == 1, k_largest, float("inf")))


@triton.jit
def _visible(rows, keys, kv_len, CAUSAL: tl.constexpr):
    visible = (keys < kv_len)[None, :]
    if CAUSAL:
        visible = visible & (keys[None, :] <= rows[:, None])
    return visible


@triton.jit
def _rescaled(m, top, HAS_BIAS: tl.constexpr):
    """(maximum, what to subtract, what to multiply earlier sums by) of rows with scores up to `top` in this block."""
    m_new = tl.maximum(m, top)
    shift = m_new
    if HAS_BIAS:  # a row of which nothing is visible so far: its weights are 0, not exp2(-inf + inf)
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    return m_new, shift, tl.exp2(m - shift)


@triton.jit
def _lost(acc, v_most, kv_len):
    """1 if, in some row, what weights below 2^-28 have lost may show in every column that has values at all.

    v_most: the largest inverse scale of each column, with the weights' 2^-14: its largest |v| is below 2^29 of that.
    """
    seen = v_most * (kv_len * 8.0)  # 2^24 * 2^-50 * kv_len * max|v|
    tiny = (tl.abs(acc) < seen[None, :]) | (seen == 0)[None, :]
    rows = tl.max(tl.min(tiny.to(tl.int32), 1), 0)
    return tl.where(tl.max(seen, 0) > 0, rows, 0)


@triton.jit
def _blocks(
    acc, total, m, v_most, q_hi, q_lo, q_factor, planes, plane, k_inverse, v_inverse, bias, stride_bias_n,
    first, last, rows, q_len, kv_len,
    N: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, HAS_BIAS: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Blocks [first, last) from the planes. MASK: some of their keys are invisible, or past the end."""
    cols = tl.arange(0, D)
    inside = tl.arange(0, N)[:, None] * D + cols[None, :]
    for block in range(first, last):
        keys = block * N + tl.arange(0, N)
        at = planes + block * (N * D) + inside
        k_hi = tl.load(at)
        k_lo = tl.load(at + plane)
        s = tl.dot(q_lo, tl.trans(k_hi))
        s = tl.dot(q_hi, tl.trans(k_lo), s)
        s = tl.dot(q_hi, tl.trans(k_hi), s * LOW)
        factor = q_factor * tl.load(k_inverse + block)
        if HAS_BIAS:
            there = (rows < q_len)[:, None] & (keys < kv_len)[None, :]
            added = tl.load(bias + keys[None, :].to(tl.int64) * stride_bias_n, mask=there, other=0.0)
            s = (s * factor + added) * LOG2E
            factor = 1.0
        else:
            factor *= LOG2E
        if MASK:
            s = tl.where(_visible(rows, keys, kv_len, CAUSAL), s, float("-inf"))
        m, shift, alpha = _rescaled(m, tl.max(s, 1) * factor, HAS_BIAS)
        p = tl.exp2(s * factor - shift[:, None])
        total = total * alpha + tl.sum(p, 1)
        p_hi, p_lo = _split(p * 16384.0)
        v_hi = tl.load(at + 2 * plane)
        v_lo = tl.load(at + 3 * plane)
        o = tl.dot(p_lo, v_hi)
        o = tl.dot(p_hi, v_lo, o)
        o = tl.dot(p_hi, v_hi, o * LOW)
        inverse = tl.load(v_inverse + block * D + cols)
        acc = acc * alpha[:, None] + o * inverse[None, :]
        v_most = tl.maximum(v_most, inverse)
    return acc, total, m, v_most


@triton.jit
def _exact(
    acc, total, m, q, k, v, bias, stride_bias_n, last, rows, q_len, kv_len, head_dim, scale,
    sqm, sqd, skn, skd, svn, svd,
    M: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Keys [0, last) in IEEE fp32, 16 at a time: the operands of fp32 instructions come from registers."""
    cols = tl.arange(0, D)
    for start in range(0, last, 16):
        keys = start + tl.arange(0, 16).to(tl.int64)  # rows may lie 2^31 elements apart and more
        s = tl.zeros((M, 16), dtype=tl.float32)
        for d in range(0, head_dim, 16):
            part = d + tl.arange(0, 16)
            there = (rows < q_len)[:, None] & (part < head_dim)[None, :]
            q_part = tl.load(q + rows[:, None] * sqm + part[None, :] * sqd, mask=there, other=0.0)
            there = (keys < kv_len)[None, :] & (part < head_dim)[:, None]
            k_part = tl.load(k + keys[None, :] * skn + part[:, None] * skd, mask=there, other=0.0)
            s = tl.dot(q_part, k_part, s, input_precision="ieee")
        s *= scale
        if HAS_BIAS:
            there = (rows < q_len)[:, None] & (keys < kv_len)[None, :]
            s += tl.load(bias + keys[None, :] * stride_bias_n, mask=there, other=0.0)
        s = tl.where(_visible(rows, keys, kv_len, CAUSAL), s * LOG2E, float("-inf"))
        m, shift, alpha = _rescaled(m, tl.max(s, 1), HAS_BIAS)
        p = tl.exp2(s - shift[:, None])
        total = total * alpha + tl.sum(p, 1)
        there = (keys < kv_len)[:, None] & (cols < head_dim)[None, :]
        values = tl.load(v + keys[:, None] * svn + cols[None, :] * svd, mask=there, other=0.0)
        acc = tl.dot(p, values, acc * alpha[:, None], input_precision="ieee")
    return acc, total, m


@triton.jit
def split_attention(
    q, k, v, bias, out, out_lo, out_scale, planes, bound, k_inverse, v_inverse,
    heads, q_len, kv_len, head_dim, blocks, plane, scale, limit,
    sqb, sqh, sqm, sqd, skb, skh, skn, skd, svb, svh, svn, svd, sbb, sbh, sbm, sbn, sob, soh, som,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """The output of one tile of M queries of one head. Grid: heads of the batch * tiles.

    limit: what max|q| * max|k| may be. EVEN: every key of every block is there and visible. SPLIT: out and out_lo are
    int16 planes, out_scale is fp32 [batch, q_len, heads]; head_dim is D.
    """
    tiles = tl.cdiv(q_len, M)
    tile = tl.program_id(0) % tiles
    if CAUSAL:  # the longest ones first
        tile = tiles - 1 - tile
    head = (tl.program_id(0) // tiles).to(tl.int64)
    batch = head // heads
    within = head % heads
    rows = tile * M + tl.arange(0, M).to(tl.int64)
    cols = tl.arange(0, D)
    mask = (rows < q_len)[:, None] & (cols < head_dim)[None, :]
    q += batch * sqb + within * sqh
    x = tl.load(q + rows[:, None] * sqm + cols[None, :] * sqd, mask=mask, other=0.0)
    q_largest = tl.max(tl.max(_magnitude(x), 1), 0)
    q_scale, q_inverse = _scales(q_largest, LEAST_SCORE)
    q_hi, q_lo = _split(x * q_scale)
    if HAS_BIAS:
        bias += batch * sbb + within * sbh + rows[:, None] * sbm
    last = tl.cdiv(kv_len, N)
    full = kv_len // N  # blocks whose every key is there and visible to all M queries
    if CAUSAL:
        last = min(last, tl.cdiv(tile * M + M, N))
        full = min(full, (tile * M + 1) // N)
    bound += head * blocks
    worst = 0.0
    for at in range(0, last, 64):
        which = at + tl.arange(0, 64)
        worst = tl.maximum(worst, tl.max(tl.load(bound + which, mask=which < last, other=0.0), 0))

    acc = tl.zeros((M, D), dtype=tl.float32)
    total = tl.zeros((M,), dtype=tl.float32)
    m = tl.full((M,), float("-inf"), dtype=tl.float32)
    exact = 1
    if (q_largest < HIGH_ENOUGH) & (worst < HIGH_ENOUGH) & (q_largest * worst <= limit):
        planes += head * blocks * (N * D)
        k_inverse += head * blocks
        v_inverse += head * blocks * D
        v_most = tl.zeros((D,), dtype=tl.float32)
        acc, total, m, v_most = _blocks(
            acc, total, m, v_most, q_hi, q_lo, q_inverse * scale, planes, plane, k_inverse, v_inverse, bias, sbn,
            0, full, rows, q_len, kv_len, N, D, CAUSAL, HAS_BIAS, False,
        )  # fmt: skip
        if not EVEN:
            acc, total, m, v_most = _blocks(
                acc, total, m, v_most, q_hi, q_lo, q_inverse * scale, planes, plane, k_inverse, v_inverse, bias, sbn,
                full, last, rows, q_len, kv_len, N, D, CAUSAL, HAS_BIAS, True,
            )  # fmt: skip
        # A row past the end, or of which nothing is visible, has lost nothing.
        exact = _lost(tl.where(((rows < q_len) & (total > 0))[:, None], acc, float("inf")), v_most, kv_len)
    if exact:
        acc = tl.zeros((M, D), dtype=tl.float32)
        total = tl.zeros((M,), dtype=tl.float32)
        m = tl.full((M,), float("-inf"), dtype=tl.float32)
        acc, total, m = _exact(
            acc, total, m, q, k + batch * skb + within * skh, v + batch * svb + within * svh, bias, sbn,
            min(last * N, kv_len), rows, q_len, kv_len, head_dim, scale, sqm, sqd, skn, skd, svn, svd,
            M, D, CAUSAL, HAS_BIAS,
        )  # fmt: skip
    # A row of which nothing is visible is 0, as torch's efficient attention has it.
    result = acc / tl.where(total == 0, 1.0, total)[:, None]
    at = batch * sob + within * soh + rows[:, None] * som + cols[None, :]
    if SPLIT:
        hi, lo, scales = planes_of(result)
        tl.store(out + at, hi, mask=mask)
        tl.store(out_lo + at, lo, mask=mask)
        tl.store(out_scale + (batch * q_len + rows) * heads + within, scales, mask=rows < q_len)
    else:
        tl.store(out + at, result, mask=mask)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    causal: bool,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """softmax(q k^T * scale + bias) v of fp32 [batch, heads, length, head_dim <= 128], any strides; head_dim alike.

    Returns [batch, heads, q_len, head_dim] in the memory of [batch, q_len, heads, head_dim], as torch's efficient
    attention does. bias: expands to [batch, heads, q_len, kv_len]. causal: query i sees keys up to i.
    """
    batch, heads, q_len, head_dim = q.shape
    out = q.new_empty(batch, q_len, heads, head_dim)
    _launch(q, k, v, bias, scale, causal, out, out, out, tiles)
    return out.transpose(1, 2)


def attend_split(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`attend`, as `passes.split_products.split` writes it: int16 planes [batch, q_len, heads, head_dim] and fp32
    scales [batch, q_len, heads, 1]. head_dim is a power of two.
    """
    batch, heads, q_len, head_dim = q.shape
    hi, lo = (q.new_empty((batch, q_len, heads, head_dim), dtype=torch.int16) for _ in range(2))
    scales = q.new_empty(batch, q_len, heads, 1)
    _launch(q, k, v, bias, scale, causal, hi, lo, scales)
    return hi, lo, scales


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    causal: bool,
    out: torch.Tensor,
    out_lo: torch.Tensor,
    out_scale: torch.Tensor,
    tiles: Tiles | None = None,
) -> None:
    """Writes out [batch, q_len, heads, head_dim], in planes where it is int16."""
    key = (
        ("split_attention", q.get_device(), scale, causal, out.dtype, tiles),
        (q.shape, q.stride(), q.dtype, k.shape, k.stride(), k.dtype, v.shape, v.stride(), v.dtype),
        None if bias is None else (bias.shape, bias.stride(), bias.dtype),
    )
    ready = direct.known(key)
    if ready is not None:
        first, size, places = ready.note
        memory = q.new_empty(size, dtype=torch.uint8)  # kept until both are launched
        start = memory.data_ptr()
        written = (out.data_ptr(), out_lo.data_ptr(), out_scale.data_ptr()) if out_lo is not out else (out.data_ptr(),)
        at = [k.data_ptr(), v.data_ptr(), *(start + place for place in places)]
        if first(at) and ready([q.data_ptr(), *at, 0 if bias is None else bias.data_ptr(), *written]):
            return
    _ordinary(key, q, k, v, bias, scale, causal, out, out_lo, out_scale, tiles)


def _ordinary(
    key: Hashable,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    causal: bool,
    out: torch.Tensor,
    out_lo: torch.Tensor,
    out_scale: torch.Tensor,
    tiles: Tiles | None,
) -> None:
    """`_launch` through Triton's own launches, remembered for calls of the same key."""
    batch, heads, q_len, head_dim = q.shape
    kv_len, split = k.shape[2], out.dtype == torch.int16
    if out.numel() == 0 or kv_len == 0:
        out.zero_()
        if split:
            out_lo.zero_()
            out_scale.fill_(1.0)
        return
    d = max(16, triton.next_power_of_2(head_dim))
    m, n, warps, stages = tiles or TILES[d, causal]
    if tiles is None and bias is not None:  # its blocks are in the pipeline too, and two programs are to fit still
        stages = min(stages, 2)
    expanded = None if bias is None else bias.expand(batch, heads, q_len, kv_len)
    blocks = triton.cdiv(kv_len, n)
    every = batch * heads
    shapes = [(4, every, blocks * n, d), (every, blocks), (every, blocks), (every, blocks, d)]
    # One piece of memory for all that the first kernel writes, each part aligned: it is made in every call.
    kinds = (torch.float16, *(torch.float32,) * 3)
    sizes = [math.prod(shape) * kind.itemsize for shape, kind in zip(shapes, kinds, strict=True)]
    places = [0, *itertools.accumulate(-(-size // 16) * 16 for size in sizes)]
    memory = q.new_empty(places.pop(), dtype=torch.uint8)
    planes, bound, k_inverse, v_inverse = (
        memory[place : place + size].view(kind).view(shape)
        for place, size, kind, shape in zip(places, sizes, kinds, shapes, strict=True)
    )
    with direct.on_device(q):
        grid = (batch * heads * blocks,)
        parameters: tuple[Any, ...] = (
            k, v, planes, bound, k_inverse, v_inverse, heads, kv_len, head_dim, blocks, planes.stride(0),
            *k.stride(), *v.stride(), n, d,
        )  # fmt: skip
        compiled = split_keys_and_values[grid](*parameters, num_warps=4)
        given = [k, v, planes, bound, k_inverse, v_inverse]
        first = direct.remember((key, "keys"), compiled, grid, parameters, given)
        grid = (batch * heads * triton.cdiv(q_len, m),)
        parameters = (
            q, k, v, expanded, out, out_lo, out_scale, planes, bound, k_inverse, v_inverse,
            heads, q_len, kv_len, head_dim, blocks, planes.stride(0), scale, SCORES / (scale * head_dim),
            *q.stride(), *k.stride(), *v.stride(), *(expanded.stride() if expanded is not None else (0,) * 4),
            out.stride(0), out.stride(2), out.stride(1), m, n, d, causal, bias is not None,
            not causal and kv_len % n == 0, split,
        )  # fmt: skip
        compiled = split_attention[grid](*parameters, num_warps=warps, num_stages=stages)
        if first is not None:
            operands = (q, *given, bias, out, *((out_lo, out_scale) if split else ()))
            direct.remember(key, compiled, grid, parameters, operands, (first, memory.numel(), places))
