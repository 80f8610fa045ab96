"""The streaming attention (templates/stages/streamed_softmax.cuh) that the staged family's second kernel is, and a stage of the resident
family's: its tiles, its shared memory, the range that its weights may have, and what it takes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from codegen.layout import Access, ceil_div, padded_stride
from codegen.sequence import HALF_PARTS
from codegen.spec import AxisProblem

_WEIGHTS_OF_16_BITS = ("bf16", "fp16")
_NARROW = ("fp16", "fp16x3")  # weights of a type that has 2^-24 to 65,504 only
_VALUES = Access("values as operand B", 1, lambda lane: (2 * (lane % 4), lane // 4))
_VALUES_FFMA = Access("values, one key", 2, lambda lane: (0, 2 * (lane % 4)))


@cache
def _value_stride(columns: int, ffma: bool) -> int:
    return padded_stride(columns, (_VALUES_FFMA if ffma else _VALUES,))


@dataclass(frozen=True)
class Attention:
    """Attention as one kernel computes it; sizes and offsets in words.

    warps: of a block, each with `rows` row tiles of 16 queries; key_tile: keys of a step; stages: buffers of such a tile, or 1 for one
    of all keys; sums: of weights, "add" or "product"; polynomial: of eight exponentials; tiles: row tiles of a sequence; row_tile: words of
    one for a head, here and in scratch; biased: whether logits have a bias.
    """

    math: str
    warps: int
    rows: int
    key_tile: int
    stages: int
    sums: str
    polynomial: int
    blocks: int
    tiles: int
    padded_head_dim: int
    row_tile: int
    biased: bool

    # Shared memory: buffers of keys and then values

    @property
    def value_columns(self) -> int:
        """Of values, in one piece: fragments, one after another, or a row."""
        return self.row_tile if self.math in HALF_PARTS else self.padded_head_dim

    @property
    def value_stride(self) -> int:
        return self.row_tile if self.math in HALF_PARTS else _value_stride(self.padded_head_dim, self.math == "ffma")

    @property
    def key_words(self) -> int:
        """Of a tile of keys."""
        return self.key_tile // 16 * self.row_tile

    @property
    def value_words(self) -> int:
        """Of a tile of keys' values."""
        return self.key_words if self.math in HALF_PARTS else self.key_tile * self.value_stride

    @property
    def resident(self) -> bool:
        """Whether all keys of a sequence lie in one buffer."""
        return self.stages == 1

    @property
    def steps(self) -> int:
        """Tiles of keys in a sequence."""
        return ceil_div(16 * self.tiles, self.key_tile)

    @property
    def values(self) -> int:
        """Where a buffer's values start."""
        return self.key_words * (self.steps if self.resident else 1)

    @property
    def buffer(self) -> int:
        return (self.key_words + self.value_words) * (self.steps if self.resident else 1)

    @property
    def shared_bytes(self) -> int:
        return 4 * self.stages * self.buffer

    # The range of weights

    @property
    def headroom(self) -> float:
        """log2 of 1 over the weight of a score that equals the reference: the further it is under the limit, the fewer references
        are raised. Tensor cores that sum weights make the limit 2, so that it has to be room for growth; else it is what fp16's
        absolute error of 2^-25 is small beside."""
        if self.sums == "product":
            return 8.0 if self.math in _NARROW else 32.0
        return -4.0 if self.math in _NARROW else 0.0

    @property
    def limit(self) -> float:
        """The largest sum of a lane's weights in a tile; weights have to fit their type, and polynomials end at 2^32."""
        if self.sums == "product":
            return 2.0
        return 2.0**15 if self.math in _NARROW else 2.0**30

    @property
    def floor(self) -> float:
        """The least sum of a row's weights in the first tile: below it the type's smallest numbers, or its absolute error, are no longer
        small beside it."""
        return {"fp16x3": 1.0, "fp16": 2.0**-12}.get(self.math, 2.0**-64)

    # What it takes

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def groups(self) -> int:
        """Blocks that share a sequence and head."""
        return ceil_div(self.tiles, self.warps * self.rows)

    @property
    def holds_queries(self) -> bool:
        """Whether a warp keeps its queries in registers for the whole sequence; else it reads them again for each tile of keys."""
        return self.math != "ffma" and self.padded_head_dim <= 64

    @property
    def registers(self) -> int:
        """An estimate of registers a thread, from below: scores, result, queries, addressing."""
        scores, result = self.key_tile // 2, self.padded_head_dim // 2 * (2 if self.math == "fp16x3" else 1)
        return 24 + self.rows * (scores + result + (self.row_tile // 32 if self.holds_queries else 0))

    def rules(self) -> list[tuple[bool, str]]:
        """(whether it holds, what to say when not), of the rules that concern this kernel alone."""
        return [
            (
                self.warps * self.rows <= 2 * self.tiles,
                f"attn_warps {self.warps} x attn_rows {self.rows} exceeds what {self.tiles} row tiles need",
            ),
            (self.key_tile < 32 * self.tiles, f"attn_key_tile {self.key_tile} exceeds what {self.tiles} row tiles need"),
            *self.weight_rules("attn_sums", "attn_polynomial"),
        ]

    def weight_rules(self, sums: str, polynomial: str) -> list[tuple[bool, str]]:
        """Those of how weights are computed and summed, by the names of the two tunables."""
        short = self.math in _WEIGHTS_OF_16_BITS
        return [
            (self.sums == "add" or short, f"{sums} {self.sums} needs weights of 16 bits, which math {self.math} has not"),
            (self.polynomial == 0 or short, f"{polynomial} is not exact enough for math {self.math}"),
            (self.polynomial == 0 or not self.biased, f"{polynomial} has no zero, which a bias of minus infinity needs"),
        ]


def tricks(problem: AxisProblem, math: str) -> tuple[str, int]:
    """Sums and polynomials to start from: 16-bit weights of narrow heads leave the tensor cores waiting for exponentials, so that these
    sum the weights then, and some exponentials are polynomials."""
    narrow = math in _WEIGHTS_OF_16_BITS and problem.block.head_dim <= 32
    polynomial = 2 if problem.block.head_dim <= 16 else 1
    return "product" if narrow else "add", polynomial if narrow and not problem.block.logit_bias else 0


def careful(problem: AxisProblem, math: str) -> Iterator[dict[str, Any]]:
    """Candidates for the default, fast ones first: two row tiles a warp where registers last, so that both share what is read of keys and
    values; all keys of a sequence resident, where two blocks or more fit with them; small tiles, so that registers allow for many warps.
    """
    head_dim, half = problem.block.head_dim, math in _WEIGHTS_OF_16_BITS
    sums, polynomial = tricks(problem, math)
    rows = 2 if head_dim <= {"bf16": 64, "fp16": 64, "fp16x3": 32}.get(math, 0) else 1
    tile = 16 if math == "fp16x3" else 32
    shapes: tuple[tuple[int, int, int, int], ...] = ((4, 1, tile, 2), (4, 1, 16, 2), (2, rows, tile, 4), (2, 1, 16, 4), (1, 1, 16, 4))
    if head_dim <= 64:
        more, fewer = (8, rows, tile, 2), (4, rows, tile, 3)
        large = problem.length * head_dim > (2**13 if half else 2**12)  # more than 32 KB of keys and values
        shapes = (more, fewer, *shapes) if large and rows == 2 else (fewer, *shapes)
    few = ((4, rows, tile, 1), (4, 1, 16, 1), (2, 1, 16, 1), (1, 1, 16, 1))
    tiles = ceil_div(problem.length, 16)
    for stages, (warps, each, key_tile, blocks) in (*itertools.product((1, 3, 2), shapes), *itertools.product((3, 2), few)):
        if warps * each <= max(1, tiles):
            yield {
                "attn_warps": warps, "attn_rows": each, "attn_key_tile": key_tile, "attn_stages": stages, "attn_blocks": blocks,
                "attn_sums": sums, "attn_polynomial": polynomial,
            }  # fmt: skip
