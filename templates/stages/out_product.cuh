// Stage 4: output product, bias and residual, written to the grid by stride.
template <typename C>
struct OutProduct {
  using Math = typename C::Math;
  using Held = HeldWeights<Math, C::INNER, 2, C::OUT_COLUMNS>;
  static constexpr int COLUMN_GROUPS = ceil_div(C::DIM, 8) / C::OUT_COLUMNS, ROW_GROUPS = C::ROWS / 16 / C::OUT_ROWS;
  static constexpr int ACROSS = C::OUT_WARPS_ACROSS, DOWN = C::WARPS / ACROSS;

  // Two weights for this lane's column of tile j of the group, from padded inner column k of a step on.
  static __device__ __forceinline__ void load_weight(float (&to)[2], const float* __restrict__ weight, int group, int j, int k, int which, int lane) {
    const int column = (group * C::OUT_COLUMNS + j) * 8 + Math::b_column(lane, which), inner = k + Math::template b_index<2>(lane);
    const int head = inner / C::PADDED_HEAD_DIM, within = inner % C::PADDED_HEAD_DIM;
    const bool real = C::DIM % 8 == 0 || column < C::DIM;
    const float* from = weight + column * C::DIM + head * C::HEAD_DIM + within;
    to[0] = to[1] = 0.0f;
    if constexpr (C::HEAD_DIM % 2 == 0) {
      if (real && (C::HEAD_DIM == C::PADDED_HEAD_DIM || within < C::HEAD_DIM)) load_constant(to, from);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (real && within + i < C::HEAD_DIM) to[i] = __ldg(from + i);
    }
  }

  static __device__ __forceinline__ void hold(Held& held, const float* __restrict__ weight, int group, int lane) {
    held.fill([&](int j, int k, int which, float(&to)[2]) { load_weight(to, weight, group, j, k, which, lane); });
  }

  template <typename LoadB>
  static __device__ __forceinline__ void rows(const float* shared, const float* x, float* y, const float* __restrict__ bias, int first, int sequences,
                                              int group, int warp, int lane, LoadB load_b) {
#pragma unroll 1
    for (int row_group = warp / ACROSS; row_group < ROW_GROUPS; row_group += DOWN) {
      const int first_tile = row_group * C::OUT_ROWS;
      float residual[C::OUT_ROWS][C::OUT_COLUMNS][4];
      each_pair(first, sequences, first_tile, group, lane, [&](int i, int j, int half, int row, int column, long long at) {
        if constexpr (C::KEEP_X) {
          load_pair(&residual[i][j][2 * half], shared + C::KEPT + row * C::KEPT_STRIDE + column, column);
        } else {
          load_pair(&residual[i][j][2 * half], x + at, column);
        }
      });
      float acc[C::OUT_ROWS][C::OUT_COLUMNS][4] = {};
      Math::template product<C::INNER, 2, 128>(acc, shared + C::QUERY + first_tile * (C::INNER / 8) * 128, lane, load_b);
      each_pair(first, sequences, first_tile, group, lane, [&](int i, int j, int half, int, int column, long long at) {
        float pair[2];
        load_pair(pair, bias + column, column);
        pair[0] += acc[i][j][2 * half] + residual[i][j][2 * half];
        pair[1] += acc[i][j][2 * half + 1] + residual[i][j][2 * half + 1];
        if constexpr (C::DIM % 2 == 0) {
          store(y + at, pair);
        } else {
          y[at] = pair[0];
          if (column + 1 < C::DIM) y[at + 1] = pair[1];
        }
      });
    }
  }

  // Two neighbouring channels, the second only where there is one.
  static __device__ __forceinline__ void load_pair(float* to, const float* from, int column) {
    if constexpr (C::DIM % 2 == 0) {
      *reinterpret_cast<float2*>(to) = *reinterpret_cast<const float2*>(from);
    } else {
      to[0] = from[0];
      to[1] = column + 1 < C::DIM ? from[1] : 0.0f;
    }
  }

  // Calls f for each pair of neighbouring outputs of this lane that exists.
  template <typename F>
  static __device__ __forceinline__ void each_pair(int first, int sequences, int first_tile, int group, int lane, F f) {
#pragma unroll
    for (int i = 0; i < C::OUT_ROWS; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = 16 * (first_tile + i) + 8 * half + lane / 4;
        const int token = row % C::PADDED_LENGTH, sequence = first + row / C::PADDED_LENGTH;
        if (token >= C::LENGTH || sequence >= sequences) continue;
        const long long start = C::offset(sequence, token);
#pragma unroll
        for (int j = 0; j < C::OUT_COLUMNS; ++j) {
          const int column = (group * C::OUT_COLUMNS + j) * 8 + 2 * (lane % 4);
          if (C::DIM % 8 == 0 || column < C::DIM) f(i, j, half, row, column, start + column);
        }
      }
  }

  // Weights held in registers for all rows; with the first column group's already there when PREFETCHED.
  template <bool PREFETCHED>
  static __device__ __forceinline__ void run(const float* shared, const float* x, float* y, const float* __restrict__ weight,
                                             const float* __restrict__ bias, int first, int sequences, Held& held) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    bool ready = PREFETCHED;
#pragma unroll 1
    for (int group = warp % ACROSS; group < COLUMN_GROUPS; group += ACROSS) {
      if (!ready) hold(held, weight, group, lane);
      ready = false;
      rows(shared, x, y, bias, first, sequences, group, warp, lane, [&](int j, int k, int, float(&to)[2]) { held.get(j, k, to); });
    }
  }

  // Weights read from global memory (and the caches) at each use.
  static __device__ __forceinline__ void run_streaming(const float* shared, const float* x, float* y, const float* __restrict__ weight,
                                                       const float* __restrict__ bias, int first, int sequences) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int group = warp % ACROSS; group < COLUMN_GROUPS; group += ACROSS)
      rows(shared, x, y, bias, first, sequences, group, warp, lane,
           [&](int j, int k, int which, float(&to)[2]) { load_weight(to, weight, group, j, k, which, lane); });
  }
};
