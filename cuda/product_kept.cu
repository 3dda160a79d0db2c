// Products with small matrices of short K, as in product_low.cu, for some dozens of rows and more. Hopper only.
//
// A block keeps 64 rows of w, and takes tiles of 64 rows of x one after the other. Sums are fp32, over k in steps of 16, in order.
#include "product_low.cuh"

constexpr int MULTIPLIERS = GROUP;  // threads
constexpr int COLUMNS = 64;         // rows of w of a block
constexpr int STAGES = 4;           // of the ring of x
constexpr int ALIGNMENT = 1024;
constexpr int RESERVED = 1024;      // bytes of shared memory that the system takes of each block
constexpr int TILE_COST = 1;        // what a tile of rows costs besides its pieces, in pieces

__host__ __device__ constexpr int shared_bytes(int pieces) {
    return ALIGNMENT + STAGES * PIECE_BYTES + PIECE_BYTES + pieces * PIECE_BYTES + (2 * STAGES + 1) * 8;
}

// In shared memory: the ring, a tile of y, w, the barriers.
__global__ void __launch_bounds__(MULTIPLIERS + WARP) kept_kernel(const __grid_constant__ LowProducts all) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using namespace hopper;
    extern __shared__ uint8_t shared[];
    const uint32_t ring = (shared_address(shared) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT, results = ring + STAGES * PIECE_BYTES,
                   ws = results + PIECE_BYTES, full = ws + all.pieces * PIECE_BYTES, empty = full + STAGES * 8, w_full = empty + STAGES * 8;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;

    int which = 0, block = blockIdx.x;
    while (which + 1 < all.count && block >= all.begin[which + 1]) which++;
    block -= all.begin[which];
    const int groups = all.groups[which], pieces = up(all.part[which].k, PIECE);
    const int n0 = block / groups * COLUMNS, step = groups * ROWS, first = block % groups * ROWS;

    if (threadIdx.x == MULTIPLIERS) {
        for (int i = 0; i < STAGES; i++) barrier_init(full + i * 8, 1), barrier_init(empty + i * 8, MULTIPLIERS / WARP);
        barrier_init(w_full, 1);
        barriers_ready();
        arrive_and_expect(w_full, pieces * PIECE_BYTES);
        for (int piece = 0; piece < pieces; piece++) load_box(ws + piece * PIECE_BYTES, &all.w[which], piece * PIECE, n0, w_full);
    }
    prefetch(all.ahead);
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
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
        }
        return;
    }

    barrier_wait(w_full, 0);
    int stage = 0, parity = 0, before = 0;
    for (int m0 = first; m0 < all.m; m0 += step) {
        float acc[COLUMNS / 2];
        clear(acc);
        for (int piece = 0; piece < pieces; piece++) {
            barrier_wait(full + stage * 8, parity);
            add_piece<COLUMNS>(acc, ring + stage * PIECE_BYTES, ws + piece * PIECE_BYTES);
            products_done<1>();
            if (piece > 0 && lane == 0) arrive(empty + before * 8);
            before = stage;
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        products_done<0>();
        if (lane == 0) arrive(empty + before * 8);
        if (threadIdx.x == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // the tile before has left
        sync_some(1, MULTIPLIERS);
        store_tile<COLUMNS>(acc, all.part[which].function, results, &all.y[which], n0, m0, 0);
    }
    if (threadIdx.x == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}

namespace {
// Blocks that share the rows of each part: one, then one more wherever there is most to do, while there is room. Where there is hardly room
// for one each, twice as many: those that end early make room for the rest.
void share_out(LowProducts& all, int room) {
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

int products_kept(LowProducts all, cudaStream_t stream) {
    const int shared = shared_bytes(all.pieces);
    if (shared > device().shared_of_block) return cudaErrorNotSupported;
    if (const cudaError_t error = cudaFuncSetAttribute(kept_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared)) return error;
    if (const cudaError_t error = prepare(all, ROWS, COLUMNS)) return error;
    share_out(all, device().multiprocessors * (device().shared / (shared + RESERVED)));
    int blocks = 0;
    for (int i = 0; i < all.count; i++) all.begin[i] = blocks, blocks += up(all.part[i].n, COLUMNS) * all.groups[i];
    return launch(kept_kernel, blocks, MULTIPLIERS + WARP, shared, stream, all);
}
