"""Key mask and logit bias: their random draws, queries without keys, the faults that a verification names, and the model's costs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from torch import Tensor

from codegen import terms
from codegen.reference import Model, ModelSDPA, parameter_shapes, random_input, random_weights, reference
from codegen.spec import BlockSpec
from tuner.verify import Checker, diagnose

MASK = BlockSpec(24, 3, 10, 13, 2, key_mask=True)
BIAS = BlockSpec(24, 3, 10, 13, 2, logit_bias=True)
BOTH = dataclasses.replace(MASK, logit_bias=True)
CHECKERS = {spec: Checker(spec, seed=1) for spec in (MASK, BIAS, BOTH)}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """These tensors are too small to be worth a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_names_shapes_and_types_follow_the_flags() -> None:
    assert terms.term_shapes(BlockSpec(), 7) == {} and terms.random_terms(BlockSpec()) == {}
    assert terms.term_shapes(BOTH, 7) == {"key_mask": (7, 10, 13), "row_bias": (3, 13, 13), "col_bias": (3, 10, 10)}
    assert list(terms.term_shapes(dataclasses.replace(BIAS, axes=("col",)), 1)) == ["col_bias"]
    drawn = terms.random_terms(dataclasses.replace(BOTH, dtype="bfloat16"))
    assert [t.dtype for t in drawn.values()] == [torch.bool, torch.bfloat16, torch.bfloat16]
    parameters, given = terms.split_terms(BOTH, random_weights(BOTH) | drawn)
    assert list(parameters) == list(parameter_shapes(BOTH)) and [t.shape for t in given] == [t.shape for t in drawn.values()]


