"""Finding the stage that disagrees with the reference.

The weights of a black box are set so that one stage more than before can be seen at the output, beginning at the back:
residual, output bias, output product, weighted sum, QKV product, LayerNorm, mask and bias, scores and softmax. The first probe that fails
accuses its stage, unless the observation equals what a known fault (tuner/faults.py) would give, which then is named. Of
several faults in one axis the one nearest to the output is found.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from codegen.reference import reference, to_grid, to_sequences
from codegen.spec import BlockSpec
from tuner.faults import NORM_FAULTS, QKV_FAULTS, SCORE_WEIGHTS, Attention, qkv_fault, residual_faults
from tuner.probes import Bench, Diagnosis, Probe, Runner, largest, name_of, quiet_terms, spread
from tuner.term_faults import known_term_fault, terms

SATURATED = 60.0  # a score this far ahead of all others leaves them no weight that float32 could show
STEEP = 600.0  # the largest score of the saturating probe
MAX_KEYS = 512  # longest sequence for which the weight of each key is solved for


def first_disagreement(spec: BlockSpec, runner: Runner, seed: int = 0, device: torch.device | str = "cpu") -> Diagnosis | None:
    """The first stage, from the back of the first axis that has one, that disagrees; None when no probe fails.

    Takes about ten runs an axis, on at most two images; what the runner raises is not caught.
    """
    bench = Bench(spec, runner, seed, device)
    found = residual(bench)
    if found is not None:
        return found
    for axis in spec.axes:
        for step in (output_bias, known_term_fault, output_product, equal_tokens, qkv_product, layer_norm, weighted_sum, terms, attention):
            found = step(bench, axis)
            if found is not None:
                return found
    return None


def probed(spec: BlockSpec) -> bool:
    """Whether the probes know the block: they switch stages off by weights, see the branch beside x, and know LayerNorm."""
    return spec.pre_norm == "layer" and spec.residual and spec.inner == spec.dim


def residual(bench: Bench) -> Diagnosis | None:
    """Without branches y must be x. Biases then tell which axis lost it, as x passes through all of them in turn."""
    x, axes = bench.stored(bench.tokens()), bench.spec.axes
    affine = {axis: (bench.stored(bench.normal(bench.spec.dim)), bench.stored(bench.normal(bench.spec.dim))) for axis in axes}
    if not bench.spec.norm_affine:
        affine = dict.fromkeys(axes, (torch.ones(bench.spec.dim, device=x.device), torch.zeros(bench.spec.dim, device=x.device)))
    parts = ("gain", "beta") if bench.spec.norm_affine else ()
    given = {name_of(axis, part): value for axis in axes for part, value in zip(parts, affine[axis], strict=False)}
    added = bench.run(x, given)
    broken = ~torch.isfinite(added)
    if broken.any():
        detail = f"{int(broken.sum())} of {broken.numel()} elements of the output are not finite (never written?), even with zero weights"
        return Diagnosis("residual", axes[0], detail, math.inf)
    error = float(added.abs().max()) / float(x.double().square().mean().sqrt())
    if error <= bench.precision.tolerance:
        return None
    biases = {axis: bench.stored(bench.normal(bench.spec.dim) * bench.spec.out_bias) for axis in axes}
    shown = biases if bench.spec.out_bias else {}
    y = bench.run(x, given | {name_of(axis, "bias"): bias for axis, bias in shown.items()}) + x.double()
    for culprit in axes:
        for index in range(4):
            carried, detail = x.double(), ""
            for axis in axes:
                if axis == culprit:
                    gain, beta = (part.double() for part in affine[axis])
                    normalised = F.layer_norm(carried, (bench.spec.dim,), gain, beta, bench.spec.eps)
                    detail, carried = list(residual_faults(carried, normalised))[index]
                carried = carried + biases[axis].double()
            if float((y - carried).abs().max()) <= bench.precision.loose:
                return Diagnosis("residual", culprit, detail, error)
    return Diagnosis("residual", axes[0] if len(axes) == 1 else "", f"error {error:.2g}, and no known fault explains it", error)


def output_bias(bench: Bench, axis: str) -> Diagnosis | None:
    """With an output product of zero the branch must be the bias."""
    if not bench.spec.out_bias:
        return None
    probe = bench.observe(axis, bench.tokens(), bias=bench.normal(bench.spec.dim))
    if probe.agrees():
        return None
    if probe.agrees(torch.zeros_like(probe.added)):
        return probe.diagnosis("output bias", "missing (y equals the reference without it)")
    if probe.agrees(2 * probe.expected):
        return probe.diagnosis("output bias", "added twice")
    unchanged = (probe.added == 0).all(-1)
    if unchanged.any() and bool(((probe.added - probe.expected).abs() <= bench.precision.loose)[~unchanged].all()):
        image, row, column = unchanged.nonzero()[0].tolist()
        detail = f"{int(unchanged.sum())} of {unchanged.numel()} tokens are never written, the first at "
        detail += f"image {image}, row {row}, column {column}"
        return probe.diagnosis("residual", detail)
    return probe.unexplained("output bias")


def output_product(bench: Bench, axis: str) -> Diagnosis | None:
    """Whatever the attention's result is: an identity as weight shows it, and a random weight must multiply it."""
    x, beta, q, k, v = bench.tokens(0.05), bench.normal(bench.spec.dim), bench.matrix(), bench.matrix(), bench.matrix()
    seen = bench.observe(axis, x, beta=beta, q=q, k=k, v=v, out=bench.identity())
    probe = bench.observe(axis, x, beta=beta, q=q, k=k, v=v, out=bench.matrix())
    if not seen.finite:  # a later step will say where
        return None
    if not seen.added.any() and not probe.added.any():
        return probe.diagnosis("output product", "missing: the branch adds nothing but the bias")
    weight = probe.part("out")
    if probe.agrees(seen.added @ weight.T):
        return None
    if probe.agrees(seen.added @ weight):
        return probe.diagnosis("output product", "transposed weight")
    if probe.agrees(seen.added):
        return probe.diagnosis("output product", "missing: the attention's result is added as it is")
    dead = (probe.added == 0).flatten(0, 2).all(0)
    if dead.any():
        return probe.diagnosis("output product", f"output channels {_ranges(dead)} are left out")
    return probe.unexplained("output product", seen.added @ weight.T)


