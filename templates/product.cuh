// Operand B of COLUMNS column tiles over a whole sum of K, in the registers of the lanes that multiply it. Math::Operand<F> is
// what a lane supplies for one tile and one step of the sum.
template <typename Math, int K, int F, int COLUMNS>
struct HeldWeights {
  using Operand = typename Math::template Operand<F>;
  static constexpr int STEPS = K / Operand::STEP;
  Operand values[COLUMNS][STEPS];

  template <typename LoadB>
  __device__ __forceinline__ void fill(int lane, LoadB load_b) {
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
      for (int step = 0; step < STEPS; ++step) values[j][step] = Math::template fetch<F>(j, step, lane, load_b);
  }
};
