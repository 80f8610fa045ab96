"""The element types: what they store, which arithmetics they have, what their kernels and verification do that float32's do not."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from codegen import staged
from codegen.families import FAMILIES
from codegen.layout import Access
from codegen.reference import parameter_shapes, random_input, random_weights, reference, torch_dtype
from codegen.render import Kernel, Source, render
from codegen.sequence import DTYPE_MATHS, SequenceConfig, SequencePlan, default
from codegen.spec import DTYPES, BlockSpec, SpecError, parse_dtype
from codegen.target import target
from faulty_block import Block
from tuner.emulator import EmulationError, Emulator
from tuner.space import parse_fixed, space
from tuner.streamed_work import streamed_parts
from tuner.trial import Resources
from tuner.verify import Checker, diagnose
from tuner.work import parts

SM90 = target("sm_90")
HALVES = ("bfloat16", "float16")
RAGGED = BlockSpec(dim=33, heads=3, height=5, width=18, batch=1)


def configs_of(spec: BlockSpec, **changes: int | str | bool) -> dict[str, SequenceConfig]:
    found: dict[str, SequenceConfig] = {}
    for axis in spec.axes:
        config = default(spec.problem(axis), SM90)
        assert config is not None
        found[axis] = replace(config, **changes)  # type: ignore[arg-type]
        assert not SequencePlan(spec.problem(axis), found[axis]).reasons(SM90)
    return found


def emulated(spec: BlockSpec, cache: Path, **changes: int | str | bool) -> Emulator:
    return Emulator(render(spec, configs_of(spec, **changes)), cache)


# -- the specification and the space


def test_names_and_sizes() -> None:
    assert [BlockSpec(dtype=dtype).name.rsplit("_", 1)[1] for dtype in DTYPES] == ["fp32", "bf16", "fp16"]
    assert [BlockSpec(dtype=dtype).itemsize for dtype in DTYPES] == [4, 2, 2]
    assert [parse_dtype(text) for text in ("fp32", "bf16", "fp16", *DTYPES)] == [*DTYPES, *DTYPES]
    for unknown in ("float64", "half", ""):
        with pytest.raises(SpecError, match="float32, bfloat16, float16"):
            parse_dtype(unknown)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_type_has_arithmetics_of_its_own(dtype: str) -> None:
    problem = BlockSpec(dtype=dtype).problem("row")
    here = space(problem, SM90)
    assert here.start.math == DTYPE_MATHS[dtype][0] and set(here.values["math"]) <= set(DTYPE_MATHS[dtype])
    for other in set(DTYPES) - {dtype}:
        foreign = DTYPE_MATHS[other][0]
        assert any("is not for" in reason for reason in SequencePlan(problem, replace(here.start, math=foreign)).reasons(SM90))
        with pytest.raises(SpecError, match=f"math {foreign} is not for {dtype}: choose"):
            space(problem, SM90, fixed=parse_fixed([f"math={foreign}"]))


def test_operands_of_16_bits_take_half_the_memory_and_their_stores_do_not_conflict() -> None:
    plans = {dtype: SequencePlan(BlockSpec(dtype=dtype).problem("row"), configs_of(BlockSpec(dtype=dtype))["row"]) for dtype in DTYPES}
    for dtype in HALVES:
        assert plans[dtype].shared_bytes <= 0.52 * plans["float32"].shared_bytes
        assert plans[dtype].registers < plans["float32"].registers
        spread = SequencePlan(plans[dtype].problem, replace(plans[dtype].config, residual="shared"))
        assert spread.layout["kept"].columns == 32
        assert spread.layout["kept"].conflicts() == {"residual": 0, "kept store": 0}
    assert isinstance(plans["bfloat16"].layout["normed"].accesses[0], Access)


def test_lanes_load_16_bytes_where_none_is_left_idle() -> None:
    def vector(dim: int, lanes: int, dtype: str = "bfloat16", fragment: int = 2) -> int:
        spec = BlockSpec(dim=dim, heads=1, dtype=dtype)
        return SequencePlan(
            spec.problem("row"), SequenceConfig(math=DTYPE_MATHS[dtype][0], norm_lanes=lanes, fragment=fragment)
        ).norm_vector

    assert [vector(64, 8), vector(64, 16), vector(128, 16), vector(36, 8), vector(33, 8), vector(72, 8)] == [8, 4, 8, 4, 2, 8]
    assert vector(64, 8, "float32") == 4
    assert vector(64, 8, fragment=4) == 4, "a lane with two quadruples would store them with conflicts"


def test_the_model_expects_16_bit_kernels_to_take_less() -> None:
    used = Resources(80, 0, 0)
    single, half = (
        parts(SequencePlan(spec.problem("row"), configs_of(spec)["row"]), used, SM90) for spec in (BlockSpec(), BlockSpec(dtype="bfloat16"))
    )
    assert half.grid == single.grid / 2 and half.weights == single.weights / 2
    assert half.tensor == pytest.approx(single.tensor / 3)
    assert half.issue < single.issue and half.serial < single.serial and half.shared < single.shared


def test_the_model_expects_16_bit_kernels_of_the_staged_family_to_take_less() -> None:
    used = {stage: Resources(128, 0, 60_000) for stage in ("qkv", "attention", "out")}
    specs = [BlockSpec(dim=256, heads=8, height=128, width=128, dtype=dtype) for dtype in ("float32", "bfloat16")]
    start = staged.default(specs[0].problem("row"), SM90, engine="mma")
    assert start is not None
    plans = [
        staged.StagedPlan(spec.problem("row"), replace(start, math=math)) for spec, math in zip(specs, ("tf32x3", "bf16"), strict=True)
    ]
    single, half = (streamed_parts(plan, used, SM90) for plan in plans)
    assert half.grid == single.grid / 2 and half.weights == single.weights / 2 and half.shared == single.shared / 2
    assert half.tensor == pytest.approx(single.tensor / 6)
    assert half.issue < single.issue and half.serial < single.serial


# -- the emulator


def source_of(body: str, dtype: str = "bfloat16", threads: int = 32, pointer: str = "unsigned short") -> Source:
    """A kernel on one line of 3 tokens of 11 channels: 33 elements, so that two threads write the halves of a word."""
    spec = BlockSpec(dim=11, heads=1, height=1, width=3, batch=1, dtype=dtype, axes=("row",))
    parameters = f"const {pointer}* x, {pointer}* y, " + ", ".join(f"const {pointer}* w{i}" for i in range(5))
    text = f'extern "C" __global__ void axial_row({parameters}, int sequences) {{\n  const int t = threadIdx.x;\n  {body}\n}}\n'
    return Source(spec, text, (Kernel("axial_row", "row", threads, 256, 1, False),))


def run(source: Source, cache: Path, x: Tensor | None = None) -> tuple[Tensor, Tensor]:
    x = random_input(source.spec) if x is None else x
    return x, Emulator(source, cache).run(x, random_weights(source.spec))


def test_neighbours_within_a_word_do_not_race(cache: Path) -> None:
    x, y = run(source_of("if (t < 33) y[t] = x[t];", threads=64), cache)
    assert y.dtype == torch.bfloat16 and torch.equal(x, y)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("y[t / 2] = x[t];", "race"),
        ("y[t + 2] = x[t];", "out_of_bounds"),
        ("if (t < 33) y[t] = x[t + 1];", "out_of_bounds"),
        ("if (t < 16) y[t] = x[t]; if (t == 0) y[20] = y[16];", "uninitialised"),
        ("reinterpret_cast<unsigned*>(y + 1)[0] = 0u;", "misaligned"),
        ("const_cast<unsigned short*>(x)[t] = 0;", "read_only"),
    ],
)
def test_faults_on_single_elements_are_found(body: str, kind: str, cache: Path) -> None:
    with pytest.raises(EmulationError) as caught:
        run(source_of(body, threads=64 if kind != "read_only" else 32), cache)
    assert caught.value.report.kind == kind, caught.value


def test_elements_that_nothing_writes_stay_nan_and_places_are_elements(cache: Path) -> None:
    for dtype in HALVES:
        _, y = run(source_of("if (t < 16) y[2 * t] = x[t];", dtype), cache)
        assert y.flatten()[1::2].isnan().all() and y.flatten()[:32:2].isfinite().all()
    with pytest.raises(EmulationError, match=r"reads 2 bytes of y\[0, 0, 1, 5\]"):
        run(source_of("if (t == 0) y[0] = y[16];"), cache)


EDGES = [0.0, -0.0, 1.0, 1.00390625, 1.01171875, 3.3895e38, -3.4e38, 1e-40, -1e-45, math.inf, -math.inf, math.nan, 65519.9, 65520.0]


def test_conversions_are_those_of_the_types(cache: Path) -> None:
    """To nearest, ties to even, subnormal numbers and overflow included; the first value is in the low half."""
    values = torch.cat([torch.tensor(EDGES), torch.randn(50) * 10.0 ** torch.linspace(-30, 30, 50)])
    spec = BlockSpec(dim=64, heads=1, height=1, width=2, batch=1, axes=("row",))
    x = torch.zeros(1, 1, 2, 64)
    x.view(-1)[:64] = values
    for pack, dtype in (("pack_bf16", torch.bfloat16), ("pack_fp16", torch.float16)):
        text = source_of(f"y[t] = __uint_as_float({pack}(x[2 * t], x[2 * t + 1]));", pointer="float").text
        _, y = run(Source(spec, text, (Kernel("axial_row", "row", 32, 256, 1, False),)), cache, x)
        got, expected = y.view(-1)[:32].contiguous().view(dtype), values.to(dtype)
        assert torch.equal(got.isnan(), expected.isnan())
        assert torch.equal(got.nan_to_num(7.0).view(torch.int16), expected.nan_to_num(7.0).view(torch.int16))


def test_bfloat16_product(cache: Path) -> None:
    """mma.m16n8k16's fragments on x's first 16x16 and 16x8 values; sums are fp32."""
    body = """const int g = t / 4, q = t % 4;
  const unsigned* a = reinterpret_cast<const unsigned*>(x);
  const unsigned short* b = x + 256;
  float c[4] = {};
  unsigned left[4], right[2];
  for (int r = 0; r < 4; ++r) left[r] = a[8 * (g + 8 * (r % 2)) + q + 4 * (r / 2)];
  for (int r = 0; r < 2; ++r) right[r] = b[8 * (2 * q + 8 * r) + g] | unsigned(b[8 * (2 * q + 8 * r + 1) + g]) << 16;
  mma_m16n8k16_bf16(c, left, right[0], right[1]);
  unsigned* out = reinterpret_cast<unsigned*>(y);
  for (int r = 0; r < 4; ++r) out[8 * (g + 8 * (r / 2)) + 2 * q + r % 2] = __float_as_uint(c[r]);"""
    spec = BlockSpec(dim=16, heads=1, height=1, width=24, batch=1, dtype="bfloat16", axes=("row",))
    x, y = run(Source(spec, source_of(body).text, (Kernel("axial_row", "row", 32, 256, 1, False),)), cache)
    a, b = x.flatten()[:256].double().view(16, 16), x.flatten()[256:].double().view(16, 8)
    torch.testing.assert_close(y.flatten()[:256].view(torch.float32).view(16, 8).double(), a @ b, rtol=1e-6, atol=1e-6)


def test_tensors_of_another_type_are_refused(cache: Path) -> None:
    spec = replace(RAGGED, dtype="bfloat16")
    emulator = emulated(spec, cache)
    with pytest.raises(SpecError, match="x must be bfloat16"):
        emulator.run(random_input(RAGGED), random_weights(spec))
    with pytest.raises(SpecError, match="must be bfloat16"):
        emulator.run(random_input(spec), random_weights(RAGGED))


# -- verification


def rounded(spec: BlockSpec, fault: str = "", axis: str = "", to: torch.dtype | None = None) -> object:
    """The float32 block with operands and output rounded to an element type, the specification's unless given."""
    dtype = torch_dtype(spec)
    operands = to or dtype
    block = Block(spec, fault, axis, lambda a, b: a.to(operands).float() @ b.to(operands).float())
    return lambda x, weights: block(x.float(), {name: value.float() for name, value in weights.items()}).to(dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("residual", "spec"), [("shared", RAGGED), ("reload", replace(RAGGED, dim=40, heads=2)), ("shared", BlockSpec(batch=1))]
)
def test_kernels_hold_twice_the_error_of_pytorchs_form(dtype: str, residual: str, spec: BlockSpec, cache: Path) -> None:
    spec = replace(spec, dtype=dtype)
    found = Checker(spec, seed=1)(emulated(spec, cache, residual=residual).run)
    assert found.ok, found


