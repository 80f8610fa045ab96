// The weights of both products on their way through shared memory. Copied by 16 bytes a lane, in the order of their rows, they are asked for by whole
// lines: a lane that reads its operands from global memory asks for 8 to 16 bytes of each of 8 rows, and it is requests, not bytes, that
// blocks wait for which all read the same weights at the same time.
// So that operands are loaded without bank conflicts, rows that are whole lines of 128 bytes are swizzled, and others padded. Padding sets a row off the lines
// of shared memory, and a line of global memory, which arrives together, is then written in two.
template <typename C>
struct SharedWeights {
  static constexpr int PIECE = 16 / static_cast<int>(sizeof(Element)), LINE = 8 * PIECE;

  static __device__ __forceinline__ Element* qkv(float* shared) { return reinterpret_cast<Element*>(shared + C::QKV_WEIGHT); }
  static __device__ __forceinline__ Element* out(float* shared) { return reinterpret_cast<Element*>(shared + C::OUT_WEIGHT); }

  // Where index k of column first + within lies, of which `first` is a multiple of 8: of each line, piece p at p ^ (SWIZZLE * column % 8). What
  // differs from lane to lane, as does k % LANES, is apart from what does not: all places of a lane are one address, with few bits flipped, and constants.
  template <int STRIDE, int SWIZZLE, int LANES>
  static __device__ __forceinline__ int place(int first, int within, int k) {
    if constexpr (SWIZZLE == 0) {
      return (first + within) * STRIDE + k;
    } else {
      const int of_lane = k % LANES, at = k - of_lane;
      const int lane = (within * STRIDE + of_lane) ^ SWIZZLE * within % 8 * PIECE;
      return first * STRIDE + at / LINE * LINE + (lane ^ at % LINE);
    }
  }
  template <int LANES = 4 * C::FRAGMENT>
  static __device__ __forceinline__ int qkv_place(int first, int within, int k) {
    return place<C::QKV_WEIGHT_STRIDE, C::QKV_WEIGHT_SWIZZLE, LANES>(first, within, k);
  }
  template <int LANES = 8>
  static __device__ __forceinline__ int out_place(int first, int within, int k) {
    return place<C::OUT_WEIGHT_STRIDE, C::OUT_WEIGHT_SWIZZLE, LANES>(first, within, k);
  }

  // Starts the copies. Padded heads and channels become zeros.
  static __device__ __forceinline__ void copy(float* shared, const Element* qkv_weight, const Element* out_weight) {
    each_piece<3 * C::INNER, C::PADDED_DIM>([&](int first, int row, int k) {
      const unsigned column = first + row, within = column % C::PADDED_HEAD_DIM;  // of a head of q, k or v
      const bool real = (C::HEAD_DIM == C::PADDED_HEAD_DIM || within < C::HEAD_DIM) && (C::DIM == C::PADDED_DIM || k < C::DIM);
      copy_piece(qkv(shared) + qkv_place<LINE>(first, row, k), qkv_weight, (column / C::PADDED_HEAD_DIM * C::HEAD_DIM + within) * C::DIM + k, real);
    });
    each_piece<ceil_div(C::DIM, 8) * 8, C::INNER>([&](int first, int row, int k) {
      const unsigned column = first + row, within = k % C::PADDED_HEAD_DIM;
      const bool real = (C::HEAD_DIM == C::PADDED_HEAD_DIM || within < C::HEAD_DIM) && (C::DIM % 8 == 0 || column < C::DIM);
      copy_piece(out(shared) + out_place<LINE>(first, row, k), out_weight, (column * C::HEADS + k / C::PADDED_HEAD_DIM) * C::HEAD_DIM + within, real);
    });
    commit_copies();
  }

  static __device__ __forceinline__ void copy_piece(Element* to, const Element* weight, int at, bool real) {
    copy_async<16>(reinterpret_cast<float*>(to), reinterpret_cast<const float*>(weight + (real ? at : 0)), real);
  }

  // Calls f(first, row, index) for the pieces of this thread, of ROWS by COLUMNS elements: row first + row, from `index` on. Where the block copies
  // whole eights of rows at once, `first` counts these, and all else is the same in every turn.
  template <int ROWS, int COLUMNS, typename F>
  static __device__ __forceinline__ void each_piece(F f) {
    constexpr unsigned PIECES = COLUMNS / PIECE, ALL = ROWS * PIECES, TURNS = ceil_div(ALL, C::THREADS);
    constexpr bool EIGHTS = C::THREADS % (8 * PIECES) == 0;
#pragma unroll
    for (unsigned turn = 0; turn < TURNS; ++turn) {
      const unsigned at = turn * C::THREADS + threadIdx.x, from = EIGHTS ? threadIdx.x : at;
      if (ALL % C::THREADS == 0 || at < ALL) f(EIGHTS ? turn * (C::THREADS / PIECES) : 0, from / PIECES, from % PIECES * PIECE);
    }
  }
};
