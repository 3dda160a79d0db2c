// GEMMs of few rows with weights as codes, on any GPU, up to three of one shape in one launch: y[m, n] =
// f(scale[n] times the sum over k of x[m, k] w[n, k]), or without the scale where w has scales of groups.
//
//   w [N, K] in blocks of codes (codes.cuh): int8, fp8, fp6, fp5, int4 or nf4; scale [N] fp32, of all but the
//     last two
//   x [M, K] fp16, y [M, N] fp16; N a multiple of 16, K of 64; any M, best up to 32
//   f: identity, or relu squared (at most what fp16 holds)
//
// Reference: f((x @ w.T) * scale) in torch, with w of int4 and nf4 rounded to fp16. Binding:
// CodeKernels.gemm_codes. Test: test/kernels/test_gemm_codes.py.
//
// As gemm_stream.cu: a warp owns 16 R rows of w and an eighth of K; codes go from memory to registers in
// pieces of 16 bytes, become fp16 there, and are operands of m16n8k16 mma instructions without a way through
// shared memory. All of a warp's first loads of codes are under way before it waits for the kernel that makes
// x. Where rows do not fill the last tile, it overlaps the one before, and computes the same numbers again.
// Of each 32 rows of x, or 16 where a warp has more rows of w, the codes are read once. x is read once for
// each 16 R rows of w, from the caches: 8 rows of it are as many bytes as 16 of w of 8 bits.
// Sums are fp32: first over k inside a warp's part (in blocks of 64, in order), then over the parts in order,
// then times the scale. A row's result does not depend on the other rows, nor on how many there are.
#include "codes.cuh"
#include "gemm.cuh"

constexpr int WARPS = 8;  // that share one K
constexpr int MAX_PARTS = 3;

struct CodedGemms {
    const uint8_t* w[MAX_PARTS];
    const float* scale[MAX_PARTS];
    const __half* x[MAX_PARTS];
    __half* y[MAX_PARTS];
    int blocks;  // tiles of each part
    int tiles, m, n, k, activation;
    Prefetch prefetch;
};

// Where this warp's part of one tile of rows of w lies.
struct CodeTile {
    const uint8_t* w;
    const __half* x;  // this lane's first numbers of row 0
    int begin, end;   // blocks along k
    int which, row;   // part, and its first row of w
};

template <typename Format, int R>
__device__ __forceinline__ CodeTile locate(const CodedGemms& all, int tile) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    CodeTile t = {};
    if (tile >= all.tiles) return t;
    const int steps = all.k / CODE_K, each = (steps + WARPS - 1) / WARPS;
    t.which = tile / all.blocks;
    t.row = min(tile % all.blocks * R * CODE_ROWS, all.n - R * CODE_ROWS);
    t.begin = warp * each;
    t.end = min(t.begin + each, steps);
    t.w = all.w[t.which] + Format::row_bytes(size_t(t.row / CODE_ROWS), steps);
    t.x = all.x[t.which] + lane % 4 * 16;
    return t;
}

