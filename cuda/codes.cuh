// Matrices of codes as every GPU reads them (gemm_codes.cu, decode_codes.cu): formats, and how a warp gets
// the fp16 numbers of 16 outputs and 64 inputs as operands of `mma`.
//
// A matrix [N, K] lies in blocks of 16 outputs and 64 inputs, [N/16, K/64] of them. With g = lane / 4 and q =
// lane % 4 a lane has inputs 16 q to 16 q + 15 of outputs g and g + 8. Its codes are side by side, so that a
// warp loads 512 bytes at once. Which input is which k of an mma is free as long as x agrees: of mma j they
// are 16 q + 4 j and its three neighbours, in order.
//
//   int8, fp8: 512 bytes of outputs 0 to 7, 512 of the others. Of each four inputs in a word the bytes are
//     of the first, third, second and fourth. int8 is 128 more than the number; fp8 (e4m3) has no NaN
//   int4: 512 bytes, of a lane 8 of either output; then of each g the scale and the minimum of output g and
//     those of g + 8, fp16. Of each eight inputs in a word the low four nibbles are of the first of each
//     two, the high four of the second. In groups of 128 inputs scales lie between the codes of an even block
//     along K and those of the next, and a row of blocks has an even number of them
//   fp6 (e3m2): 512 bytes as int4, of sign and exponent; then of each lane a word of mantissas of either
//     output. Inputs i and i + 1, i even, have theirs from bits i and i + 16 on
//   fp5 (e2m2): 512 bytes as int4, of sign, exponent and the high bit of the mantissa; then of each lane a
//     word of the low ones. Inputs i and i + 1 have theirs in bits i / 2 and i / 2 + 16, and output g + 8 in
//     those 8 above
//   nf4: 512 bytes, of a lane 8 of either output, a byte of each two inputs, the first in its low nibble;
//     then of each g the scale of output g and that of g + 8, fp16
#pragma once
#include "common.cuh"

constexpr int CODE_ROWS = 16, CODE_K = 64;  // of a block
constexpr int CODE_PIECE = WARP * 16;       // bytes that a warp loads at once

enum CodeFormat {
    CODES_INT8 = 0,
    CODES_FP8 = 1,
    CODES_INT4 = 2,
    CODES_NF4 = 3,
    CODES_FP6 = 4,
    CODES_FP5 = 5,
    CODES_WIDE_INT4 = 6  // in groups of 128
};

// Whether a format has a scale of each output, in a tensor of its own.
constexpr bool has_output_scales(int format) {
    return format != CODES_INT4 && format != CODES_NF4 && format != CODES_WIDE_INT4;
}

namespace codes {
__device__ __forceinline__ __half2 as_halves(uint32_t pair) {
    return *reinterpret_cast<const __half2*>(&pair);
}

__device__ __forceinline__ uint32_t as_pair(__half2 halves) {
    return *reinterpret_cast<const uint32_t*>(&halves);
}

__device__ __forceinline__ __half2 both(unsigned short bits) { return __half2half2(__ushort_as_half(bits)); }

constexpr unsigned short BITS_OF_256 = 0x5c00, BITS_OF_SIXTEENTH = 0x2c00, BITS_OF_MINUS_64 = 0xd400,
                         BITS_OF_MINUS_1024 = 0xe400, BITS_OF_MINUS_1152 = 0xe480;
constexpr uint32_t BITS_OF_1024 = 0x64006400;  // twice

// A format has
//   row_bytes: of so many rows of `steps` blocks along K;  begin, place: where one begins in a row, and in w
//   Held: what a lane holds of a block, and `load`
//   operands: of mma j a[j] by the names of `mma`, exact or rounded as the format says
//   SCALED: whether sums are to be multiplied by a scale of the output
//   WIDE: whether AMD GPUs have the registers for 64 outputs a warp
//   TABLE: words of shared memory that `fill` writes, by all threads, before the first `operands`

template <int BLOCK_BYTES>
struct Blocks {
    template <typename Count>
    static __device__ __forceinline__ Count row_bytes(Count rows, int steps) {
        return rows * steps * BLOCK_BYTES;
    }
    static __device__ __forceinline__ size_t begin(int step) { return size_t(step) * BLOCK_BYTES; }
    static __device__ __forceinline__ size_t place(int block, int) { return begin(block); }
};

// Codes of 8 bits; Kind gives the numbers of a word, the first two and the others.
template <typename Kind>
struct Bytes : Blocks<2 * CODE_PIECE> {
    static constexpr int TABLE = 0;
    static constexpr bool SCALED = true, WIDE = true;

    struct Held {
        uint4 top, low;
    };

    static __device__ __forceinline__ void load(Held& held, const uint8_t* block, int, int lane) {
        held.top = load_once(block + lane * 16);
        held.low = load_once(block + CODE_PIECE + lane * 16);
    }

    static __device__ __forceinline__ void fill(uint32_t*) {}

