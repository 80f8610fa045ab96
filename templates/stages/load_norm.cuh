{% set affine = "norm_weight" in spec.pre_norm_parameters %}
{% set shifted = "norm_bias" in spec.pre_norm_parameters %}
{% if spec.pre_norm == "layer" %}
// Stage 1: load the block's tokens and normalise them (LayerNorm with the biased variance). NORM_LANES lanes share tokens
// g and g+8 of a row tile and keep them in registers between the mean and the variance. Tokens past the sequence's end,
// sequences past the last one and channels past DIM become zeros.
{% elif spec.pre_norm == "rms" %}
// Stage 1: load the block's tokens and divide them by their root mean square (RMSNorm). NORM_LANES lanes share tokens g and
// g+8 of a row tile. Tokens past the sequence's end, sequences past the last one and channels past DIM become zeros.
{% else %}
// Stage 1: load the block's tokens as operand A. NORM_LANES lanes share tokens g and g+8 of a row tile. Tokens past the
// sequence's end, sequences past the last one and channels past DIM become zeros.
{% endif %}
{% if affine %}
template <typename C>
struct NormWeights {  // of the channels that a lane serves, as they are in memory
  static constexpr int LANES = C::NORM_LANES, VEC = C::NORM_VECTOR, STEPS = ceil_div(C::PADDED_DIM, LANES * VEC);
  Word gain[STEPS][VEC / PER_WORD] = {}{{ ", shift[STEPS][VEC / PER_WORD] = {}" if shifted }};

  __device__ __forceinline__ NormWeights(const Element* __restrict__ weight{{ ", const Element* __restrict__ bias" if shifted }}) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const int channel = (step * LANES + threadIdx.x % LANES) * VEC;
      if constexpr (C::DIM % VEC == 0) {
        if (channel < C::DIM) load_constant(gain[step], weight + channel){{ ", load_constant(shift[step], bias + channel)" if shifted }};
      } else {
        load_some<true>(gain[step], weight + channel, true, channel, C::DIM){{ ", load_some<true>(shift[step], bias + channel, true, channel, C::DIM)" if shifted }};
      }
    }
  }
};

{% endif %}
// Tokens g and g+8 of a row tile, as far as a lane reads them; the block takes several turns where it has more tokens.
template <typename C>
struct TokenPair {
  static constexpr int LANES = C::NORM_LANES, VEC = C::NORM_VECTOR, STEPS = {{ "NormWeights<C>::STEPS" if affine else "ceil_div(C::PADDED_DIM, LANES * VEC)" }};
  static constexpr int PAIRS = C::ROWS / 2, AT_ONCE = C::THREADS / LANES, TURNS = ceil_div(PAIRS, AT_ONCE);
  Word words[2][STEPS][VEC / PER_WORD];

  static __device__ __forceinline__ int index(int turn) { return threadIdx.x / LANES + turn * AT_ONCE; }

  __device__ __forceinline__ void load_turn(const Element* x, int turn, int first, int sequences) {
    const int row_tile = index(turn) / 8, g = index(turn) % 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * row_tile + 8 * half + g, token = row % C::PADDED_LENGTH, sequence = first + row / C::PADDED_LENGTH;
      const bool real = (PAIRS % AT_ONCE == 0 || index(turn) < PAIRS) && token < C::LENGTH && sequence < sequences;
      const Element* from = x + (real ? C::offset(sequence, token) : 0);
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const int channel = (step * LANES + threadIdx.x % LANES) * VEC;
#pragma unroll
        for (int i = 0; i < VEC / PER_WORD; ++i) words[half][step][i] = Word{};
        if constexpr (C::DIM % VEC == 0) {
          if (real && channel < C::DIM) load(words[half][step], from + channel);
        } else {
          load_some<false>(words[half][step], from + channel, real, channel, C::DIM);
        }
      }
    }
  }
};

