"""Axial attention block: dim 256, 8 heads, 128x256, float32, for sm_90.

Row attention, then column attention over (batch, height, width, dim), with LayerNorm before and a residual after each
axis. Tuned for batch 1; any batch is computed. The fp16x3 arithmetic keeps operands of products as pairs of fp16
values: one beyond 65504 becomes infinite, and what is below 1e-11 is lost.

Configuration:
    row: family staged, math fp16x3, qkv_warp_rows 4, qkv_warp_columns 4, qkv_down 1, qkv_across 4, qkv_sum_tile 32,
         qkv_stages 2, qkv_parts 1, qkv_blocks 1, attn_warps 4, attn_key_tile 64, attn_stages 3, attn_blocks 1,
         out_warp_rows 4, out_warp_columns 4, out_down 1, out_across 4, out_sum_tile 32, out_stages 3,
         out_parts 1, out_blocks 1
    col: family staged, math fp16x3, qkv_warp_rows 4, qkv_warp_columns 4, qkv_down 1, qkv_across 4, qkv_sum_tile 32,
         qkv_stages 2, qkv_parts 1, qkv_blocks 1, attn_warps 4, attn_key_tile 64, attn_stages 3, attn_blocks 1,
         out_warp_rows 4, out_warp_columns 4, out_down 1, out_across 4, out_sum_tile 32, out_stages 3,
         out_parts 1, out_blocks 1

Measured on NVIDIA H200.
    device time: 738.62 +- 1.36 us
    device time, L2 flushed: 743.09 us
    wall time of a call: 774.60 us
    PyTorch (torch.compile + SDPA), device time: 1580.57 us
    PyTorch (torch.compile + SDPA), wall time of a call: 1697.12 us
    error against float64: 2.2e-06 of the output's scale
Command: python cli.py tune --dim 256 --heads 8 --height 128 --width 256 --batch 1 --budget 50 --trials 24 --storage
none --out /tmp/g
Written 2026-11-29T16:46:39Z, driver 580.159.04, torch 2.11.0+cu130, CUDA 13.0, python 3.12.3, nvrtc 13.0.
The default configuration was not verified.

ModelNew(dim, num_heads, height, width, dropout=0.0) replaces the PyTorch block with the same parameters. The CUDA
kernels are built at the first call with a CUDA tensor, which needs the CUDA toolkit and a C++ compiler; CPU tensors,
other data types, other sizes, dropout while training and autocast are computed by PyTorch.
"""
import contextlib
import glob
import hashlib
import importlib.util
import math
import os
import shutil
import stat
import sys
import sysconfig
import tempfile
import warnings

import torch
from torch import nn
from torch.nn import functional as F

# What computes on CUDA: the kernels below, or one of PyTorch's own forms of the block (_FORMS).
USE = "kernels"

