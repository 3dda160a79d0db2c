// The recurrence of wkv.cuh over rows of one token each: all of the time mix between its products in one kernel. All arithmetic is fp32.
//
// 128 threads run the recurrence of a head: thread t has keys 8 (t % 8) .. + 7 of four rows of S, every 16th from row t / 8. Sums
// over keys go over 8 numbers of a thread in order, then over 8 lanes as a tree; sums over a head in vectors, two to a lane, as a tree.
#include "wkv.cuh"

constexpr int OWN = 4;             // rows of S a thread has a part of
constexpr int THREADS = HEAD * 8 / OWN;
constexpr int DEPTH = 3;           // states under way or in use in a block of a decode step

// Blocks of a decode step that fit on each multiprocessor. With more rows than that, a block takes several, one after the other.
template <typename T>
constexpr int blocks_wanted = sizeof(T) == 2 ? 4 : 3;

// What the recurrence needs of one token and head, in shared memory. A thread reads 8 keys as two vectors of 4; keys are stored in an order
// (`put_keys`, `load_keys`) in which the vectors of 8 threads are neighbours, so that no two of them come from the same banks.
struct alignas(16) Token {
    float r[HEAD], w[HEAD], k[HEAD], kk[HEAD], b[HEAD];
    float v[HEAD];
    float own;  // r . k r_k
};

// Weights and inputs of two channels: lane l has channels 2 l and 2 l + 1 of the head.
struct Constants {
    float2 w0, a0, v0, k_k, k_a, r_k, weight, bias;
};

struct Inputs {
    __half2 r, k, v, w, a, g, mix, first;
};

__device__ __forceinline__ Constants constants(const TimeMix& in, int head, int lane) {
    const size_t at = head * HEAD + 2 * lane;
    return {pair_at(in.w0, at),  pair_at(in.a0, at),  in.mix ? pair_at(in.v0, at) : make_float2(0.f, 0.f), pair_at(in.k_k, at),
            pair_at(in.k_a, at), pair_at(in.r_k, at), pair_at(in.norm_weight, at), pair_at(in.norm_bias, at)};
}

__device__ __forceinline__ Inputs inputs(const TimeMix& in, size_t token, int head, int lane) {
    const size_t at = token * in.width + head * HEAD + 2 * lane;
    const auto load = [at](const __half* p) { return *reinterpret_cast<const __half2*>(p + at); };
    Inputs x = {load(in.r), load(in.k), load(in.v), load(in.w), load(in.a), load(in.g)};
    if (in.mix) x.mix = load(in.mix), x.first = load(in.v_first);
    return x;
}

__device__ __forceinline__ void put(float* p, int lane, float x, float y) { *reinterpret_cast<float2*>(p + 2 * lane) = make_float2(x, y); }

__device__ __forceinline__ void put_keys(float* p, int lane, float x, float y) {
    *reinterpret_cast<float2*>(p + lane / 4 * 4 + lane % 2 * 2 + lane / 2 % 2 * 32) = make_float2(x, y);
}

// Keys 8 (t % 8) .. + 7 of thread t.
__device__ __forceinline__ void load_keys(const float* p, float (&x)[8]) {
    const int at = threadIdx.x % 8 * 4;
    const float4 low = *reinterpret_cast<const float4*>(p + at), high = *reinterpret_cast<const float4*>(p + 32 + at);
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w, x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}

// One warp prepares one token.
__device__ __forceinline__ void prepare(const Inputs& in, const Constants& c, bool mixes_v, int lane, Token& out) {
    const float2 r = __half22float2(in.r), k_raw = __half22float2(in.k), w = __half22float2(in.w), a_raw = __half22float2(in.a);
    float2 v = __half22float2(in.v);
    if (mixes_v) {
        const float2 mix = __half22float2(in.mix), first = __half22float2(in.first);
        v.x += (first.x - v.x) * sigmoid(c.v0.x + mix.x);
        v.y += (first.y - v.y) * sigmoid(c.v0.y + mix.y);
    }
    const float2 a = make_float2(sigmoid(c.a0.x + a_raw.x), sigmoid(c.a0.y + a_raw.y));
    float2 kk = make_float2(k_raw.x * c.k_k.x, k_raw.y * c.k_k.y);
    const float2 k = make_float2(k_raw.x * (1.f + (a.x - 1.f) * c.k_a.x), k_raw.y * (1.f + (a.y - 1.f) * c.k_a.y));
    float squares = kk.x * kk.x + kk.y * kk.y, own = r.x * k.x * c.r_k.x + r.y * k.y * c.r_k.y;
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) {
        squares += __shfl_xor_sync(ALL, squares, offset);
        own += __shfl_xor_sync(ALL, own, offset);
    }
    const float scale = 1.f / fmaxf(sqrtf(squares), 1e-12f);
    kk.x *= scale, kk.y *= scale;
    put_keys(out.r, lane, r.x, r.y);
    put_keys(out.w, lane, __expf(DECAY * sigmoid(c.w0.x + w.x)), __expf(DECAY * sigmoid(c.w0.y + w.y)));
    put_keys(out.k, lane, k.x, k.y);
    put_keys(out.kk, lane, kk.x, kk.y);
    put_keys(out.b, lane, kk.x * a.x, kk.y * a.y);
    put(out.v, lane, v.x, v.y);
    if (lane == 0) out.own = own;
}

