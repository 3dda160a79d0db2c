// The recurrence of wkv.cuh by multiplications and additions alone, in fp32: what wkv_decode_fp32.cu and
// wkv_sequence.cu share. States are stored in fp32 (`Single`), or in fp16, rounded behind every token
// (`Rounded`). Either way a row gives the same bits by both kernels: which products are fused with a sum is
// written out where the compiler has a choice.
//
// Thread t of 128 has keys 8 (t % 8) .. + 7 of four rows of S, every 16th from row t / 8. Sums over keys go
// over 8 numbers of a thread in order, then over 8 lanes as a tree.
#pragma once
#include "wkv_decode.cuh"

namespace {
constexpr int OWN = 4;  // rows of S a thread has a part of

__device__ __forceinline__ int state_row(int n) { return n * (HEAD / OWN) + threadIdx.x / 8; }

// Keys are stored in an order in which the two vectors of 4 that a thread reads are neighbours of those of 8
// threads, so that no two of them come from the same banks.
__device__ __forceinline__ void put_keys(float* p, int lane, float2 x) {
    *reinterpret_cast<float2*>(p + lane / 4 * 4 + lane % 2 * 2 + lane / 2 % 2 * 32) = x;
}

__device__ __forceinline__ void load_keys(const float* p, float (&x)[8]) {
    const int at = threadIdx.x % 8 * 4;
    const float4 low = *reinterpret_cast<const float4*>(p + at),
                 high = *reinterpret_cast<const float4*>(p + 32 + at);
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w, x[4] = high.x, x[5] = high.y, x[6] = high.z,
    x[7] = high.w;
}

__device__ __forceinline__ void sum_over_keys(float (&x)[OWN]) {
#pragma unroll
    for (int offset = 1; offset < 8; offset *= 2)
#pragma unroll
        for (int n = 0; n < OWN; n++) x[n] += shuffle_xor(x[n], offset);
}

struct Single {
    using Number = float;
    static constexpr int BLOCKS = 3, VECTORS = 2 * OWN;
    static constexpr bool DEFERS = false;

    struct alignas(16) Token {
        float r[HEAD], w[HEAD], k[HEAD], kk[HEAD], b[HEAD], v[HEAD], own;
    };

    const unsigned first = state_row(0) * HEAD + threadIdx.x % 8 * 8;

    static __device__ __forceinline__ constexpr int offset(int i) {
        return i / 2 * (HEAD / OWN) * HEAD + i % 2 * 4;
    }

    static __device__ __forceinline__ void put(Token& t, int lane, const Prepared& p, const DeferredPair&) {
        const float scale = normalizing(warp_sum(p.squares)), own = warp_sum(p.own);
        put_keys(t.r, lane, p.r);
        put_keys(t.w, lane, p.w);
        put_keys(t.k, lane, p.k);
        put_keys(t.kk, lane, make_float2(p.kk.x * scale, p.kk.y * scale));
        put_keys(t.b, lane, make_float2(p.b.x * scale, p.b.y * scale));
        *reinterpret_cast<float2*>(t.v + 2 * lane) = p.v;
        if (lane == 0) t.own = own;
    }

    static __device__ __forceinline__ float own(const Token& t) { return t.own; }

    static __device__ __forceinline__ float2 value(const Token& t, int lane) {
        return *reinterpret_cast<const float2*>(t.v + 2 * lane);
    }

    template <typename State>
    __device__ __forceinline__ void advance(const Token& t, const uint4* vectors, float* y_of,
                                            const State& state) const {
        float* const to = state();
        float s[OWN][8];
        const auto fetch = [&](int n) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float4 x = *reinterpret_cast<const float4*>(vectors + (2 * n + half) * THREADS);
                s[n][4 * half] = x.x, s[n][4 * half + 1] = x.y, s[n][4 * half + 2] = x.z,
                         s[n][4 * half + 3] = x.w;
            }
        };
        move(t, s, y_of, fetch, [&](int n) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float* const x = s[n] + 4 * half;
                store(to + offset(2 * n + half), make_float4(x[0], x[1], x[2], x[3]));
            }
        });
    }

    // Moves this thread's part of S on, and writes what is read out, y [64]. fetch(n) is called before row n
    // of s is read, keep(n) when it is as it shall be.
    template <typename Fetch, typename Keep>
    static __device__ __forceinline__ void move(const Token& t, float (&s)[OWN][8], float* y_of,
                                                const Fetch& fetch, const Keep& keep) {
        float kk[8], w[8], k[8], b[8], r[8], removed[OWN], y[OWN];
        load_keys(t.kk, kk), load_keys(t.w, w), load_keys(t.k, k), load_keys(t.b, b), load_keys(t.r, r);
#pragma unroll
        for (int n = 0; n < OWN; n++) {
            removed[n] = 0.f;
            fetch(n);
#pragma unroll
            for (int i = 0; i < 8; i++) removed[n] = fmaf(s[n][i], kk[i], removed[n]);
        }
        sum_over_keys(removed);
#pragma unroll
        for (int n = 0; n < OWN; n++) {
            const float v = t.v[state_row(n)];
            y[n] = 0.f;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                s[n][i] = fmaf(s[n][i], w[i], fmaf(v, k[i], -(removed[n] * b[i])));
                y[n] = fmaf(s[n][i], r[i], y[n]);
            }
            keep(n);
        }
        sum_over_keys(y);
        if (threadIdx.x % 8 == 0)
#pragma unroll
            for (int n = 0; n < OWN; n++) y_of[state_row(n)] = y[n];
    }
};

// 8 numbers as fp16 holds them.
__device__ __forceinline__ void round8(float (&x)[8]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 pair = to_float2(to_finite_half2(x[2 * i], x[2 * i + 1]));
        x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
    }
}

// What is read out of S is of before it is rounded.
struct Rounded : Single {
    using Number = __half;
    static constexpr int BLOCKS = 4, VECTORS = OWN;  // registers leave no room for a fifth

    static __device__ __forceinline__ constexpr int offset(int i) { return i * (HEAD / OWN) * HEAD; }

    template <typename State>
    __device__ __forceinline__ void advance(const Token& t, const uint4* vectors, float* y_of,
                                            const State& state) const {
        __half* const to = state();
        float s[OWN][8];
        const auto fetch = [&](int n) {
            Raw8<__half> raw;
            raw.words = vectors[n * THREADS];
            raw.widen(s[n]);
        };
        move(t, s, y_of, fetch, [&](int n) { store8(to + offset(n), s[n]); });
    }
};
}  // namespace
