"""`python -m benchmarks.shapes`: what becomes of each shape of benchmarks/field.py here; writes docs/shapes.md and docs/shapes.json.

On a GPU every shape is verified and timed beside PyTorch's forms; elsewhere its kernels are checked on the emulator, each axis on
a few sequences, without times. A measurement that is already in the JSON stays while its kernels' source and the GPU are the
same, so that a run cut short by its budget goes on where it stopped, and one without a GPU keeps what was measured. Times of another
source stay, and are said to be of earlier kernels, until there are new ones; shapes that never had any come first.
"""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.field import SHAPES, Shape
from benchmarks.instruments import together
from benchmarks.shapes_report import Row, read, write
from codegen.config import Config
from codegen.library import FORMS, KERNELS
from codegen.module import list_modules
from codegen.render import Source, render
from codegen.spec import BlockSpec, SpecError
from codegen.target import Target, target
from tuner.emulator import EmulationError, Emulator
from tuner.finals import unbeaten_form
from tuner.gpu import obstacle, visible_gpu
from tuner.pytorch_forms import Forms
from tuner.space import preferred, spaces
from tuner.trial import Backend, Candidate, Timing
from tuner.verify import Checker

EMULATED_LINES = 2
LATE = "not run within the budget"
EARLIER = "times of earlier kernels"
CHUNK = together(len(FORMS))  # shapes whose PyTorch forms are compiled at once, before they are measured


@dataclass(frozen=True)
class Work:
    """A shape for which there are kernels."""

    spec: BlockSpec
    configs: Mapping[str, Config]
    source: Source


