{% if spec.out_bias and spec.residual %}
// Kernel 3: output product, bias and residual, written to the grid by stride. An element of y is written by the thread that has read
// it as residual, so that x may be y.
{% elif spec.residual %}
// Kernel 3: output product and residual, written to the grid by stride. An element of y is written by the thread that has read it as
// residual, so that x may be y.
{% else %}
// Kernel 3: output product{{ " and bias" if spec.out_bias }}, written to the grid by stride.
{% endif %}
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
        for (int i = 0; i < P::WARP_ROW_TILES; ++i)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int tile = first_tile + row_tile + i, token = tile % C::TILES * 16 + 8 * half + lane / 4;
            if (tile >= row_tiles || token >= C::LENGTH) continue;
            const long long start = C::offset(tile / C::TILES, token);
#pragma unroll
            for (int j = 0; j < P::WARP_COLUMN_TILES; ++j) {
              const int channel = column + 8 * j + 2 * (lane % 4);
{% if spec.out_bias and spec.residual %}
              float pair[2] = {}, residual[2] = {};
              load_channels<C::DIM>(pair, out_bias, channel);
              load_channels<C::DIM>(residual, x + start, channel);
              pair[0] += acc[i][j][2 * half] + residual[0];
              pair[1] += acc[i][j][2 * half + 1] + residual[1];
{% elif spec.out_bias or spec.residual %}
              float pair[2] = {};
              load_channels<C::DIM>(pair, {{ "x + start" if spec.residual else "out_bias" }}, channel);
              pair[0] += acc[i][j][2 * half], pair[1] += acc[i][j][2 * half + 1];
{% else %}
              const float pair[2] = {acc[i][j][2 * half], acc[i][j][2 * half + 1]};
{% endif %}
              store_channels<C::DIM>(y + start, channel, pair);
            }
          }
      });
}
