"""Rendering: from a block's configurations to one CUDA translation unit, strictly and deterministically."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import jinja2

from codegen.config import Config
from codegen.families import Plan, plan_of
from codegen.layout import ceil_div
from codegen.resident import ResidentPlan
from codegen.sequence import SequencePlan
from codegen.spec import BlockSpec, SpecError
from codegen.staged import StagedPlan
from codegen.streamed_plan import StreamedPlan
from codegen.target import Target

TEMPLATES = Path(__file__).resolve().parent.parent / "templates"


PACK_THREADS = 128

WEIGHTS = ("norm_weight", "norm_bias", "qkv_weight", "qkv_bias", "out_weight", "out_bias")
"""A kernel's names for the parameters of its axis: `norm_weight` of a row kernel is the block's row_norm.weight. A block has those of
its `parameters`."""
USUAL_WEIGHTS = BlockSpec().parameters
TERMS = ("key_mask", "logit_bias")
"""A kernel's names for what changes its logits, of which a block has its `terms`."""


@dataclass(frozen=True)
class Kernel:
    """How one kernel of a source is launched, and with what.

    axis: whose kernel it is; "" for one of all axes, whose arguments say whose weights they are: "row_qkv_weight".
    arguments: the tensors it takes, in order: "x" (what its axis reads: the block's input, or y where an earlier axis has
        written), "y" (the block's output), one of WEIGHTS or TERMS, or one of the source's scratch buffers. All start on 16 bytes and are
        contiguous; x and y are (batch, height, width, dim). The last argument is an int, the number of items.
    items: what that number counts, "sequences" (batch * lines), "row_tiles" (16 tokens of a sequence, its last ones fewer), "tokens"
        (batch * height * width), or "chunks", of which there are `fixed` whatever the batch.
    items_per_block, blocks_per_group: grid.x is ceil(items / items_per_block) * blocks_per_group; the blocks of a group share items.
    threads, shared_bytes: of a block; the shared memory is dynamic.
    dependent_launch: it may be launched with programmatic stream serialization behind the kernel before it (_dependent).
    """

    name: str
    axis: str
    threads: int
    shared_bytes: int
    items_per_block: int
    dependent_launch: bool
    arguments: tuple[str, ...] = ("x", "y", *USUAL_WEIGHTS)
    items: str = "sequences"
    blocks_per_group: int = 1
    fixed: int = 0

    def count(self, spec: BlockSpec, batch: int) -> int:
        """The items of a batch: the kernel's last argument."""
        if self.fixed:
            return self.fixed
        problem = spec.problem(self.axis)
        each = {"sequences": 1, "row_tiles": ceil_div(problem.length, 16), "tokens": problem.length}
        return batch * problem.lines * each[self.items]

    def blocks(self, spec: BlockSpec, batch: int) -> int:
        """Blocks of a launch."""
        return ceil_div(self.count(spec, batch), self.items_per_block) * self.blocks_per_group

    def tensor(self, spec: BlockSpec, argument: str) -> str:
        """What `argument` is in the whole block: "x", "y", a scratch buffer's name, an input's, e.g. row_bias, or a parameter's,
        e.g. row_norm.weight."""
        if argument == "x" and self.axis != spec.axes[0]:
            return "y"
        if argument == "logit_bias":
            return f"{self.axis}_bias"
        axis, part = (self.axis, argument) if self.axis else argument.partition("_")[::2]
        return f"{axis}_{part.replace('_', '.')}" if part in WEIGHTS else argument


@dataclass(frozen=True)
class Source:
    """A CUDA translation unit (device code alone), its kernels in the order of launching, and the scratch buffers that they
    pass data in: (name, elements of the block's dtype) for one image of the batch, and in `packed` for all of it."""

    spec: BlockSpec
    text: str
    kernels: tuple[Kernel, ...]
    scratch: tuple[tuple[str, int], ...] = ()
    packed: tuple[tuple[str, int], ...] = ()

    def buffers(self, batch: int) -> dict[str, int]:
        """Scratch buffer -> its elements for a batch."""
        return {name: batch * elements for name, elements in self.scratch} | dict(self.packed)

    def arch(self, target: Target) -> str:
        """What to compile for: wgmma is of the architecture's own features, which other GPUs need not have (PTX ISA, sm_90a)."""
        return f"{target.arch}a" if "wgmma" in self.text else target.arch

    @property
    def digest(self) -> str:
        """SHA-256 of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()


@lru_cache(maxsize=1)
def environment() -> jinja2.Environment:
    """The one Jinja environment: an undefined name is an error, output is plain text with Unix line ends."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters["declared"] = lambda names: [
        f"const {'unsigned char' if name == 'key_mask' else 'Element'}* __restrict__ {name}" for name in names
    ]
    made.globals["verbatim"] = verbatim
    made.globals["stage"] = stage
    return made


