"""What the kernels of the `staged` and `resident` families have to do, counted from a plan in the terms of tuner/work.py.

The coefficients that weigh these counts were fitted to the `sequence` family: between configurations of these two, and between the
families, the prediction is a lead, not a measurement.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from codegen.resident import ResidentPlan
from codegen.staged import StagedPlan
from codegen.streamed_attention import Attention
from codegen.streamed_plan import StreamedPlan
from codegen.target import Target
from codegen.tiled_product import Product
from codegen.warpgroup_product import WarpgroupProduct
from tuner.trial import Resources
from tuner.work import L2_BYTES_PER_CYCLE, L2_CYCLES, MATHS, NAMES, SCHEDULERS, TILE_FLOP, Parts, term_bytes, term_instructions, token_norm

SPECIAL_CYCLES = 8  # of a scheduler's special-function unit for an instruction of a warp: 16 results a cycle and multiprocessor


@dataclass(frozen=True)
class _Block:
    """One block of a kernel. instructions: of its busiest warp; tiles: tile products of 16 x 8 x 8; wavefronts: of shared memory;
    read: bytes from L2; waits: cycles of latency that other warps of the block cannot hide; moved: bytes of x and y of the whole kernel."""

    blocks: int
    instructions: float
    tiles: float
    wavefronts: float
    read: float
    waits: float
    moved: float


def streamed_parts(plan: StagedPlan | ResidentPlan, resources: Mapping[str, Resources], target: Target) -> Parts:
    """The parts of the time of an axis' kernels; resources: by stage ("qkv", "attention" and "out", with "operand"
    where a product streams it, or "block"; with post-norm "norm")."""
    if isinstance(plan, ResidentPlan):
        blocks = {"block": _whole(plan)}
    else:
        blocks = {"qkv": _product(plan, plan.qkv, True), "attention": _attention(plan), "out": _product(plan, plan.out, False)}
        if plan.operand_kernel:
            blocks["operand"] = _operand(plan)
    if plan.problem.block.post_norm:
        blocks["norm"] = _post_norm(plan)
    parts = [_parts(plan, block, plan.kernels[stage][0], resources[stage], target) for stage, block in blocks.items()]
    if plan.packed:
        parts.append(_packing(plan, target))
    return Parts(**{name: sum(getattr(part, name) for part in parts) for name in NAMES})


def _packing(plan: StreamedPlan, target: Target) -> Parts:
    """The kernel that packs weights: a launch, one wait, and what it reads and writes. It packs for both axes of a pair, whose sum
    therefore has a launch too many, the same for every pair of this kind."""
    moved = 2 * 4 * sum(p.packed for p in plan.packed.values())
    none = dict.fromkeys(NAMES, 0.0)
    return Parts(**none | {"launch": 1.0, "wait": L2_CYCLES / target.clock, "grid": moved / (target.bandwidth * 1e3)})


def _parts(plan: StreamedPlan, block: _Block, threads: int, used: Resources, target: Target) -> Parts:
    registers = math.ceil(max(used.registers, 16) * 32 / 256) * 256 * threads // 32
    fitting = (
        target.blocks_per_sm,
        target.threads_per_sm // threads,
        target.registers_per_sm // registers,
        target.shared_per_sm // (used.shared_bytes + 1024),
    )
    busiest = math.ceil(block.blocks / target.sms)
    waves = math.ceil(busiest / max(1, min(*fitting, busiest)))
    cycle, warps = 1.0 / target.clock, threads / 32
    cost = MATHS[plan.config.math].product if plan.config.math != "ffma" else 0.0
    return Parts(
        launch=1.0,
        tensor=busiest * block.tiles * cost * TILE_FLOP / (target.tf32_tflops * 1e6 / target.sms),
        issue=busiest * warps * block.instructions / SCHEDULERS * cycle,
        serial=waves * block.instructions * cycle,
        shared=busiest * block.wavefronts * cycle,
        wait=waves * block.waits * cycle,
        grid=block.moved / (target.bandwidth * 1e3),
        weights=busiest * block.read / L2_BYTES_PER_CYCLE * cycle,
        spill=busiest * used.local_bytes * threads / 128 * cycle,
    )


def _operand(plan: StagedPlan) -> _Block:
    """A token at a time for a group of lanes: x is read, and its operand written to scratch."""
    block, row_tiles = plan.problem.block, plan.operand_row_tiles
    tokens = plan.problem.sequences * plan.problem.length
    rows = 16 * row_tiles
    instructions = token_norm(block) * rows / (plan.kernels["operand"][0] // 32)
    blocks = math.ceil(plan.problem.sequences * plan.tiles / row_tiles)
    read = block.itemsize * rows * plan.dim
    return _Block(blocks, instructions, 0.0, 0.0, read, L2_CYCLES, block.itemsize * tokens * plan.dim)


def _post_norm(plan: StreamedPlan) -> _Block:
    """A token a warp: y is read and written."""
    block, tokens, warps = plan.problem.block, plan.problem.sequences * plan.problem.length, plan.norm_threads // 32
    moved = 2 * block.itemsize * tokens * plan.dim
    return _Block(math.ceil(tokens / warps), token_norm(block), 0.0, 0.0, block.itemsize * warps * plan.dim, L2_CYCLES, moved)


def _product(plan: StagedPlan, p: Product | WarpgroupProduct, first: bool) -> _Block:
    return _by_warpgroups(plan, p, first) if isinstance(p, WarpgroupProduct) else _by_warps(plan, p, first)


def _by_warpgroups(plan: StreamedPlan, p: WarpgroupProduct, first: bool) -> _Block:
    """A warp's share of a warpgroup's instructions; operands do not pass through registers, and one thread starts the copies."""
    cost, tokens, itemsize = MATHS[plan.config.math], plan.problem.sequences * plan.problem.length, plan.problem.block.itemsize
    blocks = math.ceil(plan.problem.sequences * plan.tiles / p.row_tiles) * p.parts
    turns = math.ceil(p.column_tiles / p.parts)
    steps, fill = turns * (p.sum // p.sum_tile), 0.0 if p.streamed else p.row_tiles * 16 * p.sum / p.threads
    instructions = (
        steps * (40 + p.warp_rows * 4 * 6 * (2 * p.operands - 1))
        + turns * p.warp_rows * p.warp_columns * (12 + cost.split_pair)
        + fill * (6 + cost.split_pair / 2 if first else 2)
    )
    tiles = p.row_tiles * turns * (p.sum // 8) * p.warp_columns
    # Per instruction, the unit reads 64 rows of A and all columns of B, 32 bytes of each.
    products = p.row_tiles // 4 * steps * 4 * (2 * p.operands - 1)
    wavefronts = products * (64 + p.columns) * 32 / 128 + (steps * (p.a_tile + p.b_tile) + p.buffers) / 32
    read = 4.0 * steps * (p.a_tile + p.b_tile) + (0 if p.streamed else itemsize * p.row_tiles * 16 * p.sum)
    moved = itemsize * tokens * plan.dim * (2 if not first and plan.problem.block.residual else 0 if first and p.streamed else 1)
    return _Block(blocks, instructions, tiles, wavefronts, read, L2_CYCLES * (2 + 0.05 * steps), moved)


def _by_warps(plan: StagedPlan, p: Product, first: bool) -> _Block:
    cost, tokens, itemsize = MATHS[plan.config.math], plan.problem.sequences * plan.problem.length, plan.problem.block.itemsize
    blocks = math.ceil(plan.problem.sequences * plan.tiles / p.row_tiles) * p.parts
    turns = math.ceil(math.ceil(p.all_columns / p.columns) / p.parts)
    sums, steps = turns * (p.sum // 8), turns * (p.sum // p.sum_tile)
    rows, columns, warps = p.warp_rows, p.warp_columns, p.threads // 32
    unit = rows * (cost.load_a + cost.split_a) + rows * columns * cost.product
    unit += columns * (cost.weights * 2 / p.fragment + cost.split_b + cost.split_pair)
    copies = p.columns * p.sum_tile / max(p.copy, p.per_word) / p.threads
    fill = p.row_tiles * 16 * p.sum / p.threads
    instructions = sums * unit + steps * (30 + 4 * copies) + turns * rows * columns * 12 + fill * (6 + cost.split_pair / 2 if first else 1)
    a, b = plan.row_tile / (16 * plan.padded_head_dim), 1 / p.per_word  # words of an element
    wavefronts: float = warps * sums * (4 * rows * a + 2 * columns * b * (1 + p.conflicts()["weights as operand B"]))
    wavefronts += (steps * p.columns * p.sum_tile * b + p.row_tiles * 16 * p.sum * a) / 32
    read = itemsize * (steps * p.columns * p.sum_tile + p.row_tiles * 16 * p.sum)
    moved = itemsize * tokens * plan.dim * (2 if not first and plan.problem.block.residual else 1)
    waits = L2_CYCLES * (2 + 0.1 * steps * (4 - p.stages))
    return _Block(blocks, instructions, warps * sums * rows * columns, wavefronts, read, waits, moved)


def _attention(plan: StagedPlan) -> _Block:
    a, problem = plan.attention, plan.problem
    copies = 2 * plan.row_tile / 4 / a.threads  # of a row tile, by a thread
    instructions = _softmax(plan, a) + plan.tiles * copies * (2 if a.resident else 3)
    bytes_read: float = 4 * plan.row_tile * (2 * plan.tiles + a.warps * a.rows)
    wavefronts = _operands_read(plan, a) + 2 * bytes_read / 128
    blocks = problem.sequences * problem.block.heads * a.groups
    bytes_read += a.warps * a.rows * 16 * term_bytes(problem)
    waits = L2_CYCLES * (2 + (0 if a.resident else 0.1) * a.steps)
    return _Block(blocks, instructions, _attended_tiles(plan, a), wavefronts, bytes_read, waits, 0.0)


def _softmax(plan: StreamedPlan, a: Attention) -> float:
    """Instructions of a warp for the queries of its row tiles and all keys of a head, as counted in SASS for sm_90. A tile here is the 8
    keys and 16 queries of one accumulator tile, of which a lane has four scores."""
    cost, rows, keys, head = MATHS[a.math], a.rows, a.key_tile // 8, a.padded_head_dim // 8
    shared = keys * head * (cost.key + cost.value + 2 * cost.split_b)  # by a warp's row tiles
    queries = head * (cost.split_a + (0.0 if a.holds_queries else cost.load_a))
    products = 2 * head * cost.product + (cost.product if a.sums == "product" else 0.0)
    added = 0.75 if a.sums == "product" else 4.0  # sums
    added += 0.0 if plan.parts == 1 else 4.0  # rests of scores, or what they start from
    exponentials = 4 * (1 - a.polynomial / 8)
    each = products + exponentials + 4 * a.polynomial + added + cost.share + cost.split_a + 2 * cost.split_pair
    other: float = 18 + (0 if a.resident else 30)
    if _by_wgmma(plan):  # operands are read by the unit, and a warp has some 3 instructions for each of its own
        shared, each, other = 0, each - products, other + rows * 1.5 * (head + keys)
    step = max(shared + rows * (queries + keys * each) + other, SPECIAL_CYCLES * rows * keys * exponentials)
    return a.steps * (step + rows * term_instructions(plan.problem, keys)) + 60 + rows * head * 12


def _attended_tiles(plan: StreamedPlan, a: Attention) -> float:
    """Tile products of a block for one head."""
    keys, head = a.key_tile // 8, a.padded_head_dim // 8
    return a.warps * a.steps * a.rows * keys * (2 * head + (1 if a.sums == "product" else 0))


def _operands_read(plan: StreamedPlan, a: Attention) -> float:
    """Wavefronts in which a block's warps read keys and values of one head."""
    if _by_wgmma(plan):  # once for the 64 queries of four warps
        return a.warps / 4 * a.rows * 2 * plan.tiles * plan.row_tile / 32
    return 4 * a.warps * a.steps * (a.key_tile // 8) * plan.row_tile / 128


def _by_wgmma(plan: StreamedPlan) -> bool:
    return isinstance(plan, ResidentPlan) and plan.config.attention == "wgmma"


def _whole(plan: ResidentPlan) -> _Block:
    """The stages one after the other. With overlap the products for all heads but the first group are beside attention, which hides
    their waits. The second reading of x hits L2."""
    a, problem, heads = plan.attention, plan.problem, plan.problem.block.heads
    qkv, out = _by_warpgroups(plan, plan.qkv, True), _by_warpgroups(plan, plan.out, False)
    sums, outs = (p.column_tiles * (p.sum // p.sum_tile) for p in (plan.qkv, plan.out))
    waited = outs + (sums / plan.qkv.column_tiles if plan.overlaps else sums)
    moved = problem.block.itemsize * problem.sequences * problem.length * plan.dim * (2 + 0.5 * problem.block.residual)
    return _Block(
        blocks=math.ceil(problem.sequences * plan.tiles / plan.block_tiles),
        instructions=qkv.instructions + heads * _softmax(plan, a) + out.instructions,
        tiles=qkv.tiles + heads * _attended_tiles(plan, a) + out.tiles,
        wavefronts=qkv.wavefronts + heads * (_operands_read(plan, a) + 2 * plan.block_tiles * plan.row_tile / 32) + out.wavefronts,
        read=qkv.read + heads * a.warps * a.rows * 16 * term_bytes(problem) + out.read,
        waits=L2_CYCLES * (3 + 0.05 * waited),
        moved=moved,
    )
