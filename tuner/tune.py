"""The main job: search each axis, try the best together, write the winner as a module.

Nothing verified is ever lost: every outcome is recorded as it comes, and an interrupted run writes the best it has verified.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from codegen.config import Config, Value
from codegen.families import FAMILIES
from codegen.library import FORMS, KERNELS, LibraryConfig
from codegen.render import render
from codegen.spec import BlockSpec
from codegen.target import Target
from tuner.finals import MEASURED_AGAIN, Choice, choose_measured, combinations, prefer_predicted
from tuner.progress import Reporter
from tuner.records import Machine, Record, Records
from tuner.search import Known, Search, SearchOptions
from tuner.space import FP32_TOLERANCE, Space, spaces
from tuner.trial import OK, Candidate, Outcome, Timing

SEARCH_SHARE = 0.7
"""Of the budget, for the searches; the rest is for trying the best together."""
HOPELESS = 2.0
"""A family whose default is this many times slower than another's is not searched."""
MOST_CONFIRMED = 4
"""Candidates that may fail on the emulator before a run without a GPU gives up."""


class TuningBackend(Protocol):
    """What tune needs besides trial.Backend; a backend has measure_again, pytorch, pytorch_ready and module when
    machine.measures, confirm otherwise."""

    machine: Machine

    def evaluate(self, candidates: Iterable[Candidate]) -> Iterator[Outcome]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class TuneOptions:
    """trials: per axis; budget: seconds for everything before the module is written; fixed: tunables held at a value;
    storage: of the search, None for memory; resume: take over what earlier runs found; command: for the module's header."""

    spec: BlockSpec
    target: Target
    out: Path
    trials: int = 60
    budget: float = 90.0
    seed: int = 0
    tolerance: float = FP32_TOLERANCE
    fixed: Mapping[str, Value] = field(default_factory=dict)
    study: str = ""
    storage: Any = None
    resume: bool = True
    records: Records | None = None
    command: str = ""


@dataclass(frozen=True)
class Delivery:
    """The written module. timing, error: as deployed (None when not measured); wall_grad: microseconds a call with grad mode on;
    use: what it computes with, the kernels or one of PyTorch's forms."""

    path: Path
    timing: Timing | None = None
    error: float | None = None
    wall_grad: float = 0.0
    use: str = KERNELS


Deliver = Callable[["TuneOptions", Choice, Mapping[str, Timing], bool, TuningBackend], Delivery]
"""Writes the module of a choice, given PyTorch's timings and whether the run was cut short, and measures it where it can be."""


@dataclass(frozen=True)
class TuneResult:
    """choice and delivery are None when nothing was verified. failed: (status, cause) -> count over the whole run."""

    choice: Choice | None
    delivery: Delivery | None
    pytorch: Mapping[str, Timing]
    failed: Mapping[tuple[str, str], int]
    interrupted: bool
    trials: int

    @property
    def exit_code(self) -> int:
        """0; 130 after an interrupt; 3 when nothing could be verified."""
        return 130 if self.interrupted else 3 if self.choice is None else 0


def tune(options: TuneOptions, backend: TuningBackend, reporter: Reporter, deliver: Deliver) -> TuneResult:
    """Runs the main job. Raises SpecError when no configuration is legal, or something cannot be read or written."""
    return _Tuning(options, backend, reporter).run(deliver)