def verbatim(name: str) -> str:
    """The text of templates/`name`, which is plain CUDA: not a template, so that it can be linted and compiled alone."""
    return (TEMPLATES / name).read_text().rstrip("\n")


def stage(name: str, spec: BlockSpec, **chosen: object) -> str:
    """The text of templates/`name`: plain CUDA but for the lines that variants of the block, or what is `chosen`, add or leave out."""
    return environment().get_template(name).render(spec=spec, **chosen).rstrip("\n")


def render(spec: BlockSpec, configs: Mapping[str, Config]) -> Source:
    """The CUDA source of `spec` with one configuration for each of its axes.

    Raises SpecError when an axis has no configuration or one of no known family. Whether a configuration is legal for a
    target is its plan's `reasons`' business; rendering needs no target.
    """
    if set(configs) != set(spec.axes):
        raise SpecError(f"configurations for {sorted(configs)} given, but the block has the axes {list(spec.axes)}")
    plans: dict[str, Plan] = {axis: plan_of(spec.problem(axis), configs[axis]) for axis in spec.axes}
    families = {
        "sequence": {axis: plan for axis, plan in plans.items() if isinstance(plan, SequencePlan)},
        "staged": {axis: plan for axis, plan in plans.items() if isinstance(plan, StagedPlan)},
        "resident": {axis: plan for axis, plan in plans.items() if isinstance(plan, ResidentPlan)},
    }
    maths = sorted({plan.config.math for plan in plans.values()})
    packing = [(plan, name) for plan in plans.values() if isinstance(plan, StreamedPlan) for name in plan.packed]
    text = environment().get_template("source.cu.j2").render(spec=spec, maths=maths, packing=packing, **families)
    kernels: list[Kernel] = _pack_kernel(packing)
    scratch: dict[str, int] = {}
    packed: dict[str, int] = {}
    for axis, plan in plans.items():
        dependent = _dependent(plan, axis == spec.axes[0])
        if isinstance(plan, StreamedPlan):
            kernels += _staged_kernels(axis, plan, dependent) if isinstance(plan, StagedPlan) else _resident_kernels(axis, plan, dependent)
            for name, elements in plan.scratch:  # the axes run one after the other, and so can share
                scratch[name] = max(elements, scratch.get(name, 0))
            packed |= dict(plan.packed_scratch)
        else:
            kernels.append(_sequence_kernel(axis, plan, dependent))
    return Source(spec, text, tuple(kernels), tuple(scratch.items()), tuple(packed.items()))


def _dependent(plan: Plan, first: bool) -> bool:
    """Whether the first kernel of an axis may be launched with programmatic stream serialization: behind `axial_pack` where its axis is
    the `first`, else behind the last kernel of the axis before.

    Such a kernel begins when all blocks of the one before have begun, and each of its blocks waits for the end of that one
    (wait_for_previous_kernel). What keeps this right for every mix of families:

    - The first kernel of a forward is launched normally. When it begins, what wrote x, the weights and the logits' terms has ended, and
      so has the forward before. What is read of these alone is read without waiting, as the first axis' x is by its norm.
    - All else (packed weights, scratch, y, and so the second axis' x) is touched behind the wait alone. So a write meets neither a read
      nor a write of an earlier kernel, of either axis. A block has waited when one thread has and a barrier is behind it, because what
      was written is then visible to the grid.
    - As a block ends after its wait, a kernel's end means that all kernels before it have ended, and it is enough to wait for the one
      directly before. The second axis' weights are packed when the first axis' last kernel has ended: that has waited for packing, or
      was launched normally, as every other kernel is, when packing had ended. While it runs they need not be.

    So a kernel that does not wait must be launched normally: that of `sequence` where it is the first axis', though behind packing, and
    that of `staged` unless it multiplies by warpgroups and normalises itself. A second axis of `staged`, whose x is not waited for, is
    so too.
    """
    if isinstance(plan, StagedPlan):
        return first and "qkv" in plan.packed and not plan.operand_kernel
    return plan.config.dependent_launch and (isinstance(plan, ResidentPlan) or not first)


