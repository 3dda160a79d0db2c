// The functions of cuda/primitives.cuh for AMD GPUs (gfx90a, gfx942, gfx1100, gfx1151, gfx1201), and for
// NVIDIA ones by the same means, to test them there (RWKV_PORTABLE).
//
// A warp is 32 lanes here too. Where a wave has 64, it is two warps side by side, which may take different
// branches: what follows asks nothing of the lanes of the other warp.
#pragma once
#ifdef __HIP__
#include <hip/hip_fp16.h>
#include <hip/hip_runtime.h>
#else
#include <cuda_fp16.h>

#include "../cuda/warp.cuh"
#endif
#include <stdint.h>

// HIP's second number is not of blocks, and registers are others: the compiler decides.
#define LAUNCH_BOUNDS(threads, blocks) __launch_bounds__(threads)
#define HOPPER 0

// What differs between HIP and CUDA even so.
#ifdef __HIP__
#define DEVICE __device__ __forceinline__

constexpr int WARP = 32;

template <int WIDTH = WARP, typename T>
DEVICE T shuffle(T x, int lane) {
    return __shfl(x, lane, WIDTH);
}

template <typename T>
DEVICE T shuffle_xor(T x, int bits) {
    return __shfl_xor(x, bits, WARP);
}

template <typename T>
DEVICE T shuffle_up(T x, int by) {
    return __shfl_up(x, by, WARP);
}

// Of the four lanes that this one is among, that of number FROM. It takes no path through shared memory, as
// `shuffle` does.
template <int FROM>
DEVICE uint32_t quad_broadcast(uint32_t x) {
    return uint32_t(__builtin_amdgcn_mov_dpp(int(x), FROM * 0x55, 0xf, 0xf, true));
}

// Has the compiler compute these here. It would move the sums of many products behind the operands of all,
// and have no registers left.
template <typename T>
DEVICE void compute_here(T& a, T& b) {
    asm volatile("" : "+v"(a), "+v"(b));
}

DEVICE unsigned warp_ballot(bool is) { return unsigned(__ballot(is) >> (__lane_id() & WARP)); }

// The lanes of a wave run in step, so this is a barrier for the compiler alone.
DEVICE void sync_warp() {
    __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
    __builtin_amdgcn_wave_barrier();
}

using SharedBytes = __attribute__((address_space(3))) const char;

DEVICE unsigned shared_address(const void* p) {
    return unsigned(reinterpret_cast<uintptr_t>((SharedBytes*)(reinterpret_cast<const char*>(p))));
}

template <typename T>
DEVICE T* shared_pointer(unsigned address) {
    return (T*)reinterpret_cast<__attribute__((address_space(3))) T*>(uintptr_t(address));
}

// A pointer to memory of the device: without that the compiler does not know of one that comes from a
// structure, and has every access find out (a flat instruction).
template <typename T>
DEVICE __attribute__((address_space(1))) T* global_pointer(T* p) {
    return (__attribute__((address_space(1))) T*)p;
}

using Words4 = uint32_t __attribute__((ext_vector_type(4)));
using Words2 = uint32_t __attribute__((ext_vector_type(2)));

DEVICE uint4 load16(const void* from) {
    const Words4 x = *global_pointer(static_cast<const Words4*>(from));
    return make_uint4(x.x, x.y, x.z, x.w);
}

DEVICE uint2 load8(const void* from) {
    const Words2 x = *global_pointer(static_cast<const Words2*>(from));
    return make_uint2(x.x, x.y);
}

DEVICE uint32_t load4(const void* from) { return *global_pointer(static_cast<const uint32_t*>(from)); }

DEVICE void store(void* to, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
    *global_pointer(static_cast<Words4*>(to)) = Words4{x, y, z, w};
}

DEVICE void store(void* to, uint32_t x, uint32_t y) {
    *global_pointer(static_cast<Words2*>(to)) = Words2{x, y};
}

