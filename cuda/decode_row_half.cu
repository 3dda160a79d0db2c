// A decode step of one row by one launch on Hopper, as decode_row.cu, for models of up to 1024 channels with
// matrices in fp16, whose steps are short enough that what blocks wait for counts more than bytes.
//
//   x [C] fp32, and normed [C] fp16, which is its layer norm: written
//   states of the slot as of wkv.cuh and norm.cuh, read and written; a negative slot has none
//
// Products are sums in fp32: by tensor cores over the 16th of K that a warp has, then over the 16 warps of a
// block in order. What blocks add to the stream is fp32 over a head's 64 channels, or over 32 hidden units,
// rounded to units of 2^-24, then whole numbers, in any order. r, k, v, results of low-rank functions, y and
// hidden units are rounded to fp16, as between separate kernels.
//
// Reference: rwkv_batch/model/rwkv7.py, and the separate kernels. Binding: RowKernel of
// rwkv_batch/ops/cuda/special/row.py. Test: test/kernels/test_decode_row.py. Only sm_90a.
//
// Eight blocks share a head. Each has its channels of r, k and v in eight parts, some outputs of the inner
// sides of the low-rank functions, and 32 hidden units. All blocks wait for each other three times a layer:
// for r, k, v and inner sides, from which each of the eight computes the outer sides and the recurrence of
// the whole head; and twice where the stream is complete.
//
// Four more warps bring the weights. All of a layer but value lies in shared memory, so that each part of the
// next layer is on its way as soon as this layer's has been read: memory does not wait for what blocks wait
// for. Of value come rows of active hidden units alone, as nine of ten are zero in trained models; the fewer
// weights are on their way, the sooner arrives what blocks exchange. Behind the last layer's comes what the
// next kernel reads first, as far as the L2 cache.
//
// The launch may begin while the kernel before it still runs: until then it only brings weights.
#include "decode_row_half_bring.cuh"
#include "decode_row_half_compute.cuh"

namespace {
template <int STEPS>
__global__ void __launch_bounds__(half_row::ALL_THREADS, 1)
    decode_row_half_kernel(const __grid_constant__ RowInput in) {
#if HOPPER
    using namespace half_row;
    extern __shared__ __align__(128) uint8_t raw[];
    Memory& own = *reinterpret_cast<Memory*>(raw);
    const uint32_t weights = shared_address(raw) + sizeof(Memory);
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    warp = shuffle(warp, 0);
    const Share<STEPS> my(in, blockIdx.x);
    if (threadIdx.x == 0) {
        for (int i = 0; i < PARTS; i++) {
            const bool by_all = i == PART_OUT, narrow = i == PART_OUT || i == PART_OUTER;
            for (int chunk = 0; chunk < CHUNKS; chunk++)
                barrier_init(shared_address(&own.full[i][chunk]), narrow ? COPYING : 1);
            barrier_init(shared_address(&own.empty[i]), by_all ? COMPUTING : 1);
        }
        barriers_ready();
    }
    for (int i = threadIdx.x; i < min(in.layer_count, ROW_TABLES) * ROW_POINTERS; i += ALL_THREADS)
        own.tables[i / ROW_POINTERS][i % ROW_POINTERS] = in.layers[i / ROW_POINTERS].at[i % ROW_POINTERS];
    __syncthreads();
    if (warp < WARPS) {
        more_registers<COMPUTING_REGISTERS>();
        Computing<STEPS>(in, own, my, weights, warp, lane).layers();
    } else {
        fewer_registers<BRINGING_REGISTERS>();
        if (warp > WARPS)
            Bringing<STEPS>{in, own, my, weights, lane}.narrow(threadIdx.x - COMPUTING - WARP);
        else
            Bringing<STEPS>{in, own, my, weights, lane}.wide();
    }
#endif
}

using Kernel = void (*)(RowInput);

// Of a model with so many steps.
template <int STEPS = half_row::MOST_STEPS>
Kernel kernel(int steps, const RowInput& in, int& shared) {
    if constexpr (STEPS > 1)
        if (steps < STEPS) return kernel<STEPS - 1>(steps, in, shared);
    shared = int(sizeof(half_row::Memory)) + half_row::Share<STEPS>(in, 0).bytes();
    return decode_row_half_kernel<STEPS>;
}

struct Launch {
    Kernel kernel;
    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t config = {};
    Launch(const RowInput& in, cudaStream_t stream) {
        int shared;
        kernel = ::kernel<>(in.heads / 4, in, shared);
        attributes[0].id = cudaLaunchAttributeCooperative, attributes[0].val.cooperative = 1;
        attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[1].val.programmaticStreamSerializationAllowed = 1;
        config.gridDim = in.heads * half_row::HEAD_BLOCKS, config.blockDim = half_row::ALL_THREADS;
        config.dynamicSmemBytes = shared, config.stream = stream;
        config.attrs = attributes, config.numAttrs = 2;
    }
    bool allowed() const {
        return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    int(config.dynamicSmemBytes)) == cudaSuccess;
    }
};
}  // namespace

bool decode_row_half_fits(const RowInput& in) {
    const int blocks = in.heads * half_row::HEAD_BLOCKS, ranks = ranks_of(in);
    bool fits = on_hopper() && in.heads % 4 == 0 && in.heads / 4 <= half_row::MOST_STEPS &&
                in.slices * ROW_TILE == blocks * half_row::UNITS && blocks <= multiprocessors() &&
                ranks <= half_row::MOST_RANKS && ranks <= blocks * half_row::INNER_ROWS;
    for (int f = 0; f < ROW_FUNCTIONS; f++) fits = fits && in.rank[f] >= 32 && in.rank[f] % 32 == 0;
    if (!fits) return false;
    return Launch(in, nullptr).allowed();
}

int decode_row_half(const RowInput& in, cudaStream_t stream) {
    if (!decode_row_half_fits(in)) return cudaErrorNotSupported;
    const Launch launch(in, stream);
    return cudaLaunchKernelEx(&launch.config, launch.kernel, in);
}
