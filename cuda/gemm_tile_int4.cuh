// What gemm_tile4.cu and gemm_many4.cu multiply of tiles of int4.
#pragma once
#include "gemm_tile_layout.cuh"
#include "int4_tile.cuh"

// OfTile: Int4Tile or WideInt4Tile.
template <typename OfTile>
struct Int4Codes : Codes {
    using Tile = OfTile;
    static constexpr int TILE_BYTES = Tile::BYTES, GROUP_STRIPS = Tile::GROUP_STRIPS,
                         GROUP_BYTES = Tile::GROUP_BYTES;
    static constexpr bool TILES = true, SCALED = false, BY_STRIPS = true;
    static constexpr float UNIT = 1 << 24;

    // Two codes of a word as a pair of w, from bits 0 and 16 on, or (HIGH) from bits 4 and 20 on.
    template <bool HIGH>
    static __device__ __forceinline__ uint32_t pair(uint32_t word, __half2 scale, __half2 minimum) {
        uint32_t found;  // the codes among the bits of 1024, in one instruction
        asm("lop3.b32 %0, %1, %2, %3, 0xea;"
            : "=r"(found)
            : "r"(word), "n"(HIGH ? 0x00f000f0 : 0x000f000f), "r"(0x64006400));
        __half2 codes = reinterpret_cast<const __half2&>(found);
        if constexpr (HIGH)  // 1024 + 16 q
            codes = __hfma2(codes, __float2half2_rn(1.f / 16), __float2half2_rn(-64.f));
        else
            codes = __hsub2(codes, __float2half2_rn(1024.f));
        codes = __hfma2(codes, scale, minimum);
        return reinterpret_cast<const uint32_t&>(codes);
    }

    // Of the sixteens along k of a stage from `first` on that `a` has room for: strips, or a part of one.
    // stage_strip: as odd as the number of the stage's first strip.
    template <int STAGE_STRIPS, int STEPS>
    static __device__ __forceinline__ void operands(uint32_t stage, int first, int stage_strip, int warp,
                                                    int lane, uint32_t, uint32_t (&a)[STEPS][4]) {
#if HOPPER
        const int odd = STAGE_STRIPS < Tile::GROUP_STRIPS ? stage_strip % 2 : 0;
        constexpr int OF_STRIP = STEPS < TILE_K / 16 ? STEPS : TILE_K / 16, STRIPS = STEPS / OF_STRIP;
        const int first_strip = first / (TILE_K / 16), first_of_strip = first % (TILE_K / 16);
        uint32_t codes[STRIPS][OF_STRIP];
        float2 scales[STRIPS];
#pragma unroll
        for (int strip = 0; strip < STRIPS; strip++) {
            const int of_stage = odd + first_strip + strip;
            const uint32_t tile = stage + (Tile::begin(of_stage) - Tile::begin(odd)),
                           runs = tile + Tile::codes(of_stage);
#pragma unroll
            for (int k = 0; k < OF_STRIP; k++)
                codes[strip][k] = hopper::load_shared_word(runs + (first_of_strip + k) * Tile::SIXTEEN_BYTES +
                                                           Tile::place(warp, lane / 4, lane % 4));
            scales[strip] =
                hopper::load_shared2(tile + (Tile::scales(of_stage) + Tile::place_of_scale(warp, lane / 4)));
        }
#pragma unroll
        for (int strip = 0; strip < STRIPS; strip++) {
            const __half2 top = reinterpret_cast<const __half2&>(scales[strip].x),
                          below = reinterpret_cast<const __half2&>(scales[strip].y);
#pragma unroll
            for (int k = 0; k < OF_STRIP; k++) {
                uint32_t (&to)[4] = a[strip * OF_STRIP + k];
                const uint32_t word = codes[strip][k];
                to[0] = pair<false>(word, __low2half2(top), __high2half2(top));
                to[1] = pair<true>(word, __low2half2(below), __high2half2(below));
                to[2] = pair<false>(word >> 8, __low2half2(top), __high2half2(top));
                to[3] = pair<true>(word >> 8, __low2half2(below), __high2half2(below));
            }
        }
#endif
    }

