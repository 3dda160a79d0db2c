// GEMMs with weights of 4 bits on Hopper, up to three of one shape in one launch: y[m, n] = f(sum over k of
// x[m, k] w[n, k]), where w[n, k] = scale q + minimum by groups of 64 or 128 along k, in fp16.
//
//   w: [N/64, K/64] tiles of int4_tile.cuh
//   x [M, K] fp16; y [M, N] fp16; N and K multiples of 64; any M
//   f: identity, or relu squared (at most what fp16 holds)
//
// Reference: f(x @ w.T) in torch with w rounded to fp16. Binding: Kernels.gemm_tile_codes. Test:
// test/kernels/test_gemm_tile4.py, test_gemm_tile_beside.py. Only sm_90a; elsewhere the launcher returns
// cudaErrorNotSupported.
//
// As gemm_tile8.cu. A code becomes fp16 as 1024 + q in the digits of an fp16, less 1024, exactly; then one
// multiply-add rounds w.
//
// Up to 8 rows of x instructions are what takes time, so `mma` multiplies codes as they are: the low four
// bits of an fp16 alone are the subnormal number 2^-24 q, exactly, and the next four, of the lower rows,
// 2^-20 q. The sum over a group, in fp32, is multiplied by its scale, and the minimum by the sum of x over
// the group, which is a product with ones. So w is not rounded there. A warp has strips of its own, with all
// rows of w, so that operands of x are read once.
#include "gemm_tile_int4.cuh"
#include "gemm_tile_launch.cuh"

extern "C" {
// group: 64 or 128. beside: small GEMMs of gemm_stream.cu in the same launch, with up to 16 rows of x. next:
// weights of the next kernel, to be brought into the L2 cache.
int rwkv_gemm_tile4(const void* const* w, const void* const* x, void* const* y, int count, int m, int n,
                    int k, int group, int square, const TileShape* shape, const GemmPart* beside,
                    int beside_count, const char* next, unsigned next_bytes, cudaStream_t stream) {
    if (!on_hopper()) return cudaErrorNotSupported;
    TileGemms p = {};
    StreamGemms small = {};
    if (beside_count && !set_up_stream<1, STREAM_WARPS>(small, beside, beside_count, m))
        return cudaErrorInvalidValue;
    return with_int4_codes(group, [&](auto codes) {
        using Codes = decltype(codes);
        if (!set_up<Codes>(p, x, y, count, m, n, k, square, *shape)) return int(cudaErrorInvalidValue);
        p.prefetch = {next, next_bytes};
        for (int i = 0; i < count; i++) p.tiles[i] = static_cast<const uint8_t*>(w[i]);
        return launch_tiles<Codes>(p, shape->x_rows, count, stream, beside_count ? &small : nullptr);
    });
}
}
