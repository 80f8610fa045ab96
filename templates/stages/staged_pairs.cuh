// Two neighbouring column tiles of q, k or v into the fragments of kernel 2, in pieces of 16 bytes a lane: what HalfCore's store_query,
// store_key and store_value write one tile at a time. `step` is the first of the two, an even one.
template <typename Format, int PARTS>
struct PairedStores<HalfCore<Format, PARTS>> {
  using Math = HalfCore<Format, PARTS>;
  using Words = typename Math::Words;

  static __device__ __forceinline__ void query(float* to, int step, int lane, const float (&c)[2][4]) {
    const Words words[2][2] = {{Math::split(c[0][0], c[0][1]), Math::split(c[0][2], c[0][3])}, {Math::split(c[1][0], c[1][1]), Math::split(c[1][2], c[1][3])}};
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const unsigned quad[4] = {words[0][0].part[part], words[0][1].part[part], words[1][0].part[part], words[1][1].part[part]};
      store(to + (step / 2 * PARTS + part) * 128 + 4 * lane, quad);
    }
  }

  static __device__ __forceinline__ void key(float* to, int step, int lane, const float (&c)[2][4]) {
    unsigned quads[PARTS][4];
#pragma unroll
    for (int octet = 0; octet < 2; ++octet)
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const Words words = Math::split(c[tile][2 * octet], c[tile][2 * octet + 1]);
#pragma unroll
        for (int part = 0; part < PARTS; ++part) quads[(octet * PARTS + part) / 2][(octet * PARTS + part) % 2 * 2 + tile] = words.part[part];
      }
#pragma unroll
    for (int page = 0; page < PARTS; ++page) store(to + (step / 2 * PARTS + page) * 128 + 4 * lane, quads[page]);
  }

  static __device__ __forceinline__ void value(float* to, int step, int lane, const float (&c)[2][4]) {
    unsigned quads[PARTS][4];
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const Words upper = Math::split(c[tile][0], c[tile][1]), lower = Math::split(c[tile][2], c[tile][3]);
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        const int pair = tile * PARTS + part;
        quads[pair / 2][pair % 2 * 2] = transpose_8x8(upper.part[part]);
        quads[pair / 2][pair % 2 * 2 + 1] = transpose_8x8(lower.part[part]);
      }
    }
#pragma unroll
    for (int page = 0; page < PARTS; ++page) store(to + (step / 2 * PARTS + page) * 128 + 4 * lane, quads[page]);
  }
};
