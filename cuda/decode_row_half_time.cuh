// The time mix of a layer in decode_row_half.cu.
#pragma once
#include "decode_row_half_lanes.cuh"

#if HOPPER
namespace half_row {
// What the layer reads besides its large matrices: vectors of the head, the state, and what is deferred.
template <int STEPS>
DEVICE void Computing<STEPS>::ask(int layer) {
    constexpr int EIGHTS = HEAD / 8;
    if (threadIdx.x < HEAD_VECTORS * EIGHTS) {
        const int which = threadIdx.x / EIGHTS, eight = threadIdx.x % EIGHTS * 8;
        const __half* const from = vector(layer, ROW_HEAD_VECTORS + which);
        if (from)
            copy_async(reinterpret_cast<uint4*>(own.vectors[layer % 2][which] + eight),
                       from + my.head * HEAD + eight);
    }
    if (slot >= 0) {
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

// Norm and mixes, r, k, v and inner sides of the low-rank functions: what blocks publish.
template <int STEPS>
DEVICE void Computing<STEPS>::time_in(int layer) {
    const __half* const mixes = vector(layer, ROW_MIXES);
    Affine norm(column_of(vector(layer, ROW_NORM1_WEIGHT)), column_of(vector(layer, ROW_NORM1_BIAS)));
    const uint32_t before = any ? load_word(shift_at(layer, 0)) : 0;
    uint32_t amounts[OPERANDS];
#pragma unroll
    for (int i = 0; i < OPERANDS; i++) {
        const int mix = i < 3 ? i : mix_of(i == 3 ? my.function : my.next_function);
        amounts[i] = column_of(mixes + mix * S::WIDTH);
    }
    Affine operands[OPERANDS];
#pragma unroll
    for (int i = 0; i < OPERANDS; i++) operands[i] = norm.mixed(before, amounts[i]), operands[i].here();
    wait_for(PART_IN, layer);
    Fragments first;
    load_fragments(first, row_of(S::IN_AT, lane % 16));
    float2 sum = {};
    if (layer > 0) {
        sum = wait_channels(layer);
        keep_channel_shift(layer - 1);
    }
    normalized_time = normalized(stream(sum), any, SLICE, own.moments[0], warp, lane);
#pragma unroll
    for (int i = 0; i < OPERANDS; i++) put_operand(i, operands[i](normalized_time));
    sync_warp();
    // Columns of r and k in turn; of v and of both functions.
    uint4 rk[2], others[2];
    load_operand(g % 2, rk), load_operand(g < 3 ? 2 + g : 2, others);
    float of_rk[4] = {}, of_others[4] = {};
    const int other = min(16 + lane % 16, 3 * OWN_CHANNELS + my.rows - 1);
    multiply(of_rk, first, rk);
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

// r, k, v and inner sides of this block, for all blocks.
template <int STEPS>
DEVICE void Computing<STEPS>::publish_time(int layer) const {
    if (warp > 0) return;
    const float sum = over_warps();
    const int lane = opaque(this->lane);
    if (lane < 24)
        publish(published_in(layer) + lane / 8 * S::WIDTH + my.block * OWN_CHANNELS + lane % 8, sum,
                tag(layer));
    else if (lane - 24 < my.rows)
        publish(published_in(layer) + 3 * S::WIDTH + my.row + lane - 24, sum, tag(layer));
}

// r, k, v of the head and all inner sides, from all blocks.
template <int STEPS>
DEVICE void Computing<STEPS>::exchange_time(int layer) {
    apply_deferred();
    places = own.places[threadIdx.x];
    const int published_at = places.published_at;
    wait_for(PART_OUTER, layer), wait_for(PART_OUT, layer);
    if (warp_any(published_at >= 0)) {
        const float2 x = wait_published(published_in(layer) + max(published_at, 0), tag(layer));
        if (published_at >= 3 * S::WIDTH)
            store_shared(places.published_to,
                         to_half2(activate(x.x, places.kind), activate(x.y, places.kind)));
        else if (published_at >= 0)
            store_shared(places.published_to, rounded(x.x), rounded(x.y));
    }
    sync_some(1, COMPUTING);
    // Only now, so that no weights are asked for while blocks wait for each other.
    if (threadIdx.x == 0) used(PART_IN);
}

// Outer sides: four warps have the 64 channels of a function each, and go on to what it is for.
template <int STEPS>
DEVICE void Computing<STEPS>::outer_sides(int layer) {
    float even[4] = {}, odd[4] = {};
    const int f = function(), channel = channel_of_lane(), place = half_eights(channel);
    const auto given = [&](int which) { return __half2float(of_head(layer, which)[channel]); };
    const float first = f == ROW_G ? 0.f : given(f == ROW_W ? W0 : f == ROW_A ? A0 : V0);
    const uint32_t outer_row = places.outer_row, outer_turn = places.outer_turn;
    const int outer_steps = places.outer_steps;
    uint32_t x = places.outer_x, piece = lane / 16;
    float k_raw = 0.f, r = 0.f;
    if (f == ROW_A) k_raw = own.k[channel], r = own.r[place];
    asm volatile("" : "+f"(k_raw), "+f"(r));  // here, not when the products are there
#pragma unroll 1
    for (int i = 0; i < outer_steps; i += 2, x += 64, piece += 4) {
        uint32_t a[4], b[4];
        load_matrix(a, outer_row + (piece ^ outer_turn) * 16);
        load_matrix(b, outer_row + ((piece + 2) ^ outer_turn) * 16);
        const uint4 xs = load_shared_words(x);
        mma(even, a[0], a[1], a[2], a[3], xs.x, xs.y);
        mma(odd, b[0], b[1], b[2], b[3], xs.z, xs.w);
    }
    const float o = rounded(of_lane(even, lane) + of_lane(odd, lane));
    const bool writes = q < 2;
    if (f == ROW_W) {
        const float w = __expf(DECAY * sigmoid(first + o));
        if (writes) own.decay[place] = w;
    } else if (f == ROW_A) {
        const float a = sigmoid(first + o);
        const float kk = k_raw * given(K_K), k = k_raw * (1.f + (a - 1.f) * given(K_A));
        if (writes) own.kk[place] = kk, own.key[place] = k, own.removal[place] = kk * a;
        float of_four[4] = {kk * kk, r * k * given(R_K), k * r, kk * a * r};
        if (!writes)
#pragma unroll
            for (float& x : of_four) x = 0.f;
        const float sum = warp_sums(of_four, lane);
        const int at = opaque(lane);
        if (at % 8 == 0) reinterpret_cast<float*>(&own.of_head[warp % 4])[at / 8] = sum;
    } else if (f == ROW_V) {
        float v = own.v[channel];
        if (layer > 0) v += (own.first_v[channel] - v) * sigmoid(first + o);
        if (writes) own.value[channel] = v;
        if (writes && layer == 0) own.first_v[channel] = v;
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
        uint32_t pairs[4];
        of_keys(own.removal, x), of_keys(own.key, factor);
#pragma unroll
        for (int i = 0; i < 8; i++) s[i] += v * factor[i] - removed * scale * x[i];
#pragma unroll
        for (int i = 0; i < 4; i++) pairs[i] = to_finite_half2(s[2 * i], s[2 * i + 1]);
        own.next_state[threadIdx.x % (2 * WARP)] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
    if (slot >= 0 && lag < MAX_LAG && my.part == 0) {
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
    sync_some(1, COMPUTING);
}

// The state of the own rows, when all blocks have read it.
template <int STEPS>
DEVICE void Computing<STEPS>::keep_state(int layer) const {
    if (slot >= 0 && lag == MAX_LAG && warp / 2 == my.part)
        *reinterpret_cast<uint4*>(state_of(layer)) = own.next_state[threadIdx.x % (2 * WARP)];
}

// What the head's channels add to the stream: a warp for each 16 outputs of the block.
template <int STEPS>
DEVICE void Computing<STEPS>::time_out(int layer) {
    if (warp * 16 < S::OUTPUTS) {
        const auto pair = [&](const float* vector) {
            return *reinterpret_cast<const float2*>(vector + 2 * lane);
        };
        const auto given = [&](int which) {
            return to_float2(load_shared_word(shared_address(of_head(layer, which) + 2 * lane)));
        };
        const float2 y = pair(own.y), v = pair(own.value), gate = pair(own.gate),
                     weight = given(GROUP_WEIGHT), bias = given(GROUP_BIAS);
        const float own_sum = (own.of_head[0].y + own.of_head[1].y) + (own.of_head[2].y + own.of_head[3].y);
        const float pivot = own.y[0];
        const float2 d = make_float2(y.x - pivot, y.y - pivot);
        const float2 all = both_sums(make_float2(d.x + d.y, d.x * d.x + d.y * d.y));
        const float mean = all.x / HEAD, scale = rsqrtf(all.y / HEAD - mean * mean + NORM_EPSILON);
        const uint32_t word = to_half2(((d.x - mean) * scale * weight.x + bias.x + own_sum * v.x) * gate.x,
                                       ((d.y - mean) * scale * weight.y + bias.y + own_sum * v.y) * gate.y);
        const int row = 16 * warp + lane % 16;
        const uint32_t at = weights + S::OUT_AT + row * HEAD * 2;
        float even[4] = {}, odd[4] = {};
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
