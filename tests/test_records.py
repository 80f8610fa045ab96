"""Records: what is written can be read, what is torn or foreign is left out and said so."""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import os

import pytest

from codegen.sequence import SequenceConfig
from codegen.spec import BlockSpec, SpecError
from tuner.records import Machine, Record, Records, parse_config, records_path
from tuner.trial import FAILURES, OK, Candidate, Outcome, Resources, Timing

SPEC = BlockSpec(dim=16, heads=2, height=5, width=7, batch=2)
HERE = Machine("sm_90", "NVIDIA H200", "580.65", {"torch": "2.11.0", "nvrtc": "13.0"})


def record(spec: BlockSpec = SPEC, machine: Machine = HERE, status: str = OK, **more) -> Record:
    configs = {axis: SequenceConfig(warps=4) for axis in spec.axes}
    timing = Timing(14.25, 0.125, 17.5, 0.0, 200, 1980, 3201) if status == OK and machine.measures else None
    outcome = Outcome(
        Candidate(spec, configs),
        status,
        "" if status == OK else FAILURES[status],
        1.25e-6,
        timing,
        None if timing else 12.5,
        {"axial_row": Resources(98, 0, 35_000)},
        "ab" * 32,
        {"compile": 0.25},
    )
    return Record(dataclasses.replace(outcome, **more), machine, 1_700_000_000.0)


@pytest.fixture
def records(tmp_path):
    return Records(records_path(tmp_path, "axial_d16_h2_5x7_fp32_sm90"))


def test_every_value_survives(records):
    written = [
        record(),
        record(status="fault"),
        record(BlockSpec(axes=("col",))),
        record(machine=Machine("sm_80")),
        record(status="wrong", error=math.inf),
        record(status="compile_error", error=None),
    ]
    for one in written:
        records.append(one)
    assert records.read() == written and records.notes == []
    assert records.path.parent.name == "records" and records.path.read_bytes().count(b"\n") == len(written)


def test_lines_are_json_without_extensions(records):
    records.append(record(status="wrong", error=math.nan))
    line = json.loads(records.path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert line["spec"]["axes"] == ["row", "col"] and line["configs"]["row"]["warps"] == 4 and line["time"] == "2023-11-14T22:13:20Z"
    assert math.isnan(records.read()[0].outcome.error)


def test_missing_file_is_empty(records):
    assert records.read() == [] and records.matching(SPEC, "NVIDIA H200", "580.65") == []


def test_torn_last_line_is_left_out_and_does_not_swallow_the_next(records):
    records.append(record())
    whole = records.path.read_bytes()
    records.path.write_bytes(whole + whole[: len(whole) // 2])
    assert len(records.read()) == 1 and records.notes == ["line 2: torn, left out"]
    records.append(record(status="wrong"))
    assert [r.outcome.status for r in records.read()] == [OK, "wrong"]
    assert len(records.notes) == 1


def test_every_truncation_is_survived(records):
    records.append(record())
    records.append(record(status="fault"))
    whole = records.path.read_bytes()
    first = whole.index(b"\n") + 1
    for length in range(first, len(whole), 17):
        records.path.write_bytes(whole[:length])
        assert [r.outcome.status for r in records.read()] == [OK]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda d: d.update(version=2), "format version 2"),
        (lambda d: d["configs"]["row"].update(warps=5), "warps must be one of"),
        (lambda d: d["configs"]["row"].update(warps=True), "warps must be one of"),
        (lambda d: d["configs"]["row"].update(math="ffma; system('x')"), "math must be one of"),
        (lambda d: d["configs"]["row"].update(nonsense=1), "unknown or missing nonsense"),
        (lambda d: d["configs"]["row"].pop("fragment"), "unknown or missing fragment"),
        (lambda d: d["configs"].pop("row"), "configurations for ['col']"),
        (lambda d: d["configs"]["row"].update(family="other"), "unknown kernel family 'other'"),
        (lambda d: d["spec"].update(dim=15), "not divisible by heads"),
        (lambda d: d["spec"].update(colour="red"), "not a record"),
        (lambda d: d["machine"].update(arch="sm_70"), "is not supported"),
        (lambda d: d.update(status="fine"), "unknown status 'fine'"),
        (lambda d: d["timing"].update(device=-1.0), "device time"),
        (lambda d: d["timing"].update(device="nan"), "device time"),
        (lambda d: d.pop("resources"), "not a record: KeyError 'resources'"),
        (lambda d: d.update(time="yesterday"), "not a record"),
    ],
)
def test_values_outside_the_space_are_left_out_with_the_reason(records, change, reason):
    data = record().to_dict()
    change(data)
    records.append(record())
    with records.path.open("a") as file:
        file.write(json.dumps(data) + "\n" + "[1, 2]\n")
    assert len(records.read()) == 1
    assert reason in records.notes[0] and records.notes[0].startswith("line 2: ") and records.notes[1].startswith("line 3: ")


def test_records_of_another_gpu_or_driver_are_not_reused(records):
    for machine in (HERE, dataclasses.replace(HERE, driver="570.1"), dataclasses.replace(HERE, gpu="NVIDIA A100"), Machine("sm_90")):
        records.append(record(machine=machine))
    records.append(record(dataclasses.replace(SPEC, batch=3)))
    assert records.matching(SPEC, HERE.gpu, HERE.driver) == [record()]
    assert records.notes == [
        "3 trials of NVIDIA A100 driver 580.65; NVIDIA H200 driver 570.1; no GPU driver - are not reused as measured here"
    ]
    assert records.matching(SPEC, "", "") == []


def _append(path, number):
    for _ in range(number):
        Records(path).append(record())


def test_concurrent_writers_tear_nothing(records):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_append, args=(records.path, 20)) for _ in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert len(records.read()) == 60 and records.notes == []


def test_unwritable_place_is_one_clear_line(tmp_path):
    (tmp_path / "records").write_text("a file where the folder should be")
    with pytest.raises(SpecError, match="records cannot be written to .*axial.jsonl: ") as caught:
        Records(records_path(tmp_path, "axial")).append(record())
    assert "\n" not in str(caught.value)


def test_short_write_is_an_error(records, monkeypatch):
    records.append(record())
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:10]))
    with pytest.raises(SpecError, match="the disk is full"):
        records.append(record())
    monkeypatch.undo()
    records.append(record(status="wrong"))
    assert [r.outcome.status for r in records.read()] == [OK, "wrong"]


def test_configuration_from_text():
    config = SequenceConfig(warps=4, math="ffma", weights="stream", prefetch="none")
    assert parse_config(config.to_dict()) == config
    for bad in ({}, [], {"family": ["sequence"]}, {"family": "sequence"}):
        with pytest.raises(SpecError):
            parse_config(bad)


def test_a_configuration_older_than_a_tunable_has_what_was_before_it() -> None:
    old = {name: value for name, value in SequenceConfig(warps=4).to_dict().items() if name not in ("heads", "head_warps", "rounds")}
    config = SequenceConfig.from_dict(old)
    assert (config.heads, config.head_warps, config.rounds, config.warps) == ("shared", 1, 1, 4)
    with pytest.raises(SpecError, match="missing sequences"):
        SequenceConfig.from_dict({name: value for name, value in old.items() if name != "sequences"})
