"""The float64 reference and the PyTorch forms: one block, computed in independent ways, must agree."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from codegen import reference as ref
from codegen.spec import AXES, BlockSpec
from codegen.terms import random_terms
from variants import EACH

SPECS = st.builds(
    lambda heads, head_dim, height, width, batch, axes, more: BlockSpec(heads * head_dim, heads, height, width, batch, axes=axes, **more),
    st.integers(1, 3),
    st.integers(1, 12),
    st.integers(1, 7),
    st.integers(1, 7),
    st.integers(1, 2),
    st.sampled_from([("row",), ("col",), AXES]),
    st.sampled_from([{}, *EACH.values()]),
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def by_loops(spec: BlockSpec, x: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """The block from its definition, one token and head at a time, sharing nothing with the reference."""
    y = x.double()
    no_bias = torch.zeros(3 * spec.inner, dtype=torch.float64)
    for axis in spec.axes:
        gain, shift, qkv, qkv_bias, out, out_bias = (
            weights[f"{axis}_{name}"].double() if f"{axis}_{name}" in weights else neutral
            for name, neutral in (
                ("norm.weight", 1.0), ("norm.bias", 0.0), ("qkv.weight", None), ("qkv.bias", no_bias),
                ("out.weight", None), ("out.bias", 0.0),
            )
        )  # fmt: skip
        assert isinstance(qkv, Tensor) and isinstance(qkv_bias, Tensor) and isinstance(out, Tensor)

        def norm(tokens: Tensor, gain: Tensor | float = gain, shift: Tensor | float = shift) -> Tensor:
            if spec.norm == "none":
                return tokens
            centred = tokens - (tokens.mean(1, keepdim=True) if spec.norm == "layer" else 0.0)
            return centred / (centred.pow(2).mean(1, keepdim=True) + spec.eps).sqrt() * gain + shift

        result = y.clone()
        lines = [(b, i) for b in range(y.shape[0]) for i in range(spec.problem(axis).lines)]
        for b, i in lines:
            line = y[b, i] if axis == "row" else y[b, :, i]
            normed = line if spec.post_norm else norm(line)
            parts = [slice(part * spec.inner, (part + 1) * spec.inner) for part in range(3)]
            q, k, v = (normed @ qkv[part].T + qkv_bias[part] for part in parts)
            heads = []
            for head in range(spec.heads):
                s = slice(head * spec.head_dim, (head + 1) * spec.head_dim)
                scores = q[:, s] @ k[:, s].T / math.sqrt(spec.head_dim)
                powers = torch.exp(scores + weights[f"{axis}_bias"][head].double() if spec.logit_bias else scores)
                if spec.key_mask:
                    mask = weights["key_mask"]
                    powers = powers * (mask[b, i] if axis == "row" else mask[b, :, i])
                total = powers.sum(1, keepdim=True)
                heads.append(torch.where(total > 0, powers @ v[:, s] / total, 0.0))
            line = torch.cat(heads, 1) @ out.T + out_bias + (line if spec.residual else 0.0)
            line = norm(line) if spec.post_norm else line
            if axis == "row":
                result[b, i] = line
            else:
                result[b, :, i] = line
        y = result
    return y


@settings(max_examples=25, deadline=None)
@given(SPECS, st.integers(0, 1000))
def test_reference_equals_the_definition(spec: BlockSpec, seed: int) -> None:
    g = generator(seed)
    weights, x = ref.random_weights(spec, g) | random_terms(spec, g), ref.random_input(spec, g)
    torch.testing.assert_close(ref.reference(spec, x, weights), by_loops(spec, x, weights), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("variant", ["", *EACH])
@pytest.mark.parametrize("form", [ref.Model, ref.ModelSDPA])
@pytest.mark.parametrize("axes", [("row",), ("col",), AXES])
def test_pytorch_forms_equal_the_reference(form: type[ref.Model], axes: tuple[str, ...], variant: str) -> None:
    spec = BlockSpec(12, 3, 5, 7, 2, axes=axes, **{"eps": 1e-3, **EACH.get(variant, {})} if variant != "no norm" else EACH[variant])
    g = generator()
    weights, x, terms = ref.random_weights(spec, g), ref.random_input(spec, g), random_terms(spec, g)
    model = form.from_spec(spec).double()
    model.load_state_dict({name: tensor.double() for name, tensor in weights.items()}, strict=True)
    given = (t if t.dtype == torch.bool else t.double() for t in terms.values())
    torch.testing.assert_close(model(x.double(), *given), ref.reference(spec, x, weights | terms), rtol=1e-11, atol=1e-11)


def test_parameters_are_drawn_in_order_with_the_usual_names() -> None:
    torch.manual_seed(42)
    model = ref.Model(8, 2, 3, 3)
    torch.manual_seed(42)
    expected: dict[str, Tensor] = {}
    for axis in AXES:
        parts = {"norm": torch.nn.LayerNorm(8), "qkv": torch.nn.Linear(8, 24, bias=False), "out": torch.nn.Linear(8, 8)}
        expected |= {f"{axis}_{part}.{name}": tensor for part, module in parts.items() for name, tensor in module.state_dict().items()}
    state = model.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == ref.parameter_shapes(model.spec)


def test_parameters_of_a_variant_are_drawn_in_order() -> None:
    torch.manual_seed(42)
    model = ref.Model(8, 2, 3, 3, axes=("row",), head_dim=5, qkv_bias=True, out_bias=False, norm="rms", eps=1e-3)
    torch.manual_seed(42)
    parts = {"norm": torch.nn.RMSNorm(8, 1e-3), "qkv": torch.nn.Linear(8, 30), "out": torch.nn.Linear(10, 8, bias=False)}
    expected = {f"row_{part}.{name}": tensor for part, module in parts.items() for name, tensor in module.state_dict().items()}
    state = model.state_dict()
    assert list(state) == list(expected) == list(ref.parameter_shapes(model.spec))
    assert all(torch.equal(state[name], expected[name]) for name in expected) and model.row_norm.eps == 1e-3


def test_sequences_are_split_without_changing_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = BlockSpec(8, 2, 5, 6, 3)
    g = generator()
    weights, x = ref.random_weights(spec, g), ref.random_input(spec, g)
    whole = ref.reference(spec, x, weights)
    monkeypatch.setattr(ref, "SCORE_LIMIT", 200)
    torch.testing.assert_close(ref.reference(spec, x, weights), whole, rtol=1e-13, atol=1e-13)


def test_batch_is_free_and_may_be_empty() -> None:
    spec = BlockSpec(8, 2, 3, 4, 2)
    g = generator()
    weights = ref.random_weights(spec, g)
    assert ref.random_input(spec, g).shape == (2, 3, 4, 8)
    assert ref.reference(spec, ref.random_input(spec, g, batch=5), weights).shape == (5, 3, 4, 8)
    assert ref.reference(spec, torch.empty(0, 3, 4, 8), weights).shape == (0, 3, 4, 8)


def test_no_random_weight_is_trivial() -> None:
    for name, tensor in ref.random_weights(BlockSpec(16, 2, 3, 3), generator()).items():
        assert tensor.abs().min() > 0 and tensor.std() > 0.05, name
        assert (tensor != 1).all(), name
