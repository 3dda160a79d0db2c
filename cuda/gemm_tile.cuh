// What decides how gemm_tile.cu divides a GEMM; rwkv_batch/ops/cuda/tile.py chooses it.
#pragma once

constexpr int TILE_K = 64;         // numbers of k side by side, a strip: 128 bytes, the width of the swizzle
constexpr int TILE_W_ROWS = 64;    // of a tile, for each warpgroup
constexpr int TILE_FEW_ROWS = 16;  // of x, up to which codes are multiplied by `mma`, which waits for less
constexpr int TILE_MAX_STAGES = 16;
constexpr int TILE_BARRIER_BYTES = (4 * TILE_MAX_STAGES + 2) * 8;

struct TileShape {
    int x_rows;  // of a tile
    int groups;  // warpgroups that multiply
    int split_k;
    int w_stages, x_stages;  // of the rings
    int partial_sums;        // whether these are the result: y is [split_k, m, n] fp32
};
