// Bank conflicts of the accesses to shared memory that a run executes, by the model of codegen/layout.py: 32 banks of 4 bytes; a warp's 4-byte
// accesses are served together, 8-byte ones by half warps and 16-byte ones by quarter warps; a group takes as many wavefronts as its fullest
// bank has distinct words. Of asynchronous copies also those writes are counted into which lines of global memory are split: what a warp copies of
// 128 bytes of these arrives together, and is written once for each 128 bytes of shared memory that it touches.
// Lanes go together that reach a place of the program as often since they last met, at a barrier or a collective.
#include <algorithm>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "runtime.h"

namespace emulator {

bool count_conflicts = false;

namespace {

struct Instruction {  // one execution by a warp
    std::uint32_t active = 0, words[lanes];  // of each active lane: its first word
    std::uintptr_t lines[lanes];             // and the line of global memory that it copies from, or 0
};

struct Key {
    std::uintptr_t place;
    int warp;
    std::uint32_t meetings;  // of its lanes until then

    bool operator<(const Key& other) const { return std::tie(place, warp, meetings) < std::tie(other.place, other.warp, other.meetings); }
};

struct Site {  // a place of the program where a warp is between two meetings
    int width;  // words of an access
    std::vector<Instruction> instructions;
    std::uint32_t executed[lanes];  // by each lane
};

struct Total {
    long long wavefronts, conflicts, splits;
};

using Place = std::pair<const Kernel*, std::uintptr_t>;
std::map<Key, Site> sites;  // since the block's last barrier
std::map<Place, Total> totals;
std::uint32_t counted_epoch;
const Kernel* counted_kernel;

void add_splits(const Instruction& instruction, Total& total) {
    std::vector<std::pair<std::uintptr_t, std::uint32_t>> writes;  // line of global memory, line of shared memory
    for (int lane = 0; lane < lanes; ++lane)
        if (instruction.active >> lane & 1 && instruction.lines[lane]) writes.emplace_back(instruction.lines[lane], instruction.words[lane] / 32);
    std::sort(writes.begin(), writes.end());
    writes.erase(std::unique(writes.begin(), writes.end()), writes.end());
    for (std::size_t i = 1; i < writes.size(); ++i) total.splits += writes[i].first == writes[i - 1].first;
}

void add(const Site& site, const Instruction& instruction, Total& total) {
    add_splits(instruction, total);
    std::vector<std::uint32_t> words;
    const int group = lanes / site.width;
    for (int start = 0; start < lanes; start += group) {
        words.clear();
        for (int lane = start; lane < start + group; ++lane)
            if (instruction.active >> lane & 1)
                for (int i = 0; i < site.width; ++i) words.push_back(instruction.words[lane] + std::uint32_t(i));
        if (words.empty()) continue;
        std::sort(words.begin(), words.end());
        words.erase(std::unique(words.begin(), words.end()), words.end());
        int banks[32] = {};
        for (const std::uint32_t word : words) ++banks[word % 32];
        const int fullest = *std::max_element(banks, banks + 32);
        total.wavefronts += fullest, total.conflicts += fullest - 1;
    }
}

void add_up() {
    for (const auto& [key, site] : sites)
        for (const Instruction& instruction : site.instructions) add(site, instruction, totals[{counted_kernel, key.place}]);
    sites.clear();
}

}  // namespace

void count_access(std::size_t offset, std::size_t bytes, std::uintptr_t place, std::uintptr_t line) {
    if (counted_epoch != now.epoch) add_up();
    counted_epoch = now.epoch, counted_kernel = here.kernel;
    Site& site = sites[{place, here.thread / lanes, meetings[here.thread]}];
    site.width = bytes > 4 ? int(bytes / 4) : 1;
    const int lane = here.thread % lanes;
    const std::uint32_t index = site.executed[lane]++;
    if (index == site.instructions.size()) site.instructions.emplace_back();
    Instruction& instruction = site.instructions[index];
    instruction.active |= 1u << lane;
    instruction.words[lane] = std::uint32_t(offset / 4), instruction.lines[lane] = line;
}

// In cuda_host.h an asynchronous copy is a loop over words; for the banks it is one access. Copies of less than 16 bytes go another way, through L1.
void count_copy(const void* to, const void* from, int bytes, int line) {
    const std::size_t offset = std::size_t(static_cast<const char*>(to) - reinterpret_cast<const char*>(shared));
    if (!count_conflicts || offset >= max_shared_bytes) return;
    count_access(offset, std::size_t(bytes), std::uintptr_t(line) | by_line, bytes == 16 ? std::uintptr_t(from) / 128 : 0);
}

void report_conflicts() {
    add_up();
    for (const auto& [place, total] : totals)
        report_total(place.first->name, place.second & ~by_line, place.second & by_line, total.wavefronts, total.conflicts, total.splits);
}

}  // namespace emulator
