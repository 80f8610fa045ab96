"""Shared memory of one block: where each buffer lies, how its rows are padded, and what its accesses cost.

Shared memory has 32 banks of 4 bytes (CUDA C++ Programming Guide, compute capability 5.x and later). A warp's 4-byte
accesses are served together, its 8-byte accesses by half warps and its 16-byte accesses by quarter warps; within such a
group every distinct word of one bank costs one more wavefront.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

BANKS = 32


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

    def conflicts(self, stride: int) -> int:
        """Extra wavefronts of one warp-wide access, for rows `stride` words apart; 0 is conflict-free."""
        group = 32 // self.width
        extra = 0
        for start in range(0, 32, group):
            words: set[int] = set()
            for lane in range(start, start + group):
                row, column = self.cell(lane)
                first = row * stride + column
                words.update(range(first, first + self.width))
            banks = [0] * BANKS
            for word in words:
                banks[word % BANKS] += 1
            extra += max(banks) - 1
        return extra


@dataclass(frozen=True)
class Buffer:
    """A matrix of 4-byte words in shared memory, or a run of equal tiles (a tile is then a row); offset and stride in words."""

    name: str
    rows: int
    columns: int
    offset: int
    stride: int
    accesses: tuple[Access, ...] = ()

    @property
    def words(self) -> int:
        return self.rows * self.stride

    def conflicts(self) -> dict[str, int]:
        """Access name -> extra wavefronts of one warp-wide access."""
        return {access.name: access.conflicts(self.stride) for access in self.accesses}


@dataclass(frozen=True)
class Layout:
    """All buffers of a block, one after another, each starting on 16 bytes."""

    buffers: tuple[Buffer, ...]

    @property
    def bytes(self) -> int:
        return 4 * sum(b.words for b in self.buffers)

    def __getitem__(self, name: str) -> Buffer:
        return next(b for b in self.buffers if b.name == name)


def padded_stride(columns: int, accesses: Iterable[Access]) -> int:
    """The smallest stride of at least `columns` words, a multiple of 4, whose accesses conflict least, the first named
    one counting before all others."""
    accesses = tuple(accesses)
    first = ceil_div(columns, 4) * 4
    return min(range(first, first + BANKS, 4), key=lambda stride: ([a.conflicts(stride) for a in accesses], stride))


def stack(parts: Iterable[tuple[str, int, int, tuple[Access, ...]]], padded: bool) -> Layout:
    """Lays out (name, rows, columns, accesses) one after another, with conflict-avoiding strides when `padded`."""
    buffers: list[Buffer] = []
    offset = 0
    for name, rows, columns, accesses in parts:
        stride = padded_stride(columns, accesses) if padded else ceil_div(columns, 4) * 4
        buffers.append(Buffer(name, rows, columns, offset, stride, accesses))
        offset += rows * stride
    return Layout(tuple(buffers))
