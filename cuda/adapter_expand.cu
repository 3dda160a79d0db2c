// The second half of adapters of rows: y[t, n] += sum over r of B[n, r] h[t, r], with h the sums of
// adapter_shrink.cu and the terms of adapter.cuh; or y = f(y + that) with f relu squared, of all rows.
//
// Reference: y + (x @ a.T) @ b.T for the rows of each adapter. Binding: Kernels.adapter_expand. Test:
// test/kernels/test_adapter.py.
//
// A block has one tile of rows and 256 columns of one matrix. It adds up h over the parts of K in order, and
// rounds it to fp16, the largest that fp16 holds at most. A warp has 32 columns, 8 of each row a lane: which
// rows of B make up an mma's columns is free. Sums over r are fp32, in steps of 16, in order. The loads of B
// are under way before the block waits for the sums.
#include "adapter.cuh"

constexpr int WARPS = 8, COLUMNS = 32;  // of a warp
constexpr int H_STRIDE = ADAPTER_MOST_RANK + 16;

template <int OUTPUT>
__global__ void LAUNCH_BOUNDS(WARPS* WARP, 2)
    adapter_expand_kernel(const __grid_constant__ AdapterInput in, int tiles) {
    __shared__ __align__(16) __half h[ADAPTER_TILE * H_STRIDE];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, quad = lane % 4;
    const int tile = blockIdx.x % tiles;
    const AdapterPart& part = in.part[blockIdx.y];
    const AdapterTile own(in, part, tile);
    const int n = part.n, rank = own.rank, stride = rank + 16,
              n0 = (int(blockIdx.x) / tiles * WARPS + warp) * COLUMNS, column = n0 + quad * 8;

    // Column c of mma j is column c / 2 * 8 + 2 j + c % 2 of this warp.
    uint2 bv[4];
    const auto fetch = [&](int rank0) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int of = n0 + group / 2 * 8 + j * 2 + group % 2;
            bv[j] = make_uint2(0, 0);
            if (of < n) bv[j] = load8(own.a + size_t(rank) * part.k + size_t(of) * rank + rank0 + quad * 4);
        }
    };
    if (rank) fetch(0);
    wait_for_inputs();
    if (!own.used || (!rank && OUTPUT != ADAPTER_ADD_SQUARE)) return;

    const int row = threadIdx.x / ADAPTER_RANK, r = threadIdx.x % ADAPTER_RANK;
    for (int rank0 = 0; rank0 < rank; rank0 += ADAPTER_RANK) {
        const float* const from = part.sums + (size_t(tile) * ADAPTER_TILE + row) * in.most_rank + rank0 + r;
        float sum = 0.f;
#pragma unroll
        for (int split = 0; split < ADAPTER_SPLITS; split++)
            sum += from[size_t(split) * tiles * ADAPTER_TILE * in.most_rank];
        h[row * stride + rank0 + r] = to_finite_half(sum);
    }
    __syncthreads();

    float acc[4][4] = {};  // of row `group` and of the one 8 later, two columns each
    for (int rank0 = 0; rank0 < rank; rank0 += ADAPTER_RANK) {
        const uint2 top = *reinterpret_cast<const uint2*>(h + group * stride + rank0 + quad * 4),
                    low = *reinterpret_cast<const uint2*>(h + (group + 8) * stride + rank0 + quad * 4);
#pragma unroll
        for (int j = 0; j < 4; j++) mma(acc[j], top.x, low.x, top.y, low.y, bv[j].x, bv[j].y);
        if (rank0 + ADAPTER_RANK < rank) fetch(rank0 + ADAPTER_RANK);
    }
    if (column >= n) return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int t = own.rows[group + half * 8];
        if (t < 0) continue;
        const size_t place = size_t(t) * n + column;
        if constexpr (OUTPUT == ADAPTER_ADD_FLOAT) {
            float* const y = static_cast<float*>(part.y) + place;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float4 before = *reinterpret_cast<const float4*>(y + i * 4);
                store(y + i * 4,
                      make_float4(before.x + acc[2 * i][2 * half], before.y + acc[2 * i][2 * half + 1],
                                  before.z + acc[2 * i + 1][2 * half],
                                  before.w + acc[2 * i + 1][2 * half + 1]));
            }
        } else {
            __half* const y = static_cast<__half*>(part.y) + place;
            const uint4 before = *reinterpret_cast<const uint4*>(y);
            const uint32_t pairs[4] = {before.x, before.y, before.z, before.w};
            uint32_t after[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float2 pair = to_float2(pairs[j]);
                pair.x += acc[j][2 * half], pair.y += acc[j][2 * half + 1];
                if (OUTPUT == ADAPTER_ADD_SQUARE) pair.x = relu_square(pair.x), pair.y = relu_square(pair.y);
                after[j] = to_half2(pair.x, pair.y);
            }
            store(y, after[0], after[1], after[2], after[3]);
        }
    }
}

extern "C" {
// parts: of in->part. output: an AdapterOutput.
int rwkv_adapter_expand(const AdapterInput* in, int parts, int tiles, int output, cudaStream_t stream) {
    if (parts < 1 || parts > ADAPTER_PARTS || tiles < 1 || in->most_rank > ADAPTER_MOST_RANK)
        return cudaErrorInvalidValue;
    int widest = 0;
    for (int i = 0; i < parts; i++) {
        if (in->part[i].n % 8) return cudaErrorInvalidValue;
        widest = in->part[i].n > widest ? in->part[i].n : widest;
    }
    const dim3 grid(tiles * ((widest + WARPS * COLUMNS - 1) / (WARPS * COLUMNS)), parts);
    switch (output) {
        case ADAPTER_ADD:
            return launch(adapter_expand_kernel<ADAPTER_ADD>, grid, WARPS * WARP, 0, stream, *in, tiles);
        case ADAPTER_ADD_SQUARE:
            return launch(adapter_expand_kernel<ADAPTER_ADD_SQUARE>, grid, WARPS * WARP, 0, stream, *in,
                          tiles);
        case ADAPTER_ADD_FLOAT:
            return launch(adapter_expand_kernel<ADAPTER_ADD_FLOAT>, grid, WARPS * WARP, 0, stream, *in,
                          tiles);
        default: return cudaErrorInvalidValue;
    }
}
}
