// Products with small matrices of short K, as in product_low.cu, for some dozens of rows and more. Hopper only.
//
// There are three kernels. A block of kept_kernel keeps 64 rows of w and takes tiles of 64 rows of x one after the other; it is the fastest
// while all tiles are on the GPU at once, and serves where nothing else does. A block of turn_kernel takes one tile, as large as it must be
// for one block on each multiprocessor to do, and several parts one after the other. A block of wide_kernel keeps 128 rows of w. Sums are
// fp32, over k in steps of 16, in order, so that all give the same bits.
#include "product_low.cuh"

constexpr int MULTIPLIERS = GROUP;  // threads
constexpr int COLUMNS = 64;         // rows of w of a block
constexpr int STAGES = 4;           // of a ring
constexpr int ALIGNMENT = 1024;
constexpr int RESERVED = 1024;      // bytes of shared memory that the system takes of each block
constexpr int TILE_COST = 1;        // what a tile of rows costs besides its pieces, in pieces

// Of the wide kernel, which is faster from so many rows on where K has so many pieces; with four of them it is slower.
constexpr int WIDE_COLUMNS = 128, WIDE_GROUPS = 2, WIDE_ROWS = 512, WIDE_PIECES = 8;
constexpr int WIDE_THREADS = WIDE_GROUPS * (GROUP + WARP) + WARP;
constexpr int WIDE_BYTES = 2 * PIECE_BYTES;                                      // of a piece of w, and of a tile of y
constexpr int RINGS_AND_YS = WIDE_GROUPS * (STAGES * PIECE_BYTES + WIDE_BYTES);  // one of each for each warpgroup

// Of the kernel whose blocks take parts in turn.
constexpr int MOST_TURNS = 2;

// A block's shared memory, in this order: the ring, a tile of y for each warpgroup, the barriers.
template <int GROUPS, int COLUMNS>
struct TurnLayout {
    static constexpr int X_BYTES = GROUPS * PIECE_BYTES, STAGE_BYTES = X_BYTES + COLUMNS * PIECE * 2, Y_BYTES = ROWS * COLUMNS * 2;
    static constexpr int YS = STAGES * STAGE_BYTES, FULL = YS + GROUPS * Y_BYTES, EMPTY = FULL + STAGES * 8, BYTES = EMPTY + STAGES * 8;
};

constexpr int shared_bytes(int pieces) {
    return ALIGNMENT + STAGES * PIECE_BYTES + PIECE_BYTES + pieces * PIECE_BYTES + (2 * STAGES + 1) * 8;
}