    static __device__ __forceinline__ void operands(const Held& held, const uint32_t*, uint32_t (&a)[4][4]) {
        const uint32_t tops[4] = {held.top.x, held.top.y, held.top.z, held.top.w},
                       lows[4] = {held.low.x, held.low.y, held.low.z, held.low.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            Kind::numbers(tops[j], a[j][0], a[j][2]);
            Kind::numbers(lows[j], a[j][1], a[j][3]);
        }
    }
};

// Exact: 1024 + code in the digits of an fp16, less 1152.
struct Int8 : Bytes<Int8> {
    static __device__ __forceinline__ uint32_t pair(uint32_t word) {
        const uint32_t among = masked_or<0x00ff00ff>(word, BITS_OF_1024);
        return as_pair(__hadd2(as_halves(among), both(BITS_OF_MINUS_1152)));
    }

    static __device__ __forceinline__ void numbers(uint32_t word, uint32_t& first, uint32_t& others) {
        first = pair(word), others = pair(word >> 8);
    }
};

// Exact, subnormal numbers too: the bits of e4m3 where fp16 has them are 2^-8 times the number.
struct Fp8 : Bytes<Fp8> {
    // Of bits that are where those of fp16 are, and of a word with the signs there.
    static __device__ __forceinline__ uint32_t pair(uint32_t bits, uint32_t signs) {
        const uint32_t small = masked_or<0x3f803f80>(bits, signs & 0x80008000);
        return as_pair(__hmul2(as_halves(small), both(BITS_OF_256)));
    }

    static __device__ __forceinline__ void numbers(uint32_t word, uint32_t& first, uint32_t& others) {
        first = pair(word << 7, word << 8), others = pair(word >> 1, word);
    }
};

// w = scale q + minimum, rounded once.
struct Int4 : Blocks<CODE_PIECE + CODE_ROWS * 4> {
    static constexpr int SCALE_BYTES = CODE_ROWS * 4, TABLE = 0;
    static constexpr bool SCALED = false, WIDE = true;

    struct Held {
        uint4 codes;
        uint2 scales;
    };

    static __device__ __forceinline__ void load(Held& held, const uint8_t* block, int, int lane) {
        held.codes = load_once(block + lane * 16);
        held.scales = load8(block + CODE_PIECE + lane / 4 * 8);
    }

    static __device__ __forceinline__ void fill(uint32_t*) {}

    // Of nibbles 0 and 4, or (HIGH) 1 and 5.
    template <bool HIGH>
    static __device__ __forceinline__ uint32_t pair(uint32_t word, __half2 scale, __half2 minimum) {
        __half2 codes;
        if constexpr (HIGH)  // 1024 + 16 q
            codes = __hfma2(as_halves(masked_or<0x00f000f0>(word, BITS_OF_1024)), both(BITS_OF_SIXTEENTH),
                            both(BITS_OF_MINUS_64));
        else
            codes = __hadd2(as_halves(masked_or<0x000f000f>(word, BITS_OF_1024)), both(BITS_OF_MINUS_1024));
        return as_pair(__hfma2(codes, scale, minimum));
    }

    static __device__ __forceinline__ void operands(const Held& held, const uint32_t*, uint32_t (&a)[4][4]) {
#pragma unroll
        for (int half = 0; half < 2; half++) {  // output g, and that 8 below
            const __half2 of_group = as_halves(half ? held.scales.y : held.scales.x),
                          scale = __low2half2(of_group), minimum = __high2half2(of_group);
            const uint32_t words[2] = {half ? held.codes.z : held.codes.x,
                                       half ? held.codes.w : held.codes.y};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const uint32_t word = words[j / 2] >> j % 2 * 8;
                a[j][half] = pair<false>(word, scale, minimum);
                a[j][2 + half] = pair<true>(word, scale, minimum);
            }
        }
    }
};

// The same in groups of 128. An odd block begins with the scales of the group.
struct WideInt4 : Int4 {
    static constexpr int GROUP_BYTES = 2 * CODE_PIECE + SCALE_BYTES;

    template <typename Count>
    static __device__ __forceinline__ Count row_bytes(Count rows, int steps) {
        return rows * ((steps + 1) / 2) * GROUP_BYTES;
    }
    static __device__ __forceinline__ size_t begin(unsigned step) {
        return step / 2 * GROUP_BYTES + step % 2 * CODE_PIECE;
    }
    static __device__ __forceinline__ size_t place(int block, int steps) {
        return row_bytes(size_t(block / steps), steps) + begin(block % steps);
    }

    static __device__ __forceinline__ void load(Held& held, const uint8_t* block, unsigned step, int lane) {
        held.codes = load_once(block + step % 2 * SCALE_BYTES + lane * 16);
        held.scales = load8(block + (step % 2 ? 0 : CODE_PIECE) + lane / 4 * 8);
    }
};

// Exact: as of Fp8, with nibbles of sign and three bits that an fp16 has from bit TO on, and lower bits LOW
// of a pair in their place. BIAS: of exponents, less fp16's, as the bits of 2^BIAS.
template <int TO, uint32_t LOW, unsigned short BIAS>
struct SmallFloat {
    static constexpr int TABLE = 0;
    static constexpr bool SCALED = true, WIDE = false;