SHAPES = st.builds(
    lambda heads, head_dim, height, width, batch, dtype: BlockSpec(heads * head_dim, heads, height, width, batch, dtype),
    st.integers(1, 3), st.integers(8, 40), st.integers(1, 19), st.integers(1, 35), st.integers(1, 2), st.sampled_from(HALVES),
)  # fmt: skip


@settings(max_examples=20, deadline=None, derandomize=True)
@given(SHAPES, st.integers(0, 1 << 30))
@example(BlockSpec(30, 3, 9, 28, 2, "float16"), 4991)  # large scores, which the reference rounds to float16
@example(BlockSpec(8, 1, 1, 1, 1, "float16"), 5120)  # a single token, whose score is nearly 0
def test_no_false_alarm_for_any_shape_and_seed(spec: BlockSpec, seed: int) -> None:
    for runner in (lambda x, w: reference(spec, x, w, torch_dtype(spec)), rounded(spec)):
        found = Checker(spec, seed)(runner)
        assert found.ok, found
        diagnosis = diagnose(spec, runner, seed)
        assert diagnosis.ok, str(diagnosis)


CLASSIC = {
    "bias missing": "output bias", "no scale": "scores", "output transposed": "output product", "qkv transposed": "QKV product",
    "eps 1e-3": "LayerNorm", "k and v swapped": "QKV product", "x missing": "residual", "not normalised": "softmax",
    "heads reversed": "weighted sum", "attention dead": "output product", "maximum not subtracted": "softmax",
    "last token unwritten": "residual", "gain missing": "LayerNorm", "tiles not rescaled": "softmax",
}  # fmt: skip


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("fault", CLASSIC)
def test_a_fault_is_rejected_and_its_stage_named(fault: str, dtype: str) -> None:
    spec = BlockSpec(24, 3, 10, 13, 2, dtype)
    runner = rounded(spec, fault, "col")
    assert not Checker(spec, seed=1)(runner).ok
    diagnosis = diagnose(spec, runner)
    assert (diagnosis.axis, diagnosis.stage) == ("col", CLASSIC[fault]), str(diagnosis)


