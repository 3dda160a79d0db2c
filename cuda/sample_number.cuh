// The numbers that a draw is made of: ordered keys of floats, weights in fixed point, random numbers from
// counters.
#pragma once
#include <float.h>

#include "common.cuh"

namespace sample {

// Unsigned integers in the order of the floats.
__device__ __forceinline__ uint32_t to_key(float x) {
    const uint32_t bits = __float_as_uint(x);
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

__device__ __forceinline__ float from_key(uint32_t key) {
    return __uint_as_float(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu));
}

__device__ __forceinline__ uint64_t to_key(double x) {
    const uint64_t bits = __double_as_longlong(x);
    return bits ^ (bits >> 63 ? ~0ull : 1ull << 63);
}

// NaN becomes 0, an infinity the largest finite number, and there is one zero only.
__device__ __forceinline__ float sanitise(float x) {
    if (x != x) return 0.f;
    return __fadd_rn(fminf(fmaxf(x, -FLT_MAX), FLT_MAX), 0.f);
}

// The id of a row of which nothing can be drawn: one of the model's logits is NaN or infinity, or all that
// could be drawn are -infinity. Whoever asked for it is answered with an error.
constexpr int BROKEN = -1;

// Whether that is so, by the largest key: of -infinity or, sanitised, of -FLT_MAX; of infinity, or of NaN,
// whose sign bit is 0 here.
__device__ __forceinline__ bool is_broken(uint32_t top) {
    constexpr uint32_t LOWEST = 0x00800000, INFINITE = 0xff800000;  // to_key of -FLT_MAX and of infinity
    return top <= LOWEST || top >= INFINITE;
}

// Weights are sums of multiples of 2**-40, where the likeliest token weighs 1. Sums of integers do not depend
// on the order of adding: a row draws the same token however it is split over threads, and what two passes
// add up agrees exactly.
constexpr int POINT = 40;
constexpr float HALF_POINT = 1 << (POINT / 2);
constexpr float ROUNDER =
    12582912.f;  // 3 * 2**22: adding it rounds to an integer, which is then in the low bits

// Sums of up to 1024 weights of at most 1.
struct Weight {
    uint32_t high = 0, low = 0;  // modulo 2**32; `low` may be negative

    // The bits of ROUNDER are subtracted once for all, which leaves one addition of three numbers for two
    // weights.
    template <int N>
    __device__ __forceinline__ void add(const float (&w)[N]) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const float rounded = __fmaf_rn(w[i], HALF_POINT, ROUNDER);
            const float rest = __fmaf_rn(w[i], HALF_POINT, -__fsub_rn(rounded, ROUNDER));  // exact
            high += __float_as_uint(rounded);
            low += __float_as_uint(__fmaf_rn(rest, HALF_POINT, ROUNDER));
        }
        high -= N * __float_as_uint(ROUNDER);
        low -= N * __float_as_uint(ROUNDER);
    }

    __device__ __forceinline__ uint64_t fixed() const {
        return (uint64_t(high) << (POINT / 2)) + int64_t(int32_t(low));
    }
};

// The unnormalised probability of a logit: 2 ** ((logit - top) scale), with scale = log2(e) / temperature.
struct Softmax {
    float top, scale;

    __device__ __forceinline__ float weight(float logit) const {
        return power_of_two(__fmul_rn(__fsub_rn(logit, top), scale));
    }

    __device__ __forceinline__ uint64_t fixed(float logit) const {
        Weight sum;
        sum.add({weight(logit)});
        return sum.fixed();
    }
};

// SplitMix64, bit for bit what rwkv_batch/ops/random.py computes.
__device__ __forceinline__ uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

__device__ __forceinline__ uint64_t step(uint64_t count) { return (count + 1) * 0x9E3779B97F4A7C15ull; }

// The random word of a row at a position; its upper 53 bits are the number.
__device__ __forceinline__ uint64_t random_word(uint64_t key, uint64_t position) {
    return mix(key + step(position));
}

// The number of one token, in [0, 1), at the position whose word is given.
__device__ __forceinline__ double token_uniform(uint64_t word, int token) {
    return __dmul_rn(__ull2double_rn(mix(mix(word) + step(token)) >> 11), 0x1p-53);
}

// u * total, rounded down, where u is the number of that word.
__device__ __forceinline__ uint64_t fraction_of(uint64_t word, uint64_t total) {
    return __umul64hi(word >> 11 << 11, total);
}

}  // namespace sample
