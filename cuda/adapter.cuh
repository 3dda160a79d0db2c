// Adapters of rows, unmerged: y[t] += B (A x[t]) with the matrices of the adapter that row t has, if any.
//
//   x [T, K] fp16; y [T, N] fp16 or fp32; A [rank, K], B [N, rank] fp16, which holds the scaling too
//   K a multiple of 32, N of 8, rank of ADAPTER_RANK, at most most_rank; the ranks added are zero
//
// adapter_shrink.cu computes A x, adapter_expand.cu adds B times that. Both take up to three matrices a
// launch. Rows of one adapter come in tiles: a tile is 1 + ADAPTER_TILE ints, the slot of its adapter (-1:
// none) and its rows, -1 where there are no more. Each row of a step is in one tile; where a tile has no row,
// none follows.
//
// An adapter lies in one run of fp16, at slot * slot_stride of `weights`. `entry` says of a matrix where in
// that, and of which rank, 0 where the adapter does not change it: that of slot s is at s * entry_stride. All
// of this was written before the step, so it may be read before the kernel before has ended.
#pragma once
#include "gemm.cuh"

constexpr int ADAPTER_TILE = 16, ADAPTER_RANK = 16, ADAPTER_PARTS = 3;
constexpr int ADAPTER_SPLITS = 16;      // parts of K, in any step
constexpr int ADAPTER_MOST_RANK = 256;  // what fits into a block's shared memory
constexpr int ADAPTER_ALIGNMENT = 8;    // numbers of which the place of a matrix is a multiple

// What becomes of y [T, N]: fp16, with more added; the same, then relu squared; fp32, with more added.
enum AdapterOutput { ADAPTER_ADD = 0, ADAPTER_ADD_SQUARE = 1, ADAPTER_ADD_FLOAT = 2 };

struct AdapterEntry {
    int rank;
    int place;  // of A in the adapter, in ADAPTER_ALIGNMENT numbers; B follows it
};

struct AdapterPart {
    const __half* x;
    void* y;
    float* sums;  // [ADAPTER_SPLITS, tiles, ADAPTER_TILE, most_rank]: A x, to be added up over the first
    const AdapterEntry* entry;
    int n, k;
};

struct AdapterInput {
    AdapterPart part[ADAPTER_PARTS];
    const __half* weights;
    size_t slot_stride;
    const int* tiles;
    int entry_stride, most_rank;
};

// A tile and its adapter's change of one matrix.
struct AdapterTile {
    const int* rows;
    const __half* a;  // null where the adapter does not change the matrix
    int rank = 0;
    bool used;

    __device__ __forceinline__ AdapterTile(const AdapterInput& in, const AdapterPart& part, int tile) {
        const int* const own = in.tiles + tile * (1 + ADAPTER_TILE);
        rows = own + 1, used = rows[0] >= 0, a = nullptr;
        if (const int slot = own[0]; used && slot >= 0) {
            const AdapterEntry& entry = part.entry[size_t(slot) * in.entry_stride];
            rank = entry.rank;
            a = in.weights + slot * in.slot_stride + size_t(entry.place) * ADAPTER_ALIGNMENT;
        }
    }
};
