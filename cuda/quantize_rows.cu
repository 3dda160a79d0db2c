// Rows of fp16 as fp8 (e4m3) with a scale each: x[m, k] is about scale[m] codes[m, k], the largest of a row
// scale times 448.
//
//   x [M, K] fp16, K a multiple of 64; codes [M, K] fp8, each 64 of a row in the order of gemm_tile8.cu;
//   scale [M] fp32, 0 for a row of zeros
//   SQUARE: relu(x)^2 in place of x, at most what fp16 holds and rounded to it, as of gemm_relu_square.cu
//
// Reference: scale = max(|x|) / 448, (x / scale) to float8_e4m3fn in torch. Binding: Kernels.quantize_rows.
// Test: test/kernels/test_quantize_rows.py. Only sm_90a; elsewhere the launcher returns
// cudaErrorNotSupported.
//
// A block has a row, of which a thread holds some eights of neighbours.
#include "fp8_rows.cuh"

constexpr int MOST_EIGHTS = 8;  // that a thread holds
constexpr int MOST_THREADS = 1024;
constexpr int FEW_THREADS = 256;  // of a block, if that is enough for four eights each

template <int EIGHTS, bool SQUARE>
__global__ void LAUNCH_BOUNDS(MOST_THREADS, 1)
    quantize_rows_kernel(const __half* x, uint8_t* codes, float* scale, int k) {
#if HOPPER
    __shared__ float most[WARP];
    const size_t row = size_t(blockIdx.x) * k;
    const int lane = threadIdx.x % WARP;
    wait_for_inputs();
    uint32_t pairs[EIGHTS][4] = {};
    const auto column = [&](int i) { return int(threadIdx.x + i * blockDim.x) * 8; };
#pragma unroll
    for (int i = 0; i < EIGHTS; i++)
        if (column(i) < k) {
            const uint4 four = *reinterpret_cast<const uint4*>(x + row + column(i));
            pairs[i][0] = four.x, pairs[i][1] = four.y, pairs[i][2] = four.z, pairs[i][3] = four.w;
        }
    __half2 largest = __half2half2(__half(0.f));
#pragma unroll
    for (int i = 0; i < EIGHTS; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (SQUARE) pairs[i][j] = relu_square_pair(pairs[i][j]);
            largest = __hmax2(largest, __habs2(reinterpret_cast<const __half2&>(pairs[i][j])));
        }
    const float2 two = __half22float2(largest);
    float top = fmaxf(two.x, two.y);
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) top = fmaxf(top, shuffle_xor(top, offset));
    if (lane == 0) most[threadIdx.x / WARP] = top;
    __syncthreads();
    top = lane < blockDim.x / WARP ? most[lane] : 0.f;
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) top = fmaxf(top, shuffle_xor(top, offset));
    const float factor = fp8_factor(top);
    if (threadIdx.x == 0) scale[blockIdx.x] = fp8_scale(top);
#pragma unroll
    for (int i = 0; i < EIGHTS; i++) store_fp8(codes + row, column(i), pairs[i], factor, column(i) < k);
#endif
}

namespace {
template <bool SQUARE>
int run(const __half* x, uint8_t* codes, float* scale, int rows, int k, cudaStream_t stream) {
    const int eights = k / 8;
    if (k % 64 || rows < 1 || eights > MOST_EIGHTS * MOST_THREADS) return cudaErrorInvalidValue;
    // Blocks of more threads are fewer on a multiprocessor, so that rows wait for others.
    const int of_thread = eights <= 4 * WARP ? 1 : eights <= 4 * FEW_THREADS ? 4 : MOST_EIGHTS;
    const int threads = (eights + of_thread - 1) / of_thread, whole = (threads + WARP - 1) / WARP * WARP;
    const auto kernel = of_thread == 1   ? quantize_rows_kernel<1, SQUARE>
                        : of_thread == 4 ? quantize_rows_kernel<4, SQUARE>
                                         : quantize_rows_kernel<MOST_EIGHTS, SQUARE>;
    return launch(kernel, rows, whole, 0, stream, x, codes, scale, k);
}
}  // namespace

extern "C" {
int rwkv_quantize_rows(const __half* x, uint8_t* codes, float* scale, int rows, int k, int square,
                       cudaStream_t stream) {
    if (!on_hopper()) return cudaErrorNotSupported;
    return (square ? run<true> : run<false>)(x, codes, scale, rows, k, stream);
}
}
