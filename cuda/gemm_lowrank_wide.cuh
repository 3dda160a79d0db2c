// GEMMs with small weights and short K for many rows, several in one launch: y[m, n] = f(sum over k of x[m,
// k] w[n, k]). A persistent kernel: one block on each multiprocessor, which keeps 128 rows of w and takes
// tiles of 64 rows of x one after the other.
//
//   w [N, K] fp16, x [M, K] fp16, y [M, N] fp16; N a multiple of 16, K of 32; any M
//   f: identity, tanh, sigmoid, or relu squared (at most what fp16 holds)
//
// Reference: f(x @ w.T) in torch. Binding: Kernels.gemm_lowrank, split_k = RESIDENT. Test:
// test/kernels/test_gemm_lowrank.py. Hopper only.
//
// Sums as in gemm_lowrank_resident.cu.
#pragma once
#include "gemm_lowrank.cuh"

// Faster from so many rows on where K has so many pieces; with four of them it is slower.
constexpr int WIDE_ROWS = 512, WIDE_PIECES = 8;

constexpr int WIDE_COLUMNS = 128, WIDE_GROUPS = 2;
constexpr int WIDE_THREADS = WIDE_GROUPS * (GROUP + WARP) + WARP;
constexpr int WIDE_BYTES = 2 * PIECE_BYTES;  // of a piece of w, and of a tile of y
constexpr int RINGS_AND_YS =
    WIDE_GROUPS * (RESIDENT_STAGES * PIECE_BYTES + WIDE_BYTES);  // one of each for each warpgroup

constexpr int wide_shared_bytes(int pieces) {
    return pieces * (WIDE_BYTES + 16) + RINGS_AND_YS + WIDE_GROUPS * RESIDENT_STAGES * 16;
}

#if HOPPER
// Does `each(part, column tile, its first row tile, the end of its row tiles)` for what this block has to do:
// all tiles, by parts, then by columns, then by rows, in stretches that cost the same.
template <typename Each>
__device__ __forceinline__ void for_tiles_of_block(const LowRankGemms& all, Each&& each) {
    int total = 0;
    for (int i = 0; i < all.count; i++)
        total += up(all.part[i].n, WIDE_COLUMNS) * all.tiles * (up(all.part[i].k, PIECE) + TILE_COST);
    int begin = int(int64_t(total) * blockIdx.x / gridDim.x),
        end = int(int64_t(total) * (blockIdx.x + 1) / gridDim.x);
    for (int i = 0; i < all.count; i++) {
        const int cost = up(all.part[i].k, PIECE) + TILE_COST,
                  tiles = up(all.part[i].n, WIDE_COLUMNS) * all.tiles;
        const int last = min(up(max(end, 0), cost), tiles);
        for (int tile = up(max(begin, 0), cost); tile < last;) {
            const int column = tile / all.tiles, next = min(last, (column + 1) * all.tiles);
            each(i, column, tile - column * all.tiles, next - column * all.tiles);
            tile = next;
        }
        begin -= tiles * cost, end -= tiles * cost;
    }
}
#endif

