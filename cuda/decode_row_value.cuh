// What hidden units of decode_row.cu add to the stream: the codes of those that are not zero alone.
#pragma once
#include "decode_row_mixes.cuh"

#if HOPPER
namespace row {
// Those of slice j of the pair.
template <typename Format>
DEVICE const typename Format::Hidden& hidden_of_pair(RowShared& own, const RowShare& my, int j) {
    return own.hidden_units<Format>(j < my.own ? j : ROW_SLICES + j - my.own);
}

// Of each slice what the first rounds of a warp read, TURNS at a time, so that all of it is under way; zeros
// for what is not there. load(j, at): item `at` of slice j.
template <int TURNS, typename Codes, int ROUNDS, typename Units, typename Load>
DEVICE void load_first(Codes (&codes)[2 * ROW_SLICES][ROUNDS], int all, int turn, const Units& units_of,
                       const Load& load) {
#pragma unroll
    for (int j = 0; j < 2 * ROW_SLICES; j++)
#pragma unroll
        for (int round = 0; round < ROUNDS; round++) {
            const int at = round * TURNS + turn;
            codes[j][round] = {};
            if (j < all && at < units_of(j).count) codes[j][round] = load(j, at);
        }
}

// All items of a slice of a lane's turn: what `load_first` has brought, and then the others. load(at),
// add(codes, at): of item `at`.
template <int TURNS, typename Code, int ROUNDS, typename Units, typename Load, typename Add>
DEVICE void add_items(const Code (&first)[ROUNDS], const Units& units, int turn, const Load& load,
                      const Add& add) {
    const auto add_if_there = [&](const Code& codes, int at) {
        if (at < units.count) add(codes, at);
    };
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) add_if_there(first[round], round * TURNS + turn);
    for (int at = ROUNDS * TURNS + turn; at < units.count; at += TURNS) add_if_there(load(at), at);
}

// The high and low digits of the four hidden units of run `at`.
DEVICE uint2 digits_of_run(const HiddenRuns& units, int at) {
    const int run = units.runs[at], place = run % 4 * 4 + run / 4;
    return make_uint2(units.digits[place], units.digits[place + 16]);
}

// c + the dot product of four unsigned bytes and four signed ones.
DEVICE int dot_bytes(uint32_t a, uint32_t b, int c) {
    int found;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(found) : "r"(a), "r"(b), "r"(c));
    return found;
}

DEVICE uint32_t load_word_once(const void* address) {
    uint32_t x;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(x) : "l"(address));
    return x;
}

