// The kernel of gemm_many.cu, gemm_many_fp8.cu, gemm_many8.cu and gemm_many4.cu: a block on each
// multiprocessor goes through tiles, and what the next one multiplies is on its way while the results of one
// are stored.
//
// A tile has 64 rows of w for each of GROUPS warpgroups and TN rows of x. Every wgmma reads its rows of w and
// all rows of x from shared memory, which takes nearly as long as the products; so tiles are large, and one
// instruction multiplies all rows of x if registers allow. Tiles of the same rows of w follow each other, so
// w comes from memory once, or with thousands of rows of x, which the L2 cache does not hold, once for each
// BAND tiles of these.
//
// Of the last warpgroup a thread brings stages of both sides by the TMA, and a warp scales of rows of x. Its
// registers go to the others.
#pragma once
#include <type_traits>

#include "gemm.cuh"
#include "gemm_tile_layout.cuh"

struct ManyGemms {
    CUtensorMap w[MAX_PARTS], x[MAX_PARTS];
    __half* y[MAX_PARTS];
    const uint8_t* codes[MAX_PARTS];                       // in place of the map of w, if it lies in tiles
    const float *scales[MAX_PARTS], *x_scales[MAX_PARTS];  // of rows of w and of x, if these have them
    int m, n;
    int steps;                    // of TILE_K along k: stages
    int x_tiles, w_tiles, tiles;  // the last: of all GEMMs
    int square;
};

constexpr int BAND = 8;  // tiles of x, among which all rows of w come by before the next ones

// Small GEMMs with as many rows of x and numbers along k, in tiles behind those of ManyGemms.
constexpr int MAX_SMALL = 4;
struct SmallGemms {
    CUtensorMap w[MAX_SMALL], x[MAX_SMALL];
    __half* y[MAX_SMALL];
    int n[MAX_SMALL], activation[MAX_SMALL];
    int tiles[MAX_SMALL + 1];  // of those before; the last: of all
};
struct NoGemms {};

// Parts of K, of which each is a GEMM of its own with steps of ManyGemms, and the first x and w: what is
// added up later, y [parts, m, n] in fp32, is the result.
struct SplitSums {
    float* y;
};

// K in parts of so many steps, whose sums are added up in their order: the sums that gemm_tile.cu has, to the
// bit, where its clusters have a part each.
struct PartsInTurn {
    int each;
};

// A block's sizes. W: how w lies in memory (gemm_tile_layout.cuh).
template <typename W, int GROUPS, int TN>
struct ManyTile {
    // Codes are read by every thread, other rows of w and x for all threads of a warpgroup.
    static constexpr int READERS = W::CODES ? GROUP_THREADS : 1;
    static constexpr int WARPS = GROUPS * 4, THREADS = (GROUPS + 1) * GROUP_THREADS;
    static constexpr int W_BYTES = GROUPS * W::TILE_BYTES, W_ROOM = (W_BYTES + 1023) / 1024 * 1024,
                         STAGE_BYTES = W_ROOM + TN * STRIP_BYTES;
    static constexpr int STORED_ROWS = 16,
                         STORED_BYTES = STORED_ROWS * 16 * 2;  // of x, that a warp stores at once
    // With a few sums a thread there is room for the block of a small kernel before or after it, else
    // registers leave none, and those of the threads that bring go to the others.
    static constexpr bool FULL = GROUPS > 1 && TN > 80;
    static constexpr int MOST = 232448 - (FULL ? 0 : 8192), BARRIERS = 32;
    static constexpr int REST = WARPS * STORED_BYTES + (W::FP8 ? TN * 4 : 0) + BARRIERS * 8;
    static constexpr int STAGES = (MOST - REST) / STAGE_BYTES, SHARED = STAGES * STAGE_BYTES + REST;
    static constexpr int REGISTERS = GROUPS > 3 ? 112 : GROUPS > 2 ? 160 : 240, BRINGING_REGISTERS = 24;
    // Rows of x of an instruction: no more than the registers of the launch have room for.
    static constexpr int AT_ONCE = (GROUPS > 3 && TN > 128) || (GROUPS > 2 && TN > 192) ? TN / 2 : TN;
    // Sixteens along k of which codes are operands together, likewise.
    static constexpr int SIXTEENS = GROUPS > 3 || (GROUPS > 2 && TN > 192) ? 1 : TILE_K / 16;
    static_assert(2 * STAGES + 2 <= BARRIERS);
};

template <int ACTIVATION, int N>
__device__ __forceinline__ void activate_all(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = activate(x[i], ACTIVATION);
}

