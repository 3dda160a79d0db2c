// Products with small matrices for some dozens of rows and more, several in one launch: y[m, n] = f(sum over k of x[m, k] w[n, k]).
// Hopper only.
//
//   w [N, K] fp16, x [M, K] fp16, y [M, N] fp16; N a multiple of 16, K of 32; any M
//   f: identity, tanh, sigmoid, or relu squared (at most what fp16 holds)
//
// Tiles are 64 rows of x by 64 or 128 rows of w. The tensor memory accelerator (TMA) brings pieces of 64 k through a ring in shared memory;
// one warp asks for them, four multiply. All of w that there is room for is on its way before the block waits for the kernel that makes x.
// Long K: a block has one tile, and a slice of K if the blocks of a cluster share it; each then adds up the slices' sums for some rows.
// Short K ("kept"): a block keeps its w, and takes tiles of x one after the other.
// Sums are fp32: over k inside a slice (in steps of 16, in order), then over the slices in order. They depend neither on M nor on the tile,
// but on the number of slices.
#include "hopper.cuh"
#include "product.cuh"
#include "tensor_map.cuh"

constexpr int MULTIPLIERS = 4 * WARP;          // threads
constexpr int ROWS = 64;                       // of x in a tile
constexpr int PIECE = 64;                      // k that are copied together: 128 bytes, the width of the swizzle
constexpr int PIECE_BYTES = ROWS * PIECE * 2;  // of 64 rows of x, w or y
constexpr int ALIGNMENT = 1024;
constexpr int RESERVED = 1024;                 // bytes of shared memory that the system takes of each block
constexpr int MOST_LOW_PARTS = 4;
constexpr int TILE_COST = 1;                   // what a tile of rows costs besides its pieces, in pieces

struct LowProducts {
    CUtensorMap w[MOST_LOW_PARTS], x[MOST_LOW_PARTS], y[MOST_LOW_PARTS];
    Product part[MOST_LOW_PARTS];
    int begin[MOST_LOW_PARTS];   // the first cluster of each part
    int groups[MOST_LOW_PARTS];  // clusters that share its tiles of rows
    int count, m, pieces;        // pieces: the most of K
    Ahead ahead;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
using namespace hopper;

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

// A box of a tensor map from shared memory to its place, but for what lies outside the matrix.
__device__ __forceinline__ void store_box(const CUtensorMap* map, int column, int row, uint32_t from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];\n\tcp.async.bulk.commit_group;" ::"l"(map),
                 "r"(column), "r"(row), "r"(from)
                 : "memory");
}
#endif

// What a block has in shared memory, in this order. KEPT: w stays; otherwise its pieces lie in the ring beside those of x.
template <int COLUMNS, int SLICES, bool KEPT>
struct Layout {
    static constexpr int STAGES = KEPT ? 4 : 6;
    static constexpr int W_BYTES = COLUMNS * PIECE * 2;                  // of a piece
    static constexpr int STAGE_BYTES = PIECE_BYTES + (KEPT ? 0 : W_BYTES);
    static constexpr int RESULT_BYTES = SLICES > 1 ? ROWS * COLUMNS * 4  // the sums of all slices for the rows that this block adds up
                                                   : ROWS * COLUMNS * 2; // a tile of y
    static constexpr int BARRIERS = 2 * STAGES + 2;
    static int bytes(int pieces) { return ALIGNMENT + STAGES * STAGE_BYTES + RESULT_BYTES + (KEPT ? pieces * W_BYTES : 0) + BARRIERS * 8; }
};

