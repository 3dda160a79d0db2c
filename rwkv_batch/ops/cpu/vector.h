// What the kernels for CPUs share: vectors of fp32 as wide as the processor has them, sums and functions of
// these, and threads.
//
// Plain C++ with the vector extensions of GCC and Clang, for any processor. Nothing is compiled with
// -ffast-math: every sum has one order, so that a row's numbers do not depend on what is beside it.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

#define INLINE inline __attribute__((always_inline))

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t IntVec __attribute__((vector_size(4 * LANES)));

INLINE Vec load(const float* from) {
    Vec x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE void store(float* to, Vec x) { memcpy(to, &x, sizeof x); }

INLINE Vec all(float x) { return x - (Vec){}; }

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif
#if !defined(SHUFFLE)  // GCC before 12
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (IntVec){__VA_ARGS__})
#endif

// a0 + a[half], b0 + b[half], a1 + a[half + 1], ...: the halves of a and of b, added and interleaved.
INLINE Vec fold(Vec a, Vec b) {
#if LANES == 16
    return SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23) +
           SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif LANES == 8
    return SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11) + SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
    return SHUFFLE(a, b, 0, 4, 1, 5) + SHUFFLE(a, b, 2, 6, 3, 7);
#endif
}

// The sums of the lanes of LANES vectors, one in each lane of the result; the vectors are changed.
INLINE Vec sums(Vec x[LANES]) {
#pragma GCC unroll 4
    for (int half = LANES / 2; half; half /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < half; i++) x[i] = fold(x[i], x[i + half]);
    return x[0];
}

// The sum of the lanes of one vector.
INLINE float sum(Vec x) {
    for (int half = LANES / 2; half; half /= 2) x = fold(x, x);
    return x[0];
}

// e^x within 2 ulp: 2^n e^r, |r| <= ln(2) / 2, e^r by its Taylor series. Below -87 it is e^-87.
INLINE Vec exponential(Vec x) {
    const Vec most = all(88.0f), least = all(-87.0f), round = all(12582912.0f);  // 1.5 * 2^23
    x = x > most ? most : x;
    x = x < least ? least : x;
    const Vec shifted = x * 1.44269504088896341f + round, n = shifted - round;
    const Vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln(2) in two parts, the first one short
    Vec y = all(1.0f / 5040);
    y = y * r + 1.0f / 720;
    y = y * r + 1.0f / 120;
    y = y * r + 1.0f / 24;
    y = y * r + 1.0f / 6;
    y = y * r + 0.5f;
    y = y * r + 1.0f;
    y = y * r + 1.0f;
    const IntVec exponent = ((IntVec)shifted - (IntVec)round) << 23;
    return (Vec)((IntVec)y + exponent);
}

INLINE Vec sigmoid(Vec x) { return 1.0f / (1.0f + exponential(-x)); }

// tanh x within 3 ulp: near zero x + x^3 p(x^2) with p fitted to it, elsewhere 1 - 2 / (e^2x + 1).
INLINE Vec hyperbolic_tangent(Vec x) {
    const Vec size = x < 0.0f ? -x : x, square = x * x;
    Vec p = all(-0.005911117885261774f);
    p = p * square + 0.02080288715660572f;
    p = p * square - 0.05378340557217598f;
    p = p * square + 0.13331881165504456f;
    p = p * square - 0.33333295583724976f;
    const Vec near = x + x * square * p, far = 1.0f - 2.0f / (exponential(size + size) + 1.0f);
    return size < 0.6f ? near : x < 0.0f ? -far : far;
}

// torch's own OpenMP, where it is loaded: a second pool of threads would spin beside it. Compilers other than
// GCC have no -fopenmp for that library, so it is called by its names.
extern "C" {
void GOMP_parallel(void (*)(const void*), const void*, unsigned, unsigned) __attribute__((weak));
int omp_get_thread_num() __attribute__((weak));
int omp_get_num_threads() __attribute__((weak));
}

// Runs `work` by up to so many threads. Each takes its part: `share` says which.
INLINE void in_parallel(void (*work)(const void*), const void* job, int threads) {
    if (threads > 1 && GOMP_parallel && omp_get_thread_num && omp_get_num_threads)
        GOMP_parallel(work, job, threads, 0);
    else
        work(job);
}

// The number of this thread, below those that `in_parallel` was given.
INLINE int64_t thread_number() { return omp_get_thread_num ? omp_get_thread_num() : 0; }

// The part of `count` things of this thread: from *first up to *end.
INLINE void share(int64_t count, int64_t* first, int64_t* end) {
    int64_t thread = 0, threads = 1;
    if (omp_get_thread_num && omp_get_num_threads) {
        thread = omp_get_thread_num();
        threads = omp_get_num_threads();
    }
    *first = count * thread / threads;
    *end = count * (thread + 1) / threads;
}
