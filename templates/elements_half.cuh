// Elements of x, y and the parameters: 16 bits in memory, floats where they are computed with. Between, and where the products'
// operands are of the same type, they are words of two elements, the first in the low half.
using Word = unsigned;
constexpr int PER_WORD = 2;

template <int N>
struct WordVector;  // N neighbouring words, moved by one instruction
template <>
struct WordVector<1> {
  using Type = unsigned;
};
template <>
struct WordVector<2> {
  using Type = uint2;
};
template <>
struct WordVector<4> {
  using Type = uint4;
};

__device__ __forceinline__ void put(Element* to, float value) { to->bits = static_cast<unsigned short>(Element::pack(value, 0.0f)); }

template <int N>
__device__ __forceinline__ void unpack(float (&to)[2 * N], const Word (&words)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float2 two = Element::unpack(words[i]);
    to[2 * i] = two.x, to[2 * i + 1] = two.y;
  }
}

template <int N>
__device__ __forceinline__ void load(Word (&to)[N], const Element* from) {
  using V = typename WordVector<N>::Type;
  *reinterpret_cast<V*>(to) = *reinterpret_cast<const V*>(from);
}

template <int N>
__device__ __forceinline__ void load_constant(Word (&to)[N], const Element* __restrict__ from) {
  using V = typename WordVector<N>::Type;
  *reinterpret_cast<V*>(to) = __ldg(reinterpret_cast<const V*>(from));
}

template <int N>
__device__ __forceinline__ void load_here(float (&to)[N], const Element* from) {
  Word words[N / 2];
  load_here(words, static_cast<const void*>(from));
  unpack(to, words);
}

template <int N>
__device__ __forceinline__ void load(float (&to)[N], const Element* from) {
  Word words[N / 2];
  load(words, from);
  unpack(to, words);
}

template <int N>
__device__ __forceinline__ void load_constant(float (&to)[N], const Element* __restrict__ from) {
  Word words[N / 2];
  load_constant(words, from);
  unpack(to, words);
}

template <int N>
__device__ __forceinline__ void store(Element* to, const Word (&words)[N]) {
  using V = typename WordVector<N>::Type;
  *reinterpret_cast<V*>(to) = *reinterpret_cast<const V*>(words);
}

template <int N>
__device__ __forceinline__ void store_global(Element* to, const float (&from)[N]) {
  using V = typename WordVector<N / 2>::Type;
  Word words[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; ++i) words[i] = Element::pack(from[2 * i], from[2 * i + 1]);
  __stcg(reinterpret_cast<V*>(to), *reinterpret_cast<const V*>(words));
}

// Those of 2 N neighbouring elements that exist: `from` has the index `index`, and `limit` is the first one that does not exist.
// The words begin as 0. CONSTANT elements do not change while the kernel runs.
template <bool CONSTANT, int N>
__device__ __forceinline__ void load_some(Word (&to)[N], const Element* from, bool real, int index, int limit) {
#pragma unroll
  for (int i = 0; i < 2 * N; ++i)
    if (real && index + i < limit) to[i / 2] |= static_cast<unsigned>(CONSTANT ? __ldg(&from[i].bits) : from[i].bits) << 16 * (i % 2);
}

template <bool CONSTANT, int N>
__device__ __forceinline__ void load_some(float (&to)[N], const Element* from, bool real, int index, int limit) {
  Word words[N / 2] = {};
  load_some<CONSTANT>(words, from, real, index, limit);
  unpack(to, words);
}
