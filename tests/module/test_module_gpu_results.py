"""Emitted modules on a GPU: results for any input, compared with the float64 reference."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

import kernelbench_rules
from codegen.module import load_module, module_runner
from codegen.reference import random_input, random_weights, reference
from codegen.spec import BlockSpec
from emitted import STRIDED, close, images, pair, truth, used_kernels

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("axes", [("row", "col"), ("row",), ("col",)])
@pytest.mark.parametrize("shape", [(64, 4, 32, 32), (24, 3, 17, 33)])
def test_equals_the_float64_reference(path_of, axes: tuple[str, ...], shape: tuple[int, int, int, int]) -> None:
    spec = BlockSpec(*shape, batch=3, axes=axes)
    weights = random_weights(spec)
    run = module_runner(path_of(spec), "cuda")
    for scale in (1.0, 100.0):
        x = random_input(spec, scale=scale)
        close(run(x, weights), reference(spec, x, weights).float())


def test_the_kernels_do_it(gpu_module: ModuleType, spec: BlockSpec) -> None:
    _, model = pair(gpu_module, spec, device="cuda")
    x = images(spec, device="cuda")
    model(x)
    assert used_kernels(lambda: model(x))
    with torch.no_grad():
        assert used_kernels(lambda: model(x))


def test_kernelbench_accepts_it(path_of, spec: BlockSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.9+PTX")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "unset")  # so that the harness' own setting is undone
    text = path_of(spec).read_text().replace("\nCUDA_SOURCE = r'''\n", f"\nCUDA_SOURCE = r'''\n// {tmp_path}\n")  # a library of its own
    assert kernelbench_rules.largest_excess(text, spec, "cuda", build_directory=str(tmp_path / "build")) <= 0.0
    assert list((tmp_path / "build" / "axialtune").glob("*.so"))


@pytest.mark.parametrize("name", STRIDED)
def test_any_strides(gpu_module: ModuleType, spec: BlockSpec, name: str) -> None:
    _, model = pair(gpu_module, spec, device="cuda")
    x = STRIDED[name](images(spec, device="cuda"))
    before = x.clone()
    with torch.no_grad():
        y = model(x)
    assert torch.equal(y, model(x.contiguous().clone())) and y.is_contiguous()
    close(y, truth(spec, model, x))
    assert torch.equal(x, before)


def test_misaligned_and_strided_weights(gpu_module: ModuleType, spec: BlockSpec) -> None:
    _, model = pair(gpu_module, spec, device="cuda")
    x = images(spec, device="cuda")
    before = model(x)
    for parameter in model.parameters():
        padded = torch.cat([parameter.new_zeros(1), parameter.detach().flatten()])
        parameter.data = padded[1:].view(parameter.shape)
    assert torch.equal(model(x), before)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.detach().t().contiguous().t()
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("batch", [0, 1, 5])
def test_any_batch(gpu_module: ModuleType, spec: BlockSpec, batch: int) -> None:
    _, model = pair(gpu_module, spec, device="cuda")
    x = images(spec, batch, device="cuda")
    y = model(x)
    assert y.shape == x.shape
    if batch:
        close(y, truth(spec, model, x))


@pytest.mark.parametrize(("height", "width"), [(1, 7), (5, 1), (1, 1)])
def test_axes_of_one_token(path_of, height: int, width: int) -> None:
    spec = BlockSpec(dim=16, heads=2, height=height, width=width, batch=2)
    weights, x = random_weights(spec), random_input(spec)
    close(module_runner(path_of(spec), "cuda")(x, weights), reference(spec, x, weights).float())


@pytest.mark.parametrize("sequences", [65_536, 70_000])
def test_many_sequences(path_of, sequences: int) -> None:
    """batch x other axis beyond the 65,535 that a grid's y and z take, forward and backward."""
    spec = BlockSpec(dim=16, heads=2, height=4, width=8, batch=2)
    module = load_module(path_of(spec))
    expected, model = pair(module, spec, device="cuda")
    x = images(spec, sequences // 4, device="cuda")
    close(model(x), truth(spec, model, x))
    for m in (expected, model):
        m(x).square().mean().backward()
    close(model.row_qkv.weight.grad, expected.row_qkv.weight.grad, 1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int32])
