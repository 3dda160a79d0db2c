// cuda/warp.cuh for emulator.h.
#pragma once
#include "cuda_fp16.h"
#include "emulator.h"

#define DEVICE inline

constexpr int WARP = emulator::WARP_LANES;

template <typename T>
uint64_t as_word(T x) {
    static_assert(sizeof(T) <= 8);
    uint64_t word = 0;
    memcpy(&word, &x, sizeof x);
    return word;
}

template <typename T>
T from_word(uint64_t word) {
    T x;
    memcpy(&x, &word, sizeof x);
    return x;
}

template <typename T>
T look_at(T x, int lane) {
    return from_word<T>(
        emulator::exchange(as_word(x), [lane](const emulator::Fiber* warp) { return warp[lane].word; }));
}

template <int WIDTH = WARP, typename T>
T shuffle(T x, int lane) {
    return look_at(x, (threadIdx.x % WARP & ~(WIDTH - 1)) | (lane & (WIDTH - 1)));
}

template <typename T>
T shuffle_xor(T x, int bits) {
    return look_at(x, threadIdx.x % WARP ^ bits);
}

template <typename T>
T shuffle_up(T x, int by) {
    const int lane = threadIdx.x % WARP;
    return look_at(x, lane < by ? lane : lane - by);
}

inline unsigned warp_ballot(bool is) {
    return emulator::exchange(is, [](const emulator::Fiber* warp) {
        unsigned all = 0;
        for (int lane = 0; lane < emulator::lanes_of_warp(); lane++) all |= unsigned(warp[lane].word) << lane;
        return all;
    });
}

inline void sync_warp() { emulator::meet_warp(); }
inline void sync_some(int name, int threads) { emulator::meet(name, threads); }
inline void __syncthreads() { emulator::meet(0, blockDim.x); }

inline int __syncthreads_or(int is) {
    __syncthreads();
    emulator::fibers[emulator::current].word = is;
    __syncthreads();
    int any = 0;
    for (unsigned i = 0; i < blockDim.x; i++) any |= emulator::fibers[i].word != 0;
    __syncthreads();
    return any;
}

// Offsets from the middle of 4 GB around the block's memory.
inline unsigned shared_address(const void* p) {
    return unsigned(static_cast<const char*>(p) - emulator::shared + (int64_t(1) << 31));
}
inline void* __cvta_shared_to_generic(unsigned address) {
    return emulator::shared + (int64_t(address) - (int64_t(1) << 31));
}

inline uint4 load16(const void* from) { return *static_cast<const uint4*>(from); }

inline uint2 load8(const void* from) { return *static_cast<const uint2*>(from); }

inline uint32_t load4(const void* from) { return *static_cast<const uint32_t*>(from); }
