// Tiles of int4 on Hopper, of 64 rows and 64 numbers along k: the order of orders.tiles_of_4_bits.
#pragma once
#include "gemm_tile.cuh"
#include "vendor.cuh"

// 16 runs of 128 bytes of codes, and behind them the scale and the minimum of each row, fp16, of each 16 rows
// row i and row i + 8 together. Run 4 k + q has the numbers along k that lane q of four needs of sixteen k,
// those at 2 q, 2 q + 8, 2 q + 1 and 2 q + 9: a byte each of a word, the low half of row i and the high one
// of row i + 8.
struct Int4Tile {
    static constexpr int SCALES = TILE_W_ROWS * TILE_K / 2, BYTES = SCALES + TILE_W_ROWS * 4;
    static constexpr int RUN_BYTES = 128, SIXTEEN_BYTES = 4 * RUN_BYTES;

    // Where the word of row i of a sixteen of rows is in the runs of 16 numbers along k, for lane q. Those of
    // an even sixteen and the next are side by side. Where they begin is 8 banks later for each lane.
    static DEVICE uint32_t place(int sixteen, int i, int q) {
        return q * RUN_BYTES + (sixteen / 2 * 8 + i + 4 * q) % 16 * 8 + sixteen % 2 * 4;
    }

    // The scale and the minimum of row i of a sixteen, behind which are those of row i + 8.
    static DEVICE int scales(int sixteen, int i) { return SCALES + (sixteen * 8 + i) * 8; }
};
