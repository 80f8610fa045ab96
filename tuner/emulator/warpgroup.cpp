// Hopper's asynchronous units (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions", "cp.async.bulk", "mbarrier"): the products
// of a warpgroup, copies by the bulk engine and the barriers on which these complete.
//
// A product happens when its thread waits for it, each thread computing its own part of the result. Until then the accumulators hold
// NaN, so that a missing wait gives a wrong result; operands are read at that time, so that a buffer that is written too early gives one
// too, or a race. Their start counts as a read as well, so that a missing barrier before it is a race. A copy's target holds NaN until
// someone waits for it; from then on its writes are ordered before all that follows. Its source may not change before that.
#include <array>
#include <cstring>
#include <vector>

#include "fibers.h"

namespace emulator {

float half_to_float(std::uint16_t half);
float truncated_sum(float sum, float products);

namespace {

struct Product {
    float* sums;
    int tiles;
    std::uint64_t a, b;
    const unsigned* registers;  // operand A of this thread, or null when it is in shared memory
    std::array<std::array<unsigned, 4>, 4> words;  // of operand A in registers: those of the four lanes that have the thread's rows
    bool accumulate, bf16, turned;  // turned: a row of operand B is an index of the sum
    int group;
    const void* pc;
};

struct Sums {
    float* at;  // the accumulators of the thread
    std::vector<float> values;
};

struct Products {
    std::vector<Product> started;
    std::vector<Sums> sums;
    int group = 0;  // of the next product; those before are committed
    bool fenced = false;
};
Products products[max_threads];

struct Copy {
    char* to;
    const char* from;
    std::vector<char> bytes;  // what the source had when the copy began
    const void* pc;
};

struct Barrier {
    const void* at;
    unsigned phases = 0;  // completed
    bool busy = false;         // whether the phase ends when its copies have arrived; before, more may be added
    std::vector<Copy> copies;  // of the phase
    std::vector<int> waiting;  // threads for which no copy was under way
};
std::vector<Barrier> barriers;  // of the block; reserved, so that they stay where they are
constexpr std::size_t most_barriers = 64;

[[noreturn]] void refuse(const char* text, const void* pc) { report("protocol", pc, nullptr, text); }

float nan() {
    const std::uint32_t bits = 0x7fffdeadu;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Where row `row` and index `k` of a K-major matrix with 128-byte, 64-byte or 32-byte swizzle lie ("Matrix Descriptor Format", "Strides"): eight
// rows of as many bytes are an atom, STRIDE bytes from the one before; the index of a 16-byte chunk is XORed with as many bits of the
// address, from bit 7 on.
struct Matrix {
    std::size_t start, stride, row_bytes;
    Matrix(std::uint64_t descriptor, const void* pc) : start((descriptor & 0x3fff) << 4), stride((descriptor >> 32 & 0x3fff) << 4) {
        if (descriptor >> 62 == 0) refuse("multiplies a matrix whose descriptor does not say that it is swizzled", pc);
        row_bytes = std::size_t(256) >> (descriptor >> 62);
        if (start / row_bytes % 8) refuse("multiplies a matrix that does not start on an atom of eight rows", pc);
    }
    std::size_t chunk(int row, int half) const {
        const std::size_t address = start + std::size_t(row / 8) * stride + std::size_t(row % 8) * row_bytes + std::size_t(half) * 16;
        return address ^ (address >> 7 & (row_bytes / 16 - 1)) << 4;
    }
};

float value_of(std::uint16_t bits, bool bf16) {
    if (!bf16) return half_to_float(bits);
    const std::uint32_t word = std::uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &word, 4);
    return value;
}

void fetch(const Matrix& matrix, int row, bool bf16, bool check, const void* pc, float (&values)[16]) {
    for (int half = 0; half < 2; ++half) {
        const std::size_t at = matrix.chunk(row, half);
        if (check || at + 16 > here.kernel->shared_bytes) read_by_async_proxy(reinterpret_cast<const char*>(shared) + at, 16, pc);
        std::uint16_t words[8];
        std::memcpy(words, reinterpret_cast<const char*>(shared) + at, 16);
        for (int i = 0; i < 8; ++i) values[8 * half + i] = value_of(words[i], bf16);
    }
}

// Column `column` of a turned operand B: MN-major, of which one atom holds all columns.
std::size_t turned_chunk(const Matrix& matrix, int column, int k, const void* pc) {
    if (std::size_t(column) * 2 >= matrix.row_bytes) refuse("multiplies a turned matrix of more columns than its rows have", pc);
    return matrix.chunk(k, column / 8);
}

void fetch_turned(const Matrix& matrix, int column, bool bf16, bool check, const void* pc, float (&values)[16]) {
    for (int k = 0; k < 16; ++k) {
        const std::size_t at = turned_chunk(matrix, column, k, pc) + std::size_t(column % 8) * 2;
        if (check || at + 2 > here.kernel->shared_bytes) read_by_async_proxy(reinterpret_cast<const char*>(shared) + at, 2, pc);
        std::uint16_t word;
        std::memcpy(&word, reinterpret_cast<const char*>(shared) + at, 2);
        values[k] = value_of(word, bf16);
    }
}

int lane() { return here.thread % lanes; }
int own_row() { return here.thread / lanes % 4 * 16 + lane() / 4; }  // of 64, and the eighth after it
bool checks(int tile) { return tile % 8 == lane() / 4; }             // the lanes divide the checks of operand B

// Operand A's two rows of the thread, from the registers of the four lanes that share them ("Matrix fragments for wgmma.mma_async.m64nNk16").
void gather(const Product& p, float (&upper)[16], float (&lower)[16]) {
    for (int t = 0; t < 4; ++t)
        for (int word = 0; word < 4; ++word)
            for (int i = 0; i < 2; ++i) (word % 2 ? lower : upper)[word / 2 * 8 + 2 * t + i] = value_of(std::uint16_t(p.words[t][word] >> 16 * i), p.bf16);
}

// The reads of a product that starts.
void touch(const Product& p) {
    const Matrix b(p.b, p.pc);
    const auto read = [&p](const Matrix& matrix, int row) {
        for (int half = 0; half < 2; ++half) read_by_async_proxy(reinterpret_cast<const char*>(shared) + matrix.chunk(row, half), 16, p.pc);
    };
    if (!p.registers) {
        const Matrix a(p.a, p.pc);
        read(a, own_row());
        read(a, own_row() + 8);
    }
    if (p.turned) {
        for (int k = lane() / 4; k < 16; k += 8)
            for (int j = 0; j < p.tiles; ++j) read_by_async_proxy(reinterpret_cast<const char*>(shared) + turned_chunk(b, 8 * j, k, p.pc), 16, p.pc);
        return;
    }
    for (int j = 0; j < p.tiles; ++j)
        for (int c = 0; c < 2; ++c)
            if (checks(j)) read(b, 8 * j + 2 * (lane() % 4) + c);
}

// The thread's part of a product of 64 rows, 8 * tiles columns and 16 indices: the accumulators of wgmma.m64nNk16 are those of
// mma.m16n8k16 tiles side by side, 16 rows a warp.
void multiply(const Product& p, float* sums) {
    const Matrix b(p.b, p.pc);
    float upper[16], lower[16], column[16];
    if (p.registers) {
        if (std::memcmp(p.registers, p.words[std::size_t(lane() % 4)].data(), 16))
            refuse("changes registers that are operand A of a product under way: wgmma_wait() was not called before", p.pc);
        gather(p, upper, lower);
    } else {
        const Matrix a(p.a, p.pc);
        fetch(a, own_row(), p.bf16, true, p.pc, upper);
        fetch(a, own_row() + 8, p.bf16, true, p.pc, lower);
    }
    for (int j = 0; j < p.tiles; ++j)
        for (int c = 0; c < 2; ++c) {
            (p.turned ? fetch_turned : fetch)(b, 8 * j + 2 * (lane() % 4) + c, p.bf16, checks(j), p.pc, column);
            float& first = sums[4 * j + c];
            float& second = sums[4 * j + 2 + c];
            if (!p.accumulate) first = second = 0.0f;
            float above = 0.0f, below = 0.0f;
            for (int k = 0; k < 16; ++k) above += upper[k] * column[k], below += lower[k] * column[k];
            first = truncated_sum(first, above), second = truncated_sum(second, below);
        }
}

Sums* find(Products& own, const float* at) {
    for (Sums& sums : own.sums)
        if (sums.at == at) return &sums;
    return nullptr;
}

Barrier& barrier_at(const void* at, const void* pc) {
    for (Barrier& barrier : barriers)
        if (barrier.at == at) return barrier;
    refuse("uses a barrier that is not initialised", pc);
}

void complete(Barrier& barrier) {
    for (const Copy& copy : barrier.copies) {
        if (std::memcmp(copy.from, copy.bytes.data(), copy.bytes.size())) refuse("changes the source of a bulk copy under way", copy.pc);
        std::memcpy(copy.to, copy.bytes.data(), copy.bytes.size());
        order_async_writes(copy.to, int(copy.bytes.size()));
    }
    barrier.copies.clear();
    barrier.busy = false;
    ++barrier.phases;
}

}  // namespace

void forget_products(int thread) {
    products[thread] = {};
    if (thread == 0) barriers.clear(), barriers.reserve(most_barriers);
}

void fence_registers(int line) {
    meet("wgmma_fence", ~0u, line, [](Warp&) {});
    products[here.thread].fenced = true;
}

namespace {

void start(const Product& product) {
    Products& own = products[here.thread];
    if (!own.fenced) refuse("starts a warpgroup's products without wgmma_fence() before the first of them", product.pc);
    if (!find(own, product.sums)) {
        own.sums.push_back({product.sums, std::vector<float>(product.sums, product.sums + 4 * product.tiles)});
        for (int i = 0; i < 4 * product.tiles; ++i) product.sums[i] = nan();
    }
    own.started.push_back(product);
    touch(product);
}

}  // namespace

void start_product(float* sums, int tiles, std::uint64_t a, std::uint64_t b, bool accumulate, bool bf16) {
    start({sums, tiles, a, b, nullptr, {}, accumulate, bf16, false, products[here.thread].group, __builtin_return_address(0)});
}

// Operand A is taken from the registers now, which may not change until the product is done.
void start_register_product(float* sums, int tiles, const unsigned (&a)[4], std::uint64_t b, bool accumulate, bool bf16, bool turned, int line) {
    static std::array<unsigned, 4> all[max_threads];
    std::memcpy(all[here.thread].data(), a, sizeof a);
    meet("wgmma", ~0u, line, [](Warp&) {});
    Product product{sums, tiles, 0, b, a, {}, accumulate, bf16, turned, products[here.thread].group, __builtin_return_address(0)};
    for (int t = 0; t < 4; ++t) product.words[std::size_t(t)] = all[(here.thread & ~3) + t];
    start(product);
    meet("wgmma", ~0u, line, [](Warp&) {});  // the lanes of a row have them
}

void commit_products(int line) {
    meet("wgmma_commit", ~0u, line, [](Warp&) {});
    Products& own = products[here.thread];
    ++own.group;
    own.fenced = false;
}

void wait_for_products(int groups, int line) {
    meet("wgmma_wait", ~0u, line, [](Warp&) {});
    Products& own = products[here.thread];
    std::size_t done = 0;
    for (; done < own.started.size() && own.started[done].group < own.group - groups; ++done)
        multiply(own.started[done], find(own, own.started[done].sums)->values.data());
    own.started.erase(own.started.begin(), own.started.begin() + std::ptrdiff_t(done));
    for (std::size_t i = 0; i < own.sums.size();) {
        const Sums& sums = own.sums[i];
        bool busy = false;
        for (const Product& p : own.started) busy = busy || p.sums == sums.at;
        if (busy) {
            ++i;
        } else {
            std::memcpy(sums.at, sums.values.data(), sums.values.size() * sizeof(float));
            own.sums.erase(own.sums.begin() + std::ptrdiff_t(i));
        }
    }
}

void init_barrier(const void* at) {
    for (Barrier& barrier : barriers)
        if (barrier.at == at) refuse("initialises a barrier twice", __builtin_return_address(0));
    if (barriers.size() == most_barriers) refuse("initialises more barriers than the emulator has", __builtin_return_address(0));
    barriers.push_back({at});
}

namespace {

Barrier& add(float* to, const float* from, int bytes, const void* at, const void* pc) {
    if (bytes % 16 || reinterpret_cast<std::uintptr_t>(to) % 16 || reinterpret_cast<std::uintptr_t>(from) % 16)
        report("misaligned", pc, nullptr, "copies in bulk from or to an address, or a size, that is not a multiple of 16 bytes");
    Barrier& barrier = barrier_at(at, pc);
    if (barrier.busy) complete(barrier);
    read_by_async_proxy(from, bytes, pc);
    write_by_async_proxy(to, bytes, pc);
    const char* const source = reinterpret_cast<const char*>(from);
    barrier.copies.push_back({reinterpret_cast<char*>(to), source, {source, source + bytes}, pc});
    for (int i = 0; i < bytes / 4; ++i) to[i] = nan();
    return barrier;
}

}  // namespace

void add_bulk_copy(float* to, const float* from, int bytes, const void* at) { add(to, from, bytes, at, __builtin_return_address(0)); }

void start_bulk_copy(float* to, const float* from, int bytes, const void* at) {
    Barrier& barrier = add(to, from, bytes, at, __builtin_return_address(0));
    barrier.busy = true;
    for (const int thread : barrier.waiting) resume(thread);
    barrier.waiting.clear();
}

void wait_for_bulk_copy(const void* at, int parity, int line) {
    Barrier& barrier = barrier_at(at, __builtin_return_address(0));
    while ((barrier.phases & 1) == unsigned(parity)) {
        if (barrier.busy) {
            complete(barrier);
        } else {
            barrier.waiting.push_back(here.thread);
            pause("wait_for_bulk_copy", line);
        }
    }
}

unsigned shared_offset(const void* address) { return unsigned(static_cast<const char*>(address) - reinterpret_cast<const char*>(shared)); }

}  // namespace emulator
