"""The staged family's products on Hopper's matrix unit: right on the emulator, planted faults, what is legal, and what compiles."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from codegen.config import Config
from codegen.layout import Access
from codegen.module import read_module, write_module
from codegen.render import Source, render
from codegen.sequence import default as sequence_default
from codegen.spec import BlockSpec, SpecError
from codegen.staged import DTYPE_MATHS, STREAMED, StagedConfig, StagedPlan, alternatives, default
from codegen.target import target
from codegen.warpgroup_product import COLUMN_TILES, WarpgroupProduct
from emitted import PREDICTED
from emulated import error_of
from emulated import right as holds
from test_mutants import edited
from tuner.compile import compile_source
from tuner.emulator import EmulationError
from tuner.space import parse_fixed, space

TARGET = target("sm_90")
TOLERANCE = 1e-5
BOTH = ("qkv", "out")
# Several tiles of the sum and of the columns in each product, both with zeros behind; a row tile and a block that are not full.
WIDE = BlockSpec(dim=72, heads=3, height=4, width=35, batch=1, axes=("row",))


def by_warpgroups(
    spec: BlockSpec, groups: tuple[str, ...] = BOTH, math: str | None = None, engine: str = "wgmma", **changes: int
) -> StagedConfig:
    """A legal configuration of the spec's first axis in which the products of `groups` are wgmma's, or of another engine."""
    start = default(spec.problem(spec.axes[0]), TARGET, math, "mma")
    assert start is not None
    shape = {"warp_rows": 1, "across": 1, "sum_tile": 64, "down": 4, "warp_columns": 8, "stages": 2, "parts": 1, "blocks": 1} | changes
    values = {f"{group}_{name}": value for group in groups for name, value in shape.items()}
    config = dataclasses.replace(start, **{f"{group}_engine": engine for group in groups}, **values)
    assert not (reasons := StagedPlan(spec.problem(spec.axes[0]), config).reasons(TARGET)), reasons
    return config


def rendered(spec: BlockSpec, groups: tuple[str, ...] = BOTH, engine: str = "wgmma", **changes: int) -> Source:
    return render(spec, {spec.axes[0]: by_warpgroups(spec, groups, engine=engine, **changes)})


def right(source: Source, cache: Path, order: str = "forward") -> bool:
    """Whether it agrees with float64: within TOLERANCE, or twice the error of PyTorch's own form in 16 bits."""
    if source.spec.itemsize == 4:
        return error_of(source, cache, order=order) < TOLERANCE
    return holds(source, cache, order)


@pytest.mark.parametrize("engine", ["wgmma", STREAMED])
@pytest.mark.parametrize("dtype", DTYPE_MATHS)
@pytest.mark.parametrize("groups", [("qkv",), ("out",), BOTH], ids="+".join)
def test_each_product_agrees_with_float64(groups: tuple[str, ...], dtype: str, engine: str, cache: Path) -> None:
    source = rendered(dataclasses.replace(WIDE, dtype=dtype), groups, engine, down=8, stages=3)
    assert right(source, cache) and right(source, cache, "reverse")


@pytest.mark.parametrize("seed", range(12))
def test_random_legal_configurations_agree_with_float64(seed: int, cache: Path) -> None:
    """Heads of 12, 11, 38, 8, 72 and more channels, rows of weights that start on 16 bytes or on 2, lengths around multiples of 16."""
    draw = random.Random(seed)
    dim, heads = ((24, 2), (33, 3), (38, 1), (40, 5), (96, 3), (72, 1), (64, 8), (18, 3), (136, 2), (34, 2), (63, 1), (130, 5))[seed]
    axes = draw.choice((("row",), ("col",)))
    spec = BlockSpec(
        dim, heads, draw.choice((1, 3, 17, 33)), draw.choice((2, 16, 31, 65)), batch=1, axes=axes, dtype=[*DTYPE_MATHS][seed % 3]
    )
    start = dataclasses.replace(by_warpgroups(spec), **{f"{group}_engine": draw.choice(("wgmma", STREAMED)) for group in BOTH})
    for group in BOTH:
        names = [f"{group}_{name}" for name in ("down", "warp_columns", "stages", "parts")]
        for _ in range(200):
            config = dataclasses.replace(start, **{name: draw.choice(StagedConfig.tunables()[name]) for name in names})
            if not StagedPlan(spec.problem(axes[0]), config).reasons(TARGET):
                start = config
                break
    assert right(render(spec, {axes[0]: start}), cache, draw.choice(("forward", "reverse", "random:5"))), start


