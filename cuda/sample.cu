// Draws one token for each row of logits, with the row's own parameters, penalties and random numbers.
//
// Reference: rwkv_batch/sampling/sampler.py (Sampler) and reference.py. Binding:
// rwkv_batch/sampling/sampler_cuda.py (CudaSampler). Test: test/kernels/test_sample.py.
//
// A team of blocks (a cluster on sm_90 and newer) reads a row once into shared memory; each warp has a
// segment of consecutive ids. fp16 logits stay fp16 there, unless the row has a bias or penalties, or the
// segment a number that is not finite. All that follows stays on the chip:
//   1  bias and penalties of the few ids that have them, in fp64 like the host; the largest logit
//   2  the whole weight, where top_p needs it. If few tokens can stay, one block draws from a list of them
//      (sample_list.cuh)
//   3  otherwise the threshold, where there is a limit (sample_select.cuh); the weight of each segment, and
//      the segment at which the running sum passes the random number's share; its warp finds the token
//   4  the token is recorded for the penalties, and the row's position moves on
// Weights are computed in fp32 and added in fixed point (sample_number.cuh), so sums have no order. On older
// GPUs a row has one block and its values lie in a workspace [rows, chunk] fp32 instead of shared memory. A
// token does not depend on how its row is kept or split.
//
// rwkv_sample_filtered is a kernel of its own for steps in which a row has a grammar, min_p, top_a or a
// repetition penalty (sample_filter.cuh): between reading and bias, and before the draw. That of the other
// steps has nothing of it.
#include <type_traits>

#include "sample_filter.cuh"
#include "sample_list.cuh"
#include "sample_number.cuh"
#include "sample_read.cuh"
#include "sample_row.cuh"
#include "sample_select.cuh"
#include "sample_team.cuh"

namespace sample {

struct Shared {
    SampleRecord row;
    alignas(16) uint32_t tops[GROUPS];  // the largest key of each group of tokens
    uint64_t sums[2][SEGMENTS];         // what segments weigh; taken in turn
    int slot, token;
    Selection selection;
};

// The token of a row comes from this segment; in NOISE and GREEDY `rest` has no meaning.
struct Place {
    int segment;
    uint64_t rest;
};

template <typename T>
__device__ __forceinline__ T sum_of(const Team& team, const T* sums) {
    T sum = 0;
    for (int i = lane_id(); i < team.segments(); i += WARP) sum += sums[i];
    return warp_total(sum);
}

// The threshold among the groups' tops alone. All tokens together have theirs at this or higher. Nothing
// inside: not even all tops reach the limits.
__device__ inline Range guess_threshold(Shared& s, const Softmax& softmax, const Limits& limits) {
    Ranking& r = s.selection.ranking;
    const int own = threadIdx.x;
    if (own < GROUPS) r.keys[own] = s.tops[own], r.weights[own] = softmax.fixed(from_key(s.tops[own]));
    if (own == 0) s.selection.range.inside = 0;
    __syncthreads();
    find_threshold(r, GROUPS, limits, {0, ~0u, 0.f, 0.f, 0, 0, 0, 0}, &s.selection.range);
    return s.selection.range;
}

// What the tokens of a segment weigh: those above `threshold` in full, those at it `tie` each.
__device__ inline uint64_t weigh(const Segment& segment, const Softmax& softmax, float threshold,
                                 uint64_t tie) {
    Weight sum;
    uint32_t ties = 0;
    if (threshold == -INFINITY) {  // all of them; -inf weighs nothing
        segment.each<false>(threshold, [&](const auto& x) {
            constexpr int N = sizeof(x) / sizeof(float);
            float w[N];
#pragma unroll
            for (int i = 0; i < N; i++) w[i] = softmax.weight(x[i]);
            sum.add(w);
        });
    } else {
        segment.each<true>(threshold, [&](const auto& x) {
            constexpr int N = sizeof(x) / sizeof(float);
            float w[N];
#pragma unroll
            for (int i = 0; i < N; i++)
                w[i] = x[i] > threshold ? softmax.weight(x[i]) : 0.f, ties += x[i] == threshold;
            sum.add(w);
        });
    }
    return warp_total(sum.fixed() + ties * tie);
}

// The segment in which the running sum of `sums` passes `point`, which is less than the whole, and what is
// left of `point` there.
__device__ inline Place find_segment(const Team& team, const uint64_t* sums, uint64_t point) {
    const int each = max(1, team.segments() / WARP), first = lane_id() * each;
    uint64_t own = 0;
    for (int i = first; i < first + each && i < team.segments(); i++) own += sums[i];
    const uint64_t after = warp_scan(own);
    uint64_t rest = point - (after - own);
    const int lane = __ffs(warp_ballot(after > point)) - 1;
    int segment = first;
    if (lane_id() == lane) {
        while (rest >= sums[segment]) rest -= sums[segment++];
    }
    return {shuffle(segment, lane), shuffle(rest, lane)};
}

// One warp: the id in its segment at which the running sum passes `rest`.
__device__ inline int find_token(const Segment& segment, const Softmax& softmax, float threshold,
                                 uint64_t tie, uint64_t rest) {
    const auto weight = [&](float x) { return x > threshold ? softmax.fixed(x) : x == threshold ? tie : 0; };
    for (int start = 0;; start += 8 * WARP) {
        const int at = start + 8 * lane_id();
        float x[8];
        segment.load(at, x);
        uint64_t own = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) own += weight(x[i]);
        const uint64_t after = warp_scan(own), whole = shuffle(after, WARP - 1);
        if (rest < whole) {
            const int lane = __ffs(warp_ballot(after > rest)) - 1;
            uint64_t sum = after - own;
            int before = 0;  // tokens of this lane with which the sum has not passed
#pragma unroll
            for (int i = 0; i < 7; i++) before += rest >= (sum += weight(x[i]));
            return shuffle(segment.first_id + at + before, lane);
        }
        rest -= whole;
    }
}

