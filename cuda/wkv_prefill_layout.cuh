// The order of a chunk's matrices of 16 x 16 in memory on NVIDIA GPUs: that in which the lanes of a warp hold
// them for m16n8k16 mma instructions, 16 bytes each. Key 16 q + 2 i + e is at column 8 i + 2 q + e of
// matrices with keys, so that a lane has 16 neighbours of each of its rows of S.
#pragma once
#include "vendor.cuh"

// The pair of columns where a lane's keys 2 l and 2 l + 1 stand.
DEVICE int place_of_keys(int lane) { return lane % 8 * 4 + lane / 8; }

// Of a matrix of 16 values and 16 tokens, values lane / 4 (x, z) and 8 below (y, w): tokens 2 (lane % 4) and
// the next (x, y), and those 8 later (z, w).
DEVICE uint4 value_words(const uint4* tile, int lane) { return tile[lane]; }
