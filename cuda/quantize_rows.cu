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
// A block has a row. A thread holds what lane q of four has of each 64: of each 16 numbers along k those at
// 2 q, 2 q + 1, 2 q + 8 and 2 q + 9, which are 16 codes side by side.
#include "fp8_rows.cuh"

constexpr int MOST_PIECES = 4;  // of 16 codes that a thread holds
constexpr int MOST_THREADS = 1024;

template <int PIECES, bool SQUARE>
__global__ void LAUNCH_BOUNDS(MOST_THREADS, 1)
    quantize_rows_kernel(const __half* x, uint8_t* codes, float* scale, int k) {
#if HOPPER
    __shared__ float most[WARP];
    const size_t row = size_t(blockIdx.x) * k;
    const int pieces = k / 16, lane = threadIdx.x % WARP;
    wait_for_inputs();
    uint32_t pairs[PIECES][8];
    __half2 largest = __half2half2(__half(0.f));
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        const int piece = threadIdx.x + i * blockDim.x;
        if (piece >= pieces) continue;
        const uint32_t* const from = reinterpret_cast<const uint32_t*>(x + row) + piece / 4 * 32 + piece % 4;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            pairs[i][j] = SQUARE ? relu_square_pair(from[j * 4]) : from[j * 4];
            largest = __hmax2(largest, __habs2(reinterpret_cast<const __half2&>(pairs[i][j])));
        }
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
    for (int i = 0; i < PIECES; i++) {
        const int piece = threadIdx.x + i * blockDim.x;
        if (piece >= pieces) continue;
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            words[j] = fp8_pair(pairs[i][2 * j], factor) | fp8_pair(pairs[i][2 * j + 1], factor) << 16;
        *reinterpret_cast<uint4*>(codes + row + piece * 16) =
            make_uint4(words[0], words[1], words[2], words[3]);
    }
#endif
}

namespace {
template <bool SQUARE>
int run(const __half* x, uint8_t* codes, float* scale, int rows, int k, cudaStream_t stream) {
    const int pieces = k / 16;
    if (k % 64 || rows < 1 || pieces > MOST_PIECES * MOST_THREADS) return cudaErrorInvalidValue;
    const int of_thread = pieces <= MOST_THREADS ? 1 : MOST_PIECES,
              threads = (pieces + of_thread - 1) / of_thread, whole = (threads + WARP - 1) / WARP * WARP;
    const auto kernel =
        of_thread == 1 ? quantize_rows_kernel<1, SQUARE> : quantize_rows_kernel<MOST_PIECES, SQUARE>;
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
