// Kernel 3: output product, bias and residual, written to the grid by stride. An element of y is written by the thread that has read
// it as residual, so that x may be y. Because of that the compiler keeps loads of x behind earlier stores to y: all residuals of a row
// tile are read before the first store, so that they wait for memory together.
template <typename C>
__device__ __forceinline__ void output(const float* attended, const Element* x, Element* y, const Element* __restrict__ out_weight,
                                       const Element* __restrict__ out_bias, int row_tiles, float* shared) {
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
        constexpr int RUN = P::RUN, RUNS = 8 * P::WARP_COLUMN_TILES / (4 * RUN);  // of a lane
        float bias[RUNS][RUN] = {};
#pragma unroll
        for (int run = 0; run < RUNS; ++run) load_channels<C::DIM>(bias[run], out_bias, column + RUN * (4 * run + lane % 4));
#pragma unroll
        for (int i = 0; i < P::WARP_ROW_TILES; ++i) {
          const int tile = first_tile + row_tile + i, sequence = tile / C::TILES;
          float sums[2][RUNS][RUN] = {};
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int token = tile % C::TILES * 16 + 8 * half + lane / 4;
            if (tile >= row_tiles || token >= C::LENGTH) continue;
#pragma unroll
            for (int run = 0; run < RUNS; ++run) load_channels<C::DIM>(sums[half][run], x + C::offset(sequence, token), column + RUN * (4 * run + lane % 4));
          }
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int token = tile % C::TILES * 16 + 8 * half + lane / 4;
            if (tile >= row_tiles || token >= C::LENGTH) continue;
#pragma unroll
            for (int run = 0; run < RUNS; ++run) {
#pragma unroll
              for (int c = 0; c < RUN; ++c) sums[half][run][c] += acc[i][run * (RUN / 2) + c / 2][2 * half + c % 2] + bias[run][c];
              store_channels<C::DIM>(y + C::offset(sequence, token), column + RUN * (4 * run + lane % 4), sums[half][run]);
            }
          }
        }
      });
}
