// Draws one token for each row of logits, with the row's own parameters, penalties and random numbers: what rwkv_batch/sampling.py describes.
//
// logits [rows, vocab of the head], fp32 or fp16, left as they are; slots [rows], negative for padding; table [slots] of Row; ids [rows].
// A team of blocks (a cluster on sm_90 and newer) reads a row once into shared memory; each warp has a segment of consecutive ids. All that
// follows stays on the chip:
//   1  bias and penalties of the few ids that have them, in fp64 like the host; the largest logit
//   2  the whole weight, where a limit needs it, and the threshold (sample_select.cuh)
//   3  the weight of each segment, and the segment at which the running sum passes the random number's share; its warp finds the token
//   4  the token is recorded for the penalties, and the row's position moves on
// Weights are computed in fp32 and added in fixed point (sample_number.cuh), so sums have no order. On older GPUs a row has one block and
// its values lie in a workspace [rows, chunk] fp32 instead of shared memory.
#include "sample_number.cuh"
#include "sample_row.cuh"
#include "sample_select.cuh"
#include "sample_team.cuh"

namespace sample {

struct Call {
    const void* logits;
    int64_t stride;      // of a row of logits, in numbers
    int width;           // ids in a row that may be read
    int vocab;           // ids that may be drawn, the first ones; at most `width`
    const int* slots;
    Row* table;
    int* ids;
    float* workspace;    // null where teams are clusters
    int chunk;           // ids of a block: a multiple of 128 WARPS
};

struct Shared {
    Row row;
    uint32_t tops[SEGMENTS];       // the largest key of each segment
    uint64_t sums[2][SEGMENTS];    // what segments weigh; taken in turn
    uint32_t guess;
    int token;
    Selection selection;
};

// The token of a row comes from this segment; in NOISE and GREEDY `rest` has no meaning.
struct Place {
    int segment;
    uint64_t rest;
};

__device__ __forceinline__ float4 load4(const float* p) { return __ldcs(reinterpret_cast<const float4*>(p)); }

__device__ __forceinline__ float4 load4(const __half* p) {
    const uint2 x = __ldcs(reinterpret_cast<const uint2*>(p));
    const float2 low = to_float2(x.x), high = to_float2(x.y);
    return make_float4(low.x, low.y, high.x, high.y);
}

// Read a segment. Ids that cannot be drawn become -inf, which no token has. `meanwhile` runs while the first numbers are under way.
template <typename Logit, typename F>
__device__ __forceinline__ void read(const Call& in, const Logit* logits, const Segment& segment, F meanwhile) {
    constexpr int UNROLL = 4;
    const bool aligned = (reinterpret_cast<uintptr_t>(logits) % (4 * sizeof(Logit))) == 0;
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
            float4 y;
            y.x = id < in.vocab ? sanitise(x[i].x) : -INFINITY;
            y.y = id + 1 < in.vocab ? sanitise(x[i].y) : -INFINITY;
            y.z = id + 2 < in.vocab ? sanitise(x[i].z) : -INFINITY;
            y.w = id + 3 < in.vocab ? sanitise(x[i].w) : -INFINITY;
            *reinterpret_cast<float4*>(segment.values + at) = y;
        }
    }
}

__device__ __forceinline__ uint32_t largest_key(const Segment& segment) {
    float top = -INFINITY;
    segment.each([&](float x, int) { top = fmaxf(top, x); });
    return __reduce_max_sync(ALL, to_key(top));
}

// The largest of all segments' keys, in every thread.
__device__ __forceinline__ uint32_t largest(const Team& team, const uint32_t* keys) {
    uint32_t top = 0;
    for (int i = lane_id(); i < team.segments(); i += WARP) top = max(top, keys[i]);
    return __reduce_max_sync(ALL, top);
}

template <typename T>
__device__ __forceinline__ T sum_of(const Team& team, const T* sums) {
    T sum = 0;
    for (int i = lane_id(); i < team.segments(); i += WARP) sum += sums[i];
    return warp_total(sum);
}

