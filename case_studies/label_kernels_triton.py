"""Triton kernels, each written so that one thing limits it, launched without Inductor. Importing this needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_copy(x, y, n, BLOCK: tl.constexpr):
    """Copies n values, a tile a program."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < n)


@triton.jit
def cached_sum(x, y, tiles, rounds, BLOCK: tl.constexpr):
    """Sums tiles that L2 holds, round and round, past L1 (.cg)."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for r in range(rounds):
        tile = (program + r * programs) % tiles
        total += tl.load(x + tile * BLOCK + lane, cache_modifier=".cg")
    tl.store(y + program * BLOCK + lane, total)


@triton.jit
def exponentials(x, y, rounds, BLOCK: tl.constexpr):
    """A chain of exp2 for each value: the special-function units have all the work."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at)
    for _ in range(rounds):
        v = tl.exp2(-v)
    tl.store(y + at, v)


@triton.jit
def gather_chain(following, y, steps, BLOCK: tl.constexpr):
    """Each lane follows a chain of indices through memory."""
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = lane * 4001
    for _ in range(steps):
        at = tl.load(following + at)
    tl.store(y + lane, at)


@triton.jit
def row_norms(x, y, width, BLOCK: tl.constexpr):
    """The sum of squares of a row, a program a row."""
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for begin in range(0, width, BLOCK):
        v = tl.load(x + row * width + begin + lane)
        total += v * v
    tl.store(y + row, tl.sum(total, axis=0))


@triton.jit
def outer_products(u, v, y, rounds, M: tl.constexpr, N: tl.constexpr):
    """Sums M x N outer products in registers; with one warp a program, M N / 32 of them a thread."""
    program = tl.program_id(0)
    rows, columns = tl.arange(0, M), tl.arange(0, N)
    total = tl.zeros((M, N), dtype=tl.float32)
    for r in range(rounds):
        a = tl.load(u + r * M + rows)
        b = tl.load(v + r * N + columns)
        total += a[:, None] * b[None, :]
    tl.store(y + program * M * N + rows[:, None] * N + columns[None, :], total)
