// How products with packed weights go through their work: panels of outputs, rows in tiles, results of a
// panel.

#pragma once

#include "vector.h"

#if defined(__AVX__)
#include <immintrin.h>
#endif

constexpr int64_t PANEL = 64;       // outputs that are packed together
constexpr int64_t MOST_ROWS = 96;   // whose sums of a panel stay in the cache of a core
constexpr int64_t WORTH = 1 << 16;  // products of two numbers for which a further thread is woken
constexpr int64_t LARGE = 1 << 20;  // numbers of y that would push weights out of the cache

struct Product {
    const float* x;       // [rows, inputs]
    const void* weights;  // packed
    const float* scales;  // [panels * 64], null where the weights have none
    const float* bias;    // [panels * 64]
    float* y;             // [rows, outputs]
    int64_t rows, inputs, outputs;
    int64_t squared;  // whether y is max(0, y)^2
};

INLINE int64_t panels(const Product* job) { return (job->outputs + PANEL - 1) / PANEL; }

INLINE int threads_for(const Product* job, int most) {
    const int64_t worth = job->rows * job->inputs * job->outputs / WORTH + 1;
    return worth < most ? (int)worth : most;
}

// Calls `tile(row, rows)` for `count` rows, at most `most` at a time and about as many each time.
template <typename Tile>
INLINE void in_tiles(int64_t count, int64_t most, Tile tile) {
    const int64_t tiles = (count + most - 1) / most;
    for (int64_t i = 0; i < tiles; i++) tile(count * i / tiles, count * (i + 1) / tiles - count * i / tiles);
}

// Stores past the cache where the processor can.
INLINE void stream(float* to, Vec x) {
#if defined(__AVX512F__)
    if ((uintptr_t)to % sizeof x == 0) return _mm512_stream_ps(to, (__m512)x);
#elif defined(__AVX__)
    if ((uintptr_t)to % sizeof x == 0) return _mm256_stream_ps(to, (__m256)x);
#endif
    store(to, x);
}

// Makes what `stream` has stored visible to other threads.
INLINE void end_of_streams() {
#if defined(__AVX__)
    _mm_sfence();
#endif
}

// Writes what a row has of a panel: its sums times the scales, and the bias.
INLINE void finish(const Product* job, int64_t row, int64_t panel, Vec sums[PANEL / LANES]) {
    const int64_t first = panel * PANEL;
    for (int j = 0; j < PANEL / LANES; j++) {
        const int64_t n = first + j * LANES, left = job->outputs - n;
        if (left <= 0) return;
        Vec y = sums[j];
        if (job->scales) y *= load(job->scales + n);
        y += load(job->bias + n);
        if (job->squared) {
            y = y > 0.0f ? y : y * 0.0f;  // which keeps NaN
            y *= y;
        }
        float* to = job->y + row * job->outputs + n;
        if (left < LANES)
            memcpy(to, &y, left * sizeof(float));
        else if (job->rows * job->outputs >= LARGE)
            stream(to, y);
        else
            store(to, y);
    }
}
