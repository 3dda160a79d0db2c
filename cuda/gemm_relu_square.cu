// relu squared in place, the epilogue of a GEMM that a library computes: h [n] fp16 = relu(h)^2, at most what
// fp16 holds.
//
// Reference: torch.relu(h).square(). Binding: Kernels.relu_square. Test:
// test/kernels/test_gemm_relu_square.py.
#include "common.cuh"

// 8 numbers a thread.
__global__ void relu_square_kernel(uint4* h, size_t vectors) {
    wait_for_inputs();
    const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= vectors) return;
    uint4 x = h[i];
    uint32_t* pairs = reinterpret_cast<uint32_t*>(&x);
#pragma unroll
    for (int p = 0; p < 4; p++) pairs[p] = relu_square_pair(pairs[p]);
    h[i] = x;
}

extern "C" {
// count: a multiple of 8.
int rwkv_relu_square(void* h, size_t count, cudaStream_t stream) {
    const size_t vectors = count / 8;
    return launch(relu_square_kernel, unsigned((vectors + 255) / 256), 256, 0, stream, static_cast<uint4*>(h),
                  vectors);
}
}
