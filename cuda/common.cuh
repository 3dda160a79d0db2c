// What all kernels share: waiting for the kernel before, conversions, reductions, prefetches of weights.
//
// Every function that Python calls is extern "C", takes raw device pointers and a stream, and returns a
// cudaError_t as an int.
#pragma once
#include "vendor.cuh"

constexpr float MAX_HALF = 65504.f;

// Programmatic dependent launch. A kernel launched with `launch` may start while the one before it still
// runs. Until `wait_for_inputs` it may read only what was finished at least two kernels earlier (weights, the
// states). The next kernel may start right after that, so no more than two kernels ever overlap.
//
// next_at_once: the next kernel may start before that, so that three overlap. Until it waits, it may read
// only what was finished at least three kernels earlier; behind two such kernels in a row, four.
__device__ __forceinline__ void wait_for_inputs(bool next_at_once = false) {
    if (next_at_once) grid_dependency_launch();
    grid_dependency_wait();
    grid_dependency_launch();
}

inline int multiprocessors() {
    int device = 0, count = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    return count;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) x += shuffle_xor(x, offset);
    return x;
}

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + __expf(-x)); }

__device__ __forceinline__ float2 to_float2(uint32_t pair) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

__device__ __forceinline__ uint32_t to_half2(float x, float y) {
    const __half2 pair = __floats2half2_rn(x, y);
    return *reinterpret_cast<const uint32_t*>(&pair);
}

// At most what fp16 holds.
__device__ __forceinline__ float relu_square(float x) {
    x = fmaxf(x, 0.f);
    return fminf(x * x, MAX_HALF);
}
__device__ __forceinline__ uint32_t relu_square_pair(uint32_t pair) {
    const float2 x = to_float2(pair);
    return to_half2(relu_square(x.x), relu_square(x.y));
}

// Weights that one of the next kernels reads. A kernel that leaves memory idle brings them into the L2 cache.
struct Prefetch {
    const char* from;
    unsigned bytes;  // a multiple of 16
};

// This block's share of them, which thread `thread` of `threads` divide.
__device__ __forceinline__ void prefetch(const Prefetch& weights, unsigned thread, unsigned threads) {
    if constexpr (PREFETCHES) {
        const unsigned blocks = gridDim.x * gridDim.y, block = blockIdx.y * gridDim.x + blockIdx.x,
                       piece = 16 * 1024;
        for (unsigned i = block + thread * blocks; i < (weights.bytes + piece - 1) / piece;
             i += blocks * threads)
            prefetch_l2(weights.from + i * piece, min(piece, weights.bytes - i * piece));
    }
}

// All of its threads do.
__device__ __forceinline__ void prefetch(const Prefetch& weights) {
    prefetch(weights, threadIdx.x, blockDim.x);
}
