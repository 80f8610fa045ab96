#ifdef __CUDACC__  // PTX; a host build brings its own versions of these functions

// c = a b + from, for operands as mma_m16n8k16_fp16 has them: `from` stays, which spares its copies.
__device__ __forceinline__ void mma_from_fp16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, const float (&from)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(from[0]), "f"(from[1]), "f"(from[2]), "f"(from[3]));
}

__device__ __forceinline__ void mma_from_bf16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, const float (&from)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(from[0]), "f"(from[1]), "f"(from[2]), "f"(from[3]));
}

#endif

template <typename Format>
struct StreamFormat;
template <>
struct StreamFormat<Fp16> {
  static constexpr unsigned ONES = 0x3c003c00u;

  static __device__ __forceinline__ void mma_from(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, const float (&start)[4]) {
    mma_from_fp16(c, a, b0, b1, start);
  }
};
template <>
struct StreamFormat<Bf16> {
  static constexpr unsigned ONES = 0x3f803f80u;

  static __device__ __forceinline__ void mma_from(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, const float (&start)[4]) {
    mma_from_bf16(c, a, b0, b1, start);
  }
};

// The attention's products on the tensor cores in 16-bit types (see HalfCore for the fragments), for ROWS row tiles of a warp at once, which
// share what is read of keys and values. Queries stay in registers; weights become operand A in the lanes that hold their scores.
template <typename Format, int PARTS>
struct HalfStream {
  using Math = HalfCore<Format, PARTS>;

  // A row tile of one head, in registers.
  template <int STEPS>
  struct HeldQuery {
    static constexpr bool HELD = true;
    unsigned quad[STEPS / 2][PARTS][4];

    __device__ __forceinline__ void take(const float* from, int lane) {
#pragma unroll
      for (int step = 0; step < STEPS / 2; ++step) fetch(quad[step], from, step, lane);
    }

    // The same from accumulators.
    template <int COLUMNS>
    __device__ __forceinline__ void hold(const float (&acc)[COLUMNS][4]) {
#pragma unroll
      for (int step = 0; step < STEPS / 2; ++step) {
        const typename Math::Tile tile = Math::tile(acc[2 * step], acc[2 * step + 1]);
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
          for (int word = 0; word < 4; ++word) quad[step][part][word] = tile.part[part][word];
      }
    }

    __device__ __forceinline__ void get(unsigned (&to)[PARTS][4], int step) const {
#pragma unroll
      for (int part = 0; part < PARTS; ++part)
#pragma unroll
        for (int word = 0; word < 4; ++word) to[part][word] = quad[step][part][word];
    }
  };

  // The same in memory: too many registers.
  template <int STEPS>
  struct ReadQuery {
    static constexpr bool HELD = false;
    const float* pages;

    __device__ __forceinline__ void take(const float* from, int) { pages = from; }
    __device__ __forceinline__ void get(unsigned (&to)[PARTS][4], int step) const { fetch(to, pages, step, threadIdx.x % 32); }
  };

  static __device__ __forceinline__ void fetch(unsigned (&to)[PARTS][4], const float* from, int step, int lane) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) load(to[part], from + (step * PARTS + part) * 128 + 4 * lane);
  }

  // Scores of KEYS * 8 keys, which come on top of what `start` has for the lane's rows of a tile: that costs nothing, because the
  // accumulators have to start with something.
  template <int STEPS, typename Query, int ROWS, int KEYS>
  static __device__ __forceinline__ void scores(float (&p)[ROWS][KEYS][4], const Query (&query)[ROWS], const float (&start)[ROWS][4], const float* key, int lane) {
    constexpr int AT_ONCE = Query::HELD ? 2 : KEYS;  // tiles of 8 keys for which a page of the query is fetched
#pragma unroll
    for (int first = 0; first < KEYS; first += AT_ONCE) {
      float rest[ROWS][AT_ONCE][4] = {};  // SCALE times too large
#pragma unroll
      for (int step = 0; step < STEPS / 2; ++step) {
        unsigned a[ROWS][PARTS][4];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) query[i].get(a[i], step);
#pragma unroll
        for (int j = 0; j < AT_ONCE; j += 2) {
          unsigned b[2][PARTS][2];
#pragma unroll
          for (int part = 0; part < PARTS; ++part)
            load(reinterpret_cast<unsigned(&)[PARTS][4]>(b)[part], key + (((first + j) / 2 * (STEPS / 2) + step) * PARTS + part) * 128 + 4 * lane);
#pragma unroll
          for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int next = 0; next < 2; ++next) {
              if constexpr (PARTS == 2) {
                Format::mma(rest[i][j + next], a[i][1], b[next][0][0], b[next][0][1]);
                Format::mma(rest[i][j + next], a[i][0], b[next][1][0], b[next][1][1]);
              }
              if (step == 0)
                StreamFormat<Format>::mma_from(p[i][first + j + next], a[i][0], b[next][0][0], b[next][0][1], start[i]);
              else
                Format::mma(p[i][first + j + next], a[i][0], b[next][0][0], b[next][0][1]);
            }
        }
      }
      if constexpr (PARTS == 2) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
          for (int j = 0; j < AT_ONCE; ++j)
