"""Axial attention block: dim 64, 4 heads, 32x32, bfloat16, for sm_90.

Row attention, then column attention over (batch, height, width, dim), with LayerNorm before and a residual after each
axis. Tuned for batch 4; any batch is computed.

Configuration:
    row: family sequence, math bf16, heads registers, head_warps 1, sequences 1, warps 8, qkv_rows 2, qkv_columns 6,
         out_rows 2, out_columns 2, key_tile 32, fragment 4, weights shared, prefetch qkv, padding True,
         residual shared, norm_lanes 8, dependent_launch True, min_blocks 1, rounds 1
    col: family sequence, math bf16, heads registers, head_warps 1, sequences 1, warps 8, qkv_rows 2, qkv_columns 6,
         out_rows 2, out_columns 2, key_tile 32, fragment 4, weights shared, prefetch qkv, padding True,
         residual shared, norm_lanes 8, dependent_launch True, min_blocks 1, rounds 1

Measured on NVIDIA H200.
    device time: 5.61 +- 0.00 us
    device time, L2 flushed: 10.13 us
    wall time of a call: 20.48 us
    default configuration, device time: 5.80 us
    PyTorch (torch.compile + SDPA), device time: 48.68 us
    PyTorch (torch.compile + SDPA), wall time of a call: 988.77 us
    error against float64: 3.4e-02 of the output's scale
Command: python cli.py tune --dim 64 --heads 4 --height 32 --width 32 --batch 4 --dtype bfloat16 --fix heads=registers
--fix head_warps=1 --fix sequences=1 --fix warps=8 --fix qkv_rows=2 --fix qkv_columns=6 --fix out_rows=2 --fix
out_columns=2 --fix key_tile=32 --fix fragment=4 --fix padding=true --fix norm_lanes=8 --fix dependent_launch=true --fix
min_blocks=1 --fix rounds=1 --fix weights=shared --fix prefetch=qkv --fix residual=shared --budget 20
Written 2026-11-30T15:23:19Z, driver 580.159.04, torch 2.11.0+cu130, CUDA 13.0, python 3.12.3, nvrtc 13.0.
The default configuration is the fastest.

ModelNew(dim, num_heads, height, width, dropout=0.0) replaces the PyTorch block with the same parameters. The CUDA
kernels are built at the first call with a CUDA tensor, which needs the CUDA toolkit and a C++ compiler; CPU tensors,
other data types, other sizes, dropout while training and autocast are computed by PyTorch.
"""
import contextlib
import glob
import hashlib
import importlib.util
import math
import operator
import os
import shutil
import stat
import sys
import sysconfig
import tempfile
import warnings
import weakref

import torch
from torch import nn
from torch.nn import functional as F

# What computes on CUDA: the kernels below, or one of PyTorch's own forms of the block (_FORMS).
USE = "kernels"

SPEC = {
    "dim": 64, "heads": 4, "height": 32, "width": 32, "batch": 4, "dtype": "bfloat16", "axes": ("row", "col"),
    "eps": 1e-05,
}
ARCH = "sm_90"
CONFIGS = {
    "row": {
        "family": "sequence", "math": "bf16", "heads": "registers", "head_warps": 1, "sequences": 1, "warps": 8,
        "qkv_rows": 2, "qkv_columns": 6, "out_rows": 2, "out_columns": 2, "key_tile": 32, "fragment": 4,
        "weights": "shared", "prefetch": "qkv", "padding": True, "residual": "shared", "norm_lanes": 8,
        "dependent_launch": True, "min_blocks": 1, "rounds": 1,
    },
    "col": {
        "family": "sequence", "math": "bf16", "heads": "registers", "head_warps": 1, "sequences": 1, "warps": 8,
        "qkv_rows": 2, "qkv_columns": 6, "out_rows": 2, "out_columns": 2, "key_tile": 32, "fragment": 4,
        "weights": "shared", "prefetch": "qkv", "padding": True, "residual": "shared", "norm_lanes": 8,
        "dependent_launch": True, "min_blocks": 1, "rounds": 1,
    },
}
KERNELS = [
    {
        "name": "axial_row", "axis": "row", "threads": 128, "shared_bytes": 46080, "items_per_block": 1,
        "dependent_launch": False,
        "arguments": ("x", "y", "norm_weight", "norm_bias", "qkv_weight", "out_weight", "out_bias"),
        "items": "sequences", "blocks_per_group": 1,
    },
    {
        "name": "axial_col", "axis": "col", "threads": 128, "shared_bytes": 46080, "items_per_block": 1,
        "dependent_launch": True,
        "arguments": ("x", "y", "norm_weight", "norm_bias", "qkv_weight", "out_weight", "out_bias"),
        "items": "sequences", "blocks_per_group": 1,
    },
]
SCRATCH = {}
PROVENANCE = {
    "measured": True,
    "command": "python cli.py tune --dim 64 --heads 4 --height 32 --width 32 --batch 4 --dtype bfloat16 --fix heads=registers --fix head_warps=1 --fix sequences=1 --fix warps=8 --fix qkv_rows=2 --fix qkv_columns=6 --fix out_rows=2 --fix out_columns=2 --fix key_tile=32 --fix fragment=4 --fix padding=true --fix norm_lanes=8 --fix dependent_launch=true --fix min_blocks=1 --fix rounds=1 --fix weights=shared --fix prefetch=qkv --fix residual=shared --budget 20",
    "date": "2026-11-30T15:23:19Z", "gpu": "NVIDIA H200", "driver": "580.159.04", "torch": "2.11.0+cu130",
    "cuda": "13.0", "versions": {"python": "3.12.3", "nvrtc": "13.0"}, "device_us": 5.609999721248944,
    "spread_us": 0.001333343485991012, "cold_us": 10.127999819815159, "wall_us": 20.48004000002379,
    "default_us": 5.798666427532832, "pytorch_us": 48.684000968933105, "pytorch_wall_us": 988.7701000003801,
    "pytorch_form": "torch.compile + SDPA", "kernels_us": None, "kernels_wall_us": None, "predicted_us": None,
    "error": 0.0337925952191687, "partial": False, "note": "The default configuration is the fastest.",
}

