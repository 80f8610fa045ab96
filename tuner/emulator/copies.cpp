// Asynchronous copies (PTX ISA, cp.async): what each thread has started and not yet waited for. The copying itself is done in
// cuda_host.h, where it is checked like any other access.
#include <vector>

#include "runtime.h"

namespace emulator {

// As cuda_host.h has it, whose names must not leak into this file.
struct Copy {
    float* to;
    const float* from;
    int words;
    bool real;
};

namespace {

struct Started {
    Copy copy;
    int group;
};

struct Copies {
    std::vector<Started> started;
    std::size_t first = 0;  // the oldest that is still under way
    int group = 0;          // of the next copy; those before are committed
};
Copies copies[max_threads];

}  // namespace

void forget_copies(int thread) {
    copies[thread].started.clear();
    copies[thread].first = 0;
    copies[thread].group = 0;
}

void misaligned_copy(int bytes, int line) {
    const Fact facts[] = {{"line", line}, {"alignment", bytes}};
    report("misaligned", nullptr, nullptr, "copies asynchronously from or to an address that is not a multiple of the copy's size", facts, 2);
}

void start_copy(const Copy& copy) {
    Copies& own = copies[here.thread];
    own.started.push_back({copy, own.group});
}

void commit_copies() { ++copies[here.thread].group; }

bool next_copy(int groups, Copy& copy) {
    Copies& own = copies[here.thread];
    if (own.first == own.started.size() || own.started[own.first].group >= own.group - groups) return false;
    copy = own.started[own.first++].copy;
    if (own.first == own.started.size()) own.started.clear(), own.first = 0;
    return true;
}

}  // namespace emulator
