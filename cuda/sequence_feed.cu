// The token that each sequence drew last goes into its next step on the device, so that the host can queue a
// step before it knows the draws of the one before. Integers only; one thread a row.
//
// Reference: LateRunner of test/helpers/ahead.py does the same on a CPU. Binding: Kernels.resolve_drawn,
// Kernels.record_drawn. Test: test/kernels/test_sequence_feed.py.
#include "sequence_feed.cuh"

#include "common.cuh"
#include "wkv.cuh"

constexpr int THREADS = 128;

// Before a step. From given_tokens [n], each a token from the host, or a negative number for the one that the
// sequence in given_slots [i] drew last, to tokens [n]. If that token ended the sequence, its slot in slots
// [n] becomes negative too, as that of padding, and its state stays as it is. What is given may be the same
// memory as what is written. Only rows that are fed one token each have such tokens and a slot here: the
// first `single`, or `*counted` if that is not null. lag [n], if not null, receives how many tokens their
// states lag. After that it is one more, or none.
__global__ void resolve_drawn_kernel(const int* given_tokens, const int* given_slots, int* tokens, int* slots,
                                     SequenceRecord* records, int* lag, int single, const int* counted,
                                     int n) {
    wait_for_inputs(true);  // the next kernel brings its weights beside the sampler's
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= n) return;
    int token = given_tokens[i];
    if (i >= (counted ? *counted : single)) {  // of a prompt
        tokens[i] = token;
        return;
    }
    int slot = given_slots[i];
    if (token < 0) {
        const SequenceRecord& record = records[slot];
        token = record.last;
        if (record.ended) slot = -1;
    }
    tokens[i] = token, slots[i] = slot;
    if (!lag) return;
    int* const own = slot < 0 ? nullptr : &records[slot].lag;
    const int was = own ? *own : 0;
    lag[i] = was;
    if (own) *own = was == MAX_LAG ? 0 : was + 1;
}

// After sampling: ids [n] of the sequences in slots [n], negative for none. A negative id, of a row of which
// nothing could be drawn, ends its sequence.
__global__ void record_drawn_kernel(const int* ids, const int* slots, int n, SequenceRecord* records) {
    wait_for_inputs();
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= n || slots[i] < 0) return;
    SequenceRecord& record = records[slots[i]];
    const int id = ids[i];
    bool ends = id < 0;
#pragma unroll
    for (int stop = 0; stop < STOPS; stop++) ends |= record.stops[stop] == id;
    record.last = max(id, 0), record.ended = ends;  // the next step reads the embedding there
}

extern "C" {
int rwkv_resolve_drawn(const int* given_tokens, const int* given_slots, int* tokens, int* slots,
                       SequenceRecord* records, int* lag, int single, const int* counted, int n,
                       cudaStream_t stream) {
    return launch(resolve_drawn_kernel, (n + THREADS - 1) / THREADS, THREADS, 0, stream, given_tokens,
                  given_slots, tokens, slots, records, lag, single, counted, n);
}

int rwkv_record_drawn(const int* ids, const int* slots, int n, SequenceRecord* records, cudaStream_t stream) {
    return launch(record_drawn_kernel, (n + THREADS - 1) / THREADS, THREADS, 0, stream, ids, slots, n,
                  records);
}
}
