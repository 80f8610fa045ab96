"""How an emitted module came about: what its header says, and what can be read from it again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from codegen.kernelbench import acceptable
from codegen.spec import SpecError


@dataclass(frozen=True)
class Provenance:
    """How a module came about.

    measured: whether its configuration was chosen by measuring; otherwise it is predicted. date: ISO 8601. command: what
    was run. versions: name -> version of everything else that mattered. partial: the search was interrupted.
    Times are microseconds for one forward of the tuned batch, None where unknown: device_us and spread_us (median and
    spread of CUDA graph replays), cold_us (L2 flushed), wall_us (host), default_us (device, default configuration),
    pytorch_us and pytorch_wall_us (device and host, the best PyTorch form, whose name is pytorch_form), predicted_us (model).
    Where the module uses that form itself, kernels_us and kernels_wall_us are of its kernels. error: against float64, over the
    output's scale.
    """

    measured: bool
    command: str = ""
    date: str = ""
    gpu: str = ""
    driver: str = ""
    torch: str = ""
    cuda: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    device_us: float | None = None
    spread_us: float | None = None
    cold_us: float | None = None
    wall_us: float | None = None
    default_us: float | None = None
    pytorch_us: float | None = None
    pytorch_wall_us: float | None = None
    pytorch_form: str = ""
    kernels_us: float | None = None
    kernels_wall_us: float | None = None
    predicted_us: float | None = None
    error: float | None = None
    partial: bool = False
    note: str = ""

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.name in ("measured", "partial"):
                right = isinstance(value, bool)
            elif f.name == "versions":
                right = isinstance(value, Mapping) and all(isinstance(part, str) for item in value.items() for part in item)
            elif f.default is None:
                right = value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
            else:
                right = isinstance(value, str)
            if not right:
                raise SpecError(f"provenance: {f.name} cannot be {value!r}")

    def acceptable(self) -> Provenance:
        """The same with its free text made acceptable to KernelBench's text check."""
        texts: dict[str, Any] = {f.name: acceptable(getattr(self, f.name)) for f in dataclasses.fields(self) if f.default == ""}
        return dataclasses.replace(self, versions={acceptable(k): acceptable(v) for k, v in self.versions.items()}, **texts)

    def lines(self) -> list[str]:
        """What the header of a module says, one statement a line."""
        where = self.gpu or "a GPU that was not named"
        said = [f"Measured on {where}." if self.measured else "Predicted: chosen by a model, not measured on a GPU."]
        if self.partial:
            said.append("Partial: the search was interrupted, and this is the best it had verified.")
        times = (
            ("device time", self.device_us, f" +- {self.spread_us:.2f}" if self.spread_us is not None else ""),
            ("device time, L2 flushed", self.cold_us, ""),
            ("wall time of a call", self.wall_us, ""),
            ("default configuration, device time", self.default_us, ""),
            (f"PyTorch ({self.pytorch_form or 'best form'}), device time", self.pytorch_us, ""),
            (f"PyTorch ({self.pytorch_form or 'best form'}), wall time of a call", self.pytorch_wall_us, ""),
            ("the kernels in this file, device time", self.kernels_us, ""),
            ("the kernels in this file, wall time of a call", self.kernels_wall_us, ""),
            ("predicted device time", self.predicted_us, ""),
        )
        said += [f"    {name}: {value:.2f}{more} us" for name, value, more in times if value is not None]
        if self.error is not None:
            said.append(f"    error against float64: {self.error:.1e} of the output's scale")
        if self.command:
            said.append(f"Command: {self.command}")
        named = {"driver": self.driver, "torch": self.torch, "CUDA": self.cuda, **self.versions}
        said.append(", ".join([f"Written {self.date}" if self.date else "Written", *(f"{k} {v}" for k, v in named.items() if v)]) + ".")
        if self.note:
            said.append(self.note)
        return said
