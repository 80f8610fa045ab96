"""Emitted modules on the CPU, and on a GPU where there is one.

`cuda_path` runs everything around the kernels as on a GPU, with the PyTorch form in the place of the launching op.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

import emitted
from codegen.module import load_module
from codegen.spec import BlockSpec, SpecError
from codegen.target import Target, target

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="session")
def cpu_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return emitted.write(tmp_path_factory.mktemp("generated"))


@pytest.fixture
def module(cpu_path: Path) -> ModuleType:
    module = load_module(cpu_path)
    module._warned.clear()
    return module


@pytest.fixture
def cuda_path(cpu_path: Path) -> ModuleType:
    module = emitted.on_cpu(cpu_path)
    module._warned.clear()
    module.launched.clear()
    return module


@pytest.fixture(params=["cpu", "cuda path"])
def either(request: pytest.FixtureRequest) -> ModuleType:
    return request.getfixturevalue("module" if request.param == "cpu" else "cuda_path")


@pytest.fixture(scope="session")
def gpu_target() -> Target:
    major, minor = torch.cuda.get_device_capability(0)
    try:
        return target(f"sm_{major}{minor}")
    except SpecError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def path_of(tmp_path_factory: pytest.TempPathFactory, gpu_target: Target) -> Callable[[BlockSpec], Path]:
    """Writes a block's module for this GPU, into a folder with a space and a letter beyond ASCII; builds many at once."""
    folder = tmp_path_factory.mktemp("erzeugt für später")
    program = "import sys; sys.path.insert(0, sys.argv[1]); from codegen.module import load_module; load_module(sys.argv[2])._launcher()"
    paths = [emitted.write(folder, spec, gpu_target.arch) for spec in emitted.GPU_SPECS]
    running = [subprocess.Popen([sys.executable, "-c", program, str(ROOT), str(path)]) for path in dict.fromkeys(paths)]
    assert [process.wait(timeout=300) for process in running] == [0] * len(running)
    return lambda spec: emitted.write(folder, spec, gpu_target.arch)


@pytest.fixture(params=[emitted.SEED, emitted.RAGGED], ids=["seed", "ragged"])
def spec(request: pytest.FixtureRequest) -> BlockSpec:
    return request.param


@pytest.fixture
def gpu_module(path_of: Callable[[BlockSpec], Path], spec: BlockSpec) -> ModuleType:
    module = load_module(path_of(spec))
    module._warned.clear()
    return module
