// The instructions that kernels use beyond plain C++, as functions whose names say what they do: intrinsics
// and inline PTX, whose exact meaning the PTX ISA manual has. hopper.cuh has those of sm_90a.
#pragma once
#include <cuda_fp16.h>
#include <stdint.h>

#include "warp.cuh"

// Threads of a block, and how many blocks a multiprocessor is to hold.
#define LAUNCH_BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)

// Clusters, on sm_90 and newer: blocks of a launch that reach into each other's shared memory. The number of
// this block in its cluster and how many there are; where another one has the shared variable that this one
// has at `place`. A block may do so once all have begun: all threads call `cluster_begin` at the start and
// `cluster_wait_for_all` before the first such access. Nothing has been written by then, so the arrival need
// not wait for memory. `cluster_sync` is __syncthreads for all blocks.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define CLUSTERS 1
DEVICE int cluster_block() { return int(__clusterRelativeBlockRank()); }
DEVICE int cluster_blocks() { return int(__clusterSizeInBlocks()); }
DEVICE void cluster_begin() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_wait_for_all() { __cluster_barrier_wait(); }
DEVICE void cluster_sync() {
    __cluster_barrier_arrive();
    __cluster_barrier_wait();
}

template <typename T>
DEVICE T* cluster_shared(T* place, int of) {
    return static_cast<T*>(__cluster_map_shared_rank(place, of));
}
#else
#include "no_clusters.cuh"
#endif
// Whether there is what hopper.cuh needs.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define HOPPER 1
#else
#define HOPPER 0
#endif

DEVICE bool warp_any(bool is) { return __any_sync(~0u, is); }
DEVICE unsigned warp_max(unsigned x) { return __reduce_max_sync(~0u, x); }
DEVICE int warp_min(int x) { return __reduce_min_sync(~0u, x); }
DEVICE int warp_sum(int x) { return __reduce_add_sync(~0u, x); }

// What is read once in a step, such as states and logits: first to leave the caches.
template <typename T>
DEVICE T load_streamed(const T* p) {
    return __ldcs(p);
}

// Programmatic dependent launch: wait until the kernel before has ended; allow the next one to begin.
DEVICE void grid_dependency_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

DEVICE void grid_dependency_launch() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Stores of 16 and 8 bytes. The compiler would make stores of 4 bytes of a vector whose words it has just
// packed.
DEVICE void store(void* to, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}

DEVICE void store(void* to, uint32_t x, uint32_t y) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(x), "r"(y) : "memory");
}

DEVICE void store(void* to, float4 v) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
                 : "memory");
}

// 16 bytes that are read once in a step, such as weights: they take no place in L1.
DEVICE uint4 load_once(const void* address) {
    uint4 x;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(address));
    return x;
}

// `bytes`, a multiple of 16, into the L2 cache, on sm_90 and newer.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool PREFETCHES = true;
DEVICE void prefetch_l2(const void* from, unsigned bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
#else
constexpr bool PREFETCHES = false;
DEVICE void prefetch_l2(const void*, unsigned) {}
#endif

// Asynchronous copies from global to shared memory. `wait_copies<N>` waits until all but the last N groups
// that this thread has closed with `commit_copies` have arrived; only this thread is sure to see them then.
DEVICE void copy_async(unsigned to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

DEVICE void copy_async(uint4* to, const void* from) { copy_async(shared_address(to), from); }

// Only the first `bytes` of 16; the rest becomes zero.
DEVICE void copy_async(unsigned to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// BYTES: 8 or 16, also cached in L1.
template <int BYTES>
DEVICE void copy_async_cached(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from), "n"(BYTES)
                 : "memory");
}

DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int N>
DEVICE void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Tensor cores: c [16 x 8, fp32] += a [16 x 16] b [16 x 8], fp16, by a warp.
DEVICE void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// c [16 x 8, int32] += a [16 x 32, unsigned bytes] b [32 x 8, signed bytes].
DEVICE void mma_bytes(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                      uint32_t b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// c [16 x 8, fp32] += a [16 x 8] b [8 x 8].
DEVICE void mma8(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(b));
}

// Four 8 x 8 matrices of fp16 from shared memory as operands of `mma`: lane i names row i % 8 of matrix i /
// 8, also by its address there.
DEVICE void load_matrix(uint32_t (&x)[4], uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(row)
                 : "memory");
}

