"""Whether a block's implementation is right, by its numbers alone, and which of its stages disagrees when it is not.

An implementation is a runner: (x, weights) -> y, all of the block's element type, with x (batch, height, width, dim) and the
weights by the reference's parameter names. It is compared with the float64 reference in two ways: the whole output, scaled to
the output's root mean square, and the branch alone (y - x), scaled to the branch's, so that the residual cannot hide it. Where the
block has no residual, or normalises behind it, y is the branch.
float32 is held to a tolerance; 16-bit types to twice the error of PyTorch's own form of the same type on the same input.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from codegen.reference import SCORE_LIMIT, Branch, branch, random_input, random_weights, reference, to_sequences, torch_dtype
from codegen.spec import BlockSpec
from codegen.terms import random_terms, split_terms, with_keys
from tuner.hypotheses import explained
from tuner.probes import ROUNDING, Diagnosis, Runner, largest
from tuner.stages import first_disagreement, probed

TOLERANCE = 1e-5
WORSE = 2.0  # by how much the error of a 16-bit block may exceed that of PyTorch's form
LARGE_SCORE = 150.0  # beyond the range of float32's exp, so that a softmax needs its maximum subtracted
WELL_CONDITIONED = 8.0  # scores up to this size are held to the tolerance itself
UNCANCELLED = 32.0  # a token's root mean square over its deviation up to which the tolerance holds as well
UNLOCATED = "whole block"


@dataclass(frozen=True)
class Check:
    """What a verification found.

    error: the largest error over the output's root mean square; branch_error: the largest error beyond the rounding of y,
    over the root mean square of the branch without the residual. Both over all cases, infinite when an element is not finite.
    cause: one line that says what failed first, empty when ok.
    """

    ok: bool
    error: float
    branch_error: float
    cause: str = ""


@dataclass(frozen=True)
class Case:
    """One input with its float64 output. carries: whether y is x and the branch, not the branch alone. condition: by how much
    ill-conditioned numbers
    (large scores, nearly equal channels) may exceed the tolerance, at least 1. allowed: what the error and the branch's error,
    divided by it, may be; None for the checker's tolerance."""

    name: str
    x: Tensor
    weights: Mapping[str, Tensor]
    expected: Tensor
    carries: bool
    condition: float = 1.0
    allowed: tuple[float, float] | None = None

    def shuffled(self, generator: torch.Generator) -> Case:
        """The same case with images, rows and columns in another order: attention along an axis does not depend on the
        order of its tokens, so a fresh input costs no new reference. Mask and biases follow."""
        x, expected, weights = self.x, self.expected, dict(self.weights)
        for dimension, axis in enumerate(("", "col", "row")):
            order = torch.randperm(x.shape[dimension], generator=generator).to(x.device)
            x, expected = x.index_select(dimension, order), expected.index_select(dimension, order)
            if "key_mask" in weights:
                weights["key_mask"] = weights["key_mask"].index_select(dimension, order)
            if (bias := weights.get(f"{axis}_bias")) is not None:
                weights[f"{axis}_bias"] = bias.index_select(1, order).index_select(2, order)
        return replace(self, x=x, expected=expected, weights=weights)


class Checker:
    """The cases of one specification with their references, computed once and then used for any number of runners.

    seed: of all random draws. device: where inputs, weights and references live, and so what runners are called with.
    tolerance: of float32; 16-bit types are measured against PyTorch's own form, on the same device.
    batch: of the main case, the specification's unless given; another case has another batch. quick: leaves out each
    axis alone and large scores, for runners that take seconds.
    repeats: how often each case is run, in fresh orders, which shows faults that come and go.
    """

    def __init__(
        self,
        spec: BlockSpec,
        seed: int,
        device: torch.device | str = "cpu",
        tolerance: float = TOLERANCE,
        batch: int | None = None,
        quick: bool = False,
        repeats: int = 1,
    ) -> None:
        self.spec, self.tolerance, self.repeats = spec, tolerance, repeats
        self._orders = torch.Generator().manual_seed(seed)
        generator = torch.Generator(device).manual_seed(seed)
        self.cases = tuple(_cases(spec, generator, batch or spec.batch, quick))

    def __call__(self, runner: Runner) -> Check:
        """Runs every case until one fails. Whatever the runner raises is not caught."""
        error = branch_error = 0.0
        for case in self.cases:
            for _ in range(self.repeats):
                check = _run(case.shuffled(self._orders), runner, self.tolerance)
                error, branch_error = max(error, check.error), max(branch_error, check.branch_error)
                if not check.ok:
                    return Check(False, error, branch_error, f"{case.name}: {check.cause}")
        return Check(True, error, branch_error)


def check(spec: BlockSpec, runner: Runner, seed: int, tolerance: float = TOLERANCE, device: torch.device | str = "cpu") -> Check:
    """Verifies one runner; use a Checker for several of the same specification."""
    return Checker(spec, seed, device, tolerance)(runner)


