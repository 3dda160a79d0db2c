// What the GEMM kernels share: y[m, n] = f(sum over k of x[m, k] w[n, k]).
#pragma once
#include "common.cuh"

constexpr int SPARSE_SPLITS = 8;  // parts of K in gemm_sparse.cuh

// f, in the epilogue.
enum Activation { IDENTITY = 0, TANH = 1, SIGMOID = 2, RELU_SQUARE = 3 };

// One of several GEMMs in a launch.
struct GemmPart {
    const __half* w;
    const __half* x;
    __half* y;
    int n, k;
    int activation;
};

__device__ __forceinline__ float activate(float x, int activation) {
    if (activation == TANH) return 1.f - 2.f / (1.f + __expf(2.f * x));
    if (activation == SIGMOID) return sigmoid(x);
    return activation == RELU_SQUARE ? relu_square(x) : x;
}
