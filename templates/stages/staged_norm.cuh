{% set affine = "norm_weight" in spec.pre_norm_parameters %}
{% set shifted = "norm_bias" in spec.pre_norm_parameters %}
// Channels of a token that a lane loads at once.
template <typename C>
constexpr int NORM_VEC = C::DIM % 4 == 0 ? 4 : 2;

{% if spec.pre_norm == "layer" %}
// The block's tokens, normalised (LayerNorm with the biased variance), all channels of them. A warp takes tokens g and g+8 of a row
// tile at a time and keeps them in registers between mean and variance; store(row_tile, g, channel, upper, lower) takes NORM_VEC
// channels of such a pair. Tokens past a sequence's end, row tiles past the last one and channels past DIM become zeros.
{% else %}
// The block's tokens{{ ", over their root mean square (RMSNorm)" if spec.pre_norm == "rms" }}, all channels of them. A warp takes tokens g and g+8 of a row tile at a time;
// store(row_tile, g, channel, upper, lower) takes NORM_VEC channels of such a pair. Tokens past a sequence's end, row tiles past the last
// one and channels past DIM become zeros.
{% endif %}
template <typename C, typename Store>
__device__ __forceinline__ void normalise_rows(const Element* x, {{ "const Element* __restrict__ weight, " if affine }}{{ "const Element* __restrict__ bias, " if shifted }}int first_tile, int row_tiles, Store store_pair) {
  using P = typename C::Qkv;
  constexpr int VEC = NORM_VEC<C>, STEPS = ceil_div(P::SUM, 32 * VEC), TURNS = 8 * P::ROW_TILES, WARPS = P::THREADS / 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 1
  for (int turn = warp; turn < TURNS; turn += WARPS) {
    const int row_tile = turn / 8, g = turn % 8, tile = first_tile + row_tile;
    const int sequence = tile / C::TILES;
    float values[2][STEPS][VEC] = {}{{ {"layer": ", mean[2], inverse[2]", "rms": ", inverse[2]", "none": ""}[spec.pre_norm] }};
{% if spec.pre_norm != "none" %}
    bool real[2];
{% endif %}
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int token = tile % C::TILES * 16 + 8 * row + g;
{% if spec.pre_norm != "none" %}
      real[row] = tile < row_tiles && token < C::LENGTH;
      if (real[row]) {
{% else %}
      if (tile < row_tiles && token < C::LENGTH) {
{% endif %}
        const Element* from = x + C::offset(sequence, token);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) load_channels<C::DIM>(values[row][step], from, (step * 32 + lane) * VEC);
      }
    }
{% if spec.pre_norm == "layer" %}
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float sum = 0.0f, squares = 0.0f;
#pragma unroll
      for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int i = 0; i < VEC; ++i) sum += values[row][step][i];
      mean[row] = group_sum<32>(sum) * (1.0f / C::DIM);
#pragma unroll
      for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          const float centred = values[row][step][i] - mean[row];
          if ((step * 32 + lane) * VEC + i < C::DIM) squares += centred * centred;
        }
      inverse[row] = rsqrtf(group_sum<32>(squares) * (1.0f / C::DIM) + C::EPSILON);
    }
{% elif spec.pre_norm == "rms" %}
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float squares = 0.0f;
#pragma unroll
      for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int i = 0; i < VEC; ++i) squares = fmaf(values[row][step][i], values[row][step][i], squares);
      inverse[row] = rsqrtf(group_sum<32>(squares) * (1.0f / C::DIM) + C::EPSILON);
    }
{% endif %}
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const int channel = (step * 32 + lane) * VEC;
      if (channel >= P::SUM) continue;
{% if affine %}
      float gain[VEC] = {}{{ ", shift[VEC] = {}" if shifted }};
      load_channels<C::DIM>(gain, weight, channel){{ ", load_channels<C::DIM>(shift, bias, channel)" if shifted }};
{% endif %}
{% if spec.pre_norm != "none" %}
{% set normed = "(values[row][step][i] - mean[row]) * inverse[row]" if spec.norm == "layer" else "values[row][step][i] * inverse[row]" %}
#pragma unroll
      for (int row = 0; row < 2; ++row)
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          const float normed = {{ "fmaf(%s, gain[i], shift[i])" | format(normed) if shifted else normed ~ " * gain[i]" if affine else normed }};
          values[row][step][i] = real[row] && channel + i < C::DIM ? normed : 0.0f;
        }
{% endif %}
      store_pair(row_tile, g, channel, values[0][step], values[1][step]);
    }
  }
}
