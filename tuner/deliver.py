"""The last step: the winner as a module, built and measured exactly as it will be deployed before it is put in place."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from codegen.module import Provenance, module_name, update_index, write_module
from codegen.render import render
from codegen.spec import SpecError
from tuner.finals import Choice
from tuner.records import records_path
from tuner.trial import Outcome, Timing
from tuner.tune import Delivery, TuneOptions, TuningBackend

REJECTED = ("wrong", "fault", "crash")
"""What becomes of a module that must not be delivered; whatever else prevents measuring it is only noted in it."""


def best_form(pytorch: Mapping[str, Timing]) -> tuple[str, Timing] | None:
    """PyTorch's fastest form by device time, and its name."""
    return min(pytorch.items(), key=lambda item: item[1].device) if pytorch else None


def provenance(options: TuneOptions, choice: Choice, pytorch: Mapping[str, Timing], partial: bool, backend: TuningBackend) -> Provenance:
    """What the module's header says, before the module itself was measured."""
    machine, outcome = backend.machine, choice.winner
    versions = dict(machine.versions)
    form = best_form(pytorch)
    timing = outcome.timing
    default = choice.default
    model = getattr(backend, "calibration", None)
    note = choice.reason[:1].upper() + choice.reason[1:] + "."
    if not machine.measures:
        note += f" Coefficients of the model: {model.origin if model else 'unknown'}."
        note += " Run the command again on a machine with the GPU to measure."
    return Provenance(
        measured=machine.measures,
        command=options.command,
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        gpu=machine.gpu,
        driver=machine.driver,
        torch=versions.pop("torch", ""),
        cuda=versions.pop("cuda", ""),
        versions=versions,
        device_us=timing.device if timing else None,
        spread_us=timing.spread if timing else None,
        cold_us=(timing.cold or None) if timing else None,
        wall_us=(timing.wall or None) if timing else None,
        default_us=default.timing.device if default and default.timing else None,
        pytorch_us=form[1].device if form else None,
        pytorch_form=form[0] if form else "",
        predicted_us=outcome.predicted_us,
        error=outcome.error,
        partial=partial,
        note=note,
    )


def deliver(options: TuneOptions, choice: Choice, pytorch: Mapping[str, Timing], partial: bool, backend: TuningBackend) -> Delivery:
    """Writes the module of a choice and the folder's index. On a GPU the module is first written aside, built and measured, and
    is put in place with those figures. SpecError when the folder cannot be written or the built module is wrong."""
    outcome = choice.winner
    source = render(options.spec, outcome.candidate.configs)
    facts = provenance(options, choice, pytorch, partial, backend)
    result = Delivery(Path(), outcome.timing, outcome.error)
    if backend.machine.measures and not partial:
        with tempfile.TemporaryDirectory(prefix="axialtune-") as aside:
            draft = write_module(aside, source, outcome.candidate.configs, facts, options.target)
            built = backend.module(draft, options.spec)  # type: ignore[attr-defined]
        if built.status in REJECTED:
            raise SpecError(f"the module as built is not delivered: {built.cause}")
        if built.timing is None:
            facts = replace(facts, note=f"{facts.note} Times are the tuner's; the module as built was not measured: {built.cause}".strip())
        else:
            facts = replace(
                facts,
                device_us=built.timing.device,
                spread_us=built.timing.spread,
                cold_us=built.timing.cold or None,
                wall_us=built.timing.wall or None,
                error=built.error,
            )
            result = Delivery(Path(), built.timing, built.error, built.wall_grad)
    path = write_module(options.out, source, outcome.candidate.configs, facts, options.target)
    update_index(options.out)
    return replace(result, path=path)


def records_file(options: TuneOptions, predicted: bool) -> Path:
    """Where the records of the options' module lie."""
    return records_path(options.out, Path(module_name(options.spec, options.target.arch, predicted)).stem)


def outcome_row(name: str, outcome: Outcome | None) -> tuple[str, float | None, float | None, float | None]:
    """(name, device or predicted time, wall time, error) of an outcome, for the closing table."""
    if outcome is None or not outcome.ok:
        return name, None, None, None
    return name, outcome.score, (outcome.timing.wall or None) if outcome.timing else None, outcome.error
