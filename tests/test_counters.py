"""The table of a GPU's counters: from what ncu writes, and what is said when it writes something else. A script stands in for ncu."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from benchmarks import counters
from benchmarks.cases import CASES
from benchmarks.counters import (
    ALL_WAVEFRONTS,
    CALLS,
    IDEAL,
    PERCENT,
    REGISTERS,
    REPLAYS,
    TIME,
    WARPS,
    WAVEFRONTS,
    main,
    parse,
    profile,
    table,
)
from codegen.module import read_module
from codegen.spec import SpecError
from processes import gone

ROOT = Path(__file__).resolve().parent.parent
MODULE = read_module(ROOT / "generated" / "axial_d64_h4_32x32_bf16_sm90.py")
STALLS = {"wait": "1.5", "long_scoreboard": "2.25", "barrier": "0.5", "selected": "1", "membar": "0"}
FIGURES = {TIME: "3,200", REGISTERS: "122", WARPS: "3.5", WAVEFRONTS: "1,000", IDEAL: "990", REPLAYS: "50", ALL_WAVEFRONTS: "2,000"}


def report(*kernels: str, unit: str = "ns", **changed: str) -> str:
    figures = FIGURES | dict.fromkeys(PERCENT.values(), "12.6") | changed
    figures |= {f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio": value for name, value in STALLS.items()}
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL)
    writer.writerow(["ID", "Kernel Name", *figures])
    writer.writerow(["", "", *(unit if name == TIME else "" for name in figures)])
    writer.writerows(["0", kernel, *figures.values()] for kernel in kernels)
    return "==PROF== Connected to process 1\nwhat the program prints\n" + text.getvalue()


def test_figures_are_read() -> None:
    row, col = parse(report("axial_row", "axial_col"))
    assert (row.name, col.name) == ("row", "col")
    assert row.us == pytest.approx(3.2) and row.registers == 122 and row.warps == 3.5
    assert set(row.percent) == set(PERCENT) and set(row.percent.values()) == {12.6}
    assert row.conflicts == pytest.approx(1.0) and row.replays == pytest.approx(2.5)
    assert row.stalls == (("long_scoreboard", 2.25), ("wait", 1.5), ("barrier", 0.5)), "an issued instruction is no wait"
    assert parse(report("axial_row", unit="us"))[0].us == 3200


def test_what_a_kernel_has_none_of_is_no_share() -> None:
    (pack,) = parse(report("axial_pack", **{WAVEFRONTS: "0", IDEAL: "0", REPLAYS: "0", ALL_WAVEFRONTS: "0"}))
    assert pack.conflicts is None and pack.replays is None
    assert "| - | - |" in table({CASES[0]: [pack]})[-1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "reported no kernel"),
        (report(), "reported no kernel"),
        (report("axial_row").replace('"ns"', '"ns","more"'), "no such figure"),
        (report("axial_row", **{TIME: "n/a"}), "no such figure"),
        (report("axial_row").replace(TIME, "another"), "no such figure"),
        (report("axial_row", unit="fortnight"), "fortnight"),
    ],
)
def test_anything_else_is_one_clear_line(text: str, said: str) -> None:
    with pytest.raises(SpecError, match=said) as caught:
        parse(text)
    assert "\n" not in str(caught.value)


def test_a_document_without_a_place_is_refused_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "visible_gpu", lambda: None)
    (tmp_path / "empty.md").write_text("nothing\n")
    with pytest.raises(SpecError, match="has no place for the table"):
        main(into=tmp_path / "empty.md")
    with pytest.raises(SpecError, match="a GPU is needed, and ncu"):
        main(into=ROOT / "docs" / "performance.md")


def script(folder: Path, body: str) -> str:
    path = folder / "ncu"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_the_last_of_several_forwards_is_counted(tmp_path: Path) -> None:
    (tmp_path / "report").write_text(report("axial_row", "axial_col"))
    ncu = script(tmp_path, f'echo "$@" > {tmp_path}/called\ncat {tmp_path}/report')
    assert [kernel.name for kernel in profile(MODULE, ncu, {"PATH": "/bin:/usr/bin"})] == ["row", "col"]
    called = (tmp_path / "called").read_text()
    kernels = len(MODULE.source.kernels)
    assert f"--launch-skip {(CALLS - 1) * kernels} --launch-count {kernels} " in called and called.endswith(f"--calls {CALLS}\n")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("exit 1", "reported no kernel: it said nothing"),
        ("echo ==ERROR== ERR_NVGPUCTRPERM; exit 1", "reported no kernel: ==ERROR== ERR_NVGPUCTRPERM"),
        ("echo no nvcc here >&2; exit 1", "reported no kernel: no nvcc here"),
        ("cat {folder}/report", "reported 1 kernels of 2"),
    ],
)
def test_why_ncu_has_counted_nothing_is_said(body: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "report").write_text(report("axial_row"))
    with pytest.raises(SpecError, match=said):
        profile(MODULE, script(tmp_path, body.format(folder=tmp_path)), {"PATH": "/bin:/usr/bin"})


def test_what_hangs_ends_with_all_that_it_has_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "SECONDS", 0.5)
    with pytest.raises(SpecError, match="ncu took more than 0.5 s"):
        profile(MODULE, script(tmp_path, f"sleep 60 & echo $! > {tmp_path}/child; wait"), {"PATH": "/bin:/usr/bin"})
    assert gone(int((tmp_path / "child").read_text()))
