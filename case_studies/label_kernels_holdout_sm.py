"""Holdout set, second part: what the SMs do, and how a launch fills them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

import case_studies.label_kernels_holdout_cuda  # noqa: F401  (its kernels join those that launcher() knows)
from case_studies.label_kernels import Case, axes, compiled, cycle, floats, indices
from case_studies.label_kernels_cuda import launcher
from fxopt.labels import Axis

Call = Callable[[], Any]
M = 1 << 20
KB = 1024
SMS = 132  # grids are made for this many SMs
HALF = torch.float16


def _out(device: torch.device, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(count, dtype=dtype, device=device)


# --- compute_bound --------------------------------------------------------------------------------------------------


def double_horner(device: torch.device) -> Call:
    x = floats(device, 4096, dtype=torch.float64)
    return launcher("double_horner", SMS * 32, 256, [x, _out(device, SMS * 32 * 256, torch.float64), 384])


def half_chains(device: torch.device) -> Call:
    y = _out(device, SMS * 16 * 512, torch.int32)
    return launcher("half_chains", SMS * 16, 512, [y, 0x39993999, 0x2C002C00, 768])


def mandelbrot(device: torch.device) -> Call:
    def iterate(cr: torch.Tensor, ci: torch.Tensor) -> torch.Tensor:
        zr, zi = cr, ci
        for _ in range(60):
            zr, zi = zr * zr - zi * zi + cr, 2.0 * zr * zi + ci
        return zr * zr + zi * zi

    return compiled(iterate, floats(device, 16 * M), floats(device, 16 * M, seed=1))


def baddbmm(device: torch.device) -> Call:
    return partial(torch.baddbmm, *(floats(device, 24, 2048, 2048, dtype=HALF, seed=k) for k in range(3)))


def attractions(device: torch.device) -> Call:
    from case_studies.label_kernels_holdout_triton import attractions as kernel

    bodies = SMS * 8 * 4 * 1024
    x, sources, y = floats(device, 3, bodies), floats(device, 3, 256, seed=1), _out(device, 3 * bodies)
    return partial(kernel[(bodies // 1024,)], x, sources, y, 256, bodies, BLOCK=1024, num_warps=4)


# --- latency_bound --------------------------------------------------------------------------------------------------


def atomic_chain(device: torch.device) -> Call:
    counters = torch.zeros(SMS * 64 + 1, dtype=torch.int32, device=device)
    return launcher("atomic_chain", SMS, 64, [counters, _out(device, SMS * 64, torch.int32), 800])


def block_sums(device: torch.device) -> Call:
    return launcher("block_sums", SMS, 128, [_out(device, SMS * 128), 1500])


def gated_recurrence(device: torch.device) -> Call:
    from case_studies.label_kernels_holdout_triton import gated_recurrence as kernel

    x = floats(device, 1000 * SMS * 2 * 32 + 1)
    return partial(kernel[(SMS * 2,)], x, _out(device, SMS * 2 * 32), 1000, BLOCK=32, num_warps=1)


def cumsum_columns(device: torch.device) -> Call:
    return partial(torch.cumsum, floats(device, 1024, SMS * 512), 0)


# --- occupancy_limited: whole waves ---------------------------------------------------------------------------------


def _steps(device: torch.device, length: int, step: int) -> torch.Tensor:
    """int32 indices of the element ``step`` further on, round and round."""
    return ((torch.arange(length, device=device) + step) % length).to(torch.int32)


def register_walk(device: torch.device) -> Call:
    y = _out(device, SMS * 4 * 256)
    return launcher("register_walk", SMS * 4, 256, [_steps(device, 2 * M, 100003 * 32), y, 2 * M, 40])


def moments(device: torch.device) -> Call:
    return launcher("moments", SMS * 4, 768, [floats(device, 64 * M), _out(device, SMS * 4 * 768), 64 * M])


def table_walk(device: torch.device) -> Call:
    y = _out(device, SMS * 3 * 3 * 96)
    return launcher("table_walk", SMS * 3 * 3, 96, [y, 4096], shared=72 * KB)


def warp_walk(device: torch.device) -> Call:
    y = _out(device, SMS * 32 * 4 * 32, torch.int32)
    return launcher("warp_walk", SMS * 32 * 4, 32, [_steps(device, 64 * M, 104729 * 32), y, 64 * M, 200])


def walking_tile(device: torch.device) -> Call:
    from case_studies.label_kernels_holdout_triton import walking_tile as kernel

    u, v, y = floats(device, 256, 64), floats(device, 256, 64, seed=1), _out(device, SMS * 12 * 4 * 64 * 64)
    return partial(kernel[(SMS * 12 * 4,)], cycle(device, 64 * M), u, v, y, 200, M=64, N=64, num_warps=1)


# --- wave_starved ---------------------------------------------------------------------------------------------------


def cumsum_rows(device: torch.device) -> Call:
    return partial(torch.cumsum, floats(device, 24, 512 * KB), 1)


def layer_norm_rows(device: torch.device) -> Call:
    return partial(F.layer_norm, floats(device, 40, 256 * KB), (256 * KB,))


def tail_squares(device: torch.device) -> Call:
    grid = SMS + 18
    return launcher("squares", grid, 512, [_out(device, grid * 512, torch.int32), 12345, 8192], shared=120 * KB)


def long_product(device: torch.device) -> Call:
    from case_studies.label_kernels_holdout_triton import product as kernel

    a, b = floats(device, 768, 16384, dtype=HALF), floats(device, 16384, 640, dtype=HALF, seed=1)
    c = _out(device, 768 * 640, HALF)
    return partial(kernel[(6, 5)], a, b, c, 640, 16384, BM=128, BN=128, BK=64, num_warps=8)


def few_elements(device: torch.device) -> Call:
    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(150):
            x = torch.tanh(x * 1.5)
        return x

    return compiled(chain, floats(device, 2048))


# --- register_spill -------------------------------------------------------------------------------------------------


def private_sort(device: torch.device) -> Call:
    x = torch.arange(4096, dtype=torch.int32, device=device)
    return launcher("private_sort", SMS * 4, 128, [x, _out(device, SMS * 4 * 128, torch.int32)])


def private_products(device: torch.device) -> Call:
    return launcher("private_products", SMS * 2, 256, [floats(device, 4096), _out(device, SMS * 2 * 256), 200])


def private_stack(device: torch.device) -> Call:
    return launcher("private_stack", SMS * 4, 128, [_out(device, SMS * 4 * 128), 4096])


def whole_row_softmax(device: torch.device) -> Call:
    from case_studies.label_kernels_holdout_triton import whole_row_softmax as kernel

    x = floats(device, SMS * 4, 16 * KB)
    return partial(kernel[(SMS * 4,)], x, torch.empty_like(x), BLOCK=16 * KB, num_warps=1)


# --- divergent ------------------------------------------------------------------------------------------------------


def escape_time(device: torch.device) -> Call:
    order = torch.randperm(528 * 512, generator=torch.Generator(device).manual_seed(0), device=device).to(torch.int32)
    y = _out(device, 528 * 512, torch.int32)
    return launcher("escape_time", SMS * 8, 256, [order, y, 528, 512, 1000])


def interpreter(device: torch.device) -> Call:
    return launcher("interpreter", SMS * 8, 256, [_out(device, SMS * 8 * 256), 256])


def filtered(device: torch.device) -> Call:
    x = floats(device, 16 * M)
    return launcher("filtered", SMS * 8, 256, [x, torch.zeros_like(x), 16 * M])


def igamma(device: torch.device) -> Call:
    slow = indices(device, 8 * M, 32) == 0
    a = floats(device, 8 * M, seed=1) + 19.0
    return partial(torch.igamma, a, torch.where(slow, a - 1.0, 0.0))


NOT_COMPUTING = axes(
    Axis.MEMORY_BOUND, Axis.LATENCY_BOUND, Axis.OCCUPANCY_LIMITED, Axis.WAVE_STARVED, Axis.DIVERGENT,
    Axis.TENSOR_CORE_IDLE, Axis.REGISTER_SPILL,
)  # fmt: skip
NOT_WAITING = axes(Axis.MEMORY_BOUND, Axis.L2_BOUND, Axis.COMPUTE_BOUND, Axis.REGISTER_SPILL, Axis.TENSOR_CORE_IDLE)
NOT_CROWDED = NOT_WAITING | axes(Axis.DIVERGENT, Axis.WAVE_STARVED)
NOT_STARVED = axes(Axis.MEMORY_BOUND, Axis.REGISTER_SPILL, Axis.TENSOR_CORE_IDLE)
NOT_SPILLING = axes(Axis.DIVERGENT, Axis.TENSOR_CORE_IDLE)
NOT_DIVERGING = axes(Axis.MEMORY_BOUND, Axis.TENSOR_CORE_IDLE, Axis.OCCUPANCY_LIMITED)

CASES: tuple[Case, ...] = (
    Case(
        "double_horner_cuda", Axis.COMPUTE_BOUND, double_horner, axes(Axis.COMPUTE_BOUND),
        NOT_COMPUTING | axes(Axis.L2_BOUND),
        "1536 float64 FMAs a thread, four chains: at 64 a cycle and SM 49 k cycles for a wave of 8 blocks of "
        "256 (23 registers, 64 warps), four whole waves; 8 bytes written a thread.", kernel="double_horner",
    ),
    Case(
        "half_chains_cuda", Axis.COMPUTE_BOUND, half_chains, axes(Axis.COMPUTE_BOUND),
        NOT_COMPUTING | axes(Axis.L2_BOUND),
        "7680 FMAs on pairs of halves a thread, ten chains, 64 warps an SM (18 registers), four whole waves: an "
        "instruction for each scheduler and cycle; 4 bytes written a thread.", kernel="half_chains",
    ),
    Case(
        "mandelbrot_compiled", Axis.COMPUTE_BOUND, mandelbrot, axes(Axis.COMPUTE_BOUND),
        (NOT_COMPUTING - axes(Axis.OCCUPANCY_LIMITED)) | axes(Axis.CAST_TRAFFIC, Axis.LAYOUT_CONVERSION),
        "60 rounds of 4 to 6 instructions per 12 bytes: 240 to 360 instructions, where 96 take as long as the memory. "
        "150 us against 48.",
    ),
    Case(
        "baddbmm_fp16_eager", Axis.COMPUTE_BOUND, baddbmm, axes(Axis.COMPUTE_BOUND),
        NOT_COMPUTING - axes(Axis.OCCUPANCY_LIMITED),
        "24 products of side 2048, 412 GFLOP in float16 over 0.8 GB: 0.52 ms of tensor cores, 0.19 of memory.",
    ),
    Case(
        "attractions_triton", Axis.COMPUTE_BOUND, attractions, axes(Axis.COMPUTE_BOUND),
        NOT_COMPUTING | axes(Axis.L2_BOUND),
        "256 attractions a body: 13 instructions of arithmetic each and a root (an eighth of the special functions' "
        "pace for each issued one), 3400 per 24 bytes; 8 bodies a thread, 32 warps an SM (64 registers), four waves.",
        kernel="attractions",
    ),
    Case(
        "atomic_chain_cuda", Axis.LATENCY_BOUND, atomic_chain, axes(Axis.LATENCY_BOUND), NOT_WAITING,
        "Two warps on each SM; each atomic addition waits for the old value of the one before, some 700 cycles in L2, "
        "and 8 instructions go with it.", kernel="atomic_chain",
    ),
    Case(
        "block_sums_cuda", Axis.LATENCY_BOUND, block_sums, axes(Axis.LATENCY_BOUND), NOT_WAITING,
        "Four warps on each SM, one a scheduler: five shuffles, two barriers and shared memory in a row take some 280 "
        "cycles, for about 35 instructions.", kernel="block_sums",
    ),
    Case(
        "gated_recurrence_triton", Axis.LATENCY_BOUND, gated_recurrence, axes(Axis.LATENCY_BOUND),
        NOT_WAITING | axes(Axis.DIVERGENT),
        "Two warps on each SM; a step loads what the state before says, 128 bytes a warp in some 600 ns: 56 GB/s from "
        "all SMs together, and 12 instructions in 1000 cycles.", kernel="gated_recurrence",
    ),
    Case(
        "cumsum_columns_eager", Axis.LATENCY_BOUND, cumsum_columns, axes(Axis.LATENCY_BOUND),
        NOT_WAITING | axes(Axis.DIVERGENT),
        "A thread a column, 512 on each SM, walks down 1024 rows with one load in flight: "
        "270 KB on the device in some 700 ns, 0.4 TB/s read and as much written.",
    ),
    Case(
        "register_walk_cuda", Axis.OCCUPANCY_LIMITED, register_walk, axes(Axis.OCCUPANCY_LIMITED), NOT_CROWDED,
        "226 registers, 256 threads: one block, an eighth of the warps. Each step of a chain through L2 takes 280 "
        "cycles and 20 FMAs: two warps a scheduler issue 50 instructions in 310 cycles. Four whole waves.",
        kernel="register_walk",
    ),
    Case(
        "moments_cuda", Axis.OCCUPANCY_LIMITED, moments, axes(Axis.OCCUPANCY_LIMITED), NOT_CROWDED,
        "768 threads of 56 registers: one block, 24 warps of 64. A load from memory, some 1300 cycles, then 48 FMAs: "
        "six warps a scheduler issue 330 instructions in 1600 cycles and have 405 KB in flight of 3 MB. Four whole "
        "waves.", kernel="moments",
    ),
    Case(
        "table_walk_cuda", Axis.OCCUPANCY_LIMITED, table_walk, axes(Axis.OCCUPANCY_LIMITED), NOT_CROWDED,
        "72 KB of shared memory a block of 3 warps: three blocks, 9 warps of 64. A step of a chain through shared "
        "memory takes some 50 cycles and 7 instructions: a third of the issue slots at most. Three whole waves.",
        kernel="table_walk",
    ),
    Case(
        "warp_walk_cuda", Axis.OCCUPANCY_LIMITED, warp_walk, axes(Axis.OCCUPANCY_LIMITED), NOT_CROWDED,
        "Blocks of one warp: 32 slots, 32 warps of 64. Each follows a chain through 268 MB, 128 bytes a step: 540 KB "
        "in some 700 ns, 0.8 TB/s, a fifth of what memory gives. Four whole waves.", kernel="warp_walk",
    ),
    Case(
        "walking_tile_triton", Axis.OCCUPANCY_LIMITED, walking_tile, axes(Axis.OCCUPANCY_LIMITED), NOT_CROWDED,
        "164 registers a thread: 12 programs of one warp. A step goes to memory and then to L1 or L2, 1500 cycles, and "
        "has 128 FMAs and 60 other instructions: three warps a scheduler issue 600 in 1700 cycles. Four whole waves.",
        kernel="walking_tile",
    ),
    Case(
        "cumsum_rows_eager", Axis.WAVE_STARVED, cumsum_rows, axes(Axis.WAVE_STARVED),
        NOT_STARVED | axes(Axis.COMPUTE_BOUND),
        "torch gives a row to one block at most: 24 rows of 512 K values, 24 SMs of 132.",
    ),
    Case(
        "layer_norm_rows_eager", Axis.WAVE_STARVED, layer_norm_rows, axes(Axis.WAVE_STARVED),
        NOT_STARVED | axes(Axis.COMPUTE_BOUND),
        "torch's layer norm gives a row one block: 40 rows of 256 K values, 40 SMs of 132.", kernel="(?i)layer_?norm",
    ),
    Case(
        "tail_squares_cuda", Axis.WAVE_STARVED, tail_squares, axes(Axis.WAVE_STARVED), NOT_STARVED,
        "120 KB of shared memory a block: 132 of 150 blocks fit, the other 18 take as long again, while 114 SMs idle.",
        kernel="squares",
    ),
    Case(
        "long_product_triton", Axis.WAVE_STARVED, long_product, axes(Axis.WAVE_STARVED),
        axes(Axis.MEMORY_BOUND, Axis.REGISTER_SPILL, Axis.COMPUTE_BOUND, Axis.DIVERGENT),
        "768 x 16384 x 640 in tiles of 128 x 128 without a split of K: 30 programs on 132 SMs.", kernel="^product",
    ),
    Case(
        "few_elements_compiled", Axis.WAVE_STARVED, few_elements, axes(Axis.WAVE_STARVED),
        axes(Axis.MEMORY_BOUND, Axis.COMPUTE_BOUND, Axis.LAYOUT_CONVERSION, Axis.CAST_TRAFFIC),
        "150 tanh in a row for 2048 values: at 64 values a block or more, 32 blocks on 132 SMs.",
    ),
    Case(
        "private_sort_cuda", Axis.REGISTER_SPILL, private_sort, axes(Axis.REGISTER_SPILL), NOT_SPILLING,
        "64 values a thread, indexed by loops that stay loops: 256 bytes in local memory; two loads and two stores of "
        "it for every pair that is compared, in about 10 instructions.", kernel="private_sort",
    ),
    Case(
        "private_products_cuda", Axis.REGISTER_SPILL, private_products, axes(Axis.REGISTER_SPILL), NOT_SPILLING,
        "108 values alive in 32 registers (launch bounds of eight blocks of 256): 592 bytes of stack, and in the "
        "code more loads from it than FMAs, 305 to 252.", kernel="private_products",
    ),
    Case(
        "private_stack_cuda", Axis.REGISTER_SPILL, private_stack, axes(Axis.REGISTER_SPILL), NOT_SPILLING,
        "A stack of intervals in local memory: 16 bytes are loaded and, for every second one, 32 stored in about 20 "
        "instructions, 8191 times.", kernel="private_stack",
    ),
    Case(
        "whole_row_softmax_triton", Axis.REGISTER_SPILL, whole_row_softmax, axes(Axis.REGISTER_SPILL), NOT_SPILLING,
        "A row of 16384 values for one warp are 512 a thread: 3.9 KB of stack, 2500 loads from it in 8000 "
        "instructions.", kernel="whole_row_softmax",
    ),
    Case(
        "escape_time_cuda", Axis.DIVERGENT, escape_time, axes(Axis.DIVERGENT),
        NOT_DIVERGING | axes(Axis.REGISTER_SPILL),
        "Points in random order; a fifth take 1000 rounds, and most others a few: 6.5 threads an instruction, by "
        "counting the rounds.", kernel="escape_time",
    ),
    Case(
        "interpreter_cuda", Axis.DIVERGENT, interpreter, axes(Axis.DIVERGENT),
        NOT_DIVERGING | axes(Axis.REGISTER_SPILL),
        "Lanes draw one of eight instructions in each step, each a loop of 30 to 120 machine instructions, with 16 in "
        "common: five threads an instruction.", kernel="interpreter",
    ),
    Case(
        "filtered_cuda", Axis.DIVERGENT, filtered, axes(Axis.DIVERGENT),
        axes(Axis.TENSOR_CORE_IDLE, Axis.REGISTER_SPILL),
        "One value in ten passes and then takes 500 instructions, others 12: in 96 warps of 100 three lanes work, 3.5 "
        "threads an instruction.", kernel="filtered",
    ),
    Case(
        "igamma_eager", Axis.DIVERGENT, igamma, axes(Axis.DIVERGENT), axes(Axis.TENSOR_CORE_IDLE, Axis.MEMORY_BOUND),
        "The incomplete gamma function returns at once for 0; one value in 32, at random, sums a series of 27 terms, "
        "600 instructions or more: about five threads an instruction.",
    ),
)  # fmt: skip
