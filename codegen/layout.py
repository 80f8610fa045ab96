"""Shared memory of one block: where each buffer lies, how its rows are padded or swizzled, and what its accesses cost.

Shared memory has 32 banks of 4 bytes (CUDA C++ Programming Guide, compute capability 5.x and later). A warp's 4-byte
accesses are served together, its 8-byte accesses by half warps and its 16-byte accesses by quarter warps; within such a
group every distinct word of one bank costs one more wavefront.

An asynchronous copy (cp.async) is written as its data arrive: what a warp copies of a line of global memory, 128 bytes, arrives
together, and takes a wavefront for each line of shared memory that it touches (counted on an H200). Padding sets a row off
the lines, so that copies straddle two. Where rows are whole lines, they can be swizzled instead, as matrices for wgmma are
(PTX ISA, "Swizzling Modes"): chunks of 16 bytes change places within their line, by a pattern that depends on the row.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass

BANKS = 32
CHUNK = 4
"""Words that swizzling leaves together: 16 bytes, of which a line has 8."""


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


@dataclass(frozen=True)
class Access:
    """One access pattern of a warp to a matrix in shared memory.

    name: what does it, for reports; width: words a lane reads or writes at once (1, 2 or 4).
    cell: lane (0 to 31) -> (row, column) of the first word the lane touches.
    """

    name: str
    width: int
    cell: Callable[[int], tuple[int, int]]

    def conflicts(self, stride: int, swizzle: int = 0) -> int:
        """Extra wavefronts of one warp-wide access, for rows `stride` words apart; 0 is conflict-free."""
        group = 32 // self.width
        extra = 0
        for start in range(0, 32, group):
            words: set[int] = set()
            for lane in range(start, start + group):
                row, column = self.cell(lane)
                first = row * stride + swizzled(row, column, swizzle)
                words.update(range(first, first + self.width))
            banks = [0] * BANKS
            for word in words:
                banks[word % BANKS] += 1
            extra += max(banks) - 1
        return extra


@dataclass(frozen=True)
class Buffer:
    """A matrix of 4-byte words in shared memory, or a run of equal tiles (a tile is then a row); offset and stride in words.

    swizzle: of its rows, as `swizzled` has it; 0 where words lie in their order."""

    name: str
    rows: int
    columns: int
    offset: int
    stride: int
    accesses: tuple[Access, ...] = ()
    swizzle: int = 0

    @property
    def words(self) -> int:
        return self.rows * self.stride

    def conflicts(self) -> dict[str, int]:
        """Access name -> extra wavefronts of one warp-wide access."""
        return {access.name: access.conflicts(self.stride, self.swizzle) for access in self.accesses}


@dataclass(frozen=True)
class Layout:
    """All buffers of a block, one after another, each starting on 16 bytes, or on a line of 128 where it is swizzled."""

    buffers: tuple[Buffer, ...]

    @property
    def bytes(self) -> int:
        return 4 * max(b.offset + b.words for b in self.buffers)

    def __getitem__(self, name: str) -> Buffer:
        return next(b for b in self.buffers if b.name == name)


def padded_stride(columns: int, accesses: Iterable[Access]) -> int:
    """The smallest stride of at least `columns` words, a multiple of 4, whose accesses conflict least, the first named
    one counting before all others."""
    accesses = tuple(accesses)
    first = ceil_div(columns, 4) * 4
    return min(range(first, first + BANKS, 4), key=lambda stride: ([a.conflicts(stride) for a in accesses], stride))


def swizzled(row: int, column: int, swizzle: int) -> int:
    """Where the word of a column lies in its row: chunk c of row r is at chunk c ^ (swizzle * r % 8) of its line."""
    return column ^ CHUNK * (swizzle * row % (BANKS // CHUNK))


def swizzle_of(columns: int, accesses: Iterable[Access]) -> int:
    """The swizzle by which rows of `columns` words without padding have no conflicts in any access; 0 where there is none, as where rows
    are not whole lines.

    Where four lanes read `width` words each of a row, and the next four of the next row, it is the width: these 4 * width words are `width`
    chunks, of which a line has 8 / width; as many rows are read at once, whose patterns are the multiples of the width below 8.
    """
    if columns % BANKS:
        return 0
    accesses = tuple(accesses)
    return next((swizzle for swizzle in (1, 2, 4) if not any(access.conflicts(columns, swizzle) for access in accesses)), 0)


def stack(parts: Iterable[tuple[str, int, int, tuple[Access, ...]]], padded: bool, copied: Container[str] = ()) -> Layout:
    """Lays out (name, rows, columns, accesses) one after another, with conflict-avoiding strides when `padded`. Buffers whose name is in
    `copied` are filled by asynchronous copies: their rows are swizzled instead where that avoids conflicts too."""
    buffers: list[Buffer] = []
    offset = 0
    for name, rows, columns, accesses in parts:
        swizzle = swizzle_of(columns, accesses) if padded and name in copied else 0
        stride = padded_stride(columns, accesses) if padded and not swizzle else ceil_div(columns, 4) * 4
        if swizzle:
            offset = ceil_div(offset, BANKS) * BANKS
        buffers.append(Buffer(name, rows, columns, offset, stride, accesses, swizzle))
        offset += rows * stride
    return Layout(tuple(buffers))
