"""The strongest rival at small shapes: the whole of one axis as a single Triton kernel, a program per sequence. Needs Triton."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from codegen.spec import BlockSpec

LARGEST_TILE = 128 * 1024
"""Bytes of a padded sequence, or of its scores, beyond which one program cannot hold them, or is minutes in compiling."""


@triton.jit
def axial_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    y_ptr,
    gain_ptr,
    shift_ptr,
    qkv_ptr,
    out_ptr,
    bias_ptr,
    lines,
    image_stride,
    line_stride,
    token_stride,
    eps: tl.constexpr,
    scale: tl.constexpr,
    LENGTH: tl.constexpr,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,  # LENGTH, DIM and HEAD_DIM as powers of two from 16 on
    COLUMNS: tl.constexpr,
    HEAD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    sequence = tl.program_id(0)
    base = (sequence // lines).to(tl.int64) * image_stride + (sequence % lines) * line_stride
    token, channel, within = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, HEAD)
    place = base + token[:, None] * token_stride + channel[None, :]
    here = (token[:, None] < LENGTH) & (channel[None, :] < DIM)
    element = x_ptr.dtype.element_ty

    x = tl.load(x_ptr + place, mask=here, other=0.0).to(tl.float32)
    mean = tl.sum(x, 1) / DIM
    centred = tl.where(channel[None, :] < DIM, x - mean[:, None], 0.0)
    deviation = tl.rsqrt(tl.sum(centred * centred, 1) / DIM + eps)
    gain = tl.load(gain_ptr + channel, mask=channel < DIM, other=0.0).to(tl.float32)
    shift = tl.load(shift_ptr + channel, mask=channel < DIM, other=0.0).to(tl.float32)
    normed = (centred * deviation[:, None] * gain[None, :] + shift[None, :]).to(element)

    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for head in tl.range(HEADS):
        row = head * HEAD_DIM + within
        turned = row[None, :] * DIM + channel[:, None]  # (COLUMNS, HEAD) of a matrix that lies as (rows, DIM)
        inside = (within[None, :] < HEAD_DIM) & (channel[:, None] < DIM)
        q = tl.dot(normed, tl.load(qkv_ptr + turned, mask=inside, other=0.0), input_precision=PRECISION)
        k = tl.dot(normed, tl.load(qkv_ptr + DIM * DIM + turned, mask=inside, other=0.0), input_precision=PRECISION)
        v = tl.dot(normed, tl.load(qkv_ptr + 2 * DIM * DIM + turned, mask=inside, other=0.0), input_precision=PRECISION)
        scores = tl.dot((q * scale).to(element), tl.trans(k.to(element)), input_precision=PRECISION)
        scores = tl.where(token[None, :] < LENGTH, scores, float("-inf"))
        share = tl.exp2(scores - tl.max(scores, 1)[:, None])
        weighted = tl.dot(share.to(element), v.to(element), input_precision=PRECISION) / tl.sum(share, 1)[:, None]
        turned = channel[None, :] * DIM + row[:, None]  # (HEAD, COLUMNS)
        inside = (within[:, None] < HEAD_DIM) & (channel[None, :] < DIM)
        total = tl.dot(weighted.to(element), tl.load(out_ptr + turned, mask=inside, other=0.0), total, input_precision=PRECISION)

    bias = tl.load(bias_ptr + channel, mask=channel < DIM, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + place, mask=here, other=0.0).to(tl.float32)  # again, instead of keeping it in registers all along
    tl.store(y_ptr + place, (x + total + bias[None, :]).to(element), mask=here)


@dataclass(frozen=True)
class Tiling:
    """What Triton is free to choose."""

    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.warps} warps, {self.stages} stages"


def tilings(length: int) -> tuple[Tiling, ...]:
    """The eight configurations that are tried for sequences of `length` tokens."""
    warps = (1, 2, 4, 8) if length <= 32 else (2, 4, 8, 16)
    return tuple(Tiling(w, s) for s in (1, 2) for w in warps)


def padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def obstacle(spec: BlockSpec) -> str | None:
    """Why one program cannot hold a sequence; None when it can be tried."""
    size = getattr(torch, spec.dtype).itemsize
    for axis in spec.axes:
        length = padded(spec.problem(axis).length)
        widest = max(length, padded(spec.dim))
        if (held := length * widest * size) > LARGEST_TILE:
            tile = f"a tile of {length} x {widest}, {held // 1024} KB"
            return f"a program of the {axis} axis would hold {tile}: more than {LARGEST_TILE // 1024} KB is not tried"
    return None


def run_axis(spec: BlockSpec, axis: str, tiling: Tiling, x: Tensor, weights: Mapping[str, Tensor], y: Tensor) -> None:
    """One axis of the block, x -> y (which may be x): (batch, height, width, dim), contiguous, with the weights in x's element type."""
    problem = spec.problem(axis)
    batch, height, width, dim = x.shape
    line_stride = width * dim if axis == "row" else dim
    axial_kernel[(batch * problem.lines,)](
        x,
        y,
        *(weights[f"{axis}_{part}"] for part in ("norm.weight", "norm.bias", "qkv.weight", "out.weight", "out.bias")),
        problem.lines,
        height * width * dim,
        line_stride,
        problem.token_stride,
        spec.eps,
        math.log2(math.e) / math.sqrt(spec.head_dim),
        problem.length,
        dim,
        spec.heads,
        spec.head_dim,
        padded(problem.length),
        padded(dim),
        padded(spec.head_dim),
        "tf32x3" if x.dtype == torch.float32 else "ieee",
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )


def run_block(spec: BlockSpec, choice: Mapping[str, Tiling], x: Tensor, weights: Mapping[str, Tensor], y: Tensor) -> None:
    """All axes of the block, one kernel each, x -> y; x stays as it is."""
    for axis in spec.axes:
        run_axis(spec, axis, choice[axis], x if axis == spec.axes[0] else y, weights, y)
