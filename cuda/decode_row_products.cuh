// Products of a warp of decode_row.cu with tiles of weights.
#pragma once
#include "decode_row.cuh"

#if HOPPER
namespace row {
using namespace hopper;

// Where a warp is in its ring.
struct Ring {
    uint32_t stages, full, empty;
    int stage = 0;
    unsigned parity = 0;

    __device__ Ring(const RowShared& own, int warp)
        : stages(shared_address(own.rings[warp])),
          full(shared_address(own.full[warp])),
          empty(shared_address(own.empty[warp])) {}

    DEVICE uint32_t wait() const {
        barrier_wait(full + stage * 8, parity);
        return stages + stage * ROW_STAGE_BYTES;
    }

    // The stage has been read. An arrival does not wait for reads of shared memory, a fence does.
    DEVICE void release(int lane) {
        fence_async_shared();
        release(lane, 0);
    }

    // The same where the arrival waits for what was read: `nothing` is zero, made of all of it.
    DEVICE void release(int lane, uint32_t nothing) {
        sync_warp();
        if (lane == 0) arrive(empty + stage * 8 + nothing);
        if (++stage == ROW_STAGES) stage = 0, parity ^= 1;
    }
};

// An operand is 64 numbers along K, as integers of 16 bits in a unit that up to four tiles of a warp share:
// the largest number is MOST_INTEGER. Each is two digits of 8 bits, so that Tensor Cores multiply them with
// codes as they are, and sums are exact. Of the digits that are high, and of those that are low, lane q of
// four has four of each sixteen along K, as of codes: those at 2 q, 2 q + 1, 2 q + 8 and 2 q + 9, in the
// order of the format.
constexpr float MOST_INTEGER = 32600;      // at most 127 * 256 + 127, and what is rounded up below it
constexpr uint32_t INTEGERS = 0x4b400000;  // 1.5 * 2^23: a number added to it is an integer in the low bits

// The word of a tile's operand that `digits` gives a lane.
DEVICE int place_of_digits(int lane) { return (lane >> 2 & 1) * 16 + lane % 4 * 4 + lane / 8; }

// What integers are multiplied with, and its reciprocal. size: the largest number of a lane, without its
// sign.
struct Unit {
    float unit, reciprocal;
    explicit DEVICE Unit(float size) {
        // Numbers that are not negative are in the order of their bits.
        const float largest = fmaxf(__uint_as_float(warp_max(__float_as_uint(size))), 1e-30f);
        unit = largest * (1 / MOST_INTEGER), reciprocal = __fdividef(MOST_INTEGER, largest);
    }
};
DEVICE float larger_size(float2 x) { return fmaxf(fabsf(x.x), fabsf(x.y)); }

// x: numbers 2 lane and 2 lane + 1 of a tile. info: the unit, and the sum of the tile's numbers.
template <typename Format>
DEVICE uint32_t digits(float2 x, const Unit& unit, int lane, float2& info) {
    const uint32_t a = __float_as_uint(x.x * unit.reciprocal + __uint_as_float(INTEGERS)),
                   b = __float_as_uint(x.y * unit.reciprocal + __uint_as_float(INTEGERS));
    info = make_float2(unit.unit, unit.unit * warp_sum(int(a + b - 2 * INTEGERS)));
    // Numbers k and k + 8 are in one word: a lane has high digits of both, the one 4 away the low ones.
    const bool low = lane & 4;
    const uint32_t high_digits = __byte_perm(a + 128, b + 128, 0x51), low_digits = __byte_perm(a, b, 0x40);
    const uint32_t own = low ? low_digits : high_digits,
                   other = shuffle_xor(low ? high_digits : low_digits, 4);
    return __byte_perm(low ? other : own, low ? own : other, Format::DIGITS);
}

// The sums over four lanes of what they have of outputs 16 p + g and 8 later: those of p = q.
DEVICE float2 over_four_lanes(const float (&y)[4][2], int q) {
    float half[2][2];
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int down = 0; down < 2; down++)
            half[i][down] =
                (q & 2 ? y[2 + i][down] : y[i][down]) + shuffle_xor(q & 2 ? y[i][down] : y[2 + i][down], 2);
    float2 found;
    found.x = (q & 1 ? half[1][0] : half[0][0]) + shuffle_xor(q & 1 ? half[0][0] : half[1][0], 1);
    found.y = (q & 1 ? half[1][1] : half[0][1]) + shuffle_xor(q & 1 ? half[0][1] : half[1][1], 1);
    return found;
}

