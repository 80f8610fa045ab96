"""What a case has to take at least: its operations and its bytes over what the card was measured to do."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.cases import BYTES, Case


@dataclass(frozen=True)
class Ceilings:
    """What one card reaches: bytes read and written by a large copy in TB/s, large matrix products in TFLOP/s (fp32 without tensor cores,
    tf32 and bf16 with), and microseconds of a tiny kernel in a CUDA graph."""

    copy_tbs: float
    fp32_tflops: float
    tf32_tflops: float
    bf16_tflops: float
    kernel_us: float

    def product_tflops(self, dtype: str) -> float:
        """The rate of the unit that does products of `dtype`. Those of float32 grade are counted as three in TF32, or without tensor cores:
        kernels that split into 16-bit parts instead (math fp16x3) do three at the 16-bit rate, and may go below this floor."""
        return max(self.tf32_tflops / 3, self.fp32_tflops) if dtype == "float32" else self.bf16_tflops


NOMINAL = Ceilings(copy_tbs=4.3, fp32_tflops=51.0, tf32_tflops=388.0, bf16_tflops=790.0, kernel_us=1.2)
"""An H200 (PyTorch 2.11, CUDA 13.0), for tables that no measurement belongs to."""


@dataclass(frozen=True)
class Work:
    """flops: of the products, a multiply-add is two. axis_bytes: x read and y written by each axis, and the weights once.
    fused_bytes: x read and y written once for both axes, and the weights."""

    flops: int
    axis_bytes: int
    fused_bytes: int


def work(case: Case) -> Work:
    """What a case has to do, with nothing computed twice and nothing between x and y stored."""
    s = case.shape
    tokens, dim = s.batch * s.height * s.width, s.dim
    flops = 0
    for length in (s.width, s.height):
        flops += 2 * tokens * dim * (3 * dim + dim)  # QKV and output products
        flops += 2 * tokens * dim * (length + length)  # scores, and weighting the values
    size = BYTES[case.dtype]
    weights = 2 * (4 * dim * dim + 3 * dim) * size
    grid = tokens * dim * size
    return Work(flops, 4 * grid + weights, 2 * grid + weights)


@dataclass(frozen=True)
class Floors:
    """Microseconds: operations over the rate of their unit, bytes over the copy rate for each axis by itself and for both fused."""

    arithmetic: float
    axis_bytes: float
    fused_bytes: float

    @property
    def least(self) -> float:
        """The larger of arithmetic and fused bytes."""
        return max(self.arithmetic, self.fused_bytes)

    @property
    def limit(self) -> str:
        """Which floor is the higher one."""
        return "arithmetic" if self.arithmetic >= self.fused_bytes else "bytes"


def floors(case: Case, ceilings: Ceilings) -> Floors:
    """The floors of a case on a card."""
    todo = work(case)
    return Floors(
        todo.flops / (1e6 * ceilings.product_tflops(case.dtype)),
        todo.axis_bytes / (1e6 * ceilings.copy_tbs),
        todo.fused_bytes / (1e6 * ceilings.copy_tbs),
    )
