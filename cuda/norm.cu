// Residual add, layer norm, token shift and mixing.
//
//   x [T, C] fp32      the residual stream, updated: x = embedding of the token, or x + y, or x + the sum of partial products
//   y [T, C] fp16      what the layer before adds; or parts [P, T, C] fp32, added in the order of P
//   shift              fp16; the last normed input of slot s at shift + s * slot_stride, C numbers
//   mixes [N, C] fp16  out [N, T, C] fp16 = normed + (the normed input before - normed) * mix
//
// Arithmetic and sums are fp32; mean and variance are computed one after the other over the whole row, each as a tree over threads. Where
// a team of blocks has the row (norm_mix_team_kernel), each warp does so for its 256 columns, and what the warps found is combined over
// the row: mean of the means; squares within the warps plus 256 times the squares of their means' distances, again as a tree.
// A thread has 4 or 8 neighbouring columns of a row. A row whose slot is negative is padding: it reads zeros and writes no
// state; in prefill, no out either.
#include "common.cuh"
#include "hopper.cuh"

constexpr float EPSILON = 1e-5f;
constexpr int MOST_MIXES = 6;
constexpr int MOST_RUN = 16;     // tokens of a block in prefill
constexpr int TEAM = 4;          // blocks that share as many rows, and the constants' columns among them
constexpr int MOST_TEAM_THREADS = 512;
constexpr int WARP_COLUMNS = 8 * WARP;  // of a team's warp

struct NormInput {
    float* x;
    const __half* y;
    const float* parts;
    int part_count;
    int rows;               // T of parts
    const int* tokens;      // not null: x comes from the table
    const __half* table;    // [vocabulary, C]
    const int* gather;      // not null: which row of x block b works on
    const __half* weight;   // [C]
    const __half* bias;
    int width;
};

__device__ __forceinline__ float block_sum(float value, float* scratch) {
    value = warp_sum(value);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    if (warps == 1) return value;
    if (lane == 0) scratch[warp] = value;
    __syncthreads();
    return warp_sum(lane < warps ? scratch[lane] : 0.f);
}

// N neighbouring numbers of a row of fp16 (4 or 8), as they are stored.
template <int N>
struct Raw {
    uint32_t pair[N / 2];
    __device__ __forceinline__ void load(const __half* p) {
        if constexpr (N == 8) {
            const uint4 x = *reinterpret_cast<const uint4*>(p);
            pair[0] = x.x, pair[1] = x.y, pair[2] = x.z, pair[3] = x.w;
        } else {
            const uint2 x = *reinterpret_cast<const uint2*>(p);
            pair[0] = x.x, pair[1] = x.y;
        }
    }
    __device__ __forceinline__ void set(const float (&x)[N]) {
#pragma unroll
        for (int i = 0; i < N / 2; i++) pair[i] = to_half2(x[2 * i], x[2 * i + 1]);
    }
    __device__ __forceinline__ void store(__half* p) const {
        // Left to itself, the compiler makes four stores of 4 bytes of a vector whose words it has just packed.
        if constexpr (N == 8)
            asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(pair[0]), "r"(pair[1]), "r"(pair[2]), "r"(pair[3])
                         : "memory");
        else
            asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(pair[0]), "r"(pair[1]) : "memory");
    }
    __device__ __forceinline__ float operator[](int i) const {
        const float2 both = to_float2(pair[i / 2]);
        return i % 2 ? both.y : both.x;
    }
};

template <int N>
__device__ __forceinline__ void store_half(__half* p, const float (&x)[N]) {
    Raw<N> raw;
    raw.set(x);
    raw.store(p);
}

template <int N>
__device__ __forceinline__ void load_float(const float* p, float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        const float4 v = *reinterpret_cast<const float4*>(p + i);
        x[i] = v.x, x[i + 1] = v.y, x[i + 2] = v.z, x[i + 3] = v.w;
    }
}

template <int N>
__device__ __forceinline__ void store_float(float* p, const float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i += 4) *reinterpret_cast<float4*>(p + i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
}

