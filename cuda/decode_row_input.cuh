// What a step of one row by one launch (decode_row.cu) reads and writes.
#pragma once
#include "vendor.cuh"

constexpr int ROW_INNER = 24;     // outputs of inner low-rank sides of a block, at most
constexpr int ROW_MIX_COUNT = 6;  // of a time mix
constexpr int ROW_HALF_WAYS = 2;  // sums for each output of a channel mix: adds to one wait for each other

// The low-rank functions, in the order of their outputs in an exchange.
enum RowFunction { ROW_W, ROW_A, ROW_G, ROW_V, ROW_FUNCTIONS };

// How large matrices lie, see decode_row_formats.cuh; ROW_HALF is that of decode_row_half.cu: r, k, v, output
// and key by rows, value [hidden units, C], in fp16.
enum RowForm { ROW_INT4, ROW_WIDE_INT4, ROW_INT8, ROW_INT8_COLUMNS, ROW_HALF, ROW_FORMS };

// Matrices and vectors of a layer, by their places in the table of pointers.
enum RowMatrix {
    ROW_INNER_SIDES,  // [rank, C] fp16 of each function; of layer 0, that of v may be any other of that size
    ROW_OUTER_SIDES = ROW_INNER_SIDES + ROW_FUNCTIONS,  // [C, rank] fp16
    ROW_R = ROW_OUTER_SIDES + ROW_FUNCTIONS,            // as in decode_row_formats.cuh
    ROW_K,
    ROW_VALUES,
    ROW_OUTPUT,
    ROW_KEY,
    ROW_VALUE,
    ROW_SCALES,  // of the six, fp32 of each output; null where they are with the codes
    ROW_NORM1_WEIGHT = ROW_SCALES + 6,
    ROW_NORM1_BIAS,
    ROW_MIXES,  // [6, C]: r, k, v, w, a, g
    ROW_NORM2_WEIGHT,
    ROW_NORM2_BIAS,
    ROW_X_K,
    ROW_HEAD_VECTORS,  // w0, a0, v0, k_k, k_a, r_k, weight and bias of the group norm; v0 null in layer 0
    ROW_POINTERS = ROW_HEAD_VECTORS + 8
};
constexpr int ROW_NORM_VECTORS = ROW_HEAD_VECTORS - ROW_NORM1_WEIGHT;  // what norms read
struct RowLayer {
    unsigned long long at[ROW_POINTERS];
};

struct RowInput {
    const RowLayer* layers;
    const int *tokens, *slots, *lag;  // [1]
    const __half* table;              // [vocabulary, C], which may be in host memory
    float* x;                         // [C], what follows from the last layer
    __half* shift;                    // [layers, 2, C] of slot s at shift + s * shift_stride
    __half* state;                    // [layers, heads, 64, 64], the same
    __half* deferred;                 // [layers, heads, MAX_LAG, DEFERRED_VECTORS, 64], the same
    size_t shift_stride, state_stride, deferred_stride;  // in numbers
    // Zero before the first launch: sums [2, 2, C], of ROW_HALF [2, 1 + ROW_HALF_WAYS, C]; inner [2,
    // model_layers, ranks], of ROW_HALF [2, 3 C + ranks]; launches [1].
    unsigned long long *sums, *inner;
    unsigned* launches;
    int rank[ROW_FUNCTIONS];
    int layer_count, model_layers, heads, slices;  // slices: of 64 hidden units
    // Outputs of inner sides of a block that has a head; of ROW_HALF how many stages of decode_row_wide.cu
    // are under way at once, 0 for what is best.
    int head_rows;
    int form;  // a RowForm
    // Of ROW_HALF alone: the layer norm behind the last layer, [C], and its result [C], as numbers in fp16;
    // what the next kernel reads first, to be fetched into the L2 cache.
    const __half *norm_weight, *norm_bias;
    __half* normed;
    const void* ahead;
    size_t ahead_bytes;
};