CUDA_SOURCE = r'''
// Device primitives. A lane is 4g+t: g counts rows (or columns of operand B), t the quarter of a row it serves.

constexpr unsigned ALL_LANES = 0xffffffffu;

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

template <int N>
struct Vector;  // N neighbouring words, moved by one instruction
template <>
struct Vector<1> {
  using Type = float;
};
template <>
struct Vector<2> {
  using Type = float2;
};
template <>
struct Vector<4> {
  using Type = float4;
};

// T is float or unsigned: the bits are moved as they are.
template <typename T, int N>
__device__ __forceinline__ void load(T (&to)[N], const float* from) {
  using V = typename Vector<N>::Type;
  *reinterpret_cast<V*>(to) = *reinterpret_cast<const V*>(from);
}

template <typename T, int N>
__device__ __forceinline__ void store(float* to, const T (&from)[N]) {
  using V = typename Vector<N>::Type;
  *reinterpret_cast<V*>(to) = *reinterpret_cast<const V*>(from);
}

// The same to global memory, by one instruction: the compiler takes some plain stores of several words apart.
template <typename T, int N>
__device__ __forceinline__ void store_global(float* to, const T (&from)[N]) {
  using V = typename Vector<N>::Type;
  __stcg(reinterpret_cast<V*>(to), *reinterpret_cast<const V*>(from));
}

// Weights do not change while a kernel runs, so their loads may go through the read-only cache.
template <int N>
__device__ __forceinline__ void load_constant(float (&to)[N], const float* __restrict__ from) {
  using V = typename Vector<N>::Type;
  *reinterpret_cast<V*>(to) = __ldg(reinterpret_cast<const V*>(from));
}

__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Sum and maximum over aligned groups of LANES lanes; every lane of the group gets the result.
template <int LANES>
__device__ __forceinline__ float group_sum(float value) {
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) value += __shfl_xor_sync(ALL_LANES, value, step);
  return value;
}

template <int LANES>
__device__ __forceinline__ float group_max(float value) {
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, step));
  return value;
}

#ifdef __CUDACC__  // PTX; a host build brings its own versions of these functions

// N (1, 2 or 4) neighbouring words by a plain load, which stays on its side of a barrier. A load of constants (ld.global.nc) does not: the compiler
// moves it to its first use, and what was to arrive during another stage is then waited for.
template <int N>
__device__ __forceinline__ void load_here(unsigned (&to)[N], const void* from) {
  if constexpr (N == 4)
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(from));
  else if constexpr (N == 2)
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
  else
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(to[0]) : "l"(from));
}

// c += a b for a 16x8 tile and a sum over 8 (PTX ISA, mma.m16n8k8 with .tf32): a = (g, t), (g+8, t), (g, t+4),
// (g+8, t+4); b0 = (t, g), b1 = (t+4, g); c = (g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1). The unit ignores the
// 13 low bits of each operand.
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&c)[4], const float (&a)[4], float b0, float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
        "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// The same for 16-bit operands and a sum over 16 (PTX ISA, mma.m16n8k16): each word holds two neighbouring indices, a = (g, 2t),
// (g+8, 2t), (g, 2t+8), (g+8, 2t+8); b0 = (2t, g), b1 = (2t+8, g).
__device__ __forceinline__ void mma_m16n8k16_fp16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_m16n8k16_bf16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ unsigned pack_bf16(float first, float second) {  // the first in the low half, rounded to nearest even
  unsigned word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  return word;
}

__device__ __forceinline__ unsigned pack_fp16(float first, float second) {
  unsigned word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  return word;
}

__device__ __forceinline__ float2 unpack_fp16(unsigned word) {
  float2 values;
  asm("{.reg .f16 low, high;\n mov.b32 {low, high}, %2;\n cvt.f32.f16 %0, low;\n cvt.f32.f16 %1, high;}" : "=f"(values.x), "=f"(values.y) : "r"(word));
  return values;
}

// Transposes an 8x8 matrix of 16-bit values, of which lane 4g+t holds row g, columns 2t and 2t+1 (PTX ISA, movmatrix).
__device__ __forceinline__ unsigned transpose_8x8(unsigned word) {
  unsigned result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(word));
  return result;
}

__device__ __forceinline__ float round_to_tf32(float value) {
  unsigned bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return __uint_as_float(bits);
}

__device__ __forceinline__ float exp2_approx(float value) {  // 2 units in the last place; results under 2^-126 become 0
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

// Programmatic dependent launch (PTX ISA, griddepcontrol): wait until the kernel before this one in the stream has ended
// and its writes are visible; let the kernel after this one start its prologue.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#endif

template <int N>
__device__ __forceinline__ void load_here(float (&to)[N], const float* from) {
  unsigned words[N];
  load_here(words, static_cast<const void*>(from));
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = __uint_as_float(words[i]);
}

// 16-bit types: two values in a word, the first in the low half.
struct Fp16 {
  unsigned short bits;

  static __device__ __forceinline__ unsigned pack(float first, float second) { return pack_fp16(first, second); }
  static __device__ __forceinline__ float2 unpack(unsigned word) { return unpack_fp16(word); }
  static __device__ __forceinline__ void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) { mma_m16n8k16_fp16(c, a, b0, b1); }
};

struct Bf16 {
  unsigned short bits;

  static __device__ __forceinline__ unsigned pack(float first, float second) { return pack_bf16(first, second); }
  static __device__ __forceinline__ float2 unpack(unsigned word) { return float2{__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)}; }
  static __device__ __forceinline__ void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) { mma_m16n8k16_bf16(c, a, b0, b1); }
};

template <typename A, typename B>
constexpr bool SAME = false;
template <typename A>
constexpr bool SAME<A, A> = true;

template <bool FIRST, typename A, typename B>
struct Choose {
  using Type = A;
};
template <typename A, typename B>
struct Choose<false, A, B> {
  using Type = B;
};

using Element = Bf16;

// Elements of x, y and the parameters: 16 bits in memory, floats where they are computed with. Between, and where the products'
// operands are of the same type, they are words of two elements, the first in the low half.
using Word = unsigned;
constexpr int PER_WORD = 2;

template <int N>
struct WordVector;  // N neighbouring words, moved by one instruction
template <>
struct WordVector<1> {
  using Type = unsigned;
};
template <>
struct WordVector<2> {
  using Type = uint2;
};
template <>
struct WordVector<4> {
  using Type = uint4;
};

__device__ __forceinline__ void put(Element* to, float value) { to->bits = static_cast<unsigned short>(Element::pack(value, 0.0f)); }

template <int N>
__device__ __forceinline__ void unpack(float (&to)[2 * N], const Word (&words)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float2 two = Element::unpack(words[i]);
    to[2 * i] = two.x, to[2 * i + 1] = two.y;
  }
}

template <int N>
__device__ __forceinline__ void load(Word (&to)[N], const Element* from) {
  using V = typename WordVector<N>::Type;
  *reinterpret_cast<V*>(to) = *reinterpret_cast<const V*>(from);
}

template <int N>
__device__ __forceinline__ void load_constant(Word (&to)[N], const Element* __restrict__ from) {
  using V = typename WordVector<N>::Type;
  *reinterpret_cast<V*>(to) = __ldg(reinterpret_cast<const V*>(from));
}

template <int N>
__device__ __forceinline__ void load_here(float (&to)[N], const Element* from) {
  Word words[N / 2];
  load_here(words, static_cast<const void*>(from));
  unpack(to, words);
}

template <int N>
__device__ __forceinline__ void load(float (&to)[N], const Element* from) {
  Word words[N / 2];
  load(words, from);
  unpack(to, words);
}

template <int N>
__device__ __forceinline__ void load_constant(float (&to)[N], const Element* __restrict__ from) {
  Word words[N / 2];
  load_constant(words, from);
  unpack(to, words);
}

template <int N>
__device__ __forceinline__ void store(Element* to, const Word (&words)[N]) {
  using V = typename WordVector<N>::Type;
  *reinterpret_cast<V*>(to) = *reinterpret_cast<const V*>(words);
}

template <int N>
__device__ __forceinline__ void store_global(Element* to, const float (&from)[N]) {
  using V = typename WordVector<N / 2>::Type;
  Word words[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; ++i) words[i] = Element::pack(from[2 * i], from[2 * i + 1]);
  __stcg(reinterpret_cast<V*>(to), *reinterpret_cast<const V*>(words));
}

// Those of 2 N neighbouring elements that exist: `from` has the index `index`, and `limit` is the first one that does not exist.
// The words begin as 0. CONSTANT elements do not change while the kernel runs.
template <bool CONSTANT, int N>
__device__ __forceinline__ void load_some(Word (&to)[N], const Element* from, bool real, int index, int limit) {
#pragma unroll
  for (int i = 0; i < 2 * N; ++i)
    if (real && index + i < limit) to[i / 2] |= static_cast<unsigned>(CONSTANT ? __ldg(&from[i].bits) : from[i].bits) << 16 * (i % 2);
}

template <bool CONSTANT, int N>
__device__ __forceinline__ void load_some(float (&to)[N], const Element* from, bool real, int index, int limit) {
  Word words[N / 2] = {};
  load_some<CONSTANT>(words, from, real, index, limit);
  unpack(to, words);
}

// Products on the tensor cores in 16-bit types. Format says how two floats become one word. PARTS is 1 for operands
// rounded to the type, or 2 for fp32-grade products: each operand is kept as its rounded value and, SCALE times as large
// so that it stays a normal number, the rest. The product of the two rests is left out (Ootomo and Yokota 2022).
//
// Fragments (PTX ISA, "Matrix fragments for mma.m16n8k16"): operand A's tile of 16 rows and 16 indices is a page of quadruples of
// words, (g, k), (g+8, k), (g, k'), (g+8, k'), where k and k' are pairs of indices, and a second page with the rests.
template <typename Format, int PARTS>
struct HalfCore {
  static constexpr float SCALE = 2048.0f;
  static constexpr int PAGES = PARTS;  // of a tile of operand A
  static constexpr int STORED_TILES = 2;  // neighbouring column tiles that are stored as operands at once: whole quadruples, without bank conflicts
  static constexpr bool AS_STORED = PARTS == 1 && SAME<Element, Format>;  // weights in memory are operands

  struct Words {  // two neighbouring values: rounded, rest
    unsigned part[PARTS];
  };

  static __device__ __forceinline__ Words split(float first, float second) {
    Words words;
    words.part[0] = Format::pack(first, second);
    if constexpr (PARTS == 2) {
      const float2 rounded = Format::unpack(words.part[0]);
      words.part[1] = Format::pack((first - rounded.x) * SCALE, (second - rounded.y) * SCALE);
    }
    return words;
  }

  template <int F>
  struct Operand {
    static constexpr int STEP = 16;
    Words pair[2];
  };

  using Read = typename Choose<AS_STORED, unsigned, float>::Type;
  static constexpr int READS = AS_STORED ? 1 : 2;  // of a pair

  template <int F>
  struct Raw {
    Read values[2][READS];
  };

  // load_b(tile, column, index, to) reads F neighbouring values of a column of operand B, as floats or as the words they are in memory.
  template <int F, typename LoadB>
  static __device__ __forceinline__ Raw<F> read(int tile, int step, int lane, LoadB load_b) {
    Raw<F> raw;
    if constexpr (F == 4) {
      load_b(tile, lane / 4, 16 * step + 4 * (lane % 4), reinterpret_cast<Read(&)[2 * READS]>(raw.values));
    } else {
#pragma unroll
      for (int which = 0; which < 2; ++which) load_b(tile, lane / 4, 16 * step + 8 * which + 2 * (lane % 4), raw.values[which]);
    }
    return raw;
  }

  template <int F>
  static __device__ __forceinline__ Operand<F> pack(const Raw<F>& raw) {
    if constexpr (AS_STORED)
      return {Words{raw.values[0][0]}, Words{raw.values[1][0]}};
    else
      return {split(raw.values[0][0], raw.values[0][1]), split(raw.values[1][0], raw.values[1][1])};
  }

  // The sums of products with a rest, which are SCALE times too large until they are added.
  template <int ROWS, int COLUMNS>
  struct Sums {
    float rest[PARTS == 2 ? ROWS : 1][PARTS == 2 ? COLUMNS : 1][4] = {};

    __device__ __forceinline__ void multiply(float (&acc)[ROWS][COLUMNS][4], int i, int j, const unsigned (&a)[PARTS][4], const unsigned (&b)[PARTS][2]) {
      if constexpr (PARTS == 2) {
        Format::mma(rest[i][j], a[1], b[0][0], b[0][1]);
        Format::mma(rest[i][j], a[0], b[1][0], b[1][1]);
      }
      Format::mma(acc[i][j], a[0], b[0][0], b[0][1]);
    }

    __device__ __forceinline__ void add_to(float (&acc)[ROWS][COLUMNS][4]) const {
      if constexpr (PARTS == 2) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
          for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
            for (int c = 0; c < 4; ++c) acc[i][j][c] = fmaf(rest[i][j][c], 1.0f / SCALE, acc[i][j][c]);
      }
    }
  };

  // acc += a b over K indices; `a` points to the first row tile's pages, PAGE floats apart, and operand(j, step) supplies b.
  template <int K, int F, int PAGE, int ROWS, int COLUMNS, typename GetB>
  static __device__ __forceinline__ void product(float (&acc)[ROWS][COLUMNS][4], const float* a, int lane, GetB operand) {
    Sums<ROWS, COLUMNS> sums;
    add_product<K, F, PAGE>(acc, sums, a, lane, operand);
    sums.add_to(acc);
  }

  // The same for a part of a longer sum, at whose end sums.add_to(acc) is due.
  template <int K, int F, int PAGE, int ROWS, int COLUMNS, typename GetB>
  static __device__ __forceinline__ void add_product(float (&acc)[ROWS][COLUMNS][4], Sums<ROWS, COLUMNS>& sums, const float* a, int lane, GetB operand) {
    constexpr int STEPS = K / 16, UNROLL = STEPS <= 32 ? STEPS : 4;
#pragma unroll UNROLL
    for (int step = 0; step < STEPS; ++step) {
      unsigned quad[ROWS][PARTS][4];
#pragma unroll
      for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int part = 0; part < PARTS; ++part) load(quad[i][part], a + ((i * STEPS + step) * PARTS + part) * PAGE + 4 * lane);
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) {
        const Operand<F> fetched = operand(j, step);
        unsigned b[PARTS][2];
#pragma unroll
        for (int part = 0; part < PARTS; ++part) b[part][0] = fetched.pair[0].part[part], b[part][1] = fetched.pair[1].part[part];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) sums.multiply(acc, i, j, quad[i], b);
      }
    }
  }

  // Channels `channel` and the next of rows g and g+8 into operand A, for an operand B that is read F at a time. STEPS
  // counts 8-wide column tiles in a row tile, here and below.
  template <int F, int STEPS, int PAGE>
  static __device__ __forceinline__ void store_rows(float* a, int row_tile, int g, int channel, const float (&upper)[2], const float (&lower)[2]) {
    const int t = F == 4 ? channel % 16 / 4 : channel % 8 / 2, which = F == 4 ? channel % 4 / 2 : channel % 16 / 8;
    const Words first = split(upper[0], upper[1]), second = split(lower[0], lower[1]);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const unsigned words[2] = {first.part[part], second.part[part]};
      store(a + ((row_tile * (STEPS / 2) + channel / 16) * PARTS + part) * PAGE + 4 * (4 * g + t) + 2 * which, words);
    }
  }

  // The same for four channels, where operand B is read 4 at a time: a lane's quadruple.
  template <int F, int STEPS, int PAGE>
  static __device__ __forceinline__ void store_rows(float* a, int row_tile, int g, int channel, const float (&upper)[4], const float (&lower)[4]) {
    static_assert(F == 4, "a quadruple holds four neighbouring channels only if they are neighbours of the sum");
    const Words first = split(upper[0], upper[1]), second = split(lower[0], lower[1]), third = split(upper[2], upper[3]), fourth = split(lower[2], lower[3]);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const unsigned words[4] = {first.part[part], second.part[part], third.part[part], fourth.part[part]};
      store(a + ((row_tile * (STEPS / 2) + channel / 16) * PARTS + part) * PAGE + 4 * (4 * g + channel % 16 / 4), words);
    }
  }

  // A tile of accumulators into operand A of the next product, for an operand B that is read 2 at a time.
  template <int STEPS>
  static __device__ __forceinline__ void store_query(float* a, int row_tile, int step, int lane, const float (&c)[4]) {
    const Words upper = split(c[0], c[1]), lower = split(c[2], c[3]);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const unsigned words[2] = {upper.part[part], lower.part[part]};
      store(a + ((row_tile * (STEPS / 2) + step / 2) * PARTS + part) * 128 + 4 * lane + 2 * (step % 2), words);
    }
  }

  // 16 keys and 8 channels into operand B of the scores: for each 8 keys a lane has k and k', rounded and then the rests. Quadruples
  // hold both of these, or the rounded ones of both 8 keys.
  template <int STEPS>
  static __device__ __forceinline__ void store_key(float* b, int row_tile, int step, int lane, const float (&c)[4]) {
    const Words words[2] = {split(c[0], c[1]), split(c[2], c[3])};
    float* to = b + (row_tile * (STEPS / 2) + step / 2) * PARTS * 128 + 4 * lane + step % 2;
#pragma unroll
    for (int octet = 0; octet < 2; ++octet)
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        const int pair = octet * PARTS + part;
        to[pair / 2 * 128 + 2 * (pair % 2)] = __uint_as_float(words[octet].part[part]);
      }
  }

  // 16 keys and 8 channels into operand B of the weighted sum, whose index is the key: transposed within the warp. Quadruples hold
  // the rests as well, or the next 8 channels.
  template <int STEPS, int STRIDE>
  static __device__ __forceinline__ void store_value(float* v, int row_tile, int step, int lane, const float (&c)[4]) {
    const Words upper = split(c[0], c[1]), lower = split(c[2], c[3]);
    unsigned words[2 * PARTS];
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      words[2 * part] = transpose_8x8(upper.part[part]);
      words[2 * part + 1] = transpose_8x8(lower.part[part]);
    }
    store(v + (row_tile * STEPS + step) / (3 - PARTS) * 128 + 4 * lane + (PARTS == 1 ? 2 * (step % 2) : 0), words);
  }

  // Scores of row tile `tile` with the KEYS * 8 keys from row tile `first_key` on, over HEAD_STEPS column tiles from `step` on.
  template <int HEAD_STEPS, int STEPS, int KEYS>
  static __device__ __forceinline__ void scores(float (&acc)[1][KEYS][4], const float* query, const float* key, int tile, int first_key, int step, int lane) {
    Sums<1, KEYS> sums;
#pragma unroll
    for (int part = 0; part < HEAD_STEPS / 2; ++part) {
      unsigned quad[PARTS][4];
#pragma unroll
      for (int p = 0; p < PARTS; ++p) load(quad[p], query + ((tile * (STEPS / 2) + step / 2 + part) * PARTS + p) * 128 + 4 * lane);
#pragma unroll
      for (int j = 0; j < KEYS; j += 2) {
        unsigned b[2][PARTS][2];
#pragma unroll
        for (int p = 0; p < PARTS; ++p)
          load(reinterpret_cast<unsigned(&)[PARTS][4]>(b)[p], key + (((first_key + j / 2) * (STEPS / 2) + step / 2 + part) * PARTS + p) * 128 + 4 * lane);
        sums.multiply(acc, 0, j, quad, b[0]);
        sums.multiply(acc, 0, j + 1, quad, b[1]);
      }
    }
    sums.add_to(acc);
  }

  // out += p v for 16 rows of weights p, which are where their scores were accumulated.
  template <int STEPS, int STRIDE, int KEYS, int COLUMNS>
  static __device__ __forceinline__ void weighted_sum(float (&out)[1][COLUMNS][4], const float (&p)[1][KEYS][4], const float* v, int first_key, int step, int lane) {
    Sums<1, COLUMNS> sums;
#pragma unroll
    for (int pair = 0; pair < KEYS / 2; ++pair) {
      unsigned quad[PARTS][4];
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        const float(&c)[4] = p[0][2 * pair + which];
        const Words upper = split(c[0], c[1]), lower = split(c[2], c[3]);
#pragma unroll
        for (int part = 0; part < PARTS; ++part) quad[part][2 * which] = upper.part[part], quad[part][2 * which + 1] = lower.part[part];
      }
#pragma unroll
      for (int j = 0; j < COLUMNS; j += 3 - PARTS) {
        unsigned b[3 - PARTS][PARTS][2];
        load(reinterpret_cast<unsigned(&)[4]>(b), v + ((first_key + pair) * STEPS + step + j) / (3 - PARTS) * 128 + 4 * lane);
#pragma unroll
        for (int next = 0; next < 3 - PARTS; ++next) sums.multiply(out, 0, j + next, quad, b[next]);
      }
    }
    sums.add_to(out);
  }

  // A tile of 16 rows and 16 indices as operand A. Its rows 8 o to 8 o + 7 are also an operand B: of 8 columns, which these rows are.
  struct Tile {
    unsigned part[PARTS][4];

    __device__ __forceinline__ void columns(unsigned (&b)[PARTS][2], int octet) const {
#pragma unroll
      for (int p = 0; p < PARTS; ++p) b[p][0] = part[p][octet], b[p][1] = part[p][2 + octet];
    }
  };

  // acc[i][j] += a b, where b is an octet of the rows of `b`.
  template <int ROWS, int COLUMNS>
  static __device__ __forceinline__ void multiply(float (&acc)[ROWS][COLUMNS][4], Sums<ROWS, COLUMNS>& sums, int i, int j, const Tile& a, const Tile& b, int octet) {
    unsigned columns[PARTS][2];
    b.columns(columns, octet);
    sums.multiply(acc, i, j, a.part, columns);
  }

  // Two neighbouring tiles of accumulators: 16 rows and 16 columns.
  static __device__ __forceinline__ Tile tile(const float (&left)[4], const float (&right)[4]) {
    const Words words[4] = {split(left[0], left[1]), split(left[2], left[3]), split(right[0], right[1]), split(right[2], right[3])};
    Tile result;
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
#pragma unroll
      for (int i = 0; i < 4; ++i) result.part[part][i] = words[i].part[part];
    return result;
  }

  // Two neighbouring tiles of operand B, 16 columns in all, which are then the tile's rows.
  template <int F>
  static __device__ __forceinline__ Tile tile(const Operand<F>& upper, const Operand<F>& lower) {
    Tile result;
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
#pragma unroll
      for (int which = 0; which < 2; ++which)
        result.part[part][2 * which] = upper.pair[which].part[part], result.part[part][2 * which + 1] = lower.pair[which].part[part];
    return result;
  }

  // The tile whose rows are `from`'s columns, by the warp together.
  static __device__ __forceinline__ Tile transposed(const Tile& from) {
    Tile result;
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
#pragma unroll
      for (int i = 0; i < 4; ++i) result.part[part][i / 2 + 2 * (i % 2)] = transpose_8x8(from.part[part][i]);
    return result;
  }

  // Operand A's tile that starts at `page`; and into it, for column tiles `step` (an even one) and the next.
  template <int PAGE>
  static __device__ __forceinline__ Tile load_tile(const float* page, int lane) {
    Tile result;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) load(result.part[part], page + part * PAGE + 4 * lane);
    return result;
  }

  template <int STEPS>
  static __device__ __forceinline__ void store_query(float* a, int row_tile, int step, int lane, const float (&c)[2][4]) {
    const Tile both = tile(c[0], c[1]);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) store(a + ((row_tile * (STEPS / 2) + step / 2) * PARTS + part) * 128 + 4 * lane, both.part[part]);
  }

  // The same for two column tiles of keys: for each 8 keys k and k', rounded and then the rests.
  template <int STEPS>
  static __device__ __forceinline__ void store_key(float* b, int row_tile, int step, int lane, const float (&c)[2][4]) {
    const Tile both = tile(c[0], c[1]);
    unsigned words[2][PARTS][2];
#pragma unroll
    for (int octet = 0; octet < 2; ++octet) both.columns(words[octet], octet);
    const unsigned(&quads)[PARTS][4] = reinterpret_cast<const unsigned(&)[PARTS][4]>(words);
#pragma unroll
    for (int quad = 0; quad < PARTS; ++quad) store(b + ((row_tile * (STEPS / 2) + step / 2) * PARTS + quad) * 128 + 4 * lane, quads[quad]);
  }

  // The same for two column tiles of values, transposed within the warp: for each 8 channels the keys' two pairs, rounded and then the rests.
  template <int STEPS, int STRIDE>
  static __device__ __forceinline__ void store_value(float* v, int row_tile, int step, int lane, const float (&c)[2][4]) {
    const Tile both = tile(c[0], c[1]);
    unsigned words[2][PARTS][2];
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i / 2][part][i % 2] = transpose_8x8(both.part[part][i]);
    const unsigned(&quads)[PARTS][4] = reinterpret_cast<const unsigned(&)[PARTS][4]>(words);
#pragma unroll
    for (int quad = 0; quad < PARTS; ++quad) store(v + ((row_tile * (STEPS / 2) + step / 2) * PARTS + quad) * 128 + 4 * lane, quads[quad]);
  }
};

// Asynchronous copies from global to shared memory (PTX ISA, cp.async), of BYTES (4, 8 or 16) each; what is not `real` becomes zeros and
// is not read. A thread's copies up to a commit_copies() are a group; wait_for_copies<N>() returns when all but its N latest groups are
// there, for this thread: others see them behind a barrier.
#ifdef __CUDACC__  // PTX; a host build brings its own versions of these functions

template <int BYTES>
__device__ __forceinline__ void copy_async(float* shared_to, const float* from, bool real) {
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared_to));
  const int size = real ? BYTES : 0;
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(size) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(size) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int GROUPS>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}

#endif

// Operand B of COLUMNS column tiles over a whole sum of K, in the registers of the lanes that multiply it. Math::Raw<F> is what
// a lane reads for one tile and one step of the sum, Math::Operand<F> what it multiplies: reading and packing are apart, so
// that other work can stand between a load and its first use.
template <typename Math, int K, int F, int COLUMNS>
struct HeldWeights {
  using Operand = typename Math::template Operand<F>;
  static constexpr int STEPS = K / Operand::STEP;
  typename Math::template Raw<F> raw[COLUMNS][STEPS];
  Operand values[COLUMNS][STEPS];

  template <typename LoadB>
  __device__ __forceinline__ void read(int lane, LoadB load_b) {
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
      for (int step = 0; step < STEPS; ++step) raw[j][step] = Math::template read<F>(j, step, lane, load_b);
  }

  __device__ __forceinline__ void pack() {
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
      for (int step = 0; step < STEPS; ++step) values[j][step] = Math::pack(raw[j][step]);
  }
};

// Where token g of eight is kept: in the order of their bits read backwards, so that tokens that are written or read together lie in different banks.
__device__ __forceinline__ int kept_place(int g) { return (g & 1) << 2 | (g & 2) | g >> 2; }

// Stage 1: load the block's tokens and normalise them (LayerNorm with the biased variance). NORM_LANES lanes share tokens
// g and g+8 of a row tile and keep them in registers between the mean and the variance. Tokens past the sequence's end,
// sequences past the last one and channels past DIM become zeros.
template <typename C>
struct NormWeights {  // of the channels that a lane serves, as they are in memory
  static constexpr int LANES = C::NORM_LANES, VEC = C::NORM_VECTOR, STEPS = ceil_div(C::PADDED_DIM, LANES * VEC);
  Word gain[STEPS][VEC / PER_WORD] = {}, shift[STEPS][VEC / PER_WORD] = {};

  __device__ __forceinline__ NormWeights(const Element* __restrict__ weight, const Element* __restrict__ bias) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const int channel = (step * LANES + threadIdx.x % LANES) * VEC;
      if constexpr (C::DIM % VEC == 0) {
        if (channel < C::DIM) load_constant(gain[step], weight + channel), load_constant(shift[step], bias + channel);
      } else {
        load_some<true>(gain[step], weight + channel, true, channel, C::DIM), load_some<true>(shift[step], bias + channel, true, channel, C::DIM);
      }
    }
  }
};

// Tokens g and g+8 of a row tile, as far as a lane reads them; the block takes several turns where it has more tokens.
template <typename C>
struct TokenPair {
  static constexpr int LANES = C::NORM_LANES, VEC = C::NORM_VECTOR, STEPS = NormWeights<C>::STEPS;
  static constexpr int PAIRS = C::ROWS / 2, AT_ONCE = C::THREADS / LANES, TURNS = ceil_div(PAIRS, AT_ONCE);
  Word words[2][STEPS][VEC / PER_WORD];

  static __device__ __forceinline__ int index(int turn) { return threadIdx.x / LANES + turn * AT_ONCE; }

  __device__ __forceinline__ void load_turn(const Element* x, int turn, int first, int sequences) {
    const int row_tile = index(turn) / 8, g = index(turn) % 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * row_tile + 8 * half + g, token = row % C::PADDED_LENGTH, sequence = first + row / C::PADDED_LENGTH;
      const bool real = (PAIRS % AT_ONCE == 0 || index(turn) < PAIRS) && token < C::LENGTH && sequence < sequences;
      const Element* from = x + (real ? C::offset(sequence, token) : 0);
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const int channel = (step * LANES + threadIdx.x % LANES) * VEC;
#pragma unroll
        for (int i = 0; i < VEC / PER_WORD; ++i) words[half][step][i] = Word{};
        if constexpr (C::DIM % VEC == 0) {
          if (real && channel < C::DIM) load(words[half][step], from + channel);
        } else {
          load_some<false>(words[half][step], from + channel, real, channel, C::DIM);
        }
      }
    }
  }
};

// `tokens` holds the first turn's; each further turn's are read while the one before is normalised.
template <typename C>
__device__ __forceinline__ void load_and_normalise(const Element* x, TokenPair<C>& tokens, const NormWeights<C>& weights, int first, int sequences, float* shared) {
  using Pair = TokenPair<C>;
  constexpr int LANES = Pair::LANES, VEC = Pair::VEC, STEPS = Pair::STEPS;
  const int lane = threadIdx.x % LANES;
#pragma unroll 1
  for (int turn = 0; turn < Pair::TURNS; ++turn) {
    Pair next;
    if (turn + 1 < Pair::TURNS) next.load_turn(x, turn + 1, first, sequences);
    const int row_tile = Pair::index(turn) / 8, g = Pair::index(turn) % 8;
    if (Pair::PAIRS % Pair::AT_ONCE != 0 && Pair::index(turn) >= Pair::PAIRS) break;
    float values[2][STEPS][VEC], mean[2], inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * row_tile + 8 * half + g;
      const bool real = row % C::PADDED_LENGTH < C::LENGTH && (C::SEQUENCES == 1 || first + row / C::PADDED_LENGTH < sequences);
      float sum = 0.0f, squares = 0.0f;
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        unpack(values[half][step], tokens.words[half][step]);
#pragma unroll
        for (int i = 0; i < VEC; ++i) sum += values[half][step][i];
      }
      mean[half] = group_sum<LANES>(sum) * (1.0f / C::DIM);
#pragma unroll
      for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          const float centred = values[half][step][i] - mean[half];
          if ((step * LANES + lane) * VEC + i < C::DIM) squares += centred * centred;
        }
      inverse[half] = rsqrtf(group_sum<LANES>(squares) * (1.0f / C::DIM) + C::EPSILON);
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const int channel = (step * LANES + lane) * VEC;
        if constexpr (C::KEEP_X)
          if (channel < C::DIM) store(reinterpret_cast<Element*>(shared + C::KEPT) + (16 * row_tile + 8 * half + kept_place(g)) * C::KEPT_STRIDE + channel, tokens.words[half][step]);  // rows are a multiple of VEC apart
        float gain[VEC], shift[VEC];
        unpack(gain, weights.gain[step]), unpack(shift, weights.shift[step]);
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          const float normed = fmaf((values[half][step][i] - mean[half]) * inverse[half], gain[i], shift[i]);
          values[half][step][i] = real && channel + i < C::DIM ? normed : 0.0f;
        }
      }
    }
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const int channel = (step * LANES + lane) * VEC;
      if (channel < C::PADDED_DIM) {
        constexpr int AT_ONCE = C::Math::STORED_TILES == 2 && C::FRAGMENT == 4 && VEC % 4 == 0 ? 4 : 2;
#pragma unroll
        for (int i = 0; i < VEC; i += AT_ONCE) {
          float upper[AT_ONCE], lower[AT_ONCE];
#pragma unroll
          for (int n = 0; n < AT_ONCE; ++n) upper[n] = values[0][step][i + n], lower[n] = values[1][step][i + n];
          C::Math::template store_rows<C::FRAGMENT, C::PADDED_DIM / 8, C::NORMED_PAGE>(shared + C::NORMED, row_tile, g, channel + i, upper, lower);
        }
      }
    }
    if constexpr (Pair::TURNS > 1) tokens = next;
  }
}

// Stage 2: q, k and v of the block's tokens. Warps stand ACROSS side by side over groups of column tiles; the others take
// further rows. A group's tiles are stored Math::STORED_TILES at once, which are neighbours in one head of one of q, k, v; from these to the
// group's next ones are COLUMN_GROUPS times as many. Each head's columns are padded to PADDED_HEAD_DIM.
template <typename C>
struct QkvProduct {
  using Math = typename C::Math;
  using Held = HeldWeights<Math, C::PADDED_DIM, C::FRAGMENT, C::QKV_COLUMNS>;
  static constexpr int COLUMN_GROUPS = 3 * C::INNER / 8 / C::QKV_COLUMNS, ROW_GROUPS = C::ROWS / 16 / C::QKV_ROWS;
  static constexpr int ACROSS = C::QKV_WARPS_ACROSS, DOWN = C::WARPS / ACROSS;
  static constexpr int AT_ONCE = Math::STORED_TILES;

  // Column tile j of a group.
  static __device__ __forceinline__ int column_tile(int j, int group) { return (j / AT_ONCE * COLUMN_GROUPS + group) * AT_ONCE + j % AT_ONCE; }

  // Weights of `column` (which counts through the padded heads of q, k and v) from channel k on: values, or the words that hold them.
  template <typename T, int N>
  static __device__ __forceinline__ void load_weights(const Element* __restrict__ weight, int column, int k, T (&to)[N]) {
    int row = column;
    bool real = true;
    if constexpr (C::HEAD_DIM < C::PADDED_HEAD_DIM) {
      const int head = column / C::PADDED_HEAD_DIM, within = column % C::PADDED_HEAD_DIM;  // head counts through q, k and v
      row = head * C::HEAD_DIM + within, real = within < C::HEAD_DIM;
    }
    const Element* from = weight + row * C::DIM + k;
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = T{};
    if constexpr (C::DIM % C::FRAGMENT == 0) {
      if (real && (C::DIM == C::PADDED_DIM || k < C::DIM)) load_here(to, from);
    } else {
      load_some<true>(to, from, real, k, C::DIM);
    }
  }

  // FRAGMENT weights of a column of tile j of the group, from channel k on.
  struct Load {
    const Element* __restrict__ weight;
    int group;

    template <typename T, int N>
    __device__ __forceinline__ void operator()(int j, int within_tile, int k, T (&to)[N]) const {
      load_weights(weight, column_tile(j, group) * 8 + within_tile, k, to);
    }
  };

  template <typename GetB>
  static __device__ __forceinline__ void rows(float* shared, int group, int warp, int lane, GetB operand) {
    constexpr int STEPS = C::INNER / 8;
#pragma unroll 1
    for (int turn = 0; turn < ceil_div(ROW_GROUPS, DOWN); ++turn) {
      const int row_group = warp / ACROSS + turn * DOWN, first_tile = row_group * C::QKV_ROWS;
      if (ROW_GROUPS % DOWN != 0 && row_group >= ROW_GROUPS) break;
      float acc[C::QKV_ROWS][C::QKV_COLUMNS][4] = {};
      Math::template product<C::PADDED_DIM, C::FRAGMENT, C::NORMED_PAGE>(acc, shared + C::NORMED + first_tile * C::NORMED_PAGES * C::NORMED_PAGE, lane, operand);
#pragma unroll
      for (int j = 0; j < C::QKV_COLUMNS; j += AT_ONCE) {
        constexpr int EACH = C::QKV_COLUMNS / 3;  // a group with as many tiles of q as of k and v knows which is which
        const int which = C::QKV_COLUMNS % 3 == 0 ? j / (EACH > 0 ? EACH : 1) : column_tile(j, group) / STEPS;
        const int step = column_tile(j, group) - which * STEPS;
#pragma unroll
        for (int i = 0; i < C::QKV_ROWS; ++i) {
          const float(&tiles)[AT_ONCE][4] = reinterpret_cast<const float(&)[AT_ONCE][4]>(acc[i][j]);
          if (which == 0)
            Math::template store_query<STEPS>(shared + C::QUERY, first_tile + i, step, lane, tiles);
          else if (which == 1)
            Math::template store_key<STEPS>(shared + C::KEY, first_tile + i, step, lane, tiles);
          else
            Math::template store_value<STEPS, C::VALUE_STRIDE>(shared + C::VALUE, first_tile + i, step, lane, tiles);
        }
      }
    }
  }

  // Weights held in registers for all rows; with the first column group's already there when PREFETCHED.
  template <bool PREFETCHED>
  static __device__ __forceinline__ void run(float* shared, const Element* __restrict__ weight, Held& held) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int turn = 0; turn < ceil_div(COLUMN_GROUPS, ACROSS); ++turn) {
      const int group = warp % ACROSS + turn * ACROSS;
      if (COLUMN_GROUPS % ACROSS != 0 && group >= COLUMN_GROUPS) break;
      if (!PREFETCHED || turn > 0) held.read(lane, Load{weight, group});
      held.pack();
      rows(shared, group, warp, lane, [&](int j, int step) { return held.values[j][step]; });
    }
  }

  // Weights read from global memory (and the caches) at each use.
  static __device__ __forceinline__ void run_streaming(float* shared, const Element* __restrict__ weight) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int turn = 0; turn < ceil_div(COLUMN_GROUPS, ACROSS); ++turn) {
      const int group = warp % ACROSS + turn * ACROSS;
      if (COLUMN_GROUPS % ACROSS != 0 && group >= COLUMN_GROUPS) break;
      rows(shared, group, warp, lane, [&](int j, int step) { return Math::pack(Math::template read<C::FRAGMENT>(j, step, lane, Load{weight, group})); });
    }
  }
};

// Stage 3: softmax(q k^T / sqrt(HEAD_DIM)) v, a warp for 16 queries of one head, streaming over tiles of keys with a running
// maximum and sum (Milakov and Gimelshein 2018), so that no row of scores is ever stored. The result takes the place of the queries in
// shared memory, in the same fragments: these 16 rows of one head are read by this warp alone, each quadruple by the lane that replaces it
// (or, in Ffma, by lanes of the same row).
template <typename C>
struct Attention {
  using Math = typename C::Math;
  static constexpr int TILES = C::PADDED_LENGTH / 16, UNITS = C::SEQUENCES * TILES * C::HEADS, STEPS = C::INNER / 8;
  static constexpr int KEYS = C::KEY_TILE / 8, COLUMNS = C::PADDED_HEAD_DIM / 8, KEY_STEPS = C::PADDED_LENGTH / C::KEY_TILE;

  // q, k and v of one row tile and head as fragments in shared memory.
  struct Shared {
    static constexpr bool IN_SHARED = true;
    static constexpr int UNROLL = KEY_STEPS <= 4 ? KEY_STEPS : 1;
    const float* shared;
    int tile, head, lane;

    __device__ __forceinline__ int first_key(int step) const { return tile / TILES * TILES + step * (C::KEY_TILE / 16); }

    __device__ __forceinline__ void scores(float (&p)[1][KEYS][4], int step) const {
      Math::template scores<COLUMNS, STEPS>(p, shared + C::QUERY, shared + C::KEY, tile, first_key(step), head * COLUMNS, lane);
    }

    __device__ __forceinline__ void weighted_sum(float (&out)[1][COLUMNS][4], const float (&p)[1][KEYS][4], int step) const {
      Math::template weighted_sum<STEPS, C::VALUE_STRIDE>(out, p, shared + C::VALUE, first_key(step), head * COLUMNS, lane);
    }
  };

  static __device__ __forceinline__ void run(float* shared) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int turn = 0; turn < ceil_div(UNITS, C::WARPS); ++turn) {
      const int unit = warp + turn * C::WARPS;
      if (UNITS % C::WARPS != 0 && unit >= UNITS) break;
      const int head = unit % C::HEADS, tile = unit / C::HEADS;
      attend(shared, Shared{shared, tile, head, lane}, tile, head, lane);
    }
  }

  // One row tile and head; operands.scores(p, step) and operands.weighted_sum(out, p, step) multiply a step's keys and values.
  template <typename Operands>
  static __device__ __forceinline__ void attend(float* shared, const Operands& operands, int tile, int head, int lane) {
    float out[1][COLUMNS][4] = {};
    float sum[2] = {}, highest[2] = {minus_infinity(), minus_infinity()};
#pragma unroll Operands::UNROLL
    for (int step = 0; step < KEY_STEPS; ++step) {
      float p[1][KEYS][4] = {};
      operands.scores(p, step);
      if constexpr (C::LENGTH < C::PADDED_LENGTH) {
#pragma unroll
        for (int j = 0; j < KEYS; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            if (step * C::KEY_TILE + 8 * j + 2 * (lane % 4) + i % 2 >= C::LENGTH) p[0][j][i] = minus_infinity();
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float now = highest[half];
#pragma unroll
        for (int j = 0; j < KEYS; ++j) now = fmaxf(now, fmaxf(p[0][j][2 * half], p[0][j][2 * half + 1]));
        now = group_max<4>(now);
        const float bias = now * C::EXPONENT_SCALE;
        const float correction = exp2_approx(fmaf(highest[half], C::EXPONENT_SCALE, -bias));
        float tile_sum = 0.0f;
#pragma unroll
        for (int j = 0; j < KEYS; ++j)
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            p[0][j][i] = exp2_approx(fmaf(p[0][j][i], C::EXPONENT_SCALE, -bias));
            tile_sum += p[0][j][i];
          }
        if (step > 0) {
          sum[half] *= correction;
#pragma unroll
          for (int j = 0; j < COLUMNS; ++j) out[0][j][2 * half] *= correction, out[0][j][2 * half + 1] *= correction;
        }
        sum[half] += tile_sum;
        highest[half] = now;
      }
      operands.weighted_sum(out, p, step);
    }
    if constexpr (Operands::IN_SHARED) __syncwarp();  // the queries have been read
    const float upper = __fdividef(1.0f, group_sum<4>(sum[0])), lower = __fdividef(1.0f, group_sum<4>(sum[1]));
    constexpr int AT_ONCE = Math::STORED_TILES;
#pragma unroll
    for (int j = 0; j < COLUMNS; j += AT_ONCE) {
      float c[AT_ONCE][4];
#pragma unroll
      for (int next = 0; next < AT_ONCE; ++next)
#pragma unroll
        for (int i = 0; i < 4; ++i) c[next][i] = out[0][j + next][i] * (i < 2 ? upper : lower);
      Math::template store_query<STEPS>(shared + C::QUERY, tile, head * COLUMNS + j, lane, c);
    }
  }
};

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

// Stages 2 and 3 without shared memory between them: a warp computes q, k and v of one head for all tokens of one sequence, keeps them as
// operands in registers, and then its attention. Accumulators of q are where operand A of the scores has to be, those of k where their
// operand B has to be, and those of v, transposed within the warp, where operand B of the weighted sum has to be.
// The weights are held in portions: MATRICES of q, k and v for 16 channels of the head. Row tiles go ROWS at a time, with a __syncwarp between, over
// which the compiler moves no loads: it would fetch the tokens of all of them at once, and run out of registers.
template <typename C>
struct HeadRegisters {
  using Math = typename C::Math;
  using Tile = typename Math::Tile;
  static constexpr int TILES = C::PADDED_LENGTH / 16, SLICES = C::PADDED_HEAD_DIM / 16, ROWS = C::QKV_ROWS;
  static constexpr int MATRICES = C::QKV_COLUMNS / 2, TURNS = 3 / MATRICES, PORTIONS = TURNS * SLICES;
  using Held = HeldWeights<Math, C::PADDED_DIM, C::FRAGMENT, 2 * MATRICES>;

  Tile operands[3][TILES][SLICES];  // q, k and v transposed

  static __device__ __forceinline__ int head() { return static_cast<int>(threadIdx.x) / 32 % C::HEADS; }
  static __device__ __forceinline__ int sequence() { return threadIdx.x / 32 / C::HEADS; }

  // Which of q, k and v the matrix `m` of a portion is: q comes last, as it is needed first.
  static __device__ __forceinline__ constexpr int matrix(int portion, int m) { return MATRICES == 3 ? m : (portion % TURNS + 1) % 3; }

  // FRAGMENT weights of a column of tile j of a portion, from channel k on.
  struct Load {
    const Element* __restrict__ weight;
    int portion;

    template <typename T, int N>
    __device__ __forceinline__ void operator()(int j, int within_tile, int k, T (&to)[N]) const {
      const int column = (matrix(portion, j / 2) * C::HEADS + head()) * C::PADDED_HEAD_DIM + 16 * (portion / TURNS) + 8 * (j % 2) + within_tile;
      if constexpr (C::WEIGHTS_SHARED) {
        load(to, weight + SharedWeights<C>::qkv_place(column - within_tile, within_tile, k));
        return;
      }
      QkvProduct<C>::load_weights(weight, column, k, to);
    }
  };

  // `held` has the first portion's weights; those of further ones are read here.
  __device__ __forceinline__ void project(const float* shared, const Element* __restrict__ weight, Held& held) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int portion = 0; portion < PORTIONS; ++portion) {
      if (portion > 0) {
        __syncwarp();
        held.read(lane, Load{weight, portion}), held.pack();
      }
#pragma unroll
      for (int first = 0; first < TILES; first += ROWS) {
        __syncwarp();
        multiply(shared, held, portion, first, lane);
      }
    }
  }

  // One portion for ROWS row tiles.
  __device__ __forceinline__ void multiply(const float* shared, const Held& held, int portion, int first, int lane) {
    const float* a = shared + C::NORMED + (sequence() * TILES + first) * C::NORMED_PAGES * C::NORMED_PAGE;
    float acc[ROWS][2 * MATRICES][4] = {};
    typename Math::template Sums<ROWS, 2 * MATRICES> sums;
#pragma unroll
    for (int step = 0; step < Held::STEPS; ++step) {
      Tile tokens[ROWS];
#pragma unroll
      for (int i = 0; i < ROWS; ++i) tokens[i] = Math::template load_tile<C::NORMED_PAGE>(a + (i * Held::STEPS + step) * Math::PAGES * C::NORMED_PAGE, lane);
#pragma unroll
      for (int m = 0; m < MATRICES; ++m) {
        const Tile weights = Math::tile(held.values[2 * m][step], held.values[2 * m + 1][step]);
#pragma unroll
        for (int octet = 0; octet < 2; ++octet)
#pragma unroll
          for (int i = 0; i < ROWS; ++i) Math::multiply(acc, sums, i, 2 * m + octet, tokens[i], weights, octet);
      }
    }
    sums.add_to(acc);
#pragma unroll
    for (int m = 0; m < MATRICES; ++m)
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
        const Tile result = Math::tile(acc[i][2 * m], acc[i][2 * m + 1]);
        operands[matrix(portion, m)][first + i][portion / TURNS] = matrix(portion, m) == 2 ? Math::transposed(result) : result;
      }
  }

  // Those of row tile `tile`, as Attention::attend multiplies them.
  struct RowTile {
    static constexpr bool IN_SHARED = false;
    static constexpr int KEYS = C::KEY_TILE / 8, UNROLL = C::PADDED_LENGTH / C::KEY_TILE;
    const Tile (&operands)[3][TILES][SLICES];
    int tile;

    __device__ __forceinline__ void scores(float (&p)[1][KEYS][4], int step) const {
      typename Math::template Sums<1, KEYS> sums;
#pragma unroll
      for (int slice = 0; slice < SLICES; ++slice)
#pragma unroll
        for (int j = 0; j < KEYS; ++j)
          Math::multiply(p, sums, 0, j, operands[0][tile][slice], operands[1][step * (KEYS / 2) + j / 2][slice], j % 2);
      sums.add_to(p);
    }

    __device__ __forceinline__ void weighted_sum(float (&out)[1][2 * SLICES][4], const float (&p)[1][KEYS][4], int step) const {
      typename Math::template Sums<1, 2 * SLICES> sums;
#pragma unroll
      for (int pair = 0; pair < KEYS / 2; ++pair) {
        const Tile weights = Math::tile(p[0][2 * pair], p[0][2 * pair + 1]);
#pragma unroll
        for (int j = 0; j < 2 * SLICES; ++j) Math::multiply(out, sums, 0, j, weights, operands[2][step * (KEYS / 2) + pair][j / 2], j % 2);
      }
      sums.add_to(out);
    }
  };

  __device__ __forceinline__ void attend(float* shared) const {
#pragma unroll
    for (int first = 0; first < TILES; first += ROWS) {
      __syncwarp();
#pragma unroll
      for (int tile = first; tile < first + ROWS; ++tile)
        Attention<C>::attend(shared, RowTile{operands, tile}, sequence() * TILES + tile, head(), threadIdx.x % 32);
    }
  }
};

// Stage 4: output product, bias and residual, written to the grid by stride.
template <typename C>
struct OutProduct {
  using Math = typename C::Math;
  using Held = HeldWeights<Math, C::INNER, 2, C::OUT_COLUMNS>;
  static constexpr int COLUMN_GROUPS = ceil_div(C::DIM, 8) / C::OUT_COLUMNS, ROW_GROUPS = C::ROWS / 16 / C::OUT_ROWS;
  static constexpr int ACROSS = C::OUT_WARPS_ACROSS, DOWN = C::WARPS / ACROSS;

  // Two weights of a column of tile j of the group, from padded inner column k on: values, or the word that holds them.
  struct Load {
    const Element* __restrict__ weight;
    int group;

    template <typename T, int N>
    __device__ __forceinline__ void operator()(int j, int within_tile, int k, T (&to)[N]) const {
      const int column = (group * C::OUT_COLUMNS + j) * 8 + within_tile;
      if constexpr (C::WEIGHTS_SHARED) {
        load(to, weight + SharedWeights<C>::out_place(column - within_tile, within_tile, k));
        return;
      }
      const bool real = C::DIM % 8 == 0 || column < C::DIM;
      const int within = C::HEAD_DIM < C::PADDED_HEAD_DIM ? k % C::PADDED_HEAD_DIM : 0;
      const Element* from = weight + column * C::DIM + k - k / C::PADDED_HEAD_DIM * (C::PADDED_HEAD_DIM - C::HEAD_DIM);
#pragma unroll
      for (int i = 0; i < N; ++i) to[i] = T{};
      if constexpr (C::HEAD_DIM % 2 == 0) {
        if (real && within < C::HEAD_DIM) load_here(to, from);
      } else {
        load_some<true>(to, from, real, within, C::HEAD_DIM);
      }
    }
  };

  template <typename GetB>
  static __device__ __forceinline__ void rows(const float* shared, const Element* x, Element* y, const Element* __restrict__ bias, int first, int sequences,
                                              int group, int warp, int lane, GetB operand) {
#pragma unroll 1
    for (int turn = 0; turn < ceil_div(ROW_GROUPS, DOWN); ++turn) {
      const int row_group = warp / ACROSS + turn * DOWN, first_tile = row_group * C::OUT_ROWS;
      if (ROW_GROUPS % DOWN != 0 && row_group >= ROW_GROUPS) break;
      Word residual[C::OUT_ROWS][C::OUT_COLUMNS][2][2 / PER_WORD];
      each_pair(first, sequences, first_tile, group, lane, [&](int i, int j, int half, int row, int column, long long at) {
        if constexpr (C::KEEP_X) {
          load(residual[i][j][half], reinterpret_cast<const Element*>(shared + C::KEPT) + (row - lane / 4 + kept_place(lane / 4)) * C::KEPT_STRIDE + column);  // zeros past DIM
        } else {
          load_pair(residual[i][j][half], x + at, column);
        }
      });
      float biases[C::OUT_COLUMNS][2];
#pragma unroll
      for (int j = 0; j < C::OUT_COLUMNS; ++j) {
        const int column = (group * C::OUT_COLUMNS + j) * 8 + 2 * (lane % 4);
        if (C::DIM % 8 == 0 || column < C::DIM) load_pair(biases[j], bias + column, column);
      }
      float acc[C::OUT_ROWS][C::OUT_COLUMNS][4] = {};
      Math::template product<C::INNER, 2, 128>(acc, shared + C::QUERY + first_tile * C::QUERY_PAGES * 128, lane, operand);
      each_pair(first, sequences, first_tile, group, lane, [&](int i, int j, int half, int, int column, long long at) {
        float kept[2];
        unpack(kept, residual[i][j][half]);
        const float pair[2] = {biases[j][0] + (acc[i][j][2 * half] + kept[0]), biases[j][1] + (acc[i][j][2 * half + 1] + kept[1])};
        if constexpr (C::DIM % 2 == 0) {
          store_global(y + at, pair);
        } else {
          put(y + at, pair[0]);
          if (column + 1 < C::DIM) put(y + at + 1, pair[1]);
        }
      });
    }
  }

  // Two neighbouring channels, the second only where there is one: as values, or as they are in memory.
  template <typename T, int N>
  static __device__ __forceinline__ void load_pair(T (&to)[N], const Element* from, int column) {
    if constexpr (C::DIM % 2 == 0) {
      load(to, from);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) to[i] = T{};
      load_some<false>(to, from, true, column, C::DIM);
    }
  }

  // Calls f for each pair of neighbouring outputs of this lane that exists.
  template <typename F>
  static __device__ __forceinline__ void each_pair(int first, int sequences, int first_tile, int group, int lane, F f) {
#pragma unroll
    for (int i = 0; i < C::OUT_ROWS; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = 16 * (first_tile + i) + 8 * half + lane / 4;
        const int token = row % C::PADDED_LENGTH, sequence = first + row / C::PADDED_LENGTH;
        if (token >= C::LENGTH || (C::SEQUENCES > 1 && sequence >= sequences)) continue;
        const long long start = C::offset(sequence, token);
#pragma unroll
        for (int j = 0; j < C::OUT_COLUMNS; ++j) {
          const int column = (group * C::OUT_COLUMNS + j) * 8 + 2 * (lane % 4);
          if (C::DIM % 8 == 0 || column < C::DIM) f(i, j, half, row, column, start + column);
        }
      }
  }

  // Weights held in registers for all rows; with the first column group's already there when PREFETCHED.
  template <bool PREFETCHED>
  static __device__ __forceinline__ void run(const float* shared, const Element* x, Element* y, const Element* __restrict__ weight,
                                             const Element* __restrict__ bias, int first, int sequences, Held& held) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int turn = 0; turn < ceil_div(COLUMN_GROUPS, ACROSS); ++turn) {
      const int group = warp % ACROSS + turn * ACROSS;
      if (COLUMN_GROUPS % ACROSS != 0 && group >= COLUMN_GROUPS) break;
      if (!PREFETCHED || turn > 0) held.read(lane, Load{weight, group});
      held.pack();
      rows(shared, x, y, bias, first, sequences, group, warp, lane, [&](int j, int step) { return held.values[j][step]; });
    }
  }

  // Weights held in registers, packed, where one turn takes all columns.
  static __device__ __forceinline__ void run_held(const float* shared, const Element* x, Element* y, const Element* __restrict__ bias, int first, int sequences,
                                                  const Held& held) {
    static_assert(COLUMN_GROUPS == ACROSS, "the weights of one column group are held");
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    rows(shared, x, y, bias, first, sequences, warp % ACROSS, warp, lane, [&](int j, int step) { return held.values[j][step]; });
  }

  // Weights read from global memory (and the caches) at each use.
  static __device__ __forceinline__ void run_streaming(const float* shared, const Element* x, Element* y, const Element* __restrict__ weight,
                                                       const Element* __restrict__ bias, int first, int sequences) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int turn = 0; turn < ceil_div(COLUMN_GROUPS, ACROSS); ++turn) {
      const int group = warp % ACROSS + turn * ACROSS;
      if (COLUMN_GROUPS % ACROSS != 0 && group >= COLUMN_GROUPS) break;
      rows(shared, x, y, bias, first, sequences, group, warp, lane,
           [&](int j, int step) { return Math::pack(Math::template read<2>(j, step, lane, Load{weight, group})); });
    }
  }
};

// Rows: sequences of 32 tokens, 64 elements apart.
struct Row {
  // The block
  static constexpr int DIM = 64, HEADS = 4, HEAD_DIM = 16, LENGTH = 32;
  static constexpr float EPSILON = 1.000000000e-05f;
  static constexpr float EXPONENT_SCALE = 3.606737602e-01f;  // log2(e) / sqrt(HEAD_DIM)

  // The configuration
  using Math = HalfCore<Bf16, 1>;
  static constexpr int SEQUENCES = 1, WARPS = 4, THREADS = 32 * WARPS, MIN_BLOCKS = 1;
  static constexpr int NORM_LANES = 8, NORM_VECTOR = 4;
  static constexpr int QKV_ROWS = 2, QKV_COLUMNS = 6, QKV_WARPS_ACROSS = 4;
  static constexpr int OUT_ROWS = 2, OUT_COLUMNS = 2, OUT_WARPS_ACROSS = 4;
  static constexpr int KEY_TILE = 32, FRAGMENT = 4;
  static constexpr bool KEEP_X = true;

  // Padded sizes, and shared memory in floats: where each matrix starts, and how far its fragments or rows are apart
  static constexpr int PADDED_DIM = 64, PADDED_HEAD_DIM = 16, INNER = 64, PADDED_LENGTH = 32, ROWS = 32;
  static constexpr int NORMED = 0, NORMED_PAGE = 144, NORMED_PAGES = 4;  // of a row tile
  static constexpr int QUERY = 1152, QUERY_PAGES = 4;  // the attention's result
  static constexpr int KEPT = 2176, KEPT_STRIDE = 72;  // in elements
  static constexpr bool WEIGHTS_SHARED = true;
  static constexpr int QKV_WEIGHT = 3328, QKV_WEIGHT_STRIDE = 64, QKV_WEIGHT_SWIZZLE = 2;  // the stride in elements
  static constexpr int OUT_WEIGHT = 9472, OUT_WEIGHT_STRIDE = 64, OUT_WEIGHT_SWIZZLE = 1;  // the stride in elements

  // Where a token's channels start in x and y
  static __device__ __forceinline__ long long offset(int sequence, int token) {
    return (static_cast<long long>(sequence) * LENGTH + token) * DIM;
  }
};

// Columns: sequences of 32 tokens, 2048 elements apart.
struct Column {
  // The block
  static constexpr int DIM = 64, HEADS = 4, HEAD_DIM = 16, LENGTH = 32;
  static constexpr float EPSILON = 1.000000000e-05f;
  static constexpr float EXPONENT_SCALE = 3.606737602e-01f;  // log2(e) / sqrt(HEAD_DIM)

  // The configuration
  using Math = HalfCore<Bf16, 1>;
  static constexpr int SEQUENCES = 1, WARPS = 4, THREADS = 32 * WARPS, MIN_BLOCKS = 1;
  static constexpr int NORM_LANES = 8, NORM_VECTOR = 4;
  static constexpr int QKV_ROWS = 2, QKV_COLUMNS = 6, QKV_WARPS_ACROSS = 4;
  static constexpr int OUT_ROWS = 2, OUT_COLUMNS = 2, OUT_WARPS_ACROSS = 4;
  static constexpr int KEY_TILE = 32, FRAGMENT = 4;
  static constexpr bool KEEP_X = true;

  // Padded sizes, and shared memory in floats: where each matrix starts, and how far its fragments or rows are apart
  static constexpr int PADDED_DIM = 64, PADDED_HEAD_DIM = 16, INNER = 64, PADDED_LENGTH = 32, ROWS = 32;
  static constexpr int NORMED = 0, NORMED_PAGE = 144, NORMED_PAGES = 4;  // of a row tile
  static constexpr int QUERY = 1152, QUERY_PAGES = 4;  // the attention's result
  static constexpr int KEPT = 2176, KEPT_STRIDE = 72;  // in elements
  static constexpr bool WEIGHTS_SHARED = true;
  static constexpr int QKV_WEIGHT = 3328, QKV_WEIGHT_STRIDE = 64, QKV_WEIGHT_SWIZZLE = 2;  // the stride in elements
  static constexpr int OUT_WEIGHT = 9472, OUT_WEIGHT_STRIDE = 64, OUT_WEIGHT_SWIZZLE = 1;  // the stride in elements

  // Where a token's channels start in x and y
  static __device__ __forceinline__ long long offset(int sequence, int token) {
    constexpr int WIDTH = 32;
    const int image = sequence / WIDTH, column = sequence % WIDTH;
    return ((static_cast<long long>(image) * LENGTH + token) * WIDTH + column) * DIM;
  }
};

extern "C" __global__ void __launch_bounds__(Row::THREADS, Row::MIN_BLOCKS)
axial_row(const Element* x, Element* y, const Element* __restrict__ norm_weight, const Element* __restrict__ norm_bias,
          const Element* __restrict__ qkv_weight, const Element* __restrict__ out_weight, const Element* __restrict__ out_bias, int sequences) {
  extern __shared__ __align__(16) float shared[];
const Element *const qkv_shared = SharedWeights<Row>::qkv(shared), *const out_shared = SharedWeights<Row>::out(shared);
  const int first = blockIdx.x * Row::SEQUENCES;
  TokenPair<Row> tokens;
  allow_next_kernel();
  tokens.load_turn(x, 0, first, sequences);
  const NormWeights<Row> norm(norm_weight, norm_bias);
  SharedWeights<Row>::copy(shared, qkv_weight, out_weight);
  HeadRegisters<Row>::Held qkv_held;
  load_and_normalise<Row>(x, tokens, norm, first, sequences, shared);
  wait_for_copies<0>();
  __syncthreads();
  qkv_held.read(threadIdx.x % 32, HeadRegisters<Row>::Load{qkv_shared, 0});
  qkv_held.pack();
  HeadRegisters<Row> heads;
  heads.project(shared, qkv_shared, qkv_held);
  heads.attend(shared);
  __syncthreads();
  OutProduct<Row>::Held out_held;
  OutProduct<Row>::run<false>(shared, x, y, out_shared, out_bias, first, sequences, out_held);
}

extern "C" __global__ void __launch_bounds__(Column::THREADS, Column::MIN_BLOCKS)
axial_col(const Element* x, Element* y, const Element* __restrict__ norm_weight, const Element* __restrict__ norm_bias,
          const Element* __restrict__ qkv_weight, const Element* __restrict__ out_weight, const Element* __restrict__ out_bias, int sequences) {
  extern __shared__ __align__(16) float shared[];
const Element *const qkv_shared = SharedWeights<Column>::qkv(shared), *const out_shared = SharedWeights<Column>::out(shared);
  const int first = blockIdx.x * Column::SEQUENCES;
  TokenPair<Column> tokens;
  allow_next_kernel();
  const NormWeights<Column> norm(norm_weight, norm_bias);
  SharedWeights<Column>::copy(shared, qkv_weight, out_weight);
  HeadRegisters<Column>::Held qkv_held;
  wait_for_copies<0>();
  __syncthreads();
  qkv_held.read(threadIdx.x % 32, HeadRegisters<Column>::Load{qkv_shared, 0});
  qkv_held.pack();
  wait_for_previous_kernel();
  tokens.load_turn(x, 0, first, sequences);
  load_and_normalise<Column>(x, tokens, norm, first, sequences, shared);
  __syncthreads();
  HeadRegisters<Column> heads;
  heads.project(shared, qkv_shared, qkv_held);
  heads.attend(shared);
  __syncthreads();
  OutProduct<Column>::Held out_held;
  OutProduct<Column>::run<false>(shared, x, y, out_shared, out_bias, first, sequences, out_held);
}

'''

