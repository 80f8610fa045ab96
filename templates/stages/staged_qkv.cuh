{% set norms = spec.pre_norm_parameters %}
// Kernel 1: {{ {"layer": "LayerNorm and the", "rms": "RMSNorm and the", "none": "the"}[spec.pre_norm] }} QKV product. q, k and v go to scratch as the fragments that kernel 2 multiplies, in the order
// [sequence][head][row tile][column tile of the head], so that it reads rows and columns of the grid alike, in one piece.
template <typename C>
__device__ __forceinline__ void qkv({{ (["const Element* x"] + norms | declared) | join(", ") }},
                                    {{ spec.parameters_of("qkv") | declared | join(", ") }}, float* query, float* key, float* value, int row_tiles, float* shared) {
  using P = typename C::Qkv;
  const int part = blockIdx.x % P::PARTS, first_tile = static_cast<int>(blockIdx.x / P::PARTS) * P::ROW_TILES, lane = threadIdx.x % 32;
  constexpr int VEC = NORM_VEC<C>;
  TiledProduct<P>::run(
      shared, shared + P::BUFFERS, qkv_weight, part, [](int) {},
      [&]() {
        // Operand A as fragments in the order [tile of the sum][row tile][page].
        normalise_rows<C>({{ (["x"] + norms | list) | join(", ") }}, first_tile, row_tiles, [&](int row_tile, int g, int channel, const float(&upper)[VEC], const float(&lower)[VEC]) {
          float* to = shared + channel / P::SUM_TILE * P::A_TILE;
{% if quadruples %}
          constexpr int AT_ONCE = C::Math::STORED_TILES == 2 ? VEC : 2;
{% endif %}
{% set n = "AT_ONCE" if quadruples else "2" %}
#pragma unroll
          for (int i = 0; i < VEC; i += {{ n }})
            C::Math::template store_rows<P::FRAGMENT, P::SUM_TILE / 8, P::PAGE>(to, row_tile, g, channel % P::SUM_TILE + i, reinterpret_cast<const float(&)[{{ n }}]>(upper[i]),
                                                                               reinterpret_cast<const float(&)[{{ n }}]>(lower[i]));
        });
      },
      [&](int row_tile, int column, const float(&acc)[P::WARP_ROW_TILES][P::WARP_COLUMN_TILES][4]) {
#pragma unroll
        for (int i = 0; i < P::WARP_ROW_TILES; ++i) {
          const int tile = first_tile + row_tile + i;
          if (tile >= row_tiles) break;
          store_fragments<C, P::WARP_COLUMN_TILES>(query, key, value, {{ "qkv_bias, " if spec.qkv_bias }}tile, column / 8, lane, acc[i]);
        }
      });
}
