// What a computing warp of decode_row_half.cu has of a step, and how blocks wait for each other.
#pragma once
#include "decode_row_exchange.cuh"
#include "decode_row_half.cuh"

#if HOPPER
namespace half_row {
using row::add_to_sum, row::complete, row::load_sums, row::load_word, row::mixed, row::units_of;

// What a block publishes for all: a number and by which layer of which launch, so that whoever reads it sees
// whether it is there.
DEVICE void publish(unsigned long long* place, float x, unsigned tag) {
    const unsigned long long word = static_cast<unsigned long long>(tag) << 32 | __float_as_uint(x);
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(place), "l"(word) : "memory");
}

// Two of them, once both are there. First all lanes of a warp wait for the same two: the fewer words are
// asked for, the sooner they arrive.
DEVICE float2 wait_published(const unsigned long long* place, unsigned tag) {
    ulonglong2 v;
    const unsigned long long* const first =
        reinterpret_cast<const unsigned long long*>(shuffle(reinterpret_cast<unsigned long long>(place), 0));
    do v = load_sums(first);
    while (unsigned(v.x >> 32) != tag || unsigned(v.y >> 32) != tag);
    do v = load_sums(place);
    while (unsigned(v.x >> 32) != tag || unsigned(v.y >> 32) != tag);
    return make_float2(__uint_as_float(unsigned(v.x)), __uint_as_float(unsigned(v.y)));
}

// As load_word, of other sizes.
DEVICE __half load_half(const __half* from) {
    unsigned short x;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(x) : "l"(from) : "memory");
    return __ushort_as_half(x);
}

DEVICE uint4 load_words(const __half* from) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}

// Of weights that are read once: past the L1 cache.
DEVICE uint32_t load_weights(const __half* from) {
    uint32_t x;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}

DEVICE float rounded(float x) { return __half2float(__float2half_rn(x)); }

// Sums over the first LANES lanes of each so many, of two numbers.
template <int LANES = WARP>
DEVICE float2 both_sums(float2 x) {
#pragma unroll
    for (int bits = LANES / 2; bits > 0; bits /= 2)
        x.x += shuffle_xor(x.x, bits), x.y += shuffle_xor(x.y, bits);
    return x;
}

// The layer norm of the stream, of which each warp has `columns`, each lane that has `any` two of these. Sums
// of squares are of distances from a number near the mean: of a warp's first, then of the first warp's mean.
DEVICE float2 normalized(float2 x, uint32_t weight, uint32_t bias, bool any, int columns, float2* moments,
                         int warp, int lane) {
    const float pivot = shuffle(x.x, 0);
    const float2 d = any ? make_float2(x.x - pivot, x.y - pivot) : float2{};
    const float2 of_warp = both_sums(make_float2(d.x + d.y, d.x * d.x + d.y * d.y));
    const float apart = of_warp.x / columns;
    if (lane == 0) moments[warp] = make_float2(pivot + apart, of_warp.y - of_warp.x * apart);
    sync_some(1, COMPUTING);
    const float2 moment = moments[lane % WARPS];
    const float first = moments[0].x, away = moment.x - first;
    const float2 all = both_sums<WARPS>(make_float2(away, moment.y + columns * away * away));
    const float shift = all.x / WARPS, mean = first + shift;
    const float variance = all.y / (WARPS * columns) - shift * shift;
    const float scale = rsqrtf(variance + 1e-5f);
    const float2 w = to_float2(weight), b = to_float2(bias);
    return make_float2((x.x - mean) * scale * w.x + b.x, (x.y - mean) * scale * w.y + b.y);
}

// What lane 4 g + q has of a product whose columns are all the same: of output g, or with an odd q of g + 8.
DEVICE float of_lane(const float (&c)[4], int lane) { return lane & 1 ? c[2] : c[0]; }

// A thread of the computing warps: what it has of the step, and what it does.
template <int STEPS>
struct Computing {
    using S = Share<STEPS>;
    static constexpr int SLICE = S::WIDTH / WARPS;  // columns of a warp
    const RowInput& in;
    Memory& own;
    const S& my;
    const uint32_t weights;
    const int warp, lane, g, q;
    const int column;  // the first of two of this lane
    const bool any;
    unsigned launch;
    unsigned long long *sums, *published;
    int slot, lag;
    float2 embedded = {}, of_time = {}, of_channels = {};  // what the stream is made of
    uint32_t normed = 0;                                   // of block 0: what becomes a shift state
    float first_v = 0.f;
    // Of a layer, on their way from the layer before.
    uint4 state;           // eight keys of a row of S of this lane
    __half of_channel[4];  // vectors of the head, as the low-rank functions' outer sides need them
    float s[8];            // S, when all that is deferred is done
    uint32_t next_state[4];
    // What this thread waits for of what blocks publish (negative: nothing), where it goes, and as what.
    int published_at, kind;
    uint32_t published_to;
    // The outer side of a warp: its function, the lane's row in it, steps along K, operand.
    int function, outer_steps;
    uint32_t outer_row, outer_turn, outer_x;

