// What the kernels for products share: y[m, n] = f(sum over k of x[m, k] w[n, k]).
#pragma once
#include "common.cuh"

constexpr int MOST_PARTS = 8;  // products in one launch

enum Function { IDENTITY = 0, TANH = 1, SIGMOID = 2, RELU_SQUARE = 3 };

struct Product {
    const __half* w;
    const __half* x;
    __half* y;
    int n, k;
    int function;
};

__device__ __forceinline__ float apply(float x, int function) {
    if (function == TANH) return 1.f - 2.f / (1.f + __expf(2.f * x));
    if (function == SIGMOID) return sigmoid(x);
    if (function == RELU_SQUARE) {
        x = fmaxf(x, 0.f);
        return fminf(x * x, 65504.f);  // no more than fp16 holds
    }
    return x;
}
