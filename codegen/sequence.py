"""The `sequence` family: one block computes whole sequences, and nothing between x and y leaves the chip.

Its stages are load + LayerNorm, QKV product, attention, output product + residual; templates/stages/ has one file for
each. A warp works on tiles of 16 rows by 8 columns in the accumulator layout of mma.m16n8k8 (PTX ISA, "Matrix fragments
for mma.m16n8k8"): lane 4g+t holds rows g and g+8, columns 2t and 2t+1. Operands lie in shared memory as fragments: a tile is
32 quadruples of floats, one a lane, so that an operand is one 16-byte load without bank conflicts. The order of the
summed index is free as long as both operands agree, which is why accumulators can be stored as the next product's
operand as they are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import ClassVar

from codegen.config import Config, tunable
from codegen.layout import Access, Layout, ceil_div, stack
from codegen.spec import AxisProblem
from codegen.target import Target

MATHS = ("ffma", "tf32x3", "fp16x3", "tf32", "bf16", "fp16")
HALF_PARTS = {"fp16x3": 2, "bf16": 1, "fp16": 1}
"""Arithmetics with operands of 16 bits, and how many of these an operand is kept in."""
DTYPE_MATHS = {"float32": ("fp16x3", "tf32x3", "ffma", "tf32"), "bfloat16": ("bf16",), "float16": ("fp16",)}
"""Element type -> its arithmetics, the one to start from first."""
RESERVED_SHARED = 1024  # bytes that the system takes for each resident block (CUDA C++ Programming Guide, compute capability 8.x on)


@dataclass(frozen=True)
class SequenceConfig(Config):
    """One point of the `sequence` family's space."""

    family: ClassVar[str] = "sequence"

    math: str = tunable("tf32x3", MATHS, "arithmetic of the products")
    heads: str = tunable(
        "shared", ("shared", "registers"), "q, k and v pass through shared memory, or stay in a head's warp", before="shared"
    )
    head_warps: int = tunable(1, (1, 2, 4), "warps that share a head with heads=registers, each with some of the row tiles", before=1)
    sequences: int = tunable(1, (1, 2, 4, 8), "sequences a block computes at once")
    warps: int = tunable(8, (1, 2, 4, 8, 12, 16), "warps of a block (with heads=registers head_warps for each head and sequence)")
    qkv_rows: int = tunable(2, (1, 2, 4), "16-row tiles a warp computes at once in the QKV product")
    qkv_columns: int = tunable(3, (1, 2, 3, 4, 6), "8-column tiles a warp computes at once in the QKV product")
    out_rows: int = tunable(2, (1, 2, 4, 5), "16-row tiles a warp computes at once in the output product")
    out_columns: int = tunable(1, (1, 2, 3, 4), "8-column tiles a warp computes at once in the output product")
    key_tile: int = tunable(32, (16, 32, 48, 64, 80), "keys of one step of the streaming softmax")
    fragment: int = tunable(4, (2, 4), "neighbouring weights a lane loads at once in the QKV product")
    weights: str = tunable(
        "hold",
        ("stream", "hold", "shared"),
        "weights read at each use, held in registers for all rows, or held from copies in shared memory",
    )
    prefetch: str = tunable("qkv", ("none", "qkv", "both"), "held weights that are loaded before the stage they belong to")
    padding: bool = tunable(True, (True, False), "pad shared memory against bank conflicts")
    residual: str = tunable("reload", ("reload", "shared"), "read x again for the residual, or keep it in shared memory")
    norm_lanes: int = tunable(16, (4, 8, 16, 32), "lanes that normalise two tokens")
    dependent_launch: bool = tunable(True, (True, False), "start while the axis before it still runs (sm_90 and later)")
    min_blocks: int = tunable(1, (1, 2, 3, 4), "blocks a multiprocessor must be able to hold, which caps registers")
    rounds: int = tunable(
        1, (1, 2, 4, 8, 16), "groups of sequences that a block computes one after the other, with weights that stay", before=1
    )


