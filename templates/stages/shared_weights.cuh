// The weights of both products on their way through shared memory. Copied by 16 bytes a lane, in the order of their rows, they are asked for by whole
// lines: a lane that reads its operands from global memory asks for 8 to 16 bytes of each of 8 rows, and it is requests, not bytes, that
// blocks wait for which all read the same weights at the same time.
template <typename C>
struct SharedWeights {
  static constexpr int PIECE = 16 / static_cast<int>(sizeof(Element));

  static __device__ __forceinline__ Element* qkv(float* shared) { return reinterpret_cast<Element*>(shared + C::QKV_WEIGHT); }
  static __device__ __forceinline__ Element* out(float* shared) { return reinterpret_cast<Element*>(shared + C::OUT_WEIGHT); }

  // Starts the copies. Padded heads and channels become zeros.
  static __device__ __forceinline__ void copy(float* shared, const Element* qkv_weight, const Element* out_weight) {
    each_piece<3 * C::INNER, C::PADDED_DIM>([&](int column, int k) {
      const int within = column % C::PADDED_HEAD_DIM;  // of a head of q, k or v
      const bool real = (C::HEAD_DIM == C::PADDED_HEAD_DIM || within < C::HEAD_DIM) && (C::DIM == C::PADDED_DIM || k < C::DIM);
      copy_piece(qkv(shared) + column * C::QKV_WEIGHT_STRIDE + k, qkv_weight, (column / C::PADDED_HEAD_DIM * C::HEAD_DIM + within) * C::DIM + k, real);
    });
    each_piece<ceil_div(C::DIM, 8) * 8, C::INNER>([&](int column, int k) {
      const int within = k % C::PADDED_HEAD_DIM;
      const bool real = (C::HEAD_DIM == C::PADDED_HEAD_DIM || within < C::HEAD_DIM) && (C::DIM % 8 == 0 || column < C::DIM);
      copy_piece(out(shared) + column * C::OUT_WEIGHT_STRIDE + k, out_weight, (column * C::HEADS + k / C::PADDED_HEAD_DIM) * C::HEAD_DIM + within, real);
    });
    commit_copies();
  }

  static __device__ __forceinline__ void copy_piece(Element* to, const Element* weight, int at, bool real) {
    copy_async<16>(reinterpret_cast<float*>(to), reinterpret_cast<const float*>(weight + (real ? at : 0)), real);
  }

  // Calls f(row, first index) for the pieces of this thread, of ROWS by COLUMNS elements.
  template <int ROWS, int COLUMNS, typename F>
  static __device__ __forceinline__ void each_piece(F f) {
    constexpr int PIECES = COLUMNS / PIECE, ALL = ROWS * PIECES, TURNS = ceil_div(ALL, C::THREADS);
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
      const int at = turn * C::THREADS + static_cast<int>(threadIdx.x);
      if (ALL % C::THREADS == 0 || at < ALL) f(at / PIECES, at % PIECES * PIECE);
    }
  }
};
