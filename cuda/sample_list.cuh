// A row's few tokens that matter, brought together in the first block of its team: ranked there, and drawn
// from if none is missing.
#pragma once
#include "sample_select.cuh"

namespace sample {

// List the tokens of the range in the first block. Returns how many they are, or ~0 if they do not fit.
// `which`: lists made before.
__device__ inline uint32_t list(const Team& team, Selection& s, const Segment& segment, const Range& range,
                                int which) {
    const uint32_t room = LISTED / team.size;  // of each block
    uint32_t* keys = team.at(s.keys, 0) + team.rank * room;
    int* ids = team.at(s.ids, 0) + team.rank * room;
    const float least = from_key(range.low), most = from_key(range.high);
    segment.each_from(least, [&](float x, int at) {
        if (x > most || range.linear(x) != range.bucket) return;
        const uint32_t place = atomicAdd(&s.listed[which], 1u);
        if (place < room) keys[place] = to_key(x), ids[place] = segment.first_id + at;
    });
    __syncthreads();
    if (threadIdx.x < team.size) *team.at(&s.sizes[team.rank], threadIdx.x) = s.listed[which];
    team.sync();
    uint32_t size = 0, longest = 0;
    for (int of = 0; of < team.size; of++) size += s.sizes[of], longest = max(longest, s.sizes[of]);
    return longest <= room ? size : ~0u;
}

// All threads of the first block: what has been listed, one after the other.
__device__ inline void compact(const Team& team, Selection& s, const Softmax& softmax, uint32_t size) {
    const uint32_t room = LISTED / team.size, own = threadIdx.x;
    Ranking& r = s.ranking;
    if (own < LISTED) {
        const uint32_t of = own / room, at = own % room;
        uint32_t before = 0;
        for (uint32_t i = 0; i < of; i++) before += s.sizes[i];
        if (at < s.sizes[of]) {
            const uint32_t key = s.keys[own];
            r.keys[before + at] = key, r.ids[before + at] = s.ids[own],
                            r.weights[before + at] = softmax.fixed(from_key(key));
        }
    }
    if (own >= size && own < (size + 7) / 8 * 8) r.keys[own] = 0, r.ids[own] = INT_MAX, r.weights[own] = 0;
    __syncthreads();
}

// Threads of a block that work on the same one of `size` ranked tokens, side by side in a warp: each looks at
// every `count`-th four.
struct Share {
    int count;
    uint32_t token, first;

    static __device__ __forceinline__ Share for_tokens(uint32_t size) {
        const int count = size <= THREADS / 4 ? 4 : THREADS / LISTED;
        return {count, threadIdx.x / count, 4 * (threadIdx.x % count)};
    }

