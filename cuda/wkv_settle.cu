// What steps have put off of states in fp16 (wkv.cuh) is done now: ahead of a prompt in these slots, and of whoever copies them.
//
//   S = S_ diag(1 - LOST) + VALUE KEY^T - REMOVED REMOVAL^T, in fp32, for all layers and heads of a slot whose record says BEHIND
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
    if (slot < 0 || !rows[size_t(slot) * ROW + BEHIND]) return;
    for (int i = blockIdx.x; i < count; i += BLOCKS) {
        __half* const state = states + size_t(slot) * slot_stride + size_t(i) * HEAD * HEAD + value * HEAD + key;
        const __half* const of = pending + size_t(slot) * pending_stride + size_t(i) * PENDING * HEAD;
        const float v = __half2float(of[VALUE * HEAD + value]), removed = __half2float(of[REMOVED * HEAD + value]);
#pragma unroll
        for (int part = 0; part < KEYS; part += 8) {
            Raw8<__half> raw[4];
            float s[8], lost[8], k[8], b[8];
            raw[0].load(state + part);
            raw[1].load(of + LOST * HEAD + key + part), raw[2].load(of + KEY * HEAD + key + part);
            raw[3].load(of + REMOVAL * HEAD + key + part);
            raw[0].widen(s), raw[1].widen(lost), raw[2].widen(k), raw[3].widen(b);
#pragma unroll
            for (int j = 0; j < 8; j++) s[j] = s[j] * (1.f - lost[j]) + (v * k[j] - removed * b[j]);
            store8(state + part, s);
        }
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
