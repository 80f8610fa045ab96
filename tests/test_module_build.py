"""How an emitted module builds its kernels: once, whole, in a folder it may trust, and never stuck on what others left.

Most tests replace PyTorch's load_inline by a compiler that copies a prepared library slowly; everything around it is the
module's own. One test runs the real thing, where nvcc is installed, against stand-ins for PyTorch's CUDA libraries.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils import cpp_extension

import emitted
from codegen.config import Config
from codegen.module import load_module, write_module
from codegen.render import render
from codegen.spec import BlockSpec
from codegen.staged import default as staged_default
from codegen.target import target as target_of

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A module in a folder with spaces and letters beyond ASCII."""
    return emitted.write(tmp_path_factory.mktemp("erzeugt für später"))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small shared library, in the place of what nvcc would make."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "probe.c").write_text("static char filler[1 << 20] = {1}; int axialtune_probe(int i) { return filler[i]; }\n")
    subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", "probe.c", "-o", "probe.so"], cwd=folder, check=True)
    return folder / "probe.so"


@pytest.fixture
def toolkit(tmp_path: Path) -> Path:
    """What the module takes for a CUDA toolkit."""
    nvcc = tmp_path / "toolkit" / "bin" / "nvcc"
    header = tmp_path / "toolkit" / "include" / "cuda_runtime.h"
    for file in (nvcc, header):
        file.parent.mkdir(parents=True)
        file.write_text("")
    return tmp_path / "toolkit"