SPEC = {
    "dim": 256, "heads": 8, "height": 128, "width": 256, "batch": 1, "dtype": "float32", "axes": ("row", "col"),
    "eps": 1e-05,
}
ARCH = "sm_90"
CONFIGS = {
    "row": {
        "family": "staged", "math": "fp16x3", "qkv_warp_rows": 4, "qkv_warp_columns": 4, "qkv_down": 1, "qkv_across": 4,
        "qkv_sum_tile": 32, "qkv_stages": 2, "qkv_parts": 1, "qkv_blocks": 1, "attn_warps": 4, "attn_key_tile": 64,
        "attn_stages": 3, "attn_blocks": 1, "out_warp_rows": 4, "out_warp_columns": 4, "out_down": 1, "out_across": 4,
        "out_sum_tile": 32, "out_stages": 3, "out_parts": 1, "out_blocks": 1,
    },
    "col": {
        "family": "staged", "math": "fp16x3", "qkv_warp_rows": 4, "qkv_warp_columns": 4, "qkv_down": 1, "qkv_across": 4,
        "qkv_sum_tile": 32, "qkv_stages": 2, "qkv_parts": 1, "qkv_blocks": 1, "attn_warps": 4, "attn_key_tile": 64,
        "attn_stages": 3, "attn_blocks": 1, "out_warp_rows": 4, "out_warp_columns": 4, "out_down": 1, "out_across": 4,
        "out_sum_tile": 32, "out_stages": 3, "out_parts": 1, "out_blocks": 1,
    },
}
KERNELS = [
    {
        "name": "axial_row_qkv", "axis": "row", "threads": 128, "shared_bytes": 100608, "items_per_block": 4,
        "dependent_launch": False,
        "arguments": ("x", "norm_weight", "norm_bias", "qkv_weight", "query", "key", "value"), "items": "row_tiles",
        "blocks_per_group": 1,
    },
    {
        "name": "axial_row_attention", "axis": "row", "threads": 128, "shared_bytes": 57344, "items_per_block": 1,
        "dependent_launch": False, "arguments": ("query", "key", "value", "attended"), "items": "sequences",
        "blocks_per_group": 32,
    },
    {
        "name": "axial_row_out", "axis": "row", "threads": 128, "shared_bytes": 115072, "items_per_block": 4,
        "dependent_launch": False, "arguments": ("attended", "x", "y", "out_weight", "out_bias"), "items": "row_tiles",
        "blocks_per_group": 1,
    },
    {
        "name": "axial_col_qkv", "axis": "col", "threads": 128, "shared_bytes": 100608, "items_per_block": 4,
        "dependent_launch": False,
        "arguments": ("x", "norm_weight", "norm_bias", "qkv_weight", "query", "key", "value"), "items": "row_tiles",
        "blocks_per_group": 1,
    },
    {
        "name": "axial_col_attention", "axis": "col", "threads": 128, "shared_bytes": 57344, "items_per_block": 1,
        "dependent_launch": False, "arguments": ("query", "key", "value", "attended"), "items": "sequences",
        "blocks_per_group": 16,
    },
    {
        "name": "axial_col_out", "axis": "col", "threads": 128, "shared_bytes": 115072, "items_per_block": 4,
        "dependent_launch": False, "arguments": ("attended", "x", "y", "out_weight", "out_bias"), "items": "row_tiles",
        "blocks_per_group": 1,
    },
]
SCRATCH = {"query": 8388608, "key": 8388608, "value": 8388608, "attended": 8388608}
PROVENANCE = {
    "measured": True,
    "command": "python cli.py tune --dim 256 --heads 8 --height 128 --width 256 --batch 1 --budget 50 --trials 24 --storage none --out /tmp/g",
    "date": "2026-11-29T16:46:39Z", "gpu": "NVIDIA H200", "driver": "580.159.04", "torch": "2.11.0+cu130",
    "cuda": "13.0", "versions": {"python": "3.12.3", "nvrtc": "13.0"}, "device_us": 738.6200129985809,
    "spread_us": 1.3600066304206848, "cold_us": 743.0880069732666, "wall_us": 774.6035833354388, "default_us": None,
    "pytorch_us": 1580.568015575409, "pytorch_wall_us": 1697.1153333334616, "pytorch_form": "torch.compile + SDPA",
    "kernels_us": None, "kernels_wall_us": None, "predicted_us": None, "error": 2.1822412228712567e-06,
    "partial": False, "note": "The default configuration was not verified.",
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

// Elements of x, y and the parameters: float, in memory as in registers.
using Element = float;
using Word = float;  // what a lane loads elements in
constexpr int PER_WORD = 1;

__device__ __forceinline__ void put(Element* to, float value) { *to = value; }

template <int N>
__device__ __forceinline__ void unpack(float (&to)[N], const Word (&words)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = words[i];
}

// Those of N neighbouring elements that exist: `from` has the index `index`, and `limit` is the first one that does not exist.
// CONSTANT ones do not change while the kernel runs.
template <bool CONSTANT, int N>
__device__ __forceinline__ void load_some(Word (&to)[N], const Element* from, bool real, int index, int limit) {
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (real && index + i < limit) to[i] = CONSTANT ? __ldg(from + i) : from[i];
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

// Elements of tensors are read and written here and by copy_async alone.
// N neighbouring channels of a token (or of a vector of DIM) from `channel` on; those past DIM are left as they are.
template <int DIM, int N>
__device__ __forceinline__ void load_channels(float (&to)[N], const float* from, int channel) {
  if constexpr (DIM % N == 0) {
    if (channel < DIM) load(to, from + channel);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (channel + i < DIM) to[i] = from[channel + i];
  }
}

template <int DIM, int N>
__device__ __forceinline__ void store_channels(float* to, int channel, const float (&values)[N]) {
  if constexpr (DIM % N == 0) {
    if (channel < DIM) store(to + channel, values);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (channel + i < DIM) to[channel + i] = values[i];
  }
}

// A tiled product of rows with weights. P states it: a block has ROW_TILES * 16 rows and turns over column tiles of COLUMNS, of which the
// PARTS blocks that share rows take every PARTS-th; the sum goes in tiles of SUM_TILE. Operand A stays in shared memory for all of the
// sum, as fragments in the order [tile of the sum][row tile][page]. The weights stream through STAGES buffers by asynchronous copies,
// across column tiles without a break. A buffer is planes of PLANE neighbouring indices of the sum, the row of each column
// COLUMN_STRIDE floats from the one before, so that neither copies nor operand loads have bank conflicts.
template <typename P>
struct TiledProduct {
  using Math = typename P::Math;
  static constexpr int F = P::FRAGMENT, PLANE = 4 * F, WARP_COLUMNS = 8 * P::WARP_COLUMN_TILES;
  static constexpr int SUM_TILES = P::SUM / P::SUM_TILE, COLUMN_TILES = ceil_div(P::ALL_COLUMNS, P::COLUMNS);

  // A tile of the weights into a buffer. P::weight(weight, column, k) is where that column's weights from index k on lie, or null for zeros.
  static __device__ __forceinline__ void copy_weights(float* to, const float* __restrict__ weight, int column_tile, int sum_tile) {
    constexpr int V = P::COPY, ACROSS = P::SUM_TILE / V, COPIES = P::COLUMNS * ACROSS;
#pragma unroll 4
    for (int turn = 0; turn < ceil_div(COPIES, P::THREADS); ++turn) {
      const int copy = threadIdx.x + turn * P::THREADS, column = copy / ACROSS, k = copy % ACROSS * V;
      if (COPIES % P::THREADS != 0 && copy >= COPIES) break;
      const float* from = P::weight(weight, column_tile * P::COLUMNS + column, sum_tile * P::SUM_TILE + k);
      copy_async<4 * V>(to + k / PLANE * P::PLANE_STRIDE + column * P::COLUMN_STRIDE + k % PLANE, from ? from : weight, from != nullptr);
    }
  }

  // Starts the copies of one step: prepare(sum_tile) adds those of operand A.
  template <typename Prepare>
  static __device__ __forceinline__ void start(float* buffers, const float* __restrict__ weight, int step, int steps, int part, Prepare prepare) {
    if (step < steps) {
      if (step < SUM_TILES) prepare(step);
      copy_weights(buffers + step % P::STAGES * P::B_TILE, weight, part + step / SUM_TILES * P::PARTS, step % SUM_TILES);
    }
    commit_copies();
  }

  // prepare(sum_tile) starts the copies of a tile of operand A (once each); fill() writes what is not copied; store(row_tile, column, acc)
  // takes a warp's result: the first of its row tiles and of its columns.
  template <typename Prepare, typename Fill, typename Store>
  static __device__ __forceinline__ void run(float* a, float* buffers, const float* __restrict__ weight, int part, Prepare prepare, Fill fill, Store store_result) {
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
#pragma unroll 1
      for (int sum_tile = 0; sum_tile < SUM_TILES; ++sum_tile, ++step) {
        wait_for_copies<P::STAGES - 2>();
        __syncthreads();  // the step's operands are there for all, and the buffer of the step before is free
        start(buffers, weight, step + P::STAGES - 1, steps, part, prepare);
        const float* b = buffers + step % P::STAGES * P::B_TILE + first_column * P::COLUMN_STRIDE;
        const auto load_b = [&](int tile, int column, int k, float(&to)[F]) {
          load(to, b + k / PLANE * P::PLANE_STRIDE + (8 * tile + column) * P::COLUMN_STRIDE + k % PLANE);
        };
        Math::template add_product<P::SUM_TILE, F, P::PAGE>(acc, sums, a + sum_tile * P::A_TILE + first_row_tile * (P::SUM_TILE / 8) * P::PAGE, lane,
                                                            [&](int j, int at) { return Math::pack(Math::template read<F>(j, at, lane, load_b)); });
      }
      sums.add_to(acc);
      store_result(first_row_tile, (part + turn * P::PARTS) * P::COLUMNS + first_column, acc);
    }
  }
};

// Operand A of the QKV product: the block's tokens, normalised (LayerNorm with the biased variance), all channels of them, as fragments in
// the order [tile of the sum][row tile][page]. A warp takes tokens g and g+8 of a row tile at a time and keeps them in registers between
// mean and variance. Tokens past a sequence's end, row tiles past the last one and channels past DIM become zeros.
template <typename C>
__device__ __forceinline__ void normalise_rows(const float* x, const float* __restrict__ weight, const float* __restrict__ bias, int first_tile, int row_tiles, float* a) {
  using P = typename C::Qkv;
  constexpr int VEC = C::DIM % 4 == 0 ? 4 : 2, STEPS = ceil_div(P::SUM, 32 * VEC), PAIRS = 8 * P::ROW_TILES, WARPS = P::THREADS / 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 1
  for (int pair = warp; pair < PAIRS; pair += WARPS) {
    const int row_tile = pair / 8, g = pair % 8, tile = first_tile + row_tile;
    const int sequence = tile / C::TILES;
    float values[2][STEPS][VEC] = {}, mean[2], inverse[2];
    bool real[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = tile % C::TILES * 16 + 8 * half + g;
      real[half] = tile < row_tiles && token < C::LENGTH;
      if (real[half]) {
        const float* from = x + C::offset(sequence, token);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) load_channels<C::DIM>(values[half][step], from, (step * 32 + lane) * VEC);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = 0.0f, squares = 0.0f;
#pragma unroll
      for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int i = 0; i < VEC; ++i) sum += values[half][step][i];
      mean[half] = group_sum<32>(sum) * (1.0f / C::DIM);
#pragma unroll
      for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          const float centred = values[half][step][i] - mean[half];
          if ((step * 32 + lane) * VEC + i < C::DIM) squares += centred * centred;
        }
      inverse[half] = rsqrtf(group_sum<32>(squares) * (1.0f / C::DIM) + C::EPSILON);
    }
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const int channel = (step * 32 + lane) * VEC;
      if (channel >= P::SUM) continue;
      float gain[VEC] = {}, shift[VEC] = {};
      load_channels<C::DIM>(gain, weight, channel), load_channels<C::DIM>(shift, bias, channel);
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          const float normed = fmaf((values[half][step][i] - mean[half]) * inverse[half], gain[i], shift[i]);
          values[half][step][i] = real[half] && channel + i < C::DIM ? normed : 0.0f;
        }
      float* to = a + channel / P::SUM_TILE * P::A_TILE;
