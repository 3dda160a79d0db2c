// What decode_row.cu is made of: how work is divided, shared memory, and the warps that bring weights.
#pragma once
#include "decode_row_input.cuh"
#include "gemm.cuh"
#include "hopper.cuh"
#include "wkv_half.cuh"

constexpr int ROW_WARPS = 16;  // that compute; ROW_BRINGING more bring weights
constexpr int ROW_BRINGING = 4, ROW_COMPUTING = ROW_WARPS * WARP,
              ROW_THREADS = ROW_COMPUTING + ROW_BRINGING * WARP;
// Registers of a thread; what warpgroups have together is what they begin with, 96 each.
constexpr int ROW_BRINGING_REGISTERS = 32, ROW_COMPUTING_REGISTERS = 112;
constexpr int ROW_TILE = 64;               // outputs and inputs of a tile of weights
constexpr int ROW_WARP_TILES = 4;          // of a warp along K, at most
constexpr int ROW_SLICES = 2;              // of 64 hidden units of a block, at most
constexpr int ROW_STAGES = 5;              // of a warp's ring
constexpr int ROW_INNER_AT_ONCE = 4;       // outputs of inner sides in a stage
constexpr int ROW_RANKS = 1024;            // in all, at most
constexpr int ROW_ITEMS = ROW_INNER + 34;  // copies of a warp in a layer, at most
constexpr int ROW_STAGE_BYTES = 2304;
constexpr int ROW_TABLES = 3;  // of pointers, at once

__host__ __device__ inline int ranks_of(const RowInput& in) {
    int sum = 0;
    for (int f = 0; f < ROW_FUNCTIONS; f++) sum += in.rank[f];
    return sum;
}

// Which of the six mixes a function reads.
__device__ inline int mix_of(int function) { return function == ROW_V ? 2 : 3 + function; }

// What a block does. Pairs of blocks are clusters. Pair p has head p, if there are so many, and some slices
// of 64 hidden units, of which each block has a half; of what they add to the stream, each has a half.
struct RowShare {
    int rank, pair, pairs;
    bool has_head;
    int slice, own, other;                  // the first of its own; how many; how many the other block has
    int other_slice;                        // the first of those
    int row, rows;                          // outputs of inner sides
    int function, next_function, of_first;  // whose they are, at most two; how many the first has
    int tile, tiles;                        // of a warp along K
    int strip_first, strips;                // of 64 outputs of a warp: every ROW_WARPS-th from there on
    __device__ RowShare(const RowInput& in, int block, int blocks, int warp) {
        rank = block % 2, pair = block / 2, pairs = blocks / 2;
        has_head = pair < in.heads;
        const int begin = pair * in.slices / pairs, end = (pair + 1) * in.slices / pairs,
                  middle = begin + (end - begin + 1) / 2;
        slice = rank ? middle : begin, own = rank ? end - middle : middle - begin;
        other_slice = rank ? begin : middle, other = end - begin - own;
        const int of_heads = 2 * in.heads;
        if (has_head) {
            row = block * in.head_rows, rows = in.head_rows;
        } else {
            const int first = of_heads * in.head_rows, all = ranks_of(in) - first,
                      sharing = blocks - of_heads, i = block - of_heads;
            row = first + i * all / sharing, rows = first + (i + 1) * all / sharing - row;
        }
        function = 0;
        int end_of_first = in.rank[0];
        while (function < ROW_FUNCTIONS - 1 && row >= end_of_first) end_of_first += in.rank[++function];
        next_function = min(function + 1, ROW_FUNCTIONS - 1), of_first = end_of_first - row;
        const int each = (in.heads + ROW_WARPS - 1) / ROW_WARPS;
        tile = min(warp * each, in.heads), tiles = min(each, in.heads - tile);
        const int half = in.heads / 2;
        strip_first = rank * half + warp;
        strips = warp < half ? (half - warp + ROW_WARPS - 1) / ROW_WARPS : 0;
    }
    // Half of the pairs in another order, so that fewer add to the same words at a time.
    __device__ int strip(int i) const { return strip_first + (pair & 1 ? strips - 1 - i : i) * ROW_WARPS; }
    // Tiles along K, by bits: all of a warp; those of a product that two blocks share.
    __device__ unsigned all_tiles() const { return (1u << tiles) - 1; }
    __device__ unsigned shared_tiles() const { return all_tiles() & ((tile + rank) % 2 ? 0xau : 0x5u); }
    // Slice j of the pair, own ones first.
    __device__ int slice_of_pair(int j) const { return j < own ? slice + j : other_slice + j - own; }
};

