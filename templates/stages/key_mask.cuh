// Which of KEYS * 8 keys from first_key on may be attended to, a bit each. A lane reads the mask of one key in 32 and the warp votes, so that
// each is read once; scores of a lane are in two columns of each eight.
template <typename C, int KEYS>
struct KeyMask {
  static constexpr int WORDS = ceil_div(KEYS, 4);
  unsigned words[WORDS];

  __device__ __forceinline__ KeyMask(const unsigned char* __restrict__ mask, int sequence, int first_key, int lane) {
#pragma unroll
    for (int word = 0; word < WORDS; ++word) {
      const int within = 32 * word + lane, key = first_key + within;
      const bool there = within < 8 * KEYS && key < C::LENGTH;
      words[word] = __ballot_sync(ALL_LANES, there && __ldg(mask + C::mask_offset(sequence, key)) != 0);
    }
  }

  __device__ __forceinline__ bool any() const {
    unsigned all = 0;
#pragma unroll
    for (int word = 0; word < WORDS; ++word) all |= words[word];
    return all != 0;
  }

  // Minus infinity for the scores of the others, of ROWS * 16 queries.
  template <int ROWS>
  __device__ __forceinline__ void apply(float (&p)[ROWS][KEYS][4], int lane) const {
#pragma unroll
    for (int j = 0; j < KEYS; ++j) {
      const unsigned two = words[j / 4] >> (8 * (j % 4) + 2 * (lane % 4));
#pragma unroll
      for (int row = 0; row < ROWS; ++row)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if ((two >> i % 2 & 1) == 0) p[row][j][i] = minus_infinity();
    }
  }
};
