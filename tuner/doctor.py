"""What this machine can do, and what to install for the rest.

Every check really uses the thing it reports on (compiles, runs, writes) and none creates a CUDA context, so the
doctor is safe beside a running measurement.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from codegen.spec import SpecError
from codegen.target import TARGETS, target
from tuner.gpu import visible_gpus

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 10)
COMMAND_SECONDS = 60.0


@dataclass(frozen=True)
class Finding:
    """One thing looked for. detail: what was found, or why it does not work; advice: what to do, empty when ok."""

    name: str
    ok: bool
    detail: str
    advice: str = ""


@dataclass(frozen=True)
class Ability:
    """One thing the program does, and the names of the findings that stand in its way on this machine."""

    name: str
    missing: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.missing


# What each ability needs, by the names of findings.
NEEDS = {
    "tune, measured on the GPU": ("Python", "PyTorch", "PyTorch CUDA build", "GPU", "NVRTC", "cache"),
    "tune, predicted without a GPU": ("Python", "PyTorch", "NVRTC", "g++", "cache"),
    "emulate kernels on the CPU": ("Python", "PyTorch", "g++", "cache"),
    "build and run emitted modules": ("Python", "PyTorch", "PyTorch CUDA build", "GPU", "nvcc", "g++", "ninja", "cache"),
}


def doctor() -> list[Finding]:
    """Looks at everything, in the order of CHECKS. Never raises: a check that breaks is a finding that is not ok."""
    return [_guarded(name, check) for name, check in CHECKS.items()]


def can(findings: Iterable[Finding]) -> list[Ability]:
    """What the findings amount to: each ability of NEEDS with what it still lacks."""
    bad = {finding.name for finding in findings if not finding.ok}
    return [Ability(name, tuple(need for need in needs if need in bad)) for name, needs in NEEDS.items()]


def _guarded(name: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:  # a broken installation can fail in any way, and saying how is this module's purpose
        return Finding(name, False, _first_line(error), f"reinstall what provides {name}; the error above says what is broken")


def _first_line(error: object) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _command(*words: str | Path) -> str:
    """Standard output of a command; RuntimeError with its last complaint when it fails or hangs."""
    try:
        done = subprocess.run(list(map(str, words)), capture_output=True, text=True, errors="replace", timeout=COMMAND_SECONDS)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{words[0]} did not return within {COMMAND_SECONDS:.0f} s") from None
    if done.returncode:
        raise RuntimeError(f"{words[0]} failed: {_first_line(done.stderr or done.stdout or f'exit code {done.returncode}')}")
    return done.stdout


def python() -> Finding:
    version = sys.version.split()[0]
    if sys.version_info[:2] < OLDEST_PYTHON:
        return Finding("Python", False, f"{version} at {sys.executable}", "install Python {}.{} or newer".format(*OLDEST_PYTHON))
    return Finding("Python", True, f"{version} at {sys.executable}")


def pytorch() -> Finding:
    advice = "pip install 'torch>={}.{}'".format(*OLDEST_TORCH)
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a library that PyTorch links to is missing
        return Finding("PyTorch", False, f"cannot be imported: {_first_line(error)}", advice)
    version = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if version is None or (int(version[1]), int(version[2])) < OLDEST_TORCH:
        return Finding("PyTorch", False, torch.__version__, advice)
    return Finding("PyTorch", True, str(torch.__version__))


def pytorch_cuda() -> Finding:
    name, advice = "PyTorch CUDA build", "install a CUDA build of PyTorch (see pytorch.org/get-started); only GPU machines need it"
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding(name, False, f"PyTorch cannot be imported: {_first_line(error)}", advice)
    if torch.version.cuda is None:
        return Finding(name, False, f"{torch.__version__} was built without CUDA", advice)
    return Finding(name, True, f"CUDA {torch.version.cuda}")


def gpu() -> Finding:
    """The GPUs that this process may use, as the driver's management library states them."""
    name = "GPU"
    gpus = visible_gpus()
    if not gpus:
        if os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
            advice = "unset CUDA_VISIBLE_DEVICES, or name a GPU of nvidia-smi -L in it"
            return Finding(name, False, "none that CUDA_VISIBLE_DEVICES lets through", advice)
        advice = "install the NVIDIA driver where there is a GPU; without one, tune predicts instead of measuring"
        return Finding(name, False, "no NVIDIA GPU, or no driver that answers", advice)
    detail = f"{', '.join(f'{gpu.name} ({gpu.arch})' for gpu in gpus)}, driver {gpus[0].driver}"
    if not any(_supported(gpu.arch) for gpu in gpus):
        return Finding(name, False, detail, f"use a GPU of {', '.join(TARGETS)}, or add the architecture to codegen/target.py")
    return Finding(name, True, detail)


def _supported(arch: str) -> bool:
    try:
        target(arch)
    except SpecError:
        return False
    return True


