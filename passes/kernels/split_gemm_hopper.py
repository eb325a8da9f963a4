"""The split product for Hopper: what `split_gemm` computes, in warp-specialised Gluon.

One warp fetches tiles through the Tensor Memory Accelerator into a ring in shared memory; two warp groups, 64 rows of
the tile each, multiply. Each issues the three products of a step at once and waits once, and while one adds its `main`
to its registers the other keeps the tensor cores at work: in plain Triton both wait for each other at every product.
The programs are persistent, so that the next tile's first operands arrive while this one is written.

Where the tiles are few and do not fill the chip (72 tiles on 132 multiprocessors take as long as 132 would), EVEN gives
every program the same number of steps along K, wherever in a tile they begin and end. Whoever has a tile's last step
finishes it: the others leave their sums in memory, and it adds them in the order of K. This is the "Stream-K" of Osama,
Merrill, Cecka, Garland and Owens (2023). A program begins with the sums that it leaves to another one, and only ever
waits for programs that were launched before it, so that none can wait for one that has no place to run yet.

`scaled_gemm_hopper` is the same for a single product: there a group may be four steps ahead of the other, so that one
multiplies while the other writes. That matters where K is small: of 512 elements along K, a tile of fp32 results takes
half as long to write as to compute.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LOW = gl.constexpr(2.0**-11)


@gluon.jit
def _pieces(M, N, K, shares, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, EVEN: gl.constexpr):
    """(first, end, distance) of the pieces of work of this program."""
    tiles = gl.cdiv(M, BM) * gl.cdiv(N, BN)
    first = gl.program_id(0)
    end = tiles * shares
    distance = gl.num_programs(0)
    if EVEN:
        steps = gl.cdiv(K, BK)
        begin = gl.program_id(0) * (tiles * steps) // gl.num_programs(0)
        last = ((gl.program_id(0) + 1) * (tiles * steps) // gl.num_programs(0) - 1) // steps
        # Counted from the last tile, which another program may finish: it is waited for, and so comes first.
        first = gl.program_id(0) * 0
        end = last - begin // steps + 1
        distance = first + 1
    return first, end, distance


@gluon.jit
def _work(
    work, M, N, K, shares, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, EVEN: gl.constexpr
):  # fmt: skip
    """(row, column, share, first step, last step, tile) of a piece of work."""
    tiles_m = gl.cdiv(M, BM)
    tiles_n = gl.cdiv(N, BN)
    steps = gl.cdiv(K, BK)
    if EVEN:
        total = tiles_m * tiles_n * steps
        mine = gl.program_id(0) * total // gl.num_programs(0)
        others = (gl.program_id(0) + 1) * total // gl.num_programs(0)
        tile = (others - 1) // steps - work
        split = work * 0
        begin = gl.maximum(mine - tile * steps, 0)
        end = gl.minimum(others - tile * steps, steps)
    else:
        split = work // (tiles_m * tiles_n)
        tile = work % (tiles_m * tiles_n)
        per_split = gl.cdiv(steps, shares)
        begin = split * per_split
        end = gl.minimum(begin + per_split, steps)
    per_group = GROUP * tiles_n
    first = (tile // per_group) * GROUP
    rows = gl.minimum(tiles_m - first, GROUP)
    return first + (tile % per_group) % rows, (tile % per_group) // rows, split, begin, end, tile


@gluon.jit
def _fetch(
    descs, buffers, ready, empty, M, N, K, shares, PLANES: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    EVEN: gl.constexpr,
):  # fmt: skip
    """Fill the stages with the operands' planes: (a, b), or (a's high one, b's, a's low one, b's)."""
    filled = 0
    first, last, distance = _pieces(M, N, K, shares, BM, BN, BK, EVEN)
    for work in range(first, last, distance):
        tile_m, tile_n, _, begin, end, _ = _work(work, M, N, K, shares, BM, BN, BK, GROUP, EVEN)
        for step in range(begin, end):
            stage = filled % STAGES
            mbarrier.wait(empty.index(stage), (filled // STAGES & 1) ^ 1)
            bar = ready.index(stage)
            mbarrier.expect(bar, PLANES * (BM + BN) * BK * 2)
            for plane in gl.static_range(PLANES):
                a_s, b_s = buffers[2 * plane], buffers[2 * plane + 1]
                tma.async_copy_global_to_shared(descs[2 * plane], [tile_m * BM, step * BK], bar, a_s.index(stage))
                tma.async_copy_global_to_shared(descs[2 * plane + 1], [tile_n * BN, step * BK], bar, b_s.index(stage))
            filled += 1


@gluon.jit
def _multiply(
    buffers, ready, empty, pointers, M, N, K, shares, blocks, stride_am, stride_bn,
    HALF: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, BLOCK: gl.constexpr,
    BLOCKS: gl.constexpr, STAGES: gl.constexpr, HAS_BIAS: gl.constexpr, GROUP: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    ah_s, bh_s, al_s, bl_s = buffers
    a_scale = pointers[2]
    sums, counts = pointers[8], pointers[9]
    rows: gl.constexpr = BM // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    used = 0
    first, last, distance = _pieces(M, N, K, shares, BM, BN, BK, EVEN)
    for work in range(first, last, distance):
        tile_m, tile_n, split, begin, end, tile = _work(work, M, N, K, shares, BM, BN, BK, GROUP, EVEN)
        m0 = tile_m * BM + HALF * rows
        n0 = tile_n * BN
        zeros = gl.zeros((rows, BN), gl.float32, layout)
        total = zeros
        corr = zeros
        m = gl.minimum(m0 + gl.arange(0, rows, gl.SliceLayout(1, layout)), M - 1)
        for step in range(begin, end):
            stage = used % STAGES
            if BLOCK != 0:
                scale = gl.load(a_scale + m * blocks + step * BK // BLOCK)
            mbarrier.wait(ready.index(stage), used // STAGES & 1)
            ah = ah_s.index(stage).slice(HALF * rows, rows)
            bh = bh_s.index(stage).permute((1, 0))
            al = al_s.index(stage).slice(HALF * rows, rows)
            bl = bl_s.index(stage).permute((1, 0))
            main = warpgroup_mma(ah, bh, zeros, use_acc=False, is_async=True)
            low = warpgroup_mma(al, bh, corr, use_acc=BLOCK == 0, is_async=True)
            low = warpgroup_mma(ah, bl, low, is_async=True)
            main, corr = warpgroup_mma_wait(0, deps=(main, low))
            mbarrier.arrive(empty.index(stage))
            if BLOCK != 0:
                total += (main + corr * LOW) * (1.0 / gl.where(scale == 0, 1.0, scale))[:, None]
            else:
                total += main
            used += 1
        if BLOCK == 0:
            total += corr * LOW
        if EVEN:
            steps = gl.cdiv(K, BK)
            arrived = counts + tile * 2 + HALF
            if end < steps:
                _leave(total, sums, arrived, gl.program_id(0) * 2 + HALF, rows, BN, layout)
            else:
                if begin > 0:
                    total = _gather(total, sums, arrived, HALF, tile, M, N, steps, BM, BN, rows, layout)
                _finish(
                    total, pointers, m0, n0, split, M, N, K, 0, K, blocks, stride_am, stride_bn, rows, BN, BLOCK,
                    BLOCKS, HAS_BIAS, layout,
                )  # fmt: skip
        else:
            _finish(
                total, pointers, m0, n0, split, M, N, K, gl.minimum(begin * BK, K), gl.minimum(end * BK, K), blocks,
                stride_am, stride_bn, rows, BN, BLOCK, BLOCKS, HAS_BIAS, layout,
            )  # fmt: skip


@gluon.jit
def _place(row, column, ROWS: gl.constexpr):
    """Where sums lie in memory: as the threads of a warp hold them, eight rows of eight columns beside each other."""
    return (column // 8) * (ROWS * 8) + row * 8 + column % 8


@gluon.jit
def _leave(total, sums, arrived, slot, ROWS: gl.constexpr, BN: gl.constexpr, layout: gl.constexpr):
    """Leave the sums of a part of a tile to the program that finishes it."""
    row, column = gl.arange(0, ROWS, gl.SliceLayout(1, layout)), gl.arange(0, BN, gl.SliceLayout(0, layout))
    at = _place(row[:, None], column[None, :], ROWS)
    gl.store(sums + slot.to(gl.int64) * (ROWS * BN) + at, total)
    # All threads' stores come before one thread's release.
    gl.thread_barrier()
    gl.atomic_add(arrived, 1, sem="release", scope="gpu")


@gluon.jit
def _gather(
    total, sums, arrived, HALF: gl.constexpr, tile, M, N, steps, BM: gl.constexpr, BN: gl.constexpr,
    ROWS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """`total` and what the programs before this one have left of its tile, in the order of K."""
    programs = gl.num_programs(0)
    all_steps = gl.cdiv(M, BM) * gl.cdiv(N, BN) * steps
    # The program whose steps begin at or before the tile's first one; rounding may name the one before it.
    first = tile * steps * programs // all_steps
    first += ((first + 1) * all_steps // programs <= tile * steps).to(gl.int32)
    while gl.atomic_add(arrived, 0, sem="acquire", scope="gpu") < gl.program_id(0) - first:
        pass
    gl.thread_barrier()
    gl.store(arrived, 0)  # as it was, for the next launch
    row, column = gl.arange(0, ROWS, gl.SliceLayout(1, layout)), gl.arange(0, BN, gl.SliceLayout(0, layout))
    at = _place(row[:, None], column[None, :], ROWS)
    before = gl.zeros((ROWS, BN), gl.float32, layout)
    for program in range(first, gl.program_id(0)):
        # Past the first-level cache, which does not see what other multiprocessors write.
        before += gl.load(sums + (program * 2 + HALF).to(gl.int64) * (ROWS * BN) + at, cache_modifier=".cg")
    return before + total


@gluon.jit
def _finish(
    total, pointers, m0, n0, split, M, N, K, begin, end, blocks, stride_am, stride_bn,
    BM: gl.constexpr, BN: gl.constexpr, BLOCK: gl.constexpr, BLOCKS: gl.constexpr,
    HAS_BIAS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Scale the sums and write the tile; where a row or column holds raw bits, from the planes in IEEE fp32."""
    a_hi, a_lo, a_scale, b_hi, b_lo, b_scale, bias, out, _, _ = pointers
    m = m0 + gl.arange(0, BM, gl.SliceLayout(1, layout))
    n = n0 + gl.arange(0, BN, gl.SliceLayout(0, layout))
    if BLOCK == 0:
        lowest = gl.load(a_scale + m, mask=m < M, other=1.0)
    else:
        grid: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [4, 1], [1, 0])
        row = m0 + gl.arange(0, BM, gl.SliceLayout(1, grid))
        block = gl.arange(0, BLOCKS, gl.SliceLayout(0, grid))
        mask = (row < M)[:, None] & (block < blocks)[None, :]
        lowest = gl.convert_layout(
            gl.min(gl.load(a_scale + row[:, None] * blocks + block[None, :], mask=mask, other=1.0), 1),
            gl.SliceLayout(1, layout),
        )
    b_scales = gl.load(b_scale + n, mask=n < N, other=1.0)
    raw = gl.max((lowest == 0).to(gl.int32), 0) + gl.max((b_scales == 0).to(gl.int32), 0)
    if raw == 0:
        # One after the other: the product of the two scales may leave fp32's range where the result does not.
        if BLOCK == 0:
            total *= (1.0 / lowest)[:, None]
        total *= (1.0 / b_scales)[None, :]
        if HAS_BIAS and split == 0:
            total += gl.load(bias + n, mask=n < N, other=0.0)[None, :]
        where = split.to(gl.int64) * M * N + m[:, None].to(gl.int64) * N + n[None, :]
        gl.store(out + where, total, mask=(m < M)[:, None] & (n < N)[None, :])
    else:
        _exact(
            a_hi, a_lo, a_scale, b_hi, b_lo, b_scale, bias, out, m0, n0, split, M, N, begin, end, blocks,
            stride_am, stride_bn, BM, BN, BLOCK, HAS_BIAS,
        )  # fmt: skip


@gluon.jit
def _exact(
    a_hi, a_lo, a_scale, b_hi, b_lo, b_scale, bias, out, m0, n0, split, M, N, begin, end, blocks, stride_am, stride_bn,
    BM: gl.constexpr, BN: gl.constexpr, BLOCK: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([8, BN // 16], [2, 16], [4, 1], [1, 0])
    m = m0 + gl.arange(0, BM, gl.SliceLayout(1, layout))
    n = n0 + gl.arange(0, BN, gl.SliceLayout(0, layout))
    at_a = gl.minimum(m, M - 1).to(gl.int64) * stride_am
    at_b = gl.minimum(n, N - 1).to(gl.int64) * stride_bn
    b_scales = gl.load(b_scale + gl.minimum(n, N - 1))
    out += split.to(gl.int64) * M * N
    # In sums of 128 products, added up where the result goes: one long sum in fp32 would lose more than cuBLAS, which
    # shares K out, too, and a second set of registers for it is not to be had.
    for first in range(begin, gl.maximum(end, begin + 1), 128):  # a share without a step writes zeros
        part = gl.zeros((BM, BN), gl.float32, layout)
        for at in range(first, gl.minimum(first + 128, end)):
            scale_at = at // BLOCK if BLOCK != 0 else 0
            a_scales = gl.load(a_scale + gl.minimum(m, M - 1) * blocks + scale_at)
            a = _decoded(gl.load(a_hi + at_a + at), gl.load(a_lo + at_a + at), a_scales)
            b = _decoded(gl.load(b_hi + at_b + at), gl.load(b_lo + at_b + at), b_scales)
            part = gl.fma(a[:, None].broadcast_to(BM, BN), b[None, :].broadcast_to(BM, BN), part)
        if HAS_BIAS and split == 0 and first + 128 >= end:
            part += gl.load(bias + n, mask=n < N, other=0.0)[None, :]
        where = m[:, None].to(gl.int64) * N + n[None, :]
        mask = (m < M)[:, None] & (n < N)[None, :]
        if first != begin:
            part += gl.load(out + where, mask=mask, other=0.0)
        gl.store(out + where, part, mask=mask)


@gluon.jit
def _decoded(hi, lo, scale):
    raw = (hi.to(gl.int16, bitcast=True).to(gl.int32) << 16) | (lo.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF)
    held = hi.to(gl.float32) + lo.to(gl.float32) * LOW
    return gl.where(scale == 0, raw.to(gl.float32, bitcast=True), held / gl.where(scale == 0, 1.0, scale))


@gluon.jit(do_not_specialize=["shares"])
def split_gemm_hopper(
    ah_desc, al_desc, bh_desc, bl_desc, a_hi, a_lo, a_scale, b_hi, b_lo, b_scale, bias, out, sums, counts,
    M, N, K, shares, blocks, stride_am, stride_bn,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, BLOCK: gl.constexpr, BLOCKS: gl.constexpr,
    STAGES: gl.constexpr, HAS_BIAS: gl.constexpr, GROUP: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """out[s, M, N] = the s-th share along K of (a / a_scale) @ (b / b_scale)^T + bias, as `split_gemm` has it.

    a [M, K] and b [N, K] are contiguous along K. Grid: (programs,), one a multiprocessor. num_warps 4, maxnreg 168.
    With EVEN there is one share, and no more programs than steps; sums is memory for [programs, BM, BN] fp32, and
    counts [tiles, 2] int32 that are 0, before and after. Without, neither is touched.
    """
    ah_s = gl.allocate_shared_memory(gl.float16, [STAGES, BM, BK], ah_desc.layout)
    bh_s = gl.allocate_shared_memory(gl.float16, [STAGES, BN, BK], bh_desc.layout)
    al_s = gl.allocate_shared_memory(gl.float16, [STAGES, BM, BK], ah_desc.layout)
    bl_s = gl.allocate_shared_memory(gl.float16, [STAGES, BN, BK], bh_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    buffers = (ah_s, bh_s, al_s, bl_s)
    descs = (ah_desc, bh_desc, al_desc, bl_desc)
    pointers = (a_hi, a_lo, a_scale, b_hi, b_lo, b_scale, bias, out, sums, counts)
    gl.warp_specialize(
        [
            (
                _multiply,
                (buffers, ready, empty, pointers, M, N, K, shares, blocks, stride_am, stride_bn,
                 gl.constexpr(0), BM, BN, BK, BLOCK, BLOCKS, STAGES, HAS_BIAS, GROUP, EVEN),
            ),
            (
                _multiply,
                (buffers, ready, empty, pointers, M, N, K, shares, blocks, stride_am, stride_bn,
                 gl.constexpr(1), BM, BN, BK, BLOCK, BLOCKS, STAGES, HAS_BIAS, GROUP, EVEN),
            ),
            (
                _fetch,
                (descs, buffers, ready, empty, M, N, K, shares, gl.constexpr(2), BM, BN, BK, STAGES, GROUP, EVEN),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def _multiply_one(
    buffers, ready, empty, pointers, M, N, K, shares,
    HALF: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    a_s, b_s = buffers
    a_scale, b_scale, bias, out = pointers
    rows: gl.constexpr = BM // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    used = 0
    first, last, distance = _pieces(M, N, K, shares, BM, BN, BK, False)
    for work in range(first, last, distance):
        tile_m, tile_n, split, begin, end, _ = _work(work, M, N, K, shares, BM, BN, BK, GROUP, False)
        total = gl.zeros((rows, BN), gl.float32, layout)
        for _ in range(begin, end):
            stage = used % STAGES
            mbarrier.wait(ready.index(stage), used // STAGES & 1)
            a = a_s.index(stage).slice(HALF * rows, rows)
            b = b_s.index(stage).permute((1, 0))
            total = warpgroup_mma(a, b, total, is_async=True)
            total = warpgroup_mma_wait(0, deps=(total,))
            mbarrier.arrive(empty.index(stage))
            used += 1
        m = tile_m * BM + HALF * rows + gl.arange(0, rows, gl.SliceLayout(1, layout))
        n = tile_n * BN + gl.arange(0, BN, gl.SliceLayout(0, layout))
        # One after the other: the product of the two scales may leave fp32's range where the result does not.
        total *= (1.0 / gl.load(a_scale + m, mask=m < M, other=1.0))[:, None]
        total *= (1.0 / gl.load(b_scale + n, mask=n < N, other=1.0))[None, :]
        if HAS_BIAS and split == 0:
            total += gl.load(bias + n, mask=n < N, other=0.0)[None, :]
        where = split.to(gl.int64) * M * N + m[:, None].to(gl.int64) * N + n[None, :]
        gl.store(out + where, total, mask=(m < M)[:, None] & (n < N)[None, :])


@gluon.jit(do_not_specialize=["shares"])
def scaled_gemm_hopper(
    a_desc, b_desc, a_scale, b_scale, bias, out, M, N, K, shares,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, HAS_BIAS: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """out[s, M, N] = the s-th share along K of (a / a_scale) @ (b / b_scale)^T + bias, summed by the tensor core.

    a [M, K] and b [N, K] are contiguous along K, scales [M] and [N]. Grid: (programs,), one a multiprocessor.
    """
    a_s = gl.allocate_shared_memory(gl.float16, [STAGES, BM, BK], a_desc.layout)
    b_s = gl.allocate_shared_memory(gl.float16, [STAGES, BN, BK], b_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    buffers = (a_s, b_s)
    descs = (a_desc, b_desc)
    pointers = (a_scale, b_scale, bias, out)
    gl.warp_specialize(
        [
            (
                _multiply_one,
                (buffers, ready, empty, pointers, M, N, K, shares,
                 gl.constexpr(0), BM, BN, BK, STAGES, HAS_BIAS, GROUP),
            ),
            (
                _multiply_one,
                (buffers, ready, empty, pointers, M, N, K, shares,
                 gl.constexpr(1), BM, BN, BK, STAGES, HAS_BIAS, GROUP),
            ),
            (
                _fetch,
                (descs, buffers, ready, empty, M, N, K, shares, gl.constexpr(1), BM, BN, BK, STAGES, GROUP,
                 gl.constexpr(False)),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
