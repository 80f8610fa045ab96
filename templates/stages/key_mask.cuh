// Minus infinity for the scores of keys that the mask leaves out. p is a tile of scores with KEYS * 8 keys from first_key on. A lane reads
// the mask of one key in 32 and the warp votes, so that each key is read once: scores of a lane are in four columns of eight.
template <typename C, int KEYS>
__device__ __forceinline__ void mask_keys(float (&p)[1][KEYS][4], const unsigned char* __restrict__ mask, int sequence, int first_key, int lane) {
#pragma unroll
  for (int word = 0; word < ceil_div(KEYS, 4); ++word) {
    const int key = first_key + 32 * word + lane;
    const unsigned there = __ballot_sync(ALL_LANES, key < C::LENGTH && __ldg(mask + C::mask_offset(sequence, key)) != 0);
#pragma unroll
    for (int j = 4 * word; j < KEYS && j < 4 * word + 4; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if ((there >> (8 * (j % 4) + 2 * (lane % 4) + i % 2) & 1) == 0) p[0][j][i] = minus_infinity();
  }
}
