// How decode_row.cu divides its work.
#pragma once
#include "decode_row_input.cuh"
#include "gemm.cuh"
#include "hopper.cuh"
#include "wkv_half.cuh"

// Two blocks are a cluster; compilers for older GPUs refuse the words.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define PAIRED
#else
#define PAIRED __cluster_dims__(2, 1, 1)
#endif

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
constexpr int ROW_ITEMS = ROW_INNER + 44;  // copies of a warp in a layer, at most
constexpr int ROW_STAGE_BYTES = 2304;
constexpr int ROW_TABLES = 3;  // of pointers, at once

// decode_row_half.cu: whether a model of such rank, heads and slices can run so on this GPU; the step.
bool decode_row_half_fits(const RowInput& in);
int decode_row_half(const RowInput& in, cudaStream_t stream);
// The same of decode_row_wide.cu.
bool decode_row_wide_fits(const RowInput& in);
int decode_row_wide(const RowInput& in, cudaStream_t stream);
constexpr int ROW_HALF_HEADS = 16;  // of decode_row_half.cu, at most

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
