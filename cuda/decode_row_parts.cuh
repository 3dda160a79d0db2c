// Parts of decode_row.cu: products of a warp with tiles of weights, and exchanges between blocks.
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

// Of x, 64 numbers along k are an operand of 128 bytes: lane q of four has 32 of them, for each 16 numbers
// those at 2 q and 2 q + 1, and those at 2 q + 8 and 2 q + 9, divided by 16. Pair l goes to word
// `word_of_pair(l)`, scaled if `is_high(l)`.
DEVICE int word_of_pair(int l) { return l % 4 * 8 + l / 8 * 2 + l / 4 % 2; }
DEVICE bool is_high(int l) { return l & 4; }
DEVICE uint32_t operand_pair(int l, float x, float y) {
    const float scale = is_high(l) ? 1.f / 16 : 1.f;
    return to_half2(x * scale, y * scale);
}

// int4 in the tiles of gemm_tile4.cu: 1024 + q or 1024 + 16 q in the digits of an fp16 are operands as they
// are. What is too much follows from sums of x, which a product with a constant matrix gives: with -1024 in
// rows 0 to 7 what is to be added, with 1 (16 where x is divided by 16) below them the sum of x.
struct Int4 {
    static constexpr int TILE_BYTES = ROW_TILE * ROW_TILE / 2 + ROW_TILE * 4;
    static constexpr int SCALES = ROW_TILE * ROW_TILE / 2;

    // c: of 16 outputs each, += codes times x.
    static DEVICE void multiply(const uint4 (&codes)[4], const uint32_t (&b)[4][2], float (&c)[4][4]) {
#pragma unroll
        for (int k = 0; k < 4; k++)
#pragma unroll
            for (int p = 0; p < 4; p++) {
                const uint32_t top = (k < 2 ? codes[p].x : codes[p].y) >> k % 2 * 8,
                               low = (k < 2 ? codes[p].z : codes[p].w) >> k % 2 * 8;
                mma(c[p], masked_or<0x000f000f>(top, 0x64006400), masked_or<0x000f000f>(low, 0x64006400),
                    masked_or<0x00f000f0>(top, 0x64006400), masked_or<0x00f000f0>(low, 0x64006400), b[k][0],
                    b[k][1]);
            }
    }

    static DEVICE void add_sums(const uint32_t (&b)[4][2], float (&sums)[4]) {
#pragma unroll
        for (int k = 0; k < 4; k++)
            mma(sums, 0xe400e400, 0x3c003c00, 0xe400e400, 0x4c004c00, b[k][0], b[k][1]);
    }
};

// 64 outputs times tiles along K (`which`, by bits): a lane gets sums of outputs 16 q + g and 8 later (lane =
// 4 g + q). Column 2 j of products is tile j's, of which lane q = j has the sums, so that scales are applied
// once for all of them. x: operands of the tiles. sums: of Int4::add_sums, of these tiles; `sum`: they are
// made here. before(j) comes before x of tile j is read. zeros: 32 bytes of them; zero: none, of which the
// compiler does not know.
template <typename Before>
DEVICE float2 multiply_strip(Ring& ring, uint32_t x, uint32_t zeros, uint32_t zero, unsigned which, bool sum,
                             float2& sums, int lane, const Before& before) {
    const int g = lane / 4, q = lane % 4;
    float c[4][4] = {}, of_x[4] = {};
    float2 scales[4] = {};
#pragma unroll 1
    for (int j = 0; j < ROW_WARP_TILES; j++) {
        if (!(which >> j & 1)) continue;
        before(j);
        const uint32_t from = g == 2 * j ? x + j * 128 + q * 32 : zeros;
        const uint4 first = load_shared_words(from), second = load_shared_words(from + 16);
        const uint32_t tile = ring.wait();
        uint4 codes[4];
#pragma unroll
        for (int p = 0; p < 4; p++) codes[p] = load_shared_words(tile + (p * WARP + lane) * 16);
        if (q == j)
#pragma unroll
            for (int p = 0; p < 4; p++) scales[p] = load_shared2(tile + Int4::SCALES + (p * 8 + g) * 8);
        const uint32_t b[4][2] = {
            {first.x, first.y}, {first.z, first.w}, {second.x, second.y}, {second.z, second.w}};
        Int4::multiply(codes, b, c);
        if (sum) Int4::add_sums(b, of_x);
        uint32_t read = codes[0].x | codes[1].x | codes[2].x | codes[3].x;
#pragma unroll
        for (int p = 0; p < 4; p++) read |= __float_as_uint(scales[p].x);
        ring.release(lane, read & zero);
    }
    if (sum) sums = make_float2(of_x[0], of_x[2]);
    float y[4][2];
#pragma unroll
    for (int p = 0; p < 4; p++)
#pragma unroll
        for (int down = 0; down < 2; down++) {
            const float2 scale = to_float2(__float_as_uint(down ? scales[p].y : scales[p].x));
            y[p][down] = scale.x * (c[p][2 * down] + sums.x) + scale.y * sums.y;
        }
    // Over four lanes, which divide the sums among them.
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

DEVICE int output_of_lane(int lane) { return lane % 4 * 16 + lane / 4; }

// What is added to the stream. Blocks add to 64-bit words: above the lowest byte the sum in units of 2^-24,
// in it how many have added. So sums do not depend on an order, and whoever reads a word sees whether it is
// complete: nothing else has to be waited for. Counts go on through a launch; what they carry is subtracted.
constexpr float SUM_UNIT = 1.f / (1 << 24);
constexpr float MOST_SUM = 1 << 30;

DEVICE void add_to_sum(unsigned long long* place, float x) {
    const long long units = __float2ll_rn(fminf(fmaxf(x, -MOST_SUM), MOST_SUM) * (1.f / SUM_UNIT));
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(place), "l"(units * 256 + 1) : "memory");
}

