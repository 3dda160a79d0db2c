// cuda/wkv_prefill_scan.cu on the matrix cores of AMD GPUs (tile.cuh), without a warp that fetches: each wave
// reads a chunk's data from memory, and those of a block the same keys at nearly the same time, the second
// from a cache.
//
// Reference, binding and test are the same. A wave has 16 rows of S. Rounded to fp16 they are the left
// operand of what the chunk reads, and what it removes is that of what it writes.
#include "../cuda/wkv_prefill.cuh"
#include "tile.cuh"

namespace {
// Of a block, which has all rows of a head. For the kernel alone: the host's part does not know its GPU.
constexpr int THREADS = TILES * TILE_LANES;

// A state's numbers as they are stored: fp32, or the bits of fp16.
DEVICE float to_float(float x) { return x; }
DEVICE float to_float(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }

template <typename T>
DEVICE T to_stored(float x) {
    if constexpr (sizeof(T) == 4)
        return x;
    else
        return __half_as_ushort(to_finite_half(x));
}

// One chunk. s: this wave's rows, by tiles of 16 keys. end: of the chunk before, by this lane's keys.
DEVICE void advance(Sums (&s)[TILES], Sums (&end)[TILES], ChunkData* data, int tile) {
    Operand read[TILES];
#pragma unroll
    for (int m = 0; m < TILES; m++) {
#pragma unroll
        for (int i = 0; i < TILE_SUMS; i++) s[m][i] *= end[m][i] * data->middle[16 * m + sum_column(i)];
        read[m] = to_operand(s[m]);
    }
    Sums removed = {}, more = {}, y;
#pragma unroll
    for (int m = 0; m < TILES; m += 2) {
        multiply(removed, read[m], load_tile(data->kk[m]));
        multiply(more, read[m + 1], load_tile(data->kk[m + 1]));
    }
    const Operand v = load_tile(data->values[tile].v);
#pragma unroll
    for (int m = 0; m < TILES; m++) multiply(s[m], v, load_tile(data->k[m]));
#pragma unroll
    for (int i = 0; i < TILE_SUMS; i++) removed[i] += more[i];
    const Operand u = to_operand(removed);
#pragma unroll
    for (int m = 0; m < TILES; m++) multiply(s[m], u, load_tile(data->b[m]));
    const __half* given = reinterpret_cast<const __half*>(data->values[tile].y) + tile_index() * TILE;
#pragma unroll
    for (int i = 0; i < TILE_SUMS; i++) y[i] = __half2float(given[sum_column(i)]) * Y_UNIT;
#pragma unroll
    for (int m = 0; m < TILES; m++) multiply(y, read[m], load_tile(data->r[m]));
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int i = 0; i < TILE_SUMS; i++) end[m][i] = data->end[16 * m + sum_column(i)];
#pragma unroll
    for (int i = 0; i < TILE_SUMS; i++) y[i] /= Y_UNIT;
    store_tile(data->values[tile].y, to_operand(y));
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
    wkv_prefill_scan_kernel(const __grid_constant__ TimeMixInput in,
                            const __grid_constant__ ChunksInput packed, ChunkData* chunk_data) {
    const int tile = threadIdx.x / TILE_LANES, heads = in.width / HEAD;
    wait_for_inputs();
    const int units = packed.counts[1] * heads;
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
        const int row = unit / heads, head = unit % heads, chunks = packed.row_chunks[row];
        const auto place = global_pointer(static_cast<T*>(in.state) + packed.row_slot[row] * in.slot_stride +
                                          size_t(head) * HEAD * HEAD + (16 * tile + tile_index()) * HEAD);
        Sums s[TILES], end[TILES];
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int i = 0; i < TILE_SUMS; i++)
                s[m][i] = to_float(place[16 * m + sum_column(i)]), end[m][i] = 1.f;
        ChunkData* data = chunk_data + size_t(packed.row_chunk[row]) * heads + head;
        for (int chunk = 0; chunk < chunks; chunk++, data += heads) advance(s, end, data, tile);
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int i = 0; i < TILE_SUMS; i++)
                place[16 * m + sum_column(i)] = to_stored<T>(s[m][i] * end[m][i]);
    }
}

template <typename T>
int scan(const TimeMixInput& in, const ChunksInput& packed, size_t rows, ChunkData* chunk_data,
         cudaStream_t stream) {
    const int threads = TILES * wave_lanes();
    unsigned blocks;
    const cudaError_t error =
        resident(wkv_prefill_scan_kernel<T>, threads, 0, rows * (in.width / HEAD), blocks);
    return error != cudaSuccess
               ? error
               : launch(wkv_prefill_scan_kernel<T>, blocks, threads, 0, stream, in, packed, chunk_data);
}
}  // namespace

int wkv_prefill_scan(const TimeMixInput& in, const ChunksInput& packed, int rows, ChunkData* chunk_data,
                     bool fp32, cudaStream_t stream) {
    return fp32 ? scan<float>(in, packed, rows, chunk_data, stream)
                : scan<uint16_t>(in, packed, rows, chunk_data, stream);
}
