"""Building an emulator program: the runtime (once), the emulated source (each), and the link, cached by content."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

from codegen.render import Source
from codegen.spec import SpecError

RUNTIME = Path(__file__).resolve().parent / "emulator"
UNITS = ("main.cpp", "fibers.cpp", "collectives.cpp", "copies.cpp", "warpgroup.cpp", "memory.cpp", "conflicts.cpp", "report.cpp")
HEADERS = ("runtime.h", "fibers.h")
HEADER = "cuda_host.h"
SOURCE_NAME = "kernel.cu"  # how the compiler and the debug information call the emulated source
COMMON_FLAGS = ("-std=c++17", "-fno-pie")
RUNTIME_FLAGS = (*COMMON_FLAGS, "-O2")
# -O1 keeps the accesses and the lines of the source; -ffp-contract=off makes results the same on every host.
SOURCE_FLAGS = (
    *COMMON_FLAGS, "-O1", "-fno-exceptions", "-fno-strict-aliasing", "-ffp-contract=off", "-w", "-fmax-errors=1",
    "-fsanitize=thread", "-fsanitize=alignment,bounds,signed-integer-overflow,integer-divide-by-zero",
)  # fmt: skip
LINE_FLAGS = ("-g1", "-gdwarf-4")  # they change no code, and take 40% of the time: for programs whose lines are asked for
PATTERN_FLAG = "-ftrivial-auto-var-init=pattern"  # uninitialised registers hold a large number, never a lucky zero (g++ 12)


class CompileError(RuntimeError):
    """g++ refused the source; the message is its first error, `line` where that is in the source (None if elsewhere)."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


@lru_cache(maxsize=1)
def compiler() -> tuple[str, str, tuple[str, ...]]:
    """g++'s path, its version line and the flags that only it may know. SpecError when there is none."""
    path = shutil.which("g++")
    if path is None:
        raise SpecError("the emulator needs g++, which is not installed: install it (for example `apt-get install g++`)")
    try:
        version = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        raise SpecError(f"g++ does not run ({error}): the emulator needs a working one") from None
    major = re.search(r"(\d+)\.\d+\.\d+", version)
    return path, version, (PATTERN_FLAG,) if major and int(major[1]) >= 12 else ()


def build(source: Source, folder: Path, limit: float, lines: bool = False) -> Path:
    """The program that runs `source`, from the cache in `folder` or built there. `limit`: seconds for each compilation; lines: with what
    line_of needs.

    A finished file is moved into place under its final name, so that processes which build the same do not disturb each
    other and a killed one leaves nothing that would be taken for a result.
    """
    path, version, extra = compiler()
    flags = (*SOURCE_FLAGS, *extra, *(LINE_FLAGS if lines else ()))
    unit = translation_unit(source)
    runtime_key = _key(version, *RUNTIME_FLAGS, *((RUNTIME / name).read_text() for name in (*UNITS, *HEADERS)))
    program = folder / f"{_key(runtime_key, *flags, (RUNTIME / HEADER).read_text(), source.text, unit)}.exe"
    if program.exists():
        return program
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=folder, prefix="building-") as text:
            scratch = Path(text)
            runtime = folder / f"{runtime_key}.o"
            if not runtime.exists():
                _run([path, *RUNTIME_FLAGS, "-r", "-o", str(scratch / "runtime.o"), *(str(RUNTIME / name) for name in UNITS)], limit)
                os.replace(scratch / "runtime.o", runtime)
            (scratch / SOURCE_NAME).write_text(source.text)
            (scratch / "unit.cpp").write_text(unit)
            _run([path, *flags, "-I", str(RUNTIME), "-c", "-o", str(scratch / "unit.o"), str(scratch / "unit.cpp")], limit)
            _run([path, "-no-pie", "-o", str(scratch / "program"), str(scratch / "unit.o"), str(runtime)], limit)
            os.replace(scratch / "program", program)
    except OSError as error:
        raise SpecError(f"the emulator cannot write its cache {folder}: {error.strerror or error}") from None
    return program


def translation_unit(source: Source) -> str:
    """Includes the emulated source as it is, between the host header and the launch table that runtime.h declares."""
    table = ",\n".join(
        f'    {{"{k.name}", Entry<{k.name}>::run, {len(k.arguments)}, {k.threads}, {k.shared_bytes}, {str(k.dependent_launch).lower()}}}'
        for k in source.kernels
    )
    return (
        f'#include "{HEADER}"\n#include "{SOURCE_NAME}"\n#include "runtime.h"\n#include "entry.h"\n'
        f'extern "C" const emulator::Kernel emulator_kernels[] = {{\n{table}\n}};\n'
        f'extern "C" const int emulator_kernel_count = {len(source.kernels)};\n'
    )


def line_of(program: Path, pc: int) -> int | None:
    """The line of the emulated source that the return address `pc` stands in; None when it is elsewhere or unknown."""
    return next(iter(lines_of(program, pc)), None)


def lines_of(program: Path, pc: int) -> tuple[int, ...]:
    """That line, and then those of the calls around it that were inlined, up to the kernel's."""
    tool = shutil.which("addr2line")
    if tool is None:
        return ()
    try:
        done = subprocess.run([tool, "-e", str(program), "-i", hex(pc - 1)], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(int(line) for line in re.findall(rf"(?:^|/){re.escape(SOURCE_NAME)}:(\d+)", done.stdout, re.M))


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _run(command: list[str], limit: float) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise CompileError(f"g++ did not finish within {limit:g} s") from None
    if done.returncode == 0:
        return
    errors = [line for line in done.stderr.splitlines() if re.search(r"error|undefined reference", line)]
    message = (errors or done.stderr.splitlines() or [f"g++ ended with code {done.returncode}"])[0]
    message = re.sub(rf"\S*{re.escape(SOURCE_NAME)}", SOURCE_NAME, message)
    place = re.search(rf"{re.escape(SOURCE_NAME)}:(\d+)", message)
    raise CompileError(message.strip(), int(place[1]) if place else None)
