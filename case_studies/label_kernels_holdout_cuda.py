"""CUDA kernels of the holdout set. They join :data:`case_studies.label_kernels_cuda.SOURCES`."""

from __future__ import annotations

from case_studies.label_kernels_cuda import source

# --- memory, L2, arithmetic -----------------------------------------------------------------------------------------

# A warp a row, four 16-byte loads in flight a lane.
source(
    "matvec",
    """__launch_bounds__(256) matvec(const float4* __restrict__ a, const float4* __restrict__ x, float* __restrict__ y,
                 int quarters) {
    int row = (blockIdx.x * 256 + threadIdx.x) / 32, lane = threadIdx.x & 31;
    const float4* line = a + (long long)row * quarters;
    float s = 0.f;
    #pragma unroll 4
    for (int k = lane; k < quarters; k += 32) {
        float4 u = line[k], v = x[k];
        s += (u.x * v.x + u.y * v.y) + (u.z * v.z + u.w * v.w);
    }
    for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
    if (lane == 0) y[row] = s;
}""",
)
source(
    "double_axpy",
    """double_axpy(const double2* __restrict__ x, const double2* __restrict__ b, double2* __restrict__ y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    double2 u = x[i], v = b[i];
    y[i] = make_double2(fma(u.x, 1.5, v.x), fma(u.y, 1.5, v.y));
}""",
)
# A warp reads 512 bytes at a place that a linear congruence draws, so that L1 has them once in a hundred times.
source(
    "l2_chunks",
    """l2_chunks(const float4* __restrict__ x, float* __restrict__ y, int chunks, int rounds) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x & 31;
    unsigned v = (i / 32) * 2654435761u + 1u;
    float s = 0.f;
    #pragma unroll 8
    for (int r = 0; r < rounds; ++r) {
        v = v * 1664525u + 1013904223u;
        float4 t = x[__umulhi(v, chunks) * 32 + lane];
        s += (t.x + t.y) + (t.z + t.w);
    }
    y[i] = s;
}""",
)
# Backwards through the table, with the hint that L1 shall not keep anything.
source(
    "l2_doubles",
    """l2_doubles(const double2* __restrict__ x, double* __restrict__ y, int n, int rounds) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x, at = i % n;
    double s = 0.;
    #pragma unroll 8
    for (int r = 0; r < rounds; ++r) {
        double u, v;
        asm("ld.global.nc.L1::no_allocate.v2.f64 {%0, %1}, [%2];" : "=d"(u), "=d"(v) : "l"(x + at));
        s += u + v;
        at -= step;
        if (at < 0) at += n;
    }
    y[i] = s;
}""",
)
# Every block reads 48 KB of its own again and again; two blocks an SM fit in L1.
source(
    "l1_reads",
    """__launch_bounds__(1024, 2) l1_reads(const float4* __restrict__ x, float* __restrict__ y, int rounds) {
    const float4* mine = x + blockIdx.x * 3072;
    float s = 0.f;
    #pragma unroll 1
    for (int r = 0; r < rounds; ++r)
        #pragma unroll
        for (int k = 0; k < 3; ++k) {
            float4 v = mine[((threadIdx.x + r * 32) & 1023) + k * 1024];
            s += (v.x + v.y) + (v.z + v.w);
        }
    y[blockIdx.x * 1024 + threadIdx.x] = s;
}""",
)
# A tile goes through shared memory and comes out in reverse.
source(
    "staged_copy",
    """__launch_bounds__(256) staged_copy(const float4* __restrict__ x, float4* __restrict__ y) {
    __shared__ float4 tile[1024];
    int first = blockIdx.x * 1024;
    #pragma unroll
    for (int k = 0; k < 4; ++k) tile[threadIdx.x + k * 256] = x[first + threadIdx.x + k * 256];
    __syncthreads();
    #pragma unroll
    for (int k = 0; k < 4; ++k) y[first + threadIdx.x + k * 256] = tile[1023 - threadIdx.x - k * 256];
}""",
)
# Four polynomials a thread by Horner's rule.
source(
    "double_horner",
    """__launch_bounds__(256, 4) double_horner(const double* __restrict__ x, double* __restrict__ y, int degree) {
    int i = blockIdx.x * 256 + threadIdx.x;
    double v[4], p[4];
    #pragma unroll
    for (int k = 0; k < 4; ++k) v[k] = p[k] = x[(i * 4 + k) & 4095];
    #pragma unroll 8
    for (int n = 0; n < degree; ++n)
        #pragma unroll
        for (int k = 0; k < 4; ++k) p[k] = fma(p[k], v[k], 0.5);
    y[i] = (p[0] + p[1]) + (p[2] + p[3]);
}""",
)
# Pairs of halves in one register, ten chains a thread.
source(
    "half_chains",
    """__launch_bounds__(512, 4) half_chains(unsigned* __restrict__ y, unsigned factor, unsigned addend, int rounds) {
    unsigned i = blockIdx.x * 512 + threadIdx.x, r[10];
    #pragma unroll
    for (int k = 0; k < 10; ++k) r[k] = 0x2c002c00u + i % 64 + k;
    #pragma unroll 8
    for (int n = 0; n < rounds; ++n)
        #pragma unroll
        for (int k = 0; k < 10; ++k) asm("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(r[k]) : "r"(factor), "r"(addend));
    unsigned s = 0;
    #pragma unroll
    for (int k = 0; k < 10; ++k) s ^= r[k];
    y[i] = s;
}""",
)
# Integers squared again and again; v v + c has no shorter form, however often it is unrolled.
source(
    "squares",
    """__launch_bounds__(512) squares(unsigned* __restrict__ y, unsigned addend, int rounds) {
    unsigned i = blockIdx.x * 512 + threadIdx.x, v[4];
    #pragma unroll
    for (int k = 0; k < 4; ++k) v[k] = i * 4 + k;
    #pragma unroll 8
    for (int n = 0; n < rounds; ++n)
        #pragma unroll
        for (int k = 0; k < 4; ++k) v[k] = v[k] * v[k] + addend;
    y[i] = v[0] ^ v[1] ^ v[2] ^ v[3];
}""",
)
# Two warps a scheduler have 24 independent FMAs each: the FMA pipe is never without work.
source(
    "wide_chains",
    """__launch_bounds__(256) wide_chains(float* __restrict__ y, int rounds) {
    int i = blockIdx.x * 256 + threadIdx.x;
    float c = i * 1e-9f, r[24];
    #pragma unroll
    for (int k = 0; k < 24; ++k) r[k] = c + k;
    #pragma unroll 4
    for (int n = 0; n < rounds; ++n)
        #pragma unroll
        for (int k = 0; k < 24; ++k) r[k] = fmaf(r[k], 0.75f, c);
    float s = 0.f;
    #pragma unroll
    for (int k = 0; k < 24; ++k) s += r[k];
    y[i] = s;
}""",
)
# A tile of 8 x 16 sums a thread: many registers, none of them spilled.
source(
    "register_tile",
    """__launch_bounds__(128) register_tile(const float* __restrict__ x, float* __restrict__ y, int rounds) {
    __shared__ float4 panel[64 * 6];
    for (int k = threadIdx.x; k < 64 * 6; k += 128)
        panel[k] = make_float4(x[4 * k], x[4 * k + 1], x[4 * k + 2], x[4 * k + 3]);
    __syncthreads();
    float c[8][16];
    #pragma unroll
    for (int a = 0; a < 8; ++a)
        #pragma unroll
        for (int b = 0; b < 16; ++b) c[a][b] = threadIdx.x;
    #pragma unroll 1
    for (int n = 0; n < rounds; ++n) {
        float u[8], v[16];
        #pragma unroll
        for (int k = 0; k < 2; ++k) *(float4*)(u + 4 * k) = panel[(n & 63) * 6 + k];
        #pragma unroll
        for (int k = 0; k < 4; ++k) *(float4*)(v + 4 * k) = panel[(n & 63) * 6 + 2 + k];
        #pragma unroll
        for (int a = 0; a < 8; ++a)
            #pragma unroll
            for (int b = 0; b < 16; ++b) c[a][b] = fmaf(u[a], v[b], c[a][b]);
    }
    float s = 0.f;
    #pragma unroll
    for (int a = 0; a < 8; ++a)
        #pragma unroll
        for (int b = 0; b < 16; ++b) s = fmaf(c[a][b], 1.f + a + 8 * b, s);
    y[blockIdx.x * 128 + threadIdx.x] = s;
}""",
)

