"""Experiments on a block that is a black box with settable weights: what they set, observe and expect.

tuner/stages.py composes them so that each involves one stage more than the one before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from codegen.reference import parameter_shapes, reference, to_sequences
from codegen.spec import BlockSpec
from codegen.terms import term_shapes

STAGES = ("LayerNorm", "QKV product", "scores", "softmax", "weighted sum", "output product", "output bias", "residual")
ROUNDING = {  # of storing the sum of x and a branch once per axis, relative to both; in float32 with room to spare
    torch.float32: 2 * torch.finfo(torch.float32).eps,
    torch.bfloat16: torch.finfo(torch.bfloat16).eps,
    torch.float16: torch.finfo(torch.float16).eps,
}


@dataclass(frozen=True)
class Precision:
    """What can be told from rounding errors in an element type.

    tolerance: error of a right block, of the probe's own scale. loose: the same where quantities derived from an observation are
    compared with a known fault's. negligible: a key's weight, relative to that of equal ones, that counts as none. inexact: errors
    up to this size look like operands rounded too far rather than a wrong formula. loudness: scale of equal tokens; large
    enough for eps not to matter, small enough for y to show the branch, and not a whole number, lest it be taken for a number of keys.
    moderate: the largest score of the probe of softmax itself; rounded operands shift a score in proportion to it.
    """

    dtype: torch.dtype
    tolerance: float
    loose: float
    negligible: float
    inexact: float
    loudness: float
    moderate: float


PRECISIONS = {
    # three TF32 products stay below a quarter of the tolerance
    "float32": Precision(torch.float32, 2e-5, 2e-4, 1e-3, 2e-2, 30.3, 8.0),
    "bfloat16": Precision(torch.bfloat16, 5e-2, 1e-1, 0.2, 2e-1, 1.3, 4.0),
    "float16": Precision(torch.float16, 1.6e-2, 2.5e-2, 0.05, 5e-2, 1.3, 8.0),
}

Runner = Callable[[Tensor, Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True)
class Diagnosis:
    """The stage (one of STAGES) and the axis that disagree first, what is wrong there and the error relative to the
    observed quantity's root mean square; stage is empty when none does, axis when it cannot be told."""

    stage: str = ""
    axis: str = ""
    detail: str = ""
    error: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.stage

    def __str__(self) -> str:
        if self.ok:
            return "every stage agrees with the reference"
        where = f"{self.axis} attention: " if self.axis else ""
        return f"{where}{self.stage}: {self.detail}"


@dataclass(frozen=True)
class Probe:
    """One run of the block with a single active axis, and what it added to x.

    spec: the block of that axis alone. weights: of that axis alone. added: y - x as a float64 grid.
    """

    spec: BlockSpec
    x: Tensor
    weights: Mapping[str, Tensor]
    added: Tensor

    @property
    def axis(self) -> str:
        return self.spec.axes[0]

    @property
    def precision(self) -> Precision:
        return PRECISIONS[self.spec.dtype]

    @property
    def finite(self) -> bool:
        return bool(torch.isfinite(self.added).all())

    @cached_property
    def expected(self) -> Tensor:
        """What the reference adds to x, a float64 grid."""
        return self.would_add()

    @cached_property
    def sequences(self) -> Tensor:
        """The observation as (sequences, L, dim)."""
        return to_sequences(self.axis, self.added)

    @cached_property
    def inputs(self) -> Tensor:
        """x as (sequences, L, dim), float64."""
        return to_sequences(self.axis, self.x.double())

    def would_add(self, eps: float | None = None, **changes: Tensor) -> Tensor:
        """What the reference would add with another eps or other weights or terms, named as in Bench.observe but for q, k and v,
        which are given together as qkv (3 dim, dim)."""
        weights = {**self.weights, **{name_of(self.axis, part): value for part, value in changes.items()}}
        spec = self.spec if eps is None else replace(self.spec, eps=eps)
        return reference(spec, self.x, weights) - self.x.double()

    def error(self, added: Tensor | None = None) -> float:
        """The largest difference of the observation from `added` (the reference's unless given) beyond the rounding of y,
        over the root mean square of `added`; infinite when an element is not finite."""
        added = self.expected if added is None else added
        if not self.finite:
            return math.inf
        beyond = ((self.added - added).abs() - ROUNDING[self.x.dtype] * (self.x.double().abs() + added.abs())).clamp_min(0.0)
        largest = float(beyond.max())
        return largest / max(float(added.square().mean().sqrt()), 1e-30) if largest else 0.0

    def agrees(self, added: Tensor | None = None, condition: float = 1.0) -> bool:
        """Whether the observation is `added` (the reference's unless given) within condition times the tolerance."""
        return self.error(added) <= condition * self.precision.tolerance

    def part(self, name: str) -> Tensor:
        """One of the probe's weights in float64, by its name in Bench.observe; qkv for q, k and v together."""
        return self.weights[name_of(self.axis, name)].double()

    def diagnosis(self, stage: str, detail: str) -> Diagnosis:
        return Diagnosis(stage, self.axis, detail, self.error())

    def unexplained(self, stage: str, added: Tensor | None = None) -> Diagnosis:
        """The diagnosis when no known fault explains the difference from `added` (the reference's unless given)."""
        error = self.error(added)
        if not self.finite:
            detail = f"{int((~torch.isfinite(self.added)).sum())} of {self.added.numel()} elements are not finite"
        elif error <= self.precision.inexact:
            rounded = "to TF32 or 16 bits" if self.spec.dtype == "float32" else "further than to the element type"
            detail = f"inexact: error {error:.2g} of its scale, as from operands rounded {rounded}"
        else:
            detail = f"error {error:.2g} of its scale, and no known fault explains it"
        return Diagnosis(stage, self.axis, detail, error)


