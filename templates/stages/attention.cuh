{% set lowest, inverse = ("LOWEST_LOGIT", "inverse_or_zero(") if spec.terms else ("minus_infinity()", "__fdividef(1.0f, ") %}
// Stage 3: softmax(q k^T / sqrt(HEAD_DIM)) v, a warp for 16 queries of one head, streaming over tiles of keys with a running
// maximum and sum (Milakov and Gimelshein 2018), so that no row of scores is ever stored. The result takes the place of the queries in
// shared memory, in the same fragments: these 16 rows of one head are read by this warp alone, each quadruple by the lane that replaces it
// (or, in Ffma, by lanes of the same row).
template <typename C>
struct Attention {
  using Math = typename C::Math;
  static constexpr int TILES = C::PADDED_LENGTH / 16, UNITS = C::SEQUENCES * TILES * C::HEADS, STEPS = C::INNER / 8;
  static constexpr int KEYS = C::KEY_TILE / 8, COLUMNS = C::PADDED_HEAD_DIM / 8, KEY_STEPS = C::PADDED_LENGTH / C::KEY_TILE;

  // q, k and v of one row tile and head as fragments in shared memory.
  struct Shared {
    static constexpr bool IN_SHARED = true;
    static constexpr int UNROLL = KEY_STEPS <= 4 ? KEY_STEPS : 1;
    const float* shared;
    int tile, head, lane;

    __device__ __forceinline__ int first_key(int step) const { return tile / TILES * TILES + step * (C::KEY_TILE / 16); }

    __device__ __forceinline__ void scores(float (&p)[1][KEYS][4], int step) const {
      Math::template scores<COLUMNS, STEPS>(p, shared + C::QUERY, shared + C::KEY, tile, first_key(step), head * COLUMNS, lane);
    }

    __device__ __forceinline__ void weighted_sum(float (&out)[1][COLUMNS][4], const float (&p)[1][KEYS][4], int step) const {
      Math::template weighted_sum<STEPS, C::VALUE_STRIDE>(out, p, shared + C::VALUE, first_key(step), head * COLUMNS, lane);
    }
  };

  static __device__ __forceinline__ void run(float* shared{% for term in spec.terms | declared %}, {{ term }}{% endfor %}{{ ", int first_sequence, int sequences" if spec.key_mask }}) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int turn = 0; turn < ceil_div(UNITS, C::WARPS); ++turn) {
      const int unit = warp + turn * C::WARPS;
      if (UNITS % C::WARPS != 0 && unit >= UNITS) break;
      const int head = unit % C::HEADS, tile = unit / C::HEADS;
      attend(shared, Shared{shared, tile, head, lane}, tile, head, lane{% for term in spec.terms %}, {{ term }}{% endfor %}{{ ", first_sequence, sequences" if spec.key_mask }});
    }
  }

  // One row tile and head; operands.scores(p, step) and operands.weighted_sum(out, p, step) multiply a step's keys and values.
  template <typename Operands>
  static __device__ __forceinline__ void attend(float* shared, const Operands& operands, int tile, int head, int lane{% for term in spec.terms | declared %}, {{ term }}{% endfor %}{{ ", int first_sequence, int sequences" if spec.key_mask }}) {
{% if spec.key_mask %}
    const int sequence = min(first_sequence + tile / TILES, sequences - 1);  // behind the last one nothing is stored
{% endif %}
    float out[1][COLUMNS][4] = {};
    float sum[2] = {}, highest[2] = { {{- lowest }}, {{ lowest -}} };
#pragma unroll Operands::UNROLL
    for (int step = 0; step < KEY_STEPS; ++step) {
{% if spec.key_mask %}
      const KeyMask<C, KEYS> mask(key_mask, sequence, step * C::KEY_TILE, lane);
{% endif %}
      float p[1][KEYS][4] = {};
      operands.scores(p, step);
      if constexpr (C::LENGTH < C::PADDED_LENGTH) {
#pragma unroll
        for (int j = 0; j < KEYS; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            if (step * C::KEY_TILE + 8 * j + 2 * (lane % 4) + i % 2 >= C::LENGTH) p[0][j][i] = minus_infinity();
      }
{% if spec.logit_bias %}
      add_bias<C>(p, logit_bias, head, 16 * (tile % TILES) + lane / 4, step * C::KEY_TILE, lane);
{% endif %}
{% if spec.key_mask %}
      mask.apply(p, lane);
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
        if (step > 0) {
          sum[half] *= correction;
#pragma unroll
          for (int j = 0; j < COLUMNS; ++j) out[0][j][2 * half] *= correction, out[0][j][2 * half + 1] *= correction;
        }
        sum[half] += tile_sum;
        highest[half] = now;
      }
      operands.weighted_sum(out, p, step);
    }
    if constexpr (Operands::IN_SHARED) __syncwarp();  // the queries have been read
    const float upper = {{ inverse }}group_sum<4>(sum[0])), lower = {{ inverse }}group_sum<4>(sum[1]));
    constexpr int AT_ONCE = Math::STORED_TILES;
#pragma unroll
    for (int j = 0; j < COLUMNS; j += AT_ONCE) {
      float c[AT_ONCE][4];
#pragma unroll
      for (int next = 0; next < AT_ONCE; ++next)
#pragma unroll
        for (int i = 0; i < 4; ++i) c[next][i] = out[0][j + next][i] * (i < 2 ? upper : lower);
      Math::template store_query<STEPS>(shared + C::QUERY, tile, head * COLUMNS + j, lane, c);
    }
  }
};
