"""Weights on their way through shared memory: kernels are right in every mix, without bank conflicts, and planted faults are caught."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codegen.config import Config
from codegen.families import FAMILIES
from codegen.layout import padded_stride, stack, swizzled
from codegen.render import Source, render
from codegen.sequence import DTYPE_MATHS, HALF_PARTS, SequenceConfig, SequencePlan, alternatives, default, weight_accesses
from codegen.spec import BlockSpec
from emulated import TARGET, right, source_of
from test_conflicts import conflicts, traffic
from test_mutants import Mutant, caught, edited
from tuner.space import space
from tuner.trial import Resources
from tuner.work import parts

RAGGED = BlockSpec(dim=24, heads=2, height=3, width=19, batch=1, axes=("row",))  # head_dim 12 in 16, 24 channels in 32, 19 tokens in 32
LINES = BlockSpec(dim=64, heads=4, height=1, width=19, batch=1, axes=("row",))  # rows of two lines
BOTH = dataclasses.replace(RAGGED, height=4, width=5, axes=("row", "col"))
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"qkv_bias": True, "norm": "rms"},
    {"post_norm": True, "out_bias": False},
    {"key_mask": True, "logit_bias": True},
    {"residual": False},
)
SHARED: dict[str, Any] = {"weights": "shared", "rounds": 1}


def shared(spec: BlockSpec, math: str | None = None, **changes: int | str) -> Source:
    return source_of(spec, "sequence", math, **(SHARED | {"prefetch": "qkv"} | changes))


def drawn(seed: int) -> tuple[BlockSpec, dict[str, Config]]:
    """A block, and for each axis a configuration, with shared weights on one axis at least."""
    draw = random.Random(seed)
    dtype = draw.choice(tuple(DTYPE_MATHS))
    dim, heads, head_dim = draw.choice(((24, 2, 8), (64, 4, None), (40, 5, None), (128, 8, None), (72, 3, 24), (16, 1, 16)))
    more = draw.choice(VARIANTS)
    spec = BlockSpec(dim, heads, draw.choice((3, 17)), draw.choice((2, 19)), 1, dtype, head_dim=head_dim, **more)
    math = draw.choice([math for math in DTYPE_MATHS[dtype] if math in HALF_PARTS])
    configs: dict[str, Config] = {}
    for axis in spec.axes:
        problem = spec.problem(axis)
        start = default(problem, TARGET, math)
        assert start is not None
        wanted = {
            "weights": "hold" if axis == "col" and seed % 3 == 0 else "shared",
            "rounds": 1,
            "head_warps": draw.choice((1, 2)),
            "qkv_columns": draw.choice((2, 6)),
            "qkv_rows": 1,
            "out_rows": 1,
            "sequences": draw.choice((1, 2)),
            "prefetch": draw.choice(("none", "qkv")),
            "fragment": draw.choice((2, 4)),
            "norm_lanes": draw.choice((4, 16)),
            "padding": draw.choice((True, False)),
        }
        config = dataclasses.replace(start, **wanted)  # type: ignore[arg-type]
        if SequencePlan(problem, config).reasons(TARGET):
            config = dataclasses.replace(config, head_warps=1, sequences=1, fragment=4 if dim > 8 else 2)
        assert not (reasons := SequencePlan(problem, config).reasons(TARGET)), (spec, config, reasons)
        configs[axis] = config
    return spec, configs


@pytest.mark.parametrize("seed", range(12))
def test_kernels_with_shared_weights_are_right_and_clean(seed: int, cache: Path) -> None:
    spec, configs = drawn(seed)
    assert right(render(spec, configs), cache, order=f"random:{seed}"), (spec, configs)


def test_a_family_beside_it_copies_too(cache: Path) -> None:
    """The copies' functions are in the source once, whoever needs them."""
    spec = BlockSpec(dim=32, heads=2, height=17, width=20, batch=1, dtype="bfloat16")
    row, col = (FAMILIES[name].default(spec.problem(axis), TARGET, "bf16") for name, axis in (("sequence", "row"), ("resident", "col")))
    assert isinstance(row, SequenceConfig) and col is not None
    source = render(spec, {"row": dataclasses.replace(row, **SHARED), "col": col})  # type: ignore[arg-type]
    assert source.text.count("void commit_copies()") == 1 and right(source, cache)


