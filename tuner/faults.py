"""The catalogue of faults that can be told by what the block then computes: transposed weights, other formulas.

To add one, add a line to the table of its stage; a probe compares its observation with every line's prediction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from codegen.reference import SCORE_LIMIT, Branch, branch
from codegen.spec import BlockSpec
from tuner.probes import PRECISIONS, ROUNDING, Probe, name_of


def _split(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.chunk(3)
    return q, k, v


def _packed_by_head(qkv: Tensor, heads: int) -> Tensor:
    """The rows as a kernel sees them that takes the order (head, q/k/v, channel) for (q/k/v, head, channel)."""
    dim = qkv.shape[1]
    return qkv.view(heads, 3, dim // heads, dim).transpose(0, 1).reshape(3 * dim, dim)


# Fault of the QKV product -> the weight (3 dim, dim) that a right product would need to give the same, from weight and heads.
QKV_FAULTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "k and v swapped": lambda w, heads: torch.cat([_split(w)[i] for i in (0, 2, 1)]),
    "q and v swapped": lambda w, heads: torch.cat([_split(w)[i] for i in (2, 1, 0)]),
    "q, k and v rotated": lambda w, heads: torch.cat([_split(w)[i] for i in (1, 2, 0)]),
    "k, v and q rotated": lambda w, heads: torch.cat([_split(w)[i] for i in (2, 0, 1)]),
    "transposed weight (each of q, k and v)": lambda w, heads: torch.cat([part.T for part in _split(w)]),
    "transposed weight (read as (dim, 3 dim))": lambda w, heads: w.reshape(w.shape[1], -1).T,
    "the weight's rows are taken in the order (head, q/k/v, channel)": _packed_by_head,
}

# Faults of the scores, likewise as weights, for what q and k alone show.
SCORE_WEIGHTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "q and k swapped": lambda w, heads: torch.cat([_split(w)[i] for i in (1, 0, 2)]),
    "k is used for q as well": lambda w, heads: torch.cat([_split(w)[i] for i in (1, 1, 2)]),
    "q is used for k as well": lambda w, heads: torch.cat([_split(w)[i] for i in (0, 0, 2)]),
    "transposed q weight": lambda w, heads: torch.cat([_split(w)[0].T, *_split(w)[1:]]),
    "transposed k weight": lambda w, heads: torch.cat([_split(w)[0], _split(w)[1].T, _split(w)[2]]),
    "q and k are zero": lambda w, heads: torch.cat([torch.zeros_like(_split(w)[0]), *_split(w)[1:]]),
}


def qkv_fault(probe: Probe, table: dict[str, Callable[[Tensor, int], Tensor]], condition: float = 1.0) -> str | None:
    """The fault of the table whose weight explains the observation."""
    weight = probe.weights[name_of(probe.axis, "qkv")]
    for detail, change in table.items():
        if probe.agrees(probe.would_add(qkv=change(weight, probe.spec.heads)), condition):
            return detail
    return None


def _statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    mean = x.mean(-1, keepdim=True)
    return mean, (x - mean).square().mean(-1, keepdim=True)


# Fault of LayerNorm -> its result for x (..., dim), gain, beta and eps, all float64.
NORM_FAULTS: dict[str, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = {
    "missing: x is taken as it is": lambda x, g, b, eps: x,
    "x is not normalised before weight and bias": lambda x, g, b, eps: x * g + b,
    "weight (gain) missing": lambda x, g, b, eps: _normalised(x, eps) + b,
    "bias missing": lambda x, g, b, eps: _normalised(x, eps) * g,
    "weight (gain) and bias missing": lambda x, g, b, eps: _normalised(x, eps),
    "weight and bias swapped": lambda x, g, b, eps: _normalised(x, eps) * b + g,
    "mean not subtracted": lambda x, g, b, eps: x / (_statistics(x)[1] + eps).sqrt() * g + b,
    "mean subtracted nowhere (RMSNorm)": lambda x, g, b, eps: x / (_square(x) + eps).sqrt() * g + b,
    "mean not subtracted in the variance": lambda x, g, b, eps: (x - _statistics(x)[0]) / (_square(x) + eps).sqrt() * g + b,
    "variance divided by dim - 1": lambda x, g, b, eps: _bessel(x, eps) * g + b,
    "eps added to the standard deviation, not the variance": lambda x, g, b, eps: (
        (x - _statistics(x)[0]) / (_statistics(x)[1].sqrt() + eps) * g + b
    ),
    "divided by the variance, not its root": lambda x, g, b, eps: (x - _statistics(x)[0]) / (_statistics(x)[1] + eps) * g + b,
    "not divided by the standard deviation": lambda x, g, b, eps: (x - _statistics(x)[0]) * g + b,
}


def _square(x: Tensor) -> Tensor:
    return x.square().mean(-1, keepdim=True)


def _normalised(x: Tensor, eps: float) -> Tensor:
    mean, variance = _statistics(x)
    return (x - mean) / (variance + eps).sqrt()


def _bessel(x: Tensor, eps: float) -> Tensor:
    mean, variance = _statistics(x)
    return (x - mean) / (variance * (x.shape[-1] / max(1, x.shape[-1] - 1)) + eps).sqrt()


def _powers(b: Branch) -> Tensor:
    return torch.exp(b.scores - b.scores.amax(-1, keepdim=True))


def _streamed(b: Branch, tile: int, rescale_result: bool, rescale_sum: bool) -> Tensor:
    """Streaming softmax over tiles of keys whose maximum grows, while earlier tiles may keep the weights they had."""
    length = b.scores.shape[-1]
    running = torch.stack([part.amax(-1) for part in b.scores.split(tile, -1)], -1).cummax(-1).values
    stale = torch.exp(b.scores - running.repeat_interleave(tile, -1)[..., :length])
    right = _powers(b)
    return (right if rescale_result else stale) @ b.v / (right if rescale_sum else stale).sum(-1, keepdim=True)


def _streaming_faults() -> dict[str, Callable[[Branch], Tensor]]:
    def fault(tile: int, rescale_result: bool, rescale_sum: bool) -> Callable[[Branch], Tensor]:
        return lambda b: _streamed(b, tile, rescale_result, rescale_sum)

    forgotten = {"result and sum": (False, False), "result": (False, True), "sum": (True, False)}
    return {
        f"the {what} of earlier key tiles (of {tile}) is not rescaled when the maximum grows": fault(tile, *kept)
        for tile in (8, 16, 32, 48, 64, 128)
        for what, kept in forgotten.items()
    }


# Fault of the softmax -> the attention's result (sequences, heads, L, head_dim) from the right scores and values.
SOFTMAX_FAULTS: dict[str, Callable[[Branch], Tensor]] = {
    "taken over the queries, not the keys": lambda b: torch.softmax(b.scores, dim=-2) @ b.v,
    "taken over the heads, not the keys": lambda b: torch.softmax(b.scores, dim=1) @ b.v,
    "exponent of base 2 without the factor log2(e)": lambda b: torch.softmax(b.scores * math.log(2), dim=-1) @ b.v,
    "factor log2(e) with an exponent of base e": lambda b: torch.softmax(b.scores / math.log(2), dim=-1) @ b.v,
    "divided by the number of keys, not by the sum": lambda b: _powers(b) @ b.v / b.scores.shape[-1],
    "not normalised: the weights of a query do not sum to 1": lambda b: _powers(b) @ b.v,
    "missing: the scores are used as they are": lambda b: b.scores @ b.v,
    **_streaming_faults(),
}


@dataclass(frozen=True)
class Attention:
    """The attention of a probe whose output product is the identity, for some of its sequences, with all scores held."""

    spec: BlockSpec
    stages: Branch
    observed: Tensor
    rounding: Tensor

    @classmethod
    def of(cls, probe: Probe) -> Attention:
        sequences = probe.inputs
        few = max(1, SCORE_LIMIT // (8 * probe.spec.heads * sequences.shape[1] ** 2))
        stages = branch(probe.spec, probe.axis, sequences[:few], {name: tensor.double() for name, tensor in probe.weights.items()})
        observed = probe.sequences[:few]
        return cls(probe.spec, stages, observed, ROUNDING[probe.x.dtype] * (sequences[:few].abs() + observed.abs()))

    def merged(self, heads: Tensor) -> Tensor:
        """(sequences, heads, L, head_dim) -> (sequences, L, dim)."""
        return heads.transpose(1, 2).reshape(self.observed.shape)

    def differs(self, heads: Tensor, condition: float = 1.0) -> Tensor:
        """Where the observation is not this attention result, within condition times the tolerance: (sequences, L, dim)."""
        merged, tolerance = self.merged(heads), condition * PRECISIONS[self.spec.dtype].tolerance
        return (merged - self.observed).abs() > self.rounding + tolerance * merged.square().mean().sqrt()

    def explained(self, heads: Tensor, condition: float = 1.0) -> bool:
        """Whether the observation is this attention result."""
        return bool(torch.isfinite(self.observed).all()) and not bool(self.differs(heads, condition).any())

    def scaled(self, tau: float) -> Tensor:
        """The attention's result with all scores multiplied by tau."""
        return torch.softmax(self.stages.scores * tau, dim=-1) @ self.stages.v

    def softmax_fault(self) -> str | None:
        """The fault of SOFTMAX_FAULTS that explains the observation."""
        return next((detail for detail, weighted in SOFTMAX_FAULTS.items() if self.explained(weighted(self.stages))), None)

    def score_scale(self) -> str | None:
        """In words, the wrong factor of the scores that explains the observation; found by a search over four decades."""
        d, dim = self.spec.head_dim, self.spec.dim
        named = {
            "not scaled by 1/sqrt(head_dim)": math.sqrt(d),
            "scaled by 1/head_dim, not 1/sqrt(head_dim)": 1 / math.sqrt(d),
            "scaled by sqrt(head_dim), not 1/sqrt(head_dim)": float(d),
            "scaled by 1/sqrt(dim), not 1/sqrt(head_dim)": math.sqrt(d / dim),
            "of the wrong sign": -1.0,
        }
        for detail, tau in named.items():
            if tau != 1.0 and self.explained(self.scaled(tau), max(1.0, tau)):
                return detail
        tau = self._fitted()
        return f"scaled by {tau:.4g}/sqrt(head_dim), not 1/sqrt(head_dim)" if self.explained(self.scaled(tau), max(1.0, tau)) else None

    def _fitted(self) -> float:
        def loss(exponent: float) -> float:
            return float((self.merged(self.scaled(2.0**exponent)) - self.observed).square().sum())

        centre = min((i / 4 for i in range(-26, 27)), key=loss)
        low, high = centre - 0.25, centre + 0.25
        for _ in range(40):  # golden-section search
            left, right = high - 0.618034 * (high - low), low + 0.618034 * (high - low)
            low, high = (low, right) if loss(left) < loss(right) else (left, high)
        return 2.0 ** ((low + high) / 2)


def residual_faults(x: Tensor, normalised: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Fault of the residual -> what is carried instead of x, given x and LayerNorm(x)."""
    yield "x is not added", torch.zeros_like(x)
    yield "x is added twice", 2.0 * x
    yield "the normalised x is added, not x", normalised
    yield "x is subtracted", -x
