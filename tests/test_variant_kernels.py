"""Kernels of the block's variants, in both families and every arithmetic: right on the emulator, and planted faults are caught."""

from __future__ import annotations

import dataclasses
import random
import re
from pathlib import Path
from typing import Any

import pytest

from codegen.families import FAMILIES, plan_of
from codegen.render import Source, render
from codegen.spec import BlockSpec
from codegen.target import target
from emulated import error_of
from tuner.compile import compile_source
from tuner.emulator import EmulationError, Emulator
from tuner.space import allowed_maths, space
from tuner.verify import Checker
from variants import GENERATED, drawn

TARGET = target("sm_90")
TOLERANCE = 1e-5
# Ragged in every way: heads of 12 channels, 19 and 5 tokens; two axes, so that the second reads what the first wrote.
SHAPE = {"dim": 24, "heads": 2, "height": 5, "width": 19, "batch": 1}
MATHS = [(dtype, math) for dtype in ("float32", "bfloat16", "float16") for math in allowed_maths(1e-5, dtype)]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("variants")


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


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "math"), MATHS)
@pytest.mark.parametrize("variant", GENERATED)
def test_a_variant_agrees_with_float64(variant: str, dtype: str, math: str, family: str, cache: Path) -> None:
    source = source_of(BlockSpec(**{**SHAPE, **GENERATED[variant], "dtype": dtype}), family, math)
    assert right(source, cache, "reverse" if dtype == "float16" else "forward")
