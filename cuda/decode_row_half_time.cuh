// The time mix of a layer in decode_row_half.cu.
#pragma once
#include "decode_row_half_lanes.cuh"

#if HOPPER
namespace half_row {
// What the layer reads besides its large matrices: vectors of the head, the state, and what is deferred.
template <int STEPS>
DEVICE void Computing<STEPS>::ask(int layer) {
    const int channel = my.head * HEAD + channel_of_lane();
    const auto load = [&](int i, int which) {
        const __half* const from = vector(layer, ROW_HEAD_VECTORS + which);
        of_channel[i] = from ? load_half(from + channel) : __half(0.f);
    };
    if (warp < 4) load(0, 0);                                           // w0
    if (warp / 4 == 1) load(0, 1), load(1, 3), load(2, 4), load(3, 5);  // a0, k_k, k_a, r_k
    if (warp / 4 == 2) load(0, 2);                                      // v0
    state = {};
    if (slot >= 0) {
        state = load_words(state_of(layer));
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

// Norm and mixes, r, k, v and inner sides of the low-rank functions: what blocks publish.
template <int STEPS>
DEVICE void Computing<STEPS>::time_in(int layer) {
    const __half* const mixes = vector(layer, ROW_MIXES);
    const uint32_t weight = column_of(vector(layer, ROW_NORM1_WEIGHT)),
                   bias = column_of(vector(layer, ROW_NORM1_BIAS)),
                   before = any ? load_word(shift_at(layer, 0)) : 0;
    uint32_t amounts[OPERANDS];
#pragma unroll
    for (int i = 0; i < OPERANDS; i++) {
        const int mix = i < 3 ? i : mix_of(i == 3 ? my.function : my.next_function);
        amounts[i] = column_of(mixes + mix * S::WIDTH);
    }
    if (layer > 0) {
        of_channels = wait_channels(layer);
        keep_shift(layer - 1, 1);
    }
    const float2 x = normalized(stream(), weight, bias, any, SLICE, own.moments[0], warp, lane);
    normed = to_half2(x.x, x.y);
#pragma unroll
    for (int i = 0; i < OPERANDS; i++) put_operand(i, x, before, amounts[i]);
    sync_warp();
    // Columns of r and k in turn; of v and of both functions.
    uint4 rk[2], others[2];
    load_operand(g % 2, rk), load_operand(g < 3 ? 2 + g : 2, others);
    float of_rk[4] = {}, of_others[4] = {};
    const int other = min(16 + lane % 16, 3 * OWN_CHANNELS + my.rows - 1);
    wait_for(PART_IN, 0, layer), wait_for(PART_IN, 1, layer);
    multiply(of_rk, row_of(S::IN_AT, lane % 16), rk);
    wait_for(PART_IN, 2, layer), wait_for(PART_IN, 3, layer);
    multiply(of_others, row_of(S::IN_AT, other), others);
    float* const to = own.sums[warp] + g;
    if (q == 0) {
        to[0] = of_rk[0], to[8] = of_rk[3], to[16] = of_others[0];
        if (g < my.of_first) to[24] = of_others[3];
    }
    if (q == 1 && g >= my.of_first) to[24] = of_others[2];
    wait_copies<0>();  // of `ask`
    sync_some(1, COMPUTING);
}

// r, k, v of the head and all inner sides, from all blocks.
template <int STEPS>
DEVICE void Computing<STEPS>::exchange_time(int layer) {
    unsigned long long* const of_layer = published + layer % 2 * (3 * S::WIDTH + my.ranks);
    const unsigned tag = launch * 256 + layer + 1;
    if (warp == 0) {
        const float sum = over_warps();
        if (lane < 24)
            publish(of_layer + lane / 8 * S::WIDTH + my.block * OWN_CHANNELS + lane % 8, sum, tag);
        else if (lane - 24 < my.rows)
            publish(of_layer + 3 * S::WIDTH + my.row + lane - 24, sum, tag);
    }
    apply_deferred();
    if (warp_any(published_at >= 0)) {
        const float2 x = wait_published(of_layer + max(published_at, 0), tag);
        if (published_at >= 3 * S::WIDTH)
            store_shared(published_to, to_half2(activate(x.x, kind), activate(x.y, kind)));
        else if (published_at >= 0)
            store_shared(published_to, rounded(x.x), rounded(x.y));
    }
    sync_some(1, COMPUTING);
    // Only now, so that no weights are asked for while blocks wait for each other.
    if (threadIdx.x == 0) used(PART_IN);
}

// Outer sides: four warps have the 64 channels of a function each, and go on to what it is for.
template <int STEPS>
DEVICE void Computing<STEPS>::outer_sides(int layer) {
    float even[4] = {}, odd[4] = {};
    uint32_t x = outer_x, piece = lane / 16;
    wait_for(PART_OUTER, 0, layer);
#pragma unroll 1
    for (int i = 0; i < outer_steps; i += 2, x += 64, piece += 4) {
        uint32_t a[4], b[4];
        load_matrix(a, outer_row + (piece ^ outer_turn) * 16);
        load_matrix(b, outer_row + ((piece + 2) ^ outer_turn) * 16);
        mma(even, a[0], a[1], a[2], a[3], load_shared_word(x), load_shared_word(x + 16));
        mma(odd, b[0], b[1], b[2], b[3], load_shared_word(x + 32), load_shared_word(x + 48));
    }
    const int f = function;
    const float o = rounded(of_lane(even, lane) + of_lane(odd, lane));
    const int channel = channel_of_lane();
    const bool writes = q < 2;
    const float first = __half2float(of_channel[0]);
    if (f == ROW_W) {
        const float w = __expf(DECAY * sigmoid(first + o));
        if (writes) own.decay[channel] = w;
    } else if (f == ROW_A) {
        const float a = sigmoid(first + o), k_raw = own.k[channel], r = own.r[channel];
        const float kk = k_raw * __half2float(of_channel[1]),
                    k = k_raw * (1.f + (a - 1.f) * __half2float(of_channel[2]));
        if (writes) own.kk[channel] = kk, own.key[channel] = k, own.removal[channel] = kk * a;
        float of_four[4] = {kk * kk, r * k * __half2float(of_channel[3]), k * r, kk * a * r};
        if (!writes)
#pragma unroll
            for (float& x : of_four) x = 0.f;
        const float sum = warp_sums(of_four, lane);
        if (lane % 8 == 0) reinterpret_cast<float*>(&own.of_head[warp % 4])[lane / 8] = sum;
    } else if (f == ROW_V) {
        float v = own.v[channel];
        if (layer == 0) first_v = v;
        if (layer > 0) v += (first_v - v) * sigmoid(first + o);
        if (writes) own.value[channel] = v;
    } else if (writes) {
        own.gate[channel] = o;
    }
    sync_some(1, COMPUTING);
    if (threadIdx.x == 0) used(PART_OUTER);
}

// S of this token, from the state as it is stored: eight lanes have a row.
template <int STEPS>
DEVICE void Computing<STEPS>::apply_deferred() {
    const int row = 4 * warp + lane / 8;
    Raw8<__half>{state}.widen(s);
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

// The recurrence, in every block of the head alike.
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
    if (slot >= 0 && lag == MAX_LAG && warp / 2 == my.part) {
        of_keys(own.removal, x), of_keys(own.key, factor);
#pragma unroll
        for (int i = 0; i < 8; i++) s[i] += v * factor[i] - removed * scale * x[i];
#pragma unroll
        for (int i = 0; i < 4; i++) next_state[i] = to_finite_half2(s[2 * i], s[2 * i + 1]);
    }
    if (slot >= 0 && lag < MAX_LAG && my.part == 0) {
        __half* const to = deferred_of(layer) + lag * DEFERRED_VECTORS * HEAD;
        if (lane % 8 == 0)
            to[VALUE * HEAD + row] = to_finite_half(v), to[REMOVED * HEAD + row] = to_finite_half(removed);
        if (threadIdx.x < HEAD) {
            const int i = threadIdx.x;
            to[LOST * HEAD + i] = __float2half_rn(1.f - own.decay[i]);
            to[KEY * HEAD + i] = to_finite_half(own.key[i]);
            to[REMOVAL * HEAD + i] = __float2half_rn(own.removal[i] * scale);
        }
    }
    sync_some(1, COMPUTING);
}

// The state of the own rows, when all blocks have read it.
template <int STEPS>
DEVICE void Computing<STEPS>::keep_state(int layer) const {
    if (slot >= 0 && lag == MAX_LAG && warp / 2 == my.part)
        store(state_of(layer), next_state[0], next_state[1], next_state[2], next_state[3]);
}

// What the head's channels add to the stream: a warp for each 16 outputs of the block.
template <int STEPS>
DEVICE void Computing<STEPS>::time_out(int layer, __half2 norm_weight, __half2 norm_bias) {
    if (warp * 16 < S::OUTPUTS) {
        const auto pair = [&](const float* vector) {
            return *reinterpret_cast<const float2*>(vector + 2 * lane);
        };
        const float2 y = pair(own.y), v = pair(own.value), gate = pair(own.gate);
        const float own_sum = (own.of_head[0].y + own.of_head[1].y) + (own.of_head[2].y + own.of_head[3].y);
        const float pivot = own.y[0];
        const float2 d = make_float2(y.x - pivot, y.y - pivot), weight = __half22float2(norm_weight),
                     bias = __half22float2(norm_bias);
        const float2 all = both_sums(make_float2(d.x + d.y, d.x * d.x + d.y * d.y));
        const float mean = all.x / HEAD, scale = rsqrtf(all.y / HEAD - mean * mean + NORM_EPSILON);
        const uint32_t word = to_half2(((d.x - mean) * scale * weight.x + bias.x + own_sum * v.x) * gate.x,
                                       ((d.y - mean) * scale * weight.y + bias.y + own_sum * v.y) * gate.y);
        const int row = 16 * warp + lane % 16;
        const uint32_t at = weights + S::OUT_AT + row * HEAD * 2;
        float even[4] = {}, odd[4] = {};
        wait_for(PART_OUT, 0, layer);
#pragma unroll
        for (int i = 0; i < HEAD / 16; i++) {
            uint32_t a[4];
            load_matrix(a, at + turned(2 * i + lane / 16, row, 8) * 16);
            mma(i % 2 ? odd : even, a[0], a[1], a[2], a[3], shuffle(word, 8 * i + q),
                shuffle(word, 8 * i + 4 + q));
        }
        if (q < 2)
            add_to_sum(sums + my.part * S::OUTPUTS + 16 * warp + g + 8 * q,
                       of_lane(even, lane) + of_lane(odd, lane));
    }
    used(PART_OUT);
}
}  // namespace half_row
#endif
