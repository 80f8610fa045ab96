"""The doctor: each thing missing is found out and answered with what to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tuner import doctor
from tuner.doctor import CHECKS, NEEDS, Finding, can
from tuner.gpu import Gpu


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def toolkit(root: Path, release: str = "13.0") -> Path:
    """A folder that looks like a CUDA toolkit of that release."""
    script(root / "bin" / "nvcc", f'echo "Cuda compilation tools, release {release}, V{release}.88"')
    (root / "include").mkdir()
    (root / "include" / "cuda_runtime.h").touch()
    return root


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A PATH with nothing on it but the folder returned, and no CUDA_HOME."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def torch_cuda(monkeypatch: pytest.MonkeyPatch):
    """Sets what PyTorch says it was built with."""
    return lambda version: monkeypatch.setattr("torch.version.cuda", version)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch):
    """Sets the GPUs that the driver shows."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return lambda *cards: monkeypatch.setattr(doctor, "visible_gpus", lambda: cards)


def test_looks_at_everything_and_advises_on_all_that_is_missing() -> None:
    findings = doctor.doctor()
    assert [finding.name for finding in findings] == list(CHECKS)
    for finding in findings:
        assert finding.detail and "\n" not in finding.detail
        assert finding.ok == (finding.advice == "")


def test_what_the_tests_themselves_need_is_there() -> None:
    assert {finding.name for finding in doctor.doctor() if finding.ok} >= {"Python", "PyTorch", "NVRTC", "g++", "ninja", "cache"}


def test_creates_no_cuda_context() -> None:
    code = "from tuner.doctor import doctor; doctor(); import torch; print(torch.cuda.is_initialized())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert done.stdout == "False\n", done.stderr


def test_a_check_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Finding:
        raise ImportError("libfoo.so.1: cannot open shared object file\nmore")

    monkeypatch.setattr(doctor, "CHECKS", {"g++": broken})
    (finding,) = doctor.doctor()
    assert (finding.name, finding.ok) == ("g++", False)
    assert finding.detail == "libfoo.so.1: cannot open shared object file"


def test_every_need_is_something_looked_for() -> None:
    assert {need for needs in NEEDS.values() for need in needs} <= set(CHECKS)


@pytest.mark.parametrize(
    ("missing", "able"),
    [
        (set(), set(NEEDS)),
        ({"GPU", "PyTorch CUDA build", "nvcc"}, {"tune, predicted without a GPU", "emulate kernels on the CPU"}),
        ({"nvcc"}, {"tune, measured on the GPU", "tune, predicted without a GPU", "emulate kernels on the CPU"}),
        ({"g++"}, {"tune, measured on the GPU"}),
        ({"NVRTC"}, {"emulate kernels on the CPU", "build and run emitted modules"}),
        ({"PyTorch"}, set()),
    ],
)
def test_abilities(missing: set[str], able: set[str]) -> None:
    abilities = can(Finding(name, name not in missing, "detail") for name in CHECKS)
    assert {ability.name for ability in abilities if ability.ok} == able
    for ability in abilities:
        assert set(ability.missing) == missing & set(NEEDS[ability.name])


def test_old_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 4, "final", 0))
    assert not doctor.python().ok


@pytest.mark.parametrize(
    ("version", "ok"), [("2.9.1+cu128", False), ("2.10.0", True), ("2.13.0a0+git123", True), ("3.0", True), ("odd", False)]
)
def test_pytorch_version(monkeypatch: pytest.MonkeyPatch, version: str, ok: bool) -> None:
    monkeypatch.setattr("torch.__version__", version)
    finding = doctor.pytorch()
    assert (finding.ok, finding.detail) == (ok, version)
    assert ok or "torch>=2.10" in finding.advice


def test_pytorch_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert not doctor.pytorch().ok and not doctor.pytorch_cuda().ok
    assert "pip install" in doctor.pytorch().advice


@pytest.mark.parametrize(("version", "ok"), [(None, False), ("13.0", True)])
def test_pytorch_cuda_build(torch_cuda, version: str | None, ok: bool) -> None:
    torch_cuda(version)
    assert doctor.pytorch_cuda().ok is ok


