// A decode step of one row by one launch on Hopper: all layers of RWKV-7, from the embedding to the stream
// that the last norm reads, with large matrices in tiles of int4 or int8. The head is not part of it.
//
//   x [C] fp32, written
//   states of the slot as of wkv.cuh and norm.cuh, read and written; a negative slot has none
//
// What is multiplied with tiles becomes integers of 16 bits in units of the largest number of up to 256, so
// that sums over a tile are exact (but for hidden units of int8: fp32). Those of r, k, v and key are then
// fp32: over the tiles of a warp, over the 16 warps of a block in order, and where two blocks share K, over
// these. Those of output, value and inner low-rank sides are fp32 over a warp's part of K, rounded to units
// of 2^-24, then whole numbers, in any order. r, k, v, results of low-rank functions and y are rounded to
// fp16, as between separate kernels.
//
// Reference: rwkv_batch/model/rwkv7.py, and the separate kernels. Binding: RowKernel of
// rwkv_batch/ops/cuda/special/row.py. Test: test/kernels/test_decode_row.py. Only sm_90a; elsewhere the
// launcher returns cudaErrorNotSupported.
//
// A block has a multiprocessor to itself, and two blocks are a cluster. Such a pair has a head: it computes
// r, k and v of its 64 channels, the outer sides of the low-rank functions, the recurrence, and what these 64
// channels add to the stream; and some hidden units of the channel mix, from key to what they add to the
// stream. So all blocks wait for each other only where the stream is complete, twice a layer, and for the
// inner sides of the low-rank functions, which all blocks share and which come while r, k and v are
// multiplied. Each block computes both norms.
//
// Each of 16 warps has a part of K of all products with a norm's result, a ring of stages, and its own order
// of what comes into it, which is the same in all layers. Four other warps fill the rings.
#include "decode_row_compute.cuh"

namespace {
template <typename Format>
__global__ void PAIRED __launch_bounds__(ROW_THREADS, 1)
    decode_row_kernel(const __grid_constant__ RowInput in) {
#if HOPPER
    using namespace row;
    extern __shared__ __align__(128) uint8_t raw[];
    RowShared& own = *reinterpret_cast<RowShared*>(raw);
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    // Else they are computed anew wherever they are used.
    warp = shuffle(warp, 0), lane = shuffle(lane, lane);
    const RowShare my(in, blockIdx.x, gridDim.x, min(warp, ROW_WARPS - 1));

    if (threadIdx.x == 0) {
        barrier_init(shared_address(&own.pair_full), 1), barrier_init(shared_address(&own.hidden_full), 1);
        barriers_ready();
    }
    if (warp < ROW_WARPS && lane == 0) {
        for (int i = 0; i < ROW_STAGES; i++)
            barrier_init(shared_address(&own.full[warp][i]), 1),
                barrier_init(shared_address(&own.empty[warp][i]), 1);
        barriers_ready();
        own.item_count[warp] = plan_row<Format>(in, my, warp, own.items[warp]);
    }
    if (threadIdx.x < 4) own.zeros[threadIdx.x] = 0;
    if (threadIdx.x == 0) own.known_layers = ROW_TABLES;
    for (int i = threadIdx.x; i < min(in.layer_count, ROW_TABLES) * ROW_POINTERS; i += ROW_THREADS)
        own.tables[i / ROW_POINTERS][i % ROW_POINTERS] = in.layers[i / ROW_POINTERS].at[i % ROW_POINTERS];
    cluster_arrive();
    cluster_wait();
    __syncthreads();
    if (warp >= ROW_WARPS) {
        fewer_registers<ROW_BRINGING_REGISTERS>();
        bring_weights(in, own, warp - ROW_WARPS, lane);
    } else {
        more_registers<ROW_COMPUTING_REGISTERS>();
        compute<Format>(in, own, my, warp, lane);
    }
    cluster_arrive();
    cluster_wait();
#endif
}

constexpr int SHARED = sizeof(RowShared);
using Kernel = void (*)(RowInput);

Kernel kernel(int form) {
    return form == ROW_INT4        ? decode_row_kernel<RowInt4<Int4Tile>>
           : form == ROW_WIDE_INT4 ? decode_row_kernel<RowInt4<WideInt4Tile>>
           : form == ROW_INT8      ? decode_row_kernel<RowInt8>
                                   : decode_row_kernel<RowInt8Columns>;
}

// A block on each multiprocessor, all of them at once.
cudaLaunchConfig_t config(cudaLaunchAttribute& attribute, cudaStream_t stream) {
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
    cudaLaunchConfig_t found = {};
    found.gridDim = multiprocessors() / 2 * 2, found.blockDim = ROW_THREADS;
    found.dynamicSmemBytes = SHARED, found.stream = stream;
    found.attrs = &attribute, found.numAttrs = 1;
    return found;
}

// Whether all pairs of blocks of a form find room: not where a part of the GPU has an odd number of
// multiprocessors.
bool has_room(int form) {
    const Kernel kernel = ::kernel(form);
    cudaLaunchAttribute attribute = {};
    cudaLaunchConfig_t all = config(attribute, nullptr);
    all.numAttrs = 0;
    int clusters = 0;
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED) == cudaSuccess &&
           cudaOccupancyMaxActiveClusters(&clusters, kernel, &all) == cudaSuccess &&
           2 * clusters >= int(all.gridDim.x);
}
}  // namespace

