"""Kernels with a key mask and a logit bias, in every family: right on the emulator, and planted faults are caught."""

from __future__ import annotations

import dataclasses
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from codegen.families import FAMILIES
from codegen.reference import random_input, random_weights, reference
from codegen.render import Source, render
from codegen.spec import BlockSpec
from codegen.target import target
from codegen.terms import random_terms
from emulated import TARGET, arithmetics, error_of, right, source_of
from tuner.compile import compile_source
from tuner.emulator import EmulationError, Emulator
from tuner.space import space

TOLERANCE = 1e-5
FLAGS = (("key_mask",), ("logit_bias",), ("key_mask", "logit_bias"))
# Several tiles of keys and rows, and 38 keys: even, so that biases are read two at a time, but no multiple of 8.
ROWS = BlockSpec(24, 2, 5, 38, batch=2, axes=("row",), key_mask=True, logit_bias=True)
COLUMNS = dataclasses.replace(ROWS, height=35, width=6, batch=1, axes=("col",))  # odd: one at a time


@pytest.mark.parametrize(
    ("family", "flags", "dtype", "math"),
    [
        (family, flags, *maths)
        for family in FAMILIES
        for flags, each in ((FLAGS[2], arithmetics(family)), (FLAGS[0], arithmetics(family)[:1]), (FLAGS[1], arithmetics(family)[:1]))
        for maths in each
    ],
)
def test_agrees_with_float64(family: str, flags: tuple[str, ...], dtype: str, math: str, cache: Path) -> None:
    spec = BlockSpec(24, 2, 18, 19, batch=1, dtype=dtype, **dict.fromkeys(flags, True))
    assert right(source_of(spec, family, math), cache, "reverse" if dtype == "float16" else "forward")


