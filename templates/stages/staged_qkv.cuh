// Kernel 1: LayerNorm and the QKV product. q, k and v go to scratch as the fragments that kernel 2 multiplies, in the order
// [sequence][head][row tile][column tile of the head], so that it reads rows and columns of the grid alike, in one piece; q times
// EXPONENT_SCALE, so that scores are exponents as they come.
template <typename C>
__device__ __forceinline__ void qkv(const Element* x, const Element* __restrict__ norm_weight, const Element* __restrict__ norm_bias,
                                    const Element* __restrict__ qkv_weight, float* query, float* key, float* value, int row_tiles, float* shared) {
  using P = typename C::Qkv;
  using Math = typename C::Math;
  constexpr int STEPS = C::PADDED_HEAD_DIM / 8, INNER_STEPS = C::INNER / 8;
  const int part = blockIdx.x % P::PARTS, first_tile = static_cast<int>(blockIdx.x / P::PARTS) * P::ROW_TILES, lane = threadIdx.x % 32;
  TiledProduct<P>::run(
      shared, shared + P::BUFFERS, qkv_weight, part, [](int) {},
      [&]() { normalise_rows<C>(x, norm_weight, norm_bias, first_tile, row_tiles, shared); },
      [&](int row_tile, int column, const float(&acc)[P::WARP_ROW_TILES][P::WARP_COLUMN_TILES][4]) {
#pragma unroll
        for (int i = 0; i < P::WARP_ROW_TILES; ++i) {
          const int tile = first_tile + row_tile + i, sequence = tile / C::TILES;
          if (tile >= row_tiles) break;
#pragma unroll
          for (int j = 0; j < P::WARP_COLUMN_TILES; ++j) {
            const int step = column / 8 + j, which = step / INNER_STEPS, within = step % INNER_STEPS;
            if (step >= 3 * INNER_STEPS) break;
            const long long at = ((static_cast<long long>(sequence) * C::HEADS + within / STEPS) * C::TILES + tile % C::TILES) * C::ROW_TILE;
            if (which == 0) {
              float scaled[4];  // in units of the exponent of two
#pragma unroll
              for (int c = 0; c < 4; ++c) scaled[c] = acc[i][j][c] * C::EXPONENT_SCALE;
              Math::template store_query<STEPS>(query + at, 0, within % STEPS, lane, scaled);
            } else if (which == 1)
              Math::template store_key<STEPS>(key + at, 0, within % STEPS, lane, acc[i][j]);
            else
              Math::template store_value<STEPS, C::PADDED_HEAD_DIM>(value + at, 0, within % STEPS, lane, acc[i][j]);
          }
        }
      });
}
