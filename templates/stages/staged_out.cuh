{% set added = ["bias"] * spec.out_bias + ["residual"] * spec.residual %}
// Kernel 3: output product{{ ", " ~ added | join(" and ") if added }}, written to the grid by stride.
template <typename C>
__device__ __forceinline__ void output(const float* attended, {{ "const Element* x, " if spec.residual }}Element* y, const Element* __restrict__ out_weight,
                                       {{ "const Element* __restrict__ out_bias, " if spec.out_bias }}int row_tiles, float* shared) {
  using P = typename C::Out;
  constexpr int PAGES = C::HEADS * C::ROW_TILE / 128, TILE_PAGES = P::PAGES;
  const int part = blockIdx.x % P::PARTS, first_tile = static_cast<int>(blockIdx.x / P::PARTS) * P::ROW_TILES, lane = threadIdx.x % 32;
  const float* rows = attended + static_cast<long long>(first_tile) * (PAGES * 128);
  TiledProduct<P>::run(
      shared, shared + P::BUFFERS, out_weight, part,
      [&](int sum_tile) {
        float* to = shared + sum_tile * P::A_TILE;
#pragma unroll 4
        for (int at = threadIdx.x; at < P::ROW_TILES * TILE_PAGES * 32; at += P::THREADS) {
          const int page = at / 32, row_tile = page / TILE_PAGES, within = sum_tile * TILE_PAGES + page % TILE_PAGES;
          const bool real = first_tile + row_tile < row_tiles && within < PAGES;
          copy_async<16>(to + page * P::PAGE + at % 32 * 4, real ? rows + (row_tile * PAGES + within) * 128 + at % 32 * 4 : attended, real);
        }
      },
      []() {},
      [&](int row_tile, int column, const float(&acc)[P::WARP_ROW_TILES][P::WARP_COLUMN_TILES][4]) {
#pragma unroll
        for (int i = 0; i < P::WARP_ROW_TILES; ++i) {
          OutputTiles<C, P::WARP_COLUMN_TILES> tiles;
{% if spec.residual %}
          tiles.before(x, first_tile + row_tile + i, row_tiles, column, lane);
{% endif %}
          tiles.after({{ "x, " if spec.residual }}y, {{ "out_bias, " if spec.out_bias }}first_tile + row_tile + i, row_tiles, column, lane, acc[i]);
        }
      });
}