// One warp finishes one token: y [64] is what was read out of S.
__device__ __forceinline__ void finish(const TimeMix& in, const Constants& c, size_t token, int head, int lane, __half2 gate,
                                       const Token& t, const float* y_of) {
    const float2 g = __half22float2(gate), y = *reinterpret_cast<const float2*>(y_of + 2 * lane);
    const float mean = warp_sum(y.x + y.y) / HEAD;
    const float2 d = make_float2(y.x - mean, y.y - mean), v = *reinterpret_cast<const float2*>(t.v + 2 * lane);
    const float scale = rsqrtf(warp_sum(d.x * d.x + d.y * d.y) / HEAD + NORM_EPSILON);
    const float x0 = (d.x * scale * c.weight.x + c.bias.x + t.own * v.x) * g.x;
    const float x1 = (d.y * scale * c.weight.y + c.bias.y + t.own * v.y) * g.y;
    *reinterpret_cast<uint32_t*>(in.out + token * in.width + head * HEAD + 2 * lane) = to_half2(x0, x1);
}

__device__ __forceinline__ int state_row(int n) {
    return n * (HEAD / OWN) + threadIdx.x / 8;
}

template <typename T>
__device__ __forceinline__ T* state_place(const TimeMix& in, int slot, int head, int n) {
    return static_cast<T*>(in.state) + slot * in.slot_stride + size_t(head) * HEAD * HEAD + state_row(n) * HEAD + threadIdx.x % 8 * 8;
}

// A token's vectors as one thread of the recurrence needs them.
struct Vectors {
    float kk[8], w[8], k[8], b[8], r[8], v[OWN];
};

__device__ __forceinline__ void load(const Token& t, Vectors& x) {
    load_keys(t.kk, x.kk);
    load_keys(t.w, x.w);
    load_keys(t.k, x.k);
    load_keys(t.b, x.b);
    load_keys(t.r, x.r);
#pragma unroll
    for (int n = 0; n < OWN; n++) x.v[n] = t.v[state_row(n)];
}

// This thread's part of S kk.
__device__ __forceinline__ void read_removed(const Vectors& x, const float (&s)[OWN][8], float (&removed)[OWN]) {
#pragma unroll
    for (int n = 0; n < OWN; n++) {
        removed[n] = 0.f;
#pragma unroll
        for (int i = 0; i < 8; i++) removed[n] += s[n][i] * x.kk[i];
    }
}

// S moves on; y is this thread's part of S' r.
__device__ __forceinline__ void move(const Vectors& x, float (&s)[OWN][8], const float (&removed)[OWN], float (&y)[OWN]) {
#pragma unroll
    for (int n = 0; n < OWN; n++) {
        y[n] = 0.f;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            s[n][i] = s[n][i] * x.w[i] + (x.v[n] * x.k[i] - removed[n] * x.b[i]);
            y[n] += s[n][i] * x.r[i];
        }
    }
}

__device__ __forceinline__ void sum_over_keys(float (&x)[OWN]) {
#pragma unroll
    for (int offset = 1; offset < 8; offset *= 2)
#pragma unroll
        for (int n = 0; n < OWN; n++) x[n] += __shfl_xor_sync(ALL, x[n], offset);
}

__device__ __forceinline__ void put_y(float* y_of, const float (&y)[OWN]) {
    if (threadIdx.x % 8 == 0)
#pragma unroll
        for (int n = 0; n < OWN; n++) y_of[state_row(n)] = y[n];
}