# --- latency --------------------------------------------------------------------------------------------------------

# Where to count next depends on the last count's top bit, which is never set.
source(
    "atomic_chain",
    """atomic_chain(unsigned* __restrict__ counters, unsigned* __restrict__ y, int steps) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned v = 0;
    #pragma unroll 1
    for (int k = 0; k < steps; ++k) v = atomicAdd(counters + i + (v >> 31), 1u);
    y[i] = v;
}""",
)
# Sums over the block, each of which needs the one before: five shuffles and two barriers in a row.
source(
    "block_sums",
    """__launch_bounds__(128) block_sums(float* __restrict__ y, int rounds) {
    __shared__ float part[4];
    float v = threadIdx.x * 1e-3f;
    #pragma unroll 1
    for (int r = 0; r < rounds; ++r) {
        float s = v;
        #pragma unroll
        for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
        if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = s;
        __syncthreads();
        s = (part[0] + part[1]) + (part[2] + part[3]);
        __syncthreads();
        v = v * 0.5f + s * 1e-3f;
    }
    y[blockIdx.x * 128 + threadIdx.x] = v;
}""",
)

# --- occupancy ------------------------------------------------------------------------------------------------------

# 200 sums stay in registers while a chain of loads is followed; a warp's lanes lie side by side.
source(
    "register_walk",
    """__launch_bounds__(256) register_walk(const int* __restrict__ following, float* __restrict__ y, int n,
                 int rounds) {
    int i = blockIdx.x * 256 + threadIdx.x, at = i % n;
    float sum[200];
    #pragma unroll
    for (int k = 0; k < 200; ++k) sum[k] = i + k;
    #pragma unroll 1
    for (int r = 0; r < rounds; ++r)
        #pragma unroll
        for (int j = 0; j < 10; ++j) {
            at = __ldcg(following + at);
            float v = at * 1e-9f;
            #pragma unroll
            for (int k = 0; k < 20; ++k) sum[j * 20 + k] = fmaf(sum[j * 20 + k], 0.5f, v);
        }
    float s = 0.f;
    #pragma unroll
    for (int k = 0; k < 200; ++k) s = fmaf(s, 0.9f, sum[k]);
    y[i] = s;
}""",
)
# Blocks of 24 warps, of which two would need 42 registers a thread or less.
source(
    "moments",
    """__launch_bounds__(768) moments(const float* __restrict__ x, float* __restrict__ y, int n) {
    int i = blockIdx.x * 768 + threadIdx.x;
    float sum[48];
    #pragma unroll
    for (int k = 0; k < 48; ++k) sum[k] = k;
    #pragma unroll 1
    for (int at = i; at < n; at += gridDim.x * 768) {
        float v = x[at];
        #pragma unroll
        for (int k = 0; k < 48; ++k) sum[k] = fmaf(sum[k], 0.5f, v);
    }
    float s = 0.f;
    #pragma unroll
    for (int k = 0; k < 48; ++k) s = fmaf(s, 0.9f, sum[k]);
    y[i] = s;
}""",
)
# A table of 512 rows of 32 banks; what is found says which row comes next, and a lane stays in its bank.
source(
    "table_walk",
    """__launch_bounds__(96) table_walk(float* __restrict__ y, int steps) {
    extern __shared__ float table[];
    for (int k = threadIdx.x; k < 512 * 32; k += 96) table[k] = (k * 7919 & 16383) * (1.f / 16384.f);
    __syncthreads();
    int lane = threadIdx.x & 31;
    float v = threadIdx.x * (1.f / 96.f);
    #pragma unroll 1
    for (int k = 0; k < steps; ++k) v = fmaf(v, 0.5f, table[((__float_as_uint(v) >> 14) & 511) * 32 + lane]);
    y[blockIdx.x * 96 + threadIdx.x] = v;
}""",
)
# A block is one warp, whose 32 lanes follow neighbouring chains through device memory.
source(
    "warp_walk",
    """warp_walk(const int* __restrict__ following, int* __restrict__ y, int n, int steps) {
    int at = (int)(blockIdx.x * 48992ll % n) + threadIdx.x;
    #pragma unroll 1
    for (int k = 0; k < steps; ++k) at = following[at];
    y[blockIdx.x * blockDim.x + threadIdx.x] = at;
}""",
)

