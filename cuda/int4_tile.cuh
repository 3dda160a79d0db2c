// Tiles of int4 on Hopper, of 64 rows and 64 numbers along k: the order of orders.tiles_of_4_bits.
#pragma once
#include "gemm_tile.cuh"
#include "vendor.cuh"

// 16 runs of 128 bytes of codes, and behind them the scale and the minimum of each row, fp16, of each 16 rows
// row i and row i + 8 together. Run 4 k + q has the numbers along k that lane q of four needs of sixteen k,
// those at 2 q, 2 q + 8, 2 q + 1 and 2 q + 9: a byte each of a word, the low half of row i and the high one
// of row i + 8.
//
// A strip is 64 numbers along k. In a row of tiles strip i has BYTES from `begin` on, in which its codes are
// from `codes` and its scales from `scales` on.
struct Int4Tile {
    static constexpr int GROUP_STRIPS = 1;  // that share scales
    static constexpr int CODE_BYTES = TILE_W_ROWS * TILE_K / 2, SCALE_BYTES = TILE_W_ROWS * 4,
                         BYTES = CODE_BYTES + SCALE_BYTES;
    static constexpr int GROUP_BYTES = BYTES;
    static constexpr int RUN_BYTES = 128, SIXTEEN_BYTES = 4 * RUN_BYTES;

    static __host__ __device__ constexpr int begin(int strip) { return strip * BYTES; }
    static __host__ __device__ constexpr int codes(int) { return 0; }
    static __host__ __device__ constexpr int scales(int) { return CODE_BYTES; }

    // Where a strip begins in rows of so many.
    template <typename Index>
    static DEVICE Index begin_of(Index row, int strips, Index strip) {
        return (row * strips + strip) * BYTES;
    }

    // Where the word of row i of a sixteen of rows is in the runs of 16 numbers along k, for lane q. Those of
    // an even sixteen and the next are side by side. Where they begin is 8 banks later for each lane.
    static DEVICE uint32_t place(int sixteen, int i, int q) {
        return q * RUN_BYTES + (sixteen / 2 * 8 + i + 4 * q) % 16 * 8 + sixteen % 2 * 4;
    }

    // Among scales that of row i of a sixteen of rows, its minimum, and behind them those of row i + 8.
    static DEVICE int place_of_scale(int sixteen, int i) { return (sixteen * 8 + i) * 8; }
};

// The same in groups of 128: scales lie between the codes of an even strip and those of the next, and are
// both strips'. A row has an even number of strips, if need be one more than numbers along k are for.
struct WideInt4Tile : Int4Tile {
    static constexpr int GROUP_STRIPS = 2, GROUP_BYTES = 2 * CODE_BYTES + SCALE_BYTES;

    static __host__ __device__ constexpr unsigned begin(unsigned strip) {
        return strip * (GROUP_BYTES / 2) - strip % 2 * (SCALE_BYTES / 2);
    }
    static __host__ __device__ constexpr unsigned codes(unsigned strip) { return strip % 2 * SCALE_BYTES; }
    static __host__ __device__ constexpr unsigned scales(unsigned strip) {
        return strip % 2 ? 0 : CODE_BYTES;
    }

    template <typename Index>
    static DEVICE Index begin_of(Index row, int strips, Index strip) {
        return row * ((strips + 1) / 2 * GROUP_BYTES) + begin(strip);
    }
};
