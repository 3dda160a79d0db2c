// What a computing warp of decode_row_wide.cu has of a step, and how blocks wait for each other.
#pragma once
#include "decode_row_wide.cuh"

#if HOPPER
namespace wide_row {
using half_row::both_sums, half_row::load_weights, half_row::of_lane, half_row::opaque, half_row::publish,
    half_row::rounded;
using row::add_to_sum, row::complete, row::finite_stream, row::load_sums, row::load_word, row::units_of;

DEVICE unsigned long long load_published(const unsigned long long* place) {
    unsigned long long v;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(place) : "memory");
    return v;
}
DEVICE bool is_of(unsigned long long word, unsigned tag) { return unsigned(word >> 32) == tag; }

// Two numbers that blocks have published, once both are there. First all lanes of a warp wait for the same
// two: the fewer words are asked for, the sooner they arrive.
DEVICE float2 wait_published(const unsigned long long* place, unsigned tag) {
    const unsigned long long* const first =
        reinterpret_cast<const unsigned long long*>(shuffle(reinterpret_cast<unsigned long long>(place), 0));
    ulonglong2 v;
    for (unsigned spins = 0;; spun(spins)) {
        v = load_sums(first);
        if (is_of(v.x, tag) && is_of(v.y, tag)) break;
    }
    for (unsigned spins = 0;; spun(spins)) {
        v = load_sums(place);
        if (is_of(v.x, tag) && is_of(v.y, tag)) break;
    }
    return make_float2(__uint_as_float(unsigned(v.x)), __uint_as_float(unsigned(v.y)));
}

// A thread of the computing warps: what it has of the step, and what it does. Of each vector of C numbers a
// warp has SLICE side by side, of these a lane two of each 64, if there are so many (`any`).
template <int STEPS>
struct Computing {
    using S = Share<STEPS>;
    using M = Memory<STEPS>;
    static constexpr int SLICE = S::SLICE, PAIRS = S::PAIRS;
    using Words = uint32_t[PAIRS];
    using Numbers = float2[PAIRS];
    const RowInput& in;
    M& own;
    const S& my;
    const uint32_t outer, ring;
    const int stages;
    int warp, lane, g, q;
    int column;  // the first of this lane
    unsigned launch;
    int slot, lag;
    // The stream is `base`, of the embedding and all time mixes, and the sum of all channel mixes.
    Numbers base = {}, channels = {};
    float s[8];     // of this lane's row of S eight keys, when all that is deferred is done
    int stage = 0;  // of the ring
    unsigned parity = 0;

    DEVICE Computing(const RowInput& in, M& own, const S& my, uint32_t weights, uint32_t ring, int stages,
                     int warp, int lane)
        : in(in),
          own(own),
          my(my),
          outer(weights),
          ring(ring),
          stages(stages),
          warp(warp),
          lane(lane),
          g(lane / 4),
          q(lane % 4),
          column(warp * SLICE + 2 * lane) {
        grid_dependency_wait();
        launch = *reinterpret_cast<const volatile unsigned*>(in.launches);
        unsigned long long* const next = sums_of(launch + 1);
        for (int i = my.block * COMPUTING + threadIdx.x; i < S::WIDTH; i += my.blocks * COMPUTING)
            next[i] = 0;
        slot = *in.slots, lag = slot < 0 ? 0 : *in.lag;
        const __half* const embedding = in.table + size_t(*in.tokens) * S::WIDTH + column;
#pragma unroll
        for (int p = 0; p < PAIRS; p++)
            if (any(p)) base[p] = to_float2(load_word(embedding + p * 2 * WARP));
        if (slot < 0) own.state[threadIdx.x] = {};
    }

    // The sums of the channel mixes; y of all heads, two numbers a word; what time mixes add to the stream.
    DEVICE unsigned long long* sums_of(unsigned launch) const {
        return in.sums + launch % 2 * ((1 + ROW_HALF_WAYS) * S::WIDTH);  // of which some are not used
    }
    DEVICE unsigned long long* ys() const { return in.inner + 3 * S::WIDTH + my.ranks; }
    DEVICE unsigned long long* outputs() const { return ys() + S::WIDTH / 2; }

