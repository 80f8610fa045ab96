"""`python -m benchmarks.compare`: the modules, PyTorch's forms of the block and a fused Triton rival, in one run on the present GPU."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.cases import Case, select
from benchmarks.results import Report, from_json
from benchmarks.run import BUDGET_SECONDS, BUILD_SECONDS, Plan, Say, compare, find_modules, specs_of, tune_command
from benchmarks.table import COMPARISON, FLOORS, comparison, floor_table, insert
from codegen.module import replace_file
from codegen.spec import SpecError
from tuner.gpu import Gpu, obstacle, visible_gpu
from tuner.worker import WorkerError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]})
console = Console(width=None if sys.stdout.isatty() else 160)


@app.command()
def main(
    case: Annotated[list[str] | None, typer.Option("--case", help="A shape by name; may be repeated. All by default.")] = None,
    dtype: Annotated[list[str] | None, typer.Option("--dtype", help="fp32 or bf16; may be repeated. Both by default.")] = None,
    generated: Annotated[Path, typer.Option(help="Folder of the modules.")] = Path("generated"),
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("benchmarks/results"),
    into: Annotated[list[Path] | None, typer.Option("--into", help="A document whose tables are replaced; may be repeated.")] = None,
    render: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="JSON", help="Measure nothing: write the tables of earlier results; may be repeated, the last one of a case counts."
        ),
    ] = None,
    max_autotune: Annotated[bool, typer.Option("--max-autotune", help="Add torch.compile's max-autotune: minutes a case.")] = False,
    no_triton: Annotated[bool, typer.Option("--no-triton", help="Leave out the fused Triton rival.")] = False,
    tune: Annotated[float | None, typer.Option(min=1.0, metavar="SECONDS", help="First tune each missing module that long.")] = None,
    budget: Annotated[float, typer.Option(min=1.0, help="Seconds for measuring; tuning is not counted.")] = BUDGET_SECONDS,
    build: Annotated[float, typer.Option(min=1.0, help="Seconds for building any one form.")] = BUILD_SECONDS,
    gpu: Annotated[int | None, typer.Option(help="Which of the visible GPUs, from 0.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the data.")] = 0,
) -> None:
    """Compare the modules with PyTorch's forms and with a fused Triton rival, and write JSON and Markdown."""
    documents = into or []
    cases = select(case or (), dtype or ())
    if render:
        show(latest([read(path) for path in render]), documents)
        return
    chosen = visible_gpu(gpu)
    if chosen is None:
        raise SpecError("a comparison needs a GPU, and none is visible: --render shows the tables of an earlier result")
    if reason := obstacle(chosen):
        raise SpecError(reason)
    if tune is not None:
        tune_missing(cases, generated, chosen, tune, seed)
    path = result_path(out, chosen.name, (*(case or ()), *(dtype or ())))
    report = measure(Plan(cases, generated, budget, build), chosen, path, seed, max_autotune, not no_triton, _say)
    show([report], documents)
    console.print(f"Written: {path} and {path.with_suffix('.md')}", markup=False, highlight=False, soft_wrap=True)


def measure(plan: Plan, gpu: Gpu, path: Path, seed: int, max_autotune: bool, rival: bool, say: Say) -> Report:
    """Runs a plan on a GPU; returns the report, which is also written to the JSON file `path`, with its tables beside it."""
    from benchmarks.instruments import GpuInstruments, together

    instruments = GpuInstruments(gpu, seed=seed, max_autotune=max_autotune, rival=rival)

    def write(report: Report) -> None:
        replace_file(path, report.to_json())
        replace_file(path.with_suffix(".md"), comparison(report))

    try:
        say("measuring what the card does at best")
        machine = instruments.machine
        date = datetime.now(UTC).strftime("%Y-%m-%d")
        command = " ".join(["python -m benchmarks.compare", *sys.argv[1:]])
        report = Report(date, machine.gpu, machine.arch, machine.driver, machine.versions, command, instruments.ceilings())
        return compare(replace(plan, together=together()), instruments, report, say, write)
    except WorkerError as error:
        raise SpecError(f"nothing can be compared on the {gpu.name}: {error.cause}") from None
    finally:
        instruments.close()


def tune_missing(cases: tuple[Case, ...], generated: Path, gpu: Gpu, seconds: float, seed: int) -> None:
    """Tunes every block of the cases that has no measured module; one that cannot be tuned says why and is left out."""
    from tuner.session import Request, run

    specs, _ = specs_of(cases)
    found = find_modules(generated, specs.values(), gpu.target.arch)
    for spec in specs.values():
        if spec not in found or not found[spec].provenance.measured:
            command = f"{tune_command(spec)} --budget {seconds:g}"
            try:
                run(Request(spec, generated, budget=seconds, seed=seed, gpu=gpu.index, command=command), console)
            except SpecError as error:
                _say(f"{spec.name} is not tuned: {error}")


def read(path: Path) -> Report:
    """A result as it was written; SpecError when it is none."""
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror or error}") from None


def latest(reports: list[Report]) -> list[Report]:
    """The reports, each without the cases that a later one has, and without those that have none left."""
    kept: list[Report] = []
    seen: set[Case] = set()
    for report in reversed(reports):
        results = tuple(result for result in report.results if result.case not in seen)
        seen |= {result.case for result in results}
        kept += [replace(report, results=results)] if results else []
    return kept[::-1]


def show(reports: list[Report], documents: list[Path]) -> None:
    """Prints the tables of reports, and puts them into documents; the floors, for any card, too where a document has a place for them."""
    text = "\n".join(comparison(report) for report in reports)
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    for document in documents:
        insert(document, COMPARISON, text)
        if f"<!-- {FLOORS}: begin -->" in document.read_text(encoding="utf-8"):
            insert(document, FLOORS, floor_table())


def result_path(out: Path, gpu: str, part: Iterable[str] = ()) -> Path:
    """The JSON file of a GPU's results, e.g. nvidia_h200.json; a run of some cases has its own, e.g. nvidia_h200_bf16.json."""
    return out / f"{re.sub(r'[^a-z0-9]+', '_', ' '.join((gpu, *part)).lower()).strip('_') or 'gpu'}.json"


def _say(line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def run() -> None:
    """The command; what a user can get wrong ends in one line and exit code 2."""
    try:
        app(standalone_mode=True)
    except SpecError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    run()
