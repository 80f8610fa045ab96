"""What runs in the worker process that owns the GPU: verify, then measure. The parent is tuner.gpu_backend.

Requests and answers are those of tuner.requests.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from codegen.library import KERNELS
from codegen.reference import random_input, random_weights, torch_dtype
from codegen.spec import BlockSpec
from codegen.terms import random_terms, split_terms
from tuner import gpu
from tuner.launch import LaunchError, Loaded, MemoryFault
from tuner.measure import FINAL, Forward, measure, measure_interleaved, wall
from tuner.requests import Answer, Compare, Prepare, RunModule, Trial
from tuner.verify import Check, Checker, Runner

_SETS = 4  # inputs that a measurement rotates over
_REPEATS = 2  # runs of each case of a verification: some races show only now and then


class GpuWorker:
    """The handler: answers a request with an Answer; only a fault of this program raises.

    uuid: of the GPU, for its clocks; it is cuda:0 here. seed: of inputs and weights; tolerance: error allowed, of the output's scale.
    """

    def __init__(self, uuid: str, seed: int, tolerance: float) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("PyTorch finds no usable GPU")
        torch.cuda.init()
        torch.set_float32_matmul_precision("highest")  # whatever the environment says
        torch.empty(1, device="cuda")
        self._state = partial(gpu.state, uuid)
        self._seed, self._tolerance = seed, tolerance
        self._checkers: dict[BlockSpec, tuple[Checker, int]] = {}
        self._inputs: dict[BlockSpec, Inputs] = {}

    def __call__(self, request: Any) -> Answer:
        answers: dict[type, Callable[[Any], Answer]] = {
            Prepare: self._prepare,
            Trial: self._trial,
            Compare: self._compare,
            RunModule: self._module,
        }
        try:
            return answers[type(request)](request)
        except LaunchError as error:
            return Answer("fault" if error.fault else "launch_error", str(error), poisoned=error.fault)
        except MemoryFault as error:
            return Answer("fault", str(error), poisoned=True)
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            return Answer("launch_error", f"out of memory: {_line(error)}")
        except Exception as error:
            lost = poison()
            if lost is None:
                raise
            return Answer("fault", _line(lost) if "CUDA" in str(lost) else _line(error), poisoned=True)

    def checker(self, spec: BlockSpec) -> Checker:
        """The verification of `spec`, with its references on the GPU, or on the CPU where they do not fit."""
        if spec not in self._checkers:
            if len(self._checkers) > 3:
                self._checkers.clear()
            try:
                checker = Checker(spec, self._seed, "cuda", self._tolerance, repeats=_REPEATS)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                checker = Checker(spec, self._seed, "cpu", self._tolerance, repeats=_REPEATS)
            self._checkers[spec] = checker, _fingerprint(checker)
        return self._checkers[spec][0]

    def verify(self, spec: BlockSpec, runner: Runner) -> Check:
        """MemoryFault when the runner has overwritten what it is compared with: the next one must not be blamed."""
        check = self.checker(spec)(runner)
        checker, print_before = self._checkers[spec]
        if _fingerprint(checker) != print_before:
            raise MemoryFault("a kernel overwrote memory that is not its own")
        return check

    def inputs(self, spec: BlockSpec) -> Inputs:
        if spec not in self._inputs:
            if len(self._inputs) > 3:
                self._inputs.clear()
            self._inputs[spec] = Inputs.random(spec, self._seed)
        return self._inputs[spec]

    def _prepare(self, request: Prepare) -> Answer:
        start = time.perf_counter()
        self.checker(request.spec)
        torch.cuda.synchronize()
        return Answer(seconds={"prepare": time.perf_counter() - start})

    def _trial(self, request: Trial) -> Answer:
        entry, start = request.entry, time.perf_counter()
        loaded = Loaded(entry.source, entry.cubin)
        try:
            check = self.verify(entry.source.spec, loaded)
            verified = time.perf_counter()
            seconds = {"verify": verified - start}
            if not check.ok:
                return Answer("wrong", check.cause, _error(check), seconds=seconds)
            timing = measure(self.inputs(entry.source.spec).bound(loaded), state=self._state)
            torch.cuda.synchronize()
            seconds["measure"] = time.perf_counter() - verified
            return Answer(error=_error(check), timings=(timing,), seconds=seconds)
        finally:
            loaded.unload()

    def _compare(self, request: Compare) -> Answer:
        several = [Loaded(entry.source, entry.cubin) for entry in request.entries]
        try:
            forwards = [self.inputs(one.spec).bound(one) for one in several]
            return Answer(timings=tuple(measure_interleaved(forwards, request.rounds, state=self._state)))
        finally:
            for one in several:
                one.unload()

    def _module(self, request: RunModule) -> Answer:
        from codegen.module import load_module

        spec, start = request.spec, time.perf_counter()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module = load_module(request.path)
            model = module.ModelNew(spec.dim, spec.heads, spec.height, spec.width).to("cuda", torch_dtype(spec))

            def run(x: Tensor, weights: Mapping[str, Tensor], grad: bool = False) -> Tensor:
                parameters, terms = split_terms(spec, weights)
                model.load_state_dict(parameters)
                with nullcontext() if grad else torch.no_grad():
                    return model(x.cuda(), *(term.cuda() for term in terms)).detach().to(x.device)

            inputs = self.inputs(spec)
            run(inputs.x[0], inputs.weights)
            torch.cuda.synchronize()
            seconds = {"build": time.perf_counter() - start}
            if module.USE == KERNELS and module._launch is None:
                cause = "; ".join(_messages(caught)) or "no reason given"
                return Answer("launch_error", f"its kernels did not run: {cause}", seconds=seconds)
            check = self.verify(spec, run)
            if check.ok:
                check = self.verify(spec, partial(run, grad=True))
            if not check.ok:
                return Answer("wrong", check.cause, _error(check), warnings=_messages(caught), seconds=seconds)
            parameters, terms = split_terms(spec, inputs.weights)
            model.load_state_dict(parameters)
            timing = measure([no_grad_forward(model, x, *terms) for x in inputs.x], FINAL, self._state)
            timing = dataclasses.replace(timing, wall=wall(no_grad_forward(model, inputs.x[0], *terms)))
            wall_grad = wall(partial(model, inputs.x[0], *terms))
        return Answer(error=_error(check), timings=(timing,), wall_grad=wall_grad, warnings=_messages(caught), seconds=seconds)


@dataclass(frozen=True)
class Inputs:
    """What measurements run on: several random inputs x, as many outputs y, one set of weights with nothing trivial in it, and the
    terms of the logits among them where the block has any."""

    x: tuple[Tensor, ...]
    y: tuple[Tensor, ...]
    weights: dict[str, Tensor]

    @classmethod
    def random(cls, spec: BlockSpec, seed: int) -> Inputs:
        generator = torch.Generator("cuda").manual_seed(seed)
        x = tuple(random_input(spec, generator) for _ in range(_SETS))
        return cls(x, tuple(torch.empty_like(one) for one in x), random_weights(spec, generator) | random_terms(spec, generator))

    def bound(self, loaded: Loaded) -> list[Forward]:
        return [loaded.bind(x, self.weights, y) for x, y in zip(self.x, self.y, strict=True)]


def poison() -> Exception | None:
    """The error that a lost CUDA context answers everything with; None when the context is sound."""
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").item()
    except Exception as error:
        return error
    return None


def no_grad_forward(model: Callable[..., Tensor], *inputs: Tensor) -> Forward:
    """An inference call of `model`."""

    def forward() -> object:
        with torch.no_grad():
            return model(*inputs)

    return forward


def _error(check: Check) -> float:
    return max(check.error, check.branch_error)


def _fingerprint(checker: Checker) -> int:
    """A sum over the bits of all inputs, weights and references."""
    tensors = [t for case in checker.cases for t in (case.x, case.expected, *case.weights.values())]
    words = {1: torch.uint8, 2: torch.int16}
    return sum(int(t.view(words.get(t.element_size(), torch.int32)).sum(dtype=torch.int64)) for t in tensors)


def _line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _messages(caught: list[warnings.WarningMessage]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(" ".join(str(one.message).split()) for one in caught))
