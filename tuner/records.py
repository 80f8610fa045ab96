"""Records of trials: JSON lines, one per trial, appended atomically and validated when read.

The search's own storage can be thrown away; these are what is kept and committed. A record counts as a measurement only on the GPU
and driver it was made with.
"""

from __future__ import annotations

import calendar
import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from codegen.config import Config
from codegen.families import config_from_dict
from codegen.spec import BlockSpec, SpecError
from codegen.target import target
from tuner.trial import FAILURES, OK, Candidate, Outcome, Resources, Timing

VERSION = 1


@dataclass(frozen=True)
class Machine:
    """Where a trial ran. arch: the target, e.g. sm_90; gpu: the card's name and driver its driver's version, both empty
    when nothing was measured; versions: of torch, cuda, nvrtc, python."""

    arch: str
    gpu: str = ""
    driver: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def measures(self) -> bool:
        return bool(self.gpu)


@dataclass(frozen=True)
class Record:
    """One trial: what was tried, what became of it, where and when (seconds since 1970)."""

    outcome: Outcome
    machine: Machine
    time: float

    @classmethod
    def now(cls, outcome: Outcome, machine: Machine) -> Record:
        return cls(outcome, machine, time.time())

    def to_dict(self) -> dict[str, Any]:
        o = self.outcome
        return {
            "version": VERSION,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.time)),
            "spec": {**o.candidate.spec.to_dict(), "axes": list(o.candidate.spec.axes)},
            "configs": {axis: config.to_dict() for axis, config in o.candidate.configs.items()},
            "source": o.source_digest,
            "status": o.status,
            "cause": o.cause,
            "error": o.error,
            "timing": asdict(o.timing) if o.timing else None,
            "predicted_us": o.predicted_us,
            "resources": {name: asdict(r) for name, r in o.resources.items()},
            "seconds": dict(o.seconds),
            "machine": asdict(self.machine),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Record:
        """Validates every value against the space as it is now; SpecError, with the reason, when one does not fit."""
        try:
            spec = BlockSpec.from_dict(data["spec"])
            configs = {axis: parse_config(value) for axis, value in data["configs"].items()}
            if set(configs) != set(spec.axes):
                raise SpecError(f"configurations for {sorted(configs)}, but the block has {list(spec.axes)}")
            status = data["status"]
            if status != OK and status not in FAILURES:
                raise SpecError(f"unknown status {status!r}")
            machine = data["machine"]
            outcome = Outcome(
                Candidate(spec, configs),
                status,
                str(data["cause"]),
                _number(data["error"]),
                _timing(data["timing"]),
                _number(data["predicted_us"]),
                {str(k): _resources(v) for k, v in data["resources"].items()},
                str(data["source"]),
                {str(k): float(v) for k, v in data["seconds"].items()},
            )
            versions = {str(k): str(v) for k, v in machine["versions"].items()}
            where = Machine(target(machine["arch"]).arch, str(machine["gpu"]), str(machine["driver"]), versions)
            return cls(outcome, where, _seconds(data["time"]))
        except SpecError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SpecError(f"not a record: {type(error).__name__} {error}") from None


class Records:
    """The records in one file. `notes` says, after reading, which lines were left out and why."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: list[str] = []

    def append(self, record: Record) -> None:
        """Adds one line by a single write and waits until it is on disk. SpecError when the file cannot be written."""
        line = json.dumps(_finite(record.to_dict()), separators=(",", ":"), allow_nan=False).encode() + b"\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                size = os.fstat(descriptor).st_size
                if size and os.pread(descriptor, 1, size - 1) != b"\n":
                    line = b"\n" + line  # a killed writer left half a line: it must not swallow this one
                if os.write(descriptor, line) != len(line):
                    raise OSError("the disk is full")
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise SpecError(f"records cannot be written to {self.path}: {error.strerror or error}") from None

    def read(self) -> list[Record]:
        """Every valid record, oldest first. Torn, foreign and outdated lines are left out with a note; a missing file is empty."""
        self.notes = []
        found: list[Record] = []
        try:
            lines = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return found
        except OSError as error:
            raise SpecError(f"records cannot be read from {self.path}: {error.strerror or error}") from None
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                data = json.loads(line)
            except ValueError:
                self.notes.append(f"line {number}: torn, left out")
                continue
            version = data.get("version") if isinstance(data, dict) else None
            if version != VERSION:
                self.notes.append(f"line {number}: format version {version!r} is not {VERSION}, left out")
                continue
            try:
                found.append(Record.from_dict(data))
            except SpecError as error:
                self.notes.append(f"line {number}: {error}, left out")
        return found

    def matching(self, spec: BlockSpec, gpu: str, driver: str) -> list[Record]:
        """The records of `spec` measured on this GPU with this driver, oldest first; those made elsewhere are only noted."""
        same = [r for r in self.read() if r.outcome.candidate.spec == spec]
        here = [r for r in same if gpu and r.machine.gpu == gpu and r.machine.driver == driver]
        if len(here) < len(same):
            elsewhere = sorted({f"{r.machine.gpu or 'no GPU'} driver {r.machine.driver or '-'}" for r in same if r not in here})
            self.notes.append(f"{len(same) - len(here)} trials of {'; '.join(elsewhere)} are not reused as measured here")
        return here


def records_path(directory: Path, stem: str) -> Path:
    """Where the records of the module `stem` in `directory` lie."""
    return directory / "records" / f"{stem}.jsonl"


def parse_config(data: Mapping[str, Any]) -> Config:
    """The configuration, of whichever family, that `data` states; SpecError when there is none such."""
    if not isinstance(data, Mapping):
        raise SpecError(f"not a configuration: {data!r}")
    return config_from_dict(data)


def _timing(data: Mapping[str, Any] | None) -> Timing | None:
    if data is None:
        return None
    timing = Timing(
        float(data["device"]),
        float(data["spread"]),
        float(data["cold"]),
        float(data["wall"]),
        int(data["samples"]),
        int(data["sm_clock"]),
        int(data["memory_clock"]),
    )
    if not 0 < timing.device < math.inf or not 0 <= timing.spread < math.inf:
        raise SpecError(f"a device time of {timing.device} us")
    return timing


def _resources(data: Mapping[str, Any]) -> Resources:
    return Resources(int(data["registers"]), int(data["local_bytes"]), int(data["shared_bytes"]))


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _finite(value: Any) -> Any:
    """JSON has no infinities: they are written as text, which float() reads."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _seconds(text: str) -> float:
    return float(calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ")))
