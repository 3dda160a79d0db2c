// Sums over parts of K that the blocks of gemm_sparse.cuh make. TOGETHER, on Hopper: the blocks of a cluster
// send them to the one that adds them up; else a block adds up its own.
#pragma once
#include "gemm.cuh"
#include "hopper.cuh"

template <bool TOGETHER>
class SplitSums {
public:
    static constexpr bool together = false;
    static constexpr int BLOCKS = 1, BLOCK_BITS = 0;
    DEVICE SplitSums(uint64_t&, unsigned) {}
    DEVICE void wait_for_all() const {}
    DEVICE void put(int, float* place, float4 sum) const { *reinterpret_cast<float4*>(place) = sum; }
    DEVICE void wait() const { __syncthreads(); }
};

#if HOPPER
template <>
class SplitSums<true> {
public:
    static constexpr bool together = true;
    static constexpr int BLOCKS = SPARSE_SPLITS, BLOCK_BITS = 3;
    static_assert(BLOCKS == 1 << BLOCK_BITS);

    // All threads call it at the start. bytes: what this block will be sent.
    DEVICE SplitSums(uint64_t& barrier, unsigned bytes) : received(shared_address(&barrier)) {
        if (threadIdx.x == 0) {
            hopper::barrier_init(received, 1);
            hopper::barriers_ready();
            hopper::arrive_and_expect(received, bytes);
        }
        hopper::cluster_arrive_relaxed();  // barriers_ready has made the barrier known
    }

    // Before the first `put`.
    DEVICE void wait_for_all() const { hopper::cluster_wait(); }

    // Into the shared memory of a block, where this one has `place`.
    DEVICE void put(int block, float* place, float4 sum) const {
        hopper::send_to(block, shared_address(place), received, sum);
    }

    // Until all sums are there.
    DEVICE void wait() const { hopper::barrier_wait_cluster(received, 0); }

private:
    const uint32_t received;
};
#endif
