"""Development set, first part: what the memory system does, and whole functions and libraries."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from case_studies.label_kernels import Case, axes, compiled, cycle, floats, indices
from case_studies.label_kernels_cuda import launcher
from fxopt.labels import Axis

Call = Callable[[], Any]
M = 1 << 20

# What no kernel shows that streams through device memory with warps enough.
NOT_STREAMING = axes(
    Axis.COMPUTE_BOUND, Axis.L2_BOUND, Axis.LATENCY_BOUND, Axis.TENSOR_CORE_IDLE, Axis.OCCUPANCY_LIMITED,
    Axis.WAVE_STARVED, Axis.REGISTER_SPILL, Axis.DIVERGENT,
)  # fmt: skip


# --- memory_bound ---------------------------------------------------------------------------------------------------


def scale_add(device: torch.device) -> Call:
    return compiled(lambda x: x * 2.0 + 1.0, floats(device, 64 * M))


def row_sums(device: torch.device) -> Call:
    return compiled(lambda x: x.sum(dim=1), floats(device, 32768, 4096))


def eager_add(device: torch.device) -> Call:
    return partial(torch.add, floats(device, 64 * M), floats(device, 64 * M, seed=1))


def stream_copy(device: torch.device) -> Call:
    x = floats(device, 64 * M)
    return launcher("stream_copy", 132 * 8, 256, [x, torch.empty_like(x), 16 * M])


# --- l2_bound: 16 MB, which L2 holds twice over (each of its halves keeps a copy), and 1 GB of traffic ---------------


def l2_reads(device: torch.device) -> Call:
    x, y = floats(device, 4 * M), torch.empty(256 * 1024, device=device)
    return launcher("l2_reads", 256, 1024, [x, y, M - 1, 256])


def l2_copies(device: torch.device) -> Call:
    x = floats(device, 2 * M)
    return launcher("l2_copies", 256, 1024, [x, torch.empty_like(x), M // 2 - 1, 128])


def l2_sectors(device: torch.device) -> Call:
    x, y = floats(device, 4 * M), torch.empty(256 * 1024, device=device)
    return launcher("l2_sectors", 256, 1024, [x, y, 4 * M - 1, 128])


def l2_triton(device: torch.device) -> Call:
    from case_studies.label_kernels_triton import cached_sum

    x, y = floats(device, 2048 * 2048), torch.empty(132 * 6 * 2048, device=device)
    return partial(cached_sum[(132 * 6,)], x, y, 2048, 192, BLOCK=2048, num_warps=8)


# --- excess_traffic -------------------------------------------------------------------------------------------------


def strided_columns(device: torch.device) -> Call:
    return compiled(lambda x: x[:, ::16] * 2.0, floats(device, 16384, 8192))


def random_elements(device: torch.device) -> Call:
    return compiled(lambda x, at: x[at] + 1.0, floats(device, 128 * M), indices(device, 16 * M, 128 * M))


def random_columns(device: torch.device) -> Call:
    return compiled(lambda x, at: x[:, at] * 0.5, floats(device, 16384, 16384), indices(device, 1024, 16384))


# --- layout_conversion and cast_traffic -----------------------------------------------------------------------------


def transpose(device: torch.device) -> Call:
    return compiled(lambda x: x.t().contiguous(), floats(device, 8192, 8192))


def channels_last(device: torch.device) -> Call:
    return compiled(lambda x: x.contiguous(memory_format=torch.channels_last), floats(device, 64, 256, 56, 56))


def merge_heads(device: torch.device) -> Call:
    return compiled(lambda x: x.transpose(1, 2).reshape(8, 2048, 2048), floats(device, 8, 32, 2048, 64))


def cast_down(device: torch.device) -> Call:
    return compiled(lambda x: x.to(torch.bfloat16), floats(device, 64 * M))


def cast_up(device: torch.device) -> Call:
    return compiled(lambda x: x.to(torch.float32), floats(device, 64 * M, dtype=torch.bfloat16))


def cast_weight(device: torch.device) -> Call:
    x = floats(device, 64, 8192, dtype=torch.bfloat16)
    return compiled(lambda x, w: x @ w.to(torch.bfloat16), x, floats(device, 8192, 8192, seed=1))


# --- launch_bound: whole functions ----------------------------------------------------------------------------------


def tiny_products(device: torch.device) -> Call:
    def chain(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        for w in weights:
            x = torch.relu(x @ w)
        return x

    return compiled(chain, floats(device, 16, 64), [floats(device, 64, 64, seed=k) for k in range(24)])


def tiny_eager(device: torch.device) -> Call:
    x = floats(device, 1024)

    def chain() -> torch.Tensor:
        y = x
        for _ in range(60):
            y = y * 0.5
        return y

    return chain


def tiny_mlp(device: torch.device) -> Call:
    def mlp(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        for w in weights:
            x = x + F.gelu(F.layer_norm(x, (128,)) @ w)
        return x

    weights = [floats(device, 128, 128, dtype=torch.bfloat16, seed=k) for k in range(12)]
    return compiled(mlp, floats(device, 8, 128, dtype=torch.bfloat16), weights)


# --- opaque_library -------------------------------------------------------------------------------------------------


def _recurrent(make: Callable[..., nn.Module], device: torch.device) -> Call:
    with torch.random.fork_rng(devices=[device]):
        torch.manual_seed(0)
        module = make(512, 512).to(device).eval()
    return partial(module, floats(device, 32, 64, 512))


def lstm(device: torch.device) -> Call:
    return _recurrent(nn.LSTM, device)


def gru(device: torch.device) -> Call:
    return _recurrent(nn.GRU, device)


def fft(device: torch.device) -> Call:
    return partial(torch.fft.fft, torch.complex(floats(device, 8192, 4096), floats(device, 8192, 4096, seed=1)))


# --- latency_bound, in memory ---------------------------------------------------------------------------------------


def pointer_chase(device: torch.device) -> Call:
    y = torch.empty(132 * 32, dtype=torch.int32, device=device)
    return launcher("pointer_chase", 132, 32, [cycle(device, 64 * M), y, 64 * M, 1000])


def gather_chain(device: torch.device) -> Call:
    from case_studies.label_kernels_triton import gather_chain as kernel

    y = torch.empty(264 * 32, dtype=torch.int32, device=device)
    return partial(kernel[(264,)], cycle(device, 64 * M), y, 1000, BLOCK=32, num_warps=1)


NOT_CASTING = axes(Axis.COMPUTE_BOUND, Axis.TENSOR_CORE_IDLE, Axis.REGISTER_SPILL, Axis.DIVERGENT, Axis.LATENCY_BOUND)
NOT_CHASING = axes(Axis.MEMORY_BOUND, Axis.L2_BOUND, Axis.COMPUTE_BOUND, Axis.REGISTER_SPILL, Axis.DIVERGENT)

CASES: tuple[Case, ...] = (
    Case(
        "scale_add_compiled", Axis.MEMORY_BOUND, scale_add, axes(Axis.MEMORY_BOUND),
        NOT_STREAMING | axes(Axis.EXCESS_TRAFFIC, Axis.CAST_TRAFFIC, Axis.LAYOUT_CONVERSION),
        "256 MB read, 256 MB written, one FMA per 8 bytes: 128 us at the copy rate, 3 us of float32.",
    ),
    Case(
        "row_sums_compiled", Axis.MEMORY_BOUND, row_sums, axes(Axis.MEMORY_BOUND),
        NOT_STREAMING | axes(Axis.EXCESS_TRAFFIC),
        "512 MB read once, one addition per 4 bytes.",
    ),
    Case(
        "add_eager", Axis.MEMORY_BOUND, eager_add, axes(Axis.MEMORY_BOUND), NOT_STREAMING,
        "torch's own kernel: 512 MB read, 256 MB written, one addition per 12 bytes.",
    ),
    Case(
        "stream_copy_cuda", Axis.MEMORY_BOUND, stream_copy, axes(Axis.MEMORY_BOUND), NOT_STREAMING,
        "256 MB to 256 MB in 16-byte loads, 64 warps on every SM.", kernel="stream_copy",
    ),
    Case(
        "l2_reads_cuda", Axis.L2_BOUND, l2_reads, axes(Axis.L2_BOUND), axes(Axis.MEMORY_BOUND, Axis.COMPUTE_BOUND),
        "16 MB read 64 times past L1 (ld.global.cg) in 16-byte loads: 1 GB from L2, 16 MB from memory at most; four "
        "additions per 16 bytes.", kernel="l2_reads",
    ),
    Case(
        "l2_copies_cuda", Axis.L2_BOUND, l2_copies, axes(Axis.L2_BOUND), axes(Axis.MEMORY_BOUND, Axis.COMPUTE_BOUND),
        "8 MB copied to 8 MB 64 times over: 0.5 GB read from L2 and as much written to it, where it stays.",
        kernel="l2_copies",
    ),
    Case(
        "l2_sectors_cuda", Axis.L2_BOUND, l2_sectors, axes(Axis.L2_BOUND), axes(Axis.MEMORY_BOUND, Axis.COMPUTE_BOUND),
        "4 bytes of each 32-byte sector of 16 MB, 64 times: 1 GB of sectors from L2.", kernel="l2_sectors",
    ),
    Case(
        "l2_sum_triton", Axis.L2_BOUND, l2_triton, axes(Axis.L2_BOUND), axes(Axis.MEMORY_BOUND, Axis.COMPUTE_BOUND),
        "As l2_reads_cuda, from Triton: 1.2 GB from L2 out of 16 MB.", kernel="cached_sum",
    ),
    Case(
        "strided_columns_compiled", Axis.EXCESS_TRAFFIC, strided_columns, axes(Axis.EXCESS_TRAFFIC),
        axes(Axis.COMPUTE_BOUND, Axis.TENSOR_CORE_IDLE, Axis.CAST_TRAFFIC),
        "Every 16th float: 34 MB are used and 34 written, but a sector of 32 bytes holds one of them: 268 MB read.",
    ),
    Case(
        "random_elements_compiled", Axis.EXCESS_TRAFFIC, random_elements, axes(Axis.EXCESS_TRAFFIC),
        axes(Axis.COMPUTE_BOUND, Axis.TENSOR_CORE_IDLE, Axis.CAST_TRAFFIC),
        "16 M random floats out of 512 MB: 134 MB of indices, 67 MB used, 67 MB written; 16 M sectors are 537 MB, ten "
        "times what L2 holds.",
    ),
    Case(
        "random_columns_compiled", Axis.EXCESS_TRAFFIC, random_columns, axes(Axis.EXCESS_TRAFFIC),
        axes(Axis.COMPUTE_BOUND, Axis.TENSOR_CORE_IDLE, Axis.CAST_TRAFFIC),
        "1024 of 16384 columns at random: 67 MB are used and 67 written; they lie in about 806 of a row's 2048 "
        "sectors, 423 MB.",
    ),
    Case(
        "transpose_compiled", Axis.LAYOUT_CONVERSION, transpose, axes(Axis.LAYOUT_CONVERSION),
        axes(Axis.COMPUTE_BOUND, Axis.CAST_TRAFFIC, Axis.TENSOR_CORE_IDLE, Axis.REGISTER_SPILL),
        "256 MB copied to another order, nothing computed.",
    ),
    Case(
        "channels_last_compiled", Axis.LAYOUT_CONVERSION, channels_last, axes(Axis.LAYOUT_CONVERSION),
        axes(Axis.COMPUTE_BOUND, Axis.CAST_TRAFFIC, Axis.TENSOR_CORE_IDLE, Axis.REGISTER_SPILL),
        "NCHW to NHWC: 205 MB copied to another order.",
    ),
    Case(
        "merge_heads_compiled", Axis.LAYOUT_CONVERSION, merge_heads, axes(Axis.LAYOUT_CONVERSION),
        axes(Axis.COMPUTE_BOUND, Axis.CAST_TRAFFIC, Axis.TENSOR_CORE_IDLE, Axis.REGISTER_SPILL),
        "The heads of attention put next to each other: 134 MB copied to another order.",
    ),
    Case(
        "cast_down_compiled", Axis.CAST_TRAFFIC, cast_down, axes(Axis.CAST_TRAFFIC),
        NOT_CASTING | axes(Axis.LAYOUT_CONVERSION),
        "float32 to bfloat16: 256 MB read, 128 MB written, nothing else.",
    ),
    Case(
        "cast_up_compiled", Axis.CAST_TRAFFIC, cast_up, axes(Axis.CAST_TRAFFIC),
        NOT_CASTING | axes(Axis.LAYOUT_CONVERSION),
        "bfloat16 to float32: 128 MB read, 256 MB written, nothing else.",
    ),
    Case(
        "cast_weight_compiled", Axis.CAST_TRAFFIC, cast_weight, axes(Axis.CAST_TRAFFIC),
        NOT_CASTING | axes(Axis.LAYOUT_CONVERSION),
        "A float32 weight is cast on every call, by a kernel of its own before the product: 256 MB read, 128 written.",
        kernel="^triton_",
    ),
    Case(
        "tiny_products_compiled", Axis.LAUNCH_BOUND, tiny_products, axes(Axis.LAUNCH_BOUND), axes(),
        "48 kernels of about 2 us (16 x 64 x 64 products and what follows them), each launched in more than 4 us.",
        scope="graph",
    ),
    Case(
        "tiny_eager", Axis.LAUNCH_BOUND, tiny_eager, axes(Axis.LAUNCH_BOUND), axes(),
        "60 operators on 1024 values, eager: 1 to 2 us of kernel each, and 4 us or more to dispatch.", scope="graph",
    ),
    Case(
        "tiny_mlp_compiled", Axis.LAUNCH_BOUND, tiny_mlp, axes(Axis.LAUNCH_BOUND), axes(),
        "12 layers of width 128 on 8 rows: two or three kernels of 2 to 3 us a layer.", scope="graph",
    ),
    Case(
        "lstm_cudnn_eager", Axis.OPAQUE_LIBRARY, lstm, axes(Axis.OPAQUE_LIBRARY),
        axes(Axis.CAST_TRAFFIC, Axis.LAYOUT_CONVERSION, Axis.EXCESS_TRAFFIC),
        "One operator, aten::_cudnn_rnn, behind which cuDNN runs kernels of its own.",
    ),
    Case(
        "gru_cudnn_eager", Axis.OPAQUE_LIBRARY, gru, axes(Axis.OPAQUE_LIBRARY),
        axes(Axis.CAST_TRAFFIC, Axis.LAYOUT_CONVERSION, Axis.EXCESS_TRAFFIC),
        "As lstm_cudnn_eager.",
    ),
    Case(
        "fft_cufft_eager", Axis.OPAQUE_LIBRARY, fft, axes(Axis.OPAQUE_LIBRARY),
        axes(Axis.CAST_TRAFFIC, Axis.LAYOUT_CONVERSION, Axis.EXCESS_TRAFFIC),
        "8192 transforms of 4096 complex values by cuFFT.",
    ),
    Case(
        "pointer_chase_cuda", Axis.LATENCY_BOUND, pointer_chase, axes(Axis.LATENCY_BOUND), NOT_CHASING,
        "One warp on each SM, each load at the address that the last one gave, in 256 MB: 32 sectors in about 800 ns, "
        "170 GB/s from all SMs together.", kernel="pointer_chase",
    ),
    Case(
        "gather_chain_triton", Axis.LATENCY_BOUND, gather_chain, axes(Axis.LATENCY_BOUND), NOT_CHASING,
        "As pointer_chase_cuda, from Triton, with two warps an SM.", kernel="gather_chain",
    ),
)  # fmt: skip
