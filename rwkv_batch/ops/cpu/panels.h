// How products with packed weights go through their work: panels of outputs, rows in tiles, results of a
// panel.

#pragma once

#include "matrix.h"
#include "vector.h"

#if defined(__AVX__) || defined(__F16C__)
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
    int activation;  // of Activation
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

// LANES bytes as integers, by the instruction for it: what GCC makes of a conversion of vectors takes six
// times as long.
INLINE IntVec integers(const int8_t* from) {
#if defined(__AVX512F__)
    return (IntVec)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
    return (IntVec)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
    typedef int8_t Bytes __attribute__((vector_size(LANES)));
    Bytes bytes;
    memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(bytes, IntVec);
#endif
}

INLINE IntVec integers(const uint8_t* from) { return integers(reinterpret_cast<const int8_t*>(from)) & 255; }

INLINE Vec widen(IntVec x) { return __builtin_convertvector(x, Vec); }

INLINE Vec widen(const uint16_t* from) {  // fp16
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__)
    return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else  // by its bits: exponents of fp32 count from 112 more
    typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
    Halves halves;
    memcpy(&halves, from, sizeof halves);
    const IntVec bits = __builtin_convertvector(halves, IntVec);
    const Vec magnitude = (Vec)((bits & 0x7fff) << 13) * 0x1p112f;
    return (Vec)((IntVec)magnitude | ((bits & 0x8000) << 16));
#endif
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
        if (job->activation == SQUARED) {
            y = y > 0.0f ? y : y * 0.0f;  // which keeps NaN
            y *= y;
        } else if (job->activation == TANH) {
            y = hyperbolic_tangent(y);
        } else if (job->activation == SIGMOID) {
            y = sigmoid(y);
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
