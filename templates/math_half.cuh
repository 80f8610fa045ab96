// Products on the tensor cores in 16-bit types. Format says how two floats become one word. PARTS is 1 for operands
// rounded to the type, or 2 for fp32-grade products: each operand is kept as its rounded value and, SCALE times as large
// so that it stays a normal number, the rest. The product of the two rests is left out (Ootomo and Yokota 2022).
//
// Fragments (PTX ISA, "Matrix fragments for mma.m16n8k16"): operand A's tile of 16 rows and 16 indices is a page of quadruples of
// words, (g, k), (g+8, k), (g, k'), (g+8, k'), where k and k' are pairs of indices, and a second page with the rests.
template <typename Format, int PARTS>
struct HalfCore {
  static constexpr float SCALE = 2048.0f;
  static constexpr int PAGES = PARTS;  // of a tile of operand A
  static constexpr int STORED_TILES = 2;  // neighbouring column tiles that are stored as operands at once: whole quadruples, without bank conflicts
  static constexpr bool AS_STORED = PARTS == 1 && SAME<Element, Format>;  // weights in memory are operands

  struct Words {  // two neighbouring values: rounded, rest
    unsigned part[PARTS];
  };

  static __device__ __forceinline__ Words split(float first, float second) {
    Words words;
    words.part[0] = Format::pack(first, second);
    if constexpr (PARTS == 2) {
      const float2 rounded = Format::unpack(words.part[0]);
      words.part[1] = Format::pack((first - rounded.x) * SCALE, (second - rounded.y) * SCALE);
    }
    return words;
  }

  template <int F>
  struct Operand {
    static constexpr int STEP = 16;
    Words pair[2];
  };

  using Read = typename Choose<AS_STORED, unsigned, float>::Type;
  static constexpr int READS = AS_STORED ? 1 : 2;  // of a pair

  template <int F>
  struct Raw {
    Read values[2][READS];
  };

  // load_b(tile, column, index, to) reads F neighbouring values of a column of operand B, as floats or as the words they are in memory.
  template <int F, typename LoadB>
  static __device__ __forceinline__ Raw<F> read(int tile, int step, int lane, LoadB load_b) {
    Raw<F> raw;
    if constexpr (F == 4) {
      load_b(tile, lane / 4, 16 * step + 4 * (lane % 4), reinterpret_cast<Read(&)[2 * READS]>(raw.values));
    } else {
#pragma unroll
      for (int which = 0; which < 2; ++which) load_b(tile, lane / 4, 16 * step + 8 * which + 2 * (lane % 4), raw.values[which]);
    }
    return raw;
  }

  template <int F>
  static __device__ __forceinline__ Operand<F> pack(const Raw<F>& raw) {
    if constexpr (AS_STORED)
      return {Words{raw.values[0][0]}, Words{raw.values[1][0]}};
    else
      return {split(raw.values[0][0], raw.values[0][1]), split(raw.values[1][0], raw.values[1][1])};
  }

  // The sums of products with a rest, which are SCALE times too large until they are added.
  template <int ROWS, int COLUMNS>
  struct Sums {
    float rest[PARTS == 2 ? ROWS : 1][PARTS == 2 ? COLUMNS : 1][4] = {};

    __device__ __forceinline__ void multiply(float (&acc)[ROWS][COLUMNS][4], int i, int j, const unsigned (&a)[PARTS][4], const unsigned (&b)[PARTS][2]) {
      if constexpr (PARTS == 2) {
        Format::mma(rest[i][j], a[1], b[0][0], b[0][1]);
        Format::mma(rest[i][j], a[0], b[1][0], b[1][1]);
      }
      Format::mma(acc[i][j], a[0], b[0][0], b[0][1]);
    }