// NT: tiles of 8 rows of x. R: tiles of 16 rows of w a warp.
// A block takes every gridDim.y-th tile of w. The first loads of its next tile are under way before the sums
// of this one are added up.
template <typename Format, int NT, int R>
__global__ void LAUNCH_BOUNDS(WARPS* WARP, 2) gemm_codes_kernel(const __grid_constant__ CodedGemms all) {
    constexpr int STEPS = 4 / R;  // blocks of 64 k, in flight at once
    constexpr int X_STEPS = STEPS * NT > 4 ? 4 / NT : STEPS;
    constexpr int ROWS = R * CODE_ROWS;
    __shared__ float sums[WARPS][NT * 8][ROWS + 1];
    __shared__ uint32_t table[Format::TABLE ? Format::TABLE : 1];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, quad = lane % 4;
    const int m0 = blockIdx.x * NT * 8, row_bytes = Format::row_bytes(1, all.k / CODE_K);

    typename Format::Held held[STEPS][R];
    const auto fetch = [&](typename Format::Held(&to)[R], const uint8_t* from, int step) {
#pragma unroll
        for (int r = 0; r < R; r++)
            Format::load(to[r], from + size_t(r) * row_bytes + Format::begin(step), step, lane);
    };
    int tile = blockIdx.y;
    CodeTile now = locate<Format, R>(all, tile);
#pragma unroll
    for (int u = 0; u < STEPS; u++)
        if (now.begin + u < now.end) fetch(held[u], now.w, now.begin + u);
    prefetch(all.prefetch);
    if constexpr (Format::TABLE != 0) {
        Format::fill(table);
        __syncthreads();
    }
    wait_for_inputs();

    while (tile < all.tiles) {
        tile += gridDim.y;
        const CodeTile next = locate<Format, R>(all, tile);
        float acc[R][NT][4] = {};
        int s = now.begin;
        do {
            const bool last = s + STEPS >= now.end;
#pragma unroll
            for (int first = 0; first < STEPS; first += X_STEPS) {
                uint4 xv[X_STEPS][NT][2];
#pragma unroll
                for (int u = 0; u < X_STEPS; u++)
#pragma unroll
                    for (int t = 0; t < NT; t++) {
                        const int m = m0 + t * 8 + group, step = s + first + u;
                        xv[u][t][0] = xv[u][t][1] = make_uint4(0, 0, 0, 0);
                        if (step < now.end && m < all.m) {
                            const __half* from = now.x + size_t(m) * all.k + step * CODE_K;
                            xv[u][t][0] = load16(from), xv[u][t][1] = load16(from + 8);
                        }
                    }
#pragma unroll
                for (int u = 0; u < X_STEPS; u++) {
                    const int at = first + u;
                    if (s + at < now.end)
#pragma unroll
                        for (int r = 0; r < R; r++) {
                            uint32_t a[4][4];
                            Format::operands(held[at][r], table, a);
#pragma unroll
                            for (int t = 0; t < NT; t++)
#pragma unroll
                                for (int half = 0; half < 2; half++) {
                                    const uint4 x = xv[u][t][half];
                                    const uint32_t (&one)[4] = a[2 * half], (&two)[4] = a[2 * half + 1];
                                    mma(acc[r][t], one[0], one[1], one[2], one[3], x.x, x.y);
                                    mma(acc[r][t], two[0], two[1], two[2], two[3], x.z, x.w);
                                }
                        }
                    if (last ? next.begin + at < next.end : s + at + STEPS < now.end)
                        fetch(held[at], last ? next.w : now.w, last ? next.begin + at : s + at + STEPS);
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
                    sums[warp][t * 8 + quad * 2 + i % 2][r * CODE_ROWS + group + i / 2 * 8] = acc[r][t][i];
        __syncthreads();
        for (int i = threadIdx.x; i < ROWS * NT * 8; i += WARPS * WARP) {
            const int row = i % ROWS, m = i / ROWS, n = now.row + row;
            float sum = 0.f;
#pragma unroll
            for (int part = 0; part < WARPS; part++) sum += sums[part][m][row];
            if constexpr (Format::SCALED) sum *= all.scale[now.which][n];
            if (m0 + m < all.m)
                all.y[now.which][size_t(m0 + m) * all.n + n] = __float2half_rn(activate(sum, all.activation));
        }
        __syncthreads();
        now = next;
    }
}

namespace {
template <typename Format, int R>
int run(const CodedGemms& all, cudaStream_t stream) {
    constexpr int MOST = R == 1 ? 4 : 2;  // tiles of x: AMD GPUs have no registers for more
    const int most = 2 * multiprocessors(), rows = all.m <= 8 ? 8 : all.m <= 16 ? 16 : MOST * 8;
    const dim3 grid((all.m + rows - 1) / rows, all.tiles < most ? all.tiles : most);
    if (rows == 8) return launch(gemm_codes_kernel<Format, 1, R>, grid, WARPS * WARP, 0, stream, all);
    return rows == 16 ? launch(gemm_codes_kernel<Format, 2, R>, grid, WARPS * WARP, 0, stream, all)
                      : launch(gemm_codes_kernel<Format, MOST, R>, grid, WARPS * WARP, 0, stream, all);
}

template <typename Format>
int run(const CodedGemms& all, int warp_rows, cudaStream_t stream) {
    if (warp_rows == 64) {
        if constexpr (Format::WIDE) return run<Format, 4>(all, stream);
        return cudaErrorInvalidValue;
    }
    return warp_rows == 32 ? run<Format, 2>(all, stream) : run<Format, 1>(all, stream);
}
}  // namespace

extern "C" {
// format: a CodeFormat; scale is for those of has_output_scales. warp_rows: rows of w that a warp takes, 16,
// 32 or, of most formats, 64; n must be at least that. next: weights that the next kernel reads.
int rwkv_gemm_codes(const void* const* w, const void* const* scale, const void* const* x, void* const* y,
                    int count, int m, int n, int k, int format, int square, int warp_rows, const char* next,
                    unsigned next_bytes, cudaStream_t stream) {
    if (count < 1 || count > MAX_PARTS || m < 1 || n % CODE_ROWS || n < warp_rows || k < CODE_K || k % CODE_K)
        return cudaErrorInvalidValue;
    CodedGemms all = {};
    all.m = m, all.n = n, all.k = k, all.activation = square ? RELU_SQUARE : IDENTITY;
    all.prefetch = {next, next_bytes};
    all.blocks = (n + warp_rows - 1) / warp_rows;
    all.tiles = count * all.blocks;
    for (int i = 0; i < count; i++) {
        all.w[i] = static_cast<const uint8_t*>(w[i]);
        all.scale[i] = has_output_scales(format) ? static_cast<const float*>(scale[i]) : 0;
        all.x[i] = static_cast<const __half*>(x[i]);
        all.y[i] = static_cast<__half*>(y[i]);
    }
    switch (format) {
        case CODES_INT8: return run<codes::Int8>(all, warp_rows, stream);
        case CODES_FP8: return run<codes::Fp8>(all, warp_rows, stream);
        case CODES_INT4: return run<codes::Int4>(all, warp_rows, stream);
        case CODES_NF4: return run<codes::Nf4>(all, warp_rows, stream);
        case CODES_FP6: return run<codes::Fp6>(all, warp_rows, stream);
        case CODES_FP5: return run<codes::Fp5>(all, warp_rows, stream);
        case CODES_WIDE_INT4: return run<codes::WideInt4>(all, warp_rows, stream);
    }
    return cudaErrorInvalidValue;
}
}
