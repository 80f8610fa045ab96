"""The staged family's attention on the emulator: references that have to be raised, two row tiles a warp, resident keys, sums on the tensor
cores, exponentials as polynomials; and planted faults in each."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch

from codegen.config import Config
from codegen.reference import branch, random_input, random_weights, reference, to_sequences
from codegen.render import TEMPLATES, Source, render
from codegen.spec import BlockSpec
from codegen.staged import StagedConfig, StagedPlan, default
from codegen.streamed_plan import MANY_KEYS
from codegen.target import target
from test_mutants import edited
from tuner.emulator import EmulationError, Emulator

TARGET = target("sm_90")
DTYPES = {"tf32x3": "float32", "fp16x3": "float32", "ffma": "float32", "bf16": "bfloat16", "fp16": "float16"}
TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}
# 35 tokens: three row tiles, so that the last of two warps with two tiles has none, and the last tile of keys has 3 of them
BLOCK = BlockSpec(dim=24, heads=2, height=2, width=35, batch=1, axes=("row",))
STEEP = 12.0  # times the queries: scores of a row lie up to 60 apart
LOW = -80.0  # tokens that are nearly alike, with queries such that all scores are about this


@dataclass(frozen=True)
class Form:
    """Settings of the attention that are right for any math, or for those of `maths`. many: keys behind which sums begin anew."""

    rows: int = 2
    stages: int = 1
    sums: str = "add"
    polynomial: int = 0
    key_tile: int = 16
    width: int = BLOCK.width
    many: int = MANY_KEYS
    maths: tuple[str, ...] = tuple(DTYPES)

    def settings(self) -> dict[str, int | str]:
        return {f"attn_{f.name}": getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("maths", "width", "many")}


HALF = ("bf16", "fp16")
FORMS = {
    "resident": Form(),
    "long": Form(width=270, maths=("fp16x3", "tf32x3", "bf16")),  # 17 tiles of keys, which come in four copies, the last of two
    "many keys": Form(width=270, many=64, maths=("fp16x3", "tf32x3", "bf16")),
    "streamed": Form(rows=1, stages=2, maths=("fp16x3", "bf16")),
    "streamed two": Form(stages=3, key_tile=32),
    "product": Form(sums="product", maths=HALF),
    "polynomial": Form(rows=1, polynomial=3, maths=HALF),
    "all of it": Form(sums="product", polynomial=2, key_tile=32, maths=HALF),
}
CASES = [(name, math) for name, form in FORMS.items() for math in form.maths]


def source_of(form: Form, math: str) -> Source:
    spec = dataclasses.replace(BLOCK, dtype=DTYPES[math], width=form.width, height=1 if form.width > BLOCK.width else BLOCK.height)
    configs: dict[str, Config] = {}
    for axis in spec.axes:
        start = default(spec.problem(axis), TARGET, math)
        assert start is not None
        configs[axis] = config = dataclasses.replace(start, attn_warps=2, attn_blocks=1, **form.settings())  # type: ignore[arg-type]
        assert not StagedPlan(spec.problem(axis), config).reasons(TARGET)
    with mock.patch("codegen.streamed_plan.MANY_KEYS", form.many):
        return render(spec, configs)


def often_raised(source: Source) -> Source:
    """The same kernel with limits so low that references are raised at most tiles: as right, but slower."""
    return edited(source, r"HEADROOM = [\d.-]+f, LIMIT = [\d.]+f", "HEADROOM = 0.0f, LIMIT = 1.0f")


def error_of(source: Source, cache: Path, steep: float = 1.0, order: str = "forward") -> float:
    """Largest difference to the float64 reference over the output's scale; infinity where something is not finite."""
    generator = torch.Generator().manual_seed(5)
    spec = source.spec
    weights, x = random_weights(spec, generator), random_input(spec, generator)
    for axis in spec.axes:
        queries = weights[f"{axis}_qkv.weight"][: spec.dim]
        if steep > 0:
            queries *= steep
            continue
        x = (x[:, :1, :1] + 0.1 * x).to(x.dtype)
        scores = branch(spec, axis, to_sequences(axis, x.double()), {name: w.double() for name, w in weights.items()}).scores
        queries *= (steep / scores.mean((0, 2, 3))).repeat_interleave(spec.head_dim)[:, None].to(x.dtype)
    y = Emulator(source, cache, run_limit=60).run(x, weights, order=order).double()
    expected = reference(spec, x, weights)
    return float((y - expected).abs().max() / expected.abs().max()) if y.isfinite().all() else float("inf")


