{% if spec.residual %}
// TILES neighbouring column tiles of a row tile of the output product, from column `column` on, with {{ "bias and " if spec.out_bias }}residual into y. An element of
// y is written by the thread that has read it as residual, so that x may be y. Because of that the compiler keeps loads of x behind earlier
// stores to y: the residuals of up to 8 column tiles are read before the first store, so that they wait for memory together.
{% else %}
// TILES neighbouring column tiles of a row tile of the output product, from column `column` on, {{ "with bias " if spec.out_bias }}into y.
{% endif %}
template <typename C, int TILES>
__device__ __forceinline__ void {{ "add_residual(const Element* x, " if spec.residual else "store_output(" }}Element* y, {{ "const Element* __restrict__ out_bias, " if spec.out_bias }}int tile, int row_tiles, int column, int lane,
                                             const float (&acc)[TILES][4]) {
  constexpr int RUN = C::Out::RUN, TOGETHER = TILES <= 8 ? TILES : TILES % 8 == 0 ? 8 : 4, RUNS = 2 * TOGETHER / RUN;  // RUNS of RUN neighbours: what a lane has of them
  static_assert(TILES % TOGETHER == 0, "column tiles that go together");
  const int sequence = tile / C::TILES;
#pragma unroll
  for (int first = 0; first < TILES; first += TOGETHER) {
    const int channel = column + 8 * first + RUN * (lane % 4);
    float sums[2][RUNS][RUN] = {};
{% if spec.residual %}
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = tile % C::TILES * 16 + 8 * half + lane / 4;
      if (tile >= row_tiles || token >= C::LENGTH) continue;
#pragma unroll
      for (int run = 0; run < RUNS; ++run) load_channels<C::DIM>(sums[half][run], x + C::offset(sequence, token), channel + 4 * RUN * run);
    }
{% endif %}
#pragma unroll
    for (int run = 0; run < RUNS; ++run) {
{% if spec.out_bias %}
      float bias[RUN] = {};
      load_channels<C::DIM>(bias, out_bias, channel + 4 * RUN * run);
{% endif %}
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int token = tile % C::TILES * 16 + 8 * half + lane / 4;
        if (tile >= row_tiles || token >= C::LENGTH) continue;
#pragma unroll
        for (int c = 0; c < RUN; ++c) sums[half][run][c] += acc[first + run * (RUN / 2) + c / 2][2 * half + c % 2]{{ " + bias[c]" if spec.out_bias }};
        store_channels<C::DIM>(y + C::offset(sequence, token), channel + 4 * RUN * run, sums[half][run]);
      }
    }
  }
}
