"""The tables of a comparison in Markdown, and their places in documents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.cases import CASES, SHORT
from benchmarks.floors import NOMINAL, Ceilings, floors, work
from benchmarks.results import Report, Result, mean_gain
from codegen.spec import SpecError

COMPARISON, FLOORS = "comparison", "floors"
"""Names of the delimited places of a document: between `<!-- NAME: begin -->` and `<!-- NAME: end -->`."""
_ADVICE = " Search for `cuda"
"""With which PyTorch goes on behind what a CUDA error was."""


def comparison(report: Report) -> str:
    """Everything a report says: machine, means, the table of ratios and floors, every form, and what is missing."""
    versions = dict(report.versions)
    machine = [f"driver {report.driver}", *(f"{name} {versions[name]}" for name in ("torch", "cuda") if name in versions)]
    lines = [f"{report.gpu} ({report.arch}; {', '.join(machine)}), {report.date}, {report.seconds:.0f} s: `{report.command}`", ""]
    if not report.complete:
        lines += ["This run was not completed.", ""]
    lines += [_mean(report, dtype) for dtype in SHORT if any(result.case.dtype == dtype for result in report.results)]
    lines += ["", _ceilings(report.ceilings), "", *_ratios(report.results), "", *_forms(report.results)]
    if missing := [f"- {result.case.name}: {note.partition(_ADVICE)[0]}" for result in report.results for note in result.notes]:
        lines += ["", "Notes:", "", *missing]
    return "\n".join(lines) + "\n"


def floor_table(ceilings: Ceilings = NOMINAL) -> str:
    """The floors of every case on a card, in microseconds."""
    rows = []
    for case in CASES:
        todo, least = work(case), floors(case, ceilings)
        counted = (f"{todo.flops / 1e9:.3f}", f"{todo.axis_bytes / 1e6:.2f}", f"{todo.fused_bytes / 1e6:.2f}")
        times = (_us(least.arithmetic), _us(least.axis_bytes), _us(least.fused_bytes))
        rows.append([case.name, *counted, *times, least.limit, _us(case.target_us)])
    heads = ["case", "GFLOP", "MB per axis", "MB fused", "arithmetic", "bytes per axis", "bytes fused", "higher", "target"]
    return "\n".join([_ceilings(ceilings), "", *markdown(heads, rows, left=(0, 7))]) + "\n"


def insert(document: Path, name: str, text: str) -> None:
    """Replaces what stands in the delimited place `name` of a document; SpecError when it has none, or cannot be read."""
    before, after = around(document, name)
    document.write_text(f"{before}\n{text.strip()}\n{after}", encoding="utf-8")


def around(document: Path, name: str) -> tuple[str, str]:
    """What stands before and behind that place, its delimiters included."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    try:
        whole = document.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError(f"{document} cannot be read: {error.strerror or error}") from None
    if whole.count(begin) != 1 or whole.count(end) != 1 or whole.index(begin) > whole.index(end):
        raise SpecError(f"{document} has no place for the table: it needs the lines {begin} and {end}")
    return whole[: whole.index(begin) + len(begin)], whole[whole.index(end) :]


def _mean(report: Report, dtype: str) -> str:
    mean, count = mean_gain(report, dtype)
    asked = sum(result.case.dtype == dtype for result in report.results)
    if mean is None:
        return f"- {SHORT[dtype]}: no module was measured beside PyTorch."
    least = min((result for result in report.results if result.case.dtype == dtype and result.gain), key=lambda result: result.gain or 0.0)
    return (
        f"- {SHORT[dtype]}: **{mean:.2f}x** PyTorch's best form (geometric mean of {count} of {asked} shapes), "
        f"least {least.gain:.2f}x at {least.case.shape.name}."
    )


def _ceilings(c: Ceilings) -> str:
    return (
        f"Ceilings: copy {c.copy_tbs:.2f} TB/s; products {c.fp32_tflops:.0f} (fp32), {c.tf32_tflops:.0f} (tf32), "
        f"{c.bf16_tflops:.0f} (bf16) TFLOP/s, "
        f"so {c.product_tflops('float32'):.0f} for float32 grade; a tiny kernel in a graph {c.kernel_us:.1f} us."
    )


def _ratios(results: Sequence[Result]) -> list[str]:
    rows = []
    for r in results:
        best, module, rival = r.best, r.module, r.rival
        rows.append(
            [
                r.case.name,
                f"{_us(best[1].device)} ({best[0]})" if best else "-",
                _us(rival.timing.device if rival else None),
                f"**{_us(module.timing.device)}**" if module else "-",
                _us(r.case.target_us),
                _times(r.gain),
                _times(r.rival_gain),
                _us(r.floors.arithmetic),
                _us(r.floors.axis_bytes),
                _us(r.floors.fused_bytes),
                _times(r.above_floor),
                f"{module.error:.1e}" if module and module.error is not None else "-",
            ]
        )
    heads = ["case", "best PyTorch", "Triton, fused", "module", "target", "over PyTorch", "over Triton"]
    heads += ["floor: arithmetic", "floor: bytes per axis", "floor: bytes fused", "module / floor", "error"]
    return ["Device time in microseconds:", "", *markdown(heads, rows, left=(0, 1))]


def _forms(results: Sequence[Result]) -> list[str]:
    names = list(dict.fromkeys(form for result in results for form in result.pytorch))
    rows = []
    for r in results:
        timings = [r.pytorch.get(name) for name in names] + [one.timing if one else None for one in (r.rival, r.module)]
        cells = [f"{_us(timing.device)} / {_us(timing.wall)}" if timing else "-" for timing in timings]
        rows.append([r.case.name, *cells, _us(r.module.timing.cold if r.module else None), _us(r.module.wall_grad if r.module else None)])
    heads = ["case", *names, "Triton, fused", "module", "module, L2 flushed", "module, wall with grad mode"]
    return ["Every form, device / wall time in microseconds:", "", *markdown(heads, rows)]


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]], left: tuple[int, ...] = (0,)) -> list[str]:
    """The lines of a table; `left`: columns that are not figures."""
    rule = ["---" if index in left else "---:" for index in range(len(heads))]
    return [f"| {' | '.join(cells)} |" for cells in (heads, rule, *rows)]


def _us(value: float | None) -> str:
    if value is None or value <= 0.0:
        return "-"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