// Of which output of 64 a lane has the sum, and of that 8 later (lane = 4 g + q).
template <typename Tile>
DEVICE int output_of_lane(RowInt4<Tile>, int lane) {
    return lane % 4 * 16 + lane / 4;
}
DEVICE int output_of_lane(RowInt8, int lane) {
    return (lane % 4 ^ Int8Tile::turned(lane / 4)) * 16 + lane / 4;
}

// Of the operand of tile j what a lane has of columns 2 j and 2 j + 1, zeros in the others; lanes q = j have
// the sums of tile j, and get its `info`.
DEVICE uint4 operand(int j, uint32_t digits_at, uint32_t infos, uint32_t zeros, int lane, float2& info) {
    const int g = lane / 4, q = lane % 4;
    const uint4 b = load_shared_words(g / 2 == j ? digits_at + j * 128 : zeros);
    if (q == j) info = load_shared2(infos + j * 8);
    return b;
}

// 64 outputs times tiles along K (`which`, by bits): a lane gets the sums of two outputs. Columns 2 j and 2 j
// + 1 of products are the digits of tile j, of which lane q = j has the sums, so that scales are applied once
// for all of them. Sums of the later outputs are 16 times too large, as their codes are the high halves of
// bytes. x: operands of the tiles; infos: of these, as of `digits`. zeros: 16 bytes of them; zero: none, of
// which the compiler does not know. first: of the tiles along all of K.
template <typename Tile>
DEVICE float2 multiply_strip(RowInt4<Tile>, Ring& ring, uint32_t x, uint32_t infos, uint32_t zeros,
                             uint32_t zero, int first, unsigned which, int lane) {
    const int g = lane / 4, q = lane % 4;
    int sums[4][4] = {};
    float2 scales[4] = {}, info = {};
    const uint32_t digits_at = x + (g % 2 * 4 + q) * 16;
#pragma unroll 1
    for (int j = 0; j < ROW_WARP_TILES; j++) {
        if (!(which >> j & 1)) continue;
        const uint4 b = operand(j, digits_at, infos, zeros, lane, info);
        const uint32_t tile = ring.wait(), runs = tile + Tile::codes(first + j);
        uint2 codes[2][4];  // of pairs of 16 outputs, by sixteens along K
#pragma unroll
        for (int pair = 0; pair < 2; pair++)
#pragma unroll
            for (int k = 0; k < 4; k++)
                codes[pair][k] = load_shared_two(runs + (k * 4 + q) * 128 + (pair * 8 + g + 4 * q) % 16 * 8);
        if (q == j)
#pragma unroll
            for (int p = 0; p < 4; p++)
                scales[p] = load_shared2(tile + Tile::scales(first + j) + Tile::place_of_scale(p, g));
        // Released first: so all codes are read at once, and products take turns.
        uint32_t read = 0;
#pragma unroll
        for (int p = 0; p < 4; p++) read |= codes[0][p].x | codes[1][p].x | __float_as_uint(scales[p].x);
        ring.release(lane, read & zero);
        constexpr uint32_t LOW = 0x0f0f0f0f, HIGH = 0xf0f0f0f0;
#pragma unroll
        for (int k = 0; k < 4; k += 2)
#pragma unroll
            for (int p = 0; p < 4; p++) {
                const uint2(&of_pair)[4] = codes[p / 2];
                const uint32_t word = p % 2 ? of_pair[k].y : of_pair[k].x,
                               next = p % 2 ? of_pair[k + 1].y : of_pair[k + 1].x;
                mma_bytes(sums[p], word & LOW, word & HIGH, next & LOW, next & HIGH, k ? b.z : b.x,
                          k ? b.w : b.y);
            }
    }
    float y[4][2];
#pragma unroll
    for (int p = 0; p < 4; p++)
#pragma unroll
        for (int down = 0; down < 2; down++) {
            const float2 scale = to_float2(__float_as_uint(down ? scales[p].y : scales[p].x));
            const int sum = (sums[p][2 * down] * 256 + sums[p][2 * down + 1]) >> 4 * down;
            y[p][down] = scale.x * (info.x * sum) + scale.y * info.y;
        }
    return over_four_lanes(y, q);
}

