// What cuda_host.h declares: indices, warp collectives and the products of the tensor cores.
#include <cmath>
#include <cstring>

#include "fibers.h"

// Types of cuda_host.h, repeated because the emulated source's names must not leak into this file.
struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
};

namespace emulator {

uint3 thread_index() { return {unsigned(here.thread), 0, 0}; }
uint3 block_index() { return {unsigned(here.block), 0, 0}; }
dim3 block_size() { return {unsigned(here.threads), 1, 1}; }
dim3 grid_size() { return {unsigned(here.grid), 1, 1}; }

void sync_warp(unsigned mask, int line) {
    meet("__syncwarp", mask, line, [mask](Warp&) {
        const int base = here.thread & ~(lanes - 1);
        std::uint32_t over[lanes] = {};  // what is over for any of the lanes, and their own past, is over for all of them
        each_lane(mask, [&](int lane) {
            for (int l = 0; l < lanes; ++l) over[l] = over[l] > known[base + lane][l] ? over[l] : known[base + lane][l];
        });
        each_lane(mask, [&](int lane) { over[lane] = lane_clock[base + lane]++; });
        each_lane(mask, [&](int lane) { std::memcpy(known[base + lane], over, sizeof over); });
    });
}

std::uint64_t shuffle(unsigned mask, std::uint64_t value, int source, const char* name, int line) {
    Warp& warp = own_warp();
    const int lane = here.thread % lanes;
    warp.in[lane] = value;
    warp.source[lane] = source;
    meet(name, mask, line, [mask, name, line](Warp& w) {
        each_lane(mask, [&](int l) {
            const int from = w.source[l];
            if (!(mask >> from & 1))
                diverged(line, (here.thread & ~(lanes - 1)) + l, "completes %s in which a lane reads from a lane outside of the mask", name);
            w.out[l] = w.in[from];
        });
    });
    return warp.out[lane];
}

unsigned ballot(unsigned mask, bool predicate, const char* name, int line) {
    Warp& warp = own_warp();
    const int lane = here.thread % lanes;
    warp.in[lane] = predicate;
    meet(name, mask, line, [mask](Warp& w) {
        std::uint32_t bits = 0;
        each_lane(mask, [&](int l) { bits |= std::uint32_t(w.in[l]) << l; });
        each_lane(mask, [&](int l) { w.out[l] = bits; });
    });
    return unsigned(warp.out[lane]);
}

static float as_float(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

static std::uint32_t as_bits(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

// IEEE 754 binary16: every value is one of float.
float half_to_float(std::uint16_t half) {
    const std::uint32_t sign = std::uint32_t(half & 0x8000u) << 16, exponent = half >> 10 & 31u, mantissa = half & 0x3ffu;
    if (exponent == 31) return as_float(sign | 0x7f800000u | mantissa << 13);
    if (exponent == 0) return as_float(sign | as_bits(float(mantissa) * 0x1p-24f));
    return as_float(sign | (exponent + 112) << 23 | mantissa << 13);
}

// cvt.rn.f16.f32: to nearest, ties to even; too large becomes infinity, NaN the canonical one.
std::uint16_t float_to_half(float value) {
    const std::uint32_t bits = as_bits(value), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return 0x7fff;
    if (size >= 0x477ff000u) return std::uint16_t(sign | 0x7c00u);
    if (size < 0x38800000u)  // under 2^-14: a multiple of 2^-24, to which adding 0.5 rounds
        return std::uint16_t(sign | (as_bits(as_float(size) + 0.5f) - as_bits(0.5f)));
    return std::uint16_t(sign | (size - 0x38000000u + 0xfffu + (size >> 13 & 1u)) >> 13);
}

// cvt.rn.bf16.f32: to nearest, ties to even; NaN the canonical one.
std::uint16_t float_to_bfloat16(float value) {
    const std::uint32_t bits = as_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return std::uint16_t((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// What tensor cores leave of a sum in fp32 and of products that come to it: it is truncated (Fasi, Higham, Mikaitis and Pranesh 2021, "Numerical
// behavior of NVIDIA tensor cores").
float truncated_sum(float sum, float products) {
    const double exact = double(sum) + double(products);
    const float rounded = float(exact);
    return std::fabs(double(rounded)) > std::fabs(exact) ? std::nextafterf(rounded, 0.0f) : rounded;
}

// A product of 16xK and Kx8 operands that lie in a[.][4] and b[.][2] as words of WIDTH neighbouring indices of the sum;
// the fragments of mma.m16n8k8 (WIDTH 1) and mma.m16n8k16 (WIDTH 2) in the PTX ISA. Sums as tensor cores have them (truncated).
template <int WIDTH, typename Value>
static void product(const char* name, float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1, int line, Value value) {
    Warp& warp = own_warp();
    const int lane = here.thread % lanes;
    std::memcpy(warp.a[lane], a, sizeof a);
    warp.b[lane][0] = b0, warp.b[lane][1] = b1;
    warp.c[lane] = c;
    meet(name, ~0u, line, [value](Warp& w) {
        constexpr int K = 8 * WIDTH;
        float left[16][K], right[K][8], sum[16][8] = {};
        for (int l = 0; l < lanes; ++l) {
            const int g = l / 4, t = l % 4;
            for (int i = 0; i < WIDTH; ++i) {
                for (int r = 0; r < 4; ++r) left[g + 8 * (r % 2)][WIDTH * (t + 4 * (r / 2)) + i] = value(w.a[l][r], i);
                for (int r = 0; r < 2; ++r) right[WIDTH * (t + 4 * r) + i][g] = value(w.b[l][r], i);
            }
        }
        for (int i = 0; i < 16; ++i)
            for (int k = 0; k < K; ++k)
                for (int j = 0; j < 8; ++j) sum[i][j] += left[i][k] * right[k][j];
        for (int l = 0; l < lanes; ++l)
            for (int r = 0; r < 4; ++r) w.c[l][r] = truncated_sum(w.c[l][r], sum[l / 4 + 8 * (r / 2)][2 * (l % 4) + r % 2]);
    });
}

// The unit ignores the low 13 bits of a TF32 operand.
void mma_tf32(float (&c)[4], const float (&a)[4], float b0, float b1, int line) {
    std::uint32_t words[4];
    std::memcpy(words, a, sizeof words);
    product<1>("mma_m16n8k8_tf32", c, words, as_bits(b0), as_bits(b1), line,
               [](std::uint32_t word, int) { return as_float(word & 0xffffe000u); });
}

void mma_fp16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, int line) {
    product<2>("mma_m16n8k16_fp16", c, a, b0, b1, line,
               [](std::uint32_t word, int which) { return half_to_float(std::uint16_t(word >> 16 * which)); });
}

void mma_bf16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, int line) {
    product<2>("mma_m16n8k16_bf16", c, a, b0, b1, line,
               [](std::uint32_t word, int which) { return as_float((word >> 16 * which & 0xffffu) << 16); });
}

// movmatrix.m8n8.trans.b16: lane 4g+t holds row g, columns 2t (low half) and 2t+1.
unsigned transpose(unsigned word, int line) {
    Warp& warp = own_warp();
    const int lane = here.thread % lanes;
    warp.in[lane] = word;
    meet("transpose_8x8", ~0u, line, [](Warp& w) {
        const auto element = [&w](int row, int column) { return std::uint32_t(w.in[4 * row + column / 2] >> 16 * (column % 2)) & 0xffffu; };
        for (int l = 0; l < lanes; ++l) w.out[l] = element(2 * (l % 4), l / 4) | element(2 * (l % 4) + 1, l / 4) << 16;
    });
    return unsigned(warp.out[lane]);
}

void wait_previous() {
    waited[here.thread] = true;
    if (!now.previous_kernel) now.previous_kernel = now.epoch;
}

void trap(int line, const char* text) {
    const Fact at{"line", line};
    report("trap", nullptr, nullptr, text, &at, 1);
}

}  // namespace emulator
