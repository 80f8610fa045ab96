"""Emitted modules for tests: written from real renderings, loaded as they are or with their CUDA path running on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from codegen.config import Config
from codegen.library import KERNELS
from codegen.module import Provenance, load_module, write_module
from codegen.reference import Model, random_input, random_weights, reference
from codegen.render import Source, render
from codegen.sequence import default
from codegen.spec import BlockSpec
from codegen.target import Target, target
from codegen.terms import random_terms, term_shapes

SPEC = BlockSpec(dim=16, heads=2, height=5, width=7, batch=2)
SEED = BlockSpec()
RAGGED = BlockSpec(dim=24, heads=3, height=17, width=33, batch=3)
AXES = (("row", "col"), ("row",), ("col",))
HALF_SHAPES = ((64, 4, 32, 32), (33, 3, 17, 18))
GPU_SPECS = (  # built together before the first test on a GPU
    SEED,
    RAGGED,
    *(BlockSpec(*shape, batch=3, axes=axes) for shape in ((64, 4, 32, 32), (24, 3, 17, 33)) for axes in AXES),
    *(BlockSpec(*shape, batch=3, dtype=dtype) for shape in HALF_SHAPES for dtype in ("bfloat16", "float16")),
    *(BlockSpec(16, 2, height, width, batch=2) for height, width in ((1, 7), (5, 1), (1, 1), (4, 8))),
)
PREDICTED = Provenance(measured=False, command="python cli.py tune --dim 16 --heads 2", date="2025-01-02", torch=torch.__version__)


def rendered(spec: BlockSpec, goal: Target) -> tuple[Source, dict[str, Config]]:
    """The source and the default configurations of a block."""
    configs: dict[str, Config] = {}
    for axis in spec.axes:
        config = default(spec.problem(axis), goal)
        assert config is not None
        configs[axis] = config
    return render(spec, configs), configs


def write(directory: Path, spec: BlockSpec = SPEC, arch: str = "sm_90", provenance: Provenance = PREDICTED, use: str = KERNELS) -> Path:
    goal = target(arch)
    source, configs = rendered(spec, goal)
    return write_module(directory, source, configs, provenance, goal, use)


def on_cpu(path: Path) -> ModuleType:
    """The module with its CUDA path taken for CPU tensors: the launching op is the PyTorch form, and counts its calls.

    So everything around the kernels is what runs on a GPU: the choice between kernels and PyTorch, gradients, the op.
    """
    text = path.read_text()
    changed = text.replace("not on_cuda", "False").replace("on_cuda and", "True and").replace("x.is_cuda and", "True and")
    assert changed != text
    directory = path.parent / "on_cpu"
    directory.mkdir(exist_ok=True)
    (directory / path.name).write_text(changed)
    module = load_module(directory / path.name)
    module.launched = []

    def launch(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        module.launched.append(tuple(x.shape))
        return module._pytorch_form(x, weights).contiguous()

    module._launch = launch
    module._fits_gpu = lambda index: True
    return module


def pair(module: ModuleType, spec: BlockSpec = SPEC, *, dropout: float = 0.0, device: str = "cpu") -> tuple[nn.Module, nn.Module]:
    """The reference and the emitted model with equal, non-trivial weights."""
    arguments = (spec.dim, spec.heads, spec.height, spec.width)
    expected = Model(*arguments, dropout=dropout, **{"axes": spec.axes, **spec.variants})
    expected.load_state_dict(random_weights(spec, torch.Generator().manual_seed(0)), strict=True)
    got = module.ModelNew(*arguments, dropout=dropout)
    got.load_state_dict(expected.state_dict(), strict=True)
    return expected.to(device), got.to(device)


def images(spec: BlockSpec = SPEC, batch: int | None = None, *, seed: int = 1, scale: float = 1.0, device: str = "cpu") -> torch.Tensor:
    return random_input(spec, torch.Generator().manual_seed(seed), scale=scale, batch=batch).to(device)


def given(spec: BlockSpec, batch: int | None = None, *, seed: int = 1) -> list[torch.Tensor]:
    """What forward takes: images, and the mask and biases that the block has."""
    x = images(spec, batch, seed=seed)
    return [x, *random_terms(spec, torch.Generator().manual_seed(seed), x.shape[0]).values()]


def truth(spec: BlockSpec, model: nn.Module, x: torch.Tensor, *terms: torch.Tensor) -> torch.Tensor:
    """The float64 reference with the model's weights, rounded to float32."""
    return reference(spec, x, model.state_dict() | dict(zip(term_shapes(spec, x.shape[0]), terms, strict=True))).float()


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-5) -> None:
    """Asserts agreement to `tolerance` of the expected tensor's largest element."""
    assert got.shape == expected.shape and got.dtype == expected.dtype and got.device == expected.device
    assert float((got - expected).detach().abs().max()) <= tolerance * float(expected.detach().abs().max())


def gradients(model: nn.Module, x: torch.Tensor, *terms: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of a loss that uses the input three times: of the input, then of the parameters."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    ((model(x, *terms) * torch.linspace(-1, 1, x.shape[-1], device=x.device)).square().sum() + (model(x, *terms) * x).sum()).backward()
    assert x.grad is not None
    return [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


def used_kernels(call: Callable[[], object]) -> bool:
    """Whether `call` launches a module's own kernels."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return any("axial_" in event.key for event in profile.key_averages())


# The same values in other places of memory: name -> what makes such a view of a contiguous input.
STRIDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "permuted": lambda x: x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1),
    "columns first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "sliced": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "every second": lambda x: x.repeat_interleave(2, dim=2)[:, :, ::2],
    "expanded": lambda x: x[:1].expand(4, -1, -1, -1),
    "offset by one": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
}
