// 16-bit types: two values in a word, the first in the low half.
struct Fp16 {
  unsigned short bits;

  static __device__ __forceinline__ unsigned pack(float first, float second) { return pack_fp16(first, second); }
  static __device__ __forceinline__ float2 unpack(unsigned word) { return unpack_fp16(word); }
  static __device__ __forceinline__ void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) { mma_m16n8k16_fp16(c, a, b0, b1); }
};

struct Bf16 {
  unsigned short bits;

  static __device__ __forceinline__ unsigned pack(float first, float second) { return pack_bf16(first, second); }
  static __device__ __forceinline__ float2 unpack(unsigned word) { return float2{__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)}; }
  static __device__ __forceinline__ void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) { mma_m16n8k16_bf16(c, a, b0, b1); }
};

template <typename A, typename B>
constexpr bool SAME = false;
template <typename A>
constexpr bool SAME<A, A> = true;

template <bool FIRST, typename A, typename B>
struct Choose {
  using Type = A;
};
template <typename A, typename B>
struct Choose<false, A, B> {
  using Type = B;
};
