// The same by warpgroups (see warpgroup.cu.j2), for ROWS times the 64 queries of a warpgroup, which are of one sequence. Queries and weights are operand A
// in registers. Keys lie in shared memory as operand B of the scores, a row of PADDED_HEAD_DIM channels each, and so do values, as operand B of the
// weighted sum that is turned. While a tile's exponentials are computed, the scores of the next tile and the weighted sum of the one before are under way.
//
// References are as in StreamedSoftmax. A warp that has to change its own computes the tile's scores again, by itself.
template <typename C>
struct WarpgroupSoftmax {
  using S = typename C::Streamed;
  using Format = typename HalfFormat<typename C::Math>::Format;
  static constexpr int ROWS = S::ROWS, STEPS = C::PADDED_HEAD_DIM / 8, KEYS = S::KEY_TILE / 8, KEY_STEPS = 2 * ceil_div(C::LENGTH, 2 * S::KEY_TILE);  // in pairs
  static constexpr int KEY_ROW = C::PADDED_HEAD_DIM / 2;  // words of a key, and of a value
  static_assert(HalfFormat<typename C::Math>::OPERANDS == 1, "operands without rests");

  unsigned query[ROWS][STEPS / 2][4], weights[ROWS][KEYS / 2][4];
  float out[ROWS][STEPS][4], sum[ROWS][2], start[ROWS][2];  // start: minus the references
  bool raised;  // whether one of the warp's references is not the first one

