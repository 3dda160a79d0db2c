// What the warps of decode_row.cu do that compute.
#pragma once
#include "decode_row_exchange.cuh"

#if HOPPER
namespace row {
enum Phase { TIME_IN, TIME_OUT, HIDDEN, CHANNELS_OUT, PHASES };

// What the computing warps do.
DEVICE void compute(const RowInput& in, RowShared& own, const RowShare& my, int warp, int lane) {
    const int block = blockIdx.x, blocks = gridDim.x, width = in.heads * HEAD, other = my.rank ^ 1;
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
    const int of_lane = output_of_lane(lane);
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
                own.x[warp][which][i * WARP + place_of_digits(lane)] = digits(m[i], unit, lane, info);
                if (lane == 0) own.x_info[warp][which][i] = info;
            }
    };

    // What is multiplied with the same code lies in one place, as instructions that are read once in a layer
    // come from as far as weights.
    for (int layer = 0; layer < in.layer_count; layer++) {
        const auto vector = [&](int which) {
            return reinterpret_cast<const __half*>(own.tables[layer % ROW_TABLES][which]);
        };
        if (threadIdx.x == 0) {
            if (my.has_head)
                arrive_and_expect(shared_address(&own.pair_full), (2 + ROW_FUNCTIONS / 2) * HEAD * 4);
            if (my.other) arrive_and_expect(shared_address(&own.hidden_full), my.other * (WARP + 2) * 4);
        }
        if (my.has_head && warp < 4 && slot >= 0) {  // what the recurrence reads, on its way
            const __half* const state = in.state + size_t(slot) * in.state_stride +
                                        (size_t(layer) * in.heads + my.pair) * HEAD * HEAD;
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
        if (my.has_head && warp >= 2 && warp < 4) {
            const int which = threadIdx.x % 64 / 8, eight = threadIdx.x % 8;
            const __half* const from = vector(ROW_HEAD_VECTORS + which);
            if (from)
                copy_async(reinterpret_cast<uint4*>(own.head_vectors[which]) + eight,
                           from + my.pair * HEAD + eight * 8);
        }
        commit_copies();
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
                for (int i = 0; i < ROW_WARP_TILES; i++) normed[i] = to_half2(x[i].x, x[i].y);
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
                // Inner sides: a warp has its part of K of all outputs of the block.
#pragma unroll 1
                for (int begin = 0; begin < my.rows; begin += ROW_INNER_AT_ONCE) {
                    float partial[ROW_INNER_AT_ONCE] = {};
                    if (tiles) {
                        const uint32_t stage = ring.wait();
#pragma unroll
                        for (int i = 0; i < ROW_INNER_AT_ONCE; i++) {
                            const bool second = begin + i >= my.of_first;
                            uint32_t words[ROW_WARP_TILES] = {};
#pragma unroll
                            for (int t = 0; t < ROW_WARP_TILES; t++)
                                if (begin + i < my.rows && t < tiles)
                                    asm volatile("ld.shared.u32 %0, [%1];"
                                                 : "=r"(words[t])
                                                 : "r"(stage + (i * tiles + t) * 128 + lane * 4)
                                                 : "memory");
                            float c[4] = {};
#pragma unroll
                            for (int t = 0; t < ROW_WARP_TILES; t += 2)
                                add_dots(c, make_uint2(words[t], words[t + 1]), make_uint2(0, 0),
                                         make_uint2(second ? inner_second[t] : inner_first[t],
                                                    second ? inner_second[t + 1] : inner_first[t + 1]));
                            partial[i] = own_dots(c, lane).x;
                        }
                        ring.release(lane);
                    }
                    const float sum = warp_sums(partial, lane);
                    const int i = begin + lane / (WARP / ROW_INNER_AT_ONCE);
                    if (lane % (WARP / ROW_INNER_AT_ONCE) == 0 && i < my.rows)
                        add_to_sum(inner + layer * ranks + my.row + i, sum);
                }
            }

            // Products.
            const int products_of_phase = phase == TIME_IN    ? my.has_head ? 2 : 0
                                          : phase == TIME_OUT ? my.has_head ? my.strips : 0
                                          : phase == HIDDEN   ? my.own
                                          : my.own + my.other ? my.strips
                                                              : 0;
            uint32_t operands = phase == TIME_OUT       ? shared_address(own.y)
                                : phase == CHANNELS_OUT ? shared_address(own.hidden)
                                                        : x0;
            unsigned which_tiles = phase == TIME_OUT       ? 1
                                   : phase == CHANNELS_OUT ? my.hidden_tiles()
                                                           : my.all_tiles();
            uint32_t infos = shared_address(phase == TIME_OUT       ? own.y_info
                                            : phase == CHANNELS_OUT ? own.hidden_info
                                                                    : own.x_info[warp][0]);
#pragma unroll 1
            for (int i = 0; i < products_of_phase; i++) {
                if (phase == TIME_IN && i == 1) {
                    operands = x1, which_tiles = my.shared_tiles();
                    infos = shared_address(own.x_info[warp][1]);
                }
                const float2 y =
                    multiply_strip(ring, operands, infos, zeros, zero, which_tiles, lane, [&](int j) {
                        if (phase == CHANNELS_OUT && j == ROW_SLICES)
                            barrier_wait(shared_address(&own.hidden_full), layer % 2);
                    });
                if (phase == TIME_OUT || phase == CHANNELS_OUT) {
                    unsigned long long* const to =
                        sums + (phase == CHANNELS_OUT ? width : 0) + my.strip(i) * ROW_TILE + of_lane;
                    add_to_sum(to, y.x), add_to_sum(to + 8, y.y);
                } else {
                    // In place of x that is no longer needed.
                    sync_warp();
                    float* const to =
                        phase == TIME_IN ? reinterpret_cast<float*>(own.x[warp][i]) : products + i * HEAD;
                    to[of_lane] = y.x, to[of_lane + 8] = y.y;
                }
            }
            if (phase == TIME_IN && my.has_head) {
                sync_some(3, ROW_COMPUTING);
                if (warp == 0) {
                    const int which = lane / 16, four = lane % 16;
                    float4 sum = {};
#pragma unroll
                    for (int i = 0; i < ROW_WARPS; i++) {
                        const float4 more = reinterpret_cast<const float4*>(own.x[i][which])[four];
                        sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
                    }
                    float* const to = own.rkv[which == 0 ? (my.rank ? 3 : 0) : 1 + my.rank] + 4 * four;
                    *reinterpret_cast<float4*>(to) = sum;
                    send_to(other, shared_address(to), shared_address(&own.pair_full), sum);
                } else {
                    for (int i = threadIdx.x - WARP; i < int(ranks) / 4; i += ROW_COMPUTING - WARP)
                        wait_inner(inner + layer * ranks + 4 * i, 4 * i, in, own.inner + 4 * i);
                }
                if (warp < 4) wait_copies<0>();
                sync_some(4, ROW_COMPUTING);
                {  // outer sides: two channels of the head by a warp
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
                    const float4 of_channel = {shuffle(sum, first), shuffle(sum, first + 4),
                                               shuffle(sum, first + 8), shuffle(sum, first + 12)};
                    if (lane < 2) {
                        float4* const to = &own.outer[my.rank * (HEAD / 2) + 2 * warp + lane];
                        *to = of_channel;
                        send_to(other, shared_address(to), shared_address(&own.pair_full), of_channel);
                    }
                }
                if (warp >= 4) arrive_some(5, ROW_COMPUTING);
                if (warp < 4) {
                    sync_some(5, ROW_COMPUTING);
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
                        Inputs of_token = {rounded(own.rkv[0]),
                                           __floats2half2_rn(k0.x + k1.x, k0.y + k1.y),
                                           rounded(own.rkv[3]),
                                           __floats2half2_rn(o0.x, o1.x),
                                           __floats2half2_rn(o0.y, o1.y),
                                           __floats2half2_rn(o0.z, o1.z),
                                           __floats2half2_rn(o0.w, o1.w),
                                           reinterpret_cast<const __half2&>(own.first_v[lane])};
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
                                noted.vectors[t][i] =
                                    *reinterpret_cast<const __half2*>(own.deferred[t][i] + 2 * lane);
                        if (my.rank == 0 && slot >= 0)
                            noted.all = in.deferred + size_t(slot) * in.deferred_stride +
                                        of_head * MAX_LAG * DEFERRED_VECTORS * HEAD;
                        Half::put(own.token, lane, prepare(of_token, of_head_channels, layer > 0), noted);
                    }
                    sync_some(6, THREADS);
                    __half* const state = my.rank == 0 && slot >= 0
                                              ? in.state + size_t(slot) * in.state_stride +
                                                    of_head * HEAD * HEAD + recurrence.first
                                              : nullptr;
                    recurrence.advance(own.token, own.state + threadIdx.x, state, own.y_of);
                    sync_some(6, THREADS);
                    if (warp == 0) {
                        const uint32_t pair =
                            finished<false>(ReadoutInput{}, last, 0, my.pair, lane, Half::own(own.token),
                                            Half::value(own.token, lane), own.y_of);
                        const float2 y = to_float2(pair);
                        float2 info;
                        own.y[place_of_digits(lane)] = digits(y, Unit(larger_size(y)), lane, info);
                        if (lane == 0) own.y_info[0] = info;
                    }
                }
                sync_some(7, ROW_COMPUTING);
            }
            if (phase == HIDDEN) {
                // All warps are past the layer before, whose table the one after the next replaces.
                if (layer > 0 && layer + 2 < in.layer_count && warp == ROW_WARPS - 1) {
                    if (lane < ROW_POINTERS)
                        own.tables[(layer + 2) % ROW_TABLES][lane] = in.layers[layer + 2].at[lane];
                    __threadfence_block();
                    sync_warp();
                    if (lane == 0) *reinterpret_cast<volatile int*>(&own.known_layers) = layer + 3;
                }
                sync_some(3, ROW_COMPUTING);
                if (int(threadIdx.x) < my.own * WARP) {
                    float2 sum = {};
#pragma unroll
                    for (int i = 0; i < ROW_WARPS; i++) {
                        const float2 more = *reinterpret_cast<const float2*>(own.x[i][1] + 2 * threadIdx.x);
                        sum.x += more.x, sum.y += more.y;
                    }
                    const float2 h = make_float2(relu_square(sum.x), relu_square(sum.y));
                    const int to = warp * WARP + place_of_digits(lane);
                    float2 info;
                    const uint32_t word = digits(h, Unit(larger_size(h)), lane, info);
                    own.hidden[to] = word;
                    send_word(other, own.hidden + ROW_SLICES * WARP + to, &own.hidden_full, word);
                    if (lane < 2) {
                        float* const place = reinterpret_cast<float*>(&own.hidden_info[warp]) + lane;
                        const float part = lane ? info.y : info.x;
                        *place = part;
                        send_word(other, place + 2 * ROW_SLICES, &own.hidden_full, __float_as_uint(part));
                    }
                }
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
                    make_float2(kept[i].x + total[i].x, kept[i].y + total[i].y);
        if (threadIdx.x == 0) *in.launches = launch + 1;
    }
}
}  // namespace row
#endif
