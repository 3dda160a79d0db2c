// What steps have put off of states in fp16 (wkv.cuh) is done now: ahead of a prompt in these slots, and of whoever copies them.
//
//   S = S_ diag(1 - LOST) + VALUE KEY^T - REMOVED REMOVAL^T, in fp32, for each token that all layers and heads of a slot are behind
//
// A block takes one state after another of a row; a thread has 16 keys of a row of S.
#include "feed.cuh"
#include "wkv.cuh"

namespace {
constexpr int THREADS = 256, BLOCKS = 32;  // of a row
constexpr int KEYS = 16;                   // of a thread
static_assert(THREADS * KEYS == HEAD * HEAD);

__global__ void __launch_bounds__(THREADS)
    settle_kernel(const int* slots, const int* counted, const int* rows, __half* states, size_t slot_stride, const __half* pending,
                  size_t pending_stride, int count) {
    wait_for_inputs();
    if (counted && int(blockIdx.y) >= *counted) return;
    const int slot = slots[blockIdx.y], value = threadIdx.x / (HEAD / KEYS), key = threadIdx.x % (HEAD / KEYS) * KEYS;
    const int behind = slot < 0 ? 0 : rows[size_t(slot) * ROW + BEHIND];
    if (behind == 0) return;
    for (int i = blockIdx.x; i < count; i += BLOCKS) {
        __half* const state = states + size_t(slot) * slot_stride + size_t(i) * HEAD * HEAD + value * HEAD + key;
        Raw8<__half> raw;
        float s[KEYS / 8][8], x[3][8];
#pragma unroll
        for (int part = 0; part < KEYS / 8; part++) raw.load(state + part * 8), raw.widen(s[part]);
        for (int token = 0; token < behind; token++) {
            const __half* const of = pending + size_t(slot) * pending_stride + size_t(i * LATE + token) * PENDING * HEAD;
            const float v = __half2float(of[VALUE * HEAD + value]), removed = __half2float(of[REMOVED * HEAD + value]);
#pragma unroll
            for (int part = 0; part < KEYS / 8; part++) {
                const int at = key + part * 8;
                raw.load(of + LOST * HEAD + at), raw.widen(x[0]);
                raw.load(of + KEY * HEAD + at), raw.widen(x[1]);
                raw.load(of + REMOVAL * HEAD + at), raw.widen(x[2]);
#pragma unroll
                for (int j = 0; j < 8; j++) s[part][j] = s[part][j] * (1.f - x[0][j]) + (v * x[1][j] - removed * x[2][j]);
            }
        }
#pragma unroll
        for (int part = 0; part < KEYS / 8; part++) store8(state + part * 8, s[part]);
    }
}

// Apart from the other, whose blocks all read what this one writes.
__global__ void settled_kernel(const int* slots, const int* counted, int most, int* rows) {
    wait_for_inputs();
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < (counted ? *counted : most) && slots[i] >= 0) rows[size_t(slots[i]) * ROW + BEHIND] = 0;
}
}  // namespace

extern "C" {
// Of slots [most], negative for none, or of as many of them as stand at `counted`: `count` states each, which lie side by side, as does
// what has been put off of them. Strides are in numbers.
int rwkv_wkv_settle(const int* slots, const int* counted, int most, int* rows, __half* states, size_t slot_stride, const __half* pending,
                    size_t pending_stride, int count, cudaStream_t stream) {
    if (const int error = launch(settle_kernel, dim3(BLOCKS, most), THREADS, 0, stream, slots, counted, rows, states, slot_stride, pending,
                                 pending_stride, count))
        return error;
    return launch(settled_kernel, (most + THREADS - 1) / THREADS, THREADS, 0, stream, slots, counted, most, rows);
}
}
