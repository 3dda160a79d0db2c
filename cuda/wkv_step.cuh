// The recurrence of wkv.cuh over rows of one token each: all of the time mix between its products in one kernel. All sums are fp32.
//
// A block of 128 threads runs the recurrence of a head, in one of two ways (a `Recurrence`): wkv_step.cu for fp32 states, with multiplications
// and additions alone; wkv_step_half.cu for fp16 states, with tensor cores. What they share is here: how rows are divided among blocks, how
// states are fetched ahead, what comes before the recurrence (gates, decay, keys) and after it (group norm, bonus, gate). Sums over a head
// in those go over the two channels of a lane, then over lanes as a tree.
//
// struct Recurrence:
//   Number, of a state as it is stored;  BLOCKS, that fit on a multiprocessor: with more rows than that, a block takes several in turn
//   VECTORS of 16 bytes of a state that each thread has
//   first, where these begin, in numbers from the beginning of the state;  offset(i), of the vector i from there
//   Token, what it needs of one token and head, in shared memory
//   put(token, lane, p): one warp writes a Token;  value(token, lane): v of channels 2 lane and 2 lane + 1
//   advance(token, vectors, state, y): moves the state on, whose vector i is vectors [i * THREADS] and comes from state + offset(i), and
//   writes what is read out, y [64]
#pragma once
#include "wkv.cuh"

constexpr int THREADS = 128;
constexpr int BATCH = THREADS / WARP;  // rows that a block prepares at a time
constexpr int DEPTH = 3;               // states under way or in use in a block

// Weights and inputs of two channels: lane l has channels 2 l and 2 l + 1 of the head.
struct Constants {
    float2 w0, a0, v0, k_k, k_a, r_k, weight, bias;
};

struct Inputs {
    __half2 r, k, v, w, a, g, mix, first;
};

// Of two channels; own: r . k r_k of the head.
struct Prepared {
    float2 r, w, k, kk, b, v;
    float own;
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

// One warp prepares one token.
__device__ __forceinline__ Prepared prepare(const Inputs& in, const Constants& c, bool mixes_v) {
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
    return {r,  make_float2(__expf(DECAY * sigmoid(c.w0.x + w.x)), __expf(DECAY * sigmoid(c.w0.y + w.y))),
            k,  kk, make_float2(kk.x * a.x, kk.y * a.y), v, own};
}

// One warp finishes one token: y [64] is what was read out of S.
__device__ __forceinline__ void finish(const TimeMix& in, const Constants& c, size_t token, int head, int lane, __half2 gate, float own,
                                       float2 v, const float* y_of) {
    const float2 g = __half22float2(gate), y = *reinterpret_cast<const float2*>(y_of + 2 * lane);
    const float mean = warp_sum(y.x + y.y) / HEAD;
    const float2 d = make_float2(y.x - mean, y.y - mean);
    const float scale = rsqrtf(warp_sum(d.x * d.x + d.y * d.y) / HEAD + NORM_EPSILON);
    const float x0 = (d.x * scale * c.weight.x + c.bias.x + own * v.x) * g.x;
    const float x1 = (d.y * scale * c.weight.y + c.bias.y + own * v.y) * g.y;
    *reinterpret_cast<uint32_t*>(in.out + token * in.width + head * HEAD + 2 * lane) = to_half2(x0, x1);
}

// The slots of a block's rows come after it.
template <typename Recurrence>
struct Shared {
    uint4 ring[DEPTH * Recurrence::VECTORS * THREADS];
    typename Recurrence::Token tokens[2][BATCH];
    alignas(16) float y_of[2][BATCH][HEAD];
};

// Every row is one token: the first `most` tokens, or as many as stand at `counted` on the device. Grid: heads, and as many blocks as share
// the rows. A row whose slot is negative is padding: its output is zero. Rows are taken in batches of one a warp: after a batch is worked
// on, warp i finishes its row i and prepares row i of the batch after the next, so that all warps have the same to do and wait for each
// other once a batch. States of the next rows are on their way to shared memory meanwhile; every thread copies what it will itself use.
template <typename Recurrence>
__global__ void __launch_bounds__(THREADS, Recurrence::BLOCKS)
    wkv_step_kernel(const __grid_constant__ TimeMix in, const int* slots, int most, const int* counted) {
    using Number = typename Recurrence::Number;
    constexpr int VECTORS = Recurrence::VECTORS;
    extern __shared__ __align__(16) unsigned char shared[];
    auto& own = *reinterpret_cast<Shared<Recurrence>*>(shared);
    int* own_slots = reinterpret_cast<int*>(&own + 1);
    const int head = blockIdx.x, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, stride = gridDim.y;
    const int rows = counted ? *counted : most, count = (rows - int(blockIdx.y) + stride - 1) / stride;
    const auto row_of = [&](int i) { return int(blockIdx.y) + i * stride; };
    const Recurrence recurrence;
    Number* const states = static_cast<Number*>(in.state) + size_t(head) * HEAD * HEAD + recurrence.first;
    const auto state = [&](int slot) { return states + size_t(slot) * in.slot_stride; };
    const auto place = [&](int stage) { return own.ring + stage * VECTORS * THREADS + threadIdx.x; };
    const auto fetch = [&](int stage, int i) {
        const int slot = i < count ? own_slots[i] : -1;
        if (slot >= 0) {
            const Number* from = state(slot);
#pragma unroll
            for (int v = 0; v < VECTORS; v++) copy_async(place(stage) + v * THREADS, from + Recurrence::offset(v));
        }
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
        if (i < count) {
            const Prepared p = prepare(x, c, mixes_v);
            Recurrence::put(own.tokens[buffer][warp], lane, p);
        }
        gate_before = gate, gate = x.g;
        load_inputs(i + BATCH);
    };
    const auto finish_row = [&](int i, int buffer) {
        if (i < 0 || i >= count) return;
        const auto& token = own.tokens[buffer][warp];
        if (own_slots[i] >= 0)
            finish(in, c, row_of(i), head, lane, gate_before, token.own, Recurrence::value(token, lane), own.y_of[buffer][warp]);
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
            if (slot >= 0) recurrence.advance(own.tokens[buffer][j], place(stage), state(slot), own.y_of[buffer][j]);
        }
    }
    __syncthreads();
    finish_row((count - 1) / BATCH * BATCH + warp, buffer ^ 1);
    copies_done<0>();
}

template <typename Recurrence>
int launch_step(const TimeMix& in, int rows, const int* counted, const int* slots, cudaStream_t stream) {
    // All blocks must fit at once: a few left over would run alone afterwards and take as long as all the others together.
    const int heads = in.width / HEAD, most = multiprocessors() * Recurrence::BLOCKS / heads;
    const int blocks = most < 1 ? 1 : rows < most ? rows : most;
    const int shared = sizeof(Shared<Recurrence>) + (rows + blocks - 1) / blocks * sizeof(int);
    const auto kernel = wkv_step_kernel<Recurrence>;
    const cudaError_t allowed = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (allowed != cudaSuccess) return allowed;
    return launch(kernel, dim3(heads, blocks), THREADS, shared, stream, in, slots, rows, counted);
}

int wkv_step_half(const TimeMix& in, int rows, const int* counted, const int* slots, cudaStream_t stream);
