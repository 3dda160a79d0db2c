// The recurrence of wkv_decode.cuh with states in fp16, by tensor cores: what wkv_decode_fp16.cu and
// decode_row.cu share.
//
// A state as it is stored is what a tensor core takes, so S kk and S (w r) are exact products of fp16, with
// kk and w r as sums of two fp16 numbers each (22 bits), and so is S diag(w). What is read out follows from
// the state before:
//   y = S' r = S (w r) - (S kk) (kk a . r) + v (k . r)
// The two products that are added to S diag(w) are of rank one; their factors are such sums too, and the
// smallest of the four terms of each is left out. Sums over keys: a tensor core's, over 16 keys at a time,
// four times; then the two halves of kk (w r) and of S.
//
// A state that lags (S_, with w_, k_, b_ = kk_ a_, v_ and u_ = S_ kk_ of a deferred token) is read as it is
// stored, too:
//   S = S_ diag(w_) + v_ k_^T - u_ b_^T
//   S kk = S_ (w_ kk) + v_ (k_ . kk) - u_ (b_ . kk)     S (w r) = S_ (w_ w r) + v_ (k_ . w r) - u_ (b_ . w r)
//   S' = S_ diag(w_ w) + v_ (w k_)^T - u_ (w b_)^T + v k^T - (S kk) b^T
// and so on for two tokens, with k_ and b_ of the older times w_ of the younger. Only one that lags MAX_LAG
// tokens is written.
//
// Warp i has rows 16 i .. + 15 of S; lane l rows l / 4 and l / 4 + 8 of these, and, with q = l % 4, keys 8 q
// .. + 7 and 32 + 8 q .. + 7: eight pairs. Pairs 2 j and 2 j + 1 are the lane's columns of operand a in
// product j over keys, and pair i is its columns of result i of S'.
#pragma once
#include "wkv_decode.cuh"

namespace {
constexpr int PAIRS = 8;
constexpr int ADD = 8 * 16 + 16;  // words: a multiple of 16 and not of 32

__device__ __forceinline__ float in_range(float x) { return fminf(fmaxf(x, -MAX_HALF), MAX_HALF); }

// x as the sum of two fp16 numbers: the nearest (first), and what is left.
__device__ __forceinline__ uint32_t split(float x) {
    return to_half2(x, x - __half2float(__float2half_rn(x)));
}

// The same of two numbers: the nearest of both, what is left of both.
__device__ __forceinline__ uint2 split(float x, float y) {
    const uint32_t nearest = to_half2(x, y);
    const float2 back = to_float2(nearest);
    return make_uint2(nearest, to_half2(x - back.x, y - back.y));
}

__device__ __forceinline__ uint2 split(float2 x) { return split(x.x, x.y); }
__device__ __forceinline__ float2 times(float2 x, float2 y) { return make_float2(x.x * y.x, x.y * y.y); }
__device__ __forceinline__ uint32_t bits(__half2 pair) { return *reinterpret_cast<const uint32_t*>(&pair); }
__device__ __forceinline__ uint32_t firsts(uint32_t x, uint32_t y) { return __byte_perm(x, y, 0x5410); }
__device__ __forceinline__ uint32_t seconds(uint32_t x, uint32_t y) { return __byte_perm(x, y, 0x7632); }

// Sums over the channels of a head: kk . kk, r . k r_k, k . r, b . r, and for each deferred token k_ . kk and
// - b_ . kk (from WITH_KK on), k_ . w r and - b_ . w r. Those from B_R to before WITH_READ have a factor kk,
// which is normalised afterwards.
enum Sum { SQUARES, OWN, K_R, B_R, WITH_KK, WITH_READ = WITH_KK + 2 * MAX_LAG, SUMS = 16 };
static_assert(WITH_READ + 2 * MAX_LAG <= SUMS);

// Of N numbers of each lane, a power of two: the lanes divide them among themselves, and lane l returns the
// sum of number l N / LANES.
template <int N, int LANES = WARP>
__device__ __forceinline__ float warp_sums(const float (&x)[N], int lane) {
    constexpr int OTHER = LANES / 2;
    if constexpr (LANES == 1) {
        return x[0];
    } else if constexpr (N == 1) {
        const float sum[1] = {x[0] + shuffle_xor(x[0], OTHER)};
        return warp_sums<1, OTHER>(sum, lane);
    } else {
        float half[N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; i++)
            half[i] =
                (lane & OTHER ? x[N / 2 + i] : x[i]) + shuffle_xor(lane & OTHER ? x[i] : x[N / 2 + i], OTHER);
        return warp_sums<N / 2, OTHER>(half, lane);
    }
}

struct Half {
    using Number = __half;
    static constexpr int BLOCKS = 4, VECTORS = 4;
    static constexpr bool DEFERS = true;

