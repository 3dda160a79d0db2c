// The layers of RWKV-7 for a few tokens, with nothing between their products but the kernels of this folder.
//
// x passes a time mix and a channel mix a layer, each added to it: mix.cpp, the products of a time mix,
// wkv7.cpp, its output; mix.cpp, the products of a channel mix. The kernels are the same that
// rwkv_batch/model/rwkv7_cpu.py calls one by one, so a row's numbers are too. Reference:
// rwkv_batch/model/rwkv7.py. Test: test/unit/test_cpu_layers.py.

#include <cstdlib>

#include "matrix.h"

namespace {

constexpr int64_t LINE = 16;  // floats, a line of the cache

struct Vectors {  // the weight and the bias of a norm, [width] each
    const float *weight, *bias;
};

struct Pair {  // outer(activation(inner(x))); the inner weights are null where a layer does not have it
    Matrix inner, outer;
    int64_t activation;
};

enum LowRank { DECAY, RATE, GATE, VALUES };  // w, a, g, v

struct Layer {
    Vectors norm;
    const float* mixes;  // [6, width]: of r, k, v, w, a, g
    const float *k_k, *k_a, *k_rest, *r_k;
    Vectors group_norm, ffn_norm;
    const float* ffn_mix;
    Matrix receptance, key, value, output, ffn_key, ffn_value;
    Pair low_rank[4];
};
static_assert(sizeof(Layer) == 12 * 8 + 6 * 64 + 4 * 136, "as in rwkv_batch/ops/cpu/records.py");

struct Tokens {  // where the rows of a call lie, as for `mix` and `wkv7`
    const int64_t *ends, *slots;
    int64_t rows, count, width;
    int threads;
};

bool multiply(const Tokens& tokens, const Matrix& matrix, const float* x, float* y,
              int activation = IDENTITY) {
    return product(&matrix, x, y, tokens.count, activation, tokens.threads);
}

bool multiply(const Tokens& tokens, const Pair& pair, const float* x, float* between, float* y) {
    return multiply(tokens, pair.inner, x, between, (int)pair.activation) &&
           multiply(tokens, pair.outer, between, y);
}

int64_t most_between(const Layer* layers, int64_t count) {
    int64_t most = 0;
    for (int64_t i = 0; i < count; i++) {
        if (layers[i].ffn_key.outputs > most) most = layers[i].ffn_key.outputs;
        for (const Pair& pair : layers[i].low_rank)
            if (pair.inner.weights && pair.inner.outputs > most) most = pair.inner.outputs;
    }
    return most;
}

// Pieces of one block of memory, each of which begins with a line of the cache. block: null where there is
// none.
struct Room {
    float *block, *next;

    explicit Room(int64_t floats) {
        block = static_cast<float*>(malloc((floats + LINE) * sizeof(float)));
        next = block + (LINE - (uintptr_t)block / sizeof(float) % LINE) % LINE;
    }

    ~Room() { free(block); }

    static int64_t whole(int64_t floats) { return (floats + LINE - 1) / LINE * LINE; }

    float* take(int64_t floats) {
        float* const piece = next;
        next += whole(floats);
        return piece;
    }
};

}  // namespace

// x, out and v_first: [tokens, width]. has_values: whether v_first is what a layer before has given; if not,
// the first of these layers writes it. shift and wkv: of slot 0 and the first of these layers, moved on;
// strides are floats from slot to slot and from layer to layer. ends, slots: [rows]. Returns whether there is
// memory for it; if not, some layers may have moved their slots on.
extern "C" bool rwkv7_layers(const Layer* layers, const float* x, float* out, float* v_first, float* shift,
                             float* wkv, const int64_t* ends, const int64_t* slots, int64_t count,
                             int64_t has_values, int64_t shift_of_slot, int64_t shift_of_layer,
                             int64_t wkv_of_slot, int64_t wkv_of_layer, int64_t rows, int64_t width,
                             int threads) {
    const Tokens tokens = {ends, slots, rows, ends[rows - 1], width, threads};
    const int64_t size = Room::whole(tokens.count * width);
    const int64_t most = tokens.count * most_between(layers, count);
    Room room(2 * size + Room::whole(6 * tokens.count * width) + 8 * size + Room::whole(most));
    if (!room.block) return false;
    float* sums[2] = {room.take(size), room.take(size)};
    float* const mixed = room.take(6 * tokens.count * width);
    float *const r = room.take(size), *const w = room.take(size), *const k = room.take(size);
    float *const v_own = room.take(size), *const a = room.take(size), *const g = room.take(size);
    float *const v_mix = room.take(size), *const y = room.take(size), *const between = room.take(most);
    const float* added = nullptr;
    int turn = 0;
    const auto norm_and_mix = [&](const Vectors& norm, const float* amounts, float* slot, int64_t mixes) {
        const bool done = mix(x, added, norm.weight, norm.bias, amounts, sums[turn], nullptr, mixed, slot,
                              ends, ends, slots, shift_of_slot, rows, tokens.count, width, mixes, threads);
        if (!added) return done;
        x = sums[turn];
        turn = 1 - turn;
        return done;
    };
    for (int64_t i = 0; i < count; i++) {
        const Layer& layer = layers[i];
        float* const slot = shift + i * shift_of_layer;
        if (!norm_and_mix(layer.norm, layer.mixes, slot, 6)) return false;
        const auto mix_of = [&](int which) { return mixed + which * tokens.count * width; };
        const bool mixes_values = has_values || i;
        float* const v = mixes_values ? v_own : v_first;
        const bool multiplied = multiply(tokens, layer.receptance, mix_of(0), r) &&
                                multiply(tokens, layer.low_rank[DECAY], mix_of(3), between, w) &&
                                multiply(tokens, layer.key, mix_of(1), k) &&
                                multiply(tokens, layer.value, mix_of(2), v) &&
                                multiply(tokens, layer.low_rank[RATE], mix_of(4), between, a) &&
                                multiply(tokens, layer.low_rank[GATE], mix_of(5), between, g);
        if (!multiplied) return false;
        if (mixes_values && !multiply(tokens, layer.low_rank[VALUES], mix_of(2), between, v_mix))
            return false;
        wkv7(r, w, k, v, a, g, mixes_values ? v_mix : nullptr, mixes_values ? v_first : nullptr, layer.k_k,
             layer.k_a, layer.k_rest, layer.r_k, layer.group_norm.weight, layer.group_norm.bias, nullptr, y,
             wkv + i * wkv_of_layer, nullptr, ends, ends, slots, wkv_of_slot, rows, width, threads);
        if (!multiply(tokens, layer.output, y, r)) return false;
        added = r;
        const bool fed_forward = norm_and_mix(layer.ffn_norm, layer.ffn_mix, slot + width, 1) &&
                                 multiply(tokens, layer.ffn_key, mixed, between, SQUARED) &&
                                 multiply(tokens, layer.ffn_value, between, y);
        if (!fed_forward) return false;
        added = y;
    }
    for (int64_t i = 0; i < tokens.count * width; i++) out[i] = x[i] + added[i];
    return true;
}
