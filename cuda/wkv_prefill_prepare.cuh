// What the first kernels of wkv_prefill.cuh for NVIDIA and for AMD GPUs share: gates, decays and keys of a
// chunk in shared memory, and the inverse of its triangle.
//
// Sums over the channels of a head go over two of a lane, then over lanes as a tree; sums over tokens in
// order. All of a chunk's numbers are computed in the same order beside any others.
#pragma once
#include "wkv_prefill.cuh"

constexpr int PREPARE_WARPS = 4, PREPARE_BLOCKS = 6;  // warps of a block, blocks of a multiprocessor
constexpr int OWN_TOKENS = CHUNK / PREPARE_WARPS;
constexpr int SOLVED_STRIDE = 40, LOW_STRIDE = 24;

// Sums of 8 numbers of each lane over all lanes; lane l gets that of number l / 4.
template <int OFFSET>
__device__ __forceinline__ void halve(float (&x)[8], int lane) {
    const bool upper = lane & OFFSET;
#pragma unroll
    for (int i = 0; i < OFFSET / 4; i++) {
        const float low = x[i], high = x[i + OFFSET / 4];
        x[i] = (upper ? high : low) + shuffle_xor(upper ? low : high, OFFSET);
    }
}

__device__ __forceinline__ float sums_over_lanes(float (&x)[8], int lane) {
    halve<16>(x, lane), halve<8>(x, lane), halve<4>(x, lane);
    const float sum = x[0] + shuffle_xor(x[0], 2);
    return sum + shuffle_xor(sum, 1);
}

enum Input { W, K, R, A, V, MIX, FIRST, INPUTS };

struct alignas(16) Workspace {
    uint4 inputs[INPUTS][CHUNK][HEAD / 8];  // of the next chunk as soon as this one's have been read
    __half kk[CHUNK][STRIDE], r[CHUNK][STRIDE], b[CHUNK][STRIDE], b_low[CHUNK][STRIDE];
    __half k[CHUNK][STRIDE], k_low[CHUNK][STRIDE], v[CHUNK][STRIDE];
    union {
        float decay[PREPARE_WARPS][HEAD];  // base-2 logarithms of the product over a warp's tokens
        float lower[2 * CHUNK][CHUNK];     // -L, -Lr
    };
    float right[2 * CHUNK][CHUNK];            // A, Ar
    __half solved[2 * CHUNK][SOLVED_STRIDE];  // N | N A over -Lr N | Ar - Lr N A, column by column
    __half solved_low[CHUNK][LOW_STRIDE];     // what rounding N A to fp16 has left, column by column
};

// Where the tokens of a chunk begin in the inputs, and how many there are.
struct Place {
    int token, count;
    __device__ __forceinline__ Place(const ChunksInput& packed, int chunk)
        : token(packed.chunk_token[chunk]), count(packed.chunk_tokens[chunk]) {}
};

// Begins to copy a chunk's inputs of a head into the workspace, zeros where it has no tokens.
__device__ __forceinline__ void fetch(const TimeMixInput& in, const Place& place, int head, Workspace& ws) {
    const int t = threadIdx.x / 8, part = threadIdx.x % 8, bytes = t < place.count ? 16 : 0;
    const size_t at = bytes ? size_t(place.token + t) * in.width + head * HEAD + 8 * part : 0;
    const unsigned to = shared_address(&ws.inputs[0][t][part]);
    const auto copy = [&](Input input, const __half* from) {
        copy_async(to + unsigned(input * sizeof(ws.inputs[0])), from + at, bytes);
    };
    copy(W, in.w), copy(K, in.k), copy(R, in.r), copy(A, in.a), copy(V, in.v);
    if (in.mix) copy(MIX, in.mix), copy(FIRST, in.v_first);
    commit_copies();
}

__device__ __forceinline__ void put_pair(__half* row, int pair, uint32_t x) {
    reinterpret_cast<uint32_t*>(row)[pair] = x;
}

// high + low = x to 22 bits
__device__ __forceinline__ void put_both(__half* high, __half* low, int pair, uint32_t rounded, float x,
                                         float y) {
    const float2 back = to_float2(rounded);
    put_pair(high, pair, rounded);
    put_pair(low, pair, to_finite_half2(x - back.x, y - back.y));
}

constexpr float LOG2_E = 1.4426950408889634f;

// sigmoid(x + y), where y_scaled = -y log2 e
__device__ __forceinline__ float sigmoid_of_sum(float x, float y_scaled) {
    return 1.f / (1.f + power_of_two(y_scaled - LOG2_E * x));
}

