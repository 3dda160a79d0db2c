// Residual add, layer norm, token shift and mixing.
//
//   x [T, C] fp32      the residual stream, updated in place: x = embedding of the token, or x + y, or x + the sum of partial products
//   y [T, C] fp16      what the layer before adds; or parts [P, T, C] fp32, added in the order of P
//   shift              fp16; the last normed input of slot s at shift + s * slot_stride, C numbers
//   mixes [N, C] fp16  out [N, T, C] fp16 = normed + (the normed input before - normed) * mix
//
// Arithmetic and sums are fp32; mean and variance are computed one after the other over the whole row, each as a tree over threads.
// A row whose slot is negative is padding: it reads zeros and writes no state.
#include "common.cuh"

constexpr float EPSILON = 1e-5f;
constexpr int MOST_MIXES = 6;
constexpr int AT_ONCE = 4;   // partial sums under way together

constexpr int most_threads(int chunks) { return chunks < 4 ? 1024 : 512; }

struct NormInput {
    float* x;
    const __half* y;
    const float* parts;
    int part_count;
    int rows;               // T of parts
    const int* tokens;      // not null: x comes from the table
    const __half* table;    // [vocabulary, C]
    const int* gather;      // not null: which row of x block b works on
    const __half* weight;   // [C]
    const __half* bias;
    int width;
};

__device__ __forceinline__ float block_sum(float value, float* scratch) {
    value = warp_sum(value);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    if (warps == 1) return value;
    __syncthreads();
    if (lane == 0) scratch[warp] = value;
    __syncthreads();
    return warp_sum(lane < warps ? scratch[lane] : 0.f);
}

__device__ __forceinline__ float4 widen(uint2 raw) {
    const float2 low = to_float2(raw.x), high = to_float2(raw.y);
    return make_float4(low.x, low.y, high.x, high.y);
}

__device__ __forceinline__ uint2 load_raw(const __half* p) { return *reinterpret_cast<const uint2*>(p); }

__device__ __forceinline__ float4 load4(const __half* p) { return widen(load_raw(p)); }

__device__ __forceinline__ void store4(__half* p, float4 v) {
    *reinterpret_cast<uint2*>(p) = make_uint2(to_half2(v.x, v.y), to_half2(v.z, v.w));
}

__device__ __forceinline__ float4 operator+(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// Weight and bias of this thread's columns. Loaded before waiting for x: they come from memory, x from the cache.
template <int CHUNKS>
struct Affine {
    uint2 weight[CHUNKS], bias[CHUNKS];
    __device__ __forceinline__ explicit Affine(const NormInput& in) {
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            const int column = 4 * (i * blockDim.x + threadIdx.x);
            if (column >= in.width) continue;
            weight[i] = *reinterpret_cast<const uint2*>(in.weight + column);
            bias[i] = *reinterpret_cast<const uint2*>(in.bias + column);
        }
    }
};

// The normed row of this block, in registers: v[i] holds columns 4 (i blockDim + threadIdx) and the three after it.
template <int CHUNKS>
__device__ __forceinline__ void normed_row(const NormInput& in, const Affine<CHUNKS>& affine, int row, float4 (&v)[CHUNKS]) {
    __shared__ float scratch[2][WARP];
    const int width = in.width, token = in.tokens ? in.tokens[row] : 0;
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        const int column = 4 * (i * blockDim.x + threadIdx.x);
        v[i] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (column >= width) continue;
        float4* place = reinterpret_cast<float4*>(in.x + size_t(row) * width + column);
        if (in.tokens) {
            v[i] = load4(in.table + size_t(token) * width + column);
        } else {
            v[i] = *place;
            if (in.y) v[i] = v[i] + load4(in.y + size_t(row) * width + column);
            for (int part = 0; part < in.part_count; part += AT_ONCE) {
                float4 more[AT_ONCE];
#pragma unroll
                for (int j = 0; j < AT_ONCE; j++)
                    if (part + j < in.part_count)
                        more[j] = *reinterpret_cast<const float4*>(in.parts + (size_t(part + j) * in.rows + row) * width + column);
#pragma unroll
                for (int j = 0; j < AT_ONCE; j++)
                    if (part + j < in.part_count) v[i] = v[i] + more[j];
            }
        }
        if (in.tokens || in.y || in.part_count) *place = v[i];
        sum += v[i].x + v[i].y + v[i].z + v[i].w;
    }
    const float mean = block_sum(sum, scratch[0]) / width;
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        if (4 * (i * blockDim.x + threadIdx.x) >= width) continue;
        v[i] = v[i] + make_float4(-mean, -mean, -mean, -mean);
        squares += v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
    }
    const float scale = rsqrtf(block_sum(squares, scratch[1]) / width + EPSILON);
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        const int column = 4 * (i * blockDim.x + threadIdx.x);
        if (column >= width) continue;
        const float4 weight = widen(affine.weight[i]), bias = widen(affine.bias[i]);
        v[i] = make_float4(v[i].x * scale * weight.x + bias.x, v[i].y * scale * weight.y + bias.y,
                           v[i].z * scale * weight.z + bias.z, v[i].w * scale * weight.w + bias.w);
    }
}

