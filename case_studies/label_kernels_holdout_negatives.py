"""Holdout set, third part: kernels that resemble what an axis means, and are not it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

import case_studies.label_kernels_holdout_cuda  # noqa: F401  (its kernels join those that launcher() knows)
from case_studies.label_kernels import Case, axes, compiled, floats, indices
from case_studies.label_kernels_cuda import launcher
from fxopt.labels import Axis

Call = Callable[[], Any]
M = 1 << 20
KB = 1024
SMS = 132
HALF, BF16 = torch.float16, torch.bfloat16


def copy_slices(device: torch.device) -> Call:
    return floats(device, 8192, 4096, dtype=torch.float64)[:, :4000].clone


def staged_copy(device: torch.device) -> Call:
    x = floats(device, 64 * M)
    return launcher("staged_copy", 16 * M // 1024, 256, [x, torch.empty_like(x)])


def row_copies(device: torch.device) -> Call:
    from case_studies.label_kernels_holdout_triton import row_copies as kernel

    x = indices(device, 64 * M, 1 << 30).to(torch.int32)
    order = torch.randperm(64 * KB, generator=torch.Generator(device).manual_seed(1), device=device).to(torch.int32)
    return partial(kernel[(64 * KB,)], x, order, torch.empty_like(x), WIDTH=1024, num_warps=4)


def gemm_fp16(device: torch.device) -> Call:
    return partial(torch.mm, floats(device, 12288, 3072, dtype=HALF), floats(device, 3072, 6144, dtype=HALF, seed=1))


def bmm_bf16(device: torch.device) -> Call:
    a, b = (floats(device, 40, 2048, 1536, dtype=BF16, seed=k) for k in range(2))
    return compiled(lambda a, b: torch.bmm(a, b.transpose(1, 2)), a, b)


def gemm_int8(device: torch.device) -> Call:
    a, b = (indices(device, 64 * M, 100, seed=k).to(torch.int8).view(8192, 8192) for k in range(2))
    return partial(torch._int_mm, a, b.t())


def gemm_fp64(device: torch.device) -> Call:
    return partial(torch.mm, *(floats(device, 4096, 4096, dtype=torch.float64, seed=k) for k in range(2)))


def gemm_fp32(device: torch.device) -> Call:
    return partial(torch.mm, floats(device, 5120, 5120), floats(device, 5120, 5120, seed=1))


def convolution_tf32(device: torch.device) -> Call:
    x, w = floats(device, 32, 256, 56, 56), floats(device, 256, 256, 3, 3, seed=1)
    return compiled(lambda x, w: F.conv2d(x, w, padding=1), x, w)


def convolution_bf16(device: torch.device) -> Call:
    x, w = floats(device, 64, 256, 56, 56, dtype=BF16), floats(device, 256, 256, 3, 3, dtype=BF16, seed=1)
    x, w = (t.to(memory_format=torch.channels_last) for t in (x, w))
    return partial(F.conv2d, x, w, padding=1)


def attention(device: torch.device) -> Call:
    q, k, v = (floats(device, 4, 16, 4096, 128, dtype=BF16, seed=seed) for seed in range(3))
    return compiled(F.scaled_dot_product_attention, q, k, v)


def wide_chains(device: torch.device) -> Call:
    return launcher("wide_chains", SMS * 4, 256, [torch.empty(SMS * 4 * 256, device=device), 2048], shared=200 * KB)


def many_waves(device: torch.device) -> Call:
    grid = SMS * 4 * 20 + 7
    return launcher("squares", grid, 512, [torch.empty(grid * 512, dtype=torch.int32, device=device), 12345, 256])


def register_tile(device: torch.device) -> Call:
    y = torch.empty(SMS * 3 * 6 * 128, device=device)
    return launcher("register_tile", SMS * 3 * 6, 128, [floats(device, 64 * 24), y, 1000])


def warp_loops(device: torch.device) -> Call:
    return launcher("warp_loops", SMS * 32, 256, [torch.empty(SMS * 32 * 256, device=device), 4000])


def l1_reads(device: torch.device) -> Call:
    x, y = floats(device, SMS * 2 * 48 * KB // 4), torch.empty(SMS * 2 * 1024, device=device)
    return launcher("l1_reads", SMS * 2, 1024, [x, y, 256])


def double_axpy(device: torch.device) -> Call:
    x, b = (floats(device, 32 * M, dtype=torch.float64, seed=k) for k in range(2))
    return launcher("double_axpy", 16 * M // 512, 512, [x, b, torch.empty_like(x), 16 * M])


def wide_mlp(device: torch.device) -> Call:
    def mlp(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        for w in weights:
            x = torch.relu(F.linear(x, w))
        return x

    weights = [floats(device, 4096, 4096, dtype=BF16, seed=1 + k) for k in range(5)]
    return compiled(mlp, floats(device, 16384, 4096, dtype=BF16), weights)


def long_chain(device: torch.device) -> Call:
    x = floats(device, 48 * M)

    def chain() -> torch.Tensor:
        y = x
        for _ in range(20):
            y = torch.sigmoid(y)
        return y

    return chain


def normalised_planes(device: torch.device) -> Call:
    def normalise(x: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return F.silu((x.permute(0, 3, 1, 2) - mean) * scale).contiguous()

    x = floats(device, 32, 128, 128, 128)
    mean, scale = floats(device, 128, 1, 1, seed=1), floats(device, 128, 1, 1, seed=2)
    return compiled(normalise, x, mean, scale)


def dequantise(device: torch.device) -> Call:
    x = indices(device, 128 * M, 100).to(torch.int8).view(16384, 8192)
    scale, zero = floats(device, 16384, 1), floats(device, 16384, 1, seed=1)
    return compiled(lambda x, s, z: ((x.float() - z) * s).to(BF16), x, scale, zero)


def token_embedding(device: torch.device) -> Call:
    table = floats(device, 50304, 1600, dtype=BF16)
    return compiled(lambda table, at: F.embedding(at, table), table, indices(device, 65536, 50304))


def gated_unit(device: torch.device) -> Call:
    a, b = (floats(device, 16384, 4096, dtype=HALF, seed=k) for k in range(2))
    return compiled(lambda a, b: F.gelu(a, approximate="tanh") * b, a, b)


COPY = axes(Axis.COMPUTE_BOUND, Axis.TENSOR_CORE_IDLE, Axis.REGISTER_SPILL, Axis.DIVERGENT, Axis.WAVE_STARVED)
PRODUCT = axes(Axis.MEMORY_BOUND, Axis.TENSOR_CORE_IDLE, Axis.DIVERGENT, Axis.CAST_TRAFFIC, Axis.LAYOUT_CONVERSION)

CASES: tuple[Case, ...] = (
    Case(
        "copy_slices_eager", None, copy_slices, axes(), COPY,
        "4000 of each 4096 float64 columns copied: 262 MB read, 262 MB written. An address takes 20 to 30 "
        "instructions, where 128 per 16 bytes would take as long as the memory.", kernel="(?i)elementwise|copy",
    ),
    Case(
        "staged_copy_cuda", None, staged_copy, axes(Axis.MEMORY_BOUND), COPY | axes(Axis.LATENCY_BOUND),
        "268 MB to 268 MB by way of shared memory, 64 warps an SM with four loads of 16 bytes each: 17 MB in flight.",
        kernel="staged_copy",
    ),
    Case(
        "row_copies_triton", None, row_copies, axes(Axis.MEMORY_BOUND), COPY | axes(Axis.EXCESS_TRAFFIC),
        "Rows of 4 KB in random order, every byte used: 268 MB read, 268 MB written, nothing computed.",
        kernel="row_copies",
    ),
    Case(
        "gemm_fp16_eager", None, gemm_fp16, axes(), PRODUCT | axes(Axis.LATENCY_BOUND, Axis.OCCUPANCY_LIMITED),
        "464 GFLOP over 0.26 GB on tensor cores: 0.59 ms of arithmetic, 0.06 of memory. Few warps an SM are how cuBLAS "
        "keeps them busy.",
    ),
    Case(
        "bmm_bf16_compiled", None, bmm_bf16, axes(), PRODUCT | axes(Axis.OPAQUE_LIBRARY, Axis.EXCESS_TRAFFIC),
        "40 products of 2048 x 1536 x 2048: 515 GFLOP over 0.84 GB, 0.65 ms of tensor cores, 0.2 of memory. What "
        "cuBLAS does for aten.bmm, the graph says.",
    ),
    Case(
        "gemm_int8_eager", None, gemm_int8, axes(), PRODUCT,
        "1.1 Tera-operations on bytes over 0.4 GB: 0.7 ms of tensor cores, 0.1 of memory.",
    ),
    Case(
        "gemm_fp64_eager", None, gemm_fp64, axes(), PRODUCT,
        "137 GFLOP in float64, which tensor cores also run: 2.1 ms or more, 0.1 of memory. No faster type will do.",
    ),
    Case(
        "gemm_fp32_eager", None, gemm_fp32, axes(), PRODUCT - axes(Axis.TENSOR_CORE_IDLE) | axes(Axis.WAVE_STARVED),
        "268 GFLOP without TF32: 5.3 ms of FMAs, 0.08 of memory; 800 tiles of 128 x 256 or more.",
    ),
    Case(
        "convolution_tf32_compiled", None, convolution_tf32, axes(),
        axes(Axis.TENSOR_CORE_IDLE, Axis.MEMORY_BOUND, Axis.CAST_TRAFFIC, Axis.DIVERGENT),
        "118 GFLOP in TF32, on tensor cores: 0.31 ms or more against 0.05 of memory.", tf32=True,
    ),
    Case(
        "convolution_bf16_eager", None, convolution_bf16, axes(), PRODUCT,
        "237 GFLOP over 0.2 GB, channels last and bfloat16: 0.3 ms of tensor cores, 0.05 of memory.",
    ),
    Case(
        "attention_bf16_compiled", None, attention, axes(), PRODUCT | axes(Axis.EXCESS_TRAFFIC),
        "Fused attention over 4096 tokens: 550 GFLOP over 0.27 GB, 0.7 ms of tensor cores or more, 0.06 of memory.",
    ),
    Case(
        "wide_chains_cuda", None, wide_chains, axes(Axis.COMPUTE_BOUND),
        axes(Axis.OCCUPANCY_LIMITED, Axis.LATENCY_BOUND, Axis.MEMORY_BOUND, Axis.WAVE_STARVED, Axis.REGISTER_SPILL),
        "200 KB of shared memory a block: 8 warps of 64. But two warps a scheduler with 24 independent FMAs each are "
        "48 for a latency of 4 cycles: more warps would bring nothing.", kernel="wide_chains",
    ),
    Case(
        "many_waves_cuda", None, many_waves, axes(), axes(Axis.WAVE_STARVED, Axis.MEMORY_BOUND, Axis.DIVERGENT),
        "10567 blocks of which 528 fit: 20 waves and seven blocks, a twentieth of the time.", kernel="squares",
    ),
    Case(
        "register_tile_cuda", None, register_tile, axes(),
        axes(Axis.REGISTER_SPILL, Axis.MEMORY_BOUND, Axis.DIVERGENT, Axis.WAVE_STARVED, Axis.L2_BOUND),
        "128 sums a thread in 157 registers, none of them in local memory; six loads from shared memory for 128 FMAs.",
        kernel="register_tile",
    ),
    Case(
        "warp_loops_cuda", None, warp_loops, axes(), axes(Axis.DIVERGENT, Axis.MEMORY_BOUND, Axis.REGISTER_SPILL),
        "Loops of 0 to 4000 rounds, but of one length for a warp: 32 threads an instruction.", kernel="warp_loops",
    ),
    Case(
        "l1_reads_cuda", None, l1_reads, axes(),
        axes(Axis.L2_BOUND, Axis.MEMORY_BOUND, Axis.REGISTER_SPILL, Axis.DIVERGENT, Axis.WAVE_STARVED),
        "A block reads its own 48 KB 256 times, and 96 KB of an SM fit in L1: 13 MB of 3.3 GB come from L2.",
        kernel="l1_reads",
    ),
    Case(
        "double_axpy_cuda", None, double_axpy, axes(Axis.MEMORY_BOUND), COPY | axes(Axis.LATENCY_BOUND),
        "537 MB read, 268 MB written, 192 us; one float64 FMA per 24 bytes, 8 us. 64 warps an SM with two loads of 16 "
        "bytes each: 8.6 MB in flight of 3 MB.", kernel="double_axpy",
    ),
    Case(
        "wide_mlp_compiled", None, wide_mlp, axes(), axes(Axis.LAUNCH_BOUND),
        "Five products of 550 GFLOP, 0.7 ms each, with a ReLU after each: the host is ahead after the first.",
        scope="graph",
    ),
    Case(
        "long_chain_eager", None, long_chain, axes(), axes(Axis.LAUNCH_BOUND),
        "20 operators on 201 MB each, 96 us; dispatched in 5 to 10 us each while the one before runs.", scope="graph",
    ),
    Case(
        "normalised_planes_compiled", None, normalised_planes, axes(),
        axes(Axis.LAYOUT_CONVERSION, Axis.CAST_TRAFFIC, Axis.TENSOR_CORE_IDLE, Axis.REGISTER_SPILL),
        "From interleaved to planes, in the kernel that normalises and applies SiLU: nothing is only moved.",
    ),
    Case(
        "dequantise_compiled", None, dequantise, axes(),
        axes(Axis.CAST_TRAFFIC, Axis.LAYOUT_CONVERSION, Axis.TENSOR_CORE_IDLE, Axis.EXCESS_TRAFFIC),
        "int8 to bfloat16 with a zero point and a scale for each row: arithmetic, not only another type.",
    ),
    Case(
        "token_embedding_compiled", None, token_embedding, axes(),
        axes(Axis.EXCESS_TRAFFIC, Axis.COMPUTE_BOUND, Axis.CAST_TRAFFIC, Axis.OPAQUE_LIBRARY),
        "Rows of 3200 bytes, all of which are used: 210 MB written, and no more than that read.",
    ),
    Case(
        "gated_unit_compiled", None, gated_unit, axes(),
        axes(Axis.OPAQUE_LIBRARY, Axis.EXCESS_TRAFFIC, Axis.CAST_TRAFFIC, Axis.LAYOUT_CONVERSION, Axis.WAVE_STARVED),
        "GELU and a product of two float16 tensors in one kernel of Inductor: 268 MB read, 134 written.",
    ),
)  # fmt: skip
