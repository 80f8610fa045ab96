"""The space: what is legal, how draws become legal, and what a restriction or a tolerance takes away."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from codegen.resident import ResidentConfig, default
from codegen.sequence import SequenceConfig, SequencePlan
from codegen.spec import BlockSpec, SpecError
from codegen.target import target
from tuner.space import FP32_MATHS, Space, config_values, parse_fixed, space

SEED = BlockSpec()
SMALL = BlockSpec(dim=32, heads=2, height=17, width=20, batch=2)
RAGGED = BlockSpec(dim=80, heads=2, height=49, width=33)
TINY = BlockSpec(dim=20, heads=1, height=3, width=33)
DEEPLAB = BlockSpec(dim=128, heads=8, height=65, width=65)


def row_space(spec: BlockSpec = SEED, arch: str = "sm_90", **options) -> Space:
    return space(spec.problem("row"), target(arch), **options)


@pytest.mark.parametrize("spec", [SEED, SMALL, RAGGED, TINY])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_every_draw_is_projected_onto_a_legal_canonical_configuration(spec: BlockSpec, arch: str) -> None:
    for axis in spec.axes:
        here = space(spec.problem(axis), target(arch))
        assert here.legal(here.start)
        draw = random.Random(1)
        for _ in range(60):
            config = here.random(draw)
            assert here.legal(config), SequencePlan(here.problem, config).reasons(here.target)
            assert here.canonical(config) == config
            assert here.project(config_values(config)) == config, "a legal configuration must stay what it is"


@pytest.mark.parametrize(
    "spec, arch, fixed",
    [
        (
            BlockSpec(),
            "sm_80",
            dict(
                heads="shared", rounds=1, out_rows=1, out_columns=2, residual="reload", sequences=1, qkv_rows=2, norm_lanes=16, key_tile=16
            ),
        ),
        (
            DEEPLAB,
            "sm_80",
            dict(heads="shared", rounds=1, out_rows=1, out_columns=1, qkv_columns=2, qkv_rows=1, norm_lanes=16, padding=True),
        ),
        (
            DEEPLAB,
            "sm_90",
            dict(heads="shared", rounds=1, out_rows=1, out_columns=1, qkv_columns=6, weights="hold", qkv_rows=1, residual="reload"),
        ),
        (
            BlockSpec(),
            "sm_90",
            dict(math="fp16x3", warps=8, fragment=4, residual="reload", norm_lanes=8, out_rows=1, key_tile=32, prefetch="qkv"),
        ),
        (
            DEEPLAB,
            "sm_90",
            dict(heads="registers", warps=8, weights="hold", padding=True, residual="reload", key_tile=80, min_blocks=1, out_columns=2),
        ),
    ],
)
def test_enumeration_finds_exactly_what_brute_force_finds(spec: BlockSpec, arch: str, fixed: dict) -> None:
    here = row_space(spec, arch, fixed=fixed)
    product = (SequenceConfig(**dict(zip(here.values, values, strict=True))) for values in itertools.product(*here.values.values()))
    expected = {config for config in product if here.legal(config) and here.canonical(config) == config}
    found = list(here.enumerate())
    assert len(found) == len(set(found)) and set(found) == expected and len(found) > 10
    assert here.count(5) == 5 and here.count(10**6) == len(found)


def test_projection_is_deterministic_and_moves_no_legal_value_needlessly() -> None:
    here = row_space(fixed={"heads": "shared"})
    drawn = {**config_values(here.start), "weights": "stream"}  # prefetch no longer fits
    config = here.project(drawn)
    assert config == here.project(drawn)
    assert config.weights == "stream" and config.prefetch == "none"
    assert {k: v for k, v in config_values(config).items() if k not in ("weights", "prefetch")} == {
        k: v for k, v in config_values(here.start).items() if k not in ("weights", "prefetch")
    }


def test_configurations_that_compile_alike_have_one_representative() -> None:
    here = row_space(fixed={"math": "tf32x3"})
    slim = here.project({**config_values(here.start), "warps": 2, "min_blocks": 3})
    assert slim.min_blocks == 1, "64 threads x 3 blocks leave 255 registers a thread, as one block does"
    wide = here.project({**config_values(here.start), "warps": 8, "min_blocks": 2})
    assert wide.min_blocks == 2


@pytest.mark.parametrize(
    "spec",
    [
        BlockSpec(dtype="bfloat16"),
        BlockSpec(64, 4, 64, 64, 4, "bfloat16"),
        BlockSpec(96, 3, 33, 48),
        BlockSpec(63, 1, 9, 65, head_dim=20),
        BlockSpec(64, 2, 16, 32),  # rows of 1 alone, which go with four sequences at most
    ],
)
def test_every_resident_configuration_can_be_reached(spec: BlockSpec) -> None:
    """Which rows are legal depends on the sequences of a block, so that the order in which they are chosen matters."""
    here = row_space(spec, family="resident", fixed={"sums": "add", "polynomial": 0, "out_columns": 8})
    product = (ResidentConfig(**dict(zip(here.values, values, strict=True))) for values in itertools.product(*here.values.values()))
    expected = {config for config in product if here.legal(config) and here.canonical(config) == config}
    assert set(here.enumerate()) == expected and len(expected) > 10
    assert {config.overlap for config in expected} == ({True, False} if spec.heads > 1 else {False})
    draw = random.Random(1)
    for _ in range(30):
        config = here.random(draw)
        assert config in expected and here.project(config_values(config)) == config


def test_a_resident_start_is_found_where_anything_is_legal() -> None:
    draw, found = random.Random(5), 0
    for _ in range(60):
        dim, heads = draw.choice(((24, 2), (33, 3), (64, 4), (130, 5), (256, 8), (512, 8), (1024, 16), (192, 3), (16, 1)))
        lines, length, dtype = draw.choice((1, 2, 5, 32)), draw.choice((3, 17, 33, 65, 96, 256, 700)), draw.choice(("float32", "bfloat16"))
        problem = BlockSpec(dim, heads, lines, length, draw.choice((1, 4)), dtype).problem("row")
        if default(problem, target("sm_90")) is not None:
            found += 1
        else:
            with pytest.raises(SpecError, match="no configuration of the row axis is legal"):
                space(problem, target("sm_90"), family="resident")
    assert 15 < found < 50


def test_what_registers_do_not_use_has_one_representative() -> None:
    """And is no reason to refuse: warps follow from heads and sequences, weights are held, column tiles come in sixes or twos."""
    here = row_space(fixed={"heads": "registers", "math": "fp16x3"})
    start = config_values(here.start)
    alike = [
        here.project({**start, **changed})
        for changed in ({"warps": 2}, {"warps": 16}, {"qkv_columns": 4}, {"weights": "stream", "prefetch": "none"})
    ]
    assert [c.warps for c in alike] == [8] * 4 and [c.qkv_columns for c in alike] == [6] * 4
    assert [SequencePlan(here.problem, c).threads for c in alike] == [128] * 4 and alike[3].weights == "hold"
    odd = row_space(fixed={"heads": "shared", "math": "fp16x3"}).project({**start, "heads": "shared", "qkv_columns": 3})
    assert odd.qkv_columns == 2, "operands of 16 bits are stored two column tiles at a time"


@pytest.mark.parametrize(
    "changed, reason",
    [
        ({"math": "tf32x3"}, "no operands that could stay"),
        ({"rounds": 2, "qkv_columns": 2}, "weights that stay"),
        ({"rounds": 16, "sequences": 8}, "there are only 32 sequences"),
        ({"qkv_rows": 4}, "qkv_rows 4 does not divide 2"),
        ({"head_warps": 2, "heads": "shared"}, "only heads in registers"),
        ({"head_warps": 2, "qkv_rows": 2}, "a head's 2 warps are more than its 1 groups"),
        ({"head_warps": 4, "qkv_rows": 1}, "a head's 4 warps are more than its 2 groups"),
        ({"head_warps": 2, "qkv_rows": 1, "sequences": 8}, "64 warps are more than the 32"),
    ],
)
def test_registers_and_rounds_say_what_they_need(changed: dict, reason: str) -> None:
    problem = BlockSpec(batch=1).problem("row")
    config = replace(row_space(fixed={"heads": "registers"}).start, **changed)
    assert any(reason in said for said in SequencePlan(problem, config).reasons(target("sm_90")))


def test_plain_tf32_needs_a_relaxed_tolerance() -> None:
    assert row_space().values["math"] == FP32_MATHS
    assert "tf32" not in row_space(tolerance=1e-4).values["math"]
    assert "tf32" in row_space(tolerance=1e-3).values["math"]
    with pytest.raises(SpecError, match="--tolerance"):
        row_space(fixed={"math": "tf32"})


def test_dependent_launch_is_not_searched_and_follows_the_target() -> None:
    assert row_space(arch="sm_90").values["dependent_launch"] == (True,)
    assert row_space(arch="sm_80").values["dependent_launch"] == (False,)


def test_fixed_tunables_hold_everywhere() -> None:
    here = row_space(fixed=parse_fixed(["warps=4", "padding=false"]))
    assert here.start.warps == 4 and here.start.padding is False
    draw = random.Random(0)
    assert all((c := here.random(draw)).warps == 4 and not c.padding for _ in range(20))


@pytest.mark.parametrize("text", ["warps", "warps=9", "wraps=8", "padding=maybe", "=8", ""])
def test_a_fixed_tunable_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SpecError):
        parse_fixed([text])


def test_an_impossible_space_says_why() -> None:
    with pytest.raises(SpecError, match="bytes of shared memory exceed"):
        row_space(BlockSpec(dim=1024, heads=8, height=512, width=512))
    with pytest.raises(SpecError, match="qkv_rows"):
        row_space(fixed={"qkv_rows": 4, "sequences": 1})


def test_the_digest_changes_with_the_space() -> None:
    assert row_space().digest == row_space().digest
    assert len({row_space().digest, row_space(arch="sm_100").digest, row_space(fixed={"warps": 8}).digest, row_space(SMALL).digest}) == 4
