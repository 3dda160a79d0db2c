// What the GEMMs with small weights share, for long K (gemm_lowrank.cu) and short K
// (gemm_lowrank_resident.cu):
// y[m, n] = f(sum over k of x[m, k] w[n, k]) for up to four parts. Hopper only.
//
// The tensor memory accelerator (TMA) loads tiles in pieces of 64 k through rings in shared memory; producer
// warps request them, warpgroups multiply, each 64 rows of x. All of w that there is room for is on its way
// before the block waits for the kernel that makes x.
#pragma once
#include "gemm.cuh"
#include "hopper.cuh"
#include "tensor_map.cuh"

constexpr int GROUP = 4 * WARP;  // threads of a warpgroup
constexpr int ROWS = 64;         // of x or y that a warpgroup multiplies
constexpr int PIECE = 64;        // k that are copied together: 128 bytes, the width of the swizzle
constexpr int PIECE_BYTES = ROWS * PIECE * 2;  // of 64 rows of x, w or y
constexpr int MAX_PARTS = 4;
constexpr int RESIDENT_STAGES = 4;  // of a ring, where K is short
constexpr int TILE_COST = 1;        // what a tile of rows costs besides its pieces, in pieces

struct LowRankGemms {
    CUtensorMap w[MAX_PARTS], x[MAX_PARTS], y[MAX_PARTS];
    GemmPart part[MAX_PARTS];
    int count, m, pieces;  // pieces: the most of K
    int tiles;             // of rows
    Prefetch prefetch;
    int begin[MAX_PARTS];   // resident w: the first block of each part,
    int groups[MAX_PARTS];  // and the blocks that share its tiles of rows
    int blocks;             // grouped: blocks for a tile,
    int block[MAX_PARTS];   // and which of them takes each part
};

__host__ __device__ constexpr int up(int x, int y) { return (x + y - 1) / y; }

#if HOPPER
namespace hopper {
// acc += a piece of 64 rows of x times one of w.
template <int COLUMNS>
__device__ __forceinline__ void add_piece(float (&acc)[COLUMNS / 2], uint32_t x, uint32_t w) {
    const uint32_t a = operand(x), b = operand(w);
    wgmma_begin();
#pragma unroll
    for (int s = 0; s < PIECE / 16; s++) wgmma<COLUMNS, 0>(acc, a + s * 2, b + s * 2);
    wgmma_commit();
}

// Where a thread of a warpgroup is in a ring of STAGES pieces. `full` and `empty`: the first of the barriers
// of its stages.
template <int STAGES>
struct Ring {
    uint32_t full, empty;
    int stage = 0, parity = 0, before = 0;

    // Multiplies so many pieces, each begun by `add(piece, stage)`. A stage is released as soon as the next
    // wgmma after its own has begun, the last by `release`.
    template <typename Add>
    __device__ __forceinline__ void multiply(int pieces, Add&& add) {
        for (int piece = 0; piece < pieces; piece++) {
            barrier_wait(full + stage * 8, parity);
            add(piece, stage);
            wgmma_wait<1>();
            if (piece > 0) release();
            before = stage;
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        wgmma_wait<0>();
    }

    __device__ __forceinline__ void release() const {
        if (threadIdx.x % WARP == 0) arrive(empty + before * 8);
    }
};

// A warpgroup's f(acc) into 64 rows of y, by way of `staged`, which must no longer be read.
template <int COLUMNS>
__device__ __forceinline__ void store_tile(float (&acc)[COLUMNS / 2], int activation, uint32_t staged,
                                           const CUtensorMap* y, int column, int row0, int group) {
    const int thread = threadIdx.x % GROUP, warp = thread / WARP, lane = thread % WARP;
    if (activation != IDENTITY)
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++) acc[i] = activate(acc[i], activation);
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; j += 2) {
        const int row = warp * 16 + lane % 16, vector = j % 8 + lane / 16;
        store_matrices(staged + j / 8 * PIECE_BYTES + row * 128 + (vector ^ row % 8) * 16,
                       to_half2(acc[4 * j], acc[4 * j + 1]), to_half2(acc[4 * j + 2], acc[4 * j + 3]),
                       to_half2(acc[4 * j + 4], acc[4 * j + 5]), to_half2(acc[4 * j + 6], acc[4 * j + 7]));
    }
    fence_async_shared();
    sync_some(1 + group, GROUP);
    if (thread == 0)
        for (int i = 0; i < COLUMNS / 64; i++) store_box(y, column + i * 64, row0, staged + i * PIECE_BYTES);
}
}  // namespace hopper
#endif

struct Device {
    int multiprocessors, shared, shared_of_block;
};

inline const Device& device() {
    static const Device found = [] {
        int id = 0;
        Device d = {};
        cudaGetDevice(&id);
        cudaDeviceGetAttribute(&d.multiprocessors, cudaDevAttrMultiProcessorCount, id);
        cudaDeviceGetAttribute(&d.shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor, id);
        cudaDeviceGetAttribute(&d.shared_of_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, id);
        return d;
    }();
    return found;
}

// A matrix of fp16 [rows, columns], cut into boxes of 64 columns; what lies outside reads as zero.
inline bool map(CUtensorMap* out, const void* matrix, int rows, int columns, int box_rows) {
    return make_tensor_map<2>(out, matrix, {cuuint64_t(columns), cuuint64_t(rows)}, {cuuint64_t(columns) * 2},
                              {PIECE, cuuint32_t(box_rows)});
}

// For tiles of `rows` rows of x by `columns` rows of w.
inline cudaError_t prepare(LowRankGemms& all, int rows, int columns) {
    for (int i = 0; i < all.count; i++) {
        const GemmPart& p = all.part[i];
        if (!map(&all.w[i], p.w, p.n, p.k, columns) || !map(&all.x[i], p.x, all.m, p.k, rows) ||
            !map(&all.y[i], p.y, all.m, p.n, ROWS))
            return cudaErrorNotSupported;
    }
    all.tiles = up(all.m, rows);
    return cudaSuccess;
}

// Short K, with one of three kernels. cudaErrorNotSupported: w does not fit shared memory.
int gemm_resident(LowRankGemms all, cudaStream_t stream);
