// A GEMM for few rows without the weights of hidden units that are zero in all of them: the value projection
// of the channel mix.
//
//   h [M, K] fp16 (after relu squared), w [K, N] fp16: one run of N numbers for each hidden unit
//   M is 1, 2, 4 or 8, N a multiple of 64, K of 8
//   partials [P, M, N] fp32: sums over P parts of K; the kernel that reads them adds them up in order. P is 1
//   on Hopper, else SPARSE_SPLITS
//
// Reference: h @ w in torch. Binding: Kernels.gemm_sparse. Test: test/kernels/test_gemm_sparse.py.
//
// A block owns up to 256 columns and an eighth of K. It first lists its units that are not zero in some row,
// with their h of all rows. A warp then streams 64 columns of the weights of listed units, 16 units at a
// time, from memory straight into the operands of m16n8k16 mma instructions: two units' words, one half of
// each, make the pairs along k, and 16 columns the rows of the product. The warps of a block that have the
// same columns take groups of sixteen units in turn, so that every one is busy however few are active.
// On Hopper the eight blocks of a cluster share columns, send their sums to each other and each add up an
// eighth of the columns: the norm that comes next has one partial sum to read instead of eight.
// Sums are fp32: over a warp's sixteens in order, over the warps of a part of K in order, over the parts in
// order. A row's sums depend on the other rows only by the sixteens that its units fall into.
#include "gemm.cuh"
#include "split_sums.cuh"

constexpr int WARPS = 8, THREADS = WARPS * WARP;
constexpr int COLUMNS = 64;  // of a warp
constexpr int MAX_WIDE_BITS = 2;
constexpr int SIXTEEN = 16;  // units of an mma instruction
constexpr int STAGES = 4;    // of 16 units, on their way to a warp: 64 KB for a block, where a multiprocessor
                             // needs 40 to keep memory busy

// A block's shared memory, in this order: sums, h of the listed units [8 rows], the list. Up to 16 units more
// fill the last sixteen.
constexpr int SUMS_BYTES = WARPS * COLUMNS * 4;  // of one row
constexpr int LISTED_BYTES = 16 + 2;             // of one unit
constexpr int STATIC_BYTES = 1024;               // at most, beside it

// Of two words, the lower halves as a pair, and the upper ones.
__device__ __forceinline__ uint32_t lower(uint32_t first, uint32_t second) {
    return __byte_perm(first, second, 0x5410);
}
__device__ __forceinline__ uint32_t upper(uint32_t first, uint32_t second) {
    return __byte_perm(first, second, 0x7632);
}