@pytest.mark.parametrize(("form", "math"), CASES)
def test_every_form_is_right(form: str, math: str, cache: Path) -> None:
    """With usual scores; and with steep ones, of which later keys outweigh the first tile's so far that its reference cannot serve
    them. A float32's rounding of these is 60 times larger beside the weights."""
    source = source_of(FORMS[form], math)
    tolerance = TOLERANCES[DTYPES[math]]
    assert error_of(source, cache) < tolerance
    assert error_of(source, cache, STEEP, order="reverse") < 5 * tolerance


def test_many_keys_are_summed_as_accurately_as_few(cache: Path) -> None:
    """Of the branch alone: beside the residual, the mean of thousands of values is small."""
    spec = BlockSpec(dim=16, heads=1, height=1, width=3000, batch=1, axes=("row",), residual=False)
    start = default(spec.problem("row"), TARGET)
    assert start is not None
    errors = {}
    for many in (MANY_KEYS, spec.width):
        with mock.patch("codegen.streamed_plan.MANY_KEYS", many):
            errors[many] = error_of(render(spec, {"row": start}), cache)
    assert errors[MANY_KEYS] < 1e-6 and 2 * errors[MANY_KEYS] < errors[spec.width], errors


SOME = [
    ("many keys", "fp16x3"),
    ("resident", "fp16x3"),
    ("resident", "ffma"),
    ("streamed", "bf16"),
    ("product", "fp16"),
    ("all of it", "bf16"),
]


@pytest.mark.parametrize(("form", "math"), SOME)
def test_rows_whose_scores_are_all_far_below_zero(form: str, math: str, cache: Path) -> None:
    """Their weights would vanish beside the reference that a row begins with."""
    assert error_of(source_of(FORMS[form], math), cache, LOW) < 5 * TOLERANCES[DTYPES[math]]


@pytest.mark.parametrize(("form", "math"), SOME[:5])
def test_references_may_be_raised_at_every_tile(form: str, math: str, cache: Path) -> None:
    assert error_of(often_raised(source_of(FORMS[form], math)), cache) < TOLERANCES[DTYPES[math]]


@pytest.mark.parametrize(("length", "math"), [(1, "fp16x3"), (16, "bf16"), (17, "fp16x3"), (64, "bf16")])
def test_lengths_around_a_row_tile(length: int, math: str, cache: Path) -> None:
    spec = dataclasses.replace(BLOCK, height=length, width=3, axes=("col",), dtype=DTYPES[math])
    start = default(spec.problem("col"), TARGET, math)
    assert start is not None
    assert error_of(render(spec, {"col": start}), cache) < TOLERANCES[spec.dtype]


@dataclass(frozen=True)
class Mutant:
    """An edit of the source of a form; steep: of the queries. lowered: with limits so low that references are raised often."""

    pattern: str
    replacement: str
    form: str = "resident"
    maths: tuple[str, ...] = ("fp16x3",)
    steep: float = 1.0
    lowered: bool = False


