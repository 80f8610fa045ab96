// Stages 2 and 3 without shared memory between them: a warp computes q, k and v of one head for all tokens of one sequence, keeps them as
// operands in registers, and then its attention. Accumulators of q are where operand A of the scores has to be, those of k where their
// operand B; v is computed transposed (operand A is the weights, B the tokens), so that its accumulators are operand B of the weighted sum.
// Weights are held for MATRICES of q, k and v and 16 channels of the head at a time; the row tiles go by ROWS at a time.
template <typename C>
struct HeadRegisters {
  using Math = typename C::Math;
  using Tile = typename Math::Tile;
  static constexpr int TILES = C::PADDED_LENGTH / 16, SLICES = C::PADDED_HEAD_DIM / 16, ROWS = C::QKV_ROWS;
  static constexpr int MATRICES = C::QKV_COLUMNS / 2, TURNS = 3 / MATRICES, PASSES = TURNS * SLICES;
  using Held = HeldWeights<Math, C::PADDED_DIM, C::FRAGMENT, 2 * MATRICES>;

  Tile operands[3][TILES][SLICES];  // q, k and v transposed

  static __device__ __forceinline__ int head() { return static_cast<int>(threadIdx.x) / 32 % C::HEADS; }
  static __device__ __forceinline__ int sequence() { return threadIdx.x / 32 / C::HEADS; }

  // Which of q, k and v the matrix `m` of a pass is: q comes last, as it is needed first.
  static __device__ __forceinline__ constexpr int matrix(int pass, int m) { return MATRICES == 3 ? m : (pass % TURNS + 1) % 3; }

  // FRAGMENT weights of a column of tile j of a pass, from channel k on.
  struct Load {
    const Element* __restrict__ weight;
    int pass;

    template <typename T, int N>
    __device__ __forceinline__ void operator()(int j, int within_tile, int k, T (&to)[N]) const {
      const int column = (matrix(pass, j / 2) * C::HEADS + head()) * C::PADDED_HEAD_DIM + 16 * (pass / TURNS) + 8 * (j % 2) + within_tile;
      QkvProduct<C>::load_weights(weight, column, k, to);
    }
  };

  // `held` has the first pass's weights; further passes' are read here.
  __device__ __forceinline__ void project(const float* shared, const Element* __restrict__ weight, Held& held) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      if (pass > 0) held.read(lane, Load{weight, pass}), held.pack();
#pragma unroll
      for (int first = 0; first < TILES; first += ROWS) multiply(shared, held, pass, first, lane);
    }
  }

  // One pass over ROWS row tiles.
  __device__ __forceinline__ void multiply(const float* shared, const Held& held, int pass, int first, int lane) {
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
          for (int i = 0; i < ROWS; ++i) {
            if (matrix(pass, m) < 2)
              Math::multiply(acc, sums, i, 2 * m + octet, tokens[i], weights, octet);
            else
              Math::multiply(acc, sums, i, 2 * m + octet, weights, tokens[i], octet);
          }
      }
    }
    sums.add_to(acc);
#pragma unroll
    for (int m = 0; m < MATRICES; ++m)
#pragma unroll
      for (int i = 0; i < ROWS; ++i) operands[matrix(pass, m)][first + i][pass / TURNS] = Math::tile(acc[i][2 * m], acc[i][2 * m + 1]);
  }

  // Those of row tile `tile`, as Attention::attend multiplies them.
  struct RowTile {
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

  __device__ __forceinline__ void attend(float* shared) const {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
      Attention<C>::attend(shared, RowTile{operands, tile}, sequence() * TILES + tile, head(), threadIdx.x % 32);
  }
};
