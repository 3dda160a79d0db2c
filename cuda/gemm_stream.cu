// GEMMs of few rows with weights that stream from memory once, several in one launch: y[m, n] = f(sum over k
// of x[m, k] w[n, k]).
//
//   w [N, K] fp16, x [M, K] fp16, y [M, N] fp16; N a multiple of 16, K of 32; any M, best up to 16
//   f: identity, tanh, sigmoid, or relu squared (at most what fp16 holds)
//
// Reference: f(x @ w.T) in torch. Binding: Kernels.gemm_stream. Test: test/kernels/test_gemm_stream.py.
//
// A warp owns 16 R rows of w and a part of K. w and x go from memory to registers in 16-byte pieces, straight
// into the operands of m16n8k16 mma instructions: the order of k inside a step of 32 is free as long as w and
// x agree on it. All of a warp's first loads of w are under way before it waits for the kernel that makes x.
// Where rows do not fill the last tile, it overlaps the one before, and computes the same numbers again.
// Sums are fp32: first over k inside a warp's part (in steps of 32, in order), then over the parts in order.
// A row's result does not depend on the other rows.
#include "gemm.cuh"

constexpr int WARPS = 8;
constexpr int MAX_PARTS = 8;  // GEMMs in one launch

struct StreamGemms {
    GemmPart part[MAX_PARTS];
    int blocks[MAX_PARTS];  // tiles of each part
    int tiles, m;
    Prefetch prefetch;
};

// Where this warp's part of one tile of rows of w lies.
struct Tile {
    const __half* w;  // this lane's first numbers: of row `group` at step 0
    const __half* x;
    int k, begin, end, which, block;
};

template <int R, int SPLIT_K>
__device__ __forceinline__ Tile locate(const StreamGemms& all, int tile) {
    constexpr int ROWS = WARPS / SPLIT_K * R * 16;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    Tile t = {};
    if (tile >= all.tiles) return t;
    t.block = tile;
    while (t.block >= all.blocks[t.which]) t.block -= all.blocks[t.which++];
    const GemmPart& p = all.part[t.which];
    const int row0 = min(t.block * ROWS + warp / SPLIT_K * R * 16, p.n - R * 16), steps = p.k / 32,
              each = (steps + SPLIT_K - 1) / SPLIT_K;
    t.k = p.k;
    t.begin = warp % SPLIT_K * each;
    t.end = min(t.begin + each, steps);
    t.w = p.w + size_t(row0 + lane / 4) * p.k + lane % 4 * 8;
    t.x = p.x + lane % 4 * 8;
    return t;
}

