{% set added = ["bias"] * spec.out_bias + ["residual"] * spec.residual %}
// Kernel 3: output product{{ ", " ~ added | join(" and ") if added }}, written to the grid by stride. The attention's result comes as fragments of 16 rows and 16
// indices.
template <typename C>
__device__ __forceinline__ void warpgroup_output(const float* attended, {{ "const Element* x, " if spec.residual }}Element* y, const float* packed, {{ "const Element* __restrict__ out_bias, " if spec.out_bias }}int row_tiles,
                                                 float* shared) {
  using P = typename C::Out;
  using Product = WarpgroupProduct<P>;
  constexpr int OPERANDS = Product::OPERANDS, PAGES = C::INNER / 16 * OPERANDS, PAIRS = P::SUM / 32 * OPERANDS;  // of a row tile: fragments there are, pairs of them with padding
  const int part = blockIdx.x % P::PARTS, first_tile = static_cast<int>(blockIdx.x / P::PARTS) * P::ROW_TILES, lane = threadIdx.x % 32;
  const float* rows = attended + static_cast<long long>(first_tile) * (PAGES * 128);
  OutputTiles<C, P::WARP_COLUMN_TILES> tiles;
  Product::run(
      shared, {{ "nullptr, " if streaming }}packed, part,
      [&](float* a) {
#pragma unroll 4
        for (int at = threadIdx.x / 32; at < P::ROW_TILES * PAIRS; at += P::THREADS / 32) {
          const int row_tile = at / PAIRS, which = at % OPERANDS, pair = at % PAIRS / OPERANDS;
          float quads[2][4] = {};
#pragma unroll
          for (int next = 0; next < 2; ++next) {
            const int page = (2 * pair + next) * OPERANDS + which;
            if (first_tile + row_tile < row_tiles && page < PAGES) load(quads[next], rows + (row_tile * PAGES + page) * 128 + 4 * lane);
          }
          Product::store_fragments(a, which, 16 * row_tile, pair, lane, quads);
        }
      },
      [&](int row_tile, int column) { {{- "tiles.before(x, first_tile + row_tile, row_tiles, column, lane); " if spec.residual -}} },
      [&](int row_tile, int column, const float(&acc)[P::WARP_COLUMN_TILES][4]) {
        tiles.after({{ "x, " if spec.residual }}y, {{ "out_bias, " if spec.out_bias }}first_tile + row_tile, row_tiles, column, lane, acc);
      });
}