// 1 << wide_bits warps stand side by side; the others of the block share their columns.
template <int M>
__global__ void LAUNCH_BOUNDS(THREADS, 2)
    gemm_sparse_kernel(const __half* h, const __half* w, float* partials, int k, int n, int units,
                       int wide_bits, Prefetch weights) {
    extern __shared__ __align__(16) uint8_t raw[];
    __shared__ int found[2][WARPS];
    float* const sums = reinterpret_cast<float*>(raw);
    uint4* const rows = reinterpret_cast<uint4*>(raw + M * SUMS_BYTES);
    uint16_t* const list = reinterpret_cast<uint16_t*>(rows + units + SIXTEEN);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, quad = lane % 4;
    const int split = blockIdx.x, begin = split * units, end = min(begin + units, k);
    __shared__ uint64_t barrier;
    const SplitSums exchange(barrier, M * SUMS_BYTES);
    prefetch(weights);
    wait_for_inputs();

    int total = 0;
    for (int base = 0, round = 0; base < units; base += THREADS * 8, round ^= 1) {
        const int first = base + threadIdx.x * 8;  // of this thread's eight units
        uint32_t of[8][4] = {}, any[4] = {};
        if (begin + first < end)
#pragma unroll
            for (int m = 0; m < M; m++) {
                const uint4 x = *reinterpret_cast<const uint4*>(h + size_t(m) * k + begin + first);
                of[m][0] = x.x, of[m][1] = x.y, of[m][2] = x.z, of[m][3] = x.w;
            }
        unsigned live = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) {
#pragma unroll
            for (int m = 0; m < M; m++) any[j] |= of[m][j];
            if (any[j] & 0x7fff) live |= 1 << 2 * j;
            if (any[j] & 0x7fff0000) live |= 2 << 2 * j;
        }
        const int mine = __popc(live);
        int at = mine;
#pragma unroll
        for (int offset = 1; offset < WARP; offset *= 2) {
            const int before = shuffle_up(at, offset);
            if (lane >= offset) at += before;
        }
        if (lane == WARP - 1) found[round][warp] = at;
        __syncthreads();
        at += total - mine;
#pragma unroll
        for (int i = 0; i < WARPS; i++) {
            const int more = found[round][i];
            if (i < warp) at += more;
            total += more;
        }
#pragma unroll
        for (int u = 0; u < 8; u++) {
            const auto pair = [&](int m) {
                return u % 2 ? upper(of[m][u / 2], of[m + 1][u / 2]) : lower(of[m][u / 2], of[m + 1][u / 2]);
            };
            if (live >> u & 1) {
                list[at] = uint16_t(first + u);
                rows[at++] = make_uint4(pair(0), pair(2), pair(4), pair(6));
            }
        }
    }
    // The last sixteen is filled up with the first unit of this part of K, times zero.
    if (threadIdx.x < SIXTEEN)
        list[total + threadIdx.x] = 0, rows[total + threadIdx.x] = make_uint4(0, 0, 0, 0);
    __syncthreads();

    const int wide = 1 << wide_bits, shares = WARPS >> wide_bits, share = warp >> wide_bits,
              column0 = blockIdx.y * wide * COLUMNS;
    const int own_column = (warp & (wide - 1)) * COLUMNS + group * 8, column = column0 + own_column;
    const int steps = column < n ? (total + SIXTEEN - 1) / SIXTEEN : 0;
    const uint32_t row_bytes = n * 2u;
    const char* const from = reinterpret_cast<const char*>(w + size_t(begin) * n + column);
    // Of a sixteen, a lane's units are those whose products it feeds: 2 quad, the next, and those eight
    // later.
    const auto fetch = [&](uint4(&to)[4], int step) {
        const uint32_t* const two = reinterpret_cast<const uint32_t*>(list + step * SIXTEEN) + quad;
        const uint32_t low = two[0], high = two[4];
        to[0] = load_once(from + uint64_t(low & 0xffff) * row_bytes),
        to[1] = load_once(from + uint64_t(low >> 16) * row_bytes);
        to[2] = load_once(from + uint64_t(high & 0xffff) * row_bytes),
        to[3] = load_once(from + uint64_t(high >> 16) * row_bytes);
    };
    uint4 wv[STAGES][4];
#pragma unroll
    for (int u = 0; u < STAGES; u++)
        if (share + u * shares < steps) fetch(wv[u], share + u * shares);

    float acc[4][4] = {};  // of two columns each
    const uint32_t own_row = shared_address(rows + lane % SIXTEEN);
    for (int s = share; s < steps; s += STAGES * shares) {
#pragma unroll
        for (int u = 0; u < STAGES; u++) {
            const int step = s + u * shares, next = step + STAGES * shares;
            if (step < steps) {
                uint32_t b0, b1;
                load_transposed(b0, b1, own_row + step * SIXTEEN * 16);
                const auto multiply = [&](float (&c)[4], uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3) {
                    mma(c, lower(w0, w1), upper(w0, w1), lower(w2, w3), upper(w2, w3), b0, b1);
                };
                const uint4(&x)[4] = wv[u];
                multiply(acc[0], x[0].x, x[1].x, x[2].x, x[3].x),
                    multiply(acc[1], x[0].y, x[1].y, x[2].y, x[3].y);
                multiply(acc[2], x[0].z, x[1].z, x[2].z, x[3].z),
                    multiply(acc[3], x[0].w, x[1].w, x[2].w, x[3].w);
            }
            if (next < steps) fetch(wv[u], next);
        }
    }

    // A lane has rows 2 quad and the next, of eight columns. The sums of all warps that share columns lie as
    // [warp][row][column] with the block that adds them up.
    static_assert(COLUMNS == 1 << 6);
    const int kept_bits = wide_bits + 6 - SplitSums::BLOCK_BITS, sources = SplitSums::BLOCKS * shares,
              place_of_split = SplitSums::together ? split : 0, source = place_of_split * shares + share,
              first_kept = place_of_split << kept_bits;
    float* const out = partials + size_t(split - place_of_split) * M * n;
    exchange.wait_for_all();
    const int kept = 1 << kept_bits;  // columns that this block adds up
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int m = quad * 2 + r, place = (source * M + m) * kept + (own_column & (kept - 1));
        if (m < M)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float4 sum =
                    make_float4(acc[2 * i][r], acc[2 * i][2 + r], acc[2 * i + 1][r], acc[2 * i + 1][2 + r]);
                exchange.put(own_column >> kept_bits, sums + place + i * 4, sum);
            }
    }
    exchange.wait();
