// The time mix of a layer in decode_row_wide.cu.
#pragma once
#include "decode_row_wide_lanes.cuh"

#if HOPPER
namespace wide_row {
// What the layer reads besides its large matrices: vectors of the head, the state, and what is deferred.
template <int STEPS>
DEVICE void Computing<STEPS>::ask(int layer) {
    constexpr int EIGHTS = HEAD / 8;
    if (my.has_head && threadIdx.x < HEAD_VECTORS * EIGHTS) {
        const int which = threadIdx.x / EIGHTS, eight = threadIdx.x % EIGHTS * 8;
        const __half* const from = vector(layer, ROW_HEAD_VECTORS + which);
        if (from)
            copy_async(reinterpret_cast<uint4*>(own.vectors[layer % 2][which] + eight),
                       from + my.block * HEAD + eight);
    }
    if (my.has_head && slot >= 0) {
        copy_async(own.state + threadIdx.x, state_of(layer));
        constexpr int PIECES = DEFERRED_VECTORS * HEAD / 8;
        if (int(threadIdx.x) < lag * PIECES)
            copy_async(reinterpret_cast<uint4*>(own.deferred) + threadIdx.x,
                       deferred_of(layer) + threadIdx.x * 8);
    }
    // The table of the layer after it, in the place of one that all are past.
    constexpr int TABLE_PIECES = sizeof(RowLayer) / 16;
    if (layer > 1 && layer + 1 < in.layer_count && threadIdx.x >= COMPUTING - TABLE_PIECES) {
        const int piece = threadIdx.x - (COMPUTING - TABLE_PIECES);
        copy_async(reinterpret_cast<uint4*>(own.tables[(layer + 1) % ROW_TABLES]) + piece,
                   reinterpret_cast<const uint4*>(in.layers + layer + 1) + piece);
    }
    commit_copies();
}

// Norm and mixes, r, k, v and inner sides of the low-rank functions, which blocks publish.
template <int STEPS>
DEVICE void Computing<STEPS>::time_in(int layer) {
    const auto mix_of_kind = [](int kind) { return kind < 3 ? kind : mix_of(kind - 3); };
    const __half* const mixes = vector(layer, ROW_MIXES);
    Words weight, bias, before, first, second;
    load_columns(vector(layer, ROW_NORM1_WEIGHT), weight), load_columns(vector(layer, ROW_NORM1_BIAS), bias);
    load_columns(shift_at(layer, 0), before);
    load_columns(mixes + mix_of_kind(my.kind) * S::WIDTH, first);
    load_columns(mixes + mix_of_kind(my.next_kind()) * S::WIDTH, second);
    if (layer > 0) {
        wait_channels(layer);
        keep_shift(layer - 1, 1);
    }
    Numbers x;
    norm(x, weight, bias, own.moments[0]);
    put_mixed(0, x, before, first), put_mixed(1, x, before, second);
    sync_warp();
    multiply(IN, my.of_first, own.sums[warp]);
    wait_copies<0>();  // of `ask`
    sync_some(1, COMPUTING);
    if (int(threadIdx.x) < my.rows[IN].count)
        publish(in.inner + my.rows[IN].first + threadIdx.x, over_warps(own.sums, threadIdx.x), tag(layer));
}

// r, k, v of the head and all inner sides, from all blocks.
template <int STEPS>
DEVICE void Computing<STEPS>::exchange_time(int layer) {
    apply_deferred();
    const int i = 2 * threadIdx.x, of_function = i - 3 * HEAD, channel = i % HEAD;
    const bool any = of_function < my.ranks;
    if (warp_any(any)) {
        const int at = of_function >= 0 ? 3 * S::WIDTH + (any ? of_function : 0)
                                        : i / HEAD * S::WIDTH + my.block * HEAD + channel;
        const float2 x = wait_published(in.inner + at, tag(layer));
        if (of_function < 0) {
            float* const to = i < HEAD       ? own.r + half_eights(channel)
                              : i < 2 * HEAD ? own.k + channel
                                             : own.v + channel;
            *reinterpret_cast<float2*>(to) = make_float2(rounded(x.x), rounded(x.y));
        } else if (any) {
            const int w = in.rank[ROW_W], of_g = w + in.rank[ROW_A];
            const int how = of_function < w                                              ? TANH
                            : of_function >= of_g && of_function < of_g + in.rank[ROW_G] ? SIGMOID
                                                                                         : IDENTITY;
            *reinterpret_cast<uint32_t*>(own.inner + quarters(of_function)) =
                to_half2(activate(x.x, how), activate(x.y, how));
        }
    }
    sync_some(1, COMPUTING);
}

// Outer sides: four warps have the 64 channels of a function each, and go on to what it is for.
template <int STEPS>
DEVICE void Computing<STEPS>::outer_sides(int layer) {
    float even[4] = {}, odd[4] = {};
    const int f = function(), channel = channel_of_lane(), place = half_eights(channel);
    const auto given = [&](int which) { return __half2float(of_head(layer, which)[channel]); };
    const float of_first = f == ROW_G ? 0.f : given(f == ROW_W ? W0 : f == ROW_A ? A0 : V0);
    int begin = 0;
    for (int other = 0; other < f; other++) begin += in.rank[other];
    uint32_t x = shared_address(own.inner + begin) + q * 16;
    uint32_t row =
        outer + S::outer_at(in, f) + (warp % 4 * 16 + lane % 16) * S::outer_pitch(in, f) + lane / 16 * 16;
    wait_for_phase(shared_address(&own.outer_full[f]), layer % 2);
#pragma unroll 1
    for (int i = 0; i < in.rank[f]; i += 32, x += 64, row += 64) {
        uint32_t a[4], b[4];
        load_matrix(a, row), load_matrix(b, row + 32);
        const uint4 xs = load_shared_words(x);
        mma(even, a[0], a[1], a[2], a[3], xs.x, xs.y);
        mma(odd, b[0], b[1], b[2], b[3], xs.z, xs.w);
    }
    const float o = rounded(of_lane(even, lane) + of_lane(odd, lane));
    const bool writes = q < 2;
    if (f == ROW_W) {
        const float w = __expf(DECAY * sigmoid(of_first + o));
        if (writes) own.decay[place] = w;
    } else if (f == ROW_A) {
        const float a = sigmoid(of_first + o), k_raw = own.k[channel], r = own.r[place];
        const float kk = k_raw * given(K_K), k = k_raw * (1.f + (a - 1.f) * given(K_A));
        if (writes) own.kk[place] = kk, own.key[place] = k, own.removal[place] = kk * a;
        float of_four[4] = {kk * kk, r * k * given(R_K), k * r, kk * a * r};
        if (!writes)
#pragma unroll
            for (float& each : of_four) each = 0.f;
        const float sum = warp_sums(of_four, lane);
        const int at = opaque(lane);
        if (at % 8 == 0) reinterpret_cast<float*>(&own.of_head[warp % 4])[at / 8] = sum;
    } else if (f == ROW_V) {
        float v = own.v[channel];
        if (layer > 0) v += (own.first_v[channel] - v) * sigmoid(of_first + o);
        if (writes) own.value[channel] = v;
        if (writes && layer == 0) own.first_v[channel] = v;
    } else if (writes) {
        own.gate[channel] = o;
    }
    sync_some(1, COMPUTING);
    if (threadIdx.x == 0) arrive(shared_address(&own.outer_empty));
}

// S of this token, from the state as it is stored: eight lanes have a row.
template <int STEPS>
DEVICE void Computing<STEPS>::apply_deferred() {
    const int row = 4 * warp + lane / 8;
    Raw8<__half>{own.state[threadIdx.x]}.widen(s);
#pragma unroll 1
    for (int t = 0; t < lag; t++) {
        const __half(&old)[DEFERRED_VECTORS][HEAD] = own.deferred[t];
        const float v = __half2float(old[VALUE][row]), removed = __half2float(old[REMOVED][row]);
        float lost[8], key[8], x[8];
        Raw8<__half>{load_shared_words(shared_address(old[LOST]) + lane % 8 * 16)}.widen(lost);
        Raw8<__half>{load_shared_words(shared_address(old[KEY]) + lane % 8 * 16)}.widen(key);
        Raw8<__half>{load_shared_words(shared_address(old[REMOVAL]) + lane % 8 * 16)}.widen(x);
#pragma unroll
        for (int i = 0; i < 8; i++) s[i] = s[i] * (1.f - lost[i]) + v * key[i] - removed * x[i];
    }
}

// The recurrence.
template <int STEPS>
DEVICE void Computing<STEPS>::recur(int layer) {
    const int row = 4 * warp + lane / 8;
    float x[8], factor[8];
    float with_kk = 0.f, with_read = 0.f;
    of_keys(own.kk, x);
#pragma unroll
    for (int i = 0; i < 8; i++) with_kk += s[i] * x[i];
    of_keys(own.decay, factor), of_keys(own.r, x);
#pragma unroll
    for (int i = 0; i < 8; i++) s[i] *= factor[i], with_read += s[i] * x[i];
    with_kk = over_eight(with_kk), with_read = over_eight(with_read);
    float4 head = {};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float4 more = own.of_head[i];
        head.x += more.x, head.y += more.y, head.z += more.z, head.w += more.w;
    }
    const float scale = normalizing(head.x), removed = with_kk * scale, v = own.value[row];
    if (lane % 8 == 0) own.y[row] = with_read - removed * (head.w * scale) + v * head.z;
    sync_some(1, COMPUTING);
    if (warp == 0) publish_y(layer);
    if (slot < 0) return;
    if (lag == MAX_LAG) {
        of_keys(own.removal, x), of_keys(own.key, factor);
#pragma unroll
        for (int i = 0; i < 8; i++) s[i] += v * factor[i] - removed * scale * x[i];
        store8(state_of(layer), s);
        return;
    }
    __half* const to = deferred_of(layer) + lag * DEFERRED_VECTORS * HEAD;
    if (lane % 8 == 0)
        to[VALUE * HEAD + row] = to_finite_half(v), to[REMOVED * HEAD + row] = to_finite_half(removed);
    if (threadIdx.x < HEAD) {
        const int i = threadIdx.x, place = half_eights(i);
        to[LOST * HEAD + i] = __float2half_rn(1.f - own.decay[place]);
        to[KEY * HEAD + i] = to_finite_half(own.key[place]);
        to[REMOVAL * HEAD + i] = __float2half_rn(own.removal[place] * scale);
    }
}

