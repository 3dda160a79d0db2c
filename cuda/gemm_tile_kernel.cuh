// The kernel of gemm_tile.cu, gemm_tile8.cu, gemm_tile4.cu and gemm_tile_fp8.cu, by how w lies in memory. The
// first says what it does.
#pragma once
#include "gemm_stream.cuh"
#include "gemm_tile_multiply.cuh"

// Its blocks; those of a z have the GEMM `part`. PARTIAL: as TileShape::partial_sums.
template <int TN, typename W, bool PARTIAL = false>
__device__ __forceinline__ void tile_gemms(const TileGemms& p, int part) {
#if HOPPER
    using namespace hopper;
    constexpr bool TRANSPOSED = W::TRANSPOSED, FEW = few<W>(TN), BY_STRIPS = by_strips<W>(TN),
                   TWO_GROUPS = two_groups<W>(TN);
    constexpr int STRIPS = strips_for<W>(TN), X_BYTES = STRIPS * TN * STRIP_BYTES;
    constexpr int CHUNKS = TN / 8;  // eight rows of x each: four numbers of a thread
    extern __shared__ __align__(1024) uint8_t raw[];
    constexpr int W_GROUP_BYTES = stage_bytes<W>(STRIPS);
    const int w_bytes = p.groups * W_GROUP_BYTES, chunk_bytes = p.groups * GROUP_THREADS * 16;
    const uint32_t w_ring = shared_address(raw), x_ring = w_ring + w_ring_bytes<W>(p.w_stages * w_bytes),
                   w_full = x_ring + p.x_stages * X_BYTES, w_empty = w_full + TILE_MAX_STAGES * 8,
                   x_full = w_empty + TILE_MAX_STAGES * 8, x_empty = x_full + TILE_MAX_STAGES * 8,
                   summed = x_empty + TILE_MAX_STAGES * 8, received = w_full + TILE_BARRIER_BYTES;
    const int split = PARTIAL ? blockIdx.x & (p.split_k - 1) : cluster_rank(),
              x0 = (blockIdx.x >> p.split_bits) * TN, w0 = blockIdx.y * p.groups * TILE_W_ROWS;
    const int begin = min(split * p.each, p.steps), steps = min(p.each, p.steps - begin);
    // The blocks of a cluster divide the results among themselves to add them up.
    const int blocks = PARTIAL ? 1 : p.split_k, rank = PARTIAL ? 0 : split;
    const int own = (CHUNKS + blocks - 1) >> (PARTIAL ? 0 : p.split_bits), first = min(rank * own, CHUNKS),
              last = min(first + own, CHUNKS);
    const int group = threadIdx.x / GROUP_THREADS, warp = threadIdx.x / WARP - group * 4,
              lane = threadIdx.x % WARP;
    // Of few rows two warpgroups share the strips of a stage, so K has twice the parts, unless these are
    // added up first.
    constexpr bool TWICE = FEW && !BY_STRIPS;
    const int groups = FEW ? 2 : p.groups, k_parts = TWICE ? 2 * blocks : blocks,
              k_part = TWICE ? 2 * rank + group : rank;
    const bool loads_w = group == groups && warp == 0;

    uint32_t w_to = w_ring, w_stage = 0;
    int w_strip = begin * STRIPS;
    const auto load_codes = [&](int g, uint32_t barrier) {  // of a warpgroup
        const uint32_t to = w_to + g * W_GROUP_BYTES;
        if constexpr (TRANSPOSED) {
            load_box_of_rows(to, &p.w[part], w0 + g * TILE_W_ROWS, w_strip * TILE_K, barrier, READ_ONCE);
        } else if (W::TILES) {
            const unsigned row =
                TWO_GROUPS ? min(blockIdx.y * p.groups + g, p.n / TILE_W_ROWS - 1u) : blockIdx.y;
            const uint8_t* const tile = p.tiles[part] + tile_offset<W>(row, p.strips, w_strip);
            // Groups of strips, each in one piece.
            constexpr int GROUP = STRIPS < W::GROUP_STRIPS ? 1 : W::GROUP_STRIPS,
                          BYTES = stage_bytes<W>(GROUP);
            const int there = (min(STRIPS, p.strips - w_strip) + GROUP - 1) / GROUP;
            load_bytes(to, tile, there * BYTES, barrier, READ_ONCE);
            // Beyond K, where x is zero, are numbers too: what was there before may be none.
#pragma unroll 1
            for (int i = there; i < STRIPS / GROUP; i++)
                load_bytes(to + i * BYTES, tile, BYTES, barrier, READ_ONCE);
        } else {
            constexpr int BOX = STRIPS < 2 ? 1 : 2;  // strips
#pragma unroll
            for (int i = 0; i < STRIPS; i += BOX)
                load_box_of_rows(to + i * W::TILE_BYTES, &p.w[part], (w_strip + i) * TILE_K,
                                 w0 + g * TILE_W_ROWS, barrier, READ_ONCE);
        }
    };
    const auto load_w = [&](bool leads) {
        const uint32_t barrier = w_full + w_stage * 8;
        if (leads) {
            arrive_and_expect(barrier, w_bytes);
            if constexpr (W::CODES) {
#pragma unroll 1
                for (int g = 0; g < (TWO_GROUPS ? p.groups : 1); g++) load_codes(g, barrier);
            } else if (TRANSPOSED) {
#pragma unroll 1
                for (int g = 0; g < p.groups; g++)
                    load_box(w_to + g * STRIPS * TILE_W_ROWS * STRIP_BYTES, &p.w[part], w_strip * TILE_K,
                             w0 / 64 + g, barrier, READ_ONCE);
            } else {
                load_box(w_to, &p.w[part], w0, w_strip, barrier, READ_ONCE);
            }
        }
        w_strip += STRIPS, w_to += w_bytes;
        if (++w_stage == p.w_stages) w_stage = 0, w_to = w_ring;
    };
    const int ahead = min(p.w_stages, steps);
    if (loads_w) {
        constexpr int X_READERS = BY_STRIPS ? GROUP_THREADS / WARP : FEW ? GROUP_THREADS : 1;  // of a group
        const int w_readers = groups * (W::CODES ? GROUP_THREADS : 1), x_readers = groups * X_READERS;
        if (lane < p.w_stages)
            barrier_init(w_full + lane * 8, 1), barrier_init(w_empty + lane * 8, w_readers);
        if (lane < p.x_stages)
            barrier_init(x_full + lane * 8, 1), barrier_init(x_empty + lane * 8, x_readers);
        if (lane == 0) barrier_init(summed, 1);
        barriers_ready();
        sync_warp();
        const bool leads = elect();
#pragma unroll 1
        for (int i = 0; i < ahead; i++) load_w(leads);
    }
    if (blocks > 1) {
        cluster_arrive_relaxed();
        cluster_wait();
    } else {
        __syncthreads();
    }

    if (group == groups) {
        const bool leads = elect();
        if (loads_w) {
            int phase = 0;
#pragma unroll 1
            for (int i = ahead; i < steps; i++) {
                barrier_wait(w_empty + w_stage * 8, phase);
                load_w(leads);
                if (w_stage == 0) phase ^= 1;
            }
            if constexpr (W::CODES) prefetch(p.prefetch, lane, WARP);
        } else {
            if (leads && blocks > 1 && last > first)
                arrive_and_expect(summed, (last - first) * k_parts * chunk_bytes);
            wait_for_inputs();
            uint32_t to = x_ring, stage = 0, phase = 1;  // the phase before the first counts as over
            int strip = begin * STRIPS;
#pragma unroll 1
            for (int i = 0; i < steps; i++) {
                barrier_wait(x_empty + stage * 8, phase);
                if (leads) {
                    arrive_and_expect(x_full + stage * 8, X_BYTES);
                    load_box(to, &p.x[part], x0, strip, x_full + stage * 8, READ_AGAIN);
                }
                strip += STRIPS, to += X_BYTES;
                if (++stage == p.x_stages) stage = 0, phase ^= 1, to = x_ring;
            }
        }
        return;
    }

    float acc[TN / 2];
    clear(acc);
    const TileRings rings = {w_ring, x_ring, w_full, w_empty, x_full, x_empty, w_bytes};
    if constexpr (BY_STRIPS) {
        const uint32_t gathered = multiply_strips<TN, W>(p, rings, steps);
        if (group) return;
        add_strips<TN, W>(acc, gathered, warp);
    } else if constexpr (W::CODES) {
        multiply_codes<TN, W>(acc, p, rings, steps);
    } else {
        multiply_numbers<TN, W>(acc, p, rings, steps, p.groups, group);
    }
    float x_scale[2] = {};  // of rows of x, shared among the threads of a warpgroup
    if constexpr (W::FP8)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = threadIdx.x % GROUP_THREADS + i * GROUP_THREADS;
            if (row < TN && x0 + row < p.m) x_scale[i] = p.x_scales[part][x0 + row];
        }
    wgmma_wait<0>();

    // The rings are free for results: eight rows of 64 numbers for each chunk and warpgroup.
    if constexpr (!BY_STRIPS) sync_some(1, groups * GROUP_THREADS);
    const int rows_group = FEW ? 0 : group, thread = threadIdx.x % GROUP_THREADS;
    const uint32_t staged = w_ring + rows_group * TN * TILE_W_ROWS * 2;
    float scale = 1.f, scale_below = 1.f;  // of this thread's two rows of w
    const uint32_t x_scales = received + p.received_bytes + group * TN * 4;
    if constexpr (W::FP8) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = threadIdx.x % GROUP_THREADS + i * GROUP_THREADS;
            if (row < TN) store_shared(x_scales + row * 4, x_scale[i]);
        }
        sync_some(2 + group, GROUP_THREADS);
    }
    if constexpr (W::SCALED) {
        const float* const scales = p.scales[part] + w0 + rows_group * TILE_W_ROWS + warp * 16 + lane / 4;
        if (w0 + rows_group * TILE_W_ROWS < p.n) scale = scales[0], scale_below = scales[8];
    }
    const auto put = [&](int chunk, float4 v) {
        if constexpr (W::SCALED) v.x *= scale, v.y *= scale, v.z *= scale_below, v.w *= scale_below;
        if constexpr (W::FP8) {
            const float2 of_x = load_shared2(x_scales + (chunk * 8 + lane % 4 * 2) * 4);
            v.x *= of_x.x, v.y *= of_x.y, v.z *= of_x.x, v.w *= of_x.y;
        }
        if constexpr (PARTIAL) {
            const int row = x0 + chunk * 8 + lane % 4 * 2,
                      column = w0 + rows_group * TILE_W_ROWS + warp * 16 + lane / 4;
            float* const to = reinterpret_cast<float*>(p.y[0]) + (size_t(split) * p.m + row) * p.n + column;
            if (column >= p.n) return;
            if (row < p.m) to[0] = v.x, to[8] = v.z;
            if (row + 1 < p.m) to[p.n] = v.y, to[p.n + 8] = v.w;
            return;
        }
        if (p.square) {
            v = make_float4(fmaxf(v.x, 0.f), fmaxf(v.y, 0.f), fmaxf(v.z, 0.f), fmaxf(v.w, 0.f));
            v = make_float4(fminf(v.x * v.x, MAX_HALF), fminf(v.y * v.y, MAX_HALF),
                            fminf(v.z * v.z, MAX_HALF), fminf(v.w * v.w, MAX_HALF));
        }
        const int row = chunk * 8 + lane % 8, piece = warp * 2 + lane / 8 % 2;
        store_transposed(staged + row * TILE_W_ROWS * 2 + (piece ^ row % 8) * 16, to_half2(v.x, v.y),
                         to_half2(v.z, v.w));
    };
    if (k_parts > 1) {
        const uint32_t slot = received + (FEW ? thread : threadIdx.x) * 16;
        const bool alone = TWICE && blocks == 1;  // the block is no cluster
        int owner = 0, place = 0;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            const float4 v = make_float4(acc[4 * c], acc[4 * c + 1], acc[4 * c + 2], acc[4 * c + 3]);
            const uint32_t to = slot + (place * k_parts + k_part) * chunk_bytes;
            if (alone)
                store_shared(to, v);
            else
                send_to(owner, to, summed, v);
            if (++place == own) place = 0, owner++;
        }
        if (alone) sync_some(1, groups * GROUP_THREADS);
        if (TWICE && group) return;  // the other one waits for what this one has sent
        if (!alone && last > first) barrier_wait_cluster(summed, 0);