// As store_float, with all lanes of the warp, though not all may have room there. A lane's 8 numbers are two stores, each of every other
// 16 bytes: the L2 cache would be sent every sector of 32 bytes twice. Neighbours exchange halves, so that each store is of whole sectors.
template <int N>
__device__ __forceinline__ void store_whole_sectors(float* p, const float (&x)[N], bool inside) {
    if constexpr (N == 4) {
        if (inside) store_float(p, x);
    } else {
        static_assert(N == 8);
        const bool odd = threadIdx.x % 2;
        float low[4], high[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float other = __shfl_xor_sync(ALL, odd ? x[i] : x[4 + i], 1);
            low[i] = odd ? other : x[i], high[i] = odd ? x[4 + i] : other;
        }
        if (!inside) return;
        float* place = odd ? p - 4 : p;
        store_float(place, low), store_float(place + 8, high);
    }
}

// N numbers of fp16 from global to shared memory, as with `copy_async`.
template <int N>
__device__ __forceinline__ void copy_columns(__half* to, const __half* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(unsigned(__cvta_generic_to_shared(to))), "l"(from), "n"(2 * N)
                 : "memory");
}

// Weight and bias of this thread's columns, N from N threadIdx on. Loaded before waiting for x: they come from memory, x from the cache.
template <int N>
struct Affine {
    Raw<N> weight = {}, bias = {};
    __device__ __forceinline__ explicit Affine(const NormInput& in) {
        const int column = N * threadIdx.x;
        if (column < in.width) weight.load(in.weight + column), bias.load(in.bias + column);
    }
};

// This thread's numbers of a row of the residual stream, as the norm before left them.
template <int N>
__device__ __forceinline__ void stream_row(const NormInput& in, int row, float (&v)[N]) {
    const int column = N * threadIdx.x;
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = 0.f;
    if (!in.tokens && column < in.width) load_float(in.x + size_t(row) * in.width + column, v);
}

// What is added to a row of the stream, but for partial sums; where it is an embedding, `stream_row` has left zeros.
template <int N>
struct Addend {
    Raw<N> raw = {};
    __device__ __forceinline__ void load(const NormInput& in, int row) {
        const int column = N * threadIdx.x;
        if (column >= in.width) return;
        if (in.tokens)
            raw.load(in.table + size_t(in.tokens[row]) * in.width + column);
        else if (in.y)
            raw.load(in.y + size_t(row) * in.width + column);
    }
    __device__ __forceinline__ void add(float (&v)[N]) const {
#pragma unroll
        for (int i = 0; i < N; i++) v[i] += raw[i];
    }
};

// From a row of the stream in v, whose `sum` is of this thread's numbers, to the normed row. Both arrays of `scratch` must be unused.
template <int N>
__device__ __forceinline__ void normalize(const Affine<N>& affine, int width, float sum, float (&v)[N], float (*scratch)[WARP]) {
    const int column = N * threadIdx.x;
    const float mean = block_sum(sum, scratch[0]) / width;
    float squares = 0.f;
    if (column < width)
#pragma unroll
        for (int i = 0; i < N; i++) v[i] -= mean, squares += v[i] * v[i];
    const float scale = rsqrtf(block_sum(squares, scratch[1]) / width + EPSILON);
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = v[i] * scale * affine.weight[i] + affine.bias[i];
}

// Adds the partial sums of a row's columns from `column` on, in their order, AT_ONCE of them under way together.
template <int AT_ONCE, int N>
__device__ __forceinline__ void add_parts(const NormInput& in, int row, int column, float (&v)[N]) {
    for (int part = 0; part < in.part_count; part += AT_ONCE) {
        float more[AT_ONCE][N];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
            if (part + j < in.part_count) load_float(in.parts + (size_t(part + j) * in.rows + row) * in.width + column, more[j]);
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
            if (part + j < in.part_count)
#pragma unroll
                for (int i = 0; i < N; i++) v[i] += more[j][i];
    }
}

// From the row of the stream in v to the normed row; what is added is added to the stream as well. Both arrays of `scratch` must be unused.
template <int N>
__device__ __forceinline__ void norm_row(const NormInput& in, const Affine<N>& affine, int row, float (&v)[N], float (*scratch)[WARP]) {
    const int width = in.width, column = N * threadIdx.x;
    float sum = 0.f;
    if (column < width) {
        if (in.tokens) {
            Raw<N> raw;
            raw.load(in.table + size_t(in.tokens[row]) * width + column);
#pragma unroll
            for (int i = 0; i < N; i++) v[i] = raw[i];
        } else if (in.y) {
            Raw<N> raw;
            raw.load(in.y + size_t(row) * width + column);
#pragma unroll
            for (int i = 0; i < N; i++) v[i] += raw[i];
        }
        add_parts<16 / N>(in, row, column, v);
        if (in.tokens || in.y || in.part_count) store_float(in.x + size_t(row) * width + column, v);
#pragma unroll
        for (int i = 0; i < N; i++) sum += v[i];
    }
    normalize(affine, width, sum, v, scratch);
}