// A lane's constants: channels 2 l and 2 l + 1 of a head.
struct Channels {
    float2 w0, a0, v0;  // times -log2 e
    float2 k_k, k_a, r_k;
    __device__ __forceinline__ Channels(const TimeMixInput& in, int channel)
        : w0(scaled(in.w0, channel)),
          a0(scaled(in.a0, channel)),
          v0(in.mix ? scaled(in.v0, channel) : make_float2(0.f, 0.f)),
          k_k(pair_at(in.k_k, channel)),
          k_a(pair_at(in.k_a, channel)),
          r_k(pair_at(in.r_k, channel)) {}
    static __device__ __forceinline__ float2 scaled(const __half* p, int channel) {
        const float2 x = pair_at(p, channel);
        return make_float2(-LOG2_E * x.x, -LOG2_E * x.y);
    }
};

// Gates, decays and keys of a chunk into the workspace. A warp has four tokens of it; lane l has channels 2 l
// and 2 l + 1. When all threads have read the inputs, `fetch_next` is called.
template <typename Fetch>
__device__ __forceinline__ void load_chunk(const Channels& c, bool mixes, int count, int warp, int lane,
                                           Workspace& ws, ChunkData& data, const Fetch& fetch_next) {
    const int pair = place_of_keys(lane);
    wait_copies<0>();
    __syncthreads();
    const auto input = [&](Input which, int i) {
        return reinterpret_cast<const uint32_t*>(ws.inputs[which][warp * OWN_TOKENS + i])[lane];
    };
    float decay[OWN_TOKENS][2];  // base-2 logarithms, added up
    {
        float x = 0.f, y = 0.f;
#pragma unroll
        for (int i = 0; i < OWN_TOKENS; i++) {
            const float2 w = to_float2(input(W, i));
            const float one = warp * OWN_TOKENS + i < count ? DECAY * LOG2_E : 0.f;
            x += one * sigmoid_of_sum(w.x, c.w0.x), y += one * sigmoid_of_sum(w.y, c.w0.y);
            decay[i][0] = x, decay[i][1] = y;
        }
        reinterpret_cast<float2*>(ws.decay[warp])[lane] = make_float2(x, y);
    }
    float a[OWN_TOKENS][2], key[OWN_TOKENS][2], kk[OWN_TOKENS][2], sum;
    uint32_t r_raw[OWN_TOKENS];
    {
        float sums[2 * OWN_TOKENS];  // |k k_k|^2, then r . k r_k
        const float kept[2] = {1.f - c.k_a.x, 1.f - c.k_a.y};
#pragma unroll
        for (int i = 0; i < OWN_TOKENS; i++) {
            r_raw[i] = input(R, i);
            const float2 k = to_float2(input(K, i)), r = to_float2(r_raw[i]), raw = to_float2(input(A, i));
            a[i][0] = sigmoid_of_sum(raw.x, c.a0.x), a[i][1] = sigmoid_of_sum(raw.y, c.a0.y);
            kk[i][0] = k.x * c.k_k.x, kk[i][1] = k.y * c.k_k.y;
            sums[i] = kk[i][0] * kk[i][0] + kk[i][1] * kk[i][1];
            key[i][0] = k.x * (kept[0] + a[i][0] * c.k_a.x), key[i][1] = k.y * (kept[1] + a[i][1] * c.k_a.y);
            sums[OWN_TOKENS + i] = r.x * key[i][0] * c.r_k.x + r.y * key[i][1] * c.r_k.y;
        }
        sum = sums_over_lanes(sums, lane);
    }
    uint32_t v_raw[OWN_TOKENS];
#pragma unroll
    for (int i = 0; i < OWN_TOKENS; i++) v_raw[i] = input(V, i);
    if (mixes)
#pragma unroll
        for (int i = 0; i < OWN_TOKENS; i++) {
            const float2 v = to_float2(v_raw[i]), mix = to_float2(input(MIX, i)),
                         first = to_float2(input(FIRST, i));
            v_raw[i] = to_finite_half2(v.x + (first.x - v.x) * sigmoid_of_sum(mix.x, c.v0.x),
                                       v.y + (first.y - v.y) * sigmoid_of_sum(mix.y, c.v0.y));
        }
#pragma unroll
    for (int i = 0; i < OWN_TOKENS; i++) put_pair(ws.v[warp * OWN_TOKENS + i], lane, v_raw[i]);
    if (lane >= 16 && lane % 4 == 0) data.own[warp * OWN_TOKENS + lane / 4 - OWN_TOKENS] = sum;
    const float scale = 1.f / fmaxf(sqrtf(sum), 1e-12f);  // of kk, of token lane / 4
    __syncthreads();
    fetch_next();
    const auto total = [&](int w) { return reinterpret_cast<const float2*>(ws.decay[w])[lane]; };
    float2 before;  // log W / M before this warp's tokens
    if (warp == 0) {
        const float2 x = total(0), y = total(1);
        before = make_float2(-x.x - y.x, -x.y - y.y);
        reinterpret_cast<float2*>(data.middle)[lane] =
            make_float2(power_of_two(-before.x), power_of_two(-before.y));
    } else if (warp == 1) {
        const float2 x = total(1);
        before = make_float2(-x.x, -x.y);
    } else if (warp == 2) {
        const float2 x = total(2), y = total(3);
        before = make_float2(0.f, 0.f);
        reinterpret_cast<float2*>(data.end)[lane] =
            make_float2(power_of_two(x.x + y.x), power_of_two(x.y + y.y));
    } else {
        before = total(2);
    }
    float grown[2] = {power_of_two(before.x), power_of_two(before.y)};  // W_{t-1} / M
#pragma unroll
    for (int i = 0; i < OWN_TOKENS; i++) {
        const int t = warp * OWN_TOKENS + i;
        const float2 r = to_float2(r_raw[i]),
                     log = make_float2(before.x + decay[i][0], before.y + decay[i][1]);
        const float s = shuffle(scale, 4 * i), unit[2] = {kk[i][0] * s, kk[i][1] * s};
        const float shrunk[2] = {power_of_two(-log.x), power_of_two(-log.y)};  // M / W_t
        put_pair(ws.kk[t], pair, to_half2(unit[0] * grown[0], unit[1] * grown[1]));
        grown[0] = power_of_two(log.x), grown[1] = power_of_two(log.y);
        put_pair(ws.r[t], pair, to_finite_half2(r.x * grown[0], r.y * grown[1]));
        const float k[2] = {key[i][0] * shrunk[0], key[i][1] * shrunk[1]};
        const float b[2] = {-unit[0] * a[i][0] * shrunk[0], -unit[1] * a[i][1] * shrunk[1]};
        put_both(ws.k[t], ws.k_low[t], pair, to_finite_half2(k[0], k[1]), k[0], k[1]);
        put_both(ws.b[t], ws.b_low[t], pair, to_half2(b[0], b[1]), b[0], b[1]);
    }
}

