{% set norms = spec.pre_norm_parameters %}
{% set qkv_bias = ["qkv_bias"] if spec.qkv_bias else [] %}
{% set out_arguments = (["x"] if spec.residual else []) + ["y"] %}
{% set out_bias = ["out_bias"] if spec.out_bias else [] %}
// A whole axis in one kernel, by warpgroups. A block has SEQUENCES sequences, of which a warp has ROWS row tiles: their normalised tokens stay in
// shared memory as operand A of the QKV product, which is computed a head at a time. A head's queries stay in their warp's registers, its
// keys and values lie in shared memory for the warps of the sequence, and its result goes to scratch, from where the warp that has written
// it takes it, when there are no more heads, as operand A of the output product.
//
// The weights of both products, packed by kernel 0, stream through one ring of STAGES buffers: a step is a tile of the sum of one head, or of one column tile
// of the output. With OVERLAP the steps of the next head are spread over the tiles of keys of a head, so that the matrix unit multiplies
// while the warps compute exponentials.
template <typename C>
struct Resident {
  using Math = typename C::Math;
  using Qkv = typename C::Qkv;
  using Out = typename C::Out;
  using First = WarpgroupProduct<Qkv>;
  using Second = WarpgroupProduct<Out>;
  using S = typename C::Streamed;
  using Softmax = StreamedSoftmax<C>;
  using Format = typename First::Format;
  static constexpr int OPERANDS = First::OPERANDS, ROWS = S::ROWS, STEPS = C::PADDED_HEAD_DIM / 8, KEY_STEPS = Softmax::KEY_STEPS;
  static constexpr int STAGES = Qkv::STAGES, FIRST_STEPS = C::HEADS * First::SUM_TILES, ALL_STEPS = FIRST_STEPS + Second::COLUMN_TILES * Second::SUM_TILES;
  static constexpr int BLOCK_TILES = C::SEQUENCES * C::TILES;  // row tiles of the block that may be real
  static constexpr int PAGES = C::INNER / 16 * OPERANDS;  // of the attention's result in a row tile
  static constexpr int FIRST_TILES = Qkv::WARP_COLUMN_TILES, SECOND_TILES = Out::WARP_COLUMN_TILES;

  // Where row tile `tile` of the block lies in operand A: a warpgroup has 64 rows of each of ROWS products, of which warp w has rows 16 w and on.
  static __device__ __forceinline__ int position(int tile) {
    const int warp = tile / ROWS;
    return (warp / 4 * ROWS + tile % ROWS) * 4 + warp % 4;
  }

  static __device__ __forceinline__ void start(float* shared, const float* packed_qkv, const float* packed_out, int step) {
    const int stage = step % STAGES;
    const bool first = step < FIRST_STEPS;
    const float* from = first ? packed_qkv + static_cast<long long>(step) * Qkv::B_TILE : packed_out + static_cast<long long>(step - FIRST_STEPS) * Out::B_TILE;
    start_bulk_copy(shared + C::RING + stage * C::RING_TILE, from, 4 * (first ? Qkv::B_TILE : Out::B_TILE), shared + C::BARRIERS + 2 * stage);
  }