// COLUMNS: rows of w of a block. SLICES: of K, and blocks of a cluster.
template <int COLUMNS, int SLICES, bool KEPT>
__global__ void __launch_bounds__(MULTIPLIERS + WARP) low_kernel(const __grid_constant__ LowProducts all) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using In = Layout<COLUMNS, SLICES, KEPT>;
    constexpr int STAGES = In::STAGES;
    extern __shared__ uint8_t shared[];
    const uint32_t ring = (shared_address(shared) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT, results = ring + STAGES * In::STAGE_BYTES,
                   ws = results + In::RESULT_BYTES, full = ws + (KEPT ? all.pieces * In::W_BYTES : 0), empty = full + STAGES * 8,
                   w_full = empty + STAGES * 8, sums_full = w_full + 8;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, slice = blockIdx.x % SLICES;

    int which = 0, cluster = blockIdx.x / SLICES;
    while (which + 1 < all.count && cluster >= all.begin[which + 1]) which++;
    cluster -= all.begin[which];
    const int n = all.part[which].n, k = all.part[which].k, function = all.part[which].function, groups = all.groups[which];
    const int n0 = cluster / groups * COLUMNS, step = groups * ROWS, first = cluster % groups * ROWS;
    const int k_pieces = (k + PIECE - 1) / PIECE, each = (k_pieces + SLICES - 1) / SLICES, piece0 = min(slice * each, k_pieces);
    const int pieces = min(each, k_pieces - piece0);

    const auto ask_w = [&](int piece, uint32_t to, uint32_t barrier) {
        load_box(to, &all.w[which], (piece0 + piece) * PIECE, n0, barrier);
    };
    const auto ask_x = [&](int piece, int m0, int stage) {
        load_box(ring + stage * In::STAGE_BYTES, &all.x[which], (piece0 + piece) * PIECE, m0, full + stage * 8);
    };
    const int early = KEPT ? 0 : min(STAGES, pieces);  // pieces of w in the ring that need not wait
    if (threadIdx.x == MULTIPLIERS) {
        for (int i = 0; i < STAGES; i++) barrier_init(full + i * 8, 1), barrier_init(empty + i * 8, MULTIPLIERS / WARP);
        barrier_init(w_full, 1), barrier_init(sums_full, 1);
        barriers_ready();
        if (KEPT) {
            arrive_and_expect(w_full, pieces * In::W_BYTES);
            for (int piece = 0; piece < pieces; piece++) ask_w(piece, ws + piece * In::W_BYTES, w_full);
        }
        for (int i = 0; i < early; i++) {
            arrive_and_expect(full + i * 8, In::STAGE_BYTES);
            ask_w(i, ring + i * In::STAGE_BYTES + PIECE_BYTES, full + i * 8);
        }
        if (SLICES > 1) arrive_and_expect(sums_full, In::RESULT_BYTES);
    }
    prefetch(all.ahead);
    if (SLICES > 1) {
        cluster_arrive_relaxed();  // barriers_ready has made the barriers known
        cluster_wait();
    } else {
        __syncthreads();
    }

    if (warp == MULTIPLIERS / WARP) {
        wait_for_inputs();
        if (lane == 0) {
            int stage = 0, parity = 1;  // the phase before the first counts as over
            for (int m0 = first; m0 < all.m; m0 += step)
                for (int piece = 0; piece < pieces; piece++) {
                    if (piece >= early) {
                        barrier_wait(empty + stage * 8, parity);
                        arrive_and_expect(full + stage * 8, In::STAGE_BYTES);
                        if (!KEPT) ask_w(piece, ring + stage * In::STAGE_BYTES + PIECE_BYTES, full + stage * 8);
                    }
                    ask_x(piece, m0, stage);
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
        }
        return;
    }

    wait_for_inputs();
    if (KEPT) barrier_wait(w_full, 0);
    int stage = 0, parity = 0, before = 0;
    for (int m0 = first; m0 < all.m; m0 += step) {
        float acc[COLUMNS / 2];
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++) asm volatile("mov.f32 %0, 0f00000000;" : "=f"(acc[i]));  // zeros that stay where they are
        for (int piece = 0; piece < pieces; piece++) {
            barrier_wait(full + stage * 8, parity);
            const uint32_t x_piece = ring + stage * In::STAGE_BYTES;
            const uint64_t a = operand(x_piece), b = operand(KEPT ? ws + piece * In::W_BYTES : x_piece + PIECE_BYTES);
            products_begin();
#pragma unroll
            for (int s = 0; s < PIECE / 16; s++) product<COLUMNS, 0>(acc, a + s * 2, b + s * 2);
            products_close();
            products_done<1>();
            if (piece > 0 && lane == 0) arrive(empty + before * 8);
            before = stage;
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        products_done<0>();
        if constexpr (SLICES > 1) {
            constexpr int SHARES = 8 / SLICES;   // of 8 rows, that a block adds up
            // A share of one slice is [COLUMNS / 16][32 lanes][4 numbers].
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int share = warp * 2 + h, rank = share / SHARES;
                const uint32_t place = results + ((slice * SHARES + share % SHARES) * (COLUMNS / 16) * WARP + lane) * 16;
#pragma unroll
                for (int j = 0; j < COLUMNS / 16; j++)
                    send_to(rank, place + j * WARP * 16, sums_full,
                            make_float4(acc[8 * j + 2 * h], acc[8 * j + 2 * h + 1], acc[8 * j + 4 + 2 * h], acc[8 * j + 4 + 2 * h + 1]));
            }
            barrier_wait_cluster(sums_full, 0);
            __half* const y = all.part[which].y;
#pragma unroll
            for (int i = threadIdx.x; i < SHARES * COLUMNS / 16 * WARP; i += MULTIPLIERS) {
                float sum[4] = {};
#pragma unroll
                for (int s = 0; s < SLICES; s++) {
                    float4 more;
                    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(more.x), "=f"(more.y), "=f"(more.z), "=f"(more.w)
                                 : "r"(results + (s * SHARES * (COLUMNS / 16) * WARP + i) * 16) : "memory");
                    sum[0] += more.x, sum[1] += more.y, sum[2] += more.z, sum[3] += more.w;
                }
                const int j = i / WARP % (COLUMNS / 16), row = m0 + (slice * SHARES + i / (COLUMNS / 16 * WARP)) * 8 + lane / 4;
                const int column = n0 + j * 16 + lane % 4 * 2;
                if (row < all.m && column < n) {  // and so is column + 8
                    uint32_t* const place = reinterpret_cast<uint32_t*>(y + size_t(row) * n + column);
                    place[0] = to_half2(apply(sum[0], function), apply(sum[1], function));
                    place[4] = to_half2(apply(sum[2], function), apply(sum[3], function));
                }
            }
        } else {
            if (function != IDENTITY)
#pragma unroll
                for (int i = 0; i < COLUMNS / 2; i++) acc[i] = apply(acc[i], function);
            if (threadIdx.x == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // the tile before has left
            if (pieces && lane == 0) arrive(empty + before * 8);
            sync_some(1, MULTIPLIERS);
#pragma unroll
            for (int j = 0; j < COLUMNS / 8; j += 2) {
                const int row = warp * 16 + lane % 16, vector = j % 8 + lane / 16;
                store_matrices(results + j / 8 * PIECE_BYTES + row * 128 + (vector ^ row % 8) * 16, to_half2(acc[4 * j], acc[4 * j + 1]),
                               to_half2(acc[4 * j + 2], acc[4 * j + 3]), to_half2(acc[4 * j + 4], acc[4 * j + 5]),
                               to_half2(acc[4 * j + 6], acc[4 * j + 7]));
            }
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            sync_some(1, MULTIPLIERS);
            if (threadIdx.x == 0)
                for (int i = 0; i < COLUMNS / 64; i++) store_box(&all.y[which], n0 + i * 64, m0, results + i * PIECE_BYTES);
        }
    }
    if (SLICES == 1 && threadIdx.x == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}

namespace {
struct Device {
    int multiprocessors, shared, shared_of_block;
    bool hopper;
};

const Device& device() {
    static const Device found = [] {
        int id = 0, major = 0;
        Device d = {};
        cudaGetDevice(&id);
        cudaDeviceGetAttribute(&d.multiprocessors, cudaDevAttrMultiProcessorCount, id);
        cudaDeviceGetAttribute(&d.shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor, id);
        cudaDeviceGetAttribute(&d.shared_of_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, id);
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, id);
        d.hopper = major == 9;
        return d;
    }();
    return found;
}

// A matrix of fp16 [rows, columns], cut into boxes of 64 columns; what lies outside reads as zero.
bool map(CUtensorMap* out, const void* matrix, int rows, int columns, int box_rows) {
    return make_tensor_map<2>(out, matrix, {cuuint64_t(columns), cuuint64_t(rows)}, {cuuint64_t(columns) * 2}, {PIECE, cuuint32_t(box_rows)});
}

int up(int x, int y) { return (x + y - 1) / y; }

// Blocks that share the rows of each part where w is kept: one, then one more wherever there is most to do, while there is room. Where
// there is hardly room for one each, twice as many: those that end early make room for the rest.
void share_out(LowProducts& all, int columns, int room) {
    const int tiles = up(all.m, ROWS);
    int total = 0;
    for (int i = 0; i < all.count; i++) all.groups[i] = 1, total += up(all.part[i].n, columns);
    if (2 * total > room) room *= 2;
    while (true) {
        int worst = 0, most = 0;
        for (int i = 0; i < all.count; i++) {
            const int cost = up(tiles, all.groups[i]) * (up(all.part[i].k, PIECE) + TILE_COST);
            if (cost > most) worst = i, most = cost;
        }
        total += up(all.part[worst].n, columns);
        if (all.groups[worst] == tiles || total > room) break;
        all.groups[worst]++;
    }
}

template <int COLUMNS, int SLICES, bool KEPT>
int run(LowProducts all, cudaStream_t stream) {
    const auto kernel = low_kernel<COLUMNS, SLICES, KEPT>;
    const int shared = Layout<COLUMNS, SLICES, KEPT>::bytes(all.pieces);
    if (shared > device().shared_of_block) return cudaErrorNotSupported;
    const cudaError_t allowed = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (allowed != cudaSuccess) return allowed;
    for (int i = 0; i < all.count; i++) {
        const Product& p = all.part[i];
        if (!map(&all.w[i], p.w, p.n, p.k, COLUMNS) || !map(&all.x[i], p.x, all.m, p.k, ROWS) || !map(&all.y[i], p.y, all.m, p.n, ROWS))
            return cudaErrorNotSupported;
    }
    if (KEPT)
        share_out(all, COLUMNS, device().multiprocessors * (device().shared / (shared + RESERVED)));
    else
        for (int i = 0; i < all.count; i++) all.groups[i] = up(all.m, ROWS);  // one tile for each cluster
    int clusters = 0;
    for (int i = 0; i < all.count; i++) all.begin[i] = clusters, clusters += up(all.part[i].n, COLUMNS) * all.groups[i];

    return launch_clusters(SLICES, kernel, clusters * SLICES, MULTIPLIERS + WARP, shared, stream, all);
}

int blocks_of(const LowProducts& all, int columns, int slices) {
    int blocks = 0;
    for (int i = 0; i < all.count; i++) blocks += up(all.part[i].n, columns) * up(all.m, ROWS) * slices;
    return blocks;
}

// Two blocks on a multiprocessor take twice as long: tiles are narrow only if every block can have one of its own. Both give the same sums.
template <int SLICES>
int run(const LowProducts& all, cudaStream_t stream) {
    const bool narrow = blocks_of(all, 64, SLICES) <= device().multiprocessors;
    return narrow ? run<64, SLICES, false>(all, stream) : run<128, SLICES, false>(all, stream);
}

// Wide tiles with twice the slices are as fast as narrow ones only where there are few slices.
int most_slices(const LowProducts& all) {
    for (int slices = 8; slices >= 4; slices /= 2)
        if (blocks_of(all, 64, slices) <= device().multiprocessors) return slices;
    int slices = 4;
    while (slices > 1 && blocks_of(all, 128, slices) > device().multiprocessors) slices /= 2;
    return slices;
}
}  // namespace

