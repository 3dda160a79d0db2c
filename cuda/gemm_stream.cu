// GEMMs of few rows with weights that stream from memory once, several in one launch: y[m, n] = f(sum over k
// of x[m, k] w[n, k]).
//
//   w [N, K] fp16, x [M, K] fp16, y [M, N] fp16; N a multiple of 16, K of 32; any M, best up to 16
//   f: identity, tanh, sigmoid, or relu squared (at most what fp16 holds)
//
// Reference: f(x @ w.T) in torch. Binding: Kernels.gemm_stream. Test: test/kernels/test_gemm_stream.py.
//
// A warp owns 16 R rows of w and a part of K. w and x go from memory to registers in 16-byte pieces, straight
// into the operands of m16n8k16 mma instructions: the order of k inside a step of 32 is free as long as w and
// x agree on it. All of a warp's first loads of w are under way before it waits for the kernel that makes x.
// Where rows do not fill the last tile, it overlaps the one before, and computes the same numbers again.
// Sums are fp32: first over k inside a warp's part (in steps of 32, in order), then over the parts in order.
// A row's result does not depend on the other rows.
#include "gemm_stream.cuh"

template <int NT, int R, int SPLIT_K>
__global__ void LAUNCH_BOUNDS(STREAM_WARPS* WARP, R == 1 ? 2 : 1)
    gemm_stream_kernel(const __grid_constant__ StreamGemms all) {
    __shared__ StreamSums<NT, R> sums;
    stream_gemms<NT, R, SPLIT_K, 8 / R>(all, blockIdx.y, gridDim.y, blockIdx.x * NT * 8, sums,
                                        [] { __syncthreads(); });
}

namespace {
template <int R, int SPLIT_K>
int run(const GemmPart* parts, int count, int m, Prefetch prefetch, cudaStream_t stream) {
    StreamGemms all = {};
    if (!set_up_stream<R, SPLIT_K>(all, parts, count, m)) return cudaErrorInvalidValue;
    all.prefetch = prefetch;
    const int most = multiprocessors() * (R == 1 ? 2 : 1), columns = m <= 8 ? 1 : (m + 15) / 16;
    const dim3 grid(columns, all.tiles < most ? all.tiles : most);
    return m <= 8 ? launch(gemm_stream_kernel<1, R, SPLIT_K>, grid, STREAM_WARPS * WARP, 0, stream, all)
                  : launch(gemm_stream_kernel<2, R, SPLIT_K>, grid, STREAM_WARPS * WARP, 0, stream, all);
}
}  // namespace

extern "C" {
// warp_rows: rows of w that a warp takes, 16 or 32; every n must be at least that. split_k: how many of the 8
// warps of a block share one K, 8 or (for short K, with 16 rows) 2. prefetch: weights that the next kernel
// reads.
int rwkv_gemm_stream(const GemmPart* parts, int count, int m, int warp_rows, int split_k,
                     const char* prefetch, unsigned prefetch_bytes, cudaStream_t stream) {
    const Prefetch next = {prefetch, prefetch_bytes};
    if (split_k == 2) return run<1, 2>(parts, count, m, next, stream);
    return warp_rows == 32 ? run<2, 8>(parts, count, m, next, stream)
                           : run<1, 8>(parts, count, m, next, stream);
}
}
