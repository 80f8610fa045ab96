"""The block in PyTorch: the float64 reference, random cases for it, and the two forms a user would run instead.

One axis computes x + out(softmax(q k^T / sqrt(head_dim)) v) with q, k, v = qkv(norm(x)), along the rows (width) or the columns
(height) of a (batch, height, width, dim) grid; a block runs its axes one after another. With post_norm it is norm(x + out(...)), with
q, k, v = qkv(x); without residual, x + is left out. norm is LayerNorm, RMSNorm or nothing (see BlockSpec). Blocks with a key mask or a
logit bias take these as further inputs, and their logits are those of codegen/terms.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from codegen import terms
from codegen.spec import AXES, DEFAULT_EPS, BlockSpec

SCORE_LIMIT = 1 << 25  # elements of the score matrix that the reference holds at once


def torch_dtype(spec: BlockSpec) -> torch.dtype:
    """The block's element type as PyTorch's."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype


def parameter_shapes(spec: BlockSpec) -> dict[str, tuple[int, ...]]:
    """Parameter name -> shape, in the order of the state_dict and of the kernels' arguments."""
    sizes: dict[str, tuple[int, ...]] = {
        "norm_weight": (spec.dim,),
        "norm_bias": (spec.dim,),
        "qkv_weight": (3 * spec.inner, spec.dim),
        "qkv_bias": (3 * spec.inner,),
        "out_weight": (spec.dim, spec.inner),
        "out_bias": (spec.dim,),
    }
    return {f"{axis}_{name.replace('_', '.')}": sizes[name] for axis in spec.axes for name in spec.parameters}


def random_weights(spec: BlockSpec, generator: torch.Generator | None = None) -> dict[str, Tensor]:
    """Parameters no part of which is trivial: gains spread around 1, biases that matter, matrices as nn.Linear draws them.

    Of the block's element type, on the generator's device (the CPU without one).
    """
    device = generator.device if generator is not None else torch.device("cpu")
    weights: dict[str, Tensor] = {}
    for name, shape in parameter_shapes(spec).items():
        draw = torch.rand(shape, generator=generator, device=device) * 2.0 - 1.0
        if name.endswith("norm.weight"):
            weights[name] = 1.0 + 0.5 * draw
        elif name.endswith("bias"):
            weights[name] = 0.5 * draw
        else:
            weights[name] = (1.0 / math.sqrt(shape[1])) * draw
    return {name: value.to(torch_dtype(spec)) for name, value in weights.items()}


def random_input(spec: BlockSpec, generator: torch.Generator | None = None, scale: float = 1.0, batch: int | None = None) -> Tensor:
    """Normal draws times `scale`: (batch, height, width, dim), of the block's element type, contiguous, on the generator's device."""
    device = generator.device if generator is not None else torch.device("cpu")
    shape = (spec.batch if batch is None else batch, spec.height, spec.width, spec.dim)
    return (torch.randn(shape, generator=generator, device=device) * scale).to(torch_dtype(spec))


@dataclass(frozen=True)
class Branch:
    """What one axis computes beside the residual, stage by stage, for sequences of L tokens.

    normed (what is multiplied: x itself with post_norm), output: (sequences, L, dim); weighted: (sequences, L, inner), the heads side by
    side; q, k, v: (sequences, heads, L, head_dim), q unscaled; scores (scaled, with their bias and mask), probabilities: (sequences,
    heads, L, L).
    """

    normed: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    scores: Tensor
    probabilities: Tensor
    weighted: Tensor
    output: Tensor


