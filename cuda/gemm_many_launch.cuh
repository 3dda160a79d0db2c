// Launches of the kernel of gemm_many.cuh.
#pragma once
#include "gemm_many.cuh"
#include "gemm_tile_launch.cuh"

namespace {
// Whether there are such tiles, by what a launch has besides p's GEMMs.
template <typename W, int GROUPS, int TN, typename Small>
constexpr bool has_tiles() {
    constexpr bool fp16 = !W::CODES && !W::FP8;
    if (std::is_same_v<Small, SplitSums>) return fp16 && GROUPS * TN <= 320;
    if (std::is_same_v<Small, PartsInTurn>) return fp16 && GROUPS == 2 && (TN == 128 || TN == 160);
    if (std::is_same_v<Small, SmallGemms>) return fp16 && !W::TRANSPOSED && GROUPS <= 2 && GROUPS * TN > 80;
    return TN > 80;
}

inline int tiles_of(const ManyGemms& p, const SmallGemms& small) { return p.tiles + small.tiles[MAX_SMALL]; }
template <typename Small>
int tiles_of(const ManyGemms& p, const Small&) {
    return p.tiles;
}

// x_rows: of a tile, one of SIZES.
template <typename W, typename Small, int GROUPS, int TN, int... SIZES>
int launch_many_of(const ManyGemms& p, const Small& small, int x_rows, cudaStream_t stream) {
    if constexpr (has_tiles<W, GROUPS, TN, Small>())
        if (x_rows == TN) {
            using Tile = ManyTile<W, GROUPS, TN>;
            const auto kernel = gemm_many_kernel<W, GROUPS, TN, Small>;
            if (const cudaError_t error = allow_shared(kernel, Tile::SHARED)) return error;
            const int tiles = tiles_of(p, small), blocks = multiprocessors();
            return launch(kernel, tiles < blocks ? tiles : blocks, Tile::THREADS, Tile::SHARED, stream, p,
                          small);
        }
    if constexpr (sizeof...(SIZES) > 0)
        return launch_many_of<W, Small, GROUPS, SIZES...>(p, small, x_rows, stream);
    return cudaErrorInvalidValue;
}

template <typename W, typename Small>
int launch_many_with(const ManyGemms& p, const Small& small, const TileShape& shape, cudaStream_t stream) {
    const int rows = shape.x_rows;
    return shape.groups == 1   ? launch_many_of<W, Small, 1, 80, 160, 192, 256>(p, small, rows, stream)
           : shape.groups == 2 ? launch_many_of<W, Small, 2, 80, 128, 160, 192, 256>(p, small, rows, stream)
           : shape.groups == 3 ? launch_many_of<W, Small, 3, 160, 192, 256>(p, small, rows, stream)
                               : launch_many_of<W, Small, 4, 128, 160>(p, small, rows, stream);
}

// Whether these can be in a launch of p's.
inline bool set_up_small(SmallGemms& small, const ManyGemms& p, const GemmPart* parts, int count,
                         const TileShape& shape) {
    const int w_rows = shape.groups * TILE_W_ROWS;
    for (int i = 0; i < MAX_SMALL; i++) {
        small.tiles[i + 1] = small.tiles[i];
        if (i >= count) continue;
        const GemmPart& part = parts[i];
        if (part.n < 16 || part.n % 16 || part.k != p.steps * TILE_K) return false;
        small.y[i] = part.y, small.n[i] = part.n, small.activation[i] = part.activation;
        small.tiles[i + 1] += p.x_tiles * ((part.n + w_rows - 1) / w_rows);
        if (!map(&small.w[i], part.w, part.n, part.k, w_rows, 1) ||
            !map(&small.x[i], part.x, p.m, part.k, shape.x_rows, 1))
            return false;
    }
    return count <= MAX_SMALL;
}

// p: with scales, if there are, and with maps of w, if it is codes by columns. k: numbers of two bytes.
// beside: small GEMMs, with Halves. y is sums of parts of K with one GEMM in fp16 alone. Otherwise split_k is
// the number of parts of K that are added up in their order.
template <typename W>
int launch_many(ManyGemms& p, const void* const* w, const void* const* x, void* const* y, int count, int m,
                int n, int k, int square, const TileShape& shape, cudaStream_t stream,
                const GemmPart* beside = nullptr, int beside_count = 0) {
    const int groups = shape.groups, rows = shape.x_rows, w_rows = groups * TILE_W_ROWS;
    if (!on_hopper()) return cudaErrorNotSupported;
    if (count < 1 || count > MAX_PARTS || m < 1 || n % TILE_W_ROWS || k % TILE_K || groups < 1 ||
        groups > 4 || rows < 1 || rows > 256)
        return cudaErrorInvalidValue;
    const int parts = shape.partial_sums ? shape.split_k : count;
    if (shape.partial_sums && (count > 1 || square || parts < 1 || k % (parts * TILE_K)))
        return cudaErrorInvalidValue;
    p.m = m, p.n = n, p.steps = k / TILE_K / (shape.partial_sums ? parts : 1), p.square = square;
    p.x_tiles = (m + rows - 1) / rows, p.w_tiles = (n + w_rows - 1) / w_rows;
    p.tiles = p.x_tiles * p.w_tiles * parts;
    for (int i = 0; i < count; i++) {
        p.y[i] = static_cast<__half*>(y[i]);
        const bool mapped = W::CODES        ? true
                            : W::TRANSPOSED ? map(&p.w[i], w[i], k, n, TILE_K, 1)
                                            : map(&p.w[i], w[i], n, k, w_rows, 1);
        p.codes[i] = static_cast<const uint8_t*>(w[i]);
        if (!mapped || !map(&p.x[i], x[i], m, k, rows, 1)) return cudaErrorNotSupported;
    }
    if (beside_count) {
        SmallGemms small = {};
        if (shape.partial_sums || !set_up_small(small, p, beside, beside_count, shape))
            return cudaErrorInvalidValue;
        return launch_many_with<W>(p, small, shape, stream);
    }
    if (shape.partial_sums)
        return launch_many_with<W>(p, SplitSums{static_cast<float*>(y[0])}, shape, stream);
    if (shape.split_k > 1) {
        // As `set_up` of gemm_tile_launch.cuh has it: whole pairs of strips.
        const int pairs = (p.steps + 1) / 2, each = (pairs + shape.split_k - 1) / shape.split_k * 2;
        return launch_many_with<W>(p, PartsInTurn{each}, shape, stream);
    }
    return launch_many_with<W>(p, NoGemms(), shape, stream);
}
}  // namespace