# How the kernels are launched from PyTorch: an op on PyTorch's stable C++ interface. It is compiled beside the kernels, by the host's compiler.
LAUNCH_SOURCE = r'''
#include <atomic>
#include <climits>
#include <stdexcept>
#include <string>
#include <cuda.h>
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

// The kernels are in a file of their own, which needs none of these headers: their addresses, in the order of launching.
extern "C" const void* axialtune_kernel(int index);

namespace {

using torch::stable::Tensor;

// Not STD_TORCH_CHECK: its string stream crashes where the compiler links libstdc++ into this library beside PyTorch's own.
[[noreturn]] void refuse(const std::string& why) { throw std::runtime_error(why); }

void check(cudaError_t code, const char* what) {
  if (code != cudaSuccess) {
    cudaGetLastError();  // so that the next CUDA call does not report this error again
    refuse(std::string(what) + ": " + cudaGetErrorString(code));
  }
}

bool aligned(const Tensor& t) { return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0; }

// t itself where the kernels can read it as it is, else a contiguous copy that starts on 16 bytes.
Tensor dense(const Tensor& t) {
  if (t.is_contiguous() && aligned(t)) return t;
  const Tensor copy = torch::stable::contiguous(t);
  return aligned(copy) ? copy : torch::stable::clone(copy);
}

// The parameter `name` of `rows` by `columns` elements (columns 0: a vector) on x's device, as the kernels read it.
Tensor parameter(const Tensor& t, const char* name, int64_t rows, int64_t columns, int32_t device) {
  if (t.scalar_type() != torch::headeronly::ScalarType::BFloat16) refuse(std::string(name) + " must be bfloat16");
  if (!t.is_cuda() || t.get_device_index() != device) refuse(std::string(name) + " must be on the input's device, cuda:" + std::to_string(device));
  const bool fits = columns == 0 ? t.dim() == 1 && t.size(0) == rows : t.dim() == 2 && t.size(0) == rows && t.size(1) == columns;
  if (!fits) refuse(std::string(name) + " has the wrong shape: the kernels are built for dim 64");
  return dense(t);
}

const void* data(const Tensor& t) { return t.const_data_ptr(); }

// A new contiguous tensor, by PyTorch's C interface: torch::stable::new_empty looks its op up by name at each call.
template <size_t N>
Tensor made(const int64_t (&sizes)[N], int32_t device) {
  int64_t strides[N], elements = 1;
  for (size_t i = N; i-- > 0; elements *= sizes[i]) strides[i] = elements;
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(N, sizes, strides, aoti_torch_dtype_bfloat16(), aoti_torch_device_type_cuda(), device, &handle) != 0)
    refuse("PyTorch could not allocate " + std::to_string(elements) + " elements of bfloat16 on cuda:" + std::to_string(device));
  return Tensor(handle);
}

struct Launch {
  const void* kernel;
  int64_t blocks;
  int threads, shared_bytes;
  bool early;  // it begins while the kernel before it ends, and waits before it touches what that one does
  int32_t device;
  cudaStream_t stream;
};

constexpr int DEVICES = 64;  // the first ones, for which a kernel's handle is kept
using Handles = std::atomic<cudaFunction_t>[DEVICES];

// The kernel's handle on the device, nullptr where none is kept. The first time, the kernel is opted in to more than 48 KB of shared memory.
cudaFunction_t handle_of(const Launch& launch, Handles& handles) {
  const bool kept = launch.device < DEVICES;
  cudaFunction_t handle = kept ? handles[launch.device].load(std::memory_order_acquire) : nullptr;
  if (handle) return handle;
  if (launch.shared_bytes > 48 * 1024) {
    const cudaError_t code = cudaFuncSetAttribute(launch.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, launch.shared_bytes);
    check(code, "the GPU has not the shared memory these kernels need");
  }
  if (kept) {
    check(cudaGetFuncBySymbol(&handle, launch.kernel), "the kernels could not be loaded");
    handles[launch.device].store(handle, std::memory_order_release);
  }
  return handle;
}

using DriverLaunch = decltype(&cuLaunchKernelEx);

// The driver's launching function, nullptr where it has none: asked for at run time, so that the library is not linked with the driver.
DriverLaunch driver_launch() {
  void* found = nullptr;
#if CUDART_VERSION >= 13000
  const cudaError_t code = cudaGetDriverEntryPointByVersion("cuLaunchKernelEx", &found, 12000, cudaEnableDefault, nullptr);
#else
  const cudaError_t code = cudaGetDriverEntryPoint("cuLaunchKernelEx", &found, cudaEnableDefault, nullptr);
#endif
  check(code, "the CUDA driver could not be asked for its launching function");
  return reinterpret_cast<DriverLaunch>(found);
}

// By the driver, which takes less time than the runtime. What the driver refuses is left to the runtime, which gives a thread the CUDA context
// that it lacks, and says what is wrong.
cudaError_t launch_by_either(const Launch& launch, Handles& handles, void** arguments) {
  static const DriverLaunch by_driver = driver_launch();
  const unsigned blocks = static_cast<unsigned>(launch.blocks), threads = static_cast<unsigned>(launch.threads);
  const unsigned shared_bytes = static_cast<unsigned>(launch.shared_bytes);
  if (const cudaFunction_t handle = handle_of(launch, handles); handle && by_driver) {
    CUlaunchAttribute overlap{};
    overlap.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    overlap.value.programmaticStreamSerializationAllowed = 1;
    const CUlaunchConfig config{blocks, 1, 1, threads, 1, 1, shared_bytes, launch.stream, &overlap, launch.early};
    if (by_driver(&config, handle, arguments, nullptr) == CUDA_SUCCESS) return cudaSuccess;
  }
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  const cudaLaunchConfig_t config{dim3(blocks), dim3(threads), shared_bytes, launch.stream, &overlap, launch.early};
  return cudaLaunchKernelExC(&config, launch.kernel, arguments);
}

// Launches a kernel that takes so many pointers and then a number of items.
template <size_t N>
cudaError_t launch_kernel(const Launch& launch, Handles& handles, const void* const (&pointers)[N], int items) {
  void* arguments[N + 1];
  for (size_t i = 0; i < N; ++i) arguments[i] = const_cast<const void**>(&pointers[i]);
  arguments[N] = &items;
  return launch_by_either(launch, handles, arguments);
}

// x: (batch, 32, 32, 64) bfloat16 on a CUDA device, of any strides; the result is contiguous.
Tensor launch(Tensor given, Tensor row_norm_weight, Tensor row_norm_bias, Tensor row_qkv_weight, Tensor row_out_weight, Tensor row_out_bias, Tensor col_norm_weight, Tensor col_norm_bias, Tensor col_qkv_weight, Tensor col_out_weight, Tensor col_out_bias) {
  if (!given.is_cuda()) refuse("the input must be on a CUDA device");
  if (given.scalar_type() != torch::headeronly::ScalarType::BFloat16) refuse("the input must be bfloat16");
  if (given.dim() != 4 || given.size(1) != 32 || given.size(2) != 32 || given.size(3) != 64)
    refuse("the input must be (batch, 32, 32, 64)");
  const int32_t device = given.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const Tensor x = dense(given);
  const int64_t batch = x.size(0);
  if (batch > INT_MAX / 32) refuse("batch " + std::to_string(batch) + " is too large: split the input");
  const Tensor y = made({batch, 32, 32, 64}, device);
  if (batch == 0) return y;
  row_norm_weight = parameter(row_norm_weight, "row_norm_weight", 64, 0, device);
  row_norm_bias = parameter(row_norm_bias, "row_norm_bias", 64, 0, device);
  row_qkv_weight = parameter(row_qkv_weight, "row_qkv_weight", 192, 64, device);
  row_out_weight = parameter(row_out_weight, "row_out_weight", 64, 64, device);
  row_out_bias = parameter(row_out_bias, "row_out_bias", 64, 0, device);
  col_norm_weight = parameter(col_norm_weight, "col_norm_weight", 64, 0, device);
  col_norm_bias = parameter(col_norm_bias, "col_norm_bias", 64, 0, device);
  col_qkv_weight = parameter(col_qkv_weight, "col_qkv_weight", 192, 64, device);
  col_out_weight = parameter(col_out_weight, "col_out_weight", 64, 64, device);
  col_out_bias = parameter(col_out_bias, "col_out_bias", 64, 0, device);
  void* current = nullptr;
  if (aoti_torch_get_current_cuda_stream(device, &current) != 0) refuse("PyTorch gave no current CUDA stream");
  const cudaStream_t stream = static_cast<cudaStream_t>(current);
  const void* const out = y.mutable_data_ptr();
  {
    // Rows: 1 sequence a block
    static Handles handles{};
    const int sequences = static_cast<int>(batch * 32);
    const int64_t blocks = (static_cast<int64_t>(sequences) + 0) / 1;
    const Launch how{axialtune_kernel(0), blocks, 128, 46080, false, device, stream};
    check(launch_kernel(how, handles, {data(x), out, data(row_norm_weight), data(row_norm_bias), data(row_qkv_weight), data(row_out_weight), data(row_out_bias)}, sequences), "axial_row could not be launched");
  }
  {
    // Columns: 1 sequence a block
    static Handles handles{};
    const int sequences = static_cast<int>(batch * 32);
    const int64_t blocks = (static_cast<int64_t>(sequences) + 0) / 1;
    const Launch how{axialtune_kernel(1), blocks, 128, 46080, true, device, stream};
    check(launch_kernel(how, handles, {out, out, data(col_norm_weight), data(col_norm_bias), data(col_qkv_weight), data(col_out_weight), data(col_out_bias)}, sequences), "axial_col could not be launched");
  }
  return y;
}

}  // namespace

// AXIALTUNE_NAMESPACE is defined on the compiler's command line.
STABLE_TORCH_LIBRARY_FRAGMENT(AXIALTUNE_NAMESPACE, m) {
  m.def("launch(Tensor x, Tensor row_norm_weight, Tensor row_norm_bias, Tensor row_qkv_weight, Tensor row_out_weight, Tensor row_out_bias, Tensor col_norm_weight, Tensor col_norm_bias, Tensor col_qkv_weight, Tensor col_out_weight, Tensor col_out_bias) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(AXIALTUNE_NAMESPACE, CUDA, m) { m.impl("launch", TORCH_BOX(&launch)); }
'''

