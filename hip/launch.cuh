// Launches on AMD GPUs, and the names of CUDA's runtime that the kernels' launchers use. Kernels of one
// stream run one after the other: nothing overlaps, and there are no clusters.
#pragma once
#ifdef __HIP__
#include <hip/hip_runtime.h>

#define __grid_constant__
#define cudaStream_t hipStream_t
#define cudaError_t hipError_t
#define cudaSuccess hipSuccess
#define cudaErrorInvalidValue hipErrorInvalidValue
#define cudaErrorNotSupported hipErrorNotSupported
#define cudaGetDevice hipGetDevice
#define cudaGetLastError hipGetLastError
#define cudaDeviceGetAttribute hipDeviceGetAttribute
#define cudaDevAttrMultiProcessorCount hipDeviceAttributeMultiprocessorCount
#define cudaDevAttrMaxSharedMemoryPerBlockOptin hipDeviceAttributeMaxSharedMemoryPerBlock
#define cudaFuncAttributeMaxDynamicSharedMemorySize hipFuncAttributeMaxDynamicSharedMemorySize

template <typename... Arguments>
hipError_t cudaFuncSetAttribute(void (*kernel)(Arguments...), hipFuncAttribute attribute, int value) {
    return hipFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}

template <typename... Arguments>
hipError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void (*kernel)(Arguments...),
                                                         int threads, size_t shared) {
    return hipOccupancyMaxActiveBlocksPerMultiprocessor(blocks, kernel, threads, shared);
}
#else
#include <cuda_runtime.h>
#endif

// Lanes of a wave. The host's part of a kernel is compiled once for all GPUs, so it has to ask.
static inline int wave_lanes() {
    int device = 0, lanes = 0;
#ifdef __HIP__
    if (hipGetDevice(&device) == hipSuccess)
        (void)hipDeviceGetAttribute(&lanes, hipDeviceAttributeWarpSize, device);
#else
    lanes = RWKV_TILE == 9 ? 64 : 32;  // as the kernels are compiled to have them
    (void)device;
#endif
    return lanes;
}

static inline bool overlaps_launches() { return false; }
static inline bool on_hopper() { return false; }

template <typename... Expected, typename... Given>
int launch(void (*kernel)(Expected...), dim3 grid, dim3 block, size_t shared, cudaStream_t stream,
           const Given&... given) {
    kernel<<<grid, block, shared, stream>>>(Expected(given)...);
    return cudaGetLastError();
}

template <typename... Expected, typename... Given>
int launch_alone(void (*kernel)(Expected...), dim3 grid, dim3 block, size_t shared, cudaStream_t stream,
                 const Given&... given) {
    return launch(kernel, grid, block, shared, stream, given...);
}

template <typename... Expected, typename... Given>
int launch_clusters(unsigned, void (*)(Expected...), dim3, dim3, size_t, cudaStream_t, const Given&...) {
    return cudaErrorNotSupported;
}