    DEVICE Computing(const RowInput& in, Memory& own, const S& my, uint32_t weights, int warp, int lane)
        : in(in),
          own(own),
          my(my),
          weights(weights),
          warp(warp),
          lane(lane),
          g(lane / 4),
          q(lane % 4),
          column(warp * SLICE + 2 * lane),
          any(2 * lane < SLICE) {
        launch = *reinterpret_cast<const volatile unsigned*>(in.launches);
        constexpr int WORDS = (1 + ROW_HALF_WAYS) * S::WIDTH;
        unsigned long long* const next = in.sums + (launch + 1) % 2 * WORDS;
        for (int i = my.block * COMPUTING + threadIdx.x; i < WORDS; i += S::BLOCKS * COMPUTING) next[i] = 0;
        sums = in.sums + launch % 2 * WORDS, published = in.inner;
        slot = *in.slots, lag = slot < 0 ? 0 : *in.lag;
        if (any) embedded = to_float2(load_word(in.table + size_t(*in.tokens) * S::WIDTH + column));

        const int i = 2 * (int(threadIdx.x) - WARP), of_function = i - 3 * HEAD;
        published_at = -1, published_to = 0, kind = IDENTITY;
        if (i >= 0 && of_function < 0) {
            const int which = i / HEAD, channel = i % HEAD;
            published_at = which * S::WIDTH + my.head * HEAD + channel;
            published_to = shared_address((which == 0 ? own.r : which == 1 ? own.k : own.v) + channel);
        } else if (i >= 0 && of_function < my.ranks) {
            const int w = in.rank[ROW_W], of_g = w + in.rank[ROW_A];
            published_at = 3 * S::WIDTH + of_function, published_to = shared_address(own.inner + of_function);
            if (of_function < w) kind = TANH;
            if (of_function >= of_g && of_function < of_g + in.rank[ROW_G]) kind = SIGMOID;
        }

        function = warp < 4 ? ROW_W : warp < 8 ? ROW_A : warp < 12 ? ROW_V : ROW_G;
        uint32_t at = weights + my.outer_at(), begin = 0;
        for (int f = 0; f < function; f++) at += HEAD * in.rank[f] * 2, begin += in.rank[f];
        const int row = warp % 4 * 16 + lane % 16;
        outer_steps = in.rank[function] / 16, outer_row = at + row * in.rank[function] * 2;
        outer_turn = row & (in.rank[function] % 64 ? 3 : 7);
        outer_x = shared_address(own.inner + begin) + q * 4;
    }

    DEVICE const __half* vector(int layer, int which) const {
        return reinterpret_cast<const __half*>(own.tables[layer % ROW_TABLES][which]);
    }
    DEVICE __half* shift_at(int layer, int which) const {
        return in.shift + size_t(max(slot, 0)) * in.shift_stride + size_t(2 * layer + which) * S::WIDTH +
               column;
    }
    DEVICE uint32_t column_of(const __half* vector) const { return any ? load_word(vector + column) : 0; }
    DEVICE size_t head_of_slot(int layer) const { return size_t(layer) * S::HEADS + my.head; }
    DEVICE __half* deferred_of(int layer) const {
        return in.deferred + size_t(slot) * in.deferred_stride +
               head_of_slot(layer) * MAX_LAG * DEFERRED_VECTORS * HEAD;
    }
    DEVICE __half* state_of(int layer) const {  // eight keys of a row of a lane
        const int at = (4 * warp + lane / 8) * HEAD + lane % 8 * 8;
        return in.state + size_t(slot) * in.state_stride + head_of_slot(layer) * HEAD * HEAD + at;
    }
    DEVICE void wait_for(int which, int chunk, int layer) const {
        barrier_wait(shared_address(&own.full[which][chunk]), layer % 2);
    }
    // By one thread, when all have read, or by all threads, each when it has. What was read must have been
    // used before: an arrival does not wait for reads of shared memory.
    DEVICE void used(int which) const { arrive(shared_address(&own.empty[which])); }