class Compiler:
    """Stands for load_inline: writes the library in two halves, as a linker does, and loads it."""

    def __init__(self, library: Path, seconds: float = 0.0) -> None:
        self.library, self.seconds = library, seconds
        self.calls: list[dict] = []
        self.path = ""

    def __call__(self, **arguments) -> str:
        self.calls.append(arguments)
        self.path = os.environ["PATH"]
        data = self.library.read_bytes()
        built = Path(arguments["build_directory"]) / f"{arguments['name']}.so"
        with built.open("wb") as file:
            file.write(data[: len(data) // 2])
            file.flush()
            time.sleep(self.seconds)
            file.write(data[len(data) // 2 :])
        torch.ops.load_library(str(built))
        return str(built)


def stand_in(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes loading any library define the launching op, as the real one does by itself, for an unused namespace."""
    load = torch.ops.load_library
    namespace = f"{module._NAMESPACE}_{time.monotonic_ns()}"

    def load_and_define(name: str) -> None:
        load(name)
        if not hasattr(getattr(torch.ops, namespace), "launch"):
            torch.library.define(f"{namespace}::launch", "(Tensor x) -> Tensor")

    monkeypatch.setattr(torch.ops, "load_library", load_and_define)
    monkeypatch.setattr(module, "_NAMESPACE", namespace)
    monkeypatch.setattr(module, "_launch", None)


@pytest.fixture
def build(path: Path, library: Path, toolkit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Compiler]]:
    """Sets up an empty cache; each call forgets what the process has loaded, calls the module's loader and returns the compiler."""
    module = load_module(path)
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a cache"))
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(toolkit))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def run() -> Compiler:
        with monkeypatch.context() as patch:
            compiler = Compiler(library)
            patch.setattr(cpp_extension, "load_inline", compiler)
            stand_in(module, patch)
            assert module._launcher() is not None
            return compiler

    yield run


def cached(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if not p.name.endswith(".lock"))


def test_builds_once_and_leaves_nothing_else(build, tmp_path: Path) -> None:
    assert len(build().calls) == 1
    assert len(build().calls) == 0
    (name,) = cached(tmp_path / "a cache" / "axialtune")
    assert name.endswith(".so")


def test_flags_are_the_modules_own(build, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever TORCH_CUDA_ARCH_LIST says, its own architecture is built, and PyTorch adds no other."""
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.9+PTX")
    (call,) = build().calls
    assert "-gencode=arch=compute_90,code=sm_90" in call["extra_cuda_cflags"]
    assert cpp_extension._get_cuda_arch_flags(call["extra_cuda_cflags"]) == []
    assert call["no_implicit_headers"] and call["with_cuda"] and not call["is_python_module"]
    kernels, addresses = call["cuda_sources"]
    assert "__global__" in kernels and "torch/" not in kernels + addresses, "nvcc takes seconds for PyTorch's headers"
    assert all(f"({kernel['name']})" in addresses for kernel in load_module(path).KERNELS)
    assert "STABLE_TORCH_LIBRARY" in call["cpp_sources"] and "-DUSE_CUDA" in call["extra_cflags"]
    assert [(Path(folder) / "cuda_runtime.h").is_file() for folder in call["extra_include_paths"]] == [True]


@pytest.mark.parametrize("before", ["/nonexistent", None])
def test_ninja_is_found_beside_the_interpreter(build, monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    if before is None:
        monkeypatch.delenv("PATH")
    else:
        monkeypatch.setenv("PATH", before)
    parts = build().path.split(os.pathsep)
    assert parts[0] == os.path.dirname(sys.executable) and "/usr/bin" in parts and (before is None or before in parts)
    assert shutil.which("ninja", path=parts[0]) is not None
    assert os.environ.get("PATH") == before


def test_path_is_restored_after_a_failed_build(build, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next build works."""
    module = load_module(path)
    monkeypatch.setattr(module, "_launch", None)
    monkeypatch.setenv("PATH", "/only")

    def fails(**arguments) -> None:
        raise RuntimeError("Error building extension: nvcc says no")

    monkeypatch.setattr(cpp_extension, "load_inline", fails)
    with pytest.raises(RuntimeError, match="nvcc says no"):
        module._launcher()
    assert os.environ["PATH"] == "/only" and cached(tmp_path / "a cache" / "axialtune") == []
    assert len(build().calls) == 1


def test_what_a_build_depends_on_is_in_its_name(build, path: Path, toolkit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two PyTorch versions, CUDA versions, sources, flags or toolkits with one HOME do not share a library."""
    module = load_module(path)
    names = {module._library_name()}
    for target, name, value in (
        (torch, "__version__", "2.99.0"), (torch.version, "cuda", "99.0"), (module, "CUDA_SOURCE", "other"),
        (module, "LAUNCH_SOURCE", "other"), (module, "_NVCC_FLAGS", ("-O0",)), (module, "_HOST_FLAGS", ("-O0",)), (module, "SPEC", {}),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            names.add(module._library_name())
    (toolkit / "bin" / "nvcc").write_text("a newer one")
    names.add(module._library_name())
    assert len(names) == 9
    assert len(build().calls) == 1
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.99.0")
        assert len(build().calls) == 1


def test_a_stale_lock_file_of_torch_does_not_hang(build, tmp_path: Path) -> None:
    cache = tmp_path / "a cache" / "axialtune"
    cache.mkdir(parents=True)
    (cache / "lock").write_text("")
    assert len(build().calls) == 1


def test_a_damaged_library_is_built_again(build, tmp_path: Path) -> None:
    build()
    (library,) = (tmp_path / "a cache" / "axialtune").glob("*.so")
    library.unlink()  # not written in place: this process has it mapped
    library.write_bytes(b"\x7fELF damaged")
    assert len(build().calls) == 1


def test_modules_of_equal_kernels_do_not_share_a_library(tmp_path: Path) -> None:
    """Blocks that differ in nothing but the batch they were tuned for: the source is the same, the registered op is not."""
    first, second = (load_module(emitted.write(tmp_path, dataclasses.replace(emitted.SPEC, batch=batch))) for batch in (3, 5))
    assert first.CUDA_SOURCE == second.CUDA_SOURCE
    assert first._NAMESPACE != second._NAMESPACE and first._library_name() != second._library_name()


def test_a_wrapper_without_headers_is_no_toolkit(build, toolkit: Path) -> None:
    """/usr/local/bin/nvcc may be a script beside no headers: a build with it would fail later and say less."""
    (toolkit / "include" / "cuda_runtime.h").unlink()
    with pytest.raises(RuntimeError, match="nvcc was not found"):
        build()


def test_a_built_library_is_loaded_where_there_is_no_toolkit(build, monkeypatch: pytest.MonkeyPatch) -> None:
    build()
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    assert len(build().calls) == 0


def test_without_a_toolkit_it_says_what_to_install(build, path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    with pytest.raises(RuntimeError, match="nvcc was not found: install the CUDA toolkit.*CUDA_HOME"):
        build()
    assert not (tmp_path / "a cache").exists()


def test_extensions_dir_of_the_harness_is_used(build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "harness"))
    build()
    assert len(cached(tmp_path / "harness" / "axialtune")) == 1 and not (tmp_path / "a cache").exists()


def test_read_only_home_builds_in_a_private_folder_it_names(build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/no such folder")
    fallback = tmp_path / f"axialtune-{os.getuid()}"
    with pytest.warns(UserWarning, match=f"kernels are built in {fallback}"):
        assert len(build().calls) == 1
    assert fallback.stat().st_mode & 0o777 == 0o700
    assert len(build().calls) == 0


def test_a_folder_others_can_write_is_not_trusted(
    build, tmp_path: Path, library: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library planted in a world-writable folder of the expected name is not loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/no such folder")
    fallback = tmp_path / f"axialtune-{os.getuid()}"
    fallback.mkdir(mode=0o777)
    fallback.chmod(0o777)
    shutil.copy(library, fallback / load_module(path)._library_name())
    with pytest.warns(UserWarning, match="which no other process will find"):
        assert len(build().calls) == 1


def test_no_home_at_all(build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what it does when the user is unknown
    assert len(build().calls) == 1
    assert len(cached(tmp_path / f"axialtune-{os.getuid()}")) == 1


def test_threads_of_one_process_build_once(
    path: Path, library: Path, toolkit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load_module(path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(toolkit))
    compiler = Compiler(library, seconds=0.3)
    monkeypatch.setattr(cpp_extension, "load_inline", compiler)
    stand_in(module, monkeypatch)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: module._launcher(), range(4)))
    assert len(set(map(id, results))) == 1 and len(compiler.calls) == 1


# Several processes. The program loads the module, builds with the slow compiler and says that it is done.

PROGRAM = """
import os, sys, warnings
sys.path[:0] = [{here!r}, {root!r}]
import pytest
from pathlib import Path
from torch.utils import cpp_extension
import test_module_build as tests
from codegen.module import load_module
module = load_module({path!r})
compiler = tests.Compiler(Path({library!r}), {seconds})
def load_inline(**arguments):
    with open({log!r}, "a") as log:
        log.write("building\\n")
    return compiler(**arguments)
cpp_extension.load_inline = load_inline
cpp_extension.CUDA_HOME = {toolkit!r}
tests.stand_in(module, pytest.MonkeyPatch())
module._launcher()
print("done")
"""


class Processes:
    def __init__(self, path: Path, library: Path, toolkit: Path, tmp_path: Path) -> None:
        self.path, self.library, self.toolkit, self.folder = path, library, toolkit, tmp_path
        self.log = tmp_path / "log"

    def start(self, seconds: float) -> subprocess.Popen[str]:
        program = PROGRAM.format(
            here=str(HERE), root=str(HERE.parent), path=str(self.path), library=str(self.library), log=str(self.log),
            toolkit=str(self.toolkit), seconds=seconds,
        )  # fmt: skip
        environment = {**os.environ, "XDG_CACHE_HOME": str(self.folder / "cache"), "OMP_NUM_THREADS": "1"}
        environment.pop("TORCH_EXTENSIONS_DIR", None)
        return subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def builds(self) -> int:
        return self.log.read_text().count("building") if self.log.exists() else 0


@pytest.fixture
def processes(path: Path, library: Path, toolkit: Path, tmp_path: Path) -> Processes:
    return Processes(path, library, toolkit, tmp_path)


def test_a_killed_build_is_built_again(processes: Processes) -> None:
    """SIGKILL in mid-build leaves a held lock and half a library; the next process gets both out of its way."""
    first = processes.start(seconds=120.0)
    deadline = time.monotonic() + 60.0
    while processes.builds() == 0:
        assert time.monotonic() < deadline and first.poll() is None, first.communicate()
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.wait()
    second = processes.start(seconds=0.0)
    out, err = second.communicate(timeout=60)
    assert out.strip() == "done", err
    assert processes.builds() == 2
    assert [name[-3:] for name in cached(processes.folder / "cache" / "axialtune")] == [".so"]


@pytest.mark.slow
def test_eight_processes_at_once(processes: Processes) -> None:
    running = [processes.start(seconds=2.0) for _ in range(8)]
    results = [process.communicate(timeout=150) for process in running]
    assert [out.strip() for out, _ in results] == ["done"] * 8, [err for _, err in results]
    assert processes.builds() == 1
    assert len(cached(processes.folder / "cache" / "axialtune")) == 1


def test_import_is_clean_and_cpu_tensors_need_nothing(path: Path, tmp_path: Path) -> None:
    """No GPU, nvcc, PATH, HOME or TORCH_CUDA_ARCH_LIST: it imports, computes, compiles nothing and says nothing."""
    program = f"""
import importlib.util, sys, torch
spec = importlib.util.spec_from_file_location("emitted_module", {str(path)!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
assert "torch.utils.cpp_extension" not in sys.modules and not torch.cuda.is_initialized()
print(tuple(module.ModelNew(*module.get_init_inputs())(*module.get_inputs()).shape))
assert "torch.utils.cpp_extension" not in sys.modules
try:
    module._launcher()
except RuntimeError as error:
    print(error)
"""
    environment = {"PATH": "", "HOME": "/proc/none", "CUDA_HOME": "/proc/none", "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    shape, message = done.stdout.splitlines()
    assert shape == "(2, 5, 7, 16)" and "nvcc was not found: install the CUDA toolkit" in message, done.stderr
    assert "arning" not in done.stderr.replace("No CUDA runtime is found", "")
    assert list(tmp_path.iterdir()) == []


# The real compiler

TOOLKIT = next((p for p in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if p and os.path.isfile(os.path.join(p, "bin", "nvcc"))), "")

REAL = """
import ctypes, os, sys, torch
sys.path[:0] = [{root!r}]
for name in ("libc10_cuda.so", "libtorch_cuda.so"):
    ctypes.CDLL(os.path.join({stubs!r}, name), mode=ctypes.RTLD_GLOBAL)
from torch.utils import cpp_extension
cpp_extension.CUDA_HOME = {toolkit!r}
from codegen.module import load_module
for path in {paths!r}:
    module = load_module(path)
    launch = module._launcher()
    print(launch._schema.name == module._NAMESPACE + "::launch", len(launch._schema.arguments))
    assert torch._C._dispatch_has_kernel_for_dispatch_key(launch.name(), "CUDA")
    assert torch._C._dispatch_has_kernel_for_dispatch_key(module._op().name(), "CUDA")
"""


@pytest.mark.slow
@pytest.mark.skipif(not TOOLKIT or torch.version.cuda is not None, reason="needs nvcc, and stands in for a CUDA build of PyTorch")
def test_the_real_compiler_builds_and_loads_modules(path: Path, tmp_path: Path) -> None:
    """load_inline, ninja, nvcc and the linker, from a stripped PATH, for another TORCH_CUDA_ARCH_LIST, in folders with spaces."""
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    (stubs / "stub.c").write_text("int aoti_torch_get_current_cuda_stream(int device, void** stream) { *stream = 0; return 0; }\n")
    for name in ("libc10_cuda.so", "libtorch_cuda.so"):
        subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", f"-Wl,-soname,{name}", "stub.c", "-o", name], cwd=stubs, check=True)
    second = emitted.write(tmp_path / "zweites Modul", BlockSpec(dim=24, heads=3, height=4, width=9, dtype="bfloat16", axes=("col",)))
    staged = []
    for dim, engine in ((24, "mma"), (256, "wgmma")):
        spec = BlockSpec(dim=dim, heads=dim // 8, height=4, width=20, dtype="float16", axes=("row",))
        start = staged_default(spec.problem("row"), target_of("sm_90"), "fp16", engine)
        assert start is not None
        configs: dict[str, Config] = {"row": start}
        staged.append(write_module(tmp_path / "staged", render(spec, configs), configs, emitted.PREDICTED, target_of("sm_90")))
    unusual = BlockSpec(24, 3, 4, 9, axes=("row",), head_dim=10, qkv_bias=True, out_bias=False, norm="rms", post_norm=True)
    paths = list(map(str, (path, second, *staged, emitted.write(tmp_path / "variant", unusual), path)))
    program = REAL.format(root=str(HERE.parent), stubs=str(stubs), toolkit=TOOLKIT, paths=paths)
    environment = {
        "PATH": "/usr/bin:/bin", "HOME": str(tmp_path / "ein Heim"), "TORCH_CUDA_ARCH_LIST": "8.9+PTX",
        "LIBRARY_PATH": str(stubs), "LD_LIBRARY_PATH": f"{stubs}:{TOOLKIT}/lib64",
    }  # fmt: skip
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.stdout.splitlines() == ["True 11", "True 6", "True 6", "True 6", "True 5", "True 11"], done.stderr
    built = sorted((tmp_path / "ein Heim" / ".cache" / "axialtune").glob("*.so"))
    assert len(built) == 5
    for library in built:
        machine_code = {arch for arch in (b"sm_75", b"sm_80", b"sm_89", b"sm_90") if arch in library.read_bytes()}
        assert machine_code <= {b"sm_90"}
