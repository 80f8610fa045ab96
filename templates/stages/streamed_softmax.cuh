// softmax(q k^T / sqrt(HEAD_DIM)) v for ROWS row tiles of a warp, tile of keys after tile of keys (Milakov and Gimelshein 2018), so that no
// row of scores is ever stored. q comes in units of the exponent.
//
// The exponent's reference need not be the maximum: a row begins with the reference 0, which serves scores of usual size, and gets the maximum
// of a tile when the first tile's weights are too small or a later one's grow beyond LIMIT. So the usual tile has no maximum, no
// correction and no multiplication of what is summed, and the reference is where the scores start from.
template <typename C>
struct StreamedSoftmax {
  using Math = typename C::Math;
  using S = typename C::Streamed;
  using Products = typename S::Products;
  static constexpr int STEPS = C::PADDED_HEAD_DIM / 8, ROWS = S::ROWS, KEYS = S::KEY_TILE / 8, KEY_STEPS = ceil_div(16 * C::TILES, S::KEY_TILE);
  static constexpr int SUMS = S::SUMS_BY_PRODUCT ? 4 : 2;  // a lane's, of its two rows
  using Query = typename S::template Query<STEPS>;
  using Weights = typename Products::template Weights<ROWS, KEYS>;
  using Sums = typename Products::template Sums<STEPS, S::VALUE_STRIDE, ROWS>;

{% if spec.terms %}
  // What changes the scores of a tile.
  struct Terms {
{% if spec.key_mask %}
    KeyMask<C, KEYS> mask;
{% endif %}
{% if spec.logit_bias %}
    const Element* __restrict__ bias;
    int head, tile;  // the warp's first row tile
{% endif %}
  };

{% endif %}
  Query queries[ROWS];
  Sums sums;
{% if many_keys %}
  // Tensor cores truncate what they have added up, each time by up to 2^-23 of it: over MANY keys, sums begin anew after SETTLED steps, and what they were
  // is added here, rounded.
  static constexpr bool MANY = C::LENGTH > {{ many_keys }};
  static constexpr int SETTLED = {{ many_keys // 2 }} / S::KEY_TILE;
  float settled[MANY ? ROWS : 1][MANY ? STEPS : 1][4];
{% if spec.key_mask %}
  int steps_added = 0;  // those whose keys are all masked are left out
{% endif %}
{% endif %}
  float sum[ROWS][SUMS], start[ROWS][4];  // of a row's weights; what its scores start from
{% if spec.terms %}
  bool beginning;  // whether a row has no key yet
{% endif %}

  // A head's accumulators of one row tile, number `tile` of those in shared memory: queries, in units of the exponent; keys and values.
  __device__ __forceinline__ void hold_query(int row, const float (&acc)[3 * STEPS][4]) { queries[row].hold(acc); }

  static __device__ __forceinline__ void store_keys(float* keys, float* values, int tile, int lane, const float (&acc)[3 * STEPS][4]) {
#pragma unroll
    for (int j = 0; j < STEPS; j += 2) {
      Math::template store_key<STEPS>(keys, tile, j, lane, reinterpret_cast<const float(&)[2][4]>(acc[STEPS + j]));
      Math::template store_value<STEPS, C::PADDED_HEAD_DIM>(values, tile, j, lane, reinterpret_cast<const float(&)[2][4]>(acc[2 * STEPS + j]));
    }
  }

  // Before the first tile of keys.
  __device__ __forceinline__ void begin() {
    sums = Sums();
{% if many_keys %}
    if constexpr (MANY) {
#pragma unroll
      for (int row = 0; row < ROWS; ++row)
#pragma unroll
        for (int j = 0; j < STEPS; ++j)
#pragma unroll
          for (int c = 0; c < 4; ++c) settled[row][j][c] = 0.0f;
    }
{% endif %}
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
#pragma unroll
      for (int i = 0; i < SUMS; ++i) sum[row][i] = 0.0f;
#pragma unroll
      for (int i = 0; i < 4; ++i) start[row][i] = -S::HEADROOM;
    }
{% if spec.terms %}
    beginning = true;
{% endif %}
  }

  // The exponents of the warp's weights for a tile of keys.
  __device__ __forceinline__ void exponents(float (&p)[ROWS][KEYS][4], const float (&from)[ROWS][4], const float* keys, int step, int lane{{ ", const Terms& terms" if spec.terms }}) const {
    Products::template scores<STEPS>(p, queries, from, keys, lane);
    if (C::LENGTH % S::KEY_TILE != 0 && step == KEY_STEPS - 1) {
#pragma unroll
      for (int j = 0; j < KEYS; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (step * S::KEY_TILE + 8 * j + 2 * (lane % 4) + i % 2 >= C::LENGTH) {
#pragma unroll
            for (int row = 0; row < ROWS; ++row) p[row][j][i] = minus_infinity();
          }
    }
{% if spec.logit_bias %}
    add_bias<C>(p, terms.bias, terms.head, 16 * terms.tile + lane / 4, step * S::KEY_TILE, lane);
{% endif %}
{% if spec.key_mask %}
    terms.mask.apply(p, lane);
{% endif %}
  }

  // References of rows from the tile's maximum, so that its largest weight is 2^-HEADROOM; those of rows that have been summed do not fall.
  __device__ __forceinline__ void refer(const float* keys, int step, int lane{{ ", const Terms& terms" if spec.terms }}) {
{% if spec.terms %}
    // A tile of keys may be masked for a row, or as good as masked by its bias: exponents are taken without references, so that a reference
    // far below the scores that follow does not hide what these are.
    const float nothing[ROWS][4] = {};
    float p[ROWS][KEYS][4];
    exponents(p, nothing, keys, step, lane, terms);
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float highest = minus_infinity();
#pragma unroll
        for (int j = 0; j < KEYS; ++j) highest = fmaxf(highest, fmaxf(p[row][j][2 * half], p[row][j][2 * half + 1]));
        highest = group_max<4>(highest) + S::HEADROOM;
        const float reference = -start[row][2 * half];
        const bool begun = row_sum(sum[row], half) > 0.0f;  // else no key so far had a weight
        if (begun || highest == minus_infinity()) highest = fmaxf(highest, reference);
        if (begun) {
          const float correction = exp2_approx(reference - highest);
#pragma unroll
          for (int i = half * SUMS / 2; i < (half + 1) * SUMS / 2; ++i) sum[row][i] *= correction;
          {{ "rescale" if many_keys else "sums.rescale" }}(row, half, correction);
        }
        start[row][2 * half] = start[row][2 * half + 1] = -highest;
      }
{% else %}
    float p[ROWS][KEYS][4];
    exponents(p, start, keys, step, lane);
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float highest = minus_infinity();
#pragma unroll
        for (int j = 0; j < KEYS; ++j) highest = fmaxf(highest, fmaxf(p[row][j][2 * half], p[row][j][2 * half + 1]));
        highest = group_max<4>(highest) + S::HEADROOM;
        if (step > 0) {
          highest = fmaxf(highest, 0.0f);
          const float correction = exp2_approx(-highest);
#pragma unroll
          for (int i = half * SUMS / 2; i < (half + 1) * SUMS / 2; ++i) sum[row][i] *= correction;
          {{ "rescale" if many_keys else "sums.rescale" }}(row, half, correction);
        }
        start[row][2 * half] -= highest, start[row][2 * half + 1] -= highest;
      }
{% endif %}
  }