template <int N>
__device__ __forceinline__ void mix_and_store(const float (&x)[N], const Raw<N>& before, const Raw<N>& amount, __half* out) {
    float mixed[N];
#pragma unroll
    for (int i = 0; i < N; i++) mixed[i] = x[i] + (before[i] - x[i]) * amount[i];
    store_half(out, mixed);
}

// Decode: every row is one token. One block a row. The stream, the slot and its state were written several kernels ago; they and the
// weights are loaded before waiting for what is added. Not so in a step's first norm: the kernel before it may still change slots
// (feed.cu).
template <int N, int MIXES>
__global__ void __launch_bounds__(1024)
    norm_mix_kernel(NormInput in, const int* slots, __half* shift, size_t slot_stride, const __half* mixes, __half* out) {
    __shared__ float scratch[2][WARP];
    const int column = N * threadIdx.x, row = blockIdx.x;
    const bool inside = column < in.width, first = in.tokens != nullptr;
    float v[N];
    Raw<N> before = {}, amounts[MIXES] = {};
    int slot = -1;
    const auto look_up = [&] {
        slot = slots[row];
        if (inside && slot >= 0) before.load(shift + slot * slot_stride + column);
    };
    stream_row(in, row, v);
    if (!first) look_up();
    const Affine<N> affine(in);
#pragma unroll
    for (int i = 0; i < MIXES; i++)
        if (inside) amounts[i].load(mixes + i * in.width + column);
    wait_for_inputs();
    if (first) look_up();
    norm_row(in, affine, row, v, scratch);
    if (!inside) return;
    if (slot >= 0) store_half(shift + slot * slot_stride + column, v);
#pragma unroll
    for (int i = 0; i < MIXES; i++) mix_and_store(v, before, amounts[i], out + (i * size_t(gridDim.x) + row) * in.width + column);
}

// Decode of many rows on a Hopper GPU: a team of TEAM blocks, a cluster, has TEAM rows. Each block has its share of the columns of all of
// them, threadIdx.y says of which row, and fetches that share of the constants (mixes, weight, bias) once: those of a whole row are more
// bytes than its outputs, and what passes through the L2 cache is what takes time here. The blocks tell each other their warps' moments,
// once. All loads are under way before one is waited for: a slot is used only after what is added has been asked for. Not so partial sums,
// which are added one after the other: for all at once there are no registers, as three blocks share a multiprocessor.
template <int MIXES, bool PARTS>
__global__ void __launch_bounds__(MOST_TEAM_THREADS, 3)
    norm_mix_team_kernel(const __grid_constant__ NormInput in, int rows, const int* slots, __half* shift, size_t slot_stride,
                         const __half* mixes, __half* out) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using namespace hopper;
    constexpr int N = WARP_COLUMNS / WARP;
    extern __shared__ __align__(16) __half constants[];  // [MIXES + 2, columns]: mixes, weight, bias
    __shared__ __align__(8) uint64_t told;
    __shared__ __align__(8) float2 moments[TEAM][MOST_TEAM_THREADS / WARP];  // of rows and warps: mean, sum of squares around it
    const int columns = in.width / TEAM, warps = columns / WARP_COLUMNS;  // of a row in a block
    const int at = N * threadIdx.x, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int rank = cluster_rank(), row = blockIdx.x - rank + threadIdx.y, column = rank * columns + at;
    const bool inside = row < rows, first = !PARTS && in.tokens;
    float* const stream = in.x + size_t(row) * in.width + column;
    if (threadIdx.x == 0 && threadIdx.y == 0) {
        barrier_init(shared_address(&told), 1);
        barriers_ready();
    }
    cluster_arrive_relaxed();

    float v[N] = {};
    int slot = -1;
    if (inside && !first) load_float(stream, v), slot = slots[row];
