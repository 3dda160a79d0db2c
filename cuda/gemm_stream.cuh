// What the blocks of gemm_stream.cu do, which says how, and of launches that have such blocks beside others.
#pragma once
#include "gemm.cuh"

constexpr int STREAM_WARPS = 8;  // of a block
constexpr int STREAM_PARTS = 8;  // GEMMs in one launch

struct StreamGemms {
    GemmPart part[STREAM_PARTS];
    int blocks[STREAM_PARTS];  // tiles of each part
    int tiles, m;
    Prefetch prefetch;
};

// Where this warp's part of one tile of rows of w lies.
struct StreamTile {
    const __half* w;  // this lane's first numbers: of row `group` at step 0
    const __half* x;
    int k, begin, end, which, block;
};

template <int R, int SPLIT_K>
__device__ __forceinline__ StreamTile locate(const StreamGemms& all, int tile) {
    constexpr int ROWS = STREAM_WARPS / SPLIT_K * R * 16;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    StreamTile t = {};
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

// The parts' sums of a tile.
template <int NT, int R>
using StreamSums = float[STREAM_WARPS][NT * 8][R * 16 + 1];

// NT: tiles of 8 rows of x. R: tiles of 16 rows of w a warp. SPLIT_K: warps that share one K; the others take
// further rows of w.
// STEPS: of 32 k, in flight at once.
// A block takes tile `tile` of w and every `stride`-th from there on. The first loads of its next tile are
// under way before the sums of this one are added up. m0: its first row of x. `sync` waits for the
// STREAM_WARPS warps.
template <int NT, int R, int SPLIT_K, int STEPS, typename Sync>
__device__ __forceinline__ void stream_gemms(const StreamGemms& all, int tile, int stride, int m0,
                                             StreamSums<NT, R>& sums, Sync sync) {
    constexpr int X_STEPS = STEPS * NT > 4 ? 4 / NT : STEPS;
    constexpr int GROUPS = STREAM_WARPS / SPLIT_K;
    constexpr int ROWS = GROUPS * R * 16;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, quad = lane % 4;

    uint4 wv[STEPS][R][2];
    const auto fetch = [](uint4(&to)[R][2], const __half* from, int k, int step) {
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
            for (int h = 0; h < 2; h++) to[r][h] = load_once(from + (r * 16 + h * 8) * k + step * 32);
    };
    StreamTile now = locate<R, SPLIT_K>(all, tile);
#pragma unroll
    for (int u = 0; u < STEPS; u++)
        if (now.begin + u < now.end) fetch(wv[u], now.w, now.k, now.begin + u);
    prefetch(all.prefetch);
    wait_for_inputs();

    while (tile < all.tiles) {
        tile += stride;
        const StreamTile next = locate<R, SPLIT_K>(all, tile);
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
        sync();
        const GemmPart& p = all.part[now.which];
        for (int i = threadIdx.x; i < ROWS * NT * 8; i += STREAM_WARPS * WARP) {
            const int row = i % ROWS, m = i / ROWS, own = row / (R * 16);
            const int n = min(now.block * ROWS + own * R * 16, p.n - R * 16) + row % (R * 16);
            float sum = 0.f;
#pragma unroll
            for (int split = 0; split < SPLIT_K; split++)
                sum += sums[own * SPLIT_K + split][m][row % (R * 16)];
            if (m0 + m < all.m) p.y[size_t(m0 + m) * p.n + n] = __float2half_rn(activate(sum, p.activation));
        }
        sync();
        now = next;
    }
}

namespace {
// The parts of a launch, for warps that take R times 16 rows of w. Whether it is valid.
template <int R, int SPLIT_K>
bool set_up_stream(StreamGemms& all, const GemmPart* parts, int count, int m) {
    constexpr int ROWS = STREAM_WARPS / SPLIT_K * R * 16;
    if (count < 1 || count > STREAM_PARTS || m < 1) return false;
    all.m = m;
    for (int i = 0; i < count; i++) {
        if (parts[i].n % 16 || parts[i].n < R * 16 || parts[i].k % 32) return false;
        all.part[i] = parts[i];
        all.blocks[i] = (parts[i].n + ROWS - 1) / ROWS;
        all.tiles += all.blocks[i];
    }
    return true;
}
}  // namespace
