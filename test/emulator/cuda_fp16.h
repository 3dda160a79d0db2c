// The part of CUDA's fp16 and vector types that the kernels use, for emulator.h.
#pragma once
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct int2 {
    int x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

struct alignas(16) ulonglong2 {
    unsigned long long x, y;
};

inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <typename To, typename From>
To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

struct __half {
    _Float16 value;
    explicit operator float() const { return float(value); }
};
struct alignas(4) __half2 {
    __half x, y;
};

inline float __half2float(__half x) { return float(x.value); }
inline __half __float2half_rn(float x) { return {_Float16(x)}; }
inline __half __float2half(float x) { return {_Float16(x)}; }
inline float2 __half22float2(__half2 x) { return {__half2float(x.x), __half2float(x.y)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline __half __low2half(__half2 x) { return x.x; }
inline __half __high2half(__half2 x) { return x.y; }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __half __ushort_as_half(unsigned short x) { return bits_as<__half>(x); }
inline unsigned short __half_as_ushort(__half x) { return bits_as<unsigned short>(x); }
inline bool __hgt(__half x, __half y) { return x.value > y.value; }
inline bool __hge(__half x, __half y) { return x.value >= y.value; }

inline __half __float2half_rd(float x) {
    const __half nearest = __float2half_rn(x);
    if (!(float(nearest.value) > x)) return nearest;
    const unsigned short bits = __half_as_ushort(nearest);  // one number down
    return __ushort_as_half(bits == 0 ? 0x8001 : bits & 0x8000 ? bits + 1 : bits - 1);
}

inline __half2 __half2half2(__half x) { return {x, x}; }
inline __half2 __low2half2(__half2 x) { return {x.x, x.x}; }
inline __half2 __high2half2(__half2 x) { return {x.y, x.y}; }
inline float __low2float(__half2 x) { return __half2float(x.x); }
inline float __high2float(__half2 x) { return __half2float(x.y); }
inline bool __hbeq2(__half2 x, __half2 y) { return x.x.value == y.x.value && x.y.value == y.y.value; }
inline __half2 __hadd2(__half2 x, __half2 y) {
    return {{_Float16(x.x.value + y.x.value)}, {_Float16(x.y.value + y.y.value)}};
}
inline __half2 __hsub2(__half2 x, __half2 y) {
    return {{_Float16(x.x.value - y.x.value)}, {_Float16(x.y.value - y.y.value)}};
}
inline __half2 __hmul2(__half2 x, __half2 y) {
    return {{_Float16(x.x.value * y.x.value)}, {_Float16(x.y.value * y.y.value)}};
}
// In double, where products are exact: one rounding but for sums beyond its 53 bits.
inline __half2 __hfma2(__half2 x, __half2 y, __half2 z) {
    return {{_Float16(double(x.x.value) * double(y.x.value) + double(z.x.value))},
            {_Float16(double(x.y.value) * double(y.y.value) + double(z.y.value))}};
}

inline uint32_t __float_as_uint(float x) { return bits_as<uint32_t>(x); }
inline float __uint_as_float(uint32_t x) { return bits_as<float>(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline float __log2f(float x) { return log2f(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline float __expf(float x) { return expf(x); }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }

template <typename T>
T __ldg(const T* from) {
    return *from;
}

template <typename T>
T min(T x, T y) {
    return y < x ? y : x;
}
template <typename T>
T max(T x, T y) {
    return x < y ? y : x;
}

inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
    const uint64_t both = uint64_t(y) << 32 | x;
    uint32_t out = 0;
    for (int i = 0; i < 4; i++) {
        const uint32_t pick = selector >> 4 * i & 0xf, byte = both >> 8 * (pick & 7) & 0xff;
        out |= (pick & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << 8 * i;
    }
    return out;
}

// Rounded one by one: the tests are compiled without contraction.
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double __dsub_rn(double x, double y) { return x - y; }
inline double __ddiv_rn(double x, double y) { return x / y; }
inline float __double2float_rd(double x) {
    const float nearest = float(x);
    return nearest > x ? nextafterf(nearest, -INFINITY) : nearest;
}
inline double __ull2double_rn(unsigned long long x) { return double(x); }
// 0 for NaN, and the nearest int where there is none: as the PTX ISA defines `cvt`, which C++ leaves
// undefined.
inline int __float2int_rz(float x) {
    return x != x ? 0 : x >= 0x1p31f ? INT_MAX : x < -0x1p31f ? INT_MIN : int(x);
}
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
    return (unsigned __int128)(x)*y >> 64;
}
inline long long __double_as_longlong(double x) { return bits_as<long long>(x); }

// Only one thread runs at a time.
template <typename T, typename U>
T atomicAdd(T* to, U by) {
    const T before = *to;
    *to = before + by;
    return before;
}
