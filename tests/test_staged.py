"""The staged family: its kernels on the emulator against float64, planted faults, layouts without conflicts, and what compiles."""

from __future__ import annotations

import dataclasses
import random
import re
from pathlib import Path

import pytest
import torch

from codegen.config import Config
from codegen.module import read_module, write_module
from codegen.reference import random_input, random_weights, reference
from codegen.render import Source, render
from codegen.sequence import default as sequence_default
from codegen.spec import BlockSpec
from codegen.staged import StagedConfig, StagedPlan, default
from codegen.target import target
from emitted import PREDICTED
from tuner.compile import compile_source
from tuner.emulator import EmulationError, Emulator

TARGET = target("sm_90")
TOLERANCE = 1e-5
FP32_MATHS = ("tf32x3", "fp16x3", "ffma")
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


def configured(spec: BlockSpec, math: str = "tf32x3", **changes: int) -> dict[str, Config]:
    """The default with `changes`, which have to make a legal configuration."""
    found: dict[str, Config] = {}
    for axis in spec.axes:
        start = default(spec.problem(axis), TARGET, math)
        assert start is not None, f"no default for {spec}"
        found[axis] = config = dataclasses.replace(start, **changes)
        assert not StagedPlan(spec.problem(axis), config).reasons(TARGET)
    return found


def error_of(source: Source, cache: Path, scale: float = 1.0, order: str = "forward", batch: int | None = None) -> float:
    generator = torch.Generator().manual_seed(11)
    weights = random_weights(source.spec, generator)
    x = random_input(source.spec, generator, scale=scale, batch=batch)
    y = Emulator(source, cache, run_limit=60).run(x, weights, order=order)
    expected = reference(source.spec, x, weights)
    return float((y.double() - expected).abs().max() / expected.abs().max()) if y.isfinite().all() else float("inf")


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("staged")


@pytest.mark.parametrize("math", FP32_MATHS)
@pytest.mark.parametrize("spec", [ROWS, COLUMNS, BOTH], ids=["rows", "columns", "both"])
def test_the_default_agrees_with_float64(spec: BlockSpec, math: str, cache: Path) -> None:
    source = render(spec, configured(spec, math))
    assert error_of(source, cache) < TOLERANCE
    assert error_of(source, cache, scale=30.0, order="reverse", batch=3) < TOLERANCE


def drawn(problem, draw: random.Random, math: str) -> StagedConfig:
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


def test_families_can_be_mixed(cache: Path) -> None:
    for staged_axis, other in (("row", "col"), ("col", "row")):
        start = sequence_default(BOTH.problem(other), TARGET)
        assert start is not None
        source = render(BOTH, {**configured(BOTH), other: start})
        assert {kernel.name for kernel in source.kernels} >= {f"axial_{staged_axis}_qkv", f"axial_{other}"}
        assert error_of(source, cache) < TOLERANCE


MUTANTS = {
    "weights are not waited for": (r"wait_for_copies<P::STAGES - 2>\(\);", "", 1.0),
    "one group too few is waited for": (r"wait_for_copies<P::STAGES - 2>", "wait_for_copies<P::STAGES - 1>", 1.0),
    "no barrier before the product": (r"__syncthreads\(\);  // the step's operands", "//", 1.0),
    "a buffer too few": (r"step % P::STAGES \*", "step % (P::STAGES - 1) *", 1.0),
    "keys are not waited for": (r"wait_for_copies<S::STAGES - 2>\(\);", "", 1.0),
    "no barrier before the scores": (r"__syncthreads\(\);  // the step's keys", "//", 1.0),
    "padded keys are not masked": (r"C::LENGTH % S::KEY_TILE != 0 &&", "false &&", 1.0),
    "the result is not rescaled": (r"out\[0\]\[j\]\[2 \* half\] \*= correction, out", "out", 30.0),
    "the sum is not rescaled": (r"fmaf\(sum\[half\], correction, tile_sum\)", "sum[half] + tile_sum", 30.0),
    "k and v are swapped": (r"which == 1\)", "which == 2)", 1.0),
    "the residual is left out": (r"\+ residual\[1\]", "", 1.0),
    "the bias is left out": (r"load_channels<C::DIM>\(pair, out_bias, channel\);", "", 1.0),
    "the last row tile is left out": (r"tile >= row_tiles\) break", "tile >= row_tiles - 1) break", 1.0),
    "a head too far": (r"C::HEADS \+ within / STEPS\)", "C::HEADS + (within / STEPS + 1) % C::HEADS)", 1.0),
    "no gain": (r"\* inverse\[half\], gain\[i\], shift", "* inverse[half], 1.0f, shift", 1.0),
    "a lane of a copy is left out": (r"const int copy = threadIdx.x \+", "const int copy = (threadIdx.x | 1) +", 1.0),
}


