"""Emitted modules on a GPU: built by nvcc, by one process or many, whole or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from torch.utils import cpp_extension

from codegen.module import load_module
from codegen.spec import BlockSpec
from emitted import RAGGED, SEED, close, images, pair, truth

ROOT = Path(__file__).resolve().parent.parent.parent
pytestmark = pytest.mark.gpu


PROGRAM = """
import sys, torch
sys.path.insert(0, {root!r})
from codegen.module import load_module
from codegen.reference import random_input, random_weights, reference
module = load_module({path!r})
model = module.ModelNew(*module.get_init_inputs()).cuda()
from codegen.module import read_module
spec = read_module({path!r}).spec
weights = random_weights(spec)
model.load_state_dict(weights)
if {capture}:
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph), torch.no_grad():
            model(torch.zeros(1, spec.height, spec.width, spec.dim, device="cuda"))
    except RuntimeError as error:
        print("capture:", "call the module once" in str(error))
x = random_input(spec)
with torch.no_grad():
    error = (model(x.cuda()).cpu() - reference(spec, x, weights)).abs().max()
print("done", float(error) < 1e-4)
"""


class Processes:
    """Runs PROGRAM in fresh processes that share one empty cache."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.path, self.folder = path, folder

    def start(self, *, capture: bool = False, python: str = sys.executable, **environment: str) -> subprocess.Popen[str]:
        base = {**os.environ, "XDG_CACHE_HOME": str(self.folder / "cache"), **environment}
        base.pop("TORCH_EXTENSIONS_DIR", None)
        program = PROGRAM.format(root=str(ROOT), path=str(self.path), capture=capture)
        return subprocess.Popen([python, "-c", program], env=base, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def libraries(self, folder: str = "cache/axialtune") -> list[str]:
        return [p.name for p in (self.folder / folder).iterdir() if not p.name.endswith(".lock")]


@pytest.fixture
def processes(path_of: Callable[[BlockSpec], Path], tmp_path: Path) -> Processes:
    return Processes(path_of(RAGGED), tmp_path)


def test_a_killed_build_is_built_again(processes: Processes) -> None:
    first = processes.start()
    deadline = time.monotonic() + 120.0
    while not list(processes.folder.glob("cache/axialtune/*.build-*/build.ninja")):
        assert time.monotonic() < deadline and first.poll() is None, first.communicate()
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()
    out, err = processes.start().communicate(timeout=240)
    assert out.split() == ["done", "True"], err
    assert len([name for name in processes.libraries() if name.endswith(".so")]) == 1


def test_eight_processes_at_once(processes: Processes) -> None:
    running = [processes.start() for _ in range(8)]
    results = [process.communicate(timeout=300) for process in running]
    assert [out.split() for out, _ in results] == [["done", "True"]] * 8, [err for _, err in results]
    assert len(processes.libraries()) == 1


def test_stripped_path_other_arch_list_and_read_only_home(processes: Processes) -> None:
    """ninja is found beside the interpreter, the module's own architecture is built, in a fallback folder that is named."""
    (processes.folder / "temporary ü").mkdir()
    toolkit = cpp_extension.CUDA_HOME
    assert toolkit is not None, "no CUDA toolkit here"
    process = processes.start(
        PATH="/usr/bin:/bin", TORCH_CUDA_ARCH_LIST="8.9+PTX", XDG_CACHE_HOME="/proc/none", HOME="/proc/none", CUDA_HOME=toolkit,
        TMPDIR=str(processes.folder / "temporary ü"),
    )  # fmt: skip
    out, err = process.communicate(timeout=240)
    assert out.split() == ["done", "True"], err
    fallback = f"temporary ü/axialtune-{os.getuid()}"
    assert f"kernels are built in {processes.folder / fallback}" in err
    assert len(processes.libraries(fallback)) == 1


def test_capture_before_the_first_call_says_what_to_do(processes: Processes) -> None:
    out, err = processes.start(capture=True).communicate(timeout=240)
    assert out.splitlines()[0] == "capture: True", err


def test_without_nvcc_it_says_what_to_install(module: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(module, "_launch", None)
    monkeypatch.setattr(module, "_NAMESPACE", module._NAMESPACE + "_unbuilt")
    with pytest.raises(RuntimeError, match="install the CUDA toolkit"):
        module._launcher()


def test_two_modules_and_one_under_two_names(path_of: Callable[[BlockSpec], Path], tmp_path: Path) -> None:
    alias = tmp_path / "another_name.py"
    alias.write_bytes(path_of(SEED).read_bytes())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="(?s).*(overrid|registered)")
        for spec, path in ((SEED, path_of(SEED)), (RAGGED, path_of(RAGGED)), (SEED, alias), (SEED, path_of(SEED))):
            module = load_module(path)
            _, model = pair(module, spec, device="cuda")
            close(model(images(spec, device="cuda")), truth(spec, model, images(spec, device="cuda")))
