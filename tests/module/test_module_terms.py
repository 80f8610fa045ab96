"""Emitted modules of blocks with a key mask, a logit bias or both, as far as the CPU can show it: inputs, gradients, graphs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import emitted
import kernelbench_rules
from codegen.library import FORMS
from codegen.module import load_module, module_runner, read_module
from codegen.reference import random_weights, reference
from codegen.spec import BlockSpec
from codegen.terms import random_terms, term_shapes
from emitted import close, given, pair

MASK = dataclasses.replace(emitted.SPEC, key_mask=True)
BIAS = dataclasses.replace(emitted.SPEC, logit_bias=True)
BOTH = dataclasses.replace(emitted.SPEC, key_mask=True, logit_bias=True)
SPECS = (MASK, BIAS, BOTH)
COLUMNS = dataclasses.replace(BOTH, axes=("col",))


@pytest.fixture(params=SPECS, ids=lambda spec: "+".join(spec.variants))
def block(request: pytest.FixtureRequest) -> BlockSpec:
    return request.param


@pytest.fixture
def on_cuda_path(block: BlockSpec, tmp_path: Path) -> ModuleType:
    """The module of the block, which takes its launching op for CPU tensors too."""
    return emitted.on_cpu(emitted.write(tmp_path, block))


@pytest.mark.parametrize("spec", [*SPECS, COLUMNS, dataclasses.replace(BIAS, axes=("row",))], ids=lambda spec: spec.name)
def test_equals_the_float64_reference(spec: BlockSpec, tmp_path: Path) -> None:
    path = emitted.write(tmp_path, spec)
    assert read_module(path).spec == spec and read_module(path).source.kernels[0].arguments[7:] == tuple(spec.variants)
    weights = random_weights(spec) | random_terms(spec, torch.Generator().manual_seed(5))
    x = emitted.images(spec)
    close(module_runner(path, "cpu")(x, weights), reference(spec, x, weights).float(), 2e-6)


def test_the_kernels_are_used_and_get_what_forward_gets(block: BlockSpec, on_cuda_path: ModuleType) -> None:
    expected, model = pair(on_cuda_path, block)
    for batch in (2, 3, 1):
        close(model(*given(block, batch)), expected(*given(block, batch)))
    with torch.no_grad():
        close(model(*given(block)), expected(*given(block)))
    assert len(on_cuda_path.launched) == 4
    assert model(*given(block, 0)).shape == (0, 5, 7, 16)


def test_what_a_query_without_keys_gets(tmp_path: Path) -> None:
    """The output's bias and itself, in every form and with finite gradients."""
    module = emitted.on_cpu(emitted.write(tmp_path, dataclasses.replace(BOTH, axes=("row",))))
    spec = dataclasses.replace(BOTH, axes=("row",))
    expected, model = pair(module, spec)
    x, mask, bias = given(spec)
    mask[0, 1], mask[1, 2], bias[1, 3] = False, False, -math.inf
    dead = x.clone()
    for m in (expected, model):
        for training in (False, True):
            m.train(training)
            if m is model:
                m.dropout.p = 0.5 if training else 0.0
            leaves = [x.clone().requires_grad_(), bias.clone().requires_grad_()]
            y = m(leaves[0], mask, leaves[1])
            for image, row in ((0, 1), (1, 2)):
                close(y[image, row], dead[image, row] + m.row_out.bias, 1e-6)
            y.square().sum().backward()
            assert all(leaf.grad is not None and leaf.grad.isfinite().all() for leaf in leaves)
            assert all(p.grad.isfinite().all() for p in m.parameters())


def derivatives(model: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    inputs = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]
    model.zero_grad()
    (model(*inputs) * torch.linspace(-1, 1, 16)).square().sum().backward()
    assert all(t.grad is None for t in inputs if not t.is_floating_point())
    return [*(t.grad for t in inputs if t.is_floating_point()), *(p.grad for p in model.parameters())]