  // A head's accumulators of one row tile, number `tile` of the block: queries, in units of the exponent; keys; values.
  __device__ __forceinline__ void hold_query(int row, const float (&acc)[3 * STEPS][4]) {
#pragma unroll
    for (int step = 0; step < STEPS / 2; ++step)
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const float(&c)[4] = acc[2 * step + word / 2];
        query[row][step][word] = Format::pack(c[2 * (word % 2)], c[2 * (word % 2) + 1]);
      }
  }

  // A lane has 2 STEPS neighbouring channels of a key and of its value, because their weights are packed so: up to 16 bytes of them are stored at once.
  static __device__ __forceinline__ void store_keys(float* keys, float* values, int tile, int lane, const float (&acc)[3 * STEPS][4]) {
    constexpr int TOGETHER = STEPS < 4 ? STEPS : 4;
#pragma unroll
    for (int j = 0; j < STEPS; j += TOGETHER)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        unsigned key[TOGETHER], value[TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
          const float(&k)[4] = acc[STEPS + j + i], (&v)[4] = acc[2 * STEPS + j + i];
          key[i] = Format::pack(k[2 * half], k[2 * half + 1]), value[i] = Format::pack(v[2 * half], v[2 * half + 1]);
        }
        const int at = swizzled<KEY_ROW>(16 * tile + 8 * half + lane / 4, lane % 4 * (2 * STEPS) + 2 * j);
        store(keys + at, key), store(values + at, value);
      }
  }

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      sum[row][0] = sum[row][1] = 0.0f, start[row][0] = start[row][1] = -S::HEADROOM;
#pragma unroll
      for (int i = 0; i < 4 * STEPS; ++i) out[row][i / 4][i % 4] = 0.0f;
    }
    raised = false;
  }

  __device__ __forceinline__ void start_scores(float (&p)[ROWS][KEYS][4], const float* keys, int step) {
    const unsigned long long b = matrix_descriptor<KEY_ROW>(keys + step * S::KEY_TILE * KEY_ROW);
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
#pragma unroll
      for (int k = 0; k < STEPS / 2; ++k) wgmma(Format{}, p[row], query[row][k], b + 2 * k, k > 0);
  }

  __device__ __forceinline__ void start_sums(const float* values, int step) {
#pragma unroll
    for (int k = 0; k < KEYS / 2; ++k) {
      const unsigned long long b = matrix_descriptor<KEY_ROW>(values + (step * S::KEY_TILE + 16 * k) * KEY_ROW);
#pragma unroll
      for (int row = 0; row < ROWS; ++row) wgmma_turned(Format{}, out[row], weights[row][k], b, true);
    }
  }

  // Scores of the warp's queries and a tile of keys, by mma.sync.
  __device__ __forceinline__ void own_scores(float (&p)[ROWS][KEYS][4], const float* keys, int step, int lane) const {
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
#pragma unroll
      for (int j = 0; j < KEYS; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) p[row][j][c] = 0.0f;
        const int key = step * S::KEY_TILE + 8 * j + lane / 4;
#pragma unroll
        for (int k = 0; k < STEPS / 2; ++k) {
          unsigned b[2];
#pragma unroll
          for (int which = 0; which < 2; ++which) b[which] = __float_as_uint(keys[swizzled<KEY_ROW>(key, 16 * k + 8 * which + 2 * (lane % 4))]);
          Format::mma(p[row][j], query[row][k], b[0], b[1]);
        }
      }
  }

  // Exponents from scores: minus infinity for keys behind the sequence's end.
  __device__ __forceinline__ void exponents(float (&p)[ROWS][KEYS][4], int step, int lane) const {
    if (S::HEADROOM != 0.0f || raised) {
#pragma unroll
      for (int row = 0; row < ROWS; ++row)
#pragma unroll
        for (int j = 0; j < KEYS; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i) p[row][j][i] += start[row][i / 2];
    }
    if (C::LENGTH % (2 * S::KEY_TILE) != 0 && (step + 1) * S::KEY_TILE > C::LENGTH) {
#pragma unroll
      for (int j = 0; j < KEYS; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (step * S::KEY_TILE + 8 * j + 2 * (lane % 4) + i % 2 >= C::LENGTH) {
#pragma unroll
            for (int row = 0; row < ROWS; ++row) p[row][j][i] = minus_infinity();
          }
    }
  }

  // Weights from exponents, and what a lane has of each row's sum.
  static __device__ __forceinline__ void powers(float (&p)[ROWS][KEYS][4], float (&added)[ROWS][2]) {
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        added[row][half] = 0.0f;
#pragma unroll
        for (int j = 0; j < KEYS; ++j)
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) added[row][half] += p[row][j][i] = S::power(p[row][j][i], j % 2 * 4 + i);
      }
  }

  // References from the tile's maximum, so that its largest weight is 2^-HEADROOM; those of rows that have been summed do not fall. p: exponents.
  __device__ __forceinline__ void refer(const float (&p)[ROWS][KEYS][4], int step) {
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float highest = minus_infinity();
#pragma unroll
        for (int j = 0; j < KEYS; ++j) highest = fmaxf(highest, fmaxf(p[row][j][2 * half], p[row][j][2 * half + 1]));
        highest = group_max<4>(highest) + S::HEADROOM;
        if (step > 0) {
          highest = fmaxf(highest, 0.0f);
          const float correction = exp2_approx(-highest);
          sum[row][half] *= correction;
#pragma unroll
          for (int j = 0; j < STEPS; ++j) out[row][j][2 * half] *= correction, out[row][j][2 * half + 1] *= correction;
        }
        start[row][half] -= highest;
      }
    raised = true;
  }

  // All keys of a head. meanwhile(step) may start further products beside a tile's exponentials; they are done when this returns.
  template <typename Meanwhile>
  __device__ __forceinline__ void run(const float* keys, const float* values, int lane, Meanwhile meanwhile) {
    float p[2][ROWS][KEYS][4];
    wgmma_fence();
    start_scores(p[0], keys, 0);
    wgmma_commit();
    wgmma_commit();  // nothing, where a weighted sum will be
#pragma unroll
    for (int step = 0; step < KEY_STEPS; step += 2) {
      add(p[0], p[1], keys, values, step, step + 1, lane, meanwhile);
      add(p[1], p[0], keys, values, step + 1, min(step + 2, KEY_STEPS - 1), lane, meanwhile);
    }
    wgmma_wait<0>();
    keep_sums();
  }

  // A tile whose scores have been started, and after them one batch of products; starts those of tile `next`.
  template <typename Meanwhile>
  __device__ __forceinline__ void add(float (&p)[ROWS][KEYS][4], float (&following)[ROWS][KEYS][4], const float* keys, const float* values, int step, int next, int lane, Meanwhile meanwhile) {
    float added[ROWS][2];
    wgmma_wait<1>();
#pragma unroll
    for (int row = 0; row < ROWS; ++row) keep_in_registers(p[row]);
    wgmma_fence();
    start_scores(following, keys, next);
    wgmma_commit();
    meanwhile(step);
    exponents(p, step, lane);
    powers(p, added);
#pragma unroll
    for (int row = 0; row < ROWS; ++row) keep_in_registers(p[row]);  // the compiler would wait first
    wgmma_wait<1>();  // the weighted sum is done
    keep_sums();
    if (__any_sync(ALL_LANES, outside(added, step))) {
      own_scores(p, keys, step, lane);
      exponents(p, step, lane);
      refer(p, step);
      own_scores(p, keys, step, lane);
      exponents(p, step, lane);
      powers(p, added);
    }
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      sum[row][0] += added[row][0], sum[row][1] += added[row][1];
#pragma unroll
      for (int k = 0; k < KEYS / 2; ++k)
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          const float(&c)[4] = p[row][2 * k + word / 2];
          weights[row][k][word] = Format::pack(c[2 * (word % 2)], c[2 * (word % 2) + 1]);
        }
    }
    wgmma_fence();
    start_sums(values, step);
    wgmma_commit();
  }

  __device__ __forceinline__ void keep_sums() {
#pragma unroll
    for (int row = 0; row < ROWS; ++row) keep_in_registers(out[row]);
  }

  // Whether a lane's weights of a row are beyond LIMIT, or in the first tile the row's below FLOOR.
  static __device__ __forceinline__ bool outside(const float (&added)[ROWS][2], int step) {
    float largest = 0.0f, least = S::FLOOR;
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        largest = fmaxf(largest, added[row][half]);
        if (step == 0) least = fminf(least, group_sum<4>(added[row][half]));
      }
    return largest > S::LIMIT || least < S::FLOOR;
  }

  // The result of row tile `row` as operand A, a fragment of 16 channels after another: emit(step, quads) takes a lane's quadruples.
  template <typename Emit>
  __device__ __forceinline__ void result(int row, Emit emit) const {
    const float upper = __fdividef(1.0f, group_sum<4>(sum[row][0])), lower = __fdividef(1.0f, group_sum<4>(sum[row][1]));
#pragma unroll
    for (int step = 0; step < STEPS / 2; ++step) {
      float quads[1][4];
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const float(&c)[4] = out[row][2 * step + word / 2];
        quads[0][word] = __uint_as_float(Format::pack(c[2 * (word % 2)] * (word % 2 ? lower : upper), c[2 * (word % 2) + 1] * (word % 2 ? lower : upper)));
      }
      emit(step, quads);
    }
  }
};