@pytest.mark.parametrize("axes", [("row",), ("col",), ("row", "col")])
def test_drawn_masks_have_sequences_of_every_kind(axes: tuple[str, ...]) -> None:
    spec = BlockSpec(8, 1, 32, 40, 2, axes=axes, key_mask=True)
    mask = terms.random_terms(spec, torch.Generator().manual_seed(0))["key_mask"]
    for axis in axes:
        lines = terms.lines_of(axis, mask)
        keys = lines.sum(1)
        assert (keys == 0).any() and (keys == 1).any()
        densities = keys[(keys > 1) & (keys < lines.shape[1])]
        assert len(densities.unique()) > 4
    lines = terms.lines_of(axes[0], mask)
    if len(axes) == 1:
        assert any(line[: len(line) // 2].all() and not line[-1] for line in lines), "no masked tail"
        assert any(line[len(line) // 2 :].all() and not line[0] for line in lines), "no masked head"
    assert 0.1 < mask.double().mean() < 0.7


@pytest.mark.parametrize("form", [Model, ModelSDPA])
@pytest.mark.parametrize("spec", [MASK, BIAS, BOTH], ids=lambda spec: "+".join(spec.variants))
def test_a_query_without_keys_gets_the_bias_alone_and_finite_gradients(spec: BlockSpec, form: type[Model]) -> None:
    spec = dataclasses.replace(spec, axes=("row",))
    weights, x, given = random_weights(spec), random_input(spec), terms.random_terms(spec)
    rows = [0, 3, 7]
    if spec.key_mask:
        given["key_mask"][:, rows] = False
    else:
        given["row_bias"][:, rows] = -math.inf
    model = form.from_spec(spec)
    model.load_state_dict(weights)
    leaves = [t.clone().requires_grad_() if t.is_floating_point() else t for t in (x, *given.values())]
    y = model(*leaves)
    places = (slice(None), rows) if spec.key_mask else (slice(None), slice(None), rows)
    for got in (y, reference(spec, x, weights | given).float()):
        torch.testing.assert_close(got[places], x[places] + weights["row_out.bias"], rtol=1e-6, atol=1e-6)
    y.square().sum().backward()
    found = [t.grad for t in (*leaves, *model.parameters()) if t.requires_grad]
    assert all(grad is not None and grad.isfinite().all() for grad in found)


Given = Mapping[str, Tensor]


def swapped(names: str, change: Callable[[Tensor], Tensor]) -> Callable[[Given], Given]:
    return lambda given: {name: change(value) if name in names.split() else value for name, value in given.items()}


def _transposed(mask: Tensor) -> Tensor:
    return mask.reshape(mask.shape[0], mask.shape[2], mask.shape[1]).transpose(1, 2)


# Fault -> the block it is planted in, what it makes of the terms that a right block is then given, and what must be said.
FAULTS: dict[str, tuple[BlockSpec, Callable[[Given], Given], str]] = {
    "mask ignored": (MASK, swapped("key_mask", torch.ones_like), "row attention: scores: key mask ignored"),
    "mask inverted": (BOTH, swapped("key_mask", torch.logical_not), "row attention: scores: key mask inverted"),
    "mask shifted": (
        MASK,
        swapped("key_mask", lambda m: m.roll(1, 2)),
        "row attention: scores: key mask off by one token (the one before)",
    ),
    "mask shifted back": (BOTH, swapped("key_mask", lambda m: m.roll(-1, 2)), "key mask off by one token (the one behind)"),
    "columns' mask shifted": (MASK, swapped("key_mask", lambda m: m.roll(1, 1)), "row attention: scores: "),
    "mask of the other axis": (MASK, swapped("key_mask", _transposed), "key mask read along the other axis"),
    "mask of one image": (MASK, swapped("key_mask", lambda m: m[:1].expand_as(m)), "key mask of the first image"),
    "bias missing": (BIAS, swapped("row_bias col_bias", torch.zeros_like), "row attention: scores: logit bias missing"),
    "columns' bias missing": (BOTH, swapped("col_bias", torch.zeros_like), "col attention: scores: logit bias missing"),
    "bias transposed": (BIAS, swapped("col_bias", lambda b: b.transpose(1, 2)), "col attention: scores: logit bias transposed"),
    "bias without log2(e)": (BIAS, swapped("row_bias", lambda b: b * math.log(2)), "without the factor log2(e)"),
    "bias scaled like scores": (BOTH, swapped("row_bias", lambda b: b / math.sqrt(8)), "divided by sqrt(head_dim)"),
    "bias of one head": (BIAS, swapped("row_bias", lambda b: b[:1].expand_as(b)), "of the first head"),
    "bias of another key": (BIAS, swapped("row_bias", lambda b: b.roll(1, 2)), "off by one key (the one before)"),
    "bias of another query": (BIAS, swapped("row_bias", lambda b: b.roll(-1, 1)), "off by one query (the one behind)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_rejected_and_named(fault: str) -> None:
    spec, change, message = FAULTS[fault]

    def wrong(x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        return reference(spec, x, change(weights), torch.float32)

    assert not CHECKERS[spec](wrong).ok
    assert message in str(diagnose(spec, wrong))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, "a query whose keys are all masked gives NaN, not zero"),
        (0.0, "a query whose keys are all masked attends to all of them, not to none"),
    ],
)
def test_a_wrong_result_for_queries_without_keys_is_named(value: float, message: str) -> None:
    """What softmax gives for logits of minus infinity, and for ones of a large negative number."""

    def wrong(x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        for axis in MASK.axes:
            one = dataclasses.replace(MASK, axes=(axis,))
            mask = weights["key_mask"]
            none = ~mask.any(2 if axis == "row" else 1, keepdim=True)
            y = reference(one, x, {**weights, "key_mask": mask | none}, torch.float32)
            x = torch.where(none[..., None], y + value, y)
        return x

    assert not CHECKERS[MASK](wrong).ok
    assert str(diagnose(MASK, wrong)) == f"row attention: scores: {message}"


@pytest.mark.parametrize(
    ("shape", "dtype"), [((8, 1, 1, 1, 1), "float16"), ((32, 4, 3, 40, 1), "float32"), ((16, 2, 20, 2, 2), "bfloat16")]
)
@pytest.mark.parametrize("flags", [("key_mask",), ("logit_bias",), ("key_mask", "logit_bias")], ids="+".join)
def test_no_false_alarm(shape: tuple[int, ...], dtype: str, flags: tuple[str, ...]) -> None:
    spec = BlockSpec(*shape, dtype=dtype, **dict.fromkeys(flags, True))

    def right(x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        return reference(spec, x, weights, torch.float32).to(x.dtype)

    for seed in range(2):
        found = diagnose(spec, right, seed)
        assert found.ok, str(found)


def test_cases_in_another_order_keep_their_reference() -> None:
    case = CHECKERS[BOTH].cases[0].shuffled(torch.Generator().manual_seed(4))
    assert not torch.equal(case.x, CHECKERS[BOTH].cases[0].x)
    torch.testing.assert_close(reference(BOTH, case.x, case.weights), case.expected, rtol=1e-11, atol=1e-11)
