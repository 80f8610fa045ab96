// Stage 1: load the block's tokens and normalise them (LayerNorm with the biased variance). NORM_LANES lanes share tokens
// g and g+8 of a row tile and keep them in registers between the mean and the variance. Tokens past the sequence's end,
// sequences past the last one and channels past DIM become zeros.
template <typename C>
struct NormWeights {  // of the channels that a lane serves
  static constexpr int LANES = C::NORM_LANES, VEC = C::NORM_VECTOR, STEPS = ceil_div(C::PADDED_DIM, LANES * VEC);
  float gain[STEPS][VEC] = {}, shift[STEPS][VEC] = {};

  __device__ __forceinline__ NormWeights(const float* __restrict__ weight, const float* __restrict__ bias) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const int channel = (step * LANES + threadIdx.x % LANES) * VEC;
      if constexpr (C::DIM % VEC == 0) {
        if (channel < C::DIM) load_constant(gain[step], weight + channel), load_constant(shift[step], bias + channel);
      } else {
#pragma unroll
        for (int i = 0; i < VEC; ++i)
          if (channel + i < C::DIM) gain[step][i] = __ldg(weight + channel + i), shift[step][i] = __ldg(bias + channel + i);
      }
    }
  }
};

template <typename C>
__device__ __forceinline__ void load_and_normalise(const float* x, const NormWeights<C>& weights, int first, int sequences, float* shared) {
  constexpr int LANES = NormWeights<C>::LANES, VEC = NormWeights<C>::VEC, STEPS = NormWeights<C>::STEPS;
  const int lane = threadIdx.x % LANES;
  constexpr int PAIRS = C::ROWS / 2, AT_ONCE = C::THREADS / LANES;
#pragma unroll 1
  for (int turn = 0; turn < ceil_div(PAIRS, AT_ONCE); ++turn) {
    const int pair = threadIdx.x / LANES + turn * AT_ONCE, row_tile = pair / 8, g = pair % 8;
    if (PAIRS % AT_ONCE != 0 && pair >= PAIRS) break;
    float values[2][STEPS][VEC] = {}, mean[2], inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * row_tile + 8 * half + g, token = row % C::PADDED_LENGTH, sequence = first + row / C::PADDED_LENGTH;
      if (token < C::LENGTH && sequence < sequences) {
        const float* from = x + C::offset(sequence, token);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
          const int channel = (step * LANES + lane) * VEC;
          if constexpr (C::DIM % VEC == 0) {
            if (channel < C::DIM) load(values[half][step], from + channel);
          } else {
#pragma unroll
            for (int i = 0; i < VEC; ++i)
              if (channel + i < C::DIM) values[half][step][i] = from[channel + i];
          }
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * row_tile + 8 * half + g;
      const bool real = row % C::PADDED_LENGTH < C::LENGTH && first + row / C::PADDED_LENGTH < sequences;
      float sum = 0.0f, squares = 0.0f;
#pragma unroll
      for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int i = 0; i < VEC; ++i) sum += values[half][step][i];
      mean[half] = group_sum<LANES>(sum) * (1.0f / C::DIM);
#pragma unroll
      for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          const float centred = values[half][step][i] - mean[half];
          if ((step * LANES + lane) * VEC + i < C::DIM) squares += centred * centred;
        }
      inverse[half] = rsqrtf(group_sum<LANES>(squares) * (1.0f / C::DIM) + C::EPSILON);
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const int channel = (step * LANES + lane) * VEC;
        if constexpr (C::KEEP_X)
          if (channel < C::DIM) store(shared + C::KEPT + row * C::KEPT_STRIDE + channel, values[half][step]);  // rows are a multiple of VEC apart
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          const float normed = fmaf((values[half][step][i] - mean[half]) * inverse[half], weights.gain[step][i], weights.shift[step][i]);
          values[half][step][i] = real && channel + i < C::DIM ? normed : 0.0f;
        }
      }
    }
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const int channel = (step * LANES + lane) * VEC;
      if (channel < C::PADDED_DIM) {
#pragma unroll
        for (int i = 0; i < VEC; i += 2) {
          const float upper[2] = {values[0][step][i], values[0][step][i + 1]}, lower[2] = {values[1][step][i], values[1][step][i + 1]};
          C::Math::template store_rows<C::FRAGMENT, C::PADDED_DIM / 8, C::NORMED_PAGE>(shared + C::NORMED, row_tile, g, channel + i, upper, lower);
        }
      }
    }
  }
}
