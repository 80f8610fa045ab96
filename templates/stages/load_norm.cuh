// Stage 1: load the block's tokens and normalise them (LayerNorm with the biased variance). NORM_LANES lanes share tokens
// g and g+8 of a row tile and keep them in registers between the mean and the variance. Tokens past the sequence's end,
// sequences past the last one and channels past DIM become zeros.
//
// The result lies in fragments of operand A: a tile of 16 rows and 8 channels is 32 quadruples, one a lane, (g, k), (g+8, k), (g, k'),
// (g+8, k'). Which channels are k and k' of lane t is the weights' choice: a lane reads FRAGMENT neighbours of a row of them.
template <typename C>
struct NormWeights {  // of the channels that a lane serves
  static constexpr int LANES = C::NORM_LANES, VEC = C::NORM_VECTOR, STEPS = ceil_div(C::PADDED_DIM, LANES * VEC);
  float gain[STEPS][VEC] = {}, shift[STEPS][VEC] = {};

  __device__ __forceinline__ NormWeights(const float* __restrict__ weight, const float* __restrict__ bias) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const int channel = (step * LANES + threadIdx.x % LANES) * VEC;
      if (channel < C::DIM) load_constant(gain[step], weight + channel), load_constant(shift[step], bias + channel);
    }
  }
};

template <typename C>
__device__ __forceinline__ float* normed_fragment(float* normed, int row_tile, int g, int channel) {
  constexpr int F = C::FRAGMENT;
  const int step = channel / (4 * F) * (F / 2) + channel % F / 2, t = channel % (4 * F) / F;
  return normed + (row_tile * (C::PADDED_DIM / 8) + step) * C::NORMED_TILE + (4 * g + t) * 4 + channel % 2 * 2;
}

template <typename C>
__device__ __forceinline__ void load_and_normalise(const float* x, const NormWeights<C>& weights, int first, int sequences, float* shared) {
  constexpr int LANES = NormWeights<C>::LANES, VEC = NormWeights<C>::VEC, STEPS = NormWeights<C>::STEPS;
  const int lane = threadIdx.x % LANES;
#pragma unroll 1
  for (int pair = threadIdx.x / LANES; pair < C::ROWS / 2; pair += C::THREADS / LANES) {
    const int row_tile = pair / 8, g = pair % 8;
    float values[2][STEPS][VEC] = {}, mean[2], inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * row_tile + 8 * half + g, token = row % C::PADDED_LENGTH, sequence = first + row / C::PADDED_LENGTH;
      if (token < C::LENGTH && sequence < sequences) {
        const float* from = x + C::offset(sequence, token);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
          const int channel = (step * LANES + lane) * VEC;
          if (channel < C::DIM) load(values[half][step], from + channel);
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
          if ((step * LANES + lane) * VEC < C::DIM) squares += centred * centred;
        }
      inverse[half] = rsqrtf(group_sum<LANES>(squares) * (1.0f / C::DIM) + C::EPSILON);
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const int channel = (step * LANES + lane) * VEC;
        if constexpr (C::KEEP_X)
          if (channel < C::DIM) store(shared + C::KEPT + row * C::KEPT_STRIDE + channel, values[half][step]);
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          const float normed = fmaf((values[half][step][i] - mean[half]) * inverse[half], weights.gain[step][i], weights.shift[step][i]);
          values[half][step][i] = real && channel < C::DIM ? normed : 0.0f;
        }
      }
    }
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const int channel = (step * LANES + lane) * VEC;
      if (channel < C::PADDED_DIM) {
        if constexpr (VEC == 1) {
          const float two[2] = {values[0][step][0], values[1][step][0]};
          store(normed_fragment<C>(shared + C::NORMED, row_tile, g, channel), two);
        } else {
#pragma unroll
          for (int i = 0; i < VEC; i += 2) {
            const float quad[4] = {values[0][step][i], values[1][step][i], values[0][step][i + 1], values[1][step][i + 1]};
            store(normed_fragment<C>(shared + C::NORMED, row_tile, g, channel + i), quad);
          }
        }
      }
    }
  }
}
