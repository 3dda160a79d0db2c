// The recurrence of wkv.cuh over packed rows of any number of tokens, with states in fp32, token after token:
// a token's results and state depend neither on the other rows nor on where a prompt is cut, bit for bit.
//
// Reference: wkv_step and readout of rwkv_batch/ops/torch_ops.py. Binding: Kernels.wkv_sequence. Test:
// test/kernels/test_wkv_sequence.py.
//
// It is for servers that ask for just that (--batch-invariant). wkv_prefill.cuh is faster for prompts, by
// tensor cores, and wkv_decode.cuh for rows of one token. A block has one head of a row, in registers from
// its first token to its last. Each warp prepares and finishes every fourth token of a tile.
#include "norm.cuh"
#include "wkv_single.cuh"

namespace {
constexpr int TOKENS = 16;  // of a row that are in shared memory together
constexpr int BLOCKS = 4;   // that fit on a multiprocessor
constexpr int EACH = TOKENS / (THREADS / WARP);

struct Tokens {
    Single::Token prepared[TOKENS];
    alignas(16) float y_of[TOKENS][HEAD];
};

// Rows behind that of the last of `tokens` do not count. One whose slot is negative is padding: no state is
// read or written, nor any output.
__global__ void LAUNCH_BOUNDS(THREADS, BLOCKS)
    wkv_sequence_kernel(const __grid_constant__ TimeMixInput in, int tokens,
                        const __grid_constant__ PackedRowsInput rows) {
    __shared__ Tokens own;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, head = blockIdx.x;
    const bool mixes_v = in.mix != nullptr;
    const Single recurrence;
    const auto stays = [](int) {};  // in registers
    const Constants c = constants(in, head, lane);
    wait_for_inputs();
    const int count = rows.row_of[tokens - 1] + 1;
    // Backwards: rows of many tokens come last.
    for (int row = count - 1 - int(blockIdx.y); row >= 0; row -= gridDim.y) {
        const int slot = rows.slots[row], first = rows.first[row], last = rows.last[row];
        if (slot < 0) continue;
        float* const state = static_cast<float*>(in.state) + size_t(slot) * in.slot_stride +
                             size_t(head) * HEAD * HEAD + recurrence.first;
        float s[OWN][8];
#pragma unroll
        for (int n = 0; n < OWN; n++) {
            Raw8<float> raw;
            raw.load(state + Single::offset(2 * n));
            raw.widen(s[n]);
        }
#pragma unroll 1
        for (int begin = first; begin <= last; begin += TOKENS) {
            __half2 gates[EACH];
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const int place = i * (THREADS / WARP) + warp;
                if (begin + place > last) continue;
                const Inputs x = inputs(in, begin + place, head, lane);
                gates[i] = x.g;
                Single::put(own.prepared[place], lane, prepare(x, c, mixes_v), {});
            }
            __syncthreads();
            const int here = min(TOKENS, last - begin + 1);
#pragma unroll 1
            for (int place = 0; place < here; place++)
                Single::move(own.prepared[place], s, own.y_of[place], stays, stays);
            __syncthreads();
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const int place = i * (THREADS / WARP) + warp;
                if (begin + place > last) continue;
                const auto& token = own.prepared[place];
                finish<false>(in, {}, {c.weight, c.bias, gates[i]}, begin + place, head, lane,
                              Single::own(token), Single::value(token, lane), own.y_of[place]);
            }
            sync_warp();  // lane 0 writes over what all lanes have read
        }
#pragma unroll
        for (int n = 0; n < OWN; n++) store8(state + Single::offset(2 * n), s[n]);
    }
}
}  // namespace

extern "C" {
// tokens: of all rows, which are `most` at most; states are fp32.
int rwkv_wkv_sequence(const TimeMixInput* in, int tokens, int most, const PackedRowsInput* rows,
                      cudaStream_t stream) {
    const int heads = in->width / HEAD;
    // As many blocks as are busy at once, a few times over.
    const int enough = (4 * BLOCKS * multiprocessors() + heads - 1) / heads;
    return launch(wkv_sequence_kernel, dim3(heads, most < enough ? most : enough), THREADS, 0, stream, *in,
                  tokens, *rows);
}
}