DIM, HEADS, HEIGHT, WIDTH, EPS = (SPEC[name] for name in ("dim", "heads", "height", "width", "eps"))
AXES = SPEC["axes"]
DTYPE = getattr(torch, SPEC["dtype"])  # of the kernels' input, output and parameters
CAPABILITY = (9, 0)

_FORMS = ("eager", "SDPA", "torch.compile", "torch.compile + SDPA")
_PARAMETERS = ("norm_weight", "norm_bias", "qkv_weight", "out_weight", "out_bias")  # of one axis, as the kernels take them
_NVCC_FLAGS = (
    "-O3",
    "-std=c++17",
    "-gencode=arch=compute_90,code=sm_90",
    "-Xcompiler=-fvisibility=hidden",
)
_HOST_FLAGS = (
    "-O2",
    "-std=c++17",
    "-DUSE_CUDA",  # PyTorch's C shim declares its CUDA functions only then
    "-DTORCH_TARGET_VERSION=0x020a000000000000",  # the interface of PyTorch 2.10
    "-fvisibility=hidden",
)
_NAMESPACE = "axialtune_" + hashlib.sha256(repr((SPEC, ARCH, KERNELS, _NVCC_FLAGS, _HOST_FLAGS, CUDA_SOURCE, LAUNCH_SOURCE)).encode()).hexdigest()[:16]

