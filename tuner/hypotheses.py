"""What a block of any variant would compute with one known fault, in one of its axes or in all: compared with what it does compute.

Unlike the probes of tuner/stages.py this needs neither a residual that shows the branch nor weights that switch stages off, so it
serves every variant, but it tells only what is in the catalogue. To add a fault, add a line to `faults`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from codegen.reference import branch, normalise, random_input, random_weights, result, to_grid, to_sequences
from codegen.spec import DEFAULT_EPS, BlockSpec
from codegen.terms import random_terms, with_keys
from tuner.faults import QKV_FAULTS, SCORE_WEIGHTS, SOFTMAX_FAULTS
from tuner.probes import PRECISIONS, ROUNDING, Diagnosis, Runner
from tuner.term_faults import BIAS_FAULTS, KEY_FAULTS

Axis = Callable[[BlockSpec, str, Tensor, Mapping[str, Tensor]], Tensor]
"""(block, axis, sequences, weights) -> what the axis makes of them, as codegen.reference.result has it."""

CLEARLY = 0.25
"""How much less than that of the right block the error of a fault has to be for it to explain an observation."""
CERTAINLY = 0.01
"""The same, for it to be the fault without asking for others."""
SMALL = 0.05
"""The scale of every third token, at which the norm's eps shows."""
_NORMS = {"layer": "LayerNorm", "rms": "RMSNorm", "none": "no norm"}


def explained(spec: BlockSpec, runner: Runner, seed: int = 0, device: torch.device | str = "cpu") -> Diagnosis | None:
    """The fault that explains one run of the block on random tokens and weights; None when it is right, or none does."""
    generator = torch.Generator(device).manual_seed(seed)
    weights = random_weights(spec, generator) | random_terms(spec, generator, min(spec.batch, 2))
    x = random_input(spec, generator, batch=min(spec.batch, 2))
    small = torch.arange(x[..., 0].numel(), device=x.device).view(*x.shape[:3], 1) % 3 == 0
    x = torch.where(small, SMALL * x, x).to(x.dtype)
    y = runner(x.clone(), weights).to(x.device).double()
    cast = {name: value.double() if value.is_floating_point() else value for name, value in weights.items()}

    def error(faulty: Mapping[str, Axis]) -> float:
        return _distance(spec, x.double(), y, _computed(spec, x.double(), cast, faulty), ROUNDING[x.dtype])

    precision = PRECISIONS[spec.dtype]
    right = error({})
    if right <= precision.tolerance:
        return None
    suspects = [(axis,) for axis in spec.axes] + ([spec.axes] if len(spec.axes) > 1 else [])
    best = math.inf, Diagnosis()
    for axes in suspects:
        for stage, detail, computes in faults(spec):
            found = error(dict.fromkeys(axes, computes))
            if found < best[0]:
                best = found, Diagnosis(stage, axes[0], detail, right)
            if best[0] <= precision.tolerance and best[0] < CERTAINLY * right:
                return best[1]
    return best[1] if best[0] <= precision.loose and best[0] < CLEARLY * right else None


def faults(spec: BlockSpec) -> Iterator[tuple[str, str, Axis]]:
    """(stage, what is wrong, what an axis computes then) of the faults that the block can have."""
    yield from _of_the_residual(spec)
    yield from _of_the_norm(spec)
    for part, stage, name in (("qkv.bias", "QKV product", "qkv bias"), ("out.bias", "output bias", "output bias")):
        if part.replace(".", "_") in spec.parameters:
            yield stage, f"{name} missing", _with(part, torch.zeros_like)
            yield stage, f"{name} added twice", _with(part, lambda bias: 2.0 * bias)
    if spec.qkv_bias:
        for which, index in (("q", 0), ("v", 2)):  # k's adds the same to all scores of a query, which softmax does not see
            yield "QKV product", f"qkv bias missing from {which}", _with("qkv.bias", lambda bias, i=index: _without(bias, i))
        yield "QKV product", "q's bias is added to v", _with("qkv.bias", lambda bias: bias.chunk(3)[0].repeat(3))
    yield "output product", "missing: the branch adds nothing but the bias", _with("out.weight", torch.zeros_like)
    yield from _of_the_terms(spec)
    yield from _of_the_attention(spec)


def _of_the_residual(spec: BlockSpec) -> Iterator[tuple[str, str, Axis]]:
    toggled = "x is not added" if spec.residual else "x is added although the block has no residual"
    yield "residual", toggled, _as_if(residual=not spec.residual)
    if spec.residual and spec.post_norm:
        yield "residual", "x is added behind the norm, not before", lambda s, a, x, w: x + result(replace(s, residual=False), a, x, w)


def _of_the_norm(spec: BlockSpec) -> Iterator[tuple[str, str, Axis]]:
    """Its place, its kind, its parameters and its eps."""
    stage = "post-norm" if spec.post_norm else "norm"
    nothing: dict[str, Any] = {"norm": "none", "post_norm": False, "norm_affine": True, "eps": DEFAULT_EPS}
    if spec.norm != "none":
        yield stage, f"missing, not {_NORMS[spec.norm]}", _as_if(**nothing)
        elsewhere = "applied before the branch, not behind it" if spec.post_norm else "applied behind the branch, not before it"
        yield stage, elsewhere, _as_if(post_norm=not spec.post_norm)
        if spec.post_norm:
            yield stage, "applied before the branch as well", lambda s, a, x, w: _twice_normalised(s, a, x, w)
        for eps in (1e-30, 1e-8, 1e-6, 1e-5, 1e-3):
            if eps != spec.eps:
                yield stage, "eps is missing" if eps == 1e-30 else f"eps is {eps:g}, not {spec.eps:g}", _as_if(eps=eps)
    for kind in ("layer", "rms"):
        if kind != spec.norm:
            yield stage, f"computed as {_NORMS[kind]}, not {_NORMS[spec.norm]}", _as_if(norm=kind)
    if spec.norm_affine and spec.norm != "none":
        yield stage, "weight (gain) missing", _with("norm.weight", torch.ones_like)
    if "norm_bias" in spec.parameters:
        yield stage, "bias missing", _with("norm.bias", torch.zeros_like)


