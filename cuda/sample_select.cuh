// Where top_k and top_p cut: the largest value at which `count` tokens or a weight of `mass` are in, found
// without sorting.
//
// A histogram of 256 buckets, linear in the value, covers the range that can hold the threshold; more
// histograms, over the bits of the values, narrow its bucket down until it holds one value or so few tokens
// that one block can rank them (sample_list.cuh). Counts and weights are integers, so the order in which
// atomics arrive does not matter.
#pragma once
#include "sample_number.cuh"
#include "sample_team.cuh"

namespace sample {

constexpr int BUCKETS = 256;
constexpr int LISTED = 256;  // tokens that one block ranks
constexpr int LISTS = 5;     // that a row may need: a first try, and two for each limit

struct Limits {
    uint32_t count;  // ~0: none
    uint64_t mass;   // ~0: none

    __device__ __forceinline__ bool weighs() const { return mass != ~0ull; }
    __device__ __forceinline__ bool reached(uint32_t tokens, uint64_t weight) const {
        return tokens >= count || weight >= mass;
    }
};

// The tokens that may be at the threshold: those with keys in low..high that fall into one bucket of the
// linear histogram.
struct Range {
    uint32_t low, high;
    float origin, inverse;  // of the linear histogram: its upper end, and buckets per unit. Inverse 0:
                            // everything is in bucket 0
    int bucket;
    uint32_t above;   // tokens above this range
    uint32_t inside;  // tokens in it
    uint64_t mass;    // weight above it

    // A NaN becomes 0: where `inverse` is infinite, as all values are nearly equal, or 0 and `x` is too far
    // away for a float.
    __device__ __forceinline__ int linear(float x) const {
        return min(BUCKETS - 1, __float2int_rz(__fmul_rn(__fsub_rn(origin, x), inverse)));
    }
};

// Weights are added in three parts, so that none of up to 65536 additions carries into the next one and no
// atomic has to return a value.
constexpr int PARTS = 3, PART_BITS = 16;

struct Histogram {
    uint32_t counts[BUCKETS], mass[PARTS][BUCKETS];
};

// Listed tokens one after the other, up to a multiple of 8 with key 0, which no token has.
struct Ranking {
    alignas(16) uint64_t weights[LISTED];
    alignas(16) uint32_t keys[LISTED];
    alignas(16) int ids[LISTED];
};

struct Selection {
    union {  // never needed at the same time
        Histogram histogram;
        Ranking ranking;
    };
    uint32_t keys[LISTED];  // in the first block: what the blocks list, each in its own part
    int ids[LISTED];
    uint32_t listed[LISTS];       // by this block
    uint32_t sizes[MOST_BLOCKS];  // listed by each block
    uint64_t scan_mass[WARPS];
    uint32_t scan_count[WARPS];
    Range range;
};

// The values of a warp: `length`, a multiple of 256, ids from `first_id` on. `wide` ones are fp32. Others are
// fp16, as the logits were, and lie at the beginning of the same room: half the traffic, and two of them are
// compared in one instruction.
struct Segment {
    float* values;
    int first_id, length;
    bool wide;

    __device__ __forceinline__ uint4* halves() const {
        return reinterpret_cast<uint4*>(values);
    }  // eight each

    __device__ __forceinline__ float value(int at) const {
        return wide ? values[at] : __half2float(reinterpret_cast<const __half*>(values)[at]);
    }

    // The eight values from `at` on, a multiple of 8.
    __device__ __forceinline__ void load(int at, float (&x)[8]) const {
        if (wide) {
            const float4 a = *reinterpret_cast<const float4*>(values + at),
                         b = *reinterpret_cast<const float4*>(values + at + 4);
            x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
        } else {
            unpack(halves()[at / 8], x);
        }
    }

    static __device__ __forceinline__ void unpack(uint4 pairs, float (&x)[8]) {
        const float2 a = to_float2(pairs.x), b = to_float2(pairs.y), c = to_float2(pairs.z),
                     d = to_float2(pairs.w);
        x[0] = a.x, x[1] = a.y, x[2] = b.x, x[3] = b.y, x[4] = c.x, x[5] = c.y, x[6] = d.x, x[7] = d.y;
    }

    // Which of eight values reach `least`: bit i for value i.
    static __device__ __forceinline__ unsigned reach(uint4 pairs, __half2 least) {
        const auto mask = [&](uint32_t pair) {
            return halves_reaching(*reinterpret_cast<const __half2*>(&pair), least);
        };
        const unsigned found = (mask(pairs.x) & 0x00020001) | (mask(pairs.y) & 0x00080004) |
                               (mask(pairs.z) & 0x00200010) | (mask(pairs.w) & 0x00800040);
        return (found | found >> 16) & 0xff;
    }