_launch = None  # the C++ op, once it is loaded
_compiled = {}  # whether for the tuned batch alone -> the compiled PyTorch form, once it is used
_gpu_fits = {}  # CUDA device index -> whether it has CAPABILITY
_warned = set()


# ---------------------------------------------------------------------------------------------- building the kernels
def _cache_folders():
    """Where built libraries may be kept, best first: $TORCH_EXTENSIONS_DIR, the user's cache, a private temporary folder."""
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folders = [os.path.abspath(os.path.join(chosen, "axialtune"))] if chosen else []
    if os.path.isabs(cache):
        folders.append(os.path.join(cache, "axialtune"))
    return [*folders, os.path.join(tempfile.gettempdir(), f"axialtune-{os.getuid()}")]


def _is_private(folder):
    """Whether the folder is the user's own and closed to others: code is never loaded from a folder anyone can write to."""
    found = os.lstat(folder)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and found.st_mode & 0o077 == 0


def _writable_folder(folders):
    """The first of the folders that can be written; a warning names it where it is not the first choice."""
    for folder in folders:
        with contextlib.suppress(OSError):
            last = folder == folders[-1]
            os.makedirs(folder, mode=0o700 if last else 0o777, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                writable = not last or _is_private(folder)
            if writable:
                if folder != folders[0]:
                    warnings.warn(f"{folders[0]} cannot be written: the CUDA kernels are built in {folder}", stacklevel=2)
                return folder
    folder = tempfile.mkdtemp(prefix="axialtune-")
    warnings.warn(f"{folders[0]} cannot be written: the CUDA kernels are built in {folder}, which no other process will find", stacklevel=2)
    return folder


def _cuda_headers():
    """Where CUDA's headers are, which nvcc knows and the host's compiler does not."""
    from torch.utils import cpp_extension

    home = cpp_extension.CUDA_HOME
    folders = glob.glob(os.path.join(glob.escape(home), "targets", "*", "include")) + [os.path.join(home, "include")] if home else []
    return [folder for folder in folders if os.path.isfile(os.path.join(folder, "cuda_runtime.h"))]


def _toolkit():
    """CUDA's folder where nvcc and its headers are installed, else None."""
    from torch.utils import cpp_extension

    home = cpp_extension.CUDA_HOME
    return home if _cuda_headers() and os.path.isfile(os.path.join(home, "bin", "nvcc")) else None


def _library_name():
    """Names a build by all that it depends on: block, sources, flags, PyTorch, its CUDA, the machine and the toolkit.

    Where there is no toolkit its part is "*": a library that was built elsewhere can be loaded, but none can be built.
    """
    parts = (repr((SPEC, ARCH, KERNELS)), CUDA_SOURCE, LAUNCH_SOURCE, *_NVCC_FLAGS, *_HOST_FLAGS, torch.__version__, torch.version.cuda, sysconfig.get_config_var("SOABI"), sysconfig.get_platform())
    key = hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:24]
    toolkit = _toolkit()
    if toolkit is None:
        return f"{key}-*.so"
    nvcc = os.stat(os.path.join(toolkit, "bin", "nvcc"))
    return f"{key}-{hashlib.sha256(f'{os.path.realpath(toolkit)} {nvcc.st_mtime_ns} {nvcc.st_size}'.encode()).hexdigest()[:8]}.so"