def _sequence_kernel(axis: str, plan: SequencePlan, dependent: bool) -> Kernel:
    return Kernel(
        name=f"axial_{axis}",
        axis=axis,
        threads=plan.threads,
        shared_bytes=plan.shared_bytes,
        items_per_block=plan.config.sequences * plan.config.rounds,
        dependent_launch=dependent,
        arguments=("x", "y", *plan.problem.block.parameters, *plan.problem.block.terms),
    )


def _staged_kernels(axis: str, plan: StagedPlan, dependent: bool) -> list[Kernel]:
    used, block = plan.kernels, plan.problem.block
    query, key, value, attended = (name for name, _ in plan.scratch)
    norm = ("x", *block.pre_norm_parameters)

    def kernel(stage: str, items: str, per_block: int, group: int, arguments: tuple[str, ...]) -> Kernel:
        threads, shared = used[stage][:2]
        return Kernel(f"axial_{axis}_{stage}", axis, threads, shared, per_block, dependent and stage == "qkv", arguments, items, group)

    qkv = (*((attended,) if plan.operand_kernel else norm), *_read(plan, "qkv"), query, key, value)
    out = (attended, *(("x",) if block.residual else ()), "y", *_read(plan, "out"))
    operand = []
    if plan.operand_kernel:
        rows = plan.qkv.row_tiles
        operand = [kernel("operand", "row_tiles", rows, rows // plan.operand_row_tiles, (*norm, attended))]
    return [
        *operand,
        kernel("qkv", "row_tiles", plan.qkv.row_tiles, plan.qkv.parts, qkv),
        kernel("attention", "sequences", 1, block.heads * plan.attention.groups, (query, key, value, attended, *block.terms)),
        kernel("out", "row_tiles", plan.out.row_tiles, plan.out.parts, out),
        *_norm_kernel(axis, plan),
    ]


def _resident_kernels(axis: str, plan: ResidentPlan, dependent: bool) -> list[Kernel]:
    block, (threads, shared) = plan.problem.block, plan.kernels["block"][:2]
    scratch = tuple(name for name, _ in plan.scratch)
    arguments = ("x", *block.pre_norm_parameters, *_read(plan, "qkv"), *scratch, "y", *_read(plan, "out"), *block.terms)
    kernel = Kernel(f"axial_{axis}_block", axis, threads, shared, plan.block_tiles, dependent, arguments, "row_tiles")
    return [kernel, *_norm_kernel(axis, plan)]


def _read(plan: StreamedPlan, product: str) -> tuple[str, ...]:
    """What a product reads: its weights, packed or not, and a bias."""
    packed = {f"{name}_weight": plan.packed_name(name) for name in plan.packed}
    return tuple(packed.get(name, name) for name in plan.problem.block.parameters_of(product))


def _pack_kernel(packing: Sequence[tuple[StreamedPlan, str]]) -> list[Kernel]:
    """One kernel ahead of all others for the packed products of all axes: a launch takes about as long as packing itself."""
    if not packing:
        return []
    chunks = sum(plan.packed[name].chunks for plan, name in packing)
    weights = (f"{plan.problem.axis}_{name}_weight" for plan, name in packing)
    arguments = (*weights, *(plan.packed_name(name) for plan, name in packing))
    return [Kernel("axial_pack", "", PACK_THREADS, 0, PACK_THREADS, False, arguments, "chunks", fixed=chunks)]


def _norm_kernel(axis: str, plan: StreamedPlan) -> list[Kernel]:
    block = plan.problem.block
    if not block.post_norm:
        return []
    arguments = ("y", *block.parameters_of("norm"))
    return [Kernel(f"axial_{axis}_norm", axis, plan.norm_threads, 0, plan.norm_threads // 32, False, arguments, "tokens")]
