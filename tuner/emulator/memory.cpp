// Checks of every access to memory. The emulated source is compiled with sanitizers (tuner/emulator_build.py); the functions
// that such code calls are defined here instead of in the sanitizers' libraries.
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "runtime.h"

// Dynamic shared memory: the `extern __shared__ float shared[]` of the emulated source.
extern "C" alignas(4096) float shared[emulator::max_shared_bytes / sizeof(float)];
float shared[emulator::max_shared_bytes / sizeof(float)];
extern "C" char __executable_start, _end;

namespace emulator {

bool check_races = true;

namespace {

constexpr std::uint16_t none = 0xffff;
using Address = std::uintptr_t;

// What is known of a word: 4 bytes, or an element of a region whose elements are smaller. Epochs never repeat, so nothing has to be cleared between blocks or launches.
// first_read is the epoch of the launch's first read, for conflicts between blocks.
struct Word {
    std::uint32_t write_epoch, write_clock, write_pc;
    std::uint32_t read_epoch, read_clock, read_pc;
    std::uint32_t read_lanes, first_read;
    std::uint16_t write_thread, read_thread, other_reader;  // other_reader: a reader of another warp than read_thread's
    std::uint16_t write_fence;  // fences of the writer before it wrote, or async: written by the asynchronous units
};
constexpr std::uint16_t async = 0xffff;
std::uint16_t fences[2][max_threads];  // that each thread has called, of shared and of global memory

struct Region {
    std::size_t bytes, unit;  // unit: bytes of a word
    bool writable;
    std::size_t offset;  // from the arena's start
    std::vector<Word> shadow;
};

constexpr std::size_t page = 4096, gap = 1 << 20;
std::vector<Region> regions;
std::vector<std::int16_t> region_of_page;
char* arena;
std::size_t arena_bytes = gap;
Word shared_shadow[max_shared_bytes / 4];
std::vector<std::uint32_t> block_starts;  // epoch in which each block of the launch began

std::uint32_t short_pc(const void* pc) { return std::uint32_t(reinterpret_cast<Address>(pc)); }

// Whether an access of this epoch, by `thread` at its time `clock`, is unordered with the thread that runs.
bool concurrent(int thread, std::uint32_t clock) {
    if (thread == here.thread || thread == none) return false;
    if (thread / lanes != here.thread / lanes) return true;
    return known[here.thread][thread % lanes] < clock;
}

bool other_block(std::uint32_t epoch) { return epoch >= now.launch_epoch && epoch < now.block_epoch; }

[[noreturn, gnu::cold, gnu::noinline]] void race(const void* pc, const Access& access, const char* text, int thread, std::uint32_t other_pc) {
    const Fact facts[] = {{"other_thread", thread}, {"other_pc", other_pc}};
    report("race", pc, &access, text, facts, 2);
}

[[noreturn, gnu::cold, gnu::noinline]] void conflict(const void* pc, const Access& access, const char* text, std::uint32_t epoch, std::uint32_t other_pc) {
    const Fact facts[] = {{"other_block", block_of_epoch(epoch)}, {"other_pc", other_pc}};
    report("block_conflict", pc, &access, text, facts, other_pc ? 2 : 1);
}

template <bool write, bool global, bool by_async = false> inline void touch(Word& word, const void* pc, const Access& access) {
    if (!write && word.write_epoch < (global ? 1 : now.block_epoch)) report("uninitialised", pc, &access, "nothing has written");
    if (!check_races) {
        if (write) word.write_epoch = now.epoch;
        return;
    }
    if (word.write_epoch == now.epoch && concurrent(word.write_thread, word.write_clock))
        race(pc, access, "another thread wrote, with no barrier between", word.write_thread, word.write_pc);
    if (by_async && !write && (!global || word.write_epoch >= now.block_epoch) && word.write_fence != async && word.write_fence == fences[global][word.write_thread])
        race(pc, access, global ? "a thread wrote without fence_async_proxy_global() since" : "a thread wrote without fence_async_proxy() since", word.write_thread, word.write_pc);
    if (global && other_block(word.write_epoch)) conflict(pc, access, "another block of the launch wrote", word.write_epoch, word.write_pc);
    const std::uint32_t self = 1u << here.thread % lanes, clock = lane_clock[here.thread];
    if (write) {
        if (word.read_epoch == now.epoch) {
            if (word.read_thread / lanes != here.thread / lanes)
                race(pc, access, "another thread read, with no barrier between", word.read_thread, word.read_pc);
            if (word.other_reader != none)
                race(pc, access, "another thread read, with no barrier between", word.other_reader, word.read_pc);
            for (std::uint32_t left = word.read_lanes & ~self; left; left &= left - 1) {
                const int thread = (here.thread & ~(lanes - 1)) + __builtin_ctz(left);
                if (concurrent(thread, word.read_clock))
                    race(pc, access, "another thread read, with no barrier between", thread, word.read_pc);
            }
        }
        if (global && other_block(word.first_read)) conflict(pc, access, "another block of the launch read", word.first_read, 0);
        word.write_epoch = now.epoch, word.write_clock = clock, word.write_pc = short_pc(pc), word.write_thread = std::uint16_t(here.thread);
        word.write_fence = by_async ? async : fences[global][here.thread];
        word.read_epoch = 0;
        return;
    }
    if (global && word.first_read < now.launch_epoch) word.first_read = now.epoch;
    if (word.read_epoch == now.epoch && word.read_thread / lanes != here.thread / lanes) {
        word.other_reader = std::uint16_t(here.thread);
        return;
    }
    if (word.read_epoch == now.epoch && word.read_clock == clock) {
        word.read_lanes |= self;
        return;
    }
    // The warp's first reader, or the first since it met at __syncwarp: reads before that are ordered before this one,
    // so that a write that is ordered after this one is ordered after them too. (After a __syncwarp of some lanes
    // only, the reads of the others are forgotten here: such a race is found in another order of scheduling.)
    if (word.read_epoch != now.epoch) word.other_reader = none;
    word.read_epoch = now.epoch, word.read_clock = clock, word.read_pc = short_pc(pc), word.read_lanes = self;
    word.read_thread = std::uint16_t(here.thread);
}

[[noreturn, gnu::cold, gnu::noinline]] void out_of_bounds(Address address, int bytes, bool write, const void* pc) {
    const char* verb = write ? "writes" : "reads";
    // The nearest region says what was probably meant.
    int nearest = nowhere;
    std::ptrdiff_t offset = std::ptrdiff_t(address), least = std::ptrdiff_t(gap);
    const auto consider = [&](int region, Address start, std::size_t size) {
        const std::ptrdiff_t from_start = std::ptrdiff_t(address - start);
        const std::ptrdiff_t distance = std::max(-from_start, from_start + bytes - std::ptrdiff_t(size));
        if (distance < least) least = distance, nearest = region, offset = from_start;
    };
    consider(shared_memory, reinterpret_cast<Address>(shared), here.kernel->shared_bytes);
    for (std::size_t i = 0; i < regions.size(); ++i) consider(int(i), reinterpret_cast<Address>(arena + regions[i].offset), regions[i].bytes);
    const Access access{verb, nearest, offset, bytes};
    report("out_of_bounds", pc, &access, in_stacks(reinterpret_cast<void*>(address)) ? "is another thread's local memory" : "is out of bounds");
}

template <bool write, bool by_async> inline void touch_global(Address address, int bytes, const void* pc) {
    const std::size_t position = address - reinterpret_cast<Address>(arena);
    const int index = position < arena_bytes ? region_of_page[position / page] : nowhere;
    if (index < 0) {
        // Constants that the compiler placed in the program itself may be read.
        const bool own = address >= reinterpret_cast<Address>(&__executable_start) && address < reinterpret_cast<Address>(&_end);
        if (own && !write) return;
        out_of_bounds(address, bytes, write, pc);
    }
    Region& region = regions[std::size_t(index)];
    const std::size_t offset = position - region.offset;
    if (offset + std::size_t(bytes) > region.bytes) out_of_bounds(address, bytes, write, pc);
    const Access access{write ? "writes" : "reads", index, std::ptrdiff_t(offset), bytes};
    if (!region.writable) {
        if (write) report("read_only", pc, &access, "is read-only in this launch");
        return;
    }
    if (here.kernel->dependent_launch && !waited[here.thread] && (!now.previous_kernel || now.previous_kernel == now.epoch))
        report("previous_kernel", pc, &access, "may still be in use by the previous kernel: wait_for_previous_kernel() was not called before");
    for (std::size_t word = offset / region.unit; word <= (offset + std::size_t(bytes) - 1) / region.unit; ++word)
        touch<write, true, by_async>(region.shadow[word], pc, access);
}

template <bool write, bool by_async = false, bool counted = !by_async> inline void check(const void* pointer, std::size_t bytes, const void* pc) {
    const Address address = reinterpret_cast<Address>(pointer);
    const std::size_t offset = address - reinterpret_cast<Address>(shared);
    if (offset < max_shared_bytes) {
        if (offset + bytes > here.kernel->shared_bytes) out_of_bounds(address, int(bytes), write, pc);
        const Access access{write ? "writes" : "reads", shared_memory, std::ptrdiff_t(offset), int(bytes)};
        for (std::size_t word = offset / 4; word <= (offset + bytes - 1) / 4; ++word) touch<write, false, by_async>(shared_shadow[word], pc, access);
        if (counted && count_conflicts) count_access(offset, bytes, reinterpret_cast<Address>(pc));
        return;
    }
    if (address - reinterpret_cast<Address>(own_stack()) < stack_bytes - page) return;
    touch_global<write, by_async>(address, int(bytes), pc);
}

}  // namespace

void fence_async_proxy(bool global) { fences[global][here.thread] = std::uint16_t((fences[global][here.thread] + 1) % async); }

void read_by_async_proxy(const void* address, int bytes, const void* pc) { check<false, true>(address, std::size_t(bytes), pc); }
void order_async_writes(const void* address, int bytes) {
    const std::size_t first = (reinterpret_cast<Address>(address) - reinterpret_cast<Address>(shared)) / 4;
    for (std::size_t word = first; word < first + std::size_t(bytes) / 4; ++word) shared_shadow[word].write_thread = none;
}
void write_by_async_proxy(const void* address, int bytes, const void* pc) { check<true, true>(address, std::size_t(bytes), pc); }
void write_by_copy(float* to, float value) {
    check<true, false, false>(to, sizeof value, __builtin_return_address(0));
    *to = value;
}

void add_region(std::size_t elements, std::size_t size, bool writable) {
    const std::size_t bytes = elements * size;
    regions.push_back({bytes, size < 4 ? size : 4, writable, arena_bytes, {}});
    arena_bytes += (bytes + page - 1) / page * page + gap;
}

void map_regions() {
    void* memory = mmap(nullptr, arena_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) std::perror("regions"), std::exit(1);
    arena = static_cast<char*>(memory);
    region_of_page.assign(arena_bytes / page, std::int16_t(nowhere));
    for (std::size_t i = 0; i < regions.size(); ++i) {
        Region& region = regions[i];
        mprotect(arena + region.offset, region.bytes, PROT_READ | PROT_WRITE);
        std::fill_n(region_of_page.begin() + std::ptrdiff_t(region.offset / page), (region.bytes + page - 1) / page, std::int16_t(i));
        if (region.writable) region.shadow.resize((region.bytes + region.unit - 1) / region.unit);
    }
}

void* region_data(int region) { return arena + regions[std::size_t(region)].offset; }
std::size_t region_bytes(int region) { return regions[std::size_t(region)].bytes; }

void begin_launch() {
    now.launch_epoch = now.epoch + 1;
    block_starts.clear();
}

void begin_block() {
    now.block_epoch = ++now.epoch;
    block_starts.push_back(now.epoch);
}

int block_of_epoch(std::uint32_t epoch) {
    return int(std::upper_bound(block_starts.begin(), block_starts.end(), epoch) - block_starts.begin()) - 1;
}

}  // namespace emulator

