// Stages 2 and 3 without shared memory between them: a warp computes q, k and v of one head for all tokens of one sequence, keeps them as
// operands in registers, and then its attention. Accumulators of q are where operand A of the scores has to be, those of k where their
// operand B has to be, and those of v, transposed within the warp, where operand B of the weighted sum has to be.
// The weights are held in portions: MATRICES of q, k and v for 16 channels of the head. Row tiles go ROWS at a time, with a __syncwarp between, over
// which the compiler moves no loads: it would fetch the tokens of all of them at once, and run out of registers.
template <typename C>
struct HeadRegisters {
  using Math = typename C::Math;
  using Tile = typename Math::Tile;
  static constexpr int TILES = C::PADDED_LENGTH / 16, SLICES = C::PADDED_HEAD_DIM / 16, ROWS = C::QKV_ROWS;
  static constexpr int MATRICES = C::QKV_COLUMNS / 2, TURNS = 3 / MATRICES, PORTIONS = TURNS * SLICES;
  using Held = HeldWeights<Math, C::PADDED_DIM, C::FRAGMENT, 2 * MATRICES>;

  Tile operands[3][TILES][SLICES];  // q, k and v transposed

  static __device__ __forceinline__ int head() { return static_cast<int>(threadIdx.x) / 32 % C::HEADS; }
  static __device__ __forceinline__ int sequence() { return threadIdx.x / 32 / C::HEADS; }

  // Which of q, k and v the matrix `m` of a portion is: q comes last, as it is needed first.
  static __device__ __forceinline__ constexpr int matrix(int portion, int m) { return MATRICES == 3 ? m : (portion % TURNS + 1) % 3; }

  // FRAGMENT weights of a column of tile j of a portion, from channel k on.
  struct Load {
    const Element* __restrict__ weight;
    int portion;

    template <typename T, int N>
    __device__ __forceinline__ void operator()(int j, int within_tile, int k, T (&to)[N]) const {
      const int column = (matrix(portion, j / 2) * C::HEADS + head()) * C::PADDED_HEAD_DIM + 16 * (portion / TURNS) + 8 * (j % 2) + within_tile;
{% if shares %}
      if constexpr (C::WEIGHTS_SHARED) {
        load(to, weight + SharedWeights<C>::qkv_place(column - within_tile, within_tile, k));
        return;
      }
{% endif %}
      QkvProduct<C>::load_weights(weight, column, k, to);
    }
  };

  // `held` has the first portion's weights; those of further ones are read here.
  __device__ __forceinline__ void project(const float* shared, const Element* __restrict__ weight, {{ "const Element* __restrict__ bias, " if spec.qkv_bias }}Held& held) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int portion = 0; portion < PORTIONS; ++portion) {
      if (portion > 0) {
        __syncwarp();
        held.read(lane, Load{weight, portion}), held.pack();
      }
#pragma unroll
      for (int first = 0; first < TILES; first += ROWS) {
        __syncwarp();
        multiply(shared, {{ "bias, " if spec.qkv_bias }}held, portion, first, lane);
      }
    }
  }

  // One portion for ROWS row tiles.
  __device__ __forceinline__ void multiply(const float* shared, {{ "const Element* __restrict__ bias, " if spec.qkv_bias }}const Held& held, int portion, int first, int lane) {
    const float* a = shared + C::NORMED + (sequence() * TILES + first) * C::NORMED_PAGES * C::NORMED_PAGE;
    float acc[ROWS][2 * MATRICES][4] = {};
    typename Math::template Sums<ROWS, 2 * MATRICES> sums;
#pragma unroll
    for (int step = 0; step < Held::STEPS; ++step) {
      Tile tokens[ROWS];
#pragma unroll
      for (int i = 0; i < ROWS; ++i) tokens[i] = Math::template load_tile<C::NORMED_PAGE>(a + (i * Held::STEPS + step) * Math::PAGES * C::NORMED_PAGE, lane);
#pragma unroll
      for (int m = 0; m < MATRICES; ++m) {
        const Tile weights = Math::tile(held.values[2 * m][step], held.values[2 * m + 1][step]);
#pragma unroll
        for (int octet = 0; octet < 2; ++octet)
#pragma unroll
          for (int i = 0; i < ROWS; ++i) Math::multiply(acc, sums, i, 2 * m + octet, tokens[i], weights, octet);
      }
    }
    sums.add_to(acc);
{% if spec.qkv_bias %}
#pragma unroll
    for (int j = 0; j < 2 * MATRICES; ++j) {
      float pair[2];
      QkvProduct<C>::load_bias(bias, (matrix(portion, j / 2) * C::HEADS + head()) * C::PADDED_HEAD_DIM + 16 * (portion / TURNS) + 8 * (j % 2) + 2 * (lane % 4), pair);
#pragma unroll
      for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c) acc[i][j][c] += pair[c % 2];
    }
{% endif %}
#pragma unroll
    for (int m = 0; m < MATRICES; ++m)
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
        const Tile result = Math::tile(acc[i][2 * m], acc[i][2 * m + 1]);
        operands[matrix(portion, m)][first + i][portion / TURNS] = matrix(portion, m) == 2 ? Math::transposed(result) : result;
      }
  }

  // Those of row tile `tile`, as Attention::attend multiplies them.
  struct RowTile {
    static constexpr bool IN_SHARED = false;
    static constexpr int KEYS = C::KEY_TILE / 8, UNROLL = C::PADDED_LENGTH / C::KEY_TILE;
    const Tile (&operands)[3][TILES][SLICES];
    int tile;

    __device__ __forceinline__ void scores(float (&p)[1][KEYS][4], int step) const {
      typename Math::template Sums<1, KEYS> sums;
#pragma unroll
      for (int slice = 0; slice < SLICES; ++slice)
#pragma unroll
        for (int j = 0; j < KEYS; ++j)
          Math::multiply(p, sums, 0, j, operands[0][tile][slice], operands[1][step * (KEYS / 2) + j / 2][slice], j % 2);
      sums.add_to(p);
    }

    __device__ __forceinline__ void weighted_sum(float (&out)[1][2 * SLICES][4], const float (&p)[1][KEYS][4], int step) const {
      typename Math::template Sums<1, 2 * SLICES> sums;
#pragma unroll
      for (int pair = 0; pair < KEYS / 2; ++pair) {
        const Tile weights = Math::tile(p[0][2 * pair], p[0][2 * pair + 1]);
#pragma unroll
        for (int j = 0; j < 2 * SLICES; ++j) Math::multiply(out, sums, 0, j, weights, operands[2][step * (KEYS / 2) + pair][j / 2], j % 2);
      }
      sums.add_to(out);
    }
  };

  __device__ __forceinline__ void attend(float* shared{% for term in spec.terms | declared %}, {{ term }}{% endfor %}{{ ", int first_sequence, int sequences" if spec.key_mask }}) const {
#pragma unroll
    for (int first = 0; first < TILES; first += ROWS) {
      __syncwarp();
#pragma unroll
      for (int tile = first; tile < first + ROWS; ++tile)
        Attention<C>::attend(shared, RowTile{operands, tile}, sequence() * TILES + tile, head(), threadIdx.x % 32{% for term in spec.terms %}, {{ term }}{% endfor %}{{ ", first_sequence, sequences" if spec.key_mask }});
    }
  }
};
