// Products with weights of 4 bits, in groups of neighbouring inputs with scales of their own: y = x W^T +
// bias, with sums in fp32.
//
//     w = scale n(code) + minimum     sum over a group of w x = scale (sum of n x) + minimum (sum of x)
//
// n is the code itself (int4), or its number of NF4, where minimums are zero. Groups are added up in
// ascending order. With AVX512-VNNI int4 multiplies x rounded to 16 bits a row (rows16.h), so that both sums
// of a group are exact integers but for their last rounding; codes have no sign, so the bytes of x have: x /
// s = 256 high
// + low, both from -128 to 127. Else sums are in fp32, in ascending order.
//
// A panel of 64 outputs has, for each group one after the other, its codes and then 64 scales and 64 minimums
// in fp16. Codes of some inputs of an output lie side by side. For sums in fp32 it is one, and an input has
// 32 bytes with the codes of outputs n and n + 32; with VNNI they are four, and these have twice 64 bytes,
// with the codes of outputs n and n + 16 and of n + 32 and n + 48. The first of the two is in the low four
// bits.
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

typedef void (*Tile)(const Grouped* job, int64_t row, int64_t panel);

INLINE int64_t groups(const Grouped* job) { return (job->inputs + job->group - 1) / job->group; }

INLINE int64_t group_bytes(const Grouped* job) { return job->group * PANEL / 2 + 4 * PANEL; }

// Adds what a group of a row gives: its sums of n x, times scales, and minimums times the sum of x.
INLINE void add_group(Vec (&total)[VECTORS], const Vec (&found)[VECTORS], const uint16_t* scales, float sum) {
#pragma GCC unroll 16
    for (int j = 0; j < VECTORS; j++)
        total[j] += widen(scales + j * LANES) * found[j] + widen(scales + PANEL + j * LANES) * sum;
}

struct Whole {
    static INLINE Vec number(IntVec code) { return widen(code); }
};

struct Nf4 {
    // Of the paper "QLoRA" (arXiv 2305.14314), appendix E, as rwkv_batch/ops/weights/groups.py has them.
    static constexpr float NUMBERS[16] = {-1.0f,
                                          -0.6961928009986877f,
                                          -0.5250730514526367f,
                                          -0.39491748809814453f,
                                          -0.28444138169288635f,
                                          -0.18477343022823334f,
                                          -0.09105003625154495f,
                                          0.0f,
                                          0.07958029955625534f,
                                          0.16093020141124725f,
                                          0.24611230194568634f,
                                          0.33791524171829224f,
                                          0.44070982933044434f,
                                          0.5626170039176941f,
                                          0.7229568362236023f,
                                          1.0f};

    static INLINE Vec number(IntVec code) {
#if defined(__AVX512F__)
        return (Vec)_mm512_permutexvar_ps((__m512i)code, _mm512_loadu_ps(NUMBERS));
#elif defined(__AVX2__)  // which takes the low three bits
        const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(NUMBERS), (__m256i)code),
                     high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(NUMBERS + 8), (__m256i)code);
        return (Vec)_mm256_blendv_ps(low, high, (__m256)(code << 28));
#else
        Vec numbers;
        for (int i = 0; i < LANES; i++) numbers[i] = NUMBERS[code[i]];
        return numbers;
#endif
    }
};

void sum_rows(const void* argument) {
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

template <typename Codes, int R>
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
                    weight[j][0] = Codes::number(both & 15), weight[j][1] = Codes::number(both >> 4);
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

template <int TALL>
void run(const Grouped* job, const Tile (&tiles)[TALL]) {
    int64_t begin, end;
    share(panels(job), &begin, &end);
    for (int64_t panel = begin; panel < end; panel++)
        in_tiles(job->rows, TALL, [&](int64_t row, int64_t rows) { tiles[rows - 1](job, row, panel); });
    end_of_streams();
}

template <typename Codes>
void run_in_fp32(const void* argument) {
    static constexpr Tile TILES[] = {tile<Codes, 1>, tile<Codes, 2>, tile<Codes, 3>,
                                     tile<Codes, 4>, tile<Codes, 5>, tile<Codes, 6>};
    run(static_cast<const Grouped*>(argument), TILES);
}

template <typename Codes>
bool multiply_in_fp32(Grouped job, int threads) {
    job.sums = static_cast<float*>(malloc(job.rows * groups(&job) * sizeof(float)));
    if (!job.sums) return false;
    in_parallel(sum_rows, &job, threads);
    in_parallel(run_in_fp32<Codes>, &job, threads);
    free(job.sums);
    return true;
}

#if defined(__AVX512VNNI__)
void split_rows(const void* argument) {
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
void tile_of_bytes(const Grouped* job, int64_t row, int64_t panel) {
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

void run_of_bytes(const void* argument) {
    // A row has two sums for 64 outputs in registers.
    static constexpr Tile TILES[] = {tile_of_bytes<1>, tile_of_bytes<2>, tile_of_bytes<3>};
    run(static_cast<const Grouped*>(argument), TILES);
}

bool multiply_bytes(Grouped job, int threads) {
    job.sums = static_cast<float*>(malloc(job.rows * groups(&job) * sizeof(float)));
    job.rows16 = rows16(job.rows, groups(&job) * job.group);
    const bool room = job.sums && job.rows16.steps;
    if (room) {
        in_parallel(split_rows, &job, threads);
        in_parallel(run_of_bytes, &job, threads);
    }
    free(job.rows16.steps);
    free(job.sums);
    return room;
}
#endif

}  // namespace

// How many inputs of an output lie side by side in a panel of int4; in one of nf4 it is one.
extern "C" int int4_inputs() {
#if defined(__AVX512VNNI__)
    return 4;
#else
    return 1;
#endif
}

// group: 64 or 128.
extern "C" bool product_int4(const float* x, const void* weights, const float* bias, float* y, int64_t rows,
                             int64_t inputs, int64_t outputs, int64_t group, int activation, int threads) {
    const Grouped job = {{x, weights, nullptr, bias, y, rows, inputs, outputs, activation}, group};
#if defined(__AVX512VNNI__)
    return multiply_bytes(job, threads_for(&job, threads));
#else
    return multiply_in_fp32<Whole>(job, threads_for(&job, threads));
#endif
}

extern "C" bool product_nf4(const float* x, const void* weights, const float* bias, float* y, int64_t rows,
                            int64_t inputs, int64_t outputs, int64_t group, int activation, int threads) {
    const Grouped job = {{x, weights, nullptr, bias, y, rows, inputs, outputs, activation}, group};
    return multiply_in_fp32<Nf4>(job, threads_for(&job, threads));
}
