// What gemm_tile8.cu and gemm_many8.cu multiply of int8, in tiles or by columns.
#pragma once
#include "gemm_tile_layout.cuh"
#include "int8_codes.cuh"
#include "int8_tile.cuh"

// The operands of a warpgroup's thread are of a tile's rows `row` and 8 below, as pairs of fp16 of the low or
// the high bytes of a word. bits: what those of int8 are put among.
struct Int8Codes : Codes {
    static constexpr bool TILES = true;
    static __device__ __forceinline__ uint32_t bits() { return code_bits(); }

    // Of the sixteens along k of a stage those from `first` on that `a` has room for.
    template <int, int STEPS>
    static __device__ __forceinline__ void operands(uint32_t stage, int first, int, int warp, int lane,
                                                    uint32_t bits, uint32_t (&a)[STEPS][4]) {
#if HOPPER
        const uint32_t from =
            stage + first * Int8Tile::SIXTEEN_BYTES + Int8Tile::place(warp, lane / 4, lane % 4);
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            const uint2 words = hopper::load_shared_two(from + k * Int8Tile::SIXTEEN_BYTES);
            a[k][0] = halves_of_codes<LOW_BYTES>(words.x, bits);
            a[k][1] = halves_of_codes<LOW_BYTES>(words.y, bits);
            a[k][2] = halves_of_codes<HIGH_BYTES>(words.x, bits);
            a[k][3] = halves_of_codes<HIGH_BYTES>(words.y, bits);
        }
#endif
    }
};

// A stage is a box of its strips' rows along k and 64 columns, of which a warp has 16.
struct Int8Columns : Codes {
    static constexpr bool TRANSPOSED = true;
    static __device__ __forceinline__ uint32_t bits() { return code_bits(); }

    template <int STRIPS, int STEPS>
    static __device__ __forceinline__ void operands(uint32_t stage, int first, int, int warp, int lane,
                                                    uint32_t bits, uint32_t (&a)[STEPS][4]) {
#if HOPPER
        constexpr int ROW_BYTES = TILE_W_ROWS;
        // In the TMA's swizzle of 64 bytes the sixteens of a row change places with every second row.
        constexpr int AT_ONCE = STEPS < 2 ? 1 : 2;  // sixteens along k
        const int row = first * 16 + lane % (AT_ONCE * 16);
        const uint32_t from = stage + row * ROW_BYTES + (warp ^ lane / 2 % 4) * 16;
#pragma unroll
        for (int k = 0; k < STEPS; k += AT_ONCE) {
            uint32_t words[4];  // of eight numbers along k each
            load_transposed(words, from + k * 16 * ROW_BYTES);
#pragma unroll
            for (int i = 0; i < AT_ONCE * 2; i++) {
                a[k + i / 2][i % 2 * 2] = halves_of_codes<EVEN_BYTES>(words[i], bits);
                a[k + i / 2][i % 2 * 2 + 1] = halves_of_codes<ODD_BYTES>(words[i], bits);
            }
        }
#endif
    }
};

// For Int8Columns: a box has all rows along k of a stage and 64 columns.
inline bool map_columns(CUtensorMap* out, const void* matrix, int rows, int columns, int strips) {
    return make_tensor_map<2, 1, 64>(out, matrix, {cuuint64_t(columns), cuuint64_t(rows)},
                                     {cuuint64_t(columns)}, {TILE_W_ROWS, cuuint32_t(strips * TILE_K)});
}
