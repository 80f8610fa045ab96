"""The block in PyTorch: the float64 reference, random cases for it, and the two forms a user would run instead.

One axis computes x + out(softmax(q k^T / sqrt(head_dim)) v) with q, k, v = qkv(LayerNorm(x)), along the rows (width) or
the columns (height) of a (batch, height, width, dim) grid; a block runs its axes one after another. Blocks with a key mask or a
logit bias take these as further inputs, and their logits are those of codegen/terms.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from codegen import terms
from codegen.spec import AXES, BlockSpec

SCORE_LIMIT = 1 << 25  # elements of the score matrix that the reference holds at once


def torch_dtype(spec: BlockSpec) -> torch.dtype:
    """The block's element type as PyTorch's."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype


def parameter_shapes(spec: BlockSpec) -> dict[str, tuple[int, ...]]:
    """Parameter name -> shape, in the order of the state_dict and of the kernels' arguments."""
    shapes: dict[str, tuple[int, ...]] = {}
    for axis in spec.axes:
        shapes[f"{axis}_norm.weight"] = (spec.dim,)
        shapes[f"{axis}_norm.bias"] = (spec.dim,)
        shapes[f"{axis}_qkv.weight"] = (3 * spec.dim, spec.dim)
        shapes[f"{axis}_out.weight"] = (spec.dim, spec.dim)
        shapes[f"{axis}_out.bias"] = (spec.dim,)
    return shapes


def random_weights(spec: BlockSpec, generator: torch.Generator | None = None) -> dict[str, Tensor]:
    """Parameters no part of which is trivial: gains spread around 1, biases that matter, matrices as nn.Linear draws them.

    Of the block's element type, on the generator's device (the CPU without one).
    """
    device = generator.device if generator is not None else torch.device("cpu")
    bound = 1.0 / math.sqrt(spec.dim)
    weights: dict[str, Tensor] = {}
    for name, shape in parameter_shapes(spec).items():
        draw = torch.rand(shape, generator=generator, device=device) * 2.0 - 1.0
        if name.endswith("norm.weight"):
            weights[name] = 1.0 + 0.5 * draw
        elif name.endswith("norm.bias"):
            weights[name] = 0.5 * draw
        elif name.endswith("out.bias"):
            weights[name] = 0.5 * draw
        else:
            weights[name] = bound * draw
    return {name: value.to(torch_dtype(spec)) for name, value in weights.items()}


def random_input(spec: BlockSpec, generator: torch.Generator | None = None, scale: float = 1.0, batch: int | None = None) -> Tensor:
    """Normal draws times `scale`: (batch, height, width, dim), of the block's element type, contiguous, on the generator's device."""
    device = generator.device if generator is not None else torch.device("cpu")
    shape = (spec.batch if batch is None else batch, spec.height, spec.width, spec.dim)
    return (torch.randn(shape, generator=generator, device=device) * scale).to(torch_dtype(spec))


@dataclass(frozen=True)
class Branch:
    """What one axis computes beside the residual, stage by stage, for sequences of L tokens.

    normed, weighted, output: (sequences, L, dim), weighted with the heads side by side; q, k, v: (sequences, heads, L,
    head_dim), q unscaled; scores (scaled, with bias and mask), probabilities: (sequences, heads, L, L).
    """

    normed: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    scores: Tensor
    probabilities: Tensor
    weighted: Tensor
    output: Tensor


def branch(spec: BlockSpec, axis: str, sequences: Tensor, weights: Mapping[str, Tensor], allowed: Tensor | None = None) -> Branch:
    """The stages of `axis` for `sequences` (any number, L, dim), in the dtype of its arguments; all scores are held.

    weights: also the bias of the axis, where the block has one; allowed: which keys are not masked, (sequences, L).
    """
    normed = F.layer_norm(sequences, (spec.dim,), weights[f"{axis}_norm.weight"], weights[f"{axis}_norm.bias"], spec.eps)
    number, length, _ = sequences.shape
    packed = F.linear(normed, weights[f"{axis}_qkv.weight"]).view(number, length, 3, spec.heads, spec.head_dim)
    q, k, v = (part.transpose(1, 2) for part in packed.unbind(2))
    bias = weights.get(f"{axis}_bias")
    scores = terms.logits((q @ k.transpose(-1, -2)) / math.sqrt(spec.head_dim), allowed, bias)
    probabilities = torch.softmax(scores, dim=-1) if allowed is None and bias is None else terms.softmax(scores)
    weighted = (probabilities @ v).transpose(1, 2).reshape(number, length, spec.dim)
    output = F.linear(weighted, weights[f"{axis}_out.weight"], weights[f"{axis}_out.bias"])
    return Branch(normed, q, k, v, scores, probabilities, weighted, output)


def to_sequences(axis: str, grid: Tensor) -> Tensor:
    """(batch, height, width, dim) -> (batch * lines, L, dim), the sequences that `axis` attends along."""
    lines = grid if axis == "row" else grid.transpose(1, 2)
    return lines.reshape(-1, lines.shape[2], lines.shape[3])


