"""Emitted modules on a GPU: streams, graphs, gradients, changing weights, torch.compile and torch.export."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from codegen.reference import random_weights
from codegen.spec import BlockSpec
from emitted import close, gradients, images, pair, truth, used_kernels

pytestmark = pytest.mark.gpu


def test_the_current_stream_is_used(gpu_module: ModuleType, spec: BlockSpec) -> None:
    """The input is written late, on a side stream; only a kernel on that stream sees it."""
    _, model = pair(gpu_module, spec, device="cuda")
    x, final = torch.zeros_like(images(spec, device="cuda")), images(spec, device="cuda")
    model(x)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), torch.no_grad():
        torch.cuda._sleep(200_000_000)
        x.copy_(final)
        y = model(x)
    side.synchronize()
    close(y, truth(spec, model, final))


def test_another_device_than_the_current_one(gpu_module: ModuleType, spec: BlockSpec) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    _, model = pair(gpu_module, spec, device="cuda:1")
    x = images(spec, device="cuda").to("cuda:1")
    with torch.cuda.device(0):
        close(model(x), truth(spec, model, x))
        assert torch.cuda.current_device() == 0


def test_graph_capture_after_a_warm_call(gpu_module: ModuleType, spec: BlockSpec) -> None:
    _, model = pair(gpu_module, spec, device="cuda")
    x = images(spec, device="cuda")
    with torch.no_grad():
        model(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
        x.copy_(images(spec, scale=2.0, device="cuda"))
        y.fill_(float("nan"))
        for _ in range(3):
            graph.replay()
        close(y, truth(spec, model, x))
        model.row_out.bias.add_(1.0)  # the graph reads the parameters in place
        graph.replay()
        close(y, truth(spec, model, x))


def test_a_training_step_is_captured_after_steps_on_other_streams(gpu_module: ModuleType, spec: BlockSpec) -> None:
    """What is kept from an earlier call must not send a part of the captured backward to that call's stream."""
    expected, model = pair(gpu_module, spec, device="cuda")
    x = images(spec, device="cuda")

    def step(m: torch.nn.Module) -> None:
        m.zero_grad(set_to_none=True)
        m(x).square().sum().backward()

    step(model)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(model)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(model)
    graph.replay()
    torch.cuda.synchronize()
    step(expected)
    for got, want in zip(model.parameters(), expected.parameters(), strict=True):
        close(got.grad, want.grad, 1e-3)


def test_results_do_not_depend_on_what_ran_before(gpu_module: ModuleType, spec: BlockSpec) -> None:
    """Back-to-back calls overlap their launches: each still reads what the one before wrote."""
    _, model = pair(gpu_module, spec, device="cuda")
    with torch.no_grad():
        x = y = images(spec, device="cuda")
        for _ in range(20):
            y = model(y) * 0.5
        z = x
        for _ in range(20):
            torch.cuda.synchronize()
            z = model(z) * 0.5
        assert torch.equal(y, z)


def test_gradients_equal_the_references(gpu_module: ModuleType, spec: BlockSpec) -> None:
    expected, model = pair(gpu_module, spec, device="cuda")
    assert used_kernels(lambda: model(images(spec, device="cuda")))
    for got, want in zip(gradients(model, images(spec, device="cuda")), gradients(expected, images(spec, device="cuda")), strict=True):
        close(got, want, 1e-3)


def test_double_backward(gpu_module: ModuleType, spec: BlockSpec) -> None:
    results = []
    for model in pair(gpu_module, spec, device="cuda"):
        x = images(spec, 1, device="cuda").requires_grad_()
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), [x, *model.parameters()]))
    for want, got in zip(*results, strict=True):
        close(got, want, 1e-3)


def test_no_grad_and_inference_mode(gpu_module: ModuleType, spec: BlockSpec) -> None:
    _, model = pair(gpu_module, spec, device="cuda")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = model(images(spec, device="cuda"))
            assert not y.requires_grad
            close(y, truth(spec, model, images(spec, device="cuda")))


def test_the_second_forward_uses_the_new_weights(gpu_module: ModuleType, spec: BlockSpec) -> None:
    _, model = pair(gpu_module, spec, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    for _ in range(2):
        model(images(spec, device="cuda")).square().mean().backward()
        optimizer.step()
        close(model(images(spec, device="cuda")), truth(spec, model, images(spec, device="cuda")))
    for assign in (False, True):
        model.load_state_dict({k: v.cuda() for k, v in random_weights(spec).items()}, assign=assign)
        close(model(images(spec, device="cuda")), truth(spec, model, images(spec, device="cuda")))


def test_copies_pickles_and_saves_before_and_after_a_call(gpu_module: ModuleType, spec: BlockSpec) -> None:
    _, model = pair(gpu_module, spec, device="cuda")
    for _ in range(2):
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
            close(again(images(spec, device="cuda")), truth(spec, model, images(spec, device="cuda")))
        model(images(spec, device="cuda")).sum().backward()


def test_the_op_meets_pytorchs_own_checks(gpu_module: ModuleType, spec: BlockSpec) -> None:
    _, model = pair(gpu_module, spec, device="cuda")
    inputs = (images(spec, 1, device="cuda").requires_grad_(), *(p.detach().clone().requires_grad_() for p in model.parameters()))
    results = torch.library.opcheck(gpu_module._op(), inputs, atol=1e-3, rtol=1e-3)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compile_whole(gpu_module: ModuleType, spec: BlockSpec, mode: str) -> None:
    torch._dynamo.reset()
    _, model = pair(gpu_module, spec, device="cuda")
    compiled = torch.compile(nn.Sequential(model, nn.GELU()), fullgraph=True, mode=mode)
    with torch.no_grad():
        for _ in range(4):
            y = compiled(images(spec, device="cuda")).clone()
        close(y, nn.functional.gelu(truth(spec, model, images(spec, device="cuda"))))
        assert used_kernels(lambda: compiled(images(spec, device="cuda")))


def test_compiled_gradients(gpu_module: ModuleType, spec: BlockSpec) -> None:
    torch._dynamo.reset()
    expected, model = pair(gpu_module, spec, device="cuda")
    x = images(spec, device="cuda")
    for got, want in zip(gradients(torch.compile(model, fullgraph=True), x), gradients(expected, x), strict=True):
        close(got, want, 1e-3)


def test_export(gpu_module: ModuleType, spec: BlockSpec, tmp_path: Path) -> None:
    _, model = pair(gpu_module, spec, device="cuda")
    program = torch.export.export(model, (images(spec, device="cuda"),), dynamic_shapes=({0: torch.export.Dim("batch", min=2, max=64)},))
    torch.export.save(program, tmp_path / "program.pt2")
    again = torch.export.load(tmp_path / "program.pt2").module()
    for batch in (2, 6):
        close(again(images(spec, batch, device="cuda")), truth(spec, model, images(spec, batch, device="cuda")))
    assert used_kernels(lambda: again(images(spec, device="cuda")))
