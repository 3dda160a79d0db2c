// The kernel of gemm_sparse.cu and gemm_sparse8.cu, by how weights lie in memory, and its launcher. The first
// says what it does.
#pragma once
#include "gemm.cuh"
#include "split_sums.cuh"

constexpr int WARPS = 8, THREADS = WARPS * WARP;
constexpr int N_MULTIPLE = 64;
constexpr int MAX_WIDE_BITS = 2;
constexpr int SIXTEEN = 16;  // units of an mma instruction

// A block's shared memory, in this order: sums, h of the listed units [8 rows], the list, scales of columns.
// Up to 16 units more fill the last sixteen.
constexpr int LISTED_BYTES = 16 + 2;  // of one unit
constexpr int STATIC_BYTES = 1024;    // at most, beside it

// Of two words, the lower halves as a pair, and the upper ones.
__device__ __forceinline__ uint32_t lower(uint32_t first, uint32_t second) {
    return __byte_perm(first, second, 0x5410);
}
__device__ __forceinline__ uint32_t upper(uint32_t first, uint32_t second) {
    return __byte_perm(first, second, 0x7632);
}

// What the kernel takes from the kind W of weights:
// Number: of w [K, N].
// LANE_BITS: 1 << LANE_BITS columns are the 16 bytes that a lane loads of a unit.
// STAGES: of 16 units, on their way to a warp. Four are 64 KB for a block, where a multiprocessor needs 40 to
// keep memory busy.
// SCALED: sums are multiplied by `scales` [N].
// multiply(acc, x, b0, b1, bits): acc += 16 bytes of each of four units times h, two columns with an mma.
// four(acc, i, r): of a lane's columns four from 4 i on, row r of its two.
// bits(): what `multiply` needs in a register.
template <typename W>
struct SparseSizes {
    static constexpr int LANE_COLUMNS = 1 << W::LANE_BITS, COLUMN_BITS = W::LANE_BITS + 3;
    static constexpr int COLUMNS = 1 << COLUMN_BITS;        // of a warp
    static constexpr int SUMS_BYTES = WARPS * COLUMNS * 4;  // of one row
    static constexpr int SCALES_BYTES = W::SCALED ? COLUMNS * 4 << MAX_WIDE_BITS : 0;
};

// TOGETHER: whether a cluster adds up the sums over parts of K. 1 << wide_bits warps stand side by side; the
// others of the block share their columns.
template <int M, typename W, bool TOGETHER>
__global__ void LAUNCH_BOUNDS(THREADS, 2)
    gemm_sparse_kernel(const __half* h, const typename W::Number* w, float* partials, int k, int n, int units,
                       int wide_bits, Prefetch weights, const float* scales) {
    using Sizes = SparseSizes<W>;
    using Sums = SplitSums<TOGETHER>;
    constexpr int COLUMNS = Sizes::COLUMNS, LANE_COLUMNS = Sizes::LANE_COLUMNS, STAGES = W::STAGES;
    constexpr bool WHOLE = N_MULTIPLE % COLUMNS == 0;  // a warp's columns are all inside, or none
    extern __shared__ __align__(16) uint8_t raw[];
    __shared__ int found[2][WARPS];
    float* const sums = reinterpret_cast<float*>(raw);
    uint4* const rows = reinterpret_cast<uint4*>(raw + M * Sizes::SUMS_BYTES);
    uint16_t* const list = reinterpret_cast<uint16_t*>(rows + units + SIXTEEN);
    float* const kept_scales = reinterpret_cast<float*>(list + units + SIXTEEN);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, quad = lane % 4;
    const int split = blockIdx.x, begin = split * units, end = min(begin + units, k);
    __shared__ uint64_t barrier;
    const Sums exchange(barrier, M * Sizes::SUMS_BYTES);
    prefetch(weights);
    if constexpr (W::SCALED) {  // of the columns that this block adds up
        const int at = threadIdx.x * 4, kept_bits = wide_bits + Sizes::COLUMN_BITS - Sums::BLOCK_BITS,
                  first = (blockIdx.y << wide_bits) * COLUMNS + ((Sums::together ? split : 0) << kept_bits);
        if (at < 1 << kept_bits && first + at < n)
            copy_async(reinterpret_cast<uint4*>(kept_scales + at), scales + first + at);
        commit_copies();
    }
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
    if constexpr (W::SCALED) wait_copies<0>();
    __syncthreads();

    const int wide = 1 << wide_bits, shares = WARPS >> wide_bits, share = warp >> wide_bits,
              column0 = blockIdx.y * wide * COLUMNS;
    const int own_column = (warp & (wide - 1)) * COLUMNS + group * LANE_COLUMNS,
              column = column0 + own_column;
    const int steps =
        (WHOLE ? column : column - group * LANE_COLUMNS) < n ? (total + SIXTEEN - 1) / SIXTEEN : 0;
    const uint32_t row_bytes = n * uint32_t(sizeof *w), bits = W::bits();
    // A lane beyond the last column loads others, whose sums nothing reads.
    const int loaded = WHOLE ? column : min(column, n - LANE_COLUMNS);
    const char* const from = reinterpret_cast<const char*>(w + size_t(begin) * n + loaded);
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

    float acc[LANE_COLUMNS / 2][4] = {};  // of two columns each
    const uint32_t own_row = shared_address(rows + lane % SIXTEEN);
    for (int s = share; s < steps; s += STAGES * shares) {
#pragma unroll
        for (int u = 0; u < STAGES; u++) {
            const int step = s + u * shares, next = step + STAGES * shares;
            if (step < steps) {
                uint32_t b0, b1;
                load_transposed(b0, b1, own_row + step * SIXTEEN * 16);
                W::multiply(acc, wv[u], b0, b1, bits);
            }
            if (next < steps) fetch(wv[u], next);
        }
    }

    // A lane has rows 2 quad and the next, of its columns. The sums of all warps that share columns lie as
    // [warp][row][column] with the block that adds them up.
    const int kept_bits = wide_bits + Sizes::COLUMN_BITS - Sums::BLOCK_BITS, sources = Sums::BLOCKS * shares,
              place_of_split = Sums::together ? split : 0, source = place_of_split * shares + share,
              first_kept = place_of_split << kept_bits;
    float* const out = partials + size_t(split - place_of_split) * M * n;
    exchange.wait_for_all();
    const int kept = 1 << kept_bits;  // columns that this block adds up
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int m = quad * 2 + r, place = (source * M + m) * kept + (own_column & (kept - 1));
        if (m < M)
#pragma unroll
            for (int i = 0; i < LANE_COLUMNS / 4; i++)
                exchange.put(own_column >> kept_bits, sums + place + i * 4, W::four(acc, i, r));
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
        if constexpr (W::SCALED) {
            const float4 scale = *reinterpret_cast<const float4*>(kept_scales + (i * 4 & (kept - 1)));
            sum.x *= scale.x, sum.y *= scale.y, sum.z *= scale.z, sum.w *= scale.w;
        }
        *reinterpret_cast<float4*>(out + size_t(m) * n + place) = sum;
    }
}

