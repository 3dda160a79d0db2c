// For rows that an external sampler (FlashInfer) draws: their logits with bias, penalties and temperature
// applied, and afterwards the record of what it has drawn.
//
// Reference: _HostRow.draw in rwkv_batch/sampling/sampler.py, up to the method. Binding: CudaSampler in
// rwkv_batch/sampling/sampler_cuda.py. Tests: test/kernels/test_sample_adjust.py, and test_flashinfer.py
// beside it.
//
// Adjusted logits are (logit + bias - penalty - the largest of the row) / temperature, fp32: the softmax does
// not change, and dividing by a small temperature stays in range. Ids that cannot be drawn are -inf. A row is
// read by a team of blocks as in sample.cu; on older GPUs its values lie in the place of the adjusted logits
// instead of shared memory.
#include "sample_read.cuh"
#include "sample_row.cuh"
#include "sample_select.cuh"
#include "sample_team.cuh"

namespace sample {

// A top_p that is off, as sums of fp32 may pass 1; and of a row of which nothing can be drawn.
constexpr float OFF = 2.f, NOT_DRAWN = 4.f;

// Rows of padding get logits without bias or penalties, and limits with which any draw ends.
template <typename Logit, bool IN_SHARED>
__global__ void LAUNCH_BOUNDS(THREADS, 2) adjust_kernel(const __grid_constant__ AdjustInput in) {
    if (IN_SHARED && !CLUSTERS) return;  // never launched there; nothing to compile
    extern __shared__ float4 dynamic[];
    __shared__ SampleRecord row;
    __shared__ __align__(16) uint32_t tops[GROUPS];
    __shared__ int slot;
    const Team team = Team::here();
    team.begin();
    wait_for_inputs();
    const int own = blockIdx.x / team.size, place = in.places[own];
    const int share = in.sample.chunk / WARPS, first = warp_id() * share;
    float* adjusted = in.adjusted + size_t(own) * in.adjusted_width;
    const Chunk chunk = {IN_SHARED ? reinterpret_cast<float*>(dynamic) : adjusted,
                         team.rank * in.sample.chunk, in.sample.chunk};
    const Segment segment = {chunk.values + first, chunk.first_id + first, share, true};
    const Logit* logits = static_cast<const Logit*>(in.sample.logits) + place * in.sample.stride;
    float own_top = read(in.sample, logits, segment, [&] {
        if (warp_id() > 0) return;
        const int found = in.sample.slots[place];
        copy_record(row, in.sample.table, found);
        if (lane_id() == 0) slot = found;
    });
    team.wait_for_all();
    __syncthreads();
    const bool live = slot >= 0;
    const bool broken = own_top == INFINITY;  // which changes may hide
    if (live && (row.bias_count || row.used)) {
        apply_changes(row, chunk);
        own_top = -INFINITY;
        for (int i = lane_id(); i < segment.length; i += WARP) own_top = fmaxf(own_top, segment.values[i]);
    }
    gather_tops(team, broken ? INFINITY : own_top, tops);
    const uint32_t top_key = largest(tops);
    const float top = fminf(from_key(top_key), FLT_MAX), temperature = live ? float(row.temperature) : 1.f;
    const auto scaled = [&](float x) { return __fdiv_rn(fminf(__fsub_rn(x, top), 0.f), temperature); };
    for (int at = 4 * lane_id(); at < segment.length && segment.first_id + at < in.adjusted_width;
         at += 4 * WARP) {
        const float4 x = *reinterpret_cast<const float4*>(segment.values + at);
        *reinterpret_cast<float4*>(adjusted + segment.first_id + at) =
            make_float4(scaled(x.x), scaled(x.y), scaled(x.z), scaled(x.w));
    }
    if (team.rank == 0 && threadIdx.x == 0) {
        in.top_k[own] = live ? min(row.top_k, in.sample.vocab) : 1;
        const float top_p = row.top_p < 1. ? fmaxf(float(row.top_p), FLT_MIN) : OFF;
        in.top_p[own] = !live ? OFF : is_broken(top_key) ? NOT_DRAWN : top_p;
    }
}

__global__ void __launch_bounds__(THREADS)
    record_kernel(const __grid_constant__ AdjustInput in, const int* drawn) {
    __shared__ SampleRecord row;
    wait_for_inputs();
    const int place = in.places[blockIdx.x], slot = in.sample.slots[place];
    const bool broken = in.top_p[blockIdx.x] == NOT_DRAWN;
    const int token = slot < 0 ? 0
                      : broken
                          ? BROKEN
                          : min(max(drawn[blockIdx.x], 0), in.sample.vocab - 1);  // what follows reads there
    if (threadIdx.x == 0) in.sample.ids[place] = token;
    if (slot < 0 || broken) return;
    if (warp_id() == 0) copy_record(row, in.sample.table, slot);
    __syncthreads();
    record(row, in.sample.table + slot, token);
}

template <typename Logit>
int start_adjust(AdjustInput in, int rows, int blocks, cudaStream_t stream) {
    const bool in_shared = in.sample.workspace == nullptr;
    const auto kernel = in_shared ? adjust_kernel<Logit, true> : adjust_kernel<Logit, false>;
    in.sample.chunk = chunk_size(in.sample.vocab, blocks);
    if (rows < 1 || in.adjusted_width != chunk_size(in.sample.vocab, 1)) return cudaErrorInvalidValue;
    const size_t shared = in_shared ? in.sample.chunk * sizeof(float) : 0;
    if (shared + sizeof(SampleRecord) + GROUPS * sizeof(uint32_t) + sizeof(int) > 48 * 1024) {
        const int error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared));
        if (error) return error;
    }
    return in_shared ? launch_clusters(blocks, kernel, rows * blocks, THREADS, shared, stream, in)
                     : launch_alone(kernel, rows * blocks, THREADS, shared, stream, in);
}

}  // namespace sample

extern "C" {

// `blocks` and fp16: as in rwkv_sample, of the `rows` at `places`.
int rwkv_sample_adjust(const sample::AdjustInput* in, int rows, int fp16, int blocks, cudaStream_t stream) {
    return fp16 ? sample::start_adjust<__half>(*in, rows, blocks, stream)
                : sample::start_adjust<float>(*in, rows, blocks, stream);
}

// `drawn` [rows] by those rows: becomes their `ids`, is recorded for their penalties, and moves their
// positions on.
int rwkv_sample_record(const sample::AdjustInput* in, const int* drawn, int rows, cudaStream_t stream) {
    return launch(sample::record_kernel, rows, sample::THREADS, 0, stream, *in, drawn);
}
}
