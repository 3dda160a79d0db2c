// A GPU for tests: blocks run one after the other, their threads as fibers that change places where they wait
// for each other.
//
// A warp has 32 lanes, as in CUDA. What a real GPU may do in any order happens in one order here, so races
// are not found; what lanes exchange, and who waits for whom, is as it is there. A wait that can never end is
// reported.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

struct uint3 {
    unsigned x, y, z;
};

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline uint3 threadIdx, blockIdx;
inline dim3 gridDim, blockDim;

namespace emulator {
constexpr int WARP_LANES = 32;
constexpr size_t STACK = 256 << 10, SHARED = 64 << 10;

struct Fiber {
    ucontext_t context;  // to begin with; then `jump`, as a change of contexts is a system call
    jmp_buf jump;
    std::vector<char> stack = std::vector<char>(STACK);
    bool begun = false, done = false;
    int waits = -1;  // for which barrier
    uint64_t word;   // what it shows to the other lanes
};

// Of a block: 0 is __syncthreads, 1 to 15 are named, from 16 on one of each warp.
struct Barrier {
    int arrived = 0;
    unsigned phase = 0;
};

inline std::vector<Fiber> fibers;
inline std::vector<Barrier> barriers;
inline jmp_buf scheduler;
inline int current;
inline std::function<void()> body;
alignas(128) inline char shared[SHARED];

// From a thread to the loop over all, and back.
inline void leave() {
    if (!_setjmp(fibers[current].jump)) _longjmp(scheduler, 1);
}

inline void resume(Fiber& fiber) {
    if (_setjmp(scheduler)) return;
    if (fiber.begun) _longjmp(fiber.jump, 1);
    fiber.begun = true;
    setcontext(&fiber.context);
}

// Until `threads` have come.
inline void meet(int barrier, int threads) {
    Barrier& here = barriers[barrier];
    const unsigned phase = here.phase;
    if (++here.arrived == threads) {
        here.arrived = 0, here.phase++;
        return;
    }
    fibers[current].waits = barrier;
    while (here.phase == phase) leave();
    fibers[current].waits = -1;
}

inline int lanes_of_warp() {
    const int first = threadIdx.x / WARP_LANES * WARP_LANES, rest = int(blockDim.x) - first;
    return rest < WARP_LANES ? rest : WARP_LANES;
}

inline void meet_warp() { meet(16 + threadIdx.x / WARP_LANES, lanes_of_warp()); }

// All lanes of the warp show a word; then each may look at any.
template <typename Look>
auto exchange(uint64_t word, const Look& look) {
    fibers[current].word = word;
    meet_warp();
    const auto result = look(&fibers[threadIdx.x / WARP_LANES * WARP_LANES]);
    meet_warp();
    return result;
}

inline void run_thread() {
    body();
    fibers[current].done = true;
    leave();
}

inline void run_block(int threads) {
    if (fibers.size() < size_t(threads)) fibers = std::vector<Fiber>(threads);
    barriers.assign(16 + (threads + WARP_LANES - 1) / WARP_LANES, {});
    for (int i = 0; i < threads; i++) {
        Fiber& fiber = fibers[i];
        fiber.begun = fiber.done = false, fiber.waits = -1;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, run_thread, 0);
    }
    for (int left = threads; left > 0;) {
        unsigned before = 0, after = 0;
        for (const Barrier& barrier : barriers) before += barrier.phase;
        const int began = left;
        for (current = 0; current < threads; current++) {
            if (fibers[current].done) continue;
            threadIdx = {unsigned(current), 0, 0};
            resume(fibers[current]);
            left -= fibers[current].done;
        }
        for (const Barrier& barrier : barriers) after += barrier.phase;
        if (left && left == began && before == after) {
            for (int i = 0; i < threads; i++)
                if (!fibers[i].done) {
                    fprintf(stderr, "thread %d waits for ever at barrier %d\n", i, fibers[i].waits);
                    abort();
                }
        }
    }
}

template <typename Call>
void run(dim3 grid, dim3 block, const Call& call) {
    gridDim = grid, blockDim = block;
    body = call;
    for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
            for (unsigned x = 0; x < grid.x; x++) {
                blockIdx = {x, y, z};
                run_block(block.x);
            }
}
}  // namespace emulator
