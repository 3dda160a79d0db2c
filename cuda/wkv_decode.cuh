// The recurrence of wkv.cuh over rows of one token each: all of the time mix between its GEMMs in one kernel.
// All sums are fp32.
//
// A block of 128 threads runs the recurrence of a head, in one of two ways (a `Recurrence`):
// wkv_decode_fp32.cu for fp32 states, with multiplications and additions alone; wkv_decode_fp16.cu for fp16
// states, with tensor cores. What they share is here: how states are divided among blocks, how they are
// fetched ahead, what comes before the recurrence (gates, decay, keys) and after it (group norm, bonus,
// gate). Sums over a head in those go over the two channels of a lane, then over lanes as a tree.
//
// struct Recurrence:
//   Number: of a state as it is stored;  BLOCKS: how many fit on a multiprocessor
//   VECTORS: of 16 bytes of a state that each thread has
//   first: where these begin, in numbers from the beginning of the state
//   offset(i): of vector i from there
//   Token: what it needs of one token and head, in shared memory
//   DEFERS: whether states may lag
//   put(token, lane, p, noted): one warp writes a Token; noted: what is deferred
//   own(token): r . k r_k of the head;  value(token, lane): v of channels 2 lane and 2 lane + 1
//   advance(token, vectors, y, state): moves the state on, whose vector i is vectors [i * THREADS] and comes
//   from state() + offset(i), and writes what is read out, y [64]
#pragma once
#include "wkv.cuh"

constexpr int THREADS = 128;
constexpr int TILE = THREADS / WARP;  // rows of a tile at most: each warp prepares one
constexpr int DEPTH = 3;              // states under way or in use in a block

// Weights and inputs of two channels: lane l has channels 2 l and 2 l + 1 of the head.
struct Constants {
    __half2 w0, a0, v0, k_k, k_a, r_k, weight, bias;
};

struct Inputs {
    __half2 r, k, v, w, a, g, mix, first;
};

// Of two channels, what is deferred for `lag` tokens; all of it is at `all` (null: the row is padding).
struct DeferredPair {
    __half2 vectors[MAX_LAG][DEFERRED_VECTORS];
    __half* all;
    int lag;
};

// Of two channels; kk is not normalised yet, nor is b = kk a. squares: of kk, own: of r . k r_k, both of
// these channels alone.
struct Prepared {
    float2 r, w, k, kk, b, v;
    float squares, own;
};

// One of the products is fused with the sum, always the same one, so that all kernels have the same bits.
__device__ __forceinline__ float sum_of_products(float2 x, float2 y) { return fmaf(x.x, y.x, x.y * y.y); }

// What makes kk one of length 1, from its squares.
__device__ __forceinline__ float normalizing(float squares) { return 1.f / fmaxf(sqrtf(squares), 1e-12f); }

__device__ __forceinline__ __half2 raw_pair_at(const __half* p, size_t at) {
    return *reinterpret_cast<const __half2*>(p + at);
}

__device__ __forceinline__ Constants constants(const TimeMixInput& in, int head, int lane) {
    const size_t at = head * HEAD + 2 * lane;
    Constants c = {raw_pair_at(in.w0, at), raw_pair_at(in.a0, at)};
    c.k_k = raw_pair_at(in.k_k, at), c.k_a = raw_pair_at(in.k_a, at), c.r_k = raw_pair_at(in.r_k, at);
    c.weight = raw_pair_at(in.norm_weight, at), c.bias = raw_pair_at(in.norm_bias, at);
    if (in.mix) c.v0 = raw_pair_at(in.v0, at);
    return c;
}

__device__ __forceinline__ Inputs inputs(const TimeMixInput& in, size_t token, int head, int lane) {
    const size_t at = token * in.width + head * HEAD + 2 * lane;
    Inputs x = {raw_pair_at(in.r, at), raw_pair_at(in.k, at), raw_pair_at(in.v, at),
                raw_pair_at(in.w, at), raw_pair_at(in.a, at), raw_pair_at(in.g, at)};
    if (in.mix) x.mix = raw_pair_at(in.mix, at), x.first = raw_pair_at(in.v_first, at);
    return x;
}