#pragma unroll 1
    for (int i = threadIdx.x; i < M * kept / 4; i += THREADS) {
        const int m = i * 4 >> kept_bits, place = column0 + first_kept + (i * 4 & (kept - 1));
        if (place >= n) continue;
        float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
        for (int s = 0; s < sources; s++) {
            const float4 more = *reinterpret_cast<const float4*>(sums + s * M * kept + i * 4);
            sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
        }
        *reinterpret_cast<float4*>(out + size_t(m) * n + place) = sum;
    }
}

namespace {
int units_of_part(int k) { return (k / 8 + SPARSE_SPLITS - 1) / SPARSE_SPLITS * 8; }
int shared_bytes(int m, int k) { return m * SUMS_BYTES + (units_of_part(k) + SIXTEEN) * LISTED_BYTES; }

template <int M>
int run(const __half* h, const __half* w, float* partials, int k, int n, Prefetch weights,
        cudaStream_t stream) {
    const int units = units_of_part(k), warps = n / COLUMNS, shared = shared_bytes(M, k);
    if (n % COLUMNS || k % 8 || units > 1 << 16) return cudaErrorInvalidValue;
    if (const cudaError_t error =
            cudaFuncSetAttribute(gemm_sparse_kernel<M>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared))
        return error;
    const auto blocks_of = [&](int bits) { return (warps + (1 << bits) - 1) >> bits; };
    int bits = 0;
    while (bits < MAX_WIDE_BITS && blocks_of(bits) * SPARSE_SPLITS > multiprocessors()) bits++;
    const dim3 grid(SPARSE_SPLITS, blocks_of(bits));
    return on_hopper() ? launch_clusters(SPARSE_SPLITS, gemm_sparse_kernel<M>, grid, THREADS, shared, stream,
                                         h, w, partials, k, n, units, bits, weights)
                       : launch(gemm_sparse_kernel<M>, grid, THREADS, shared, stream, h, w, partials, k, n,
                                units, bits, weights);
}
}  // namespace

extern "C" {
// Whether this GPU has the shared memory for it.
int rwkv_gemm_sparse_fits(int m, int k) {
    int device = 0, most = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    return shared_bytes(m, k) + STATIC_BYTES <= most;
}

// m: 1, 2, 4 or 8. prefetch: weights that the next kernel reads.
int rwkv_gemm_sparse(const __half* h, const __half* w, float* partials, int m, int k, int n,
                     const char* prefetch, unsigned prefetch_bytes, cudaStream_t stream) {
    const Prefetch next = {prefetch, prefetch_bytes};
    switch (m) {
        case 1: return run<1>(h, w, partials, k, n, next, stream);
        case 2: return run<2>(h, w, partials, k, n, next, stream);
        case 4: return run<4>(h, w, partials, k, n, next, stream);
        case 8: return run<8>(h, w, partials, k, n, next, stream);
        default: return cudaErrorInvalidValue;
    }
}
}