@pytest.mark.parametrize("dim, heads, dtype", [(64, 4, "bfloat16"), (128, 8, "bfloat16"), (64, 4, "float32"), (72, 3, "float16")])
def test_kernels_with_shared_weights_run_without_conflicts(dim: int, heads: int, dtype: str, cache: Path) -> None:
    spec = BlockSpec(dim, heads, 2, 32, 1, dtype, ("row",))
    source = shared(spec)
    assert conflicts(source, cache)["axial_row"] < 0.02
    plain = conflicts(shared(spec, padding=False), cache)["axial_row"]
    assert plain > 0.02, "rows that are neither padded nor swizzled would conflict"
    copied = sum(found.splits for found in traffic(source, cache))
    assert (copied > 0) == (dim == 72), "copies would split lines if rows were padded"


@pytest.mark.parametrize("dim, head_dim, dtype", [(32, None, "float32"), (64, 16, "bfloat16")])
def test_a_warp_copies_half_of_eight_rows_at_once(dim: int, head_dim: int | None, dtype: str, cache: Path) -> None:
    """Alone, so that the pattern of its rows differs from turn to turn."""
    source = shared(BlockSpec(dim, 1, 2, 17, 1, dtype, ("row",), head_dim=head_dim), heads="registers", sequences=1)
    assert source.kernels[0].threads == 32 and "QKV_WEIGHT_SWIZZLE = 0" not in source.text
    assert right(source, cache)


@pytest.mark.parametrize("part, of_each", [("QKV", 3), ("OUT", 7 / 2)])
def test_copies_to_padded_rows_would_split_lines(part: str, of_each: float, cache: Path) -> None:
    """As they did: 7 and 7.5 wavefronts a copy of a warp at `seed` in bfloat16. Its weights are 192 and 64 columns of 8 pieces."""
    source = shared(BlockSpec(64, 4, 1, 32, 1, "bfloat16", ("row",)), sequences=1)
    padding = {"QKV": 16, "OUT": 8}[part]
    padded = edited(
        source,
        rf"{part}_WEIGHT_STRIDE = 64, {part}_WEIGHT_SWIZZLE = \d",
        f"{part}_WEIGHT_STRIDE = {64 + padding}, {part}_WEIGHT_SWIZZLE = 0",
    )
    if part == "QKV":
        padded = edited(padded, r"OUT_WEIGHT = (\d+)", rf"OUT_WEIGHT = \1 + {192 * padding // 2}")
    (kernel,) = padded.kernels
    padded = dataclasses.replace(padded, kernels=(dataclasses.replace(kernel, shared_bytes=kernel.shared_bytes + 2 * 192 * padding),))
    copies = {"QKV": 192, "OUT": 64}[part] * 8 / 32
    assert sum(found.splits for found in traffic(padded, cache)) == of_each * copies


