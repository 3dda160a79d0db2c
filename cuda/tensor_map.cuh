// Maps of matrices for the tensor memory accelerator. The driver encodes them; its function is found
// through the runtime, so that libcuda is not linked.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

using EncodeTensorMap = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                     const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                                     CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                     CUtensorMapFloatOOBfill);

static inline EncodeTensorMap find_encode() {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                               cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess
               ? reinterpret_cast<EncodeTensorMap>(function)
               : nullptr;
}

// BYTES: of a number, 2 or 1. `stride` in bytes, of all dimensions but the first; `box`: what one copy loads,
// in a swizzle of SWIZZLE bytes, 128 or 64; zeros outside the matrix.
template <int DIMENSIONS, int BYTES = 2, int SWIZZLE = 128>
bool make_tensor_map(CUtensorMap* out, const void* matrix, const cuuint64_t (&size)[DIMENSIONS],
                     const cuuint64_t (&stride)[DIMENSIONS - 1], const cuuint32_t (&box)[DIMENSIONS]) {
    static const EncodeTensorMap encode = find_encode();
    cuuint32_t step[DIMENSIONS];
    for (cuuint32_t& one : step) one = 1;
    return encode &&
           encode(out, BYTES == 2 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8,
                  DIMENSIONS, const_cast<void*>(matrix), size, stride, box, step,
                  CU_TENSOR_MAP_INTERLEAVE_NONE,
                  SWIZZLE == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}
