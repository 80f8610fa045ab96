{% set norms = spec.pre_norm_parameters %}
// Kernel 1: {{ {"layer": "LayerNorm and the", "rms": "RMSNorm and the", "none": "the"}[spec.pre_norm] }} QKV product. q, k and v go to scratch as the fragments that kernel 2 multiplies, in the order
// [sequence][head][row tile][column tile of the head], so that it reads rows and columns of the grid alike, in one piece.
template <typename C>
__device__ __forceinline__ void warpgroup_qkv({{ (["const Element* x"] + norms | declared + ["const float* packed"] + spec.parameters_of("qkv")[1:] | declared) | join(", ") }},
                                              float* query, float* key, float* value, int row_tiles, float* shared) {
  using P = typename C::Qkv;
  using Product = WarpgroupProduct<P>;
  const int part = blockIdx.x % P::PARTS, first_tile = static_cast<int>(blockIdx.x / P::PARTS) * P::ROW_TILES, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) wait_for_previous_kernel();  // the weights are packed; the barrier behind fill has all threads behind this
  Product::run(
      shared, {{ "nullptr, " if streaming }}packed, part,
      [&](float* a) {
        normalise_by_groups<C>({{ (["x"] + norms | list) | join(", ") }}, first_tile, row_tiles,
                               [&](int row_tile, int row, int channel, const float(&values)[CHUNK]) { Product::store_row(a, 16 * row_tile + row, channel, values); });
      },
      [](int, int) {},
      [&](int row_tile, int column, const float(&acc)[P::WARP_COLUMN_TILES][4]) {
        const int tile = first_tile + row_tile;
        if (tile < row_tiles) store_fragments<C, P::WARP_COLUMN_TILES>(query, key, value, {{ "qkv_bias, " if spec.qkv_bias }}tile, column / 8, lane, acc);
      });
}