def configuration(configs: Mapping[str, Config], source: Source) -> str:
    """The class of a configuration: arithmetic, and warps and shared memory of each kernel."""
    said: dict[str, list[str]] = {}
    for axis, config in configs.items():
        kernels = [kernel for kernel in source.kernels if kernel.axis == axis]
        maths = dict.fromkeys(str(value) for name, value in config.to_dict().items() if name.endswith("math"))
        warps = "/".join(str(kernel.threads // 32) for kernel in kernels)
        shared = "/".join(f"{kernel.shared_bytes / 1024:.0f}" for kernel in kernels)
        said.setdefault(f"{'/'.join(maths)}, {warps} warps, {shared} KB", []).append(axis)
    return "; ".join(text if len(said) == 1 else f"{' and '.join(axes)}: {text}" for text, axes in said.items())


def plan(shape: Shape, to: Target, tuned: Mapping[BlockSpec, Mapping[str, Config]]) -> tuple[Row, Work | None]:
    """The kernels of a shape, tuned where there are any such, or why there are none."""
    row = Row(shape.name, shape.model, shape.head_dim)
    try:
        spec = shape.spec()
        configs = tuned.get(spec) or {axis: here.start for axis, here in preferred(spaces(spec, to)).items()}
        source = render(spec, configs)
    except SpecError as error:
        return replace(row, refused=str(error)), None
    family = " + ".join(dict.fromkeys(config.family for config in configs.values()))
    chosen = "tuned" if spec in tuned else "default"
    row = replace(row, family=family, configuration=configuration(configs, source), chosen=chosen, source=source.digest)
    return row, Work(spec, configs, source)


def emulate(row: Row, work: Work, limit: float) -> Row:
    """The kernels of each axis on the emulator: the same code, for a few sequences of one image."""
    worst = 0.0
    for axis in work.spec.axes:
        lines = max(EMULATED_LINES, *(k.items_per_block for k in work.source.kernels if k.axis == axis and k.items == "sequences"), 0)
        spec = replace(work.spec, batch=1, axes=(axis,))
        spec = replace(spec, height=min(lines, spec.height)) if axis == "row" else replace(spec, width=min(lines, spec.width))
        emulator = Emulator(render(spec, {axis: work.configs[axis]}), run_limit=max(1, int(limit)))
        try:
            check = Checker(spec, 0, batch=1, quick=True)(emulator.run)
        except EmulationError as error:
            if error.report.kind == "timeout":
                return replace(row, note=f"the emulator needs more than {limit:.0f} s")
            return replace(row, note=str(error).splitlines()[0])
        if not check.ok:
            return replace(row, checked="emulator", error=max(check.error, check.branch_error), note=check.cause)
        worst = max(worst, check.error, check.branch_error)
    return replace(row, checked="emulator", error=worst)


def on_emulator(todo: Sequence[tuple[Row, Work]], deadline: float) -> Iterator[Row]:
    for row, work in todo:
        left = deadline - time.monotonic()
        yield emulate(row, work, min(left, 120.0)) if left > 1.0 else replace(row, note=LATE)


def on_gpu(todo: Sequence[tuple[Row, Work]], deadline: float, backend: Backend, forms: Callable[[BlockSpec], Forms]) -> Iterator[Row]:
    """Verified, timed and compared with PyTorch's forms, which are compiled several shapes at a time, while nothing is measured."""
    for start in range(0, len(todo), CHUNK):
        chunk = todo[start : start + CHUNK]
        if time.monotonic() > deadline:
            yield from (replace(row, note=LATE) for row, _ in chunk)
            continue
        with contextlib.ExitStack() as stack:
            rivals = [forms(work.spec) for _, work in chunk]
            for rival in rivals:
                stack.callback(rival.close)
            for rival in rivals:
                rival.wait()
            for (row, work), rival in zip(chunk, rivals, strict=True):
                if time.monotonic() > deadline:
                    yield replace(row, note=LATE)
                    continue
                (outcome,) = backend.evaluate([Candidate(work.spec, work.configs)])
                yield compared(replace(row, checked="GPU", error=outcome.error, note=outcome.cause), outcome.timing, rival.timings())


def compared(row: Row, timing: Timing | None, pytorch: Mapping[str, Timing]) -> Row:
    """The row with the times of its kernels and of PyTorch's fastest form, and what a module would use."""
    if not pytorch:
        return replace(row, timing=timing)
    name, best = min(pytorch.items(), key=lambda item: item[1].device)
    unbeaten = unbeaten_form(timing, pytorch) if timing else None
    return replace(row, timing=timing, form=name, pytorch=best, use=unbeaten[0] if unbeaten else KERNELS if timing else "")


def stays(earlier: Row | None, row: Row, gpu: str) -> bool:
    """Whether an earlier run has checked these very kernels, on a GPU if there is one now."""
    return earlier is not None and earlier.source == row.source and earlier.error is not None and (earlier.checked == "GPU" or not gpu)


def aged(row: Row, earlier: Row | None) -> Row:
    """The row with the times that kernels of an earlier source had, where its own have none."""
    if row.timing is not None or earlier is None or earlier.timing is None:
        return row
    note = "; ".join(dict.fromkeys(text for text in (*row.note.split("; "), EARLIER) if text))
    return replace(row, timing=earlier.timing, pytorch=earlier.pytorch, form=earlier.form, use=earlier.use, note=note)


def run(
    shapes: Sequence[Shape],
    to: Target,
    folder: Path,
    check: Callable[[Sequence[tuple[Row, Work]]], Iterator[Row]],
    facts_now: Mapping[str, str],
    tuned: Mapping[BlockSpec, Mapping[str, Config]],
    fresh: bool = False,
    only: Callable[[Row], bool] = lambda row: True,
    say: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Plans every shape, has `check` look at those (of `only`) that are new here, and writes both files after each, so that nothing
    is lost."""
    before, known = ({}, {}) if fresh else read(folder / "shapes.json")
    same = all(before.get(name, "") == facts_now.get(name, "") for name in ("gpu", "driver", "torch"))
    keep = same or not facts_now.get("gpu")
    facts = before if keep and before.get("gpu") else facts_now  # the figures that stay are of that machine
    if keep and facts_now.get("gpu") and facts_now["date"] not in facts["date"]:
        facts = {**facts, "date": f"{facts['date'].split(' ')[0]} to {facts_now['date']}"}
    planned = [plan(shape, to, tuned) for shape in shapes]
    done: dict[str, Row] = {}
    for row, work in planned:
        earlier = known.get(row.name)
        if work is None:
            done[row.name] = row
        elif keep and earlier is not None and stays(earlier, row, facts_now.get("gpu", "")):
            done[row.name] = earlier
    todo = [(row, work) for row, work in planned if work is not None and row.name not in done and only(row)]
    todo.sort(key=lambda item: item[0].name in known and known[item[0].name].timing is not None)  # what never had a time comes first
    if keep:
        planned = [(aged(row, known.get(row.name)), work) for row, work in planned]
    for index, row in enumerate(check(todo), 1):
        done[row.name] = aged(row, known.get(row.name)) if keep else row
        say(f"{index}/{len(todo)} {row.name}: {row.note or 'ok'}{f', {row.speedup:.2f}x' if row.speedup else ''}")
        write(folder, [done.get(planned_row.name, planned_row) for planned_row, _ in planned], facts)
    rows = [done.get(row.name, row) for row, _ in planned]
    write(folder, rows, facts)
    return rows


def main(
    out: Annotated[Path, typer.Option(help="Folder of shapes.md and shapes.json.")] = Path("docs"),
    budget: Annotated[float, typer.Option(min=1.0, help="Seconds after which nothing more is begun.")] = 480.0,
    only: Annotated[list[str] | None, typer.Option(help="Part of a model's name: check no others. May be repeated.")] = None,
    forms: Annotated[str, typer.Option(help="PyTorch's forms to compare with, by comma.")] = ",".join(FORMS),
    modules: Annotated[Path, typer.Option(help="Folder of tuned modules.")] = Path("generated"),
    arch: Annotated[str, typer.Option(help="Without a GPU: the architecture to generate for.")] = "sm_90",
    cpu: Annotated[bool, typer.Option("--cpu", help="Use the emulator where there is a GPU too.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Keep nothing of an earlier run.")] = False,
) -> None:
    """Check every shape of the field, time it on a GPU, and write the tables."""
    import torch

    deadline = time.monotonic() + budget
    gpu = None if cpu else visible_gpu()
    if gpu is not None and (reason := obstacle(gpu)):
        raise SpecError(reason)
    to = gpu.target if gpu else target(arch)
    facts = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "arch": to.arch, "torch": torch.__version__}
    facts |= {"gpu": gpu.name if gpu else "", "driver": gpu.driver if gpu else ""}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # files that are no modules
        tuned = {m.spec: m.configs for m in list_modules(modules) if m.arch == to.arch and m.provenance.measured}
    names = tuple(name.strip() for name in forms.split(",") if name.strip())

    def check(todo: Sequence[tuple[Row, Work]]) -> Iterator[Row]:
        if gpu is None:
            yield from on_emulator(todo, deadline)
            return
        from tuner.gpu_backend import GpuBackend, Limits

        with GpuBackend(gpu, limits=Limits(trial=60.0, prepare=180.0)) as backend:
            rival = functools.partial(Forms, uuid=gpu.uuid, environment=gpu.environment, limit=90.0, names=names)
            yield from on_gpu(todo, deadline, backend, rival)

    def wanted(row: Row) -> bool:
        return not only or any(part.lower() in row.model.lower() for part in only)

    rows = run(SHAPES, to, out, check, facts, tuned, fresh, wanted, typer.echo)
    typer.echo(f"{out / 'shapes.md'}: {sum(not row.refused for row in rows)} of {len(rows)} shapes served")


if __name__ == "__main__":
    typer.run(main)
