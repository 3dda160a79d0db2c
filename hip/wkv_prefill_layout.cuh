// The order of a chunk's matrices of 16 x 16 in memory on AMD GPUs: row by row. Columns are what is summed
// over when a matrix is an operand: keys of kk and r, whose rows are tokens; tokens of k, b, v and y, whose
// rows are keys or values.
#pragma once
#include "primitives.cuh"

DEVICE int place_of_keys(int lane) { return lane; }

DEVICE uint4 value_words(const uint4* tile, int lane) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(tile) + lane / 4 * 8 + lane % 4;
    return make_uint4(words[0], words[64], words[4], words[68]);
}