// The strips of a warp, of all hidden units of the pair.
//
// Eight lanes read a run of codes, so that lane r of them has always the same outputs: of 16 (2 (r / 4) + p)
// + g and 8 later, where p is 0 or 1 and g is 2 (r % 4) or 1 more. The four times eight take turns with the
// runs of a tile.
template <typename Tile>
DEVICE void add_value(RowInt4<Tile>, const RowInput& in, RowShared& own, Ring& ring, const RowShare& my,
                      const uint8_t* value, unsigned long long* sums, int lane) {
    constexpr int RUN_LANES = Tile::RUN_BYTES / 16, RUNS_AT_ONCE = WARP / RUN_LANES, ROUNDS = 2;
    const int r = lane % RUN_LANES, turn = lane / RUN_LANES, all = my.own + my.other;
    const auto units_of = [&](int j) -> auto& { return hidden_of_pair<RowInt4<Tile>>(own, my, j); };
    const auto load = [&](const uint8_t* tile, const HiddenRuns& units, int i) {
        const int run = units.runs[i];
        return load_once(tile + run * Tile::RUN_BYTES + (r + 2 * (run % 4)) % RUN_LANES * 16);
    };
#pragma unroll 1
    for (int i = 0; i < my.strips; i++) {
        const uint8_t* const strip = value + Tile::template begin_of<size_t>(my.strip(i), in.slices, 0);
        const auto runs_of = [&](int slice) {
            return strip + Tile::template begin_of<size_t>(0, in.slices, slice) + Tile::codes(slice);
        };
        uint4 codes[2 * ROW_SLICES][ROUNDS];
        load_first<RUNS_AT_ONCE>(codes, all, turn, units_of, [&](int j, int at) {
            return load(runs_of(my.slice_of_pair(j)), units_of(j), at);
        });
        float y[4][2] = {};  // of the four words of a lane's part of a run
        const uint32_t scales = ring.wait();
#pragma unroll
        for (int j = 0; j < 2 * ROW_SLICES; j++) {
            if (j >= all) continue;
            const HiddenRuns& units = units_of(j);
            int high[4][2] = {}, low[4][2] = {};  // by digits of hidden units
            const auto add = [&](const uint4& of_run, int at) {
                const uint2 digits = digits_of_run(units, at);
                const uint32_t words[4] = {of_run.x, of_run.y, of_run.z, of_run.w};
#pragma unroll
                for (int word = 0; word < 4; word++)
#pragma unroll
                    for (int later = 0; later < 2; later++) {
                        const uint32_t bytes = words[word] >> 4 * later & 0x0f0f0f0f;
                        high[word][later] = dot_bytes(bytes, digits.x, high[word][later]);
                        low[word][later] = dot_bytes(bytes, digits.y, low[word][later]);
                    }
            };
            add_items<RUNS_AT_ONCE>(
                codes[j], units, turn, [&](int at) { return load(runs_of(my.slice_of_pair(j)), units, at); },
                add);
            // Word 2 d + p of a lane's part is of p and g + d.
#pragma unroll
            for (int p = 0; p < 2; p++) {
                const uint4 both =
                    load_shared_words(scales + j * Tile::SCALE_BYTES + ((r / 4 * 2 + p) * 8 + r % 4 * 2) * 8);
                const uint32_t of_outputs[2][2] = {{both.x, both.y}, {both.z, both.w}};
#pragma unroll
                for (int d = 0; d < 2; d++)
#pragma unroll
                    for (int later = 0; later < 2; later++) {
                        const float2 scale = to_float2(of_outputs[d][later]);
                        const int word = 2 * d + p, sum = high[word][later] * 256 + low[word][later];
                        y[word][later] +=
                            scale.x * (units.unit * sum) + (turn == 0 ? scale.y * units.sum : 0.f);
                    }
            }
        }
        ring.release(lane);
        // Over the four turns, which divide the outputs among them: turn t has word t.
        float half[2][2], found[2];
#pragma unroll
        for (int word = 0; word < 2; word++)
#pragma unroll
            for (int later = 0; later < 2; later++)
                half[word][later] =
                    (turn & 2 ? y[2 + word][later] : y[word][later]) +
                    shuffle_xor(turn & 2 ? y[word][later] : y[2 + word][later], 2 * RUN_LANES);
#pragma unroll
        for (int later = 0; later < 2; later++)
            found[later] = (turn & 1 ? half[1][later] : half[0][later]) +
                           shuffle_xor(turn & 1 ? half[0][later] : half[1][later], RUN_LANES);
        unsigned long long* const to =
            sums + my.strip(i) * ROW_TILE + (r / 4 * 2 + turn % 2) * 16 + r % 4 * 2 + turn / 2;
        add_to_sum(to, found[0]), add_to_sum(to + 8, found[1]);
    }
}

// Of a strip four sums of each lane, of which the first two and the others are of outputs that the two times
// 16 lanes have as `output` and 8 later, times their scales, which are a stage.
DEVICE void add_strip(Ring& ring, unsigned long long* sums, const float (&y)[4], int output, int lane) {
    const bool later = lane / 16;
    const float first = (later ? y[2] : y[0]) + shuffle_xor(later ? y[0] : y[2], 16),
                second = (later ? y[3] : y[1]) + shuffle_xor(later ? y[1] : y[3], 16);
    const uint32_t scales = ring.wait() + output * 4;
    const float scale = __uint_as_float(load_shared_word(scales)),
                of_second = __uint_as_float(load_shared_word(scales + 8 * 4));
    ring.release(lane);
    add_to_sum(sums + output, first * scale), add_to_sum(sums + output + 8, second * of_second);
}

