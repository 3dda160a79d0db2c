// GEMMs with weights of 8 bits on Hopper, up to three of one shape in one launch: y[m, n] = f(scale[n] times
// the sum over k of x[m, k] w[n, k]).
//
//   w: [N/64, K/64] tiles of 64 rows of 64 codes, int8 (128 more than the number) or fp8 (e4m3, no NaN)
//   scale [N] fp32; x [M, K] fp16; y [M, N] fp16; N and K multiples of 64; any M
//   f: identity, or relu squared (at most what fp16 holds)
//
// Reference: f((x @ w.T) * scale) in torch. Binding: Kernels.gemm_tile8. Test:
// test/kernels/test_gemm_tile8.py. Only sm_90a; elsewhere the launcher returns cudaErrorNotSupported.
//
// As gemm_tile.cu, but w goes through registers, where codes become fp16, exactly: int8 as 1024 + code in the
// digits of an fp16, less 1152; fp8 by the instruction for it. For this the 64 codes of a row of a tile lie
// in the order in which lanes need them: of each four lanes lane q has 16 side by side, of each 16 numbers
// along k those at 2 q, 2 q + 1, 2 q + 8 and 2 q + 9.
//
// Sums are fp32: over k inside a part in order, then over the parts in order, then times the scale. The same
// split-K gives the same result for a row, whatever the other rows are and however many.
#include "gemm_tile_kernel.cuh"

struct Int8Codes {
    static constexpr int BYTES = 1;
    static constexpr bool TRANSPOSED = false, CODES = true;

    template <int HIGH>
    static __device__ __forceinline__ uint32_t halves(uint32_t word) {
        const uint32_t pair = __byte_perm(word, 0x64646464, HIGH ? 0x4342 : 0x4140);
        const __half2 bias = __half2half2(__ushort_as_half(0x6480));  // 1152
        const __half2 numbers = __hsub2(reinterpret_cast<const __half2&>(pair), bias);
        return reinterpret_cast<const uint32_t&>(numbers);
    }
};

struct Fp8Codes {
    static constexpr int BYTES = 1;
    static constexpr bool TRANSPOSED = false, CODES = true;

    template <int HIGH>
    static __device__ __forceinline__ uint32_t halves(uint32_t word) {
        uint32_t numbers;
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(numbers) : "h"(uint16_t(HIGH ? word >> 16 : word)));
        return numbers;
    }
};

extern "C" {
// fp8: what the codes are, else int8.
int rwkv_gemm_tile8(const void* const* w, const void* const* scale, const void* const* x, void* const* y,
                    int count, int m, int n, int k, int fp8, int square, const TileShape* shape,
                    cudaStream_t stream) {
    if (!on_hopper()) return cudaErrorNotSupported;
    TileGemms p = {};
    if (!set_up(p, x, y, count, m, n, k, square, *shape)) return cudaErrorInvalidValue;
    for (int i = 0; i < count; i++)
        p.codes[i] = static_cast<const uint8_t*>(w[i]), p.scales[i] = static_cast<const float*>(scale[i]);
    return fp8 ? launch_tiles<Fp8Codes>(p, shape->x_rows, count, stream)
               : launch_tiles<Int8Codes>(p, shape->x_rows, count, stream);
}
}