    // Where a lane finds its codes and scales of a strip in a stage of w, and its row of operands in one of x
    // in the TMA's swizzle of 128 bytes.
    struct Places {
        uint32_t codes, scales, x;
        __device__ __forceinline__ Places(int strip, int x_rows, int lane)
            : codes(Tile::begin(strip) + Tile::codes(strip) + Tile::place(0, lane / 4, lane % 4)),
              scales(Tile::begin(strip) + Tile::scales(strip) + Tile::place_of_scale(0, lane / 4)) {
            const int row = lane % 8, eight = lane / 8;
            x = (strip * x_rows + row) * STRIP_BYTES + (eight ^ row) * 16;
            // In registers: the compiler would compute them again in each stage.
            asm volatile("" : "+r"(codes), "+r"(scales), "+r"(x));
        }
    };

    // sums += products of a strip with TN rows of x, by a warp, in units of 1 / UNIT; what a thread has of 16
    // rows of w is as with `mma`.
    template <int TN, int SIXTEENS>
    static __device__ __forceinline__ void multiply(float (&sums)[SIXTEENS][TN / 2], uint32_t w, uint32_t x,
                                                    const Places& at) {
#if HOPPER
        constexpr int CHUNKS = TN / 8;
        constexpr uint32_t ONES = 0x00010001;  // as codes
        // Of each half of 32 along k the eights.
        uint32_t b[CHUNKS][2][4];
        float of_x[CHUNKS][4] = {};
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint32_t (&now)[4] = b[c][half];
                load_matrix(now, ((x + at.x) ^ half * 64) + c * 8 * STRIP_BYTES);
                mma(of_x[c], ONES, ONES, ONES, ONES, now[0], now[1]);
                mma(of_x[c], ONES, ONES, ONES, ONES, now[2], now[3]);
            }
#pragma unroll
        for (int i = 0; i < SIXTEENS; i += 2) {
            uint2 codes[TILE_K / 16];  // of two sixteens of rows
#pragma unroll
            for (int k = 0; k < TILE_K / 16; k++)
                codes[k] = hopper::load_shared_two(w + (at.codes ^ i * 32) + k * Tile::SIXTEEN_BYTES);
#pragma unroll
            for (int next = 0; next < 2; next++) {
                const float2 scales = hopper::load_shared2(w + at.scales + (i + next) * 8 * 8);
                float products[CHUNKS][4] = {};
#pragma unroll
                for (int k = 0; k < TILE_K / 16; k++) {
                    const uint32_t word = next ? codes[k].y : codes[k].x, later = word >> 8;
#pragma unroll
                    for (int c = 0; c < CHUNKS; c++)
                        mma(products[c], word & 0x000f000f, word & 0x00f000f0, later & 0x000f000f,
                            later & 0x00f000f0, b[c][k / 2][k % 2 * 2], b[c][k / 2][k % 2 * 2 + 1]);
                }
                const float2 of_top = to_float2(__float_as_uint(scales.x)),
                             of_below = to_float2(__float_as_uint(scales.y));
#pragma unroll
                for (int c = 0; c < CHUNKS; c++)
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        float& to = sums[i + next][4 * c + j];
                        to = fmaf(j < 2 ? of_top.x : of_below.x * (1.f / 16), products[c][j],
                                  fmaf(j < 2 ? of_top.y : of_below.y, of_x[c][j % 2], to));
                    }
            }
        }
#endif
    }
};

// What `launch` returns for Int4Codes in groups of 64 or 128.
template <typename Launch>
int with_int4_codes(int group, const Launch& launch) {
    switch (group) {
        case TILE_K: return launch(Int4Codes<Int4Tile>());
        case 2 * TILE_K: return launch(Int4Codes<WideInt4Tile>());
        default: return cudaErrorInvalidValue;
    }
}
