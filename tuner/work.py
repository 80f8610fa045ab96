"""What a kernel of the `sequence` family has to do, counted from its plan: instructions, products, bytes and waits.

Counts follow templates/: a stage's instructions are those of its busiest warp (which nothing can overlap) and of its block
(which share a multiprocessor's four schedulers). Latencies, and how much of them other warps hide, are rounded from what
fits trials on an H200. What the counts are worth in time is for tuner/predict.py to say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

from codegen.resident import ResidentPlan
from codegen.sequence import SequencePlan
from codegen.spec import AxisProblem, BlockSpec
from codegen.target import Target
from tuner.trial import Resources

L2_CYCLES, L1_CYCLES = 300, 35
L2_BYTES_PER_CYCLE = 64  # that one multiprocessor draws from L2
SCHEDULERS = 4  # of a multiprocessor, each issuing one instruction a cycle
TILE_FLOP = 2 * 16 * 8 * 8
NORM_SUMS = {"layer": 2, "rms": 1, "none": 0}
"""Sums over a token's channels that a norm takes."""


@dataclass(frozen=True)
class Parts:
    """The parts of one kernel's time, in microseconds at the card's nominal rates.

    launch: 1; tensor: products on tensor cores; issue: all instructions of a multiprocessor; serial: those of the busiest
    warp, one a cycle; shared: wavefronts; wait: round trips to memory; grid: x and y; weights: from L2; spill: local memory.
    """

    launch: float
    tensor: float
    issue: float
    serial: float
    shared: float
    wait: float
    grid: float
    weights: float
    spill: float


NAMES = tuple(f.name for f in fields(Parts))


@dataclass(frozen=True)
class _Math:
    """Instructions of a warp, for tiles of 16 rows, 8 columns and 8 indices of the sum.

    product: one tile product; load_a: operand A's tile (16 x 8), weights: 8 x 8 weights read 2 at a time, key, value: 8 x 8 of
    these; share: handing a tile of attention weights to the lanes that need it; split_a, split_b: splitting or rounding a
    tile of A or B at each use; split_pair: splitting or rounding two values of a lane when they are stored, split_weights: when
    weights are read.
    """

    product: float
    load_a: float = 1.0
    weights: float = 1.0
    key: float = 0.5
    value: float = 2.0
    share: float = 0.0
    split_a: float = 0.0
    split_b: float = 0.0
    split_pair: float = 0.0
    split_weights: float = 0.0


MATHS = {
    "ffma": _Math(product=32.0, load_a=4.0, weights=8.0, key=4.0, value=8.0, share=16.0),
    "tf32": _Math(product=1.0, split_a=4.0, split_b=2.0),
    "tf32x3": _Math(product=3.0, split_a=8.0, split_b=4.0),
    # mma.m16n8k16 takes 16 indices at once; operands are split once, when stored: pack, unpack, subtract, scale, pack
    "fp16x3": _Math(product=1.5, value=0.5, split_pair=7.0, split_weights=7.0),
    # weights are operands as they are in memory; pages of A, keys and values hold twice as much
    "bf16": _Math(product=0.5, load_a=0.5, key=0.25, value=0.25, split_pair=1.0),
    "fp16": _Math(product=0.5, load_a=0.5, key=0.25, value=0.25, split_pair=1.0),
}


@dataclass(frozen=True)
class _Stage:
    """One stage of one block. warp, block: instructions of the busiest warp and of all; wait: cycles of latency that the busiest
    warp cannot hide; tiles: tile products; wavefronts: of shared memory; weight_bytes: read from L2."""

    warp: float
    block: float
    wait: float
    tiles: float = 0.0
    wavefronts: float = 0.0
    weight_bytes: float = 0.0


def blocks_per_sm(plan: SequencePlan | ResidentPlan, registers: int, target: Target) -> int:
    """Blocks a multiprocessor holds at once (CUDA C++ Programming Guide, "Hardware Multithreading"); at least 1.

    Registers are granted to a warp in units of 256, shared memory comes with 1 KB a block of the system's own.
    """
    per_warp = math.ceil(max(registers, 16) * 32 / 256) * 256
    return max(
        1,
        min(
            target.blocks_per_sm,
            target.threads_per_sm // plan.threads,
            target.registers_per_sm // (per_warp * plan.warps),
            target.shared_per_sm // (plan.shared_bytes + 1024),
        ),
    )