// One warp prepares one token.
__device__ __forceinline__ Prepared prepare(const Inputs& in, const Constants& c, bool mixes_v) {
    const float2 r = __half22float2(in.r), k_raw = __half22float2(in.k), w = __half22float2(in.w),
                 a_raw = __half22float2(in.a);
    const float2 w0 = __half22float2(c.w0), a0 = __half22float2(c.a0), k_k = __half22float2(c.k_k),
                 k_a = __half22float2(c.k_a), r_k = __half22float2(c.r_k);
    float2 v = __half22float2(in.v);
    if (mixes_v) {
        const float2 v0 = __half22float2(c.v0), mix = __half22float2(in.mix),
                     first = __half22float2(in.first);
        v.x += (first.x - v.x) * sigmoid(v0.x + mix.x);
        v.y += (first.y - v.y) * sigmoid(v0.y + mix.y);
    }
    const float2 a = make_float2(sigmoid(a0.x + a_raw.x), sigmoid(a0.y + a_raw.y));
    const float2 kk = make_float2(k_raw.x * k_k.x, k_raw.y * k_k.y);
    const float2 k =
        make_float2(k_raw.x * (1.f + (a.x - 1.f) * k_a.x), k_raw.y * (1.f + (a.y - 1.f) * k_a.y));
    return {r,
            make_float2(__expf(DECAY * sigmoid(w0.x + w.x)), __expf(DECAY * sigmoid(w0.y + w.y))),
            k,
            kk,
            make_float2(kk.x * a.x, kk.y * a.y),
            v,
            sum_of_products(kk, kk),
            sum_of_products(make_float2(r.x * k.x, r.y * k.y), r_k)};
}

// What a token is finished with, two channels of each.
struct Last {
    __half2 weight, bias, gate;
};

__device__ __forceinline__ Last last_of(const TimeMixInput& in, size_t token, int head, int lane) {
    const size_t channel = head * HEAD + 2 * lane;
    return {raw_pair_at(in.norm_weight, channel), raw_pair_at(in.norm_bias, channel),
            raw_pair_at(in.g, token * in.width + channel)};
}

// One warp finishes one token: y [64] is what was read out of S. Returns two channels of a lane.
template <bool SCALED>
__device__ __forceinline__ uint32_t finished(const ReadoutInput& readout, const Last& last, size_t token,
                                             int head, int lane, float own, float2 v, const float* y_of) {
    const float2 weight = __half22float2(last.weight), bias = __half22float2(last.bias),
                 g = __half22float2(last.gate);
    float2 y = *reinterpret_cast<const float2*>(y_of + 2 * lane);
    if (SCALED) {
        const size_t channel = head * HEAD + 2 * lane;
        y.x *= readout_scale(readout, token, channel), y.y *= readout_scale(readout, token, channel + 1);
    }
    const float mean = warp_sum(y.x + y.y) / HEAD;
    const float2 d = make_float2(y.x - mean, y.y - mean);
    const float scale = rsqrtf(warp_sum(sum_of_products(d, d)) / HEAD + NORM_EPSILON);
    const float x0 = fmaf(own, v.x, fmaf(d.x * scale, weight.x, bias.x)) * g.x;
    const float x1 = fmaf(own, v.y, fmaf(d.y * scale, weight.y, bias.y)) * g.y;
    return to_half2(x0, x1);
}

// The same to its place.
template <bool SCALED>
__device__ __forceinline__ void finish(const TimeMixInput& in, const ReadoutInput& readout, const Last& last,
                                       size_t token, int head, int lane, float own, float2 v,
                                       const float* y_of) {
    *reinterpret_cast<uint32_t*>(in.out + token * in.width + head * HEAD + 2 * lane) =
        finished<SCALED>(readout, last, token, head, lane, own, v, y_of);
}

// Of a tile: its head and its first row.
struct Place {
    int head, row;
};

template <typename Recurrence>
struct Shared {
    uint4 ring[DEPTH * Recurrence::VECTORS * THREADS];
    struct Row {
        typename Recurrence::Token token;
        float y[HEAD];
    } rows[2][TILE];
    Place drawn[2];
};

