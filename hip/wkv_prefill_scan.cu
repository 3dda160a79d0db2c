// cuda/wkv_prefill_scan.cu without a warp that fetches: where a wave holds two warps, a ring in shared memory
// could wait for itself. Each warp reads a chunk's data from memory; those of a block read the same keys at
// nearly the same time, the second from a cache.
//
// Reference, binding and test are the same, as is every sum.
#include "../cuda/wkv_prefill_scan.cuh"

namespace {
constexpr int WARPS = TILES;  // of a block, which has all rows of a head

template <typename T>
__global__ void __launch_bounds__(WARPS* WARP)
    wkv_prefill_scan_kernel(const __grid_constant__ TimeMixInput in,
                            const __grid_constant__ ChunksInput packed, ChunkData* chunk_data) {
    const int tile = threadIdx.x / WARP, lane = threadIdx.x % WARP, heads = in.width / HEAD;
    wait_for_inputs();
    const int units = packed.counts[1] * heads;
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
        const int row = unit / heads, head = unit % heads, chunks = packed.row_chunks[row];
        T* place = static_cast<T*>(in.state) + packed.row_slot[row] * in.slot_stride +
                   size_t(head) * HEAD * HEAD + (16 * tile + lane / 4) * HEAD + lane % 4 * 16;
        float s[8][4], end[16];
        load_state(place, s);
#pragma unroll
        for (int i = 0; i < 16; i++) end[i] = 1.f;
        ChunkData* data = chunk_data + size_t(packed.row_chunk[row]) * heads + head;
        for (int chunk = 0; chunk < chunks; chunk++, data += heads)
            advance(s, end, &data->kk[0][lane], &data->values[tile].v[lane], data->middle + lane % 4 * 16,
                    &data->values[tile].y[lane], [] {});
        decay(s, end);
        store_state(place, s);
    }
}

template <typename T>
int scan(const TimeMixInput& in, const ChunksInput& packed, size_t rows, ChunkData* chunk_data,
         cudaStream_t stream) {
    unsigned blocks;
    const cudaError_t error =
        resident(wkv_prefill_scan_kernel<T>, WARPS * WARP, 0, rows * (in.width / HEAD), blocks);
    return error != cudaSuccess
               ? error
               : launch(wkv_prefill_scan_kernel<T>, blocks, WARPS * WARP, 0, stream, in, packed, chunk_data);
}
}  // namespace

int wkv_prefill_scan(const TimeMixInput& in, const ChunksInput& packed, int rows, ChunkData* chunk_data,
                     bool fp32, cudaStream_t stream) {
    return fp32 ? scan<float>(in, packed, rows, chunk_data, stream)
                : scan<__half>(in, packed, rows, chunk_data, stream);
}
