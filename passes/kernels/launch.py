"""How the split products are launched."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from passes.kernels import direct

#: BM, BN, BK, shares along K (0: an even part of all steps to each program), warps, stages
Tile = tuple[int, int, int, int, int, int]
#: warps of a tile of `split_gemm_hopper`: two groups that multiply, and one that fetches
HOPPER = 12


def gemm(
    a: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor],
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: Tile,
    counts: torch.Tensor | None = None,
) -> None:
    """Run the kernel: a is planes [.., M, K] and scales [.., M, blocks], or [.., M, blocks, block] and
    [.., M, blocks, 1]; b planes [.., N, K] and scales [.., N, 1].

    Planes are fp16, or int16 that hold fp16's bits; their low one is None for a single product. counts: `needed_counts`
    int32 zeros, which no other launch may use at the same time, and which are zeros again after it (None: new ones).
    """
    a_hi, a_lo, a_scale = a
    b_hi, b_lo, b_scale = b
    assert a_hi is not None and b_hi is not None
    shapes = (a_hi.shape, a_scale.shape, b_hi.shape, tile, a_hi.get_device(), a_lo is None)
    strides = (a_hi.stride(), a_scale.stride(), b_hi.stride(), b_scale.stride(), out.is_contiguous())
    lows = None if a_lo is None or b_lo is None else (a_lo.stride(), b_lo.stride())
    added = None if bias is None else (bias.stride(), bias.dtype)
    key = (shapes, strides, lows, added, a_hi.dtype, b_hi.dtype)
    ready = direct.known(key)
    if ready is None or (ready.note and counts is None):
        _ordinary(key, _arguments(a, b, bias, out, tile, counts))
        return
    sums = out.new_empty(ready.note) if ready.note else None
    operands = (a_hi, a_lo, a_scale, b_hi, b_lo, b_scale, bias, out, sums, counts if ready.note else None)
    if not ready([0 if operand is None else operand.data_ptr() for operand in operands]):
        _ordinary(key, _arguments(a, b, bias, out, tile, counts))


def compile_only(
    a: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor],
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: Tile,
) -> Any:
    """Compile what `gemm` would launch, and launch nothing. Returns what Triton compiled, or will have."""
    call = _arguments(a, b, bias, out, tile, None)
    with direct.on_device(out):
        return call.kernel.warmup(*call.parameters, grid=call.grid, **call.options)


@dataclass
class _Call:
    """A launch through Triton: of `operands`, a later one's addresses differ; sums: elements of the memory between."""

    kernel: Any
    grid: tuple[int, ...]
    parameters: tuple[Any, ...]
    options: dict[str, int]
    operands: tuple[torch.Tensor | None, ...]
    sums: int


def _ordinary(key: Hashable, call: _Call) -> None:
    with direct.on_device(call.operands[0]):
        compiled = call.kernel[call.grid](*call.parameters, **call.options)
        direct.remember(key, compiled, call.grid, call.parameters, call.operands, call.sums)


