"""The `staged` family's attention kernel alone, in several configurations of one run on the present GPU.

    python -m benchmarks.attention [--case "long bf16"] [--axis row] [--set attn_rows=2,attn_key_tile=32 ...] [--out FILE.json]

Each configuration is compiled, verified as a whole axis (float64, see tuner/verify.py), and its attention kernel then timed by itself, on
what the kernel before it left in scratch. Beside the time stands what the exponentials alone would take at 16 a cycle and multiprocessor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.cases import CASES as ALL_CASES
from benchmarks.cases import Case
from codegen.config import Value
from codegen.render import render
from codegen.spec import SpecError
from codegen.staged import StagedConfig, StagedPlan, default
from codegen.target import Target
from tuner.compile import CompileError, compile_source
from tuner.gpu import visible_gpu
from tuner.space import parse_fixed
from tuner.verify import Checker

CASES = ("long bf16", "long fp32", "msa bf16", "msa fp32")
# Beside the default: changes to it, by the bits of the element type
VARIANTS: Mapping[int, tuple[str, ...]] = {
    16: (
        "attn_warps=8,attn_rows=1,attn_key_tile=64,attn_stages=1,attn_sums=add,attn_polynomial=0,attn_blocks=1",
        "attn_warps=8,attn_rows=1,attn_key_tile=64,attn_stages=1,attn_sums=product,attn_polynomial=0,attn_blocks=1",
        "attn_warps=8,attn_rows=1,attn_key_tile=64,attn_stages=1,attn_sums=product,attn_polynomial=2,attn_blocks=1",
        "attn_warps=4,attn_rows=2,attn_key_tile=32,attn_stages=1,attn_sums=product,attn_polynomial=0,attn_blocks=1",
        "attn_warps=4,attn_rows=2,attn_key_tile=32,attn_stages=1,attn_sums=product,attn_polynomial=1,attn_blocks=1",
        "attn_warps=4,attn_rows=2,attn_key_tile=32,attn_stages=1,attn_sums=product,attn_polynomial=2,attn_blocks=1",
        "attn_warps=4,attn_rows=2,attn_key_tile=32,attn_stages=1,attn_sums=product,attn_polynomial=3,attn_blocks=1",
        "attn_warps=8,attn_rows=2,attn_key_tile=32,attn_stages=1,attn_sums=product,attn_polynomial=2,attn_blocks=1",
        "attn_warps=4,attn_rows=2,attn_key_tile=64,attn_stages=1,attn_sums=product,attn_polynomial=2,attn_blocks=1",
        "attn_warps=4,attn_rows=2,attn_key_tile=32,attn_stages=1,attn_sums=add,attn_polynomial=2,attn_blocks=1",
        "attn_warps=4,attn_rows=1,attn_key_tile=32,attn_stages=1,attn_sums=product,attn_polynomial=2,attn_blocks=1",
        "attn_warps=4,attn_rows=2,attn_key_tile=64,attn_stages=2,attn_sums=product,attn_polynomial=2,attn_blocks=1",
    ),
    32: (
        "attn_warps=4,attn_rows=1,attn_key_tile=64,attn_stages=3,attn_blocks=1",
        "attn_warps=4,attn_rows=1,attn_key_tile=64,attn_stages=1,attn_blocks=1",
        "attn_warps=4,attn_rows=1,attn_key_tile=32,attn_stages=1,attn_blocks=1",
        "attn_warps=4,attn_rows=1,attn_key_tile=16,attn_stages=1,attn_blocks=1",
        "attn_warps=4,attn_rows=2,attn_key_tile=16,attn_stages=1,attn_blocks=1",
        "attn_warps=4,attn_rows=2,attn_key_tile=32,attn_stages=1,attn_blocks=1",
        "attn_warps=8,attn_rows=1,attn_key_tile=32,attn_stages=1,attn_blocks=1",
        "attn_warps=8,attn_rows=2,attn_key_tile=16,attn_stages=1,attn_blocks=1",
        "attn_warps=4,attn_rows=2,attn_key_tile=16,attn_stages=3,attn_blocks=1",
        "attn_warps=4,attn_rows=1,attn_key_tile=32,attn_stages=3,attn_blocks=4",
    ),
}


@dataclass(frozen=True)
class Row:
    """One measured configuration. error: over the output's root mean square; us: of the attention kernel; cause: why there is no time."""

    case: str
    axis: str
    settings: dict[str, Value]
    registers: int = 0
    local_bytes: int = 0
    error: float = 0.0
    us: float = 0.0
    spread_us: float = 0.0
    exponentials_us: float = 0.0
    cause: str = ""