// The first segment with that key, in every thread.
__device__ __forceinline__ int first_with(const Team& team, const uint32_t* keys, uint32_t key) {
    for (int start = 0;; start += WARP) {
        const int i = start + lane_id();
        const unsigned found = __ballot_sync(ALL, i < team.segments() && keys[i] == key);
        if (found) return start + __ffs(found) - 1;
    }
}

// At most `count` tokens of the row, and at least one, have keys above or at this: the count-th largest of the segments' largest.
__device__ inline uint32_t guess_threshold(const Team& team, Shared& s, uint32_t count) {
    const int own = threadIdx.x;
    if (own < team.segments()) {
        const uint32_t key = s.tops[own];
        uint32_t larger = 0;
        for (int i = 0; i < team.segments(); i++) larger += s.tops[i] > key || (s.tops[i] == key && i < own);
        if (larger == count - 1) s.guess = key;
    }
    __syncthreads();
    return s.guess;
}

// What the tokens of a segment weigh: those above `threshold` in full, those at it `tie` each.
__device__ inline uint64_t weigh(const Segment& segment, const Softmax& softmax, float threshold, uint64_t tie) {
    Weight sum;
    uint32_t ties = 0;
    segment.each([&](float x, int) {
        sum.add(x > threshold ? softmax.weight(x) : 0.f);
        ties += x == threshold;
    });
    return warp_total(sum.fixed() + ties * tie);
}

// The segment in which the running sum of `sums` passes `point`, which is less than the whole, and what is left of `point` there.
__device__ inline Place find_segment(const Team& team, const uint64_t* sums, uint64_t point) {
    const int each = max(1, team.segments() / WARP), first = lane_id() * each;
    uint64_t own = 0;
    for (int i = first; i < first + each && i < team.segments(); i++) own += sums[i];
    const uint64_t after = warp_scan(own);
    uint64_t rest = point - (after - own);
    const int lane = __ffs(__ballot_sync(ALL, after > point)) - 1;
    int segment = first;
    if (lane_id() == lane) {
        while (rest >= sums[segment]) rest -= sums[segment++];
    }
    return {__shfl_sync(ALL, segment, lane), __shfl_sync(ALL, rest, lane)};
}

// One warp: the id in its segment at which the running sum passes `rest`.
__device__ inline int find_token(const Segment& segment, const Softmax& softmax, float threshold, uint64_t tie, uint64_t rest) {
    const auto weight = [&](float x) { return x > threshold ? softmax.fixed(x) : x == threshold ? tie : 0; };
    for (int start = 0;; start += 4 * WARP) {
        const int at = start + 4 * lane_id();
        const float4 x = *reinterpret_cast<const float4*>(segment.values + at);
        const uint64_t a = weight(x.x), b = a + weight(x.y), c = b + weight(x.z), d = c + weight(x.w);
        const uint64_t after = warp_scan(d), whole = __shfl_sync(ALL, after, WARP - 1);
        if (rest < whole) {
            const int lane = __ffs(__ballot_sync(ALL, after > rest)) - 1;
            const uint64_t own = rest - (after - d);
            const int token = segment.first_id + at + (own >= a) + (own >= b) + (own >= c);
            return __shfl_sync(ALL, token, lane);
        }
        rest -= whole;
    }
}

// One warp: the first id in its segment with that value.
__device__ inline int find_value(const Segment& segment, float value) {
    int id = INT_MAX;
    segment.each([&](float x, int at) {
        if (x == value) id = min(id, segment.first_id + at);
    });
    return __reduce_min_sync(ALL, id);
}

