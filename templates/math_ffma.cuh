// Products by fused multiply-adds in fp32. The accumulators and the operands in shared memory are where TF32 tensor cores
// would have them, so that the stages need not know which unit does it: lane 4g+t sums rows g and g+8 and columns 2t and
// 2t+1 of each tile, and reads what belongs to the other lanes of its row and column.
struct Ffma : FloatFragments {
  template <int F>
  struct Operand {
    static_assert(F == 2, "a step of 8 has to be 8 neighbouring values");
    static constexpr int STEP = 2;
    float values[2][2];
  };

  template <int F>
  using Raw = Operand<F>;

  template <int F, typename LoadB>
  static __device__ __forceinline__ Raw<F> read(int tile, int step, int lane, LoadB load_b) {
    Raw<F> raw;
#pragma unroll
    for (int which = 0; which < 2; ++which) load_b(tile, 2 * (lane % 4) + which, 2 * step, raw.values[which]);
    return raw;
  }

  static __device__ __forceinline__ Operand<2> pack(const Raw<2>& raw) { return raw; }

  // acc += a b for two indices of the sum: a holds (g, k), (g+8, k), (g, k'), (g+8, k'), b (k, k') of the lane's columns.
  template <int ROWS, int COLUMNS>
  static __device__ __forceinline__ void multiply(float (&acc)[ROWS][COLUMNS][4], const float (&a)[ROWS][4], const Operand<2> (&b)[COLUMNS]) {
#pragma unroll
    for (int k = 0; k < 2; ++k)
#pragma unroll
      for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
          for (int c = 0; c < 4; ++c) acc[i][j][c] = fmaf(a[i][2 * k + c / 2], b[j].values[c % 2][k], acc[i][j][c]);
  }

  template <int K, int F, int PAGE, int ROWS, int COLUMNS, typename GetB>
  static __device__ __forceinline__ void product(float (&acc)[ROWS][COLUMNS][4], const float* a, int lane, GetB operand) {
#pragma unroll 8
    for (int pair = 0; pair < K / 2; ++pair) {
      float quad[ROWS][4];
      Operand<F> b[COLUMNS];
#pragma unroll
      for (int i = 0; i < ROWS; ++i) load(quad[i], a + (i * (K / 8) + pair / 4) * PAGE + 4 * (lane & ~3) + 4 * (pair % 4));
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) b[j] = operand(j, pair);
      multiply(acc, quad, b);
    }
  }

  // The same for a part of a longer sum; nothing is kept beside the accumulators.
  template <int ROWS, int COLUMNS>
  struct Sums {
    __device__ __forceinline__ void add_to(float (&)[ROWS][COLUMNS][4]) const {}
  };

  template <int K, int F, int PAGE, int ROWS, int COLUMNS, typename GetB>
  static __device__ __forceinline__ void add_product(float (&acc)[ROWS][COLUMNS][4], Sums<ROWS, COLUMNS>&, const float* a, int lane, GetB operand) {
    product<K, F, PAGE>(acc, a, lane, operand);
  }

  template <int HEAD_STEPS, int STEPS, int KEYS>
  static __device__ __forceinline__ void scores(float (&acc)[1][KEYS][4], const float* query, const float* key, int tile, int first_key, int step, int lane) {
#pragma unroll 4
    for (int pair = 0; pair < 4 * HEAD_STEPS; ++pair) {
      const int page = step + pair / 4, quarter = pair % 4;
      float quad[1][4];
      Operand<2> b[KEYS];
      load(quad[0], query + (tile * STEPS + page) * 128 + 4 * (lane & ~3) + 4 * quarter);
#pragma unroll
      for (int j = 0; j < KEYS; j += 2)
#pragma unroll
        for (int which = 0; which < 2; ++which) {
          float two[4];
          load(two, key + ((first_key + j / 2) * STEPS + page) * 128 + 16 * (2 * (lane % 4) + which) + 4 * quarter);
          b[j].values[which][0] = two[0], b[j].values[which][1] = two[1];
          b[j + 1].values[which][0] = two[2], b[j + 1].values[which][1] = two[3];
        }
      multiply(acc, quad, b);
    }
  }

  // The weight of a key is with the lane of its column, so it is handed round the four lanes of a row.
  template <int STEPS, int STRIDE, int KEYS, int COLUMNS>
  static __device__ __forceinline__ void weighted_sum(float (&out)[1][COLUMNS][4], const float (&p)[1][KEYS][4], const float* v, int first_key, int step, int lane) {
    const float* from = v + 16 * first_key * STRIDE + 8 * step + 2 * (lane % 4);
#pragma unroll
    for (int key = 0; key < KEYS; ++key)
#pragma unroll
      for (int part = 0; part < 8; ++part) {
        const int source = (lane & ~3) | (part / 2);
        const float upper = __shfl_sync(ALL_LANES, p[0][key][part % 2], source);
        const float lower = __shfl_sync(ALL_LANES, p[0][key][2 + part % 2], source);
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
          float value[2];
          load(value, from + (8 * key + part) * STRIDE + 8 * j);
          out[0][j][0] = fmaf(upper, value[0], out[0][j][0]), out[0][j][1] = fmaf(upper, value[1], out[0][j][1]);
          out[0][j][2] = fmaf(lower, value[0], out[0][j][2]), out[0][j][3] = fmaf(lower, value[1], out[0][j][3]);
        }
      }
  }
};
