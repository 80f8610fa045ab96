{% set norms = spec.pre_norm_parameters %}
{% set qkv_bias = ["qkv_bias"] if spec.qkv_bias else [] %}
{% set out_arguments = (["x"] if spec.residual else []) + ["y"] %}
{% set out_bias = ["out_bias"] if spec.out_bias else [] %}
// A whole axis in one kernel, by warpgroups. A block has SEQUENCES sequences, of which a warp has ROWS row tiles: their normalised tokens stay in
// shared memory as operand A of the QKV product, of which a column tile is HEAD_GROUP heads. Their queries stay in their warp's registers, their
// keys and values lie in shared memory for the warps of the sequence. A head's result goes to its place in operand A of the output product or,
// where that is the tokens' place, to scratch: from there it is copied as soon as nothing reads the tokens any more, while attention of the last heads
// goes on; the tiles that these have a part in follow at the end.
//
// The weights of both products, packed by kernel 0, stream through one ring of STAGES buffers: a step is a tile of the sum of one column
// tile. With OVERLAP the steps of the next heads are spread over the tiles of keys of these, so that the matrix unit multiplies
// while the warps compute exponentials.
template <typename C>
struct Resident {
  using Math = typename C::Math;
  using Qkv = typename C::Qkv;
  using Out = typename C::Out;
  using First = WarpgroupProduct<Qkv>;
  using Second = WarpgroupProduct<Out>;
  using S = typename C::Streamed;
  using Softmax = {{ softmax }};
  using Format = typename First::Format;
  static constexpr int OPERANDS = First::OPERANDS, ROWS = S::ROWS, STEPS = C::PADDED_HEAD_DIM / 8, KEY_STEPS = Softmax::KEY_STEPS;
  static constexpr int STAGES = Qkv::STAGES, FIRST_STEPS = First::COLUMN_TILES * First::SUM_TILES, ALL_STEPS = FIRST_STEPS + Second::COLUMN_TILES * Second::SUM_TILES;
  static constexpr int BLOCK_TILES = C::SEQUENCES * C::TILES;  // row tiles of the block that may be real
  static constexpr int KEPT_TILES = S::BY_WARPGROUPS ? Qkv::ROW_TILES : BLOCK_TILES;  // of keys: the matrix unit's are whole blocks of 64
  static constexpr int RESULT = OPERANDS * Second::A_OPERAND;  // words of the attention's result as operand A
  static constexpr int EARLY_TILES = C::SCRATCH ? (C::HEADS - C::HEAD_GROUP) * C::PADDED_HEAD_DIM / 64 : 0;  // of it that have no part of the last heads
  static constexpr int EARLY_BARRIER = C::BARRIERS + 2 * STAGES, LATE_BARRIER = EARLY_BARRIER + 2;  // where those have arrived, and the others
  static constexpr int FIRST_TILES = Qkv::WARP_COLUMN_TILES, SECOND_TILES = Out::WARP_COLUMN_TILES;
  static constexpr int GROUP = C::HEAD_GROUP, HEAD_WORDS = KEPT_TILES * C::ROW_TILE;  // of a head's keys, and of its values

  // Where row tile `tile` of the block lies in operand A: a warpgroup has 64 rows of each of ROWS products, of which warp w has rows 16 w and on.
  static __device__ __forceinline__ int position(int tile) {
    const int warp = tile / ROWS;
    return (warp / 4 * ROWS + tile % ROWS) * 4 + warp % 4;
  }

  // The ring, and where a warp is in it. It is computed without a lane's number, so that the compiler sees that lanes agree and has one copy for a warp.
  struct Ring {
    float* shared;
    const float *next, *packed_out;  // next: what is copied next
    int warp;
    int step, stage, round;  // the next one; its buffer, and how often that has been used before
    int filled, filling;     // warp 0's: the first step whose copy has not been started, and its buffer

