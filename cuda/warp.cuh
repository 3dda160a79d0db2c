// The lanes of a warp on an NVIDIA GPU, and addresses: what the portable build has from CUDA, too.
#pragma once
#include <stdint.h>

#define DEVICE __device__ __forceinline__

constexpr int WARP = 32;  // lanes of a warp, which all take part in what follows

// The value of another lane: of a given one (of each WIDTH lanes side by side), of the one whose number
// differs in these bits, of the one so many before (its own where there is none).
template <int WIDTH = WARP, typename T>
DEVICE T shuffle(T x, int lane) {
    return __shfl_sync(~0u, x, lane, WIDTH);
}

template <typename T>
DEVICE T shuffle_xor(T x, int bits) {
    return __shfl_xor_sync(~0u, x, bits);
}

template <typename T>
DEVICE T shuffle_up(T x, int by) {
    return __shfl_up_sync(~0u, x, by);
}

// Bit i: whether it is true in lane i.
DEVICE unsigned warp_ballot(bool is) { return __ballot_sync(~0u, is); }

// What each lane has written before, the others read after.
DEVICE void sync_warp() { __syncwarp(); }

// A barrier, 1 to 15, for some of the block's threads.
DEVICE void sync_some(int name, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

DEVICE unsigned shared_address(const void* p) { return unsigned(__cvta_generic_to_shared(p)); }

// 16, 8 or 4 bytes of the device's memory.
DEVICE uint4 load16(const void* from) { return *static_cast<const uint4*>(from); }

DEVICE uint2 load8(const void* from) { return *static_cast<const uint2*>(from); }

DEVICE uint32_t load4(const void* from) { return *static_cast<const uint32_t*>(from); }