// What the head's channels are multiplied with next, by a warp.
template <int STEPS>
DEVICE void Computing<STEPS>::publish_y(int layer) const {
    const auto pair = [&](const float* vector) {
        return *reinterpret_cast<const float2*>(vector + 2 * lane);
    };
    const auto given = [&](int which) {
        return to_float2(load_shared_word(shared_address(of_head(layer, which) + 2 * lane)));
    };
    const float2 y = pair(own.y), v = pair(own.value), gate = pair(own.gate), weight = given(GROUP_WEIGHT),
                 bias = given(GROUP_BIAS);
    const float own_sum = (own.of_head[0].y + own.of_head[1].y) + (own.of_head[2].y + own.of_head[3].y);
    const float pivot = own.y[0];
    const float2 d = make_float2(y.x - pivot, y.y - pivot);
    const float2 all = both_sums(make_float2(d.x + d.y, d.x * d.x + d.y * d.y));
    const float mean = all.x / HEAD, scale = rsqrtf(all.y / HEAD - mean * mean + NORM_EPSILON);
    const uint32_t word = to_half2(((d.x - mean) * scale * weight.x + bias.x + own_sum * v.x) * gate.x,
                                   ((d.y - mean) * scale * weight.y + bias.y + own_sum * v.y) * gate.y);
    publish(ys() + my.block * (HEAD / 2) + lane, __uint_as_float(word), tag(layer));
}

// What the time mix adds to the stream: the block's rows of output, for all blocks.
template <int STEPS>
DEVICE void Computing<STEPS>::time_out(int layer) {
    wait_ys(layer);
    sync_warp();
    const int rows = my.rows[OUT].count;
    multiply(OUT, rows, own.out_sums[warp]);
    sync_some(1, COMPUTING);
    if (int(threadIdx.x) < rows)
        publish(outputs() + my.rows[OUT].first + threadIdx.x, over_warps(own.out_sums, threadIdx.x),
                tag(layer));
}
}  // namespace wide_row
#endif
