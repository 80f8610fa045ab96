"""What is committed under generated/: written by the tool alone, true to itself, with the records it was chosen by."""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from codegen.kernelbench import violations
from codegen.module import INDEX, list_modules, load_module, read_module, update_index
from codegen.reference import random_input, random_weights, reference
from codegen.target import target
from tuner.compile import compile_source
from tuner.records import Records, records_path

GENERATED = Path(__file__).resolve().parent.parent / "generated"
MODULES = sorted(GENERATED.glob("axial_*.py"))


def test_the_index_is_what_the_folder_holds(tmp_path: Path) -> None:
    assert MODULES and len(list_modules(GENERATED)) == len(MODULES)
    for path in MODULES:
        shutil.copy(path, tmp_path)
    assert json.loads(update_index(tmp_path).read_text()) == json.loads((GENERATED / INDEX).read_text())


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_committed_module_is_sound(path: Path) -> None:
    """Its rules, its kernels' compilation for its architecture, its result on the CPU (of a large block on a small image, which PyTorch
    computes as any other), and the record of its measurement."""
    emitted = read_module(path)
    assert not violations(path.read_text())
    compiled = compile_source(emitted.source, target(emitted.arch))
    assert set(compiled.resources) == {kernel.name for kernel in emitted.source.kernels}
    spec = emitted.spec
    model = load_module(path).ModelNew(spec.dim, spec.heads, spec.height, spec.width)
    weights = {name: value.float() for name, value in random_weights(spec, torch.Generator().manual_seed(1)).items()}
    model.load_state_dict(weights)
    small = replace(spec, height=min(spec.height, 65), width=min(spec.width, 65))
    x = random_input(small, torch.Generator().manual_seed(2), batch=1).float()
    expected = reference(small, x, weights)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="these kernels are built for .*: PyTorch computes instead")
        y = model(x)
    assert float((y.double() - expected).abs().max()) < 1e-5 * float(expected.abs().max())
    if emitted.provenance.measured:
        records = Records(records_path(GENERATED, path.stem))
        assert any(record.outcome.source_digest == emitted.source.digest and record.outcome.ok for record in records.read())
