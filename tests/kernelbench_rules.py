"""Loads and checks a module the way KernelBench's harness does: text check, exec in a used namespace, seeds, no state_dict."""

from __future__ import annotations

from typing import Any

import torch

from codegen.kernelbench import violations
from codegen.reference import torch_dtype
from codegen.spec import BlockSpec

REFERENCE = """
import functools
from codegen.reference import Model as Block
Model = functools.partial(Block, **{fields!r})
"""


def execute(text: str, spec: BlockSpec, build_directory: str | None = None) -> dict[str, Any]:
    """The names that `text` defines, executed in a dict that already holds the reference's names."""
    names: dict[str, Any] = {}
    exec(REFERENCE.format(fields={"axes": spec.axes, **spec.variants}), names)
    if build_directory is not None:
        text = f"import os\nos.environ['TORCH_EXTENSIONS_DIR'] = {build_directory!r}\n" + text
    exec(compile(text, "<string>", "exec"), names)
    assert "__name__" not in names and "__file__" not in names  # so the module saw the builtins' __name__, and no file
    return names


def largest_excess(
    text: str, spec: BlockSpec, device: str, *, trials: int = 5, tolerance: float = 1e-4, build_directory: str | None = None
) -> float:
    """How far the module's outputs exceed KernelBench's tolerance, at most; zero or less is accepted.

    Grad mode stays on, eval() is not called, both models are made after seeding with 42 and moved to the device and the block's
    element type; KernelBench's tolerance is 1e-4 in float32, 1e-2 in 16-bit types.
    """
    assert not violations(text)
    names = execute(text, spec, build_directory)
    arguments = [spec.dim, spec.heads, spec.height, spec.width]
    dtype = torch_dtype(spec)
    models = []
    for kind in (names["Model"], names["ModelNew"]):
        torch.manual_seed(42)
        models.append(kind(*arguments).to(device=device, dtype=dtype))
    worst = float("-inf")
    for trial in range(trials):
        torch.manual_seed(trial)
        inputs = [t.to(device, dtype if t.is_floating_point() else t.dtype) for t in names["get_inputs"]()]
        assert inputs[0].shape == (spec.batch, spec.height, spec.width, spec.dim)
        expected, got = (model(*inputs).detach() for model in models)
        assert got.shape == expected.shape and got.dtype == expected.dtype
        worst = max(worst, float(((got - expected).abs() - tolerance - tolerance * expected.abs()).max()))
    return worst
