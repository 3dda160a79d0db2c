// How the warps of gemm_tile_kernel.cuh multiply, by how w lies in memory. Functions find out which warp they
// run in by themselves: from arguments the compiler makes more instructions of it.
#pragma once
#include "gemm_tile_layout.cuh"

#if HOPPER
constexpr int UNIFORM_ROWS = 64;  // of x, up to which descriptors are worth a shuffle

// An operand of wgmma with TN rows of x.
template <int TN>
__device__ __forceinline__ uint32_t described(uint32_t address) {
    if constexpr (TN <= UNIFORM_ROWS) return hopper::uniform(hopper::operand(address));
    return hopper::operand(address);
}

// acc += strips of 16 rows of w, `a`, times TN rows of x in the TMA's swizzle of 128 bytes, by a warp; what a
// thread has of both and of acc is as with wgmma.
template <int TN, int STRIPS>
__device__ __forceinline__ void multiply_few(float (&acc)[TN / 2],
                                             const uint32_t (&a)[STRIPS * TILE_K / 16][4], uint32_t x,
                                             int lane) {
    const uint32_t from = x + lane % 8 * STRIP_BYTES + (lane / 8 ^ lane % 8) * 16;  // eights of 32 along k
#pragma unroll
    for (int strip = 0; strip < STRIPS; strip++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int chunk = 0; chunk < TN / 8; chunk++) {
                uint32_t b[4];
                load_matrix(b, (from ^ half * 64) + (strip * TN + chunk * 8) * STRIP_BYTES);
                float (&to)[4] = reinterpret_cast<float (&)[4]>(acc[chunk * 4]);
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    const uint32_t (&of_w)[4] = a[strip * TILE_K / 16 + half * 2 + k];
                    mma(to, of_w[0], of_w[1], of_w[2], of_w[3], b[2 * k], b[2 * k + 1]);
                }
            }
}

// Where a block's rings and their barriers are. w_bytes: of a stage.
struct TileRings {
    uint32_t w_ring, x_ring, w_full, w_empty, x_full, x_empty;
    int w_bytes;
};

// Where a lane has its sums of a strip with eight rows of x and 16 of w. gathered: its first of all.
template <int TN>
__device__ __forceinline__ uint32_t place_of_sums(uint32_t gathered, int strip, int chunk, int sixteen) {
    constexpr int CHUNKS = TN / 8, SIXTEENS = TILE_W_ROWS / 16;
    return gathered + ((strip * CHUNKS + chunk) * SIXTEENS + sixteen) * WARP * 16;
}

// Each warp multiplies strips of its own in all stages, and leaves its sums behind the results. Returns where
// a lane's first are.
template <int TN, typename W>
__device__ __forceinline__ uint32_t multiply_strips(const TileGemms& p, const TileRings& r, int steps) {
    using namespace hopper;
    constexpr int STRIPS = strips_for<W>(TN), X_BYTES = STRIPS * TN * STRIP_BYTES, CHUNKS = TN / 8;
    int w_at = 0, w_phase = 0, x_at = 0, x_phase = 0;
    constexpr int SIXTEENS = TILE_W_ROWS / 16;
    const int group = threadIdx.x / GROUP_THREADS, warp = threadIdx.x / WARP - group * 4,
              lane = threadIdx.x % WARP;
    const int strip = group * (GROUP_THREADS / WARP) + warp;
    const typename W::Places places(strip, TN, lane);
    float sums[SIXTEENS][TN / 2] = {};
#pragma unroll 1
    for (int i = 0; i < steps; i++) {
        barrier_wait(r.w_full + w_at * 8, w_phase);
        barrier_wait(r.x_full + x_at * 8, x_phase);
        W::template multiply<TN>(sums, r.w_ring + w_at * r.w_bytes, r.x_ring + x_at * X_BYTES, places);
        fence_async_shared();  // an arrival does not wait for reads, and copies would replace them
        // Every lane for itself, as below, but for x: there one for its warp is 0.8% of a step faster.
        arrive(r.w_empty + w_at * 8);
        sync_warp();
        if (lane == 0) arrive(r.x_empty + x_at * 8);
        if (++w_at == p.w_stages) w_at = 0, w_phase ^= 1;
        if (++x_at == p.x_stages) x_at = 0, x_phase ^= 1;
    }
    // The rings are free for the sums of all strips.
    const uint32_t gathered = r.w_ring + TN * TILE_W_ROWS * 2 + lane * 16;
    sync_some(1, MAX_GROUPS * GROUP_THREADS);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
        for (int i = 0; i < SIXTEENS; i++) {
            const float* const of = sums[i] + 4 * c;
            store_shared(place_of_sums<TN>(gathered, strip, c, i), make_float4(of[0], of[1], of[2], of[3]));
        }
    sync_some(1, MAX_GROUPS * GROUP_THREADS);
    return gathered;
}

// acc += the sums of all strips in their order: a warp of the first warpgroup has 16 rows of w.
template <int TN, typename W>
__device__ __forceinline__ void add_strips(float (&acc)[TN / 2], uint32_t gathered, int warp) {
    constexpr int STRIPS = strips_for<W>(TN), CHUNKS = TN / 8;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
        for (int s = 0; s < STRIPS; s++) {
            const float4 more = hopper::load_shared(place_of_sums<TN>(gathered, s, c, warp));
            acc[4 * c] += more.x, acc[4 * c + 1] += more.y;
            acc[4 * c + 2] += more.z, acc[4 * c + 3] += more.w;
        }
#pragma unroll
    for (int i = 0; i < TN / 2; i++) acc[i] *= W::UNIT;
}

