// Threads of a block as fibers: switching, scheduling and meeting.
//
// A thread runs until it has to meet others. Whoever waits for a thread that waits elsewhere or has ended would wait for
// ever (or get garbage) on a GPU; that is reported the moment it is certain.
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "fibers.h"
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace emulator {

Position here;
Clock now;
std::uint32_t lane_clock[max_threads];
std::uint32_t known[max_threads][lanes];
std::uint32_t meetings[max_threads];
bool waited[max_threads];

#if defined(__x86_64__)
// System V ABI: rbx, rbp and r12 to r15 survive a call; the rest is the caller's business.
extern "C" void emulator_switch(void** save, void* load);
asm(R"(
.text
.type emulator_switch, @function
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulator_switch, .-emulator_switch
)");
struct Context {
    void* top = nullptr;
    void prepare(char* stack, std::size_t bytes, void (*entry)()) {
        void** slot = reinterpret_cast<void**>(stack + bytes) - 2;  // so that entry finds the stack as after a call
        *slot = reinterpret_cast<void*>(entry);
        for (int i = 0; i < 6; ++i) *--slot = nullptr;
        top = slot;
    }
    void go(Context& to) { emulator_switch(&top, to.top); }
};
#else
struct Context {
    ucontext_t context;
    void prepare(char* stack, std::size_t bytes, void (*entry)()) {
        getcontext(&context);
        context.uc_stack.ss_sp = stack;
        context.uc_stack.ss_size = bytes;
        context.uc_link = nullptr;
        makecontext(&context, entry, 0);
    }
    void go(Context& to) { swapcontext(&context, &to.context); }
};
#endif

enum class State : std::uint8_t { running, meeting, barrier, ended };

struct Thread {
    Context context;
    State state;
    const char* name;  // what it waits at
    int line;
};

static Thread threads[max_threads];
static Warp warps[max_warps];
static std::uint32_t ready[max_warps], ready_warps;
static int at_barrier, ended, barrier_line, barrier_thread;
static Context scheduler;
static Arguments arguments;
static char* stacks;
static Order order;
static std::uint64_t random_state;
constexpr std::size_t page = 4096;

char* own_stack() { return stacks + std::size_t(here.thread) * stack_bytes + page; }

bool in_stacks(const void* address) {
    return std::size_t(static_cast<const char*>(address) - stacks) < std::size_t(max_threads) * stack_bytes;
}

bool in_guard(const void* address) {
    return in_stacks(address) && std::size_t(static_cast<const char*>(address) - stacks) % stack_bytes < page;
}

void start_fibers(Order wanted, std::uint64_t seed) {
    order = wanted;
    random_state = seed * 2 + 1;
    const std::size_t bytes = std::size_t(max_threads) * stack_bytes;
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) std::perror("stacks"), std::exit(1);
    stacks = static_cast<char*>(memory);
    for (int t = 0; t < max_threads; ++t) mprotect(stacks + std::size_t(t) * stack_bytes, page, PROT_NONE);
}

static int random_bit(std::uint32_t bits) {
    random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
    int skip = int((random_state >> 33) % unsigned(__builtin_popcount(bits)));
    while (skip--) bits &= bits - 1;
    return __builtin_ctz(bits);
}

static int pick(std::uint32_t bits) {
    if (order == Order::random) return random_bit(bits);
    return order == Order::forward ? __builtin_ctz(bits) : 31 - __builtin_clz(bits);
}

static void set_ready(int thread) {
    threads[thread].state = State::running;
    ready[thread / lanes] |= 1u << thread % lanes;
    ready_warps |= 1u << thread / lanes;
}

static void set_waiting(State state, const char* name, int line) {
    const int warp = here.thread / lanes;
    threads[here.thread].state = state;
    threads[here.thread].name = name;
    threads[here.thread].line = line;
    if (!(ready[warp] &= ~(1u << here.thread % lanes))) ready_warps &= ~(1u << warp);
}

void yield() {
    Context& from = threads[here.thread].context;
    if (!ready_warps) {
        if (ended == here.threads) from.go(scheduler);
        report("deadlock", nullptr, nullptr, "no thread of the block can go on");
    }
    const int warp = pick(ready_warps);
    const int next = warp * lanes + pick(ready[warp]);
    const int self = here.thread;
    if (next == self) return;
    here.thread = next;
    from.go(threads[next].context);
    here.thread = self;
}

void diverged(int line, int other, const char* format, const char* first, const char* second) {
    char text[256];
    std::snprintf(text, sizeof text, format, first, second);
    const Fact facts[] = {{"line", line}, {"other_thread", other}, {"other_line", threads[other].line}};
    report("divergence", nullptr, nullptr, text, facts, threads[other].state == State::ended ? 2 : 3);
}

static int first_lane(std::uint32_t bits) { return here.thread / lanes * lanes + __builtin_ctz(bits); }

