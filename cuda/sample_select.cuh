// Where top_k and top_p cut: the largest value at which `count` tokens or a weight of `mass` are in, found without sorting.
//
// A histogram of 256 buckets, linear in the value, covers the range that can hold the threshold; more histograms, over the bits of the
// values, narrow its bucket down until it holds one value or so few tokens that one block can rank them (sample_list.cuh). Counts and
// weights are integers, so the order in which atomics arrive does not matter.
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
    __device__ __forceinline__ bool reached(uint32_t tokens, uint64_t weight) const { return tokens >= count || weight >= mass; }
};

// The tokens that may be at the threshold: those with keys in low..high that fall into one bucket of the linear histogram.
struct Range {
    uint32_t low, high;
    float origin, inverse;  // of the linear histogram: its upper end, and buckets per unit. Inverse 0: everything is in bucket 0
    int bucket;
    uint32_t above;         // tokens above this range
    uint32_t inside;        // tokens in it
    uint64_t mass;          // weight above it

    __device__ __forceinline__ int linear(float x) const {
        return min(BUCKETS - 1, __float2int_rz(__fmul_rn(__fsub_rn(origin, x), inverse)));
    }
};

struct Histogram {
    uint32_t counts[BUCKETS], mass_low[BUCKETS], mass_high[BUCKETS];
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
    uint32_t keys[LISTED];        // in the first block: what the blocks list, each in its own part
    int ids[LISTED];
    uint32_t listed[LISTS];       // by this block
    uint32_t sizes[MOST_BLOCKS];  // listed by each block
    uint64_t scan_mass[WARPS];
    uint32_t scan_count[WARPS];
    Range range;
};

// The values of a warp: `length`, a multiple of 128, ids from `first_id` on.
struct Segment {
    float* values;
    int first_id, length;

    template <typename F>
    __device__ __forceinline__ void each(F f) const {
#pragma unroll 2
        for (int at = 4 * lane_id(); at < length; at += 4 * WARP) {
            const float4 x = *reinterpret_cast<const float4*>(values + at);
            f(x.x, at), f(x.y, at + 1), f(x.z, at + 2), f(x.w, at + 3);
        }
    }

    // The same for those values of which `keep` is true, with one copy of f in the code: the kernel must fit in the instruction cache.
    template <typename K, typename F>
    __device__ __forceinline__ void each_where(K keep, F f) const {
#pragma unroll 1
        for (int at = 4 * lane_id(); at < length; at += 4 * WARP) {
            const float4 x = *reinterpret_cast<const float4*>(values + at);
            unsigned found = keep(x.x) | keep(x.y) << 1 | keep(x.z) << 2 | keep(x.w) << 3;
#pragma unroll 1
            for (; found; found &= found - 1) {
                const int place = at + __ffs(found) - 1;
                f(values[place], place);
            }
        }
    }
};

__device__ __forceinline__ void publish(const Team& team, Range* place, const Range& range) {
#pragma unroll 1
    for (int of = 0; of < team.size; of++) *team.at(place, of) = range;
}

// The bucket that holds the threshold, in every block's `range`. Buckets count down from the top: linear ones, or 2**shift keys each.
__device__ inline void histogram(const Team& team, Selection& s, const Segment& segment, const Softmax& softmax, const Limits& limits,
                                 const Range& range, bool linear, int shift) {
    Histogram& h = s.histogram;
    for (int i = threadIdx.x; i < BUCKETS; i += THREADS) h.counts[i] = h.mass_low[i] = h.mass_high[i] = 0;
    __syncthreads();
    const float least = from_key(range.low), most = from_key(range.high);
    segment.each_where([&](float x) { return x >= least && x <= most; }, [&](float x, int) {
        const int bucket = linear ? range.linear(x) : (range.high - to_key(x)) >> shift;
        if (!linear && range.linear(x) != range.bucket) return;
        atomicAdd(&h.counts[bucket], 1u);
        if (!limits.weighs()) return;
        const uint64_t w = softmax.fixed(x);
        const uint32_t low = uint32_t(w), before = atomicAdd(&h.mass_low[bucket], low);
        const uint32_t high = uint32_t(w >> 32) + (before + low < before);  // with the carry
        if (high) atomicAdd(&h.mass_high[bucket], high);
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
                mass += (uint64_t(*team.at(&h.mass_high[bucket], of)) << 32) + *team.at(&h.mass_low[bucket], of);
            }
        }
        uint32_t tokens = warp_scan(count);
        uint64_t weight = warp_scan(mass);
        if (lane_id() == WARP - 1) s.scan_count[warp_id()] = tokens, s.scan_mass[warp_id()] = weight;
        __syncthreads();
#pragma unroll 1
        for (int warp = 0; warp < warp_id(); warp++) tokens += s.scan_count[warp], weight += s.scan_mass[warp];
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