// Every row is one token: the first `most` tokens, or as many as stand at `counted` on the device. Grid: heads, and as many blocks as share
// the rows. A row whose slot is negative is padding: its output is zero. Rows are taken in batches of one a warp: after a batch is worked
// on, warp i finishes its row i and prepares row i of the batch after the next, so that all warps have the same to do and wait for each
// other once a batch. States of the next rows are on their way to shared memory meanwhile; every thread copies what it will itself use.
template <typename T>
__global__ void __launch_bounds__(THREADS, blocks_wanted<T>)
    wkv_step_kernel(const __grid_constant__ TimeMix in, const int* slots, int most, const int* counted) {
    constexpr int VECTORS = sizeof(T) / 2;  // of 16 bytes for 8 numbers
    constexpr int BATCH = THREADS / WARP;
    __shared__ Token tokens[2][BATCH];
    __shared__ __align__(16) float y_of[2][BATCH][HEAD];
    extern __shared__ uint4 ring[];  // [DEPTH][OWN][VECTORS][THREADS], then the slots of this block's rows
    int* own_slots = reinterpret_cast<int*>(ring + DEPTH * OWN * VECTORS * THREADS);
    const int head = blockIdx.x, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, stride = gridDim.y;
    const int rows = counted ? *counted : most, count = (rows - int(blockIdx.y) + stride - 1) / stride;
    const auto row_of = [&](int i) { return int(blockIdx.y) + i * stride; };
    const auto place = [&](int stage, int n, int v) { return ring + ((stage * OWN + n) * VECTORS + v) * THREADS + threadIdx.x; };
    const auto fetch = [&](int stage, int i) {
        const int slot = i < count ? own_slots[i] : -1;
        if (slot >= 0)
#pragma unroll
            for (int n = 0; n < OWN; n++)
#pragma unroll
                for (int v = 0; v < VECTORS; v++)
                    copy_async(place(stage, n, v), reinterpret_cast<const uint4*>(state_place<T>(in, slot, head, n)) + v);
        close_copies();
    };
    for (int i = threadIdx.x; i < count; i += THREADS) own_slots[i] = slots[row_of(i)];
    __syncthreads();
    // States were written a step ago, so they can be fetched while the kernel before still runs.
#pragma unroll
    for (int i = 0; i < DEPTH - 1; i++) fetch(i, i);
    const Constants c = constants(in, head, lane);
    const bool mixes_v = in.mix != nullptr;
    wait_for_inputs();
    Inputs x;
    __half2 gate, gate_before;
    const auto load_inputs = [&](int i) {
        if (i < count) x = inputs(in, row_of(i), head, lane);
    };
    const auto prepare_row = [&](int i, int buffer) {
        if (i < count) prepare(x, c, mixes_v, lane, tokens[buffer][warp]);
        gate_before = gate, gate = x.g;
        load_inputs(i + BATCH);
    };
    const auto finish_row = [&](int i, int buffer) {
        if (i < 0 || i >= count) return;
        if (own_slots[i] >= 0)
            finish(in, c, row_of(i), head, lane, gate_before, tokens[buffer][warp], y_of[buffer][warp]);
        else
            *reinterpret_cast<uint32_t*>(in.out + size_t(row_of(i)) * in.width + head * HEAD + 2 * lane) = 0;
    };
    load_inputs(warp);
    prepare_row(warp, 0);
    int stage = 0, buffer = 0;
    for (int first = 0; first < count; first += BATCH, buffer ^= 1) {
        __syncthreads();
        finish_row(first - BATCH + warp, buffer ^ 1);
        prepare_row(first + BATCH + warp, buffer ^ 1);
#pragma unroll 1
        for (int j = 0; j < BATCH && first + j < count; j++, stage = stage == DEPTH - 1 ? 0 : stage + 1) {
            fetch(stage == 0 ? DEPTH - 1 : stage - 1, first + j + DEPTH - 1);
            copies_done<DEPTH - 1>();
            const int slot = own_slots[first + j];
            if (slot < 0) continue;
            float s[OWN][8], removed[OWN], y[OWN];
#pragma unroll
            for (int n = 0; n < OWN; n++) {
                Raw8<T> raw;
                uint4* words = reinterpret_cast<uint4*>(&raw);
#pragma unroll
                for (int v = 0; v < VECTORS; v++) words[v] = *place(stage, n, v);
                raw.widen(s[n]);
            }
            Vectors vectors;
            load(tokens[buffer][j], vectors);
            read_removed(vectors, s, removed);
            sum_over_keys(removed);
            move(vectors, s, removed, y);
#pragma unroll
            for (int n = 0; n < OWN; n++) store8(state_place<T>(in, slot, head, n), s[n]);
            sum_over_keys(y);
            put_y(y_of[buffer][j], y);
        }
    }
    __syncthreads();
    finish_row((count - 1) / BATCH * BATCH + warp, buffer ^ 1);
    copies_done<0>();
}

namespace {
template <typename T>
int step(const TimeMix& in, int rows, const int* counted, const int* slots, cudaStream_t stream) {
    // All blocks must fit at once: a few left over would run alone afterwards and take as long as all the others together.
    const int heads = in.width / HEAD, most = multiprocessors() * blocks_wanted<T> / heads;
    const int blocks = most < 1 ? 1 : rows < most ? rows : most;
    const int shared = DEPTH * HEAD * HEAD * sizeof(T) + (rows + blocks - 1) / blocks * sizeof(int);
    const cudaError_t allowed = cudaFuncSetAttribute(wkv_step_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (allowed != cudaSuccess) return allowed;
    return launch(wkv_step_kernel<T>, dim3(heads, blocks), THREADS, shared, stream, in, slots, rows, counted);
}
}  // namespace

extern "C" {
// counted: null, or where on the device the number of rows stands, `rows` at most.
int rwkv_wkv_step(const TimeMix* in, int rows, const int* counted, const int* slots, int fp32, cudaStream_t stream) {
    return fp32 ? step<float>(*in, rows, counted, slots, stream) : step<__half>(*in, rows, counted, slots, stream);
}
}
