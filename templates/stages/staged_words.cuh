// The same as words of two elements.
template <int DIM, int N>
__device__ __forceinline__ void load_channels(Word (&to)[N], const Element* from, int channel) {
  if constexpr (DIM % (2 * N) == 0) {
    if (channel < DIM) load(to, from + channel);
  } else {
    load_some<false>(to, from + channel, true, channel, DIM);
  }
}

// The same by loads that stay on their side of a barrier.
template <int DIM, int N>
__device__ __forceinline__ void load_channels_here(Word (&to)[N], const Element* from, int channel) {
  if constexpr (DIM % (2 * N) == 0) {
    if (channel < DIM) load_here(to, static_cast<const void*>(from + channel));
  } else {
    load_channels<DIM>(to, from, channel);
  }
}
