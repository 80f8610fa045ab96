"""Gradients of emitted modules: the reference's, of every order, and never silently missing."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from codegen.reference import random_input, random_weights
from codegen.spec import BlockSpec
from emitted import close, gradients, images, pair


def test_gradients_equal_the_references(either: ModuleType) -> None:
    expected, model = pair(either)
    found = [gradients(m, images()) for m in (model, expected)]
    assert len(found[0]) == len(found[1]) == 11
    for got, want in zip(*found, strict=True):
        close(got, want, 1e-4)


def test_frozen_parameters_and_a_frozen_input(cuda_path: ModuleType) -> None:
    _, model = pair(cuda_path)
    model.requires_grad_(False)
    assert not model(images()).requires_grad
    model.col_out.bias.requires_grad_()
    y = model(images())
    y.sum().backward()
    close(model.col_out.bias.grad, torch.full((16,), 2.0 * 5 * 7))
    assert model.row_qkv.weight.grad is None and len(cuda_path.launched) == 2


def test_no_grad_and_inference_mode(either: ModuleType) -> None:
    expected, model = pair(either)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = model(images())
            assert not y.requires_grad
            close(y, expected(images()))


def test_double_backward(cuda_path: ModuleType) -> None:
    results = []
    for model in pair(cuda_path):
        x = images(batch=1).requires_grad_()
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), [x, *model.parameters()]))
    for want, got in zip(*results, strict=True):
        close(got, want, 1e-4)


def test_functional_and_forward_mode_derivatives(cuda_path: ModuleType) -> None:
    expected, model = pair(cuda_path)
    x, direction = images(), images(seed=7)
    for m in (expected, model):
        m.requires_grad_(False)
    close(torch.func.grad(lambda t: model(t).square().sum())(x), torch.func.grad(lambda t: expected(t).square().sum())(x), 1e-4)
    assert cuda_path.launched
    for got, want in zip(torch.func.jvp(model, (x,), (direction,)), torch.func.jvp(expected, (x,), (direction,)), strict=True):
        close(got, want, 1e-4)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, direction)
        tangents = [torch.autograd.forward_ad.unpack_dual(m(dual)).tangent for m in (model, expected)]
    close(tangents[0], tangents[1], 1e-4)


def test_a_weight_changed_before_backward_is_an_error_not_a_wrong_gradient(cuda_path: ModuleType) -> None:
    _, model = pair(cuda_path)
    y = model(images())
    with torch.no_grad():
        model.row_qkv.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_gradients_by_finite_differences(module: ModuleType) -> None:
    spec = BlockSpec(dim=16, heads=2, height=5, width=7)
    generator = torch.Generator().manual_seed(3)
    inputs = [random_input(spec, generator, batch=1)[:, :2, :2].double()]
    inputs += [w.double() for w in random_weights(spec, generator).values()]
    for t in inputs:
        t.requires_grad_()
    assert torch.autograd.gradcheck(module._op(), inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(module._op(), inputs, fast_mode=True)
