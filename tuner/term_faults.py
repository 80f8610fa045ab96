"""Probes of a block's key mask and logit bias, and the catalogue of their faults.

To add a fault, add a line to its table; a probe compares its observation with every line's prediction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from codegen.terms import lines_of, mask_of, masked_lines
from tuner.probes import Bench, Diagnosis, Probe, name_of

# Fault of the key mask -> the keys (sequences, L) that a right block would need to do the same.
KEY_FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "key mask ignored": torch.ones_like,
    "key mask inverted: what it allows is masked": torch.logical_not,
    "key mask off by one token (the one before)": lambda keys: keys.roll(1, 1),
    "key mask off by one token (the one behind)": lambda keys: keys.roll(-1, 1),
    "a query whose keys are all masked attends to all of them, not to none": lambda keys: keys | ~keys.any(1, keepdim=True),
}

# The same for the whole mask (batch, height, width).
MASK_FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "key mask read along the other axis": lambda mask: mask.reshape(mask.shape[0], mask.shape[2], mask.shape[1]).transpose(1, 2),
    "key mask of the first image used for all": lambda mask: mask[:1].expand_as(mask),
}

# Fault of the logit bias -> the bias (heads, L, L) that a right block would need to do the same, from bias and head_dim.
BIAS_FAULTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "logit bias missing": lambda b, d: torch.zeros_like(b),
    "logit bias transposed: taken as [head, key, query]": lambda b, d: b.transpose(1, 2),
    "logit bias subtracted": lambda b, d: -b,
    "logit bias added twice": lambda b, d: 2 * b,
    "logit bias without the factor log2(e) of an exponent of base 2": lambda b, d: b * math.log(2),
    "logit bias with the factor log2(e), and an exponent of base e": lambda b, d: b / math.log(2),
    "logit bias divided by sqrt(head_dim), like the scores": lambda b, d: b / math.sqrt(d),
    "logit bias multiplied by sqrt(head_dim)": lambda b, d: b * math.sqrt(d),
    "logit bias of the first head used for all": lambda b, d: b[:1].expand_as(b),
    "logit bias of heads in reverse order": lambda b, d: b.flip(0),
    "logit bias off by one key (the one before)": lambda b, d: b.roll(1, 2),
    "logit bias off by one key (the one behind)": lambda b, d: b.roll(-1, 2),
    "logit bias off by one query (the one before)": lambda b, d: b.roll(1, 1),
    "logit bias off by one query (the one behind)": lambda b, d: b.roll(-1, 1),
}


def mask_fault(bench: Bench, probe: Probe) -> str | None:
    """The fault of KEY_FAULTS or MASK_FAULTS that explains the observation, or another that only a probe shows."""
    axis, mask = probe.axis, probe.weights["key_mask"]
    keys = lines_of(axis, mask)
    if not probe.finite:
        some = mask_of(axis, keys | ~keys.any(1, keepdim=True), mask.shape)
        again = bench.observe(axis, probe.x, v=bench.identity(), out=bench.identity(), key_mask=some)
        return "a query whose keys are all masked gives NaN, not zero" if again.agrees() else None
    for detail, change in KEY_FAULTS.items():
        if probe.agrees(probe.would_add(key_mask=mask_of(axis, change(keys), mask.shape))):
            return detail
    for detail, change in MASK_FAULTS.items():
        if probe.agrees(probe.would_add(key_mask=change(mask))):
            return detail
    queries = probe.would_add(key_mask=torch.ones_like(mask)) * mask[..., None]
    return "key mask applied to the queries, not the keys" if probe.agrees(queries) else None


def bias_fault(probe: Probe) -> str | None:
    """The fault of BIAS_FAULTS that explains the observation."""
    bias, head_dim = probe.weights[name_of(probe.axis, "logit_bias")], probe.spec.head_dim
    return next((detail for detail, b in BIAS_FAULTS.items() if probe.agrees(probe.would_add(logit_bias=b(bias, head_dim).double()))), None)


def _term_probes(bench: Bench, axis: str) -> Iterator[tuple[Probe, Callable[[Probe], str | None]]]:
    """Probes of the mask and of the bias, as far as the block has them, each with what names its faults. All scores are zero, so each
    token must get the mean of the keys that are not masked, or the mean that the bias weighs. Of sequences, every kind is masked."""
    x, v, out = bench.tokens(), bench.identity(), bench.identity()
    if bench.spec.key_mask:
        batch, height, width, _ = bench.shape
        number, length = (batch * height, width) if axis == "row" else (batch * width, height)
        for first in range(0, 6, min(6, number)):
            mask = mask_of(axis, masked_lines(number, length, bench.generator, bench.device, first), torch.Size((batch, height, width)))
            yield bench.observe(axis, x, v=v, out=out, key_mask=mask), partial(mask_fault, bench)
    if bench.spec.logit_bias:
        length = bench.spec.problem(axis).length
        bias = bench.normal(bench.spec.heads, length, length)
        yield bench.observe(axis, x, v=v, out=out, logit_bias=bias), bias_fault


def known_term_fault(bench: Bench, axis: str) -> Diagnosis | None:
    """A known fault of mask or bias, before a later stage is blamed for what it does even where none is masked."""
    for probe, fault in _term_probes(bench, axis):
        if not probe.agrees() and (detail := fault(probe)) is not None:
            return probe.diagnosis("scores", detail)
    return None


def terms(bench: Bench, axis: str) -> Diagnosis | None:
    """What mask and bias do, when everything but scores and softmax is known to be right."""
    for probe, fault in _term_probes(bench, axis):
        if not probe.agrees():
            return probe.unexplained("scores") if (detail := fault(probe)) is None else probe.diagnosis("scores", detail)
    return None
