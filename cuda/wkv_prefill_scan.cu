// The second kernel of wkv_prefill.cuh: the chunks of a row one after the other, the state in registers from
// the first to the last.
//
// Reference: rwkv_batch/ops/wkv_prefill.py. Binding: Kernels.wkv_prefill. Test:
// test/kernels/test_wkv_prefill.py.
//
// Every sum is one of a tensor core's, in a fixed order: over keys in steps of 16, two at a time, then over a
// chunk's tokens.
#include "wkv_prefill.cuh"

// S of a lane: rows 16 tile + lane / 4 (c 0, 1 of each) and 8 below (c 2, 3), keys 16 (lane % 4) + 2 i of
// product i.
template <typename T>
__device__ __forceinline__ void load_state(const T* place, float (&s)[8][4]) {
#pragma unroll
    for (int down = 0; down < 2; down++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            Raw8<T> raw;
            raw.load(place + down * 8 * HEAD + half * 8);
            float x[8];
            raw.widen(x);
#pragma unroll
            for (int i = 0; i < 4; i++)
                s[4 * half + i][2 * down] = x[2 * i], s[4 * half + i][2 * down + 1] = x[2 * i + 1];
        }
}

template <typename T>
__device__ __forceinline__ void store_state(T* place, const float (&s)[8][4]) {
#pragma unroll
    for (int down = 0; down < 2; down++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float x[8];
#pragma unroll
            for (int i = 0; i < 4; i++)
                x[2 * i] = s[4 * half + i][2 * down], x[2 * i + 1] = s[4 * half + i][2 * down + 1];
            store8(place + down * 8 * HEAD + half * 8, x);
        }
}

// One chunk. x and own: this lane's numbers of all of its keys, and of v and y of these rows' values. middle:
// of the lane's keys, as is `end`, of the chunk before at first. When x, own and middle have been read,
// `release` is called; then y goes to its place.
template <typename Release>
__device__ __forceinline__ void advance(float (&s)[8][4], float (&end)[16], const uint4* x, const uint4* own,
                                        const float* middle, uint4* y_place, const Release& release) {
    uint32_t read[TILES][4];
#pragma unroll
    for (int m = 0; m < 4; m++) {
        const float4 by = *reinterpret_cast<const float4*>(middle + 4 * m);
        const float f[4] = {end[4 * m] * by.x, end[4 * m + 1] * by.y, end[4 * m + 2] * by.z,
                            end[4 * m + 3] * by.w};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float* c = s[2 * m + i];
            c[0] *= f[2 * i], c[1] *= f[2 * i + 1], c[2] *= f[2 * i], c[3] *= f[2 * i + 1];
            read[m][2 * i] = pack(c), read[m][2 * i + 1] = pack(c + 2);
        }
    }
    float removed[2][4] = {}, more[2][4] = {}, y[2][4];
#pragma unroll
    for (int j = 0; j < TILES; j += 2) {
        const uint4 p = x[j * WARP], q = x[(j + 1) * WARP];
        mma(removed[0], read[j][0], read[j][1], read[j][2], read[j][3], p.x, p.y);
        mma(more[0], read[j + 1][0], read[j + 1][1], read[j + 1][2], read[j + 1][3], q.x, q.y);
        mma(removed[1], read[j][0], read[j][1], read[j][2], read[j][3], p.z, p.w);
        mma(more[1], read[j + 1][0], read[j + 1][1], read[j + 1][2], read[j + 1][3], q.z, q.w);
    }
    const uint4 v = own[0], given = own[WARP];
#pragma unroll
    for (int m = 0; m < TILES; m++) {
        const uint4 k = x[(2 * TILES + m) * WARP];
        mma(s[2 * m], v.x, v.y, v.z, v.w, k.x, k.y);
        mma(s[2 * m + 1], v.x, v.y, v.z, v.w, k.z, k.w);
    }
    uint32_t u[4];
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int down = 0; down < 2; down++)
            u[2 * h + down] = to_finite_half2(removed[h][2 * down] + more[h][2 * down],
                                              removed[h][2 * down + 1] + more[h][2 * down + 1]);
