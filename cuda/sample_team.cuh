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

    static __device__ __forceinline__ Team here() {
#if CLUSTERS
        const auto cluster = cooperative_groups::this_cluster();
        return {int(cluster.block_rank()), int(cluster.num_blocks())};
#else
        return {0, 1};
#endif
    }

    // A block may reach into another's shared memory once that one has begun: all threads, at the start and
    // before the first such access. Nothing has been written by then, so the arrival need not wait for
    // memory.
    __device__ __forceinline__ void begin() const {
#if CLUSTERS
        if (size > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
    }

    __device__ __forceinline__ void wait_for_all() const {
#if CLUSTERS
        if (size > 1) cooperative_groups::this_cluster().barrier_wait();
#endif
    }

    // All threads of all blocks: what each wrote, to any block's shared memory, the others see.
    __device__ __forceinline__ void sync() const {
#if CLUSTERS
        if (size > 1) {
            cooperative_groups::this_cluster().sync();
            return;
        }
#endif
        __syncthreads();
    }

    // Where block `of` has the shared variable that this block has at `place`.
    template <typename T>
    __device__ __forceinline__ T* at(T* place, int of) const {
#if CLUSTERS
        if (size > 1) return cooperative_groups::this_cluster().map_shared_rank(place, of);
#endif
        return place;
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