Warp& own_warp() { return warps[here.thread / lanes]; }

bool arrive(const char* name, std::uint32_t mask, int line) {
    Warp& warp = own_warp();
    const std::uint32_t self = 1u << here.thread % lanes;
    const Fact at{"line", line};
    ++meetings[here.thread];
    if (!(mask & self)) report("divergence", nullptr, nullptr, "calls a warp collective with a mask that leaves out its own lane", &at, 1);
    if (const std::uint32_t gone = mask & warp.ended) diverged(line, first_lane(gone), "waits at %s for a thread that has ended", name);
    if (const std::uint32_t held = mask & warp.at_barrier)
        diverged(line, first_lane(held), "waits at %s for a thread that waits at %s", name, "__syncthreads");
    int index = 0;
    for (; index < warp.count; ++index) {
        const Group& group = warp.groups[index];
        if (group.mask == mask && group.line == line && group.name == name) break;
        if ((group.mask & self) || (mask & group.arrived)) {
            const int other = first_lane(group.arrived);
            if (group.mask != mask)
                diverged(line, other, "calls %s with another mask than a lane it has to meet, which waits at %s", name, group.name);
            diverged(line, other, "calls %s where a lane that it has to meet waits at another call of %s", name, group.name);
        }
    }
    if (index == warp.count) warp.groups[warp.count++] = {name, line, mask, 0};
    Group& group = warp.groups[index];
    group.arrived |= self;
    if (group.arrived != mask) {
        set_waiting(State::meeting, name, line);
        return false;
    }
    group = warp.groups[--warp.count];
    return true;
}

void release(std::uint32_t mask) {
    const int base = here.thread & ~(lanes - 1);
    for (std::uint32_t left = mask; left; left &= left - 1) set_ready(base + __builtin_ctz(left));
}

void pause(const char* name, int line) {
    set_waiting(State::meeting, name, line);
    yield();
}

void resume(int thread) { set_ready(thread); }

static void run_thread() {
    here.kernel->entry(arguments.pointers, arguments.items);
    Warp& warp = warps[here.thread / lanes];
    const std::uint32_t self = 1u << here.thread % lanes;
    set_waiting(State::ended, "its end", 0);
    warp.ended |= self;
    ++ended;
    for (int i = 0; i < warp.count; ++i)
        if (warp.groups[i].mask & self)
            diverged(0, first_lane(warp.groups[i].arrived), "ends while lanes of its warp wait for it at %s", warp.groups[i].name);
    if (at_barrier) diverged(0, barrier_thread, "ends while threads of its block wait for it at %s", "__syncthreads");
    yield();
    std::abort();  // an ended thread is never resumed
}

void run_block(const Arguments& wanted) {
    arguments = wanted;
    at_barrier = ended = 0;
    ready_warps = 0;
    now.previous_kernel = 0;
    begin_block();
    std::memset(static_cast<void*>(shared), 0xff, here.kernel->shared_bytes);
    for (int t = 0; t < here.threads; ++t) {
        if (t % lanes == 0) {
            ready[t / lanes] = 0;
            warps[t / lanes].count = 0;
            warps[t / lanes].at_barrier = warps[t / lanes].ended = 0;
        }
        here.thread = t;
        threads[t].context.prepare(own_stack(), stack_bytes - page, run_thread);
        lane_clock[t] = 1;
        std::memset(known[t], 0, sizeof known[t]);
        waited[t] = false;
        meetings[t] = 0;
        forget_copies(t);
        forget_products(t);
        set_ready(t);
    }
    const int warp = pick(ready_warps);
    here.thread = warp * lanes + pick(ready[warp]);
    scheduler.go(threads[here.thread].context);
    here.thread = -1;
}

void sync_block(int line) {
    Warp& warp = warps[here.thread / lanes];
    const std::uint32_t self = 1u << here.thread % lanes;
    for (int i = 0; i < warp.count; ++i)
        if (warp.groups[i].mask & self)
            diverged(line, first_lane(warp.groups[i].arrived), "waits at __syncthreads where lanes of its warp wait for it at %s",
                     warp.groups[i].name);
    if (ended) {
        int other = 0;
        while (threads[other].state != State::ended) ++other;
        diverged(line, other, "waits at %s for a thread that has ended", "__syncthreads");
    }
    if (at_barrier && line != barrier_line)
        diverged(line, barrier_thread, "calls %s where other threads of the block wait at another call of it", "__syncthreads");
    if (!at_barrier) barrier_line = line, barrier_thread = here.thread;
    warp.at_barrier |= self;
    if (++at_barrier < here.threads) {
        set_waiting(State::barrier, "__syncthreads", line);
    } else {
        at_barrier = 0;
        ++now.epoch;
        for (int t = 0; t < here.threads; ++t) set_ready(t);
        for (int w = 0; w * lanes < here.threads; ++w) warps[w].at_barrier = 0;
    }
    yield();
}

}  // namespace emulator
