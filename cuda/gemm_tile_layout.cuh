// What the kernel of gemm_tile_kernel.cuh is made of: its sizes by rows of x, its parameters, and how w lies
// in memory.
#pragma once
#include "common.cuh"
#include "gemm_tile.cuh"
#include "hopper.cuh"
#include "tensor_map.cuh"

constexpr int STRIP_BYTES = TILE_K * 2;
constexpr int GROUP_THREADS = 128;
constexpr int MAX_GROUPS = 2;
constexpr int PRODUCER_WARPS = 2;
constexpr int TILE_THREADS = MAX_GROUPS * GROUP_THREADS + PRODUCER_WARPS * WARP;  // at most
constexpr int MAX_PARTS = 3;
constexpr int MAX_SPLIT_K = 8;  // blocks of a cluster

// By rows of x and W, how w lies in memory: whether two warpgroups of a block may have rows of w of their own
// that go through registers; whether partial sums may be the result; strips of k in a stage (a barrier takes
// as long as the products of a few rows, and codes are fewer bytes), and blocks of a multiprocessor at least.
template <typename W>
__host__ __device__ constexpr bool few(int rows) {
    return W::CODES && rows <= TILE_FEW_ROWS;
}
template <typename W>
__host__ __device__ constexpr bool two_groups(int rows) {
    return W::CODES && rows > 96;
}
template <typename W>
__host__ __device__ constexpr bool has_partial_sums(int rows) {
    return W::CODES && !W::TRANSPOSED && rows <= 96;
}
template <typename W>
__host__ __device__ constexpr bool by_strips(int rows) {
    return W::BY_STRIPS && rows <= 8;
}
template <typename W>
__host__ __device__ constexpr int strips_for(int rows) {
    return by_strips<W>(rows) ? 8 : few<W>(rows) ? 4 : rows <= (W::CODES ? 64 : 32) ? 2 : 1;
}
template <typename W>
__host__ __device__ constexpr int least_blocks(int rows) {
    return few<W>(rows) && !by_strips<W>(rows) ? 3 : rows > (W::CODES ? 96 : 128) ? 1 : 2;
}

struct TileGemms {
    CUtensorMap w[MAX_PARTS], x[MAX_PARTS];
    __half* y[MAX_PARTS];
    int m, n;
    int steps, each;          // stages that hold all of K; of one part
    int received_bytes;       // of shared memory, for what the other parts of K send
    int groups;               // warpgroups that multiply
    int split_k, split_bits;  // parts of K, a power of two
    int w_stages, x_stages;
    int square;
    const uint8_t* tiles[MAX_PARTS];   // in place of the map of w, if it lies in tiles
    int strips;                        // of 64 along k
    const float* scales[MAX_PARTS];    // of rows of w, if it has 8 bits
    const float* x_scales[MAX_PARTS];  // of rows of x, if it has too
    Prefetch prefetch;
    int partial_sums;  // as of TileShape
};

// How w lies in memory. TILE_BYTES: of a tile of 64 rows and 64 numbers, or pairs of neighbours of FP8;
// GROUP_BYTES: of GROUP_STRIPS tiles side by side, which share scales as `Tile` says (int4_tile.cuh).
// TRANSPOSED: as [K, N]. CODES: of 8 or 4 bits, which go through registers, where `operands` makes fp16 of
// them. TILES: each lies in one piece. SCALED: its rows are. FP8: so are x and w, and a pair counts as one
// number. BY_STRIPS: with up to 8 rows of x each warp has a strip of its own, and `multiply` takes its codes.
struct Halves {
    static constexpr int TILE_BYTES = TILE_W_ROWS * TILE_K * 2, GROUP_STRIPS = 1, GROUP_BYTES = TILE_BYTES;
    static constexpr bool TRANSPOSED = false, CODES = false, TILES = false, SCALED = false, FP8 = false,
                          BY_STRIPS = false;
};
struct HalfColumns : Halves {
    static constexpr bool TRANSPOSED = true;
};
struct Codes : Halves {
    static constexpr int TILE_BYTES = TILE_W_ROWS * TILE_K, GROUP_BYTES = TILE_BYTES;
    static constexpr bool CODES = true, SCALED = true;
    static __device__ __forceinline__ uint32_t bits() { return 0; }  // that `operands` needs in a register
};
struct Fp8Pairs : Halves {
    static constexpr bool SCALED = true, FP8 = true;
};

// Of a warpgroup's stage of so many strips, one or whole groups. One of a group has its scales too.
template <typename W>
__host__ __device__ constexpr int stage_bytes(int strips) {
    return strips < W::GROUP_STRIPS ? W::TILE_BYTES : strips / W::GROUP_STRIPS * W::GROUP_BYTES;
}

// Where a strip of a row of tiles, with what it has of scales, is in w, if that lies in tiles.
template <typename W, typename Row>
__device__ __forceinline__ size_t tile_offset(Row row, int strips, int strip) {
    if constexpr (W::GROUP_STRIPS == 1)
        return (size_t(row) * strips + strip) * W::TILE_BYTES;
    else
        return W::Tile::template begin_of<size_t>(row, strips, strip);
}

// Of so many bytes of w; the ring of x behind it is aligned as its swizzle wants.
template <typename W>
__host__ __device__ __forceinline__ int w_ring_bytes(int bytes) {
    return W::TILES ? (bytes + 1023) / 1024 * 1024 : bytes;
}
