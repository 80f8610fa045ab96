// Stage 2: q, k and v of the block's tokens. Warps stand ACROSS side by side over groups of column tiles; the others take
// further rows. Each head's columns are padded to PADDED_HEAD_DIM, and a column tile lies in one head of one of q, k, v.
//
// q lies in fragments of operand A and k in fragments of operand B of the scores: both are a tile's accumulators as they are, one
// quadruple a lane. v lies in rows, one a token.
template <typename C>
struct QkvProduct {
  using Math = typename C::Math;
  using Held = HeldWeights<Math, C::PADDED_DIM, C::FRAGMENT, C::QKV_COLUMNS>;
  static constexpr int COLUMN_GROUPS = 3 * C::INNER / 8 / C::QKV_COLUMNS, ROW_GROUPS = C::ROWS / 16 / C::QKV_ROWS;
  static constexpr int ACROSS = C::QKV_WARPS_ACROSS, DOWN = C::WARPS / ACROSS;

  // FRAGMENT weights for this lane's column of tile j of the group, from channel k of a step on.
  static __device__ __forceinline__ void load_weight(float (&to)[C::FRAGMENT], const float* __restrict__ weight, int group, int j, int k, int which, int lane) {
    constexpr int F = C::FRAGMENT;
    const int column = (group * C::QKV_COLUMNS + j) * 8 + Math::b_column(lane, which), channel = k + Math::template b_index<F>(lane);
    const int head = column / C::PADDED_HEAD_DIM, within = column % C::PADDED_HEAD_DIM;  // head counts through q, k and v
    const bool real = C::HEAD_DIM == C::PADDED_HEAD_DIM || within < C::HEAD_DIM;
    const float* from = weight + (head * C::HEAD_DIM + within) * C::DIM + channel;
#pragma unroll
    for (int i = 0; i < F; ++i) to[i] = 0.0f;
    if constexpr (C::DIM % F == 0) {
      if (real && (C::DIM == C::PADDED_DIM || channel < C::DIM)) load_constant(to, from);
    } else {
#pragma unroll
      for (int i = 0; i < F; ++i)
        if (real && channel + i < C::DIM) to[i] = __ldg(from + i);
    }
  }

  static __device__ __forceinline__ void hold(Held& held, const float* __restrict__ weight, int group, int lane) {
    held.fill([&](int j, int k, int which, float(&to)[C::FRAGMENT]) { load_weight(to, weight, group, j, k, which, lane); });
  }

  template <typename LoadB>
  static __device__ __forceinline__ void rows(float* shared, int group, int warp, int lane, LoadB load_b) {
#pragma unroll 1
    for (int row_group = warp / ACROSS; row_group < ROW_GROUPS; row_group += DOWN) {
      const int first_tile = row_group * C::QKV_ROWS;
      float acc[C::QKV_ROWS][C::QKV_COLUMNS][4] = {};
      Math::template product<C::PADDED_DIM, C::FRAGMENT, C::NORMED_TILE>(acc, shared + C::NORMED + first_tile * (C::PADDED_DIM / 8) * C::NORMED_TILE, lane, load_b);
#pragma unroll
      for (int j = 0; j < C::QKV_COLUMNS; ++j) {
        const int tile = group * C::QKV_COLUMNS + j, which = tile / (C::INNER / 8), step = tile % (C::INNER / 8);
#pragma unroll
        for (int i = 0; i < C::QKV_ROWS; ++i) {
          const float(&c)[4] = acc[i][j];
          const int fragment = ((first_tile + i) * (C::INNER / 8) + step) * 128 + 4 * lane;
          if (which == 0) {
            const float quad[4] = {c[0], c[2], c[1], c[3]};
            store(shared + C::QUERY + fragment, quad);
          } else if (which == 1) {
            store(shared + C::KEY + fragment, c);
          } else {
            float* to = shared + C::VALUE + (16 * (first_tile + i) + lane / 4) * C::VALUE_STRIDE + 8 * step + 2 * (lane % 4);
            const float upper[2] = {c[0], c[1]}, lower[2] = {c[2], c[3]};
            store(to, upper);
            store(to + 8 * C::VALUE_STRIDE, lower);
          }
        }
      }
    }
  }

  // Weights held in registers for all rows; with the first column group's already there when PREFETCHED.
  template <bool PREFETCHED>
  static __device__ __forceinline__ void run(float* shared, const float* __restrict__ weight, Held& held) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    bool ready = PREFETCHED;
#pragma unroll 1
    for (int group = warp % ACROSS; group < COLUMN_GROUPS; group += ACROSS) {
      if (!ready) hold(held, weight, group, lane);
      ready = false;
      rows(shared, group, warp, lane, [&](int j, int k, int, float(&to)[C::FRAGMENT]) { held.get(j, k, to); });
    }
  }

  // Weights read from global memory (and the caches) at each use.
  static __device__ __forceinline__ void run_streaming(float* shared, const float* __restrict__ weight) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int group = warp % ACROSS; group < COLUMN_GROUPS; group += ACROSS)
      rows(shared, group, warp, lane, [&](int j, int k, int which, float(&to)[C::FRAGMENT]) { load_weight(to, weight, group, j, k, which, lane); });
  }
};
