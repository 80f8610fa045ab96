// Stage 2: q, k and v of the block's tokens. Warps stand ACROSS side by side over groups of column tiles; the others take
// further rows. Tile j of a group is COLUMN_GROUPS tiles from its tile j-1. Each head's columns are padded to PADDED_HEAD_DIM, and a column tile lies in one head of one of q, k, v.
template <typename C>
struct QkvProduct {
  using Math = typename C::Math;
  using Held = HeldWeights<Math, C::PADDED_DIM, C::FRAGMENT, C::QKV_COLUMNS>;
  static constexpr int COLUMN_GROUPS = 3 * C::INNER / 8 / C::QKV_COLUMNS, ROW_GROUPS = C::ROWS / 16 / C::QKV_ROWS;
  static constexpr int ACROSS = C::QKV_WARPS_ACROSS, DOWN = C::WARPS / ACROSS;

  // FRAGMENT weights of a column of tile j of the group, from channel k on: values, or the words that hold them.
  struct Load {
    const Element* __restrict__ weight;
    int group;

    template <typename T, int N>
    __device__ __forceinline__ void operator()(int j, int within_tile, int k, T (&to)[N]) const {
      const int column = (j * COLUMN_GROUPS + group) * 8 + within_tile;
      int row = column;
      bool real = true;
      if constexpr (C::HEAD_DIM < C::PADDED_HEAD_DIM) {
        const int head = column / C::PADDED_HEAD_DIM, within = column % C::PADDED_HEAD_DIM;  // head counts through q, k and v
        row = head * C::HEAD_DIM + within, real = within < C::HEAD_DIM;
      }
      const Element* from = weight + row * C::DIM + k;
#pragma unroll
      for (int i = 0; i < N; ++i) to[i] = T{};
      if constexpr (C::DIM % C::FRAGMENT == 0) {
        if (real && (C::DIM == C::PADDED_DIM || k < C::DIM)) load_constant(to, from);
      } else {
        load_some<true>(to, from, real, k, C::DIM);
      }
    }
  };

{% if spec.qkv_bias %}
  // The bias of two neighbouring columns of tile j of the group; padded ones have none.
  static __device__ __forceinline__ void load_bias(float (&to)[2], const Element* __restrict__ bias, int j, int group, int lane) {
    const int column = (j * COLUMN_GROUPS + group) * 8 + 2 * (lane % 4);
    const int head = column / C::PADDED_HEAD_DIM, within = column % C::PADDED_HEAD_DIM;  // head counts through q, k and v
    to[0] = to[1] = 0.0f;
    if constexpr (C::HEAD_DIM % 2 == 0) {
      if (within < C::HEAD_DIM) load_constant(to, bias + head * C::HEAD_DIM + within);
    } else {
      load_some<true>(to, bias + head * C::HEAD_DIM + within, true, within, C::HEAD_DIM);
    }
  }

{% endif %}
  template <typename GetB>
  static __device__ __forceinline__ void rows(float* shared, {{ "const Element* __restrict__ bias, " if spec.qkv_bias }}int group, int warp, int lane, GetB operand) {
    constexpr int STEPS = C::INNER / 8;
#pragma unroll 1
    for (int turn = 0; turn < ceil_div(ROW_GROUPS, DOWN); ++turn) {
      const int row_group = warp / ACROSS + turn * DOWN, first_tile = row_group * C::QKV_ROWS;
      if (ROW_GROUPS % DOWN != 0 && row_group >= ROW_GROUPS) break;
{% if spec.qkv_bias %}
      float biases[C::QKV_COLUMNS][2];
#pragma unroll
      for (int j = 0; j < C::QKV_COLUMNS; ++j) load_bias(biases[j], bias, j, group, lane);
{% endif %}
      float acc[C::QKV_ROWS][C::QKV_COLUMNS][4] = {};
      Math::template product<C::PADDED_DIM, C::FRAGMENT, C::NORMED_PAGE>(acc, shared + C::NORMED + first_tile * C::NORMED_PAGES * C::NORMED_PAGE, lane, operand);
#pragma unroll
      for (int j = 0; j < C::QKV_COLUMNS; ++j) {
        constexpr int EACH = C::QKV_COLUMNS / 3;  // a group with as many tiles of q as of k and v knows which is which
        const int which = C::QKV_COLUMNS % 3 == 0 ? j / (EACH > 0 ? EACH : 1) : (j * COLUMN_GROUPS + group) / STEPS;
        const int step = j * COLUMN_GROUPS + group - which * STEPS;
#pragma unroll
        for (int i = 0; i < C::QKV_ROWS; ++i) {
{% if spec.qkv_bias %}
#pragma unroll
          for (int c = 0; c < 4; ++c) acc[i][j][c] += biases[j][c % 2];
{% endif %}
          if (which == 0)
            Math::template store_query<STEPS>(shared + C::QUERY, first_tile + i, step, lane, acc[i][j]);
          else if (which == 1)
            Math::template store_key<STEPS>(shared + C::KEY, first_tile + i, step, lane, acc[i][j]);
          else
            Math::template store_value<STEPS, C::VALUE_STRIDE>(shared + C::VALUE, first_tile + i, step, lane, acc[i][j]);
        }
      }
    }
  }

  // Weights held in registers for all rows; with the first column group's already there when PREFETCHED.
  template <bool PREFETCHED>
  static __device__ __forceinline__ void run(float* shared, const Element* __restrict__ weight, {{ "const Element* __restrict__ bias, " if spec.qkv_bias }}Held& held) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int turn = 0; turn < ceil_div(COLUMN_GROUPS, ACROSS); ++turn) {
      const int group = warp % ACROSS + turn * ACROSS;
      if (COLUMN_GROUPS % ACROSS != 0 && group >= COLUMN_GROUPS) break;
      if (!PREFETCHED || turn > 0) held.read(lane, Load{weight, group});
      held.pack();
      rows(shared, {{ "bias, " if spec.qkv_bias }}group, warp, lane, [&](int j, int step) { return held.values[j][step]; });
    }
  }

  // Weights read from global memory (and the caches) at each use.
  static __device__ __forceinline__ void run_streaming(float* shared, const Element* __restrict__ weight{{ ", const Element* __restrict__ bias" if spec.qkv_bias }}) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int turn = 0; turn < ceil_div(COLUMN_GROUPS, ACROSS); ++turn) {
      const int group = warp % ACROSS + turn * ACROSS;
      if (COLUMN_GROUPS % ACROSS != 0 && group >= COLUMN_GROUPS) break;
      rows(shared, {{ "bias, " if spec.qkv_bias }}group, warp, lane, [&](int j, int step) { return Math::pack(Math::template read<C::FRAGMENT>(j, step, lane, Load{weight, group})); });
    }
  }
};
