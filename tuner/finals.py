"""From each axis' best to the block's winner: which combinations are tried together, and which of them is chosen."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from codegen.config import Config
from codegen.library import FORMS
from codegen.spec import BlockSpec
from codegen.target import Target
from tuner.trial import Candidate, Outcome, Timing

TOP = 3
"""Configurations of each axis that reach the combinations."""
MEASURED_AGAIN = 4
"""Combinations, besides the default, that are measured interleaved."""
MODEL_MARGIN = 0.05
"""Relative differences below this are beyond the model: a predicted winner must beat the default by more."""


def combinations(
    spec: BlockSpec,
    ranked: Mapping[str, Sequence[Config]],
    default: Mapping[str, Config],
    target: Target,
    toggles: bool = True,
    most: int = 10,
) -> list[Candidate]:
    """The default first, then combinations of the axes' best by the sum of their ranks, and the best of them with dependent launch
    off (if `toggles`): between the kernels of a pair it may help or not, which no search of one axis sees."""
    tops = [list(ranked[axis])[:TOP] for axis in spec.axes]
    orders = sorted(itertools.product(*(range(len(top)) for top in tops)), key=lambda ranks: (sum(ranks), ranks))
    paired: list[dict[str, Config]] = [
        {axis: top[rank] for axis, top, rank in zip(spec.axes, tops, ranks, strict=True)} for ranks in orders
    ]
    found: list[dict[str, Config]] = [dict(default), *paired[:1]]
    if toggles and target.dependent_launch and len(spec.axes) > 1 and paired:
        found.append({axis: _independent(config) for axis, config in paired[0].items()})
    found += paired[1:]
    unique: list[dict[str, Config]] = []
    for configs in found:
        if configs not in unique:
            unique.append(configs)
    return [Candidate(spec, configs) for configs in unique[:most]]


def _independent(config: Config) -> Config:
    return replace(config, **{"dependent_launch": False}) if "dependent_launch" in config.tunables() else config


@dataclass(frozen=True)
class Choice:
    """The winner, the default's outcome (None when it was not verified) and one line on how the choice was made."""

    winner: Outcome
    default: Outcome | None
    reason: str


def choose_measured(outcomes: Sequence[Outcome], timings: Sequence[Timing], default: Candidate) -> Choice:
    """The fastest of verified outcomes by timings that were taken interleaved; the default unless it is beaten by more than
    the larger of both spreads."""
    timed = [replace(outcome, timing=timing) for outcome, timing in zip(outcomes, timings, strict=True)]
    best = min(timed, key=lambda outcome: outcome.score)
    base = next((outcome for outcome in timed if outcome.candidate.configs == default.configs), None)
    if base is None or base is best:
        return Choice(best, base, "the default configuration is the fastest" if base else "the default configuration was not verified")
    assert base.timing is not None and best.timing is not None
    gain, noise = base.timing.device - best.timing.device, max(base.timing.spread, best.timing.spread)
    if gain <= noise:
        return Choice(base, base, f"nothing beats the default configuration by more than the spread ({gain:.2f} us, spread {noise:.2f} us)")
    return Choice(best, base, f"beats the default configuration by {gain:.2f} us (spread {noise:.2f} us)")


def unbeaten_form(kernels: Timing, pytorch: Mapping[str, Timing]) -> tuple[str, Timing] | None:
    """PyTorch's fastest form by device time, and its name, unless the kernels beat it by more than the larger of both spreads."""
    known = {name: timing for name, timing in pytorch.items() if name in FORMS}
    if not known:
        return None
    name, form = min(known.items(), key=lambda item: item[1].device)
    beaten = form.device - kernels.device > max(form.spread, kernels.spread)
    return None if beaten else (name, form)


def prefer_predicted(outcomes: Sequence[Outcome], default: Candidate) -> list[Outcome]:
    """Working outcomes in the order in which to confirm them: by prediction, those that do not beat the default by
    MODEL_MARGIN after it."""
    working = sorted((outcome for outcome in outcomes if outcome.ok), key=lambda outcome: outcome.score)
    base = next((outcome for outcome in working if outcome.candidate.configs == default.configs), None)
    if base is None:
        return working
    limit = base.score * (1.0 - MODEL_MARGIN)
    rest = [outcome for outcome in working if outcome is not base]
    return [o for o in rest if o.score < limit] + [base] + [o for o in rest if o.score >= limit]