    // Pair i of a lane is pair n = i % 4 of half i / 4 of the keys.
    struct alignas(16) Token {
        uint32_t read[2][4][16];         // by halves of the keys: kk, its rest, w r, its rest, in pairs
        uint32_t add[2][ADD];            // by halves: the operand b that adds to results, see `place`
        uint32_t w[2][2][4][4];          // of key 32 i + 8 q + 2 n + e, split, at [i][e][q][n]
        uint32_t v[HEAD];                // split
        uint32_t add_late[2][32];        // the same of the second deferred token: four words for each m
        uint32_t before[MAX_LAG][HEAD];  // v_, u_; zero where there is none
        float sums[SUMS];                // by `Sum`
        __half* deferred_to;             // where S kk goes, if the write of S' is deferred
    };

    const int q = threadIdx.x % 4, m = threadIdx.x % WARP / 4;
    const unsigned first = held((threadIdx.x / WARP * 16 + m) * HEAD + q * 8), row = first / HEAD;
    // Which bytes of which words make up operands: of v, or v_ and u_, and S kk, for the update; of w, for
    // the diagonal, where this lane has a part of it.
    const unsigned update = held(q == 0 ? 0x1010 : q == 1 ? 0x5432 : q == 2 ? 0x7654 : 0x3210);
    // Both in a word: of the nearest, then of what is left.
    const unsigned diagonals = held(m == 2 * q ? 0x44324410 : m == 2 * q + 1 ? 0x32441044 : 0x44444444);

    // Else it is computed anew wherever it is used.
    template <typename T>
    static __device__ __forceinline__ T held(T x) {
        return shuffle(x, threadIdx.x % WARP);
    }

    static __device__ __forceinline__ constexpr int offset(int i) { return i / 2 * 8 * HEAD + i % 2 * 32; }

    // Where in `add` the words of lane 4 m + q begin, one for each of four results. In this order neither
    // those who read nor those who write want different words of the same bank.
    static __device__ __forceinline__ constexpr unsigned place(unsigned q, unsigned m) {
        return m * 16 + (q ^ m / 2) * 4;
    }