// The mixing amounts of this thread's columns.
struct Amounts {
    uint2 of[MOST_MIXES];
    __device__ __forceinline__ Amounts(const __half* mixes, int n, int width, int column) {
#pragma unroll
        for (int i = 0; i < MOST_MIXES; i++)
            if (i < n) of[i] = load_raw(mixes + i * width + column);
    }
};

__device__ __forceinline__ void mix_and_store(float4 x, float4 before, const Amounts& amounts, int n, __half* out, size_t rows, int row,
                                              int width, int column) {
    const float4 step = make_float4(before.x - x.x, before.y - x.y, before.z - x.z, before.w - x.w);
#pragma unroll
    for (int i = 0; i < MOST_MIXES; i++) {
        if (i >= n) break;
        const float4 amount = widen(amounts.of[i]);
        store4(out + (i * rows + row) * width + column, make_float4(x.x + step.x * amount.x, x.y + step.y * amount.y,
                                                                    x.z + step.z * amount.z, x.w + step.w * amount.w));
    }
}

// Decode: every row is one token. One block a row.
template <int CHUNKS>
__global__ void __launch_bounds__(most_threads(CHUNKS)) norm_mix_kernel(NormInput in, const int* slots, __half* shift, size_t slot_stride, const __half* mixes, int n, __half* out) {
    const Affine<CHUNKS> affine(in);
    const int own_column = 4 * threadIdx.x;
    const Amounts own_amounts(mixes, CHUNKS == 1 ? n : 0, in.width, own_column < in.width ? own_column : 0);
    wait_for_inputs();
    const int row = blockIdx.x, slot = slots[row];
    float4 v[CHUNKS], before[CHUNKS];
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {   // asked for before the sums, which take a while
        const int column = 4 * (i * blockDim.x + threadIdx.x);
        before[i] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (column < in.width && slot >= 0) before[i] = load4(shift + slot * slot_stride + column);
    }
    normed_row<CHUNKS>(in, affine, row, v);
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        const int column = 4 * (i * blockDim.x + threadIdx.x);
        if (column >= in.width) continue;
        if (slot >= 0) store4(shift + slot * slot_stride + column, v[i]);
        const Amounts amounts = CHUNKS == 1 ? own_amounts : Amounts(mixes, n, in.width, column);
        mix_and_store(v[i], before[i], amounts, n, out, gridDim.x, row, in.width, column);
    }
}

// The normed rows alone: out [blocks, C]. Used for prefill and before the head.
template <int CHUNKS>
__global__ void __launch_bounds__(most_threads(CHUNKS)) norm_kernel(NormInput in, __half* out) {
    const Affine<CHUNKS> affine(in);
    wait_for_inputs();
    const int row = in.gather ? in.gather[blockIdx.x] : blockIdx.x;
    float4 v[CHUNKS];
    normed_row<CHUNKS>(in, affine, row, v);
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        const int column = 4 * (i * blockDim.x + threadIdx.x);
        if (column < in.width) store4(out + size_t(blockIdx.x) * in.width + column, v[i]);
    }
}

