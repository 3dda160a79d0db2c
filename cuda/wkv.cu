// The time mix between its products: gates, decay, key normalisation, the recurrence, group norm, bonus and gate in one kernel.
//
//   per head, with S [value, key]:   S' = S diag(w) - (S kk) (kk a)^T + v k^T      y = S' r
//   w = exp(-exp(-1/2) sigmoid(w0 + w~)), a = sigmoid(a0 + a~), kk = k k_k / max(|k k_k|, 1e-12), k = k~ (1 + (a - 1) k_a)
//   v = v~ + (v_first - v~) sigmoid(v0 + v~~)    (not in layer 0)
//   out = (group_norm(y) + (r . k r_k) v) g
//
// r, k, v, the four low-rank results and g, v_first, out: [T, C] fp16. Vectors: [C] fp16. The state of slot s and head h: 64 x 64 numbers,
// fp16 or fp32, at state + s * slot_stride + h * 4096, read and written in place. All arithmetic is fp32.
//
// 128 threads a head. A warp holds 16 values' rows of S; in them, lane l has keys 8 (l % 8) .. + 7 of rows n * 16 + warp * 4 + l / 8. Sums
// over keys go over 8 numbers of a lane in order, then over 8 lanes as a tree; sums over a head in vectors, two to a lane, as a tree.
#include "common.cuh"

constexpr int HEAD = 64;
constexpr int THREADS = 128;
constexpr int WARPS = THREADS / WARP;
constexpr int OWN = 4;             // rows of S a thread has a part of
constexpr int CHUNK = 16;          // tokens prepared at once in the sequential kernel
constexpr float NORM_EPSILON = 64e-5f;
constexpr float DECAY = -0.6065306597126334f;  // -exp(-1/2)

struct TimeMix {
    const __half *r, *k, *v, *w, *a, *mix, *g;  // mix (of v_first) is null in layer 0
    const __half* v_first;
    const __half *w0, *a0, *v0, *k_k, *k_a, *r_k, *norm_weight, *norm_bias;
    __half* out;
    void* state;
    size_t slot_stride;  // in numbers
    int width;
};

// What the recurrence needs of one token and head, in shared memory.
struct alignas(16) Token {
    float r[HEAD], w[HEAD], k[HEAD], kk[HEAD], b[HEAD], v[HEAD], y[HEAD];
    float own;  // r . k r_k
};

__device__ __forceinline__ float2 pair_at(const __half* p, size_t at) { return __half22float2(*reinterpret_cast<const __half2*>(p + at)); }

// One warp prepares one token: lane l has channels 2 l and 2 l + 1 of the head.
__device__ __forceinline__ void prepare(const TimeMix& in, size_t token, int head, int lane, Token& out) {
    const size_t channel = head * HEAD + 2 * lane, at = token * in.width + channel;
    const float2 r = pair_at(in.r, at), k_raw = pair_at(in.k, at), w_raw = pair_at(in.w, at), a_raw = pair_at(in.a, at);
    float2 v = pair_at(in.v, at);
    const float2 w0 = pair_at(in.w0, channel), a0 = pair_at(in.a0, channel), k_k = pair_at(in.k_k, channel);
    const float2 k_a = pair_at(in.k_a, channel), r_k = pair_at(in.r_k, channel);
    if (in.mix) {
        const float2 v0 = pair_at(in.v0, channel), mix = pair_at(in.mix, at), first = pair_at(in.v_first, at);
        v.x += (first.x - v.x) * sigmoid(v0.x + mix.x);
        v.y += (first.y - v.y) * sigmoid(v0.y + mix.y);
    }
    const float2 a = make_float2(sigmoid(a0.x + a_raw.x), sigmoid(a0.y + a_raw.y));
    float2 kk = make_float2(k_raw.x * k_k.x, k_raw.y * k_k.y);
    const float scale = 1.f / fmaxf(sqrtf(warp_sum(kk.x * kk.x + kk.y * kk.y)), 1e-12f);
    kk.x *= scale, kk.y *= scale;
    const float2 k = make_float2(k_raw.x * (1.f + (a.x - 1.f) * k_a.x), k_raw.y * (1.f + (a.y - 1.f) * k_a.y));
    const float own = warp_sum(r.x * k.x * r_k.x + r.y * k.y * r_k.y);
    const int i = 2 * lane;
    out.r[i] = r.x, out.r[i + 1] = r.y;
    out.w[i] = __expf(DECAY * sigmoid(w0.x + w_raw.x)), out.w[i + 1] = __expf(DECAY * sigmoid(w0.y + w_raw.y));
    out.k[i] = k.x, out.k[i + 1] = k.y;
    out.kk[i] = kk.x, out.kk[i + 1] = kk.y;
    out.b[i] = kk.x * a.x, out.b[i + 1] = kk.y * a.y;
    out.v[i] = v.x, out.v[i + 1] = v.y;
    if (lane == 0) out.own = own;
}

