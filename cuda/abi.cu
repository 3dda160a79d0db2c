// What Python and the kernels must agree on: sizes and offsets of the structures that both know, in bytes,
// and constants. Host code alone.
//
// Each number is asserted here and exported. Python has them in rwkv_batch/ops/cuda/abi.py, which compares
// its own when a library is loaded, in ops/cuda/feed.py (SequenceRecord) and in sampling/structs_cuda.py (the
// sampler's). Test: test/kernels/test_abi.py.
#include <cstddef>

#include "adapter.cuh"
#include "gemm.cuh"
#include "gemm_tile.cuh"
#include "norm.cuh"
#include "sample_filter.cuh"
#include "sample_row.cuh"
#include "sequence_feed.cuh"
#include "wkv6.cuh"
#include "wkv_prefill.cuh"

struct AbiEntry {
    const char* name;
    long long value;
};

namespace {
template <long long ACTUAL, long long EXPECTED>
constexpr long long same() {
    static_assert(ACTUAL == EXPECTED, "Python must change with this");
    return ACTUAL;
}
}  // namespace

using sample::AdjustInput, sample::BiasEntry, sample::PenaltyEntry, sample::SampleInput, sample::SampleRecord;
using sample::FilterInput, sample::RowFilter;
using sample::GREEDY, sample::NOISE, sample::NUCLEUS, sample::RAPID;

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
    CONSTANT(ADAPTER_TILE, 16),
    CONSTANT(ADAPTER_RANK, 16),
    CONSTANT(ADAPTER_PARTS, 3),
    CONSTANT(ADAPTER_SPLITS, 16),
    CONSTANT(ADAPTER_MOST_RANK, 256),
    CONSTANT(ADAPTER_ALIGNMENT, 8),
    CONSTANT(ADAPTER_ADD, 0),
    CONSTANT(ADAPTER_ADD_SQUARE, 1),
    CONSTANT(ADAPTER_ADD_FLOAT, 2),
    CONSTANT(GREEDY, 0),
    CONSTANT(RAPID, 1),
    CONSTANT(NUCLEUS, 2),
    CONSTANT(NOISE, 3),
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
    SIZE(ReadoutInput, 24),
    MEMBER(ReadoutInput, offsets, 0),
    MEMBER(ReadoutInput, slot_stride, 8),
    MEMBER(ReadoutInput, slot_of, 16),
    SIZE(ChunksInput, 48),
    MEMBER(ChunksInput, counts, 0),
    MEMBER(ChunksInput, chunk_token, 8),
    MEMBER(ChunksInput, chunk_tokens, 16),
    MEMBER(ChunksInput, row_chunk, 24),
    MEMBER(ChunksInput, row_chunks, 32),
    MEMBER(ChunksInput, row_slot, 40),
    SIZE(Wkv6Input, 104),
    MEMBER(Wkv6Input, r, 0),
    MEMBER(Wkv6Input, k, 8),
    MEMBER(Wkv6Input, v, 16),
    MEMBER(Wkv6Input, w, 24),
    MEMBER(Wkv6Input, g, 32),
    MEMBER(Wkv6Input, decay, 40),
    MEMBER(Wkv6Input, bonus, 48),
    MEMBER(Wkv6Input, norm_weight, 56),
    MEMBER(Wkv6Input, norm_bias, 64),
    MEMBER(Wkv6Input, out, 72),
    MEMBER(Wkv6Input, state, 80),
    MEMBER(Wkv6Input, slot_stride, 88),
    MEMBER(Wkv6Input, width, 96),
    SIZE(AdapterPart, 40),
    MEMBER(AdapterPart, x, 0),
    MEMBER(AdapterPart, y, 8),
    MEMBER(AdapterPart, sums, 16),
    MEMBER(AdapterPart, entry, 24),
    MEMBER(AdapterPart, n, 32),
    MEMBER(AdapterPart, k, 36),
    SIZE(AdapterInput, 152),
    MEMBER(AdapterInput, part, 0),
    MEMBER(AdapterInput, weights, 120),
    MEMBER(AdapterInput, slot_stride, 128),
    MEMBER(AdapterInput, tiles, 136),
    MEMBER(AdapterInput, entry_stride, 144),
    MEMBER(AdapterInput, most_rank, 148),
    SIZE(SequenceRecord, 64),
    MEMBER(SequenceRecord, last, 0),
    MEMBER(SequenceRecord, ended, 4),
    MEMBER(SequenceRecord, lag, 8),
    MEMBER(SequenceRecord, stops, 12),
    SIZE(BiasEntry, 16),
    MEMBER(BiasEntry, amount, 0),
    MEMBER(BiasEntry, id, 8),
    MEMBER(BiasEntry, unused, 12),
    SIZE(PenaltyEntry, 16),
    MEMBER(PenaltyEntry, decaying, 0),
    MEMBER(PenaltyEntry, id, 8),
    MEMBER(PenaltyEntry, count, 12),
    SIZE(SampleRecord, 128),
    MEMBER(SampleRecord, temperature, 0),
    MEMBER(SampleRecord, noise, 8),
    MEMBER(SampleRecord, top_p, 16),
    MEMBER(SampleRecord, first, 24),
    MEMBER(SampleRecord, later, 32),
    MEMBER(SampleRecord, decay, 40),
    MEMBER(SampleRecord, flat, 48),
    MEMBER(SampleRecord, per_count, 56),
    MEMBER(SampleRecord, key, 64),
    MEMBER(SampleRecord, position, 72),
    MEMBER(SampleRecord, penalties, 80),
    MEMBER(SampleRecord, capacity, 88),
    MEMBER(SampleRecord, used, 92),
    MEMBER(SampleRecord, bias, 96),
    MEMBER(SampleRecord, bias_count, 104),
    MEMBER(SampleRecord, method, 108),
    MEMBER(SampleRecord, top_k, 112),
    MEMBER(SampleRecord, scale, 116),
    MEMBER(SampleRecord, exempt, 120),
    MEMBER(SampleRecord, unused, 124),
    SIZE(SampleInput, 64),
    MEMBER(SampleInput, logits, 0),
    MEMBER(SampleInput, stride, 8),
    MEMBER(SampleInput, width, 16),
    MEMBER(SampleInput, vocab, 20),
    MEMBER(SampleInput, slots, 24),
    MEMBER(SampleInput, table, 32),
    MEMBER(SampleInput, ids, 40),
    MEMBER(SampleInput, workspace, 48),
    MEMBER(SampleInput, chunk, 56),
    SIZE(RowFilter, 16),
    MEMBER(RowFilter, min_p, 0),
    MEMBER(RowFilter, top_a, 4),
    MEMBER(RowFilter, repetition, 8),
    MEMBER(RowFilter, mask, 12),
    SIZE(FilterInput, 96),
    MEMBER(FilterInput, sample, 0),
    MEMBER(FilterInput, filters, 64),
    MEMBER(FilterInput, masks, 72),
    MEMBER(FilterInput, seen, 80),
    MEMBER(FilterInput, words, 88),
    SIZE(AdjustInput, 104),
    MEMBER(AdjustInput, sample, 0),
    MEMBER(AdjustInput, places, 64),
    MEMBER(AdjustInput, adjusted, 72),
    MEMBER(AdjustInput, top_k, 80),
    MEMBER(AdjustInput, top_p, 88),
    MEMBER(AdjustInput, adjusted_width, 96),
};

extern "C" const AbiEntry* rwkv_abi(int* count) {
    *count = sizeof(ENTRIES) / sizeof(AbiEntry);
    return ENTRIES;
}
