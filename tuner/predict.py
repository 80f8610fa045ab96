"""Predicting a kernel's time without a GPU: what it has to do (tuner/work.py), weighted by a few coefficients.

A kernel's time is modelled as a sum of parts, each in microseconds at nominal rates and each growing with one kind of work.
Coefficients are non-negative, so more work of any kind is never predicted to be faster. They are fitted to recorded
measurements (fit) and committed in calibration.json. What such a model is good for is ranking; spearman and regret say how good.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from codegen.families import Plan, plan_of
from codegen.sequence import SequencePlan
from codegen.spec import SpecError
from codegen.target import Target
from codegen.target import target as target_of
from tuner.records import Record
from tuner.streamed_work import streamed_parts
from tuner.trial import OK, Resources
from tuner.work import NAMES, Parts, parts

CALIBRATION = Path(__file__).with_name("calibration.json")

# Where a fit starts, and stays for the parts that the measurements say nothing about: at a small block, the time of x and y at
# full bandwidth cannot be told from the launch, and yet it is what rules a large one.
# Rounded from what fits trials on an H200, or the nominal rate.
STARTING = {
    "launch": 1.5, "tensor": 1.0, "issue": 1.0, "serial": 4.0, "shared": 0.5, "wait": 1.0, "grid": 1.0, "weights": 0.5, "spill": 3.0,
}  # fmt: skip


@dataclass(frozen=True)
class Calibration:
    """One coefficient per part (1 means the nominal rate), and where they come from: a line for people."""

    coefficients: Mapping[str, float]
    origin: str

    @classmethod
    def load(cls, path: Path = CALIBRATION) -> Calibration:
        """SpecError when the file is missing or does not hold exactly one finite coefficient >= 0 per part."""
        try:
            data = json.loads(path.read_text())
            coefficients = {name: float(data["coefficients"][name]) for name in data["coefficients"]}
            origin = str(data["origin"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise SpecError(f"{path} is not a calibration: {error}") from None
        if set(coefficients) != set(NAMES) or not all(0.0 <= c < math.inf for c in coefficients.values()):
            raise SpecError(f"{path} must hold one coefficient >= 0 for each of {', '.join(NAMES)}")
        return cls(coefficients, origin)

    def save(self, path: Path = CALIBRATION) -> None:
        path.write_text(json.dumps({"origin": self.origin, "coefficients": dict(self.coefficients)}, indent=2) + "\n")

    def microseconds(self, parts: Parts) -> float:
        return sum(self.coefficients[name] * getattr(parts, name) for name in NAMES)


@lru_cache(maxsize=1)
def calibration() -> Calibration:
    """The committed calibration."""
    return Calibration.load()


def predict(plan: SequencePlan, resources: Resources, target: Target, by: Calibration | None = None) -> float:
    """Microseconds one kernel of the sequence family is expected to take."""
    return (by or calibration()).microseconds(parts(plan, resources, target))


def predict_axis(plan: Plan, resources: Mapping[str, Resources], target: Target, by: Calibration | None = None) -> float:
    """Microseconds the kernels of one axis are expected to take; resources: by kernel name."""
    found = axis_parts(plan, resources, target)
    if found is None:
        raise SpecError(f"the resources of the {plan.problem.axis} axis' kernels are not known")
    return (by or calibration()).microseconds(found)


def axis_parts(plan: Plan, resources: Mapping[str, Resources], target: Target) -> Parts | None:
    """The parts of one axis' time; None when the resources of one of its kernels are missing."""
    name = f"axial_{plan.problem.axis}"
    if isinstance(plan, SequencePlan):
        return parts(plan, resources[name], target) if name in resources else None
    by_stage = {stage: resources.get(f"{name}_{stage}") for stage in plan.kernels}
    known = {stage: used for stage, used in by_stage.items() if used is not None}
    return streamed_parts(plan, known, target) if len(known) == len(by_stage) else None


@dataclass(frozen=True)
class Sample:
    """A measurement to fit to: the parts of each kernel of a block, summed, and the microseconds of the whole."""

    parts: Parts
    measured: float