@pytest.mark.parametrize("seed", range(12))
def test_random_configurations_agree_with_float64(seed: int, cache: Path) -> None:
    """Of the families in turn, with other variants of the block beside."""
    draw = random.Random(seed)
    family = ("sequence", "staged", "resident")[seed % 3]
    dtype, math = draw.choice(arithmetics(family))
    dim, heads = draw.choice(((24, 2), (33, 1), (40, 5), (20, 1), (64, 8)))
    more: dict[str, Any] = draw.choice(({}, {"qkv_bias": True}, {"head_dim": 12}, {"post_norm": True}, {"residual": False}))
    flags = dict.fromkeys(FLAGS[seed // 3 % 3], True)
    height, width, axis = draw.choice((1, 3, 17, 33)), draw.choice((2, 16, 31, 65)), draw.choice(("row", "col"))
    if family == "resident":  # which is for more than two row tiles
        height, width = max(height, 17), max(width, 16)
    spec = BlockSpec(dim, heads, height, width, batch=1, dtype=dtype, axes=(axis,), **flags, **more)
    here = space(spec.problem(axis), TARGET, family=family, fixed={"math": math})
    config = here.random(draw)
    assert right(render(spec, {axis: config}), cache, draw.choice(("forward", "reverse", "random:5"))), config


@pytest.mark.parametrize(("dtype", "seed"), [("float32", 0), ("bfloat16", 1), ("float16", 2)])
def test_heads_in_registers_agree_with_float64(dtype: str, seed: int, cache: Path) -> None:
    spec = BlockSpec(32, 2, 6, 38, batch=1, dtype=dtype, axes=("row",), key_mask=True, logit_bias=True)
    config = space(spec.problem("row"), TARGET, family="sequence", fixed={"heads": "registers"}).random(random.Random(seed))
    assert "HeadRegisters" in (source := render(spec, {"row": config})).text
    assert right(source, cache), config


def test_the_last_block_is_partly_empty(cache: Path) -> None:
    """Four sequences a block, ten there are: the mask of sequences behind the last is not read."""
    assert error_of(source_of(ROWS, "sequence", key_tile=16, sequences=4), cache) < TOLERANCE


def away(value: float) -> dict[str, torch.Tensor]:
    """Weights, mask and a bias that is `value` at all keys of the first tile, at most others, and at all keys of query 7."""
    generator = torch.Generator().manual_seed(2)
    weights = random_weights(ROWS, generator) | random_terms(ROWS, generator)
    gone = torch.rand(38, 38, generator=generator) < 0.9
    gone.fill_diagonal_(False)
    gone[:, :16], gone[20], gone[7], gone[:, 30] = True, False, True, False
    gone[7, 30] = True
    return weights | {"key_mask": torch.ones(2, 5, 38, dtype=torch.bool), "row_bias": weights["row_bias"].masked_fill(gone, value)}


def low() -> dict[str, torch.Tensor]:
    """Logits that are all near -300, where the first tile of keys is masked."""
    generator = torch.Generator().manual_seed(2)
    weights = random_weights(ROWS, generator) | random_terms(ROWS, generator)
    mask = torch.ones(2, 5, 38, dtype=torch.bool)
    mask[:, :, :16] = False
    return weights | {"key_mask": mask, "row_bias": weights["row_bias"] - 300.0}


HARD = {"-1e9": away(-1e9), "-inf": away(-math.inf), "low": low()}


def hard_error(source: Source, cache: Path, case: str) -> float:
    """The error for HARD inputs, over the output's scale; of queries with all keys at -1e9 only that they are finite is asked."""
    x = random_input(ROWS, torch.Generator().manual_seed(3))
    y, expected = Emulator(source, cache).run(x, HARD[case]), reference(ROWS, x, HARD[case])
    if not y.isfinite().all():
        return math.inf
    asked = (HARD[case]["row_bias"][0] != -1e9).any(1)
    return float((y - expected)[:, :, asked].abs().max() / expected.abs().max())


@pytest.mark.parametrize("case", HARD)
@pytest.mark.parametrize("family", FAMILIES)
def test_biases_that_stand_for_a_mask_and_low_logits(family: str, case: str, cache: Path) -> None:
    """What is masked in that way does not show, and nothing becomes NaN."""
    for arithmetic in ("fp16x3", "tf32x3") if family != "resident" else ("fp16x3",):
        tile = {"sequence": {"key_tile": 16}, "staged": {"attn_key_tile": 16}, "resident": {"key_tile": 16}}[family]
        assert hard_error(source_of(ROWS, family, arithmetic, **tile), cache, case) < TOLERANCE


HARD_MUTANTS = {  # in the staged family, whose exponents have references
    "a reference of minus infinity": ("-inf", r"if \(begun \|\| highest == minus_infinity\(\)\)", "if (begun)"),
    "references begin with the first tile alone": ("low", r"low = beginning &&", "low = step == 0 &&"),
    "what was summed is not corrected": ("-1e9", r"const bool begun = [^;]*;", "const bool begun = false;"),
    "a reference never falls": ("low", r"const bool begun = [^;]*;", "const bool begun = true;"),
    "scores are read through the old reference": ("-1e9", r"exponents\(p, nothing,", "exponents(p, start,"),
}


@pytest.mark.parametrize("fault", HARD_MUTANTS)
def test_a_fault_that_hard_inputs_show_is_caught(fault: str, cache: Path) -> None:
    case, pattern, replacement = HARD_MUTANTS[fault]
    source = source_of(ROWS, "staged", "fp16x3", attn_key_tile=16)
    text, count = re.subn(pattern, replacement, source.text)
    assert count, f"the source no longer has {pattern!r}: write this mutant anew"
    assert hard_error(source, cache, case) < TOLERANCE < hard_error(dataclasses.replace(source, text=text), cache, case), fault


@dataclasses.dataclass(frozen=True)
class Mutant:
    """An edit of the source, and what it is called. families: where it is planted; what they share in one of them."""

    name: str
    pattern: str
    replacement: str
    spec: BlockSpec = ROWS
    families: tuple[str, ...] = ("sequence",)
    tile: int = 16  # keys


BOTH, ALL = ("sequence", "staged"), ("sequence", "staged", "resident")
MUTANTS = (
    Mutant("mask inverted", r"(__ldg\(mask [^;]*) != 0\)", r"\1 == 0)"),
    Mutant("mask ignored", r"(terms\.)?mask\.apply\(p, lane\);", "", families=ALL),
    Mutant("mask of the block's first sequence", r"\(first_tile \+ min\(tile, end - 1\)\)", "(first_tile)", families=("resident",)),
    Mutant("mask off by one token", r"mask_offset\(sequence, key\)\)", "mask_offset(sequence, key == 0 ? 0 : key - 1))"),
    Mutant("mask of the first sequence", r"C::mask_offset\(sequence, key", "C::mask_offset(0, key"),
    Mutant("mask of columns read as rows", r"\* WIDTH \+ sequence % WIDTH", "+ (sequence % WIDTH) * LENGTH", COLUMNS, families=ALL),
    Mutant("mask of the first 32 keys for all", r"32 \* word \+ lane", "lane", families=("staged",), tile=64),
    Mutant("the first of two keys decides", r"two >> i % 2 & 1", "two & 1"),
    Mutant("NaN for a query without keys", r"sum > 0\.0f \? (__fdividef\(1\.0f, sum\)) : 0\.0f", r"\1", families=BOTH),
    Mutant("the maximum begins at minus infinity", r"\{LOWEST_LOGIT, LOWEST_LOGIT\}", "{minus_infinity(), minus_infinity()}"),
    Mutant("bias ignored", r"added\[i % 2\] \* LOG2_E", "0.0f", families=("staged",)),
    Mutant("bias without log2(e)", r"added\[i % 2\] \* LOG2_E", "added[i % 2]", families=("staged",)),
    Mutant(
        "bias scaled like the scores",
        r"tile\[i\], C::SCORE_SCALE, added\[i % 2\] \* LOG2_E",
        "tile[i] + added[i % 2], C::SCORE_SCALE, 0.0f",
    ),
    Mutant("scores not scaled", r", C::SCORE_SCALE,", ", 1.0f,"),
    Mutant("scores scaled twice", r"EXPONENT_SCALE = 1\.0f", "EXPONENT_SCALE = SCORE_SCALE"),
    Mutant("scores scaled twice", r"SCORE_SCALE = 1\.0f", "SCORE_SCALE = EXPONENT_SCALE", families=("staged",)),
    Mutant("bias of the first head", r"static_cast<long long>\(head\) \* C::LENGTH \+ row", "row", families=("staged",)),
    Mutant("bias of the upper rows for the lower", r"query \+ 8 \* half", "query", families=("staged",)),
    Mutant("bias of the first tile of keys for all", r"(add_bias<C>\([^;]*), step \* \S+, lane\)", r"\1, 0, lane)", families=BOTH),
    Mutant(
        "bias by key and query",
        r"load_constant\(added, from \+ key\);",
        "for (int i = 0; i < 2; ++i) added[i] = bias[(static_cast<long long>(head) * C::LENGTH + key + i) * C::LENGTH + row];",
        families=("staged",),
    ),
    Mutant("bias of queries past the end", r"if \(row < C::LENGTH && key", "if (key", families=("staged",)),
    Mutant("bias of keys past the end", r"row < C::LENGTH, key, C::LENGTH\)", "row < C::LENGTH, key, C::LENGTH + 1)", COLUMNS),
)


@pytest.mark.parametrize(("mutant", "family"), [pytest.param(m, family, id=f"{m.name}-{family}") for m in MUTANTS for family in m.families])
def test_a_planted_fault_is_caught(mutant: Mutant, family: str, cache: Path) -> None:
    changes: dict[str, dict[str, int]] = {
        "sequence": {"key_tile": mutant.tile},
        "staged": {"attn_key_tile": mutant.tile, "attn_warps": 2},
        "resident": {"key_tile": mutant.tile},
    }
    source = source_of(mutant.spec, family, "fp16x3" if family == "resident" else "tf32x3", **changes[family])
    assert error_of(source, cache) < TOLERANCE
    text, count = re.subn(mutant.pattern, mutant.replacement, source.text)
    assert count, f"the source no longer has {mutant.pattern!r}: write this mutant anew"
    try:
        found = not error_of(dataclasses.replace(source, text=text), cache) < TOLERANCE
    except EmulationError as error:
        assert error.report.kind != "compile", f"the mutant does not compile, so it shows nothing: {error}"
        found = True
    assert found, mutant.name


def test_without_flags_nothing_of_them_is_emitted() -> None:
    for family in FAMILIES:
        plain = source_of(dataclasses.replace(ROWS, key_mask=False, logit_bias=False), family)
        assert not re.search(r"mask|LOWEST|SCORE_SCALE|inverse_or_zero|logit", plain.text)
        for flag, absent in (("key_mask", "logit_bias"), ("logit_bias", "key_mask")):
            source = source_of(dataclasses.replace(ROWS, **{absent: False}), family)
            assert flag in source.text and absent not in source.text
            assert [kernel.arguments.count(flag) for kernel in source.kernels] in ([1], [0, 1, 0], [0, 1])


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_compile_without_spills(family: str, arch: str) -> None:
    for dtype, arithmetic in arithmetics(family):
        spec = BlockSpec(64, 4, 32, 32, dtype=dtype, axes=("row",), key_mask=True, logit_bias=True)
        config = FAMILIES[family].default(spec.problem("row"), target(arch), arithmetic)
        if family == "resident" and arch != "sm_90":
            assert config is None
            continue
        assert config is not None
        compiled = compile_source(render(spec, {"row": config}), target(arch))
        assert not any(used.local_bytes for used in compiled.resources.values()), arithmetic
