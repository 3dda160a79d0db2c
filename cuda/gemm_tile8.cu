// GEMMs with weights of 8 bits on Hopper, up to three of one shape in one launch: y[m, n] = f(scale[n] times
// the sum over k of x[m, k] w[n, k]).
//
//   w [N, K] codes: fp8 (e4m3, no NaN), or int8 (128 more than the number) in tiles of int8_tile.cuh or as
//   [K, N], see below
//   scale [N] fp32; x [M, K] fp16; y [M, N] fp16; N and K multiples of 64; any M
//   f: identity, or relu squared (at most what fp16 holds)
//
// Reference: f((x @ w.T) * scale) in torch. Binding: Kernels.gemm_tile_codes. Test:
// test/kernels/test_gemm_tile8.py, test_gemm_tile_beside.py. Only sm_90a; elsewhere the launcher returns
// cudaErrorNotSupported.
//
// As gemm_tile.cu, but w goes through registers, where codes become fp16, exactly: int8 as 1024 + code in the
// digits of an fp16, less 1152; fp8 by the instruction for it. For this codes lie in the order in which lanes
// need them. Of fp8 lane q of each four has 16 of the 64 codes of a row side by side, of each 16 numbers
// along k those at 2 q, 2 q + 1, 2 q + 8 and 2 q + 9.
//
// Codes [K, N] are those of gemm_sparse8.cu: of each 16 columns the first eight and the others take turns.
// ldmatrix, for which two bytes are one number, transposes them: a word that a lane gets has numbers 2 q and
// 2 q + 1 along k of two columns eight apart, which are rows of w eight apart.
//
// Sums are fp32: over k inside a part in order, then over the parts in order, then times the scale. In tiles
// of 32 and more rows of x the same split-K gives the same result for a row, beside any other rows and
// however many. In tiles of 8 and 16 two warpgroups share each stage, so that K has twice the parts.
#include <algorithm>

#include "gemm_tile_int8.cuh"
#include "gemm_tile_launch.cuh"

// In the TMA's swizzle the sixteens of a row change places with the rows.
struct Fp8Codes : Codes {
    template <int STRIPS, int STEPS>
    static __device__ __forceinline__ void operands(uint32_t stage, int first, int, int warp, int lane,
                                                    uint32_t, uint32_t (&a)[STEPS][4]) {
#if HOPPER
        constexpr int BOX = STRIPS < 2 ? 1 : 2;  // strips side by side
        const int row = warp * 16 + lane / 4, q = lane % 4;
        const uint32_t from = stage + first * (TILE_BYTES / (TILE_K / 16)) + row * BOX * TILE_K;
        const int turn = BOX == 2 ? row % 8 : row / 2 % 4;
#pragma unroll
        for (int strip = 0; strip < STEPS * 16 / TILE_K; strip++) {
            const uint32_t sixteen = from + ((strip * 4 + q) ^ turn) * 16;
            const uint4 top = hopper::load_shared_words(sixteen),
                        low = hopper::load_shared_words(sixteen + 8 * BOX * TILE_K);
            const uint32_t tops[4] = {top.x, top.y, top.z, top.w}, lows[4] = {low.x, low.y, low.z, low.w};
#pragma unroll
            for (int k = 0; k < TILE_K / 16; k++) {
                uint32_t (&to)[4] = a[strip * TILE_K / 16 + k];
                to[0] = halves<0>(tops[k]), to[1] = halves<0>(lows[k]);
                to[2] = halves<1>(tops[k]), to[3] = halves<1>(lows[k]);
            }
        }
#endif
    }

    template <int HIGH>
    static __device__ __forceinline__ uint32_t halves(uint32_t word) {
        uint32_t numbers;
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(numbers) : "h"(uint16_t(HIGH ? word >> 16 : word)));
        return numbers;
    }
};

namespace {
// A matrix of fp8 with `columns` codes side by side, and the box of 64 rows that one copy brings, in a
// swizzle as wide as that.
bool map_codes(CUtensorMap* out, const void* matrix, int rows, int columns, int box_strips) {
    const cuuint64_t size[2] = {cuuint64_t(columns), cuuint64_t(rows)}, stride[1] = {cuuint64_t(columns)};
    const cuuint32_t box[2] = {cuuint32_t(box_strips * TILE_K), TILE_W_ROWS};
    return box_strips == 2 ? make_tensor_map<2, 1, 128>(out, matrix, size, stride, box)
                           : make_tensor_map<2, 1, 64>(out, matrix, size, stride, box);
}
}  // namespace

extern "C" {
// fp8: what the codes are, else int8. columns: int8 as [K, N]. beside: small GEMMs of
// gemm_stream.cu in the same launch, with up to 16 rows of x. next: weights of the next kernel, to be brought
// into the L2 cache.
int rwkv_gemm_tile8(const void* const* w, const void* const* scale, const void* const* x, void* const* y,
                    int count, int m, int n, int k, int fp8, int columns, int square, const TileShape* shape,
                    const GemmPart* beside, int beside_count, const char* next, unsigned next_bytes,
                    cudaStream_t stream) {
    if (!on_hopper()) return cudaErrorNotSupported;
    TileGemms p = {};
    if ((fp8 && columns) || !set_up<Codes>(p, x, y, count, m, n, k, square, *shape))
        return cudaErrorInvalidValue;
    p.prefetch = {next, next_bytes};
    for (int i = 0; i < count; i++) {
        p.scales[i] = static_cast<const float*>(scale[i]);
        const int strips = strips_for<Codes>(shape->x_rows);
        p.tiles[i] = static_cast<const uint8_t*>(w[i]);  // which int8 in tiles is read by
        if ((columns && !map_columns(&p.w[i], w[i], k, n, strips)) ||
            (fp8 && !map_codes(&p.w[i], w[i], n, k, std::min(strips, 2))))
            return cudaErrorNotSupported;
    }
    StreamGemms small = {};
    if (beside_count && !set_up_stream<1, STREAM_WARPS>(small, beside, beside_count, m))
        return cudaErrorInvalidValue;
    const auto run = columns ? launch_tiles<Int8Columns>
                     : fp8   ? launch_tiles<Fp8Codes>
                             : launch_tiles<Int8Codes>;
    return run(p, shape->x_rows, count, stream, beside_count ? &small : nullptr);
}
}
