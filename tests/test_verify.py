"""Verification: what is right is accepted, each way of being wrong is rejected, and its stage is named."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from codegen.reference import ModelSDPA, random_input, random_weights
from codegen.spec import AXES, BlockSpec
from faulty_block import Block, Product, bf16, fp32, tf32, tf32x3
from tuner.probes import STAGES
from tuner.verify import UNLOCATED, Checker, check, diagnose

SPEC = BlockSpec(24, 3, 10, 13, 2)
CHECKER = Checker(SPEC, seed=1)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """These tensors are too small to be worth a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# Planted fault -> the stage that must be accused and a part of what must be said of it.
FAULTS = {
    "x missing": ("residual", "x is not added"),
    "x doubled": ("residual", "twice"),
    "x subtracted": ("residual", "subtracted"),
    "normalised x added": ("residual", "normalised x"),
    "last token unwritten": ("residual", "never written"),
    "bias missing": ("output bias", "missing"),
    "bias twice": ("output bias", "twice"),
    "output transposed": ("output product", "transposed"),
    "output product missing": ("output product", "as it is"),
    "output product in bf16": ("output product", "inexact"),
    "last output of the output product dropped": ("output product", "channels 23 are left out"),
    "attention dead": ("output product", "adds nothing"),
    "last input of the output product dropped": ("weighted sum", "channels 23"),
    "heads reversed": ("weighted sum", "heads in another order: 0 holds 2, 2 holds 0"),
    "heads and channels interleaved": ("weighted sum", "interleaved"),
    "last head dropped": ("weighted sum", "channels 16..23"),
    "last key dropped": ("weighted sum", "are ignored"),
    "causal": ("weighted sum", "causal"),
    "k and v swapped": ("QKV product", "k and v swapped"),
    "q and v swapped": ("QKV product", "q and v swapped"),
    "qkv transposed": ("QKV product", "transposed"),
    "qkv read as (dim, 3 dim)": ("QKV product", "(dim, 3 dim)"),
    "packed by head": ("QKV product", "order (head, q/k/v, channel)"),
    "last input of the QKV product dropped": ("QKV product", "channels 23"),
    "eps 1e-6": ("LayerNorm", "eps is 1e-06, not 1e-05"),
    "eps 1e-3": ("LayerNorm", "eps is 0.001, not 1e-05"),
    "eps missing": ("LayerNorm", "eps is missing"),
    "bessel": ("LayerNorm", "dim - 1"),
    "rmsnorm": ("LayerNorm", "RMSNorm"),
    "mean not subtracted": ("LayerNorm", "mean not subtracted"),
    "no norm": ("LayerNorm", "not normalised"),
    "gain missing": ("LayerNorm", "(gain) missing"),
    "beta missing": ("LayerNorm", "bias missing"),
    "other axis": ("LayerNorm", "other axis"),
    "q and k swapped": ("scores", "q and k swapped"),
    "no scale": ("scores", "not scaled by 1/sqrt(head_dim)"),
    "scale of dim": ("scores", "1/sqrt(dim)"),
    "scale 1/head_dim": ("scores", "1/head_dim"),
    "scale 10% off": ("scores", "1.1/sqrt(head_dim)"),
    "not normalised": ("softmax", "not normalised"),
    "divided by the number of keys": ("softmax", "number of keys"),
    "padded key counted": ("softmax", "padded keys counted"),
    "base 2": ("softmax", "base 2"),
    "over queries": ("softmax", "over the queries"),
    "maximum not subtracted": ("softmax", "is the maximum subtracted?"),
    "tiles not rescaled": ("softmax", "not rescaled"),
}


