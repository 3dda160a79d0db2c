// Launches of the kernel of gemm_tile_kernel.cuh.
#pragma once
#include "gemm_tile_kernel.cuh"

namespace {
// A matrix of numbers of 2 bytes with `columns` of them side by side, as strips of 64 columns: its dimensions
// are the column in a strip, the row, and the strip, and so are those of the box that one copy brings. What
// lies outside reads as zero.
bool map(CUtensorMap* out, const void* matrix, int rows, int columns, int box_rows, int box_strips) {
    return make_tensor_map<3>(out, matrix, {TILE_K, cuuint64_t(rows), cuuint64_t(columns / TILE_K)},
                              {cuuint64_t(columns) * 2, STRIP_BYTES},
                              {TILE_K, cuuint32_t(box_rows), cuuint32_t(box_strips)});
}

template <typename Kernel>
cudaError_t allow_shared(Kernel kernel, int bytes) {
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

template <int TN, typename W>
int launch_tile(TileGemms p, int count, const StreamGemms* beside, cudaStream_t stream) {
    constexpr int STRIPS = strips_for<W>(TN);
    const int rings = w_ring_bytes<W>(stage_bytes<W>(STRIPS) * p.groups * p.w_stages) +
                      STRIPS * TN * p.x_stages * STRIP_BYTES;
    constexpr bool FEW = few<W>(TN), BY_STRIPS = by_strips<W>(TN);
    const int blocks = p.partial_sums ? 1 : p.split_k;  // of a cluster
    const int k_parts = blocks * (FEW && !BY_STRIPS ? 2 : 1);
    if (k_parts > 1)
        p.received_bytes = (TN / 8 + blocks - 1) / blocks * k_parts * p.groups * GROUP_THREADS * 16;
    const int x_scales = W::FP8 ? p.groups * TN * 4 : 0, tile = p.groups * TILE_W_ROWS,
              shared = rings + TILE_BARRIER_BYTES + p.received_bytes + x_scales;
    const int results = TN * tile * 2, gathered = BY_STRIPS ? STRIPS * TN * tile * 4 : 0;
    if (rings < results + gathered) return cudaErrorInvalidValue;
    const dim3 grid((p.m + TN - 1) / TN * p.split_k, (p.n + tile - 1) / tile, count + (beside != nullptr));
    const int threads = (FEW ? 2 : p.groups) * GROUP_THREADS + PRODUCER_WARPS * WARP;
    if constexpr (FEW && !W::TRANSPOSED)
        if (beside) {
            if (p.m > TN || p.partial_sums || shared < int(sizeof(StreamSums<TN / 8, 1>)))
                return cudaErrorInvalidValue;
            const auto kernel = gemm_tile_beside_kernel<TN, W>;
            if (const cudaError_t error = allow_shared(kernel, shared)) return error;
            return launch_clusters(blocks, kernel, grid, threads, shared, stream, p, *beside);
        }
    if (beside) return cudaErrorInvalidValue;
    const auto run = [&](auto kernel) {
        if (const cudaError_t error = allow_shared(kernel, shared)) return int(error);
        return int(launch_clusters(blocks, kernel, grid, threads, shared, stream, p));
    };
    if (!p.partial_sums) return run(gemm_tile_kernel<TN, W, false>);
    if constexpr (has_partial_sums<W>(TN)) return run(gemm_tile_kernel<TN, W, true>);
    return cudaErrorInvalidValue;
}

// What all kinds of weights share. Whether it is valid.
template <typename W>
bool set_up(TileGemms& p, const void* const* x, void* const* y, int count, int m, int n, int k, int square,
            const TileShape& shape) {
    if (W::CODES && shape.groups != 1 && !two_groups<W>(shape.x_rows)) return false;
    if (shape.partial_sums && (count != 1 || square)) return false;
    // Parts are whole pairs of strips or more, so that they are the same for any rows but the fewest.
    const int strips = strips_for<W>(shape.x_rows), unit = strips > 2 ? strips : 2,
              units = (k / TILE_K + unit - 1) / unit;
    p.m = m, p.n = n, p.groups = shape.groups, p.split_k = shape.split_k, p.w_stages = shape.w_stages,
    p.x_stages = shape.x_stages;
    p.square = square, p.strips = k / TILE_K, p.partial_sums = shape.partial_sums;
    const auto within = [](int i, int least, int most) { return i >= least && i <= most; };
    const bool valid = within(count, 1, MAX_PARTS) && m > 0 && n % TILE_W_ROWS == 0 && k % TILE_K == 0 &&
                       within(p.groups, 1, MAX_GROUPS) && within(p.split_k, 1, MAX_SPLIT_K) &&
                       (p.split_k & (p.split_k - 1)) == 0 && within(p.w_stages, 2, TILE_MAX_STAGES) &&
                       within(p.x_stages, 2, TILE_MAX_STAGES);
    if (!valid) return false;
    while (1 << p.split_bits < p.split_k) p.split_bits++;
    p.steps = (k / TILE_K + strips - 1) / strips;
    p.each = (units + p.split_k - 1) / p.split_k * unit / strips;
    for (int i = 0; i < count; i++) {
        p.y[i] = static_cast<__half*>(y[i]);
        if (!map(&p.x[i], x[i], m, k, shape.x_rows, strips)) return false;
    }
    return true;
}

// beside: small GEMMs with the same rows of x, up to 16, in the same launch.
template <typename W>
int launch_tiles(const TileGemms& p, int x_rows, int count, cudaStream_t stream,
                 const StreamGemms* beside = nullptr) {
    if constexpr (W::CODES)
        if (x_rows == 8) return launch_tile<8, W>(p, count, beside, stream);
    switch (x_rows) {
        case 16: return launch_tile<16, W>(p, count, beside, stream);
        case 32: return launch_tile<32, W>(p, count, beside, stream);
        case 48: return launch_tile<48, W>(p, count, beside, stream);
        case 64: return launch_tile<64, W>(p, count, beside, stream);
        case 96: return launch_tile<96, W>(p, count, beside, stream);
        case 128: return launch_tile<128, W>(p, count, beside, stream);
        case 160: return launch_tile<160, W>(p, count, beside, stream);
        case 192: return launch_tile<192, W>(p, count, beside, stream);
        default: break;
    }
    if constexpr (!W::CODES)  // which take more registers than a thread may have
        if (x_rows == 256) return launch_tile<256, W>(p, count, beside, stream);
    return cudaErrorInvalidValue;
}
}  // namespace