def name_of(axis: str, part: str) -> str:
    """The reference's name of gain, beta, qkv, out or bias, a parameter, or of key_mask or logit_bias, a term."""
    if part in ("key_mask", "logit_bias"):
        return part if part == "key_mask" else f"{axis}_bias"
    names = {"gain": "norm.weight", "beta": "norm.bias", "qkv": "qkv.weight", "out": "out.weight", "bias": "out.bias"}
    return f"{axis}_{names[part]}"


def quiet_terms(spec: BlockSpec, batch: int, device: torch.device | str) -> dict[str, Tensor]:
    """Terms that change no logits, for the blocks that have any."""
    terms: dict[str, Tensor] = {}
    for name, shape in term_shapes(spec, batch).items():
        terms[name] = torch.ones(shape, dtype=torch.bool, device=device) if name == "key_mask" else torch.zeros(shape, device=device)
    return terms


def spread(tokens: Tensor) -> Tensor:
    """The tokens with a standard deviation of at least 0.5 over their channels: two channels may nearly agree by chance,
    and LayerNorm then magnifies rounding errors."""
    mean, deviation = tokens.mean(-1, keepdim=True), tokens.std(-1, correction=0, keepdim=True)
    return mean + (tokens - mean) * (deviation.clamp_min(0.5) / deviation.clamp_min(1e-6))


def largest(scores: Tensor) -> float:
    """The score of the largest magnitude, with its sign (a tiny number instead of 0): dividing queries by it makes it 1."""
    flat = scores.flatten()
    return float(flat[flat.abs().argmax()]) or 1e-6


class Bench:
    """The black box with the random draws and shapes that the probes share."""

    def __init__(self, spec: BlockSpec, runner: Runner, seed: int, device: torch.device | str) -> None:
        self.spec, self.runner, self.device = spec, runner, device
        self.precision = PRECISIONS[spec.dtype]
        self.generator = torch.Generator(device).manual_seed(seed)
        self.shape = (min(spec.batch, 2), spec.height, spec.width, spec.dim)

    def stored(self, values: Tensor) -> Tensor:
        """The values rounded to the block's element type; a mask as it is."""
        return values if values.dtype == torch.bool else values.to(self.precision.dtype)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device)

    def matrix(self, scale: float = 1.0) -> Tensor:
        """A random (dim, dim) matrix whose product with a vector has about `scale` times the vector's scale."""
        return self.normal(self.spec.dim, self.spec.dim) * (scale / math.sqrt(self.spec.dim))

    def tokens(self, scale: float = 1.0) -> Tensor:
        """Independent random tokens: (batch, height, width, dim)."""
        return spread(self.normal(*self.shape)) * scale

    def direction(self) -> Tensor:
        """What LayerNorm makes of `same_tokens`: mean 0 and variance 1 over the channels (1 when there is but one)."""
        if self.spec.dim == 1:
            return torch.ones(1, device=self.device)
        n = self.normal(self.spec.dim).double()
        n = n - n.mean()
        return (n / n.square().mean().sqrt()).float()

    def same_tokens(self, direction: Tensor) -> Tensor:
        """Every token of every sequence is `direction`, large enough for eps not to matter and without a mean to subtract."""
        return (self.precision.loudness * direction).expand(self.shape).contiguous()

    def quiet(self, axis: str) -> dict[str, Tensor]:
        """Weights with which `axis` adds nothing, even where LayerNorm or softmax are wrong."""
        one = replace(self.spec, axes=(axis,))
        shapes, gain = parameter_shapes(one), name_of(axis, "gain")
        weights = {name: (torch.ones if name == gain else torch.zeros)(shape, device=self.device) for name, shape in shapes.items()}
        return weights | quiet_terms(one, self.shape[0], self.device)

    def run(self, x: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        """y - x in float64, with quiet weights where none are given."""
        weights = {name: value for axis in self.spec.axes for name, value in self.quiet(axis).items()}
        weights |= given
        x = self.stored(x)
        y = self.runner(x.clone(), {name: self.stored(value) for name, value in weights.items()})
        if y.shape != x.shape:
            raise ValueError(f"the runner returned {tuple(y.shape)} for an input of {tuple(x.shape)}")
        return y.to(x.device).double() - x.double()

    def observe(
        self,
        axis: str,
        x: Tensor,
        *,
        gain: Tensor | None = None,
        beta: Tensor | None = None,
        q: Tensor | None = None,
        k: Tensor | None = None,
        v: Tensor | None = None,
        out: Tensor | None = None,
        bias: Tensor | None = None,
        key_mask: Tensor | None = None,
        logit_bias: Tensor | None = None,
    ) -> Probe:
        """Runs the block with these weights for `axis` (a gain of 1 and zeros where none are given), these terms of its logits (no key
        masked and zeros) and all other axes quiet. What the block does not have is left out."""
        weights = self.quiet(axis)
        given = {"gain": gain, "beta": beta, "out": out, "bias": bias, "key_mask": key_mask, "logit_bias": logit_bias}
        for part, value in given.items():
            if value is not None and name_of(axis, part) in weights:
                weights[name_of(axis, part)] = value
        for index, value in enumerate((q, k, v)):
            if value is not None:
                weights[name_of(axis, "qkv")][index * self.spec.dim : (index + 1) * self.spec.dim] = value
        x, weights = self.stored(x), {name: self.stored(value) for name, value in weights.items()}
        return Probe(replace(self.spec, axes=(axis,)), x, weights, self.run(x, weights))

    def identity(self) -> Tensor:
        return torch.eye(self.spec.dim, device=self.device)
