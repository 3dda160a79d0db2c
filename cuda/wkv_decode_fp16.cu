// wkv_decode.cuh with states in fp16, by tensor cores.
//
// Reference: wkv_step and readout of rwkv_batch/ops/torch_ops.py. Binding: Kernels.wkv_decode. Test:
// test/kernels/test_wkv_decode.py.
// How: wkv_half.cuh.
#include "wkv_half.cuh"

int wkv_decode_fp16(const TimeMixInput& in, int rows, const int* counted, const int* slots,
                    const ReadoutInput* readout, cudaStream_t stream) {
    return launch_decode<Half>(in, rows, counted, slots, readout, stream);
}
