// Prefill: the recurrence of wkv.cuh over packed rows of two tokens and more, chunk after chunk of 16 tokens
// on tensor cores.
//
// Within a chunk that begins at state S, let W_t be the product of the decays of its tokens up to t, M that
// of its first eight, and
//   kk~_t = kk_t W_{t-1} / M,   r~_t = r_t W_t / M,   k~_t = k_t M / W_t,   b~_t = kk_t a_t M / W_t
//   (all within 128 times the original)
//   L = lower(kk~ b~^T), A = lower(kk~ k~^T) without the diagonal
//   Lr = lower(r~ b~^T), Ar = lower(r~ k~^T) with it;   N = (1 + L)^-1
// What a chunk does is then linear in S and in its own values V [16, value]:
//   S~ = S diag(M)
//   y  = S~ (r~ - Lr N kk~)^T + V^T (Ar - Lr N A)^T
//   S' = (S~ + V^T (k~ - (N A)^T b~) - (S~ (N kk~)^T) b~) diag(W_16 / M)
// Three kernels: wkv_prefill_prepare.cu computes these four [16, key] matrices, V and the part of y that
// comes from V for every chunk and head at once, wkv_prefill_scan.cu goes through the chunks of a row with S
// in registers, wkv_prefill_finish.cu does group norm, bonus and gate.
//
// Precision: gates, decays, N and its products are fp32; operands of the tensor cores are fp16, sums fp32. k~
// - (N A)^T b~, in which large numbers may cancel, is made of operands of two halves each. S is carried in
// fp32 and read as fp16; y goes from the scan to the last kernel as fp16 in units of Y_UNIT. Sums over keys
// run in steps of 16.
//
// The numbers of a chunk and head are `ChunkData`. wkv_prefill_layout.cuh says in which order.
#pragma once
#include <cstddef>
#include "wkv.cuh"
#if AMD_FORMS
#include "../hip/wkv_prefill_layout.cuh"
#else
#include "wkv_prefill_layout.cuh"
#endif

constexpr int CHUNK = 16;
constexpr int TILES = HEAD / 16;  // of 16 values, or of 16 keys
constexpr float Y_UNIT = 64.f;    // of y in a chunk's data: y may pass 65504, and the group norm's epsilon
                                  // hides what is lost below 0.004
constexpr int STRIDE =
    HEAD + 8;  // halves from token to token in shared memory: 8 rows of 16 bytes come from different banks

struct ChunkData {
    uint4 kk[TILES][WARP];  // N kk~
    uint4 r[TILES][WARP];   // r~ - Lr N kk~
    uint4 k[TILES][WARP];   // k~ - (N A)^T b~
    uint4 b[TILES][WARP];   // -b~
    float middle[HEAD];     // M
    float end[HEAD];        // W_16 / M
    struct {
        uint4 v[WARP];
        uint4 y[WARP];  // in units of Y_UNIT, from V alone; the scan adds what comes from S
    } values[TILES];
    float own[CHUNK];  // r . k r_k
    float unused[16];  // up to a multiple of 128 bytes
};

// Which tokens make up the chunks, and which chunks a row; on the device.
struct ChunksInput {
    const int* counts;        // chunks, rows
    const int* chunk_token;   // [chunks] the first token
    const int* chunk_tokens;  // [chunks] 1 to 16
    const int* row_chunk;     // [rows] the first chunk
    const int* row_chunks;    // [rows]
    const int* row_slot;      // [rows]
};

__device__ __forceinline__ uint32_t pack(const float* pair) { return to_finite_half2(pair[0], pair[1]); }

__device__ __forceinline__ void unpack(float* pair, uint32_t x) {
    const float2 both = to_float2(x);
    pair[0] = both.x, pair[1] = both.y;
}

__device__ __forceinline__ uint32_t pack_y(const float* pair) {
    return to_finite_half2(pair[0] / Y_UNIT, pair[1] / Y_UNIT);
}

__device__ __forceinline__ void unpack_y(float* pair, uint32_t x) {
    unpack(pair, x);
    pair[0] *= Y_UNIT, pair[1] *= Y_UNIT;
}

// A grid that fits on the GPU at once, no larger than needed.
template <typename... Arguments>
cudaError_t resident(void (*kernel)(Arguments...), int threads, size_t shared, size_t needed,
                     unsigned& blocks) {
    cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared));
    int each = 0;
    if (error == cudaSuccess)
        error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads, shared);
    const size_t most = size_t(each) * multiprocessors();
    blocks = unsigned(needed < most ? needed : most);
    return error;
}

// The three kernels, in this order. chunks, rows: the most there can be; `packed` counts them. chunk_data:
// [chunks, heads].
int wkv_prefill_prepare(const TimeMixInput& in, const ChunksInput& packed, int chunks, ChunkData* chunk_data,
                        cudaStream_t stream);
int wkv_prefill_scan(const TimeMixInput& in, const ChunksInput& packed, int rows, ChunkData* chunk_data,
                     bool fp32, cudaStream_t stream);
int wkv_prefill_finish(const TimeMixInput& in, const ChunksInput& packed, int chunks,
                       const ChunkData* chunk_data, const ReadoutInput* readout, cudaStream_t stream);
