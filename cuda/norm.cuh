// Residual add and layer norm, with token shift and mixing: what the norm_*.cu kernels share.
//
//   x [T, C] fp32      the residual stream, updated: x + y, or x + the sum of partials, or an embedding
//   y [T, C] fp16      what the layer before adds; or partials [P, T, C] fp32, added in the order of P
//   norm(x)            (x - mean) / sqrt(variance + EPSILON) * weight + bias, over the C columns of a row
//   shift              fp16; the last normed input of slot s at shift + s * slot_stride, C numbers
//   mixes [N, C] fp16  out [N, T, C] fp16 = normed + (the normed input before - normed) * mix
//
// Arithmetic and sums are fp32; mean and variance are computed one after the other over the whole row, each
// as a tree over threads. A thread has N = 4 or 8 neighbouring columns of a row, from N threadIdx.x on. A row
// whose slot is negative is padding: it reads zeros and writes no state; in prefill, no out either, or zeros
// beside tokens whose states are kept, so that it adds no active hidden units.
//
// With `coded` the first mixes of a row, those that large GEMMs read (fp8_mixes), go there as fp8 with the
// bits that quantize_rows.cu would make of them; to out go those that others read (first_half). Only sm_90a,
// with 8 columns of a thread.
#pragma once
#include "fp8_rows.cuh"

constexpr float EPSILON = 1e-5f;
constexpr int SOME_MIXES = 3, MAX_MIXES = 6;

// How many of so many mixes may be made fp8: of a time mix those of r, k and v, and that of a channel mix.
__host__ __device__ constexpr int fp8_mixes(int mixes) { return mixes == MAX_MIXES ? 3 : mixes == 1 ? 1 : 0; }

// The first mix that goes to out if `coded` of them are made fp8: a low-rank function reads that of v too.
__host__ __device__ constexpr int first_half(int coded) { return coded == 3 ? 2 : coded; }

struct NormInput {
    float* x;
    const __half* y;
    const float* partials;
    int partial_count;
    int partial_rows;      // T of partials
    const int* tokens;     // not null: x comes from the table
    const __half* table;   // [vocabulary, C]
    const int* gather;     // not null: which row of x block b works on
    const __half* weight;  // [C]
    const __half* bias;
    int width;
};

// Where the tokens of packed rows belong.
struct PackedRowsInput {
    const int* row_of;                // [T]
    const int *first, *last, *slots;  // [rows] first and last token, slot
    // [T] not null: the slot that gets the state behind each token, negative for none, in place of the row's
    // own, which gets that behind its last. A row's first token may name the row's own slot.
    const int* kept;
};

__device__ __forceinline__ float block_sum(float value, float* scratch) {
    value = warp_sum(value);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    if (warps == 1) return value;
    if (lane == 0) scratch[warp] = value;
    __syncthreads();
    return warp_sum(lane < warps ? scratch[lane] : 0.f);
}

// N neighbouring numbers of a row of fp16 (4 or 8), as they are stored.
template <int N>
struct Raw {
    uint32_t pair[N / 2];
    __device__ __forceinline__ void load(const __half* p) {
        if constexpr (N == 8) {
            const uint4 x = *reinterpret_cast<const uint4*>(p);
            pair[0] = x.x, pair[1] = x.y, pair[2] = x.z, pair[3] = x.w;
        } else {
            const uint2 x = *reinterpret_cast<const uint2*>(p);
            pair[0] = x.x, pair[1] = x.y;
        }
    }
    __device__ __forceinline__ void set(const float (&x)[N]) {
#pragma unroll
        for (int i = 0; i < N / 2; i++) pair[i] = to_finite_half2(x[2 * i], x[2 * i + 1]);
    }
    __device__ __forceinline__ void store(__half* p) const {
        if constexpr (N == 8)
            ::store(p, pair[0], pair[1], pair[2], pair[3]);
        else
            ::store(p, pair[0], pair[1]);
    }
    __device__ __forceinline__ float operator[](int i) const {
        const float2 both = to_float2(pair[i / 2]);
        return i % 2 ? both.y : both.x;
    }
};

template <int N>
__device__ __forceinline__ void store_half(__half* p, const float (&x)[N]) {
    Raw<N> raw;
    raw.set(x);
    raw.store(p);
}

