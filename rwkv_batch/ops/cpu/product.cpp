// Products with weights in fp32, fp16, int8 or fp8: y = x W^T + bias, with sums in fp32.
//
// Weights are packed in panels of 64 outputs: [panels, inputs, 64], the last one filled up with zeros. A
// panel is multiplied with all rows of x, up to 6 of them in registers at a time, and each weight is widened
// to fp32 there. Weights of 8 bits have a scale for each output, which multiplies the sum.
//
// A number of y is the sum of blocks of 512 inputs, each summed in ascending order, and of the bias. So a
// row's product does not depend on other rows or threads. For a row alone, of which most inputs are zeros as
// behind the ReLU of a channel mix, only weights of the others are read: the sums are the same. Reference:
// torch.nn.functional.linear. Test: test/unit/test_cpu_products.py.

#include "panels.h"

namespace {

constexpr int64_t DEPTH = 512;              // inputs whose part of a panel stays in the cache of a core
constexpr int64_t LINE = 64;                // bytes
constexpr int TALL = 6;                     // rows in registers
constexpr int WIDE = LANES == 16 ? 4 : 2;   // vectors of outputs beside them
constexpr int ALONE = LANES == 16 ? 4 : 8;  // the same for one row
constexpr int64_t MOST_INPUTS = 1 << 15;    // of a row whose zeros are left out
constexpr int SOON = 32;                    // inputs until the one whose weights are fetched

using ::widen;

INLINE Vec widen(const float* from) { return load(from); }

INLINE Vec widen(const int8_t* from) { return widen(integers(from)); }

struct Fp8 {  // e4m3, and no NaN
    int8_t bits;
};

// Its bits where fp32 has them: exponents of fp32 count from 120 more. Exact, subnormal numbers too.
INLINE Vec widen(const Fp8* from) {
    return (Vec)((integers(&from->bits) << 20) & (int32_t)0x87ffffff) * 0x1p120f;
}

// Adds `depth` inputs to the sums [R, 64] of R rows and V vectors of outputs. ahead: weights to come, of
// which a line of the cache is fetched with each input.
template <int R, int V, typename Weight>
void tile(const float* x, int64_t inputs, const Weight* weights, int64_t depth, float* sums,
          const char* ahead) {
    Vec total[R][V] = {};
    for (int64_t k = 0; k < depth; k++) {
        if (R > 1) __builtin_prefetch(ahead + k * LINE, 0, 2);
        Vec weight[V];
#pragma GCC unroll 8
        for (int j = 0; j < V; j++) weight[j] = widen(weights + k * PANEL + j * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const Vec value = all(x[r * inputs + k]);
#pragma GCC unroll 8
            for (int j = 0; j < V; j++) total[r][j] += value * weight[j];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int j = 0; j < V; j++) {
            float* to = sums + r * PANEL + j * LANES;
            store(to, load(to) + total[r][j]);
        }
}

template <int R, int V, typename Weight>
void across(const float* x, int64_t inputs, const Weight* weights, int64_t depth, float* sums,
            int64_t outputs, const char* ahead) {
    for (int64_t n = 0; n < PANEL && n < outputs; n += V * LANES)
        tile<R, V>(x, inputs, weights + n, depth, sums + n, ahead);
}

struct Some {  // inputs of one row that are not zero, ascending
    const int32_t* places;
    int64_t count;
};

// None, with a count below zero, if they are too many to be worth it.
INLINE Some not_zero(const Product* job) {
    static thread_local int32_t places[MOST_INPUTS + SOON];
    const Some none = {places, -1};
    if (job->rows != 1 || job->inputs < DEPTH || job->inputs > MOST_INPUTS) return none;
    IntVec zeros = {};
    for (int64_t k = 0; k + LANES <= job->inputs; k += LANES) zeros -= load(job->x + k) == 0.0f;
    int64_t found = 0, count = 0;
    for (int j = 0; j < LANES; j++) found += zeros[j];
    if (found * 20 < job->inputs * 17) return none;
    for (int64_t k = 0; k < job->inputs; k++) {
        places[count] = (int32_t)k;
        count += job->x[k] != 0.0f;
    }
    for (int64_t i = count; i < count + SOON; i++) places[i] = count ? places[count - 1] : 0;
    return {places, count};
}

// As `tile` for one row, of all blocks of a panel.
template <int V, typename Weight>
void tile_of_some(const float* x, Some some, const Weight* weights, float* sums) {
    for (int64_t i = 0; i < some.count;) {
        const int64_t end = some.places[i] / DEPTH * DEPTH + DEPTH;
        Vec total[V] = {};
        for (; i < some.count && some.places[i] < end; i++) {
            const int64_t k = some.places[i];
            const char* soon = reinterpret_cast<const char*>(weights + some.places[i + SOON] * PANEL);
#pragma GCC unroll 4
            for (int64_t line = 0; line < V * LANES * (int64_t)sizeof(Weight); line += LINE)
                __builtin_prefetch(soon + line);
            const Vec value = all(x[k]);
#pragma GCC unroll 8
            for (int j = 0; j < V; j++) total[j] += value * widen(weights + k * PANEL + j * LANES);
        }
#pragma GCC unroll 8
        for (int j = 0; j < V; j++) store(sums + j * LANES, load(sums + j * LANES) + total[j]);
    }
}

template <typename Weight>
void rows_of_panel(const Product* job, int64_t panel, int64_t first, int64_t count, float* sums) {
    const Weight* weights = static_cast<const Weight*>(job->weights) + panel * job->inputs * PANEL;
    const int64_t outputs = job->outputs - panel * PANEL;
    memset(sums, 0, count * PANEL * sizeof(float));
    for (int64_t k = 0; k < job->inputs; k += DEPTH) {
        const int64_t depth = job->inputs - k < DEPTH ? job->inputs - k : DEPTH;
        const char* ahead = reinterpret_cast<const char*>(weights + (k + depth) * PANEL);
        in_tiles(count, TALL, [&](int64_t row, int64_t rows) {
            const float* x = job->x + (first + row) * job->inputs + k;
            const auto add = rows == 1   ? across<1, ALONE, Weight>
                             : rows == 2 ? across<2, WIDE, Weight>
                             : rows == 3 ? across<3, WIDE, Weight>
                             : rows == 4 ? across<4, WIDE, Weight>
                             : rows == 5 ? across<5, WIDE, Weight>
                                         : across<6, WIDE, Weight>;
            add(x, job->inputs, weights + k * PANEL, depth, sums + row * PANEL, outputs, ahead);
            ahead += depth * LINE;
        });
    }
}

template <typename Weight>
void one_row_of_panel(const Product* job, int64_t panel, Some some, float* sums) {
    const Weight* weights = static_cast<const Weight*>(job->weights) + panel * job->inputs * PANEL;
    memset(sums, 0, PANEL * sizeof(float));
    for (int64_t n = 0; n < PANEL && n < job->outputs - panel * PANEL; n += ALONE * LANES)
        tile_of_some<ALONE>(job->x, some, weights + n, sums + n);
}

template <typename Weight>
void run(const void* argument) {
    const Product* job = static_cast<const Product*>(argument);
    float sums[MOST_ROWS * PANEL];
    int64_t begin, end;
    share(panels(job), &begin, &end);
    const Some some = not_zero(job);
    for (int64_t panel = begin; panel < end; panel++)
        for (int64_t first = 0; first < job->rows; first += MOST_ROWS) {
            const int64_t count = job->rows - first < MOST_ROWS ? job->rows - first : MOST_ROWS;
            if (some.count >= 0)
                one_row_of_panel<Weight>(job, panel, some, sums);
            else
                rows_of_panel<Weight>(job, panel, first, count, sums);
            for (int64_t row = 0; row < count; row++) {
                Vec values[PANEL / LANES];
                for (int j = 0; j < PANEL / LANES; j++) values[j] = load(sums + row * PANEL + j * LANES);
                finish(job, first + row, panel, values);
            }
        }
    end_of_streams();
}

}  // namespace

extern "C" bool product_fp32(const float* x, const void* weights, const float* bias, float* y, int64_t rows,
                             int64_t inputs, int64_t outputs, int activation, int threads) {
    const Product job = {x, weights, nullptr, bias, y, rows, inputs, outputs, activation};
    in_parallel(run<float>, &job, threads_for(&job, threads));
    return true;
}

extern "C" bool product_fp16(const float* x, const void* weights, const float* bias, float* y, int64_t rows,
                             int64_t inputs, int64_t outputs, int activation, int threads) {
    const Product job = {x, weights, nullptr, bias, y, rows, inputs, outputs, activation};
    in_parallel(run<uint16_t>, &job, threads_for(&job, threads));
    return true;
}

extern "C" bool product_fp8(const float* x, const void* weights, const float* scales, const float* bias,
                            float* y, int64_t rows, int64_t inputs, int64_t outputs, int activation,
                            int threads) {
    const Product job = {x, weights, scales, bias, y, rows, inputs, outputs, activation};
    in_parallel(run<Fp8>, &job, threads_for(&job, threads));
    return true;
}

#if !defined(__AVX512VNNI__)
extern "C" int int8_group() { return 1; }

extern "C" bool product_int8(const float* x, const void* weights, const float* scales, const int32_t*,
                             const float* bias, float* y, int64_t rows, int64_t inputs, int64_t outputs,
                             int activation, int threads) {
    const Product job = {x, weights, scales, bias, y, rows, inputs, outputs, activation};
    in_parallel(run<int8_t>, &job, threads_for(&job, threads));
    return true;
}
#endif
