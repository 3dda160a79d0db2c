// Residual add, layer norm, token shift and mixing of packed rows of any length (formulas in norm.cuh).
//
// Reference: layer_norm of torch.nn.functional, then token_shift and mix of rwkv_batch/ops/torch_ops.py.
// Binding: Kernels.norm_mix_prefill. Test: test/kernels/test_norm_mix_prefill.py.
#include "norm.cuh"

constexpr int MAX_RUN = 16;  // tokens of a block

// A block has `run` neighbouring tokens of packed rows, one after the other. It norms the token before them
// as well, which may belong to the same row; the stream therefore goes from in.x to `to`, as the block before
// may be further on. The block of a row's first token is the only one to read and then write the row's state,
// so no block reads what another writes: it norms the row's last token, wherever that is. What is kept behind
// other tokens goes into slots that no row reads. CODED: so many mixes are made fp8.
template <int N, int MIXES, bool PARTIALS, int CODED>
__global__ void __launch_bounds__(1024)
    norm_mix_prefill_kernel(const __grid_constant__ NormInput in, float* to, int tokens, int run,
                            const __grid_constant__ PackedRowsInput places, __half* shift, size_t slot_stride,
                            const __half* mixes, __half* out, Fp8Rows coded) {
    __shared__ float scratch[2][WARP];
    __shared__ struct {
        int slot;
        bool starts;  // its row
        int to;       // slot that gets this token; a row that another block starts does not end here
    } place_of[MAX_RUN];
    __shared__ int far;  // the last token of the row that begins among these and ends behind them
    extern __shared__ __align__(16) __half amounts[];  // [MIXES, C]; a thread reads what it has copied itself
    const int column = N * threadIdx.x, begin = blockIdx.x * run, end = min(begin + run, tokens);
    const bool inside = column < in.width;
    const Affine<N> affine(in);
#pragma unroll
    for (int i = 0; i < MIXES; i++)
        if (inside) copy_columns<N>(amounts + i * in.width + column, mixes + i * in.width + column);
    commit_copies();
    float v[N];
    Addend<N> addend;
    Raw<N> before = {};
    int token = begin ? begin - 1 : 0;  // whether it belongs to the same row is not known yet
    load_row(in, token, v);             // several kernels old
    wait_for_inputs();
    addend.load(in, token);
    wait_copies<0>();
    for (int i = begin + threadIdx.x; i < end; i += blockDim.x) {
        const int row = places.row_of[i], first = places.first[row], last = places.last[row],
                  slot = places.slots[row];
        const bool ends = i == last && first >= begin;
        place_of[i - begin] = {slot, i == first, places.kept ? places.kept[i] : ends ? slot : -1};
        if (i == end - 1) far = !places.kept && slot >= 0 && first >= begin && last > i ? last : -1;
    }
    __syncthreads();
    while (true) {
        const int next = token + 1 < end ? token + 1 : token < end ? far : -1;
        addend.add(v);
        if (PARTIALS && inside) add_partials<1>(in, token, column, v);
        store_whole_sectors(to + size_t(token) * in.width + column, v,
                            inside && token >= begin && token < end);
        float coming[N];
        if (next >= 0) {
            load_row(in, next, coming);
            addend.load(in, next);
        }
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < N; i++) sum += v[i];  // zeros outside
        normalize(affine, in.width, sum, v, scratch);
        Raw<N> rounded;
        rounded.set(v);
        if (token >= begin && (CODED > 0 || inside)) {
            const auto place = place_of[min(token, end - 1) - begin];
            const int to = token < end ? place.to : place.slot;
            if (place.slot >= 0 && token < end) {
                if (inside && place.starts) before.load(shift + place.slot * slot_stride + column);
#pragma unroll
                for (int i = CODED; i < MIXES; i++) {
                    Raw<N> amount;
                    if (!inside) break;
                    amount.load(amounts + i * in.width + column);
                    mix_and_store(v, before, amount, out + (i * size_t(tokens) + token) * in.width + column);
                }
                if constexpr (CODED > 0) {
                    __shared__ uint32_t largest[CODED][WARP];
                    Raw<N> mixed[CODED] = {}, amount;
#pragma unroll
                    for (int i = 0; i < CODED; i++)
                        if (inside) {
                            amount.load(amounts + i * in.width + column);
                            mixed[i] = mix(v, before, amount);
                            if (i >= first_half(CODED))
                                mixed[i].store(out + (i * size_t(tokens) + token) * in.width + column);
                        }
                    store_coded(mixed, coded, tokens, token, in.width, largest);
                }
            } else if (places.kept && inside && token < end) {  // of padding
#pragma unroll
                for (int i = CODED; i < MIXES; i++)
                    Raw<N>{}.store(out + (i * size_t(tokens) + token) * in.width + column);
            }
            if (inside && to >= 0) rounded.store(shift + to * slot_stride + column);
        }
        if (next < 0) return;
        before = rounded, token = next;
#pragma unroll
        for (int i = 0; i < N; i++) v[i] = coming[i];
    }
}