@given(st.sampled_from((2, 4)), st.sampled_from((2, 4)), st.integers(1, 96), st.integers(0, 9))
@settings(max_examples=200, deadline=None)
def test_weights_are_read_and_copied_without_conflicts(itemsize: int, fragment: int, sixteens: int, before: int) -> None:
    """In whole lines by a swizzle, the words of a lane's load, and else by padding."""
    columns = sixteens * 16 * itemsize // 4
    accesses = weight_accesses(itemsize, fragment, columns)
    layout = stack([("before", before, 4, ()), ("weight", 8, columns, accesses)], True, copied=("weight",))
    weight = layout["weight"]
    found = tuple(weight.conflicts().values())
    assert found[0] == 0 and layout.bytes == 4 * (weight.offset + 8 * weight.stride)
    if columns % 32 == 0:
        assert (weight.swizzle, weight.stride, found[1], weight.offset % 32) == (fragment * itemsize // 4, columns, 0, 0)
    else:
        assert weight.swizzle == 0 and weight.stride == padded_stride(columns, accesses) < columns + 32 and found[1] <= 4


def test_a_swizzle_moves_pieces_within_their_line() -> None:
    for swizzle in (0, 1, 2, 4):
        for row in range(16):
            places = [swizzled(row, column, swizzle) for column in range(64)]
            assert sorted(places) == list(range(64)) and all(place // 32 == column // 32 for column, place in enumerate(places))
            assert all(place % 4 == column % 4 for column, place in enumerate(places))
    assert [swizzled(row, 0, 2) // 4 for row in range(8)] == [0, 2, 4, 6, 0, 2, 4, 6]


@pytest.mark.parametrize("part, swizzle", [("QKV", 2), ("OUT", 1)])
def test_another_swizzle_is_as_right_but_conflicts(part: str, swizzle: int, cache: Path) -> None:
    source = shared(BlockSpec(64, 4, 2, 32, 1, "bfloat16", ("row",)))
    assert f"{part}_WEIGHT_SWIZZLE = {swizzle};" in source.text
    for other in {0, 1, 2, 4} - {swizzle}:
        changed = edited(source, rf"{part}_WEIGHT_SWIZZLE = \d", f"{part}_WEIGHT_SWIZZLE = {other}")
        assert right(changed, cache) and conflicts(changed, cache)["axial_row"] > 0.02, other


WRONG, UNWRITTEN = ("wrong", "out_of_bounds", "misaligned"), ("race", "uninitialised", "wrong")
FAULTS = tuple(
    Mutant(name, pattern, replacement, spec, kinds=kinds)
    for name, pattern, replacement, spec, kinds in (
        ("copies that nobody waits for", r"wait_for_copies<0>\(\);", "", RAGGED, UNWRITTEN),
        ("padded heads for heads", r"(/ C::PADDED_HEAD_DIM) \* C::HEAD_DIM \+ within\) \* C::DIM", r"\1 + within) * C::DIM", RAGGED, WRONG),
        ("weights in padded channels", r"k < C::DIM\);", "true);", RAGGED, WRONG),
        ("weights in padded heads", r"(real = )\(C::HEAD_DIM == C::PADDED_HEAD_DIM \|\| within < C::HEAD_DIM\)", r"\1true", RAGGED, WRONG),
        ("heads of the output side by side", r"column \* C::HEADS \+ k / C::PADDED_HEAD_DIM", "column * C::HEADS + k / 8", RAGGED, WRONG),
        (
            "the first head's weights for all",
            r"qkv_place\(column - within_tile,",
            "qkv_place((column - within_tile) % 16,",
            RAGGED,
            WRONG,
        ),
        ("QKV weights copied in order", r"qkv_place<LINE>\(first, row, k\)", "(first + row) * C::QKV_WEIGHT_STRIDE + k", RAGGED, WRONG),
        ("output weights copied in order", r"out_place<LINE>\(first, row, k\)", "(first + row) * C::OUT_WEIGHT_STRIDE + k", RAGGED, WRONG),
        ("QKV weights read in order", r"SharedWeights<C>::qkv_place\([^)]*\)", "column * C::QKV_WEIGHT_STRIDE + k", RAGGED, WRONG),
        ("output weights read in order", r"SharedWeights<C>::out_place\([^)]*\)", "column * C::OUT_WEIGHT_STRIDE + k", RAGGED, WRONG),
        ("another swizzle for copies", r"qkv_place<LINE>\(first, row, k\)", "qkv_place<LINE>(first, row ^ 1, k ^ 4)", RAGGED, WRONG),
        ("places added instead of flipped", r"\(lane \^ at % LINE\)", "(lane + at % LINE)", RAGGED, (*WRONG, *UNWRITTEN)),
        ("one line for all", r"at / LINE \* LINE", "0", LINES, (*WRONG, *UNWRITTEN)),
        ("weights that overlap", r"OUT_WEIGHT = (\d+)", r"OUT_WEIGHT = \1 - 64", RAGGED, UNWRITTEN),
        ("rows too near", r"QKV_WEIGHT_STRIDE = (\d+)", "QKV_WEIGHT_STRIDE = 28", RAGGED, (*UNWRITTEN, *WRONG)),
        ("pieces that nobody copies", r"turn < TURNS", "turn < TURNS - 1", RAGGED, UNWRITTEN),
        ("starts before the previous kernel ends", r"wait_for_previous_kernel\(\);", "", BOTH, ("previous_kernel",)),
    )
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_is_caught(fault: Mutant, cache: Path) -> None:
    how = caught(edited(shared(fault.spec), fault.pattern, fault.replacement), cache)
    assert how and how in fault.kinds, f"{fault.name}: {how or 'unnoticed'}"


@pytest.mark.parametrize("spec, prefetch, barriers", [(RAGGED, "none", 2), (RAGGED, "qkv", 2), (BOTH, "none", 4), (BOTH, "qkv", 5)])
def test_every_barrier_is_needed(spec: BlockSpec, prefetch: str, barriers: int, cache: Path) -> None:
    source = shared(spec, prefetch=prefetch)
    assert source.text.count("__syncthreads();") == barriers
    for which in range(barriers):
        how = caught(edited(source, r"__syncthreads\(\);", ";", which), cache)
        assert how in ("race", "uninitialised"), f"barrier {which} can be left out: {how or 'nothing'} was reported"


def test_what_has_no_weights_to_share_says_so() -> None:
    problem = BlockSpec(64, 4, 32, 32, 4, "bfloat16").problem("row")
    start = default(problem, TARGET)
    assert start is not None
    for changes, reason in (
        ({"heads": "shared"}, "heads in registers"),
        ({"rounds": 2}, "further rounds"),
    ):
        config = dataclasses.replace(start, **{"weights": "shared", **changes})  # type: ignore[arg-type]
        assert any(reason in said for said in SequencePlan(problem, config).reasons(TARGET))
    for dim, heads in ((30, 3), (60, 5)):  # heads of 20 bytes, and of 24
        odd = BlockSpec(dim, heads, 8, 8, 4, "bfloat16").problem("row")
        small = default(odd, TARGET)
        assert small is not None
        assert any("16 bytes" in said for said in SequencePlan(odd, dataclasses.replace(small, **SHARED)).reasons(TARGET))  # type: ignore[arg-type]


def test_a_search_starts_from_them_too() -> None:
    """Where heads are in registers; what was the fastest at seed in bfloat16 and at deeplab in float32 is among the starts."""
    seed, deeplab = BlockSpec(64, 4, 32, 32, 4, "bfloat16"), BlockSpec(128, 8, 65, 65, 2)
    starts = space(seed.problem("row"), TARGET, family="sequence").starts()
    assert [config.weights for config in starts][:2] == ["hold", "shared"] and starts[1].residual == "shared"
    found = alternatives(deeplab.problem("row"), TARGET, "fp16x3")
    assert [(c.weights, c.head_warps, c.qkv_columns, c.norm_lanes, c.prefetch) for c in found] == [("hold", 2, 2, 16, "none")]
    assert alternatives(deeplab.problem("row"), TARGET, "ffma") == [], "no heads in registers"
    bare = dataclasses.replace(seed, residual=False).problem("row")
    assert all(config.residual == "reload" for config in alternatives(bare, TARGET, "bf16"))


def test_weights_are_read_once_a_block() -> None:
    problem = BlockSpec(64, 4, 32, 32, 64, "bfloat16").problem("row")
    start = default(problem, TARGET)
    assert start is not None
    held, copied = (dataclasses.replace(start, rounds=1, head_warps=2, qkv_rows=1, sequences=1, weights=how) for how in ("hold", "shared"))
    read = [parts(SequencePlan(problem, config), Resources(100, 0, 0), TARGET).weights for config in (held, copied)]
    assert read[0] > 1.5 * read[1]
