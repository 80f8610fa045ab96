"""Emitted modules as users call them, as far as the CPU can show it."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch

import emitted
from codegen.module import load_module, module_runner
from codegen.reference import random_input, random_weights, reference
from codegen.spec import BlockSpec
from emitted import SPEC, STRIDED, close, images, pair


@pytest.mark.parametrize("axes", [("row", "col"), ("row",), ("col",)])
def test_equals_the_float64_reference(tmp_path: Path, axes: tuple[str, ...]) -> None:
    spec = BlockSpec(dim=24, heads=3, height=4, width=9, batch=3, axes=axes, eps=1e-3)
    run = module_runner(emitted.write(tmp_path, spec), "cpu")
    weights, x = random_weights(spec), random_input(spec)
    close(run(x, weights), reference(spec, x, weights).float(), 2e-6)


@pytest.mark.parametrize("name", STRIDED)
def test_any_strides_give_the_result_of_a_contiguous_copy(either: ModuleType, name: str) -> None:
    _, model = pair(either)
    x = STRIDED[name](images())
    before = x.clone()
    with torch.no_grad():
        close(model(x), model(x.contiguous()), 1e-6)
    assert torch.equal(x, before)


@pytest.mark.parametrize("batch", [0, 1, 5])
def test_any_batch(either: ModuleType, batch: int) -> None:
    expected, model = pair(either)
    x = images(batch=batch)
    y = model(x)
    assert y.shape == x.shape
    if batch:
        close(y, expected(x))


@pytest.mark.parametrize(("height", "width"), [(1, 7), (5, 1), (1, 1)])
def test_axes_of_one_token(tmp_path: Path, height: int, width: int) -> None:
    spec = BlockSpec(dim=16, heads=2, height=height, width=width, batch=2)
    run = module_runner(emitted.write(tmp_path, spec), "cpu")
    weights, x = random_weights(spec), random_input(spec)
    close(run(x, weights), reference(spec, x, weights).float(), 2e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int32])
def test_another_dtype_is_named_not_reinterpreted(either: ModuleType, dtype: torch.dtype) -> None:
    _, model = pair(either)
    with pytest.raises(TypeError, match=f"{dtype}.*torch.float32"):
        model(torch.ones(1, 5, 7, 16, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_converted_module_is_computed_by_pytorch(either: ModuleType, dtype: torch.dtype) -> None:
    expected, model = (m.to(dtype) for m in pair(either))
    x = images().to(dtype)
    close(model(x), expected(x), 1e-12 if dtype is torch.float64 else 4e-2)
    assert not getattr(either, "launched", [])


def test_autocast_is_computed_as_the_reference_would(either: ModuleType) -> None:
    expected, model = pair(either)
    x = images()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        close(model(x).float(), expected(x).float(), 4e-2)
        model(x.bfloat16())  # LayerNorm and the products convert it, in the reference too
    assert not getattr(either, "launched", [])


def test_shapes_can_be_inferred_on_the_meta_device(module: ModuleType) -> None:
    assert module.ModelNew(16, 2, 5, 7).to("meta")(images().to("meta")).shape == images().shape


def test_wrong_sizes_name_what_is_expected(either: ModuleType) -> None:
    _, model = pair(either)
    for shape in ((5, 7, 16), (1, 5, 7, 8), (1, 1, 5, 7, 16)):
        with pytest.raises(ValueError, match=r"\(batch, height, width, 16\)"):
            model(torch.ones(shape))
    with pytest.raises(ValueError, match="dim 16 and 2 heads, not for dim 32 and 4 heads"):
        either.ModelNew(32, 4, 5, 7)


def test_another_size_is_computed_by_pytorch_with_one_warning(cuda_path: ModuleType) -> None:
    expected, model = pair(cuda_path)
    x = torch.randn(2, 6, 9, 16)
    with pytest.warns(UserWarning, match="5x7, not for 6x9") as caught:
        for _ in range(3):
            close(model(x), expected(x))
    assert len(caught) == 1 and not cuda_path.launched


def test_another_size_at_construction_warns_once(module: ModuleType) -> None:
    with pytest.warns(UserWarning, match="5x7, not for 6x9") as caught:
        model = module.ModelNew(16, 2, 6, 9)
        model(torch.randn(1, 6, 9, 16))
    assert len(caught) == 1


def test_the_kernels_are_used_where_they_fit(cuda_path: ModuleType) -> None:
    expected, model = pair(cuda_path)
    x = images()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            close(model(x), expected(x))
        close(model(x), expected(x))
    assert cuda_path.launched == [(2, 5, 7, 16)] * 2


def test_another_gpu_is_named_once_and_computed_by_pytorch(cpu_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = emitted.on_cpu(cpu_path)
    module.launched.clear()
    fits = load_module(cpu_path)._fits_gpu
    monkeypatch.setitem(fits.__globals__, "_gpu_fits", {})
    fits.__globals__["_warned"].clear()
    monkeypatch.setattr(module, "_fits_gpu", fits)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 6))
    expected, model = pair(module)
    with pytest.warns(UserWarning, match="8.6.*9.0") as caught:
        for _ in range(2):
            close(model(images()), expected(images()))
    assert len(caught) == 1 and not module.launched


def test_dropout_while_training_is_the_references(either: ModuleType) -> None:
    expected, model = pair(either, dropout=0.3)
    for m in (expected, model):
        m.train()
    results = []
    for m in (expected, model):
        torch.manual_seed(11)
        results.append(m(images()))
    close(results[1], results[0])
    assert float((results[1] - expected.eval()(images())).detach().abs().max()) > 1e-3
    assert not getattr(either, "launched", [])
    close(model.eval()(images()), expected(images()))


def test_two_modules_and_one_under_two_names(tmp_path: Path) -> None:
    """Both have a class ModelNew, and kernels of the same names."""
    spec = BlockSpec(dim=16, heads=4, height=5, width=7, batch=2)
    first, second = emitted.write(tmp_path / "a"), emitted.write(tmp_path / "b", spec)
    (tmp_path / "c").mkdir()
    alias = tmp_path / "c" / "another_name.py"
    alias.write_bytes(first.read_bytes())
    loaded = [load_module(p) for p in (first, second, alias)]
    assert loaded[0]._NAMESPACE == loaded[2]._NAMESPACE != loaded[1]._NAMESPACE
    assert loaded[0].ModelNew is not loaded[2].ModelNew
    weights, x = random_weights(SPEC), images()
    for module, block in zip(loaded, (SPEC, spec, SPEC), strict=True):
        model = module.ModelNew(16, block.heads, 5, 7)
        model.load_state_dict(weights)
        close(module._op()(x, *model._weights()), reference(block, x, weights).float())
