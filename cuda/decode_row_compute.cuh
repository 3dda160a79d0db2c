// What the warps of decode_row.cu do that compute.
#pragma once
#include "decode_row_value.cuh"

#if HOPPER
namespace row {
enum Phase { TIME_IN, TIME_OUT, HIDDEN, CHANNELS_OUT, PHASES };

// What the computing warps do.
template <typename Format>
DEVICE void compute(const RowInput& in, RowShared& own, const RowShare& my, int warp, int lane) {
    const int block = blockIdx.x, blocks = gridDim.x, width = in.heads * HEAD;
    const unsigned launch = *reinterpret_cast<const volatile unsigned*>(in.launches), ranks = ranks_of(in);
    const int thread = block * ROW_COMPUTING + threadIdx.x, threads = blocks * ROW_COMPUTING;
    unsigned long long *sums, *inner;  // of the stream, those of time mixes first; of inner sides, by layer
    {
        const auto of_launch = [&](unsigned long long* both, int words) {
            unsigned long long* const of_next = both + (launch + 1) % 2 * words;
            for (int i = thread; i < words; i += threads) of_next[i] = 0;
            return both + launch % 2 * words;
        };
        sums = of_launch(in.sums, 2 * width), inner = of_launch(in.inner, in.model_layers * ranks);
    }
    const int slot = *in.slots;
    {  // The stream begins with the embedding, of which each block adds some columns.
        const int each = (width / 2 + blocks - 1) / blocks, pair = block * each + threadIdx.x;
        if (int(threadIdx.x) < each && pair < width / 2) {
            const uint32_t numbers =
                *reinterpret_cast<const uint32_t*>(in.table + size_t(*in.tokens) * width + 2 * pair);
            const float2 x = to_float2(numbers);
            add_to_sum(sums + width + 2 * pair, x.x), add_to_sum(sums + width + 2 * pair + 1, x.y);
        }
    }

    Ring ring(own, warp);
    int column = my.tile * ROW_TILE + 2 * lane, tiles = my.tiles;
    const uint32_t x0 = shared_address(own.x[warp][0]), x1 = shared_address(own.x[warp][1]),
                   zeros = shared_address(own.zeros);
    const uint32_t zero = *reinterpret_cast<volatile uint32_t*>(own.zeros);
    float* const products = reinterpret_cast<float*>(own.x[warp][1]);  // ROW_SUMS
    const int adding_pairs = min(my.pairs, in.slices);
    const int of_lane = output_of_lane(Format(), lane);
    float2 kept[ROW_WARP_TILES] = {}, x[ROW_WARP_TILES], total[ROW_WARP_TILES] = {};
    uint32_t normed[ROW_WARP_TILES] = {};  // of block 0: what becomes a shift state
    const auto shift_at = [&](int layer, int which) {
        return in.shift + size_t(max(slot, 0)) * in.shift_stride + size_t(2 * layer + which) * width + column;
    };
    // The inputs of a norm, when all blocks have read those of the token before.
    const auto keep_shift = [&](int layer, int which) {
        if (block > 0 || slot < 0) return;
#pragma unroll
        for (int i = 0; i < ROW_WARP_TILES; i++)
            if (i < tiles) *reinterpret_cast<uint32_t*>(shift_at(layer, which) + i * ROW_TILE) = normed[i];
    };
    const auto store_operands = [&](int which, const uint32_t (&before)[ROW_WARP_TILES],
                                    const uint32_t (&amount)[ROW_WARP_TILES]) {
        float2 m[ROW_WARP_TILES];
        float most = 0.f;
#pragma unroll
        for (int i = 0; i < ROW_WARP_TILES; i++) {
            m[i] = mixed(x[i], before[i], amount[i]);
            most = i < tiles ? fmaxf(most, larger_size(m[i])) : most;
        }
        const Unit unit(most);
#pragma unroll
        for (int i = 0; i < ROW_WARP_TILES; i++)
            if (i < tiles) {
                float2 info;
                own.x[warp][which][i * WARP + place_of_digits(lane)] = digits<Format>(m[i], unit, lane, info);
                if (lane == 0) own.x_info[warp][which][i] = info;
            }
    };

    for (int layer = 0; layer < in.layer_count; layer++) {
        const auto vector = [&](int which) {
            return reinterpret_cast<const __half*>(own.tables[layer % ROW_TABLES][which]);
        };
        if (threadIdx.x == 0) {
            if (my.has_head)
                arrive_and_expect(shared_address(&own.pair_full), (2 + ROW_FUNCTIONS / 2) * HEAD * 4);
            if (my.other)
                arrive_and_expect(shared_address(&own.hidden_full),
                                  my.other * sizeof(typename Format::Hidden));
        }
        if (my.has_head) ask_for_state(in, own, my, layer, slot, warp);
        // Vectors of the next layer's norms, which all blocks will ask for at a time, come into the L2 cache.
        if (threadIdx.x == 0 && block < ROW_NORM_VECTORS && layer + 1 < in.layer_count) {
            const int which = ROW_NORM1_WEIGHT + block;
            prefetch_l2(reinterpret_cast<const void*>(own.tables[(layer + 1) % ROW_TABLES][which]),
                        (which == ROW_MIXES ? ROW_MIX_COUNT : 1) * width * 2);
        }
#pragma unroll 1
        for (int phase = 0; phase < PHASES; phase++) {
            // Else what follows from these would be kept through all layers, in more registers than there
            // are.
            asm volatile("" : "+r"(column), "+r"(lane));
            uint32_t inner_first[ROW_WARP_TILES], inner_second[ROW_WARP_TILES];
            if (phase == TIME_IN || phase == HIDDEN) {
                const int which = phase == HIDDEN;
                const __half* const mixes = vector(which ? ROW_X_K : ROW_MIXES) + column;
                uint32_t weight[ROW_WARP_TILES], bias[ROW_WARP_TILES], before[ROW_WARP_TILES],
                    amounts[ROW_WARP_TILES], second[ROW_WARP_TILES];
                load_columns(vector(which ? ROW_NORM2_WEIGHT : ROW_NORM1_WEIGHT) + column, tiles, weight);
                load_columns(vector(which ? ROW_NORM2_BIAS : ROW_NORM1_BIAS) + column, tiles, bias);
                load_columns(shift_at(layer, which), tiles, before);
                load_columns(mixes + (which || !my.rank ? 0 : 2 * width), tiles, amounts);
                if (phase == TIME_IN) {
                    load_columns(mixes + width, tiles, second);
                    load_columns(mixes + mix_of(my.function) * width, tiles, inner_first);
                    load_columns(mixes + mix_of(my.next_function) * width, tiles, inner_second);
                }
                wait_sums(sums + (which ? 0 : width) + column,
                          which ? (layer + 1) * in.heads : 1 + layer * adding_pairs, tiles, total);
#pragma unroll
                for (int i = 0; i < ROW_WARP_TILES; i++) {
                    x[i] = make_float2(kept[i].x + total[i].x, kept[i].y + total[i].y);
                    kept[i] = total[i];
                }
                if (layer + which > 0) keep_shift(layer - 1 + which, 1 - which);
                normalize(x, weight, bias, tiles, in.heads, own.moments[which], warp, lane);
#pragma unroll
                for (int i = 0; i < ROW_WARP_TILES; i++) normed[i] = to_finite_half2(x[i].x, x[i].y);
                store_operands(0, before, amounts);
                if (phase == TIME_IN) {
                    store_operands(1, before, second);
#pragma unroll
                    for (int i = 0; i < ROW_WARP_TILES; i++) {
                        float2 m = mixed(x[i], before[i], inner_first[i]);
                        inner_first[i] = i < tiles ? to_half2(m.x, m.y) : 0;
                        m = mixed(x[i], before[i], inner_second[i]);
                        inner_second[i] = i < tiles ? to_half2(m.x, m.y) : 0;
                    }
                }
                sync_warp();
            }
            if (phase == TIME_IN) {
                add_inner_sides(ring, my, inner + layer * ranks + my.row, inner_first, inner_second, lane);
            }

            // Products.
            const int products_of_phase = phase == TIME_IN    ? my.has_head ? 2 : 0
                                          : phase == TIME_OUT ? my.has_head ? my.strips : 0
                                          : phase == HIDDEN   ? my.own
                                                              : 0;
            uint32_t operands = phase == TIME_OUT ? shared_address(own.y) : x0;
            const int first_tile = phase == TIME_OUT ? my.pair : my.tile;
            unsigned which_tiles = phase == TIME_OUT ? 1 : my.all_tiles();
            uint32_t infos = shared_address(phase == TIME_OUT ? own.y_info : own.x_info[warp][0]);
#pragma unroll 1
            for (int i = 0; i < products_of_phase; i++) {
                if (phase == TIME_IN && i == 1) {
                    operands = x1, which_tiles = my.shared_tiles();
                    infos = shared_address(own.x_info[warp][1]);
                }
                const float2 y = multiply_strip(Format(), ring, operands, infos, zeros, zero, first_tile,
                                                which_tiles, lane);
                if (phase == TIME_OUT) {
                    unsigned long long* const to = sums + my.strip(i) * ROW_TILE + of_lane;
                    add_to_sum(to, y.x), add_to_sum(to + 8, y.y);
                } else {
                    // In place of x that is no longer needed.
                    sync_warp();
                    float* const to =
                        phase == TIME_IN ? reinterpret_cast<float*>(own.x[warp][i]) : products + i * HEAD;
                    to[of_lane] = y.x, to[of_lane + 8] = y.y;
                }
            }
            if (phase == CHANNELS_OUT && my.own + my.other) {
                if (my.other) barrier_wait(shared_address(&own.hidden_full), layer % 2);
                add_value(Format(), in, own, ring, my, reinterpret_cast<const uint8_t*>(vector(ROW_VALUE)),
                          sums + width, lane);
            }
            if (phase == TIME_IN && my.has_head) {
                sync_some(3, ROW_COMPUTING);
                if (warp == 0) {
                    share_rkv(own, my, lane);
                } else {
                    for (int i = threadIdx.x - WARP; i < int(ranks) / 4; i += ROW_COMPUTING - WARP)
                        wait_inner(inner + layer * ranks + 4 * i, 4 * i, in, own.inner + 4 * i);
                }
                if (warp < 4) wait_copies<0>();
                sync_some(4, ROW_COMPUTING);
                share_outer_sides(in, own, ring, my, warp, lane);
                if (warp < 4) {
                    sync_some(5, ROW_COMPUTING);
                    recur<Format>(in, own, my, layer, slot, warp, lane);
                } else {
                    arrive_some(5, ROW_COMPUTING);
                }
                sync_some(7, ROW_COMPUTING);
            }
            if (phase == HIDDEN) {
                // All warps are past the layer before, whose table the one after the next replaces.
                if (layer > 0 && layer + 2 < in.layer_count && warp == ROW_WARPS - 1) {
                    for (int i = lane; i < ROW_POINTERS; i += WARP)
                        own.tables[(layer + 2) % ROW_TABLES][i] = in.layers[layer + 2].at[i];
                    __threadfence_block();
                    sync_warp();
                    if (lane == 0) *reinterpret_cast<volatile int*>(&own.known_layers) = layer + 3;
                }
                sync_some(3, ROW_COMPUTING);
                if (warp < my.own) share_hidden<Format>(own, my, warp, lane);
                sync_some(4, ROW_COMPUTING);
            }
        }
    }

    if (block == 0) {
        wait_sums(sums + width + column, 1 + in.layer_count * adding_pairs, tiles, total);
        keep_shift(in.layer_count - 1, 1);
#pragma unroll
        for (int i = 0; i < ROW_WARP_TILES; i++)
            if (i < tiles)
                *reinterpret_cast<float2*>(in.x + column + i * ROW_TILE) =
                    make_float2(finite_stream(kept[i].x + total[i].x), finite_stream(kept[i].y + total[i].y));
        if (threadIdx.x == 0) *in.launches = launch + 1;
    }
}
}  // namespace row
#endif
