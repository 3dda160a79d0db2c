// cuda/wkv_prefill_prepare.cu on the matrix cores of AMD GPUs (tile.cuh). Of a chunk's matrices TILE_LANES
// threads make 16 rows: a wave of 64 those of two warps, one after the other.
//
// Reference, binding and test are the same.
#include "../cuda/wkv_prefill_prepare.cuh"
#include "tile.cuh"

constexpr int GROUPS = PREPARE_WARPS * WARP / TILE_LANES;  // of TILE_LANES threads

// Number [row][column] at from[row * down + column * right], in shared memory.
DEVICE float sum_at(const __half* from, int down, int right, int i) {
    return __half2float(from[tile_index() * down + sum_column(i) * right]);
}

// Grid (heads, chunks at a time).
__global__ void LAUNCH_BOUNDS(PREPARE_WARPS* WARP, PREPARE_BLOCKS)
    wkv_prefill_prepare_kernel(const __grid_constant__ TimeMixInput in,
                               const __grid_constant__ ChunksInput packed, ChunkData* chunk_data) {
    extern __shared__ uint4 shared[];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = threadIdx.x / TILE_LANES;
    // Not the same warp in all blocks: the SIMDs of a compute unit share the work.
    const int solver = ((blockIdx.y * gridDim.x + blockIdx.x) * 0x9e3779b1u >> 20) % PREPARE_WARPS;
    Workspace& ws = *reinterpret_cast<Workspace*>(shared);
    const Channels channels(in, blockIdx.x * HEAD + 2 * lane);
    grid_dependency_wait();
    const int chunks = packed.counts[0];
    if (int(blockIdx.y) >= chunks) return;
    Place place(packed, blockIdx.y);
    fetch(in, place, blockIdx.x, ws);
    for (int chunk = blockIdx.y; chunk < chunks; chunk += gridDim.y) {
        ChunkData& data = chunk_data[size_t(chunk) * gridDim.x + blockIdx.x];
        const int next = chunk + gridDim.y, count = place.count;
        if (next < chunks) place = Place(packed, next);
        load_chunk(channels, in.mix, count, warp, lane, ws, data, [&] {
            if (next < chunks) fetch(in, place, blockIdx.x, ws);
        });
        __syncthreads();
#pragma unroll
        for (int n = 0; n < TILES / GROUPS; n++) {  // kk~ b~, kk~ k~, r~ b~, r~ k~
            const int part = n * GROUPS + group;
            const int of = part / 2;
            const bool with_k = part % 2;
            const __half(*left)[STRIDE] = of ? ws.r : ws.kk, (*with)[STRIDE] = with_k ? ws.k : ws.b;
            Sums products = {};
#pragma unroll
            for (int j = 0; j < TILES; j++)
                multiply(products, operand_of_rows(&left[0][16 * j], STRIDE),
                         operand_of_rows(&with[0][16 * j], STRIDE));
            float (*to)[CHUNK] = (with_k ? ws.right : ws.lower) + 16 * of;
            const int t = tile_index();
#pragma unroll
            for (int i = 0; i < TILE_SUMS; i++) {
                const int s = sum_column(i);
                to[t][s] = s < t + of ? products[i] : 0.f;
            }
        }
        __syncthreads();
        if (warp == solver) solve(ws, lane);
        __syncthreads();
        const Operand inverse = operand_of_columns(&ws.solved[0][0], SOLVED_STRIDE),
                      from_r = operand_of_columns(&ws.solved[0][16], SOLVED_STRIDE),
                      values = operand_of_columns(&ws.solved[16][16], SOLVED_STRIDE),
                      high = operand_of_rows(&ws.solved[16][0], SOLVED_STRIDE),
                      low = operand_of_rows(&ws.solved_low[0][0], LOW_STRIDE);
#pragma unroll
        for (int n = 0; n < TILES / GROUPS; n++) {
            const int part = n * GROUPS + group, own = 16 * part;  // keys and values
            const Operand kk = operand_of_columns(&ws.kk[0][own], STRIDE),
                          b = operand_of_columns(&ws.b[0][own], STRIDE),
                          b_low = operand_of_columns(&ws.b_low[0][own], STRIDE),
                          v = operand_of_columns(&ws.v[0][own], STRIDE);
            store_tile(data.b[part], b);
            store_tile(data.values[part].v, v);
            Sums of_kk = {}, of_r, written, y = {};
#pragma unroll
            for (int i = 0; i < TILE_SUMS; i++) {
                of_r[i] = sum_at(&ws.r[0][own], STRIDE, 1, i);
                written[i] = sum_at(&ws.k[0][own], 1, STRIDE, i) + sum_at(&ws.k_low[0][own], 1, STRIDE, i);
            }
            multiply(of_kk, inverse, kk);
            store_tile(data.kk[part], to_operand(of_kk));
            multiply(of_r, from_r, kk);
            store_tile(data.r[part], to_operand(of_r));
            multiply(written, b, low);
            multiply(written, b_low, high);
            multiply(written, b, high);
            store_tile(data.k[part], to_operand(written));
            multiply(y, v, values);
#pragma unroll
            for (int i = 0; i < TILE_SUMS; i++) y[i] /= Y_UNIT;
            store_tile(data.values[part].y, to_operand(y));
        }
    }
}

int wkv_prefill_prepare(const TimeMixInput& in, const ChunksInput& packed, int chunks, ChunkData* chunk_data,
                        cudaStream_t stream) {
    return launch_prepare(wkv_prefill_prepare_kernel, in, packed, chunks, chunk_data, stream);
}
