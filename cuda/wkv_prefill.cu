// Prefill: the recurrence of wkv.cuh over packed rows of two tokens and more, chunk after chunk of 16 tokens on tensor cores.
//
// Within a chunk that begins at state S, let W_t be the product of the decays of its tokens up to t, M that of its first eight, and
//   kk~_t = kk_t W_{t-1} / M,   r~_t = r_t W_t / M,   k~_t = k_t M / W_t,   b~_t = kk_t a_t M / W_t      (all within 128 times the original)
//   L = lower(kk~ b~^T), A = lower(kk~ k~^T) without, Lr = lower(r~ b~^T), Ar = lower(r~ k~^T) with the diagonal;   N = (1 + L)^-1
// What a chunk does is then linear in S and in its own values V [16, value]:
//   y  = S~ (r~ - Lr N kk~)^T + V^T (Ar - Lr N A)^T                                                S~ = S diag(M)
//   S' = (S~ + V^T (k~ - (N A)^T b~) - (S~ (N kk~)^T) b~) diag(W_16 / M)
// Three kernels: `prepare` makes these four [16, key] matrices, V and the part of y that comes from V for every chunk and head at once,
// `scan` walks through the chunks of a row with S in registers, `finish` does group norm, bonus and gate.
//
// Precision: gates, decays, N and its products are fp32; operands of the tensor cores are fp16, sums fp32. k~ - (N A)^T b~, in which large
// numbers may cancel, is made of operands of two halves each. S is carried in fp32 and read as fp16. Sums over keys run in steps of 16.
//
// A chunk's numbers for one head are an `Item`, in the order in which the lanes of a warp hold them for m16n8k16 products. Key 16 q + 2 i + e
// stands at column 8 i + 2 q + e of these matrices, so that a lane has 16 neighbours of each of its rows of S.
#include "wkv.cuh"

constexpr int CHUNK = 16;
constexpr int TILES = HEAD / 16;          // of 16 values, or of 16 keys
constexpr int PREPARE_WARPS = 4, FINISH_WARPS = 4;
constexpr int STRIDE = HEAD + 8;          // halves from token to token in shared memory: 8 rows of 16 bytes come from different banks
constexpr float Y_UNIT = 64.f;            // y is kept in units of this: it may pass 65504, and what is lost below 0.004 the group norm's epsilon hides
constexpr int T_STRIDE = 40, LOW_STRIDE = 24;

struct Item {
    uint4 kk[TILES][WARP];      // N kk~
    uint4 r[TILES][WARP];       // r~ - Lr N kk~
    uint4 k[TILES][WARP];       // k~ - (N A)^T b~
    uint4 b[TILES][WARP];       // -b~
    float middle[HEAD];         // M
    float end[HEAD];            // W_16 / M
    uint4 v[TILES][WARP];
    uint4 y[TILES][WARP];       // from V alone; `scan` adds what comes from S
    float own[CHUNK];           // r . k r_k
    float unused[16];           // up to a multiple of 128 bytes
};

// Which tokens belong together, on the device.
struct Packed {
    const int* counts;          // chunks, rows
    const int* chunk_token;     // [chunks] the first token
    const int* chunk_tokens;    // [chunks] 1 to 16
    const int* row_chunk;       // [rows] the first chunk
    const int* row_chunks;      // [rows]
    const int* row_slot;        // [rows]
};

__device__ __forceinline__ void load_matrix(uint32_t (&x)[4], const __half* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(unsigned(__cvta_generic_to_shared(row))) : "memory");
}

__device__ __forceinline__ void load_transposed(uint32_t (&x)[4], const __half* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(unsigned(__cvta_generic_to_shared(row))) : "memory");
}

