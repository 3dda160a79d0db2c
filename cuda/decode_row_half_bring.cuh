// The warps of decode_row_half.cu that bring weights.
#pragma once
#include "decode_row_half.cuh"

#if HOPPER
namespace half_row {
// A part is asked for when that of the layer before has been read. Little is on its way at once: what blocks
// send each other would be queued behind it, in the L2 cache as in a multiprocessor.
template <int STEPS>
struct Bringing {
    const RowInput& in;
    Memory& own;
    const Share<STEPS>& my;
    const uint32_t weights;
    const int lane;

    DEVICE const uint8_t* at(int layer, int matrix, size_t offset) const {
        return reinterpret_cast<const uint8_t*>(own.tables[layer % ROW_TABLES][matrix]) + offset;
    }
    DEVICE void wait_for_room(int part, int layer) const {
        if (layer >= 0) barrier_wait(shared_address(&own.empty[part]), layer % 2);
    }

    // The barrier of the chunk under way, and in its lowest bit the phase it is for.
    uint32_t last = 0;
    DEVICE void begin(int part, int chunk, int layer, int bytes) {
        const uint32_t barrier = shared_address(&own.full[part][chunk]);
        if (last) barrier_wait(last & ~1u, last & 1);
        last = barrier | layer % 2;
        if (lane == 0) arrive_and_expect(barrier, bytes);
        sync_warp();
    }

    // By a warp: wide rows.
    DEVICE void wide() {
        using S = Share<STEPS>;
        const auto rows = [&](uint32_t to, const uint8_t* from, int count, uint32_t barrier) {
            for (int i = lane; i < count; i += WARP)
                load_bytes(to + i * S::PITCH, from + size_t(i) * S::ROW_BYTES, S::ROW_BYTES, barrier,
                           READ_ONCE);
        };
#pragma unroll 1
        for (int layer = 0; layer < in.layer_count; layer++) {
            wait_for_room(PART_IN, layer - 1);
            uint32_t to = weights + S::IN_AT;
#pragma unroll 1
            for (int chunk = 0; chunk < CHUNKS; chunk++) {
                const uint32_t barrier = shared_address(&own.full[PART_IN][chunk]);
                const int count = chunk < 3 ? OWN_CHANNELS : my.rows;
                begin(PART_IN, chunk, layer, count * S::ROW_BYTES);
                if (chunk < 3) {
                    rows(to, at(layer, ROW_R + chunk, size_t(my.block) * OWN_CHANNELS * S::ROW_BYTES), count,
                         barrier);
                } else {
                    rows(to,
                         at(layer, ROW_INNER_SIDES + my.function,
                            size_t(my.row - my.first_row) * S::ROW_BYTES),
                         my.of_first, barrier);
                    rows(to + my.of_first * S::PITCH, at(layer, ROW_INNER_SIDES + my.next_function, 0),
                         my.rows - my.of_first, barrier);
                }
                to += OWN_CHANNELS * S::PITCH;
            }
            wait_for_room(PART_KEY, layer - 1);
            constexpr int COUNT = UNITS / CHUNKS;
            const uint8_t* from = at(layer, ROW_KEY, size_t(my.block) * UNITS * S::ROW_BYTES);
            to = weights + S::KEY_AT;
#pragma unroll 1
            for (int chunk = 0; chunk < CHUNKS; chunk++) {
                begin(PART_KEY, chunk, layer, COUNT * S::ROW_BYTES);
                rows(to, from, COUNT, shared_address(&own.full[PART_KEY][chunk]));
                to += COUNT * S::PITCH, from += COUNT * S::ROW_BYTES;
            }
        }
        fetch_ahead();
    }

    // What the next kernel reads first, into the L2 cache.
    DEVICE void fetch_ahead() const {
        constexpr size_t PIECE = 2048;
        for (size_t at = (size_t(my.block) * WARP + lane) * PIECE; at < in.ahead_bytes;
             at += size_t(Share<STEPS>::BLOCKS) * WARP * PIECE)
            prefetch_l2(static_cast<const uint8_t*>(in.ahead) + at,
                        unsigned(min(PIECE, in.ahead_bytes - at)));
    }

    // By COPYING threads: narrow rows, which are the block's columns of output and the outer low-rank sides.
    DEVICE void narrow(int thread) const {
        using S = Share<STEPS>;
        int copies = 0;
        const auto rows = [&](uint32_t to, const uint8_t* from, int pitch, int count, int bytes) {
            const int pieces = bytes / 16, down = COPYING / pieces, along = COPYING % pieces;
            int row = thread / pieces, piece = thread % pieces;
#pragma unroll 1
            while (row < count) {
                copy_async(to + row * bytes + turned(piece, row, pieces) * 16,
                           from + size_t(row) * pitch + piece * 16);
                if (++copies % 4 == 0) {
                    commit_copies();
                    wait_copies<1>();
                }
                row += down, piece += along;
                if (piece >= pieces) piece -= pieces, row++;
            }
        };
#pragma unroll 1
        for (int layer = -1; layer + 1 < in.layer_count; layer++) {
            const int next = layer + 1;
#pragma unroll 1
            for (int i = 0; i <= ROW_FUNCTIONS; i++) {
                uint32_t to = weights;
                if (i == 0) wait_for_room(PART_OUT, layer);
                if (i == 1) wait_for_room(PART_OUTER, layer);
                if (i > 0) to += my.outer_at();
                for (int f = 0; f + 1 < i; f++) to += HEAD * in.rank[f] * 2;
                const int bytes = i ? in.rank[i - 1] * 2 : HEAD * 2;
                const uint8_t* const from =
                    i ? at(next, ROW_OUTER_SIDES + i - 1, size_t(my.head) * HEAD * bytes)
                      : at(next, ROW_OUTPUT, size_t(my.part) * S::OUTPUTS * S::ROW_BYTES + my.head * bytes);
                rows(to, from, i ? bytes : S::ROW_BYTES, i ? HEAD : S::OUTPUTS, bytes);
                if (i == 0) mbarrier::arrive_with_copies(shared_address(&own.full[PART_OUT][0]));
            }
            mbarrier::arrive_with_copies(shared_address(&own.full[PART_OUTER][0]));
        }
        wait_copies<0>();
    }
};
}  // namespace half_row
#endif
