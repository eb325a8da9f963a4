"""Convolution of split fp32 operands on fp16 tensor cores: an implicit GEMM over channels-last planes.

M is output pixels, N output channels, K the window's places times the input channels, channels fastest. No patch matrix
is written: each block of K reads its pixels where they lie, and what falls into the padding reads as zero.

A row of an operand (one pixel's channels, one output channel's weights) comes as two fp16 planes and a power of two s:
hi = fp16(a s), lo = fp16((a s - hi) 2^11). A block's product is hi hi + (lo hi + hi lo) 2^-11, and is added to fp32
registers block by block, because a tensor core's own long accumulation rounds towards zero (Ootomo and Yokota,
"Recovering single precision accuracy from Tensor Cores", 2022). Where s is 0 the planes hold the halves of the fp32
bits, and the whole tile is computed by fp32 multiply-adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from passes.kernels import direct
from passes.kernels.split_gemm import decoded

__all__ = ["Config", "choose", "kernel", "launch"]


@dataclass(frozen=True)
class Config:
    """Sizes of a tile (pixels, output channels, input channels a step), warps and stages of the load pipeline."""

    pixels: int
    outputs: int
    channels: int
    warps: int
    stages: int


def choose(pixels: int, outputs: int, channels: int, terms: int) -> Config:
    """Tile sizes for M = `pixels`, N = `outputs` and `channels` input channels.

    The largest tile that still gives each of about 132 multiprocessors one, and of which two have room on one, in
    registers and shared memory: on an H200 (torch 2.11, Triton 3.6), for 3x3 over 16x64x64x64 with 64 outputs, that was
    faster than more stages. 128x128 does not fit the registers of 8 warps (392 to 512 bytes of stack a thread); 128x64
    fits those of 4. With one term 128x32 was the fastest there, though it reads the pixels twice for 64 outputs; for
    more of them, which would be more reads, the wider tile stays, of which one has room.
    """
    step = 64 if channels % 64 == 0 else 32 if channels % 32 == 0 else 16
    across = 32 if outputs <= 32 or (terms == 1 and outputs <= 64) else 64
    if triton.cdiv(pixels, 128) * triton.cdiv(outputs, across) >= 120:
        if terms == 3:
            # Half the step leaves room for twice the stages.
            return Config(128, across, step, 4, 2 if step == 64 else 4)
        return Config(128, across, step, 4 if across == 32 else 8, 3 if across == 32 else 4)
    return Config(64, across, step, 4, 3 if terms == 3 else 4)


@triton.jit
def kernel(
    x_high, x_low, x_scale, w_high, w_low, w_scale, bias, out,
    pixels, height, width, out_height, out_width, outputs,
    stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w,
    CHANNELS: tl.constexpr, KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr,
    TERMS: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """x planes [batch, height, width, CHANNELS] with a scale a pixel; w planes [outputs, KERNEL_H KERNEL_W CHANNELS]
    with a scale an output; out [batch, out_height, out_width, outputs], fp32. All contiguous. `pixels` is out's."""
    columns = tl.cdiv(outputs, BLOCK_N)
    rows = tl.program_id(0) // columns * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(0) % columns * BLOCK_N + tl.arange(0, BLOCK_N)
    real = rows < pixels
    left = rows % out_width * stride_w - pad_w
    top = rows // out_width % out_height * stride_h - pad_h
    image = rows // (out_width * out_height) * height
    depth: tl.constexpr = KERNEL_H * KERNEL_W * CHANNELS
    blocks: tl.constexpr = CHANNELS // BLOCK_K
    w_s = tl.load(w_scale + cols, mask=cols < outputs, other=1.0)
    lanes = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)

    raw = tl.zeros((BLOCK_M,), dtype=tl.int32)
    if TERMS == 3:
        for place in range(KERNEL_H * KERNEL_W):
            y = top + place // KERNEL_W * dilation_h
            z = left + place % KERNEL_W * dilation_w
            inside = real & (y >= 0) & (y < height) & (z >= 0) & (z < width)
            raw |= (tl.load(x_scale + (image + y) * width + z, mask=inside, other=1.0) == 0.0).to(tl.int32)
    if tl.max(raw, 0) + tl.max((w_s == 0.0).to(tl.int32), 0) == 0:
        for step in range(KERNEL_H * KERNEL_W * blocks):
            place = step // blocks
            k = step % blocks * BLOCK_K + lanes
            y = top + place // KERNEL_W * dilation_h
            z = left + place % KERNEL_W * dilation_w
            inside = real & (y >= 0) & (y < height) & (z >= 0) & (z < width)
            pixel = (image + y) * width + z
            at = pixel[:, None] * CHANNELS + k[None, :]
            of = cols[None, :] * depth + (place * CHANNELS + k)[:, None]
            shown = (cols < outputs)[None, :]
            xh = tl.load(x_high + at, mask=inside[:, None], other=0.0)
            wh = tl.load(w_high + of, mask=shown, other=0.0)
            if TERMS == 3:
                xl = tl.load(x_low + at, mask=inside[:, None], other=0.0)
                wl = tl.load(w_low + of, mask=shown, other=0.0)
                small = tl.dot(xl, wh)
                small = tl.dot(xh, wl, small)
                part = tl.dot(xh, wh, small * 0.00048828125)
            else:
                part = tl.dot(xh, wh)
            x_s = tl.load(x_scale + pixel, mask=inside, other=1.0)
            total += part * (1.0 / x_s)[:, None]
        total = total * (1.0 / w_s)[None, :]
    else:
        for k in range(depth):
            place = k // CHANNELS
            y = top + place // KERNEL_W * dilation_h
            z = left + place % KERNEL_W * dilation_w
            inside = real & (y >= 0) & (y < height) & (z >= 0) & (z < width)
            pixel = (image + y) * width + z
            at = pixel * CHANNELS + k % CHANNELS
            x_s = tl.load(x_scale + pixel, mask=inside, other=1.0)
            xh = tl.load(x_high + at, mask=inside, other=0.0)
            xl = tl.load(x_low + at, mask=inside, other=0.0)
            wh = tl.load(w_high + cols * depth + k, mask=cols < outputs, other=0.0)
            wl = tl.load(w_low + cols * depth + k, mask=cols < outputs, other=0.0)
            # Both in their own units, where a product overflows only if fp32's does.
            total += decoded(xh, xl, x_s)[:, None] * decoded(wh, wl, w_s)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + cols, mask=cols < outputs, other=0.0)[None, :]
    tl.store(out + rows[:, None] * outputs + cols[None, :], total, mask=real[:, None] & (cols < outputs)[None, :])


