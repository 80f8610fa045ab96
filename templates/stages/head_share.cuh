// Stages 2 and 3 with HEAD_WARPS warps for each head of a sequence. Groups of ROWS row tiles go to these warps in turn. A warp computes q, k and v of
// its groups, each as HeadRegisters does of a short sequence. It keeps q; k and v it stores as the operands they are, a whole quadruple a lane, and
// behind a barrier it attends to all keys of the sequence for its own queries.
template <typename C>
struct HeadShare {
  using Math = typename C::Math;
  using Tile = typename Math::Tile;
  struct Group : C {
    static constexpr int PADDED_LENGTH = 16 * C::QKV_ROWS;
  };
  using Rows = HeadRegisters<Group>;
  using Held = typename Rows::Held;
  using Load = typename Rows::Load;
  static constexpr int TILES = C::PADDED_LENGTH / 16, SLICES = Rows::SLICES, ROWS = C::QKV_ROWS;
  static constexpr int GROUPS = TILES / ROWS, SHARE = ceil_div(GROUPS, C::HEAD_WARPS);  // of which the last may be missing

  Tile queries[SHARE * ROWS][SLICES];

  static __device__ __forceinline__ int head() { return Rows::head(); }
  static __device__ __forceinline__ int sequence() { return Rows::sequence() / C::HEAD_WARPS; }

  // The first row tile of a group of this warp's share, and whether there is that group.
  static __device__ __forceinline__ int first_tile(int group) { return (group * C::HEAD_WARPS + Rows::sequence() % C::HEAD_WARPS) * ROWS; }
  static __device__ __forceinline__ bool exists(int group) { return GROUPS % C::HEAD_WARPS == 0 || first_tile(group) < TILES; }

  // Where a row tile's keys or values of 16 channels of the head start in their buffer.
  static __device__ __forceinline__ int page(int tile, int slice) {
    return ((sequence() * TILES + tile) * C::QUERY_PAGES + (head() * SLICES + slice) * Math::PAGES) * 128;
  }

  // `held` has the first portion's weights; those of further ones are read here.
  __device__ __forceinline__ void project(float* shared, const Element* __restrict__ weight, {{ "const Element* __restrict__ bias, " if spec.qkv_bias }}Held& held) {
    const int lane = threadIdx.x % 32;
    Rows rows;
#pragma unroll
    for (int portion = 0; portion < Rows::PORTIONS; ++portion) {
      if (portion > 0) {
        __syncwarp();
        held.read(lane, Load{weight, portion}), held.pack();
      }
#pragma unroll
      for (int group = 0; group < SHARE; ++group) {
        if (!exists(group)) break;
        __syncwarp();
        // Rows looks for its tokens where they would be if ROWS tiles were a sequence, and each warp had its own.
        const int away = sequence() * TILES + first_tile(group) - Rows::sequence() * ROWS;
        rows.multiply(shared + away * C::NORMED_PAGES * C::NORMED_PAGE, {{ "bias, " if spec.qkv_bias }}held, portion, 0, lane);
        keep(shared, rows, portion, group, lane);
      }
    }
  }

  // What `rows` has of one portion: q stays, k and v are stored.
  __device__ __forceinline__ void keep(float* shared, const Rows& rows, int portion, int group, int lane) {
    const int slice = portion / Rows::TURNS;
#pragma unroll
    for (int m = 0; m < Rows::MATRICES; ++m)
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
        const int matrix = Rows::matrix(portion, m);
        const Tile& made = rows.operands[matrix][i][slice];
        if (matrix == 0) {
          queries[group * ROWS + i][slice] = made;
        } else {
          float* to = shared + (matrix == 1 ? C::KEY : C::VALUE) + page(first_tile(group) + i, slice) + 4 * lane;
#pragma unroll
          for (int p = 0; p < Math::PAGES; ++p) store(to + p * 128, made.part[p]);
        }
      }
  }

  // The operands of one row tile of queries, as Attention::attend multiplies them.
  struct RowTile {
    static constexpr bool IN_SHARED = false;
    static constexpr int KEYS = C::KEY_TILE / 8, KEY_STEPS = C::PADDED_LENGTH / C::KEY_TILE, UNROLL = KEY_STEPS <= 4 ? KEY_STEPS : 1;
    const float* shared;
    const Tile (&queries)[SLICES];
    int lane;

    __device__ __forceinline__ void scores(float (&p)[1][KEYS][4], int step) const {
      typename Math::template Sums<1, KEYS> sums;
#pragma unroll
      for (int slice = 0; slice < SLICES; ++slice)
#pragma unroll
        for (int pair = 0; pair < KEYS / 2; ++pair) {
          const Tile keys = Math::template load_tile<128>(shared + C::KEY + page(step * (KEYS / 2) + pair, slice), lane);
#pragma unroll
          for (int octet = 0; octet < 2; ++octet) Math::multiply(p, sums, 0, 2 * pair + octet, queries[slice], keys, octet);
        }
      sums.add_to(p);
    }

    __device__ __forceinline__ void weighted_sum(float (&out)[1][2 * SLICES][4], const float (&p)[1][KEYS][4], int step) const {
      typename Math::template Sums<1, 2 * SLICES> sums;
#pragma unroll
      for (int pair = 0; pair < KEYS / 2; ++pair) {
        const Tile weights = Math::tile(p[0][2 * pair], p[0][2 * pair + 1]);
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice) {
          const Tile values = Math::template load_tile<128>(shared + C::VALUE + page(step * (KEYS / 2) + pair, slice), lane);
#pragma unroll
          for (int octet = 0; octet < 2; ++octet) Math::multiply(out, sums, 0, 2 * slice + octet, weights, values, octet);
        }
      }
      sums.add_to(out);
    }
  };

  __device__ __forceinline__ void attend(float* shared{% for term in spec.terms | declared %}, {{ term }}{% endfor %}{{ ", int first_sequence, int sequences" if spec.key_mask }}) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int group = 0; group < SHARE; ++group) {
      if (!exists(group)) break;
      __syncwarp();
#pragma unroll
      for (int i = 0; i < ROWS; ++i)
        Attention<C>::attend(shared, RowTile{shared, queries[group * ROWS + i], lane}, sequence() * TILES + first_tile(group) + i, head(), lane{% for term in spec.terms %}, {{ term }}{% endfor %}{{ ", first_sequence, sequences" if spec.key_mask }});
    }
  }
};