def _of_the_terms(spec: BlockSpec) -> Iterator[tuple[str, str, Axis]]:
    """The key mask and the logit bias."""
    for detail, keys in KEY_FAULTS.items() if spec.key_mask else ():
        yield "scores", detail, _with("keys", keys)
    for detail, bias in BIAS_FAULTS.items() if spec.logit_bias else ():
        yield "scores", detail, _with("bias", lambda b, change=bias: change(b, spec.head_dim))


def _of_the_attention(spec: BlockSpec) -> Iterator[tuple[str, str, Axis]]:
    """The scale of the scores, the order of q, k and v, and softmax."""
    d = spec.head_dim
    factors = {
        "not scaled by 1/sqrt(head_dim)": math.sqrt(d),
        "scaled by 1/head_dim, not 1/sqrt(head_dim)": 1 / math.sqrt(d),
        "scaled by 1/sqrt(dim / heads), not 1/sqrt(head_dim)": math.sqrt(d * spec.heads / spec.dim),
        "scaled by 1/sqrt(dim), not 1/sqrt(head_dim)": math.sqrt(d / spec.dim),
        "scaled by 1/sqrt(heads * head_dim), not 1/sqrt(head_dim)": math.sqrt(1 / spec.heads),
    }
    for detail, factor in factors.items():
        if abs(factor - 1.0) > 1e-9:
            yield "scores", detail, _scored(factor)
    for stage, table in (("QKV product", QKV_FAULTS), ("scores", SCORE_WEIGHTS)):
        for detail, change in table.items():
            square = "transposed" in detail or "in the order" in detail
            if not square or spec.inner == spec.dim:
                yield stage, detail, _rearranged(change, not square)
    for detail, weighted in SOFTMAX_FAULTS.items():
        yield "softmax", detail, _weighted(weighted)


def _computed(spec: BlockSpec, x: Tensor, weights: Mapping[str, Tensor], faulty: Mapping[str, Axis]) -> Tensor:
    grid = x
    for axis in spec.axes:
        computes = faulty.get(axis, result)
        grid = to_grid(axis, computes(spec, axis, to_sequences(axis, grid), with_keys(axis, weights)), x.shape)
    return grid


def _distance(spec: BlockSpec, x: Tensor, y: Tensor, expected: Tensor, rounding: float) -> float:
    """The largest difference beyond the rounding of y, over the root mean square of the branch, or of y where y is the branch."""
    if not bool(torch.isfinite(y).all()):
        return math.inf
    carried = x if spec.residual and not spec.post_norm else torch.zeros_like(x)
    added = expected - carried
    beyond = ((y - expected).abs() - rounding * (carried.abs() + added.abs())).clamp_min(0.0)
    return float(beyond.max()) / max(float(added.square().mean().sqrt()), 1e-30)


def _as_if(**fields: Any) -> Axis:
    return lambda spec, axis, x, weights: result(replace(spec, **fields), axis, x, weights)


def _with(part: str, change: Callable[..., Tensor]) -> Axis:
    """The axis with one of its parameters changed, or its bias or keys."""

    def computes(spec: BlockSpec, axis: str, x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        name = f"{axis}_{part}"
        return result(spec, axis, x, {**weights, name: change(weights[name])})

    return computes


def _without(bias: Tensor, index: int) -> Tensor:
    parts = list(bias.chunk(3))
    parts[index] = torch.zeros_like(parts[index])
    return torch.cat(parts)


def _rearranged(change: Callable[[Tensor, int], Tensor], with_bias: bool) -> Axis:
    """The axis with another weight of the QKV product, and its bias rearranged alike."""

    def computes(spec: BlockSpec, axis: str, x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        parts = {f"{axis}_qkv.weight": change(weights[f"{axis}_qkv.weight"], spec.heads)}
        if spec.qkv_bias and with_bias:
            parts[f"{axis}_qkv.bias"] = change(weights[f"{axis}_qkv.bias"][:, None], spec.heads)[:, 0]
        return result(spec, axis, x, {**weights, **parts})

    return computes


def _scored(factor: float) -> Axis:
    """The axis with all scores multiplied by `factor`."""
    return _weighted(lambda stages: torch.softmax(factor * stages.scores, dim=-1) @ stages.v)


def _weighted(attend: Callable[..., Tensor]) -> Axis:
    """The axis with attend(stages) of (sequences, heads, L, head_dim) in the place of the attention's result."""

    def computes(spec: BlockSpec, axis: str, x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        heads = attend(branch(spec, axis, x, weights))
        merged = heads.transpose(1, 2).reshape(*x.shape[:2], spec.inner)
        output = F.linear(merged, weights[f"{axis}_out.weight"], weights.get(f"{axis}_out.bias"))
        output = x + output if spec.residual else output
        return normalise(spec, axis, output, weights) if spec.post_norm else output

    return computes


def _twice_normalised(spec: BlockSpec, axis: str, x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    inside = branch(replace(spec, post_norm=False), axis, x, weights).output
    return normalise(spec, axis, x + inside if spec.residual else inside, weights)
