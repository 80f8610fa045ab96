"""Tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from codegen.library import KERNELS
from codegen.module import Emitted
from tuner.deliver import best_form, outcome_row
from tuner.doctor import Ability, Finding
from tuner.progress import causes
from tuner.trial import Timing
from tuner.tune import TuneOptions, TuneResult


def _us(value: float | None) -> str:
    return "-" if value is None or value <= 0.0 else f"{value:.2f}" if value < 1000 else f"{value:.0f}"


def closing(console: Console, options: TuneOptions, result: TuneResult, measured: bool) -> None:
    """The closing table of `tune` and the path of the module, or why there is none."""
    if result.choice is None:
        interrupted = "Interrupted before anything was verified: no module written."
        console.print(interrupted if result.interrupted else "No candidate could be verified.")
    else:
        console.print(_results(result, measured))
        console.print(result.choice.reason[:1].upper() + result.choice.reason[1:] + ".", markup=False, highlight=False)
    if result.delivery is not None and result.delivery.use != KERNELS:
        use = result.delivery.use
        console.print(f"No kernel beats PyTorch's {use} form by more than the noise: the module uses that form.", highlight=False)
    for line in causes(result.failed):
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    if result.delivery is not None:
        mark = " (partial: the search was interrupted)" if result.interrupted else ""
        console.print(f"Module: {result.delivery.path}{mark}", markup=False, highlight=False, soft_wrap=True)
        if not measured:
            console.print(
                f"This choice is predicted, not measured. On a machine with an {options.target.arch} GPU (e.g. {options.target.card}), "
                f"measure with:\n  {options.command or 'python cli.py tune'}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )


def _results(result: TuneResult, measured: bool) -> Table:
    table = Table(title="Result")
    table.add_column("")
    for heading in ("device us" if measured else "predicted us", "wall us", "speed-up", "error"):
        table.add_column(heading, justify="right")
    assert result.choice is not None
    form = best_form(result.pytorch)
    rows: list[tuple[str, float | None, float | None, float | None]] = []
    if form is not None:
        rows.append((f"PyTorch, {form[0]}", form[1].device, form[1].wall or None, None))
    rows.append(outcome_row("default configuration", result.choice.default))
    rows.append(outcome_row("winner", result.choice.winner))
    if result.delivery is not None and result.delivery.timing is not None and measured and not result.interrupted:
        timing = result.delivery.timing
        use = result.delivery.use
        name = "winner, module as deployed" if use == KERNELS else f"module as deployed, PyTorch's {use}"
        rows.append((name, timing.device, timing.wall or None, result.delivery.error))
    base = next((device for _, device, _, _ in rows if device), None)
    for name, device, wall, error in rows:
        gain = f"{base / device:.2f}x" if base and device else "-"
        table.add_row(name, _us(device), _us(wall), gain, "-" if error is None else f"{error:.1e}")
    return table


def bench_table(rows: Sequence[tuple[str, Timing]]) -> Table:
    """Device time warm and cold, and wall time, of several implementations; the speed-up is over the best of all but the last."""
    table = Table(title="Microseconds a forward")
    table.add_column("")
    for heading in ("device", "+-", "device, L2 flushed", "wall", "speed-up"):
        table.add_column(heading, justify="right")
    base = min((timing.device for _, timing in rows[:-1]), default=None)
    for name, timing in rows:
        gain = f"{base / timing.device:.2f}x" if base else "-"
        table.add_row(name, _us(timing.device), f"{timing.spread:.2f}", _us(timing.cold), _us(timing.wall), gain)
    return table


def modules_table(modules: Iterable[Emitted]) -> Table:
    """One row per module."""
    table = Table()
    for heading in ("module", "arch", "chosen on", "uses", "device us", "PyTorch us", "speed-up", "error"):
        table.add_column(heading, justify="left" if heading in ("module", "arch", "chosen on", "uses") else "right", overflow="fold")
    for module in modules:
        p = module.provenance
        device = p.device_us if p.measured else p.predicted_us
        gain = f"{p.pytorch_us / device:.2f}x" if p.pytorch_us and device else "-"
        where = (p.gpu or "a GPU") if p.measured else "predicted"
        shown = ("" if p.measured else "~") + _us(device)
        table.add_row(
            module.path.name,
            module.arch,
            where + (", partial" if p.partial else ""),
            module.family + (f" ({module.use})" if module.use != KERNELS else ""),
            shown,
            _us(p.pytorch_us),
            gain,
            "-" if p.error is None else f"{p.error:.1e}",
        )
    return table


def findings_table(findings: Iterable[Finding]) -> Table:
    """What the doctor found."""
    table = Table()
    for heading in ("", "", "found", "advice"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        table.add_row("ok" if finding.ok else "--", finding.name, finding.detail, finding.advice)
    return table


def abilities_table(abilities: Iterable[Ability]) -> Table:
    """What the findings allow."""
    table = Table()
    for heading in ("this machine can", "", "missing"):
        table.add_column(heading, overflow="fold")
    for ability in abilities:
        table.add_row(ability.name, "yes" if ability.ok else "no", ", ".join(ability.missing))
    return table