def equal_tokens(bench: Bench, axis: str) -> Diagnosis | None:
    """All tokens are equal, so any weights that sum to 1 give their value, which is known: heads, channels and the sum."""
    n = bench.direction().double()
    u = 0.5 * bench.normal(bench.spec.dim).double()
    square, across = n @ n, n @ u
    weight = ((torch.outer(u, n) + torch.outer(n, u)) / square - torch.outer(n, n) * across / square**2).float()
    # weight @ n = u, and weight is symmetric and the same for q, k and v: their faults do not show here.
    beta = torch.ones(1, device=bench.device) if bench.spec.dim == 1 else None
    probe = bench.observe(axis, bench.same_tokens(n.float()), beta=beta, q=weight, k=weight, v=weight, out=bench.identity())
    if probe.agrees():
        return None
    if not probe.finite:
        return probe.unexplained("softmax")
    heads = (bench.spec.heads, bench.spec.head_dim)
    seen, value = probe.sequences.unflatten(-1, heads), to_sequences(axis, probe.expected)[0, 0].view(heads)
    return (
        _known_qkv_fault(_independent_weights(bench, axis))
        or _order_of_channels(probe, seen, value)
        or _dropped_channels(probe)
        or _sum_of_weights(bench, probe, seen, value)
        or _product_or_sum(bench, probe)
    )