#pragma unroll
    for (int m = 0; m < TILES; m++) {
        const uint4 b = x[(3 * TILES + m) * WARP];
        mma(s[2 * m], u[0], u[1], u[2], u[3], b.x, b.y);
        mma(s[2 * m + 1], u[0], u[1], u[2], u[3], b.z, b.w);
    }
    unpack_y(y[0], given.x), unpack_y(y[0] + 2, given.y), unpack_y(y[1], given.z),
        unpack_y(y[1] + 2, given.w);
#pragma unroll
    for (int j = 0; j < TILES; j++) {
        const uint4 r = x[(TILES + j) * WARP];
        mma(y[0], read[j][0], read[j][1], read[j][2], read[j][3], r.x, r.y);
        mma(y[1], read[j][0], read[j][1], read[j][2], read[j][3], r.z, r.w);
    }
#pragma unroll
    for (int m = 0; m < 4; m++) {
        const float4 by = *reinterpret_cast<const float4*>(middle + HEAD + 4 * m);
        end[4 * m] = by.x, end[4 * m + 1] = by.y, end[4 * m + 2] = by.z, end[4 * m + 3] = by.w;
    }
    release();
    store(y_place, pack_y(y[0]), pack_y(y[0] + 2), pack_y(y[1]), pack_y(y[1] + 2));
}

// After the last chunk: what is left of its decay.
__device__ __forceinline__ void decay(float (&s)[8][4], const float (&end)[16]) {
#pragma unroll
    for (int i = 0; i < 8; i++)
        s[i][0] *= end[2 * i], s[i][1] *= end[2 * i + 1], s[i][2] *= end[2 * i], s[i][3] *= end[2 * i + 1];
}

constexpr int KEY_VECTORS =
    offsetof(ChunkData, values) / 16;  // of a chunk's data, what all values need: kk, r, k, b and the decays
constexpr int OWN_VECTORS = sizeof(ChunkData::values) / TILES / 16;
template <int WARPS>
constexpr int stage_vectors = KEY_VECTORS + WARPS * OWN_VECTORS;

// Chunks on their way to shared memory, up to STAGES of them. One warp of the block, the producer, fetches
// them; the other WARPS consume them. Barriers in shared memory count which stages are full and which are
// free again. From Hopper on the producer requests whole runs of bytes, before that 16 bytes with each of its
// lanes.
template <int WARPS, int STAGES>
struct Ring {
    static constexpr int VECTORS = stage_vectors<WARPS>;
    uint4* stages;
    unsigned full, free;  // barriers, 8 bytes each
    int stage = 0;
    unsigned phase = 0;  // odd: every stage has been used an odd number of times before this one

    __device__ __forceinline__ Ring(uint4* shared, unsigned long long* barriers)
        : stages(shared), full(shared_address(barriers)), free(full + 8 * STAGES) {
        if (threadIdx.x == 0) {
            for (int i = 0; i < STAGES; i++)
                mbarrier::init<mbarrier::COPYING_LANES>(full + 8 * i),
                    mbarrier::init<WARPS * WARP>(free + 8 * i);
            fence_async_shared();
        }
        __syncthreads();
    }

    __device__ __forceinline__ const uint4* place() const { return stages + stage * VECTORS; }

    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }

    __device__ __forceinline__ void wait_full() const { mbarrier::wait(full + 8 * stage, phase); }

    // This thread has read the stage; an arrival alone does not wait for reads. Each arrives itself:
    // compute-sanitizer reports a race where one arrives for all.
    __device__ __forceinline__ void release() const {
        fence_async_shared();
        mbarrier::arrive(free + 8 * stage);
    }

    // The keys of a chunk, and the values of WARPS tiles from `first_tile` on.
    __device__ __forceinline__ void fetch(const ChunkData* data, int first_tile, int lane) const {
        mbarrier::wait(free + 8 * stage, phase ^ 1);
        const unsigned barrier = full + 8 * stage, to = shared_address(place());
        if (lane < mbarrier::COPYING_LANES) {
            mbarrier::expect_copies<VECTORS * 16>(barrier);
            mbarrier::copy_run(to, data, KEY_VECTORS * 16, barrier);
            mbarrier::copy_run(to + KEY_VECTORS * 16, &data->values[first_tile], WARPS * OWN_VECTORS * 16,
                               barrier);
            mbarrier::end_copies(barrier);
        }
    }
};

