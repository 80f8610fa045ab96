"""Modules of the block's variants: constructor, parameters, the op, results and gradients are the variant reference's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import emitted
import kernelbench_rules
from codegen.module import load_module, read_module
from codegen.reference import Model, parameter_shapes
from codegen.spec import BlockSpec
from codegen.terms import term_shapes
from variants import EACH

SHAPE = {"dim": 16, "heads": 2, "height": 5, "width": 7, "batch": 2}


@pytest.fixture(scope="module", params=EACH)
def spec(request: pytest.FixtureRequest) -> BlockSpec:
    return BlockSpec(**{**SHAPE, **EACH[request.param]})


@pytest.fixture(scope="module")
def path(spec: BlockSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return emitted.write(tmp_path_factory.mktemp("variants"), spec)


def test_it_is_read_back_and_accepted_by_kernelbench(spec: BlockSpec, path: Path) -> None:
    assert read_module(path).spec == spec and path.stem == f"axial_{spec.name}_sm90_predicted"
    assert kernelbench_rules.largest_excess(path.read_text(), spec, "cpu", trials=2) <= 0.0


def test_parameters_are_drawn_as_the_reference_draws_them(spec: BlockSpec, path: Path) -> None:
    arguments = (spec.dim, spec.heads, spec.height, spec.width)
    torch.manual_seed(42)
    expected = Model(*arguments, **spec.variants).state_dict()
    torch.manual_seed(42)
    model = load_module(path).ModelNew(*arguments, 0.0, **spec.variants)
    assert list(model.state_dict()) == list(expected) == list(parameter_shapes(spec))
    assert all(torch.equal(model.state_dict()[name], expected[name]) for name in expected)


def test_the_constructor_refuses_another_variant(spec: BlockSpec, path: Path) -> None:
    module = load_module(path)
    for name, value in spec.variants.items():
        other: Any = {bool: lambda v: not v, str: lambda v: "layer", int: lambda v: v + 1, float: lambda v: 2 * v}[type(value)](value)
        with pytest.raises(ValueError, match=f"built for {name} .*, not for "):
            module.ModelNew(16, 2, 5, 7, **{name: other})


def test_results_and_gradients_are_the_references(spec: BlockSpec, path: Path) -> None:
    """On the CPU, on the way to the kernels (whose op takes the parameters that there are, and no others), and in the op itself."""
    x, *terms = emitted.given(spec)
    for module in (load_module(path), emitted.on_cpu(path)):
        expected, got = emitted.pair(module, spec)
        emitted.close(got(x, *terms), emitted.truth(spec, expected, x, *terms))
        for ours, theirs in zip(emitted.gradients(got, x, *terms), emitted.gradients(expected, x, *terms), strict=True):
            emitted.close(ours, theirs, 5e-5)
    assert module.launched
    weights = [*got._weights(), *terms]
    names = [argument.name for argument in module._op()._schema.arguments]
    assert (
        names == ["x", *(name.replace(".", "_") for name in parameter_shapes(spec)), *term_shapes(spec, 2)]
        and len(weights) == len(names) - 1
    )
    emitted.close(module._op()(x, *weights), emitted.truth(spec, expected, x, *terms))
    if len(spec.variants) > 5:  # PyTorch's own checks take seconds
        torch.library.opcheck(module._op(), (x.requires_grad_(), *weights))


def test_dropout_while_training_is_the_references(spec: BlockSpec, path: Path) -> None:
    expected, got = (model.train() for model in emitted.pair(load_module(path), spec, dropout=0.5))
    x, *terms = emitted.given(spec)
    torch.manual_seed(3)
    wanted = expected(x, *terms)
    torch.manual_seed(3)
    emitted.close(got(x, *terms), wanted)


def test_the_launching_op_has_only_the_parameters_that_there_are(spec: BlockSpec, path: Path) -> None:
    text = path.read_text()
    for name in ("norm_weight", "norm_bias", "qkv_bias", "out_bias"):
        assert (f"Tensor row_{name}" in text) == (name in spec.parameters)
        assert (f"Element* __restrict__ {name}" in text) == (name in spec.parameters)


def test_the_usual_module_says_nothing_of_variants(tmp_path: Path) -> None:
    text = emitted.write(tmp_path).read_text()
    assert "def __init__(self, dim, num_heads, height, width, dropout=0.0):" in text
    for word in ("qkv_bias", 'HEAD_DIM = SPEC["head_dim"]', "RMSNorm", "normalise_token", "post_norm", "norm="):
        assert word not in text, word
