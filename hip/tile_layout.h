// Where the matrix instructions of AMD GPUs keep the numbers of matrices of 16 x 16: MFMA of gfx90a and
// gfx942 (v_mfma_f32_16x16x16_f16, waves of 64 lanes), WMMA of gfx11 and of gfx12 (v_wmma_f32_16x16x16_f16,
// waves of 32).
//
// They compute D [16 x 16, fp32] = A [16 x 16] B [16 x 16] + D, fp16. Lane l has row l % 16 of A, column l %
// 16 of B and column l % 16 of D:
//
//                     k of the jth number of A and of B          row of the ith number of D
//   gfx90a, gfx942    4 (l / 16) + j, j < 4                      4 (l / 16) + i, i < 4
//   gfx11             j, j < 16, the same in lanes l and l + 16  2 i + l / 16, i < 8
//   gfx12             8 (l / 16) + j, j < 8                      8 (l / 16) + i, i < 8
//
// From "Matrix Arithmetic Instructions" of the CDNA 2 and 3 instruction set guides and "WMMA" of the RDNA 3
// and 4 ones. test/unit/test_amd_tile.py computes products by these rules.
#pragma once

#if defined(__CUDACC__) || defined(__HIP__)
#define ANYWHERE __host__ __device__
#else
#define ANYWHERE
#endif

enum class MatrixCore { CDNA, GFX11, GFX12 };

template <MatrixCore CORE>
struct TileLayout {
    static constexpr bool both_halves = CORE == MatrixCore::GFX11;  // have the same operands
    static constexpr int lanes = CORE == MatrixCore::CDNA ? 64 : 32;
    // Numbers of a lane: of an operand, of D.
    static constexpr int halves = both_halves ? 16 : 256 / lanes, sums = 256 / lanes;

    ANYWHERE static constexpr int k(int lane, int j) { return both_halves ? j : halves * (lane / 16) + j; }
    ANYWHERE static constexpr int row(int lane, int i) {
        return both_halves ? 2 * i + lane / 16 : sums * (lane / 16) + i;
    }
};
