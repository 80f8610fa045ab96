// Stage 2: q, k and v of the block's tokens. Warps stand ACROSS side by side over groups of column tiles; the others take
// further rows. A group's tiles are stored Math::STORED_TILES at once, which are neighbours in one head of one of q, k, v; from these to the
// group's next ones are COLUMN_GROUPS times as many. Each head's columns are padded to PADDED_HEAD_DIM.
template <typename C>
struct QkvProduct {
  using Math = typename C::Math;
  using Held = HeldWeights<Math, C::PADDED_DIM, C::FRAGMENT, C::QKV_COLUMNS>;
  static constexpr int COLUMN_GROUPS = 3 * C::INNER / 8 / C::QKV_COLUMNS, ROW_GROUPS = C::ROWS / 16 / C::QKV_ROWS;
  static constexpr int ACROSS = C::QKV_WARPS_ACROSS, DOWN = C::WARPS / ACROSS;
  static constexpr int AT_ONCE = Math::STORED_TILES;

  // Column tile j of a group.
  static __device__ __forceinline__ int column_tile(int j, int group) { return (j / AT_ONCE * COLUMN_GROUPS + group) * AT_ONCE + j % AT_ONCE; }

  // Weights of `column` (which counts through the padded heads of q, k and v) from channel k on: values, or the words that hold them.
  template <typename T, int N>
  static __device__ __forceinline__ void load_weights(const Element* __restrict__ weight, int column, int k, T (&to)[N]) {
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
      if (real && (C::DIM == C::PADDED_DIM || k < C::DIM)) load_here(to, from);
    } else {
      load_some<true>(to, from, real, k, C::DIM);
    }
  }

{% if spec.qkv_bias %}
  // The bias of `column`, counted likewise, and of the next; padded ones have none.
  static __device__ __forceinline__ void load_bias(const Element* __restrict__ bias, int column, float (&to)[2]) {
    const int head = column / C::PADDED_HEAD_DIM, within = column % C::PADDED_HEAD_DIM;
    to[0] = to[1] = 0.0f;
    if constexpr (C::HEAD_DIM % 2 == 0) {
      if (within < C::HEAD_DIM) load_constant(to, bias + head * C::HEAD_DIM + within);
    } else {
      load_some<true>(to, bias + head * C::HEAD_DIM + within, true, within, C::HEAD_DIM);
    }
  }

{% endif %}
  // FRAGMENT weights of a column of tile j of the group, from channel k on.
  struct Load {
    const Element* __restrict__ weight;
    int group;

    template <typename T, int N>
    __device__ __forceinline__ void operator()(int j, int within_tile, int k, T (&to)[N]) const {
      load_weights(weight, column_tile(j, group) * 8 + within_tile, k, to);
    }
  };

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
      for (int j = 0; j < C::QKV_COLUMNS; ++j) load_bias(bias, column_tile(j, group) * 8 + 2 * (lane % 4), biases[j]);
{% endif %}
      float acc[C::QKV_ROWS][C::QKV_COLUMNS][4] = {};
      Math::template product<C::PADDED_DIM, C::FRAGMENT, C::NORMED_PAGE>(acc, shared + C::NORMED + first_tile * C::NORMED_PAGES * C::NORMED_PAGE, lane, operand);
#pragma unroll
      for (int j = 0; j < C::QKV_COLUMNS; j += AT_ONCE) {
        constexpr int EACH = C::QKV_COLUMNS / 3;  // a group with as many tiles of q as of k and v knows which is which
        const int which = C::QKV_COLUMNS % 3 == 0 ? j / (EACH > 0 ? EACH : 1) : column_tile(j, group) / STEPS;
        const int step = column_tile(j, group) - which * STEPS;
#pragma unroll
        for (int i = 0; i < C::QKV_ROWS; ++i) {
{% if spec.qkv_bias %}
#pragma unroll
          for (int c = 0; c < 4 * AT_ONCE; ++c) acc[i][j + c / 4][c % 4] += biases[j + c / 4][c % 2];
{% endif %}
          const float(&tiles)[AT_ONCE][4] = reinterpret_cast<const float(&)[AT_ONCE][4]>(acc[i][j]);
          if (which == 0)
            Math::template store_query<STEPS>(shared + C::QUERY, first_tile + i, step, lane, tiles);
          else if (which == 1)
            Math::template store_key<STEPS>(shared + C::KEY, first_tile + i, step, lane, tiles);
          else
            Math::template store_value<STEPS, C::VALUE_STRIDE>(shared + C::VALUE, first_tile + i, step, lane, tiles);
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
