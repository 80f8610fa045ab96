"""The `resident` family: a whole axis in one kernel by warpgroups, for sequences whose normalised tokens fit into shared memory.

A block normalises the tokens of one or a few sequences and keeps them as operand A of Hopper's matrix unit. Then it goes from one group of
heads to the next: their QKV product, whose queries stay in registers and whose keys and values lie in shared memory, and their attention.
q, k and v never reach global memory. The attention's result does where shared memory has no room for it beside the tokens: as operand A of
the output product, which bulk copies bring to the tokens' place once nothing reads these any more. The weights of both products are
packed before (codegen/warpgroup_product.py) and stream through one ring of buffers.

Tokens beyond a sequence's end are zeros; a row tile is 16 tokens of one sequence, as in the `staged` family, whose stages this one
composes anew (templates/stages/resident.cuh).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from codegen.config import Config, tunable
from codegen.layout import ceil_div
from codegen.sequence import DTYPE_MATHS as ALL_MATHS
from codegen.sequence import HALF_PARTS
from codegen.spec import AxisProblem
from codegen.streamed_attention import Attention, tricks
from codegen.streamed_plan import StreamedPlan
from codegen.target import Target
from codegen.warpgroup_product import SUM_TILE, SUM_TILES, WARPS, WarpgroupProduct

DTYPE_MATHS = {dtype: tuple(math for math in maths if math in HALF_PARTS) for dtype, maths in ALL_MATHS.items()}
_MATHS = tuple(math for maths in DTYPE_MATHS.values() for math in maths)
_MOST_COLUMNS = 256  # of one instruction
_MOST_THREADS = 512


@dataclass(frozen=True)
class ResidentConfig(Config):
    """One point of the `resident` family's space."""

    family: ClassVar[str] = "resident"

    math: str = tunable("bf16", _MATHS, "arithmetic of the products")
    # Rows before sequences: there are sequences that fill blocks of any rows, but not the other way round (tuner/space.py completes so).
    rows: int = tunable(1, (1, 2, 4), "16-row tiles of a warp")
    sequences: int = tunable(1, (1, 2, 4, 8), "sequences of a block")
    head_group: int = tunable(1, (1, 2, 4), "heads whose q, k and v are computed at once", before=1)
    overlap: bool = tunable(True, (True, False), "multiply for the next heads while attention is computed")
    sum_tile: int = tunable(64, SUM_TILES, "indices of the sum in one step of the products")
    stages: int = tunable(3, (2, 3, 4, 5, 6), "buffers for weights under way, a step each")
    attention: str = tunable("mma", ("mma", "wgmma"), "attention: instructions, mma.sync or Hopper's wgmma")
    key_tile: int = tunable(32, (16, 32, 48, 64, 80, 128), "keys of one step of the streaming softmax")
    sums: str = tunable("add", ("add", "product"), "sums of the attention's weights by additions, or by one more product")
    polynomial: int = tunable(0, (0, 1, 2, 3, 4), "of eight exponentials, those computed as polynomials")
    result: str = tunable("scratch", ("scratch", "shared"), "attention's result: in global scratch, or in shared memory beside the tokens")
    out_columns: int = tunable(8, (4, 8, 12, 16, 24, 32), "8-column tiles of the output product that are computed at once")
    blocks: int = tunable(1, (1, 2, 3, 4), "blocks a multiprocessor must be able to hold, which caps registers")
    dependent_launch: bool = tunable(True, (True, False), "start while weights are packed, or the axis before it still runs")