#pragma unroll
      for (int i = 0; i < VEC; i += 2) {
        const float upper[2] = {values[0][step][i], values[0][step][i + 1]}, lower[2] = {values[1][step][i], values[1][step][i + 1]};
        C::Math::template store_rows<P::FRAGMENT, P::SUM_TILE / 8, P::PAGE>(to, row_tile, g, channel % P::SUM_TILE + i, upper, lower);
      }
    }
  }
}

// Kernel 1: LayerNorm and the QKV product. q, k and v go to scratch as the fragments that kernel 2 multiplies, in the order
// [sequence][head][row tile][column tile of the head], so that it reads rows and columns of the grid alike, in one piece.
template <typename C>
__device__ __forceinline__ void qkv(const float* x, const float* __restrict__ norm_weight, const float* __restrict__ norm_bias,
                                    const float* __restrict__ qkv_weight, float* query, float* key, float* value, int row_tiles, float* shared) {
  using P = typename C::Qkv;
  using Math = typename C::Math;
  constexpr int STEPS = C::PADDED_HEAD_DIM / 8, INNER_STEPS = C::INNER / 8;
  const int part = blockIdx.x % P::PARTS, first_tile = static_cast<int>(blockIdx.x / P::PARTS) * P::ROW_TILES, lane = threadIdx.x % 32;
  TiledProduct<P>::run(
      shared, shared + P::BUFFERS, qkv_weight, part, [](int) {},
      [&]() { normalise_rows<C>(x, norm_weight, norm_bias, first_tile, row_tiles, shared); },
      [&](int row_tile, int column, const float(&acc)[P::WARP_ROW_TILES][P::WARP_COLUMN_TILES][4]) {
#pragma unroll
        for (int i = 0; i < P::WARP_ROW_TILES; ++i) {
          const int tile = first_tile + row_tile + i, sequence = tile / C::TILES;
          if (tile >= row_tiles) break;
#pragma unroll
          for (int j = 0; j < P::WARP_COLUMN_TILES; ++j) {
            const int step = column / 8 + j, which = step / INNER_STEPS, within = step % INNER_STEPS;
            if (step >= 3 * INNER_STEPS) break;
            const long long at = ((static_cast<long long>(sequence) * C::HEADS + within / STEPS) * C::TILES + tile % C::TILES) * (16 * C::PADDED_HEAD_DIM);
            if (which == 0)
              Math::template store_query<STEPS>(query + at, 0, within % STEPS, lane, acc[i][j]);
            else if (which == 1)
              Math::template store_key<STEPS>(key + at, 0, within % STEPS, lane, acc[i][j]);
            else
              Math::template store_value<STEPS, C::PADDED_HEAD_DIM>(value + at, 0, within % STEPS, lane, acc[i][j]);
          }
        }
      });
}

