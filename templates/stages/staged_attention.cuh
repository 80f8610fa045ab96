{% set lowest, inverse = ("LOWEST_LOGIT", "inverse_or_zero(") if spec.terms else ("minus_infinity()", "__fdividef(1.0f, ") %}
// Kernel 2: softmax(q k^T / sqrt(HEAD_DIM)) v for WARPS * 16 queries of one sequence and head, 16 a warp, streaming over tiles of keys with
// a running maximum and sum (Milakov and Gimelshein 2018), so that no row of scores is ever stored. Tiles of keys and values come
// through STAGES buffers by asynchronous copies. The result goes to scratch as operand A of kernel 3.
template <typename C>
struct StreamedAttention {
  using Math = typename C::Math;
  using S = typename C::Streamed;
  static constexpr int STEPS = C::PADDED_HEAD_DIM / 8, ROW_TILE = C::ROW_TILE;
  static constexpr int KEYS = S::KEY_TILE / 8, KEY_STEPS = ceil_div(16 * C::TILES, S::KEY_TILE), THREADS = 32 * S::WARPS;
  static constexpr int KEY_WORDS = S::KEY_TILE / 16 * ROW_TILE, GROUPS = ceil_div(C::TILES, S::WARPS);

  // `tiles` row tiles of one head, of which `real` exist, in pieces of COLUMNS words that are STRIDE apart in shared memory.
  template <int COLUMNS, int STRIDE>
  static __device__ __forceinline__ void copy_tiles(float* to, const float* from, int tiles, int real) {
#pragma unroll 4
    for (int at = 4 * threadIdx.x; at < tiles * ROW_TILE; at += 4 * THREADS) {
      const bool there = at < real * ROW_TILE;
      copy_async<16>(to + at / COLUMNS * STRIDE + at % COLUMNS, there ? from + at : from, there);
    }
  }

  static __device__ __forceinline__ void start(float* shared, const float* key, const float* value, int step) {
    if (step < KEY_STEPS) {
      constexpr int TILES = S::KEY_TILE / 16;
      float* to = shared + S::BUFFERS + step % S::STAGES * S::BUFFER;
      const int first = step * TILES, real = min(C::TILES - first, TILES);
      copy_tiles<ROW_TILE, ROW_TILE>(to, key + first * ROW_TILE, TILES, real);
      copy_tiles<S::VALUE_COLUMNS, S::VALUE_STRIDE>(to + KEY_WORDS, value + first * ROW_TILE, TILES, real);
    }
    commit_copies();
  }

  static __device__ __forceinline__ void run(const float* query, const float* key, const float* value, float* attended{% for term in spec.terms | declared %}, {{ term }}{% endfor %}, float* shared) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int group = blockIdx.x % GROUPS, unit = blockIdx.x / GROUPS, head = unit % C::HEADS, sequence = unit / C::HEADS;
    const int first_tile = group * S::WARPS, tile = first_tile + warp;
    const long long base = static_cast<long long>(unit) * C::TILES * ROW_TILE;
    copy_tiles<ROW_TILE, ROW_TILE>(shared, query + base + first_tile * ROW_TILE, S::WARPS, min(C::TILES - first_tile, S::WARPS));
#pragma unroll
    for (int step = 0; step < S::STAGES - 1; ++step) start(shared, key + base, value + base, step);
    float out[1][STEPS][4] = {};
    float sum[2] = {}, highest[2] = { {{- lowest }}, {{ lowest -}} };
#pragma unroll 1
    for (int step = 0; step < KEY_STEPS; ++step) {
      wait_for_copies<S::STAGES - 2>();
      __syncthreads();  // the step's keys and values are there for all, and the buffer of the step before is free
      start(shared, key + base, value + base, step + S::STAGES - 1);
      if (tile >= C::TILES) continue;
      const float* keys = shared + S::BUFFERS + step % S::STAGES * S::BUFFER;
      float p[1][KEYS][4] = {};
      Math::template scores<STEPS, STEPS>(p, shared, keys, warp, 0, 0, lane);
      if (C::LENGTH % S::KEY_TILE != 0 && step == KEY_STEPS - 1) {
#pragma unroll
        for (int j = 0; j < KEYS; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            if (step * S::KEY_TILE + 8 * j + 2 * (lane % 4) + i % 2 >= C::LENGTH) p[0][j][i] = minus_infinity();
      }
{% if spec.logit_bias %}
      add_bias<C>(p, logit_bias, head, 16 * tile + lane / 4, step * S::KEY_TILE, lane);
{% endif %}
{% if spec.key_mask %}
      mask_keys<C>(p, key_mask, sequence, step * S::KEY_TILE, lane);
{% endif %}
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float now = highest[half];
#pragma unroll
        for (int j = 0; j < KEYS; ++j) now = fmaxf(now, fmaxf(p[0][j][2 * half], p[0][j][2 * half + 1]));
        now = group_max<4>(now);
        const float bias = now * C::EXPONENT_SCALE;
        const float correction = exp2_approx(fmaf(highest[half], C::EXPONENT_SCALE, -bias));
        float tile_sum = 0.0f;
#pragma unroll
        for (int j = 0; j < KEYS; ++j)
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            p[0][j][i] = exp2_approx(fmaf(p[0][j][i], C::EXPONENT_SCALE, -bias));
            tile_sum += p[0][j][i];
          }
        sum[half] = fmaf(sum[half], correction, tile_sum);
#pragma unroll
        for (int j = 0; j < STEPS; ++j) out[0][j][2 * half] *= correction, out[0][j][2 * half + 1] *= correction;
        highest[half] = now;
      }
      Math::template weighted_sum<STEPS, S::VALUE_STRIDE>(out, p, keys + KEY_WORDS, 0, 0, lane);
    }
    if (tile >= C::TILES) return;
    const float upper = {{ inverse }}group_sum<4>(sum[0])), lower = {{ inverse }}group_sum<4>(sum[1]));
    float* to = attended + (static_cast<long long>(sequence) * C::TILES + tile) * (C::HEADS * ROW_TILE);
#pragma unroll
    for (int j = 0; j < STEPS; ++j) {
      const float c[4] = {out[0][j][0] * upper, out[0][j][1] * upper, out[0][j][2] * lower, out[0][j][3] * lower};
      Math::template store_query<C::INNER / 8>(to, 0, head * STEPS + j, lane, c);
    }
  }
};