    // Has buffers filled again: all threads are done with the first `done` steps.
    __device__ __forceinline__ void refill(int done) {
      if (warp != 0) return;
#pragma unroll 1
      for (; filled < min(done + STAGES, ALL_STEPS); ++filled) {
        if (filled == FIRST_STEPS) next = packed_out;
        const int words = filled < FIRST_STEPS ? Qkv::B_TILE : Out::B_TILE;
        if (threadIdx.x == 0) start_bulk_copy(shared + C::RING + filling * C::RING_TILE, next, 4 * words, shared + C::BARRIERS + 2 * filling);
        next += words;
        if (++filling == STAGES) filling = 0;
      }
    }
  };

  // Sums of nothing: a product that begins them would do, but in a loop it would keep their registers occupied from the kernel's start on.
  template <int N, int TILES>
  static __device__ __forceinline__ void clear(float (&sums)[N][TILES][4]) {
#pragma unroll
    for (int row = 0; row < N; ++row) {
#pragma unroll
      for (int i = 0; i < TILES * 4; ++i) sums[row][i / 4][i % 4] = 0.0f;
      keep_in_registers(sums[row]);
    }
  }

  // The next step of the ring, which lies in buffer `stage` and is of round `round`, with the rows of operand A from `a` on: starts it, waits until the
  // step before is done for all (DONE: it is for this warp), and has the buffer of that filled again. begun: whether it adds to sums{{ ", as those of the output do to the bias" if spec.out_bias }}; last:
  // whether a barrier follows anyway.
  template <typename P, bool DONE, int TILES>
  static __device__ __forceinline__ void multiply(float (&acc)[ROWS][TILES][4], float (&rest)[OPERANDS == 2 ? ROWS : 1][OPERANDS == 2 ? TILES : 1][4], Ring& ring, int stage, int round,
                                                  unsigned long long a, bool begun, bool last) {
    using Product = WarpgroupProduct<P>;
    const unsigned long long b = matrix_descriptor<Product::ROW>(ring.shared + C::RING + stage * C::RING_TILE);
    wait_for_bulk_copy(ring.shared + C::BARRIERS + 2 * stage, round % 2);
    wgmma_fence();
#pragma unroll
    for (int row = 0; row < ROWS; ++row, a += Product::ROWS_OF_A) {
#pragma unroll
      for (int k = 0; k < P::SUM_TILE / 16; ++k) {
        if constexpr (OPERANDS == 2) {
          wgmma(Format{}, rest[row], a + Product::A_OPERAND / 4 + 2 * k, b + 2 * k, begun || k > 0);
          wgmma(Format{}, rest[row], a + 2 * k, b + Product::B_OPERAND / 4 + 2 * k, true);
        }
        wgmma(Format{}, acc[row], a + 2 * k, b + 2 * k, begun || k > 0{{ " || SAME<P, Out>" if spec.out_bias }});
      }
    }
    wgmma_commit();
    if constexpr (!DONE) wgmma_wait<1>();
    if (!last) {
      __syncthreads();  // the step before is done for all
      ring.refill(ring.step);
    }
    ++ring.step;
    if (++ring.stage == STAGES) ring.stage = 0, ++ring.round;
  }

  // One of a column tile's steps that are apart in a loop: tile `sum_tile` of the sum.
  template <bool DONE>
  static __device__ __forceinline__ void multiply_one(float (&acc)[ROWS][FIRST_TILES][4], float (&rest)[OPERANDS == 2 ? ROWS : 1][OPERANDS == 2 ? FIRST_TILES : 1][4], Ring& ring, int sum_tile) {
    const unsigned long long a = First::rows(ring.shared, ring.warp / 4 * ROWS) + First::tile_of_sum(sum_tile);
    multiply<Qkv, DONE>(acc, rest, ring, ring.stage, ring.round, a, true, First::SUM_TILES > 1 && sum_tile == First::SUM_TILES - 1);
  }

