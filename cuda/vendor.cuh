// Whose instructions and launches the kernels are compiled for. RWKV_PORTABLE: those of hip/ under nvcc, to
// test them on an NVIDIA GPU.
#pragma once
#if defined(__HIP__) || defined(RWKV_PORTABLE)
#define AMD_FORMS 1
#include "../hip/launch.cuh"
#include "../hip/primitives.cuh"
#else
#define AMD_FORMS 0
#include "launch.cuh"
#include "primitives.cuh"
#endif
