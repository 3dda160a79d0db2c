// Residual add, layer norm, token shift and mixing of many rows of one token each on Hopper (formulas in
// norm.cuh).
//
// A team of TEAM blocks, a cluster, has TEAM rows. Each block has its part of the columns of all of them,
// threadIdx.y is the row, and loads that part of the constants (mixes, weight, bias) once: those of a whole
// row are more bytes than its outputs, and what passes through the L2 cache is what takes time here. Each
// warp computes mean and squares of its 256 columns, and what the warps found is combined over the row: mean
// of the means; squares within the warps plus 256 times the squares of their means' distances, as a tree.
//
// Reference: layer_norm of torch.nn.functional, then token_shift and mix of rwkv_batch/ops/torch_ops.py.
// Binding: Kernels.norm_mix_decode. Test: test/kernels/test_norm_mix_decode.py.
#include "hopper.cuh"
#include "norm.cuh"

constexpr int TEAM = 4;  // blocks that share as many rows, and the constants' columns among them
constexpr int MAX_TEAM_THREADS = 512;
constexpr int WARP_COLUMNS = 8 * WARP;    // of a team's warp
constexpr int MANY_NUMBERS = 960 * 1024;  // of x: fewer move faster than the blocks of a cluster meet

// The blocks exchange their warps' moments once. All loads are under way before one is waited for: a slot is
// used only after what is added has been requested. Partial sums are added one after the other: there are no
// registers for all at once, as three blocks share a multiprocessor. CODED: so many mixes are made fp8, for
// which the blocks exchange what their warps' largest magnitudes are.
template <int MIXES, bool PARTIALS, int CODED>
__global__ void LAUNCH_BOUNDS(MAX_TEAM_THREADS, 3)
    norm_mix_team_kernel(const __grid_constant__ NormInput in, int rows, const int* slots, __half* shift,
                         size_t slot_stride, const __half* mixes, __half* out, Fp8Rows coded) {
#if HOPPER
    using namespace hopper;
    constexpr int N = WARP_COLUMNS / WARP;
    extern __shared__ __align__(16) __half constants[];  // [MIXES + 2, columns]: mixes, weight, bias
    __shared__ __align__(8) uint64_t moments_full;
    __shared__ __align__(8) uint64_t largest_full;  // of CODED
    __shared__ __align__(8)
        float2 moments[TEAM][MAX_TEAM_THREADS / WARP];  // of rows and warps: mean, sum of squares around it
    __shared__ __align__(8) float2 found[TEAM][MAX_TEAM_THREADS / WARP];  // the same: largest magnitudes
    const int columns = in.width / TEAM, warps = columns / WARP_COLUMNS;  // of a row in a block
    const int at = N * threadIdx.x, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int rank = cluster_rank(), row = blockIdx.x - rank + threadIdx.y, column = rank * columns + at;
    const bool inside = row < rows, first = !PARTIALS && in.tokens;
    float* const stream = in.x + size_t(row) * in.width + column;
    if (threadIdx.x == 0 && threadIdx.y == 0) {
        barrier_init(shared_address(&moments_full), 1);
        if (CODED) barrier_init(shared_address(&largest_full), 1);
        barriers_ready();
    }
    cluster_arrive_relaxed();

    float v[N] = {};
    int slot = -1;
    if (inside && !first) load_float(stream, v), slot = slots[row];
#pragma unroll
    for (int k = 0; k < MIXES + 2; k += TEAM) {
        const int i = k + threadIdx.y;
        const __half* from = i < MIXES ? mixes + i * in.width : i == MIXES ? in.weight : in.bias;
        if (i < MIXES + 2) copy_columns<N>(constants + i * columns + at, from + column);
    }
    commit_copies();
    wait_for_inputs();
    Raw<N> added = {}, before = {};
    if (inside && first)
        added.load(in.table + size_t(in.tokens[row]) * in.width + column), slot = slots[row];
    else if (!PARTIALS && inside && in.y)
        added.load(in.y + size_t(row) * in.width + column);
    if (slot >= 0) before.load(shift + slot * slot_stride + column);
    if (PARTIALS && inside) add_partials<1>(in, row, column, v);
    cluster_wait();  // all blocks are there, and their barriers; here, so that no load waits for one before
                     // it
    if (threadIdx.x == 0 && threadIdx.y == 0) {
        arrive_and_expect(shared_address(&moments_full), TEAM * TEAM * warps * sizeof(float2));
        if (CODED) arrive_and_expect(shared_address(&largest_full), TEAM * TEAM * warps * sizeof(float2));
    }

    float sum = 0.f, squares = 0.f;
#pragma unroll
    for (int i = 0; i < N; i++) v[i] += added[i], sum += v[i];
    const float own_mean = warp_sum(sum) / WARP_COLUMNS;
#pragma unroll
    for (int i = 0; i < N; i++) squares += (v[i] - own_mean) * (v[i] - own_mean);
    squares = warp_sum(squares);
    if (lane < TEAM)
        send_to(lane, shared_address(&moments[threadIdx.y][rank * warps + warp]),
                shared_address(&moments_full), own_mean, squares);
    if (PARTIALS || first || in.y) store_whole_sectors(stream, v, inside);
    wait_copies<0>();
    __syncthreads();  // constants
    barrier_wait_cluster(shared_address(&moments_full), 0);

    const bool has = lane < TEAM * warps;
    const float2 moment = has ? load_shared2(shared_address(&moments[threadIdx.y][lane])) : float2{};
    const float mean = warp_sum(moment.x) / (TEAM * warps), apart = moment.x - mean;
    const float scale =
        rsqrtf(warp_sum(has ? moment.y + WARP_COLUMNS * apart * apart : 0.f) / in.width + EPSILON);
    if (CODED == 0 && !inside) return;
    Raw<N> weight, bias;
    weight.load(constants + MIXES * columns + at), bias.load(constants + (MIXES + 1) * columns + at);
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = (v[i] - mean) * scale * weight[i] + bias[i];
    if (slot >= 0) store_half(shift + slot * slot_stride + column, v);
#pragma unroll
    for (int i = CODED; i < MIXES; i++) {
        Raw<N> amount;
        amount.load(constants + i * columns + at);
        if (inside) mix_and_store(v, before, amount, out + (i * size_t(rows) + row) * in.width + column);
    }
    if constexpr (CODED > 0) {
        Raw<N> mixed[CODED];
        uint32_t largest[4] = {};
#pragma unroll
        for (int i = 0; i < CODED; i++) {
            Raw<N> amount;
            amount.load(constants + i * columns + at);
            mixed[i] = mix(v, before, amount);
            if (i >= first_half(CODED) && inside)
                mixed[i].store(out + (i * size_t(rows) + row) * in.width + column);
            largest[i] = largest_of_warp(mixed[i].pair);
        }
        if (lane < TEAM)
            send_to(lane, shared_address(&found[threadIdx.y][rank * warps + warp]),
                    shared_address(&largest_full), __uint_as_float(largest[0] | largest[1] << 16),
                    __uint_as_float(largest[2]));
        barrier_wait_cluster(shared_address(&largest_full), 0);
        const float2 sent = has ? load_shared2(shared_address(&found[threadIdx.y][lane])) : float2{};
        const uint32_t two = __float_as_uint(sent.x);
        const uint32_t of_warps[] = {two & 0xffff, two >> 16, __float_as_uint(sent.y)};
#pragma unroll
        for (int i = 0; i < CODED; i++) {
            const float most = half_of(warp_max(of_warps[i]));
            const size_t place = i * size_t(rows) + row;
            if (inside && column == 0) coded.scales[place] = fp8_scale(most);
            store_fp8(coded.codes + place * in.width, column, mixed[i].pair, fp8_factor(most), inside);
        }
    }
#endif
}

