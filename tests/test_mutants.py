"""Rendered sources through the emulator: right ones agree with float64 and run clean, planted faults are caught.

A mutant is an edit of the rendered text. It counts as caught when the emulator reports it or when its output is further than
1e-5 of the output's scale from the float64 reference. An edit whose pattern the source no longer has fails the test.
"""

from __future__ import annotations

import dataclasses
import random
import re
from dataclasses import dataclass
from functools import cache as remembered
from pathlib import Path

import pytest

from codegen.render import Source, render
from codegen.sequence import DTYPE_MATHS, SequenceConfig, SequencePlan, default
from codegen.spec import BlockSpec
from codegen.target import target
from emulated import error_of
from tuner.emulator import EmulationError
from tuner.space import space

TARGET = target("sm_90")
TOLERANCE = 1e-5
FP32_MATHS = tuple(math for math in DTYPE_MATHS["float32"] if math != "tf32")  # of fp32 grade
ALL_MATHS = [*(("float32", math) for math in FP32_MATHS), ("bfloat16", "bf16"), ("float16", "fp16")]
TOLERANCES = {"float32": TOLERANCE, "bfloat16": 2e-2, "float16": 2e-3}  # about three roundings of the largest outputs
# Ragged in every way: head_dim 12, 19 and 21 tokens, so more than one tile of rows and, of 16 keys each, of keys.
ROWS = BlockSpec(dim=24, heads=2, height=3, width=19, batch=1, axes=("row",))
BOTH = BlockSpec(dim=24, heads=2, height=4, width=5, batch=1)
COLUMNS = BlockSpec(dim=24, heads=2, height=21, width=3, batch=2, axes=("col",))


@remembered
def source_of(spec: BlockSpec, math: str | None = None, **changes: int | str | bool) -> Source:
    """The rendered source of the default configuration with `changes`; which have to make a legal one."""
    configs = {}
    for axis in spec.axes:
        problem = spec.problem(axis)
        start = default(problem, TARGET, math)
        assert start is not None, f"no default for {spec}"
        configs[axis] = dataclasses.replace(start, **changes)
        reasons = SequencePlan(problem, configs[axis]).reasons(TARGET)
        assert not reasons, f"the test's configuration is not legal: {reasons}"
    return render(spec, configs)


def caught(source: Source, cache: Path, scale: float = 1.0) -> str:
    """How a source is caught: the emulator's kind, "wrong", or "" when it is not."""
    try:
        return "wrong" if error_of(source, cache, scale) > TOLERANCE else ""
    except EmulationError as error:
        assert error.report.kind != "compile", f"the mutant does not compile, so it shows nothing: {error}"
        return error.report.kind


def edited(source: Source, pattern: str, replacement: str, which: int | None = None) -> Source:
    """The source with each match of a regular expression replaced, or the one with number `which` alone."""
    found = list(re.finditer(pattern, source.text))
    assert found and (which is None or which < len(found)), f"the source no longer has {pattern!r}: write this mutant anew"
    text = source.text
    for match in reversed(found if which is None else [found[which]]):
        text = text[: match.start()] + match.expand(replacement) + text[match.end() :]
    assert text != source.text, f"{pattern!r} -> {replacement!r} changes nothing"
    return dataclasses.replace(source, text=text)


# -- right sources


def legal_sample(spec: BlockSpec, seed: int) -> dict[str, SequenceConfig]:
    """A random legal configuration for each axis, of fp32 grade in float32."""
    rng = random.Random(seed)
    tunables = SequenceConfig.tunables() | {"math": FP32_MATHS if spec.dtype == "float32" else DTYPE_MATHS[spec.dtype]}
    configs: dict[str, SequenceConfig] = {}
    for axis in spec.axes:
        for _ in range(60_000):
            config = SequenceConfig(**{name: rng.choice(values) for name, values in tunables.items()})  # type: ignore[arg-type]
            if not SequencePlan(spec.problem(axis), config).reasons(TARGET):
                configs[axis] = config
                break
    assert set(configs) == set(spec.axes), f"no legal configuration of {spec} among the draws"
    return configs


SPECS = (
    BlockSpec(dim=16, heads=2, height=5, width=7, batch=2),
    BlockSpec(dim=33, heads=1, height=17, width=3, batch=1),
    BlockSpec(dim=30, heads=3, height=2, width=33, batch=1),
    BlockSpec(dim=40, heads=2, height=31, width=4, batch=1),
    BlockSpec(dim=12, heads=3, height=1, width=2, batch=3),
    BlockSpec(dim=76, heads=2, height=12, width=9, batch=1),
    BlockSpec(dim=64, heads=8, height=65, width=2, batch=1),
)


