// Kernel 2: softmax(q k^T / sqrt(HEAD_DIM)) v for WARPS * ROWS * 16 queries of one sequence and head, streaming over tiles of keys (Milakov and
// Gimelshein 2018), so that no row of scores is ever stored. Tiles of keys and values come through STAGES buffers by asynchronous
// copies, or all of them lie in one. q comes in units of the exponent (see kernel 1). The result goes to scratch as operand A of kernel 3.
//
// The exponent's reference need not be the maximum: a row begins with the reference 0, which serves scores of usual size, and gets the maximum
// of a tile when the first tile's weights are too small or a later one's grow beyond LIMIT. So the usual tile has no maximum, no
// correction and no multiplication of what is summed, and the reference is where the scores start from.
template <typename C>
struct StreamedAttention {
  using Math = typename C::Math;
  using S = typename C::Streamed;
  using Products = typename S::Products;
  static constexpr int STEPS = C::PADDED_HEAD_DIM / 8, ROW_TILE = C::ROW_TILE, ROWS = S::ROWS, THREADS = 32 * S::WARPS;
  static constexpr int KEYS = S::KEY_TILE / 8, KEY_STEPS = ceil_div(16 * C::TILES, S::KEY_TILE), GROUPS = ceil_div(C::TILES, S::WARPS * ROWS);
  static constexpr int SUMS = S::SUMS_BY_PRODUCT ? 4 : 2;  // a lane's, of its two rows
  static constexpr bool RESIDENT = S::STAGES == 1, EVEN = C::TILES % (S::WARPS * ROWS) == 0;  // EVEN: every warp has all of its row tiles
  // Tiles of keys that are copied at once. All of a sequence come in up to four copies, so that work begins before the last has come.
  static constexpr int COPY_STEPS = RESIDENT ? ceil_div(KEY_STEPS, KEY_STEPS >= 16 ? 4 : KEY_STEPS >= 8 ? 2 : 1) : 1;
  static constexpr int COPIES = ceil_div(KEY_STEPS, COPY_STEPS), COPIED_TILES = COPY_STEPS * (S::KEY_TILE / 16);  // row tiles
  using Query = typename S::template Query<STEPS>;
  using Weights = typename Products::template Weights<ROWS, KEYS>;
  using Sums = typename Products::template Sums<STEPS, S::VALUE_STRIDE, ROWS>;

  // COPIED_TILES row tiles of one head, of which `real` exist and there is room for `room`, in pieces of COLUMNS words that are STRIDE apart in shared memory.
  template <int COLUMNS, int STRIDE>
  static __device__ __forceinline__ void copy_tiles(float* to, const float* from, int real, int room) {
    constexpr int WORDS = COPIED_TILES * ROW_TILE, TURNS = ceil_div(WORDS, 4 * THREADS);
#pragma unroll(TURNS <= 16 ? TURNS : 8)
    for (int turn = 0; turn < TURNS; ++turn) {
      const int at = 4 * (static_cast<int>(threadIdx.x) + turn * THREADS);
      if ((WORDS % (4 * THREADS) != 0 && at >= WORDS) || (KEY_STEPS % COPY_STEPS != 0 && at >= room * ROW_TILE)) break;
      const bool there = C::TILES % COPIED_TILES == 0 || at < real * ROW_TILE;
      copy_async<16>(to + at / COLUMNS * STRIDE + at % COLUMNS, there ? from + at : from, there);
    }
  }

  static __device__ __forceinline__ void start_copies(float* shared, const float* key, const float* value, int copy) {
    if (copy < COPIES) {
      const int first = copy * COPIED_TILES, real = min(C::TILES - first, COPIED_TILES), room = KEY_STEPS * (S::KEY_TILE / 16) - first;
      float* to = shared + (RESIDENT ? copy * COPY_STEPS * S::KEY_WORDS : copy % S::STAGES * S::BUFFER);
      copy_tiles<ROW_TILE, ROW_TILE>(to, key + first * ROW_TILE, real, room);
      to = shared + S::VALUES + (RESIDENT ? copy * COPY_STEPS * S::VALUE_WORDS : copy % S::STAGES * S::BUFFER);
      copy_tiles<S::VALUE_COLUMNS, S::VALUE_STRIDE>(to, value + first * ROW_TILE, real, room);
    }
    commit_copies();
  }

