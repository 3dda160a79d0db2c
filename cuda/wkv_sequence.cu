// The recurrence of wkv.cuh over packed rows of any number of tokens, token after token: with states in fp32,
// or in fp16 and rounded behind every token, a token's results and state depend neither on the other rows nor
// on where a prompt is cut, bit for bit.
//
// Reference: wkv_step and readout of rwkv_batch/ops/torch_ops.py. Binding: Kernels.wkv_sequence. Test:
// test/kernels/test_wkv_sequence.py.
//
// It is for servers that ask for just that (--batch-invariant), and for drafts (KEPT): then the state behind
// each token goes into a slot of its own, so that what is refused needs no replay. Without ROUNDED, states of
// drafts that are fp16 are so rounded where they are kept, and not between tokens. wkv_prefill.cuh is faster
// for prompts, by tensor cores. wkv_decode.cuh is faster for rows of one token, and gives them the same bits
// with states as they are here; those that it has had are left out. A block has one head of a row, in
// registers from its first token to its last. Each warp prepares and finishes every fourth token of a tile.
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

// Rows behind that of the last of `tokens` do not count, nor do the first `left_out`, or `*counted` of them.
// One whose slot is negative is padding: no state is read or written, nor any output. ROUNDED: S is what fp16
// holds behind every token.
template <typename Number, bool KEPT, bool ROUNDED>
__global__ void LAUNCH_BOUNDS(THREADS, BLOCKS)
    wkv_sequence_kernel(const __grid_constant__ TimeMixInput in, int tokens,
                        const __grid_constant__ PackedRowsInput rows, int left_out, const int* counted) {
    // What a token of a prompt reads out is summed up while the next one goes on.
#ifdef __HIP__
    constexpr int UNDER_WAY = 1;  // clang does not unroll it
#else
    constexpr int UNDER_WAY = KEPT ? 1 : 2;
#endif
    __shared__ Tokens own;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, head = blockIdx.x;
    const bool mixes_v = in.mix != nullptr;
    const Single recurrence;
    const auto stays = [](int) {};  // in registers
    const Constants c = constants(in, head, lane);
    wait_for_inputs();
    const int count = rows.row_of[tokens - 1] + 1, begin_row = counted ? *counted : left_out;
    // Backwards: rows of many tokens come last.
    for (int row = count - 1 - int(blockIdx.y); row >= begin_row; row -= gridDim.y) {
        const int slot = rows.slots[row], first = rows.first[row], last = rows.last[row];
        if (slot < 0) continue;
        Number* const own_part =
            static_cast<Number*>(in.state) + size_t(head) * HEAD * HEAD + recurrence.first;
        Number* const state = own_part + size_t(slot) * in.slot_stride;
        float s[OWN][8];
#pragma unroll
        for (int n = 0; n < OWN; n++) {
            Raw8<Number> raw;
            raw.load(state + Single::offset(2 * n));
            raw.widen(s[n]);
        }
#pragma unroll 1
        for (int begin = first; begin <= last; begin += TOKENS) {
            // All are asked for before the first is waited for. Behind the last token it is read once more.
            Inputs asked[EACH];
#pragma unroll
            for (int i = 0; i < EACH; i++)
                if (!KEPT || begin + i * (THREADS / WARP) + warp <= last)  // drafts are short
                    asked[i] = inputs(in, min(begin + i * (THREADS / WARP) + warp, last), head, lane);
            __half2 gates[EACH];
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const int place = i * (THREADS / WARP) + warp;
                gates[i] = asked[i].g;
                if (begin + place > last) continue;
                Single::put(own.prepared[place], lane, prepare(asked[i], c, mixes_v), {});
            }
            __syncthreads();
            const int here = min(TOKENS, last - begin + 1);
#pragma unroll UNDER_WAY
            for (int place = 0; place < here; place++)
                if constexpr (KEPT) {
                    const int to = rows.kept[begin + place];
                    Number* const kept = own_part + size_t(to < 0 ? 0 : to) * in.slot_stride;
                    Single::move(own.prepared[place], s, own.y_of[place], stays, [&](int n) {
                        if (ROUNDED) round8(s[n]);
                        if (to >= 0) store8(kept + Single::offset(2 * n), s[n]);
                    });
                } else {
                    Single::move(own.prepared[place], s, own.y_of[place], stays, [&](int n) {
                        if (ROUNDED) round8(s[n]);
                    });
                }
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
        if constexpr (!KEPT)
#pragma unroll
            for (int n = 0; n < OWN; n++) store8(state + Single::offset(2 * n), s[n]);
    }
}
}  // namespace

extern "C" {
// tokens: of all rows, which are `most` at most. numbers: a StateNumbers; what lags is not read, and
// DEFERRED_HALF, which is not rounded between tokens, has no state but those that are kept. left_out: of the
// first rows, or as many as `counted` points to, if that is not null.
int rwkv_wkv_sequence(const TimeMixInput* in, int tokens, int most, const PackedRowsInput* rows, int numbers,
                      int left_out, const int* counted, cudaStream_t stream) {
    if (numbers == DEFERRED_HALF && !rows->kept) return cudaErrorInvalidValue;
    const int heads = in->width / HEAD;
    // As many blocks as are busy at once, a few times over.
    const int enough = (4 * BLOCKS * multiprocessors() + heads - 1) / heads;
    const auto kernel = numbers == SINGLE          ? rows->kept ? wkv_sequence_kernel<float, true, false>
                                                                : wkv_sequence_kernel<float, false, false>
                        : numbers == DEFERRED_HALF ? wkv_sequence_kernel<__half, true, false>
                        : rows->kept               ? wkv_sequence_kernel<__half, true, true>
                                                   : wkv_sequence_kernel<__half, false, true>;
    return launch(kernel, dim3(heads, most < enough ? most : enough), THREADS, 0, stream, *in, tokens, *rows,
                  left_out, counted);
}
}
