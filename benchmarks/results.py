"""What a comparison found, and its form as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.cases import SHAPES, SHORT, Case
from benchmarks.floors import Ceilings, Floors
from codegen.spec import SpecError
from tuner.trial import Timing

FORMAT = 1


@dataclass(frozen=True)
class Measured:
    """A verified implementation. error: the largest, against float64, over the output's scale; what: the file or the configuration;
    source: SHA-256 of a module's CUDA source; wall_grad: microseconds per call with grad mode on; build_seconds: until the first result."""

    timing: Timing
    error: float | None = None
    what: str = ""
    source: str = ""
    wall_grad: float = 0.0
    build_seconds: float = 0.0


@dataclass(frozen=True)
class Result:
    """One case. pytorch: form -> Timing. rival: the fused Triton kernels; module: ours. notes: why something is missing, a line each."""

    case: Case
    floors: Floors
    pytorch: Mapping[str, Timing] = dataclasses.field(default_factory=dict)
    rival: Measured | None = None
    module: Measured | None = None
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> tuple[str, Timing] | None:
        """PyTorch's fastest form by device time."""
        return min(self.pytorch.items(), key=lambda item: item[1].device) if self.pytorch else None

    @property
    def gain(self) -> float | None:
        """How many times faster the module is than PyTorch's fastest form, in device time."""
        return self.best[1].device / self.module.timing.device if self.best and self.module else None

    @property
    def rival_gain(self) -> float | None:
        return self.rival.timing.device / self.module.timing.device if self.rival and self.module else None

    @property
    def above_floor(self) -> float | None:
        return self.module.timing.device / self.floors.least if self.module else None


@dataclass(frozen=True)
class Report:
    """One run on one GPU. seconds: how long it took, without tuning; complete: whether every case that was asked for had its turn."""

    date: str
    gpu: str
    arch: str
    driver: str
    versions: Mapping[str, str]
    command: str
    ceilings: Ceilings
    results: tuple[Result, ...] = ()
    seconds: float = 0.0
    complete: bool = False

    def to_json(self) -> str:
        data = {"format": FORMAT, **dataclasses.asdict(self)}
        for result in data["results"]:
            result["case"] = {"shape": result["case"]["shape"]["name"], "dtype": result["case"]["dtype"]}
        return json.dumps(data, indent=1) + "\n"


def geometric_mean(values: Iterable[float]) -> float | None:
    """None without values."""
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else None


def mean_gain(report: Report, dtype: str) -> tuple[float | None, int]:
    """The geometric mean of the modules' gains over PyTorch's best form, and over how many shapes."""
    gains = [result.gain for result in report.results if result.case.dtype == dtype and result.gain is not None]
    return geometric_mean(gains), len(gains)


def from_json(text: str) -> Report:
    """The inverse of Report.to_json; SpecError when the text is no such report."""
    try:
        data = json.loads(text)
        if data.pop("format") != FORMAT:
            raise SpecError(f"its format is not {FORMAT}")
        data["ceilings"] = Ceilings(**data["ceilings"])
        data["results"] = tuple(_result(result) for result in data["results"])
        return Report(**data)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SpecError(f"this is no result of benchmarks.compare: {cause}") from None


def _result(data: dict[str, Any]) -> Result:
    return Result(
        _case(**data.pop("case")),
        Floors(**data.pop("floors")),
        {form: Timing(**timing) for form, timing in data.pop("pytorch").items()},
        _measured(data.pop("rival")),
        _measured(data.pop("module")),
        tuple(data.pop("notes")),
        **data,
    )


def _case(shape: str, dtype: str) -> Case:
    if dtype not in SHORT:
        raise SpecError(f"{dtype!r} is no element type")
    return Case({one.name: one for one in SHAPES}[shape], dtype)


def _measured(data: dict[str, Any] | None) -> Measured | None:
    return None if data is None else Measured(**{**data, "timing": Timing(**data["timing"])})