  // All of a column tile's steps. Where the ring goes round in them, each one's buffer is a constant.
  template <typename P, int TILES>
  static __device__ __forceinline__ void multiply_all(float (&acc)[ROWS][TILES][4], float (&rest)[OPERANDS == 2 ? ROWS : 1][OPERANDS == 2 ? TILES : 1][4], Ring& ring) {
    using Product = WarpgroupProduct<P>;
    constexpr bool FIRST = SAME<P, Qkv>, ROUND = Product::SUM_TILES % STAGES == 0 && STAGES % Product::TILES_OF_A == 0 && (FIRST || FIRST_STEPS % STAGES == 0);
    constexpr int TOGETHER = ROUND ? STAGES : Product::TILES_OF_A;
    const unsigned long long a = Product::rows(ring.shared + (FIRST ? 0 : C::ATTENDED), ring.warp / 4 * ROWS);
    const int round = ring.round;
    constexpr int LATE = EARLY_TILES * Product::TILES_OF_A;  // of the attention's result, the first step whose operand A comes last
    constexpr bool CLEAR = Product::SUM_TILES > TOGETHER;
    if constexpr (CLEAR{{ " && FIRST" if spec.out_bias }}) clear(acc);
    if constexpr (CLEAR && OPERANDS == 2) clear(rest);
#pragma unroll 1
    for (int turn = 0; turn < Product::SUM_TILES / TOGETHER; ++turn)
#pragma unroll
      for (int next = 0; next < TOGETHER; ++next) {
        if (C::SCRATCH && !FIRST && LATE > 0 && turn + next == 0) wait_for_bulk_copy(ring.shared + EARLY_BARRIER, 0);
        if (C::SCRATCH && !FIRST && turn * TOGETHER + next == LATE) wait_for_bulk_copy(ring.shared + LATE_BARRIER, 0);
        multiply<P, false>(acc, rest, ring, ROUND ? next : ring.stage, ROUND ? round + turn : ring.round, a + turn * Product::tile_of_sum(TOGETHER) + Product::tile_of_sum(next),
                           CLEAR || turn + next > 0, FIRST && Product::SUM_TILES > 1 && turn * TOGETHER + next == Product::SUM_TILES - 1);
      }
  }

