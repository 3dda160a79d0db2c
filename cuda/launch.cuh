// Launches on NVIDIA GPUs: from Hopper on a kernel may overlap the end of the one before it, and blocks may
// form clusters.
#pragma once
#include <cuda_runtime.h>

// Major number of the compute capability. Static, as libraries for several architectures may be loaded by one
// process.
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

// With the first `count` of these attributes: may overlap the kernel before; blocks next to each other in x
// form clusters of that size.
template <typename... Expected, typename... Given>
int launch_with(int count, unsigned cluster, void (*kernel)(Expected...), dim3 grid, dim3 block,
                size_t shared, cudaStream_t stream, const Given&... given) {
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
int launch(void (*kernel)(Expected...), dim3 grid, dim3 block, size_t shared, cudaStream_t stream,
           const Given&... given) {
    return launch_with(overlaps_launches() ? 1 : 0, 1, kernel, grid, block, shared, stream, given...);
}

// After the end of the kernel before.
template <typename... Expected, typename... Given>
int launch_alone(void (*kernel)(Expected...), dim3 grid, dim3 block, size_t shared, cudaStream_t stream,
                 const Given&... given) {
    return launch_with(0, 1, kernel, grid, block, shared, stream, given...);
}

// Only for Hopper and newer.
template <typename... Expected, typename... Given>
int launch_clusters(unsigned cluster, void (*kernel)(Expected...), dim3 grid, dim3 block, size_t shared,
                    cudaStream_t stream, const Given&... given) {
    return launch_with(2, cluster, kernel, grid, block, shared, stream, given...);
}