__device__ __forceinline__ void store(uint4* to, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

__device__ __forceinline__ uint32_t pack(const float* pair) { return to_half2(pair[0], pair[1]); }

__device__ __forceinline__ uint32_t pack_y(const float* pair) { return to_half2(pair[0] / Y_UNIT, pair[1] / Y_UNIT); }

__device__ __forceinline__ void unpack(float* pair, uint32_t x) {
    const float2 both = to_float2(x);
    pair[0] = both.x, pair[1] = both.y;
}

__device__ __forceinline__ void unpack_y(float* pair, uint32_t x) {
    const float2 both = to_float2(x);
    pair[0] = both.x * Y_UNIT, pair[1] = both.y * Y_UNIT;
}

// Nothing may become infinite: the products would be NaN.
__device__ __forceinline__ uint32_t to_finite_half2(float x, float y) {
    constexpr float MOST = 65504.f;
    return to_half2(fminf(fmaxf(x, -MOST), MOST), fminf(fmaxf(y, -MOST), MOST));
}

// Sums of 16 numbers of each lane over all lanes; lane l gets that of number l / 2.
template <int OFFSET>
__device__ __forceinline__ void halve(float (&x)[CHUNK], int lane) {
    const bool upper = lane & OFFSET;
#pragma unroll
    for (int i = 0; i < OFFSET / 2; i++) {
        const float low = x[i], high = x[i + OFFSET / 2];
        x[i] = (upper ? high : low) + __shfl_xor_sync(ALL, upper ? low : high, OFFSET);
    }
}

__device__ __forceinline__ float sums_over_lanes(float (&x)[CHUNK], int lane) {
    halve<16>(x, lane), halve<8>(x, lane), halve<4>(x, lane), halve<2>(x, lane);
    return x[0] + __shfl_xor_sync(ALL, x[0], 1);
}

// The workspace of one warp of `prepare`.
struct alignas(16) Workspace {
    __half kk[CHUNK][STRIDE], b[CHUNK][STRIDE], b_low[CHUNK][STRIDE], k[CHUNK][STRIDE], k_low[CHUNK][STRIDE], v[CHUNK][STRIDE];
    union {
        __half r[CHUNK][STRIDE];
        float lower[2 * CHUNK][CHUNK];             // -L, -Lr
        __half solved_low[CHUNK][LOW_STRIDE];      // what rounding N A to fp16 has left
    };
    union {
        float right[2 * CHUNK][T_STRIDE / 2];      // A, Ar
        __half solved[2 * CHUNK][T_STRIDE];        // N | N A over -Lr N | Ar - Lr N A
    };
};

__device__ __forceinline__ void put_pair(__half* row, int pair, uint32_t x) { reinterpret_cast<uint32_t*>(row)[pair] = x; }

// hi + lo = x to 22 bits
__device__ __forceinline__ void put_both(__half* high, __half* low, int pair, float x, float y) {
    const uint32_t rounded = to_finite_half2(x, y);
    const float2 back = to_float2(rounded);
    put_pair(high, pair, rounded);
    put_pair(low, pair, to_finite_half2(x - back.x, y - back.y));
}

// Gates, decays and keys of a chunk into the workspace, key by key; lane l has channels 2 l and 2 l + 1.
__device__ __forceinline__ void load_chunk(const TimeMix& in, int head, int token, int count, int lane, Workspace& ws, Item& item) {
    const size_t channel = head * HEAD + 2 * lane, at = size_t(token) * in.width + channel;
    const int pair = lane % 8 * 4 + lane / 8;  // where these keys stand in a row
    float decay[CHUNK][2];  // logarithms, added up
    {
        const float2 w0 = pair_at(in.w0, channel);
        float2 w[CHUNK];
#pragma unroll
        for (int t = 0; t < CHUNK; t++)
            if (t < count) w[t] = pair_at(in.w, at + size_t(t) * in.width);
        float x = 0.f, y = 0.f;
#pragma unroll
        for (int t = 0; t < CHUNK; t++) {
            if (t < count) x += DECAY * sigmoid(w0.x + w[t].x), y += DECAY * sigmoid(w0.y + w[t].y);
            decay[t][0] = x, decay[t][1] = y;
        }
    }
    const float middle[2] = {decay[CHUNK / 2 - 1][0], decay[CHUNK / 2 - 1][1]};
    reinterpret_cast<float2*>(item.middle)[lane] = make_float2(__expf(middle[0]), __expf(middle[1]));
    reinterpret_cast<float2*>(item.end)[lane] = make_float2(__expf(decay[CHUNK - 1][0] - middle[0]), __expf(decay[CHUNK - 1][1] - middle[1]));
    uint32_t k_raw[CHUNK], r_raw[CHUNK], a_raw[CHUNK];
#pragma unroll
    for (int t = 0; t < CHUNK; t++) {
        k_raw[t] = r_raw[t] = a_raw[t] = 0;
        if (t < count) {
            const size_t place = at + size_t(t) * in.width;
            k_raw[t] = *reinterpret_cast<const uint32_t*>(in.k + place);
            r_raw[t] = *reinterpret_cast<const uint32_t*>(in.r + place);
            a_raw[t] = *reinterpret_cast<const uint32_t*>(in.a + place);
        }
    }
    const float2 k_k = pair_at(in.k_k, channel), k_a = pair_at(in.k_a, channel), r_k = pair_at(in.r_k, channel), a0 = pair_at(in.a0, channel);
    float scale;  // of kk, of token lane / 2
    {
        float squares[CHUNK];
#pragma unroll
        for (int t = 0; t < CHUNK; t++) {
            const float2 k = to_float2(k_raw[t]);
            squares[t] = k.x * k_k.x * k.x * k_k.x + k.y * k_k.y * k.y * k_k.y;
        }
        scale = 1.f / fmaxf(sqrtf(sums_over_lanes(squares, lane)), 1e-12f);
    }
    float own[CHUNK];
    float grown[2] = {__expf(-middle[0]), __expf(-middle[1])};  // W_{t-1} / M
#pragma unroll
    for (int t = 0; t < CHUNK; t++) {
        const float2 k = to_float2(k_raw[t]), r = to_float2(r_raw[t]), raw = to_float2(a_raw[t]);
        const float a[2] = {sigmoid(a0.x + raw.x), sigmoid(a0.y + raw.y)}, s = __shfl_sync(ALL, scale, 2 * t);
        const float kk[2] = {k.x * k_k.x * s, k.y * k_k.y * s};
        const float key[2] = {k.x * (1.f + (a[0] - 1.f) * k_a.x), k.y * (1.f + (a[1] - 1.f) * k_a.y)};
        own[t] = r.x * key[0] * r_k.x + r.y * key[1] * r_k.y;
        const float shrunk[2] = {__expf(middle[0] - decay[t][0]), __expf(middle[1] - decay[t][1])};  // M / W_t
        put_pair(ws.kk[t], pair, to_half2(kk[0] * grown[0], kk[1] * grown[1]));
        grown[0] = __expf(decay[t][0] - middle[0]), grown[1] = __expf(decay[t][1] - middle[1]);
        put_pair(ws.r[t], pair, to_finite_half2(r.x * grown[0], r.y * grown[1]));
        put_both(ws.k[t], ws.k_low[t], pair, key[0] * shrunk[0], key[1] * shrunk[1]);
        put_both(ws.b[t], ws.b_low[t], pair, -kk[0] * a[0] * shrunk[0], -kk[1] * a[1] * shrunk[1]);
    }
    const float sum = sums_over_lanes(own, lane);
    if (lane % 2 == 0) item.own[lane / 2] = sum;
    const float2 v0 = in.mix ? pair_at(in.v0, channel) : make_float2(0.f, 0.f);
#pragma unroll
    for (int t = 0; t < CHUNK; t++) {
        uint32_t v = 0;
        if (t < count) {
            const size_t place = at + size_t(t) * in.width;
            v = *reinterpret_cast<const uint32_t*>(in.v + place);
            if (in.mix) {
                const float2 mix = pair_at(in.mix, place), first = pair_at(in.v_first, place), own_v = to_float2(v);
                v = to_half2(own_v.x + (first.x - own_v.x) * sigmoid(v0.x + mix.x), own_v.y + (first.y - own_v.y) * sigmoid(v0.y + mix.y));
            }
        }
        put_pair(ws.v[t], lane, v);
    }
}

// N, N A, -Lr N and Ar - Lr N A by forward substitution; lane l has column l of the 32 of [N | N A].
__device__ __forceinline__ void solve(Workspace& ws, int lane) {
    float right[2 * CHUNK], x[CHUNK];
#pragma unroll
    for (int i = 0; i < 2 * CHUNK; i++) right[i] = lane < CHUNK ? float(i == lane) : ws.right[i][lane - CHUNK];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2 * CHUNK; i++) {
        float sum = right[i];
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
        if (i < CHUNK) x[i] = sum;
        ws.solved[i][lane] = __float2half_rn(sum);
    }
    __syncwarp();
    if (lane >= CHUNK)
#pragma unroll
        for (int i = 0; i < CHUNK; i++) ws.solved_low[i][lane - CHUNK] = __float2half_rn(x[i] - __half2float(__float2half_rn(x[i])));
    __syncwarp();
}

