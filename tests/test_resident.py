"""The resident family: a whole axis in one kernel, right on the emulator, planted faults, what is legal, and what compiles."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from benchmarks.cases import CASES, Case, select
from codegen.config import Config
from codegen.families import FAMILIES, plan_of
from codegen.module import read_module, write_module
from codegen.render import Source, render
from codegen.resident import DTYPE_MATHS, ResidentConfig, ResidentPlan, alternatives, default
from codegen.spec import BlockSpec
from codegen.target import target
from emitted import PREDICTED
from emulated import TARGET, right, source_of
from test_mutants import edited
from tuner.compile import compile_source
from tuner.emulator import EmulationError

# Two and a half row tiles in each of three sequences, of which a block has two: two of its eight warps have none, the last block is half
# full, and two tiles of the sums and three of the output's columns have zeros behind.
RAGGED = BlockSpec(dim=72, heads=3, height=3, width=35, batch=1, dtype="bfloat16", axes=("row",))
SMALL_TILES = dict(
    rows=1, sequences=2, head_group=1, overlap=True, sum_tile=64, stages=2, attention="mma", key_tile=16, sums="add", polynomial=0,
    result="scratch", out_columns=4, blocks=1,
)  # fmt: skip
# A sequence for wgmma's attention: two warpgroups with a row tile behind the sequence's end, and a last pair of tiles of keys that is
# masked in part.
WHOLE = BlockSpec(dim=72, heads=3, height=2, width=105, batch=1, dtype="bfloat16", axes=("row",))
BY_WGMMA = dict(sequences=1, attention="wgmma", stages=3)


def rendered(spec: BlockSpec = RAGGED, **changes: int | str | bool) -> Source:
    return source_of(spec, "resident", **{**SMALL_TILES, **changes})


@pytest.mark.parametrize(("dtype", "overlap"), [("float32", True), ("bfloat16", False), ("float16", True)])
def test_several_sequences_a_block_agree_with_float64(dtype: str, overlap: bool, cache: Path) -> None:
    source = rendered(dataclasses.replace(RAGGED, dtype=dtype), overlap=overlap)
    assert right(source, cache, "reverse" if overlap else "forward")


SHAPES: dict[str, tuple[BlockSpec, dict[str, int | str | bool]]] = {
    "one sequence a block": (BlockSpec(40, 5, 1, 80, 1, "float16", ("row",)), dict(sequences=1, stages=3, key_tile=80)),
    "two rows, the last warp has one": (BlockSpec(64, 2, 1, 113, 2, "bfloat16", ("row",)), dict(rows=2, sequences=1, key_tile=32)),
    "two rows of two sequences": (BlockSpec(33, 3, 52, 2, 1, "float32", ("col",)), dict(rows=2, key_tile=32)),
    "four rows": (BlockSpec(24, 2, 1, 200, 1, "float16", ("row",)), dict(rows=4, sequences=1, overlap=False)),
    "four rows of eight sequences": (BlockSpec(24, 2, 50, 9, 1, "bfloat16", ("col",)), dict(rows=4, sequences=4, stages=4, key_tile=32)),
    "eight short sequences": (BlockSpec(18, 3, 4, 11, 1, "bfloat16", ("col",)), dict(sequences=8, sums="product", polynomial=3)),
    "one head": (BlockSpec(63, 1, 2, 65, 1, "float32", ("row",), head_dim=20), dict(sequences=1)),
    "more buffers than weights": (BlockSpec(16, 1, 2, 48, 1, "bfloat16", ("row",)), dict(sequences=2, stages=4, overlap=False)),
    "all heads at once": (BlockSpec(48, 4, 3, 35, 1, "bfloat16", ("row",)), dict(head_group=4, overlap=False, result="shared")),
    "the ring goes round twice in a tile": (BlockSpec(72, 2, 2, 64, 1, "float16", ("row",)), dict(sum_tile=32, sequences=1, overlap=False)),
    "the ring goes round once in a tile": (
        BlockSpec(72, 2, 2, 64, 1, "bfloat16", ("row",)),
        dict(sum_tile=32, stages=4, sequences=1, overlap=False),
    ),
    "narrow steps": (BlockSpec(72, 2, 2, 64, 1, "float16", ("row",)), dict(sum_tile=32, stages=6, sequences=1)),
    "narrow steps, of which the first heads' result is several": (RAGGED, dict(sum_tile=32, stages=5)),
    "both parts of several heads in scratch, two rows": (
        BlockSpec(40, 5, 2, 64, 1, "float32", ("row",), head_dim=16),
        dict(rows=2, sequences=2, key_tile=32),
    ),
    "an odd number of fragments in shared memory": (BlockSpec(48, 3, 3, 48, 1, "bfloat16", ("row",)), dict(result="shared")),
    "both parts in shared memory": (BlockSpec(64, 2, 3, 48, 1, "float32", ("row",)), dict(result="shared", overlap=False, sum_tile=32)),
    "attention by wgmma": (WHOLE, dict(**BY_WGMMA, result="shared", polynomial=1)),
    "attention by wgmma, two rows": (
        BlockSpec(64, 2, 1, 128, 2, "float16", ("row",)),
        dict(**BY_WGMMA, rows=2, key_tile=32, overlap=False),
    ),
    "attention by wgmma, two sequences": (
        BlockSpec(64, 2, 3, 64, 1, "bfloat16", ("row",), head_dim=64),
        dict(**BY_WGMMA) | dict(sequences=2),
    ),
    "attention by wgmma with biases": (dataclasses.replace(WHOLE, qkv_bias=True), dict(**BY_WGMMA)),
    "attention by wgmma of narrow heads": (BlockSpec(32, 2, 1, 120, 1, "bfloat16", ("row",)), dict(**BY_WGMMA, key_tile=64)),
    "two heads at once": (BlockSpec(40, 4, 1, 80, 1, "float16", ("row",)), dict(sequences=1, key_tile=80, head_group=2, overlap=False)),
    "two heads at once beside two others": (BlockSpec(72, 4, 3, 35, 1, "bfloat16", ("row",)), dict(head_group=2, stages=3)),
    "two heads at once, both parts": (BlockSpec(24, 2, 3, 35, 1, "float32", ("row",)), dict(head_group=2, result="shared")),
    "four heads at once of eight sequences": (BlockSpec(32, 8, 11, 4, 1, "bfloat16", ("col",)), dict(head_group=4, sequences=4)),
    "two heads at once with biases and a mask": (
        BlockSpec(40, 4, 1, 80, 2, "bfloat16", ("row",), qkv_bias=True, key_mask=True, logit_bias=True),
        dict(sequences=1, head_group=2),
    ),
    "two heads at once by wgmma": (dataclasses.replace(WHOLE, heads=4), dict(**BY_WGMMA, head_group=2)),
    "wide heads": (BlockSpec(130, 2, 35, 2, 1, "bfloat16", ("col",), head_dim=64), dict(out_columns=8, stages=3)),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_each_shape_of_block_agrees_with_float64(shape: str, cache: Path) -> None:
    spec, changes = SHAPES[shape]
    order = ("forward", "reverse", "random:5")[list(SHAPES).index(shape) % 3]
    assert right(rendered(spec, **changes), cache, order)


@pytest.mark.parametrize("families", [("resident", "staged"), ("staged", "resident"), ("resident", "sequence"), ("sequence", "resident")])
def test_families_can_be_mixed(families: tuple[str, str], cache: Path) -> None:
    """The axes may share scratch buffers, and a kernel of `sequence` is launched before the one before it has ended."""
    spec = BlockSpec(dim=24, heads=2, height=5, width=33, batch=1, dtype="bfloat16")
    configs: dict[str, Config] = {}
    for axis, family in zip(spec.axes, families, strict=True):
        config = FAMILIES[family].default(spec.problem(axis), TARGET, "bf16")
        assert config is not None
        configs[axis] = config
    assert right(render(spec, configs), cache)


MUTANTS = {
    "no barrier before keys and values are overwritten": (r"(head > 0\)) __syncthreads\(\);", r"\1 ;"),
    "no barrier before keys and values are read": (r"(if \([^)]*\) )?__syncthreads\(\);  // keys and values", "//"),
    "no fence behind the tokens": (r"fence_async_proxy\(\);(\n *__syncthreads\(\);  // operand A)", r"\1"),
    "no barrier behind the tokens": (r"__syncthreads\(\);  // operand A and", "//"),
    "no fence behind the attention's result": (r"if \(C::SCRATCH\) fence_async_proxy_global\(\);\n *else ", ""),
    "no barrier behind the attention's result": (r"(else fence_async_proxy\(\);)\n *__syncthreads\(\);\n", r"\1\n"),
    "no fence behind the first heads' result": (r"if \(early\) fence_async_proxy_global\(\);", ""),
    "the first heads' result is not waited for": (r"(LATE > 0 && turn \+ next == 0\)) wait_for_bulk_copy\([^;]*;", r"\1 ;"),
    "the last heads' result is not waited for": (r"(next == LATE\)) wait_for_bulk_copy\([^;]*;", r"\1 ;"),
    "the last heads' result is taken from the first ones' place": (r"result \+ at, ", "result + at - FIRST * Second::A_TILE, "),
    "the last heads' result is waited for a tile too late": (r"LATE = EARLY_TILES", "LATE = (EARLY_TILES + 1)"),
    "all blocks have the first one's scratch": (r"blockIdx\.x\) \* RESULT", "blockIdx.x) * 0"),
    "the output's weights have another order of the sum": (r"k = k / 16 \* 16 \+ k % 16 / 4 \* 2 \+ k % 4 / 2 \* 8 \+ k % 2;", ""),
    "the ring has no end": (r"if \(\+\+filling == STAGES\) filling = 0;", "++filling;"),
    "no zeros behind the attention's result": (r"fill\(held, result[^;]*;", ""),
    "the output's bias does not come to shared memory": (r"store\(shared \+ C::BIAS \+ at, [^;]*;", ";"),
    "no barrier before a buffer is filled again": (r"__syncthreads\(\);  // the step before", "//"),
    "a buffer is filled again a step too early": (r"wgmma_wait<1>\(\);", ""),
    "a buffer is filled again with the step after": (r"next \+= words;", "next += filled == STAGES ? 0 : words;"),
    "buffers are filled again while they are read": (r"ring\.refill\(ring\.step\)", "ring.refill(ring.step + 1)"),
    "the copy is not waited for": (r"wait_for_bulk_copy\(ring\.shared .*\n", "\n"),
    "the wrong phase is waited for": (r"round % 2\)", "(round + 1) % 2)"),
    "the products are not waited for": (r"(finish\(float[^{]*\{\n *)wgmma_wait<0>\(\);", r"\1"),
    "weights of the output are taken from the start of the queries'": (r"next = packed_out;", ";"),
    "a step of the next head is left out": (
        r"\(each \* KEY_STEPS \+ key_step \+ 1\) \* First::SUM_TILES",
        "key_step * (First::SUM_TILES - 1)",
    ),
    "the result of all heads in the first one's place": (r"((softmax\.finish|keep_result)\([^;]*), head \+ each, lane\)", r"\1, 0, lane)"),
    "keys of the first sequence for all": (r"(within|first_key) = (?=[^;]*ROW_TILE)[^;]*", r"\1 = 0"),
    "keys and values swapped": (r"(acc(\[row\])?)\[STEPS \+ j\]", r"\1[2 * STEPS + j]"),
    "queries are not in units of the exponent": (r"\*= C::EXPONENT_SCALE", "*= 1.0f"),
    "sequences past the last one": (r"min\(row_tiles - first_tile, BLOCK_TILES\)", "BLOCK_TILES"),
    "sums of the output do not begin with the bias": (r"acc\[j \+ i / 4\]\[i % 4\] = bias\[[^]]*\]", "acc[j + i / 4][i % 4] = 0.0f"),
    "a row tile too few": (r"(end = min\(row_tiles - first_tile, BLOCK_TILES\))", r"\1 - 1"),
}
OF_TWO_PARTS = {  # float32, whose operands have rests
    "the rests of the first heads' result are not copied": (r"add_bulk_copy\(shared \+ at,[^;]*;", ";"),
    "rests of the result in the place of the result": (r"store_global\(a \+ which \* A_OPERAND \+ page", "store_global(a + page"),
}
OF_WGMMA_ATTENTION = {
    "no fence behind keys and values": (r"if constexpr \(S::BY_WARPGROUPS\) fence_async_proxy\(\);", ""),
    "keys and values are not swizzled": (r"at = swizzled<KEY_ROW>\((16 \* tile[^,]*), (.*)\);", r"at = (\1) * KEY_ROW + (\2) / 2;"),
    "values are not turned": (r"wgmma_turned\(Format", "wgmma(Format"),
    "keys have the queries' order of channels": (r"result_column<PADDED_HEAD_DIM / 4>\(at\)", "at"),
    "the scores are not waited for": (
        r"wgmma_wait<1>\(\);\n(#pragma unroll\n *for [^\n]*keep_in_registers\(p\[row\]\);\n *wgmma_fence)",
        r"\1",
    ),
    "the weighted sum is not waited for": (r"wgmma_wait<1>\(\);  // the weighted", "//"),
    "the last weighted sum is not waited for": (r"wgmma_wait<0>\(\);\n *keep_sums", "keep_sums"),
    "keys behind the end have weights": (r"p\[row\]\[j\]\[i\] = minus_infinity\(\)", "p[row][j][i] = 0.0f"),
    "each tile has the first one's keys": (r"keys \+ step \* S::KEY_TILE \* KEY_ROW", "keys"),
    "each tile has the first one's values": (r"values \+ \(step \* S::KEY_TILE \+ 16 \* k\)", "values + (16 * k)"),
}
OF_HEADS_AT_ONCE = {
    "both heads' keys and values in one place": (r"HEAD_WORDS = KEPT_TILES \* C::ROW_TILE", "HEAD_WORDS = 0"),
    "the first head's keys for both": (r"\.run\(keys \+ each \* HEAD_WORDS", ".run(keys"),
    "the first head's accumulators for both": (r"acc\[row\]\[each \* 3 \* STEPS\]", "acc[row][0]"),
    "the second head's result in the first one's place": (r"head \+ each, lane\)", "head, lane)"),
    "a head too few between groups": (r"head \+= GROUP", "head += GROUP - 1"),
    "steps for a group behind the last": (r"head \+ GROUP < C::HEADS", "head + 1 < C::HEADS"),
}
OF_TWO_ROWS = {  # a warp that has two row tiles, and a block that has more warps than row tiles
    "row tiles lie in their order": (r"return \(warp / 4 \* ROWS \+ tile % ROWS\) \* 4 \+ warp % 4;", "return tile;"),
    "both rows have the first one's tokens": (r"a \+= Product::ROWS_OF_A", "a += 0"),
    "the second row's result is the first one's": (r"first_tile \+ tile \+ row, first_tile", "first_tile + tile, first_tile"),
}


def caught(source: Source, pattern: str, replacement: str, cache: Path) -> bool:
    mutant = edited(source, pattern, replacement)
    try:
        return not right(mutant, cache)
    except EmulationError as error:
        assert error.report.kind != "compile", f"the mutant does not compile, so it shows nothing: {error}"
        return True


@pytest.mark.parametrize("fault", MUTANTS)
def test_a_planted_fault_is_caught(fault: str, cache: Path) -> None:
    assert caught(rendered(), *MUTANTS[fault], cache), fault


@pytest.mark.parametrize("fault", OF_TWO_PARTS)
def test_a_fault_in_results_of_two_parts_is_caught(fault: str, cache: Path) -> None:
    assert caught(rendered(dataclasses.replace(RAGGED, dtype="float32")), *OF_TWO_PARTS[fault], cache), fault


def test_a_result_that_is_copied_over_tokens_in_use_is_caught(cache: Path) -> None:
    """Ahead of the last heads' product, which multiplies them."""
    source = edited(rendered(overlap=False), r"\n *if \(early && threadIdx\.x == 0\) copy_result<0, EARLY_TILES>\([^;]*;", "")
    copy = (
        "if (head == C::HEADS - GROUP) {\n fence_async_proxy_global();\n __syncthreads();\n"
        " if (threadIdx.x == 0) copy_result<0, EARLY_TILES>(shared, result, EARLY_BARRIER);\n }\n"
    )
    pattern = r"( *if \(!C::OVERLAP \|\| head == 0\) multiply_all<Qkv>)"
    assert caught(source, pattern, copy + r"\1", cache)