// Kernel 2: softmax(q k^T / sqrt(HEAD_DIM)) v for WARPS * 16 queries of one sequence and head, 16 a warp, streaming over tiles of keys with
// a running maximum and sum (Milakov and Gimelshein 2018), so that no row of scores is ever stored. Tiles of keys and values come
// through STAGES buffers by asynchronous copies. The result goes to scratch as operand A of kernel 3.
template <typename C>
struct StreamedAttention {
  using Math = typename C::Math;
  using S = typename C::Streamed;
  static constexpr int STEPS = C::PADDED_HEAD_DIM / 8, ROW_TILE = 16 * C::PADDED_HEAD_DIM;  // floats of a row tile of one head in scratch
  static constexpr int KEYS = S::KEY_TILE / 8, KEY_STEPS = ceil_div(16 * C::TILES, S::KEY_TILE), THREADS = 32 * S::WARPS;
  static constexpr int KEY_FLOATS = S::KEY_TILE / 16 * ROW_TILE, GROUPS = ceil_div(C::TILES, S::WARPS);

  // `tiles` row tiles of one head, of which `real` exist, in pieces of COLUMNS floats that are STRIDE apart in shared memory.
  template <int COLUMNS, int STRIDE>
  static __device__ __forceinline__ void copy_tiles(float* to, const float* from, int tiles, int real) {
#pragma unroll 4
    for (int at = 4 * threadIdx.x; at < tiles * ROW_TILE; at += 4 * THREADS) {
      const bool there = at < real * ROW_TILE;
      copy_async<16>(to + at / COLUMNS * STRIDE + at % COLUMNS, there ? from + at : from, there);
    }
  }

  static __device__ __forceinline__ void start(float* shared, const float* key, const float* value, int step) {
    if (step < KEY_STEPS) {
      constexpr int TILES = S::KEY_TILE / 16;
      float* to = shared + S::BUFFERS + step % S::STAGES * S::BUFFER;
      const int first = step * TILES, real = min(C::TILES - first, TILES);
      copy_tiles<ROW_TILE, ROW_TILE>(to, key + first * ROW_TILE, TILES, real);
      copy_tiles<S::VALUE_COLUMNS, S::VALUE_STRIDE>(to + KEY_FLOATS, value + first * ROW_TILE, TILES, real);
    }
    commit_copies();
  }

  static __device__ __forceinline__ void run(const float* query, const float* key, const float* value, float* attended, float* shared) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int group = blockIdx.x % GROUPS, unit = blockIdx.x / GROUPS, head = unit % C::HEADS, sequence = unit / C::HEADS;
    const int first_tile = group * S::WARPS, tile = first_tile + warp;
    const long long base = static_cast<long long>(unit) * C::TILES * ROW_TILE;
    copy_tiles<ROW_TILE, ROW_TILE>(shared, query + base + first_tile * ROW_TILE, S::WARPS, min(C::TILES - first_tile, S::WARPS));
#pragma unroll
    for (int step = 0; step < S::STAGES - 1; ++step) start(shared, key + base, value + base, step);
    float out[1][STEPS][4] = {};
    float sum[2] = {}, highest[2] = {minus_infinity(), minus_infinity()};
#pragma unroll 1
    for (int step = 0; step < KEY_STEPS; ++step) {
      wait_for_copies<S::STAGES - 2>();
      __syncthreads();  // the step's keys and values are there for all, and the buffer of the step before is free
      start(shared, key + base, value + base, step + S::STAGES - 1);
      if (tile >= C::TILES) continue;
      const float* keys = shared + S::BUFFERS + step % S::STAGES * S::BUFFER;
      float p[1][KEYS][4] = {};
      Math::template scores<STEPS, STEPS>(p, shared, keys, warp, 0, 0, lane);
      if (C::LENGTH % S::KEY_TILE != 0 && step == KEY_STEPS - 1) {
#pragma unroll
        for (int j = 0; j < KEYS; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            if (step * S::KEY_TILE + 8 * j + 2 * (lane % 4) + i % 2 >= C::LENGTH) p[0][j][i] = minus_infinity();
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
        sum[half] = fmaf(sum[half], correction, tile_sum);
#pragma unroll
        for (int j = 0; j < STEPS; ++j) out[0][j][2 * half] *= correction, out[0][j][2 * half + 1] *= correction;
        highest[half] = now;
      }
      Math::template weighted_sum<STEPS, S::VALUE_STRIDE>(out, p, keys + KEY_FLOATS, 0, 0, lane);
    }
    if (tile >= C::TILES) return;
    const float upper = __fdividef(1.0f, group_sum<4>(sum[0])), lower = __fdividef(1.0f, group_sum<4>(sum[1]));
    float* to = attended + (static_cast<long long>(sequence) * C::TILES + tile) * (16 * C::INNER);
#pragma unroll
    for (int j = 0; j < STEPS; ++j) {
      const float c[4] = {out[0][j][0] * upper, out[0][j][1] * upper, out[0][j][2] * lower, out[0][j][3] * lower};
      Math::template store_query<C::INNER / 8>(to, 0, head * STEPS + j, lane, c);
    }
  }
};