def _sum_of_weights(bench: Bench, probe: Probe, seen: Tensor, value: Tensor) -> Diagnosis | None:
    factor = (seen * value).sum(-1) / value.square().sum(-1)
    if float((seen - factor[..., None] * value).abs().max()) > bench.precision.loose * float(factor.abs().max()):
        return None
    loose = bench.precision.loose
    low, high, length, dim = float(factor.min()), float(factor.max()), seen.shape[1], bench.spec.dim
    if abs(low - 1) <= loose and abs(high - 1) <= loose:
        return probe.unexplained("weighted sum")
    if not bench.observe(probe.axis, 2 * probe.x, **_parts(probe)).agrees(probe.added):
        return layer_norm(bench, probe.axis) or probe.diagnosis("LayerNorm", "its result grows with x")
    bessel = math.sqrt((dim - 1) / dim)
    if max(abs(low - bessel), abs(high - bessel)) <= loose:
        return probe.diagnosis("LayerNorm", "variance divided by dim - 1")
    if low == 0 == high:
        return probe.diagnosis("weighted sum", "missing: attention gives zero")
    near = max(1e-3, loose)
    span = f"{low:.4g}" if high - low <= near * abs(high) else f"{low:.4g} to {high:.4g}"
    unnormalised = abs(low - length) <= near * length and abs(high - length) <= near * length
    detail = f"not normalised: the weights of {length} equal keys sum to {span}, not 1"
    return probe.diagnosis("softmax", detail if unnormalised or high > 1 else f"the weights sum to {span}, not 1 (padded keys counted?)")


def _order_of_channels(probe: Probe, seen: Tensor, value: Tensor) -> Diagnosis | None:
    heads, head_dim = value.shape
    allowed = probe.precision.loose * float(value.square().mean().sqrt())
    distance = (seen[:, :, :, None] - value).abs().amax((0, 1, 4))
    source = distance.argmin(1)
    if float(distance.amin(1).max()) <= allowed and source.tolist() != list(range(heads)):
        order = ", ".join(f"{i} holds {int(j)}" for i, j in enumerate(source) if i != int(j))
        return probe.diagnosis("weighted sum", f"heads in another order: {order}")
    mixed = value.T.reshape(heads, head_dim)
    if float((seen - mixed).abs().max()) <= allowed:
        return probe.diagnosis("weighted sum", "heads and channels interleaved: (channel, head) instead of (head, channel)")
    return None


def _dead_channels(probe: Probe, added: Tensor) -> str:
    """The channels which are always zero, if all others are as in `added`; else an empty string."""
    dead = (probe.added == 0).flatten(0, 2).all(0) & (added.abs().flatten(0, 2).amax(0) > probe.precision.loose)
    alike = bool(((probe.added - added).abs() <= probe.precision.loose)[..., ~dead].all())
    return _ranges(dead) if alike and not dead.all() else ""


def _dropped_channels(probe: Probe) -> Diagnosis | None:
    dead = _dead_channels(probe, probe.expected)
    return probe.diagnosis("weighted sum", f"channels {dead} are zero, or the output product leaves them out") if dead else None


def _product_or_sum(bench: Bench, probe: Probe) -> Diagnosis:
    identity = bench.identity()
    plain = bench.observe(probe.axis, probe.x, **{**_parts(probe), "q": identity, "k": identity, "v": identity})
    dead = _dead_channels(plain, plain.expected)
    if dead:
        return probe.diagnosis("QKV product", f"input channels {dead} are left out of the sum")
    return probe.unexplained("QKV product" if plain.agrees() else "weighted sum")


def _parts(probe: Probe) -> dict[str, Tensor]:
    """A probe's weights as Bench.observe takes them."""
    names = {part: name_of(probe.axis, part) for part in ("gain", "beta", "out", "bias")}
    parts = {part: probe.weights[name] for part, name in names.items() if name in probe.weights}
    q, k, v = probe.weights[name_of(probe.axis, "qkv")].chunk(3)
    return {**parts, "q": q, "k": k, "v": v}


