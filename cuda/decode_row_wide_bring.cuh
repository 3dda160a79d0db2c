// The warp of decode_row_wide.cu that brings weights.
#pragma once
#include "decode_row_wide.cuh"

#if HOPPER
namespace wide_row {
template <int STEPS>
struct Bringing {
    using S = Share<STEPS>;
    const RowInput& in;
    Memory<STEPS>& own;
    const S& my;
    const uint32_t weights, ring;
    const int stages, lane;

    DEVICE const uint8_t* at(int layer, int matrix, size_t offset) const {
        return reinterpret_cast<const uint8_t*>(own.tables[layer % ROW_TABLES][matrix]) + offset;
    }
    // By comparing: a place that is not known would be an address in local memory.
    DEVICE Rows rows_of(int phase) const {
        return phase == IN ? my.rows[IN] : phase == OUT ? my.rows[OUT] : my.rows[KEYS];
    }
    // Row i of the block in a phase.
    DEVICE const uint8_t* row(int layer, int phase, int i) const {
        int matrix = phase == OUT ? ROW_OUTPUT : ROW_KEY, of_matrix = rows_of(phase).first + i;
        if (phase == IN) {
            const bool first = i < my.of_first;
            matrix = S::matrix_of_kind(first ? my.kind : my.next_kind());
            of_matrix = first ? of_matrix - my.kind_begin : i - my.of_first;
        }
        return at(layer, matrix, size_t(of_matrix) * S::ROW_BYTES);
    }

    // The same for all lanes, and at once: there may be something else to bring.
    static DEVICE bool over(uint32_t barrier, unsigned parity) {
        return warp_any(barrier_over(barrier, parity));
    }

    // Of the outer sides of the block's head what comes next: of which layer, which 32 rows of all functions.
    int outer_layer = 0, outer_piece = 0;
    static constexpr int PIECES = HEAD / WARP;  // of a function
    DEVICE bool outer_left() const { return my.has_head && outer_layer < in.layer_count; }
    // Some of these, if there is room: not all at once, as what blocks exchange queues behind them.
    DEVICE void bring_outer() {
        if (!outer_left()) return;
        if (outer_piece == 0 && outer_layer > 0 &&
            !over(shared_address(&own.outer_empty), (outer_layer - 1) % 2))
            return;
        const int f = outer_piece / PIECES, row = outer_piece % PIECES * WARP + lane, bytes = in.rank[f] * 2;
        const uint32_t barrier = shared_address(&own.outer_full[f]);
        if (outer_piece % PIECES == 0 && lane == 0) arrive_and_expect(barrier, HEAD * bytes);
        sync_warp();
        load_bytes(weights + S::outer_at(in, f) + row * S::outer_pitch(in, f),
                   at(outer_layer, ROW_OUTER_SIDES + f, size_t(my.block * HEAD + row) * bytes), bytes,
                   barrier, READ_ONCE);
        if (++outer_piece == PIECES * ROW_FUNCTIONS) outer_piece = 0, outer_layer++;
    }

    // By a warp: rows of all phases through the ring, through all layers. They wait for nothing that is
    // computed, but for room.
    DEVICE void layers() {
        const int under_way = min(in.head_rows > 0 ? in.head_rows : UNDER_WAY, stages);
        const uint32_t full = shared_address(own.full), empty = shared_address(own.empty);
        int to = 0, behind = 0, ahead = 0;          // ahead: how many stages `to` is before `behind`
        unsigned free_parity = 1, full_parity = 0;  // the phase before the first counts as over
#pragma unroll 1
        for (int layer = 0; layer < in.layer_count; layer++)
#pragma unroll 1
            for (int phase = 0; phase < PHASES; phase++) {
                const int all = rows_of(phase).count;
#pragma unroll 1
                for (int first = 0; first < all; first += STAGE_ROWS) {
                    const int count = min(STAGE_ROWS, all - first);
                    bring_outer();
                    for (unsigned spins = 0; !over(empty + to * 8, free_parity); spun(spins, MOST_TURNS))
                        bring_outer();
                    if (ahead == under_way) {
                        wait_for_phase(full + behind * 8, full_parity);
                        if (++behind == stages) behind = 0, full_parity ^= 1;
                        ahead--;
                    }
                    if (lane == 0) arrive_and_expect(full + to * 8, count * S::ROW_BYTES);
                    sync_warp();
                    if (lane < count)
                        load_bytes(ring + to * S::STAGE_BYTES + lane * S::PITCH,
                                   row(layer, phase, first + lane), S::ROW_BYTES, full + to * 8, READ_ONCE);
                    ahead++;
                    if (++to == stages) to = 0, free_parity ^= 1;
                }
            }
        for (unsigned spins = 0; outer_left(); spun(spins, MOST_TURNS)) bring_outer();
        fetch_ahead();
    }

    // What the next kernel reads first, into the L2 cache.
    DEVICE void fetch_ahead() const {
        constexpr size_t PIECE = 2048;
        for (size_t at = (size_t(my.block) * WARP + lane) * PIECE; at < in.ahead_bytes;
             at += size_t(my.blocks) * WARP * PIECE)
            prefetch_l2(static_cast<const uint8_t*>(in.ahead) + at,
                        unsigned(min(PIECE, in.ahead_bytes - at)));
    }
};
}  // namespace wide_row
#endif