// `tokens` holds the first turn's; each further turn's are read while the one before is normalised.
template <typename C>
__device__ __forceinline__ void load_and_normalise(const Element* x, TokenPair<C>& tokens, {{ "const NormWeights<C>& weights, " if affine }}int first, int sequences, float* shared) {
  using Pair = TokenPair<C>;
  constexpr int LANES = Pair::LANES, VEC = Pair::VEC, STEPS = Pair::STEPS;
  const int lane = threadIdx.x % LANES;
#pragma unroll 1
  for (int turn = 0; turn < Pair::TURNS; ++turn) {
    Pair next;
    if (turn + 1 < Pair::TURNS) next.load_turn(x, turn + 1, first, sequences);
    const int row_tile = Pair::index(turn) / 8, g = Pair::index(turn) % 8;
    if (Pair::PAIRS % Pair::AT_ONCE != 0 && Pair::index(turn) >= Pair::PAIRS) break;
    float values[2][STEPS][VEC]{{ {"layer": ", mean[2], inverse[2]", "rms": ", inverse[2]", "none": ""}[spec.pre_norm] }};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * row_tile + 8 * half + g;
{% if spec.pre_norm != "none" %}
      const bool real = row % C::PADDED_LENGTH < C::LENGTH && (C::SEQUENCES == 1 || first + row / C::PADDED_LENGTH < sequences);
{% endif %}
{% if spec.pre_norm == "layer" %}
      float sum = 0.0f, squares = 0.0f;
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        unpack(values[half][step], tokens.words[half][step]);
#pragma unroll
        for (int i = 0; i < VEC; ++i) sum += values[half][step][i];
      }
      mean[half] = group_sum<LANES>(sum) * (1.0f / C::DIM);
#pragma unroll
      for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          const float centred = values[half][step][i] - mean[half];
          if ((step * LANES + lane) * VEC + i < C::DIM) squares += centred * centred;
        }
      inverse[half] = rsqrtf(group_sum<LANES>(squares) * (1.0f / C::DIM) + C::EPSILON);
{% elif spec.pre_norm == "rms" %}
      float squares = 0.0f;
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        unpack(values[half][step], tokens.words[half][step]);
#pragma unroll
        for (int i = 0; i < VEC; ++i) squares = fmaf(values[half][step][i], values[half][step][i], squares);
      }
      inverse[half] = rsqrtf(group_sum<LANES>(squares) * (1.0f / C::DIM) + C::EPSILON);
{% else %}
#pragma unroll
      for (int step = 0; step < STEPS; ++step) unpack(values[half][step], tokens.words[half][step]);
{% endif %}
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const int channel = (step * LANES + lane) * VEC;
        if constexpr (C::KEEP_X)
          if (channel < C::DIM) store(reinterpret_cast<Element*>(shared + C::KEPT) + {{ "(16 * row_tile + 8 * half + kept_place(g))" if keeps else "row" }} * C::KEPT_STRIDE + channel, tokens.words[half][step]);  // rows are a multiple of VEC apart
{% if affine %}
        float gain[VEC]{{ ", shift[VEC]" if shifted }};
        unpack(gain, weights.gain[step]){{ ", unpack(shift, weights.shift[step])" if shifted }};
{% endif %}
{% if spec.pre_norm != "none" %}
{% set normed = "(values[half][step][i] - mean[half]) * inverse[half]" if spec.norm == "layer" else "values[half][step][i] * inverse[half]" %}
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          const float normed = {{ "fmaf(%s, gain[i], shift[i])" | format(normed) if shifted else normed ~ " * gain[i]" if affine else normed }};
          values[half][step][i] = real && channel + i < C::DIM ? normed : 0.0f;
        }
{% endif %}
      }
    }
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const int channel = (step * LANES + lane) * VEC;
      if (channel < C::PADDED_DIM) {
        constexpr int AT_ONCE = C::Math::STORED_TILES == 2 && C::FRAGMENT == 4 && VEC % 4 == 0 ? 4 : 2;
#pragma unroll
        for (int i = 0; i < VEC; i += AT_ONCE) {
          float upper[AT_ONCE], lower[AT_ONCE];
#pragma unroll
          for (int n = 0; n < AT_ONCE; ++n) upper[n] = values[0][step][i + n], lower[n] = values[1][step][i + n];
          C::Math::template store_rows<C::FRAGMENT, C::PADDED_DIM / 8, C::NORMED_PAGE>(shared + C::NORMED, row_tile, g, channel + i, upper, lower);
        }
      }
    }
    if constexpr (Pair::TURNS > 1) tokens = next;
  }
}
