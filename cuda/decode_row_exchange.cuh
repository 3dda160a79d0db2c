// Exchanges between the blocks of decode_row.cu, and its norms.
#pragma once
#include "decode_row_products.cuh"

#if HOPPER
namespace row {
// What is added to the stream. Blocks add to 64-bit words: above the lowest byte the sum in units of 2^-24,
// in it how many have added. So sums do not depend on an order, and whoever reads a word sees whether it is
// complete: nothing else has to be waited for. Counts go on through a launch; what they carry is subtracted.
constexpr float SUM_UNIT = 1.f / (1 << 24);
// Words cannot hold NaN, which is added as -MOST_SUM. That is no multiple of a large power of two: where many
// are added, and the sum wraps at 2^31, it seldom becomes small.
constexpr float MOST_SUM = 1e9f, MOST_STREAM = 1 << 26;

DEVICE void add_to_sum(unsigned long long* place, float x) {
    const long long units = __float2ll_rn(fminf(fmaxf(x, -MOST_SUM), MOST_SUM) * (1.f / SUM_UNIT));
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(place), "l"(units * 256 + 1) : "memory");
}

// The stream behind the last layer: NaN where it is larger than any model's, as only NaN makes it.
DEVICE float finite_stream(float x) { return fabsf(x) < MOST_STREAM ? x : __uint_as_float(0x7fffffff); }

DEVICE ulonglong2 load_sums(const unsigned long long* place) {
    ulonglong2 v;
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(v.x), "=l"(v.y)
                 : "l"(place)
                 : "memory");
    return v;
}

DEVICE bool complete(ulonglong2 v, unsigned count) {
    return (((unsigned(v.x) ^ count) | (unsigned(v.y) ^ count)) & 0xff) == 0;
}

DEVICE long long units_of(unsigned long long word, unsigned count) {
    return static_cast<long long>(word - count) >> 8;
}

DEVICE float sum_of(unsigned long long word, unsigned count) {
    return __ll2float_rn(units_of(word, count)) * SUM_UNIT;
}

// The sums of a lane's pairs of columns, 64 apart, once `count` have added to each. First all lanes wait for
// the same pair: the fewer words are asked for, the sooner sums arrive.
DEVICE void wait_sums(const unsigned long long* sums, unsigned count, int tiles,
                      float2 (&found)[ROW_WARP_TILES]) {
    if (tiles == 0) return;
    ulonglong2 v[ROW_WARP_TILES];
    const unsigned long long* const first = sums - 2 * (threadIdx.x % WARP);
    do v[0] = load_sums(first);
    while (!complete(v[0], count));
    bool missing;
    do {
        missing = false;
#pragma unroll
        for (int i = 0; i < ROW_WARP_TILES; i++)
            if (i < tiles) v[i] = load_sums(sums + i * ROW_TILE);
#pragma unroll
        for (int i = 0; i < ROW_WARP_TILES; i++)
            if (i < tiles) missing |= !complete(v[i], count);
    } while (warp_any(missing));
#pragma unroll
    for (int i = 0; i < ROW_WARP_TILES; i++)
        if (i < tiles) found[i] = make_float2(sum_of(v[i].x, count), sum_of(v[i].y, count));
}

// Four results of the low-rank functions' inner sides, from `first` on, once all warps of a block have added
// to their sums.
DEVICE void wait_inner(const unsigned long long* sums, int first, const RowInput& in, __half* to) {
    ulonglong2 a, b;
    do a = load_sums(sums), b = load_sums(sums + 2);
    while (!complete(a, ROW_WARPS) || !complete(b, ROW_WARPS));
    const int w = in.rank[ROW_W], g = w + in.rank[ROW_A];
    const auto result = [&](unsigned long long word, int i) {
        const float sum = sum_of(word, ROW_WARPS);
        return activate(sum, i < w ? TANH : i >= g && i < g + in.rank[ROW_G] ? SIGMOID : IDENTITY);
    };
    const uint32_t x = to_half2(result(a.x, first), result(a.y, first + 1)),
                   y = to_half2(result(b.x, first + 2), result(b.y, first + 3));
    *reinterpret_cast<uint2*>(to) = make_uint2(x, y);
}

DEVICE void arrive_some(int name, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// A load that is on its way from here on, no matter what is waited for later.
DEVICE uint32_t load_word(const __half* from) {
    uint32_t x;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}

// A lane's pairs of columns of a vector, 64 apart.
DEVICE void load_columns(const __half* from, int tiles, uint32_t (&to)[ROW_WARP_TILES]) {
#pragma unroll
    for (int i = 0; i < ROW_WARP_TILES; i++)
        if (i < tiles) to[i] = load_word(from + i * ROW_TILE);
}

// The layer norm of the stream, of which each lane has some columns.
DEVICE void normalize(float2 (&v)[ROW_WARP_TILES], const uint32_t (&weight)[ROW_WARP_TILES],
                      const uint32_t (&bias)[ROW_WARP_TILES], int tiles, int heads, float2* moments, int warp,
                      int lane) {
    float sum = 0.f, squares = 0.f;
#pragma unroll
    for (int i = 0; i < ROW_WARP_TILES; i++) sum += v[i].x + v[i].y;
    const float own_mean = tiles ? warp_sum(sum) / (tiles * ROW_TILE) : 0.f;
#pragma unroll
    for (int i = 0; i < ROW_WARP_TILES; i++) {
        const float2 d = make_float2(v[i].x - own_mean, v[i].y - own_mean);
        squares += i < tiles ? d.x * d.x + d.y * d.y : 0.f;
    }
    squares = warp_sum(squares);
    if (lane == 0) moments[warp] = make_float2(own_mean, squares);
    sync_some(1, ROW_COMPUTING);
    const int each = (heads + ROW_WARPS - 1) / ROW_WARPS, of = lane % ROW_WARPS;
    const int columns = max(min(each, heads - of * each), 0) * ROW_TILE, width = heads * HEAD;
    const float2 moment = moments[of];  // each is summed twice
    const float mean = warp_sum(moment.x * columns) / (2 * width), apart = moment.x - mean;
    const float variance = warp_sum(moment.y + columns * apart * apart) / (2 * width);
    const float scale = rsqrtf(variance + 1e-5f);
#pragma unroll
    for (int i = 0; i < ROW_WARP_TILES; i++) {
        const float2 w = to_float2(weight[i]), b = to_float2(bias[i]);
        v[i].x = (v[i].x - mean) * scale * w.x + b.x, v[i].y = (v[i].y - mean) * scale * w.y + b.y;
    }
}

DEVICE float2 mixed(float2 x, uint32_t before, uint32_t amount) {
    const float2 b = to_float2(before), a = to_float2(amount);
    return make_float2(x.x + (b.x - x.x) * a.x, x.y + (b.y - x.y) * a.y);
}
}  // namespace row
#endif