def test_scratch_that_changes_while_it_is_copied_is_caught(cache: Path) -> None:
    changed = r"\1\n        __syncthreads();\n        if (early && threadIdx.x == 64) result[0] += 1.0f;"
    mutant = edited(rendered(overlap=False), r"(copy_result<0, EARLY_TILES>\([^;]*;)", changed)
    assert mutant.text.count("threadIdx.x == 64") == 1
    with pytest.raises(EmulationError, match="changes the source of a bulk copy under way"):
        right(mutant, cache)


def test_a_wrong_assumption_for_the_compiler_is_caught(cache: Path) -> None:
    # 72 channels in tiles of 32 columns
    mutant = edited(rendered(), r"if constexpr \(C::DIM % C::Out::COLUMNS == 0\) __builtin_assume", "__builtin_assume")
    assert mutant.text.count("__builtin_assume") == 1
    with pytest.raises(EmulationError, match="assume what does not hold"):
        right(mutant, cache)


@pytest.mark.parametrize("fault", OF_WGMMA_ATTENTION)
def test_a_fault_in_wgmmas_attention_is_caught(fault: str, cache: Path) -> None:
    assert caught(rendered(WHOLE, **BY_WGMMA), *OF_WGMMA_ATTENTION[fault], cache), fault


def test_a_lost_fragment_in_shared_memory_is_caught(cache: Path) -> None:
    spec, changes = SHAPES["an odd number of fragments in shared memory"]
    assert caught(rendered(spec, **changes), r"fill\(held, result[^;]*;", "", cache)