// One warp: the first id in its segment with that value.
__device__ inline int find_value(const Segment& segment, float value) {
    int id = INT_MAX;
    segment.each_from(value, [&](float x, int at) {
        if (x == value) id = min(id, segment.first_id + at);
    });
    return warp_min(id);
}

// NOISE: the largest of logit / temperature + noise * uniform. Returns the winner's segment; `token` is the
// winner of this warp.
__device__ inline Place draw_noisy(const Team& team, Shared& s, const Segment& segment, float top,
                                   uint64_t word, int& token) {
    const double least = __dsub_rn(top, __dmul_rn(s.row.noise, s.row.temperature));
    uint64_t best = 0;
    int id = INT_MAX;
    segment.each_from(__double2float_rd(least), [&](float x, int at) {
        if (x == -INFINITY || x < least) return;
        const int here = segment.first_id + at;
        const uint64_t key = to_key(
            __dadd_rn(__ddiv_rn(x, s.row.temperature), __dmul_rn(s.row.noise, token_uniform(word, here))));
        if (key > best) best = key, id = here;  // of equal ones the first
    });
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        const uint64_t other = shuffle_xor(best, offset);
        const int other_id = shuffle_xor(id, offset);
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

// The arguments that both kernels have.
__host__ __device__ inline const SampleInput& plain(const SampleInput& in) { return in; }
__host__ __device__ inline const SampleInput& plain(const FilterInput& in) { return in.sample; }
inline SampleInput& plain(SampleInput& in) { return in; }
inline SampleInput& plain(FilterInput& in) { return in.sample; }

// What a draw goes by: tokens above the threshold stay, those at it weigh `tie`.
struct Cut {
    float threshold = -INFINITY;
    uint64_t tie = 0;
    int turn = 0;        // which of Shared::sums comes next
    bool drawn = false;  // the first block has drawn already
};

// RAPID and NUCLEUS with limits.
__device__ inline Cut cut(const Team& team, Shared& s, const Segment& segment, const Softmax& softmax,
                          int vocab, uint64_t word) {
    const bool by_count = s.row.top_k < vocab, by_mass = s.row.top_p < 1., joint = s.row.method == RAPID;
    bool later = by_count && by_mass && !joint;  // top_p counts in what top_k leaves
    const uint32_t top = to_key(softmax.top);
    uint32_t low = to_key(-FLT_MAX);
    int lists = 0;
    Cut result;
    Limits limits = {by_count ? uint32_t(s.row.top_k) : ~0u, ~0ull};
    uint64_t light = 0;
    if (by_mass && !later) {
        team.gather(weigh(segment, softmax, result.threshold, 0), s.sums[result.turn]);
        const uint64_t total = sum_of(team, s.sums[result.turn]);
        result.turn ^= 1;
        limits.mass = part(s.row.top_p, total);
        light = uint64_t(float(total - limits.mass) / vocab);
    }
    const Range guess = guess_threshold(s, softmax, limits);
    if (guess.inside) {
        low = max(low, guess.low);
        if (guess.above < GROUPS * 3 / 4) {
            const uint32_t size =
                list(team, s.selection, segment, {low, top, softmax.top, 0.f, 0, 0, 0, 0}, lists++);
            if (size <= LISTED) {
                const double of_list = later ? s.row.top_p : 1.;
                if (team.rank == 0)
                    draw_from_list(team, s.selection, softmax, limits, of_list, joint, word, size, &s.token);
                result.drawn = true;
                return result;
            }
        }
    } else if (light >= 64) {
        // Tokens lighter than this weigh less than what top_p leaves out, all of them together: the threshold
        // is not among them.
        const float below = (__log2f(float(light)) - POINT - 0.02f) / softmax.scale,
                    bound = softmax.top + below;
        low = max(low, to_key(sanitise(bound - 1e-6f * (fabsf(softmax.top) + fabsf(below)))));
    }
    Range found;
#pragma unroll 1
    while (true) {
        found = select(team, s.selection, segment, softmax, limits, low, top, lists);
        if (!later) break;
        later = false;
        low = found.low;
        const float threshold = from_key(low);
        team.gather(weigh(segment, softmax, threshold, softmax.fixed(threshold)), s.sums[result.turn]);
        limits = {~0u, part(s.row.top_p, sum_of(team, s.sums[result.turn]))};
        result.turn ^= 1;
    }
    result.threshold = from_key(found.low);
    const uint64_t weight = softmax.fixed(result.threshold);
    result.tie = joint ? share_of_tie(found, limits, weight) : weight;
    return result;
}

// What bounds a row is the chain of its steps more than arithmetic, so rows are to overlap: where there are
// many, the fp16 kernel keeps to the registers of three blocks a multiprocessor (`RESIDENT`), whose values
// fit in shared memory too where a team has four or more.
template <typename Logit, bool IN_SHARED, int RESIDENT, typename Input>
__global__ void LAUNCH_BOUNDS(THREADS, RESIDENT) sample_kernel(const __grid_constant__ Input given) {
    if (IN_SHARED && !CLUSTERS) return;  // never launched there; nothing to compile
    constexpr bool FILTERED = !std::is_same<Input, SampleInput>::value;
    const SampleInput& in = plain(given);
    extern __shared__ float4 dynamic[];
    __shared__ Shared s;
    const Team team = Team::here();
    team.begin();
    wait_for_inputs();
    const int row = blockIdx.x / team.size;
    const int share = in.chunk / WARPS, at = warp_id() * share;
    float* values = IN_SHARED ? reinterpret_cast<float*>(dynamic) : in.workspace + size_t(row) * in.chunk;
    const Chunk chunk = {values, team.rank * in.chunk, in.chunk};
    constexpr bool HALF = sizeof(Logit) == sizeof(__half);
    Segment segment = {chunk.values + at, chunk.first_id + at, share, !HALF};
    const Logit* logits = static_cast<const Logit*>(in.logits) + row * in.stride;
    const auto fetch_row = [&] {
        if (warp_id() > 0) return;
        const int slot = in.slots[row];
        copy_record(s.row, in.table, slot);
        if (lane_id() == 0) s.slot = slot;
    };
    float own_top;
    if constexpr (HALF) {
        own_top = read_halves(in, logits, segment, fetch_row);
    } else {
        own_top = read(in, logits, segment, fetch_row);
    }
    team.wait_for_all();
    if (threadIdx.x < LISTS) s.selection.listed[threadIdx.x] = 0;
    __syncthreads();
    if (s.slot < 0) {
        if (team.rank == 0 && threadIdx.x == 0) in.ids[row] = 0;
        return;
    }
    const bool broken = own_top == INFINITY;  // which changes and filters may hide
    RowFilter how;
    if constexpr (FILTERED) {
        how = given.filters[row];
        segment.widen();
        if (how.repetition != 1.f)
            divide_repeated(segment, given.seen + size_t(s.slot) * given.words, given.words, how.repetition);
    }
    if (s.row.bias_count || s.row.used) {
        segment.widen();
        apply_changes(s.row, chunk);
        own_top = -INFINITY;
        for (int i = lane_id(); i < segment.length; i += WARP) own_top = fmaxf(own_top, segment.values[i]);
    }
    if constexpr (FILTERED)
        own_top = filter(team, how, given, s.row, segment, s.tops, s.sums[1], [&](float likeliest) {
            const Softmax beside = {likeliest, s.row.scale};
            team.gather(weigh(segment, beside, -INFINITY, 0), s.sums[0]);
            return sum_of(team, s.sums[0]);
        });
    gather_tops(team, broken ? INFINITY : own_top, s.tops);
    const uint32_t top = largest(s.tops);
    if (is_broken(top)) {
        if (team.rank == 0 && threadIdx.x == 0) in.ids[row] = BROKEN;
        return;
    }

    const Softmax softmax = {from_key(top), s.row.scale};
    const uint64_t word = random_word(s.row.key, s.row.position);
    Cut kept;
    int token = 0;
    Place place = {0, 0};
    if (s.row.method == GREEDY) {
        place.segment = first_with(team, s.tops, top);
    } else if (s.row.method == NOISE) {
        place = draw_noisy(team, s, segment, softmax.top, word, token);
    } else {
        if (s.row.top_k < in.vocab || s.row.top_p < 1.) kept = cut(team, s, segment, softmax, in.vocab, word);
        if (!kept.drawn) {
            team.gather(weigh(segment, softmax, kept.threshold, kept.tie), s.sums[kept.turn]);
            place = find_segment(team, s.sums[kept.turn], fraction_of(word, sum_of(team, s.sums[kept.turn])));
        }
    }
    if (place.segment / WARPS != team.rank) return;
    if (!kept.drawn && place.segment == team.segment()) {
        if (s.row.method == GREEDY) token = find_value(segment, softmax.top);
        if (s.row.method == RAPID || s.row.method == NUCLEUS)
            token = find_token(segment, softmax, kept.threshold, kept.tie, place.rest);
        if (lane_id() == 0) s.token = token;
    }
    __syncthreads();
    if (threadIdx.x == 0) in.ids[row] = s.token;
    if constexpr (FILTERED) {
        if (threadIdx.x == 0 && how.repetition != 1.f)
            given.seen[size_t(s.slot) * given.words + s.token / 32] |= 1u << s.token % 32;
    }
    record(s.row, in.table + s.slot, s.token);
}

template <typename Logit, typename Input>
int start(Input given, int rows, int blocks, cudaStream_t stream) {
    constexpr bool NARROW = sizeof(Logit) == sizeof(__half) && std::is_same<Input, SampleInput>::value;
    constexpr int MOST_RESIDENT = NARROW ? 3 : 2;
    SampleInput& in = plain(given);
    const bool few = rows * blocks <= 2 * multiprocessors();
    const auto kernel = in.workspace ? sample_kernel<Logit, false, 2, Input>
                        : few        ? sample_kernel<Logit, true, 2, Input>
                                     : sample_kernel<Logit, true, MOST_RESIDENT, Input>;
    in.chunk = chunk_size(in.vocab, blocks);
    if (in.chunk > 1 << PART_BITS || rows < 1)
        return cudaErrorInvalidValue;  // more than a bucket of a histogram can add up
    const size_t shared = in.workspace ? 0 : in.chunk * sizeof(float);
    if (shared + sizeof(Shared) > 48 * 1024) {
        const int error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared));
        if (error) return error;
    }
    return in.workspace ? launch_alone(kernel, rows * blocks, THREADS, shared, stream, given)
                        : launch_clusters(blocks, kernel, rows * blocks, THREADS, shared, stream, given);
}

}  // namespace sample

extern "C" {

// How many blocks had best share a row when there are `rows` of them; 1: `workspace` is needed, with room for
// rows * rwkv_sample_chunk numbers. Few rows are spread over the whole GPU.
int rwkv_sample_blocks(int rows) { return !overlaps_launches() ? 1 : rows <= 16 ? 8 : 4; }

int rwkv_sample_chunk(int vocab, int blocks) { return sample::chunk_size(vocab, blocks); }

// `blocks` of a team: 1, 2, 4 or 8 with clusters, 1 without. fp16: whether logits are fp16 instead of fp32.
int rwkv_sample(const sample::SampleInput* in, int rows, int fp16, int blocks, cudaStream_t stream) {
    return fp16 ? sample::start<__half>(*in, rows, blocks, stream)
                : sample::start<float>(*in, rows, blocks, stream);
}

// The same with a filter for each row.
int rwkv_sample_filtered(const sample::FilterInput* in, int rows, int fp16, int blocks, cudaStream_t stream) {
    return fp16 ? sample::start<__half>(*in, rows, blocks, stream)
                : sample::start<float>(*in, rows, blocks, stream);
}
}