@pytest.mark.parametrize(("seed", "dtype"), [(0, "float32"), (1, "float32"), (2, "bfloat16"), (3, "float16")])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_random_configurations_are_right_and_clean(spec: BlockSpec, seed: int, dtype: str, cache: Path) -> None:
    spec = dataclasses.replace(spec, dtype=dtype)
    configs = legal_sample(spec, seed)
    error = error_of(render(spec, configs), cache, order=f"random:{seed}")
    assert error <= TOLERANCES[dtype], f"{configs}: {error}"


@pytest.mark.parametrize("seed", range(8))
def test_random_shares_of_a_head_are_right_and_clean(seed: int, cache: Path) -> None:
    """Two or four warps a head, with equal and unequal shares, one axis so and the other not, and what a block may have beside."""
    draw = random.Random(seed)
    dtype, warps = draw.choice(tuple(DTYPE_MATHS)), 4 if seed % 4 == 3 else 2
    dim, heads = draw.choice(((24, 2), (33, 1), (40, 5), (64, 4), (18, 3)))
    more = draw.choice(({}, {"qkv_bias": True, "norm": "rms"}, {"head_dim": 12, "post_norm": True}, {"key_mask": True, "logit_bias": True}))
    length = draw.choice((50, 64, 65) if warps == 4 else (17, 32, 33, 48, 65))
    axes = draw.choice((("row",), ("col",), ("row", "col")))
    height, width = (length, draw.choice((2, 5))) if axes == ("col",) else (draw.choice((2, 5)), length)
    spec = BlockSpec(dim, heads, height, width, 1, dtype, axes, **more)
    configs = {}
    for axis in axes:
        problem, shared = spec.problem(axis), spec.problem(axis).length == length
        configs[axis] = space(problem, TARGET, fixed={"heads": "registers", "head_warps": warps if shared else 1}).random(draw)
    source = render(spec, configs)
    assert "HEAD_WARPS" in source.text
    assert error_of(source, cache, order=f"random:{seed}") <= TOLERANCES[dtype], (spec, configs)


@pytest.mark.parametrize(("dtype", "math"), ALL_MATHS)
@pytest.mark.parametrize("order", ["forward", "reverse"])
def test_defaults_are_right_and_clean(dtype: str, math: str, order: str, cache: Path) -> None:
    for spec in (ROWS, COLUMNS):
        assert error_of(source_of(dataclasses.replace(spec, dtype=dtype), math), cache, order=order) <= TOLERANCES[dtype]


@pytest.mark.parametrize("batch", [1, 3])
def test_last_block_is_partly_empty(batch: int, cache: Path) -> None:
    """Four sequences a block, three or nine there are; the batch is not the one that the source was made for."""
    source = source_of(dataclasses.replace(ROWS, batch=4), sequences=4)
    assert error_of(source, cache, batch=batch) <= TOLERANCE


def test_plain_tf32_is_not_fp32(cache: Path) -> None:
    """The tolerance must tell one TF32 product from three."""
    assert 1e-3 > error_of(source_of(ROWS, "tf32"), cache) > TOLERANCE


def test_the_main_shape(cache: Path) -> None:
    spec = BlockSpec()
    assert error_of(source_of(spec), cache, batch=1) <= TOLERANCE


# -- mutants


@dataclass(frozen=True)
class Mutant:
    """An edit (every match of `pattern`) and what it is called; scale: of the input, small where only that shows the fault; math, changes:
    of the configuration."""

    name: str
    pattern: str
    replacement: str
    spec: BlockSpec = ROWS
    scale: float = 1.0
    kinds: tuple[str, ...] = ("wrong",)
    math: str = "tf32x3"
    changes: tuple[tuple[str, int | str | bool], ...] = (("key_tile", 16),)


MATRICES = ("wrong", "uninitialised", "race", "out_of_bounds")
ADDRESSES = ("wrong", "race", "block_conflict", "out_of_bounds")

