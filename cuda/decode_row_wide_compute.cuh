// What the warps of decode_row_wide.cu do that compute: all layers, of which the channel mix is here.
#pragma once
#include "decode_row_wide_time.cuh"

#if HOPPER
namespace wide_row {
// Norm, mix and hidden units.
template <int STEPS>
DEVICE void Computing<STEPS>::channels_in(int layer) {
    Words weight, bias, before, amount;
    load_columns(vector(layer, ROW_NORM2_WEIGHT), weight), load_columns(vector(layer, ROW_NORM2_BIAS), bias);
    load_columns(shift_at(layer, 1), before), load_columns(vector(layer, ROW_X_K), amount);
    wait_outputs(layer);
    keep_shift(layer, 0);
    Numbers x;
    norm(x, weight, bias, own.moments[1]);
    put_mixed(0, x, before, amount);
    sync_warp();
    const int rows = my.rows[KEYS].count;
    multiply(KEYS, rows, own.sums[warp]);
    sync_some(1, COMPUTING);
    // Those that are not zero side by side, in their order.
    const int warps = (S::MOST_ROWS + WARP - 1) / WARP, unit = threadIdx.x;
    if (warp < warps) {
        const float h = unit < rows ? rounded(relu_square(over_warps(own.sums, unit))) : 0.f;
        const unsigned active = warp_ballot(h > 0.f);
        if (lane == 0) own.active_counts[warp] = __popc(active);
        sync_some(2, warps * WARP);
        int place = __popc(active & (1u << lane) - 1), count = 0;
#pragma unroll
        for (int w = 0; w < warps; w++) {
            const int more = own.active_counts[w];
            place += w < warp ? more : 0, count += more;
        }
        if (h > 0.f) {
            own.active[place] = {h, unit * S::ROW_BYTES};
            // Of value 0, with a row that is read anyway.
            if (place == count - 1)
                for (int i = count; i % 4; i++) own.active[i] = {0.f, unit * S::ROW_BYTES};
        }
    }
    sync_some(1, COMPUTING);
}

// What the block's hidden units add to the stream. Of value only rows of active units are read, nine of ten
// are not, and only now, as they are known.
template <int STEPS>
DEVICE void Computing<STEPS>::channels_out(int layer) const {
    constexpr int ROUND = PAIRS <= 2 ? AT_ONCE : AT_ONCE / 2;
    int count = 0;
#pragma unroll
    for (int w = 0; w < (S::MOST_ROWS + WARP - 1) / WARP; w++) count += own.active_counts[w];
    const uint8_t* const rows = reinterpret_cast<const uint8_t*>(
        vector(layer, ROW_VALUE) + size_t(my.rows[KEYS].first) * S::WIDTH + column);
    const uint32_t active = shared_address(own.active);
    Numbers sum = {};
#pragma unroll 1
    for (int first = 0; first < count; first += ROUND) {
        uint32_t w[ROUND][PAIRS];
#pragma unroll
        for (int i = 0; i < ROUND; i += 4) {
            if (first + i >= count) break;
#pragma unroll
            for (int j = i; j < i + 4; j += 2) {
                const float4 both = load_shared(active + (first + j) * int(sizeof(ActiveUnit)));
                const int offsets[2] = {__float_as_int(both.y), __float_as_int(both.w)};
#pragma unroll
                for (int k = 0; k < 2; k++)
#pragma unroll
                    for (int p = 0; p < PAIRS; p++)
                        w[j + k][p] = any(p) ? load_weights(rows + offsets[k] + p * 4 * WARP) : 0;
            }
        }
#pragma unroll
        for (int i = 0; i < ROUND; i += 2) {
            if (i % 4 == 0 && first + i >= count) break;
            const float4 both = load_shared(active + (first + i) * int(sizeof(ActiveUnit)));
            const float h[2] = {both.x, both.z};
#pragma unroll
            for (int k = 0; k < 2; k++)
#pragma unroll
                for (int p = 0; p < PAIRS; p++) {
                    const float2 of = to_float2(w[i + k][p]);
                    sum[p].x += h[k] * of.x, sum[p].y += h[k] * of.y;
                }
        }
    }
    // Lanes side by side add to words side by side, of 64 outputs first to the lower half.
    unsigned long long* const to = sums_of(launch) + warp * SLICE + lane;
#pragma unroll
    for (int p = 0; p < PAIRS; p++) {
        const auto of_pair = [&](int from) {
            const float even = shuffle(sum[p].x, from), odd = shuffle(sum[p].y, from);
            return lane % 2 ? odd : even;
        };
        const int at = p * 2 * WARP;
        const float low = of_pair(lane / 2), high = of_pair(WARP / 2 + lane / 2);
        if (at + lane < SLICE) add_to_sum(to + at, low);
        if (at + WARP + lane < SLICE) add_to_sum(to + at + WARP, high);
    }
}

// Vectors and states of the next layer, which all blocks ask for at a time, into the L2 cache.
template <int STEPS>
DEVICE void Computing<STEPS>::fetch(int layer) const {
    if (threadIdx.x != COMPUTING - 1 || layer >= in.layer_count) return;
    constexpr int SIZE = S::WIDTH * 2;
    const int i = my.blocks - 1 - my.block;
    if (i < ROW_NORM_VECTORS) {
        const int which = ROW_NORM1_WEIGHT + i;
        prefetch_l2(vector(layer, which), (which == ROW_MIXES ? ROW_MIX_COUNT : 1) * SIZE);
    } else if (i == ROW_NORM_VECTORS) {
        prefetch_l2(shift_at(layer, 0), 2 * SIZE);
    }
}

template <int STEPS>
DEVICE void Computing<STEPS>::layers() {
    ask(0);
#pragma unroll 1
    for (int layer = 0; layer < in.layer_count; layer++) {
        if (layer == in.layer_count - 1 && threadIdx.x == 0) grid_dependency_launch();
        forget(), time_in(layer);
        fetch(layer + 1);
        if (my.has_head) {
            forget(), exchange_time(layer);
            forget(), outer_sides(layer);
            forget(), recur(layer);
        }
        if (layer + 1 < in.layer_count) ask(layer + 1);
        forget(), time_out(layer);
        forget(), channels_in(layer);
        forget(), channels_out(layer);
    }
    forget();
    if (my.block != my.blocks - 1) return;
    Words weight, bias;
    load_columns(in.norm_weight, weight), load_columns(in.norm_bias, bias);
    wait_channels(in.layer_count);
    keep_shift(in.layer_count - 1, 1);
    Numbers x;
    norm(x, weight, bias, own.moments[0]);
#pragma unroll
    for (int p = 0; p < PAIRS; p++)
        if (any(p)) {
            const float2 stream = make_float2(base[p].x + channels[p].x, base[p].y + channels[p].y);
            const int at = column + p * 2 * WARP;
            *reinterpret_cast<float2*>(in.x + at) = stream;
            *normed(p) = finite_stream(stream.x) == stream.x && finite_stream(stream.y) == stream.y
                             ? to_half2(x[p].x, x[p].y)
                             : ~0u;
        }
    if (threadIdx.x == 0) *in.launches = launch + 1;
}
}  // namespace wide_row
#endif
