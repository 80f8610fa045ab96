"""What a run shows while it works: one live line on a terminal, plain lines elsewhere, silence in tests."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from tuner.trial import FAILURES, Outcome


class Reporter(Protocol):
    """Receives what happens in the order in which it happens."""

    def note(self, text: str) -> None:
        """Something the user should read later too."""

    def stage(self, text: str, trials: int = 0, default: float | None = None, best: float | None = None) -> None:
        """A new part of the run begins, with so many trials to come (0: not counted), and what is known before: microseconds of
        the default configuration and of the best. Without a default the first trial is it."""

    def outcome(self, outcome: Outcome) -> None:
        """A trial of the present stage is finished."""

    def baseline(self, default: float | None, pytorch: Mapping[str, float]) -> None:
        """Microseconds of the default configuration and of PyTorch's forms, as far as they are known."""

    def close(self) -> None:
        """The run is over."""


@dataclass
class Tally:
    """The state behind a progress line."""

    title: str = ""
    trials: int = 0
    done: int = 0
    feasible: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    first: float | None = None
    best: float | None = None
    default: float | None = None
    pytorch: tuple[str, float] | None = None
    measured: bool = True

    def begin(self, title: str, trials: int, default: float | None, best: float | None) -> None:
        self.title, self.trials, self.done, self.feasible = title, trials, 0, 0
        self.failed, self.first, self.best = Counter(), default, best

    def add(self, outcome: Outcome) -> None:
        self.done += 1
        if not outcome.ok:
            self.failed[outcome.status] += 1
            return
        self.feasible += 1
        self.measured = outcome.timing is not None
        score = outcome.score
        if self.done == 1 and self.first is None:
            self.first = score  # the default configuration is the first trial of a stage that does not know it yet
        self.best = score if self.best is None else min(self.best, score)

    def line(self) -> str:
        """E.g. "rows: 12/60 done, 10 feasible, 2 wrong; best 6.1 us (default 7.0 us, 1.15x); block: PyTorch compile 72.0 us"."""
        text = f"{self.title}: {self.done}/{self.trials} done, {self.feasible} feasible" if self.trials else self.title
        for status, count in sorted(self.failed.items()):
            text += f", {count} {status.replace('_', ' ')}"
        if self.best is not None:
            text += f"; best {self.best:.2f} us{'' if self.measured else ' predicted'}"
            if self.first is not None:
                text += f" (default {self.first:.2f} us, {self.first / self.best:.2f}x)"
        whole = [f"default {self.default:.1f} us"] if self.default is not None else []
        whole += [f"PyTorch {self.pytorch[0]} {self.pytorch[1]:.1f} us"] if self.pytorch is not None else []
        return text + (f"; whole block: {', '.join(whole)}" if whole else "")


def causes(failed: Mapping[tuple[str, str], int], most: int = 5) -> list[str]:
    """The commonest (status, cause) first, each in one line with its count."""
    ordered = sorted(failed.items(), key=lambda item: (-item[1], item[0]))
    lines = [f"{count} x {FAILURES.get(status, status)}{': ' + cause if cause else ''}" for (status, cause), count in ordered[:most]]
    rest = sum(count for _, count in ordered[most:])
    return lines + ([f"{rest} x other causes"] if rest else [])


class Silent:
    """A reporter that shows nothing and remembers its notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.tally = Tally()

    def note(self, text: str) -> None:
        self.notes.append(text)

    def stage(self, text: str, trials: int = 0, default: float | None = None, best: float | None = None) -> None:
        self.tally.begin(text, trials, default, best)

    def outcome(self, outcome: Outcome) -> None:
        self.tally.add(outcome)

    def baseline(self, default: float | None, pytorch: Mapping[str, float]) -> None:
        self.tally.default = default if default is not None else self.tally.default
        if pytorch:
            name = min(pytorch, key=lambda form: pytorch[form])
            self.tally.pytorch = (name, pytorch[name])

    def close(self) -> None:
        """Nothing to end."""


class Lines(Silent):
    """Plain lines, one every few seconds: for logs and pipes."""

    def __init__(self, console: Console, every: float = 5.0) -> None:
        super().__init__()
        self._console, self._every, self._last = console, every, time.monotonic()

    def note(self, text: str) -> None:
        super().note(text)
        self._print(text)

    def stage(self, text: str, trials: int = 0, default: float | None = None, best: float | None = None) -> None:
        self._flush()
        super().stage(text, trials, default, best)
        if not trials:
            self._print(text)

    def outcome(self, outcome: Outcome) -> None:
        super().outcome(outcome)
        if time.monotonic() - self._last >= self._every:
            self._print(self.tally.line())

    def close(self) -> None:
        self._flush()

    def _flush(self) -> None:
        if self.tally.done:
            self._print(self.tally.line())
            self.tally.done = 0

    def _print(self, text: str) -> None:
        self._last = time.monotonic()
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class OneLine(Silent):
    """A live line on a terminal; notes and finished stages stay above it."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._live = Live(Text(), console=console, refresh_per_second=8, transient=True)
        self._live.start()

    def note(self, text: str) -> None:
        super().note(text)
        self._live.console.print(Text(text))

    def stage(self, text: str, trials: int = 0, default: float | None = None, best: float | None = None) -> None:
        self._keep()
        super().stage(text, trials, default, best)
        self._show()

    def outcome(self, outcome: Outcome) -> None:
        super().outcome(outcome)
        self._show()

    def baseline(self, default: float | None, pytorch: Mapping[str, float]) -> None:
        super().baseline(default, pytorch)
        self._show()

    def close(self) -> None:
        self._keep()
        self._live.stop()

    def _keep(self) -> None:
        if self.tally.done:
            self._live.console.print(Text(self.tally.line()))
            self.tally.done = 0

    def _show(self) -> None:
        self._live.update(Text(self.tally.line()))


def reporter(console: Console) -> Reporter:
    """The one that fits where the output goes."""
    return OneLine(console) if console.is_terminal else Lines(console)