MUTANTS = (
    Mutant("missing output bias", r"load_pair\(biases\[j\], bias \+ column, column\);", "biases[j][0] = biases[j][1] = 0.0f;"),
    Mutant("no residual", r" \+ kept\[[01]\]", ""),
    Mutant("wrong scale", r"(EXPONENT_SCALE = [\d.e+-]+f)", r"\1 * 1.001f"),
    Mutant("scale of dim instead of head_dim", r"(EXPONENT_SCALE = [\d.e+-]+f)", r"\1 * 0.70710678f"),
    Mutant("no eps", r"EPSILON = [\d.e+-]+f", "EPSILON = 0.0f", scale=0.01),
    Mutant("eps of another layer", r"EPSILON = [\d.e+-]+f", "EPSILON = 1.0e-6f", scale=0.01),
    Mutant("unbiased variance", r"(group_sum<LANES>\(squares\) \* \(1\.0f / )C::DIM\)", r"\1(C::DIM - 1))"),
    Mutant("unmasked keys past the end", r">= C::LENGTH\) (p\S* = minus_infinity)", r">= C::LENGTH + 16) \1"),
    Mutant("one key too many", r">= C::LENGTH\) (p\S* = minus_infinity)", r"> C::LENGTH) \1"),
    Mutant("one key too few", r">= C::LENGTH\) (p\S* = minus_infinity)", r">= C::LENGTH - 1) \1"),
    Mutant("last token not loaded", r"token < C::LENGTH\b", "token < C::LENGTH - 1"),
    Mutant("one token too many stored", r"token >= C::LENGTH\b", "token > C::LENGTH", kinds=("out_of_bounds", "race", "block_conflict")),
    Mutant("last token not stored", r"token >= C::LENGTH\b", "token >= C::LENGTH - 1"),
    Mutant("last tile of queries dropped", r"(UNITS = C::SEQUENCES \* TILES \* C::HEADS)", r"\1 - 1"),
    Mutant("last tile of keys dropped", r"step < KEY_STEPS\b", "step < KEY_STEPS - 1"),
    Mutant("last columns of the output dropped", r"(COLUMN_GROUPS = [^;]*?C::OUT_COLUMNS)", r"\1 - 1"),
    Mutant("last columns of q, k and v dropped", r"(COLUMN_GROUPS = [^;]*?C::QKV_COLUMNS)", r"\1 - 1", kinds=("uninitialised",)),
    Mutant("keys and values swapped", r"which == 1\b", "which == 2", kinds=MATRICES),
    Mutant("queries and keys swapped", r"which == 0\b", "which == 1", kinds=MATRICES),
    Mutant("wrong stride of values", r"VALUE_STRIDE = (\d+)", r"VALUE_STRIDE = \1 + 4", kinds=("out_of_bounds", "uninitialised", "race")),
    Mutant("matrices that overlap", r"\bKEY = (\d+)", r"KEY = \1 - 64", kinds=("race", "uninitialised", "wrong")),
    Mutant("columns read as rows", r"\* WIDTH \+ column\) \* DIM", "+ WIDTH * column) * DIM", COLUMNS, kinds=ADDRESSES),
    Mutant("wrong width of the grid", r"WIDTH = (\d+)", r"WIDTH = \1 + 1", COLUMNS, kinds=ADDRESSES),
    Mutant("gain without shift", r", load_constant\(shift\[step\], bias \+ channel\)", ""),
    Mutant(
        "weights of the output transposed",
        r"weight \+ column \* C::DIM \+ (k - k / C::PADDED_HEAD_DIM \* \(C::PADDED_HEAD_DIM - C::HEAD_DIM\))",
        r"weight + column + (\1) * C::DIM",
        kinds=("wrong", "misaligned", "out_of_bounds"),
    ),
    Mutant("unnormalised softmax", r"__fdividef\(1\.0f, (\w+[^;]*)\);", r"1.0f + 0.0f * (\1);"),
    Mutant("starts before the previous kernel ends", r"wait_for_previous_kernel\(\);", "", BOTH, kinds=("previous_kernel",)),
    Mutant("every other sequence", r"blockIdx\.x \* (\w+::)SEQUENCES", r"blockIdx.x * \1SEQUENCES * 2", kinds=("wrong", "out_of_bounds")),
)


FIVE = BlockSpec(dim=24, heads=2, height=5, width=19, batch=1, axes=("row",))
ROUNDS = (("sequences", 1), ("rounds", 4), ("norm_lanes", 4), ("out_columns", 3), ("qkv_rows", 1))
IN_TURN = (("qkv_columns", 2),)  # the weights of k, then those of v, then those of q


def registers(name: str, pattern: str, replacement: str, *kinds: str, changes: tuple = (), spec: BlockSpec = ROWS) -> Mutant:
    """A mutant of a kernel that keeps q, k and v in registers."""
    return Mutant(name, pattern, replacement, spec, 1.0, kinds or ("wrong",), "fp16x3", (("heads", "registers"), *changes))


