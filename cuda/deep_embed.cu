// DeepEmbed of RWKV-7a between its GEMMs: hidden units times ((x inner) E) outer + offset, where E [32, 32]
// is the token's own.
//
//   rwkv_deep_embed:  out [T, 32] fp16 = q [T, 32] E, with E row tokens[t] of the table [V, 1024] fp16
//   rwkv_deep_scale:  hidden [T, F] fp16, in place: hidden (offset + factor), at most what fp16 holds; offset
//                     [F], factor [T, F] fp16
//
// Sums are fp32, over 32 numbers in order. Zero times a factor stays zero, so that inactive units can still
// be skipped.
//
// Reference: torch.bmm, and products in torch. Binding: Kernels.deep_embed, Kernels.deep_scale. Test:
// test/kernels/test_deep_embed.py.
#include "norm.cuh"

namespace {
constexpr int THREADS = 256, RANK = 32;
static_assert(RANK == WARP);

// A warp has a token; a lane, a column of E.
__global__ void deep_embed_kernel(const __half* q, const __half* table, const int* tokens, int count,
                                  __half* out) {
    wait_for_inputs();
    const int token = (blockIdx.x * THREADS + threadIdx.x) / WARP, lane = threadIdx.x % WARP;
    if (token >= count) return;
    const __half* const matrix = table + size_t(tokens[token]) * RANK * RANK + lane;
    const float own = __half2float(q[token * RANK + lane]);
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < RANK; i++) sum += shuffle(own, i) * __half2float(matrix[i * RANK]);
    out[token * RANK + lane] = __float2half_rn(sum);
}

// 8 numbers a thread.
__global__ void deep_scale_kernel(__half* hidden, const __half* factors, const __half* offsets,
                                  size_t vectors, int width_vectors) {
    const size_t i = size_t(blockIdx.x) * THREADS + threadIdx.x;
    Raw<8> offset = {}, unit, factor;
    if (i < vectors) offset.load(offsets + i % width_vectors * 8);
    wait_for_inputs();
    if (i >= vectors) return;
    unit.load(hidden + i * 8), factor.load(factors + i * 8);
    uint32_t pairs[4];
#pragma unroll
    for (int j = 0; j < 4; j++)
        pairs[j] = to_finite_half2(unit[2 * j] * (offset[2 * j] + factor[2 * j]),
                                   unit[2 * j + 1] * (offset[2 * j + 1] + factor[2 * j + 1]));
    store(hidden + i * 8, pairs[0], pairs[1], pairs[2], pairs[3]);
}
}  // namespace

extern "C" {
int rwkv_deep_embed(const __half* q, const __half* table, const int* tokens, int count, __half* out,
                    cudaStream_t stream) {
    const int rows = THREADS / WARP;
    return launch(deep_embed_kernel, (count + rows - 1) / rows, THREADS, 0, stream, q, table, tokens, count,
                  out);
}

// units: of a token, a multiple of 8.
int rwkv_deep_scale(__half* hidden, const __half* factors, const __half* offsets, int tokens, int units,
                    cudaStream_t stream) {
    const size_t vectors = size_t(tokens) * (units / 8);
    return launch(deep_scale_kernel, unsigned((vectors + THREADS - 1) / THREADS), THREADS, 0, stream, hidden,
                  factors, offsets, vectors, units / 8);
}
}
