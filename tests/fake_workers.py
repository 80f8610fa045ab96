"""Handlers for tuner.worker.Worker that behave well or badly on request, as compilers do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tuner.compile import compiler
from tuner.cubin import Usage


def echo(*setup: Any) -> Callable[[Any], Any]:
    """Answers with what it was set up with, its process and the request; obeys some requests."""
    calls = 0

    def handle(request: Any) -> Any:
        nonlocal calls
        calls += 1
        match request:
            case "calls":
                return calls
            case "sleep":
                time.sleep(600)
            case "spin":
                return sum(iter(int, 1))  # one call into C that never returns and never lets go of the interpreter
            case "abort":
                print("about to abort", flush=True)
                os.abort()
            case "lock":
                return threading.Lock()
            case "exit":
                os._exit(7)
            case "raise":
                raise ValueError("no such\nthing")
            case "print":
                os.write(1, b"x" * 3_000_000)
            case ("environment", name):
                return os.environ.get(name)
            case ("grandchild", path):
                child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
                Path(path).write_text(str(child.pid))
                time.sleep(600)
        return setup, os.getpid(), request

    return handle


def broken(*setup: Any) -> Callable[[Any], Any]:
    raise RuntimeError("no device")


def bad_compiler() -> Callable[[tuple[str, str]], Any]:
    """The real compiler, but a source that says HANG never returns and one that says ABORT takes the process down."""
    real = compiler()

    def handle(request: tuple[str, str]) -> Any:
        if "HANG" in request[0]:
            time.sleep(600)
        if "ABORT" in request[0]:
            os.abort()
        return real(request)

    return handle


def quick_compiler() -> Callable[[tuple[str, str]], Any]:
    """Compiles nothing, at once: 12 warps do not compile, 16 never return. The cubin is only named like one."""

    def handle(request: tuple[str, str]) -> Any:
        text, _ = request
        warps = re.findall(r"WARPS = (\d+), THREADS", text)
        if "12" in warps:
            return "line 7: expected a ;"
        if "16" in warps:
            time.sleep(600)
        names = re.findall(r"\b(axial_(?:row|col))\(", text)
        return b"\x7fELF" + text.encode(), {name: Usage(registers=40, stack_bytes=0) for name in names}, 0.01

    return handle
