// Bank conflicts of the accesses to shared memory that a run executes, by the model of codegen/layout.py: 32 banks of 4 bytes; a warp's 4-byte
// accesses are served together, 8-byte ones by half warps and 16-byte ones by quarter warps; a group takes as many wavefronts as its fullest
// bank has distinct words. Lanes go together that reach a place of the program as often since they last met, at a barrier or a collective.
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
    long long wavefronts, conflicts;
};

using Place = std::pair<const Kernel*, std::uintptr_t>;
std::map<Key, Site> sites;  // since the block's last barrier
std::map<Place, Total> totals;
std::uint32_t counted_epoch;
const Kernel* counted_kernel;

void add(const Site& site, const Instruction& instruction, Total& total) {
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

void count_access(std::size_t offset, std::size_t bytes, std::uintptr_t place) {
    if (counted_epoch != now.epoch) add_up();
    counted_epoch = now.epoch, counted_kernel = here.kernel;
    Site& site = sites[{place, here.thread / lanes, meetings[here.thread]}];
    site.width = bytes > 4 ? int(bytes / 4) : 1;
    const int lane = here.thread % lanes;
    const std::uint32_t index = site.executed[lane]++;
    if (index == site.instructions.size()) site.instructions.emplace_back();
    Instruction& instruction = site.instructions[index];
    instruction.active |= 1u << lane;
    instruction.words[lane] = std::uint32_t(offset / 4);
}

// In cuda_host.h an asynchronous copy is a loop over words; for the banks it is one access.
void count_copy(const void* to, int bytes, int line) {
    const std::size_t offset = std::size_t(static_cast<const char*>(to) - reinterpret_cast<const char*>(shared));
    if (count_conflicts && offset < max_shared_bytes) count_access(offset, std::size_t(bytes), std::uintptr_t(line) | by_line);
}

void report_conflicts() {
    add_up();
    for (const auto& [place, total] : totals)
        report_total(place.first->name, place.second & ~by_line, place.second & by_line, total.wavefronts, total.conflicts);
}

}  // namespace emulator
