// The time mix of RWKV-6 (x060) between its GEMMs: decay, the recurrence, bonus, group norm and gate, for
// packed rows of any number of tokens.
//
//   per head, with S [value, key]:   y = S r + (sum over keys of u k r) v      S' = S diag(w) + v k^T
//   w = exp(-exp(decay + w~))
//   out = group_norm(y) g sigmoid(g)
//
// r, k, v, w~, g, out: [T, C] fp16. Vectors: [C] fp16; u is the bonus. The state of slot s and head h: 64 x
// 64 numbers, fp16 or fp32, at state + s * slot_stride + h * 4096, read and written once a launch, in place.
// A row whose slot is negative is padding: it has no state, and its output is zero if rows have one token
// each.
//
// Reference: rwkv_batch/ops/wkv6.py. Binding: Kernels.wkv6. Test: test/kernels/test_wkv6.py.
//
// A block has one head of a row at a time, in registers from its first token to its last: 4 threads share a
// row of S. Arithmetic is fp32. Sums over keys go over 16 numbers of a thread in order, then over 4 lanes as
// a tree; those over a head, over the two channels of a lane and then over lanes as a tree. They do not
// depend on how a prompt is cut, nor on other rows.
#include "wkv6.cuh"

#include "norm.cuh"
#include "wkv.cuh"