def _independent_weights(bench: Bench, axis: str) -> Probe:
    beta = torch.ones(1, device=bench.device) if bench.spec.dim == 1 else None
    q, k, v = bench.matrix(0.5), bench.matrix(0.5), bench.matrix()
    return bench.observe(axis, bench.same_tokens(bench.direction()), beta=beta, q=q, k=k, v=v, out=bench.identity())


def _known_qkv_fault(probe: Probe) -> Diagnosis | None:
    detail = qkv_fault(probe, QKV_FAULTS)
    return None if detail is None else probe.diagnosis("QKV product", detail)


def qkv_product(bench: Bench, axis: str) -> Diagnosis | None:
    """Equal tokens again, now with independent weights: the result must be the value's product alone."""
    probe = _independent_weights(bench, axis)
    return None if probe.agrees() else _known_qkv_fault(probe) or probe.unexplained("QKV product")


def layer_norm(bench: Bench, axis: str) -> Diagnosis | None:
    """Tokens are equal within a sequence, so that the result is LayerNorm's; some so small that eps shows, all with a mean."""
    eps = bench.spec.eps
    lines = to_sequences(axis, bench.tokens())
    number, length, dim = lines.shape
    scale = torch.tensor([math.sqrt(eps), 1.0, 0.2], device=bench.device)[torch.arange(number, device=bench.device) % 3]
    each = (spread(bench.normal(number, 1, dim)) + 2.0 + bench.normal(number, 1, 1)) * scale[:, None, None]
    x = to_grid(axis, each.expand(number, length, dim), torch.Size(bench.shape)).contiguous()
    gain = bench.stored(1.0 + 0.5 * (2 * torch.rand(dim, generator=bench.generator, device=bench.device) - 1))
    beta = bench.stored(bench.normal(dim))
    if not bench.spec.norm_affine:
        gain, beta = torch.ones_like(gain), torch.zeros_like(beta)
    probe = bench.observe(axis, x, gain=gain, beta=beta, v=bench.identity(), out=bench.identity())
    if probe.agrees():
        return None

    def grid(sequences: Tensor) -> Tensor:
        return to_grid(axis, sequences, torch.Size(bench.shape))

    inputs, g, b = probe.inputs, gain.double(), beta.double()
    if probe.finite and dim > 1:
        centred = inputs - inputs.mean(-1, keepdim=True)
        variance = centred.square().mean(-1)
        factor = ((probe.sequences - b) / g * centred).sum(-1) / centred.square().sum(-1)
        digits = 3 if bench.spec.itemsize == 4 else 1
        fitted = float((1 / factor.square() - variance)[0].median())  # of the first sequence, in which eps weighs most
        if fitted < 1e-3 * eps and probe.agrees(probe.would_add(eps=1e-30)):
            return probe.diagnosis("LayerNorm", f"eps is missing, not {eps:g}")
        if 0 < fitted < 1 and probe.agrees(probe.would_add(eps=fitted), 2.0):
            return probe.diagnosis("LayerNorm", f"eps is {fitted:.{digits}g}, not {eps:g}")
    for detail, fault in NORM_FAULTS.items():
        if probe.agrees(grid(fault(inputs, g, b, eps)), 2.0):
            return probe.diagnosis("LayerNorm", detail)
    if probe.agrees(_along_other_axis(probe)):
        return probe.diagnosis("LayerNorm", "tokens are read along the other axis")
    return probe.unexplained("LayerNorm")


def _along_other_axis(probe: Probe) -> Tensor:
    """What attention along the other axis, with this axis' weights, would add."""
    other = "col" if probe.axis == "row" else "row"
    spec = replace(probe.spec, axes=(other,))
    weights = {f"{other}{name.removeprefix(probe.axis)}": value for name, value in probe.weights.items()}
    weights |= quiet_terms(spec, probe.x.shape[0], probe.x.device)
    return reference(spec, probe.x, weights) - probe.x.double()


