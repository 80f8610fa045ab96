"""The measuring backend: candidates are compiled ahead in parallel, and verified and then measured on one GPU.

This process never creates a CUDA context: a worker process owns the GPU, and is replaced when a candidate takes it down.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import jinja2

from codegen.render import Source, render
from codegen.spec import BlockSpec, SpecError
from tuner import requests
from tuner.compile import Compiled, CompileError, Compilers
from tuner.gpu import Gpu, obstacle
from tuner.pytorch_forms import Forms
from tuner.trial import OK, Candidate, Outcome, Timing
from tuner.worker import HandlerError, Worker, WorkerCrashed, WorkerError, WorkerTimeout

_MOST_AHEAD = 8  # candidates in flight: more would be proposed without knowing the results before them


@dataclass(frozen=True)
class Limits:
    """Seconds after which a step is given up. compile: one source; trial: verifying and measuring one candidate; prepare: the
    reference of one specification; form: building one PyTorch form; module: building and measuring an emitted module."""

    compile: float = 60.0
    trial: float = 15.0
    prepare: float = 120.0
    form: float = 90.0
    module: float = 300.0


@dataclass(frozen=True)
class ModuleTiming:
    """An emitted module, built and called as a user does.

    status, cause, error: as in Outcome. timing: its device time, cold and wall (without gradients), None when it failed;
    wall_grad: microseconds per call with grad mode on; build_seconds: until its first result; warnings: what it warned of.
    """

    status: str
    cause: str = ""
    error: float | None = None
    timing: Timing | None = None
    wall_grad: float = 0.0
    build_seconds: float = 0.0
    warnings: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.status == OK


@dataclass(frozen=True)
class _Pending:
    candidate: Candidate
    source: Source | None = None
    compiled: Future[Compiled] | None = None
    cause: str = ""


class GpuBackend:
    """Evaluates candidates on `gpu`; implements tuner.trial.Backend. Close it, or use it as a context manager.

    seed: of inputs and weights; tolerance: error allowed, of the output's scale; workers: compiler processes; ahead: candidates taken
    from `evaluate`'s iterable before their predecessors' outcomes are known. worker and compiler name the handlers of the
    processes, which tests replace.

    Raises SpecError when nothing can be measured on that GPU from this installation.
    """

    def __init__(
        self,
        gpu: Gpu,
        *,
        seed: int = 0,
        tolerance: float = 1e-5,
        limits: Limits | None = None,
        workers: int | None = None,
        ahead: int | None = None,
        worker: str = "tuner.gpu_worker:GpuWorker",
        compiler: str = "tuner.compile:compiler",
        form: str = "tuner.pytorch_forms:FormWorker",
        needs_cuda: bool = True,
    ) -> None:
        if needs_cuda and (reason := obstacle(gpu)):
            raise SpecError(reason)
        self.gpu, self.target, self.machine = gpu, gpu.target, gpu.machine
        self.limits = limits or Limits()
        self.notes: list[str] = []
        self.pytorch_failures: dict[str, str] = {}
        self._seed, self._form = seed, form
        self._compilers = Compilers(self.target, workers, self.limits.compile, compiler)
        self.ahead = ahead or min(self._compilers.workers, _MOST_AHEAD)
        self._gpu = Worker(worker, gpu.uuid, seed, tolerance, env=gpu.environment)
        self._prepared: set[tuple[int, BlockSpec]] = set()
        self._compiling: dict[str, Future[Compiled]] = {}
        self._outcomes: dict[tuple[BlockSpec, str], Outcome] = {}
        self._forms: dict[BlockSpec, Forms] = {}

    # Backend

    def evaluate(self, candidates: Iterable[Candidate]) -> Iterator[Outcome]:
        """Outcomes in the order of the candidates, taken lazily, a few ahead. A source that was evaluated is not run again.

        A candidate that fails yields a failed Outcome. Raises SpecError only when the GPU worker cannot start at all.
        """
        waiting = iter(candidates)
        pending: deque[_Pending] = deque()
        exhausted = False
        while True:
            while not exhausted and len(pending) < self.ahead:
                candidate = next(waiting, None)
                exhausted = candidate is None
                if candidate is not None:
                    pending.append(self._begin(candidate))
            if not pending:
                return
            yield self._finish(pending.popleft())

    def close(self) -> None:
        """Ends all processes."""
        for forms in self._forms.values():
            forms.close()
        self._compilers.close()
        self._gpu.close()

    def __enter__(self) -> GpuBackend:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Beyond Backend

    def evaluate_source(self, candidate: Candidate, source: Source) -> Outcome:
        """As `evaluate`, for a source that was not rendered here, e.g. a module's; `candidate` says what it stands for."""
        return self._finish(self._submit(candidate, source))

    def measure_again(self, candidates: Sequence[Candidate], rounds: int = 10) -> list[Timing]:
        """Measures candidates in turns, `rounds` times each, so that clocks and temperature are the same for all.

        Candidates are evaluated first where they were not. Raises ValueError for one that is not OK. Where the comparison itself
        fails twice, the timings of the evaluations are returned and `notes` says so.
        """
        if not candidates:
            return []
        outcomes = list(self.evaluate(candidates))
        entries = []
        for outcome in outcomes:
            if not outcome.ok:
                raise ValueError(f"cannot be measured again: {outcome.status}: {outcome.cause}")
            source = render(outcome.candidate.spec, outcome.candidate.configs)
            entries.append(requests.Entry(source, self._compiling[source.digest].result().cubin))
        request = requests.Compare(tuple(entries), rounds)
        limit = self.limits.trial * len(entries) + 0.1 * rounds
        for _ in range(2):
            answer = self._ask(request, limit)
            if answer.status == OK:
                return list(answer.timings)
        self.notes.append(f"finalists could not be measured in turns: {answer.cause}")
        return [outcome.timing for outcome in outcomes if outcome.timing is not None]

    def prepare_pytorch(self, spec: BlockSpec) -> None:
        """Starts building the PyTorch forms of `spec` in the background, which `pytorch` then only has to wait for."""
        if spec not in self._forms:
            gpu, limit = self.gpu, self.limits.form
            self._forms[spec] = Forms(spec, gpu.uuid, gpu.environment, limit=limit, seed=self._seed, handler=self._form)

    def pytorch_ready(self, spec: BlockSpec) -> bool:
        """Whether `pytorch` need not wait for a form that still compiles."""
        return spec in self._forms and self._forms[spec].ready

    def pytorch(self, spec: BlockSpec) -> dict[str, Timing]:
        """PyTorch form -> Timing; why one is missing is in `pytorch_failures`."""
        self.prepare_pytorch(spec)
        forms = self._forms.pop(spec)
        try:
            return forms.timings()
        finally:
            self.pytorch_failures = dict(forms.failures)
            forms.close()

    def module(self, path: Path, spec: BlockSpec) -> ModuleTiming:
        """Builds, verifies and measures exactly the emitted file; a failure is a status, as for a candidate."""
        answer = self._ask(requests.RunModule(Path(path).resolve(), spec), self.limits.module)
        timing = answer.timings[0] if answer.timings else None
        return ModuleTiming(
            answer.status,
            answer.cause,
            answer.error,
            timing,
            answer.wall_grad,
            answer.seconds.get("build", 0.0),
            answer.warnings,
        )

    # Steps

    def _begin(self, candidate: Candidate) -> _Pending:
        try:
            source = render(candidate.spec, candidate.configs)
        except (SpecError, jinja2.TemplateError) as error:
            return _Pending(candidate, cause=f"cannot be rendered: {error}")
        return self._submit(candidate, source)

    def _submit(self, candidate: Candidate, source: Source) -> _Pending:
        if source.digest not in self._compiling:
            self._compiling[source.digest] = self._compilers.submit(source)
        return _Pending(candidate, source, self._compiling[source.digest])

    def _finish(self, pending: _Pending) -> Outcome:
        candidate, source = pending.candidate, pending.source
        if source is None or pending.compiled is None:
            return Outcome(candidate, "compile_error", pending.cause)
        of = candidate.spec, source.digest  # the same source serves any batch, in another time
        if of not in self._outcomes:
            self._outcomes[of] = self._evaluate(candidate, source, pending.compiled)
        return replace(self._outcomes[of], candidate=candidate)

    def _evaluate(self, candidate: Candidate, source: Source, compiling: Future[Compiled]) -> Outcome:
        try:
            compiled = compiling.result()
        except CompileError as error:
            return Outcome(candidate, error.status, str(error), source_digest=source.digest)
        start = time.perf_counter()
        answer = self._ask(requests.Trial(requests.Entry(source, compiled.cubin)), self.limits.trial)
        return Outcome(
            candidate,
            answer.status,
            answer.cause,
            answer.error,
            answer.timings[0] if answer.timings else None,
            resources=compiled.resources,
            source_digest=source.digest,
            seconds={"compile": compiled.seconds, **answer.seconds, "trial": time.perf_counter() - start},
        )

    def _ask(self, request: requests.Trial | requests.Compare | requests.RunModule, limit: float) -> requests.Answer:
        """The GPU worker's answer; what takes the worker down becomes a failed one."""
        try:
            if isinstance(request, requests.Trial):
                self._prepare(request.entry.source.spec)
            elif isinstance(request, requests.RunModule):
                self._prepare(request.spec)
            answer: requests.Answer = self._gpu.call(request, limit)
        except WorkerTimeout:
            return requests.Answer("timeout", f"did not finish within {limit:g} s")
        except WorkerCrashed as error:
            return requests.Answer("crash", error.cause)
        except HandlerError as error:
            return requests.Answer("crash", f"the worker failed: {error.cause}")
        if answer.poisoned:
            self._gpu.kill()
        return answer

    def _prepare(self, spec: BlockSpec) -> None:
        """Starts the worker if need be and has it compute the reference of `spec`, outside the time limit of a trial."""
        first = self._gpu.starts == 0
        try:
            self._gpu.start()
            key = (self._gpu.starts, spec)
            if key not in self._prepared:
                answer: requests.Answer = self._gpu.call(requests.Prepare(spec), self.limits.prepare)
                if answer.poisoned:
                    self._gpu.kill()
                self._prepared.add(key)
        except WorkerError as error:
            if first:
                raise SpecError(f"nothing can be measured on the {self.gpu.name}: {error.cause}") from None
            raise
