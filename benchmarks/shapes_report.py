"""docs/shapes.md and docs/shapes.json: what benchmarks.shapes found, written and read back."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codegen.library import KERNELS, LibraryConfig
from codegen.module import replace_file
from tuner.space import SMALLER
from tuner.trial import Timing


@dataclass(frozen=True)
class Row:
    """One shape. refused: why nothing is generated, else empty. family, configuration: of the kernels; chosen: "default" or
    "tuned"; source: SHA-256 of their CUDA text. error: against float64, of the output's scale; checked: on what, empty when
    it was not. timing, pytorch, form: of the kernels and of PyTorch's best form, None where not measured; use: what a
    module of the shape would use; note: what went wrong."""

    name: str
    model: str
    head_dim: int
    refused: str = ""
    family: str = ""
    configuration: str = ""
    chosen: str = ""
    source: str = ""
    error: float | None = None
    checked: str = ""
    timing: Timing | None = None
    pytorch: Timing | None = None
    form: str = ""
    use: str = ""
    note: str = ""

    @property
    def speedup(self) -> float | None:
        return self.pytorch.device / self.timing.device if self.timing and self.pytorch else None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Row:
        timings = {name: Timing(**data[name]) if data[name] else None for name in ("timing", "pytorch")}
        return cls(**{**data, **timings})


def _us(timing: Timing | None) -> str:
    return "" if timing is None else f"{timing.device:.1f}" if timing.device < 1000 else f"{timing.device:,.0f}"


def table(rows: Sequence[Row]) -> str:
    """A Markdown table with a line for each shape."""
    lines = [
        "| model | B,H,W,dim/heads | head_dim | family | configuration | error | device us | best PyTorch us | speed-up |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        head = f"| {row.model} | {row.name} | {row.head_dim} |"
        if row.refused:
            lines.append(f"{head} refused | {row.refused.replace(': ' + SMALLER, '')} | | | | |")
            continue
        error = f"{row.error:.1e} ({row.checked})" if row.error is not None else ""
        family = row.family if row.use in ("", KERNELS) else f"{LibraryConfig.family} ({row.use}) instead of {row.family}"
        said = f"{row.configuration} ({row.chosen}){': ' + row.note if row.note else ''}"
        rival = f"{_us(row.pytorch)} ({row.form})" if row.pytorch else ""
        gain = f"{row.speedup:.2f}x" if row.speedup else ""
        lines.append(f"{head} {family} | {said} | {error} | {_us(row.timing)} | {rival} | {gain} |")
    return "\n".join(lines)


def page(rows: Sequence[Row], facts: Mapping[str, str]) -> str:
    """The whole of docs/shapes.md."""
    served = [row for row in rows if not row.refused]
    timed = [row for row in served if row.speedup]
    where = f"{facts['gpu']}, driver {facts['driver']}, PyTorch {facts['torch']}" if facts.get("gpu") else "no GPU: times are missing"
    return f"""# Shapes from the field

Written by `python -m benchmarks.shapes` ({facts["date"]}, {facts["arch"]}, {where}); [shapes.json](shapes.json) has all of it. float32.

{table(rows)}

{len(served)} of {len(rows)} shapes are served, {len(timed)} are timed.

- **error** is the largest deviation from the float64 reference over the scale of the output, or of the branch without the residual;
  from the emulator it is that of each axis alone on a few of its sequences.
- **configuration** is the arithmetic of the products, then warps and shared memory of each kernel; `default` was not searched for,
  `tuned` comes from a module in `generated/`.
- Device times are those of one forward in a CUDA graph. Where PyTorch is not beaten by more than the noise, a module uses its form.
"""


def read(path: Path) -> tuple[dict[str, str], dict[str, Row]]:
    """What an earlier run found: its facts, and the rows by name; nothing where the file is missing or not of this format."""
    try:
        data = json.loads(path.read_text())
        return data["facts"], {row["name"]: Row.from_dict(row) for row in data["rows"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}, {}


def write(folder: Path, rows: Sequence[Row], facts: Mapping[str, str]) -> None:
    """Both files, each at once and whole. SpecError when the folder cannot be written."""
    data = {"facts": dict(facts), "rows": [dataclasses.asdict(row) for row in rows]}
    replace_file(folder / "shapes.json", json.dumps(data, indent=1) + "\n")
    replace_file(folder / "shapes.md", page(rows, facts))
