// A decode step of one row by one launch on Hopper, as decode_row_half.cu, for models of 2048 channels and
// more with matrices in fp16, whose steps are bound by memory if it never waits for what blocks wait for.
//
//   x [C] fp32, and normed [C] fp16, which is its layer norm: written
//   states of the slot as of wkv.cuh and norm.cuh, read and written; a negative slot has none
//
// Products are sums in fp32: by tensor cores over the 16th of K that a warp has, then over the 16 warps of a
// block. What hidden units add to the stream is fp32 over those of a block, rounded to units of 2^-24, then
// whole numbers, in any order. r, k, v, results of low-rank functions, y and hidden units are rounded to
// fp16, as between separate kernels.
//
// Reference: rwkv_batch/model/rwkv7.py, and the separate kernels. Binding: RowKernel of
// rwkv_batch/ops/cuda/special/row.py. Test: test/kernels/test_decode_row.py. Only sm_90a.
//
// Rows of r, k, v, of the inner sides of the low-rank functions, of output and of key are divided among all
// blocks, and of value a block has the rows of its hidden units. The first blocks have a head each: its outer
// sides and its recurrence, and fewer rows of the others. Blocks wait for each other four times a layer:
// those with a head for r, k, v and inner sides, all for y, for what the time mix adds to the stream, and
// for what the channel mix does.
//
// One more warp brings the weights, through a ring that holds a third of a layer: so memory goes on while
// blocks wait. No more than some stages are on their way at once, as what blocks exchange queues behind them.
// Behind the last layer's weights comes what the next kernel reads first, as far as the L2 cache.
//
// The launch may begin while the kernel before it still runs: until then it only brings weights.
#include "decode_row_wide_bring.cuh"
#include "decode_row_wide_compute.cuh"

namespace {
template <int STEPS>
__global__ void __launch_bounds__(wide_row::ALL_THREADS, 1)
    decode_row_wide_kernel(const __grid_constant__ RowInput in) {
#if HOPPER
    using namespace wide_row;
    extern __shared__ __align__(128) uint8_t raw[];
    using M = Memory<STEPS>;
    M& own = *reinterpret_cast<M*>(raw);
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    warp = shuffle(warp, 0);
    const bool has_head = blockIdx.x < Share<STEPS>::HEADS;
    const uint32_t weights = shared_address(raw) + sizeof(M),
                   ring = weights + (has_head ? Share<STEPS>::outer_at(in, ROW_FUNCTIONS) : 0);
    const int stages = M::stages(in, has_head);
    if (threadIdx.x == 0) {
        own.my = Share<STEPS>(in, blockIdx.x, gridDim.x);
        for (int i = 0; i < MOST_STAGES; i++)
            barrier_init(shared_address(&own.full[i]), 1), barrier_init(shared_address(&own.empty[i]), WARPS);
        for (int i = 0; i < ROW_FUNCTIONS; i++) barrier_init(shared_address(&own.outer_full[i]), 1);
        barrier_init(shared_address(&own.outer_empty), 1);
        barriers_ready();
        own.zero = 0;
    }
    for (int i = threadIdx.x; i < min(in.layer_count, ROW_TABLES) * ROW_POINTERS; i += ALL_THREADS)
        own.tables[i / ROW_POINTERS][i % ROW_POINTERS] = in.layers[i / ROW_POINTERS].at[i % ROW_POINTERS];
    __syncthreads();
    if (warp < WARPS) {
        more_registers<COMPUTING_REGISTERS>();
        Computing<STEPS>(in, own, own.my, weights, ring, stages, warp, lane).layers();
    } else {
        fewer_registers<BRINGING_REGISTERS>();
        if (warp == WARPS) Bringing<STEPS>{in, own, own.my, weights, ring, stages, lane}.layers();
    }
#endif
}

using Kernel = void (*)(RowInput);

template <int STEPS>
bool shares_fit(const RowInput& in, int blocks) {
    using S = wide_row::Share<STEPS>;
    using M = wide_row::Memory<STEPS>;
    bool fits = blocks > S::HEADS && M::stages(in, true) >= 3;
    for (int block = 0; fits && block < blocks; block++) {
        const S of(in, block, blocks);
        const int first = of.rows[wide_row::IN].count, rest = first - of.of_first;
        fits = first > 0 && first <= S::MOST_ROWS && of.rows[wide_row::OUT].count > 0 &&
               of.rows[wide_row::OUT].count <= S::MOST_OUT && of.rows[wide_row::KEYS].count > 0 &&
               of.rows[wide_row::KEYS].count <= S::MOST_ROWS &&
               rest <= (rest ? S::rows_of_kind(in, of.next_kind()) : 0);
    }
    return fits;
}

// Of a model with so many channels, if it can run so.
Kernel kernel(const RowInput& in, int blocks) {
    const int steps = in.heads / 4;
    if (in.heads % 4) return nullptr;
    if (steps == 8 && shares_fit<8>(in, blocks)) return decode_row_wide_kernel<8>;
    if (steps == 10 && shares_fit<10>(in, blocks)) return decode_row_wide_kernel<10>;
    return nullptr;
}
}  // namespace

bool decode_row_wide_fits(const RowInput& in) {
    const int ranks = ranks_of(in);
    bool fits = on_hopper() && in.slices > 0 && ranks <= wide_row::MOST_RANKS &&
                3 * HEAD + ranks <= 2 * wide_row::COMPUTING;
    for (int f = 0; f < ROW_FUNCTIONS; f++) fits = fits && in.rank[f] >= 32 && in.rank[f] % 32 == 0;
    if (!fits) return false;
    const Kernel found = kernel(in, multiprocessors());
    return found && cudaFuncSetAttribute(found, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         wide_row::SHARED_BYTES) == cudaSuccess;
}

int decode_row_wide(const RowInput& in, cudaStream_t stream) {
    if (!decode_row_wide_fits(in)) return cudaErrorNotSupported;
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeCooperative, attributes[0].val.cooperative = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = multiprocessors(), config.blockDim = wide_row::ALL_THREADS;
    config.dynamicSmemBytes = wide_row::SHARED_BYTES, config.stream = stream;
    config.attrs = attributes, config.numAttrs = 2;
    return cudaLaunchKernelEx(&config, kernel(in, int(config.gridDim.x)), in);
}