def test_the_bias_of_keys_in_the_queries_order_is_caught(cache: Path) -> None:
    spec, changes = SHAPES["attention by wgmma with biases"]
    assert caught(rendered(spec, **changes), r"channel = S::BY_WARPGROUPS && j >= STEPS \?[^:]*: ", "channel = ", cache)


@pytest.mark.parametrize("fault", OF_HEADS_AT_ONCE)
def test_a_fault_among_heads_at_once_is_caught(fault: str, cache: Path) -> None:
    spec, changes = SHAPES["two heads at once beside two others"]
    assert caught(rendered(spec, **changes), *OF_HEADS_AT_ONCE[fault], cache), fault


@pytest.mark.parametrize("fault", OF_TWO_ROWS)
def test_a_fault_in_the_order_of_rows_is_caught(fault: str, cache: Path) -> None:
    spec, changes = SHAPES["two rows of two sequences"]
    assert caught(rendered(dataclasses.replace(spec, dtype="bfloat16"), **changes), *OF_TWO_ROWS[fault], cache), fault


@pytest.mark.parametrize("result", ["scratch", "shared"])
def test_the_emulator_says_which_fence_is_missing(result: str, cache: Path) -> None:
    fence = {"scratch": "fence_async_proxy_global()", "shared": "fence_async_proxy()"}[result]
    mutant = edited(rendered(result=result), r"if \(C::SCRATCH\) fence_async_proxy_global\(\);\n *else fence_async_proxy\(\);", "")
    with pytest.raises(EmulationError, match=f"wrote without {re.escape(fence)} since"):
        right(mutant, cache)


