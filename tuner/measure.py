"""Timing a forward as it is deployed: replays of a CUDA graph, with a warm and with a flushed L2, and host time per call.

Only for a worker process that owns the GPU. Times are microseconds per forward.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tuner.gpu import State
from tuner.trial import Timing

Forward = Callable[[], object]
_QUEUE = 20  # replays queued before the host waits
_FLUSH_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class Effort:
    """How much is measured. warmup, seconds: of replays; samples: fewest and most replays timed; cold: forwards timed
    after a flush; graph_us: device time one replay should last, so that the events' resolution does not matter."""

    warmup: float = 0.05
    seconds: float = 0.1
    samples: tuple[int, int] = (20, 200)
    cold: int = 20
    graph_us: float = 300.0


TRIAL = Effort()
FINAL = Effort(warmup=0.2, seconds=0.4, samples=(50, 1000), cold=50)


class Replay:
    """A CUDA graph of several forwards over rotating inputs, timed by events.

    forwards: one per input set, each runs the whole block on the current stream; they are called before capture.
    """

    def __init__(self, forwards: Sequence[Forward], effort: Effort) -> None:
        self.effort = effort
        self._forwards = forwards  # they own the memory that the graph uses
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # lazy initialisation must not fall into the capture
            for forward in (*forwards, forwards[0]):
                forward()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.single = _capture(forwards[:1], 1)
        self.repeats = len(forwards)
        self.graph = _capture(forwards, self.repeats)
        per_forward = statistics.median(self.sample(3))
        wanted = min(64, math.ceil(effort.graph_us / per_forward / len(forwards))) * len(forwards)
        if wanted > self.repeats:
            self.graph, self.repeats = _capture(forwards, wanted), wanted

    def sample(self, count: int) -> list[float]:
        """Microseconds per forward of `count` replays, back to back."""
        times: list[float] = []
        while len(times) < count:
            pairs = []
            for _ in range(min(_QUEUE, count - len(times))):
                start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                self.graph.replay()
                stop.record()
                pairs.append((start, stop))
            torch.cuda.synchronize()
            times += [1e3 * start.elapsed_time(stop) / self.repeats for start, stop in pairs]
        return times

    def warm(self, state: Callable[[], State] | None = None) -> State:
        """Replays for the effort's warm-up time; the GPU's state is read at the end, while replays still run."""
        deadline = time.perf_counter() + self.effort.warmup
        while time.perf_counter() < deadline:
            for _ in range(_QUEUE):
                self.graph.replay()
            torch.cuda.synchronize()
        if state is None:
            return State()
        for _ in range(_QUEUE):
            self.graph.replay()
        now = state()
        torch.cuda.synchronize()
        return now

    def cold(self) -> float:
        """Median time of a single forward right after L2 was overwritten; includes the launch of its graph."""
        flush = torch.empty(max(_FLUSH_BYTES, 4 * torch.cuda.get_device_properties().L2_cache_size), dtype=torch.uint8, device="cuda")
        pairs = []
        for _ in range(self.effort.cold):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()  # lasts long enough for the host to queue what follows
            start.record()
            self.single.replay()
            stop.record()
            pairs.append((start, stop))
        torch.cuda.synchronize()
        return 1e3 * statistics.median(start.elapsed_time(stop) for start, stop in pairs)


def measure(forwards: Sequence[Forward], effort: Effort = TRIAL, state: Callable[[], State] | None = None) -> Timing:
    """Device time, warm and cold, of a forward; `wall` stays 0, see `wall`."""
    replay = Replay(forwards, effort)
    now = replay.warm(state)
    times: list[float] = []
    deadline = time.perf_counter() + effort.seconds
    least, most = effort.samples
    while len(times) < least or (len(times) < most and time.perf_counter() < deadline):
        times += replay.sample(min(_QUEUE, least))
    return _timing(times, replay.cold(), now)


def measure_interleaved(
    several: Sequence[Sequence[Forward]],
    rounds: int,
    effort: Effort = FINAL,
    state: Callable[[], State] | None = None,
) -> list[Timing]:
    """Several forwards measured in turns, so that drifting clocks and temperature hit all of them alike. At least one round."""
    replays = [Replay(forwards, effort) for forwards in several]
    states = [replay.warm(state) for replay in replays]
    times: list[list[float]] = [[] for _ in replays]
    for turn in range(max(1, rounds)):
        order = range(len(replays)) if turn % 2 == 0 else reversed(range(len(replays)))
        for index in order:
            replays[index].sample(2)  # the neighbour's data is in L2
            times[index] += replays[index].sample(10)
    return [_timing(t, replay.cold(), now) for t, replay, now in zip(times, replays, states, strict=True)]


def wall(forward: Forward, effort: Effort = FINAL) -> float:
    """Median microseconds of host time per call in a loop which waits for the GPU at its end."""
    for _ in range(5):
        forward()
    torch.cuda.synchronize()
    start = time.perf_counter()
    forward()
    torch.cuda.synchronize()
    calls = max(1, min(100, math.ceil(5e-3 / (time.perf_counter() - start))))
    found: list[float] = []
    deadline = time.perf_counter() + effort.seconds
    while len(found) < 10 or time.perf_counter() < deadline:
        start = time.perf_counter()
        for _ in range(calls):
            forward()
        torch.cuda.synchronize()
        found.append(1e6 * (time.perf_counter() - start) / calls)
    return statistics.median(found)


def summary(times: Sequence[float]) -> tuple[float, float]:
    """(median, half the interquartile range); the range of fewer than four samples is that of all."""
    median = statistics.median(times)
    if len(times) < 4:
        return median, (max(times) - min(times)) / 2
    lower, _, upper = statistics.quantiles(times, n=4)
    return median, (upper - lower) / 2


def _timing(times: Sequence[float], cold: float, now: State) -> Timing:
    device, spread = summary(times)
    return Timing(device, spread, cold, 0.0, len(times), now.sm_clock, now.memory_clock)


def _capture(forwards: Sequence[Forward], count: int) -> torch.cuda.CUDAGraph:
    """A graph of `count` forwards. torch.cuda.graph would also empty the allocator's cache, which takes longer than a trial may."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        try:
            for index in range(count):
                forwards[index % len(forwards)]()
        finally:
            graph.capture_end()
    return graph