def nvrtc() -> Finding:
    """Compiles a kernel as the search does; NVRTC needs neither a GPU nor a driver."""
    name, advice = "NVRTC", "pip install 'cuda-core>=1.0.1' 'cuda-bindings>=12.9.4' nvidia-cuda-nvrtc"
    try:
        from cuda.bindings import nvrtc as binding
        from cuda.core import Program, ProgramOptions

        code = 'extern "C" __global__ void probe(float* x) { x[threadIdx.x] += 1.0f; }'
        Program(code, "c++", ProgramOptions(arch="sm_90", std="c++17")).compile("cubin")
        status, major, minor = binding.nvrtcVersion()
    except Exception as error:  # missing packages and missing or mismatched libraries all raise types of their own
        return Finding(name, False, _first_line(error), advice)
    return Finding(name, True, f"{major}.{minor}, compiles for sm_90")


def cuda_home() -> Path | None:
    """The CUDA toolkit that PyTorch's extension builder would take: CUDA_HOME or CUDA_PATH, else the one whose nvcc is
    on PATH, else /usr/local/cuda; None when there is none."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if named:
        return Path(named)
    found = shutil.which("nvcc")
    if found:
        return Path(found).parent.parent
    usual = Path("/usr/local/cuda")
    return usual if usual.exists() else None


def nvcc() -> Finding:
    name = "nvcc"
    install = "install the CUDA toolkit (developer.nvidia.com/cuda-downloads) and set CUDA_HOME to it; only building modules needs it"
    home = cuda_home()
    if home is None:
        return Finding(name, False, "no CUDA toolkit: CUDA_HOME is not set, and nvcc is neither on PATH nor in /usr/local/cuda", install)
    compiler = home / "bin" / "nvcc"
    if not os.access(compiler, os.X_OK):
        return Finding(name, False, f"no nvcc at {compiler}", install)
    if not (home / "include" / "cuda_runtime.h").exists():
        # A wrapper script on PATH hides where the toolkit is; PyTorch then looks for headers beside the wrapper.
        return Finding(name, False, f"{compiler} exists, but {home}/include has no cuda_runtime.h", _toolkit_advice(install))
    try:
        version = re.search(r"release (\d+)\.(\d+)", _command(compiler, "--version"))
    except (OSError, RuntimeError) as error:
        return Finding(name, False, _first_line(error), install)
    if version is None:
        return Finding(name, False, f"{compiler} does not state its version", install)
    detail, wanted = f"{version[1]}.{version[2]}, CUDA_HOME {home}", _torch_cuda()
    if wanted is not None and wanted.split(".")[0] != version[1]:
        return Finding(name, False, f"{detail}, but PyTorch was built with CUDA {wanted}", f"install the CUDA {wanted} toolkit")
    return Finding(name, True, detail)


def _toolkit_advice(otherwise: str) -> str:
    """The usual folder when a whole toolkit lies there, else `otherwise`."""
    usual = Path("/usr/local/cuda")
    return f"export CUDA_HOME={usual}" if (usual / "include" / "cuda_runtime.h").exists() else otherwise


def _torch_cuda() -> str | None:
    try:
        import torch
    except (ImportError, OSError):
        return None
    return torch.version.cuda


def gxx() -> Finding:
    """Compiles, links and runs a C++17 program, as the emulator and the extension builder do."""
    name, advice = "g++", "install a C++17 compiler: on Debian and Ubuntu, apt-get install g++"
    compiler = shutil.which("g++")
    if compiler is None:
        return Finding(name, False, "not on PATH", advice)
    try:
        with tempfile.TemporaryDirectory() as folder:
            source, program = Path(folder, "probe.cpp"), Path(folder, "probe")
            source.write_text("#include <cstdio>\nint main() { if constexpr (sizeof(int) == 4) std::puts(__VERSION__); }\n")
            _command(compiler, "-std=c++17", "-O1", source, "-o", program)
            version = _command(program).strip()
    except (OSError, RuntimeError) as error:
        return Finding(name, False, _first_line(error), advice)
    return Finding(name, True, f"{version} at {compiler}")


def ninja() -> Finding:
    """Beside the interpreter first: a virtual environment's bin folder need not be on PATH."""
    name, advice = "ninja", f"{sys.executable} -m pip install ninja"
    beside = Path(sys.executable).parent / "ninja"
    program = str(beside) if os.access(beside, os.X_OK) else shutil.which("ninja")
    if program is None:
        return Finding(name, False, "neither beside the interpreter nor on PATH", advice)
    try:
        version = _command(program, "--version").strip().split(".git")[0]
        return Finding(name, True, f"{version} at {program}")
    except (OSError, RuntimeError) as error:
        return Finding(name, False, _first_line(error), advice)


def cache() -> Finding:
    """Writes a file where compiled artefacts are kept."""
    name, folder = "cache", Path(platformdirs.user_cache_dir("axialtune"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as probe:
            probe.write(b"axialtune")
            probe.flush()
    except OSError as error:
        return Finding(name, False, _first_line(error), f"make {folder} writable, or set XDG_CACHE_HOME to a folder that is")
    return Finding(name, True, f"{folder} is writable")


CHECKS: dict[str, Callable[[], Finding]] = {
    "Python": python,
    "PyTorch": pytorch,
    "PyTorch CUDA build": pytorch_cuda,
    "GPU": gpu,
    "NVRTC": nvrtc,
    "nvcc": nvcc,
    "g++": gxx,
    "ninja": ninja,
    "cache": cache,
}