def test_what_it_needs_is_said() -> None:
    def objection(spec: BlockSpec = RAGGED, arch: str = "sm_90", **changes: int | str | bool) -> str:
        config = dataclasses.replace(ResidentConfig(), **{**SMALL_TILES, **changes})
        return "; ".join(ResidentPlan(spec.problem("row"), config).reasons(target(arch)))

    assert not objection()
    for arch in ("sm_80", "sm_100", "sm_120"):
        assert f"{arch} has no wgmma" in objection(arch=arch)
        assert default(RAGGED.problem("row"), target(arch)) is None
    assert "math fp16 is not for bfloat16" in objection(math="fp16")
    assert "q, k, v of a head have 288 columns, over 256" in objection(dataclasses.replace(RAGGED, head_dim=96))
    assert "q, k, v of 4 heads have 384 columns, over 256" in objection(dataclasses.replace(RAGGED, heads=4), head_group=4)
    assert "head_group 2 does not divide 3 heads" in objection(head_group=2)
    assert "there are only 3 sequences" in objection(sequences=4)
    assert "rows 2 does not divide the 3 row tiles" in objection(rows=2)
    assert "rows 4 leaves half of the block without tokens" in objection(rows=4, sequences=1)
    assert "key_tile 32" in objection(key_tile=32)
    assert "out_columns 24 exceeds what 72 channels need" in objection(out_columns=24)
    assert "not of one sequence of 3 row tiles" in objection(attention="wgmma")
    assert "no rests, which math fp16x3 has" in objection(dataclasses.replace(WHOLE, dtype="float32"), math="fp16x3", **BY_WGMMA)
    assert "no key mask and no logit bias" in objection(dataclasses.replace(WHOLE, key_mask=True), **BY_WGMMA)
    assert "rows of 16, 32 or 64 channels, not 48" in objection(dataclasses.replace(WHOLE, head_dim=48), **BY_WGMMA)
    assert "key_tile 48: 96 keys do not divide the 128" in objection(WHOLE, **{**BY_WGMMA, "key_tile": 48})
    assert "adds up weights in lanes" in objection(WHOLE, sums="product", **BY_WGMMA)
    assert "polynomial has no zero" in objection(dataclasses.replace(RAGGED, logit_bias=True), polynomial=1)
    assert "sums product needs weights of 16 bits" in objection(dataclasses.replace(RAGGED, dtype="float32"), math="fp16x3", sums="product")
    assert "bytes of shared memory exceed" in objection(dataclasses.replace(RAGGED, dim=1152, heads=48))
    assert "threads exceed 512" in objection(dataclasses.replace(RAGGED, width=528), sequences=1)
    for spec in (dataclasses.replace(RAGGED, width=1024), BlockSpec(512, 8, 128, 128, 1)):
        assert default(spec.problem("row"), TARGET) is None, "more tokens than a block has shared memory for"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_starts_of_measured_cases_have_no_bank_conflicts_and_whole_swizzled_tiles(case: Case) -> None:
    spec = case.spec()
    for axis in spec.axes:
        problem = spec.problem(axis)
        for config in alternatives(problem, TARGET, DTYPE_MATHS[spec.dtype][0]):
            plan = plan_of(problem, config)
            assert isinstance(plan, ResidentPlan) and not plan.reasons(TARGET)
            assert all(set(product.conflicts().values()) == {0} for product in plan.packed.values())
            starts = (plan.ring, plan.ring_tile, plan.qkv.b_tile, plan.out.b_tile)
            assert not any(words % 256 for words in starts), "a swizzled matrix starts on 1024 bytes"
            assert plan.keys % 4 == plan.values % 4 == plan.barriers % 2 == plan.bias % 4 == 0
            assert config.attention != "wgmma" or plan.keys % 256 == plan.values % 256 == 0, "keys and values are swizzled as well"


