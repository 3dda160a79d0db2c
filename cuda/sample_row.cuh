// What the host hands to the sampler's kernels: the record of each slot (parameters, random stream, logit
// bias, and the penalties of the tokens drawn so far), and the arguments of a call.
// rwkv_batch/sampling/structs_cuda.py has the same layouts, and abi.cu asserts them.
#pragma once
#include <stddef.h>

#include "sample_number.cuh"
#include "sample_team.cuh"

namespace sample {

enum Method { GREEDY, RAPID, NUCLEUS, NOISE };

struct BiasEntry {
    double amount;
    int id, unused;
};

// A token that the row has drawn.
struct PenaltyEntry {
    double decaying;
    int id, count;
};

// Written by the host when a row begins; `penalties` and `capacity` also when the list moves to a larger
// place. `used` and `position` are the device's from then on.
struct SampleRecord {
    double temperature, noise;                    // of NOISE
    double top_p;                                 // 1: off
    double first, later, decay, flat, per_count;  // see PenaltyRule in rwkv_batch/sampling/penalties.py
    uint64_t key, position;
    PenaltyEntry* penalties;
    int capacity;  // of penalties; 0: the row has none
    int used;
    const BiasEntry* bias;
    int bias_count;
    int method;
    int top_k;    // at least the vocabulary: off
    float scale;  // log2(e) / temperature
    int exempt;   // whether space, TAB, LF and digits do not count
    int unused;
};

// The arguments of a call: logits [rows, width], slots [rows], ids [rows].
struct SampleInput {
    const void* logits;   // fp32 or fp16, left as they are
    int64_t stride;       // of a row of logits, in numbers
    int width;            // ids in a row that may be read
    int vocab;            // ids that may be drawn, the first ones; at most `width`
    const int* slots;     // negative for padding
    SampleRecord* table;  // [slots]
    int* ids;
    float* workspace;  // null where teams are clusters
    int chunk;         // ids of a block: a multiple of 256 WARPS; set by the launcher
};

// The arguments of a call of sample_adjust.cu.
struct AdjustInput {
    SampleInput sample;  // of the whole batch; a workspace that is not null is `adjusted`
    const int* places;   // [rows], of the rows among those of `sample`
    float* adjusted;     // [rows, adjusted_width]
    int* top_k;          // [rows], at most the vocabulary
    float* top_p;        // [rows], above 0; above 1: off
    int adjusted_width;  // chunk_size(vocab, 1)
};

// One warp: a copy of a slot's record; of slot 0 for padding.
__device__ __forceinline__ void copy_record(SampleRecord& to, const SampleRecord* table, int slot) {
    static_assert(sizeof(SampleRecord) == WARP * sizeof(uint32_t), "a word for each lane");
    reinterpret_cast<uint32_t*>(&to)[lane_id()] =
        reinterpret_cast<const uint32_t*>(table + max(slot, 0))[lane_id()];
}

__device__ __forceinline__ bool is_exempt(int id) {
    return id == 33 || id == 10 || id == 11 || (id >= 49 && id < 59);
}

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
__device__ inline void apply_changes(const SampleRecord& row, const Chunk& chunk) {
    __syncthreads();
    for (int i = threadIdx.x; i < row.bias_count; i += THREADS)
        chunk.change(row.bias[i].id, row.bias[i].amount);
    __syncthreads();
    for (int i = threadIdx.x; i < row.used; i += THREADS) {
        const PenaltyEntry p = row.penalties[i];
        chunk.change(p.id, -__dadd_rn(__dadd_rn(p.decaying, row.flat), __dmul_rn(row.per_count, p.count)));
    }
    __syncthreads();
}

// `token` has been drawn. All threads of one block; `row` is a copy of `stored`.
__device__ inline void record(const SampleRecord& row, SampleRecord* stored, int token) {
    if (threadIdx.x == 0) stored->position = row.position + 1;
    if (row.capacity == 0) return;
    const bool counts = !(row.exempt && is_exempt(token));
    bool found = false;
    for (int i = threadIdx.x; i < row.used; i += THREADS) {
        PenaltyEntry p = row.penalties[i];
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
