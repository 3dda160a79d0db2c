// GEMMs with small weights and long K for dozens of rows and more, several in one launch: y[m, n] = f(sum
// over k of x[m, k] w[n, k]).
//
//   w [N, K] fp16, x [M, K] fp16, y [M, N] fp16; N a multiple of 16, K of 32; any M
//   f: identity, tanh, sigmoid, or relu squared (at most what fp16 holds)
//
// Reference: f(x @ w.T) in torch. Binding: Kernels.gemm_lowrank. Test: test/kernels/test_gemm_lowrank.py.
// Hopper only.
//
// This file is for long K with split-K, gemm_lowrank_resident.cu for short K.
// A block has one tile: 64 rows of x for each of its warpgroups, by 64 or 128 rows of w. A tall tile needs
// fewer bytes for its work, small ones keep more multiprocessors busy. The blocks of a cluster share the K of
// a tile; each then adds up the partial sums for some rows. Sums are fp32: over k inside a part of K (in
// steps of 16, in order), then over the parts in order. They depend neither on M nor on the tile, but on
// split-K.
#include "gemm_lowrank.cuh"

// A block's shared memory, in this order: the ring, the results (of tall tiles: where the ring was), the
// barriers.
template <int GROUPS, int COLUMNS, int SPLIT_K>
struct LowRankLayout {
    static constexpr bool OVER_RING = GROUPS > 2;
    static constexpr int X_BYTES = GROUPS * PIECE_BYTES, STAGE_BYTES = X_BYTES + COLUMNS * PIECE * 2;
    static constexpr int RESULT_BYTES =
        GROUPS * ROWS * COLUMNS * (SPLIT_K > 1 ? 4 : 2);  // partial sums for its rows; or y
    static constexpr int STAGES = GROUPS == 1 ? 6 : GROUPS == 4 ? 4 : 5;
    static constexpr int RESULTS = OVER_RING ? 0 : STAGES * STAGE_BYTES;
    static constexpr int FULL = STAGES * STAGE_BYTES + (OVER_RING ? 0 : RESULT_BYTES),
                         EMPTY = FULL + STAGES * 8;
    static constexpr int SUMS_FULL = EMPTY + STAGES * 8, BYTES = SUMS_FULL + 8;
};