// The same with codes that are 128 more than a number, and a scale of each output. Of some lanes outputs of
// two sixteens have changed places, as in their tiles.
DEVICE float2 multiply_strip(RowInt8, Ring& ring, uint32_t x, uint32_t infos, uint32_t zeros, uint32_t zero,
                             int, unsigned which, int lane) {
    constexpr int SIXTEENS = TILE_K / 16 / RowInt8::HALVES;  // along K, of a stage
    const int g = lane / 4, q = lane % 4;
    int sums[4][4] = {};
    float2 info = {}, scales = {};  // of the lane's outputs
    const uint32_t digits_at = x + (g % 2 * 4 + q) * 16;
#pragma unroll 1
    for (int j = 0; j < ROW_WARP_TILES; j++) {
        if (!(which >> j & 1)) continue;
        const uint4 b = operand(j, digits_at, infos, zeros, lane, info);
#pragma unroll
        for (int half = 0; half < RowInt8::HALVES; half++) {
            const uint32_t stage = ring.wait();
            uint4 codes[2][SIXTEENS];  // of pairs of 16 outputs
            uint32_t read = 0;
#pragma unroll
            for (int pair = 0; pair < 2; pair++)
#pragma unroll
                for (int k = 0; k < SIXTEENS; k++) {
                    codes[pair][k] = load_shared_words(stage + k * Int8Tile::SIXTEEN_BYTES +
                                                       Int8Tile::place_of_pair(pair, g, q));
                    read |= codes[pair][k].x;
                }
            if (half == RowInt8::HALVES - 1 && which >> j == 1) {
                const uint32_t of_lane = stage + RowInt8::HALF_BYTES + output_of_lane(RowInt8(), lane) * 4;
                scales = make_float2(__uint_as_float(load_shared_word(of_lane)),
                                     __uint_as_float(load_shared_word(of_lane + 8 * 4)));
                read |= __float_as_uint(scales.x) | __float_as_uint(scales.y);
            }
            ring.release(lane, read & zero);
#pragma unroll
            for (int pair = 0; pair < 2; pair++) {
                const uint4 first = codes[pair][0], second = codes[pair][1];
                const uint32_t b0 = half ? b.z : b.x, b1 = half ? b.w : b.y;
                mma_bytes(sums[2 * pair], first.x, first.y, second.x, second.y, b0, b1);
                mma_bytes(sums[2 * pair + 1], first.z, first.w, second.z, second.w, b0, b1);
            }
        }
    }
    float y[4][2];
#pragma unroll
    for (int p = 0; p < 4; p++)
#pragma unroll
        for (int down = 0; down < 2; down++) {
            const int sum = sums[p][2 * down] * 256 + sums[p][2 * down + 1];
            y[p][down] = info.x * sum - 128 * info.y;
        }
    const float2 found = over_four_lanes(y, q);
    return make_float2(found.x * scales.x, found.y * scales.y);
}

// Dot products by Tensor Cores: each four lanes have a part of K, and of what `mma` makes of parts
// g of a and n of b those with g = n are wanted. a: of two outputs, at the same places as b.
DEVICE void add_dots(float (&c)[4], uint2 a0, uint2 a1, uint2 b) { mma(c, a0.x, a1.x, a0.y, a1.y, b.x, b.y); }

// What a lane has of both outputs' sums.
DEVICE float2 own_dots(const float (&c)[4], int lane) {
    const int g = lane / 4, q = lane % 4;
    if (q != g / 2) return make_float2(0.f, 0.f);
    return g % 2 ? make_float2(c[1], c[3]) : make_float2(c[0], c[2]);
}
}  // namespace row
#endif
