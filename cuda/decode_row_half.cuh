// How decode_row_half.cu divides its work, and what a block has in shared memory.
#pragma once
#include "decode_row_share.cuh"

namespace half_row {
constexpr int WARPS = 16, BRINGING = 4;  // that compute; that bring weights
constexpr int COMPUTING = WARPS * WARP, ALL_THREADS = COMPUTING + BRINGING * WARP;
constexpr int COPYING = (BRINGING - 1) * WARP;    // threads that bring what lies in narrow rows
constexpr int HEAD_BLOCKS = 8;                    // blocks that share a head
constexpr int OWN_CHANNELS = HEAD / HEAD_BLOCKS;  // of r, k and v of a block
constexpr int UNITS = 32;                         // hidden units of a block
constexpr int MOST_STEPS = 4;                     // of 16 numbers along K that a warp multiplies
constexpr int INNER_ROWS = 8;                     // outputs of inner low-rank sides of a block, at most
constexpr int MOST_RANKS = 512;                   // of the four functions together
constexpr int OPERANDS = 5;  // of the time mix's first products: r, k, v and two low-rank functions
constexpr int OPERAND = 36;  // words from one of them to the next: not a multiple of the banks
constexpr int NEARLY = 4;    // adds that are missing when all warps begin to ask
constexpr int AT_ONCE = 16;  // rows of value under way for a lane, asked for in fours
// Of a thread: what a block has is divided anew, as computing warps must not spill. Little of the L1 cache is
// left beside the shared memory, and an exchange waits for the slowest of all warps.
constexpr int COMPUTING_REGISTERS = 112, BRINGING_REGISTERS = 32;
static_assert(COMPUTING * COMPUTING_REGISTERS + BRINGING * WARP * BRINGING_REGISTERS <=
              65536 / ALL_THREADS / 8 * 8 * ALL_THREADS);

// From ROW_HEAD_VECTORS on.
enum HeadVector { W0, A0, V0, K_K, K_A, R_K, GROUP_WEIGHT, GROUP_BIAS, HEAD_VECTORS };

// The weights of a layer that a block has in shared memory. The TMA brings wide rows in CHUNKS chunks, each
// with a barrier of its own.
enum Part { PART_OUT, PART_KEY, PART_IN, PART_OUTER, PARTS };
constexpr int CHUNKS = 4;

// How a model of STEPS * 256 channels is divided, and where a block's weights lie in shared memory. Wide rows
// have 16 bytes between them, so that those side by side begin in other banks; in narrow ones the pieces of
// 16 bytes are in another order in each row of eight.
template <int STEPS>
struct Share {
    static constexpr int WIDTH = STEPS * 256, HEADS = WIDTH / HEAD, BLOCKS = HEADS * HEAD_BLOCKS;
    static constexpr int ROW_BYTES = 2 * WIDTH, PITCH = ROW_BYTES + 16;
    static constexpr int OUTPUTS = WIDTH / HEAD_BLOCKS;  // that a head's part adds to
    static constexpr int OUT_AT = 0, KEY_AT = OUT_AT + OUTPUTS * HEAD * 2, IN_AT = KEY_AT + UNITS * PITCH;
    int block, head, part;  // part: of the head
    int ranks;
    int row, rows, first_row;               // outputs of inner sides; the first of the first's function
    int function, next_function, of_first;  // whose they are, at most two; how many the first has
    __host__ __device__ Share(const RowInput& in, int block)
        : block(block), head(block / HEAD_BLOCKS), part(block % HEAD_BLOCKS), ranks(ranks_of(in)) {
        row = block * ranks / BLOCKS, rows = (block + 1) * ranks / BLOCKS - row;
        function = 0;
        int end = in.rank[0];
        while (function < ROW_FUNCTIONS - 1 && row >= end) end += in.rank[++function];
        first_row = end - in.rank[function], of_first = end - row < rows ? end - row : rows;
        next_function = function < ROW_FUNCTIONS - 1 ? function + 1 : function;
    }
    __host__ __device__ int outer_at() const {
        return IN_AT + (3 * OWN_CHANNELS + (ranks + BLOCKS - 1) / BLOCKS) * PITCH;
    }
    __host__ __device__ int bytes() const { return outer_at() + HEAD * ranks * 2; }
};

// A hidden unit that is not zero, and how far its row of value is from the first one of the block, in bytes.
struct ActiveUnit {
    float value;
    int offset;
};

// What a thread does the same in all layers, in shared memory until it is needed.
struct alignas(16) Places {
    // What it waits for of what blocks publish (negative: nothing), where it goes, and as what.
    int published_at;
    uint32_t published_to : 24, kind : 8;
    // Of its warp's outer side the lane's row, steps along K, operand.
    uint32_t outer_row : 24, outer_turn : 8;
    uint32_t outer_x : 24, outer_steps : 8;
};

// Where channel c of a head lies in the vectors that the recurrence reads in eights: of all eights the first
// halves, then the second ones, so that lanes side by side read from other banks.
__host__ __device__ constexpr int half_eights(int c) { return c / 8 * 4 + c % 4 + c % 8 / 4 * (HEAD / 2); }

// Where result i of the inner sides lies, so that a lane reads what it multiplies in two steps at once: of 32
// results, which are 16 words, each fourth word.
__host__ __device__ constexpr int quarters(int i) {
    return i / 32 * 32 + i % 8 / 2 * 8 + i % 32 / 8 * 2 + i % 2;
}

struct alignas(128) Memory {
    // Of each warp what it multiplies weights with; in it chunk c of eight numbers has pair q at 8 q + c.
    uint32_t x[WARPS][OPERANDS][OPERAND];
    float sums[WARPS][WARP];  // of outputs, over a warp's part of K
    alignas(16) float r[HEAD], decay[HEAD], kk[HEAD], key[HEAD], removal[HEAD];  // by half_eights
    alignas(16) float k[HEAD], v[HEAD], value[HEAD], gate[HEAD], y[HEAD], first_v[HEAD];
    float4 of_head[4];  // sums over 16 channels each: kk . kk, r . k r_k, k . r, b . r
    // What a layer reads besides its matrices, on its way from the layer before: of the state eight keys of a
    // row for each thread, what is deferred, and vectors of the head, those of two layers in turn.
    uint4 state[COMPUTING], next_state[COMPUTING / HEAD_BLOCKS];
    alignas(16) __half deferred[MAX_LAG][DEFERRED_VECTORS][HEAD];
    alignas(16) __half vectors[2][HEAD_VECTORS][HEAD];
    Places places[COMPUTING];
    alignas(16) __half inner[MOST_RANKS];
    alignas(16) ActiveUnit active[UNITS];  // in fours, the last one filled up with units of value 0
    int active_count;
    float2 moments[2][WARPS];
    alignas(16) unsigned long long tables[ROW_TABLES][ROW_POINTERS];
    uint64_t full[PARTS][CHUNKS], empty[PARTS];
};

#if HOPPER
using namespace hopper;

// Where a piece of 16 bytes of a narrow row lies in it. Rows have a multiple of four pieces.
DEVICE int turned(int piece, int row, int pieces) { return piece ^ (row & (pieces % 8 ? 3 : 7)); }
#endif
}  // namespace half_row
