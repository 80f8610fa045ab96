"""The faults that tests on a GPU plant are where they should be: on the emulator they are caught as what they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from codegen.sequence import DTYPE_MATHS, alternatives
from codegen.spec import DTYPES, BlockSpec
from emulated import TARGET, error_of, right, source_of
from planted import SEQUENCE_SHAPES, behind_the_output, into_the_input, wrong_scale
from tuner.emulator import EmulationError


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_faults_of_16_bit_kernels(dtype: str, cache: Path) -> None:
    source = source_of(BlockSpec(64, 4, 2, 32, 1, dtype, ("row",)), "sequence")
    assert right(source, cache) and not right(wrong_scale(source), cache)
    with pytest.raises(EmulationError) as found:
        error_of(behind_the_output(source), cache)
    assert found.value.report.kind == "out_of_bounds"


def test_a_write_into_the_input(cache: Path) -> None:
    source = source_of(BlockSpec(64, 4, 2, 32, 1, axes=("row",)), "sequence", "tf32x3")
    with pytest.raises(EmulationError) as found:
        error_of(into_the_input(source), cache)
    assert "x" in str(found.value)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SEQUENCE_SHAPES)
def test_a_search_has_other_starts_for_the_blocks_that_are_measured(shape: tuple[int, int, int, int], dtype: str) -> None:
    spec = BlockSpec(*shape, batch=2, dtype=dtype)
    assert all(alternatives(spec.problem(axis), TARGET, DTYPE_MATHS[dtype][0]) for axis in spec.axes)
