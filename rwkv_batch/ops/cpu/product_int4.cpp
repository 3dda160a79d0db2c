// Products with weights of 4 bits, w = scale q + minimum with both for each group of neighbouring inputs: y =
// x W^T + bias, with sums in fp32.
//
//     sum over a group of w x = scale (sum of q x) + minimum (sum of x)
//
// Groups are added up in ascending order. With AVX512-VNNI x is rounded to 16 bits a row (rows16.h), so that
// both sums of a group are exact integers but for their last rounding; q has no sign, so the bytes of x have:
// x / s = 256 high + low, both from -128 to 127. Elsewhere they are sums in fp32, in ascending order.
//
// A panel of 64 outputs has, for each group one after the other, its codes and then 64 scales and 64 minimums
// in fp16. Codes of `int4_inputs` inputs of an output lie side by side: without VNNI 1, and an input has 32
// bytes with those of outputs n and n + 32; with it 4, and these have twice 64 bytes, with those of outputs n
// and n + 16 and of n + 32 and n + 48. The first of the two is in the low four bits.
//
// So a row's product does not depend on other rows or threads. Reference: torch.nn.functional.linear. Test:
// test/unit/test_cpu_products.py.

#include <cstdlib>

#include "rows16.h"

namespace {

constexpr int VECTORS = PANEL / LANES;

struct Grouped : Product {
    int64_t group;  // inputs of a group
    float* sums;    // [rows, groups]: of x, or of x / s
#if defined(__AVX512VNNI__)
    Rows16 rows16;
#endif
};

INLINE int64_t groups(const Grouped* job) { return (job->inputs + job->group - 1) / job->group; }

INLINE int64_t group_bytes(const Grouped* job) { return job->group * PANEL / 2 + 4 * PANEL; }

// Adds what a group of a row gives: its sums of q x, times scales, and minimums times the sum of x.
INLINE void add_group(Vec (&total)[VECTORS], const Vec (&found)[VECTORS], const uint16_t* scales, float sum) {
#pragma GCC unroll 16
    for (int j = 0; j < VECTORS; j++)
        total[j] += widen(scales + j * LANES) * found[j] + widen(scales + PANEL + j * LANES) * sum;
}

#if defined(__AVX512VNNI__)
void prepare(const void* argument) {
    const Grouped* job = static_cast<const Grouped*>(argument);
    int64_t begin, end;
    share(job->rows, &begin, &end);
    for (int64_t row = begin; row < end; row++) {
        float* const sums = job->sums + row * groups(job);
        IntVec total = {};
        split_row<32639, 32768 + 128, 0x80>(job, job->rows16, row, [&](int64_t k, IntVec q) {
            total += q;
            if ((k + LANES) % job->group) return;
            sums[k / job->group] = _mm512_reduce_add_epi32((__m512i)total);
            total ^= total;
        });
    }
}

template <int R>
void tile(const Grouped* job, int64_t row, int64_t panel) {
    const int64_t padded = job->rows16.padded, count = groups(job);
    const uint8_t* weights = static_cast<const uint8_t*>(job->weights) + panel * count * group_bytes(job);
    const uint8_t* bytes = job->rows16.bytes + row * 2 * padded;
    const __m512i nibble = _mm512_set1_epi8(15);
    Vec total[R][VECTORS] = {};
    for (int64_t g = 0; g < count; g++) {
        __m512i high[R][VECTORS] = {}, low[R][VECTORS] = {};
        for (int64_t k = 0; k < job->group / 4; k++, weights += 2 * PANEL, bytes += 4) {
            __m512i weight[VECTORS];
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++) {
                const __m512i both = _mm512_loadu_si512(weights + i * PANEL);
                weight[2 * i] = _mm512_and_si512(both, nibble);
                weight[2 * i + 1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const __m512i h = four(bytes + r * 2 * padded), l = four(bytes + (r * 2 + 1) * padded);
#pragma GCC unroll 8
                for (int j = 0; j < VECTORS; j++) {
                    add(high[r][j], weight[j], h);
                    add(low[r][j], weight[j], l);
                }
            }
        }
        const uint16_t* const scales = reinterpret_cast<const uint16_t*>(weights);
        weights += 4 * PANEL;
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            Vec found[VECTORS];
#pragma GCC unroll 8
            for (int j = 0; j < VECTORS; j++)
                found[j] = (Vec)_mm512_cvtepi32_ps(high[r][j]) * 256.0f + (Vec)_mm512_cvtepi32_ps(low[r][j]);
            add_group(total[r], found, scales, job->sums[(row + r) * count + g]);
        }
    }
    for (int r = 0; r < R; r++) {
        for (int j = 0; j < VECTORS; j++) total[r][j] *= job->rows16.steps[row + r];
        finish(job, row + r, panel, total[r]);
    }
}

