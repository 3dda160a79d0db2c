// What the warps of decode_row_half.cu do that compute: all layers, of which the channel mix is here.
#pragma once
#include "decode_row_half_time.cuh"

#if HOPPER
namespace half_row {
// Norm, mix and hidden units.
template <int STEPS>
DEVICE void Computing<STEPS>::channels_in(int layer, Affine norm, Affine mixed) {
    keep_time_shift(layer);
    wait_for(PART_KEY, layer);
    Fragments first;
    load_fragments(first, row_of(S::KEY_AT, lane % 16));
    const float2 x = normalized(stream(wait_time(layer)), any, SLICE, own.moments[1], warp, lane),
                 shifted = norm(x);
    keep_state(layer);
    normed = to_finite_half2(shifted.x, shifted.y);
    put_operand(0, mixed(x));
    sync_warp();
    uint4 b[2];
    load_operand(0, b);
    float early[4] = {}, late[4] = {};
    multiply(early, first, b);
    multiply(late, row_of(S::KEY_AT, UNITS / 2 + lane % 16), b);
    const float of_early = of_lane(early, lane), of_late = of_lane(late, lane);
    own.sums[warp][q * 8 + g] = q < 2 ? of_early : of_late;
    sync_some(1, COMPUTING);
    if (threadIdx.x == COMPUTING - 1) used(PART_KEY);
    if (warp == 0) {
        const float h = rounded(relu_square(over_warps()));
        const unsigned active = warp_ballot(h > 0.f);
        const int count = __popc(active), before = __popc(active & (1u << lane) - 1);
        const int row = S::ROW_BYTES;
        if (h > 0.f) own.active[before] = {h, lane * row};
        // Of value 0, with a row that is read anyway.
        if (lane >= count && lane < (count + 3) / 4 * 4) own.active[lane] = {0.f, (__ffs(active) - 1) * row};
        if (lane == 0) own.active_count = count;
    }
    sync_some(1, COMPUTING);
}

// What the block's hidden units add to the stream: two outputs a thread. Of value only rows of active units
// are read, nine of ten are not, and only now, as they are known.
template <int STEPS>
DEVICE void Computing<STEPS>::channels_out(int layer) const {
    if (2 * int(threadIdx.x) >= S::WIDTH) return;  // whole warps
    const int count = own.active_count;
    const uint8_t* const rows = reinterpret_cast<const uint8_t*>(
        vector(layer, ROW_VALUE) + size_t(my.block) * UNITS * S::WIDTH + 2 * threadIdx.x);
    float2 sum = {};
#pragma unroll 1
    for (int first = 0; first < count; first += AT_ONCE) {
        uint32_t w[AT_ONCE];
        float h[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i += 4) {
            if (first + i >= count) break;
#pragma unroll
            for (int j = i; j < i + 4; j += 2) {
                const float4 two = load_shared(shared_address(own.active + first + j));
                h[j] = two.x, w[j] = load_weights(rows + __float_as_int(two.y));
                h[j + 1] = two.z, w[j + 1] = load_weights(rows + __float_as_int(two.w));
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            if (i % 4 == 0 && first + i >= count) break;
            const float2 of = to_float2(w[i]);
            sum.x += h[i] * of.x, sum.y += h[i] * of.y;
        }
    }
    // Lanes side by side add to words side by side, of 64 outputs first to the lower half.
    const auto of_pair = [&](int from) {
        const float even = shuffle(sum.x, from), odd = shuffle(sum.y, from);
        return lane % 2 ? odd : even;
    };
    const float low = of_pair(lane / 2), high = of_pair(WARP / 2 + lane / 2);
    unsigned long long* const to = sums + (1 + my.block % ROW_HALF_WAYS) * S::WIDTH + 2 * WARP * warp + lane;
    add_to_sum(to, low), add_to_sum(to + WARP, high);
}

// Vectors and states of the next layer, which all blocks ask for at a time, into the L2 cache.
template <int STEPS>
DEVICE void Computing<STEPS>::fetch(int layer) const {
    if (threadIdx.x != COMPUTING - 1 || layer >= in.layer_count) return;
    const int size = S::WIDTH * 2;
    if (my.block < ROW_NORM_VECTORS) {
        const int which = ROW_NORM1_WEIGHT + my.block;
        prefetch_l2(vector(layer, which), (which == ROW_MIXES ? ROW_MIX_COUNT : 1) * size);
    } else if (my.block < ROW_NORM_VECTORS + HEAD_VECTORS) {
        const __half* const from = vector(layer, ROW_HEAD_VECTORS + my.block - ROW_NORM_VECTORS);
        if (from) prefetch_l2(from, size);
    } else if (my.block == ROW_NORM_VECTORS + HEAD_VECTORS) {
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
        if (layer == in.layer_count - 1 && threadIdx.x == 0) grid_dependency_launch();
        time_in(layer);
        publish_time(layer);
        fetch(layer + 1);
        const uint32_t weight = column_of(vector(layer, ROW_NORM2_WEIGHT)),
                       bias = column_of(vector(layer, ROW_NORM2_BIAS)),
                       before = any ? load_word(shift_at(layer, 1)) : 0,
                       amount = column_of(vector(layer, ROW_X_K));
        exchange_time(layer);
        outer_sides(layer);
        recur(layer);
        time_out(layer);
        if (layer + 1 < in.layer_count) ask(layer + 1);
        Affine norm(weight, bias), mixed = norm.mixed(before, amount);
        norm.here(), mixed.here();
        channels_in(layer, norm, mixed);
        channels_out(layer);
    }
    if (my.block > 0) return;
    const Affine norm(column_of(in.norm_weight), column_of(in.norm_bias));
    const float2 x = stream(wait_channels(in.layer_count)),
                 y = norm(normalized(x, any, SLICE, own.moments[0], warp, lane));
    keep_channel_shift(in.layer_count - 1);
    if (any) {
        *reinterpret_cast<float2*>(in.x + column) = x;
        *reinterpret_cast<uint32_t*>(in.normed + column) =
            finite_stream(x.x) == x.x && finite_stream(x.y) == x.y ? to_half2(y.x, y.y) : ~0u;
    }
    if (threadIdx.x == 0) *in.launches = launch + 1;
}
}  // namespace half_row
#endif
