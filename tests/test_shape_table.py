"""The table of shapes from the field: what is in it, what stays of an earlier run, and what a wrong kernel looks like."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import benchmarks.shapes
from benchmarks.field import BOTH, COLUMNS, SHAPES, Shape
from benchmarks.shapes import EARLIER, LATE, Work, compared, emulate, on_emulator, on_gpu, plan, run
from benchmarks.shapes_report import Row, read, table
from codegen.config import Config
from codegen.library import KERNELS
from codegen.render import Source
from codegen.spec import BlockSpec
from codegen.target import target
from fake_backend import FakeBackend
from tuner.trial import Timing

H200 = target("sm_90")
FEW = (Shape("Few", 24, 3, (5, 33)), Shape("One axis", 40, 1, (16, 4096), axes=COLUMNS), Shape("Refused", 4096, 1, (600, 700)))
NOWHERE = {"date": "2026-01-02", "arch": "sm_90", "torch": "2.11", "gpu": "", "driver": ""}
HERE = {**NOWHERE, "gpu": "H200", "driver": "580.1"}


class Checks:
    """Stands for the GPU or the emulator, and remembers what it was asked."""

    def __init__(self, **found) -> None:
        self.asked: list[str] = []
        self.found = found

    def __call__(self, todo: Sequence[tuple[Row, Work]]) -> Iterator[Row]:
        for row, _ in todo:
            self.asked.append(row.model)
            yield replace(row, **self.found)


MEASURED = dict(checked="GPU", error=1e-6, timing=Timing(10.0, 0.1), pytorch=Timing(40.0, 1.0, wall=80.0), form="SDPA", use=KERNELS)


def test_every_shape_of_the_field_is_named_once_and_served_or_refused_with_a_reason() -> None:
    assert len({shape.name for shape in SHAPES}) == len(SHAPES) >= 20
    for shape in SHAPES:
        row, work = plan(shape, H200, {})
        assert (work is None) == bool(row.refused) and "\n" not in row.refused
        assert work is None or (row.family and row.configuration and row.source == work.source.digest)
    assert {shape.head_dim for shape in SHAPES} >= {8, 16, 32, 38, 40, 64, 72, 80, 160}


def test_the_emulator_checks_each_axis_on_a_few_sequences() -> None:
    rows = list(on_emulator([(row, work) for row, work in (plan(shape, H200, {}) for shape in FEW) if work], time.monotonic() + 300))
    assert [(row.checked, row.note) for row in rows] == [("emulator", "")] * 2
    assert all(row.error is not None and 0.0 < row.error < 1e-5 for row in rows)


def test_a_wrong_kernel_shows_in_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    import benchmarks.shapes as shapes

    def wrong(spec: BlockSpec, configs: dict[str, Config]) -> Source:
        source = shapes.plan.__globals__["real"](spec, configs)
        changed = source.text.replace("exp2_approx(", "1.0001f * exp2_approx(").replace("rsqrtf(", "1.01f * rsqrtf(")
        assert changed != source.text
        return replace(source, text=changed)

    row, work = plan(FEW[0], H200, {})
    assert work is not None
    monkeypatch.setitem(shapes.plan.__globals__, "real", shapes.render)
    monkeypatch.setattr(shapes, "render", wrong)
    found = emulate(row, work, 60.0)
    assert found.error is not None and found.error > 1e-4 and "exceeds" in found.note


def test_what_does_not_fit_into_the_budget_is_said() -> None:
    todo = [(row, work) for row, work in (plan(shape, H200, {}) for shape in FEW) if work]
    assert [row.note for row in on_emulator(todo, time.monotonic() - 1.0)] == [LATE, LATE]
    assert [row.note for row in on_gpu(todo, time.monotonic() - 1.0, FakeBackend(), lambda spec: pytest.fail("begun"))] == [LATE, LATE]


def test_on_a_gpu_nothing_is_measured_before_all_forms_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmarks.shapes, "CHUNK", 2)
    events: list[str] = []

    class Built:
        def __init__(self, spec: BlockSpec) -> None:
            events.append("begun")

        def wait(self) -> None:
            events.append("built")

        def timings(self) -> dict[str, Timing]:
            events.append("measured")
            return {"eager": Timing(90.0, 1.0), "SDPA": Timing(70.0, 1.0)}

        def close(self) -> None:
            events.append("closed")

    todo = [(row, work) for row, work in (plan(shape, H200, {}) for shape in FEW) if work]
    rows = list(on_gpu(todo, time.monotonic() + 60, FakeBackend(times=lambda config: 10.0), Built))  # type: ignore[arg-type]
    assert events == ["begun"] * 2 + ["built"] * 2 + ["measured"] * 2 + ["closed"] * 2
    assert all(row.form == "SDPA" and row.use == KERNELS and row.error == 1e-6 and row.speedup and row.speedup > 1.0 for row in rows)


def test_a_shape_where_pytorch_is_faster_is_the_librarys() -> None:
    row = compared(Row("n", "m", 8, family="sequence"), Timing(10.0, 0.1), {"eager": Timing(20.0, 0.1), "SDPA": Timing(9.0, 0.1)})
    assert (row.use, row.form, row.speedup) == ("SDPA", "SDPA", 0.9)
    assert "library (SDPA) instead of sequence" in table([row])
    assert compared(row, None, {"eager": Timing(20.0, 0.1)}).use == "", "kernels that failed are no choice"


def test_a_run_goes_on_where_the_last_one_stopped(tmp_path: Path) -> None:
    first = Checks(**MEASURED)
    run(FEW, H200, tmp_path, first, HERE, {}, only=lambda row: row.model == "Few")
    second = Checks(**MEASURED)
    rows = run(FEW, H200, tmp_path, second, HERE, {})
    assert (first.asked, second.asked) == (["Few"], ["One axis"])
    facts, known = read(tmp_path / "shapes.json")
    assert facts == HERE and list(known.values()) == rows, "JSON keeps all of it"
    assert [bool(row.refused) for row in rows] == [False, False, True]
    again = Checks(**MEASURED)
    run(FEW, H200, tmp_path, again, HERE, {}, fresh=True)
    assert again.asked == ["Few", "One axis"]


def test_shapes_that_never_had_a_time_come_first(tmp_path: Path) -> None:
    """A run may be cut short: times of earlier kernels are better than none."""
    more = (*FEW[:2], Shape("Third", 32, 4, (8, 9)))
    run(more[:2], H200, tmp_path, Checks(**MEASURED), HERE, {})
    check = Checks(**MEASURED)
    changed = {shape.spec(): {axis: replace(c, min_blocks=2) for axis, c in plan(shape, H200, {})[1].configs.items()} for shape in more[:2]}  # type: ignore[union-attr]
    run(more, H200, tmp_path, check, HERE, changed)
    assert check.asked == [plan(shape, H200, {})[0].model for shape in (more[2], *more[:2])]


def test_measurements_stay_only_while_they_hold(tmp_path: Path) -> None:
    """Without a GPU they are kept; another GPU, another driver or other kernels have them made again."""
    run(FEW, H200, tmp_path, Checks(checked="emulator", error=2e-6), NOWHERE, {})
    gpu = Checks(**MEASURED)
    run(FEW, H200, tmp_path, gpu, HERE, {})
    assert gpu.asked == ["Few", "One axis"], "the emulator's word is not a measurement"
    cpu = Checks(checked="emulator", error=2e-6)
    rows = run(FEW, H200, tmp_path, cpu, NOWHERE, {})
    assert not cpu.asked and rows[0].timing == MEASURED["timing"] and read(tmp_path / "shapes.json")[0] == HERE
    spec = FEW[0].spec()
    row, work = plan(FEW[0], H200, {})
    assert work is not None
    tuned = {spec: {axis: replace(config, residual="shared") for axis, config in work.configs.items()}}
    changed = Checks(checked="emulator", error=2e-6)
    rows = run(FEW, H200, tmp_path, changed, NOWHERE, tuned)
    assert changed.asked == ["Few"] and rows[0].chosen == "tuned" and rows[0].error == 2e-6
    assert rows[0].timing == MEASURED["timing"] and rows[0].note == EARLIER, "their times stay until there are new ones, and say so"
    late = Checks(checked="", error=None, note=LATE)
    assert run(FEW, H200, tmp_path, late, HERE, tuned)[0].note == f"{LATE}; {EARLIER}"
    anew = Checks(**MEASURED)
    assert run(FEW, H200, tmp_path, anew, {**HERE, "date": "2027-01-01"}, tuned)[0].note == "" and anew.asked == ["Few"]
    assert read(tmp_path / "shapes.json")[0]["date"] == f"{HERE['date']} to 2027-01-01"
    other = Checks(**MEASURED)
    run(FEW, H200, tmp_path, other, {**HERE, "driver": "590.1"}, {})
    assert other.asked == ["Few", "One axis"]


def test_the_page_states_machine_errors_times_and_reasons(tmp_path: Path) -> None:
    run(FEW, H200, tmp_path, Checks(**MEASURED), HERE, {})
    text = (tmp_path / "shapes.md").read_text()
    assert "H200, driver 580.1, PyTorch 2.11" in text and "2 of 3 shapes are served, 2 are timed" in text
    line = next(line for line in text.splitlines() if line.startswith("| Few"))
    assert line.startswith("| Few | 1,5,33,24/3 | 8 | sequence | ") and line.endswith("| 1.0e-06 (GPU) | 10.0 | 40.0 (SDPA) | 4.00x |")
    assert "| refused | no configuration of the row axis is legal on sm_90 (" in text
    assert all(line.count("|") == 10 for line in text.splitlines() if line.startswith("|"))
    assert json.loads((tmp_path / "shapes.json").read_text())["rows"][0]["pytorch"]["wall"] == 80.0


def test_an_inner_width_of_its_own_is_served() -> None:
    shape = Shape("Inner", 32, 8, (8, 8), axes=BOTH, inner=128)
    row, work = plan(shape, H200, {})
    assert shape.head_dim == 16 and work is not None and work.spec.inner == 128 and not row.refused