BEYOND = r"found = (beyond\(weights, p, added\))"
TWO_ROWS = r"(row < )ROWS(; \+\+row\)\s+#pragma unroll\s+for \(int half = 0; half < 2; \+\+half\) \{\s+added)"
PRODUCTS = r"(pair < KEYS / 2)(; \+\+pair\)\s+#pragma unroll\s+for \(int i = 0; i < ROWS; \+\+i\) Format)"
MUTANTS = {
    "the result is not rescaled": Mutant(r"out\[i\]\[j\]\[c\] \*= factor;", "", lowered=True),
    "the result's rests are rescaled the wrong way": Mutant(r"(rest\[i\]\[j\]\[c\]) \*= factor;", r"\1 /= factor;", lowered=True),
    "sums are not rescaled": Mutant(r"sum\[row\]\[i\] \*= correction;", "", lowered=True),
    "sums by product are not rescaled": Mutant(r"sum\[row\]\[i\] \*= correction;", "", "product", ("bf16",), lowered=True),
    "rescaled the wrong way": Mutant(r"exp2_approx\(-highest\)", "exp2_approx(highest)", "streamed", lowered=True),
    "limits are not looked at": Mutant(BEYOND, r"found = \1 && false", maths=("fp16",), steep=STEEP),
    "limits are not looked at, sums by product": Mutant(BEYOND, r"found = \1 && false", "product", ("fp16",), 2 * STEEP),
    "small weights are not looked at": Mutant(r"found \|= below\(weights, added\)", "", "resident", steep=LOW),
    "small weights are not looked at, sums by product": Mutant(r"found \|= below\(weights, added\)", "", "product", ("bf16",), LOW),
    "each lane for itself": Mutant(r"__any_sync\(ALL_LANES, found\)", "found", "streamed", lowered=True),
    "one of two row tiles is looked at": Mutant(TWO_ROWS, r"\g<1>1\2", steep=STEEP),
    "a lower row has the upper one's reference": Mutant(r"start\[row\]\[2 \* half \+ 1\] -=", "start[row][1] -=", "streamed", lowered=True),
    "what was settled is not rescaled": Mutant(r"settled\[row\]\[j\]\[2 \* half\] \*= factor,[^;]*;", ";", "many keys", lowered=True),
    "what was settled is left out": Mutant(r"return settled\[row\]\[j\]\[c\] \+ sums", "return sums", "many keys"),
    "sums do not begin anew": Mutant(r"(settled[^;]*\+= sums\.result\(row, j, c\);\n)\s+sums = Sums\(\);", r"\1", "many keys"),
    "a row's sum misses its other lanes": Mutant(r"group_sum<4>\(sum\[half\]\)", "sum[half]", "streamed", ("bf16",)),
    "a sum misses a tile of keys": Mutant(r"j < KEYS; \+\+j\) added", "j < KEYS - 1; ++j) added"),
    "a sum by product misses a tile of keys": Mutant(PRODUCTS, r"\1 - 1\2", "all of it", ("bf16",)),
    "ones that are halves": Mutant(r"ONES = 0x3f803f80u", "ONES = 0x3f003f00u", "product", ("bf16",)),
    "weights' rests are left out": Mutant(r"pack\(first - rounded\.x, second - rounded\.y\)", "pack(0.0f, 0.0f)"),
    "scores' rests are as large as they are kept": Mutant(r"(rest\[i\]\[j\]\[c\]), 1\.0f / Math::SCALE, p", r"\1, 1.0f, p"),
    "the second row tile is the first": Mutant(r"min\(tile \+ row, C::TILES - 1\)", "min(tile, C::TILES - 1)", "streamed two", ("fp16",)),
    "a row tile too many is stored": Mutant(r"if \(!EVEN && tile \+ row >= C::TILES\) return;", ""),
    "resident keys are not waited for": Mutant(r"wait_until_left<COPIES - 1>\([^;]*\);", ""),
    "a copy too few is waited for": Mutant(r"\(COPIES - 1 - step / COPY_STEPS\)", "(COPIES - step / COPY_STEPS)", "long"),
    "no barrier behind resident keys": Mutant(r"__syncthreads\(\);  // the copy's keys", "//", maths=("bf16",)),
    "a copy of keys lies on the last one": Mutant(r"copy \* COPY_STEPS \* S::KEY_WORDS", "0", "long"),
    "a copy goes beyond the last tile": Mutant(r"at >= room \* ROW_TILE", "false", "long"),
    "resident tiles are a buffer apart": Mutant(r"RESIDENT \? S::KEY_WORDS : S::BUFFER", "S::BUFFER"),
    "buffers do not start again": Mutant(r"!RESIDENT && step % S::STAGES == S::STAGES - 1", "false", "streamed", ("bf16",)),
    "powers an order too high": Mutant(r"(__float_as_uint\(rounded\)) << 23", r"(\1 + 1) << 23", "polynomial", ("fp16",)),
    "small powers are clamped too early": Mutant(r"LOWEST = -96\.0f", "LOWEST = -2.0f", "polynomial", ("fp16",), STEEP),
    "large powers are clamped too early": Mutant(r"RANGE = 128\.0f", "RANGE = 96.5f", "polynomial", ("fp16",), STEEP),
}


