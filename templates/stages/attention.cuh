{% set lowest, inverse = ("LOWEST_LOGIT", "inverse_or_zero(") if spec.terms else ("minus_infinity()", "__fdividef(1.0f, ") %}
// Stage 3: softmax(q k^T / sqrt(HEAD_DIM)) v, a warp for 16 queries of one head, streaming over tiles of keys with a running
// maximum and sum (Milakov and Gimelshein 2018), so that no row of scores is ever stored. The result replaces the queries,
// in the same fragments: these 16 rows of one head are read by this warp alone, each quadruple by the lane that replaces it
// (or, in Ffma, by lanes of the same row).
template <typename C>
__device__ __forceinline__ void attention(float* shared{% for term in spec.terms | declared %}, {{ term }}{% endfor %}{{ ", int first, int sequences" if spec.key_mask }}) {
  using Math = typename C::Math;
  constexpr int TILES = C::PADDED_LENGTH / 16, UNITS = C::SEQUENCES * TILES * C::HEADS, STEPS = C::INNER / 8;
  constexpr int KEYS = C::KEY_TILE / 8, COLUMNS = C::PADDED_HEAD_DIM / 8, KEY_STEPS = C::PADDED_LENGTH / C::KEY_TILE;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
  for (int turn = 0; turn < ceil_div(UNITS, C::WARPS); ++turn) {
    const int unit = warp + turn * C::WARPS;
    if (UNITS % C::WARPS != 0 && unit >= UNITS) break;
    const int head = unit % C::HEADS, tile = unit / C::HEADS, first_tile = tile / TILES * TILES;
{% if spec.key_mask %}
    const int sequence = min(first + tile / TILES, sequences - 1);  // behind the last one nothing is stored
{% endif %}
    float out[1][COLUMNS][4] = {};
    float sum[2] = {}, highest[2] = { {{- lowest }}, {{ lowest -}} };
#pragma unroll (KEY_STEPS <= 4 ? KEY_STEPS : 1)
    for (int step = 0; step < KEY_STEPS; ++step) {
      float p[1][KEYS][4] = {};
      Math::template scores<COLUMNS, STEPS>(p, shared + C::QUERY, shared + C::KEY, tile, first_tile + step * (C::KEY_TILE / 16), head * COLUMNS, lane);
      if constexpr (C::LENGTH < C::PADDED_LENGTH) {
#pragma unroll
        for (int j = 0; j < KEYS; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            if (step * C::KEY_TILE + 8 * j + 2 * (lane % 4) + i % 2 >= C::LENGTH) p[0][j][i] = minus_infinity();
      }
{% if spec.logit_bias %}
      add_bias<C>(p, logit_bias, head, 16 * (tile - first_tile) + lane / 4, step * C::KEY_TILE, lane);
{% endif %}
{% if spec.key_mask %}
      mask_keys<C>(p, key_mask, sequence, step * C::KEY_TILE, lane);
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
      Math::template weighted_sum<STEPS, C::VALUE_STRIDE>(out, p, shared + C::VALUE, first_tile + step * (C::KEY_TILE / 16), head * COLUMNS, lane);
    }
    __syncwarp();  // the queries have been read
    const float upper = {{ inverse }}group_sum<4>(sum[0])), lower = {{ inverse }}group_sum<4>(sum[1]));
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
      const float c[4] = {out[0][j][0] * upper, out[0][j][1] * upper, out[0][j][2] * lower, out[0][j][3] * lower};
      Math::template store_query<STEPS>(shared + C::QUERY, tile, head * COLUMNS + j, lane, c);
    }
  }
}
