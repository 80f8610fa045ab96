"""The kernel families: which configuration has which plan, and where a search of each starts. To add one, add it here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from codegen import resident, sequence, staged
from codegen.config import Config, Value
from codegen.library import LibraryConfig
from codegen.resident import ResidentConfig, ResidentPlan
from codegen.sequence import SequenceConfig, SequencePlan
from codegen.spec import AxisProblem, SpecError
from codegen.staged import StagedConfig, StagedPlan
from codegen.target import Target

Plan = SequencePlan | StagedPlan | ResidentPlan


@dataclass(frozen=True)
class Family:
    """default: (problem, target, math) -> the configuration to start from, or None when none is legal; alternatives: others that a
    search should not miss, because it does not come to them from there.
    maths: element type -> its arithmetics, the one to start from first."""

    config: type[Config]
    plan: Callable[[AxisProblem, Any], Plan]
    default: Callable[[AxisProblem, Target, str], Config | None]
    maths: Mapping[str, tuple[str, ...]]
    alternatives: Callable[[AxisProblem, Target, str], Sequence[Config]]

    def starts(self, problem: AxisProblem, target: Target, math: str) -> Iterator[Config]:
        """The default of an arithmetic, if there is one, and then its alternatives, which are looked for when they are asked for: where
        some do not exist, that takes half a second."""
        start = self.default(problem, target, math)
        if start is not None:
            yield start
            yield from self.alternatives(problem, target, math)


FAMILIES: dict[str, Family] = {
    SequenceConfig.family: Family(SequenceConfig, SequencePlan, sequence.default, sequence.DTYPE_MATHS, sequence.alternatives),
    StagedConfig.family: Family(StagedConfig, StagedPlan, staged.default, staged.DTYPE_MATHS, staged.alternatives),
    ResidentConfig.family: Family(ResidentConfig, ResidentPlan, resident.default, resident.DTYPE_MATHS, resident.alternatives),
}


def having(settings: Mapping[str, Value]) -> list[str]:
    """The families whose configurations have all of some tunables: those that have them at these values, if any has."""
    named = [name for name, family in FAMILIES.items() if set(settings) <= set(family.config.tunables())]
    return [name for name in named if all(v in FAMILIES[name].config.tunables()[n] for n, v in settings.items())] or named


def plan_of(problem: AxisProblem, config: Config) -> Plan:
    """The plan of a configuration of any family; SpecError for one of none."""
    family = FAMILIES.get(config.family)
    if family is None or not isinstance(config, family.config):
        raise SpecError(f"family {config.family!r} cannot be rendered")
    return family.plan(problem, config)


def config_from_dict(data: Mapping[str, Any]) -> Config:
    """The configuration that a record or a module states, of the family it names, or PyTorch's own form of the block; SpecError
    when there is none such."""
    name = data.get("family")
    if name == LibraryConfig.family:
        return LibraryConfig.from_dict(data)
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise SpecError(f"unknown kernel family {name!r}")
    return family.config.from_dict(data)
