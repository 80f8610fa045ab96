"""The emulator on kernels written for the purpose: right ones run clean, and each kind of fault is found, named and placed.

A faulty line carries the comment FAULT, so that the test can check the line that the report names.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from codegen.reference import parameter_shapes, random_input, random_weights
from codegen.render import Kernel, Source
from codegen.spec import BlockSpec, SpecError
from tuner import emulator_build
from tuner.emulator import EmulationError, Emulator, Report

# Two sequences of 8 tokens of 16 channels: 256 floats of x, two blocks.
SPEC = BlockSpec(dim=16, heads=1, height=2, width=8, batch=1, axes=("row",))
SIGNATURE = (
    "const float* x, float* y, const float* norm_weight, const float* norm_bias, const float* qkv_weight, "
    "const float* out_weight, const float* out_bias, int sequences"
)
COPY = "y[128 * blockIdx.x + threadIdx.x] = x[128 * blockIdx.x + threadIdx.x];"


def source_of(*bodies: str, threads: int = 128, shared: int = 1024, dependent: bool = False, spec: BlockSpec = SPEC) -> Source:
    """A source with one kernel for each body; shared memory in bytes."""
    kernels, texts = [], []
    for axis, body in zip(spec.axes, bodies, strict=True):
        kernels.append(Kernel(f"axial_{axis}", axis, threads, shared, 1, dependent and bool(kernels)))
        texts.append(
            f'extern "C" __global__ void __launch_bounds__({threads}) axial_{axis}({SIGNATURE}) {{\n'
            f"  extern __shared__ __align__(16) float shared[];\n  const int t = threadIdx.x;\n  (void)t;\n{body}\n}}\n"
        )
    return Source(spec, "\n".join(texts), tuple(kernels))


def run(source: Source, cache: Path, order: str = "forward", **options: object) -> tuple[Tensor, Tensor]:
    """Input and output of one run."""
    generator = torch.Generator().manual_seed(3)
    x = random_input(source.spec, generator)
    emulator = Emulator(source, cache, **options)  # type: ignore[arg-type]
    return x, emulator.run(x, random_weights(source.spec, generator), order=order)


def fault(source: Source, cache: Path, kind: str, order: str = "forward", **options: object) -> Report:
    """The report of a run that must fail with `kind`, at the line that says FAULT if there is one."""
    with pytest.raises(EmulationError) as caught:
        run(source, cache, order, **options)
    report = caught.value.report
    assert report.kind == kind, report.message
    lines = [number for number, line in enumerate(source.text.splitlines(), 1) if "FAULT" in line]
    if lines:
        assert report.line in lines, report.message
    assert str(caught.value) == report.message
    return report


# -- bank conflicts

ACCESSES = {  # a warp's access -> its wavefronts, and those of them that conflicts add
    "shared[t] = 0.0f;": (1, 0),
    "shared[2 * t] = 0.0f;": (2, 1),
    "shared[33 * t % 1024] = 0.0f;": (1, 0),
    "shared[32 * t] = 0.0f;": (32, 31),
    "shared[t / 4 + 32 * (t % 4)] = 0.0f;": (4, 3),
    "if (t % 2) shared[2 * t] = 0.0f;": (2, 1),
    "if (t < 4) shared[32 * t] = 0.0f;": (4, 3),
    "reinterpret_cast<float2*>(shared)[t] = float2{};": (2, 0),
    "reinterpret_cast<float4*>(shared)[t] = float4{};": (4, 0),
    "reinterpret_cast<float4*>(shared)[2 * t] = float4{};": (8, 4),
    "for (int i = 0; i < 3; ++i) if (i < 1 + t % 3) shared[2 * t + 32 * i] = 0.0f;": (5, 2),
    "copy_async<16>(shared + 4 * t, x, false); commit_copies(); wait_for_copies<0>();": (4, 0),
    "copy_async<4>(shared + 4 * t, x, false); commit_copies(); wait_for_copies<0>();": (4, 3),
}
SPLITS = {  # a warp's copy of x, by 16 bytes a lane -> writes that are more than its lines of global memory
    "shared + 4 * t, x + 4 * t": 0,
    "shared + 4 * (t ^ t / 8), x + 4 * t": 0,
    "shared + 4 * t + 4 * (t / 8), x + 4 * t": 3,
    "shared + 4 * t + 8, x + 4 * t": 4,
    "shared + 4 * t + 4, x + 4 * t + 4": 0,
    "shared + 32 * t, x + 4 * t": 28,
    "shared + 32 * t, x + 4 * t, t % 8 == 0": 0,
}


@pytest.mark.parametrize("access", ACCESSES)
def test_wavefronts_and_conflicts_of_an_access_are_counted(access: str, cache: Path) -> None:
    source = source_of(f"  {access}\n", threads=32, shared=4096)
    generator = torch.Generator().manual_seed(3)
    (found,) = Emulator(source, cache).shared_traffic(random_input(SPEC, generator), random_weights(SPEC, generator))
    assert (found.kernel, found.lines) == ("axial_row", (5,))
    assert (found.wavefronts, found.conflicts) == tuple(2 * n for n in ACCESSES[access])  # of two blocks


@pytest.mark.parametrize("copied", SPLITS)
def test_lines_that_copies_split_are_counted(copied: str, cache: Path) -> None:
    real = "" if copied.count(", ") > 1 else ", true"
    source = source_of(f"  copy_async<16>({copied}{real}); commit_copies(); wait_for_copies<0>();\n", threads=32, shared=8192)
    generator = torch.Generator().manual_seed(3)
    (found,) = Emulator(source, cache).shared_traffic(random_input(SPEC, generator), random_weights(SPEC, generator))
    assert found.splits == 2 * SPLITS[copied]


def test_a_word_that_lanes_share_is_read_once(cache: Path) -> None:
    source = source_of("  shared[t] = x[t];\n  __syncwarp();\n  y[32 * blockIdx.x + t] = shared[t / 8];\n", threads=32, shared=4096)
    generator = torch.Generator().manual_seed(3)
    found = Emulator(source, cache).shared_traffic(random_input(SPEC, generator), random_weights(SPEC, generator))
    assert [(traffic.lines, traffic.wavefronts, traffic.conflicts) for traffic in found] == [((5,), 2, 0), ((7,), 2, 0)]


# -- right kernels


@pytest.mark.parametrize("order", ["forward", "reverse", "random:7"])
def test_block_reduction(cache: Path, order: str) -> None:
    """Shuffles within warps, shared memory and a barrier between them."""
    body = """
  float sum = x[128 * blockIdx.x + t];
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (t % 32 == 0) shared[t / 32] = sum;
  __syncthreads();
  y[128 * blockIdx.x + t] = shared[0] + shared[1] + shared[2] + shared[3];"""
    x, y = run(source_of(body), cache, order)
    expected = x.double().view(2, 128).sum(1, keepdim=True).expand(2, 128)
    torch.testing.assert_close(y.double().view(2, 128), expected, rtol=1e-5, atol=1e-5)


def test_tensor_core_product(cache: Path) -> None:
    """mma.m16n8k8's fragments and the truncation of its operands, on x's first 16x8 and 8x8 values."""
    body = """
  const int g = t / 4, q = t % 4;
  float c[4] = {1.0f, 2.0f, 3.0f, 4.0f};
  const float a[4] = {x[8 * g + q], x[8 * (g + 8) + q], x[8 * g + q + 4], x[8 * (g + 8) + q + 4]};
  const float* b = x + 128;
  mma_m16n8k8_tf32(c, a, b[8 * q + g], b[8 * (q + 4) + g]);
  y[8 * g + 2 * q] = c[0];
  y[8 * g + 2 * q + 1] = c[1];
  y[8 * (g + 8) + 2 * q] = c[2];
  y[8 * (g + 8) + 2 * q + 1] = c[3];"""
    spec = BlockSpec(dim=16, heads=1, height=1, width=16, batch=1, axes=("row",))
    x, y = run(source_of(body, threads=32, spec=spec), cache)
    cut = (x.view(torch.int32) & ~0x1FFF).view(torch.float32).double().flatten()
    a, b = cut[:128].view(16, 8), cut[128:192].view(8, 8)
    start = torch.tensor([[1.0, 2.0]] * 8 + [[3.0, 4.0]] * 8, dtype=torch.float64).repeat(1, 4)
    torch.testing.assert_close(y.flatten()[:128].view(16, 8).double(), a @ b + start, rtol=1e-6, atol=1e-6)
    assert y.flatten()[128:].isnan().all(), "words that no thread writes must stay NaN"


def test_half_precision_product(cache: Path) -> None:
    """mma.m16n8k16's fragments, on halves that are packed from x's first 16x16 and 16x8 values."""
    body = """
  const int g = t / 4, q = t % 4;
  const float* b = x + 256;
  float c[4] = {};
  unsigned a[4], bs[2];
  for (int r = 0; r < 4; ++r) {
    const float* from = x + 16 * (g + 8 * (r % 2)) + 2 * q + 8 * (r / 2);
    a[r] = pack_fp16(from[0], from[1]);
  }
  for (int r = 0; r < 2; ++r) bs[r] = pack_fp16(b[8 * (2 * q + 8 * r) + g], b[8 * (2 * q + 8 * r + 1) + g]);
  mma_m16n8k16_fp16(c, a, bs[0], bs[1]);
  for (int r = 0; r < 4; ++r) y[8 * (g + 8 * (r / 2)) + 2 * q + r % 2] = c[r];"""
    spec = BlockSpec(dim=16, heads=1, height=1, width=24, batch=1, axes=("row",))
    x, y = run(source_of(body, threads=32, spec=spec), cache)
    a, b = x.flatten()[:256].half().double().view(16, 16), x.flatten()[256:].half().double().view(16, 8)
    torch.testing.assert_close(y.flatten()[:128].view(16, 8).double(), a @ b, rtol=1e-6, atol=1e-6)


def test_transposition(cache: Path) -> None:
    """movmatrix turns element (row, column) into (column, row)."""
    body = """
  const float2 pair = unpack_fp16(transpose_8x8(pack_fp16(x[2 * t], x[2 * t + 1])));
  y[2 * t] = pair.x;
  y[2 * t + 1] = pair.y;"""
    spec = BlockSpec(dim=16, heads=1, height=1, width=4, batch=1, axes=("row",))
    x, y = run(source_of(body, threads=32, spec=spec), cache)
    assert torch.equal(y.view(8, 8), x.view(8, 8).half().float().T)


def test_half_precision_rounding(cache: Path) -> None:
    """Every rounding case of fp16, through memory and back: ties, subnormals, overflow, infinities, NaN."""
    spec = BlockSpec(dim=16, heads=1, height=1, width=8, batch=64, axes=("row",))
    body = "  const int i = 128 * blockIdx.x + t;\n  const float2 pair = unpack_fp16(pack_fp16(1.0f, x[i]));\n  y[i] = pair.y * pair.x;"
    generator = torch.Generator().manual_seed(1)
    steps = torch.arange(4096, dtype=torch.float32) * 0.5 * 2.0**-24
    values = torch.cat([steps, torch.randn(4090, generator=generator) * 2.0 ** torch.randint(-26, 18, (4090,), generator=generator)])
    edge = torch.tensor([float("inf"), -float("inf"), float("nan"), 65519.99, 65520.0, -70000.0])
    x = torch.cat([values, edge]).view(64, 1, 8, 16)
    y = Emulator(source_of(body, spec=spec), cache).run(x, random_weights(spec))
    torch.testing.assert_close(y, x.half().float(), rtol=0, atol=0, equal_nan=True)


def test_rounding_to_tf32(cache: Path) -> None:
    """To nearest with ties away from zero; infinities stay, NaN stays NaN."""
    body = """
  const unsigned bits[6] = {0x3f800fffu, 0x3f801000u, 0xbf801000u, 0x7f800000u, 0x7fffffffu, 0x3f803000u};
  y[128 * blockIdx.x + t] = t < 6 ? round_to_tf32(__uint_as_float(bits[t % 6])) : 0.0f;"""
    _, y = run(source_of(body), cache)
    got = y.flatten()[:6]
    assert got[:4].tolist() == [1.0, 1.0 + 2**-10, -(1.0 + 2**-10), float("inf")]
    assert got[4].isnan() and got[5] == 1.0 + 2**-9


def test_shuffle_sources(cache: Path) -> None:
    """The lane that each kind of shuffle reads, for whole warps and for segments of 8 lanes."""
    lines = {
        "__shfl_sync(~0u, lane, 5)": lambda lane: 5,
        "__shfl_sync(~0u, lane, 5, 8)": lambda lane: lane // 8 * 8 + 5,
        "__shfl_xor_sync(~0u, lane, 3)": lambda lane: lane ^ 3,
        "__shfl_up_sync(~0u, lane, 2, 8)": lambda lane: lane if lane % 8 < 2 else lane - 2,
        "__shfl_down_sync(~0u, lane, 2)": lambda lane: lane if lane > 29 else lane + 2,
        "float(__ballot_sync(~0u, lane > 28.5f) >> 29)": lambda lane: 7,
    }
    for code, expected in lines.items():
        _, y = run(source_of(f"  const float lane = t % 32;\n  y[128 * blockIdx.x + t] = {code};"), cache)
        assert y.flatten().tolist() == [expected(t % 32) for t in range(256)], code


def test_warp_exchange_with_syncwarp_and_partial_masks(cache: Path) -> None:
    """Half warps that exchange through shared memory, each behind its own __syncwarp."""
    body = """
  const unsigned mask = t % 32 < 16 ? 0xffffu : 0xffff0000u;
  shared[t] = x[128 * blockIdx.x + t];
  __syncwarp(mask);
  y[128 * blockIdx.x + t] = shared[t ^ 1];
  __syncwarp(mask);
  shared[t] = 0.0f;"""
    x, y = run(source_of(body), cache, "random:5")
    assert torch.equal(y.flatten(), x.flatten().view(-1, 2).flip(1).flatten())


def test_two_kernels_work_in_place(cache: Path) -> None:
    """The second kernel reads what the first one wrote."""
    spec = BlockSpec(dim=16, heads=1, height=2, width=2, batch=2)
    first = "  y[32 * blockIdx.x + t] = 2.0f * x[32 * blockIdx.x + t];"
    second = "  wait_for_previous_kernel();\n  y[32 * blockIdx.x + t] = x[32 * blockIdx.x + t] + out_bias[t % 16];"
    x, y = run(source_of(first, second, threads=32, spec=spec, dependent=True), cache)
    generator = torch.Generator().manual_seed(3)
    random_input(spec, generator)
    assert torch.equal(y, 2.0 * x + random_weights(spec, generator)["col_out.bias"])


def test_batch_differs_from_the_spec(cache: Path) -> None:
    emulator = Emulator(source_of(f"  {COPY}"), cache)
    weights = random_weights(SPEC)
    x = torch.randn(3, 2, 8, 16)
    assert torch.equal(emulator.run(x, weights), x)
    assert emulator.run(x[:0], weights).shape == (0, 2, 8, 16)


# -- memory


@pytest.mark.parametrize(
    ("code", "buffer", "text"),
    [
        ("y[128 * blockIdx.x + t + 1] = 0.0f;", "y", "0 bytes behind its end"),
        ("y[t - 1] = 0.0f;", "y", "4 bytes before its start"),
        ("y[t] = x[256 + t];", "x", "0 bytes behind its end"),
        ("y[t] = qkv_weight[768 + t];", "row_qkv.weight", "0 bytes behind its end"),
        ("shared[t + 160] = 0.0f;", "shared", "byte 1024 of 1024"),
        ("y[t] = x[1LL << 40];", None, "near no buffer"),
        ("y[t] = *reinterpret_cast<const float*>(16);", None, "the address 0x10"),
    ],
)
def test_out_of_bounds(cache: Path, code: str, buffer: str | None, text: str) -> None:
    report = fault(source_of(f"  {code}  // FAULT"), cache, "out_of_bounds")
    assert report.buffer == buffer
    assert text in report.message
    assert report.kernel == "axial_row" and report.block is not None and report.thread is not None


def test_out_of_bounds_of_a_vector_that_straddles_the_end(cache: Path) -> None:
    code = "if (t == 5) *reinterpret_cast<float4*>(shared + 252) = *reinterpret_cast<const float4*>(x);\n"
    run(source_of(f"  {COPY}\n  {code}", shared=1024), cache)
    fault(source_of(f"  {COPY}\n  {code}", shared=1016), cache, "out_of_bounds")


def test_out_of_bounds_of_a_local_array(cache: Path) -> None:
    body = "  float values[4] = {};\n  for (int i = 0; i < sequences + 3; ++i) values[i] = x[t];  // FAULT\n  y[t] = values[1];"
    assert "index 4" in fault(source_of(body), cache, "out_of_bounds").message


def test_read_only(cache: Path) -> None:
    body = "  const_cast<float*>(x)[t] = 0.0f;  // FAULT"
    assert fault(source_of(body), cache, "read_only").buffer == "x"


@pytest.mark.parametrize("pointer", ["x", "shared"])
def test_misaligned_vector(cache: Path, pointer: str) -> None:
    body = f"""
  if (t < 8) shared[t] = x[t];
  __syncthreads();
  if (t == 3) y[128 * blockIdx.x] = reinterpret_cast<const float4*>({pointer} + 2)->x;  // FAULT"""
    assert "16 bytes" in fault(source_of(body), cache, "misaligned").message
    run(source_of(body.replace("+ 2", "+ 4")), cache)


