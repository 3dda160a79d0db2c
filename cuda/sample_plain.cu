// Draws one token for each row of fp16 logits where no row has a limit, a bias, penalties or noise: the ids
// that sample.cu draws, from numbers that stay in registers, by an eighth of its instructions. A team of
// blocks (a cluster on sm_90 and newer) shares a row; each warp has a segment of consecutive ids. What
// record_drawn of sequence_feed.cu records afterwards for other kernels is recorded here.
//
// Reference: rwkv_batch/sampling/sampler.py (Sampler). Binding: rwkv_batch/sampling/sampler_cuda.py
// (CudaSampler). Test: test/kernels/test_sample_plain.py.
#include "sample_row.cuh"
#include "sequence_feed.cuh"

namespace sample {

constexpr uint32_t NEVER = 0xfc00fc00;  // two logits of -inf

// Eight logits of consecutive ids, as pairs.
union Eight {
    uint4 all;
    uint32_t pairs[4];
};

// A warp's segment of a row: 256 EIGHTS ids, of which a lane has eight of each 256.
template <int EIGHTS>
struct PlainSegment {
    Eight eights[EIGHTS];
    int first, vocab;  // this lane's first id; ids from `vocab` on are never drawn

    __device__ __forceinline__ int id(int i) const { return first + i * 8 * WARP; }

    __device__ __forceinline__ void load(const __half* logits) {
#pragma unroll
        for (int i = 0; i < EIGHTS; i++)
            eights[i].all = id(i) < vocab ? load_streamed(reinterpret_cast<const uint4*>(logits + id(i)))
                                          : make_uint4(NEVER, NEVER, NEVER, NEVER);
    }

    __device__ __forceinline__ void end_at_vocab(int i) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            uint32_t& pair = eights[i].pairs[k];
            if (id(i) + 2 * k >= vocab) pair = (pair & 0xffff0000) | (NEVER & 0xffff);
            if (id(i) + 2 * k + 1 >= vocab) pair = (pair & 0xffff) | (NEVER & 0xffff0000);
        }
    }

    // The largest key of this lane; that of NaN if it has one. There is one zero only.
    __device__ __forceinline__ uint32_t largest() {
        const auto half2_of = [](uint32_t pair) { return *reinterpret_cast<const __half2*>(&pair); };
        __half2 most = half2_of(NEVER);
#pragma unroll
        for (int i = 0; i < EIGHTS; i++) {
            if (id(i) < vocab && id(i) + 8 > vocab) end_at_vocab(i);
#pragma unroll
            for (uint32_t& pair : eights[i].pairs) most = larger_halves_or_nan(most, half2_of(pair));
        }
        return max(to_key(__fadd_rn(__low2float(most), 0.f)), to_key(__fadd_rn(__high2float(most), 0.f)));
    }
};

// As Softmax, of eight logits that may be -infinity.
__device__ __forceinline__ void weigh(const Eight& eight, float top, float scale, float (&weights)[8]) {
    const auto weight = [&](float logit) { return power_of_two(__fmul_rn(__fsub_rn(logit, top), scale)); };
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const float2 pair = to_float2(eight.pairs[k]);
        weights[2 * k] = weight(pair.x), weights[2 * k + 1] = weight(pair.y);
    }
}

// One warp: the first of the segments whose top is that.
__device__ __forceinline__ int find_top(const uint32_t* tops, int segments, uint32_t top) {
    for (int start = 0; start < segments; start += WARP) {
        const int i = start + lane_id();
        const unsigned found = warp_ballot(i < segments && tops[i] == top);
        if (found) return start + __ffs(found) - 1;
    }
    return segments;
}

// One warp: the segment in which the running sum of `sums` passes the share of their total that belongs to
// the random word, and what is left of that share there.
__device__ __forceinline__ int find_sum(const uint64_t* sums, int segments, uint64_t word, uint64_t& rest) {
    const int each = (segments + WARP - 1) / WARP, begin = lane_id() * each;
    uint64_t own = 0;
    for (int i = begin; i < begin + each && i < segments; i++) own += sums[i];
    const uint64_t after = warp_scan(own), point = fraction_of(word, shuffle(after, WARP - 1));
    rest = point - (after - own);
    const int lane = __ffs(warp_ballot(after > point)) - 1;
    int segment = begin;
    if (lane_id() == lane)
        while (rest >= sums[segment]) rest -= sums[segment++];
    rest = shuffle(rest, lane);
    return shuffle(segment, lane);
}

// This lane's first id with that logit; INT_MAX: it has none.
__device__ __forceinline__ int find_logit(const Eight& eight, int id, float logit) {
    int found = INT_MAX;
#pragma unroll
    for (int k = 3; k >= 0; k--) {
        const float2 pair = to_float2(eight.pairs[k]);
        if (pair.y == logit) found = id + 2 * k + 1;
        if (pair.x == logit) found = id + 2 * k;
    }
    return found;
}

// One warp: the id among its 256 at which the running sum of weights passes `rest`; INT_MAX: it does not, and
// `rest` is what is left of it.
__device__ __forceinline__ int find_token(const Eight& eight, int id, float top, float scale,
                                          uint64_t& rest) {
    float weights[8];
    weigh(eight, top, scale, weights);
    uint64_t fixed[8], own = 0;
#pragma unroll
    for (int k = 0; k < 8; k++) {
        Weight one;
        one.add({weights[k]});
        own += fixed[k] = one.fixed();
    }
    const uint64_t after = warp_scan(own), whole = shuffle(after, WARP - 1);
    if (rest >= whole) {
        rest -= whole;
        return INT_MAX;
    }
    uint64_t sum = after - own;
    int before = 0;  // tokens of this lane with which the sum has not passed
#pragma unroll
    for (int k = 0; k < 7; k++) before += rest >= (sum += fixed[k]);
    return shuffle(id + before, __ffs(warp_ballot(after > rest)) - 1);
}

