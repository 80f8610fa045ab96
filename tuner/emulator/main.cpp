// The emulator's program: reads a plan and the input, runs the launches, writes the output. Arguments: plan input output report.
//
// The plan is a text of one item a line:
//   order forward|reverse|random SEED
//   races 0|1
//   conflicts 0|1               whether to count bank conflicts, which are written to the report: kernel, place, wavefronts, conflicts, splits
//   limit SECONDS
//   region WRITABLE ELEMENTS SIZE  in order, SIZE in bytes; read-only regions lie one after another in the input file, writable ones
//                                  begin as NaN
//   launch KERNEL GRID ITEMS REGION...   (indices of regions, one for each pointer the kernel takes)
// The output is the content of the first writable region. Exit codes: 0 done, 3 a report was written, 1 anything else.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "runtime.h"

using namespace emulator;

struct Launch {
    int kernel, grid, items, regions[max_pointers];
};

static void need(bool condition, const char* text) {
    if (!condition) std::fprintf(stderr, "emulator: %s\n", text), std::exit(1);
}

int main(int count, char** values) {
    need(count == 5, "arguments: plan input output report");
    open_report(values[4]);
    std::FILE* plan = std::fopen(values[1], "r");
    need(plan, "cannot open the plan");
    Order order = Order::forward;
    unsigned long long seed = 0;
    int seconds = 0;
    std::vector<Launch> launches;
    std::vector<bool> writable;
    char word[16], text[16];
    while (std::fscanf(plan, "%15s", word) == 1) {
        if (!std::strcmp(word, "order")) {
            need(std::fscanf(plan, "%15s %llu", text, &seed) == 2, "bad order");
            order = !std::strcmp(text, "reverse") ? Order::reverse : !std::strcmp(text, "random") ? Order::random : Order::forward;
        } else if (!std::strcmp(word, "races")) {
            int on = 0;
            need(std::fscanf(plan, "%d", &on) == 1, "bad races");
            check_races = on;
        } else if (!std::strcmp(word, "conflicts")) {
            int on = 0;
            need(std::fscanf(plan, "%d", &on) == 1, "bad conflicts");
            count_conflicts = on;
        } else if (!std::strcmp(word, "limit")) {
            need(std::fscanf(plan, "%d", &seconds) == 1, "bad limit");
        } else if (!std::strcmp(word, "region")) {
            int write = 0;
            unsigned long long elements = 0, size = 0;
            need(std::fscanf(plan, "%d %llu %llu", &write, &elements, &size) == 3 && size, "bad region");
            add_region(elements, size, write);
            writable.push_back(write);
        } else if (!std::strcmp(word, "launch")) {
            Launch l;
            need(std::fscanf(plan, "%d %d %d", &l.kernel, &l.grid, &l.items) == 3, "bad launch");
            need(l.kernel >= 0 && l.kernel < emulator_kernel_count, "no such kernel");
            need(emulator_kernels[l.kernel].pointers <= max_pointers, "too many arguments");
            for (int i = 0; i < emulator_kernels[l.kernel].pointers; ++i) need(std::fscanf(plan, "%d", &l.regions[i]) == 1, "bad launch");
            launches.push_back(l);
        } else {
            need(false, "unknown item in the plan");
        }
    }
    std::fclose(plan);
    map_regions();
    std::FILE* input = std::fopen(values[2], "rb");
    need(input, "cannot open the input");
    int result = -1;
    for (int i = 0; i < int(writable.size()); ++i) {
        if (writable[std::size_t(i)]) {
            std::memset(region_data(i), 0xff, region_bytes(i));
            if (result < 0) result = i;
        } else {
            need(std::fread(region_data(i), 1, region_bytes(i), input) == region_bytes(i), "the input is too short");
        }
    }
    std::fclose(input);
    need(result >= 0, "no writable region");

    start_fibers(order, seed);
    catch_signals(seconds);
    for (const Launch& launch : launches) {
        here.kernel = &emulator_kernels[launch.kernel];
        here.grid = launch.grid;
        here.threads = here.kernel->threads;
        Arguments arguments;
        for (int i = 0; i < here.kernel->pointers; ++i) arguments.pointers[i] = region_data(launch.regions[i]);
        arguments.items = launch.items;
        begin_launch();
        for (here.block = 0; here.block < here.grid; ++here.block) run_block(arguments);
    }
    report_conflicts();
    std::FILE* output = std::fopen(values[3], "wb");
    need(output, "cannot open the output");
    need(std::fwrite(region_data(result), 1, region_bytes(result), output) == region_bytes(result), "cannot write the output");
    return std::fclose(output) ? 1 : 0;
}
