// Flush: writes what decode steps have deferred for fp16 states (wkv.cuh), before a prefill of these slots
// and before they are copied.
//
//   S = S_ diag(1 - LOST) + VALUE KEY^T - REMOVED REMOVAL^T, in fp32, for each token that all layers and
//   heads of a slot lag
//
// Reference: wkv_step of rwkv_batch/ops/torch_ops.py, which defers nothing. Binding: Kernels.wkv_flush.
// Test: test/kernels/test_wkv_flush.py.
//
// A block takes one state after another of a row; a thread has 16 keys of a row of S.
#include "sequence_feed.cuh"
#include "wkv.cuh"

namespace {
constexpr int THREADS = 256, BLOCKS = 32;  // of a row
constexpr int KEYS = 16;                   // of a thread
static_assert(THREADS * KEYS == HEAD * HEAD);

__global__ void __launch_bounds__(THREADS)
    wkv_flush_kernel(const int* slots, const int* counted, const SequenceRecord* records, __half* states,
                     size_t slot_stride, const __half* deferred, size_t deferred_stride, int count) {
    wait_for_inputs();
    if (counted && int(blockIdx.y) >= *counted) return;
    const int slot = slots[blockIdx.y], value = threadIdx.x / (HEAD / KEYS),
              key = threadIdx.x % (HEAD / KEYS) * KEYS;
    const int lag = slot < 0 ? 0 : records[slot].lag;
    if (lag == 0) return;
    for (int i = blockIdx.x; i < count; i += BLOCKS) {
        __half* const state =
            states + size_t(slot) * slot_stride + size_t(i) * HEAD * HEAD + value * HEAD + key;
        Raw8<__half> raw;
        float s[KEYS / 8][8], x[3][8];
#pragma unroll
        for (int part = 0; part < KEYS / 8; part++) raw.load(state + part * 8), raw.widen(s[part]);
        for (int token = 0; token < lag; token++) {
            const __half* const vectors = deferred + size_t(slot) * deferred_stride +
                                          size_t(i * MAX_LAG + token) * DEFERRED_VECTORS * HEAD;
            const float v = __half2float(vectors[VALUE * HEAD + value]),
                        removed = __half2float(vectors[REMOVED * HEAD + value]);
#pragma unroll
            for (int part = 0; part < KEYS / 8; part++) {
                const int at = key + part * 8;
                raw.load(vectors + LOST * HEAD + at), raw.widen(x[0]);
                raw.load(vectors + KEY * HEAD + at), raw.widen(x[1]);
                raw.load(vectors + REMOVAL * HEAD + at), raw.widen(x[2]);
#pragma unroll
                for (int j = 0; j < 8; j++)
                    s[part][j] = s[part][j] * (1.f - x[0][j]) + (v * x[1][j] - removed * x[2][j]);
            }
        }
#pragma unroll
        for (int part = 0; part < KEYS / 8; part++) store8(state + part * 8, s[part]);
    }
}

// A kernel of its own, as all blocks of the other read what it writes.
__global__ void reset_lag_kernel(const int* slots, const int* counted, int most, SequenceRecord* records) {
    wait_for_inputs();
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < (counted ? *counted : most) && slots[i] >= 0) records[slots[i]].lag = 0;
}
}  // namespace

extern "C" {
// slots [most], negative for none; only the first `*counted` of them if `counted` is not null. count: states
// of a slot, which lie side by side, as does what is deferred for them. Strides are in numbers.
int rwkv_wkv_flush(const int* slots, const int* counted, int most, SequenceRecord* records, __half* states,
                   size_t slot_stride, const __half* deferred, size_t deferred_stride, int count,
                   cudaStream_t stream) {
    if (const int error = launch(wkv_flush_kernel, dim3(BLOCKS, most), THREADS, 0, stream, slots, counted,
                                 records, states, slot_stride, deferred, deferred_stride, count))
        return error;
    return launch(reset_lag_kernel, (most + THREADS - 1) / THREADS, THREADS, 0, stream, slots, counted, most,
                  records);
}
}
