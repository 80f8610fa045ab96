"""Gradients of emitted modules: the reference's, of every order, and never silently missing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from torch import distributed, nn
from torch.utils.checkpoint import checkpoint

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


def have_same_gradients(found: nn.Module, expected: nn.Module) -> None:
    """Parameters that have none have none in both."""
    for got, want in zip(found.parameters(), expected.parameters(), strict=True):
        assert (got.grad is None) == (want.grad is None)
        if got.grad is not None and want.grad is not None:
            close(got.grad, want.grad, 1e-3)


def same_gradients(found: nn.Module, expected: nn.Module) -> None:
    """Of a step of both."""
    for model in (found, expected):
        model.zero_grad()
        model(images()).square().sum().backward()
    have_same_gradients(found, expected)


def freeze(model: nn.Module) -> None:
    model.row_qkv.weight.requires_grad_(False)


def thaw(model: nn.Module) -> None:
    model.requires_grad_()


def replace(model: nn.Module) -> None:
    model.col_out.weight = nn.Parameter(model.col_out.weight.detach() * 0.5)


def step(model: nn.Module) -> None:
    torch.optim.SGD(model.parameters(), lr=1e-3).step()


def to_another_type_and_back(model: nn.Module) -> None:
    model.double().float()


def to_another_type_with_a_call(model: nn.Module) -> None:
    model.double()
    model(images().double()).sum().backward()
    model.float()


def with_nothing_to_train(model: nn.Module) -> None:
    model.requires_grad_(False)
    model(images())
    model.requires_grad_()


CHANGES = (freeze, thaw, replace, step, to_another_type_and_back, to_another_type_with_a_call, with_nothing_to_train)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_gradients_follow_what_becomes_of_parameters_between_calls(change: Callable[[nn.Module], None], cuda_path: ModuleType) -> None:
    """What stands for a module's parameters in graphs is kept from call to call while they are the same."""
    expected, model = pair(cuda_path)
    same_gradients(model, expected)
    for each in (change, step, thaw):
        for m in (model, expected):
            each(m)
        same_gradients(model, expected)


def test_one_module_twice_in_a_graph_and_two_graphs_at_once(cuda_path: ModuleType) -> None:
    expected, model = pair(cuda_path)
    for m in (expected, model):
        first, second = m(m(images())).sum(), m(images(seed=3)).square().sum()
        second.backward(retain_graph=True)
        first.backward()
        second.backward()
    have_same_gradients(model, expected)
    same_gradients(model, expected)


def test_hooks_of_parameters_see_each_gradient_once(cuda_path: ModuleType) -> None:
    _, model = pair(cuda_path)
    seen: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: seen.append(f"hook {name}"))
        parameter.register_post_accumulate_grad_hook(lambda parameter, name=name: seen.append(f"accumulated {name}"))
    for _ in range(2):
        seen.clear()
        model(images()).sum().backward()
        assert sorted(seen) == sorted(f"{kind} {name}" for name, _ in model.named_parameters() for kind in ("hook", "accumulated"))


def test_a_checkpoint_and_a_part_of_the_gradients(cuda_path: ModuleType) -> None:
    expected, model = pair(cuda_path)
    for m in (model, expected):
        checkpoint(m, images().requires_grad_(), use_reentrant=False).square().sum().backward()
    have_same_gradients(model, expected)
    parts = [torch.autograd.grad(m(images()).square().sum(), [m.col_norm.bias, m.row_out.weight]) for m in (model, expected)]
    for got, want in zip(*parts, strict=True):
        close(got, want, 1e-3)


@pytest.fixture
def group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.skipif(not distributed.is_available() or not distributed.is_gloo_available(), reason="PyTorch was built without gloo")
@pytest.mark.parametrize("before", [False, True], ids=["new", "after a call"])
@pytest.mark.parametrize("unused", [False, True])
def test_distributed_data_parallel_finds_every_parameter(before: bool, unused: bool, cuda_path: ModuleType, group: None) -> None:
    expected, model = pair(cuda_path)
    if before:
        model(images()).sum().backward()
    parallel = nn.parallel.DistributedDataParallel(model, find_unused_parameters=unused)
    for _ in range(2):
        same_gradients(parallel, expected)


def test_weights_that_are_computed_are_not_kept(cuda_path: ModuleType) -> None:
    _, model = pair(cuda_path)
    base = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    computed = {name: 2.0 * p for name, p in base.items()}
    alive = [weakref.ref(t) for t in computed.values()]
    torch.func.functional_call(model, computed, images()).sum().backward()
    assert all(p.grad is not None for p in base.values())
    del computed
    gc.collect()
    assert not any(ref() for ref in alive)


def test_parameters_that_are_swapped_in_a_load(cuda_path: ModuleType) -> None:
    expected, model = pair(cuda_path)
    same_gradients(model, expected)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for m in (model, expected):
            m.load_state_dict({name: 0.5 * value for name, value in m.state_dict().items()})
            m.zero_grad()
        same_gradients(model, expected)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_vmap_over_a_frozen_module(cuda_path: ModuleType) -> None:
    """As with gradients off: no graph, so nothing that vmap would refuse."""
    expected, model = pair(cuda_path)
    for m in (expected, model):
        m.requires_grad_(False)
    x = torch.stack([images(), images(seed=3)])
    close(torch.vmap(model)(x), torch.stack([expected(each) for each in x]), 1e-4)


def test_a_hook_may_change_its_gradient_in_place(cuda_path: ModuleType) -> None:
    for twice in (False, True):
        expected, model = pair(cuda_path)
        for m in (model, expected):
            m.row_out.weight.register_hook(lambda grad: grad.mul_(2.0))
            m(images()).square().sum().backward(create_graph=twice)
        have_same_gradients(model, expected)


def test_a_module_that_is_gone_leaves_nothing(cuda_path: ModuleType) -> None:
    gc.collect()
    before = len(cuda_path._gathered)
    _, model = pair(cuda_path)
    model(images()).sum().backward()
    assert len(cuda_path._gathered) == before + 1
    del model
    gc.collect()
    assert len(cuda_path._gathered) == before


def test_gradients_by_finite_differences(module: ModuleType) -> None:
    spec = BlockSpec(dim=16, heads=2, height=5, width=7)
    generator = torch.Generator().manual_seed(3)
    inputs = [random_input(spec, generator, batch=1)[:, :2, :2].double()]
    inputs += [w.double() for w in random_weights(spec, generator).values()]
    for t in inputs:
        t.requires_grad_()
    assert torch.autograd.gradcheck(module._op(), inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(module._op(), inputs, fast_mode=True)