#pragma unroll
    for (int k = 0; k < MIXES + 2; k += TEAM) {
        const int i = k + threadIdx.y;
        const __half* from = i < MIXES ? mixes + i * in.width : i == MIXES ? in.weight : in.bias;
        if (i < MIXES + 2) copy_columns<N>(constants + i * columns + at, from + column);
    }
    close_copies();
    wait_for_inputs();
    Raw<N> added = {}, before = {};
    if (inside && first)
        added.load(in.table + size_t(in.tokens[row]) * in.width + column), slot = slots[row];
    else if (!PARTS && inside && in.y)
        added.load(in.y + size_t(row) * in.width + column);
    if (slot >= 0) before.load(shift + slot * slot_stride + column);
    if (PARTS && inside) add_parts<1>(in, row, column, v);
    cluster_wait();  // all blocks are there, and their barriers; here, so that no load waits for one before it
    if (threadIdx.x == 0 && threadIdx.y == 0) arrive_and_expect(shared_address(&told), TEAM * TEAM * warps * sizeof(float2));

    float sum = 0.f, squares = 0.f;
#pragma unroll
    for (int i = 0; i < N; i++) v[i] += added[i], sum += v[i];
    const float own_mean = warp_sum(sum) / WARP_COLUMNS;
#pragma unroll
    for (int i = 0; i < N; i++) squares += (v[i] - own_mean) * (v[i] - own_mean);
    squares = warp_sum(squares);
    if (lane < TEAM) send_to(lane, shared_address(&moments[threadIdx.y][rank * warps + warp]), shared_address(&told), own_mean, squares);
    if (PARTS || first || in.y) store_whole_sectors(stream, v, inside);
    copies_done<0>();
    __syncthreads();  // constants
    barrier_wait_cluster(shared_address(&told), 0);

    const bool has = lane < TEAM * warps;
    const float2 moment = has ? load_shared2(shared_address(&moments[threadIdx.y][lane])) : float2{};
    const float mean = warp_sum(moment.x) / (TEAM * warps), apart = moment.x - mean;
    const float scale = rsqrtf(warp_sum(has ? moment.y + WARP_COLUMNS * apart * apart : 0.f) / in.width + EPSILON);
    if (!inside) return;
    Raw<N> weight, bias;
    weight.load(constants + MIXES * columns + at), bias.load(constants + (MIXES + 1) * columns + at);
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = (v[i] - mean) * scale * weight[i] + bias[i];
    if (slot >= 0) store_half(shift + slot * slot_stride + column, v);
#pragma unroll
    for (int i = 0; i < MIXES; i++) {
        Raw<N> amount;
        amount.load(constants + i * columns + at);
        mix_and_store(v, before, amount, out + (i * size_t(rows) + row) * in.width + column);
    }
#endif
}

// The normed rows alone: out [blocks, C]. Used before the head.
template <int N>
__global__ void __launch_bounds__(1024) norm_kernel(NormInput in, __half* out) {
    __shared__ float scratch[2][WARP];
    const Affine<N> affine(in);
    wait_for_inputs();
    const int row = in.gather ? in.gather[blockIdx.x] : blockIdx.x;
    float v[N];
    stream_row(in, row, v);
    norm_row(in, affine, row, v, scratch);
    if (N * threadIdx.x < in.width) store_half(out + size_t(blockIdx.x) * in.width + N * threadIdx.x, v);
}

// Where the tokens of packed rows belong: row_of [T]; first and last token and slot of each row.
struct Places {
    const int *row_of, *first, *last, *slots;
};

