// What RWKV-6 (x060) computes number by number between its GEMMs. Arithmetic is fp32.
//
//   rwkv_shift_mix: n [N, T, C] fp16, in place: x + (before - x) (offset + n), with x and before [T, C] and
//                   offset [N, C] fp16; before: of the token before
//   rwkv_gate:      y [n] fp16, in place: y sigmoid(g)
//
// Reference: mix of rwkv_batch/ops/torch_ops.py, torch.sigmoid. Binding: Kernels.shift_mix, Kernels.gate.
// Test: test/kernels/test_rwkv6_mix.py.
#include "norm.cuh"

namespace {
constexpr int THREADS = 256;

// 8 numbers a thread.
__global__ void shift_mix_kernel(__half* mixed, const __half* x, const __half* before, const __half* offsets,
                                 size_t vectors, int width_vectors) {
    const size_t i = size_t(blockIdx.x) * THREADS + threadIdx.x;
    Raw<8> now = {}, was = {}, amount = {}, offset = {};
    if (i < vectors) offset.load(offsets + (size_t(blockIdx.y) * width_vectors + i % width_vectors) * 8);
    wait_for_inputs();
    if (i >= vectors) return;
    __half* const own = mixed + (blockIdx.y * vectors + i) * 8;
    now.load(x + i * 8), was.load(before + i * 8), amount.load(own);
    float out[8];
#pragma unroll
    for (int j = 0; j < 8; j++) out[j] = now[j] + (was[j] - now[j]) * (offset[j] + amount[j]);
    store_half(own, out);
}

__global__ void gate_kernel(__half* y, const __half* gates, size_t vectors) {
    wait_for_inputs();
    const size_t i = size_t(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= vectors) return;
    Raw<8> value, gate;
    value.load(y + i * 8), gate.load(gates + i * 8);
    float out[8];
#pragma unroll
    for (int j = 0; j < 8; j++) out[j] = value[j] * sigmoid(gate[j]);
    store_half(y + i * 8, out);
}

unsigned blocks(size_t vectors) { return unsigned((vectors + THREADS - 1) / THREADS); }
}  // namespace

extern "C" {
// width: a multiple of 8.
int rwkv_shift_mix(__half* mixed, const __half* x, const __half* before, const __half* offsets, int count,
                   int tokens, int width, cudaStream_t stream) {
    const size_t vectors = size_t(tokens) * (width / 8);
    return launch(shift_mix_kernel, dim3(blocks(vectors), count), THREADS, 0, stream, mixed, x, before,
                  offsets, vectors, width / 8);
}

// count: a multiple of 8.
int rwkv_gate(__half* y, const __half* gates, size_t count, cudaStream_t stream) {
    return launch(gate_kernel, blocks(count / 8), THREADS, 0, stream, y, gates, count / 8);
}
}
