"""The `staged` family: three kernels an axis, for sequences or widths that outgrow one block.

1. LayerNorm and QKV product: a block normalises some rows once, keeps them in shared memory as operand A for all of the sum, and
   turns over column tiles while the weights stream through shared memory by asynchronous copies.
   Where a sum is too long for that (engine `wgmma_streamed`), a kernel before it, 0, normalises into scratch, and operand A streams too.
2. Attention: a streaming softmax over tiles of keys; a warp has 16 queries of one head.
3. Output product, bias and residual: tiled like 1.
4. With post_norm only: the norm, of y in place. (A block of 3 has all channels of a token only where nothing else shares its rows.)

What passes between them (q, k, v and the attention's result) lies in scratch buffers as the fragments that the next kernel multiplies
(see codegen/sequence.py), in the order of the axis' tokens: every kernel reads its operands in one piece, for rows and columns alike,
and only x and y are addressed by stride. A row tile is 16 tokens of one sequence.

The tunables of the three kernels are independent groups (see StagedConfig.groups): their spaces add.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from codegen import sequence
from codegen.config import Config, tunable
from codegen.layout import ceil_div
from codegen.sequence import HALF_PARTS
from codegen.spec import AxisProblem
from codegen.streamed_attention import Attention
from codegen.streamed_attention import careful as careful_attention
from codegen.streamed_plan import StreamedPlan
from codegen.target import Target
from codegen.tiled_product import Product
from codegen.warpgroup_product import COLUMN_TILES, SUM_TILE, SUM_TILES, WARPS, WarpgroupProduct

# The first is the one to start from: fp16x3, because TF32's sums truncate, which over a sum of 256 cost the H200 1.1e-5 of the scale.
DTYPE_MATHS = sequence.DTYPE_MATHS | {"float32": ("fp16x3", "tf32x3", "ffma", "tf32")}

STREAMED = "wgmma_streamed"
_ENGINES = ("mma", "wgmma", STREAMED)
_STREAMED_FROM = 640  # indices of the sum, of both operands, from which a multiprocessor holds few rows of them beside the weights
_WARP_ROWS, _WARP_COLUMNS, _DOWN, _ACROSS = (1, 2, 4), (2, 3, 4, 6, 8, 12, 16, 24, 32), (1, 2, 4, 8, 16), (1, 2, 4, 8)
_MMA_COLUMNS, _MMA_DOWN = 8, 8  # the most that mma.sync has registers and uses for
_SUM_TILES, _STAGES, _PARTS, _BLOCKS = (16, 32, 64), (2, 3, 4), (1, 2, 3, 4, 6, 8, 12), (1, 2, 3, 4)
_CACHED = 25_000_000  # bytes, half of the L2 cache of an H100 or H200
OPERAND_THREADS = 128
"""Of a block of the kernel that normalises for a product which streams operand A."""
_PRODUCT = ("warp_rows", "warp_columns", "down", "across", "sum_tile", "stages", "parts", "blocks")


@dataclass(frozen=True)
class StagedConfig(Config):
    """One point of the `staged` family's space."""

    family: ClassVar[str] = "staged"

    math: str = tunable("tf32x3", tuple(m for maths in DTYPE_MATHS.values() for m in maths), "arithmetic of the products")

    qkv_engine: str = tunable("mma", _ENGINES, "QKV product: mma.sync, Hopper's wgmma, or that with operands streamed", before="mma")
    out_engine: str = tunable("mma", _ENGINES, "output product: mma.sync, Hopper's wgmma, or that with operands streamed", before="mma")

    qkv_warp_rows: int = tunable(4, _WARP_ROWS, "QKV product: 16-row tiles of a warp")
    qkv_warp_columns: int = tunable(4, _WARP_COLUMNS, "QKV product: 8-column tiles of a warp")
    qkv_down: int = tunable(1, _DOWN, "QKV product: warps over the rows of a block")
    qkv_across: int = tunable(4, _ACROSS, "QKV product: warps over the columns of a block's tile")
    qkv_sum_tile: int = tunable(32, _SUM_TILES, "QKV product: indices of the sum in one step")
    qkv_stages: int = tunable(3, _STAGES, "QKV product: buffers for weights under way")
    qkv_parts: int = tunable(1, _PARTS, "QKV product: blocks that share rows and divide the columns")
    qkv_blocks: int = tunable(1, _BLOCKS, "QKV product: blocks a multiprocessor must be able to hold, which caps registers")

    attn_warps: int = tunable(4, (1, 2, 4, 8), "attention: warps of a block")
    attn_rows: int = tunable(1, (1, 2), "attention: 16-query tiles of a warp", before=1)
    attn_key_tile: int = tunable(32, (16, 32, 64, 128), "attention: keys of one step of the streaming softmax")
    attn_stages: int = tunable(2, (1, *_STAGES), "attention: buffers for keys and values under way; 1: one for all of a sequence")
    attn_sums: str = tunable("add", ("add", "product"), "attention: sums of weights by additions, or by one more product", before="add")
    attn_polynomial: int = tunable(0, (0, 1, 2, 3, 4), "attention: of eight exponentials, those computed as polynomials", before=0)
    attn_blocks: int = tunable(1, _BLOCKS, "attention: blocks a multiprocessor must be able to hold, which caps registers")

    out_warp_rows: int = tunable(4, _WARP_ROWS, "output product: 16-row tiles of a warp")
    out_warp_columns: int = tunable(4, _WARP_COLUMNS, "output product: 8-column tiles of a warp")
    out_down: int = tunable(1, _DOWN, "output product: warps over the rows of a block")
    out_across: int = tunable(4, _ACROSS, "output product: warps over the columns of a block's tile")
    out_sum_tile: int = tunable(32, _SUM_TILES, "output product: indices of the sum in one step")
    out_stages: int = tunable(3, _STAGES, "output product: buffers for weights under way")
    out_parts: int = tunable(1, _PARTS, "output product: blocks that share rows and divide the columns")
    out_blocks: int = tunable(1, _BLOCKS, "output product: blocks a multiprocessor must be able to hold, which caps registers")

    @classmethod
    def groups(cls) -> dict[str, tuple[str, ...]]:
        """Kernel -> its tunables, which can be tuned with the rest held. `math` is in no group: it ties the kernels together by what
        they hand on, so a search begins with a default for each (Space.starts). Nor is an engine, on which it depends what the other
        tunables of its kernel can be: there is a start for each of these too."""
        return {
            prefix: tuple(n for n in cls.tunables() if n.startswith(f"{prefix}_") and not n.endswith("_engine"))
            for prefix in ("qkv", "attn", "out")
        }