// A copy of a warp: from which matrix, whether it is the last of its stage, bytes, offset.
struct RowItem {
    uint32_t what, offset;
    static __device__ RowItem of(int matrix, uint32_t offset, int bytes, bool last) {
        return {uint32_t(matrix | last << 7 | bytes << 8), offset};
    }
    __device__ int matrix() const { return what & 0x7f; }
    __device__ bool last() const { return what >> 7 & 1; }
    __device__ int bytes() const { return what >> 8; }
};

// 64 hidden units: an operand, and which of its 16 runs of four numbers are not zero.
struct alignas(16) HiddenUnits {
    uint32_t digits[WARP];
    uint8_t runs[16];
    float unit, sum;
    int count;  // of these runs
    int unused;
};
constexpr int HIDDEN_BYTES = sizeof(HiddenUnits);

static_assert(ROW_FUNCTIONS == 4);  // a float4 has a number of each
struct alignas(128) RowShared {
    uint8_t rings[ROW_WARPS][ROW_STAGES][ROW_STAGE_BYTES];
    // Of each warp, the numbers along K that it multiplies, as operands; in place of these, also its sums of
    // outputs.
    uint32_t x[ROW_WARPS][2][ROW_WARP_TILES * WARP];
    uint4 state[Half::VECTORS * THREADS];
    Half::Token token;
    alignas(16) float y_of[HEAD];
    alignas(16) __half head_vectors[8][HEAD];
    alignas(16) __half deferred[MAX_LAG][DEFERRED_VECTORS][HEAD];
    alignas(16) float rkv[4][HEAD];  // r, two parts of k, v
    float4 outer[HEAD];              // results of the low-rank functions
    alignas(16) __half inner[ROW_RANKS];
    alignas(16) uint32_t y[WARP];  // an operand, as x
    // Of each operand the unit of its integers, and the sum of its numbers.
    float2 x_info[ROW_WARPS][2][ROW_WARP_TILES], y_info[ROW_WARP_TILES];
    HiddenUnits hidden[2 * ROW_SLICES];  // own ones, those of the other block
    alignas(16) uint32_t zeros[4];
    float2 moments[2][ROW_WARPS];
    uint32_t first_v[WARP];
    // Pointers of this layer, the next and that after it: whoever brings weights is ahead.
    unsigned long long tables[ROW_TABLES][ROW_POINTERS];
    int known_layers;  // whose pointers have been there
    RowItem items[ROW_WARPS][ROW_ITEMS];
    int item_count[ROW_WARPS];
    uint64_t full[ROW_WARPS][ROW_STAGES], empty[ROW_WARPS][ROW_STAGES], pair_full, hidden_full;
};
constexpr int ROW_SUMS = 2 * ROW_TILE;
static_assert(sizeof(RowShared) <= 227 * 1024);
static_assert(ROW_SUMS <= ROW_WARP_TILES * WARP);