// -fsanitize=thread
#define HOOK(bytes)                                                                                                                    \
    void __tsan_read##bytes(void* p) { emulator::check<false>(p, bytes, __builtin_return_address(0)); }                                \
    void __tsan_write##bytes(void* p) { emulator::check<true>(p, bytes, __builtin_return_address(0)); }                                \
    void __tsan_unaligned_read##bytes(void* p) { emulator::check<false>(p, bytes, __builtin_return_address(0)); }                      \
    void __tsan_unaligned_write##bytes(void* p) { emulator::check<true>(p, bytes, __builtin_return_address(0)); }
extern "C" {
HOOK(1)
HOOK(2)
HOOK(4)
HOOK(8)
HOOK(16)
void __tsan_read_range(void* p, std::size_t bytes) {
    if (bytes) emulator::check<false>(p, bytes, __builtin_return_address(0));
}
void __tsan_write_range(void* p, std::size_t bytes) {
    if (bytes) emulator::check<true>(p, bytes, __builtin_return_address(0));
}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit(void*) {}
void __tsan_init() {}

// -fsanitize=alignment,bounds,signed-integer-overflow,integer-divide-by-zero: each handler's data begins with the place in the source.
struct Place {
    const char* file;
    std::uint32_t line, column;
};
struct Mismatch {
    Place place;
    const void* type;
    unsigned char log_alignment, kind;
};

// Local arrays live in registers on a GPU, where the alignment that a vector type asks for has no meaning.
void __ubsan_handle_type_mismatch_v1(Mismatch* data, std::uintptr_t address) {
    if (emulator::in_stacks(reinterpret_cast<void*>(address))) return;
    const emulator::Fact facts[] = {{"line", data->place.line}, {"alignment", 1ll << data->log_alignment}, {"address", (long long)address}};
    emulator::report("misaligned", nullptr, nullptr, "touches memory at an address that is not a multiple of the type's alignment", facts, 3);
}
void __ubsan_handle_out_of_bounds(Place* place, std::uintptr_t index) {
    const emulator::Fact facts[] = {{"line", place->line}, {"index", (long long)index}};
    emulator::report("out_of_bounds", nullptr, nullptr, "indexes a local array out of its bounds", facts, 2);
}
#define OVERFLOW(name, text)                                                                                                                 \
    void __ubsan_handle_##name##_overflow(Place* place, std::uintptr_t, std::uintptr_t) {                                              \
        const emulator::Fact at{"line", place->line};                                                                                  \
        emulator::report("overflow", nullptr, nullptr, text, &at, 1);                                          \
    }
OVERFLOW(add, "overflows a signed integer")
OVERFLOW(sub, "overflows a signed integer")
OVERFLOW(mul, "overflows a signed integer")
OVERFLOW(negate, "overflows a signed integer")
OVERFLOW(divrem, "divides an integer by zero, or the least one by -1")
}