#pragma unroll 1
        for (int c = first; c < last; c++) {
            float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
            for (int s = 0; s < k_parts; s++) {
                const float4 more = load_shared(slot + ((c - first) * k_parts + s) * chunk_bytes);
                sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
            }
            put(c, sum);
        }
    } else {
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
            put(c, make_float4(acc[4 * c], acc[4 * c + 1], acc[4 * c + 2], acc[4 * c + 3]));
    }
    if constexpr (PARTIAL) return;
    sync_some(2 + group, GROUP_THREADS);
    const int piece = thread % 8, column = w0 + rows_group * TILE_W_ROWS + piece * 8;
#pragma unroll 2
    for (int row = first * 8 + thread / 8; row < last * 8; row += GROUP_THREADS / 8) {
        if (x0 + row >= p.m || column >= p.n) continue;
        const float4 v = load_shared(staged + row * TILE_W_ROWS * 2 + (piece ^ row % 8) * 16);
        store(p.y[part] + size_t(x0 + row) * p.n + column, v);
    }
#endif
}

template <int TN, typename W, bool PARTIAL>
__global__ void LAUNCH_BOUNDS(TILE_THREADS, least_blocks<W>(TN))
    gemm_tile_kernel(const __grid_constant__ TileGemms p) {
    tile_gemms<TN, W, PARTIAL>(p, blockIdx.z);
}

// The same of few rows of x, and in the first z blocks of gemm_stream.cu. These multiply small matrices
// meanwhile, for which memory would be waited for in a launch of their own.
template <int TN, typename W>
__global__ void LAUNCH_BOUNDS(TILE_THREADS, least_blocks<W>(TN))
    gemm_tile_beside_kernel(const __grid_constant__ TileGemms p, const __grid_constant__ StreamGemms beside) {
    if (blockIdx.z) {
        tile_gemms<TN, W>(p, blockIdx.z - 1);
        return;
    }
    constexpr int STEPS = least_blocks<W>(TN) > 2 ? 2 : 4;  // as registers allow
    extern __shared__ __align__(1024) uint8_t raw[];
    if (threadIdx.x < STREAM_WARPS * WARP)
        stream_gemms<TN / 8, 1, STREAM_WARPS, STEPS>(
            beside, blockIdx.y * gridDim.x + blockIdx.x, gridDim.x * gridDim.y, 0,
            *reinterpret_cast<StreamSums<TN / 8, 1>*>(raw), [] { sync_some(1, STREAM_WARPS * WARP); });
}
