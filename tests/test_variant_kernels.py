"""Kernels of the block's variants, in every family and every arithmetic: right on the emulator, and planted faults are caught."""

from __future__ import annotations

import dataclasses
import random
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from codegen.families import FAMILIES
from codegen.render import render
from codegen.spec import BlockSpec
from codegen.staged import STREAMED
from codegen.staged import default as staged_default
from codegen.target import target
from emulated import TARGET, arithmetics, right, source_of
from tuner.compile import compile_source
from tuner.emulator import EmulationError
from tuner.space import space
from variants import EACH, drawn

TOLERANCE = 1e-5
# Ragged in every way: heads of 12 channels, 19 and 5 tokens; two axes, so that the second reads what the first wrote.
SHAPE = {"dim": 24, "heads": 2, "height": 5, "width": 19, "batch": 1}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("variant", EACH)
def test_a_variant_agrees_with_float64(variant: str, family: str, cache: Path) -> None:
    """Each in one of the arithmetics, which take turns; all of them are the slow test's."""
    index = 2 * list(EACH).index(variant) + 3 * list(FAMILIES).index(family)
    maths = arithmetics(family)
    dtype, math = maths[index % len(maths)]
    source = source_of(BlockSpec(**{**SHAPE, **EACH[variant], "dtype": dtype}), family, math)
    assert right(source, cache, ("forward", "reverse")[index // 2 % 2]), (dtype, math)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype", "math"),
    # float16 and bfloat16 differ in conversions alone; the stages of `resident` that variants change are those of `staged`
    [(family, *maths) for family in FAMILIES if family != "resident" for maths in arithmetics(family) if maths[1] != "fp16"],
)
@pytest.mark.parametrize("variant", EACH)
def test_a_variant_agrees_with_float64_in_every_arithmetic(variant: str, family: str, dtype: str, math: str, cache: Path) -> None:
    assert right(source_of(BlockSpec(**{**SHAPE, **EACH[variant], "dtype": dtype}), family, math), cache, "reverse")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(6))
def test_random_configurations_of_random_variants_agree_with_float64(seed: int, family: str, cache: Path) -> None:
    draw = random.Random(seed)
    dim, heads = draw.choice(((24, 2), (33, 3), (20, 1), (40, 5), (18, 3), (7, 7)))
    dtype = draw.choice(("float32", "float32", "bfloat16", "float16"))
    axes = draw.choice((("row",), ("col",), ("row", "col")))
    spec = BlockSpec(dim, heads, draw.choice((1, 3, 17)), draw.choice((2, 16, 33)), 2, dtype, axes, **drawn(draw))
    configs = {axis: space(spec.problem(axis), TARGET, family=family).random(draw) for axis in spec.axes}
    assert right(render(spec, configs), cache, draw.choice(("forward", "reverse", "random:5"))), (spec, configs)


@pytest.mark.parametrize("variant", ["everything", "qkv bias", "post-norm", "no output bias"])
@pytest.mark.parametrize("math", ["fp16x3", "bf16"])
def test_variants_in_registers_in_rounds_and_by_warpgroups(variant: str, math: str, cache: Path) -> None:
    """What the searches may choose beside the defaults: heads in registers or not, rounds of sequences, products by wgmma."""
    fields = {**SHAPE, "axes": ("row",), "dtype": "float32" if math == "fp16x3" else "bfloat16", **EACH[variant]}
    for changes in ({"heads": "shared"}, {"heads": "registers"}, {"heads": "registers", "rounds": 2}):
        spec = BlockSpec(**fields)
        here = space(spec.problem("row"), TARGET, fixed={"math": math, **changes})
        assert right(render(spec, {"row": here.start}), cache), changes
    spec = BlockSpec(**{**fields, "dim": 72, "heads": 3})
    for engine in ("wgmma", STREAMED):
        config = staged_default(spec.problem("row"), TARGET, math, engine)
        assert config is not None
        assert right(render(spec, {"row": config}), cache), engine


@pytest.mark.parametrize("variant", ["key mask", "key mask and logit bias"])
def test_sums_over_many_keys_begin_anew_with_terms(variant: str, cache: Path) -> None:
    """Tiles of keys that are all masked are left out."""
    spec = BlockSpec(**{**SHAPE, "axes": ("row",), "width": 150, "height": 2, **EACH[variant]})
    with mock.patch("codegen.streamed_plan.MANY_KEYS", 64):
        source = source_of(spec, "staged", attn_key_tile=16)
    assert "settled" in source.text and right(source, cache)


@pytest.mark.parametrize("families", [("sequence", "staged"), ("staged", "sequence"), ("resident", "staged"), ("sequence", "resident")])
def test_families_can_be_mixed(families: tuple[str, str], cache: Path) -> None:
    spec = BlockSpec(**{**SHAPE, **EACH["everything"], "residual": True})
    configs = {axis: FAMILIES[name].default(spec.problem(axis), TARGET, "fp16x3") for axis, name in zip(spec.axes, families, strict=True)}
    assert right(render(spec, configs), cache)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_variant_that_is_off_leaves_no_trace(family: str) -> None:
    text = source_of(BlockSpec(**SHAPE), family).text
    for word in (
        "qkv_bias",
        "load_bias",
        "RMSNorm",
        "normalise_token",
        "store_output",
        "HEADS * C::HEAD_DIM",
        "HEADS * HEAD_DIM",
        "_norm(",
    ):
        assert word not in text, word
    assert ("channels.cuh" not in text) and text.count("load_channels(float") == (family != "sequence")


