// Scores become logits in powers of two: scaled, and with their bias added, of a head's LENGTH x LENGTH by query and key, which all
// sequences share. p is a tile of scores of a lane's queries, `query` and every eighth after it, with KEYS * 8 keys from first_key on.
template <typename C, int ROWS, int KEYS>
__device__ __forceinline__ void add_bias(float (&p)[ROWS][KEYS][4], const Element* __restrict__ bias, int head, int query, int first_key, int lane) {
  constexpr float LOG2_E = 1.442695041f;
#pragma unroll
  for (int half = 0; half < 2 * ROWS; ++half) {
    const int row = query + 8 * half;
    const Element* from = bias + (static_cast<long long>(head) * C::LENGTH + row) * C::LENGTH;
#pragma unroll
    for (int j = 0; j < KEYS; ++j) {
      const int key = first_key + 8 * j + 2 * (lane % 4);
      float added[2] = {};
      if constexpr (C::LENGTH % 2 == 0) {
        if (row < C::LENGTH && key < C::LENGTH) load_constant(added, from + key);
      } else {
        load_some<true>(added, from + key, row < C::LENGTH, key, C::LENGTH);
      }
      float(&tile)[4] = p[half / 2][j];
#pragma unroll
      for (int i = 2 * (half % 2); i < 2 * (half % 2) + 2; ++i) tile[i] = fmaf(tile[i], C::SCORE_SCALE, added[i % 2] * LOG2_E);
    }
  }
}
