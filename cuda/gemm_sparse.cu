// A GEMM for few rows without the weights of hidden units that are zero in all of them: the value projection
// of the channel mix.
//
//   h [M, K] fp16 (after relu squared), w [K, N] fp16: one run of N numbers for each hidden unit
//   M is 1, 2, 4 or 8, N a multiple of 64, K of 8
//   partials [P, M, N] fp32: sums over P parts of K; the kernel that reads them adds them up in order. P is
//   SPARSE_SPLITS, or on Hopper 1 (`together`)
//
// Reference: h @ w in torch. Binding: Kernels.gemm_sparse. Test: test/kernels/test_gemm_sparse.py.
//
// A block owns up to 256 columns and an eighth of K. It first lists its units that are not zero in some row,
// with their h of all rows. A warp then streams 64 columns of the weights of listed units, 16 units at a
// time, from memory straight into the operands of m16n8k16 mma instructions: two units' words, one half of
// each, make the pairs along k, and 16 columns the rows of the product. The warps of a block that have the
// same columns take groups of sixteen units in turn, so that every one is busy however few are active.
// On Hopper the eight blocks of a cluster may share columns, send their sums to each other and each add up an
// eighth of the columns: the norm that comes next has one partial sum to read instead of eight. With few
// columns clusters cost more than that.
// Sums are fp32: over a warp's sixteens in order, over the warps of a part of K in order, over the parts in
// order. A row's sums depend on the other rows only by the sixteens that its units fall into.
#include "gemm_sparse.cuh"

struct HalfUnits {
    using Number = __half;
    static constexpr int LANE_BITS = 3, STAGES = 4;
    static constexpr bool SCALED = false;

    static DEVICE uint32_t bits() { return 0; }

    // Neighbours are the two columns of an mma.
    static DEVICE void multiply(float (&acc)[4][4], const uint4 (&x)[4], uint32_t b0, uint32_t b1, uint32_t) {
        const auto two = [&](float (&c)[4], uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3) {
            mma(c, lower(w0, w1), upper(w0, w1), lower(w2, w3), upper(w2, w3), b0, b1);
        };
        two(acc[0], x[0].x, x[1].x, x[2].x, x[3].x), two(acc[1], x[0].y, x[1].y, x[2].y, x[3].y);
        two(acc[2], x[0].z, x[1].z, x[2].z, x[3].z), two(acc[3], x[0].w, x[1].w, x[2].w, x[3].w);
    }

    static DEVICE float4 four(const float (&acc)[4][4], int i, int r) {
        return make_float4(acc[2 * i][r], acc[2 * i][2 + r], acc[2 * i + 1][r], acc[2 * i + 1][2 + r]);
    }
};

extern "C" {
// Whether this GPU has the shared memory for it.
int rwkv_gemm_sparse_fits(int m, int k) { return sparse_fits<HalfUnits>(m, k); }

// m: 1, 2, 4 or 8. prefetch: weights that the next kernel reads.
int rwkv_gemm_sparse(const __half* h, const __half* w, float* partials, int m, int k, int n, int together,
                     const char* prefetch, unsigned prefetch_bytes, cudaStream_t stream) {
    return run_sparse<HalfUnits>(h, w, nullptr, partials, m, k, n, together, {prefetch, prefetch_bytes},
                                 stream);
}
}
