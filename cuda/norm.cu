// Residual add and layer norm of some rows, as before the head: out = norm(x + y), with the terms of
// norm.cuh.
//
// Reference: torch.nn.functional.layer_norm. Binding: Kernels.norm. Test: test/kernels/test_norm.py.
#include "norm.cuh"

// One block a row. out [blocks, C].
template <int N>
__global__ void __launch_bounds__(1024) norm_kernel(NormInput in, __half* out) {
    __shared__ float scratch[2][WARP];
    const Affine<N> affine(in);
    wait_for_inputs();
    const int row = in.gather ? in.gather[blockIdx.x] : blockIdx.x;
    float v[N];
    load_row(in, row, v);
    norm_row(in, affine, row, v, scratch);
    if (N * threadIdx.x < in.width) store_half(out + size_t(blockIdx.x) * in.width + N * threadIdx.x, v);
}

extern "C" {
// rows: of out, and of in->gather if there is one. columns: 4, 8, or 0 for what suits so many rows.
int rwkv_norm(const NormInput* in, int rows, int columns, __half* out, cudaStream_t stream) {
    return four_columns(*in, rows, columns)
               ? launch(norm_kernel<4>, rows, whole_warps(in->width / 4), 0, stream, *in, out)
               : launch(norm_kernel<8>, rows, whole_warps(in->width / 8), 0, stream, *in, out);
}
}
