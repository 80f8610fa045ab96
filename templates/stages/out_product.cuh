{% set added = ["bias"] * spec.out_bias + ["residual"] * spec.residual %}
// Stage 4: output product{{ ", " ~ added | join(" and ") if added }}, written to the grid by stride.
template <typename C>
struct OutProduct {
  using Math = typename C::Math;
  using Held = HeldWeights<Math, C::INNER, 2, C::OUT_COLUMNS>;
  static constexpr int COLUMN_GROUPS = ceil_div(C::DIM, 8) / C::OUT_COLUMNS, ROW_GROUPS = C::ROWS / 16 / C::OUT_ROWS;
  static constexpr int ACROSS = C::OUT_WARPS_ACROSS, DOWN = C::WARPS / ACROSS;

  // Two weights of a column of tile j of the group, from padded inner column k on: values, or the word that holds them.
  struct Load {
    const Element* __restrict__ weight;
    int group;

    template <typename T, int N>
    __device__ __forceinline__ void operator()(int j, int within_tile, int k, T (&to)[N]) const {
      const int column = (group * C::OUT_COLUMNS + j) * 8 + within_tile;
{% if shares %}
      if constexpr (C::WEIGHTS_SHARED) {
        load(to, weight + SharedWeights<C>::out_place(column - within_tile, within_tile, k));
        return;
      }
{% endif %}
      const bool real = C::DIM % 8 == 0 || column < C::DIM;
      const int within = C::HEAD_DIM < C::PADDED_HEAD_DIM ? k % C::PADDED_HEAD_DIM : 0;
      const Element* from = weight + column * {{ "C::DIM" if spec.inner == spec.dim else "(C::HEADS * C::HEAD_DIM)" }} + k - k / C::PADDED_HEAD_DIM * (C::PADDED_HEAD_DIM - C::HEAD_DIM);
#pragma unroll
      for (int i = 0; i < N; ++i) to[i] = T{};
      if constexpr (C::HEAD_DIM % 2 == 0) {
        if (real && within < C::HEAD_DIM) load_here(to, from);
      } else {
        load_some<true>(to, from, real, within, C::HEAD_DIM);
      }
    }
  };

  template <typename GetB>
  static __device__ __forceinline__ void rows(const float* shared, {{ "const Element* x, " if spec.residual }}Element* y, {{ "const Element* __restrict__ bias, " if spec.out_bias }}int first, int sequences,
                                              int group, int warp, int lane, GetB operand) {
#pragma unroll 1
    for (int turn = 0; turn < ceil_div(ROW_GROUPS, DOWN); ++turn) {
      const int row_group = warp / ACROSS + turn * DOWN, first_tile = row_group * C::OUT_ROWS;
      if (ROW_GROUPS % DOWN != 0 && row_group >= ROW_GROUPS) break;
{% if spec.residual %}
      Word residual[C::OUT_ROWS][C::OUT_COLUMNS][2][2 / PER_WORD];
      each_pair(first, sequences, first_tile, group, lane, [&](int i, int j, int half, int row, int column, long long at) {
        if constexpr (C::KEEP_X) {
{% if keeps %}
          load(residual[i][j][half], reinterpret_cast<const Element*>(shared + C::KEPT) + (row - lane / 4 + kept_place(lane / 4)) * C::KEPT_STRIDE + column);  // zeros past DIM
{% else %}
          load_pair(residual[i][j][half], reinterpret_cast<const Element*>(shared + C::KEPT) + row * C::KEPT_STRIDE + column, column);
{% endif %}
        } else {
          load_pair(residual[i][j][half], x + at, column);
        }
      });
{% endif %}
{% if spec.out_bias %}
      float biases[C::OUT_COLUMNS][2];
#pragma unroll
      for (int j = 0; j < C::OUT_COLUMNS; ++j) {
        const int column = (group * C::OUT_COLUMNS + j) * 8 + 2 * (lane % 4);
        if (C::DIM % 8 == 0 || column < C::DIM) load_pair(biases[j], bias + column, column);
      }
{% endif %}
      float acc[C::OUT_ROWS][C::OUT_COLUMNS][4] = {};
      Math::template product<C::INNER, 2, 128>(acc, shared + C::QUERY + first_tile * C::QUERY_PAGES * 128, lane, operand);
      each_pair(first, sequences, first_tile, group, lane, [&](int i, int j, int half, int, int column, long long at) {
{% if spec.residual %}
        float kept[2];
        unpack(kept, residual[i][j][half]);
{% endif %}
{% set first, second = "acc[i][j][2 * half]", "acc[i][j][2 * half + 1]" %}
{% if spec.residual %}
{% set first, second = first ~ " + kept[0]", second ~ " + kept[1]" %}
{% endif %}
{% if added | length == 2 %}
{% set first, second = "(%s)" | format(first), "(%s)" | format(second) %}
{% endif %}
        const float pair[2] = { {{- "biases[j][0] + " if spec.out_bias }}{{ first }}, {{ "biases[j][1] + " if spec.out_bias }}{{ second -}} };
        if constexpr (C::DIM % 2 == 0) {
          store_global(y + at, pair);
        } else {
          put(y + at, pair[0]);
          if (column + 1 < C::DIM) put(y + at + 1, pair[1]);
        }
      });
    }
  }

