// Draws one token for each row of fp16 logits where no row has a limit, a bias, penalties or noise: the ids
// that sample.cu draws, from numbers that stay in registers, by an eighth of its instructions. A team of
// blocks (a cluster on sm_90 and newer) shares a row; each warp has a segment of consecutive ids.
//
// Reference: rwkv_batch/sampling/sampler.py (Sampler). Binding: rwkv_batch/sampling/sampler_cuda.py
// (CudaSampler). Test: test/kernels/test_sample_plain.py.
#include "sample_row.cuh"

namespace sample {

// ids of a warp: 256 EIGHTS in order; a lane has eight of each 256.
template <int BLOCK_WARPS, int EIGHTS, int RESIDENT>
__global__ void LAUNCH_BOUNDS(BLOCK_WARPS* WARP, RESIDENT)
    sample_plain_kernel(const __grid_constant__ SampleInput in) {
    constexpr int MOST = MOST_BLOCKS * BLOCK_WARPS;
    __shared__ uint32_t tops[MOST];
    __shared__ uint64_t sums[MOST];
    __shared__ uint4 kept[EIGHTS * WARP];
    const int rank = cluster_block(), size = cluster_blocks();
    if (size > 1) cluster_begin();
    wait_for_inputs();
    const int warp = warp_id(), lane = lane_id(), row = blockIdx.x / size, segments = size * BLOCK_WARPS;
    const int segment = rank * BLOCK_WARPS + warp, first = segment * EIGHTS * 8 * WARP + lane * 8;
    const __half* const logits = static_cast<const __half*>(in.logits) + row * in.stride;
    const auto everywhere = [&](auto* place) { return size > 1 ? cluster_shared(place, lane) : place; };
    const auto sync = [&] {
        if (size > 1)
            cluster_sync();
        else
            __syncthreads();
    };
    constexpr uint32_t NONE = 0xfc00fc00;  // -inf
    union Pairs {
        uint4 four;
        uint32_t at[4];
    } x[EIGHTS];
#pragma unroll
    for (int i = 0; i < EIGHTS; i++) {
        const int id = first + i * 8 * WARP;
        x[i].four = id < in.vocab ? load_streamed(reinterpret_cast<const uint4*>(logits + id))
                                  : make_uint4(NONE, NONE, NONE, NONE);
    }
    const int slot = in.slots[row];
    SampleRecord* const record = in.table + max(slot, 0);
    const int method = record->method;
    const float scale = record->scale;
    const uint64_t key = record->key, position = record->position;
    const auto half2_of = [](uint32_t pair) { return *reinterpret_cast<const __half2*>(&pair); };
    // Of a group that the vocabulary ends in, ids behind it.
    const auto left_out = [&](Pairs& p, int id, uint32_t none) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if (id + 2 * k >= in.vocab) p.at[k] = (p.at[k] & 0xffff0000) | (none & 0xffff);
            if (id + 2 * k + 1 >= in.vocab) p.at[k] = (p.at[k] & 0xffff) | (none & 0xffff0000);
        }
    };
    __half2 most = half2_of(NONE);
#pragma unroll
    for (int i = 0; i < EIGHTS; i++) {
        const int id = first + i * 8 * WARP;
        if (id < in.vocab && id + 8 > in.vocab) left_out(x[i], id, NONE);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const __half2 pair = half2_of(x[i].at[k]);
            x[i].at[k] &= halves_reaching(pair, pair);  // NaN is 0
            most = larger_halves(most, half2_of(x[i].at[k]));
        }
    }
    float top = fmaxf(__low2float(most), __high2float(most));
    top = __fadd_rn(fminf(fmaxf(top, -FLT_MAX), FLT_MAX), 0.f);
    const uint32_t own_top = warp_max(to_key(top));
    if (size > 1) cluster_wait_for_all();
    if (slot < 0) {
        if (rank == 0 && threadIdx.x == 0) in.ids[row] = 0;
        return;
    }
    if (lane < size) *everywhere(tops + segment) = own_top;
    sync();
    uint32_t top_key = 0;
    for (int i = lane; i < segments; i += WARP) top_key = max(top_key, tops[i]);
    top_key = warp_max(top_key);
    top = from_key(top_key);
    if (top == -FLT_MAX) {  // all alike: as if they were 0
        top = 0.f;
#pragma unroll
        for (int i = 0; i < EIGHTS; i++) {
            x[i].four = make_uint4(0, 0, 0, 0);
            left_out(x[i], first + i * 8 * WARP, NONE);
        }
    }
    const auto weight = [&](float value) {
        return power_of_two(__fmul_rn(fminf(__fsub_rn(value, top), 0.f), scale));
    };
    const auto weights = [&](uint4 eight, float (&w)[8]) {
        const uint32_t pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float2 v = to_float2(pairs[k]);
            w[2 * k] = weight(v.x), w[2 * k + 1] = weight(v.y);
        }
    };
    int owner;
    uint64_t rest = 0;
    if (method == GREEDY) {
        owner = segments;
        for (int start = 0; start < segments && owner == segments; start += WARP) {
            const int i = start + lane;
            const unsigned found = warp_ballot(i < segments && tops[i] == top_key);
            if (found) owner = start + __ffs(found) - 1;
        }
    } else {
        Weight sum;
#pragma unroll
        for (int i = 0; i < EIGHTS; i++) {
            float w[8];
            weights(x[i].four, w);
            sum.add(w);
        }
        const uint32_t high = uint32_t(warp_sum(int(sum.high)));
        const int low = warp_sum(int(sum.low));
        if (lane < size) *everywhere(sums + segment) = (uint64_t(high) << (POINT / 2)) + int64_t(low);
        sync();
        const int each = (segments + WARP - 1) / WARP, begin = lane * each;
        uint64_t own = 0;
        for (int i = begin; i < begin + each && i < segments; i++) own += sums[i];
        const uint64_t after = warp_scan(own);
        const uint64_t point = fraction_of(random_word(key, position), shuffle(after, WARP - 1));
        rest = point - (after - own);
        const int lane_of = __ffs(warp_ballot(after > point)) - 1;
        owner = begin;
        if (lane == lane_of)
            while (rest >= sums[owner]) rest -= sums[owner++];
        owner = shuffle(owner, lane_of), rest = shuffle(rest, lane_of);
    }
    if (owner != segment) return;
