// What precedes the products of a time mix or channel mix: the residual sum, its layer norm, and the token
// shift.
//
//     sum = x + added,  normed = layer norm of sum,  out[i] = normed + (the normed token before it - normed)
//     amounts[i]
//
// The token before the first of a row is in its slot, which is moved on to the last one before `kept`. All in
// fp32.
// Reference: Norm of rwkv_batch/model/tensors/description.py, token_shift and mix of
// rwkv_batch/ops/torch_ops.py. Test: test/unit/test_cpu_kernels.py. A token's numbers depend on nothing but
// it and the token before it.

#include <cmath>
#include <cstdlib>

#include "vector.h"

namespace {

struct Mix {
    const float *x, *added;      // [tokens, width]; added: null where nothing is
    const float *weight, *bias;  // [width], of the layer norm
    const float* amounts;        // [mixes, width]
    float *sum, *normed,
        *out;      // [tokens, width], the last [mixes, tokens, width]; sum as added, normed may be null
    float* shift;  // of slot 0: [width]
    const float* before;                 // [rows, width]: what the slots held
    float* memory;                       // [threads, room_of_thread(width)]
    const int64_t *ends, *kept, *slots;  // [rows]: where a row's tokens end, those for the slot do, the slot
    int64_t slot_stride;                 // floats from slot to slot
    int64_t rows, tokens, width, mixes;
};

// Floats in which a thread keeps two normed tokens, and a line of the cache that no other one writes.
INLINE int64_t room_of_thread(int64_t width) { return 2 * width + 16; }

INLINE Vec residual(const Mix* job, int64_t at) {
    return job->added ? load(job->x + at) + load(job->added + at) : load(job->x + at);
}

// The layer norm of a token's residual sum.
void norm(const Mix* job, int64_t token, float* to) {
    Vec total = {}, squares = {};
    for (int64_t c = 0; c < job->width; c += LANES) {
        const Vec x = residual(job, token * job->width + c);
        store(to + c, x);
        total += x;
    }
    const float mean = sum(total) / job->width;
    for (int64_t c = 0; c < job->width; c += LANES) {
        const Vec x = load(to + c) - mean;
        squares += x * x;
    }
    const float scale = 1.0f / sqrtf(sum(squares) / job->width + 1e-5f);
    for (int64_t c = 0; c < job->width; c += LANES)
        store(to + c, (load(to + c) - mean) * scale * load(job->weight + c) + load(job->bias + c));
}

void run(const void* argument) {
    const Mix* job = static_cast<const Mix*>(argument);
    int64_t token, end, row = 0;
    share(job->tokens, &token, &end);
    if (token == end) return;
    const int64_t width = job->width;
    float* const memory = job->memory + thread_number() * room_of_thread(width);
    float *own = memory, *other = memory + width;
    while (job->ends[row] <= token) row++;
    const float* before = job->before + row * width;
    if (token != (row ? job->ends[row - 1] : 0)) {  // another thread has the token before
        norm(job, token - 1, other);
        before = other;
    }
    for (; token < end; token++) {
        norm(job, token, own);
        for (int64_t c = 0; c < width; c += LANES) {
            const int64_t at = token * width + c;
            const Vec normed = load(own + c), step = load(before + c) - normed;
            if (job->added) store(job->sum + at, residual(job, at));
            if (job->normed) store(job->normed + at, normed);
            for (int64_t i = 0; i < job->mixes; i++)
                store(job->out + i * job->tokens * width + at,
                      normed + step * load(job->amounts + i * width + c));
        }
        if (token + 1 == job->kept[row])
            memcpy(job->shift + job->slots[row] * job->slot_stride, own, width * sizeof(float));
        if (token + 1 == job->ends[row]) {
            before = job->before + ++row * width;
        } else {
            before = own;
            own = other;
            other = own == memory ? memory + width : memory;
        }
    }
}

}  // namespace

// added and sum are null where nothing is added, normed where nobody asks for it. threads: as many as may be
// used. Returns whether there is memory for it; if not, nothing is done.
extern "C" bool mix(const float* x, const float* added, const float* weight, const float* bias,
                    const float* amounts, float* sum, float* normed, float* out, float* shift,
                    const int64_t* ends, const int64_t* kept, const int64_t* slots, int64_t slot_stride,
                    int64_t rows, int64_t tokens, int64_t width, int64_t mixes, int threads) {
    const int64_t floats = rows * width + threads * room_of_thread(width);
    float* before = static_cast<float*>(malloc(floats * sizeof(float)));
    if (!before) return false;
    for (int64_t row = 0; row < rows; row++)
        memcpy(before + row * width, shift + slots[row] * slot_stride, width * sizeof(float));
    float* const memory = before + rows * width;
    const Mix job = {x,      added, weight, bias,  amounts,     sum,  normed, out,   shift, before,
                     memory, ends,  kept,   slots, slot_stride, rows, tokens, width, mixes};
    in_parallel(run, &job, threads);
    free(before);
    return true;
}