def right(x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    return Block(SPEC)(x, weights)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_rejected_and_its_stage_named(fault: str, axis: str) -> None:
    block = Block(SPEC, fault, axis)
    found = CHECKER(block)
    assert not found.ok and found.cause
    diagnosis = diagnose(SPEC, block)
    stage, detail = FAULTS[fault]
    assert (diagnosis.axis, diagnosis.stage) == (axis, stage), str(diagnosis)
    assert detail in diagnosis.detail
    assert diagnosis.error > 1e-5 and not diagnosis.ok


def test_every_stage_has_planted_faults() -> None:
    assert {stage for stage, _ in FAULTS.values()} == set(STAGES)


def test_a_diagnosis_reads_as_a_sentence() -> None:
    assert str(diagnose(SPEC, Block(SPEC, "bias missing", "row"))) == (
        "row attention: output bias: missing (y equals the reference without it)"
    )


@pytest.mark.parametrize("product", [fp32, tf32x3])
def test_the_right_block_is_accepted_with_room_to_spare(product: Product) -> None:
    found = CHECKER(Block(SPEC, product=product))
    assert found.ok and not found.cause
    assert 0 < found.error < 3e-6 and found.branch_error < 3e-6
    assert diagnose(SPEC, Block(SPEC, product=product)).ok


@pytest.mark.parametrize("product", [tf32, bf16])
def test_one_product_of_rounded_operands_is_rejected(product: Product) -> None:
    found = CHECKER(Block(SPEC, product=product))
    assert not found.ok
    assert found.branch_error > 3e-5
    assert "inexact" in diagnose(SPEC, Block(SPEC, product=product)).detail


def test_plain_tf32_is_accepted_when_the_tolerance_is_relaxed() -> None:
    assert Checker(SPEC, seed=1, tolerance=1e-2)(Block(SPEC, product=tf32)).ok


SHAPES = st.builds(
    lambda heads, head_dim, height, width, batch, axes: BlockSpec(heads * head_dim, heads, height, width, batch, axes=axes),
    st.integers(1, 3),
    st.integers(8, 40),
    st.integers(1, 19),
    st.integers(1, 35),
    st.integers(1, 3),
    st.sampled_from([("row",), ("col",), AXES]),
)


@settings(max_examples=25, deadline=None)
@given(SHAPES, st.integers(0, 1 << 30), st.sampled_from([fp32, tf32x3]))
def test_no_false_alarm_for_any_shape_and_seed(spec: BlockSpec, seed: int, product: Product) -> None:
    block = Block(spec, product=product)
    found = check(spec, block, seed)
    assert found.ok, found
    diagnosis = diagnose(spec, block, seed)
    assert diagnosis.ok, str(diagnosis)


@settings(max_examples=25, deadline=None)
@given(
    SHAPES,
    st.integers(0, 1 << 30),
    st.sampled_from(
        (
            "bias missing",
            "no scale",
            "output transposed",
            "eps 1e-6",
            "k and v swapped",
            "x missing",
            "not normalised",
            "heads reversed",
            "qkv transposed",
            "maximum not subtracted",
        )
    ),
)
def test_faults_are_named_for_any_shape_and_seed(spec: BlockSpec, seed: int, fault: str) -> None:
    axis = spec.axes[-1]
    length = spec.problem(axis).length
    invisible = (length == 1 and fault in ("no scale", "not normalised")) or (spec.heads == 1 and fault == "heads reversed")
    block = Block(spec, fault, axis)
    diagnosis = diagnose(spec, block, seed)
    if invisible:
        assert diagnosis.ok
        return
    assert not check(spec, block, seed).ok
    stage, detail = FAULTS[fault]
    assert (diagnosis.axis, diagnosis.stage) == (axis, stage), str(diagnosis)


@pytest.mark.parametrize("heads, dim, height, width", [(1, 1, 3, 2), (1, 2, 1, 1), (2, 2, 2, 3), (3, 9, 2, 2), (1, 7, 4, 1)])
@pytest.mark.parametrize("seed", range(5))
def test_the_smallest_blocks_are_accepted(heads: int, dim: int, height: int, width: int, seed: int) -> None:
    spec = BlockSpec(dim, heads, height, width, 1)
    assert check(spec, Block(spec), seed).ok
    assert diagnose(spec, Block(spec), seed).ok


def test_returns_zeros() -> None:
    """Zeros instead of a result."""
    assert not CHECKER(lambda x, w: torch.zeros_like(x)).ok


def test_returns_x() -> None:
    """A dead branch behind the residual."""
    found = CHECKER(lambda x, w: x.clone())
    assert not found.ok and "adds nothing" in found.cause


def test_small_branch_is_not_hidden_by_the_residual() -> None:
    """A branch that is wrong by a thousandth where x is a hundred times its size."""

    def runner(x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        return x + 1.001 * (right(x, weights) - x)

    found = CHECKER(runner)
    assert not found.ok and found.branch_error > 1e-4


def test_half_of_the_output_unwritten() -> None:
    """Poison left in the output."""

    def runner(x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        y = right(x, weights)
        y[:, 5:] = math.nan
        return y

    found = CHECKER(runner)
    assert not found.ok and found.error == math.inf
    assert "3120 of 6240 elements are not finite" in found.cause


def test_left_over_results_of_an_earlier_run() -> None:
    """A runner that computes each case once and then hands out the memory of that run."""
    memory: list[Tensor] = []

    def runner(x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        if len(memory) < len(checker.cases):
            memory.append(right(x, weights))
            return memory[-1]
        memory.append(memory.pop(0))
        return memory[-1]

    checker = Checker(SPEC, seed=3)
    assert checker(runner).ok
    assert not checker(runner).ok


@pytest.mark.parametrize("offset", [1e-3, 1e-4])
def test_off_by_a_constant(offset: float) -> None:
    """An output shifted by a thousandth or a tenth of that."""
    assert not CHECKER(lambda x, w: right(x, w) + offset).ok


def test_off_by_1e_4_of_the_scale() -> None:
    """An error that is proportional to the output."""
    assert not CHECKER(lambda x, w: right(x, w) * (1 + 1e-4)).ok


def test_one_wrong_element() -> None:
    """An error in a single element, at another place each time."""
    calls = iter(range(100))

    def runner(x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        y = right(x, weights)
        y.view(-1)[(7919 * next(calls)) % y.numel()] += 1e-3
        return y

    assert not CHECKER(runner).ok


def test_right_for_the_tuned_batch_only() -> None:
    """Another batch returns x."""
    found = CHECKER(lambda x, w: right(x, w) if x.shape[0] == SPEC.batch else x.clone())
    assert not found.ok and "batch 1" in found.cause


def test_wrong_shape_dtype_and_overwritten_input() -> None:
    assert "float64" in CHECKER(lambda x, w: right(x, w).double()).cause
    assert "(1, 2, 10, 13, 24)" in CHECKER(lambda x, w: right(x, w)[None]).cause

    def in_place(x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        return x.copy_(right(x, weights))

    assert "overwritten" in CHECKER(in_place).cause


def test_a_runner_that_raises_is_not_silenced() -> None:
    def runner(x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        raise RuntimeError("illegal access")

    with pytest.raises(RuntimeError, match="illegal access"):
        CHECKER(runner)
    with pytest.raises(RuntimeError, match="illegal access"):
        diagnose(SPEC, runner)


def test_a_fault_of_large_batches_alone_is_found_but_not_located() -> None:
    spec = BlockSpec(16, 2, 4, 4, 5)
    diagnosis = diagnose(spec, lambda x, w: Block(spec)(x, w) + (0.1 if x.shape[0] > 2 else 0.0))
    assert diagnosis.stage == UNLOCATED and "unit scale" in str(diagnosis)


def test_a_checker_is_reproducible_and_each_call_has_fresh_inputs() -> None:
    seen: list[Tensor] = []

    def runner(x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        seen.append(x.clone())
        return right(x, weights)

    first, second = Checker(SPEC, seed=5, quick=True), Checker(SPEC, seed=5, quick=True)
    results = [first(runner), second(runner), first(runner)]
    assert results[0] == results[1] and results[2].ok
    a, b, c = (seen[i] for i in (0, 2, 4))
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_the_sdpa_form_passes() -> None:
    model = ModelSDPA.from_spec(SPEC)
    assert CHECKER(lambda x, w: torch.func.functional_call(model, dict(w), (x,)).detach()).ok


def test_repeats_run_each_case_again() -> None:
    block = Block(SPEC)
    assert Checker(SPEC, seed=1, quick=True, repeats=3)(block).ok
    assert block.calls == 6


def test_random_cases_follow_the_generator() -> None:
    draws = [(random_weights(SPEC, g), random_input(SPEC, g)) for g in (torch.Generator().manual_seed(9), torch.Generator().manual_seed(9))]
    assert torch.equal(draws[0][1], draws[1][1])
    assert all(torch.equal(draws[0][0][name], draws[1][0][name]) for name in draws[0][0])
