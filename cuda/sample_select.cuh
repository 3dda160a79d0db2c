// Where top_k and top_p cut: the largest value at which `count` tokens or a weight of `mass` are in, found without sorting.
//
// First a histogram of 256 buckets, linear in the value, over the range that can hold the threshold; then the tokens of the one bucket that
// holds it are listed in one block, which ranks them. Should they be too many for that, more histograms over the bits of the values narrow
// them down. Counts and weights are integers, so the order in which atomics arrive does not matter.
#pragma once
#include "sample_number.cuh"
#include "sample_team.cuh"

namespace sample {

constexpr int BUCKETS = 256;
constexpr int LISTED = 256;  // tokens that one block ranks
constexpr int LISTS = 4;     // that a row may need: a first try and a last one, twice

struct Limits {
    uint32_t count;
    uint64_t mass;

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

    __device__ __forceinline__ int linear(float x) const { return min(BUCKETS - 1, __float2int_rz(__fmul_rn(__fsub_rn(origin, x), inverse))); }
    __device__ __forceinline__ bool has(uint32_t key, float x) const { return key >= low && key <= high && linear(x) == bucket; }
};

struct Selection {
    uint32_t counts[BUCKETS], mass_low[BUCKETS], mass_high[BUCKETS];
    uint64_t scan_mass[WARPS];
    uint32_t scan_count[WARPS];
    uint64_t list_mass[LISTED];
    uint32_t list[LISTED];
    uint32_t listed[LISTS];
    Range range;
};

// The values of a warp: `length`, a multiple of 128, ids from `first_id` on.
struct Segment {
    float* values;
    int first_id, length;

