// What the scans of wkv_prefill.cuh share: a chunk's effect on 16 rows of S, which a warp holds in registers.
#pragma once
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