def launch(
    x: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor],
    w: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor],
    bias: torch.Tensor | None,
    out: torch.Tensor,
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    config: Config | None = None,
) -> Any:
    """Fill `out` [batch, out_height, out_width, outputs] from (high, low, scale) of both operands; without low planes
    one product is made, else three. See `kernel` for shapes. Returns what Triton compiled, where it was not known.
    """
    key = (
        ("split_conv", out.get_device(), x[0].shape, w[0].shape, out.shape, config),
        (*window, *stride, *padding, *dilation),
        tuple(None if part is None else (part.is_contiguous(), part.dtype) for part in (*x, *w, bias)),
    )
    ready = direct.known(key)
    operands = (*x, *w, bias, out)
    if ready is not None and ready([0 if operand is None else operand.data_ptr() for operand in operands]):
        return None
    # Whoever calls the operator: the kernel reads all of them densely.
    x_high, x_scale, w_high, w_scale = (part.contiguous() for part in (x[0], x[2], w[0], w[2]))
    x_low, w_low, added = (None if part is None else part.contiguous() for part in (x[1], w[1], bias))
    _, height, width, channels = x_high.shape
    batch, out_height, out_width, outputs = out.shape
    pixels = batch * out_height * out_width
    terms = 1 if x_low is None else 3
    chosen = config or choose(pixels, outputs, channels, terms)
    grid = (triton.cdiv(pixels, chosen.pixels) * triton.cdiv(outputs, chosen.outputs),)
    parameters = (
        x_high.view(torch.float16),
        (x_high if x_low is None else x_low).view(torch.float16),
        x_scale,
        w_high.view(torch.float16),
        (w_high if w_low is None else w_low).view(torch.float16),
        w_scale,
        w_scale if added is None else added,
        out,
        *(pixels, height, width, out_height, out_width, outputs),
        *(*stride, *padding, *dilation),
        *(channels, *window, terms, bias is not None, chosen.pixels, chosen.outputs, chosen.channels),
    )
    with direct.on_device(out):
        compiled = kernel[grid](*parameters, num_warps=chosen.warps, num_stages=chosen.stages)
        direct.remember(key, compiled, grid, parameters, operands)
    return compiled
