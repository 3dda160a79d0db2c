// What a Hopper GPU (sm_90a) adds: the tensor memory accelerator (TMA), wgmma, and shared memory of a
// cluster. The PTX ISA manual has the exact meaning of the instructions.
#pragma once
#include "vendor.cuh"

#if HOPPER
#include <cuda.h>

namespace hopper {
constexpr uint64_t READ_ONCE = 0x12F0000000000000;  // L2 cache policies: evict first, evict last
constexpr uint64_t READ_AGAIN = 0x14F0000000000000;

// Barriers in shared memory; see `mbarrier`.
DEVICE void barrier_init(uint32_t barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// After the inits, before the TMA or another block sees the barriers.
DEVICE void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void arrive_and_expect(uint32_t barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

DEVICE void arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

#define WAIT(SCOPE)                             \
    "{ .reg .pred done;\n"                      \
    "AGAIN_%=: mbarrier.try_wait.parity." SCOPE \
    "shared::cta.b64 done, [%0], %1;\n"         \
    "@!done bra AGAIN_%=; }"
DEVICE void barrier_wait(uint32_t barrier, unsigned parity) {
    asm volatile(WAIT("")::"r"(barrier), "r"(parity) : "memory");
}

// The same for what other blocks of the cluster have sent.
DEVICE void barrier_wait_cluster(uint32_t barrier, unsigned parity) {
    asm volatile(WAIT("acquire.cluster.")::"r"(barrier), "r"(parity) : "memory");
}

// Registers of a thread from here on, by all warps of a warpgroup.
template <int REGISTERS>
DEVICE void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
DEVICE void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// True in one thread of the warp.
DEVICE bool elect() {
    uint32_t is;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(is));
    return is != 0;
}

DEVICE unsigned cluster_rank() {
    unsigned rank;
    asm volatile("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
    return rank;
}

DEVICE void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

DEVICE float4 load_shared(uint32_t address) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

DEVICE uint32_t load_shared_word(uint32_t address) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}

DEVICE uint2 load_shared_two(uint32_t address) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
    return v;
}

DEVICE uint4 load_shared_words(uint32_t address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

DEVICE void store_shared(uint32_t address, float x) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}

DEVICE void store_shared(uint32_t address, float4 v) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v.x), "f"(v.y), "f"(v.z),
                 "f"(v.w)
                 : "memory");
}

DEVICE void store_shared(uint32_t address, uint32_t x) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

DEVICE void store_shared(uint32_t address, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

DEVICE float2 load_shared2(uint32_t address) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
    return v;
}

// 16 or 8 bytes into the shared memory of block `rank` of the cluster; they count at its barrier.
#define SEND(SIZE, VALUES)                                                  \
    "{ .reg .b32 there, counter; mapa.shared::cluster.u32 there, %0, %2;\n" \
    "mapa.shared::cluster.u32 counter, %1, %2;\n"                           \
    "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes." SIZE " [there], " VALUES ", [counter]; }"
DEVICE void send_to(unsigned rank, uint32_t place, uint32_t barrier, float4 v) {
    asm volatile(SEND("v4.f32", "{%3, %4, %5, %6}")::"r"(place), "r"(barrier), "r"(rank), "f"(v.x), "f"(v.y),
                 "f"(v.z), "f"(v.w)
                 : "memory");
}

DEVICE void send_to(unsigned rank, uint32_t place, uint32_t barrier, float x, float y) {
    asm volatile(SEND("v2.f32", "{%3, %4}")::"r"(place), "r"(barrier), "r"(rank), "f"(x), "f"(y) : "memory");
}

// TMA. A box of a two-dimensional tensor map at (column, row) into shared memory; its bytes count at
// `barrier`.
DEVICE void load_box(uint32_t to, const CUtensorMap* map, int column, int row, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
        "[%4];" ::"r"(to),
        "l"(map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}

// The same with an L2 cache policy.
DEVICE void load_box_of_rows(uint32_t to, const CUtensorMap* map, int column, int row, uint32_t barrier,
                             uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
        : "memory");
}

// The same of a map whose dimensions are a column in a strip, a row and a strip.
DEVICE void load_box(uint32_t to, const CUtensorMap* map, int row, int strip, uint32_t barrier,
                     uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
        "l"(map), "r"(0), "r"(row), "r"(strip), "r"(barrier), "l"(policy)
        : "memory");
}

// A run of bytes, a multiple of 16, into shared memory.
DEVICE void load_bytes(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, uint64_t policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
        "[%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}

// A box from shared memory to its place; what lies outside the matrix is left out.
DEVICE void store_box(const CUtensorMap* map, int column, int row, uint32_t from) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], "
        "[%3];\n\tcp.async.bulk.commit_group;" ::"l"(map),
        "r"(column), "r"(row), "r"(from)
        : "memory");
}