    template <typename T>
    __device__ __forceinline__ T total(T x) const {
        for (int offset = 1; offset < count; offset *= 2) x += shuffle_xor(x, offset);
        return x;
    }
};

// All threads of a block: the threshold among `size` ranked tokens, given what is above all of them, left in
// `found`. Nothing is written if the limits are not reached.
__device__ inline void find_threshold(const Ranking& r, uint32_t size, const Limits& limits,
                                      const Range& range, Range* found) {
    const Share share = Share::for_tokens(size);
    const uint32_t own = share.token, key = own < size ? r.keys[own] : 0;
    uint32_t above = 0, same = 0, earlier = 0;
    uint64_t mass = 0;
#pragma unroll 1
    for (uint32_t i = share.first; i < size; i += 4 * share.count) {
        const uint4 others = *reinterpret_cast<const uint4*>(r.keys + i);
        const ulonglong2 a = *reinterpret_cast<const ulonglong2*>(r.weights + i);
        const ulonglong2 b = *reinterpret_cast<const ulonglong2*>(r.weights + i + 2);
        const auto count = [&](uint32_t other, uint64_t weight, uint32_t at) {
            above += other > key, mass += other > key ? weight : 0;
            same += other == key, earlier += other == key && at < own;
        };
        count(others.x, a.x, i), count(others.y, a.y, i + 1), count(others.z, b.x, i + 2),
            count(others.w, b.y, i + 3);
    }
    above = range.above + share.total(above), mass = range.mass + share.total(mass);
    same = share.total(same), earlier = share.total(earlier);
    if (own < size && share.first == 0 && earlier == 0 &&
        limits.reached(above + same, mass + same * r.weights[own]) && !limits.reached(above, mass)) {
        *found = range;
        found->low = found->high = key, found->above = above, found->inside = same, found->mass = mass;
    }
    __syncthreads();
}

// The threshold as a range of one key, with the tokens and the weight above it and the number of tokens at
// it, in all blocks. Together the tokens with keys in low..high reach the limits. `which` counts the lists.
__device__ inline Range select(const Team& team, Selection& s, const Segment& segment, const Softmax& softmax,
                               const Limits& limits, uint32_t low, uint32_t high, int& which) {
    Range range = {low, high, softmax.top, 0.f, 0, 0, 0, 0};
    range.inverse = BUCKETS / fminf(softmax.top - from_key(low), 40.f / softmax.scale);
    bool linear = true, tried = false;
#pragma unroll 1
    while (true) {
        const int shift = linear ? 0 : max(0, 24 - __clz(range.high - range.low));
        histogram(team, s, segment, softmax, limits, range, linear, shift);
        range = s.range;
        linear = false;
        if (range.low == range.high) return range;
        if (range.inside > (tried ? LISTED / MOST_BLOCKS : LISTED / 2))
            continue;  // LISTED / MOST_BLOCKS fit wherever they are
        tried = true;
        const uint32_t size = list(team, s, segment, range, which++);
        if (size > LISTED) continue;
        if (team.rank == 0) {
            compact(team, s, softmax, size);
            find_threshold(s.ranking, size, limits, range, &s.range);
            if (threadIdx.x > 0 && threadIdx.x < team.size) *team.at(&s.range, threadIdx.x) = s.range;
        }
        team.sync();
        return s.range;
    }
}

// What a token at the threshold weighs when just the share of them stays that fills the limit that binds.
__device__ __forceinline__ uint64_t share_of_tie(const Range& found, const Limits& limits, uint64_t weight) {
    if (found.above == 0) return weight;  // nothing else stays
    uint64_t room = found.inside * weight;
    if (limits.count != ~0u) room = min(room, (limits.count - found.above) * weight);
    if (limits.weighs()) room = min(room, limits.mass - found.mass);
    return found.inside == 1 ? room : room / found.inside;
}

// The weight that top_p asks for, of `total`.
__device__ __forceinline__ uint64_t part(double top_p, uint64_t total) {
    return max(uint64_t(1), min(total, uint64_t(top_p * double(total))));
}

// All threads of the first block: draws from the `size` listed tokens, which are all those that can stay.
// `limits` as they begin; a top_p that counts after top_k is given as `later`, otherwise it is 1. `token` is
// where the id is left.
__device__ inline void draw_from_list(const Team& team, Selection& s, const Softmax& softmax, Limits limits,
                                      double later, bool shares, uint64_t word, uint32_t size, int* token) {
    compact(team, s, softmax, size);
    const Range all = {0, ~0u, 0.f, 0.f, 0, 0, 0, 0};
    Ranking& r = s.ranking;
#pragma unroll 1
    while (true) {
        find_threshold(r, size, limits, all, &s.range);
        if (later == 1.) break;
        limits = {~0u, part(later, s.range.mass + s.range.inside * softmax.fixed(from_key(s.range.low)))};
        later = 1.;
        __syncthreads();
    }
    const Range found = s.range;
    const uint64_t weight = softmax.fixed(from_key(found.low)),
                   tie = shares ? share_of_tie(found, limits, weight) : weight;
    const uint64_t point = fraction_of(word, found.mass + found.inside * tie);
    if (threadIdx.x < size && r.keys[threadIdx.x] <= found.low)
        r.weights[threadIdx.x] = r.keys[threadIdx.x] == found.low ? tie : 0;
    __syncthreads();
    const Share share = Share::for_tokens(size);
    const int id = share.token < size ? r.ids[share.token] : 0;
    uint64_t before = 0;  // the weight of lower ids
#pragma unroll 1
    for (uint32_t i = share.first; i < size; i += 4 * share.count) {
        const int4 others = *reinterpret_cast<const int4*>(r.ids + i);
        const ulonglong2 a = *reinterpret_cast<const ulonglong2*>(r.weights + i);
        const ulonglong2 b = *reinterpret_cast<const ulonglong2*>(r.weights + i + 2);
        before += (others.x < id ? a.x : 0) + (others.y < id ? a.y : 0) + (others.z < id ? b.x : 0) +
                  (others.w < id ? b.y : 0);
    }
    before = share.total(before);
    if (share.token < size && share.first == 0 && point >= before && point - before < r.weights[share.token])
        *token = id;
    __syncthreads();
}

}  // namespace sample
