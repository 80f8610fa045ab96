{% set added = ["bias"] * spec.out_bias + ["residual"] * spec.residual %}
// Kernel 3: output product{{ ", " ~ added | join(" and ") if added }}, written to the grid by stride. The attention's result comes as fragments of 16 rows and 16
// indices. The sum's order is free, as long as the packed weights have it too: of 32 indices, what a lane has of a row in two fragments are
// neighbours (Out::weight), so that it stores whole chunks.
template <typename C>
__device__ __forceinline__ void warpgroup_output(const float* attended, {{ "const Element* x, " if spec.residual }}Element* y, const float* packed, {{ "const Element* __restrict__ out_bias, " if spec.out_bias }}int row_tiles,
                                                 float* shared) {
  using P = typename C::Out;
  using Product = WarpgroupProduct<P>;
  constexpr int OPERANDS = Product::OPERANDS, PAGES = C::INNER / 16 * OPERANDS, PAIRS = P::SUM / 32 * OPERANDS;  // of a row tile: fragments there are, pairs of them with padding
  const int part = blockIdx.x % P::PARTS, first_tile = static_cast<int>(blockIdx.x / P::PARTS) * P::ROW_TILES, lane = threadIdx.x % 32;
  const float* rows = attended + static_cast<long long>(first_tile) * (PAGES * 128);
  Product::run(
      shared, packed, part,
      [&](float* a) {
        const int g = lane / 8 + lane % 8 / 4 * 4, t = lane % 4;  // a quarter warp has rows r and r + 4, whose chunks t lie in different banks
#pragma unroll 4
        for (int at = threadIdx.x / 32; at < P::ROW_TILES * PAIRS; at += P::THREADS / 32) {
          const int row_tile = at / PAIRS, which = at % OPERANDS, page = at % PAIRS / OPERANDS * 2 * OPERANDS + which, index = at % PAIRS / OPERANDS * 32 + 8 * t;
          float quad[2][4] = {};  // (g, k), (g+8, k), (g, k+8), (g+8, k+8), and of the next 16 indices
#pragma unroll
          for (int next = 0; next < 2; ++next)
            if (first_tile + row_tile < row_tiles && page + next * OPERANDS < PAGES) load(quad[next], rows + (row_tile * PAGES + page + next * OPERANDS) * 128 + 4 * (4 * g + t));
          float* to = a + which * Product::A_OPERAND + index / P::SUM_TILE * Product::A_TILE;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float chunk[4] = {quad[0][half], quad[0][2 + half], quad[1][half], quad[1][2 + half]};
            store(to + swizzled(16 * row_tile + 8 * half + g, index % P::SUM_TILE), chunk);
          }
        }
      },
      [&](int row_tile, int column, const float(&acc)[P::WARP_COLUMN_TILES][4]) {
        {{ "add_residual" if spec.residual else "store_output" }}<C, P::WARP_COLUMN_TILES>({{ "x, " if spec.residual }}y, {{ "out_bias, " if spec.out_bias }}first_tile + row_tile, row_tiles, column, lane, acc);
      });
}
