"""The Triton kernels behind `fxopt::split_attention`: softmax(q k^T * scale + bias) v in fp32 on fp16 tensor cores.

Flash attention's loop over blocks of N keys with an online softmax. Each product is three tensor-core products of split
operands, a = (hi + lo * 2^-11) / s with s a power of two: the two small ones first, then hi @ hi on top of them. A
tensor core's accumulator rounds towards zero, so none lives longer than one block: what a block adds to the output is
taken over into fp32 registers.

Keys and values are read by every tile of queries, and Hopper's matrix instruction wants them in shared memory in 16
bits: `split_keys_and_values` writes their planes once. Queries are split by the tile that reads them, once. Where keys
and tiles of queries are few, another kernel costs more than it saves: a tile of `split_attention_at_once` splits all
keys and values by itself, as one block. The scales:

- q: one for each tile of M queries; k: one for each block of N keys. What is too small against the largest of its tile
  for the planes is off by at most 2^-50 of that largest, so a score is off by 2^-22 of |q| |k|, as fp32 has it, plus
  2^-49 * D * max|q| * max|k|. Softmax forgives an absolute error: below 2^-27 nobody sees it. So the planes serve as
  long as scale * D * max|q| * max|k| <= 2^22, and rows of mixed magnitude need no scales of their own.
- v: one for each column of each block, which costs one multiplication of the sum that has to be taken over anyway. Its
  columns go to different outputs, and a weight may be zero where a column is largest, so a column of mixed scale, with
  more than one in 64 non-zero elements (of a block, padded) below 2^-28 of its largest, is more than the planes hold.
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

from passes.kernels import direct
from passes.kernels.split_attention_kernels import (
    split_attention,
    split_attention_at_once,
    split_keys_and_values,
)

#: scale * D * max|q| * max|k| above which 2^-49 of it would show in a score
SCORES = 2.0**22
#: keys that a tile of queries splits itself, and takes in one step; up to how many tiles of queries do so for each head
AT_ONCE, MOST_TILES = 128, 4


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
    written = (out.data_ptr(), out_lo.data_ptr(), out_scale.data_ptr()) if out_lo is not out else (out.data_ptr(),)
    if ready is not None and ready.note is None:
        if ready([q.data_ptr(), k.data_ptr(), v.data_ptr(), 0 if bias is None else bias.data_ptr(), *written]):
            return
    elif ready is not None:
        first, size, places = ready.note
        memory = q.new_empty(size, dtype=torch.uint8)  # kept until both are launched
        start = memory.data_ptr()
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
    expanded = None if bias is None else bias.expand(batch, heads, q_len, kv_len)
    strides = (*q.stride(), *k.stride(), *v.stride(), *(expanded.stride() if expanded is not None else (0,) * 4))
    strides += (out.stride(0), out.stride(2), out.stride(1))
    limit = SCORES / (scale * head_dim)
    written = (out, out_lo, out_scale) if split else (out,)
    grid: tuple[int, ...]
    parameters: tuple[Any, ...]
    if tiles is None and kv_len <= AT_ONCE and d <= 64 and q_len <= MOST_TILES * 64:
        grid = (batch * heads * triton.cdiv(q_len, 64),)
        parameters = (
            q, k, v, expanded, out, out_lo, out_scale, heads, q_len, kv_len, head_dim, scale, limit, *strides,
            64, max(16, triton.next_power_of_2(kv_len)), d, causal, bias is not None, split,
        )  # fmt: skip
        with direct.on_device(q):
            compiled = split_attention_at_once[grid](*parameters, num_warps=4, num_stages=1)
            direct.remember(key, compiled, grid, parameters, (q, k, v, bias, *written))
        return
    m, n, warps, stages = tiles or TILES[d, causal]
    if tiles is None and bias is not None:  # its blocks are in the pipeline too, and two programs are to fit still
        stages = min(stages, 2)
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
        parameters = (
            k, v, planes, bound, k_inverse, v_inverse, heads, kv_len, head_dim, blocks, planes.stride(0),
            *k.stride(), *v.stride(), n, d,
        )  # fmt: skip
        compiled = split_keys_and_values[grid](*parameters, num_warps=4)
        given = [k, v, planes, bound, k_inverse, v_inverse]
        first = direct.remember((key, "keys"), compiled, grid, parameters, given)
        grid = (batch * heads * triton.cdiv(q_len, m),)
        parameters = (
            q, k, v, expanded, out, out_lo, out_scale, planes, bound, k_inverse, v_inverse,
            heads, q_len, kv_len, head_dim, blocks, planes.stride(0), scale, limit, *strides, m, n, d, causal,
            bias is not None, not causal and kv_len % n == 0, split,
        )  # fmt: skip
        compiled = split_attention[grid](*parameters, num_warps=warps, num_stages=stages)
        if first is not None:
            note = (first, memory.numel(), places)
            direct.remember(key, compiled, grid, parameters, (q, *given, bias, *written), note)