  // Two neighbouring channels, the second only where there is one: as values, or as they are in memory.
  template <typename T, int N>
  static __device__ __forceinline__ void load_pair(T (&to)[N], const Element* from, int column) {
    if constexpr (C::DIM % 2 == 0) {
      load(to, from);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) to[i] = T{};
      load_some<false>(to, from, true, column, C::DIM);
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
        if (token >= C::LENGTH || (C::SEQUENCES > 1 && sequence >= sequences)) continue;
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
  static __device__ __forceinline__ void run(const float* shared, {{ "const Element* x, " if spec.residual }}Element* y, const Element* __restrict__ weight,
                                             {{ "const Element* __restrict__ bias, " if spec.out_bias }}int first, int sequences, Held& held) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int turn = 0; turn < ceil_div(COLUMN_GROUPS, ACROSS); ++turn) {
      const int group = warp % ACROSS + turn * ACROSS;
      if (COLUMN_GROUPS % ACROSS != 0 && group >= COLUMN_GROUPS) break;
      if (!PREFETCHED || turn > 0) held.read(lane, Load{weight, group});
      held.pack();
      rows(shared, {{ "x, " if spec.residual }}y, {{ "bias, " if spec.out_bias }}first, sequences, group, warp, lane, [&](int j, int step) { return held.values[j][step]; });
    }
  }

  // Weights held in registers, packed, where one turn takes all columns.
  static __device__ __forceinline__ void run_held(const float* shared, {{ "const Element* x, " if spec.residual }}Element* y, {{ "const Element* __restrict__ bias, " if spec.out_bias }}int first, int sequences,
                                                  const Held& held) {
    static_assert(COLUMN_GROUPS == ACROSS, "the weights of one column group are held");
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    rows(shared, {{ "x, " if spec.residual }}y, {{ "bias, " if spec.out_bias }}first, sequences, warp % ACROSS, warp, lane, [&](int j, int step) { return held.values[j][step]; });
  }

  // Weights read from global memory (and the caches) at each use.
  static __device__ __forceinline__ void run_streaming(const float* shared, {{ "const Element* x, " if spec.residual }}Element* y, const Element* __restrict__ weight,
                                                       {{ "const Element* __restrict__ bias, " if spec.out_bias }}int first, int sequences) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int turn = 0; turn < ceil_div(COLUMN_GROUPS, ACROSS); ++turn) {
      const int group = warp % ACROSS + turn * ACROSS;
      if (COLUMN_GROUPS % ACROSS != 0 && group >= COLUMN_GROUPS) break;
      rows(shared, {{ "x, " if spec.residual }}y, {{ "bias, " if spec.out_bias }}first, sequences, group, warp, lane,
           [&](int j, int step) { return Math::pack(Math::template read<2>(j, step, lane, Load{weight, group})); });
    }
  }
};
