"""Proposing configurations: an Optuna sampler whose every proposal is legal and new.

The first proposal is the space's start. A space with no more points than trials is walked through. Otherwise proposals
alternate between TPE (multivariate, projected onto the space; one in three) and a change of one or two tunables of one of
the best so far. On synthetic tables the mixture and either half alone came out alike, all well ahead of random draws; which
is best on measured kernels is open.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from codegen.config import Config, Value
from tuner.space import Space, config_values

_STARTUP = 8
"""Trials before TPE has anything to learn from; random draws until then."""
_ELITE = 4
"""How many of the best serve as points to vary."""
_ATTEMPTS = 200
"""Random draws that must all be known before the space counts as exhausted."""


def distributions(space: Space) -> dict[str, BaseDistribution]:
    """Optuna's static view of a space: an ordered tunable is an index, any other its values."""
    return {name: _distribution(values) for name, values in space.values.items()}


def _ordered(values: tuple[Value, ...]) -> bool:
    return all(type(value) is int for value in values)


def _distribution(values: tuple[Value, ...]) -> BaseDistribution:
    return IntDistribution(0, len(values) - 1) if _ordered(values) else CategoricalDistribution(values)


def to_params(space: Space, config: Config) -> dict[str, Any]:
    """The configuration as Optuna's parameters."""
    values = config_values(config)
    return {name: space.values[name].index(values[name]) if _ordered(space.values[name]) else values[name] for name in space.values}


def from_params(space: Space, params: Mapping[str, Any]) -> dict[str, Value]:
    """Optuna's parameters as values of tunables; a parameter that has a single value may be absent."""
    return {
        name: values[0] if name not in params else values[params[name]] if _ordered(values) else params[name]
        for name, values in space.values.items()
    }


class Exhausted(Exception):
    """Every configuration of the space is known."""


class SpaceSampler(optuna.samplers.BaseSampler):
    """See the module's docstring. `known` holds what has been proposed, whatever came of it; the search adds to it."""

    def __init__(self, space: Space, trials: int, seed: int) -> None:
        self.space = space
        self.known: set[Config] = set()
        self._random = random.Random(seed)
        self._distributions = distributions(space)
        self._tpe = optuna.samplers.TPESampler(
            seed=seed, multivariate=True, constant_liar=True, n_startup_trials=_STARTUP, n_ei_candidates=64
        )
        small = space.count(trials + 1) <= trials
        self._queue = [space.start, *(space.enumerate() if small else ())]
        self._small = small
        self._turn = 0
        self._next: Config | None = None

    def prepare(self, study: optuna.Study) -> None:
        """Makes sure that there is something new to propose; raises Exhausted when there is not."""
        if self._next is None or self._next in self.known:
            self._next = self._queued() or (None if self._small else self._fresh(study))
        if self._next is None:
            raise Exhausted

    def _queued(self) -> Config | None:
        while self._queue:
            config = self._queue.pop(0)
            if config not in self.known:
                return config
        return None

    def _fresh(self, study: optuna.Study) -> Config | None:
        self._turn += 1
        trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        if self._turn % 3 and len(trials) >= 2:
            ranked = sorted(trials, key=lambda trial: trial.value or 0.0)[: 2 * _ELITE]
            config = self._vary([self.space.project(from_params(self.space, trial.params)) for trial in ranked])
            if config is not None:
                return config
        for _ in range(_ATTEMPTS):
            config = self.space.random(self._random)
            if config not in self.known:
                return config
        return next((config for config in self.space.enumerate() if config not in self.known), None)

    def _vary(self, ranked: list[Config]) -> Config | None:
        """An unknown configuration one or two changes away from one of the best, or None after a few attempts."""
        elite = list(dict.fromkeys(ranked))[:_ELITE]
        names = [name for name, values in self.space.values.items() if len(values) > 1]
        for _ in range(20):
            values = config_values(self._random.choice(elite))
            for name in self._random.sample(names, min(len(names), self._random.choice((1, 1, 2)))):
                values[name] = self._random.choice([value for value in self.space.values[name] if value != values[name]])
            config = self.space.project(values)
            if config not in self.known:
                return config
        return None

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {name: distribution for name, distribution in self._distributions.items() if not distribution.single()}

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        config = self._next
        if config is None:
            raise Exhausted
        if not self._small and self._turn and self._turn % 3 == 0:
            drawn = self._tpe.sample_relative(study, trial, search_space)
            if drawn:
                learnt = self.space.project(from_params(self.space, drawn))
                config = learnt if learnt not in self.known else self._vary([learnt]) or config
        self._next = None
        return {name: value for name, value in to_params(self.space, config).items() if name in search_space}

    def sample_independent(self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution) -> Any:
        raise RuntimeError(f"{param_name} is not a tunable of the space")

    def after_trial(self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Any) -> None:
        self._tpe.after_trial(study, trial, state, values)