extern "C" {
// Whether a model of such sizes can run so on this GPU. form, head_rows: as of RowInput; rank: of the
// low-rank functions; slices: of 64 hidden units.
int rwkv_decode_row_fits(int form, const int* rank, int heads, int slices, int head_rows) {
    if (form == ROW_HALF) {
        RowInput in = {};
        for (int f = 0; f < ROW_FUNCTIONS; f++) in.rank[f] = rank[f];
        in.heads = heads, in.slices = slices;
        return heads <= ROW_HALF_HEADS ? decode_row_half_fits(in) : decode_row_wide_fits(in);
    }
    const int blocks = multiprocessors() / 2 * 2, free = blocks - 2 * heads;
    int ranks = 0;
    bool fits = on_hopper() && form >= 0 && form < ROW_HALF && heads % 2 == 0 && free > 0 &&
                heads <= ROW_WARPS * ROW_WARP_TILES && slices <= 2 * ROW_SLICES * (blocks / 2);
    for (int f = 0; f < ROW_FUNCTIONS; f++)
        ranks += rank[f], fits = fits && rank[f] >= ROW_INNER && rank[f] % 32 == 0;
    // Every block has outputs of inner sides, so that none is left behind: counts would go past what it waits
    // for.
    const int others = ranks - 2 * heads * head_rows;
    fits = fits && ranks <= ROW_RANKS && head_rows >= 1 && head_rows <= ROW_INNER && others >= free &&
           others <= free * ROW_INNER;
    static const bool room[ROW_HALF] = {has_room(ROW_INT4), has_room(ROW_WIDE_INT4), has_room(ROW_INT8),
                                        has_room(ROW_INT8_COLUMNS)};
    if (!fits || !room[form]) return false;
    return (rank[ROW_W] + rank[ROW_A] + rank[ROW_V]) * 4 <= ROW_STAGE_BYTES &&
           rank[ROW_G] * 4 <= ROW_STAGE_BYTES;
}

// cudaErrorNotSupported: for this GPU or these sizes.
int rwkv_decode_row(const RowInput* in, cudaStream_t stream) {
    if (in->form == ROW_HALF)
        return in->heads <= ROW_HALF_HEADS ? decode_row_half(*in, stream) : decode_row_wide(*in, stream);
    if (!rwkv_decode_row_fits(in->form, in->rank, in->heads, in->slices, in->head_rows))
        return cudaErrorNotSupported;
    cudaLaunchAttribute attribute = {};
    const cudaLaunchConfig_t all = config(attribute, stream);
    return cudaLaunchKernelEx(&all, kernel(in->form), *in);
}
}