    // Else what follows from these would be kept through all layers, in more registers than there are.
    DEVICE void forget() { asm volatile("" : "+r"(warp), "+r"(lane), "+r"(g), "+r"(q), "+r"(column)); }
    DEVICE bool any(int p) const { return (p + 1) * 2 * WARP <= SLICE || p * 2 * WARP + 2 * lane < SLICE; }
    DEVICE int function() const { return warp / 4 == 2 ? ROW_V : warp / 4 == 3 ? ROW_G : warp / 4; }
    DEVICE const __half* of_head(int layer, int which) const { return own.vectors[layer % 2][which]; }
    DEVICE const __half* vector(int layer, int which) const {
        return reinterpret_cast<const __half*>(own.tables[layer % ROW_TABLES][which]);
    }
    DEVICE __half* shift_at(int layer, int which) const {
        return in.shift + size_t(max(slot, 0)) * in.shift_stride + size_t(2 * layer + which) * S::WIDTH;
    }
    DEVICE void load_columns(const __half* vector, Words& to) const {
#pragma unroll
        for (int p = 0; p < PAIRS; p++) to[p] = any(p) ? load_word(vector + column + p * 2 * WARP) : 0;
    }
    DEVICE unsigned tag(int layer) const { return launch * 256 + layer + 1; }
    DEVICE size_t head_of_slot(int layer) const { return size_t(layer) * S::HEADS + my.block; }
    DEVICE __half* deferred_of(int layer) const {
        return in.deferred + size_t(slot) * in.deferred_stride +
               head_of_slot(layer) * MAX_LAG * DEFERRED_VECTORS * HEAD;
    }
    DEVICE __half* state_of(int layer) const {  // eight keys of a row of a lane
        const int at = (4 * warp + lane / 8) * HEAD + lane % 8 * 8;
        return in.state + size_t(slot) * in.state_stride + head_of_slot(layer) * HEAD * HEAD + at;
    }

    // The sums of the channel mixes before `layer`, once all blocks have added theirs. First one warp waits
    // for a pair of them and the others for it: the fewer words are asked for, the sooner sums arrive.
    DEVICE void wait_channels(int layer) {
        const unsigned count = unsigned(layer) * my.blocks;
        const unsigned long long* const sums = sums_of(launch);
        const auto missing = [&](unsigned long long word) { return (count - unsigned(word)) & 0xff; };
        if (warp == 0)
            for (unsigned spins = 0;; spun(spins)) {
                const ulonglong2 v = load_sums(sums);
                if (missing(v.x) <= NEARLY && missing(v.y) <= NEARLY) break;
            }
        sync_some(1, COMPUTING);
        ulonglong2 v[PAIRS];
        for (unsigned spins = 0;; spun(spins)) {
            bool all = true;
#pragma unroll
            for (int p = 0; p < PAIRS; p++)
                if (any(p)) v[p] = load_sums(sums + column + p * 2 * WARP);
#pragma unroll
            for (int p = 0; p < PAIRS; p++) all = all && (!any(p) || complete(v[p], count));
            if (all) break;
        }
#pragma unroll
        for (int p = 0; p < PAIRS; p++)
            channels[p] = any(p) ? make_float2(__ll2float_rn(units_of(v[p].x, count)) * row::SUM_UNIT,
                                               __ll2float_rn(units_of(v[p].y, count)) * row::SUM_UNIT)
                                 : float2{};
    }
    // What a time mix adds to the stream, from all blocks.
    DEVICE void wait_outputs(int layer) {
        const unsigned tag = this->tag(layer);
        const unsigned long long* const outputs = this->outputs();
        for (unsigned spins = 0;; spun(spins))
            if (is_of(load_published(outputs + warp * SLICE), tag)) break;
        ulonglong2 v[PAIRS];
        for (unsigned spins = 0;; spun(spins)) {
            bool all = true;
#pragma unroll
            for (int p = 0; p < PAIRS; p++)
                if (any(p)) v[p] = load_sums(outputs + column + p * 2 * WARP);
#pragma unroll
            for (int p = 0; p < PAIRS; p++)
                all = all && (!any(p) || (is_of(v[p].x, tag) && is_of(v[p].y, tag)));
            if (all) break;
        }
#pragma unroll
        for (int p = 0; p < PAIRS; p++)
            if (any(p))
                base[p].x += __uint_as_float(unsigned(v[p].x)),
                    base[p].y += __uint_as_float(unsigned(v[p].y));
    }
    // y of all heads as operand 0, two numbers a word.
    DEVICE void wait_ys(int layer) const {
        const unsigned tag = this->tag(layer);
        const unsigned long long* const of_warp = ys() + warp * (SLICE / 2);
        for (unsigned spins = 0;; spun(spins))
            if (is_of(load_published(of_warp), tag)) break;
        unsigned long long v[PAIRS];
        for (unsigned spins = 0;; spun(spins)) {
            bool all = true;
#pragma unroll
            for (int p = 0; p < PAIRS; p++)
                if (any(p)) v[p] = load_published(of_warp + lane + p * WARP);
#pragma unroll
            for (int p = 0; p < PAIRS; p++) all = all && (!any(p) || is_of(v[p], tag));
            if (all) break;
        }
#pragma unroll
        for (int p = 0; p < PAIRS; p++)
            if (any(p)) put_operand(0, p, unsigned(v[p]));
    }