@pytest.mark.parametrize(
    "dim, heads, dtype, variant",
    [
        (256, 8, "bfloat16", {}), (260, 2, "float16", {}), (510, 3, "bfloat16", {}), (520, 4, "float32", {}), (1025, 5, "bfloat16", {}),
        (192, 3, "float32", {"norm": "rms"}), (33, 1, "float16", {"norm": "rms", "norm_affine": False}),
        (66, 2, "bfloat16", {"norm": "none"}), (128, 4, "float32", {"norm_affine": False}), (136, 2, "bfloat16", {"norm_affine": False}),
    ],
)  # fmt: skip
def test_groups_of_lanes_normalise_tokens_of_every_width(dim: int, heads: int, dtype: str, variant: dict[str, Any], cache: Path) -> None:
    """4, 8, 16 and 32 lanes; loads of 16, 8, 4 and 2 bytes; 19 tokens of 32 rows."""
    spec = BlockSpec(dim, heads, 1, 19, batch=1, dtype=dtype, axes=("row",), **variant)
    assert right(rendered(spec, ("qkv",)), cache)


@pytest.mark.parametrize("sum", range(64, 2561, 64))
def test_tokens_are_stored_as_operand_a_without_conflicts(sum: int) -> None:
    product = WarpgroupProduct(1, 16, 8, 3, 1, 2, sum, 768, 8, 2)
    lanes, held = product.norm_lanes, product.norm_held
    assert 16 % (32 // lanes * held) == 0, "whole turns of a row tile"
    assert product.norm_values <= 64 or held == 1
    assert set(product.conflicts().values()) == {0}
    assert dataclasses.replace(product, blocks=3).norm_values <= max(32, product.norm_values // held), "fewer registers each"


def test_neighbouring_rows_would_conflict_in_groups_of_four() -> None:
    def cell(lane: int) -> tuple[int, int]:
        return lane // 4, 4 * (lane % 4 ^ lane // 4)

    assert Access("neighbouring rows", 4, cell).conflicts(32) > 0


MUTANTS = {
    "rows are not swizzled": (r"\(\(index / 8\) \^ \(row \* ROW / 32 % \(ROW / 4\)\)\)", "(index / 8)"),
    "weights are packed without swizzle": (r"tile\) \* P::B_TILE \+ swizzled<ROW>\(column, k\)", "tile) * P::B_TILE + column * 32 + k / 2"),
    "eight rows are 512 bytes apart": (r"\(32ull \* ROW >> 4\) << 32", "(16ull * ROW >> 4) << 32"),
    "no fence before the products' barrier": (r"fence_async_proxy\(\);\n    __syncthreads", "__syncthreads"),
    "no barrier before the products": (r"__syncthreads\(\);  // operand A and", "//"),
    "no barrier before a buffer is filled again": (r"__syncthreads\(\);  // the step before", "//"),
    "the copy is not waited for": (r"wait_for_bulk_copy\(shared .*\n", "\n"),
    "the wrong phase is waited for": (r"round % 2\)", "(round + 1) % 2)"),
    "a buffer is filled again a step too early": (r"wgmma_wait<1>\(\);", ""),
    "the products are not waited for": (r"wgmma_wait<0>\(\);", ""),
    "no wgmma_fence": (r"  wgmma_fence\(\);\n", "\n"),
    "no commit": (r"  wgmma_commit\(\);\n", "\n"),
    "the accumulators are not cleared": (r"sum_tile > 0 \|\| k > 0", "true || k > 0"),
    "the second half of a row is the first": (r"a \+ 2 \* k, b \+ 2 \* k, acc", "a + 2 * (k % 2), b + 2 * k, acc"),
    "all warpgroups have the first one's rows": (r"rows\(shared, warpgroup\)", "rows(shared, 0)"),
    "a part's column tiles are its neighbour's": (r"\(part \+ step / SUM_TILES \* P::PARTS\)", "(step / SUM_TILES)"),
    "rows g and g+8 are swapped": (r"swizzled\(row \+ 8 \* half", "swizzled(row + 8 - 8 * half"),
    "packed weights have the sum in its own order": (r"k = k / 64 \* 64 .*\n", "\n"),
    "neighbouring fragments are swapped": (r"chunk\[4\] = \{quads\[0\](.*), quads\[1\]\[half\]", r"chunk[4] = {quads[1]\1, quads[0][half]"),
    "weights past the last channel are not zeros": (r"if \(from == nullptr\) continue;", "if (from == nullptr) from = weight;"),
    "the mean is of half a token": (r"group_sum<LANES>\(sum\)", "group_sum<LANES / 2>(sum)"),
    "the variance is of half a token": (r"group_sum<LANES>\(squares\)", "group_sum<LANES / 2>(squares)"),
    "the variance has channels past the last": (r"if \(\(step \* LANES \+ lane\) \* CHUNK \+ i < C::DIM\) squares", "squares"),
    "a group's second token is its first": (r"\* 16 \+ row \+ held \* GROUPS", "* 16 + row"),
    "a group's tokens are stored in one row": (r"row \+ held \* GROUPS, channel", "row, channel"),
    "no gain": (r"\* inverse\[held\], gain\[i\], shift", "* inverse[held], 1.0f, shift"),
    "a token is read past the sequence's end": (r"min\(token, C::LENGTH - 1\)", "token"),
    "row tiles past the last are read": (r"min\(first_tile \+ row_tile, row_tiles - 1\)", "first_tile + row_tile"),
    "a barrier is waited for that is not initialised": (r"init_barrier\(shared .*\n", "publish_barriers();\n"),
}
REST_MUTANTS = {
    "the rests are swapped": (r"rest, a \+ 2 \* k, b \+ B_OPERAND / 4", "rest, a + A_OPERAND / 4 + 2 * k, b + B_OPERAND / 4"),
    "a rest is left out": (r"wgmma\(Format\{\}, rest, a \+ A_OPERAND / 4 \+ 2 \* k, b \+ 2 \* k, accumulate\);", ""),
    "the rests are not scaled back": (r"fmaf\(rest\[j\]\[c\], 1\.0f / Math::SCALE, acc", "fmaf(rest[j][c], 1.0f, acc"),
}


# Of products that stream operand A.
STREAMED_MUTANTS = {
    "rows are not copied": (r"add_bulk_copy\(to \+ group .*\n", ";\n"),
    "the second warpgroup has the first one's rows": (r"rows\(buffer, warpgroup \* OPERANDS\)", "rows(buffer, 0)"),
    "a tile of the sum is its neighbour": (r"piece\(4 \* group, sum_tile\)", "piece(4 * group, sum_tile / 2)"),
    "a block's rows are the first block's": (r"operand \+ Product::piece\(first_tile, 0\)", "operand"),
    "the output's rows are the first block's": (r"attended \+ Product::piece\(first_tile, 0\)", "attended"),
    "streamed rows are swapped": (r"row_tile % 4 \* 16 \+ row, index", "row_tile % 4 * 16 + (row ^ 1), index"),
    "rows g and g+8 of the result are swapped": (r"16 \+ 8 \* half \+ lane / 4, page", "16 + 8 - 8 * half + lane / 4, page"),
    "weights have the sum in its own order": (r"k = k / 16 \* 16 .*\n", "\n"),
    "no zeros behind the last row tile": (r"row_tile < end; \+\+row_tile\)", "row_tile <= at; ++row_tile)"),
    "no zeros behind the last head": (r"head == C::HEADS - 1 \? Out::SUM / 16 : next", "next"),
    "rows of the next step's buffer": (r"rows\(buffer, warpgroup", "rows(shared + (stage + 1) % P::STAGES * STEP, warpgroup"),
}


@pytest.mark.parametrize("fault", [*MUTANTS, *REST_MUTANTS, *STREAMED_MUTANTS])
def test_a_planted_fault_is_caught(fault: str, cache: Path) -> None:
    """The two types in turn; only float32 has rests."""
    faults = MUTANTS | REST_MUTANTS | STREAMED_MUTANTS
    dtype = "bfloat16" if list(faults).index(fault) % 2 and fault not in REST_MUTANTS else "float32"
    pattern, replacement = faults[fault]
    spec = dataclasses.replace(WIDE, dtype=dtype)
    groups = ("out",) if "behind the last" in fault else BOTH  # with both streamed, what is there is the tokens, whose zeros end likewise
    source = rendered(spec, groups, STREAMED if fault in STREAMED_MUTANTS else "wgmma", down=8, parts=2)
    mutant = edited(source, pattern, replacement)
    try:
        found = not right(mutant, cache)
    except EmulationError as error:
        assert error.report.kind != "compile", f"the mutant does not compile, so it shows nothing: {error}"
        found = True
    assert found, fault


def settling(after: int, engine: str, spec: BlockSpec) -> Source:
    """Of products whose sums begin anew after so many indices, if they are longer."""
    with contextlib.ExitStack() as stack:
        for name in ("LONG_SUM", "SETTLED"):
            stack.enter_context(mock.patch(f"codegen.tiled_product.{name}", after))
        if engine != "mma":
            return rendered(spec, engine=engine, down=8, stages=3)
        config = default(spec.problem("row"), TARGET, DTYPE_MATHS[spec.dtype][0], "mma")
        assert config is not None
        return render(spec, {"row": dataclasses.replace(config, qkv_sum_tile=32, out_sum_tile=32, qkv_stages=2, out_stages=2)})


@pytest.mark.parametrize("engine", ["mma", "wgmma", STREAMED])
def test_sums_that_begin_anew_agree_with_float64(engine: str, cache: Path) -> None:
    source = settling(64, engine, WIDE)
    assert "SETTLED = 0" not in source.text and right(source, cache) and right(source, cache, "reverse")
    halves = settling(64, engine, dataclasses.replace(WIDE, dtype="bfloat16"))
    assert "SETTLED" not in halves.text, "16-bit results do not show the difference"


SETTLED_MUTANTS = {
    "what was settled is left out": ((STREAMED, "wgmma"), r"(\[c\]) \+= settled\[j\]\[c\];", r"\1 += 0.0f;"),
    "sums go on": ((STREAMED,), r"sum_tile % SETTLED > 0", "sum_tile > 0"),
    "sums are settled before they are done": (("wgmma",), r"(finish\(float[^{]*\{\n *)wgmma_wait<0>\(\);", r"\1"),
    "rests are settled twice": (("mma",), r"sums = \{\};", ""),
    "what was settled is left out by mma": (("mma",), r"add\(acc, settled\)", ""),
    "sums go on by mma": (("mma",), r"acc\[i\]\[j\]\[c\] = 0\.0f;", ";"),
}


@pytest.mark.parametrize("fault, engine", [(fault, engine) for fault, (engines, *_) in SETTLED_MUTANTS.items() for engine in engines])
def test_a_planted_fault_of_sums_that_begin_anew_is_caught(fault: str, engine: str, cache: Path) -> None:
    _, pattern, replacement = SETTLED_MUTANTS[fault]
    assert not right(edited(settling(64, engine, WIDE), pattern, replacement), cache)


def test_long_sums_are_as_accurate_as_short_ones(cache: Path) -> None:
    """Of the branch alone, whose products the residual would hide."""
    spec = BlockSpec(dim=1152, heads=4, height=1, width=16, batch=1, axes=("row",), head_dim=32, residual=False)
    errors = {after: error_of(settling(after, STREAMED, spec), cache) for after in (512, 2048)}
    assert errors[512] < 1e-6 and 1.5 * errors[512] < errors[2048], errors


def test_the_emulator_says_which_fence_is_missing(cache: Path) -> None:
    source = rendered(WIDE)
    text = source.text.replace("fence_async_proxy();\n    __syncthreads", "__syncthreads")
    with pytest.raises(EmulationError, match="wrote without fence_async_proxy"):
        error_of(dataclasses.replace(source, text=text), cache)


def test_wgmma_is_for_16_bit_operands_on_sm_90_in_whole_warpgroups() -> None:
    problem, config = WIDE.problem("row"), by_warpgroups(WIDE)

    def objection(arch: str = "sm_90", **changes: int | str) -> str:
        return "; ".join(StagedPlan(problem, dataclasses.replace(config, **changes)).reasons(target(arch)))

    assert not objection()
    for arch in ("sm_80", "sm_89", "sm_100", "sm_120"):
        assert f"{arch} has no wgmma" in objection(arch)
    assert "not those of tf32x3" in objection(math="tf32x3")
    assert "a warp has one row tile" in objection(qkv_warp_rows=2)
    assert "a warpgroup is 4 warps" in objection(out_down=2)
    assert "is not of wgmma" in objection(out_warp_columns=6)
    assert "out_sum_tile 16" in objection(out_sum_tile=16)
    assert "out_sum_tile 32: operand A is streamed in tiles of 64" in objection(out_engine=STREAMED, out_sum_tile=32)
    assert "out_warp_columns 16 exceeds 8 of mma" in objection(out_engine="mma", out_warp_columns=16)
    for arch in ("sm_80", "sm_100"):
        assert (start := default(BlockSpec(256, 8, 128, 256, 1).problem("row"), target(arch))) is not None
        assert (start.qkv_engine, start.out_engine) == ("mma", "mma")


def test_a_search_starts_from_each_engine_and_keeps_to_it() -> None:
    problem = BlockSpec(256, 8, 128, 256, 1).problem("row")
    here = space(problem, TARGET, family="staged", fixed=parse_fixed(["math=fp16x3"]))
    engines = [(start.qkv_engine, start.out_engine) for start in here.starts() if isinstance(start, StagedConfig)]
    assert engines[0] == ("wgmma", "wgmma") and len(set(engines)) == len(engines) == 5
    assert (STREAMED, STREAMED) in engines
    assert len(alternatives(problem, target("sm_80"), "fp16x3")) == 1
    draw = random.Random(3)
    for start in here.starts():
        for names in StagedConfig.groups().values():
            focused = here.focused(names, start)
            found = {focused.random(draw) for _ in range(20)}
            assert len(found) > 5 and all(here.legal(config) for config in found)
    with pytest.raises(SpecError, match="has no wgmma"):
        space(problem, target("sm_80"), family="staged", fixed=parse_fixed(["qkv_engine=wgmma"]))
    fixed = space(problem, TARGET, family="staged", fixed=parse_fixed(["qkv_engine=mma"]))
    assert isinstance(fixed.start, StagedConfig) and fixed.start.qkv_engine == "mma" and fixed.legal(fixed.start)


def test_a_configuration_from_before_the_engines_is_one_of_mma() -> None:
    config = StagedConfig()
    old = {name: value for name, value in config.to_dict().items() if not name.endswith("_engine")}
    assert StagedConfig.from_dict(old) == config
    for name in ("math", "qkv_down"):
        with pytest.raises(SpecError, match="unknown or missing"):
            StagedConfig.from_dict({key: value for key, value in old.items() if key != name})
    with pytest.raises(SpecError, match="unknown or missing engine"):
        StagedConfig.from_dict({**old, "engine": "mma"})


LARGE = ((256, 8, 128, 256), (512, 8, 128, 128), (64, 4, 512, 512), (128, 8, 65, 130), (768, 12, 64, 196), (1152, 16, 16, 256))


@pytest.mark.parametrize("dtype", DTYPE_MATHS)
@pytest.mark.parametrize("shape", LARGE)
def test_defaults_of_large_blocks_are_of_wgmma_without_spills_or_conflicts(shape: tuple[int, int, int, int], dtype: str) -> None:
    spec = BlockSpec(*shape, batch=1, dtype=dtype, axes=("row",))
    config = default(spec.problem("row"), TARGET)
    long = shape[0] * (2 if dtype == "float32" else 1) >= 640
    assert config is not None and config.qkv_engine == config.out_engine == (STREAMED if long else "wgmma")
    plan = StagedPlan(spec.problem("row"), config)
    for product in plan.packed.values():
        assert set(product.conflicts().values()) == {0}
        assert product.buffers % 256 == product.b_tile % 256 == product.a_tile % 256 == 0, "a swizzled matrix starts on 1024 bytes"
        assert not product.streamed or product.columns * 16 * product.row_tiles >= 128 * 128, "little is read for each product"
    source = render(spec, {"row": config})
    assert source.arch(TARGET) == "sm_90a"
    used = compile_source(source, TARGET).resources
    assert len(used) == 4 + long and not any(used[f"axial_{kernel}"].local_bytes for kernel in ("pack", "row_qkv", "row_out"))


@pytest.mark.parametrize("warp_columns", COLUMN_TILES)
@pytest.mark.parametrize("math", ["bf16", "fp16"])
def test_each_width_of_an_instruction_assembles(math: str, warp_columns: int) -> None:
    dtype = next(name for name, maths in DTYPE_MATHS.items() if math in maths)
    spec = BlockSpec(256, 8, 128, 256, 1, dtype=dtype, axes=("row",))
    compile_source(rendered(spec, warp_columns=warp_columns), TARGET)


def test_packed_weights_are_scratch_of_one_size_for_every_batch() -> None:
    spec = dataclasses.replace(WIDE, dtype="bfloat16")
    source = rendered(spec)
    plan = StagedPlan(spec.problem("row"), by_warpgroups(spec))
    assert isinstance(plan.qkv, WarpgroupProduct)
    inner = 3 * 32  # heads of 24 channels take 32
    assert dict(source.packed) == {"row_packed_qkv": -(-3 * inner // 64) * 64 * 128, "row_packed_out": 128 * 128}
    assert source.buffers(3)["row_packed_out"] == source.buffers(1)["row_packed_out"]
    pack = source.kernels[0]
    assert pack.count(spec, 1) == pack.count(spec, 7) == (5 * 64 * 128 + 128 * 128) // 8
    assert pack.arguments == ("row_qkv_weight", "row_out_weight", "row_packed_qkv", "row_packed_out")


PAIR = BlockSpec(dim=72, heads=3, height=19, width=35, batch=1)


def pair(dtype: str, col: tuple[str, ...] = BOTH) -> tuple[Source, dict[str, Config]]:
    """A block of which both axes have products by warpgroups, the columns those of `col`."""
    spec = dataclasses.replace(PAIR, dtype=dtype)
    groups = {"row": BOTH, "col": col}
    configs: dict[str, Config] = {axis: by_warpgroups(dataclasses.replace(spec, axes=(axis,)), groups[axis]) for axis in spec.axes}
    return render(spec, configs), configs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("col", [BOTH, ("out",), ()], ids=["both", "out", "none"])
def test_one_kernel_packs_for_both_axes(dtype: str, col: tuple[str, ...], cache: Path, tmp_path: Path) -> None:
    source, configs = pair(dtype, col)
    pack, *others = source.kernels
    assert pack.name == "axial_pack" and not any(kernel.name.endswith("pack") for kernel in others)
    assert {name for name, _ in source.packed} == {"row_packed_qkv", "row_packed_out", *(f"col_packed_{name}" for name in col)}
    assert pack.tensor(source.spec, "row_qkv_weight") == "row_qkv.weight"
    assert right(source, cache)
    text = write_module(tmp_path, source, configs, PREDICTED, TARGET).read_text()
    assert text.count("launch_kernel(how, handles, {data(row_qkv_weight), data(row_out_weight), ") == 1
    assert read_module(next(tmp_path.glob("axial_*.py"))).source == source


def test_an_axis_packs_behind_a_kernel_that_does_not(cache: Path) -> None:
    start = sequence_default(PAIR.problem("row"), TARGET)
    assert start is not None
    source = render(PAIR, {"row": start, "col": by_warpgroups(dataclasses.replace(PAIR, axes=("col",)))})
    assert [kernel.name for kernel in source.kernels][:2] == ["axial_pack", "axial_row"]
    assert not source.kernels[1].dependent_launch, "or what follows it would not know that packing has ended"
    assert right(source, cache)


def test_a_module_names_arguments_that_a_block_has(tmp_path: Path) -> None:
    source, configs = pair("bfloat16")
    path = write_module(tmp_path, source, configs, PREDICTED, TARGET)
    text = path.read_text()
    for odd in ("qkv_weight", "row_x", "depth_qkv_weight"):
        path.write_text(text.replace('"row_qkv_weight"', f'"{odd}"', 1))
        with pytest.raises(SpecError, match=f"'{odd}' is no argument"):
            read_module(path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_module_of_such_kernels_is_built_for_the_architecture_alone(dtype: str, tmp_path: Path) -> None:
    spec = dataclasses.replace(WIDE, dtype=dtype)
    configs = {"row": by_warpgroups(spec)}
    source = render(spec, configs)
    path = write_module(tmp_path, source, configs, PREDICTED, TARGET)
    module = read_module(path)
    assert module.configs == configs and module.source == source
    assert "arch=compute_90a,code=sm_90a" in path.read_text() and "sm90_predicted" in path.name