// Kernel 3: output product, bias and residual, written to the grid by stride. An element of y is written by the thread that has read
// it as residual, so that x may be y.
template <typename C>
__device__ __forceinline__ void output(const float* attended, const float* x, float* y, const float* __restrict__ out_weight,
                                       const float* __restrict__ out_bias, int row_tiles, float* shared) {
  using P = typename C::Out;
  constexpr int PAGES = C::INNER / 8, TILE_PAGES = P::SUM_TILE / 8;
  const int part = blockIdx.x % P::PARTS, first_tile = static_cast<int>(blockIdx.x / P::PARTS) * P::ROW_TILES, lane = threadIdx.x % 32;
  const float* rows = attended + static_cast<long long>(first_tile) * (PAGES * 128);
  TiledProduct<P>::run(
      shared, shared + P::BUFFERS, out_weight, part,
      [&](int sum_tile) {
        float* to = shared + sum_tile * P::A_TILE;
#pragma unroll 4
        for (int at = threadIdx.x; at < P::ROW_TILES * TILE_PAGES * 32; at += P::THREADS) {
          const int page = at / 32, row_tile = page / TILE_PAGES, within = sum_tile * TILE_PAGES + page % TILE_PAGES;
          const bool real = first_tile + row_tile < row_tiles && within < PAGES;
          copy_async<16>(to + page * P::PAGE + at % 32 * 4, real ? rows + (row_tile * PAGES + within) * 128 + at % 32 * 4 : attended, real);
        }
      },
      []() {},
      [&](int row_tile, int column, const float(&acc)[P::WARP_ROW_TILES][P::WARP_COLUMN_TILES][4]) {
#pragma unroll
        for (int i = 0; i < P::WARP_ROW_TILES; ++i)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int tile = first_tile + row_tile + i, token = tile % C::TILES * 16 + 8 * half + lane / 4;
            if (tile >= row_tiles || token >= C::LENGTH) continue;
            const long long start = C::offset(tile / C::TILES, token);
#pragma unroll
            for (int j = 0; j < P::WARP_COLUMN_TILES; ++j) {
              const int channel = column + 8 * j + 2 * (lane % 4);
              float pair[2] = {}, residual[2] = {};
              load_channels<C::DIM>(pair, out_bias, channel);
              load_channels<C::DIM>(residual, x + start, channel);
              pair[0] += acc[i][j][2 * half] + residual[0];
              pair[1] += acc[i][j][2 * half + 1] + residual[1];
              store_channels<C::DIM>(y + start, channel, pair);
            }
          }
      });
}

// Rows: sequences of 256 tokens, 256 floats apart.
struct StagedRow {
  static constexpr int DIM = 256, HEADS = 8, HEAD_DIM = 32, LENGTH = 256;
  static constexpr int PADDED_HEAD_DIM = 32, INNER = 256;  // INNER: of all heads, padded
  static constexpr int TILES = 16;  // of 16 tokens in a sequence
  static constexpr float EPSILON = 1.000000000e-05f;
  static constexpr float EXPONENT_SCALE = 2.550348616e-01f;  // log2(e) / sqrt(HEAD_DIM)
  using Math = HalfCore<Fp16, 2>;

  struct Qkv {
    using Math = HalfCore<Fp16, 2>;
    static constexpr int ROW_TILES = 4, COLUMNS = 128, SUM_TILE = 32, STAGES = 2;  // of a block
    static constexpr int WARP_ROW_TILES = 4, WARP_COLUMN_TILES = 4, WARPS_ACROSS = 4, THREADS = 128, MIN_BLOCKS = 1;
    static constexpr int SUM = 256, ALL_COLUMNS = 768, PARTS = 1;  // padded sum; columns, and blocks that share them
    static constexpr int FRAGMENT = 4, COPY = 4;  // neighbouring weights that a lane loads, or copies, at once
    // Shared memory, in floats
    static constexpr int PAGE = 132, A_TILE = ROW_TILES * (SUM_TILE / 8) * PAGE, BUFFERS = 16896;
    static constexpr int COLUMN_STRIDE = 16, PLANE_STRIDE = 2064, B_TILE = 4128;

    static __device__ __forceinline__ const float* weight(const float* __restrict__ weight, int column, int k) {
      return column < ALL_COLUMNS && k < DIM ? weight + column * DIM + k : nullptr;
    }
  };

  struct Streamed {
    static constexpr int WARPS = 4, KEY_TILE = 64, STAGES = 3, MIN_BLOCKS = 1;
    static constexpr int BUFFERS = 2048, BUFFER = 4096;  // shared memory in floats: start of the stages, size of one
    static constexpr int VALUE_COLUMNS = 512, VALUE_STRIDE = 512;
  };

  struct Out {
    using Math = HalfCore<Fp16, 2>;
    static constexpr int ROW_TILES = 4, COLUMNS = 128, SUM_TILE = 32, STAGES = 3;  // of a block
    static constexpr int WARP_ROW_TILES = 4, WARP_COLUMN_TILES = 4, WARPS_ACROSS = 4, THREADS = 128, MIN_BLOCKS = 1;
    static constexpr int SUM = 256, ALL_COLUMNS = 256, PARTS = 1;  // padded sum; columns, and blocks that share them
    static constexpr int FRAGMENT = 2, COPY = 4;  // neighbouring weights that a lane loads, or copies, at once
    // Shared memory, in floats
    static constexpr int PAGE = 128, A_TILE = ROW_TILES * (SUM_TILE / 8) * PAGE, BUFFERS = 16384;
    static constexpr int COLUMN_STRIDE = 8, PLANE_STRIDE = 1032, B_TILE = 4128;

    static __device__ __forceinline__ const float* weight(const float* __restrict__ weight, int column, int k) {
      return column < DIM && k < INNER ? weight + column * DIM + k : nullptr;
    }
  };

  // Where a token's channels start in x and y
  static __device__ __forceinline__ long long offset(int sequence, int token) {
    return (static_cast<long long>(sequence) * LENGTH + token) * DIM;
  }
};

// Columns: sequences of 128 tokens, 65536 floats apart.
struct StagedColumn {
  static constexpr int DIM = 256, HEADS = 8, HEAD_DIM = 32, LENGTH = 128;
  static constexpr int PADDED_HEAD_DIM = 32, INNER = 256;  // INNER: of all heads, padded
  static constexpr int TILES = 8;  // of 16 tokens in a sequence
  static constexpr float EPSILON = 1.000000000e-05f;
  static constexpr float EXPONENT_SCALE = 2.550348616e-01f;  // log2(e) / sqrt(HEAD_DIM)
  using Math = HalfCore<Fp16, 2>;

