// The tiled product on Hopper's matrix unit. P states it: a block has ROW_TILES * 16 rows, four of these tiles a warpgroup, and turns over
// column tiles of COLUMNS, of which the PARTS blocks that share rows take every PARTS-th; the sum goes in tiles of SUM_TILE, one swizzled
// row of 64 indices. Operand A stays in shared memory for all of the sum, in the order [rounded, rest][tile of the sum][row]. The weights
// come as kernel 0 has packed them: what a step needs is one piece, brought into one of STAGES buffers by one bulk copy.
{% if streaming %}
// Where operand A is STREAMED, it comes likewise, ahead of the weights in the buffer: of each 64 rows one piece, in the order [rounded, rest][row].
{% endif %}
template <typename Math>
struct HalfFormat;
template <typename F, int N>
struct HalfFormat<HalfCore<F, N>> {
  using Format = F;
  static constexpr int OPERANDS = N;  // 1, or 2 with the rests
};

template <typename P>
struct WarpgroupProduct {
  using Math = typename P::Math;
  using Format = typename HalfFormat<Math>::Format;
  static constexpr int OPERANDS = HalfFormat<Math>::OPERANDS, TILES = P::WARP_COLUMN_TILES, ROWS = 16 * P::ROW_TILES;
  static constexpr int SUM_TILES = P::SUM / P::SUM_TILE, COLUMN_TILES = ceil_div(P::ALL_COLUMNS, P::COLUMNS);
  static constexpr int ROW = P::SUM_TILE / 2, B_OPERAND = P::COLUMNS * ROW;  // words of a row of a buffer, of an operand in it
  static constexpr int A_INDICES = 2 * SWIZZLED_ROW, A_TILE = ROWS * SWIZZLED_ROW, A_OPERAND = {{ "P::STREAMED ? 64 * SWIZZLED_ROW : " if streaming }}P::SUM / A_INDICES * A_TILE;

  // N neighbouring indices from `index` on of a row, into operand A.
  template <int N>
  static __device__ __forceinline__ void store_row(float* a, int row, int index, const float (&values)[N]) {
    unsigned words[OPERANDS][N / 2];
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const typename Math::Words split = Math::split(values[i], values[i + 1]);
#pragma unroll
      for (int which = 0; which < OPERANDS; ++which) words[which][i / 2] = split.part[which];
    }
#pragma unroll
    for (int which = 0; which < OPERANDS; ++which) store(a + which * A_OPERAND + index / A_INDICES * A_TILE + swizzled(row, index % A_INDICES), words[which]);
  }

  // Operand A's 64 rows number `rows`, ROWS_OF_A from the 64 before; what tile `sum_tile` of the sum adds to that, and tiles in a swizzled row.
  static constexpr int ROWS_OF_A = 64 * SWIZZLED_ROW / 4, TILES_OF_A = A_INDICES / P::SUM_TILE;
  static __device__ __forceinline__ unsigned long long rows(const float* a, int rows) { return matrix_descriptor(a) + rows * ROWS_OF_A; }
  static __device__ __forceinline__ int tile_of_sum(int sum_tile) { return sum_tile / TILES_OF_A * (A_TILE / 4) + sum_tile % TILES_OF_A * (P::SUM_TILE / 8); }

  // Two neighbouring fragments of 16 rows from `row` on, numbers 2 `pair` and 2 `pair` + 1 in the sum, into operand A: a lane has words (g, k), (g+8, k),
  // (g, k+8), (g+8, k+8) of each. A chunk is a row's four words of a lane, and the chunks of two pairs alternate: rows g and g+1, whose stores
  // go together, then have different banks. So a tile of the sum has its indices in another order, which the weights are packed in as well.
  static __device__ __forceinline__ void store_fragments(float* a, int which, int row, int pair, int lane, const float (&quads)[2][4]) {
    float* to = a + which * A_OPERAND + pair / 2 * A_TILE;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float chunk[4] = {quads[0][half], quads[0][2 + half], quads[1][half], quads[1][2 + half]};
      store(to + swizzled(row + 8 * half + lane / 4, 8 * (2 * (lane % 4) + pair % 2)), chunk);
    }
  }

{% if resident %}
  // Fragment `page` of the sum alone, to scratch from which operand A is copied as it is: a lane has words (g, k), (g+8, k), (g, k+8), (g+8, k+8). Four
  // lanes write 32 bytes of a row, so that a tile of the sum has its indices in another order, which the weights are packed in as well.
  static __device__ __forceinline__ void store_fragment(float* a, int which, int row, int page, int lane, const float (&quads)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float words[2] = {quads[half], quads[2 + half]};
      store_global(a + which * A_OPERAND + page / 4 * A_TILE + swizzled(row + 8 * half + lane / 4, page % 4 * 16 + lane % 4 * 4), words);
    }
  }

