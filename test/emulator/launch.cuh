// hip/launch.cuh for emulator.h.
#pragma once
#include "cuda_fp16.h"
#include "emulator.h"

using cudaStream_t = void*;
using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorNotSupported = 801;
constexpr int cudaDevAttrMultiProcessorCount = 0, cudaDevAttrMaxSharedMemoryPerBlockOptin = 1,
              cudaFuncAttributeMaxDynamicSharedMemorySize = 0;

inline int cudaGetDevice(int* device) { return *device = 0; }
inline int cudaGetLastError() { return 0; }

inline int cudaDeviceGetAttribute(int* value, int which, int) {
    *value = which == cudaDevAttrMultiProcessorCount ? 4 : 64 << 10;
    return 0;
}

template <typename Kernel>
int cudaFuncSetAttribute(Kernel, int, size_t bytes) {
    return bytes <= emulator::SHARED ? cudaSuccess : cudaErrorInvalidValue;
}

template <typename Kernel>
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, size_t) {
    *blocks = 2;
    return 0;
}

inline int wave_lanes() { return RWKV_TILE == 9 ? 64 : 32; }
inline bool overlaps_launches() { return false; }
inline bool on_hopper() { return false; }

template <typename... Expected, typename... Given>
int launch(void (*kernel)(Expected...), dim3 grid, dim3 block, size_t, cudaStream_t, const Given&... given) {
    emulator::run(grid, block, [&] { kernel(Expected(given)...); });
    return cudaSuccess;
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
