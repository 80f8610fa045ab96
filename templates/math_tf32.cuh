// Products on the tensor cores in TF32. PARTS is 1 for plain TF32, rounded to nearest, or 3 for fp32-grade products: each
// operand is split into the part that the unit sees and the rest, and all but the product of the two rests are summed,
// the small ones first (Markidis et al. 2018; Ootomo and Yokota 2022).
template <int PARTS>
struct TensorCore : FloatFragments {
  template <int F>
  struct Operand {
    static constexpr int STEP = 4 * F;  // indices of the sum that a tile takes in one step
    float values[F];
  };
  template <int F>
  using Raw = Operand<F>;

  // load_b(tile, column, index, to) reads F neighbouring values of a column of operand B.
  template <int F, typename LoadB>
  static __device__ __forceinline__ Raw<F> read(int tile, int step, int lane, LoadB load_b) {
    Raw<F> raw;
    load_b(tile, lane / 4, step * 4 * F + F * (lane % 4), raw.values);
    return raw;
  }

  template <int F>
  static __device__ __forceinline__ Operand<F> pack(const Raw<F>& raw) {
    return raw;
  }

  static __device__ __forceinline__ float rest(float value) { return value - __uint_as_float(__float_as_uint(value) & 0xffffe000u); }

  // acc += a b for ROWS x COLUMNS tiles and 8 indices of the sum.
  template <int ROWS, int COLUMNS>
  static __device__ __forceinline__ void multiply(float (&acc)[ROWS][COLUMNS][4], const float (&a)[ROWS][4], const float (&b)[COLUMNS][2]) {
    if constexpr (PARTS == 1) {
      float rounded_a[ROWS][4], rounded_b[COLUMNS][2];
#pragma unroll
      for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int r = 0; r < 4; ++r) rounded_a[i][r] = round_to_tf32(a[i][r]);
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
        for (int r = 0; r < 2; ++r) rounded_b[j][r] = round_to_tf32(b[j][r]);
      accumulate(acc, rounded_a, rounded_b);
    } else {
      float rest_a[ROWS][4], rest_b[COLUMNS][2];
#pragma unroll
      for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int r = 0; r < 4; ++r) rest_a[i][r] = rest(a[i][r]);
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
        for (int r = 0; r < 2; ++r) rest_b[j][r] = rest(b[j][r]);
      // Tensor cores truncate their sums: what is small is added up by itself, and rounded, instead of truncating the sum two times more.
#pragma unroll
      for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
          float small[4] = {};
          mma_m16n8k8_tf32(small, rest_a[i], b[j][0], b[j][1]);
          mma_m16n8k8_tf32(small, a[i], rest_b[j][0], rest_b[j][1]);
          mma_m16n8k8_tf32(acc[i][j], a[i], b[j][0], b[j][1]);
#pragma unroll
          for (int c = 0; c < 4; ++c) acc[i][j][c] += small[c];
        }
    }
  }

  template <int ROWS, int COLUMNS>
  static __device__ __forceinline__ void accumulate(float (&acc)[ROWS][COLUMNS][4], const float (&a)[ROWS][4], const float (&b)[COLUMNS][2]) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) mma_m16n8k8_tf32(acc[i][j], a[i], b[j][0], b[j][1]);
  }

  // acc += a b over K indices; `a` points to the first row tile's pages, PAGE floats apart, and operand(j, step) supplies b.
  template <int K, int F, int PAGE, int ROWS, int COLUMNS, typename GetB>
  static __device__ __forceinline__ void product(float (&acc)[ROWS][COLUMNS][4], const float* a, int lane, GetB operand) {
    constexpr int STEPS = K / (4 * F), UNROLL = STEPS <= 32 ? STEPS : 8;
#pragma unroll UNROLL
    for (int step = 0; step < STEPS; ++step) {
      Operand<F> b[COLUMNS];
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) b[j] = operand(j, step);
#pragma unroll
      for (int part = 0; part < F / 2; ++part) {
        float quad[ROWS][4], pair[COLUMNS][2];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) load(quad[i], a + (i * (K / 8) + step * (F / 2) + part) * PAGE + 4 * lane);
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) pair[j][0] = b[j].values[2 * part], pair[j][1] = b[j].values[2 * part + 1];
        multiply(acc, quad, pair);
      }
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

  // Scores of row tile `tile` with the KEYS * 8 keys from row tile `first_key` on, over HEAD_STEPS column tiles from `step` on.
  template <int HEAD_STEPS, int STEPS, int KEYS>
  static __device__ __forceinline__ void scores(float (&acc)[1][KEYS][4], const float* query, const float* key, int tile, int first_key, int step, int lane) {
#pragma unroll
    for (int part = 0; part < HEAD_STEPS; ++part) {
      float quad[1][4], pairs[KEYS][2];
      load(quad[0], query + (tile * STEPS + step + part) * 128 + 4 * lane);
#pragma unroll
      for (int j = 0; j < KEYS; j += 2) {
        float two[4];
        load(two, key + ((first_key + j / 2) * STEPS + step + part) * 128 + 4 * lane);
        pairs[j][0] = two[0], pairs[j][1] = two[1], pairs[j + 1][0] = two[2], pairs[j + 1][1] = two[3];
      }
      multiply(acc, quad, pairs);
    }
  }

  // out += p v for 16 rows of weights p, which are where their scores were accumulated: the lane that holds keys 2t and
  // 2t+1 feeds them as the sum's indices t and t+4, so v's rows are read in that order.
  template <int STEPS, int STRIDE, int KEYS, int COLUMNS>
  static __device__ __forceinline__ void weighted_sum(float (&out)[1][COLUMNS][4], const float (&p)[1][KEYS][4], const float* v, int first_key, int step, int lane) {
    const float* from = v + (16 * first_key + 2 * (lane % 4)) * STRIDE + 8 * step + lane / 4;
#pragma unroll
    for (int key = 0; key < KEYS; ++key) {
      const float quad[1][4] = {{p[0][key][0], p[0][key][2], p[0][key][1], p[0][key][3]}};
      float pair[COLUMNS][2];
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) pair[j][0] = from[8 * key * STRIDE + 8 * j], pair[j][1] = from[(8 * key + 1) * STRIDE + 8 * j];
      multiply(out, quad, pair);
    }
  }
};
