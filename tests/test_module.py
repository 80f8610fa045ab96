"""Emitted modules as files: written whole, named by what they are, read back without being executed, listed."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

import emitted
from codegen.module import Provenance, list_modules, load_module, module_name, read_module, update_index, write_module
from codegen.render import Source, render
from codegen.sequence import default
from codegen.spec import BlockSpec, SpecError
from codegen.target import target

MEASURED = Provenance(
    measured=True,
    command="python cli.py tune",
    date="2025-01-02",
    gpu="NVIDIA H200",
    driver="580.1",
    torch="2.11.0",
    cuda="13.0",
    versions={"nvrtc": "13.0"},
    device_us=14.25,
    spread_us=0.1,
    wall_us=31.0,
    default_us=15.5,
    pytorch_us=72.0,
    pytorch_form="torch.compile",
    error=1.1e-6,
)


@pytest.mark.parametrize("axes", [("row", "col"), ("row",), ("col",)])
def test_what_is_written_is_read_back(tmp_path: Path, axes: tuple[str, ...]) -> None:
    spec = BlockSpec(dim=16, heads=2, height=5, width=7, batch=2, axes=axes)
    source, configs = emitted.rendered(spec, target("sm_90"))
    path = write_module(tmp_path, source, configs, MEASURED, target("sm_90"))
    found = read_module(path)
    assert (found.spec, found.source, found.configs, found.provenance, found.arch) == (spec, source, configs, MEASURED, "sm_90")
    assert found.source.digest == source.digest and found.kernels == source.kernels
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_names_state_spec_architecture_and_whether_it_was_measured() -> None:
    assert module_name(BlockSpec(), "sm_90", predicted=False) == "axial_d64_h4_32x32_fp32_sm90.py"
    assert module_name(BlockSpec(), "sm_120", predicted=True) == "axial_d64_h4_32x32_fp32_sm120_predicted.py"


def test_a_predicted_module_leaves_the_measured_one_alone(tmp_path: Path) -> None:
    measured = emitted.write(tmp_path, provenance=MEASURED)
    before = measured.read_bytes()
    predicted = emitted.write(tmp_path)
    assert predicted != measured and measured.read_bytes() == before


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    assert emitted.write(tmp_path / "a").read_bytes() == emitted.write(tmp_path / "b").read_bytes()


def test_header_says_what_was_measured_or_that_it_is_predicted(tmp_path: Path) -> None:
    measured = emitted.write(tmp_path, provenance=MEASURED).read_text().split('"""')[1]
    for stated in ("dim 16, 2 heads, 5x7", "NVIDIA H200", "14.25", "72.00", "torch.compile", "15.50", "1.1e-06"):
        assert stated in measured
    for stated in ("python cli.py tune", "driver 580.1", "nvrtc 13.0", "2025-01-02"):
        assert stated in measured
    assert "redicted" not in measured
    predicted = emitted.write(tmp_path).read_text().split('"""')[1]
    assert "Predicted" in predicted and "Measured on" not in predicted
    partial = emitted.write(tmp_path, provenance=dataclasses.replace(MEASURED, partial=True)).read_text().split('"""')[1]
    assert "Partial" in partial


def test_free_text_cannot_break_the_file(tmp_path: Path) -> None:
    """Quotes, line ends and the words KernelBench rejects may stand in a command or a note."""
    nasty = "a \"\"\" b \\ c\nd ''' pass try: except x #"
    path = emitted.write(tmp_path, provenance=dataclasses.replace(MEASURED, command=nasty, note=nasty, gpu=nasty, versions={nasty: nasty}))
    assert read_module(path).provenance.device_us == 14.25
    assert load_module(path).ModelNew(16, 2, 5, 7) is not None


def test_source_that_cannot_be_emitted_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    source, configs = emitted.rendered(emitted.SPEC, target("sm_90"))
    for text, reason in (("'''", "raw string"), ("pass", "the word pass")):
        changed = Source(source.spec, source.text + f"\nint {text};\n", source.kernels)
        with pytest.raises(SpecError, match=reason):
            write_module(tmp_path, changed, configs, MEASURED, target("sm_90"))
    assert list(tmp_path.iterdir()) == []


def test_unwritable_folder_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(SpecError, match="cannot be written") as raised:
            emitted.write(folder)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "", lambda text: "def", lambda text: "\0", lambda text: "SPEC = open('/etc/passwd')", lambda text: "SPEC = 3",
        lambda text: text.replace('"dim": 16', '"dim": 17'), lambda text: text.replace('"warps": ', '"wraps": '),
        lambda text: text.replace('"family": "sequence"', '"family": "none"'), lambda text: text.replace("PROVENANCE = ", "OTHER = "),
        lambda text: text.replace('ARCH = "sm_90"', 'ARCH = "sm_1"'), lambda text: text.replace('"threads": ', '"threads": 0.5 + '),
        lambda text: re.sub(r'"threads": \d+', '"threads": "many"', text), lambda text: text[: len(text) // 2],
        lambda text: text.replace('"axis": "col"', '"axis": "row"'), lambda text: text.replace('"measured": False', '"measured": 1'),
    ],
)  # fmt: skip
def test_a_file_that_is_not_ours_is_one_clear_line(tmp_path: Path, damage) -> None:
    path = emitted.write(tmp_path)
    damaged = damage(path.read_text())
    assert damaged != path.read_text()
    path.write_text(damaged)
    with pytest.raises(SpecError, match="not an emitted module") as raised:
        read_module(path)
    assert "\n" not in str(raised.value)


def test_reading_executes_nothing(tmp_path: Path) -> None:
    path = emitted.write(tmp_path)
    marker = tmp_path / "executed"
    path.write_text(path.read_text() + f"\nopen({str(marker)!r}, 'w').close()\n")
    read_module(path)
    assert not marker.exists()


def test_missing_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot be read"):
        read_module(tmp_path / "none.py")


def test_index_is_derived_from_the_files(tmp_path: Path) -> None:
    measured = emitted.write(tmp_path, provenance=MEASURED)
    predicted = emitted.write(tmp_path)
    (tmp_path / "other.py").write_text("x = 1")
    assert [m.path for m in list_modules(tmp_path)] == [measured, predicted]
    entries = json.loads(update_index(tmp_path).read_text())
    assert [(e["file"], e["measured"], e["device_us"]) for e in entries] == [(measured.name, True, 14.25), (predicted.name, False, None)]
    (tmp_path / "axial_broken.py").write_text("x = 1")
    with pytest.warns(UserWarning, match="axial_broken.py is not an emitted module"):
        assert len(list_modules(tmp_path)) == 2


def test_provenance_of_a_wrong_type_is_refused() -> None:
    for wrong in ({"measured": 1}, {"device_us": "fast"}, {"versions": {"torch": 2}}, {"gpu": None}, {"partial": 0}):
        with pytest.raises(SpecError, match="provenance"):
            Provenance(**{"measured": True, **wrong})


def test_the_limits_of_fp16x3_stand_in_the_module_that_uses_it(tmp_path: Path) -> None:
    for math, said in (("fp16x3", True), ("tf32x3", False)):
        configs = {axis: dataclasses.replace(default(emitted.SPEC.problem(axis), target("sm_90"), math)) for axis in emitted.SPEC.axes}
        path = write_module(tmp_path, render(emitted.SPEC, configs), configs, emitted.PREDICTED, target("sm_90"))
        assert ("beyond 65504" in " ".join(path.read_text().split())) == said