namespace {
int units_of_part(int k) { return (k / 8 + SPARSE_SPLITS - 1) / SPARSE_SPLITS * 8; }

template <typename W>
int shared_bytes(int m, int k) {
    using Sizes = SparseSizes<W>;
    return m * Sizes::SUMS_BYTES + (units_of_part(k) + SIXTEEN) * LISTED_BYTES + Sizes::SCALES_BYTES;
}

// Whether this GPU has the shared memory for it.
template <typename W>
int sparse_fits(int m, int k) {
    int device = 0, most = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    return shared_bytes<W>(m, k) + STATIC_BYTES <= most;
}

template <int M, typename W>
int run(const __half* h, const typename W::Number* w, const float* scales, float* partials, int k, int n,
        bool together, Prefetch weights, cudaStream_t stream) {
    constexpr int COLUMNS = SparseSizes<W>::COLUMNS;
    const int units = units_of_part(k), warps = (n + COLUMNS - 1) / COLUMNS, shared = shared_bytes<W>(M, k);
    if (n % N_MULTIPLE || k % 8 || units > 1 << 16) return cudaErrorInvalidValue;
    const auto blocks_of = [&](int bits) { return (warps + (1 << bits) - 1) >> bits; };
    int bits = 0;
    while (bits < MAX_WIDE_BITS && blocks_of(bits) * SPARSE_SPLITS > multiprocessors()) bits++;
    const dim3 grid(SPARSE_SPLITS, blocks_of(bits));
    if (together && !on_hopper()) return cudaErrorNotSupported;
    const auto allow_shared = [&](auto kernel) {
        return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    };
    if constexpr (!AMD_FORMS)
        if (together) {
            const auto kernel = gemm_sparse_kernel<M, W, true>;
            if (const cudaError_t error = allow_shared(kernel)) return error;
            return launch_clusters(SPARSE_SPLITS, kernel, grid, THREADS, shared, stream, h, w, partials, k, n,
                                   units, bits, weights, scales);
        }
    const auto kernel = gemm_sparse_kernel<M, W, false>;
    if (const cudaError_t error = allow_shared(kernel)) return error;
    return launch(kernel, grid, THREADS, shared, stream, h, w, partials, k, n, units, bits, weights, scales);
}

// m: 1, 2, 4 or 8. scales: of columns, if W is SCALED. together: on Hopper, whether P is 1. weights: that the
// next kernel reads.
template <typename W>
int run_sparse(const __half* h, const typename W::Number* w, const float* scales, float* partials, int m,
               int k, int n, bool together, Prefetch weights, cudaStream_t stream) {
    switch (m) {
        case 1: return run<1, W>(h, w, scales, partials, k, n, together, weights, stream);
        case 2: return run<2, W>(h, w, scales, partials, k, n, together, weights, stream);
        case 4: return run<4, W>(h, w, scales, partials, k, n, together, weights, stream);
        case 8: return run<8, W>(h, w, scales, partials, k, n, together, weights, stream);
        default: return cudaErrorInvalidValue;
    }
}
}  // namespace