#pragma unroll
            for (int c = 0; c < 4; ++c) p[i][first + j][c] = fmaf(rest[i][j][c], 1.0f / Math::SCALE, p[i][first + j][c]);
      }
    }
  }

  // Weights as operand A. Their rests are kept as they are, not SCALE times as large: the largest weight of a row is far from
  // the smallest numbers of the type, and what an absolute error of 2^-25 is to the row's sum matters, not what it is to the weight.
  template <int ROWS, int KEYS>
  struct Weights {
    unsigned quad[ROWS][KEYS / 2][PARTS][4];

    __device__ __forceinline__ void take(const float (&p)[ROWS][KEYS][4]) {
#pragma unroll
      for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int j = 0; j < KEYS; ++j)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float first = p[i][j][2 * half], second = p[i][j][2 * half + 1];
            unsigned(&to)[PARTS][4] = quad[i][j / 2];
            to[0][j % 2 * 2 + half] = Format::pack(first, second);
            if constexpr (PARTS == 2) {
              const float2 rounded = Format::unpack(to[0][j % 2 * 2 + half]);
              to[1][j % 2 * 2 + half] = Format::pack(first - rounded.x, second - rounded.y);
            }
          }
    }

    // Whether a weight may be 2 or more: then the top bit of its exponent is set.
    __device__ __forceinline__ bool reach_two() const {
      unsigned bits = 0;
#pragma unroll
      for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int pair = 0; pair < KEYS / 2; ++pair)
#pragma unroll
          for (int word = 0; word < 4; ++word) bits |= quad[i][pair][0][word];
      return (bits & 0x40004000u) != 0;
    }
  };

  // Sums of values times weights, and of weights, for ROWS row tiles.
  template <int STEPS, int STRIDE, int ROWS>
  struct Sums {
    float out[ROWS][STEPS][4] = {};
    float rest[PARTS == 2 ? ROWS : 1][PARTS == 2 ? STEPS : 1][4] = {};  // of values with a rest, SCALE times too large

    template <int KEYS>
    __device__ __forceinline__ void add(const Weights<ROWS, KEYS>& weights, const float* value, int lane) {
#pragma unroll
      for (int pair = 0; pair < KEYS / 2; ++pair)
#pragma unroll
        for (int j = 0; j < STEPS; j += 3 - PARTS) {
          unsigned b[3 - PARTS][PARTS][2];
          load(reinterpret_cast<unsigned(&)[4]>(b), value + (pair * STEPS + j) / (3 - PARTS) * 128 + 4 * lane);
#pragma unroll
          for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int next = 0; next < 3 - PARTS; ++next) {
              const unsigned(&a)[PARTS][4] = weights.quad[i][pair];
              if constexpr (PARTS == 2) {
                Format::mma(rest[i][j], a[0], b[0][1][0], b[0][1][1]);
                Format::mma(out[i][j], a[1], b[0][0][0], b[0][0][1]);
              }
              Format::mma(out[i][j + next], a[0], b[next][0][0], b[next][0][1]);
            }
        }
    }

    __device__ __forceinline__ void rescale(int i, int half, float factor) {
#pragma unroll
      for (int j = 0; j < STEPS; ++j)
#pragma unroll
        for (int c = 2 * half; c < 2 * half + 2; ++c) {
          out[i][j][c] *= factor;
          if constexpr (PARTS == 2) rest[i][j][c] *= factor;
        }
    }

    __device__ __forceinline__ float result(int i, int j, int c) const {
      return PARTS == 2 ? fmaf(rest[PARTS == 2 ? i : 0][PARTS == 2 ? j : 0][c], 1.0f / Math::SCALE, out[i][j][c]) : out[i][j][c];
    }
  };

  // Adds the weights of each row with the same unit: a column of ones.
  template <int ROWS, int KEYS>
  static __device__ __forceinline__ void add_rows(float (&sum)[ROWS][4], const Weights<ROWS, KEYS>& weights) {
    constexpr unsigned ONES = StreamFormat<Format>::ONES;
#pragma unroll
    for (int pair = 0; pair < KEYS / 2; ++pair)
#pragma unroll
      for (int i = 0; i < ROWS; ++i) Format::mma(sum[i], weights.quad[i][pair][0], ONES, ONES);
  }
};
