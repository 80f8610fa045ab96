"""The comparison: floors by hand, modules by block, results as JSON and tables, the course of a run, and what a failure costs."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import emitted
from benchmarks import attention
from benchmarks import compare as command
from benchmarks import run as course
from benchmarks.cases import CASES, SHAPES, Case, Shape, select
from benchmarks.floors import NOMINAL, Ceilings, Floors, floors, work
from benchmarks.instruments import GpuInstruments, Handlers, Job
from benchmarks.results import Measured, Report, Result, from_json, geometric_mean, mean_gain
from benchmarks.rival import compile_all, fastest
from benchmarks.run import Plan, compare, find_modules, tune_command
from benchmarks.table import COMPARISON, comparison, floor_table, insert
from codegen import staged
from codegen.module import Provenance, write_module
from codegen.reference import reference
from codegen.render import render
from codegen.sequence import default
from codegen.spec import BlockSpec, SpecError
from codegen.target import target
from codegen.terms import random_terms
from fake_bench import FakeInstruments
from tuner.gpu import Gpu
from tuner.gpu_backend import Limits
from tuner.records import Machine
from tuner.trial import Timing

ROOT = Path(__file__).resolve().parent.parent
MACHINE = Machine("sm_90", "Fake H200", "580.1", {"torch": "2.11", "cuda": "13.0"})
BY_NAME = {case.name: case for case in CASES}


def blank(*results: Result, **more) -> Report:
    versions = {"torch": "2.11", "cuda": "13.0"}
    return Report("2026-11-29", "Fake H200", "sm_90", "580.1", versions, "python -m benchmarks.compare", NOMINAL, results, **more)


def module_for(folder: Path, spec: BlockSpec, arch: str = "sm_90", **provenance) -> Path:
    configs = {}
    for axis in spec.axes:
        configs[axis] = default(spec.problem(axis), target(arch))
        assert configs[axis] is not None
    facts = Provenance(**{"measured": True, "gpu": "Fake H200", **provenance})
    return write_module(folder, render(spec, configs), configs, facts, target(arch))


def full_result() -> Result:
    case = BY_NAME["seed fp32"]
    forms = {"eager": Timing(90.0, 1.0, 98.0, 400.0, 50), "torch.compile": Timing(60.0, 1.0, 72.0, 595.0, 50)}
    rival = Measured(Timing(24.0, 0.1, 30.0, 91.0), 2e-6, "row: 4 warps, 1 stages; col: 2 warps, 2 stages")
    module = Measured(Timing(12.0, 0.05, 15.7, 25.0), 1.2e-6, "axial_d64_h4_32x32_fp32_sm90.py", "ab" * 32, 47.0, 6.5)
    return Result(case, floors(case, NOMINAL), forms, rival, module, ("PyTorch SDPA: did not compile",))


# Cases and floors


def test_cases_are_the_eight_shapes_in_both_element_types():
    assert [(s.batch, s.height, s.width, s.dim, s.heads) for s in SHAPES] == [
        (4, 32, 32, 64, 4),
        (1, 32, 32, 64, 4),
        (64, 32, 32, 64, 4),
        (2, 65, 65, 128, 8),
        (1, 128, 256, 256, 8),
        (4, 128, 128, 256, 8),
        (1, 128, 128, 512, 8),
        (1, 512, 512, 64, 4),
    ]
    assert len(CASES) == 16 and all(case.target_us for case in CASES)
    assert BY_NAME["msa fp32"].spec() == BlockSpec(dim=256, heads=8, height=128, width=256, batch=1)


def test_selection_by_name():
    assert select() == CASES
    assert [case.name for case in select(["long", "seed"], ["bf16"])] == ["seed bf16", "long bf16"]
    assert select(["seed"], ["float32"]) == (BY_NAME["seed fp32"],)
    with pytest.raises(SpecError, match="case 'sead' is not known: choose among seed, seed_b1"):
        select(["sead"])
    with pytest.raises(SpecError, match="dtype 'fp8' is not compared: choose among fp32, bf16"):
        select([], ["fp8"])


def test_work_of_a_block_small_enough_to_count_by_hand():
    # 1 x 2 x 3 tokens of 4 channels. An axis: 6 tokens x 16 columns x 4 multiply-adds for QKV and output (768 FLOP); scores and weighting
    # 6 x L x 4 multiply-adds each: L = 3 for rows (288 FLOP), 2 for columns (192). Weights: (64 + 12) elements an axis.
    case = Case(Shape("tiny", 1, 2, 3, 4, 2), "float32")
    found = work(case)
    assert found.flops == 2 * 768 + 288 + 192
    assert found.axis_bytes == 4 * (4 * 24 + 2 * 76) and found.fused_bytes == 4 * (2 * 24 + 2 * 76)
    half = work(replace(case, dtype="bfloat16"))
    assert half.flops == found.flops and half.axis_bytes * 2 == found.axis_bytes and half.fused_bytes * 2 == found.fused_bytes


def test_floors_of_the_seed_shape():
    # 4096 tokens: 2 x (8 x 4096 x 64^2 + 4 x 4096 x 32 x 64) = 335,544,320 FLOP; x and y are 1 MiB each, the weights 132,608 bytes.
    case = BY_NAME["seed fp32"]
    assert (work(case).flops, work(case).axis_bytes, work(case).fused_bytes) == (335_544_320, 4_326_912, 2_229_760)
    card = Ceilings(copy_tbs=4.0, fp32_tflops=50.0, tf32_tflops=300.0, bf16_tflops=800.0, kernel_us=1.0)
    found = floors(case, card)
    assert found.arithmetic == pytest.approx(3.3554432)  # at 100 TFLOP/s: three TF32 products for one
    assert found.axis_bytes == pytest.approx(1.081728) and found.fused_bytes == pytest.approx(0.55744)
    assert found.least == found.arithmetic and found.limit == "arithmetic"
    assert floors(BY_NAME["seed bf16"], card).arithmetic == pytest.approx(0.4194304)
    weak = replace(card, tf32_tflops=60.0)  # where TF32 is no faster, plain multiply-adds are the unit
    assert floors(case, weak).arithmetic == pytest.approx(335.54432 / 50)
    assert Floors(1.0, 3.0, 2.0).limit == "bytes" and Floors(1.0, 3.0, 2.0).least == 2.0


# Results


def test_report_survives_json():
    report = blank(full_result(), Result(BY_NAME["long bf16"], Floors(1.0, 2.0, 3.0), notes=("a", "b")), seconds=123.5, complete=True)
    text = report.to_json()
    assert from_json(text) == report
    data = json.loads(text)
    assert data["format"] == 1 and data["results"][0]["case"] == {"shape": "seed", "dtype": "float32"}
    assert data["results"][0]["module"]["timing"]["device"] == 12.0 and data["results"][1]["module"] is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.update(format=2),
        lambda data: data.pop("ceilings"),
        lambda data: data.update(surprise=1),
        lambda data: data["results"][0]["case"].update(shape="nowhere"),
        lambda data: data["results"][0]["case"].update(dtype="int8"),
        lambda data: data["results"][0]["pytorch"]["eager"].update(surprise=1),
        lambda data: data["results"][0].pop("notes"),
        lambda data: data["results"][0].update(surprise=1),
    ],
)
def test_damaged_json_is_refused(damage):
    data = json.loads(blank(full_result()).to_json())
    damage(data)
    with pytest.raises(SpecError, match="no result of benchmarks.compare"):
        from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "[]", "{}", "nonsense"])
def test_other_text_is_refused(text):
    with pytest.raises(SpecError, match="no result of benchmarks.compare"):
        from_json(text)


def test_ratios():
    result = full_result()
    assert result.best is not None and result.best[0] == "torch.compile"
    assert (result.gain, result.rival_gain) == (5.0, 2.0)
    assert result.above_floor == pytest.approx(12.0 / result.floors.arithmetic)
    missing = replace(result, module=None)
    assert missing.gain is missing.rival_gain is missing.above_floor is None
    assert replace(result, pytorch={}).gain is None and replace(result, rival=None).rival_gain is None


def test_means_are_geometric_and_by_element_type():
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0) and geometric_mean([]) is None
    fast = full_result()
    slow = replace(fast, case=BY_NAME["long fp32"], pytorch={"eager": Timing(15.0, 0.1)})
    other = replace(fast, case=BY_NAME["long bf16"])
    report = blank(fast, slow, other, replace(fast, module=None))
    mean, count = mean_gain(report, "float32")
    assert count == 2 and mean == pytest.approx((5.0 * 1.25) ** 0.5)
    assert mean_gain(report, "bfloat16") == (pytest.approx(5.0), 1)


# Tables


def test_comparison_table():
    slow = Result(BY_NAME["msa fp32"], floors(BY_NAME["msa fp32"], NOMINAL), {"eager": Timing(2178.0, 1.0, wall=2221.0)})
    text = comparison(blank(full_result(), slow, seconds=321.0, complete=True))
    lines = text.splitlines()
    assert lines[0] == "Fake H200 (sm_90; driver 580.1, torch 2.11, cuda 13.0), 2026-11-29, 321 s: `python -m benchmarks.compare`"
    assert "- fp32: **5.00x** PyTorch's best form (geometric mean of 1 of 2 shapes), least 5.00x at seed." in lines
    assert not any(line.startswith("- bf16") for line in lines) and "not completed" not in text
    cells = "60.0 (torch.compile) | 24.0 | **12.0** | 8.00 | 5.00x | 2.00x | 2.59 | 1.01 | 0.52 | 4.63x | 1.2e-06"
    assert f"| seed fp32 | {cells} |" in lines
    assert "| msa fp32 | 2178 (eager) | - | - | 650.0 | - | - | 365.3 | 31.7 | 16.1 | - | - |" in lines
    assert "| case | eager | torch.compile | Triton, fused | module | module, L2 flushed | module, wall with grad mode |" in lines
    assert "| seed fp32 | 90.0 / 400.0 | 60.0 / 595.0 | 24.0 / 91.0 | 12.0 / 25.0 | 15.7 | 47.0 |" in lines
    assert "| msa fp32 | 2178 / 2221 | - | - | - | - | - |" in lines
    assert "- seed fp32: PyTorch SDPA: did not compile" in lines
    tables = [line for line in lines if line.startswith("|")]
    assert {line.count("|") for line in tables} == {13, 8}
    assert "This run was not completed." in comparison(blank(slow)) and "- fp32: no module was measured" in comparison(blank(slow))
    advised = replace(slow, notes=("Triton: an illegal address Search for `cudaErrorIllegalAddress' in https://docs", "another"))
    assert comparison(blank(advised)).splitlines()[-2:] == ["- msa fp32: Triton: an illegal address", "- msa fp32: another"]


def test_tables_replace_their_place_in_a_document_and_nothing_else(tmp_path):
    document = tmp_path / "README.md"
    document.write_text("# One\n<!-- comparison: begin -->\nold\n<!-- comparison: end -->\ntail\n")
    for _ in range(2):
        insert(document, COMPARISON, "new | table\n")
        assert document.read_text() == "# One\n<!-- comparison: begin -->\nnew | table\n<!-- comparison: end -->\ntail\n"
    for text in ("no place", "<!-- comparison: end --><!-- comparison: begin -->"):
        document.write_text(text)
        with pytest.raises(SpecError, match="no place for the table"):
            insert(document, COMPARISON, "new")
        assert document.read_text() == text
    with pytest.raises(SpecError, match="cannot be read"):
        insert(tmp_path / "none.md", COMPARISON, "new")


def test_floors_of_the_documentation_are_those_of_the_code():
    text = (ROOT / "docs" / "performance.md").read_text()
    assert f"<!-- floors: begin -->\n{floor_table().strip()}\n<!-- floors: end -->" in text
    assert text.count("<!-- comparison: begin -->") == text.count("<!-- comparison: end -->") == 1


# Modules


def test_modules_are_found_by_block_and_architecture(tmp_path):
    spec, other = BlockSpec(16, 2, 5, 7, 2), BlockSpec(16, 2, 5, 7, 3)
    predicted = module_for(tmp_path, spec, measured=False)
    module_for(tmp_path, other, arch="sm_80")
    (tmp_path / "axial_broken.py").write_text("nothing")
    found = find_modules(tmp_path, [spec, other], "sm_90")
    assert {one: module.path for one, module in found.items()} == {spec: predicted}
    measured = module_for(tmp_path, spec)
    assert find_modules(tmp_path, [spec], "sm_90")[spec].path == measured
    assert set(find_modules(tmp_path, [spec, other], "sm_80")) == {other}
    assert find_modules(tmp_path / "none", [spec], "sm_90") == {}


def test_command_that_writes_a_missing_module():
    spec = BY_NAME["deeplab fp32"].spec()
    assert tune_command(spec) == "python cli.py tune --dim 128 --heads 8 --height 65 --width 65 --batch 2"


# The course of a run


@pytest.fixture
def clock(monkeypatch):
    """A clock that only `wait` moves."""

    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            return self.now

        def wait(self, seconds: float) -> None:
            self.now += seconds

    one = Clock()
    monkeypatch.setattr(course, "time", one)
    return one


def test_run_builds_in_waves_measures_one_by_one_and_writes_each_time(tmp_path, clock):
    cases = [BY_NAME[name] for name in ("seed fp32", "seed_b1 fp32", "seed_b64 fp32")]
    module_for(tmp_path, cases[0].spec())
    module_for(tmp_path, cases[1].spec(), measured=False)
    instruments, written, said = FakeInstruments(MACHINE, clock.wait), [], []
    report = compare(Plan(cases, tmp_path, budget=500, build=60, together=2), instruments, blank(), said.append, written.append)
    assert instruments.log == [
        "prepare seed fp32, seed_b1 fp32",
        "measure seed fp32",
        "measure seed_b1 fp32",
        "prepare seed_b64 fp32",
        "measure seed_b64 fp32",
    ]
    assert instruments.seconds == [60, 60]
    assert [len(one.results) for one in written] == [2, 3, 3] and [one.complete for one in written] == [False, False, True]
    assert written[-1] == report and report.seconds == 80.0
    assert [result.case for result in report.results] == cases
    assert [result.gain for result in report.results] == [4.0, 4.0, None]
    assert [result.notes for result in report.results] == [
        (),
        ("the module was predicted",),
        (f"no module in {tmp_path}: `{tune_command(cases[2].spec())}` writes it",),
    ]
    assert "seed fp32: PyTorch 160.00 us (SDPA), Triton 80.00 us, module 40.00 us, 4.00x, floor 2.59 us" in said


def test_run_leaves_out_what_does_not_fit_into_its_time(tmp_path, clock):
    cases = [BY_NAME[f"{name} fp32"] for name in ("seed", "seed_b1", "seed_b64", "deeplab")]
    instruments, said = FakeInstruments(MACHINE, clock.wait), []
    report = compare(Plan(cases, tmp_path, budget=100, build=60), instruments, blank(), said.append, lambda report: None)
    assert [entry for entry in instruments.log if entry.startswith("measure")] == ["measure seed fp32", "measure seed_b1 fp32"]
    assert instruments.seconds == [50, 30]  # a build gets at most half of what is left
    assert not report.complete and len(report.results) == 4
    assert report.results[3].notes == ("the 100 s of the run were over",) and not report.results[3].pytorch
    assert "2 cases are left out: the 100 s of the run are over" in said


def test_block_without_code_is_named_and_costs_nothing(tmp_path, clock, monkeypatch):
    def refuse(case: Case) -> BlockSpec:
        if case.dtype == "bfloat16":
            raise SpecError("dtype 'bfloat16' is not supported")
        return BlockSpec()

    monkeypatch.setattr(Case, "spec", refuse)
    instruments = FakeInstruments(MACHINE, clock.wait)
    report = compare(Plan(select(["seed"]), tmp_path), instruments, blank(), lambda line: None, lambda report: None)
    assert [result.case.name for result in report.results] == ["seed fp32", "seed bf16"] and report.complete
    assert report.results[1].notes == ("dtype 'bfloat16' is not supported",) and report.results[1].floors.least > 0
    assert instruments.log == ["prepare seed fp32", "measure seed fp32"]


# The instruments, with processes that stand for the GPU


@pytest.fixture
def instruments():
    made = []

    def make(**more) -> GpuInstruments:
        gpu = Gpu(0, "Fake H200", "GPU-1234", "580.65", (9, 0))
        limits = Limits(compile=2.0, trial=1.0, prepare=20.0, form=2.0, module=10.0)
        fakes = {name: f"fake_bench:Fake{name.capitalize()}" for name in ("form", "ceilings", "rival", "builder")}
        handlers = Handlers(**{"gpu": "fake_gpu:FakeGpu", **fakes, **more.pop("handlers", {})})
        made.append(GpuInstruments(gpu, limits=limits, handlers=handlers, needs_cuda=False, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


def job(dim: int, path: Path | None = None) -> Job:
    spec = BlockSpec(dim, 2, 5, 7, 2)
    module = find_modules(path, [spec], "sm_90")[spec] if path else None
    return Job(Case(Shape(f"fake{dim}", 2, 5, 7, dim, 2), "float32"), spec, module)


def test_instruments_measure_every_party(instruments, tmp_path):
    one = instruments(max_autotune=True)
    assert one.ceilings() == NOMINAL and one.machine.gpu == "Fake H200"
    path = module_for(tmp_path, BlockSpec(16, 2, 5, 7, 2))
    ours = job(16, tmp_path)
    one.prepare([ours], 30.0)
    result = one.measure(ours, NOMINAL)
    assert {name: timing.device for name, timing in result.pytorch.items()} == {
        "eager": 90.0,
        "SDPA": 80.0,
        "torch.compile": 60.0,
        "torch.compile + SDPA": 60.0,
        "max-autotune": 50.0,
        "max-autotune + SDPA": 50.0,
    }
    assert result.rival is not None and result.rival.timing.device == 18.0
    assert result.module is not None and result.module.what == path.name and result.module.timing.device == 9.0
    assert (result.module.wall_grad, result.module.build_seconds) == (40.0, 3.0)
    assert ours.module is not None and result.module.source == ours.module.source.digest
    assert result.notes == (f"{path.name}: {path.name}",)  # FakeGpu warns of the module's name
    assert (result.gain, result.rival_gain) == (pytest.approx(50 / 9), 2.0)


def test_failures_are_noted_and_cost_only_themselves(instruments):
    one = instruments(handlers={"form": "fake_gpu:FakeForm"})
    beyond, late, wrong = job(48), job(96), job(80)
    one.prepare([beyond, late, wrong], 3.0)
    first, second, third = (one.measure(each, NOMINAL) for each in (beyond, late, wrong))
    for result in (first, second, third):
        assert set(result.pytorch) == {"eager"} and result.rival is None and result.module is None
        notes = "\n".join(result.notes)
        assert "PyTorch SDPA: RuntimeError: no kernel for this shape" in notes
        assert "PyTorch torch.compile: no answer within 3 s" in notes
        assert "PyTorch torch.compile + SDPA: worker killed by SIGABRT" in notes
    assert "Triton: RuntimeError: it would hold too much" in first.notes
    assert any(note.startswith("Triton: no answer within") for note in second.notes)
    assert "Triton: RuntimeError: it is wrong: error 0.5" in third.notes


def test_instruments_without_the_rival(instruments):
    one = instruments(rival=False)
    plain = job(16)
    one.prepare([plain], 20.0)
    result = one.measure(plain, NOMINAL)
    assert result.rival is None and len(result.pytorch) == 4 and not result.notes


@pytest.fixture
def interruptible():
    """SIGINT raises KeyboardInterrupt, which a shell's background job ignores."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_interrupt_while_building_ends_what_hangs(instruments, interruptible):
    one, hanging = instruments(), job(96)

    def interrupt() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if (prepared := one._prepared.get(hanging.case)) and prepared.rival is not None and prepared.rival.running:
                break
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        one.prepare([hanging], 100.0)
    prepared = one._prepared[hanging.case]
    one.close()
    assert prepared.building.done() and prepared.rival is not None and not prepared.rival.running


