"""Kernels that begin before the kernel in front of them has ended: who does, in every mix of families, and that a missing wait is found."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from codegen import resident, sequence, staged
from codegen.config import Config
from codegen.families import plan_of
from codegen.render import Source, render
from codegen.spec import BlockSpec
from emulated import TARGET, right
from tuner.compile import compile_source
from tuner.emulator import EmulationError
from tuner.finals import combinations
from tuner.space import space

SPEC = BlockSpec(dim=72, heads=3, height=35, width=40, batch=1, dtype="bfloat16")


def config(name: str, spec: BlockSpec, axis: str) -> Config:
    """A small configuration of a family; of `staged` by `mma`, or with all products by `wgmma`, or only that of `out`."""
    problem = spec.problem(axis)
    family, _, engines = name.partition(" ")
    if family == "staged":
        plain, wgmma = (staged.default(problem, TARGET, None, engine) for engine in ("mma", "wgmma"))
        assert plain is not None and wgmma is not None
        of_wgmma = {n: v for n, v in dataclasses.asdict(wgmma).items() if n.split("_")[0] in engines.split("+")}
        found: Config | None = dataclasses.replace(plain, **of_wgmma)
    else:
        found = {"sequence": sequence, "resident": resident}[family].default(problem, TARGET, "bf16")
    assert found is not None and not plan_of(problem, found).reasons(TARGET)
    return found


def mixed(row: str, col: str, spec: BlockSpec = SPEC) -> Source:
    return render(spec, {"row": config(row, spec, "row"), "col": config(col, spec, "col")})


# Families of the rows and of the columns -> the kernels that begin early
MIXES = {
    ("resident", "resident"): ["row_block", "col_block"],
    ("resident", "sequence"): ["row_block", "col"],
    ("resident", "staged qkv+out"): ["row_block"],
    ("sequence", "resident"): ["col_block"],
    ("staged", "resident"): ["col_block"],
    ("staged qkv", "resident"): ["row_qkv", "col_block"],
    ("staged qkv+out", "staged qkv+out"): ["row_qkv"],
}


@pytest.mark.parametrize("families", MIXES, ids="-".join)
def test_kernels_wait_in_every_mix_of_families(families: tuple[str, str], cache: Path) -> None:
    source = mixed(*families)
    assert [k.name.removeprefix("axial_") for k in source.kernels if k.dependent_launch] == MIXES[families]
    assert not source.kernels[0].dependent_launch, "the forward before has ended"
    assert right(source, cache, "reverse")


@pytest.mark.parametrize(
    "families, wait",
    [
        (("resident", "resident"), r"wait_for_previous_kernel\(\);  // the weights are packed.*"),
        (("resident", "resident"), r"wait_for_previous_kernel\(\);  // which writes x"),
        (("sequence", "resident"), r"wait_for_previous_kernel\(\);  // which writes x"),
        (("staged qkv+out", "staged"), r"if \(threadIdx\.x == 0\) wait_for_previous_kernel\(\);"),
    ],
    ids=["weights", "x", "x behind sequence", "weights of staged"],
)
def test_a_missing_wait_is_found(families: tuple[str, str], wait: str, cache: Path) -> None:
    source = mixed(*families)
    text, count = re.subn(wait, "", source.text)
    assert count == 1
    with pytest.raises(EmulationError) as caught:
        right(dataclasses.replace(source, text=text), cache)
    assert caught.value.report.kind == "previous_kernel"


def test_a_kernel_that_does_not_wait_is_found_where_it_is_launched_as_if_it_did(cache: Path) -> None:
    """Nothing behind the rows of `sequence` would know that packing has ended."""
    source = mixed("sequence", "resident")
    kernels = tuple(dataclasses.replace(k, dependent_launch=k.dependent_launch or k.name == "axial_row") for k in source.kernels)
    with pytest.raises(EmulationError, match="axial_row.*wait_for_previous_kernel"):
        right(dataclasses.replace(source, kernels=kernels), cache)


@pytest.mark.parametrize("families", [("resident", "sequence"), ("staged qkv", "sequence")], ids="-".join)
def test_a_wait_behind_the_first_copy_is_found(families: tuple[str, str], cache: Path) -> None:
    source = mixed(*families)
    late = "wait_for_previous_kernel();\n    __syncthreads();  // operand A and the barriers are there for all"
    text = re.sub(r"(if \(threadIdx\.x == 0\) )?wait_for_previous_kernel\(\);  // the weights are packed.*", "", source.text)
    text, count = re.subn(r"__syncthreads\(\);  // operand A and the barriers are there for all", late, text)
    assert count and text != source.text
    with pytest.raises(EmulationError, match="packed_.*wait_for_previous_kernel"):
        right(dataclasses.replace(source, text=text), cache)


def test_a_wait_of_one_thread_counts_for_others_behind_a_barrier_alone(cache: Path) -> None:
    source = mixed("resident", "resident")
    pattern = r"wait_for_previous_kernel\(\);  // which writes x"
    text, count = re.subn(pattern, "if (threadIdx.x == 0) wait_for_previous_kernel();", source.text)
    assert count == 1
    with pytest.raises(EmulationError, match="wait_for_previous_kernel"):
        right(dataclasses.replace(source, text=text), cache)
    text = re.sub(pattern, "if (threadIdx.x == 0) wait_for_previous_kernel();\n  __syncthreads();", source.text)
    assert right(dataclasses.replace(source, text=text), cache)


@pytest.mark.parametrize("dependent", [True, False])
def test_the_tunable_turns_it_off(dependent: bool, cache: Path) -> None:
    configs: dict[str, Config] = {}
    for axis in SPEC.axes:
        start = config("resident", SPEC, axis)
        assert isinstance(start, resident.ResidentConfig)
        configs[axis] = dataclasses.replace(start, dependent_launch=dependent)
    source = render(SPEC, configs)
    assert [kernel.dependent_launch for kernel in source.kernels] == [False, dependent, dependent]
    assert right(source, cache)


def test_a_norm_behind_the_residual_is_launched_normally(cache: Path) -> None:
    spec = dataclasses.replace(SPEC, post_norm=True)
    source = mixed("resident", "resident", spec)
    names = [kernel.name.removeprefix("axial_") for kernel in source.kernels]
    assert names == ["pack", "row_block", "row_norm", "col_block", "col_norm"]
    assert [kernel.dependent_launch for kernel in source.kernels] == [False, True, False, True, False]
    assert right(source, cache)


def test_a_search_keeps_it_and_the_pairs_try_without() -> None:
    problem = SPEC.problem("row")
    assert space(problem, TARGET, family="resident").values["dependent_launch"] == (True,)
    configs = {axis: config("resident", SPEC, axis) for axis in SPEC.axes}
    pairs = combinations(SPEC, {axis: [found] for axis, found in configs.items()}, configs, TARGET)
    assert [[c.to_dict()["dependent_launch"] for c in pair.configs.values()] for pair in pairs] == [[True, True], [False, False]]


def test_kernels_that_wait_compile_without_spills() -> None:
    for families in (("resident", "resident"), ("staged qkv+out", "sequence")):
        used = compile_source(mixed(*families), TARGET).resources
        assert not any(resources.local_bytes for resources in used.values())
