// Products of few rows with weights that stream from memory once: y[m, n] = f(sum over k of x[m, k] w[n, k]), several of them in one launch.
//
//   w [N, K] fp16, x [M, K] fp16, y [M, N] fp16; N a multiple of 16, K of 32; any M, best up to 16
//   f: identity, tanh, sigmoid, or relu squared (at most what fp16 holds)
//
// A warp owns 16 R rows of w and a share of K. w and x go from memory to registers in 16-byte pieces, straight into the operands of
// m16n8k16 tensor-core products: the order of k inside a step of 32 is free as long as w and x agree on it. All of a warp's first loads of
// w are under way before it waits for the kernel that makes x.
// Sums are fp32: first over k inside a warp's share, then over the shares in order. A row's result does not depend on the other rows.
#include "common.cuh"

constexpr int WARPS = 8;
constexpr int MOST_PARTS = 8;

enum Function { IDENTITY = 0, TANH = 1, SIGMOID = 2, RELU_SQUARE = 3 };

struct Product {
    const __half* w;
    const __half* x;
    __half* y;
    int n, k;
    int function;
};

struct Products {
    Product part[MOST_PARTS];
    int blocks[MOST_PARTS];  // of each part
    int m;
};

__device__ __forceinline__ float apply(float x, int function) {
    if (function == TANH) return 1.f - 2.f / (1.f + __expf(2.f * x));
    if (function == SIGMOID) return sigmoid(x);
    if (function == RELU_SQUARE) {
        x = fmaxf(x, 0.f);
        return fminf(x * x, 65504.f);
    }
    return x;
}

// NT: tiles of 8 rows of x. R: tiles of 16 rows of w a warp. SHARES: warps that share one K; the others take further rows of w.
template <int NT, int R, int SHARES>
__global__ void __launch_bounds__(WARPS * WARP, R == 1 ? 2 : 1) product_kernel(const __grid_constant__ Products all) {
    constexpr int STEPS = 8 / R;        // of 32 k, in flight at once
    constexpr int X_STEPS = STEPS * NT > 8 ? 8 / NT : STEPS;
    constexpr int GROUPS = WARPS / SHARES;
    constexpr int ROWS = GROUPS * R * 16;
    __shared__ float sums[WARPS][NT * 8][R * 16 + 1];

    int block = blockIdx.y, which = 0;
    while (block >= all.blocks[which]) block -= all.blocks[which++];
    const Product& p = all.part[which];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, quad = lane % 4;
    const int share = warp % SHARES, row0 = block * ROWS + warp / SHARES * R * 16;
    const int steps = p.k / 32, each = (steps + SHARES - 1) / SHARES;
    const int begin = share * each, end = min(begin + each, steps);
    const int m0 = blockIdx.x * NT * 8;

    const __half* w[R][2];
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int h = 0; h < 2; h++) w[r][h] = p.w + size_t(min(row0 + r * 16 + h * 8 + group, p.n - 1)) * p.k + quad * 8;
    uint4 wv[STEPS][R][2];
#pragma unroll
    for (int u = 0; u < STEPS; u++)
        if (begin + u < end)
#pragma unroll
            for (int r = 0; r < R; r++)
#pragma unroll
                for (int h = 0; h < 2; h++) wv[u][r][h] = load_once(w[r][h] + (begin + u) * 32);
    wait_for_inputs();

    const __half* x[NT];
#pragma unroll
    for (int t = 0; t < NT; t++) x[t] = p.x + size_t(m0 + t * 8 + group) * p.k + quad * 8;
    float acc[R][NT][4] = {};
    for (int s = begin; s < end; s += STEPS) {
#pragma unroll
        for (int first = 0; first < STEPS; first += X_STEPS) {
            uint4 xv[X_STEPS][NT];
#pragma unroll
            for (int u = 0; u < X_STEPS; u++)
#pragma unroll
                for (int t = 0; t < NT; t++) {
                    xv[u][t] = make_uint4(0, 0, 0, 0);
                    if (s + first + u < end && m0 + t * 8 + group < all.m) xv[u][t] = *reinterpret_cast<const uint4*>(x[t] + (s + first + u) * 32);
                }
#pragma unroll
            for (int u = 0; u < X_STEPS; u++) {
                const int at = first + u;
                if (s + at >= end) break;
#pragma unroll
                for (int r = 0; r < R; r++) {
                    const uint4 top = wv[at][r][0], low = wv[at][r][1];
#pragma unroll
                    for (int t = 0; t < NT; t++) {
                        mma(acc[r][t], top.x, low.x, top.y, low.y, xv[u][t].x, xv[u][t].y);
                        mma(acc[r][t], top.z, low.z, top.w, low.w, xv[u][t].z, xv[u][t].w);
                    }
                    if (s + at + STEPS < end)
#pragma unroll
                        for (int h = 0; h < 2; h++) wv[at][r][h] = load_once(w[r][h] + (s + at + STEPS) * 32);
                }
            }
        }
    }
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int t = 0; t < NT; t++)
#pragma unroll
            for (int i = 0; i < 4; i++) sums[warp][t * 8 + quad * 2 + i % 2][r * 16 + group + i / 2 * 8] = acc[r][t][i];
    __syncthreads();
    for (int i = threadIdx.x; i < ROWS * NT * 8; i += WARPS * WARP) {
        const int row = i % ROWS, m = i / ROWS, n = block * ROWS + row;
        float sum = 0.f;
#pragma unroll
        for (int s = 0; s < SHARES; s++) sum += sums[row / (R * 16) * SHARES + s][m][row % (R * 16)];
        if (n < p.n && m0 + m < all.m) p.y[size_t(m0 + m) * p.n + n] = __float2half_rn(apply(sum, p.function));
    }
}

namespace {
template <int R, int SHARES>
int run(const Product* parts, int count, int m, cudaStream_t stream) {
    if (count < 1 || count > MOST_PARTS || m < 1) return cudaErrorInvalidValue;
    Products all = {};
    all.m = m;
    unsigned blocks = 0;
    constexpr int ROWS = WARPS / SHARES * R * 16;
    for (int i = 0; i < count; i++) {
        if (parts[i].n % 16 || parts[i].k % 32) return cudaErrorInvalidValue;
        all.part[i] = parts[i];
        all.blocks[i] = (parts[i].n + ROWS - 1) / ROWS;
        blocks += all.blocks[i];
    }
    if (m <= 8) return launch(product_kernel<1, R, SHARES>, dim3(1, blocks), WARPS * WARP, 0, stream, all);
    return launch(product_kernel<2, R, SHARES>, dim3((m + 15) / 16, blocks), WARPS * WARP, 0, stream, all);
}
}  // namespace

extern "C" {
// How many rows of w a warp takes (16 or 32), and whether K is long enough to be shared by the 8 warps of a block or by 2 of them.
int rwkv_products(const Product* parts, int count, int m, int rows_of_w, int shares, cudaStream_t stream) {
    if (shares == 2) return run<1, 2>(parts, count, m, stream);
    return rows_of_w == 32 ? run<2, 8>(parts, count, m, stream) : run<1, 8>(parts, count, m, stream);
}
}