# The Triton rival


def test_compiler_that_hangs_loses_only_its_configuration():
    entries = [(axis, tiling) for axis in ("row", "col") for tiling in (1, 2, 3, 4, 5)]
    compiled, cause = compile_all("fake_bench:tiling_compiler", (), entries, 15.0)
    assert compiled == [(axis, tiling) for axis in ("row", "col") for tiling in (1, 2, 5)]
    assert "no answer within 5 s" in cause or "out of resource" in cause


def test_time_for_compiling_ends():
    compiled, cause = compile_all("fake_bench:tiling_compiler", (), [("row", 3)] * 8, 1.5)
    assert compiled == [] and "s for compiling were over" in cause


def test_fastest_by_axis():
    times = {("row", 1): 3.0, ("row", 2): 2.0, ("col", 1): 1.0, ("col", 2): 5.0}
    assert fastest(times, lambda axis, tiling: times[axis, tiling]) == {"row": 2, "col": 1}


def test_missing_triton_is_said_clearly(monkeypatch):
    from benchmarks.rival import RivalWorker

    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "benchmarks.triton_block", raising=False)
    with pytest.raises(RuntimeError, match="Triton is not installed .*: it comes with CUDA builds of PyTorch"):
        RivalWorker(BlockSpec(), "GPU-1", 0)