  // Waits for all products, and adds up what they are in two parts.
  template <int TILES>
  static __device__ __forceinline__ void finish(float (&acc)[ROWS][TILES][4], float (&rest)[OPERANDS == 2 ? ROWS : 1][OPERANDS == 2 ? TILES : 1][4]) {
    wgmma_wait<0>();
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      keep_in_registers(acc[row]);
      if constexpr (OPERANDS == 2) {
        keep_in_registers(rest[row]);
#pragma unroll
        for (int j = 0; j < TILES; ++j)
#pragma unroll
          for (int c = 0; c < 4; ++c) acc[row][j][c] = fmaf(rest[row][j][c], 1.0f / Math::SCALE, acc[row][j][c]);
      }
    }
  }

  // The accumulators of a group of heads: queries into registers, in units of the exponent; keys and values of the block's row tiles, from `tile` on, into
  // shared memory.
  static __device__ __forceinline__ void hand_on(Softmax (&softmax)[GROUP], float (&acc)[ROWS][FIRST_TILES][4], {{ "const Element* __restrict__ qkv_bias, " if spec.qkv_bias }}float* keys, float* values, int tile, {{ "int head, " if spec.qkv_bias }}int lane) {
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
#pragma unroll
      for (int each = 0; each < GROUP; ++each) {
        float(&own)[3 * STEPS][4] = reinterpret_cast<float(&)[3 * STEPS][4]>(acc[row][each * 3 * STEPS]);
{% if spec.qkv_bias %}
#pragma unroll
        for (int j = 0; j < 3 * STEPS; ++j) {
          float bias[2] = {};
          const int channel = S::BY_WARPGROUPS && j >= STEPS ? lane % 4 * (2 * STEPS) + 2 * (j % STEPS) : 8 * (j % STEPS) + 2 * (lane % 4);
          load_channels<C::HEAD_DIM>(bias, qkv_bias + (j / STEPS * C::HEADS + head + each) * C::HEAD_DIM, channel);
#pragma unroll
          for (int c = 0; c < 4; ++c) own[j][c] += bias[c % 2];
        }
{% endif %}
#pragma unroll
        for (int j = 0; j < STEPS; ++j)
#pragma unroll
          for (int c = 0; c < 4; ++c) own[j][c] *= C::EXPONENT_SCALE;
        softmax[each].hold_query(row, own);
        if (tile + row < KEPT_TILES) Softmax::store_keys(keys + each * HEAD_WORDS, values + each * HEAD_WORDS, tile + row, lane, own);
      }
    if constexpr (S::BY_WARPGROUPS) fence_async_proxy();
  }

  // A head's result, to its place in `a`: operand A of the output product, which takes two fragments at once (`held` has the first of two), or scratch.
  static __device__ __forceinline__ void keep_result(const Softmax& softmax, float (&held)[ROWS][OPERANDS][4], float* a, int tile, int head, int lane) {
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
      softmax.result(row, [&](int step, const float(&quads)[OPERANDS][4]) {
        const int at = head * (STEPS / 2) + step;
#pragma unroll
        for (int which = 0; which < OPERANDS; ++which) {
          if constexpr (C::SCRATCH) {
            Second::store_fragment(a, which, 16 * position(tile + row), at, lane, quads[which]);
          } else {
            if (at % 2 == 1) {
              const float both[2][4] = {% raw %}{{held[row][which][0], held[row][which][1], held[row][which][2], held[row][which][3]}, {quads[which][0], quads[which][1], quads[which][2], quads[which][3]}}{% endraw %};
              Second::store_fragments(a, which, 16 * position(tile + row), at / 2, lane, both);
            }
#pragma unroll
            for (int word = 0; word < 4; ++word) held[row][which][word] = quads[which][word];
          }
        }
      });
  }

  // What is left of operand A of the output product behind the result: a last fragment, and zeros.
  static __device__ __forceinline__ void fill(const float (&held)[ROWS][OPERANDS][4], float* a, int tile, int lane) {
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
#pragma unroll
      for (int which = 0; which < OPERANDS; ++which) {
        const int first_row = 16 * position(tile + row);
        float last[2][4] = {};
        if constexpr (C::SCRATCH) {
#pragma unroll
          for (int at = C::INNER / 16; at < Out::SUM / 16; ++at) Second::store_fragment(a, which, first_row, at, lane, last[1]);
        } else {
#pragma unroll
          for (int pair = C::INNER / 32; pair < Out::SUM / 32; ++pair) {
#pragma unroll
            for (int word = 0; word < 4; ++word) last[0][word] = C::INNER % 32 != 0 && pair == C::INNER / 32 ? held[row][which][word] : 0.0f;
            Second::store_fragments(a, which, first_row, pair, lane, last);
          }
        }
      }
  }

  // One thread starts the copies of tiles FIRST to END of the attention's result, which have come to scratch and are behind a fence of each thread.
  template <int FIRST, int END>
  static __device__ __forceinline__ void copy_result(float* shared, const float* result, int arrival) {
    float* const barrier = shared + arrival;
#pragma unroll
    for (int which = 0; which < OPERANDS; ++which) {
      const int at = which * Second::A_OPERAND + FIRST * Second::A_TILE, words = (END - FIRST) * Second::A_TILE;
      if (which < OPERANDS - 1)
        add_bulk_copy(shared + at, result + at, 4 * words, barrier);
      else
        start_bulk_copy(shared + at, result + at, 4 * words, barrier);
    }
  }

  static __device__ __forceinline__ void run({{ (["const Element* x"] + norms | declared + ["const float* packed_qkv"] + qkv_bias | declared + ["float* attended", "Element* y", "const float* packed_out"] + out_bias | declared + spec.terms | declared) | join(", ") }}, int row_tiles, float* shared) {
    const int lane = threadIdx.x % 32, tile = threadIdx.x / 32 * ROWS, first_tile = static_cast<int>(blockIdx.x) * BLOCK_TILES;
    const int end = min(row_tiles - first_tile, BLOCK_TILES);  // of the block's row tiles
    Ring ring{shared, packed_qkv, packed_out, __shfl_sync(ALL_LANES, static_cast<int>(threadIdx.x) / 32, 0), 0, 0, 0, 0, 0};  // by a shuffle: the compiler then knows that lanes agree
    if (threadIdx.x == 0) {
      for (int barrier = 0; barrier < STAGES + (C::SCRATCH ? 2 : 0); ++barrier) init_barrier(shared + C::BARRIERS + 2 * barrier);
      publish_barriers();
      wait_for_previous_kernel();  // the weights are packed; the barrier below has all threads behind this
    }
    ring.refill(0);
{% if spec.out_bias %}
    // The output's bias goes to shared memory, where nobody waits long for it ahead of that product.
    constexpr int BIAS_WORDS = ceil_div(C::DIM, PER_WORD), BIAS_TURNS = ceil_div(BIAS_WORDS, Qkv::THREADS);
    const Element* const bias = reinterpret_cast<const Element*>(shared + C::BIAS);
    Word bias_words[BIAS_TURNS][1] = {};
#pragma unroll
    for (int turn = 0; turn < BIAS_TURNS; ++turn) {
      const int at = (threadIdx.x + turn * Qkv::THREADS) * PER_WORD;
      load_some<false>(bias_words[turn], out_bias + at, true, at, C::DIM);
    }
{% endif %}
    normalise_by_groups<C>({{ (["x"] + norms | list) | join(", ") }}, first_tile, first_tile + end,
                           [&](int row_tile, int row, int channel, const float(&values)[CHUNK]) { First::store_row(shared, 16 * position(row_tile) + row, channel, values); });
{% if spec.out_bias %}
#pragma unroll
    for (int turn = 0; turn < BIAS_TURNS; ++turn)
      if (const int at = threadIdx.x + turn * Qkv::THREADS; at < BIAS_WORDS) store(shared + C::BIAS + at, bias_words[turn]);
{% endif %}
    fence_async_proxy();
    __syncthreads();  // operand A and the barriers are there for all

    float *const keys = shared + C::KEYS, *const values = shared + C::VALUES;
    // A warp without tokens takes part in all: its first key is another warp's, and it writes nothing to y.
    const int first_key = min(tile, BLOCK_TILES - 1) / C::TILES * C::TILES * C::ROW_TILE;
    float* const result = C::SCRATCH ? attended + static_cast<long long>(blockIdx.x) * RESULT : shared + C::ATTENDED;
    float held[ROWS][OPERANDS][4] = {};
    Softmax softmax[GROUP];
    OutputTiles<C, SECOND_TILES{{ ", true" if spec.out_bias }}> tiles[ROWS];
{% if spec.residual %}
    const auto read_residual = [&](int column) {
#pragma unroll
      for (int row = 0; row < ROWS; ++row) tiles[row].before(x, first_tile + tile + row, first_tile + end, column, lane);
    };
    constexpr bool AHEAD = C::HEADS == GROUP;  // of attention: sums of other heads need no registers then
{% endif %}
    {
      float beside[ROWS][FIRST_TILES][4], rests_beside[OPERANDS == 2 ? ROWS : 1][OPERANDS == 2 ? FIRST_TILES : 1][4];  // sums of the next heads
#pragma unroll 1
      for (int head = 0; head < C::HEADS; head += GROUP) {
        float sums[ROWS][FIRST_TILES][4], rests[OPERANDS == 2 ? ROWS : 1][OPERANDS == 2 ? FIRST_TILES : 1][4];  // of these alone, so that attention has their registers
        auto& acc = C::OVERLAP ? beside : sums;
        auto& rest = C::OVERLAP ? rests_beside : rests;
        if (!C::OVERLAP || head == 0) multiply_all<Qkv>(acc, rest, ring);
        finish(acc, rest);
        if (C::OVERLAP && head > 0) __syncthreads();  // no warp reads keys or values of the heads before
        hand_on(softmax, acc, {{ "qkv_bias, " if spec.qkv_bias }}keys, values, tile, {{ "head, " if spec.qkv_bias }}lane);
        if constexpr (C::OVERLAP) clear(beside);
        if constexpr (C::OVERLAP && OPERANDS == 2) clear(rests_beside);
{% if spec.residual %}
        if constexpr (AHEAD) read_residual(0);
{% endif %}
        const bool early = EARLY_TILES > 0 && head == C::HEADS - GROUP;  // no more products read the tokens
        if (early) fence_async_proxy_global();
        __syncthreads();  // keys and values are there for all
        ring.refill(ring.step);
        if (early && threadIdx.x == 0) copy_result<0, EARLY_TILES>(shared, result, EARLY_BARRIER);
        int next = 0;  // tile of the sum of the next heads
#pragma unroll
        for (int each = 0; each < GROUP; ++each) {
          // Beside a tile of keys, behind its scores, so that these do not wait for the matrix unit.
          const auto multiply_next = [&](int key_step) {
            if constexpr (C::OVERLAP) {
              constexpr int ALL_KEY_STEPS = GROUP * KEY_STEPS;
              const int until = head + GROUP < C::HEADS ? ceil_div((each * KEY_STEPS + key_step + 1) * First::SUM_TILES, ALL_KEY_STEPS) : 0;
              if (next >= until) return;
              multiply_one<S::BY_WARPGROUPS>(acc, rest, ring, next++);
              if constexpr (First::SUM_TILES > ALL_KEY_STEPS) {
#pragma unroll 1
                for (; next < until; ++next) multiply_one<false>(acc, rest, ring, next);
              }
            }
          };
          softmax[each].begin();
{% if spec.terms %}
          softmax[each].run(keys + each * HEAD_WORDS + first_key, values + each * HEAD_WORDS + first_key, lane, multiply_next, {{ "key_mask, (first_tile + min(tile, end - 1)) / C::TILES" if spec.key_mask }}{{ ", " if spec.key_mask and spec.logit_bias }}{{ "logit_bias, head + each, tile % C::TILES" if spec.logit_bias }});
{% else %}
          softmax[each].run(keys + each * HEAD_WORDS + first_key, values + each * HEAD_WORDS + first_key, lane, multiply_next);
{% endif %}
          keep_result(softmax[each], held, result, tile, head + each, lane);
        }
      }
      wgmma_wait<0>();  // there are none: this tells the compiler
    }

    fill(held, result, tile, lane);
    if (C::SCRATCH) fence_async_proxy_global();
    else fence_async_proxy();
    __syncthreads();
    if (C::SCRATCH && threadIdx.x == 0) copy_result<EARLY_TILES, Out::SUM / 64>(shared, result, LATE_BARRIER);
#pragma unroll 1
    for (int turn = 0; turn < Second::COLUMN_TILES; ++turn) {
      const int column = turn * Out::COLUMNS;
      float acc[ROWS][SECOND_TILES][4], rest[OPERANDS == 2 ? ROWS : 1][OPERANDS == 2 ? SECOND_TILES : 1][4];
{% if spec.out_bias %}
#pragma unroll
      for (int row = 0; row < ROWS; ++row) {
        tiles[row].begin(acc[row], bias, column, lane);
        keep_in_registers(acc[row]);
      }
{% if spec.residual %}
      __syncwarp();  // the residual's loads, behind which the bias would wait its turn, stay behind it
{% endif %}
{% endif %}
{% if spec.residual %}
      if (!AHEAD || turn > 0) read_residual(column);
{% endif %}
      multiply_all<Out>(acc, rest, ring);
      finish(acc, rest);
#pragma unroll
      for (int row = 0; row < ROWS; ++row)
        tiles[row].after({{ out_arguments | join(", ") }}, {{ "nullptr, " if spec.out_bias }}first_tile + tile + row, first_tile + end, column, lane, acc[row]);
    }
  }
};