#if HOPPER
namespace hopper {
template <int REGISTERS>
DEVICE void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
DEVICE void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

DEVICE bool barrier_over(uint32_t barrier, unsigned parity) {
    uint32_t is;
    asm volatile(
        "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(is)
        : "r"(barrier), "r"(parity)
        : "memory");
    return is != 0;
}

DEVICE void expect(uint32_t barrier, unsigned bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

DEVICE void send_word(unsigned rank, const void* place, const uint64_t* barrier, uint32_t x) {
    asm volatile(SEND("b32", "%3")::"r"(shared_address(place)), "r"(shared_address(barrier)), "r"(rank),
                 "r"(x)
                 : "memory");
}
}  // namespace hopper

// All copies of a warp in a layer, in the order in which it needs them. TILE_BYTES: of a tile of 64 outputs
// and 64 inputs; SCALES: of them what comes before the scales.
template <int TILE_BYTES, int SCALES>
__device__ int plan_row(const RowInput& in, const RowShare& my, int warp, RowItem* items) {
    int count = 0;
    const int width = in.heads * HEAD;
    const auto add = [&](int matrix, uint32_t offset, int bytes, bool last = true) {
        items[count++] = RowItem::of(matrix, offset, bytes, last);
    };
    const auto add_tiles = [&](int matrix, int strip, int all, int first, unsigned which) {
        for (int i = 0; i < ROW_WARP_TILES; i++)
            if (which >> i & 1) add(matrix, uint32_t(strip * all + first + i) * TILE_BYTES, TILE_BYTES);
    };
    for (int i = 0; i < my.rows && my.tiles; i++) {
        int row = my.row + i, f = 0;
        for (; row >= in.rank[f]; f++) row -= in.rank[f];
        add(ROW_INNER_SIDES + f, uint32_t(row * width + my.tile * ROW_TILE) * 2, my.tiles * ROW_TILE * 2,
            i % ROW_INNER_AT_ONCE == ROW_INNER_AT_ONCE - 1 || i == my.rows - 1);
    }
    if (my.has_head) {
        add_tiles(my.rank ? ROW_VALUES : ROW_R, my.pair, in.heads, my.tile, my.all_tiles());
        add_tiles(ROW_K, my.pair, in.heads, my.tile, my.shared_tiles());
        const int column = my.pair * HEAD + my.rank * (HEAD / 2) + 2 * warp;
        const auto add_outer = [&](int f, bool last) {
            add(ROW_OUTER_SIDES + f, uint32_t(column * in.rank[f]) * 2, in.rank[f] * 4, last);
        };
        add_outer(ROW_W, false), add_outer(ROW_A, false), add_outer(ROW_V, true), add_outer(ROW_G, true);
        for (int i = 0; i < my.strips; i++) add_tiles(ROW_OUTPUT, my.strip(i), in.heads, my.pair, 1);
    }
    for (int i = 0; i < my.own; i++) add_tiles(ROW_KEY, my.slice + i, in.heads, my.tile, my.all_tiles());
    for (int i = 0; i < my.strips; i++) {
        const int strip = my.strip(i);
        // Scales of all tiles of a strip are one stage; codes are read once it is known which.
        const int all = my.own + my.other;
        for (int j = 0; j < all; j++)
            add(ROW_VALUE, uint32_t(strip * in.slices + my.slice_of_pair(j)) * TILE_BYTES + SCALES,
                TILE_BYTES - SCALES, j == all - 1);
    }
    return count;
}

// Four lanes of each of four warps bring the weights of a computing warp each, through all layers. They wait
// for nothing that is computed, but for room in the rings. No more than one stage of a ring is under way at
// once, since what blocks send each other waits behind them; where there is no room, it comes as far as the
// L2 cache.
__device__ __forceinline__ void bring_weights(const RowInput& in, RowShared& own, int warp, int lane) {
    using namespace hopper;
    constexpr int RINGS = ROW_WARPS / ROW_BRINGING;
    const int ring = warp * RINGS + lane % RINGS, count = own.item_count[ring];
    const uint32_t stages = shared_address(own.rings[ring]), full = shared_address(own.full[ring]),
                   empty = shared_address(own.empty[ring]);
    const RowItem* const items = own.items[ring];
    bool more = lane < RINGS && count > 0 && in.layer_count > 0, under_way = false, fetched = false;
    int layer = 0, item = 0, to = 0, seen = 0;
    unsigned free_parity = 1, full_parity = 0;  // the phase before the first counts as over
    while (warp_any(more)) {
        if (under_way && barrier_over(full + seen * 8, full_parity)) {
            under_way = false;
            if (++seen == ROW_STAGES) seen = 0, full_parity ^= 1;
        }
        const int known = *reinterpret_cast<const volatile int*>(&own.known_layers);
        if (!more || under_way || layer >= known) continue;
        const bool room = barrier_over(empty + to * 8, free_parity);
        if (!room && fetched) continue;
        const unsigned long long* const table = own.tables[layer % ROW_TABLES];
        const uint32_t barrier = full + to * 8;
        uint32_t place = stages + to * ROW_STAGE_BYTES;
        RowItem now;
        int next = item;
        do {
            now = items[next++];
            const uint8_t* const from = reinterpret_cast<const uint8_t*>(table[now.matrix()]) + now.offset;
            if (room) {
                if (now.last())
                    arrive_and_expect(barrier, now.bytes());
                else
                    expect(barrier, now.bytes());
                load_bytes(place, from, now.bytes(), barrier, READ_ONCE);
                place += now.bytes();
            } else {
                prefetch_l2(from, now.bytes());
            }
        } while (!now.last());
        fetched = !room, under_way = room;
        if (!room) continue;
        item = next;
        if (++to == ROW_STAGES) to = 0, free_parity ^= 1;
        if (item == count) item = 0, more = ++layer < in.layer_count;
    }
}
#endif
