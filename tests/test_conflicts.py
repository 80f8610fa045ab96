"""Shared memory without bank conflicts: what the layouts state, and what the kernels do when they run on the emulator."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from pathlib import Path

import pytest
import torch

from benchmarks.cases import SHAPES as COMPARED
from benchmarks.cases import Shape
from codegen.families import FAMILIES, plan_of
from codegen.reference import random_input, random_weights
from codegen.render import Source, render
from codegen.sequence import DTYPE_MATHS, HALF_PARTS, SequenceConfig, SequencePlan, default, kept_place
from codegen.spec import DTYPES as ELEMENTS
from codegen.spec import BlockSpec
from codegen.target import target
from emulated import right, source_of
from tuner.emulator import Emulator, SharedTraffic

SM90 = target("sm_90")
DTYPES = {"fp16x3": "float32", "bf16": "bfloat16", "fp16": "float16"}
SHAPES = ((64, 4, 32, 32), (128, 8, 65, 65), (96, 3, 20, 17), (40, 5, 9, 24))


def plans(math: str, heads: str, head_warps: int = 1) -> list[SequencePlan]:
    found = []
    for (dim, count, height, width), lanes in itertools.product(SHAPES, (4, 8, 16, 32)):
        problem = BlockSpec(dim, count, height, width, dtype=DTYPES[math]).problem("row")
        start = default(problem, SM90, math)
        assert start is not None
        config = dataclasses.replace(start, heads=heads, head_warps=head_warps, norm_lanes=lanes, residual="shared")
        found.append(SequencePlan(problem, config))
    return found


@pytest.mark.parametrize("heads, head_warps", [("shared", 1), ("registers", 1), ("registers", 2)])
@pytest.mark.parametrize("math", HALF_PARTS)
def test_operands_of_16_bits_are_stored_and_read_without_conflicts(math: str, heads: str, head_warps: int) -> None:
    for plan in plans(math, heads, head_warps):
        names = {"normed", "query", "kept"} | (set() if (heads, head_warps) == ("registers", 1) else {"key", "value"})
        assert {buffer.name for buffer in plan.layout.buffers} == names
        for name in names:
            conflicts = plan.layout[name].conflicts()
            assert {"residual" if name == "kept" else "fragment load"} <= set(conflicts) and len(conflicts) == 2, (name, conflicts)
            assert set(conflicts.values()) == {0}, (plan.config, name, conflicts)


def test_a_store_of_half_a_quadruple_would_conflict() -> None:
    """What the stores were before: 8 bytes a lane, 16 bytes apart, or 4 of them."""
    from codegen.layout import Access

    assert Access("half", 2, lambda lane: (0, 4 * lane)).conflicts(128) > 0
    assert Access("quarter", 1, lambda lane: (0, 4 * lane)).conflicts(128) > 0


def test_a_layernorm_store_needs_the_padding_that_the_layout_finds() -> None:
    plan = plans("fp16x3", "registers")[1]
    packed = SequencePlan(plan.problem, dataclasses.replace(plan.config, padding=False))
    assert packed.layout["normed"].conflicts()["LayerNorm store"] > 0
    assert packed.layout["normed"].stride < plan.layout["normed"].stride


@pytest.mark.parametrize("lanes", SequenceConfig.tunables()["norm_lanes"])
@pytest.mark.parametrize("dtype", ELEMENTS)
def test_kept_tokens_are_stored_and_read_without_conflicts(dtype: str, lanes: int) -> None:
    """Whatever else is chosen: their layout depends on the channels, and on how many of them a lane stores."""
    vectors = set()
    for dim, fragment in itertools.product((*range(1, 73), *range(75, 273, 7), 128, 256), (2, 4)):
        config = SequenceConfig(math=DTYPE_MATHS[dtype][0], norm_lanes=lanes, fragment=fragment, residual="shared")
        plan = SequencePlan(BlockSpec(dim, 1, 4, 17, dtype=dtype).problem("row"), config)
        kept = plan.layout["kept"]
        assert kept.conflicts() == {"residual": 0, "kept store": 0} and kept.stride < kept.columns + 12, (dim, kept)
        vectors.add(plan.norm_vector)
    assert vectors == ({2, 4} if dtype == "float32" else {2, 4, 8})


def test_kept_tokens_change_places_within_eight() -> None:
    assert [kept_place(g) for g in range(8)] == [0, 4, 2, 6, 1, 5, 3, 7]


def traffic(source: Source, cache: Path) -> list[SharedTraffic]:
    """Of the accesses that a run of one image executes."""
    generator = torch.Generator().manual_seed(1)
    weights, x = random_weights(source.spec, generator), random_input(source.spec, generator, batch=1)
    return Emulator(source, cache).shared_traffic(x, weights)


def conflicts(source: Source, cache: Path) -> dict[str, float]:
    """Kernel -> the part of its wavefronts that bank conflicts add, of the accesses that a run executes."""
    wavefronts: Counter[str] = Counter()
    added: Counter[str] = Counter()
    for found in traffic(source, cache):
        wavefronts[found.kernel] += found.wavefronts
        added[found.kernel] += found.conflicts
    return {kernel: added[kernel] / count for kernel, count in wavefronts.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [s for s in COMPARED if s.name not in ("seed_b1", "seed_b64", "grid128")], ids=lambda shape: shape.name)
@pytest.mark.parametrize("family", FAMILIES)
def test_default_kernels_run_without_conflicts(family: str, shape: Shape, dtype: str, cache: Path) -> None:
    """What is chosen for the whole shape, on a few rows of it."""
    spec = BlockSpec(shape.dim, shape.heads, shape.height, shape.width, shape.batch, dtype, ("row",))
    config = FAMILIES[family].default(spec.problem("row"), SM90)
    if config is None:
        pytest.skip(f"{family} has no kernel for it")
    few = dataclasses.replace(spec, height=8 if family == "sequence" else max(2, getattr(config, "sequences", 1)), batch=1)
    assert not (reasons := plan_of(few.problem("row"), config).reasons(SM90)), reasons
    found = conflicts(render(few, {"row": config}), cache)
    assert found and max(found.values()) < 0.02, (config, found)


def keeping(dim: int, dtype: str, **changes: int) -> Source:
    spec = BlockSpec(dim, 4 if dim % 4 == 0 else 3, 2, 32, batch=1, dtype=dtype, axes=("row",))
    return source_of(spec, "sequence", residual="shared", **changes)


@pytest.mark.parametrize(
    "dim, dtype, lanes",
    [(64, "float32", 4), (64, "bfloat16", 8), (64, "float16", 4), (33, "float32", 16), (33, "bfloat16", 8), (33, "float16", 32)],
)
def test_kernels_that_keep_tokens_run_without_conflicts(dim: int, dtype: str, lanes: int, cache: Path) -> None:
    source = keeping(dim, dtype, norm_lanes=lanes)
    assert conflicts(source, cache) == {"axial_row": 0.0} and right(source, cache)


def test_kept_tokens_in_the_order_of_rows_would_conflict(cache: Path) -> None:
    source = keeping(64, "bfloat16", norm_lanes=8)
    plain = dataclasses.replace(source, text=source.text.replace("kept_place(g)", "g").replace("kept_place(lane / 4)", "lane / 4"))
    assert plain.text != source.text and conflicts(plain, cache)["axial_row"] > 0.02
