{% set norms = spec.pre_norm_parameters %}
{% set added = ["bias"] * spec.out_bias + ["residual"] * spec.residual %}
{% if operand %}
// Ahead of kernel 1: {{ {"layer": "LayerNorm", "rms": "RMSNorm", "none": "x"}[spec.pre_norm] }} as operand A of the QKV product, to where that streams it from.
template <typename C>
struct OperandRows : C {
  using Qkv = typename C::Operand;
};

template <typename C>
__device__ __forceinline__ void streamed_operand({{ (["const Element* x"] + norms | declared) | join(", ") }}, float* operand, int row_tiles) {
  const int first_tile = static_cast<int>(blockIdx.x) * C::Operand::ROW_TILES;
  normalise_by_groups<OperandRows<C>>({{ (["x"] + norms | list) | join(", ") }}, first_tile, row_tiles, [&](int row_tile, int row, int channel, const float(&values)[CHUNK]) {
    WarpgroupProduct<typename C::Qkv>::store_streamed_row(operand, first_tile + row_tile, row, channel, values);
  });
}

// Kernel 1 without the norm. q, k and v go to scratch as in warpgroup_qkv.
template <typename C>
__device__ __forceinline__ void streamed_qkv({{ (["const float* operand", "const float* packed"] + spec.parameters_of("qkv")[1:] | declared) | join(", ") }}, float* query, float* key, float* value, int row_tiles, float* shared) {
  using P = typename C::Qkv;
  using Product = WarpgroupProduct<P>;
  const int part = blockIdx.x % P::PARTS, first_tile = static_cast<int>(blockIdx.x / P::PARTS) * P::ROW_TILES, lane = threadIdx.x % 32;
  Product::run(
      shared, operand + Product::piece(first_tile, 0), packed, part, [](float*) {}, [](int, int) {},
      [&](int row_tile, int column, const float(&acc)[P::WARP_COLUMN_TILES][4]) {
        const int tile = first_tile + row_tile;
        if (tile < row_tiles) store_fragments<C, P::WARP_COLUMN_TILES>(query, key, value, {{ "qkv_bias, " if spec.qkv_bias }}tile, column / 8, lane, acc);
      });
}
{% endif %}
{% if output %}
{% if operand %}

{% endif %}
// Kernel 3 with the attention's result streamed{{ "; " ~ added | join(" and ") ~ " added" if added }}.
template <typename C>
__device__ __forceinline__ void streamed_output(const float* attended, {{ "const Element* x, " if spec.residual }}Element* y, const float* packed, {{ "const Element* __restrict__ out_bias, " if spec.out_bias }}int row_tiles, float* shared) {
  using P = typename C::Out;
  using Product = WarpgroupProduct<P>;
  const int part = blockIdx.x % P::PARTS, first_tile = static_cast<int>(blockIdx.x / P::PARTS) * P::ROW_TILES, lane = threadIdx.x % 32;
  OutputTiles<C, P::WARP_COLUMN_TILES> tiles;
  Product::run(
      shared, attended + Product::piece(first_tile, 0), packed, part, [](float*) {},
      [&](int row_tile, int column) { {{- "tiles.before(x, first_tile + row_tile, row_tiles, column, lane); " if spec.residual -}} },
      [&](int row_tile, int column, const float(&acc)[P::WARP_COLUMN_TILES][4]) {
        tiles.after({{ "x, " if spec.residual }}y, {{ "out_bias, " if spec.out_bias }}first_tile + row_tile, row_tiles, column, lane, acc);
      });
}
{% endif %}