{% endif %}
{% if streaming %}
  // What is streamed of a tile of the sum, in scratch [64 rows][tile of the sum] and in a buffer [64 rows]: PIECE words of 64 rows.
  static constexpr int PIECE = OPERANDS * 64 * SWIZZLED_ROW, STREAMED_ROWS = P::STREAMED ? ROWS / 64 * PIECE : 0, STEP = STREAMED_ROWS + P::B_TILE;
  static __device__ __forceinline__ long long piece(int row_tile, int sum_tile) { return (static_cast<long long>(row_tile / 4) * SUM_TILES + sum_tile) * PIECE; }

  // store_row for row `row` of row tile `row_tile`, to where it is streamed from.
  template <int N>
  static __device__ __forceinline__ void store_streamed_row(float* a, int row_tile, int row, int index, const float (&values)[N]) {
    store_row(a + piece(row_tile, index / A_INDICES), row_tile % 4 * 16 + row, index % A_INDICES, values);
  }

  // Fragment `page` of a row tile, of 16 rows and 16 indices, to there: a lane has words (g, k), (g+8, k), (g, k+8), (g+8, k+8). Four lanes write 32 bytes
  // of a row, so that a tile of the sum has its indices in another order, which the weights are packed in as well.
  static __device__ __forceinline__ void store_streamed_fragment(float* a, int row_tile, int page, int lane, const float (&quads)[OPERANDS][4]) {
#pragma unroll
    for (int which = 0; which < OPERANDS; ++which)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float words[2] = {quads[which][half], quads[which][2 + half]};
        store(a + piece(row_tile, page / 4) + which * A_OPERAND + swizzled(row_tile % 4 * 16 + 8 * half + lane / 4, page % 4 * 16 + lane % 4 * 4), words);
      }
  }

  static __device__ __forceinline__ void start(float* shared, const float* streamed_rows, const float* packed, int step, int part) {
    const int stage = step % P::STAGES, sum_tile = step % SUM_TILES, tile = (part + step / SUM_TILES * P::PARTS) * SUM_TILES + sum_tile;
    float *to = shared + P::BUFFERS + stage * STEP, *barrier = shared + P::BARRIERS + 2 * stage;
    if constexpr (P::STREAMED) {
#pragma unroll
      for (int group = 0; group < ROWS / 64; ++group) add_bulk_copy(to + group * PIECE, streamed_rows + piece(4 * group, sum_tile), 4 * PIECE, barrier);
    }
    start_bulk_copy(to + STREAMED_ROWS, packed + static_cast<long long>(tile) * P::B_TILE, 4 * P::B_TILE, barrier);
  }

{% else %}
  static __device__ __forceinline__ void start(float* shared, const float* packed, int step, int part) {
    const int stage = step % P::STAGES, tile = (part + step / SUM_TILES * P::PARTS) * SUM_TILES + step % SUM_TILES;
    start_bulk_copy(shared + P::BUFFERS + stage * P::B_TILE, packed + static_cast<long long>(tile) * P::B_TILE, 4 * P::B_TILE, shared + P::BARRIERS + 2 * stage);
  }

{% endif %}
{% if long_sums %}
  // Waits for the sums, and adds that of the rests.
  static __device__ __forceinline__ void finish(float (&acc)[TILES][4], float (&rest)[OPERANDS == 2 ? TILES : 1][4]) {
    wgmma_wait<0>();
    keep_in_registers(acc);
    if constexpr (OPERANDS == 2) {
      keep_in_registers(rest);
#pragma unroll
      for (int j = 0; j < TILES; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c) acc[j][c] = fmaf(rest[j][c], 1.0f / Math::SCALE, acc[j][c]);
    }
  }

  // Tensor cores truncate what they have added up: a long sum begins anew after SETTLED tiles, and what it was is added, rounded.
  static constexpr int SETTLED = P::SETTLED > 0 ? P::SETTLED : SUM_TILES;

