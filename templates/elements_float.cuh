// Elements of x, y and the parameters: float, in memory as in registers.
using Element = float;
using Word = float;  // what a lane loads elements in
constexpr int PER_WORD = 1;

__device__ __forceinline__ void put(Element* to, float value) { *to = value; }

template <int N>
__device__ __forceinline__ void unpack(float (&to)[N], const Word (&words)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = words[i];
}

// Those of N neighbouring elements that exist: `from` has the index `index`, and `limit` is the first one that does not exist.
// CONSTANT ones do not change while the kernel runs.
template <bool CONSTANT, int N>
__device__ __forceinline__ void load_some(Word (&to)[N], const Element* from, bool real, int index, int limit) {
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (real && index + i < limit) to[i] = CONSTANT ? __ldg(from + i) : from[i];
}
