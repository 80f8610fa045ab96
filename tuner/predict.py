"""Predicting a kernel's time without a GPU: what it has to do, at the rates of the card, weighted by a few coefficients.

A kernel's time is modelled as a sum of parts, each in microseconds at nominal rates and each growing with one kind of work:
tensor-core products, instructions, shared-memory wavefronts, bytes of x and y, bytes of weights, spilled registers, and
the chain of latencies that waves of blocks cannot hide. Coefficients are non-negative, so more work of any kind is never
predicted to be faster. They are fitted to recorded measurements (fit) and committed in calibration.json. What such a model
is good for is ranking; spearman says how good.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path

from codegen.sequence import SequenceConfig, SequencePlan
from codegen.spec import SpecError
from codegen.target import Target
from tuner.records import Record
from tuner.trial import OK, Resources

CALIBRATION = Path(__file__).with_name("calibration.json")

# Latencies in cycles, rounded from the microbenchmarks that have been published for these architectures.
_MMA_CYCLES, _SHARED_CYCLES, _GLOBAL_CYCLES, _BARRIER_CYCLES, _FMA_CYCLES = 18, 30, 600, 40, 4
_SOFTMAX_CYCLES = 80  # of one step of the streaming softmax: shuffles, exponentials, corrections
_L2_BYTES_PER_CYCLE = 64  # that one multiprocessor draws from L2


@dataclass(frozen=True)
class Parts:
    """The parts of one kernel's time, in microseconds at the card's nominal rates."""

    launch: float
    tensor: float
    issue: float
    shared: float
    grid: float
    weights: float
    spill: float
    chain: float


NAMES = tuple(f.name for f in fields(Parts))


@dataclass(frozen=True)
class Calibration:
    """One coefficient per part (1 means the nominal rate), and where they come from: a line for people."""

    coefficients: Mapping[str, float]
    origin: str

    @classmethod
    def load(cls, path: Path = CALIBRATION) -> Calibration:
        """SpecError when the file is missing or does not hold exactly one finite coefficient >= 0 per part."""
        try:
            data = json.loads(path.read_text())
            coefficients = {name: float(data["coefficients"][name]) for name in data["coefficients"]}
            origin = str(data["origin"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise SpecError(f"{path} is not a calibration: {error}") from None
        if set(coefficients) != set(NAMES) or not all(0.0 <= c < math.inf for c in coefficients.values()):
            raise SpecError(f"{path} must hold one coefficient >= 0 for each of {', '.join(NAMES)}")
        return cls(coefficients, origin)

    def save(self, path: Path = CALIBRATION) -> None:
        path.write_text(json.dumps({"origin": self.origin, "coefficients": dict(self.coefficients)}, indent=2) + "\n")

    def microseconds(self, parts: Parts) -> float:
        return sum(self.coefficients[name] * getattr(parts, name) for name in NAMES)


def blocks_per_sm(plan: SequencePlan, registers: int, target: Target) -> int:
    """Blocks a multiprocessor holds at once (CUDA C++ Programming Guide, "Hardware Multithreading"); at least 1.

    Registers are granted to a warp in units of 256, shared memory comes with 1 KB a block of the system's own.
    """
    per_warp = math.ceil(max(registers, 16) * 32 / 256) * 256
    return max(
        1,
        min(
            target.blocks_per_sm,
            target.threads_per_sm // plan.threads,
            target.registers_per_sm // (per_warp * plan.config.warps),
            target.shared_per_sm // (plan.shared_bytes + 1024),
        ),
    )


@dataclass(frozen=True)
class _Product:
    """A product of one stage, per block: `units` times, a warp computes `rows` x `columns` tiles of 16 x 8 over a sum of `depth`.

    wavefronts_a, wavefronts_b: of shared memory, for one 16 x 8 tile of operand A and one 8 x 8 tile of operand B;
    loads_b: instructions for the latter; streams: B comes from global memory at each use; weight_bytes: read from there;
    warps: how many have units.
    """

    units: int
    rows: int
    columns: int
    depth: int
    wavefronts_a: float
    wavefronts_b: float
    loads_b: float
    streams: bool
    weight_bytes: int
    warps: int

    @property
    def steps(self) -> int:
        return math.ceil(self.depth / 8)

    @property
    def tiles(self) -> int:
        """Tile products of a block, 16 x 8 x 8 each."""
        return self.units * self.rows * self.columns * self.steps

    @property
    def rounds(self) -> int:
        """Units that the busiest warp takes one after another."""
        return math.ceil(self.units / self.warps)


def _conflicts(plan: SequencePlan, buffer: str) -> float:
    """Mean extra wavefronts of one warp-wide access to a buffer."""
    found = plan.layout[buffer].conflicts().values()
    return sum(found) / len(found) if found else 0.0


def _products(plan: SequencePlan) -> list[_Product]:
    """The four products, in order. Operands in fragments are read by 16 bytes a lane, values by 4."""
    c, heads = plan.config, plan.problem.block.heads
    attention_units = plan.row_tiles * heads
    key_tiles, head_tiles = plan.padded_length // 8, plan.padded_head_dim // 8
    tile_a, tile_b = 4.0, 2.0  # wavefronts without conflicts: 512 and 256 bytes

    def weighted(column_tiles: int, rows: int, columns: int, depth: int, fragment: int) -> _Product:
        row_groups, column_groups = plan.row_tiles // rows, column_tiles // columns
        across = plan.warps_across(column_groups)
        down = c.warps // across
        rounds = math.ceil(column_groups / across) * math.ceil(row_groups / down)
        hold = c.weights == "hold"
        readers = min(down, row_groups) if hold else row_groups
        loads_b = 0.0 if hold else 2.0 / fragment * (1 if plan.tensor_cores else 2)
        units = row_groups * column_groups
        return _Product(
            units,
            rows,
            columns,
            depth,
            tile_a + _conflicts(plan, "normed"),
            0.0,
            loads_b,
            not hold,
            column_tiles * 8 * depth * 4 * readers,
            max(1, units // rounds),
        )

    return [
        weighted(plan.qkv_tiles, c.qkv_rows, c.qkv_columns, plan.padded_dim, c.fragment),
        _Product(
            attention_units,
            1,
            key_tiles,
            plan.padded_head_dim,
            tile_a + _conflicts(plan, "query"),
            tile_b + _conflicts(plan, "key"),
            0.5,
            False,
            0,
            c.warps,
        ),
        _Product(attention_units, 1, head_tiles, plan.padded_length, 0.0, tile_b + 2 * _conflicts(plan, "value"), 2.0, False, 0, c.warps),
        weighted(plan.out_tiles, c.out_rows, c.out_columns, plan.inner, 2),
    ]


def parts(plan: SequencePlan, resources: Resources, target: Target) -> Parts:
    """The parts of the time of one kernel that `resources` were compiled for."""
    c = plan.config
    busiest = math.ceil(plan.blocks / target.sms)  # blocks of the multiprocessor that gets the most
    resident = min(blocks_per_sm(plan, resources.registers, target), busiest)
    waves = math.ceil(busiest / resident)
    cycle = 1.0 / target.clock  # microseconds
    passes = {"ffma": 1, "tf32x3": 3, "fp16x3": 1.5, "tf32": 1}[c.math]  # for 8 indices of a sum; an fp16 product takes 16
    per_tile = passes if plan.tensor_cores else 32  # instructions: mma, or fused multiply-adds of a warp

    mma = instructions = wavefronts = chain = weight_bytes = 0.0
    for product in _products(plan):
        tiles_a = product.units * product.rows * product.steps
        tiles_b = product.units * product.columns * product.steps
        wavefronts += tiles_a * product.wavefronts_a + tiles_b * product.wavefronts_b
        instructions += (tiles_a if product.wavefronts_a else 0) + tiles_b * product.loads_b + product.tiles * per_tile
        if plan.tensor_cores:
            mma += product.tiles * passes
        if c.math == "tf32x3":  # masking and subtracting, for each value of a lane: 4 of a tile of A, 2 of one of B
            instructions += 2 * (4 * tiles_a + 2 * tiles_b)
        # A step waits for its loads and for the accumulators of the step before; tiles side by side overlap.
        latency = float(_MMA_CYCLES * passes if plan.tensor_cores else _FMA_CYCLES * 8) + _SHARED_CYCLES
        if product.streams:
            latency += _GLOBAL_CYCLES / 6 * product.loads_b  # from L1 or L2, partly ahead of use
        chain += product.rounds * product.steps * max(latency, product.rows * product.columns * per_tile * 2.0)
        weight_bytes += product.weight_bytes
    softmax = plan.config.sequences * plan.padded_length**2 * plan.problem.block.heads / 32 * 4
    normalising = plan.rows * plan.padded_dim / 32 * 6
    instructions += softmax + normalising + plan.rows * plan.dim / 32 * 6
    wavefronts += 2 * plan.rows * (4 * plan.inner + plan.padded_dim) / 32
    held = c.weights == "hold"
    # Round trips to global memory that a block waits for: x, weights that were not prefetched, and (half hidden) x again.
    exposed = 1.0 + (held and c.prefetch == "none") + (held and c.prefetch != "both") + 0.5 * (c.residual == "reload")
    norm_rounds = math.ceil(plan.rows * c.norm_lanes / plan.threads)
    chain += _GLOBAL_CYCLES * (exposed + norm_rounds / 2) + 3 * _BARRIER_CYCLES * (1 + math.log2(c.warps))
    softmax_steps = math.ceil(plan.row_tiles * plan.problem.block.heads / c.warps) * plan.padded_length // c.key_tile
    chain += _SOFTMAX_CYCLES * softmax_steps

    tokens = plan.problem.sequences * plan.problem.length
    grid_bytes = 4 * tokens * plan.dim * (2 + (0.5 if c.residual == "reload" else 0))  # the second reading hits L2
    tile_flop = 2 * 16 * 8 * 8
    return Parts(
        launch=1.0,
        tensor=busiest * mma * tile_flop / (target.tf32_tflops * 1e6 / target.sms),
        issue=busiest * instructions / 4 * cycle,
        shared=busiest * wavefronts * cycle,
        grid=grid_bytes / (target.bandwidth * 1e3),
        weights=busiest * weight_bytes / _L2_BYTES_PER_CYCLE * cycle,
        spill=busiest * resources.local_bytes * plan.threads / 128 * cycle,
        chain=waves * chain * cycle,
    )


@lru_cache(maxsize=1)
def calibration() -> Calibration:
    """The committed calibration."""
    return Calibration.load()


def predict(plan: SequencePlan, resources: Resources, target: Target, by: Calibration | None = None) -> float:
    """Microseconds one kernel is expected to take."""
    return (by or calibration()).microseconds(parts(plan, resources, target))


@dataclass(frozen=True)
class Sample:
    """A measurement to fit to: the parts of each kernel of a block, summed, and the microseconds of the whole."""

    parts: Parts
    measured: float


def samples(records: Iterable[Record]) -> list[Sample]:
    """What records can teach: working, measured trials with known resources, by their architecture's nominal rates."""
    from codegen.target import target as target_of

    found = []
    for record in records:
        outcome = record.outcome
        if outcome.status != OK or outcome.timing is None or not outcome.resources:
            continue
        by_axis = []
        for axis, config in outcome.candidate.configs.items():
            used = outcome.resources.get(f"axial_{axis}")
            if used is not None and isinstance(config, SequenceConfig):
                by_axis.append(parts(SequencePlan(outcome.candidate.spec.problem(axis), config), used, target_of(record.machine.arch)))
        if len(by_axis) == len(outcome.candidate.configs):
            total = Parts(**{name: sum(getattr(p, name) for p in by_axis) for name in NAMES})
            found.append(Sample(total, outcome.timing.device))
    return found


