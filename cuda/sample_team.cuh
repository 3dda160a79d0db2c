// The blocks that share one row of logits: a cluster with distributed shared memory on sm_90 and newer, a
// single block on older GPUs.
#pragma once
#include "common.cuh"

namespace sample {

constexpr int THREADS = 512;
constexpr int WARPS = THREADS / WARP;
constexpr int MOST_BLOCKS = 8;  // of one row
constexpr int SEGMENTS =
    MOST_BLOCKS * WARPS;  // each warp of a team has a segment of the row; segments ascend with the ids
constexpr int GROUPS = SEGMENTS;  // of tokens: those that the lanes of a warp, or of a part of it, read

// Ids of each block when so many share a row.
inline int chunk_size(int vocab, int blocks) {
    const int each = 8 * WARP * WARPS;
    return (vocab + blocks * each - 1) / (blocks * each) * each;
}

__device__ __forceinline__ int lane_id() { return threadIdx.x % WARP; }
__device__ __forceinline__ int warp_id() { return threadIdx.x / WARP; }

struct Team {
    int rank, size;

    static __device__ __forceinline__ Team here() { return {cluster_block(), cluster_blocks()}; }

    __device__ __forceinline__ void begin() const {
        if (size > 1) cluster_begin();
    }

    __device__ __forceinline__ void wait_for_all() const {
        if (size > 1) cluster_wait_for_all();
    }

    // All threads of all blocks: what each wrote, to any block's shared memory, the others see.
    __device__ __forceinline__ void sync() const {
        if (size > 1)
            cluster_sync();
        else
            __syncthreads();
    }

    // Where block `of` has the shared variable that this block has at `place`.
    template <typename T>
    __device__ __forceinline__ T* at(T* place, int of) const {
        return size > 1 ? cluster_shared(place, of) : place;
    }

    __device__ __forceinline__ int segments() const { return size * WARPS; }
    __device__ __forceinline__ int segment() const { return rank * WARPS + warp_id(); }

    // Every warp gives a value, the same in its lanes; after the sync `all`[segments] of each block holds
    // those of every warp.
    template <typename T>
    __device__ __forceinline__ void gather(T value, T* all) const {
        if (lane_id() < size) *at(all + segment(), lane_id()) = value;
        sync();
    }
};

template <typename T>
__device__ __forceinline__ T warp_total(T x) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) x += shuffle_xor(x, offset);
    return x;
}

// The sum of x over this lane and those before it.
template <typename T>
__device__ __forceinline__ T warp_scan(T x) {
#pragma unroll
    for (int offset = 1; offset < WARP; offset *= 2) {
        const T before = shuffle_up(x, offset);
        if (lane_id() >= offset) x += before;
    }
    return x;
}

}  // namespace sample
