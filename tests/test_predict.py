"""The model: sane in every direction, fitted by least squares, judged by rank correlation."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from codegen.families import FAMILIES, plan_of
from codegen.resident import ResidentPlan
from codegen.sequence import MATHS, SequencePlan
from codegen.spec import BlockSpec, SpecError
from codegen.target import target
from tuner.predict import (
    STARTING,
    Calibration,
    Sample,
    axis_parts,
    calibration,
    fit,
    origin_of,
    predict,
    quality,
    regret,
    samples,
    spearman,
)
from tuner.records import Machine, Record, Records
from tuner.space import space
from tuner.trial import Candidate, Outcome, Resources, Timing
from tuner.work import NAMES, Parts, blocks_per_sm, parts

H200 = target("sm_90")
SEED = BlockSpec()


def plan(spec: BlockSpec = SEED, **changes) -> SequencePlan:
    """Of the default in TF32, which has a form in every arithmetic, unless changed."""
    problem = spec.problem("row")
    return SequencePlan(problem, replace(space(problem, H200, fixed={"math": "tf32x3"}).start, **changes))


def registers(spec: BlockSpec = SEED, **changes) -> SequencePlan:
    """Of the default that keeps q, k and v in registers."""
    problem = spec.problem("row")
    start = space(problem, H200, fixed={"heads": "registers"}).start
    return SequencePlan(problem, replace(start, **changes))


def resources(registers: int = 100, spill: int = 0, shared: int = 35_000) -> Resources:
    return Resources(registers, spill, shared)


def test_more_work_is_never_predicted_to_be_faster() -> None:
    base = predict(plan(), resources(), H200)
    assert 1.0 < base < 100.0
    assert predict(plan(BlockSpec(batch=64)), resources(), H200) > 2 * base
    assert predict(plan(BlockSpec(width=64)), resources(), H200) > base
    assert predict(plan(BlockSpec(dim=128, heads=8)), resources(), H200) > base
    assert predict(plan(), resources(spill=400), H200) > base
    slower = replace(H200, bandwidth=H200.bandwidth / 4)
    assert predict(plan(), resources(), slower) > base
    many = plan(BlockSpec(batch=64))
    assert predict(many, resources(registers=255), H200) >= predict(many, resources(registers=64), H200)


@pytest.mark.parametrize("math", MATHS)
def test_every_arithmetic_can_be_predicted(math: str) -> None:
    chosen = plan(math=math, weights="stream", prefetch="none", fragment=2)
    assert 1.0 < predict(chosen, resources(shared=chosen.shared_bytes), H200) < 100.0


@pytest.mark.parametrize("math, dtype", [("fp16x3", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")])
def test_registers_spare_shared_memory_and_rounds_the_weights(math: str, dtype: str) -> None:
    wide = BlockSpec(batch=64, dtype=dtype)
    kept, passed = registers(wide, math=math, rounds=1), registers(wide, math=math, rounds=1, heads="shared")
    assert parts(kept, resources(), H200).shared < parts(passed, resources(), H200).shared
    assert parts(kept, resources(), H200).tensor == parts(passed, resources(), H200).tensor
    several = registers(wide, math=math, rounds=8)
    assert parts(several, resources(), H200).weights < parts(kept, resources(), H200).weights / 4
    assert parts(several, resources(), H200).tensor == pytest.approx(parts(kept, resources(), H200).tensor, rel=0.1)
    if math == "fp16x3":  # weights that stay are split already
        assert parts(several, resources(), H200).issue < 0.9 * parts(kept, resources(), H200).issue


@pytest.mark.parametrize("math, dtype", [("fp16x3", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")])
def test_a_second_warp_a_head_shortens_the_chain_at_the_price_of_weights_and_shared_memory(math: str, dtype: str) -> None:
    block = BlockSpec(dtype=dtype)
    common = {"math": math, "qkv_rows": 1, "norm_lanes": 16, "out_columns": 1}
    alone, two = (parts(registers(block, **common, head_warps=warps), resources(), H200) for warps in (1, 2))
    assert two.serial < 0.8 * alone.serial and two.tensor == alone.tensor
    assert two.weights > 1.2 * alone.weights and two.shared > alone.shared and two.issue > alone.issue
    deeplab = BlockSpec(dim=128, heads=8, height=65, width=65, dtype=dtype)  # 5 row tiles: 3 and 2
    chosen = registers(deeplab, math=math, head_warps=2, qkv_rows=1, out_rows=1, qkv_columns=2, prefetch="none")
    assert chosen.head_tiles == 3 and chosen.warps == 16


def test_growing_any_part_never_shortens_the_time() -> None:
    base = {name: 1.0 for name in NAMES}
    for name in NAMES:
        assert calibration().microseconds(Parts(**{**base, name: 2.0})) >= calibration().microseconds(Parts(**base))


def test_conflicts_and_rereading_cost() -> None:
    wide = BlockSpec(batch=64)
    assert parts(plan(wide, padding=False), resources(), H200).shared > parts(plan(wide, padding=True), resources(), H200).shared
    held, streamed = plan(wide), plan(wide, weights="stream", prefetch="none", qkv_rows=1, out_rows=1)
    assert parts(streamed, resources(), H200).weights > parts(held, resources(), H200).weights


@pytest.mark.parametrize("registers, shared_changes, expected", [(32, {}, 5), (128, {}, 2), (255, {"warps": 8}, 1)])
def test_occupancy(registers: int, shared_changes: dict, expected: int) -> None:
    assert min(blocks_per_sm(plan(**shared_changes), registers, H200), 5) == expected


def _population(count: int, seed: int = 0) -> list[Parts]:
    draw = random.Random(seed)
    here = space(BlockSpec(batch=16).problem("row"), H200)
    found = []
    for _ in range(count):
        chosen = SequencePlan(here.problem, here.random(draw))
        found.append(parts(chosen, resources(draw.randrange(64, 255), draw.choice((0, 0, 64)), chosen.shared_bytes), H200))
    return found


def test_fit_recovers_the_coefficients_of_exact_times() -> None:
    truth = Calibration(dict(zip(NAMES, (1.0, 1.5, 0.0, 0.7, 2.0, 0.5, 3.0, 0.25, 1.0), strict=True)), "truth")
    data = [Sample(p, truth.microseconds(p)) for p in _population(80)]
    found = fit(data, "test", prior=0.0)
    assert all(abs(found.microseconds(s.parts) / s.measured - 1.0) < 0.01 for s in data)
    assert all(c >= 0.0 for c in found.coefficients.values())
    assert quality(data, found) > 0.999


def test_fit_ranks_noisy_times_better_than_the_starting_values() -> None:
    draw = random.Random(2)
    truth = Calibration(dict(zip(NAMES, (1.0, 0.1, 0.1, 0.1, 3.0, 3.0, 5.0, 0.1, 2.0), strict=True)), "truth")
    data = [Sample(p, truth.microseconds(p) * draw.lognormvariate(0.0, 0.05)) for p in _population(80, 1)]
    train, test = data[:40], data[40:]
    assert quality(test, fit(train, "test")) > max(0.9, quality(test, calibration()))


def test_a_part_that_the_measurements_say_nothing_about_keeps_its_starting_value() -> None:
    data = [Sample(replace(p, grid=0.0, spill=0.0), 1.5 + p.serial) for p in _population(40)]
    found = fit(data, "test").coefficients
    assert found["grid"] == pytest.approx(STARTING["grid"]) and found["spill"] == pytest.approx(STARTING["spill"])
    assert found["serial"] == pytest.approx(1.0, abs=0.2)


def test_fit_needs_enough_samples() -> None:
    with pytest.raises(SpecError, match="too few"):
        fit([Sample(p, 1.0) for p in _population(3)], "test")


def test_spearman() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1.0)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    assert spearman([1, 1, 2, 2], [1, 2, 1, 2]) == pytest.approx(0.0)
    assert spearman([5, 5, 5], [1, 2, 3]) == 0.0
    assert spearman([1, 2, 3, 4, 5], [2, 1, 4, 3, 5]) == pytest.approx(0.8)


def test_samples_take_what_was_measured_with_known_resources() -> None:
    spec = BlockSpec(axes=("row",))
    candidate = Candidate(spec, {"row": space(spec.problem("row"), H200).start})
    used = {"axial_row": resources()}
    outcomes = [
        Outcome(candidate, "ok", timing=Timing(7.0, 0.1), resources=used),
        Outcome(candidate, "ok", timing=Timing(7.0, 0.1)),
        Outcome(candidate, "ok", predicted_us=7.0, resources=used),
        Outcome(candidate, "wrong", "zeros", resources=used),
    ]
    found = samples(Record.now(outcome, Machine("sm_90", "H200", "580")) for outcome in outcomes)
    assert [s.measured for s in found] == [7.0]


def recorded(axis: str) -> list[Sample]:
    """A sample of the trials of one axis that the search measured on an H200: every second one in the order of their times."""
    records = Records(Path(__file__).parent / "data" / "h200_seed.jsonl")
    found = samples(r for r in records.read() if r.outcome.candidate.spec.axes == (axis,))
    assert len(found) == 30 and not records.notes
    return found


@pytest.mark.parametrize("axis, other", [("row", "col"), ("col", "row")])
def test_ranks_the_measured_trials_of_an_axis_after_a_fit_to_those_of_the_other(axis: str, other: str) -> None:
    held_out, by = recorded(axis), fit(recorded(other), "the other axis")
    assert quality(held_out, by) > 0.92
    assert quality([s for s in held_out if s.measured < 10.0], by) > 0.7  # the fast ones alone, which are harder to tell apart
    assert regret(held_out, by, among=5) < 0.05


@pytest.mark.parametrize("axis", ["row", "col"])
def test_the_committed_calibration_finds_a_fast_one_among_the_measured_trials(axis: str) -> None:
    assert quality(recorded(axis)) > 0.92
    assert regret(recorded(axis)) < 0.15
    assert regret(recorded(axis), among=5) < 0.05


def test_the_committed_calibration_predicts_times_and_not_only_ranks() -> None:
    data = recorded("row") + recorded("col")
    errors = sorted(abs(calibration().microseconds(s.parts) / s.measured - 1.0) for s in data)
    assert errors[len(errors) // 2] < 0.1


def test_regret_is_what_the_first_choices_cost() -> None:
    by = Calibration(dict.fromkeys(NAMES, 1.0), "test")
    zero = Parts(**dict.fromkeys(NAMES, 0.0))
    data = [Sample(replace(zero, serial=serial), measured) for serial, measured in ((1.0, 6.0), (2.0, 5.0), (3.0, 9.0))]
    assert regret(data, by) == pytest.approx(0.2) and regret(data, by, among=2) == 0.0


def test_the_origin_names_blocks_gpu_driver_and_day() -> None:
    found = Records(Path(__file__).parent / "data" / "h200_seed.jsonl").read()
    expected = "fitted to 60 measured trials of d64_h4_32x32_col_fp32, d64_h4_32x32_row_fp32 (NVIDIA H200, driver 580.159.04; 2026-11-29)"
    assert origin_of(found) == expected


def test_halves_need_fewer_products_and_no_splitting_at_use() -> None:
    halves, floats = (parts(plan(math=math), resources(), H200) for math in ("fp16x3", "tf32x3"))
    assert halves.tensor == pytest.approx(floats.tensor / 2)
    assert halves.serial < floats.serial and halves.issue < floats.issue


def test_fewer_warps_have_longer_to_go_one_after_another() -> None:
    few, many = (parts(plan(warps=warps), resources(), H200) for warps in (2, 8))
    assert few.serial > 2 * many.serial


def test_weights_that_are_not_prefetched_are_waited_for() -> None:
    waits = [parts(plan(prefetch=prefetch), resources(), H200).wait for prefetch in ("none", "qkv", "both")]
    assert waits == sorted(waits, reverse=True) and waits[0] > waits[2]


def test_the_committed_calibration_is_valid_and_states_its_origin() -> None:
    assert set(calibration().coefficients) == set(NAMES) and calibration().origin


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"origin": "x", "coefficients": {"launch": 1}}', '{"coefficients": {"launch": -1}}'])
def test_a_broken_calibration_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(text)
    with pytest.raises(SpecError, match="calibration"):
        Calibration.load(path)


def test_a_calibration_survives_saving(tmp_path: Path) -> None:
    calibration().save(tmp_path / "c.json")
    assert Calibration.load(tmp_path / "c.json") == calibration()


def of_family(spec: BlockSpec, family: str, **changes) -> Parts:
    """The parts of the family's default for rows, with as many registers as its plan expects at least."""
    problem = spec.problem("row")
    found = plan_of(problem, replace(space(problem, H200, family=family).start, **changes))
    if isinstance(found, SequencePlan):
        used = {"axial_row": resources()}
    else:
        used = {f"axial_row_{stage}": resources(most, 0, shared) for stage, (_, shared, _, most) in found.kernels.items()}
    whole = axis_parts(found, used, H200)
    assert whole is not None and axis_parts(found, {}, H200) is None
    return whole