constexpr int wide_shared_bytes(int pieces) { return pieces * (WIDE_BYTES + 16) + RINGS_AND_YS + WIDE_GROUPS * STAGES * 16; }

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
    if (threadIdx.x == 0) prefetch_map(&all.x[which]), prefetch_map(&all.y[which]);
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
    Ring<STAGES> xs = {full, empty};
    for (int m0 = first; m0 < all.m; m0 += step) {
        float acc[COLUMNS / 2];
        clear(acc);
        xs.multiply(pieces, [&](int piece, int stage) { add_piece<COLUMNS>(acc, ring + stage * PIECE_BYTES, ws + piece * PIECE_BYTES); });
        xs.give_back();
        if (threadIdx.x == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // the tile before has left
        sync_some(1, MULTIPLIERS);
        store_tile<COLUMNS>(acc, all.part[which].function, results, &all.y[which], n0, m0, 0);
    }
    if (threadIdx.x == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}

// A tile of GROUPS times 64 rows of x by COLUMNS rows of w, of one part after the other of those that are this block's turn. What the ring
// brings does not end with a part, so that the next is multiplied while the last is on its way out.
template <int GROUPS, int COLUMNS>
__global__ void __launch_bounds__(GROUPS * GROUP + WARP, 1) turn_kernel(const __grid_constant__ LowProducts all) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using namespace hopper;
    using In = TurnLayout<GROUPS, COLUMNS>;
    constexpr int MULTIPLIERS = GROUPS * GROUP;
    extern __shared__ __align__(1024) uint8_t raw[];
    const uint32_t ring = shared_address(raw), full = ring + In::FULL, empty = ring + In::EMPTY;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int turn = blockIdx.x % all.turns, tile = blockIdx.x / all.turns;
    const int n0 = tile / all.tiles * COLUMNS, m0 = tile % all.tiles * GROUPS * ROWS;
    const auto is_here = [&](int i) { return all.turn[i] == turn && n0 < all.part[i].n; };

    // Does `each(part, piece, the number of the piece in the block)`.
    const auto for_pieces = [&](auto&& each) {
        for (int i = 0, number = 0; i < all.count; i++)
            if (is_here(i))
                for (int piece = 0; piece < up(all.part[i].k, PIECE); piece++) each(i, piece, number++);
    };
    const auto ask_w = [&](int i, int piece, int stage) {
        arrive_and_expect(full + stage * 8, In::STAGE_BYTES);
        load_box(ring + stage * In::STAGE_BYTES + In::X_BYTES, &all.w[i], piece * PIECE, n0, full + stage * 8);
    };
    if (threadIdx.x == MULTIPLIERS) {
        for (int i = 0; i < STAGES; i++) barrier_init(full + i * 8, 1), barrier_init(empty + i * 8, MULTIPLIERS / WARP);
        barriers_ready();
        for_pieces([&](int i, int piece, int number) {
            if (number < STAGES) ask_w(i, piece, number);
        });
    }
    if (threadIdx.x < all.count && is_here(threadIdx.x)) prefetch_map(&all.x[threadIdx.x]), prefetch_map(&all.y[threadIdx.x]);
    prefetch(all.ahead);
    __syncthreads();

    wait_for_inputs();
    if (warp == MULTIPLIERS / WARP) {
        if (lane == 0)
            for_pieces([&](int i, int piece, int number) {
                const int stage = number % STAGES;
                if (number >= STAGES) {
                    barrier_wait(empty + stage * 8, (number / STAGES - 1) % 2);
                    ask_w(i, piece, stage);
                }
                load_box(ring + stage * In::STAGE_BYTES, &all.x[i], piece * PIECE, m0, full + stage * 8);
            });
        return;
    }

    const int group = warp / 4, row0 = m0 + group * ROWS;
    const uint32_t staged = ring + In::YS + group * In::Y_BYTES;
    const bool leads = threadIdx.x % GROUP == 0;
    Ring<STAGES> pieces = {full, empty};
    for (int i = 0; i < all.count; i++) {
        if (!is_here(i)) continue;
        float acc[COLUMNS / 2];
        clear(acc);
        pieces.multiply(up(all.part[i].k, PIECE), [&](int, int stage) {
            const uint32_t x_pieces = ring + stage * In::STAGE_BYTES;
            add_piece<COLUMNS>(acc, x_pieces + group * PIECE_BYTES, x_pieces + In::X_BYTES);
        });
        pieces.give_back();
        if (leads) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // the tile before has left
        sync_some(1 + group, GROUP);
        store_tile<COLUMNS>(acc, all.part[i].function, staged, &all.y[i], n0, row0, group);
    }
    if (leads) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Does `each(part, column tile, its first row tile, the end of its row tiles)` for what this block has to do: all tiles, by parts, then by
// columns, then by rows, in stretches that cost the same.
template <typename Each>
__device__ __forceinline__ void stretch_of_block(const LowProducts& all, Each&& each) {
    int total = 0;
    for (int i = 0; i < all.count; i++) total += up(all.part[i].n, WIDE_COLUMNS) * all.tiles * (up(all.part[i].k, PIECE) + TILE_COST);
    int begin = int(int64_t(total) * blockIdx.x / gridDim.x), end = int(int64_t(total) * (blockIdx.x + 1) / gridDim.x);
    for (int i = 0; i < all.count; i++) {
        const int cost = up(all.part[i].k, PIECE) + TILE_COST, tiles = up(all.part[i].n, WIDE_COLUMNS) * all.tiles;
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

// One block on a multiprocessor, with 128 rows of w at a time. Its warpgroups take tiles in turn, so that one multiplies while another
// stores. One warp brings w, and one for each warpgroup its x.
__global__ void __launch_bounds__(WIDE_THREADS, 1) wide_kernel(const __grid_constant__ LowProducts all) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using namespace hopper;
    constexpr int MULTIPLIERS = WIDE_GROUPS * GROUP;
    extern __shared__ __align__(1024) uint8_t raw[];
    const int slots = all.pieces, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const bool multiplies = warp < MULTIPLIERS / WARP, brings_w = warp == MULTIPLIERS / WARP;
    const int group = multiplies ? warp / 4 : warp - MULTIPLIERS / WARP - 1;
    const uint32_t ws = shared_address(raw), rings = ws + slots * WIDE_BYTES, barriers = rings + RINGS_AND_YS,
                   w_full = barriers + WIDE_GROUPS * STAGES * 16, w_empty = w_full + slots * 8,
                   ring = rings + group * STAGES * PIECE_BYTES, staged = rings + WIDE_GROUPS * STAGES * PIECE_BYTES + group * WIDE_BYTES,
                   full = barriers + group * STAGES * 16, empty = full + STAGES * 8;
    if (threadIdx.x == MULTIPLIERS) {
        for (int i = 0; i < WIDE_GROUPS * STAGES * 2; i++) barrier_init(barriers + i * 8, i / STAGES % 2 ? GROUP / WARP : 1);
        for (int i = 0; i < slots; i++) barrier_init(w_full + i * 8, 1), barrier_init(w_empty + i * 8, MULTIPLIERS / WARP);
        barriers_ready();
    }
    __syncthreads();
    prefetch(all.ahead);

    if (brings_w) {
        if (lane) return;
        int slot = 0, parity = 1;  // the phase before the first counts as over
        stretch_of_block(all, [&](int i, int column, int, int) {
            for (int piece = 0; piece < up(all.part[i].k, PIECE); piece++) {
                barrier_wait(w_empty + slot * 8, parity);
                arrive_and_expect(w_full + slot * 8, WIDE_BYTES);
                load_box(ws + slot * WIDE_BYTES, &all.w[i], piece * PIECE, column * WIDE_COLUMNS, w_full + slot * 8);
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
        stretch_of_block(all, [&](int i, int, int tile, int end) {
            for (; tile < end; tile++) {
                if (turn++ % WIDE_GROUPS != group) continue;
                for (int piece = 0; piece < up(all.part[i].k, PIECE); piece++) {
                    barrier_wait(empty + stage * 8, parity);
                    arrive_and_expect(full + stage * 8, PIECE_BYTES);
                    load_box(ring + stage * PIECE_BYTES, &all.x[i], piece * PIECE, tile * ROWS, full + stage * 8);
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
            }
        });
        return;
    }

    const bool leads = threadIdx.x % GROUP == 0;
    int parity = 0, before = 0, w_slot = 0, w_parity = 0;
    stretch_of_block(all, [&](int i, int column, int tile, int end) {
        const int pieces = up(all.part[i].k, PIECE);
        for (; tile < end; tile++) {
            if (turn++ % WIDE_GROUPS != group) continue;
            float acc[WIDE_COLUMNS / 2];
            clear(acc);
            for (int piece = 0, slot = w_slot, w_phase = w_parity; piece < pieces; piece++) {
                barrier_wait(w_full + slot * 8, w_phase);
                barrier_wait(full + stage * 8, parity);
                add_piece<WIDE_COLUMNS>(acc, ring + stage * PIECE_BYTES, ws + slot * WIDE_BYTES);
                products_done<1>();
                if (piece > 0 && lane == 0) arrive(empty + before * 8);
                before = stage;
                if (++stage == STAGES) stage = 0, parity ^= 1;
                if (++slot == slots) slot = 0, w_phase ^= 1;
            }
            products_done<0>();
            if (lane == 0) arrive(empty + before * 8);
            if (leads) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // the tile before has left
            sync_some(1 + group, GROUP);
            store_tile<WIDE_COLUMNS>(acc, all.part[i].function, staged, &all.y[i], column * WIDE_COLUMNS, tile * ROWS, group);
        }
        for (int piece = 0; piece < pieces; piece++) {
            barrier_wait(w_full + w_slot * 8, w_parity);  // also without a tile: else this would count for the w before
            if (lane == 0) arrive(w_empty + w_slot * 8);
            if (++w_slot == slots) w_slot = 0, w_parity ^= 1;
        }
    });
    if (leads) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
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

template <int GROUPS, int COLUMNS>
int run_turns(LowProducts all, int columns, cudaStream_t stream) {
    const auto kernel = turn_kernel<GROUPS, COLUMNS>;
    constexpr int SHARED = TurnLayout<GROUPS, COLUMNS>::BYTES;
    if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED)) return error;
    if (const cudaError_t error = prepare(all, GROUPS * ROWS, COLUMNS)) return error;
    return launch(kernel, up(columns, COLUMNS) * all.tiles * all.turns, GROUPS * GROUP + WARP, SHARED, stream, all);
}

struct Tall {
    int groups, columns;
    int (*run)(LowProducts, int, cudaStream_t);
};

// By what they bring for a piece. Those that bring the same: first the one with less of x, as w can be on its way before x is there.
constexpr Tall TALL[] = {{1, 128, run_turns<1, 128>}, {3, 64, run_turns<3, 64>}, {2, 128, run_turns<2, 128>}, {3, 128, run_turns<3, 128>}};

// The first with which every multiprocessor has one block at most; or none.
const Tall* tall(LowProducts& all, int& columns) {
    int load[MOST_TURNS] = {};
    columns = 0;
    all.turns = all.count < MOST_TURNS ? all.count : MOST_TURNS;
    for (int pieces = all.pieces; pieces > 0; pieces--)  // the longest first, each where there is least to do
        for (int i = 0; i < all.count; i++) {
            if (up(all.part[i].k, PIECE) != pieces) continue;
            int to = 0;
            for (int turn = 1; turn < all.turns; turn++)
                if (load[turn] < load[to]) to = turn;
            all.turn[i] = to, load[to] += pieces + TILE_COST;
            if (all.part[i].n > columns) columns = all.part[i].n;
        }
    for (const Tall& shape : TALL)
        if (up(columns, shape.columns) * up(all.m, shape.groups * ROWS) * all.turns <= device().multiprocessors) return &shape;
    return nullptr;
}

int products_wide(LowProducts all, cudaStream_t stream) {
    const int shared = wide_shared_bytes(all.pieces);
    if (const cudaError_t error = cudaFuncSetAttribute(wide_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared)) return error;
    if (const cudaError_t error = prepare(all, ROWS, WIDE_COLUMNS)) return error;
    int tiles = 0;
    for (int i = 0; i < all.count; i++) tiles += up(all.part[i].n, WIDE_COLUMNS) * all.tiles;
    return launch(wide_kernel, tiles < device().multiprocessors ? tiles : device().multiprocessors, WIDE_THREADS, shared, stream, all);
}
}  // namespace

int products_kept(LowProducts all, cudaStream_t stream) {
    if (all.m >= WIDE_ROWS && all.pieces == WIDE_PIECES) return products_wide(all, stream);
    const int shared = shared_bytes(all.pieces);
    if (shared > device().shared_of_block) return cudaErrorNotSupported;
    if (const cudaError_t error = cudaFuncSetAttribute(kept_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared)) return error;
    if (const cudaError_t error = prepare(all, ROWS, COLUMNS)) return error;
    const int room = device().multiprocessors * (device().shared / (shared + RESERVED));
    int blocks = 0, columns = 0;
    for (int i = 0; i < all.count; i++) blocks += up(all.part[i].n, COLUMNS) * all.tiles;
    if (blocks > room)
        if (const Tall* const shape = tall(all, columns)) return shape->run(all, columns, stream);
    share_out(all, room);
    blocks = 0;
    for (int i = 0; i < all.count; i++) all.begin[i] = blocks, blocks += up(all.part[i].n, COLUMNS) * all.groups[i];
    return launch(kept_kernel, blocks, MULTIPLIERS + WARP, shared, stream, all);
}
