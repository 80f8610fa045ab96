{% set norms = spec.pre_norm_parameters %}
// Kernel 1: {{ {"layer": "LayerNorm and the", "rms": "RMSNorm and the", "none": "the"}[spec.pre_norm] }} QKV product. q, k and v go to scratch as the fragments that kernel 2 multiplies, in the order
// [sequence][head][row tile][column tile of the head], so that it reads rows and columns of the grid alike, in one piece.
template <typename C>
__device__ __forceinline__ void qkv({{ (["const Element* x"] + norms | declared) | join(", ") }},
                                    {{ spec.parameters_of("qkv") | declared | join(", ") }}, float* query, float* key, float* value, int row_tiles, float* shared) {
  using P = typename C::Qkv;
  using Math = typename C::Math;
  constexpr int STEPS = C::PADDED_HEAD_DIM / 8, INNER_STEPS = C::INNER / 8;
  const int part = blockIdx.x % P::PARTS, first_tile = static_cast<int>(blockIdx.x / P::PARTS) * P::ROW_TILES, lane = threadIdx.x % 32;
  TiledProduct<P>::run(
      shared, shared + P::BUFFERS, qkv_weight, part, [](int) {},
      [&]() { normalise_rows<C>(x, {% for name in norms %}{{ name }}, {% endfor %}first_tile, row_tiles, shared); },
      [&](int row_tile, int column, const float(&acc)[P::WARP_ROW_TILES][P::WARP_COLUMN_TILES][4]) {
#pragma unroll
        for (int i = 0; i < P::WARP_ROW_TILES; ++i) {
          const int tile = first_tile + row_tile + i, sequence = tile / C::TILES;
          if (tile >= row_tiles) break;
#pragma unroll
          for (int j = 0; j < P::WARP_COLUMN_TILES; ++j) {
            const int step = column / 8 + j, which = step / INNER_STEPS, within = step % INNER_STEPS;
            if (step >= 3 * INNER_STEPS) break;
{% if spec.qkv_bias %}
            float c[4], bias[2] = {};
            const int channel = 8 * (within % STEPS) + 2 * (lane % 4), at_head = (which * C::HEADS + within / STEPS) * C::HEAD_DIM;
            load_channels<C::HEAD_DIM>(bias, qkv_bias + at_head, channel);
#pragma unroll
            for (int k = 0; k < 4; ++k) c[k] = acc[i][j][k] + bias[k % 2];
{% endif %}
            const long long at = ((static_cast<long long>(sequence) * C::HEADS + within / STEPS) * C::TILES + tile % C::TILES) * C::ROW_TILE;
            if (which == 0)
              Math::template store_query<STEPS>(query + at, 0, within % STEPS, lane, {{ "c" if spec.qkv_bias else "acc[i][j]" }});
            else if (which == 1)
              Math::template store_key<STEPS>(key + at, 0, within % STEPS, lane, {{ "c" if spec.qkv_bias else "acc[i][j]" }});
            else
              Math::template store_value<STEPS, C::PADDED_HEAD_DIM>(value + at, 0, within % STEPS, lane, {{ "c" if spec.qkv_bias else "acc[i][j]" }});
          }
        }
      });
}
