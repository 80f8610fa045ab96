"""Searching one axis: ask, evaluate, tell, until the trials, the time or the space run out.

Optuna's storage decides what to try next and can be thrown away; what it holds is checked against the space, and
against what the templates render today, before it counts.
"""

from __future__ import annotations

import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from codegen.config import Config
from codegen.families import config_from_dict
from codegen.spec import SpecError, valid_name
from tuner.sampler import Exhausted, SpaceSampler, distributions, from_params, to_params
from tuner.space import Space
from tuner.storage import open_storage, unusable
from tuner.trial import Candidate, Outcome

Evaluate = Callable[[Iterable[Candidate]], Iterator[Outcome]]


@dataclass(frozen=True)
class Known:
    """A result of an earlier run: microseconds, or None for a failure with its status."""

    config: Config
    score: float | None
    status: str = "ok"
    source_digest: str = ""


@dataclass(frozen=True)
class SearchOptions:
    """study: base name; context: what results depend on besides the space (GPU, driver, or the model's version).

    trials: how many configurations to know in the end, earlier runs' included; deadline: time.monotonic() at which
    no further trial starts; storage: see open_storage.
    digest_of: configuration -> digest of its source today, to drop results of other sources; None trusts them.
    known: results from records, already of this context.
    """

    study: str
    context: str
    trials: int
    seed: int = 0
    deadline: float = float("inf")
    storage: Any = None
    digest_of: Callable[[Config], str] | None = None
    known: tuple[Known, ...] = ()


@dataclass(frozen=True)
class SearchResult:
    """What a search found. stop: "trials", "budget", "exhausted" or "interrupted".

    ranked: working configurations with their scores in microseconds, best first, earlier runs' included.
    outcomes: this run's outcomes in order; failed: status -> count, earlier runs' included; resumed: results taken over;
    foreign: results of another GPU, driver or model that were left alone.
    """

    stop: str
    ranked: tuple[tuple[Config, float], ...]
    outcomes: tuple[Outcome, ...]
    failed: Mapping[str, int] = field(default_factory=dict)
    resumed: int = 0
    foreign: int = 0


