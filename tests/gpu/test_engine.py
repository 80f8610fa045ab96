"""The measuring engine on a real GPU: planted faults cost one trial each, wrong kernels are never timed, times are what they should be."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from codegen import resident, staged
from codegen.render import Kernel, Source, render
from codegen.sequence import DTYPE_MATHS, SequenceConfig, alternatives, default
from codegen.spec import DTYPES, BlockSpec
from planted import SEQUENCE_SHAPES, behind_the_output, into_the_input, wrong_scale
from tuner.gpu import Gpu, visible_gpu
from tuner.gpu_backend import GpuBackend, Limits
from tuner.pytorch_forms import FORMS
from tuner.records import Record, Records
from tuner.trial import OK, Candidate, Outcome

pytestmark = pytest.mark.gpu

SPEC = BlockSpec(dim=64, heads=4, height=32, width=32, batch=4)
ROWS = dataclasses.replace(SPEC, axes=("row",))
SIGNATURE = (
    "(const float* x, float* y, const float* norm_weight, const float* norm_bias, const float* qkv_weight, "
    "const float* out_weight, const float* out_bias, int sequences)"
)


@pytest.fixture(scope="module")
def card() -> Gpu:
    found = visible_gpu()
    assert found is not None
    return found


@pytest.fixture(scope="module")
def backend(card: Gpu) -> Iterator[GpuBackend]:
    with GpuBackend(card, limits=Limits(trial=6.0)) as one:
        yield one


def candidate(backend: GpuBackend, spec: BlockSpec, **more: object) -> Candidate:
    configs: dict[str, SequenceConfig] = {}
    for axis in spec.axes:
        config = default(spec.problem(axis), backend.target, more.get("math"))  # type: ignore[arg-type]
        assert config is not None
        configs[axis] = dataclasses.replace(config, **more)  # type: ignore[arg-type]
    return Candidate(spec, configs)


def rows(backend: GpuBackend) -> tuple[Candidate, Source]:
    """The right kernel that faults are planted in or behind."""
    one = candidate(backend, ROWS, math="tf32x3")
    return one, render(ROWS, one.configs)


def followed_by(source: Source, body: str, *, threads: int = 256, shared: int = 0, per_block: int = 1) -> Source:
    """`source` with one more kernel behind its last, which works on y: token `line` of `sequences`, 32 x 64 floats each."""
    text = source.text + f'\nextern "C" __global__ void planted{SIGNATURE} {{\n  const int line = blockIdx.x;\n  {body}\n}}\n'
    return Source(source.spec, text, (*source.kernels, Kernel("planted", "row", threads, shared, per_block, False)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_kernels_are_verified_and_measured(backend, dtype):
    spec = dataclasses.replace(SPEC, dtype=dtype)
    one = candidate(backend, spec)
    (outcome,) = backend.evaluate([one])
    assert outcome.status == OK and outcome.timing is not None, outcome.cause
    source = render(spec, one.configs)
    assert backend.evaluate_source(one, wrong_scale(source)).status == "wrong"
    outcome = backend.evaluate_source(one, behind_the_output(source))
    assert outcome.status == "fault" and "outside its output" in outcome.cause
    healthy(backend)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SEQUENCE_SHAPES)
def test_kernels_that_a_search_starts_from_are_verified_and_measured(backend, shape, dtype):
    """Of `sequence`: weights through shared memory, in the second kernel before and behind its wait, and two warps a head."""
    spec = BlockSpec(*shape, batch=2, dtype=dtype)
    starts = {axis: alternatives(spec.problem(axis), backend.target, DTYPE_MATHS[dtype][0]) for axis in spec.axes}
    pairs = [dict(zip(spec.axes, pair, strict=True)) for pair in itertools.zip_longest(*starts.values())]
    filled = [{axis: config or starts[axis][0] for axis, config in pair.items()} for pair in pairs]
    late = [pair | {"col": dataclasses.replace(pair["col"], prefetch="none")} for pair in filled if pair["col"].weights == "shared"]
    for outcome in backend.evaluate([Candidate(spec, pair) for pair in filled + late]):
        assert outcome.status == OK and outcome.timing is not None, f"{outcome.candidate.configs}: {outcome.cause}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 4, 64, 64), (128, 8, 65, 33), (256, 8, 128, 128), (72, 3, 9, 117)])
def test_resident_kernels_are_verified_and_measured(backend, shape, dtype):
    """With and without overlap, with one block on a multiprocessor and two; a ragged length, and blocks that are not full."""
    if not backend.target.warpgroup_products:
        pytest.skip(f"{backend.target.arch} has no wgmma")
    spec = BlockSpec(*shape, batch=1, dtype=dtype)
    starts = {axis: resident.alternatives(spec.problem(axis), backend.target, resident.DTYPE_MATHS[dtype][0]) for axis in spec.axes}
    assert all(starts.values())
    pairs = [dict(zip(spec.axes, pair, strict=True)) for pair in itertools.zip_longest(*starts.values())]
    candidates = [Candidate(spec, {axis: config or starts[axis][0] for axis, config in pair.items()}) for pair in pairs]
    for outcome in backend.evaluate(candidates):
        assert outcome.status == OK and outcome.timing is not None, f"{outcome.candidate.configs}: {outcome.cause}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1536, 16, 16, 40), (768, 12, 16, 196), (320, 8, 5, 65), (72, 3, 9, 117), (64, 1, 1, 4100)])
def test_streamed_products_are_verified_and_measured(backend, shape, dtype):
    """Row tiles and tiles of the sum that are not full; the first and the last have sums that begin anew."""
    if not backend.target.warpgroup_products:
        pytest.skip(f"{backend.target.arch} has no wgmma")
    spec = BlockSpec(*shape, batch=2, dtype=dtype)
    math = staged.DTYPE_MATHS[dtype][0]
    configs = {axis: staged.default(spec.problem(axis), backend.target, math, staged.STREAMED) for axis in spec.axes}
    (outcome,) = backend.evaluate([Candidate(spec, configs)])
    assert outcome.status == OK and outcome.timing is not None, outcome.cause


def healthy(backend: GpuBackend) -> Outcome:
    """A trial of another source that must be unharmed by whatever was run before."""
    (outcome,) = backend.evaluate([candidate(backend, ROWS, warps=4)])
    backend._outcomes.clear()  # so that it really runs each time
    assert outcome.status == OK, outcome.cause
    return outcome


@pytest.mark.parametrize(
    ("body", "status", "cause"),
    [
        ("if (line == 0 && threadIdx.x == 0) y[1LL << 40] = 1.0f;", "fault", "illegal"),
        ("if (x[(1LL << 40) + line] == 3.0f) y[0] = 1.0f;", "fault", "illegal"),
        ("*reinterpret_cast<float4*>(y + 1) = make_float4(0, 0, 0, 0);", "fault", "misaligned"),
        ("if (line == 0 && threadIdx.x == 0) y[sequences * 2048 + 5] = 1.0f;", "fault", "outside its output"),
        ("if (line == 0 && threadIdx.x == 0) y[-3] = 1.0f;", "fault", "outside its output"),
        ("if (line == 0 && threadIdx.x == 0) const_cast<float*>(x)[7] = 1.0f;", "fault", "outside its output"),
        ('asm volatile("trap;");', "fault", ""),
        ("volatile float* v = y; while (v[0] != 12345.0f) { }", "timeout", "did not finish within 6 s"),
    ],
    ids=["far write", "far read", "misaligned", "write behind", "write before", "write into the input", "trap", "endless"],
)
def test_planted_fault_costs_one_trial(backend, body, status, cause):
    one, source = rows(backend)
    outcome = backend.evaluate_source(one, followed_by(source, body))
    assert outcome.status == status and cause in outcome.cause, outcome
    assert outcome.timing is None
    healthy(backend)


def test_writes_into_the_real_input_are_found(backend):
    one, source = rows(backend)
    outcome = backend.evaluate_source(one, into_the_input(source))
    assert outcome.status in ("fault", "wrong") and outcome.timing is None
    healthy(backend)


@pytest.mark.parametrize(
    "body",
    [
        "for (int i = threadIdx.x; i < 2048; i += blockDim.x) y[line * 2048 + i] = 0.0f;",
        "if (threadIdx.x < 64) y[line * 2048 + threadIdx.x] += 1e-3f;",
        "for (int i = threadIdx.x; i < 2048; i += blockDim.x) y[line * 2048 + i] += 1e-4f;",
        "if (line == 77 && threadIdx.x == 0) y[line * 2048 + 99] *= 1.0005f;",
        "if (line == 3 && threadIdx.x == 0) y[line * 2048 + 99] = __int_as_float(0x7fc00000);",
    ],
    ids=["zeros", "off by 1e-3", "off by 1e-4", "one element", "one NaN"],
)
def test_wrong_results_are_rejected(backend, body):
    one, source = rows(backend)
    outcome = backend.evaluate_source(one, followed_by(source, body))
    assert outcome.status == "wrong" and outcome.cause and outcome.timing is None
    healthy(backend)


def test_dead_branch_half_output_and_lost_barriers_are_rejected(backend):
    one, source = rows(backend)
    body = "for (int i = threadIdx.x; i < 2048; i += blockDim.x) y[blockIdx.x * 2048 + i] = x[blockIdx.x * 2048 + i];"
    dead = Source(ROWS, f'extern "C" __global__ void planted{SIGNATURE} {{ {body} }}\n', (Kernel("planted", "row", 256, 0, 1, False),))
    outcome = backend.evaluate_source(one, dead)
    assert outcome.status == "wrong" and "returns its input" in outcome.cause

    (kernel,) = source.kernels
    half = dataclasses.replace(
        source, text=source.text + "// half\n", kernels=(dataclasses.replace(kernel, items_per_block=2 * kernel.items_per_block),)
    )
    outcome = backend.evaluate_source(one, half)
    assert outcome.status == "wrong" and "not finite" in outcome.cause

    assert "__syncthreads();" in source.text
    outcome = backend.evaluate_source(one, dataclasses.replace(source, text=source.text.replace("__syncthreads();", "")))
    assert outcome.status == "wrong", outcome


def test_launches_that_cannot_be_are_outcomes(backend):
    one, source = rows(backend)
    for more in ({"threads": 2048}, {"shared": 400_000}):
        outcome = backend.evaluate_source(one, followed_by(source, f"if (threadIdx.x == 9999) y[0] = 0.0f;  // {more}", **more))
        assert outcome.status == "launch_error" and "CUDA_ERROR_INVALID_VALUE" in outcome.cause
    healthy(backend)


@pytest.mark.parametrize("axes", [("row",), ("col",), ("row", "col")])
@pytest.mark.parametrize("math_name", ["fp16x3", "tf32x3", "ffma"])
def test_right_kernels_hold_the_tolerance(backend, axes, math_name):
    spec = dataclasses.replace(SPEC, axes=axes)
    configs = {axis: default(spec.problem(axis), backend.target, math=math_name) for axis in axes}
    (outcome,) = backend.evaluate([Candidate(spec, configs)])
    assert outcome.status == OK, outcome.cause
    assert outcome.error is not None and 1e-8 < outcome.error < 1e-5
    timing = outcome.timing
    assert timing is not None and 1.0 < timing.device < 10_000 and timing.spread < timing.device
    assert timing.cold > 0.8 * timing.device and timing.samples >= 20 and timing.sm_clock > 100


def test_plain_tf32_is_rejected(backend):
    (outcome,) = backend.evaluate([candidate(backend, SPEC, math="tf32")])
    assert outcome.status == "wrong" and outcome.error is not None and 1e-5 < outcome.error < 1e-1


def test_ragged_shape(backend):
    spec = BlockSpec(dim=40, heads=5, height=33, width=19, batch=3)
    (outcome,) = backend.evaluate([candidate(backend, spec)])
    assert outcome.status == OK, outcome.cause


def test_a_known_time_is_measured(backend):
    """A kernel that waits 200 us by the GPU's own clock takes 200 us longer."""
    one, source = rows(backend)
    plain = backend.evaluate_source(one, source)
    wait = (
        'unsigned long long start, now; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));\n'
        '  do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - start < 200000ull);'
    )
    waiting = backend.evaluate_source(one, followed_by(source, wait, threads=32, per_block=1_000_000))
    assert plain.timing is not None and waiting.timing is not None, (plain.cause, waiting.cause)
    assert 195 < waiting.timing.device - plain.timing.device < 220
    assert 190 < waiting.timing.cold - plain.timing.cold < 230


