"""The last step: the winner as a module, built and measured exactly as it will be deployed before it is put in place."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from codegen.config import Config
from codegen.library import KERNELS
from codegen.module import Provenance, module_name, update_index, write_module
from codegen.render import Source, render
from codegen.spec import SpecError
from tuner.finals import Choice, unbeaten_form
from tuner.gpu_backend import ModuleTiming
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
        pytorch_wall_us=(form[1].wall or None) if form else None,
        pytorch_form=form[0] if form else "",
        predicted_us=outcome.predicted_us,
        error=outcome.error,
        partial=partial,
        note=note,
    )


@dataclass(frozen=True)
class _Draft:
    """A module before it is put in place: everything in it, and what is known of its speed."""

    options: TuneOptions
    source: Source
    configs: Mapping[str, Config]
    facts: Provenance
    result: Delivery
    use: str = KERNELS

    def write(self, directory: Path | str) -> Path:
        return write_module(directory, self.source, self.configs, self.facts, self.options.target, self.use)

    def build(self, backend: TuningBackend) -> ModuleTiming:
        """Writes it aside, builds it and measures it."""
        with tempfile.TemporaryDirectory(prefix="axialtune-") as aside:
            return backend.module(self.write(aside), self.options.spec)  # type: ignore[attr-defined]

    def noted(self, note: str) -> _Draft:
        return replace(self, facts=replace(self.facts, note=f"{self.facts.note} {note}".strip()))

    def timed(self, timing: Timing, error: float | None, wall_grad: float = 0.0) -> _Draft:
        facts = replace(
            self.facts,
            device_us=timing.device,
            spread_us=timing.spread,
            cold_us=timing.cold or None,
            wall_us=timing.wall or None,
            error=error,
        )
        return replace(self, facts=facts, result=Delivery(Path(), timing, error, wall_grad))

    def using(self, form: str, timing: Timing) -> _Draft:
        """The same with a PyTorch form in the place of the kernels, whose times are kept beside the form's."""
        facts = replace(self.facts, kernels_us=self.facts.device_us, kernels_wall_us=self.facts.wall_us)
        return replace(self, facts=facts, use=form).timed(timing, None)


def deliver(options: TuneOptions, choice: Choice, pytorch: Mapping[str, Timing], partial: bool, backend: TuningBackend) -> Delivery:
    """Writes the module of a choice and the folder's index. On a GPU the module is first written aside, built and measured, and
    is put in place with those figures; it uses PyTorch's best form where that is not beaten. SpecError when the folder cannot
    be written or the built module is wrong."""
    outcome = choice.winner
    configs = outcome.candidate.configs
    facts = provenance(options, choice, pytorch, partial, backend)
    draft = _Draft(options, render(options.spec, configs), configs, facts, Delivery(Path(), outcome.timing, outcome.error))
    builds = backend.machine.measures and not partial
    if builds:
        built = draft.build(backend)
        if built.status in REJECTED:
            raise SpecError(f"the module as built is not delivered: {built.cause}")
        if built.timing is None:
            draft = draft.noted(f"Times are the tuner's; the module as built was not measured: {built.cause}")
        else:
            draft = draft.timed(built.timing, built.error, built.wall_grad)
    if backend.machine.measures:
        draft = _no_slower(draft, pytorch, backend if builds else None)
    path = draft.write(options.out)
    update_index(options.out)
    return replace(draft.result, path=path, use=draft.use)


def _no_slower(draft: _Draft, pytorch: Mapping[str, Timing], backend: TuningBackend | None) -> _Draft:
    """The draft, or where PyTorch's best form is not beaten, one that uses it: measured as deployed too, if there is a backend, and
    kept only if it is right and no slower than the kernels."""
    kernels = draft.result.timing
    best = unbeaten_form(kernels, pytorch) if kernels is not None else None
    if kernels is None or best is None:
        return draft
    form, timing = best
    library = draft.using(form, timing)
    if backend is None:
        return library
    built = library.build(backend)
    if built.timing is None:
        return draft.noted(f"PyTorch's {form} form was measured at {timing.device:.2f} us, but a module of it failed: {built.cause}")
    if built.timing.device > kernels.device:
        return draft.noted(f"PyTorch's {form} form was measured at {timing.device:.2f} us, but in a module at {built.timing.device:.2f} us")
    return library.timed(built.timing, built.error, built.wall_grad)


def records_file(options: TuneOptions, predicted: bool) -> Path:
    """Where the records of the options' module lie."""
    return records_path(options.out, Path(module_name(options.spec, options.target.arch, predicted)).stem)


def outcome_row(name: str, outcome: Outcome | None) -> tuple[str, float | None, float | None, float | None]:
    """(name, device or predicted time, wall time, error) of an outcome, for the closing table."""
    if outcome is None or not outcome.ok:
        return name, None, None, None
    return name, outcome.score, (outcome.timing.wall or None) if outcome.timing else None, outcome.error