// NOISE: the largest of logit / temperature + noise * uniform. Returns the winner's segment; `token` is the winner of this warp.
__device__ inline Place draw_noisy(const Team& team, Shared& s, const Segment& segment, float top, int& token) {
    const double least = __dsub_rn(top, __dmul_rn(s.row.noise, s.row.temperature));
    const uint64_t word = random_word(s.row.key, s.row.position);
    uint64_t best = 0;
    int id = INT_MAX;
    segment.each([&](float x, int at) {
        if (x == -INFINITY || x < least) return;
        const int here = segment.first_id + at;
        const uint64_t key = to_key(__dadd_rn(__ddiv_rn(x, s.row.temperature), __dmul_rn(s.row.noise, token_uniform(word, here))));
        if (key > best) best = key, id = here;  // of equal ones the first
    });
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        const uint64_t other = __shfl_xor_sync(ALL, best, offset);
        const int other_id = __shfl_xor_sync(ALL, id, offset);
        if (other > best || (other == best && other_id < id)) best = other, id = other_id;
    }
    token = id;
    team.gather(best, s.sums[0]);
    uint64_t winner = 0;
    for (int i = 0; i < team.segments(); i++) winner = max(winner, s.sums[0][i]);
    int first = 0;
    while (s.sums[0][first] != winner) first++;
    return {first, 0};
}

// RAPID and NUCLEUS: the threshold under the row's limits, and what a token at it weighs.
__device__ inline void cut(const Team& team, Shared& s, const Segment& segment, const Softmax& softmax, int vocab, int& turn, float& threshold,
                           uint64_t& tie) {
    const bool by_count = s.row.top_k < vocab, by_mass = s.row.top_p < 1., joint = s.row.method == RAPID;
    const uint32_t top = to_key(softmax.top);
    uint32_t low = to_key(-FLT_MAX);
    int lists = 0;
    Limits limits = {by_count ? uint32_t(s.row.top_k) : ~0u, ~0ull};
    bool few = false;
    if (by_count && s.row.top_k <= team.segments()) {
        low = max(low, guess_threshold(team, s, s.row.top_k));
        few = s.row.top_k <= team.segments() / 2;
    }
    Range found = {};
    if (by_count && (!joint || !by_mass)) {
        found = select(team, s.selection, segment, softmax, limits, low, top, few, lists);
        threshold = from_key(found.low), tie = softmax.fixed(threshold);
        if (!joint) low = found.low, limits.count = ~0u;
    }
    if (by_mass) {
        team.gather(weigh(segment, softmax, threshold, tie), s.sums[turn]);
        const uint64_t total = sum_of(team, s.sums[turn]);
        turn ^= 1;
        limits.mass = max(uint64_t(1), min(total, uint64_t(s.row.top_p * double(total))));
        // Tokens lighter than `light` weigh less than what top_p leaves out, all of them together: the threshold is not among them.
        const uint64_t light = (total - limits.mass) / vocab;
        if (light >= 64) {
            const float below = (__log2f(float(light)) - POINT - 0.02f) / softmax.scale, bound = softmax.top + below;
            low = max(low, to_key(sanitise(bound - 1e-6f * (fabsf(softmax.top) + fabsf(below)))));
        }
        found = select(team, s.selection, segment, softmax, limits, low, top, few, lists);
        threshold = from_key(found.low), tie = softmax.fixed(threshold);
    }
    if (joint && found.above > 0) {  // of the tokens at the threshold, just the share that fills the limit that binds
        uint64_t room = found.inside * tie;
        if (by_count) room = min(room, (limits.count - found.above) * tie);
        if (by_mass) room = min(room, limits.mass - found.mass);
        tie = room / found.inside;
    }
}

