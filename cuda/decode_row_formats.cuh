// How the large matrices of decode_row.cu lie, by format: which copies a warp needs of them, and what two
// blocks tell each other of hidden units.
#pragma once
#include "decode_row_share.cuh"
#include "int4_tile.cuh"
#include "int8_tile.cuh"

// 64 hidden units: an operand, and which of its 16 runs of four numbers are not zero.
struct alignas(16) HiddenRuns {
    uint32_t digits[WARP];
    uint8_t runs[16];
    float unit, sum;
    int count;  // of these runs
    int unused;
};

// Of 64 hidden units those that are not zero.
struct alignas(16) HiddenUnits {
    float value[ROW_TILE];
    uint8_t unit[ROW_TILE];
    int count;
    int unused[3];
};

// The tiles of int4_tile.cuh: Int4Tile or WideInt4Tile.
template <typename OfTile>
struct RowInt4 {
    using Tile = OfTile;
    using Hidden = HiddenRuns;
    static constexpr int DIGITS = 0x5140;  // of numbers 2 q, 2 q + 8, 2 q + 1 and 2 q + 9

    // add(matrix, offset, bytes, last): a copy of a stage, its last one or not.
    template <typename Add>
    static __device__ void add_tiles(const Add& add, int matrix, int strip, int all, int first,
                                     unsigned which) {
        for (int i = 0; i < ROW_WARP_TILES; i++)
            if (which >> i & 1)
                add(matrix, Tile::template begin_of<uint32_t>(strip, all, first + i), Tile::BYTES, true);
    }

    // Scales of all tiles of a strip; codes are read once it is known which.
    template <typename Add>
    static __device__ void add_value(const Add& add, const RowShare& my, int strip, int slices) {
        const int all = my.own + my.other;
        for (int j = 0; j < all; j++) {
            const int slice = my.slice_of_pair(j);
            add(ROW_VALUE, Tile::template begin_of<uint32_t>(strip, slices, slice) + Tile::scales(slice),
                Tile::SCALE_BYTES, j == all - 1);
        }
    }
};

// The tiles of int8_tile.cuh in two halves along K, and behind the last of an output its scale; of value the
// scales alone, as codes are read once it is known which.
struct RowInt8 {
    using Hidden = HiddenRuns;
    static constexpr int HALVES = 2, HALF_BYTES = Int8Tile::BYTES / HALVES, SCALE_BYTES = ROW_TILE * 4;
    static constexpr int DIGITS = 0x5410;  // of numbers 2 q, 2 q + 1, 2 q + 8 and 2 q + 9

    template <typename Add>
    static __device__ void add_tiles(const Add& add, int matrix, int strip, int all, int first,
                                     unsigned which) {
        for (int i = 0; i < HALVES * ROW_WARP_TILES && which >> i / HALVES; i++) {
            if (!(which >> i / HALVES & 1)) continue;
            const bool is_last = which >> i / HALVES == 1 && i % HALVES == HALVES - 1;
            add(matrix, uint32_t((strip * all + first) * HALVES + i) * HALF_BYTES, HALF_BYTES, !is_last);
            if (is_last) add_scales(add, matrix, strip);
        }
    }

    template <typename Add>
    static __device__ void add_value(const Add& add, const RowShare& my, int strip, int) {
        if (my.own + my.other) add_scales(add, ROW_VALUE, strip);
    }

private:
    template <typename Add>
    static __device__ void add_scales(const Add& add, int matrix, int strip) {
        add(ROW_SCALES + matrix - ROW_R, uint32_t(strip) * SCALE_BYTES, SCALE_BYTES, true);
    }
};

// The same, but value has the codes of gemm_sparse8.cu.
struct RowInt8Columns : RowInt8 {
    using Hidden = HiddenUnits;
};
constexpr int ROW_HIDDEN_BYTES = sizeof(HiddenUnits);  // at most
static_assert(sizeof(HiddenRuns) <= ROW_HIDDEN_BYTES);
static_assert(Int4Tile::BYTES <= ROW_STAGE_BYTES);
static_assert(RowInt8::HALF_BYTES + RowInt8::SCALE_BYTES <= ROW_STAGE_BYTES);
