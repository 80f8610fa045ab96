"""The families behind one search: which take part, how trials are divided, and that the faster one wins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from codegen.config import Config
from codegen.families import FAMILIES, config_from_dict, plan_of
from codegen.resident import ResidentConfig, alternatives
from codegen.sequence import SequenceConfig, SequencePlan
from codegen.spec import BlockSpec, SpecError
from codegen.staged import StagedConfig
from codegen.target import target
from fake_backend import FakeBackend
from tuner.deliver import deliver
from tuner.predict import predict_axis
from tuner.progress import Silent
from tuner.session import source_of
from tuner.space import config_values, family_spaces, parse_fixed
from tuner.trial import Resources
from tuner.tune import TuneOptions, TuneResult, tune

TARGET = target("sm_90")
SMALL = BlockSpec(dim=32, heads=2, height=16, width=32, batch=2, axes=("row",))
WIDE = BlockSpec(dim=512, heads=8, height=128, width=128, axes=("row",))


def run(tmp_path: Path, times, spec: BlockSpec = SMALL, **more) -> tuple[TuneResult, FakeBackend]:
    backend = FakeBackend(times=times)
    return tune(TuneOptions(spec=spec, target=TARGET, out=tmp_path, trials=30, **more), backend, Silent(), deliver), backend


def test_a_block_that_outgrows_one_block_of_threads_is_staged_alone() -> None:
    half = replace(WIDE, dtype="bfloat16")
    assert list(family_spaces(SMALL.problem("row"), TARGET)) == ["sequence", "staged", "resident"]
    assert list(family_spaces(WIDE.problem("row"), TARGET)) == ["staged"]
    assert list(family_spaces(half.problem("row"), TARGET)) == ["staged", "resident"], "operands of half the size"
    for arch in ("sm_80", "sm_100"):  # without wgmma
        assert list(family_spaces(SMALL.problem("row"), target(arch))) == ["sequence", "staged"]


def test_fixed_tunables_choose_the_families_that_have_them() -> None:
    assert list(family_spaces(SMALL.problem("row"), TARGET, fixed=parse_fixed(["attn_warps=2"]))) == ["staged"]
    assert list(family_spaces(SMALL.problem("row"), TARGET, fixed=parse_fixed(["family=sequence"]))) == ["sequence"]
    assert list(family_spaces(SMALL.problem("row"), TARGET, fixed=parse_fixed(["math=fp16x3"]))) == list(FAMILIES)
    assert list(family_spaces(SMALL.problem("row"), TARGET, fixed=parse_fixed(["math=tf32x3"]))) == ["sequence", "staged"]
    assert list(family_spaces(SMALL.problem("row"), TARGET, fixed=parse_fixed(["overlap=false"]))) == ["resident"]
    with pytest.raises(SpecError, match="math must be one of fp16x3, bf16, fp16 in the resident family, not tf32x3"):
        family_spaces(SMALL.problem("row"), TARGET, fixed=parse_fixed(["family=resident", "math=tf32x3"]))
    with pytest.raises(SpecError, match="sm_80 has no wgmma"):
        family_spaces(SMALL.problem("row"), target("sm_80"), fixed=parse_fixed(["family=resident"]))
    with pytest.raises(SpecError, match="no family has all of warps, attn_warps"):
        family_spaces(SMALL.problem("row"), TARGET, fixed=parse_fixed(["warps=4", "attn_warps=2"]))


def test_a_tunable_that_two_families_have_has_the_values_of_both() -> None:
    """`out_columns` is 1 to 4 in `sequence` and 4 to 32 in `resident`."""
    spec = replace(SMALL, dim=64)
    for text, served in (("out_columns=2", ["sequence"]), ("out_columns=8", ["resident"]), ("out_columns=4", ["sequence", "resident"])):
        assert list(family_spaces(spec.problem("row"), TARGET, fixed=parse_fixed([text]))) == served
    with pytest.raises(SpecError, match="out_columns 16 exceeds what 64 channels need"):
        family_spaces(spec.problem("row"), TARGET, fixed=parse_fixed(["out_columns=16"]))
    with pytest.raises(SpecError, match="out_columns must be one of 1, 2, 3, 4, 8, 12"):
        parse_fixed(["out_columns=5"])
    names = [source_of(spec, TARGET, [text]).kernels[-1].name for text in ("out_columns=2", "out_columns=8", "key_tile=16")]
    assert names == ["axial_row", "axial_row_block", "axial_row"]
    assert source_of(replace(WIDE, dtype="bfloat16"), TARGET, ["key_tile=16"]).kernels[-1].name == "axial_row_block"


def test_render_takes_the_family_that_its_settings_name() -> None:
    assert [kernel.name for kernel in source_of(SMALL, TARGET, ["family=staged"]).kernels][0] == "axial_row_qkv"
    assert [kernel.name for kernel in source_of(SMALL, TARGET, ["attn_stages=3"]).kernels][1] == "axial_row_attention"
    assert [kernel.name for kernel in source_of(SMALL, TARGET, []).kernels] == ["axial_row"]
    packing = [kernel.name for kernel in source_of(WIDE, TARGET, []).kernels]
    assert packing == ["axial_pack", "axial_row_operand", "axial_row_qkv", "axial_row_attention", "axial_row_out"]
    assert len(source_of(WIDE, TARGET, ["qkv_engine=mma", "out_engine=mma"]).kernels) == 3


def staged_cost(config: Config) -> float:
    """Of three kernels, each with a best point of its own, whatever the others are."""
    if not isinstance(config, StagedConfig):
        return 30.0
    values = config_values(config)
    best = {"math": "tf32x3", "qkv_stages": 2, "attn_warps": 4, "attn_stages": 3, "out_sum_tile": 16}
    return 20.0 + sum(2.0 for name, value in best.items() if values[name] != value)


def test_the_faster_family_wins_and_its_groups_are_tuned_one_after_the_other(tmp_path: Path) -> None:
    result, backend = run(tmp_path, staged_cost, spec=WIDE)
    assert result.choice is not None
    winner = result.choice.winner.candidate.configs["row"]
    assert isinstance(winner, StagedConfig) and winner.math == "tf32x3"
    groups = StagedConfig.groups()
    assert sorted(("math", "qkv_engine", "out_engine", *sum(groups.values(), ()))) == sorted(StagedConfig.tunables())
    asked = backend.configs
    assert len({config.math for config in asked}) == 3, "a default of each arithmetic is tried"
    for names in groups.values():  # what the other two were held at while this one varied
        held = {tuple(v for n, v in config_values(config).items() if n not in names) for config in asked}
        assert len(held) < len(set(asked)) - 4
    assert len(asked) <= 45
    assert result.choice.winner.score <= staged_cost(asked[0]) - 4.0


def test_a_family_that_is_far_behind_costs_one_trial(tmp_path: Path) -> None:
    _, backend = run(tmp_path, lambda config: 10.0 if isinstance(config, SequenceConfig) else 50.0)
    assert sum(isinstance(config, StagedConfig) for config in backend.configs) == 1
    result, backend = run(tmp_path / "other", lambda config: 50.0 if isinstance(config, SequenceConfig) else 10.0)
    assert len({config for config in backend.configs if isinstance(config, SequenceConfig)}) == 1
    assert result.choice is not None and isinstance(result.choice.winner.candidate.configs["row"], StagedConfig)


def test_a_family_with_alternatives_is_started_from_each(tmp_path: Path) -> None:
    """With and without overlap, one and two blocks on a multiprocessor: what a walk from one of them does not come to."""
    half = replace(SMALL, dtype="bfloat16")
    best = alternatives(half.problem("row"), TARGET, "bf16")[-1]
    result, backend = run(tmp_path, lambda config: 10.0 if config == best else 15.0, spec=half)
    assert set(alternatives(half.problem("row"), TARGET, "bf16")) <= set(backend.configs)
    assert result.choice is not None and result.choice.winner.candidate.configs["row"] == best


def test_configurations_are_read_by_family() -> None:
    for each in (SequenceConfig(), StagedConfig(), ResidentConfig()):
        assert config_from_dict(each.to_dict()) == each
    config = StagedConfig()
    known = config.to_dict()
    for bad in ({}, {"family": "other"}, {"family": ["staged"]}, {**known, "family": "sequence"}, {**known, "math": "x"}):
        with pytest.raises(SpecError):
            config_from_dict(bad)


@pytest.mark.parametrize("family", ["staged", "resident"])
def test_more_tokens_are_predicted_to_take_longer(family: str) -> None:
    times = []
    for batch in (1, 4, 16):
        problem = BlockSpec(dim=256, heads=8, height=128, width=128, batch=batch, dtype="bfloat16").problem("row")
        plan = plan_of(problem, family_spaces(problem, TARGET)[family].start)
        assert not isinstance(plan, SequencePlan)
        used = {f"axial_row_{stage}": Resources(128, 0, 100_000) for stage in plan.kernels}
        times.append(predict_axis(plan, used, TARGET))
    assert times == sorted(times) and times[2] > 2 * times[1] > 2 * times[0]


def test_a_family_without_the_element_type_is_left_out() -> None:
    """And alone it is refused in one line, not by a crash."""
    half = BlockSpec(dim=32, heads=2, height=8, width=8, dtype="bfloat16")
    served = [name for name, family in FAMILIES.items() if family.default(half.problem("row"), TARGET, "bf16") is not None]
    assert list(family_spaces(half.problem("row"), TARGET)) == served
    for name in set(FAMILIES) - set(served):
        with pytest.raises(SpecError, match="does not compute bfloat16"):
            family_spaces(half.problem("row"), TARGET, fixed={"family": name})
