{% set affine = "norm_weight" in spec.pre_norm_parameters %}
{% set shifted = "norm_bias" in spec.pre_norm_parameters %}
constexpr int CHUNK = 8;  // channels that a lane loads and stores together: 16 bytes of a swizzled row

// A chunk of a token (or of a vector of DIM) from `channel` on, in loads as wide as all tokens are aligned for; what is past DIM stays as it is.
template <int DIM>
__device__ __forceinline__ void load_chunk(Word (&to)[CHUNK / PER_WORD], const Element* from, int channel) {
  if constexpr (DIM % PER_WORD == 0) {
    constexpr int MOST = 4 * PER_WORD, N = DIM % MOST == 0 ? MOST : DIM % (MOST / 2) == 0 ? MOST / 2 : PER_WORD;
#pragma unroll
    for (int i = 0; i < CHUNK; i += N)
      if (channel + i < DIM) load(reinterpret_cast<Word(&)[N / PER_WORD]>(to[i / PER_WORD]), from + channel + i);
  } else {
    load_some<false>(to, from + channel, true, channel, DIM);
  }
}

// The block's tokens{{ {"layer": ", normalised (LayerNorm with the biased variance)", "rms": ", over their root mean square (RMSNorm)", "none": ""}[spec.pre_norm] }}, all channels of them. A group of NORM_LANES lanes has NORM_HELD tokens at a time
// in registers, of which each lane has every NORM_LANES-th chunk: a warp reads whole sectors of several tokens, all loads of a turn are
// under way before the first is waited for, and a sum takes few shuffles. store(row_tile, row, channel, values) takes a chunk. Tokens past a
// sequence's end, row tiles past the last one and channels past DIM become zeros.
template <typename C, typename Store>
__device__ __forceinline__ void normalise_by_groups(const Element* x, {{ "const Element* __restrict__ weight, " if affine }}{{ "const Element* __restrict__ bias, " if shifted }}int first_tile, int row_tiles, Store store_chunk) {
  using P = typename C::Qkv;
  constexpr int LANES = P::NORM_LANES, HELD = P::NORM_HELD, STEPS = ceil_div(P::SUM, LANES * CHUNK), GROUPS = 32 / LANES;
  constexpr int TURNS = 16 / (GROUPS * HELD), WARP_TURNS = TURNS * P::ROW_TILES / (P::THREADS / 32);  // of a row tile; of a warp
  const int lane = threadIdx.x % LANES, group = threadIdx.x % 32 / LANES;
  // Eight lanes store at once: chunks of one row, or half the chunks of two, which lie in other banks where the rows are four apart.
  const int first_row = LANES == 4 ? group % 2 * 4 + group / 2 : group;
#pragma unroll 1
  for (int turn = 0; turn < WARP_TURNS; ++turn) {
    const int at = threadIdx.x / 32 * WARP_TURNS + turn, row_tile = at / TURNS, row = at % TURNS * (GROUPS * HELD) + first_row;
    const int tile = min(first_tile + row_tile, row_tiles - 1), sequence = tile / C::TILES;  // where there is none, another of the block's own is read
    bool real[HELD];
    Word words[HELD][STEPS][CHUNK / PER_WORD] = {};
#pragma unroll
    for (int held = 0; held < HELD; ++held) {
      const int token = tile % C::TILES * 16 + row + held * GROUPS;
      real[held] = first_tile + row_tile < row_tiles && (C::LENGTH % 16 == 0 || token < C::LENGTH);
      const Element* from = x + C::offset(sequence, C::LENGTH % 16 == 0 ? token : min(token, C::LENGTH - 1));
#pragma unroll
      for (int step = 0; step < STEPS; ++step) load_chunk<C::DIM>(words[held][step], from, (step * LANES + lane) * CHUNK);
    }
    float values[HELD][STEPS][CHUNK]{{ ", inverse[HELD]" if spec.pre_norm != "none" }};
#pragma unroll
    for (int held = 0; held < HELD; ++held) {
#pragma unroll
      for (int step = 0; step < STEPS; ++step) unpack(values[held][step], words[held][step]);
{% if spec.pre_norm == "layer" %}
      float sum = 0.0f, squares = 0.0f;
#pragma unroll
      for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) sum += values[held][step][i];
      const float mean = group_sum<LANES>(sum) * (1.0f / C::DIM);
#pragma unroll
      for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
          values[held][step][i] -= mean;
          if ((step * LANES + lane) * CHUNK + i < C::DIM) squares = fmaf(values[held][step][i], values[held][step][i], squares);
        }
      inverse[held] = rsqrtf(group_sum<LANES>(squares) * (1.0f / C::DIM) + C::EPSILON);
{% elif spec.pre_norm == "rms" %}
      float squares = 0.0f;
#pragma unroll
      for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) squares = fmaf(values[held][step][i], values[held][step][i], squares);
      inverse[held] = rsqrtf(group_sum<LANES>(squares) * (1.0f / C::DIM) + C::EPSILON);
{% endif %}
    }
    constexpr float zeros[CHUNK] = {};
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const int channel = (step * LANES + lane) * CHUNK;
      if (channel >= P::SUM) continue;
{% if affine %}
      Word gain_words[CHUNK / PER_WORD] = {}{{ ", shift_words[CHUNK / PER_WORD] = {}" if shifted }};
      load_chunk<C::DIM>(gain_words, weight, channel){{ ", load_chunk<C::DIM>(shift_words, bias, channel)" if shifted }};
      float gain[CHUNK]{{ ", shift[CHUNK]" if shifted }};
      unpack(gain, gain_words){{ ", unpack(shift, shift_words)" if shifted }};
{% endif %}
#pragma unroll
      for (int held = 0; held < HELD; ++held) {
{% if spec.pre_norm != "none" %}
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
          const float normed = {{ "fmaf(values[held][step][i] * inverse[held], gain[i], shift[i])" if shifted else "values[held][step][i] * inverse[held]" ~ (" * gain[i]" if affine) }};
          values[held][step][i] = channel + i < C::DIM ? normed : 0.0f;
        }
{% endif %}
        store_chunk(row_tile, row + held * GROUPS, channel, values[held][step]);
      }
    }
#pragma unroll
    for (int held = 0; held < HELD; ++held)
      if (!real[held])
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
          if (const int channel = (step * LANES + lane) * CHUNK; channel < P::SUM) store_chunk(row_tile, row + held * GROUPS, channel, zeros);
  }
}
