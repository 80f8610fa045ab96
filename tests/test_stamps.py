"""Stamps of the clock in kernels (benchmarks/stages.py): where they stand, that such kernels compile, and what is made of the cycles."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.stages import RESIDENT, STAMPS, resident_names, stamped, stamped_resident, summary
from codegen import resident, sequence
from codegen.render import render
from codegen.spec import BlockSpec, SpecError
from codegen.target import target
from tuner.compile import compile_source


def test_stamps_stand_at_each_stages_end_and_compile() -> None:
    to = target("sm_90")
    spec = BlockSpec(16, 2, 5, 7, axes=("row",))
    config = sequence.default(spec.problem("row"), to)
    assert config is not None
    shares = BlockSpec(16, 2, 5, 17, axes=("row",))
    split = replace(config, head_warps=2, qkv_rows=1, out_rows=1)
    kernels = [(spec, replace(config, heads=heads, qkv_columns=2), STAMPS[heads]) for heads in STAMPS]
    for block, chosen, names in (*kernels, (shares, split, STAMPS["shared"])):
        source = stamped(render(block, {"row": chosen}), len(names))
        assert [source.text.count(f"  stamp({stage});\n") for stage in range(len(names))] == [1] * len(names)
        assert compile_source(source, to).resources["axial_row"].registers > 16
    both = sequence.default(spec.problem("row"), to)
    two = BlockSpec(16, 2, 5, 7)
    with pytest.raises(SpecError, match="only the sequence family"):
        stamped(render(two, {axis: both for axis in two.axes}), 6)


@pytest.mark.parametrize(
    ("spec", "changes"),
    [
        (BlockSpec(72, 4, 2, 128, dtype="bfloat16", axes=("row",)), {}),
        (BlockSpec(72, 4, 2, 35, axes=("row",), qkv_bias=True, out_bias=False, residual=False, key_mask=True), {"head_group": 2}),
    ],
)
def test_stamps_stand_at_each_stage_of_a_resident_kernel_and_compile(spec: BlockSpec, changes: dict[str, int]) -> None:
    to = target("sm_90")
    config = resident.default(spec.problem("row"), to)
    assert config is not None
    config = replace(config, **changes)
    names = resident_names(resident.ResidentPlan(spec.problem("row"), config))
    source = stamped_resident(render(spec, {"row": config}), len(names))
    assert source.text.count("stamp(event++);") == sum(text.count("stamp(event++);") for _, text in RESIDENT)
    assert compile_source(source, to).resources["axial_row_block"].registers > 16
    assert names.count("attention") == names.count("its result") == spec.heads, "each head has its own"
    assert names.count("QKV product") == spec.heads // config.head_group and names[-1] == "stores"
    with pytest.raises(SpecError, match="0 places"):
        stamped_resident(replace(source, text=source.text.replace("keep_result(softmax", "keep(softmax")), len(names))


def test_cycles_of_stages_are_put_together_by_name() -> None:
    names, values = ("start", "a", "barrier", "b", "barrier"), (5.0, 15.0, 20.0, 120.0, 135.0)
    assert summary(names, values) == [("start", 1, 5.0), ("a", 1, 10.0), ("barrier", 2, 10.0), ("b", 1, 100.0)]
