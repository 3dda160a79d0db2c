// GEMMs of many rows on Hopper, up to three of one shape in one launch: y[m, n] = f(sum over k of x[m, k]
// w[n, k]).
//
//   w [N, K] fp16, or [K, N] (`transposed`); x [M, K] fp16; y [M, N] fp16; N and K multiples of 64; any M
//   f: identity, or relu squared (at most what fp16 holds)
//
// Reference: f(x @ w.T) in torch. Binding: Kernels.gemm_tile with `many`. Test:
// test/kernels/test_gemm_many.py. Only sm_90a; elsewhere the launcher returns cudaErrorNotSupported. How:
// gemm_many.cuh.
//
// Sums are fp32, over k in order: those of a row are the same beside any other rows. With
// TileShape::partial_sums those over each of split_k parts of K are the result of the one GEMM, y [split_k,
// M, N] fp32, for a norm to add up: so a few tiles give all multiprocessors work. Without, split_k > 1 makes
// the sums those of gemm_tile.cu with as many parts.
#include "gemm_many_launch.cuh"

extern "C" {
// beside: up to four small GEMMs with the same m and k in the same launch, if w is not transposed; n is a
// multiple of 16, and f any Activation.
int rwkv_gemm_many(const void* const* w, const void* const* x, void* const* y, int count, int m, int n, int k,
                   int transposed, int square, const TileShape* shape, const GemmPart* beside,
                   int beside_count, cudaStream_t stream) {
    ManyGemms p = {};
    const auto launch = transposed ? launch_many<HalfColumns> : launch_many<Halves>;
    return launch(p, w, x, y, count, m, n, k, square, *shape, stream, beside, beside_count);
}
}
