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
constexpr int NEARLY = 4;    // adds that are missing when all lanes begin to ask
constexpr int AT_ONCE = 16;  // rows of value under way for a lane

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
    int pair, rank;         // of two blocks that share hidden units
    int ranks;
    int row, rows, first_row;               // outputs of inner sides; the first of the first's function
    int function, next_function, of_first;  // whose they are, at most two; how many the first has
    __host__ __device__ Share(const RowInput& in, int block)
        : block(block),
          head(block / HEAD_BLOCKS),
          part(block % HEAD_BLOCKS),
          pair(block / 2),
          rank(block % 2),
          ranks(ranks_of(in)) {
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

struct alignas(128) Memory {
    // Of each warp what it multiplies weights with; in it chunk c of eight numbers has pair q at 8 q + c.
    uint32_t x[WARPS][OPERANDS][OPERAND];
    float sums[WARPS][WARP];  // of outputs, over a warp's part of K
    alignas(16) float r[HEAD], k[HEAD], v[HEAD];
    alignas(16) float decay[HEAD], kk[HEAD], key[HEAD], removal[HEAD], value[HEAD], gate[HEAD], y[HEAD];
    float4 of_head[4];  // sums over 16 channels each: kk . kk, r . k r_k, k . r, b . r
    alignas(16) __half deferred[MAX_LAG][DEFERRED_VECTORS][HEAD];
    alignas(16) __half inner[MOST_RANKS];
    alignas(16) uint32_t hidden[UNITS];                      // of both blocks of the pair
    alignas(16) uint32_t active[2 * MOST_STEPS][2 * UNITS];  // of these, by warp: which one, and what it is
    float2 moments[2][WARPS];
    alignas(16) unsigned long long tables[ROW_TABLES][ROW_POINTERS];
    uint64_t full[PARTS][CHUNKS], empty[PARTS], hidden_full;
};

#if HOPPER
using namespace hopper;

// Where a piece of 16 bytes of a narrow row lies in it. Rows have a multiple of four pieces.
DEVICE int turned(int piece, int row, int pieces) { return piece ^ (row & (pieces % 8 ? 3 : 7)); }
#endif
}  // namespace half_row