// Prefill: a block has `run` neighbouring tokens of packed rows, one after the other. It norms the token before them as well, which may
// belong to the same row; the stream therefore goes from in.x to `to`, as the block before may be further on. The block of a row's first
// token alone reads and then writes the row's state, so no block reads what another writes: it norms the row's last token, wherever that
// is.
template <int N, int MIXES>
__global__ void __launch_bounds__(1024)
    norm_mix_run_kernel(const __grid_constant__ NormInput in, float* to, int tokens, int run, const __grid_constant__ Places places,
                        __half* shift, size_t slot_stride, const __half* mixes, __half* out) {
    __shared__ float scratch[2][WARP];
    __shared__ struct {
        int slot;
        bool starts, ends;  // its row; a row that another block starts does not end here
    } place_of[MOST_RUN];
    __shared__ int far;     // the last token of the row that begins among these and ends behind them
    extern __shared__ __align__(16) __half amounts[];  // [MIXES, C]; a thread reads what it has copied itself
    const int column = N * threadIdx.x, begin = blockIdx.x * run, end = min(begin + run, tokens);
    const bool inside = column < in.width;
    const Affine<N> affine(in);
#pragma unroll
    for (int i = 0; i < MIXES; i++)
        if (inside) copy_columns<N>(amounts + i * in.width + column, mixes + i * in.width + column);
    close_copies();
    float v[N];
    Addend<N> addend;
    Raw<N> before = {};
    int token = begin ? begin - 1 : 0;  // whether it belongs to the same row is not known yet
    stream_row(in, token, v);  // several kernels old
    wait_for_inputs();
    addend.load(in, token);
    copies_done<0>();
    for (int i = begin + threadIdx.x; i < end; i += blockDim.x) {
        const int row = places.row_of[i], first = places.first[row], last = places.last[row], slot = places.slots[row];
        place_of[i - begin] = {slot, i == first, i == last && first >= begin};
        if (i == end - 1) far = slot >= 0 && first >= begin && last > i ? last : -1;
    }
    __syncthreads();
    while (true) {
        const int next = token + 1 < end ? token + 1 : token < end ? far : -1;
        addend.add(v);
        store_whole_sectors(to + size_t(token) * in.width + column, v, inside && token >= begin && token < end);
        float coming[N];
        if (next >= 0) {
            stream_row(in, next, coming);
            addend.load(in, next);
        }
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < N; i++) sum += v[i];  // zeros outside
        normalize(affine, in.width, sum, v, scratch);
        Raw<N> rounded;
        rounded.set(v);
        if (token >= begin && inside) {
            const auto place = place_of[min(token, end - 1) - begin];
            __half* kept = shift + place.slot * slot_stride + column;
            if (place.slot >= 0 && token < end) {
                if (place.starts) before.load(kept);
#pragma unroll
                for (int i = 0; i < MIXES; i++) {
                    Raw<N> amount;
                    amount.load(amounts + i * in.width + column);
                    mix_and_store(v, before, amount, out + (i * size_t(tokens) + token) * in.width + column);
                }
            }
            if (place.slot >= 0 && (place.ends || token >= end)) rounded.store(kept);
        }
        if (next < 0) return;
        before = rounded, token = next;
#pragma unroll
        for (int i = 0; i < N; i++) v[i] = coming[i];
    }
}

// h [n] fp16 = relu(h)^2 in place, n a multiple of 8; no larger than fp16 holds. Zeros are not written again: after a product that ends with
// relu they are nine of ten numbers.
__global__ void relu_square_kernel(uint4* h, size_t vectors) {
    wait_for_inputs();
    const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= vectors) return;
    uint4 x = h[i];
    if (((x.x | x.y | x.z | x.w) & 0x7fff7fff) == 0) return;
    uint32_t* pairs = reinterpret_cast<uint32_t*>(&x);
#pragma unroll
    for (int p = 0; p < 4; p++) {
        float2 pair = to_float2(pairs[p]);
        pair.x = fmaxf(pair.x, 0.f), pair.y = fmaxf(pair.y, 0.f);
        pairs[p] = to_half2(fminf(pair.x * pair.x, 65504.f), fminf(pair.y * pair.y, 65504.f));
    }
    h[i] = x;
}

