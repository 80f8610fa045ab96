"""The values that pass between the search and whatever evaluates a candidate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from codegen.config import Config
from codegen.spec import BlockSpec

OK = "ok"
FAILURES = {
    "compile_error": "did not compile",
    "compile_timeout": "the compiler did not return in time",
    "wrong": "disagreed with the float64 reference",
    "fault": "illegal access or another device fault",
    "launch_error": "could not be launched",
    "timeout": "did not finish in time",
    "crash": "the worker process died",
}


@dataclass(frozen=True)
class Candidate:
    """One configuration of each of the block's axes. A search of one axis uses a one-axis spec."""

    spec: BlockSpec
    configs: Mapping[str, Config]


@dataclass(frozen=True)
class Timing:
    """Microseconds for one forward of the block.

    device: median of CUDA-graph replays with a warm L2; spread: half the interquartile range of those replays.
    cold: median device time with L2 flushed before each forward; wall: median host time per call in a loop.
    samples: number of timed replays. sm_clock, memory_clock: MHz read while measuring, 0 where unknown.
    """

    device: float
    spread: float
    cold: float = 0.0
    wall: float = 0.0
    samples: int = 0
    sm_clock: int = 0
    memory_clock: int = 0


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel uses: registers and bytes of local memory (spilled registers) a thread, dynamic shared memory in bytes."""

    registers: int
    local_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Outcome:
    """What became of one candidate.

    status: OK or a key of FAILURES; cause: one line that says why, empty when OK.
    error: the largest error against float64 over the scale of the output (and of the branch without the residual).
    timing: None unless it was measured. predicted_us: what the model expects, None unless it was asked.
    source_digest: SHA-256 of the CUDA source; seconds: time spent per step, by name.
    """

    candidate: Candidate
    status: str
    cause: str = ""
    error: float | None = None
    timing: Timing | None = None
    predicted_us: float | None = None
    resources: Mapping[str, Resources] = field(default_factory=dict)
    source_digest: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.status == OK

    @property
    def score(self) -> float:
        """Microseconds to rank by: measured if it was, else predicted; infinity for a failure."""
        if not self.ok:
            return float("inf")
        if self.timing is not None:
            return self.timing.device
        return self.predicted_us if self.predicted_us is not None else float("inf")


class Backend(Protocol):
    """Evaluates candidates: on a GPU, by the model and the emulator, or (in tests) by recorded measurements."""

    def evaluate(self, candidates: Iterable[Candidate]) -> Iterator[Outcome]:
        """Outcomes in the order of the candidates. Takes from the iterable lazily, a few ahead, to compile in
        parallel; a failing candidate yields a failed Outcome and never raises."""
        ...

    def close(self) -> None: ...
