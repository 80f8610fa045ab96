"""The measuring backend with worker processes that stand for the GPU: what a bad candidate costs, and what is never done twice."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from codegen.render import render
from codegen.sequence import SequenceConfig, default
from codegen.spec import BlockSpec, SpecError
from codegen.target import target
from tuner import gpu
from tuner.gpu import Gpu, visible_gpu, visible_gpus
from tuner.gpu_backend import GpuBackend, Limits
from tuner.pytorch_forms import FORMS
from tuner.trial import OK, Candidate

SPEC = BlockSpec(dim=16, heads=2, height=5, width=7, batch=2)
CARD = Gpu(0, "Fake H200", "GPU-1234", "580.65", (9, 0))
LIMITS = Limits(compile=2.0, trial=1.0, prepare=20.0, form=2.0, module=10.0)


def candidate(warps: int, spec: BlockSpec = SPEC, **more) -> Candidate:
    configs = {}
    for axis in spec.axes:
        config = default(spec.problem(axis), target("sm_90"), "tf32x3")  # which has any number of warps
        assert config is not None
        configs[axis] = dataclasses.replace(config, warps=warps, **more)
    return Candidate(spec, configs)


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """Writes the FakeGpu's plan, threads -> behaviour; returns the threads of the trials that ran."""
    path = tmp_path / "plan"
    path.write_text("")
    monkeypatch.setenv("AXIALTUNE_TEST_PLAN", str(path))

    def write(**behaviour: str) -> None:
        path.write_text("".join(f"{int(warps[1:]) * 32} {what}\n" for warps, what in behaviour.items()))

    write.ran = lambda: [int(line) // 32 for line in (tmp_path / "plan.log").read_text().split()]
    return write


@pytest.fixture
def backend(plan):
    with GpuBackend(
        CARD,
        limits=LIMITS,
        workers=2,
        worker="fake_gpu:FakeGpu",
        compiler="fake_workers:quick_compiler",
        form="fake_gpu:FakeForm",
        needs_cuda=False,
    ) as one:
        yield one


def test_good_candidate(backend, plan):
    (outcome,) = backend.evaluate([candidate(2)])
    assert outcome.status == OK and outcome.ok and outcome.cause == "" and outcome.error == 1e-6
    assert outcome.timing is not None and outcome.score == 64.0
    assert outcome.source_digest == render(SPEC, candidate(2).configs).digest
    assert outcome.resources["axial_col"].registers == 40
    assert {"compile", "verify", "trial"} <= set(outcome.seconds)
    assert backend.machine.gpu == "Fake H200" and backend.machine.driver == "580.65" and backend.machine.arch == "sm_90"


@pytest.mark.parametrize(
    ("behaviour", "status", "cause", "restarts"),
    [
        ("hang", "timeout", "did not finish within 1 s", 1),
        ("die", "crash", "worker killed by SIGABRT", 1),
        ("fault", "fault", "illegal memory access", 1),
        ("wrong", "wrong", "error 0.3", 0),
        ("raise", "crash", "RuntimeError: a fault of the program", 0),
    ],
)
def test_bad_candidate_costs_its_own_trial_alone(backend, plan, behaviour, status, cause, restarts):
    plan(w2=behaviour)
    outcomes = list(backend.evaluate(candidate(warps) for warps in (1, 2, 4, 8)))
    assert [o.status for o in outcomes] == [OK, status, OK, OK]
    assert cause in outcomes[1].cause and "\n" not in outcomes[1].cause and outcomes[1].timing is None
    assert [o.score for o in outcomes] == [32.0, float("inf"), 128.0, 256.0]
    assert backend._gpu.starts == 1 + restarts
    assert plan.ran() == [1, 2, 4, 8]


def test_compiler_failures_are_outcomes(backend, plan):
    outcomes = list(backend.evaluate([candidate(12), candidate(16), candidate(4)]))
    assert [o.status for o in outcomes] == ["compile_error", "compile_timeout", OK]
    assert outcomes[0].cause == "line 7: expected a ;" and "2 s" in outcomes[1].cause
    assert plan.ran() == [4]


def test_configuration_that_cannot_be_rendered_is_an_outcome(backend):
    (outcome,) = backend.evaluate([Candidate(SPEC, {"row": SequenceConfig()})])
    assert outcome.status == "compile_error" and "cannot be rendered" in outcome.cause


def test_same_source_for_another_batch_is_another_trial(backend, plan):
    other = dataclasses.replace(SPEC, batch=3)
    assert render(SPEC, candidate(4).configs).digest == render(other, candidate(4, other).configs).digest
    list(backend.evaluate([candidate(4), candidate(4, other)]))
    assert plan.ran() == [4, 4]


def test_same_source_is_never_run_twice(backend, plan):
    first = list(backend.evaluate([candidate(2), candidate(4), candidate(2)]))
    again = list(backend.evaluate([candidate(4), candidate(2)]))
    assert plan.ran() == [2, 4]
    assert [o.score for o in first + again] == [64.0, 128.0, 64.0, 128.0, 64.0]
    assert again[0].candidate == candidate(4)


def test_candidates_are_taken_lazily_a_few_ahead(backend):
    taken: list[int] = []

    def endless():
        for warps in (1, 2, 4, 8) * 100:
            taken.append(warps)
            yield candidate(warps)

    outcomes = backend.evaluate(endless())
    next(outcomes)
    assert len(taken) == backend.ahead == 2
    next(outcomes)
    assert len(taken) == 3
    outcomes.close()


def test_one_axis_and_both_are_prepared_separately(backend):
    """The fake worker refuses a trial of a specification whose reference it was not asked for."""
    row = dataclasses.replace(SPEC, axes=("row",))
    outcomes = list(backend.evaluate([candidate(2, row), candidate(2), candidate(4, row)]))
    assert all(o.ok for o in outcomes)


def test_reference_is_prepared_again_after_a_restart(backend, plan):
    plan(w2="die")
    assert [o.status for o in backend.evaluate([candidate(2), candidate(4)])] == ["crash", OK]
    assert len(backend._prepared) == 2


def test_gpu_worker_that_cannot_start_is_one_clear_line(plan):
    with GpuBackend(CARD, workers=1, worker="fake_workers:broken", compiler="fake_workers:quick_compiler", needs_cuda=False) as backend:
        with pytest.raises(SpecError, match="nothing can be measured on the Fake H200: RuntimeError: no device"):
            list(backend.evaluate([candidate(2)]))


def test_pytorch_without_cuda_is_refused():
    import torch

    if torch.version.cuda is not None:
        pytest.skip("this PyTorch has CUDA")
    with pytest.raises(SpecError, match="built without CUDA: install"):
        GpuBackend(CARD)


def test_finalists_in_turns(backend, plan):
    timings = backend.measure_again([candidate(4), candidate(2)], rounds=7)
    assert [t.device for t in timings] == [128.0, 64.0] and timings[0].samples == 7
    assert backend.measure_again([]) == []
    plan(w8="wrong")
    backend._gpu.kill()
    with pytest.raises(ValueError, match="cannot be measured again: wrong"):
        backend.measure_again([candidate(8)])


def test_pytorch_forms_fail_one_by_one(backend):
    backend.prepare_pytorch(SPEC)
    timings = backend.pytorch(SPEC)
    assert list(timings) == ["eager"] and timings["eager"].wall == 600.0
    assert set(timings) | set(backend.pytorch_failures) == set(FORMS)
    assert "no kernel for this shape" in backend.pytorch_failures["SDPA"]
    assert "no answer within 2 s" in backend.pytorch_failures["torch.compile"]
    assert "SIGABRT" in backend.pytorch_failures["torch.compile + SDPA"]


def test_close_in_the_middle_of_everything(plan):
    backend = GpuBackend(
        CARD,
        workers=2,
        worker="fake_gpu:FakeGpu",
        compiler="fake_workers:quick_compiler",
        form="fake_gpu:FakeForm",
        needs_cuda=False,
    )
    backend.prepare_pytorch(SPEC)
    backend._begin(candidate(16))
    backend.close()
    assert not backend._gpu.running and not any(w.running for w in backend._compilers._all)


def test_module(backend, tmp_path):
    result = backend.module(tmp_path / "axial.py", SPEC)
    assert result.ok and result.timing is not None and result.timing.wall == 30.0
    assert (result.wall_grad, result.build_seconds, result.warnings) == (40.0, 3.0, ("axial.py",))


# Device facts


class FakeNvml:
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    cards = ("GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3")

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return self.cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in (*self.cards, "MIG-1"):
            raise ValueError("not found")
        return uuid

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return handle

    def nvmlDeviceGetName(self, handle: str) -> bytes:
        return b"Card " + handle[4:5].encode()

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.65"

    def nvmlDeviceGetCudaComputeCapability(self, handle: str) -> tuple[int, int]:
        return 9, 0

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(total=141 << 30)

    def nvmlDeviceGetClockInfo(self, handle: str, clock: int) -> int:
        return {1: 1980, 2: 3201}[clock]

    def __getattr__(self, name: str):  # whatever else a driver does not support
        def unsupported(*_: object) -> None:
            raise RuntimeError(name)

        return unsupported


@pytest.fixture
def nvml(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpu, "_nvml", FakeNvml)


@pytest.mark.parametrize(
    ("visible", "chosen"),
    [
        (None, ["GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3"]),
        ("", []),
        ("2,0", ["GPU-cccc-3", "GPU-aaaa-1"]),
        ("1,7,0", ["GPU-aabb-2"]),
        ("-1", []),
        ("GPU-cc, 0", ["GPU-cccc-3", "GPU-aaaa-1"]),
        ("GPU-aa", []),
        ("MIG-1", ["MIG-1"]),
        ("NoDevFiles", []),
    ],
)
def test_visible_devices(nvml, monkeypatch, visible, chosen):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = visible_gpus()
    assert [one.uuid for one in found] == chosen and [one.index for one in found] == list(range(len(chosen)))


def test_facts_survive_what_a_driver_does_not_tell(nvml):
    card = visible_gpu()
    assert card == Gpu(0, "Card a", "GPU-aaaa-1", "580.65", (9, 0), 141 << 30)
    assert card.arch == "sm_90" and card.target == target("sm_90")
    assert gpu.state("GPU-aaaa-1") == gpu.State(1980, 3201, 0, 0)
    assert gpu.state("GPU-none") == gpu.State()


def test_choice_by_index(nvml, monkeypatch):
    chosen = visible_gpu(2)
    assert chosen is not None and chosen.environment["CUDA_VISIBLE_DEVICES"] == "GPU-cccc-3"
    for index in (3, -1):
        with pytest.raises(SpecError, match="there are 3, counted from 0"):
            visible_gpu(index)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpu() is None
    with pytest.raises(SpecError, match="no GPU is visible"):
        visible_gpu(0)


def test_parent_needs_no_cuda_context():
    """Importing and constructing everything the parent uses leaves torch's CUDA state untouched."""
    import subprocess
    import sys

    code = (
        "import torch, tuner.gpu_backend, tuner.gpu; tuner.gpu.visible_gpus(); tuner.gpu.versions()\nassert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent, timeout=120)


def test_median_and_half_the_interquartile_range():
    from tuner.measure import summary

    assert summary([5.0]) == (5.0, 0.0)
    assert summary([4.0, 6.0]) == (5.0, 1.0)
    assert summary([float(i) for i in range(1, 100)] + [1e6]) == pytest.approx((50.5, 25.25))
