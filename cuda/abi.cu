// What Python and the kernels must agree on: sizes and offsets of the structures that both know, in bytes,
// and constants. Host code alone.
//
// Each number is asserted here and exported; rwkv_batch/ops/cuda/abi.py compares it when a library is loaded.
// SequenceRecord is a
// numpy type in feed.py. Test: test/kernels/test_abi.py.
#include <cstddef>

#include "gemm.cuh"
#include "gemm_tile.cuh"
#include "norm.cuh"
#include "sequence_feed.cuh"
#include "wkv_prefill.cuh"

struct AbiEntry {
    const char* name;
    long long value;
};

namespace {
template <long long ACTUAL, long long EXPECTED>
constexpr long long same() {
    static_assert(ACTUAL == EXPECTED, "rwkv_batch/ops/cuda/abi.py must change with this");
    return ACTUAL;
}
}  // namespace

#define CONSTANT(name, expected) {#name, same<name, expected>()}
#define SIZE(type, expected) {#type, same<sizeof(type), expected>()}
#define MEMBER(type, member, expected) {#type "." #member, same<offsetof(type, member), expected>()}

constexpr AbiEntry ENTRIES[] = {
    CONSTANT(IDENTITY, 0),
    CONSTANT(TANH, 1),
    CONSTANT(SIGMOID, 2),
    CONSTANT(RELU_SQUARE, 3),
    CONSTANT(HEAD, 64),
    CONSTANT(CHUNK, 16),
    CONSTANT(MAX_LAG, 2),
    CONSTANT(DEFERRED_VECTORS, 5),
    CONSTANT(STOPS, 13),
    CONSTANT(SPARSE_SPLITS, 8),
    CONSTANT(TILE_W_ROWS, 64),
    CONSTANT(TILE_K, 64),
    CONSTANT(TILE_MAX_STAGES, 16),
    CONSTANT(TILE_BARRIER_BYTES, 528),
    SIZE(NormInput, 80),
    MEMBER(NormInput, x, 0),
    MEMBER(NormInput, y, 8),
    MEMBER(NormInput, partials, 16),
    MEMBER(NormInput, partial_count, 24),
    MEMBER(NormInput, partial_rows, 28),
    MEMBER(NormInput, tokens, 32),
    MEMBER(NormInput, table, 40),
    MEMBER(NormInput, gather, 48),
    MEMBER(NormInput, weight, 56),
    MEMBER(NormInput, bias, 64),
    MEMBER(NormInput, width, 72),
    SIZE(PackedRowsInput, 32),
    MEMBER(PackedRowsInput, row_of, 0),
    MEMBER(PackedRowsInput, first, 8),
    MEMBER(PackedRowsInput, last, 16),
    MEMBER(PackedRowsInput, slots, 24),
    SIZE(GemmPart, 40),
    MEMBER(GemmPart, w, 0),
    MEMBER(GemmPart, x, 8),
    MEMBER(GemmPart, y, 16),
    MEMBER(GemmPart, n, 24),
    MEMBER(GemmPart, k, 28),
    MEMBER(GemmPart, activation, 32),
    SIZE(TileShape, 20),
    MEMBER(TileShape, x_rows, 0),
    MEMBER(TileShape, groups, 4),
    MEMBER(TileShape, split_k, 8),
    MEMBER(TileShape, w_stages, 12),
    MEMBER(TileShape, x_stages, 16),
    SIZE(TimeMixInput, 192),
    MEMBER(TimeMixInput, r, 0),
    MEMBER(TimeMixInput, k, 8),
    MEMBER(TimeMixInput, v, 16),
    MEMBER(TimeMixInput, w, 24),
    MEMBER(TimeMixInput, a, 32),
    MEMBER(TimeMixInput, mix, 40),
    MEMBER(TimeMixInput, g, 48),
    MEMBER(TimeMixInput, v_first, 56),
    MEMBER(TimeMixInput, w0, 64),
    MEMBER(TimeMixInput, a0, 72),
    MEMBER(TimeMixInput, v0, 80),
    MEMBER(TimeMixInput, k_k, 88),
    MEMBER(TimeMixInput, k_a, 96),
    MEMBER(TimeMixInput, r_k, 104),
    MEMBER(TimeMixInput, norm_weight, 112),
    MEMBER(TimeMixInput, norm_bias, 120),
    MEMBER(TimeMixInput, out, 128),
    MEMBER(TimeMixInput, state, 136),
    MEMBER(TimeMixInput, slot_stride, 144),
    MEMBER(TimeMixInput, width, 152),
    MEMBER(TimeMixInput, tile_counter, 160),
    MEMBER(TimeMixInput, deferred, 168),
    MEMBER(TimeMixInput, deferred_stride, 176),
    MEMBER(TimeMixInput, lag, 184),
    SIZE(ChunksInput, 48),
    MEMBER(ChunksInput, counts, 0),
    MEMBER(ChunksInput, chunk_token, 8),
    MEMBER(ChunksInput, chunk_tokens, 16),
    MEMBER(ChunksInput, row_chunk, 24),
    MEMBER(ChunksInput, row_chunks, 32),
    MEMBER(ChunksInput, row_slot, 40),
    SIZE(SequenceRecord, 64),
    MEMBER(SequenceRecord, last, 0),
    MEMBER(SequenceRecord, ended, 4),
    MEMBER(SequenceRecord, lag, 8),
    MEMBER(SequenceRecord, stops, 12),
};

extern "C" const AbiEntry* rwkv_abi(int* count) {
    *count = sizeof(ENTRIES) / sizeof(AbiEntry);
    return ENTRIES;
}