def test_finalists_in_turns_agree_with_themselves(backend):
    same, other = candidate(backend, SPEC), candidate(backend, SPEC, norm_lanes=4)
    first, second, third = backend.measure_again([same, other, same], rounds=10)
    assert math.isclose(first.device, third.device, rel_tol=0.05)
    assert second.device > 0 and first.samples == 100
    assert backend.notes == []


def test_records_of_a_real_trial(backend, tmp_path):
    (outcome,) = backend.evaluate([candidate(backend, SPEC)])
    records = Records(tmp_path / "trial.jsonl")
    records.append(Record.now(outcome, backend.machine))
    (read,) = records.matching(SPEC, backend.gpu.name, backend.gpu.driver)
    assert read.outcome == outcome and read.machine.versions["cuda"] != "none"


@pytest.mark.slow
def test_pytorch_forms(card):
    with GpuBackend(card, limits=Limits(form=120.0)) as backend:
        timings = backend.pytorch(SPEC)
        assert set(timings) | set(backend.pytorch_failures) == set(FORMS)
        for name in ("eager", "SDPA"):
            assert name in timings, backend.pytorch_failures
            assert 10 < timings[name].device < 2000 and timings[name].wall > 0.8 * timings[name].device


@pytest.mark.slow
def test_module_as_deployed(backend, tmp_path: Path):
    from codegen.module import Provenance, write_module

    one = candidate(backend, SPEC)
    (outcome,) = backend.evaluate([one])
    path = write_module(tmp_path, render(SPEC, one.configs), one.configs, Provenance(measured=False), backend.target)
    result = backend.module(path, SPEC)
    assert result.ok, result.cause
    assert result.timing is not None and outcome.timing is not None and result.error is not None and result.error < 1e-5
    assert math.isclose(result.timing.device, outcome.timing.device, rel_tol=0.3)
    assert 0 < result.timing.wall <= result.wall_grad * 1.1 and result.build_seconds > 0
    healthy(backend)


def test_worker_is_the_only_one_with_a_context(card):
    """A backend that measured leaves its own process without CUDA."""
    import subprocess
    import sys

    code = (
        "import torch, dataclasses\nfrom codegen.spec import BlockSpec\nfrom codegen.sequence import default\n"
        "from tuner.gpu import visible_gpu\nfrom tuner.gpu_backend import GpuBackend\nfrom tuner.trial import Candidate\n"
        "spec = BlockSpec(axes=('row',))\n"
        "with GpuBackend(visible_gpu(), workers=1) as backend:\n"
        "    one = Candidate(spec, {'row': default(spec.problem('row'), backend.target)})\n"
        "    assert next(backend.evaluate([one])).ok\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], timeout=300)
