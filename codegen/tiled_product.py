"""The tiled product that the staged family's first and third kernel are (templates/stages/staged_product.cuh): its tiles, its shared
memory and the bank conflicts of the accesses to it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from codegen.layout import Access, padded_stride
from codegen.sequence import HALF_PARTS, norm_store

LONG_SUM, SETTLED = 640, 512
"""Tensor cores truncate what they have added up, each time by up to 2^-23 of it: float32 sums longer than LONG_SUM begin anew after SETTLED
indices, and what they were is added up by ordinary additions."""


def settled_tiles(sum: int, sum_tile: int, exact: bool) -> int:
    """Tiles of a sum after which it begins anew; 0 where it does not, as where it is not of float32 products on tensor cores (`exact`):
    16-bit results do not show the difference."""
    return SETTLED // sum_tile if exact and sum > LONG_SUM else 0


@dataclass(frozen=True)
class Product:
    """A tiled product as one kernel computes it (templates/stages/staged_product.cuh); sizes in elements, offsets in words.

    sum: the padded length of the sum, a multiple of sum_tile; all_columns: of the result; copy: elements of one asynchronous copy
    (fewer than per_word: they are not copied asynchronously); per_word: weights in a word; norm_vector: neighbouring channels of a token
    that a lane stores as operand A, 0 where operand A is copied; run: neighbouring columns of the result that a lane has.
    """

    math: str
    warp_rows: int
    warp_columns: int
    down: int
    warps_across: int
    sum_tile: int
    stages: int
    parts: int
    blocks: int
    sum: int
    all_columns: int
    copy: int
    fragment: int
    per_word: int
    norm_vector: int = 0
    run: int = 2

    @property
    def settled(self) -> int:
        """See settled_tiles."""
        return settled_tiles(self.sum, self.sum_tile, self.math in ("fp16x3", "tf32x3"))

    @property
    def row_tiles(self) -> int:
        return self.warp_rows * self.down

    @property
    def columns(self) -> int:
        return 8 * self.warp_columns * self.warps_across

    @property
    def threads(self) -> int:
        return 32 * self.down * self.warps_across

    @property
    def plane(self) -> int:
        """Indices of the sum that a step's lanes read side by side: a row of one plane."""
        return 4 * self.fragment

    @property
    def column_stride(self) -> int:
        return _column_stride(self.math == "ffma", self.fragment, self.per_word)

    @property
    def plane_stride(self) -> int:
        return _plane_stride(self.columns, self.column_stride, self.plane, self.sum_tile, self.copy, self.per_word)

    @property
    def b_tile(self) -> int:
        return self.sum_tile // self.plane * self.plane_stride

    @property
    def pages(self) -> int:
        """Pages of 128 words that a row tile of operand A takes in a tile of the sum."""
        return self.sum_tile // 8 * HALF_PARTS.get(self.math, 2) // 2

    @property
    def page(self) -> int:
        """Words from one page of operand A to the next."""
        return _page(HALF_PARTS.get(self.math, 0), self.fragment, self.norm_vector) if self.norm_vector else 128

    @property
    def buffers(self) -> int:
        """Where the buffers start, behind operand A."""
        return self.row_tiles * (self.sum // self.sum_tile) * self.pages * self.page

    @property
    def shared_bytes(self) -> int:
        return 4 * (self.buffers + self.stages * self.b_tile)

    @property
    def registers(self) -> int:
        """An estimate of registers a thread, from below: accumulators, operands of one step, addressing."""
        sums = HALF_PARTS.get(self.math, 1)
        accumulators = 4 * self.warp_rows * self.warp_columns * sums
        return 32 + accumulators + self.warp_rows * 8 + 2 * self.warp_columns

    def conflicts(self) -> dict[str, int]:
        """Access name -> extra wavefronts of one warp-wide access."""
        operand = _operand_access(self.math == "ffma", self.fragment, self.per_word)
        copy = _copy_access(self.column_stride, self.plane, self.sum_tile, self.copy, self.per_word)
        found = {operand.name: operand.conflicts(self.column_stride), copy.name: copy.conflicts(self.plane_stride)}
        if self.norm_vector:
            store = norm_store(HALF_PARTS.get(self.math, 0), self.fragment, 32, self.norm_vector)
            found[store.name] = store.conflicts(self.page)
        return found


def _operand_access(ffma: bool, fragment: int, per_word: int) -> Access:
    """A warp's load of operand B from one plane; see `read` in templates/math_*.cuh."""
    if ffma:
        return Access("weights as operand B", 2, lambda lane: (2 * (lane % 4), 0))
    width = fragment // per_word
    return Access("weights as operand B", width, lambda lane: (lane // 4, width * (lane % 4)))


def _copy_access(column_stride: int, plane: int, sum_tile: int, copy: int, per_word: int) -> Access:
    """A warp's copies, of whole words; a row is a plane here."""
    copy = max(copy, per_word)
    chunks = sum_tile // copy

    def cell(lane: int) -> tuple[int, int]:
        k = lane % chunks * copy
        return k // plane, lane // chunks * column_stride + k % plane // per_word

    return Access("weights copied", copy // per_word, cell)


@cache
def _page(parts: int, fragment: int, vector: int) -> int:
    return padded_stride(128, (norm_store(parts, fragment, 32, vector),))


@cache
def _column_stride(ffma: bool, fragment: int, per_word: int) -> int:
    return padded_stride(4 * fragment // per_word, (_operand_access(ffma, fragment, per_word),))


@cache
def _plane_stride(columns: int, column_stride: int, plane: int, sum_tile: int, copy: int, per_word: int) -> int:
    return padded_stride(columns * column_stride, (_copy_access(column_stride, plane, sum_tile, copy, per_word),))