def _load_built(folders, name):
    """Loads a finished library from the first folder that has one; False where none could be loaded."""
    for folder in folders:
        if folder == folders[-1] and not (os.path.isdir(folder) and _is_private(folder)):
            continue
        for path in sorted(glob.glob(os.path.join(glob.escape(folder), name))):
            with contextlib.suppress(OSError):  # damaged, or made for other system libraries: it is built again
                torch.ops.load_library(path)
                return True
    return False


@contextlib.contextmanager
def _lock(path):
    """An exclusive lock that the operating system releases when its owner dies; none where the file system has no locks."""
    with open(path, "a") as file:
        with contextlib.suppress(OSError, ImportError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _search_path():
    """PATH with the interpreter's folder in front, where pip puts ninja, and the system's folders behind."""
    before = os.environ.get("PATH")
    parts = [os.path.dirname(sys.executable), sysconfig.get_path("scripts"), *(before or "").split(os.pathsep), *os.defpath.split(os.pathsep)]
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: os.environ.pop("PATH") if before is None else os.environ.update(PATH=before))
        os.environ["PATH"] = os.pathsep.join(dict.fromkeys(part for part in parts if part))
        yield


def _addresses():
    """The function that tells the op where the kernels are."""
    kernels = ", ".join(f"reinterpret_cast<const void*>({kernel['name']})" for kernel in KERNELS)
    return 'extern "C" const void* axialtune_kernel(int index) { static const void* const kernels[] = {' + kernels + "}; return kernels[index]; }"


