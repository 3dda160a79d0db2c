// A matrix as the GEMMs of a Hopper read it, of 8 or 4 bits, as fp16 for the GEMM library: code times scale,
// or scale q + minimum, rounded once, at most what fp16 holds.
//
//   DECODE_TILES8: w [N, K] int8 in the tiles of int8_tile.cuh, scale [N] fp32; to [N, K] fp16
//   DECODE_COLUMNS: w [K, N] int8 in the order of gemm_sparse8.cu, or some columns of a wider matrix, of
//     which a row has `stride` codes; to [K, N]
//   DECODE_TILES4: w in the tiles of int4_tile.cuh, scales among them; to [N, K]
//
// N and K are multiples of 64. Reference: Weight.dequantize of rwkv_batch/ops/weights. Binding:
// CodeKernels.decode_tiles. Test: test/kernels/test_decode_tiles.py.
//
// Memory is what this waits for. A thread makes eight numbers side by side, 16 bytes of a row, so that a warp
// writes 512 in one piece; the codes of eight lie among those of others, which neighbours read from L1.
#include "codes.cuh"
#include "int4_tile.cuh"
#include "int8_codes.cuh"
#include "int8_tile.cuh"

namespace {
constexpr int THREADS = 256;
constexpr int BLOCKS_A_MULTIPROCESSOR = 6;  // of 1536 threads, as many as the smallest has
constexpr int EIGHT = 8;

struct Codes {
    const uint8_t* w;
    const float* scale;
    int width, stride;  // of a row of the result, and of w
};

DEVICE uint32_t scaled(uint32_t pair, float first, float second) {
    const float2 numbers = to_float2(pair);
    return to_finite_half2(numbers.x * first, numbers.y * second);
}

// A form gives the eight numbers at `column` of a row of the result, in pairs. code_bits: of int8_codes.cuh.
struct Tiles8 {
    static DEVICE void eight(const Codes& p, int row, int column, uint32_t bits, uint32_t (&pairs)[4]) {
        const int steps = p.width / TILE_K, sixteen = row % TILE_W_ROWS / 16, i = row % 8;
        // Of a word two numbers are of these eight.
        const uint8_t* const from =
            p.w + (size_t(row / TILE_W_ROWS) * steps + column / TILE_K) * Int8Tile::BYTES +
            column % TILE_K / 16 * Int8Tile::SIXTEEN_BYTES + row / 8 % 2 * 4 + column / EIGHT % 2 * 2;
        uint32_t twos[4];
#pragma unroll
        for (int q = 0; q < 4; q++)
            twos[q] = *reinterpret_cast<const uint16_t*>(from + Int8Tile::place(sixteen, i, q));
        const float scale = p.scale[row];
#pragma unroll
        for (int q = 0; q < 4; q++)
            pairs[q] = scaled(halves_of_codes<LOW_BYTES>(twos[q], bits), scale, scale);
    }
};

struct Columns {
    static DEVICE void eight(const Codes& p, int row, int column, uint32_t bits, uint32_t (&pairs)[4]) {
        // Of 16 columns the first eight and the others take turns.
        const uint4 codes = *reinterpret_cast<const uint4*>(p.w + size_t(row) * p.stride + column / 16 * 16);
        const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
        const int half = column / EIGHT % 2 * 8;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float* scale = p.scale + column + 2 * i;
            pairs[i] = scaled(halves_of_codes<EVEN_BYTES>(words[i] >> half, bits), scale[0], scale[1]);
        }
    }
};

struct Tiles4 {
    static DEVICE void eight(const Codes& p, int row, int column, uint32_t, uint32_t (&pairs)[4]) {
        // Of each 16 rows i and i + 8 share bytes; a word has two of these eight numbers and two of the
        // other.
        const int steps = p.width / TILE_K, place = row % TILE_W_ROWS, sixteen = place / 16, i = place % 8,
                  half = place / 8 % 2, shift = column % 16 / EIGHT * 8 + half * 4;
        const uint8_t* tile = p.w + (size_t(row / TILE_W_ROWS) * steps + column / TILE_K) * Int4Tile::BYTES;
        const __half2 both = codes::as_halves(load4(tile + Int4Tile::scales(sixteen, i) + half * 4)),
                      scale = __low2half2(both), minimum = __high2half2(both);
#pragma unroll
        for (int q = 0; q < 4; q++) {
            const uint32_t found =
                load4(tile + column % TILE_K / 16 * Int4Tile::SIXTEEN_BYTES + Int4Tile::place(sixteen, i, q));
            pairs[q] = codes::Int4::pair<false>(found >> shift, scale, minimum);
        }
    }
};

template <typename Form>
__global__ void LAUNCH_BOUNDS(THREADS, BLOCKS_A_MULTIPROCESSOR)
    decode_tiles_kernel(Codes p, __half* to, int rows) {
    const unsigned eights = p.width / EIGHT, count = rows * eights;
    const uint32_t bits = code_bits();
    wait_for_inputs();  // which may read what is written here
    for (unsigned i = blockIdx.x * THREADS + threadIdx.x; i < count; i += gridDim.x * THREADS) {
        const unsigned row = i / eights, column = i % eights * EIGHT;
        uint32_t pairs[4];
        Form::eight(p, row, column, bits, pairs);
        store(to + size_t(row) * p.width + column, pairs[0], pairs[1], pairs[2], pairs[3]);
    }
}

template <typename Form>
int run(const Codes& p, __half* to, int rows, cudaStream_t stream) {
    const int blocks = (rows * (p.width / EIGHT) + THREADS - 1) / THREADS,
              most = BLOCKS_A_MULTIPROCESSOR * multiprocessors();
    return launch(decode_tiles_kernel<Form>, blocks < most ? blocks : most, THREADS, 0, stream, p, to, rows);
}
}  // namespace

extern "C" {
// rows, width: of `to`. form: a TileForm; scale is for the first two, stride for DECODE_COLUMNS.
int rwkv_decode_tiles(const uint8_t* w, const float* scale, __half* to, int rows, int width, int stride,
                      int form, cudaStream_t stream) {
    if (rows < TILE_W_ROWS || rows % TILE_W_ROWS || width < TILE_K || width % TILE_K || stride < width)
        return cudaErrorInvalidValue;
    const Codes p = {w, scale, width, stride};
    switch (form) {
        case DECODE_TILES8: return run<Tiles8>(p, to, rows, stream);
        case DECODE_COLUMNS: return run<Columns>(p, to, rows, stream);
        case DECODE_TILES4: return run<Tiles4>(p, to, rows, stream);
    }
    return cudaErrorInvalidValue;
}
}
