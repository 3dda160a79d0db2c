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

    // The barriers of the two chunks under way, and in their lowest bits the phases they are for.
    uint32_t last = 0, before_last = 0;
    DEVICE void begin(int part, int chunk, int layer, int bytes) {
        const uint32_t barrier = shared_address(&own.full[part][chunk]);
        if (before_last) barrier_wait(before_last & ~1u, before_last & 1);
        before_last = last, last = barrier | layer % 2;
        if (lane == 0) arrive_and_expect(barrier, bytes);
        sync_warp();
    }

    // By a warp: wide rows.
    DEVICE void wide() {
        using S = Share<STEPS>;
        const auto rows = [&](uint32_t to, int pitch, const uint8_t* from, int count, int bytes,
                              uint32_t barrier) {
            for (int i = lane; i < count; i += WARP)
                load_bytes(to + i * pitch, from + size_t(i) * S::ROW_BYTES, bytes, barrier, READ_ONCE);
        };
        const auto key = [&](int part, int layer) {
            constexpr int HALF = UNITS / 4;
            const uint8_t* from =
                at(layer, ROW_KEY,
                   (size_t(my.block) * UNITS + (part == PART_LATE_KEY ? UNITS / 2 : 0)) * S::ROW_BYTES);
            uint32_t to = weights + (part == PART_LATE_KEY ? my.outer_at() : S::KEY_AT);
#pragma unroll 1
            for (int chunk = 0; chunk < 2; chunk++) {
                begin(part, chunk, layer, HALF * S::ROW_BYTES);
                rows(to, S::PITCH, from, HALF, S::ROW_BYTES, shared_address(&own.full[part][chunk]));
                to += HALF * S::PITCH, from += HALF * S::ROW_BYTES;
            }
        };
#pragma unroll 1
        for (int layer = -1; layer < in.layer_count; layer++) {
            const int next = layer + 1;
            const bool more = next < in.layer_count;
            if (more) {
                wait_for_room(PART_IN, layer);
                uint32_t to = weights + S::IN_AT;
#pragma unroll 1
                for (int chunk = 0; chunk < 4; chunk++) {
                    const uint32_t barrier = shared_address(&own.full[PART_IN][chunk]);
                    const int count = chunk < 3 ? OWN_CHANNELS : my.rows;
                    begin(PART_IN, chunk, next, count * S::ROW_BYTES);
                    if (chunk < 3) {
                        rows(to, S::PITCH,
                             at(next, ROW_R + chunk, size_t(my.block) * OWN_CHANNELS * S::ROW_BYTES), count,
                             S::ROW_BYTES, barrier);
                    } else {
                        rows(to, S::PITCH,
                             at(next, ROW_INNER_SIDES + my.function,
                                size_t(my.row - my.first_row) * S::ROW_BYTES),
                             my.of_first, S::ROW_BYTES, barrier);
                        rows(to + my.of_first * S::PITCH, S::PITCH,
                             at(next, ROW_INNER_SIDES + my.next_function, 0), my.rows - my.of_first,
                             S::ROW_BYTES, barrier);
                    }
                    to += OWN_CHANNELS * S::PITCH;
                }
            }
            if (layer >= 0) {
                wait_for_room(PART_OUTER, layer);
                key(PART_LATE_KEY, layer);
            }
            if (!more) continue;
            wait_for_room(PART_KEY, layer);
            key(PART_KEY, next);
            wait_for_room(PART_VALUE, layer);
            const uint8_t* from =
                at(next, ROW_VALUE, size_t(my.pair) * 2 * UNITS * S::ROW_BYTES + my.rank * S::VALUE_BYTES);
            uint32_t to = weights + S::VALUE_AT;
#pragma unroll 1
            for (int chunk = 0; chunk < 4; chunk++) {
                begin(PART_VALUE, chunk, next, UNITS / 2 * S::VALUE_BYTES);
                rows(to, S::VALUE_PITCH, from, UNITS / 2, S::VALUE_BYTES,
                     shared_address(&own.full[PART_VALUE][chunk]));
                to += UNITS / 2 * S::VALUE_PITCH, from += UNITS / 2 * S::ROW_BYTES;
            }
        }
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
                if (i == 1) wait_for_room(PART_LATE_KEY, layer);
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