    // The stream's next sums, once `count` have added to each; those of WAYS are added up. First all lanes of
    // a warp wait for the same pair: the fewer words are asked for, the sooner sums arrive.
    template <int WAYS>
    DEVICE float2 wait_sums(const unsigned long long* of, unsigned count) const {
        const auto missing = [&](unsigned long long word) { return (count - unsigned(word)) & 0xff; };
        ulonglong2 v[WAYS];
        do v[0] = load_sums(of + warp * SLICE);
        while (missing(v[0].x) > NEARLY || missing(v[0].y) > NEARLY);
        if (!any) return {};
        bool all;
        do {
            all = true;
#pragma unroll
            for (int i = 0; i < WAYS; i++) v[i] = load_sums(of + i * S::WIDTH + column);
#pragma unroll
            for (int i = 0; i < WAYS; i++) all = all && complete(v[i], count);
        } while (!all);
        long long x = 0, y = 0;
#pragma unroll
        for (int i = 0; i < WAYS; i++) x += units_of(v[i].x, count), y += units_of(v[i].y, count);
        return make_float2(__ll2float_rn(x) * row::SUM_UNIT, __ll2float_rn(y) * row::SUM_UNIT);
    }
    DEVICE float2 wait_time(int layer) const { return wait_sums<1>(sums, (layer + 1) * S::HEADS); }
    // Of the layers before this one.
    DEVICE float2 wait_channels(int layer) const {
        return wait_sums<ROW_HALF_WAYS>(sums + S::WIDTH, layer * (S::BLOCKS / 2 / ROW_HALF_WAYS));
    }
    DEVICE float2 stream() const {
        return make_float2(embedded.x + of_time.x + of_channels.x, embedded.y + of_time.y + of_channels.y);
    }
    // The input of a norm, when all blocks have read that of the token before.
    DEVICE void keep_shift(int layer, int which) const {
        if (my.block == 0 && slot >= 0 && any) *reinterpret_cast<uint32_t*>(shift_at(layer, which)) = normed;
    }

    // Sums over the warps of their parts of K, by a warp.
    DEVICE float over_warps() const {
        float sum[4] = {};
#pragma unroll
        for (int i = 0; i < WARPS; i++) sum[i % 4] += own.sums[i][lane];
        return (sum[0] + sum[1]) + (sum[2] + sum[3]);
    }

    // Of the head's channels, the one of which a lane has the low-rank functions' results.
    DEVICE int channel_of_lane() const { return warp % 4 * 16 + g + 8 * (q & 1); }

    // The norm's result mixed with that of the token before, as operands of a warp.
    DEVICE void put_operand(int i, float2 x, uint32_t before, uint32_t amount) const {
        const float2 m = mixed(x, before, amount);
        if (any) own.x[warp][i][q * 8 + g] = to_half2(m.x, m.y);
    }

    // Both halves of operand b of all steps of a warp, from one of its operands.
    DEVICE void load_operand(int i, uint4 (&b)[2]) const {
        const uint32_t at = shared_address(own.x[warp][i]) + q * 32;
        b[0] = load_shared_words(at), b[1] = load_shared_words(at + 16);
    }

    // Sums of 16 rows by a warp's columns; b: as load_operand has them. row: of this lane, at its first
    // column.
    static DEVICE void multiply(float (&c)[4], uint32_t row, const uint4 (&b)[2]) {
        const uint32_t words[8] = {b[0].x, b[0].y, b[0].z, b[0].w, b[1].x, b[1].y, b[1].z, b[1].w};
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            uint32_t a[4];
            load_matrix(a, row + i * 32);
            mma(c, a[0], a[1], a[2], a[3], words[2 * i], words[2 * i + 1]);
        }
    }
    // Row i of a part, at the first of a warp's columns that this lane reads.
    DEVICE uint32_t row_of(int at, int i) const {
        return weights + at + i * S::PITCH + warp * SLICE * 2 + lane / 16 * 16;
    }

    // Of a vector of the head, those of the lane's keys.
    DEVICE void of_keys(const float* vector, float (&x)[8]) const {
        const uint32_t at = shared_address(vector) + lane % 8 * 32;
        const float4 a = load_shared(at), b = load_shared(at + 16);
        x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    }
    // The sum over the lanes of a row of S.
    static DEVICE float over_eight(float x) {
#pragma unroll
        for (int bits = 1; bits < 8; bits *= 2) x += shuffle_xor(x, bits);
        return x;
    }

    // The word of lane 8 (lane % 4) + i.
    DEVICE float of_pair(uint32_t word, int i) const {
        return __uint_as_float(shuffle(word, lane % 4 * 8 + i));
    }

    // decode_row_half_time.cuh
    DEVICE void ask(int layer);
    DEVICE void time_in(int layer);
    DEVICE void exchange_time(int layer);
    DEVICE void outer_sides(int layer);
    DEVICE void apply_deferred();
    DEVICE void recur(int layer);
    DEVICE void keep_state(int layer) const;
    DEVICE void time_out(int layer, __half2 norm_weight, __half2 norm_bias);
    // decode_row_half_compute.cuh
    DEVICE void channels_in(int layer, uint32_t weight, uint32_t bias, uint32_t before, uint32_t amount);
    DEVICE void channels_out(int layer);
    DEVICE void fetch(int layer) const;
    DEVICE void layers();
};
}  // namespace half_row
#endif
