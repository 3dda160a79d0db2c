// What all kernels share: launches that overlap the end of the kernel before, vector loads, reductions.
//
// Every launcher is extern "C", takes raw device pointers and a stream, and returns a cudaError_t as an int.
#pragma once
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

constexpr int WARP = 32;
constexpr unsigned ALL = 0xffffffffu;

// Programmatic dependent launch. A kernel launched with `launch` may start while the one before it still runs. Until `wait_for_inputs`
// it may read only what was finished at least two kernels earlier (weights, the states). The next kernel is let in right after that, so no
// more than two kernels ever overlap.
__device__ __forceinline__ void wait_for_inputs() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Of the compute capability. Static, so that libraries for several architectures in one process each have an answer of their own.
static inline int major_capability() {
    static const int number = [] {
        int device = 0, major = 0;
        cudaGetDevice(&device);
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
        return major;
    }();
    return number;
}

static inline bool overlaps_launches() { return major_capability() >= 9; }
static inline bool on_hopper() { return major_capability() == 9; }

inline int multiprocessors() {
    int device = 0, count = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    return count;
}

// The first `count` of: may begin while the kernel before runs; blocks next to each other in x form clusters of so many.
template <typename... Expected, typename... Given>
int launch_with(int count, unsigned cluster, void (*kernel)(Expected...), dim3 grid, dim3 block, size_t shared, cudaStream_t stream,
                const Given&... given) {
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = cluster;
    attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = count;
    return cudaLaunchKernelEx(&config, kernel, Expected(given)...);
}

template <typename... Expected, typename... Given>
int launch(void (*kernel)(Expected...), dim3 grid, dim3 block, size_t shared, cudaStream_t stream, const Given&... given) {
    return launch_with(overlaps_launches() ? 1 : 0, 1, kernel, grid, block, shared, stream, given...);
}

// For Hopper and later alone.
template <typename... Expected, typename... Given>
int launch_clusters(unsigned cluster, void (*kernel)(Expected...), dim3 grid, dim3 block, size_t shared, cudaStream_t stream,
                    const Given&... given) {
    return launch_with(2, cluster, kernel, grid, block, shared, stream, given...);
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(ALL, x, offset);
    return x;
}

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + __expf(-x)); }

__device__ __forceinline__ float2 to_float2(uint32_t pair) { return __half22float2(*reinterpret_cast<const __half2*>(&pair)); }

__device__ __forceinline__ uint32_t to_half2(float x, float y) {
    const __half2 pair = __floats2half2_rn(x, y);
    return *reinterpret_cast<const uint32_t*>(&pair);
}

// Left to itself, the compiler makes four stores of 4 bytes of a uint4 whose words it has just packed.
__device__ __forceinline__ void store(void* to, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

// 16 bytes of weights that are read once in a step: not worth a place in L1.
__device__ __forceinline__ uint4 load_once(const void* address) {
    uint4 x;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(address));
    return x;
}

// Weights that a kernel soon to come will read. A kernel that leaves the memory idle asks for them, and they wait in the L2 cache.
struct Ahead {
    const char* from;
    unsigned bytes;  // a multiple of 16
};

// This block's piece of them.
__device__ __forceinline__ void prefetch(const Ahead& ahead) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    const unsigned blocks = gridDim.x * gridDim.y, block = blockIdx.y * gridDim.x + blockIdx.x, piece = 16 * 1024;
    for (unsigned i = block + threadIdx.x * blocks; i < (ahead.bytes + piece - 1) / piece; i += blocks * blockDim.x)
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(ahead.from + i * piece), "r"(min(piece, ahead.bytes - i * piece))
                     : "memory");
#endif
}

// States that the recurrence will soon read, `bytes` (a multiple of 128) of each of the first rows, at from + slot * stride. Not by bulk
// prefetches: those would stand in the way of what the kernel itself has copied.
struct AheadStates {
    const char* from;
    const int* slots;
    size_t stride;
    unsigned bytes, rows;
};

// This block's part of them, by the first `threads` of its threads.
__device__ __forceinline__ void prefetch(const AheadStates& ahead, unsigned threads) {
    const unsigned each = ahead.bytes / 128, lines = each * ahead.rows;
    if (threadIdx.x >= threads) return;
    for (unsigned i = blockIdx.x * threads + threadIdx.x; i < lines; i += gridDim.x * threads) {
        const int slot = __ldg(ahead.slots + i / each);
        if (slot < 0) continue;
        const char* line = ahead.from + slot * ahead.stride + i % each * 128;
        asm volatile("prefetch.global.L2 [%0];" ::"l"(line) : "memory");
    }
}

// 16 bytes from global to shared memory, on their way while the thread goes on. `copies_done<N>` waits until all but the last N groups that
// this thread has closed with `close_copies` are there; only this thread is sure to see them then.
__device__ __forceinline__ void copy_async(uint4* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(unsigned(__cvta_generic_to_shared(to))), "l"(from) : "memory");
}

__device__ __forceinline__ void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int N>
__device__ __forceinline__ void copies_done() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// c [16 x 8, fp32] += a [16 x 16] b [16 x 8]: one tensor-core product of a warp.
__device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