@pytest.mark.parametrize("fault", MUTANTS)
def test_a_planted_fault_is_caught(fault: str, cache: Path) -> None:
    pattern, replacement, scale = MUTANTS[fault]
    changes = dict(qkv_across=2, qkv_warp_columns=2, qkv_sum_tile=16, out_sum_tile=16, attn_key_tile=16, attn_warps=2)
    source = render(ROWS, configured(ROWS, **changes))
    assert error_of(source, cache, scale) < TOLERANCE
    text, count = re.subn(pattern, replacement, source.text)
    assert count, f"the source no longer has {pattern!r}: write this mutant anew"
    try:
        found = error_of(dataclasses.replace(source, text=text), cache, scale) > TOLERANCE
    except EmulationError as error:
        assert error.report.kind != "compile", f"the mutant does not compile, so it shows nothing: {error}"
        found = True
    assert found, fault


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize("shape", FIELD)
def test_blocks_of_the_field_have_a_default_without_bank_conflicts(shape: tuple[int, int, int, int], arch: str) -> None:
    for axis in ("row", "col"):
        problem = BlockSpec(*shape, batch=1).problem(axis)
        config = default(problem, target(arch))
        if shape[0] == 1536 and arch == "sm_120":  # 16 rows of 1536 channels and the weights do not fit into 99 KB
            assert config is None
            continue
        assert config is not None
        plan = StagedPlan(problem, config)
        for product in (plan.qkv, plan.out):
            assert set(product.conflicts().values()) == {0}, (axis, product)
        assert plan.qkv.buffers % 4 == plan.qkv.b_tile % 4 == plan.out.b_tile % 4 == plan.attn_buffer % 4 == 0, "copies are of 16 bytes"


@pytest.mark.parametrize(
    "shape, math, arch",
    [
        ((256, 8, 128, 256), "tf32x3", "sm_90"), ((256, 8, 128, 256), "fp16x3", "sm_80"), ((512, 8, 128, 128), "fp16x3", "sm_100"),
        ((512, 8, 128, 128), "tf32x3", "sm_120"), ((152, 4, 12, 883), "tf32x3", "sm_80"), ((1152, 16, 16, 256), "tf32x3", "sm_90"),
    ],
)  # fmt: skip
def test_defaults_compile_without_spills(shape: tuple[int, int, int, int], math: str, arch: str) -> None:
    spec = BlockSpec(*shape, batch=1, axes=("row",))
    config = default(spec.problem("row"), target(arch), math)
    assert config is not None
    compiled = compile_source(render(spec, {"row": config}), target(arch))
    assert len(compiled.resources) == 3 and not any(used.local_bytes for used in compiled.resources.values())


def test_scratch_holds_padded_tiles_and_is_shared_by_the_axes() -> None:
    spec = BlockSpec(dim=40, heads=2, height=5, width=33, batch=3)
    source = render(spec, configured(spec))
    padded = {"row": 5 * 48, "col": 33 * 16}  # tokens in whole row tiles; heads of 20 channels take 24
    assert dict(source.scratch) == {name: max(padded.values()) * 48 for name in ("query", "key", "value", "attended")}
    qkv, attention, out = source.kernels[:3]
    assert qkv.count(spec, 3) == out.count(spec, 3) == 3 * 5 * 3 and attention.count(spec, 3) == 3 * 5
    assert attention.blocks_per_group % spec.heads == 0


def test_a_module_of_staged_kernels_is_written_and_read_back(tmp_path: Path) -> None:
    configs = configured(BOTH)
    source = render(BOTH, configs)
    module = read_module(write_module(tmp_path, source, configs, PREDICTED, TARGET))
    assert module.configs == configs and module.source == source
