// wkv_decode.cuh with states in fp32, or in fp16 that each token rounds, by multiplications and additions
// alone; and the launcher for all kinds of states.
//
// Reference: wkv_step and readout of rwkv_batch/ops/torch_ops.py. Binding: Kernels.wkv_decode. Test:
// test/kernels/test_wkv_decode.py.
#include "wkv_single.cuh"

extern "C" {
// counted: null, or the address of the number of rows on the device, `rows` at most. numbers: a StateNumbers.
// readout: null, or by what y of some rows is scaled.
int rwkv_wkv_decode(const TimeMixInput* in, int rows, const int* counted, const int* slots, int numbers,
                    const ReadoutInput* readout, cudaStream_t stream) {
    return numbers == SINGLE         ? launch_decode<Single>(*in, rows, counted, slots, readout, stream)
           : numbers == ROUNDED_HALF ? launch_decode<Rounded>(*in, rows, counted, slots, readout, stream)
                                     : wkv_decode_fp16(*in, rows, counted, slots, readout, stream);
}
}
