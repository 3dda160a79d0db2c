// The time mix of RWKV-7 between its products, token after token, for rows of any length.
//
// By head of 64 channels, with S the state [value, key] in fp32:
//
//     w = exp(-exp(-1/2) sigmoid(w)),  a = sigmoid(a),  v = v + (v_first - v) sigmoid(v_mix)
//     kk = k k_k, of unit length,  k = k (k_rest + a k_a)
//     S = S diag(w) - (S kk) (kk a)^T + v k^T,  y = S r
//     out = (group norm of y + sum(r k r_k) v) g
//
// Reference: log_decay, removal_key, wkv and readout of rwkv_batch/ops/torch_ops.py. Test:
// test/unit/test_cpu_kernels.py. A head's state (16 KB) stays in the cache of a core while its row's tokens
// pass. Sums over keys: each lane adds its keys in order, and the lanes are added by halves. So a row's
// numbers do not depend on other rows, threads, or where its tokens are cut into calls. The tokens of a row
// behind `kept` read and change a copy of its state; the state in the slot stays as it was before them.

#include <cmath>

#include "vector.h"

namespace {

constexpr int HEAD = 64;
constexpr int PARTS = HEAD / LANES;  // vectors of a head

struct Wkv7 {
    const float *r, *w, *k, *v, *a, *g;     // [tokens, width]; w and a as the low-rank functions give them
    const float *v_mix, *v_first;           // [tokens, width], or both null
    const float *k_k, *k_a, *k_rest, *r_k;  // [width]
    const float *weight, *bias;             // [width], of the group norm
    const float* scales;                    // [tokens, width]: of y before the group norm; or null
    float* out;                             // [tokens, width]; null: only the states are wanted
    float* states;                          // of slot 0: [heads, 64, 64]
    int64_t slot_stride;                    // floats from slot to slot
    const int64_t* begins;                  // [rows]: where a row's tokens begin; null: behind the row before
    const int64_t *ends, *kept, *slots;     // [rows]: where they end, those for the slot do, and the slot
    int64_t rows, width;
};

struct Head {
    Vec x[PARTS];
};

INLINE Head head(const float* from) {
    Head x;
    for (int j = 0; j < PARTS; j++) x.x[j] = load(from + j * LANES);
    return x;
}

INLINE float dot(Head a, Head b) {
    Vec total = a.x[0] * b.x[0];
    for (int j = 1; j < PARTS; j++) total += a.x[j] * b.x[j];
    return sum(total);
}

// One token of a head: S is changed, y [64] = S r. The rows to come, of the next head at the end, are fetched
// meanwhile.
INLINE void step(float* S, const Head* w, const Head* k, const Head* kk, const Head* b, const Head* r,
                 const float* v, float* y) {
    for (int i = 0; i < HEAD; i += LANES) {  // rows of S, as many as a vector has lanes
        float* s = S + i * HEAD;
        Vec part[LANES];
#pragma GCC unroll 16
        for (int row = 0; row < LANES; row++) {
            for (int j = 0; j < HEAD; j += 16) __builtin_prefetch(s + (LANES + row) * HEAD + j, 1);
            Vec total = load(s + row * HEAD) * kk->x[0];
#pragma GCC unroll 16
            for (int j = 1; j < PARTS; j++) total += load(s + row * HEAD + j * LANES) * kk->x[j];
            part[row] = total;
        }
        const Vec removed = sums(part);
#pragma GCC unroll 16
        for (int row = 0; row < LANES; row++) {
            const Vec minus = all(-removed[row]), value = all(v[i + row]);
            Vec total = {};
#pragma GCC unroll 16
            for (int j = 0; j < PARTS; j++) {
                float* at = s + row * HEAD + j * LANES;
                const Vec next = load(at) * w->x[j] + minus * b->x[j] + value * k->x[j];
                store(at, next);
                total += next * r->x[j];
            }
            part[row] = total;
        }
        store(y + i, sums(part));
    }
}

// What is read out of y and the token's own value, by the gate.
INLINE void readout(const Wkv7* job, const float* y, int64_t at, int64_t channel, float own, const float* v) {
    Head x = head(y);
    if (job->scales)
        for (int j = 0; j < PARTS; j++) x.x[j] *= load(job->scales + at + j * LANES);
    Vec total = x.x[0];
    for (int j = 1; j < PARTS; j++) total += x.x[j];
    const float mean = sum(total) / HEAD;
    for (int j = 0; j < PARTS; j++) x.x[j] -= mean;
    const float scale = 1.0f / sqrtf(dot(x, x) / HEAD + 64e-5f);
    for (int j = 0; j < PARTS; j++) {
        const int64_t c = channel + j * LANES;
        const Vec normed = x.x[j] * scale * load(job->weight + c) + load(job->bias + c);
        store(job->out + at + j * LANES,
              (normed + own * load(v + j * LANES)) * load(job->g + at + j * LANES));
    }
}

void run(const void* argument) {
    const Wkv7* job = static_cast<const Wkv7*>(argument);
    const int64_t heads = job->width / HEAD;
    int64_t first, end;
    share(job->rows * heads, &first, &end);
    float copy[HEAD * HEAD];
    for (int64_t place = first; place < end; place++) {
        const int64_t row = place / heads, h = place % heads, channel = h * HEAD;
        float* S = job->states + job->slots[row] * job->slot_stride + h * HEAD * HEAD;
        const Head k_k = head(job->k_k + channel), k_a = head(job->k_a + channel);
        const Head k_rest = head(job->k_rest + channel), r_k = head(job->r_k + channel);
        int64_t token = job->begins ? job->begins[row] : row ? job->ends[row - 1] : 0;
        for (; token < job->ends[row]; token++) {
            const int64_t at = token * job->width + channel;
            float v[HEAD], y[HEAD];
            if (token == job->kept[row]) {
                memcpy(copy, S, sizeof copy);
                S = copy;
            }
            Head w = head(job->w + at), a = head(job->a + at), k = head(job->k + at), r = head(job->r + at),
                 kk, b, rk;
            for (int j = 0; j < PARTS; j++) {
                const int64_t c = at + j * LANES;
                w.x[j] = exponential(sigmoid(w.x[j]) * -0.6065306597126334f);
                a.x[j] = sigmoid(a.x[j]);
                kk.x[j] = k.x[j] * k_k.x[j];
                k.x[j] *= k_rest.x[j] + a.x[j] * k_a.x[j];
                rk.x[j] = r.x[j] * k.x[j];
                Vec value = load(job->v + c);
                if (job->v_mix) value += (load(job->v_first + c) - value) * sigmoid(load(job->v_mix + c));
                store(v + j * LANES, value);
            }
            const float length = sqrtf(dot(kk, kk)), unit = 1.0f / (length > 1e-12f ? length : 1e-12f);
            for (int j = 0; j < PARTS; j++) {
                kk.x[j] *= unit;
                b.x[j] = kk.x[j] * a.x[j];
            }
            step(S, &w, &k, &kk, &b, &r, v, y);
            if (job->out) readout(job, y, at, channel, dot(rk, r_k), v);
        }
    }
}

}  // namespace

// threads: as many as may be used. v_mix and v_first are null in the layer whose values are v_first.
extern "C" void wkv7(const float* r, const float* w, const float* k, const float* v, const float* a,
                     const float* g, const float* v_mix, const float* v_first, const float* k_k,
                     const float* k_a, const float* k_rest, const float* r_k, const float* weight,
                     const float* bias, const float* scales, float* out, float* states, const int64_t* begins,
                     const int64_t* ends, const int64_t* kept, const int64_t* slots, int64_t slot_stride,
                     int64_t rows, int64_t width, int threads) {
    const Wkv7 job = {r,      w,           k,      v,    a,      g,     v_mix,  v_first,
                      k_k,    k_a,         k_rest, r_k,  weight, bias,  scales, out,
                      states, slot_stride, begins, ends, kept,   slots, rows,   width};
    in_parallel(run, &job, threads);
}
