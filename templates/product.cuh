// Weights of COLUMNS column tiles over a whole sum of K, in the registers of the lanes that multiply them.
template <typename Math, int K, int F, int COLUMNS>
struct HeldWeights {
  static constexpr int STEPS = K / (4 * F);
  float values[COLUMNS][STEPS][F];

  template <typename LoadB>
  __device__ __forceinline__ void fill(LoadB load_b) {
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
      for (int step = 0; step < STEPS; ++step) load_b(j, step * 4 * F, 0, values[j][step]);
  }

  __device__ __forceinline__ void get(int j, int k, float (&to)[F]) const {
#pragma unroll
    for (int i = 0; i < F; ++i) to[i] = values[j][k / (4 * F)][i];
  }
};