  // Tile number `step` of the keys. meanwhile() runs when the scores are under way and the exponentials still to come, where there is something
  // to do BESIDE them: scores that are computed at one place of the code alone take fewer registers.
  template <bool BESIDE, typename Meanwhile>
  __device__ __forceinline__ void add(const float* keys, const float* values, int step, int lane, {{ "const Terms& terms, " if spec.terms }}Meanwhile meanwhile) {
    Weights weights;
    float p[ROWS][KEYS][4];
    if constexpr (BESIDE) {
      exponents(p, start, keys, step, lane{{ ", terms" if spec.terms }});
      meanwhile();
    }
    float added[ROWS][2];
    bool outside = false;  // whether the references have been found not to serve
{% if spec.terms %}
    bool low = false;  // whether a row has weights of nothing so far
{% endif %}
    do {
      if (outside) refer(keys, step, lane{{ ", terms" if spec.terms }});
      if (!BESIDE || outside) exponents(p, start, keys, step, lane{{ ", terms" if spec.terms }});
#pragma unroll
      for (int row = 0; row < ROWS; ++row)
#pragma unroll
        for (int j = 0; j < KEYS; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i) p[row][j][i] = S::power(p[row][j][i], j % 2 * 4 + i);
      weights.take(p);
      bool found = beyond(weights, p, added);
{% if spec.terms %}
      low = beginning && __any_sync(ALL_LANES, below(weights, added, sum));
      found |= low;
{% else %}
      if (step == 0) found |= below(weights, added);
{% endif %}
      outside = __any_sync(ALL_LANES, found) & !outside;
    } while (outside);
{% if spec.terms %}
    beginning = low;
{% endif %}
    if constexpr (S::SUMS_BY_PRODUCT) {
      Products::add_rows(sum, weights);
    } else {
#pragma unroll
      for (int row = 0; row < ROWS; ++row) sum[row][0] += added[row][0], sum[row][1] += added[row][1];
    }
    sums.add(weights, values, lane);
{% if many_keys %}
    if constexpr (MANY) {
      if ({{ "++steps_added" if spec.key_mask else "(step + 1)" }} % SETTLED == 0) {
#pragma unroll
        for (int row = 0; row < ROWS; ++row)
#pragma unroll
          for (int j = 0; j < STEPS; ++j)
#pragma unroll
            for (int c = 0; c < 4; ++c) settled[row][j][c] += sums.result(row, j, c);
        sums = Sums();
      }
    }
{% endif %}
  }

{% if many_keys %}
  __device__ __forceinline__ void rescale(int row, int half, float factor) {
    sums.rescale(row, half, factor);
    if constexpr (MANY) {
#pragma unroll
      for (int j = 0; j < STEPS; ++j) settled[row][j][2 * half] *= factor, settled[row][j][2 * half + 1] *= factor;
    }
  }

