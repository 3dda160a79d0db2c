// A matrix of codes as fp16, for the GEMM library: to[n, k] = w[n, k] times scale[n], rounded, or w[n, k].
//
//   w [N, K] in blocks of codes (codes.cuh): int8, fp8, fp6, fp5, int4 or nf4; scale [N] fp32, of all but the
//     last two
//   to [N, K] fp16, at most what fp16 holds; N a multiple of 16, K of 64
//
// Reference: Weight.dequantize of rwkv_batch/ops/weights. Binding: CodeKernels.decode_codes. Test:
// test/kernels/test_decode_codes.py.
//
// A warp takes a block of codes at a time, as gemm_codes.cu does, and writes what would be its operands.
#include "codes.cuh"

constexpr int WARPS = 8;
constexpr int BLOCKS_A_MULTIPROCESSOR = 8;

template <typename Format>
__global__ void LAUNCH_BOUNDS(WARPS* WARP, 4)
    decode_codes_kernel(const uint8_t* w, const float* scale, __half* to, int n, int k) {
    __shared__ uint32_t table[Format::TABLE ? Format::TABLE : 1];
    const int lane = threadIdx.x % WARP, steps = k / CODE_K, blocks = n / CODE_ROWS * steps;
    if constexpr (Format::TABLE != 0) {
        Format::fill(table);
        __syncthreads();
    }
    wait_for_inputs();  // which may read what is written here
    for (int block = blockIdx.x * WARPS + threadIdx.x / WARP; block < blocks; block += gridDim.x * WARPS) {
        typename Format::Held held;
        Format::load(held, w + Format::place(block, steps), block % steps, lane);
        uint32_t a[4][4];
        Format::operands(held, table, a);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = block / steps * CODE_ROWS + lane / 4 + half * 8;
            uint32_t found[8];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                found[i] = a[i / 2][i % 2 * 2 + half];
                if constexpr (Format::SCALED) {
                    const float2 numbers = to_float2(found[i]);
                    found[i] = to_finite_half2(numbers.x * scale[row], numbers.y * scale[row]);
                }
            }
            __half* own = to + size_t(row) * k + block % steps * CODE_K + lane % 4 * 16;
            store(own, found[0], found[1], found[2], found[3]);
            store(own + 8, found[4], found[5], found[6], found[7]);
        }
    }
}

namespace {
template <typename Format>
int run(const void* w, const float* scale, __half* to, int n, int k, cudaStream_t stream) {
    const int blocks = (n / CODE_ROWS * (k / CODE_K) + WARPS - 1) / WARPS,
              most = BLOCKS_A_MULTIPROCESSOR * multiprocessors();
    return launch(decode_codes_kernel<Format>, blocks < most ? blocks : most, WARPS * WARP, 0, stream,
                  static_cast<const uint8_t*>(w), scale, to, n, k);
}
}  // namespace

extern "C" {
// format: a CodeFormat; scale is for those of has_output_scales.
int rwkv_decode_codes(const void* w, const float* scale, __half* to, int n, int k, int format,
                      cudaStream_t stream) {
    if (n < CODE_ROWS || n % CODE_ROWS || k < CODE_K || k % CODE_K) return cudaErrorInvalidValue;
    switch (format) {
        case CODES_INT8: return run<codes::Int8>(w, scale, to, n, k, stream);
        case CODES_FP8: return run<codes::Fp8>(w, scale, to, n, k, stream);
        case CODES_INT4: return run<codes::Int4>(w, scale, to, n, k, stream);
        case CODES_NF4: return run<codes::Nf4>(w, scale, to, n, k, stream);
        case CODES_FP6: return run<codes::Fp6>(w, scale, to, n, k, stream);
        case CODES_FP5: return run<codes::Fp5>(w, scale, to, n, k, stream);
        case CODES_WIDE_INT4: return run<codes::WideInt4>(w, scale, to, n, k, stream);
    }
    return cudaErrorInvalidValue;
}
}