template <int N>
__device__ __forceinline__ void load_float(const float* p, float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        const float4 v = *reinterpret_cast<const float4*>(p + i);
        x[i] = v.x, x[i + 1] = v.y, x[i + 2] = v.z, x[i + 3] = v.w;
    }
}

template <int N>
__device__ __forceinline__ void store_float(float* p, const float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i += 4)
        *reinterpret_cast<float4*>(p + i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
}

// As store_float, with all lanes of the warp, though not all may have room there. A lane's 8 numbers are two
// stores, each of every other 16 bytes: the L2 cache would be sent every sector of 32 bytes twice. Neighbours
// exchange halves, so that each store is of whole sectors.
template <int N>
__device__ __forceinline__ void store_whole_sectors(float* p, const float (&x)[N], bool inside) {
    if constexpr (N == 4) {
        if (inside) store_float(p, x);
    } else {
        static_assert(N == 8);
        const bool odd = threadIdx.x % 2;
        float low[4], high[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float other = shuffle_xor(odd ? x[i] : x[4 + i], 1);
            low[i] = odd ? other : x[i], high[i] = odd ? x[4 + i] : other;
        }
        if (!inside) return;
        float* place = odd ? p - 4 : p;
        store_float(place, low), store_float(place + 8, high);
    }
}

// Weight and bias of this thread's columns, N from N threadIdx on. Loaded before waiting for x: they come
// from memory, x comes from the cache.
template <int N>
struct Affine {
    Raw<N> weight = {}, bias = {};
    __device__ __forceinline__ explicit Affine(const NormInput& in) {
        const int column = N * threadIdx.x;
        if (column < in.width) weight.load(in.weight + column), bias.load(in.bias + column);
    }
};

// This thread's numbers of a row of the residual stream, as the norm before left it.
template <int N>
__device__ __forceinline__ void load_row(const NormInput& in, int row, float (&v)[N]) {
    const int column = N * threadIdx.x;
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = 0.f;
    if (!in.tokens && column < in.width) load_float(in.x + size_t(row) * in.width + column, v);
}

// What is added to a row of the stream, except partial sums; for an embedding, `load_row` has left zeros.
template <int N>
struct Addend {
    Raw<N> raw = {};
    __device__ __forceinline__ void load(const NormInput& in, int row) {
        const int column = N * threadIdx.x;
        if (column >= in.width) return;
        if (in.tokens)
            raw.load(in.table + size_t(in.tokens[row]) * in.width + column);
        else if (in.y)
            raw.load(in.y + size_t(row) * in.width + column);
    }
    __device__ __forceinline__ void add(float (&v)[N]) const {
#pragma unroll
        for (int i = 0; i < N; i++) v[i] += raw[i];
    }
};

// From a row of the stream in v, whose `sum` is of this thread's numbers, to the normed row. Both arrays of
// `scratch` must be unused.
template <int N>
__device__ __forceinline__ void normalize(const Affine<N>& affine, int width, float sum, float (&v)[N],
                                          float (*scratch)[WARP]) {
    const int column = N * threadIdx.x;
    const float mean = block_sum(sum, scratch[0]) / width;
    float squares = 0.f;
    if (column < width)
#pragma unroll
        for (int i = 0; i < N; i++) v[i] -= mean, squares += v[i] * v[i];
    const float scale = rsqrtf(block_sum(squares, scratch[1]) / width + EPSILON);
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = v[i] * scale * affine.weight[i] + affine.bias[i];
}

// Adds the partial sums of a row's columns from `column` on, in their order, AT_ONCE of them under way
// together.
template <int AT_ONCE, int N>
__device__ __forceinline__ void add_partials(const NormInput& in, int row, int column, float (&v)[N]) {
    for (int part = 0; part < in.partial_count; part += AT_ONCE) {
        float more[AT_ONCE][N];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
            if (part + j < in.partial_count)
                load_float(in.partials + (size_t(part + j) * in.partial_rows + row) * in.width + column,
                           more[j]);
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
            if (part + j < in.partial_count)
#pragma unroll
                for (int i = 0; i < N; i++) v[i] += more[j][i];
    }
}