  struct Qkv {
    using Math = HalfCore<Fp16, 2>;
    static constexpr int ROW_TILES = 4, COLUMNS = 128, SUM_TILE = 32, STAGES = 2;  // of a block
    static constexpr int WARP_ROW_TILES = 4, WARP_COLUMN_TILES = 4, WARPS_ACROSS = 4, THREADS = 128, MIN_BLOCKS = 1;
    static constexpr int SUM = 256, ALL_COLUMNS = 768, PARTS = 1;  // padded sum; columns, and blocks that share them
    static constexpr int FRAGMENT = 4, COPY = 4;  // neighbouring weights that a lane loads, or copies, at once
    // Shared memory, in floats
    static constexpr int PAGE = 132, A_TILE = ROW_TILES * (SUM_TILE / 8) * PAGE, BUFFERS = 16896;
    static constexpr int COLUMN_STRIDE = 16, PLANE_STRIDE = 2064, B_TILE = 4128;

    static __device__ __forceinline__ const float* weight(const float* __restrict__ weight, int column, int k) {
      return column < ALL_COLUMNS && k < DIM ? weight + column * DIM + k : nullptr;
    }
  };

  struct Streamed {
    static constexpr int WARPS = 4, KEY_TILE = 64, STAGES = 3, MIN_BLOCKS = 1;
    static constexpr int BUFFERS = 2048, BUFFER = 4096;  // shared memory in floats: start of the stages, size of one
    static constexpr int VALUE_COLUMNS = 512, VALUE_STRIDE = 512;
  };

  struct Out {
    using Math = HalfCore<Fp16, 2>;
    static constexpr int ROW_TILES = 4, COLUMNS = 128, SUM_TILE = 32, STAGES = 3;  // of a block
    static constexpr int WARP_ROW_TILES = 4, WARP_COLUMN_TILES = 4, WARPS_ACROSS = 4, THREADS = 128, MIN_BLOCKS = 1;
    static constexpr int SUM = 256, ALL_COLUMNS = 256, PARTS = 1;  // padded sum; columns, and blocks that share them
    static constexpr int FRAGMENT = 2, COPY = 4;  // neighbouring weights that a lane loads, or copies, at once
    // Shared memory, in floats
    static constexpr int PAGE = 128, A_TILE = ROW_TILES * (SUM_TILE / 8) * PAGE, BUFFERS = 16384;
    static constexpr int COLUMN_STRIDE = 8, PLANE_STRIDE = 1032, B_TILE = 4128;

    static __device__ __forceinline__ const float* weight(const float* __restrict__ weight, int column, int k) {
      return column < DIM && k < INNER ? weight + column * DIM + k : nullptr;
    }
  };

  // Where a token's channels start in x and y
  static __device__ __forceinline__ long long offset(int sequence, int token) {
    constexpr int WIDTH = 256;
    const int image = sequence / WIDTH, column = sequence % WIDTH;
    return ((static_cast<long long>(image) * LENGTH + token) * WIDTH + column) * DIM;
  }
};

extern "C" __global__ void __launch_bounds__(StagedRow::Qkv::THREADS, StagedRow::Qkv::MIN_BLOCKS)
axial_row_qkv(const float* x, const float* __restrict__ norm_weight, const float* __restrict__ norm_bias, const float* __restrict__ qkv_weight,
              float* query, float* key, float* value, int row_tiles) {
  extern __shared__ __align__(16) float shared[];
  qkv<StagedRow>(x, norm_weight, norm_bias, qkv_weight, query, key, value, row_tiles, shared);
}

extern "C" __global__ void __launch_bounds__(32 * StagedRow::Streamed::WARPS, StagedRow::Streamed::MIN_BLOCKS)
axial_row_attention(const float* query, const float* key, const float* value, float* attended, int sequences) {
  extern __shared__ __align__(16) float shared[];
  StreamedAttention<StagedRow>::run(query, key, value, attended, shared);
}

extern "C" __global__ void __launch_bounds__(StagedRow::Out::THREADS, StagedRow::Out::MIN_BLOCKS)
axial_row_out(const float* attended, const float* x, float* y, const float* __restrict__ out_weight, const float* __restrict__ out_bias, int row_tiles) {
  extern __shared__ __align__(16) float shared[];
  output<StagedRow>(attended, x, y, out_weight, out_bias, row_tiles, shared);
}

extern "C" __global__ void __launch_bounds__(StagedColumn::Qkv::THREADS, StagedColumn::Qkv::MIN_BLOCKS)
axial_col_qkv(const float* x, const float* __restrict__ norm_weight, const float* __restrict__ norm_bias, const float* __restrict__ qkv_weight,
              float* query, float* key, float* value, int row_tiles) {
  extern __shared__ __align__(16) float shared[];
  qkv<StagedColumn>(x, norm_weight, norm_bias, qkv_weight, query, key, value, row_tiles, shared);
}

extern "C" __global__ void __launch_bounds__(32 * StagedColumn::Streamed::WARPS, StagedColumn::Streamed::MIN_BLOCKS)
axial_col_attention(const float* query, const float* key, const float* value, float* attended, int sequences) {
  extern __shared__ __align__(16) float shared[];
  StreamedAttention<StagedColumn>::run(query, key, value, attended, shared);
}

extern "C" __global__ void __launch_bounds__(StagedColumn::Out::THREADS, StagedColumn::Out::MIN_BLOCKS)
axial_col_out(const float* attended, const float* x, float* y, const float* __restrict__ out_weight, const float* __restrict__ out_bias, int row_tiles) {
  extern __shared__ __align__(16) float shared[];
  output<StagedColumn>(attended, x, y, out_weight, out_bias, row_tiles, shared);
}

'''

# How the kernels are launched from PyTorch: an op on PyTorch's stable C++ interface, which compiles fast.
LAUNCH_SOURCE = r'''
#include <atomic>
#include <climits>
#include <stdexcept>
#include <string>
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

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
  if (t.scalar_type() != torch::headeronly::ScalarType::Float) refuse(std::string(name) + " must be float32");
  if (!t.is_cuda() || t.get_device_index() != device) refuse(std::string(name) + " must be on the input's device, cuda:" + std::to_string(device));
  const bool fits = columns == 0 ? t.dim() == 1 && t.size(0) == rows : t.dim() == 2 && t.size(0) == rows && t.size(1) == columns;
  if (!fits) refuse(std::string(name) + " has the wrong shape: the kernels are built for dim 256");
  return dense(t);
}

