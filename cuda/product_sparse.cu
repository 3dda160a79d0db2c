// The channel mix's value product for few rows, without the weights of hidden units that are zero in all of them.
//
//   h [M, K] fp16 (after relu squared), w [K, N] fp16: one run of N numbers for each hidden unit, N a multiple of 64, M of 1, 2, 4 or 8
//   parts [P, M, N] fp32: sums over the P slices of K; the kernel that reads them adds them up in order
//
// A block owns 128 columns and one slice of K, its 32 warps a share of the slice each. A warp first lists its units that are not zero in
// some row, then streams their 256 bytes of w, eight units at a time. Sums are fp32: over a warp's units in order, over the warps in order.
#include "common.cuh"

constexpr int WARPS = 32;
constexpr int COLUMNS = 128;
constexpr int MOST_UNITS = 512;  // of a warp

template <int M>
__global__ void __launch_bounds__(WARPS * WARP) sparse_kernel(const __half* h, const __half* w, float* parts, int k, int n, int units,
                                                               Ahead ahead) {
    constexpr int IN_FLIGHT = 8;
    constexpr int AT_ONCE = M < 4 ? M : 4;
    __shared__ uint16_t active[WARPS][MOST_UNITS];
    extern __shared__ float sums[];  // [AT_ONCE][WARPS][COLUMNS]
    prefetch(ahead);
    wait_for_inputs();
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int begin = (blockIdx.y * WARPS + warp) * units, end = min(begin + units, k);
    int count = 0;
    for (int base = begin; base < end; base += WARP) {
        const int unit = base + lane;
        bool live = false;
#pragma unroll
        for (int m = 0; m < M; m++)
            if (unit < end) live |= __half2float(h[size_t(m) * k + unit]) != 0.f;
        const unsigned mask = __ballot_sync(ALL, live);
        if (live) active[warp][count + __popc(mask & ((1u << lane) - 1))] = uint16_t(unit - begin);
        count += __popc(mask);
    }
    __syncwarp();

    const int column = blockIdx.x * COLUMNS + lane * 4;
    const bool inside = column < n;
    float acc[M][4] = {};
    for (int base = 0; base < count; base += IN_FLIGHT) {
        uint2 wv[IN_FLIGHT];
        int unit[IN_FLIGHT];
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++) {
            unit[u] = begin + active[warp][min(base + u, count - 1)];
            wv[u] = make_uint2(0, 0);
            if (inside && base + u < count) wv[u] = __ldcs(reinterpret_cast<const uint2*>(w + size_t(unit[u]) * n + column));
        }
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; u++) {
            const float2 a = to_float2(wv[u].x), b = to_float2(wv[u].y);
#pragma unroll
            for (int m = 0; m < M; m++) {
                const float x = __half2float(h[size_t(m) * k + unit[u]]);
                acc[m][0] += x * a.x, acc[m][1] += x * a.y, acc[m][2] += x * b.x, acc[m][3] += x * b.y;
            }
        }
    }
#pragma unroll
    for (int first = 0; first < M; first += AT_ONCE) {
        if (first) __syncthreads();
#pragma unroll
        for (int m = 0; m < AT_ONCE; m++)
            *reinterpret_cast<float4*>(&sums[(m * WARPS + warp) * COLUMNS + lane * 4]) =
                make_float4(acc[first + m][0], acc[first + m][1], acc[first + m][2], acc[first + m][3]);
        __syncthreads();
        const int m = threadIdx.x / COLUMNS, c = threadIdx.x % COLUMNS;
        if (m < AT_ONCE && blockIdx.x * COLUMNS + c < n) {
            float sum = 0.f;
#pragma unroll
            for (int i = 0; i < WARPS; i++) sum += sums[(m * WARPS + i) * COLUMNS + c];
            parts[(size_t(blockIdx.y) * M + first + m) * n + blockIdx.x * COLUMNS + c] = sum;
        }
    }
}

namespace {
template <int M>
int run(const __half* h, const __half* w, float* parts, int k, int n, int slices, Ahead ahead, cudaStream_t stream) {
    constexpr size_t SHARED = (M < 4 ? M : 4) * WARPS * COLUMNS * sizeof(float);
    const cudaError_t allowed = cudaFuncSetAttribute(sparse_kernel<M>, cudaFuncAttributeMaxDynamicSharedMemorySize, int(SHARED));
    if (allowed != cudaSuccess) return allowed;
    const int units = (k + slices * WARPS - 1) / (slices * WARPS);
    if (units > MOST_UNITS) return cudaErrorInvalidValue;
    return launch(sparse_kernel<M>, dim3((n + COLUMNS - 1) / COLUMNS, slices), WARPS * WARP, SHARED, stream, h, w, parts, k, n, units,
                  ahead);
}
}  // namespace

extern "C" {
// m must be 1, 2, 4 or 8. ahead: weights to bring into the cache meanwhile.
int rwkv_product_sparse(const __half* h, const __half* w, float* parts, int m, int k, int n, int slices, const char* ahead,
                        unsigned ahead_bytes, cudaStream_t stream) {
    const Ahead next = {ahead, ahead_bytes};
    switch (m) {
        case 1: return run<1>(h, w, parts, k, n, slices, next, stream);
        case 2: return run<2>(h, w, parts, k, n, slices, next, stream);
        case 4: return run<4>(h, w, parts, k, n, slices, next, stream);
        case 8: return run<8>(h, w, parts, k, n, slices, next, stream);
        default: return cudaErrorInvalidValue;
    }
}
}