namespace {
template <int N, int MIXES, bool PARTIALS, int CODED = 0>
int launch_norm_mix_prefill(const NormInput& in, float* to, int tokens, const PackedRowsInput& places,
                            __half* shift, size_t slot_stride, const __half* mixes, __half* out,
                            const Fp8Rows& coded, cudaStream_t stream) {
    const auto kernel = norm_mix_prefill_kernel<N, MIXES, PARTIALS, CODED>;
    const int threads = whole_warps(in.width / N), shared = MIXES * in.width * int(sizeof(__half));
    int each = 0;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (error == cudaSuccess)
        error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads, shared);
    if (error != cudaSuccess || each == 0) return error != cudaSuccess ? error : cudaErrorInvalidValue;
    const int resident = each * multiprocessors(), even = (tokens + resident - 1) / resident,
              run = even < MAX_RUN ? even : MAX_RUN;
    return launch(kernel, (tokens + run - 1) / run, threads, shared, stream, in, to, tokens, run, places,
                  shift, slot_stride, mixes, out, coded);
}

template <int MIXES>
int norm_mix_prefill(const NormInput& in, float* to, int tokens, int columns, const PackedRowsInput& places,
                     __half* shift, size_t slot_stride, const __half* mixes, __half* out,
                     const Fp8Rows& coded, cudaStream_t stream) {
    const bool four = four_columns(in, tokens, columns);
    auto run = in.partial_count
                   ? four ? launch_norm_mix_prefill<4, MIXES, true> : launch_norm_mix_prefill<8, MIXES, true>
               : four ? launch_norm_mix_prefill<4, MIXES, false>
                      : launch_norm_mix_prefill<8, MIXES, false>;
    if constexpr (CODES_ROWS && fp8_mixes(MIXES) > 0)
        if (coded.codes) run = launch_norm_mix_prefill<8, MIXES, false, fp8_mixes(MIXES)>;
    return run(in, to, tokens, places, shift, slot_stride, mixes, out, coded, stream);
}
}  // namespace

extern "C" {
// to [T, C] fp32: the stream with what is added; in.x is left as it is. columns: as in rwkv_norm. n: 1, 3 or
// 6 mixes. codes, scales: as in rwkv_norm_mix_decode.
int rwkv_norm_mix_prefill(const NormInput* in, float* to, int tokens, int columns,
                          const PackedRowsInput* places, __half* shift, size_t slot_stride,
                          const __half* mixes, int n, __half* out, uint8_t* codes, float* scales,
                          cudaStream_t stream) {
    if (n != 1 && n != SOME_MIXES && n != MAX_MIXES) return cudaErrorInvalidValue;
    const Fp8Rows coded = {codes, scales};
    if (const int error = refused(coded, *in, n)) return error;
    const auto run = n == 1            ? norm_mix_prefill<1>
                     : n == SOME_MIXES ? norm_mix_prefill<SOME_MIXES>
                                       : norm_mix_prefill<MAX_MIXES>;
    return run(*in, to, tokens, columns, *places, shift, slot_stride, mixes, out, coded, stream);
}
}