// The same of int8. 16 lanes read a run, so that lane r of them has always the same outputs: rows g = r % 8
// and 8 later of two sixteens. The two times 16 take turns with the runs of a tile.
DEVICE void add_value(RowInt8, const RowInput& in, RowShared& own, Ring& ring, const RowShare& my,
                      const uint8_t* value, unsigned long long* sums, int lane) {
    constexpr int RUN_BYTES = Int8Tile::SIXTEEN_BYTES / 4, RUN_LANES = RUN_BYTES / 16,
                  TURNS = WARP / RUN_LANES, ROUNDS = 3;
    const int r = lane % RUN_LANES, turn = lane / RUN_LANES, all = my.own + my.other, g = r % 8;
    const auto units_of = [&](int j) -> auto& { return hidden_of_pair<RowInt8>(own, my, j); };
#pragma unroll 1
    for (int i = 0; i < my.strips; i++) {
        const uint8_t* const strip = value + size_t(my.strip(i)) * in.slices * Int8Tile::BYTES;
        const auto load = [&](int j, int at) {
            const int run = units_of(j).runs[at], piece = (r + 2 * (run % 4)) % RUN_LANES;
            return load_once(strip + size_t(my.slice_of_pair(j)) * Int8Tile::BYTES + run * RUN_BYTES +
                             piece * 16);
        };
        uint4 codes[2 * ROW_SLICES][ROUNDS];
        load_first<TURNS>(codes, all, turn, units_of, load);
        float y[4] = {};
#pragma unroll
        for (int j = 0; j < 2 * ROW_SLICES; j++) {
            if (j >= all) continue;
            const HiddenRuns& units = units_of(j);
            int high[4] = {}, low[4] = {};  // by digits of hidden units
            const auto add = [&](const uint4& of_run, int at) {
                const uint2 digits = digits_of_run(units, at);
                const uint32_t words[4] = {of_run.x, of_run.y, of_run.z, of_run.w};
#pragma unroll
                for (int word = 0; word < 4; word++) {
                    high[word] = dot_bytes(words[word], digits.x, high[word]);
                    low[word] = dot_bytes(words[word], digits.y, low[word]);
                }
            };
            add_items<TURNS>(codes[j], units, turn, [&](int at) { return load(j, at); }, add);
#pragma unroll
            for (int word = 0; word < 4; word++)
                y[word] += units.unit * (high[word] * 256 + low[word]) - (turn == 0 ? 128 * units.sum : 0.f);
        }
        const int sixteen = r / 8 * 2 + (turn ^ Int8Tile::turned(g));
        add_strip(ring, sums + my.strip(i) * ROW_TILE, y, sixteen * 16 + g, lane);
    }
}

// The same of codes by hidden units. 16 lanes read the 64 outputs of a strip of a unit, four a lane, and the
// two times 16 take turns with the units of a slice. Of each 16 outputs the first eight and the others take
// turns, so that a lane has outputs 2 m, 2 m + 8, 2 m + 1 and 2 m + 9 of them.
DEVICE void add_value(RowInt8Columns, const RowInput& in, RowShared& own, Ring& ring, const RowShare& my,
                      const uint8_t* value, unsigned long long* sums, int lane) {
    constexpr int ROUNDS = 4, TURNS = 2;
    const int four = lane % 16, turn = lane / 16, all = my.own + my.other, width = in.heads * HEAD;
    const auto units_of = [&](int j) -> auto& { return hidden_of_pair<RowInt8Columns>(own, my, j); };
#pragma unroll 1
    for (int i = 0; i < my.strips; i++) {
        const auto load = [&](int j, int at) {
            const int unit = my.slice_of_pair(j) * ROW_TILE + units_of(j).unit[at];
            return load_word_once(value + size_t(unit) * width + my.strip(i) * ROW_TILE + four * 4);
        };
        uint32_t codes[2 * ROW_SLICES][ROUNDS];
        load_first<TURNS>(codes, all, turn, units_of, load);
        float y[4] = {};
#pragma unroll
        for (int j = 0; j < 2 * ROW_SLICES; j++) {
            if (j >= all) continue;
            const HiddenUnits& units = units_of(j);
            const auto add = [&](uint32_t of_unit, int at) {
                const float h = units.value[at];
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    // 2^23 and a byte, as the digits of a number.
                    const float code = __uint_as_float(__byte_perm(of_unit, 0x4b000000, 0x7650 + c));
                    y[c] += h * (code - (8388608.f + 128.f));
                }
            };
            add_items<TURNS>(codes[j], units, turn, [&](int at) { return load(j, at); }, add);
        }
        const int output = four / 4 * 16 + four % 4 * 2 + turn;
        add_strip(ring, sums + my.strip(i) * ROW_TILE, y, output, lane);
    }
}
}  // namespace row
#endif