@pytest.mark.parametrize(("fault", "math"), [(fault, math) for fault, mutant in MUTANTS.items() for math in mutant.maths])
def test_a_planted_fault_is_caught(fault: str, math: str, cache: Path) -> None:
    mutant = MUTANTS[fault]
    source = source_of(FORMS[mutant.form], math)
    source = often_raised(source) if mutant.lowered else source
    planted = edited(source, mutant.pattern, mutant.replacement)
    tolerance = TOLERANCES[DTYPES[math]] * (1.0 if mutant.steep == 1.0 else 5.0)
    try:
        found = error_of(planted, cache, mutant.steep) > tolerance
    except EmulationError as error:
        assert error.report.kind != "compile", f"the mutant does not compile, so it shows nothing: {error}"
        found = True
    assert found, fault


HOST = """#include <cmath>
#include <cstdio>
#include <cstring>
#define __device__
#define __forceinline__ inline
unsigned __float_as_uint(float v) { unsigned b; std::memcpy(&b, &v, 4); return b; }
float __uint_as_float(unsigned b) { float v; std::memcpy(&v, &b, 4); return v; }
float __saturatef(float v) { return v > 0 ? (v < 1 ? v : 1) : 0; }
%s
int main() {
  double worst = 0;
  for (double x = -95.99; x < 31.99; x += 0.00037) {
    const float at = x;
    worst = std::fmax(worst, std::fabs(exp2_polynomial(at) / std::exp2(double(at)) - 1));
  }
  std::printf("%%g %%g %%g %%g\\n", worst, exp2_polynomial(-200), exp2_polynomial(-INFINITY), exp2_polynomial(1e9));
}
"""


def powers(text: str, folder: Path) -> list[float]:
    """Of the emitted function, compiled for the host: its largest relative error against float64, and 2^-200, 2^-inf and 2^1e9."""
    (folder / "host.cpp").write_text(HOST % text)
    subprocess.run(["g++", "-std=c++17", "-O1", "-o", folder / "host", folder / "host.cpp"], check=True, timeout=60)
    found = subprocess.run([folder / "host"], capture_output=True, text=True, check=True, timeout=60).stdout
    return [float(word) for word in found.split()]


def test_the_polynomial_is_an_exponential(tmp_path: Path) -> None:
    """What it states of itself; and a coefficient that is wrong by a thousandth shows."""
    text = (TEMPLATES / "exponentials.cuh").read_text()
    worst, low, lowest, high = powers(text, tmp_path)
    assert 5e-5 < worst < 9e-5
    assert low == lowest == pytest.approx(2.0**-96, rel=1e-3) and high == pytest.approx(2.0**32, rel=1e-3)
    coefficients = re.findall(r"\d\.\d+e-\d+f", text)
    assert len(coefficients) == 4
    for coefficient in coefficients:
        wrong = text.replace(coefficient, f"{float(coefficient[:-1]) * 1.005:.9e}f")
        assert powers(wrong, tmp_path)[0] > 1e-4, coefficient


def test_forms_that_a_math_cannot_have_are_refused() -> None:
    """Each in words that name the tunable."""
    problem = BLOCK.problem("row")
    for math, changes, words in (
        ("fp16x3", {"attn_sums": "product"}, "attn_sums"),
        ("tf32x3", {"attn_polynomial": 2}, "attn_polynomial"),
        ("fp16x3", {"attn_warps": 4, "attn_rows": 2}, "attn_rows"),
    ):
        start = default(problem, TARGET, math)
        assert start is not None
        reasons = StagedPlan(problem, dataclasses.replace(start, **changes)).reasons(TARGET)  # type: ignore[arg-type]
        assert len(reasons) == 1 and words in reasons[0]


def test_configurations_from_before_a_tunable_mean_its_default() -> None:
    start = default(BLOCK.problem("row"), TARGET, "ffma")
    assert start is not None
    old = {name: value for name, value in start.to_dict().items() if name not in ("attn_rows", "attn_sums", "attn_polynomial")}
    assert StagedConfig.from_dict(old) == dataclasses.replace(start, attn_rows=1, attn_sums="add", attn_polynomial=0)
