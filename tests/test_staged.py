"""The staged family: its kernels on the emulator against float64, planted faults, layouts without conflicts, and what compiles."""

from __future__ import annotations

import dataclasses
import random
import re
from pathlib import Path

import pytest

from codegen.config import Config
from codegen.module import read_module, write_module
from codegen.render import Source, render
from codegen.sequence import DTYPE_MATHS
from codegen.sequence import default as sequence_default
from codegen.spec import BlockSpec
from codegen.staged import StagedConfig, StagedPlan, default
from codegen.target import target
from emitted import PREDICTED
from emulated import error_of
from tuner.compile import compile_source
from tuner.emulator import EmulationError, Emulator
from tuner.verify import Checker

TARGET = target("sm_90")
TOLERANCE = 1e-5
FP32_MATHS = ("tf32x3", "fp16x3", "ffma")
HALVES = ("bfloat16", "float16")
# Ragged in every way: heads of 12 and 11 channels, lengths around multiples of 16, several key tiles and row tiles.
ROWS = BlockSpec(dim=24, heads=2, height=3, width=35, batch=2, axes=("row",))
COLUMNS = BlockSpec(dim=33, heads=3, height=35, width=4, batch=1, axes=("col",))
BOTH = BlockSpec(dim=40, heads=1, height=17, width=33, batch=1)
# dim, heads, height, width of blocks that people run (batch 1), both axes
FIELD = (
    (256, 8, 128, 256), (256, 8, 128, 128), (512, 8, 128, 128), (64, 4, 512, 512), (64, 8, 384, 512), (128, 4, 256, 256),
    (768, 12, 16, 196),
    (192, 6, 64, 128), (192, 3, 64, 128), (1152, 16, 16, 256), (320, 8, 16, 64), (1280, 8, 16, 64), (64, 8, 35, 48), (152, 4, 12, 883),
    (128, 8, 5, 8192), (1536, 6, 64, 64), (1024, 4, 33, 65), (72, 1, 65, 441),
)  # fmt: skip


def configured(spec: BlockSpec, math: str | None = None, **changes: int) -> dict[str, Config]:
    """The default with `changes`, which have to make a legal configuration."""
    found: dict[str, Config] = {}
    for axis in spec.axes:
        start = default(spec.problem(axis), TARGET, math)
        assert start is not None, f"no default for {spec}"
        found[axis] = config = dataclasses.replace(start, **changes)
        assert not StagedPlan(spec.problem(axis), config).reasons(TARGET)
    return found


def right(source: Source, cache: Path, order: str = "forward", quick: bool = False) -> bool:
    """Whether a 16-bit source holds twice the error of PyTorch's own form."""
    emulator = Emulator(source, cache, run_limit=60)
    return Checker(source.spec, seed=1, quick=quick)(lambda x, weights: emulator.run(x, weights, order=order)).ok


@pytest.mark.parametrize("math", FP32_MATHS)
@pytest.mark.parametrize("spec", [ROWS, COLUMNS, BOTH], ids=["rows", "columns", "both"])
def test_the_default_agrees_with_float64(spec: BlockSpec, math: str, cache: Path) -> None:
    source = render(spec, configured(spec, math))
    assert error_of(source, cache) < TOLERANCE
    assert error_of(source, cache, scale=30.0, order="reverse", batch=3) < TOLERANCE


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("spec", [ROWS, COLUMNS, BOTH], ids=["rows", "columns", "both"])
def test_the_default_holds_twice_the_error_of_pytorchs_form(spec: BlockSpec, dtype: str, cache: Path) -> None:
    spec = dataclasses.replace(spec, dtype=dtype)
    source = render(spec, configured(spec))
    assert right(source, cache) and right(source, cache, order="reverse", quick=True)


