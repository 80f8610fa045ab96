"""Axial attention block: dim 256, 8 heads, 128x128, bfloat16, for sm_90.

Row attention, then column attention over (batch, height, width, dim), with LayerNorm before and a residual after each
axis. Tuned for batch 4; any batch is computed.

Configuration:
    row: family resident, math bf16, rows 1, sequences 1, head_group 1, overlap False, sum_tile 32, stages 4, attention
         wgmma, key_tile 64, sums add, polynomial 0, result scratch, out_columns 16, blocks 2, dependent_launch
         True
    col: family resident, math bf16, rows 1, sequences 1, head_group 1, overlap False, sum_tile 32, stages 4, attention
         wgmma, key_tile 64, sums add, polynomial 0, result scratch, out_columns 16, blocks 2, dependent_launch
         True

Measured on NVIDIA H200.
    device time: 187.82 +- 0.73 us
    device time, L2 flushed: 193.28 us
    wall time of a call: 196.79 us
    default configuration, device time: 189.28 us
    PyTorch (torch.compile + SDPA), device time: 456.34 us
    PyTorch (torch.compile + SDPA), wall time of a call: 700.21 us
    error against float64: 5.1e-02 of the output's scale
Command: python cli.py tune --storage none --dim 256 --heads 8 --height 128 --width 128 --batch 4 --dtype bfloat16 --fix
family=resident --budget 15
Written 2026-11-30T19:05:08Z, driver 580.159.04, torch 2.11.0+cu130, CUDA 13.0, python 3.12.3, nvrtc 13.0.
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
    "dim": 256, "heads": 8, "height": 128, "width": 128, "batch": 4, "dtype": "bfloat16", "axes": ("row", "col"),
    "eps": 1e-05,
}
ARCH = "sm_90"
CONFIGS = {
    "row": {
        "family": "resident", "math": "bf16", "rows": 1, "sequences": 1, "head_group": 1, "overlap": False,
        "sum_tile": 32, "stages": 4, "attention": "wgmma", "key_tile": 64, "sums": "add", "polynomial": 0,
        "result": "scratch", "out_columns": 16, "blocks": 2, "dependent_launch": True,
    },
    "col": {
        "family": "resident", "math": "bf16", "rows": 1, "sequences": 1, "head_group": 1, "overlap": False,
        "sum_tile": 32, "stages": 4, "attention": "wgmma", "key_tile": 64, "sums": "add", "polynomial": 0,
        "result": "scratch", "out_columns": 16, "blocks": 2, "dependent_launch": True,
    },
}
KERNELS = [
    {
        "name": "axial_pack", "axis": "", "threads": 128, "shared_bytes": 0, "items_per_block": 128,
        "dependent_launch": False,
        "arguments": (
            "row_qkv_weight", "row_out_weight", "col_qkv_weight", "col_out_weight", "row_packed_qkv", "row_packed_out",
            "col_packed_qkv", "col_packed_out",
        ),
        "items": "chunks", "blocks_per_group": 1, "fixed": 65536,
    },
    {
        "name": "axial_row_block", "axis": "row", "threads": 256, "shared_bytes": 115248, "items_per_block": 8,
        "dependent_launch": True,
        "arguments": ("x", "norm_weight", "norm_bias", "row_packed_qkv", "attended", "y", "row_packed_out", "out_bias"),
        "items": "row_tiles", "blocks_per_group": 1,
    },
    {
        "name": "axial_col_block", "axis": "col", "threads": 256, "shared_bytes": 115248, "items_per_block": 8,
        "dependent_launch": True,
        "arguments": ("x", "norm_weight", "norm_bias", "col_packed_qkv", "attended", "y", "col_packed_out", "out_bias"),
        "items": "row_tiles", "blocks_per_group": 1,
    },
]
SCRATCH = {"attended": 4194304}
PACKED = {"row_packed_qkv": 196608, "row_packed_out": 65536, "col_packed_qkv": 196608, "col_packed_out": 65536}
PROVENANCE = {
    "measured": True,
    "command": "python cli.py tune --storage none --dim 256 --heads 8 --height 128 --width 128 --batch 4 --dtype bfloat16 --fix family=resident --budget 15",
    "date": "2026-11-30T19:05:08Z", "gpu": "NVIDIA H200", "driver": "580.159.04", "torch": "2.11.0+cu130",
    "cuda": "13.0", "versions": {"python": "3.12.3", "nvrtc": "13.0"}, "device_us": 187.82399594783783,
    "spread_us": 0.7270034402608871, "cold_us": 193.28000396490097, "wall_us": 196.7936363636821,
    "default_us": 189.28000330924988, "pytorch_us": 456.3400000333786, "pytorch_wall_us": 700.2089999999279,
    "pytorch_form": "torch.compile + SDPA", "kernels_us": None, "kernels_wall_us": None, "predicted_us": None,
    "error": 0.05145598682093225, "partial": False, "note": "The default configuration is the fastest.",
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

// Hopper's matrix unit (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions"): the four warps of a warpgroup multiply 64 rows of
// operand A by 8 TILES columns of operand B, both in shared memory, over 16 indices of the sum. Accumulators are those of mma.m16n8k16
// tiles side by side, each warp with 16 of the rows. Operand A may lie in registers, as that of mma.m16n8k16.
//
// Products are asynchronous: wgmma_fence() comes before the first of a batch, wgmma_commit() after the last; wgmma_wait<N>() returns when all
// but the N latest batches are done. Until then nobody may touch their accumulators or operands.
//
// Operands are K-major with 128-byte swizzle: a row has 64 indices of the sum, 128 bytes; of its eight 16-byte chunks, chunk c of row r lies
// where chunk c ^ r % 8 would. Eight rows, 1024 bytes, are an atom ("Shared Memory Matrix Layout", "Strides").
constexpr int SWIZZLED_ROW = 32;  // words of a row
// Narrow operands have rows of 64 or 32 bytes, 4 or 2 chunks, and with them 64-byte or 32-byte swizzle: chunk c of row r lies where chunk
// c ^ r / 2 % 4 or c ^ r / 4 % 2 would.

// The word of row `row` that has index `index` (a multiple of 2, in a row of 64), counted from the first row, which starts on an atom.
template <int ROW = SWIZZLED_ROW>
__device__ __forceinline__ int swizzled(int row, int index) { return row * ROW + ((index / 8) ^ (row * ROW / 32 % (ROW / 4))) * 4 + index % 8 / 2; }

#ifdef __CUDACC__  // PTX; a host build brings its own versions of these functions

__device__ __forceinline__ unsigned shared_address(const void* address) { return static_cast<unsigned>(__cvta_generic_to_shared(address)); }

__device__ __forceinline__ void wgmma_bf16(float (&d)[12][4], unsigned long long a, unsigned long long b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %50, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
      "}, %48, %49, p, 1, 1, 0, 0;\n"
      "}"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]),
        "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
        "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
        "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]),
        "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
        "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]),
        "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
        "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]),
        "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]),
        "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]),
        "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3])
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}

__device__ __forceinline__ void wgmma_bf16(float (&d)[16][4], unsigned long long a, unsigned long long b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, p, 1, 1, 0, 0;\n"
      "}"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]),
        "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
        "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
        "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]),
        "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
        "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]),
        "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
        "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]),
        "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]),
        "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]),
        "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]),
        "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]),
        "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]),
        "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]),
        "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3])
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}

__device__ __forceinline__ void wgmma_bf16(float (&d)[8][4], const unsigned (&a)[4], unsigned long long b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n"
      "}"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]),
        "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
        "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
        "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]),
        "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
        "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]),
        "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
}

__device__ __forceinline__ void wgmma_bf16_turned(float (&d)[4][4], const unsigned (&a)[4], unsigned long long b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
      "}, {%16, %17, %18, %19}, %20, p, 1, 1, 1;\n"
      "}"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]),
        "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
        "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int GROUPS>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
}

// The compiler sees no use of accumulators before a wait as a use of what is waited for: this is one.
template <int TILES>
__device__ __forceinline__ void keep_in_registers(float (&d)[TILES][4]) {
#pragma unroll
  for (int j = 0; j < TILES; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(d[j][i])::"memory");
}

// What this thread has written to shared memory becomes visible to the matrix unit and the copy engine, behind the next barrier
// (PTX ISA, "Async proxy").
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void fence_async_proxy_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }  // to global memory

// Barriers in shared memory (PTX ISA, mbarrier), two words each: a phase ends when the copy that was started for it has arrived.
// publish_barriers() follows the initialisation and precedes a barrier of the block.
__device__ __forceinline__ void init_barrier(float* barrier) { asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory"); }
__device__ __forceinline__ void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// One thread starts a copy of `bytes` (a multiple of 16) from global memory, both on 16 bytes (PTX ISA, cp.async.bulk).
__device__ __forceinline__ void start_bulk_copy(float* to, const float* from, int bytes, float* barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)), "l"(from), "r"(bytes),
               "r"(shared_address(barrier))
               : "memory");
}

// Another copy for the phase of the one that is started next.
__device__ __forceinline__ void add_bulk_copy(float* to, const float* from, int bytes, float* barrier) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)), "l"(from), "r"(bytes),
               "r"(shared_address(barrier))
               : "memory");
}

// Waits for the phase of that parity: the first one is 0.
__device__ __forceinline__ void wait_for_bulk_copy(float* barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra done;\n"
      "bra again;\n"
      "done:\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

#endif

// A K-major operand from `tile` on: start address, no leading offset, the bytes from eight rows to the next, the rows' swizzle
// ("Matrix Descriptor Format"). Adding 2 to it goes on by 16 indices of the sum within the row.
template <int ROW = SWIZZLED_ROW>
__device__ __forceinline__ unsigned long long matrix_descriptor(const float* tile) {
  static_assert(ROW == 32 || ROW == 16 || ROW == 8, "rows of 128, 64 or 32 bytes");
  return (shared_address(tile) & 0x3ffffu) >> 4 | (32ull * ROW >> 4) << 32 | (ROW == 32 ? 1ull : ROW == 16 ? 2ull : 3ull) << 62;
}

// With operand B turned: a row is an index of the sum, and has the columns side by side, as many as fill it.
template <int TILES>
__device__ __forceinline__ void wgmma_turned(Bf16, float (&d)[TILES][4], const unsigned (&a)[4], unsigned long long b, bool accumulate) {
  wgmma_bf16_turned(d, a, b, accumulate);
}
template <int TILES>
__device__ __forceinline__ void wgmma(Bf16, float (&d)[TILES][4], unsigned long long a, unsigned long long b, bool accumulate) {
  wgmma_bf16(d, a, b, accumulate);
}
template <int TILES>
__device__ __forceinline__ void wgmma(Bf16, float (&d)[TILES][4], const unsigned (&a)[4], unsigned long long b, bool accumulate) {
  wgmma_bf16(d, a, b, accumulate);
}

// Scratch buffers hold fragments: words, whatever the elements are.
__device__ __forceinline__ float* words(Element* buffer) { return reinterpret_cast<float*>(buffer); }
__device__ __forceinline__ const float* words(const Element* buffer) { return reinterpret_cast<const float*>(buffer); }

#ifdef __CUDACC__  // PTX; a host build brings its own versions of these functions

// c = a b + from, for operands as mma_m16n8k16_fp16 has them: `from` stays, which spares its copies.
__device__ __forceinline__ void mma_from_fp16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, const float (&from)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(from[0]), "f"(from[1]), "f"(from[2]), "f"(from[3]));
}

__device__ __forceinline__ void mma_from_bf16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, const float (&from)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(from[0]), "f"(from[1]), "f"(from[2]), "f"(from[3]));
}

#endif

template <typename Format>
struct StreamFormat;
template <>
struct StreamFormat<Fp16> {
  static constexpr unsigned ONES = 0x3c003c00u;

  static __device__ __forceinline__ void mma_from(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, const float (&start)[4]) {
    mma_from_fp16(c, a, b0, b1, start);
  }
};
template <>
struct StreamFormat<Bf16> {
  static constexpr unsigned ONES = 0x3f803f80u;

  static __device__ __forceinline__ void mma_from(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, const float (&start)[4]) {
    mma_from_bf16(c, a, b0, b1, start);
  }
};

// The attention's products on the tensor cores in 16-bit types (see HalfCore for the fragments), for ROWS row tiles of a warp at once, which
// share what is read of keys and values. Queries stay in registers; weights become operand A in the lanes that hold their scores.
template <typename Format, int PARTS>
struct HalfStream {
  using Math = HalfCore<Format, PARTS>;

  // A row tile of one head, in registers.
  template <int STEPS>
  struct HeldQuery {
    static constexpr bool HELD = true;
    unsigned quad[STEPS / 2][PARTS][4];

    __device__ __forceinline__ void take(const float* from, int lane) {
#pragma unroll
      for (int step = 0; step < STEPS / 2; ++step) fetch(quad[step], from, step, lane);
    }

    // The same from accumulators.
    template <int COLUMNS>
    __device__ __forceinline__ void hold(const float (&acc)[COLUMNS][4]) {
#pragma unroll
      for (int step = 0; step < STEPS / 2; ++step) {
        const typename Math::Tile tile = Math::tile(acc[2 * step], acc[2 * step + 1]);
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
          for (int word = 0; word < 4; ++word) quad[step][part][word] = tile.part[part][word];
      }
    }

    __device__ __forceinline__ void get(unsigned (&to)[PARTS][4], int step) const {
#pragma unroll
      for (int part = 0; part < PARTS; ++part)
#pragma unroll
        for (int word = 0; word < 4; ++word) to[part][word] = quad[step][part][word];
    }
  };

  // The same in memory: too many registers.
  template <int STEPS>
  struct ReadQuery {
    static constexpr bool HELD = false;
    const float* pages;

    __device__ __forceinline__ void take(const float* from, int) { pages = from; }
    __device__ __forceinline__ void get(unsigned (&to)[PARTS][4], int step) const { fetch(to, pages, step, threadIdx.x % 32); }
  };

  static __device__ __forceinline__ void fetch(unsigned (&to)[PARTS][4], const float* from, int step, int lane) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) load(to[part], from + (step * PARTS + part) * 128 + 4 * lane);
  }

  // Scores of KEYS * 8 keys, which come on top of what `start` has for the lane's rows of a tile: that costs nothing, because the
  // accumulators have to start with something.
  template <int STEPS, typename Query, int ROWS, int KEYS>
  static __device__ __forceinline__ void scores(float (&p)[ROWS][KEYS][4], const Query (&query)[ROWS], const float (&start)[ROWS][4], const float* key, int lane) {
    constexpr int AT_ONCE = Query::HELD ? 2 : KEYS;  // tiles of 8 keys for which a page of the query is fetched
#pragma unroll
    for (int first = 0; first < KEYS; first += AT_ONCE) {
      float rest[ROWS][AT_ONCE][4] = {};  // SCALE times too large
#pragma unroll
      for (int step = 0; step < STEPS / 2; ++step) {
        unsigned a[ROWS][PARTS][4];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) query[i].get(a[i], step);
#pragma unroll
        for (int j = 0; j < AT_ONCE; j += 2) {
          unsigned b[2][PARTS][2];
#pragma unroll
          for (int part = 0; part < PARTS; ++part)
            load(reinterpret_cast<unsigned(&)[PARTS][4]>(b)[part], key + (((first + j) / 2 * (STEPS / 2) + step) * PARTS + part) * 128 + 4 * lane);
#pragma unroll
          for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int next = 0; next < 2; ++next) {
              if constexpr (PARTS == 2) {
                Format::mma(rest[i][j + next], a[i][1], b[next][0][0], b[next][0][1]);
                Format::mma(rest[i][j + next], a[i][0], b[next][1][0], b[next][1][1]);
              }
              if (step == 0)
                StreamFormat<Format>::mma_from(p[i][first + j + next], a[i][0], b[next][0][0], b[next][0][1], start[i]);
              else
                Format::mma(p[i][first + j + next], a[i][0], b[next][0][0], b[next][0][1]);
            }
        }
      }
      if constexpr (PARTS == 2) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
          for (int j = 0; j < AT_ONCE; ++j)
#pragma unroll
            for (int c = 0; c < 4; ++c) p[i][first + j][c] = fmaf(rest[i][j][c], 1.0f / Math::SCALE, p[i][first + j][c]);
      }
    }
  }

  // Weights as operand A. Their rests are kept as they are, not SCALE times as large: the largest weight of a row is far from
  // the smallest numbers of the type, and what an absolute error of 2^-25 is to the row's sum matters, not what it is to the weight.
  template <int ROWS, int KEYS>
  struct Weights {
    unsigned quad[ROWS][KEYS / 2][PARTS][4];

    __device__ __forceinline__ void take(const float (&p)[ROWS][KEYS][4]) {
#pragma unroll
      for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int j = 0; j < KEYS; ++j)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float first = p[i][j][2 * half], second = p[i][j][2 * half + 1];
            unsigned(&to)[PARTS][4] = quad[i][j / 2];
            to[0][j % 2 * 2 + half] = Format::pack(first, second);
            if constexpr (PARTS == 2) {
              const float2 rounded = Format::unpack(to[0][j % 2 * 2 + half]);
              to[1][j % 2 * 2 + half] = Format::pack(first - rounded.x, second - rounded.y);
            }
          }
    }

    // Whether a weight may be 2 or more: then the top bit of its exponent is set.
    __device__ __forceinline__ bool reach_two() const {
      unsigned bits = 0;
#pragma unroll
      for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int pair = 0; pair < KEYS / 2; ++pair)
#pragma unroll
          for (int word = 0; word < 4; ++word) bits |= quad[i][pair][0][word];
      return (bits & 0x40004000u) != 0;
    }
  };

  // Sums of values times weights, and of weights, for ROWS row tiles.
  template <int STEPS, int STRIDE, int ROWS>
  struct Sums {
    float out[ROWS][STEPS][4] = {};
    float rest[PARTS == 2 ? ROWS : 1][PARTS == 2 ? STEPS : 1][4] = {};  // of values with a rest, SCALE times too large

    template <int KEYS>
    __device__ __forceinline__ void add(const Weights<ROWS, KEYS>& weights, const float* value, int lane) {
#pragma unroll
      for (int pair = 0; pair < KEYS / 2; ++pair)
#pragma unroll
        for (int j = 0; j < STEPS; j += 3 - PARTS) {
          unsigned b[3 - PARTS][PARTS][2];
          load(reinterpret_cast<unsigned(&)[4]>(b), value + (pair * STEPS + j) / (3 - PARTS) * 128 + 4 * lane);
#pragma unroll
          for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int next = 0; next < 3 - PARTS; ++next) {
              const unsigned(&a)[PARTS][4] = weights.quad[i][pair];
              if constexpr (PARTS == 2) {
                Format::mma(rest[i][j], a[0], b[0][1][0], b[0][1][1]);
                Format::mma(out[i][j], a[1], b[0][0][0], b[0][0][1]);
              }
              Format::mma(out[i][j + next], a[0], b[next][0][0], b[next][0][1]);
            }
        }
    }

    __device__ __forceinline__ void rescale(int i, int half, float factor) {
#pragma unroll
      for (int j = 0; j < STEPS; ++j)
#pragma unroll
        for (int c = 2 * half; c < 2 * half + 2; ++c) {
          out[i][j][c] *= factor;
          if constexpr (PARTS == 2) rest[i][j][c] *= factor;
        }
    }

    __device__ __forceinline__ float result(int i, int j, int c) const {
      return PARTS == 2 ? fmaf(rest[PARTS == 2 ? i : 0][PARTS == 2 ? j : 0][c], 1.0f / Math::SCALE, out[i][j][c]) : out[i][j][c];
    }
  };

  // Adds the weights of each row with the same unit: a column of ones.
  template <int ROWS, int KEYS>
  static __device__ __forceinline__ void add_rows(float (&sum)[ROWS][4], const Weights<ROWS, KEYS>& weights) {
    constexpr unsigned ONES = StreamFormat<Format>::ONES;
#pragma unroll
    for (int pair = 0; pair < KEYS / 2; ++pair)
#pragma unroll
      for (int i = 0; i < ROWS; ++i) Format::mma(sum[i], weights.quad[i][pair][0], ONES, ONES);
  }
};

// Elements of tensors are read and written here and by copy_async alone.
// N neighbouring channels of a token (or of a vector of DIM) from `channel` on; those past DIM are zeros, if `to` begins so.
template <int DIM, int N>
__device__ __forceinline__ void load_channels(float (&to)[N], const Element* from, int channel) {
  if constexpr (DIM % N == 0) {
    if (channel < DIM) load(to, from + channel);
  } else {
    load_some<false>(to, from + channel, true, channel, DIM);
  }
}

template <int DIM, int N>
__device__ __forceinline__ void store_channels(Element* to, int channel, const float (&values)[N]) {
  if constexpr (DIM % N == 0) {
    if (channel < DIM) store_global(to + channel, values);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (channel + i < DIM) put(to + channel + i, values[i]);
  }
}

// The column of the result that is accumulated as `column`: a lane has two columns of each column tile, and of RUN / 2 tiles these are
// neighbours.
template <int RUN>
__device__ __forceinline__ int result_column(int column) {
  constexpr int TILES = RUN / 2;
  return column / (8 * TILES) * (8 * TILES) + column % 8 / 2 * RUN + column / 8 % TILES * 2 + column % 2;
}

// The same as words of two elements.
template <int DIM, int N>
__device__ __forceinline__ void load_channels(Word (&to)[N], const Element* from, int channel) {
  if constexpr (DIM % (2 * N) == 0) {
    if (channel < DIM) load(to, from + channel);
  } else {
    load_some<false>(to, from + channel, true, channel, DIM);
  }
}

// The same by loads that stay on their side of a barrier.
template <int DIM, int N>
__device__ __forceinline__ void load_channels_here(Word (&to)[N], const Element* from, int channel) {
  if constexpr (DIM % (2 * N) == 0) {
    if (channel < DIM) load_here(to, static_cast<const void*>(from + channel));
  } else {
    load_channels<DIM>(to, from, channel);
  }
}

// The tiled product on Hopper's matrix unit. P states it: a block has ROW_TILES * 16 rows, four of these tiles a warpgroup, and turns over
// column tiles of COLUMNS, of which the PARTS blocks that share rows take every PARTS-th; the sum goes in tiles of SUM_TILE, one swizzled
// row of 64 indices. Operand A stays in shared memory for all of the sum, in the order [rounded, rest][tile of the sum][row]. The weights
// come as kernel 0 has packed them: what a step needs is one piece, brought into one of STAGES buffers by one bulk copy.
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
  static constexpr int A_INDICES = 2 * SWIZZLED_ROW, A_TILE = ROWS * SWIZZLED_ROW, A_OPERAND = P::SUM / A_INDICES * A_TILE;

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

  // Fragment `page` of the sum alone, to scratch from which operand A is copied as it is: a lane has words (g, k), (g+8, k), (g, k+8), (g+8, k+8). Four
  // lanes write 32 bytes of a row, so that a tile of the sum has its indices in another order, which the weights are packed in as well.
  static __device__ __forceinline__ void store_fragment(float* a, int which, int row, int page, int lane, const float (&quads)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float words[2] = {quads[half], quads[2 + half]};
      store_global(a + which * A_OPERAND + page / 4 * A_TILE + swizzled(row + 8 * half + lane / 4, page % 4 * 16 + lane % 4 * 4), words);
    }
  }

  static __device__ __forceinline__ void start(float* shared, const float* packed, int step, int part) {
    const int stage = step % P::STAGES, tile = (part + step / SUM_TILES * P::PARTS) * SUM_TILES + step % SUM_TILES;
    start_bulk_copy(shared + P::BUFFERS + stage * P::B_TILE, packed + static_cast<long long>(tile) * P::B_TILE, 4 * P::B_TILE, shared + P::BARRIERS + 2 * stage);
  }

  // fill(a) writes operand A; store(row_tile, column, acc) takes a warp's result: its row tile, the first of its columns, for which before(row_tile,
  // column) is called ahead of the products.
  template <typename Fill, typename Before, typename Store>
  static __device__ __forceinline__ void run(float* shared, const float* packed, int part, Fill fill, Before before, Store store_result) {
    const int row_tile = threadIdx.x / 32, warpgroup = row_tile / 4;
    const int turns = (COLUMN_TILES - part + P::PARTS - 1) / P::PARTS, steps = turns * SUM_TILES;
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < P::STAGES; ++stage) init_barrier(shared + P::BARRIERS + 2 * stage);
      publish_barriers();
      for (int step = 0; step < min(P::STAGES, steps); ++step) start(shared, packed, step, part);
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
#pragma unroll 1
      for (int sum_tile = 0; sum_tile < SUM_TILES; ++sum_tile, ++step) {
        const unsigned long long a = rows(shared, warpgroup) + tile_of_sum(sum_tile), b = matrix_descriptor<ROW>(shared + P::BUFFERS + stage * P::B_TILE);
        wait_for_bulk_copy(shared + P::BARRIERS + 2 * stage, round % 2);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < P::SUM_TILE / 16; ++k) {
          const bool accumulate = sum_tile > 0 || k > 0;
          if constexpr (OPERANDS == 2) {
            wgmma(Format{}, rest, a + A_OPERAND / 4 + 2 * k, b + 2 * k, accumulate);
            wgmma(Format{}, rest, a + 2 * k, b + B_OPERAND / 4 + 2 * k, true);
          }
          wgmma(Format{}, acc, a + 2 * k, b + 2 * k, accumulate);
        }
        wgmma_commit();
        wgmma_wait<1>();
        __syncthreads();  // the step before is done for all, and its buffer is free
        if (threadIdx.x == 0 && step > 0 && step - 1 + P::STAGES < steps) start(shared, packed, step - 1 + P::STAGES, part);
        if (++stage == P::STAGES) stage = 0, ++round;
      }
      wgmma_wait<0>();
      keep_in_registers(acc);
      if constexpr (OPERANDS == 2) {
        keep_in_registers(rest);
#pragma unroll
        for (int j = 0; j < TILES; ++j)
#pragma unroll
          for (int c = 0; c < 4; ++c) acc[j][c] = fmaf(rest[j][c], 1.0f / Math::SCALE, acc[j][c]);
      }
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

constexpr int CHUNK = 8;  // channels that a lane loads and stores together: 16 bytes of a swizzled row

// A chunk of a token (or of a vector of DIM) from `channel` on, in loads as wide as all tokens are aligned for; what is past DIM stays as it is.
template <int DIM>
__device__ __forceinline__ void load_chunk(Word (&to)[CHUNK / PER_WORD], const Element* from, int channel) {
  if constexpr (DIM % PER_WORD == 0) {
    constexpr int MOST = 4 * PER_WORD, N = DIM % MOST == 0 ? MOST : DIM % (MOST / 2) == 0 ? MOST / 2 : PER_WORD;
#pragma unroll
    for (int i = 0; i < CHUNK; i += N)
      if (channel + i < DIM) load(reinterpret_cast<Word(&)[N / PER_WORD]>(to[i / PER_WORD]), from + channel + i);
  } else {
    load_some<false>(to, from + channel, true, channel, DIM);
  }
}

// The block's tokens, normalised (LayerNorm with the biased variance), all channels of them. A group of NORM_LANES lanes has NORM_HELD tokens at a time
// in registers, of which each lane has every NORM_LANES-th chunk: a warp reads whole sectors of several tokens, all loads of a turn are
// under way before the first is waited for, and a sum takes few shuffles. store(row_tile, row, channel, values) takes a chunk. Tokens past a
// sequence's end, row tiles past the last one and channels past DIM become zeros.
template <typename C, typename Store>
__device__ __forceinline__ void normalise_by_groups(const Element* x, const Element* __restrict__ weight, const Element* __restrict__ bias, int first_tile, int row_tiles, Store store_chunk) {
  using P = typename C::Qkv;
  constexpr int LANES = P::NORM_LANES, HELD = P::NORM_HELD, STEPS = ceil_div(P::SUM, LANES * CHUNK), GROUPS = 32 / LANES;
  constexpr int TURNS = 16 / (GROUPS * HELD), WARP_TURNS = TURNS * P::ROW_TILES / (P::THREADS / 32);  // of a row tile; of a warp
  const int lane = threadIdx.x % LANES, group = threadIdx.x % 32 / LANES;
  // Eight lanes store at once: chunks of one row, or half the chunks of two, which lie in other banks where the rows are four apart.
  const int first_row = LANES == 4 ? group % 2 * 4 + group / 2 : group;
#pragma unroll 1
  for (int turn = 0; turn < WARP_TURNS; ++turn) {
    const int at = threadIdx.x / 32 * WARP_TURNS + turn, row_tile = at / TURNS, row = at % TURNS * (GROUPS * HELD) + first_row;
    const int tile = min(first_tile + row_tile, row_tiles - 1), sequence = tile / C::TILES;  // where there is none, another of the block's own is read
    bool real[HELD];
    Word words[HELD][STEPS][CHUNK / PER_WORD] = {};
#pragma unroll
    for (int held = 0; held < HELD; ++held) {
      const int token = tile % C::TILES * 16 + row + held * GROUPS;
      real[held] = first_tile + row_tile < row_tiles && (C::LENGTH % 16 == 0 || token < C::LENGTH);
      const Element* from = x + C::offset(sequence, C::LENGTH % 16 == 0 ? token : min(token, C::LENGTH - 1));
#pragma unroll
      for (int step = 0; step < STEPS; ++step) load_chunk<C::DIM>(words[held][step], from, (step * LANES + lane) * CHUNK);
    }
    float values[HELD][STEPS][CHUNK], inverse[HELD];
#pragma unroll
    for (int held = 0; held < HELD; ++held) {
#pragma unroll
      for (int step = 0; step < STEPS; ++step) unpack(values[held][step], words[held][step]);
      float sum = 0.0f, squares = 0.0f;
#pragma unroll
      for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) sum += values[held][step][i];
      const float mean = group_sum<LANES>(sum) * (1.0f / C::DIM);
#pragma unroll
      for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
          values[held][step][i] -= mean;
          if ((step * LANES + lane) * CHUNK + i < C::DIM) squares = fmaf(values[held][step][i], values[held][step][i], squares);
        }
      inverse[held] = rsqrtf(group_sum<LANES>(squares) * (1.0f / C::DIM) + C::EPSILON);
    }
    constexpr float zeros[CHUNK] = {};
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const int channel = (step * LANES + lane) * CHUNK;
      if (channel >= P::SUM) continue;
      Word gain_words[CHUNK / PER_WORD] = {}, shift_words[CHUNK / PER_WORD] = {};
      load_chunk<C::DIM>(gain_words, weight, channel), load_chunk<C::DIM>(shift_words, bias, channel);
      float gain[CHUNK], shift[CHUNK];
      unpack(gain, gain_words), unpack(shift, shift_words);
#pragma unroll
      for (int held = 0; held < HELD; ++held) {
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
          const float normed = fmaf(values[held][step][i] * inverse[held], gain[i], shift[i]);
          values[held][step][i] = channel + i < C::DIM ? normed : 0.0f;
        }
        store_chunk(row_tile, row + held * GROUPS, channel, values[held][step]);
      }
    }
#pragma unroll
    for (int held = 0; held < HELD; ++held)
      if (!real[held])
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
          if (const int channel = (step * LANES + lane) * CHUNK; channel < P::SUM) store_chunk(row_tile, row + held * GROUPS, channel, zeros);
  }
}

// TILES neighbouring column tiles of a row tile of the output product, from column `column` on, with bias and residual, into y.
// An element of y is written by the thread that has read it as residual, so that x may be y. Because of that the compiler keeps loads of x
// behind earlier stores to y: the residuals of up to 8 column tiles are read before the first store, so that they wait for memory
// together, and all of them before the product (`before`) where they take few registers.
// BEGUN: sums begin with the bias, so that nobody waits for it behind the product.
template <typename C, int TILES, bool BEGUN = false>
struct OutputTiles {
  static constexpr int RUN = C::Out::RUN, TOGETHER = TILES <= 8 ? TILES : TILES % 8 == 0 ? 8 : 4, RUNS = 2 * TOGETHER / RUN;  // RUNS of RUN neighbours: what a lane has of them
  static_assert(TILES % TOGETHER == 0, "column tiles that go together");

  // The compiler cannot know that a block's columns end within DIM where they divide it: told so, it spares a branch an access.
  static __device__ __forceinline__ void note_range(int channel) {
    if constexpr (C::DIM % C::Out::COLUMNS == 0) __builtin_assume(channel < C::DIM);
  }

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
        note_range(channel + 4 * RUN * run);
        if (tile < row_tiles && (C::LENGTH % 16 == 0 || token < C::LENGTH)) load_channels_here<C::DIM>(to[half][run], x + C::offset(tile / C::TILES, token), channel + 4 * RUN * run);
      }
    }
  }

  __device__ __forceinline__ void before(const Element* x, int tile, int row_tiles, int column, int lane) {
    if constexpr (EARLY) {
#pragma unroll
      for (int first = 0; first < TILES; first += TOGETHER) read(words[first / TOGETHER], x, tile, row_tiles, column + 8 * first + RUN * (lane % 4), lane);
    }
  }

  static __device__ __forceinline__ void begin(float (&acc)[TILES][4], const Element* __restrict__ out_bias, int column, int lane) {
#pragma unroll
    for (int j = 0; j < TILES; j += RUN / 2) {
      float bias[RUN] = {};
      load_channels<C::DIM>(bias, out_bias, column + 8 * j + RUN * (lane % 4));
#pragma unroll
      for (int i = 0; i < 2 * RUN; ++i) acc[j + i / 4][i % 4] = bias[i / 4 * 2 + i % 2];
    }
  }

  __device__ __forceinline__ void after(const Element* x, Element* y, const Element* __restrict__ out_bias, int tile, int row_tiles, int column, int lane, const float (&acc)[TILES][4]) {
#pragma unroll
    for (int first = 0; first < TILES; first += TOGETHER) {
      const int channel = column + 8 * first + RUN * (lane % 4);
      Word(&held)[2][RUNS][RUN / PER_WORD] = words[EARLY ? first / TOGETHER : 0];
      if constexpr (!EARLY) read(held, x, tile, row_tiles, channel, lane);
#pragma unroll
      for (int run = 0; run < RUNS; ++run) {
        float bias[RUN] = {};
        if constexpr (!BEGUN) load_channels<C::DIM>(bias, out_bias, channel + 4 * RUN * run);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int token = tile % C::TILES * 16 + 8 * half + lane / 4;
          if (tile >= row_tiles || (C::LENGTH % 16 != 0 && token >= C::LENGTH)) continue;
          note_range(channel + 4 * RUN * run);
          float sums[RUN];
          unpack(sums, held[half][run]);
#pragma unroll
          for (int c = 0; c < RUN; ++c) {
            float sum = acc[first + run * (RUN / 2) + c / 2][2 * half + c % 2];
            if constexpr (!BEGUN) sum += bias[c];
            sums[c] += sum;
          }
          store_channels<C::DIM>(y + C::offset(tile / C::TILES, token), channel + 4 * RUN * run, sums);
        }
      }
    }
  }
};

// The same by warpgroups (see warpgroup.cu.j2), for ROWS times the 64 queries of a warpgroup, which are of one sequence. Queries and weights are operand A
// in registers. Keys lie in shared memory as operand B of the scores, a row of PADDED_HEAD_DIM channels each, and so do values, as operand B of the
// weighted sum that is turned. While a tile's exponentials are computed, the scores of the next tile and the weighted sum of the one before are under way.
//
// References are as in StreamedSoftmax. A warp that has to change its own computes the tile's scores again, by itself.
template <typename C>
struct WarpgroupSoftmax {
  using S = typename C::Streamed;
  using Format = typename HalfFormat<typename C::Math>::Format;
  static constexpr int ROWS = S::ROWS, STEPS = C::PADDED_HEAD_DIM / 8, KEYS = S::KEY_TILE / 8, KEY_STEPS = 2 * ceil_div(C::LENGTH, 2 * S::KEY_TILE);  // in pairs
  static constexpr int KEY_ROW = C::PADDED_HEAD_DIM / 2;  // words of a key, and of a value
  static_assert(HalfFormat<typename C::Math>::OPERANDS == 1, "operands without rests");

  unsigned query[ROWS][STEPS / 2][4], weights[ROWS][KEYS / 2][4];
  float out[ROWS][STEPS][4], sum[ROWS][2], start[ROWS][2];  // start: minus the references
  bool raised;  // whether one of the warp's references is not the first one

  // A head's accumulators of one row tile, number `tile` of the block: queries, in units of the exponent; keys; values.
  __device__ __forceinline__ void hold_query(int row, const float (&acc)[3 * STEPS][4]) {
#pragma unroll
    for (int step = 0; step < STEPS / 2; ++step)
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const float(&c)[4] = acc[2 * step + word / 2];
        query[row][step][word] = Format::pack(c[2 * (word % 2)], c[2 * (word % 2) + 1]);
      }
  }

  // A lane has 2 STEPS neighbouring channels of a key and of its value, because their weights are packed so: 16 bytes of them are stored at once.
  static __device__ __forceinline__ void store_keys(float* keys, float* values, int tile, int lane, const float (&acc)[3 * STEPS][4]) {
    constexpr int TOGETHER = STEPS < 4 ? STEPS : 4;
#pragma unroll
    for (int j = 0; j < STEPS; j += TOGETHER)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        unsigned key[TOGETHER], value[TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
          const float(&k)[4] = acc[STEPS + j + i], (&v)[4] = acc[2 * STEPS + j + i];
          key[i] = Format::pack(k[2 * half], k[2 * half + 1]), value[i] = Format::pack(v[2 * half], v[2 * half + 1]);
        }
        const int at = swizzled<KEY_ROW>(16 * tile + 8 * half + lane / 4, lane % 4 * (2 * STEPS) + 2 * j);
        store(keys + at, key), store(values + at, value);
      }
  }

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      sum[row][0] = sum[row][1] = 0.0f, start[row][0] = start[row][1] = -S::HEADROOM;
#pragma unroll
      for (int i = 0; i < 4 * STEPS; ++i) out[row][i / 4][i % 4] = 0.0f;
    }
    raised = false;
  }

  __device__ __forceinline__ void start_scores(float (&p)[ROWS][KEYS][4], const float* keys, int step) {
    const unsigned long long b = matrix_descriptor<KEY_ROW>(keys + step * S::KEY_TILE * KEY_ROW);
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
#pragma unroll
      for (int k = 0; k < STEPS / 2; ++k) wgmma(Format{}, p[row], query[row][k], b + 2 * k, k > 0);
  }

  __device__ __forceinline__ void start_sums(const float* values, int step) {
#pragma unroll
    for (int k = 0; k < KEYS / 2; ++k) {
      const unsigned long long b = matrix_descriptor<KEY_ROW>(values + (step * S::KEY_TILE + 16 * k) * KEY_ROW);
#pragma unroll
      for (int row = 0; row < ROWS; ++row) wgmma_turned(Format{}, out[row], weights[row][k], b, true);
    }
  }

  // Scores of the warp's queries and a tile of keys, by mma.sync.
  __device__ __forceinline__ void own_scores(float (&p)[ROWS][KEYS][4], const float* keys, int step, int lane) const {
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
#pragma unroll
      for (int j = 0; j < KEYS; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) p[row][j][c] = 0.0f;
        const int key = step * S::KEY_TILE + 8 * j + lane / 4;
#pragma unroll
        for (int k = 0; k < STEPS / 2; ++k) {
          unsigned b[2];
#pragma unroll
          for (int which = 0; which < 2; ++which) b[which] = __float_as_uint(keys[swizzled<KEY_ROW>(key, 16 * k + 8 * which + 2 * (lane % 4))]);
          Format::mma(p[row][j], query[row][k], b[0], b[1]);
        }
      }
  }

  // Exponents from scores: minus infinity for keys behind the sequence's end.
  __device__ __forceinline__ void exponents(float (&p)[ROWS][KEYS][4], int step, int lane) const {
    if (S::HEADROOM != 0.0f || raised) {
#pragma unroll
      for (int row = 0; row < ROWS; ++row)
#pragma unroll
        for (int j = 0; j < KEYS; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i) p[row][j][i] += start[row][i / 2];
    }
    if (C::LENGTH % (2 * S::KEY_TILE) != 0 && (step + 1) * S::KEY_TILE > C::LENGTH) {
#pragma unroll
      for (int j = 0; j < KEYS; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (step * S::KEY_TILE + 8 * j + 2 * (lane % 4) + i % 2 >= C::LENGTH) {
#pragma unroll
            for (int row = 0; row < ROWS; ++row) p[row][j][i] = minus_infinity();
          }
    }
  }

  // Weights from exponents, and what a lane has of each row's sum.
  static __device__ __forceinline__ void powers(float (&p)[ROWS][KEYS][4], float (&added)[ROWS][2]) {
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        added[row][half] = 0.0f;
#pragma unroll
        for (int j = 0; j < KEYS; ++j)
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) added[row][half] += p[row][j][i] = S::power(p[row][j][i], j % 2 * 4 + i);
      }
  }

  // References from the tile's maximum, so that its largest weight is 2^-HEADROOM; those of rows that have been summed do not fall. p: exponents.
  __device__ __forceinline__ void refer(const float (&p)[ROWS][KEYS][4], int step) {
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float highest = minus_infinity();
#pragma unroll
        for (int j = 0; j < KEYS; ++j) highest = fmaxf(highest, fmaxf(p[row][j][2 * half], p[row][j][2 * half + 1]));
        highest = group_max<4>(highest) + S::HEADROOM;
        if (step > 0) {
          highest = fmaxf(highest, 0.0f);
          const float correction = exp2_approx(-highest);
          sum[row][half] *= correction;
#pragma unroll
          for (int j = 0; j < STEPS; ++j) out[row][j][2 * half] *= correction, out[row][j][2 * half + 1] *= correction;
        }
        start[row][half] -= highest;
      }
    raised = true;
  }

  // All keys of a head. meanwhile(step) may start further products beside a tile's exponentials; they are done when this returns.
  template <typename Meanwhile>
  __device__ __forceinline__ void run(const float* keys, const float* values, int lane, Meanwhile meanwhile) {
    float p[2][ROWS][KEYS][4];
    wgmma_fence();
    start_scores(p[0], keys, 0);
    wgmma_commit();
    wgmma_commit();  // nothing, where a weighted sum will be
#pragma unroll
    for (int step = 0; step < KEY_STEPS; step += 2) {
      add(p[0], p[1], keys, values, step, step + 1, lane, meanwhile);
      add(p[1], p[0], keys, values, step + 1, min(step + 2, KEY_STEPS - 1), lane, meanwhile);
    }
    wgmma_wait<0>();
    keep_sums();
  }

  // A tile whose scores have been started, and after them one batch of products; starts those of tile `next`.
  template <typename Meanwhile>
  __device__ __forceinline__ void add(float (&p)[ROWS][KEYS][4], float (&following)[ROWS][KEYS][4], const float* keys, const float* values, int step, int next, int lane, Meanwhile meanwhile) {
    float added[ROWS][2];
    wgmma_wait<1>();
#pragma unroll
    for (int row = 0; row < ROWS; ++row) keep_in_registers(p[row]);
    wgmma_fence();
    start_scores(following, keys, next);
    wgmma_commit();
    meanwhile(step);
    exponents(p, step, lane);
    powers(p, added);
#pragma unroll
    for (int row = 0; row < ROWS; ++row) keep_in_registers(p[row]);  // the compiler would wait first
    wgmma_wait<1>();  // the weighted sum is done
    keep_sums();
    if (__any_sync(ALL_LANES, outside(added, step))) {
      own_scores(p, keys, step, lane);
      exponents(p, step, lane);
      refer(p, step);
      own_scores(p, keys, step, lane);
      exponents(p, step, lane);
      powers(p, added);
    }
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      sum[row][0] += added[row][0], sum[row][1] += added[row][1];
#pragma unroll
      for (int k = 0; k < KEYS / 2; ++k)
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          const float(&c)[4] = p[row][2 * k + word / 2];
          weights[row][k][word] = Format::pack(c[2 * (word % 2)], c[2 * (word % 2) + 1]);
        }
    }
    wgmma_fence();
    start_sums(values, step);
    wgmma_commit();
  }

  __device__ __forceinline__ void keep_sums() {
#pragma unroll
    for (int row = 0; row < ROWS; ++row) keep_in_registers(out[row]);
  }

  // Whether a lane's weights of a row are beyond LIMIT, or in the first tile the row's below FLOOR.
  static __device__ __forceinline__ bool outside(const float (&added)[ROWS][2], int step) {
    float largest = 0.0f, least = S::FLOOR;
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        largest = fmaxf(largest, added[row][half]);
        if (step == 0) least = fminf(least, group_sum<4>(added[row][half]));
      }
    return largest > S::LIMIT || least < S::FLOOR;
  }

  // The result of row tile `row` as operand A, a fragment of 16 channels after another: emit(step, quads) takes a lane's quadruples.
  template <typename Emit>
  __device__ __forceinline__ void result(int row, Emit emit) const {
    const float upper = __fdividef(1.0f, group_sum<4>(sum[row][0])), lower = __fdividef(1.0f, group_sum<4>(sum[row][1]));
#pragma unroll
    for (int step = 0; step < STEPS / 2; ++step) {
      float quads[1][4];
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const float(&c)[4] = out[row][2 * step + word / 2];
        quads[0][word] = __uint_as_float(Format::pack(c[2 * (word % 2)] * (word % 2 ? lower : upper), c[2 * (word % 2) + 1] * (word % 2 ? lower : upper)));
      }
      emit(step, quads);
    }
  }
};

// A whole axis in one kernel, by warpgroups. A block has SEQUENCES sequences, of which a warp has ROWS row tiles: their normalised tokens stay in
// shared memory as operand A of the QKV product, of which a column tile is HEAD_GROUP heads. Their queries stay in their warp's registers, their
// keys and values lie in shared memory for the warps of the sequence. A head's result goes to its place in operand A of the output product or,
// where that is the tokens' place, to scratch in the same order: from there it is copied as soon as nothing reads the tokens any more, while attention of
// the last heads goes on, and what these add at the end.
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
  using Softmax = WarpgroupSoftmax<C>;
  using Format = typename First::Format;
  static constexpr int OPERANDS = First::OPERANDS, ROWS = S::ROWS, STEPS = C::PADDED_HEAD_DIM / 8, KEY_STEPS = Softmax::KEY_STEPS;
  static constexpr int STAGES = Qkv::STAGES, FIRST_STEPS = First::COLUMN_TILES * First::SUM_TILES, ALL_STEPS = FIRST_STEPS + Second::COLUMN_TILES * Second::SUM_TILES;
  static constexpr int BLOCK_TILES = C::SEQUENCES * C::TILES;  // row tiles of the block that may be real
  static constexpr int KEPT_TILES = S::BY_WARPGROUPS ? Qkv::ROW_TILES : BLOCK_TILES;  // of keys: the matrix unit's are whole blocks of 64
  static constexpr int RESULT = OPERANDS * Second::A_OPERAND;  // words of the attention's result as operand A
  static constexpr int EARLY_TILES = C::SCRATCH ? (C::HEADS - C::HEAD_GROUP) * C::PADDED_HEAD_DIM / 64 : 0;  // of it that have no part of the last heads
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
  // step before is done for all (DONE: it is for this warp), and has the buffer of that filled again. begun: whether it adds to sums, as those of the output do to the bias; last:
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
        wgmma(Format{}, acc[row], a + 2 * k, b + 2 * k, begun || k > 0 || SAME<P, Out>);
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
    if constexpr (CLEAR && FIRST) clear(acc);
    if constexpr (CLEAR && OPERANDS == 2) clear(rest);
#pragma unroll 1
    for (int turn = 0; turn < Product::SUM_TILES / TOGETHER; ++turn)
#pragma unroll
      for (int next = 0; next < TOGETHER; ++next) {
        if (C::SCRATCH && !FIRST && LATE > 0 && turn + next == 0) wait_for_bulk_copy(ring.shared + C::BARRIERS + 2 * STAGES, 0);
        if (C::SCRATCH && !FIRST && turn * TOGETHER + next == LATE) wait_for_bulk_copy(ring.shared + C::BARRIERS + 2 * STAGES + 2, 0);
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
  static __device__ __forceinline__ void hand_on(Softmax (&softmax)[GROUP], float (&acc)[ROWS][FIRST_TILES][4], float* keys, float* values, int tile, int lane) {
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
#pragma unroll
      for (int each = 0; each < GROUP; ++each) {
        float(&own)[3 * STEPS][4] = reinterpret_cast<float(&)[3 * STEPS][4]>(acc[row][each * 3 * STEPS]);
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
              const float both[2][4] = {{held[row][which][0], held[row][which][1], held[row][which][2], held[row][which][3]}, {quads[which][0], quads[which][1], quads[which][2], quads[which][3]}};
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

  // One thread starts copies of the tiles of the attention's result from `first` on, which has come to scratch and is behind a fence of each thread.
  template <int FIRST, int END>
  static __device__ __forceinline__ void copy_result(float* shared, const float* result) {
    float* const barrier = shared + C::BARRIERS + 2 * STAGES + (END < Out::SUM / 64 ? 0 : 2);
#pragma unroll
    for (int which = 0; which < OPERANDS; ++which) {
      const int at = which * Second::A_OPERAND + FIRST * Second::A_TILE, words = (END - FIRST) * Second::A_TILE;
      if (which < OPERANDS - 1)
        add_bulk_copy(shared + at, result + at, 4 * words, barrier);
      else
        start_bulk_copy(shared + at, result + at, 4 * words, barrier);
    }
  }

  static __device__ __forceinline__ void run(const Element* x, const Element* __restrict__ norm_weight, const Element* __restrict__ norm_bias, const float* packed_qkv, float* attended, Element* y, const float* packed_out, const Element* __restrict__ out_bias, int row_tiles, float* shared) {
    const int lane = threadIdx.x % 32, tile = threadIdx.x / 32 * ROWS, first_tile = static_cast<int>(blockIdx.x) * BLOCK_TILES;
    const int end = min(row_tiles - first_tile, BLOCK_TILES);  // of the block's row tiles
    Ring ring{shared, packed_qkv, packed_out, __shfl_sync(ALL_LANES, static_cast<int>(threadIdx.x) / 32, 0), 0, 0, 0, 0, 0};  // by a shuffle: the compiler then knows that lanes agree
    if (threadIdx.x == 0) {
      for (int barrier = 0; barrier < STAGES + (C::SCRATCH ? 2 : 0); ++barrier) init_barrier(shared + C::BARRIERS + 2 * barrier);
      publish_barriers();
      wait_for_previous_kernel();  // the weights are packed; the barrier below has all threads behind this
    }
    ring.refill(0);
    // The output's bias goes to shared memory, where nobody waits long for it ahead of that product.
    constexpr int BIAS_WORDS = ceil_div(C::DIM, PER_WORD), BIAS_TURNS = ceil_div(BIAS_WORDS, Qkv::THREADS);
    const Element* const bias = reinterpret_cast<const Element*>(shared + C::BIAS);
    Word bias_words[BIAS_TURNS][1] = {};
#pragma unroll
    for (int turn = 0; turn < BIAS_TURNS; ++turn) {
      const int at = (threadIdx.x + turn * Qkv::THREADS) * PER_WORD;
      load_some<false>(bias_words[turn], out_bias + at, true, at, C::DIM);
    }
    normalise_by_groups<C>(x, norm_weight, norm_bias, first_tile, first_tile + end,
                           [&](int row_tile, int row, int channel, const float(&values)[CHUNK]) { First::store_row(shared, 16 * position(row_tile) + row, channel, values); });
#pragma unroll
    for (int turn = 0; turn < BIAS_TURNS; ++turn)
      if (const int at = threadIdx.x + turn * Qkv::THREADS; at < BIAS_WORDS) store(shared + C::BIAS + at, bias_words[turn]);
    fence_async_proxy();
    __syncthreads();  // operand A and the barriers are there for all

    float *const keys = shared + C::KEYS, *const values = shared + C::VALUES;
    // A warp without tokens takes part in all: its first key is another warp's, and it writes nothing to y.
    const int first_key = min(tile, BLOCK_TILES - 1) / C::TILES * C::TILES * C::ROW_TILE;
    float* const result = C::SCRATCH ? attended + static_cast<long long>(blockIdx.x) * RESULT : shared + C::ATTENDED;
    float held[ROWS][OPERANDS][4] = {};
    Softmax softmax[GROUP];
    OutputTiles<C, SECOND_TILES, true> tiles[ROWS];
    const auto read_residual = [&](int column) {
#pragma unroll
      for (int row = 0; row < ROWS; ++row) tiles[row].before(x, first_tile + tile + row, first_tile + end, column, lane);
    };
    constexpr bool AHEAD = C::HEADS == GROUP;  // of attention: sums of other heads need no registers then
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
        hand_on(softmax, acc, keys, values, tile, lane);
        if constexpr (C::OVERLAP) clear(beside);
        if constexpr (C::OVERLAP && OPERANDS == 2) clear(rests_beside);
        if constexpr (AHEAD) read_residual(0);
        const bool early = EARLY_TILES > 0 && head == C::HEADS - GROUP;  // no more products read the tokens
        if (early) fence_async_proxy_global();
        __syncthreads();  // keys and values are there for all
        ring.refill(ring.step);
        if (early && threadIdx.x == 0) copy_result<0, EARLY_TILES>(shared, result);
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
          softmax[each].run(keys + each * HEAD_WORDS + first_key, values + each * HEAD_WORDS + first_key, lane, multiply_next);
          keep_result(softmax[each], held, result, tile, head + each, lane);
        }
      }
      wgmma_wait<0>();  // there are none: this tells the compiler
    }

    fill(held, result, tile, lane);
    if (C::SCRATCH) fence_async_proxy_global();
    else fence_async_proxy();
    __syncthreads();
    if (C::SCRATCH && threadIdx.x == 0) copy_result<EARLY_TILES, Out::SUM / 64>(shared, result);
#pragma unroll 1
    for (int turn = 0; turn < Second::COLUMN_TILES; ++turn) {
      const int column = turn * Out::COLUMNS;
      float acc[ROWS][SECOND_TILES][4], rest[OPERANDS == 2 ? ROWS : 1][OPERANDS == 2 ? SECOND_TILES : 1][4];
#pragma unroll
      for (int row = 0; row < ROWS; ++row) {
        tiles[row].begin(acc[row], bias, column, lane);
        keep_in_registers(acc[row]);
      }
      __syncwarp();  // the residual's loads, behind which the bias would wait its turn, stay behind it
      if (!AHEAD || turn > 0) read_residual(column);
      multiply_all<Out>(acc, rest, ring);
      finish(acc, rest);
#pragma unroll
      for (int row = 0; row < ROWS; ++row)
        tiles[row].after(x, y, nullptr, first_tile + tile + row, first_tile + end, column, lane, acc[row]);
    }
  }
};

// Rows: sequences of 128 tokens, 256 elements apart.
struct StreamedRow {
  static constexpr int DIM = 256, HEADS = 8, HEAD_DIM = 32, LENGTH = 128;
  static constexpr int PADDED_HEAD_DIM = 32, INNER = 256;  // INNER: of all heads, padded
  static constexpr int TILES = 8, ROW_TILE = 256;  // of 16 tokens in a sequence; words of one for a head, in scratch
  static constexpr float EPSILON = 1.000000000e-05f;
  static constexpr float EXPONENT_SCALE = 2.550348616e-01f;  // log2(e) / sqrt(HEAD_DIM)
  using Math = HalfCore<Bf16, 1>;

  static constexpr int SEQUENCES = 1;  // of a block
  static constexpr int HEAD_GROUP = 1;  // heads whose QKV product is one column tile
  static constexpr bool OVERLAP = false;  // the next heads' product goes on beside attention
  static constexpr bool SCRATCH = true;  // whether the attention's result waits in scratch for the tokens' place
  // Shared memory, in words: operand A, that of the output product, the ring of weights, keys, values, barriers, the output's bias
  static constexpr int ATTENDED = 0, RING = 16384, RING_TILE = 2048, KEYS = 24576, VALUES = 26624, BARRIERS = 28672, BIAS = 28684;

  struct Qkv {
    using Math = HalfCore<Bf16, 1>;
    static constexpr int ROW_TILES = 8, COLUMNS = 96, SUM_TILE = 32, STAGES = 4;  // of a block
    static constexpr int WARP_COLUMN_TILES = 12, THREADS = 256, MIN_BLOCKS = 2;
    static constexpr int SUM = 256, ALL_COLUMNS = 768, PARTS = 1;  // padded sum; columns, and blocks that share them
    static constexpr int COPY = 8, RUN = 2;  // neighbouring weights that are read at once; neighbouring columns of the result that a lane has
    static constexpr int CHUNKS = 24576;  // of eight weights, to pack
    static constexpr int NORM_LANES = 8, NORM_HELD = 2;  // lanes that have a token to normalise; tokens that they have at once
    static constexpr int B_TILE = 1536;  // words of what a step needs

    static __device__ __forceinline__ const Element* weight(const Element* __restrict__ weight, int column, int k) {
      const int head = column / (3 * PADDED_HEAD_DIM), which = column / PADDED_HEAD_DIM % 3, at = column % PADDED_HEAD_DIM;  // which: q, k or v
      const int within = which == 0 ? at : result_column<PADDED_HEAD_DIM / 4>(at);  // WarpgroupSoftmax::store_keys
      return k < DIM && within < HEAD_DIM ? weight + ((which * HEADS + head) * HEAD_DIM + within) * DIM + k : nullptr;
    }
  };

  struct Streamed {
    static constexpr bool BY_WARPGROUPS = true;
    using Products = HalfStream<Bf16, 1>;
    template <int STEPS>
    using Query = Products::HeldQuery<STEPS>;
    static constexpr int WARPS = 8, ROWS = 1, MIN_BLOCKS = 2;  // ROWS: row tiles of a warp
    static constexpr int KEY_TILE = 64, STAGES = 1;  // one for all keys
    static constexpr int KEY_WORDS = 1024, VALUE_WORDS = 1024;  // of a tile of keys in shared memory
    static constexpr int VALUES = 2048, BUFFER = 4096;  // in words: start of a buffer's values, its size
    static constexpr int VALUE_COLUMNS = 256, VALUE_STRIDE = 256;
    // Of weights: how many binary orders a reference's is below 1, the largest sum in a tile, the least in the first
    static constexpr float HEADROOM = 0.0f, LIMIT = 1073741824.0f, FLOOR = 5.421010862e-20f;
    static constexpr bool SUMS_BY_PRODUCT = false;  // of weights, on the tensor cores; or added up by the lanes

    // The weight 2^x with number `index` of the eight that a lane has of 16 keys
    static __device__ __forceinline__ float power(float x, int) { return exp2_approx(x); }
  };

  struct Out {
    using Math = HalfCore<Bf16, 1>;
    static constexpr int ROW_TILES = 8, COLUMNS = 128, SUM_TILE = 32, STAGES = 4;  // of a block
    static constexpr int WARP_COLUMN_TILES = 16, THREADS = 256, MIN_BLOCKS = 2;
    static constexpr int SUM = 256, ALL_COLUMNS = 256, PARTS = 1;  // padded sum; columns, and blocks that share them
    static constexpr int COPY = 2, RUN = 8;  // neighbouring weights that are read at once; neighbouring columns of the result that a lane has
    static constexpr int CHUNKS = 8192;  // of eight weights, to pack
    static constexpr int B_TILE = 2048;  // words of what a step needs

    static __device__ __forceinline__ const Element* weight(const Element* __restrict__ weight, int column, int k) {
      // Operand A's order of the sum: WarpgroupProduct::store_fragment
      k = k / 16 * 16 + k % 16 / 4 * 2 + k % 4 / 2 * 8 + k % 2;
      return column < DIM && k < INNER ? weight + column * DIM + k : nullptr;
    }
  };

  // Where a token's channels start in x and y
  static __device__ __forceinline__ long long offset(int sequence, int token) {
    return (static_cast<long long>(sequence) * LENGTH + token) * DIM;
  }
};

// Columns: sequences of 128 tokens, 32768 elements apart.
struct StreamedColumn {
  static constexpr int DIM = 256, HEADS = 8, HEAD_DIM = 32, LENGTH = 128;
  static constexpr int PADDED_HEAD_DIM = 32, INNER = 256;  // INNER: of all heads, padded
  static constexpr int TILES = 8, ROW_TILE = 256;  // of 16 tokens in a sequence; words of one for a head, in scratch
  static constexpr float EPSILON = 1.000000000e-05f;
  static constexpr float EXPONENT_SCALE = 2.550348616e-01f;  // log2(e) / sqrt(HEAD_DIM)
  using Math = HalfCore<Bf16, 1>;

  static constexpr int SEQUENCES = 1;  // of a block
  static constexpr int HEAD_GROUP = 1;  // heads whose QKV product is one column tile
  static constexpr bool OVERLAP = false;  // the next heads' product goes on beside attention
  static constexpr bool SCRATCH = true;  // whether the attention's result waits in scratch for the tokens' place
  // Shared memory, in words: operand A, that of the output product, the ring of weights, keys, values, barriers, the output's bias
  static constexpr int ATTENDED = 0, RING = 16384, RING_TILE = 2048, KEYS = 24576, VALUES = 26624, BARRIERS = 28672, BIAS = 28684;

  struct Qkv {
    using Math = HalfCore<Bf16, 1>;
    static constexpr int ROW_TILES = 8, COLUMNS = 96, SUM_TILE = 32, STAGES = 4;  // of a block
    static constexpr int WARP_COLUMN_TILES = 12, THREADS = 256, MIN_BLOCKS = 2;
    static constexpr int SUM = 256, ALL_COLUMNS = 768, PARTS = 1;  // padded sum; columns, and blocks that share them
    static constexpr int COPY = 8, RUN = 2;  // neighbouring weights that are read at once; neighbouring columns of the result that a lane has
    static constexpr int CHUNKS = 24576;  // of eight weights, to pack
    static constexpr int NORM_LANES = 8, NORM_HELD = 2;  // lanes that have a token to normalise; tokens that they have at once
    static constexpr int B_TILE = 1536;  // words of what a step needs

    static __device__ __forceinline__ const Element* weight(const Element* __restrict__ weight, int column, int k) {
      const int head = column / (3 * PADDED_HEAD_DIM), which = column / PADDED_HEAD_DIM % 3, at = column % PADDED_HEAD_DIM;  // which: q, k or v
      const int within = which == 0 ? at : result_column<PADDED_HEAD_DIM / 4>(at);  // WarpgroupSoftmax::store_keys
      return k < DIM && within < HEAD_DIM ? weight + ((which * HEADS + head) * HEAD_DIM + within) * DIM + k : nullptr;
    }
  };

  struct Streamed {
    static constexpr bool BY_WARPGROUPS = true;
    using Products = HalfStream<Bf16, 1>;
    template <int STEPS>
    using Query = Products::HeldQuery<STEPS>;
    static constexpr int WARPS = 8, ROWS = 1, MIN_BLOCKS = 2;  // ROWS: row tiles of a warp
    static constexpr int KEY_TILE = 64, STAGES = 1;  // one for all keys
    static constexpr int KEY_WORDS = 1024, VALUE_WORDS = 1024;  // of a tile of keys in shared memory
    static constexpr int VALUES = 2048, BUFFER = 4096;  // in words: start of a buffer's values, its size
    static constexpr int VALUE_COLUMNS = 256, VALUE_STRIDE = 256;
    // Of weights: how many binary orders a reference's is below 1, the largest sum in a tile, the least in the first
    static constexpr float HEADROOM = 0.0f, LIMIT = 1073741824.0f, FLOOR = 5.421010862e-20f;
    static constexpr bool SUMS_BY_PRODUCT = false;  // of weights, on the tensor cores; or added up by the lanes

    // The weight 2^x with number `index` of the eight that a lane has of 16 keys
    static __device__ __forceinline__ float power(float x, int) { return exp2_approx(x); }
  };

  struct Out {
    using Math = HalfCore<Bf16, 1>;
    static constexpr int ROW_TILES = 8, COLUMNS = 128, SUM_TILE = 32, STAGES = 4;  // of a block
    static constexpr int WARP_COLUMN_TILES = 16, THREADS = 256, MIN_BLOCKS = 2;
    static constexpr int SUM = 256, ALL_COLUMNS = 256, PARTS = 1;  // padded sum; columns, and blocks that share them
    static constexpr int COPY = 2, RUN = 8;  // neighbouring weights that are read at once; neighbouring columns of the result that a lane has
    static constexpr int CHUNKS = 8192;  // of eight weights, to pack
    static constexpr int B_TILE = 2048;  // words of what a step needs

    static __device__ __forceinline__ const Element* weight(const Element* __restrict__ weight, int column, int k) {
      // Operand A's order of the sum: WarpgroupProduct::store_fragment
      k = k / 16 * 16 + k % 16 / 4 * 2 + k % 4 / 2 * 8 + k % 2;
      return column < DIM && k < INNER ? weight + column * DIM + k : nullptr;
    }
  };

  // Where a token's channels start in x and y
  static __device__ __forceinline__ long long offset(int sequence, int token) {
    constexpr int WIDTH = 128;
    const int image = sequence / WIDTH, column = sequence % WIDTH;
    return ((static_cast<long long>(image) * LENGTH + token) * WIDTH + column) * DIM;
  }
};

// Kernel 0: packs the weights of all products by warpgroups, of all axes
extern "C" __global__ void __launch_bounds__(128)
axial_pack(const Element* __restrict__ row_qkv_weight, const Element* __restrict__ row_out_weight, const Element* __restrict__ col_qkv_weight, const Element* __restrict__ col_out_weight, Element* row_packed_qkv, Element* row_packed_out, Element* col_packed_qkv, Element* col_packed_out, int chunks) {
  allow_next_kernel();
  int chunk = blockIdx.x * 128 + threadIdx.x;
  if (chunk >= chunks) return;
  if (chunk < StreamedRow::Qkv::CHUNKS) return WarpgroupProduct<StreamedRow::Qkv>::pack(row_qkv_weight, words(row_packed_qkv), chunk);
  chunk -= StreamedRow::Qkv::CHUNKS;
  if (chunk < StreamedRow::Out::CHUNKS) return WarpgroupProduct<StreamedRow::Out>::pack(row_out_weight, words(row_packed_out), chunk);
  chunk -= StreamedRow::Out::CHUNKS;
  if (chunk < StreamedColumn::Qkv::CHUNKS) return WarpgroupProduct<StreamedColumn::Qkv>::pack(col_qkv_weight, words(col_packed_qkv), chunk);
  chunk -= StreamedColumn::Qkv::CHUNKS;
  WarpgroupProduct<StreamedColumn::Out>::pack(col_out_weight, words(col_packed_out), chunk);
}

extern "C" __global__ void __launch_bounds__(StreamedRow::Qkv::THREADS, StreamedRow::Qkv::MIN_BLOCKS)
axial_row_block(const Element* x, const Element* __restrict__ norm_weight, const Element* __restrict__ norm_bias, const Element* packed_qkv, Element* attended, Element* y, const Element* packed_out, const Element* __restrict__ out_bias, int row_tiles) {
  extern __shared__ __align__(1024) float shared[];
  allow_next_kernel();
  Resident<StreamedRow>::run(x, norm_weight, norm_bias, words(packed_qkv), words(attended), y, words(packed_out), out_bias, row_tiles, shared);
}

extern "C" __global__ void __launch_bounds__(StreamedColumn::Qkv::THREADS, StreamedColumn::Qkv::MIN_BLOCKS)
axial_col_block(const Element* x, const Element* __restrict__ norm_weight, const Element* __restrict__ norm_bias, const Element* packed_qkv, Element* attended, Element* y, const Element* packed_out, const Element* __restrict__ out_bias, int row_tiles) {
  extern __shared__ __align__(1024) float shared[];
  allow_next_kernel();
  wait_for_previous_kernel();  // which writes x
  Resident<StreamedColumn>::run(x, norm_weight, norm_bias, words(packed_qkv), words(attended), y, words(packed_out), out_bias, row_tiles, shared);
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
  if (!fits) refuse(std::string(name) + " has the wrong shape: the kernels are built for dim 256");
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

// x: (batch, 128, 128, 256) bfloat16 on a CUDA device, of any strides; the result is contiguous.
Tensor launch(Tensor given, Tensor row_norm_weight, Tensor row_norm_bias, Tensor row_qkv_weight, Tensor row_out_weight, Tensor row_out_bias, Tensor col_norm_weight, Tensor col_norm_bias, Tensor col_qkv_weight, Tensor col_out_weight, Tensor col_out_bias) {
  if (!given.is_cuda()) refuse("the input must be on a CUDA device");
  if (given.scalar_type() != torch::headeronly::ScalarType::BFloat16) refuse("the input must be bfloat16");
  if (given.dim() != 4 || given.size(1) != 128 || given.size(2) != 128 || given.size(3) != 256)
    refuse("the input must be (batch, 128, 128, 256)");
  const int32_t device = given.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const Tensor x = dense(given);
  const int64_t batch = x.size(0);
  if (batch > INT_MAX / 1024) refuse("batch " + std::to_string(batch) + " is too large: split the input");
  const Tensor y = made({batch, 128, 128, 256}, device);
  if (batch == 0) return y;
  row_norm_weight = parameter(row_norm_weight, "row_norm_weight", 256, 0, device);
  row_norm_bias = parameter(row_norm_bias, "row_norm_bias", 256, 0, device);
  row_qkv_weight = parameter(row_qkv_weight, "row_qkv_weight", 768, 256, device);
  row_out_weight = parameter(row_out_weight, "row_out_weight", 256, 256, device);
  row_out_bias = parameter(row_out_bias, "row_out_bias", 256, 0, device);
  col_norm_weight = parameter(col_norm_weight, "col_norm_weight", 256, 0, device);
  col_norm_bias = parameter(col_norm_bias, "col_norm_bias", 256, 0, device);
  col_qkv_weight = parameter(col_qkv_weight, "col_qkv_weight", 768, 256, device);
  col_out_weight = parameter(col_out_weight, "col_out_weight", 256, 256, device);
  col_out_bias = parameter(col_out_bias, "col_out_bias", 256, 0, device);
  void* current = nullptr;
  if (aoti_torch_get_current_cuda_stream(device, &current) != 0) refuse("PyTorch gave no current CUDA stream");
  const cudaStream_t stream = static_cast<cudaStream_t>(current);
  const void* const out = y.mutable_data_ptr();
  // What kernels hand on, in one buffer: what is of one size for every batch, then what grows with it
  const Tensor scratch = made({batch * int64_t{4194304} + 524288}, device);
  const char* const pieces = static_cast<const char*>(scratch.mutable_data_ptr());
  const void* const row_packed_qkv = pieces + 0;
  const void* const row_packed_out = pieces + 393216;
  const void* const col_packed_qkv = pieces + 524288;
  const void* const col_packed_out = pieces + 917504;
  const void* const attended = pieces + 1048576;
  {
    // Packing: 128 chunks a block
    static Handles handles{};
    const int chunks = 65536;
    const int64_t blocks = (static_cast<int64_t>(chunks) + 127) / 128;
    const Launch how{axialtune_kernel(0), blocks, 128, 0, false, device, stream};
    check(launch_kernel(how, handles, {data(row_qkv_weight), data(row_out_weight), data(col_qkv_weight), data(col_out_weight), row_packed_qkv, row_packed_out, col_packed_qkv, col_packed_out}, chunks), "axial_pack could not be launched");
  }
  {
    // Rows: 8 row_tiles a block
    static Handles handles{};
    const int row_tiles = static_cast<int>(batch * 1024);
    const int64_t blocks = (static_cast<int64_t>(row_tiles) + 7) / 8;
    const Launch how{axialtune_kernel(1), blocks, 256, 115248, true, device, stream};
    check(launch_kernel(how, handles, {data(x), data(row_norm_weight), data(row_norm_bias), row_packed_qkv, attended, out, row_packed_out, data(row_out_bias)}, row_tiles), "axial_row_block could not be launched");
  }
  {
    // Columns: 8 row_tiles a block
    static Handles handles{};
    const int row_tiles = static_cast<int>(batch * 1024);
    const int64_t blocks = (static_cast<int64_t>(row_tiles) + 7) / 8;
    const Launch how{axialtune_kernel(2), blocks, 256, 115248, true, device, stream};
    check(launch_kernel(how, handles, {out, data(col_norm_weight), data(col_norm_bias), col_packed_qkv, attended, out, col_packed_out, data(col_out_bias)}, row_tiles), "axial_col_block could not be launched");
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
    "-gencode=arch=compute_90a,code=sm_90a",
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
    """Row attention, then column attention over a 128x128 grid of 256 channels, bfloat16.

    dim and num_heads have to be 256 and 8. An input is (batch, height, width, dim), of any batch; a height and width other
    than 128 and 128 are computed by PyTorch. dropout applies to the attention weights while training, by PyTorch too.
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