#pragma unroll
    for (int i = 0; i < EIGHTS; i++) kept[i * WARP + lane] = x[i].four;
    int token = INT_MAX;
#pragma unroll 1
    for (int i = 0; i < EIGHTS && token == INT_MAX; i++) {
        const uint4 eight = kept[i * WARP + lane];
        const int id = first + i * 8 * WARP;
        if (method == GREEDY) {
            const uint32_t pairs[4] = {eight.x, eight.y, eight.z, eight.w};
            int mine = INT_MAX;
#pragma unroll
            for (int k = 3; k >= 0; k--) {
                const float2 v = to_float2(pairs[k]);
                if (fminf(v.y, FLT_MAX) == top) mine = id + 2 * k + 1;
                if (fminf(v.x, FLT_MAX) == top) mine = id + 2 * k;
            }
            token = warp_min(mine);
        } else {
            float w[8];
            weights(eight, w);
            uint64_t fixed[8], own = 0;
#pragma unroll
            for (int k = 0; k < 8; k++) {
                Weight one;
                one.add({w[k]});
                own += fixed[k] = one.fixed();
            }
            const uint64_t after = warp_scan(own), whole = shuffle(after, WARP - 1);
            if (rest < whole) {
                uint64_t sum = after - own;
                int before = 0;
#pragma unroll
                for (int k = 0; k < 7; k++) before += rest >= (sum += fixed[k]);
                token = shuffle(id + before, __ffs(warp_ballot(after > rest)) - 1);
            }
            rest -= whole;
        }
    }
    if (lane == 0) in.ids[row] = token, record->position = position + 1;
}

template <int BLOCK_WARPS, int EIGHTS, int RESIDENT>
int start(const SampleInput& in, int rows, cudaStream_t stream) {
    constexpr int IDS = BLOCK_WARPS * EIGHTS * 8 * WARP;
    const int blocks = (in.vocab + IDS - 1) / IDS;
    if (blocks > MOST_BLOCKS) return cudaErrorInvalidValue;
    const auto kernel = sample_plain_kernel<BLOCK_WARPS, EIGHTS, RESIDENT>;
    if (blocks == 1) return launch_alone(kernel, rows, BLOCK_WARPS * WARP, 0, stream, in);
    return launch_clusters(blocks, sample_plain_kernel<BLOCK_WARPS, EIGHTS, RESIDENT>, rows * blocks,
                           BLOCK_WARPS * WARP, 0, stream, in);
}
}  // namespace sample

extern "C" {

// Whether rows of so many ids can be drawn so on this GPU.
int rwkv_sample_plain_fits(int vocab) { return overlaps_launches() && vocab <= 65536; }

// Logits are fp16, `width` and `stride` multiples of 8 and the first of them at a multiple of 16 bytes; no
// workspace.
int rwkv_sample_plain(const sample::SampleInput* in, int rows, cudaStream_t stream) {
    return rows <= 16   ? sample::start<8, 4, 1>(*in, rows, stream)
           : rows <= 48 ? sample::start<16, 4, 2>(*in, rows, stream)
                        : sample::start<8, 8, 4>(*in, rows, stream);
}
}