// A block has 16 WARPS rows of S of one row and head at a time; a warp has 16.
template <typename T, int WARPS, int STAGES>
__global__ void __launch_bounds__((WARPS + 1) * WARP)
    wkv_prefill_scan_kernel(const __grid_constant__ TimeMixInput in,
                            const __grid_constant__ ChunksInput packed, ChunkData* chunk_data) {
    extern __shared__ __align__(128) uint4 shared[];
    __shared__ unsigned long long barriers[2 * STAGES];
    constexpr int PARTS = TILES / WARPS;
    Ring<WARPS, STAGES> ring(shared, barriers);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, heads = in.width / HEAD;
    const int units = packed.counts[1] * heads * PARTS;
    if (warp == WARPS) {
        wait_for_inputs();
        for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
            const int row = unit / (heads * PARTS), head = unit / PARTS % heads,
                      first_tile = unit % PARTS * WARPS;
            const int chunks = packed.row_chunks[row];
            const ChunkData* data = chunk_data + size_t(packed.row_chunk[row]) * heads + head;
            for (int chunk = 0; chunk < chunks; chunk++, data += heads, ring.next())
                ring.fetch(data, first_tile, lane);
        }
        return;
    }
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
        const int row = unit / (heads * PARTS), head = unit / PARTS % heads,
                  tile = unit % PARTS * WARPS + warp;
        const int chunks = packed.row_chunks[row];
        T* place = static_cast<T*>(in.state) + packed.row_slot[row] * in.slot_stride +
                   size_t(head) * HEAD * HEAD + (16 * tile + lane / 4) * HEAD + lane % 4 * 16;
        float s[8][4], end[16];
        load_state(place, s);  // written a step ago, so the kernel before may still run
        if (unit == blockIdx.x) wait_for_inputs();
        uint4* y_place = &chunk_data[size_t(packed.row_chunk[row]) * heads + head].values[tile].y[lane];
#pragma unroll
        for (int i = 0; i < 16; i++) end[i] = 1.f;
        for (int chunk = 0; chunk < chunks; chunk++, ring.next()) {
            ring.wait_full();
            const uint4* x = ring.place() + lane;
            const float* middle = reinterpret_cast<const ChunkData*>(x - lane)->middle + lane % 4 * 16;
            advance(s, end, x, x + KEY_VECTORS + warp * OWN_VECTORS, middle, y_place,
                    [&] { ring.release(); });
            y_place += heads * sizeof(ChunkData) / sizeof(uint4);
        }
        decay(s, end);
        store_state(place, s);
    }
}

namespace {
constexpr int SCAN_WARPS = 2,
              SCAN_STAGES = 6;  // measured: fewer warps a block are slower with many rows, more with one

template <typename T>
int scan(const TimeMixInput& in, const ChunksInput& packed, size_t rows, ChunkData* chunk_data,
         cudaStream_t stream) {
    constexpr size_t SHARED = SCAN_STAGES * stage_vectors<SCAN_WARPS> * sizeof(uint4);
    const auto kernel = wkv_prefill_scan_kernel<T, SCAN_WARPS, SCAN_STAGES>;
    unsigned blocks;
    const cudaError_t error = resident(kernel, (SCAN_WARPS + 1) * WARP, SHARED,
                                       rows * (in.width / HEAD) * (TILES / SCAN_WARPS), blocks);
    return error != cudaSuccess
               ? error
               : launch(kernel, blocks, (SCAN_WARPS + 1) * WARP, SHARED, stream, in, packed, chunk_data);
}
}  // namespace

int wkv_prefill_scan(const TimeMixInput& in, const ChunksInput& packed, int rows, ChunkData* chunk_data,
                     bool fp32, cudaStream_t stream) {
    return fp32 ? scan<float>(in, packed, rows, chunk_data, stream)
                : scan<__half>(in, packed, rows, chunk_data, stream);
}