// One block on a multiprocessor, with 128 rows of w at a time. Its warpgroups take tiles in turn, so that one
// multiplies while another stores. One warp loads w, and one for each warpgroup its x.
__global__ void LAUNCH_BOUNDS(WIDE_THREADS, 1) gemm_wide_kernel(const __grid_constant__ LowRankGemms all) {
#if HOPPER
    using namespace hopper;
    constexpr int MULTIPLIERS = WIDE_GROUPS * GROUP;
    extern __shared__ __align__(1024) uint8_t raw[];
    const int slots = all.pieces, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const bool multiplies = warp < MULTIPLIERS / WARP, loads_w = warp == MULTIPLIERS / WARP;
    const int group = multiplies ? warp / 4 : warp - MULTIPLIERS / WARP - 1;
    const uint32_t ws = shared_address(raw), rings = ws + slots * WIDE_BYTES, barriers = rings + RINGS_AND_YS,
                   w_full = barriers + WIDE_GROUPS * RESIDENT_STAGES * 16, w_empty = w_full + slots * 8,
                   ring = rings + group * RESIDENT_STAGES * PIECE_BYTES,
                   staged = rings + WIDE_GROUPS * RESIDENT_STAGES * PIECE_BYTES + group * WIDE_BYTES,
                   full = barriers + group * RESIDENT_STAGES * 16, empty = full + RESIDENT_STAGES * 8;
    if (threadIdx.x == MULTIPLIERS) {
        for (int i = 0; i < WIDE_GROUPS * RESIDENT_STAGES * 2; i++)
            barrier_init(barriers + i * 8, i / RESIDENT_STAGES % 2 ? GROUP / WARP : 1);
        for (int i = 0; i < slots; i++)
            barrier_init(w_full + i * 8, 1), barrier_init(w_empty + i * 8, MULTIPLIERS / WARP);
        barriers_ready();
    }
    __syncthreads();
    prefetch(all.prefetch);

    if (loads_w) {
        if (lane) return;
        int slot = 0, parity = 1;  // the phase before the first counts as over
        for_tiles_of_block(all, [&](int i, int column, int, int) {
            for (int piece = 0; piece < up(all.part[i].k, PIECE); piece++) {
                barrier_wait(w_empty + slot * 8, parity);
                arrive_and_expect(w_full + slot * 8, WIDE_BYTES);
                load_box(ws + slot * WIDE_BYTES, &all.w[i], piece * PIECE, column * WIDE_COLUMNS,
                         w_full + slot * 8);
                if (++slot == slots) slot = 0, parity ^= 1;
            }
        });
        return;
    }
    wait_for_inputs();
    int turn = 0, stage = 0;
    if (!multiplies) {
        if (lane) return;
        int parity = 1;
        for_tiles_of_block(all, [&](int i, int, int tile, int end) {
            for (; tile < end; tile++) {
                if (turn++ % WIDE_GROUPS != group) continue;
                for (int piece = 0; piece < up(all.part[i].k, PIECE); piece++) {
                    barrier_wait(empty + stage * 8, parity);
                    arrive_and_expect(full + stage * 8, PIECE_BYTES);
                    load_box(ring + stage * PIECE_BYTES, &all.x[i], piece * PIECE, tile * ROWS,
                             full + stage * 8);
                    if (++stage == RESIDENT_STAGES) stage = 0, parity ^= 1;
                }
            }
        });
        return;
    }

    const bool leads = threadIdx.x % GROUP == 0;
    int parity = 0, before = 0, w_slot = 0, w_parity = 0;
    for_tiles_of_block(all, [&](int i, int column, int tile, int end) {
        const int pieces = up(all.part[i].k, PIECE);
        for (; tile < end; tile++) {
            if (turn++ % WIDE_GROUPS != group) continue;
            float acc[WIDE_COLUMNS / 2];
            clear(acc);
            for (int piece = 0, slot = w_slot, w_phase = w_parity; piece < pieces; piece++) {
                barrier_wait(w_full + slot * 8, w_phase);
                barrier_wait(full + stage * 8, parity);
                add_piece<WIDE_COLUMNS>(acc, ring + stage * PIECE_BYTES, ws + slot * WIDE_BYTES);
                wgmma_wait<1>();
                if (piece > 0 && lane == 0) arrive(empty + before * 8);
                before = stage;
                if (++stage == RESIDENT_STAGES) stage = 0, parity ^= 1;
                if (++slot == slots) slot = 0, w_phase ^= 1;
            }
            wgmma_wait<0>();
            if (lane == 0) arrive(empty + before * 8);
            if (leads) wait_boxes_read();  // of the tile before
            sync_some(1 + group, GROUP);
            store_tile<WIDE_COLUMNS>(acc, all.part[i].activation, staged, &all.y[i], column * WIDE_COLUMNS,
                                     tile * ROWS, group);
        }
        for (int piece = 0; piece < pieces; piece++) {
            barrier_wait(w_full + w_slot * 8,
                         w_parity);  // also without a tile: else this would count for the w before
            if (lane == 0) arrive(w_empty + w_slot * 8);
            if (++w_slot == slots) w_slot = 0, w_parity ^= 1;
        }
    });
    if (leads) wait_boxes_written();
#endif
}

inline bool suits_wide(const LowRankGemms& all) { return all.m >= WIDE_ROWS && all.pieces == WIDE_PIECES; }

inline int gemm_wide(LowRankGemms all, cudaStream_t stream) {
    const int shared = wide_shared_bytes(all.pieces);
    if (const cudaError_t error =
            cudaFuncSetAttribute(gemm_wide_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared))
        return error;
    if (const cudaError_t error = prepare(all, ROWS, WIDE_COLUMNS)) return error;
    int tiles = 0;
    for (int i = 0; i < all.count; i++) tiles += up(all.part[i].n, WIDE_COLUMNS) * all.tiles;
    return launch(gemm_wide_kernel, tiles < device().multiprocessors ? tiles : device().multiprocessors,
                  WIDE_THREADS, shared, stream, all);
}
