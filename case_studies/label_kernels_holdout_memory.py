"""Holdout set, first part: what the memory system does, and whole functions and libraries."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import case_studies.label_kernels_holdout_cuda  # noqa: F401  (its kernels join those that launcher() knows)
from case_studies.label_kernels import Case, axes, compiled, floats, indices
from case_studies.label_kernels_cuda import launcher
from fxopt.labels import Axis

Call = Callable[[], Any]
M = 1 << 20
SMS = 132
HALF, BF16 = torch.float16, torch.bfloat16


# --- memory_bound ---------------------------------------------------------------------------------------------------


def lerp(device: torch.device) -> Call:
    return partial(torch.lerp, *(floats(device, 64 * M, dtype=HALF, seed=k) for k in range(3)))


def fill(device: torch.device) -> Call:
    return partial(torch.full, (192 * M,), 1.5, device=device)


def rms_norm(device: torch.device) -> Call:
    def norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        v = x.float()
        return (v * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w

    return compiled(norm, floats(device, 32768, 5120, dtype=BF16), floats(device, 5120, dtype=BF16, seed=1))


def dot_product(device: torch.device) -> Call:
    from case_studies.label_kernels_holdout_triton import dot_product as kernel

    x, y = (floats(device, 132 * M, dtype=HALF, seed=k) for k in range(2))
    programs = SMS * 4
    out = torch.empty(programs, device=device)
    return partial(kernel[(programs,)], x, y, out, 132 * M // (programs * 4096), BLOCK=4096, num_warps=8)


def matvec(device: torch.device) -> Call:
    a, x, y = floats(device, 16384, 16384), floats(device, 16384, seed=1), torch.empty(16384, device=device)
    return launcher("matvec", 16384 // 8, 256, [a, x, y, 4096])


# --- l2_bound -------------------------------------------------------------------------------------------------------


def l2_chunks(device: torch.device) -> Call:
    x, y = floats(device, 40960, 128), torch.empty(SMS * 2 * 1024, device=device)
    return launcher("l2_chunks", SMS * 2, 1024, [x, y, 40960, 256])


def l2_doubles(device: torch.device) -> Call:
    x = floats(device, 3 * M // 2, dtype=torch.float64)
    y = torch.empty(SMS * 4 * 512, dtype=torch.float64, device=device)
    return launcher("l2_doubles", SMS * 4, 512, [x, y, 3 * M // 4, 320])


def table_maximum(device: torch.device) -> Call:
    from case_studies.label_kernels_holdout_triton import table_maximum as kernel

    x = indices(device, 4 * M, 1 << 30).to(torch.int32)
    y = torch.empty(SMS * 8 * 4096, dtype=torch.int32, device=device)
    return partial(kernel[(SMS * 8,)], x, y, 1024, 96, BLOCK=4096, num_warps=4)


def broadcast_minimum(device: torch.device) -> Call:
    def scores(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (torch.minimum(x[None, :, :], w[:, None, :]) * 2.0).sum(-1)

    return compiled(scores, floats(device, 5000, 1024), floats(device, 64, 1024, seed=1))


# --- excess_traffic -------------------------------------------------------------------------------------------------


def narrow_embedding(device: torch.device) -> Call:
    table, at = floats(device, 64 * M, 2, dtype=BF16), indices(device, 12 * M, 64 * M).to(torch.int32)
    return compiled(lambda table, at: F.embedding(at, table) * 2.0, table, at)


def one_channel(device: torch.device) -> Call:
    return compiled(lambda x: torch.sigmoid(x[..., 5]), floats(device, 256, 256, 256, 32, dtype=HALF))


def hashed_permutation(device: torch.device) -> Call:
    def permuted(x: torch.Tensor) -> torch.Tensor:
        at = (torch.arange(x.numel(), device=x.device) * 37190065) & (x.numel() - 1)
        return x[at] * 3.0

    return compiled(permuted, floats(device, 64 * M))


def gather_elements(device: torch.device) -> Call:
    x, at = floats(device, 4 * M, 64, dtype=BF16), indices(device, 16 * M, 4 * M).view(M // 4, 64)
    return compiled(lambda x, at: torch.gather(x, 0, at) + 1.0, x, at)


# --- layout_conversion and cast_traffic -----------------------------------------------------------------------------


def images_to_planes(device: torch.device) -> Call:
    x = indices(device, 128 * 512 * 512 * 3, 256).to(torch.uint8).view(128, 512, 512, 3)
    return compiled(lambda x: x.permute(0, 3, 1, 2).contiguous(), x)


def pixel_shuffle(device: torch.device) -> Call:
    return compiled(lambda x: F.pixel_shuffle(x, 2), floats(device, 16, 256, 128, 128, dtype=HALF))


def windows(device: torch.device) -> Call:
    def partition(x: torch.Tensor) -> torch.Tensor:
        return x.view(64, 16, 8, 16, 8, 96).permute(0, 1, 3, 2, 4, 5).contiguous()

    return compiled(partition, floats(device, 64, 128, 128, 96))


def mirrored(device: torch.device) -> Call:
    return compiled(lambda x: x.flip(2), floats(device, 64, 1000, 1200))


def to_float8(device: torch.device) -> Call:
    return compiled(lambda x: x.to(torch.float8_e4m3fn), floats(device, 96 * M))


def bytes_to_halves(device: torch.device) -> Call:
    return compiled(lambda x: x.to(HALF), indices(device, 128 * M, 256).to(torch.uint8))


def narrow_integers(device: torch.device) -> Call:
    return compiled(lambda x: x.to(torch.int32), indices(device, 48 * M, 1 << 30))


# --- launch_bound: whole functions ----------------------------------------------------------------------------------


def small_updates(device: torch.device) -> Call:
    weights = [floats(device, 64, 48, seed=k) for k in range(40)]
    gradients = [floats(device, 64, 48, seed=100 + k) for k in range(40)]
    return lambda: [w * 0.99 - g.square().sqrt() * 0.01 for w, g in zip(weights, gradients, strict=True)]


def tiny_convolutions(device: torch.device) -> Call:
    def network(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        for w in weights:
            x = x + F.silu(F.conv2d(x, w, padding=1))
        return x

    return compiled(network, floats(device, 1, 16, 32, 32), [floats(device, 16, 16, 3, 3, seed=k) for k in range(16)])


def decoder_step(device: torch.device) -> Call:
    x = floats(device, 1, 1, 256, dtype=BF16)
    qkv = [floats(device, 768, 256, dtype=BF16, seed=k) for k in range(6)]
    out = [floats(device, 256, 256, dtype=BF16, seed=10 + k) for k in range(6)]
    past = floats(device, 1, 4, 128, 64, dtype=BF16, seed=20)

    def step() -> torch.Tensor:
        y = x
        for a, b in zip(qkv, out, strict=True):
            q, k, v = (part.view(1, 1, 4, 64).transpose(1, 2) for part in F.linear(y, a).chunk(3, -1))
            k, v = torch.cat([past, k], 2), torch.cat([past, v], 2)
            y = F.layer_norm(y + F.linear(F.scaled_dot_product_attention(q, k, v).reshape(1, 1, 256), b), (256,))
        return y

    return step


def host_checks(device: torch.device) -> Call:
    x = floats(device, 64, 1024)

    def iterate() -> torch.Tensor:
        y = x
        for _ in range(24):
            y = torch.tanh(y)
            if y.abs().max().item() > 2.0:  # the host waits for the device, and the device for the host
                break
        return y

    return iterate


# --- opaque_library -------------------------------------------------------------------------------------------------


def rnn(device: torch.device) -> Call:
    with torch.random.fork_rng(devices=[device]):
        torch.manual_seed(0)
        module = nn.RNN(384, 640, num_layers=2, bidirectional=True).to(device, HALF).eval()
    return partial(module, floats(device, 48, 96, 384, dtype=HALF))


def rfft2(device: torch.device) -> Call:
    return partial(torch.fft.rfft2, floats(device, 96, 1024, 768))


def windowed_rfft(device: torch.device) -> Call:
    return compiled(lambda x, w: torch.fft.rfft(x * w), floats(device, 8192, 4096), floats(device, 4096, seed=1))


def cholesky(device: torch.device) -> Call:
    a = floats(device, 3072, 3072)
    return partial(torch.linalg.cholesky_ex, a @ a.t() + 300.0 * torch.eye(3072, device=device))


def sparse_product(device: torch.device) -> Call:
    rows, each = 65536, 32
    start = torch.arange(0, rows * each + 1, each, device=device)
    column = (torch.arange(rows * each, device=device) * 7919 % rows).view(rows, each).sort(-1).values.flatten()
    a = torch.sparse_csr_tensor(start, column, floats(device, rows * each), (rows, rows), check_invariants=False)
    return partial(torch.mm, a, floats(device, rows, 128, seed=1))


# --- tensor_core_idle -----------------------------------------------------------------------------------------------


def attention_scores(device: torch.device) -> Call:
    q, k = floats(device, 4, 16, 2048, 128), floats(device, 4, 16, 2048, 128, seed=1)
    return partial(torch.einsum, "bhqd,bhkd->bhqk", q, k)


def ragged_linear(device: torch.device) -> Call:
    x, w, b = floats(device, 5000, 2000), floats(device, 3000, 2000, seed=1), floats(device, 3000, seed=2)
    return compiled(lambda x, w, b: F.gelu(F.linear(x, w, b)), x, w, b)


def weight_gradient(device: torch.device) -> Call:
    return compiled(lambda x, g: x.t() @ g, floats(device, 16384, 2048), floats(device, 16384, 2048, seed=1))


STREAM = axes(
    Axis.COMPUTE_BOUND, Axis.LATENCY_BOUND, Axis.TENSOR_CORE_IDLE, Axis.WAVE_STARVED, Axis.REGISTER_SPILL,
    Axis.DIVERGENT,
)  # fmt: skip
CACHED = axes(Axis.MEMORY_BOUND, Axis.COMPUTE_BOUND, Axis.DIVERGENT, Axis.REGISTER_SPILL)
SCATTERED = axes(Axis.COMPUTE_BOUND, Axis.TENSOR_CORE_IDLE, Axis.CAST_TRAFFIC, Axis.REGISTER_SPILL)
MOVED = axes(Axis.CAST_TRAFFIC, Axis.TENSOR_CORE_IDLE, Axis.REGISTER_SPILL)
CAST = axes(Axis.LAYOUT_CONVERSION, Axis.TENSOR_CORE_IDLE, Axis.REGISTER_SPILL, Axis.EXCESS_TRAFFIC)
LIBRARY = axes(Axis.CAST_TRAFFIC, Axis.LAYOUT_CONVERSION, Axis.EXCESS_TRAFFIC)
FP32_PRODUCT = axes(Axis.MEMORY_BOUND, Axis.DIVERGENT, Axis.CAST_TRAFFIC, Axis.LAYOUT_CONVERSION)

CASES: tuple[Case, ...] = (
    Case(
        "lerp_eager", Axis.MEMORY_BOUND, lerp, axes(Axis.MEMORY_BOUND), STREAM,
        "Three float16 tensors of 128 MB read, one written: 537 MB, 128 us. About 15 instructions per 8 bytes, where "
        "64 would take as long.",
    ),
    Case(
        "fill_eager", Axis.MEMORY_BOUND, fill, axes(Axis.MEMORY_BOUND), STREAM,
        "805 MB written, nothing read, nothing computed; L2 could hold a thirteenth of it.",
    ),
    Case(
        "rms_norm_compiled", Axis.MEMORY_BOUND, rms_norm, axes(Axis.MEMORY_BOUND),
        STREAM | axes(Axis.EXCESS_TRAFFIC, Axis.CAST_TRAFFIC, Axis.LAYOUT_CONVERSION),
        "336 MB in, 336 MB out: 160 us. Rows of 10 KB are still in a cache when they are read again; some 10 "
        "instructions per 4 bytes, where 32 would take as long.",
    ),
    Case(
        "dot_product_triton", Axis.MEMORY_BOUND, dot_product, axes(Axis.MEMORY_BOUND),
        STREAM | axes(Axis.L2_BOUND, Axis.OCCUPANCY_LIMITED),
        "Two float16 vectors of 277 MB read once, 132 us: a multiplication and an addition per 4 bytes. Four loads of "
        "16 bytes in flight a thread and 32 warps an SM are 8.6 MB under way, of which 3 MB would do.",
        kernel="dot_product",
    ),
    Case(
        "matvec_cuda", Axis.MEMORY_BOUND, matvec, axes(Axis.MEMORY_BOUND), STREAM,
        "A float32 matrix of 1.07 GB times a vector of 64 KB: half an operation a byte, 256 us of memory, 11 of "
        "arithmetic.", kernel="matvec",
    ),
    Case(
        "l2_chunks_cuda", Axis.L2_BOUND, l2_chunks, axes(Axis.L2_BOUND), CACHED,
        "Warps read 512 bytes at random places of 21 MB, 1.1 GB in all: L1 holds a hundredth of the table, L2 all of "
        "it. About 14 instructions per 16 bytes; 85 would take as long. 64 warps with eight loads in flight each.",
        kernel="l2_chunks",
    ),
    Case(
        "l2_doubles_cuda", Axis.L2_BOUND, l2_doubles, axes(Axis.L2_BOUND), CACHED,
        "12.6 MB of float64 read 110 times with L1::no_allocate: 1.4 GB from L2, one percent of it from memory. Two "
        "additions per 16 bytes: 3 a cycle and SM at L2's speed, of 64.", kernel="l2_doubles",
    ),
    Case(
        "table_maximum_triton", Axis.L2_BOUND, table_maximum, axes(Axis.L2_BOUND), CACHED,
        "A table of 16.8 MB, of which each of 1056 programs reads 96 tiles of 16 KB: 1.7 GB from L2. Programs of one "
        "SM are 80 tiles apart or more, where L1 holds 15. One or two instructions per 4 bytes; 20 would take as long.",
        kernel="table_maximum",
    ),
    Case(
        "broadcast_minimum_compiled", Axis.L2_BOUND, broadcast_minimum, axes(Axis.L2_BOUND),
        axes(Axis.MEMORY_BOUND, Axis.DIVERGENT, Axis.REGISTER_SPILL, Axis.TENSOR_CORE_IDLE),
        "64 sums over each of 5000 rows, row after row: 20.5 MB are read 64 times, 1.3 GB from L2 and 22 MB from "
        "memory; between two readings of a row an SM reads 155 KB and seldom the same rows. 4 instructions per 4 "
        "bytes, where 20 would take as long.",
    ),
    Case(
        "narrow_embedding_compiled", Axis.EXCESS_TRAFFIC, narrow_embedding, axes(Axis.EXCESS_TRAFFIC), SCATTERED,
        "12.6 M random rows of 4 bytes from 268 MB: 50 MB of indices, 50 used, 50 written; the rows lie in sectors of "
        "32 bytes, 403 MB, of which L2 holds a fifth at most: 420 MB or more, 2.8 times what is needed.",
    ),
    Case(
        "one_channel_compiled", Axis.EXCESS_TRAFFIC, one_channel, axes(Axis.EXCESS_TRAFFIC), SCATTERED,
        "One channel of 32 in float16: 34 MB are used and 34 written, out of as many sectors of 32 bytes, 537 MB: 8 "
        "times, and 135 us.",
    ),
    Case(
        "hashed_permutation_compiled", Axis.EXCESS_TRAFFIC, hashed_permutation, axes(Axis.EXCESS_TRAFFIC),
        SCATTERED - axes(Axis.COMPUTE_BOUND),
        "A permutation computed in the kernel: 268 MB in, 268 out. Neighbours of a sector are needed 6.2 M elements "
        "apart or more, after 198 MB of other sectors: each of 67 M elements brings 32 bytes, 2.1 GB, 4.5 times in "
        "all.",
    ),
    Case(
        "gather_elements_compiled", Axis.EXCESS_TRAFFIC, gather_elements, axes(Axis.EXCESS_TRAFFIC), SCATTERED,
        "16.8 M elements of 2 bytes out of 537 MB, each from a row of its own: 134 MB of indices, 34 used, 34 written; "
        "with sectors of 32 bytes 705 MB, 3.5 times what is needed.",
    ),
    Case(
        "images_to_planes_compiled", Axis.LAYOUT_CONVERSION, images_to_planes, axes(Axis.LAYOUT_CONVERSION), MOVED,
        "Bytes of 128 images from interleaved to planes: 101 MB in another order.",
    ),
    Case(
        "pixel_shuffle_compiled", Axis.LAYOUT_CONVERSION, pixel_shuffle, axes(Axis.LAYOUT_CONVERSION), MOVED,
        "Four channels become the pixels of a square of 2 x 2: 134 MB in another order.",
    ),
    Case(
        "windows_compiled", Axis.LAYOUT_CONVERSION, windows, axes(Axis.LAYOUT_CONVERSION),
        MOVED | axes(Axis.COMPUTE_BOUND),
        "Windows of 8 x 8 pixels put together: 403 MB in another order, in runs of 3 KB.",
    ),
    Case(
        "mirrored_compiled", Axis.LAYOUT_CONVERSION, mirrored, axes(Axis.LAYOUT_CONVERSION),
        MOVED | axes(Axis.COMPUTE_BOUND),
        "Rows back to front: 307 MB in another order, nothing computed.",
    ),
    Case(
        "to_float8_compiled", Axis.CAST_TRAFFIC, to_float8, axes(Axis.CAST_TRAFFIC), CAST,
        "float32 to float8: 403 MB read, 101 written, nothing else.",
    ),
    Case(
        "bytes_to_halves_compiled", Axis.CAST_TRAFFIC, bytes_to_halves, axes(Axis.CAST_TRAFFIC), CAST,
        "uint8 to float16: 134 MB read, 268 written, nothing else.",
    ),
    Case(
        "narrow_integers_compiled", Axis.CAST_TRAFFIC, narrow_integers, axes(Axis.CAST_TRAFFIC), CAST,
        "int64 to int32: 403 MB read, 201 written, nothing else.",
    ),
    Case(
        "small_updates_eager", Axis.LAUNCH_BOUND, small_updates, axes(Axis.LAUNCH_BOUND), axes(),
        "200 operators on 3072 values, eager: 1 to 2 us of kernel each, and 4 us or more to dispatch.", scope="graph",
    ),
    Case(
        "tiny_convolutions_compiled", Axis.LAUNCH_BOUND, tiny_convolutions, axes(Axis.LAUNCH_BOUND), axes(),
        "16 convolutions of 4.7 MFLOP each, 2 to 5 us, which take 15 us or more to call through cuDNN.", scope="graph",
    ),
    Case(
        "decoder_step_eager", Axis.LAUNCH_BOUND, decoder_step, axes(Axis.LAUNCH_BOUND), axes(),
        "One token through six layers of width 256, eager: some 50 kernels of 2 to 4 us, and as many operators of 5 to "
        "20 us with their views.", scope="graph",
    ),
    Case(
        "host_checks_eager", Axis.LAUNCH_BOUND, host_checks, axes(Axis.LAUNCH_BOUND), axes(),
        "Three kernels of 2 to 3 us and a copy, then the host reads the result and only then goes on: 25 us or more a "
        "round.", scope="graph",
    ),
    Case(
        "rnn_cudnn_eager", Axis.OPAQUE_LIBRARY, rnn, axes(Axis.OPAQUE_LIBRARY), LIBRARY,
        "Two layers in both directions, one operator, behind which cuDNN runs kernels of its own.",
    ),
    Case(
        "rfft2_cufft_eager", Axis.OPAQUE_LIBRARY, rfft2, axes(Axis.OPAQUE_LIBRARY), LIBRARY,
        "96 real transforms of 1024 x 768 by cuFFT, in several kernels.",
    ),
    Case(
        "windowed_rfft_compiled", Axis.OPAQUE_LIBRARY, windowed_rfft, axes(Axis.OPAQUE_LIBRARY), LIBRARY,
        "A transform in a compiled graph: Inductor calls cuFFT, whose kernel is in question, not the product before "
        "it.", kernel="^(?!triton)",
    ),
    Case(
        "cholesky_cusolver_eager", Axis.OPAQUE_LIBRARY, cholesky, axes(Axis.OPAQUE_LIBRARY), LIBRARY,
        "A factorisation of side 3072 by cuSOLVER, which calls kernels of its own and of cuBLAS; torch's copies and "
        "its zeroing of the upper half are not in question.", kernel="^(?!.*(elementwise|triu_tril|at::native))",
    ),
    Case(
        "sparse_product_cusparse_eager", Axis.OPAQUE_LIBRARY, sparse_product, axes(Axis.OPAQUE_LIBRARY), LIBRARY,
        "A sparse matrix (CSR, 2.1 M values) times 128 columns by cuSPARSE: 0.5 GFLOP, 1 GB through the caches.",
        kernel="^(?!.*at::native)",
    ),
    Case(
        "attention_scores_fp32_eager", Axis.TENSOR_CORE_IDLE, attention_scores, axes(Axis.TENSOR_CORE_IDLE),
        FP32_PRODUCT,
        "64 products of 2048 x 128 x 2048 without TF32: 69 GFLOP, 1.35 ms of FMAs against 0.29 of memory for 1.2 GB; "
        "in bfloat16 0.09 and 0.14.",
    ),
    Case(
        "ragged_linear_fp32_compiled", Axis.TENSOR_CORE_IDLE, ragged_linear, axes(Axis.TENSOR_CORE_IDLE), FP32_PRODUCT,
        "5000 x 2000 x 3000 without TF32: 60 GFLOP, 1.2 ms of FMAs, 0.08 of bfloat16 tensor cores, 0.03 of memory; "
        "GELU after it takes 0.03.", kernel="^(?!triton)",
    ),
    Case(
        "weight_gradient_fp32_compiled", Axis.TENSOR_CORE_IDLE, weight_gradient, axes(Axis.TENSOR_CORE_IDLE),
        FP32_PRODUCT,
        "2048 x 16384 x 2048 from a transposed operand without TF32: 137 GFLOP, 2.7 ms of FMAs, 0.17 of bfloat16 "
        "tensor cores, 0.07 of memory.",
    ),
)  # fmt: skip
