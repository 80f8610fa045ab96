"""What the GPU's counters say about the modules under generated/, as a table:

    python -m benchmarks.counters [--case seed --dtype bf16] [--json FILE] [--into docs/performance.md]

Each module is built, then called under NVIDIA's ncu with clocks and caches left as they are: half a minute for all, then ten seconds each.
Everything is of one forward, after others. What has been counted is printed and written as it comes.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cases import Case, select
from benchmarks.run import find_modules, specs_of
from benchmarks.table import around, insert, markdown
from codegen.module import Emitted, replace_file
from codegen.spec import SpecError
from tuner.gpu import Gpu, obstacle, visible_gpu
from tuner.worker import changed_environment, kill_group

COUNTERS = "counters"
"""The place of the table in a document (benchmarks/table.py)."""
PERCENT = {
    "tensor cores": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "issue": "sm__issue_active.avg.pct_of_peak_sustained_elapsed",
    "shared memory": "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
    "L2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "DRAM": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
}
"""Column -> the metric, in percent of what the unit can do in the kernel's time."""
TIME, REGISTERS, WARPS = "gpu__time_duration.sum", "launch__registers_per_thread", "smsp__warps_active.avg.per_cycle_active"
WAVEFRONTS, IDEAL = "memory_l1_wavefronts_shared", "memory_l1_wavefronts_shared_ideal"
REPLAYS, ALL_WAVEFRONTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum", "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
SECTIONS = ("SpeedOfLight", "LaunchStats", "WarpStateStats", "SourceCounters")
MICROSECONDS = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3}
CALLS, SECONDS = 4, 300


@dataclass(frozen=True)
class Counted:
    """A kernel: microseconds; column of PERCENT -> percent; registers a thread; warps of a scheduler; of the wavefronts of its accesses to
    shared memory, the percent that their bank conflicts add, and what replays of any cause do (both None where it has none);
    reasons why a warp waits, the largest first, in cycles an issued instruction."""

    name: str
    us: float
    percent: dict[str, float]
    registers: int
    warps: float
    conflicts: float | None
    replays: float | None
    stalls: tuple[tuple[str, float], ...]


def parse(text: str) -> list[Counted]:
    """The kernels of ncu's `--page raw --csv`; SpecError when it is none, or lacks a metric."""
    rows = list(csv.reader(line for line in text.splitlines() if line.startswith('"')))
    if len(rows) < 3 or "Kernel Name" not in rows[0]:
        raise SpecError("ncu reported no kernel")
    heads = rows[0]
    try:
        units = dict(zip(*rows[:2], strict=True))
        return [_counted(dict(zip(heads, row, strict=True)), units) for row in rows[2:]]
    except (KeyError, ValueError) as error:
        raise SpecError(f"ncu's report has no such figure: {error}") from None


def _counted(row: Mapping[str, str], units: Mapping[str, str]) -> Counted:
    def value(name: str) -> float:
        return float(row[name].replace(",", ""))

    def share(part: float, whole: str) -> float | None:
        return 100.0 * part / value(whole) if value(whole) else None

    stalls = {match[1]: value(name) for name in row if (match := STALL.fullmatch(name)) and match[1] != "selected"}
    return Counted(
        name=row["Kernel Name"].removeprefix("axial_"),
        us=value(TIME) * MICROSECONDS[units[TIME]],
        percent={column: value(metric) for column, metric in PERCENT.items()},
        registers=int(value(REGISTERS)),
        warps=value(WARPS),
        # ncu has no ideal figure of the first kernel that it looks at
        conflicts=share(value(WAVEFRONTS) - value(IDEAL), WAVEFRONTS) if value(IDEAL) else None,
        replays=share(value(REPLAYS), ALL_WAVEFRONTS),
        stalls=tuple(sorted(stalls.items(), key=lambda stall: -stall[1])[:3]),
    )


def table(counted: Mapping[Case, Sequence[Counted]]) -> list[str]:
    """In Markdown, a kernel a row."""
    heads = ["case", "kernel", "us", *PERCENT, "registers", "warps a scheduler", "bank conflicts", "replays", "why warps wait"]
    rows = [
        [
            case.name, k.name, f"{k.us:.1f}", *(f"{k.percent[column]:.0f}%" for column in PERCENT), str(k.registers), f"{k.warps:.1f}",
            *("-" if share is None else f"{share:.1f}%" for share in (k.conflicts, k.replays)),
            ", ".join(f"{name.replace('_', ' ')} {cycles:.1f}" for name, cycles in k.stalls),
        ]
        for case, kernels in counted.items() for k in kernels
    ]  # fmt: skip
    return markdown(heads, rows, left=(0, 1, len(heads) - 1))


