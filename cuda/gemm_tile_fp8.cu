// GEMMs of fp8 (e4m3) on Hopper, up to three of one shape in one launch: y[m, n] = f(x_scale[m] times
// w_scale[n] times the sum over k of x[m, k] w[n, k]).
//
//   w [N, K] and x [M, K] fp8, none NaN; N a multiple of 64, K of 128; w_scale [N], x_scale [M] fp32
//   y [M, N] fp16; any M
//   f: identity, or relu squared (at most what fp16 holds)
//
// Reference: f(x @ w.T * w_scale * x_scale[:, None]) in torch. Binding: Kernels.gemm_tile_fp8. Test:
// test/kernels/test_gemm_tile_fp8.py. Only sm_90a; elsewhere the launcher returns cudaErrorNotSupported.
//
// The kernel of gemm_tile.cu: two neighbours of fp8 take the place of a number of fp16, both in memory and in
// the instructions, which multiply twice as many. The order of k is free as long as x and w agree on it.
// Sums are fp32 to the tensor cores' precision for fp8, which keeps fewer digits than fp32's own.
#include "gemm_tile_launch.cuh"

extern "C" {
int rwkv_gemm_tile_fp8(const void* const* w, const void* const* w_scale, const void* const* x,
                       const void* const* x_scale, void* const* y, int count, int m, int n, int k, int square,
                       const TileShape* shape, cudaStream_t stream) {
    if (!on_hopper()) return cudaErrorNotSupported;
    TileGemms p = {};
    if (k % 2 || !set_up<Fp8Pairs>(p, x, y, count, m, n, k / 2, square, *shape)) return cudaErrorInvalidValue;
    for (int i = 0; i < count; i++) {
        p.scales[i] = static_cast<const float*>(w_scale[i]);
        p.x_scales[i] = static_cast<const float*>(x_scale[i]);
        if (!map(&p.w[i], w[i], n, k / 2, p.groups * TILE_W_ROWS, strips_for<Fp8Pairs>(shape->x_rows)))
            return cudaErrorNotSupported;
    }
    return launch_tiles<Fp8Pairs>(p, shape->x_rows, count, stream);
}
}
