"""Emitted modules under torch.compile and torch.export, and the op they register."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from emitted import close, gradients, images, pair


def test_the_op_meets_pytorchs_own_checks(module: ModuleType) -> None:
    _, model = pair(module)
    inputs = (images(batch=1).requires_grad_(), *(p.detach().clone().requires_grad_() for p in model.parameters()))
    results = torch.library.opcheck(module._op(), inputs)
    assert set(results.values()) == {"SUCCESS"}


def test_compile_whole(either: ModuleType) -> None:
    torch._dynamo.reset()
    expected, model = pair(either)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for batch in (2, 3):
        close(compiled(images(batch=batch)), expected(images(batch=batch)))
    for got, want in zip(gradients(compiled, images()), gradients(expected, images()), strict=True):
        close(got, want, 1e-4)
    with torch.no_grad():
        model.row_out.bias.add_(1.0)
        expected.row_out.bias.add_(1.0)
        close(compiled(images()), expected(images()))


@pytest.mark.slow
def test_compile_whole_with_inductor(cuda_path: ModuleType) -> None:
    torch._dynamo.reset()
    expected, model = pair(cuda_path)
    close(torch.compile(model, fullgraph=True)(images()), expected(images()))


@pytest.mark.parametrize("strict", [False, True])
def test_export(either: ModuleType, strict: bool) -> None:
    expected, model = pair(either)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(model, (images(),), dynamic_shapes=({0: batch},), strict=strict)
    for count in (2, 6):
        close(program.module()(images(batch=count)), expected(images(batch=count)))
    if hasattr(either, "launched"):
        assert any("block" in str(node.target) for node in program.graph.nodes)