// acc += products of all stages, with codes that become fp16 in registers.
template <int TN, typename W>
__device__ __forceinline__ void multiply_codes(float (&acc)[TN / 2], const TileGemms& p, const TileRings& r,
                                               int steps) {
    using namespace hopper;
    constexpr bool FEW = few<W>(TN), TWO_GROUPS = two_groups<W>(TN);
    constexpr int STRIPS = strips_for<W>(TN), X_BYTES = STRIPS * TN * STRIP_BYTES,
                  W_GROUP_BYTES = stage_bytes<W>(STRIPS);
    const bool signals = threadIdx.x % GROUP_THREADS == 0;
    int w_at = 0, w_phase = 0, x_at = 0, x_phase = 0;
    const int group = threadIdx.x / GROUP_THREADS, warp = threadIdx.x / WARP - group * 4,
              lane = threadIdx.x % WARP;
    constexpr int OWN_STRIPS = FEW ? STRIPS / 2 : STRIPS;
    const int own_strip = FEW ? group * OWN_STRIPS : 0;  // the first
    // Products of one stage after the other: what else the warps do is hidden behind the other blocks'
    // loads.
#pragma unroll 1
    for (int i = 0; i < steps; i++) {
        const uint32_t x = r.x_ring + x_at * X_BYTES, b = FEW ? 0 : described<TN>(x), bits = W::bits();
        barrier_wait(r.w_full + w_at * 8, w_phase);
        uint32_t a[OWN_STRIPS * TILE_K / 16][4];
        W::template operands<STRIPS>(r.w_ring + w_at * r.w_bytes + (TWO_GROUPS ? group * W_GROUP_BYTES : 0),
                                     own_strip * TILE_K / 16, i * STRIPS, warp, lane, bits, a);
        barrier_wait(r.x_full + x_at * 8, x_phase);
        if constexpr (FEW) {
            multiply_few<TN, OWN_STRIPS>(acc, a, x + own_strip * TN * STRIP_BYTES, lane);
            fence_async_shared();  // an arrival does not wait for reads, and copies would replace them
        } else {
#pragma unroll
            for (int k = 0; k < STRIPS * TILE_K / 16; k++) ready(a[k]);
            wgmma_begin();
#pragma unroll
            for (int strip = 0; strip < STRIPS; strip++)
#pragma unroll
                for (int k = 0; k < TILE_K / 16; k++)
                    wgmma_of_registers<TN>(acc, a[strip * TILE_K / 16 + k],
                                           b + (strip * TN * STRIP_BYTES + k * 16 * 2) / 16);
            wgmma_commit();
            wgmma_wait<0>();
            if (signals) arrive(r.x_empty + x_at * 8);
        }
        // Not before the products: they wait for what was read, which an arrival does not. Every lane for
        // itself: one for its warp is no faster, and racecheck takes what the others read for a race.
        arrive(r.w_empty + w_at * 8);
        if constexpr (FEW) arrive(r.x_empty + x_at * 8);
        if (++w_at == p.w_stages) w_at = 0, w_phase ^= 1;
        if (++x_at == p.x_stages) x_at = 0, x_phase ^= 1;
    }
}

// The same with numbers that wgmma reads where they are.
template <int TN, typename W>
__device__ __forceinline__ void multiply_numbers(float (&acc)[TN / 2], const TileGemms& p, const TileRings& r,
                                                 int steps, int groups, int group) {
    using namespace hopper;
    constexpr bool TRANSPOSED = W::TRANSPOSED;
    constexpr int STRIPS = strips_for<W>(TN), X_BYTES = STRIPS * TN * STRIP_BYTES;
    const int group_bytes = (TRANSPOSED ? STRIPS : 1) * TILE_W_ROWS * STRIP_BYTES,
              strip_bytes = (TRANSPOSED ? 1 : groups) * TILE_W_ROWS * STRIP_BYTES;
    const bool signals = threadIdx.x % GROUP_THREADS == 0;
    int w_at = 0, w_phase = 0, x_at = 0, x_phase = 0, w_before = 0, x_before = 0;
#pragma unroll 1
    for (int i = 0; i < steps; i++) {
        const uint32_t a = described<TN>(r.w_ring + w_at * r.w_bytes + group * group_bytes),
                       b = described<TN>(r.x_ring + x_at * X_BYTES);
        barrier_wait(r.w_full + w_at * 8, w_phase);
        barrier_wait(r.x_full + x_at * 8, x_phase);
        wgmma_begin();
#pragma unroll
        for (int strip = 0; strip < STRIPS; strip++)
#pragma unroll
            for (int k = 0; k < TILE_K / 16; k++) {
                const uint32_t of_w =
                                   a +
                                   (strip * strip_bytes + k * 16 * (TRANSPOSED ? TILE_W_ROWS * 2 : 2)) / 16,
                               of_x = b + (strip * TN * STRIP_BYTES + k * 16 * 2) / 16;
                if constexpr (W::FP8)
                    wgmma_fp8<TN>(acc, of_w, of_x);
                else
                    wgmma<TN, TRANSPOSED>(acc, of_w, of_x);
            }
        wgmma_commit();
        wgmma_wait<1>();
        if (i > 0 && signals) arrive(r.w_empty + w_before * 8), arrive(r.x_empty + x_before * 8);
        w_before = w_at, x_before = x_at;
        if (++w_at == p.w_stages) w_at = 0, w_phase ^= 1;
        if (++x_at == p.x_stages) x_at = 0, x_phase ^= 1;
    }
}
#endif
