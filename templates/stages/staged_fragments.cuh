// TILES neighbouring column tiles of a row tile's q, k and v, the first of which is number `step` of them all, into scratch; q times
// EXPONENT_SCALE, so that scores are exponents as they come.
template <typename C, int TILES>
__device__ __forceinline__ void store_fragments(float* query, float* key, float* value, {{ "const Element* __restrict__ qkv_bias, " if spec.qkv_bias }}int tile, int step, int lane, const float (&acc)[TILES][4]) {
  using Math = typename C::Math;
  constexpr int STEPS = C::PADDED_HEAD_DIM / 8, INNER_STEPS = C::INNER / 8, TOGETHER = TILES % Math::STORED_TILES == 0 ? Math::STORED_TILES : 1;
  const int sequence = tile / C::TILES;
#pragma unroll
  for (int j = 0; j < TILES; j += TOGETHER) {
    const int which = (step + j) / INNER_STEPS, within = (step + j) % INNER_STEPS;
    if (step + j >= 3 * INNER_STEPS) break;
    const long long at = ((static_cast<long long>(sequence) * C::HEADS + within / STEPS) * C::TILES + tile % C::TILES) * C::ROW_TILE;
    const float scale = which == 0 ? C::EXPONENT_SCALE : 1.0f;
    float values[TOGETHER][4];
#pragma unroll
    for (int t = 0; t < TOGETHER; ++t){{ " {" if spec.qkv_bias }}
{% if spec.qkv_bias %}
      float bias[2] = {};
      load_channels<C::HEAD_DIM>(bias, qkv_bias + (which * C::HEADS + within / STEPS) * C::HEAD_DIM, 8 * (within % STEPS + t) + 2 * (lane % 4));
{% endif %}
#pragma unroll
      for (int c = 0; c < 4; ++c) values[t][c] = {{ "(acc[j + t][c] + bias[c % 2])" if spec.qkv_bias else "acc[j + t][c]" }} * scale;
{% if spec.qkv_bias %}
    }
{% endif %}
    if constexpr (TOGETHER == Math::STORED_TILES) {
      if (which == 0)
        Math::template store_query<STEPS>(query + at, 0, within % STEPS, lane, values);
      else if (which == 1)
        Math::template store_key<STEPS>(key + at, 0, within % STEPS, lane, values);
      else
        Math::template store_value<STEPS, C::PADDED_HEAD_DIM>(value + at, 0, within % STEPS, lane, values);
    } else {
      if (which == 0)
        Math::template store_query<STEPS>(query + at, 0, within % STEPS, lane, values[0]);
      else if (which == 1)
        Math::template store_key<STEPS>(key + at, 0, within % STEPS, lane, values[0]);
      else
        Math::template store_value<STEPS, C::PADDED_HEAD_DIM>(value + at, 0, within % STEPS, lane, values[0]);
    }
  }
}
