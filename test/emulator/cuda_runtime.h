// The part of CUDA's runtime that launches need, for emulator.h.
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
    *value = which == cudaDevAttrMultiProcessorCount ? 4 : int(emulator::SHARED);
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
