// Products of matrices of 16 x 16 on the matrix cores of AMD GPUs.
//
//   sums[row][column] += sum over k of left[row][k] right[column][k]
//
// `left` and `right` are fp16, sums fp32. The instructions get `right` as A and `left` as B, and so D is the
// transposed sums: lane l has row l % 16 of them, some columns of it, and of both operands some k of index
// l % 16 (tile_layout.h). Sums that are rounded to fp16 are therefore an operand as they lie, but for gfx11,
// where lanes l and l + 16 exchange halves of their row.
//
// TILE_LANES threads side by side make a product. MFMA reads and writes all lanes of a wave in any branch
// they took: all threads of a wave must get there together.
//
// Under nvcc (RWKV_PORTABLE) RWKV_TILE chooses whose layout is tested: 9, 11 or 12.
#pragma once
#include "../cuda/common.cuh"
#include "tile_layout.h"

#if defined(__gfx90a__) || defined(__gfx942__) || (defined(RWKV_PORTABLE) && RWKV_TILE == 9)
using Layout = TileLayout<MatrixCore::CDNA>;
#elif defined(__GFX11__) || (defined(RWKV_PORTABLE) && RWKV_TILE == 11)
using Layout = TileLayout<MatrixCore::GFX11>;
#else
using Layout = TileLayout<MatrixCore::GFX12>;
#endif

constexpr int TILE = 16, TILE_LANES = Layout::lanes, TILE_SUMS = Layout::sums,
              TILE_WORDS = Layout::halves / 2;

using Sums = float[TILE_SUMS];

struct Operand {
    uint32_t words[TILE_WORDS];  // two k each, the lower half first
};

DEVICE int tile_lane() { return threadIdx.x % TILE_LANES; }
DEVICE int tile_index() { return tile_lane() % TILE; }
DEVICE int first_k() { return Layout::k(tile_lane(), 0); }
DEVICE int sum_column(int i) { return Layout::row(tile_lane(), i); }

// Number [index][k] at from[index * stride + k], in shared memory. Rows begin at multiples of 16 bytes.
DEVICE Operand operand_of_rows(const __half* from, int stride) {
    const __half* own = from + tile_index() * stride + first_k();
    Operand x;
    if constexpr (TILE_WORDS == 2) {
        const uint2 words = *reinterpret_cast<const uint2*>(own);
        x.words[0] = words.x, x.words[1] = words.y;
    } else {
#pragma unroll
        for (int n = 0; n < TILE_WORDS; n += 4) {
            const uint4 words = *reinterpret_cast<const uint4*>(own + 2 * n);
            x.words[n] = words.x, x.words[n + 1] = words.y, x.words[n + 2] = words.z,
            x.words[n + 3] = words.w;
        }
    }
    return x;
}

// Number [index][k] at from[k * stride + index], in shared memory.
DEVICE Operand operand_of_columns(const __half* from, int stride) {
    const uint16_t* own = reinterpret_cast<const uint16_t*>(from) + first_k() * stride + tile_index();
    Operand x;
#pragma unroll
    for (int n = 0; n < TILE_WORDS; n++)
        x.words[n] = own[2 * n * stride] | uint32_t(own[(2 * n + 1) * stride]) << 16;
    return x;
}

// A matrix in the device's memory: 16 rows of 16 numbers, which is 16 bytes for each of 32 lanes.
DEVICE Operand load_tile(const uint4* tile) {
    Operand x;
    if constexpr (TILE_WORDS == 2) {
        const uint2 words = load8(reinterpret_cast<const __half*>(tile) + tile_index() * TILE + first_k());
        x.words[0] = words.x, x.words[1] = words.y;
    } else {
#pragma unroll
        for (int n = 0; n < TILE_WORDS; n += 4) {
            const uint4 words = load16(tile + 2 * tile_index() + first_k() / 8 + n / 4);
            x.words[n] = words.x, x.words[n + 1] = words.y, x.words[n + 2] = words.z,
            x.words[n + 3] = words.w;
        }
    }
    return x;
}

