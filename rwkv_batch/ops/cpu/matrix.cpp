// The product with a matrix of any kind. Test: test/unit/test_cpu_products.py.

#include "matrix.h"

extern "C" bool product(const Matrix* matrix, const float* x, float* y, int64_t rows, int activation,
                        int threads) {
    const Matrix& m = *matrix;
    switch (m.kind) {
        case FP32:
            return product_fp32(x, m.weights, m.bias, y, rows, m.inputs, m.outputs, activation, threads);
        case FP16:
            return product_fp16(x, m.weights, m.bias, y, rows, m.inputs, m.outputs, activation, threads);
        case INT8:
            return product_int8(x, m.weights, m.scales, m.totals, m.bias, y, rows, m.inputs, m.outputs,
                                activation, threads);
        case FP8:
            return product_fp8(x, m.weights, m.scales, m.bias, y, rows, m.inputs, m.outputs, activation,
                               threads);
        case INT4:
            return product_int4(x, m.weights, m.bias, y, rows, m.inputs, m.outputs, m.group, activation,
                                threads);
        case NF4:
            return product_nf4(x, m.weights, m.bias, y, rows, m.inputs, m.outputs, m.group, activation,
                               threads);
    }
    return true;
}