// One warp for each chunk and head.
__global__ void __launch_bounds__(PREPARE_WARPS* WARP, 3) wkv_prepare_kernel(const __grid_constant__ TimeMix in, const __grid_constant__ Packed packed, Item* items) {
    extern __shared__ uint4 shared[];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, heads = in.width / HEAD, group = lane / 4, quarter = lane % 4;
    Workspace& ws = reinterpret_cast<Workspace*>(shared)[warp];
    wait_for_inputs();
    const int count = packed.counts[0] * heads;
    // Rows of a matrix whose four blocks of 8 x 8 are wanted in the order (0, 0), (1, 0), (0, 1), (1, 1), or (0, 0), (0, 1), (1, 0), (1, 1).
    const int down_row = lane % 16, down_column = lane / 16 * 8, across_row = lane / 16 * 8 + lane % 8, across_column = lane / 8 % 2 * 8;
    for (int i = blockIdx.x * PREPARE_WARPS + warp; i < count; i += gridDim.x * PREPARE_WARPS) {
        const int chunk = i / heads;
        Item& item = items[i];
        load_chunk(in, i % heads, packed.chunk_token[chunk], packed.chunk_tokens[chunk], lane, ws, item);
        __syncwarp();
        uint32_t r[TILES][4];
        {
            float lower[2][2][4] = {}, right[2][2][4] = {};  // [of kk, of r][half of the columns]
#pragma unroll
            for (int j = 0; j < TILES; j++) {
                uint32_t kk[4], b[4], k[4];
                load_matrix(kk, &ws.kk[down_row][16 * j + down_column]);
                load_matrix(r[j], &ws.r[down_row][16 * j + down_column]);
                load_matrix(b, &ws.b[across_row][16 * j + across_column]);
                load_matrix(k, &ws.k[across_row][16 * j + across_column]);
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    mma(lower[0][h], kk[0], kk[1], kk[2], kk[3], b[2 * h], b[2 * h + 1]);
                    mma(lower[1][h], r[j][0], r[j][1], r[j][2], r[j][3], b[2 * h], b[2 * h + 1]);
                    mma(right[0][h], kk[0], kk[1], kk[2], kk[3], k[2 * h], k[2 * h + 1]);
                    mma(right[1][h], r[j][0], r[j][1], r[j][2], r[j][3], k[2 * h], k[2 * h + 1]);
                }
            }
            __syncwarp();  // r and `lower` share their place
#pragma unroll
            for (int of = 0; of < 2; of++)
#pragma unroll
                for (int h = 0; h < 2; h++)
#pragma unroll
                    for (int down = 0; down < 2; down++) {
                        const int t = group + 8 * down, s = 8 * h + 2 * quarter;
                        const float *l = &lower[of][h][2 * down], *x = &right[of][h][2 * down];
                        *reinterpret_cast<float2*>(&ws.lower[16 * of + t][s]) = make_float2(l[0], l[1]);
                        *reinterpret_cast<float2*>(&ws.right[16 * of + t][s]) = make_float2(s < t + of ? x[0] : 0.f, s + 1 < t + of ? x[1] : 0.f);
                    }
        }
        __syncwarp();
        solve(ws, lane);
        uint32_t inverse[4], from_r[4], values[4], high[4], low[4];
        load_matrix(inverse, &ws.solved[down_row][down_column]);
        load_matrix(from_r, &ws.solved[16 + down_row][down_column]);
        load_matrix(values, &ws.solved[16 + across_row][16 + across_column]);
        load_transposed(high, &ws.solved[down_row][16 + down_column]);
        load_transposed(low, &ws.solved_low[down_row][down_column]);
#pragma unroll
        for (int j = 0; j < TILES; j++) {
            uint32_t kk[4];
            load_transposed(kk, &ws.kk[down_row][16 * j + down_column]);
            float of_kk[2][4] = {}, of_r[2][4];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                unpack(of_r[h], r[j][2 * h]), unpack(of_r[h] + 2, r[j][2 * h + 1]);
                mma(of_kk[h], inverse[0], inverse[1], inverse[2], inverse[3], kk[2 * h], kk[2 * h + 1]);
                mma(of_r[h], from_r[0], from_r[1], from_r[2], from_r[3], kk[2 * h], kk[2 * h + 1]);
            }
            store(&item.kk[j][lane], pack(of_kk[0]), pack(of_kk[1]), pack(of_kk[0] + 2), pack(of_kk[1] + 2));
            store(&item.r[j][lane], pack(of_r[0]), pack(of_r[1]), pack(of_r[0] + 2), pack(of_r[1] + 2));
        }
