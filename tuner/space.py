"""Which configurations of an axis are legal, and how any draw becomes one of them.

A space is the product of the tunables' values less what its plan's `reasons` forbid. Samplers need a static product, so a
draw is projected: tunable by tunable in the order of declaration, the value nearest to the drawn one for which the rest can
still be completed. Whether it can is asked of one completion, the frugal one: each later tunable at the value that
meets the fewest objections. Resources only grow away from it, so what it cannot complete nothing else can (a test compares
with brute force).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from codegen.config import Config, Value
from codegen.families import FAMILIES, having, plan_of
from codegen.sequence import DTYPE_MATHS, SequenceConfig, SequencePlan
from codegen.spec import AxisProblem, BlockSpec, SpecError
from codegen.staged import StagedPlan
from codegen.target import Target

FP32_TOLERANCE = 1e-5
"""The largest error, relative to the output's scale, that float32 kernels may have unless the user relaxes it."""
TF32_TOLERANCE = 1e-4
"""Above this tolerance a single TF32 product is admitted (its operands have 11 significant bits)."""

FP32_MATHS = ("ffma", "tf32x3", "fp16x3")
"""The arithmetics that hold FP32_TOLERANCE."""

SMALLER = "choose a smaller dim or a shorter axis"
_SAMPLE = 48


def allowed_maths(tolerance: float, dtype: str = "float32") -> tuple[str, ...]:
    """The arithmetics of the products that can hold `tolerance`, which is float32's: a 16-bit type has arithmetics of its own."""
    if dtype != "float32":
        return DTYPE_MATHS[dtype]
    return (*FP32_MATHS, "tf32") if tolerance > TF32_TOLERANCE else FP32_MATHS


def parse_fixed(texts: Iterable[str]) -> dict[str, Value]:
    """`name=value` texts of a command line as values of tunables, or of `family`; SpecError with the choices when one is not."""
    tunables: dict[str, tuple[Value, ...]] = {"family": tuple(FAMILIES)}
    for family in FAMILIES.values():
        for name, values in family.config.tunables().items():
            tunables[name] = tuple(dict.fromkeys((*tunables.get(name, ()), *values)))  # of all that have it
    fixed: dict[str, Value] = {}
    for text in texts:
        name, equals, word = text.partition("=")
        if not equals or name not in tunables:
            raise SpecError(f"{text!r} is not NAME=VALUE with NAME among {', '.join(tunables)}")
        matching = [value for value in tunables[name] if str(value).lower() == word.strip().lower()]
        if not matching:
            raise SpecError(f"{name} must be one of {', '.join(map(str, tunables[name]))}, not {word!r}")
        fixed[name] = matching[0]
    return fixed


