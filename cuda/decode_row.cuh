// What decode_row.cu is made of: shared memory, and the warps that bring weights.
#pragma once
#include "decode_row_formats.cuh"

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
    alignas(16) uint8_t hidden[2 * ROW_SLICES][ROW_HIDDEN_BYTES];  // own ones, those of the other block
    alignas(16) uint32_t zeros[4];
    float2 moments[2][ROW_WARPS];
    uint32_t first_v[WARP];
    // Pointers of this layer, the next and that after it: whoever brings weights is ahead.
    unsigned long long tables[ROW_TABLES][ROW_POINTERS];
    int known_layers;  // whose pointers have been there
    RowItem items[ROW_WARPS][ROW_ITEMS];
    int item_count[ROW_WARPS];
    uint64_t full[ROW_WARPS][ROW_STAGES], empty[ROW_WARPS][ROW_STAGES], pair_full, hidden_full;

    // 64 hidden units in the form of a format.
    template <typename Format>
    __device__ typename Format::Hidden& hidden_units(int slice) {
        return *reinterpret_cast<typename Format::Hidden*>(hidden[slice]);
    }
};
constexpr int ROW_SUMS = 2 * ROW_TILE;
static_assert(sizeof(RowShared) <= 227 * 1024);
static_assert(ROW_SUMS <= ROW_WARP_TILES * WARP);

#if HOPPER
namespace hopper {
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
}  // namespace hopper

// All copies of a warp in a layer, in the order in which it needs them.
template <typename Format>
__device__ int plan_row(const RowInput& in, const RowShare& my, int warp, RowItem* items) {
    int count = 0;
    const int width = in.heads * HEAD;
    const auto add = [&](int matrix, uint32_t offset, int bytes, bool last) {
        items[count++] = RowItem::of(matrix, offset, bytes, last);
    };
    for (int i = 0; i < my.rows && my.tiles; i++) {
        int row = my.row + i, f = 0;
        for (; row >= in.rank[f]; f++) row -= in.rank[f];
        add(ROW_INNER_SIDES + f, uint32_t(row * width + my.tile * ROW_TILE) * 2, my.tiles * ROW_TILE * 2,
            i % ROW_INNER_AT_ONCE == ROW_INNER_AT_ONCE - 1 || i == my.rows - 1);
    }
    if (my.has_head) {
        Format::add_tiles(add, my.rank ? ROW_VALUES : ROW_R, my.pair, in.heads, my.tile, my.all_tiles());
        Format::add_tiles(add, ROW_K, my.pair, in.heads, my.tile, my.shared_tiles());
        const int column = my.pair * HEAD + my.rank * (HEAD / 2) + 2 * warp;
        const auto add_outer = [&](int f, bool last) {
            add(ROW_OUTER_SIDES + f, uint32_t(column * in.rank[f]) * 2, in.rank[f] * 4, last);
        };
        add_outer(ROW_W, false), add_outer(ROW_A, false), add_outer(ROW_V, true), add_outer(ROW_G, true);
        for (int i = 0; i < my.strips; i++)
            Format::add_tiles(add, ROW_OUTPUT, my.strip(i), in.heads, my.pair, 1);
    }
    for (int i = 0; i < my.own; i++)
        Format::add_tiles(add, ROW_KEY, my.slice + i, in.heads, my.tile, my.all_tiles());
    for (int i = 0; i < my.strips; i++) Format::add_value(add, my, my.strip(i), in.slices);
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
