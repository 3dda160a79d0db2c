// The first half of adapters of rows: sums over k of A[r, k] x[t, k], with the terms of adapter.cuh.
//
// Reference: x @ a.T for the rows of each adapter. Binding: Kernels.adapter_shrink. Test:
// test/kernels/test_adapter.py.
//
// A block has one tile of rows, one matrix and one part of K, whose steps of 32 k its warps take in turn. x
// and A go from memory to registers in 16-byte pieces, straight into the operands of m16n8k16 mma
// instructions, as the order of k inside a step is free. The first loads of A are under way before the block
// waits for the kernel that makes x. Sums are fp32: over a warp's steps in order, then over the warps in
// order; the parts of K are added up by adapter_expand.cu. They depend on K alone, so a row's result does not
// depend on the other rows.
#include "adapter.cuh"

constexpr int WARPS = 8;
constexpr int AHEAD = 4;  // steps of a warp, in flight at once

__global__ void LAUNCH_BOUNDS(WARPS* WARP, 2)
    adapter_shrink_kernel(const __grid_constant__ AdapterInput in, int tiles, Prefetch weights) {
    __shared__ float sums[WARPS][ADAPTER_TILE][ADAPTER_RANK + 1];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, quad = lane % 4;
    const int split = blockIdx.x % ADAPTER_SPLITS, tile = blockIdx.x / ADAPTER_SPLITS;
    const AdapterPart& part = in.part[blockIdx.y];
    const AdapterTile own(in, part, tile);
    const int k = part.k, steps = k / 32, each = (steps + ADAPTER_SPLITS - 1) / ADAPTER_SPLITS,
              first = split * each + warp, end = min((split + 1) * each, steps);

    uint4 av[AHEAD][2];
    const auto fetch = [&](int rank0, int step) {
#pragma unroll
        for (int u = 0; u < AHEAD; u++)
            if (step + u * WARPS < end)
#pragma unroll
                for (int h = 0; h < 2; h++)
                    av[u][h] = load_once(own.a + size_t(rank0 + h * 8 + group) * k + (step + u * WARPS) * 32 +
                                         quad * 8);
    };
    if (own.rank) fetch(0, first);
    prefetch(weights);
    wait_for_inputs();

    const int rows[2] = {own.rows[group], own.rows[group + 8]};
    for (int rank0 = 0; rank0 < own.rank; rank0 += ADAPTER_RANK) {
        float acc[2][4] = {};
        for (int step = first; step < end; step += AHEAD * WARPS) {
            uint4 xv[AHEAD][2];
#pragma unroll
            for (int u = 0; u < AHEAD; u++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    xv[u][h] = make_uint4(0, 0, 0, 0);
                    if (step + u * WARPS < end && rows[h] >= 0)
                        xv[u][h] = load16(part.x + size_t(rows[h]) * k + (step + u * WARPS) * 32 + quad * 8);
                }
#pragma unroll
            for (int u = 0; u < AHEAD; u++)
                if (step + u * WARPS < end)
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        const uint4 top = xv[u][0], low = xv[u][1], a = av[u][h];
                        mma(acc[h], top.x, low.x, top.y, low.y, a.x, a.y);
                        mma(acc[h], top.z, low.z, top.w, low.w, a.z, a.w);
                    }
            if (step + AHEAD * WARPS < end)
                fetch(rank0, step + AHEAD * WARPS);
            else if (rank0 + ADAPTER_RANK < own.rank)
                fetch(rank0 + ADAPTER_RANK, first);
        }
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int i = 0; i < 4; i++) sums[warp][group + i / 2 * 8][h * 8 + quad * 2 + i % 2] = acc[h][i];
        __syncthreads();
        const int r = threadIdx.x % ADAPTER_RANK, row = threadIdx.x / ADAPTER_RANK;
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += sums[w][row][r];
        part.sums[((size_t(split) * tiles + tile) * ADAPTER_TILE + row) * in.most_rank + rank0 + r] = sum;
        __syncthreads();
    }
}

extern "C" {
// parts: of in->part. prefetch: weights that the next kernel reads.
int rwkv_adapter_shrink(const AdapterInput* in, int parts, int tiles, const char* prefetch,
                        unsigned prefetch_bytes, cudaStream_t stream) {
    static_assert(WARPS * WARP == ADAPTER_TILE * ADAPTER_RANK);
    if (parts < 1 || parts > ADAPTER_PARTS || tiles < 1) return cudaErrorInvalidValue;
    for (int i = 0; i < parts; i++)
        if (in->part[i].k % 32) return cudaErrorInvalidValue;
    const Prefetch next = {prefetch, prefetch_bytes};
    return launch(adapter_shrink_kernel, dim3(ADAPTER_SPLITS * tiles, parts), WARPS * WARP, 0, stream, *in,
                  tiles, next);
}
}