class Search:
    """One axis' study: opened with what earlier runs left, then run once."""

    def __init__(self, space: Space, options: SearchOptions) -> None:
        if not valid_name(options.study):
            raise SpecError(f"study {options.study!r} is not a plain name: use letters, digits, dot, dash and underscore")
        self.space, self.options = space, options
        self._scores: dict[Config, float] = {}
        self._failed: Counter[str] = Counter()
        self._foreign = 0
        self._sampler = SpaceSampler(space, options.trials, options.seed)
        self._study = self._open()
        for known in options.known:
            self._take_over(known)
        self.resumed = len(self._scores) + sum(self._failed.values())

    @property
    def foreign(self) -> int:
        """Results of another GPU, driver or model version in earlier studies of this name."""
        return self._foreign

    @property
    def best(self) -> float | None:
        """Microseconds of the best configuration so far."""
        return min(self._scores.values(), default=None)

    def score(self, config: Config) -> float | None:
        """Microseconds of a configuration, None when it is not known to work."""
        return self._scores.get(config)

    def _open(self) -> optuna.Study:
        options, axis = self.options, self.space.problem.axis
        prefix = f"{options.study}-{axis}"
        storage = open_storage(options.storage)
        try:
            earlier = [s for s in optuna.get_all_study_summaries(storage) if s.study_name.startswith(prefix + "-")]
            digest = f"{self.space.digest}-{_stable_hash(options.context):08x}"
            study = optuna.create_study(study_name=f"{prefix}-{digest}", storage=storage, sampler=self._sampler, load_if_exists=True)
            study.set_user_attr("context", options.context)
            for trial in study.get_trials(deepcopy=False):
                self._note(trial)
            for summary in earlier:
                if summary.study_name == study.study_name:
                    continue
                old = optuna.load_study(study_name=summary.study_name, storage=storage)
                trials = old.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
                if summary.user_attrs.get("context") != options.context:
                    self._foreign += len(trials)
                    continue
                for trial in trials:
                    known = self._read(trial)
                    if known is not None:
                        self._take_over(known, study)
        except SpecError:
            raise
        except Exception as error:  # a storage fails in the ways of its database; the user needs the one line
            raise unusable(options.storage, error) from error
        return study

    def _read(self, trial: FrozenTrial) -> Known | None:
        """A stored trial as a result, or None when it is not legal here or its source has changed since."""
        try:
            config = config_from_dict(trial.user_attrs.get("config", {}))
        except (SpecError, TypeError, AttributeError):
            return None
        known = Known(
            config,
            trial.value if trial.state is TrialState.COMPLETE else None,
            str(trial.user_attrs.get("status", "ok")),
            str(trial.user_attrs.get("source_digest", "")),
        )
        return known if self._current(known) else None

    def _current(self, known: Known) -> bool:
        if not self.space.legal(known.config) or self.space.canonical(known.config) != known.config:
            return False
        digest_of = self.options.digest_of
        return digest_of is None or not known.source_digest or digest_of(known.config) == known.source_digest

    def _note(self, trial: FrozenTrial) -> None:
        """Counts a finished trial of the study itself; one whose source has changed stays in it but is tried again."""
        if trial.state not in (TrialState.COMPLETE, TrialState.PRUNED):
            return
        known = self._read(trial)
        if known is not None and known.config not in self._sampler.known:
            self._count(known)

    def _count(self, known: Known) -> None:
        self._sampler.known.add(known.config)
        if known.score is None:
            self._failed[known.status] += 1
        else:
            self._scores[known.config] = known.score

    def _take_over(self, known: Known, study: optuna.Study | None = None) -> None:
        """Adds a result of elsewhere to the study, unless it is known, illegal here, or of another source."""
        if known.config in self._sampler.known or not self._current(known):
            return
        self._count(known)
        (study or self._study).add_trial(
            optuna.trial.create_trial(
                params=to_params(self.space, known.config),
                distributions=distributions(self.space),
                state=TrialState.PRUNED if known.score is None else TrialState.COMPLETE,
                value=known.score,
                user_attrs={"config": known.config.to_dict(), "status": known.status, "source_digest": known.source_digest},
            )
        )

    def run(self, evaluate: Evaluate, on_outcome: Callable[[Outcome], None] = lambda outcome: None) -> SearchResult:
        """Evaluates until a limit is met. A KeyboardInterrupt ends the search, keeps what is finished, and is reported
        as the stop "interrupted"."""
        pending: deque[tuple[optuna.Trial, Config]] = deque()
        outcomes: list[Outcome] = []
        stop = "trials"
        spec = replace(self.space.problem.block, axes=(self.space.problem.axis,))

        def propose() -> Iterator[Candidate]:
            nonlocal stop
            while len(self._sampler.known) < self.options.trials:
                if self._sampler.known and time.monotonic() >= self.options.deadline:  # the default is tried in any case
                    stop = "budget"
                    return
                try:
                    self._sampler.prepare(self._study)
                except Exhausted:
                    stop = "exhausted"
                    return
                trial = self._study.ask(distributions(self.space))
                config = self.space.config_type(**from_params(self.space, trial.params))
                self._sampler.known.add(config)
                trial.set_user_attr("config", config.to_dict())
                pending.append((trial, config))
                yield Candidate(spec, {self.space.problem.axis: config})

        try:
            for outcome in evaluate(propose()):
                trial, config = pending.popleft()
                self._tell(trial, config, outcome)
                outcomes.append(outcome)
                on_outcome(outcome)
        except KeyboardInterrupt:
            stop = "interrupted"
        for trial, config in pending:  # asked for, never finished: free to be tried again
            self._sampler.known.discard(config)
            self._study.tell(trial, state=TrialState.FAIL)
        if stop == "trials" and self._sampler.known and self._is_exhausted():
            stop = "exhausted"
        ranked = tuple(sorted(self._scores.items(), key=lambda item: item[1]))
        return SearchResult(stop, ranked, tuple(outcomes), dict(self._failed), self.resumed, self._foreign)

    def _is_exhausted(self) -> bool:
        return self.space.count(len(self._sampler.known) + 1) <= len(self._sampler.known)

    def _tell(self, trial: optuna.Trial, config: Config, outcome: Outcome) -> None:
        trial.set_user_attr("status", outcome.status)
        trial.set_user_attr("source_digest", outcome.source_digest)
        if outcome.ok and outcome.score < float("inf"):
            self._scores[config] = outcome.score
            self._study.tell(trial, outcome.score)
        else:
            self._failed[outcome.status] += 1
            trial.set_user_attr("cause", outcome.cause)
            # Not FAIL: TPE ignores failed trials, but ranks pruned ones last and so learns where not to go.
            self._study.tell(trial, state=TrialState.PRUNED)


def _stable_hash(text: str) -> int:
    """A hash that is the same in every process (Python's own is salted)."""
    return zlib.crc32(text.encode())