    // The stream as a layer norm has it before weight and bias. Sums of squares are of distances from a
    // number near the mean: of a warp's first, then of the first warp's mean.
    DEVICE void normalized(Numbers& x, float2* moments) const {
#pragma unroll
        for (int p = 0; p < PAIRS; p++)
            x[p] = make_float2(base[p].x + channels[p].x, base[p].y + channels[p].y);
        const float near = shuffle(x[0].x, 0);
        float2 of_lane = {};
#pragma unroll
        for (int p = 0; p < PAIRS; p++)
            if (any(p)) {
                const float2 d = make_float2(x[p].x - near, x[p].y - near);
                of_lane.x += d.x + d.y, of_lane.y += d.x * d.x + d.y * d.y;
            }
        const float2 of_warp = both_sums(of_lane);
        const float apart = of_warp.x / SLICE;
        if (lane == 0) moments[warp] = make_float2(near + apart, of_warp.y - of_warp.x * apart);
        sync_some(1, COMPUTING);
        const float2 moment = moments[lane % WARPS];
        const float first = moments[0].x, away = moment.x - first;
        const float2 all = both_sums<WARPS>(make_float2(away, moment.y + SLICE * away * away));
        const float shift = all.x / WARPS, mean = first + shift;
        const float variance = all.y / (WARPS * SLICE) - shift * shift;
        const float scale = rsqrtf(variance + 1e-5f);
#pragma unroll
        for (int p = 0; p < PAIRS; p++) x[p] = make_float2((x[p].x - mean) * scale, (x[p].y - mean) * scale);
    }
    // The stream's layer norm. The last block keeps it where the step's result comes, too.
    DEVICE void norm(Numbers& x, const Words& weight, const Words& bias, float2* moments) {
        normalized(x, moments);
#pragma unroll
        for (int p = 0; p < PAIRS; p++) {
            const float2 w = to_float2(weight[p]), b = to_float2(bias[p]);
            x[p] = make_float2(x[p].x * w.x + b.x, x[p].y * w.y + b.y);
            if (my.block == my.blocks - 1 && any(p)) *normed(p) = to_finite_half2(x[p].x, x[p].y);
        }
    }
    // Its mix with what it was for the token before, as an operand.
    DEVICE void put_mixed(int which, const Numbers& x, const Words& before, const Words& amount) const {
#pragma unroll
        for (int p = 0; p < PAIRS; p++) {
            const float2 m = row::mixed(x[p], before[p], amount[p]);
            if (any(p)) put_operand(which, p, to_half2(m.x, m.y));
        }
    }
    DEVICE void put_operand(int which, int p, uint32_t word) const {
        own.x[warp][which][p * WARP + q * 8 + g] = word;
    }
    DEVICE uint32_t* normed(int p) const {
        return reinterpret_cast<uint32_t*>(in.normed + column + p * 2 * WARP);
    }
    // The input of a mix becomes a shift state when all blocks have read that of the token before.
    DEVICE void keep_shift(int layer, int which) const {
        if (my.block != my.blocks - 1 || slot < 0) return;
#pragma unroll
        for (int p = 0; p < PAIRS; p++)
            if (any(p))
                *reinterpret_cast<uint32_t*>(shift_at(layer, which) + column + p * 2 * WARP) = *normed(p);
    }