  __device__ __forceinline__ float summed(int row, int j, int c) const {
    if constexpr (MANY) return settled[row][j][c] + sums.result(row, j, c);
    return sums.result(row, j, c);
  }

{% endif %}
  // All keys of a head that lie in shared memory, one tile behind another. meanwhile(step) runs beside each tile.
  template <typename Meanwhile>
  __device__ __forceinline__ void run(const float* keys, const float* values, int lane, Meanwhile meanwhile{% if spec.key_mask %}, const unsigned char* __restrict__ key_mask, int sequence{% endif %}{% if spec.logit_bias %}, const Element* __restrict__ bias, int head, int tile{% endif %}) {
#pragma unroll 1
    for (int step = 0; step < KEY_STEPS; ++step) {
{% if spec.terms %}
      const Terms terms{ {{- (["KeyMask<C, KEYS>(key_mask, sequence, step * S::KEY_TILE, lane)"] if spec.key_mask else []) | join("") }}{{ ", " if spec.key_mask and spec.logit_bias }}{{ "bias, head, tile" if spec.logit_bias -}} };
{% endif %}
{% if spec.key_mask %}
      if (!terms.mask.any()) {
        meanwhile(step);
        continue;
      }
{% endif %}
      add<true>(keys + step * S::KEY_WORDS, values + step * S::VALUE_WORDS, step, lane, {{ "terms, " if spec.terms }}[&]() { meanwhile(step); });
    }
  }

{% set inverse = "inverse_or_zero(" if spec.terms else "__fdividef(1.0f, " %}
  // The result of row tile `row`, to `to` as a row tile of operand A of the output product.
  __device__ __forceinline__ void finish(float* to, int row, int head, int lane) const {
    const float upper = {{ inverse }}row_sum(sum[row], 0)), lower = {{ inverse }}row_sum(sum[row], 1));