_INTERPRETED = """
import torch
from benchmarks import triton_block as block
from codegen.spec import BlockSpec
from tuner.verify import Checker

for spec in (BlockSpec(16, 2, 5, 7, 2), BlockSpec(40, 2, 9, 33, 1)):
    choice = {axis: block.tilings(9)[0] for axis in spec.axes}

    def run(x, weights):
        y = torch.full_like(x, float("nan"))
        block.run_block(spec, choice, x, weights, y)
        return y

    check = Checker(spec, 0)(run)
    assert check.ok, (spec, check)
assert len(block.tilings(32)) == len(set(block.tilings(128))) == 8
assert block.obstacle(BlockSpec()) is None
assert "row axis would hold a tile of 512 x 512" in block.obstacle(BlockSpec(64, 4, 512, 512))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_rival_agrees_with_the_reference_when_interpreted():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", _INTERPRETED], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# The command


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(command, "visible_gpu", lambda index: None)


def run_command(monkeypatch, capsys, *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["compare", *arguments])
    with pytest.raises(SystemExit) as ended:
        command.run()
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out + captured.err


def test_command_without_a_gpu(monkeypatch, capsys, no_gpu):
    code, text = run_command(monkeypatch, capsys, "--case", "seed")
    assert code == 2 and "a comparison needs a GPU, and none is visible" in text and "Traceback" not in text
    code, text = run_command(monkeypatch, capsys, "--case", "nowhere")
    assert code == 2 and "case 'nowhere' is not known" in text


def test_command_renders_an_earlier_result_into_documents(monkeypatch, capsys, no_gpu, tmp_path):
    report = blank(full_result(), complete=True)
    (tmp_path / "card.json").write_text(report.to_json())
    document = tmp_path / "README.md"
    document.write_text("<!-- comparison: begin -->\n<!-- comparison: end -->\n<!-- floors: begin -->\n<!-- floors: end -->\n")
    code, text = run_command(monkeypatch, capsys, "--render", str(tmp_path / "card.json"), "--into", str(document))
    assert code == 0 and "| seed fp32 |" in text
    assert comparison(report).strip() in document.read_text() and floor_table().strip() in document.read_text()
    (tmp_path / "card.json").write_text("{}")
    code, text = run_command(monkeypatch, capsys, "--render", str(tmp_path / "card.json"))
    assert code == 2 and "no result of benchmarks.compare" in text


def test_the_last_result_of_a_case_counts() -> None:
    one, other = full_result(), Result(BY_NAME["msa bf16"], floors(BY_NAME["msa bf16"], NOMINAL))
    whole, part = blank(one, other, complete=True), blank(replace(other, notes=("anew",)), complete=True)
    assert command.latest([whole, part]) == [replace(whole, results=(one,)), part]
    assert command.latest([part, whole]) == [whole], "nothing is left of the first"
    assert command.result_path(Path("r"), "NVIDIA H200", ("seed_b1", "bf16")) == Path("r/nvidia_h200_seed_b1_bf16.json")


def test_measuring_writes_json_and_tables(monkeypatch, tmp_path):
    fake = FakeInstruments(MACHINE)
    monkeypatch.setattr("benchmarks.instruments.GpuInstruments", lambda gpu, **options: fake)
    module_for(tmp_path, BY_NAME["seed fp32"].spec())
    gpu = Gpu(0, "NVIDIA H200", "GPU-1", "580", (9, 0))
    plan = Plan(select(["seed"], ["fp32"]), tmp_path)
    path = command.result_path(tmp_path / "results", gpu.name)
    assert path == tmp_path / "results" / "nvidia_h200.json"
    report = command.measure(plan, gpu, path, 0, False, True, lambda line: None)
    assert from_json(path.read_text()) == report and report.complete and report.results[0].gain == 4.0
    assert path.with_suffix(".md").read_text() == comparison(report)
    assert fake.log[-1] == "close"


def test_tuning_what_is_missing(monkeypatch, tmp_path):
    asked = []

    def tuned(request, console) -> int:
        asked.append(request)
        if request.spec.batch == 64:
            raise SpecError("no room")
        return 0

    monkeypatch.setattr("tuner.session.run", tuned)
    module_for(tmp_path, BY_NAME["seed fp32"].spec())
    module_for(tmp_path, BY_NAME["seed_b1 fp32"].spec(), measured=False)
    gpu = Gpu(3, "NVIDIA H200", "GPU-1", "580", (9, 0))
    command.tune_missing(select(["seed", "seed_b1", "seed_b64", "deeplab"], ["fp32"]), tmp_path, gpu, 12.0, 5)
    assert [request.spec.batch for request in asked] == [1, 64, 2]
    assert {(request.out, request.budget, request.seed, request.gpu) for request in asked} == {(tmp_path, 12.0, 5, 3)}
    assert asked[0].command == f"{tune_command(asked[0].spec)} --budget 12"


def test_help_names_every_option():
    text = CliRunner().invoke(command.app, ["--help"], terminal_width=200).output
    for option in ("--case", "--dtype", "--generated", "--out", "--into", "--render", "--max-autotune", "--tune", "--budget"):
        assert option in text


@pytest.mark.gpu
@pytest.mark.slow
def test_comparison_on_the_gpu(tmp_path):
    from tuner.gpu import visible_gpu

    gpu = visible_gpu()
    assert gpu is not None
    module_for(tmp_path, BY_NAME["seed fp32"].spec(), arch=gpu.target.arch)
    plan = Plan(select(["seed"], ["fp32"]), tmp_path, budget=400.0, build=150.0)
    report = command.measure(plan, gpu, tmp_path / "report.json", 0, False, True, print)
    c = report.ceilings
    assert 0.1 < c.copy_tbs < 20 and 1 < c.fp32_tflops <= c.tf32_tflops < c.bf16_tflops and 0.3 < c.kernel_us < 20
    (result,) = report.results
    assert set(result.pytorch) == {"eager", "SDPA", "torch.compile", "torch.compile + SDPA"}, result.notes
    assert result.rival is not None and result.rival.error is not None and result.rival.error < 1e-5, result.notes
    assert result.module is not None and result.module.error is not None and result.module.error < 1e-5, result.notes
    assert result.gain is not None and result.gain > 1 and result.above_floor is not None and result.above_floor > 0.4
    assert dataclasses.asdict(from_json(report.to_json())) == dataclasses.asdict(report)


def test_the_sanitizer_sample_is_the_same_each_time_and_covers_types_and_families() -> None:
    from benchmarks.sanitize import sample
    from codegen.spec import DTYPES

    drawn = sample(8, 0, target("sm_90"))
    assert [s.digest for s in drawn] == [s.digest for s in sample(8, 0, target("sm_90"))]
    assert {s.spec.dtype for s in drawn} == set(DTYPES)
    names = [{kernel.name for kernel in s.kernels} for s in drawn]
    assert all(any(name in each for each in names) for name in ("axial_row", "axial_row_qkv", "axial_row_block")), "three families"
    assert {len(s.kernels) for s in sample(8, 0, target("sm_80"))} == {2, 6}, "one family needs sm_90"


def test_kernels_of_a_configuration_are_timed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a launcher that computes on the CPU and a clock that gives each kernel its number."""
    from benchmarks import kernels

    spec = BlockSpec(dim=32, heads=2, height=3, width=16, batch=1, axes=("row",))

    class Launcher:
        def __init__(self, source, cubin) -> None:
            self.spec = source.spec

        def bind(self, x, weights, y):
            def forward(only: int | None = None) -> None:
                y.copy_(reference(self.spec, x, weights))

            return forward

    def measure(forwards):
        only = getattr(forwards[0], "args", None)
        return Timing(10.0 if only is None else float(only[0]), 0.0, 0.0, 0.0)

    monkeypatch.setattr("tuner.launch.Loaded", Launcher)
    monkeypatch.setattr("tuner.measure.measure", measure)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(kernels, "DEVICE", "cpu")
    found = kernels.line(spec, target("sm_90"), "family=staged qkv_engine=mma")
    assert re.fullmatch(r" +10\.0 all  row_qkv 0\.0  row_attention 1\.0  row_out 2\.0  error [0-9.e-]+", found), found
    with pytest.raises(SpecError, match="is not of wgmma"):
        kernels.line(spec, target("sm_90"), "qkv_engine=wgmma qkv_warp_columns=2")


