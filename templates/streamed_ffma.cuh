// The attention's products by fused multiply-adds (see Ffma), for ROWS row tiles of a warp, one after another. A lane needs what belongs to the
// other lanes of its rows, so that queries stay in memory.
struct FfmaStream {
  template <int STEPS>
  struct ReadQuery {  // a row tile of one head
    const float* pages;

    __device__ __forceinline__ void take(const float* from, int) { pages = from; }
  };

  // Scores of KEYS * 8 keys on top of what `start` has for the lane's two rows of a tile, which is added last, so that sums do not round to
  // what is left beside it.
  template <int STEPS, typename Query, int ROWS, int KEYS>
  static __device__ __forceinline__ void scores(float (&p)[ROWS][KEYS][4], const Query (&query)[ROWS], const float (&start)[ROWS][4], const float* key, int lane) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      float sums[1][KEYS][4] = {};
      Ffma::scores<STEPS, STEPS>(sums, query[i].pages, key, 0, 0, 0, lane);
#pragma unroll
      for (int j = 0; j < KEYS; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c) p[i][j][c] = sums[0][j][c] + start[i][c];
    }
  }

  template <int ROWS, int KEYS>
  struct Weights {
    float p[ROWS][1][KEYS][4];

    __device__ __forceinline__ void take(const float (&from)[ROWS][KEYS][4]) {
#pragma unroll
      for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int j = 0; j < KEYS; ++j)
#pragma unroll
          for (int c = 0; c < 4; ++c) p[i][0][j][c] = from[i][j][c];
    }
  };

  // Sums of values times weights.
  template <int STEPS, int STRIDE, int ROWS>
  struct Sums {
    float out[ROWS][1][STEPS][4] = {};

    template <int KEYS>
    __device__ __forceinline__ void add(const Weights<ROWS, KEYS>& weights, const float* value, int lane) {
#pragma unroll
      for (int i = 0; i < ROWS; ++i) Ffma::weighted_sum<STEPS, STRIDE>(out[i], weights.p[i], value, 0, 0, lane);
    }

    __device__ __forceinline__ void rescale(int i, int half, float factor) {
#pragma unroll
      for (int j = 0; j < STEPS; ++j) out[i][0][j][2 * half] *= factor, out[i][0][j][2 * half + 1] *= factor;
    }

    __device__ __forceinline__ float result(int i, int j, int c) const { return out[i][0][j][c]; }
  };
};
