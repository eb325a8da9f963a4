"""Development set, third part: kernels that resemble what an axis means, and are not it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from case_studies.label_kernels import Case, axes, compiled, floats, indices
from case_studies.label_kernels_cuda import launcher
from fxopt.labels import Axis

Call = Callable[[], Any]
M = 1 << 20
SMS = 132


def copy_triton(device: torch.device) -> Call:
    from case_studies.label_kernels_triton import tile_copy

    x = floats(device, 64 * M)
    return partial(tile_copy[(64 * M // 1024,)], x, torch.empty_like(x), 64 * M, BLOCK=1024, num_warps=4)


def gemm_bf16_eager(device: torch.device) -> Call:
    a, b = (floats(device, 8192, 8192, dtype=torch.bfloat16, seed=k) for k in range(2))
    return partial(torch.mm, a, b)


def gemm_tf32(device: torch.device) -> Call:
    return compiled(torch.mm, floats(device, 8192, 8192), floats(device, 8192, 8192, seed=1))


def relu(device: torch.device) -> Call:
    return compiled(lambda x: torch.relu(x) + 1.0, floats(device, 128 * M, dtype=torch.bfloat16))


def uniform_branches(device: torch.device) -> Call:
    return launcher("branches", SMS * 8, 256, [torch.empty(SMS * 8 * 256, device=device), 2000, 32])


def many_loads(device: torch.device) -> Call:
    x = floats(device, 64 * M)
    return launcher("many_loads_each", SMS * 2 * 4, 128, [x, torch.empty_like(x), 16 * M], shared=100 * 1024)


def fused_cast(device: torch.device) -> Call:
    x = floats(device, 64 * M, dtype=torch.bfloat16)
    return compiled(lambda x: (x.float() * 2.0 + 1.0).to(torch.bfloat16), x)


def wide_rows(device: torch.device) -> Call:
    return compiled(lambda table, at: table[at], floats(device, 65536, 2048), indices(device, 32768, 65536))


def one_large(device: torch.device) -> Call:
    return compiled(lambda x: x * 2.0 + 1.0, floats(device, 256 * M))


def few_products(device: torch.device) -> Call:
    a = floats(device, 4096, 4096, dtype=torch.bfloat16)

    def chain() -> torch.Tensor:
        y = a
        for _ in range(4):
            y = y @ a
        return y

    return chain


def half_a_wave_more(device: torch.device) -> Call:
    grid = SMS * 2 * 8 + SMS
    return launcher("fma_chains", grid, 1024, [torch.empty(grid * 1024, device=device), 512])


def fused_transpose(device: torch.device) -> Call:
    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu(x.t() * 0.5 + y)

    return compiled(add, floats(device, 8192, 8192), floats(device, 8192, 8192, seed=1))


def thin_product(device: torch.device) -> Call:
    x, w = floats(device, 16, 8192, dtype=torch.bfloat16), floats(device, 28672, 8192, dtype=torch.bfloat16, seed=1)
    return compiled(F.linear, x, w)


def softmax(device: torch.device) -> Call:
    return compiled(lambda x: torch.softmax(x, -1), floats(device, 65536, 1024))


STREAMING = axes(
    Axis.COMPUTE_BOUND, Axis.L2_BOUND, Axis.LATENCY_BOUND, Axis.TENSOR_CORE_IDLE, Axis.OCCUPANCY_LIMITED,
    Axis.WAVE_STARVED, Axis.REGISTER_SPILL, Axis.DIVERGENT,
)  # fmt: skip
PRODUCT = axes(
    Axis.MEMORY_BOUND, Axis.TENSOR_CORE_IDLE, Axis.LATENCY_BOUND, Axis.OCCUPANCY_LIMITED, Axis.REGISTER_SPILL,
    Axis.DIVERGENT, Axis.CAST_TRAFFIC, Axis.LAYOUT_CONVERSION,
)  # fmt: skip

CASES: tuple[Case, ...] = (
    Case(
        "copy_triton", None, copy_triton, axes(Axis.MEMORY_BOUND), STREAMING,
        "A copy computes nothing: 256 MB read, 256 MB written.", kernel="tile_copy",
    ),
    Case(
        "gemm_bf16_eager", None, gemm_bf16_eager, axes(), PRODUCT,
        "cuBLAS at 1.1 TFLOP over 0.4 GB. One block with much shared memory an SM is how it is meant to be.",
    ),
    Case(
        "gemm_tf32_compiled", None, gemm_tf32, axes(), PRODUCT,
        "float32 tensors, but TF32 is on: tensor cores run it. 1.1 TFLOP over 0.8 GB.", tf32=True,
    ),
    Case(
        "relu_compiled", None, relu, axes(), STREAMING | axes(Axis.CAST_TRAFFIC, Axis.LAYOUT_CONVERSION),
        "Elementwise at full occupancy: 256 MB read, 256 MB written.",
    ),
    Case(
        "uniform_branches_cuda", None, uniform_branches, axes(), axes(Axis.DIVERGENT, Axis.MEMORY_BOUND),
        "The branches of branches_cuda, one for each whole warp: 32 threads an instruction.", kernel="branches",
    ),
    Case(
        "many_loads_cuda", None, many_loads, axes(Axis.MEMORY_BOUND),
        axes(Axis.OCCUPANCY_LIMITED, Axis.LATENCY_BOUND, Axis.REGISTER_SPILL, Axis.COMPUTE_BOUND),
        "8 warps an SM (100 KB of shared memory; 76 registers, none spilled), but 16 loads of 16 bytes in flight a "
        "thread: 8.6 MB on the device, where 4 TB/s times 0.7 us need 3 MB. More warps would bring nothing.",
        kernel="many_loads_each",
    ),
    Case(
        "fused_cast_compiled", None, fused_cast, axes(), STREAMING | axes(Axis.CAST_TRAFFIC, Axis.LAYOUT_CONVERSION),
        "Casts inside of a kernel that computes: bfloat16 is read and written, and no byte moves for the cast.",
    ),
    Case(
        "wide_rows_compiled", None, wide_rows, axes(), axes(Axis.EXCESS_TRAFFIC, Axis.COMPUTE_BOUND, Axis.CAST_TRAFFIC),
        "Random rows of 8 KB: every byte of every sector is used; 268 MB read, 268 MB written.",
    ),
    Case(
        "one_large_compiled", None, one_large, axes(), axes(Axis.LAUNCH_BOUND),
        "One kernel of half a millisecond: 1 GB read, 1 GB written.", scope="graph",
    ),
    Case(
        "few_products_eager", None, few_products, axes(), axes(Axis.LAUNCH_BOUND),
        "Four products of 0.2 ms, each dispatched in 10 us while the one before runs.", scope="graph",
    ),
    Case(
        "half_a_wave_more_cuda", None, half_a_wave_more, axes(Axis.COMPUTE_BOUND),
        axes(Axis.WAVE_STARVED, Axis.MEMORY_BOUND),
        "8.5 waves: the last one, half full, is a sixteenth of the time.", kernel="fma_chains",
    ),
    Case(
        "fused_transpose_compiled", None, fused_transpose, axes(),
        axes(Axis.LAYOUT_CONVERSION, Axis.CAST_TRAFFIC, Axis.COMPUTE_BOUND),
        "One operand is read in another order, by a kernel that computes: nothing is only moved.",
    ),
    Case(
        "thin_product_compiled", None, thin_product, axes(Axis.MEMORY_BOUND),
        axes(Axis.COMPUTE_BOUND, Axis.TENSOR_CORE_IDLE, Axis.CAST_TRAFFIC, Axis.LAYOUT_CONVERSION),
        "16 rows times a weight of 470 MB: 7.5 GFLOP, 16 FLOP a byte, a tenth of what would keep tensor cores busy.",
    ),
    Case(
        "softmax_compiled", None, softmax, axes(Axis.MEMORY_BOUND),
        STREAMING | axes(Axis.EXCESS_TRAFFIC, Axis.LAYOUT_CONVERSION, Axis.CAST_TRAFFIC),
        "A row of 4 KB stays in registers: 268 MB read, 268 MB written.",
    ),
)  # fmt: skip