def test_uninitialised_shared_memory(cache: Path) -> None:
    body = "  shared[t] = x[t];\n  __syncthreads();\n  if (t == 40) y[t] = shared[130];  // FAULT"
    report = fault(source_of(body), cache, "uninitialised", buffers={"axial_row": [("tile", 0, 16, 8), ("rest", 128, 8, 16)]})
    assert report.buffer == "rest" and "rest[0][2]" in report.message and report.thread == 40


def test_shared_memory_does_not_outlive_its_block(cache: Path) -> None:
    body = "  if (blockIdx.x == 0) shared[t] = x[t];\n  __syncthreads();\n  y[128 * blockIdx.x + t] = shared[t];  // FAULT"
    assert fault(source_of(body), cache, "uninitialised").block == 1


def test_uninitialised_output(cache: Path) -> None:
    fault(source_of("  y[t] = y[t] + 1.0f;  // FAULT"), cache, "uninitialised")


def test_uninitialised_register_is_not_zero(cache: Path) -> None:
    """A forgotten `= {}` must show in the result."""
    if not emulator_build.compiler()[2]:
        pytest.skip("this g++ cannot fill uninitialised variables")
    body = """
  float sum[4];
  for (int i = 0; i < 4; ++i) sum[(i * sequences) % 4] += x[t + i];
  y[128 * blockIdx.x + t] = sum[0] + sum[2];"""
    _, y = run(source_of(body), cache)
    assert (y.abs() > 1e9).all() or y.isnan().any()