DEVICE ulonglong2 load_sums(const unsigned long long* place) {
    ulonglong2 v;
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(v.x), "=l"(v.y)
                 : "l"(place)
                 : "memory");
    return v;
}

DEVICE bool complete(ulonglong2 v, unsigned count) {
    return (((unsigned(v.x) ^ count) | (unsigned(v.y) ^ count)) & 0xff) == 0;
}

DEVICE float sum_of(unsigned long long word, unsigned count) {
    return __ll2float_rn(static_cast<long long>(word - count) >> 8) * SUM_UNIT;
}

// The sums of a lane's pairs of columns, 64 apart, once `count` have added to each. If they are not complete
// at first, the first pair is waited for alone: the fewer ask, the sooner sums arrive.
DEVICE void wait_sums(const unsigned long long* sums, unsigned count, int tiles,
                      float2 (&found)[ROW_WARP_TILES]) {
    if (tiles == 0) return;
    ulonglong2 v[ROW_WARP_TILES];
    v[0] = load_sums(sums);
    while (true) {
#pragma unroll
        for (int i = 1; i < ROW_WARP_TILES; i++)
            if (i < tiles) v[i] = load_sums(sums + i * ROW_TILE);
        bool missing = !complete(v[0], count);
#pragma unroll
        for (int i = 1; i < ROW_WARP_TILES; i++)
            if (i < tiles) missing |= !complete(v[i], count);
        if (!warp_any(missing)) break;
        do v[0] = load_sums(sums);
        while (warp_any(!complete(v[0], count)));
    }
#pragma unroll
    for (int i = 0; i < ROW_WARP_TILES; i++)
        if (i < tiles) found[i] = make_float2(sum_of(v[i].x, count), sum_of(v[i].y, count));
}

// Results of inner sides: fp16, and above it a number of the layer in this launch, by which a reader knows
// them.
DEVICE void publish(uint32_t* place, float x, uint32_t tag) {
    const uint32_t word = uint32_t(__half_as_ushort(__float2half_rn(x))) | tag << 16;
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(place), "r"(word) : "memory");
}

// Four of them.
DEVICE uint2 wait_published(const uint32_t* place, uint32_t tag) {
    uint32_t x, y, z, w;
    do {
        asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x), "=r"(y), "=r"(z), "=r"(w)
                     : "l"(place)
                     : "memory");
    } while (x >> 16 != tag || y >> 16 != tag || z >> 16 != tag || w >> 16 != tag);
    return make_uint2(__byte_perm(x, y, 0x5410), __byte_perm(z, w, 0x5410));
}

DEVICE void arrive_some(int name, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// A lane's pairs of columns of a vector, 64 apart, which is number `which` in a stage of a norm. What the
// warp has not is anything.
DEVICE void load_columns(uint32_t stage, int which, int tiles, int lane, uint32_t (&to)[ROW_WARP_TILES]) {
#pragma unroll
    for (int i = 0; i < ROW_WARP_TILES; i++)
        asm volatile("ld.shared.u32 %0, [%1];"
                     : "=r"(to[i])
                     : "r"(stage + (which * tiles + i) * 128 + lane * 4)
                     : "memory");
}

// The layer norm of the stream, of which each lane has some columns. stage: weight and bias are its first.
DEVICE void normalize(float2 (&v)[ROW_WARP_TILES], uint32_t stage, int tiles, int heads, float2* moments,
                      int warp, int lane) {
    float sum = 0.f, squares = 0.f;
#pragma unroll
    for (int i = 0; i < ROW_WARP_TILES; i++) sum += v[i].x + v[i].y;
    const float own_mean = tiles ? warp_sum(sum) / (tiles * ROW_TILE) : 0.f;
#pragma unroll
    for (int i = 0; i < ROW_WARP_TILES; i++) {
        const float2 d = make_float2(v[i].x - own_mean, v[i].y - own_mean);
        squares += i < tiles ? d.x * d.x + d.y * d.y : 0.f;
    }
    squares = warp_sum(squares);
    if (lane == 0) moments[warp] = make_float2(own_mean, squares);
    sync_some(1, ROW_COMPUTING);
    const int each = (heads + ROW_WARPS - 1) / ROW_WARPS, of = lane % ROW_WARPS;
    const int columns = max(min(each, heads - of * each), 0) * ROW_TILE, width = heads * HEAD;
    const float2 moment = moments[of];  // each is summed twice
    const float mean = warp_sum(moment.x * columns) / (2 * width), apart = moment.x - mean;
    const float variance = warp_sum(moment.y + columns * apart * apart) / (2 * width);
    const float scale = rsqrtf(variance + 1e-5f);
    uint32_t weight[ROW_WARP_TILES], bias[ROW_WARP_TILES];
    load_columns(stage, 0, tiles, lane, weight), load_columns(stage, 1, tiles, lane, bias);
#pragma unroll
    for (int i = 0; i < ROW_WARP_TILES; i++) {
        const float2 w = to_float2(weight[i]), b = to_float2(bias[i]);
        v[i].x = (v[i].x - mean) * scale * w.x + b.x, v[i].y = (v[i].y - mean) * scale * w.y + b.y;
    }
}

DEVICE float2 mixed(float2 x, uint32_t before, uint32_t amount) {
    const float2 b = to_float2(before), a = to_float2(amount);
    return make_float2(x.x + (b.x - x.x) * a.x, x.y + (b.y - x.y) * a.y);
}
}  // namespace row
#endif
