"""The course of a comparison: which modules take part, in which order cases are measured, and what fits into the time."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.cases import Case
from benchmarks.floors import floors
from benchmarks.instruments import Instruments, Job
from benchmarks.results import Report, Result
from codegen.module import Emitted, list_modules
from codegen.spec import BlockSpec, SpecError

BUDGET_SECONDS = 500.0
BUILD_SECONDS = 60.0
Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """cases in their order; generated: the folder of the modules; budget: seconds for everything that is measured; build: seconds for
    building any one thing; together: how many cases are built at once."""

    cases: Sequence[Case]
    generated: Path
    budget: float = BUDGET_SECONDS
    build: float = BUILD_SECONDS
    together: int = 1


def tune_command(spec: BlockSpec) -> str:
    """The command that writes the module of a block."""
    options = [f"--dim {spec.dim}", f"--heads {spec.heads}", f"--height {spec.height}", f"--width {spec.width}", f"--batch {spec.batch}"]
    return " ".join(["python cli.py tune", *options, *spec.options, *([] if spec.dtype == "float32" else [f"--dtype {spec.dtype}"])])


def find_modules(folder: Path, specs: Iterable[BlockSpec], arch: str) -> dict[BlockSpec, Emitted]:
    """The modules for exactly these blocks and this architecture. A measured one is preferred to a predicted one, then one of a whole
    search to one of an interrupted search."""
    if not folder.is_dir():
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other files in the folder are no concern of a comparison
        present = [module for module in list_modules(folder) if module.arch == arch]
    found: dict[BlockSpec, Emitted] = {}
    for spec in specs:
        if mine := [module for module in present if module.spec == spec]:
            found[spec] = max(mine, key=lambda module: (module.provenance.measured, not module.provenance.partial))
    return found


def specs_of(cases: Iterable[Case]) -> tuple[dict[Case, BlockSpec], dict[Case, str]]:
    """(case -> block, case -> why this version has no block for it)."""
    specs, refused = {}, {}
    for case in cases:
        try:
            specs[case] = case.spec()
        except SpecError as error:
            refused[case] = str(error)
    return specs, refused


def compare(plan: Plan, instruments: Instruments, report: Report, say: Say, write: Callable[[Report], None]) -> Report:
    """Measures the plan's cases and returns the report with their results; it is also written after every few cases, so that nothing is
    lost to an interrupt. Cases for which no time is left are noted as such."""
    started = time.monotonic()
    specs, refused = specs_of(plan.cases)
    modules = find_modules(plan.generated, specs.values(), instruments.machine.arch)
    results: dict[Case, Result] = {case: Result(case, floors(case, report.ceilings), notes=(cause,)) for case, cause in refused.items()}
    jobs = [Job(case, spec, modules.get(spec)) for case, spec in specs.items()]
    longest = 0.0
    complete = True
    for first in range(0, len(jobs), plan.together):
        wave = jobs[first : first + plan.together]
        began = time.monotonic()
        left = plan.budget - (began - started)
        if left < longest or left <= 0:
            complete = False
            note = f"the {plan.budget:g} s of the run were over"
            results |= {job.case: Result(job.case, floors(job.case, report.ceilings), notes=(note,)) for job in jobs[first:]}
            say(f"{len(jobs) - first} cases are left out: the {plan.budget:g} s of the run are over")
            break
        say(f"building {', '.join(job.case.name for job in wave)}")
        instruments.prepare(wave, min(plan.build, left / 2))
        for job in wave:
            results[job.case] = _noted(instruments.measure(job, report.ceilings), job, plan.generated)
            say(summary(results[job.case]))
        longest = max(longest, time.monotonic() - began)
        write(_so_far(report, plan, results, time.monotonic() - started, False))
    report = _so_far(report, plan, results, time.monotonic() - started, complete)
    write(report)
    return report


def summary(result: Result) -> str:
    """One line on a measured case."""
    best = result.best
    parts = [f"PyTorch {best[1].device:.2f} us ({best[0]})" if best else "PyTorch -"]
    parts.append(f"Triton {result.rival.timing.device:.2f} us" if result.rival else "Triton -")
    parts.append(f"module {result.module.timing.device:.2f} us" if result.module else "module -")
    gain = f", {result.gain:.2f}x" if result.gain else ""
    return f"{result.case.name}: {', '.join(parts)}{gain}, floor {result.floors.least:.2f} us"


def _noted(result: Result, job: Job, generated: Path) -> Result:
    """The result with a note on its module: that there is none, or that nobody measured it when it was chosen."""
    if job.module is None:
        return replace(result, notes=(*result.notes, f"no module in {generated}: `{tune_command(job.spec)}` writes it"))
    provenance = job.module.provenance
    marks = ["was predicted"] * (not provenance.measured) + ["is of an interrupted search"] * provenance.partial
    return replace(result, notes=(*result.notes, f"the module {' and '.join(marks)}")) if marks else result


def _so_far(report: Report, plan: Plan, results: Mapping[Case, Result], seconds: float, complete: bool) -> Report:
    ordered = tuple(results[case] for case in plan.cases if case in results)
    return replace(report, results=ordered, seconds=seconds, complete=complete)