  // Step `step` of the ring, with tile `sum_tile` of the sum of product P: starts it, waits until the step before is done for all, and has the buffer
  // of that filled again.
  template <typename P, int TILES>
  static __device__ __forceinline__ void multiply(float (&acc)[ROWS][TILES][4], float (&rest)[OPERANDS == 2 ? ROWS : 1][OPERANDS == 2 ? TILES : 1][4], float* shared, const float* packed_qkv,
                                                  const float* packed_out, int step, int sum_tile) {
    using Product = WarpgroupProduct<P>;
    const int stage = step % STAGES, warpgroup = threadIdx.x / 128;
    const unsigned long long b = matrix_descriptor(shared + C::RING + stage * C::RING_TILE);
    wait_for_bulk_copy(shared + C::BARRIERS + 2 * stage, step / STAGES % 2);
    wgmma_fence();
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      const unsigned long long a = matrix_descriptor(shared + sum_tile * Product::A_TILE + (warpgroup * ROWS + row) * (64 * SWIZZLED_ROW));
#pragma unroll
      for (int k = 0; k < P::SUM_TILE / 16; ++k) {
        const bool accumulate = sum_tile > 0 || k > 0;
        if constexpr (OPERANDS == 2) {
          wgmma(Format{}, rest[row], a + Product::A_OPERAND / 4 + 2 * k, b + 2 * k, accumulate);
          wgmma(Format{}, rest[row], a + 2 * k, b + Product::B_OPERAND / 4 + 2 * k, true);
        }
        wgmma(Format{}, acc[row], a + 2 * k, b + 2 * k, accumulate);
      }
    }
    wgmma_commit();
    wgmma_wait<1>();
    __syncthreads();  // the step before is done for all, and its buffer is free
    if (threadIdx.x == 0 && step > 0 && step - 1 + STAGES < ALL_STEPS) start(shared, packed_qkv, packed_out, step - 1 + STAGES);
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