// x.0 y.0 + x.1 y.1 + c, the products exact and the sums fp32.
DEVICE float dot2(uint32_t x, uint32_t y, float c) {
    using Pair = _Float16 __attribute__((ext_vector_type(2)));
    return __builtin_amdgcn_fdot2(__builtin_bit_cast(Pair, x), __builtin_bit_cast(Pair, y), c, false);
}

DEVICE float power_of_two(float x) { return __builtin_amdgcn_exp2f(x); }
#else
template <typename T>
DEVICE void compute_here(T&, T&) {}

template <int FROM>
DEVICE uint32_t quad_broadcast(uint32_t x) {
    return shuffle(x, (threadIdx.x % WARP & ~3) + FROM);
}

template <typename T>
DEVICE T* shared_pointer(unsigned address) {
    return static_cast<T*>(__cvta_shared_to_generic(address));
}

template <typename T>
DEVICE T* global_pointer(T* p) {
    return p;
}

DEVICE void store(void* to, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
    *static_cast<uint4*>(to) = make_uint4(x, y, z, w);
}

DEVICE void store(void* to, uint32_t x, uint32_t y) { *static_cast<uint2*>(to) = make_uint2(x, y); }

DEVICE float dot2(uint32_t x, uint32_t y, float c) {
    const float2 a = __half22float2(*reinterpret_cast<const __half2*>(&x)),
                 b = __half22float2(*reinterpret_cast<const __half2*>(&y));
    return a.x * b.x + (a.y * b.y + c);
}

DEVICE float power_of_two(float x) { return exp2f(x); }
#endif

#include "../cuda/no_clusters.cuh"

DEVICE bool warp_any(bool is) { return warp_ballot(is) != 0; }

DEVICE unsigned warp_max(unsigned x) {
#pragma unroll
    for (int bits = WARP / 2; bits > 0; bits /= 2) x = max(x, shuffle_xor(x, bits));
    return x;
}

DEVICE int warp_min(int x) {
#pragma unroll
    for (int bits = WARP / 2; bits > 0; bits /= 2) x = min(x, shuffle_xor(x, bits));
    return x;
}

// A kernel begins when the one before has ended.
DEVICE void grid_dependency_wait() {}
DEVICE void grid_dependency_launch() {}

DEVICE void store(void* to, float4 v) {
    store(to, __float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w));
}

template <typename T>
DEVICE T load_streamed(const T* p) {
    return *p;
}

DEVICE uint4 load_once(const void* address) { return load16(address); }

constexpr bool PREFETCHES = false;
DEVICE void prefetch_l2(const void*, unsigned) {}

// Copies from global to shared memory, which are done when the call returns.
DEVICE void copy_async(uint4* to, const void* from) { *to = load16(from); }
DEVICE void copy_async(unsigned to, const void* from) { copy_async(shared_pointer<uint4>(to), from); }

// 16 bytes or none, which become zero.
DEVICE void copy_async(unsigned to, const void* from, int bytes) {
    *shared_pointer<uint4>(to) = bytes ? load16(from) : make_uint4(0, 0, 0, 0);
}

template <int BYTES>
DEVICE void copy_async_cached(void* to, const void* from) {
    static_assert(BYTES == 8 || BYTES == 16);
    if constexpr (BYTES == 16)
        *static_cast<uint4*>(to) = load16(from);
    else
        *static_cast<uint2*>(to) = *static_cast<const uint2*>(from);
}

DEVICE void commit_copies() {}

template <int N>
DEVICE void wait_copies() {}

// c [16 x 8, fp32] += a [16 x 16] b [16 x 8], fp16, by a warp, which holds them as for CUDA's mma.m16n8k16:
// with g = lane / 4 and q = lane % 4, rows g (c0, c1) and g + 8 (c2, c3) of columns 2 q and 2 q + 1; of a,
// rows g (a0, a2) and g + 8 (a1, a3) of columns 2 q + {0, 1} (a0, a1) and 8 more (a2, a3); of b, rows 2 q +
// {0, 1} (b0) and 8 more (b1) of column g. Sums go over k as the four lanes of a row hold it: 2 q, 2 q + 1, 2
// q + 8, 2 q + 9, for q = 0 to 3.
template <int Q>
DEVICE void mma_of_lane(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
    const int left = threadIdx.x % 4 * 8;
    const uint32_t top = quad_broadcast<Q>(a0), low = quad_broadcast<Q>(a1), first = shuffle(b, left + Q),
                   second = shuffle(b, left + 4 + Q);
    c[0] = dot2(top, first, c[0]), c[1] = dot2(top, second, c[1]);
    c[2] = dot2(low, first, c[2]), c[3] = dot2(low, second, c[3]);
}