def _arguments(
    a: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor],
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: Tile,
    counts: torch.Tensor | None,
) -> _Call:
    import triton

    from passes.kernels import split_gemm as kernels

    bm, bn, bk, shares, warps, stages = tile
    a_hi, a_lo, a_scale = (None if t is None else t.view(torch.float16) if t.dtype == torch.int16 else t for t in a)
    b_hi, b_lo, b_scale = (None if t is None else t.view(torch.float16) if t.dtype == torch.int16 else t for t in b)
    assert a_hi is not None and b_hi is not None and a_scale is not None and b_scale is not None
    if a_hi.dim() > b_hi.dim():
        a_hi, a_scale = a_hi.flatten(-2), a_scale.flatten(-2)
        a_lo = None if a_lo is None else a_lo.flatten(-2)
    m, k = a_hi.shape[-2:]
    n = b_hi.shape[-2]
    blocks = a_scale.shape[-1]
    batch = a_hi.shape[0] if a_hi.dim() == 3 else 1
    # Scales are read densely and both planes by one set of strides.
    a_scale, b_scale = a_scale.contiguous(), b_scale.contiguous()
    if a_lo is not None and a_lo.stride() != a_hi.stride():
        a_lo, a_hi = a_lo.contiguous(), a_hi.contiguous()
    if b_lo is not None and b_lo.stride() != b_hi.stride():
        b_lo, b_hi = b_lo.contiguous(), b_hi.contiguous()
    lo_a, lo_b = a_hi if a_lo is None else a_lo, b_hi if b_lo is None else b_lo
    block, padded, has_bias = k // blocks if blocks > 1 else 0, triton.next_power_of_2(blocks), bias is not None
    tiles = triton.cdiv(m, bm) * triton.cdiv(n, bn)
    added = out if bias is None else bias.contiguous()
    single = a_lo is None
    planes = (a_hi, b_hi) if single else (a_hi, lo_a, b_hi, lo_b)
    left_alone = batch > 1 or (single and blocks > 1)
    if warps == HOPPER and (left_alone or not all(_fetchable(plane) for plane in planes)):
        warps, stages = 8, 3 if single or bn == 128 else 2
    even = shares == 0 and warps == HOPPER
    shares = max(shares, 1)
    kernel: Any
    sums: torch.Tensor | None = None
    options: dict[str, int]
    if warps == HOPPER:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        from passes.kernels import split_gemm_hopper as hopper

        grid: tuple[int, ...] = (
            min(tiles * (triton.cdiv(k, bk) if even else shares), multiprocessors(out.device)),
        )
        pointers: tuple[Any, ...]
        if single:
            kernel, boxes = hopper.scaled_gemm_hopper, [[bm, bk], [bn, bk]]
            pointers = (a_scale, b_scale, added, out, m, n, k, shares)
            constants: tuple[Any, ...] = (bm, bn, bk, stages, has_bias, 8)
        else:
            kernel, boxes = hopper.split_gemm_hopper, [[bm, bk], [bm, bk], [bn, bk], [bn, bk]]
            pointers = (a_hi, lo_a, a_scale, b_hi, lo_b, b_scale, added, out)
            if even:
                counts = out.new_zeros(needed_counts(m, n, tile), dtype=torch.int32) if counts is None else counts
                sums = out.new_empty(grid[0] * bm * bn)
                pointers += (sums, counts)
            else:
                pointers += (out, out)
            pointers += (m, n, k, shares, blocks, a_hi.stride(0), b_hi.stride(0))
            constants = (bm, bn, bk, block, padded, stages, has_bias, 8, even)
        descriptors = [
            TensorDescriptor.from_tensor(plane, box, _swizzle(*box))
            for plane, box in zip(planes, boxes, strict=True)
        ]
        parameters = (*descriptors, *pointers, *constants)
        options = {"num_warps": 4, "maxnreg": 168}
    else:
        kernel, grid = kernels.split_gemm, (tiles, shares, batch)
        parameters = (
            a_hi, lo_a, a_scale, b_hi, lo_b, b_scale, added, out, m, n, k, shares, blocks,
            a_hi.stride(0) if batch > 1 else 0, b_hi.stride(0) if batch > 1 else 0,
            a_hi.stride(-2), a_hi.stride(-1), b_hi.stride(-2), b_hi.stride(-1),
            bm, bn, bk, block, padded, 1 if single else 3, k % bk == 0, has_bias, 8,
        )  # fmt: skip
        options = {"num_warps": warps, "num_stages": stages}
    operands = (*a, *b, bias, out, sums, counts if even else None)
    return _Call(kernel, grid, parameters, options, operands, 0 if sums is None else sums.numel())


@functools.cache
def _swizzle(rows: int, columns: int) -> Any:
    """How a tile of fp16 lies in shared memory for the tensor cores; a launch asks for four."""
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.float16)


def _fetchable(plane: torch.Tensor) -> bool:
    """Whether the Tensor Memory Accelerator can read it: contiguous along K, and 16-byte steps between rows."""
    return plane.dim() == 2 and plane.stride(1) == 1 and plane.stride(0) % 8 == 0 and plane.data_ptr() % 16 == 0


@functools.cache
def has_hopper(device: torch.device) -> bool:
    """Whether `split_gemm_hopper` runs: a chip of compute capability 9, and a Triton with Gluon for it."""
    if torch.cuda.get_device_capability(device)[0] != 9:
        return False
    try:
        from passes.kernels import split_gemm_hopper  # noqa: F401
    except Exception:  # Gluon is experimental: its names move from one Triton to the next
        return False
    return True


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def needed_counts(m: int, n: int, tile: Tile) -> int:
    """How many int32 the kernel counts in: none where its tiles are not shared between programs."""
    return 2 * math.ceil(m / tile[0]) * math.ceil(n / tile[1]) if tile[3] == 0 else 0
