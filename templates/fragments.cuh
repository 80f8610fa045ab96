// Operands in shared memory as floats. Operand A's tile of 16 rows and 8 indices of the sum is a page of 32 quadruples, one a
// lane: (g, k), (g+8, k), (g, k'), (g+8, k'). Which indices are k and k' of lane t is operand B's choice: a lane reads F
// neighbours of its column at once.
struct FloatFragments {
  static constexpr int STORED_TILES = 1;  // neighbouring column tiles that are stored as operands at once

  // Channels `channel` and the next of rows g and g+8 into operand A, for an operand B that is read F at a time. STEPS
  // counts 8-wide column tiles in a row tile, here and below.
  template <int F, int STEPS, int PAGE>
  static __device__ __forceinline__ void store_rows(float* a, int row_tile, int g, int channel, const float (&upper)[2], const float (&lower)[2]) {
    const int step = channel / (4 * F) * (F / 2) + channel % F / 2, t = channel % (4 * F) / F;
    const float quad[4] = {upper[0], lower[0], upper[1], lower[1]};
    store(a + (row_tile * STEPS + step) * PAGE + 4 * (4 * g + t), quad);
  }

  // A tile of accumulators into operand A of the next product, for an operand B that is read 2 at a time.
  template <int STEPS>
  static __device__ __forceinline__ void store_query(float* a, int row_tile, int step, int lane, const float (&c)[4]) {
    const float quad[4] = {c[0], c[2], c[1], c[3]};
    store(a + (row_tile * STEPS + step) * 128 + 4 * lane, quad);
  }

  // 16 keys and 8 channels into operand B of the scores: as they are.
  template <int STEPS>
  static __device__ __forceinline__ void store_key(float* b, int row_tile, int step, int lane, const float (&c)[4]) {
    store(b + (row_tile * STEPS + step) * 128 + 4 * lane, c);
  }

  // 16 keys and 8 channels of v, in rows.
  template <int STEPS, int STRIDE>
  static __device__ __forceinline__ void store_value(float* v, int row_tile, int step, int lane, const float (&c)[4]) {
    float* to = v + (16 * row_tile + lane / 4) * STRIDE + 8 * step + 2 * (lane % 4);
    const float upper[2] = {c[0], c[1]}, lower[2] = {c[2], c[3]};
    store(to, upper);
    store(to + 8 * STRIDE, lower);
  }

  // The same for STORED_TILES column tiles.
  template <int STEPS>
  static __device__ __forceinline__ void store_query(float* a, int row_tile, int step, int lane, const float (&c)[1][4]) {
    store_query<STEPS>(a, row_tile, step, lane, c[0]);
  }

  template <int STEPS>
  static __device__ __forceinline__ void store_key(float* b, int row_tile, int step, int lane, const float (&c)[1][4]) {
    store_key<STEPS>(b, row_tile, step, lane, c[0]);
  }

  template <int STEPS, int STRIDE>
  static __device__ __forceinline__ void store_value(float* v, int row_tile, int step, int lane, const float (&c)[1][4]) {
    store_value<STEPS, STRIDE>(v, row_tile, step, lane, c[0]);
  }
};