def test_signed_overflow(cache: Path) -> None:
    body = "  const int large = 1 << 30;\n  y[t] = x[(large * (sequences + t) + t) & 7];  // FAULT"
    fault(source_of(body), cache, "overflow")
    assert "by zero" in fault(source_of("  y[t] = x[t / (sequences - 2)];  // FAULT"), cache, "overflow").message


# -- races

EXCHANGE = """
  shared[t] = x[128 * blockIdx.x + t];
  {first}
  const float other = shared[t ^ {distance}];
  {second}
  shared[t] = other;
  y[128 * blockIdx.x + t] = other;"""


@pytest.mark.parametrize("order", ["forward", "reverse", "random:1"])
@pytest.mark.parametrize(("distance", "barrier"), [(64, "__syncthreads();"), (1, "__syncwarp();")])
@pytest.mark.parametrize("missing", ["first", "second"])
def test_missing_barrier(cache: Path, order: str, distance: int, barrier: str, missing: str) -> None:
    """Read after write (first) and write after read (second), across warps and within one."""
    whole = {"first": barrier, "second": barrier, "distance": str(distance)}
    run(source_of(EXCHANGE.format(**whole)), cache, order)
    source = source_of(EXCHANGE.format(**{**whole, missing: ""}))
    with pytest.raises(EmulationError) as caught:
        run(source, cache, order)
    # Without the first barrier some thread may read before anything was written; both are the same fault.
    assert caught.value.report.kind in ("race", "uninitialised"), caught.value.report.message
    if missing == "second":
        assert caught.value.report.kind == "race"


