// The first kernel of wkv_prefill.cuh: what each chunk does to the state it will meet, for all chunks and
// heads at once.
//
// Reference: rwkv_batch/ops/wkv_prefill.py. Binding: Kernels.wkv_prefill. Test:
// test/kernels/test_wkv_prefill.py.
//
// Sums over the channels of a head go over two of a lane, then over lanes as a tree; sums over tokens in
// order. All of a chunk's numbers are computed in the same order whatever else runs.
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
    const int pair = lane % 8 * 4 + lane / 8;  // where these keys stand in a row
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

// Grid (heads, chunks at a time).
__global__ void LAUNCH_BOUNDS(PREPARE_WARPS* WARP, PREPARE_BLOCKS)
    wkv_prefill_prepare_kernel(const __grid_constant__ TimeMixInput in,
                               const __grid_constant__ ChunksInput packed, ChunkData* chunk_data) {
    extern __shared__ uint4 shared[];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, quarter = lane % 4;
    // Not the same warp in all blocks: a multiprocessor's schedulers share the work.
    const int solver = ((blockIdx.y * gridDim.x + blockIdx.x) * 0x9e3779b1u >> 20) % PREPARE_WARPS;
    Workspace& ws = *reinterpret_cast<Workspace*>(shared);
    const Channels channels(in, blockIdx.x * HEAD + 2 * lane);
    // The next kernel is not let in before this one's blocks have ended: its blocks would gather on the few
    // multiprocessors that are first to have room.
    grid_dependency_wait();
    const int chunks = packed.counts[0];
    // Rows of a matrix whose four blocks of 8 x 8 are wanted in the order (0, 0), (1, 0), (0, 1), (1, 1), or
    // (0, 0), (0, 1), (1, 0), (1, 1).
    const int down_row = lane % 16, down_column = lane / 16 * 8, across_row = lane / 16 * 8 + lane % 8,
              across_column = lane / 8 % 2 * 8;
    const int own = 16 * warp;  // this warp's keys and values
    if (int(blockIdx.y) >= chunks) return;
    Place place(packed, blockIdx.y);
    fetch(in, place, blockIdx.x, ws);
    for (int chunk = blockIdx.y; chunk < chunks; chunk += gridDim.y) {
        ChunkData& data = chunk_data[size_t(chunk) * gridDim.x + blockIdx.x];
        const int next = chunk + gridDim.y, count = place.count;
        if (next < chunks) place = Place(packed, next);
        load_chunk(channels, in.mix, count, warp, lane, ws, data, [&] {
            if (next < chunks) fetch(in, place, blockIdx.x, ws);
        });
        __syncthreads();
        {
            // Two warps make products with kk~, two with r~; one of each those with b~, the other those with
            // k~.
            const int of = warp / 2;
            const bool with_k = warp % 2;
            const __half(*left)[STRIDE] = of ? ws.r : ws.kk, (*with)[STRIDE] = with_k ? ws.k : ws.b;
            float products[2][4] = {};
#pragma unroll
            for (int j = 0; j < TILES; j++) {
                uint32_t x[4], y[4];
                load_matrix(x, &left[down_row][16 * j + down_column]);
                load_matrix(y, &with[across_row][16 * j + across_column]);
#pragma unroll
                for (int h = 0; h < 2; h++) mma(products[h], x[0], x[1], x[2], x[3], y[2 * h], y[2 * h + 1]);
            }
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int down = 0; down < 2; down++) {
                    const int t = group + 8 * down, s = 8 * h + 2 * quarter;
                    const float* x = &products[h][2 * down];
                    float* to = with_k ? &ws.right[16 * of + t][s] : &ws.lower[16 * of + t][s];
                    *reinterpret_cast<float2*>(to) =
                        make_float2(s < t + of ? x[0] : 0.f, s + 1 < t + of ? x[1] : 0.f);
                }
        }
        __syncthreads();
        uint32_t b[4], k[4], v[4], r[4], kk[4];
        load_transposed(b, &ws.b[across_row][own + across_column]);
        load_transposed(k, &ws.k[across_row][own + across_column]);
        load_transposed(v, &ws.v[across_row][own + across_column]);
        load_transposed(kk, &ws.kk[down_row][own + down_column]);
        load_matrix(r, &ws.r[down_row][own + down_column]);
        store(&data.b[warp][lane], b[0], b[2], b[1], b[3]);
        store(&data.values[warp].v[lane], v[0], v[1], v[2], v[3]);
        if (warp == solver) solve(ws, lane);
        __syncthreads();
        {
            uint32_t inverse[4], from_r[4];
            load_transposed(inverse, &ws.solved[across_row][across_column]);
            load_transposed(from_r, &ws.solved[across_row][16 + across_column]);
            float of_kk[2][4] = {}, of_r[2][4];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                unpack(of_r[h], r[2 * h]), unpack(of_r[h] + 2, r[2 * h + 1]);
                mma(of_kk[h], inverse[0], inverse[1], inverse[2], inverse[3], kk[2 * h], kk[2 * h + 1]);
                mma(of_r[h], from_r[0], from_r[1], from_r[2], from_r[3], kk[2 * h], kk[2 * h + 1]);
            }
            store(&data.kk[warp][lane], pack(of_kk[0]), pack(of_kk[1]), pack(of_kk[0] + 2),
                  pack(of_kk[1] + 2));
            store(&data.r[warp][lane], pack(of_r[0]), pack(of_r[1]), pack(of_r[0] + 2), pack(of_r[1] + 2));
        }
        uint32_t values[4], high[4], low[4], b_low[4], k_low[4];
        load_transposed(values, &ws.solved[16 + down_row][16 + down_column]);
        load_matrix(high, &ws.solved[16 + across_row][across_column]);
        load_matrix(low, &ws.solved_low[across_row][across_column]);
        load_transposed(b_low, &ws.b_low[across_row][own + across_column]);
        load_transposed(k_low, &ws.k_low[across_row][own + across_column]);
        float written[2][4], y[2][4] = {};
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int down = 0; down < 2; down++) {
                float rest[2];
                unpack(written[h] + 2 * down, k[2 * h + down]), unpack(rest, k_low[2 * h + down]);
                written[h][2 * down] += rest[0], written[h][2 * down + 1] += rest[1];
            }
            mma(written[h], b[0], b[1], b[2], b[3], low[2 * h], low[2 * h + 1]);
            mma(written[h], b_low[0], b_low[1], b_low[2], b_low[3], high[2 * h], high[2 * h + 1]);
            mma(written[h], b[0], b[1], b[2], b[3], high[2 * h], high[2 * h + 1]);
            mma(y[h], v[0], v[1], v[2], v[3], values[2 * h], values[2 * h + 1]);
        }
        store(&data.k[warp][lane], pack(written[0]), pack(written[1]), pack(written[0] + 2),
              pack(written[1] + 2));
        store(&data.values[warp].y[lane], pack_y(y[0]), pack_y(y[0] + 2), pack_y(y[1]), pack_y(y[1] + 2));
    }
}

int wkv_prefill_prepare(const TimeMixInput& in, const ChunksInput& packed, int chunks, ChunkData* chunk_data,
                        cudaStream_t stream) {
    const unsigned heads = in.width / HEAD;
    unsigned blocks;
    const int error = resident(wkv_prefill_prepare_kernel, PREPARE_WARPS * WARP, sizeof(Workspace),
                               size_t(chunks) * heads, blocks);
    const dim3 grid(heads, blocks / heads ? blocks / heads : 1);
    return error ? error
                 : launch(wkv_prefill_prepare_kernel, grid, PREPARE_WARPS * WARP, sizeof(Workspace), stream,
                          in, packed, chunk_data);
}
