// GEMMs of many rows with weights of 4 bits on Hopper: gemm_many.cu for the tiles that gemm_tile4.cu takes.
//
//   w: [N/64, K/64] tiles of int4_tile.cuh; x [M, K] fp16; y [M, N] fp16; N and K multiples of 64; any M
//   f: identity, or relu squared (at most what fp16 holds)
//
// Reference: f(x @ w.T) in torch with w rounded to fp16. Binding: Kernels.gemm_many_codes. Test:
// test/kernels/test_gemm_many.py. Only sm_90a; elsewhere the launcher returns cudaErrorNotSupported. How:
// gemm_many.cuh, with codes that become fp16 in registers.
#include "gemm_many_launch.cuh"
#include "gemm_tile_int4.cuh"

extern "C" {
// group: 64 or 128.
int rwkv_gemm_many4(const void* const* w, const void* const* x, void* const* y, int count, int m, int n,
                    int k, int group, int square, const TileShape* shape, cudaStream_t stream) {
    ManyGemms p = {};
    return with_int4_codes(group, [&](auto codes) {
        return launch_many<decltype(codes)>(p, w, x, y, count, m, n, k, square, *shape, stream);
    });
}
}