// Every row is one token: the first `most` tokens, or `*counted` of them. A row whose slot is negative is
// padding: its output is zero. Tiles are `tile` rows of one head; they are numbered head by head, then from
// rows to rows. A block takes two tiles that follow from its own number, then the tile that is next
// (`in.tile_counter`): together they go through memory from one end to the other, which is up to a tenth
// faster than when those that get ahead go on to other places.
// Warp i prepares and finishes row i of a tile. While a tile is computed, the inputs of the next are on their
// way, as are the states of the rows that follow; every thread copies what it will use itself.
template <typename Recurrence, bool SCALED>
__global__ void LAUNCH_BOUNDS(THREADS, Recurrence::BLOCKS)
    wkv_decode_kernel(const __grid_constant__ TimeMixInput in, const int* slots, int most, const int* counted,
                      int tile, const __grid_constant__ ReadoutInput readout) {
    using Number = typename Recurrence::Number;
    constexpr int VECTORS = Recurrence::VECTORS, STATE = VECTORS * THREADS;
    extern __shared__ __align__(16) uint8_t shared[];
    auto& own = *reinterpret_cast<Shared<Recurrence>*>(shared);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, blocks = gridDim.x;
    const unsigned heads = unsigned(in.width) / HEAD;
    const int rows = counted ? *counted : most, tiles = (rows + tile - 1) / tile * int(heads);
    const bool mixes_v = in.mix != nullptr;
    const Recurrence recurrence;
    const auto place_of = [&](int number) {
        const unsigned along_rows = unsigned(number) / heads;
        return number < tiles ? Place{int(number - along_rows * heads), int(along_rows) * tile}
                              : Place{0, rows};
    };
    const auto has_row = [&](Place at) { return warp < tile && at.row + warp < rows; };
    const auto slot_of = [&](Place at, int i) {
        return i >= 0 && i < tile && at.row + i < rows ? __ldg(slots + (at.row + i)) : -1;
    };
    // Of the state of a slot; a number, as lanes exchange it.
    const auto address_of = [&](int slot, int head) {
        return reinterpret_cast<size_t>(static_cast<Number*>(in.state) +
                                        size_t(unsigned(slot)) * in.slot_stride + head * HEAD * HEAD);
    };

    Place before = {0, rows}, now = place_of(blockIdx.x), next = place_of(blockIdx.x + blocks);
    // Lane i of each warp has the address of the state of row i of the present tile and, as soon as they are
    // needed, lane `tile` + i that of row i of the next. `live` has a bit for each row from the present one
    // on, `live_now` for each row of the tile: not set for padding.
    const int first_slot = slot_of(now, lane);
    size_t address = address_of(first_slot, now.head);
    unsigned live = warp_ballot(first_slot >= 0), live_now = 0;
    const auto state = [&](int i) {
        return reinterpret_cast<Number*>(shuffle(address, i)) + recurrence.first;
    };
    const auto fetch = [&](uint4* to, bool is_live, int i) {
        if (is_live) {
            const Number* from = state(i);
#pragma unroll
            for (int v = 0; v < VECTORS; v++) copy_async(to + v * THREADS, from + Recurrence::offset(v));
        }
        commit_copies();
    };
    const auto lag_of = [&](Place at) {
        return Recurrence::DEFERS && has_row(at) ? __ldg(in.lag + (at.row + warp)) : 0;
    };
    // What is deferred for the row of this warp.
    DeferredPair noted;
    const auto deferred_at = [&](int slot, int head) {
        return in.deferred + size_t(unsigned(slot)) * in.deferred_stride +
               head * MAX_LAG * DEFERRED_VECTORS * HEAD;
    };
    const auto load_deferred = [&](int slot, int head, int lag) {
        if (!Recurrence::DEFERS || slot < 0) return;
        const __half* const from = deferred_at(slot, head) + 2 * lane;
#pragma unroll
        for (int token = 0; token < MAX_LAG; token++)
#pragma unroll
            for (int i = 0; i < DEFERRED_VECTORS; i++)
                if (token < lag)
                    noted.vectors[token][i] = raw_pair_at(from, (token * DEFERRED_VECTORS + i) * HEAD);
    };
    Constants c;
    Inputs x;
    Last last;
    const auto prepare_row = [&](int slot, int head, int lag, int buffer) {
        if (slot < 0) return;  // padding, or no row
        noted.all = Recurrence::DEFERS ? deferred_at(slot, head) : nullptr, noted.lag = lag;
        const Prepared p = prepare(x, c, mixes_v);
        Recurrence::put(own.rows[buffer][warp].token, lane, p, noted);
    };
    const auto finish_row = [&](Place at, int buffer) {
        if (!has_row(at)) return;
        const auto& [token, y] = own.rows[buffer][warp];
        const int row = at.row + warp;
        if (live_now >> warp & 1)
            finish<SCALED>(in, readout, last, row, at.head, lane, Recurrence::own(token),
                           Recurrence::value(token, lane), y);
        else
            *reinterpret_cast<uint32_t*>(in.out + size_t(row) * in.width + at.head * HEAD + 2 * lane) = 0;
    };

    // States were written a step ago, so they can be fetched while the kernel before still runs.
#pragma unroll
    for (int i = 0; i < DEPTH - 1; i++) fetch(own.ring + i * STATE + threadIdx.x, live >> i & 1, i);
    c = constants(in, now.head, lane);
    wait_for_inputs();
    if (has_row(now)) x = inputs(in, now.row + warp, now.head, lane);
    const int own_slot = shuffle(first_slot, warp), own_lag = lag_of(now);
    load_deferred(own_slot, now.head, own_lag);
    prepare_row(own_slot, now.head, own_lag, 0);
    int stage = 0, buffer = 0;
    // Where in the ring the present state is, and where the one that is fetched meanwhile goes.
    uint4 *used = own.ring + threadIdx.x, *fetched = used + (DEPTH - 1) * STATE;
    while (true) {
        __syncthreads();
        if (before.row < rows) {
            next = own.drawn[buffer];
            finish_row(before, buffer ^ 1);
        }
        if (now.row >= rows) break;
        if (has_row(now)) last = last_of(in, now.row + warp, now.head, lane);
        const int next_slot = slot_of(next, lane), next_lag = lag_of(next);
        if (has_row(next))
            c = constants(in, next.head, lane), x = inputs(in, next.row + warp, next.head, lane);
        // 1 + lane is 1: what is added is no constant, as of constants the compiler makes sums over a warp,
        // and would wait for the result here.
        int drawn = 0;
        if (threadIdx.x == 0 && next.row < rows) drawn = atomicAdd(in.tile_counter, 1 + lane);
        auto* present = own.rows[buffer];
        live_now = live;
        // Called after a row, when slots and lags have landed, or before the first if the second needs them.
        // It is not before `fetch` that a row calls it: there each row would wait for all that is on its way.
        const auto take_next = [&] {
            // Both shuffled: what the compiler knows before the rows it would compute, and wait for, there.
            const int slot = shuffle(next_slot, (lane - tile) % unsigned(WARP)),
                      head = shuffle(next.head, lane);
            if (lane >= tile) address = address_of(slot, head);
            live |= warp_ballot(next_slot >= 0) << tile;
            load_deferred(shuffle(next_slot, warp), head, next_lag);
        };
        if (tile < DEPTH) take_next();
#pragma unroll 1
        for (int i = 0; i < tile; i++) {
            fetch(fetched, live >> (DEPTH - 1) & 1, i + DEPTH - 1);
            wait_copies<DEPTH - 1>();
            if (live & 1) recurrence.advance(present->token, used, present->y, [&] { return state(i); });
            if (i == 0 && tile >= DEPTH) take_next();
            present++, live >>= 1, fetched = used;
            if (stage == DEPTH - 1)
                stage = 0, used -= (DEPTH - 1) * STATE;
            else
                stage++, used += STATE;
        }
        sync_warp();
        prepare_row(shuffle(next_slot, warp), next.head, next_lag, buffer ^ 1);
        if (threadIdx.x == 0) {
            const bool draws = next.row < rows;
            own.drawn[buffer ^ 1] = place_of(draws ? 2 * blocks + drawn : tiles);
            // A block draws once for each of its tiles but the last: in all, as often as there are more tiles
            // than blocks at work. Whoever draws last leaves the counter at zero for the next launch.
            if (draws && drawn == tiles - min(tiles, blocks) - 1) *in.tile_counter = 0;
        }
        address = shuffle(address, (lane + tile) % WARP);
        before = now, now = next, buffer ^= 1;
    }
    wait_copies<0>();
}