@pytest.mark.parametrize("writer", [31, 127])
def test_write_after_read(cache: Path, writer: int) -> None:
    """By a lane of the readers' warp and by one of another warp, which come after the readers."""
    body = f"""
  if (t == 0) shared[0] = x[t];
  __syncthreads();
  if (t < 20) y[t] = shared[0];
  if (t == {writer}) shared[0] = 1.0f;  // FAULT"""
    spec = BlockSpec(dim=16, heads=1, height=1, width=8, batch=1, axes=("row",))
    report = fault(source_of(body, spec=spec), cache, "race")
    assert "another thread read" in report.message and report.thread == writer and "`if (t < 20) y[t] = shared[0];`" in report.message


def test_warp_barrier_does_not_order_warps(cache: Path) -> None:
    source = source_of(EXCHANGE.format(first="__syncthreads();", second="__syncwarp();", distance=64))
    report = fault(source, cache, "race")
    assert report.line is not None and "shared[t" in source.text.splitlines()[report.line - 1]


def test_shuffles_do_not_order_memory(cache: Path) -> None:
    body = """
  shared[t] = x[t];
  const float all = __shfl_xor_sync(~0u, x[t], 1);
  y[t] = shared[t ^ 1] + all;  // FAULT"""
    fault(source_of(body), cache, "race")