def parts(plan: SequencePlan, resources: Resources, target: Target) -> Parts:
    """The parts of the time of one kernel that `resources` were compiled for."""
    c, stages = plan.config, tuple(_stages(plan))
    busiest = math.ceil(plan.blocks / target.sms)  # blocks of the multiprocessor that gets the most
    resident = min(blocks_per_sm(plan, resources.registers, target), busiest)
    waves = math.ceil(busiest / resident)
    cycle = 1.0 / target.clock  # microseconds
    products = sum(s.tiles for s in stages) * (MATHS[c.math].product if plan.tensor_cores else 0.0)
    tokens = plan.problem.sequences * plan.problem.length
    block = plan.problem.block
    # Of x, and the writing of y. The second reading of x hits L2; so does that of y for a norm, which writes it once more.
    readings = 2.0 + 0.5 * (block.residual and c.residual == "reload") + 1.5 * block.post_norm
    rounds = busiest * c.rounds  # of all blocks of that multiprocessor
    return Parts(
        launch=1.0,
        tensor=rounds * products * TILE_FLOP / (target.tf32_tflops * 1e6 / target.sms),
        issue=rounds * sum(s.block for s in stages) / SCHEDULERS * cycle,
        serial=waves * c.rounds * sum(s.warp for s in stages) * cycle,
        shared=rounds * sum(s.wavefronts for s in stages) * cycle,
        wait=waves * c.rounds * sum(s.wait for s in stages) * cycle,
        grid=plan.problem.block.itemsize * tokens * plan.dim * readings / (target.bandwidth * 1e3),
        weights=rounds * sum(s.weight_bytes for s in stages) / L2_BYTES_PER_CYCLE * cycle,
        spill=busiest * resources.local_bytes * plan.threads / 128 * cycle,
    )


def _stages(plan: SequencePlan) -> Iterator[_Stage]:
    c = plan.config
    yield _normalisation(plan)
    if plan.problem.block.post_norm:
        yield _post_norm(plan)
    if plan.in_registers:
        yield _heads(plan)
        yield _product(plan, plan.out_tiles, c.out_rows, c.out_columns, plan.inner, 2, c.prefetch == "both", False)
        return
    yield _product(plan, plan.qkv_tiles, c.qkv_rows, c.qkv_columns, plan.padded_dim, c.fragment, c.prefetch != "none", True)
    yield _attention(plan)
    yield _product(plan, plan.out_tiles, c.out_rows, c.out_columns, plan.inner, 2, c.prefetch == "both", False)


def _post_norm(plan: SequencePlan) -> _Stage:
    """The norm of the block's tokens in y, a warp a token."""
    tokens = plan.config.sequences * plan.problem.length
    turns, instructions = math.ceil(tokens / plan.warps), token_norm(plan.problem.block)
    return _Stage(turns * instructions, tokens * instructions, turns * L2_CYCLES)


def token_norm(block: BlockSpec) -> float:
    """Instructions of a warp that normalises one token of y in place."""
    return 40 + 10 * NORM_SUMS[block.norm] + (4 + 3 * NORM_SUMS[block.norm]) * math.ceil(block.dim / 32)


def _conflicts(plan: SequencePlan, buffer: str) -> float:
    """Mean extra wavefronts of one warp-wide access to a buffer."""
    found = plan.layout[buffer].conflicts().values()
    return sum(found) / len(found)


def _normalisation(plan: SequencePlan) -> _Stage:
    c, cost, vector = plan.config, MATHS[plan.config.math], plan.norm_vector
    turns = math.ceil(plan.rows / 2 * c.norm_lanes / plan.threads)
    steps = math.ceil(plan.padded_dim / (c.norm_lanes * vector))
    sums = NORM_SUMS[plan.problem.block.pre_norm]
    reductions = 2 * sums * math.log2(c.norm_lanes)  # of the sums over two tokens
    stores = steps * vector / 2  # of two channels
    store = plan.layout["normed"].accesses[0]
    instructions = 2 * steps * (2 + (2 + 2 * sums) * vector) + 2 * reductions + 20 + stores * (4 + 2 * cost.split_pair)
    wavefronts = stores * (4 * plan.operand_words + store.conflicts(plan.layout["normed"].stride))
    return _Stage(turns * instructions, turns * plan.warps * instructions, turns * L2_CYCLES, wavefronts=turns * plan.warps * wavefronts)


def _product(
    plan: SequencePlan, column_tiles: int, rows: int, columns: int, depth: int, fragment: int, prefetched: bool, splits: bool
) -> _Stage:
    """A product with weights, in units of `rows` x `columns` tiles summed over `depth`; splits: its result is the next operand."""
    c, cost, steps = plan.config, MATHS[plan.config.math], depth // 8
    row_groups, column_groups = plan.row_tiles // rows, column_tiles // columns
    across = plan.warps_across(column_groups)
    down = plan.warps // across
    column_turns, row_turns = math.ceil(column_groups / across), math.ceil(row_groups / down)
    hold = c.weights == "hold" or plan.in_registers
    read = columns * steps * (_reading(plan) * 2 / fragment + cost.split_weights)
    unit = steps * (rows * (cost.load_a + cost.split_a) + columns * cost.split_b + rows * columns * cost.product)
    unit += rows * columns * ((6 + 2 * cost.split_pair) if splits else 12)
    units, readers = row_groups * column_groups, min(down, row_groups) if hold else row_groups
    prefetched |= c.rounds > 1
    read /= c.rounds  # weights that are held for several rounds are read once
    if hold:
        warp, block = column_turns * (row_turns * unit + read), units * unit + column_groups * readers * read
        # Loads of a fill go out together, and other warps hide most of the wait.
        wait = 0.0 if plan.weights_shared else 0.2 * L2_CYCLES * (column_turns - prefetched)
    else:
        warp, block = column_turns * row_turns * (unit + read), units * (unit + read)
        wait = column_turns * row_turns * steps * (2 / fragment) * L1_CYCLES
    if not splits and c.residual == "reload":
        wait += 0.1 * L2_CYCLES * column_turns * row_turns
    wavefronts = units * rows * (steps * 4 + 4 * columns * splits) * plan.operand_words
    weight_bytes = column_groups * columns * 8 * depth * plan.problem.block.itemsize * readers / c.rounds
    return _Stage(warp, block, wait, units * rows * columns * steps, wavefronts, weight_bytes)


