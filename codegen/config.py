"""Configurations: one point of a kernel family's space, frozen, validated, and readable from text.

To add a tunable, add a field to the family's Config (codegen/sequence.py): its values, its help line and its default
stand there, legality in the family's `reasons`, and the template reads it by the same name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from codegen.spec import SpecError

Value = int | str | bool


def tunable(default: Value, values: tuple[Value, ...], help: str, before: Value | None = None) -> Any:
    """A dataclass field with the values a search may choose from and one line of help.

    before: what configurations have that were recorded when the tunable did not exist; None for those that always did.
    """
    return dataclasses.field(default=default, metadata={"values": values, "help": help, "before": before})


@dataclass(frozen=True)
class Config:
    """Base of each family's configuration."""

    family: ClassVar[str]

    @classmethod
    def tunables(cls) -> dict[str, tuple[Value, ...]]:
        """Name -> values, in the order of declaration."""
        return {f.name: f.metadata["values"] for f in dataclasses.fields(cls)}

    def __post_init__(self) -> None:
        for name, values in self.tunables().items():
            value = getattr(self, name)
            if not any(value == v and type(value) is type(v) for v in values):
                raise SpecError(f"{name} must be one of {', '.join(map(str, values))}, not {value!r}")

    def to_dict(self) -> dict[str, Value]:
        return {"family": self.family, **dataclasses.asdict(self)}

    @classmethod
    def groups(cls) -> dict[str, tuple[str, ...]]:
        """Name -> tunables that can be searched together with all others held: one group of all, unless a family has independent ones."""
        return {"": tuple(cls.tunables())}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The configuration that `data` (from a record, a storage or a command line) states; SpecError when it has
        unknown or missing names or values outside the space. A tunable that is younger than `data` has its value from before."""
        names = set(cls.tunables())
        younger = {f.name: f.metadata["before"] for f in dataclasses.fields(cls) if f.metadata["before"] is not None}
        data = {**younger, **data}
        given = set(data) - {"family"}
        if odd := ", ".join(sorted(given ^ names)):
            raise SpecError(f"not a {cls.family} configuration: unknown or missing {odd}")
        if data.get("family", cls.family) != cls.family:
            raise SpecError(f"not a {cls.family} configuration: family {data['family']!r}")
        return cls(**{name: data[name] for name in names})