// From the row of the stream in v to the normed row; what is added is added to the stream as well. Both
// arrays of `scratch` must be unused.
template <int N>
__device__ __forceinline__ void norm_row(const NormInput& in, const Affine<N>& affine, int row, float (&v)[N],
                                         float (*scratch)[WARP]) {
    const int width = in.width, column = N * threadIdx.x;
    float sum = 0.f;
    if (column < width) {
        if (in.tokens) {
            Raw<N> raw;
            raw.load(in.table + size_t(in.tokens[row]) * width + column);
#pragma unroll
            for (int i = 0; i < N; i++) v[i] = raw[i];
        } else if (in.y) {
            Raw<N> raw;
            raw.load(in.y + size_t(row) * width + column);
#pragma unroll
            for (int i = 0; i < N; i++) v[i] += raw[i];
        }
        add_partials<16 / N>(in, row, column, v);
        if (in.tokens || in.y || in.partial_count) store_float(in.x + size_t(row) * width + column, v);
#pragma unroll
        for (int i = 0; i < N; i++) sum += v[i];
    }
    normalize(affine, width, sum, v, scratch);
}

template <int N>
__device__ __forceinline__ Raw<N> mix(const float (&x)[N], const Raw<N>& before, const Raw<N>& amount) {
    float mixed[N];
#pragma unroll
    for (int i = 0; i < N; i++) mixed[i] = x[i] + (before[i] - x[i]) * amount[i];
    Raw<N> rounded;
    rounded.set(mixed);
    return rounded;
}

template <int N>
__device__ __forceinline__ void mix_and_store(const float (&x)[N], const Raw<N>& before, const Raw<N>& amount,
                                              __half* out) {
    mix(x, before, amount).store(out);
}

// Some mixes of a row, which a block has, to where they go as fp8. `largest` must be unused. All threads do.
template <int COUNT>
__device__ __forceinline__ void store_coded(const Raw<8> (&mixed)[COUNT], const Fp8Rows& coded, size_t rows,
                                            int row, int width, uint32_t (*largest)[WARP]) {
#if HOPPER
    const int column = 8 * threadIdx.x, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const uint32_t of_warp = largest_of_warp(mixed[i].pair);
        if (lane == 0) largest[i][warp] = of_warp;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const float most = half_of(warp_max(lane < blockDim.x / WARP ? largest[i][lane] : 0));
        const size_t at = i * rows + row;
        if (threadIdx.x == 0) coded.scales[at] = fp8_scale(most);
        store_fp8(coded.codes + at * width, column, mixed[i].pair, fp8_factor(most), column < width);
    }
#endif
}

// N numbers of fp16 from global to shared memory, as with `copy_async`.
template <int N>
__device__ __forceinline__ void copy_columns(__half* to, const __half* from) {
    copy_async_cached<2 * N>(to, from);
}

// How a norm is launched. Fewer rows than these have more threads each, for the shortest wait.
constexpr int FEW_ROWS = 64;
constexpr int FEW_ROWS_OF_PARTIALS = 129;  // while each row has a multiprocessor to itself
constexpr int NARROW = 2048;  // columns up to which any rows have them, if there are sums to add up

// Columns of a thread: 4 or 8. A width that 1024 threads cannot hold is refused by the launch. Sums depend on
// it, so that whoever wants the same ones for any number of rows gives it as `columns`.
inline bool four_columns(const NormInput& in, int rows, int columns = 0) {
    if (columns) return columns == 4;
    if (in.partial_count && in.width <= NARROW) return true;
    return rows < (in.partial_count ? FEW_ROWS_OF_PARTIALS : FEW_ROWS) && in.width <= 4 * 1024;
}

inline int whole_warps(int threads) { return (threads + WARP - 1) / WARP * WARP; }

// Whether this build has kernels that make mixes fp8. Why a launch that wants it is refused; 0: it is not.
// GEMMs by codes, which alone read it, leave no partial sums.
constexpr bool CODES_ROWS = !AMD_FORMS;
inline int refused(const Fp8Rows& coded, const NormInput& in, int mixes) {
    if (!coded.codes) return cudaSuccess;
    if (!CODES_ROWS || !on_hopper()) return cudaErrorNotSupported;
    return in.width % 64 || in.partial_count || fp8_mixes(mixes) == 0 ? cudaErrorInvalidValue : cudaSuccess;
}

// norm_mix_decode_team.cu: whether its kernel is the faster one for so many rows; n: 1, SOME_MIXES or
// MAX_MIXES mixes.
bool suits_team(const NormInput& in, int rows);
int norm_mix_team(const NormInput& in, int rows, const int* slots, __half* shift, size_t slot_stride,
                  const __half* mixes, int n, __half* out, const Fp8Rows& coded, cudaStream_t stream);
