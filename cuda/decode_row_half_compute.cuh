// What the warps of decode_row_half.cu do that compute: all layers, of which the channel mix is here.
#pragma once
#include "decode_row_half_time.cuh"

#if HOPPER
namespace half_row {
// Norm, mix and hidden units, which both blocks of the pair get.
template <int STEPS>
DEVICE void Computing<STEPS>::channels_in(int layer, uint32_t weight, uint32_t bias, uint32_t before,
                                          uint32_t amount) {
    of_time = wait_time(layer);
    keep_shift(layer, 0);
    const float2 x = normalized(stream(), weight, bias, any, SLICE, own.moments[1], warp, lane);
    keep_state(layer);
    normed = to_half2(x.x, x.y);
    put_operand(0, x, before, amount);
    sync_warp();
    uint4 b[2];
    load_operand(0, b);
    float early[4] = {}, late[4] = {};
    wait_for(PART_KEY, 0, layer), wait_for(PART_KEY, 1, layer);
    multiply(early, row_of(S::KEY_AT, lane % 16), b);
    wait_for(PART_KEY, 2, layer), wait_for(PART_KEY, 3, layer);
    multiply(late, row_of(S::KEY_AT, UNITS / 2 + lane % 16), b);
    own.sums[warp][q * 8 + g] = of_lane(q < 2 ? early : late, lane);
    sync_some(1, COMPUTING);
    if (threadIdx.x == COMPUTING - 1) used(PART_KEY);
    if (warp == 0) {
        const float h = relu_square(over_warps());
        const uint32_t word = to_half2(h, shuffle_xor(h, 1));  // in even lanes
        const float4 four = {of_pair(word, 0), of_pair(word, 2), of_pair(word, 4), of_pair(word, 6)};
        if (lane < 8)
            send_to(lane / 4, shared_address(own.hidden + my.rank * UNITS / 2 + lane % 4 * 4),
                    shared_address(&own.hidden_full), four);
    }
}

// What the pair's hidden units add to the stream: of each block half of the outputs, two a lane. Of value
// only rows of active units are read, nine of ten are not, and only now, as they are known.
template <int STEPS>
DEVICE void Computing<STEPS>::channels_out(int layer) {
    if (2 * int(threadIdx.x) >= S::WIDTH / 2) return;  // whole warps
    const int first_output = my.rank * (S::WIDTH / 2) + 2 * threadIdx.x;
    const __half* const rows =
        vector(layer, ROW_VALUE) + size_t(my.pair) * 2 * UNITS * S::WIDTH + first_output;
    uint32_t* const active = own.active[warp];
    barrier_wait_cluster(shared_address(&own.hidden_full), layer % 2);
    const uint32_t two = load_shared_word(shared_address(own.hidden + lane)), low = two & 0xffff,
                   high = two >> 16;
    const unsigned of_low = warp_ballot(low != 0), of_high = warp_ballot(high != 0),
                   before = (1u << lane) - 1;
    const int count = __popc(of_low) + __popc(of_high);
    int place = __popc(of_low & before) + __popc(of_high & before);
    if (low) active[place++] = (2 * lane) << 16 | low;
    if (high) active[place] = (2 * lane + 1) << 16 | high;
    sync_warp();
    float2 sum = {};
#pragma unroll 1
    for (int first = 0; first < count; first += AT_ONCE) {
        uint32_t w[AT_ONCE];
        float h[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i += 4) {
            const uint4 four = load_shared_words(shared_address(active + first + i));
            const uint32_t units[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const bool there = first + i + j < count;
                w[i + j] = there ? load_weights(rows + size_t(units[j] >> 16) * S::WIDTH) : 0;
                h[i + j] = there ? __half2float(__ushort_as_half(units[j] & 0xffff)) : 0.f;
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const float2 of = to_float2(w[i]);
            sum.x += h[i] * of.x, sum.y += h[i] * of.y;
        }
    }
    unsigned long long* const to = sums + (1 + my.pair % ROW_HALF_WAYS) * S::WIDTH + first_output;
    add_to_sum(to, sum.x), add_to_sum(to + 1, sum.y);
}

// Vectors and states of the next layer, which all blocks ask for at a time, into the L2 cache.
template <int STEPS>
DEVICE void Computing<STEPS>::fetch(int layer) const {
    if (threadIdx.x != 0 || layer >= in.layer_count) return;
    const int size = S::WIDTH * 2;
    if (my.block < ROW_NORM_VECTORS) {
        const int which = ROW_NORM1_WEIGHT + my.block;
        prefetch_l2(vector(layer, which), (which == ROW_MIXES ? ROW_MIX_COUNT : 1) * size);
    } else if (my.block < ROW_NORM_VECTORS + 8) {
        const __half* const from = vector(layer, ROW_HEAD_VECTORS + my.block - ROW_NORM_VECTORS);
        if (from) prefetch_l2(from, size);
    } else if (my.block == ROW_NORM_VECTORS + 8) {
        prefetch_l2(in.shift + size_t(max(slot, 0)) * in.shift_stride + size_t(2 * layer) * S::WIDTH,
                    2 * size);
    }
    if (slot >= 0 && my.part == HEAD_BLOCKS - 1) {
        prefetch_l2(in.state + size_t(slot) * in.state_stride + head_of_slot(layer) * HEAD * HEAD,
                    HEAD * HEAD * 2);
        prefetch_l2(deferred_of(layer), MAX_LAG * DEFERRED_VECTORS * HEAD * 2);
    }
}

template <int STEPS>
DEVICE void Computing<STEPS>::layers() {
    ask(0);
#pragma unroll 1
    for (int layer = 0; layer < in.layer_count; layer++) {
        if (threadIdx.x == 0) arrive_and_expect(shared_address(&own.hidden_full), 2 * UNITS * 2);
        time_in(layer);
        fetch(layer + 1);
        const uint32_t weight = column_of(vector(layer, ROW_NORM2_WEIGHT)),
                       bias = column_of(vector(layer, ROW_NORM2_BIAS)),
                       before = any ? load_word(shift_at(layer, 1)) : 0,
                       amount = column_of(vector(layer, ROW_X_K));
        const int channel = my.head * HEAD + 2 * lane;
        const uint32_t group_weight = load_word(vector(layer, ROW_HEAD_VECTORS + 6) + channel),
                       group_bias = load_word(vector(layer, ROW_HEAD_VECTORS + 7) + channel);
        exchange_time(layer);
        outer_sides(layer);
        recur(layer);
        time_out(layer, reinterpret_cast<const __half2&>(group_weight),
                 reinterpret_cast<const __half2&>(group_bias));
        if (layer + 1 < in.layer_count) ask(layer + 1);
        channels_in(layer, weight, bias, before, amount);
        channels_out(layer);
    }
    if (my.block > 0) return;
    of_channels = wait_channels(in.layer_count);
    keep_shift(in.layer_count - 1, 1);
    const float2 x = stream();
    if (any) *reinterpret_cast<float2*>(in.x + column) = x;
    if (threadIdx.x == 0) *in.launches = launch + 1;
}
}  // namespace half_row
#endif