# --- local memory ---------------------------------------------------------------------------------------------------

# Odd-even transposition of 64 values that only local memory can index.
source(
    "private_sort",
    """private_sort(const unsigned* __restrict__ x, unsigned* __restrict__ y) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned a[64], s = 0;
    #pragma unroll 1
    for (int k = 0; k < 64; ++k) a[k] = x[(i + k * 37) & 4095] * 2654435761u;
    #pragma unroll 1
    for (int pass = 0; pass < 64; ++pass)
        #pragma unroll 1
        for (int k = pass & 1; k < 63; k += 2) {
            unsigned u = a[k], v = a[k + 1];
            a[k] = min(u, v);
            a[k + 1] = max(u, v);
        }
    #pragma unroll 1
    for (int k = 0; k < 64; ++k) s = s * 31 + a[k];
    y[i] = s;
}""",
)
# Two matrices of 6 x 6 a thread and their product, in 32 registers.
source(
    "private_products",
    """__launch_bounds__(256, 8) private_products(const float* __restrict__ x, float* __restrict__ y, int rounds) {
    int i = blockIdx.x * 256 + threadIdx.x;
    float a[6][6], b[6][6], c[6][6];
    #pragma unroll
    for (int p = 0; p < 36; ++p) { a[p / 6][p % 6] = x[(i + p) & 4095]; b[p / 6][p % 6] = x[(i + p * 3) & 4095]; }
    #pragma unroll 1
    for (int n = 0; n < rounds; ++n) {
        #pragma unroll
        for (int p = 0; p < 6; ++p)
            #pragma unroll
            for (int q = 0; q < 6; ++q) {
                float s = 0.125f;
                #pragma unroll
                for (int k = 0; k < 6; ++k) s = fmaf(a[p][k], b[k][q], s);
                c[p][q] = s;
            }
        #pragma unroll
        for (int p = 0; p < 36; ++p) a[p / 6][p % 6] = c[p % 6][p / 6];
    }
    float s = 0.f;
    #pragma unroll
    for (int p = 0; p < 36; ++p) s = fmaf(s, 0.9f, a[p / 6][p % 6]);
    y[i] = s;
}""",
)
# Bisection of an interval, depth first, with a stack of its own for each thread. All threads go the same way.
source(
    "private_stack",
    """private_stack(float* __restrict__ y, int cells) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, top = 0;
    float4 stack[24];
    float total = 0.f, slope = 1.f + i * 1e-6f;
    stack[top++] = make_float4(0.f, 1.f, 0.f, slope);
    #pragma unroll 1
    while (top > 0) {
        float4 s = stack[--top];
        float middle = 0.5f * (s.x + s.y), value = slope * middle;
        if (s.y - s.x > 1.5f / cells) {
            stack[top++] = make_float4(s.x, middle, s.z, value);
            stack[top++] = make_float4(middle, s.y, value, s.w);
        } else total = fmaf(s.z + s.w, s.y - s.x, total);
    }
    y[i] = total;
}""",
)