REGISTERS = (
    registers("values not transposed", r"Math::transposed\(result\)", "result"),
    registers("values for keys", r"operands\[1\]\[step", "operands[2][step"),
    registers("keys for values", r"operands\[2\]\[step", "operands[1][step"),
    registers("keys of the first row tile alone", r"operands\[1\]\[step \* \(KEYS / 2\) \+ j / 2\]", "operands[1][0]"),
    registers("queries of another row tile", r"operands\[0\]\[tile\]", "operands[0][TILES - 1 - tile]"),
    registers("weights of the first head for all", r"(matrix\(portion, j / 2\) \* C::HEADS) \+ head\(\)", r"\1"),
    registers(
        "result of all heads in the first one's place", r"sequence\(\) \* TILES \+ tile, head\(\)", "sequence() * TILES + tile, 0", "race"
    ),
    registers("tokens of the first sequence for all", r"\(sequence\(\) \* TILES \+ first\)", "first"),
    registers("result in the first sequence's place", r"sequence\(\) \* TILES \+ tile, head", "tile, head", "race"),
    registers("octets swapped", r"part\[p\]\[octet\], (.*?)\[2 \+ octet\]", r"part[p][1 - octet], \1[3 - octet]"),
    registers("second half of a tile's index for the first", r"part\[p\]\[2 \+ octet\]", "part[p][octet]"),
    registers(
        "rests of the tokens lost", r"(first\.part\[part\], second\.part\[part\], third\.part\[part\], fourth)\.part\[part\]", r"\1.part[0]"
    ),
    registers("channels swapped in a quadruple", r"third = split\(upper\[2\], upper\[3\]\)", "third = split(upper[3], upper[2])"),
    registers(
        "the first portion's weights for all",
        r"held\.read\(lane, Load\{weight, portion\}\)",
        "held.read(lane, Load{weight, 0})",
        changes=IN_TURN,
    ),
    registers("further portions' weights not packed", r"(Load\{weight, portion\}\)), held\.pack\(\);", r"\1;", changes=IN_TURN),
    registers("queries in the values' turn", r"\(portion % TURNS \+ 1\) % 3", "(portion % TURNS + 1) % 2", changes=IN_TURN),
    registers("tokens of the first round for all", r"if \(round \+ 1 < Row::ROUNDS\) .*?;", "", changes=ROUNDS, spec=FIVE),
    registers(
        "tokens of the round after the next", r"first \+ Row::SEQUENCES, sequences\);", "first + 2, sequences);", changes=ROUNDS, spec=FIVE
    ),
    registers("one round too few", r"round < Row::ROUNDS", "round < Row::ROUNDS - 1", changes=ROUNDS, spec=FIVE),
    registers("rounds past the last sequence", r" && first < sequences", "", "out_of_bounds", changes=ROUNDS, spec=FIVE),
    registers(
        "blocks that overlap",
        r"blockIdx\.x \* \(Row::SEQUENCES \* Row::ROUNDS\)",
        "blockIdx.x",
        "block_conflict",
        changes=ROUNDS,
        spec=FIVE,
    ),
    registers("rounds that skip", r"first \+= Row::SEQUENCES", "first += 2", "wrong", "block_conflict", changes=ROUNDS, spec=FIVE),
)

THREE = BlockSpec(dim=24, heads=2, height=3, width=37, batch=1, axes=("row",))  # row tiles, of which one warp of a head has two
SHARED = (("head_warps", 2), ("sequences", 1), ("qkv_rows", 1), ("out_rows", 1), ("key_tile", 16))


def share(name: str, pattern: str, replacement: str, *kinds: str, changes: tuple = ()) -> Mutant:
    """A mutant of a kernel in which two warps share a head."""
    return registers(name, pattern, replacement, *kinds, changes=(*SHARED, *changes), spec=THREE)


