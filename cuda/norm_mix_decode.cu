// Residual add, layer norm, token shift and mixing of rows of one token each (formulas in norm.cuh). Few
// rows: one block a row.
//
// Reference: layer_norm of torch.nn.functional, then token_shift and mix of rwkv_batch/ops/torch_ops.py.
// Binding: Kernels.norm_mix_decode. Test: test/kernels/test_norm_mix_decode.py.
#include "norm.cuh"

// The stream, the slot and its state were written several kernels ago; they and the weights are loaded before
// waiting for what is added. Not so in a step's first norm: the kernel before it may still change slots
// (sequence_feed.cu). CODED: so many mixes are made fp8.
template <int N, int MIXES, int CODED>
__global__ void __launch_bounds__(1024)
    norm_mix_decode_kernel(NormInput in, const int* slots, __half* shift, size_t slot_stride,
                           const __half* mixes, __half* out, bool next_at_once, Fp8Rows coded) {
    __shared__ float scratch[2][WARP];
    const int column = N * threadIdx.x, row = blockIdx.x;
    const bool inside = column < in.width, first = in.tokens != nullptr;
    float v[N];
    Raw<N> before = {}, amounts[MIXES] = {};
    int slot = -1;
    const auto look_up = [&] {
        slot = slots[row];
        if (inside && slot >= 0) before.load(shift + slot * slot_stride + column);
    };
    load_row(in, row, v);
    if (!first) look_up();
    const Affine<N> affine(in);
#pragma unroll
    for (int i = 0; i < MIXES; i++)
        if (inside) amounts[i].load(mixes + i * in.width + column);
    wait_for_inputs(next_at_once);
    if (first) look_up();
    norm_row(in, affine, row, v, scratch);
    if (CODED == 0 && !inside) return;
    if (inside && slot >= 0) store_half(shift + slot * slot_stride + column, v);
#pragma unroll
    for (int i = CODED; i < MIXES; i++)
        if (inside)
            mix_and_store(v, before, amounts[i], out + (i * size_t(gridDim.x) + row) * in.width + column);
    if constexpr (CODED > 0) {
        __shared__ uint32_t largest[CODED][WARP];
        Raw<N> mixed[CODED];
#pragma unroll
        for (int i = 0; i < CODED; i++) {
            mixed[i] = mix(v, before, amounts[i]);  // zeros outside
            if (i >= first_half(CODED) && inside)
                mixed[i].store(out + (i * size_t(gridDim.x) + row) * in.width + column);
        }
        store_coded(mixed, coded, gridDim.x, row, in.width, largest);
    }
}

namespace {
template <int N, int MIXES>
int norm_mix(const NormInput& in, int rows, const int* slots, __half* shift, size_t slot_stride,
             const __half* mixes, __half* out, bool next_at_once, const Fp8Rows& coded, cudaStream_t stream) {
    auto kernel = norm_mix_decode_kernel<N, MIXES, 0>;
    if constexpr (CODES_ROWS && N == 8 && fp8_mixes(MIXES) > 0)
        if (coded.codes) kernel = norm_mix_decode_kernel<N, MIXES, fp8_mixes(MIXES)>;
    return launch(kernel, rows, whole_warps(in.width / N), 0, stream, in, slots, shift, slot_stride, mixes,
                  out, next_at_once, coded);
}

template <int N>
int norm_mix(const NormInput& in, int rows, const int* slots, __half* shift, size_t slot_stride,
             const __half* mixes, int n, __half* out, bool next_at_once, const Fp8Rows& coded,
             cudaStream_t stream) {
    if (n != 1 && n != SOME_MIXES && n != MAX_MIXES) return cudaErrorInvalidValue;
    const auto run = n == 1            ? norm_mix<N, 1>
                     : n == SOME_MIXES ? norm_mix<N, SOME_MIXES>
                                       : norm_mix<N, MAX_MIXES>;
    return run(in, rows, slots, shift, slot_stride, mixes, out, next_at_once, coded, stream);
}
}  // namespace

extern "C" {
// n: 1, 3 or 6 mixes. next_at_once: as of wait_for_inputs, but for many rows. codes, scales: where the first
// mixes go as fp8; null: nowhere.
int rwkv_norm_mix_decode(const NormInput* in, int rows, const int* slots, __half* shift, size_t slot_stride,
                         const __half* mixes, int n, __half* out, uint8_t* codes, float* scales,
                         int next_at_once, cudaStream_t stream) {
    const Fp8Rows coded = {codes, scales};
    if (const int error = refused(coded, *in, n)) return error;
    if (suits_team(*in, rows) && (n == 1 || n == SOME_MIXES || n == MAX_MIXES))
        return norm_mix_team(*in, rows, slots, shift, slot_stride, mixes, n, out, coded, stream);
    const auto run = four_columns(*in, rows) && !codes ? norm_mix<4> : norm_mix<8>;
    return run(*in, rows, slots, shift, slot_stride, mixes, n, out, next_at_once, coded, stream);
}
}
