"""Stand-ins for what a comparison measures with: handlers of its processes, and instruments that need none."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.floors import NOMINAL, Ceilings, floors
from benchmarks.instruments import Job
from benchmarks.results import Measured, Result
from tuner.records import Machine
from tuner.trial import Timing


class FakeCeilings:
    """Stands for benchmarks.ceilings.CeilingsWorker."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, request: Any) -> Ceilings:
        return NOMINAL


class FakeRival:
    """Stands for benchmarks.rival.RivalWorker: 48 channels are beyond it, 96 do not compile in time, 80 come out wrong."""

    def __init__(self, spec: Any, uuid: str, seed: int) -> None:
        if spec.dim == 48:
            raise RuntimeError("it would hold too much")
        self.dim, self.built = spec.dim, False

    def __call__(self, request: Any) -> Any:
        if request != "measure":
            if self.dim == 96:
                time.sleep(600)
            self.built = True
            return 8
        assert self.built
        if self.dim == 80:
            raise RuntimeError("it is wrong: error 0.5")
        return Measured(Timing(18.0, 0.1, wall=91.0), 2e-6, "row: 4 warps, 1 stages")


class FakeBuilder:
    """Stands for benchmarks.instruments.ModuleBuilder."""

    def __call__(self, request: Any) -> None:
        path, spec = request
        assert path.is_file() and spec.name in path.name


class FakeForm:
    """Stands for tuner.pytorch_forms.FormWorker; says through its time whether it was compiled with max-autotune."""

    def __init__(self, name: str, spec: Any, uuid: str, seed: int) -> None:
        import os

        tuned = os.environ.get("TORCHINDUCTOR_MAX_AUTOTUNE") == "1"
        self.device = {"eager": 90.0, "SDPA": 80.0}.get(name, 60.0) - 10.0 * tuned

    def __call__(self, request: str) -> Timing | None:
        return None if request == "build" else Timing(self.device, 1.0, wall=600.0)


def tiling_compiler(*setup: Any) -> Callable[[Any], None]:
    """Stands for benchmarks.rival.Compiler: tiling 3 never returns, tiling 4 needs too much shared memory."""

    def handle(entry: tuple[str, int]) -> None:
        if entry[1] == 3:
            time.sleep(600)
        if entry[1] == 4:
            raise RuntimeError("out of resource: shared memory")

    return handle


@dataclass
class FakeInstruments:
    """Instruments with made-up times: PyTorch takes 4 times the module, the rival twice. wait is called with the seconds that a wave
    would take; log: what was asked for, in order."""

    machine: Machine
    wait: Callable[[float], None] = lambda seconds: None
    log: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def ceilings(self) -> Ceilings:
        return NOMINAL

    def prepare(self, jobs: Sequence[Job], seconds: float) -> None:
        self.log.append("prepare " + ", ".join(job.case.name for job in jobs))
        self.seconds.append(seconds)
        self.wait(40.0)

    def measure(self, job: Job, ceilings: Ceilings) -> Result:
        self.log.append("measure " + job.case.name)
        device = 10.0 * job.spec.batch
        forms = {"eager": Timing(5 * device, 0.1, wall=600.0), "SDPA": Timing(4 * device, 0.1, wall=500.0)}
        rival = Measured(Timing(2 * device, 0.1, wall=90.0), 2e-6, "row: 4 warps, 1 stages")
        module = Measured(Timing(device, 0.1, device + 5, 25.0), 1e-6, job.module.path.name) if job.module else None
        return Result(job.case, floors(job.case, ceilings), forms, rival, module)

    def close(self) -> None:
        self.log.append("close")
