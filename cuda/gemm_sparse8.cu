// The GEMM of gemm_sparse.cu with weights of 8 bits: of few rows, without the weights of hidden units that
// are zero in all of them.
//
//   h [M, K] fp16 (after relu squared), scale [N] fp32
//   w [K, N] codes, 128 more than a whole number: one run of N bytes for each hidden unit. Of each 16 columns
//   the first eight and the others take turns
//   M is 1, 2, 4 or 8, N a multiple of 64, K of 8
//   partials [P, M, N] fp32: sums over P parts of K, times the scale; the kernel that reads them adds them up
//   in order. P as of gemm_sparse.cu
//
// Reference: (h @ w) * scale in torch. Binding: Kernels.gemm_sparse8. Test:
// test/kernels/test_gemm_sparse8.py.
//
// As gemm_sparse.cu, but a warp has 128 columns, so that a lane still loads 16 bytes of a unit. Of two units
// the bytes of two columns take turns in a word, from which the operands of two rows of the product come as
// fp16, exactly; the scale is applied to the sums over all that the block adds up.
#include "gemm_sparse.cuh"
#include "int8_codes.cuh"

struct Int8Units {
    using Number = uint8_t;
    static constexpr int LANE_BITS = 4, STAGES = AMD_FORMS ? 3 : 4;  // AMD GPUs have no registers for four
    static constexpr bool SCALED = true;

    static DEVICE uint32_t bits() { return code_bits(); }

    // Columns i and i + 8 of a lane are the two of mma i.
    static DEVICE void multiply(float (&acc)[8][4], const uint4 (&x)[4], uint32_t b0, uint32_t b1,
                                uint32_t bits) {
        const auto two = [&](float (&c)[4], uint32_t first, uint32_t second) {  // along k, those 8 later
            mma(c, halves_of_codes<LOW_BYTES>(first, bits), halves_of_codes<HIGH_BYTES>(first, bits),
                halves_of_codes<LOW_BYTES>(second, bits), halves_of_codes<HIGH_BYTES>(second, bits), b0, b1);
        };
        const auto four = [&](int i, uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3) {
            two(acc[i], __byte_perm(w0, w1, 0x5140), __byte_perm(w2, w3, 0x5140));
            two(acc[i + 1], __byte_perm(w0, w1, 0x7362), __byte_perm(w2, w3, 0x7362));
        };
        four(0, x[0].x, x[1].x, x[2].x, x[3].x), four(2, x[0].y, x[1].y, x[2].y, x[3].y);
        four(4, x[0].z, x[1].z, x[2].z, x[3].z), four(6, x[0].w, x[1].w, x[2].w, x[3].w);
    }

    static DEVICE float4 four(const float (&acc)[8][4], int i, int r) {
        const int from = i % 2 * 4, at = i / 2 * 2 + r;
        return make_float4(acc[from][at], acc[from + 1][at], acc[from + 2][at], acc[from + 3][at]);
    }
};

extern "C" {
// Whether this GPU has the shared memory for it.
int rwkv_gemm_sparse8_fits(int m, int k) { return sparse_fits<Int8Units>(m, k); }

// m: 1, 2, 4 or 8. prefetch: weights that the next kernel reads.
int rwkv_gemm_sparse8(const __half* h, const uint8_t* w, const float* scales, float* partials, int m, int k,
                      int n, int together, const char* prefetch, unsigned prefetch_bytes,
                      cudaStream_t stream) {
    return run_sparse<Int8Units>(h, w, scales, partials, m, k, n, together, {prefetch, prefetch_bytes},
                                 stream);
}
}
