// Rows of x as 16-bit numbers for AVX512-VNNI, which multiplies bytes: q = round(x / s) with s = max |x| /
// most, as outliers leave 8 bits too few. q plus an offset is 256 high + low. A row that is not finite has s
// = NaN.

#pragma once

#include "panels.h"

#if defined(__AVX512VNNI__)
#include <cstdlib>

struct Rows16 {
    float* steps;    // [rows]: s
    uint8_t* bytes;  // [rows, 2, padded]: high, low
    int64_t padded;  // inputs, with those that are added, which are zero: a multiple of LANES
};

// Room for rows, to be freed at `steps`, which is null where there is no memory.
INLINE Rows16 rows16(int64_t rows, int64_t padded) {
    float* const steps = static_cast<float*>(malloc(rows * (2 * padded + sizeof(float))));
    if (!steps) return {nullptr, nullptr, padded};
    return {steps, reinterpret_cast<uint8_t*>(steps + rows), padded};
}

// Splits a row of x. FLIPPED: what is done to both bytes. each(k, q): also called with LANES numbers q.
template <int MOST, int OFFSET, uint8_t FLIPPED = 0, typename Each>
INLINE void split_row(const Product* job, const Rows16& to, int64_t row, Each each) {
    const float* x = job->x + row * job->inputs;
    uint8_t *high = to.bytes + row * 2 * to.padded, *low = high + to.padded;
    Vec most = {}, odd = {};
    const auto part = [&](int64_t k) {
        const int64_t left = job->inputs - k;
        if (left >= LANES) return load(x + k);
        Vec values = {};
        if (left > 0) memcpy(&values, x + k, left * sizeof(float));
        return values;
    };
    for (int64_t k = 0; k < job->inputs; k += LANES) {
        const Vec values = part(k), size = values < 0.0f ? -values : values;
        most = size > most ? size : most;
        odd += values * 0.0f;  // NaN, where a number is not finite
    }
    float largest = 0;
    for (int i = 0; i < LANES; i++) largest = most[i] > largest ? most[i] : largest;
    to.steps[row] = largest / MOST + sum(odd);
    // So that 1 / s is finite too.
    const float lift = largest < 1e-30f ? 0x1p64f : 1.0f, inverse = largest > 0 ? MOST / (largest * lift) : 0;
    const Vec round = all(12582912.0f);  // 1.5 * 2^23
    const __m128i flipped = _mm_set1_epi8((char)FLIPPED);
    for (int64_t k = 0; k < to.padded; k += LANES) {
        const IntVec q = (IntVec)(part(k) * lift * inverse + round) - (IntVec)round, up = q + OFFSET;
        each(k, q);
        _mm_storeu_si128((__m128i*)(high + k),
                         _mm_xor_si128(_mm512_cvtepi32_epi8((__m512i)(up >> 8)), flipped));
        _mm_storeu_si128((__m128i*)(low + k), _mm_xor_si128(_mm512_cvtepi32_epi8((__m512i)up), flipped));
    }
}

INLINE __m512i four(const uint8_t* from) {
    int32_t word;
    memcpy(&word, from, sizeof word);
    return _mm512_set1_epi32(word);
}

// Adds products of four bytes each, of which the first have no sign. Written as the instruction, as GCC 12
// spills the sums of the intrinsic.
INLINE void add(__m512i& sum, __m512i bytes, __m512i signed_bytes) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(bytes), "v"(signed_bytes));
}
#endif
