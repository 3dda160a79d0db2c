// GEMMs with small weights and short K for dozens of rows and more, several in one launch: y[m, n] = f(sum
// over k of x[m, k] w[n, k]). A block keeps 64 rows of w in shared memory and takes tiles of 64 rows of x one
// after the other.
//
//   w [N, K] fp16, x [M, K] fp16, y [M, N] fp16; N a multiple of 16, K of 32; any M
//   f: identity, tanh, sigmoid, or relu squared (at most what fp16 holds)
//
// Reference: f(x @ w.T) in torch. Binding: Kernels.gemm_lowrank, split_k = RESIDENT. Test:
// test/kernels/test_gemm_lowrank.py. Hopper only.
//
// This kernel is the fastest while all tiles are on the GPU at once, and serves where no other does. Else a
// block of gemm_lowrank_grouped.cuh computes one tile of several parts, as large as it must be for one block
// on each multiprocessor to suffice, and for many rows a persistent block of gemm_lowrank_wide.cuh keeps 128
// rows of w. Sums are fp32, over k in steps of 16, in order, so that all three give the same bits.
#include "gemm_lowrank_grouped.cuh"
#include "gemm_lowrank_wide.cuh"

constexpr int MULTIPLIERS = GROUP;  // threads
constexpr int COLUMNS = 64;         // rows of w of a block
constexpr int ALIGNMENT = 1024;
constexpr int RESERVED = 1024;  // bytes of shared memory that the system takes of each block

constexpr int resident_shared_bytes(int pieces) {
    return ALIGNMENT + RESIDENT_STAGES * PIECE_BYTES + PIECE_BYTES + pieces * PIECE_BYTES +
           (2 * RESIDENT_STAGES + 1) * 8;
}

// In shared memory: the ring, a tile of y, w, the barriers.
__global__ void __launch_bounds__(MULTIPLIERS + WARP)
    gemm_resident_kernel(const __grid_constant__ LowRankGemms all) {
#if HOPPER
    using namespace hopper;
    extern __shared__ uint8_t shared[];
    const uint32_t ring = (shared_address(shared) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT,
                   results = ring + RESIDENT_STAGES * PIECE_BYTES, ws = results + PIECE_BYTES,
                   full = ws + all.pieces * PIECE_BYTES, empty = full + RESIDENT_STAGES * 8,
                   w_full = empty + RESIDENT_STAGES * 8;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;

    int which = 0, block = blockIdx.x;
    while (which + 1 < all.count && block >= all.begin[which + 1]) which++;
    block -= all.begin[which];
    const int groups = all.groups[which], pieces = up(all.part[which].k, PIECE);
    const int n0 = block / groups * COLUMNS, step = groups * ROWS, first = block % groups * ROWS;

    if (threadIdx.x == MULTIPLIERS) {
        for (int i = 0; i < RESIDENT_STAGES; i++)
            barrier_init(full + i * 8, 1), barrier_init(empty + i * 8, MULTIPLIERS / WARP);
        barrier_init(w_full, 1);
        barriers_ready();
        arrive_and_expect(w_full, pieces * PIECE_BYTES);
        for (int piece = 0; piece < pieces; piece++)
            load_box(ws + piece * PIECE_BYTES, &all.w[which], piece * PIECE, n0, w_full);
    }
    if (threadIdx.x == 0) prefetch_map(&all.x[which]), prefetch_map(&all.y[which]);
    prefetch(all.prefetch);
    __syncthreads();

    wait_for_inputs();
    if (warp == MULTIPLIERS / WARP) {
        if (lane == 0) {
            int stage = 0, parity = 1;  // the phase before the first counts as over
            for (int m0 = first; m0 < all.m; m0 += step)
                for (int piece = 0; piece < pieces; piece++) {
                    barrier_wait(empty + stage * 8, parity);
                    arrive_and_expect(full + stage * 8, PIECE_BYTES);
                    load_box(ring + stage * PIECE_BYTES, &all.x[which], piece * PIECE, m0, full + stage * 8);
                    if (++stage == RESIDENT_STAGES) stage = 0, parity ^= 1;
                }
        }
        return;
    }

    barrier_wait(w_full, 0);
    Ring<RESIDENT_STAGES> xs = {full, empty};
    for (int m0 = first; m0 < all.m; m0 += step) {
        float acc[COLUMNS / 2];
        clear(acc);
        xs.multiply(pieces, [&](int piece, int stage) {
            add_piece<COLUMNS>(acc, ring + stage * PIECE_BYTES, ws + piece * PIECE_BYTES);
        });
        xs.release();
        if (threadIdx.x == 0) wait_boxes_read();  // of the tile before
        sync_some(1, MULTIPLIERS);
        store_tile<COLUMNS>(acc, all.part[which].activation, results, &all.y[which], n0, m0, 0);
    }
    if (threadIdx.x == 0) wait_boxes_written();
#endif
}

namespace {
// Blocks that share the rows of each part: one, then one more wherever there is most to do, while there is
// room. Where there is hardly room for one each, twice as many: those that end early make room for the rest.
void assign_blocks(LowRankGemms& all, int room) {
    int total = 0;
    for (int i = 0; i < all.count; i++) all.groups[i] = 1, total += up(all.part[i].n, COLUMNS);
    if (2 * total > room) room *= 2;
    while (true) {
        int worst = 0, most = 0;
        for (int i = 0; i < all.count; i++) {
            const int cost = up(all.tiles, all.groups[i]) * (up(all.part[i].k, PIECE) + TILE_COST);
            if (cost > most) worst = i, most = cost;
        }
        total += up(all.part[worst].n, COLUMNS);
        if (all.groups[worst] == all.tiles || total > room) break;
        all.groups[worst]++;
    }
}
}  // namespace

int gemm_resident(LowRankGemms all, cudaStream_t stream) {
    if (suits_wide(all)) return gemm_wide(all, stream);
    const int shared = resident_shared_bytes(all.pieces);
    if (shared > device().shared_of_block) return cudaErrorNotSupported;
    if (const cudaError_t error =
            cudaFuncSetAttribute(gemm_resident_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared))
        return error;
    if (const cudaError_t error = prepare(all, ROWS, COLUMNS)) return error;
    const int room = device().multiprocessors * (device().shared / (shared + RESERVED));
    int blocks = 0, columns = 0;
    for (int i = 0; i < all.count; i++) blocks += up(all.part[i].n, COLUMNS) * all.tiles;
    if (blocks > room)
        if (const GroupedConfig* const grouped = choose_grouped(all, columns))
            return grouped->run(all, columns, stream);
    assign_blocks(all, room);
    blocks = 0;
    for (int i = 0; i < all.count; i++)
        all.begin[i] = blocks, blocks += up(all.part[i].n, COLUMNS) * all.groups[i];
    return launch(gemm_resident_kernel, blocks, MULTIPLIERS + WARP, shared, stream, all);
}
