"""What a comparison measures with: processes on the present GPU, each of which may fail or hang without ending the run.

Everything that compiles is built side by side first; then one thing after another is measured, with nothing else running.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from benchmarks.cases import Case
from benchmarks.floors import Ceilings, floors
from benchmarks.results import Measured, Result
from codegen.module import Emitted
from codegen.spec import BlockSpec
from tuner.gpu import Gpu
from tuner.gpu_backend import GpuBackend, Limits
from tuner.pytorch_forms import FORMS, Forms
from tuner.records import Machine
from tuner.trial import Timing
from tuner.worker import Worker, WorkerError

BUILDS_PER_CASE = 4  # processes that compile at a time: two of Forms, one module, the rival's
AUTOTUNE = "max-autotune"
_COMPILE = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # many forms are compiled at once: no pool of processes for each
_AUTOTUNE = {"TORCHINDUCTOR_MAX_AUTOTUNE": "1", "TORCHINDUCTOR_COORDINATE_DESCENT_TUNING": "1"}  # what that mode of torch.compile sets
_MEASURE_SECONDS = 90.0


@dataclass(frozen=True)
class Job:
    """A case with its block, and the module for it if there is one."""

    case: Case
    spec: BlockSpec
    module: Emitted | None = None


class Instruments(Protocol):
    """Measures jobs; tests put another in place of the GPU's."""

    machine: Machine

    def ceilings(self) -> Ceilings: ...

    def prepare(self, jobs: Sequence[Job], seconds: float) -> None:
        """Builds what the jobs need, at once, each thing within `seconds`; returns when nothing compiles any more."""
        ...

    def measure(self, job: Job, ceilings: Ceilings) -> Result:
        """Measures a prepared job; what is missing is noted in the result."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Handlers:
    """The handlers of the processes, which tests replace."""

    gpu: str = "tuner.gpu_worker:GpuWorker"
    form: str = "tuner.pytorch_forms:FormWorker"
    ceilings: str = "benchmarks.ceilings:CeilingsWorker"
    rival: str = "benchmarks.rival:RivalWorker"
    builder: str = "benchmarks.instruments:ModuleBuilder"


class ModuleBuilder:
    """The handler that builds modules, so that the process which measures one finds it built."""

    def __call__(self, request: tuple[Path, BlockSpec]) -> None:
        import torch

        from codegen.module import load_module

        path, spec = request
        dtype = getattr(torch, spec.dtype)
        model = load_module(path).ModelNew(spec.dim, spec.heads, spec.height, spec.width).to("cuda", dtype)
        with torch.no_grad():
            model(torch.zeros(1, spec.height, spec.width, spec.dim, device="cuda", dtype=dtype))
        torch.cuda.synchronize()


@dataclass
class _Prepared:
    forms: tuple[tuple[str, Forms], ...]  # each with what goes in front of its names
    builder: Worker
    rival: Worker | None
    building: Future[str]


class GpuInstruments:
    """Instruments on one GPU. max_autotune: adds PyTorch's forms compiled with max-autotune; rival: measures the Triton kernels too.

    Raises SpecError when nothing can be measured on that GPU from this installation.
    """

    def __init__(
        self,
        gpu: Gpu,
        *,
        seed: int = 0,
        max_autotune: bool = False,
        rival: bool = True,
        limits: Limits | None = None,
        handlers: Handlers | None = None,
        needs_cuda: bool = True,
    ) -> None:
        self.handlers, self.limits = handlers or Handlers(), limits or Limits()
        self.backend = GpuBackend(gpu, seed=seed, limits=self.limits, worker=self.handlers.gpu, needs_cuda=needs_cuda)
        self.gpu, self.machine = gpu, self.backend.machine
        self._seed, self._max_autotune, self._rival = seed, max_autotune, rival
        self._prepared: dict[Case, _Prepared] = {}
        self._threads = ThreadPoolExecutor(64, thread_name_prefix="build")
        self._closing = False

    def ceilings(self) -> Ceilings:
        """WorkerError when they cannot be measured."""
        with Worker(self.handlers.ceilings, self._seed, env=self.gpu.environment) as worker:
            return worker.call("measure", _MEASURE_SECONDS)

    def prepare(self, jobs: Sequence[Job], seconds: float) -> None:
        for job in jobs:
            rival = Worker(self.handlers.rival, job.spec, self.gpu.uuid, self._seed, env=self.gpu.environment) if self._rival else None
            forms = [("", self._forms(job.spec, FORMS, seconds, {}))]
            if self._max_autotune:
                compiled = tuple(name for name in FORMS if "compile" in name)
                forms.append((AUTOTUNE, self._forms(job.spec, compiled, seconds, _AUTOTUNE)))
            builder = Worker(self.handlers.builder, env=self.gpu.environment)
            building = self._threads.submit(self._build, job, builder, rival, seconds)
            self._prepared[job.case] = _Prepared(tuple(forms), builder, rival, building)
        for prepared in self._prepared.values():
            prepared.building.exception()
            for _, one in prepared.forms:
                one.wait()

    def measure(self, job: Job, ceilings: Ceilings) -> Result:
        prepared = self._prepared.pop(job.case)
        result = Result(job.case, floors(job.case, ceilings))
        notes: list[str] = []
        try:
            timings: dict[str, Timing] = {}
            for prefix, forms in prepared.forms:
                timings |= {_name(prefix, name): timing for name, timing in forms.timings().items()}
                notes += [f"PyTorch {_name(prefix, name)}: {cause}" for name, cause in forms.failures.items()]
            result = replace(result, pytorch=timings)
            if prepared.rival is not None:
                try:
                    if cause := prepared.building.result():
                        notes.append(f"Triton: {cause}")
                    else:
                        result = replace(result, rival=prepared.rival.call("measure", _MEASURE_SECONDS))
                except WorkerError as error:
                    notes.append(f"Triton: {error.cause[:300]}")
                prepared.rival.close()
            if job.module is not None:
                module, said = self._module(job.module, job.spec)
                result, notes = replace(result, module=module), notes + said
        finally:
            _close(prepared)
        return replace(result, notes=tuple(notes))

    def close(self) -> None:
        """Ends all processes."""
        self._closing = True
        for prepared in self._prepared.values():
            _close(prepared)
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.backend.close()

    def _forms(self, spec: BlockSpec, names: tuple[str, ...], seconds: float, variables: Mapping[str, str]) -> Forms:
        environment = {**self.gpu.environment, **_COMPILE, **variables}
        return Forms(spec, self.gpu.uuid, environment, limit=seconds, seed=self._seed, names=names, handler=self.handlers.form)

    def _build(self, job: Job, builder: Worker, rival: Worker | None, seconds: float) -> str:
        """Compiles the module and then the rival; returns why there is no rival. A module that fails says so when it is measured."""
        deadline = time.monotonic() + seconds
        if job.module is not None:
            with contextlib.suppress(WorkerError):
                builder.call((job.module.path.resolve(), job.spec), seconds)
            builder.close()
        if rival is None or self._closing:
            return ""
        left = max(1.0, deadline - time.monotonic())
        try:
            rival.start()
            rival.call(("build", 0.7 * left), left)  # it ends by itself before it is ended
        except WorkerError as error:
            return error.cause[:300]
        return ""

    def _module(self, emitted: Emitted, spec: BlockSpec) -> tuple[Measured | None, list[str]]:
        built = self.backend.module(emitted.path, spec)
        notes = [f"{emitted.path.name}: {warning}" for warning in built.warnings]
        if built.timing is None:
            return None, [*notes, f"{emitted.path.name}: {built.cause}"]
        digest = emitted.source.digest
        return Measured(built.timing, built.error, emitted.path.name, digest, built.wall_grad, built.build_seconds), notes


def together(builds: int = BUILDS_PER_CASE) -> int:
    """How many cases are built at once on this machine, each by so many processes."""
    return max(1, len(os.sched_getaffinity(0)) // builds)


def _name(prefix: str, name: str) -> str:
    return name.replace("torch.compile", prefix) if prefix else name


def _close(prepared: _Prepared) -> None:
    for _, forms in prepared.forms:
        forms.close()
    workers = [worker for worker in (prepared.builder, prepared.rival) if worker is not None]
    while not prepared.building.done():
        for worker in workers:
            worker.interrupt()
        time.sleep(0.01)
    for worker in workers:
        worker.close()