// Until the boxes stored have been read from shared memory; until they are written.
DEVICE void wait_boxes_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
DEVICE void wait_boxes_written() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Fetches a map ahead: else the first box waits for it.
DEVICE void prefetch_map(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// wgmma: products of a warpgroup with operands in shared memory, in the TMA's swizzle of 128 bytes: rows of
// 128 bytes, eight of them (1024 bytes, aligned so) a unit. The upper half of their descriptors is the same
// for all; the lower counts 16 bytes.
constexpr uint64_t UPPER_HALF = uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
DEVICE uint32_t operand(uint32_t address) { return (address & 0x3ffff) >> 4 | 1 << 16; }

// What all threads of a warp have: the compiler keeps it in uniform registers, from which wgmma reads its
// descriptors. To move each there takes longer than products of few rows, and this longer than that for many.
DEVICE uint32_t uniform(uint32_t x) { return __shfl_sync(0xffffffff, x, 0); }

DEVICE void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Zeros for accumulators. The compiler may put plain ones between wgmma instructions.
template <int N>
DEVICE void clear(float (&acc)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("mov.f32 %0, 0f00000000;" : "=f"(acc[i]));
}

// c [64 x N, fp32] += a [64 x 16] b [N x 16]^T, fp16. Rows of 128 bytes of a run along k, or (TRANSPOSED)
// along its 64 rows.
#define OUT4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define OUT16(i) OUT4(i), OUT4(i + 4), OUT4(i + 8), OUT4(i + 12)
#define OUT64 OUT16(0), OUT16(16), OUT16(32), OUT16(48)
#define TO8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TO16 TO8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define TO32 TO16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TO48 TO32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define TO64 TO48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TO40 TO32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define TO80 TO64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define TO96 TO80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define TO112 \
    TO96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define TO128 \
    TO112 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA(N, TO, A, B, FLAG, ...)                                                                   \
    template <int TRANSPOSED>                                                                           \
    DEVICE void wgmma##N(float* c, uint32_t a, uint32_t b) {                                            \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" TO "}, %" #A ", %" #B   \
                     ", 1, 1, 1, %" #FLAG ", 0;"                                                        \
                     : __VA_ARGS__                                                                      \
                     : "l"(UPPER_HALF | a), "l"(UPPER_HALF | b), "n"(TRANSPOSED));                      \
    }                                                                                                   \
    DEVICE void wgmma_fp8_##N(float* c, uint32_t a, uint32_t b) {                                       \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" TO "}, %" #A ", %" #B \
                     ", 1, 1, 1;"                                                                       \
                     : __VA_ARGS__                                                                      \
                     : "l"(UPPER_HALF | a), "l"(UPPER_HALF | b));                                       \
    }
WGMMA(16, TO8, 8, 9, 10, OUT4(0), OUT4(4))
WGMMA(32, TO16, 16, 17, 18, OUT16(0))
WGMMA(64, TO32, 32, 33, 34, OUT16(0), OUT16(16))
WGMMA(80, TO40, 40, 41, 42, OUT16(0), OUT16(16), OUT4(32), OUT4(36))
WGMMA(128, TO64, 64, 65, 66, OUT64)
WGMMA(160, TO80, 80, 81, 82, OUT64, OUT16(64))
WGMMA(192, TO96, 96, 97, 98, OUT64, OUT16(64), OUT16(80))
WGMMA(256, TO128, 128, 129, 130, OUT64, OUT16(64), OUT16(80), OUT16(96), OUT16(112))

// The same for any multiple N of 16, in steps of 128, 64, 32 and 16.
template <int N, int TRANSPOSED>
DEVICE void wgmma(float* c, uint32_t a, uint32_t b) {
    constexpr int NOW = N >= 128 ? 128 : N >= 64 ? 64 : N >= 32 ? 32 : 16;
    if constexpr (NOW == 128) wgmma128<TRANSPOSED>(c, a, b);
    if constexpr (NOW == 64) wgmma64<TRANSPOSED>(c, a, b);
    if constexpr (NOW == 32) wgmma32<TRANSPOSED>(c, a, b);
    if constexpr (NOW == 16) wgmma16<TRANSPOSED>(c, a, b);
    if constexpr (N > NOW) wgmma<N - NOW, TRANSPOSED>(c + NOW / 2, a, b + NOW * 128 / 16);
}

// c [64 x N, fp32] += a [64 x 32] b [N x 32]^T of e4m3, from rows of 128 bytes of a run along k.
template <int N>
DEVICE void wgmma_fp8(float* c, uint32_t a, uint32_t b) {
    constexpr int NOW = N >= 128 ? 128 : N >= 64 ? 64 : N >= 32 ? 32 : 16;
    if constexpr (NOW == 128) wgmma_fp8_128(c, a, b);
    if constexpr (NOW == 64) wgmma_fp8_64(c, a, b);
    if constexpr (NOW == 32) wgmma_fp8_32(c, a, b);
    if constexpr (NOW == 16) wgmma_fp8_16(c, a, b);
    if constexpr (N > NOW) wgmma_fp8<N - NOW>(c + NOW / 2, a, b + NOW * 128 / 16);
}