def normalise(spec: BlockSpec, axis: str, tokens: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """What the axis' norm makes of tokens (..., dim)."""
    weight, bias = (weights.get(f"{axis}_norm.{part}") for part in ("weight", "bias"))
    if spec.norm == "layer":
        return F.layer_norm(tokens, (spec.dim,), weight, bias, spec.eps)
    return F.rms_norm(tokens, (spec.dim,), weight, spec.eps) if spec.norm == "rms" else tokens


def branch(spec: BlockSpec, axis: str, sequences: Tensor, weights: Mapping[str, Tensor]) -> Branch:
    """The stages of `axis` for `sequences` (any number, L, dim), in the dtype of its arguments; all scores are held.

    weights: also the bias of the axis where the block has one, and its keys that are not masked (see terms.with_keys).
    """
    normed = sequences if spec.post_norm else normalise(spec, axis, sequences, weights)
    number, length, _ = sequences.shape
    packed = F.linear(normed, weights[f"{axis}_qkv.weight"], weights.get(f"{axis}_qkv.bias"))
    packed = packed.view(number, length, 3, spec.heads, spec.head_dim)
    q, k, v = (part.transpose(1, 2) for part in packed.unbind(2))
    allowed, bias = weights.get(f"{axis}_keys"), weights.get(f"{axis}_bias")
    scores = terms.logits((q @ k.transpose(-1, -2)) / math.sqrt(spec.head_dim), allowed, bias)
    probabilities = torch.softmax(scores, dim=-1) if allowed is None and bias is None else terms.softmax(scores)
    weighted = (probabilities @ v).transpose(1, 2).reshape(number, length, spec.inner)
    output = F.linear(weighted, weights[f"{axis}_out.weight"], weights.get(f"{axis}_out.bias"))
    return Branch(normed, q, k, v, scores, probabilities, weighted, output)


def result(spec: BlockSpec, axis: str, sequences: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """What `axis` makes of `sequences` (any number, L, dim): the branch, with residual and norm behind it where the block has them."""
    output = branch(spec, axis, sequences, weights).output
    if spec.residual:
        output = sequences + output
    return normalise(spec, axis, output, weights) if spec.post_norm else output


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
        split = sequences.split(step)
        each = [cast] * len(split)
        if spec.key_mask:
            each = [{**cast, f"{axis}_keys": keys} for keys in terms.lines_of(axis, weights["key_mask"].to(x.device)).split(step)]
        parts = [result(spec, axis, *part) for part in zip(split, each, strict=True)] if sequences.numel() else [sequences]
        grid = to_grid(axis, torch.cat(parts), x.shape)
    return grid


def norm_layer(spec: BlockSpec) -> nn.Module:
    """The norm of one axis, as PyTorch has it; without parameters, nothing is drawn."""
    if spec.norm == "layer":
        return nn.LayerNorm(spec.dim, eps=spec.eps, elementwise_affine=spec.norm_affine)
    return nn.RMSNorm(spec.dim, eps=spec.eps, elementwise_affine=spec.norm_affine) if spec.norm == "rms" else nn.Identity()


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
        eps: float = DEFAULT_EPS,
        **variants: Any,
    ) -> None:
        """variants: the block's other fields by name, e.g. head_dim=8, norm="rms", qkv_bias=True."""
        super().__init__()
        self.spec = spec = BlockSpec(dim, num_heads, height, width, axes=axes, eps=eps, **variants)
        for axis in self.spec.axes:
            setattr(self, f"{axis}_norm", norm_layer(spec))
            setattr(self, f"{axis}_qkv", nn.Linear(dim, 3 * spec.inner, bias=spec.qkv_bias))
            setattr(self, f"{axis}_out", nn.Linear(spec.inner, dim, bias=spec.out_bias))
        self.dropout = nn.Dropout(dropout)

    @classmethod
    def from_spec(cls, spec: BlockSpec) -> Model:
        """The model of a specification, without dropout."""
        return cls(spec.dim, spec.heads, spec.height, spec.width, **{"axes": spec.axes, **spec.variants})

    def attend(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, bias: Tensor | None) -> Tensor:
        """Attention for q, k, v of (sequences, heads, L, head_dim); allowed and bias as in terms.logits."""
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(self.spec.head_dim)
        if allowed is None and bias is None:
            return self.dropout(F.softmax(scores, dim=-1)) @ v
        return self.dropout(terms.softmax(terms.logits(scores, allowed, bias))) @ v

    def branch(self, axis: str, sequences: Tensor, allowed: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """Everything of one axis but the residual and a norm behind it, for sequences of (number, L, dim)."""
        norm, qkv, out = (getattr(self, f"{axis}_{part}") for part in ("norm", "qkv", "out"))
        number, length, _ = sequences.shape
        packed = qkv(sequences if self.spec.post_norm else norm(sequences)).view(number, length, 3, self.spec.heads, self.spec.head_dim)
        q, k, v = (part.transpose(1, 2) for part in packed.unbind(2))
        return out(self.attend(q, k, v, allowed, bias).transpose(1, 2).reshape(number, length, self.spec.inner))

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        """x: (batch, height, width, dim) of the parameters' dtype; any batch, height and width. given: what terms.term_shapes lists for
        the block, in that order: key_mask, row_bias, col_bias."""
        batch, height, width, dim = x.shape
        named = dict(zip(terms.term_shapes(self.spec, batch), given, strict=True))
        for axis in self.spec.axes:
            own = terms.terms_of(axis, named)
            if axis == "row":
                added = self.branch(axis, x.reshape(batch * height, width, dim), *own).reshape(batch, height, width, dim)
            else:
                columns = self.branch(axis, x.permute(0, 2, 1, 3).reshape(batch * width, height, dim), *own)
                added = columns.reshape(batch, width, height, dim).permute(0, 2, 1, 3)
            x = x + added if self.spec.residual else added
            if self.spec.post_norm:
                x = getattr(self, f"{axis}_norm")(x)
        return x


class ModelSDPA(Model):
    """The same block through scaled_dot_product_attention: what a careful PyTorch user writes."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, bias: Tensor | None) -> Tensor:
        mask, none = terms.fused_mask(allowed, bias)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=self.dropout.p if self.training else 0.0)
        return attended if none is None else attended.masked_fill(none, 0.0)