def _reading(plan: SequencePlan) -> float:
    """Instructions of a warp for two weights a lane: loads with addresses, or from shared memory and a share of the copies to there."""
    return MATHS[plan.config.math].weights * (1.25 if plan.weights_shared else 1.5)


def _heads(plan: SequencePlan) -> _Stage:
    """QKV product and attention of warps that have a head of a sequence each, and keep its q, k and v in registers, or some row tiles of
    a head, and read k and v from shared memory. All of these read the head's weights."""
    c, cost, steps = plan.config, MATHS[plan.config.math], plan.padded_dim // 8
    rows, head = plan.padded_length // 16, plan.padded_head_dim // 8
    heads = plan.warps // c.head_warps
    columns, passes = 3 * head, 3 * head // plan.qkv_columns
    read = columns * steps * (_reading(plan) * 2 / c.fragment + cost.split_weights) / c.rounds
    project = steps * (passes * cost.load_a + columns * cost.product) + columns * (2 + 2 * cost.split_pair) + head * 2
    keys, key_steps = c.key_tile // 8, plan.padded_length // c.key_tile
    products = 2 * keys * head * cost.product
    attend = key_steps * (products + 14 * keys + 2 * keys * cost.split_pair + 2 * (8 + 2 * head)) + head * (6 + 2 * cost.split_pair)
    attend += key_steps * term_instructions(plan.problem, keys)
    passed = head * (2 + 2 * rows) if plan.keys_shared else 0  # tiles: a row tile's k and v are stored, those of all are loaded
    attend += passed * plan.operand_words
    tiles = heads * rows * (columns * steps + 2 * keys * key_steps * head)
    wavefronts = heads * 8 * plan.operand_words * rows * (passes * steps + head + passed) / 2
    readers = plan.problem.block.heads if plan.weights_shared else plan.warps  # of a head's weights
    weight_bytes = readers * columns * 8 * plan.padded_dim * plan.problem.block.itemsize / c.rounds
    weight_bytes += heads * rows * 16 * term_bytes(plan.problem)
    first = c.prefetch != "none" or c.rounds > 1
    warp, block = read + plan.head_tiles * (project + attend), plan.warps * read + heads * rows * (project + attend)
    wait = 0.0 if plan.weights_shared else 0.2 * L2_CYCLES * (passes - first)
    return _Stage(warp, block, wait, tiles, wavefronts, weight_bytes)


def term_instructions(problem: AxisProblem, keys: int) -> float:
    """Of a warp, for 16 queries and keys * 8 keys: of a mask a load and a vote for each 32 keys, and a test for each score; of a bias
    an addressed load of two for each two scores, a scaling and a multiply-add for each."""
    mask = 8 * math.ceil(keys / 4) + 6 * keys if problem.block.key_mask else 0
    return mask + (2 * keys * (3 + 4) if problem.block.logit_bias else 0)


def term_bytes(problem: AxisProblem) -> float:
    """Of mask and bias, read for one query of a sequence and head: a byte and an element a key; the mask's are 16 queries'."""
    block = problem.block
    return problem.length * (block.key_mask / 16 + (block.itemsize if block.logit_bias else 0))


def _attention(plan: SequencePlan) -> _Stage:
    c, cost = plan.config, MATHS[plan.config.math]
    units = plan.row_tiles * plan.problem.block.heads
    turns, steps = math.ceil(units / plan.warps), plan.padded_length // c.key_tile
    keys, head = c.key_tile // 8, plan.padded_head_dim // 8
    scores = head * (cost.load_a + cost.split_a + keys * (cost.key + cost.split_b + cost.product))
    weighted = keys * (cost.share + cost.split_a + 2 * cost.split_pair + head * (cost.value + cost.split_b + cost.product))
    softmax = 14 * keys + 2 * (8 + 2 * head)
    unit = steps * (scores + softmax + weighted) + 20 + head * (6 + 2 * cost.split_pair)
    unit += steps * term_instructions(plan.problem, keys)
    tiles = 2 * units * (plan.padded_length // 8) * head
    per_tile = 2 * plan.operand_words + _conflicts(plan, "key") / 2 + _conflicts(plan, "value")
    wavefronts = tiles * per_tile + 8 * units * head * plan.operand_words
    return _Stage(turns * unit, units * unit, 0.0, tiles, wavefronts, units * 16 * term_bytes(plan.problem))
