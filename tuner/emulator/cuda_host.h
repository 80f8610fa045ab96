// CUDA C++ for a host compiler: the built-ins and primitives that the emitted kernels use. Included before the emulated
// source, which is compiled as it is; __CUDACC__ stays undefined, so that inline PTX is left out and the functions that
// wrap it are the ones declared here. A name that is missing here is a compile error, never a silent difference.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define __global__ __attribute__((noinline))
#define __device__
#define __host__
#define __shared__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define __grid_constant__
#define __builtin_assume(condition) do { if (!(condition)) ::emulator::trap(__LINE__, "tells the compiler to assume what does not hold (__builtin_assume)"); } while (0)
#define warpSize 32

struct alignas(8) float2 { float x, y; };
struct float3 { float x, y, z; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct uint3 { unsigned x, y, z; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct dim3 { unsigned x = 1, y = 1, z = 1; };

inline float2 make_float2(float x, float y) { return {x, y}; }
inline float3 make_float3(float x, float y, float z) { return {x, y, z}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace emulator {
// A thread's indices never change while it runs, hence `const`.
__attribute__((const)) uint3 thread_index();
__attribute__((const)) uint3 block_index();
__attribute__((const)) dim3 block_size();
__attribute__((const)) dim3 grid_size();

// Meetings of threads. `line` is where the call stands: threads that meet must come from the same line.
uint64_t shuffle(unsigned mask, uint64_t value, int source, const char* name, int line);
unsigned ballot(unsigned mask, bool predicate, const char* name, int line);
void sync_warp(unsigned mask, int line);
void sync_block(int line);
void mma_tf32(float (&c)[4], const float (&a)[4], float b0, float b1, int line);
void mma_fp16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, int line);
void mma_bf16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, int line);
unsigned transpose(unsigned word, int line);
float half_to_float(uint16_t half);
uint16_t float_to_half(float value);
uint16_t float_to_bfloat16(float value);
void wait_previous();

// An asynchronous copy that is under way: it happens when its thread waits for it.
struct Copy {
    float* to;
    const float* from;
    int words;
    bool real;
};
[[noreturn]] void misaligned_copy(int bytes, int line);
void start_copy(const Copy& copy);
void commit_copies();
void write_by_copy(float* to, float value);
void count_copy(const void* to, const void* from, int bytes, int line);
bool next_copy(int groups, Copy& copy);  // the oldest copy that is in none of the latest `groups` groups; false when there is none

// Products of a warpgroup, bulk copies and their barriers (warpgroup.cpp).
void fence_registers(int line);
void start_product(float* sums, int tiles, uint64_t a, uint64_t b, bool accumulate, bool bf16);
void start_register_product(float* sums, int tiles, const unsigned (&a)[4], uint64_t b, bool accumulate, bool bf16, bool turned, int line);
void commit_products(int line);
void wait_for_products(int groups, int line);
void init_barrier(const void* barrier);
void add_bulk_copy(float* to, const float* from, int bytes, const void* barrier);
void start_bulk_copy(float* to, const float* from, int bytes, const void* barrier);
void wait_for_bulk_copy(const void* barrier, int parity, int line);
void fence_async_proxy(bool global);
unsigned shared_offset(const void* address);
[[noreturn]] void trap(int line, const char* text);

inline int lane() { return int(thread_index().x & 31); }

template <typename To, typename From> To bits_as(From value) {
    static_assert(sizeof(To) == sizeof(From), "a reinterpretation keeps the size");
    To result;
    __builtin_memcpy(&result, &value, sizeof(To));
    return result;
}

template <typename T> T move(unsigned mask, T value, int source, const char* name, int line) {
    static_assert(sizeof(T) <= 8, "shuffles move at most 8 bytes");
    uint64_t bits = 0;
    __builtin_memcpy(&bits, &value, sizeof(T));
    bits = shuffle(mask, bits, source, name, line);
    __builtin_memcpy(&value, &bits, sizeof(T));
    return value;
}
}  // namespace emulator

#define threadIdx (::emulator::thread_index())
#define blockIdx (::emulator::block_index())
#define blockDim (::emulator::block_size())
#define gridDim (::emulator::grid_size())

// Barriers and warp collectives. Sources of shuffles are the CUDA C++ Programming Guide's, "Warp Shuffle Functions".
inline void __syncthreads(int line = __builtin_LINE()) { ::emulator::sync_block(line); }
inline void __syncwarp(unsigned mask = ~0u, int line = __builtin_LINE()) { ::emulator::sync_warp(mask, line); }

template <typename T> T __shfl_sync(unsigned mask, T value, int source, int width = 32, int line = __builtin_LINE()) {
    return ::emulator::move(mask, value, (::emulator::lane() & -width) | (source & (width - 1)), "__shfl_sync", line);
}
template <typename T> T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, int line = __builtin_LINE()) {
    const int lane = ::emulator::lane(), source = lane ^ bits;
    return ::emulator::move(mask, value, source > (lane | (width - 1)) ? lane : source, "__shfl_xor_sync", line);
}
template <typename T> T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, int line = __builtin_LINE()) {
    const int lane = ::emulator::lane(), source = lane - int(delta);
    return ::emulator::move(mask, value, source < (lane & -width) ? lane : source, "__shfl_up_sync", line);
}
template <typename T> T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, int line = __builtin_LINE()) {
    const int lane = ::emulator::lane(), source = lane + int(delta);
    return ::emulator::move(mask, value, source > (lane | (width - 1)) ? lane : source, "__shfl_down_sync", line);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
    return ::emulator::ballot(mask, predicate != 0, "__ballot_sync", line);
}
inline int __any_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
    return ::emulator::ballot(mask, predicate != 0, "__any_sync", line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
    return ::emulator::ballot(mask, predicate != 0, "__all_sync", line) == mask;
}