// N, N A, -Lr N and Ar - Lr N A by forward substitution; lane l has column l of the 32 of [N | N A].
__device__ __forceinline__ void solve(Workspace& ws, int lane) {
    float x[CHUNK], next[8];
#pragma unroll
    for (int i = 0; i < 2 * CHUNK; i++) {
        float sum = lane < CHUNK ? float(i == lane) : ws.right[i][lane - CHUNK];
#pragma unroll
        for (int j = 0; j < CHUNK; j += 4) {
            const int terms = i < CHUNK ? i : i - CHUNK + 1;
            if (j >= terms) continue;
            const float4 l = *reinterpret_cast<const float4*>(&ws.lower[i][j]);
            sum += l.x * x[j];
            if (j + 1 < terms) sum += l.y * x[j + 1];
            if (j + 2 < terms) sum += l.z * x[j + 2];
            if (j + 3 < terms) sum += l.w * x[j + 3];
        }
        next[i % 8] = sum;
        if (i < CHUNK) x[i] = sum;
        if (i % 8 < 7) continue;
        uint32_t high[4], low[4];
#pragma unroll
        for (int pair = 0; pair < 4; pair++) {
            high[pair] = pack(&next[2 * pair]);
            const float2 back = to_float2(high[pair]);
            low[pair] = to_finite_half2(next[2 * pair] - back.x, next[2 * pair + 1] - back.y);
        }
        *reinterpret_cast<uint4*>(&ws.solved[lane][i - 7]) = make_uint4(high[0], high[1], high[2], high[3]);
        if (i < CHUNK && lane >= CHUNK)
            *reinterpret_cast<uint4*>(&ws.solved_low[lane - CHUNK][i - 7]) =
                make_uint4(low[0], low[1], low[2], low[3]);
    }
}

// A grid for `kernel`: (heads, chunks at a time).
template <typename Kernel>
int launch_prepare(Kernel kernel, const TimeMixInput& in, const ChunksInput& packed, int chunks,
                   ChunkData* chunk_data, cudaStream_t stream) {
    const unsigned heads = in.width / HEAD;
    unsigned blocks;
    const int error =
        resident(kernel, PREPARE_WARPS * WARP, sizeof(Workspace), size_t(chunks) * heads, blocks);
    const dim3 grid(heads, blocks / heads ? blocks / heads : 1);
    return error ? error
                 : launch(kernel, grid, PREPARE_WARPS * WARP, sizeof(Workspace), stream, in, packed,
                          chunk_data);
}