def test_the_precision_of_the_other_type_is_not_enough() -> None:
    spec = BlockSpec(24, 3, 10, 13, 2, "float16")
    found = Checker(spec, seed=1)(rounded(spec, to=torch.bfloat16))
    assert not found.ok and "2 times that of PyTorch's float16 form" in found.cause


def test_the_branch_counts_beside_large_inputs() -> None:
    """At a scale of 100 half of the branch is lost in y's rounding; the small tokens of the same case show that it is dead."""
    for dtype in HALVES:
        spec = BlockSpec(24, 3, 10, 13, 2, dtype)
        found = Checker(spec, seed=1)(lambda x, weights: x.clone())
        assert not found.ok and "returns its input" in found.cause


# -- inputs that are hard


def hard(name: str, spec: BlockSpec) -> tuple[Tensor, dict[str, Tensor]]:
    """Case r10's inputs, which have to be finite and non-finite exactly where the reference is."""
    generator = torch.Generator().manual_seed(3)
    x, weights = random_input(spec, generator), random_weights(spec, generator)
    if name == "nan":
        x[0, 2, 3, 4] = math.nan
    elif name == "infinity":
        x[0, 1, 0, 0], x[0, 3, 5, 1] = math.inf, -math.inf
    elif name == "constant rows":
        x[0, 2], x[0, :, 4] = 2.0, -0.5
    elif name == "mean 1e4":
        x = (x.float() + 1e4).to(x.dtype)
    elif name == "large logits":
        for axis in spec.axes:
            weights[f"{axis}_qkv.weight"][: 2 * spec.dim] *= 300.0
    return x, weights