@dataclass(frozen=True)
class Space:
    """The legal configurations of one axis on one target.

    values: tunable -> the values a search may take, in the order of declaration; a fixed tunable has one.
    start: the configuration a search begins with, legal and inside `values`.
    """

    problem: AxisProblem
    target: Target
    values: Mapping[str, tuple[Value, ...]]
    start: Config

    @property
    def config_type(self) -> type[Config]:
        """The family's configuration."""
        return type(self.start)

    def legal(self, config: Config) -> bool:
        """Whether the configuration is of this space, restrictions included."""
        return (
            isinstance(config, self.config_type)
            and all(getattr(config, name) in values for name, values in self.values.items())
            and not plan_of(self.problem, config).reasons(self.target)
        )

    def focused(self, names: Iterable[str], around: Config) -> Space:
        """The part of the space in which the tunables `names` vary and all others are as in `around`, where a search of it starts."""
        free = set(names)
        values = {name: options if name in free else (getattr(around, name),) for name, options in self.values.items()}
        return Space(self.problem, self.target, values, around)

    def starts(self) -> list[Config]:
        """`start`, and the family's starts for each arithmetic, where they are in the space."""
        family = FAMILIES[self.config_type.family]
        others = (start for math in self.values["math"] for start in family.starts(self.problem, self.target, str(math)))
        return list(dict.fromkeys([self.start, *(self.canonical(start) for start in others if self.legal(start))]))

    @property
    def digest(self) -> str:
        """Eight hex digits that change with the space: a study of another digest is another study."""
        text = json.dumps({"values": self.values, "target": self.target.arch, "problem": _identity(self.problem)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    @cached_property
    def frugal(self) -> dict[str, Value]:
        """Tunable -> the value that leaves the most room, found from the last tunable to the first on a fixed sample; together they are
        legal where the start is."""
        draw = random.Random(0)
        sample = [{name: draw.choice(values) for name, values in self.values.items()} for _ in range(_SAMPLE)]
        found: dict[str, Value] = {}
        for name in reversed(list(self.values)):
            objections = {value: self._objections([{**context, **found, name: value} for context in sample]) for value in self.values[name]}
            found[name] = min(self.values[name], key=lambda value: objections[value])
        begin = config_values(self.start)
        kept = {name: begin[name] if begin[name] in options else options[0] for name, options in self.values.items()}
        if not self._reasons(found) or self._reasons(kept):
            return found
        # Values that leave room one by one exclude each other: the start's then, and of those as many as go with it.
        for name in reversed(list(self.values)):
            if not self._reasons(thriftier := {**kept, name: found[name]}):
                kept = thriftier
        return kept

    def _objections(self, sample: Iterable[Mapping[str, Value]]) -> tuple[int, int]:
        """How many objections a sample meets, and what it takes in shared memory and registers."""
        plans = [plan_of(self.problem, self.config_type(**values)) for values in sample]
        objections = sum(len(plan.reasons(self.target)) for plan in plans)
        return objections, sum(plan.shared_bytes + 4 * plan.registers * plan.threads for plan in plans)

    def _reasons(self, values: Mapping[str, Value]) -> list[str]:
        return plan_of(self.problem, self.config_type(**values)).reasons(self.target)

    def _can(self, chosen: Mapping[str, Value]) -> bool:
        """Whether values for the first few tunables can be completed to a legal configuration."""
        return not self._reasons({**self.frugal, **chosen})

    def project(self, drawn: Mapping[str, Value]) -> Config:
        """The legal, canonical configuration near `drawn` (any value of the space per tunable); deterministic."""
        chosen: dict[str, Value] = {}
        for name, values in self.values.items():
            wanted = values.index(drawn[name])
            near = sorted(values, key=lambda value: (abs(values.index(value) - wanted), values.index(value)))
            fitting = next((value for value in near if self._can({**chosen, name: value})), None)
            if fitting is None:  # only before the first tunable: a later one always has its frugal value left
                return self.start
            chosen[name] = fitting
        return self.canonical(self.config_type(**chosen))

    def canonical(self, config: Config) -> Config:
        """The representative of the configurations that give the same machine code as `config`.

        `min_blocks` (like the other families' `blocks` and `*_blocks`) acts through the cap on registers alone (CUDA C++ Programming
        Guide, "Launch Bounds"), so the least value with the same cap stands for all; padding that moves no buffer stands as padding.
        """
        plan = plan_of(self.problem, config)
        least: dict[str, Any] = {name: value for name, value in plan.representative.items() if value in self.values[name]}
        for name, threads in plan.capped.items():
            caps = {int(n): self._register_cap(threads * int(n)) for n in self.values[name]}
            least[name] = min(n for n in caps if caps[n] == caps[getattr(config, name)])
        alike = replace(config, **least)
        if isinstance(alike, SequenceConfig) and isinstance(plan, SequencePlan) and not alike.padding and True in self.values["padding"]:
            padded = replace(alike, padding=True)
            if SequencePlan(self.problem, padded).layout == plan.layout:
                return padded
        return alike

    def _register_cap(self, threads: int) -> int:
        """Registers a thread may use when `threads` share a multiprocessor; the hardware grants them by eights."""
        return min(self.target.registers_per_thread, self.target.registers_per_sm // threads // 8 * 8)

    def enumerate(self) -> Iterator[Config]:
        """Every legal, canonical configuration once, in a fixed order."""
        names = list(self.values)

        def walk(chosen: dict[str, Value]) -> Iterator[Config]:
            if len(chosen) == len(names):
                config = self.config_type(**chosen)
                if self.canonical(config) == config:
                    yield config
                return
            name = names[len(chosen)]
            for value in self.values[name]:
                longer = {**chosen, name: value}
                if self._can(longer):
                    yield from walk(longer)

        return walk({})

    def count(self, limit: int) -> int:
        """How many configurations there are, counting no further than `limit`."""
        return sum(1 for _, _ in zip(range(limit), self.enumerate(), strict=False))

    def neighbours(self, config: Config) -> list[Config]:
        """The legal configurations that one tunable's change (and its projection) leads to, without repeats."""
        here = config_values(config)
        moved = [self.project({**here, name: value}) for name, values in self.values.items() for value in values if value != here[name]]
        return [near for near in dict.fromkeys(moved) if near != config]

    def random(self, draw: random.Random) -> Config:
        """The projection of a uniform draw."""
        return self.project({name: draw.choice(values) for name, values in self.values.items()})


def config_values(config: Config) -> dict[str, Value]:
    """Tunable -> value, without the family."""
    return {name: getattr(config, name) for name in type(config).tunables()}


def _identity(problem: AxisProblem) -> list[Any]:
    block = problem.block
    usual = [block.dim, block.heads, block.height, block.width, block.batch, block.dtype, block.eps, problem.axis]
    return [*usual, block.variants] if block.variants else usual


def family_spaces(
    problem: AxisProblem, target: Target, *, fixed: Mapping[str, Value] | None = None, tolerance: float = FP32_TOLERANCE
) -> dict[str, Space]:
    """Family -> the space of one axis, of the families that have a legal configuration with the fixed tunables.

    A fixed `family` leaves that family alone; a fixed tunable leaves those that have it. Raises SpecError when nothing is legal.
    """
    rest = {name: value for name, value in (fixed or {}).items() if name != "family"}
    asked = str((fixed or {}).get("family", ""))
    found: dict[str, Space] = {}
    objections: list[SpecError] = []
    for name in [asked] if asked else having(rest):
        if set(rest) <= set(FAMILIES[name].config.tunables()):
            try:
                found[name] = space(problem, target, family=name, fixed=rest, tolerance=tolerance)
            except SpecError as error:
                objections.append(error)
    if found:
        return found
    if objections:
        raise objections[0]
    raise SpecError(f"no family has all of {', '.join(rest)}: choose others with --fix")


def space(
    problem: AxisProblem,
    target: Target,
    *,
    family: str = "sequence",
    fixed: Mapping[str, Value] | None = None,
    tolerance: float = FP32_TOLERANCE,
    dependent_launch: Sequence[bool] | None = None,
) -> Space:
    """The space of one axis and family.

    fixed: tunables held at one value (see parse_fixed). tolerance: decides which arithmetics take part.
    dependent_launch: its values; by default the target's best alone, for what it does between the axes of a pair no search of one sees.

    Raises SpecError when nothing is legal, with the objections to the most frugal configuration.
    """
    kind = FAMILIES[family]
    values = dict(kind.config.tunables())
    dtype = problem.block.dtype
    maths = allowed_maths(tolerance, dtype)
    values["math"] = tuple(m for m in values["math"] if m in maths)
    if not values["math"]:
        raise SpecError(f"the {family} family does not compute {dtype}")
    if "dependent_launch" in values:
        values["dependent_launch"] = tuple(dependent_launch) if dependent_launch is not None else (target.dependent_launch,)
    for name, value in (fixed or {}).items():
        if name == "math" and value not in DTYPE_MATHS[dtype]:
            raise SpecError(f"math {value} is not for {dtype}: choose {' or '.join(maths)}")
        if name == "math" and value not in maths:
            raise SpecError(f"math {value} cannot hold a tolerance of {tolerance:g}: relax it with --tolerance above {TF32_TOLERANCE:g}")
        if value not in (options := kind.config.tunables()[name]):
            raise SpecError(f"{name} must be one of {', '.join(map(str, options))} in the {family} family, not {value}")
        values[name] = (value,)
    preferred = dict.fromkeys((*values["math"], *kind.maths[dtype]) if "math" in (fixed or {}) else kind.maths[dtype])
    starts = (start for math in preferred for start in kind.starts(problem, target, str(math)))
    draft = Space(problem, target, values, next(starts, kind.config()))
    begin = next((start for start in itertools.chain((draft.start,), starts) if draft.legal(start)), None)
    if begin is not None:
        return replace(draft, start=draft.canonical(begin))
    nearest = config_values(draft.start)
    nearest = {name: nearest[name] if nearest[name] in options else options[0] for name, options in values.items()}
    projected = draft.project(nearest)
    if not draft.legal(projected):
        given = ", ".join(f"{name}={value}" for name, value in (fixed or {}).items())
        objections = draft._reasons(draft.frugal) or ["the values exclude each other"]
        advice = "choose others with --fix" if given else SMALLER
        raise SpecError(
            f"no configuration of the {problem.axis} axis is legal on {target.arch}{' with ' + given if given else ''} "
            f"({'; '.join(objections)}): {advice}"
        )
    return replace(draft, start=projected)


def spaces(
    spec: BlockSpec, target: Target, *, fixed: Mapping[str, Value] | None = None, tolerance: float = FP32_TOLERANCE
) -> dict[str, dict[str, Space]]:
    """Axis -> family -> space, as `family_spaces` has them. SpecError with one line for all axes that have none."""
    found: dict[str, dict[str, Space]] = {}
    refused: list[str] = []
    for axis in spec.axes:
        try:
            found[axis] = family_spaces(spec.problem(axis), target, fixed=fixed, tolerance=tolerance)
        except SpecError as error:
            refused.append(str(error))
    if refused:
        raise SpecError("; ".join(dict.fromkeys(refused)))
    return found


def preferred(found: Mapping[str, Mapping[str, Space]]) -> dict[str, Space]:
    """Axis -> the space of the first family that serves it: `sequence` where a sequence fits a block, unless its products are so long that
    `staged` streams both operands."""

    def streams(here: Space) -> bool:
        plan = plan_of(here.problem, here.start)
        return isinstance(plan, StagedPlan) and bool(plan.streamed)

    return {axis: next(filter(streams, families.values()), next(iter(families.values()))) for axis, families in found.items()}
