// What the products with small matrices share, for short K (product_kept.cu) and long (product_low.cu): y[m, n] = f(sum over k of
// x[m, k] w[n, k]) for up to four parts.
//
// The tensor memory accelerator (TMA) brings tiles in pieces of 64 k through rings in shared memory; warps of their own ask for them,
// warpgroups multiply, each 64 rows of x. All of w that there is room for is on its way before the block waits for the kernel that makes x.
#pragma once
#include "hopper.cuh"
#include "product.cuh"
#include "tensor_map.cuh"

constexpr int GROUP = 4 * WARP;                // threads of a warpgroup
constexpr int ROWS = 64;                       // of x or y that a warpgroup multiplies
constexpr int PIECE = 64;                      // k that are copied together: 128 bytes, the width of the swizzle
constexpr int PIECE_BYTES = ROWS * PIECE * 2;  // of 64 rows of x, w or y
constexpr int MOST_LOW_PARTS = 4;

struct LowProducts {
    CUtensorMap w[MOST_LOW_PARTS], x[MOST_LOW_PARTS], y[MOST_LOW_PARTS];
    Product part[MOST_LOW_PARTS];
    int count, m, pieces;        // pieces: the most of K
    int tiles;                   // of rows
    Ahead ahead;
    int begin[MOST_LOW_PARTS];   // where w is kept: the first block of each part,
    int groups[MOST_LOW_PARTS];  // and the blocks that share its tiles of rows
    int turns;                   // where parts share a block: how many blocks there are for a tile,
    int turn[MOST_LOW_PARTS];    // and which of them takes each part
};

__host__ __device__ constexpr int up(int x, int y) { return (x + y - 1) / y; }

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
namespace hopper {
// Four 8 x 8 matrices of fp16 in the layout of a product's result: lane i names the place of row i % 8 of matrix i / 8.
__device__ __forceinline__ void store_matrices(uint32_t place, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(place), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

// A box of a tensor map at (column, row) into shared memory; its bytes count at `barrier`.
__device__ __forceinline__ void load_box(uint32_t to, const CUtensorMap* map, int column, int row, uint32_t barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
                 "l"(map), "r"(column), "r"(row), "r"(barrier)
                 : "memory");
}

// Tells the TMA of a map that it will need: else the first box waits for the map.
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// A box of a tensor map from shared memory to its place, but for what lies outside the matrix.
__device__ __forceinline__ void store_box(const CUtensorMap* map, int column, int row, uint32_t from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];\n\tcp.async.bulk.commit_group;" ::"l"(map),
                 "r"(column), "r"(row), "r"(from)
                 : "memory");
}

// Zeros that stay where they are.
template <int N>
__device__ __forceinline__ void clear(float (&acc)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("mov.f32 %0, 0f00000000;" : "=f"(acc[i]));
}

// acc += the products of a piece of 64 rows of x and one of w.
template <int COLUMNS>
__device__ __forceinline__ void add_piece(float (&acc)[COLUMNS / 2], uint32_t x, uint32_t w) {
    const uint64_t a = operand(x), b = operand(w);
    products_begin();
#pragma unroll
    for (int s = 0; s < PIECE / 16; s++) product<COLUMNS, 0>(acc, a + s * 2, b + s * 2);
    products_close();
}

// Where a thread of a warpgroup is in a ring of STAGES pieces. `full` and `empty`: the first of the barriers of its stages.
template <int STAGES>
struct Ring {
    uint32_t full, empty;
    int stage = 0, parity = 0, before = 0;

    // Products of so many pieces, each begun by `add(piece, stage)`. A stage is given back as soon as the product after its own has begun,
    // the last by `give_back`.
    template <typename Add>
    __device__ __forceinline__ void multiply(int pieces, Add&& add) {
        for (int piece = 0; piece < pieces; piece++) {
            barrier_wait(full + stage * 8, parity);
            add(piece, stage);
            products_done<1>();
            if (piece > 0) give_back();
            before = stage;
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        products_done<0>();
    }

    __device__ __forceinline__ void give_back() const {
        if (threadIdx.x % WARP == 0) arrive(empty + before * 8);
    }
};

// A warpgroup's f(acc) into 64 rows of y, by way of `staged`; the tile that it has staged before must have left.
template <int COLUMNS>
__device__ __forceinline__ void store_tile(float (&acc)[COLUMNS / 2], int function, uint32_t staged, const CUtensorMap* y, int column,
                                           int row0, int group) {
    const int thread = threadIdx.x % GROUP, warp = thread / WARP, lane = thread % WARP;
    if (function != IDENTITY)
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++) acc[i] = apply(acc[i], function);
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; j += 2) {
        const int row = warp * 16 + lane % 16, vector = j % 8 + lane / 16;
        store_matrices(staged + j / 8 * PIECE_BYTES + row * 128 + (vector ^ row % 8) * 16, to_half2(acc[4 * j], acc[4 * j + 1]),
                       to_half2(acc[4 * j + 2], acc[4 * j + 3]), to_half2(acc[4 * j + 4], acc[4 * j + 5]),
                       to_half2(acc[4 * j + 6], acc[4 * j + 7]));
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    sync_some(1 + group, GROUP);
    if (thread == 0)
        for (int i = 0; i < COLUMNS / 64; i++) store_box(y, column + i * 64, row0, staged + i * PIECE_BYTES);
}
}  // namespace hopper
#endif

namespace {
struct Device {
    int multiprocessors, shared, shared_of_block;
};

const Device& device() {
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
bool map(CUtensorMap* out, const void* matrix, int rows, int columns, int box_rows) {
    return make_tensor_map<2>(out, matrix, {cuuint64_t(columns), cuuint64_t(rows)}, {cuuint64_t(columns) * 2},
                              {PIECE, cuuint32_t(box_rows)});
}

// For tiles of `rows` rows of x by `columns` rows of w.
cudaError_t prepare(LowProducts& all, int rows, int columns) {
    for (int i = 0; i < all.count; i++) {
        const Product& p = all.part[i];
        if (!map(&all.w[i], p.w, p.n, p.k, columns) || !map(&all.x[i], p.x, all.m, p.k, rows) || !map(&all.y[i], p.y, all.m, p.n, ROWS))
            return cudaErrorNotSupported;
    }
    all.tiles = up(all.m, rows);
    return cudaSuccess;
}
}  // namespace

// Short K. cudaErrorNotSupported: w cannot be kept.
int products_kept(LowProducts all, cudaStream_t stream);