DEVICE void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    mma_of_lane<0>(c, a0, a1, b0), mma_of_lane<0>(c, a2, a3, b1);
    mma_of_lane<1>(c, a0, a1, b0), mma_of_lane<1>(c, a2, a3, b1);
    mma_of_lane<2>(c, a0, a1, b0), mma_of_lane<2>(c, a2, a3, b1);
    mma_of_lane<3>(c, a0, a1, b0), mma_of_lane<3>(c, a2, a3, b1);
    compute_here(c[0], c[1]), compute_here(c[2], c[3]);
}

// c [16 x 8, fp32] += a [16 x 8] b [8 x 8].
DEVICE void mma8(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
    mma_of_lane<0>(c, a0, a1, b), mma_of_lane<1>(c, a0, a1, b);
    mma_of_lane<2>(c, a0, a1, b), mma_of_lane<3>(c, a0, a1, b);
    compute_here(c[0], c[1]), compute_here(c[2], c[3]);
}

// Rows 2 q and 2 q + 1 of column g, of the matrix whose rows begin at lane `first`.
DEVICE uint32_t column_pair(unsigned own, int first) {
    const int lane = threadIdx.x % WARP, at = lane / 4 * 2, row = first + lane % 4 * 2;
    const uint32_t low = *shared_pointer<const uint16_t>(shuffle(own, row) + at),
                   high = *shared_pointer<const uint16_t>(shuffle(own, row + 1) + at);
    return low | high << 16;
}

// Two 8 x 8 matrices of fp16 from shared memory, transposed, as operands of `mma`: lane i names row i % 8 of
// matrix i / 8 by its address.
DEVICE void load_transposed(uint32_t& x0, uint32_t& x1, uint32_t row) {
    x0 = column_pair(row, 0), x1 = column_pair(row, 8);
}

template <uint32_t MASK>
DEVICE uint32_t masked_or(uint32_t x, uint32_t bits) {
    return (x & MASK) | bits;
}

// To fp16, where what it cannot hold becomes the largest number that it can. NaN stays that.
DEVICE float finite_half(float x) { return x > 65504.f ? 65504.f : x < -65504.f ? -65504.f : x; }

DEVICE uint32_t to_finite_half2(float x, float y) {
    const __half2 pair = __floats2half2_rn(finite_half(x), finite_half(y));
    return *reinterpret_cast<const uint32_t*>(&pair);
}

DEVICE __half to_finite_half(float x) { return __float2half_rn(finite_half(x)); }

DEVICE __half2 larger_halves(__half2 x, __half2 y) {
    return __halves2half2(__hgt(__low2half(x), __low2half(y)) ? __low2half(x) : __low2half(y),
                          __hgt(__high2half(x), __high2half(y)) ? __high2half(x) : __high2half(y));
}

DEVICE __half larger_half_or_nan(__half x, __half y) { return __hgt(x, y) || !__hge(x, x) ? x : y; }

DEVICE __half2 larger_halves_or_nan(__half2 x, __half2 y) {
    return __halves2half2(larger_half_or_nan(__low2half(x), __low2half(y)),
                          larger_half_or_nan(__high2half(x), __high2half(y)));
}

DEVICE unsigned halves_reaching(__half2 x, __half2 y) {
    return (__hge(__low2half(x), __low2half(y)) ? 0xffffu : 0u) |
           (__hge(__high2half(x), __high2half(y)) ? 0xffff0000u : 0u);
}