def _build(folder, name):
    """Compiles in a private folder beside `name`, loads the library and moves it, finished, to its name."""
    from torch.utils import cpp_extension

    for stale in glob.glob(os.path.join(glob.escape(folder), f"{name}.build-*")):  # of builds that were killed: the lock is ours
        shutil.rmtree(stale, ignore_errors=True)
    private = tempfile.mkdtemp(prefix=f"{name}.build-", dir=folder)
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, private, ignore_errors=True)
        stack.enter_context(_search_path())
        cpp_extension.load_inline(
            name=_NAMESPACE,
            cpp_sources=LAUNCH_SOURCE,
            cuda_sources=[CUDA_SOURCE, _addresses()],
            extra_cflags=[*_HOST_FLAGS, f"-DAXIALTUNE_NAMESPACE={_NAMESPACE}"],
            extra_cuda_cflags=list(_NVCC_FLAGS),
            extra_include_paths=_cuda_headers()[:1],
            build_directory=private,
            with_cuda=True,
            is_python_module=False,
            no_implicit_headers=True,
        )
        os.replace(next(glob.iglob(os.path.join(glob.escape(private), "*.so"))), os.path.join(folder, name))


def _launcher():
    """The C++ op that launches the kernels: taken from the cache, or built now.

    Raises RuntimeError where nvcc is missing, where compiling fails, and during CUDA graph capture before a first call.
    """
    global _launch
    if _launch is None:
        ops = getattr(torch.ops, _NAMESPACE)
        if not hasattr(ops, "launch"):
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("call the module once before capturing it in a CUDA graph: the first call builds its kernels")
            folders, name = _cache_folders(), _library_name()
            if not _load_built(folders, name):
                if _toolkit() is None:
                    raise RuntimeError(
                        "the CUDA kernels have to be built once, and nvcc was not found: install the CUDA toolkit "
                        f"{torch.version.cuda or 'of your PyTorch'} (https://developer.nvidia.com/cuda-downloads) and a C++ compiler, or set CUDA_HOME to where it is"
                    )
                folder = _writable_folder(folders)
                with _lock(os.path.join(folder, f"{name}.lock")):
                    if not _load_built([folder, folders[-1]], name):  # another process may have built it while this one waited
                        _build(folder, name)
        _launch = ops.launch.default
    return _launch


# ------------------------------------------------------------------------------------- the PyTorch form, and the op
def _attend(q, k, v, dropout, plain):
    """softmax(q k^T / sqrt(head_dim)) v for (sequences, heads, length, head_dim).

    The plain form has derivatives of every order; PyTorch's fused one has the first, takes at most 65,535 sequences and
    draws dropout otherwise.
    """
    if dropout is not None or plain or q.shape[0] > 65535:
        weights = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
        return (weights if dropout is None else dropout(weights)) @ v
    return F.scaled_dot_product_attention(q, k, v)