namespace {
constexpr int FEW_ROWS = 64;       // fewer: more threads for each, for the shortest wait
constexpr int FEW_IN_PARTS = 129;  // the same where partial sums are added: while each row has a multiprocessor to itself
constexpr int MANY_NUMBERS = 960 * 1024;  // of x, for teams

// Columns of a thread: 4 or 8. A width that 1024 threads cannot hold is refused by the launch.
bool four_columns(const NormInput& in, int rows) {
    return rows < (in.part_count ? FEW_IN_PARTS : FEW_ROWS) && in.width <= 4 * 1024;
}

int whole_warps(int threads) { return (threads + WARP - 1) / WARP * WARP; }

template <int N, int MIXES>
int norm_mix(const NormInput& in, int rows, const int* slots, __half* shift, size_t slot_stride, const __half* mixes, __half* out,
             cudaStream_t stream) {
    return launch(norm_mix_kernel<N, MIXES>, rows, whole_warps(in.width / N), 0, stream, in, slots, shift, slot_stride, mixes, out);
}

template <int N>
int norm_mix(const NormInput& in, int rows, const int* slots, __half* shift, size_t slot_stride, const __half* mixes, int n, __half* out,
             cudaStream_t stream) {
    if (n == MOST_MIXES) return norm_mix<N, MOST_MIXES>(in, rows, slots, shift, slot_stride, mixes, out, stream);
    return n == 1 ? norm_mix<N, 1>(in, rows, slots, shift, slot_stride, mixes, out, stream) : cudaErrorInvalidValue;
}

// Where rows are so many that what they move takes longer than the blocks of a cluster need to meet: whole warps for each block's columns.
bool in_teams(const NormInput& in, int rows) {
    const bool fits = in.width % (TEAM * WARP_COLUMNS) == 0 && in.width <= 8 * MOST_TEAM_THREADS;
    return on_hopper() && fits && rows * in.width >= MANY_NUMBERS;
}

template <int MIXES>
int norm_mix_teams(const NormInput& in, int rows, const int* slots, __half* shift, size_t slot_stride, const __half* mixes, __half* out,
                   cudaStream_t stream) {
    const int shared = (MIXES + 2) * in.width / TEAM * int(sizeof(__half)), blocks = (rows + TEAM - 1) / TEAM * TEAM;
    const auto kernel = in.part_count ? norm_mix_team_kernel<MIXES, true> : norm_mix_team_kernel<MIXES, false>;
    return launch_clusters(TEAM, kernel, blocks, dim3(in.width / 8 / TEAM, TEAM), shared, stream, in, rows, slots, shift, slot_stride, mixes,
                           out);
}

template <int N, int MIXES>
int norm_mix_run(const NormInput& in, float* to, int tokens, const Places& places, __half* shift, size_t slot_stride, const __half* mixes,
                 __half* out, cudaStream_t stream) {
    const auto kernel = norm_mix_run_kernel<N, MIXES>;
    const int threads = whole_warps(in.width / N), shared = MIXES * in.width * int(sizeof(__half));
    int each = 0;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (error == cudaSuccess) error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads, shared);
    if (error != cudaSuccess || each == 0) return error != cudaSuccess ? error : cudaErrorInvalidValue;
    const int resident = each * multiprocessors(), even = (tokens + resident - 1) / resident, run = even < MOST_RUN ? even : MOST_RUN;
    return launch(kernel, (tokens + run - 1) / run, threads, shared, stream, in, to, tokens, run, places, shift, slot_stride, mixes, out);
}

template <int MIXES>
int norm_mix_run(const NormInput& in, float* to, int tokens, const Places& places, __half* shift, size_t slot_stride, const __half* mixes,
                 __half* out, cudaStream_t stream) {
    return four_columns(in, tokens) ? norm_mix_run<4, MIXES>(in, to, tokens, places, shift, slot_stride, mixes, out, stream)
                                    : norm_mix_run<8, MIXES>(in, to, tokens, places, shift, slot_stride, mixes, out, stream);
}
}  // namespace

extern "C" {
// n: 1 or 6 mixes.
int rwkv_norm_mix(const NormInput* in, int rows, const int* slots, __half* shift, size_t slot_stride, const __half* mixes, int n,
                  __half* out, cudaStream_t stream) {
    if (in_teams(*in, rows) && (n == 1 || n == MOST_MIXES))
        return (n == 1 ? norm_mix_teams<1> : norm_mix_teams<MOST_MIXES>)(*in, rows, slots, shift, slot_stride, mixes, out, stream);
    return four_columns(*in, rows) ? norm_mix<4>(*in, rows, slots, shift, slot_stride, mixes, n, out, stream)
                                   : norm_mix<8>(*in, rows, slots, shift, slot_stride, mixes, n, out, stream);
}

int rwkv_norm(const NormInput* in, int rows, __half* out, cudaStream_t stream) {
    return four_columns(*in, rows) ? launch(norm_kernel<4>, rows, whole_warps(in->width / 4), 0, stream, *in, out)
                                   : launch(norm_kernel<8>, rows, whole_warps(in->width / 8), 0, stream, *in, out);
}

// to [T, C] fp32: the stream with what is added, which cannot be partial sums; in.x is left as it is. n: 1 or 6 mixes.
int rwkv_norm_mix_run(const NormInput* in, float* to, int tokens, const Places* places, __half* shift, size_t slot_stride,
                      const __half* mixes, int n, __half* out, cudaStream_t stream) {
    if ((n != 1 && n != MOST_MIXES) || in->part_count) return cudaErrorInvalidValue;
    return (n == 1 ? norm_mix_run<1> : norm_mix_run<MOST_MIXES>)(*in, to, tokens, *places, shift, slot_stride, mixes, out, stream);
}

int rwkv_relu_square(void* h, size_t count, cudaStream_t stream) {
    const size_t vectors = count / 8;
    return launch(relu_square_kernel, unsigned((vectors + 255) / 256), 256, 0, stream, static_cast<uint4*>(h), vectors);
}
}
