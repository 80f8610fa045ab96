"""The PyTorch forms of the block, which a generated kernel has to beat: eager, SDPA, and both through torch.compile.

Each form lives in a worker process of its own with its own time limit: torch.compile may fail, take long or never return.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

from codegen.library import FORMS
from codegen.spec import BlockSpec
from tuner.trial import Timing
from tuner.worker import Worker, WorkerError

_MEASURE_SECONDS = 60.0


class FormWorker:
    """The worker's handler for one form: "build" runs it until nothing is left to initialise, "measure" gives its Timing."""

    def __init__(self, name: str, spec: BlockSpec, uuid: str, seed: int) -> None:
        import torch

        from codegen.reference import Model, ModelSDPA, torch_dtype
        from codegen.terms import split_terms
        from tuner.gpu_worker import Inputs, no_grad_forward

        torch.set_float32_matmul_precision("highest")  # the precision that a kernel is held to
        inputs = Inputs.random(spec, seed)
        model = (ModelSDPA if "SDPA" in name else Model).from_spec(spec).to("cuda", torch_dtype(spec)).eval()
        parameters, terms = split_terms(spec, inputs.weights)
        model.load_state_dict(parameters)
        called = torch.compile(model, dynamic=False) if "compile" in name else model
        self._forwards = [no_grad_forward(called, x, *terms) for x in inputs.x]
        self._uuid = uuid

    def __call__(self, request: str) -> Timing | None:
        import torch

        from tuner import gpu
        from tuner.measure import FINAL, measure, wall

        if request == "build":
            for forward in self._forwards:
                forward()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            return None
        timing = measure(self._forwards, FINAL, partial(gpu.state, self._uuid))
        return dataclasses.replace(timing, wall=wall(self._forwards[0]))


class Forms:
    """Builds the forms in the background from construction on; `timings` measures those that were built.

    limit: seconds for building one form. environment: makes the GPU the worker's only one. After `timings`, `failures` says by
    name why a form is missing.
    """

    def __init__(
        self,
        spec: BlockSpec,
        uuid: str,
        environment: Mapping[str, str | None],
        *,
        limit: float,
        seed: int = 0,
        names: tuple[str, ...] = FORMS,
        handler: str = "tuner.pytorch_forms:FormWorker",
    ) -> None:
        self.limit = limit
        self.failures: dict[str, str] = {}
        self._workers = {name: Worker(handler, name, spec, uuid, seed, env=environment) for name in names}
        self._closed = threading.Event()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="pytorch-form")
        self._built: dict[str, Future[None]] = {name: self._threads.submit(self._build, worker) for name, worker in self._workers.items()}

    @property
    def ready(self) -> bool:
        """Whether `wait` returns at once."""
        return all(future.done() for future in self._built.values())

    def wait(self) -> None:
        """Returns when every form is built, or is known to be missing."""
        wait(self._built.values())

    def timings(self) -> dict[str, Timing]:
        """Form -> Timing, in the order of the names; waits for the builds, then measures one form after another."""
        found: dict[str, Timing] = {}
        self.wait()  # nothing is measured while another form still compiles
        for name, worker in self._workers.items():
            try:
                self._built[name].result()
                found[name] = worker.call("measure", _MEASURE_SECONDS)
            except WorkerError as error:
                self.failures[name] = error.cause[:300]
            worker.close()
        return found

    def close(self) -> None:
        self._closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        while any(future.running() for future in self._built.values()):
            for worker in self._workers.values():
                worker.interrupt()
            time.sleep(0.01)
        for worker in self._workers.values():
            worker.close()

    def _build(self, worker: Worker) -> None:
        if self._closed.is_set():
            raise WorkerError("closed")
        worker.start()
        worker.call("build", self.limit)


def best_forms(
    spec: BlockSpec,
    uuid: str,
    environment: Mapping[str, str | None],
    budget: float,
) -> tuple[dict[str, Timing], dict[str, str]]:
    """(form -> Timing, form -> why it is missing), each form within `budget` seconds of building."""
    forms = Forms(spec, uuid, environment, limit=budget)
    try:
        return forms.timings(), forms.failures
    finally:
        forms.close()
