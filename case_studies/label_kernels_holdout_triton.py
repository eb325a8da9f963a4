"""Triton kernels of the holdout set, launched without Inductor. Importing this needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot_product(x, y, out, rounds, BLOCK: tl.constexpr):
    """The parts of a dot product, a part a program; tiles of all programs alternate."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for r in range(rounds):
        at = (program + r * programs) * BLOCK + lane
        total += tl.load(x + at).to(tl.float32) * tl.load(y + at).to(tl.float32)
    tl.store(out + program, tl.sum(total, axis=0))


@triton.jit
def table_maximum(x, y, tiles, rounds, BLOCK: tl.constexpr):
    """The maxima of runs of tiles. Programs begin at different tiles, so that they do not meet in L1."""
    program = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), -2147483648, dtype=tl.int32)
    for r in range(rounds):
        tile = (program * 37 + r) % tiles
        best = tl.maximum(best, tl.load(x + tile * BLOCK + lane))
    tl.store(y + program * BLOCK + lane, best)


@triton.jit
def attractions(bodies, sources, y, count, n, BLOCK: tl.constexpr):
    """What ``count`` masses do to each body: 3 subtractions, 3 FMAs, a root, 3 products and 3 FMAs a pair."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    px, py, pz = tl.load(bodies + at), tl.load(bodies + n + at), tl.load(bodies + 2 * n + at)
    fx = tl.zeros((BLOCK,), dtype=tl.float32)
    fy = tl.zeros((BLOCK,), dtype=tl.float32)
    fz = tl.zeros((BLOCK,), dtype=tl.float32)
    for j in range(count):
        dx = tl.load(sources + j) - px
        dy = tl.load(sources + count + j) - py
        dz = tl.load(sources + 2 * count + j) - pz
        inverse = tl.rsqrt(dx * dx + dy * dy + dz * dz + 0.01)
        cube = inverse * inverse * inverse
        fx += dx * cube
        fy += dy * cube
        fz += dz * cube
    tl.store(y + at, fx)
    tl.store(y + n + at, fy)
    tl.store(y + 2 * n + at, fz)


@triton.jit
def gated_recurrence(x, y, steps, BLOCK: tl.constexpr):
    """A recurrence whose next input is found by the state: every load waits for the step before."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    lane = tl.arange(0, BLOCK)
    state = tl.zeros((BLOCK,), dtype=tl.float32)
    for t in range(steps):
        moved = (state > 4.0).to(tl.int32)  # never, but the compiler cannot know
        state = tl.exp2(-state * state) + tl.load(x + (t * programs + program) * BLOCK + lane + moved)
    tl.store(y + program * BLOCK + lane, state)


@triton.jit
def walking_tile(following, u, v, y, steps, M: tl.constexpr, N: tl.constexpr):
    """Sums M x N outer products in the registers of one warp; a chain through memory says of which rows."""
    program = tl.program_id(0)
    rows, columns = tl.arange(0, M), tl.arange(0, N)
    total = tl.zeros((M, N), dtype=tl.float32)
    at = program * 4001
    for _ in range(steps):
        at = tl.load(following + at)
        a = tl.load(u + (at & 255) * M + rows)
        b = tl.load(v + (at & 255) * N + columns)
        total += a[:, None] * b[None, :]
    tl.store(y + program * M * N + rows[:, None] * N + columns[None, :], total)


@triton.jit
def product(a, b, c, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """A matrix product without a split of K: a program sums a tile of the result over all of it."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        left = tl.load(a + rows[:, None] * K + (k + inner)[None, :])
        right = tl.load(b + (k + inner)[:, None] * N + columns[None, :])
        total = tl.dot(left, right, total)
    tl.store(c + rows[:, None] * N + columns[None, :], total.to(tl.float16))


@triton.jit
def whole_row_softmax(x, y, BLOCK: tl.constexpr):
    """Softmax of a row that is kept whole between its passes, a program a row."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at)
    e = tl.exp(v - tl.max(v, axis=0))
    tl.store(y + at, e / tl.sum(e, axis=0))


@triton.jit
def row_copies(x, order, y, WIDTH: tl.constexpr):
    """Copies rows in another order, a program a row."""
    row = tl.program_id(0)
    lane = tl.arange(0, WIDTH)
    tl.store(y + row * WIDTH + lane, tl.load(x + tl.load(order + row) * WIDTH + lane))
