"""Emitted modules and their parameters: changed, replaced, wrapped, copied and saved."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from codegen.reference import Model, random_weights
from emitted import SPEC, close, images, pair


def test_the_second_forward_uses_the_new_weights(either: ModuleType) -> None:
    expected, model = pair(either)
    for m in (expected, model):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.05)
        m(images()).square().mean().backward()
        optimizer.step()
    close(model(images()), expected(images()))
    other = random_weights(SPEC, torch.Generator().manual_seed(9))
    for assign in (False, True):
        for m in (expected, model):
            m.load_state_dict({k: v * (2.0 if assign else 1.0) for k, v in other.items()}, assign=assign)
        close(model(images()), expected(images()))


def test_weights_that_are_plain_attributes(cuda_path: ModuleType) -> None:
    """As in the replicas that DataParallel makes."""
    expected, model = pair(cuda_path)
    for layer in (model.row_norm, model.col_qkv):
        weight = layer.weight.detach().clone()
        del layer.weight
        layer.weight = weight
    close(model(images()), expected(images()))
    assert len(cuda_path.launched) == 1


def test_functional_call_uses_the_weights_it_is_given(cuda_path: ModuleType) -> None:
    expected, model = pair(cuda_path)
    other = random_weights(SPEC, torch.Generator().manual_seed(5))
    close(torch.func.functional_call(model, other, (images(),)), torch.func.functional_call(expected, other, (images(),)))
    assert len(cuda_path.launched) == 1


class Adapter(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 0.1 * x.repeat(1, 1, 1, 3)[..., : self.base.out_features]


@pytest.mark.parametrize("change", ["adapter", "hook", "pre-hook", "parametrization"])
def test_layers_that_do_more_than_their_type_says_are_called(cuda_path: ModuleType, change: str) -> None:
    expected, model = pair(cuda_path)
    for m in (expected, model):
        if change == "adapter":
            m.row_qkv = Adapter(m.row_qkv)
        elif change == "hook":
            m.row_out.register_forward_hook(lambda layer, args, y: 2.0 * y)
        elif change == "pre-hook":
            m.col_norm.register_forward_pre_hook(lambda layer, args: (args[0] + args[0].square(),))
        else:
            nn.utils.parametrizations.weight_norm(m.col_qkv)
            with torch.no_grad():
                m.col_qkv.parametrizations.weight.original0.mul_(1.5)
    close(model(images()), expected(images()))
    assert not cuda_path.launched


def test_state_dict_both_ways(either: ModuleType) -> None:
    expected, model = Model(16, 2, 5, 7), either.ModelNew(16, 2, 5, 7)
    model.load_state_dict(expected.state_dict(), strict=True)
    expected.load_state_dict(model.state_dict(), strict=True)


def test_copies_pickles_and_saves_before_and_after_a_call(either: ModuleType, tmp_path: Path) -> None:
    expected, model = pair(either)
    for _ in range(2):
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        torch.save(model.state_dict(), tmp_path / "state.pt")
        fresh = either.ModelNew(16, 2, 5, 7)
        fresh.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False), fresh):
            close(again(images()), expected(images()))
        model(images()).sum().backward()
