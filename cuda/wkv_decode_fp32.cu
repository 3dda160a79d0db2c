// wkv_decode.cuh with states in fp32, by multiplications and additions alone; and the launcher for both kinds
// of states.
//
// Reference: wkv_step and readout of rwkv_batch/ops/torch_ops.py. Binding: Kernels.wkv_decode. Test:
// test/kernels/test_wkv_decode.py.
#include "wkv_single.cuh"

extern "C" {
// counted: null, or the address of the number of rows on the device, `rows` at most. fp32: states in fp32,
// else fp16. readout: null, or by what y of some rows is scaled.
int rwkv_wkv_decode(const TimeMixInput* in, int rows, const int* counted, const int* slots, int fp32,
                    const ReadoutInput* readout, cudaStream_t stream) {
    return fp32 ? launch_decode<Single>(*in, rows, counted, slots, readout, stream)
                : wkv_decode_fp16(*in, rows, counted, slots, readout, stream);
}
}
