"""Shared memory of the sequence family: 16-bit operands are stored and read without bank conflicts."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from codegen.sequence import HALF_PARTS, SequencePlan, default
from codegen.spec import BlockSpec
from codegen.target import target

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
        for name in names - {"kept"}:
            conflicts = plan.layout[name].conflicts()
            assert {"fragment load"} <= set(conflicts) and len(conflicts) == 2, (name, conflicts)
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
