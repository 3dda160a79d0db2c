// GEMMs with weights of 4 bits on Hopper, up to three of one shape in one launch: y[m, n] = f(sum over k of
// x[m, k] w[n, k]), where w[n, k] = scale q + minimum by groups of 64 along k, in fp16.
//
//   w: [N/64, K/64] tiles of 64 rows of 64 codes q, 32 bytes a row, and behind them the scale and the minimum
//     of each row, fp16
//   x [M, K] fp16; y [M, N] fp16; N and K multiples of 64; any M
//   f: identity, or relu squared (at most what fp16 holds)
//
// Reference: f(x @ w.T) in torch with w rounded to fp16. Binding: Kernels.gemm_tile4. Test:
// test/kernels/test_gemm_tile4.py. Only sm_90a; elsewhere the launcher returns cudaErrorNotSupported.
//
// As gemm_tile8.cu. A code becomes fp16 as 1024 + q in the digits of an fp16, less 1024, exactly; then one
// multiply-add rounds w. Of each four lanes lane q has 8 bytes of a row: of each 16 numbers along k the codes
// of those at 2 q, 2 q + 1, 2 q + 8 and 2 q + 9, two such fours in a word; a word's halves hold the codes
// that become the halves of a pair.
#include "gemm_tile_kernel.cuh"

struct Int4Codes : Codes {
    static constexpr int ROW_BYTES = TILE_K / 2, SCALES = TILE_W_ROWS * ROW_BYTES;
    static constexpr int TILE_BYTES = SCALES + TILE_W_ROWS * 4;
    static constexpr bool TILES = true, SCALED = false;

    // Two codes of a word as a pair of w, from bits 0 and 16 on, or (HIGH) from bits 4 and 20 on.
    template <bool HIGH>
    static __device__ __forceinline__ uint32_t pair(uint32_t word, __half2 scale, __half2 minimum) {
        const uint32_t found = (word & (HIGH ? 0x00f000f0 : 0x000f000f)) | 0x64006400;
        __half2 codes = reinterpret_cast<const __half2&>(found);
        if constexpr (HIGH)  // 1024 + 16 q
            codes = __hfma2(codes, __float2half2_rn(1.f / 16), __float2half2_rn(-64.f));
        else
            codes = __hsub2(codes, __float2half2_rn(1024.f));
        codes = __hfma2(codes, scale, minimum);
        return reinterpret_cast<const uint32_t&>(codes);
    }

    template <int STRIPS>
    static __device__ __forceinline__ void operands(uint32_t stage, int row, int q,
                                                    uint32_t (&a)[STRIPS * TILE_K / 16][4]) {
#if HOPPER
#pragma unroll
        for (int half = 0; half < 2; half++) {  // rows `row` and 8 below
            const int of = row + half * 8;
#pragma unroll
            for (int strip = 0; strip < STRIPS; strip++) {
                const uint32_t tile = stage + strip * TILE_BYTES;
                const uint2 codes = hopper::load_shared_words2(tile + of * ROW_BYTES + q * 8);
                const uint32_t both = hopper::load_shared_word(tile + SCALES + of * 4),
                               scales = __byte_perm(both, both, 0x1010),
                               minimums = __byte_perm(both, both, 0x3232);
                const __half2 scale = reinterpret_cast<const __half2&>(scales),
                              minimum = reinterpret_cast<const __half2&>(minimums);
#pragma unroll
                for (int k = 0; k < TILE_K / 16; k++) {
                    uint32_t (&to)[4] = a[strip * TILE_K / 16 + k];
                    const uint32_t word = (k < 2 ? codes.x : codes.y) >> k % 2 * 8;
                    to[half] = pair<false>(word, scale, minimum);
                    to[2 + half] = pair<true>(word, scale, minimum);
                }
            }
        }
#endif
    }
};

extern "C" {
int rwkv_gemm_tile4(const void* const* w, const void* const* x, void* const* y, int count, int m, int n,
                    int k, int square, const TileShape* shape, cudaStream_t stream) {
    if (!on_hopper()) return cudaErrorNotSupported;
    TileGemms p = {};
    if (!set_up(p, x, y, count, m, n, k, square, *shape, true)) return cudaErrorInvalidValue;
    for (int i = 0; i < count; i++) p.tiles[i] = static_cast<const uint8_t*>(w[i]);
    return launch_tiles<Int4Codes>(p, shape->x_rows, count, stream);
}
}
