"""Verification of the block's variants: right ones are accepted, and what is forgotten or computed as in another block is named."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from codegen.families import FAMILIES
from codegen.reference import Model, result, to_grid, to_sequences
from codegen.render import render
from codegen.spec import BlockSpec
from codegen.target import target
from codegen.terms import split_terms, with_keys
from tuner.emulator import Emulator
from tuner.hypotheses import Axis, explained, faults
from tuner.stages import probed
from tuner.verify import Checker, diagnose
from variants import EACH

SHAPE = {"dim": 16, "heads": 2, "height": 5, "width": 11, "batch": 2}
SPECS = {name: BlockSpec(**{**SHAPE, **fields}) for name, fields in EACH.items()}


def with_fault(spec: BlockSpec, axes: tuple[str, ...], computes: Axis):
    """A block in float32 with one axis, or several, that computes something else."""

    def run(x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        for axis in spec.axes:
            sequences = to_sequences(axis, x)
            x = to_grid(axis, (computes if axis in axes else result)(spec, axis, sequences, with_keys(axis, weights)), x.shape)
        return x

    return run


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", SPECS)
def test_a_right_block_is_accepted(variant: str, dtype: str) -> None:
    spec = dataclasses.replace(SPECS[variant], dtype=dtype)
    model = Model.from_spec(spec).to(getattr(torch, dtype))

    def run(x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        parameters, terms = split_terms(spec, weights)
        model.load_state_dict(parameters)
        with torch.no_grad():
            return model(x, *terms)

    assert Checker(spec, 0)(run).ok
    for seed in range(3):
        assert explained(spec, run, seed) is None
    assert diagnose(spec, run).ok


@pytest.mark.parametrize("variant", ["qkv bias", "RMSNorm", "wide heads", "post-norm", "no residual", "everything"])
def test_faults_of_the_catalogue_are_rejected_and_named(variant: str) -> None:
    """Some of them, each in one axis or in both, which take turns."""
    spec = dataclasses.replace(SPECS[variant], batch=1)
    checker = Checker(spec, 0)
    catalogue = [fault for fault in faults(spec) if "key tiles" not in fault[1]]  # longer than these sequences
    for index, (stage, detail, computes) in list(enumerate(catalogue))[len(variant) % 3 :: 8]:
        axes = (("row",), ("col",), ("row", "col"))[index % 3]
        run = with_fault(spec, axes, computes)
        found = explained(spec, run, seed=1)
        assert found is not None and not checker(run).ok, (stage, detail)
        assert (found.stage, found.detail, found.axis) == (stage, detail, axes[0]), str(found)


FORGOTTEN: dict[str, tuple[str, dict[str, Any], str, str, str]] = {  # family, fields, pattern, replacement, diagnosis
    "qkv bias": ("sequence", {"qkv_bias": True}, r"acc\S* \+= (biases\[[^;]*|pair\[c % 2\]);", ";", "QKV product: qkv bias missing"),
    "qkv bias, staged": ("staged", {"qkv_bias": True}, r" \+ bias\[c % 2\]", "", "QKV product: qkv bias missing"),
    "qkv bias, resident": (
        "resident", {"qkv_bias": True}, r"own\[j\]\[c\] \+= bias\[c % 2\];", ";", "QKV product: qkv bias missing",
    ),
    "post-norm": ("sequence", {"post_norm": True}, r"\n +normalise_token<.*;", "", "post-norm: missing, not LayerNorm"),
    "post-norm, staged": (
        "staged", {"post_norm": True, "norm": "rms"}, r"\n +if \(token < tokens\).*;", "", "post-norm: missing, not RMSNorm",
    ),
    "scale": ("sequence", {"head_dim": 16}, r"(EXPONENT_SCALE = [\d.e+-]+f)", r"\1 * 1.41421356f", "scores: scaled by 1/sqrt(dim / heads)"),
    "residual": ("staged", {"post_norm": True}, r"load_channels<C::DIM>\(to\[half\]\[run\], x .*(?=;)", "", "residual: x is not added"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FORGOTTEN)
def test_what_a_kernel_forgets_is_named(fault: str, tmp_path: Path) -> None:
    family, fields, pattern, replacement, expected = FORGOTTEN[fault]
    spec = BlockSpec(**{**SHAPE, "batch": 1, "axes": ("row",), **fields})
    config = FAMILIES[family].default(spec.problem("row"), target("sm_90"), FAMILIES[family].maths["float32"][0])
    assert config is not None
    source = render(spec, {"row": config})
    text, count = re.subn(pattern, replacement, source.text)
    assert count and text != source.text
    emulator = Emulator(dataclasses.replace(source, text=text), tmp_path, run_limit=60)
    found = str(diagnose(spec, emulator.run, quick=True))
    assert found.startswith(f"row attention: {expected}"), found


@pytest.mark.parametrize(
    ("fields", "computed", "expected"),
    [
        ({"residual": False}, {"residual": True}, "residual: x is added although the block has no residual"),
        ({"norm": "rms", "norm_affine": False}, {"norm": "layer"}, "norm: computed as LayerNorm, not RMSNorm"),
        ({"norm": "layer", "norm_affine": False}, {"norm": "rms"}, "norm: computed as RMSNorm, not LayerNorm"),
        ({"post_norm": True}, {"post_norm": False}, "post-norm: applied before the branch, not behind it"),
    ],
)
def test_the_kernels_of_another_block_are_named(fields: dict[str, Any], computed: dict[str, Any], expected: str, tmp_path: Path) -> None:
    spec = BlockSpec(**{**SHAPE, "batch": 1, "axes": ("col",), **fields})
    other = dataclasses.replace(spec, **computed)
    config = FAMILIES["sequence"].default(other.problem("col"), target("sm_90"), "tf32x3")
    assert config is not None
    emulator = Emulator(render(other, {"col": config}), tmp_path, run_limit=60)
    assert not Checker(spec, 0, quick=True)(emulator.run).ok
    assert str(diagnose(spec, emulator.run, quick=True)) == f"col attention: {expected}"


def test_the_probes_still_locate_what_no_hypothesis_has(tmp_path: Path) -> None:
    """A fault beside the catalogue, in a block that the probes know."""
    spec = BlockSpec(**SHAPE, qkv_bias=True, out_bias=False)
    assert probed(spec) and not any(probed(SPECS[name]) for name in ("RMSNorm", "no residual", "post-norm", "wide heads", "no norm"))

    def computes(spec: BlockSpec, axis: str, x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        weight = weights[f"{axis}_out.weight"].clone()
        weight[-1] = 0.0
        return result(spec, axis, x, {**weights, f"{axis}_out.weight": weight})

    found = diagnose(spec, with_fault(spec, ("col",), computes))
    assert str(found) == "col attention: output product: output channels 15 are left out"
