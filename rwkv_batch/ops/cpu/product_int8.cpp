// Products with int8 weights by AVX512-VNNI: y = (x W^T) scales + bias, with sums in integers.
//
// Each row of x becomes 16-bit numbers q = round(x / s), s = max |x| / 32767, as outliers leave 8 bits too
// few. An instruction multiplies unsigned bytes with signed ones, so q + 32768 = 256 high + low is two bytes
// without a sign:
//
//     q W^T = 256 (high W^T - 128 sum W) + low W^T
//
// Both sums are exact for up to 65536 inputs. They are added in fp32 and multiplied by s and the output's
// scale. So a row's product does not depend on other rows, threads or any order. A row that is not finite
// gives NaN.
//
// Weights are packed in panels of 64 outputs: [panels, inputs / 4, 64, 4], filled up with zeros.
// Reference: torch.nn.functional.linear. Test: test/unit/test_cpu_products.py.

#include "panels.h"

#if defined(__AVX512VNNI__)
#include <immintrin.h>

#include <cmath>
#include <cstdlib>

namespace {

constexpr int TALL = 3;  // rows in registers, each with two sums for 64 outputs

struct Split : Product {
    const int32_t* totals;  // [panels * 64]: 128 times the sum of an output's weights
    uint8_t* bytes;         // [rows, 2, padded]: high, low
    float* steps;           // [rows]: s
    int64_t padded;         // inputs, a multiple of LANES
};

INLINE void split_row(const Split* job, int64_t row) {
    const float* x = job->x + row * job->inputs;
    uint8_t *high = job->bytes + row * 2 * job->padded, *low = high + job->padded;
    Vec most = {}, odd = {};
    const auto part = [&](int64_t k) {
        Vec values = {};
        memcpy(&values, x + k, (job->inputs - k < LANES ? job->inputs - k : LANES) * sizeof(float));
        return values;
    };
    for (int64_t k = 0; k < job->inputs; k += LANES) {
        const Vec values = part(k), size = values < 0.0f ? -values : values;
        most = size > most ? size : most;
        odd += values * 0.0f;  // NaN, where a number is not finite
    }
    float largest = 0;
    for (int i = 0; i < LANES; i++) largest = most[i] > largest ? most[i] : largest;
    job->steps[row] = largest / 32767 + sum(odd);
    // So that 1 / s is finite too.
    const float lift = largest < 1e-30f ? 0x1p64f : 1.0f,
                inverse = largest > 0 ? 32767 / (largest * lift) : 0;
    const Vec round = all(12582912.0f);  // 1.5 * 2^23
    for (int64_t k = 0; k < job->inputs; k += LANES) {
        const IntVec q = (IntVec)(part(k) * lift * inverse + round) - (IntVec)round + 32768;
        _mm_storeu_si128((__m128i*)(high + k), _mm512_cvtepi32_epi8((__m512i)(q >> 8)));
        _mm_storeu_si128((__m128i*)(low + k), _mm512_cvtepi32_epi8((__m512i)q));
    }
}

void split(const void* argument) {
    const Split* job = static_cast<const Split*>(argument);
    int64_t begin, end;
    share(job->rows, &begin, &end);
    for (int64_t row = begin; row < end; row++) split_row(job, row);
}

INLINE __m512i four(const uint8_t* from) {
    int32_t word;
    memcpy(&word, from, sizeof word);
    return _mm512_set1_epi32(word);
}

// Adds products of four bytes each. Written as the instruction, as GCC 12 spills the sums of the intrinsic.
INLINE void add(__m512i& sum, __m512i bytes, __m512i weights) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(bytes), "v"(weights));
}

// R rows with the 16 V first outputs of a panel.
template <int R, int V>
void tile(const Split* job, int64_t row, int64_t panel) {
    const int64_t groups = (job->inputs + 3) / 4;
    const int8_t* weights = static_cast<const int8_t*>(job->weights) + panel * groups * PANEL * 4;
    const uint8_t* bytes = job->bytes + row * 2 * job->padded;
    __m512i high[R][V] = {}, low[R][V] = {};
    for (int64_t k = 0; k < groups; k++) {
        __m512i weight[V];
#pragma GCC unroll 8
        for (int j = 0; j < V; j++) weight[j] = _mm512_loadu_si512(weights + (k * PANEL + j * LANES) * 4);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const __m512i h = four(bytes + r * 2 * job->padded + k * 4);
            const __m512i l = four(bytes + (r * 2 + 1) * job->padded + k * 4);
#pragma GCC unroll 8
            for (int j = 0; j < V; j++) {
                add(high[r][j], h, weight[j]);
                add(low[r][j], l, weight[j]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        Vec values[PANEL / LANES] = {};
#pragma GCC unroll 8
        for (int j = 0; j < V; j++) {
            const __m512i total = _mm512_loadu_si512(job->totals + panel * PANEL + j * LANES);
            const Vec above = (Vec)_mm512_cvtepi32_ps(_mm512_sub_epi32(high[r][j], total));
            values[j] = (above * 256.0f + (Vec)_mm512_cvtepi32_ps(low[r][j])) * job->steps[row + r];
        }
        finish(job, row + r, panel, values);
    }
}

void run(const void* argument) {
    const Split* job = static_cast<const Split*>(argument);
    int64_t begin, end;
    share(panels(job), &begin, &end);
    for (int64_t panel = begin; panel < end; panel++) {
        const bool narrow = job->outputs - panel * PANEL <= 2 * LANES;
        in_tiles(job->rows, TALL, [&](int64_t row, int64_t rows) {
            if (narrow)
                (rows == 1 ? tile<1, 2> : rows == 2 ? tile<2, 2> : tile<3, 2>)(job, row, panel);
            else
                (rows == 1 ? tile<1, 4> : rows == 2 ? tile<2, 4> : tile<3, 4>)(job, row, panel);
        });
    }
    end_of_streams();
}

}  // namespace

// How many inputs of an output lie side by side in a panel.
extern "C" int int8_group() { return 4; }

extern "C" void product_int8(const float* x, const void* weights, const float* scales, const int32_t* totals,
                             const float* bias, float* y, int64_t rows, int64_t inputs, int64_t outputs,
                             int squared, int threads) {
    const Product product = {x, weights, scales, bias, y, rows, inputs, outputs, squared};
    Split job = {product, totals, nullptr, nullptr, (inputs + LANES - 1) / LANES * LANES};
    job.steps = static_cast<float*>(malloc(rows * (2 * job.padded + sizeof(float))));
    job.bytes = reinterpret_cast<uint8_t*>(job.steps + rows);
    threads = threads_for(&product, threads);
    in_parallel(split, &job, threads);
    in_parallel(run, &job, threads);
    free(job.steps);
}
#endif
