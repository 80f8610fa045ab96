"""What the measuring backend asks its GPU worker, and the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from codegen.render import Source
from codegen.spec import BlockSpec
from tuner.trial import OK, Timing


@dataclass(frozen=True)
class Prepare:
    """Compute the float64 reference of `spec`, once."""

    spec: BlockSpec


@dataclass(frozen=True)
class Entry:
    """A compiled source."""

    source: Source
    cubin: bytes


@dataclass(frozen=True)
class Trial:
    """Verify an entry and, if it is right, measure it."""

    entry: Entry


@dataclass(frozen=True)
class Compare:
    """Measure verified entries in turns."""

    entries: tuple[Entry, ...]
    rounds: int


@dataclass(frozen=True)
class RunModule:
    """Build, verify and measure an emitted module as it is deployed."""

    path: Path
    spec: BlockSpec


@dataclass(frozen=True)
class Answer:
    """status, cause, error: as in tuner.trial.Outcome. timings: one, or one per compared entry. wall_grad: microseconds per call with grad
    mode on, of a module; warnings: what a module warned of; seconds: by step. poisoned: the CUDA context is lost, or what lies in it is no
    longer to be trusted, so that the process has to be replaced."""

    status: str = OK
    cause: str = ""
    error: float | None = None
    timings: tuple[Timing, ...] = ()
    wall_grad: float = 0.0
    warnings: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    poisoned: bool = False
