// What a computing warp of decode_row_half.cu has of a step, and how blocks wait for each other.
#pragma once
#include "decode_row_exchange.cuh"
#include "decode_row_half.cuh"

#if HOPPER
namespace half_row {
using row::add_to_sum, row::complete, row::finite_stream, row::load_sums, row::load_word, row::units_of;

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

// Of weights that are read once: past the L1 cache.
DEVICE uint32_t load_weights(const uint8_t* from) {
    uint32_t x;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}

// x as if it were not known in which layer it is used. Else what follows from it would be kept through all
// layers, in more registers than there are.
DEVICE int opaque(int x) {
    asm volatile("" : "+r"(x));
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

// What two columns of a layer norm, of mean 0 and variance 1, become.
struct Affine {
    float2 factor, addend;
    Affine() = default;
    DEVICE Affine(uint32_t weight, uint32_t bias) : factor(to_float2(weight)), addend(to_float2(bias)) {}
    DEVICE float2 operator()(float2 x) const {
        return make_float2(x.x * factor.x + addend.x, x.y * factor.y + addend.y);
    }
    // The same mixed with what it was for the token before.
    DEVICE Affine mixed(uint32_t before, uint32_t amount) const {
        const float2 b = to_float2(before), a = to_float2(amount);
        Affine m;
        m.factor = make_float2(factor.x * (1.f - a.x), factor.y * (1.f - a.y));
        m.addend = make_float2(addend.x + (b.x - addend.x) * a.x, addend.y + (b.y - addend.y) * a.y);
        return m;
    }
    // Computed here, not where it is needed: before a wait, not after it.
    DEVICE void here() { asm volatile("" : "+f"(factor.x), "+f"(factor.y), "+f"(addend.x), "+f"(addend.y)); }
};

// The stream as a layer norm has it before weight and bias; each warp has `columns`, each lane that has `any`
// two of these. Sums of squares are of distances from a number near the mean: of a warp's first, then of the
// first warp's mean.
DEVICE float2 normalized(float2 x, bool any, int columns, float2* moments, int warp, int lane) {
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
    return make_float2((x.x - mean) * scale, (x.y - mean) * scale);
}

// What lane 4 g + q has of a product whose columns are all the same: of output g, or with an odd q of g + 8.
// By value, so that it does not become an address in local memory.
DEVICE float of_lane(const float (&c)[4], int lane) {
    const float even = c[0], odd = c[2];
    return lane & 1 ? odd : even;
}

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
    unsigned long long* sums;
    int slot, lag;
    // The stream is the embedding, the sum of all time mixes and that of all channel mixes: `rest` is all of
    // it but the one of these that comes next.
    float2 embedded = {}, rest = {};
    float2 normalized_time = {};  // the time mix's input, before weight and bias
    uint32_t normed = 0;          // that of the channel mix
    float s[8];                   // of this lane's row of S eight keys, when all that is deferred is done
    Places places;

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
        grid_dependency_wait();
        launch = *reinterpret_cast<const volatile unsigned*>(in.launches);
        constexpr int WORDS = (1 + ROW_HALF_WAYS) * S::WIDTH;
        unsigned long long* const next = in.sums + (launch + 1) % 2 * WORDS;
        for (int i = my.block * COMPUTING + threadIdx.x; i < WORDS; i += S::BLOCKS * COMPUTING) next[i] = 0;
        sums = in.sums + launch % 2 * WORDS;
        slot = *in.slots, lag = slot < 0 ? 0 : *in.lag;
        if (any) embedded = to_float2(load_word(in.table + size_t(*in.tokens) * S::WIDTH + column));
        rest = embedded;

        const int i = 2 * (int(threadIdx.x) - WARP), of_function = i - 3 * HEAD;
        Places p = {-1, 0, IDENTITY};
        if (i >= 0 && of_function < 0) {
            const int which = i / HEAD, channel = i % HEAD;
            p.published_at = which * S::WIDTH + my.head * HEAD + channel;
            p.published_to = which == 0 ? shared_address(own.r + half_eights(channel))
                                        : shared_address((which == 1 ? own.k : own.v) + channel);
        } else if (i >= 0 && of_function < my.ranks) {
            const int w = in.rank[ROW_W], of_g = w + in.rank[ROW_A];
            p.published_at = 3 * S::WIDTH + of_function;
            p.published_to = shared_address(own.inner + quarters(of_function));
            if (of_function < w) p.kind = TANH;
            if (of_function >= of_g && of_function < of_g + in.rank[ROW_G]) p.kind = SIGMOID;
        }

        const int function = this->function();
        uint32_t at = weights + my.outer_at(), begin = 0;
        for (int f = 0; f < function; f++) at += HEAD * in.rank[f] * 2, begin += in.rank[f];
        const int row = warp % 4 * 16 + lane % 16;
        p.outer_steps = in.rank[function] / 16, p.outer_row = at + row * in.rank[function] * 2;
        p.outer_turn = row & (in.rank[function] % 64 ? 3 : 7);
        p.outer_x = shared_address(own.inner + begin) + q * 16;
        own.places[threadIdx.x] = p;
        if (slot < 0) own.state[threadIdx.x] = {};
    }

