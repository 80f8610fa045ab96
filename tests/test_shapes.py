"""Shapes and configurations of the whole space: each is right on the emulator, or refused when generating, with the reason.

AXIALTUNE_EXAMPLES=500 draws more of them than the few that every run checks.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from codegen.reference import random_input, random_weights, reference
from codegen.render import render
from codegen.spec import BlockSpec, SpecError
from codegen.target import TARGETS, Target, target
from tuner.emulator import Emulator
from tuner.space import Space, preferred, spaces
from tuner.verify import Checker
from variants import variants

ROOT = Path(__file__).resolve().parent.parent
H200 = target("sm_90")
HEAD_DIMS = (8, 20, 33, 38, 40, 72, 80)
LENGTHS = (31, 33, 63, 65, 127, 197, 441, 1025)
LINES = 3


def of_length(length: int, axis: str, dim: int = 24, heads: int = 3) -> BlockSpec:
    """One axis of `length` tokens, and few sequences."""
    height, width = (LINES, length) if axis == "row" else (length, LINES)
    return BlockSpec(dim, heads, height, width, batch=1, axes=(axis,))


def legal(spec: BlockSpec, to: Target = H200) -> dict[str, Space] | None:
    """The spaces of a block's axes, or None after checking that it is refused in one line, and rightly."""
    try:
        return preferred(spaces(spec, to))
    except SpecError as error:
        assert "\n" not in str(error) and "bytes of shared memory exceed" in str(error) and to.arch in str(error)
        padded = [-(-spec.problem(axis).length // 16) * 16 for axis in spec.axes]
        columns = spec.dim + 3 * spec.heads * spec.head_dim  # normalised tokens, queries, keys and values, float32
        assert 4 * max(padded) * (columns + 16 + 3 * 16 * spec.heads) > to.shared_per_block, "it would fit"
        return None


def right(spec: BlockSpec, found: dict[str, Space], draw: random.Random | None = None, order: str = "forward") -> None:
    """The starting configurations, or random ones, agree with float64 on the emulator, which checks every access and every race."""
    configs = {axis: here.random(draw) if draw else here.start for axis, here in found.items()}
    emulator = Emulator(render(spec, configs))
    check = Checker(spec, 0, quick=True)(lambda x, weights: emulator.run(x, weights, order=order))
    assert check.ok, f"{spec.name} {configs}: {check.cause}"


@pytest.mark.parametrize("math", ["tf32x3", "fp16x3", "ffma"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_any_head_dim(head_dim: int, math: str) -> None:
    """Widths are no powers of two, and neither axis is a multiple of a tile."""
    spec = BlockSpec(dim=3 * head_dim, heads=3, height=5, width=31, batch=2)
    right(spec, preferred(spaces(spec, H200, fixed={"math": math})))


@pytest.mark.parametrize("axis", ["row", "col"])
@pytest.mark.parametrize("length", LENGTHS)
def test_any_length(length: int, axis: str) -> None:
    spec = of_length(length, axis)
    if (found := legal(spec)) is not None:
        right(spec, found)


@pytest.mark.parametrize("axis", ["row", "col"])
def test_a_long_axis_of_few_channels(axis: str) -> None:
    spec = of_length(1025, axis, dim=8, heads=1)
    found = legal(spec)
    assert found is not None
    right(spec, found)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])  # 163, 227 and 99 KB of shared memory
def test_every_head_dim_at_every_length_is_legal_or_refused_with_the_reason(arch: str) -> None:
    verdicts = {
        (head_dim, length): legal(of_length(length, "col", 2 * head_dim, 2), target(arch)) is not None
        for head_dim in HEAD_DIMS
        for length in LENGTHS
    }
    assert all(verdicts[head_dim, 31] for head_dim in HEAD_DIMS) and all(verdicts[8, length] for length in (31, 33, 63, 65, 127, 197))


def test_a_refusal_names_every_axis_and_limit_in_one_line_and_exits_with_2() -> None:
    shape = ["--dim", "4096", "--heads", "1", "--height", "600", "--width", "700"]
    for command in ("tune", "render"):
        done = subprocess.run(
            [sys.executable, "cli.py", command, *shape, "--arch", "sm_120"], capture_output=True, text=True, cwd=ROOT, timeout=120
        )
        assert done.returncode == 2 and not done.stdout
        (line,) = done.stderr.strip().splitlines()
        assert line.startswith("error: no configuration of the row axis is legal on sm_120 (") and "the col axis" in line
        assert "exceed" in line and "101376" in line


# Batches and axes at their limits


@pytest.mark.parametrize(("height", "width"), [(1, 7), (5, 1), (1, 1), (1, 64), (40, 1)])
def test_axes_of_one_token(height: int, width: int) -> None:
    spec = BlockSpec(dim=16, heads=2, height=height, width=width, batch=3)
    right(spec, preferred(spaces(spec, H200)))


def test_an_empty_batch_launches_nothing() -> None:
    spec = BlockSpec(dim=16, heads=2, height=4, width=5)
    source = render(spec, {axis: here.start for axis, here in preferred(spaces(spec, H200)).items()})
    assert [kernel.blocks(spec, 0) for kernel in source.kernels] == [0] * len(source.kernels)
    y = Emulator(source).run(random_input(spec, batch=0), random_weights(spec))
    assert y.shape == (0, 4, 5, 16)


MANY = BlockSpec(dim=8, heads=1, height=4, width=2, batch=16_384)
"""4 x batch rows, 2 x batch columns; the other axis of a kernel alone is more than a grid's y and z take."""


@pytest.mark.slow
@pytest.mark.parametrize("sequences", [65_536, 70_000])
def test_batch_times_the_other_axis_beyond_65535(sequences: int) -> None:
    found = preferred(spaces(MANY, H200, fixed={"warps": 1, "sequences": 8}))
    emulator = Emulator(render(MANY, {axis: here.start for axis, here in found.items()}))
    weights, x = random_weights(MANY), random_input(MANY, batch=sequences // 4)
    expected = reference(MANY, x, weights)
    error = (emulator.run(x, weights).double() - expected).abs().max() / expected.square().mean().sqrt()
    assert float(error) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(0, 4, 8), (3, 1, 7), (3, 5, 1), (3, 1, 1), (16_384, 4, 8), (17_500, 4, 8), (2, 3, 32_768), (2, 3, 35_000)]
)
def test_limits_on_a_gpu(shape: tuple[int, int, int]) -> None:
    """Batch, height, width. Where an axis itself is too long for its kernels, the other one is computed alone."""
    from tuner.compile import compile_source
    from tuner.launch import Loaded

    batch, height, width = shape
    major, minor = torch.cuda.get_device_capability(0)
    spec = BlockSpec(16, 2, height, width, batch=max(1, batch), axes=("col",) if width > 1000 else ("row", "col"))
    source = render(spec, {axis: here.start for axis, here in preferred(spaces(spec, target(f"sm_{major}{minor}"))).items()})
    weights, x = random_weights(spec), random_input(spec, batch=batch)
    loaded = Loaded(source, compile_source(source, target(f"sm_{major}{minor}")).cubin)
    y = loaded(x.cuda(), {name: tensor.cuda() for name, tensor in weights.items()}).cpu()
    assert y.shape == x.shape
    if batch:
        expected = reference(spec, x, weights)
        assert float((y.double() - expected).abs().max() / expected.square().mean().sqrt()) < 1e-5


# The whole space


@st.composite
def blocks(draw: st.DrawFn) -> BlockSpec:
    """Blocks that the emulator runs in a second or so: heads of any width, grids of any proportion, one axis or both, any variant."""
    heads = draw(st.integers(1, 6))
    head_dim = draw(st.integers(1, min(96, 240 // heads)))
    height = draw(st.integers(1, 80))
    width = draw(st.integers(1, max(1, min(80, 600 // height))))
    height, width = draw(st.permutations((height, width)))
    axes = draw(st.sampled_from([("row",), ("col",), ("row", "col")]))
    fields: dict[str, Any] = draw(st.one_of(st.just({}), variants()))
    if fields.get("norm") != "none":
        fields["eps"] = draw(st.sampled_from([1e-5, 1e-3, 1e-6]))
    return BlockSpec(heads * head_dim, heads, height, width, draw(st.integers(1, 3)), axes=axes, **fields)


@pytest.mark.slow
@settings(max_examples=int(os.environ.get("AXIALTUNE_EXAMPLES", "20")), deadline=None, derandomize=True)
@given(spec=blocks(), arch=st.sampled_from(sorted(TARGETS)), seed=st.integers(0, 2**32 - 1))
def test_any_legal_configuration_of_any_block_is_right(spec: BlockSpec, arch: str, seed: int) -> None:
    found = legal(spec, target(arch))
    if found is not None:
        right(spec, found, random.Random(seed), order=("forward", "reverse", f"random:{seed}")[seed % 3])
