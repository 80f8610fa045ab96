// The emulator's inside: what its translation units share. Nothing here is seen by the emulated source.
#pragma once
#include <cstddef>
#include <cstdint>

namespace emulator {

constexpr int lanes = 32;
constexpr int max_threads = 1024;
constexpr int max_warps = max_threads / lanes;
constexpr std::size_t max_shared_bytes = 256 * 1024;
constexpr std::size_t stack_bytes = 256 * 1024;  // of one thread, its guard page included

constexpr int max_pointers = 24;

// The launch table that stands behind the emulated source, one entry a kernel (see codegen/render.py for the arguments).
struct Kernel {
    const char* name;
    void (*entry)(void* const* pointers, int items);
    int pointers;
    int threads;
    std::size_t shared_bytes;
    bool dependent_launch;
};

struct Arguments {
    void* pointers[max_pointers];
    int items;
};

// Who runs. Blocks run one after another, so one of these is enough. thread is -1 outside of kernels.
struct Position {
    const Kernel* kernel = nullptr;
    int grid = 0, block = 0, threads = 0, thread = -1;
};
extern Position here;

// Time. `epoch` grows at each block's start and each block-wide barrier and never repeats: accesses of one block in
// different epochs are ordered. Within an epoch, threads of different warps are unordered; lanes of a warp are ordered by
// vector clocks: lane_clock is a thread's own time, known[t][l] the time of lane l that is over for thread t.
struct Clock {
    std::uint32_t epoch = 0, block_epoch = 0, launch_epoch = 0;
    std::uint32_t previous_kernel = 0;  // epoch in which a thread of the block first waited for the previous kernel, or 0
};
extern Clock now;
extern std::uint32_t lane_clock[max_threads];
extern std::uint32_t known[max_threads][lanes];
extern std::uint32_t meetings[max_threads];  // warp collectives that the thread has called
extern bool waited[max_threads];  // whether the thread itself waited for the previous kernel

// fibers.cpp
enum class Order { forward, reverse, random };
void start_fibers(Order order, std::uint64_t seed);
void run_block(const Arguments& arguments);
char* own_stack();            // of the thread that runs
bool in_stacks(const void* address);
bool in_guard(const void* address);

// copies.cpp
void forget_copies(int thread);
[[noreturn]] void misaligned_copy(int bytes, int line);

// warpgroup.cpp
void forget_products(int thread);

// memory.cpp
// Accesses of the asynchronous units on the running thread's behalf. They see what a thread has written itself only after its
// fence_async_proxy() (PTX ISA, "Async proxy").
void read_by_async_proxy(const void* address, int bytes, const void* pc);
void write_by_async_proxy(const void* address, int bytes, const void* pc);
void order_async_writes(const void* shared_address, int bytes);  // they are complete, and someone has waited for them
extern bool check_races;
void add_region(std::size_t elements, std::size_t size, bool writable);  // size: bytes of an element; all are added before map_regions
void map_regions();
void* region_data(int region);
std::size_t region_bytes(int region);
int block_of_epoch(std::uint32_t epoch);
void begin_launch();
void begin_block();

// conflicts.cpp: bank conflicts of what is executed. place: a return address, or a line of the source with the flag by_line
constexpr std::uintptr_t by_line = std::uintptr_t(1) << 63;
extern bool count_conflicts;
// of the running thread, to shared memory; line: of global memory, counted in 128 bytes, that it is copied from
void count_access(std::size_t offset, std::size_t bytes, std::uintptr_t place, std::uintptr_t line = 0);
void report_conflicts();

// report.cpp: a report is a few "key value" lines, and ends the process. With an access, its text goes on from "reads n bytes
// of a place, which"; without, from the thread
struct Access {
    const char* verb;     // "reads" or "writes"
    int region;           // index of a region, or one of the two below
    std::ptrdiff_t byte;  // within the region
    int bytes;
};
constexpr int shared_memory = -1, nowhere = -2;

struct Fact {
    const char* key;
    long long value;
};
void open_report(const char* path);
[[noreturn]] void report(const char* kind, const void* pc, const Access* access, const char* text, const Fact* facts = nullptr,
                         int count = 0);
void report_total(const char* kernel, std::uintptr_t place, bool is_line, long long wavefronts, long long conflicts, long long splits);
void catch_signals(int seconds);

}  // namespace emulator

extern "C" {
extern const emulator::Kernel emulator_kernels[];
extern const int emulator_kernel_count;
extern float shared[];
}
