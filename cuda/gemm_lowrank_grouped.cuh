// GEMMs with small weights and short K, several in one launch: y[m, n] = f(sum over k of x[m, k] w[n, k]). A
// block computes one tile of several parts, one after the other.
//
//   w [N, K] fp16, x [M, K] fp16, y [M, N] fp16; N a multiple of 16, K of 32; any M
//   f: identity, tanh, sigmoid, or relu squared (at most what fp16 holds)
//
// Reference: f(x @ w.T) in torch. Binding: Kernels.gemm_lowrank, split_k = RESIDENT. Test:
// test/kernels/test_gemm_lowrank.py. Hopper only.
//
// Tiles are as large as they must be for one block on each multiprocessor to suffice. Sums as in
// gemm_lowrank_resident.cu.
#pragma once
#include "gemm_lowrank.cuh"

constexpr int MAX_BLOCKS = 2;  // for a tile

// A block's shared memory, in this order: the ring, a tile of y for each warpgroup, the barriers.
template <int GROUPS, int COLUMNS>
struct GroupedLayout {
    static constexpr int X_BYTES = GROUPS * PIECE_BYTES, STAGE_BYTES = X_BYTES + COLUMNS * PIECE * 2,
                         Y_BYTES = ROWS * COLUMNS * 2;
    static constexpr int YS = RESIDENT_STAGES * STAGE_BYTES, FULL = YS + GROUPS * Y_BYTES,
                         EMPTY = FULL + RESIDENT_STAGES * 8, BYTES = EMPTY + RESIDENT_STAGES * 8;
};

// A tile of GROUPS times 64 rows of x by COLUMNS rows of w, of one part after the other of those that this
// block takes. The ring does not end with a part, so that the next is multiplied while the last is stored.
template <int GROUPS, int COLUMNS>
__global__ void LAUNCH_BOUNDS(GROUPS* GROUP + WARP, 1)
    gemm_grouped_kernel(const __grid_constant__ LowRankGemms all) {
#if HOPPER
    using namespace hopper;
    using In = GroupedLayout<GROUPS, COLUMNS>;
    constexpr int MULTIPLIERS = GROUPS * GROUP;
    extern __shared__ __align__(1024) uint8_t raw[];
    const uint32_t ring = shared_address(raw), full = ring + In::FULL, empty = ring + In::EMPTY;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int own = blockIdx.x % all.blocks, tile = blockIdx.x / all.blocks;
    const int n0 = tile / all.tiles * COLUMNS, m0 = tile % all.tiles * GROUPS * ROWS;
    const auto is_here = [&](int i) { return all.block[i] == own && n0 < all.part[i].n; };

    // Does `each(part, piece, the number of the piece in the block)`.
    const auto for_pieces = [&](auto&& each) {
        for (int i = 0, number = 0; i < all.count; i++)
            if (is_here(i))
                for (int piece = 0; piece < up(all.part[i].k, PIECE); piece++) each(i, piece, number++);
    };
    const auto request_w = [&](int i, int piece, int stage) {
        arrive_and_expect(full + stage * 8, In::STAGE_BYTES);
        load_box(ring + stage * In::STAGE_BYTES + In::X_BYTES, &all.w[i], piece * PIECE, n0,
                 full + stage * 8);
    };
    if (threadIdx.x == MULTIPLIERS) {
        for (int i = 0; i < RESIDENT_STAGES; i++)
            barrier_init(full + i * 8, 1), barrier_init(empty + i * 8, MULTIPLIERS / WARP);
        barriers_ready();
        for_pieces([&](int i, int piece, int number) {
            if (number < RESIDENT_STAGES) request_w(i, piece, number);
        });
    }
    if (threadIdx.x < all.count && is_here(threadIdx.x))
        prefetch_map(&all.x[threadIdx.x]), prefetch_map(&all.y[threadIdx.x]);
    prefetch(all.prefetch);
    __syncthreads();

    wait_for_inputs();
    if (warp == MULTIPLIERS / WARP) {
        if (lane == 0)
            for_pieces([&](int i, int piece, int number) {
                const int stage = number % RESIDENT_STAGES;
                if (number >= RESIDENT_STAGES) {
                    barrier_wait(empty + stage * 8, (number / RESIDENT_STAGES - 1) % 2);
                    request_w(i, piece, stage);
                }
                load_box(ring + stage * In::STAGE_BYTES, &all.x[i], piece * PIECE, m0, full + stage * 8);
            });
        return;
    }

    const int group = warp / 4, row0 = m0 + group * ROWS;
    const uint32_t staged = ring + In::YS + group * In::Y_BYTES;
    const bool leads = threadIdx.x % GROUP == 0;
    Ring<RESIDENT_STAGES> pieces = {full, empty};
    for (int i = 0; i < all.count; i++) {
        if (!is_here(i)) continue;
        float acc[COLUMNS / 2];
        clear(acc);
        pieces.multiply(up(all.part[i].k, PIECE), [&](int, int stage) {
            const uint32_t x_pieces = ring + stage * In::STAGE_BYTES;
            add_piece<COLUMNS>(acc, x_pieces + group * PIECE_BYTES, x_pieces + In::X_BYTES);
        });
        pieces.release();
        if (leads) wait_boxes_read();  // of the tile before
        sync_some(1 + group, GROUP);
        store_tile<COLUMNS>(acc, all.part[i].activation, staged, &all.y[i], n0, row0, group);
    }
    if (leads) wait_boxes_written();
#endif
}

namespace {
template <int GROUPS, int COLUMNS>
int run_grouped(LowRankGemms all, int columns, cudaStream_t stream) {
    const auto kernel = gemm_grouped_kernel<GROUPS, COLUMNS>;
    constexpr int SHARED = GroupedLayout<GROUPS, COLUMNS>::BYTES;
    if (const cudaError_t error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED))
        return error;
    if (const cudaError_t error = prepare(all, GROUPS * ROWS, COLUMNS)) return error;
    return launch(kernel, up(columns, COLUMNS) * all.tiles * all.blocks, GROUPS * GROUP + WARP, SHARED,
                  stream, all);
}

struct GroupedConfig {
    int groups, columns;
    int (*run)(LowRankGemms, int, cudaStream_t);
};

// By what they load for a piece. Of those that load the same, the one with less of x is first, as w can be on
// its way before x is there.
constexpr GroupedConfig GROUPED_CONFIGS[] = {{1, 128, run_grouped<1, 128>},
                                             {3, 64, run_grouped<3, 64>},
                                             {2, 128, run_grouped<2, 128>},
                                             {3, 128, run_grouped<3, 128>}};

// The first with which every multiprocessor has one block at most; or none.
const GroupedConfig* choose_grouped(LowRankGemms& all, int& columns) {
    int load[MAX_BLOCKS] = {};
    columns = 0;
    all.blocks = all.count < MAX_BLOCKS ? all.count : MAX_BLOCKS;
    for (int pieces = all.pieces; pieces > 0; pieces--)  // the longest first, each where there is least to do
        for (int i = 0; i < all.count; i++) {
            if (up(all.part[i].k, PIECE) != pieces) continue;
            int to = 0;
            for (int block = 1; block < all.blocks; block++)
                if (load[block] < load[to]) to = block;
            all.block[i] = to, load[to] += pieces + TILE_COST;
            if (all.part[i].n > columns) columns = all.part[i].n;
        }
    for (const GroupedConfig& config : GROUPED_CONFIGS)
        if (up(columns, config.columns) * up(all.m, config.groups * ROWS) * all.blocks <=
            device().multiprocessors)
            return &config;
    return nullptr;
}
}  // namespace
