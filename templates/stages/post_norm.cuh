{% set affine = "norm_weight" in spec.parameters %}
{% set shifted = "norm_bias" in spec.parameters %}
// The norm behind the {{ "residual" if spec.residual else "output product" }} ({{ "LayerNorm with the biased variance" if spec.norm == "layer" else "RMSNorm" }}): a warp normalises one token of y in place, once all of its
// channels are there.
template <typename C>
__device__ __forceinline__ void normalise_token({{ (["Element* token"] + ["weight"][:affine] | declared + ["bias"][:shifted] | declared) | join(", ") }}) {
  constexpr int VEC = C::DIM % 4 == 0 ? 4 : 2, STEPS = ceil_div(C::DIM, 32 * VEC);
  const int lane = threadIdx.x % 32;
  float values[STEPS][VEC] = {};
#pragma unroll
  for (int step = 0; step < STEPS; ++step) load_channels<C::DIM>(values[step], token, (step * 32 + lane) * VEC);
{% if spec.norm == "layer" %}
  float sum = 0.0f, squares = 0.0f;
#pragma unroll
  for (int step = 0; step < STEPS; ++step)
#pragma unroll
    for (int i = 0; i < VEC; ++i) sum += values[step][i];
  const float mean = group_sum<32>(sum) * (1.0f / C::DIM);
#pragma unroll
  for (int step = 0; step < STEPS; ++step)
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      const float centred = values[step][i] - mean;
      if ((step * 32 + lane) * VEC + i < C::DIM) squares = fmaf(centred, centred, squares);
    }
{% else %}
  float squares = 0.0f;
#pragma unroll
  for (int step = 0; step < STEPS; ++step)
#pragma unroll
    for (int i = 0; i < VEC; ++i) squares = fmaf(values[step][i], values[step][i], squares);
{% endif %}
  const float inverse = rsqrtf(group_sum<32>(squares) * (1.0f / C::DIM) + C::EPSILON);
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    const int channel = (step * 32 + lane) * VEC;
{% if affine %}
    float gain[VEC] = {}{{ ", shift[VEC] = {}" if shifted }};
    load_channels<C::DIM>(gain, weight, channel){{ ", load_channels<C::DIM>(shift, bias, channel)" if shifted }};
{% endif %}
{% set normed = "(values[step][i] - mean) * inverse" if spec.norm == "layer" else "values[step][i] * inverse" %}
#pragma unroll
    for (int i = 0; i < VEC; ++i) values[step][i] = {{ "fmaf(%s, gain[i], shift[i])" | format(normed) if shifted else normed ~ " * gain[i]" if affine else normed }};
    store_channels<C::DIM>(token, channel, values[step]);
  }
}