def test_gradients_of_input_biases_and_parameters(block: BlockSpec, on_cuda_path: ModuleType) -> None:
    expected, model = pair(on_cuda_path, block)
    found = [derivatives(m, given(block)) for m in (model, expected)]
    assert len(found[0]) == 11 + 2 * block.logit_bias and on_cuda_path.launched
    for got, want in zip(*found, strict=True):
        close(got, want, 1e-4)


def test_gradients_by_finite_differences(block: BlockSpec, tmp_path: Path) -> None:
    module = load_module(emitted.write(tmp_path, block))
    small = dataclasses.replace(block, height=2, width=3, batch=1)
    generator = torch.Generator().manual_seed(3)
    weights = [w.double() for w in random_weights(small, generator).values()]
    terms = [t.double() if t.is_floating_point() else t for t in random_terms(small, generator).values()]
    inputs = [torch.randn(1, 2, 3, 16, generator=generator).double(), *weights, *terms]
    for t in inputs:
        t.requires_grad_(t.is_floating_point())
    assert torch.autograd.gradcheck(module._op(), inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(module._op(), inputs, fast_mode=True)


@pytest.mark.parametrize("block", [BOTH], ids=["both"], indirect=True)
def test_the_op_meets_pytorchs_own_checks(block: BlockSpec, tmp_path: Path) -> None:
    module = load_module(emitted.write(tmp_path, block))
    _, model = pair(module, block)
    x, *terms = (t.requires_grad_(t.is_floating_point()) for t in given(block, 1))
    results = torch.library.opcheck(module._op(), (x, *(p.detach().clone().requires_grad_() for p in model.parameters()), *terms))
    assert set(results.values()) == {"SUCCESS"}
    assert [a.name for a in module._op()._schema.arguments][-len(terms) :] == list(term_shapes(block, 1))


@pytest.mark.parametrize("block", [BOTH], ids=["both"], indirect=True)
def test_compile_whole(block: BlockSpec, on_cuda_path: ModuleType) -> None:
    torch._dynamo.reset()
    expected, model = pair(on_cuda_path, block)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for batch in (2, 3):
        close(compiled(*given(block, batch)), expected(*given(block, batch)))
    for got, want in zip(derivatives(compiled, given(block)), derivatives(expected, given(block)), strict=True):
        close(got, want, 1e-4)


def test_export(block: BlockSpec, on_cuda_path: ModuleType) -> None:
    expected, model = pair(on_cuda_path, block)
    batch = torch.export.Dim("batch", min=2, max=64)
    shapes = tuple({0: batch} if t.dtype is torch.bool or t.dim() == 4 else {} for t in given(block))
    program = torch.export.export(model, tuple(given(block)), dynamic_shapes=shapes)
    for count in (2, 6):
        close(program.module()(*given(block, count)), expected(*given(block, count)))
    assert any("block" in str(node.target) for node in program.graph.nodes)


@pytest.mark.filterwarnings("ignore:torch.compile needs Triton")
@pytest.mark.parametrize("use", FORMS)
def test_pytorchs_forms(block: BlockSpec, use: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = emitted.on_cpu(emitted.write(tmp_path, block, use=use))
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    expected, model = pair(module, block)
    for batch in (2, 3):
        close(model(*given(block, batch)), expected(*given(block, batch)))
    assert not module.launched


@pytest.mark.filterwarnings("ignore:these kernels are built for torch.float32")
def test_other_sizes_and_types_are_computed_by_pytorch(block: BlockSpec, on_cuda_path: ModuleType) -> None:
    expected, model = pair(on_cuda_path, block)
    other = dataclasses.replace(block, height=6, width=9)
    with pytest.warns(UserWarning, match="5x7, not for 6x9"):
        close(model(*given(other)), expected(*given(other)))
    halves = [t.bfloat16() if t.is_floating_point() else t for t in given(block)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        close(model(*given(block)).float(), expected(*given(block)).float(), 4e-2)
    close(model.bfloat16()(*halves).float(), expected(*given(block)), 6e-2)
    assert not on_cuda_path.launched
    assert model.to("meta")(*(t.to("meta") for t in halves)).shape == (2, 5, 7, 16)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
    "every second": lambda t: t.repeat_interleave(2, dim=-1)[..., ::2],
    "offset by one": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
    "broadcast": lambda t: t[:1].expand_as(t),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_masks_and_biases_of_any_strides(block: BlockSpec, on_cuda_path: ModuleType, layout: str) -> None:
    _, model = pair(on_cuda_path, block)
    x, *terms = given(block)
    strided = [LAYOUTS[layout](t) for t in terms]
    close(model(x, *strided), model(x, *(t.clone(memory_format=torch.contiguous_format) for t in strided)), 1e-6)


def test_what_does_not_fit_is_named_in_one_line(tmp_path: Path) -> None:
    module = load_module(emitted.write(tmp_path, BOTH))
    _, model = pair(module, BOTH)
    x, mask, row, col = given(BOTH)
    for wrong, error, message in (
        ((x, mask[:1], row, col), ValueError, r"^key_mask must be of shape \(2, 5, 7\), not \(1, 5, 7\)$"),
        ((x, mask, col, row), ValueError, r"^row_bias must be of shape \(2, 7, 7\), not \(2, 5, 5\)$"),
        ((x, mask, row, col[:, :, 1:]), ValueError, r"^col_bias must be of shape \(2, 5, 5\), not \(2, 5, 4\)$"),
        ((x, mask.float(), row, col), TypeError, r"^key_mask must be torch.bool, not torch.float32$"),
        ((x, mask, row.double(), col), TypeError, r"^row_bias must be torch.float32, not torch.float64$"),
        ((x, mask, row, col.to("meta")), ValueError, r"^col_bias is on meta and the input on cpu: move one of them$"),
    ):
        with pytest.raises(error, match=message):
            model(*wrong)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'col_bias'"):
        model(x, mask, row)
    with pytest.raises(ValueError, match="built for key_mask True, not for False"):
        module.ModelNew(16, 2, 5, 7, key_mask=False)


def test_the_launching_code_takes_and_checks_them(tmp_path: Path) -> None:
    """In the order of the op's schema; each kernel gets those of its axis."""
    launch = load_module(emitted.write(tmp_path, BOTH)).LAUNCH_SOURCE
    assert "Tensor col_out_bias, Tensor key_mask, Tensor row_bias, Tensor col_bias) -> Tensor" in launch
    assert 'term(key_mask, "key_mask", torch::headeronly::ScalarType::Bool, "bool", batch, 5, 7, device)' in launch
    assert 'term(row_bias, "row_bias", torch::headeronly::ScalarType::Float, "float32", 2, 7, 7, device)' in launch
    for axis in ("row", "col"):
        (call,) = (line for line in launch.splitlines() if f'"axial_{axis} could not be launched"' in line)
        assert f"data({axis}_out_bias), data(key_mask), data({axis}_bias)}}, sequences)" in call
    plain = load_module(emitted.write(tmp_path, emitted.SPEC)).LAUNCH_SOURCE
    assert "term(" not in plain and "key_mask" not in plain


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernelbench_accepts_it(block: BlockSpec, dtype: str, tmp_path: Path) -> None:
    block = dataclasses.replace(block, dtype=dtype)
    text = emitted.write(tmp_path, block).read_text()
    assert kernelbench_rules.largest_excess(text, block, "cpu", tolerance=1e-4 if dtype == "float32" else 1e-2) <= 0.0
    inputs = kernelbench_rules.execute(text, block)["get_inputs"]()
    assert [tuple(t.shape) for t in inputs[1:]] == list(term_shapes(block, block.batch).values())


def test_vmap_is_refused_as_without_them(on_cuda_path: ModuleType, block: BlockSpec, cuda_path: ModuleType) -> None:
    """Neither silently wrong nor computed in a loop."""
    for module, spec in ((on_cuda_path, block), (cuda_path, emitted.SPEC)):
        _, model = pair(module, spec)
        x, *terms = given(spec)
        with pytest.raises(RuntimeError, match="vmap"):
            torch.vmap(lambda one, m=model, t=terms: m(one, *t))(torch.stack([x, x]))
