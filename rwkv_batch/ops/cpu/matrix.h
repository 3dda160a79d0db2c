// The weights of a product as records that Python fills, and the functions of other files that take them.

#pragma once

#include <cstdint>

// In the order of ACTIVATIONS in rwkv_batch/ops/cpu/records.py: y, max(0, y)^2, tanh y, 1 / (1 + e^-y).
enum Activation { IDENTITY, SQUARED, TANH, SIGMOID };

// In the order of KINDS there.
enum Kind { FP32, FP16, INT8, FP8, INT4, NF4 };

struct Matrix {  // [outputs, inputs] and a bias, as rwkv_batch/ops/cpu/products.py packs them
    const void* weights;
    const float* scales;    // of int8 and fp8, else null
    const int32_t* totals;  // of int8, else null
    const float* bias;
    int64_t inputs, outputs;
    int64_t group;  // inputs that have a scale together, of 4 bits
    int64_t kind;
};
static_assert(sizeof(Matrix) == 64, "as in rwkv_batch/ops/cpu/records.py");

extern "C" {
// y [rows, outputs] = activation(x W^T + bias) for x [rows, inputs]. threads: as many as may be used.
// Returns whether there is memory for it, as all do that return something; if not, y is not written.
bool product(const Matrix* matrix, const float* x, float* y, int64_t rows, int activation, int threads);

bool product_fp32(const float* x, const void* weights, const float* bias, float* y, int64_t rows,
                  int64_t inputs, int64_t outputs, int activation, int threads);
bool product_fp16(const float* x, const void* weights, const float* bias, float* y, int64_t rows,
                  int64_t inputs, int64_t outputs, int activation, int threads);
bool product_int8(const float* x, const void* weights, const float* scales, const int32_t* totals,
                  const float* bias, float* y, int64_t rows, int64_t inputs, int64_t outputs, int activation,
                  int threads);
bool product_fp8(const float* x, const void* weights, const float* scales, const float* bias, float* y,
                 int64_t rows, int64_t inputs, int64_t outputs, int activation, int threads);
bool product_int4(const float* x, const void* weights, const float* bias, float* y, int64_t rows,
                  int64_t inputs, int64_t outputs, int64_t group, int activation, int threads);
bool product_nf4(const float* x, const void* weights, const float* bias, float* y, int64_t rows,
                 int64_t inputs, int64_t outputs, int64_t group, int activation, int threads);

bool mix(const float* x, const float* added, const float* weight, const float* bias, const float* amounts,
         float* sum, float* normed, float* out, float* shift, const int64_t* ends, const int64_t* kept,
         const int64_t* slots, int64_t slot_stride, int64_t rows, int64_t tokens, int64_t width,
         int64_t mixes, int threads);
void wkv7(const float* r, const float* w, const float* k, const float* v, const float* a, const float* g,
          const float* v_mix, const float* v_first, const float* k_k, const float* k_a, const float* k_rest,
          const float* r_k, const float* weight, const float* bias, const float* scales, float* out,
          float* states, const int64_t* begins, const int64_t* ends, const int64_t* kept,
          const int64_t* slots, int64_t slot_stride, int64_t rows, int64_t width, int threads);
}