    static __device__ __forceinline__ void put(Token& t, int lane, const Prepared& p,
                                               const DeferredPair& noted) {
        const float2 read = make_float2(p.w.x * p.r.x, p.w.y * p.r.y);
        float2 kept = make_float2(1.f, 1.f);  // of S_, when all that is deferred is done
        float sums[SUMS] = {p.squares, p.own, sum_of_products(p.k, p.r), sum_of_products(p.b, p.r)};
        uint32_t key[MAX_LAG] = {}, other[MAX_LAG] = {};  // of channel 2 lane and the next: w k_, - w b_
#pragma unroll
        for (int token = MAX_LAG - 1; token >= 0; token--) {
            uint2 value_and_removed = {};
            if (token < noted.lag) {
                const __half2(&old)[DEFERRED_VECTORS] = noted.vectors[token];
                const float2 lost = __half22float2(old[LOST]), k_ = times(__half22float2(old[KEY]), kept),
                             b_ = times(__half22float2(old[REMOVAL]), kept);
                sums[WITH_KK + 2 * token] = sum_of_products(k_, p.kk),
                                   sums[WITH_KK + 2 * token + 1] = -sum_of_products(b_, p.kk);
                sums[WITH_READ + 2 * token] = sum_of_products(k_, read),
                                     sums[WITH_READ + 2 * token + 1] = -sum_of_products(b_, read);
                key[token] = to_half2(p.w.x * k_.x, -p.w.x * b_.x),
                other[token] = to_half2(p.w.y * k_.y, -p.w.y * b_.y);
                value_and_removed = make_uint2(firsts(bits(old[VALUE]), bits(old[REMOVED])),
                                               seconds(bits(old[VALUE]), bits(old[REMOVED])));
                kept = times(kept, make_float2(1.f - lost.x, 1.f - lost.y));
            }
            *reinterpret_cast<uint2*>(t.before[token] + 2 * lane) = value_and_removed;
        }
        const float sum = warp_sums(sums, lane), scale = normalizing(shuffle(sum, SQUARES));
        const int which = lane * SUMS / WARP;
        if (lane % (WARP / SUMS) == 0) t.sums[which] = which >= B_R && which < WITH_READ ? sum * scale : sum;
        const float2 unit = times(p.kk, make_float2(scale, scale)),
                     removal = times(p.b, make_float2(scale, scale));
        if (noted.all && noted.lag < MAX_LAG) {
            __half* const to = noted.all + noted.lag * DEFERRED_VECTORS * HEAD;
            if (lane == 0) t.deferred_to = to + REMOVED * HEAD;
            const auto defer = [&](int i, uint32_t pair) {
                *reinterpret_cast<uint32_t*>(to + i * HEAD + 2 * lane) = pair;
            };
            defer(LOST, to_half2(1.f - p.w.x, 1.f - p.w.y)), defer(REMOVAL, to_half2(removal.x, removal.y));
            defer(KEY, to_finite_half2(p.k.x, p.k.y)), defer(VALUE, to_finite_half2(p.v.x, p.v.y));
        } else if (lane == 0) {
            t.deferred_to = nullptr;
        }
        const int half = lane / 16, pair = lane % 16, n = pair % 4;
        const uint2 kk = split(times(unit, kept)), wr = split(times(read, kept)), w = split(times(p.w, kept));
        const uint2 k = split(in_range(p.k.x), in_range(p.k.y)), v = split(in_range(p.v.x), in_range(p.v.y));
        const uint2 b = split(-removal.x, -removal.y);
        t.read[half][0][pair] = kk.x, t.read[half][1][pair] = kk.y, t.read[half][2][pair] = wr.x,
        t.read[half][3][pair] = wr.y;
        t.w[half][0][pair / 4][n] = firsts(w.x, w.y), t.w[half][1][pair / 4][n] = seconds(w.x, w.y);
        *reinterpret_cast<uint2*>(t.v + 2 * lane) = make_uint2(firsts(v.x, v.y), seconds(v.x, v.y));
        // Rows of operand b beside those of operand a: k, its rest | k, b | the rest of b, b | w k_, - w b_
        // beside v, v | the rest of v, S kk | S kk, its rest | v_, u_; and once more the last, of the second
        // token.
        const int m = pair / 4 * 2;
        const auto add = [&](int q, uint32_t of_first, uint32_t of_second) {
            uint32_t* const to = t.add[half] + place(q, m) + n;  // m is even: m + 1 differs in the first term
            to[0] = of_first, to[place(0, 1)] = of_second;
        };
        add(0, firsts(k.x, k.y), seconds(k.x, k.y));
        add(1, firsts(k.x, b.x), seconds(k.x, b.x));
        add(2, firsts(b.y, b.x), seconds(b.y, b.x));
        add(3, key[0], other[0]);
        static_assert(MAX_LAG == 2);
        t.add_late[half][m * 4 + n] = key[1], t.add_late[half][m * 4 + 4 + n] = other[1];
    }

    static __device__ __forceinline__ float own(const Token& t) { return t.sums[OWN]; }

    static __device__ __forceinline__ float2 value(const Token& t, int lane) {
        const uint2 v = *reinterpret_cast<const uint2*>(t.v + 2 * lane);
        const float2 x = to_float2(v.x), y = to_float2(v.y);
        return make_float2(x.x + x.y, y.x + y.y);
    }