    __device__ __forceinline__ void add_to(float (&acc)[ROWS][COLUMNS][4]) const {
      if constexpr (PARTS == 2) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
          for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
            for (int c = 0; c < 4; ++c) acc[i][j][c] = fmaf(rest[i][j][c], 1.0f / SCALE, acc[i][j][c]);
      }
    }
  };

  // acc += a b over K indices; `a` points to the first row tile's pages, PAGE floats apart, and operand(j, step) supplies b.
  template <int K, int F, int PAGE, int ROWS, int COLUMNS, typename GetB>
  static __device__ __forceinline__ void product(float (&acc)[ROWS][COLUMNS][4], const float* a, int lane, GetB operand) {
    Sums<ROWS, COLUMNS> sums;
    add_product<K, F, PAGE>(acc, sums, a, lane, operand);
    sums.add_to(acc);
  }

  // The same for a part of a longer sum, at whose end sums.add_to(acc) is due.
  template <int K, int F, int PAGE, int ROWS, int COLUMNS, typename GetB>
  static __device__ __forceinline__ void add_product(float (&acc)[ROWS][COLUMNS][4], Sums<ROWS, COLUMNS>& sums, const float* a, int lane, GetB operand) {
    constexpr int STEPS = K / 16, UNROLL = STEPS <= 32 ? STEPS : 4;
#pragma unroll UNROLL
    for (int step = 0; step < STEPS; ++step) {
      unsigned quad[ROWS][PARTS][4];
#pragma unroll
      for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int part = 0; part < PARTS; ++part) load(quad[i][part], a + ((i * STEPS + step) * PARTS + part) * PAGE + 4 * lane);
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) {
        const Operand<F> fetched = operand(j, step);
        unsigned b[PARTS][2];
#pragma unroll
        for (int part = 0; part < PARTS; ++part) b[part][0] = fetched.pair[0].part[part], b[part][1] = fetched.pair[1].part[part];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) sums.multiply(acc, i, j, quad[i], b);
      }
    }
  }

  // Channels `channel` and the next of rows g and g+8 into operand A, for an operand B that is read F at a time. STEPS
  // counts 8-wide column tiles in a row tile, here and below.
  template <int F, int STEPS, int PAGE>
  static __device__ __forceinline__ void store_rows(float* a, int row_tile, int g, int channel, const float (&upper)[2], const float (&lower)[2]) {
    const int t = F == 4 ? channel % 16 / 4 : channel % 8 / 2, which = F == 4 ? channel % 4 / 2 : channel % 16 / 8;
    const Words first = split(upper[0], upper[1]), second = split(lower[0], lower[1]);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const unsigned words[2] = {first.part[part], second.part[part]};
      store(a + ((row_tile * (STEPS / 2) + channel / 16) * PARTS + part) * PAGE + 4 * (4 * g + t) + 2 * which, words);
    }
  }

  // The same for four channels, where operand B is read 4 at a time: a lane's quadruple.
  template <int F, int STEPS, int PAGE>
  static __device__ __forceinline__ void store_rows(float* a, int row_tile, int g, int channel, const float (&upper)[4], const float (&lower)[4]) {
    static_assert(F == 4, "a quadruple holds four neighbouring channels only if they are neighbours of the sum");
    const Words first = split(upper[0], upper[1]), second = split(lower[0], lower[1]), third = split(upper[2], upper[3]), fourth = split(lower[2], lower[3]);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const unsigned words[4] = {first.part[part], second.part[part], third.part[part], fourth.part[part]};
      store(a + ((row_tile * (STEPS / 2) + channel / 16) * PARTS + part) * PAGE + 4 * (4 * g + channel % 16 / 4), words);
    }
  }

  // A tile of accumulators into operand A of the next product, for an operand B that is read 2 at a time.
  template <int STEPS>
  static __device__ __forceinline__ void store_query(float* a, int row_tile, int step, int lane, const float (&c)[4]) {
    const Words upper = split(c[0], c[1]), lower = split(c[2], c[3]);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const unsigned words[2] = {upper.part[part], lower.part[part]};
      store(a + ((row_tile * (STEPS / 2) + step / 2) * PARTS + part) * 128 + 4 * lane + 2 * (step % 2), words);
    }
  }

  // 16 keys and 8 channels into operand B of the scores: for each 8 keys a lane has k and k', rounded and then the rests. Quadruples
  // hold both of these, or the rounded ones of both 8 keys.
  template <int STEPS>
  static __device__ __forceinline__ void store_key(float* b, int row_tile, int step, int lane, const float (&c)[4]) {
    const Words words[2] = {split(c[0], c[1]), split(c[2], c[3])};
    float* to = b + (row_tile * (STEPS / 2) + step / 2) * PARTS * 128 + 4 * lane + step % 2;
#pragma unroll
    for (int octet = 0; octet < 2; ++octet)
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        const int pair = octet * PARTS + part;
        to[pair / 2 * 128 + 2 * (pair % 2)] = __uint_as_float(words[octet].part[part]);
      }
  }

  // 16 keys and 8 channels into operand B of the weighted sum, whose index is the key: transposed within the warp. Quadruples hold
  // the rests as well, or the next 8 channels.
  template <int STEPS, int STRIDE>
  static __device__ __forceinline__ void store_value(float* v, int row_tile, int step, int lane, const float (&c)[4]) {
    const Words upper = split(c[0], c[1]), lower = split(c[2], c[3]);
    unsigned words[2 * PARTS];
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      words[2 * part] = transpose_8x8(upper.part[part]);
      words[2 * part + 1] = transpose_8x8(lower.part[part]);
    }
    store(v + (row_tile * STEPS + step) / (3 - PARTS) * 128 + 4 * lane + (PARTS == 1 ? 2 * (step % 2) : 0), words);
  }

  // Scores of row tile `tile` with the KEYS * 8 keys from row tile `first_key` on, over HEAD_STEPS column tiles from `step` on.
  template <int HEAD_STEPS, int STEPS, int KEYS>
  static __device__ __forceinline__ void scores(float (&acc)[1][KEYS][4], const float* query, const float* key, int tile, int first_key, int step, int lane) {
    Sums<1, KEYS> sums;
#pragma unroll
    for (int part = 0; part < HEAD_STEPS / 2; ++part) {
      unsigned quad[PARTS][4];
#pragma unroll
      for (int p = 0; p < PARTS; ++p) load(quad[p], query + ((tile * (STEPS / 2) + step / 2 + part) * PARTS + p) * 128 + 4 * lane);
#pragma unroll
      for (int j = 0; j < KEYS; j += 2) {
        unsigned b[2][PARTS][2];
#pragma unroll
        for (int p = 0; p < PARTS; ++p)
          load(reinterpret_cast<unsigned(&)[PARTS][4]>(b)[p], key + (((first_key + j / 2) * (STEPS / 2) + step / 2 + part) * PARTS + p) * 128 + 4 * lane);
        sums.multiply(acc, 0, j, quad, b[0]);
        sums.multiply(acc, 0, j + 1, quad, b[1]);
      }
    }
    sums.add_to(acc);
  }

  // out += p v for 16 rows of weights p, which are where their scores were accumulated.
  template <int STEPS, int STRIDE, int KEYS, int COLUMNS>
  static __device__ __forceinline__ void weighted_sum(float (&out)[1][COLUMNS][4], const float (&p)[1][KEYS][4], const float* v, int first_key, int step, int lane) {
    Sums<1, COLUMNS> sums;
#pragma unroll
    for (int pair = 0; pair < KEYS / 2; ++pair) {
      unsigned quad[PARTS][4];
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        const float(&c)[4] = p[0][2 * pair + which];
        const Words upper = split(c[0], c[1]), lower = split(c[2], c[3]);
#pragma unroll
        for (int part = 0; part < PARTS; ++part) quad[part][2 * which] = upper.part[part], quad[part][2 * which + 1] = lower.part[part];
      }
#pragma unroll
      for (int j = 0; j < COLUMNS; j += 3 - PARTS) {
        unsigned b[3 - PARTS][PARTS][2];
        load(reinterpret_cast<unsigned(&)[4]>(b), v + ((first_key + pair) * STEPS + step + j) / (3 - PARTS) * 128 + 4 * lane);
#pragma unroll
        for (int next = 0; next < 3 - PARTS; ++next) sums.multiply(out, 0, j + next, quad, b[next]);
      }
    }
    sums.add_to(out);
  }

  // A tile of 16 rows and 16 indices as operand A. Its rows 8 o to 8 o + 7 are also an operand B: of 8 columns, which these rows are.
  struct Tile {
    unsigned part[PARTS][4];

    __device__ __forceinline__ void columns(unsigned (&b)[PARTS][2], int octet) const {
#pragma unroll
      for (int p = 0; p < PARTS; ++p) b[p][0] = part[p][octet], b[p][1] = part[p][2 + octet];
    }
  };

  // acc[i][j] += a b, where b is an octet of the rows of `b`.
  template <int ROWS, int COLUMNS>
  static __device__ __forceinline__ void multiply(float (&acc)[ROWS][COLUMNS][4], Sums<ROWS, COLUMNS>& sums, int i, int j, const Tile& a, const Tile& b, int octet) {
    unsigned columns[PARTS][2];
    b.columns(columns, octet);
    sums.multiply(acc, i, j, a.part, columns);
  }

  // Two neighbouring tiles of accumulators: 16 rows and 16 columns.
  static __device__ __forceinline__ Tile tile(const float (&left)[4], const float (&right)[4]) {
    const Words words[4] = {split(left[0], left[1]), split(left[2], left[3]), split(right[0], right[1]), split(right[2], right[3])};
    Tile result;
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
#pragma unroll
      for (int i = 0; i < 4; ++i) result.part[part][i] = words[i].part[part];
    return result;
  }

  // Two neighbouring tiles of operand B, 16 columns in all, which are then the tile's rows.
  template <int F>
  static __device__ __forceinline__ Tile tile(const Operand<F>& upper, const Operand<F>& lower) {
    Tile result;
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
#pragma unroll
      for (int which = 0; which < 2; ++which)
        result.part[part][2 * which] = upper.pair[which].part[part], result.part[part][2 * which + 1] = lower.pair[which].part[part];
    return result;
  }

  // The tile whose rows are `from`'s columns, by the warp together.
  static __device__ __forceinline__ Tile transposed(const Tile& from) {
    Tile result;
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
#pragma unroll
      for (int i = 0; i < 4; ++i) result.part[part][i / 2 + 2 * (i % 2)] = transpose_8x8(from.part[part][i]);
    return result;
  }

  // Operand A's tile that starts at `page`; and into it, for column tiles `step` (an even one) and the next.
  template <int PAGE>
  static __device__ __forceinline__ Tile load_tile(const float* page, int lane) {
    Tile result;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) load(result.part[part], page + part * PAGE + 4 * lane);
    return result;
  }

  template <int STEPS>
  static __device__ __forceinline__ void store_query(float* a, int row_tile, int step, int lane, const float (&c)[2][4]) {
    const Tile both = tile(c[0], c[1]);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) store(a + ((row_tile * (STEPS / 2) + step / 2) * PARTS + part) * 128 + 4 * lane, both.part[part]);
  }

  // The same for two column tiles of keys: for each 8 keys k and k', rounded and then the rests.
  template <int STEPS>
  static __device__ __forceinline__ void store_key(float* b, int row_tile, int step, int lane, const float (&c)[2][4]) {
    const Tile both = tile(c[0], c[1]);
    unsigned words[2][PARTS][2];
#pragma unroll
    for (int octet = 0; octet < 2; ++octet) both.columns(words[octet], octet);
    const unsigned(&quads)[PARTS][4] = reinterpret_cast<const unsigned(&)[PARTS][4]>(words);
#pragma unroll
    for (int quad = 0; quad < PARTS; ++quad) store(b + ((row_tile * (STEPS / 2) + step / 2) * PARTS + quad) * 128 + 4 * lane, quads[quad]);
  }

  // The same for two column tiles of values, transposed within the warp: for each 8 channels the keys' two pairs, rounded and then the rests.
  template <int STEPS, int STRIDE>
  static __device__ __forceinline__ void store_value(float* v, int row_tile, int step, int lane, const float (&c)[2][4]) {
    const Tile both = tile(c[0], c[1]);
    unsigned words[2][PARTS][2];
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i / 2][part][i % 2] = transpose_8x8(both.part[part][i]);
    const unsigned(&quads)[PARTS][4] = reinterpret_cast<const unsigned(&)[PARTS][4]>(words);
#pragma unroll
    for (int quad = 0; quad < PARTS; ++quad) store(v + ((row_tile * (STEPS / 2) + step / 2) * PARTS + quad) * 128 + 4 * lane, quads[quad]);
  }
};
