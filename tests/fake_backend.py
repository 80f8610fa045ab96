"""A measuring backend without a GPU: times come from a synthetic table, failures from rules, and what was asked is remembered."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from codegen.config import Config
from codegen.library import KERNELS
from codegen.module import read_module
from codegen.render import Source, render
from codegen.spec import BlockSpec
from codegen.target import target
from tuner.compile import Compiled, CompileError
from tuner.deliver import deliver, records_file
from tuner.gpu_backend import ModuleTiming
from tuner.progress import Silent
from tuner.records import Machine, Records
from tuner.trial import OK, Candidate, Outcome, Resources, Timing
from tuner.tune import TuneOptions, TuneResult, tune

HERE = Machine("sm_90", "Replayed H200", "580.1", {"torch": "2.11", "cuda": "13.0", "nvrtc": "13.0"})
SPEC = BlockSpec(dim=32, heads=2, height=16, width=32, batch=2)


def _unit(text: str) -> float:
    return zlib.crc32(text.encode()) % 1000 / 1000


def cost(config: Config, salt: int) -> float:
    """Microseconds: each value and each pair of neighbouring tunables slows the kernel down by a factor that the salt draws."""
    values = config.to_dict()
    names = sorted(values)
    time = 5.0
    for name in names:
        time *= 1.0 + 0.35 * _unit(f"{salt} {name} {values[name]}")
    for one, other in zip(names, names[1:], strict=False):
        time *= 1.0 + 0.2 * _unit(f"{salt} {one} {values[one]} {other} {values[other]}")
    return time


@dataclass
class FakeBackend:
    """salt: which table; fails: configuration -> (status, cause) or None; interrupt_at: the evaluations at which Ctrl-C strikes;
    ahead: how many candidates are taken before the first outcome; spread: of every timing; deployed: what becomes of the module;
    compiled: microseconds of PyTorch's best form; compiles: whether there is one; built_at: evaluations after which its forms are built;
    compared_at: those after which they were asked for; library: what becomes of a module that uses one; built: what built modules used."""

    salt: int = 0
    fails: Callable[[Config], tuple[str, str] | None] = lambda config: None
    interrupt_at: tuple[int, ...] = ()
    ahead: int = 1
    spread: float = 0.05
    machine: Machine = HERE
    deployed: str = OK
    times: Callable[[Config], float] | None = None
    compiled: float = 72.0
    built_at: int = 0
    compared_at: int | None = None
    compiles: bool = True
    library: ModuleTiming | None = None
    built: list[str] = field(default_factory=list)
    digests: bool = False
    asked: list[Candidate] = field(default_factory=list)
    closed: bool = False
    pytorch_failures: Mapping[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def evaluate(self, candidates: Iterable[Candidate]) -> Iterator[Outcome]:
        taken: list[Candidate] = []
        source = iter(candidates)
        while True:
            while len(taken) < self.ahead and (candidate := next(source, None)) is not None:
                taken.append(candidate)
            if not taken:
                return
            yield self._outcome(taken.pop(0))

    def _outcome(self, candidate: Candidate) -> Outcome:
        self.asked.append(candidate)
        if len(self.asked) in self.interrupt_at:
            raise KeyboardInterrupt
        digest = render(candidate.spec, candidate.configs).digest if self.digests else ""
        for config in candidate.configs.values():
            if (failure := self.fails(config)) is not None:
                return Outcome(candidate, *failure, source_digest=digest)
        return Outcome(candidate, OK, error=1e-6, timing=self._timing(candidate), source_digest=digest)

    def _timing(self, candidate: Candidate) -> Timing:
        device = sum(self.times(c) if self.times else cost(c, self.salt) for c in candidate.configs.values())
        return Timing(device, self.spread, device * 1.5, device + 12.0, 50)

    def measure_again(self, candidates: Sequence[Candidate], rounds: int = 10) -> list[Timing]:
        return [self._timing(candidate) for candidate in candidates]

    def pytorch_ready(self, spec: BlockSpec) -> bool:
        return len(self.asked) >= self.built_at

    def pytorch(self, spec: BlockSpec) -> dict[str, Timing]:
        assert self.compared_at is None, "once is enough"
        self.compared_at = len(self.asked)
        if not self.compiles:
            return {}
        return {"eager": Timing(90.0, 1.0, wall=600.0), "torch.compile": Timing(self.compiled, 1.0, wall=100.0)}

    def module(self, path: Path, spec: BlockSpec) -> ModuleTiming:
        assert path.is_file()
        self.built.append(read_module(path).use)
        if self.library is not None and self.built[-1] != KERNELS:
            return self.library
        if self.deployed != OK:
            return ModuleTiming(self.deployed, "planted")
        return ModuleTiming(OK, "", 1e-6, Timing(18.0, 0.1, 25.0, 30.0))

    def close(self) -> None:
        self.closed = True

    @property
    def configs(self) -> list[Config]:
        """The one-axis configurations in the order in which they were evaluated."""
        return [next(iter(c.configs.values())) for c in self.asked if len(c.configs) == 1]


class InstantCompilers:
    """Stands for the pool of compilers: every source has the same resources, but those that `refuse` says do not compile."""

    workers = 2

    def __init__(self, refuse: Callable[[Source], bool] = lambda source: False) -> None:
        self.refuse = refuse
        self.compiled: list[str] = []

    def submit(self, source: Source) -> Future[Compiled]:
        future: Future[Compiled] = Future()
        self.compiled.append(source.digest)
        if self.refuse(source):
            future.set_exception(CompileError("line 1: planted"))
        else:
            future.set_result(Compiled(b"", {k.name: Resources(100, 0, k.shared_bytes) for k in source.kernels}, 0.01))
        return future

    def close(self) -> None:
        """Nothing runs."""


def options(tmp_path: Path, spec: BlockSpec = SPEC, **more) -> TuneOptions:
    """Options for one family; test_families.py has both."""
    base = {"spec": spec, "target": target("sm_90"), "out": tmp_path, "trials": 8, "command": "python cli.py tune"}
    made = TuneOptions(**{**base, "fixed": {"family": "sequence"}, **more})
    return TuneOptions(**{**made.__dict__, **({} if "records" in more else {"records": Records(records_file(made, predicted=False))})})


def run(tmp_path: Path, backend: FakeBackend, **more) -> tuple[TuneResult, Silent]:
    reporter = Silent()
    return tune(options(tmp_path, **more), backend, reporter, deliver), reporter
