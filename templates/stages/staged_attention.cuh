// Kernel 2: attention of WARPS * ROWS * 16 queries of one sequence and head. Tiles of keys and values come through STAGES buffers by asynchronous
// copies, or all of them lie in one. The result goes to scratch as operand A of kernel 3.
template <typename C>
struct StreamedAttention {
  using S = typename C::Streamed;
  static constexpr int STEPS = C::PADDED_HEAD_DIM / 8, ROW_TILE = C::ROW_TILE, ROWS = S::ROWS, THREADS = 32 * S::WARPS;
  static constexpr int KEYS = S::KEY_TILE / 8, KEY_STEPS = ceil_div(16 * C::TILES, S::KEY_TILE), GROUPS = ceil_div(C::TILES, S::WARPS * ROWS);
  static constexpr bool RESIDENT = S::STAGES == 1, EVEN = C::TILES % (S::WARPS * ROWS) == 0;  // EVEN: every warp has all of its row tiles
  // Tiles of keys that are copied at once. All of a sequence come in up to four copies, so that work begins before the last has come.
  static constexpr int COPY_STEPS = RESIDENT ? ceil_div(KEY_STEPS, KEY_STEPS >= 16 ? 4 : KEY_STEPS >= 8 ? 2 : 1) : 1;
  static constexpr int COPIES = ceil_div(KEY_STEPS, COPY_STEPS), COPIED_TILES = COPY_STEPS * (S::KEY_TILE / 16);  // row tiles

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

{% if streaming %}
  // Zeros where the output product, which streams whole tiles of the sum of all rows of a block, reads what no head has: behind the last head of row tile
  // `at`, and behind the last row tile.
  template <typename Out>
  static __device__ __forceinline__ void pad_streamed(float* attended, int at, int head, int lane) {
    constexpr float zeros[WarpgroupProduct<Out>::OPERANDS][4] = {};
    const int row_tiles = gridDim.x / (GROUPS * C::HEADS) * C::TILES, end = at + 1 < row_tiles ? at + 1 : ceil_div(row_tiles, Out::ROW_TILES) * Out::ROW_TILES;
    const int first = head * (STEPS / 2), next = first + STEPS / 2, pages = head == C::HEADS - 1 ? Out::SUM / 16 : next;
    for (int row_tile = at; row_tile < end; ++row_tile)
      for (int page = row_tile == at ? next : first; page < pages; ++page) WarpgroupProduct<Out>::store_streamed_fragment(attended, row_tile, page, lane, zeros);
  }

{% endif %}
  static __device__ __forceinline__ void run(const float* query, const float* key, const float* value, float* attended{% for term in spec.terms | declared %}, {{ term }}{% endfor %}, float* shared) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int group = blockIdx.x % GROUPS, unit = blockIdx.x / GROUPS, head = unit % C::HEADS, sequence = unit / C::HEADS;
    const int tile = (group * S::WARPS + warp) * ROWS;
    const long long base = static_cast<long long>(unit) * C::TILES * ROW_TILE;
#pragma unroll
    for (int copy = 0; copy < (RESIDENT ? COPIES : S::STAGES - 1); ++copy) start_copies(shared, key + base, value + base, copy);
    StreamedSoftmax<C> softmax;
#pragma unroll
    for (int row = 0; row < ROWS; ++row) softmax.queries[row].take(query + base + (EVEN ? tile + row : min(tile + row, C::TILES - 1)) * ROW_TILE, lane);
    softmax.begin();
    const float *keys = shared, *values = shared + S::VALUES;
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
      const typename StreamedSoftmax<C>::Terms terms{ {{- terms | join(", ") -}} };
{% endif %}
      if ({{ "(EVEN || tile < C::TILES) && terms.mask.any()" if spec.key_mask else "EVEN || tile < C::TILES" }}) softmax.template add<false>(keys, values, step, lane, {{ "terms, " if spec.terms }}[] {});
      const bool back = !RESIDENT && step % S::STAGES == S::STAGES - 1;
      keys = back ? shared : keys + (RESIDENT ? S::KEY_WORDS : S::BUFFER);
      values = back ? shared + S::VALUES : values + (RESIDENT ? S::VALUE_WORDS : S::BUFFER);
    }
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      if (!EVEN && tile + row >= C::TILES) return;
{% if streaming %}
      if constexpr (C::STREAMED_OUT) {
        softmax.result(row, [&](int step, const float(&quads)[C::Math::PAGES][4]) {
          WarpgroupProduct<typename C::Out>::store_streamed_fragment(attended, sequence * C::TILES + tile + row, head * (STEPS / 2) + step, lane, quads);
        });
        pad_streamed<typename C::Out>(attended, sequence * C::TILES + tile + row, head, lane);
        continue;
      }
{% endif %}
      softmax.finish(attended + (static_cast<long long>(sequence) * C::TILES + tile + row) * (C::HEADS * ROW_TILE), row, head, lane);
    }
  }
};