@pytest.mark.parametrize(
    ("family", "dtype", "arch"),
    [
        ("sequence", "float32", "sm_80"),
        ("staged", "float32", "sm_100"),
        ("sequence", "bfloat16", "sm_90"),
        ("staged", "float16", "sm_90"),
        ("resident", "bfloat16", "sm_90"),
    ],
)
def test_variants_compile_without_spills(family: str, dtype: str, arch: str) -> None:
    spec = BlockSpec(axes=("col",), **{"dtype": dtype, **EACH["everything"], "residual": True})
    config = FAMILIES[family].default(spec.problem("col"), target(arch), FAMILIES[family].maths[dtype][0])
    assert config is not None
    compiled = compile_source(render(spec, {"col": config}), target(arch))
    assert not any(used.local_bytes for used in compiled.resources.values()), compiled.resources


# name -> family ("" all), what is unusual about the block, pattern, replacement; every match is replaced
MUTANTS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "qkv bias missing": ("sequence", {"qkv_bias": True}, r"acc\S* \+= (biases\[[^;]*|pair\[c % 2\]);", ";"),
    "qkv bias missing (staged)": ("staged", {"qkv_bias": True}, r" \+ bias\[c % 2\]", ""),
    "qkv bias missing (resident)": ("resident", {"qkv_bias": True}, r"own\[j\]\[c\] \+= bias\[c % 2\];", ";"),
    "qkv bias of k and v is q's (resident)": ("resident", {"qkv_bias": True}, r"\(j / STEPS \* C::HEADS \+ ", "("),
    "qkv bias of the neighbouring channel": ("", {"qkv_bias": True}, r"(biases\[j \+ c / 4\]|pair|bias)\[c % 2\]", r"\1[1 - c % 2]"),
    "qkv bias of k and v is q's": ("sequence", {"qkv_bias": True}, r"bias \+ head \* C::HEAD_DIM", "bias + head % C::HEADS * C::HEAD_DIM"),
    "qkv bias of k and v is q's (staged)": ("staged", {"qkv_bias": True}, r"\(which \* C::HEADS \+ within / STEPS\)", "(within / STEPS)"),
    "qkv bias by padded heads": ("sequence", {"qkv_bias": True}, r"bias \+ head \* C::HEAD_DIM", "bias + head * C::PADDED_HEAD_DIM"),
    "an output bias that is off": ("", {"out_bias": False}, r"(acc\[[^;]*?\]\[2 \* half( \+ c % 2)?\])", r"0.125f + \1"),
    "no residual": ("", {"qkv_bias": True}, r" \+ kept\[[01]\]|load_channels<C::DIM>\(to\[half\]\[run\], x .*(?=;)", ""),
    "RMSNorm without its root": ("", {"norm": "rms"}, r"rsqrtf\((.*)\);", r"1.0f / (\1);"),
    "RMSNorm of the sum, not the mean": ("", {"norm": "rms"}, r" \* \(1\.0f / C::DIM\) \+ C::EPSILON", " + C::EPSILON"),
    "RMSNorm without eps": ("", {"norm": "rms"}, r"\+ C::EPSILON", "+ 1.0e-30f"),
    "RMSNorm without its weight": ("", {"norm": "rms"}, r" \* gain\[i\]", ""),
    "tokens changed although there is no norm": (
        "sequence", {"norm": "none"}, r"(unpack\(values\[half\]\[step\], .*\);)", r"{ \1 values[half][step][0] *= 1.5f; }",
    ),
    "post-norm skipped": ("", {"post_norm": True}, r"\n +(if \(token < tokens\) )?normalise_token<.*;", ""),
    "post-norm without eps": ("", {"post_norm": True}, r"\+ C::EPSILON", "+ 1.0e-30f"),
    "post-norm without its bias": ("", {"post_norm": True}, r"gain\[i\], shift\[i\]\)", "gain[i], 0.0f)"),
    "post-norm before all channels are there": ("sequence", {"post_norm": True}, r"__syncthreads\(\);  // y has", "// y has"),
    "post-norm leaves out the last token": ("", {"post_norm": True}, r"(index < \w+::SEQUENCES \* \w+::LENGTH|token < tokens)", r"\1 - 1"),
    "scale of dim / heads": ("", {"head_dim": 20}, r"(EXPONENT_SCALE = [\d.e+-]+f)", r"\1 * 1.29099445f"),
    "output weights in rows of dim": (
        "", {"head_dim": 20}, r"column \* (\(C::HEADS \* C::HEAD_DIM\)|\(HEADS \* HEAD_DIM\)|INNER)", "column * 24",
    ),
    "a head too few": ("", {"head_dim": 7}, r"HEADS = 2, HEAD_DIM", "HEADS = 1, HEAD_DIM"),
}  # fmt: skip


@pytest.mark.parametrize("fault", MUTANTS)
def test_a_planted_fault_is_caught(fault: str, cache: Path) -> None:
    only, fields, pattern, replacement = MUTANTS[fault]
    for family in FAMILIES if not only else (only,):
        source = source_of(BlockSpec(**{**SHAPE, "axes": ("row",), **fields}), family)
        text, count = re.subn(pattern, replacement, source.text)
        assert count and text != source.text, f"the source no longer has {pattern!r}: write this mutant anew"
        try:
            found = not right(dataclasses.replace(source, text=text), cache)
        except EmulationError as error:
            assert error.report.kind != "compile", f"the mutant does not compile, so it shows nothing: {error}"
            found = True
        assert found, (fault, family)
