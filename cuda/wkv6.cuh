// What a launch of wkv6.cu works on.
#pragma once
#include "common.cuh"

struct Wkv6Input {
    const __half *r, *k, *v, *w, *g;
    const __half *decay, *bonus, *norm_weight, *norm_bias;
    __half* out;
    void* state;
    size_t slot_stride;  // in numbers
    int width;
};