_VALUES = Access("values as operand B", 1, lambda lane: (2 * (lane % 4), lane // 4))
_VALUES_FFMA = Access("values, one key", 2, lambda lane: (0, 2 * (lane % 4)))
_STORE = Access("accumulator store", 2, lambda lane: (lane // 4, 2 * (lane % 4)))
_QUADRUPLES = (Access("fragment store", 4, lambda lane: (0, 4 * lane)), Access("fragment load", 4, lambda lane: (0, 4 * lane)))


def norm_store(parts: int, fragment: int, lanes: int, vector: int) -> Access:
    """LayerNorm's first store into operand A, of two channels, or of four where these are a quadruple of 16-bit operands: store_rows in
    templates/fragments.cuh and math_half.cuh."""
    quadruple = parts > 0 and fragment == 4 and vector % 4 == 0

    def cell(lane: int) -> tuple[int, int]:
        g, channel = lane // lanes, lane % lanes * vector
        if parts:
            t, which = (channel % 16 // 4, channel % 4 // 2) if fragment == 4 else (channel % 8 // 2, channel % 16 // 8)
            return parts * (channel // 16), 4 * (4 * g + t) + 2 * which
        step = channel // (4 * fragment) * (fragment // 2) + channel % fragment // 2
        return step, 4 * (4 * g + channel % (4 * fragment) // fragment)

    return Access("LayerNorm store", 2 if parts and not quadruple else 4, cell)


def kept_place(g: int) -> int:
    """Where token g of eight is kept: in the order of their bits read backwards (kept_place in templates/sequence.cu.j2). LayerNorm stores
    tokens by 1, 2, 4 or 8 at a time, the output product reads 4 or 8 of them: in this order all of these are spread evenly over the banks
    where places are an odd multiple of 4 words apart."""
    return (g & 1) << 2 | g & 2 | g >> 2


def kept_accesses(itemsize: int, lanes: int, vector: int) -> tuple[Access, Access]:
    """Of the kept tokens: two neighbouring channels a lane for the residual, and the store of `vector` channels a lane, `lanes` a token."""
    pair, stored = 2 * itemsize // 4, vector * itemsize // 4  # words
    return (
        Access("residual", pair, lambda lane: (kept_place(lane // 4), pair * (lane % 4))),
        Access("kept store", stored, lambda lane: (kept_place(lane // lanes), stored * (lane % lanes))),
    )


def weight_accesses(itemsize: int, fragment: int, columns: int) -> tuple[Access, Access]:
    """Of weights in shared memory, whose rows have `columns` words: `fragment` neighbours a lane as operand B, and the copy by 16 bytes."""
    width, pieces = fragment * itemsize // 4, columns // 4
    return (
        Access("weights as operand B", width, lambda lane: (lane // 4, width * (lane % 4))),
        Access("weights' copy", 4, lambda lane: (lane // pieces, 4 * (lane % pieces))),
    )


@dataclass(frozen=True)
class SequencePlan:
    """What a configuration means for a problem: padded sizes, tiles, shared memory, threads, registers."""

    problem: AxisProblem
    config: SequenceConfig

    # Sizes, in elements; the padded ones are filled with zeros or masked.
    @property
    def dim(self) -> int:
        return self.problem.block.dim

    @property
    def head_dim(self) -> int:
        return self.problem.block.head_dim

    @property
    def padded_dim(self) -> int:
        step = 16 if self.half else 4 * self.config.fragment
        return ceil_div(self.dim, step) * step

    @property
    def padded_head_dim(self) -> int:
        step = 16 if self.half else 8
        return ceil_div(self.head_dim, step) * step

    @property
    def inner(self) -> int:
        """Columns of q, k, v and of the attention's result, with each head padded."""
        return self.problem.block.heads * self.padded_head_dim

    @property
    def padded_length(self) -> int:
        return ceil_div(self.problem.length, 16) * 16

    @property
    def rows(self) -> int:
        return self.config.sequences * self.padded_length

    @property
    def row_tiles(self) -> int:
        return self.rows // 16

    @property
    def qkv_tiles(self) -> int:
        return 3 * self.inner // 8

    @property
    def out_tiles(self) -> int:
        return ceil_div(self.dim, 8)

    @property
    def exponent_scale(self) -> float:
        """log2(e) / sqrt(head_dim): softmax is computed in powers of two."""
        return math.log2(math.e) / math.sqrt(self.head_dim)

    @property
    def norm_vector(self) -> int:
        """Channels that a lane of LayerNorm loads at once: up to 16 bytes, as long as no lane is left without and what it
        stores does not conflict."""
        if self.problem.block.itemsize == 2 and self.dim % 8 == 0 and self.dim >= 8 * self.config.norm_lanes and self.config.fragment == 2:
            return 8
        return 4 if self.dim % 4 == 0 else 2

    @property
    def in_registers(self) -> bool:
        """Whether q, k and v of a head stay in the registers of a warp, or q in those of the warps that share the head."""
        return self.config.heads == "registers"

    @property
    def keys_shared(self) -> bool:
        """Whether keys and values pass through shared memory."""
        return not self.in_registers or self.config.head_warps > 1

    @property
    def head_tiles(self) -> int:
        """Row tiles of a sequence that the busiest of a head's warps computes; they go to these by groups of qkv_rows."""
        c = self.config
        return ceil_div(self.padded_length // 16, c.qkv_rows * c.head_warps) * c.qkv_rows

    @property
    def warps(self) -> int:
        c = self.config
        return c.sequences * self.problem.block.heads * c.head_warps if self.in_registers else c.warps

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def qkv_columns(self) -> int:
        """8-column tiles that a warp computes at once in the QKV product. 16-bit operands are stored two tiles at a time; in
        registers they are 16 channels of q, k and v, or of one of the three."""
        columns = self.config.qkv_columns
        if self.in_registers:
            return 6 if columns > 3 else 2
        return 2 if self.half and columns % 2 else columns

    @property
    def representative(self) -> dict[str, int | str]:
        """Tunables that make no difference to the source here -> the value that stands for all."""
        found: dict[str, int | str] = {"qkv_columns": self.qkv_columns}
        if self.in_registers:
            found |= {"warps": 8, "weights": "shared" if self.weights_shared else "hold"}
            if (self.config.rounds > 1 or self.weights_shared) and self.config.prefetch == "both":
                found["prefetch"] = "qkv"
        return found

    @property
    def weights_shared(self) -> bool:
        """Whether the weights pass through shared memory."""
        return self.config.weights == "shared"

    @property
    def keeps_weights(self) -> bool:
        """Whether the weights that a warp holds are all that it needs, so that it can keep them for further rounds."""
        out_groups = max(1, self.out_tiles // self.config.out_columns)
        return self.in_registers and self.qkv_columns == 6 and self.padded_head_dim == 16 and self.warps_across(out_groups) == out_groups

    @property
    def half(self) -> bool:
        """Whether operands are 16-bit pairs, which the tensor cores sum 16 at a time."""
        return self.config.math in HALF_PARTS

    @property
    def operand_words(self) -> float:
        """Words that an operand's value takes."""
        return HALF_PARTS.get(self.config.math, 2) / 2

    def pages(self, columns: int) -> int:
        """Pages of 128 words that a row tile of an operand with `columns` columns takes."""
        return int(columns // 8 * self.operand_words)

    @property
    def tensor_cores(self) -> bool:
        return self.config.math != "ffma"

    @property
    def blocks(self) -> int:
        return ceil_div(self.problem.sequences, self.config.sequences * self.config.rounds)

    def warps_across(self, column_groups: int) -> int:
        """Warps side by side over the column groups of a product; the others take further rows."""
        return max(n for n in range(1, self.warps + 1) if self.warps % n == 0 and n <= column_groups)

    @cached_property
    def layout(self) -> Layout:
        """`normed` is LayerNorm's result; `query` also (in registers: only) receives the attention's result; `key` and `value` are there
        where these are shared; `kept` is x, if kept; `qkv_weight` and `out_weight` are those, if shared. The rows of normed, query and
        key are fragments of 16 rows by 8 columns; those of value and kept are tokens, of kept eight of them in the order of kept_place;
        those of the weights are a product's columns, with padded heads and channels as zeros. Rows are padded against bank conflicts, but
        those of weights swizzled where they are whole lines of shared memory, so that their copies have none either."""
        c = self.config
        return _layout(
            self.config.math, self.rows, self.padded_dim, self.inner, self.dim, self.problem.block.itemsize,
            c.fragment, c.norm_lanes, self.norm_vector, c.residual == "shared", c.padding, self.keys_shared, self.weights_shared,
        )  # fmt: skip

    @property
    def shared_bytes(self) -> int:
        return self.layout.bytes

    @property
    def capped(self) -> dict[str, int]:
        """Tunable that caps registers -> threads of the block it concerns."""
        return {"min_blocks": self.threads}

    @cached_property
    def registers(self) -> int:
        """An estimate of registers a thread, from below: accumulators and operands of the largest stage plus addressing."""
        c = self.config

        def held(tiles: int, depth: int) -> int:
            return int(tiles * depth // 4 * self.operand_words)

        if self.in_registers:
            parts, tiles, slices = int(2 * self.operand_words), self.head_tiles, self.padded_head_dim // 16
            matrices = 1 if self.keys_shared else 3  # that stay
            operands, last = 4 * parts * matrices * tiles * slices, 4 * parts * c.qkv_rows * min(matrices, self.qkv_columns // 2)
            weights, out_weights = held(self.qkv_columns, self.padded_dim), held(c.out_columns, self.inner)
            kept = weights + out_weights if c.rounds > 1 else 0
            early = out_weights if kept or c.prefetch == "both" else 0
            if not kept and c.qkv_rows == tiles:
                weights //= 2  # each is used once, so that their registers become free one after the other
            project = weights + operands - last + 4 * parts * c.qkv_rows * (self.qkv_columns + 1) + early
            attend = weights * (kept > 0) + early + operands * (tiles - 1) // tiles + 4 * parts * (c.key_tile // 8 + 2 * slices)
            out = kept + out_weights * (not kept) + 4 * parts * c.out_rows * (c.out_columns + 1)
            # Shares of 65 tokens, 128 channels have been compiled in so few without spills: 124 (fp16x3, 2 warps a head), 64 (bf16, 4).
            return (12 if self.keys_shared else 24) + max(project, attend, out)

        def product(rows: int, tiles: int, fragment: int, depth: int) -> int:
            operand_b = held(tiles, depth) if c.weights == "hold" else tiles * fragment * (1 if self.tensor_cores else 2)
            return 4 * rows * tiles + 8 * rows + operand_b

        biases = 2 * self.qkv_columns if self.problem.block.qkv_bias else 0
        held_qkv = held(self.qkv_columns, self.padded_dim) if c.prefetch != "none" else 0
        held_out = held(c.out_columns, self.inner) if c.prefetch == "both" else 0
        norm = 4 * ceil_div(self.padded_dim, c.norm_lanes * self.norm_vector) * self.norm_vector + held_qkv
        qkv = product(c.qkv_rows, self.qkv_columns, c.fragment, self.padded_dim) + biases
        scores = 4 * (c.key_tile // 8) + 4 * (self.padded_head_dim // 8) + 16 + held_out
        out = product(c.out_rows, c.out_columns, 2, self.inner) + 4 * c.out_rows * c.out_columns
        return 24 + max(norm, qkv, scores, out)

    def reasons(self, target: Target) -> list[str]:
        """Why the configuration is not legal for the problem on the target; empty when it is."""
        c, blocks = self.config, self.config.min_blocks
        registers = min(target.registers_per_thread, target.registers_per_sm // (self.threads * blocks))
        dtype = self.problem.block.dtype
        tiles = self.padded_length // 16 if self.in_registers else self.row_tiles  # that a warp of the QKV product may take together
        groups = tiles // c.qkv_rows
        hold = c.weights == "hold" or self.in_registers
        together = c.sequences * c.rounds
        rules = (
            (c.math in DTYPE_MATHS[dtype], f"math {c.math} is not for {dtype}: {' or '.join(DTYPE_MATHS[dtype])}"),
            (self.half or not self.in_registers, f"{c.math} has no operands that could stay in registers"),
            (self.in_registers or c.head_warps == 1, "only heads in registers are shared by warps"),
            (c.head_warps <= max(1, groups), f"a head's {c.head_warps} warps are more than its {groups} groups of qkv_rows row tiles"),
            (self.warps <= 32, f"the heads' {self.warps} warps are more than the 32 of a block"),
            (c.rounds == 1 or self.keeps_weights, "further rounds need weights that stay in registers"),
            (self.tensor_cores or c.weights == "stream", "ffma cannot hold weights in registers"),
            (self.tensor_cores or c.fragment == 2, "ffma needs fragment 2"),
            (c.fragment == 2 or self.dim > 8, "fragment 4 would only add zeros"),
            (c.weights != "stream" or c.prefetch == "none", "only held weights can be prefetched"),
            (self.in_registers or not self.weights_shared, "only heads in registers have their weights in shared memory"),
            (c.rounds == 1 or not self.weights_shared, "weights of further rounds stay in registers"),
            (
                not self.weights_shared or math.gcd(self.dim, self.head_dim) * self.problem.block.itemsize % 16 == 0,
                "weights are copied to shared memory by 16 bytes, of which dim and head_dim have to be multiples",
            ),
            (not hold or max(self.padded_dim, self.inner) <= 512, "sums of more than 512 are too long to hold weights"),
            (self.problem.block.residual or c.residual == "reload", "there is no residual to keep"),
            (together == 1 or together <= self.problem.sequences, f"there are only {self.problem.sequences} sequences"),
            (tiles % c.qkv_rows == 0, f"qkv_rows {c.qkv_rows} does not divide {tiles} row tiles"),
            (self.row_tiles % c.out_rows == 0, f"out_rows {c.out_rows} does not divide {self.row_tiles} row tiles"),
            (self.qkv_tiles % self.qkv_columns == 0, f"qkv_columns {self.qkv_columns} does not divide {self.qkv_tiles} column tiles"),
            (self.out_tiles % c.out_columns == 0, f"out_columns {c.out_columns} does not divide {self.out_tiles} column tiles"),
            (self.padded_length % c.key_tile == 0, f"key_tile {c.key_tile} does not divide the padded length {self.padded_length}"),
            (target.dependent_launch or not c.dependent_launch, f"{target.arch} has no dependent launch"),
            (
                blocks * self.threads <= target.threads_per_sm,
                f"{blocks} x {self.threads} threads exceed {target.threads_per_sm} a multiprocessor",
            ),
            (self.shared_bytes <= target.shared_per_block, f"{self.shared_bytes} bytes of shared memory exceed {target.shared_per_block}"),
            (
                blocks == 1 or blocks * (self.shared_bytes + RESERVED_SHARED) <= target.shared_per_sm,  # one block: as above
                f"{blocks} x {self.shared_bytes} bytes of shared memory exceed {target.shared_per_sm} a multiprocessor",
            ),
            (self.registers <= registers, f"about {self.registers} registers a thread exceed the {registers} there are"),
        )
        return [reason for holds, reason in rules if not holds]


@lru_cache(maxsize=4096)
def _layout(
    math: str, rows: int, padded_dim: int, inner: int, dim: int, itemsize: int,
    fragment: int, norm_lanes: int, norm_vector: int, keep: bool, padded: bool, keys_shared: bool, weights_shared: bool,
) -> Layout:  # fmt: skip
    parts = HALF_PARTS.get(math, 0)
    per_page = 8 * 2 // (parts or 2)  # columns
    values = (_VALUES if math != "ffma" else _VALUES_FFMA, _STORE)
    pages = rows // 16 * (inner // per_page)
    buffers: list[tuple[str, int, int, tuple[Access, ...]]] = [
        ("normed", rows // 16 * (padded_dim // per_page), 128, (norm_store(parts, fragment, norm_lanes, norm_vector), _QUADRUPLES[1])),
        ("query", pages, 128, _QUADRUPLES),
    ]
    if keys_shared:
        buffers.append(("key", pages, 128, _QUADRUPLES))
        buffers.append(("value", pages, 128, _QUADRUPLES) if parts else ("value", rows, inner, values))
    if keep:
        buffers.append(("kept", rows, ceil_div(dim * itemsize, 4), kept_accesses(itemsize, norm_lanes, norm_vector)))
    if weights_shared:
        for name, columns, words, each in (
            ("qkv_weight", 3 * inner, padded_dim * itemsize // 4, fragment),
            ("out_weight", ceil_div(dim, 8) * 8, inner * itemsize // 4, 2),
        ):
            buffers.append((name, columns, words, weight_accesses(itemsize, each, words)))
    return stack(buffers, padded, copied=("qkv_weight", "out_weight"))


def default(problem: AxisProblem, target: Target, math: str | None = None) -> SequenceConfig | None:
    """The configuration to start from: what a careful author would pick without measuring. None if nothing is legal.

    math: of the element type's arithmetics, the first of DTYPE_MATHS unless given.
    """
    for candidate in _careful(problem, target, math or DTYPE_MATHS[problem.block.dtype][0]):
        if not SequencePlan(problem, candidate).reasons(target):
            return candidate
    return None


def alternatives(problem: AxisProblem, target: Target, math: str) -> list[SequenceConfig]:
    """Other starts where heads are in registers: weights through shared memory, for which two things have to change at once, and two warps
    a head with little in registers, which is several."""
    start = default(problem, target, math)
    if start is None or start.heads != "registers":
        return []
    shared = replace(start, weights="shared", residual="shared" if problem.block.residual else "reload", prefetch="qkv", rounds=1)
    two_warps = replace(start, head_warps=2, qkv_columns=2, qkv_rows=1, norm_lanes=16, prefetch="none", rounds=1)
    return [config for config in (shared, two_warps) if not SequencePlan(problem, config).reasons(target)]


def _careful(problem: AxisProblem, target: Target, math: str) -> Iterator[SequenceConfig]:
    """Candidates from fast to frugal."""
    tensor_cores, half = math != "ffma", math in HALF_PARTS
    if half:
        yield from _careful_registers(problem, target, math)
    fragments = (4, 2) if tensor_cores else (2,)
    weights = (("hold", "qkv"), ("hold", "none"), ("stream", "none")) if tensor_cores else (("stream", "none"),)
    for (held, prefetch), columns, warps, rows, key_tile, fragment, padding in itertools.product(
        weights, (6, 2) if half else (3, 2, 1), (8, 4, 2), (1, 2) if half else (2, 1), (32, 16), fragments, (True, False)
    ):
        yield SequenceConfig(
            math=math,
            warps=warps,
            qkv_rows=rows,
            qkv_columns=columns,
            out_rows=rows,
            out_columns=1,
            key_tile=key_tile,
            fragment=fragment,
            weights=held,
            prefetch=prefetch,
            padding=padding,
            dependent_launch=target.dependent_launch,
        )


def _careful_registers(problem: AxisProblem, target: Target, math: str) -> Iterator[SequenceConfig]:
    """Candidates with q, k and v in registers: a sequence a block, or as many as give a warp to each scheduler."""
    heads, tiles = problem.block.heads, ceil_div(problem.block.dim, 8)
    sequences = next((n for n in (1, 2, 4) if n * heads >= 4), 4)
    warps = sequences * heads
    out_columns = next((n for n in (1, 2, 3, 4) if tiles % n == 0 and tiles // n <= warps), 1)
    row_tiles = sequences * ceil_div(problem.length, 16)
    pairs = 8 * row_tiles
    lanes = next((n for n in (16, 8) if n * pairs <= 32 * warps), 4)
    many = [n for n in (8, 4, 2) if problem.sequences >= 2 * target.sms * sequences * n]
    keys = [n for n in (80, 64, 48, 32, 16) if ceil_div(problem.length, 16) * 16 % n == 0]
    prefetches = ("both", "qkv", "none") if problem.length <= 32 else ("qkv", "none")
    for columns, rounds, rows, key_tile, prefetch in itertools.product((6, 2), (*many, 1), (2, 1), keys, prefetches):
        yield SequenceConfig(
            math=math,
            heads="registers",
            sequences=sequences,
            rounds=rounds,
            qkv_rows=rows,
            qkv_columns=columns,
            out_rows=rows,
            out_columns=out_columns,
            key_tile=key_tile,
            prefetch=prefetch,
            norm_lanes=lanes,
            dependent_launch=target.dependent_launch,
        )