DEVICE void store_tile(uint4* tile, const Operand& x) {
    if constexpr (TILE_WORDS == 2) {
        store(reinterpret_cast<__half*>(tile) + tile_index() * TILE + first_k(), x.words[0], x.words[1]);
    } else {
        const int half = tile_lane() / TILE;
        uint32_t own[4];
#pragma unroll
        for (int n = 0; n < 4; n++)
            own[n] = TILE_WORDS == 8 && half ? x.words[TILE_WORDS - 4 + n] : x.words[n];
        store(tile + 2 * tile_index() + half, own[0], own[1], own[2], own[3]);
    }
}

DEVICE Operand to_operand(const Sums& sums) {
    Operand x;
    uint32_t pairs[TILE_SUMS / 2];
#pragma unroll
    for (int n = 0; n < TILE_SUMS / 2; n++) pairs[n] = to_finite_half2(sums[2 * n], sums[2 * n + 1]);
    if constexpr (TILE_WORDS == TILE_SUMS / 2) {
#pragma unroll
        for (int n = 0; n < TILE_WORDS; n++) x.words[n] = pairs[n];
    } else {  // even columns are in the lower lanes, odd ones in the upper
        const bool upper = tile_lane() >= TILE;
#pragma unroll
        for (int n = 0; n < TILE_SUMS / 2; n++) {
            const uint32_t other = shuffle_xor(pairs[n], TILE), even = upper ? other : pairs[n],
                           odd = upper ? pairs[n] : other;
            x.words[2 * n] = (even & 0xffff) | odd << 16;
            x.words[2 * n + 1] = even >> 16 | (odd & 0xffff0000);
        }
    }
    return x;
}

#ifdef __HIP__
template <int N>
using Halves = _Float16 __attribute__((ext_vector_type(N)));
template <int N>
using Floats = float __attribute__((ext_vector_type(N)));

DEVICE void multiply(Sums& sums, const Operand& left, const Operand& right) {
    using Half = Halves<2 * TILE_WORDS>;
    [[maybe_unused]] const Half a = __builtin_bit_cast(Half, right), b = __builtin_bit_cast(Half, left);
    auto d = __builtin_bit_cast(Floats<TILE_SUMS>, sums);
#if defined(__gfx90a__) || defined(__gfx942__)
    d = __builtin_amdgcn_mfma_f32_16x16x16f16(a, b, d, 0, 0, 0);
#elif defined(__GFX11__)
    d = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(a, b, d);
#elif defined(__GFX12__)
    d = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(a, b, d);
#endif
#pragma unroll
    for (int i = 0; i < TILE_SUMS; i++) sums[i] = d[i];
}
#else
// Two operands of all lanes of a tile as their lanes see them. 32 lanes are a warp; 64 are two, which meet in
// shared memory.
struct Exchange {
    uint32_t words[TILE_LANES][2][TILE_WORDS];
};

DEVICE void multiply(Sums& sums, const Operand& left, const Operand& right) {
    __shared__ Exchange all[4];  // of a block
    const int tile = threadIdx.x / TILE_LANES, lane = tile_lane();
    Exchange& here = all[tile];
    const auto meet = [tile] { sync_some(1 + tile, TILE_LANES); };
    meet();
#pragma unroll
    for (int n = 0; n < TILE_WORDS; n++)
        here.words[lane][0][n] = left.words[n], here.words[lane][1][n] = right.words[n];
    meet();
    const auto number = [&](int operand, int index, int k) {
        const int per_lane = 2 * TILE_WORDS, from = Layout::both_halves ? 0 : k / per_lane;
        const uint32_t word = here.words[index + TILE * from][operand][k % per_lane / 2];
        return __half2float(__ushort_as_half(k % 2 ? word >> 16 : word & 0xffff));
    };
#pragma unroll
    for (int i = 0; i < TILE_SUMS; i++)
        for (int k = 0; k < TILE; k++) sums[i] += number(0, tile_index(), k) * number(1, sum_column(i), k);
}
#endif
