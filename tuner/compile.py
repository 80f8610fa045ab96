"""Compiling CUDA source to a cubin with NVRTC, in parallel, in processes that can be killed.

The code generation flags are nvcc's defaults for the same text (-O3 in ptxas, fused multiply-add, no fast math) and C++17, as in the
emitted module's build, so that what is measured here is what is built there.
"""

from __future__ import annotations

import io
import os
import queue
import re
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from codegen.render import Source
from codegen.target import Target
from tuner.cubin import Usage, usage
from tuner.trial import Resources
from tuner.worker import HandlerError, Worker, WorkerError, WorkerTimeout

COMPILE_SECONDS = 60.0


@dataclass(frozen=True)
class Compiled:
    """cubin: device code for one architecture; resources: by kernel name; seconds: time inside the compiler."""

    cubin: bytes
    resources: dict[str, Resources]
    seconds: float


class CompileError(RuntimeError):
    """The compiler refused the source; the message is its first error. `status` is the Outcome's."""

    status = "compile_error"


class CompileTimeout(CompileError):
    """The compiler did not return in time and was killed."""

    status = "compile_timeout"


class CompileCrash(CompileError):
    """The compiler took its process down."""

    status = "crash"


def compile_source(source: Source, target: Target, *, timeout: float = COMPILE_SECONDS) -> Compiled:
    """Compiles one source in a process of its own. Raises CompileError, CompileTimeout or CompileCrash."""
    with Compilers(target, workers=1, timeout=timeout) as compilers:
        return compilers.submit(source).result()


class Compilers:
    """A pool of compiler processes for one target.

    workers: processes, by default one per usable core; timeout: seconds for one source, after which its process is killed. `handler`
    names what runs in the processes; tests put compilers there that hang or abort.
    """

    def __init__(
        self,
        target: Target,
        workers: int | None = None,
        timeout: float = COMPILE_SECONDS,
        handler: str = "tuner.compile:compiler",
    ) -> None:
        self.target, self.timeout = target, timeout
        self.workers = workers or usable_cores()
        self._closed = False
        self._idle: queue.LifoQueue[Worker] = queue.LifoQueue()  # the last used first: a short search starts few processes
        self._all = [Worker(handler) for _ in range(self.workers)]
        for worker in self._all:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="compile")

    def submit(self, source: Source) -> Future[Compiled]:
        """Compiles in the background; the future raises CompileError, CompileTimeout or CompileCrash."""
        return self._threads.submit(self._compile, source)

    def close(self) -> None:
        """Drops what waits, kills what runs."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        while self._idle.qsize() < self.workers:  # a thread may be about to start its process: look again
            for worker in self._all:
                worker.interrupt()
            time.sleep(0.01)
        self._threads.shutdown(wait=True)
        for worker in self._all:
            worker.kill()

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _compile(self, source: Source) -> Compiled:
        worker = self._idle.get()
        try:
            if self._closed:
                raise CompileCrash("the compilers were closed")
            answer = worker.call((source.text, source.arch(self.target)), self.timeout)
        except WorkerTimeout:
            raise CompileTimeout(f"the compiler did not return within {self.timeout:g} s") from None
        except HandlerError as error:
            raise CompileError(error.cause) from None
        except WorkerError as error:
            raise CompileCrash(f"the compiler died: {error.cause}") from None
        finally:
            self._idle.put(worker)
        if isinstance(answer, str):
            raise CompileError(answer)
        cubin, used, seconds = answer
        return Compiled(cubin, _resources(source, used), seconds)


def usable_cores() -> int:
    """Cores this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def compiler() -> Callable[[tuple[str, str]], tuple[bytes, dict[str, Usage], float] | str]:
    """The worker's handler: (text, arch) -> (cubin, use by kernel, seconds), or the first error."""
    from cuda.core import Program, ProgramOptions

    def handle(request: tuple[str, str]) -> tuple[bytes, dict[str, Usage], float] | str:
        text, arch = request
        log = io.StringIO()
        start = time.perf_counter()
        options: Any = ProgramOptions(name="kernel.cu", arch=arch, std="c++17")
        try:
            cubin = Program(text, "c++", options).compile("cubin", logs=log).code
        except Exception as error:
            if type(error).__name__ not in ("NVRTCError", "nvJitLinkError", "CUDAError"):
                raise
            return first_error(str(error) + "\n" + log.getvalue())
        return bytes(cubin), usage(bytes(cubin)), time.perf_counter() - start

    return handle


def first_error(log: str) -> str:
    """The compiler's first error in one line: "line 12: identifier "y" is undefined"."""
    for line in (raw.strip(" \t\0") for raw in log.splitlines()):
        if match := re.match(r".*\((\d+)\): (?:catastrophic )?error(?:[^:]*): (.*)", line):
            return f"line {match[1]}: {match[2]}"
        if match := re.match(r"(?:ptxas|nvrtc)[^:]*(?:error|fatal)\s*:\s*(.*)", line):
            return match[1]
    return " ".join(log.split())[:300] or "the compiler failed without a message"


def _resources(source: Source, used: dict[str, Usage]) -> dict[str, Resources]:
    missing = [kernel.name for kernel in source.kernels if kernel.name not in used]
    if missing:
        raise CompileError(f"the compiled code has no kernel {missing[0]}")
    return {k.name: Resources(used[k.name].registers, used[k.name].stack_bytes, k.shared_bytes) for k in source.kernels}
