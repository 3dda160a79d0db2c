// What rows drew last goes into their next step without the host: it may queue a step before it knows what the one before has drawn.
//
//   rows [slots, ROW] int32, one record a slot: the id drawn last, whether that ended the row (0 or 1), how many tokens its state is
//   behind (wkv.cuh), and the ids that end it, -1 for none
//
// Integers only; one thread a row.
#include "common.cuh"
#include "feed.cuh"
#include "wkv.cuh"

constexpr int THREADS = 128;

// Before a step, in place. tokens [n]: a token of the host's, or a negative number for the one that the row in slots [i] drew last. If that
// has ended the row, its slot becomes negative too, as that of padding, and its state stays as it is.
// behind [n], if not null, tells the recurrence of the rows that are fed one token each, the first `single` or as many as stand at
// `counted`, how many tokens their states are behind. After that it is one more, or none.
__global__ void feed_kernel(int* tokens, int* slots, int* rows, int* behind, int single, const int* counted, int n) {
    wait_for_inputs();
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= n) return;
    if (tokens[i] < 0) {
        const int* row = rows + size_t(slots[i]) * ROW;
        tokens[i] = row[LAST];
        if (row[ENDED]) slots[i] = -1;
    }
    if (!behind || i >= (counted ? *counted : single)) return;
    int* const own = slots[i] < 0 ? nullptr : rows + size_t(slots[i]) * ROW + BEHIND;
    const int was = own ? *own : 0;
    behind[i] = was;
    if (own) *own = was == LATE ? 0 : was + 1;
}

// After a draw: ids [n] of the rows in slots [n], negative for none.
__global__ void take_kernel(const int* ids, const int* slots, int n, int* rows) {
    wait_for_inputs();
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= n || slots[i] < 0) return;
    int* row = rows + size_t(slots[i]) * ROW;
    const int id = ids[i];
    bool ends = false;
#pragma unroll
    for (int stop = 0; stop < STOPS; stop++) ends |= row[FIRST_STOP + stop] == id;
    row[LAST] = id, row[ENDED] = ends;
}

extern "C" {
int rwkv_feed(int* tokens, int* slots, int* rows, int* behind, int single, const int* counted, int n, cudaStream_t stream) {
    return launch(feed_kernel, (n + THREADS - 1) / THREADS, THREADS, 0, stream, tokens, slots, rows, behind, single, counted, n);
}

int rwkv_take(const int* ids, const int* slots, int n, int* rows, cudaStream_t stream) {
    return launch(take_kernel, (n + THREADS - 1) / THREADS, THREADS, 0, stream, ids, slots, n, rows);
}
}
