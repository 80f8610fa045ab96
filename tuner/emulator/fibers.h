// How threads meet: between the scheduler (fibers.cpp) and what meets (collectives.cpp).
#pragma once
#include "runtime.h"

namespace emulator {

// Lanes that wait for the rest of `mask` at one collective.
struct Group {
    const char* name;
    int line;
    std::uint32_t mask, arrived;
};

// A warp, and what its lanes bring to a collective and take from it: bits and the lane to read from (shuffles), words and
// accumulators (products).
struct Warp {
    Group groups[lanes];
    int count;
    std::uint32_t ended, at_barrier;
    std::uint64_t in[lanes], out[lanes];
    int source[lanes];
    std::uint32_t a[lanes][4], b[lanes][2];
    float* c[lanes];
};

Warp& own_warp();

// Notes that the running thread has come to a collective, of which calls with one name, line and mask belong together. True
// for the last lane of the mask: it does the work and calls release. Everyone then calls yield, to wait for its turn.
bool arrive(const char* name, std::uint32_t mask, int line);
void release(std::uint32_t mask);
void pause(const char* name, int line);  // the running thread waits until another one resumes it
void resume(int thread);
void yield();

template <typename Work> void meet(const char* name, std::uint32_t mask, int line, Work work) {
    if (arrive(name, mask, line)) {
        work(own_warp());
        release(mask);
    }
    yield();
}

// Calls f for each lane of a mask.
template <typename F> void each_lane(std::uint32_t mask, F f) {
    for (; mask; mask &= mask - 1) f(__builtin_ctz(mask));
}

// Reports that the running thread and `other` do not meet; `format` takes one or two names of collectives.
[[noreturn]] void diverged(int line, int other, const char* format, const char* first, const char* second = "");

}  // namespace emulator
