// The attention's products on the tensor cores in TF32 (see TensorCore), for ROWS row tiles of a warp at once, which share what is read of
// keys and values. Queries stay in registers; weights are operand A where their scores were accumulated.
template <int PARTS>
struct TensorStream {
  using Math = TensorCore<PARTS>;

  // A row tile of one head, in registers.
  template <int STEPS>
  struct HeldQuery {
    float quad[STEPS][4];

    __device__ __forceinline__ void take(const float* from, int lane) {
#pragma unroll
      for (int step = 0; step < STEPS; ++step) load(quad[step], from + step * 128 + 4 * lane);
    }

    __device__ __forceinline__ void get(float (&to)[4], int step) const {
#pragma unroll
      for (int c = 0; c < 4; ++c) to[c] = quad[step][c];
    }
  };

  // The same in memory: too many registers.
  template <int STEPS>
  struct ReadQuery {
    const float* pages;

    __device__ __forceinline__ void take(const float* from, int) { pages = from; }
    __device__ __forceinline__ void get(float (&to)[4], int step) const { load(to, pages + step * 128 + 4 * (threadIdx.x % 32)); }
  };

  // Scores of KEYS * 8 keys on top of what `start` has for the lane's two rows of a tile, which is added last: TF32's sums truncate, and
  // would truncate to what is left beside it.
  template <int STEPS, typename Query, int ROWS, int KEYS>
  static __device__ __forceinline__ void scores(float (&p)[ROWS][KEYS][4], const Query (&query)[ROWS], const float (&start)[ROWS][4], const float* key, int lane) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
      for (int j = 0; j < KEYS; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c) p[i][j][c] = 0.0f;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      float quad[ROWS][4], pairs[KEYS][2];
#pragma unroll
      for (int i = 0; i < ROWS; ++i) query[i].get(quad[i], step);
#pragma unroll
      for (int j = 0; j < KEYS; j += 2) load(reinterpret_cast<float(&)[4]>(pairs[j]), key + (j / 2 * STEPS + step) * 128 + 4 * lane);
      Math::multiply(p, quad, pairs);
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
      for (int j = 0; j < KEYS; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c) p[i][j][c] += start[i][c];
  }

  template <int ROWS, int KEYS>
  struct Weights {
    float p[ROWS][KEYS][4];

    __device__ __forceinline__ void take(const float (&from)[ROWS][KEYS][4]) {
#pragma unroll
      for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int j = 0; j < KEYS; ++j)
#pragma unroll
          for (int c = 0; c < 4; ++c) p[i][j][c] = from[i][j][c];
    }
  };

  // Sums of values times weights. The lane that holds keys 2t and 2t+1 feeds them as the sum's indices t and t+4, so v's rows are read in
  // that order.
  template <int STEPS, int STRIDE, int ROWS>
  struct Sums {
    float out[ROWS][STEPS][4] = {};

    template <int KEYS>
    __device__ __forceinline__ void add(const Weights<ROWS, KEYS>& weights, const float* value, int lane) {
      const float* from = value + 2 * (lane % 4) * STRIDE + lane / 4;
#pragma unroll
      for (int key = 0; key < KEYS; ++key) {
        float quad[ROWS][4], pair[STEPS][2];
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
          for (int c = 0; c < 4; ++c) quad[i][c] = weights.p[i][key][c % 2 * 2 + c / 2];
#pragma unroll
        for (int j = 0; j < STEPS; ++j) pair[j][0] = from[8 * key * STRIDE + 8 * j], pair[j][1] = from[(8 * key + 1) * STRIDE + 8 * j];
        Math::multiply(out, quad, pair);
      }
    }

    __device__ __forceinline__ void rescale(int i, int half, float factor) {
#pragma unroll
      for (int j = 0; j < STEPS; ++j) out[i][j][2 * half] *= factor, out[i][j][2 * half + 1] *= factor;
    }

    __device__ __forceinline__ float result(int i, int j, int c) const { return out[i][j][c]; }
  };
};