def diagnose(
    spec: BlockSpec,
    runner: Runner,
    seed: int = 0,
    device: torch.device | str = "cpu",
    batch: int | None = None,
    quick: bool = False,
) -> Diagnosis:
    """Names the stage of the block that disagrees with the reference, or says that none does.

    A variant's run is first compared with what it would be with known faults. Then, where the block has LayerNorm, a residual and heads of
    dim / heads, probes that involve one stage more each go, on at most two images. At last the whole block is checked as Checker does
    (batch and quick are Checker's), and what only this shows has the stage UNLOCATED.
    """
    found = explained(spec, runner, seed, device) if set(spec.variants) - {"eps"} else None
    if found is None and probed(spec):
        found = first_disagreement(spec, runner, seed, device)
    if found is None:
        whole = Checker(spec, seed, device, batch=batch, quick=quick)(runner)
        found = Diagnosis() if whole.ok else Diagnosis(UNLOCATED, "", whole.cause, max(whole.error, whole.branch_error))
    return found


def rms(values: Tensor) -> float:
    """Root mean square, 0 for an empty tensor."""
    return float(values.double().square().mean().sqrt()) if values.numel() else 0.0


def _cases(spec: BlockSpec, generator: torch.Generator, batch: int, quick: bool) -> Iterator[Case]:
    weights = random_weights(spec, generator) | random_terms(spec, generator, batch)
    yield _case("unit scale", spec, random_input(spec, generator, batch=batch), weights)

    other = 2 if batch == 1 and 2 * spec.height * spec.width * spec.dim <= SCORE_LIMIT else 1
    weights = random_weights(spec, generator) | random_terms(spec, generator, other)
    yield _case(f"tokens of scale 0.001 to 100, batch {other}", spec, _mixed(spec, generator, other), weights)
    if quick:
        return
    for axis in spec.axes:
        x = _mixed(spec, generator, 1)
        alone = _alone(spec, axis, random_weights(spec, generator) | random_terms(spec, generator, 1))
        if len(spec.axes) > 1 and spec.residual:
            yield _case(f"{axis} branch alone", spec, x, alone)
        condition = 1.0 if spec.pre_norm == "none" else LARGE_SCORE / WELL_CONDITIONED  # there it is found from the scores
        alone_text = "branch alone, " if spec.residual else ""
        yield _case(f"{axis} {alone_text}large scores", spec, x, _sharpened(spec, axis, x, alone), condition)


def _case(name: str, spec: BlockSpec, x: Tensor, weights: Mapping[str, Tensor], condition: float = 1.0) -> Case:
    carries = spec.residual and not spec.post_norm
    case = Case(name, x, weights, reference(spec, x, weights), carries, condition * _condition(spec, x, weights))
    return case if spec.itemsize == 4 else replace(case, allowed=_allowed(spec, case))


def _allowed(spec: BlockSpec, case: Case) -> tuple[float, float]:
    """WORSE times the errors of PyTorch's own form of the element type, but no less than its rounding."""
    least = torch.finfo(torch_dtype(spec)).eps
    found = _errors(case, reference(spec, case.x, case.weights, torch_dtype(spec)).double())
    error, branch_error = (max(least, one) if math.isfinite(one) else least for one in found)
    return WORSE * error, WORSE * branch_error


def _condition(spec: BlockSpec, x: Tensor, weights: Mapping[str, Tensor]) -> float:
    """At least 1: by how much rounding errors may grow: in LayerNorm (see _cancellation), and where scores are large because the
    tokens are not normalised."""
    if spec.pre_norm == "layer" and spec.residual:
        return _cancellation(spec, x)  # further axes see x and more
    cast = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    worst, grid = 1.0, x.double()
    for axis in spec.axes:
        tokens, stages = _some(spec, axis, grid, cast)
        if spec.pre_norm == "none":
            worst = max(worst, float(stages.scores.nan_to_num(neginf=0.0).abs().max()) / WELL_CONDITIONED)
        if spec.norm == "layer":
            summed = stages.output + tokens if spec.residual else stages.output
            worst = max(worst, _cancellation(spec, summed if spec.post_norm else tokens))
        grid = reference(replace(spec, axes=(axis,)), grid, weights)
    return worst


