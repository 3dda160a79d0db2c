// How decode_row_wide.cu divides its work, and what a block has in shared memory.
#pragma once
#include "decode_row_half_lanes.cuh"

namespace wide_row {
using half_row::A0, half_row::GROUP_BIAS, half_row::GROUP_WEIGHT, half_row::HEAD_VECTORS, half_row::K_A,
    half_row::K_K, half_row::R_K, half_row::V0, half_row::W0;
using half_row::ActiveUnit, half_row::AT_ONCE, half_row::half_eights, half_row::quarters;
using half_row::ALL_THREADS, half_row::BRINGING_REGISTERS, half_row::COMPUTING, half_row::COMPUTING_REGISTERS,
    half_row::WARPS;
using half_row::NEARLY;

constexpr int SHARED_BYTES = 227 * 1024;  // of a block, all that there is
constexpr int STAGE_ROWS = 4;             // rows of weights in a stage of the ring
constexpr int MOST_STAGES = 12;
constexpr int UNDER_WAY = 3;  // stages on their way from memory at once; what blocks exchange queues behind
constexpr int KINDS = 2;      // of operands of a block's rows of the first products, at most
constexpr int MOST_RANKS = 832;
// Of a wait, and of one that may begin before the kernel before has ended: what comes later never comes.
constexpr unsigned MOST_SPINS = 1 << 22, MOST_TURNS = 1 << 30;

// Phases of a layer whose weights come through the ring.
enum Phase { IN, OUT, KEYS, PHASES };

// Rows of a phase that a block multiplies.
struct Rows {
    int first, count;
};

// How a model of STEPS * 256 channels is divided. All blocks have rows of all matrices, and the first ones a
// head each, whose low-rank outer sides count as so many rows.
template <int STEPS>
struct Share {
    static constexpr int WIDTH = STEPS * 256, HEADS = WIDTH / HEAD, SLICE = WIDTH / WARPS;
    static constexpr int PAIRS = (SLICE + 2 * WARP - 1) / (2 * WARP);  // of columns, of a lane
    // Between rows are 16 bytes, so that those side by side begin in other banks.
    static constexpr int ROW_BYTES = 2 * WIDTH, PITCH = ROW_BYTES + 16, STAGE_BYTES = STAGE_ROWS * PITCH;
    static constexpr int MOST_ROWS = STEPS * 8 + 16, MOST_OUT = STEPS * 2;  // of a block, of a phase
    int block, blocks, ranks, hidden;
    bool has_head;
    Rows rows[PHASES];
    int kind, kind_begin, of_first;  // of the rows of IN: the first one's kind, where it begins, how many
    Share() = default;
    __host__ __device__ Share(const RowInput& in, int block, int blocks)
        : block(block), blocks(blocks), ranks(ranks_of(in)), hidden(in.slices * ROW_TILE) {
        has_head = block < HEADS;
        const int of_head = HEAD * ranks / WIDTH,
                  each = (3 * WIDTH + ranks + hidden + HEADS * of_head) / blocks;
        const auto weight = [&](int until) {
            return (until < HEADS ? until : HEADS) * (each - of_head) +
                   (until < HEADS ? 0 : until - HEADS) * each;
        };
        const auto weighted = [&](int all) {
            const long long first = (long long)(all)*weight(block) / weight(blocks),
                            end = (long long)(all)*weight(block + 1) / weight(blocks);
            return Rows{int(first), int(end - first)};
        };
        rows[IN] = weighted(3 * WIDTH + ranks), rows[KEYS] = weighted(hidden);
        rows[OUT].first = block * WIDTH / blocks;
        rows[OUT].count = (block + 1) * WIDTH / blocks - rows[OUT].first;
        kind = 0, kind_begin = 0;
        while (rows[IN].first >= kind_begin + rows_of_kind(in, kind)) kind_begin += rows_of_kind(in, kind++);
        const int left = kind_begin + rows_of_kind(in, kind) - rows[IN].first;
        of_first = left < rows[IN].count ? left : rows[IN].count;
    }
    // Kinds of rows of IN: r, k, v, and the inner sides of the low-rank functions in their order.
    __host__ __device__ static int rows_of_kind(const RowInput& in, int kind) {
        return kind < 3 ? WIDTH : in.rank[kind - 3];
    }
    __host__ __device__ static int matrix_of_kind(int kind) {
        return kind < 3 ? ROW_R + kind : ROW_INNER_SIDES + kind - 3;
    }
    __host__ __device__ int next_kind() const { return kind + 1 < 3 + ROW_FUNCTIONS ? kind + 1 : kind; }

    // The outer sides of a head lie in front of the ring, their rows with 16 bytes between them.
    __host__ __device__ static int outer_pitch(const RowInput& in, int function) {
        return 2 * in.rank[function] + 16;
    }
    __host__ __device__ static int outer_at(const RowInput& in, int function) {
        int at = 0;
        for (int f = 0; f < function; f++) at += HEAD * outer_pitch(in, f);
        return at;
    }
};

template <int STEPS>
struct alignas(128) Memory {
    using S = Share<STEPS>;
    static constexpr int OPERAND = S::PAIRS * WARP + 4;  // words from one to the next, in another bank
    // Of each warp what it multiplies weights with; of 64 numbers chunk c of eight has pair q at 8 q + c.
    alignas(16) uint32_t x[WARPS][KINDS][OPERAND];
    float sums[WARPS][S::MOST_ROWS], out_sums[WARPS][S::MOST_OUT];               // over a warp's part of K
    alignas(16) float r[HEAD], decay[HEAD], kk[HEAD], key[HEAD], removal[HEAD];  // by half_eights
    alignas(16) float k[HEAD], v[HEAD], value[HEAD], gate[HEAD], y[HEAD], first_v[HEAD];
    float4 of_head[4];  // sums over 16 channels each: kk . kk, r . k r_k, k . r, b . r
    uint4 state[COMPUTING];
    alignas(16) __half deferred[MAX_LAG][DEFERRED_VECTORS][HEAD];
    alignas(16) __half vectors[2][HEAD_VECTORS][HEAD];
    alignas(16) __half inner[MOST_RANKS];
    alignas(16)
        ActiveUnit active[S::MOST_ROWS + 4];  // in fours, the last one filled up with units of value 0
    int active_counts[WARPS];
    float2 moments[2][WARPS];
    uint32_t zero;
    S my;  // not in registers, of which there are too few
    alignas(16) unsigned long long tables[ROW_TABLES][ROW_POINTERS];
    uint64_t full[MOST_STAGES], empty[MOST_STAGES], outer_full[ROW_FUNCTIONS], outer_empty;

    // Stages of the ring of a block.
    __host__ __device__ static int stages(const RowInput& in, bool has_head) {
        const int room = SHARED_BYTES - int(sizeof(Memory)) - (has_head ? S::outer_at(in, ROW_FUNCTIONS) : 0);
        const int count = room / S::STAGE_BYTES;
        return count < MOST_STAGES ? count : MOST_STAGES;
    }
};

#if HOPPER
using namespace hopper;

// Waits that do not last for ever: what never comes ends the launch with an error.
DEVICE void spun(unsigned& spins, unsigned most = MOST_SPINS) {
    if (++spins == most) __trap();
}

DEVICE bool is_over(uint32_t barrier, unsigned parity) {
    uint32_t is;
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(is)
        : "r"(barrier), "r"(parity)
        : "memory");
    return is != 0;
}

DEVICE void wait_for_phase(uint32_t barrier, unsigned parity) {
    for (unsigned spins = 0; !is_over(barrier, parity);) spun(spins);
}
#endif
}  // namespace wide_row
