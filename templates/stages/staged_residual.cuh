{% set bias = ", const Element* __restrict__ out_bias" if spec.out_bias %}
{% set whole = spec.itemsize == 2 %}{# in float32 kernels are slower without the branches: docs/performance.md #}
// TILES neighbouring column tiles of a row tile of the output product, from column `column` on{{ ", with " if spec.out_bias or spec.residual }}{{ "bias" if spec.out_bias }}{{ " and " if spec.out_bias and spec.residual }}{{ "residual" if spec.residual }}, into y.
{% if spec.residual %}
// An element of y is written by the thread that has read it as residual, so that x may be y. Because of that the compiler keeps loads of x
// behind earlier stores to y: the residuals of up to 8 column tiles are read before the first store, so that they wait for memory
// together, and all of them before the product (`before`) where they take few registers.
{% endif %}
{% if spec.out_bias %}
// BEGUN: sums begin with the bias, so that nobody waits for it behind the product.
{% endif %}
template <typename C, int TILES{{ ", bool BEGUN = false" if spec.out_bias }}>
struct OutputTiles {
  static constexpr int RUN = C::Out::RUN, TOGETHER = TILES <= 8 ? TILES : TILES % 8 == 0 ? 8 : 4, RUNS = 2 * TOGETHER / RUN;  // RUNS of RUN neighbours: what a lane has of them
  static_assert(TILES % TOGETHER == 0, "column tiles that go together");
{% if whole %}

  // The compiler cannot know that a block's columns end within DIM where they divide it: told so, it spares a branch an access.
  static __device__ __forceinline__ void note_range(int channel) {
    if constexpr (C::DIM % C::Out::COLUMNS == 0) __builtin_assume(channel < C::DIM);
  }

{% endif %}
{% if spec.residual %}
  static constexpr bool EARLY = PER_WORD == 2 && (TILES <= 16 || C::Out::THREADS * C::Out::MIN_BLOCKS <= 256);  // a thread may have 255 registers then
  Word words[EARLY ? TILES / TOGETHER : 1][2][RUNS][RUN / PER_WORD];

  __device__ __forceinline__ void read(Word (&to)[2][RUNS][RUN / PER_WORD], const Element* x, int tile, int row_tiles, int channel, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = tile % C::TILES * 16 + 8 * half + lane / 4;
#pragma unroll
      for (int run = 0; run < RUNS; ++run) {
#pragma unroll
        for (int i = 0; i < RUN / PER_WORD; ++i) to[half][run][i] = Word(0);
{% if whole %}
        note_range(channel + 4 * RUN * run);
{% endif %}
        if (tile < row_tiles && {{ "(C::LENGTH % 16 == 0 || token < C::LENGTH)" if whole else "token < C::LENGTH" }}) load_channels{{ "_here" if spec.itemsize == 2 }}<C::DIM>(to[half][run], x + C::offset(tile / C::TILES, token), channel + 4 * RUN * run);
      }
    }
  }

  __device__ __forceinline__ void before(const Element* x, int tile, int row_tiles, int column, int lane) {
    if constexpr (EARLY) {
#pragma unroll
      for (int first = 0; first < TILES; first += TOGETHER) read(words[first / TOGETHER], x, tile, row_tiles, column + 8 * first + RUN * (lane % 4), lane);
    }
  }
{% endif %}

{% if spec.out_bias %}
  static __device__ __forceinline__ void begin(float (&acc)[TILES][4]{{ bias }}, int column, int lane) {
#pragma unroll
    for (int j = 0; j < TILES; j += RUN / 2) {
      float bias[RUN] = {};
      load_channels<C::DIM>(bias, out_bias, column + 8 * j + RUN * (lane % 4));
#pragma unroll
      for (int i = 0; i < 2 * RUN; ++i) acc[j + i / 4][i % 4] = bias[i / 4 * 2 + i % 2];
    }
  }

{% endif %}
  __device__ __forceinline__ void after({{ "const Element* x, " if spec.residual }}Element* y{{ bias }}, int tile, int row_tiles, int column, int lane, const float (&acc)[TILES][4]) {
#pragma unroll
    for (int first = 0; first < TILES; first += TOGETHER) {
      const int channel = column + 8 * first + RUN * (lane % 4);
{% if spec.residual %}
      Word(&held)[2][RUNS][RUN / PER_WORD] = words[EARLY ? first / TOGETHER : 0];
      if constexpr (!EARLY) read(held, x, tile, row_tiles, channel, lane);
{% endif %}
#pragma unroll
      for (int run = 0; run < RUNS; ++run) {
{% if spec.out_bias %}
        float bias[RUN] = {};
        if constexpr (!BEGUN) load_channels<C::DIM>(bias, out_bias, channel + 4 * RUN * run);
{% endif %}
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int token = tile % C::TILES * 16 + 8 * half + lane / 4;
          if (tile >= row_tiles || {{ "(C::LENGTH % 16 != 0 && token >= C::LENGTH)" if whole else "token >= C::LENGTH" }}) continue;
{% if whole %}
          note_range(channel + 4 * RUN * run);
{% endif %}
          float sums[RUN]{{ " = {}" if not spec.residual }};
{% if spec.residual %}
          unpack(sums, held[half][run]);
{% endif %}
#pragma unroll
          for (int c = 0; c < RUN; ++c) {
            float sum = acc[first + run * (RUN / 2) + c / 2][2 * half + c % 2];
{% if spec.out_bias %}
            if constexpr (!BEGUN) sum += bias[c];
{% endif %}
            sums[c] += sum;
          }
          store_channels<C::DIM>(y + C::offset(tile / C::TILES, token), channel + 4 * RUN * run, sums);
        }
      }
    }
  }
};