@dataclass(frozen=True)
class ResidentPlan(StreamedPlan):
    """What a configuration means for a problem: padded sizes, warps, shared memory, registers, scratch."""

    config: ResidentConfig

    @property
    def block_tiles(self) -> int:
        """Row tiles of a block's sequences."""
        return self.config.sequences * self.tiles

    @property
    def warps(self) -> int:
        """Whole warpgroups, with at least as many row tiles as there are."""
        return WARPS * ceil_div(self.block_tiles, WARPS * self.config.rows)

    def _product(self, sum: int, columns: int, all_columns: int, run: int, copy: int) -> WarpgroupProduct:
        c = self.config
        return WarpgroupProduct(
            operands=max(1, self.parts), warp_columns=columns, down=self.warps, stages=c.stages, parts=1, blocks=c.blocks,
            sum=ceil_div(sum, SUM_TILE) * SUM_TILE, all_columns=all_columns, copy=copy, run=run, sum_tile=c.sum_tile,
            warp_rows=c.rows,
        )  # fmt: skip

    @cached_property
    def qkv(self) -> WarpgroupProduct:
        """A column tile is a group of heads: q, k and v of each."""
        return self._product(self.dim, self.config.head_group * 3 * self.padded_head_dim // 8, 3 * self.inner, 2, self.copy(self.dim))

    @cached_property
    def out(self) -> WarpgroupProduct:
        columns = self.config.out_columns
        return self._product(self.inner, columns, self.dim, self.run(columns), min(2, self.copy(self.head_dim)))

    @property
    def packed(self) -> dict[str, WarpgroupProduct]:
        """Both products' weights."""
        return {"qkv": self.qkv, "out": self.out}

    @cached_property
    def attention(self) -> Attention:
        c = self.config
        return Attention(
            math=c.math, warps=self.warps, rows=c.rows, key_tile=c.key_tile, stages=1, sums=c.sums, polynomial=c.polynomial,
            blocks=c.blocks, tiles=self.tiles, padded_head_dim=self.padded_head_dim, row_tile=self.row_tile,
            biased=self.problem.block.logit_bias,
        )  # fmt: skip

    # Shared memory, in words: operand A of either product, in the same place or one behind the other, the ring, a head's keys and
    # values, barriers, the output's bias

    @property
    def attended(self) -> int:
        """Where operand A of the output product starts."""
        return self.qkv.buffers if self.config.result == "shared" else 0

    @property
    def ring(self) -> int:
        """Where the ring starts."""
        return max(self.qkv.buffers, self.attended + self.out.buffers)

    @property
    def ring_tile(self) -> int:
        """Words of a buffer of the ring."""
        return max(self.qkv.b_tile, self.out.b_tile)

    @property
    def kept_tiles(self) -> int:
        """Row tiles of keys, and of values: wgmma has whole blocks of 64."""
        return self.qkv.row_tiles if self.config.attention == "wgmma" else self.block_tiles

    @property
    def _kept(self) -> int:
        """Words of a group's keys, and of its values."""
        return self.config.head_group * self.kept_tiles * self.row_tile

    @property
    def keys(self) -> int:
        """Where the keys start."""
        return self.ring + self.config.stages * self.ring_tile

    @property
    def values(self) -> int:
        return self.keys + self._kept

    @property
    def barriers(self) -> int:
        """Two words for each buffer, and for each of two copies of the attention's result."""
        return self.values + self._kept

    @property
    def bias(self) -> int:
        """Where the output's bias starts."""
        return ceil_div(self.barriers + 2 * (self.config.stages + 2 * (self.config.result == "scratch")), 4) * 4

    @property
    def _bias_words(self) -> int:
        return ceil_div(self.dim * self.problem.block.itemsize, 4) if self.problem.block.out_bias else 0

    @property
    def key_columns(self) -> int:
        """Column tiles of wgmma's scores."""
        return self.config.key_tile // 8

    @property
    def value_columns(self) -> int:
        """Of its weighted sums."""
        return self.padded_head_dim // 8

    @property
    def scratch(self) -> tuple[tuple[str, int], ...]:
        """(name, elements of the block's type for one image): the attention's result, of each block as operand A of the output product.
        An image's last block may be partly filled, so that a batch has enough for its own."""
        blocks, words = ceil_div(self.problem.lines, self.config.sequences), self.out.buffers
        return (("attended", blocks * words * 4 // self.problem.block.itemsize),) if self.config.result == "scratch" else ()

    @cached_property
    def kernels(self) -> dict[str, tuple[int, int, int, int]]:
        """Kernel -> threads of a block, bytes of shared memory, blocks asked for on a multiprocessor, registers estimated."""
        shared = 4 * (self.bias + self._bias_words)
        return {"block": (32 * self.warps, shared, self.config.blocks, self._registers), **self.norm_kernel}

    @property
    def _registers(self) -> int:
        """From below: accumulators, what attention keeps, addressing."""
        c = self.config
        first, second = (4 * c.rows * p.operands * p.warp_columns for p in (self.qkv, self.out))
        others = (c.head_group - 1) * c.rows * self.row_tile // 32  # queries of the group's other heads, which wait
        by_wgmma = 24 + c.rows * (5 * c.key_tile + 3 * self.padded_head_dim) // 4  # scores of two tiles, weights, queries, result
        attention = by_wgmma if c.attention == "wgmma" else self.attention.registers
        return max(attention + others + (first if self.overlaps else 0), 16 + 8 * c.rows + max(first, second), 24 + self.qkv.norm_values)

    @property
    def capped(self) -> dict[str, int]:
        """Tunable that caps registers -> threads of the block it concerns."""
        return {"blocks": 32 * self.warps}

    @property
    def overlaps(self) -> bool:
        """Whether there are next heads to multiply for."""
        return self.config.overlap and self.problem.block.heads > self.config.head_group

    @property
    def representative(self) -> dict[str, int | str]:
        """Tunables that make no difference to the source here -> the value that stands for all."""
        return {"overlap": self.overlaps}

    def reasons(self, target: Target) -> list[str]:
        """Why the configuration is not legal for the problem on the target; empty when it is."""
        c, block = self.config, self.problem.block
        heads = f"{c.head_group} heads" if c.head_group > 1 else "a head"
        out_tiles, keys = ceil_div(self.dim, 8), 16 * self.kept_tiles // c.sequences
        tile = c.key_tile * (2 if c.attention == "wgmma" else 1)  # wgmma takes tiles of keys in pairs
        rules = [
            (target.warpgroup_products, f"{target.arch} has no wgmma"),
            (target.dependent_launch or not c.dependent_launch, f"{target.arch} has no dependent launch"),
            (c.math in DTYPE_MATHS[block.dtype], f"math {c.math} is not for {block.dtype}: {' or '.join(DTYPE_MATHS[block.dtype])}"),
            (block.heads % c.head_group == 0, f"head_group {c.head_group} does not divide {block.heads} heads"),
            (self.qkv.columns <= _MOST_COLUMNS, f"q, k, v of {heads} have {self.qkv.columns} columns, over {_MOST_COLUMNS} of wgmma"),
            (self.attention.holds_queries, f"head_dim {self.head_dim} has too many queries for registers"),
            (c.sequences == 1 or c.sequences <= self.problem.sequences, f"there are only {self.problem.sequences} sequences"),
            (self.tiles % c.rows == 0 or c.sequences == 1, f"rows {c.rows} does not divide the {self.tiles} row tiles of a sequence"),
            (self.block_tiles > WARPS * c.rows // 2, f"rows {c.rows} leaves half of the block without tokens"),
            (keys % tile == 0, f"key_tile {c.key_tile}: {tile} keys do not divide the {keys} of a sequence"),
            (c.out_columns < 2 * out_tiles or c.out_columns == 4, f"out_columns {c.out_columns} exceeds what {self.dim} channels need"),
            *self.attention.weight_rules("sums", "polynomial"),
            *(self._warpgroup_rules() if c.attention == "wgmma" else ()),
            *self.resource_rules(target, _MOST_THREADS),
        ]
        return [reason for holds, reason in rules if not holds]

    def _warpgroup_rules(self) -> list[tuple[bool, str]]:
        """What attention by wgmma asks for."""
        c, block = self.config, self.problem.block
        whole = c.sequences == 1 or self.tiles % (WARPS * c.rows) == 0
        return [
            (self.parts == 1, f"attention by wgmma has no rests, which math {c.math} has"),
            (not block.terms, "attention by wgmma has no key mask and no logit bias"),
            (self.padded_head_dim in (16, 32, 64), f"attention by wgmma has rows of 16, 32 or 64 channels, not {self.padded_head_dim}"),
            (whole, f"a warpgroup's queries are not of one sequence of {self.tiles} row tiles"),
            (c.sums == "add", "attention by wgmma adds up weights in lanes"),
        ]


def default(problem: AxisProblem, target: Target, math: str | None = None) -> ResidentConfig | None:
    """The configuration to start from: what a careful author would pick without measuring. None if nothing is legal."""
    if not target.warpgroup_products or math not in (None, *_MATHS):
        return None
    maths = DTYPE_MATHS[problem.block.dtype] if math is None else (math,)
    return next((start for each in maths for start in _starts(problem, target, each)), None)


def alternatives(problem: AxisProblem, target: Target, math: str) -> list[ResidentConfig]:
    """Other configurations to start from than the default: attention by either instruction, with and without overlap."""
    return list(_starts(problem, target, math))


def _starts(problem: AxisProblem, target: Target, math: str) -> Iterator[ResidentConfig]:
    """The better attention first: exponentials bound that of narrow heads, which mma.sync needs no whole warpgroups for."""
    attentions = ("mma", "wgmma") if problem.block.head_dim <= 16 else ("wgmma", "mma")
    for attention, overlap in itertools.product(attentions, (False, True)):
        if found := _careful(problem, target, math, attention, overlap):
            yield found


def _careful(problem: AxisProblem, target: Target, math: str, attention: str, overlap: bool) -> ResidentConfig | None:
    """The first that is legal, from fast to frugal: 128 tokens or more where sequences are short; two blocks on a multiprocessor, so that
    one multiplies while the other computes exponentials; where sequences are short, so that stages are, as many heads at once as fit, which
    are fewer stages; the result in shared memory; wide column tiles, many buffers."""
    block, tiles = problem.block, ceil_div(problem.length, 16)
    sums, polynomial = tricks(problem, math)
    polynomial = min(polynomial, 1)
    if attention == "wgmma" or block.head_dim > 16:
        sums, polynomial = "add", 0  # exponentials do not bound a block that multiplies as much
    together = [n for n in (1, 2, 4, 8) if n == 1 or (n <= problem.sequences and 16 * n * tiles <= 256)]
    least = min(128, 16 * together[-1] * tiles) if tiles <= 4 else 0
    rows_and_sequences = [pair for pair in itertools.product((1, 2, 4), together) if _attends(problem, math, attention, *pair)]
    groups = [n for n in (4, 2, 1) if n == 1 or (tiles <= 5 and not overlap and block.heads % n == 0)]
    columns = [n for n in (32, 16, 8, 4) if n <= max(4, ceil_div(block.dim, 8))]
    # Operands in two parts take twice the registers; a multiprocessor with four warpgroups or fewer has some to spare.
    key_tiles: tuple[int, ...] = (16, 32, 80, 48) if math == "fp16x3" else (32, 80, 48, 16)
    if attention == "wgmma" and tiles <= 8:
        key_tiles = (64, *key_tiles)
    rings = [(64, 4), (64, 3), (32, 4), (32, 3), (64, 2), (32, 2)]  # steps of half the size rather than two buffers alone
    if block.dim <= SUM_TILE:  # a column tile is one step, which half the size would make two
        rings.sort(reverse=True)
    for tokens, blocks, head_group, (rows, sequences), result, out_columns, (sum_tile, stages), key_tile in itertools.product(
        (least, 0) if least else (0,), (2, 1), groups, rows_and_sequences, ("shared", "scratch"), columns, rings, key_tiles
    ):
        if 16 * sequences * tiles < tokens:
            continue
        config = ResidentConfig(
            math=math, sequences=sequences, rows=rows, head_group=head_group, overlap=overlap, sum_tile=sum_tile, stages=stages,
            attention=attention, key_tile=key_tile, sums=sums, polynomial=polynomial, result=result, out_columns=out_columns,
            blocks=blocks,
        )  # fmt: skip
        if not ResidentPlan(problem, config).reasons(target):
            return config
    return None


def _attends(problem: AxisProblem, math: str, attention: str, rows: int, sequences: int) -> bool:
    """Whether the instruction can have these queries, whatever else is chosen: asked first, as the choices are thousands."""
    if attention != "wgmma":
        return True
    plan = ResidentPlan(problem, ResidentConfig(math=math, rows=rows, sequences=sequences, attention=attention))
    return all(holds for holds, _ in plan._warpgroup_rules())
