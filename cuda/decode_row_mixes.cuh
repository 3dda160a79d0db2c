// What is between the products of decode_row.cu: low-rank sides, recurrence, hidden units.
#pragma once
#include "decode_row_exchange.cuh"

#if HOPPER
namespace row {
// What the recurrence of a head reads, on its way; `wait_copies` waits for it. By warps 0 to 3.
DEVICE void ask_for_state(const RowInput& in, RowShared& own, const RowShare& my, int layer, int slot,
                          int warp) {
    if (warp < 4 && slot >= 0) {
        const __half* const state =
            in.state + size_t(slot) * in.state_stride + (size_t(layer) * in.heads + my.pair) * HEAD * HEAD;
        const Half recurrence;
#pragma unroll
        for (int i = 0; i < Half::VECTORS; i++)
            copy_async(own.state + i * THREADS + threadIdx.x, state + recurrence.first + Half::offset(i));
        const __half* const deferred =
            in.deferred + size_t(slot) * in.deferred_stride +
            (size_t(layer) * in.heads + my.pair) * MAX_LAG * DEFERRED_VECTORS * HEAD;
        constexpr int EIGHTS = MAX_LAG * DEFERRED_VECTORS * HEAD / 8;
        if (threadIdx.x < EIGHTS)
            copy_async(reinterpret_cast<uint4*>(own.deferred) + threadIdx.x, deferred + threadIdx.x * 8);
    }
    if (warp >= 2 && warp < 4) {
        const int which = threadIdx.x % 64 / 8, eight = threadIdx.x % 8;
        const __half* const from =
            reinterpret_cast<const __half*>(own.tables[layer % ROW_TABLES][ROW_HEAD_VECTORS + which]);
        if (from)
            copy_async(reinterpret_cast<uint4*>(own.head_vectors[which]) + eight,
                       from + my.pair * HEAD + eight * 8);
    }
    commit_copies();
}

// Inner sides of the low-rank functions: a warp has its part of K of all outputs of the block. first, second:
// x of the two functions whose outputs these are.
DEVICE void add_inner_sides(Ring& ring, const RowShare& my, unsigned long long* sums,
                            const uint32_t (&first)[ROW_WARP_TILES], const uint32_t (&second)[ROW_WARP_TILES],
                            int lane) {
#pragma unroll 1
    for (int begin = 0; begin < my.rows; begin += ROW_INNER_AT_ONCE) {
        float partial[ROW_INNER_AT_ONCE] = {};
        if (my.tiles) {
            const uint32_t stage = ring.wait();
#pragma unroll
            for (int i = 0; i < ROW_INNER_AT_ONCE; i++) {
                const bool is_second = begin + i >= my.of_first;
                uint32_t words[ROW_WARP_TILES] = {};
#pragma unroll
                for (int t = 0; t < ROW_WARP_TILES; t++)
                    if (begin + i < my.rows && t < my.tiles)
                        words[t] = load_shared_word(stage + (i * my.tiles + t) * 128 + lane * 4);
                float c[4] = {};
#pragma unroll
                for (int t = 0; t < ROW_WARP_TILES; t += 2)
                    add_dots(c, make_uint2(words[t], words[t + 1]), make_uint2(0, 0),
                             make_uint2(is_second ? second[t] : first[t],
                                        is_second ? second[t + 1] : first[t + 1]));
                partial[i] = own_dots(c, lane).x;
            }
            ring.release(lane);
        }
        const float sum = warp_sums(partial, lane);
        const int i = begin + lane / (WARP / ROW_INNER_AT_ONCE);
        if (lane % (WARP / ROW_INNER_AT_ONCE) == 0 && i < my.rows) add_to_sum(sums + i, sum);
    }
}

// The block's sums of r or v and of k, over the warps, for both blocks of the pair. By one warp.
DEVICE void share_rkv(RowShared& own, const RowShare& my, int lane) {
    const int which = lane / 16, four = lane % 16;
    float4 sum = {};
#pragma unroll
    for (int i = 0; i < ROW_WARPS; i++) {
        const float4 more = reinterpret_cast<const float4*>(own.x[i][which])[four];
        sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
    }
    float* const to = own.rkv[which == 0 ? (my.rank ? 3 : 0) : 1 + my.rank] + 4 * four;
    *reinterpret_cast<float4*>(to) = sum;
    send_to(my.rank ^ 1, shared_address(to), shared_address(&own.pair_full), sum);
}

// Outer sides: two channels of the head by a warp, for both blocks of the pair.
DEVICE void share_outer_sides(const RowInput& in, RowShared& own, Ring& ring, const RowShare& my, int warp,
                              int lane) {
    float sums_of[2 * ROW_FUNCTIONS] = {};
    uint32_t stage = ring.wait();
    int begin[ROW_FUNCTIONS];
    for (int f = 0, at = 0; f < ROW_FUNCTIONS; f++) begin[f] = at, at += in.rank[f];
    const auto add = [&](int f) {
        const int eights = in.rank[f] / 8;
        float c[4] = {};
        for (int first = 0; first < eights; first += WARP) {
            const int i = first + lane;
            uint4 a0 = {}, a1 = {}, b = {};
            if (i < eights) {
                a0 = load_shared_words(stage + i * 16);
                a1 = load_shared_words(stage + (eights + i) * 16);
                b = *reinterpret_cast<const uint4*>(own.inner + begin[f] + i * 8);
            }
            add_dots(c, make_uint2(a0.x, a0.y), make_uint2(a1.x, a1.y), make_uint2(b.x, b.y));
            add_dots(c, make_uint2(a0.z, a0.w), make_uint2(a1.z, a1.w), make_uint2(b.z, b.w));
        }
        const float2 sum = own_dots(c, lane);
        sums_of[f] = sum.x, sums_of[ROW_FUNCTIONS + f] = sum.y;
        stage += in.rank[f] * 4;
    };
    add(ROW_W), add(ROW_A), add(ROW_V);
    ring.release(lane);
    stage = ring.wait();
    add(ROW_G);
    ring.release(lane);
    const float sum = warp_sums(sums_of, lane);
    // Lanes 0 and 1 have a channel each.
    const int first = lane % 2 * (WARP / 2);
    const float4 of_channel = {shuffle(sum, first), shuffle(sum, first + 4), shuffle(sum, first + 8),
                               shuffle(sum, first + 12)};
    if (lane < 2) {
        float4* const to = &own.outer[my.rank * (HEAD / 2) + 2 * warp + lane];
        *to = of_channel;
        send_to(my.rank ^ 1, shared_address(to), shared_address(&own.pair_full), of_channel);
    }
}

// A token of the head's recurrence, which both blocks of the pair compute, to `own.y`. By warps 0 to 3.
template <typename Format>
DEVICE void recur(const RowInput& in, RowShared& own, const RowShare& my, int layer, int slot, int warp,
                  int lane) {
    const Half recurrence;
    const size_t of_head = size_t(layer) * in.heads + my.pair;
    const int lag = slot < 0 ? 0 : *in.lag;
    Last last = {};
    if (warp == 0) {
        barrier_wait(shared_address(&own.pair_full), layer % 2);
        const auto rounded = [&](const float (&of)[HEAD]) {
            const float2 pair = *reinterpret_cast<const float2*>(of + 2 * lane);
            return __floats2half2_rn(pair.x, pair.y);
        };
        const auto given = [&](int which) {
            return *reinterpret_cast<const __half2*>(own.head_vectors[which] + 2 * lane);
        };
        const float2 k0 = *reinterpret_cast<const float2*>(own.rkv[1] + 2 * lane),
                     k1 = *reinterpret_cast<const float2*>(own.rkv[2] + 2 * lane);
        const float4 o0 = own.outer[2 * lane], o1 = own.outer[2 * lane + 1];
        Inputs of_token = {
            rounded(own.rkv[0]),           __floats2half2_rn(k0.x + k1.x, k0.y + k1.y),
            rounded(own.rkv[3]),           __floats2half2_rn(o0.x, o1.x),
            __floats2half2_rn(o0.y, o1.y), __floats2half2_rn(o0.z, o1.z),
            __floats2half2_rn(o0.w, o1.w), reinterpret_cast<const __half2&>(own.first_v[lane])};
        if (layer == 0) own.first_v[lane] = reinterpret_cast<const uint32_t&>(of_token.v);
        const Constants of_head_channels = {given(0), given(1), given(2), given(3),
                                            given(4), given(5), given(6), given(7)};
        last = {given(6), given(7), of_token.g};
        DeferredPair noted = {};
        noted.lag = lag;
#pragma unroll
        for (int t = 0; t < MAX_LAG; t++)
#pragma unroll
            for (int i = 0; i < DEFERRED_VECTORS; i++)
                noted.vectors[t][i] = *reinterpret_cast<const __half2*>(own.deferred[t][i] + 2 * lane);
        if (my.rank == 0 && slot >= 0)
            noted.all =
                in.deferred + size_t(slot) * in.deferred_stride + of_head * MAX_LAG * DEFERRED_VECTORS * HEAD;
        Half::put(own.token, lane, prepare(of_token, of_head_channels, layer > 0), noted);
    }
    sync_some(6, THREADS);
    __half* const state = my.rank == 0 && slot >= 0 ? in.state + size_t(slot) * in.state_stride +
                                                          of_head * HEAD * HEAD + recurrence.first
                                                    : nullptr;
    recurrence.advance(own.token, own.state + threadIdx.x, own.y_of, [=] { return state; });
    sync_some(6, THREADS);
    if (warp == 0) {
        const uint32_t pair = finished<false>(ReadoutInput{}, last, 0, my.pair, lane, Half::own(own.token),
                                              Half::value(own.token, lane), own.y_of);
        const float2 y = to_float2(pair);
        float2 info;
        own.y[place_of_digits(lane)] = digits<Format>(y, Unit(larger_size(y)), lane, info);
        if (lane == 0) own.y_info[0] = info;
    }
}

// Hidden units 2 lane and 2 lane + 1 of 64, from the sums over the warps.
DEVICE float2 hidden_pair(const RowShared& own, int slice, int lane) {
    float2 sum = {};
#pragma unroll
    for (int i = 0; i < ROW_WARPS; i++) {
        const float2 more = *reinterpret_cast<const float2*>(own.x[i][1] + 2 * (slice * WARP + lane));
        sum.x += more.x, sum.y += more.y;
    }
    return make_float2(relu_square(sum.x), relu_square(sum.y));
}

template <typename Format>
DEVICE void put_hidden(HiddenRuns& units, float2 h, int lane) {
    float2 info;
    const uint32_t word = digits<Format>(h, Unit(larger_size(h)), lane, info);
    units.digits[place_of_digits(lane)] = word;
    // Lane 8 s + q has the high digits of run 4 s + q, and the lane 4 above it the low ones.
    const bool active = (word | shuffle_xor(word, 4)) != 0 && !(lane & 4);
    const unsigned all = warp_ballot(active);
    if (active) units.runs[__popc(all & (1u << lane) - 1)] = uint8_t(lane / 8 * 4 + lane % 4);
    if (lane == 0) units.unit = info.x, units.sum = info.y, units.count = __popc(all);
}

template <typename Format>
DEVICE void put_hidden(HiddenUnits& units, float2 h, int lane) {
    const unsigned even = warp_ballot(h.x > 0.f), odd = warp_ballot(h.y > 0.f), before = (1u << lane) - 1;
    const auto put = [&](int place, float value, int unit) {
        if (value > 0.f) units.value[place] = value, units.unit[place] = uint8_t(unit);
    };
    put(__popc(even & before), h.x, 2 * lane), put(__popc(even) + __popc(odd & before), h.y, 2 * lane + 1);
    if (lane == 0) units.count = __popc(even) + __popc(odd);
}

// 64 hidden units, for both blocks of the pair. By a warp for each slice.
template <typename Format>
DEVICE void share_hidden(RowShared& own, const RowShare& my, int slice, int lane) {
    auto& units = own.hidden_units<Format>(slice);
    put_hidden<Format>(units, hidden_pair(own, slice, lane), lane);
    sync_warp();
    if (lane < int(sizeof(units)) / 16) {
        const float4* const part = reinterpret_cast<const float4*>(&units) + lane;
        float4* const to = reinterpret_cast<float4*>(&own.hidden_units<Format>(ROW_SLICES + slice)) + lane;
        send_to(my.rank ^ 1, shared_address(to), shared_address(&own.hidden_full), *part);
    }
}
}  // namespace row
#endif