// Rows of a tile: as many as can be, unless then some blocks have a tenth more to do than with fewer. What is
// fetched ahead lies in the tile after the present one at most, so that tiles of fewer rows than that must be
// the only ones of their blocks.
inline int tile_rows(int rows, int heads, int blocks) {
    const auto most_of_a_block = [&](int tile) {
        return ((rows + tile - 1) / tile * heads + blocks - 1) / blocks * tile;
    };
    int best = TILE;
    for (int tile = TILE - 1; tile > 0; tile--)
        if ((tile >= DEPTH - 1 || most_of_a_block(tile) == tile) &&
            10 * most_of_a_block(tile) < 9 * most_of_a_block(best))
            best = tile;
    return best;
}

// readout: null: no row is scaled.
template <typename Recurrence>
int launch_decode(const TimeMixInput& in, int rows, const int* counted, const int* slots,
                  const ReadoutInput* readout, cudaStream_t stream) {
    const int heads = in.width / HEAD, most = multiprocessors() * Recurrence::BLOCKS;
    const int tile = tile_rows(rows, heads, most), tiles = (rows + tile - 1) / tile * heads;
    constexpr int shared = sizeof(Shared<Recurrence>);
    const auto kernel = readout ? wkv_decode_kernel<Recurrence, true> : wkv_decode_kernel<Recurrence, false>;
    const cudaError_t allowed =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (allowed != cudaSuccess) return allowed;
    return launch(kernel, dim3(tiles < most ? tiles : most), THREADS, shared, stream, in, slots, rows,
                  counted, tile, readout ? *readout : ReadoutInput{});
}

// wkv_decode_fp16.cu
int wkv_decode_fp16(const TimeMixInput& in, int rows, const int* counted, const int* slots,
                    const ReadoutInput* readout, cudaStream_t stream);