namespace {
template <int MIXES>
int launch_team(const NormInput& in, int rows, const int* slots, __half* shift, size_t slot_stride,
                const __half* mixes, __half* out, const Fp8Rows& coded, cudaStream_t stream) {
    const int shared = (MIXES + 2) * in.width / TEAM * int(sizeof(__half)),
              blocks = (rows + TEAM - 1) / TEAM * TEAM;
    const auto kernel = in.partial_count ? norm_mix_team_kernel<MIXES, true, 0>
                        : coded.codes    ? norm_mix_team_kernel<MIXES, false, fp8_mixes(MIXES)>
                                         : norm_mix_team_kernel<MIXES, false, 0>;
    return launch_clusters(TEAM, kernel, blocks, dim3(in.width / 8 / TEAM, TEAM), shared, stream, in, rows,
                           slots, shift, slot_stride, mixes, out, coded);
}
}  // namespace

bool suits_team(const NormInput& in, int rows) {
    const bool whole_warps = in.width % (TEAM * WARP_COLUMNS) == 0 && in.width <= 8 * MAX_TEAM_THREADS;
    return on_hopper() && whole_warps && rows * in.width >= MANY_NUMBERS;
}

int norm_mix_team(const NormInput& in, int rows, const int* slots, __half* shift, size_t slot_stride,
                  const __half* mixes, int n, __half* out, const Fp8Rows& coded, cudaStream_t stream) {
    const auto run = n == 1            ? launch_team<1>
                     : n == SOME_MIXES ? launch_team<SOME_MIXES>
                                       : launch_team<MAX_MIXES>;
    return run(in, rows, slots, shift, slot_stride, mixes, out, coded, stream);
}