DEVICE void load_matrix(uint32_t (&x)[4], const __half* row) { load_matrix(x, shared_address(row)); }

// The same, transposed.
DEVICE void load_transposed(uint32_t (&x)[4], uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(row)
                 : "memory");
}

DEVICE void load_transposed(uint32_t (&x)[4], const __half* row) { load_transposed(x, shared_address(row)); }

// Two matrices, transposed; `row` is an address in shared memory.
DEVICE void load_transposed(uint32_t& x0, uint32_t& x1, uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(x0), "=r"(x1)
                 : "r"(row)
                 : "memory");
}

// To fp16, where what it cannot hold becomes the largest number that it can: infinity would turn GEMMs into
// NaN.
DEVICE uint32_t to_finite_half2(float x, float y) {
    uint32_t pair;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
    return pair;
}

DEVICE __half to_finite_half(float x) {
    unsigned short bits;
    asm("cvt.rn.satfinite.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return __ushort_as_half(bits);
}

// x & MASK | bits, in one instruction: the compiler takes two where `bits` is a constant.
template <uint32_t MASK>
DEVICE uint32_t masked_or(uint32_t x, uint32_t bits) {
    uint32_t found;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(found) : "r"(x), "n"(MASK), "r"(bits));
    return found;
}

// 2^x, approximately.
DEVICE float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Barriers in shared memory on any GPU, for a producer and consumers of a ring. `barrier`: an address there.
// A phase ends when all arrivals, and from Hopper on all bytes expected, have come; `parity` is that of the
// phase waited for.
namespace mbarrier {
template <int ARRIVALS>
DEVICE void init(unsigned barrier) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "n"(ARRIVALS) : "memory");
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define WAIT_ONCE "mbarrier.try_wait"
#else
#define WAIT_ONCE "mbarrier.test_wait"
#endif
DEVICE void wait(unsigned barrier, unsigned parity) {
    asm volatile("{\n.reg .pred done;\nagain:\n" WAIT_ONCE
                 ".parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

DEVICE void arrive(unsigned barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(barrier) : "memory");
}

// This thread arrives when its copies so far have.
DEVICE void arrive_with_copies(unsigned barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

// The first COPYING_LANES lanes of a warp copy runs of bytes, multiples of 16, from global to shared memory:
// `expect_copies` of BYTES in all, some `copy_run`, `end_copies`. Each of these lanes arrives once. From
// Hopper on one lane requests whole runs, before that each copies 16 bytes at a time.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr int COPYING_LANES = 1;

template <int BYTES>
DEVICE void expect_copies(unsigned barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "n"(BYTES)
                 : "memory");
}

DEVICE void copy_run(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

DEVICE void end_copies(unsigned) {}
#else
constexpr int COPYING_LANES = WARP;

template <int BYTES>
DEVICE void expect_copies(unsigned) {}

DEVICE void copy_run(unsigned to, const void* from, unsigned bytes, unsigned) {
    for (int i = threadIdx.x % WARP; i < int(bytes / 16); i += WARP)
        copy_async(to + 16 * i, static_cast<const uint4*>(from) + i);
}

DEVICE void end_copies(unsigned barrier) { arrive_with_copies(barrier); }
#endif
}  // namespace mbarrier

// What this thread has read and written in shared memory comes before asynchronous copies that begin later.
DEVICE void fence_async_shared() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Of two pairs of fp16 numbers: the larger ones; all bits of the halves in which x is not less than y.
DEVICE __half2 larger_halves(__half2 x, __half2 y) { return __hmax2(x, y); }
DEVICE __half2 larger_halves_or_nan(__half2 x, __half2 y) { return __hmax2_nan(x, y); }
DEVICE unsigned halves_reaching(__half2 x, __half2 y) { return __hge2_mask(x, y); }