def test_listed_configurations_are_legal_and_wrong_lines_are_told(tmp_path: Path) -> None:
    from benchmarks.configurations import candidate, lines

    listed = lines(Path(__file__).parent.parent / "benchmarks" / "sequence.txt", [])
    to = target("sm_90")
    found = [candidate(line, to) for line in listed]
    assert len(found) > 40 and len({(c.spec, *c.configs.values()) for c in found}) == len(found), "two lines are the same configuration"
    assert {line.split()[0] for line in lines(Path(__file__).parent.parent / "benchmarks" / "sequence.txt", ["deeplab"])} == {"deeplab"}
    for wrong, said in (
        ("seed fp32 wraps=8", "wraps"),
        ("seed fp32 qkv_rows=4", "does not divide"),
        ("sead fp32", "not known"),
        ("seed fp32 warps=8 attn_warps=4", "no family"),
    ):
        with pytest.raises(SpecError, match=said):
            candidate(wrong, to)
    with pytest.raises(SpecError, match="cannot be read"):
        lines(tmp_path / "none.txt", [])


@pytest.mark.parametrize("name", attention.CASES)
@pytest.mark.parametrize("axis", ["row", "col"])
def test_the_variants_of_attention_are_legal_and_differ(name: str, axis: str) -> None:
    case = next(case for case in CASES if case.name == name)
    problem, sm90 = dataclasses.replace(case.spec(), axes=(axis,)).problem(axis), target("sm_90")
    start = staged.default(problem, sm90)
    assert start is not None
    texts = attention.VARIANTS[8 * problem.block.itemsize]
    configs = [attention.changed(start, text) for text in texts]
    assert len(set(configs)) == len(texts) >= 8
    assert not any(staged.StagedPlan(problem, config).reasons(sm90) for config in configs)


def test_host_time_is_taken_apart(tmp_path: Path) -> None:
    """What is timed is what its name says: how often the kernels' op is called in each, and with what."""
    from benchmarks.host import COLUMNS, parts

    spec = BlockSpec(dim=16, heads=2, height=5, width=7, batch=2, key_mask=True)
    module = emitted.on_cpu(emitted.write(tmp_path, spec))
    model = module.ModelNew(16, 2, 5, 7)
    terms = random_terms(spec, torch.Generator().manual_seed(0))
    seen = []

    def wall(call: Callable[[], object]) -> float:
        before = len(module.launched)
        grad = call().requires_grad  # type: ignore[attr-defined]
        seen.append((module.launched[before:], grad))
        return float(len(seen))

    found = parts(module, model, torch.randn(2, 5, 7, 16), terms, wall)
    assert set(found) == set(COLUMNS) - {"device"}
    by_name = {name: seen[int(found[name]) - 1] for name in found}
    whole, none = [(2, 5, 7, 16)], [(0, 5, 7, 16)]
    assert by_name == {
        "call": (whole, False),
        "Python alone": ([], False),
        "op alone": (whole, False),
        "op, empty batch": (none, False),
        "call, grad mode": (whole, True),
    }
