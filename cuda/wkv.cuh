// The time mix between its GEMMs: gates, decay, key normalisation, the recurrence, group norm, bonus and
// gate.
//
//   per head, with S [value, key]:   S' = S diag(w) - (S kk) (kk a)^T + v k^T      y = S' r
//   w = exp(-exp(-1/2) sigmoid(w0 + w~)), a = sigmoid(a0 + a~)
//   kk = k k_k / max(|k k_k|, 1e-12), k = k~ (1 + (a - 1) k_a)
//   v = v~ + (v_first - v~) sigmoid(v0 + v~~)    (not in layer 0)
//   out = (group_norm(y) + (r . k r_k) v) g
//
// Tuned states may scale y by channel before the group norm, y (1 + offset): see ReadoutInput.
//
// r, k, v, the four low-rank results and g, v_first, out: [T, C] fp16. Vectors: [C] fp16. The state of slot s
// and head h: 64 x 64 numbers, fp16 or fp32, at state + s * slot_stride + h * 4096, read and written in
// place. Rows of one token run through wkv_decode.cuh, longer ones through wkv_prefill.cuh.
//
// Deferred writes: an fp16 state may lag up to MAX_LAG tokens. Writing it takes as long as reading it, so a
// step of one token only notes what it would do to S, and every third does what three would and writes S: of
// six passes through memory four are left. What is deferred for slot s and head h are, for each token, the
// oldest first, DEFERRED_VECTORS vectors of 64 fp16 numbers, at
// deferred + s * deferred_stride + h * MAX_LAG * DEFERRED_VECTORS * 64. wkv_flush.cu writes the states before
// anything else reads them. Where each token is to round the state, so that the same tokens give the same
// bits in steps of any size, nothing is deferred.
#pragma once
#include "common.cuh"

constexpr int HEAD = 64;
constexpr float NORM_EPSILON = 64e-5f;
constexpr int MAX_LAG = 2;  // tokens
// The vectors: 1 - w (of w near 1 it keeps more digits than w), k, kk a, v, and S kk.
enum Deferred { LOST, KEY, REMOVAL, VALUE, REMOVED, DEFERRED_VECTORS };
// How states are stored: fp16 that may lag, fp32, or fp16 that each token rounds and that never lags.
enum StateNumbers { DEFERRED_HALF, SINGLE, ROUNDED_HALF };
constexpr float DECAY = -0.6065306597126334f;  // -exp(-1/2)

struct TimeMixInput {
    const __half *r, *k, *v, *w, *a, *mix, *g;  // mix (of v_first) is null in layer 0
    const __half* v_first;
    const __half *w0, *a0, *v0, *k_k, *k_a, *r_k, *norm_weight, *norm_bias;
    __half* out;
    void* state;
    size_t slot_stride;  // in numbers
    int width;
    int* tile_counter;       // of rows of one token: zero between launches; for one stream
    __half* deferred;        // of states in fp16
    size_t deferred_stride;  // in numbers
    const int* lag;          // [T], of rows of one token: tokens that the row's state lags
};

// By what y of some rows is scaled before the group norm. Kernels with a parameter SCALED ignore it where
// that is false.
struct ReadoutInput {
    const __half* offsets;  // [C] of slot s at offsets + s * slot_stride
    size_t slot_stride;     // in numbers
    const int* slot_of;     // [T], negative: not scaled
};

__device__ __forceinline__ float readout_scale(const ReadoutInput& in, size_t token, size_t channel) {
    const int slot = in.slot_of[token];
    return slot < 0 ? 1.f : 1.f + __half2float(in.offsets[slot * in.slot_stride + channel]);
}

__device__ __forceinline__ float2 pair_at(const __half* p, size_t at) {
    return __half22float2(*reinterpret_cast<const __half2*>(p + at));
}

// 8 numbers of a state as they are stored: they are not converted, and so not waited for, before they are
// needed.
template <typename T>
struct Raw8;

template <>
struct Raw8<__half> {
    uint4 words;
    __device__ __forceinline__ void load(const __half* p) {
        words = load_streamed(reinterpret_cast<const uint4*>(p));
    }
    __device__ __forceinline__ void widen(float (&x)[8]) const {
        const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 pair = to_float2(pairs[i]);
            x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
        }
    }
};

template <>
struct Raw8<float> {
    float4 low, high;
    __device__ __forceinline__ void load(const float* p) {
        low = load_streamed(reinterpret_cast<const float4*>(p)),
        high = load_streamed(reinterpret_cast<const float4*>(p + 4));
    }
    __device__ __forceinline__ void widen(float (&x)[8]) const {
        x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w, x[4] = high.x, x[5] = high.y, x[6] = high.z,
        x[7] = high.w;
    }
};

__device__ __forceinline__ void store8(float* p, const float (&x)[8]) {
    *reinterpret_cast<float4*>(p) = make_float4(x[0], x[1], x[2], x[3]);
    *reinterpret_cast<float4*>(p + 4) = make_float4(x[4], x[5], x[6], x[7]);
}

__device__ __forceinline__ void store8(__half* p, const float (&x)[8]) {
    store(p, to_finite_half2(x[0], x[1]), to_finite_half2(x[2], x[3]), to_finite_half2(x[4], x[5]),
          to_finite_half2(x[6], x[7]));
}