    // Whose outer side the warp has.
    DEVICE int function() const { return warp < 4 ? ROW_W : warp < 8 ? ROW_A : warp < 12 ? ROW_V : ROW_G; }
    DEVICE const __half* of_head(int layer, int which) const { return own.vectors[layer % 2][which]; }
    DEVICE const __half* vector(int layer, int which) const {
        return reinterpret_cast<const __half*>(own.tables[layer % ROW_TABLES][which]);
    }
    DEVICE __half* shift_at(int layer, int which) const {
        return in.shift + size_t(max(slot, 0)) * in.shift_stride + size_t(2 * layer + which) * S::WIDTH +
               column;
    }
    DEVICE uint32_t column_of(const __half* vector) const { return any ? load_word(vector + column) : 0; }
    DEVICE unsigned long long* published_in(int layer) const {
        return in.inner + layer % 2 * (3 * S::WIDTH + my.ranks);
    }
    DEVICE unsigned tag(int layer) const { return launch * 256 + layer + 1; }
    DEVICE size_t head_of_slot(int layer) const { return size_t(layer) * S::HEADS + my.head; }
    DEVICE __half* deferred_of(int layer) const {
        return in.deferred + size_t(slot) * in.deferred_stride +
               head_of_slot(layer) * MAX_LAG * DEFERRED_VECTORS * HEAD;
    }
    DEVICE __half* state_of(int layer) const {  // eight keys of a row of a lane
        const int at = (4 * warp + lane / 8) * HEAD + lane % 8 * 8;
        return in.state + size_t(slot) * in.state_stride + head_of_slot(layer) * HEAD * HEAD + at;
    }
    // For a part of the weights.
    DEVICE void wait_for(int which, int layer) const {
        const bool wide = which == PART_IN || which == PART_KEY;
#pragma unroll
        for (int chunk = 0; chunk < (wide ? CHUNKS : 1); chunk++)
            barrier_wait(shared_address(&own.full[which][chunk]), layer % 2);
    }
    // By one thread, when all have read, or by all threads, each when it has. What was read must have been
    // used before: an arrival does not wait for reads of shared memory.
    DEVICE void used(int which) const { arrive(shared_address(&own.empty[which])); }