@pytest.mark.parametrize(
    ("name", "dtype"), [("seed", "float32"), ("deeplab", "bfloat16"), ("msa", "bfloat16"), ("wide512", "bfloat16"), ("long", "bfloat16")]
)
def test_defaults_of_measured_cases_compile_and_hardly_spill(name: str, dtype: str) -> None:
    spec = dataclasses.replace(select([name], [dtype])[0].spec(), axes=("row",))
    config = default(spec.problem("row"), TARGET)
    assert config is not None
    source = render(spec, {"row": config})
    assert source.arch(TARGET) == "sm_90a"
    used = compile_source(source, TARGET).resources
    assert list(used) == ["axial_pack", "axial_row_block"] and max(each.local_bytes for each in used.values()) <= 16, (config, used)


def test_one_kernel_computes_the_axis_and_scratch_holds_the_result_alone() -> None:
    source = rendered()
    pack, block = source.kernels
    assert (pack.name, block.name) == ("axial_pack", "axial_row_block")
    assert block.threads == 256 and block.count(RAGGED, 2) == 2 * 3 * 3 and block.blocks(RAGGED, 1) == 2
    assert dict(source.scratch) == {"attended": 2 * (8 * 16) * 128}, "as operand A, of whole blocks and whole tiles of the sum"
    assert set(dict(source.packed)) == {"row_packed_qkv", "row_packed_out"}
    assert dict(source.packed)["row_packed_qkv"] == 3 * (3 * 32) * 128, "a tile of columns is a head"
    assert source.buffers(3)["row_packed_out"] == source.buffers(1)["row_packed_out"]
    named = ("x", "norm_weight", "norm_bias", "row_packed_qkv", "attended", "y", "row_packed_out", "out_bias")
    assert block.arguments == named