@pytest.mark.parametrize("family", FAMILIES)
def test_masks_and_biases_cost_instructions_and_the_bytes_of_the_bias(family: str) -> None:
    plain, masked, biased = (
        of_family(BlockSpec(batch=64, **dict.fromkeys(flags, True)), family) for flags in ((), ("key_mask",), ("logit_bias",))
    )
    assert masked.issue > plain.issue and biased.issue > plain.issue
    assert biased.weights > 1.05 * plain.weights and masked.weights < 1.05 * plain.weights


LARGE = BlockSpec(256, 8, 128, 128, 1, "bfloat16")


def test_a_resident_axis_is_one_kernel_beside_what_it_needs() -> None:
    """And a kernel that packs weights, and one for the norm behind the residual. q, k and v do not come from L2."""
    staged, resident = (of_family(LARGE, family) for family in ("staged", "resident"))
    assert (staged.launch, resident.launch) == (4.0, 2.0) and of_family(replace(LARGE, post_norm=True), "resident").launch == 3.0
    assert resident.grid < staged.grid and resident.weights < staged.weights
    assert resident.tensor == pytest.approx(staged.tensor, rel=0.05), "the same products"
    assert of_family(replace(LARGE, batch=4), "resident").issue > 3 * resident.issue
    single = of_family(replace(LARGE, height=64, width=64, dtype="float32"), "resident")
    half = of_family(replace(LARGE, height=64, width=64), "resident")
    assert single.tensor > 2.5 * half.tensor and single.weights > 1.5 * half.weights and single.grid > 1.9 * half.grid


def test_overlap_hides_waits_and_padded_rows_cost() -> None:
    with_overlap, without = (of_family(LARGE, "resident", overlap=overlap) for overlap in (True, False))
    assert with_overlap.wait < without.wait and with_overlap.issue == without.issue
    ragged = replace(LARGE, width=129)  # a row tile more, and seven warps of the last warpgroup without tokens
    assert isinstance(plan_of(ragged.problem("row"), space(ragged.problem("row"), H200, family="resident").start), ResidentPlan)
    assert of_family(ragged, "resident").tensor > 1.1 * of_family(LARGE, "resident").tensor
