// GEMMs of 16 and more rows on Hopper, up to three of one shape in one launch: y[m, n] = f(sum over k of x[m,
// k] w[n, k]).
//
//   w [N, K] fp16, or [K, N] (`transposed`); x [M, K] fp16; y [M, N] fp16; N and K multiples of 64; any M
//   f: identity, or relu squared (at most what fp16 holds)
//
// Reference: f(x @ w.T) in torch. Binding: Kernels.gemm_tile. Test: test/kernels/test_gemm_tile.py. Only
// sm_90a; elsewhere the launcher returns cudaErrorNotSupported.
//
// A block owns 64 rows of w for each of its warpgroups, a tile of rows of x, and one of `split_k` parts of K.
// Two producer warps load tiles through the tensor memory accelerator (TMA) into two rings of stages, one of
// w and one of x; the warpgroups multiply, w being the 64 rows of the wgmma and x its 16 to 256 columns, so
// that few rows of x waste nothing. The ring of w fills before the kernel that makes x has ended.
// The blocks of a cluster hold the parts of K of one tile: each adds up some of the rows, the others send it
// theirs.
// Sums are fp32: over k inside a part in order, then over the parts in order. The same split-K gives the same
// result for a row, beside any other rows, few or many.
#include "gemm_tile_launch.cuh"

extern "C" {
int rwkv_gemm_tile(const void* const* w, const void* const* x, void* const* y, int count, int m, int n, int k,
                   int transposed, int square, const TileShape* shape, cudaStream_t stream) {
    if (!on_hopper()) return cudaErrorNotSupported;
    TileGemms p = {};
    if (!set_up<Halves>(p, x, y, count, m, n, k, square, *shape)) return cudaErrorInvalidValue;
    const int strips = strips_for<Halves>(shape->x_rows);
    for (int i = 0; i < count; i++)
        if (!(transposed ? map(&p.w[i], w[i], k, n, TILE_K * strips, 1)
                         : map(&p.w[i], w[i], n, k, p.groups * TILE_W_ROWS, strips)))
            return cudaErrorNotSupported;
    return transposed ? launch_tiles<HalfColumns>(p, shape->x_rows, count, stream)
                      : launch_tiles<Halves>(p, shape->x_rows, count, stream);
}
}
