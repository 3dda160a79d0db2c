// The first kernel of wkv_prefill.cuh: what each chunk does to the state it will meet, for all chunks and
// heads at once. hip/wkv_prefill_prepare.cu is the same for AMD GPUs.
//
// Reference: rwkv_batch/ops/wkv_prefill.py. Binding: Kernels.wkv_prefill. Test:
// test/kernels/test_wkv_prefill.py.
#include "wkv_prefill_prepare.cuh"

// Grid (heads, chunks at a time).
__global__ void LAUNCH_BOUNDS(PREPARE_WARPS* WARP, PREPARE_BLOCKS)
    wkv_prefill_prepare_kernel(const __grid_constant__ TimeMixInput in,
                               const __grid_constant__ ChunksInput packed, ChunkData* chunk_data) {
    extern __shared__ uint4 shared[];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, quarter = lane % 4;
    // Not the same warp in all blocks: a multiprocessor's schedulers share the work.
    const int solver = ((blockIdx.y * gridDim.x + blockIdx.x) * 0x9e3779b1u >> 20) % PREPARE_WARPS;
    Workspace& ws = *reinterpret_cast<Workspace*>(shared);
    const Channels channels(in, blockIdx.x * HEAD + 2 * lane);
    // The next kernel is not let in before this one's blocks have ended: its blocks would gather on the few
    // multiprocessors that are first to have room.
    grid_dependency_wait();
    const int chunks = packed.counts[0];
    // Rows of a matrix whose four blocks of 8 x 8 are wanted in the order (0, 0), (1, 0), (0, 1), (1, 1), or
    // (0, 0), (0, 1), (1, 0), (1, 1).
    const int down_row = lane % 16, down_column = lane / 16 * 8, across_row = lane / 16 * 8 + lane % 8,
              across_column = lane / 8 % 2 * 8;
    const int own = 16 * warp;  // this warp's keys and values
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
        {
            // Two warps make products with kk~, two with r~; one of each those with b~, the other those with
            // k~.
            const int of = warp / 2;
            const bool with_k = warp % 2;
            const __half(*left)[STRIDE] = of ? ws.r : ws.kk, (*with)[STRIDE] = with_k ? ws.k : ws.b;
            float products[2][4] = {};
#pragma unroll
            for (int j = 0; j < TILES; j++) {
                uint32_t x[4], y[4];
                load_matrix(x, &left[down_row][16 * j + down_column]);
                load_matrix(y, &with[across_row][16 * j + across_column]);
#pragma unroll
                for (int h = 0; h < 2; h++) mma(products[h], x[0], x[1], x[2], x[3], y[2 * h], y[2 * h + 1]);
            }
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int down = 0; down < 2; down++) {
                    const int t = group + 8 * down, s = 8 * h + 2 * quarter;
                    const float* x = &products[h][2 * down];
                    float* to = with_k ? &ws.right[16 * of + t][s] : &ws.lower[16 * of + t][s];
                    *reinterpret_cast<float2*>(to) =
                        make_float2(s < t + of ? x[0] : 0.f, s + 1 < t + of ? x[1] : 0.f);
                }
        }
        __syncthreads();
        uint32_t b[4], k[4], v[4], r[4], kk[4];
        load_transposed(b, &ws.b[across_row][own + across_column]);
        load_transposed(k, &ws.k[across_row][own + across_column]);
        load_transposed(v, &ws.v[across_row][own + across_column]);
        load_transposed(kk, &ws.kk[down_row][own + down_column]);
        load_matrix(r, &ws.r[down_row][own + down_column]);
        store(&data.b[warp][lane], b[0], b[2], b[1], b[3]);
        store(&data.values[warp].v[lane], v[0], v[1], v[2], v[3]);
        if (warp == solver) solve(ws, lane);
        __syncthreads();
        {
            uint32_t inverse[4], from_r[4];
            load_transposed(inverse, &ws.solved[across_row][across_column]);
            load_transposed(from_r, &ws.solved[across_row][16 + across_column]);
            float of_kk[2][4] = {}, of_r[2][4];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                unpack(of_r[h], r[2 * h]), unpack(of_r[h] + 2, r[2 * h + 1]);
                mma(of_kk[h], inverse[0], inverse[1], inverse[2], inverse[3], kk[2 * h], kk[2 * h + 1]);
                mma(of_r[h], from_r[0], from_r[1], from_r[2], from_r[3], kk[2 * h], kk[2 * h + 1]);
            }
            store(&data.kk[warp][lane], pack(of_kk[0]), pack(of_kk[1]), pack(of_kk[0] + 2),
                  pack(of_kk[1] + 2));
            store(&data.r[warp][lane], pack(of_r[0]), pack(of_r[1]), pack(of_r[0] + 2), pack(of_r[1] + 2));
        }
        uint32_t values[4], high[4], low[4], b_low[4], k_low[4];
        load_transposed(values, &ws.solved[16 + down_row][16 + down_column]);
        load_matrix(high, &ws.solved[16 + across_row][across_column]);
        load_matrix(low, &ws.solved_low[across_row][across_column]);
        load_transposed(b_low, &ws.b_low[across_row][own + across_column]);
        load_transposed(k_low, &ws.k_low[across_row][own + across_column]);
        float written[2][4], y[2][4] = {};
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int down = 0; down < 2; down++) {
                float rest[2];
                unpack(written[h] + 2 * down, k[2 * h + down]), unpack(rest, k_low[2 * h + down]);
                written[h][2 * down] += rest[0], written[h][2 * down + 1] += rest[1];
            }
            mma(written[h], b[0], b[1], b[2], b[3], low[2 * h], low[2 * h + 1]);
            mma(written[h], b_low[0], b_low[1], b_low[2], b_low[3], high[2 * h], high[2 * h + 1]);
            mma(written[h], b[0], b[1], b[2], b[3], high[2 * h], high[2 * h + 1]);
            mma(y[h], v[0], v[1], v[2], v[3], values[2 * h], values[2 * h + 1]);
        }
        store(&data.k[warp][lane], pack(written[0]), pack(written[1]), pack(written[0] + 2),
              pack(written[1] + 2));
        store(&data.values[warp].y[lane], pack_y(y[0]), pack_y(y[0] + 2), pack_y(y[1]), pack_y(y[1] + 2));
    }
}

int wkv_prefill_prepare(const TimeMixInput& in, const ChunksInput& packed, int chunks, ChunkData* chunk_data,
                        cudaStream_t stream) {
    return launch_prepare(wkv_prefill_prepare_kernel, in, packed, chunks, chunk_data, stream);
}