class _Tuning:
    def __init__(self, options: TuneOptions, backend: TuningBackend, reporter: Reporter) -> None:
        self.options, self.backend, self.reporter = options, backend, reporter
        spec = options.spec
        self.start = time.monotonic()
        self.spaces = spaces(spec, options.target, fixed=options.fixed, tolerance=options.tolerance)
        self.default = Candidate(spec, self._default_configs())
        self.ranked: dict[str, list[Config]] = {}
        self.tried: dict[str, dict[Config, Known]] = {axis: {} for axis in spec.axes}  # by this run, of one axis alone
        self.verified: list[Outcome] = []
        self.failed: Counter[tuple[str, str]] = Counter()
        self.pytorch: Mapping[str, Timing] = {}
        self.compared = False  # whether PyTorch's forms have been asked for
        self.trials = 0

    @property
    def measures(self) -> bool:
        return self.backend.machine.measures

    def run(self, deliver: Deliver) -> TuneResult:
        choice: Choice | None = None
        interrupted = False
        try:
            self._prepare()
            for axis in self.options.spec.axes:
                if not self._search(axis):
                    raise KeyboardInterrupt
                self._baseline(wait=False)  # waiting for it would be at the expense of the next axis
            choice = self._finals()
        except KeyboardInterrupt:
            interrupted = True
            choice = self._salvage()
        delivery = None
        if choice is not None:
            built = ", building and measuring it as deployed" if self.measures and not interrupted else ""
            self.reporter.stage("writing the module" + built)
            try:
                delivery = deliver(self.options, choice, self.pytorch, interrupted, self.backend)
            except KeyboardInterrupt:  # while it was built and measured: write it without
                interrupted = True
                delivery = deliver(self.options, choice, self.pytorch, interrupted, self.backend)
        return TuneResult(choice, delivery, self.pytorch, dict(self.failed), interrupted, self.trials)

    def _prepare(self) -> None:
        prepare = getattr(self.backend, "prepare_pytorch", None)
        if self.measures and prepare is not None:
            prepare(self.options.spec)

    def _search(self, axis: str) -> bool:
        """Searches one axis; False when it was interrupted. What it found is kept either way."""
        options, families = self.options, self.spaces[axis]
        index = options.spec.axes.index(axis)
        begin, end = (self.start + options.budget * SEARCH_SHARE * (index + part) / len(options.spec.axes) for part in (0, 1))
        title = "rows" if axis == "row" else "columns"
        scores: dict[Config, float] = {}
        goes_on = True
        for name, here in families.items():  # the defaults come first, whatever else is known to be good
            label = f"{title}, {name}: default" if len(families) > 1 else f"{title}: default"
            goes_on = goes_on and self._search_one(label, here.focused((), here.start), 1, end, scores)
        best = min(scores.values(), default=float("inf"))  # a family whose default is far behind is not worth the trials
        families = {name: here for name, here in families.items() if scores.get(here.start, float("inf")) <= best * HOPELESS} or families
        for name, here in families.items():
            for start in dict.fromkeys(here.starts()[1:] + self._best_elsewhere(here)):
                if time.monotonic() > self.start + options.budget:
                    break
                goes_on = goes_on and self._search_one(f"{title}, {name}: known to be good", here.focused((), start), 1, end, scores)
        steps = [(name, group, tunables) for name, here in families.items() for group, tunables in here.config_type.groups().items()]
        weights = [sum(len(families[name].values[t]) > 1 for t in tunables) for name, _, tunables in steps]
        for at, (name, group, tunables) in enumerate(steps):
            if not goes_on:
                break
            here = families[name]
            own = {config: score for config, score in scores.items() if isinstance(config, here.config_type)}
            around = min(own, key=own.__getitem__, default=here.start)
            share = sum(weights[: at + 1]) / max(1, sum(weights))
            # Trials by the size of the group; around counts as one of them.
            trials = options.trials if len(steps) == 1 else max(2, round(options.trials * weights[at] / max(1, sum(weights))))
            label = title + (f", {name}" if len(self.spaces[axis]) > 1 else "") + (f": {group}" if group else "")
            goes_on = self._search_one(label, here.focused(tunables, around), trials, begin + (end - begin) * share, scores)
        self.ranked[axis] = sorted(scores, key=scores.__getitem__)
        return goes_on

    def _best_elsewhere(self, here: Space) -> list[Config]:
        """What is best of this family on the axes already searched, where it is legal here: axes seldom differ much."""
        best = (next((config for config in ranked if isinstance(config, here.config_type)), None) for ranked in self.ranked.values())
        return [config for config in best if config is not None and config != here.start and here.legal(config)]

    def _search_one(self, title: str, here: Space, trials: int, deadline: float, scores: dict[Config, float]) -> bool:
        """One search, whose results are added to `scores`; False when it was interrupted."""
        search = Search(here, self._search_options(here, trials, deadline))
        self.reporter.stage(title, max(0, trials - search.resumed), search.score(here.start), search.best)
        resumed = search.resumed - sum(map(here.legal, self.tried[here.problem.axis]))  # not what this run itself has found
        if resumed > 0:
            self.reporter.note(f"{title}: {resumed} results of earlier runs taken over (--fresh starts anew)")
        if search.foreign:
            self.reporter.note(f"{title}: {search.foreign} results of another GPU, driver or model in this study are not reused")
        found = search.run(self.backend.evaluate, self._finished)
        scores |= dict(found.ranked)
        if found.stop == "exhausted" and trials > 1:
            self.reporter.note(f"{title}: the space is exhausted after {len(found.ranked) + sum(found.failed.values())} configurations")
        if found.stop == "budget":
            self.reporter.note(f"{title}: stopped by the budget after {len(found.outcomes)} trials; --budget allows more")
        return found.stop != "interrupted"

    def _search_options(self, here: Space, trials: int, deadline: float) -> SearchOptions:
        options, machine = self.options, self.backend.machine
        axis = here.problem.axis
        spec = replace(options.spec, axes=(axis,))
        if machine.measures:
            context = f"{machine.gpu}, driver {machine.driver}, nvrtc {machine.versions.get('nvrtc', '')}"
        else:
            model = getattr(self.backend, "calibration", None)
            context = f"model {sorted(model.coefficients.items()) if model else ''} for {options.target.arch}"
        if options.tolerance != FP32_TOLERANCE:
            context += f", tolerance {options.tolerance:g}"
        study = options.study or f"{options.spec.name}_{options.target.arch.replace('_', '')}"
        return SearchOptions(
            study,
            context,
            trials,
            options.seed,
            deadline,
            options.storage,
            lambda config: render(spec, {axis: config}).digest,
            (*self.tried[axis].values(), *(self._known(spec) if options.resume else ())),
        )

    def _known(self, spec: BlockSpec) -> tuple[Known, ...]:
        """Measurements of earlier runs on this very machine. Predictions cost little and are made afresh."""
        records, machine = self.options.records, self.backend.machine
        if records is None or not machine.measures:
            return ()
        found = []
        for record in records.matching(spec, machine.gpu, machine.driver):
            outcome = record.outcome
            config = outcome.candidate.configs[spec.axes[0]]
            # In 16-bit types the measure is PyTorch's error on the same input, which does not change from run to run.
            precise = spec.itemsize < 4 or outcome.error is None or outcome.error <= self.options.tolerance
            if config.family in FAMILIES and precise and (outcome.timing is not None or not outcome.ok):
                score = outcome.timing.device if outcome.ok and outcome.timing else None
                found.append(Known(config, score, outcome.status, outcome.source_digest))
        for note in records.notes:
            self.reporter.note(f"{records.path.name}: {note}")
        return tuple(found)

    def _finished(self, outcome: Outcome) -> None:
        self.trials += 1
        self._keep(outcome)
        if len(outcome.candidate.configs) == 1:
            ((axis, config),) = outcome.candidate.configs.items()
            self.tried[axis][config] = Known(config, outcome.score if outcome.ok else None, outcome.status, outcome.source_digest)
        self.reporter.outcome(outcome)

    def _keep(self, outcome: Outcome) -> None:
        if not outcome.ok:
            self.failed[outcome.status, outcome.cause] += 1
        if self.options.records is not None:
            self.options.records.append(Record.now(outcome, self.backend.machine))

    def _baseline(self, wait: bool) -> None:
        """PyTorch's forms, once, when they are built, which goes on beside the search; or now."""
        form = getattr(self.backend, "pytorch", None)
        if self.compared or not self.measures or form is None:
            return
        if not wait and not self.backend.pytorch_ready(self.options.spec):  # type: ignore[attr-defined]
            return
        self.compared = True
        self.reporter.stage("measuring PyTorch's forms of the block")
        self.pytorch = form(self.options.spec)
        for name, timing in self.pytorch.items():
            if name in FORMS:
                library = Candidate(self.options.spec, dict.fromkeys(self.options.spec.axes, LibraryConfig(name)))
                self._keep(Outcome(library, OK, timing=timing))
        for name, why in getattr(self.backend, "pytorch_failures", {}).items():
            self.reporter.note(f"PyTorch {name} could not be measured: {why}")
        self.reporter.baseline(None, {name: timing.device for name, timing in self.pytorch.items()})

    def _finals(self) -> Choice | None:
        outcomes = self._pairs()
        self._baseline(wait=True)
        return self._measured_choice() if self.measures else self._confirmed_choice(outcomes, MOST_CONFIRMED)

    def _pairs(self) -> list[Outcome]:
        """The axes' best together: none when an axis has none."""
        if not all(self.ranked.get(axis) for axis in self.options.spec.axes):
            return []
        candidates = combinations(self.options.spec, self.ranked, self._default_configs(), self.options.target, toggles=self.measures)
        self.reporter.stage("finalists" if len(self.options.spec.axes) == 1 else "rows and columns together", len(candidates))
        outcomes = []
        for outcome in self.backend.evaluate(self._until_deadline(candidates)):
            self._finished(outcome)
            outcomes.append(outcome)
            if outcome.ok and self.measures:
                self.verified.append(outcome)
            if len(outcomes) == 1 and outcome.ok:
                self.reporter.baseline(outcome.score, {})
        return outcomes

    def _until_deadline(self, candidates: Sequence[Candidate]) -> Iterator[Candidate]:
        """All of them while there is time, at least the default and the best."""
        for index, candidate in enumerate(candidates):
            if index >= 2 and time.monotonic() > self.start + self.options.budget:
                return
            yield candidate

    def _default_configs(self) -> dict[str, Config]:
        """The first family's default: what a search of one axis begins with."""
        return {axis: next(iter(families.values())).start for axis, families in self.spaces.items()}

    def _measured_choice(self) -> Choice | None:
        if not self.verified:
            return None
        best = sorted(self.verified, key=lambda outcome: outcome.score)
        base = [outcome for outcome in best if outcome.candidate.configs == self.default.configs]
        finalists = base + [outcome for outcome in best if outcome not in base][:MEASURED_AGAIN]
        self.reporter.stage(f"measuring {len(finalists)} finalists again, interleaved")
        timings = self.backend.measure_again([outcome.candidate for outcome in finalists])  # type: ignore[attr-defined]
        for note in getattr(self.backend, "notes", ()):
            self.reporter.note(note)
        return choose_measured(finalists, timings, self.default)

    def _confirmed_choice(self, outcomes: Sequence[Outcome], most: int) -> Choice | None:
        """The first in order of preference whose kernels are right on the emulator."""
        base = next((outcome for outcome in outcomes if outcome.candidate.configs == self.default.configs), None)
        for outcome in prefer_predicted(outcomes, self.default)[:most]:
            self.reporter.stage("running the kernels on the emulator")
            confirmed = self.backend.confirm(outcome.candidate)  # type: ignore[attr-defined]
            self._keep(confirmed)
            if confirmed.ok:
                reason = "the fastest by the model"
                if outcome.candidate.configs == self.default.configs:
                    reason = "the model sees nothing clearly faster than the default configuration"
                if confirmed.error is None:
                    reason += "; too large for the emulator, which did not run it"
                return Choice(confirmed, base, f"{reason}; predicted, not measured")
            self.reporter.note(f"rejected on the emulator: {confirmed.cause}")
        return None

    def _salvage(self) -> Choice | None:
        """After an interrupt: the best combination so far, verified if it was not; a second interrupt settles for what is."""
        best = {axis: (self.ranked.get(axis) or [start])[0] for axis, start in self._default_configs().items()}
        try:
            if not self.verified:
                self.reporter.note("interrupted: verifying the best so far (Ctrl-C again to drop it)")
                candidates = [Candidate(self.options.spec, best), self.default]
                outcomes = [outcome for outcome in self.backend.evaluate(candidates) if outcome.ok]
                if not self.measures:
                    return self._confirmed_choice(outcomes, 2)
                self.verified += outcomes
                self._baseline(wait=False)
        except KeyboardInterrupt:
            self.reporter.note("interrupted again")
        if not self.verified:
            return None
        winner = min(self.verified, key=lambda outcome: outcome.score)
        base = next((outcome for outcome in self.verified if outcome.candidate.configs == self.default.configs), None)
        return Choice(winner, base, "the best so far of an interrupted run")
