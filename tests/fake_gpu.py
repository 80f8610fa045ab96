"""Handlers that stand for the GPU worker and the PyTorch forms, without a GPU."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from tuner import requests
from tuner.requests import Answer
from tuner.trial import Timing


class FakeGpu:
    """Stands for tuner.gpu_worker.GpuWorker. The setup is the same; what a trial does is chosen by the first kernel's
    threads through the file that AXIALTUNE_TEST_PLAN names, "threads behaviour" per line.
    It takes as many microseconds as it has threads."""

    def __init__(self, uuid: str, seed: int, tolerance: float) -> None:
        self.plan = {}
        path = os.environ.get("AXIALTUNE_TEST_PLAN")
        for line in Path(path).read_text().splitlines() if path else ():
            threads, behaviour = line.split()
            self.plan[int(threads)] = behaviour
        self.log = Path(path + ".log") if path else None
        self.prepared: set[Any] = set()

    def __call__(self, request: Any) -> Any:
        match request:
            case requests.Prepare(spec):
                self.prepared.add(spec)
                return Answer()
            case requests.Trial(entry):
                assert entry.source.spec in self.prepared and entry.cubin[:4] == b"\x7fELF"
                threads = entry.source.kernels[0].threads
                if self.log:
                    with self.log.open("a") as log:
                        log.write(f"{threads}\n")
                return self.trial(self.plan.get(threads, "good"), threads)
            case requests.Compare(entries, rounds):
                return Answer(timings=tuple(Timing(float(e.source.kernels[0].threads), 0.5, samples=rounds) for e in entries))
            case requests.RunModule(path, spec):
                assert spec in self.prepared
                timing = Timing(9.0, 0.1, wall=30.0)
                return Answer(error=1e-6, timings=(timing,), wall_grad=40.0, warnings=(path.name,), seconds={"build": 3.0})
        raise TypeError(request)

    def trial(self, behaviour: str, threads: int) -> Answer:
        match behaviour:
            case "hang":
                time.sleep(600)
            case "die":
                os.abort()
            case "raise":
                raise RuntimeError("a fault of the program")
            case "fault":
                return Answer("fault", "an illegal memory access was encountered", poisoned=True)
            case "wrong":
                return Answer("wrong", "error 0.3", 0.3)
        return Answer(error=1e-6, timings=(Timing(float(threads), 0.1, samples=20),), seconds={"verify": 0.1})


class FakeForm:
    """Stands for tuner.pytorch_forms.FormWorker: eager works, SDPA fails to build, torch.compile hangs, the last dies when measured."""

    def __init__(self, name: str, spec: Any, uuid: str, seed: int) -> None:
        self.name = name

    def __call__(self, request: str) -> Timing | None:
        if request == "build":
            if self.name == "SDPA":
                raise RuntimeError("no kernel for this shape")
            if self.name == "torch.compile":
                time.sleep(600)
            return None
        if self.name == "torch.compile + SDPA":
            os.abort()
        return Timing(90.0, 1.0, wall=600.0)