#pragma unroll
        for (int j = 0; j < TILES; j++) {
            uint32_t b[4], b_low[4], k[4], k_low[4], v[4];
            load_transposed(b, &ws.b[across_row][16 * j + across_column]);
            load_transposed(b_low, &ws.b_low[across_row][16 * j + across_column]);
            load_transposed(k, &ws.k[across_row][16 * j + across_column]);
            load_transposed(k_low, &ws.k_low[across_row][16 * j + across_column]);
            load_transposed(v, &ws.v[across_row][16 * j + across_column]);
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
            store(&item.b[j][lane], b[0], b[2], b[1], b[3]);
            store(&item.k[j][lane], pack(written[0]), pack(written[1]), pack(written[0] + 2), pack(written[1] + 2));
            store(&item.v[j][lane], v[0], v[1], v[2], v[3]);
            store(&item.y[j][lane], pack_y(y[0]), pack_y(y[0] + 2), pack_y(y[1]), pack_y(y[1] + 2));
        }
        __syncwarp();  // before the next chunk's numbers come in
    }
}

// S of a lane: rows 16 tile + lane / 4 (c 0, 1 of each) and 8 below (c 2, 3), keys 16 (lane % 4) + 2 i of product i.
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
            for (int i = 0; i < 4; i++) s[4 * half + i][2 * down] = x[2 * i], s[4 * half + i][2 * down + 1] = x[2 * i + 1];
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
            for (int i = 0; i < 4; i++) x[2 * i] = s[4 * half + i][2 * down], x[2 * i + 1] = s[4 * half + i][2 * down + 1];
            store8(place + down * 8 * HEAD + half * 8, x);
        }
}