// Prefill: normed [T, C] of packed rows; row_of [T], first, last and slots [rows] say where they lie. The block of a row's first token
// alone reads and then writes the row's state, so no block reads what another writes.
__global__ void shift_mix_kernel(const __half* normed, const int* row_of, const int* first, const int* last, const int* slots, __half* shift,
                                 size_t slot_stride, const __half* mixes, int n, __half* out, int width) {
    wait_for_inputs();
    const int token = blockIdx.x, row = row_of[token], slot = slots[row];
    if (slot < 0) return;  // padding
    const bool starts = token == first[row];
    for (int column = 4 * threadIdx.x; column < width; column += 4 * blockDim.x) {
        float4 before;
        if (!starts) {
            before = load4(normed + size_t(token - 1) * width + column);
        } else {
            __half* place = shift + slot * slot_stride + column;
            before = load4(place);
            *reinterpret_cast<uint2*>(place) = *reinterpret_cast<const uint2*>(normed + size_t(last[row]) * width + column);
        }
        mix_and_store(load4(normed + size_t(token) * width + column), before, Amounts(mixes, n, width, column), n, out, gridDim.x, token, width,
                      column);
    }
}

// h [n] fp16 = relu(h)^2 in place, n a multiple of 8; no larger than fp16 holds.
__global__ void relu_square_kernel(uint4* h, size_t vectors) {
    wait_for_inputs();
    const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= vectors) return;
    uint4 x = h[i];
    uint32_t* pairs = reinterpret_cast<uint32_t*>(&x);
#pragma unroll
    for (int p = 0; p < 4; p++) {
        float2 pair = to_float2(pairs[p]);
        pair.x = fmaxf(pair.x, 0.f), pair.y = fmaxf(pair.y, 0.f);
        pairs[p] = to_half2(fminf(pair.x * pair.x, 65504.f), fminf(pair.y * pair.y, 65504.f));
    }
    h[i] = x;
}

namespace {
// Few rows: as many threads as there are columns to hand out, for the shortest wait. Many rows: fewer threads, more blocks side by side.
struct Shape {
    int chunks, threads;
};

Shape shape(int rows, int width) {
    const int vectors = width / 4;
    int chunks = rows >= 256 ? 4 : 1;
    while ((vectors + chunks - 1) / chunks > most_threads(chunks)) chunks *= 2;
    const int threads = (vectors + chunks - 1) / chunks;
    return {chunks, (threads + WARP - 1) / WARP * WARP};
}
}  // namespace

#define BY_CHUNKS(kernel, s, ...)                                              \
    switch ((s).chunks) {                                                      \
        case 1: return launch(kernel<1>, __VA_ARGS__);                         \
        case 2: return launch(kernel<2>, __VA_ARGS__);                         \
        case 4: return launch(kernel<4>, __VA_ARGS__);                         \
        default: return cudaErrorInvalidValue;                                 \
    }

extern "C" {
int rwkv_norm_mix(const NormInput* in, int rows, const int* slots, __half* shift, size_t slot_stride, const __half* mixes, int n, __half* out,
                  cudaStream_t stream) {
    const Shape s = shape(rows, in->width);
    BY_CHUNKS(norm_mix_kernel, s, rows, s.threads, 0, stream, *in, slots, shift, slot_stride, mixes, n, out)
}

int rwkv_norm(const NormInput* in, int rows, __half* out, cudaStream_t stream) {
    const Shape s = shape(rows, in->width);
    BY_CHUNKS(norm_kernel, s, rows, s.threads, 0, stream, *in, out)
}

int rwkv_shift_mix(const __half* normed, int tokens, const int* row_of, const int* first, const int* last, const int* slots, __half* shift,
                   size_t slot_stride, const __half* mixes, int n, __half* out, int width, cudaStream_t stream) {
    const int threads = width / 4 < 256 ? (width / 4 + WARP - 1) / WARP * WARP : 256;
    return launch(shift_mix_kernel, tokens, threads, 0, stream, normed, row_of, first, last, slots, shift, slot_stride, mixes, n, out, width);
}

int rwkv_relu_square(void* h, size_t count, cudaStream_t stream) {
    const size_t vectors = count / 8;
    return launch(relu_square_kernel, unsigned((vectors + 255) / 256), 256, 0, stream, static_cast<uint4*>(h), vectors);
}
}
