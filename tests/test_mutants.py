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

TARGET = target("sm_90")
TOLERANCE = 1e-5
FP32_MATHS = tuple(math for math in DTYPE_MATHS["float32"] if math != "tf32")  # of fp32 grade
ALL_MATHS = [*(("float32", math) for math in FP32_MATHS), ("bfloat16", "bf16"), ("float16", "fp16")]
TOLERANCES = {"float32": TOLERANCE, "bfloat16": 2e-2, "float16": 2e-3}  # about three roundings of the largest outputs
# Ragged in every way: head_dim 12, 19 and 21 tokens, so more than one tile of rows and, of 16 keys each, of keys.
ROWS = BlockSpec(dim=24, heads=2, height=3, width=19, batch=1, axes=("row",))
BOTH = BlockSpec(dim=24, heads=2, height=4, width=5, batch=1)
COLUMNS = BlockSpec(dim=24, heads=2, height=21, width=3, batch=2, axes=("col",))


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mutants")


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
    return Source(source.spec, text, source.kernels)


# -- right sources


def legal_sample(spec: BlockSpec, seed: int) -> dict[str, SequenceConfig]:
    """A random legal configuration for each axis, of fp32 grade in float32."""
    rng = random.Random(seed)
    tunables = SequenceConfig.tunables() | {"math": FP32_MATHS if spec.dtype == "float32" else DTYPE_MATHS[spec.dtype]}
    configs: dict[str, SequenceConfig] = {}
    for axis in spec.axes:
        for _ in range(20_000):
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
    """An edit (every match of `pattern`) and what it is called; scale: of the input, small where only that shows the fault."""

    name: str
    pattern: str
    replacement: str
    spec: BlockSpec = ROWS
    scale: float = 1.0
    kinds: tuple[str, ...] = ("wrong",)


MATRICES = ("wrong", "uninitialised", "race", "out_of_bounds")
ADDRESSES = ("wrong", "race", "block_conflict", "out_of_bounds")

MUTANTS = (
    Mutant("missing output bias", r"load_pair\(pair, bias \+ column, column\);", ""),
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
    Mutant("every other sequence", r"blockIdx\.x \* (\w+::)SEQUENCES", r"blockIdx.x * \1SEQUENCES * 2", kinds=("wrong",)),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant, cache: Path) -> None:
    how = caught(edited(source_of(mutant.spec, key_tile=16), mutant.pattern, mutant.replacement), cache, mutant.scale)
    assert how, f"{mutant.name} went unnoticed"
    assert how in mutant.kinds, f"{mutant.name} was caught as {how}"


def kernel_barriers(source: Source, name: str) -> list[int]:
    return [match.start() for match in re.finditer(rf"{name}\(\);", source.text)]


@pytest.mark.parametrize(("dtype", "math"), ALL_MATHS)
def test_every_missing_barrier_is_caught(dtype: str, math: str, cache: Path) -> None:
    """Each __syncthreads of the source, one by one, and each __syncwarp where lanes share memory; none may be superfluous.

    On the tensor cores a lane replaces only the queries that it alone has read, so that only Ffma needs the __syncwarp there.
    """
    source = source_of(dataclasses.replace(ROWS, dtype=dtype), math)
    blocks, warps = kernel_barriers(source, "__syncthreads"), kernel_barriers(source, "__syncwarp")
    assert len(blocks) >= 3, "load, products and attention need a barrier between each two"
    assert warps
    for name, count in (("__syncthreads", len(blocks)), ("__syncwarp", len(warps) if math == "ffma" else 0)):
        for which in range(count):
            how = caught(edited(source, rf"{name}\(\);", ";", which), cache)
            line = source.text[: (blocks if name == "__syncthreads" else warps)[which]].count("\n") + 1
            assert how in ("race", "uninitialised"), f"{name} of line {line} can be left out: {how or 'nothing'} was reported"


def test_barrier_that_some_threads_miss(cache: Path) -> None:
    """The others go on to the next barrier, which is then not the same call."""
    source = edited(source_of(ROWS), r"(const int first = blockIdx)", r"if (threadIdx.x < 96) __syncthreads();\n  \1")
    assert caught(source, cache) == "divergence"


def test_pattern_that_is_gone_fails_loudly() -> None:
    with pytest.raises(AssertionError, match="write this mutant anew"):
        edited(source_of(ROWS), "no such text", "")