def weighted_sum(bench: Bench, axis: str) -> Diagnosis | None:
    """All scores are zero, so each token must get the mean of its sequence; if not, the weight of each key is solved for."""
    probe = bench.observe(axis, bench.tokens(), v=bench.identity(), out=bench.identity())
    if probe.agrees():
        return None
    if probe.agrees(_along_other_axis(probe)):
        return probe.diagnosis("weighted sum", "keys are those of the other axis")
    number, length, dim = probe.sequences.shape
    if not probe.finite or length > MAX_KEYS or length > number * (dim - 1) // 2:
        return probe.unexplained("weighted sum")
    keys = F.layer_norm(probe.inputs, (dim,), eps=probe.spec.eps)
    solved = torch.linalg.solve(torch.einsum("njd,nkd->jk", keys, keys), torch.einsum("njd,nid->ji", keys, probe.sequences)).T
    if not probe.agrees(to_grid(axis, solved @ keys, probe.x.shape), 5.0):
        return probe.unexplained("weighted sum")
    small = probe.precision.negligible / length
    dropped = (solved.abs() < small).all(0)
    kept = solved[:, ~dropped]
    if dropped.any() and dropped.sum() < length and float((kept - kept.mean()).abs().max()) < small:
        return probe.diagnosis("weighted sum", f"keys {_ranges(dropped)} of {length} are ignored")
    if float(solved.triu(1).abs().max()) < small:
        return probe.diagnosis("weighted sum", "keys behind the query are ignored (a causal mask)")
    low, high = float(solved.min()), float(solved.max())
    return probe.diagnosis("weighted sum", f"{length} keys of equal score weigh from {low:.3g} to {high:.3g}, not {1 / length:.3g} each")


def attention(bench: Bench, axis: str) -> Diagnosis | None:
    """Distinct scores: so steep that only the largest one matters, which leaves softmax out, and moderate ones."""
    x, q, k, v = bench.tokens(), bench.matrix(), bench.matrix(), bench.matrix()
    unscaled = bench.observe(axis, x, q=q, k=k, v=v, out=bench.identity())
    unit = largest(Attention.of(unscaled).stages.scores)

    def probe_with(score: float) -> Probe:
        return bench.observe(axis, x, q=q * (score / unit), k=k, v=v, out=bench.identity())

    moderate, steep = probe_with(bench.precision.moderate), probe_with(STEEP)
    saturated = _saturated_agrees(steep)
    if not moderate.agrees():
        seen = Attention.of(moderate)
        for stage, detail in (
            ("scores", qkv_fault(moderate, SCORE_WEIGHTS)),
            ("softmax", seen.softmax_fault()),
            ("scores", seen.score_scale()),
        ):
            if detail is not None:
                return moderate.diagnosis(stage, detail)
        return moderate.unexplained("softmax" if saturated else "scores")
    if not steep.finite:
        return steep.diagnosis("softmax", f"overflows at scores of {STEEP:g}: is the maximum subtracted?")
    if not saturated:
        return steep.diagnosis("softmax", f"wrong at scores of {STEEP:g}, though right at {bench.precision.moderate:g}")
    return None


def _saturated_agrees(probe: Probe) -> bool:
    """Whether every query whose largest score is far ahead got that key's value."""
    if not probe.finite:
        return False
    seen = Attention.of(probe)
    scores = seen.stages.scores
    if scores.shape[-1] == 1:
        return seen.explained(seen.stages.v)
    best = scores.topk(2, dim=-1)
    clear = (best.values[..., 0] - best.values[..., 1] > SATURATED)[..., None].expand(seen.stages.v.shape)
    chosen = seen.stages.v.gather(-2, best.indices[..., :1].expand(seen.stages.v.shape))
    return not bool((seen.differs(chosen) & seen.merged(clear)).any())


def _ranges(mask: Tensor) -> str:
    """The set positions of a mask as 3, 5..7."""
    runs: list[list[int]] = []
    for i in mask.nonzero().flatten().tolist():
        if runs and runs[-1][1] == i - 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    return ", ".join(f"{a}" if a == b else f"{a}..{b}" for a, b in runs)