    // The stream's next sums, once `count` have added to each; those of WAYS are added up. First one warp
    // waits for a pair of them and the others for it: the fewer words are asked for, the sooner sums arrive.
    template <int WAYS>
    DEVICE float2 wait_sums(const unsigned long long* of, unsigned count) const {
        const auto missing = [&](unsigned long long word) { return (count - unsigned(word)) & 0xff; };
        ulonglong2 v[WAYS];
        if (warp == 0) {
            do v[0] = load_sums(of);
            while (missing(v[0].x) > NEARLY || missing(v[0].y) > NEARLY);
        }
        sync_some(1, COMPUTING);
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
        return wait_sums<ROW_HALF_WAYS>(sums + S::WIDTH, layer * (S::BLOCKS / ROW_HALF_WAYS));
    }
    // The stream, with the sum that has come.
    DEVICE float2 stream(float2 sum) {
        const float2 x = make_float2(rest.x + sum.x, rest.y + sum.y);
        rest = make_float2(embedded.x + sum.x, embedded.y + sum.y);
        return x;
    }
    // The input of a mix becomes a shift state when all blocks have read that of the token before: when inner
    // sides have come from all of them, or the sums of the channel mix.
    DEVICE bool keeps_shift() const { return my.block == 0 && slot >= 0 && any; }
    DEVICE void keep_time_shift(int layer) const {
        if (!keeps_shift()) return;
        const Affine norm(column_of(vector(layer, ROW_NORM1_WEIGHT)),
                          column_of(vector(layer, ROW_NORM1_BIAS)));
        const float2 x = norm(normalized_time);
        *reinterpret_cast<uint32_t*>(shift_at(layer, 0)) = to_finite_half2(x.x, x.y);
    }
    DEVICE void keep_channel_shift(int layer) const {
        if (keeps_shift()) *reinterpret_cast<uint32_t*>(shift_at(layer, 1)) = normed;
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

    // Two columns as operands of a warp.
    DEVICE void put_operand(int i, float2 x) const {
        if (any) own.x[warp][i][q * 8 + g] = to_half2(x.x, x.y);
    }

    // Both halves of operand b of all steps of a warp, from one of its operands.
    DEVICE void load_operand(int i, uint4 (&b)[2]) const {
        const uint32_t at = shared_address(own.x[warp][i]) + q * 32;
        b[0] = load_shared_words(at), b[1] = load_shared_words(at + 16);
    }

    // What a warp multiplies of 16 rows, from `row` on, which is of this lane, at its first column.
    using Fragments = uint32_t[STEPS][4];
    static DEVICE void load_fragments(Fragments& a, uint32_t row) {
#pragma unroll
        for (int i = 0; i < STEPS; i++) load_matrix(a[i], row + i * 32);
    }
    // Sums of these rows; b: as load_operand has them.
    static DEVICE void multiply(float (&c)[4], const Fragments& a, const uint4 (&b)[2]) {
        const uint32_t words[8] = {b[0].x, b[0].y, b[0].z, b[0].w, b[1].x, b[1].y, b[1].z, b[1].w};
#pragma unroll
        for (int i = 0; i < STEPS; i++)
            mma(c, a[i][0], a[i][1], a[i][2], a[i][3], words[2 * i], words[2 * i + 1]);
    }
    static DEVICE void multiply(float (&c)[4], uint32_t row, const uint4 (&b)[2]) {
        Fragments a;
        load_fragments(a, row);
        multiply(c, a, b);
    }
    // Row i of a part, at the first of a warp's columns that this lane reads.
    DEVICE uint32_t row_of(int at, int i) const {
        return weights + at + i * S::PITCH + warp * SLICE * 2 + lane / 16 * 16;
    }

    // Of a vector of the head, those of the lane's keys.
    DEVICE void of_keys(const float* vector, float (&x)[8]) const {
        const uint32_t at = shared_address(vector) + lane % 8 * 16;
        const float4 a = load_shared(at), b = load_shared(at + HEAD / 2 * 4);
        x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    }
    // The sum over the lanes of a row of S.
    static DEVICE float over_eight(float x) {
#pragma unroll
        for (int bits = 1; bits < 8; bits *= 2) x += shuffle_xor(x, bits);
        return x;
    }

    // decode_row_half_time.cuh
    DEVICE void ask(int layer);
    DEVICE void time_in(int layer);
    DEVICE void publish_time(int layer) const;
    DEVICE void exchange_time(int layer);
    DEVICE void outer_sides(int layer);
    DEVICE void apply_deferred();
    DEVICE void recur(int layer);
    DEVICE void keep_state(int layer) const;
    DEVICE void time_out(int layer);
    // decode_row_half_compute.cuh
    DEVICE void channels_in(int layer, Affine norm, Affine mixed);
    DEVICE void channels_out(int layer) const;
    DEVICE void fetch(int layer) const;
    DEVICE void layers();
};
}  // namespace half_row
#endif