constexpr int SHARED_VECTORS = 4 * TILES * WARP;                // kk, r, k, b
constexpr int DECAY_VECTORS = 2 * HEAD * sizeof(float) / 16;   // middle, end
template <int WARPS>
constexpr int stage_vectors = SHARED_VECTORS + DECAY_VECTORS + 2 * WARPS * WARP;

// A block has 16 WARPS rows of S of one row and head at a time; a warp has 16. The chunks ahead are on their way to shared memory.
template <typename T, int WARPS, int STAGES>
__global__ void __launch_bounds__(WARPS* WARP) wkv_scan_kernel(const __grid_constant__ TimeMix in, const __grid_constant__ Packed packed, Item* items) {
    extern __shared__ uint4 shared[];
    constexpr int PARTS = TILES / WARPS, THREADS_HERE = WARPS * WARP, VECTORS = stage_vectors<WARPS>;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, heads = in.width / HEAD;
    const int units = packed.counts[1] * heads * PARTS;
    bool waited = false;
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
        const int row = unit / (heads * PARTS), head = unit / PARTS % heads, part = unit % PARTS, tile = part * WARPS + warp;
        const int chunks = packed.row_chunks[row];
        T* place = static_cast<T*>(in.state) + packed.row_slot[row] * in.slot_stride + size_t(head) * HEAD * HEAD +
                   (16 * tile + lane / 4) * HEAD + lane % 4 * 16;
        float s[8][4], end[16];
        load_state(place, s);  // written a step ago, so the kernel before may still run
        if (!waited) wait_for_inputs();
        waited = true;
        Item* first = items + size_t(packed.row_chunk[row]) * heads + head;
        const auto fetch = [&](int chunk) {
            if (chunk < chunks) {
                const Item* item = first + size_t(chunk) * heads;
                const uint4* from = reinterpret_cast<const uint4*>(item);
                uint4* to = shared + chunk % STAGES * VECTORS;
#pragma unroll
                for (int i = threadIdx.x; i < SHARED_VECTORS + DECAY_VECTORS; i += THREADS_HERE) copy_async(to + i, from + i);
                to += SHARED_VECTORS + DECAY_VECTORS + threadIdx.x;
                copy_async(to, &item->v[tile][lane]);
                copy_async(to + THREADS_HERE, &item->y[tile][lane]);
            }
            close_copies();
        };
#pragma unroll
        for (int i = 0; i < STAGES - 1; i++) fetch(i);
#pragma unroll
        for (int i = 0; i < 16; i++) end[i] = 1.f;
        for (int chunk = 0; chunk < chunks; chunk++) {
            copies_done<STAGES - 2>();
            __syncthreads();  // this chunk is there for all, and the place of the one before is free
            fetch(chunk + STAGES - 1);
            const uint4* x = shared + chunk % STAGES * VECTORS + lane;
            const float* middle = reinterpret_cast<const float*>(shared + chunk % STAGES * VECTORS + SHARED_VECTORS) + lane % 4 * 16;
            uint32_t read[TILES][4];
#pragma unroll
            for (int m = 0; m < 4; m++) {
                const float4 by = *reinterpret_cast<const float4*>(middle + 4 * m);
                const float f[4] = {end[4 * m] * by.x, end[4 * m + 1] * by.y, end[4 * m + 2] * by.z, end[4 * m + 3] * by.w};
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float* c = s[2 * m + i];
                    c[0] *= f[2 * i], c[1] *= f[2 * i + 1], c[2] *= f[2 * i], c[3] *= f[2 * i + 1];
                    read[m][2 * i] = to_half2(c[0], c[1]), read[m][2 * i + 1] = to_half2(c[2], c[3]);
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
            const uint4 v = x[SHARED_VECTORS + DECAY_VECTORS + warp * WARP], given = x[SHARED_VECTORS + DECAY_VECTORS + THREADS_HERE + warp * WARP];
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
                    u[2 * h + down] = to_half2(removed[h][2 * down] + more[h][2 * down], removed[h][2 * down + 1] + more[h][2 * down + 1]);
#pragma unroll
            for (int m = 0; m < TILES; m++) {
                const uint4 b = x[(3 * TILES + m) * WARP];
                mma(s[2 * m], u[0], u[1], u[2], u[3], b.x, b.y);
                mma(s[2 * m + 1], u[0], u[1], u[2], u[3], b.z, b.w);
            }
            unpack_y(y[0], given.x), unpack_y(y[0] + 2, given.y), unpack_y(y[1], given.z), unpack_y(y[1] + 2, given.w);
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
            store(&first[size_t(chunk) * heads].y[tile][lane], pack_y(y[0]), pack_y(y[0] + 2), pack_y(y[1]), pack_y(y[1] + 2));
        }
#pragma unroll
        for (int i = 0; i < 8; i++) s[i][0] *= end[2 * i], s[i][1] *= end[2 * i + 1], s[i][2] *= end[2 * i], s[i][3] *= end[2 * i + 1];
        store_state(place, s);
        __syncthreads();  // all have read what the next row's copies will overwrite
    }
    if (!waited) wait_for_inputs();
    copies_done<0>();
}