template <int BLOCK_WARPS, int EIGHTS, int RESIDENT>
__global__ void LAUNCH_BOUNDS(BLOCK_WARPS* WARP, RESIDENT)
    sample_plain_kernel(const __grid_constant__ SampleInput in, SequenceRecord* const sequences) {
    constexpr int MOST = MOST_BLOCKS * BLOCK_WARPS;
    __shared__ uint32_t tops[MOST];
    __shared__ uint64_t sums[MOST];
    __shared__ uint4 kept[EIGHTS * WARP];
    const Team team = Team::here();
    team.begin();
    wait_for_inputs();
    const int row = blockIdx.x / team.size, segments = team.size * BLOCK_WARPS;
    const int own = team.rank * BLOCK_WARPS + warp_id(), lane = lane_id();
    PlainSegment<EIGHTS> segment;
    segment.first = own * EIGHTS * 8 * WARP + lane * 8, segment.vocab = in.vocab;
    segment.load(static_cast<const __half*>(in.logits) + row * in.stride);
    const int slot = in.slots[row];
    const SampleRecord& record = in.table[max(slot, 0)];
    const int method = record.method;
    const float scale = record.scale;
    const uint64_t key = record.key, position = record.position;
    const uint32_t own_top = warp_max(segment.largest());
    team.wait_for_all();
    if (slot < 0) {
        if (team.rank == 0 && threadIdx.x == 0) in.ids[row] = 0;
        return;
    }
    if (lane < team.size) *team.at(tops + own, lane) = own_top;
    team.sync();
    uint32_t top_key = 0;
    for (int i = lane; i < segments; i += WARP) top_key = max(top_key, tops[i]);
    top_key = warp_max(top_key);
    if (is_broken(top_key)) {
        if (team.rank != 0 || threadIdx.x != 0) return;
        in.ids[row] = BROKEN;
        if (sequences) sequences[slot].last = 0, sequences[slot].ended = true;
        return;
    }
    const float top = from_key(top_key);
    int drawn;
    uint64_t rest = 0;
    if (method == GREEDY) {
        drawn = find_top(tops, segments, top_key);
    } else {
        Weight sum;
#pragma unroll
        for (const Eight& eight : segment.eights) {
            float weights[8];
            weigh(eight, top, scale, weights);
            sum.add(weights);
        }
        // Of 2048 weights at most, which either half has room for.
        const uint32_t high = uint32_t(warp_sum(int(sum.high)));
        const int low = warp_sum(int(sum.low));
        if (lane < team.size) *team.at(sums + own, lane) = (uint64_t(high) << (POINT / 2)) + int64_t(low);
        team.sync();
        drawn = find_sum(sums, segments, random_word(key, position), rest);
    }
    if (drawn != own) return;
    const int stop = sequences && lane < STOPS ? sequences[slot].stops[lane] : -1;
#pragma unroll
    for (int i = 0; i < EIGHTS; i++) kept[i * WARP + lane] = segment.eights[i].all;
    int token = INT_MAX;
#pragma unroll 1
    for (int i = 0; i < EIGHTS && token == INT_MAX; i++) {
        Eight eight;
        eight.all = kept[i * WARP + lane];
        token = method == GREEDY ? warp_min(find_logit(eight, segment.id(i), top))
                                 : find_token(eight, segment.id(i), top, scale, rest);
    }
    const bool ends = warp_ballot(stop == token) != 0;
    if (lane != 0) return;
    in.ids[row] = token, in.table[slot].position = position + 1;
    if (sequences) sequences[slot].last = token, sequences[slot].ended = ends;
}

template <int BLOCK_WARPS, int EIGHTS, int RESIDENT>
int start(const SampleInput& in, SequenceRecord* sequences, int rows, cudaStream_t stream) {
    constexpr int IDS = BLOCK_WARPS * EIGHTS * 8 * WARP;
    const int blocks = (in.vocab + IDS - 1) / IDS;
    if (blocks > MOST_BLOCKS) return cudaErrorInvalidValue;
    const auto kernel = sample_plain_kernel<BLOCK_WARPS, EIGHTS, RESIDENT>;
    if (blocks == 1) return launch_alone(kernel, rows, BLOCK_WARPS * WARP, 0, stream, in, sequences);
    return launch_clusters(blocks, kernel, rows * blocks, BLOCK_WARPS * WARP, 0, stream, in, sequences);
}
}  // namespace sample

extern "C" {

// Whether rows of so many ids can be drawn so on this GPU.
int rwkv_sample_plain_fits(int vocab) { return overlaps_launches() && vocab <= 65536; }

// Logits are fp16, `width` and `stride` multiples of 8 and the first of them at a multiple of 16 bytes; no
// workspace. sequences [slots]: where to record what was drawn; null: nowhere.
int rwkv_sample_plain(const sample::SampleInput* in, SequenceRecord* sequences, int rows,
                      cudaStream_t stream) {
    return rows <= 16   ? sample::start<8, 4, 1>(*in, sequences, rows, stream)
           : rows <= 48 ? sample::start<16, 4, 2>(*in, sequences, rows, stream)
                        : sample::start<8, 8, 4>(*in, sequences, rows, stream);
}
}
