// Device primitives. A lane is 4g+t: g counts rows (or columns of operand B), t the quarter of a row it serves.

constexpr unsigned ALL_LANES = 0xffffffffu;

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

template <int N>
struct Vector;  // N neighbouring words, moved by one instruction
template <>
struct Vector<1> {
  using Type = float;
};
template <>
struct Vector<2> {
  using Type = float2;
};
template <>
struct Vector<4> {
  using Type = float4;
};

// T is float or unsigned: the bits are moved as they are.
template <typename T, int N>
__device__ __forceinline__ void load(T (&to)[N], const float* from) {
  using V = typename Vector<N>::Type;
  *reinterpret_cast<V*>(to) = *reinterpret_cast<const V*>(from);
}

template <typename T, int N>
__device__ __forceinline__ void store(float* to, const T (&from)[N]) {
  using V = typename Vector<N>::Type;
  *reinterpret_cast<V*>(to) = *reinterpret_cast<const V*>(from);
}

// The same to global memory, by one instruction: the compiler takes some plain stores of several words apart.
template <typename T, int N>
__device__ __forceinline__ void store_global(float* to, const T (&from)[N]) {
  using V = typename Vector<N>::Type;
  __stcg(reinterpret_cast<V*>(to), *reinterpret_cast<const V*>(from));
}

// Weights do not change while a kernel runs, so their loads may go through the read-only cache.
template <int N>
__device__ __forceinline__ void load_constant(float (&to)[N], const float* __restrict__ from) {
  using V = typename Vector<N>::Type;
  *reinterpret_cast<V*>(to) = __ldg(reinterpret_cast<const V*>(from));
}

__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Sum and maximum over aligned groups of LANES lanes; every lane of the group gets the result.
template <int LANES>
__device__ __forceinline__ float group_sum(float value) {
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) value += __shfl_xor_sync(ALL_LANES, value, step);
  return value;
}

template <int LANES>
__device__ __forceinline__ float group_max(float value) {
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, step));
  return value;
}

#ifdef __CUDACC__  // PTX; a host build brings its own versions of these functions

// N (1, 2 or 4) neighbouring words by a plain load, which stays on its side of a barrier. A load of constants (ld.global.nc) does not: the compiler
// moves it to its first use, and what was to arrive during another stage is then waited for.
template <int N>
__device__ __forceinline__ void load_here(unsigned (&to)[N], const void* from) {
  if constexpr (N == 4)
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(from));
  else if constexpr (N == 2)
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
  else
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(to[0]) : "l"(from));
}

// c += a b for a 16x8 tile and a sum over 8 (PTX ISA, mma.m16n8k8 with .tf32): a = (g, t), (g+8, t), (g, t+4),
// (g+8, t+4); b0 = (t, g), b1 = (t+4, g); c = (g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1). The unit ignores the
// 13 low bits of each operand.
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&c)[4], const float (&a)[4], float b0, float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
        "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// The same for 16-bit operands and a sum over 16 (PTX ISA, mma.m16n8k16): each word holds two neighbouring indices, a = (g, 2t),
// (g+8, 2t), (g, 2t+8), (g+8, 2t+8); b0 = (2t, g), b1 = (2t+8, g).
__device__ __forceinline__ void mma_m16n8k16_fp16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_m16n8k16_bf16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ unsigned pack_bf16(float first, float second) {  // the first in the low half, rounded to nearest even
  unsigned word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  return word;
}

__device__ __forceinline__ unsigned pack_fp16(float first, float second) {
  unsigned word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  return word;
}

__device__ __forceinline__ float2 unpack_fp16(unsigned word) {
  float2 values;
  asm("{.reg .f16 low, high;\n mov.b32 {low, high}, %2;\n cvt.f32.f16 %0, low;\n cvt.f32.f16 %1, high;}" : "=f"(values.x), "=f"(values.y) : "r"(word));
  return values;
}

// Transposes an 8x8 matrix of 16-bit values, of which lane 4g+t holds row g, columns 2t and 2t+1 (PTX ISA, movmatrix).
__device__ __forceinline__ unsigned transpose_8x8(unsigned word) {
  unsigned result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(word));
  return result;
}

__device__ __forceinline__ float round_to_tf32(float value) {
  unsigned bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return __uint_as_float(bits);
}

__device__ __forceinline__ float exp2_approx(float value) {  // 2 units in the last place; results under 2^-126 become 0
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

// Programmatic dependent launch (PTX ISA, griddepcontrol): wait until the kernel before this one in the stream has ended
// and its writes are visible; let the kernel after this one start its prologue.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#endif

template <int N>
__device__ __forceinline__ void load_here(float (&to)[N], const float* from) {
  unsigned words[N];
  load_here(words, static_cast<const void*>(from));
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = __uint_as_float(words[i]);
}