    // Rows of a phase times an operand, over the warp's part of K, to `to` [rows]; rows from `of_first` on
    // times the second operand. Weights are operand b of tensor cores, eight rows at a time, and operands
    // rows of operand a.
    DEVICE void multiply(int phase, int of_first, float* to) {
        const int rows = my.rows[phase].count;
        uint32_t x[STEPS][2];
        {
            const uint32_t at = shared_address(own.x[warp][g % KINDS]) + q * 32;
#pragma unroll
            for (int i = 0; i < STEPS; i += 2) {  // two steps are 32 numbers, half of what lies together
                const uint4 words = load_shared_words(at + i / 4 * WARP * 4 + i % 4 * 8);
                x[i][0] = words.x, x[i][1] = words.y, x[i + 1][0] = words.z, x[i + 1][1] = words.w;
            }
        }
        const uint32_t full = shared_address(own.full), empty = shared_address(own.empty);
        const uint32_t of_lane = ring + lane % 4 * S::PITCH + warp * SLICE * 2 + lane / 8 * 16;
        const uint32_t zero = *reinterpret_cast<volatile uint32_t*>(&own.zero);
#pragma unroll 1
        for (int first = 0; first < rows; first += 2 * STAGE_ROWS) {
            const bool two = first + STAGE_ROWS < rows;
            const int now = stage;
            wait_for_phase(full + now * 8, parity);
            advance();
            int second = now;
            if (two) {
                second = stage;
                wait_for_phase(full + second * 8, parity);
                advance();
            }
            const uint32_t at = of_lane + (lane & 4 ? second : now) * S::STAGE_BYTES;
            uint32_t b[STEPS / 2][4], read = 0;
#pragma unroll
            for (int i = 0; i < STEPS / 2; i++) load_matrix(b[i], at + i * 64), read |= b[i][0] | b[i][3];
            // An arrival does not wait for reads of shared memory, but for what its address is made of.
            sync_warp();
            if (lane == 0) {
                arrive(empty + now * 8 + (read & zero));
                if (two) arrive(empty + second * 8 + (read & zero));
            }
            float even[4] = {}, odd[4] = {};
#pragma unroll
            for (int i = 0; i < STEPS / 2; i++) {
                mma(even, x[2 * i][0], 0, x[2 * i][1], 0, b[i][0], b[i][1]);
                mma(odd, x[2 * i + 1][0], 0, x[2 * i + 1][1], 0, b[i][2], b[i][3]);
            }
            const int i = first + 2 * q;
            if (i < rows && g == int(i >= of_first)) to[i] = even[0] + odd[0];
            if (i + 1 < rows && g == int(i + 1 >= of_first)) to[i + 1] = even[1] + odd[1];
        }
    }
    DEVICE void advance() {
        if (++stage == stages) stage = 0, parity ^= 1;
    }
    // Row i of what warps have multiplied, over all of K.
    template <int PITCH>
    static DEVICE float over_warps(const float (&sums)[WARPS][PITCH], int i) {
        float sum[4] = {};
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum[w % 4] += sums[w][i];
        return (sum[0] + sum[1]) + (sum[2] + sum[3]);
    }

    // Of the head's channels, the one of which a lane has the low-rank functions' results.
    DEVICE int channel_of_lane() const { return warp % 4 * 16 + g + 8 * (q & 1); }
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

    // decode_row_wide_time.cuh
    DEVICE void ask(int layer);
    DEVICE void time_in(int layer);
    DEVICE void exchange_time(int layer);
    DEVICE void outer_sides(int layer);
    DEVICE void apply_deferred();
    DEVICE void recur(int layer);
    DEVICE void publish_y(int layer) const;
    DEVICE void time_out(int layer);
    // decode_row_wide_compute.cuh
    DEVICE void channels_in(int layer);
    DEVICE void channels_out(int layer) const;
    DEVICE void fetch(int layer) const;
    DEVICE void layers();
};
}  // namespace wide_row
#endif