def test_partial_syncwarp_does_not_order_the_other_lanes(cache: Path) -> None:
    body = """
  shared[t] = 0.0f;
  __syncthreads();
  shared[t] = x[t];  // FAULT
  __syncwarp(t % 32 < 16 ? 0xffffu : 0xffff0000u);
  y[t] = shared[t ^ 16];  // FAULT"""
    fault(source_of(body), cache, "race")


def test_two_threads_write_one_word(cache: Path) -> None:
    report = fault(source_of("  shared[t / 2] = x[t];  // FAULT"), cache, "race")
    assert "thread 1 (warp 0, lane 1)" in report.message and "thread 0 (warp 0, lane 0)" in report.message


def test_race_in_global_memory(cache: Path) -> None:
    fault(source_of("  y[128 * blockIdx.x + t / 2] = x[t];  // FAULT"), cache, "race")


def test_races_can_be_ignored(cache: Path) -> None:
    emulator = Emulator(source_of(f"  shared[t / 2] = x[t];\n  {COPY}"), cache)
    x, weights = torch.randn(1, 2, 8, 16), random_weights(SPEC)
    assert torch.equal(emulator.run(x, weights, check_races=False), x)
    with pytest.raises(EmulationError):
        emulator.run(x, weights)


@pytest.mark.parametrize(
    "code",
    [
        "if (t == 0) y[7] = 1.0f;",  # both blocks write
        "y[128 * blockIdx.x + t] = 1.0f; __syncthreads(); if (blockIdx.x == 1 && t == 9) y[200] = y[3];",  # reads what another block wrote
    ],
)
def test_conflict_between_blocks(cache: Path, code: str) -> None:
    report = fault(source_of(f"  {code}  // FAULT"), cache, "block_conflict")
    assert report.block == 1 and "the other is block 0" in report.message