def drawn(problem, draw: random.Random, math: str | None = None) -> StagedConfig:
    """A legal configuration, each group drawn by itself."""
    start = default(problem, TARGET, math)
    assert start is not None
    for names in StagedConfig.groups().values():
        for _ in range(200):
            values = {name: draw.choice(StagedConfig.tunables()[name]) for name in names}
            config = dataclasses.replace(start, **values)
            if not StagedPlan(problem, config).reasons(TARGET):
                start = config
                break
    return start


@pytest.mark.parametrize("seed", range(12))
def test_random_legal_configurations_agree_with_float64(seed: int, cache: Path) -> None:
    draw = random.Random(seed)
    dim, heads = draw.choice(((24, 2), (33, 1), (38, 1), (40, 5), (20, 1), (72, 1), (64, 8), (18, 3)))
    spec = BlockSpec(dim, heads, draw.choice((1, 3, 17, 33)), draw.choice((2, 16, 31, 65)), batch=1, axes=draw.choice((("row",), ("col",))))
    config = drawn(spec.problem(spec.axes[0]), draw, draw.choice(FP32_MATHS))
    assert error_of(render(spec, {spec.axes[0]: config}), cache, order=draw.choice(("forward", "reverse", "random:5"))) < TOLERANCE, config


@pytest.mark.parametrize("seed", range(12))
def test_random_legal_configurations_of_16_bits_are_right(seed: int, cache: Path) -> None:
    """Rows of weights start on 16, 8, 4 or 2 bytes, which is a copy of that size, or none."""
    draw = random.Random(seed)
    dim, heads = ((24, 2), (33, 3), (38, 1), (40, 5), (20, 1), (72, 1), (64, 8), (18, 3), (36, 2), (34, 2), (63, 1), (27, 3))[seed]
    spec = BlockSpec(dim, heads, draw.choice((1, 3, 17, 33)), draw.choice((2, 16, 31, 65)), batch=1, dtype=HALVES[seed % 2])
    spec = dataclasses.replace(spec, axes=draw.choice((("row",), ("col",))))
    config = drawn(spec.problem(spec.axes[0]), draw)
    assert right(render(spec, {spec.axes[0]: config}), cache, draw.choice(("forward", "reverse", "random:5"))), config


@pytest.mark.parametrize("dtype", HALVES)
def test_families_can_be_mixed_in_16_bits(dtype: str, cache: Path) -> None:
    spec = dataclasses.replace(BOTH, dtype=dtype)
    start = sequence_default(spec.problem("row"), TARGET)
    assert start is not None
    assert right(render(spec, {**configured(spec), "row": start}), cache, quick=True)


def test_families_can_be_mixed(cache: Path) -> None:
    for staged_axis, other in (("row", "col"), ("col", "row")):
        start = sequence_default(BOTH.problem(other), TARGET)
        assert start is not None
        source = render(BOTH, {**configured(BOTH), other: start})
        assert {kernel.name for kernel in source.kernels} >= {f"axial_{staged_axis}_qkv", f"axial_{other}"}
        assert error_of(source, cache) < TOLERANCE