def _axis_form(x, axis, norm, qkv, out, dropout=None, plain=False):
    """x + attention along one axis, in PyTorch; norm, qkv and out are what to apply for LayerNorm and the two products."""
    lines = x if axis == "row" else x.transpose(1, 2)
    batch, count, length, dim = lines.shape
    packed = qkv(norm(lines)).reshape(batch * count, length, 3, HEADS, dim // HEADS)
    q, k, v = (part.transpose(1, 2) for part in packed.unbind(2))
    attended = _attend(q, k, v, dropout, plain).transpose(1, 2).reshape(batch, count, length, dim)
    result = out(attended)
    return x + (result if axis == "row" else result.transpose(1, 2))


def _pytorch_form(x, weights, plain=False):
    """The block in PyTorch, from the tensors that the kernels take."""
    for i, axis in enumerate(AXES):
        norm_weight, norm_bias, qkv_weight, out_weight, out_bias = weights[5 * i : 5 * i + 5]
        x = _axis_form(
            x, axis,
            lambda t: F.layer_norm(t, (DIM,), norm_weight, norm_bias, EPS),
            lambda t: F.linear(t, qkv_weight),
            lambda t: F.linear(t, out_weight, out_bias),
            plain=plain,
        )
    return x


def _library_form(x, weights):
    """The block in the PyTorch form that USE names; its gradients are PyTorch's own.

    A compiled form is compiled for the tuned batch alone, and a second time for all others when there is one.
    """
    if USE not in _FORMS:
        raise ValueError(f"USE has to be kernels or one of {', '.join(_FORMS)}, not {USE}")
    if "compile" not in USE or x.shape[0] == 0 or torch.compiler.is_compiling():
        return _pytorch_form(x, weights, "SDPA" not in USE)
    tuned = x.shape[0] == SPEC["batch"]
    if tuned not in _compiled:
        if x.is_cuda and importlib.util.find_spec("triton") is None:
            _warn_once("triton", "torch.compile needs Triton, which is not installed: PyTorch computes without compiling")
            _compiled[tuned] = _tuned_batch
        else:
            _compiled[tuned] = torch.compile(_tuned_batch, dynamic=False) if tuned else torch.compile(_other_batch, dynamic=True)
    return _compiled[tuned](x, *weights)


def _tuned_batch(x, *weights):
    return _pytorch_form(x, weights, "SDPA" not in USE)


def _other_batch(x, *weights):  # code of its own: what torch.compile keeps, it keeps by the code
    return _pytorch_form(x, weights, "SDPA" not in USE)


def _differentiate(inputs, needed, grad):
    """Gradients of the inputs (x, then the kernels' other arguments) that need one: the PyTorch form is computed again and differentiated."""
    twice = torch.is_grad_enabled()  # backward(create_graph=True): the inputs' own graph continues through the views
    with torch.enable_grad(), torch.autocast(grad.device.type, enabled=False):
        inputs = [t.view_as(t) if twice else t.detach().requires_grad_(need) for t, need in zip(inputs, needed)]
        wanted = [t for t, need in zip(inputs, needed) if need]
        y = _pytorch_form(inputs[0], inputs[1:], plain=twice)
        found = iter(torch.autograd.grad(y, wanted, grad, create_graph=twice))
    return tuple(next(found) if need else None for need in needed)


def _gradients(ctx, grad):
    return _differentiate(ctx.saved_tensors, ctx.needs_input_grad, grad)


def _save_inputs(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


class _Differentiable(torch.autograd.Function):
    """The kernels with gradients, in eager mode; in compiled and exported graphs the op below has them.

    forward saves its inputs itself: with a setup_context, apply() works out forward's signature at each call, which takes longer than the kernels.
    """

    @staticmethod
    def forward(ctx, x, *weights):
        ctx.save_for_backward(x, *weights)
        return _launcher()(x, *weights)

    backward = staticmethod(_gradients)


class _Transformable(_Differentiable):
    """The same for torch.func's transforms, which ask for a setup_context."""

    @staticmethod
    def forward(x, *weights):
        return _launcher()(x, *weights)

    setup_context = staticmethod(_save_inputs)


class _Gather(torch.autograd.Function):
    """One tensor that stands for parameters in graphs: a node of two inputs is made in less than half the time of one of eleven.

    Of the size of all of them, though without their memory, so that a gradient of it is theirs, one after another.
    """

    @staticmethod
    def forward(ctx, *weights):
        ctx.shapes = [t.shape for t in weights]
        return weights[0].new_empty(()).expand(sum(t.numel() for t in weights))

    @staticmethod
    def backward(ctx, grad):
        parts = grad.split([shape.numel() for shape in ctx.shapes])
        views = (part.view(shape) for part, shape in zip(parts, ctx.shapes))
        return tuple(part.clone() for part in views) if torch.is_grad_enabled() else tuple(views)  # a hook may change one in place


class _OfParameters(torch.autograd.Function):
    """_Differentiable for a module's own parameters, of which `gathered` stands for those that get gradients."""

    @staticmethod
    def forward(ctx, x, gathered, weights, needed):
        ctx.save_for_backward(x)
        ctx.weights, ctx.needed, ctx.versions = weights, needed, [t._version for t in weights]
        return _launcher()(x, *weights)

    @staticmethod
    def backward(ctx, grad):
        if [t._version for t in ctx.weights] != ctx.versions:
            raise RuntimeError("a parameter needed for gradient computation has been modified by an inplace operation since forward")
        of_x, of_all = ctx.needs_input_grad[:2]
        found = _differentiate([*ctx.saved_tensors, *ctx.weights], [of_x, *(of_all and need for need in ctx.needed)], grad)
        flat = torch.cat([t.reshape(-1) for t in found[1:] if t is not None]) if of_all else None
        return found[0], flat, None, None


_gathered = weakref.WeakKeyDictionary()  # ModelNew -> its parameters, which of them get gradients, where, and what stands for these


def _gather(model, x, weights):
    """(which parameters get gradients, what stands for these in graphs); (.., None) where none does, or where one is computed from others.

    It is kept from call to call on a stream: a backward that is captured in a CUDA graph must not go to the stream of an earlier call.
    """
    needed = [t.requires_grad for t in weights]
    place = x.dtype, x.device, torch._C._cuda_getCurrentRawStream(x.get_device()) if x.is_cuda else 0
    kept = _gathered.get(model)
    if kept is not None and needed == kept[1] and place == kept[2] and all(map(operator.is_, weights, kept[0])):
        return needed, kept[3]
    kept = _gathered.pop(model, None)
    del kept  # before the next one is made, or that would find the places in graphs that this one had
    own = [t for t in weights if t.requires_grad]
    if not own or not all(t.is_leaf for t in own):
        return needed, None
    whole = _Gather.apply(*own)
    _gathered[model] = weights, needed, place, whole
    return needed, whole


def _on_cuda(x, *weights):
    return _launcher()(x, *weights) if _fits_gpu(x.get_device()) else _pytorch_form(x, weights).contiguous()


def _register():
    """Registers the op axialtune_<hash>::block, unless this very module was imported before under another name."""
    if hasattr(getattr(torch.ops, _NAMESPACE), "block"):
        return
    name = f"{_NAMESPACE}::block"
    parameters = ", ".join(f"Tensor {axis}_{part}" for axis in AXES for part in _PARAMETERS)
    torch.library.define(name, f"(Tensor x, {parameters}) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(name, "cuda")(_on_cuda)
    torch.library.impl(name, "cpu")(lambda x, *weights: _pytorch_form(x, weights).contiguous())
    torch.library.register_fake(name)(lambda x, *weights: torch.empty_like(x, memory_format=torch.contiguous_format))
    torch.library.register_autograd(name, _gradients, setup_context=_save_inputs)


def _fits_gpu(index):
    """Whether the GPU has the compute capability that the kernels are built for; a warning says so once where it has not."""
    if index not in _gpu_fits:
        found = torch.cuda.get_device_capability(index)
        _gpu_fits[index] = found == CAPABILITY
        if found != CAPABILITY:
            _warn_once(
                "GPU",
                f"cuda:{index} has compute capability {found[0]}.{found[1]} and these kernels are built for "
                f"{CAPABILITY[0]}.{CAPABILITY[1]}: PyTorch computes instead",
            )
    return _gpu_fits[index]


def _warn_once(subject, message):
    if subject not in _warned:
        _warned.add(subject)
        warnings.warn(message, stacklevel=3)


_register()


# -------------------------------------------------------------------------------------------------------- the module
class ModelNew(nn.Module):
    """Row attention, then column attention over a 32x32 grid of 64 channels, bfloat16.

    dim and num_heads have to be 64 and 4. An input is (batch, height, width, dim), of any batch; a height and width other
    than 32 and 32 are computed by PyTorch. dropout applies to the attention weights while training, by PyTorch too.
    Parameters are created in float32: convert the module with .to(device, DTYPE), as the kernels compute in bfloat16 alone.
    """

    def __init__(self, dim, num_heads, height, width, dropout=0.0):
        super().__init__()
        if (dim, num_heads) != (DIM, HEADS):
            raise ValueError(f"these kernels are built for dim {DIM} and {HEADS} heads, not for dim {dim} and {num_heads} heads: generate a module for those")
        if (height, width) != (HEIGHT, WIDTH):
            _warn_size(height, width)
        for axis in AXES:  # the order fixes the parameters' random draws
            setattr(self, f"{axis}_norm", nn.LayerNorm(dim, eps=EPS))
            setattr(self, f"{axis}_qkv", nn.Linear(dim, 3 * dim, bias=False))
            setattr(self, f"{axis}_out", nn.Linear(dim, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        if x.dim() != 4 or x.shape[3] != DIM:
            raise ValueError(f"the input must be (batch, height, width, {DIM}), not {tuple(x.shape)}")
        on_cuda, dtype = x.is_cuda, x.dtype
        kind = "cuda" if on_cuda else x.device.type
        autocast = kind != "meta" and torch.is_autocast_enabled(kind)
        weights = self._weights()
        if weights is not None and dtype != weights[0].dtype and not autocast:
            raise TypeError(f"the input is {dtype} and the module's parameters are {weights[0].dtype}: convert one of them")
        if on_cuda and dtype != DTYPE and not autocast:
            _warn_type(dtype)
            return self._pytorch_form(x)
        if weights is None or autocast or not on_cuda or _forward_mode() or (self.training and self._modules["dropout"].p > 0.0):
            return self._pytorch_form(x)
        _, height, width, _ = x.shape
        if height != HEIGHT or width != WIDTH:
            _warn_size(height, width)
            return self._pytorch_form(x)
        if USE != "kernels":
            return _library_form(x, weights)
        if torch.compiler.is_compiling():
            return _op()(x, *weights)
        if not _fits_gpu(x.get_device()):
            return self._pytorch_form(x)
        if torch.is_grad_enabled():
            transformed = torch._C._are_functorch_transforms_active()
            needed, gathered = ([t.requires_grad for t in weights], None) if transformed else _gather(self, x, weights)
            if gathered is not None:
                return _OfParameters.apply(x, gathered, weights, needed)
            if x.requires_grad or True in needed:
                return (_Transformable if transformed else _Differentiable).apply(x, *weights)
        return _launcher()(x, *weights)

    def _apply(self, *args, **kwargs):
        _gathered.pop(self, None)  # parameters may become others under the same name and identity
        return super()._apply(*args, **kwargs)

    def _load_from_state_dict(self, *args, **kwargs):
        _gathered.pop(self, None)
        super()._load_from_state_dict(*args, **kwargs)

    def _weights(self):
        """The kernels' arguments after x; None where a layer does more than its type says (hooks, adapters, parametrizations).

        It runs at each call, and so takes what a layer has where nn.Module keeps it.
        """
        weights, layers = [], self._modules
        for name, kind, parts in _LAYERS:
            layer = layers[name]
            own = layer.__dict__
            if type(layer) is not kind or own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
                return None
            parameters = own["_parameters"]
            for part in parts:
                tensor = parameters.get(part)
                if tensor is None:  # a plain attribute in the replicas of DataParallel
                    tensor = getattr(layer, part, None)
                    if tensor is None:
                        return None
                weights.append(tensor)
        return weights

    def _pytorch_form(self, x):
        dropout = self.dropout if self.training and self.dropout.p > 0.0 else None
        for axis in AXES:
            x = _axis_form(x, axis, getattr(self, f"{axis}_norm"), getattr(self, f"{axis}_qkv"), getattr(self, f"{axis}_out"), dropout, _forward_mode())
        return x


_LAYERS = tuple(
    (axis + name, kind, parts)
    for axis in AXES
    for name, kind, parts in (("_norm", nn.LayerNorm, ("weight", "bias")), ("_qkv", nn.Linear, ("weight",)), ("_out", nn.Linear, ("weight", "bias")))
)


def _forward_mode():
    """Whether forward-mode derivatives are being taken, which neither the kernels nor PyTorch's fused attention have."""
    return torch.autograd.forward_ad._current_level >= 0


def _op():
    return getattr(torch.ops, _NAMESPACE).block.default


def _warn_type(dtype):
    if not torch.compiler.is_compiling():
        _warn_once("type", f"these kernels are built for {DTYPE}, not for {dtype}: PyTorch computes instead; convert module and input with .to({DTYPE})")


def _warn_size(height, width):
    if not torch.compiler.is_compiling():
        _warn_once("size", f"these kernels are built for {HEIGHT}x{WIDTH}, not for {height}x{width}: PyTorch computes instead")


def get_init_inputs():
    """Arguments of ModelNew."""
    return [DIM, HEADS, HEIGHT, WIDTH]


def get_inputs():
    """An input of the size the kernels were chosen for, in float32 as a new ModelNew is: convert both to DTYPE."""
    return [torch.randn(SPEC["batch"], HEIGHT, WIDTH, DIM)]