// What the registers of a warp hold of a tile to a part's sums: `acc` is as wgmma leaves it, `row` of x and
// `column` the first of this lane.
template <int TN>
__device__ __forceinline__ void store_sums(const float (&acc)[TN / 2], float* y, int row, int column, int m,
                                           int n) {
    float* const to = y + size_t(row) * n + column;
#pragma unroll
    for (int chunk = 0; chunk < TN / 8; chunk++) {
        const float* const of = acc + chunk * 4;
        float* const here = to + size_t(chunk * 8) * n;
        if (row + chunk * 8 < m) here[0] = of[0], here[8] = of[2];
        if (row + chunk * 8 + 1 < m) here[n] = of[1], here[n + 8] = of[3];
    }
}

// Small: SmallGemms, if there are some, or SplitSums, or PartsInTurn.
template <typename W, int GROUPS, int TN, typename Small>
__global__ void LAUNCH_BOUNDS((GROUPS + 1) * GROUP_THREADS, 1)
    gemm_many_kernel(const __grid_constant__ ManyGemms p, const __grid_constant__ Small small) {
#if HOPPER
    using namespace hopper;
    constexpr bool SMALL = std::is_same_v<Small, SmallGemms>, SPLIT = std::is_same_v<Small, SplitSums>,
                   IN_TURN = std::is_same_v<Small, PartsInTurn>;
    using Tile = ManyTile<W, GROUPS, TN>;
    constexpr int STAGES = Tile::STAGES;
    extern __shared__ __align__(1024) uint8_t raw[];
    const uint32_t ring = shared_address(raw), stored = ring + STAGES * Tile::STAGE_BYTES,
                   full = stored + Tile::WARPS * Tile::STORED_BYTES, empty = full + STAGES * 8,
                   scales_full = empty + STAGES * 8, scales_empty = scales_full + 8,
                   scales = full + Tile::BARRIERS * 8;
    const int group = threadIdx.x / GROUP_THREADS, warp = threadIdx.x / WARP % 4, lane = threadIdx.x % WARP;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++)
            barrier_init(full + i * 8, 1), barrier_init(empty + i * 8, GROUPS * Tile::READERS);
        barrier_init(scales_full, WARP), barrier_init(scales_empty, GROUPS * GROUP_THREADS);
        barriers_ready();
    }
    __syncthreads();
    struct Place {
        int x0, w0, part;  // of small GEMMs MAX_PARTS more
    };
    // Of all GEMMs, and of the one of a place.
    const auto all_tiles = [&] {
        if constexpr (SMALL) return p.tiles + small.tiles[MAX_SMALL];
        return p.tiles;
    };
    const auto is_small = [](Place at) { return SMALL && at.part >= MAX_PARTS; };
    const auto w_map = [&](Place at) {
        if constexpr (SMALL)
            if (is_small(at)) return &small.w[at.part - MAX_PARTS];
        return &p.w[SPLIT ? 0 : at.part];
    };
    const auto x_map = [&](Place at) {
        if constexpr (SMALL)
            if (is_small(at)) return &small.x[at.part - MAX_PARTS];
        return &p.x[SPLIT ? 0 : at.part];
    };
    const auto results = [&](Place at) {
        if constexpr (SMALL)
            if (is_small(at)) return small.y[at.part - MAX_PARTS];
        return p.y[at.part];
    };
    const auto columns = [&](Place at) {
        if constexpr (SMALL)
            if (is_small(at)) return small.n[at.part - MAX_PARTS];
        return p.n;
    };
    const auto strip_of = [&](Place at, int step) { return SPLIT ? at.part * p.steps + step : step; };
    const auto place = [&](int tile) {
        if constexpr (SMALL)
            if (tile >= p.tiles) {
                int of_small = tile - p.tiles, part = 0;
                while (part < MAX_SMALL - 1 && of_small >= small.tiles[part + 1]) part++;
                of_small -= small.tiles[part];
                return Place{of_small % p.x_tiles * TN, of_small / p.x_tiles * GROUPS * TILE_W_ROWS,
                             MAX_PARTS + part};
            }
        const int part = tile / (p.x_tiles * p.w_tiles), of_part = tile % (p.x_tiles * p.w_tiles),
                  before = of_part / (BAND * p.w_tiles) * BAND, width = min(BAND, p.x_tiles - before),
                  rest = of_part - before * p.w_tiles;
        return Place{(before + rest % width) * TN, rest / width * GROUPS * TILE_W_ROWS, part};
    };

    if (group == GROUPS) {
        if constexpr (Tile::FULL) fewer_registers<Tile::BRINGING_REGISTERS>();
        if (warp == 0 && elect()) {
            const auto load_w = [&](Place at, int step, int stage) {
                const uint32_t to = ring + stage * Tile::STAGE_BYTES, barrier = full + stage * 8;
                arrive_and_expect(barrier, Tile::W_BYTES + TN * STRIP_BYTES);
                if constexpr (W::TILES) {
#pragma unroll
                    for (int g = 0; g < GROUPS; g++) {
                        const int row = min(at.w0 / TILE_W_ROWS + g, p.n / TILE_W_ROWS - 1);
                        load_bytes(to + g * W::TILE_BYTES,
                                   p.codes[at.part] + tile_offset<W>(row, p.steps, step), W::TILE_BYTES,
                                   barrier, READ_ONCE);
                    }
                } else if constexpr (W::CODES) {
#pragma unroll
                    for (int g = 0; g < GROUPS; g++)
                        load_box_of_rows(to + g * W::TILE_BYTES, &p.w[at.part], at.w0 + g * TILE_W_ROWS,
                                         step * TILE_K, barrier, READ_ONCE);
                } else if constexpr (W::TRANSPOSED) {
#pragma unroll
                    for (int g = 0; g < GROUPS; g++)
                        load_box(to + g * TILE_W_ROWS * STRIP_BYTES, w_map(at), strip_of(at, step) * TILE_K,
                                 at.w0 / TILE_W_ROWS + g, barrier, READ_ONCE);
                } else {
                    load_box(to, w_map(at), at.w0, strip_of(at, step), barrier, READ_ONCE);
                }
            };
            const auto load_x = [&](Place at, int step, int stage) {
                load_box(ring + stage * Tile::STAGE_BYTES + Tile::W_ROOM, x_map(at), at.x0,
                         strip_of(at, step), full + stage * 8, READ_AGAIN);
            };
            const Place first = place(blockIdx.x);
            const int ahead = min(STAGES, p.steps);
            for (int i = 0; i < ahead; i++) load_w(first, i, i);
            wait_for_inputs();
            for (int i = 0; i < ahead; i++) load_x(first, i, i);
            int stage = ahead % STAGES, phase = ahead == STAGES ? 0 : 1, begin = ahead;
#pragma unroll 1
            for (int tile = blockIdx.x; tile < all_tiles(); tile += gridDim.x, begin = 0) {
                const Place at = place(tile);
#pragma unroll 1
                for (int i = begin; i < p.steps; i++) {
                    barrier_wait(empty + stage * 8, phase);
                    load_w(at, i, stage), load_x(at, i, stage);
                    if (++stage == STAGES) stage = 0, phase ^= 1;
                }
            }
        } else if (W::FP8 && warp == 1) {
            wait_for_inputs();
            int phase = 1;  // the phase before the first counts as over
#pragma unroll 1
            for (int tile = blockIdx.x; tile < all_tiles(); tile += gridDim.x, phase ^= 1) {
                const Place at = place(tile);
                barrier_wait(scales_empty, phase);
                for (int row = lane; row < TN; row += WARP)
                    store_shared(scales + row * 4,
                                 at.x0 + row < p.m ? p.x_scales[at.part][at.x0 + row] : 0.f);
                arrive(scales_full);
            }
        }
        return;
    }

    if constexpr (Tile::FULL) more_registers<Tile::REGISTERS>();
    const uint32_t own_stored = stored + (group * 4 + warp) * Tile::STORED_BYTES;
    const bool signals = threadIdx.x % GROUP_THREADS == 0;
    int stage = 0, phase = 0, scales_phase = 0;