def test_block_overwrites_what_another_block_read(cache: Path) -> None:
    """Only the second kernel can meet it: it works in place."""
    spec = BlockSpec(dim=16, heads=1, height=2, width=2, batch=2)
    first = "  y[32 * blockIdx.x + t] = x[32 * blockIdx.x + t];"
    second = "  if (blockIdx.x == 0) shared[t] = x[32 + t];\n  if (blockIdx.x == 1) y[32 + t] = 1.0f;  // FAULT"
    source = source_of(first, second, threads=32, spec=spec)
    report = fault(source, cache, "block_conflict")
    assert report.kernel == "axial_col"
    assert "another block of the launch read" in report.message and "the other is block 0" in report.message


def test_access_before_the_previous_kernel_has_ended(cache: Path) -> None:
    spec = BlockSpec(dim=16, heads=1, height=2, width=2, batch=2)
    first = "  y[32 * blockIdx.x + t] = x[32 * blockIdx.x + t];"
    second = "  const float value = x[32 * blockIdx.x + t];  // FAULT\n  wait_for_previous_kernel();\n  y[32 * blockIdx.x + t] = value;"
    fault(source_of(first, second, threads=32, spec=spec, dependent=True), cache, "previous_kernel")
    run(source_of(first, second, threads=32, spec=spec, dependent=False), cache)


