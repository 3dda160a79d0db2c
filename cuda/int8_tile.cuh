// Tiles of int8 on Hopper, of 64 rows and 64 numbers along k: the order of orders.tiles_of_8_bits.
#pragma once
#include "gemm_tile.cuh"
#include "vendor.cuh"

// 16 runs of 256 bytes. Run 4 k + q has the numbers along k that lane q of four needs of sixteen k, those at
// 2 q, 2 q + 1, 2 q + 8 and 2 q + 9: a word of each row. Of each 16 rows the words of row i and row i + 8 are
// side by side, and with them those of the same rows of the sixteen beside.
struct Int8Tile {
    static constexpr int BYTES = TILE_W_ROWS * TILE_K, SIXTEEN_BYTES = BYTES / 4;

    // Where a run has four words of row i of two sixteens, 2 pair and the next, for lane q. So 8 lanes that
    // read 16 bytes each, and 16 that read 8, have all banks.
    static DEVICE uint32_t place_of_pair(int pair, int i, int q) {
        return q * (SIXTEEN_BYTES / 4) + (pair * 8 + i + 2 * q) % 16 * 16;
    }

    // Whether the two sixteens have changed places there.
    static DEVICE int turned(int i) { return i >> 1 & 1; }

    // Of one sixteen the words of row i and row i + 8.
    static DEVICE uint32_t place(int sixteen, int i, int q) {
        return place_of_pair(sixteen / 2, i, q) + ((sixteen ^ turned(i)) & 1) * 8;
    }
};