@pytest.mark.parametrize(
    ("family", "dtype"), [*((family, dtype) for family in ("sequence", "staged") for dtype in DTYPES), ("resident", "bfloat16")]
)
@pytest.mark.parametrize("name", ["nan", "infinity", "constant rows", "mean 1e4", "large logits"])
@pytest.mark.parametrize("axes", [("row",), ("col",)])
def test_hard_inputs(name: str, family: str, dtype: str, axes: tuple[str, ...], cache: Path) -> None:
    spec = BlockSpec(dim=32, heads=2, height=5, width=18, batch=1, dtype=dtype, axes=axes)
    x, weights = hard(name, spec)
    emulator = emulated(spec, cache)
    if family != "sequence":
        start = FAMILIES[family].default(spec.problem(axes[0]), SM90, FAMILIES[family].maths[dtype][0])
        assert start is not None
        emulator = Emulator(render(spec, {axes[0]: start}), cache)
    got, expected = emulator.run(x, weights), reference(spec, x, weights)
    assert torch.equal(got.isfinite(), expected.isfinite())
    assert bool(expected.isfinite().all()) == (name not in ("nan", "infinity"))
    if name == "large logits":  # a softmax this steep turns on the last bits of its scores
        assert float(got.float().abs().max()) < 2 * float(expected.abs().max())
        if dtype == "float16":
            own = reference(spec, x, weights, torch.float16)
            assert not own.isfinite().all(), "the case is meant to overflow PyTorch's own scores"
        return
    real = expected.isfinite()
    own = reference(spec, x, weights, torch_dtype(spec)).double()
    allowed = max(2 * float((own - expected)[real].abs().max()), 1e-5 * float(expected[real].abs().max())) if real.any() else 0.0
    assert float((got.double() - expected)[real].abs().max() if real.any() else 0.0) <= allowed


def test_weights_are_drawn_once_and_rounded() -> None:
    for dtype in HALVES:
        spec = replace(RAGGED, dtype=dtype)
        single, half = random_weights(RAGGED, torch.Generator().manual_seed(1)), random_weights(spec, torch.Generator().manual_seed(1))
        assert list(half) == list(parameter_shapes(spec))
        assert all(torch.equal(half[name], single[name].to(torch_dtype(spec))) for name in single)