{% endif %}
  // {{ "streamed_rows: where the block's rows are streamed from, if they are; else " if streaming }}fill(a) writes operand A; store(row_tile, column, acc) takes a warp's result: its row tile, the first of its columns, for which before(row_tile,
  // column) is called ahead of the products.
  template <typename Fill, typename Before, typename Store>
  static __device__ __forceinline__ void run(float* shared, {{ "const float* streamed_rows, " if streaming }}const float* packed, int part, Fill fill, Before before, Store store_result) {
    const int row_tile = threadIdx.x / 32, warpgroup = row_tile / 4;
    const int turns = (COLUMN_TILES - part + P::PARTS - 1) / P::PARTS, steps = turns * SUM_TILES;
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < P::STAGES; ++stage) init_barrier(shared + P::BARRIERS + 2 * stage);
      publish_barriers();
      for (int step = 0; step < min(P::STAGES, steps); ++step) start(shared, {{ "streamed_rows, " if streaming }}packed, step, part);
    }
    fill(shared);
    fence_async_proxy();
    __syncthreads();  // operand A and the barriers are there for all
    int step = 0, stage = 0, round = 0;  // stage: the step's buffer; round: how often it has been used before
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
      const int column = (part + turn * P::PARTS) * P::COLUMNS;
      before(row_tile, column);
      float acc[TILES][4], rest[OPERANDS == 2 ? TILES : 1][4];  // the first products set them
{% if long_sums %}
      float settled[P::SETTLED ? TILES : 1][4] = {};  // what the sums were before they began anew
{% endif %}
#pragma unroll 1
      for (int sum_tile = 0; sum_tile < SUM_TILES; ++sum_tile, ++step) {
{% if streaming %}
        const float* const buffer = shared + P::BUFFERS + stage * STEP;
        const unsigned long long a = P::STREAMED ? rows(buffer, warpgroup * OPERANDS) : rows(shared, warpgroup) + tile_of_sum(sum_tile);
        const unsigned long long b = matrix_descriptor<ROW>(buffer + STREAMED_ROWS);
{% else %}
        const unsigned long long a = rows(shared, warpgroup) + tile_of_sum(sum_tile), b = matrix_descriptor<ROW>(shared + P::BUFFERS + stage * P::B_TILE);
{% endif %}
        wait_for_bulk_copy(shared + P::BARRIERS + 2 * stage, round % 2);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < P::SUM_TILE / 16; ++k) {
          const bool accumulate = {{ "sum_tile % SETTLED" if long_sums else "sum_tile" }} > 0 || k > 0;
          if constexpr (OPERANDS == 2) {
            wgmma(Format{}, rest, a + A_OPERAND / 4 + 2 * k, b + 2 * k, accumulate);
            wgmma(Format{}, rest, a + 2 * k, b + B_OPERAND / 4 + 2 * k, true);
          }
          wgmma(Format{}, acc, a + 2 * k, b + 2 * k, accumulate);
        }
        wgmma_commit();
        wgmma_wait<1>();
        __syncthreads();  // the step before is done for all, and its buffer is free
        if (threadIdx.x == 0 && step > 0 && step - 1 + P::STAGES < steps) start(shared, {{ "streamed_rows, " if streaming }}packed, step - 1 + P::STAGES, part);
        if (++stage == P::STAGES) stage = 0, ++round;
{% if long_sums %}
        if constexpr (P::SETTLED > 0) {
          if ((sum_tile + 1) % SETTLED == 0 && sum_tile + 1 < SUM_TILES) {
            finish(acc, rest);
#pragma unroll
            for (int j = 0; j < TILES; ++j)
#pragma unroll
              for (int c = 0; c < 4; ++c) settled[j][c] += acc[j][c];
          }
        }
{% endif %}
      }
{% if long_sums %}
      finish(acc, rest);
      if constexpr (P::SETTLED > 0) {
#pragma unroll
        for (int j = 0; j < TILES; ++j)
#pragma unroll
          for (int c = 0; c < 4; ++c) acc[j][c] += settled[j][c];
      }
{% else %}
      wgmma_wait<0>();
      keep_in_registers(acc);
      if constexpr (OPERANDS == 2) {
        keep_in_registers(rest);
#pragma unroll
        for (int j = 0; j < TILES; ++j)
#pragma unroll
          for (int c = 0; c < 4; ++c) acc[j][c] = fmaf(rest[j][c], 1.0f / Math::SCALE, acc[j][c]);
      }
{% endif %}
      store_result(row_tile, column, acc);
    }
  }

  // Kernel 0: eight neighbouring weights of a column, number `chunk` of them all, to where a bulk copy takes them from: tiles of the columns
  // and in them of the sum, each as a buffer holds it. Weights are split here, once for all blocks.
  static __device__ __forceinline__ void pack(const Element* __restrict__ weight, float* packed, int chunk) {
    constexpr int CHUNKS = P::SUM_TILE / 8;  // of a row
    const int k = chunk % CHUNKS * 8, column = chunk / CHUNKS % P::COLUMNS, tile = chunk / CHUNKS / P::COLUMNS;
    const int row = tile / SUM_TILES * P::COLUMNS + result_column<P::RUN>(column), index = tile % SUM_TILES * P::SUM_TILE + k;
    float values[8] = {};
    constexpr int N = P::COPY;
#pragma unroll
    for (int i = 0; i < 8; i += N) {
      const Element* from = P::weight(weight, row, index + i);
      if (from == nullptr) continue;
      if constexpr (N >= PER_WORD) {
        load(reinterpret_cast<float(&)[N]>(values[i]), from);
      } else {
        float two[2] = {};
        load_some<true>(two, from, true, 0, 1);
        values[i] = two[0];
      }
    }
    float* to = packed + static_cast<long long>(tile) * P::B_TILE + swizzled<ROW>(column, k);
    unsigned words[OPERANDS][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const typename Math::Words split = Math::split(values[2 * i], values[2 * i + 1]);
#pragma unroll
      for (int which = 0; which < OPERANDS; ++which) words[which][i] = split.part[which];
    }
#pragma unroll
    for (int which = 0; which < OPERANDS; ++which) store(to + which * B_OPERAND, words[which]);
  }
};
