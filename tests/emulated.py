"""Running a source on the emulator and comparing it with the float64 reference, for the tests of every family."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from codegen.families import FAMILIES, plan_of
from codegen.reference import random_input, random_weights, reference
from codegen.render import Source, render
from codegen.spec import DTYPES, BlockSpec
from codegen.target import target
from codegen.terms import random_terms
from tuner.emulator import Emulator
from tuner.space import allowed_maths
from tuner.verify import Checker

TARGET = target("sm_90")


def arithmetics(family: str) -> list[tuple[str, str]]:
    """(element type, arithmetic) of a family, of those that hold the usual tolerance."""
    found = FAMILIES[family].maths
    return [(dtype, math) for dtype in DTYPES for math in allowed_maths(1e-5, dtype) if math in found[dtype]]


def error_of(source: Source, cache: Path, scale: float = 1.0, order: str = "forward", batch: int | None = None) -> float:
    """Largest difference to the float64 reference over the output's scale; infinity where something is not finite."""
    generator = torch.Generator().manual_seed(11)
    weights = random_weights(source.spec, generator)
    x = random_input(source.spec, generator, scale=scale, batch=batch)
    weights |= random_terms(source.spec, generator, x.shape[0])
    y = Emulator(source, cache, run_limit=60).run(x, weights, order=order)
    expected = reference(source.spec, x, weights)
    if not y.isfinite().all():
        return float("inf")
    return float((y.double() - expected).abs().max() / expected.abs().max())


def source_of(spec: BlockSpec, family: str, math: str | None = None, **changes: Any) -> Source:
    """The default configuration with `changes`, which has to be legal."""
    configs = {}
    for axis in spec.axes:
        start = FAMILIES[family].default(spec.problem(axis), TARGET, math or FAMILIES[family].maths[spec.dtype][0])
        assert start is not None, f"no default for {spec}"
        configs[axis] = dataclasses.replace(start, **changes)
        assert not (reasons := plan_of(spec.problem(axis), configs[axis]).reasons(TARGET)), reasons
    return render(spec, configs)


def right(source: Source, cache: Path, order: str = "forward") -> bool:
    """Whether a source holds what every candidate on a GPU is held to."""
    emulator = Emulator(source, cache, run_limit=60)
    return Checker(source.spec, seed=1, quick=True)(lambda x, weights: emulator.run(x, weights, order=order)).ok