// The same by one instruction: each reads a anew.
template <int N, bool FP8, int TRANSPOSED>
DEVICE void wgmma_at_once(float* c, uint32_t a, uint32_t b) {
    static_assert(N == 80 || N == 128 || N == 160 || N == 192 || N == 256);
    if constexpr (N == 80 && FP8) wgmma_fp8_80(c, a, b);
    if constexpr (N == 80 && !FP8) wgmma80<TRANSPOSED>(c, a, b);
    if constexpr (N == 128 && FP8) wgmma_fp8_128(c, a, b);
    if constexpr (N == 128 && !FP8) wgmma128<TRANSPOSED>(c, a, b);
    if constexpr (N == 160 && FP8) wgmma_fp8_160(c, a, b);
    if constexpr (N == 160 && !FP8) wgmma160<TRANSPOSED>(c, a, b);
    if constexpr (N == 192 && FP8) wgmma_fp8_192(c, a, b);
    if constexpr (N == 192 && !FP8) wgmma192<TRANSPOSED>(c, a, b);
    if constexpr (N == 256 && FP8) wgmma_fp8_256(c, a, b);
    if constexpr (N == 256 && !FP8) wgmma256<TRANSPOSED>(c, a, b);
}

// The same with a in registers: of rows 16 warp + lane / 4 and 8 below pairs of numbers at 2 (lane % 4), and
// of both those 8 later. They must stay as they are until the product is done.
#define WGMMA_OF_REGISTERS(N, TO, A0, A1, A2, A3, B, ...)                                                \
    DEVICE void wgmma_of_registers##N(float* c, const uint32_t (&a)[4], uint32_t b) {                    \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" TO "}, {%" #A0 ", %" #A1 \
                     ", %" #A2 ", %" #A3 "}, %" #B ", 1, 1, 1, 0;"                                       \
                     : __VA_ARGS__                                                                       \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(UPPER_HALF | b));                 \
    }
WGMMA_OF_REGISTERS(16, TO8, 8, 9, 10, 11, 12, OUT4(0), OUT4(4))
WGMMA_OF_REGISTERS(32, TO16, 16, 17, 18, 19, 20, OUT16(0))
WGMMA_OF_REGISTERS(64, TO32, 32, 33, 34, 35, 36, OUT16(0), OUT16(16))
WGMMA_OF_REGISTERS(80, TO40, 40, 41, 42, 43, 44, OUT16(0), OUT16(16), OUT4(32), OUT4(36))
WGMMA_OF_REGISTERS(128, TO64, 64, 65, 66, 67, 68, OUT64)
WGMMA_OF_REGISTERS(160, TO80, 80, 81, 82, 83, 84, OUT64, OUT16(64))
WGMMA_OF_REGISTERS(192, TO96, 96, 97, 98, 99, 100, OUT64, OUT16(64), OUT16(80))
WGMMA_OF_REGISTERS(256, TO128, 128, 129, 130, 131, 132, OUT64, OUT16(64), OUT16(80), OUT16(96), OUT16(112))

// The same by one instruction.
template <int N>
DEVICE void wgmma_of_registers_at_once(float* c, const uint32_t (&a)[4], uint32_t b) {
    static_assert(N == 80 || N == 128 || N == 160 || N == 192 || N == 256);
    if constexpr (N == 80) wgmma_of_registers80(c, a, b);
    if constexpr (N == 128) wgmma_of_registers128(c, a, b);
    if constexpr (N == 160) wgmma_of_registers160(c, a, b);
    if constexpr (N == 192) wgmma_of_registers192(c, a, b);
    if constexpr (N == 256) wgmma_of_registers256(c, a, b);
}

// What is in the registers stays in front of `wgmma_begin`, where the compiler might compute it later.
DEVICE void ready(uint32_t (&a)[4]) {
    asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory");
}

template <int N>
DEVICE void wgmma_of_registers(float* c, const uint32_t (&a)[4], uint32_t b) {
    constexpr int NOW = N >= 128 ? 128 : N >= 64 ? 64 : N >= 32 ? 32 : 16;
    if constexpr (NOW == 128) wgmma_of_registers128(c, a, b);
    if constexpr (NOW == 64) wgmma_of_registers64(c, a, b);
    if constexpr (NOW == 32) wgmma_of_registers32(c, a, b);
    if constexpr (NOW == 16) wgmma_of_registers16(c, a, b);
    if constexpr (N > NOW) wgmma_of_registers<N - NOW>(c + NOW / 2, a, b + NOW * 128 / 16);
}

// Matrices of 8 x 8 in the layout of a result of `wgmma` to shared memory. Four: lane i names row i % 8 of
// matrix i / 8.
DEVICE void store_matrices(uint32_t place, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(place), "r"(a),
                 "r"(b), "r"(c), "r"(d)
                 : "memory");
}

// Two, transposed, of lanes 0 to 15.
DEVICE void store_transposed(uint32_t place, uint32_t first, uint32_t second) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(place), "r"(first),
                 "r"(second)
                 : "memory");
}
}  // namespace hopper
#endif
