// The third kernel of wkv_prefill.cuh: group norm, bonus and gate; and the launcher of all three.
//
// Reference: readout of rwkv_batch/ops/torch_ops.py. Binding: Kernels.wkv_prefill. Test:
// test/kernels/test_wkv_prefill.py.
//
// Sums over the values of a head are fp32 and go over eight of a lane in order, then over eight lanes as a
// tree. The normed row with its bonus is rounded to fp16 before the gate, and once more after it.
#include "wkv_prefill.cuh"

constexpr int FINISH_WARPS = 4;

// One warp for each chunk and head. A lane has values 16 tile + lane / 4 and 8 below, of tokens 2 (lane % 4),
// + 1, + 8, + 9.
template <bool SCALED>
__global__ void __launch_bounds__(FINISH_WARPS* WARP)
    wkv_prefill_finish_kernel(const __grid_constant__ TimeMixInput in,
                              const __grid_constant__ ChunksInput packed, const ChunkData* chunk_data,
                              const __grid_constant__ ReadoutInput readout) {
    __shared__ __align__(16) __half normed[FINISH_WARPS][CHUNK][STRIDE];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, heads = in.width / HEAD, group = lane / 4,
              quarter = lane % 4;
    wait_for_inputs();
    const int count = packed.counts[0] * heads;
    for (int i = blockIdx.x * FINISH_WARPS + warp; i < count; i += gridDim.x * FINISH_WARPS) {
        const int chunk = i / heads, head = i % heads, tokens = packed.chunk_tokens[chunk];
        const ChunkData& data = chunk_data[i];
        const size_t at = size_t(packed.chunk_token[chunk]) * in.width + head * HEAD + lane % 8 * 8;
        uint4 gates[CHUNK / 4];  // of tokens lane / 8 + 4 n
#pragma unroll
        for (int n = 0; n < CHUNK / 4; n++)
            if (lane / 8 + 4 * n < tokens)
                gates[n] = *reinterpret_cast<const uint4*>(in.g + at + size_t(lane / 8 + 4 * n) * in.width);
        float y[TILES][2][4], sum[4] = {}, squares[4] = {};  // y [tile][values below][token]
        uint4 v[TILES];
#pragma unroll
        for (int w = 0; w < TILES; w++) {
            const uint4 x = value_words(data.values[w].y, lane);
            v[w] = value_words(data.values[w].v, lane);
            unpack_y(y[w][0], x.x), unpack_y(y[w][1], x.y), unpack_y(y[w][0] + 2, x.z),
                unpack_y(y[w][1] + 2, x.w);
            if (SCALED) {
                const int value = head * HEAD + 16 * w + group;
                const float here = readout_scale(readout, packed.chunk_token[chunk], value),
                            below = readout_scale(readout, packed.chunk_token[chunk], value + 8);
#pragma unroll
                for (int t = 0; t < 4; t++) y[w][0][t] *= here, y[w][1][t] *= below;
            }
#pragma unroll
            for (int t = 0; t < 4; t++) sum[t] += y[w][0][t] + y[w][1][t];
        }
#pragma unroll
        for (int offset = 4; offset < WARP; offset *= 2)
#pragma unroll
            for (int t = 0; t < 4; t++) sum[t] += shuffle_xor(sum[t], offset);
#pragma unroll
        for (int w = 0; w < TILES; w++)
#pragma unroll
            for (int t = 0; t < 4; t++) {
                y[w][0][t] -= sum[t] / HEAD, y[w][1][t] -= sum[t] / HEAD;
                squares[t] += y[w][0][t] * y[w][0][t] + y[w][1][t] * y[w][1][t];
            }
#pragma unroll
        for (int offset = 4; offset < WARP; offset *= 2)
#pragma unroll
            for (int t = 0; t < 4; t++) squares[t] += shuffle_xor(squares[t], offset);
        float own[4];
#pragma unroll
        for (int t = 0; t < 4; t++) {
            squares[t] = rsqrtf(squares[t] / HEAD + NORM_EPSILON);
            own[t] = data.own[2 * quarter + t % 2 + t / 2 * 8];
        }
        sync_warp();  // the chunk before has been read
#pragma unroll
        for (int w = 0; w < TILES; w++)
#pragma unroll
            for (int down = 0; down < 2; down++) {
                const int value = 16 * w + 8 * down + group;
                const int channel = head * HEAD + value;
                const float weight = __half2float(in.norm_weight[channel]),
                            bias = __half2float(in.norm_bias[channel]);
                float values[4];
                unpack(values, down ? v[w].y : v[w].x), unpack(values + 2, down ? v[w].w : v[w].z);
#pragma unroll
                for (int t = 0; t < 4; t++)
                    normed[warp][2 * quarter + t % 2 + t / 2 * 8][value] =
                        to_finite_half(y[w][down][t] * squares[t] * weight + bias + own[t] * values[t]);
            }
        sync_warp();
#pragma unroll
        for (int n = 0; n < CHUNK / 4; n++) {
            const int t = lane / 8 + 4 * n;
            if (t >= tokens) continue;
            const uint4 x = *reinterpret_cast<const uint4*>(&normed[warp][t][lane % 8 * 8]);
            const uint32_t a[4] = {x.x, x.y, x.z, x.w},
                           g[4] = {gates[n].x, gates[n].y, gates[n].z, gates[n].w};
            uint32_t out[4];
#pragma unroll
            for (int p = 0; p < 4; p++) {
                const float2 value = to_float2(a[p]), gate = to_float2(g[p]);
                out[p] = to_finite_half2(value.x * gate.x, value.y * gate.y);
            }
            store(reinterpret_cast<uint4*>(in.out + at + size_t(t) * in.width), out[0], out[1], out[2],
                  out[3]);
        }
    }
}

int wkv_prefill_finish(const TimeMixInput& in, const ChunksInput& packed, int chunks,
                       const ChunkData* chunk_data, const ReadoutInput* readout, cudaStream_t stream) {
    const auto kernel = readout ? wkv_prefill_finish_kernel<true> : wkv_prefill_finish_kernel<false>;
    const size_t needed = (size_t(chunks) * (in.width / HEAD) + FINISH_WARPS - 1) / FINISH_WARPS;
    unsigned blocks;
    const int error = resident(kernel, FINISH_WARPS * WARP, 0, needed, blocks);
    return error ? error
                 : launch(kernel, blocks, FINISH_WARPS * WARP, 0, stream, in, packed, chunk_data,
                          readout ? *readout : ReadoutInput{});
}

extern "C" {
// Bytes that the kernels hand on for a chunk and head.
int rwkv_wkv_chunk_bytes() { return sizeof(ChunkData); }

// chunks, rows, chunk_data: see wkv_prefill.cuh. readout: null, or by what y of some rows is scaled.
int rwkv_wkv_prefill(const TimeMixInput* in, const ChunksInput* packed, int chunks, int rows,
                     ChunkData* chunk_data, int fp32, const ReadoutInput* readout, cudaStream_t stream) {
    int error = wkv_prefill_prepare(*in, *packed, chunks, chunk_data, stream);
    if (!error) error = wkv_prefill_scan(*in, *packed, rows, chunk_data, fp32, stream);
    return error ? error : wkv_prefill_finish(*in, *packed, chunks, chunk_data, readout, stream);
}
}
