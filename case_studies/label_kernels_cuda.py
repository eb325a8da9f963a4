"""CUDA kernels, each written so that one thing limits it. They are compiled for the device at hand by NVRTC.

What a kernel depends on (registers, local memory, loops that stay loops, loads in flight) is fixed by launch bounds,
``#pragma unroll``, volatile loads and pointers that may alias.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

SOURCES: dict[str, str] = {}


def source(name: str, body: str) -> None:
    """Adds a kernel to :data:`SOURCES`; ``body`` begins with its launch bounds, if any, and its name."""
    SOURCES[name] = f'extern "C" __global__ void {body.strip()}\n'


def launcher(
    name: str, grid: int, block: int, args: Sequence[torch.Tensor | int], shared: int = 0
) -> Callable[[], None]:
    """A function that launches the kernel ``name`` of :data:`SOURCES` on the current stream.

    ``shared`` is dynamic shared memory in bytes. Raises RuntimeError with NVRTC's log where a source does not compile.
    """
    # torch.cuda._compile_kernel (torch 2.9 and later) is private; nothing else here uses it.
    kernel: Any = torch.cuda._compile_kernel(SOURCES[name], name)
    kernel.set_shared_memory_config(shared)
    return partial(kernel, (grid, 1, 1), (block, 1, 1), list(args), shared)


# --- memory, L2, arithmetic ----------------------------------------------------------------------------------------

source(
    "stream_copy",
    """stream_copy(const float4* __restrict__ x, float4* __restrict__ y, int n) {
    int step = gridDim.x * blockDim.x;
    #pragma unroll 4
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) y[i] = x[i];
}""",
)
# .cg keeps the loads out of L1. The start moves by a round, so that no load can be lifted out of the loop.
source(
    "l2_reads",
    """l2_reads(const float4* __restrict__ x, float* __restrict__ y, int mask, int rounds) {
    int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    float s = 0.f;
    #pragma unroll 8
    for (int r = 0; r < rounds; ++r) {
        float4 v = __ldcg(x + ((first + r * step) & mask));
        s += (v.x + v.y) + (v.z + v.w);
    }
    y[first] = s;
}""",
)
source(
    "l2_copies",
    """l2_copies(const float4* __restrict__ x, float4* __restrict__ y, int mask, int rounds) {
    int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    #pragma unroll 8
    for (int r = 0; r < rounds; ++r) {
        int i = (first + r * step) & mask;
        __stcg(y + i, __ldcg(x + i));
    }
}""",
)
# One float of each 32-byte sector: L2 sends eight times what is used.
source(
    "l2_sectors",
    """l2_sectors(const float* __restrict__ x, float* __restrict__ y, int mask, int rounds) {
    int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    float s = 0.f;
    #pragma unroll 8
    for (int r = 0; r < rounds; ++r) s += __ldcg(x + (((first + r * step) * 8) & mask));
    y[first] = s;
}""",
)
# Eight independent chains a thread, and warps enough: the FMA pipe is never without work.
source(
    "fma_chains",
    """__launch_bounds__(1024, 2) fma_chains(float* __restrict__ y, int rounds) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float c = i * 1e-9f, r[8];
    #pragma unroll
    for (int k = 0; k < 8; ++k) r[k] = c + k;
    #pragma unroll 8
    for (int n = 0; n < rounds; ++n) {
        #pragma unroll
        for (int k = 0; k < 8; ++k) r[k] = fmaf(r[k], 0.999f, c);
    }
    float s = 0.f;
    #pragma unroll
    for (int k = 0; k < 8; ++k) s += r[k];
    y[i] = s;
}""",
)
# xorshift on four independent words: shifts and logic, which the ALU pipe runs.
source(
    "integer_hash",
    """integer_hash(unsigned* __restrict__ y, int rounds) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x, r[4];
    #pragma unroll
    for (int k = 0; k < 4; ++k) r[k] = i * 4 + k + 1;
    #pragma unroll 4
    for (int n = 0; n < rounds; ++n) {
        #pragma unroll
        for (int k = 0; k < 4; ++k) { r[k] ^= r[k] << 13; r[k] ^= r[k] >> 17; r[k] ^= r[k] << 5; }
    }
    y[i] = r[0] ^ r[1] ^ r[2] ^ r[3];
}""",
)

# --- latency --------------------------------------------------------------------------------------------------------

source(
    "pointer_chase",
    """pointer_chase(const int* __restrict__ next, int* __restrict__ y, int n, int steps) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    int at = (int)((i * 2654435761u) % (unsigned)n);
    #pragma unroll 1
    for (int k = 0; k < steps; ++k) at = next[at];
    y[i] = at;
}""",
)
# table[i] = i + 32, so that a lane stays in its bank.
source(
    "shared_chase",
    """shared_chase(int* __restrict__ y, int steps) {
    __shared__ int table[1024];
    for (int i = threadIdx.x; i < 1024; i += blockDim.x) table[i] = (i + 32) & 1023;
    __syncthreads();
    int at = threadIdx.x & 1023;
    #pragma unroll 4
    for (int k = 0; k < steps; ++k) at = table[at];
    y[blockIdx.x * blockDim.x + threadIdx.x] = at;
}""",
)
# Seven warps of eight wait at a barrier for the first, which follows a chain.
source(
    "waiting_warps",
    """waiting_warps(int* __restrict__ y, int rounds) {
    __shared__ int table[1024];
    for (int i = threadIdx.x; i < 1024; i += blockDim.x) table[i] = (i + 32) & 1023;
    __syncthreads();
    int at = threadIdx.x;
    #pragma unroll 1
    for (int r = 0; r < rounds; ++r) {
        if (threadIdx.x < 32) {
            #pragma unroll 1
            for (int k = 0; k < 64; ++k) at = table[at];
        }
        __syncthreads();
    }
    y[blockIdx.x * blockDim.x + threadIdx.x] = at;
}""",
)

# --- occupancy: one load in flight a thread, so that bandwidth goes with the number of warps ------------------------

source(
    "shared_hog",
    """shared_hog(const float* __restrict__ x, float* __restrict__ y, int n) {
    extern __shared__ float scratch[];
    scratch[threadIdx.x] = 1.f;
    #pragma unroll 1
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        y[i] = x[i] * scratch[threadIdx.x];
}""",
)
# Volatile loads stay before the loop, and their values are used after it: 200 registers are taken meanwhile.
source(
    "register_hog",
    """__launch_bounds__(128) register_hog(const float* __restrict__ x, float* __restrict__ y, int n) {
    const volatile float* first = x;
    float held[200], total = 0.f, s = 0.f;
    #pragma unroll
    for (int k = 0; k < 200; ++k) held[k] = first[k];
    #pragma unroll 1
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        float v = x[i];
        total += v;
        y[i] = v * 2.f;
    }
    #pragma unroll
    for (int k = 0; k < 200; ++k) s = fmaf(s, total, held[k]);
    if (s == -1.f) y[0] = s;
}""",
)
source(
    "one_load_each",
    """one_load_each(const float* __restrict__ x, float* __restrict__ y, int n) {
    #pragma unroll 1
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) y[i] = x[i] * 2.f;
}""",
)
# Few warps, but sixteen independent 16-byte loads in each thread: memory is kept busy all the same. Without
# __restrict__ no load may move behind a store.
source(
    "many_loads_each",
    """__launch_bounds__(128) many_loads_each(const float4* x, float4* y, int n) {
    int step = 16 * gridDim.x * 128;
    #pragma unroll 1
    for (int i = 16 * blockIdx.x * 128 + threadIdx.x; i < n; i += step) {
        float4 v[16];
        #pragma unroll
        for (int k = 0; k < 16; ++k) v[k] = x[i + k * 128];
        #pragma unroll
        for (int k = 0; k < 16; ++k) y[i + k * 128] = v[k];
    }
}""",
)
source(
    "grid_sum",
    """grid_sum(const float* __restrict__ x, float* __restrict__ y, int n) {
    float s = 0.f;
    #pragma unroll 4
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) s += x[i];
    y[blockIdx.x * blockDim.x + threadIdx.x] = s;
}""",
)

# --- local memory ---------------------------------------------------------------------------------------------------

# 96 values are alive at once in 32 registers.
source(
    "spilled_ring",
    """__launch_bounds__(512, 4) spilled_ring(const float* __restrict__ x, float* __restrict__ y, int rounds) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float r[96];
    #pragma unroll
    for (int k = 0; k < 96; ++k) r[k] = x[i] + k;
    #pragma unroll 1
    for (int n = 0; n < rounds; ++n) {
        #pragma unroll
        for (int k = 0; k < 96; ++k) r[k] = fmaf(r[k], 0.5f, r[(k + 37) % 96]);
    }
    float s = 0.f;
    #pragma unroll
    for (int k = 0; k < 96; ++k) s += r[k];
    y[i] = s;
}""",
)
# A tile of 16 x 16 sums a thread takes 256 registers for its sums alone; a thread has 255.
source(
    "spilled_tile",
    """__launch_bounds__(128) spilled_tile(const float* __restrict__ x, float* __restrict__ y, int rounds) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float c[16][16];
    #pragma unroll
    for (int a = 0; a < 16; ++a)
        #pragma unroll
        for (int b = 0; b < 16; ++b) c[a][b] = 0.f;
    #pragma unroll 1
    for (int n = 0; n < rounds; ++n) {
        float u[16], v[16];
        #pragma unroll
        for (int a = 0; a < 16; ++a) { u[a] = x[(i + n + a) & 4095]; v[a] = x[(i + n + 64 + a) & 4095]; }
        #pragma unroll
        for (int a = 0; a < 16; ++a)
            #pragma unroll
            for (int b = 0; b < 16; ++b) c[a][b] = fmaf(u[a], v[b], c[a][b]);
    }
    float s = 0.f;
    #pragma unroll
    for (int a = 0; a < 16; ++a)
        #pragma unroll
        for (int b = 0; b < 16; ++b) s = fmaf(c[a][b], 1.f + a + 16 * b, s);
    y[i] = s;
}""",
)
# A private array that is indexed at run time cannot be in registers.
source(
    "private_histogram",
    """private_histogram(const unsigned* __restrict__ x, unsigned* __restrict__ y, int mask, int rounds) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned count[64];
    #pragma unroll
    for (int k = 0; k < 64; ++k) count[k] = 0;
    #pragma unroll 1
    for (int n = 0; n < rounds; ++n) count[(x[(i + n * 32) & mask] + i) & 63] += 1;
    unsigned s = 0;
    #pragma unroll
    for (int k = 0; k < 64; ++k) s = s * 31 + count[k];
    y[i] = s;
}""",
)

# --- divergence -----------------------------------------------------------------------------------------------------

# A warp's lanes take eight branches, each a loop of its own; a grain of 32 instead of 1 gives each warp one branch.
source(
    "branches",
    """branches(float* __restrict__ y, int rounds, int grain) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float r = 1.f + i * 1e-6f;
    switch ((i / grain) & 7) {
        #define LOOP(number, step) case number: \\
            _Pragma("unroll 1") for (int k = 0; k < rounds; ++k) { step; } break;
        LOOP(0, r = fmaf(r, 0.9f, 0.1f))
        LOOP(1, r = r * 0.5f + 1.f / (r + 2.f))
        LOOP(2, r = fabsf(r - 1.5f) * 1.1f)
        LOOP(3, r = fminf(r * 1.3f, 2.f) - 0.2f)
        LOOP(4, r = sqrtf(r + 1.f))
        LOOP(5, r = fmaxf(r * 0.7f, 0.1f) + 0.3f)
        LOOP(6, r = r * r * 0.25f + 0.5f)
        LOOP(7, r = exp2f(-r) + 0.5f)
    }
    y[i] = r;
}""",
)
# Rejection sampling with one chance in 32: a warp runs until its unluckiest lane is done, about four times the mean.
source(
    "rejection",
    """rejection(unsigned* __restrict__ y, int rounds) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x, v = i * 2654435761u + 1u, total = 0;
    #pragma unroll 1
    for (int r = 0; r < rounds; ++r) {
        #pragma unroll 1
        do { v ^= v << 13; v ^= v >> 17; v ^= v << 5; total += v; } while ((v * 2246822519u) >> 27);
    }
    y[i] = total;
}""",
)
# A thread a row of a sparse matrix: one row in 32 holds 64 times as many values as the others.
source(
    "sparse_rows",
    """sparse_rows(const int* __restrict__ start, const int* __restrict__ column, const float* __restrict__ value,
                 const float* __restrict__ x, float* __restrict__ y, int rows) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    float s = 0.f;
    for (int k = start[row]; k < start[row + 1]; ++k) s += value[k] * x[column[k]];
    y[row] = s;
}""",
)
# The first lane does all the work of its warp.
source(
    "first_lane",
    """first_lane(float* __restrict__ y, int rounds) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float r = i * 1e-6f;
    if ((i & 31) == 0) {
        #pragma unroll 4
        for (int k = 0; k < rounds; ++k) r = fmaf(r, 0.999f, 0.5f);
    }
    y[i] = r;
}""",
)