// NT: tiles of 8 rows of x. R: tiles of 16 rows of w a warp. SPLIT_K: warps that share one K; the others take
// further rows of w.
// A block takes every gridDim.y-th tile of w. The first loads of its next tile are under way before the sums
// of this one are added up.
template <int NT, int R, int SPLIT_K>
__global__ void LAUNCH_BOUNDS(WARPS* WARP, R == 1 ? 2 : 1)
    gemm_stream_kernel(const __grid_constant__ StreamGemms all) {
    constexpr int STEPS = 8 / R;  // of 32 k, in flight at once
    constexpr int X_STEPS = STEPS * NT > 4 ? 4 / NT : STEPS;
    constexpr int GROUPS = WARPS / SPLIT_K;
    constexpr int ROWS = GROUPS * R * 16;
    __shared__ float sums[WARPS][NT * 8][R * 16 + 1];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, quad = lane % 4;
    const int m0 = blockIdx.x * NT * 8;

    uint4 wv[STEPS][R][2];
    const auto fetch = [](uint4(&to)[R][2], const __half* from, int k, int step) {
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
            for (int h = 0; h < 2; h++) to[r][h] = load_once(from + (r * 16 + h * 8) * k + step * 32);
    };
    int tile = blockIdx.y;
    Tile now = locate<R, SPLIT_K>(all, tile);
#pragma unroll
    for (int u = 0; u < STEPS; u++)
        if (now.begin + u < now.end) fetch(wv[u], now.w, now.k, now.begin + u);
    prefetch(all.prefetch);
    wait_for_inputs();

    while (tile < all.tiles) {
        tile += gridDim.y;
        const Tile next = locate<R, SPLIT_K>(all, tile);
        float acc[R][NT][4] = {};
        int s = now.begin;
        do {
            const bool last = s + STEPS >= now.end;
#pragma unroll
            for (int first = 0; first < STEPS; first += X_STEPS) {
                uint4 xv[X_STEPS][NT];
#pragma unroll
                for (int u = 0; u < X_STEPS; u++)
#pragma unroll
                    for (int t = 0; t < NT; t++) {
                        const int m = m0 + t * 8 + group, step = s + first + u;
                        xv[u][t] = make_uint4(0, 0, 0, 0);
                        if (step < now.end && m < all.m)
                            xv[u][t] = load16(now.x + size_t(m) * now.k + step * 32);
                    }
#pragma unroll
                for (int u = 0; u < X_STEPS; u++) {
                    const int at = first + u;
                    if (s + at < now.end)
#pragma unroll
                        for (int r = 0; r < R; r++) {
                            const uint4 top = wv[at][r][0], low = wv[at][r][1];
#pragma unroll
                            for (int t = 0; t < NT; t++) {
                                mma(acc[r][t], top.x, low.x, top.y, low.y, xv[u][t].x, xv[u][t].y);
                                mma(acc[r][t], top.z, low.z, top.w, low.w, xv[u][t].z, xv[u][t].w);
                            }
                        }
                    if (last ? next.begin + at < next.end : s + at + STEPS < now.end)
                        fetch(wv[at], last ? next.w : now.w, last ? next.k : now.k,
                              last ? next.begin + at : s + at + STEPS);
                }
            }
            s += STEPS;
        } while (s < now.end);
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
            for (int t = 0; t < NT; t++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    sums[warp][t * 8 + quad * 2 + i % 2][r * 16 + group + i / 2 * 8] = acc[r][t][i];
        __syncthreads();
        const GemmPart& p = all.part[now.which];
        for (int i = threadIdx.x; i < ROWS * NT * 8; i += WARPS * WARP) {
            const int row = i % ROWS, m = i / ROWS, own = row / (R * 16);
            const int n = min(now.block * ROWS + own * R * 16, p.n - R * 16) + row % (R * 16);
            float sum = 0.f;
#pragma unroll
            for (int split = 0; split < SPLIT_K; split++)
                sum += sums[own * SPLIT_K + split][m][row % (R * 16)];
            if (m0 + m < all.m) p.y[size_t(m0 + m) * p.n + n] = __float2half_rn(activate(sum, p.activation));
        }
        __syncthreads();
        now = next;
    }
}

namespace {
template <int R, int SPLIT_K>
int run(const GemmPart* parts, int count, int m, Prefetch prefetch, cudaStream_t stream) {
    if (count < 1 || count > MAX_PARTS || m < 1) return cudaErrorInvalidValue;
    StreamGemms all = {};
    all.m = m;
    all.prefetch = prefetch;
    constexpr int ROWS = WARPS / SPLIT_K * R * 16;
    for (int i = 0; i < count; i++) {
        if (parts[i].n % 16 || parts[i].n < R * 16 || parts[i].k % 32) return cudaErrorInvalidValue;
        all.part[i] = parts[i];
        all.blocks[i] = (parts[i].n + ROWS - 1) / ROWS;
        all.tiles += all.blocks[i];
    }
    const int most = multiprocessors() * (R == 1 ? 2 : 1), columns = m <= 8 ? 1 : (m + 15) / 16;
    const dim3 grid(columns, all.tiles < most ? all.tiles : most);
    return m <= 8 ? launch(gemm_stream_kernel<1, R, SPLIT_K>, grid, WARPS * WARP, 0, stream, all)
                  : launch(gemm_stream_kernel<2, R, SPLIT_K>, grid, WARPS * WARP, 0, stream, all);
}
}  // namespace

extern "C" {
// warp_rows: rows of w that a warp takes, 16 or 32; every n must be at least that. split_k: how many of the 8
// warps of a block share one K, 8 or (for short K, with 16 rows) 2. prefetch: weights that the next kernel
// reads.
int rwkv_gemm_stream(const GemmPart* parts, int count, int m, int warp_rows, int split_k,
                     const char* prefetch, unsigned prefetch_bytes, cudaStream_t stream) {
    const Prefetch next = {prefetch, prefetch_bytes};
    if (split_k == 2) return run<1, 2>(parts, count, m, next, stream);
    return warp_rows == 32 ? run<2, 8>(parts, count, m, next, stream)
                           : run<1, 8>(parts, count, m, next, stream);
}
}