const Element* data(const Tensor& t) { return static_cast<const Element*>(t.const_data_ptr()); }

// Once per device: lets a kernel have more than the 48 KB of shared memory that need no opting in.
template <typename Kernel>
void allow_shared(Kernel kernel, int bytes, int32_t device, std::atomic<uint64_t>& done) {
  const uint64_t bit = 1ull << (device & 63);
  if (bytes <= 48 * 1024 || (device < 64 && (done.load(std::memory_order_relaxed) & bit))) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "the GPU has not the shared memory these kernels need");
  done.fetch_or(bit, std::memory_order_relaxed);
}

cudaLaunchConfig_t grid(int64_t blocks, int threads, int shared_bytes, cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  return config;
}

// x: (batch, 128, 256, 256) float32 on a CUDA device, of any strides; the result is contiguous.
Tensor launch(Tensor given, Tensor row_norm_weight, Tensor row_norm_bias, Tensor row_qkv_weight, Tensor row_out_weight, Tensor row_out_bias, Tensor col_norm_weight, Tensor col_norm_bias, Tensor col_qkv_weight, Tensor col_out_weight, Tensor col_out_bias) {
  if (!given.is_cuda()) refuse("the input must be on a CUDA device");
  if (given.scalar_type() != torch::headeronly::ScalarType::Float) refuse("the input must be float32");
  if (given.dim() != 4 || given.size(1) != 128 || given.size(2) != 256 || given.size(3) != 256)
    refuse("the input must be (batch, 128, 256, 256)");
  const int32_t device = given.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const Tensor x = dense(given);
  Tensor y = torch::stable::empty_like(x);
  const int64_t batch = x.size(0);
  if (batch == 0) return y;
  if (batch > INT_MAX / 4096) refuse("batch " + std::to_string(batch) + " is too large: split the input");
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
  Element* out = static_cast<Element*>(y.mutable_data_ptr());
  const Tensor query_buffer = torch::stable::new_empty(x, {batch * int64_t{8388608} });
  Element* const query = static_cast<Element*>(query_buffer.mutable_data_ptr());
  const Tensor key_buffer = torch::stable::new_empty(x, {batch * int64_t{8388608} });
  Element* const key = static_cast<Element*>(key_buffer.mutable_data_ptr());
  const Tensor value_buffer = torch::stable::new_empty(x, {batch * int64_t{8388608} });
  Element* const value = static_cast<Element*>(value_buffer.mutable_data_ptr());
  const Tensor attended_buffer = torch::stable::new_empty(x, {batch * int64_t{8388608} });
  Element* const attended = static_cast<Element*>(attended_buffer.mutable_data_ptr());
  {
    // Rows: 4 row_tiles a block
    static std::atomic<uint64_t> allowed{0};
    allow_shared(axial_row_qkv, 100608, device, allowed);
    const int row_tiles = static_cast<int>(batch * 2048);
    const int64_t blocks = (static_cast<int64_t>(row_tiles) + 3) / 4;
    cudaLaunchConfig_t config = grid(blocks, 128, 100608, stream);
    check(cudaLaunchKernelEx(&config, axial_row_qkv, data(x), data(row_norm_weight), data(row_norm_bias), data(row_qkv_weight), query, key, value, row_tiles), "axial_row_qkv could not be launched");
  }
  {
    // Rows: 1 sequence a block, 32 blocks for each
    static std::atomic<uint64_t> allowed{0};
    allow_shared(axial_row_attention, 57344, device, allowed);
    const int sequences = static_cast<int>(batch * 128);
    const int64_t blocks = (static_cast<int64_t>(sequences) + 0) / 1 * 32;
    cudaLaunchConfig_t config = grid(blocks, 128, 57344, stream);
    check(cudaLaunchKernelEx(&config, axial_row_attention, query, key, value, attended, sequences), "axial_row_attention could not be launched");
  }
  {
    // Rows: 4 row_tiles a block
    static std::atomic<uint64_t> allowed{0};
    allow_shared(axial_row_out, 115072, device, allowed);
    const int row_tiles = static_cast<int>(batch * 2048);
    const int64_t blocks = (static_cast<int64_t>(row_tiles) + 3) / 4;
    cudaLaunchConfig_t config = grid(blocks, 128, 115072, stream);
    check(cudaLaunchKernelEx(&config, axial_row_out, attended, data(x), out, data(row_out_weight), data(row_out_bias), row_tiles), "axial_row_out could not be launched");
  }
  {
    // Columns: 4 row_tiles a block
    static std::atomic<uint64_t> allowed{0};
    allow_shared(axial_col_qkv, 100608, device, allowed);
    const int row_tiles = static_cast<int>(batch * 2048);
    const int64_t blocks = (static_cast<int64_t>(row_tiles) + 3) / 4;
    cudaLaunchConfig_t config = grid(blocks, 128, 100608, stream);
    check(cudaLaunchKernelEx(&config, axial_col_qkv, out, data(col_norm_weight), data(col_norm_bias), data(col_qkv_weight), query, key, value, row_tiles), "axial_col_qkv could not be launched");
  }
  {
    // Columns: 1 sequence a block, 16 blocks for each
    static std::atomic<uint64_t> allowed{0};
    allow_shared(axial_col_attention, 57344, device, allowed);
    const int sequences = static_cast<int>(batch * 256);
    const int64_t blocks = (static_cast<int64_t>(sequences) + 0) / 1 * 16;
    cudaLaunchConfig_t config = grid(blocks, 128, 57344, stream);
    check(cudaLaunchKernelEx(&config, axial_col_attention, query, key, value, attended, sequences), "axial_col_attention could not be launched");
  }
  {
    // Columns: 4 row_tiles a block
    static std::atomic<uint64_t> allowed{0};
    allow_shared(axial_col_out, 115072, device, allowed);
    const int row_tiles = static_cast<int>(batch * 2048);
    const int64_t blocks = (static_cast<int64_t>(row_tiles) + 3) / 4;
    cudaLaunchConfig_t config = grid(blocks, 128, 115072, stream);
    check(cudaLaunchKernelEx(&config, axial_col_out, attended, out, out, data(col_out_weight), data(col_out_bias), row_tiles), "axial_col_out could not be launched");
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
    "-DUSE_CUDA",  # PyTorch's C shim declares its CUDA functions only then
    "-DTORCH_TARGET_VERSION=0x020a000000000000",  # the interface of PyTorch 2.10
    "-Xcompiler=-fvisibility=hidden",
)
_NAMESPACE = "axialtune_" + hashlib.sha256(repr((SPEC, ARCH, KERNELS, _NVCC_FLAGS, CUDA_SOURCE, LAUNCH_SOURCE)).encode()).hexdigest()[:16]

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


def _toolkit():
    """CUDA's folder where nvcc and its headers are installed, else None."""
    from torch.utils import cpp_extension

    home = cpp_extension.CUDA_HOME
    includes = glob.glob(os.path.join(glob.escape(home), "targets", "*", "include")) + [os.path.join(home, "include")] if home else []
    complete = any(os.path.isfile(os.path.join(folder, "cuda_runtime.h")) for folder in includes)
    return home if complete and os.path.isfile(os.path.join(home, "bin", "nvcc")) else None


def _library_name():
    """Names a build by all that it depends on: block, sources, flags, PyTorch, its CUDA, the machine and the toolkit.

    Where there is no toolkit its part is "*": a library that was built elsewhere can be loaded, but none can be built.
    """
    parts = (repr((SPEC, ARCH, KERNELS)), CUDA_SOURCE, LAUNCH_SOURCE, *_NVCC_FLAGS, torch.__version__, torch.version.cuda, sysconfig.get_config_var("SOABI"), sysconfig.get_platform())
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
            cpp_sources="",
            cuda_sources=[CUDA_SOURCE, LAUNCH_SOURCE],
            extra_cuda_cflags=[*_NVCC_FLAGS, f"-DAXIALTUNE_NAMESPACE={_NAMESPACE}"],
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


def _gradients(ctx, grad):
    """Gradients of the inputs that need one: the PyTorch form is computed again and differentiated."""
    twice = torch.is_grad_enabled()  # backward(create_graph=True): the inputs' own graph continues through the views
    with torch.enable_grad(), torch.autocast(grad.device.type, enabled=False):
        inputs = [
            t.view_as(t) if twice else t.detach().requires_grad_(needed)
            for t, needed in zip(ctx.saved_tensors, ctx.needs_input_grad)
        ]
        wanted = [t for t, needed in zip(inputs, ctx.needs_input_grad) if needed]
        y = _pytorch_form(inputs[0], inputs[1:], plain=twice)
        found = iter(torch.autograd.grad(y, wanted, grad, create_graph=twice))
    return tuple(next(found) if needed else None for needed in ctx.needs_input_grad)


def _save_inputs(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


class _Differentiable(torch.autograd.Function):
    """The kernels with gradients, in eager mode; in compiled and exported graphs the op below has them."""

    @staticmethod
    def forward(x, *weights):
        return _launcher()(x, *weights)

    setup_context = staticmethod(_save_inputs)
    backward = staticmethod(_gradients)


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
    """Row attention, then column attention over a 128x256 grid of 256 channels, float32.

    dim and num_heads have to be 256 and 8. An input is (batch, height, width, dim), of any batch; a height and width other
    than 128 and 256 are computed by PyTorch. dropout applies to the attention weights while training, by PyTorch too.
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
        kind = "cuda" if x.is_cuda else x.device.type
        autocast = kind != "meta" and torch.is_autocast_enabled(kind)
        weights = self._weights()
        if weights is not None and x.dtype != weights[0].dtype and not autocast:
            raise TypeError(f"the input is {x.dtype} and the module's parameters are {weights[0].dtype}: convert one of them")
        if x.is_cuda and x.dtype != DTYPE and not autocast:
            _warn_type(x.dtype)
            return self._pytorch_form(x)
        if weights is None or autocast or not x.is_cuda or _forward_mode() or (self.training and self.dropout.p > 0.0):
            return self._pytorch_form(x)
        if x.shape[1] != HEIGHT or x.shape[2] != WIDTH:
            _warn_size(x.shape[1], x.shape[2])
            return self._pytorch_form(x)
        if USE != "kernels":
            return _library_form(x, weights)
        if torch.compiler.is_compiling():
            return _op()(x, *weights)
        if not _fits_gpu(x.get_device()):
            return self._pytorch_form(x)
        if torch.is_grad_enabled() and (x.requires_grad or any(t.requires_grad for t in weights)):
            return _Differentiable.apply(x, *weights)
        return _launcher()(x, *weights)

    def _weights(self):
        """The kernels' arguments after x; None where a layer does more than its type says (hooks, adapters, parametrizations)."""
        weights = []
        for axis in AXES:
            for part, kind, names in _LAYERS:
                layer = self._modules[axis + part]
                if type(layer) is not kind or layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks:
                    return None
                for name in names:
                    tensor = layer._parameters.get(name)
                    if tensor is None:  # a plain attribute in the replicas of DataParallel
                        tensor = getattr(layer, name, None)
                    if tensor is None:
                        return None
                    weights.append(tensor)
        return weights

    def _pytorch_form(self, x):
        dropout = self.dropout if self.training and self.dropout.p > 0.0 else None
        for axis in AXES:
            x = _axis_form(x, axis, getattr(self, f"{axis}_norm"), getattr(self, f"{axis}_qkv"), getattr(self, f"{axis}_out"), dropout, _forward_mode())
        return x


_LAYERS = (("_norm", nn.LayerNorm, ("weight", "bias")), ("_qkv", nn.Linear, ("weight",)), ("_out", nn.Linear, ("weight", "bias")))


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
    """An input of the size the kernels were chosen for."""
    return [torch.randn(SPEC["batch"], HEIGHT, WIDTH, DIM)]