// GROUPS: warpgroups of 64 rows of x. COLUMNS: rows of w of a block. SPLIT_K: parts of K, and blocks of a
// cluster.
template <int GROUPS, int COLUMNS, int SPLIT_K>
__global__ void LAUNCH_BOUNDS(GROUPS* GROUP + WARP, 1)
    gemm_lowrank_kernel(const __grid_constant__ LowRankGemms all) {
#if HOPPER
    using namespace hopper;
    using In = LowRankLayout<GROUPS, COLUMNS, SPLIT_K>;
    constexpr int STAGES = In::STAGES, MULTIPLIERS = GROUPS * GROUP;
    extern __shared__ __align__(1024) uint8_t raw[];
    const uint32_t ring = shared_address(raw), full = ring + In::FULL, empty = ring + In::EMPTY,
                   sums_full = ring + In::SUMS_FULL;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, split = blockIdx.x % SPLIT_K;

    int which = 0, tile = blockIdx.x / SPLIT_K;
    for (int more; which + 1 < all.count && tile >= (more = up(all.part[which].n, COLUMNS) * all.tiles);
         which++)
        tile -= more;
    const int n = all.part[which].n, activation = all.part[which].activation;
    const int n0 = tile / all.tiles * COLUMNS, m0 = tile % all.tiles * GROUPS * ROWS;
    const int k_pieces = up(all.part[which].k, PIECE), each = up(k_pieces, SPLIT_K),
              piece0 = min(split * each, k_pieces);
    const int pieces = min(each, k_pieces - piece0);

    const auto request_w = [&](int piece, int stage) {
        arrive_and_expect(full + stage * 8, In::STAGE_BYTES);
        load_box(ring + stage * In::STAGE_BYTES + In::X_BYTES, &all.w[which], (piece0 + piece) * PIECE, n0,
                 full + stage * 8);
    };
    const int early = min(STAGES, pieces);  // pieces of w that need not wait
    if (threadIdx.x == MULTIPLIERS) {
        for (int i = 0; i < STAGES; i++)
            barrier_init(full + i * 8, 1), barrier_init(empty + i * 8, MULTIPLIERS / WARP);
        barrier_init(sums_full, 1);
        barriers_ready();
        for (int i = 0; i < early; i++) request_w(i, i);
        if (SPLIT_K > 1) arrive_and_expect(sums_full, In::RESULT_BYTES);
    }
    prefetch(all.prefetch);
    if (SPLIT_K > 1) {
        cluster_arrive_relaxed();  // barriers_ready has made the barriers known
        cluster_wait();
    } else {
        __syncthreads();
    }

    wait_for_inputs();
    if (warp == MULTIPLIERS / WARP) {
        if (lane == 0) {
            int stage = 0, parity = 1;  // the phase before the first counts as over
            for (int piece = 0; piece < pieces; piece++) {
                if (piece >= early) {
                    barrier_wait(empty + stage * 8, parity);
                    request_w(piece, stage);
                }
                load_box(ring + stage * In::STAGE_BYTES, &all.x[which], (piece0 + piece) * PIECE, m0,
                         full + stage * 8);
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
        }
        return;
    }

    const int group = threadIdx.x / GROUP, thread = threadIdx.x % GROUP;
    float acc[COLUMNS / 2];
    clear(acc);
    Ring<STAGES>{full, empty}.multiply(pieces, [&](int, int stage) {
        const uint32_t x_pieces = ring + stage * In::STAGE_BYTES;
        add_piece<COLUMNS>(acc, x_pieces + group * PIECE_BYTES, x_pieces + In::X_BYTES);
    });
    const uint32_t results = ring + In::RESULTS + group * (In::RESULT_BYTES / GROUPS);
    const int row0 = m0 + group * ROWS;
    if constexpr (SPLIT_K > 1) {
        if (In::OVER_RING) {  // no block may still multiply what lies there
            cluster_arrive();
            cluster_wait();
        }
        constexpr int SHARES = 8 / SPLIT_K;  // of 8 rows, that a block adds up for each warpgroup
        // A share of one part of K is [COLUMNS / 16][32 lanes][4 numbers].
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int share = warp % 4 * 2 + h, rank = share / SHARES;
            const uint32_t place =
                results + ((split * SHARES + share % SHARES) * (COLUMNS / 16) * WARP + lane) * 16;
#pragma unroll
            for (int j = 0; j < COLUMNS / 16; j++)
                send_to(rank, place + j * WARP * 16, sums_full,
                        make_float4(acc[8 * j + 2 * h], acc[8 * j + 2 * h + 1], acc[8 * j + 4 + 2 * h],
                                    acc[8 * j + 4 + 2 * h + 1]));
        }
        barrier_wait_cluster(sums_full, 0);
        __half* const y = all.part[which].y;
#pragma unroll
        for (int i = thread; i < SHARES * COLUMNS / 16 * WARP; i += GROUP) {
            float sum[4] = {};
#pragma unroll
            for (int s = 0; s < SPLIT_K; s++) {
                const float4 more = load_shared(results + (s * SHARES * (COLUMNS / 16) * WARP + i) * 16);
                sum[0] += more.x, sum[1] += more.y, sum[2] += more.z, sum[3] += more.w;
            }
            const int j = i / WARP % (COLUMNS / 16),
                      row = row0 + (split * SHARES + i / (COLUMNS / 16 * WARP)) * 8 + lane / 4;
            const int column = n0 + j * 16 + lane % 4 * 2;
            if (row < all.m && column < n) {  // and so is column + 8
                uint32_t* const place = reinterpret_cast<uint32_t*>(y + size_t(row) * n + column);
                place[0] = to_half2(activate(sum[0], activation), activate(sum[1], activation));
                place[4] = to_half2(activate(sum[2], activation), activate(sum[3], activation));
            }
        }
    } else {
        if (In::OVER_RING) sync_some(1 + GROUPS, MULTIPLIERS);
        store_tile<COLUMNS>(acc, activation, results, &all.y[which], n0, row0, group);
        if (thread == 0) wait_boxes_written();
    }
#endif
}

