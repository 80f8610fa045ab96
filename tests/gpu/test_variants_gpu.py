"""The block's variants on a real GPU: kernels of every family verified and measured, and modules as they are deployed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import emitted
from codegen.config import Config
from codegen.families import FAMILIES
from codegen.spec import BlockSpec
from tuner.gpu import visible_gpu
from tuner.gpu_backend import GpuBackend, Limits
from tuner.trial import OK, Candidate
from variants import EACH

pytestmark = pytest.mark.gpu

SHAPES = {"seed": (64, 4, 32, 32), "ragged": (24, 3, 17, 33)}


@pytest.fixture(scope="module")
def backend() -> Iterator[GpuBackend]:
    found = visible_gpu()
    assert found is not None
    with GpuBackend(found, limits=Limits(trial=20.0)) as one:
        yield one


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("variant", EACH)
def test_variants_are_verified_and_measured(backend: GpuBackend, variant: str, family: str, dtype: str) -> None:
    """Of each shape, in the family's first arithmetic."""
    candidates = []
    for shape in SHAPES.values():
        spec = BlockSpec(*shape, **{"dtype": dtype, **EACH[variant]})
        configs: dict[str, Config] = {}
        for axis in spec.axes:
            config = FAMILIES[family].default(spec.problem(axis), backend.target, FAMILIES[family].maths[dtype][0])
            if config is None and family == "resident" and not backend.target.warpgroup_products:
                pytest.skip(f"{backend.target.arch} has no wgmma")
            assert config is not None
            configs[axis] = config
        candidates.append(Candidate(spec, configs))
    for outcome in backend.evaluate(candidates):
        assert outcome.status == OK and outcome.timing is not None, f"{outcome.candidate.spec.name}: {outcome.cause}"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("variant", ["everything", "post-norm", "wide heads"])
def test_modules_as_deployed(backend: GpuBackend, variant: str, dtype: str, tmp_path: Path) -> None:
    """Built, verified with and without gradients, and measured, as `tune` does it last."""
    spec = BlockSpec(*SHAPES["ragged"], **{"dtype": dtype, **EACH[variant], "qkv_bias": True})
    built = backend.module(emitted.write(tmp_path, spec, backend.target.arch), spec)
    assert built.status == OK and built.timing is not None, built.cause