@dataclass(frozen=True)
class StagedPlan(StreamedPlan):
    """What a configuration means for a problem: padded sizes, tiles, shared memory, threads, registers, scratch."""

    config: StagedConfig

    def _product(self, group: str, sum: int, columns: int, fragment: int, copy: int) -> Product | WarpgroupProduct:
        c = self.config
        tile = getattr(c, f"{group}_sum_tile")
        if (engine := getattr(c, f"{group}_engine")) != "mma":
            warp_columns, down, stages, parts, blocks = (
                getattr(c, f"{group}_{n}") for n in ("warp_columns", "down", "stages", "parts", "blocks")
            )
            run = self.run(warp_columns) if group == "out" else 2
            padded = ceil_div(sum, SUM_TILE) * SUM_TILE
            copy = min(copy, 2) if group == "out" else copy  # neighbours of the sum that are neighbours in operand A too
            streamed = engine == STREAMED
            return WarpgroupProduct(
                max(1, self.parts), warp_columns, down, stages, parts, blocks, padded, columns, copy, run, tile, streamed=streamed
            )
        shape: dict[str, Any] = {name: getattr(c, f"{group}_{name}") for name in _PRODUCT}
        shape["warps_across"] = shape.pop("across")
        return Product(
            math=c.math, sum=ceil_div(sum, tile) * tile, all_columns=columns, copy=copy, fragment=fragment,
            per_word=4 // self.problem.block.itemsize, norm_vector=self.norm_vector if group == "qkv" else 0,
            run=self.run(shape["warp_columns"]) if group == "out" else 2, **shape,
        )  # fmt: skip

    @property
    def norm_vector(self) -> int:
        """Channels of a token that a lane normalises at once: NORM_VEC in templates/stages/staged_norm.cuh."""
        return 4 if self.dim % 4 == 0 else 2

    @cached_property
    def qkv(self) -> Product | WarpgroupProduct:
        fragment = 2 if self.config.math == "ffma" else 4
        return self._product("qkv", self.dim, 3 * self.inner, fragment, self.copy(self.dim))

    @cached_property
    def out(self) -> Product | WarpgroupProduct:
        return self._product("out", self.inner, self.dim, 2, self.copy(self.head_dim))

    @cached_property
    def attention(self) -> Attention:
        shape: dict[str, Any] = {name.removeprefix("attn_"): getattr(self.config, name) for name in StagedConfig.groups()["attn"]}
        return Attention(
            math=self.config.math, tiles=self.tiles, padded_head_dim=self.padded_head_dim, row_tile=self.row_tile,
            biased=self.problem.block.logit_bias, **shape,
        )  # fmt: skip

    @property
    def scratch(self) -> tuple[tuple[str, int], ...]:
        """(name, elements of the block's type for one image) of what passes between the kernels: operands of as many bytes. Operand A
        of a product that streams it is in `attended` for both: when attention writes that, the QKV product has read it."""
        row_tiles = self.problem.lines * self.tiles
        sizes = dict.fromkeys(("query", "key", "value", "attended"), row_tiles * 16 * self.inner)
        for product in self.streamed.values():
            sizes["attended"] = max(sizes["attended"], product.streamed_words(row_tiles) * 4 // self.problem.block.itemsize)
        return tuple(sizes.items())

    @property
    def packed(self) -> dict[str, WarpgroupProduct]:
        """Of "qkv" and "out", the products whose weights are packed before they are multiplied."""
        return {name: p for name, p in (("qkv", self.qkv), ("out", self.out)) if isinstance(p, WarpgroupProduct)}

    @cached_property
    def kernels(self) -> dict[str, tuple[int, int, int, int]]:
        """Kernel -> threads of a block, bytes of shared memory, blocks asked for on a multiprocessor, registers estimated."""
        c = self.config
        return {
            **self.operand_kernel,
            "qkv": (self.qkv.threads, self.qkv.shared_bytes, c.qkv_blocks, max(self.qkv.registers, self._norm_registers)),
            "attention": (self.attention.threads, self.attention.shared_bytes, c.attn_blocks, self.attention.registers),
            "out": (self.out.threads, self.out.shared_bytes, c.out_blocks, self.out.registers),
            **self.norm_kernel,
        }

    @property
    def long_sums(self) -> bool:
        """Whether a product's sum begins anew."""
        return bool(self.qkv.settled or self.out.settled)

    @property
    def operand_kernel(self) -> dict[str, tuple[int, int, int, int]]:
        """The kernel that normalises ahead of a QKV product which streams its operand A."""
        if not isinstance(self.qkv, WarpgroupProduct) or not self.qkv.streamed:
            return {}
        return {"operand": (OPERAND_THREADS, 0, 1, 48 + self.qkv.norm_values)}

    @property
    def _norm_registers(self) -> int:
        if isinstance(self.qkv, WarpgroupProduct):
            return 0 if self.qkv.streamed else 48 + self.qkv.norm_values
        return 64 + 2 * ceil_div(self.qkv.sum, 32)

    @property
    def operand_row_tiles(self) -> int:
        """Row tiles that a block of that kernel normalises: one, or as many as give each of its warps a turn."""
        assert isinstance(self.qkv, WarpgroupProduct)
        return max(1, OPERAND_THREADS * self.qkv.norm_held // (16 * self.qkv.norm_lanes))

    @property
    def capped(self) -> dict[str, int]:
        """Tunable that caps registers -> threads of the block it concerns."""
        return {"qkv_blocks": self.qkv.threads, "attn_blocks": self.attention.threads, "out_blocks": self.out.threads}

    def reasons(self, target: Target) -> list[str]:
        """Why the configuration is not legal for the problem on the target; empty when it is."""
        c = self.config
        dtype = self.problem.block.dtype
        rules = [(c.math in DTYPE_MATHS[dtype], f"math {c.math} is not for {dtype}: {' or '.join(DTYPE_MATHS[dtype])}")]
        rules += self.resource_rules(target, 512)
        for group, product, length in (("qkv", self.qkv, self.dim), ("out", self.out, self.problem.block.inner)):
            column_tiles = ceil_div(product.all_columns, product.columns)
            rules += self._engine_rules(group, target)
            rules += [
                (product.parts <= column_tiles, f"{group}_parts {product.parts} exceeds {column_tiles} column tiles"),
                (
                    product.sum_tile == 16 or product.sum_tile <= 2 * length or group in self.packed,
                    f"{group}_sum_tile {product.sum_tile} adds zeros alone",
                ),
            ]
        rules += self.attention.rules()
        return [reason for holds, reason in rules if not holds]

    def _engine_rules(self, group: str, target: Target) -> list[tuple[bool, str]]:
        """What the instructions of a product ask of its tunables."""
        engine, rows, columns, down, across, sum_tile = (
            getattr(self.config, f"{group}_{name}") for name in ("engine", "warp_rows", "warp_columns", "down", "across", "sum_tile")
        )
        if engine == "mma":
            return [
                (columns <= _MMA_COLUMNS, f"{group}_warp_columns {columns} exceeds {_MMA_COLUMNS} of mma"),
                (down <= _MMA_DOWN, f"{group}_down {down} exceeds {_MMA_DOWN} of mma"),
            ]
        return [
            (target.warpgroup_products, f"{group}: {target.arch} has no wgmma"),
            (self.half, f"{group}: wgmma multiplies 16-bit operands, not those of {self.config.math}"),
            (rows == 1, f"{group}_warp_rows {rows}: a warp has one row tile of a warpgroup's product"),
            (across == 1, f"{group}_across {across}: all columns of a block are one warpgroup's"),
            (down % WARPS == 0, f"{group}_down {down}: a warpgroup is {WARPS} warps"),
            (engine != STREAMED or sum_tile == SUM_TILE, f"{group}_sum_tile {sum_tile}: operand A is streamed in tiles of {SUM_TILE}"),
            (columns in COLUMN_TILES, f"{group}_warp_columns {columns} is not of wgmma: {', '.join(map(str, COLUMN_TILES))}"),
            (sum_tile in SUM_TILES, f"{group}_sum_tile {sum_tile} is not of wgmma: {', '.join(map(str, SUM_TILES))}"),
        ]


def default(problem: AxisProblem, target: Target, math: str | None = None, engine: str | None = None) -> StagedConfig | None:
    """The configuration to start from: what a careful author would pick without measuring. None if nothing is legal.

    math: of the element type's arithmetics, the first of DTYPE_MATHS that has a legal one unless given. engine: of both products; wgmma
    where there is much to multiply and few zeros, unless given.
    """
    if math is None:
        found = (default(problem, target, m, engine) for m in DTYPE_MATHS[problem.block.dtype])
        return next((config for config in found if config is not None), None)
    chosen: dict[str, Any] = {}
    products = [_careful_product(problem, group, math, engine, target) for group in ("qkv", "out")]
    for careful in (products[0], careful_attention(problem, math), products[1]):
        for candidate in careful:
            config = StagedConfig(math=math, **{**_FRUGAL, **chosen, **candidate})
            prefix = next(iter(candidate)).split("_")[0]
            name = "attention" if prefix == "attn" else prefix
            if not any(r.startswith((name, prefix)) for r in StagedPlan(problem, config).reasons(target)):
                chosen |= candidate
                break
        else:
            return None
    config = StagedConfig(math=math, **chosen)
    return None if StagedPlan(problem, config).reasons(target) else config


def alternatives(problem: AxisProblem, target: Target, math: str) -> list[StagedConfig]:
    """Other configurations to start from than the default: the engines of the two products in every combination, but operands that are
    streamed in both or, by default, in the longer one."""
    by_engine = {engine: default(problem, target, math, engine) for engine in _ENGINES}
    found = []
    for qkv, out in ((STREAMED, STREAMED), *itertools.product(("wgmma", "mma"), repeat=2)):
        first, second = by_engine[qkv], by_engine[out]
        if first is not None and second is not None:
            values = {name: getattr(second, name) for name in StagedConfig.tunables() if name.startswith("out_")}
            found.append(dataclasses.replace(first, **values))
    return found


_FRUGAL: dict[str, Any] = {
    **{f"{group}_{name}": value for group in ("qkv", "out") for name, value in zip(_PRODUCT, (1, 2, 1, 1, 16, 2, 1, 1), strict=True)},
    "attn_warps": 1,
    "attn_rows": 1,
    "attn_key_tile": 16,
    "attn_stages": 2,
    "attn_sums": "add",
    "attn_polynomial": 0,
    "attn_blocks": 1,
}


def _careful_product(problem: AxisProblem, group: str, math: str, engine: str | None, target: Target) -> Iterator[dict[str, Any]]:
    """Candidates from fast to frugal, of the engine or, without one, of that which suits."""
    if engine is not None:
        engines = [engine]
    else:
        wgmma = target.warpgroup_products and math in HALF_PARTS
        engines = [STREAMED] * (wgmma and _long(problem, group, math, target)) + ["wgmma"] * (wgmma and _much(problem, group)) + ["mma"]
    for each in engines:
        if each == STREAMED:
            yield from _careful_streamed(problem, group, math, target)
        elif each == "wgmma":
            yield from _careful_warpgroups(problem, group, target)
        else:
            yield from _careful_tiles(problem, group)


def _long(problem: AxisProblem, group: str, math: str, target: Target) -> bool:
    """Whether a product's sum is so long that a multiprocessor holds few rows of it, and there are tiles of the result for all of them."""
    columns, length = _size(problem, group)
    return HALF_PARTS[math] * length >= _STREAMED_FROM and problem.sequences * problem.length * columns >= target.sms * 128 * 128


def _size(problem: AxisProblem, group: str) -> tuple[int, int]:
    """Columns of a product's result, and the length of its sum."""
    block = problem.block
    return (3 * block.inner, block.dim) if group == "qkv" else (block.dim, block.inner)


def _much(problem: AxisProblem, group: str) -> bool:
    """Whether a product fills a large GPU with warpgroups' tiles that are hardly padded."""
    length = _size(problem, group)[1]
    return problem.sequences * problem.length >= 8192 and 3 * ceil_div(length, SUM_TILE) * SUM_TILE <= 4 * length


def _careful_warpgroups(problem: AxisProblem, group: str, target: Target) -> Iterator[dict[str, Any]]:
    """128 rows, in two blocks of two warpgroups on a multiprocessor where shared memory allows that; then fewer of everything."""
    rows = problem.sequences * ceil_div(problem.length, 16)
    all_columns = _size(problem, group)[0]
    shapes = (
        (8, 16, 3, 2), (8, 12, 3, 2), (8, 8, 3, 2), (8, 16, 4, 1), (8, 16, 3, 1), (8, 12, 3, 1), (8, 8, 3, 1),
        (4, 16, 3, 1), (4, 12, 3, 1), (4, 8, 3, 1), (4, 8, 2, 1),
    )  # fmt: skip
    for down, warp_columns, stages, blocks in shapes:
        column_tiles = ceil_div(all_columns, 8 * warp_columns)
        if warp_columns > 8 and 3 * column_tiles * 8 * warp_columns > 4 * all_columns:
            continue  # a third more columns than there are
        few = max(1, target.sms * blocks * down // rows)  # parts that fill the GPU
        parts = max(p for p in _PARTS if p <= min(few, column_tiles))
        values = (1, warp_columns, down, 1, SUM_TILE, stages, parts, blocks)
        yield {f"{group}_engine": "wgmma"} | {f"{group}_{name}": value for name, value in zip(_PRODUCT, values, strict=True)}


def _careful_streamed(problem: AxisProblem, group: str, math: str, target: Target) -> Iterator[dict[str, Any]]:
    """128 rows and as many columns as registers allow for, so that little is read for each product; the fewest columns of zeros."""
    rows, operands = problem.sequences * ceil_div(problem.length, 16), HALF_PARTS.get(math, 1)
    columns, length = _size(problem, group)
    wide = sorted((32, 24), key=lambda each: ceil_div(columns, 8 * each) * each) if operands == 1 else []
    shapes = (*((8, each, 4) for each in wide), (8, 16, 3), (8, 12, 4), (8, 8, 3), (4, 16, 3), (4, 8, 3), (4, 8, 2))
    for down, warp_columns, stages in shapes:
        tiles = ceil_div(columns, 8 * warp_columns)
        if warp_columns > 8 and 6 * tiles * 8 * warp_columns > 7 * columns:
            continue  # a sixth more columns than there are
        parts = _sharing(ceil_div(rows, down), tiles, 32 * down * operands * length, target)
        values = (1, warp_columns, down, 1, SUM_TILE, stages, parts, 1)
        yield {f"{group}_engine": STREAMED} | {f"{group}_{name}": value for name, value in zip(_PRODUCT, values, strict=True)}


def _sharing(blocks: int, tiles: int, read: int, target: Target) -> int:
    """Blocks that share rows of `read` bytes, and divide `tiles` column tiles, where there are `blocks` blocks of rows: as many as are done
    soonest, and of these the fewest for which the rows under way stay in L2, because they are read again for each column tile."""

    def cost(parts: int) -> tuple[int, bool, int]:
        turns = ceil_div(blocks * parts, target.sms) * ceil_div(tiles, parts)
        return turns, min(blocks, target.sms // parts) * read > _CACHED, parts

    return min((parts for parts in _PARTS if parts <= tiles), key=cost)


def _careful_tiles(problem: AxisProblem, group: str) -> Iterator[dict[str, Any]]:
    """Candidates from fast to frugal: 64 rows, in two blocks of four warps on a multiprocessor, so that one multiplies while the other
    normalises or waits, or else in one of eight; fewer rows where shared memory or the rows are few."""
    rows = problem.sequences * ceil_div(problem.length, 16)  # row tiles in all
    columns, length = _size(problem, group)
    shapes = (
        (2, 4, 4, 1, 4), (1, 4, 4, 1, 8), (2, 2, 4, 1, 4), (1, 2, 4, 1, 8), (1, 2, 4, 1, 4),
        (2, 1, 4, 1, 8), (1, 1, 4, 1, 8), (1, 1, 4, 1, 4), (1, 1, 2, 1, 4), (1, 1, 2, 1, 1),
    )  # fmt: skip
    steps: tuple[tuple[int, int], ...] = ((32, 3), (32, 2), (16, 3), (16, 2))
    if problem.block.itemsize == 2 and ceil_div(length, 32) % 2 == 0:  # as many bytes a step, unless they are zeros
        steps = ((64, 3), (64, 2), *steps)
    for (blocks, warp_rows, warp_columns, down, across), (tile, stages) in itertools.product(shapes, steps):
        if warp_rows * down > rows or 8 * warp_columns * across >= 2 * columns and warp_columns > 2:
            continue
        column_tiles = ceil_div(columns, 8 * warp_columns * across)
        few = max(1, 264 * warp_rows * down // rows)  # parts that fill a large GPU twice over
        parts = max(p for p in _PARTS if p <= min(few, column_tiles))
        values = (warp_rows, warp_columns, down, across, tile, stages, parts, blocks)
        yield {f"{group}_{name}": value for name, value in zip(_PRODUCT, values, strict=True)}
