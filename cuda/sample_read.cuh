// Reading a row of logits into the segments of its team, and the largest logits of groups of its tokens.
#pragma once
#include "sample_row.cuh"
#include "sample_select.cuh"
#include "sample_team.cuh"

namespace sample {

__device__ __forceinline__ float4 load4(const float* p) {
    return load_streamed(reinterpret_cast<const float4*>(p));
}

__device__ __forceinline__ float4 load4(const __half* p) {
    const uint2 x = load_streamed(reinterpret_cast<const uint2*>(p));
    const float2 low = to_float2(x.x), high = to_float2(x.y);
    return make_float4(low.x, low.y, high.x, high.y);
}

__device__ __forceinline__ bool finite(float4 x) {
    return __fmaf_rn(x.x, 0.f, __fmaf_rn(x.y, 0.f, __fmaf_rn(x.z, 0.f, __fmul_rn(x.w, 0.f)))) == 0.f;
}

// Read a segment; returns the largest number of this lane. Ids that cannot be drawn become -inf, which no
// token has, and NaN becomes infinity: the row is broken. `meanwhile` runs while the first numbers are under
// way.
template <typename Logit, typename F>
__device__ __forceinline__ float read(const SampleInput& in, const Logit* logits, const Segment& segment,
                                      F meanwhile) {
    constexpr int UNROLL = 4;
    const bool aligned = (reinterpret_cast<uintptr_t>(logits) % (4 * sizeof(Logit))) == 0;
    float top = -INFINITY;
    const auto one = [&](float x, int id) {
        return id >= in.vocab ? -INFINITY : x < INFINITY ? sanitise(x) : INFINITY;
    };
    for (int start = 4 * lane_id(); start < segment.length; start += UNROLL * 4 * WARP) {
        float4 x[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            const int at = start + i * 4 * WARP, id = segment.first_id + at;
            if (at >= segment.length) break;
            if (aligned && id + 4 <= in.width) {
                x[i] = load4(logits + id);
            } else {
                x[i].x = id < in.width ? float(logits[id]) : 0.f;
                x[i].y = id + 1 < in.width ? float(logits[id + 1]) : 0.f;
                x[i].z = id + 2 < in.width ? float(logits[id + 2]) : 0.f;
                x[i].w = id + 3 < in.width ? float(logits[id + 3]) : 0.f;
            }
        }
        if (start < 4 * WARP) meanwhile();
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            const int at = start + i * 4 * WARP, id = segment.first_id + at;
            if (at >= segment.length) break;
            float4 y = make_float4(__fadd_rn(x[i].x, 0.f), __fadd_rn(x[i].y, 0.f), __fadd_rn(x[i].z, 0.f),
                                   __fadd_rn(x[i].w, 0.f));
            if (id + 4 > in.vocab || !finite(x[i])) {
                y.x = one(x[i].x, id), y.y = one(x[i].y, id + 1);
                y.z = one(x[i].z, id + 2), y.w = one(x[i].w, id + 3);
            }
            *reinterpret_cast<float4*>(segment.values + at) = y;
            top = fmaxf(top, fmaxf(fmaxf(y.x, y.y), fmaxf(y.z, y.w)));
        }
    }
    return top;
}

// The same for fp16, which stays that. If a number is not finite, the segment is read again as fp32.
template <typename F>
__device__ __forceinline__ float read_halves(const SampleInput& in, const __half* logits, Segment& segment,
                                             F meanwhile) {
    constexpr int UNROLL = 4;
    const bool aligned = reinterpret_cast<uintptr_t>(logits) % sizeof(uint4) == 0;
    const auto to_half2 = [](const uint32_t& pair) { return *reinterpret_cast<const __half2*>(&pair); };
    const __half none = __ushort_as_half(0xfc00);  // -inf
    const __half2 zero = __half2half2(__ushort_as_half(0));
    __half2 top = __half2half2(none), finite = zero;  // NaN once a number was not finite
    for (int start = 8 * lane_id(); start < segment.length; start += UNROLL * 8 * WARP) {
        uint4 x[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            const int at = start + i * 8 * WARP, id = segment.first_id + at;
            if (at >= segment.length) break;
            if (aligned && id + 8 <= in.width) {
                x[i] = load_streamed(reinterpret_cast<const uint4*>(logits + id));
            } else {
                const auto one = [&](int k) {
                    return k < in.width ? uint32_t(__half_as_ushort(logits[k])) : 0u;
                };
                const auto two = [&](int k) { return one(k) | one(k + 1) << 16; };
                x[i] = make_uint4(two(id), two(id + 2), two(id + 4), two(id + 6));
            }
        }
        if (start < 8 * WARP) meanwhile();
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            const int at = start + i * 8 * WARP, id = segment.first_id + at;
            if (at >= segment.length) break;
            alignas(16)
                __half2 y[4] = {to_half2(x[i].x), to_half2(x[i].y), to_half2(x[i].z), to_half2(x[i].w)};
            if (id + 8 <= in.vocab) {
#pragma unroll
                for (int j = 0; j < 4; j++) finite = __hfma2(y[j], zero, finite);
            } else {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const bool low = id + 2 * j < in.vocab, high = id + 2 * j + 1 < in.vocab;  // can be drawn
                    if (low) finite = __hfma2(__low2half2(y[j]), zero, finite);
                    if (high) finite = __hfma2(__high2half2(y[j]), zero, finite);
                    y[j] = __halves2half2(low ? __low2half(y[j]) : none, high ? __high2half(y[j]) : none);
                }
            }
#pragma unroll
            for (int j = 0; j < 4; j++)
                y[j] = __hadd2(y[j], zero), top = larger_halves(top, y[j]);  // there is one zero only
            segment.halves()[at / 8] = *reinterpret_cast<const uint4*>(y);
        }
    }
    if (warp_any(!__hbeq2(finite, zero))) {
        sync_warp();
        segment.wide = true;
        return read(in, logits, segment, [] {});
    }
    return fmaxf(__low2float(top), __high2float(top));
}

// The largest key of each group, in all blocks, from the largest number of each lane. Groups ascend with the
// segments; within one they take turns of the one, four or eight ids that a lane reads at once.
__device__ inline void gather_tops(const Team& team, float top, uint32_t* tops) {
    uint32_t key = to_key(top);
    const int groups = GROUPS / team.segments(), lanes = WARP / groups;  // of this segment; of a group
    for (int offset = lanes / 2; offset > 0; offset /= 2) key = max(key, shuffle_xor(key, offset));
    const int group = lane_id() / team.size;  // one lane for each group and block
    key = shuffle(key, group * lanes);
    if (group < groups) *team.at(tops + team.segment() * groups + group, lane_id() % team.size) = key;
    team.sync();
}

// The largest key of the row, in every thread.
__device__ __forceinline__ uint32_t largest(const uint32_t* tops) {
    const uint4 own = reinterpret_cast<const uint4*>(tops)[lane_id()];
    static_assert(GROUPS == 4 * WARP, "four to a lane");
    return warp_max(max(max(own.x, own.y), max(own.z, own.w)));
}

// The first segment with that top, in every thread.
__device__ __forceinline__ int first_with(const Team& team, const uint32_t* tops, uint32_t key) {
    for (int start = 0; start < GROUPS; start += WARP) {
        const unsigned found = warp_ballot(tops[start + lane_id()] == key);
        if (found) return (start + __ffs(found) - 1) / (GROUPS / team.segments());
    }
    return 0;
}

}  // namespace sample