def test_gpu_and_driver_are_named(gpus) -> None:
    gpus(Gpu(0, "NVIDIA H200", "GPU-1", "580.65.06", (9, 0)), Gpu(1, "Tesla V100", "GPU-2", "580.65.06", (7, 0)))
    assert doctor.gpu() == Finding("GPU", True, "NVIDIA H200 (sm_90), Tesla V100 (sm_70), driver 580.65.06")


def test_no_gpu(gpus) -> None:
    gpus()
    finding = doctor.gpu()
    assert not finding.ok and "driver" in finding.advice


def test_gpu_of_an_unsupported_architecture(gpus) -> None:
    gpus(Gpu(0, "Tesla V100", "GPU-2", "580.65.06", (7, 0)))
    finding = doctor.gpu()
    assert not finding.ok and "sm_70" in finding.detail and "sm_90" in finding.advice


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_gpu(gpus, monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert "unset CUDA_VISIBLE_DEVICES" in doctor.gpu().advice


def test_nvrtc_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    finding = doctor.nvrtc()
    assert not finding.ok and "nvidia-cuda-nvrtc" in finding.advice


def test_nvcc_of_cuda_home(bare: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, torch_cuda) -> None:
    torch_cuda("13.0")
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "cuda", "13.2")))
    finding = doctor.nvcc()
    assert finding == Finding("nvcc", True, f"13.2, CUDA_HOME {tmp_path / 'cuda'}")


def test_nvcc_of_another_major_release_than_pytorch(bare: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, torch_cuda) -> None:
    torch_cuda("13.0")
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "cuda", "12.4")))
    finding = doctor.nvcc()
    assert not finding.ok and "12.4" in finding.detail and "13.0" in finding.advice


def test_cuda_home_without_nvcc(bare: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    finding = doctor.nvcc()
    assert not finding.ok and str(tmp_path / "bin" / "nvcc") in finding.detail


def test_nvcc_that_is_a_wrapper_far_from_its_toolkit(bare: Path) -> None:
    """PyTorch would look for CUDA's headers beside the wrapper, and fail in the middle of a build."""
    script(bare / "nvcc", 'echo "release 13.0"')
    finding = doctor.nvcc()
    assert not finding.ok and "cuda_runtime.h" in finding.detail


def test_nvcc_that_fails(bare: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = toolkit(tmp_path / "cuda")
    script(home / "bin" / "nvcc", "echo broken >&2; exit 1")
    monkeypatch.setenv("CUDA_HOME", str(home))
    finding = doctor.nvcc()
    assert not finding.ok and "broken" in finding.detail


def test_no_toolkit(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "cuda_home", lambda: None)
    finding = doctor.nvcc()
    assert not finding.ok and "CUDA_HOME" in finding.advice


def test_gxx_missing(bare: Path) -> None:
    finding = doctor.gxx()
    assert not finding.ok and "g++" in finding.advice


def test_gxx_that_cannot_compile(bare: Path) -> None:
    script(bare / "g++", "echo 'cannot find cc1plus' >&2; exit 1")
    finding = doctor.gxx()
    assert not finding.ok and "cannot find cc1plus" in finding.detail


def test_a_compiler_that_hangs(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(bare / "g++", "while :; do :; done")
    monkeypatch.setattr(doctor, "COMMAND_SECONDS", 0.2)
    finding = doctor.gxx()
    assert not finding.ok and "did not return" in finding.detail


def test_ninja_beside_the_interpreter(bare: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = script(tmp_path / "env" / "ninja", "echo 1.13.0")
    monkeypatch.setattr(sys, "executable", str(program.parent / "python"))
    assert doctor.ninja() == Finding("ninja", True, f"1.13.0 at {program}")


def test_ninja_missing(bare: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    finding = doctor.ninja()
    assert not finding.ok and "pip install ninja" in finding.advice


def test_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    finding = doctor.cache()
    assert not finding.ok and "XDG_CACHE_HOME" in finding.advice