# -- barriers, ends, time


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("if (t < 40) __syncthreads();", "has ended|ends while"),
        ("if (t == 77) return; __syncthreads();", "has ended|ends while"),
        ("if (t < 64) { __syncthreads();\n } else { __syncthreads();\n }", "another call"),
        ("float v = x[t]; if (t % 32 < 16) v = __shfl_xor_sync(~0u, v, 1); y[t] = v;", "has ended|ends while"),
        ("if (t % 32 == 3) return; y[t] = __shfl_sync(~0u, x[t], 0);", "has ended|ends while"),
        ("y[t] = __shfl_sync(t % 32 < 16 ? ~0u : 0xffff0000u, x[t], 20);", "another mask|outside|has ended"),
        ("y[t] = __shfl_sync(0xffffu, x[t], 0);", "leaves out its own lane"),
        ("if (t % 32 < 16) __syncwarp();\n else __shfl_sync(~0u, 1.0f, 0);", "another call"),
        ("if (t % 2) __syncthreads(); else __syncwarp();", "__syncwarp"),
        ("float c[4] = {}, a[4] = {}; if (t != 31) mma_m16n8k8_tf32(c, a, 0.0f, 0.0f); y[t] = c[0];", "mma_m16n8k8_tf32"),
    ],
)
@pytest.mark.parametrize("order", ["forward", "reverse"])
def test_divergence(cache: Path, body: str, text: str, order: str) -> None:
    with pytest.raises(EmulationError, match=text) as caught:
        run(source_of(f"  {body}"), cache, order)
    assert caught.value.report.kind == "divergence", caught.value.report.message


def test_whole_blocks_may_end_early(cache: Path) -> None:
    _, y = run(source_of("  if (blockIdx.x == 1) return;\n  __syncthreads();\n  y[t] = x[t];"), cache)
    assert y.flatten()[:128].isfinite().all() and y.flatten()[128:].isnan().all()


def test_endless_loop(cache: Path) -> None:
    started = time.monotonic()
    body = "  volatile int go = 1;\n  if (t == 9)\n    while (go) {}  // FAULT\n  y[t] = x[t];"
    report = fault(source_of(body), cache, "timeout", run_limit=1)
    assert report.thread == 9 and time.monotonic() - started < 15


def test_endless_loop_of_barriers(cache: Path) -> None:
    fault(source_of("  while (sequences) __syncthreads();"), cache, "timeout", run_limit=1)


def test_crash_ends_the_emulated_process_alone(cache: Path) -> None:
    """Faults that no check foresees: an illegal instruction, and a stack that outgrows its room."""
    fault(source_of("  if (t == 3) __builtin_trap();  // FAULT\n  y[t] = x[t];"), cache, "crash")
    deep = """
__device__ float deep(int n) {
  volatile float room[512];
  room[n % 512] = n;
  return n > 0 ? deep(n + 1) + room[3] : 0.0f;
}
"""
    calls = source_of("  y[t] = deep(sequences + t);")
    fault(Source(SPEC, deep + calls.text, calls.kernels), cache, "stack")


# -- building


def test_source_that_does_not_compile(cache: Path) -> None:
    report = fault(source_of("  y[t] = no_such_function(x[t]);  // FAULT"), cache, "compile")
    assert "no_such_function" in report.message


def test_static_shared_memory_is_refused(cache: Path) -> None:
    with pytest.raises(SpecError, match="dynamic shared memory"):
        Emulator(source_of("  __shared__ float tile[32];"), cache)


@pytest.mark.parametrize(("option", "text"), [({"threads": 48}, "whole warps"), ({"shared": 300_000}, "exceed")])
def test_launches_that_cannot_be(cache: Path, option: dict[str, int], text: str) -> None:
    with pytest.raises(SpecError, match=text):
        Emulator(source_of(COPY, **option), cache)  # type: ignore[arg-type]


