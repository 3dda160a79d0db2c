// What the sampler knows of a slot: parameters, random stream, logit bias, and the penalties of the tokens drawn so far.
#pragma once
#include "sample_number.cuh"
#include "sample_team.cuh"

namespace sample {

enum Method { GREEDY, RAPID, NUCLEUS, NOISE };

struct Bias {
    double amount;
    int id, unused;
};

// A token that the row has drawn.
struct Penalty {
    double decaying;
    int id, count;
};

// Written by the host when a row begins (rwkv_batch/ops/cuda_sampler.py has the same layout); `penalties` and `capacity` also when the
// list moves to a larger place. `used` and `position` are the device's from then on.
struct Row {
    double temperature, noise;                       // of NOISE
    double top_p;                                    // 1: off
    double first, later, decay, flat, per_count;     // see rwkv_batch/penalties.py
    uint64_t key, position;
    Penalty* penalties;
    int capacity;                                    // of penalties; 0: the row has none
    int used;
    const Bias* bias;
    int bias_count;
    int method;
    int top_k;                                       // at least the vocabulary: off
    float scale;                                     // log2(e) / temperature
    int exempt;                                      // whether space, TAB, LF and digits do not count
    int unused;
};
static_assert(sizeof(Row) == 128 && sizeof(Bias) == 16 && sizeof(Penalty) == 16, "the host writes these");

__device__ __forceinline__ bool is_exempt(int id) { return id == 33 || id == 10 || id == 11 || (id >= 49 && id < 59); }

// The values of a block: ids from `first_id` on.
struct Chunk {
    float* values;
    int first_id, length;

    __device__ __forceinline__ void change(int id, double amount) const {
        const int at = id - first_id;
        if (at >= 0 && at < length) values[at] = sanitise(float(__dadd_rn(double(values[at]), amount)));
    }
};

// Bias, then penalties. All threads of a block; each id comes once in either list.
__device__ inline void apply_changes(const Row& row, const Chunk& chunk) {
    __syncthreads();
    for (int i = threadIdx.x; i < row.bias_count; i += THREADS) chunk.change(row.bias[i].id, row.bias[i].amount);
    __syncthreads();
    for (int i = threadIdx.x; i < row.used; i += THREADS) {
        const Penalty p = row.penalties[i];
        chunk.change(p.id, -__dadd_rn(__dadd_rn(p.decaying, row.flat), __dmul_rn(row.per_count, p.count)));
    }
    __syncthreads();
}

// `token` has been drawn. All threads of one block; `row` is a copy of `stored`.
__device__ inline void record(const Row& row, Row* stored, int token) {
    if (threadIdx.x == 0) stored->position = row.position + 1;
    if (row.capacity == 0) return;
    const bool counts = !(row.exempt && is_exempt(token));
    bool found = false;
    for (int i = threadIdx.x; i < row.used; i += THREADS) {
        Penalty p = row.penalties[i];
        p.decaying = __dmul_rn(p.decaying, row.decay);
        if (p.id == token) {
            found = true;
            p.count += 1;
            if (counts) p.decaying = __dadd_rn(p.decaying, row.later);
        }
        row.penalties[i] = p;
    }
    if (!__syncthreads_or(found) && threadIdx.x == 0 && row.used < row.capacity) {
        row.penalties[row.used] = {counts ? row.first : 0., token, 1};
        stored->used = row.used + 1;
    }
}

}  // namespace sample
