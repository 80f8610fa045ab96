{% set affine = "norm_weight" in spec.pre_norm_parameters %}
{% set shifted = "norm_bias" in spec.pre_norm_parameters %}
{% if spec.pre_norm == "layer" %}
// Operand A of the QKV product: the block's tokens, normalised (LayerNorm with the biased variance), all channels of them, as fragments in
// the order [tile of the sum][row tile][page]. A warp takes tokens g and g+8 of a row tile at a time and keeps them in registers between
// mean and variance. Tokens past a sequence's end, row tiles past the last one and channels past DIM become zeros.
{% else %}
// Operand A of the QKV product: the block's tokens{{ ", over their root mean square (RMSNorm)" if spec.pre_norm == "rms" }}, all channels of them, as fragments in the order
// [tile of the sum][row tile][page]. A warp takes tokens g and g+8 of a row tile at a time. Tokens past a sequence's end, row tiles past
// the last one and channels past DIM become zeros.
{% endif %}
template <typename C>
__device__ __forceinline__ void normalise_rows(const Element* x, {{ "const Element* __restrict__ weight, " if affine }}{{ "const Element* __restrict__ bias, " if shifted }}int first_tile, int row_tiles, float* a) {
  using P = typename C::Qkv;
  constexpr int VEC = C::DIM % 4 == 0 ? 4 : 2, STEPS = ceil_div(P::SUM, 32 * VEC), PAIRS = 8 * P::ROW_TILES, WARPS = P::THREADS / 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 1
  for (int pair = warp; pair < PAIRS; pair += WARPS) {
    const int row_tile = pair / 8, g = pair % 8, tile = first_tile + row_tile;
    const int sequence = tile / C::TILES;
    float values[2][STEPS][VEC] = {}{{ {"layer": ", mean[2], inverse[2]", "rms": ", inverse[2]", "none": ""}[spec.pre_norm] }};
{% if spec.pre_norm != "none" %}
    bool real[2];
{% endif %}
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = tile % C::TILES * 16 + 8 * half + g;
{% if spec.pre_norm != "none" %}
      real[half] = tile < row_tiles && token < C::LENGTH;
      if (real[half]) {
{% else %}
      if (tile < row_tiles && token < C::LENGTH) {
{% endif %}
        const Element* from = x + C::offset(sequence, token);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) load_channels<C::DIM>(values[half][step], from, (step * 32 + lane) * VEC);
      }
    }
{% if spec.pre_norm == "layer" %}
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = 0.0f, squares = 0.0f;
#pragma unroll
      for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int i = 0; i < VEC; ++i) sum += values[half][step][i];
      mean[half] = group_sum<32>(sum) * (1.0f / C::DIM);
#pragma unroll
      for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          const float centred = values[half][step][i] - mean[half];
          if ((step * 32 + lane) * VEC + i < C::DIM) squares += centred * centred;
        }
      inverse[half] = rsqrtf(group_sum<32>(squares) * (1.0f / C::DIM) + C::EPSILON);
    }
{% elif spec.pre_norm == "rms" %}
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float squares = 0.0f;
#pragma unroll
      for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int i = 0; i < VEC; ++i) squares = fmaf(values[half][step][i], values[half][step][i], squares);
      inverse[half] = rsqrtf(group_sum<32>(squares) * (1.0f / C::DIM) + C::EPSILON);
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
{% set normed = "(values[half][step][i] - mean[half]) * inverse[half]" if spec.norm == "layer" else "values[half][step][i] * inverse[half]" %}
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          const float normed = {{ "fmaf(%s, gain[i], shift[i])" | format(normed) if shifted else normed ~ " * gain[i]" if affine else normed }};
          values[half][step][i] = real[half] && channel + i < C::DIM ? normed : 0.0f;
        }
{% endif %}
      float* to = a + channel / P::SUM_TILE * P::A_TILE;
#pragma unroll
      for (int i = 0; i < VEC; i += 2) {
        const float upper[2] = {values[0][step][i], values[0][step][i + 1]}, lower[2] = {values[1][step][i], values[1][step][i + 1]};
        C::Math::template store_rows<P::FRAGMENT, P::SUM_TILE / 8, P::PAGE>(to, row_tile, g, channel % P::SUM_TILE + i, upper, lower);
      }
    }
  }
}