UNWRITTEN = ("race", "uninitialised", "wrong", "out_of_bounds")
SHARES = (
    share("all row tiles for both warps", r"\(group \* C::HEAD_WARPS \+ Rows::sequence\(\) % C::HEAD_WARPS\)", "group", *UNWRITTEN),
    share("shares one after the other", r"group \* C::HEAD_WARPS \+ (Rows::sequence\(\) % C::HEAD_WARPS)", r"group + \1", *UNWRITTEN),
    share("a share that is not there", r"GROUPS % C::HEAD_WARPS == 0 \|\| first_tile\(group\) < TILES", "true", *UNWRITTEN),
    share("the last share left out", r"first_tile\(group\) < TILES", "first_tile(group) < TILES - 1", *UNWRITTEN),
    share("sequences of all warps", r"Rows::sequence\(\) / C::HEAD_WARPS", "Rows::sequence()", *UNWRITTEN),
    share("tokens of another row tile", r"first_tile\(group\) - Rows::sequence\(\) \* ROWS;", "first_tile(group);", *UNWRITTEN),
    share("queries of the first group for all", r"queries\[group \* ROWS \+ i\], lane", "queries[0], lane"),
    share("keys for values", r"shared \+ C::VALUE \+ page\(step", "shared + C::KEY + page(step"),
    share("keys and values exchanged", r"matrix == 1 \? C::KEY : C::VALUE", "matrix == 2 ? C::KEY : C::VALUE"),
    share("the first step's keys for all", r"shared \+ C::KEY \+ page\(step \* \(KEYS / 2\)", "shared + C::KEY + page(0"),
    share("keys of the first head for all", r"\(head\(\) \* SLICES \+ slice\)", "slice", "race"),
    share("rests of keys and values lost", r"made\.part\[p\]", "made.part[0]"),
    share("result in the first group's place", r"first_tile\(group\) \+ i, head\(\)", "first_tile(0) + i, head()", *UNWRITTEN),
    share("weights in turn, not packed", r"(Load\{weight, portion\}\)), held\.pack\(\);", r"\1;", changes=IN_TURN),
)


@pytest.mark.parametrize("mutant", [*MUTANTS, *REGISTERS, *SHARES], ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant, cache: Path) -> None:
    how = caught(
        edited(source_of(mutant.spec, mutant.math, **dict(mutant.changes)), mutant.pattern, mutant.replacement), cache, mutant.scale
    )
    assert how, f"{mutant.name} went unnoticed"
    assert how in mutant.kinds, f"{mutant.name} was caught as {how}"


def kernel_barriers(source: Source, name: str) -> list[int]:
    return [match.start() for match in re.finditer(rf"{name}\(\);", source.text)]


@pytest.mark.parametrize(("dtype", "math"), ALL_MATHS)
def test_every_missing_barrier_is_caught(dtype: str, math: str, cache: Path) -> None:
    """Each __syncthreads of the source, one by one, and each __syncwarp where lanes share memory; none may be superfluous.

    On the tensor cores a lane replaces only the queries that it alone has read, so that only Ffma needs the __syncwarp there.
    """
    shared: dict[str, int | str | bool] = {"heads": "shared", "norm_lanes": 16}
    source = source_of(dataclasses.replace(ROWS, dtype=dtype), math, **shared)
    blocks, warps = kernel_barriers(source, "__syncthreads"), kernel_barriers(source, "__syncwarp")
    assert len(blocks) >= 3, "load, products and attention need a barrier between each two"
    assert warps
    for name, count in (("__syncthreads", len(blocks)), ("__syncwarp", len(warps) if math == "ffma" else 0)):
        for which in range(count):
            how = caught(edited(source, rf"{name}\(\);", ";", which), cache)
            line = source.text[: (blocks if name == "__syncthreads" else warps)[which]].count("\n") + 1
            assert how in ("race", "uninitialised"), f"{name} of line {line} can be left out: {how or 'nothing'} was reported"


@pytest.mark.parametrize(
    "spec, changes, count",
    [
        (ROWS, (), 2),
        (FIVE, ROUNDS, 2),
        (FIVE, (*ROUNDS, ("residual", "shared")), 3),
        (THREE, SHARED, 3),
        (FIVE, (*ROUNDS, ("head_warps", 2)), 3),
    ],
)
def test_with_registers_two_barriers_are_needed_and_enough(spec: BlockSpec, changes: tuple, count: int, cache: Path) -> None:
    """And a third where the next round's tokens take the place of those that are kept for the residual, or where warps share a head."""
    source = source_of(spec, "fp16x3", heads="registers", **dict(changes))
    assert caught(source, cache) == "" and len(kernel_barriers(source, "__syncthreads")) == count
    for which in range(count):
        assert caught(edited(source, r"__syncthreads\(\);", ";", which), cache) in ("race", "uninitialised")


def test_barrier_that_some_threads_miss(cache: Path) -> None:
    """The others go on to the next barrier, which is then not the same call."""
    source = edited(source_of(ROWS), r"(const int first = blockIdx)", r"if (threadIdx.x < 96) __syncthreads();\n  \1")
    assert caught(source, cache) == "divergence"


def test_pattern_that_is_gone_fails_loudly() -> None:
    with pytest.raises(AssertionError, match="write this mutant anew"):
        edited(source_of(ROWS), "no such text", "")
