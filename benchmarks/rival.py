"""Tunes, verifies and measures the fused Triton rival, in a worker process of its own; its compilers can be killed."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.results import Measured
from codegen.spec import BlockSpec
from tuner.measure import FINAL, Effort, measure, wall
from tuner.worker import Worker, WorkerError

if TYPE_CHECKING:
    from torch import Tensor

    from benchmarks.triton_block import Tiling

_QUICK = Effort(warmup=0.01, seconds=0.02, samples=(5, 50), cold=1)
_COMPILERS = 2
Entry = tuple[str, Any]  # an axis and its Tiling


def triton_block() -> Any:
    """The module with the kernel; RuntimeError where Triton is missing."""
    try:
        from benchmarks import triton_block as module
    except ImportError as error:
        raise RuntimeError(f"Triton is not installed ({error}): it comes with CUDA builds of PyTorch") from None
    return module


class RivalWorker:
    """The handler: ("build", seconds) compiles the configurations and says how many there are; "measure" picks each axis' fastest, verifies
    the block and answers with its Measured.

    Raises RuntimeError when the shape is beyond it, none compiles in time, or the result is wrong.
    """

    def __init__(self, spec: BlockSpec, uuid: str, seed: int) -> None:
        self._block = triton_block()
        if reason := self._block.obstacle(spec):
            raise RuntimeError(reason)
        self._spec, self._uuid, self._seed = spec, uuid, seed
        self._compiled: list[Entry] = []

    def __call__(self, request: Any) -> int | Measured:
        if isinstance(request, tuple):
            return self._build(request[1])
        return self._measure()

    def _build(self, seconds: float) -> int:
        entries = [(axis, tiling) for axis in self._spec.axes for tiling in self._block.tilings(self._spec.problem(axis).length)]
        self._compiled, cause = compile_all("benchmarks.rival:Compiler", (self._spec, self._seed), entries, seconds)
        for axis in self._spec.axes:
            if not any(axis == compiled for compiled, _ in self._compiled):
                raise RuntimeError(f"no configuration of the {axis} axis compiled and ran: {cause}")
        return len(self._compiled)

    def _measure(self) -> Measured:
        import torch

        from tuner import gpu
        from tuner.gpu_worker import Inputs
        from tuner.verify import Checker

        spec, run_axis, run_block = self._spec, self._block.run_axis, self._block.run_block
        inputs = Inputs.random(spec, self._seed)
        choice = fastest(
            self._compiled,
            lambda axis, tiling: (
                measure(
                    [partial(run_axis, spec, axis, tiling, x, inputs.weights, y) for x, y in zip(inputs.x, inputs.y, strict=True)], _QUICK
                ).device
            ),
        )

        def run(x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
            y = torch.full_like(x, float("nan"))
            run_block(spec, choice, x, weights, y)
            return y

        check = Checker(spec, self._seed, "cuda")(run)
        if not check.ok:
            raise RuntimeError(f"it is wrong: {check.cause}")
        torch.cuda.empty_cache()
        forwards = [partial(run_block, spec, choice, x, inputs.weights, y) for x, y in zip(inputs.x, inputs.y, strict=True)]
        timing = measure(forwards, FINAL, partial(gpu.state, self._uuid))
        timing = dataclasses.replace(timing, wall=wall(forwards[0]))
        what = "; ".join(f"{axis}: {tiling}" for axis, tiling in choice.items())
        return Measured(timing, max(check.error, check.branch_error), what)


class Compiler:
    """The handler of a compiling process: compiles one axis with one Tiling into Triton's cache, and runs it once."""

    def __init__(self, spec: BlockSpec, seed: int) -> None:
        from tuner.gpu_worker import Inputs

        self._spec, self._block = dataclasses.replace(spec, batch=1), triton_block()
        self._inputs = Inputs.random(self._spec, seed)

    def __call__(self, entry: tuple[str, Tiling]) -> None:
        import torch

        self._block.run_axis(self._spec, *entry, self._inputs.x[0], self._inputs.weights, self._inputs.y[0])
        torch.cuda.synchronize()


def compile_all(handler: str, setup: tuple[Any, ...], entries: list[Entry], seconds: float) -> tuple[list[Entry], str]:
    """(what was compiled within `seconds`, why the last of the others was not). A compiler that does not return is killed, and the
    configurations behind it get what is left; one never gets more than a third."""
    deadline = time.monotonic() + seconds
    causes: list[str] = []

    def work(mine: Iterable[Entry]) -> list[Entry]:
        done = []
        with Worker(handler, *setup) as worker:
            for entry in mine:
                left = deadline - time.monotonic()
                if left <= (0.0 if worker.running else seconds / 4):  # a start takes seconds
                    causes.append(f"the {seconds:g} s for compiling were over")
                    break
                try:
                    worker.start()
                    worker.call(entry, max(1.0, min(left, seconds / 3)))
                    done.append(entry)
                except WorkerError as error:
                    causes.append(error.cause[:200])
        return done

    with ThreadPoolExecutor(_COMPILERS) as pool:
        parts = pool.map(work, [entries[i::_COMPILERS] for i in range(_COMPILERS)])
        compiled = {entry for part in parts for entry in part}
    return [entry for entry in entries if entry in compiled], causes[-1] if causes else ""


def fastest(entries: Iterable[Entry], time_of: Callable[[str, Any], float]) -> dict[str, Any]:
    """Axis -> the tiling that takes the least time on it."""
    best: dict[str, tuple[float, Any]] = {}
    for axis, tiling in entries:
        taken = time_of(axis, tiling)
        if axis not in best or taken < best[axis][0]:
            best[axis] = taken, tiling
    return {axis: tiling for axis, (_, tiling) in best.items()}
