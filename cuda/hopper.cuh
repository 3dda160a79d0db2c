// What a Hopper GPU (sm_90a) adds for tiled products: barriers in shared memory (mbarrier), the tensor memory accelerator (TMA) for tiles,
// asynchronous tensor-core products of a warpgroup (wgmma), clusters.
#pragma once
#include <cuda.h>
#include <stdint.h>

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
namespace hopper {
constexpr uint64_t READ_ONCE = 0x12F0000000000000;  // L2 cache policies: evict first, evict last
constexpr uint64_t READ_AGAIN = 0x14F0000000000000;

__device__ __forceinline__ uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

// Barriers. A phase ends when `arrivals` have arrived and all bytes expected have come; `parity` is that of the phase waited for.
__device__ __forceinline__ void barrier_init(uint32_t barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// After the inits, before the TMA or another block sees the barriers.
__device__ __forceinline__ void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void arrive_and_expect(uint32_t barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, unsigned parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "AGAIN_%=: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra AGAIN_%=; }" ::"r"(barrier), "r"(parity) : "memory");
}

// The same for what other blocks have sent.
__device__ __forceinline__ void barrier_wait_cluster(uint32_t barrier, unsigned parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "AGAIN_%=: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra AGAIN_%=; }" ::"r"(barrier), "r"(parity) : "memory");
}

// A box of a tensor map whose dimensions are a place in a strip, a row and a strip, into shared memory; its bytes count at `barrier`.
__device__ __forceinline__ void copy_tile(uint32_t to, const CUtensorMap* map, int row, int strip, uint32_t barrier, uint64_t policy) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3, %4}], [%5], %6;"
                 ::"r"(to), "l"(map), "r"(0), "r"(row), "r"(strip), "r"(barrier), "l"(policy) : "memory");
}

// True in one thread of the warp.
__device__ __forceinline__ bool elect() {
    uint32_t is;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(is));
    return is != 0;
}

__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank;
    asm volatile("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

__device__ __forceinline__ float4 load_shared(uint32_t address) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
    return v;
}

// 16 bytes to a place of block `rank` of the cluster; they count at its barrier.
__device__ __forceinline__ void send_to(unsigned rank, uint32_t place, uint32_t barrier, float4 v) {
    asm volatile("{ .reg .b32 there, counter; mapa.shared::cluster.u32 there, %0, %2; mapa.shared::cluster.u32 counter, %1, %2;\n"
                 "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%3, %4, %5, %6}, [counter]; }"
                 ::"r"(place), "r"(barrier), "r"(rank), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

// As both, of 8 bytes.
__device__ __forceinline__ float2 load_shared2(uint32_t address) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ void send_to(unsigned rank, uint32_t place, uint32_t barrier, float x, float y) {
    asm volatile("{ .reg .b32 there, counter; mapa.shared::cluster.u32 there, %0, %2; mapa.shared::cluster.u32 counter, %1, %2;\n"
                 "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [there], {%3, %4}, [counter]; }"
                 ::"r"(place), "r"(barrier), "r"(rank), "f"(x), "f"(y) : "memory");
}

// Operands in shared memory in the TMA's 128-byte swizzle: rows of 128 bytes, eight of them (1024 bytes, aligned so) a unit.
__device__ __forceinline__ uint64_t operand(uint32_t address) {
    return uint64_t((address & 0x3ffff) >> 4) | uint64_t(1) << 16 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
}

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_close() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void products_done() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

#define OUT4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define OUT16(i) OUT4(i), OUT4(i + 4), OUT4(i + 8), OUT4(i + 12)

// c [64 x N, fp32] += a [64 x 16] b [N x 16]^T, fp16. a's rows of 128 bytes run along k, or (ACROSS) along the 64 rows.
template <int ACROSS>
__device__ __forceinline__ void product16(float* c, uint64_t a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, 1, 1, 1, %10, 0;"
                 : OUT4(0), OUT4(4) : "l"(a), "l"(b), "n"(ACROSS));
}

template <int ACROSS>
__device__ __forceinline__ void product32(float* c, uint64_t a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, "
                 "%15}, %16, %17, 1, 1, 1, %18, 0;" : OUT16(0) : "l"(a), "l"(b), "n"(ACROSS));
}

template <int ACROSS>
__device__ __forceinline__ void product64(float* c, uint64_t a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, "
                 "%15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, 1, 1, 1, %34, 0;"
                 : OUT16(0), OUT16(16) : "l"(a), "l"(b), "n"(ACROSS));
}

template <int ACROSS>
__device__ __forceinline__ void product128(float* c, uint64_t a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, "
                 "%15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, "
                 "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, "
                 "%61, %62, %63}, %64, %65, 1, 1, 1, %66, 0;"
                 : OUT16(0), OUT16(16), OUT16(32), OUT16(48) : "l"(a), "l"(b), "n"(ACROSS));
}

// Any multiple of 16 rows of b, in products of 128, 64, 32 and 16 of them.
template <int N, int ACROSS>
__device__ __forceinline__ void product(float* c, uint64_t a, uint64_t b) {
    constexpr int NOW = N >= 128 ? 128 : N >= 64 ? 64 : N >= 32 ? 32 : 16;
    if constexpr (NOW == 128) product128<ACROSS>(c, a, b);
    if constexpr (NOW == 64) product64<ACROSS>(c, a, b);
    if constexpr (NOW == 32) product32<ACROSS>(c, a, b);
    if constexpr (NOW == 16) product16<ACROSS>(c, a, b);
    if constexpr (N > NOW) product<N - NOW, ACROSS>(c + NOW / 2, a, b + NOW * 128 / 16);
}

// Two 8 x 8 matrices of fp16 in the layout of a product's result, transposed: lane i < 16 names the place of row i % 8 of matrix i / 8.
__device__ __forceinline__ void store_transposed(uint32_t place, uint32_t first, uint32_t second) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(place), "r"(first), "r"(second) : "memory");
}

// A barrier of some of the block's threads.
__device__ __forceinline__ void sync_some(int name, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
}  // namespace hopper
#endif
