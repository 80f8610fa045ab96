"""Faults planted in the rendered CUDA source itself, run by the emulator: verification must name their stage."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace

import pytest

from codegen.render import Source, render
from codegen.sequence import SequencePlan, default
from codegen.spec import DTYPES, BlockSpec
from codegen.target import target
from tuner.emulator import Emulator
from tuner.verify import Checker, diagnose

SM90 = target("sm_90")
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs g++")

# Planted fault -> what the source says (a regular expression), what it then says instead, the stage, what must be said of it.
MUTANTS = {
    "missing output bias": (
        r"load_pair\(biases\[j\], bias \+ column, column\);",
        r"biases[j][0] = biases[j][1] = 0.0f;",
        "output bias",
        "missing",
    ),
    "missing qkv scale": (r"EXPONENT_SCALE = [^;]*;", r"EXPONENT_SCALE = 1.442695041e+00f;", "scores", "not scaled by 1/sqrt(head_dim)"),
    "transposed output weight": (
        r"(from = weight \+ column \* C::DIM \+ ([^;]*);.*?)load_here\(to, from\);",
        r"\1for (int i = 0; i < 2; ++i) reinterpret_cast<Element*>(to)[i] = weight[(\2 + i) * C::DIM + column];",
        "output product",
        "transposed weight",
    ),
    "transposed qkv weight": (
        r"(from = weight \+ row \* C::DIM \+ k;.*?)load_here\(to, from\);",
        r"\1for (int i = 0; i < N * PER_WORD; ++i) "
        r"reinterpret_cast<Element*>(to)[i] = weight[(row / C::DIM * C::DIM + k + i) * C::DIM + row % C::DIM];",
        "QKV product",
        "transposed weight (each of q, k and v)",
    ),
    "eps": (r"EPSILON = [^;]*;", r"EPSILON = 1e-6f;", "LayerNorm", "eps is 1e-06, not 1e-05"),
    "swapped k and v": (r"else if \(which == 1\)", r"else if (which == 2)", "QKV product", "k and v swapped"),
    "no residual": (r" \+ kept\[[01]\]", r"", "residual", "x is not added"),
    "unnormalised softmax": (r"__fdividef\(1\.0f, group_sum<4>\(sum\[\d\]\)\)", r"1.0f", "softmax", "not normalised"),
    "head order": (
        r"(?<=from = weight \+ column \* C::DIM \+ )([^;]*);",
        r"(C::HEADS - 1 - (\1) / C::HEAD_DIM) * C::HEAD_DIM + (\1) % C::HEAD_DIM;",
        "weighted sum",
        "heads in another order",
    ),
    "plain TF32": (r"TensorCore<3>", r"TensorCore<1>", "output product", "inexact"),
    "result not rescaled": (r"out\[0\]\[j\]\[2 \* half( \+ 1)?\] \*= correction", r"0", "softmax", "the result of earlier key tiles"),
    "sum not rescaled": (r"sum\[half\] \*= correction;", r"", "softmax", "the sum of earlier key tiles"),
}


def source_for(spec: BlockSpec) -> Source:
    """With several tiles of keys, and q, k and v in shared memory, where the faults are planted."""
    configs = {}
    for axis in spec.axes:
        config = default(spec.problem(axis), SM90, "tf32x3" if spec.dtype == "float32" else None)
        assert config is not None
        configs[axis] = replace(config, heads="shared", key_tile=16, norm_lanes=16)
        assert not SequencePlan(spec.problem(axis), configs[axis]).reasons(SM90)
    return render(spec, configs)


@pytest.mark.parametrize("axis", ["row", "col"])
@pytest.mark.parametrize(
    ("fault", "dtype"), [(fault, dtype) for fault in MUTANTS for dtype in DTYPES if fault != "plain TF32" or dtype == "float32"]
)
def test_the_stage_of_a_fault_in_the_source_is_named(fault: str, dtype: str, axis: str) -> None:
    pattern, replacement, stage, detail = MUTANTS[fault]
    spec = BlockSpec(16, 2, *((3, 39) if axis == "row" else (39, 3)), 1, dtype, (axis,))
    source = source_for(spec)
    text, count = re.subn(pattern, replacement, source.text, flags=re.DOTALL)
    assert count, f"the source no longer has what this fault replaces: {pattern}"
    runner = Emulator(replace(source, text=text)).run
    assert not Checker(spec, seed=1, quick=True)(runner).ok
    diagnosis = diagnose(spec, runner)
    assert (diagnosis.axis, diagnosis.stage) == (axis, stage), str(diagnosis)
    assert detail in diagnosis.detail


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(16, 2, 3, 39, 1), (24, 3, 17, 5, 2), (33, 3, 5, 18, 1)])
def test_the_source_as_rendered_is_right_at_every_stage(shape: tuple[int, ...], dtype: str) -> None:
    spec = BlockSpec(*shape, dtype)
    diagnosis = diagnose(spec, Emulator(source_for(spec)).run)
    assert diagnosis.ok, str(diagnosis)