namespace {
template <int GROUPS, int COLUMNS, int SPLIT_K>
int run(LowRankGemms all, cudaStream_t stream) {
    const auto kernel = gemm_lowrank_kernel<GROUPS, COLUMNS, SPLIT_K>;
    constexpr int SHARED = LowRankLayout<GROUPS, COLUMNS, SPLIT_K>::BYTES;
    if (const cudaError_t error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED))
        return error;
    if (const cudaError_t error = prepare(all, GROUPS * ROWS, COLUMNS)) return error;
    int clusters = 0;
    for (int i = 0; i < all.count; i++) clusters += up(all.part[i].n, COLUMNS) * all.tiles;
    return launch_clusters(SPLIT_K, kernel, clusters * SPLIT_K, GROUPS * GROUP + WARP, SHARED, stream, all);
}

struct Config {
    int groups, columns, split_k;
    int (*run)(LowRankGemms, cudaStream_t);
};

template <int GROUPS, int COLUMNS, int SPLIT_K>
constexpr Config config() {
    return {GROUPS, COLUMNS, SPLIT_K, run<GROUPS, COLUMNS, SPLIT_K>};
}

// Of those that cost the same, the first is the fastest.
constexpr Config CONFIGS[] = {
    config<1, 64, 8>(),  config<1, 64, 4>(),  config<1, 128, 4>(), config<2, 128, 4>(), config<3, 128, 4>(),
    config<2, 128, 2>(), config<3, 128, 2>(), config<2, 128, 1>(), config<3, 128, 1>(), config<4, 128, 1>()};

// The time that a launch takes, in about 0.03 us of an H200. A piece takes as long as shared memory needs to
// receive it and to hand it on, split-K as long as the partial sums are on their way; all that as often as
// blocks follow each other on a multiprocessor.
int cost(const LowRankGemms& all, const Config& config) {
    int blocks = 0;
    for (int i = 0; i < all.count; i++)
        blocks += up(all.part[i].n, config.columns) * up(all.m, config.groups * ROWS) * config.split_k;
    const int block = up(all.pieces, config.split_k) * (5 * config.groups + 1) +
                      (config.split_k > 1 ? 28 * config.groups : 0);
    return up(blocks, device().multiprocessors) * block;
}
}  // namespace

extern "C" {
// split_k: 1, 2, 4 or 8; the fastest (-1); or 0 where K is short enough for w to be resident in shared
// memory.
// prefetch: weights that the next kernel reads. cudaErrorNotSupported: this is no Hopper GPU, or w does not
// fit shared memory.
int rwkv_gemm_lowrank(const GemmPart* parts, int count, int m, int split_k, const char* prefetch,
                      unsigned prefetch_bytes, cudaStream_t stream) {
    if (count < 1 || count > MAX_PARTS || m < 1) return cudaErrorInvalidValue;
    if (!on_hopper()) return cudaErrorNotSupported;
    LowRankGemms all = {};
    all.count = count;
    all.m = m;
    all.prefetch = {prefetch, prefetch_bytes};
    for (int i = 0; i < count; i++) {
        if (parts[i].n % 16 || parts[i].k % 32) return cudaErrorInvalidValue;
        all.part[i] = parts[i];
        if (up(parts[i].k, PIECE) > all.pieces) all.pieces = up(parts[i].k, PIECE);
    }
    if (split_k == 0) return gemm_resident(all, stream);
    const Config* best = nullptr;
    for (const Config& config : CONFIGS)
        if ((split_k < 0 || split_k == config.split_k) && (!best || cost(all, config) < cost(all, *best)))
            best = &config;
    return best ? best->run(all, stream) : int(cudaErrorInvalidValue);
}
}