namespace {
constexpr int THREADS = 256, WARPS = THREADS / WARP;
constexpr int LANES = THREADS / HEAD;   // threads that share a row of S
constexpr int RUNS = HEAD / LANES / 8;  // of 8 keys, of each thread
constexpr int TILE = 16;                // tokens of a longer row that are in shared memory together
constexpr int BLOCKS = 4;               // that fit on a multiprocessor

// What a lane has of a token: channels 2 lane and 2 lane + 1 of the head.
struct Channels {
    __half2 r, k, v, w, g;
};

template <int TOKENS>
struct Tokens {
    alignas(16) float r[TOKENS][HEAD], w[TOKENS][HEAD], k[TOKENS][HEAD], v[TOKENS][HEAD], y[TOKENS][HEAD];
    float own[TOKENS];  // the sum of u k r
};

__device__ __forceinline__ __half2 pair_of(const __half* p, size_t at) {
    return *reinterpret_cast<const __half2*>(p + at);
}

// rows.row_of is null: every row is one token. Otherwise they are packed, the longest may be anywhere; those
// behind the row of the last of `tokens` do not count.
// TOKENS: that are in shared memory together.
template <typename Number, int TOKENS>
__global__ void LAUNCH_BOUNDS(THREADS, BLOCKS)
    wkv6_kernel(const __grid_constant__ Wkv6Input in, int tokens, const int* slots,
                const __grid_constant__ PackedRowsInput rows) {
    constexpr int OWN = (TOKENS + WARPS - 1) / WARPS;  // tokens that a warp prepares and finishes
    __shared__ Tokens<TOKENS> shared;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, head = blockIdx.x;
    const int value = threadIdx.x / LANES, key = threadIdx.x % LANES * 8;
    const size_t channel = size_t(head) * HEAD + 2 * lane;
    const __half2 decays = pair_of(in.decay, channel), bonuses = pair_of(in.bonus, channel),
                  weights = pair_of(in.norm_weight, channel), biases = pair_of(in.norm_bias, channel);
    const bool packed = rows.row_of != nullptr;
    const int count = packed ? rows.row_of[tokens - 1] + 1 : tokens;
    // Backwards: rows of many tokens come last.
    for (int row = count - 1 - int(blockIdx.y); row >= 0; row -= gridDim.y) {
        const int slot = slots[row];
        Number* const state = static_cast<Number*>(in.state) + size_t(slot < 0 ? 0 : slot) * in.slot_stride +
                              size_t(head) * HEAD * HEAD + value * HEAD + key;
        // States were written a step ago, so they are fetched while the kernel before still runs.
        Raw8<Number> raw[RUNS];
        if (slot >= 0)
#pragma unroll
            for (int i = 0; i < RUNS; i++) raw[i].load(state + i * LANES * 8);
        wait_for_inputs();
        if (slot < 0) {
            if (!packed && warp == 0)
                *reinterpret_cast<uint32_t*>(in.out + size_t(row) * in.width + channel) = 0;
            continue;
        }
        const int first = packed ? rows.first[row] : row, last = packed ? rows.last[row] : row;
        Channels next[OWN];
        const auto fetch = [&](int begin) {
#pragma unroll
            for (int i = 0; i < OWN; i++) {
                const int place = i * WARPS + warp;
                if (place >= TOKENS || begin + place > last) continue;
                const size_t at = size_t(begin + place) * in.width + channel;
                next[i] = {pair_of(in.r, at), pair_of(in.k, at), pair_of(in.v, at), pair_of(in.w, at),
                           pair_of(in.g, at)};
            }
        };
        fetch(first);
        float s[RUNS][8];
#pragma unroll
        for (int i = 0; i < RUNS; i++) raw[i].widen(s[i]);
#pragma unroll 1
        for (int begin = first; begin <= last; begin += TOKENS) {
            __half2 gates[OWN];
#pragma unroll
            for (int i = 0; i < OWN; i++) {
                const int place = i * WARPS + warp;
                if (place >= TOKENS || begin + place > last) continue;
                const float2 r = __half22float2(next[i].r), k = __half22float2(next[i].k),
                             v = __half22float2(next[i].v), w = __half22float2(next[i].w);
                const float2 decay = __half22float2(decays), bonus = __half22float2(bonuses);
                const auto put = [&](float* to, float x, float y) {
                    *reinterpret_cast<float2*>(to + 2 * lane) = make_float2(x, y);
                };
                put(shared.r[place], r.x, r.y), put(shared.k[place], k.x, k.y),
                    put(shared.v[place], v.x, v.y);
                put(shared.w[place], __expf(-__expf(decay.x + w.x)), __expf(-__expf(decay.y + w.y)));
                const float own = warp_sum(bonus.x * k.x * r.x + bonus.y * k.y * r.y);
                if (lane == 0) shared.own[place] = own;
                gates[i] = next[i].g;
            }
            __syncthreads();
            fetch(begin + TOKENS);
            const int here = min(TOKENS, last - begin + 1);
#pragma unroll 1
            for (int place = 0; place < here; place++) {
                const float v = shared.v[place][value];
                float y = 0.f;
#pragma unroll
                for (int i = 0; i < 2 * RUNS; i++) {
                    const int at = key + i / 2 * LANES * 8 + i % 2 * 4;
                    float r[4], w[4], k[4];
                    load_float(shared.r[place] + at, r), load_float(shared.w[place] + at, w),
                        load_float(shared.k[place] + at, k);
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        float& x = s[i / 2][i % 2 * 4 + j];
                        y += x * r[j];
                        x = x * w[j] + v * k[j];
                    }
                }
#pragma unroll
                for (int offset = 1; offset < LANES; offset *= 2) y += shuffle_xor(y, offset);
                if (key == 0) shared.y[place][value] = y + shared.own[place] * v;
            }
            __syncthreads();
#pragma unroll
            for (int i = 0; i < OWN; i++) {
                const int place = i * WARPS + warp;
                if (place >= TOKENS || begin + place > last) continue;
                const float2 y = *reinterpret_cast<const float2*>(shared.y[place] + 2 * lane),
                             g = __half22float2(gates[i]), weight = __half22float2(weights),
                             bias = __half22float2(biases);
                const float mean = warp_sum(y.x + y.y) / HEAD;
                const float2 d = make_float2(y.x - mean, y.y - mean);
                const float scale = rsqrtf(warp_sum(d.x * d.x + d.y * d.y) / HEAD + NORM_EPSILON);
                const float x0 = (d.x * scale * weight.x + bias.x) * g.x * sigmoid(g.x),
                            x1 = (d.y * scale * weight.y + bias.y) * g.y * sigmoid(g.y);
                *reinterpret_cast<uint32_t*>(in.out + size_t(begin + place) * in.width + channel) =
                    to_half2(x0, x1);
            }
        }
#pragma unroll
        for (int i = 0; i < RUNS; i++) store8(state + i * LANES * 8, s[i]);
    }
}

template <typename Number>
int run(const Wkv6Input& in, int tokens, int most, const int* slots, const PackedRowsInput* rows,
        cudaStream_t stream) {
    const int heads = in.width / HEAD;
    if (!rows)
        return launch(wkv6_kernel<Number, 1>, dim3(heads, tokens), THREADS, 0, stream, in, tokens, slots,
                      PackedRowsInput{});
    // As many blocks as are busy at once, a few times over.
    const int enough = (4 * BLOCKS * multiprocessors() + heads - 1) / heads;
    return launch(wkv6_kernel<Number, TILE>, dim3(heads, most < enough ? most : enough), THREADS, 0, stream,
                  in, tokens, slots, *rows);
}
}  // namespace

extern "C" {
// rows: null, and every row of `slots` is one token; or those of a prefill, `most` at most, with its slots.
// fp32: states in fp32, else fp16.
int rwkv_wkv6(const Wkv6Input* in, int tokens, int most, const int* slots, const PackedRowsInput* rows,
              int fp32, cudaStream_t stream) {
    return fp32 ? run<float>(*in, tokens, most, slots, rows, stream)
                : run<__half>(*in, tokens, most, slots, rows, stream);
}
}
