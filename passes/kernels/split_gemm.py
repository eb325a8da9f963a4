"""The Triton kernel behind `fxopt::split_gemm`: an fp32-accurate product on 16-bit tensor cores.

Operands come as two fp16 planes and a power-of-two scale a row (`passes.split_products` says how they are made).
Per block of BK along K, three tensor-core products: `main = hi @ hi` starts from zero, `corr += lo @ hi + hi @ lo` runs
on, and `main` is added to an accumulator in fp32 registers. A tensor core's own accumulator rounds towards zero, so its
error grows with K rather than with sqrt(K) (Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores
while surpassing the FP32 theoretical peak performance", 2022); over BK elements that does not show, over K it would.
What a row's planes cannot hold is kept as raw fp32 bits (scale 0); a tile that meets such a row is computed anew in
IEEE fp32, so that NaN, Inf, denormals and mixed magnitudes come out as fp32 gives them. The device decides by tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: weight of the low plane: lo holds the remainder times 2^11, so that it is a normal fp16 number wherever hi is one
LOW = tl.constexpr(2.0**-11)


@triton.jit
def decoded(hi, lo, scale):
    """fp32 values of two planes; `scale` broadcasts against them, 0 where the planes hold raw bits."""
    raw = (hi.to(tl.int16, bitcast=True).to(tl.int32) << 16) | (lo.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF)
    held = hi.to(tl.float32) + lo.to(tl.float32) * LOW
    return tl.where(scale == 0, raw.to(tl.float32, bitcast=True), held / tl.where(scale == 0, 1.0, scale))


@triton.jit
def tile_of(tile, M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """(row, column) of a tile; those that run together share their operands in L2, in groups of GROUP rows."""
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    per_group = GROUP * tiles_n
    first = (tile // per_group) * GROUP
    rows = min(tiles_m - first, GROUP)
    return first + (tile % per_group) % rows, (tile % per_group) // rows


@triton.jit
def summed(
    a_hi, a_lo, a_scale, b_hi, b_lo, tile_m, tile_n, begin, end, M, N, K, blocks,
    stride_am, stride_ak, stride_bn, stride_bk,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr,
    TERMS: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """The tile's sum over the steps from `begin` to `end` of BK elements each, times the scales that are left."""
    m = tl.minimum(tile_m * BM + tl.arange(0, BM), M - 1)  # rows past the end are the last one, and never written
    n = tl.minimum(tile_n * BN + tl.arange(0, BN), N - 1)
    k = tl.arange(0, BK)
    offset_a = m[:, None].to(tl.int64) * stride_am + (k[None, :] + begin * BK) * stride_ak
    offset_b = n[None, :].to(tl.int64) * stride_bn + (k[:, None] + begin * BK) * stride_bk
    ah_at = a_hi + offset_a
    al_at = a_lo + offset_a
    bh_at = b_hi + offset_b
    bl_at = b_lo + offset_b
    scale_at = a_scale + m * blocks
    total = tl.zeros((BM, BN), dtype=tl.float32)
    corr = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(begin, end):
        if BLOCK != 0:
            scale = tl.load(scale_at + step * BK // BLOCK)
        if EVEN_K:
            ah = tl.load(ah_at)
            bh = tl.load(bh_at)
            if TERMS == 3:
                al = tl.load(al_at)
                bl = tl.load(bl_at)
        else:
            left = K - step * BK
            ah = tl.load(ah_at, mask=k[None, :] < left, other=0.0)
            bh = tl.load(bh_at, mask=k[:, None] < left, other=0.0)
            if TERMS == 3:
                al = tl.load(al_at, mask=k[None, :] < left, other=0.0)
                bl = tl.load(bl_at, mask=k[:, None] < left, other=0.0)
        if BLOCK != 0:
            main = tl.dot(ah, bh, max_num_imprecise_acc=BK)
            if TERMS == 3:
                main += tl.dot(ah, bl, tl.dot(al, bh)) * LOW
            total += main * (1.0 / tl.where(scale == 0, 1.0, scale))[:, None]
        elif TERMS == 3:
            # A non-zero max_num_imprecise_acc keeps Triton from folding the sum into the tensor core's accumulator.
            main = tl.dot(ah, bh, max_num_imprecise_acc=BK)
            corr = tl.dot(al, bh, corr)
            corr = tl.dot(ah, bl, corr)
            total += main
        else:
            total = tl.dot(ah, bh, total)
        ah_at += BK * stride_ak
        bh_at += BK * stride_bk
        if TERMS == 3:
            al_at += BK * stride_ak
            bl_at += BK * stride_bk
    if TERMS == 3:
        total += corr * LOW
    return total


@triton.jit
def finish(
    total, a_hi, a_lo, a_scale, b_hi, b_lo, b_scale, bias, out, tile_m, tile_n, split, M, N, begin, end, blocks,
    stride_am, stride_ak, stride_bn, stride_bk,
    BM: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, TERMS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Scale the sums and write the tile; where a row or column holds raw bits, from the planes in IEEE fp32.

    begin, end: the elements along K that are summed. With a scale a block, `total` is free of the left scales.
    """
    m = tile_m * BM + tl.arange(0, BM)
    n = tile_n * BN + tl.arange(0, BN)
    if BLOCK == 0:
        lowest = tl.load(a_scale + m, mask=m < M, other=1.0)
    else:
        block = tl.arange(0, BLOCKS)
        mask = (m < M)[:, None] & (block < blocks)[None, :]
        lowest = tl.min(tl.load(a_scale + m[:, None] * blocks + block[None, :], mask=mask, other=1.0), 1)
    b_scales = tl.load(b_scale + n, mask=n < N, other=1.0)
    raw = 0
    if TERMS == 3:
        raw = tl.max((lowest == 0).to(tl.int32), 0) + tl.max((b_scales == 0).to(tl.int32), 0)
    if raw == 0:
        # One after the other: the product of the two scales may leave fp32's range where the result does not.
        if BLOCK == 0:
            total *= (1.0 / lowest)[:, None]
        total *= (1.0 / b_scales)[None, :]
        write(total, bias, out, m, n, M, N, split, HAS_BIAS)
    else:
        exact = tl.zeros((BM, BN), dtype=tl.float32)
        for at in range(begin, end, 16):
            k = at + tl.arange(0, 16)
            a_scales = lowest
            if BLOCK != 0:
                a_scales = tl.load(a_scale + m * blocks + at // BLOCK, mask=m < M, other=1.0)
            offset_a = tl.minimum(m, M - 1)[:, None].to(tl.int64) * stride_am + k[None, :] * stride_ak
            offset_b = tl.minimum(n, N - 1)[None, :].to(tl.int64) * stride_bn + k[:, None] * stride_bk
            mask_a = (m < M)[:, None] & (k < end)[None, :]
            mask_b = (n < N)[None, :] & (k < end)[:, None]
            a = decoded(
                tl.load(a_hi + offset_a, mask=mask_a, other=0.0),
                tl.load(a_lo + offset_a, mask=mask_a, other=0.0),
                a_scales[:, None],
            )
            b = decoded(
                tl.load(b_hi + offset_b, mask=mask_b, other=0.0),
                tl.load(b_lo + offset_b, mask=mask_b, other=0.0),
                b_scales[None, :],
            )
            # Each step's sum by itself: one long sum in fp32 would lose more than cuBLAS, which shares K out, too.
            exact += tl.dot(a, b, input_precision="ieee", max_num_imprecise_acc=16)
        write(exact, bias, out, m, n, M, N, split, HAS_BIAS)


@triton.jit
def write(total, bias, out, m, n, M, N, split, HAS_BIAS: tl.constexpr):
    if HAS_BIAS and split == 0:
        total += tl.load(bias + n, mask=n < N, other=0.0)[None, :]
    where = m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(out + where, total, mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["shares"])
def split_gemm(
    a_hi, a_lo, a_scale, b_hi, b_lo, b_scale, bias, out,
    M, N, K, shares, blocks, batch_a, batch_b,
    stride_am, stride_ak, stride_bn, stride_bk,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    TERMS: tl.constexpr, EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """out[batch, s, M, N] = the s-th share along K of (a / a_scale) @ (b / b_scale)^T + bias; a is [M, K], b [N, K].

    Grid: (tiles of M x N, shares, batch). batch_a, batch_b: elements between matrices, 0 where all share one.
    a_scale is [batch, M, blocks], one for each BLOCK elements along K (BLOCK a multiple of BK; BLOCKS the power of two
    from `blocks` on), or one a row (BLOCK 0, blocks 1); b_scale is [batch, N]. TERMS 3, or 1 for hi @ hi alone.
    A single product of whole rows leaves the sums to the tensor core.
    """
    split = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    tile_m, tile_n = tile_of(tl.program_id(0), M, N, BM, BN, GROUP)
    a_hi += batch * batch_a
    a_lo += batch * batch_a
    b_hi += batch * batch_b
    b_lo += batch * batch_b
    if batch_a != 0:
        a_scale += batch * M * blocks
    if batch_b != 0:
        b_scale += batch * N
    steps = tl.cdiv(K, BK)
    per_split = tl.cdiv(steps, shares)
    begin = split * per_split
    end = min(begin + per_split, steps)
    total = summed(
        a_hi, a_lo, a_scale, b_hi, b_lo, tile_m, tile_n, begin, end, M, N, K, blocks,
        stride_am, stride_ak, stride_bn, stride_bk, BM, BN, BK, BLOCK, TERMS, EVEN_K,
    )  # fmt: skip
    finish(
        total, a_hi, a_lo, a_scale, b_hi, b_lo, b_scale, bias, out + (batch * shares + split) * M * N,
        tile_m, tile_n, split, M, N, min(begin * BK, K), min(end * BK, K), blocks,
        stride_am, stride_ak, stride_bn, stride_bk, BM, BN, BLOCK, BLOCKS, TERMS, HAS_BIAS,
    )  # fmt: skip