#pragma unroll
    for (int j = 0; j < STEPS; ++j) {
{% set summed = "summed" if many_keys else "sums.result" %}
      const float c[4] = { {{- summed }}(row, j, 0) * upper, {{ summed }}(row, j, 1) * upper, {{ summed }}(row, j, 2) * lower, {{ summed }}(row, j, 3) * lower};
      Math::template store_query<C::INNER / 8>(to, 0, head * STEPS + j, lane, c);
    }
  }

  // The same, a fragment of 16 channels after another: emit(step, quads) takes a lane's quadruples, of what is rounded and of the rests.
  template <typename Emit>
  __device__ __forceinline__ void result(int row, Emit emit) const {
    const float upper = {{ inverse }}row_sum(sum[row], 0)), lower = {{ inverse }}row_sum(sum[row], 1));
#pragma unroll
    for (int step = 0; step < STEPS / 2; ++step) {
      float c[2][4];
#pragma unroll
      for (int i = 0; i < 8; ++i) c[i / 4][i % 4] = {{ "summed" if many_keys else "sums.result" }}(row, 2 * step + i / 4, i % 4) * (i % 4 < 2 ? upper : lower);
      const typename Math::Tile tile = Math::tile(c[0], c[1]);
      emit(step, reinterpret_cast<const float(&)[Math::PAGES][4]>(tile.part));
    }
  }

  // Whether a weight is, or several of a row are, beyond LIMIT. Adds up a lane's weights of each of its rows where that is its part.
  static __device__ __forceinline__ bool beyond(const Weights& weights, const float (&p)[ROWS][KEYS][4], float (&added)[ROWS][2]) {
    if constexpr (S::SUMS_BY_PRODUCT) {
      return weights.reach_two();
    } else {
      float largest = 0.0f;
#pragma unroll
      for (int row = 0; row < ROWS; ++row)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          added[row][half] = 0.0f;
#pragma unroll
          for (int j = 0; j < KEYS; ++j) added[row][half] += p[row][j][2 * half] + p[row][j][2 * half + 1];
          largest = fmaxf(largest, added[row][half]);
        }
      return largest > S::LIMIT;
    }
  }

{% if spec.terms %}
  // Whether a row's weights are together below FLOOR, with those of the tiles before.
  static __device__ __forceinline__ bool below(const Weights& weights, const float (&added)[ROWS][2], const float (&before)[ROWS][SUMS]) {
    float sum[ROWS][SUMS], least = S::FLOOR;
#pragma unroll
    for (int i = 0; i < ROWS * SUMS; ++i) sum[i / SUMS][i % SUMS] = before[i / SUMS][i % SUMS];
{% else %}
  // Whether a row's weights are together below FLOOR.
  static __device__ __forceinline__ bool below(const Weights& weights, const float (&added)[ROWS][2]) {
    float sum[ROWS][SUMS] = {}, least = S::FLOOR;
{% endif %}
    if constexpr (S::SUMS_BY_PRODUCT) Products::add_rows(sum, weights);
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if constexpr (!S::SUMS_BY_PRODUCT) sum[row][half] {{ "+=" if spec.terms else "=" }} added[row][half];
        least = fminf(least, row_sum(sum[row], half));
      }
    return least < S::FLOOR;
  }

  // Of all weights of a row: lanes have what they have added up of it, or the tensor cores' sum of the whole row.
  static __device__ __forceinline__ float row_sum(const float (&sum)[SUMS], int half) {
    return S::SUMS_BY_PRODUCT ? sum[half * SUMS / 2] : group_sum<4>(sum[half]);
  }
};