inline unsigned __float_as_uint(float value) { return ::emulator::bits_as<unsigned>(value); }
inline float __uint_as_float(unsigned bits) { return ::emulator::bits_as<float>(bits); }
inline int __float_as_int(float value) { return ::emulator::bits_as<int>(value); }
inline float __int_as_float(int bits) { return ::emulator::bits_as<float>(bits); }

// The project's primitives that are PTX on a GPU.
inline void mma_m16n8k8_tf32(float (&c)[4], const float (&a)[4], float b0, float b1, int line = __builtin_LINE()) {
    ::emulator::mma_tf32(c, a, b0, b1, line);
}
inline void mma_m16n8k16_fp16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, int line = __builtin_LINE()) {
    ::emulator::mma_fp16(c, a, b0, b1, line);
}
inline void mma_m16n8k16_bf16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, int line = __builtin_LINE()) {
    ::emulator::mma_bf16(c, a, b0, b1, line);
}
inline void mma_from_fp16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, const float (&from)[4], int line = __builtin_LINE()) {
    for (int i = 0; i < 4; ++i) c[i] = from[i];
    ::emulator::mma_fp16(c, a, b0, b1, line);
}
inline void mma_from_bf16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, const float (&from)[4], int line = __builtin_LINE()) {
    for (int i = 0; i < 4; ++i) c[i] = from[i];
    ::emulator::mma_bf16(c, a, b0, b1, line);
}
inline unsigned transpose_8x8(unsigned word, int line = __builtin_LINE()) { return ::emulator::transpose(word, line); }
// 16-bit words hold the value of the lower index in their low half.
inline unsigned pack_fp16(float first, float second) {
    return ::emulator::float_to_half(first) | unsigned(::emulator::float_to_half(second)) << 16;
}
template <int N> void load_here(unsigned (&to)[N], const void* from) {
    static_assert(N == 1 || N == 2 || N == 4, "a load takes 4, 8 or 16 bytes");
    if constexpr (N == 4) *reinterpret_cast<uint4*>(to) = *static_cast<const uint4*>(from);
    else if constexpr (N == 2) *reinterpret_cast<uint2*>(to) = *static_cast<const uint2*>(from);
    else to[0] = *static_cast<const unsigned*>(from);
}
inline float2 unpack_fp16(unsigned word) {
    return {::emulator::half_to_float(uint16_t(word)), ::emulator::half_to_float(uint16_t(word >> 16))};
}
inline unsigned pack_bf16(float first, float second) {
    return ::emulator::float_to_bfloat16(first) | unsigned(::emulator::float_to_bfloat16(second)) << 16;
}
// cvt.rna.tf32.f32: to the nearest with 10 bits of mantissa, ties away from zero.
inline float round_to_tf32(float value) {
    return value == value ? __uint_as_float((__float_as_uint(value) + 0x1000u) & 0xffffe000u) : __uint_as_float(0x7fffffffu);
}
// ex2.approx.ftz.f32, exact to rounding here; results under the smallest normal number become 0.
inline float exp2_approx(float value) {
    const float result = exp2f(value);
    return result < 0x1p-126f ? 0.0f : result;
}
// Asynchronous copies (cp.async). Until a copy is waited for, its target holds NaN, so that a reader that does not wait gets a wrong result;
// both its start and its end count as writes, so that a missing barrier on either side is a race.
template <int BYTES> void copy_async(float* to, const float* from, bool real, int line = __builtin_LINE()) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
    if (uintptr_t(to) % BYTES || (real && uintptr_t(from) % BYTES)) ::emulator::misaligned_copy(BYTES, line);
    ::emulator::count_copy(to, real ? from : nullptr, BYTES, line);
    for (int i = 0; i < BYTES / 4; ++i) ::emulator::write_by_copy(to + i, __uint_as_float(0x7fffdeadu));
    ::emulator::start_copy({to, from, BYTES / 4, real});
}
inline void commit_copies() { ::emulator::commit_copies(); }
template <int GROUPS> void wait_for_copies() {
    ::emulator::Copy copy;
    while (::emulator::next_copy(GROUPS, copy))
        for (int i = 0; i < copy.words; ++i) ::emulator::write_by_copy(copy.to + i, copy.real ? copy.from[i] : 0.0f);
}
// Hopper's products of a warpgroup, and the bulk copies that feed them (templates/warpgroup.cu.j2).
inline unsigned shared_address(const void* address) { return ::emulator::shared_offset(address); }
template <int TILES> __forceinline__ void wgmma_fp16(float (&sums)[TILES][4], uint64_t a, uint64_t b, bool accumulate) {
    ::emulator::start_product(&sums[0][0], TILES, a, b, accumulate, false);
}
template <int TILES> __forceinline__ void wgmma_bf16(float (&sums)[TILES][4], uint64_t a, uint64_t b, bool accumulate) {
    ::emulator::start_product(&sums[0][0], TILES, a, b, accumulate, true);
}
template <int TILES> __forceinline__ void wgmma_fp16(float (&sums)[TILES][4], const unsigned (&a)[4], uint64_t b, bool accumulate, int line = __builtin_LINE()) {
    ::emulator::start_register_product(&sums[0][0], TILES, a, b, accumulate, false, false, line);
}
template <int TILES> __forceinline__ void wgmma_bf16(float (&sums)[TILES][4], const unsigned (&a)[4], uint64_t b, bool accumulate, int line = __builtin_LINE()) {
    ::emulator::start_register_product(&sums[0][0], TILES, a, b, accumulate, true, false, line);
}
template <int TILES> __forceinline__ void wgmma_fp16_turned(float (&sums)[TILES][4], const unsigned (&a)[4], uint64_t b, bool accumulate, int line = __builtin_LINE()) {
    ::emulator::start_register_product(&sums[0][0], TILES, a, b, accumulate, false, true, line);
}
template <int TILES> __forceinline__ void wgmma_bf16_turned(float (&sums)[TILES][4], const unsigned (&a)[4], uint64_t b, bool accumulate, int line = __builtin_LINE()) {
    ::emulator::start_register_product(&sums[0][0], TILES, a, b, accumulate, true, true, line);
}
inline void wgmma_fence(int line = __builtin_LINE()) { ::emulator::fence_registers(line); }
inline void wgmma_commit(int line = __builtin_LINE()) { ::emulator::commit_products(line); }
template <int GROUPS> void wgmma_wait(int line = __builtin_LINE()) { ::emulator::wait_for_products(GROUPS, line); }
template <int TILES> void keep_in_registers(float (&)[TILES][4]) {}
inline void fence_async_proxy() { ::emulator::fence_async_proxy(false); }
inline void fence_async_proxy_global() { ::emulator::fence_async_proxy(true); }
inline void init_barrier(float* barrier) { ::emulator::init_barrier(barrier); }
inline void publish_barriers() {}
__forceinline__ void add_bulk_copy(float* to, const float* from, int bytes, float* barrier) { ::emulator::add_bulk_copy(to, from, bytes, barrier); }
__forceinline__ void start_bulk_copy(float* to, const float* from, int bytes, float* barrier) { ::emulator::start_bulk_copy(to, from, bytes, barrier); }
__forceinline__ void wait_for_bulk_copy(float* barrier, int parity, int line = __builtin_LINE()) {
    ::emulator::wait_for_bulk_copy(barrier, parity, line);
}
inline void wait_for_previous_kernel() { ::emulator::wait_previous(); }
inline void allow_next_kernel() {}

// Loads and stores with cache hints, and arithmetic that the C library does not have.
template <typename T> T __ldg(const T* address) { return *address; }
template <typename T> T __ldcg(const T* address) { return *address; }
template <typename T> T __ldcs(const T* address) { return *address; }
template <typename T> void __stcg(T* address, T value) { *address = value; }
template <typename T> void __stcs(T* address, T value) { *address = value; }

inline float rsqrtf(float value) { return 1.0f / sqrtf(value); }
inline float __expf(float value) { return expf(value); }
inline float __logf(float value) { return logf(value); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float value) { return 1.0f / value; }
inline float __saturatef(float value) { return value > 0.0f ? (value < 1.0f ? value : 1.0f) : 0.0f; }  // NaN becomes 0
inline float __fsqrt_rn(float value) { return sqrtf(value); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __clz(int bits) { return bits ? __builtin_clz(unsigned(bits)) : 32; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
#define __trap() (::emulator::trap(__builtin_LINE(), "calls __trap"))