// One warp finishes one token.
__device__ __forceinline__ void finish(const TimeMix& in, size_t token, int head, int lane, const Token& t) {
    const size_t channel = head * HEAD + 2 * lane, at = token * in.width + channel;
    const float2 g = pair_at(in.g, at), weight = pair_at(in.norm_weight, channel), bias = pair_at(in.norm_bias, channel);
    const float2 y = make_float2(t.y[2 * lane], t.y[2 * lane + 1]);
    const float mean = warp_sum(y.x + y.y) / HEAD;
    const float2 d = make_float2(y.x - mean, y.y - mean);
    const float scale = rsqrtf(warp_sum(d.x * d.x + d.y * d.y) / HEAD + NORM_EPSILON);
    const float x0 = (d.x * scale * weight.x + bias.x + t.own * t.v[2 * lane]) * g.x;
    const float x1 = (d.y * scale * weight.y + bias.y + t.own * t.v[2 * lane + 1]) * g.y;
    *reinterpret_cast<uint32_t*>(in.out + at) = to_half2(x0, x1);
}

__device__ __forceinline__ void load8(const float* p, float (&x)[8]) {
    const float4 low = *reinterpret_cast<const float4*>(p), high = *reinterpret_cast<const float4*>(p + 4);
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w, x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}

__device__ __forceinline__ void load8(const __half* p, float (&x)[8]) {
    const uint4 raw = *reinterpret_cast<const uint4*>(p);
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 pair = to_float2(words[i]);
        x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
    }
}

__device__ __forceinline__ void store8(float* p, const float (&x)[8]) {
    *reinterpret_cast<float4*>(p) = make_float4(x[0], x[1], x[2], x[3]);
    *reinterpret_cast<float4*>(p + 4) = make_float4(x[4], x[5], x[6], x[7]);
}

__device__ __forceinline__ void store8(__half* p, const float (&x)[8]) {
    *reinterpret_cast<uint4*>(p) = make_uint4(to_half2(x[0], x[1]), to_half2(x[2], x[3]), to_half2(x[4], x[5]), to_half2(x[6], x[7]));
}

__device__ __forceinline__ int state_row(int n) { return n * 16 + threadIdx.x / 8; }

template <typename T>
__device__ __forceinline__ T* state_place(const TimeMix& in, int slot, int head, int n) {
    return static_cast<T*>(in.state) + slot * in.slot_stride + size_t(head) * HEAD * HEAD + state_row(n) * HEAD + threadIdx.x % 8 * 8;
}

// One step of the recurrence for this thread's part of S; y goes to t.y.
__device__ __forceinline__ void step(Token& t, float (&s)[OWN][8]) {
    const int keys = threadIdx.x % 8 * 8;
    float kk[8], w[8], k[8], b[8], r[8], removed[OWN], y[OWN];
    load8(t.kk + keys, kk);
    load8(t.w + keys, w);
    load8(t.k + keys, k);
    load8(t.b + keys, b);
    load8(t.r + keys, r);
#pragma unroll
    for (int n = 0; n < OWN; n++) {
        removed[n] = 0.f;
#pragma unroll
        for (int i = 0; i < 8; i++) removed[n] += s[n][i] * kk[i];
    }
#pragma unroll
    for (int offset = 1; offset < 8; offset *= 2)
#pragma unroll
        for (int n = 0; n < OWN; n++) removed[n] += __shfl_xor_sync(ALL, removed[n], offset);
#pragma unroll
    for (int n = 0; n < OWN; n++) {
        const float v = t.v[state_row(n)];
        y[n] = 0.f;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            s[n][i] = s[n][i] * w[i] + (v * k[i] - removed[n] * b[i]);
            y[n] += s[n][i] * r[i];
        }
    }