    template <typename F>
    __device__ __forceinline__ void each(F f) const {
#pragma unroll 4
        for (int at = 4 * lane_id(); at < length; at += 4 * WARP) {
            const float4 x = *reinterpret_cast<const float4*>(values + at);
            f(x.x, at), f(x.y, at + 1), f(x.z, at + 2), f(x.w, at + 3);
        }
    }
};

__device__ __forceinline__ void publish(const Team& team, Range* place, const Range& range) {
    for (int of = 0; of < team.size; of++) *team.at(place, of) = range;
}

// The bucket that holds the threshold, in every block's `range`. Buckets count down from the top: linear ones, or 2**shift keys each.
__device__ inline void histogram(const Team& team, Selection& s, const Segment& segment, const Softmax& softmax, const Limits& limits,
                                 const Range& range, bool linear, int shift) {
    for (int i = threadIdx.x; i < BUCKETS; i += THREADS) s.counts[i] = s.mass_low[i] = s.mass_high[i] = 0;
    __syncthreads();
    segment.each([&](float x, int) {
        const uint32_t key = to_key(x);
        if (linear ? key < range.low || key > range.high : !range.has(key, x)) return;
        const int bucket = linear ? range.linear(x) : (range.high - key) >> shift;
        atomicAdd(&s.counts[bucket], 1u);
        if (!limits.weighs()) return;
        const uint64_t w = softmax.fixed(x);
        const uint32_t low = uint32_t(w), before = atomicAdd(&s.mass_low[bucket], low);
        const uint32_t high = uint32_t(w >> 32) + (before + low < before);  // with the carry
        if (high) atomicAdd(&s.mass_high[bucket], high);
    });
    team.sync();
    if (team.rank == 0) {
        uint32_t count = 0;
        uint64_t mass = 0;
        const int bucket = threadIdx.x;
        if (bucket < BUCKETS) {
            for (int of = 0; of < team.size; of++) {
                count += *team.at(&s.counts[bucket], of);
                if (limits.weighs()) mass += (uint64_t(*team.at(&s.mass_high[bucket], of)) << 32) + *team.at(&s.mass_low[bucket], of);
            }
        }
        uint32_t tokens = warp_scan(count);
        uint64_t weight = warp_scan(mass);
        if (lane_id() == WARP - 1) s.scan_count[warp_id()] = tokens, s.scan_mass[warp_id()] = weight;
        __syncthreads();
        for (int warp = 0; warp < warp_id(); warp++) tokens += s.scan_count[warp], weight += s.scan_mass[warp];
        tokens += range.above, weight += range.mass;
        if (limits.reached(tokens, weight) && !limits.reached(tokens - count, weight - mass)) {
            Range found = range;
            found.above = tokens - count, found.mass = weight - mass, found.inside = count;
            if (linear) {  // the keys that this bucket can have, and some more: `has` knows better
                found.bucket = bucket;
                const float slack = 1e-5f * (fabsf(range.origin) + fabsf(range.origin - from_key(range.low)));
                const float upper = range.origin - bucket / range.inverse + slack, lower = range.origin - (bucket + 1) / range.inverse - slack;
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

// List the tokens of the range in the first block. Returns how many they are; if more than LISTED, the list is of no use.
__device__ inline uint32_t list(const Team& team, Selection& s, const Segment& segment, const Range& range, int which) {
    uint32_t* listed = team.at(&s.listed[which], 0);
    segment.each([&](float x, int) {
        const uint32_t key = to_key(x);
        if (!range.has(key, x)) return;
        const uint32_t at = atomicAdd(listed, 1u);
        if (at < LISTED) *team.at(&s.list[at], 0) = key;
    });
    team.sync();
    return __shfl_sync(ALL, lane_id() == 0 ? *listed : 0u, 0);
}

// The threshold among `size` listed tokens, in every block's `range`.
__device__ inline void rank(const Team& team, Selection& s, const Softmax& softmax, const Limits& limits, const Range& range, uint32_t size) {
    if (team.rank == 0) {
        const uint32_t own = threadIdx.x;
        if (own < size) s.list_mass[own] = softmax.fixed(from_key(s.list[own]));
        __syncthreads();
        if (own < size) {
            const uint32_t key = s.list[own];
            uint32_t above = range.above, same = 0;
            uint64_t mass = range.mass;
            bool first = true;  // of its ties; one of them speaks for all
            for (uint32_t i = 0; i < size; i++) {
                const uint32_t other = s.list[i];
                if (other > key) above += 1, mass += s.list_mass[i];
                if (other == key) same += 1, first &= i >= own;
            }
            if (first && limits.reached(above + same, mass + same * s.list_mass[own]) && !limits.reached(above, mass)) {
                Range found = range;
                found.low = found.high = key, found.above = above, found.inside = same, found.mass = mass;
                publish(team, &s.range, found);
            }
        }
    }
    team.sync();
}

// The threshold as a range of one key, with the tokens and the weight above it and the number of tokens at it. Together the tokens with
// keys in low..high reach the limits. `few`: they are probably few enough to be listed at once. `lists` counts the lists used so far.
__device__ inline Range select(const Team& team, Selection& s, const Segment& segment, const Softmax& softmax, const Limits& limits,
                               uint32_t low, uint32_t high, bool few, int& lists) {
    Range range = {low, high, softmax.top, 0.f, 0, 0, ~0u, 0};
    if (few) {
        const uint32_t size = list(team, s, segment, range, lists++);
        if (size <= LISTED) {
            rank(team, s, softmax, limits, range, size);
            return s.range;
        }
    }
    range.inverse = BUCKETS / fminf(softmax.top - from_key(low), 40.f / softmax.scale);
    histogram(team, s, segment, softmax, limits, range, true, 0);
    range = s.range;
    while (range.low < range.high && range.inside > LISTED) {
        const int shift = max(0, 24 - __clz(range.high - range.low));
        histogram(team, s, segment, softmax, limits, range, false, shift);
        range = s.range;
    }
    if (range.low < range.high) {
        rank(team, s, softmax, limits, range, list(team, s, segment, range, lists++));
        range = s.range;
    }
    return range;
}

}  // namespace sample