  // Waits until no more than `left` of LEFT + 1 copies are under way.
  template <int LEFT>
  static __device__ __forceinline__ void wait_until_left(int left) {
    if constexpr (LEFT > 0) {
      if (left < LEFT) return wait_until_left<LEFT - 1>(left);
    }
    wait_for_copies<LEFT>();
  }

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
  // The exponents of the warp's weights for a tile of keys.
  static __device__ __forceinline__ void exponents(float (&p)[ROWS][KEYS][4], const Query (&query)[ROWS], const float (&start)[ROWS][4], const float* keys,
                                                   int step, int lane{{ ", const Terms& terms" if spec.terms }}) {
    Products::template scores<STEPS>(p, query, start, keys, lane);
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
  static __device__ __forceinline__ void refer(float (&start)[ROWS][4], float (&sum)[ROWS][SUMS], Sums& sums, const Query (&query)[ROWS], const float* keys,
                                               int step, int lane{{ ", const Terms& terms" if spec.terms }}) {
{% if spec.terms %}
    // A tile of keys may be masked for a row, or as good as masked by its bias: exponents are taken without references, so that a reference
    // far below the scores that follow does not hide what these are.
    const float nothing[ROWS][4] = {};
    float p[ROWS][KEYS][4];
    exponents(p, query, nothing, keys, step, lane, terms);
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
          sums.rescale(row, half, correction);
        }
        start[row][2 * half] = start[row][2 * half + 1] = -highest;
      }
{% else %}
    float p[ROWS][KEYS][4];
    exponents(p, query, start, keys, step, lane);
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
          sums.rescale(row, half, correction);
        }
        start[row][2 * half] -= highest, start[row][2 * half + 1] -= highest;
      }
{% endif %}
  }

  static __device__ __forceinline__ void run(const float* query, const float* key, const float* value, float* attended{% for term in spec.terms | declared %}, {{ term }}{% endfor %}, float* shared) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int group = blockIdx.x % GROUPS, unit = blockIdx.x / GROUPS, head = unit % C::HEADS, sequence = unit / C::HEADS;
    const int tile = (group * S::WARPS + warp) * ROWS;
    const long long base = static_cast<long long>(unit) * C::TILES * ROW_TILE;
#pragma unroll
    for (int copy = 0; copy < (RESIDENT ? COPIES : S::STAGES - 1); ++copy) start_copies(shared, key + base, value + base, copy);
    Query queries[ROWS];
#pragma unroll
    for (int row = 0; row < ROWS; ++row) queries[row].take(query + base + (EVEN ? tile + row : min(tile + row, C::TILES - 1)) * ROW_TILE, lane);
    Sums sums;
    float sum[ROWS][SUMS] = {}, start[ROWS][4];  // of a row's weights; what its scores start from
#pragma unroll
    for (int i = 0; i < 4 * ROWS; ++i) start[i / 4][i % 4] = -S::HEADROOM;
    const float *keys = shared, *values = shared + S::VALUES;
{% if spec.terms %}
    bool beginning = true;  // whether a row has no key yet
{% endif %}
#pragma unroll 1
    for (int step = 0; step < KEY_STEPS; ++step) {
      if constexpr (!RESIDENT) {
        wait_for_copies<S::STAGES - 2>();
        __syncthreads();  // the step's keys and values are there for all, and the buffer of the step before is free
        start_copies(shared, key + base, value + base, step + S::STAGES - 1);
      } else if (step % COPY_STEPS == 0) {
        wait_until_left<COPIES - 1>(COPIES - 1 - step / COPY_STEPS);
        __syncthreads();  // the copy's keys and values are there for all
      }
{% if spec.terms %}
{% set terms = (["KeyMask<C, KEYS>(key_mask, sequence, step * S::KEY_TILE, lane)"] if spec.key_mask else []) + (["logit_bias, head, tile"] if spec.logit_bias else []) %}
      const Terms terms{ {{- terms | join(", ") -}} };
{% endif %}
      if ({{ "(EVEN || tile < C::TILES) && terms.mask.any()" if spec.key_mask else "EVEN || tile < C::TILES" }}) {
        Weights weights;
        float added[ROWS][2];
        bool outside = false;  // whether the references have been found not to serve
{% if spec.terms %}
        bool low = false;  // whether a row has weights of nothing so far
{% endif %}
        do {
          if (outside) refer(start, sum, sums, queries, keys, step, lane{{ ", terms" if spec.terms }});
          float p[ROWS][KEYS][4];
          exponents(p, queries, start, keys, step, lane{{ ", terms" if spec.terms }});
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
      }
      const bool back = !RESIDENT && step % S::STAGES == S::STAGES - 1;
      keys = back ? shared : keys + (RESIDENT ? S::KEY_WORDS : S::BUFFER);
      values = back ? shared + S::VALUES : values + (RESIDENT ? S::VALUE_WORDS : S::BUFFER);
    }
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      if (!EVEN && tile + row >= C::TILES) return;
{% set inverse = "inverse_or_zero(" if spec.terms else "__fdividef(1.0f, " %}
      const float upper = {{ inverse }}row_sum(sum[row], 0)), lower = {{ inverse }}row_sum(sum[row], 1));
      float* to = attended + (static_cast<long long>(sequence) * C::TILES + tile + row) * (C::HEADS * ROW_TILE);
#pragma unroll
      for (int j = 0; j < STEPS; ++j) {
        const float c[4] = {sums.result(row, j, 0) * upper, sums.result(row, j, 1) * upper, sums.result(row, j, 2) * lower, sums.result(row, j, 3) * lower};
        Math::template store_query<C::INNER / 8>(to, 0, head * STEPS + j, lane, c);
      }
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