#pragma unroll
    for (int offset = 1; offset < 8; offset *= 2)
#pragma unroll
        for (int n = 0; n < OWN; n++) y[n] += __shfl_xor_sync(ALL, y[n], offset);
    if (keys == 0)
#pragma unroll
        for (int n = 0; n < OWN; n++) t.y[state_row(n)] = y[n];
}

// Decode: every row is one token. Grid: heads, rows. A row whose slot is negative is padding: its output is zero.
template <typename T>
__global__ void __launch_bounds__(THREADS) wkv_step_kernel(const __grid_constant__ TimeMix in, const int* slots) {
    __shared__ Token token;
    const int head = blockIdx.x, row = blockIdx.y, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int slot = slots[row];
    float s[OWN][8];
    if (slot >= 0)   // the state was written a step ago, so it can be fetched while the kernel before still runs
#pragma unroll
        for (int n = 0; n < OWN; n++) load8(state_place<T>(in, slot, head, n), s[n]);
    wait_for_inputs();
    if (slot < 0) {
        if (warp == 0) *reinterpret_cast<uint32_t*>(in.out + size_t(row) * in.width + head * HEAD + 2 * lane) = 0;
        return;
    }
    if (warp == 0) prepare(in, row, head, lane, token);
    __syncthreads();
    step(token, s);
#pragma unroll
    for (int n = 0; n < OWN; n++) store8(state_place<T>(in, slot, head, n), s[n]);
    __syncthreads();
    if (warp == 0) finish(in, row, head, lane, token);
}

// Prefill: row i has tokens first[i] .. last[i]. Grid: heads, rows. The state stays in registers from the first token to the last.
template <typename T>
__global__ void __launch_bounds__(THREADS) wkv_sequence_kernel(const __grid_constant__ TimeMix in, const int* first, const int* last,
                                                               const int* slots) {
    __shared__ Token tokens[CHUNK];
    const int head = blockIdx.x, row = blockIdx.y, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    wait_for_inputs();
    const int slot = slots[row], begin = first[row], end = last[row] + 1;
    float s[OWN][8];
#pragma unroll
    for (int n = 0; n < OWN; n++) load8(state_place<T>(in, slot, head, n), s[n]);
    for (int base = begin; base < end; base += CHUNK) {
        const int count = min(CHUNK, end - base);
        for (int i = warp; i < count; i += WARPS) prepare(in, base + i, head, lane, tokens[i]);
        __syncthreads();
        for (int i = 0; i < count; i++) step(tokens[i], s);
        __syncthreads();
        for (int i = warp; i < count; i += WARPS) finish(in, base + i, head, lane, tokens[i]);
        __syncwarp();  // a warp prepares next what it has just finished
    }
#pragma unroll
    for (int n = 0; n < OWN; n++) store8(state_place<T>(in, slot, head, n), s[n]);
}

extern "C" {
int rwkv_wkv_step(const TimeMix* in, int rows, const int* slots, int fp32, cudaStream_t stream) {
    const dim3 grid(in->width / HEAD, rows);
    return fp32 ? launch(wkv_step_kernel<float>, grid, THREADS, 0, stream, *in, slots)
                : launch(wkv_step_kernel<__half>, grid, THREADS, 0, stream, *in, slots);
}

int rwkv_wkv_sequence(const TimeMix* in, int rows, const int* first, const int* last, const int* slots, int fp32, cudaStream_t stream) {
    const dim3 grid(in->width / HEAD, rows);
    return fp32 ? launch(wkv_sequence_kernel<float>, grid, THREADS, 0, stream, *in, first, last, slots)
                : launch(wkv_sequence_kernel<__half>, grid, THREADS, 0, stream, *in, first, last, slots);
}
}