template <typename Logit, bool IN_SHARED>
__global__ void __launch_bounds__(THREADS, 2) sample_kernel(const __grid_constant__ Call in) {
    extern __shared__ float4 dynamic[];
    __shared__ Shared s;
    wait_for_inputs();
    const Team team = Team::here();
    const int row = blockIdx.x / team.size, slot = in.slots[row];
    Row* stored = in.table + max(slot, 0);
    const int share = in.chunk / WARPS, at = warp_id() * share;
    const Chunk chunk = {IN_SHARED ? reinterpret_cast<float*>(dynamic) : in.workspace + size_t(row) * in.chunk, team.rank * in.chunk, in.chunk};
    const Segment segment = {chunk.values + at, chunk.first_id + at, share};
    read(in, static_cast<const Logit*>(in.logits) + row * in.stride, segment, [&] {
        if (warp_id() == 0) reinterpret_cast<uint32_t*>(&s.row)[lane_id()] = reinterpret_cast<const uint32_t*>(stored)[lane_id()];
    });
    if (threadIdx.x < LISTS) s.selection.listed[threadIdx.x] = 0;
    if (slot < 0) {
        if (team.rank == 0 && threadIdx.x == 0) in.ids[row] = 0;
        return;
    }
    __syncthreads();
    if (s.row.bias_count || s.row.used) apply_changes(s.row, chunk);
    team.gather(largest_key(segment), s.tops);
    const uint32_t top = largest(team, s.tops);

    const Softmax softmax = {from_key(top), s.row.scale};
    float threshold = -INFINITY;  // tokens above it stay, those at it weigh `tie`
    uint64_t tie = 0;
    int turn = 0, token = 0;
    Place place;
    if (s.row.method == GREEDY) {
        place = {first_with(team, s.tops, top), 0};
    } else if (s.row.method == NOISE) {
        place = draw_noisy(team, s, segment, softmax.top, token);
    } else {
        if (s.row.top_k < in.vocab || s.row.top_p < 1.) cut(team, s, segment, softmax, in.vocab, turn, threshold, tie);
        team.gather(weigh(segment, softmax, threshold, tie), s.sums[turn]);
        const uint64_t point = fraction_of(random_word(s.row.key, s.row.position), sum_of(team, s.sums[turn]));
        place = find_segment(team, s.sums[turn], point);
    }
    if (place.segment / WARPS != team.rank) return;
    if (place.segment == team.segment()) {
        if (s.row.method == GREEDY) token = find_value(segment, softmax.top);
        if (s.row.method == RAPID || s.row.method == NUCLEUS) token = find_token(segment, softmax, threshold, tie, place.rest);
        if (lane_id() == 0) in.ids[row] = s.token = token;
    }
    __syncthreads();
    record(s.row, stored, s.token);
}

template <typename Logit>
int start(Call in, int rows, int blocks, cudaStream_t stream) {
    const auto kernel = in.workspace ? sample_kernel<Logit, false> : sample_kernel<Logit, true>;
    const int each = 4 * WARP * WARPS;
    in.chunk = (in.vocab + blocks * each - 1) / (blocks * each) * each;
    if (in.chunk > 1024 * THREADS || rows < 1) return cudaErrorInvalidValue;
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = blocks;
    attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = rows * blocks;
    config.blockDim = THREADS;
    config.dynamicSmemBytes = in.workspace ? 0 : in.chunk * sizeof(float);
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = in.workspace ? 0 : 2;
    if (config.dynamicSmemBytes + sizeof(Shared) > 48 * 1024) {
        const int error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(config.dynamicSmemBytes));
        if (error) return error;
    }
    return cudaLaunchKernelEx(&config, kernel, in);
}

}  // namespace sample

extern "C" {

// How many blocks share a row; 1: `workspace` is needed, with room for rows * rwkv_sample_chunk numbers.
int rwkv_sample_blocks() { return overlaps_launches() ? sample::MOST_BLOCKS : 1; }

int rwkv_sample_chunk(int vocab, int blocks) {
    const int each = 4 * WARP * sample::WARPS * blocks;
    return (vocab + each - 1) / each * (each / blocks);
}

// `blocks` of a team: 1, 2, 4 or 8 with clusters, 1 without. fp16: whether logits are fp16 instead of fp32.
int rwkv_sample(const sample::Call* in, int rows, int fp16, int blocks, cudaStream_t stream) {
    return fp16 ? sample::start<__half>(*in, rows, blocks, stream) : sample::start<float>(*in, rows, blocks, stream);
}

}