def samples(records: Iterable[Record]) -> list[Sample]:
    """What records can teach: working, measured trials with known resources, by their architecture's nominal rates."""
    found = []
    for record in records:
        outcome = record.outcome
        if outcome.status != OK or outcome.timing is None or not outcome.resources:
            continue
        by_axis = []
        for axis, config in outcome.candidate.configs.items():
            plan = plan_of(outcome.candidate.spec.problem(axis), config)
            part = axis_parts(plan, outcome.resources, target_of(record.machine.arch))
            if part is not None:
                by_axis.append(part)
        if len(by_axis) == len(outcome.candidate.configs):
            total = Parts(**{name: sum(getattr(p, name) for p in by_axis) for name in NAMES})
            found.append(Sample(total, outcome.timing.device))
    return found


def fit(data: Sequence[Sample], origin: str, *, prior: float = 1e-4, sweeps: int = 20_000) -> Calibration:
    """The non-negative coefficients with the least mean squared relative error, by coordinate descent (the problem is convex).

    prior: what it costs, in squared relative error, to move one coefficient by as much as its starting value; at 1e-4 that
    matters only where the measurements leave a choice. SpecError with fewer samples than coefficients."""
    if len(data) < len(NAMES):
        raise SpecError(f"{len(data)} measured records are too few to fit {len(NAMES)} coefficients: tune on a GPU first")
    start = [STARTING[name] for name in NAMES]
    rows = [[getattr(s.parts, name) / s.measured for name in NAMES] for s in data]
    n, count = len(NAMES), len(data)
    gram = [[sum(row[i] * row[j] for row in rows) / count for j in range(n)] for i in range(n)]
    right = [sum(row[i] for row in rows) / count for i in range(n)]
    for i in range(n):
        gram[i][i] += prior / start[i] ** 2
        right[i] += prior / start[i]
    found = list(start)
    for _ in range(sweeps):
        largest = 0.0
        for i in range(n):
            if gram[i][i] <= 0.0:
                continue
            rest = right[i] - sum(gram[i][j] * found[j] for j in range(n) if j != i)
            new = max(0.0, rest / gram[i][i])
            largest = max(largest, abs(new - found[i]) * math.sqrt(gram[i][i]))
            found[i] = new
        if largest < 1e-10:
            break
    return Calibration({name: float(f"{value:.4g}") for name, value in zip(NAMES, found, strict=True)}, origin)


def origin_of(records: Sequence[Record]) -> str:
    """A line that says what a calibration was fitted to: how many trials of which blocks, on which GPU, driver and day."""
    used = [r for r in records if r.outcome.ok and r.outcome.timing is not None and r.outcome.resources]
    blocks = ", ".join(sorted({r.outcome.candidate.spec.name for r in used}))
    machines = ", ".join(sorted({f"{r.machine.gpu}, driver {r.machine.driver}" for r in used}))
    days = ", ".join(sorted({time.strftime("%Y-%m-%d", time.gmtime(r.time)) for r in used}))
    return f"fitted to {len(used)} measured trials of {blocks} ({machines}; {days})"


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation of two lists of equal length, ties at their mean rank; 0 when either is constant."""
    a, b = _ranks(first), _ranks(second)
    mean = (len(a) - 1) / 2
    cross = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    norm = math.sqrt(sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b))
    return cross / norm if norm else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for at in order[start : end + 1]:
            ranks[at] = (start + end) / 2
        start = end + 1
    return ranks


def quality(data: Sequence[Sample], by: Calibration | None = None) -> float:
    """How well the model ranks measurements: Spearman's correlation of predicted and measured times."""
    model = by or calibration()
    return spearman([model.microseconds(s.parts) for s in data], [s.measured for s in data])


def regret(data: Sequence[Sample], by: Calibration | None = None, among: int = 1) -> float:
    """How much slower the best of the `among` that the model ranks first was measured to be than the best of all: 0 is none, 0.1 10 %."""
    model = by or calibration()
    first = sorted(data, key=lambda s: model.microseconds(s.parts))[:among]
    return min(s.measured for s in first) / min(s.measured for s in data) - 1.0
