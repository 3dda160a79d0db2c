// GEMMs of fp8 (e4m3) of many rows on Hopper: gemm_many.cu for what gemm_tile_fp8.cu takes.
//
//   w [N, K] and x [M, K] fp8, none NaN; N a multiple of 64, K of 128; w_scale [N], x_scale [M] fp32
//   y [M, N] fp16, with the scales of both; any M
//   f: identity, or relu squared (at most what fp16 holds)
//
// Reference: f(x @ w.T * w_scale * x_scale[:, None]) in torch. Binding: Kernels.gemm_tile_fp8. Test:
// test/kernels/test_gemm_many.py. Only sm_90a; elsewhere the launcher returns cudaErrorNotSupported. How:
// gemm_many.cuh, with two neighbours of fp8 in the place of a number of fp16.
#include "gemm_many_launch.cuh"

extern "C" {
int rwkv_gemm_many_fp8(const void* const* w, const void* const* w_scale, const void* const* x,
                       const void* const* x_scale, void* const* y, int count, int m, int n, int k, int square,
                       const TileShape* shape, cudaStream_t stream) {
    if (k % 2) return cudaErrorInvalidValue;
    ManyGemms p = {};
    for (int i = 0; i < count && i < MAX_PARTS; i++) {
        p.scales[i] = static_cast<const float*>(w_scale[i]);
        p.x_scales[i] = static_cast<const float*>(x_scale[i]);
    }
    return launch_many<Fp8Pairs>(p, w, x, y, count, m, n, k / 2, square, *shape, stream);
}
}