    // state(): where S' goes, if it is written; null: nowhere.
    template <typename State>
    __device__ __forceinline__ void advance(const Token& t, const uint4* vectors, float* y_of,
                                            const State& state) const {
        uint32_t s[PAIRS][2];  // rows `row` and `row` + 8
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            const uint4 x = vectors[i * THREADS];
            const int pair = i % 2 * 4, down = i / 2;
            s[pair][down] = x.x, s[pair + 1][down] = x.y, s[pair + 2][down] = x.z, s[pair + 3][down] = x.w;
        }
        float read[2][4] = {};  // by halves of the keys
#pragma unroll
        for (int i = 0; i < PAIRS; i += 4) {
            uint4 x = {};  // four of the eight columns are used
            if (!(threadIdx.x & 16)) x = reinterpret_cast<const uint4*>(t.read[i / 4])[4 * m + q];
            mma(read[i / 4], s[i][0], s[i][1], s[i + 1][0], s[i + 1][1], x.x, x.y);
            mma(read[i / 4], s[i + 2][0], s[i + 2][1], s[i + 3][0], s[i + 3][1], x.z, x.w);
        }
        // Lanes with q = 0 have S kk of their rows now, those with q = 1 S (w r), without what is deferred.
        // All of `t` that is needed until the update is read before anything is stored: a store may be to the
        // same place for all that the compiler knows, which would read it again.
        const float4 carried =
            *reinterpret_cast<const float4*>(t.sums + WITH_KK + q % 2 * (WITH_READ - WITH_KK));
        static_assert(MAX_LAG == 2);
        const float b_r = t.sums[B_R], k_r = t.sums[K_R];
        __half* const deferred_to = t.deferred_to;
        uint32_t v[2], before[2][MAX_LAG];
#pragma unroll
        for (int down = 0; down < 2; down++) {
            v[down] = t.v[row + 8 * down];
#pragma unroll
            for (int token = 0; token < MAX_LAG; token++)
                before[down][token] = t.before[token][row + 8 * down];
        }
        float removed[2], y[2];
#pragma unroll
        for (int down = 0; down < 2; down++) {
            const float2 parts = to_float2(v[down]), old = to_float2(before[down][0]),
                         younger = to_float2(before[down][1]);
            float mine =
                read[0][2 * down] + read[0][2 * down + 1] + (read[1][2 * down] + read[1][2 * down + 1]);
            mine += old.x * carried.x + old.y * carried.y;
            mine += younger.x * carried.z + younger.y * carried.w;
            removed[down] = shuffle<4>(mine, 0);
            y[down] = mine - removed[down] * b_r + (parts.x + parts.y) * k_r;
        }
        if (q == 1) y_of[row] = y[0], y_of[row + 8] = y[1];
        if (deferred_to) {
            if (q == 0)
                deferred_to[row] = to_finite_half(removed[0]),
                deferred_to[row + 8] = to_finite_half(removed[1]);
            return;
        }
        __half* const to = state();
        if (!to) return;
        uint32_t a[2], a_late[2];
#pragma unroll
        for (int down = 0; down < 2; down++) {
            a[down] = __byte_perm(q == 3 ? before[down][0] : v[down], split(in_range(removed[down])), update);
            a_late[down] = q == 0 ? before[down][1] : 0;
        }
#pragma unroll
        for (int i = 0; i < PAIRS; i += 4) {
            const uint4 added = *reinterpret_cast<const uint4*>(t.add[i / 4] + place(q, m));
            const uint4 decay = *reinterpret_cast<const uint4*>(t.w[i / 4][m % 2][q]);
            uint4 late = {};  // rows 8 and 9 of operand b, of sixteen
            if (q == 0) late = *reinterpret_cast<const uint4*>(t.add_late[i / 4] + 4 * m);
            const uint32_t b_late[4] = {late.x, late.y, late.z, late.w};
            const uint32_t b[4] = {added.x, added.y, added.z, added.w},
                           w[4] = {decay.x, decay.y, decay.z, decay.w};
            uint32_t next[2][4];
#pragma unroll
            for (int n = 0; n < 4; n++) {
                float c[4] = {};
                mma8(c, s[i + n][0], s[i + n][1], __byte_perm(w[n], 0, diagonals >> 16));
                mma8(c, s[i + n][0], s[i + n][1], __byte_perm(w[n], 0, diagonals));
                mma(c, a[0], a[1], a_late[0], a_late[1], b[n], b_late[n]);
                next[0][n] = to_finite_half2(c[0], c[1]), next[1][n] = to_finite_half2(c[2], c[3]);
            }
#pragma unroll
            for (int down = 0; down < 2; down++)
                store(to + offset(2 * down + i / 4), next[down][0], next[down][1], next[down][2],
                      next[down][3]);
        }
    }
};
}  // namespace