def to_grid(axis: str, sequences: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of to_sequences, for a grid of `shape`."""
    batch, height, width, dim = shape
    if axis == "row":
        return sequences.reshape(batch, height, width, dim)
    return sequences.reshape(batch, width, height, dim).transpose(1, 2).contiguous()


def reference(spec: BlockSpec, x: Tensor, weights: Mapping[str, Tensor], dtype: torch.dtype = torch.float64) -> Tensor:
    """The block's output for x (batch, height, width, dim), computed and returned in `dtype` on x's device.

    weights: the parameters, and the terms of the block's logits (term_shapes) under their names.
    Sequences are taken a few at a time, so that the score matrices stay below SCORE_LIMIT elements where one fits.
    In float32 the result is subject to torch's own matmul precision settings; in float64 it is not. In 16-bit types this is what
    PyTorch's own form of the block gives.
    """
    biases = [name for name in terms.term_shapes(spec, 0) if name != "key_mask"]
    cast = {name: weights[name].detach().to(device=x.device, dtype=dtype) for name in (*parameter_shapes(spec), *biases)}
    grid = x.detach().to(dtype)
    for axis in spec.axes:
        sequences = to_sequences(axis, grid)
        step = max(1, SCORE_LIMIT // (spec.heads * sequences.shape[1] ** 2))
        masks = terms.lines_of(axis, weights["key_mask"].to(x.device)).split(step) if spec.key_mask else itertools.repeat(None)
        split = zip(sequences.split(step), masks, strict=False)
        parts = [branch(spec, axis, part, cast, allowed).output for part, allowed in split] if sequences.numel() else [sequences]
        grid = grid + to_grid(axis, torch.cat(parts), x.shape)
    return grid


class Model(nn.Module):
    """The block as it is usually written in PyTorch; parameters are created in a fixed order, which fixes their draws."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        height: int,
        width: int,
        dropout: float = 0.0,
        axes: tuple[str, ...] = AXES,
        eps: float = 1e-5,
        **variants: Any,
    ) -> None:
        super().__init__()
        self.spec = BlockSpec(dim, num_heads, height, width, axes=axes, eps=eps, **variants)
        for axis in self.spec.axes:
            setattr(self, f"{axis}_norm", nn.LayerNorm(dim, eps=eps))
            setattr(self, f"{axis}_qkv", nn.Linear(dim, 3 * dim, bias=False))
            setattr(self, f"{axis}_out", nn.Linear(dim, dim))
        self.dropout = nn.Dropout(dropout)

    @classmethod
    def from_spec(cls, spec: BlockSpec) -> Model:
        """The model of a specification, without dropout."""
        return cls(spec.dim, spec.heads, spec.height, spec.width, axes=spec.axes, eps=spec.eps, key_mask=spec.key_mask, logit_bias=spec.logit_bias)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, bias: Tensor | None) -> Tensor:
        """Attention for q, k, v of (sequences, heads, L, head_dim); allowed and bias as in terms.logits."""
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(self.spec.head_dim)
        if allowed is None and bias is None:
            return self.dropout(F.softmax(scores, dim=-1)) @ v
        return self.dropout(terms.softmax(terms.logits(scores, allowed, bias))) @ v

    def branch(self, axis: str, sequences: Tensor, allowed: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """Everything of one axis but the residual, for sequences of (number, L, dim)."""
        norm, qkv, out = (getattr(self, f"{axis}_{part}") for part in ("norm", "qkv", "out"))
        number, length, dim = sequences.shape
        packed = qkv(norm(sequences)).view(number, length, 3, self.spec.heads, self.spec.head_dim)
        q, k, v = (part.transpose(1, 2) for part in packed.unbind(2))
        return out(self.attend(q, k, v, allowed, bias).transpose(1, 2).reshape(number, length, dim))

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        """x: (batch, height, width, dim) of the parameters' dtype; any batch, height and width. given: what terms.term_shapes lists for
        the block, in that order: key_mask, row_bias, col_bias."""
        batch, height, width, dim = x.shape
        named = dict(zip(terms.term_shapes(self.spec, batch), given, strict=True))
        for axis in self.spec.axes:
            own = terms.terms_of(axis, named)
            if axis == "row":
                x = x + self.branch(axis, x.reshape(batch * height, width, dim), *own).reshape(batch, height, width, dim)
            else:
                columns = self.branch(axis, x.permute(0, 2, 1, 3).reshape(batch * width, height, dim), *own)
                x = x + columns.reshape(batch, width, height, dim).permute(0, 2, 1, 3)
        return x


class ModelSDPA(Model):
    """The same block through scaled_dot_product_attention: what a careful PyTorch user writes."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, bias: Tensor | None) -> Tensor:
        mask, none = terms.fused_mask(allowed, bias)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=self.dropout.p if self.training else 0.0)
        return attended if none is None else attended.masked_fill(none, 0.0)