SMALL_TILES = dict(
    qkv_across=2, qkv_warp_columns=2, qkv_sum_tile=16, out_sum_tile=16, attn_key_tile=16, attn_warps=2, attn_rows=1, attn_stages=2
)  # fmt: skip
MUTANTS = {
    "weights are not waited for": (r"wait_for_copies<P::STAGES - 2>\(\);", "", 1.0),
    "one group too few is waited for": (r"wait_for_copies<P::STAGES - 2>", "wait_for_copies<P::STAGES - 1>", 1.0),
    "no barrier before the product": (r"__syncthreads\(\);  // the step's operands", "//", 1.0),
    "a buffer too few": (r"step % P::STAGES \*", "step % (P::STAGES - 1) *", 1.0),
    "keys are not waited for": (r"wait_for_copies<S::STAGES - 2>\(\);", "", 1.0),
    "a turn of the copies is left out": (r"turn < TURNS; ++turn", "turn < TURNS - 1; ++turn", 1.0),
    "no barrier before the scores": (r"__syncthreads\(\);  // the step's keys", "//", 1.0),
    "padded keys are not masked": (r"C::LENGTH % S::KEY_TILE != 0 &&", "false &&", 1.0),
    "queries are not in units of the exponent": (r"which == 0 \? C::EXPONENT_SCALE", "which == 0 ? 1.0f", 1.0),
    "k and v are swapped": (r"which == 1\)", "which == 2)", 1.0),
    "the residual is left out": (r"load_channels(_here)?<C::DIM>\(to\[half\]\[run\], x", r"load_channels\1<0>(to[half][run], x", 1.0),
    "the bias is left out": (r"load_channels<C::DIM>\(bias", "load_channels<0>(bias", 1.0),
    "columns are not where a lane's neighbours are": (r"column % 8 / 2 \* RUN", "column % 8 / 2 * 2", 1.0),
    "the last row tile is left out": (r"tile >= row_tiles\) break", "tile >= row_tiles - 1) break", 1.0),
    "a head too far": (r"C::HEADS \+ within / STEPS\)", "C::HEADS + (within / STEPS + 1) % C::HEADS)", 1.0),
    "no gain": (r"\* inverse\[row\], gain\[i\], shift", "* inverse[row], 1.0f, shift", 1.0),
    "a lane of a copy is left out": (r"const int copy = threadIdx.x \+", "const int copy = (threadIdx.x | 1) +", 1.0),
}


@pytest.mark.parametrize("fault", MUTANTS)
def test_a_planted_fault_is_caught(fault: str, cache: Path) -> None:
    pattern, replacement, scale = MUTANTS[fault]
    source = render(ROWS, configured(ROWS, **SMALL_TILES))
    assert error_of(source, cache, scale) < TOLERANCE
    text, count = re.subn(pattern, replacement, source.text)
    assert count, f"the source no longer has {pattern!r}: write this mutant anew"
    try:
        found = error_of(dataclasses.replace(source, text=text), cache, scale) > TOLERANCE
    except EmulationError as error:
        assert error.report.kind != "compile", f"the mutant does not compile, so it shows nothing: {error}"
        found = True
    assert found, fault


HALF_MUTANTS = {
    "the second of a pair is left out": (r"index \+ 1\) \? 2 : 1", "index + 1) ? 1 : 1"),
    "a head's last pair is whole": (r"index \+ 1\) \? 2 : 1", "index + 1) ? 2 : 2"),
    "pairs are where single elements would be": (r"k % PLANE / PER_WORD;", "k % PLANE;"),
    "pairs are read where single elements would be": (r"k % PLANE / PER_WORD\);", "k % PLANE);"),
    "attended tiles as far apart as floats'": (r"\* \(C::HEADS \* ROW_TILE\)", "* (2 * C::HEADS * ROW_TILE)"),
}


@pytest.mark.parametrize("fault", [*MUTANTS, *HALF_MUTANTS])
def test_a_planted_fault_is_caught_in_16_bits(fault: str, cache: Path) -> None:
    pattern, replacement = MUTANTS[fault][:2] if fault in MUTANTS else HALF_MUTANTS[fault]
    spec = dataclasses.replace(COLUMNS if fault in HALF_MUTANTS else ROWS, dtype="bfloat16")
    source = render(spec, configured(spec, **SMALL_TILES))
    text, count = re.subn(pattern, replacement, source.text)
    assert count, f"the source no longer has {pattern!r}: write this mutant anew"
    try:
        found = not right(dataclasses.replace(source, text=text), cache)
    except EmulationError as error:
        assert error.report.kind != "compile", f"the mutant does not compile, so it shows nothing: {error}"
        found = True
    assert found and right(source, cache, quick=True), fault


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", FIELD)
def test_blocks_of_the_field_have_a_default_without_bank_conflicts(shape: tuple[int, int, int, int], dtype: str, arch: str) -> None:
    for axis in ("row", "col"):
        problem = BlockSpec(*shape, batch=1, dtype=dtype).problem(axis)
        config = default(problem, target(arch))
        if shape[0] == 1536 and arch == "sm_120" and dtype == "float32":  # 16 rows of 1536 channels and the weights do not fit into 99 KB
            assert config is None
            continue
        assert config is not None
        plan = StagedPlan(problem, config)
        for product in (plan.qkv, plan.out):
            assert set(product.conflicts().values()) == {0}, (axis, product)
        assert plan.qkv.buffers % 4 == plan.qkv.b_tile % 4 == plan.out.b_tile % 4 == plan.attention.buffer % 4 == 0, (
            "copies are of 16 bytes"
        )


