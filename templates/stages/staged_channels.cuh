// Elements of tensors are read and written here and by copy_async alone.
// N neighbouring channels of a token (or of a vector of DIM) from `channel` on; those past DIM are zeros, if `to` begins so.
template <int DIM, int N>
__device__ __forceinline__ void load_channels(float (&to)[N], const Element* from, int channel) {
  if constexpr (DIM % N == 0) {
    if (channel < DIM) load(to, from + channel);
  } else {
    load_some<false>(to, from + channel, true, channel, DIM);
  }
}

template <int DIM, int N>
__device__ __forceinline__ void store_channels(Element* to, int channel, const float (&values)[N]) {
  if constexpr (DIM % N == 0) {
    if (channel < DIM) store_global(to + channel, values);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (channel + i < DIM) put(to + channel + i, values[i]);
  }
}

// The column of the result that is accumulated as `column`: a lane has two columns of each column tile, and of RUN / 2 tiles these are
// neighbours.
template <int RUN>
__device__ __forceinline__ int result_column(int column) {
  constexpr int TILES = RUN / 2;
  return column / (8 * TILES) * (8 * TILES) + column % 8 / 2 * RUN + column / 8 % TILES * 2 + column % 2;
}
