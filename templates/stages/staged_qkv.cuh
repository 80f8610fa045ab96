template <typename Math>
struct PairedStores;  // for Maths that hand on two column tiles in pieces of 16 bytes

// TILES neighbouring column tiles of a row tile's q, k and v, the first of which is number `step` of them all, into scratch.
template <typename C, int TILES>
__device__ __forceinline__ void store_fragments(float* query, float* key, float* value, int tile, int step, int lane, const float (&acc)[TILES][4]) {
  using Math = typename C::Math;
  constexpr int STEPS = C::PADDED_HEAD_DIM / 8, INNER_STEPS = C::INNER / 8, TOGETHER = C::STORED_TILES == 2 && TILES % 2 == 0 ? 2 : 1;
  const int sequence = tile / C::TILES;
#pragma unroll
  for (int j = 0; j < TILES; j += TOGETHER) {
    const int which = (step + j) / INNER_STEPS, within = (step + j) % INNER_STEPS;
    if (step + j >= 3 * INNER_STEPS) break;
    const long long at = ((static_cast<long long>(sequence) * C::HEADS + within / STEPS) * C::TILES + tile % C::TILES) * C::ROW_TILE;
    if constexpr (TOGETHER == 2) {
      const float(&pair)[2][4] = reinterpret_cast<const float(&)[2][4]>(acc[j]);
      if (which == 0)
        PairedStores<Math>::query(query + at, within % STEPS, lane, pair);
      else if (which == 1)
        PairedStores<Math>::key(key + at, within % STEPS, lane, pair);
      else
        PairedStores<Math>::value(value + at, within % STEPS, lane, pair);
    } else {
      if (which == 0)
        Math::template store_query<STEPS>(query + at, 0, within % STEPS, lane, acc[j]);
      else if (which == 1)
        Math::template store_key<STEPS>(key + at, 0, within % STEPS, lane, acc[j]);
      else
        Math::template store_value<STEPS, C::PADDED_HEAD_DIM>(value + at, 0, within % STEPS, lane, acc[j]);
    }
  }
}

// Kernel 1: LayerNorm and the QKV product. q, k and v go to scratch as the fragments that kernel 2 multiplies, in the order
// [sequence][head][row tile][column tile of the head], so that it reads rows and columns of the grid alike, in one piece.
template <typename C>
__device__ __forceinline__ void qkv(const Element* x, const Element* __restrict__ norm_weight, const Element* __restrict__ norm_bias,
                                    const Element* __restrict__ qkv_weight, float* query, float* key, float* value, int row_tiles, float* shared) {
  using P = typename C::Qkv;
  const int part = blockIdx.x % P::PARTS, first_tile = static_cast<int>(blockIdx.x / P::PARTS) * P::ROW_TILES, lane = threadIdx.x % 32;
  TiledProduct<P>::run(
      shared, shared + P::BUFFERS, qkv_weight, part, [](int) {},
      [&]() { normalise_rows<C>(x, norm_weight, norm_bias, first_tile, row_tiles, shared); },
      [&](int row_tile, int column, const float(&acc)[P::WARP_ROW_TILES][P::WARP_COLUMN_TILES][4]) {
#pragma unroll
        for (int i = 0; i < P::WARP_ROW_TILES; ++i) {
          const int tile = first_tile + row_tile + i;
          if (tile >= row_tiles) break;
          store_fragments<C, P::WARP_COLUMN_TILES>(query, key, value, tile, column / 8, lane, acc[i]);
        }
      });
}
