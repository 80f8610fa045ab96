// A tiled product of rows with weights. P states it: a block has ROW_TILES * 16 rows and turns over column tiles of COLUMNS, of which the
// PARTS blocks that share rows take every PARTS-th; the sum goes in tiles of SUM_TILE. Operand A stays in shared memory for all of the
// sum, as fragments in the order [tile of the sum][row tile][page]. The weights stream through STAGES buffers by asynchronous copies,
// across column tiles without a break. A buffer is planes of PLANE neighbouring indices of the sum, the row of each column
// COLUMN_STRIDE words from the one before, so that neither copies nor operand loads have bank conflicts. Weights are there as they are in
// memory, but in an order of columns in which a lane accumulates RUN neighbours.
template <typename P>
struct TiledProduct {
  using Math = typename P::Math;
  static constexpr int F = P::FRAGMENT, PLANE = 4 * F, WARP_COLUMNS = 8 * P::WARP_COLUMN_TILES;
  static constexpr int SUM_TILES = P::SUM / P::SUM_TILE, COLUMN_TILES = ceil_div(P::ALL_COLUMNS, P::COLUMNS);

  // A tile of the weights into a buffer. P::weight(weight, column, k) is where that column's weights from index k on lie, or null for zeros.
  // Elements whose rows start within a word cannot be copied asynchronously, and are not: the barrier that frees the buffer comes before
  // them, and another before its operands are read.
  static __device__ __forceinline__ void copy_weights(float* to, const Element* __restrict__ weight, int column_tile, int sum_tile) {
    constexpr int V = P::COPY < PER_WORD ? PER_WORD : P::COPY, ACROSS = P::SUM_TILE / V, COPIES = P::COLUMNS * ACROSS;
#pragma unroll 4
    for (int turn = 0; turn < ceil_div(COPIES, P::THREADS); ++turn) {
      const int copy = threadIdx.x + turn * P::THREADS, column = copy / ACROSS, k = copy % ACROSS * V;
      if (COPIES % P::THREADS != 0 && copy >= COPIES) break;
      const int row = column_tile * P::COLUMNS + result_column<P::RUN>(column), index = sum_tile * P::SUM_TILE + k;
      const Element* from = P::weight(weight, row, index);
      float* at = to + k / PLANE * P::PLANE_STRIDE + column * P::COLUMN_STRIDE + k % PLANE / PER_WORD;
      if constexpr (P::COPY < PER_WORD) {
        Word word[1] = {};
        load_some<true>(word, from, from != nullptr, 0, P::weight(weight, row, index + 1) ? 2 : 1);
        store(at, word);
      } else {
        copy_async<4 * V / PER_WORD>(at, reinterpret_cast<const float*>(from ? from : weight), from != nullptr);
      }
    }
  }

  // Starts the copies of one step: prepare(sum_tile) adds those of operand A.
  template <typename Prepare>
  static __device__ __forceinline__ void start(float* buffers, const Element* __restrict__ weight, int step, int steps, int part, Prepare prepare) {
    if (step < steps) {
      if (step < SUM_TILES) prepare(step);
      copy_weights(buffers + step % P::STAGES * P::B_TILE, weight, part + step / SUM_TILES * P::PARTS, step % SUM_TILES);
    }
    commit_copies();
  }

{% if long_sums %}
  static __device__ __forceinline__ void add(float (&to)[P::WARP_ROW_TILES][P::WARP_COLUMN_TILES][4], const float (&from)[P::WARP_ROW_TILES][P::WARP_COLUMN_TILES][4]) {
#pragma unroll
    for (int i = 0; i < P::WARP_ROW_TILES; ++i)
#pragma unroll
      for (int j = 0; j < P::WARP_COLUMN_TILES; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c) to[i][j][c] += from[i][j][c];
  }

{% endif %}
  // prepare(sum_tile) starts the copies of a tile of operand A (once each); fill() writes what is not copied; store(row_tile, column, acc)
  // takes a warp's result: the first of its row tiles and of its columns.
  template <typename Prepare, typename Fill, typename Store>
  static __device__ __forceinline__ void run(float* a, float* buffers, const Element* __restrict__ weight, int part, Prepare prepare, Fill fill, Store store_result) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first_row_tile = warp / P::WARPS_ACROSS * P::WARP_ROW_TILES, first_column = warp % P::WARPS_ACROSS * WARP_COLUMNS;
    const int turns = (COLUMN_TILES - part + P::PARTS - 1) / P::PARTS, steps = turns * SUM_TILES;
#pragma unroll
    for (int step = 0; step < P::STAGES - 1; ++step) start(buffers, weight, step, steps, part, prepare);
    fill();
    int step = 0;
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
      float acc[P::WARP_ROW_TILES][P::WARP_COLUMN_TILES][4] = {};
      typename Math::template Sums<P::WARP_ROW_TILES, P::WARP_COLUMN_TILES> sums;
{% if long_sums %}
      // Tensor cores truncate what they have added up: a long sum begins anew after SETTLED tiles, and what it was is added, rounded.
      float settled[P::SETTLED > 0 ? P::WARP_ROW_TILES : 1][P::WARP_COLUMN_TILES][4] = {};
{% endif %}
#pragma unroll 1
      for (int sum_tile = 0; sum_tile < SUM_TILES; ++sum_tile, ++step) {
        wait_for_copies<P::STAGES - 2>();
        __syncthreads();  // the step's operands are there for all, and the buffer of the step before is free
        start(buffers, weight, step + P::STAGES - 1, steps, part, prepare);
        const float* b = buffers + step % P::STAGES * P::B_TILE + first_column * P::COLUMN_STRIDE;
        const auto load_b = [&](int tile, int column, int k, Word(&to)[F / PER_WORD]) {
          load(to, b + k / PLANE * P::PLANE_STRIDE + (8 * tile + column) * P::COLUMN_STRIDE + k % PLANE / PER_WORD);
        };
        Math::template add_product<P::SUM_TILE, F, P::PAGE>(acc, sums, a + sum_tile * P::A_TILE + first_row_tile * P::PAGES * P::PAGE, lane,
                                                            [&](int j, int at) { return Math::pack(Math::template read<F>(j, at, lane, load_b)); });
{% if long_sums %}
        if constexpr (P::SETTLED > 0) {
          if ((sum_tile + 1) % P::SETTLED == 0) {
            sums.add_to(acc);
            sums = {};
            add(settled, acc);
#pragma unroll
            for (int i = 0; i < P::WARP_ROW_TILES; ++i)
#pragma unroll
              for (int j = 0; j < P::WARP_COLUMN_TILES; ++j)
#pragma unroll
                for (int c = 0; c < 4; ++c) acc[i][j][c] = 0.0f;
          }
        }
{% endif %}
      }
      sums.add_to(acc);
{% if long_sums %}
      if constexpr (P::SETTLED > 0) add(acc, settled);
{% endif %}
      store_result(first_row_tile, (part + turn * P::PARTS) * P::COLUMNS + first_column, acc);
    }
  }
};
