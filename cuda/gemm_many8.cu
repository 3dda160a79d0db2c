// GEMMs of many rows with weights of int8 on Hopper: gemm_many.cu for what gemm_tile8.cu takes.
//
//   w: [N/64, K/64] tiles of int8_tile.cuh, or (columns) [K, N] in the order of gemm_sparse8.cu; scale [N]
//   fp32; x [M, K] fp16; y [M, N] fp16; N and K multiples of 64; any M
//   f: identity, or relu squared (at most what fp16 holds)
//
// Reference: f((x @ w.T) * scale) in torch. Binding: Kernels.gemm_many_codes. Test:
// test/kernels/test_gemm_many.py. Only sm_90a; elsewhere the launcher returns cudaErrorNotSupported. How:
// gemm_many.cuh, with codes that become fp16 in registers.
#include "gemm_many_launch.cuh"
#include "gemm_tile_int8.cuh"

extern "C" {
int rwkv_gemm_many8(const void* const* w, const void* const* scale, const void* const* x, void* const* y,
                    int count, int m, int n, int k, int columns, int square, const TileShape* shape,
                    cudaStream_t stream) {
    ManyGemms p = {};
    for (int i = 0; i < count && i < MAX_PARTS; i++) {
        p.scales[i] = static_cast<const float*>(scale[i]);
        if (columns && on_hopper() && !map_columns(&p.w[i], w[i], k, n, 1)) return cudaErrorNotSupported;
    }
    const auto run = columns ? launch_many<Int8Columns> : launch_many<Int8Codes>;
    return run(p, w, x, y, count, m, n, k, square, *shape, stream, nullptr, 0);
}
}