    // f(x) for arrays x of 4 or 8 values, without those arrays in which all are less than `least` where SOME
    // is set.
    template <bool SOME, typename F>
    __device__ __forceinline__ void each(float least, F f) const {
        if (wide) {
#pragma unroll 2
            for (int at = 4 * lane_id(); at < length; at += 4 * WARP) {
                const float4 four = *reinterpret_cast<const float4*>(values + at);
                const float x[4] = {four.x, four.y, four.z, four.w};
                if (!SOME || fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])) >= least) f(x);
            }
        } else {
            const __half2 bound = __half2half2(__float2half_rd(least));
#pragma unroll 1
            for (int at = lane_id(); at < length / 8; at += WARP) {
                const uint4 pairs = halves()[at];
                if (SOME && !reach(pairs, bound)) continue;
                float x[8];
                unpack(pairs, x);
                f(x);
            }
        }
    }

    // f(x, at) for the values that reach `least`, with one copy of f in the code: the kernel must fit in the
    // instruction cache.
    template <typename F>
    __device__ __forceinline__ void each_from(float least, F f) const {
        const __half2 bound = __half2half2(__float2half_rd(least));  // not above `least`
        const int size = wide ? 4 : 8;
#pragma unroll 1
        for (int at = size * lane_id(); at < length; at += size * WARP) {
            unsigned found;
            if (wide) {
                const float4 x = *reinterpret_cast<const float4*>(values + at);
                found = (x.x >= least) | (x.y >= least) << 1 | (x.z >= least) << 2 | (x.w >= least) << 3;
            } else {
                found = reach(halves()[at / 8], bound);
            }
#pragma unroll 1
            for (; found; found &= found - 1) {
                const int place = at + __ffs(found) - 1;
                const float x = value(place);
                if (x >= least) f(x, place);
            }
        }
    }

    // The whole warp: make the values fp32, from the last to the first, so that none is overwritten before it
    // is read.
    __device__ __forceinline__ void widen() {
        if (wide) return;
#pragma unroll 1
        for (int start = length - 8 * WARP; start >= 0; start -= 8 * WARP) {
            const int at = start + 8 * lane_id();
            float x[8];
            load(at, x);
            sync_warp();
            *reinterpret_cast<float4*>(values + at) = make_float4(x[0], x[1], x[2], x[3]);
            *reinterpret_cast<float4*>(values + at + 4) = make_float4(x[4], x[5], x[6], x[7]);
        }
        wide = true;
    }
};

__device__ __forceinline__ void publish(const Team& team, Range* place, const Range& range) {
#pragma unroll 1
    for (int of = 0; of < team.size; of++) *team.at(place, of) = range;
}

// The bucket that holds the threshold, in every block's `range`. Buckets count down from the top: linear
// ones, or 2**shift keys each.
__device__ inline void histogram(const Team& team, Selection& s, const Segment& segment,
                                 const Softmax& softmax, const Limits& limits, const Range& range,
                                 bool linear, int shift) {
    Histogram& h = s.histogram;
    for (int i = threadIdx.x; i < BUCKETS; i += THREADS)
        h.counts[i] = h.mass[0][i] = h.mass[1][i] = h.mass[2][i] = 0;
    __syncthreads();
    const float least = from_key(range.low), most = from_key(range.high);
    segment.each_from(least, [&](float x, int) {
        if (x > most) return;
        const int bucket = linear ? range.linear(x) : (range.high - to_key(x)) >> shift;
        if (!linear && range.linear(x) != range.bucket) return;
        atomicAdd(&h.counts[bucket], 1u);
        if (!limits.weighs()) return;
        const uint64_t w = softmax.fixed(x);
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            const uint32_t bits = uint32_t(w >> part * PART_BITS) & ((1u << PART_BITS) - 1);
            if (bits) atomicAdd(&h.mass[part][bucket], bits);
        }
    });
    team.sync();
    if (team.rank == 0) {
        uint32_t count = 0;
        uint64_t mass = 0;
        const int bucket = threadIdx.x;
        if (bucket < BUCKETS) {
#pragma unroll
            for (int of = 0; of < MOST_BLOCKS; of++) {  // unrolled so that all are under way at once
                if (of >= team.size) break;
                count += *team.at(&h.counts[bucket], of);
#pragma unroll
                for (int part = 0; part < PARTS; part++)
                    mass += uint64_t(*team.at(&h.mass[part][bucket], of)) << part * PART_BITS;
            }
        }
        uint32_t tokens = warp_scan(count);
        uint64_t weight = warp_scan(mass);
        if (lane_id() == WARP - 1) s.scan_count[warp_id()] = tokens, s.scan_mass[warp_id()] = weight;
        __syncthreads();
#pragma unroll 1
        for (int warp = 0; warp < warp_id(); warp++)
            tokens += s.scan_count[warp], weight += s.scan_mass[warp];
        tokens += range.above, weight += range.mass;
        if (limits.reached(tokens, weight) && !limits.reached(tokens - count, weight - mass)) {
            Range found = range;
            found.above = tokens - count, found.mass = weight - mass, found.inside = count;
            if (linear) {  // the keys that this bucket can have, and some more: `linear` knows better
                found.bucket = bucket;
                const float slack = 1e-5f * (fabsf(range.origin) + fabsf(range.origin - from_key(range.low)));
                const float upper = range.origin - bucket / range.inverse + slack;
                const float lower = range.origin - (bucket + 1) / range.inverse - slack;
                if (upper == upper) found.high = min(range.high, to_key(upper));
                if (lower == lower && bucket < BUCKETS - 1) found.low = max(range.low, to_key(lower));
            } else {
                found.high = range.high - (uint32_t(bucket) << shift);
                if (found.high - range.low >= 1u << shift) found.low = found.high - (1u << shift) + 1;
            }
            publish(team, &s.range, found);
        }
    }
    team.sync();
}

}  // namespace sample