def fit(data: Sequence[Sample], origin: str, *, sweeps: int = 20_000) -> Calibration:
    """The non-negative coefficients with the least squared relative error, by coordinate descent (it converges for this
    convex problem). SpecError with fewer samples than coefficients."""
    if len(data) < len(NAMES):
        raise SpecError(f"{len(data)} measured records are too few to fit {len(NAMES)} coefficients: tune on a GPU first")
    rows = [[getattr(s.parts, name) / s.measured for name in NAMES] for s in data]
    n = len(NAMES)
    gram = [[sum(row[i] * row[j] for row in rows) for j in range(n)] for i in range(n)]
    right = [sum(row[i] for row in rows) for i in range(n)]
    found = [0.0] * n
    for _ in range(sweeps):
        largest = 0.0
        for i in range(n):
            if gram[i][i] <= 0.0:
                continue
            rest = right[i] - sum(gram[i][j] * found[j] for j in range(n) if j != i)
            new = max(0.0, rest / gram[i][i])
            largest = max(largest, abs(new - found[i]) * math.sqrt(gram[i][i] / len(rows)))
            found[i] = new
        if largest < 1e-10:
            break
    return Calibration(dict(zip(NAMES, found, strict=True)), origin)


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation of two lists of equal length, ties at their mean rank; 0 when either is constant."""
    a, b = _ranks(first), _ranks(second)
    mean = (len(a) - 1) / 2
    cross = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    norm = math.sqrt(sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b))
    return cross / norm if norm else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for at in order[start : end + 1]:
            ranks[at] = (start + end) / 2
        start = end + 1
    return ranks


def quality(data: Sequence[Sample], by: Calibration | None = None) -> float:
    """How well the model ranks measurements: Spearman's correlation of predicted and measured times."""
    model = by or calibration()
    return spearman([model.microseconds(s.parts) for s in data], [s.measured for s in data])