@pytest.mark.parametrize(
    "shape, math, arch",
    [
        ((256, 8, 128, 256), "tf32x3", "sm_90"), ((256, 8, 128, 256), "fp16x3", "sm_80"), ((512, 8, 128, 128), "fp16x3", "sm_100"),
        ((256, 8, 128, 256), "bf16", "sm_90"), ((512, 8, 128, 128), "bf16", "sm_80"), ((256, 8, 128, 128), "fp16", "sm_100"),
        ((33, 3, 35, 40), "bf16", "sm_90"), ((1152, 16, 16, 256), "fp16", "sm_120"), ((1536, 6, 64, 64), "bf16", "sm_90"),
        ((512, 8, 128, 128), "tf32x3", "sm_120"), ((152, 4, 12, 883), "tf32x3", "sm_80"), ((1152, 16, 16, 256), "tf32x3", "sm_90"),
    ],
)  # fmt: skip
def test_defaults_compile_without_spills(shape: tuple[int, int, int, int], math: str, arch: str) -> None:
    dtype = next(name for name, maths in DTYPE_MATHS.items() if math in maths)
    spec = BlockSpec(*shape, batch=1, axes=("row",), dtype=dtype)
    config = default(spec.problem("row"), target(arch), math, "mma")
    assert config is not None
    compiled = compile_source(render(spec, {"row": config}), target(arch))
    assert len(compiled.resources) == 3 and not any(used.local_bytes for used in compiled.resources.values())


def test_scratch_holds_padded_tiles_and_is_shared_by_the_axes() -> None:
    spec = BlockSpec(dim=40, heads=2, height=5, width=33, batch=3)
    source = render(spec, configured(spec, "tf32x3"))
    padded = {"row": 5 * 48, "col": 33 * 16}  # tokens in whole row tiles; heads of 20 channels take 24
    assert dict(source.scratch) == {name: max(padded.values()) * 48 for name in ("query", "key", "value", "attended")}
    qkv, attention, out = source.kernels[:3]
    assert qkv.count(spec, 3) == out.count(spec, 3) == 3 * 5 * 3 and attention.count(spec, 3) == 3 * 5
    assert attention.blocks_per_group % spec.heads == 0


def test_operands_of_16_bits_take_half_the_memory() -> None:
    single, half = BlockSpec(dim=256, heads=8), BlockSpec(dim=256, heads=8, dtype="bfloat16")
    config = configured(single)["row"]
    assert isinstance(config, StagedConfig)
    plans = [StagedPlan(single.problem("row"), dataclasses.replace(config, math="fp16x3"))]
    plans.append(StagedPlan(half.problem("row"), dataclasses.replace(config, math="bf16")))
    assert plans[0].scratch == plans[1].scratch, "elements, which are half as large"
    assert plans[1].attention.shared_bytes == plans[0].attention.shared_bytes / 2
    assert plans[1].qkv.shared_bytes < 0.55 * plans[0].qkv.shared_bytes and plans[1].out.shared_bytes < 0.55 * plans[0].out.shared_bytes
    assert plans[1].registers < plans[0].registers


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_module_of_staged_kernels_is_written_and_read_back(dtype: str, tmp_path: Path) -> None:
    spec = dataclasses.replace(BOTH, dtype=dtype)
    configs = configured(spec)
    source = render(spec, configs)
    module = read_module(write_module(tmp_path, source, configs, PREDICTED, TARGET))
    assert module.configs == configs and module.source == source
