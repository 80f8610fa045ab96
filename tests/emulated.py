"""Running a source on the emulator and comparing it with the float64 reference, for the tests of every family."""

from __future__ import annotations

from pathlib import Path

import torch

from codegen.reference import random_input, random_weights, reference
from codegen.render import Source
from codegen.terms import random_terms
from tuner.emulator import Emulator


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
