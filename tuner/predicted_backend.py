"""Evaluating without a GPU: NVRTC compiles for the target, the model predicts, the emulator confirms the few that matter."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import replace

import jinja2

from codegen.families import plan_of
from codegen.render import Source, render
from codegen.spec import BlockSpec, SpecError
from codegen.target import Target
from tuner.compile import COMPILE_SECONDS, Compiled, CompileError, Compilers
from tuner.predict import Calibration, calibration, predict_axis
from tuner.records import Machine
from tuner.trial import OK, Candidate, Outcome, Resources

Confirm = Callable[[Source, BlockSpec], tuple[bool, float | None, str]]
"""Checks a source's kernels: (whether they are right, error, cause)."""


EMULATED_MULTIPLICATIONS = 400_000_000
"""Multiply-adds of one forward that the emulator is given: with the verification's cases about a minute's work for one core."""

_Pending = tuple[Candidate, Source, Future[Compiled] | None]


class PredictedBackend:
    """A Backend that never measures. Candidates compile a few ahead, in parallel; `confirm` runs one on the emulator.

    Compiled sources are kept by digest, so the finalists cost no second compilation.
    """

    def __init__(
        self,
        target: Target,
        *,
        seed: int = 0,
        tolerance: float = 1e-5,
        timeout: float = COMPILE_SECONDS,
        by: Calibration | None = None,
        confirm: Confirm | None = None,
        compilers: Compilers | None = None,
    ) -> None:
        from tuner.gpu import versions

        self.target = target
        self.calibration = by or calibration()
        self.machine = Machine(target.arch, versions=versions())
        self._compilers = compilers or Compilers(target, timeout=timeout)
        self._confirm = confirm or _Emulated(seed, tolerance)
        self._done: dict[str, Compiled | CompileError] = {}

    def evaluate(self, candidates: Iterable[Candidate]) -> Iterator[Outcome]:
        """Compiles and predicts; an Outcome is OK without its kernels having run (see confirm)."""
        waiting: deque[_Pending | Outcome] = deque()
        taken = iter(candidates)
        ahead = self._compilers.workers + 1
        more = True
        while more or waiting:
            while more and len(waiting) < ahead:
                candidate = next(taken, None)
                if candidate is None:
                    more = False
                    break
                waiting.append(self._begin(candidate))
            if waiting:
                pending = waiting.popleft()
                yield pending if isinstance(pending, Outcome) else self._outcome(*pending)

    def _begin(self, candidate: Candidate) -> _Pending | Outcome:
        try:
            source = render(candidate.spec, candidate.configs)
        except (SpecError, jinja2.TemplateError) as error:
            return Outcome(candidate, "compile_error", f"cannot be rendered: {error}")
        return candidate, source, None if source.digest in self._done else self._compilers.submit(source)

    def _outcome(self, candidate: Candidate, source: Source, future: Future[Compiled] | None) -> Outcome:
        if future is not None:
            try:
                self._done[source.digest] = future.result()
            except CompileError as error:
                self._done[source.digest] = error
        done = self._done[source.digest]
        if isinstance(done, CompileError):
            return Outcome(candidate, done.status, str(done), source_digest=source.digest)
        return Outcome(
            candidate,
            OK,
            predicted_us=self._predict(candidate, done.resources),
            resources=done.resources,
            source_digest=source.digest,
            seconds={"compile": done.seconds},
        )

    def _predict(self, candidate: Candidate, resources: dict[str, Resources]) -> float:
        total = 0.0
        for axis, config in candidate.configs.items():
            plan = plan_of(candidate.spec.problem(axis), config)
            # One launch of two can hide behind the kernel before it; the model knows only whole kernels.
            total += predict_axis(plan, resources, self.target, self.calibration)
        return total

    def confirm(self, candidate: Candidate) -> Outcome:
        """The candidate's Outcome after its kernels ran on the emulator against the float64 reference, on blocks as `emulated` has
        them. `error` is None where the block is too large for the emulator."""
        outcome = next(self.evaluate([candidate]))
        if not outcome.ok:
            return outcome
        start, errors = time.perf_counter(), []
        for spec in emulated(candidate.spec):
            source = render(spec, {axis: candidate.configs[axis] for axis in spec.axes})
            right, error, cause = self._confirm(source, spec)
            if not right:
                return replace(outcome, status="wrong", cause=cause, error=error)
            errors.append(error or 0.0)
        seconds = {**outcome.seconds, "emulate": time.perf_counter() - start}
        return replace(outcome, error=max(errors, default=None), seconds=seconds)

    def close(self) -> None:
        self._compilers.close()


def emulated(spec: BlockSpec) -> tuple[BlockSpec, ...]:
    """The blocks that stand for `spec` on the emulator: itself with a batch of 1, or, where that would take minutes, each axis alone at
    its full length, on two lines of the grid. Empty where even that is too much."""
    whole = replace(spec, batch=1)
    if _multiplications(whole) <= EMULATED_MULTIPLICATIONS:
        return (whole,)
    other = {"row": "height", "col": "width"}
    alone = tuple(replace(whole, axes=(axis,), **{other[axis]: min(2, getattr(spec, other[axis]))}) for axis in spec.axes)
    return alone if sum(map(_multiplications, alone)) <= 2 * EMULATED_MULTIPLICATIONS else ()


def _multiplications(spec: BlockSpec) -> int:
    """Multiply-adds of one forward."""
    tokens = spec.batch * spec.height * spec.width
    return sum(tokens * (4 * spec.dim + 2 * spec.problem(axis).length) * spec.inner for axis in spec.axes)


class _Emulated:
    """Confirms with the emulator and the verification that every candidate on a GPU passes too."""

    def __init__(self, seed: int, tolerance: float) -> None:
        self._seed, self._tolerance = seed, tolerance

    def __call__(self, source: Source, spec: BlockSpec) -> tuple[bool, float | None, str]:
        from tuner.emulator import EmulationError, Emulator
        from tuner.verify import Checker

        try:
            check = Checker(spec, self._seed, tolerance=self._tolerance)(Emulator(source).run)
        except EmulationError as error:
            return False, None, str(error).splitlines()[0]
        return check.ok, check.error, check.cause
