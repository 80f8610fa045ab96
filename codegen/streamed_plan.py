"""What the plans of the families have in common whose attention streams (templates/stages/streamed_softmax.cuh): padded sizes, and how
q, k, v and the attention's result are kept as fragments."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from codegen.layout import ceil_div
from codegen.sequence import HALF_PARTS, RESERVED_SHARED
from codegen.spec import AxisProblem
from codegen.target import Target
from codegen.warpgroup_product import WarpgroupProduct

MANY_KEYS = 512
"""Keys over which the tensor cores' sums keep their accuracy: 3e-6 of the scale on an H200, where 1,024 keys had 9e-6 and 5,000 2.5e-5."""


@dataclass(frozen=True)
class StreamedPlan:
    """Sizes that do not depend on tiles; a row tile is 16 tokens of one sequence."""

    problem: AxisProblem
    config: Any

    @property
    def dim(self) -> int:
        return self.problem.block.dim

    @property
    def head_dim(self) -> int:
        return self.problem.block.head_dim

    @property
    def parts(self) -> int:
        """Words of 16-bit pairs that an operand's pair is kept in; 0 when operands are floats."""
        return HALF_PARTS.get(self.config.math, 0)

    @property
    def half(self) -> bool:
        return self.parts > 0

    @property
    def padded_head_dim(self) -> int:
        step = 16 if self.half else 8
        return ceil_div(self.head_dim, step) * step

    @property
    def inner(self) -> int:
        """Columns of q, k, v and of the attention's result, with each head padded."""
        return self.problem.block.heads * self.padded_head_dim

    @property
    def tiles(self) -> int:
        """Row tiles of 16 tokens in a sequence."""
        return ceil_div(self.problem.length, 16)

    @property
    def many_keys(self) -> int:
        """MANY_KEYS where a sequence has more, else 0."""
        return MANY_KEYS if self.problem.length > MANY_KEYS else 0

    @property
    def row_tile(self) -> int:
        """Words of a row tile of one head, in scratch and in shared memory."""
        return 8 * (self.parts or 2) * self.padded_head_dim

    @property
    def exponent_scale(self) -> float:
        """log2(e) / sqrt(head_dim): softmax is computed in powers of two."""
        return math.log2(math.e) / math.sqrt(self.head_dim)

    def run(self, warp_columns: int) -> int:
        """Channels of y that a lane reads and writes at once: 16 bytes where the column tiles of a warp and the channels divide so."""
        most = 16 // self.problem.block.itemsize
        return next((n for n in (8, 4) if n <= most and warp_columns % (n // 2) == 0 and self.dim % n == 0), 2)

    def copy(self, run: int) -> int:
        """Weights that are read at once, of up to 16 bytes, where `run` of them lie in one piece."""
        most = 16 // self.problem.block.itemsize
        return next(n for n in (8, 4, 2, 1) if n <= most and run % n == 0)

    @property
    def packed(self) -> dict[str, WarpgroupProduct]:
        """Of "qkv" and "out", the products whose weights are packed before they are multiplied."""
        raise NotImplementedError

    @property
    def streamed(self) -> dict[str, WarpgroupProduct]:
        """Of "qkv" and "out", the products whose operand A is streamed."""
        return {name: product for name, product in self.packed.items() if product.streamed}

    def packed_name(self, product: str) -> str:
        """The buffer of a product's packed weights: each axis has its own, because one kernel fills them all before the first axis."""
        return f"{self.problem.axis}_packed_{product}"

    @property
    def packed_scratch(self) -> tuple[tuple[str, int], ...]:
        """(name, elements of the block's type) of the packed weights, whatever the batch: a word holds the two parts of a float32 weight
        or two of 16 bits."""
        return tuple((self.packed_name(name), p.packed * 4 // self.problem.block.itemsize) for name, p in self.packed.items())

    @property
    def kernels(self) -> dict[str, tuple[int, int, int, int]]:
        """Kernel -> threads of a block, bytes of shared memory, blocks asked for on a multiprocessor, registers estimated."""
        raise NotImplementedError

    @property
    def representative(self) -> dict[str, int | str]:
        """Tunables that make no difference to the source here -> the value that stands for all."""
        return {}

    @property
    def norm_threads(self) -> int:
        """Of a block of the kernel for a norm behind the residual, a warp a token."""
        return 256

    @property
    def norm_kernel(self) -> dict[str, tuple[int, int, int, int]]:
        """The kernel for a norm behind the residual, where the block has one."""
        return {"norm": (self.norm_threads, 0, 1, 32 + ceil_div(self.dim, 32))} if self.problem.block.post_norm else {}

    @property
    def shared_bytes(self) -> int:
        return sum(shared for _, shared, _, _ in self.kernels.values())

    @property
    def registers(self) -> int:
        return sum(registers for _, _, _, registers in self.kernels.values())

    @property
    def threads(self) -> int:
        return max(threads for threads, _, _, _ in self.kernels.values())

    def resource_rules(self, target: Target, most_threads: int) -> list[tuple[bool, str]]:
        """(whether it holds, what to say when not) of what a multiprocessor has."""
        rules = []
        for name, (threads, shared, blocks, registers) in self.kernels.items():
            most = min(target.registers_per_thread, target.registers_per_sm // (threads * blocks))
            rules += [
                (threads <= most_threads, f"{name}: {threads} threads exceed {most_threads}"),
                (
                    blocks * threads <= target.threads_per_sm,
                    f"{name}: {blocks} x {threads} threads exceed {target.threads_per_sm} a multiprocessor",
                ),
                (shared <= target.shared_per_block, f"{name}: {shared} bytes of shared memory exceed {target.shared_per_block}"),
                (
                    blocks * (shared + RESERVED_SHARED) <= target.shared_per_sm,
                    f"{name}: {blocks} x {shared} bytes of shared memory exceed {target.shared_per_sm} a multiprocessor",
                ),
                (registers <= most, f"{name}: about {registers} registers a thread exceed the {most} there are"),
            ]
        return rules
