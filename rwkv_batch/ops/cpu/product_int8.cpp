// Products with int8 weights by AVX512-VNNI: y = (x W^T) scales + bias, with sums in integers.
//
// Each row of x becomes 16-bit numbers q = round(x / s), s = max |x| / 32767 (rows16.h). An instruction
// multiplies unsigned bytes with signed ones, so q + 32768 = 256 high + low is two bytes without a sign:
//
//     q W^T = 256 (high W^T - 128 sum W) + low W^T
//
// Both sums are exact for up to 65536 inputs. They are added in fp32 and multiplied by s and the output's
// scale. So a row's product does not depend on other rows, threads or any order. A row that is not finite
// gives NaN.
//
// Weights are packed in panels of 64 outputs: [panels, inputs / 4, 64, 4], filled up with zeros.
// Reference: torch.nn.functional.linear. Test: test/unit/test_cpu_products.py.

#include "rows16.h"

#if defined(__AVX512VNNI__)

namespace {

constexpr int TALL = 3;       // rows in registers, each with two sums for 64 outputs
constexpr int64_t FEW = 6;    // rows that wait for memory
constexpr int64_t LINE = 64;  // bytes
constexpr int64_t PARTS = 4;  // of a panel: a line of the cache for four inputs each

struct Split : Product {
    const int32_t* totals;  // [panels * 64]: 128 times the sum of an output's weights
    Rows16 rows16;          // without a sign
};

void split(const void* argument) {
    const Split* job = static_cast<const Split*>(argument);
    int64_t begin, end;
    share(job->rows, &begin, &end);
    for (int64_t row = begin; row < end; row++)
        split_row<32767, 32768>(job, job->rows16, row, [](int64_t, IntVec) {});
}

// R rows with the 16 V first outputs of a panel. ahead: weights to come, of which a line of the cache is
// fetched with each four inputs.
template <int R, int V>
void tile(const Split* job, int64_t row, int64_t panel, const int8_t* ahead) {
    const int64_t groups = (job->inputs + 3) / 4;
    const int8_t* weights = static_cast<const int8_t*>(job->weights) + panel * groups * PANEL * 4;
    const int64_t padded = job->rows16.padded;
    const uint8_t* bytes = job->rows16.bytes + row * 2 * padded;
    __m512i high[R][V] = {}, low[R][V] = {};
    for (int64_t k = 0; k < groups; k++) {
        if (R > 1) __builtin_prefetch(ahead + k * LINE, 0, 2);
        __m512i weight[V];
#pragma GCC unroll 8
        for (int j = 0; j < V; j++) weight[j] = _mm512_loadu_si512(weights + (k * PANEL + j * LANES) * 4);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const __m512i h = four(bytes + r * 2 * padded + k * 4);
            const __m512i l = four(bytes + (r * 2 + 1) * padded + k * 4);
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
            values[j] = (above * 256.0f + (Vec)_mm512_cvtepi32_ps(low[r][j])) * job->rows16.steps[row + r];
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
        // Each tile fetches a part of the next panel, or else what is in the cache: of a few rows memory is
        // busy with this panel.
        const int64_t part = (job->inputs + 3) / 4 * LINE;
        const int8_t* const next = static_cast<const int8_t*>(job->weights) + (panel + 1) * PARTS * part;
        int64_t fetched = job->rows > FEW ? 0 : PARTS;
        in_tiles(job->rows, TALL, [&](int64_t row, int64_t rows) {
            const int8_t* const ahead = fetched < PARTS ? next + fetched++ * part : next - PARTS * part;
            if (narrow)
                (rows == 1 ? tile<1, 2> : rows == 2 ? tile<2, 2> : tile<3, 2>)(job, row, panel, ahead);
            else
                (rows == 1 ? tile<1, 4> : rows == 2 ? tile<2, 4> : tile<3, 4>)(job, row, panel, ahead);
        });
    }
    end_of_streams();
}

}  // namespace

// How many inputs of an output lie side by side in a panel.
extern "C" int int8_group() { return 4; }

extern "C" bool product_int8(const float* x, const void* weights, const float* scales, const int32_t* totals,
                             const float* bias, float* y, int64_t rows, int64_t inputs, int64_t outputs,
                             int activation, int threads) {
    const Product product = {x, weights, scales, bias, y, rows, inputs, outputs, activation};
    Split job = {product, totals, rows16(rows, (inputs + LANES - 1) / LANES * LANES)};
    if (!job.rows16.steps) return false;
    threads = threads_for(&product, threads);
    in_parallel(split, &job, threads);
    in_parallel(run, &job, threads);
    free(job.rows16.steps);
    return true;
}
#endif
