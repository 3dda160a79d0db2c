// Prefill: the recurrence of wkv.cuh over packed rows of two tokens and more, chunk after chunk of 16 tokens on tensor cores.
//
// Within a chunk that begins at state S, let W_t be the product of the decays of its tokens up to t, M that of its first eight, and
//   kk~_t = kk_t W_{t-1} / M,   r~_t = r_t W_t / M,   k~_t = k_t M / W_t,   b~_t = kk_t a_t M / W_t
//   (all within 128 times the original)
//   L = lower(kk~ b~^T), A = lower(kk~ k~^T) without, Lr = lower(r~ b~^T), Ar = lower(r~ k~^T) with the diagonal;   N = (1 + L)^-1
// What a chunk does is then linear in S and in its own values V [16, value]:
//   y  = S~ (r~ - Lr N kk~)^T + V^T (Ar - Lr N A)^T                                                S~ = S diag(M)
//   S' = (S~ + V^T (k~ - (N A)^T b~) - (S~ (N kk~)^T) b~) diag(W_16 / M)
// Three kernels: `prepare` makes these four [16, key] matrices, V and the part of y that comes from V for every chunk and head at once,
// `scan` walks through the chunks of a row with S in registers, `finish` does group norm, bonus and gate.
//
// Precision: gates, decays, N and its products are fp32; operands of the tensor cores are fp16, sums fp32. k~ - (N A)^T b~, in which large
// numbers may cancel, is made of operands of two halves each. S is carried in fp32 and read as fp16; y goes from `scan` to `finish` as fp16
// in units of Y_UNIT. Sums over keys run in steps of 16.
//
// A chunk's numbers for one head are an `Item`, in the order in which the lanes of a warp hold them for m16n8k16 products. Key
// 16 q + 2 i + e stands at column 8 i + 2 q + e of these matrices, so that a lane has 16 neighbours of each of its rows of S.
#pragma once
#include <cstddef>
#include "wkv.cuh"

constexpr int CHUNK = 16;
constexpr int TILES = HEAD / 16;          // of 16 values, or of 16 keys
constexpr float Y_UNIT = 64.f;            // of y in an item: y may pass 65504, and the group norm's epsilon hides what is lost below 0.004
constexpr int STRIDE = HEAD + 8;          // halves from token to token in shared memory: 8 rows of 16 bytes come from different banks

struct Item {
    uint4 kk[TILES][WARP];      // N kk~
    uint4 r[TILES][WARP];       // r~ - Lr N kk~
    uint4 k[TILES][WARP];       // k~ - (N A)^T b~
    uint4 b[TILES][WARP];       // -b~
    float middle[HEAD];         // M
    float end[HEAD];            // W_16 / M
    struct {
        uint4 v[WARP];
        uint4 y[WARP];          // in units of Y_UNIT, from V alone; `scan` adds what comes from S
    } values[TILES];
    float own[CHUNK];           // r . k r_k
    float unused[16];           // up to a multiple of 128 bytes
};

// Which tokens belong together, on the device.
struct Packed {
    const int* counts;          // chunks, rows
    const int* chunk_token;     // [chunks] the first token
    const int* chunk_tokens;    // [chunks] 1 to 16
    const int* row_chunk;       // [rows] the first chunk
    const int* row_chunks;      // [rows]
    const int* row_slot;        // [rows]
};

// `wait_for_inputs`, but the next kernel is not let in before this one's blocks have ended. Were it, its blocks would gather on the few
// multiprocessors that are first to have room.
__device__ __forceinline__ void wait_alone() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void load_matrix(uint32_t (&x)[4], const __half* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(unsigned(__cvta_generic_to_shared(row))) : "memory");
}

__device__ __forceinline__ void load_transposed(uint32_t (&x)[4], const __half* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(unsigned(__cvta_generic_to_shared(row))) : "memory");
}

__device__ __forceinline__ uint32_t pack(const float* pair) { return to_finite_half2(pair[0], pair[1]); }

__device__ __forceinline__ void unpack(float* pair, uint32_t x) {
    const float2 both = to_float2(x);
    pair[0] = both.x, pair[1] = both.y;
}

__device__ __forceinline__ uint32_t pack_y(const float* pair) { return to_finite_half2(pair[0] / Y_UNIT, pair[1] / Y_UNIT); }

__device__ __forceinline__ void unpack_y(float* pair, uint32_t x) {
    unpack(pair, x);
    pair[0] *= Y_UNIT, pair[1] *= Y_UNIT;
}

// A grid that fits on the GPU at once, no larger than needed.
template <typename... Arguments>
cudaError_t resident(void (*kernel)(Arguments...), int threads, size_t shared, size_t needed, unsigned& blocks) {
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared));
    int each = 0;
    if (error == cudaSuccess) error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads, shared);
    const size_t most = size_t(each) * multiprocessors();
    blocks = unsigned(needed < most ? needed : most);
    return error;
}

// The three steps, in this order. chunks, rows: the most there can be; how many there are stands in `packed`. items: [chunks, heads].
int wkv_prepare(const TimeMix& in, const Packed& packed, int chunks, Item* items, cudaStream_t stream);
int wkv_scan(const TimeMix& in, const Packed& packed, int rows, Item* items, bool fp32, cudaStream_t stream);
int wkv_finish(const TimeMix& in, const Packed& packed, int chunks, const Item* items, cudaStream_t stream);