def changed(start: StagedConfig, text: str) -> StagedConfig:
    """`start` with NAME=VALUE settings that commas divide; SpecError when one is none."""
    return replace(start, **parse_fixed(part for part in text.split(",") if part))  # type: ignore[arg-type]


def row_of(case: Case, axis: str, config: StagedConfig, to: Target, checker: Checker) -> Row:
    """Compiles, verifies and times one configuration on this process's GPU."""
    import torch

    from codegen.reference import random_input, random_weights
    from tuner.launch import Loaded
    from tuner.measure import measure

    spec = replace(case.spec(), axes=(axis,))
    problem = spec.problem(axis)
    settings = {name: value for name, value in config.to_dict().items() if name.startswith("attn_") or name == "math"}
    properties = torch.cuda.get_device_properties(0)
    scores = problem.sequences * problem.length**2 * spec.heads
    row = Row(case.name, axis, settings, exponentials_us=scores / (16 * properties.multi_processor_count * to.clock))
    if reasons := StagedPlan(problem, config).reasons(to):
        return replace(row, cause="; ".join(reasons))
    source = render(spec, {axis: config})
    try:
        compiled = compile_source(source, to)
    except CompileError as error:
        return replace(row, cause=str(error))
    used = compiled.resources[f"axial_{axis}_attention"]
    row = replace(row, registers=used.registers, local_bytes=used.local_bytes)
    loaded = Loaded(source, compiled.cubin)
    check = checker(loaded)
    if not check.ok:
        return replace(row, error=check.error, cause=check.cause)
    generator = torch.Generator("cuda").manual_seed(0)
    x, weights = random_input(spec, generator), random_weights(spec, generator)
    forward = loaded.bind(x, weights, torch.empty_like(x))
    forward()
    index = next(i for i, kernel in enumerate(source.kernels) if kernel.name == f"axial_{axis}_attention")
    timing = measure([partial(forward, index)])
    torch.cuda.synchronize()
    loaded.unload()
    return replace(row, error=check.error, us=timing.device, spread_us=timing.spread)


def main(
    case: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(CASES)} or of benchmarks/cases.py; may be repeated.")] = None,
    axis: Annotated[list[str] | None, typer.Option(help="row or col; both by default, which for square grids differ little.")] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE,... instead of the listed variants; may be repeated.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file for the rows.")] = None,
) -> None:
    """See the module's text."""
    gpu = visible_gpu()
    if gpu is None:
        raise SystemExit("a GPU is needed")
    known = {one.name: one for one in ALL_CASES}
    rows: list[Row] = []
    try:
        for name in case or CASES:
            if name not in known:
                raise SpecError(f"case must be one of {', '.join(known)}, not {name!r}")
            for which in axis or ("row", "col"):
                spec = replace(known[name].spec(), axes=(which,))
                start = default(spec.problem(which), gpu.target)
                if start is None:
                    raise SpecError(f"{name} has no configuration of the staged family")
                checker = Checker(spec, 1, "cuda", quick=True)
                texts = setting or VARIANTS[8 * spec.itemsize]
                for config in dict.fromkeys([start, *(changed(start, text) for text in texts)]):
                    rows.append(row_of(known[name], which, config, gpu.target, checker))
                    _print(rows[-1:], len(rows) == 1)
                    if out:
                        out.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    except SpecError as error:
        raise SystemExit(f"error: {error}") from None
    best = {(row.case, row.axis): row for row in sorted(rows, key=lambda row: -row.us) if row.us}
    Console(width=200).print("best of each:")
    _print(list(best.values()), True)


def _print(rows: list[Row], head: bool) -> None:
    table = Table(show_header=head, box=None)
    for title, width in (("case", 10), ("axis", 4), ("us", 8), ("spread", 6), ("exp us", 6), ("regs", 5), ("local", 5), ("error", 8)):
        table.add_column(title, width=width)
    table.add_column("settings or cause")
    for row in rows:
        numbers = (f"{row.us:.1f}", f"{row.spread_us:.1f}", f"{row.exponentials_us:.0f}", str(row.registers), str(row.local_bytes))
        settings = " ".join(f"{name.removeprefix('attn_')}={value}" for name, value in row.settings.items())
        table.add_row(row.case, row.axis, *numbers, f"{row.error:.1e}", f"{settings} {row.cause}")
    Console(width=200).print(table)


if __name__ == "__main__":
    typer.run(main)
