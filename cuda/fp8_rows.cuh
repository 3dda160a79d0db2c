// Rows of fp16 as fp8 (e4m3) with a scale each, as quantize_rows.cu makes them, in kernels that have a row in
// registers anyway.
#pragma once
#include "common.cuh"

// Where rows go as fp8.
struct Fp8Rows {
    uint8_t* codes;  // [N, T, C], each 64 of a row in the order of gemm_tile8.cu; C is a multiple of 64
    float* scales;   // [N, T]: of a row the largest magnitude / 448
};

#if HOPPER
constexpr float MOST_FP8 = 448.f;

// Of two numbers, the first in the low byte.
__device__ __forceinline__ uint32_t fp8_pair(float2 x) {
    uint16_t codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(x.y), "f"(x.x));
    return codes;
}

// The same of a pair of fp16, times a factor.
__device__ __forceinline__ uint32_t fp8_pair(uint32_t pair, float factor) {
    const float2 x = to_float2(pair);
    return fp8_pair(make_float2(x.x * factor, x.y * factor));
}

// Of a row whose largest magnitude is `most`: by what it is divided, and with what it is multiplied.
__device__ __forceinline__ float fp8_scale(float most) { return most / MOST_FP8; }
__device__ __forceinline__ float fp8_factor(float most) { return most > 0.f ? MOST_FP8 / most : 0.f; }

// The largest magnitude of a warp's pairs of fp16, not counting NaN, as the bits of an fp16. So it can be
// compared as a whole number.
template <int N>
__device__ __forceinline__ uint32_t largest_of_warp(const uint32_t (&pairs)[N]) {
    __half2 largest = __half2half2(__half(0.f));
#pragma unroll
    for (int i = 0; i < N; i++)
        largest = __hmax2(largest, __habs2(reinterpret_cast<const __half2&>(pairs[i])));
    const uint32_t both = reinterpret_cast<const uint32_t&>(largest);
    return warp_max(max(both & 0xffff, both >> 16));
}

__device__ __forceinline__ float half_of(uint32_t bits) { return __half2float(__ushort_as_half(bits)); }

// Eight neighbours of a row from `column` on, a multiple of 8, times a factor to their places. Of each four
// lanes, which have 32 neighbours, each has two codes for each of four runs: they exchange them so that each
// stores eight of one run. All lanes of the warp do, though not all may have room there.
__device__ __forceinline__ void store_fp8(uint8_t* row, int column, const uint32_t (&pairs)[4], float factor,
                                          bool inside) {
    const unsigned lane = threadIdx.x % 4;
    const bool odd = lane % 2, upper = lane / 2;
    const uint32_t low = fp8_pair(pairs[0], factor) | fp8_pair(pairs[1], factor) << 16,
                   high = fp8_pair(pairs[2], factor) | fp8_pair(pairs[3], factor) << 16,
                   far = shuffle_xor(upper ? low : high, 2);
    // Two runs of lanes 0 and 1, or of lanes 2 and 3: those of lanes l % 2 and of l % 2 + 2.
    const uint32_t near = upper ? far : low, behind = upper ? high : far,
                   first = __byte_perm(near, behind, 0x5410), second = __byte_perm(near, behind, 0x7632),
                   own = odd ? second : first, other = shuffle_xor(odd ? first : second, 1),
                   even_lanes = odd ? other : own, odd_lanes = odd ? own : other;
    if (inside)
        *reinterpret_cast<uint2*>(row + column / 64 * 64 + lane * 16 + column / 32 % 2 * 8) = make_uint2(
            __byte_perm(even_lanes, odd_lanes, 0x5410), __byte_perm(even_lanes, odd_lanes, 0x7632));
}
#endif
