"""Times chosen configurations, verified like any trial, in one process:

    python -m benchmarks.configurations benchmarks/sequence.txt [--case seed] [--out FILE]

A line of the list is a case of benchmarks/cases.py, an element type, and NAME=VALUE of tunables; the others are as in the default of the
first family that has them all. Both axes get the same. What follows a # is left out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.cases import select
from codegen.spec import SpecError
from codegen.target import Target
from tuner.gpu import visible_gpu
from tuner.gpu_backend import GpuBackend, Limits
from tuner.session import configs_of
from tuner.trial import Candidate


def candidate(line: str, target: Target) -> Candidate:
    """The candidate that a line of a list states; SpecError when there is none such, or when it is not legal."""
    shape, dtype, *settings = line.split()
    (case,) = select([shape], [dtype])
    try:
        return Candidate(case.spec(), configs_of(case.spec(), target, settings))
    except SpecError as error:
        raise SpecError(f"{line}: {error}") from None


def lines(path: Path, cases: list[str]) -> list[str]:
    """The list's lines, of some cases where any are named."""
    try:
        texts = [text.partition("#")[0].strip() for text in path.read_text().splitlines()]
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror or error}") from None
    return [text for text in texts if text and (not cases or text.split()[0] in cases)]


def main(
    path: Path,
    case: Annotated[list[str] | None, typer.Option("--case", help="Lines of this case alone; may be repeated.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="A JSON file for what was measured.")] = None,
) -> None:
    """See the module's text."""
    gpu = visible_gpu()
    if gpu is None:
        raise SystemExit("a GPU is needed")
    try:
        listed = lines(path, case or [])
        candidates = [candidate(line, gpu.target) for line in listed]
    except SpecError as error:
        raise SystemExit(f"error: {error}") from None
    rows = []
    with GpuBackend(gpu, limits=Limits(trial=60.0, prepare=120.0)) as backend:
        for line, outcome in zip(listed, backend.evaluate(candidates), strict=True):
            timing = outcome.timing
            told = f"{timing.device:8.2f} us  cold {timing.cold:7.2f}" if timing else f"{outcome.status}: {outcome.cause}"
            used = " ".join(f"{r.registers}r{'+' + str(r.local_bytes) if r.local_bytes else ''}" for r in outcome.resources.values())
            Console(width=200).print(f"{told}  {used:16}  {line}", highlight=False)
            rows.append({
                "line": line, "status": outcome.status, "cause": outcome.cause, "error": outcome.error,
                "device_us": timing and timing.device, "spread_us": timing and timing.spread, "cold_us": timing and timing.cold,
                "registers": {name: [r.registers, r.local_bytes] for name, r in outcome.resources.items()},
            })  # fmt: skip
    if out is not None:
        out.write_text(json.dumps({"gpu": gpu.name, "driver": gpu.driver, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