#pragma unroll 1
    for (int tile = blockIdx.x; tile < all_tiles(); tile += gridDim.x, scales_phase ^= 1) {
        const Place at = place(tile);
        const int column = at.w0 + group * TILE_W_ROWS + warp * 16;  // the first of the warp
        const bool inside = column < columns(at);
        float scale = 1.f, scale_below = 1.f;  // of this thread's two rows of w
        if (W::SCALED && inside) {
            const float* const from = p.scales[at.part] + column + lane / 4;
            scale = from[0], scale_below = from[8];
        }
        float acc[TN / 2];
        clear(acc);
        const auto next = [&] {
            if (++stage == STAGES) stage = 0, phase ^= 1;
        };
        if constexpr (W::CODES) {
            // Products are waited for: other warpgroups multiply while codes become operands.
            const uint32_t bits = W::bits();
#pragma unroll 1
            for (int i = 0; i < p.steps; i++, next()) {
                const uint32_t w = ring + stage * Tile::STAGE_BYTES, b = operand(w + Tile::W_ROOM);
                barrier_wait(full + stage * 8, phase);
#pragma unroll
                for (int first = 0; first < TILE_K / 16; first += Tile::SIXTEENS) {
                    uint32_t a[Tile::SIXTEENS][4];
                    W::template operands<1>(w + group * W::TILE_BYTES, first, i, warp, lane, bits, a);
#pragma unroll
                    for (int k = 0; k < Tile::SIXTEENS; k++) ready(a[k]);
                    wgmma_begin();
#pragma unroll
                    for (int k = 0; k < Tile::SIXTEENS; k++)
#pragma unroll
                        for (int row = 0; row < TN; row += Tile::AT_ONCE)
                            wgmma_of_registers_at_once<Tile::AT_ONCE>(
                                acc + row / 2, a[k], b + (row * STRIP_BYTES + (first + k) * 16 * 2) / 16);
                    wgmma_commit();
                    wgmma_wait<0>();
                }
                // Not before the products, which wait for what was read: an arrival does not.
                arrive(empty + stage * 8);
            }
        } else {
            int before = 0, until = p.steps;
            float sums[IN_TURN ? TN / 2 : 1] = {};  // of the parts that are through
            if constexpr (IN_TURN) until = small.each;
#pragma unroll 1
            for (int i = 0; i < p.steps; i++, next()) {
                if constexpr (IN_TURN)
                    if (i == until) {
                        wgmma_wait<0>();
#pragma unroll
                        for (int j = 0; j < TN / 2; j++) sums[j] += acc[j];
                        clear(acc);
                        until += small.each;
                    }
                const uint32_t w = ring + stage * Tile::STAGE_BYTES, a = operand(w + group * W::TILE_BYTES),
                               b = operand(w + Tile::W_ROOM);
                barrier_wait(full + stage * 8, phase);
                wgmma_begin();
#pragma unroll
                for (int k = 0; k < TILE_K / 16; k++)
#pragma unroll
                    for (int first = 0; first < TN; first += Tile::AT_ONCE)
                        wgmma_at_once<Tile::AT_ONCE, W::FP8, W::TRANSPOSED>(
                            acc + first / 2, a + k * 16 * (W::TRANSPOSED ? TILE_W_ROWS * 2 : 2) / 16,
                            b + (first * STRIP_BYTES + k * 16 * 2) / 16);
                wgmma_commit();
                wgmma_wait<1>();
                if (i > 0 && signals) arrive(empty + before * 8);
                before = stage;
            }
            wgmma_wait<0>();
            if (signals) arrive(empty + before * 8);
            if constexpr (IN_TURN)
#pragma unroll
                for (int j = 0; j < TN / 2; j++) acc[j] = sums[j] + acc[j];
        }

        if constexpr (SPLIT) {
            float* const sums = small.y + size_t(at.part) * p.m * p.n;
            if (inside) store_sums<TN>(acc, sums, at.x0 + lane % 4 * 2, column + lane / 4, p.m, p.n);
            continue;
        }
        if constexpr (SMALL) {
            // Asked once, not for each number.
            const int f = is_small(at) ? small.activation[at.part - MAX_PARTS]
                          : p.square   ? RELU_SQUARE
                                       : IDENTITY;
            if (f == TANH) activate_all<TANH>(acc);
            if (f == SIGMOID) activate_all<SIGMOID>(acc);
            if (f == RELU_SQUARE) activate_all<RELU_SQUARE>(acc);
        }
        if constexpr (W::FP8) barrier_wait(scales_full, scales_phase);
        const int row_of_lane = lane / 2, piece = lane % 2;
        __half* const to = results(at) + size_t(at.x0 + row_of_lane) * columns(at) + column + piece * 8;
        // Of 32 bytes of a row the first 16 and the others, in turn by the fourth row: each bank once.
        const auto place_of = [&](int row, int eight) {
            return own_stored + row * 32 + ((eight ^ row / 4) % 2) * 16;
        };
#pragma unroll
        for (int first = 0; first < TN; first += Tile::STORED_ROWS) {
#pragma unroll
            for (int chunk = 0; chunk < 2; chunk++) {
                const float* const of = acc + (first / 8 + chunk) * 4;
                float4 v = make_float4(of[0], of[1], of[2], of[3]);
                if constexpr (W::FP8) {
                    const float2 of_x = load_shared2(scales + (first + chunk * 8 + lane % 4 * 2) * 4);
                    v.x *= scale * of_x.x, v.y *= scale * of_x.y;
                    v.z *= scale_below * of_x.x, v.w *= scale_below * of_x.y;
                } else if constexpr (W::SCALED) {
                    v.x *= scale, v.y *= scale, v.z *= scale_below, v.w *= scale_below;
                }
                if (!SMALL && p.square)
                    v = make_float4(relu_square(v.x), relu_square(v.y), relu_square(v.z), relu_square(v.w));
                store_transposed(place_of(chunk * 8 + lane % 8, lane / 8), to_half2(v.x, v.y),
                                 to_half2(v.z, v.w));
            }
            sync_warp();
            const float4 eight = load_shared(place_of(row_of_lane, piece));
            if (inside && at.x0 + first + row_of_lane < p.m) store(to + size_t(first) * columns(at), eight);
            sync_warp();
        }
        if constexpr (W::FP8) arrive(scales_empty);
    }
#endif
}