extern "C" {
// slices of K: 1, 2, 4 or 8; as many as there are multiprocessors for (-1); or 0 where K is short enough for w to be kept.
// ahead: weights to bring into the cache meanwhile. cudaErrorNotSupported: this is no Hopper GPU, or w cannot be kept.
int rwkv_products_low(const Product* parts, int count, int m, int slices, const char* ahead, unsigned ahead_bytes, cudaStream_t stream) {
    if (count < 1 || count > MOST_LOW_PARTS || m < 1) return cudaErrorInvalidValue;
    if (!device().hopper) return cudaErrorNotSupported;
    LowProducts all = {};
    all.count = count;
    all.m = m;
    all.ahead = {ahead, ahead_bytes};
    for (int i = 0; i < count; i++) {
        if (parts[i].n % 16 || parts[i].k % 32) return cudaErrorInvalidValue;
        all.part[i] = parts[i];
        if (up(parts[i].k, PIECE) > all.pieces) all.pieces = up(parts[i].k, PIECE);
    }
    switch (slices < 0 ? most_slices(all) : slices) {
        case 0: return run<64, 1, true>(all, stream);
        case 1: return run<1>(all, stream);
        case 2: return run<2>(all, stream);
        case 4: return run<4>(all, stream);
        case 8: return run<8>(all, stream);
        default: return cudaErrorInvalidValue;
    }
}
}
