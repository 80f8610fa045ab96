// Operand B of COLUMNS column tiles over a whole sum of K, in the registers of the lanes that multiply it. Math::Raw<F> is what
// a lane reads for one tile and one step of the sum, Math::Operand<F> what it multiplies: reading and packing are apart, so
// that other work can stand between a load and its first use.
template <typename Math, int K, int F, int COLUMNS>
struct HeldWeights {
  using Operand = typename Math::template Operand<F>;
  static constexpr int STEPS = K / Operand::STEP;
  typename Math::template Raw<F> raw[COLUMNS][STEPS];
  Operand values[COLUMNS][STEPS];

  template <typename LoadB>
  __device__ __forceinline__ void read(int lane, LoadB load_b) {
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
      for (int step = 0; step < STEPS; ++step) raw[j][step] = Math::template read<F>(j, step, lane, load_b);
  }

  __device__ __forceinline__ void pack() {
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
      for (int step = 0; step < STEPS; ++step) values[j][step] = Math::pack(raw[j][step]);
  }
};
