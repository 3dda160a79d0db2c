// What a row of logits goes through where a grammar, min_p, top_a or a repetition penalty wants it. Only the
// kernel of rwkv_sample_filtered has this.
#pragma once
#include "sample_read.cuh"

namespace sample {

// Of one row. rwkv_batch/sampling/structs_cuda.py has the same layout.
struct RowFilter {
    float min_p, top_a;  // 0: off
    float repetition;    // divides the logits of tokens that have been seen; 1: off
    int mask;            // its line of the masks; negative: it has none
};

// The arguments of a call. words: of 32 ids, in a line of masks and of seen tokens; enough for `vocab`.
struct FilterInput {
    SampleInput sample;
    const RowFilter* filters;  // [rows]
    const uint32_t* masks;     // [lines, words], bit id % 32 of word id / 32: the token may be drawn
    uint32_t* seen;            // [slots, words], the same bits: the token stands in the prompt or the answer
    int words;
};

// The values of a wide segment, each with whether `words` has the bit of its id. A segment begins at a
// multiple of 256 ids, so the lanes of a warp have the bits of one word.
template <typename F>
__device__ __forceinline__ void each_with_bit(const Segment& segment, const uint32_t* words, int count, F f) {
    for (int start = 0; start < segment.length; start += WARP * WARP) {
        const int word = (segment.first_id + start) / WARP + lane_id();
        const uint32_t own = word < count ? words[word] : 0;
        for (int i = 0; i < WARP && start + i * WARP < segment.length; i++)
            f(segment.values[start + i * WARP + lane_id()], bool(shuffle(own, i) >> lane_id() & 1));
    }
}

// The repetition penalty: logits of tokens that have been seen come nearer to 0, or, negative, go away from
// it.
__device__ inline void divide_repeated(const Segment& segment, const uint32_t* seen, int words,
                                       float penalty) {
    sync_warp();
    each_with_bit(segment, seen, words, [&](float& x, bool is_seen) {
        if (is_seen && x != -INFINITY) x = sanitise(x > 0.f ? __fdiv_rn(x, penalty) : __fmul_rn(x, penalty));
    });
}

// Tokens that the mask, min_p or top_a leave out become -inf, as ids that cannot be drawn are; top_k is
// switched off where no more tokens than that are left. Segments are wide. `weight_beside(x)`: the weight of
// all tokens where one of value x weighs 1 << POINT; it uses sums[0]. Returns the largest number of this
// lane.
template <typename F>
__device__ inline float filter(const Team& team, const RowFilter& filter, const FilterInput& in,
                               SampleRecord& row, const Segment& segment, uint32_t* tops, uint64_t* counts,
                               F weight_beside) {
    sync_warp();
    uint32_t left = 0;
    float top = -INFINITY;
    const auto keep = [&](float& x, bool stays) {
        if (!stays) x = -INFINITY;
        left += x != -INFINITY, top = fmaxf(top, x);
    };
    if (filter.mask >= 0) {
        each_with_bit(segment, in.masks + size_t(filter.mask) * in.words, in.words, keep);
    } else {
        for (int i = lane_id(); i < segment.length; i += WARP) keep(segment.values[i], true);
    }
    if (filter.min_p > 0.f || filter.top_a > 0.f) {
        gather_tops(team, top, tops);
        const float largest_logit = from_key(largest(tops));
        double least = filter.min_p;  // a share of the likeliest token's probability
        if (filter.top_a > 0.f)
            least = fmax(least,
                         double(filter.top_a) * double(1ull << POINT) / double(weight_beside(largest_logit)));
        const float bound = float(double(largest_logit) + row.temperature * log(fmin(least, 1.)));
        left = 0, top = -INFINITY;
        for (int i = lane_id(); i < segment.length; i += WARP)
            keep(segment.values[i], segment.values[i] >= bound);
    }
    team.gather(uint64_t(warp_total(left)), counts);
    uint64_t all = 0;
    for (int i = 0; i < team.segments(); i++) all += counts[i];
    if (threadIdx.x == 0 && uint64_t(row.top_k) >= all) row.top_k = in.sample.vocab;
    __syncthreads();
    return top;
}

}  // namespace sample