def test_tensors_that_do_not_fit(cache: Path) -> None:
    emulator = Emulator(source_of(f"  {COPY}"), cache)
    weights = random_weights(SPEC)
    with pytest.raises(SpecError, match="x must be"):
        emulator.run(torch.zeros(1, 2, 9, 16), weights)
    with pytest.raises(SpecError, match="x must be"):
        emulator.run(torch.zeros(1, 2, 8, 16, dtype=torch.float64), weights)
    for name in parameter_shapes(SPEC):
        with pytest.raises(SpecError, match=name):
            emulator.run(torch.zeros(1, 2, 8, 16), {k: v for k, v in weights.items() if k != name})
        with pytest.raises(SpecError, match=name):
            emulator.run(torch.zeros(1, 2, 8, 16), {**weights, name: torch.zeros(3)})
    with pytest.raises(SpecError, match="order"):
        emulator.run(torch.zeros(1, 2, 8, 16), weights, order="sideways")


def test_strided_tensors(cache: Path) -> None:
    x = torch.randn(2, 8, 16, 1).permute(3, 0, 1, 2)[:, :, ::1]
    spread = torch.randn(1, 2, 16, 8).transpose(2, 3)
    emulator = Emulator(source_of(f"  {COPY}"), cache)
    for tensor in (x, spread):
        assert torch.equal(emulator.run(tensor, random_weights(SPEC)), tensor)


def test_programs_are_cached_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(f"  {COPY}")
    first = Emulator(source, tmp_path)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".exe", ".o"], "nothing unfinished is left behind"
    calls: list[list[str]] = []
    original = emulator_build._run
    monkeypatch.setattr(emulator_build, "_run", lambda command, limit: (calls.append(command), original(command, limit))[1])
    assert Emulator(source, tmp_path).program == first.program and not calls
    assert Emulator(Source(SPEC, source.text + "// changed\n", source.kernels), tmp_path).program != first.program
    assert len(calls) == 2, "the runtime is not built again"


def test_compiler_that_is_missing(tmp_path: Path) -> None:
    """In a process of its own, because the compiler is looked up once."""
    code = f"""
from pathlib import Path
from codegen.spec import SpecError
from tests.test_emulator import COPY, source_of
from tuner.emulator import Emulator
try:
    Emulator(source_of(COPY), Path({str(tmp_path)!r}))
except SpecError as error:
    print(error)
"""
    root = Path(__file__).resolve().parent.parent
    environment = {**os.environ, "PATH": str(tmp_path), "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=root, timeout=120)
    assert "needs g++" in done.stdout and "install it" in done.stdout, done.stderr


def test_compiler_that_never_returns(tmp_path: Path) -> None:
    endless = "constexpr long spin(long n) { long s = 0; for (long i = 0; i < n; ++i) s += i % 7; return s; }\n"
    text = endless + "".join(f"constexpr long slow{i} = spin(250000 + {i});\n" for i in range(400)) + source_of(COPY).text
    with pytest.raises(EmulationError, match="did not finish within") as caught:
        Emulator(Source(SPEC, text, source_of(COPY).kernels), tmp_path, compile_limit=2)
    assert caught.value.report.kind == "compile"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("building")]


def test_a_report_stands_without_lines_that_cannot_be_built(cache: Path) -> None:
    source = source_of(f"  {COPY}\n  y[t - 77] = 1.0f;")
    Emulator(source, cache)
    report = fault(source, cache, "out_of_bounds", compile_limit=0.001)
    assert report.line is None and report.buffer == "y" and "before its start" in report.message
    assert fault(source, cache, "out_of_bounds").line == 6


def test_lines_are_built_for_a_report_that_lacks_them_alone(tmp_path: Path) -> None:
    fault(source_of("  if (t < 16) __shfl_xor_sync(0xffffffffu, 1.0f, 1);"), tmp_path, "divergence")
    assert len(list(tmp_path.glob("*.exe"))) == 1
    assert fault(source_of("  x[t] == 0.0f ? y[t - 77] = 1.0f : y[t + 999] = 1.0f;  // FAULT"), tmp_path, "out_of_bounds").line
    assert len(list(tmp_path.glob("*.exe"))) == 3


def test_unwritable_cache(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(SpecError, match="cannot write its cache"):
        Emulator(source_of(COPY), blocked / "cache")