// One warp for each chunk and head. A lane has values 16 tile + lane / 4 and 8 below, of tokens 2 (lane % 4), + 1, + 8, + 9.
__global__ void __launch_bounds__(FINISH_WARPS* WARP) wkv_finish_kernel(const __grid_constant__ TimeMix in, const __grid_constant__ Packed packed, const Item* items) {
    __shared__ __align__(16) __half normed[FINISH_WARPS][CHUNK][STRIDE];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, heads = in.width / HEAD, group = lane / 4, quarter = lane % 4;
    wait_for_inputs();
    const int count = packed.counts[0] * heads;
    for (int i = blockIdx.x * FINISH_WARPS + warp; i < count; i += gridDim.x * FINISH_WARPS) {
        const int chunk = i / heads, head = i % heads, tokens = packed.chunk_tokens[chunk];
        const Item& item = items[i];
        const size_t at = size_t(packed.chunk_token[chunk]) * in.width + head * HEAD + lane % 8 * 8;
        uint4 gates[CHUNK / 4];  // of tokens lane / 8 + 4 n
#pragma unroll
        for (int n = 0; n < CHUNK / 4; n++)
            if (lane / 8 + 4 * n < tokens) gates[n] = *reinterpret_cast<const uint4*>(in.g + at + size_t(lane / 8 + 4 * n) * in.width);
        float y[TILES][2][4], sum[4] = {}, squares[4] = {};  // y [tile][values below][token]
        uint4 v[TILES];
#pragma unroll
        for (int w = 0; w < TILES; w++) {
            const uint4 x = item.y[w][lane];
            v[w] = item.v[w][lane];
            unpack_y(y[w][0], x.x), unpack_y(y[w][1], x.y), unpack_y(y[w][0] + 2, x.z), unpack_y(y[w][1] + 2, x.w);
#pragma unroll
            for (int t = 0; t < 4; t++) sum[t] += y[w][0][t] + y[w][1][t];
        }
#pragma unroll
        for (int offset = 4; offset < WARP; offset *= 2)
#pragma unroll
            for (int t = 0; t < 4; t++) sum[t] += __shfl_xor_sync(ALL, sum[t], offset);
#pragma unroll
        for (int w = 0; w < TILES; w++)
#pragma unroll
            for (int t = 0; t < 4; t++) {
                y[w][0][t] -= sum[t] / HEAD, y[w][1][t] -= sum[t] / HEAD;
                squares[t] += y[w][0][t] * y[w][0][t] + y[w][1][t] * y[w][1][t];
            }
#pragma unroll
        for (int offset = 4; offset < WARP; offset *= 2)
#pragma unroll
            for (int t = 0; t < 4; t++) squares[t] += __shfl_xor_sync(ALL, squares[t], offset);
        float own[4];
#pragma unroll
        for (int t = 0; t < 4; t++) {
            squares[t] = rsqrtf(squares[t] / HEAD + NORM_EPSILON);
            own[t] = item.own[2 * quarter + t % 2 + t / 2 * 8];
        }
        __syncwarp();  // the chunk before has been read
#pragma unroll
        for (int w = 0; w < TILES; w++)
#pragma unroll
            for (int down = 0; down < 2; down++) {
                const int value = 16 * w + 8 * down + group;
                const float weight = __half2float(in.norm_weight[head * HEAD + value]), bias = __half2float(in.norm_bias[head * HEAD + value]);
                float values[4];
                unpack(values, down ? v[w].y : v[w].x), unpack(values + 2, down ? v[w].w : v[w].z);
#pragma unroll
                for (int t = 0; t < 4; t++)
                    normed[warp][2 * quarter + t % 2 + t / 2 * 8][value] =
                        __float2half_rn(y[w][down][t] * squares[t] * weight + bias + own[t] * values[t]);
            }
        __syncwarp();
#pragma unroll
        for (int n = 0; n < CHUNK / 4; n++) {
            const int t = lane / 8 + 4 * n;
            if (t >= tokens) continue;
            const uint4 x = *reinterpret_cast<const uint4*>(&normed[warp][t][lane % 8 * 8]);
            const uint32_t a[4] = {x.x, x.y, x.z, x.w}, g[4] = {gates[n].x, gates[n].y, gates[n].z, gates[n].w};
            uint32_t out[4];
#pragma unroll
            for (int p = 0; p < 4; p++) {
                const float2 value = to_float2(a[p]), gate = to_float2(g[p]);
                out[p] = to_half2(value.x * gate.x, value.y * gate.y);
            }
            store(reinterpret_cast<uint4*>(in.out + at + size_t(t) * in.width), out[0], out[1], out[2], out[3]);
        }
    }
}

