"""Development set, second part: what the SMs do, and how a launch fills them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from case_studies.label_kernels import Case, axes, compiled, floats
from case_studies.label_kernels_cuda import launcher
from fxopt.labels import Axis

Call = Callable[[], Any]
M = 1 << 20
SMS = 132  # grids are made for this many SMs
KB = 1024


def _out(device: torch.device, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(count, dtype=dtype, device=device)


# --- compute_bound --------------------------------------------------------------------------------------------------


def gemm_bf16(device: torch.device) -> Call:
    a, b = (floats(device, 8192, 8192, dtype=torch.bfloat16, seed=k) for k in range(2))
    return compiled(torch.mm, a, b)


def fma_chains(device: torch.device) -> Call:
    return launcher("fma_chains", SMS * 2 * 8, 1024, [_out(device, SMS * 2 * 8 * 1024), 512])


def integer_hash(device: torch.device) -> Call:
    return launcher("integer_hash", SMS * 8 * 4, 256, [_out(device, SMS * 8 * 4 * 256, torch.int32), 512])


def exponentials(device: torch.device) -> Call:
    from case_studies.label_kernels_triton import exponentials as kernel

    x = floats(device, 8 * M)
    return partial(kernel[(8 * M // 1024,)], x, torch.empty_like(x), 128, BLOCK=1024, num_warps=8)


def error_functions(device: torch.device) -> Call:
    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(24):
            x = torch.erf(x) * 1.5
        return x

    return compiled(chain, floats(device, 16 * M))


# --- tensor_core_idle -----------------------------------------------------------------------------------------------


def gemm_fp32(device: torch.device) -> Call:
    return compiled(torch.mm, floats(device, 4096, 4096), floats(device, 4096, 4096, seed=1))


def bmm_fp32(device: torch.device) -> Call:
    return compiled(torch.bmm, floats(device, 32, 1024, 1024), floats(device, 32, 1024, 1024, seed=1))


def linear_fp32(device: torch.device) -> Call:
    x, w, b = floats(device, 4096, 2048), floats(device, 8192, 2048, seed=1), floats(device, 8192)
    return compiled(lambda x, w, b: F.relu(F.linear(x, w, b)), x, w, b)


# --- latency_bound, on the SM ---------------------------------------------------------------------------------------


def shared_chase(device: torch.device) -> Call:
    return launcher("shared_chase", SMS, 128, [_out(device, SMS * 128, torch.int32), 16384])


def waiting_warps(device: torch.device) -> Call:
    return launcher("waiting_warps", SMS, 256, [_out(device, SMS * 256, torch.int32), 200])


# --- occupancy_limited: whole waves, one load in flight a thread ----------------------------------------------------


def shared_hog(device: torch.device) -> Call:
    x = floats(device, 8 * M)
    return launcher("shared_hog", SMS * 8, 128, [x, torch.empty_like(x), 8 * M], shared=200 * KB)


def half_shared_hog(device: torch.device) -> Call:
    x = floats(device, 8 * M)
    return launcher("shared_hog", SMS * 2 * 8, 64, [x, torch.empty_like(x), 8 * M], shared=100 * KB)


def register_hog(device: torch.device) -> Call:
    x = floats(device, 8 * M)
    return launcher("register_hog", SMS * 2 * 4, 128, [x, torch.empty_like(x), 8 * M])


def one_warp_blocks(device: torch.device) -> Call:
    x = floats(device, 32 * M)
    return launcher("one_load_each", SMS * 32 * 4, 32, [x, torch.empty_like(x), 32 * M])


# --- wave_starved ---------------------------------------------------------------------------------------------------


def one_block(device: torch.device) -> Call:
    return launcher("grid_sum", 1, 1024, [floats(device, 4 * M), _out(device, 1024), 4 * M])


def few_blocks(device: torch.device) -> Call:
    from case_studies.label_kernels_triton import row_norms

    return partial(row_norms[(16,)], floats(device, 16, M // 2), _out(device, 16), M // 2, BLOCK=4096, num_warps=16)


def few_rows(device: torch.device) -> Call:
    return partial(torch.softmax, floats(device, 16, 128 * KB), -1)


def tail_wave(device: torch.device) -> Call:
    grid = SMS * 2 + 8
    return launcher("shared_chase", grid, 256, [_out(device, grid * 256, torch.int32), 16384], shared=96 * KB)


def tail_wave_arithmetic(device: torch.device) -> Call:
    grid = SMS * 2 + 8
    return launcher("fma_chains", grid, 1024, [_out(device, grid * 1024), 4096])


# --- register_spill -------------------------------------------------------------------------------------------------


def spilled_ring(device: torch.device) -> Call:
    x = floats(device, SMS * 4 * 512)
    return launcher("spilled_ring", SMS * 4, 512, [x, torch.empty_like(x), 100])


def spilled_tile(device: torch.device) -> Call:
    x, y = floats(device, 4096), _out(device, SMS * 4 * 128)
    return launcher("spilled_tile", SMS * 4, 128, [x, y, 200])


def private_histogram(device: torch.device) -> Call:
    x, y = torch.arange(4096, dtype=torch.int32, device=device), _out(device, SMS * 8 * 128, torch.int32)
    return launcher("private_histogram", SMS * 8, 128, [x.mul_(7919), y, 4095, 500])


def outer_products(device: torch.device) -> Call:
    from case_studies.label_kernels_triton import outer_products as kernel

    u, v, y = floats(device, 256, 64), floats(device, 256, 128), _out(device, SMS * 8 * 64 * 128)
    return partial(kernel[(SMS * 8,)], u, v, y, 256, M=64, N=128, num_warps=1)


# --- divergent ------------------------------------------------------------------------------------------------------


def branches(device: torch.device) -> Call:
    return launcher("branches", SMS * 8, 256, [_out(device, SMS * 8 * 256), 500, 1])


def rejection(device: torch.device) -> Call:
    return launcher("rejection", SMS * 8, 256, [_out(device, SMS * 8 * 256, torch.int32), 64])


def sparse_rows(device: torch.device) -> Call:
    rows = SMS * 8 * 256
    lengths = torch.full((rows,), 16, dtype=torch.int64)
    lengths[::32] = 1024
    start = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(device, torch.int32)
    total = int(lengths.sum())
    column = torch.arange(total, device=device, dtype=torch.int32).mul_(7919).bitwise_and_(M - 1)
    value, x, y = floats(device, total), floats(device, M, seed=1), _out(device, rows)
    return launcher("sparse_rows", SMS * 8, 256, [start, column, value, x, y, rows])


def first_lane(device: torch.device) -> Call:
    return launcher("first_lane", SMS * 8, 256, [_out(device, SMS * 8 * 256), 8192])


NOT_COMPUTING = axes(
    Axis.MEMORY_BOUND, Axis.L2_BOUND, Axis.LATENCY_BOUND, Axis.OCCUPANCY_LIMITED, Axis.WAVE_STARVED, Axis.DIVERGENT
)
NOT_FP32_PRODUCT = axes(Axis.MEMORY_BOUND, Axis.LATENCY_BOUND, Axis.DIVERGENT, Axis.CAST_TRAFFIC, Axis.REGISTER_SPILL)
NOT_HOG = axes(Axis.MEMORY_BOUND, Axis.COMPUTE_BOUND, Axis.WAVE_STARVED, Axis.DIVERGENT, Axis.REGISTER_SPILL)
NOT_STARVED = axes(Axis.MEMORY_BOUND, Axis.REGISTER_SPILL, Axis.DIVERGENT)
NOT_SPILLING = axes(Axis.MEMORY_BOUND, Axis.DIVERGENT, Axis.WAVE_STARVED, Axis.TENSOR_CORE_IDLE)
NOT_DIVERGING = axes(Axis.MEMORY_BOUND, Axis.REGISTER_SPILL, Axis.TENSOR_CORE_IDLE, Axis.OCCUPANCY_LIMITED)

CASES: tuple[Case, ...] = (
    Case(
        "gemm_bf16_compiled", Axis.COMPUTE_BOUND, gemm_bf16, axes(Axis.COMPUTE_BOUND),
        (NOT_COMPUTING - axes(Axis.L2_BOUND)) | axes(Axis.TENSOR_CORE_IDLE),
        "1.1 TFLOP over 0.4 GB: 1.4 ms of tensor cores, 0.1 ms of memory.",
    ),
    Case(
        "fma_chains_cuda", Axis.COMPUTE_BOUND, fma_chains, axes(Axis.COMPUTE_BOUND),
        NOT_COMPUTING | axes(Axis.TENSOR_CORE_IDLE, Axis.REGISTER_SPILL),
        "4096 FMAs per 4 bytes written, eight chains a thread, 64 warps an SM (22 registers), eight whole waves.",
        kernel="fma_chains",
    ),
    Case(
        "integer_hash_cuda", Axis.COMPUTE_BOUND, integer_hash, axes(Axis.COMPUTE_BOUND),
        NOT_COMPUTING | axes(Axis.TENSOR_CORE_IDLE, Axis.REGISTER_SPILL),
        "12288 shifts and logical operations per 4 bytes written, 64 warps an SM: the ALU pipe.", kernel="integer_hash",
    ),
    Case(
        "exponentials_triton", Axis.COMPUTE_BOUND, exponentials, axes(Axis.COMPUTE_BOUND),
        NOT_COMPUTING | axes(Axis.TENSOR_CORE_IDLE, Axis.REGISTER_SPILL),
        "128 exp2 per 8 bytes: at 16 a cycle and SM 260 us, against 16 us of memory.", kernel="exponentials",
    ),
    Case(
        "error_functions_compiled", Axis.COMPUTE_BOUND, error_functions, axes(Axis.COMPUTE_BOUND),
        (NOT_COMPUTING - axes(Axis.OCCUPANCY_LIMITED)) | axes(Axis.TENSOR_CORE_IDLE),
        "24 erf per 8 bytes, about 25 instructions each: 16 M x 600 at 132 x 128 a cycle are 300 us, against 32 us of "
        "memory.",
    ),
    Case(
        "gemm_fp32_compiled", Axis.TENSOR_CORE_IDLE, gemm_fp32, axes(Axis.TENSOR_CORE_IDLE, Axis.COMPUTE_BOUND),
        NOT_FP32_PRODUCT,
        "137 GFLOP in float32 without TF32: 2.7 ms of FMAs, 0.17 ms of bfloat16 tensor cores, 0.05 ms of memory.",
    ),
    Case(
        "bmm_fp32_compiled", Axis.TENSOR_CORE_IDLE, bmm_fp32, axes(Axis.TENSOR_CORE_IDLE), NOT_FP32_PRODUCT,
        "32 products of side 1024, 69 GFLOP in float32 without TF32.",
    ),
    Case(
        "linear_fp32_compiled", Axis.TENSOR_CORE_IDLE, linear_fp32, axes(Axis.TENSOR_CORE_IDLE), NOT_FP32_PRODUCT,
        "137 GFLOP in float32 with bias and ReLU, without TF32; the product's kernel is in question.",
        kernel="gemm|cutlass|nvjet",
    ),
    Case(
        "shared_chase_cuda", Axis.LATENCY_BOUND, shared_chase, axes(Axis.LATENCY_BOUND),
        axes(Axis.MEMORY_BOUND, Axis.L2_BOUND, Axis.COMPUTE_BOUND, Axis.REGISTER_SPILL, Axis.DIVERGENT),
        "Four warps on each SM, each load from shared memory at the address that the last one gave: a scheduler issues "
        "an instruction in 15 cycles or more.", kernel="shared_chase",
    ),
    Case(
        "waiting_warps_cuda", Axis.LATENCY_BOUND, waiting_warps, axes(Axis.LATENCY_BOUND),
        axes(Axis.MEMORY_BOUND, Axis.L2_BOUND, Axis.COMPUTE_BOUND, Axis.REGISTER_SPILL, Axis.DIVERGENT),
        "Seven warps of eight wait at a barrier while one follows a chain of 64 loads.", kernel="waiting_warps",
    ),
    Case(
        "shared_hog_cuda", Axis.OCCUPANCY_LIMITED, shared_hog, axes(Axis.OCCUPANCY_LIMITED), NOT_HOG,
        "200 KB of shared memory a block of 4 warps: one block, 6 % of the warps. With one 4-byte load in flight each, "
        "68 KB are under way on the device, of the 3 MB that 4 TB/s times 0.7 us need. Eight whole waves.",
        kernel="shared_hog",
    ),
    Case(
        "half_shared_hog_cuda", Axis.OCCUPANCY_LIMITED, half_shared_hog, axes(Axis.OCCUPANCY_LIMITED), NOT_HOG,
        "100 KB a block of 2 warps: two blocks, 6 % of the warps; otherwise as shared_hog_cuda.", kernel="shared_hog",
    ),
    Case(
        "register_hog_cuda", Axis.OCCUPANCY_LIMITED, register_hog, axes(Axis.OCCUPANCY_LIMITED), NOT_HOG,
        "255 registers, 128 threads: two blocks, 12.5 % of the warps, one load in flight each. Four whole waves.",
        kernel="register_hog",
    ),
    Case(
        "one_warp_blocks_cuda", Axis.OCCUPANCY_LIMITED, one_warp_blocks, axes(Axis.OCCUPANCY_LIMITED),
        NOT_HOG,
        "Blocks of one warp: an SM's 32 slots for blocks hold half of its warps; at one 4-byte load in flight a thread "
        "that is a sixth of what memory needs. Four whole waves.", kernel="one_load_each",
    ),
    Case(
        "one_block_cuda", Axis.WAVE_STARVED, one_block, axes(Axis.WAVE_STARVED), NOT_STARVED | axes(Axis.COMPUTE_BOUND),
        "One block sums 16 MB: one SM of 132 works.", kernel="grid_sum",
    ),
    Case(
        "few_blocks_triton", Axis.WAVE_STARVED, few_blocks, axes(Axis.WAVE_STARVED),
        NOT_STARVED | axes(Axis.COMPUTE_BOUND),
        "16 programs, one a row, on 132 SMs.", kernel="row_norms",
    ),
    Case(
        "few_rows_eager", Axis.WAVE_STARVED, few_rows, axes(Axis.WAVE_STARVED), NOT_STARVED | axes(Axis.COMPUTE_BOUND),
        "torch's softmax gives a row one block: 16 rows, 16 blocks.", kernel="(?i)softmax",
    ),
    Case(
        "tail_wave_cuda", Axis.WAVE_STARVED, tail_wave, axes(Axis.WAVE_STARVED), NOT_STARVED | axes(Axis.COMPUTE_BOUND),
        "272 blocks of which 264 fit (100 KB of shared memory each): the last eight take as long again. Each follows a "
        "chain of loads, so that blocks do not slow each other down.", kernel="shared_chase",
    ),
    Case(
        "tail_wave_arithmetic_cuda", Axis.WAVE_STARVED, tail_wave_arithmetic, axes(Axis.WAVE_STARVED), NOT_STARVED,
        "272 blocks of which 264 fit, arithmetic only: a block that is alone on its SM takes half as long, so that for "
        "a third of the time eight SMs work.", kernel="fma_chains",
    ),
    Case(
        "spilled_ring_cuda", Axis.REGISTER_SPILL, spilled_ring, axes(Axis.REGISTER_SPILL), NOT_SPILLING,
        "96 values alive in 32 registers (launch bounds of four blocks of 512): 672 bytes of stack a thread, most of "
        "them loaded and stored in every round.", kernel="spilled_ring",
    ),
    Case(
        "spilled_tile_cuda", Axis.REGISTER_SPILL, spilled_tile, axes(Axis.REGISTER_SPILL), NOT_SPILLING,
        "256 sums and 32 operands in 255 registers: 136 bytes of stack a thread.", kernel="spilled_tile",
    ),
    Case(
        "private_histogram_cuda", Axis.REGISTER_SPILL, private_histogram, axes(Axis.REGISTER_SPILL), NOT_SPILLING,
        "An array of 64 counters a thread, indexed by the data: 256 bytes in local memory, a load and a store of it "
        "for each value.", kernel="private_histogram",
    ),
    Case(
        "outer_products_triton", Axis.REGISTER_SPILL, outer_products, axes(Axis.REGISTER_SPILL), NOT_SPILLING,
        "A tile of 64 x 128 sums for one warp are 256 a thread, of 255 registers: 416 bytes of stack.",
        kernel="outer_products",
    ),
    Case(
        "branches_cuda", Axis.DIVERGENT, branches, axes(Axis.DIVERGENT), NOT_DIVERGING,
        "Lanes take eight branches, each a loop: four threads an instruction.", kernel="branches",
    ),
    Case(
        "rejection_cuda", Axis.DIVERGENT, rejection, axes(Axis.DIVERGENT), NOT_DIVERGING,
        "Each lane draws until one chance in 32 comes: 32 times on average, and 130 for the last of 32 lanes: eight "
        "threads an instruction.", kernel="rejection",
    ),
    Case(
        "sparse_rows_cuda", Axis.DIVERGENT, sparse_rows, axes(Axis.DIVERGENT),
        axes(Axis.REGISTER_SPILL, Axis.TENSOR_CORE_IDLE, Axis.OCCUPANCY_LIMITED),
        "A thread a row, of 16 values but for one row in 32 with 1024: (31 x 16 + 1024) / 1024 threads an instruction.",
        kernel="sparse_rows",
    ),
    Case(
        "first_lane_cuda", Axis.DIVERGENT, first_lane, axes(Axis.DIVERGENT), NOT_DIVERGING,
        "The first lane of each warp does the work: one thread an instruction.", kernel="first_lane",
    ),
)  # fmt: skip
