"""The same product on Hopper's matrix unit (templates/stages/staged_warpgroup.cuh): its tiles and its shared memory.

Operands are K-major with 128-byte swizzle (PTX ISA, "Shared Memory Matrix Layout"): rows of 64 indices of the sum, which the accesses of
both kernels to operand A meet without bank conflicts.
"""

from __future__ import annotations

from dataclasses import dataclass

from codegen.layout import Access, ceil_div
from codegen.tiled_product import settled_tiles

SUM_TILES = (32, 64)
"""Indices of the sum in one step: rows of 64 or 128 bytes in the buffers. Of the same bytes, smaller steps have more under way."""
SUM_TILE = 64
"""Indices of the sum in one step: a swizzled row of 128 bytes."""
ROW = 32
"""Words of a swizzled row."""
CHUNK = 8
"""Indices of the sum that swizzling leaves together: 16 bytes."""
WARPS = 4
"""Of a warpgroup, each with 16 of its 64 rows."""
MOST_ROW_TILES = 16
"""Row tiles of the largest block, of which those of all others are divisors."""
COLUMN_TILES = (8, 12, 16, 24, 32)
"""Column tiles of one instruction."""


@dataclass(frozen=True)
class WarpgroupProduct:
    """A tiled product as one kernel computes it; sizes in elements, offsets in words.

    operands: 1, or 2 with the rests; warp_columns: 8-column tiles of a block, all of which every warp has; down: warps of a block, with
    `warp_rows` times 16 rows each; sum: the padded length of the sum; copy: neighbouring weights that can be read at once; run:
    neighbouring columns of the result that a lane has; streamed: whether operand A comes in steps of the sum as the weights do, from
    scratch in which a kernel before has packed it, so that shared memory does not limit the sum.
    """

    operands: int
    warp_columns: int
    down: int
    stages: int
    parts: int
    blocks: int
    sum: int
    all_columns: int
    copy: int
    run: int
    sum_tile: int = SUM_TILE
    warp_rows: int = 1
    streamed: bool = False

    @property
    def row_tiles(self) -> int:
        return self.down * self.warp_rows

    @property
    def columns(self) -> int:
        return 8 * self.warp_columns

    @property
    def threads(self) -> int:
        return 32 * self.down

    @property
    def b_tile(self) -> int:
        """Words of what one step needs of operand B."""
        return self.operands * self.columns * self.sum_tile // 2

    @property
    def settled(self) -> int:
        """See settled_tiles."""
        return settled_tiles(self.sum, self.sum_tile, self.operands == 2)

    @property
    def a_tile(self) -> int:
        """Words of what one step needs of operand A where it is streamed."""
        return self.operands * 16 * self.row_tiles * self.sum_tile // 2 if self.streamed else 0

    @property
    def buffers(self) -> int:
        """Where the buffers start, behind operand A."""
        return 0 if self.streamed else self.operands * 16 * self.row_tiles * self.sum // 2

    @property
    def barriers(self) -> int:
        """Where the buffers' barriers start, of two words each."""
        return self.buffers + self.stages * (self.a_tile + self.b_tile)

    def streamed_words(self, row_tiles: int) -> int:
        """Words of scratch that operand A of so many row tiles takes; whole blocks, of whatever size, read it."""
        return self.operands * ceil_div(row_tiles, MOST_ROW_TILES) * MOST_ROW_TILES * 16 * self.sum // 2

    @property
    def shared_bytes(self) -> int:
        return 4 * (self.barriers + 2 * self.stages)

    @property
    def column_tiles(self) -> int:
        return ceil_div(self.all_columns, self.columns)

    @property
    def packed(self) -> int:
        """Words that the packed weights take."""
        return self.column_tiles * (self.sum // self.sum_tile) * self.b_tile

    @property
    def chunks(self) -> int:
        """Pieces of eight weights to pack."""
        return self.packed // (4 * self.operands)

    @property
    def norm_lanes(self) -> int:
        """Lanes that have a token to normalise: as few as leave each with 32 channels, because a sum over more of them takes more shuffles
        and all else that is done once a token is done by fewer tokens at a time."""
        return next((lanes for lanes in (4, 8, 16) if self.sum <= 32 * lanes), 32)

    @property
    def norm_held(self) -> int:
        """Tokens that these lanes normalise at once, so that their loads wait together and the norm's parameters are read once for both;
        one where there are many threads, which have few registers each."""
        most = 64 if self.threads * self.blocks <= 512 else 32
        return 2 if 2 * self._norm_channels <= most else 1

    @property
    def norm_values(self) -> int:
        """Channels that a lane has in registers while it normalises."""
        return self.norm_held * self._norm_channels

    @property
    def _norm_channels(self) -> int:
        return CHUNK * ceil_div(self.sum // CHUNK, self.norm_lanes)

    @property
    def registers(self) -> int:
        """An estimate of registers a thread, from below: accumulators, addressing."""
        return 40 + 4 * self.warp_columns * self.operands

    def conflicts(self) -> dict[str, int]:
        """Access name -> extra wavefronts of one warp-wide access; rows are swizzled (`swizzled` in templates/warpgroup.cu.j2)."""
        return {access.name: access.conflicts(ROW, 1) for access in (_normalised(self.norm_lanes), _ATTENDED)}


def _normalised(lanes: int) -> Access:
    """A chunk of a token a lane, of as many tokens as the warp has groups of `lanes`; beyond a row is the next tile of the sum. See
    normalise_by_groups in templates/stages/staged_warpgroup_norm.cuh."""

    def cell(lane: int) -> tuple[int, int]:
        group = lane // lanes
        row = group % 2 * 4 + group // 2 if lanes == 4 else group
        return row, CHUNK * (lane % lanes) % SUM_TILE // 2

    return Access("tokens as operand A", 4, cell)


def _attended(lane: int) -> tuple[int, int]:
    """A chunk a lane, of eight indices; a quarter warp has two rows, and of them every second chunk."""
    return lane // 4, 8 * (lane % 4)


_ATTENDED = Access("fragments as operand A", 4, _attended)