def profile(module: Emitted, ncu: str, environment: Mapping[str, str]) -> list[Counted]:
    """The kernels of one forward; SpecError when ncu cannot count, with what it says."""
    kernels = len(module.source.kernels)
    metrics = ",".join([*PERCENT.values(), TIME, REGISTERS, WARPS, WAVEFRONTS, IDEAL, REPLAYS, ALL_WAVEFRONTS])
    command = [
        ncu, "--clock-control", "none", "--cache-control", "none", *(part for section in SECTIONS for part in ("--section", section)),
        "--metrics", metrics, "--kernel-name", "regex:axial_", "--launch-skip", str((CALLS - 1) * kernels), "--launch-count", str(kernels),
        "--page", "raw", "--csv", sys.executable, "-m", "benchmarks.once", str(module.path), "--calls", str(CALLS),
    ]  # fmt: skip
    output, errors = run(command, environment)
    try:
        counted = parse(output)
        if len(counted) != kernels:
            raise SpecError(f"ncu reported {len(counted)} kernels of {kernels}")
    except SpecError as error:
        why = " ".join(line for line in (output + errors).splitlines() if not line.startswith('"'))[-300:].strip()
        raise SpecError(f"{error}: {why or 'it said nothing'}") from None
    return counted


def run(command: Sequence[str], environment: Mapping[str, str]) -> tuple[str, str]:
    """What a program writes to its two outputs. It and what it has started end after SECONDS, with a SpecError."""
    with subprocess.Popen(
        command, env=dict(environment), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            return process.communicate(timeout=SECONDS)
        except BaseException as error:
            kill_group(process.pid)
            if isinstance(error, subprocess.TimeoutExpired):
                raise SpecError(f"{Path(command[0]).name} took more than {SECONDS} s") from None
            raise


def build(modules: Iterable[Emitted], environment: Mapping[str, str]) -> None:
    """Calls each once in a process of its own, several at a time, so that ncu need not wait for nvcc. Why one fails is for `profile` to
    say."""

    def once(module: Emitted) -> None:
        with contextlib.suppress(SpecError):
            run([sys.executable, "-m", "benchmarks.once", str(module.path), "--calls", "1"], environment)

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        list(pool.map(once, modules))


def told(counted: Mapping[Case, Sequence[Counted]], gpu: Gpu, date: str, command: str) -> str:
    """The table with the machine and the command."""
    machine = f"{gpu.name} ({gpu.target.arch}; driver {gpu.driver}), {date}: `{command}`"
    return "\n".join([machine, "", *table(counted)]) + "\n"


def main(
    case: Annotated[list[str] | None, typer.Option("--case", help="A shape by name; may be repeated. All by default.")] = None,
    dtype: Annotated[list[str] | None, typer.Option("--dtype", help="fp32 or bf16; may be repeated. Both by default.")] = None,
    generated: Annotated[Path, typer.Option(help="Folder of the modules.")] = Path("generated"),
    json_file: Annotated[Path | None, typer.Option("--json", help="A file for all figures.")] = None,
    into: Annotated[Path | None, typer.Option(help="A document whose table is replaced.")] = None,
) -> None:
    """See the module's text."""
    gpu, ncu = visible_gpu(), shutil.which("ncu")
    if into is not None:
        around(into, COUNTERS)
    if gpu is None or ncu is None:
        raise SpecError("a GPU is needed, and ncu on the PATH (it comes with the CUDA toolkit)")
    if reason := obstacle(gpu):
        raise SpecError(reason)
    specs, _ = specs_of(select(case or (), dtype or ()))
    found = find_modules(generated, specs.values(), gpu.target.arch)
    modules = {case: found[spec] for case, spec in specs.items() if spec in found}
    if not modules:
        raise SpecError(f"{generated} has no module of these cases for {gpu.target.arch}")
    named = [part for name, values in (("case", case), ("dtype", dtype)) for value in values or () for part in (f"--{name}", value)]
    command = " ".join(["python -m benchmarks.counters", *named])
    counted: dict[Case, list[Counted]] = {}
    with tempfile.TemporaryDirectory() as folder:  # ncu's lock file and what it keeps go there
        environment = changed_environment({**gpu.environment, "TMPDIR": folder})
        typer.echo(f"building {len(modules)} modules", err=True)
        build(modules.values(), environment)
        for one, module in modules.items():
            try:
                counted[one] = profile(module, ncu, environment)
            except SpecError as error:
                typer.echo(f"{one.name}: {error}", err=True)
                continue
            typer.echo("\n".join(table({one: counted[one]})[2 if len(counted) > 1 else 0 :]))
            if json_file is not None:  # after each, so that nothing is lost
                figures = {case.name: [asdict(kernel) for kernel in kernels] for case, kernels in counted.items()}
                replace_file(json_file, json.dumps(figures, indent=1) + "\n")
            if into is not None:
                insert(into, COUNTERS, told(counted, gpu, datetime.now(UTC).strftime("%Y-%m-%d"), command))
    if not counted:
        raise SpecError("nothing was counted")


if __name__ == "__main__":
    try:
        typer.run(main)
    except SpecError as error:
        raise SystemExit(f"error: {error}") from None