def test_another_dtype_is_named_not_reinterpreted(gpu_module: ModuleType, spec: BlockSpec, dtype: torch.dtype) -> None:
    _, model = pair(gpu_module, spec, device="cuda")
    with pytest.raises(TypeError, match=f"{dtype}.*torch.float32"):
        model(images(spec, device="cuda").to(dtype))
    with pytest.raises(RuntimeError, match="float32"):
        gpu_module._launcher()(images(spec, device="cuda").to(dtype), *model._weights())


def test_mixed_devices_and_shapes_are_refused_by_the_op_itself(gpu_module: ModuleType, spec: BlockSpec) -> None:
    _, model = pair(gpu_module, spec, device="cuda")
    weights, x = [w.detach() for w in model._weights()], images(spec, device="cuda")
    for wrong, message in ((weights[0].cpu(), "device"), (weights[0][1:], "wrong shape"), (weights[0].double(), "float32")):
        with pytest.raises(RuntimeError, match=message):
            gpu_module._launcher()(x, wrong, *weights[1:])
    with pytest.raises(RuntimeError, match="must be"):
        gpu_module._launcher()(x[:, 1:], *weights)
    close(model(x), truth(spec, model, x))  # and the device is well


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_converted_modules_and_autocast_are_computed_by_pytorch(gpu_module: ModuleType, spec: BlockSpec, dtype: torch.dtype) -> None:
    expected, model = pair(gpu_module, spec, device="cuda")
    x = images(spec, device="cuda")
    if dtype is torch.bfloat16:
        with torch.autocast("cuda", dtype=dtype):
            close(model(x).float(), expected(x).float(), 4e-2)
            model(x).float().sum().backward()
    expected, model, x = expected.to(dtype), model.to(dtype), x.to(dtype)
    close(model(x), expected(x), 1e-12 if dtype is torch.float64 else 4e-2)
    assert not used_kernels(lambda: model(x))


def test_values_that_are_hard(gpu_module: ModuleType, spec: BlockSpec) -> None:
    """NaN, infinities, constant rows, a mean of 1e4, large logits: finite exactly where the reference is, and as exact as PyTorch."""
    expected, model = pair(gpu_module, spec, device="cuda")
    for name in ("nan", "infinity", "constant", "mean", "large"):
        x = images(spec, device="cuda")
        if name == "nan":
            x[0, 3, 4, 5] = float("nan")
        elif name == "infinity":
            x[1, 2, 3, 4], x[0, 0, 0, 0] = float("inf"), float("-inf")
        elif name == "constant":
            x[:, ::2] = x[:, ::2, :, :1]
        elif name == "mean":
            x += 1e4
        else:
            with torch.no_grad():
                for m in (expected, model):
                    m.row_qkv.weight.mul_(20.0)
        with torch.no_grad():
            y, eager, exact = model(x), expected(x), reference(spec, x, expected.state_dict())
        finite = exact.isfinite()
        assert torch.equal(y.isfinite(), finite), name
        error, ordinary = (float((t.double() - exact)[finite].abs().max()) for t in (y, eager))
        assert error <= max(1e-5 * float(exact[finite].abs().max()), 4.0 * ordinary), name


def test_another_size_warns_once(gpu_module: ModuleType, spec: BlockSpec) -> None:
    expected, model = pair(gpu_module, spec, device="cuda")
    x = torch.randn(2, 6, 9, spec.dim, device="cuda")
    with pytest.warns(UserWarning, match="not for 6x9") as caught:
        for _ in range(3):
            close(model(x), expected(x))
    assert len([w for w in caught if "6x9" in str(w.message)]) == 1


def test_dropout_while_training(gpu_module: ModuleType, spec: BlockSpec) -> None:
    expected, model = pair(gpu_module, spec, dropout=0.3, device="cuda")
    x = images(spec, device="cuda")
    results = []
    for m in (expected, model):
        torch.manual_seed(11)
        results.append(m.train()(x))
    close(results[1], results[0])
    assert float((results[1] - expected.eval()(x)).abs().max()) > 1e-3
    close(model.eval()(x), truth(spec, model, x))
    assert used_kernels(lambda: model(x))