  // A head's accumulators: queries into registers, in units of the exponent; keys and values of the block's row tiles, from `tile` on, into shared memory.
  static __device__ __forceinline__ void hand_on(Softmax& softmax, float (&acc)[ROWS][FIRST_TILES][4], {{ "const Element* __restrict__ qkv_bias, " if spec.qkv_bias }}float* keys, float* values, int tile, int head, int lane) {
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
{% if spec.qkv_bias %}
#pragma unroll
      for (int j = 0; j < FIRST_TILES; ++j) {
        float bias[2] = {};
        load_channels<C::HEAD_DIM>(bias, qkv_bias + (j / STEPS * C::HEADS + head) * C::HEAD_DIM, 8 * (j % STEPS) + 2 * (lane % 4));
#pragma unroll
        for (int c = 0; c < 4; ++c) acc[row][j][c] += bias[c % 2];
      }
{% endif %}
#pragma unroll
      for (int j = 0; j < STEPS; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c) acc[row][j][c] *= C::EXPONENT_SCALE;
      softmax.queries[row].hold(acc[row]);
      if (BLOCK_TILES < Qkv::ROW_TILES && tile + row >= BLOCK_TILES) continue;
#pragma unroll
      for (int j = 0; j < STEPS; j += 2) {
        Math::template store_key<STEPS>(keys, tile + row, j, lane, reinterpret_cast<const float(&)[2][4]>(acc[row][STEPS + j]));
        Math::template store_value<STEPS, C::PADDED_HEAD_DIM>(values, tile + row, j, lane, reinterpret_cast<const float(&)[2][4]>(acc[row][2 * STEPS + j]));
      }
    }
  }

  static __device__ __forceinline__ void run({{ (["const Element* x"] + norms | declared + ["const float* packed_qkv"] + qkv_bias | declared + ["float* attended", "Element* y", "const float* packed_out"] + out_bias | declared + spec.terms | declared) | join(", ") }}, int row_tiles, float* shared) {
    const int lane = threadIdx.x % 32, tile = threadIdx.x / 32 * ROWS, first_tile = static_cast<int>(blockIdx.x) * BLOCK_TILES;
    const int end = min(row_tiles - first_tile, BLOCK_TILES);  // of the block's row tiles
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < STAGES; ++stage) init_barrier(shared + C::BARRIERS + 2 * stage);
      publish_barriers();
      for (int step = 0; step < min(STAGES, ALL_STEPS); ++step) start(shared, packed_qkv, packed_out, step);
    }
    normalise_by_groups<C>({{ (["x"] + norms | list) | join(", ") }}, first_tile, first_tile + end,
                           [&](int row_tile, int row, int channel, const float(&values)[CHUNK]) { First::store_row(shared, 16 * position(row_tile) + row, channel, values); });
    fence_async_proxy();
    __syncthreads();  // operand A and the barriers are there for all

    float *const keys = shared + C::KEYS, *const values = shared + C::VALUES;
    const int sequence = tile / C::TILES, within = sequence * C::TILES * C::ROW_TILE;  // of the block; its first key
    const bool real = tile < end;
    float* const result = attended + static_cast<long long>(first_tile + tile) * (PAGES * 128);
    Softmax softmax;
    int step = 0;
    {
      float acc[ROWS][FIRST_TILES][4], rest[OPERANDS == 2 ? ROWS : 1][OPERANDS == 2 ? FIRST_TILES : 1][4];  // the first products set them
#pragma unroll 1
      for (int head = 0; head < C::HEADS; ++head) {
        if (!C::OVERLAP || head == 0) {
#pragma unroll 1
          for (int sum_tile = 0; sum_tile < First::SUM_TILES; ++sum_tile, ++step) multiply<Qkv>(acc, rest, shared, packed_qkv, packed_out, step, sum_tile);
        }
        finish(acc, rest);
        if (C::OVERLAP && head > 0) __syncthreads();  // no warp reads keys or values of the head before
        hand_on(softmax, acc, {{ "qkv_bias, " if spec.qkv_bias }}keys, values, tile, head, lane);
        if (!C::OVERLAP || head == C::HEADS - 1) __syncthreads();  // keys and values are there for all; or the first step's barrier says so
        softmax.begin();
        int next = 0;  // tile of the sum of the next head
#pragma unroll 1
        for (int key_step = 0; key_step < KEY_STEPS; ++key_step) {
          if constexpr (C::OVERLAP) {
#pragma unroll 1
            for (; head < C::HEADS - 1 && next * KEY_STEPS < (key_step + 1) * First::SUM_TILES; ++next, ++step) multiply<Qkv>(acc, rest, shared, packed_qkv, packed_out, step, next);
          }
{% if spec.terms %}
{% set terms = (["KeyMask<C, Softmax::KEYS>(key_mask, (first_tile + min(tile, end - 1)) / C::TILES, key_step * S::KEY_TILE, lane)"] if spec.key_mask else []) + (["logit_bias, head, tile % C::TILES"] if spec.logit_bias else []) %}
          const typename Softmax::Terms terms{ {{- terms | join(", ") -}} };
{% endif %}
          if ({{ "real && terms.mask.any()" if spec.key_mask else "real" }}) softmax.add(keys + within + key_step * S::KEY_WORDS, values + within + key_step * S::VALUE_WORDS, key_step, lane{{ ", terms" if spec.terms }});
        }
#pragma unroll
        for (int row = 0; row < ROWS; ++row)
          if (tile + row < end) softmax.finish(result + row * (PAGES * 128), row, head, lane);
      }
      wgmma_wait<0>();  // there are none: this tells the compiler
    }

    // A lane reads what it has written.
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
#pragma unroll 8
      for (int page = 0; page < Out::SUM / 16 * OPERANDS; ++page) {
        float quad[4] = {};  // (g, k), (g+8, k), (g, k+8), (g+8, k+8)
        if (tile + row < end && page < PAGES) load(quad, result + (row * PAGES + page) * 128 + 4 * lane);
        Second::store_quad(shared, 16 * position(tile + row), page, lane, quad);
      }
    }
    fence_async_proxy();
    __syncthreads();
#pragma unroll 1
    for (int turn = 0; turn < Second::COLUMN_TILES; ++turn) {
      float acc[ROWS][SECOND_TILES][4], rest[OPERANDS == 2 ? ROWS : 1][OPERANDS == 2 ? SECOND_TILES : 1][4];
#pragma unroll 1
      for (int sum_tile = 0; sum_tile < Second::SUM_TILES; ++sum_tile, ++step) multiply<Out>(acc, rest, shared, packed_qkv, packed_out, step, sum_tile);
      finish(acc, rest);
#pragma unroll
      for (int row = 0; row < ROWS; ++row)
        {{ "add_residual" if spec.residual else "store_output" }}<C, SECOND_TILES>({{ (out_arguments + out_bias) | join(", ") }}, first_tile + tile + row, first_tile + end, turn * Out::COLUMNS, lane, acc[row]);
    }
  }
};