// A row has two sums for 64 outputs.
constexpr void (*TILES[])(const Grouped*, int64_t, int64_t) = {tile<1>, tile<2>, tile<3>};
#else
void prepare(const void* argument) {
    const Grouped* job = static_cast<const Grouped*>(argument);
    int64_t begin, end;
    share(job->rows, &begin, &end);
    for (int64_t row = begin; row < end; row++)
        for (int64_t g = 0; g < groups(job); g++) {
            float total = 0;
            const int64_t first = g * job->group, left = job->inputs - first;
            for (int64_t k = 0; k < job->group && k < left; k++)
                total += job->x[row * job->inputs + first + k];
            job->sums[row * groups(job) + g] = total;
        }
}

template <int R>
void tile(const Grouped* job, int64_t row, int64_t panel) {
    constexpr int HALF = VECTORS / 2, PAIRS = R == 1 ? (HALF < 4 ? HALF : 4) : R < 4 ? 2 : 1;
    const int64_t count = groups(job);
    const uint8_t* weights = static_cast<const uint8_t*>(job->weights) + panel * count * group_bytes(job);
    Vec total[R][VECTORS] = {};
    for (int64_t g = 0; g < count; g++, weights += group_bytes(job)) {
        const int64_t left = job->inputs - g * job->group, inputs = left < job->group ? left : job->group;
        const float* x = job->x + row * job->inputs + g * job->group;
        Vec found[R][VECTORS] = {};
        for (int64_t begin = 0; begin < HALF; begin += PAIRS) {
            Vec sums[R][PAIRS][2] = {};  // of outputs n and n + 32, in registers
            for (int64_t k = 0; k < inputs; k++) {
                Vec weight[PAIRS][2];
#pragma GCC unroll 8
                for (int j = 0; j < PAIRS; j++) {
                    const IntVec both = integers(weights + k * (PANEL / 2) + (begin + j) * LANES);
                    weight[j][0] = widen(both & 15), weight[j][1] = widen(both >> 4);
                }
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    const Vec value = all(x[r * job->inputs + k]);
#pragma GCC unroll 8
                    for (int j = 0; j < PAIRS; j++)
                        sums[r][j][0] += value * weight[j][0], sums[r][j][1] += value * weight[j][1];
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
#pragma GCC unroll 8
                for (int j = 0; j < PAIRS; j++)
                    found[r][begin + j] = sums[r][j][0], found[r][HALF + begin + j] = sums[r][j][1];
        }
        const uint16_t* const scales = reinterpret_cast<const uint16_t*>(weights + job->group * PANEL / 2);
        for (int r = 0; r < R; r++) add_group(total[r], found[r], scales, job->sums[(row + r) * count + g]);
    }
    for (int r = 0; r < R; r++) finish(job, row + r, panel, total[r]);
}

constexpr void (*TILES[])(const Grouped*, int64_t, int64_t) = {tile<1>, tile<2>, tile<3>,
                                                               tile<4>, tile<5>, tile<6>};
#endif

constexpr int TALL = sizeof TILES / sizeof *TILES;  // rows in registers

void run(const void* argument) {
    const Grouped* job = static_cast<const Grouped*>(argument);
    int64_t begin, end;
    share(panels(job), &begin, &end);
    for (int64_t panel = begin; panel < end; panel++)
        in_tiles(job->rows, TALL, [&](int64_t row, int64_t rows) { TILES[rows - 1](job, row, panel); });
    end_of_streams();
}

}  // namespace

// How many inputs of an output lie side by side in a panel.
extern "C" int int4_inputs() {
#if defined(__AVX512VNNI__)
    return 4;
#else
    return 1;
#endif
}

// group: 64 or 128.
extern "C" void product_int4(const float* x, const void* weights, const float* bias, float* y, int64_t rows,
                             int64_t inputs, int64_t outputs, int64_t group, int squared, int threads) {
    Grouped job = {{x, weights, nullptr, bias, y, rows, inputs, outputs, squared}, group};
    job.sums = static_cast<float*>(malloc(rows * groups(&job) * sizeof(float)));
    threads = threads_for(&job, threads);
#if defined(__AVX512VNNI__)
    job.rows16 = rows16(rows, groups(&job) * group);
#endif
    in_parallel(prepare, &job, threads);
    in_parallel(run, &job, threads);
#if defined(__AVX512VNNI__)
    free(job.rows16.steps);
#endif
    free(job.sums);
}