    static __device__ __forceinline__ void fill(uint32_t*) {}

    static __device__ __forceinline__ uint32_t shifted(uint32_t word, int left) {
        return left >= 0 ? word << left : word >> -left;
    }

    // Of nibbles n and n + 4.
    static __device__ __forceinline__ uint32_t pair(uint32_t word, int n, uint32_t low) {
        const uint32_t signs = shifted(word, 12 - 4 * n) & 0x80008000;
        const uint32_t small =
            masked_or<(0x00070007u << TO)>(shifted(word, TO - 4 * n), masked_or<LOW>(low, signs));
        return as_pair(__hmul2(as_halves(small), both(BIAS)));
    }
};

constexpr unsigned short BITS_OF_4096 = 0x6c00, BITS_OF_16384 = 0x7400;

struct Fp6 : SmallFloat<10, 0x03000300, BITS_OF_4096>, Blocks<CODE_PIECE + WARP * 8> {
    struct Held {
        uint4 codes;
        uint2 low;
    };

    static __device__ __forceinline__ void load(Held& held, const uint8_t* block, int, int lane) {
        held.codes = load_once(block + lane * 16);
        held.low = load8(block + CODE_PIECE + lane * 8);
    }

    static __device__ __forceinline__ void operands(const Held& held, const uint32_t*, uint32_t (&a)[4][4]) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint32_t words[2] = {half ? held.codes.z : held.codes.x,
                                       half ? held.codes.w : held.codes.y},
                           low = half ? held.low.y : held.low.x;
#pragma unroll
            for (int i = 0; i < 8; i++)
                a[i / 2][i % 2 * 2 + half] = pair(words[i / 4], i % 4, shifted(low, 8 - 2 * i));
        }
    }
};

struct Fp5 : SmallFloat<9, 0x01000100, BITS_OF_16384>, Blocks<CODE_PIECE + WARP * 4> {
    struct Held {
        uint4 codes;
        uint32_t low;
    };

    static __device__ __forceinline__ void load(Held& held, const uint8_t* block, int, int lane) {
        held.codes = load_once(block + lane * 16);
        held.low = load4(block + CODE_PIECE + lane * 4);
    }

    static __device__ __forceinline__ void operands(const Held& held, const uint32_t*, uint32_t (&a)[4][4]) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint32_t words[2] = {half ? held.codes.z : held.codes.x,
                                       half ? held.codes.w : held.codes.y};
#pragma unroll
            for (int i = 0; i < 8; i++)
                a[i / 2][i % 2 * 2 + half] = pair(words[i / 4], i % 4, shifted(held.low, 8 - i - 8 * half));
        }
    }
};

// NF4 of rwkv_batch/ops/weights/groups.py, rounded to fp16.
__device__ __forceinline__ uint32_t bits_of_nf4(int code) {
    // From the smallest on, a number in each 16 bits.
    const uint64_t low = code < 4 ? 0xb652b833b992bc00 : 0x0000add4b1eab48d,
                   high = code < 12 ? 0x356833e031262d18 : 0x3c0039c93880370d;
    return uint32_t((code < 8 ? low : high) >> code % 4 * 16) & 0xffff;
}

// w = scale NF4[q], with NF4 rounded to fp16, and the product again. A table of all bytes has both numbers of
// each, COPIES times, so that lanes meet at few of its banks.
struct Nf4 : Blocks<CODE_PIECE + CODE_ROWS * 2> {
    static constexpr int COPIES = 8, TABLE = 256 * COPIES;
    static constexpr bool SCALED = false, WIDE = true;

    struct Held {
        uint4 codes;
        uint32_t scales;
    };

    static __device__ __forceinline__ void load(Held& held, const uint8_t* block, int, int lane) {
        held.codes = load_once(block + lane * 16);
        held.scales = load4(block + CODE_PIECE + lane / 4 * 4);
    }

    static __device__ __forceinline__ void fill(uint32_t* table) {
        for (int i = threadIdx.x; i < TABLE; i += blockDim.x)
            table[i] = bits_of_nf4(i / COPIES % 16) | bits_of_nf4(i / COPIES / 16) << 16;
    }

    static __device__ __forceinline__ void operands(const Held& held, const uint32_t* table,
                                                    uint32_t (&a)[4][4]) {
        const uint32_t* own = table + threadIdx.x % COPIES;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const __half2 of_group = as_halves(held.scales),
                          scale = half ? __high2half2(of_group) : __low2half2(of_group);
            const uint32_t words[2] = {half ? held.codes.z : held.codes.x,
                                       half ? held.codes.w : held.codes.y};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const uint32_t word = words[j / 2] >> j % 2 * 16;
                a[j][half] = as_pair(__hmul2(as_halves(own[(word & 255) * COPIES]), scale));
                a[j][2 + half] = as_pair(__hmul2(as_halves(own[(word >> 8 & 255) * COPIES]), scale));
            }
        }
    }
};
}  // namespace codes