namespace {
constexpr int SCAN_WARPS = 2, SCAN_STAGES = 4;

// A grid that fits on the GPU at once, no larger than needed.
template <typename... Arguments>
cudaError_t resident(void (*kernel)(Arguments...), int threads, size_t shared, size_t needed, unsigned& blocks) {
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared));
    int each = 0;
    if (error == cudaSuccess) error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads, shared);
    const size_t most = size_t(each) * multiprocessors();
    blocks = unsigned(needed < most ? needed : most);
    return error;
}

template <typename T>
int scan(const TimeMix& in, const Packed& packed, size_t rows, Item* items, cudaStream_t stream) {
    constexpr size_t SHARED = SCAN_STAGES * stage_vectors<SCAN_WARPS> * sizeof(uint4);
    const auto kernel = wkv_scan_kernel<T, SCAN_WARPS, SCAN_STAGES>;
    unsigned blocks;
    const cudaError_t error = resident(kernel, SCAN_WARPS * WARP, SHARED, rows * (in.width / HEAD) * (TILES / SCAN_WARPS), blocks);
    return error != cudaSuccess ? error : launch(kernel, blocks, SCAN_WARPS * WARP, SHARED, stream, in, packed, items);
}
}  // namespace

extern "C" {
int rwkv_wkv_item_bytes() { return sizeof(Item); }

// chunks, rows: the most there can be; how many there are stands in `packed`. items: [chunks, heads].
int rwkv_wkv_prefill(const TimeMix* in, const Packed* packed, int chunks, int rows, Item* items, int fp32, cudaStream_t stream) {
    const size_t all = size_t(chunks) * (in->width / HEAD);
    unsigned blocks;
    int error = resident(wkv_prepare_kernel, PREPARE_WARPS * WARP, PREPARE_WARPS * sizeof(Workspace), (all + PREPARE_WARPS - 1) / PREPARE_WARPS, blocks);
    if (!error) error = launch(wkv_prepare_kernel, blocks, PREPARE_WARPS * WARP, PREPARE_WARPS * sizeof(Workspace), stream, *in, *packed, items);
    if (!error) error = fp32 ? scan<float>(*in, *packed, rows, items, stream) : scan<__half>(*in, *packed, rows, items, stream);
    if (!error) error = resident(wkv_finish_kernel, FINISH_WARPS * WARP, 0, (all + FINISH_WARPS - 1) / FINISH_WARPS, blocks);
    if (!error) error = launch(wkv_finish_kernel, blocks, FINISH_WARPS * WARP, 0, stream, *in, *packed, items);
    return error;
}
}