def _some(spec: BlockSpec, axis: str, grid: Tensor, weights: Mapping[str, Tensor]) -> tuple[Tensor, Branch]:
    """As many sequences of a grid as the score matrix has room for, and the stages of `axis` for them, with the terms among the weights."""
    sequences = to_sequences(axis, grid)
    most = max(1, SCORE_LIMIT // (spec.heads * sequences.shape[1] ** 2))
    few, own = sequences[:most].double(), with_keys(axis, weights)
    return few, branch(spec, axis, few, {name: value[:most] if name.endswith("_keys") else value for name, value in own.items()})


def _cancellation(spec: BlockSpec, x: Tensor) -> float:
    """At least 1: what LayerNorm loses where the channels of a token nearly agree, which is rare from 8 channels on."""
    x = x.double()
    spread = (x.var(-1, correction=0) + spec.eps).sqrt()
    return max(1.0, float((x.square().mean(-1).sqrt() / spread).max()) / UNCANCELLED)


def _mixed(spec: BlockSpec, generator: torch.Generator, batch: int) -> Tensor:
    """Tokens each with a mean and a scale of its own: at 0.001 LayerNorm's eps shows, at 100 the branch is small beside x. No scale is
    above 1 where the tokens are not normalised, so that softmax has more than one key to weigh."""
    x = random_input(spec, generator, batch=batch).float()
    tokens = (*x.shape[:3], 1)
    mean = torch.randn(tokens, generator=generator, device=x.device)
    decades = 5.0 if spec.pre_norm != "none" else 3.0
    exponent = decades * torch.rand(tokens, generator=generator, device=x.device) - 3.0
    return ((x + mean) * 10.0**exponent).to(torch_dtype(spec))


def _alone(spec: BlockSpec, axis: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights with every other axis adding nothing; as they are where it would leave nothing."""
    if not spec.residual:
        return weights
    muted = {f"{other}_out.{part}" for other in spec.axes if other != axis for part in ("weight", "bias")}
    return {name: torch.zeros_like(tensor) if name in muted else tensor for name, tensor in weights.items()}


def _sharpened(spec: BlockSpec, axis: str, x: Tensor, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights with the queries of `axis` scaled, so that its largest score is about LARGE_SCORE, and positive; smaller where scores are
    so near 0, as those of a single token may be, that queries or weights would come near the end of the type's range."""
    before = spec.axes[: spec.axes.index(axis)]
    grid = reference(replace(spec, axes=before), x, weights) if before else x
    stages = _some(spec, axis, grid, {name: tensor.double() for name, tensor in split_terms(spec, weights)[0].items()})[1]
    sharpened = {name: weights[name].clone() for name in (f"{axis}_qkv.weight", f"{axis}_qkv.bias") if name in weights}
    queries = max(float(values[: spec.inner].abs().max()) for values in sharpened.values())
    room = torch.finfo(x.dtype).max / 64 / max(queries, float(stages.q.abs().max()))
    factor = max(-room, min(LARGE_SCORE / largest(stages.scores), room))
    for tensor in sharpened.values():
        tensor[: spec.inner] *= factor
    return {**weights, **sharpened}


def _run(case: Case, runner: Runner, tolerance: float) -> Check:
    x = case.x.clone()
    y = runner(x, case.weights)

    def failed(cause: str, error: float = math.inf, branch_error: float = math.inf) -> Check:
        return Check(False, error, branch_error, cause)

    if y.shape != x.shape or y.dtype != x.dtype:
        return failed(f"the output is {y.dtype} {tuple(y.shape)}, not {x.dtype} {tuple(x.shape)}")
    if not torch.equal(x, case.x):
        return failed("the input was overwritten")
    y = y.to(x.device).double()
    broken = ~torch.isfinite(y)
    if broken.any():
        return failed(f"{int(broken.sum())} of {y.numel()} elements are not finite, the first at {place(broken)}")
    error, branch_error = _errors(case, y)
    allowed, allowed_branch = case.allowed or (tolerance, tolerance)
    if error <= allowed and branch_error <= allowed_branch:
        return Check(True, error, branch_error)
    if case.carries and torch.equal(y, x.double()):
        return failed("returns its input: the branch adds nothing", error, branch_error)
    what, worst, most = ("branch's", branch_error, allowed_branch) if branch_error > allowed_branch else ("output's", error, allowed)
    deviation = (y - case.expected).abs()
    limit = f"{most:g}"
    if case.allowed is not None:
        limit = f"{most:.2g}, {WORSE:g} times that of PyTorch's {str(x.dtype).removeprefix('torch.')} form"
    where = place(deviation == deviation.max())
    return failed(f"error {worst:.2g} of the {what} scale exceeds {limit}, the largest at {where}", error, branch_error)


def _errors(case: Case, y: Tensor) -> tuple[float, float]:
    """The error and the branch's error of a float64 output; see Check."""
    x = case.x.double() if case.carries else torch.zeros_like(case.x, dtype=torch.float64)
    added = case.expected - x
    deviation = (y - case.expected).abs()
    beyond = (deviation - ROUNDING[case.x.dtype] * (x.abs() + added.abs())).clamp_min(0.0)
    scale, branch_scale = (rms(values) or 1.0 for values in (case.expected, added))
    return float(deviation.max()) / scale / case.condition, float(beyond.max()) / branch_scale / case.condition


def place(mask: Tensor) -> str:
    """The first set element of a (batch, height, width, dim) mask, in words."""
    batch, row, column, channel = mask.nonzero()[0].tolist()
    return f"image {batch}, row {row}, column {column}, channel {channel}"