def test_overlap_makes_no_difference_to_one_head() -> None:
    spec = dataclasses.replace(RAGGED, heads=1, head_dim=24)
    sources = [rendered(spec, overlap=overlap).digest for overlap in (True, False)]
    assert sources[0] == sources[1]
    assert ResidentPlan(spec.problem("row"), ResidentConfig()).representative == {"overlap": False}
    assert ResidentPlan(RAGGED.problem("row"), ResidentConfig()).representative == {"overlap": True}


def test_alternatives_are_of_both_instructions_with_and_without_overlap() -> None:
    found = alternatives(BlockSpec(64, 4, 64, 64, 4, "bfloat16").problem("row"), TARGET, "bf16")
    assert [(config.attention, config.overlap) for config in found] == [("mma", False), ("mma", True), ("wgmma", False), ("wgmma", True)]
    found = alternatives(BlockSpec(64, 4, 65, 65, 4, "float32").problem("row"), TARGET, "fp16x3")
    assert {config.attention for config in found} == {"mma"}


def test_a_module_is_written_and_read_back(tmp_path: Path) -> None:
    configs: dict[str, Config] = {"row": dataclasses.replace(ResidentConfig(), **SMALL_TILES)}
    source = render(RAGGED, configs)
    path = write_module(tmp_path, source, configs, PREDICTED, TARGET)
    module = read_module(path)
    assert module.configs == configs and module.source == source
    assert "arch=compute_90a,code=sm_90a" in path.read_text()