# --- divergence -----------------------------------------------------------------------------------------------------

# How long a point of the Mandelbrot set's surroundings takes to escape; lanes have points from anywhere.
source(
    "escape_time",
    """escape_time(const int* __restrict__ order, int* __restrict__ y, int width, int height, int limit) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, p = order[i], k = 0;
    float cr = -2.2f + 3.2f * (p % width) / width, ci = -1.2f + 2.4f * (p / width) / height, zr = 0.f, zi = 0.f;
    #pragma unroll 1
    while (k < limit && zr * zr + zi * zi < 4.f) {
        float t = zr * zr - zi * zi + cr;
        zi = 2.f * zr * zi + ci;
        zr = t;
        ++k;
    }
    y[i] = k;
}""",
)
# Each lane draws its own instruction in each step, one of eight.
source(
    "interpreter",
    """interpreter(float* __restrict__ y, int steps) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned pc = i * 2654435761u + 12345u;
    float a = 1.f + i * 1e-6f, b = 2.f;
    #pragma unroll 1
    for (int s = 0; s < steps; ++s) {
        pc = pc * 1664525u + 1013904223u;
        switch (pc >> 29) {
            #define OPCODE(number, operation) case number: \\
                _Pragma("unroll 1") for (int k = 0; k < 6; ++k) { operation; } break;
            OPCODE(0, a = fmaf(a, 0.9f, b * 0.1f))
            OPCODE(1, b = fmaf(b, 0.8f, a * a * 0.01f))
            OPCODE(2, a = fminf(a, b) + 0.25f)
            OPCODE(3, b = fmaxf(a * 0.5f, b * 0.5f))
            OPCODE(4, a = fabsf(a - b) + 0.5f)
            OPCODE(5, b = __fsqrt_rn(fabsf(b) + 1.f))
            OPCODE(6, a = __int_as_float((__float_as_int(a) & 0x3fffffff) | 0x3f000000))
            OPCODE(7, b = 1.f / (fabsf(b) + 1.5f) + a * 0.125f)
        }
    }
    y[i] = a + b;
}""",
)
# One value in ten is worth the work.
source(
    "filtered",
    """filtered(const float* __restrict__ x, float* __restrict__ y, int n) {
    #pragma unroll 1
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        float v = x[i];
        if (v > 0.4f) {
            #pragma unroll 4
            for (int k = 0; k < 200; ++k) v = fmaf(v, v * 0.5f, 0.25f);
            y[i] = v;
        }
    }
}""",
)
# Loops of very different length, but one length for all lanes of a warp.
source(
    "warp_loops",
    """warp_loops(float* __restrict__ y, int longest) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    int rounds = __shfl_sync(~0u, (int)(i * 2654435761u >> 8) % longest, 0);
    float r = i * 1e-6f;
    #pragma unroll 1
    for (int k = 0; k < rounds; ++k) r = fmaf(r, r * 0.25f, 0.5f);
    y[i] = r;
}""",
)
